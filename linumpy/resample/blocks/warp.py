"""Make a block of an image that is sampled through fields of vectors; image and fields may be larger than memory.

A block is cut into parts, each a box of the output. The map, a :data:`~linumpy.plan.grid.point_map.PointMap`, is
applied to the coordinates of a part's voxels step by step: a field is read only in the box that the coordinates reach,
and the source in the box between the smallest and the largest mapped coordinates. A part whose boxes are larger than
the limit is cut in halves. CuPy in, CuPy out; NumPy in, NumPy out.

Outside the grid of a field (more than half a step beyond the outermost vectors) displacements are 0, as in ITK, and
coordinates are unknown: such voxels are `cval`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, to_host
from linumpy.gpu.kernels import computed_in
from linumpy.gpu.ndimage.transform import map_coordinates
from linumpy.gpu.resize.resizing import apply_tables
from linumpy.plan.boundary import snap_to_edges
from linumpy.plan.grid.blocks import AffineGrid, Block, axis_box
from linumpy.plan.grid.point_map import Affine, Field, affine, compose
from linumpy.resample.blocks.block import fill, gaussians

Read = Callable[[tuple[slice, ...]], Array]
"""Reads a box of an array into the memory of the block, on the host or the device."""
ReadField = Callable[[Any, tuple[slice, ...]], Array]
"""The same for the array of a field."""

#: Bytes of a part for each of its voxels and axes: coordinates, indices in a field, and their temporary sums.
_AXIS_NBYTES = 48
#: Vectors around the reached box of a field that a cubic spline needs: vectors further away do not change the result.
_CUBIC_MARGIN = 24


class _TooLargeError(Exception):
    """A part needs a box that is larger than the limit."""


def make_warped(
    grid: AffineGrid, block: Block, cval: float, out: Array, read: Read, read_field: ReadField, limit: int
) -> Array:
    """Make a block of the output; its box of the source is not used.

    - `grid`: a grid with a `warp`; its matrix and offset are applied after the warp.
    - `read`, `read_field`: read a box of the source, and of the array of a field.
    - `limit`: maximum bytes of each of three: the coordinates of a part, a box of the source, a box of a field. A part
      of a single voxel may exceed the limit.
    """
    max_voxels = max(1, limit // (_AXIS_NBYTES * grid.rank))
    parts = [(block.start, block.stop)]
    while parts:
        start, stop = parts.pop()
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        halves = _halves(start, stop)
        if halves and math.prod(shape) > max_voxels:
            parts += halves
            continue
        inside = tuple(slice(a - c, b - c) for a, b, c in zip(start, stop, block.start, strict=True))
        try:
            # A single voxel cannot be cut, so it is made without a limit.
            _make_part(grid, (start, stop), cval, out[inside], read, read_field, limit if halves else None)
        except _TooLargeError:
            parts += halves
    return out


def _halves(start: tuple[int, ...], stop: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a box across its longest side; an empty list for one voxel."""
    sides = [b - a for a, b in zip(start, stop, strict=True)]
    axis = sides.index(max(sides))
    if sides[axis] == 1:
        return []
    middle = start[axis] + sides[axis] // 2
    return [
        (start, (*stop[:axis], middle, *stop[axis + 1 :])),
        ((*start[:axis], middle, *start[axis + 1 :]), stop),
    ]


def _make_part(
    grid: AffineGrid,
    part: tuple[tuple[int, ...], tuple[int, ...]],
    cval: float,
    out: Array,
    read: Read,
    read_field: ReadField,
    limit: int | None,
) -> None:
    """Make a part, a (start, stop) box of the output; raise an error if it needs a box of more than `limit` bytes."""
    points = _coordinates(grid, *part, array_module(out), read_field, limit)
    for axis, size in enumerate(grid.source_shape):
        snap_to_edges(points[axis], size)
    plain_grid = replace(grid, sigmas=(), warp=())
    boxes = []
    for axis, (low, high) in enumerate(_extrema(points)):
        box = axis_box(plain_grid, axis, low, high) if low <= high else None
        if box is None:  # no voxel of the part is within the source
            fill(out, cval)
            return
        boxes.append(box)
    inner = Block(0, *part, *map(tuple, zip(*boxes, strict=True)))
    reach = grid.reach
    outer = replace(
        inner,
        source_start=tuple(max(a - r, 0) for (a, _), r in zip(boxes, reach, strict=True)),
        source_stop=tuple(min(b + r, n) for (_, b), r, n in zip(boxes, reach, grid.source_shape, strict=True)),
    )
    float_dtype = computed_in(out.dtype) if grid.smooths else out.dtype
    if limit is not None and math.prod(outer.source_shape) * float_dtype.itemsize > limit:
        raise _TooLargeError
    source = read(outer.source_box)
    if grid.smooths:
        source = apply_tables(source, gaussians(grid, outer, inner), float_dtype, float_dtype)
    for axis, (first, _) in enumerate(boxes):
        points[axis] -= first
    sampled = map_coordinates(source, points, order=grid.order, mode=grid.mode, cval=cval, output=out.dtype)
    out[...] = sampled
    fill(out, cval, ~array_module(points).isfinite(points).all(axis=0))  # unknown coordinates, in every mode


def _coordinates(
    grid: AffineGrid,
    start: tuple[int, ...],
    stop: tuple[int, ...],
    xp: ModuleType,
    read_field: ReadField,
    limit: int | None,
) -> Array:
    """Map the voxels of a box of the output to coordinates in the source."""
    lines = [xp.arange(a, b, dtype=np.float64) for a, b in zip(start, stop, strict=True)]
    points = [line.reshape([-1 if a == axis else 1 for a in range(grid.rank)]) for axis, line in enumerate(lines)]
    shape = tuple(b - a for a, b in zip(start, stop, strict=True))
    for step in compose(grid.warp, (affine(grid.matrix, grid.shift),)):
        if isinstance(step, Affine):
            points = _apply_affine(step, points)
        else:
            points = _apply_field(step, [xp.broadcast_to(line, shape) for line in points], xp, read_field, limit)
    return xp.stack([xp.broadcast_to(line, shape) for line in points])


def _apply_affine(step: Affine, points: list[Array]) -> list[Array]:
    """Apply an affine map; coordinates that do not change along an axis keep the length 1 there."""
    results = []
    for *weights, shift in step.matrix:
        total: Any = points[0] * 0.0 + shift if not any(weights) else shift
        for weight, values in zip(weights, points, strict=True):
            if weight:
                total = total + values * weight
        results.append(total)
    return results


def _apply_field(
    step: Field, points: list[Array], xp: ModuleType, read_field: ReadField, limit: int | None
) -> list[Array]:
    """Displace points by the vectors of a field, or replace them by the coordinates in the field."""
    inputs = slice(step.first, step.first + step.inputs)
    columns = zip(points[inputs], step.scale, step.translation, strict=True)
    indices = xp.stack([(values - shift) / scale for values, scale, shift in columns])
    margin = _CUBIC_MARGIN if step.order > 1 else 1
    box = []
    for (low, high), size in zip(_extrema(indices), step.shape, strict=True):
        reaches_field = low <= high and high >= -0.5 and low <= size - 0.5
        first = min(max(math.floor(low) - margin, 0), size - 1) if reaches_field else 0
        box.append(slice(first, min(max(math.ceil(high) + margin, 0), size - 1) + 1 if reaches_field else 0))
    results = list(points[inputs]) if step.relative else []
    if any(side.stop <= side.start for side in box):
        vectors: Any = [0.0 if step.relative else xp.full(indices.shape[1:], np.nan)] * step.outputs
    else:
        region = list(box)
        region.insert(step.component_axis, slice(0, step.outputs))
        nbytes = step.outputs * math.prod(side.stop - side.start for side in box) * step.array.dtype.itemsize
        if limit is not None and nbytes > limit:
            raise _TooLargeError
        stored = xp.moveaxis(read_field(step.array, tuple(region)), step.component_axis, 0)
        outside = xp.zeros(indices.shape[1:], bool)
        for axis, (side, size) in enumerate(zip(box, step.shape, strict=True)):
            outside |= ~((indices[axis] >= -0.5) & (indices[axis] <= size - 0.5))  # NaN is outside, too
            indices[axis] -= side.start
        outside_value = 0.0 if step.relative else np.nan
        vectors = []
        for component in stored:
            values = map_coordinates(component, indices, order=step.order, mode="nearest", output=np.float64)
            vectors.append(xp.where(outside, outside_value, values))
    results = [a + b for a, b in zip(results, vectors, strict=True)] if step.relative else list(vectors)
    return [*points[: step.first], *results, *points[inputs.stop :]]


def _extrema(points: Array) -> list[tuple[float, float]]:
    """Return the smallest and the largest finite number of each row; (inf, -inf) for a row without finite numbers."""
    xp = array_module(points)
    flat = points.reshape((len(points), -1))
    low = xp.where(xp.isfinite(flat), flat, np.inf).min(axis=1)
    high = xp.where(xp.isfinite(flat), flat, -np.inf).max(axis=1)
    both = to_host(xp.stack([low, high], axis=1))
    return [(float(a), float(b)) for a, b in both]
