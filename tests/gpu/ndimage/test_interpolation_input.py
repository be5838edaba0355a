"""If this fails, functions that resample take what they cannot do right, or refuse what they promise to take."""

import inspect

import numpy as np
import pytest
from scipy import ndimage

from linumpy.gpu import interpolation
from linumpy.gpu.interpolation import affine_transform, map_coordinates, resample_volume, resize, spline_filter
from linumpy.gpu.ndimage.geometric import apply_displacement_field, compose_affine, rotate, shift, zoom
from linumpy.gpu.ndimage.sampling_launch import MODES
from tests.gpu.ndimage.test_sampling import image_of

IMAGE = np.arange(12.0).reshape(3, 4)
PLACES = np.ones((2, 5))
FIELD = np.zeros((2, 3, 4))

#: Every function that takes an image, with what else it needs.
CALLS = {
    "map_coordinates": lambda image, **options: map_coordinates(image, PLACES, **options),
    "affine_transform": lambda image, **options: affine_transform(image, np.eye(2), **options),
    "shift": lambda image, **options: shift(image, 1, **options),
    "zoom": lambda image, **options: zoom(image, 2, **options),
    "rotate": lambda image, **options: rotate(image, 30, **options),
    "apply_displacement_field": lambda image, **options: apply_displacement_field(image, FIELD, **options),
    "spline_filter": lambda image, **options: spline_filter(image, **{"order": 3, **options}),
    "resize": lambda image, **options: resize(image, (2, 2), **options),
    "resample_volume": lambda image, **options: resample_volume(image, (1, 1), 2, **options),
}
every = pytest.mark.parametrize("name", CALLS)


@every
@pytest.mark.parametrize(
    ("image", "message"),
    [
        ([[1, 2], [3, 4]], "the image is a list: pass a NumPy or CuPy array"),
        (None, "NoneType"),
        (np.array([["a"]]), "<U1"),
        (np.array([[None]]), "object"),
        (np.zeros((3, 4), "M8[s]"), "datetime64"),
        (np.zeros((3, 4), np.longdouble), "numbers of up to 64 bits"),
    ],
)
def test_no_image(name, image, message):
    with pytest.raises(TypeError, match=message):
        CALLS[name](image)


@every
def test_an_image_without_axes(name):
    if name == "spline_filter":  # as SciPy
        assert CALLS[name](np.array(1.0)) == 1
        return
    with pytest.raises(ValueError, match=r"0 axes|output_shape|spacing"):
        CALLS[name](np.array(1.0))


@every
@pytest.mark.parametrize("order", [-1, 6, 1.5, 1.0, True, "1", None])
def test_no_order(name, order):
    with pytest.raises(ValueError, match="order="):
        CALLS[name](IMAGE, order=order)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "resample_volume"])
@pytest.mark.parametrize("mode", ["sideways", "", None, 3, ["mirror"]])
def test_no_mode(name, mode):
    with pytest.raises(ValueError, match="is unknown"):
        CALLS[name](IMAGE, mode=mode)


@pytest.mark.parametrize("name", list(CALLS)[:7])
@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (np.empty((7, 7, 7)), ValueError, r"output has shape \(7, 7, 7\)|to a result of 3 \(output_shape=\)"),
        (np.empty(()), ValueError, r"output has shape \(\)"),
        ("nothing", TypeError, "nothing"),
        ("S5", TypeError, "made of numbers"),
        (object, TypeError, "made of numbers"),
        (np.longdouble, TypeError, "made of numbers"),
    ],
)
def test_no_output(name, output, error, message):
    with pytest.raises(error, match=message):
        CALLS[name](IMAGE, output=output)


@pytest.mark.parametrize(
    "call",
    [
        CALLS["map_coordinates"],
        lambda image: affine_transform(image, np.eye(2), output_shape=(3, 4)),
        lambda image: rotate(image, 30),
        CALLS["apply_displacement_field"],
        CALLS["resize"],
        CALLS["resample_volume"],
    ],
)
def test_no_voxels(call):
    with pytest.raises(ValueError, match=r"of shape \(0, 4\) has nothing to"):
        call(np.empty((0, 4)))


def test_nothing_is_made_of_nothing():
    assert zoom(np.empty((0, 4)), 2).shape == (0, 8)
    assert shift(np.empty((0, 4)), 2).shape == (0, 4)
    assert spline_filter(np.empty((0, 4))).shape == (0, 4)


@pytest.mark.parametrize("dtype", ["f2", "f4", "u2"])
@pytest.mark.parametrize("order", [0, 1, 3])
def test_results_without_voxels(order, dtype):
    image = IMAGE.astype(dtype)
    for shape in ((0, 3), (3, 0)):
        got = affine_transform(image, np.eye(2), output_shape=shape, order=order)
        assert (got.shape, got.dtype) == (shape, image.dtype)
        out = np.empty(shape)
        assert affine_transform(image, np.eye(2), output_shape=shape, order=order, output=out) is out
        assert apply_displacement_field(image, np.zeros((2, *shape)), order=order).shape == shape
        assert map_coordinates(image, np.zeros((2, *shape)), order=order).shape == shape
        assert affine_transform(np.empty((0, 4), dtype), np.eye(2), output_shape=shape, order=order).shape == shape
    assert zoom(image, 0.1, order=order).shape == (0, 0)
    assert map_coordinates(image, np.zeros((2, 0)), order=order).shape == (0,)


@pytest.mark.parametrize(
    ("matrix", "offset", "message"),
    [
        (np.eye(3)[:2, :2] * np.nan, 0, "not finite"),
        (np.eye(2), np.inf, "not finite"),
        (np.eye(2), (0, np.nan), "not finite"),
        (np.eye(4), 0, r"shape \(4, 4\) does not map an image of 2 axes"),
        (np.eye(2)[:1], 0, r"shape \(1, 2\)"),
        (np.ones(3), 0, r"shape \(3,\)"),
        (np.ones((2, 2, 2)), 0, r"shape \(2, 2, 2\)"),
        (2.0, 0, r"shape \(\)"),
        (np.ones((3, 3)), 0, r"last row of a homogeneous matrix is \[1.0, 1.0, 1.0\]"),
        ([[1, 2], [3]], 0, "no array of numbers"),
        (np.eye(2) * 1j, 0, "complex128: real numbers"),
        ("rotation", 0, "real numbers"),
        (np.eye(2), (1, 2, 3), r"offset \[1.0, 2.0, 3.0\]"),
        (np.eye(2), "far", "real numbers"),
    ],
)
def test_no_map(matrix, offset, message):
    with pytest.raises(ValueError, match=message):
        affine_transform(IMAGE, matrix, offset)


@pytest.mark.parametrize("shape", [(3,), (3, 4, 5), (3, -1), (3, 2.5), (3, None), 3, "34"])
def test_no_shape(shape):
    with pytest.raises(ValueError, match="output_shape="):
        affine_transform(IMAGE, np.eye(2), output_shape=shape)


@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize("matrix", [np.zeros((2, 2)), np.diag([0.0, 1.0]), [[1, 1], [1, 1]], [0, 1]])
def test_singular_maps_repeat_voxels_as_in_scipy(matrix, order):
    square = np.diag(matrix) if np.ndim(matrix) == 1 else np.asarray(matrix, float)
    expected = ndimage.affine_transform(IMAGE, square, (1.0, 0.25), order=order, mode="mirror")
    assert np.array_equal(affine_transform(IMAGE, matrix, (1.0, 0.25), order=order, mode="mirror"), expected)
    row = affine_transform(IMAGE, [0, 1], (1, 0), order=order, mode="mirror")
    assert np.allclose(row, np.broadcast_to(IMAGE[1], IMAGE.shape))


@pytest.mark.parametrize(
    ("places", "error", "message"),
    [
        (np.zeros((3, 5)), ValueError, r"coordinates of shape \(3, 5\): an image of 2 axes needs as many rows"),
        (np.zeros(()), ValueError, r"coordinates of shape \(\)"),
        (np.zeros((2, 5), complex), TypeError, "coordinates of complex128"),
        (np.full((2, 5), "1"), TypeError, "coordinates of <U1"),
        (np.full((2, 5), None), TypeError, "coordinates of object"),
        (np.zeros((2, 5), np.longdouble), TypeError, "coordinates of"),
    ],
)
def test_no_places(places, error, message):
    with pytest.raises(error, match=message):
        map_coordinates(IMAGE, places)


@pytest.mark.parametrize(
    ("field", "options", "error", "message"),
    [
        (
            np.zeros((3, 3, 4)),
            {},
            ValueError,
            r"field of shape \(3, 3, 4\): an image of 2 axes needs shape \(2, ...\) of 3",
        ),
        (np.zeros((1, 4)), {}, ValueError, r"an image of 2 axes .* \(give channel_axis= for channels\)"),
        (np.zeros(()), {}, ValueError, r"field of shape \(\)"),
        (np.zeros((2, 3, 4), complex), {}, TypeError, "field of complex128"),
        (FIELD, {"channel_axis": 0}, ValueError, r"an image of 1 axes needs shape \(1, ...\) of 2"),
        (FIELD, {"channel_axis": 2}, ValueError, "channel_axis=2: an image of 2 axes has none of that number"),
        (FIELD, {"channel_axis": 0.5}, ValueError, "channel_axis=0.5"),
        (FIELD, {"spacing": 0}, ValueError, "spacing=0: voxels are larger than 0"),
        (FIELD, {"spacing": (1, np.nan)}, ValueError, "spacing="),
        (FIELD, {"spacing": (1, 2, 3)}, ValueError, "spacing="),
    ],
)
def test_no_field(field, options, error, message):
    with pytest.raises(error, match=message):
        apply_displacement_field(IMAGE, field, **options)


SQUARE = np.ones((3, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rotate(IMAGE, np.nan), "angle=nan"),
        (lambda: rotate(IMAGE, np.inf), "angle=inf"),
        (lambda: zoom(IMAGE, (1, np.inf)), "zoom="),
        (lambda: zoom(IMAGE, -1), "zoom=-1"),
        (lambda: shift(IMAGE, (1, 2, 3)), "shift="),
        (lambda: compose_affine([{"type": "sequence"}], 2), "no 'transformations'"),
        (lambda: compose_affine([{"type": "scale", "scale": [1, np.nan]}], 2), "not finite"),
        (lambda: compose_affine([{"type": "rotation"}], 2), r"shape \(\)"),
        (lambda: resample_volume(IMAGE, (1, 1), 0), "target_spacing=0"),
        (lambda: resize(IMAGE, (0, 2)), "output_shape="),
        (
            lambda: apply_displacement_field(np.ones(3), np.zeros((1, 3)), channel_axis=0),
            "1 axis has no axis beside",
        ),
        (lambda: zoom(SQUARE, 0), "zoom=0"),
        (lambda: zoom(SQUARE, (1, 2, 3)), r"zoom=\(1, 2, 3\): an image of 2 axes"),
        (lambda: shift(SQUARE, float("nan")), "shift=nan"),
        (lambda: rotate(SQUARE, 10, (0, 2)), r"axes=\(0, 2\)"),
        (lambda: rotate(SQUARE, 10, (0, -2)), r"axes=\(0, -2\)"),
        (lambda: apply_displacement_field(SQUARE, np.zeros((3, 3, 3))), r"field of shape \(3, 3, 3\)"),
        (lambda: apply_displacement_field(SQUARE, np.zeros((2, 3, 3)), spacing=(1, 0)), "spacing="),
        (lambda: compose_affine([{"type": "warp"}], 2), "'warp' is not known"),
        (lambda: compose_affine([{"type": "scale", "scale": [1]}], 2), r"shape \(1,\)"),
    ],
)
def test_no_geometry(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("dtype", ["f4", "u2", "f2"])
@pytest.mark.parametrize("order", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("mode", MODES)
def test_places_that_are_no_numbers(mode, order, dtype):
    """SciPy itself gives this and that for them."""
    image = image_of("u2", (5, 6), 0).astype(dtype) if dtype != "f2" else image_of("f4", (5, 6), 0).astype("f2")
    bad = np.array([np.nan, np.inf, -np.inf, 1e300, -1e300])
    for axis in range(2):
        places = np.ones((2, 7))
        places[axis, :5] = bad
        for kind in ("f8", "f4"):
            with np.errstate(over="ignore"):
                got = map_coordinates(image, places.astype(kind), order=order, mode=mode, cval=7)
            expected = map_coordinates(image, places[:, 5:], order=order, mode=mode, cval=7)
            assert np.array_equal(got[5:], expected)
            if mode in ("constant", "grid-constant"):
                assert (got[:5] == 7).all()
            elif mode == "nearest":
                ends = np.ones((2, 2))
                ends[axis] = 100, -100
                high, low = map_coordinates(image, ends, order=order, mode=mode)
                assert got[1:5].tolist() == [high, low, high, low]
                assert np.isnan(got[0]) if image.dtype.kind == "f" else got[0] == 0
            else:
                assert np.isnan(got[:5]).all() if image.dtype.kind == "f" else not got[:5].any()


@pytest.mark.parametrize("order", [0, 1, 3])
def test_halves_which_scipy_does_not_know(order):
    image = image_of("f4", (5, 6), 0).astype("f2")
    places = np.random.default_rng(0).uniform(0, 4, (2, 20)).astype("f2")
    wide = image.astype("f4")
    expected = ndimage.map_coordinates(wide, places.astype("f4"), order=order)
    for out in (None, np.empty(20, "f2"), np.empty(40, "f2")[::2]):
        got = map_coordinates(image, places, order=order, output=out)
        assert got.dtype == np.float16
        assert np.array_equal(got, expected.astype("f2"))
    assert np.array_equal(map_coordinates(image, places, order=order, output="f4"), expected)
    got = affine_transform(image, np.eye(2) * 0.7, 0.3, order=order)
    assert np.array_equal(got, ndimage.affine_transform(wide, np.eye(2) * 0.7, 0.3, order=order).astype("f2"))
    huge = affine_transform(np.full((3, 3), 60000, "f4"), np.eye(2), output="f2", cval=1e6, offset=1)
    assert huge[0, 0] == np.float16(60000)
    assert huge[2, 2] == np.inf
    assert np.array_equal(spline_filter(image, output="f4"), ndimage.spline_filter(wide, output="f4"))


@pytest.mark.parametrize("name", [name for name in interpolation.__all__ if hasattr(ndimage, name)])
def test_defaults_are_those_of_scipy(name):
    """A script that changes its import gets the same voxels."""
    mine, theirs = (inspect.signature(getattr(module, name)).parameters for module in (interpolation, ndimage))
    shared = [one for one in theirs if one not in ("input", "coordinates", "matrix", "shift", "zoom", "angle")]
    assert {one: mine[one].default for one in shared} == {one: theirs[one].default for one in shared}


def test_the_names_that_scipy_has():
    names = {name for name in interpolation.__all__ if hasattr(ndimage, name)}
    assert names >= {"map_coordinates", "affine_transform", "spline_filter", "rotate", "shift", "zoom"}


def test_forms_that_scipy_takes():
    expected = ndimage.map_coordinates(IMAGE, [[1.5], [2.5]])
    assert map_coordinates(IMAGE, [[1.5], [2.5]]) == expected
    one = map_coordinates(IMAGE, np.array([1.5, 2.5]))
    assert one.shape == ()
    assert one == expected[0]
    out = np.zeros(())
    assert map_coordinates(IMAGE, np.array([1.5, 2.5]), output=out) is out
    assert out == expected[0]
    for dtype in (">u2", "?", "c8", "<i8"):
        image = IMAGE.astype(dtype)
        expected = ndimage.affine_transform(image, np.eye(2), 0.5)
        got = affine_transform(image, np.eye(2), 0.5)
        assert np.array_equal(got, expected)
        assert got.dtype == expected.dtype
    assert affine_transform(IMAGE, np.eye(2), output=">f4").dtype == np.dtype(">f4")
    assert np.array_equal(affine_transform(IMAGE, np.eye(2), order=np.int64(1)), IMAGE)


@pytest.mark.gpu
def test_sides(cupy):
    image = cupy.asarray(IMAGE)
    for call in (
        lambda: map_coordinates(image, PLACES),
        lambda: map_coordinates(IMAGE, cupy.asarray(PLACES)),
        lambda: map_coordinates(image, PLACES.tolist()),
        lambda: affine_transform(image, np.eye(2), output=np.empty(IMAGE.shape)),
        lambda: affine_transform(IMAGE, np.eye(2), output=cupy.empty(IMAGE.shape)),
        lambda: apply_displacement_field(image, FIELD),
        lambda: spline_filter(image, output=np.empty(IMAGE.shape)),
    ):
        with pytest.raises((TypeError, ValueError), match="both be on the GPU"):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_empty_and_singular_on_the_gpu(cupy, order):
    image = cupy.asarray(IMAGE)
    for shape in ((0, 3), (3, 0)):
        assert affine_transform(image, np.eye(2), output_shape=shape, order=order).shape == shape
        assert map_coordinates(image, cupy.zeros((2, *shape)), order=order).shape == shape
        assert apply_displacement_field(image, cupy.zeros((2, *shape)), order=order).shape == shape
    assert map_coordinates(image, cupy.ones(2), order=order).shape == ()
    with pytest.raises(ValueError, match="no voxels to sample"):
        affine_transform(cupy.empty((0, 4)), np.eye(2), output_shape=(3, 4), order=order)
    got = cupy.asnumpy(affine_transform(image, [0, 1], (1, 0), order=order, mode="mirror"))
    assert np.allclose(got, np.broadcast_to(IMAGE[1], IMAGE.shape))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: shift(IMAGE, None), ValueError, "shift=None"),
        (lambda: shift(IMAGE, ("a", "b")), ValueError, "shift="),
        (lambda: zoom(IMAGE, {}), ValueError, "zoom={}"),
        (lambda: rotate(IMAGE, "30"), ValueError, "angle='30'"),
        (lambda: rotate(IMAGE, 30, None), ValueError, "axes=None"),
        (lambda: rotate(IMAGE, 30, (0.0, 1)), ValueError, "axes="),
        (lambda: resize(IMAGE, None), ValueError, "output_shape=None"),
        (lambda: resize(IMAGE, ("a", "b")), ValueError, "output_shape="),
        (lambda: resize(IMAGE, (2, 2), anti_aliasing=True, anti_aliasing_sigma="a"), ValueError, "sigma='a'"),
        (lambda: resample_volume(IMAGE, None, 2), ValueError, "current_spacing=None"),
        (lambda: resample_volume(IMAGE, 1, 1e-320), ValueError, "target_spacing=1e-320"),
        (lambda: shift(IMAGE, 1, output=[1]), TypeError, r"output=\[1\]"),
        (lambda: interpolation.geometric_transform(IMAGE, None), TypeError, "mapping=None"),
        (lambda: interpolation.geometric_transform(IMAGE, tuple, extra_arguments=5), TypeError, "extra_arguments=5"),
        (lambda: interpolation.geometric_transform(IMAGE, tuple, extra_keywords=[1]), TypeError, "extra_keywords="),
    ],
)
def test_wrong_types_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_truth_value_of_any_type_chooses_the_grid_of_zoom():
    assert np.array_equal(zoom(IMAGE, 2, grid_mode=None), zoom(IMAGE, 2))


def test_one_number_of_numpy_is_a_spacing():
    assert resample_volume(IMAGE, np.float32(1), np.int64(2))[1] == resample_volume(IMAGE, 1, 2)[1]
