"""If this fails, voxels that are taken as they are differ from SciPy's in a bit."""

import numpy as np
import pytest
from scipy import ndimage

from linumpy.device import to_host
from linumpy.gpu.interpolation import affine_transform, resample_volume, resize, shift, zoom
from linumpy.gpu.ndimage import nearest
from linumpy.gpu.ndimage.nearest import Line
from tests.support.gpu import on_cpu
from tests.support.gpu.emulator import needs_compiler

MODES = ("constant", "grid-constant", "nearest", "reflect", "mirror", "wrap", "grid-wrap", "grid-mirror")
DTYPES = ["u1", "i2", "f4", "i8", "c16", "?", "f2"]
SHAPES = [(70,), (9, 70), (5, 66, 7), (3, 2, 4, 5), (2, 1, 3, 2, 5), (1, 1, 1)]


@pytest.fixture
def only_by_the_kernel(monkeypatch):
    """Nothing but the kernel is there to sample; and it is launched."""
    launched = []
    on_cpu.patch(monkeypatch)
    load = nearest.load
    monkeypatch.setattr(nearest, "load", lambda spec: launched.append(spec) or load(spec))
    for module in (on_cpu.sampling, on_cpu.general):
        monkeypatch.setattr(module, "load", lambda spec: pytest.fail(f"{spec.name} is launched"))
    yield
    assert launched


def image_of(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 200, shape)
    return (values % 2 if dtype == "?" else values + (1j * values if dtype == "c16" else 0)).astype(dtype)


def known(array):
    """SciPy knows no halves."""
    return array.astype("f4") if array.dtype == np.float16 else array


def check_all(convert, shape, dtype, mode):
    image = image_of(shape, dtype)
    given, plain = convert(image), known(image)
    options = {"order": 0, "mode": mode, "cval": 5.0 if dtype != "?" else 1.0}
    by = np.linspace(-3.5, 4, image.ndim)
    assert np.array_equal(to_host(shift(given, by, **options)), ndimage.shift(plain, by, **options).astype(image.dtype))
    # Ties at every voxel, at every third, and none.
    for factor in (0.5, 2 / 3, 1.5, 2.3):
        for grid_mode in (False, True) if mode not in ("constant", "wrap") else (False,):
            expected = ndimage.zoom(plain.real, factor, grid_mode=grid_mode, **options).astype(image.real.dtype)
            got = to_host(zoom(given, factor, grid_mode=grid_mode, **options))
            assert np.array_equal(got.real, expected), (factor, grid_mode)
    matrix, offset = np.linspace(-1.5, 1.5, image.ndim), 1.5
    expected = ndimage.affine_transform(plain, np.diag(matrix), offset, **options).astype(image.dtype)
    assert np.array_equal(to_host(affine_transform(given, matrix, offset, **options)), expected)


@needs_compiler
@pytest.mark.usefixtures("only_by_the_kernel")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_scipy(shape, mode):
    check_all(np.asarray, shape, DTYPES[(len(shape) + MODES.index(mode)) % len(DTYPES)], mode)


@needs_compiler
@pytest.mark.usefixtures("only_by_the_kernel")
@pytest.mark.parametrize("dtype", ["u1", "u2", "?", "c8"])
def test_labels_are_resized_as_on_the_host(dtype):
    image = image_of((11, 70, 33), dtype)
    for wanted in ((11, 35, 33), (5, 140, 20), (22, 7, 66)):
        got = nearest.take(image, lines := lines_of(image.shape, wanted), "nearest", 0, out := np.empty(wanted, dtype))
        assert got is None
        rows = [nearest.nearest_voxels(line, "nearest") for line in lines]
        assert np.array_equal(out, image[np.ix_(*rows)])
        if dtype != "c8":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(on_cpu.resizing, "is_device_array", lambda _: False)
                expected = resize(image, wanted, order=0, anti_aliasing=False)
            assert np.array_equal(resize(image, wanted, order=0, anti_aliasing=False), expected)


def lines_of(shape, wanted):
    return [Line(n, m, n / m, -0.5, 0.5) for n, m in zip(shape, wanted, strict=True)]


@needs_compiler
@pytest.mark.usefixtures("only_by_the_kernel")
def test_rows_that_begin_anywhere():
    """Voxels of a byte are written four at a time where that is possible."""
    for width in (4, 5, 8, 127, 128, 130):
        for begin in (0, 1, 4):
            memory = np.zeros(3 * 9 * width + 8, "u1")
            out = memory[begin : begin + 3 * 9 * width].reshape(3, 9, width)
            image = image_of((3, 9, width), "u1", width)
            assert shift(image, (1, 0, 1), order=0, output=out) is out
            assert np.array_equal(out, ndimage.shift(image, (1, 0, 1), order=0))
            assert not memory[:begin].any()
            assert not memory[begin + out.size :].any()


@pytest.mark.parametrize("line", [Line(5, 3, 1e300, 0.0), Line(5, 3, 1.0, 2.0**60)])
def test_what_is_infinitely_far_is_left_to_other_kernels(line):
    assert not nearest.can_take(np.ones(5), [line])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [*SHAPES, (20, 150, 260)])
def test_as_scipy_on_the_gpu(cupy, shape, mode):
    for dtype in DTYPES:
        check_all(cupy.asarray, shape, dtype, mode)


@pytest.mark.gpu
def test_labels_are_resized_as_on_the_host_on_the_gpu(cupy):
    image = image_of((60, 130, 257), "u2")
    for wanted in ((30, 65, 128), (60, 260, 257), (7, 300, 100)):
        got = resize(cupy.asarray(image), wanted, order=0)
        assert np.array_equal(got.get(), resize(image, wanted, order=0))
    got, _ = resample_volume(cupy.asarray(image), (1, 1, 1), (2, 2, 0.7), order=0, anti_aliasing=False)
    expected, _ = resample_volume(image, (1, 1, 1), (2, 2, 0.7), order=0, anti_aliasing=False)
    assert np.array_equal(got.get(), expected)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:  # tables are of a stream
        got = resize(cupy.asarray(image), (30, 65, 128), order=0)
    stream.synchronize()
    assert np.array_equal(got.get(), resize(image, (30, 65, 128), order=0))
