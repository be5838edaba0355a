"""A stack of slices of any size, from disk to disk, arranged by the microscope's motor and by what overlaps along Z.

In: a folder of OME-Zarr slices (Z, Y, X), numbered from the top down, and a table of lateral shifts. Out: one OME-Zarr
volume, and a table of what was decided for each pair. Overlaps are searched in a window in the middle of what two
neighbouring slices share; the stack is made box by box, whatever its size.
"""

from __future__ import annotations

import csv
import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from linumpy.device import array_module, require_cuda
from linumpy.errors import MetadataError, SourceError
from linumpy.io.carried import carried_from
from linumpy.io.files import check_file, replacing
from linumpy.io.place import check_apart, check_place
from linumpy.mosaic.image import MosaicImage, open_mosaic
from linumpy.mosaic.slice_table import Shift, chain_shifts, find_slices, read_shifts
from linumpy.mosaic.stacking import (
    StackPlan,
    best_overlap,
    candidate_overlaps,
    compose,
    enforce_z_consistency,
    parts,
    plan_stack,
)
from linumpy.mosaic.tiles import Box, boxes, read_box, tile_nbytes, tile_shape
from linumpy.resample.overlap import work_through
from linumpy.write.writer import OmeZarrWriter, Progress

log = logging.getLogger(__name__)

#: Voxels of each slice that are correlated take at most so many bytes.
SEARCH_BYTES = 128 * 2**20


@dataclass(frozen=True)
class ZSearch:
    """How overlaps along Z are searched.

    Attributes
    ----------
    slicing_interval_mm : float
        Thickness that is cut off between slices.
    search_range_mm : float
        How far an overlap may be from the expected one, to each side.
    min_correlation, max_deviation : float
        As for :func:`linumpy.mosaic.stacking.enforce_z_consistency`.

    Raises
    ------
    ValueError
        A correlation beyond -1 and 1, a deviation below 0.
    """

    slicing_interval_mm: float
    search_range_mm: float
    min_correlation: float = 0.2
    max_deviation: float = 3.0

    def __post_init__(self) -> None:
        if not -1 <= self.min_correlation <= 1:
            raise ValueError(f"min_correlation={self.min_correlation}: correlations are from -1 to 1")
        if not self.max_deviation >= 0:
            raise ValueError(f"max_deviation={self.max_deviation}: a number from 0 on is needed")


@dataclass(frozen=True)
class PairDecision:
    """What was decided for two neighbouring slices, one row of the table.

    Attributes
    ----------
    fixed_id, moving_id : int
        Numbers of the slices.
    expected_overlap : float
        In planes, from the slicing interval.
    found_overlap : int
        In planes, where the correlation is greatest.
    correlation : float
        There.
    mended : bool
        Whether it was replaced by the typical overlap.
    overlap : int
        In planes, as used.
    y_shift_mm, x_shift_mm : float
        Of the moving slice relative to the fixed one.
    z_start, y_start, x_start : int
        First voxel of the moving slice in the stack.
    """

    fixed_id: int
    moving_id: int
    expected_overlap: float
    found_overlap: int
    correlation: float
    mended: bool
    overlap: int
    y_shift_mm: float
    x_shift_mm: float
    z_start: int
    y_start: int
    x_start: int


@dataclass(frozen=True)
class Stack:
    """What was stacked.

    Attributes
    ----------
    plan : StackPlan
        Where the slices lie.
    decisions : tuple of PairDecision
        One for each pair.
    nbytes : int
        Bytes of all slices.
    """

    plan: StackPlan
    decisions: tuple[PairDecision, ...]
    nbytes: int


def stack_mosaics(
    folder: str | Path,
    shifts: str | Path,
    output: str | Path,
    search: ZSearch,
    *,
    decisions: str | Path | None = None,
    channel: int | None = None,
    time: int | None = None,
    spacing: Sequence[float] | None = None,
    n_levels: int = 1,
    use_gpu: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    tile_bytes: int | None = None,
) -> Stack:
    """Stack OME-Zarr slices into one volume.

    Parameters
    ----------
    folder : str or Path
        Where the slices are, as :func:`linumpy.mosaic.slice_table.find_slices` finds them: axes z, y, x, one dtype,
        one spacing.
    shifts : str or Path
        Table of lateral shifts, as :func:`linumpy.mosaic.slice_table.read_shifts` reads it: a row for each pair of
        neighbouring slices.
    output : str or Path
        The OME-Zarr image to write. Its voxels lie in µm as those of the first slice do. Of the metadata it has what
        all slices say alike.
    search : ZSearch
        How overlaps along Z are searched.
    decisions : str or Path, optional
        A table (CSV) to write: one :class:`PairDecision` a row.
    channel, time : int, optional
        The one to take of each slice, counted from 0, where it has several.
    spacing : (float, float, float), optional
        Voxel spacing of the slices' finest resolution in µm along z, y and x, where their metadata lacks it.
    n_levels : int
        Resolutions to write.
    use_gpu : bool
        Whether to read to the GPU and work there.
    overwrite : bool
        Whether to replace outputs that are there.
    progress : callable, optional
        Called with the number of bytes of the slices that were read since the last call.
    tile_bytes : int
        About how many bytes of voxels to have at once; by default 256 MiB on a GPU and 32 MiB on the CPU.

    Raises
    ------
    FileExistsError, FileNotFoundError, SourceError, MetadataError, ValueError
        A path that is taken; slices or a table that are missing, or do not fit each other; no overlap within reach.
    GpuUnavailableError
        `use_gpu` and there is no CUDA device.
    """
    check_place(Path(output), overwrite=overwrite)
    if decisions is not None:
        check_file(decisions, overwrite=overwrite)
    slices = open_slices(folder, channel=channel, time=time, spacing=spacing)
    outputs = [output] if decisions is None else [output, decisions]
    check_apart(outputs, [shifts, *find_slices(folder).values()])
    moves = chain_shifts(tuple(slices), read_shifts(shifts), str(shifts))
    images = tuple(slices.values())
    found = _search(images, moves, search, use_gpu)
    overlaps, correlations = [one[0] for one in found], [one[1] for one in found]
    mended = enforce_z_consistency(
        overlaps, correlations, min_correlation=search.min_correlation, max_deviation=search.max_deviation
    )
    # The typical overlap may be more than a thin slice has.
    planes = [one.array.shape[0] for one in images]
    used = [min(n, *pair) for n, pair in zip(mended.overlaps, itertools.pairwise(planes), strict=True)]
    changed = [is_mended or n != m for is_mended, n, m in zip(mended.mended, used, overlaps, strict=True)]
    steps = [_voxels(images[0], move) for move in moves]
    plan = plan_stack([one.array.shape for one in images], used, steps)  # type: ignore[misc]
    rows = tuple(
        PairDecision(
            move.fixed_id, move.moving_id, expected, overlap, round(correlation, 6), replaced, last,
            move.y_mm, move.x_mm, *offset,
        )
        for move, (overlap, correlation, expected), replaced, last, offset in zip(
            moves, found, changed, used, plan.offsets[1:], strict=True
        )
    )  # fmt: skip
    for row in rows:
        log.info(
            "slices %d and %d: %d planes shared (%.1f expected, %d found with a correlation of %.3f)%s",
            row.fixed_id, row.moving_id, row.overlap, row.expected_overlap, row.found_overlap, row.correlation,
            ", mended" if row.mended else "",
        )  # fmt: skip
    batch = tile_nbytes(tile_bytes, use_gpu)
    _write_stack(output, images, plan, n_levels, use_gpu, overwrite, progress, batch, rows, decisions)
    return Stack(plan, rows, sum(one.nbytes for one in images))


def open_slices(
    folder: str | Path,
    *,
    channel: int | None = None,
    time: int | None = None,
    spacing: Sequence[float] | None = None,
) -> dict[int, MosaicImage]:
    """Open the slices of a folder, which must be of one kind; parameters are those of :func:`stack_mosaics`.

    Raises
    ------
    FileNotFoundError, SourceError, MetadataError
        As :func:`linumpy.mosaic.slice_table.find_slices` and :func:`linumpy.mosaic.image.open_mosaic`; less than two
        slices, axes that are not z, y, x, slices of different dtype or spacing.
    ValueError
        Slices of several times or channels, of which none is chosen.
    """
    slices = {
        number: open_mosaic(path, channel=channel, time=time, spacing=spacing)
        for number, path in find_slices(folder).items()
    }
    first = next(iter(slices.values()))
    if len(slices) < 2:
        raise SourceError(f"{first.name} is the only slice in {folder}: a stack needs two")
    for one in slices.values():
        one.only("slices are stacked by what one volume of each shows")
        if one.axes != "zyx":
            raise MetadataError(f"{one.name}: axes {', '.join(one.axes)}; slices are stacked with axes z, y, x")
        if one.array.dtype != first.array.dtype:
            raise SourceError(f"{one.name} is {one.array.dtype}, {first.name} is {first.array.dtype}: one is needed")
        if not np.allclose(one.spacing, first.spacing, rtol=1e-4, atol=0):
            raise SourceError(
                f"{one.name} has voxels of {one.spacing} µm, {first.name} of {first.spacing} µm: resample them first"
            )
    return slices


def _voxels(image: MosaicImage, move: Shift) -> tuple[float, float]:
    """A shift in voxels along Y and X."""
    return move.y_mm * 1e3 / image.spacing[1], move.x_mm * 1e3 / image.spacing[2]


def search_window(
    fixed: tuple[int, int], moving: tuple[int, int], step: tuple[int, int], most: int
) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Choose what is correlated: the central half of what two slices share, or less if it has more than `most` voxels.

    Parameters
    ----------
    fixed, moving : (int, int)
        Voxels of the slices along Y and X.
    step : (int, int)
        Voxel p of the moving slice lies at p + step of the fixed one.
    most : int
        Voxels of a plane.

    Returns
    -------
    fixed, moving : tuple of slice
        The window in either slice; empty slices where they share nothing.
    """
    begin = [max(0, s) for s in step]
    size = [max(0, min(f, m + s) - b) for f, m, s, b in zip(fixed, moving, step, begin, strict=True)]
    half = [(n + 1) // 2 for n in size]
    if half[0] * half[1] > most:
        short = min(*half, math.isqrt(most))
        half = [min(n, most // short if n == max(half) else short) for n in half]
        half = half if half[0] * half[1] <= most else [short, short]
    windows = []
    for shift in ((0, 0), step):
        low = [b + (n - h) // 2 - s for b, n, h, s in zip(begin, size, half, shift, strict=True)]
        windows.append((slice(low[0], low[0] + half[0]), slice(low[1], low[1] + half[1])))
    return windows[0], windows[1]


@dataclass(frozen=True)
class _Pair:
    """Two neighbouring slices, and what of each is correlated."""

    fixed: MosaicImage
    moving: MosaicImage
    here: Box
    there: Box
    overlaps: tuple[int, ...]
    expected: float


def _pair(fixed: MosaicImage, moving: MosaicImage, move: Shift, search: ZSearch) -> _Pair:
    """Choose what of a pair is correlated."""
    above, below = fixed.array.shape[0], moving.array.shape[0]
    overlaps, expected = candidate_overlaps(
        above, below, search.slicing_interval_mm, search.search_range_mm, fixed.spacing[0]
    )
    dy, dx = (math.floor(v + 0.5) for v in _voxels(fixed, move))
    most = max(1, SEARCH_BYTES // (overlaps[-1] * fixed.array.dtype.itemsize))
    here, there = search_window(fixed.array.shape[1:], moving.array.shape[1:], (dy, dx), most)  # type: ignore[arg-type]
    if any(one.start >= one.stop for one in here):
        raise SourceError(
            f"slices {move.fixed_id} and {move.moving_id} share nothing: shifted by {move.y_mm} and {move.x_mm} mm"
        )
    last, first = slice(above - overlaps[-1], above), slice(0, overlaps[-1])
    return _Pair(fixed, moving, (last, *here), (first, *there), tuple(overlaps), expected)


def _search(
    images: tuple[MosaicImage, ...], moves: Sequence[Shift], search: ZSearch, use_gpu: bool
) -> list[tuple[int, float, float]]:
    """Search the overlap of each pair: overlap, correlation, expected overlap."""
    found: list[tuple[int, float, float]] = []

    def correlate(pair: _Pair, windows: tuple[Any, Any]) -> None:
        known = (pair.fixed.measured(pair.here), pair.moving.measured(pair.there))
        masks = [None if one is None else one.mask(array_module(windows[0])) for one in known]
        found.append((*best_overlap(*windows, pair.overlaps, pair.expected, (masks[0], masks[1])), pair.expected))

    work_through(
        [_pair(*pair, move, search) for pair, move in zip(itertools.pairwise(images), moves, strict=True)],
        lambda pair: (read_box(pair.fixed.array, pair.here, use_gpu), read_box(pair.moving.array, pair.there, use_gpu)),
        correlate,
        use_gpu=use_gpu,
    )
    return found


def _write_stack(
    output: str | Path,
    images: tuple[MosaicImage, ...],
    plan: StackPlan,
    n_levels: int,
    use_gpu: bool,
    overwrite: bool,
    progress: Progress | None,
    tile_bytes: int,
    rows: tuple[PairDecision, ...],
    decisions: str | Path | None,
) -> None:
    first = images[0]
    xp, dtype = require_cuda() if use_gpu else np, first.array.dtype.newbyteorder("=")
    origin = [o - p * s for o, p, s in zip(first.origin, plan.offsets[0], first.spacing, strict=True)]

    said, *others = map(carried_from, images)
    carried = said.shared_with(others).without("labels", "image_label", "own").on_another_grid()
    carried.log_dropped("the slices", output)

    def read(box: Box) -> dict[int, Any]:
        return {number: read_box(images[number].array, part, use_gpu) for number, part in parts(plan, box)}

    def measured(number: int, part: Box) -> Any:
        found = images[number].measured(part)
        return True if found is None else found.mask(xp)

    known = measured if any(one.corrections for one in images) else None

    def blend(box: Box, voxels: dict[int, Any]) -> Any:
        made = compose(plan, box, lambda number, part: voxels[number], xp, dtype, known)
        if progress is not None:
            progress(sum(one.nbytes for one in voxels.values()))
        return made

    with OmeZarrWriter(
        output, plan.shape, dtype, first.spacing, axes="zyx", origin=origin, n_levels=n_levels,
        chunks=first.array.chunks, shards=first.array.shards, overwrite=overwrite, carried=carried,
    ) as writer:  # fmt: skip
        size = tile_shape(plan.shape, writer.stored, dtype.itemsize, tile_bytes)
        work_through(boxes(plan.shape, size), read, blend, writer.write, use_gpu=use_gpu)
        if decisions is not None:
            _write_decisions(decisions, rows, overwrite)


def _write_decisions(path: str | Path, rows: tuple[PairDecision, ...], overwrite: bool) -> None:
    names = [one.name for one in fields(PairDecision)]
    with replacing(path, overwrite=overwrite) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(names)
        table.writerows([getattr(row, name) for name in names] for row in rows)
