"""If this fails, projections differ from NumPy's in float64."""

import itertools

import numpy as np
import pytest

from linumpy.gpu.kernels import CUDA_TYPES
from linumpy.gpu.oct import projection
from linumpy.gpu.oct.projection import STATISTICS, project
from tests.support.budget import some
from tests.support.gpu.emulator import emulated, needs_compiler
from tests.support.gpu.nvrtc import compile_kernel

DTYPES = ["u2", "f4", "u1", "f8", "i2", "f2", "i4", "b1", "u8"]
SHAPES = [
    *((7, 5, 64), (64, 33, 16), (300, 4, 4), (5000, 2, 8), (3, 200, 48), (1, 1, 1), (129,), (70000,), (6, 1, 40)),
    *((9, 31), (2, 3, 4, 5), (2, 40000), (257, 1, 3), (5, 0, 4)),
]


def array(shape, dtype, rng, *, order=True):
    """Make an array in a random memory order, its axes as named, sometimes with gaps."""
    values = rng.gamma(2.0, 20.0, shape)
    values = values > 30 if dtype == "b1" else values.astype(dtype)
    if rng.random() < 0.3 and order:
        turn = rng.permutation(len(shape))
        values = np.ascontiguousarray(values.transpose(turn)).transpose(np.argsort(turn))
    if rng.random() < 0.2 and order:
        values = np.repeat(values, 2, axis=0)[::2]
    return values


def assert_right(vol, axis, wanted, accumulate, results):
    """Compare with NumPy in float64."""
    for one, got in zip(wanted, results, strict=True):
        if one in ("min", "max"):
            expected = getattr(vol, one)(axis=axis)
            assert got.dtype == vol.dtype
            assert np.array_equal(got, expected, equal_nan=vol.dtype.kind == "f")
        else:
            expected = getattr(vol, one)(axis=axis, dtype=np.float64)
            assert got.dtype == accumulate
            assert got.shape == expected.shape
            assert np.allclose(got, expected, rtol=1e-5 if accumulate == "float32" else 1e-12, atol=1e-6)


@pytest.fixture
def by_kernels(monkeypatch):
    """The kernels, run on the CPU."""
    monkeypatch.setattr(projection, "load", emulated)
    return projection._by_kernels


@needs_compiler
@pytest.mark.parametrize("seed", some(range(60), lambda seed: seed < 2 * len(SHAPES)))
def test_same_as_numpy(monkeypatch, by_kernels, seed):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(projection, "_BLOCKS", int(rng.choice([1, 64, 1024])))
    projection._plan_projection.cache_clear()
    shape = SHAPES[seed % len(SHAPES)]
    vol = array(shape, DTYPES[seed % len(DTYPES)], rng)
    axis = int(rng.integers(0, vol.ndim))
    if vol.shape[axis] == 0:
        axis = 0
    accumulate = str(rng.choice(["float32", "float64"]))
    wanted = [("mean",), ("max",), tuple(STATISTICS)][seed % 3]
    assert_right(vol, axis, wanted, accumulate, by_kernels(vol, axis, wanted, accumulate))


@needs_compiler
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["f4", "f2", "f8"])
def test_nan_comes_out_and_nothing_else(by_kernels, dtype, axis):
    vol = np.random.default_rng(0).normal(size=(40, 64)).astype(dtype)
    vol[3, 7] = vol[0, 0] = vol[39, 63] = np.nan
    vol[5, 9] = np.inf
    results = by_kernels(vol, axis, ("min", "max", "mean"), "float64")
    assert_right(vol, axis, ("min", "max"), "float64", results[:2])
    assert np.allclose(results[2], vol.mean(axis=axis, dtype="f8"), equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("shape", [(4000, 4, 4), (16, 4000), (900, 32)])
def test_an_offset_does_the_deviation_no_harm(by_kernels, shape):
    vol = (60000 + np.random.default_rng(0).normal(0, 10, shape)).astype("f4")
    vol.reshape(-1)[0] = 0  # nor does an outlier at the start, which a shift by the first element would rely on
    for axis in range(vol.ndim):
        (got,) = by_kernels(vol, axis, ("std",), "float32")
        assert np.allclose(got, vol.std(axis=axis, dtype="f8"), rtol=1e-3, atol=0.01)  # 60000 has steps of 0.004


@needs_compiler
def test_what_is_kept_for_the_next_call_fits_it(by_kernels):
    """Arrays of one shape and dtype that lie otherwise, one after another and twice."""
    projection._plan_projection.cache_clear()
    values = np.random.default_rng(0).integers(0, 60000, (16, 16, 16)).astype("u2")
    shifted = np.zeros(values.size + 1, "u2")[1:].reshape(values.shape)  # two bytes after a multiple of 16
    shifted[:] = values
    arrays = values, np.asfortranarray(values), np.repeat(values, 2, axis=2)[:, :, ::2], shifted, values.view("i2")
    for _ in range(2):
        for vol in arrays:
            for axis in range(3):
                for wanted in (("mean",), ("max", "mean")):
                    assert_right(vol, axis, wanted, "float32", by_kernels(vol, axis, wanted, "float32"))
    kept = projection._plan_projection.cache_info()
    assert kept.misses <= len(arrays) * 6
    assert kept.hits >= len(arrays) * 6


@needs_compiler
def test_integers_are_summed_exactly(by_kernels):
    vol = np.full((70001, 2), 65535, "u2")
    vol[0] = 65534
    (got,) = by_kernels(vol, 0, ("mean",), "float64")
    assert np.array_equal(got, vol.sum(axis=0, dtype="i8") / 70001)


def test_on_the_cpu():
    vol = np.random.default_rng(0).integers(0, 60000, (30, 20, 10)).astype(">u2")
    for axis in (-1, 0, 1):
        results = project(vol, axis, tuple(STATISTICS), accumulate="float64")
        assert_right(vol.astype("u2"), axis, tuple(STATISTICS), "float64", results)
    assert project(vol, 0).dtype == np.float32
    assert project(vol, 0, "max").dtype == np.dtype("u2")


@pytest.mark.parametrize(
    ("shape", "arguments", "error", "message"),
    [
        ((4, 5), {"statistics": "median"}, ValueError, "median"),
        ((4, 5), {"statistics": ()}, ValueError, "statistics"),
        ((4, 5), {"axis": 2}, ValueError, "axis=2"),
        ((4, 0), {"axis": 1}, ValueError, "no elements"),
        ((), {}, ValueError, "axis=0"),
        ((4, 5), {"accumulate": "float16"}, ValueError, "float16"),
    ],
)
def test_bad_input(shape, arguments, error, message):
    with pytest.raises(error, match=message):
        project(np.ones(shape), **arguments)


def test_complex_numbers_are_refused():
    with pytest.raises(TypeError, match="complex64"):
        project(np.ones((3, 3), "c8"))


COMPILED = [("widest", 0, 15, "float32"), (1, 1, 15, "float64"), (1, 0, 1, "float32")]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    some(itertools.product(CUDA_TYPES, COMPILED), lambda *one: one in zip(["u2", "f2", "f4"], COMPILED, strict=True)),
)
def test_projection_compiles(dtype, kind):
    vec, rows, want, accumulate = kind
    vec = 16 // np.dtype(dtype).itemsize if vec == "widest" else vec
    for name in ("project", "merge_partials"):
        spec = projection.kernel_spec(name, np.dtype(dtype), accumulate, want, vec, rows)
        assert name.encode() in compile_kernel(spec, "sm_90")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [*(pytest.param(k, marks=pytest.mark.sanitize) for k in range(3)), *range(3, 90)])
def test_same_on_a_device(cupy, seed):
    rng = np.random.default_rng(500 + seed)
    shape = [*SHAPES, (512, 300, 256), (20000, 4, 4), (40, 3000, 129)][seed % (len(SHAPES) + 3)]
    host = array(shape, DTYPES[seed % len(DTYPES)], rng, order=False)
    vol = cupy.asarray(host)
    if rng.random() < 0.4:
        vol = cupy.ascontiguousarray(vol.T).T
    axis = int(rng.integers(0, host.ndim))
    if host.shape[axis] == 0:
        axis = 0
    accumulate = str(rng.choice(["float32", "float64"]))
    wanted = [("mean",), ("max", "min"), tuple(STATISTICS)][seed % 3]
    results = project(vol, axis, wanted, accumulate=accumulate)
    assert all(isinstance(one, cupy.ndarray) for one in results)
    assert_right(host, axis, wanted, accumulate, [cupy.asnumpy(one) for one in results])
