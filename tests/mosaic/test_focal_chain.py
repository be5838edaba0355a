"""Mosaic, focal correction, surface, projection and stack by the scripts with default options, against known truth.

The objective bends flat slices. What comes out must show the flat slices again, whatever the unit and the background,
and what focal correction filled must show nowhere. The oracle fills with NaN, which NumPy and the blending leave out.
"""

import csv
import json

import numpy as np
import pytest
import scipy.ndimage
import zarr
from script_runs import load

from linumpy.geometry.focal import FocalCurvature, correct_focal_curvature, measured_planes
from linumpy.mosaic.image import open_mosaic
from linumpy.mosaic.stacking import stack_slices
from linumpy.write.writer import write_omezarr

SPACING, TILE, PLANES, SHARED, WATER = (5.0, 10.0, 10.0), (80, 72), 80, 24, 20
SIDES = TILE[0] * 2, TILE[1] * 2
CASES = [
    *(pytest.param("float32", bg, k, -1, id=f"float32-{bg}-{k:g}") for bg in (0, 3, 1000) for k in (1e-6, 1e6)),
    *(pytest.param("uint16", bg, 1, sign, id=f"uint16-{bg}-{sign}") for bg in (0, 3, 1000) for sign in (-1, 1)),
]


def bend(sign):
    """How much deeper each A-line is seen, in whole voxels."""
    return np.floor(FocalCurvature(TILE, sign * 3.0, 0.0, sign * 3.0, 0.0, 1).depth() + 0.5).astype(int)


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


def values(path):
    return zarr.open_group(path, mode="r")["0"][...]


def run(name, *words):
    assert load(name).main([str(word) for word in (*words, "--no-use_gpu")]) == 0




@pytest.mark.parametrize(("dtype", "background", "scale", "sign"), CASES)
def test_the_chain(tmp_path, dtype, background, scale, sign, capsys):
    seen, oracle = [], []
    (tmp_path / "flat").mkdir()
    for number, voxels in enumerate(slices(background, sign)):
        voxels = np.rint(voxels).astype(dtype) if dtype == "uint16" else (voxels * scale).astype(dtype)
        mosaic, flat = tmp_path / f"mosaic_{number}.ome.zarr", tmp_path / "flat" / f"slice_{number}.ome.zarr"
        write_omezarr(mosaic, voxels, SPACING, chunks=(20, 80, 72))
        report = tmp_path / f"{number}.png"
        run("linum_detect_focal_curvature", mosaic, flat, "--tile_shape", *TILE, "--report", report)
        fit = json.loads(report.with_suffix(".json").read_text())["voxels"]
        curvature = FocalCurvature(TILE, fit["vv"], fit["vu"], fit["uu"], 0.0, 4)
        assert np.abs(curvature.depth() - bend(sign)).max() < 1.5
        made = values(flat)
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
        found = values(tmp_path / f"s_{number}.zarr") / 5.0
        assert np.percentile(np.abs(found - (surfaces() + 2)), 98) <= 2.5
        run("linum_find_tissue_interface", flat, tmp_path / f"e_{number}.zarr", "--definition", "edge")
        edge = values(tmp_path / f"e_{number}.zarr") / 5.0
        assert np.isfinite(edge).mean() > 0.85  # the others are told by infinity
        assert np.percentile(np.abs(edge - surfaces() + 0.5)[np.isfinite(edge)], 98) <= 2
        run("linum_aip", flat, tmp_path / f"a_{number}.zarr")
        np.testing.assert_allclose(values(tmp_path / f"a_{number}.zarr"), np.nanmean(kept, axis=0), rtol=1e-5)

    (tmp_path / "shifts.csv").write_text("fixed_id,moving_id,x_shift,y_shift,x_shift_mm,y_shift_mm\n0,1,0,0,0,0\n")
    stack = tmp_path / "stack.ome.zarr"
    words = ["--slicing_interval_mm", (PLANES - SHARED + 1) * 5e-3, "--search_range_mm", 0.02]
    run("linum_stack_slices_motor", tmp_path / "flat", tmp_path / "shifts.csv", stack, *words)
    with (tmp_path / "stack_decisions.csv").open(newline="") as file:
        (decision,) = csv.DictReader(file)
    assert int(decision["overlap"]) == SHARED
    expected = stack_slices(oracle, [SHARED])
    measured = stack_slices([np.isfinite(one).astype(np.float32) for one in oracle], [SHARED]) > 0
    measured &= np.isfinite(expected) & (expected > 0)
    got = values(stack)
    if dtype == "uint16":
        assert np.abs(got[measured] - np.rint(expected[measured])).max() <= 1
    else:
        np.testing.assert_allclose(got[measured], expected[measured], rtol=1e-4)
    whole = stack_slices([one.astype(np.float64) for one in seen], [SHARED])
    assert (whole[measured] != expected[measured]).any()  # what was filled would show
