"""Boxes of chunks: against a look at every element."""

import itertools
import math
from dataclasses import fields, replace

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from linumpy.plan.read.alone import first_object, plan_alone, within_object
from linumpy.plan.read.boxes import cut_boxes, is_cut_whole
from linumpy.plan.read.scatter import FILL_WORDS, ROW_WORDS, ScatterTable, geometry, table_nbytes
from linumpy.plan.read.wanted import merge

from linumpy.io.layout import read_layout
from linumpy.plan.codecs import DecodeChain
from linumpy.plan.read import boxes as plan_boxes
from linumpy.plan.read import pieces as plan_pieces
from linumpy.plan.read.plan import ReadPlan
from linumpy.plan.region import Region


@st.composite
def problems(draw):
    """A layout, regions of it, and the strides of outputs that lie apart in one buffer."""
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(rank))
    chunks = tuple(draw(st.integers(1, n + 1)) for n in shape)
    shards = tuple(c * draw(st.integers(1, 3)) for c in chunks) if draw(st.booleans()) else None
    order = draw(st.permutations(range(rank)))
    codecs = [zarr.codecs.TransposeCodec(order=order), zarr.codecs.BytesCodec()]
    if shards:
        codecs = [zarr.codecs.ShardingCodec(chunk_shape=chunks, codecs=codecs)]
    array = zarr.create(
        store=zarr.storage.MemoryStore(), shape=shape, chunks=shards or chunks, dtype="u2", codecs=codecs, zarr_format=3
    )
    bounds = st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape))
    regions = np.array(draw(st.lists(bounds, min_size=1, max_size=4)), np.int64)
    strides, axes = np.zeros((len(regions), rank), np.int64), draw(st.permutations(range(rank)))
    for row, region in enumerate(regions):
        step = 2 * draw(st.integers(1, 2))
        for axis in axes:
            strides[row, axis] = step
            step *= max(1, int(region[axis, 1] - region[axis, 0]))
    return read_layout(array), regions[..., 0], regions[..., 1], strides


def elements(layout, boxes, row):
    """Chunk, byte in it, and byte of the output, of each element of a box."""
    steps = np.array(layout.chunk_strides) * 2
    for where in itertools.product(*(range(n) for n in boxes.extent[row].tolist())):
        yield tuple(boxes.chunk[row].tolist()), int(boxes.offset[row] + (np.array(where) * steps).sum()), where


@given(problems(), st.sampled_from([None, 6, 40, 2**20]), st.sampled_from([0, 30, 2**18]))
def test_every_element_of_a_region_lies_in_one_box(problem, longest, read_through):
    layout, start, stop, strides = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_boxes, "READ_THROUGH_BYTES", read_through)
        patch.setattr(plan_pieces, "READ_THROUGH_BYTES", read_through)
        boxes = cut_boxes(layout, start, stop, strides, longest)
        whole = is_cut_whole(layout, longest)
    got = {}
    for row in range(len(boxes)):
        region, end = int(boxes.region[row]), 0
        for chunk, byte, where in elements(layout, boxes, row):
            target = int(boxes.target_offset[row] + (np.array(where) * strides[region]).sum())
            assert got.setdefault((region, target), (chunk, byte)) == (chunk, byte)
            end = max(end, byte + 2)
        assert end == boxes.offset[row] + boxes.nbytes[row] <= layout.chunk_nbytes
        assert longest is None or boxes.nbytes[row] <= longest or whole
    expected = {}
    for region in range(len(start)):
        for voxel in itertools.product(*(range(a, b) for a, b in zip(start[region], stop[region], strict=True))):
            inside = np.array(voxel) % np.array(layout.chunk_shape)
            target = int(((np.array(voxel) - start[region]) * strides[region]).sum())
            chunk = tuple((np.array(voxel) // np.array(layout.chunk_shape)).tolist())
            expected[region, target] = (chunk, int((inside * np.array(layout.chunk_strides)).sum() * 2))
    assert got == expected
    if whole:
        rows = np.column_stack([boxes.region, boxes.chunk])
        assert len(np.unique(rows, axis=0)) == len(rows), "a chunk is more than one box of a region"
        assert rows.tolist() == sorted(rows.tolist())


@given(problems(), st.sampled_from([None, 6, 40]))
def test_each_chunk_is_wanted_once(problem, longest):
    layout, start, stop, strides = problem
    boxes = cut_boxes(layout, start, stop, strides, longest)
    by_chunk = is_cut_whole(layout, longest)
    array = (np.arange(len(start)) * 5 % 3)[boxes.region]  # regions of three arrays
    wanted = merge(layout, boxes, array, by_chunk=by_chunk)
    assert sorted(wanted.boxes.tolist()) == list(range(len(boxes)))
    assert wanted.first_box[0] == 0
    assert wanted.first_box[-1] == len(boxes)
    assert (np.diff(wanted.first_box) >= 1).all()
    assert (np.diff(wanted.object_index) >= 0).all()
    if by_chunk:
        assert len(np.unique(np.column_stack([wanted.array, wanted.chunk]), axis=0)) == len(wanted)
    else:
        assert len(wanted) == len(boxes)
    per_object = np.array(layout.shard.chunks_per_shard) if layout.shard else np.ones(layout.rank, int)
    for span in range(len(wanted)):
        rows, which = wanted.boxes_of(np.array([span]))
        assert (which == 0).all()
        assert (boxes.chunk[rows] == wanted.chunk[span]).all()
        assert (array[rows] == wanted.array[span]).all()
        assert wanted.object_array[wanted.object_index[span]] == wanted.array[span]
        assert wanted.offset[span] == boxes.offset[rows].min()
        assert wanted.offset[span] + wanted.nbytes[span] == (boxes.offset[rows] + boxes.nbytes[rows]).max()
        assert (wanted.objects[wanted.object_index[span]] == wanted.chunk[span] // per_object).all()
    objects = np.column_stack([wanted.object_array, wanted.objects])
    assert len(np.unique(objects, axis=0)) == len(objects) == len(np.unique(wanted.object_index))
    some = np.arange(len(wanted))[::-2]
    rows, which = wanted.boxes_of(some)
    for row, number in zip(rows.tolist(), which.tolist(), strict=True):
        assert row in wanted.boxes_of(some[[number]])[0]
    assert len(rows) == sum(len(wanted.boxes_of(np.array([span]))[0]) for span in some)


@given(problems(), st.booleans())
def test_a_small_region_by_itself_is_planned_as_one_of_many(problem, encoded):
    """Its chunks, the bytes of each, and where they go: counted from the stored object of its first voxel."""
    layout, start, stop, strides = problem
    layout = replace(layout, chain=DecodeChain("zstd") if encoded else None)
    for low, high, stride in zip(*(one.tolist() for one in (start, stop, strides)), strict=True):
        boxes = cut_boxes(layout, *(np.array([one]) for one in (low, high, stride)))
        wanted = merge(layout, boxes, np.zeros(len(boxes), np.int64), by_chunk=True)
        assert ReadPlan(layout, Region(tuple(low), tuple(high), (True,) * layout.rank)).chunk_count == len(boxes)
        if not len(boxes):
            continue
        first = first_object(layout, low)
        plan = plan_alone(layout, *(within_object(layout, first, one) for one in (low, high)), tuple(stride), 64)
        assert len(plan) == len(boxes)
        assert [tuple(np.add(first, one)) for one, _ in plan.objects] == [tuple(one) for one in wanted.objects.tolist()]
        per_object = layout.shard.chunks_per_shard if layout.shard else (1,) * layout.rank
        spans = [(number, span) for number, (_, mine) in enumerate(plan.objects) for span in mine]
        assert [number for number, _ in spans] == wanted.object_index.tolist()
        used = np.zeros(plan.nbytes, bool)
        for n, (_, span) in enumerate(spans):
            inside = tuple(wanted.chunk[n] % per_object)
            assert span.inner == np.ravel_multi_index(inside, per_object)
            assert (span.offset, span.nbytes) == (wanted.offset[n], wanted.nbytes[n])
            assert span.place % 64 == 0
            held = slice(span.place, span.place + (layout.chunk_nbytes if encoded else span.nbytes))
            assert held.stop <= plan.nbytes
            assert not used[held].any()
            used[held] = True
            (row,) = wanted.boxes_of(np.array([n]))[0]
            assert plan.source[row] == span.place + boxes.offset[row] - (0 if encoded else span.offset)
        shape = geometry(layout, boxes, np.array([stride]))
        for one in fields(shape):
            assert np.array_equal(getattr(plan.geometry, one.name), getattr(shape, one.name)), one.name


@given(problems(), st.booleans())
def test_the_words_of_a_table_say_what_the_table_says(problem, widen):
    """Read back as the kernel reads them, into a NumPy buffer."""
    layout, start, stop, strides = problem
    boxes = cut_boxes(layout, start, stop, strides)
    if not len(boxes):
        return
    shape = geometry(layout, boxes, strides)
    memory = np.random.default_rng(1).integers(0, 2**16, math.prod(layout.chunk_shape)).astype("u2")
    size = [int(((stop[k] - start[k] - 1).clip(0) * strides[k]).sum()) + 2 for k in range(len(start))]
    begin = np.concatenate([[0], np.cumsum(-(-np.array(size) // 16) * 16)])
    source = np.where(np.arange(len(boxes)) % 3 == 2, -1, boxes.offset)
    fill = np.resize(np.frombuffer(np.uint16(7).tobytes(), np.uint8), 16)
    table = ScatterTable(
        2, 2, np.broadcast_to(shape.source_strides, shape.target_strides.shape), shape.target_strides,
        np.tile(fill, (len(start), 1)), source, begin[boxes.region] + boxes.target_offset, boxes.region, shape.extent,
        widen,
    )  # fmt: skip
    words, first_row, largest = table.words(table.unit)
    assert words.nbytes <= table_nbytes(table.rank, max(len(table), len(start)))
    rank, unit = table.rank, table.unit
    headers = words[:first_row].reshape(-1, 2 * rank + FILL_WORDS)
    rows = words[first_row:].reshape(-1, ROW_WORDS + rank)
    got, stored = np.zeros(int(begin[-1]), np.uint8), memory.view(np.uint8)
    for first, target, header, *extent in rows.tolist():
        assert math.prod(extent) <= largest
        for where in itertools.product(*map(range, extent)):
            to = target + int((np.array(where) * headers[header, rank : 2 * rank]).sum()) * unit
            of = (first + int((np.array(where) * headers[header, :rank]).sum())) * unit
            got[to : to + unit] = (
                headers[header, 2 * rank :].view(np.uint8)[:unit] if first < 0 else stored[of : of + unit]
            )
    expected = np.zeros_like(got)
    for row in range(len(boxes)):
        region = int(boxes.region[row])
        for _, byte, where in elements(layout, boxes, row):
            to = int(begin[region] + boxes.target_offset[row] + (np.array(where) * strides[region]).sum())
            expected[to : to + 2] = fill[:2] if source[row] < 0 else stored[byte : byte + 2]
    assert np.array_equal(got, expected)
