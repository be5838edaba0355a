"""If this fails, after the whole chain of scripts the known tissue is bent, or what was filled shows.

The objective bends flat slices. What comes out must show the flat slices again, whatever the unit and the background,
and what focal correction filled must show nowhere. The oracle fills with NaN, which NumPy and the blending leave out.
"""

import csv
import itertools
import json
import shutil

import numpy as np
import pytest
import scipy.ndimage
import zarr

from linumpy.errors import MetadataError
from linumpy.geometry.focal import FocalCurvature, correct_focal_curvature, measured_planes
from linumpy.mosaic.alignment.stack import stack_registered
from linumpy.mosaic.alignment.transforms import SliceTransform, SliceTransforms
from linumpy.mosaic.io.image import open_mosaic
from linumpy.mosaic.io.measured import Correction, corrections_attribute
from linumpy.mosaic.options import ZSearch
from linumpy.mosaic.slices import stack_mosaics
from linumpy.write.writer import write_omezarr
from tests.support.budget import first, some
from tests.support.script_runs import check_refused, load
from tests.support.stacks import stack_slices
from tests.support.stores import values_of

SPACING, TILE, PLANES, SHARED, WATER = (5.0, 10.0, 10.0), (80, 72), 80, 24, 20
SIDES = TILE[0] * 2, TILE[1] * 2
#: dtype, background, unit, and the sign of the curvature: whether it fills at the start of A-lines or at their end.
CASES = some(
    [
        *itertools.product(["float32"], [0, 3, 1000], [1e-6, 1, 1e6], [-1]),
        *itertools.product(["uint16"], [0, 3, 1000], [1], [-1, 1]),
    ],
    lambda dtype, background, scale, sign: (background, scale, sign) in [(1000, 1, 1)],
)


def bend(sign):
    """How much deeper each A-line is seen, in whole voxels."""
    return np.floor(
        FocalCurvature(tile_shape=TILE, vv=sign * 3.0, vu=0.0, uu=sign * 3.0, rms=0.0, tiles=1).depth() + 0.5
    ).astype(int)


def surfaces():
    y, x = np.mgrid[: SIDES[0], : SIDES[1]]
    return WATER + 0.02 * y - 0.03 * x


def slices(background, sign):
    """Two slices of one tissue under water, the second cut PLANES - SHARED deeper, as they are and as they are seen."""
    rng = np.random.default_rng(0)
    deep = 2 * PLANES - SHARED + 40
    tissue = scipy.ndimage.gaussian_filter(rng.normal(size=(deep, *SIDES)), (3, 4, 4))
    tissue = 2000 * np.exp(0.5 * tissue / tissue.std())
    shift = np.tile(bend(sign), (2, 2))
    for number in range(2):
        first = 20 + number * (PLANES - SHARED)
        z = np.arange(PLANES)[:, None, None] - shift  # of the flat slice
        seen = np.take_along_axis(tissue, np.clip(z + first, 0, deep - 1), 0)
        bright = np.where(z >= surfaces(), seen * np.exp(-np.maximum(z - surfaces(), 0) / 60), 0)
        yield (bright + background) * rng.gamma(8, 1 / 8, z.shape)


def run(name, *words):
    assert load(name).main([str(word) for word in (*words, "--device=cpu")]) == 0


@pytest.mark.parametrize(("dtype", "background", "scale", "sign"), CASES)
def test_the_chain(tmp_path, dtype, background, scale, sign, capsys):
    seen, oracle = [], []
    (tmp_path / "flat").mkdir()
    for number, voxels in enumerate(slices(background, sign)):
        voxels = np.rint(voxels).astype(dtype) if dtype == "uint16" else (voxels * scale).astype(dtype)
        mosaic, flat = tmp_path / f"mosaic_{number}.ome.zarr", tmp_path / "flat" / f"slice_{number}.ome.zarr"
        write_omezarr(mosaic, voxels, SPACING, chunks=(20, 80, 72))
        report = tmp_path / f"{number}.png"
        run("linum_detect_focal_curvature", mosaic, flat, "--tile-shape", *TILE, "--report", report)
        fit = json.loads(report.with_suffix(".json").read_text())["voxels"]
        curvature = FocalCurvature(tile_shape=TILE, vv=fit["vv"], vu=fit["vu"], uu=fit["uu"], rms=0.0, tiles=4)
        assert np.abs(curvature.depth() - bend(sign)).max() < 1.5
        made = values_of(flat)
        assert made.dtype == voxels.dtype
        kept = correct_focal_curvature(voxels.astype(np.float64), curvature, fill_value=np.nan)
        known = np.isfinite(kept)
        assert not known.all()
        np.testing.assert_array_equal(made[known], kept[known])
        first, stop = measured_planes(curvature, SIDES, PLANES)
        z = np.arange(PLANES)[:, None, None]
        np.testing.assert_array_equal((z >= first) & (z < stop), known)
        seen.append(made)
        oracle.append(kept)

        run("linum_find_tissue_interface", flat, tmp_path / f"s_{number}.zarr")
        found = values_of(tmp_path / f"s_{number}.zarr") / 5.0
        assert np.percentile(np.abs(found - (surfaces() + 2)), 98) <= 2.5
        run("linum_find_tissue_interface", flat, tmp_path / f"e_{number}.zarr", "--definition", "edge")
        edge = values_of(tmp_path / f"e_{number}.zarr") / 5.0
        assert np.isfinite(edge).mean() > 0.85  # the others are told by infinity
        assert np.percentile(np.abs(edge - surfaces() + 0.5)[np.isfinite(edge)], 98) <= 2
        run("linum_aip", flat, tmp_path / f"a_{number}.zarr")
        np.testing.assert_allclose(values_of(tmp_path / f"a_{number}.zarr"), np.nanmean(kept, axis=0), rtol=1e-5)

    (tmp_path / "shifts.csv").write_text("fixed_id,moving_id,x_shift,y_shift,x_shift_mm,y_shift_mm\n0,1,0,0,0,0\n")
    stack = tmp_path / "stack.ome.zarr"
    words = ["--slicing-interval-mm", (PLANES - SHARED + 1) * 5e-3, "--search-range-mm", 0.02]
    run("linum_stack_slices_motor", tmp_path / "flat", tmp_path / "shifts.csv", stack, *words)
    with (tmp_path / "stack_decisions.csv").open(newline="") as file:
        (decision,) = csv.DictReader(file)
    assert int(decision["overlap"]) == SHARED
    expected = stack_slices(oracle, [SHARED])
    measured = stack_slices([np.isfinite(one).astype(np.float32) for one in oracle], [SHARED]) > 0
    measured &= np.isfinite(expected) & (expected > 0)
    got = values_of(stack)
    if dtype == "uint16":
        assert np.abs(got[measured] - np.rint(expected[measured])).max() <= 1
    else:
        np.testing.assert_allclose(got[measured], expected[measured], rtol=1e-4)
    whole = stack_slices([one.astype(np.float64) for one in seen], [SHARED])
    if background or sign > 0:  # 0 is left out of a blend anyway
        assert (whole[measured] != expected[measured]).any()  # what was filled would show


def corrected(folder, *words, levels=1, sign=-1):
    voxels = np.rint(next(slices(1000, sign))).astype("uint16")
    write_omezarr(folder / "mosaic.zarr", voxels, SPACING, chunks=(20, 80, 72), overwrite=True)
    options = ["--tile-shape", *TILE, "--overwrite", "--levels", levels]
    run("linum_detect_focal_curvature", folder / "mosaic.zarr", folder / "flat.zarr", *options, *words)
    return folder / "flat.zarr"


@pytest.mark.parametrize("words", first([["--fill-value", "60000", "--interpolate"], ["--fill-value", "0"]]))
def test_no_fill_value_shows(tmp_path, words):
    """Surface and projection are those without it: the metadata record what was filled."""
    found = {}
    for name, options in (("repeated", [one for one in words if one == "--interpolate"]), ("filled", words)):
        flat = corrected(tmp_path, *options)
        run("linum_find_tissue_interface", flat, tmp_path / f"s_{name}.zarr")
        run("linum_aip", flat, tmp_path / f"a_{name}.zarr")
        found[name] = values_of(flat), values_of(tmp_path / f"s_{name}.zarr"), values_of(tmp_path / f"a_{name}.zarr")
    assert (found["filled"][0] != found["repeated"][0]).any()
    for one, other in zip(found["filled"][1:], found["repeated"][1:], strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.percentile(np.abs(error := found["filled"][1] / 5.0 - (surfaces() + 2)), 98) <= 2.5
    assert error.shape == SIDES


@pytest.mark.parametrize("sign", [-1, 1])
def test_coarser_levels(tmp_path, sign):
    """A coarse voxel was measured if all that it is made of was."""
    flat = corrected(tmp_path, "--fill-value", "0", levels=3, sign=sign)
    known = open_mosaic(flat).measured((slice(0, PLANES), slice(0, SIDES[0]), slice(0, SIDES[1]))).mask(np)
    assert not known.all()
    for level, (rows, columns) in ((1, (slice(3, 70), slice(0, 72))), (2, (slice(5, 40), slice(7, 36)))):
        image, f = open_mosaic(flat, level), 2**level
        whole = known.reshape(PLANES // f, f, SIDES[0] // f, f, SIDES[1] // f, f).all(axis=(1, 3, 5))
        box = (slice(1, PLANES // f), rows, columns)
        np.testing.assert_array_equal(image.measured(box).mask(np), whole[box])
        run("linum_aip", flat, tmp_path / "a.zarr", "--level", level, "--overwrite")
        expected = np.nanmean(np.where(whole, image.array.read(), np.nan), axis=0)
        np.testing.assert_allclose(values_of(tmp_path / "a.zarr"), expected, rtol=1e-5)


def test_a_second_correction_knows_of_the_first(tmp_path):
    flat = corrected(tmp_path)
    words = ["--tile-shape", "40", "48", "--definition", "edge"]
    run("linum_detect_focal_curvature", flat, tmp_path / "twice.zarr", *words)
    image = open_mosaic(tmp_path / "twice.zarr")
    assert len(image.corrections) == 2
    voxels = values_of(tmp_path / "mosaic.zarr").astype(float)
    for one in image.corrections:
        voxels = correct_focal_curvature(voxels, one.curvature, fill_value=np.nan)
    box = tuple(slice(0, n) for n in voxels.shape)
    np.testing.assert_array_equal(image.measured(box).mask(np), np.isfinite(voxels))


@pytest.mark.parametrize(("resolution", "sign"), first(list(itertools.product([13.0, 10.0, 4.0], [1, -1]))))
def test_a_resampled_mosaic_keeps_what_was_filled(tmp_path, resolution, sign):
    """No voxel that counts as measured has anything of what was filled in it, and few others are given up."""
    flat = corrected(tmp_path, "--fill-value", "60000", sign=sign)
    run("linum_resample_mosaic_grid", flat, tmp_path / "new.zarr", "--resolution", resolution)
    image = open_mosaic(tmp_path / "new.zarr")
    found = image.measured(tuple(slice(0, n) for n in image.array.shape)).mask(np)
    group = zarr.open_group(flat, mode="r+")
    known = open_mosaic(flat).measured(tuple(slice(0, n) for n in group["0"].shape)).mask(np)
    shares = np.where(known, 0, 60000).astype("uint16")
    group["0"][...] = shares
    run("linum_resample_mosaic_grid", flat, tmp_path / "shares.zarr", "--resolution", resolution)
    mixed = values_of(tmp_path / "shares.zarr") > 60
    assert not (found & mixed).any()
    assert (found | mixed).mean() > 0.85


def test_what_cannot_be_recorded_is_refused(tmp_path, capsys):
    flat = corrected(tmp_path)
    capsys.readouterr()
    words = [flat, tmp_path / "o.zarr", "--wrap", "--device=cpu"]
    check_refused(capsys, load("linum_detect_focal_curvature").main, words, "linum-detect-focal-curvature", "wrap")
    group = zarr.open_group(flat, mode="r+")
    for broken in ([{}], "yes", [{"tile_shape": {"y": 0, "x": 3}, "voxels": {"yy": 1, "xy": 0, "xx": 1}}]):
        group.attrs["linumpy"] = dict(group.attrs["linumpy"]) | {"focal_corrections": broken}
        with pytest.raises(MetadataError, match="focal_corrections"):
            open_mosaic(flat)


def test_nothing_is_recorded_of_voxels_that_wrap(tmp_path):
    assert open_mosaic(corrected(tmp_path, "--wrap")).corrections == ()


def test_a_stack_of_which_one_slice_was_corrected(tmp_path):
    """What was filled there gives way to what the other slice measured."""
    curvature = FocalCurvature(tile_shape=(12, 12), vv=3.0, vu=0.0, uu=0.0, rms=0.0, tiles=1)
    recorded = {"linumpy": corrections_attribute((Correction(curvature, False),), "yx")}
    (tmp_path / "slices").mkdir()
    for number, attributes in enumerate((recorded, None)):
        voxels = np.full((10, 12, 12), 10 * (number + 1), "f4")
        write_omezarr(tmp_path / f"slices/slice_z{number}.zarr", voxels, (10, 10, 10), attributes=attributes)
    (tmp_path / "shifts.csv").write_text("fixed_id,moving_id,x_shift,y_shift,x_shift_mm,y_shift_mm\n0,1,0,0,0,0\n")
    search = ZSearch(slicing_interval_mm=0.06, search_range_mm=0.0)
    stack_mosaics(tmp_path / "slices", tmp_path / "shifts.csv", tmp_path / "stack.zarr", search)
    shared = slice(6, 10), slice(0, 12), slice(0, 12)
    known = open_mosaic(tmp_path / "slices/slice_z0.zarr").measured(shared).mask(np)
    stack = values_of(tmp_path / "stack.zarr")[shared]
    assert (stack[~known] == 20).all()
    assert (stack[known] < 20).all()
    assert 0 < known.mean() < 1


def test_a_registered_stack_of_which_the_lower_slice_was_corrected(tmp_path):
    curvature = FocalCurvature(tile_shape=(12, 12), vv=-3.0, vu=0.0, uu=0.0, rms=0.0, tiles=1)
    recorded = {"linumpy": corrections_attribute((Correction(curvature, False),), "yx")}
    (tmp_path / "s").mkdir()
    slices = []
    for n, attributes in enumerate((None, recorded)):
        voxels, matrix = np.full((10, 12, 12), 10 * (n + 1), "f4"), np.eye(4)
        write_omezarr(tmp_path / f"s/slice_z{n}.zarr", voxels, (10, 10, 10), attributes=attributes)
        matrix[0, 3] = n * 60.0
        slices.append(SliceTransform(n, f"slice_z{n}.zarr", tuple(map(tuple, matrix.tolist())), n * 60.0, 100.0))
    stack_registered(tmp_path / "s", SliceTransforms(60.0, tuple(slices)), tmp_path / "o.zarr")
    known = open_mosaic(tmp_path / "s/slice_z1.zarr").measured(np.s_[0:4, 0:12, 0:12]).mask(np)
    assert 0 < known.mean() < 1
    stack = values_of(tmp_path / "o.zarr")[6:10]
    assert (stack[~known] == 10).all()
    assert (stack[known] > 10).all()


@pytest.mark.gpu
def test_the_same_on_a_gpu(tmp_path, cupy, capsys):
    flat = corrected(tmp_path, "--fill-value", "60000")
    (tmp_path / "in").mkdir()
    for number in range(2):
        shutil.copytree(flat, tmp_path / "in" / f"slice_{number}.zarr")
    (tmp_path / "shifts.csv").write_text("fixed_id,moving_id,x_shift,y_shift,x_shift_mm,y_shift_mm\n0,1,0,0,0,0\n")
    made = {}
    for where in ("--device=cuda", "--device=cpu"):
        outputs = [tmp_path / f"{name}{where}.zarr" for name in ("surface", "edge", "aip", "stack")]
        stack = [tmp_path / "in", tmp_path / "shifts.csv", outputs[3], "--slicing-interval-mm", 0.28]
        for name, words in (
            ("linum_find_tissue_interface", [flat, outputs[0]]),
            ("linum_find_tissue_interface", [flat, outputs[1], "--definition", "edge"]),
            ("linum_aip", [flat, outputs[2]]),
            ("linum_stack_slices_motor", [*stack, "--search-range-mm", 0.02]),
        ):
            assert load(name).main([str(word) for word in (*words, where)]) == 0
        made[where] = [values_of(one) for one in outputs]
    surface, edge, aip, stack = zip(made["--device=cuda"], made["--device=cpu"], strict=True)
    assert (surface[0] != surface[1]).mean() < 0.002
    assert np.isclose(*edge, atol=0.1, equal_nan=True).mean() > 0.995
    np.testing.assert_allclose(*aip, rtol=1e-5)
    assert stack[0].shape == stack[1].shape
    assert np.abs(stack[0].astype(int) - stack[1]).max() <= 1
