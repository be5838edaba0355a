"""If this fails, the tissue surface is elsewhere than the formula and known truth put it."""

import inspect

import numpy as np
import pytest
import scipy.ndimage
from hypothesis import given
from hypothesis import strategies as st

from linumpy.device import to_host
from linumpy.geometry.focal import FocalCurvature, correct_focal_curvature
from linumpy.geometry.interface import find_tissue_interface
from linumpy.gpu.oct import surface as surface_module
from linumpy.gpu.oct import surface_filters as surface_filters
from linumpy.testing.synthetic import MosaicSpec, block, surface_depth


def slow(vol, s_xy, s_z, use_log, order, cutting_errors, depth_axis):
    """The definition, one A-line after another."""
    vol = np.moveaxis(np.asarray(vol, np.float32), depth_axis, -1)
    if use_log:
        vol = np.log(vol, where=vol > 0, out=np.zeros_like(vol))
    vol = scipy.ndimage.uniform_filter1d(scipy.ndimage.uniform_filter1d(vol, s_xy, axis=0), s_xy, axis=1)
    result = np.empty(vol.shape[:2], np.int32)
    for place in np.ndindex(*result.shape):
        profile = scipy.ndimage.gaussian_filter1d(vol[place], s_z, order=order)
        surface = min(np.ceil(np.argmax(profile) + s_z / 2), vol.shape[-1] - 1)
        if cutting_errors:
            surface = min(surface, np.argmax(np.abs(scipy.ndimage.gaussian_filter1d(vol[place], s_z))))
        result[place] = surface
    return result


def random_volume(shape, dtype, seed):
    values = np.random.default_rng(seed).gamma(2.0, 40.0, shape)
    values[np.random.default_rng(seed + 1).random(shape) < 0.05] = 0
    return values.astype(dtype)


@given(
    st.tuples(*(st.integers(1, 14) for _ in range(3))),
    st.sampled_from(["f4", "f8", "u2", "u1", ">i2"]),
    st.integers(1, 5),
    st.sampled_from([1, 1.5, 2]),
    st.booleans(),
    st.booleans(),
    st.integers(-3, 2),
    st.integers(0, 1000),
)
def test_same_as_the_definition(shape, dtype, s_xy, s_z, use_log, cutting_errors, depth_axis, seed):
    vol = random_volume(shape, dtype, seed)
    arguments = (s_xy, s_z, use_log, 1, cutting_errors, depth_axis)
    options = {"order": 1, "detect_cutting_errors": cutting_errors, "depth_axis": depth_axis}
    got, expected = surface_module.find_tissue_interface(vol, s_xy, s_z, use_log, **options), slow(vol, *arguments)
    assert got.dtype == np.int32
    assert got.shape == expected.shape
    # Where two voxels are next to equal, the order of float32 sums decides.
    assert (got == expected).mean() >= (0.98 if got.size > 50 else 0.8)


def test_blocks_do_not_show(monkeypatch):
    vol = random_volume((40, 30, 20), "f4", 1)
    whole = surface_module.find_tissue_interface(vol, s_xy=7)
    monkeypatch.setattr(surface_filters, "_BLOCK_VOXELS", 30 * 20 * 3)
    assert (surface_module.find_tissue_interface(vol, s_xy=7) == whole).mean() > 0.999


@pytest.mark.parametrize(("looks", "voxels"), [(16, 1.0), (1, 2.0)])
def test_the_true_surface(looks, voxels):
    spec = MosaicSpec(tiles=(1, 2), tile_shape=(96, 80, 80), looks=looks)
    vol = block(spec, (0, 0, 0), spec.shape)
    error = np.abs(find_tissue_interface(vol, depth_axis=0) - surface_depth(spec))
    assert np.median(error) <= voxels


@pytest.mark.parametrize("s_z", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("use_log", [False, True])
def test_a_clean_step(s_z, use_log):
    """The edge lies between voxels 49 and 50 whatever the Gaussian; the older definition lies below it."""
    vol = np.full((3, 4, 120), 20.0, "f4")
    vol[..., 50:] = 300
    edge, contrast = find_tissue_interface(
        vol, 3, s_z, use_log, depth_axis=2, definition="edge", min_contrast=3, return_confidence=True
    )
    assert edge.dtype == contrast.dtype == np.float32
    np.testing.assert_allclose(edge, 49.5, atol=1e-3)
    assert (contrast > 5).all()
    assert (find_tissue_interface(vol, 3, s_z, use_log, depth_axis=2) == 49 + np.ceil(s_z / 2)).all()


def test_an_edge_between_voxels():
    """A voxel that the border goes through is as bright as its shares: the edge follows it, by fractions of a voxel."""
    places = np.linspace(30, 31, 21)
    vol = np.clip(np.arange(80) + 0.5 - places[:, None], 0, 1)[:, None, :].astype("f4") * 100 + 7
    edge = find_tissue_interface(vol, 1, 2, False, depth_axis=2, definition="edge")[:, 0]
    np.testing.assert_allclose(edge, places, atol=0.03)


@pytest.mark.parametrize(("tile_shape", "looks"), [((96, 80, 80), 16), ((96, 80, 80), 1), ((200, 64, 64), 4)])
def test_the_true_edge(tile_shape, looks):
    spec = MosaicSpec(tiles=(1, 2), tile_shape=tile_shape, looks=looks)
    edge = find_tissue_interface(block(spec, (0, 0, 0), spec.shape), s_xy=9, depth_axis=0, definition="edge")
    error = edge - surface_depth(spec)
    assert np.isfinite(error).mean() > 0.999
    assert abs(np.nanmedian(error)) < 0.05
    assert np.nanmedian(np.abs(error)) < (0.15 if looks == 1 else 0.1)


def test_noise_has_no_edge():
    noise = np.random.default_rng(0).gamma(4, 10, (60, 60, 200)).astype("f4")
    assert np.isnan(find_tissue_interface(noise, 5, depth_axis=2, definition="edge")).mean() > 0.995
    empty = np.zeros((4, 5, 60), "f4")
    options = {"depth_axis": 2, "definition": "edge", "return_confidence": True}
    edge, contrast = find_tissue_interface(empty, 3, min_contrast=0, **options)
    assert np.isnan(edge).all()
    assert (contrast == 0).all()
    assert np.isnan(find_tissue_interface(empty + 9, 3, **options)[0]).all()


def step_volume(surface, depth, looks=4, background=5.0, tau=np.inf, seed=0):
    """Tissue of 100 below a surface (Y, X), under water, with speckle: (Z, Y, X)."""
    below = np.arange(depth)[:, None, None] - surface
    mean = np.where(below >= 0, 100 * np.exp(-np.maximum(below, 0) / tau), 0) + background
    return (mean * np.random.default_rng(seed).gamma(looks, 1 / looks, below.shape)).astype("f4")


@pytest.mark.parametrize("slope", [0.3, 0.8, 1.0, 1.5, 2.0, 2.5, 3.0])
@pytest.mark.parametrize(("depth", "looks", "background"), [(160, 4, 5), (110, 4, 20), (160, 1, 5)])
@pytest.mark.parametrize("diagonal", [False, True])
def test_a_steep_surface(slope, depth, looks, background, diagonal):
    width = int((depth - 30) / slope)
    y, x = np.mgrid[:40, : min(width, 90)]
    truth = 15 + slope * (x * np.sqrt(0.5) + y * np.sqrt(0.5) if diagonal else x)
    truth = np.where(truth < depth - 12, truth, depth + 50)
    edge = find_tissue_interface(step_volume(truth, depth, looks, background), depth_axis=0, definition="edge")
    # Away from where the surface leaves the volume, and where it is bent by the mirror at the border.
    clear = np.ones(truth.shape, bool)
    clear[:, :8], clear[:, -8:], clear[:8], clear[-8:] = False, False, False, False
    clear &= truth < depth - 12 - 8 * slope
    assert np.isfinite(edge[clear]).mean() > 0.97
    error = np.abs(edge - (truth - 0.5))[clear & np.isfinite(edge)]
    assert np.percentile(error, 90) <= (2.5 if looks == 1 else 2)


@pytest.mark.parametrize(("tau", "looks"), [(15, 1), (15, 4), (60, 4), (150, 4)])
@pytest.mark.parametrize("background", [0, 1])
def test_tissue_from_the_first_voxel_on(tau, looks, background):
    """Its surface is 0: intensity falls from there on."""
    for above in (0, 20):
        volume = step_volume(np.full((30, 34), -above), 200, looks, background, tau)
        edge, contrast = find_tissue_interface(volume, depth_axis=0, definition="edge", return_confidence=True)
        assert (edge == 0).mean() > 0.98
        assert (contrast[edge == 0] >= 5).all()


def test_what_is_not_found_is_told_from_what_is_not_there():
    x = np.mgrid[:60, :60][1]
    noise = step_volume(np.full((60, 60), 999), 150)
    assert np.isnan(find_tissue_interface(noise, depth_axis=0, definition="edge")).mean() > 0.99
    # Brighter by and by: no edge, and no noise either.
    slow = noise * np.exp(np.arange(150) / 40)[:, None, None].astype("f4")
    assert np.isinf(find_tissue_interface(slow, depth_axis=0, definition="edge")).mean() > 0.99
    # A slope of 12 stands out in no window.
    steep = find_tissue_interface(step_volume(10 + 12.0 * x, 150), depth_axis=0, definition="edge")
    assert not np.isnan(steep[:, 2:8]).any()
    assert np.isinf(steep[:, 2:8]).any()
    assert np.isnan(steep[:, 25:]).mean() > 0.98


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("background", [0, 0.05, 5])
def test_an_edge_in_any_unit(dtype, background):
    volume = step_volume(30 + 0.2 * np.arange(40)[None, :] + np.zeros((36, 1)), 120, 4, background, 60).astype(dtype)
    volume[np.random.default_rng(1).random(volume.shape) < 0.01] = 0
    first = find_tissue_interface(volume, depth_axis=0, definition="edge")
    assert np.isfinite(first).mean() > 0.99
    assert np.abs(np.nanmedian(first - (29.5 + 0.2 * np.arange(40)))) < 0.5
    for unit in (1e-6, 1e-3, 0.9 / volume.max(), 1e6):
        np.testing.assert_allclose(
            find_tissue_interface(volume * unit, depth_axis=0, definition="edge"), first, atol=0.01
        )


def test_the_other_definition_takes_zero_for_one_unless_told():
    """As it was defined; so in a unit in which tissue is below 1, zero is brighter than tissue."""
    volume = step_volume(np.full((20, 20), 30), 80, 4, 0)
    assert np.median(find_tissue_interface(volume, depth_axis=0)) == 31
    assert abs(np.median(find_tissue_interface(volume * 1e-5, depth_axis=0)) - 31) > 5
    assert np.median(find_tissue_interface(volume * 1e-5, depth_axis=0, zero_log=-15)) == 31
    with pytest.raises(ValueError, match="zero_log=nan"):
        find_tissue_interface(volume, depth_axis=0, zero_log=float("nan"))


@pytest.mark.parametrize("interpolate", [False, True])
@pytest.mark.parametrize("background", [0, 3, 1000])
@pytest.mark.parametrize("definition", ["linumpy", "edge"])
def test_what_focal_correction_fills_is_no_surface(definition, background, interpolate):
    curvature = FocalCurvature(tile_shape=(32, 32), vv=-6.0, vu=0.0, uu=-6.0, rms=0.0, tiles=1)
    truth = 35 + np.tile(curvature.depth(), (2, 2))
    volume = np.rint(step_volume(truth, 100, 16, 0) * 20 + step_volume(np.full_like(truth, 999), 100, 16, background))
    flat = correct_focal_curvature(volume.astype("u2"), curvature, interpolate=interpolate)
    found = find_tissue_interface(flat, depth_axis=0, definition=definition)
    assert np.percentile(np.abs(found - (37 if definition == "linumpy" else 34.5)), 99) <= 2


def test_cutting_errors():
    """The brightest voxel above the surface takes its place, as it is."""
    vol = np.full((3, 3, 80), 50.0, "f4")
    vol[..., :3] = 400  # tissue from the first voxel on, and a second, steeper edge
    vol[..., 45:] = 900
    plain = find_tissue_interface(vol, 1, 2, True, depth_axis=2)
    assert (plain == 45).all()
    assert (find_tissue_interface(vol, 1, 2, True, detect_cutting_errors=True, depth_axis=2) == 45).all()
    vol[..., :3] = 5000
    for definition in ("linumpy", "edge"):
        options = {"detect_cutting_errors": True, "depth_axis": 2, "definition": definition, "min_contrast": 1}
        assert (find_tissue_interface(vol, 1, 2, True, **options) == 0).all()


def test_the_arguments_come_in_upstream_s_order():
    names = ["vol", "s_xy", "s_z", "use_log", "mask", "order", "detect_cutting_errors"]
    for function in (find_tissue_interface, surface_module.find_tissue_interface):
        parameters = inspect.signature(function).parameters.values()
        assert [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD] == names


def test_a_missing_depth_axis_is_told(caplog):
    vol = random_volume((12, 13, 14), "f4", 3)
    assert np.array_equal(find_tissue_interface(vol, 3), find_tissue_interface(vol, 3, depth_axis=2))
    assert [record.getMessage() for record in caplog.records] == [
        "depth_axis is not given: the last axis of (12, 13, 14) is taken for depth"
    ]


def test_a_depth_axis_is_only_a_name():
    vol = random_volume((12, 13, 14), "f4", 3)
    for axis in range(3):
        moved = np.ascontiguousarray(np.moveaxis(vol, -1, axis))
        assert np.array_equal(find_tissue_interface(moved, 3, depth_axis=axis), find_tissue_interface(vol, 3))


@pytest.mark.filterwarnings("error")
def test_nan_and_negative_voxels_take_no_part():
    vol = random_volume((9, 9, 30), "f4", 4)
    dirty = vol.copy()
    vol[2, 3, 4:9] = 0
    dirty[2, 3, 4:9] = [np.nan, -1, -np.inf, -0.0, np.nan]
    assert np.array_equal(find_tissue_interface(dirty, 3), find_tissue_interface(vol, 3))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("s_xy", [1, 4, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_no_number_spoils_only_the_means_over_it(value, s_xy, masked):
    """And there it is not taken for the surface: those far above and below it are found."""
    vol = np.ones((30, 40, 60), "f4")
    vol[:, :, 40:] = 20
    vol += np.random.default_rng(0).random(vol.shape, "f4") / 10
    mask = np.ones(vol.shape[:2], bool) if masked else None
    options = surface_filters.SurfaceOptions(s_xy, 2, False)
    clean = surface_filters.interface_by_filters(vol, options, mask)[0]
    vol[9, 11, 3] = value
    dirty = surface_filters.interface_by_filters(vol, options, mask)[0]
    far = np.ones(clean.shape, bool)
    far[9 - s_xy // 2 : 9 + s_xy // 2 + 1, 11 - s_xy // 2 : 11 + s_xy // 2 + 1] = False
    assert np.array_equal(clean[far], dirty[far])
    if np.isnan(value):
        assert np.array_equal(clean, dirty)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((4, 5), {}, r"shape \(4, 5\)"),
        ((4, 0, 5), {}, r"shape \(4, 0, 5\)"),
        ((4, 4, 5), {"depth_axis": 3}, "depth_axis=3"),
        ((4, 4, 5), {"s_xy": 0}, "s_xy=0"),
        ((4, 4, 5), {"s_z": 0}, "s_z=0"),
        ((4, 4, 5), {"s_z": 1e9}, r"s_z=1e\+09: the Gaussian is wider than the 5 voxels along depth"),
        ((4, 4, 5), {"definition": "upstream"}, "definition='upstream': choose 'linumpy' or 'edge'"),
        ((4, 4, 5), {"definition": "edge", "min_contrast": -1}, "min_contrast=-1"),
        ((4, 4, 5), {"definition": "edge", "min_contrast": np.nan}, "min_contrast=nan"),
        ((4, 4, 5), {"return_confidence": True}, "pass definition='edge'"),
    ],
)
def test_bad_input(shape, options, message):
    with pytest.raises(ValueError, match=message):
        find_tissue_interface(np.ones(shape), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("depth_axis", [0, 1, 2])
def test_same_on_the_gpu(cupy, depth_axis):
    spec = MosaicSpec(tiles=(1, 1), tile_shape=(80, 90, 100))
    vol = np.ascontiguousarray(np.moveaxis(block(spec, (0, 0, 0), spec.shape), 0, depth_axis))
    expected = find_tissue_interface(vol, depth_axis=depth_axis)
    on_device = cupy.asarray(vol)
    got = find_tissue_interface(on_device, depth_axis=depth_axis)
    assert isinstance(got, cupy.ndarray)
    difference = np.abs(to_host(got) - expected)
    assert difference.max() <= 1
    assert (difference == 0).mean() > 0.999
    assert isinstance(find_tissue_interface(vol, depth_axis=depth_axis, device="cuda"), np.ndarray)
    assert isinstance(find_tissue_interface(on_device, depth_axis=depth_axis, device="cpu"), cupy.ndarray)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"vol": [[[1]]]}, TypeError, "the volume is a list"),
        ({"s_xy": "9"}, ValueError, "s_xy='9': a number"),
        ({"s_xy": np.inf}, ValueError, "s_xy=inf"),
        ({"s_xy": 10**30}, ValueError, "s_xy=1.*wider than the volume"),
        ({"s_z": None}, ValueError, "s_z=None: a number"),
        ({"order": True}, ValueError, "order=True: a number"),
        ({"order": 10**30}, ValueError, "order=1.*from 0 to"),
        ({"min_contrast": "5"}, ValueError, "min_contrast='5': a number"),
        ({"depth_axis": 0.0}, ValueError, "depth_axis=0.0"),
        ({"definition": ["edge"]}, ValueError, "definition="),
    ],
)
def test_wrong_types_are_named(options, error, message):
    arguments = {"vol": np.ones((5, 6, 7), np.float32), "s_xy": 3, "depth_axis": 0} | options
    with pytest.raises(error, match=message):
        surface_module.find_tissue_interface(**arguments)


def test_whole_numbers_may_be_floats():
    vol = np.random.default_rng(0).random((9, 6, 7), np.float32)
    found = find_tissue_interface(vol, 3.0, 2, order=1.0, depth_axis=0)
    assert np.array_equal(found, find_tissue_interface(vol, 3, 2, order=1, depth_axis=0))
