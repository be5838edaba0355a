"""Values of a volume in host memory, by NumPy, in as many threads as the process may use.

In: voxels (C, Z, Y, X) of any real dtype and byte order, in memory or mapped from a file; points (n, 3) with x, y, z in
the unit cube. Out: values (C, n) and derivatives (C, 3, n) at the points, by the nearest voxel, linearly, or by a cubic
B-spline.

The cell of a point along an axis is the last voxel whose centre is at or before the point; the fraction is the distance
from the cell's centre to the point, in voxels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from linumpy.arrays import Array
from linumpy.sampling.coordinates.boxes import BOX_VOXELS
from linumpy.sampling.threads import in_threads
from linumpy.sampling.voxel_field import VoxelField, normalised

#: Cells and fractions of points along one axis.
Position = tuple[np.ndarray, np.ndarray]


def along(u: np.ndarray, size: int) -> Position:
    """Return the cells (intp) and fractions (float32) of coordinates `u` along an axis of `size` voxels.

    Points beyond the outermost centres are moved to these; the fraction of a point that is not finite is NaN. The last
    voxel is never a cell, so that each cell has a next voxel, unless the axis has only one.
    """
    position = u * np.float64(size)
    position -= 0.5
    np.clip(position, 0, size - 1, out=position)
    if not np.isfinite(u).all():
        cell = np.clip(np.nan_to_num(np.floor(position)), 0, max(0, size - 2))
        return cell.astype(np.intp), np.where(np.isfinite(u), position - cell, np.nan).astype(np.float32)
    cell = position.astype(np.intp)
    np.minimum(cell, max(0, size - 2), out=cell)
    position -= cell
    return cell, position.astype(np.float32)


class HostVolume(VoxelField):
    """A volume in host memory.

    `voxels`, (C, Z, Y, X), may have any real dtype. They are not copied for spline orders 0 and 1; a cubic spline keeps
    float32 coefficients instead. `check` is called before each evaluation, and raises if the voxels cannot be read.
    """

    def __init__(
        self,
        voxels: np.ndarray,
        *,
        spline_order: int = 1,
        low_high: tuple[float, float] | None = None,
        value_range: tuple[float, float] | None = None,
        labels: bool = False,
        check: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(voxels, spline_order, low_high, value_range, labels, BOX_VOXELS)
        self._check = check
        self._voxels = voxels if spline_order < 3 else self._coefficients(voxels)
        self._flat = self._voxels.reshape(self.n_channels, -1)

    def _evaluate(self, coords: Array, out: Array, gradient: Array | None) -> None:
        if self._check is not None:
            self._check()

        def part(begin: int, end: int) -> None:
            self._part(coords[begin:end], out[:, begin:end], None if gradient is None else gradient[..., begin:end])

        in_threads(part, len(coords))

    def _part(self, coords: np.ndarray, out: np.ndarray, gradient: np.ndarray | None) -> None:
        if self._order == 0:
            self._nearest(coords, out)
            return
        positions = [along(coords[:, 2 - axis], size) for axis, size in enumerate(self.dims)]
        for channel in range(self.n_channels):
            if self._order == 1:
                take = functools.partial(self._corner, channel)
                value, slopes = linear(take, positions, self.dims, gradient is not None)
            else:
                value, slopes = self._cubic(channel, positions, gradient is not None)
            out[channel] = value
            if gradient is not None:
                for axis, (slope, size) in enumerate(zip(slopes, self.dims, strict=True)):
                    u = coords[:, 2 - axis]
                    position = u * np.float64(size) - 0.5
                    # From slopes per voxel to slopes per unit of the cube: 0 beyond the outermost centres, and
                    # ``u - u`` is NaN for a point that is not finite.
                    per_unit = np.where((position > 0) & (position < size - 1), np.float32(size), u - u)
                    gradient[channel, 2 - axis] = slope * per_unit

    def _take(self, channel: int, index: np.ndarray, offset: int = 0) -> np.ndarray:
        flat = self._flat[channel, offset:]
        # numpy.take copies a whole array that is not aligned, as voxels in a file may be.
        return flat.take(index) if flat.flags.aligned else flat[index]

    def _nearest(self, coords: np.ndarray, out: np.ndarray) -> None:
        index = np.zeros(len(coords), np.int64)
        for axis, size in enumerate(self.dims):
            position = np.floor(np.nan_to_num(coords[:, 2 - axis].astype(np.float64) * size))
            index = index * size + np.clip(position, 0, size - 1).astype(np.int64)
        for channel in range(self.n_channels):
            values = self._take(channel, index)
            if self._labels:
                out[channel] = values
            else:
                nan_where_not_finite = (coords - coords).sum(1)  # and 0 elsewhere
                out[channel] = normalised(values, self._low_high) + nan_where_not_finite

    def _corner(self, channel: int, index: np.ndarray, offset: int) -> np.ndarray:
        values = self._take(channel, index, offset)
        return values if values.dtype == np.float32 and self._low_high is None else normalised(values, self._low_high)

    def _coefficients(self, voxels: np.ndarray) -> np.ndarray:
        from scipy import ndimage

        coefficients = np.empty(voxels.shape, np.float32)
        for channel, out in zip(voxels, coefficients, strict=True):
            out[...] = ndimage.spline_filter(normalised(channel, self._low_high), order=3, mode="mirror")
        return coefficients

    def _cubic(self, channel: int, positions: list[Position], has_slopes: bool) -> tuple[np.ndarray, list[np.ndarray]]:
        taps = [_taps(cell, f.astype(np.float64), size) for (cell, f), size in zip(positions, self.dims, strict=True)]
        value, slopes = np.zeros(len(positions[0][0])), [np.zeros(len(positions[0][0])) for _ in range(3)]
        for z, wz, sz in taps[0]:
            for y, wy, sy in taps[1]:
                for x, wx, sx in taps[2]:
                    v = self._take(channel, (z * self.dims[1] + y) * self.dims[2] + x)
                    value += wz * wy * wx * v
                    if has_slopes:
                        slopes[0] += sz * wy * wx * v
                        slopes[1] += wz * sy * wx * v
                        slopes[2] += wz * wy * sx * v
        return value, slopes


def linear(
    take: Callable[[np.ndarray, int], np.ndarray],
    positions: list[Position],
    dims: tuple[int, int, int],
    has_slopes: bool = False,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Interpolate between eight voxels.

    ``take(index, offset)`` returns the voxels ``index + offset`` of a box of `dims` voxels, as float32. `positions` has
    the cells, counted from the first voxel of the box, and the fractions along each axis (z, y, x), see :func:`along`.
    Return the values, and with `has_slopes` the derivatives along z, y and x per voxel, else an empty list.
    """
    (z, fz), (y, fy), (x, fx) = positions
    index = (z * dims[1] + y) * dims[2] + x
    below, right = dims[2] * (dims[1] > 1), int(dims[2] > 1)
    behind = dims[1] * dims[2] * (dims[0] > 1)
    corners = [[[take(index, k + j + i) for i in (0, right)] for j in (0, below)] for k in (0, behind)]
    rows = [[_mix(a, b, fx) for a, b in plane] for plane in corners]
    planes = [_mix(a, b, fy) for a, b in rows]
    value = _mix(planes[0], planes[1], fz)
    if not has_slopes:
        return value, []
    along_x = [_mix(a[1] - a[0], b[1] - b[0], fy) for a, b in corners]
    along_y = [b - a for a, b in rows]
    along_z = planes[1] - planes[0]
    return value, [along_z, _mix(along_y[0], along_y[1], fz), _mix(along_x[0], along_x[1], fz)]


def _mix(a: np.ndarray, b: np.ndarray, f: np.ndarray) -> np.ndarray:
    """Return ``a + f * (b - a)``."""
    mixed = b - a
    mixed *= f
    mixed += a
    return mixed


def _taps(cell: np.ndarray, t: np.ndarray, size: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return four (voxels, weights, derivatives of weights) of a cubic B-spline; voxels are mirrored at the ends."""
    s = 1 - t
    weights = (s**3 / 6, (4 - 6 * t**2 + 3 * t**3) / 6, (4 - 6 * s**2 + 3 * s**3) / 6, t**3 / 6)
    slopes = (-(s**2) / 2, (3 * t**2 - 4 * t) / 2, (4 * s - 3 * s**2) / 2, t**2 / 2)
    period = max(1, 2 * size - 2)
    mirrored = (np.abs(cell + k) % period for k in range(-1, 3))
    return [
        (np.minimum(voxel, period - voxel) if size > 1 else voxel * 0, weight, slope)
        for voxel, weight, slope in zip(mirrored, weights, slopes, strict=True)
    ]
