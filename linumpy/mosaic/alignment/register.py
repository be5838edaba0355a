"""Register the slices of a stack against each other, and solve for the transforms of all slices.

In: a folder of OME-Zarr slices (Z, Y, X), numbered from the top down. Out: :class:`SliceTransforms`. Each slice is
compared with the next ones by faces (:mod:`linumpy.mosaic.alignment.faces`): projections of the planes of both slices
that show the same tissue or, if they share none, the nearest ones. Shadows of the tissue above these planes are fitted
and subtracted. All pairs are registered in one batch. The probability that a pair is right comes from the scores of the
wrong transforms that were tried, and from its agreement with the motor and with the other pairs. A least-squares
solution over the probable pairs and the motor's shifts places the slices laterally (:mod:`linumpy.registration.chain`).
Along Z the slicing interval places them, counted from their cut surfaces, which may be tilted.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import numpy as np

from linumpy.errors import SourceError
from linumpy.mosaic.alignment.faces import (
    CutSurface,
    Face,
    find_surfaces,
    logarithm,
    planes_of,
    read_faces,
    stacked,
)
from linumpy.mosaic.alignment.transforms import Matrix, PairResult, SliceTransform, SliceTransforms
from linumpy.mosaic.io.image import MosaicImage
from linumpy.mosaic.io.slice_table import (
    check_interval,
    find_slices,
    motor_shifts,
    open_slices,
    unreliable_warnings,
)  # fmt: skip
from linumpy.mosaic.io.step import Step, StepOptions
from linumpy.mosaic.options import Alignment, SurfaceMethod
from linumpy.progress import progress_bar
from linumpy.registration.chain import ChainSolution, PairLink, agreement, solve_chain
from linumpy.registration.pairs import register_pairs
from linumpy.registration.refine import PairTransforms

log = logging.getLogger(__name__)

#: Maximum bytes of all faces as float32: registration holds about fourteen copies of them.
FACE_BYTES = 2**28
#: Maximum depth of the planes that are averaged, in µm: more planes average out more speckle, but show more shadows.
_FACE_UM = 50.0
#: Number of planes below a cut surface that are not used: the first plane is half water.
_RIM = 1
#: Standard error that oblique structures add in µm, for each µm between the planes of two slices.
_DRIFT = 0.3
#: Assumed standard error of the motor's shifts between neighbours in µm, with the rotation that they do not tell;
#: without a table, that of "nothing moved" as a fraction of the range of the search. Good pairs replace both.
_MOTOR_UM, _UNMOVED = 50.0, 1 / 8
#: A pair whose standard error is larger than that of the motor by this factor is not used.
_LARGEST_ERROR = 3.0
#: Why a pair is rejected whose own evidence is enough.
_CONTRADICTS = "contradicts the other pairs or the motor"


def register_slices(
    folder: str | Path,
    output: str | Path | None,
    alignment: Alignment,
    *,
    shifts: str | Path | None = None,
    slice_config: str | Path | None = None,
    method: SurfaceMethod | None = None,
    **common: Unpack[StepOptions],
) -> SliceTransforms:
    """Find the transforms of the slices of a folder to the common space of their stack.

    Parameters
    ----------
    folder : str or Path
        Folder of the slices, as for :func:`linumpy.mosaic.slices.stack_mosaics`.
    output : str or Path, optional
        The JSON file to write.
    alignment : Alignment
        How to align.
    shifts : str or Path, optional
        Table of the motor's lateral shifts, as for :func:`linumpy.mosaic.io.slice_table.motor_shifts`: the start of the
        search, and the positions of slices without a pair. By default slices lie on top of each other.
    slice_config : str or Path, optional
        Table of the slices that are used, as for :func:`linumpy.mosaic.io.slice_table.read_slice_config`.
    method : SurfaceMethod, optional
        How the cut surface is found; by default as an edge.
    **common
        :class:`~linumpy.mosaic.io.step.StepOptions`, which also says what is raised, for each slice. Workers of
        `distributed` read the slices; pairs are registered here.
    """
    step, paths = Step.of(StepOptions, common), find_slices(folder, slice_config)
    step.check([*paths.values(), *(table for table in (shifts, slice_config) if table is not None)], file=output)
    slices = open_slices(paths, least=1, **step.selection)
    numbers, images = tuple(slices), tuple(slices.values())
    check_interval("interval_mm", alignment.interval_mm, images)
    moves, reliable = _motor_shifts(numbers, shifts)
    with step.work() as work:
        method = method or SurfaceMethod(definition="edge")
        surfaces = find_surfaces(images, method, work) if alignment.crop else [CutSurface()] * len(images)
        depths = [_depth(*pair, alignment) for pair in zip(images, surfaces, strict=True)]
        if len(images) == 1:
            unmoved = solve_chain(1, [], (1.0, 1.0))
            levelled = _transforms(paths, slices, surfaces, depths, unmoved, alignment, reliable)
            return _log_and_write(levelled, output, step.overwrite)
        pairs = [(n, n + distance) for distance in range(1, alignment.reach + 1) for n in range(len(images) - distance)]
        interval = alignment.interval_mm * 1e3 / images[0].spacing[0]
        rim = _RIM if alignment.crop and min(depths) > _RIM else 0
        planes = planes_of(pairs, numbers, depths, interval, rim, max(1, round(_FACE_UM / images[0].spacing[0])))
        offsets, shape, factor = _canvas(images, moves, len(pairs))
        # The planes between the rim and a face cast shadows on it.
        shading = [Face(face.number, rim, face.start) if face.start > rim else None for face, _ in planes]
        needed = [face for face in itertools.chain(*planes, shading) if face is not None]
        faces = read_faces(images, surfaces, list(dict.fromkeys(needed)), factor, work)
        faces = {face: logarithm(values) for face, values in faces.items()}
        xp = work.xp
    # Distance between the planes of a pair along Z, in planes.
    distances = [a.start - b.start - interval * (numbers[b.number] - numbers[a.number]) for a, b in planes]
    gaps = [abs(distance) * images[0].spacing[0] for distance in distances]
    pixel = tuple(s * factor for s in images[0].spacing[1:])
    sides = [stacked([faces[p[k]] for p in planes], [offsets[p[k].number] for p in planes], shape, xp) for k in (0, 1)]
    no_shadow = np.zeros(shape, np.float32)
    shadows = stacked(
        [no_shadow if face is None else faces[face] for face in shading],
        [(0, 0) if face is None else offsets[face.number] for face in shading], shape, xp,
    )  # fmt: skip
    with progress_bar("pairs", len(pairs), "pair") as advance:
        registered = register_pairs(
            *sides, shadows=shadows, spacing=pixel, model=alignment.model, max_angle=alignment.max_angle,
            max_shift=alignment.max_shift, progress=advance,
        )  # fmt: skip
    links = _links(pairs, registered, offsets, pixel, factor, gaps)
    evidence, reasons, solution = _solve(
        numbers, images, links, moves, registered, pixel, alignment, has_table=shifts is not None
    )
    result = _transforms(paths, slices, surfaces, depths, solution, alignment, reliable)
    results = [
        PairResult(
            fixed_id=numbers[link.fixed], moving_id=numbers[link.moving], matrix=_rows(link.matrix),
            correlation=float(registered.correlations[n]), overlap=float(registered.overlaps[n]),
            error_um=link.error_um, residual_um=float(solution.residuals_um[n]), evidence=float(evidence[n]),
            rejected=reasons[n],
        )
        for n, link in enumerate(links)
    ]  # fmt: skip
    result = replace(result, pairs=tuple(sorted(results, key=lambda p: (p.fixed_id, p.moving_id))))
    return _log_and_write(_with_warnings(result, shifts), output, step.overwrite)


def _log_and_write(result: SliceTransforms, output: str | Path | None, overwrite: bool) -> SliceTransforms:
    """Log the result, write it if there is an output, and return it."""
    for pair in result.pairs:
        log.info(
            "slices %d and %d: evidence %.3f, correlation %.3f, error %.2f µm, %.2f µm from the solution%s",
            pair.fixed_id, pair.moving_id, pair.evidence, pair.correlation, pair.error_um, pair.residual_um,
            f", rejected: {pair.rejected}" if pair.rejected else "",
        )  # fmt: skip
    for warning in result.warnings:
        log.warning(warning)
    if output is not None:
        result.write(output, overwrite=overwrite)
    return result


def _motor_shifts(numbers: Sequence[int], shifts: str | Path | None) -> tuple[np.ndarray, list[bool]]:
    """Return the motor's shift of each slice to the first one in µm along Y and X, and whether the table trusts it."""
    if shifts is None:
        return np.zeros((len(numbers), 2)), [True] * len(numbers)
    steps = motor_shifts(shifts, numbers)
    for warning in unreliable_warnings(shifts, steps):
        log.warning(warning)
    moves = np.cumsum([[0.0, 0.0], *([step.y_mm * 1e3, step.x_mm * 1e3] for step in steps)], axis=0)
    return moves, [True, *(step.reliable for step in steps)]


def _depth(image: MosaicImage, surface: CutSurface, alignment: Alignment) -> int:
    """Return the number of planes of a slice that are used, counted from its cut surface."""
    planes, height, width = image.array.shape
    lowest = max(surface.at(y, x) for y in (0, height - 1) for x in (0, width - 1))
    depth = math.floor(planes - max(0.0, lowest))
    if alignment.depth_mm is not None:
        depth = min(depth, math.floor(alignment.depth_mm * 1e3 / image.spacing[0] + 1e-6))
    if depth < 1:
        raise SourceError(f"{image.name}: no plane is left below its cut surface, at {surface.first:.1f} planes")
    return depth


def _canvas(
    images: Sequence[MosaicImage], moves: np.ndarray, pairs: int
) -> tuple[list[tuple[int, int]], tuple[int, int], int]:
    """Plan images that hold all faces, at a resolution at which the faces fit :data:`FACE_BYTES`.

    Returns: (1) First pixel of each slice in the images. (2) Pixels of the images. (3) Voxels of a slice along each
    side of a pixel.
    """
    spacing = np.array(images[0].spacing[1:])
    shapes = np.array([image.array.shape[1:] for image in images])
    corners = moves / spacing
    size = (corners + shapes).max(axis=0) - corners.min(axis=0)
    factor = max(1, math.ceil(math.sqrt(2 * pairs * float(size.prod()) * 4 / FACE_BYTES)))
    factor = min(factor, max(1, int(shapes.min()) // 16))
    pixels = np.rint((corners - corners.min(axis=0)) / factor).astype(int)
    height, width = (pixels + shapes // factor).max(axis=0)
    return [(int(y), int(x)) for y, x in pixels], (int(height), int(width)), factor


def _links(
    pairs: Sequence[tuple[int, int]], registered: PairTransforms, offsets: Sequence[tuple[int, int]],
    pixel: Sequence[float], factor: int, gaps: Sequence[float],
) -> list[PairLink]:  # fmt: skip
    """Return the pairs as links between slices, in µm from their first voxels."""
    out = []
    for n, (fixed, moving) in enumerate(pairs):
        # From µm after the centre of a slice's first voxel to µm after the centre of the images' first pixel.
        to_image = []
        for number in (fixed, moving):
            matrix = np.eye(3)
            matrix[:2, 2] = (np.array(offsets[number]) - (factor - 1) / 2 / factor) * pixel
            to_image.append(matrix)
        error = math.hypot(float(registered.errors_um[n]), _DRIFT * gaps[n])
        link = np.linalg.inv(to_image[1]) @ registered.matrices[n] @ to_image[0]
        out.append(PairLink(fixed, moving, link, error, float(registered.evidence[n])))
    return out


def _solve(
    numbers: Sequence[int], images: Sequence[MosaicImage], links: Sequence[PairLink], moves: np.ndarray,
    registered: PairTransforms, pixel: Sequence[float], alignment: Alignment, *, has_table: bool,
) -> tuple[np.ndarray, list[str], ChainSolution]:  # fmt: skip
    """Solve for the transforms of the slices, with unknown slices in place of missing numbers.

    Returns: (1) Probability that each link is right. (2) Why a link is rejected; empty if it is not. (3) Of the slices.
    """
    position = [number - numbers[0] for number in numbers]
    prior = np.tile(np.eye(3), (position[-1], 1, 1))
    for n, (above, below) in enumerate(itertools.pairwise(position)):
        prior[above:below, :2, 2] = -(moves[n + 1] - moves[n]) / (below - above)
    moved = [replace(link, fixed=position[link.fixed], moving=position[link.moving]) for link in links]
    extent = np.max([np.multiply(image.array.shape[1:], image.spacing[1:]) for image in images], axis=0)
    search_um, tolerance = alignment.max_shift * float(np.hypot(*extent)), 2 * max(pixel)
    evidence, prior_error = agreement(
        moved, prior, extent.tolist(), range_um=search_um, tolerance_um=tolerance,
        assumed_error_um=_MOTOR_UM if has_table else max(_MOTOR_UM, _UNMOVED * search_um),
    )  # fmt: skip
    used, reasons = [], []
    for n, link in enumerate(moved):
        largest_error = _LARGEST_ERROR * prior_error * math.sqrt(link.moving - link.fixed)
        reasons.append(_reason(n, link, float(evidence[n]), largest_error, registered, alignment))
        used.append(replace(link, evidence=float(evidence[n]), error_um=math.inf if reasons[n] else link.error_um))
    solution = solve_chain(
        position[-1] + 1, used, extent.tolist(), rigid=alignment.model != "affine", prior=prior,
        prior_error_um=prior_error, reference=position[(len(position) - 1) // 2],
        max_deviation=alignment.max_deviation, tolerance_um=tolerance,
    )  # fmt: skip
    reasons = [
        reason or (_CONTRADICTS if is_rejected else "")
        for reason, is_rejected in zip(reasons, solution.rejected, strict=True)
    ]
    placed_by = tuple(solution.placed_by[n] for n in position)
    return evidence, reasons, replace(solution, matrices=solution.matrices[position], placed_by=placed_by)


def _reason(
    n: int, link: PairLink, evidence: float, largest_error: float, registered: PairTransforms, alignment: Alignment
) -> str:
    """Return why a pair is rejected before the solution; empty if it is not."""
    if not math.isfinite(link.error_um):
        return "too little tissue in common"
    if evidence >= alignment.min_evidence:
        return "too different, or too far apart, to say more than the motor" if link.error_um > largest_error else ""
    if link.evidence >= alignment.min_evidence:
        return _CONTRADICTS
    if registered.is_at_edge[n]:
        return "no peak stands out: the greatest one lies at the end of the search range"
    return "no peak stands out"


def _transforms(
    paths: dict[int, Path], slices: dict[int, MosaicImage], surfaces: Sequence[CutSurface], depths: Sequence[int],
    solution: ChainSolution, alignment: Alignment, reliable: Sequence[bool],
) -> SliceTransforms:  # fmt: skip
    """Return the transforms of the slices, levelled and placed along Z, without the results of pairs."""
    first, interval = next(iter(slices)), alignment.interval_mm * 1e3
    transforms = []
    for n, (number, image) in enumerate(slices.items()):
        top = (number - first) * interval
        matrix = _in_space(image, surfaces[n], solution.matrices[n], top)
        rim = image.spacing[0] * _RIM if surfaces[n] != CutSurface() and depths[n] > _RIM else 0.0
        depth = depths[n] * image.spacing[0] - rim
        transforms.append(
            SliceTransform(
                number=number, name=paths[number].name, matrix=matrix, top_um=top + rim, depth_um=depth,
                placed_by=solution.placed_by[n], reliable_shift=reliable[n],
            )
        )  # fmt: skip
    return SliceTransforms(interval, tuple(transforms))


def _in_space(image: MosaicImage, surface: CutSurface, lateral: np.ndarray, top: float) -> Matrix:
    """Return the transform from the coordinates of a slice to the stack, which levels the cut surface of the slice."""
    spacing = np.array(image.spacing)
    matrix = np.eye(4)
    # z is counted from the cut surface; its slopes are in voxels.
    matrix[0, 1:3] = -np.array(surface.slopes) * spacing[0] / spacing[1:]
    matrix[0, 3] = top - surface.first * spacing[0]
    matrix[1:3, 1:3], matrix[1:3, 3] = lateral[:2, :2], lateral[:2, 2]
    from_origin = np.eye(4)
    from_origin[:3, 3] = -np.array(image.origin)
    return _rows(matrix @ from_origin)


def _rows(matrix: np.ndarray) -> Matrix:
    return tuple(map(tuple, matrix.tolist()))


def _with_warnings(result: SliceTransforms, shifts: str | Path | None) -> SliceTransforms:
    """Return the result with warnings of what the pairs do not tell."""
    said = "the motor's shifts" if shifts is not None else "no shift, because there is no table of the motor's shifts"
    used = [pair for pair in result.pairs if not pair.rejected]
    if not used:
        reason = f"no pair of slices could be registered, so that all slices are placed by {said}"
        return replace(result, warnings=(f"{reason[0].upper()}{reason[1:]}.",), left_out=reason)
    warnings = []
    for kind, where in (("neighbours", f"between their neighbours and by {said}"), ("motor", f"by {said}")):
        alone = [str(part.number) for part in result.slices if part.placed_by == kind]
        if alone:
            warnings.append(f"No pair places slice {', '.join(alone)}: placed {where}.")
    for above, below in itertools.pairwise(part.number for part in result.slices if part.placed_by == "pairs"):
        if not any(p.fixed_id <= above and below <= p.moving_id for p in used):
            warnings.append(f"No pair connects slice {above} with {below}: they are placed by {said}.")
    return replace(result, warnings=tuple(warnings))
