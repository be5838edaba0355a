"""If this fails, a block made by itself differs from that part of the whole."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import ndimage

from linumpy.gpu.interpolation import affine_transform
from linumpy.plan.boundary import MODES
from linumpy.plan.grid.blocks import CLIPPED_MODES, AffineGrid, Block, ResamplePlan
from linumpy.plan.grid.regrid import without_rounding
from linumpy.resample.blocks import block as block_module
from linumpy.resample.blocks.block import affine_box
from tests.support.budget import examples, matrix
from tests.support.gpu import on_cpu
from tests.support.gpu.emulator import needs_compiler

DTYPES = ["u1", "u2", "i2", "i8", "f4", "f8"]
SIZES = [1, 2, 3, 5, 9, 17, 23]


def turned(rng, rank):
    kind = rng.integers(5)
    if kind == 0:
        return np.diag(rng.uniform(0.2, 3, rank))
    if kind == 1:
        return np.linalg.qr(rng.normal(size=(rank, rank)))[0] * rng.uniform(0.5, 2)
    if kind == 2:  # places that hit voxels, or would but for rounding
        return rng.integers(1, 30, rank * rank).reshape(rank, rank) / 10 + np.eye(rank) / 7
    return np.eye(rank) * rng.choice([-1, 1, 2]) if kind == 3 else rng.normal(size=(rank, rank))


def random_image(rng, shape, dtype):
    if dtype[0] != "f":
        return rng.integers(0, 120, shape).astype(dtype)
    image = rng.normal(size=shape).astype(dtype) * 50
    if rng.integers(3) == 0:
        image.flat[rng.integers(image.size)] = rng.choice([np.nan, np.inf, -np.inf])
    return image


@st.composite
def cases(draw):
    """An image, a plan, and a value outside."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rank = draw(st.integers(2, 3))
    source, output = (tuple(rng.choice(SIZES, rank).tolist()) for _ in range(2))
    offset = rng.normal(size=rank) * rng.choice([0, 1, 10])
    offset = np.round(offset, int(rng.choice([0, 1, 9])))
    order, mode = draw(st.integers(0, 1)), draw(st.sampled_from(MODES))
    matrix = tuple(map(tuple, turned(rng, rank).tolist()))
    grid = AffineGrid(source, output, matrix, tuple(offset.tolist()), order, mode)
    plan = ResamplePlan(grid, tuple(int(rng.integers(1, n + 1)) for n in output))
    return (
        random_image(rng, source, draw(st.sampled_from(DTYPES))),
        plan,
        draw(st.sampled_from([0.0, 1.7, -3.0, 300.0])),
    )


def by_blocks(image, plan, cval, xp=np):
    result = xp.empty(plan.grid.output_shape, image.dtype)
    for block in plan:
        box = xp.ascontiguousarray(image[block.source_box])
        out = xp.empty(block.shape, image.dtype)
        assert affine_box(box, plan.grid, block, cval, out) is out
        result[block.box] = out
    return result


def by_scipy(image, grid, cval):
    return ndimage.affine_transform(
        image, grid.matrix, grid.offset, grid.output_shape, order=grid.order, mode=grid.mode, cval=cval
    )


def not_settled_by_rounding(grid):
    """Voxels of the output that no rounding error puts outside, or moves from one nearest voxel to another."""
    voxels = np.indices(grid.output_shape, float)
    points = np.tensordot(grid.matrix, voxels, 1) + np.reshape(grid.offset, (-1, *(1,) * grid.rank))
    settled = np.zeros(grid.output_shape, bool)
    for row, n in zip(points, grid.source_shape, strict=True):
        settled |= (grid.mode == "constant") & (np.minimum(abs(row), abs(row - (n - 1))) < 2e-6)
        settled |= (grid.order == 0) & (abs(row % 1 - 0.5) < 2e-6)
    return ~settled


@pytest.mark.filterwarnings("ignore:invalid value")
@given(cases())
def test_blocks_are_scipys_whole_to_the_bit(case):
    """Except for voxels next to an edge or a tie, which in SciPy depend on rounding errors."""
    image, plan, cval = case
    kept = not_settled_by_rounding(plan.grid)
    assert by_blocks(image, plan, cval)[kept].tobytes() == by_scipy(image, plan.grid, cval)[kept].tobytes()


def decimal(rng, low, high):
    """A number of few digits, exactly."""
    return Fraction(int(rng.integers(low, high)), int(rng.choice([1, 10, 100, 1000])))


def aligned_grids(rng):
    """Grids of two volumes along one axis, whose first or last voxel is often just at the edge of the other's."""
    old, new = decimal(rng, 1, 90), decimal(rng, 1, 90)
    if rng.integers(2):
        new = old * int(rng.integers(1, 9)) / int(rng.integers(1, 9))
    n, m = int(rng.integers(2, 40)), int(rng.integers(2, 60))
    origin = decimal(rng, -5000, 5000)
    first = origin + rng.choice([-old / 2, 0 * old, (n - 1) * old - (m - 1) * new, (n - 1) * old, old * 3, -3 * new])
    return (n, old, origin), (m, new, first)


@needs_compiler
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("order", [0, 1, 3])
def test_edges_are_where_exact_numbers_put_them(monkeypatch, on_device, order):
    """Grids in µm, as like= plans them; the oracle computes with fractions. Order 0: the upper of two voxels."""
    if on_device:
        on_cpu.patch(monkeypatch)
    rng = np.random.default_rng(order)
    lost = []
    for _ in range(examples(150)):
        (n, old, origin), (m, new, first) = aligned_grids(rng)
        exact = [(first + i * new - origin) / old for i in range(m)]
        slope, offset = float(new) / float(old), (float(first) - float(origin)) / float(old)
        matrix, shift = without_rounding(np.diag([slope, 1.0, 1.0]), np.array([offset, 0.0, 0.0]), (m, 2, 3))
        grid = AffineGrid((n, 2, 3), (m, 2, 3), matrix, shift, order, "constant")
        values = np.arange(1, n + 1) if order == 0 else np.full(n, 100)
        image = np.broadcast_to(values[:, None, None], (n, 2, 3)).astype("u2")
        got = by_blocks(image, ResamplePlan(grid, (int(rng.integers(1, m + 1)), 2, 2)), 0.0)
        inside = np.array([0 <= c <= n - 1 for c in exact])
        nearest = np.array([math.floor(min(max(c, 0), n - 1) + Fraction(1, 2)) for c in exact])
        expected = np.where(inside, values[nearest], 0)
        if not (got == expected[:, None, None]).all():
            lost.append((n, old, origin, m, new, first))
    assert not lost


@pytest.mark.parametrize("strip", [1, 7, 40])
def test_strips_of_any_length(monkeypatch, strip):
    monkeypatch.setattr(block_module, "_STRIP", strip)
    image = np.random.default_rng(0).normal(size=(6, 7, 8))
    grid = AffineGrid(
        (6, 7, 8), (5, 6, 9), ((0.9, 0.1, 0.0), (0.0, 1.1, 0.2), (0.1, 0.0, 0.8)), (0.3,) * 3, 1, "nearest"
    )
    got = by_blocks(image, ResamplePlan(grid, (3, 6, 4)), 0.0)
    assert got.tobytes() == by_scipy(image, grid, 0.0).tobytes()


@pytest.mark.parametrize("mode", CLIPPED_MODES)
@pytest.mark.parametrize("order", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", ["f8", "u2"])
def test_splines_forget_where_their_box_was_cut(order, mode, dtype):
    rng = np.random.default_rng(order)
    image = (rng.uniform(0, 1000, (90, 80)) * (1 if dtype == "f8" else 60)).astype(dtype)
    grid = AffineGrid((90, 80), (100, 90), ((0.8, 0.3), (-0.2, 0.9)), (2.3, 5.1), order, mode)
    plan = ResamplePlan(grid, (8, 9))
    assert min(np.prod(block.source_shape) for block in plan) < image.size / 2
    kept = not_settled_by_rounding(grid)
    got, expected = by_blocks(image, plan, 5.0)[kept], by_scipy(image, grid, 5.0)[kept]
    assert np.abs(got.astype(float) - expected).max() <= (1e-7 if dtype == "f8" else 1)
    if dtype == "u2":
        assert (got != expected).mean() < 1e-3


def test_half_floats_are_interpolated_as_floats():
    image = np.random.default_rng(0).normal(size=(9, 8)).astype("f2")
    grid = AffineGrid((9, 8), (12, 13), ((0.7, 0.1), (0.0, 0.6)), (-1.0, 0.2), 1, "constant")
    got = by_blocks(image, ResamplePlan(grid, (5, 4)), 0.1)
    assert got.tobytes() == by_scipy(image.astype("f4"), grid, 0.1).astype("f2").tobytes()


@pytest.mark.parametrize("dtype", [*DTYPES, "f2"])
@pytest.mark.parametrize("cval", [0.0, 2.6, -1.0, 1e6])
def test_outside_is_what_scipy_makes_of_cval(dtype, cval):
    grid = AffineGrid((4, 4), (3, 3), ((1.0, 0.0), (0.0, 1.0)), (50.0, 0.0), 1, "constant")
    got = by_blocks(np.ones((4, 4), dtype), ResamplePlan(grid, (3, 3)), cval)
    expected = by_scipy(np.ones((4, 4), "f4" if dtype == "f2" else dtype), grid, cval)
    with np.errstate(over="ignore"):
        assert got.tobytes() == expected.astype(dtype).tobytes()


@needs_compiler
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_kernels_read_no_voxel_beyond_a_box(as_if_on_a_device, case):
    """Blocks from their boxes are the whole from the whole, to the bit, in all modes and where axes have one voxel."""
    image, plan, cval = case
    if image.dtype == bool:
        return
    grid = plan.grid
    one = Block(0, (0,) * grid.rank, grid.output_shape, (0,) * grid.rank, grid.source_shape)
    whole = affine_box(image, grid, one, cval, np.empty(grid.output_shape, image.dtype))
    for block in itertools.islice(plan, 20):
        # Before and behind the box there is something else than in the image.
        size = int(np.prod(block.source_shape))
        box = np.full(size + 2000, 77, image.dtype)[1000 : 1000 + size].reshape(block.source_shape)
        box[...] = image[block.source_box]
        out = np.empty(block.shape, image.dtype)
        affine_box(box, grid, block, cval, out)
        assert out.tobytes() == whole[block.box].tobytes(), block


@needs_compiler
@pytest.mark.parametrize("scale", [2 / 3, 0.5, 2.0, -1.5])
@pytest.mark.parametrize("mode", MODES)
def test_nearest_voxels_at_ties_are_those_of_the_whole_call(as_if_on_a_device, mode, scale):
    """A coordinate next to a tie is taken one way by kernels and SciPy, and by blocks as exact numbers decide."""
    image = np.random.default_rng(0).integers(0, 200, (19, 23)).astype("u2")
    offset = 0.5 * scale - 0.5 + (22.0 if scale < 0 else 0.0)
    grid = AffineGrid(image.shape, (31, 29), ((scale, 0.0), (0.0, scale)), (offset, offset), 0, mode)
    expected = ndimage.affine_transform(image, np.array(grid.matrix), offset, (31, 29), order=0, mode=mode, cval=7)
    whole = affine_transform(image, [scale] * 2, offset, output_shape=(31, 29), order=0, mode=mode, cval=7)
    assert np.array_equal(whole, expected)
    if scale == 2 / 3 and mode in ("constant", "nearest", "grid-constant"):
        exact = [[Fraction(2 * i, 3) - Fraction(1, 6) for i in range(n)] for n in (31, 29)]
        voxels = np.array([np.vectorize(float)(np.add(axis, 1e-7)) for axis in np.meshgrid(*exact, indexing="ij")])
        expected = ndimage.map_coordinates(image, voxels, order=0, mode=mode, cval=7)
    assert np.array_equal(by_blocks(image, ResamplePlan(grid, (8, 9)), 7.0), expected)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "mode", "rank", "order"), matrix(["u2", "f4", "f8", "i4"], CLIPPED_MODES, [3, 2], [2, 3, 5])
)
def test_splines_by_kernels(as_if_on_a_device, mode, dtype, rank, order):
    """Filtered box by box, also beyond the edges of the image, and cut where the filter forgets."""
    rng = np.random.default_rng(rank)
    image = (rng.uniform(0, 1000, (30, 70, 60)[-rank:]) * (1 if dtype[0] == "f" else 60)).astype(dtype)
    matrix = np.array([[0.9, 0.1, 0.0], [0.05, 0.8, 0.3], [0.0, -0.2, 0.9]])[-rank:, -rank:]
    output = (6, 80, 70)[-rank:]
    grid = AffineGrid(image.shape, output, tuple(map(tuple, matrix.tolist())), (-2.0, 2.3, 5.1)[-rank:], order, mode)
    plan = ResamplePlan(grid, (12, 20, 30)[-rank:])
    assert min(np.prod(block.source_shape) for block in plan) < image.size / 2
    kept = not_settled_by_rounding(grid)
    got, expected = by_blocks(image, plan, 5.0)[kept].astype(float), by_scipy(image, grid, 5.0)[kept].astype(float)
    assert np.abs(got - expected).max() <= (1e-5 * 1000 if dtype == "f4" else 1e-7 if dtype == "f8" else 1)


@pytest.mark.parametrize(
    ("dtype", "order", "device", "expected"),
    [
        ("u2", 1, "cuda", (0, 0)),
        ("u2", 3, "cuda", (4, 0)),
        ("f8", 3, "cuda", (8, 0)),
        ("i4", 3, "cuda", (8, 0)),
        ("?", 0, "cuda", (0, 8)),
        ("u2", 1, "cpu", (0, 0)),
        ("f2", 1, "cpu", (4, 4)),
        ("u2", 3, "cpu", (16, 0)),
        ("u2", 2, "cuda", (4, 0)),
        ("u2", 5, "cuda", (4, 0)),
    ],
)
def test_the_memory_that_is_taken_besides(dtype, order, device, expected):
    assert block_module.work_bytes(np.dtype(dtype), order, device) == expected


@pytest.mark.gpu
@settings(max_examples=40)
@given(cases())
def test_blocks_are_the_whole_on_a_device(case):
    """One block over everything is the whole call: the seam between blocks must not show."""
    import cupy

    image, plan, cval = case
    grid = plan.grid
    if grid.mode not in CLIPPED_MODES and grid.mode != "grid-constant":
        return
    image = cupy.asarray(image)
    one = ResamplePlan(grid, grid.output_shape)
    try:
        whole = by_blocks(image, one, cval, cupy)
        parts = by_blocks(image, plan, cval, cupy)
    except NotImplementedError:
        return
    assert cupy.asnumpy(parts).tobytes() == cupy.asnumpy(whole).tobytes()
