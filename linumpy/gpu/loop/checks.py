"""Check what was read: files that changed, reads that failed, chunks that are not stored.

In: a :class:`~linumpy.gpu.loop.works.Work` and the results of its reads. Out: what of it is lost, which the work then
has no more. Errors are noted for the jobs that want what is broken.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace

import numpy as np

from linumpy.errors import ChunkError
from linumpy.gpu.loop.locate import is_missing
from linumpy.gpu.loop.wave import Part
from linumpy.gpu.loop.works import Work
from linumpy.io.reads.file_reads import ReadResults
from linumpy.plan.read.slabs import Slab

Rows = list[tuple[Part, np.ndarray]]


@dataclass(frozen=True, eq=False)
class Lost:
    """Spans of a work that were not read.

    Attributes
    ----------
    broken : list of (Part, numpy.ndarray)
        Those whose jobs have failed.
    missing : list of (Part, numpy.ndarray)
        Those that are not stored.
    """

    broken: Rows
    missing: Rows


def lost_reads(work: Work, results: ReadResults) -> Lost | None:
    """Check reads, and leave what is lost out of the work; None where all was read."""
    slab = work.slab
    assert slab is not None
    assert work.file_of_read is not None
    wrong = (results.opened < 0) | (results.before[:, :3] != results.after[:, :3]).any(axis=1)
    begin = 0
    for part, numbers in work.files:
        mine = slice(begin, begin + len(numbers))
        begin += len(numbers)
        part.together.files_opened += int((results.opened[mine] >= 0).sum())
        wrong[mine] |= _other_files(part, numbers, results.before[mine], wrong[mine])
    bad_reads = results.nbytes != slab.nbytes
    if wrong.any():
        bad_reads |= wrong[work.file_of_read]
    return _sort_out(work, results, bad_reads) if bad_reads.any() else None


def _sort_out(work: Work, results: ReadResults, bad_reads: np.ndarray) -> Lost:
    """Part what is broken from what is not stored, and both from the rest."""
    slab, file = work.slab, work.file_of_read
    assert slab is not None
    assert file is not None
    files = [(part, int(number)) for part, numbers in work.files for number in numbers]
    read = np.searchsorted(slab.place, slab.piece_place, side="right") - 1
    verdict: dict[int, BaseException | None] = {}
    for row in np.flatnonzero(bad_reads).tolist():
        part, number = files[file[row]]
        verdict[row] = _why(part, number, results, int(file[row]), row, int(slab.nbytes[row]))
    keep = ~bad_reads[read]
    lost, count = Lost([], []), 0
    for n, (part, spans) in enumerate(work.rows):
        mine = slice(count, count + len(spans))
        count += len(spans)
        missing = np.array([row in verdict and verdict[row] is None for row in read[mine].tolist()], bool)
        for row in np.unique(read[mine][~keep[mine]]).tolist():
            if (error := verdict[row]) is not None:
                some = spans[read[mine] == row]
                part.fail(some, error)
                lost.broken.append((part, some))
        if missing.any():
            lost.missing.append((part, spans[missing]))
        work.rows[n] = (part, spans[keep[mine]])
    work.slab = _kept(slab, keep)
    return lost


def lost_chunks(work: Work, errors: list[Exception | None]) -> bool:
    """Check chunks that the host decoded; says whether any was lost.

    Their buffers hold anything. The jobs that want them have failed; nobody else gets anything of them.
    """
    if not any(errors):
        return False
    ((part, spans),) = work.rows
    for span, error in zip(spans.tolist(), errors, strict=True):
        if error is not None:
            part.fail(np.array([span]), error)
    return True


def _other_files(part: Part, numbers: np.ndarray, found: np.ndarray, failed: np.ndarray) -> np.ndarray:
    """Say which files are not those that were looked at before, or have a size that a raw chunk cannot have."""
    size, expected = part.file_nbytes, part.versions[numbers]
    known = expected[:, 1] >= 0
    if size is not None and part.by_chunk:  # read once: a version that is not known now is not needed later
        wrong = found[:, 1] != size
        return wrong | (known & (found[:, :3] != expected).any(axis=1)) if known.any() else wrong
    wrong = known & (found[:, :3] != expected).any(axis=1)
    if size is not None:
        wrong |= found[:, 1] != size
    # Several slabs may read parts of a file: all of them must find the same one.
    new = numbers[~known & ~wrong & ~failed]
    part.versions[new] = found[~known & ~wrong & ~failed, :3]
    return wrong


def _why(part: Part, number: int, results: ReadResults, file: int, row: int, wanted: int) -> BaseException | None:
    """Say why a read failed; None where its chunk is not stored."""
    opened, got, name = int(results.opened[file]), int(results.nbytes[row]), part.object_name(number)
    known = bool(part.versions[number, 1] >= 0)
    if opened < 0:
        if not known and is_missing(part.paths(np.array([number]))[0]):
            return None
        return ChunkError(f"{name} cannot be opened: {os.strerror(-opened)}")
    before, after = results.before[file], results.after[file]
    if (before[3] & 0o170000) != stat.S_IFREG:
        return ChunkError(f"{name} cannot be read: it is no file")
    size, layout = part.file_nbytes, part.layout
    if size is not None and before[1] != size:
        return ChunkError(
            f"{name} has {before[1]} bytes, but a raw chunk of {layout.dtype} {layout.chunk_shape} has {size}"
        )
    if known and (before[:3] != part.versions[number]).any():
        return part.replaced(number, int(before[1]))
    if (before[:3] != after[:3]).any():
        part.versions[number] = before[:3]
        return part.replaced(number, int(after[1]))
    if got < 0:
        return ChunkError(f"{name} cannot be read: {os.strerror(-got)}")
    return ChunkError(f"{name}: {got} of {wanted} bytes could be read")


def _kept(slab: Slab, keep: np.ndarray) -> Slab:
    """Leave out spans that were not read; the reads stay, since their memory does."""
    return replace(
        slab, pieces=slab.pieces[keep], piece_place=slab.piece_place[keep], piece_nbytes=slab.piece_nbytes[keep]
    )
