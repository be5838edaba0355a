"""If this fails, coarser boxes are made before what they come from is whole, or never."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from linumpy.plan.pyramid import Pyramid, grown, shape_of, split, within


@st.composite
def pyramids(draw):
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 30)) for _ in range(rank))
    chunk = tuple(draw(st.integers(1, 7)) for _ in range(rank))
    kept = draw(st.integers(0, rank))  # axes that are not halved
    halved = range(draw(st.integers(1, 4)))
    shapes = [(*shape[:kept], *(-(-n // 2**level) for n in shape[kept:])) for level in halved]
    clipped = draw(st.booleans())  # chunks are cut down to small levels, shards are not
    stored = [tuple(map(min, chunk, one)) if clipped else chunk for one in shapes]
    return Pyramid(tuple(shapes), tuple(stored), draw(st.sampled_from([1, 2, 8])))


def sources(finer, coarser, index):
    """The voxels from which one of the next resolution comes, as slices."""
    axes = zip(index, finer, coarser, strict=True)
    return tuple(slice(i, i + 1) if n == m else slice(2 * i, 2 * i + 2) for i, n, m in axes)


def boxes_of(draw, shape):
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    return tuple(slice(a, draw(st.integers(a + 1, n))) for a, n in zip(starts, shape, strict=True))


def units_of(pyramid, level):
    """Every stored object as a box, without the formulas under test."""
    for index in np.ndindex(pyramid.grid(level)):
        rows = zip(index, pyramid.stored[level], pyramid.shapes[level], strict=True)
        yield index, tuple(slice(i * s, min(i * s + s, n)) for i, s, n in rows)


def marked(shape, box):
    mask = np.zeros(shape, bool)
    mask[box] = True
    return mask


@given(pyramids(), st.data())
def test_whole_objects(pyramid, data):
    level = data.draw(st.integers(0, len(pyramid.shapes) - 1))
    box = boxes_of(data.draw, pyramid.shapes[level])
    mask = marked(pyramid.shapes[level], box)
    inside = [index for index, unit in units_of(pyramid, level) if mask[unit].all()]
    touched = [index for index, unit in units_of(pyramid, level) if mask[unit].any()]
    whole = pyramid.whole(level, box)
    got = marked(pyramid.grid(level), pyramid.units(level, whole)) if whole else np.zeros(pyramid.grid(level), bool)
    assert [tuple(i) for i in np.argwhere(got)] == inside
    assert [tuple(i) for i in np.argwhere(marked(pyramid.grid(level), pyramid.units(level, box)))] == touched
    if whole:
        assert pyramid.voxels(level, pyramid.units(level, whole)) == whole


@given(pyramids(), st.data())
def test_what_comes_from_a_box_alone(pyramid, data):
    if len(pyramid.shapes) == 1:
        return
    level = data.draw(st.integers(0, len(pyramid.shapes) - 2))
    box = boxes_of(data.draw, pyramid.shapes[level])
    mask = marked(pyramid.shapes[level], box)
    complete = np.zeros(pyramid.shapes[level + 1], bool)
    for index in np.ndindex(complete.shape):
        complete[index] = mask[sources(mask.shape, complete.shape, index)].all()
    expected = [index for index, unit in units_of(pyramid, level + 1) if complete[unit].all()]
    coarser = pyramid.coarser(level, box)
    grid = pyramid.grid(level + 1)
    got = marked(grid, pyramid.units(level + 1, coarser)) if coarser else np.zeros(grid, bool)
    assert [tuple(i) for i in np.argwhere(got)] == expected
    if coarser:
        finer = pyramid.finer(level + 1, coarser)
        assert mask[finer].all()
        axes = zip(shape_of(finer), pyramid.shapes[level], pyramid.shapes[level + 1], strict=True)
        assert shape_of(coarser) == tuple(n if m == k else -(-n // 2) for n, m, k in axes)


@given(pyramids(), st.data())
def test_what_a_box_of_the_finest_touches(pyramid, data):
    level = data.draw(st.integers(0, len(pyramid.shapes) - 1))
    box = boxes_of(data.draw, pyramid.shapes[0])
    mask = marked(pyramid.shapes[0], box)
    for shape in pyramid.shapes[1 : level + 1]:
        coarser = np.zeros(shape, bool)
        for index in np.ndindex(shape):
            coarser[index] = mask[sources(mask.shape, shape, index)].any()
        mask = coarser
    expected = [index for index, unit in units_of(pyramid, level) if mask[unit].any()]
    touched = marked(pyramid.grid(level), pyramid.touched(level, box))
    assert [tuple(i) for i in np.argwhere(touched)] == expected


@given(pyramids(), st.integers(0, 5000), st.data())
def test_steps_are_whole_and_within_their_limit(pyramid, limit, data):
    level = data.draw(st.integers(0, len(pyramid.shapes) - 1))
    first = data.draw(st.integers(0, min(1, len(pyramid.shapes) - 1 - level)))
    step = pyramid.step(level, limit, first)
    shape, covered = pyramid.shapes[level], np.zeros(pyramid.shapes[level], int)
    for box in split(tuple(slice(0, n) for n in shape), step):
        covered[box] += 1
        assert pyramid.whole(level, box) == box
        if first:
            coarser = pyramid.coarser(level, box)
            assert pyramid.finer(level + 1, coarser) == box
    assert (covered == 1).all()
    coarsest = pyramid.shapes[level + first]
    factors = [1 if n == m else 2 for n, m in zip(shape, coarsest, strict=True)]
    least = [min(s * f, n) for s, f, n in zip(pyramid.stored[level + first], factors, shape, strict=True)]
    assert math.prod(step) * pyramid.itemsize <= max(limit, math.prod(least) * pyramid.itemsize)


def test_steps_are_whole_in_as_many_resolutions_as_fit():
    pyramid = Pyramid(tuple((1024 >> k,) * 3 for k in range(4)), ((128,) * 3,) * 4, 2)
    assert pyramid.step(0, 2**28) == (512, 512, 512)
    assert pyramid.step(0, 2**27) == (256, 256, 1024)
    assert pyramid.step(0, 0) == (128, 128, 128)
    assert pyramid.step(0, 2**40) == (1024, 1024, 1024)


def test_boxes_are_cut_at_multiples():
    box = (slice(3, 11), slice(0, 4))
    assert list(split(box, (4, 8))) == [(slice(a, b), slice(0, 4)) for a, b in ((3, 4), (4, 8), (8, 11))]
    assert within((slice(4, 8),), (slice(3, 11),)) == (slice(1, 5),)
    assert grown((2, 3), (100, 7), 1, 42) == (6, 7)
