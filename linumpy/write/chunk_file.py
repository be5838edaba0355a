"""Write the files of chunks and shards from host memory, and order the bytes in them.

Errors: ``OSError`` that names the file. Format of shards:
https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from linumpy.core.files import write_files
from linumpy.core.native import why_no_core
from linumpy.io.codecs import checksum
from linumpy.io.output.syscalls import named_errors
from linumpy.io.stores.remote import RemoteStore
from linumpy.plan.codecs import CHECKSUM_NBYTES
from linumpy.plan.layout import ArrayLayout, ShardLayout
from linumpy.plan.pyramid import Box

#: Bytes in host memory.
Bytes = bytes | np.ndarray
#: Buffers that one system call takes (IOV_MAX).
_MAX_BUFFERS = 1024


def write_file(path: str, groups: Iterable[Sequence[Bytes]]) -> int:
    """Write groups of buffers to a file, one after another; return the bytes written.

    A group is written by as few system calls as possible, and must stay valid only until the next group is requested.
    """
    nbytes = 0
    with named_errors(Path(path)), open(path, "wb", buffering=0) as file:
        for group in groups:
            for first in range(0, len(group), _MAX_BUFFERS):
                nbytes += _write_all(file.fileno(), group[first : first + _MAX_BUFFERS])
    return nbytes


def _write_all(descriptor: int, buffers: Sequence[Bytes]) -> int:
    remaining = [memoryview(b.reshape(-1).view(np.uint8) if isinstance(b, np.ndarray) else b) for b in buffers]  # type: ignore[arg-type]
    nbytes = 0
    while remaining:
        # Windows has no `writev`.
        count = os.writev(descriptor, remaining) if hasattr(os, "writev") else os.write(descriptor, remaining[0])
        nbytes += count
        while remaining and count >= len(remaining[0]):
            count -= len(remaining.pop(0))
        if count:
            remaining[0] = remaining[0][count:]
    return nbytes


class ChunkFiles:
    """The files of the chunks (or shards) of a local array, each under its path.

    - `renamed`: whether to write each file under a temporary name and rename it when it is complete, as zarr does:
      needed where another process may write the same chunk at the same time.
    """

    def __init__(self, layout: ArrayLayout, *, renamed: bool) -> None:
        self._head, self._separator = layout.chunk_path
        #: Appended to the name of a file until it is complete.
        self.suffix = f".{os.getpid()}-{secrets.token_hex(4)}.partial" if renamed else ""
        self._folders: set[str] = set()

    def paths(self, box: Box, shape: Sequence[int]) -> list[str]:
        """Make the folders for a box of whole objects of a shape; return the paths of files, the last axis fastest."""
        *outer, last = (range(b.start // s, -(-b.stop // s)) for b, s in zip(box, shape, strict=True))
        paths, separator = [], self._separator
        for lead in itertools.product(*outer):
            head = f"{self._head}{''.join(f'{number}{separator}' for number in lead)}"
            self._make_folder(os.path.dirname(head))
            paths += [f"{head}{number}" for number in last]
        return paths

    def _make_folder(self, folder: str) -> None:
        if folder not in self._folders:
            os.makedirs(folder, exist_ok=True)
            self._folders.add(folder)

    def write(self, path: str, groups: Iterable[Sequence[Bytes]]) -> int:
        """Write a file as :func:`write_file` does, under a temporary name if requested; return its size."""
        nbytes = write_file(path + self.suffix, groups)
        self.complete([path])
        return nbytes

    def complete(self, paths: Sequence[str]) -> None:
        """Give files that were written under temporary names their final names."""
        if self.suffix:
            for path in paths:
                os.replace(path + self.suffix, path)

    def write_many(
        self, paths: Sequence[str], data: np.ndarray, bounds: np.ndarray, *, with_checksum: bool = False
    ) -> int:
        """Write files as :func:`linumpy.core.files.write_files`; return the size of all files."""
        if why_no_core() is None:
            write_files(paths, data, bounds, with_checksum=with_checksum, suffix=self.suffix)
            return int(np.diff(bounds).sum()) + len(paths) * CHECKSUM_NBYTES * with_checksum
        return self._write_each(paths, data, bounds, with_checksum=with_checksum)

    def _write_each(self, paths: Sequence[str], data: np.ndarray, bounds: np.ndarray, *, with_checksum: bool) -> int:
        nbytes = 0
        for path, (begin, end) in zip(paths, bounds.tolist(), strict=True):
            part = data[begin:end]
            nbytes += self.write(path, [[part, checksum(part)] if with_checksum else [part]])
        return nbytes

    def remove(self, path: str) -> None:
        """Remove the file of a chunk that holds only the fill value, if the file exists."""
        with suppress(FileNotFoundError):
            os.unlink(path)


class ChunkObjects(ChunkFiles):
    """The chunks (or shards) of an array in an object store, each under its key. A request stores a chunk whole."""

    def __init__(self, layout: ArrayLayout, store: RemoteStore) -> None:
        super().__init__(layout, renamed=False)
        self._store, self._stored = store, set[str]()

    def _make_folder(self, folder: str) -> None:
        pass

    def write(self, path: str, groups: Iterable[Sequence[Bytes]]) -> int:
        """Store an object."""
        data = bytearray()
        for group in groups:
            for part in group:
                data += part.reshape(-1).view(np.uint8).data if isinstance(part, np.ndarray) else part
        self._stored.add(path)
        self._store.put(path, memoryview(data))
        return len(data)

    def write_many(
        self, paths: Sequence[str], data: np.ndarray, bounds: np.ndarray, *, with_checksum: bool = False
    ) -> int:
        """Store objects one after another."""
        return self._write_each(paths, data, bounds, with_checksum=with_checksum)

    def remove(self, path: str) -> None:
        """Remove the object of a chunk that holds only the fill value, if this process has stored one."""
        if path in self._stored:
            self._store.remove(path)


#: Offset and size, in the index, of an inner chunk that is not stored.
_MISSING = 2**64 - 1


def stored_sizes(offsets: np.ndarray, is_fill: np.ndarray, *, with_checksum: bool) -> np.ndarray:
    """Return the stored bytes of each of several consecutive chunks; 0 for those that hold only the fill value.

    - `offsets` (int64): offset of each chunk, and the end of the last chunk.
    - `with_checksum`: whether a CRC-32C follows each chunk.
    """
    return np.where(is_fill, 0, np.diff(offsets) + CHECKSUM_NBYTES * with_checksum)


def stored_spans(offsets: np.ndarray, is_fill: np.ndarray, *, with_checksum: bool) -> list[tuple[int, int]]:
    """Return begin and end of each span of stored bytes; adjacent chunks form one span unless checksums follow them."""
    stored = ~is_fill
    if with_checksum:
        return [(int(offsets[k]), int(offsets[k + 1])) for k in np.flatnonzero(stored).tolist()]
    edges = np.flatnonzero(np.diff(stored, prepend=False, append=False)).tolist()
    return [(int(offsets[a]), int(offsets[b])) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def file_groups(
    groups: Iterable[Sequence[Bytes]], sizes: np.ndarray, shard: ShardLayout | None, slots: np.ndarray | None
) -> Iterator[Sequence[Bytes]]:
    """Yield the bytes of a file in order: of a chunk, or of a shard with its index before or after its inner chunks.

    - `sizes` (int64): stored bytes of each chunk; 0 for inner chunks that are not stored.
    - `slots` (int64): with shards, the number of each inner chunk in the index.
    """
    if shard is None:
        yield from groups
        return
    assert slots is not None
    index = shard_index(shard, slots, sizes)
    if not shard.index_at_end:
        yield [index]
    yield from groups
    if shard.index_at_end:
        yield [index]


def shard_index(shard: ShardLayout, slots: np.ndarray, sizes: np.ndarray) -> bytes:
    """Return the encoded index of a shard whose inner chunks are stored consecutively."""
    ends = np.cumsum(sizes) + (0 if shard.index_at_end else shard.index_nbytes)
    stored = sizes > 0
    index = np.full((shard.count, 2), _MISSING, ">u8" if shard.index_big_endian else "<u8")
    index[slots[stored], 0] = (ends - sizes)[stored]
    index[slots[stored], 1] = sizes[stored]
    data = index.tobytes()
    return data + checksum(data) if shard.index_checksum else data
