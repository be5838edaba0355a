"""Find the stored bytes of spans: sizes of files, indexes of shards.

In: a :class:`~linumpy.gpu.loop.wave.Part`. Out: where its spans lie and which are not stored, a batch of objects after
another, so that what is found is read while the rest is looked for. Errors are noted for the jobs that they concern.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from linumpy.errors import ChunkError
from linumpy.gpu.loop.wave import Part
from linumpy.io.reads.file_reads import FileReads, ReadEngine
from linumpy.plan.layout import ArrayLayout, ShardLayout
from linumpy.plan.read.shards import ShardIndexError, read_index
from linumpy.plan.read.spans import shard_spans

#: Objects of a batch.
_BATCH = 2048
#: Bytes of the shard indexes of a batch: one of very many chunks may have some MiB.
_INDEX_BATCH_NBYTES = 16 * 2**20
#: Bytes of the shard indexes that are kept.
_INDEX_NBYTES = 64 * 2**20
_SIZE, _MODE = 1, 3


@dataclass(frozen=True, eq=False)
class Found:
    """Spans that were looked for.

    Attributes
    ----------
    spans : numpy.ndarray of int64
        Those that are stored, ordered by object and offset.
    missing : numpy.ndarray of int64
        Those that are not.
    failed : numpy.ndarray of int64
        Those whose objects are broken; their jobs know.
    """

    spans: np.ndarray
    missing: np.ndarray
    failed: np.ndarray


class IndexCache:
    """Shard indexes, each valid while inode, size and time of its file are; for several threads.

    What an index says depends on how the metadata describe shards, too: `kind` names that.
    """

    def __init__(self, nbytes: int = _INDEX_NBYTES) -> None:
        self._nbytes, self._held = nbytes, 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, tuple[object, np.ndarray]] = OrderedDict()
        self.hits = self.misses = 0

    def get(self, path: str, version: tuple[int, ...], kind: object, *, counted: bool = True) -> np.ndarray | None:
        """Return the index of a shard, if it is known."""
        with self._lock:
            entry = self._entries.get(path)
            if entry is None or entry[0] != (version, kind):
                self.misses += counted
                return None
            self._entries.move_to_end(path)
            self.hits += counted
            return entry[1]

    def put(self, path: str, version: tuple[int, ...], kind: object, index: np.ndarray) -> None:
        """Keep an index, in place of those that were not used for longest."""
        with self._lock:
            old = self._entries.pop(path, None)
            self._held -= 0 if old is None else old[1].nbytes
            if index.nbytes > self._nbytes:
                return
            self._entries[path] = ((version, kind), index)
            self._held += index.nbytes
            while self._held > self._nbytes:
                self._held -= self._entries.popitem(last=False)[1][1].nbytes


def locate(part: Part, engine: ReadEngine, indexes: IndexCache, *, versions: bool = False) -> Iterator[Found]:
    """Find all spans of a part; with `versions` the files of raw chunks are looked at too."""
    wanted, layout = part.wanted, part.layout
    none = np.empty(0, np.int64)
    if layout.shard is None and layout.chain is None and not versions:
        part.stored_offset[:], part.stored_nbytes[:] = wanted.offset, wanted.nbytes
        yield Found(np.arange(len(wanted)), none, none)
        return
    batch = _BATCH
    if layout.shard is not None:
        batch = max(1, min(_BATCH, _INDEX_BATCH_NBYTES // layout.shard.index_nbytes))
    for first in range(0, len(wanted.objects), batch):
        objects = np.arange(first, min(first + batch, len(wanted.objects)))
        begin, end = np.searchsorted(wanted.object_index, (first, objects[-1] + 1))
        spans = np.arange(begin, end)
        stored = _stat(part, objects, engine)
        if layout.shard is None:
            part.stored_nbytes[spans] = stored[wanted.object_index[spans] - first, _SIZE]
            if layout.chain is None:
                part.stored_offset[spans], part.stored_nbytes[spans] = wanted.offset[spans], wanted.nbytes[spans]
            state = _state(part, objects, stored)
            yield _sorted_out(spans, state[wanted.object_index[spans] - first])
        else:
            yield _in_shards(part, objects, spans, stored, engine, indexes)


def is_missing(path: str) -> bool:
    """Say whether nothing is stored at a path."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return not os.path.islink(path)  # a link to nothing was something once
    except OSError:
        return False
    return False


def _stat(part: Part, objects: np.ndarray, engine: ReadEngine) -> np.ndarray:
    """Look at files: inode, size, time, mode; or a negative error number in the first column."""
    return engine.stat(part.paths(objects))


def _state(part: Part, objects: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Say of each object whether it is stored (0), missing (1) or broken (2); versions are noted."""
    part.versions[objects] = stored[:, :3]
    state = np.zeros(len(objects), np.int8)
    for row in np.flatnonzero(stored[:, 0] < 0).tolist():
        number, path = -int(stored[row, 0]), part.paths(objects[row : row + 1])[0]
        part.versions[objects[row]] = -1
        if number in (errno.ENOENT, errno.ENOTDIR) and is_missing(path):
            state[row] = 1
        else:
            state[row] = _broken(part, int(objects[row]), f"cannot be opened: {os.strerror(number)}")
    regular = (stored[:, _MODE] & 0o170000) == stat.S_IFREG
    for row in np.flatnonzero(~regular & (state == 0)).tolist():
        state[row] = _broken(part, int(objects[row]), "cannot be read: it is no file")
    return state


def _broken(part: Part, number: int, what: str) -> int:
    _fail_object(part, number, ChunkError(f"{part.object_name(number)} {what}"))
    return 2


def _fail_object(part: Part, number: int, error: ChunkError) -> None:
    begin, end = np.searchsorted(part.wanted.object_index, (number, number + 1))
    part.fail(np.arange(begin, end), error)


def _sorted_out(spans: np.ndarray, state: np.ndarray) -> Found:
    return Found(spans[state == 0], spans[state == 1], spans[state == 2])


def _in_shards(
    part: Part,
    objects: np.ndarray,
    spans: np.ndarray,
    stored: np.ndarray,
    engine: ReadEngine,
    indexes: IndexCache,
) -> Found:
    layout, wanted = part.layout, part.wanted
    state = _state(part, objects, stored)
    known = _indexes(part, objects, stored, state, engine, indexes)
    number = wanted.object_index[spans]
    offset, nbytes = shard_spans(layout, wanted.chunk[spans], number, known.items())
    if layout.chain is None:
        offset = np.where(offset < 0, -1, offset + wanted.offset[spans])
        nbytes = np.where(offset < 0, 0, wanted.nbytes[spans])
    part.stored_offset[spans], part.stored_nbytes[spans] = offset, nbytes
    of_span = state[number - objects[0]]
    of_span = np.where((of_span == 0) & (offset < 0), 1, of_span)
    found = _sorted_out(spans, of_span)
    order = np.lexsort((part.stored_offset[found.spans], wanted.object_index[found.spans]))
    return Found(found.spans[order], found.missing, found.failed)


def _indexes(
    part: Part,
    objects: np.ndarray,
    stored: np.ndarray,
    state: np.ndarray,
    engine: ReadEngine,
    indexes: IndexCache,
) -> dict[int, np.ndarray]:
    """Indexes of the shards that are stored; those that are not known are read together."""
    shard = part.layout.shard
    assert shard is not None
    paths = part.paths(objects)
    known, unknown, kind = {}, [], kind_of_index(part.layout)
    for row in np.flatnonzero(state == 0).tolist():
        index = indexes.get(paths[row], tuple(stored[row, :3].tolist()), kind)
        if index is None:
            unknown.append(row)
        else:
            known[int(objects[row])] = index
    step = max(1, _INDEX_BATCH_NBYTES // shard.index_nbytes)
    for first in range(0, len(unknown), step):
        known |= _read_indexes(part, objects, stored, state, unknown[first : first + step], paths, engine, indexes)
    return known


def kind_of_index(layout: ArrayLayout) -> tuple[ShardLayout | None, int | None]:
    """Say how shard indexes are stored, and how long each chunk is; None for encoded ones, of any length."""
    return layout.shard, layout.chunk_nbytes if layout.chain is None else None


def _read_indexes(
    part: Part,
    objects: np.ndarray,
    stored: np.ndarray,
    state: np.ndarray,
    rows: list[int],
    paths: list[str],
    engine: ReadEngine,
    indexes: IndexCache,
) -> dict[int, np.ndarray]:
    shard, count = part.layout.shard, len(rows)
    assert shard is not None
    size = stored[rows, _SIZE]
    nbytes = np.minimum(shard.index_nbytes, size)
    offset = np.maximum(0, size - shard.index_nbytes) if shard.index_at_end else np.zeros(count, np.int64)
    # Only what there is: a file may be much shorter than the index that it should have.
    buffer = np.empty((count, int(nbytes.max())), np.uint8)
    address = buffer.ctypes.data + np.arange(count) * buffer.shape[1]
    some = [paths[row] for row in rows]
    versions = part.versions[objects[rows]]
    results = engine.start(FileReads(some, np.arange(count), offset, nbytes, address, versions=versions)).wait()
    part.together.files_opened += count
    part.together.index_nbytes += int(np.maximum(results.nbytes, 0).sum())
    known, kind = {}, kind_of_index(part.layout)
    for n, row in enumerate(rows):
        number = int(objects[row])
        got = int(results.nbytes[n])
        try:
            if got < 0:
                verb = "opened" if results.opened[n] < 0 else "read"
                raise ChunkError(f"{part.object_name(number)} cannot be {verb}: {os.strerror(-got)}")
            for found in (results.before[n], results.after[n]):
                if (found[:3] != part.versions[number]).any():
                    raise part.replaced(number, int(found[_SIZE]))
            raw = ctypes.string_at(int(address[n]), got)
            known[number] = read_index(raw, shard, int(size[n]), kind[1])
            indexes.put(paths[row], tuple(stored[row, :3].tolist()), kind, known[number])
        except ShardIndexError as error:
            state[row] = 2
            _fail_object(part, number, ChunkError(f"{part.object_name(number)}: {error}"))
        except ChunkError as error:
            state[row] = 2
            _fail_object(part, number, error)
    return known
