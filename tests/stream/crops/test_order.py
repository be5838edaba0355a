"""If this fails, crops come twice or never, chunks are fetched too often, or some voxels come too often in blocks."""

import itertools
import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
import zarr
from scipy import stats

from linumpy import stream
from linumpy.plan.grid.blocks import position_in_blocks
from linumpy.stream.crops.order import CropAxis, plan_columns
from linumpy.stream.crops.stitch import positions
from tests.support.object_server import serve


def test_crops_in_blocks_come_once_and_block_by_block():
    rng = np.random.default_rng(0)
    for _ in range(200):
        rank = rng.integers(1, 5)
        counts, block = rng.integers(1, 7, rank).tolist(), rng.integers(1, 9, rank).tolist()
        found = [position_in_blocks(index, counts, block) for index in range(math.prod(counts))]
        every = list(itertools.product(*map(range, counts)))
        assert found == sorted(every, key=lambda one: (*(i // b for i, b in zip(one, block, strict=True)), *one))


def fetches(crops, capacity):
    """Count the chunks that a cache of a number of chunks lacks; a crop is a range of chunks along each axis."""
    kept, count = OrderedDict(), 0
    for crop in crops:
        for chunk in itertools.product(*crop):
            count += chunk not in kept
            kept[chunk] = None
            kept.move_to_end(chunk)
            if len(kept) > capacity:
                kept.popitem(last=False)
    return count


def in_columns(axes, widths):
    """Yield the chunks of each crop, column by column."""
    whole = axes[0].voxels
    for corner in itertools.product(*(range(0, axis.voxels, w) for axis, w in zip(axes[1:], widths, strict=True))):
        sides = [(0, whole), *((a, a + w) for a, w in zip(corner, widths, strict=True))]
        touching = [
            [
                range(start // axis.chunk, (min(start + axis.size, axis.voxels) - 1) // axis.chunk + 1)
                for start in axis.starts
                if start < side[1] and start + axis.size > side[0]
            ]
            for axis, side in zip(axes, sides, strict=True)
        ]
        yield from itertools.product(*touching)


@pytest.mark.parametrize(
    ("shape", "chunk", "crop", "overlap", "unit", "bars"),
    [
        ((64, 640, 560), 16, (32, 32, 32), 8, 16, (1.0, 1.3)),
        ((96, 900, 1100), 32, (16, 24, 32), 8, 32, (1.15, 1.3)),
        ((90, 333, 500), 20, (30, 24, 31), 11, 16, (1.2, 1.4)),  # columns of a tenth are four crops wide
        ((300, 2900), 10, (20, 33), 9, 20, (1.1, 1.3)),
    ],
)
def test_columns_fetch_chunks_once_where_a_slab_fits_and_few_twice_with_a_tenth(
    shape, chunk, crop, overlap, unit, bars
):
    axes = [CropAxis(positions(n, size, overlap), size, n, chunk, unit) for n, size in zip(shape, crop, strict=True)]
    line, chunk_nbytes = 8 * (crop[0] + unit), 2 * chunk ** len(shape)
    whole = plan_columns(axes, line, chunk_nbytes, 1, 2**40)
    needed = line * math.prod(shape[1:]) + whole.cache_bytes
    for share, bar in zip((1, 0.5, 0.1), (1, *bars), strict=True):
        columns = plan_columns(axes, line, chunk_nbytes, 1, int(needed * share))
        assert line * math.prod(columns.widths) + columns.cache_bytes <= needed * share
        assert all(width == n or width % unit == 0 for width, n in zip(columns.widths, shape[1:], strict=True))
        count = fetches(in_columns(axes, columns.widths), columns.cache_bytes // chunk_nbytes)
        assert 1 <= count / math.prod(axis.chunks for axis in axes) <= bar
    assert plan_columns(axes, line, chunk_nbytes, 1, 1).widths == (unit,) * (len(shape) - 1)


def test_small_blocks_of_crops_need_a_tenth_of_a_slab_of_chunks():
    count = {}
    for block in (None, (4, 3, 3)):
        grid = stream.CropGrid("unused", (32, 32, 32), 8, volume=(96, 320, 320), block=block)
        count[block] = fetches(([range(a // 16, (b - 1) // 16 + 1) for a, b in one.aabb] for one in grid), 120)
    assert count[4, 3, 3] < 1.4 * 2400 < 1.7 * 2400 < count[None]
    with pytest.raises(ValueError, match="block="):
        stream.CropGrid("unused", (32, 32, 32), 8, volume=(96, 320, 320), block=(4, 3))


@pytest.mark.parametrize(
    ("shape", "crop"), [((13, 40), (4, 9)), ((7, 11, 30), (7, 4, 6)), ((9, 8), (9, 8)), ((23,), (2,))]
)
@pytest.mark.parametrize("locality", [4, 10])
def test_each_voxel_is_as_probable_in_crops_of_blocks(shape, crop, locality):
    """The counts of voxels in independent draws of 8 blocks differ from those expected as noise does."""
    sampler, size = stream.CropSampler([stream.Volume("unused", shape)], crop, locality=locality, seed=5), 8 * locality
    boxes = [[sampler.sample_at(index).aabb for index in range(draw * size, (draw + 1) * size)] for draw in range(200)]
    for axis, (n, c) in enumerate(zip(shape, crop, strict=True)):
        seen = np.zeros((len(boxes), n))
        for counts, draw in zip(seen, boxes, strict=True):
            for box in draw:
                counts[slice(*box[axis])] += 1
        expected = np.convolve(np.full(n - c + 1, size / (n - c + 1)), np.ones(c))

        def probability(counts, expected=expected, n=n):
            excess, noise = counts.mean(axis=0) - expected, np.cov(counts.T).reshape(n, n) / len(counts)
            chi_square = excess @ np.linalg.pinv(noise, hermitian=True) @ excess
            return stats.chi2.sf(chi_square, max(np.linalg.matrix_rank(noise, hermitian=True), 1))

        if n == c:
            assert (seen == size).all()
            continue
        assert probability(seen) > 1e-3
        seen[:, : n // 2] *= 0.8  # crops that are rarer at one end are found
        assert probability(seen) < 1e-3


def test_crops_of_blocks_are_shuffled_and_depend_on_seed_epoch_and_index():
    volumes = [stream.Volume("a", (400, 500)), stream.Volume("b", (300, 700), weight=0.0)]
    sampler = stream.CropSampler(volumes, (8, 9), locality=16, length=300, epochs=2, seed=3)
    crops = list(sampler)
    again = stream.CropSampler(volumes, (8, 9), locality=16, length=300, epochs=2, seed=3)
    assert [again.sample_at(k) for k in reversed(range(600))] == crops[::-1]
    assert {one.uri for one in crops} == {crops[0].uri}
    assert crops[:300] != crops[300:]
    spans = again._spans[0].tolist()
    blocks = [tuple(a // span for (a, _), span in zip(one.aabb, spans, strict=True)) for one in crops[:128]]
    assert set(Counter(blocks).values()) == {16}  # 8 blocks of many
    assert sum(a != b for a, b in itertools.pairwise(blocks)) > 80
    with pytest.raises(ValueError, match="locality"):
        stream.CropSampler(volumes, (8, 9), locality=0)
    with pytest.raises(ValueError, match="mode='uniform'"):
        stream.CropSampler(volumes, (8, 9), locality=4, mode="foreground")


@pytest.mark.needs_core
@pytest.mark.parametrize("shards", [None, (32, 32, 48)])
def test_each_chunk_of_a_block_is_fetched_once(tmp_path, pipeline, shards):
    pytest.importorskip("obstore")
    (tmp_path / "served").mkdir()
    values = np.random.default_rng(0).integers(0, 999, (60, 80, 90), "u2")
    zarr.create_array(tmp_path / "served/a", data=values, chunks=(16, 8, 16), shards=shards)
    counts = {}
    with serve(tmp_path / "served") as server:
        for locality, length in ((1, 64), (32, 512)):
            sampler = stream.CropSampler([f"{server.url}/a"], (16, 16, 16), locality=locality, length=length, seed=1)
            p = pipeline(batch_size=16, dtype="stored", cache_bytes=sampler.cache_nbytes)
            crops = list(sampler.next_iteration())
            p.push(crops)
            for batch in p.batches():
                with batch as tensor:
                    for one, found in zip(batch.samples, tensor.numpy(), strict=True):
                        np.testing.assert_array_equal(found, values[tuple(slice(*side) for side in one.aabb)])
            counts[locality] = p.stats.chunks_fetched
            size = 8 * locality
            of_groups = [
                {
                    chunk
                    for one in crops[first : first + size]
                    for chunk in itertools.product(
                        *(range(a // c, (b - 1) // c + 1) for (a, b), c in zip(one.aabb, (16, 8, 16), strict=True))
                    )
                }
                for first in range(0, len(crops), size)
            ]
        fetched = [one for one in server.of("/c/") if one[0] == "GET"]
    assert counts[32] <= sum(map(len, of_groups))
    assert counts[32] / 512 < counts[1] / 64 / 3
    if shards is None:
        assert len(fetched) == counts[1] + counts[32]
