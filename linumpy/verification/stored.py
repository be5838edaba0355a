"""Which chunks of an array are stored, and what is stored beside them; no chunk is read, only indexes of shards.

In: an array. Out: :class:`Stored`. Stores that do not list their keys, such as HTTP servers, are not an error: then
nothing is known.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import google_crc32c  # a dependency of zarr-python
import numpy as np
import zarr
from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.buffer import cpu
from zarr.core.sync import sync
from zarr.storage import LocalStore

from linumpy.io.paths import METADATA_FILES
from linumpy.io.stores.remote import AccessError
from linumpy.plan.layout import ArrayLayout
from linumpy.verification.findings import Finding

#: Names that are listed in a finding.
_MAX_LISTED = 5


@dataclass(frozen=True)
class Grid:
    """Bounds of the stored objects, and of the chunks in them, along each axis: the first is 0, the last the size."""

    objects: tuple[np.ndarray, ...]
    chunks: tuple[np.ndarray, ...]

    @property
    def object_counts(self) -> tuple[int, ...]:
        """Stored objects (chunks, or shards) along each axis."""
        return tuple(len(bounds) - 1 for bounds in self.objects)

    @property
    def chunk_counts(self) -> tuple[int, ...]:
        """Chunks (inner chunks) along each axis."""
        return tuple(len(bounds) - 1 for bounds in self.chunks)

    def chunks_of(self, number: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the chunks of a stored object, as slices of the grid of chunks."""
        axes = zip(self.objects, self.chunks, number, strict=True)
        return tuple(slice(*np.searchsorted(chunks, objects[n : n + 2]).tolist()) for objects, chunks, n in axes)

    def within(self, box: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return the chunks of a box of whole chunks, as slices of the grid of chunks."""
        axes = zip(self.chunks, box, strict=True)
        return tuple(slice(*np.searchsorted(bounds, (part.start, part.stop)).tolist()) for bounds, part in axes)

    def parts(self, box: tuple[slice, ...]) -> Iterator[tuple[slice, ...]]:
        """Yield the part of each chunk that lies in a box."""
        axes = []
        for bounds, part in zip(self.chunks, box, strict=True):
            inner = [n for n in bounds.tolist() if part.start < n < part.stop]
            axes.append([slice(*pair) for pair in itertools.pairwise([part.start, *inner, part.stop])])
        yield from itertools.product(*axes)

    def voxels(self, chunk: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the voxels of a chunk."""
        return tuple(slice(int(b[n]), int(b[n + 1])) for b, n in zip(self.chunks, chunk, strict=True))


def grid_of(layout: ArrayLayout) -> Grid:
    """Return the grid of an array, regular or not."""
    objects, chunks = [], []
    for axis, (extent, size, chunk) in enumerate(
        zip(layout.shape, layout.object_shape, layout.chunk_shape, strict=True)
    ):
        if layout.lengths is not None:
            bounds = np.minimum(np.concatenate([[0], np.cumsum(layout.lengths[axis])]), extent)
        else:
            bounds = np.minimum(np.arange(-(-extent // size) + 1) * size, extent)
        inner = [np.arange(start, stop, chunk) for start, stop in itertools.pairwise(bounds)]
        objects.append(bounds)
        chunks.append(np.concatenate([*inner, bounds[-1:]]).astype(np.int64))
    return Grid(tuple(objects), tuple(chunks))


@dataclass(frozen=True)
class Stored:
    """What is stored of an array.

    - `missing`: mask of the chunks that are not stored; None if the store does not list its keys.
    - `findings`: objects that the metadata do not name, and faults of the indexes of shards.
    """

    missing: np.ndarray | None
    findings: tuple[Finding, ...]


def stored_chunks_of(array: zarr.Array, path: str, layout: ArrayLayout, grid: Grid) -> Stored:
    """Find out which chunks are stored, by listing the keys of the array and reading the indexes of its shards."""
    if layout.keys is None or not array.store.supports_listing:
        return Stored(None, ())
    present, others = np.zeros(grid.object_counts, bool), list[str]()
    index_of = _reading_names(layout.keys.prefix, layout.keys.separator, present.shape)
    try:
        for name in _names(array, len(present.shape) + 1):
            index = index_of(name)
            if index is not None:
                present[index] = True
            elif not name.rpartition("/")[2].startswith(".") and name not in METADATA_FILES:
                others.append(name)
    except AccessError:
        return Stored(None, ())
    findings = _leftovers(path, others)
    if layout.shard is None:
        return Stored(~present, findings)
    missing = np.ones(grid.chunk_counts, bool)
    for number in map(tuple, np.argwhere(present).tolist()):
        chunks = grid.chunks_of(number)
        within = tuple(slice(part.stop - part.start) for part in chunks)
        empty, faults = _shard(array, path, layout, number, within)
        missing[chunks] = empty[within]
        findings += faults
    return Stored(missing, findings)


def _names(array: zarr.Array, depth: int) -> Iterable[str]:
    """Return the names of all that is stored of an array; in local folders of `depth` levels, without the store."""
    if isinstance(array.store, LocalStore):
        return _local_names(os.path.join(array.store.root, array.path), "", depth)
    below = f"{array.path}/" if array.path else ""

    async def scan() -> list[str]:
        return [key.removeprefix(below) async for key in array.store.list_prefix(below)]

    return sync(scan())


def _local_names(folder: str, before: str, depth: int) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if depth > 0 and entry.is_dir():
                yield from _local_names(entry.path, f"{before}{entry.name}/", depth - 1)
            else:
                yield before + entry.name


def _reading_names(prefix: str, separator: str, counts: tuple[int, ...]) -> Callable[[str], tuple[int, ...] | None]:
    """Return a function that returns the coordinates of a stored object by its name; None for any other name."""
    if not counts:
        return lambda name: () if name in (prefix.rstrip(separator), "c", "0") else None
    pattern = re.compile(re.escape(prefix) + re.escape(separator).join(["(0|[1-9][0-9]*)"] * len(counts)))

    def index_of(name: str) -> tuple[int, ...] | None:
        match = pattern.fullmatch(name)
        numbers = tuple(map(int, match.groups())) if match else ()
        return numbers if numbers and all(map(operator.lt, numbers, counts)) else None

    return index_of


def _leftovers(path: str, names: list[str]) -> tuple[Finding, ...]:
    if not names:
        return ()
    shown = ", ".join(sorted(names)[:_MAX_LISTED]) + (" …" if len(names) > _MAX_LISTED else "")
    return (
        Finding(
            "leftover",
            path,
            f"{len(names):,} stored objects are no chunks of the array: {shown}",
            "they take space and are not read: the rest of a larger array, of another chunk shape, or of a writer "
            "that was stopped",
            "if the array has the right shape and chunks, delete them",
            count=len(names),
        ),
    )


def _shard(
    array: zarr.Array, path: str, layout: ArrayLayout, number: tuple[int, ...], within: tuple[slice, ...]
) -> tuple[np.ndarray, tuple[Finding, ...]]:
    """Read the index of a shard: mask of the inner chunks that are not stored, and chunks that share bytes.

    - `within`: the inner chunks that are not wholly beyond the end of the array.
    """
    shard = layout.shard
    assert shard is not None
    key = array.metadata.encode_chunk_key(number)
    part = SuffixByteRequest(shard.index_nbytes) if shard.index_at_end else RangeByteRequest(0, shard.index_nbytes)
    try:
        stored = sync(array.store.get(f"{array.path}/{key}".lstrip("/"), cpu.buffer_prototype, part))
    except (OSError, ValueError):
        stored = None  # reading its chunks says why
    if stored is None or len(stored) != shard.index_nbytes:
        return np.zeros(shard.chunks_per_shard, bool), ()
    index, checksum = stored.to_bytes()[: 16 * shard.count], stored.to_bytes()[16 * shard.count :]
    if shard.index_checksum and google_crc32c.value(index) != int.from_bytes(checksum, "little"):
        return np.zeros(shard.chunks_per_shard, bool), ()  # reading its chunks says so
    dtype = ">u8" if shard.index_big_endian else "<u8"
    offsets, sizes = np.frombuffer(index, dtype).reshape(-1, 2).T.astype(np.uint64)
    empty = (offsets == np.iinfo(np.uint64).max) & (sizes == np.iinfo(np.uint64).max)
    used = np.zeros(shard.chunks_per_shard, bool)
    used[within] = True
    kept = np.flatnonzero(~empty & (sizes > 0) & used.ravel())
    order = kept[np.argsort(offsets[kept], kind="stable")]
    shared = np.flatnonzero(offsets[order][1:] < offsets[order][:-1] + sizes[order][:-1])
    faults: tuple[Finding, ...] = ()
    if len(shared):
        a, b = (tuple(map(int, np.unravel_index(order[shared[0] + n], shard.chunks_per_shard))) for n in (0, 1))
        faults = (
            Finding(
                "damaged",
                f"{path}/{key}".lstrip("/"),
                f"the index says that the inner chunks {a} and {b} share bytes of the shard",
                "at least one of them is read from the wrong place, possibly without an error",
                "write this shard again from its source",
                count=2 * len(shared),
                chunk=tuple(n * c + i for n, c, i in zip(number, shard.chunks_per_shard, a, strict=True)),
            ),
        )
    return empty.reshape(shard.chunks_per_shard), faults


def object_path(array: zarr.Array, path: str, layout: ArrayLayout, chunk: tuple[int, ...], grid: Grid) -> str:
    """Return the path, below the source, of the stored object that holds a chunk."""
    starts = [int(bounds[n]) for bounds, n in zip(grid.chunks, chunk, strict=True)]
    number = tuple(
        int(np.searchsorted(bounds, start, "right")) - 1 for bounds, start in zip(grid.objects, starts, strict=True)
    )
    return f"{path}/{array.metadata.encode_chunk_key(number)}".lstrip("/")


def planes(mask: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the axes and the indices of planes of a mask that are all true, if not all planes are."""
    for axis, count in enumerate(mask.shape):
        others = tuple(other for other in range(mask.ndim) if other != axis)
        full = mask.all(axis=others)
        if count > 1 and not full.all():
            yield from ((axis, int(n)) for n in np.flatnonzero(full))


def size_of(box: tuple[slice, ...]) -> int:
    """Count the voxels, or chunks, of a box."""
    return math.prod(part.stop - part.start for part in box)
