"""Find the stored bytes of a job's pieces: sizes of files, indexes of shards.

In: a job. Out: spans and missing pieces, a batch of objects after another, so that what is found is read while the
rest is looked for. Errors: :class:`~linumpy.errors.ChunkError`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

import numpy as np

from linumpy.errors import ChunkError
from linumpy.gpu.read.job import Job, file_version
from linumpy.plan.read.shards import ShardIndexError, read_index
from linumpy.plan.read.slabs import Spans
from linumpy.plan.read.spans import encoded_spans, raw_spans, shard_spans

#: Objects of a batch at least. More are looked for at a time where a slab takes more.
_BATCH = 64


def locate(job: Job) -> Iterator[tuple[Spans, np.ndarray]]:
    """Find all pieces.

    Yields
    ------
    spans : Spans
        Of pieces that are stored; their places are noted in the job.
    missing : numpy.ndarray of int64
        Pieces that are not stored.
    """
    straight = job.straight()
    if job.plan.layout.shard is None and job.way is None:
        yield raw_spans(job.pieces, job.number, straight), np.empty(0, np.int64)
        return
    order = np.argsort(job.number, kind="stable")
    step = max(_BATCH, job.limits.pieces * len(job.objects) // max(1, len(order)))
    for first in range(0, len(job.objects), step):
        begin, end = np.searchsorted(job.number[order], (first, first + step))
        rows = order[begin:end]
        if job.plan.layout.shard is not None:
            spans, missing = _in_shards(job, rows, straight)
        else:
            spans, missing = _in_files(job, rows)
        job.stored_offset[spans.piece], job.stored_nbytes[spans.piece] = spans.offset, spans.nbytes
        yield spans, missing


def is_missing(path: str) -> bool:
    """Say whether nothing is stored at a path."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return not os.path.islink(path)  # a link to nothing was something once
    except OSError:
        return False
    return False


def _in_files(job: Job, rows: np.ndarray) -> tuple[Spans, np.ndarray]:
    """Look at the files of encoded chunks; one chunk may be of several pieces where the host decodes."""
    numbers, piece = np.unique(job.number[rows], return_inverse=True)
    paths = zip(numbers.tolist(), job.paths(numbers), strict=True)
    sizes = np.array([_size(job, number, path) for number, path in paths], np.int64)[piece]
    there = sizes >= 0
    return encoded_spans(rows[there], job.number, sizes[there]), rows[~there]


def _size(job: Job, number: int, path: str) -> int:
    """Size of a chunk's file; -1 where there is none."""
    try:
        found = os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR) and is_missing(path):
            return -1
        raise ChunkError(f"{job.object_name(number)} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ChunkError(f"{job.object_name(number)} cannot be read: it is no file")
    job.versions[number] = file_version(found)
    return found.st_size


def _in_shards(job: Job, rows: np.ndarray, straight: np.ndarray) -> tuple[Spans, np.ndarray]:
    # One index at a time is in memory: that of a shard of very many chunks may have some MiB.
    found = ((number, _shard_index(job, number)) for number in np.unique(job.number[rows]).tolist())
    indexes = ((number, index) for number, index in found if index is not None)
    return shard_spans(job.plan, job.pieces, rows, job.number, straight, indexes)


def _shard_index(job: Job, number: int) -> np.ndarray | None:
    """Read the index of one shard; None where the shard is not stored."""
    layout = job.plan.layout
    shard = layout.shard
    assert shard is not None
    try:
        descriptor = os.open(job.path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if is_missing(job.path(number)):
            return None
        raise ChunkError(f"{job.object_name(number)} cannot be opened: {error.strerror}") from error
    try:
        job.counts.files_opened += 1
        found = os.fstat(descriptor)
        job.versions[number] = file_version(found)
        size, begin = found.st_size, max(0, found.st_size - shard.index_nbytes) if shard.index_at_end else 0
        raw = os.pread(descriptor, min(shard.index_nbytes, size), begin)
        job.counts.bytes_read += len(raw)
        return read_index(raw, shard, size, layout.chunk_nbytes if layout.chain is None else None)
    except ShardIndexError as error:
        raise ChunkError(f"{job.object_name(number)}: {error}") from error
    except OSError as error:
        raise ChunkError(f"{job.object_name(number)} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
