"""If this fails, the script leaves curvature in, or a killed one leaves something that looks finished."""

import json
import shutil

import numpy as np
import pytest
import zarr

from linumpy.geometry.focal import FocalCurvature, correct_focal_curvature
from linumpy.geometry.interface import find_tissue_interface
from linumpy.io.ome import open_image, read_omezarr
from linumpy.testing.synthetic import MosaicSpec, block, surface_depth, tissue_depth, write_mosaic
from linumpy.write.writer import write_omezarr
from tests.support.budget import first
from tests.support.script_runs import check_refused, run_script

NAME, PROGRAM = "linum_detect_focal_curvature", "linum-detect-focal-curvature"
SPEC = MosaicSpec(tiles=(3, 3), tile_shape=(72, 56, 64), focal_um=30.0, water_um=100.0, curvature_um=20.0, looks=8)
TILE = ["--tile-shape", "56", "64"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_mosaic(tmp_path_factory.mktemp("written") / "mosaic.ome.zarr", SPEC, chunks=(24, 28, 64))


@pytest.fixture
def mosaic(written, tmp_path):
    """A copy of its own: tests change it."""
    return shutil.copytree(written, tmp_path / "mosaic.ome.zarr")


def values(path):
    return zarr.open_group(path, mode="r")["0"][...]


def test_a_run(mosaic, tmp_path):
    out, picture = tmp_path / "flat.ome.zarr", tmp_path / "report.png"
    words = [mosaic, out, *TILE, "--report", picture, "--s-xy", 7, "--levels", 2, "--device=cpu"]
    done = run_script(NAME, *words)
    assert (done.returncode, done.stderr) == (0, "")
    said, line = done.stdout.splitlines()
    assert said.startswith("focal curvature in voxels: ")
    assert line.startswith(f"{mosaic} -> {out} on CPU: ")

    fit = json.loads((tmp_path / "report.json").read_text())
    assert (fit["tile_shape"], fit["tiles"], fit["axes"]) == ([56, 64], 9, ["y", "x"])
    assert fit["spacing_um"] == {"z": 5.0, "y": 10.0, "x": 10.0}
    assert fit["method"]["s_xy"] == 7
    assert fit["um"]["vv"] == pytest.approx(5 * fit["voxels"]["vv"])
    assert picture.read_bytes().startswith(b"\x89PNG")

    curvature = FocalCurvature(
        tile_shape=(56, 64), **{name: fit["voxels"][name] for name in ("vv", "vu", "uu")}, rms=0.0, tiles=9
    )
    truth = (surface_depth(SPEC) - tissue_depth(SPEC))[:56, :64]
    assert np.sqrt(np.mean((curvature.depth() - truth) ** 2)) <= 0.5

    flat, spacing = read_omezarr(out)
    assert (flat.dtype, flat.chunks, spacing) == (np.float32, (24, 28, 64), SPEC.spacing_um)
    original = block(SPEC, (0, 0, 0), SPEC.shape)
    np.testing.assert_array_equal(flat[...], correct_focal_curvature(original, curvature))
    assert open_image(out).levels[1].shape == (36, 84, 96)

    def away(volume):
        """How far the surface is from that of the tissue; where along depth it is does not matter."""
        found = find_tissue_interface(volume, s_xy=7, depth_axis=0) - tissue_depth(SPEC)
        return np.sqrt(np.mean((found - np.median(found)) ** 2))

    assert away(flat[...]) < 0.7 < 1.2 < away(original)


@pytest.mark.parametrize(
    ("words", "options"),
    first(
        [
            (["--interpolate", "--fill-value", "7.5"], {"interpolate": True, "fill_value": 7.5}),
            (["--wrap"], {"wrap": True}),
        ]
    ),
)
def test_options_reach_the_correction(main, mosaic, tmp_path, words, options, capsys):
    out, picture = tmp_path / "flat.ome.zarr", tmp_path / "report.png"
    assert main([str(mosaic), str(out), *TILE, "--report", str(picture), "--device=cpu", *words]) == 0
    fit = json.loads(picture.with_suffix(".json").read_text())
    curvature = FocalCurvature(
        tile_shape=(56, 64), **{name: fit["voxels"][name] for name in ("vv", "vu", "uu")}, rms=0.0, tiles=9
    )
    expected = correct_focal_curvature(block(SPEC, (0, 0, 0), SPEC.shape), curvature, **options)
    np.testing.assert_array_equal(values(out), expected)
    plain = correct_focal_curvature(block(SPEC, (0, 0, 0), SPEC.shape), curvature)
    assert not np.array_equal(values(out), plain)


def made(folder):
    write_mosaic(folder / "mosaic.zarr", MosaicSpec(tiles=(2, 2), tile_shape=(24, 8, 8), dtype="uint16"))
    write_omezarr(folder / "flat.zarr", np.zeros((4, 4)), (1, 1))
    (folder / "kept.json").write_text("mine")
    (folder / "taken").mkdir()
    return folder


T = ["--tile-shape", "8", "8"]
BAD = {
    "half a tile shape": (["{}/mosaic.zarr", "{}/o", "--tile-shape", "8"], "expected 2 arguments"),
    "tiles too small": (["{}/mosaic.zarr", "{}/o", "--tile-shape", "8", "2"], "has 16 voxels along x, so a tile has 3"),
    "tiles too large": (["{}/mosaic.zarr", "{}/o", "--tile-shape", "17", "8"], "has 16 voxels along y"),
    "fill value": (["{}/mosaic.zarr", "{}/o", *T, "--fill-value", "-1"], "--fill-value -1.0: uint16 does not hold it"),
    "no mean": (["{}/mosaic.zarr", "{}/o", *T, "--s-xy", "0"], "--s-xy 0"),
    "report of no kind": (["{}/mosaic.zarr", "{}/o", *T, "--report", "{}/a.jpg"], "ends in .png"),
    "numbers of a report there": (["{}/mosaic.zarr", "{}/o", *T, "--report", "{}/kept.png"], "kept.json exists"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_is_refused_in_one_line(main, tmp_path, capsys, name):
    words, message = BAD[name]
    folder = made(tmp_path)
    before = sorted(folder.rglob("*"))
    check_refused(capsys, main, [word.format(folder) for word in words], PROGRAM, message)
    assert sorted(folder.rglob("*")) == before
    assert (folder / "kept.json").read_text() == "mine"


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu(main, mosaic, tmp_path, capsys):
    words = [*TILE, "--s-xy", "7", "--interpolate"]
    assert (
        main([str(mosaic), str(tmp_path / "g.zarr"), "--device=cuda", *words, "--report", str(tmp_path / "g.png")]) == 0
    )
    assert " on GPU: " in capsys.readouterr().out
    words += ["--device=cpu", "--report", str(tmp_path / "c.png")]
    assert main([str(mosaic), str(tmp_path / "c.zarr"), *words]) == 0
    on_gpu, on_cpu = (json.loads((tmp_path / f"{name}.json").read_text())["voxels"] for name in "gc")
    assert on_gpu.pop("tissue") == pytest.approx(on_cpu.pop("tissue"), abs=0.02)
    assert on_gpu == pytest.approx(on_cpu, abs=0.02)
    # The same shifts, to the last bit: they are computed on the host.
    curvature = FocalCurvature(
        tile_shape=(56, 64), **{name: on_gpu[name] for name in ("vv", "vu", "uu")}, rms=0.0, tiles=9
    )
    expected = correct_focal_curvature(block(SPEC, (0, 0, 0), SPEC.shape), curvature, interpolate=True)
    np.testing.assert_allclose(values(tmp_path / "g.zarr"), expected, rtol=1e-5)
