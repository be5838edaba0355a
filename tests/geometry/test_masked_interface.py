"""If this fails, the surface inside a mask, its outliers or the volume below it are wrong."""

import numpy as np
import pytest
import scipy.ndimage

from linumpy.errors import GpuUnavailableError
from linumpy.geometry.focal import FocalCurvature, correct_focal_curvature
from linumpy.geometry.interface import crop_below_interface, find_tissue_interface, fit_interface, remove_outliers
from linumpy.mosaic.stacking import find_z_overlap
from linumpy.testing.synthetic import MosaicSpec, block, surface_depth


def slow(vol, mask, s_xy, s_z, cutting_errors):
    """The definition for a volume whose depth is last, one A-line after another."""
    values = np.where(mask & (vol > 0), np.log(np.where(vol > 0, vol, 1)), 0)
    mean = np.zeros(vol.shape)
    before = s_xy // 2
    for i, j in np.ndindex(*vol.shape[:2]):
        # SciPy's "reflect" mirrors the volume: a voxel may count twice.
        rows, columns = (
            [(k if 0 <= k < n else -1 - k if k < 0 else 2 * n - 1 - k) for k in range(c - before, c - before + s_xy)]
            for c, n in ((i, vol.shape[0]), (j, vol.shape[1]))
        )
        here = np.ix_(rows, columns)
        mean[i, j] = values[here].sum((0, 1)) / np.maximum(mask[here].sum((0, 1)), 1)
    result = np.full(vol.shape[:2], -1)
    for place in np.ndindex(*result.shape):
        inside = np.flatnonzero(mask[place])
        if not len(inside):
            continue
        last = np.array([inside[max(0, np.searchsorted(inside, z, "right") - 1)] for z in range(vol.shape[2])])
        profile = scipy.ndimage.gaussian_filter1d(mean[place][last], s_z, order=1)
        surface = min(np.ceil(inside[np.argmax(profile[inside])] + s_z / 2), vol.shape[2] - 1)
        if cutting_errors:
            level = np.abs(scipy.ndimage.gaussian_filter1d(mean[place][last], s_z))
            surface = min(surface, inside[np.argmax(level[inside])])
        result[place] = surface
    return result


@pytest.mark.parametrize("seed", range(12))
def test_same_as_the_definition(seed):
    rng = np.random.default_rng(seed)
    vol = rng.gamma(2.0, 40.0, (12, 9, 30)).astype("f4" if seed % 2 else "u2")
    mask = rng.random(vol.shape) < 0.7
    mask[3, 4] = False
    s_xy, cutting_errors = int(rng.integers(1, 7)), bool(seed % 3)
    expected = slow(vol, mask, s_xy, 2, cutting_errors)
    for axis in range(3):
        moved, inside = (np.ascontiguousarray(np.moveaxis(one, -1, axis)) for one in (vol, mask))
        got = find_tissue_interface(
            moved, s_xy, 2, detect_cutting_errors=cutting_errors, depth_axis=axis, mask=inside, device="cpu"
        )
        assert got.dtype == np.int32
        assert (got == expected).mean() > 0.98
        assert got[3, 4] == -1


@pytest.mark.parametrize("use_log", [True, False])
def test_voxels_outside_the_mask_may_be_anything(use_log):
    rng = np.random.default_rng(3)
    vol = rng.gamma(2.0, 40.0, (8, 9, 30)).astype("f4")
    mask = rng.random(vol.shape) < 0.7
    other = np.where(mask, vol, np.resize(np.array([np.nan, np.inf, -5.0, 1e30], "f4"), vol.shape))
    options = {"s_xy": 3, "s_z": 2, "use_log": use_log, "mask": mask, "device": "cpu"}
    np.testing.assert_array_equal(find_tissue_interface(other, **options), find_tissue_interface(vol, **options))


def test_the_edge_inside_a_mask():
    """Where the mask leaves noise only there is no edge; where it leaves the step, it is where it is without a mask."""
    rng = np.random.default_rng(0)
    vol = rng.gamma(30, 1, (20, 24, 100)).astype("f4")
    vol[..., 60:] *= 8
    mask = np.ones(vol.shape, bool)
    mask[:10, :, 50:] = False
    mask[3, 4] = False
    edge, contrast = find_tissue_interface(
        vol, 5, depth_axis=2, mask=mask, definition="edge", min_contrast=7, return_confidence=True
    )
    assert np.isnan(edge[:8]).all()
    assert np.isnan(contrast[3, 4]) or contrast[3, 4] == 0
    np.testing.assert_allclose(edge[12:], 59.5, atol=0.3)


def test_a_mask_that_covers_all_changes_nothing():
    vol = np.random.default_rng(0).gamma(2.0, 40.0, (20, 15, 30)).astype("f4")
    free = find_tissue_interface(vol, 5)
    assert np.array_equal(find_tissue_interface(vol, 5, mask=np.ones(vol.shape, bool)), free)
    lateral = np.ones((20, 15), bool)
    lateral[:3] = False
    got = find_tissue_interface(vol, 5, mask=lateral)
    assert (got[:3] == -1).all()
    assert np.array_equal(got[6:], free[6:])


def test_what_lies_outside_does_not_matter():
    """A bright plate above the tissue hides it, but not from a mask, and the mask's edge is no surface."""
    spec = MosaicSpec(tiles=(1, 1), tile_shape=(96, 60, 60), looks=16)
    vol = block(spec, (0, 0, 0), spec.shape)
    vol[:6] = 1e7
    mask = np.ones(vol.shape, bool)
    mask[:8] = False
    error = np.abs(find_tissue_interface(vol, s_xy=5, depth_axis=0, mask=mask) - surface_depth(spec))
    assert np.median(error) <= 1
    spoilt = vol.copy()
    spoilt[:8] = np.random.default_rng(0).uniform(0, 1e9, spoilt[:8].shape)
    a, b = (find_tissue_interface(one, depth_axis=0, mask=mask) for one in (vol, spoilt))
    assert np.array_equal(a, b)


def test_a_mask_that_does_not_fit():
    with pytest.raises(ValueError, match=r"a mask of \(3, 4, 6\)"):
        find_tissue_interface(np.ones((3, 4, 5)), mask=np.ones((3, 4, 6), bool))


def test_outliers_give_way_to_the_median():
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:60, :70]
    truth = np.rint(40 + 0.1 * y + 0.2 * x).astype(np.int32)
    surface = truth.copy()
    bad = rng.random(surface.shape) < 0.05
    surface[bad] += rng.choice([-20, 25], bad.sum()).astype(np.int32)
    unknown = (rng.random(surface.shape) < 0.02) & ~bad
    surface[unknown] = -1
    mended, outliers = remove_outliers(surface)
    assert mended.dtype == np.int32
    assert np.array_equal(outliers, bad | unknown)
    assert np.abs(mended - truth).max() <= 2
    assert np.array_equal(mended[~outliers], surface[~outliers])


def test_floats_and_nan():
    surface = 30 + np.random.default_rng(0).normal(0, 0.1, (40, 40))
    surface[4, 5], surface[9, 9], surface[30, 2] = np.nan, np.inf, 90
    mended, outliers = remove_outliers(surface, size=5)
    assert np.argwhere(outliers).tolist() == [[4, 5], [9, 9], [30, 2]]
    assert np.abs(mended - 30).max() < 1


@pytest.mark.parametrize(
    ("surface", "options", "message"),
    [
        (np.ones(4), {}, r"shape \(4,\)"),
        (np.ones((0, 4)), {}, r"shape \(0, 4\)"),
        (np.ones((4, 4)), {"size": 0}, "size=0"),
        (np.ones((4, 4)), {"threshold": 0}, "threshold=0"),
        (np.full((4, 4), -1), {}, "no known value"),
    ],
)
def test_no_outliers_of_this(surface, options, message):
    with pytest.raises(ValueError, match=message):
        remove_outliers(surface, **options)


@pytest.mark.parametrize("depth_axis", [0, 1, 2])
def test_the_tissue_below(depth_axis):
    rng = np.random.default_rng(0)
    lines = rng.integers(1, 99, (6, 7, 20)).astype("u2")
    surface = rng.integers(0, 20, (6, 7))
    surface[2, 3] = -1
    got = crop_below_interface(np.moveaxis(lines, -1, depth_axis), surface, 8, offset=-2, depth_axis=depth_axis)
    got = np.moveaxis(got, depth_axis, -1)
    assert got.shape == (6, 7, 8)
    for i, j, z in np.ndindex(6, 7, 8):
        place = surface[i, j] - 2 + z
        expected = lines[i, j, place] if surface[i, j] >= 0 and 0 <= place < 20 else 0
        assert got[i, j, z] == expected


def test_a_surface_of_floats():
    vol = np.arange(1.0, 11).reshape(10, 1, 1) * np.ones((1, 2, 2))
    surface = np.array([[1.4, 1.5], [np.nan, -0.3]])
    assert crop_below_interface(vol, surface, 2)[:, :, :].tolist() == [[[2, 3], [0, 0]], [[3, 4], [0, 0]]]
    assert crop_below_interface(vol, surface).shape == vol.shape


def test_a_surface_that_does_not_fit():
    with pytest.raises(ValueError, match=r"shape \(3, 3\)"):
        crop_below_interface(np.ones((5, 3, 4)), np.ones((3, 3)))


VOL, FLAT = np.ones((9, 3, 4), "f4"), np.ones((9, 9), "f4")
CURVATURE = FocalCurvature(tile_shape=(3, 3), vv=1, vu=0, uu=0, rms=0, tiles=1)


@pytest.mark.parametrize(
    "call",
    [
        lambda device: find_tissue_interface(VOL, mask=VOL > 0, device=device),
        lambda device: remove_outliers(FLAT, device=device)[0],
        lambda device: crop_below_interface(VOL, FLAT[:3, :4], device=device),
        lambda device: fit_interface(FLAT, "plane", device=device).surface,
        lambda device: correct_focal_curvature(VOL, CURVATURE, device=device),
        lambda device: np.array(find_z_overlap(VOL, VOL, 0.03, 0.01, 5.0, device=device)),
    ],
)
def test_a_device_of_the_caller_s_choice(monkeypatch, call):
    """Without a GPU the choice of one is an error; by default arrays are computed where they lie."""
    monkeypatch.setattr("linumpy.device.why_no_cuda", lambda *_: "there is none")
    with pytest.raises(GpuUnavailableError, match="there is none"):
        call("cuda")
    for device in ("auto", "cpu"):
        np.testing.assert_array_equal(call(device), call(None))


@pytest.mark.gpu
def test_same_on_the_gpu(cupy):
    spec = MosaicSpec(tiles=(1, 1), tile_shape=(80, 60, 70))
    vol = block(spec, (0, 0, 0), spec.shape)
    mask = np.random.default_rng(0).random(vol.shape) < 0.9
    on_device, device_mask = cupy.asarray(vol), cupy.asarray(mask)
    expected = find_tissue_interface(vol, 5, depth_axis=0, mask=mask, detect_cutting_errors=True)
    options = {"s_xy": 5, "depth_axis": 0, "detect_cutting_errors": True}
    for one, inside, device in [(on_device, device_mask, None), (on_device, mask, "cuda"), (vol, mask, "cuda")]:
        got = find_tissue_interface(one, mask=inside, device=device, **options)
        assert isinstance(got, type(one))
        assert (cupy.asnumpy(got) != expected).mean() < 0.001
    expected[5, 5] = 79
    mended, outliers = remove_outliers(cupy.asarray(expected))
    assert np.array_equal(cupy.asnumpy(mended), remove_outliers(expected)[0])
    assert np.array_equal(cupy.asnumpy(outliers), remove_outliers(expected)[1])
    below = crop_below_interface(on_device, cupy.asarray(expected), 30)
    assert np.array_equal(cupy.asnumpy(below), crop_below_interface(vol, expected, 30))
    assert isinstance(crop_below_interface(vol, expected, 30, device="cuda"), np.ndarray)
