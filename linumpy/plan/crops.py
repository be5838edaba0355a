"""What crops of a layout cost: bytes that are fetched and decoded for each byte of a crop, and better chunks. Pure.

Random crops are at all positions with equal probability, and share no chunk with others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linumpy.plan.layout import ArrayLayout

#: Size of a proposed chunk: the number of smaller chunks costs more than their size saves; of a proposed shard at most.
_CHUNK_NBYTES, _SHARD_NBYTES = 64 * 2**10, 64 * 2**20
#: Sides of proposed chunks.
_SIDES = [2**k for k in range(10)]
#: Chunks of crops at various positions, and of one crop at most, for which the reads are planned.
_CHUNKS, _CHUNKS_OF_CROP = 2**16, 2**12
#: As in the core: longest gap between chunks of a file and of a remote object that are read together, gap above which
#: at most half of a read is not needed, longest read, and longest gap in a raw chunk.
_FILE_GAP, _REMOTE_GAP, _WASTE_GAP, _READ, _RAW_GAP = 2**16, 2**19, 2**16, 2**22, 2**18

#: The reader's cache of chunks: bytes to which a chunk is rounded up, and bytes that are divided into chunks at a time.
_SLOT_ALIGN, _SEGMENT_NBYTES = 256, 64 * 2**20


@dataclass(frozen=True)
class StoredChunks:
    """Where chunks are stored.

    - `nbytes`: mean size of a stored chunk that the array fills.
    - `offsets`, `sizes`: of the inner chunks of a shard, in C order; None without shards.
    """

    nbytes: float
    offsets: np.ndarray | None = None
    sizes: np.ndarray | None = None


@dataclass(frozen=True)
class CropCost:
    """The cost of crops of a shape of an array. Costs are bytes for each byte of the crops, or of the array."""

    name: str
    crop: tuple[int, ...]
    chunk: tuple[int, ...]
    shard: tuple[int, ...] | None
    chunks: float  # chunks that a random crop touches on average
    decoded: float  # for a random crop, chunks that are decoded; raw chunks are counted as if they were
    fetched: float  # for a random crop, bytes of chunks that are fetched, without shard indexes
    #: For each byte of the array, by all crops of a grid without overlap: without a cache, and with a cache of a slab.
    grid_decoded: float
    grid_fetched: float
    cached_decoded: float
    cached_fetched: float
    proposed_chunk: tuple[int, ...]
    proposed_shard: tuple[int, ...]
    proposed_decoded: float  # as `decoded`, with the proposed chunks


def crop_cost(layout: ArrayLayout, crop: Sequence[int], stored: StoredChunks) -> CropCost:
    """Compute the cost of crops before any chunk is read; raise ``ValueError`` for crops that do not fit."""
    crop, shape, chunk = tuple(int(n) for n in crop), layout.shape, layout.chunk_shape
    if len(crop) != layout.rank:
        raise ValueError(f"shape={crop} has {len(crop)} axes, {layout.name} has {layout.rank}")
    if any(not 0 < s <= n for s, n in zip(crop, shape, strict=True)):
        raise ValueError(f"crops of {crop} do not lie in {layout.name} of {shape}")
    rng, last, layout_shapes = np.random.default_rng(0), np.subtract(shape, crop), (crop, chunk, shape)
    anywhere = [np.arange(end + 1) for end in last]
    on_grid = [np.unique([*range(0, int(end), size), int(end)]) for end, size in zip(last, crop, strict=True)]
    costs = []
    for starts in (anywhere, on_grid):
        chunks, inside = _touched(starts, layout_shapes)
        count = max(64, int(_CHUNKS / chunks))
        if math.prod(map(len, starts)) <= count:
            picked = np.stack([axis.ravel() for axis in np.meshgrid(*starts)], axis=1)
        else:
            picked = np.stack([axis[rng.permutation(count) * len(axis) // count] for axis in starts], axis=1)
        fetched = chunks * _fetched_each(layout, crop, picked, stored)
        if layout.chain is not None and layout.shard is None:  # chunks at the end of an axis are padded
            fetched = inside * stored.nbytes / math.prod(chunk)
        costs.append((chunks, chunks * layout.chunk_nbytes, fetched))
    useful = math.prod(crop) * layout.dtype.itemsize
    repeated = math.prod(len(axis) for axis in on_grid) / layout.nbytes
    decoded = costs[0][1] / useful
    cached = math.prod(-(-n // c) * c / n for n, c in zip(shape, chunk, strict=True))
    in_order = np.array(list(itertools.islice(itertools.product(*on_grid), max(64, int(_CHUNKS / costs[1][0])))))
    each_once = _fetched_each(layout, crop, in_order, stored, set())
    if layout.chain is not None and layout.shard is None:
        each_once /= cached  # chunks at the end of an axis are padded
    shard = None if layout.shard is None else layout.object_shape
    proposed = propose(shape, layout.dtype.itemsize, crop)
    return CropCost(
        name=layout.name, crop=crop, chunk=chunk, shard=shard, chunks=costs[0][0], decoded=decoded,
        fetched=costs[0][2] / useful, grid_decoded=costs[1][1] * repeated, grid_fetched=costs[1][2] * repeated,
        cached_decoded=cached, cached_fetched=each_once / layout.chunk_nbytes * cached,
        proposed_chunk=proposed[0], proposed_shard=proposed[1],
        proposed_decoded=_decoded(crop, proposed[0], shape),
    )  # fmt: skip


def propose(shape: Sequence[int], itemsize: int, crop: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the chunk with which random crops decode the fewest bytes, and a shard of whole chunks.

    Chunks have 64 KiB to less than 256 KiB: sides are powers of two up to 512 along the last three axes, and 1 along
    other axes. Shards have up to 64 MiB of voxels. Arrays that are smaller than a chunk are one chunk.
    """
    sides = [[side for side in _SIDES if side <= 2 ** math.ceil(math.log2(n))] for n in shape[-3:]]
    lead = (1,) * (len(shape) - len(sides))
    crop = tuple(map(min, crop, shape))
    costs = [
        (_decoded(crop, lead + last, shape), lead + last)
        for last in itertools.product(*sides)
        if _CHUNK_NBYTES <= math.prod(last) * itemsize < 4 * _CHUNK_NBYTES
    ]
    chunk = min(costs)[1] if costs else tuple(shape)
    shard = list(chunk)
    while growing := [axis for axis in range(len(lead), len(shape)) if shard[axis] < shape[axis]]:
        if 2 * math.prod(shard) * itemsize > _SHARD_NBYTES:
            break
        shard[min(growing, key=lambda axis: shard[axis])] *= 2
    return chunk, tuple(shard)


def _touched(starts: Sequence[np.ndarray], layout: tuple[Sequence[int], ...]) -> tuple[float, float]:
    """Return the mean number of chunks that crops touch, and the mean number of voxels of the array in these chunks.

    - `starts`: first voxels of the crops along each axis, which are combined.
    - `layout`: shapes of crop, chunk and array.
    """
    chunks = inside = 1.0
    for start, s, c, n in zip(starts, *layout, strict=True):
        first, last = start // c, (start + s - 1) // c
        chunks *= float(np.mean(last - first + 1))
        inside *= float(np.mean(np.minimum((last + 1) * c, n) - first * c))
    return chunks, inside


def _decoded(crop: Sequence[int], chunk: Sequence[int], shape: Sequence[int]) -> float:
    """Return the voxels of the chunks that a random crop touches, for each voxel of the crop."""
    starts = [np.arange(n - s + 1) for s, n in zip(crop, shape, strict=True)]
    return _touched(starts, (crop, chunk, shape))[0] * math.prod(chunk) / math.prod(crop)


def _fetched_each(
    layout: ArrayLayout,
    crop: Sequence[int],
    starts: np.ndarray,
    stored: StoredChunks,
    kept: set[tuple[int, ...]] | None = None,
) -> float:
    """Return the bytes that are fetched for crops at some positions, for each chunk that they touch.

    With `kept`, to which the chunks are added, whole chunks are fetched, and each once.
    """
    crop = _shortened(crop, layout.chunk_shape)
    if layout.unsupported is not None or (layout.chain is not None and layout.shard is None):
        return stored.nbytes
    order = [layout.chunk_shape[axis] for axis in layout.stored_axes]
    strides = [layout.dtype.itemsize * math.prod(order[n + 1 :]) for n in range(layout.rank)]  # in stored order
    per_object = (1,) * layout.rank if layout.shard is None else layout.shard.chunks_per_shard
    shards: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}
    fetched = count = 0
    for start in starts.tolist():
        spans: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        sides = [
            [(n, max(a - n * c, 0), min(a + s - n * c, c)) for n in range(a // c, (a + s - 1) // c + 1)]
            for a, s, c in zip(start, crop, layout.chunk_shape, strict=True)
        ]
        for box in itertools.product(*sides):
            if kept is not None and (chunk := tuple(n for n, _, _ in box)) in kept:
                continue
            if kept is not None:
                kept.add(chunk)
            count += 1
            number = np.ravel_multi_index([n % k for (n, _, _), k in zip(box, per_object, strict=True)], per_object)
            index = tuple(n // k for (n, _, _), k in zip(box, per_object, strict=True))
            offset, nbytes = 0, layout.chunk_nbytes
            if layout.shard is not None:
                if index not in shards:
                    shards[index] = _in_shard(layout, index, stored)
                offset, nbytes = (int(of_each[number]) for of_each in shards[index])
            held = spans.setdefault(index, [])
            if layout.chain is not None or kept is not None:
                ranges = [(0, nbytes)]
            else:
                ranges = _raw_spans([box[axis] for axis in layout.stored_axes], strides, layout.dtype.itemsize)
            held += [(offset + a, offset + b) for a, b in ranges if nbytes]
        is_remote = layout.remote is not None
        fetched += sum(_read_nbytes(sorted(each), is_remote=is_remote) for each in spans.values() if each)
    return fetched / count


def _shortened(crop: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...]:
    """Return a crop that touches few chunks, and each as the given crop does: without chunks from its middle."""
    whole = [s // c for s, c in zip(crop, chunk, strict=True)]
    while math.prod(n + 1 for n in whole) > _CHUNKS_OF_CROP:
        axis = whole.index(max(whole))
        whole[axis] = min(whole[axis] - 1, int(whole[axis] * 0.9))
    return tuple(min(s, n * c + s % c) for s, n, c in zip(crop, whole, chunk, strict=True))


def _in_shard(layout: ArrayLayout, index: Sequence[int], stored: StoredChunks) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets and sizes of the inner chunks of a shard, of which those beyond the array are not stored."""
    assert layout.shard is not None
    inside: np.ndarray = np.ones(())
    for i, count, n, c in zip(index, layout.shard.chunks_per_shard, layout.shape, layout.chunk_shape, strict=True):
        share = np.clip(n / c - i * count - np.arange(count), 0, 1)
        inside = np.multiply.outer(inside, share if layout.chain is not None else np.ceil(share))
    sizes = inside.ravel() * (stored.nbytes if stored.sizes is None else stored.sizes)
    order = np.arange(sizes.size) if stored.offsets is None else np.argsort(stored.offsets)
    offsets = np.empty_like(sizes)
    offsets[order] = np.cumsum(sizes[order]) - sizes[order]
    return offsets, sizes


def _raw_spans(box: Sequence[tuple[int, int, int]], strides: Sequence[int], itemsize: int) -> list[tuple[int, int]]:
    """Return the byte ranges of a raw chunk that are read for a box of it; axes are in stored order."""
    first = sum(start * stride for (_, start, _), stride in zip(box, strides, strict=True))
    counts = [stop - start for _, start, stop in box]
    spans = [itemsize]
    for count, stride in zip(reversed(counts), reversed(strides), strict=True):
        spans.insert(0, (count - 1) * stride + spans[0])
    if spans[0] <= _READ and strides[0] <= _RAW_GAP:
        return [(first, first + spans[0])]
    split = max(
        (n + 1 for n in range(len(box) - 1) if counts[n] > 1 and strides[n] - spans[n + 1] > _RAW_GAP), default=0
    )
    begins = [sum(map(int.__mul__, index, strides)) for index in np.ndindex(*counts[:split])]
    return [(first + begin, first + begin + spans[split]) for begin in begins]


def _read_nbytes(spans: Sequence[tuple[int, int]], *, is_remote: bool) -> int:
    """Return the bytes of the reads of byte ranges of one object, which are in order; neighbours are read together."""
    total, (begin, end), needed = 0, spans[0], spans[0][1] - spans[0][0]
    for start, stop in spans[1:]:
        is_wasteful = start - end > _WASTE_GAP and max(stop, end) - begin > 2 * (needed + stop - start)
        if start - end > (_REMOTE_GAP if is_remote else _FILE_GAP) or is_wasteful or stop - begin > _READ:
            total, begin, needed = total + end - begin, start, 0
            end = start
        end, needed = max(end, stop), needed + stop - start
    return total + end - begin


def cache_nbytes(count: int, chunk_nbytes: int) -> int:
    """Return the size of a reader's cache that holds a number of chunks."""
    slot_nbytes = -(-chunk_nbytes // _SLOT_ALIGN) * _SLOT_ALIGN
    return slot_nbytes * (count + -(-count // max(1, _SEGMENT_NBYTES // slot_nbytes)))


def table(rows: Sequence[CropCost]) -> str:
    """Return the costs as a table in text."""

    def spell(shape: Sequence[int] | None) -> str:
        return "-" if shape is None else "×".join(map(str, shape))

    width = max(len("array"), *(len(row.name) for row in rows))
    titles = ("random: fetched", "decoded", "grid: fetched", "decoded", "with cache")
    side = max(13, *(2 + len(spell(shape)) for row in rows for shape in (row.crop, row.chunk, row.shard)))
    head = f"{'array':<{width}}  {'crop':>{side}}{'chunk':>{side}}{'shard':>{side}}"
    lines = [head + "".join(f"{one:>{len(one) + 2}}" for one in titles)]
    for row in rows:
        costs = (row.fetched, row.decoded, row.grid_fetched, row.grid_decoded, row.cached_fetched)
        lines.append(
            f"{row.name:<{width}}  {spell(row.crop):>{side}}{spell(row.chunk):>{side}}{spell(row.shard):>{side}}"
            + "".join(f"{cost:>{len(one) + 2}.2f}" for one, cost in zip(titles, costs, strict=True))
        )
        if row.proposed_decoded < 0.9 * row.decoded:
            lines.append(
                f"{'':<{width}}  better: chunks {spell(row.proposed_chunk)} in shards {spell(row.proposed_shard)}, of "
                f"which {row.proposed_decoded:.2f} bytes are decoded for a byte of a random crop"
            )
    return "\n".join(lines)
