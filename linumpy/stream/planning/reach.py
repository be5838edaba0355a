"""Which voxels of their volumes staged crops may use: all crops of a batch → regions, and boxes of chunks. Pure.

A warped crop does not need all chunks of its region. A crop is divided into *cells*, and a region into *units*, which
are chunks or blocks of chunks. The coordinates of a cell's voxels lie between the coordinates of the eight corners of
the cell, widened by a bound on how far the elastic displacement bends within the cell. All units that a cell may need
are marked and read. The staged voxels of the other units are undefined, and no voxel of the crop depends on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from linumpy.stream.planning.records import CropRead, PartShape, Resampling, Vector, WarpedCrop, zyx

#: Rounding error of coordinates, in voxels: the device may compute them in another order.
_SLACK = 1e-6
#: Maximum number of cells along an axis of a crop, and minimum size of a cell in voxels. More cells take longer to plan
#: and save few chunks.
_CELLS, _CELL_VOXELS = 7, 4
#: Maximum number of units along an axis of a region. If the region has more chunks, a unit is a block of chunks.
_MAX_UNITS = 16
#: Maximum number of crops that are planned together, which bounds the memory of the arrays.
_MAX_CROPS = 32
#: A region is read as a whole where a larger fraction of its units is needed.
_MAX_FRACTION = 15 / 16
#: Start and shape of the empty box.
_EMPTY = (0, 0, 0)
#: Scale and origin of the elastic grid of a crop that has none.
_NO_GRID = (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)


def with_regions(planned: Sequence[CropRead | WarpedCrop], pad: str) -> list[CropRead]:
    """Plan the regions that staged crops read, and their resampling; reads of direct crops are unchanged."""
    reads = {number: crop for number, crop in enumerate(planned) if isinstance(crop, CropRead)}
    staged = [(number, crop) for number, crop in enumerate(planned) if isinstance(crop, WarpedCrop)]
    for order in {crop.order for _, crop in staged}:
        numbers, crops = zip(*((number, crop) for number, crop in staged if crop.order == order), strict=True)
        reads.update(zip(numbers, _with_regions(crops, order, pad), strict=True))
    return [reads[number] for number in range(len(planned))]


def _with_regions(crops: Sequence[WarpedCrop], order: int, pad: str) -> Iterator[CropRead]:
    """Yield the reads of staged crops of one order of interpolation."""
    aabbs = np.array([warped.crop.zyx for warped in crops], float)
    steps = np.array([warped.crop.zyx_step for warped in crops])
    first, sizes = aabbs[:, :, 0], aabbs[:, :, 1] - aabbs[:, :, 0]
    for number, warped in enumerate(crops):
        if warped.crop.exact_start is not None:
            first[number, -len(warped.crop.aabb) :] = warped.crop.exact_start[-3:]
    middles = (sizes - 1) / 2
    matrices = np.array([warped.warp.matrix for warped in crops]) * (steps[:, None, :] / steps[:, :, None])
    offsets = first + middles + np.array([warped.warp.translation for warped in crops]) / steps
    offsets -= (matrices * middles[:, None, :]).sum(axis=2)
    grids = [
        None if warped.warp.nodes is None else warped.warp.nodes / step[:, None, None, None]
        for warped, step in zip(crops, steps, strict=True)
    ]
    volumes = [zyx(warped.info.shape) for warped in crops]
    bounds = read_bounds(*reach(matrices, offsets, sizes, grids), np.array(volumes), order, pad)
    begin, end = (bound.astype(int).tolist() for bound in bounds)
    for n, warped in enumerate(crops):
        crop, space, warp = warped.crop, warped.info.space, warped.warp
        is_read = all(start < stop for start, stop in zip(begin[n], end[n], strict=True))
        start, stop = (tuple(begin[n]), tuple(end[n])) if is_read else (_EMPTY, _EMPTY)
        scale, origin = _NO_GRID
        if (grid := grids[n]) is not None:
            middle = tuple(middles[n].tolist())
            scale, origin = grid_map(warp.node_spacing, grid.shape[1:], middle, crop.zyx_step, space)
        sigma: Vector = 0.0, 0.0, 0.0
        if warp.intensity.blur:  # not along axes of one voxel, and axes that are not of space
            blurred = [axis >= 3 - space and size > 1 for axis, size in enumerate(sizes[n])]
            sigma = _vector(np.where(blurred, warp.intensity.blur / steps[n], 0.0))
        shape = tuple([b - a for a, b in zip(start, stop, strict=True)])
        region = (*crop.aabb[:-3], *zip(start, stop, strict=True))[-len(crop.aabb) :] if is_read else None
        resampling = Resampling(
            matrices[n], offsets[n], start, shape, volumes[n], grid, scale, origin, sigma, warp.intensity, order
        )  # fmt: skip
        yield CropRead(warped.row, warped.info, region, (), resampling)


@lru_cache(maxsize=64)
def grid_map(
    node_spacing: float, nodes: tuple[int, ...], middle: tuple[float, ...], steps: tuple[float, ...], space: int
) -> tuple[Vector, Vector]:
    """Return scale and origin of the map from voxels of the crop to the grid; the scale is 0 for axes not of space."""
    scale = np.array(steps) / node_spacing
    scale[: 3 - space] = 0.0
    origin = (np.array(nodes) - 1) / 2 - np.array(middle) * scale
    return _vector(scale), _vector(origin)


def _vector(values: np.ndarray) -> Vector:
    z, y, x = values.tolist()
    return z, y, x


def reach(
    matrices: np.ndarray, offsets: np.ndarray, sizes: np.ndarray, grids: Sequence[np.ndarray | None]
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the minimum and the maximum of the coordinates of each crop's voxels in the volume, each (crops, 3).

    A cubic B-spline lies between the minimum and the maximum of its control points. So the bounds also hold where
    displacements inside the crop exceed the displacements at the faces of the crop.
    """
    ends = matrices * (sizes - 1)[:, None, :]
    low = offsets + np.minimum(ends, 0).sum(axis=2)
    high = offsets + np.maximum(ends, 0).sum(axis=2)
    for number, grid in enumerate(grids):
        if grid is not None:
            of_axes = grid.reshape(3, -1)
            low[number] += of_axes.min(axis=1)
            high[number] += of_axes.max(axis=1)
    return low, high


def read_bounds(
    low: np.ndarray, high: np.ndarray, n: np.ndarray, order: int, pad: str
) -> tuple[np.ndarray, np.ndarray]:
    """Compute (start, stop) of the voxels that interpolation at coordinates from `low` to `high` uses, as whole floats.

    Neighbours of weight 0 are included, except beyond the last voxel of an axis of `n` voxels.
    """
    shift = 0.5 if order == 0 else 0.0
    first, last = np.floor(low + (shift - _SLACK)), np.floor(high + (shift + _SLACK)) + order
    top = n - 1
    if pad == "constant":
        return np.maximum(first, 0), np.minimum(last, top) + 1
    if pad == "edge":
        return np.minimum(np.maximum(first, 0), top), np.minimum(np.maximum(last, order), top) + 1
    outside = (first < 0) | (last > top)
    if outside.any():
        top = np.broadcast_to(top, outside.shape)[outside]
        first[outside], last[outside] = _reflected(first[outside], last[outside], top)
    return first, last + 1


def _reflected(first: np.ndarray, last: np.ndarray, top: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute the minimum and maximum of the voxels, in 0 to `top`, to which reflection maps `first` to `last`."""
    period = np.maximum(2 * top, 1)
    begin = np.mod(first, period)
    end = begin + (last - first)
    turned = [np.where(voxel <= top, voxel, period - voxel) for voxel in (begin, np.mod(end, period))]
    has_bottom = (begin == 0) | (end >= period)
    has_top = ((begin <= top) & (end >= top)) | (end >= period + top)
    return np.where(has_bottom, 0, np.minimum(*turned)), np.where(has_top, top, np.maximum(*turned))


def spline_matrix(voxels: np.ndarray, nodes: int, scale: float, origin: float) -> np.ndarray:
    """Compute the weights of the control points along an axis at voxels of the crop, (voxels, nodes).

    `voxels` may be coordinates between voxels. `scale` and `origin` map them to control points, as in
    :class:`Resampling`.
    """
    n = len(voxels)
    coordinates = voxels * scale + origin
    base = np.clip(np.floor(coordinates), 1, nodes - 3).astype(int)
    t = coordinates - base
    weights = np.stack([(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3]) / 6
    matrix = np.zeros((n, nodes))
    for k in range(4):
        matrix[np.arange(n), base - 1 + k] += weights[k]
    return matrix


def with_needed(reads: Sequence[CropRead], parts: Sequence[PartShape], pad: str) -> list[CropRead]:
    """Set :attr:`CropRead.needed` of the reads of a batch: one for each part, sample after sample."""
    groups: dict[tuple[int, tuple[int, ...] | None, Vector, Vector], list[int]] = {}
    for number, read in enumerate(reads):
        if read.region is not None and read.resampling is not None:
            resampling, part = read.resampling, number % len(parts)
            nodes = None if resampling.grid is None else resampling.grid.shape
            groups.setdefault((part, nodes, resampling.grid_scale, resampling.grid_origin), []).append(number)
    result = list(reads)
    for (part, *_), numbers in groups.items():
        axes = min(3, len(parts[part].shape))
        for begin in range(0, len(numbers), _MAX_CROPS):
            together = numbers[begin : begin + _MAX_CROPS]
            needed = needed_boxes([reads[number] for number in together], zyx(parts[part].shape), pad)
            for number, boxes in zip(together, needed, strict=True):
                if boxes is not None:
                    result[number] = replace(reads[number], needed=boxes[:, -axes:])
    return result


def needed_boxes(reads: Sequence[CropRead], shape: Sequence[int], pad: str) -> list[np.ndarray | None]:
    """Plan the boxes that each read needs along (Z, Y, X), int64 (boxes, 3, 2); None for the whole region.

    The reads are staged crops of one part, of one `shape`, whose elastic grids have the same shape, scale and origin.
    """
    resamplings = [read.resampling for read in reads if read.resampling is not None]
    start, size, volume = (
        np.array([getattr(resampling, name) for resampling in resamplings])
        for name in ("box_start", "box_shape", "volume")
    )
    stop = start + size
    chunk = np.array([zyx(read.info.chunk_shape) for read in reads])
    unit = chunk * -(-((stop - 1) // chunk - start // chunk + 1) // _MAX_UNITS)
    base = start // unit
    counts = (stop - 1) // unit - base + 1
    if (counts.prod(axis=1) == 1).all():
        return [None] * len(reads)
    # From here on the axis of cells comes first: NumPy is slow where the last axis is short.
    bounds = _cell_bounds(resamplings, shape)
    low, high = read_bounds(*bounds, volume.T, resamplings[0].order, pad)
    low, high = np.maximum(low, start.T), np.minimum(high, stop.T)
    # At half a voxel from the faces of units, rounding of the quotient cannot reach the next unit.
    begin = np.floor((low + 0.5) / unit.T) - base.T
    end = np.floor((high - 0.5) / unit.T) - base.T + 1
    has_voxels = None if pad != "constant" else (low < high).all(axis=1)
    return _boxes(_marked_units(begin, end, has_voxels, counts.max(axis=0)), counts, base, unit, start, stop)


def _cell_bounds(resamplings: Sequence[Resampling], shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Compute the minimum and the maximum of the coordinates in each cell, (cells, 3, crops).

    Between two points at distance h, a function deviates from the line through the points by at most h²/8 · max |f''|.
    The deviations along three axes add up. The second derivative of a cubic B-spline lies between the minimum and the
    maximum of the second differences of the control points.
    """
    ends = [_cell_ends(n) for n in shape]
    matrix, offset = (
        np.stack([getattr(resampling, name) for resampling in resamplings], axis=-1) for name in ("matrix", "offset")
    )
    z, y, x = (ends[axis][:, None, None] * matrix[:, axis] for axis in range(3))
    corners = (z + offset)[:, None, None] + (y[:, None] + x)
    bend = np.zeros(offset.shape)
    first = resamplings[0]
    if first.grid is not None:
        grid = np.array([resampling.grid for resampling in resamplings])  # (crops, 3, nodes along Z, Y, X)
        scale, origin, counts = first.grid_scale, first.grid_origin, first.grid.shape[1:]
        weights, of_planes = _spline_weights(tuple(shape), scale, origin, counts)
        nodes = np.ascontiguousarray(grid.transpose(2, 3, 4, 1, 0))
        moved = (weights @ nodes.reshape(len(nodes), -1)).reshape(len(weights), of_planes.shape[1], -1)
        corners += (of_planes @ moved).reshape(corners.shape)
        for axis in range(3):
            step = (ends[axis][1] - ends[axis][0]) * scale[axis]
            if step:
                second = np.abs(np.diff(nodes, 2, axis=axis)).reshape(-1, *bend.shape)
                bend += second.max(axis=0) * (step**2 / 8)
    low = high = corners
    for axis in range(3):
        lower = (slice(None),) * axis + (slice(0, -1),)
        upper = (slice(None),) * axis + (slice(1, None),)
        low, high = np.minimum(low[lower], low[upper]), np.maximum(high[lower], high[upper])
    return (low - bend).reshape(-1, *bend.shape), (high + bend).reshape(-1, *bend.shape)


@lru_cache(maxsize=64)
def _cell_ends(n: int) -> np.ndarray:
    """Return the coordinates at which the cells of an axis of `n` voxels begin and end."""
    return np.linspace(0, n - 1, min(_CELLS, max(1, (n - 1) // _CELL_VOXELS)) + 1)


@lru_cache(maxsize=64)
def _spline_weights(
    shape: tuple[int, ...], scale: Vector, origin: Vector, nodes: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of control points at the corners of cells: along Z, and of planes along Y and X."""
    z, y, x = (spline_matrix(_cell_ends(shape[axis]), nodes[axis], scale[axis], origin[axis]) for axis in range(3))
    return z, np.kron(y, x)


def _marked_units(begin: np.ndarray, end: np.ndarray, has_voxels: np.ndarray | None, counts: np.ndarray) -> np.ndarray:
    """Mark the units between `begin` and `end` of any cell, bool (crops, units along Z, Y, X).

    Each cell adds 1 to all its units: +1 or -1 at the eight corners of the cell, cumulated along all axes.
    `has_voxels` selects the cells that need voxels; None selects all cells.
    """
    shape = (begin.shape[-1], *(counts + 1).tolist())
    steps = shape[2] * shape[3], shape[3], 1
    crops = np.arange(shape[0]) * (shape[1] * steps[0])
    sides = [[(bound[:, axis] * step).astype(np.int64) for bound in (begin, end)] for axis, step in enumerate(steps)]
    signed: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    sides[0] = [offset + crops for offset in sides[0]]
    for corner in np.ndindex(2, 2, 2):
        z, y, x = (side[number] for side, number in zip(sides, corner, strict=True))
        offset = z + y + x
        signed[sum(corner) % 2].append(offset.ravel() if has_voxels is None else offset[has_voxels])
    plus, minus = (np.bincount(np.concatenate(corners), minlength=np.prod(shape)) for corners in signed)
    covered = (plus - minus).reshape(shape)
    for axis in (1, 2, 3):
        covered = covered.cumsum(axis=axis)
    return covered[:, :-1, :-1, :-1] > 0


def _boxes(
    marks: np.ndarray, counts: np.ndarray, base: np.ndarray, unit: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> list[np.ndarray | None]:
    """Cover the marked units by boxes of voxels; None for a crop of which nearly all units are marked, or none.

    A box is the range from the first to the last marked unit along X, for each (Z, Y), and extends along Z where
    neighbours have the same range.
    """
    length = marks.shape[3]
    ranges = np.where(
        marks.any(axis=3),
        marks.argmax(axis=3) * (length + 1) + length - marks[..., ::-1].argmax(axis=3),
        -1,
    ).swapaxes(1, 2)  # (crops, Y, Z)
    changes = np.ones((*ranges.shape[:2], ranges.shape[2] + 1), bool)
    changes[:, :, 1:-1] = ranges[:, :, 1:] != ranges[:, :, :-1]
    crop, y, z = np.nonzero(changes[:, :, :-1] & (ranges >= 0))
    z_end = np.nonzero(changes[:, :, 1:] & (ranges >= 0))[2] + 1
    x, x_end = np.divmod(ranges[crop, y, z], length + 1)
    lower, upper = np.stack([z, y, x], axis=1), np.stack([z_end, y + 1, x_end], axis=1)
    volumes = np.bincount(crop, (upper - lower).prod(axis=1), minlength=len(marks))
    ends = np.cumsum(np.bincount(crop, minlength=len(marks))).tolist()
    boxes = np.empty((len(crop), 3, 2), np.int64)
    np.maximum((lower + base[crop]) * unit[crop], start[crop], out=boxes[:, :, 0])
    np.minimum((upper + base[crop]) * unit[crop], stop[crop], out=boxes[:, :, 1])
    are_cut = ((volumes > 0) & (volumes <= counts.prod(axis=1) * _MAX_FRACTION)).tolist()
    return [
        boxes[first:last] if is_cut else None
        for first, last, is_cut in zip([0, *ends[:-1]], ends, are_cut, strict=True)
    ]
