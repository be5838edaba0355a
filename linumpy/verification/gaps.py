"""Find chunks without voxels among chunks with voxels, which were probably lost.

Writers leave out chunks that hold only the fill value, so a missing chunk, or one of zeros, means nothing by itself. It
was probably lost where its neighbours are full up to the face that they share with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from linumpy.verification.levels import Box
from linumpy.verification.stored import Grid

#: Groups of empty chunks that are looked at, the largest first, and faces of a group.
_MAX_GROUPS, _MAX_FACES = 100, 16
#: Share of the voxels of faces that hold something, from which on neighbours are full.
_FULL = 0.5


@dataclass(frozen=True)
class Gap:
    """Neighbouring empty chunks between full chunks: their number, the first of them, and a description of where."""

    count: int
    first: tuple[int, ...]
    where: str


def find_gaps(empty: np.ndarray, grid: Grid, read: Callable[[Box], np.ndarray | None], fill: object) -> list[Gap]:
    """Find groups of empty chunks that interrupt voxels along an axis, or with which voxels end as in a stopped run.

    `empty`: mask of chunks. `read`: returns the voxels of a box in host memory; None for none. `fill`:
    the value of empty chunks.
    """
    if not empty.any() or empty.all():
        return []
    gaps, tail = list[Gap](), _is_tail(empty)
    labels = ndimage.label(empty)[0]
    sizes = np.bincount(labels.ravel())[1:]
    for number in np.argsort(-sizes, kind="stable")[:_MAX_GROUPS] + 1:
        group = labels == number
        inside = [axis for axis in range(empty.ndim) if not _touches(group, axis)]
        if not inside and not tail:
            continue
        axes = inside or [axis for axis in range(empty.ndim) if empty.shape[axis] > 1]
        if _share_of_full(group, empty, grid, read, fill, axes) <= _FULL:
            continue
        where = where_of(group, is_tail=not inside)
        gaps.append(Gap(int(sizes[number - 1]), tuple(map(int, np.argwhere(group)[0])), where))
    return gaps


def _touches(group: np.ndarray, axis: int) -> bool:
    """Return whether a group reaches the first or the last chunk along an axis."""
    return bool(group.take(0, axis).any() or group.take(-1, axis).any())


def _is_tail(empty: np.ndarray) -> bool:
    """Return whether the empty chunks are the last ones in C order, at least a row of them, as after a stopped run."""
    flat = empty.ravel()
    first = int(flat.argmax())
    row = next((n for n in reversed(empty.shape) if n > 1), 1)
    return bool(flat[first:].all()) and len(flat) - first >= row and first > 0


def _share_of_full(
    group: np.ndarray,
    empty: np.ndarray,
    grid: Grid,
    read: Callable[[Box], np.ndarray | None],
    fill: object,
    axes: list[int],
) -> float:
    """Return the share of voxels other than `fill` on the faces that a group shares with chunks that are not empty."""
    faces = []
    for axis in axes:
        for step in (-1, 1):
            beside = np.roll(group, step, axis) & ~empty
            beside[tuple(slice(None) if a != axis else (-1 if step < 0 else 0) for a in range(group.ndim))] = False
            faces += [(axis, step, tuple(map(int, chunk))) for chunk in np.argwhere(beside)]
    full = total = 0
    for axis, step, chunk in faces[:: max(1, -(-len(faces) // _MAX_FACES))]:
        box = list(grid.voxels(chunk))
        at = box[axis].stop - 1 if step < 0 else box[axis].start
        box[axis] = slice(at, at + 1)
        voxels = read(tuple(box))
        if voxels is not None:
            full, total = full + int((voxels != fill).sum()), total + voxels.size
    return full / total if total else 0.0


def where_of(group: np.ndarray, *, is_tail: bool = False) -> str:
    """Describe a group of chunks by its mask: whole planes of chunks, the rest of the array, or a box."""
    corners = np.argwhere(group)
    first, last = (tuple(map(int, corner)) for corner in (corners.min(axis=0), corners.max(axis=0)))
    if is_tail:
        return f"all chunks from {tuple(map(int, corners[0]))} to the end, as after a writer that was stopped"
    for axis in range(group.ndim):
        planes = np.flatnonzero(group.any(axis=tuple(a for a in range(group.ndim) if a != axis)))
        if len(planes) < group.shape[axis] and np.take(group, planes, axis).all():
            named = f"{planes[0]}" if len(planes) == 1 else f"{planes[0]} to {planes[-1]}"
            return f"all chunks with number {named} along axis {axis}"
    return f"chunk {first}" if first == last else f"chunks from {first} to {last}"
