"""Stack slices of any size, from disk to disk, by the shifts of the motor and by the slices' overlaps along Z.

In: a folder of OME-Zarr slices (Z, Y, X), numbered from the top down, and the motor's table of lateral shifts. Out: one
OME-Zarr volume, and a table with the decision for each pair. Overlaps are searched in a central window of the area that
two neighbouring slices share; the stack is written box by box.
:mod:`linumpy.mosaic.alignment.stack` stacks slices that were registered.
"""

from __future__ import annotations

import csv
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple, Unpack

from linumpy.arrays import Array
from linumpy.device import array_module, array_module_of
from linumpy.errors import SourceError
from linumpy.io.output.files import replacing
from linumpy.mosaic.io.image import MosaicImage
from linumpy.mosaic.io.slice_table import Shift, find_slices, motor_shifts, open_slices, unreliable_warnings
from linumpy.mosaic.io.step import ImageOptions, Step, carried_from_slices
from linumpy.mosaic.io.tiles import Box, box_nbytes, box_shape, boxes, read_box, tile_shape
from linumpy.mosaic.options import ZSearch
from linumpy.mosaic.stacking import (
    StackPlan,
    best_overlap,
    candidate_overlaps,
    compose,
    enforce_z_consistency,
    plan_stack,
    slices_in_box,
)
from linumpy.resample.tile_work import TileWork
from linumpy.write.writer import OmeZarrWriter

log = logging.getLogger(__name__)

#: Maximum bytes of the correlated voxels of each slice.
SEARCH_BYTES = 128 * 2**20


@dataclass(frozen=True, kw_only=True)
class PairDecision:
    """The decision for two neighbouring slices, one row of the table.

    - `expected_overlap`: in planes, from the slicing interval.
    - `found_overlap`: in planes, at the greatest correlation. Across missing slices nothing is searched: the expected
      overlap, which is negative where a gap is left.
    - `correlation`: the greatest correlation; NaN across missing slices.
    - `mended`: whether the overlap was replaced by the typical overlap or, if that exceeds a thin slice, by its planes.
    - `overlap`: in planes, as used in the stack.
    - `y_shift_mm`, `x_shift_mm`: shift of the moving slice relative to the fixed one.
    - `z_start`, `y_start`, `x_start`: first voxel of the moving slice in the stack.
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


def stack_mosaics(
    folder: str | Path,
    shifts: str | Path,
    output: str | Path,
    search: ZSearch,
    *,
    decisions: str | Path | None = None,
    slice_config: str | Path | None = None,
    **common: Unpack[ImageOptions],
) -> tuple[StackPlan, tuple[PairDecision, ...]]:
    """Stack OME-Zarr slices into one volume.

    Parameters
    ----------
    folder : str or Path
        Folder of the slices, as for :func:`linumpy.mosaic.io.slice_table.find_slices`: at least two, with axes z, y, x,
        one dtype and one spacing.
    shifts : str or Path
        Table of lateral shifts, as for :func:`linumpy.mosaic.io.slice_table.motor_shifts`. A shift that the table marks
        as not reliable is used, with a log line (warning).
    output : str or Path
        The OME-Zarr image to write. Its origin leaves the first slice at the coordinates of that slice. It has the
        metadata that are equal in all slices.
    search : ZSearch
        Parameters of the search for overlaps along Z.
    decisions : str or Path, optional
        A table (CSV) to write: one row for each :class:`PairDecision`.
    slice_config : str or Path, optional
        Table of the slices that are used, as for :func:`linumpy.mosaic.io.slice_table.read_slice_config`.
    **common
        :class:`~linumpy.mosaic.io.step.ImageOptions`, which also says what is raised.

    Returns
    -------
    plan : StackPlan
        Where the slices lie in the stack.
    decisions : tuple of PairDecision
        The decision for each pair.
    """
    step, paths = Step(output, **common), find_slices(folder, slice_config)
    step.check([shifts, *paths.values(), *([] if slice_config is None else [slice_config])], file=decisions)
    slices = open_slices(paths, **step.selection)
    moves = motor_shifts(shifts, tuple(slices))
    for warning in unreliable_warnings(shifts, moves):
        log.warning(warning)
    images = tuple(slices.values())
    with step.work() as work:
        candidates = search_overlaps(images, moves, search, work)
        plan, rows = _decide(images, moves, candidates, search)
        device = work.device

        def measured(number: int, part: Box) -> Array | bool:
            voxels = images[number].measured(part)
            return True if voxels is None else voxels.mask(array_module_of(device))

        first, array = images[0], images[0].array
        # The first slice stays where it is.
        origin = [o - p * s for o, p, s in zip(first.origin, plan.offsets[0], first.spacing, strict=True)]
        with step.writer(
            "the slices", carried_from_slices(images), plan.shape, array.dtype.newbyteorder("="), first.spacing,
            axes="zyx", origin=origin, chunks=array.chunks, shards=array.shards,
        ) as writer:  # fmt: skip
            has_corrections = any(image.corrections for image in images)
            make_stack(step, writer, images, plan, work, measured=measured if has_corrections else None)
            if decisions is not None:
                with (
                    replacing(decisions, overwrite=step.overwrite) as temporary,
                    temporary.open("w", newline="", encoding="utf-8") as file,
                ):
                    table = csv.DictWriter(file, [member.name for member in fields(PairDecision)], lineterminator="\n")
                    table.writeheader()
                    table.writerows(map(asdict, rows))
    return plan, rows


def _decide(
    images: tuple[MosaicImage, ...],
    moves: Sequence[Shift],
    candidates: Sequence[FoundOverlap],
    search: ZSearch,
) -> tuple[StackPlan, tuple[PairDecision, ...]]:
    """Replace outliers among the overlaps that :func:`search_overlaps` found, and plan the stack."""
    used = [found.overlap for found in candidates]
    changed = [False] * len(used)
    searched = [n for n, found in enumerate(candidates) if not math.isnan(found.correlation)]
    if searched:
        mended = enforce_z_consistency(
            [used[n] for n in searched],
            [candidates[n].correlation for n in searched],
            min_correlation=search.min_correlation,
            max_deviation=search.max_deviation,
        )
        for n, overlap, is_mended in zip(searched, mended.overlaps, mended.mended, strict=True):
            # The typical overlap may exceed the planes of a thin slice.
            used[n] = min(overlap, images[n].array.shape[0], images[n + 1].array.shape[0])
            changed[n] = is_mended or used[n] != candidates[n].overlap
    steps = [shift_in_voxels(images[0], move) for move in moves]
    plan = plan_stack([image.array.shape for image in images], used, steps)  # type: ignore[misc]
    rows = tuple(
        PairDecision(
            fixed_id=move.fixed_id, moving_id=move.moving_id, expected_overlap=found.expected,
            found_overlap=found.overlap, correlation=round(found.correlation, 6), mended=is_changed, overlap=overlap,
            y_shift_mm=move.y_mm, x_shift_mm=move.x_mm, z_start=offset[0], y_start=offset[1], x_start=offset[2],
        )
        for move, found, is_changed, overlap, offset in zip(
            moves, candidates, changed, used, plan.offsets[1:], strict=True
        )
    )  # fmt: skip
    for row in rows:
        log.info(
            "slices %d and %d: %d planes shared (%.1f expected, %d found with a correlation of %.3f)%s",
            row.fixed_id, row.moving_id, row.overlap, row.expected_overlap, row.found_overlap, row.correlation,
            ", mended" if row.mended else "",
        )  # fmt: skip
    return plan, rows


def make_stack(
    step: Step,
    writer: OmeZarrWriter,
    images: Sequence[MosaicImage],
    plan: StackPlan,
    work: TileWork,
    *,
    needed: Callable[[int, Box], Box | None] = lambda number, part: part,
    sample: Callable[[int, Box, Array], Array] = lambda number, part, voxels: voxels,
    measured: Callable[[int, Box], Array | bool] | None = None,
) -> None:
    """Read, sample, blend and write a stack in boxes.

    - `needed`: takes the number of a slice and a box of its part of the stack; returns the box of the slice to read, or
      None if the part has none of its voxels and is 0.
    - `sample`: takes these and the voxels that were read; returns those of the part.
    - `measured`: as for :func:`linumpy.mosaic.stacking.compose`.
    """
    device, dtype = work.device, images[0].array.dtype.newbyteorder("=")
    size = tile_shape(plan.shape, writer.stored, dtype.itemsize, step.tile_nbytes(work))

    def read(box: Box) -> dict[int, Array]:
        sources = {number: needed(number, part) for number, part in slices_in_box(plan, box)}
        return {n: read_box(images[n].array, part, device) for n, part in sources.items() if part is not None}

    def blend(box: Box, voxels: dict[int, Array]) -> Array:
        xp = array_module_of(device)

        def part_of(number: int, part: Box) -> Array:
            return sample(number, part, voxels[number]) if number in voxels else xp.zeros(box_shape(part), dtype)

        return compose(plan, box, part_of, xp, dtype, measured)

    work(
        boxes(plan.shape, size), read, blend, writer.write,
        done=lambda box: step.advance(sum(box_nbytes(images[n].array, part) for n, part in slices_in_box(plan, box))),
    )  # fmt: skip


class FoundOverlap(NamedTuple):
    """The overlap of two neighbouring slices.

    - `overlap`: number of shared planes with the greatest correlation; negative where missing slices leave a gap.
    - `correlation`: the greatest correlation; NaN if nothing was searched.
    - `expected`: number of shared planes by the slicing interval.
    """

    overlap: int
    correlation: float
    expected: float


def search_overlaps(
    images: tuple[MosaicImage, ...], moves: Sequence[Shift], search: ZSearch, work: TileWork
) -> list[FoundOverlap]:
    """Search the overlap of each pair of neighbours.

    Slices with missing slices between them are placed by the interval, without a search: they may share no tissue.

    - `images`: the slices from the top down, with axes z, y, x.
    - `moves`: the motor's shift of each slice to the one above.
    - `work`: reads and correlates, here or on workers.

    Returns: One for each pair.

    Raises `SourceError`: two neighbours share no area. `ValueError`: an interval or a range that is no length; no
    overlap in range.
    """
    device = work.device
    pairs: dict[int, _Pair] = {}
    overlaps: dict[int, FoundOverlap] = {}
    for number, (pair, move) in enumerate(zip(itertools.pairwise(images), moves, strict=True)):
        cuts = move.moving_id - move.fixed_id
        if cuts == 1:
            pairs[number] = _pair(*pair, move, search)
        else:
            expected = pair[0].array.shape[0] - cuts * search.slicing_interval_mm * 1e3 / pair[0].spacing[0]
            planes = min(math.floor(expected + 0.5), *(image.array.shape[0] for image in pair))
            overlaps[number] = FoundOverlap(planes, math.nan, expected)

    def correlate(number: int, windows: tuple[Array, Array]) -> FoundOverlap:
        box_pair, candidates, expected = pairs[number]
        voxels_measured = [images[number + k].measured(box) for k, box in enumerate(box_pair)]
        masks = [None if voxels is None else voxels.mask(array_module(windows[0])) for voxels in voxels_measured]
        overlap, correlation = best_overlap(*windows, candidates, expected, (masks[0], masks[1]))
        return FoundOverlap(overlap, correlation, expected)

    def read(number: int) -> tuple[Array, Array]:
        fixed_box, moving_box = pairs[number][0]
        above = read_box(images[number].array, fixed_box, device)
        return above, read_box(images[number + 1].array, moving_box, device)

    work(list(pairs), read, correlate, overlaps.__setitem__)
    return [overlaps[number] for number in range(len(moves))]


#: The box of each of two neighbouring slices that is correlated, the overlaps to try, and the expected overlap.
_Pair = tuple[tuple[Box, Box], list[int], float]


def _pair(fixed: MosaicImage, moving: MosaicImage, move: Shift, search: ZSearch) -> _Pair:
    """Plan the search of a pair."""
    above, below = fixed.array.shape[0], moving.array.shape[0]
    overlaps, expected = candidate_overlaps(
        above, below, search.slicing_interval_mm, search.search_range_mm, fixed.spacing[0]
    )
    dy, dx = (math.floor(v + 0.5) for v in shift_in_voxels(fixed, move))
    max_voxels = max(1, SEARCH_BYTES // (overlaps[-1] * fixed.array.dtype.itemsize))
    fixed_window, moving_window = search_window(fixed.lateral_shape, moving.lateral_shape, (dy, dx), max_voxels)
    if any(extent.start >= extent.stop for extent in fixed_window):
        raise SourceError(
            f"slices {move.fixed_id} and {move.moving_id} share no area: shifted by {move.y_mm} and {move.x_mm} mm"
        )
    last, first = slice(above - overlaps[-1], above), slice(0, overlaps[-1])
    return ((last, *fixed_window), (first, *moving_window)), overlaps, expected


def search_window(
    fixed: tuple[int, int], moving: tuple[int, int], step: tuple[int, int], max_voxels: int
) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Plan the window that is correlated: the central half of the shared area, cut to at most `max_voxels`.

    - `fixed`, `moving` (int, int): voxels of the slices along Y and X.
    - `step` (int, int): voxel p of the moving slice is at p + step of the fixed one.
    - `max_voxels`: maximum voxels of a plane of the window.

    Returns: The window in each slice; empty if the slices share no area.
    """
    begin = [max(0, s) for s in step]
    size = [max(0, min(f, m + s) - b) for f, m, s, b in zip(fixed, moving, step, begin, strict=True)]
    half = [(n + 1) // 2 for n in size]
    if half[0] * half[1] > max_voxels:
        short = min(*half, math.isqrt(max_voxels))
        half = [min(n, max_voxels // short if n == max(half) else short) for n in half]
        half = half if half[0] * half[1] <= max_voxels else [short, short]
    windows = []
    for shift in ((0, 0), step):
        low = [b + (n - h) // 2 - s for b, n, h, s in zip(begin, size, half, shift, strict=True)]
        windows.append((slice(low[0], low[0] + half[0]), slice(low[1], low[1] + half[1])))
    return windows[0], windows[1]


def shift_in_voxels(image: MosaicImage, move: Shift) -> tuple[float, float]:
    """Return a shift in voxels along Y and X."""
    return move.y_mm * 1e3 / image.spacing[1], move.x_mm * 1e3 / image.spacing[2]
