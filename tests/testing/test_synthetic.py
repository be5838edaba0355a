"""If this fails, synthetic mosaics depend on how they are cut, or are not what their parameters say."""

import dataclasses

import numpy as np
import pytest

from linumpy.errors import RegionError
from linumpy.io.ome import open_image
from linumpy.testing import synthetic, texture
from linumpy.testing.synthetic import MosaicSpec, block, surface_depth, tissue_depth, write_mosaic
from tests.support.stacks import consecutive_slices

SPEC = MosaicSpec(tiles=(2, 3), tile_shape=(70, 50, 40), seed=3)


def whole(spec=SPEC):
    return block(spec, (0, 0, 0), spec.shape)


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_any_box_has_the_voxels_of_the_whole(dtype):
    spec = dataclasses.replace(SPEC, dtype=dtype)
    volume, rng = whole(spec), np.random.default_rng(0)
    assert volume.dtype == dtype
    for number in range(60):
        a, b = np.sort(rng.integers(0, np.array(spec.shape) + 1, (2, 3)), axis=0)
        if number > 12:  # one voxel along an axis makes NumPy take other loops, whose rounding must be the same
            b = np.minimum(a + rng.choice([1, 1, 2, 3, 17], 3), spec.shape)
        box = tuple(slice(*pair) for pair in zip(a, b, strict=True))
        assert np.array_equal(block(spec, tuple(a), tuple(b)), volume[box])


@pytest.mark.parametrize("box", [((-1, 0, 0), (1, 1, 1)), ((0, 0, 0), (71, 1, 1)), ((5, 0, 0), (4, 1, 1))])
def test_a_box_outside(box):
    with pytest.raises(RegionError, match=r"does not lie in a mosaic of \(70, 100, 120\)"):
        block(SPEC, *box)


def test_one_voxel_wide_tiles():
    spec = MosaicSpec(tiles=(2, 2), tile_shape=(60, 1, 1), focal_um=0)
    assert np.isfinite(whole(spec)).all()
    assert surface_depth(spec).shape == (2, 2)
    assert np.array_equal(surface_depth(spec), tissue_depth(spec))


def test_water_above_tissue_below():
    volume, surface = whole(), surface_depth(SPEC)
    index = np.arange(SPEC.shape[0])[:, None, None]
    water, top = volume[index < surface - 1], volume[(index >= surface) & (index < surface + 4)]
    assert water.mean() == pytest.approx(SPEC.noise, rel=0.02)
    assert 0.7 * SPEC.peak < top.mean() < 1.1 * SPEC.peak


def test_attenuation_and_speckle_can_be_measured_back():
    flat = MosaicSpec(
        tiles=(1, 1), tile_shape=(100, 150, 150), water_um=0, tilt=(0, 0), curvature_um=0, focal_um=0, noise=0
    )
    volume = whole(flat)
    profile = volume.mean(axis=(1, 2))
    depth_mm = np.arange(100) * flat.spacing_um[0] / 1e3
    slope = np.polyfit(depth_mm, np.log(profile), 1)[0]
    assert slope == pytest.approx(-2 * flat.attenuation_per_mm, rel=0.05)
    speckle = texture.speckle((flat.seed, 2, flat.slice_number), flat.looks, (0, 0, 0), flat.shape)
    assert speckle.mean() == pytest.approx(1, abs=0.005)
    assert speckle.std() == pytest.approx(1 / np.sqrt(flat.looks), rel=0.01)


def test_the_shape_of_the_surface():
    """Formula of the docstring, written out once more for single voxels."""
    spec = dataclasses.replace(SPEC, tilt=(0.02, -0.01), curvature_um=25.0, focal_um=12.0)
    for y, x in ((0, 0), (99, 119), (49, 40), (17, 93)):
        y_um, x_um = (y - 49.5) * 10.0, (x - 59.5) * 10.0
        depth = spec.water_um + 0.02 * y_um - 0.01 * x_um + 25 * ((y_um / 500) ** 2 + (x_um / 600) ** 2)
        assert tissue_depth(spec)[y, x] == pytest.approx(depth / 5)
        v, u = (y % 50) / 49 * 2 - 1, (x % 40) / 39 * 2 - 1
        assert surface_depth(spec)[y, x] == pytest.approx((depth + 12 * (v**2 + u**2) / 2) / 5)
    assert np.array_equal(surface_depth(spec)[20:33, 7:90], surface_depth(spec, (20, 33), (7, 90)))


def test_consecutive_slices_overlap_by_exactly_so_much():
    spec = MosaicSpec(tiles=(1, 2), tile_shape=(48, 64, 64), attenuation_per_mm=0.5)
    first, second = (np.log(whole(one).astype(float)) for one in consecutive_slices(spec, 17))
    assert (surface_depth(consecutive_slices(spec, 17)[0]) <= 0).all(), "all of it is tissue"

    def correlation(overlap):
        return np.corrcoef(first[-overlap:].ravel(), second[:overlap].ravel())[0, 1]

    scores = {overlap: correlation(overlap) for overlap in range(8, 30)}
    assert max(scores, key=scores.get) == 17
    same = whole(dataclasses.replace(consecutive_slices(spec, 17)[1], slice_number=0))[:17]
    assert not np.array_equal(np.log(same.astype(float)), second[:17]), "speckle is each slice's own"


@pytest.mark.parametrize("shards", [None, (64, 64, 64)])
def test_written_as_ome_zarr(tmp_path, shards):
    seen = []
    write_mosaic(tmp_path / "m", SPEC, chunks=(32, 32, 32), shards=shards, progress=seen.append)
    image = open_image(tmp_path / "m")
    assert image.spacing == (SPEC.spacing_um,)
    assert np.array_equal(image.levels[0][...], whole())
    assert image.levels[0].chunks == (32, 32, 32)
    assert [codec.to_dict()["name"] for codec in image.levels[0].compressors] == ["zstd"]
    assert sum(seen) == SPEC.nbytes


def test_written_in_bounded_memory(tmp_path):
    """A mosaic of 64 MiB in chunks of 1 MiB, under a limit that it would not fit into whole."""
    import subprocess
    import sys

    code = (
        "import pathlib, re, sys; from linumpy.testing.synthetic import MosaicSpec, write_mosaic\n"
        "def peak():  # not ru_maxrss, which begins with that of the process that started this one\n"
        "    return int(re.search(r'VmHWM:\\s+(\\d+) kB', pathlib.Path('/proc/self/status').read_text())[1])\n"
        "write_mosaic(sys.argv[1] + '0', MosaicSpec(tiles=(1, 1), tile_shape=(8, 16, 16)))  # imports zarr and others\n"
        "spec = MosaicSpec(tiles=(4, 4), tile_shape=(64, 128, 128))\n"
        "before = peak()\n"
        "write_mosaic(sys.argv[1], spec, chunks=(64, 64, 64))\n"
        "print(peak() - before, spec.nbytes // 1024)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path / "m"], capture_output=True, text=True, check=True)
    grown, size = map(int, result.stdout.split())
    assert grown < size * 0.4


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("broken")

    monkeypatch.setattr(synthetic, "block", fail)
    with pytest.raises(RuntimeError, match="broken"):
        write_mosaic(tmp_path / "m", SPEC)
    assert list(tmp_path.iterdir()) == []
