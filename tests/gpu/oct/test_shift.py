"""If this fails, A-lines are shifted along depth by something else than their tile's shift."""

import numpy as np
import pytest

from linumpy.gpu.kernels import CUDA_TYPES
from linumpy.gpu.oct import shift as shift_module
from linumpy.gpu.oct.shift import shift_along_depth
from tests.support.budget import matrix, some
from tests.support.gpu.emulator import emulated, needs_compiler
from tests.support.gpu.nvrtc import compile_kernel

DTYPES = ["f4", "u2", "u1", "f8", "i2", "f2", "i4", "b1"]


def slow(vol, shifts, depth_axis, origin, wrap, fill):
    """The definition, one voxel after another."""
    lines = np.moveaxis(vol, depth_axis, -1)
    out = np.empty_like(lines)
    depth = lines.shape[-1]
    for i, j, z in np.ndindex(*lines.shape):
        place = z + float(shifts[(i + origin[0]) % shifts.shape[0], (j + origin[1]) % shifts.shape[1]])
        low = int(np.floor(place))
        high, part = (low + 1, place - low) if place > low else (low, 0.0)
        if wrap:
            low, high = low % depth, high % depth
        if not wrap and (low < 0 or high >= depth):
            out[i, j, z] = lines[i, j, min(max(low, 0), depth - 1)] if fill is None else fill
        elif part == 0:
            out[i, j, z] = lines[i, j, low]
        else:
            value = (1 - part) * float(lines[i, j, low]) + part * float(lines[i, j, high])
            out[i, j, z] = np.rint(value) if vol.dtype.kind in "biu" else value
    return np.moveaxis(out, -1, depth_axis)


def case(seed, limit):
    rng = np.random.default_rng(seed)
    shape = rng.integers(1, limit, 3)
    dtype = DTYPES[seed % len(DTYPES)]
    values = rng.gamma(2.0, 20.0, shape)
    values = values > 30 if dtype == "b1" else values.astype(dtype)
    order = rng.permutation(3)
    vol = np.ascontiguousarray(values.transpose(order)).transpose(np.argsort(order))
    if rng.random() < 0.3:
        vol = vol[:, ::-1]
    shifts = rng.normal(0, 3, rng.integers(1, 9, 2))
    # Eighths: sums with them are exact, so that rounding to integers is too.
    shifts = np.rint(shifts).astype(rng.choice(["i4", "i8", "i2"])) if seed % 2 else np.rint(shifts * 8) / 8
    origin = tuple(int(n) for n in rng.integers(0, 30, 2))
    return vol, shifts, int(rng.integers(0, 3)), origin, bool(rng.random() < 0.4), [0, 1, None][rng.integers(0, 3)]


def assert_near(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if expected.dtype.kind == "f":
        assert np.allclose(got, expected, rtol=2e-3 if expected.dtype == "f2" else 1e-6, equal_nan=True)
    else:
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("seed", range(48))
def test_same_as_the_definition(seed):
    vol, shifts, depth_axis, origin, wrap, fill = case(seed, 14)
    got = shift_along_depth(vol, shifts, depth_axis=depth_axis, origin=origin, wrap=wrap, fill_value=fill)
    assert_near(got, slow(vol, shifts, depth_axis, origin, wrap, fill))


@needs_compiler
@pytest.mark.parametrize("seed", some(range(48), lambda seed: seed < 3 * len(DTYPES)))
def test_the_kernel_does_the_same(monkeypatch, seed):
    monkeypatch.setattr(shift_module, "load", emulated)
    monkeypatch.setattr(shift_module, "is_device_array", lambda _: True)
    vol, shifts, depth_axis, origin, wrap, fill = case(seed, 60)
    arguments = {"depth_axis": depth_axis, "origin": origin, "wrap": wrap, "fill_value": fill}
    got = shift_along_depth(vol, shifts, **arguments)
    monkeypatch.undo()
    assert_near(got, shift_along_depth(vol, shifts, **arguments))


def test_whole_shifts_move_voxels_as_they_are():
    vol = np.random.default_rng(0).normal(size=(9, 4, 6))
    vol[3, 2] = np.nan
    got = shift_along_depth(vol, np.array([[2]]), fill_value=np.nan)
    assert np.array_equal(got[:-2], vol[2:], equal_nan=True)
    assert np.isnan(got[-2:]).all()
    assert np.array_equal(shift_along_depth(vol, np.array([[2]]), wrap=True), np.roll(vol, -2, 0), equal_nan=True)
    assert np.array_equal(shift_along_depth(vol, np.array([[-2.0]]))[2:], vol[:-2], equal_nan=True)


def test_no_voxel_is_left_where_the_shift_is_huge():
    vol = np.ones((4, 3, 3), "u2")
    for shifts in (np.array([[2**40]]), np.array([[-(2**40)]]), np.array([[1e30]]), np.array([[np.nan]])):
        assert (shift_along_depth(vol, shifts, fill_value=7) == 7).all()


@pytest.mark.filterwarnings("error")
def test_the_nearest_voxel_is_repeated_as_it_is():
    """It is not computed from two voxels: infinity would become NaN."""
    vol = np.array([np.inf, 1, 2, -np.inf], "f4")[:, None, None] * np.ones((1, 1, 2), "f4")
    for shift, expected in [(1.5, [1.5, -np.inf, -np.inf, -np.inf]), (-3.5, [np.inf] * 4)]:
        got = shift_along_depth(vol, np.array([[shift]]), fill_value=None)
        assert got[:, 0, 0].tolist() == expected
    for shift, last in [(2**40, -np.inf), (np.nan, -np.inf), (-1e30, np.inf)]:
        assert (shift_along_depth(vol, np.array([[shift]]), fill_value=None) == last).all()


HUGE = [np.array([[2**31 - 1, -(2**31)]], "i4"), np.array([[np.nan, 1e30]], "f4"), np.array([[-np.inf, np.inf]], "f4")]


@needs_compiler
@pytest.mark.parametrize("depth_axis", [0, 2])
@pytest.mark.parametrize("shifts", HUGE, ids=lambda s: str(s[0, 0]))
def test_the_kernel_itself_knows_what_is_beyond(monkeypatch, shifts, depth_axis):
    monkeypatch.setattr(shift_module, "load", emulated)
    vol, fill = np.ones((40, 3, 50), "f4"), np.array(7, "f4")
    assert (shift_module._by_kernel(vol, shifts, depth_axis, (0, 0), "fill", fill, 40) == 7).all()
    assert (shift_module._by_kernel(vol, shifts, depth_axis, (0, 0), "repeat", fill, 40) == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shifts", [*HUGE, np.array([[-(2**15)]], "i2"), np.array([[2**63]], "u8")], ids=str)
def test_huge_shifts_on_a_device(cupy, shifts):
    vol = cupy.ones((40, 3, 50), "u2")
    assert bool((shift_along_depth(vol, cupy.asarray(shifts), fill_value=7) == 7).all())
    assert bool((shift_along_depth(vol, shifts, depth_axis=2, fill_value=7) == 7).all())


def test_an_empty_volume():
    assert shift_along_depth(np.ones((0, 3, 4)), np.array([[1]])).shape == (0, 3, 4)
    assert shift_along_depth(np.ones((2, 3, 4)), np.array([[1]]), planes=0, depth_axis=1).shape == (2, 0, 4)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "wrap", "access", "fill"), matrix(["u1", "u2", "f4", "f8"], [False, True], [16, 4], [7, None])
)
def test_neighbours_move_together_or_apart(monkeypatch, dtype, wrap, access, fill):
    rng = np.random.default_rng(3)
    vol = rng.gamma(2.0, 20.0, (21, 5, 48)).astype(dtype)
    steps = np.repeat(rng.integers(-12, 13, (5, 8)), 6, axis=1)  # steps lie within some accesses, and between others
    steps[0, 0], steps[1, 1] = 2**31 - 1, -(2**31)
    expected = slow(vol, np.clip(steps, -(2**30), 2**30), 0, (0, 0), wrap, fill)
    monkeypatch.setattr(shift_module, "load", emulated)
    monkeypatch.setattr(shift_module, "is_device_array", lambda _: True)
    monkeypatch.setattr(shift_module, "_ACCESS_BYTES", access)
    assert np.array_equal(shift_along_depth(vol, steps, wrap=wrap, fill_value=fill), expected)
    odd = vol[:, :, 1:]  # begins where no wide access may
    assert np.array_equal(shift_along_depth(odd, steps[:, 1:], wrap=wrap, fill_value=fill), expected[:, :, 1:])


@needs_compiler
@pytest.mark.parametrize("planes", [3, 40])
def test_other_planes_than_the_volume_has(monkeypatch, planes):
    vol = np.random.default_rng(0).normal(size=(9, 20, 11)).astype("f4")
    shifts = np.random.default_rng(1).integers(-5, 25, (9, 11))
    for depth_first in (False, True):
        one = (
            np.ascontiguousarray(vol.transpose(1, 0, 2))
            if depth_first
            else np.ascontiguousarray(vol.transpose(0, 2, 1))
        )
        axis = 0 if depth_first else 2
        expected = np.zeros((9, 11, planes), "f4")
        for i, j, z in np.ndindex(9, 11, planes):
            if 0 <= z + shifts[i, j] < 20:
                expected[i, j, z] = vol[i, z + shifts[i, j], j]
        expected = np.moveaxis(expected, -1, axis)
        assert np.array_equal(shift_along_depth(one, shifts, depth_axis=axis, planes=planes), expected)
        with monkeypatch.context() as patch:
            patch.setattr(shift_module, "load", emulated)
            patch.setattr(shift_module, "is_device_array", lambda _: True)
            assert np.array_equal(shift_along_depth(one, shifts, depth_axis=axis, planes=planes), expected)


@pytest.mark.parametrize(
    ("vol", "shifts", "options", "error", "message"),
    [
        (np.ones((3, 3)), np.ones((1, 1)), {}, ValueError, "three axes"),
        (np.ones((3, 3, 3)), np.ones((1, 1)), {"depth_axis": 3}, ValueError, "depth_axis=3"),
        (np.ones((3, 3, 3)), np.ones(3), {}, ValueError, r"shifts of shape \(3,\)"),
        (np.ones((3, 3, 3)), np.ones((0, 3)), {}, ValueError, r"shifts of shape \(0, 3\)"),
        (np.ones((3, 3, 3), complex), np.ones((1, 1)), {}, TypeError, "complex128"),
        (np.ones((3, 3, 3), "u1"), np.ones((1, 1)), {"fill_value": 256}, TypeError, "fill_value=256"),
        (np.ones((3, 3, 3)), np.ones((1, 1)), {"planes": -1}, ValueError, "planes=-1"),
        (np.ones((3, 3, 3), "u1"), np.ones((1, 1)), {"fill_value": np.nan}, TypeError, "fill_value=nan"),
    ],
)
def test_bad_input(vol, shifts, options, error, message):
    with pytest.raises(error, match=message):
        shift_along_depth(vol, shifts, **options)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_the_last_integers_of_64_bits_do_not_overflow(dtype):
    """float64 rounds them up to a number that the dtype has no more."""
    limits = np.iinfo(dtype)
    for value in (limits.max, limits.min):
        vol = np.full((9, 3, 4), value, dtype)
        for shift in (0.25, 0.5, 1.0):
            got = shift_along_depth(vol, np.full((3, 4), shift, "f4"), depth_axis=0, wrap=True)
            assert (got == value).all()
    odd = np.full((9, 3, 4), 2**53 + 1, dtype)
    assert np.array_equal(shift_along_depth(odd, np.full((3, 4), 2, "f4"), depth_axis=0, wrap=True), odd)


KINDS = [
    (False, "fill", False, "widest"),
    (False, "wrap", False, 1),
    (False, "wrap", True, 1),
    (False, "repeat", False, "widest"),
    (True, "fill", True, 1),
    (True, "wrap", False, 1),
    (True, "repeat", True, 1),
]


@pytest.mark.parametrize(("dtype", "kind"), matrix(CUDA_TYPES, KINDS))
def test_gather_compiles(dtype, kind):
    linear, beyond, depth_lane, vec = kind
    vec = max(1, 4 // np.dtype(dtype).itemsize) if vec == "widest" else vec
    spec = shift_module.kernel_spec(np.dtype(dtype), linear=linear, beyond=beyond, depth_lane=depth_lane, vec=vec)
    assert b"shift_along_depth" in compile_kernel(spec, "sm_90")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [*(pytest.param(k, marks=pytest.mark.sanitize) for k in range(2)), *range(2, 48)])
def test_same_on_a_device(cupy, seed):
    vol, shifts, depth_axis, origin, wrap, fill = case(seed, 130)
    arguments = {"depth_axis": depth_axis, "origin": origin, "wrap": wrap, "fill_value": fill}
    order = np.argsort([-abs(stride) for stride in vol.strides])
    on_device = cupy.asarray(np.ascontiguousarray(vol.transpose(order))).transpose(np.argsort(order).tolist())
    got = shift_along_depth(on_device, cupy.asarray(shifts) if seed % 3 else shifts, **arguments)
    assert isinstance(got, cupy.ndarray)
    assert_near(cupy.asnumpy(got), shift_along_depth(vol, shifts, **arguments))
