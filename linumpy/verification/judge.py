"""What reading the chunks of an image found, as results of arrays and as findings.

In: :class:`~linumpy.verification.images.Image`, and what was found in each of its levels. Out: a result for each array,
and findings about chunks: damaged, missing, different from another level, without voxels among others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import zarr

from linumpy.gpu.read.reader import Reader
from linumpy.io.source import describe_source
from linumpy.verification.chunks import LevelPlan, LevelUnit
from linumpy.verification.findings import DAMAGED, DIFFERS, MISSING, STATES, ZERO, ArrayResult, Finding
from linumpy.verification.gaps import find_gaps, where_of
from linumpy.verification.images import Image, reading
from linumpy.verification.levels import Link
from linumpy.verification.stored import Stored, object_path

Chunk = tuple[int, ...]
#: Share of the chunks of a level that differ, from which on the level as a whole is wrong.
_MOST = 0.5


def judge(image: Image, found: Sequence[LevelUnit], reader: Reader) -> tuple[list[ArrayResult], list[Finding]]:
    """Return the results of the arrays of an image, and findings about their chunks."""
    results, findings = list[ArrayResult](), list[Finding]()
    states = [_states(plan, stored, unit) for plan, stored, unit in zip(image.levels, image.stored, found, strict=True)]
    lost = [np.zeros(state.shape, bool) for state in states]
    for number, (plan, stored, unit) in enumerate(zip(image.levels, image.stored, found, strict=True)):
        array, state = image.arrays[number], states[number]
        findings += [*stored.findings, *_damaged(array, plan, unit)]
        if number + 1 < len(image.levels):
            findings += _disagreeing(image, number, found, states, lost)
        if lost[number].any():
            findings.append(_lost(array, plan, lost[number]))
        findings += _gaps(array, plan, np.where(lost[number], DAMAGED, state), reader)
        counts = dict(zip(STATES, np.bincount(state.ravel(), minlength=len(STATES)).tolist(), strict=True))
        link = image.levels[number - 1].link if number else None
        results.append(
            ArrayResult(
                path=plan.path, shape=plan.layout.shape, chunk_shape=plan.layout.chunk_shape,
                dtype=str(plan.layout.dtype), chunks=state.size, damaged=counts["damaged"], differ=counts["differs"],
                missing=counts["missing"], zero=counts["zero"], made_by="" if link is None else str(link), states=state,
            )
        )  # fmt: skip
    return results, findings


def _states(plan: LevelPlan, stored: Stored, unit: LevelUnit) -> np.ndarray:
    """Return the state of each chunk as an index into :data:`STATES`."""
    states = np.zeros(plan.grid.chunk_counts, np.uint8)
    for chunk in unit.zero:
        states[chunk] = ZERO
    if stored.missing is not None:
        states[stored.missing] = MISSING
    for chunk in [*(chunk for chunk, _, _ in unit.damaged), *(f.chunk for f in stored.findings if f.chunk is not None)]:
        states[chunk] = DAMAGED
    return states


def _damaged(array: zarr.Array[Any], plan: LevelPlan, unit: LevelUnit) -> list[Finding]:
    """Return a finding for each stored object with chunks that cannot be read."""
    by_object = defaultdict[tuple[str, str, bool], list[Chunk]](list)
    for chunk, message, is_refused in unit.damaged:
        path = object_path(array, plan.path, plan.layout, chunk, plan.grid)
        before, is_named, after = message.rpartition(path)
        text = after.lstrip(" :,") if is_named else before.replace(describe_source(array), plan.path)
        by_object[path, text or message, is_refused].append(chunk)
    return [
        Finding(
            "damaged", path, text,
            f"whether the voxels of {_chunks_text(plan, chunks)} are whole is not known" if is_refused else
            f"the voxels of {_chunks_text(plan, chunks)} are lost",
            "the storage did not give this object: give access to it, or try again" if is_refused else
            "restore this object from a copy, or write it again from the source of the image",
            count=len(chunks), chunk=chunks[0],
        )
        for (path, text, is_refused), chunks in by_object.items()
    ]  # fmt: skip


def _chunks_text(plan: LevelPlan, chunks: Sequence[Chunk]) -> str:
    box = ", ".join(f"{part.start}:{part.stop}" for part in plan.grid.voxels(chunks[0]))
    return f"chunk {chunks[0]} ([{box}])" + (f" and of {len(chunks) - 1:,} more chunks" if len(chunks) > 1 else "")


def _disagreeing(
    image: Image, number: int, found: Sequence[LevelUnit], states: Sequence[np.ndarray], lost: Sequence[np.ndarray]
) -> list[Finding]:
    """Return findings for chunks of a level that differ from the coarser level, or for chunks of that.

    Chunks that differ are marked in `states`, and those that should have been stored in `lost`.
    """
    fine, coarse, link = image.levels[number], image.levels[number + 1], image.levels[number].link
    if link is None or not found[number].differ:
        return []
    by_coarse = defaultdict[Chunk, list[tuple[Chunk, int, int]]](list)
    for chunk, count, size in found[number].differ:
        above = _chunk_above(fine, coarse, link, chunk)
        if states[number][chunk] != DAMAGED and states[number + 1][above] != DAMAGED:
            by_coarse[above].append((chunk, count, size))
    count = sum(map(len, by_coarse.values()))
    if count > max(1, _MOST * states[number].size):
        return [_all_differ(fine.path, coarse.path, count, states[number].size)]
    findings = list[Finding]()
    is_confirmed = coarse.link is not None and coarse.link.can_tell
    also_above = {chunk for chunk, _, _ in found[number + 1].differ}
    for above, group in by_coarse.items():
        below = _count_below(fine, coarse, link, above)
        empty = states[number + 1][above] in (ZERO, MISSING)
        are_lost = all(states[number][chunk] in (ZERO, MISSING) for chunk, _, _ in group)
        # Where most of what lies below differs, the coarse chunk is wrong, unless a coarser one agrees with it.
        is_most = below > 1 and len(group) > below / 2 and not is_confirmed
        is_coarse = empty or ((is_most or above in also_above) and not are_lost)
        wrong = group
        if is_coarse:
            wrong = [(above, sum(row[1] for row in group), sum(row[2] for row in group))]
        level, other = (number + 1, fine.path) if is_coarse else (number, coarse.path)
        for chunk, differ, compared in wrong:
            if states[level][chunk] == MISSING:
                lost[level][chunk] = True
                continue
            is_zero = bool(states[level][chunk] == ZERO)
            findings.append(_differs(image, level, chunk, other, (differ, compared), is_zero=is_zero))
            states[level][chunk] = DIFFERS
    return findings


def _chunk_above(fine: LevelPlan, coarse: LevelPlan, link: Link, chunk: Chunk) -> Chunk:
    """Return the chunk of the coarser level in which a chunk lies."""
    starts = [part.start // f for part, f in zip(fine.grid.voxels(chunk), link.factors, strict=True)]
    axes = zip(coarse.grid.chunks, starts, strict=True)
    return tuple(min(int(np.searchsorted(b, n, "right")) - 1, len(b) - 2) for b, n in axes)


def _count_below(fine: LevelPlan, coarse: LevelPlan, link: Link, above: Chunk) -> int:
    """Count the chunks of the finer level that lie in a chunk."""
    count = 1
    for bounds, part, f in zip(fine.grid.chunks, coarse.grid.voxels(above), link.factors, strict=True):
        first, last = np.searchsorted(bounds, (part.start * f, part.stop * f))
        count *= max(1, int(min(last, len(bounds) - 1) - first))
    return count


def _lost(array: zarr.Array[Any], plan: LevelPlan, mask: np.ndarray) -> Finding:
    count, first = int(mask.sum()), tuple(map(int, np.argwhere(mask)[0]))
    return Finding(
        "missing", object_path(array, plan.path, plan.layout, first, plan.grid),
        f"{count:,} chunk{'s are' if count > 1 else ' is'} not stored where another level has voxels: {where_of(mask)}",
        "their voxels are read as the fill value: a writer was stopped, or they were lost",
        "write them again; the other level shows what was there", count=count, chunk=first,
    )  # fmt: skip


def _differs(image: Image, number: int, chunk: Chunk, other: str, counts: tuple[int, int], *, is_zero: bool) -> Finding:
    plan = image.levels[number]
    path = object_path(image.arrays[number], plan.path, plan.layout, chunk, plan.grid)
    zeros = ": all of its voxels are zero" if is_zero else ""
    return Finding(
        "damaged" if is_zero else "suspicious", path,
        f"{counts[0]:,} of {counts[1]:,} compared voxels of {_chunks_text(plan, [chunk])} disagree with level "
        f"{other!r}{zeros}",
        "the chunk holds voxels of another place or time, or one of the two levels has changed since they were made",
        "compare both levels with the source of the image, and write again the one that is wrong",
        chunk=chunk,
    )  # fmt: skip


def _all_differ(fine: str, coarse: str, count: int, chunks: int) -> Finding:
    return Finding(
        "suspicious", coarse, f"it disagrees with level {fine!r} in {count:,} of {chunks:,} chunks",
        "the levels show different voxels: one of them was written again, and the other was not",
        f"make level {coarse!r}, and the coarser levels, again of level {fine!r}", count=count,
    )  # fmt: skip


def _gaps(array: zarr.Array[Any], plan: LevelPlan, states: np.ndarray, reader: Reader) -> list[Finding]:
    """Return findings for missing chunks, and chunks of zeros, that interrupt voxels."""
    fill = plan.layout.fill_value
    is_zero = fill is None or not np.asarray(fill).any()
    missing, zero = states == MISSING, states == ZERO
    masks = [missing | zero] if is_zero else [missing, zero]
    findings = []
    for mask, value in zip(masks, (fill if fill is not None else 0, 0), strict=False):
        for gap in find_gaps(mask, plan.grid, reading(reader, plan), value):
            is_missing, several = bool(missing[gap.first]), "s" * (gap.count > 1)
            verb = ("is not stored", "holds only zeros", "are not stored", "hold only zeros")
            findings.append(
                Finding(
                    "missing" if is_missing else "suspicious",
                    object_path(array, plan.path, plan.layout, gap.first, plan.grid),
                    f"{gap.count:,} chunk{several} {verb[2 * bool(several) + (not is_missing)]} between full ones: "
                    f"{gap.where}",
                    "a writer was probably stopped, or what it should have written there was lost",
                    "if the image should have voxels there, write these chunks again", count=gap.count, chunk=gap.first,
                )
            )  # fmt: skip
    return findings
