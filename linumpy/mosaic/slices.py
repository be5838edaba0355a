"""Stack slices of any size, from disk to disk, by the shifts of the motor and by the slices' overlaps along Z.

In: a folder of OME-Zarr slices (Z, Y, X), numbered from the top down, and the motor's table of lateral shifts. Out: one
OME-Zarr volume, and a table with the decision for each pair. Overlaps are searched in a central window of the area that
two neighbouring slices share (:mod:`linumpy.mosaic.alignment.z_overlaps`); the stack is written box by box.
:mod:`linumpy.mosaic.common_space` stacks slices that were registered.
"""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Unpack

from linumpy.arrays import Array
from linumpy.device import array_module_of
from linumpy.io.output.files import check_file, replacing
from linumpy.mosaic.alignment.z_overlaps import FoundOverlap, search_overlaps, shift_in_voxels
from linumpy.mosaic.io.image import MosaicImage
from linumpy.mosaic.io.slice_table import Shift, find_slices, motor_shifts, open_slices, unreliable_warnings
from linumpy.mosaic.io.step import ImageOptions, Step, carried_from_slices
from linumpy.mosaic.io.tiles import Box, box_nbytes, boxes, read_box, tile_shape
from linumpy.mosaic.options import ZSearch
from linumpy.mosaic.stacking import StackPlan, compose, enforce_z_consistency, plan_stack, slices_in_box
from linumpy.resample.tile_work import TileWork
from linumpy.write.writer import OmeZarrWriter

log = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Stack:
    """Summary of a stack."""

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
    slice_config: str | Path | None = None,
    **common: Unpack[ImageOptions],
) -> Stack:
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
    """
    step, paths = Step(output, **common), find_slices(folder, slice_config)
    step.check([shifts, *paths.values(), *([] if slice_config is None else [slice_config])], [decisions])
    if decisions is not None:
        check_file(decisions, overwrite=step.overwrite)
    slices = open_slices(paths, channel=step.channel, time=step.time, spacing=step.spacing)
    moves = motor_shifts(shifts, tuple(slices))
    for warning in unreliable_warnings(shifts, moves):
        log.warning(warning)
    images = tuple(slices.values())
    with step.work() as work:
        candidates = search_overlaps(images, moves, search, work)
        plan, rows = _decide(images, moves, candidates, search)
        with _stack_writer(step, images, plan) as writer:
            _make_stack(step, writer, images, plan, work)
            if decisions is not None:
                _write_decisions(decisions, rows, step.overwrite)
    return Stack(plan, rows, sum(image.nbytes for image in images))


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


def _stack_writer(step: Step, images: tuple[MosaicImage, ...], plan: StackPlan) -> OmeZarrWriter:
    """Open the writer of the stack, whose origin leaves the first slice where it is."""
    first, array = images[0], images[0].array
    origin = [o - p * s for o, p, s in zip(first.origin, plan.offsets[0], first.spacing, strict=True)]
    return step.writer(
        "the slices", carried_from_slices(images), plan.shape, array.dtype.newbyteorder("="), first.spacing, axes="zyx",
        origin=origin, chunks=array.chunks, shards=array.shards,
    )  # fmt: skip


def _make_stack(
    step: Step, writer: OmeZarrWriter, images: tuple[MosaicImage, ...], plan: StackPlan, work: TileWork
) -> None:
    """Blend and write the stack in boxes."""
    device, dtype = work.device, images[0].array.dtype.newbyteorder("=")
    size = tile_shape(plan.shape, writer.stored, dtype.itemsize, step.tile_nbytes(work))

    def read(box: Box) -> dict[int, Array]:
        return {number: read_box(images[number].array, part, device) for number, part in slices_in_box(plan, box)}

    def measured(number: int, part: Box) -> Array | bool:
        voxels = images[number].measured(part)
        return True if voxels is None else voxels.mask(array_module_of(device))

    measured_of = measured if any(image.corrections for image in images) else None

    def blend(box: Box, voxels: dict[int, Array]) -> Array:
        xp = array_module_of(device)
        return compose(plan, box, lambda number, part: voxels[number], xp, dtype, measured_of)

    def done(box: Box) -> None:
        step.advance(sum(box_nbytes(images[number].array, part) for number, part in slices_in_box(plan, box)))

    work(boxes(plan.shape, size), read, blend, writer.write, done=done)


def _write_decisions(path: str | Path, rows: tuple[PairDecision, ...], overwrite: bool) -> None:
    names = [member.name for member in fields(PairDecision)]
    with replacing(path, overwrite=overwrite) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(names)
        table.writerows([getattr(row, name) for name in names] for row in rows)
