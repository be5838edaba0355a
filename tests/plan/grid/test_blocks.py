"""If this fails, blocks of a resampling miss voxels, read too much, or do not fit memory."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from linumpy.errors import DeviceMemoryError
from linumpy.plan.boundary import MODES
from linumpy.plan.grid.block_shape import BlockBytes, choose_block_shape, source_bound, voxels_read
from linumpy.plan.grid.blocks import CLIPPED_MODES, AffineGrid, ResamplePlan


@st.composite
def grids(draw, most=14, orders=(0, 1)):
    rank = draw(st.integers(1, 3))
    sizes = st.integers(1, {1: 60, 2: 25, 3: most}[rank])
    source, output = (tuple(draw(st.lists(sizes, min_size=rank, max_size=rank))) for _ in range(2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["scaled", "turned", "any", "tenths", "whole numbers", "flipped"]))
    matrix = {
        "scaled": np.diag(rng.uniform(0.2, 3, rank)),
        "turned": np.linalg.qr(rng.normal(size=(rank, rank)))[0] * rng.uniform(0.5, 2),
        "any": rng.normal(size=(rank, rank)),
        "tenths": rng.integers(1, 30, rank * rank).reshape(rank, rank) / 10 + np.eye(rank) / 7,
        "whole numbers": np.diag(rng.integers(1, 4, rank)).astype(float),
        "flipped": -np.eye(rank),
    }[kind]
    offset = rng.normal(size=rank) * draw(st.sampled_from([0, 1, 10, 200]))
    offset = np.round(offset, draw(st.sampled_from([0, 1, 9])))
    order = draw(st.sampled_from(orders))
    mode = draw(st.sampled_from(MODES if order < 2 else CLIPPED_MODES))
    rows = tuple(map(tuple, matrix.tolist()))
    return AffineGrid(source, output, rows, tuple(offset.tolist()), order, mode)


@st.composite
def plans(draw, **options):
    grid = draw(grids(**options))
    return ResamplePlan(grid, tuple(draw(st.integers(1, n + 2)) for n in grid.output_shape))


def whole(image, grid, cval=0.0):
    return ndimage.affine_transform(
        image, grid.matrix, grid.offset, grid.output_shape, order=grid.order, mode=grid.mode, cval=cval
    )


@given(plans(), st.integers(0, 2**32 - 1))
def test_a_box_holds_all_that_has_a_say(plan, seed):
    """The whole image and one that is poisoned outside of the box give the same block."""
    grid = plan.grid
    image = np.random.default_rng(seed).uniform(1, 2, grid.source_shape)
    expected = whole(image, grid, 7.0)
    numbers = np.random.default_rng(seed).permutation(len(plan))[:6]
    for block in map(plan.block, numbers.tolist()):
        poisoned = np.full_like(image, np.nan)
        poisoned[block.source_box] = image[block.source_box]
        assert np.array_equal(whole(poisoned, grid, 7.0)[block.box], expected[block.box]), block


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offset", [0.0, -0.7, -37.0, 41.3, 999.6, -1234.5])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 20])
def test_an_image_continued_far_beyond_its_edges(mode, offset, n):
    grid = AffineGrid((n,), (40,), ((0.7,),), (offset,), 1, mode)
    image = np.random.default_rng(n).uniform(1, 2, n)
    expected = whole(image, grid)
    read = 0
    for block in ResamplePlan(grid, (3,)):
        poisoned = np.full_like(image, np.nan)
        poisoned[block.source_box] = image[block.source_box]
        assert np.array_equal(whole(poisoned, grid)[block.box], expected[block.box]), block
        read += block.source_shape[0]
    assert n < 20 or read < 14 * n * 0.8


@given(plans())
def test_a_box_of_voxels_around_the_places_and_no_more(plan):
    """In the clipped modes: every place, found one by one, less than three voxels from the sides of the box."""
    grid = plan.grid
    if grid.mode not in CLIPPED_MODES:
        return
    for block in itertools.islice(plan, 6):
        corners = itertools.product(*((a, b - 1) for a, b in zip(block.start, block.stop, strict=True)))
        places = np.array([np.array(grid.matrix) @ corner + grid.offset for corner in corners])
        last = np.array(grid.source_shape) - 1
        low, high = places.min(axis=0), places.max(axis=0)
        if math.prod(block.source_shape) == 0:
            assert grid.mode == "constant"
            assert (high < 0).any() or (low > last).any()
            continue
        low, high = np.clip(low, 0, last), np.clip(high, 0, last)
        assert (np.array(block.source_start) > low - 3).all()
        assert (np.array(block.source_stop) - 1 < high + 3).all()


@given(plans())
def test_boxes_lie_in_the_source_and_keep_the_bound(plan):
    bound = source_bound(plan.grid, plan.block_shape)
    for block in plan:
        for a, b, n in zip(block.source_start, block.source_stop, plan.grid.source_shape, strict=True):
            assert 0 <= a <= b <= n
        assert math.prod(block.source_shape) <= bound
    assert plan.largest[0] <= bound
    assert plan.largest[1] == max(math.prod(block.shape) for block in plan)


@given(plans())
def test_blocks_are_the_output_once(plan):
    seen = np.zeros(plan.grid.output_shape, int)
    for number, block in enumerate(plan):
        assert block.number == number
        assert block == plan.block(number)
        assert all(a % b == 0 for a, b in zip(block.start, plan.block_shape, strict=True))
        seen[block.box] += 1
    assert (seen == 1).all()
    assert number + 1 == len(plan)


@given(grids(most=40), st.data())
def test_blocks_fit_the_memory(grid, data):
    stored = tuple(data.draw(st.integers(1, n)) for n in grid.output_shape)
    cost = BlockBytes(*(data.draw(st.sampled_from([1, 2, 4, 8])) for _ in range(2)), work=data.draw(st.integers(0, 4)))
    budget = data.draw(st.integers(1, 300_000))
    if cost.peak(source_bound(grid, stored), math.prod(stored)) > budget:
        with pytest.raises(DeviceMemoryError, match=f"but {budget} may be used"):
            choose_block_shape(grid, stored, cost, budget)
        return
    block = choose_block_shape(grid, stored, cost, budget)
    plan = ResamplePlan(grid, block)
    assert all(b % s == 0 for b, s in zip(block, stored, strict=True))
    source = plan.largest[0]
    output = max(math.prod(one.shape) for one in plan)
    assert cost.peak(source, output) <= budget


def test_blocks_grow_with_the_memory():
    grid = AffineGrid((512,) * 3, (256,) * 3, ((2.0, 0, 0), (0, 2.0, 0), (0, 0, 2.0)), (0.5,) * 3, 1, "constant")
    shapes = [choose_block_shape(grid, (32,) * 3, BlockBytes(2, 2), budget) for budget in (2**21, 2**24, 2**30)]
    assert shapes == [(32, 32, 32), (64, 64, 64), (64, 128, 128)]


def halving(n):
    return AffineGrid((2 * n,) * 3, (n,) * 3, ((2.0, 0, 0), (0, 2.0, 0), (0, 0, 2.0)), (0.5,) * 3, 1, "nearest")


def test_to_halve_reads_every_voxel_once():
    """Blocks of whole chunks on both sides: no box reaches into a chunk beside those that are its own."""
    grid = halving(256)
    plan = ResamplePlan(grid, (64, 32, 128))
    for block in plan:
        assert block.source_start == tuple(2 * a for a in block.start)
        assert block.source_stop == tuple(2 * b for b in block.stop)
    assert voxels_read(grid, (64, 32, 128), (64, 64, 64)) == 512**3


@given(plans(orders=(0, 1, 3)), st.data())
def test_what_is_read_is_counted(plan, data):
    """To the voxel, where axes go by themselves, swapped or not."""
    grid = plan.grid
    chunks = tuple(data.draw(st.integers(1, n)) for n in grid.source_shape)
    matrix = np.diag(np.diag(grid.matrix) + 0.01)[data.draw(st.permutations(range(grid.rank)))]
    if np.linalg.matrix_rank(matrix) < grid.rank:
        return
    rows = tuple(map(tuple, matrix.tolist()))
    grid = AffineGrid(grid.source_shape, grid.output_shape, rows, grid.offset, grid.order, "nearest")
    total = 0
    for block in ResamplePlan(grid, plan.block_shape):
        rows = zip(block.source_start, block.source_stop, chunks, grid.source_shape, strict=True)
        total += math.prod(min(-(-b // c) * c, n) - a // c * c for a, b, c, n in rows)
    assert voxels_read(grid, plan.block_shape, chunks) == total


def test_blocks_are_cut_so_that_little_is_read_twice():
    """Where only X is made finer, or boxes overlap along one axis, blocks grow there first."""
    rows = ((1.0, 0, 0.7), (0, 1.0, 0), (0, 0, 1.0))  # Z depends on X: a block that is long in X needs many planes
    sheared = AffineGrid((512,) * 3, (512,) * 3, rows, (0.0,) * 3, 1, "constant")
    budget, cost, chunk = 2**26, BlockBytes(2, 2), (32,) * 3
    shape = choose_block_shape(sheared, chunk, cost, budget, chunk)
    assert shape[2] < shape[0]
    cubic = (64, 64, 64)
    assert math.prod(shape) >= math.prod(cubic)
    assert voxels_read(sheared, shape, chunk) < voxels_read(sheared, cubic, chunk)
    # Chunks of whole planes: to cut them along Y or X would read each of them many times.
    planes = choose_block_shape(halving(256), (16,) * 3, cost, budget, (1, 512, 512))
    assert planes[1:] == (256, 256)
    assert voxels_read(halving(256), planes, (1, 512, 512)) == 512**3


def test_many_blocks_rather_than_the_largest():
    shape = choose_block_shape(halving(1024), (128, 128, 256), BlockBytes(2, 2, output_work=2), 2**33, (256,) * 3)
    plan = ResamplePlan(halving(1024), shape)
    assert 24 <= len(plan) <= 64


def test_fewer_blocks_where_chunks_are_cut():
    """Chunks of the source that no block ends with: larger blocks cut fewer of them, if memory allows."""
    factor = 2.7
    rows = tuple(tuple(factor * (a == b) for b in range(3)) for a in range(3))
    grid = AffineGrid((2048, 2048, 4096), (758, 758, 1517), rows, ((factor - 1) / 2,) * 3, 1, "nearest")
    chunk, cost, reads = (256,) * 3, BlockBytes(2, 2), []
    for budget in (2**31, 2**33):
        shape = choose_block_shape(grid, (128, 128, 256), cost, budget, chunk)
        reads.append(voxels_read(grid, shape, chunk) / math.prod(grid.source_shape))
        assert len(ResamplePlan(grid, shape)) >= 8
    assert reads[1] < 1.5 < reads[0]


def test_memory_for_the_work_is_counted():
    cost = BlockBytes(2, 4, work=8, output_work=3)
    assert cost.peak(100, 10) == 2 * (200 + 40) + 800 + 30
    assert cost.peak(100, 10, 150, 20) == 2 * (200 + 40) + 1200 + 60


def test_a_block_that_is_wholly_outside_reads_nothing():
    grid = AffineGrid((10, 10), (10, 10), ((1.0, 0.0), (0.0, 1.0)), (20.0, 0.0), 1, "constant")
    (block,) = ResamplePlan(grid, (10, 10))
    assert block.source_shape == (0, 0)


GOOD = {
    "source_shape": (4, 5),
    "output_shape": (3, 2),
    "matrix": ((1.0, 0.0), (0.0, 1.0)),
    "offset": (0.0, 0.0),
    "order": 1,
    "mode": "constant",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": 6}, "order=6: a spline order is an integer from 0 to 5"),
        ({"order": True}, "order=True"),
        ({"mode": "opencv"}, "mode='opencv' is unknown: choose one of constant"),
        ({"order": 3, "mode": "reflect"}, "order=3 with mode='reflect' cannot be computed block by block"),
        ({"matrix": ((1.0, math.nan), (0.0, 1.0))}, "NaN or infinity"),
        ({"offset": (math.inf, 0.0)}, "NaN or infinity"),
        ({"matrix": ((1.0, 2.0), (2.0, 4.0))}, "singular"),
        ({"source_shape": (0, 5)}, r"shape \(0, 5\) has no voxels"),
    ],
)
def test_bad_grids(change, message):
    with pytest.raises(ValueError, match=message):
        AffineGrid(**GOOD | change)
