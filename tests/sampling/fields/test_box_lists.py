"""If this fails, a point misses a box that holds it."""

import numpy as np
import pytest

from linumpy.sampling.fields import box_lists


def boxes(kind, count, extent, rng):
    size = {"small": 0.02, "large": 0.5, "mixed": 0.6 * rng.random((count, 1)) ** 6 + 1e-4}[kind] * extent
    low = rng.random((count, 3)) * np.maximum(extent - size, 0)
    if kind == "mixed":
        low[: count // 2] *= 0.01  # most of the small ones in one cell
    return low, np.minimum(low + size, extent)


@pytest.mark.parametrize("kind", ["small", "large", "mixed"])
@pytest.mark.parametrize("extent", [(1, 1, 1), (1000, 30, 2), (1e-3, 1, 1e3)])
def test_no_box_is_missed(kind, extent):
    rng = np.random.default_rng(len(kind))
    extent = np.array(extent, float)
    low, high = boxes(kind, 300, extent, rng)
    lists = box_lists.build(low, high, extent, 24)
    inside = low + rng.random((300, 3)) * (high - low)
    on_faces = np.where(rng.random((300, 3)) < 0.5, low, high)
    points = np.concatenate([inside, on_faces, rng.random((300, 3)) * extent]).astype(np.float32)
    starts, counts = lists.find(points)
    held = ((points[:, None] >= low.astype(np.float32)) & (points[:, None] <= high.astype(np.float32))).all(2)
    for number, (start, count) in enumerate(zip(starts, counts, strict=True)):
        found = lists.items[start : start + count]
        assert set(np.flatnonzero(held[number])) <= set(found.tolist())
        assert (np.diff(found) > 0).all()


def test_cells_of_many_small_boxes_are_cut():
    rng = np.random.default_rng(0)
    low = np.concatenate([rng.random((2000, 3)) * 0.99 * 0.01, [[0, 0, 0]]])
    high = np.concatenate([low[:-1] + 1e-4, [[1, 1, 1]]])
    lists = box_lists.build(low, high, np.ones(3), 24)
    assert (lists.table[:, 1] < 0).any()
    _, counts = lists.find((low[:-1] + 5e-5).astype(np.float32))
    assert counts.mean() < 20  # of 2001
    assert len(lists.table) < 64 * 2001


def test_flat_domains_take_little_memory():
    low = np.zeros((1, 3))
    for high in ([1, 1, 0], [1, 0, 0], [0, 0, 0]):
        lists = box_lists.build(low, np.array([high]), np.array(high), 24)
        assert len(lists.table) <= 64
        assert lists.find(np.array([high], np.float32))[1] == [1]
