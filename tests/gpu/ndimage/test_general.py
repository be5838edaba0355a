"""If this fails, images of other than three axes, or maps that are not square, are sampled wrong (oracle: SciPy)."""

import warnings

import numpy as np
import pytest
from scipy import ndimage

from linumpy.gpu import interpolation
from linumpy.gpu.interpolation import affine_transform, geometric_transform, map_coordinates
from linumpy.gpu.ndimage import general
from linumpy.gpu.ndimage.sampling import SplineSampling
from tests.support.budget import matrix
from tests.support.gpu import on_cpu
from tests.support.gpu.emulator import needs_compiler


@pytest.fixture(params=["host", pytest.param("emulator", marks=needs_compiler)])
def side(request, monkeypatch):
    """Where arrays go: to SciPy, or to the kernels on the CPU."""
    if request.param == "emulator":
        on_cpu.patch(monkeypatch)
    return request.param


def image_of(shape, seed=0):
    return np.random.default_rng(seed).normal(0, 100, shape)


@pytest.mark.usefixtures("side")
@pytest.mark.parametrize("order", [1, 2])
def test_maps_that_are_not_square(order):
    image = image_of((5, 6))
    options = {"order": order, "mode": "mirror"}
    for linear, shape in (([[1.0], [0.5]], (7,)), (np.arange(8.0).reshape(2, 4) / 5, (2, 3, 2, 4))):
        got = affine_transform(image, linear, 0.25, output_shape=shape, **options)
        expected = ndimage.affine_transform(image, np.asarray(linear), 0.25, shape, **options)
        assert got.shape == shape
        assert np.allclose(got, expected, atol=1e-9)
        assert np.allclose(affine_transform(image, linear, 0.25, output=np.empty(shape), **options), expected)


@pytest.mark.usefixtures("side")
def test_an_array_for_the_result_gives_the_shape():
    image, out = image_of((5, 6)), np.zeros((9, 4), "f4")
    assert affine_transform(image, [0.5, 1.5], output=out) is out
    assert np.allclose(out, ndimage.affine_transform(image, np.diag([0.5, 1.5]), output_shape=(9, 4)), atol=1e-4)
    assert geometric_transform(image, lambda o: (o[0], o[1] + 1), output=out) is out
    assert np.allclose(out[:5], ndimage.shift(image, (0, -1))[:, :4], atol=1e-4)
    with pytest.raises(ValueError, match=r"output has shape \(9, 4\), and the result has \(5, 6\)"):
        affine_transform(image, [0.5, 1.5], output_shape=(5, 6), output=out)
    with pytest.raises(ValueError, match=r"output has shape \(\)"):
        affine_transform(image, [0.5, 1.5], output=np.zeros(()))


@pytest.mark.usefixtures("side")
def test_a_function_of_coordinates():
    image = image_of((6, 7))
    expected = ndimage.shift(image, (0.5, -1.5))
    assert np.allclose(geometric_transform(image, lambda o: (o[0] - 0.5, o[1] + 1.5)), expected, atol=1e-4)

    def plane(o, a, *, b):
        return a, b * o[0] // 1

    got = geometric_transform(image, plane, (4,), extra_arguments=(2,), extra_keywords={"b": 1.5})
    assert np.allclose(got, image[2, [0, 1, 3, 4]], atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("found", [(0,), (0, 1, 2), (np.zeros(5), 0)])
def test_a_function_that_does_not_fit(monkeypatch, found):
    on_cpu.patch(monkeypatch)
    with pytest.raises(ValueError, match=r"mapping returned|could not broadcast"):
        geometric_transform(image_of((6, 7)), lambda o: found, (3, 4))


@pytest.mark.usefixtures("side")
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_complex_images(rank):
    image = image_of((4,) * rank) + 1j * image_of((4,) * rank, 1)
    options = {"order": 3, "mode": "constant", "cval": 3 - 2j}
    expected = ndimage.shift(image, 0.7, **options)
    assert np.allclose(interpolation.shift(image, 0.7, **options), expected)
    single = interpolation.shift(image.astype("c8"), 0.7, **options)
    assert single.dtype == np.complex64
    assert np.allclose(single, expected, atol=1e-2)
    with pytest.warns(UserWarning, match="promoting specified output dtype to complex"):
        got = interpolation.shift(image, 0.7, output=np.float32, **options)
    assert got.dtype == np.complex64
    for output in ("f8", np.empty(image.shape)):
        with pytest.raises(TypeError, match="a complex image needs a complex one"):
            interpolation.shift(image, 0.7, output=output, **options)
    with pytest.raises(TypeError, match="gives real numbers"):
        interpolation.shift(image.real, 0.7, output=complex)
    with pytest.raises(TypeError, match="one real number"):
        interpolation.shift(image.real, 0.7, cval=1j)


@pytest.mark.usefixtures("side")
def test_grid_mode_of_complex_images_too():
    """SciPy 1.17 forgets it."""
    image = image_of((5, 6)) + 1j * image_of((5, 6), 1)
    options = {"order": 1, "mode": "nearest", "grid_mode": True}
    expected = ndimage.zoom(image.real, 1.7, **options) + 1j * ndimage.zoom(image.imag, 1.7, **options)
    assert np.allclose(interpolation.zoom(image, 1.7, **options), expected)


@pytest.mark.usefixtures("side")
@pytest.mark.parametrize("mode", ["constant", "wrap"])
def test_modes_without_an_extent_are_warned_of(mode):
    with pytest.warns(UserWarning, match="It is recommended to use mode = grid-"):
        interpolation.zoom(image_of((3, 3)), 2, mode=mode, grid_mode=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        interpolation.zoom(image_of((3, 3)), 2, mode=mode)
        interpolation.zoom(image_of((3, 3)), 2, mode=f"grid-{mode}", grid_mode=True)


@pytest.mark.usefixtures("side")
@pytest.mark.parametrize("order", [1, 3])
def test_a_zoom_by_one_is_the_image(order):
    image = image_of((4, 5))
    for factor in (1, (1, 1.0)):
        got = interpolation.zoom(image, factor, order=order)
        assert np.array_equal(got, image)
        assert not np.shares_memory(got, image)


@pytest.mark.usefixtures("side")
@pytest.mark.parametrize(("kind", "rank"), matrix(["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "?"], [1, 3]))
def test_integers_are_rounded_and_saturate(kind, rank):
    values = [0.0, 0.5, -0.5, 1.49, -1.5, 2.5, 300.4, -300.6, 65540, -7e4, 5e9, -5e9, 1e19, -1e19, 2.0**64, 1e30]
    values += [np.nan, np.inf]
    image = np.array(values).reshape(-1, *[1] * (rank - 1))
    got = affine_transform(image, np.eye(rank), order=1 if rank == 1 else 0, output=kind).ravel()
    if kind == "?":
        assert got[:9].tolist() == [False, False, False, True, True, True, True, True, True]
        return
    limits = np.iinfo(kind)
    away = [0, 1, -1, 1, -2, 3, 300, -301, 65540, -70000, 5 * 10**9, -5 * 10**9, 10**19, -(10**19), 2**64, 10**30]
    finite = [min(max(one, limits.min), limits.max) for one in away]
    # Beside a voxel that is not finite, 0 times it is none either.
    assert got[: len(finite) - (rank == 1)].tolist() == finite[: len(finite) - (rank == 1)]
    assert got[-2] == 0
    assert got[-1] in (limits.max, 0)


@pytest.mark.usefixtures("side")
def test_the_largest_integers_stay_what_they_are():
    """SciPy makes 0 of 2^64 - 1."""
    image = np.full((3, 4), 2**64 - 1, np.uint64)
    for order in (0, 1, 2):
        assert (affine_transform(image, np.eye(2), order=order, mode="nearest") == image).all()
        assert (interpolation.rotate(image, 90, order=order, mode="nearest") == 2**64 - 1).all()


@pytest.mark.usefixtures("side")
@pytest.mark.parametrize("order", [0, 1, 2, 3, 4, 5])
def test_filters_along_one_axis(order):
    image = image_of((4, 20, 3))
    for axis in (0, -2, 2):
        got = interpolation.spline_filter1d(image, order, axis, mode="grid-mirror")
        assert np.allclose(got, ndimage.spline_filter1d(image, order, axis, mode="reflect"), atol=1e-8)
    for output in ("i4", "u1", "f4", "?"):
        got = interpolation.spline_filter1d(np.abs(image) % 90 + 20, order, 1, output)
        expected = ndimage.spline_filter1d(np.abs(image) % 90 + 20, order, 1, output if output != "?" else "i4")
        assert got.dtype == np.dtype(output)
        assert (np.abs(got - expected.astype(output).astype("f8")) < 1e-3).mean() > 0.99
    with pytest.raises(ValueError, match="axis=3"):
        interpolation.spline_filter1d(image, order, 3)


@pytest.mark.usefixtures("side")
def test_an_image_without_axes_is_its_own_coefficient():
    assert interpolation.spline_filter(np.array(3, "u2")) == 3
    assert interpolation.spline_filter(np.array(3 + 1j), output="c16") == 3 + 1j


def test_more_axes_than_a_launch_takes(monkeypatch):
    on_cpu.patch(monkeypatch)
    with pytest.raises(ValueError, match="up to 16"):
        map_coordinates(np.ones((1,) * 17), np.zeros((17, 2)))


def specs():
    f4, f8 = np.empty((1,) * 4, "f4"), np.empty((1,), "f8")
    yield general.kernel_spec(f4, None, SplineSampling(1, "reflect", 0.0), f4, 4)
    yield general.kernel_spec(f8, f4, SplineSampling(5, "grid-constant", 0.0, 12), f4, 0)
    yield general.kernel_spec(np.empty((1,) * 8, "i8"), f8, SplineSampling(2, "wrap", 0.0), np.empty(1, "u8"), 0)


@pytest.mark.gpu
def test_a_function_of_coordinates_on_the_gpu(cupy):
    image, seen = image_of((60, 70, 80)), []

    def swirl(o):
        seen.append([type(one) for one in o])
        return o[0], o[1] + 2 * cupy.sin(o[2] / 9), o[2] - 0.25

    got = geometric_transform(cupy.asarray(image), swirl, mode="mirror")
    assert seen == [[cupy.ndarray] * 3]
    z, y, x = np.meshgrid(*map(np.arange, image.shape), indexing="ij")
    places = [z, y + 2 * np.sin(x / 9), x - 0.25]
    assert np.allclose(got.get(), ndimage.map_coordinates(image, places, mode="mirror"), atol=1e-6)
