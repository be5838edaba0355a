"""If this fails, arrays are written or read in pieces that miss voxels, repeat them, or outgrow memory."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from linumpy.benchmark.data import blocks


@st.composite
def grids(draw):
    rank = draw(st.integers(1, 4))
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=rank, max_size=rank)))
    grain = tuple(draw(st.lists(st.integers(1, 15), min_size=rank, max_size=rank)))
    return shape, grain, draw(st.sampled_from([1, 2, 8])), draw(st.integers(1, 4000))


@given(grids())
def test_every_voxel_is_in_one_piece_that_starts_on_the_grain_and_keeps_the_limit(grid):
    shape, grain, itemsize, limit = grid
    seen = np.zeros(shape, int)
    for block in blocks(shape, grain, itemsize, limit):
        seen[block] += 1
        assert all(part.start % size == 0 for part, size in zip(block, grain, strict=True))
        nbytes = seen[block].size * itemsize
        assert nbytes <= max(limit, math.prod(grain) * itemsize)
    assert (seen == 1).all()


def test_pieces_grow_along_the_last_axis_first():
    pieces = list(blocks((8, 8, 8), (2, 2, 2), 1, limit=8 * 8 * 2))
    assert pieces[0] == (slice(0, 2), slice(0, 8), slice(0, 8))
    assert len(pieces) == 4


def test_an_array_without_voxels_has_no_pieces():
    assert list(blocks((4, 0), (2, 2), 1)) == []
