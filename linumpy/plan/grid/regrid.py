"""Plan a new grid for a volume, from a wanted spacing or an affine matrix.

Spacing and origin are in µm, everything else in voxels. Errors: ``ValueError`` naming the value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from linumpy.plan.boundary import centred
from linumpy.plan.grid.point_map import PointMap

#: Largest rounding error of a map that is removed, in voxels of the source, over the whole output.
_REMOVED = 1e-9


@dataclass(frozen=True)
class Regrid:
    """A new grid for a volume: ``coordinates in the source = matrix @ voxel of the output + offset``, in voxels.

    - `origin`: centre of the output's first voxel, µm, in the coordinate system of the source.
    - `warp`: fields of vectors, applied to voxels of the output before matrix and offset.
    """

    shape: tuple[int, ...]
    matrix: tuple[tuple[float, ...], ...]
    offset: tuple[float, ...]
    spacing: tuple[float, ...]
    origin: tuple[float, ...]
    warp: PointMap = ()


def plan_regrid(
    transform_or_spacing: ArrayLike,
    shape: Sequence[int],
    spacing: Sequence[float],
    origin: Sequence[float],
    output_shape: Sequence[int] | None = None,
) -> Regrid:
    """Plan the grid of an output from the grid of the source; other parameters as for :func:`linumpy.resample_zarr`.

    The centre of voxel i lies at (i + 1/2) spacing from the edge where the volume begins. With a new spacing f times
    as wide, voxel i therefore lies at (i + 1/2) f - 1/2 in the source. Under a matrix, the new spacing is the length in
    µm of a step of one voxel along each axis of the output. Spacing and origin cannot describe rotated axes, but the
    origin is correct.
    """
    rank = len(shape)
    if output_shape is not None:
        sizes = tuple(output_shape) if np.iterable(output_shape) else ()
        if len(sizes) != rank or not all(isinstance(n, (int, np.integer)) and n > 0 for n in sizes):
            raise ValueError(f"output_shape={output_shape!r}: {rank} sizes >= 1 are needed")
        output_shape = tuple(map(int, sizes))
    try:
        values = np.asarray(transform_or_spacing, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"transform_or_spacing={transform_or_spacing!r}: a spacing in µm, one for each axis, or a matrix of "
            "numbers is needed"
        ) from error
    if values.ndim < 2:
        return _by_spacing(values, transform_or_spacing, tuple(shape), spacing, origin, output_shape)
    forms = ((rank, rank), (rank, rank + 1), (rank + 1, rank + 1))
    if values.shape not in forms:
        raise ValueError(
            f"a transform of shape {values.shape}: a volume of {rank} axes needs one of {', '.join(map(str, forms))}"
        )
    if values.shape == forms[2] and not np.array_equal(values[-1], [0.0] * rank + [1.0]):
        raise ValueError(f"the last row of the transform is {values[-1].tolist()}, but must be 0 … 0 1")
    matrix, offset = values[:rank, :rank], values[:rank, rank] if values.shape[1] > rank else np.zeros(rank)
    new_spacing = np.linalg.norm(np.diag(spacing) @ matrix, axis=0)
    new_origin = [o + s * shift for o, s, shift in zip(origin, spacing, offset.tolist(), strict=True)]
    return Regrid(
        shape=tuple(shape) if output_shape is None else output_shape,
        matrix=tuple(map(tuple, matrix.tolist())),
        offset=tuple(offset.tolist()),
        spacing=tuple(new_spacing.tolist()),
        origin=tuple(new_origin),
    )


def without_rounding(
    linear: np.ndarray, offset: np.ndarray, shape: Sequence[int]
) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]:
    """Make numbers of a computed map whole that are whole except for rounding: 1 for equal grids, 0 for other axes.

    Other numbers are not rounded: the error of a rounded slope would grow along the output.
    """
    limit = _REMOVED * np.minimum(1, np.abs(linear).max(axis=1, keepdims=True))
    whole = np.abs(linear - linear.round()) * np.array(shape) <= limit
    matrix = np.where(whole, linear.round(), linear)
    shift = np.where(np.abs(offset - offset.round()) <= _REMOVED, offset.round(), offset)
    return tuple(map(tuple, matrix.tolist())), tuple(shift.tolist())


def _by_spacing(
    values: np.ndarray,
    given: ArrayLike,
    shape: tuple[int, ...],
    spacing: Sequence[float],
    origin: Sequence[float],
    output_shape: tuple[int, ...] | None,
) -> Regrid:
    rank = len(shape)
    wanted = [float(values)] * rank if values.ndim == 0 else values.tolist()
    if len(wanted) != rank or not all(math.isfinite(width) and width > 0 for width in wanted):
        raise ValueError(f"wanted spacing {given!r}: a volume of {rank} axes needs a positive number of µm for each")
    if output_shape is None:
        sizes = [n * s / w for n, s, w in zip(shape, spacing, wanted, strict=True)]
        if not all(map(math.isfinite, sizes)):
            raise ValueError(f"wanted spacing {given!r} is too small: the number of voxels overflows")
        output_shape = tuple(max(1, round(size)) for size in sizes)
        pairs: list[tuple[float, float]] = list(zip(shape, output_shape, strict=True))
    else:
        pairs = list(zip(wanted, spacing, strict=True))
    factors, offset = map(list, zip(*(centred(a, b) for a, b in pairs), strict=True))
    return Regrid(
        shape=output_shape,
        matrix=tuple(tuple(map(float, row)) for row in np.diag(factors)),
        offset=tuple(offset),
        spacing=tuple(s * f for s, f in zip(spacing, factors, strict=True)),
        origin=tuple(o + s * shift for o, s, shift in zip(origin, spacing, offset, strict=True)),
    )
