"""Capsules: all points within a radius of a line segment, such as the volume swept by an electrode or a needle.

In: end points and radii in µm. Out: a table of capsules that every backend reads; masks without the capsules' voxels.
Errors: ``ValueError`` that names the parameter. :func:`inside` defines which points a capsule contains. Host and device
execute the same float64 operations in the same order, without fused multiply-add, so both give the same result for
every voxel, also for a centre exactly on the surface, which counts as inside.
"""

from __future__ import annotations

import numpy as np

from linumpy.device import to_host
from linumpy.voxel.grid import Numbers, VoxelGrid

#: Number of columns of the table: start (x, y, z), direction (x, y, z), squared length, radius, squared radius.
COLUMNS = 9

#: Voxels whose distances are computed at a time.
_BATCH = 2**21


def capsule_table(p0: Numbers, p1: Numbers, radius: Numbers) -> np.ndarray:
    """Check capsules and put them into a table; parameters as for :meth:`.Backend.subtract_swept_capsule`.

    Returns: See :data:`COLUMNS`.
    """
    start, end = np.atleast_2d(_numbers(p0, "p0")), np.atleast_2d(_numbers(p1, "p1"))
    for name, points in (("p0", start), ("p1", end)):
        if points.ndim != 2 or points.shape[1] != 3:
            raise ValueError(f"{name} of shape {np.shape(p0 if name == 'p0' else p1)}: (3,) or (n, 3) is needed")
        if not np.isfinite(points).all():
            row = int(np.flatnonzero(~np.isfinite(points).all(axis=1))[0])
            raise ValueError(f"{name}: point {row} is {points[row]}, which is not finite")
    if start.shape != end.shape:
        raise ValueError(f"p0 has {len(start)} points and p1 {len(end)}: every capsule has two ends")
    radii = _numbers(radius, "radius")
    if radii.shape not in ((), (len(start),)):
        raise ValueError(f"radius of shape {radii.shape}: one number, or one for each of {len(start)} capsules")
    if not (np.isfinite(radii) & (radii >= 0)).all():
        raise ValueError(f"radius={radius!r}: numbers of µm >= 0 are needed")
    table = np.empty((len(start), COLUMNS))
    with np.errstate(over="ignore"):  # the check below raises
        along = end - start
        table[:, :3], table[:, 3:6] = start, along
        table[:, 6] = (along[:, 0] * along[:, 0] + along[:, 1] * along[:, 1]) + along[:, 2] * along[:, 2]
        table[:, 7] = radii
        table[:, 8] = table[:, 7] * table[:, 7]
    if not np.isfinite(table).all():
        row = int(np.flatnonzero(~np.isfinite(table).all(axis=1))[0])
        raise ValueError(f"capsule {row} from {start[row]} to {end[row]} µm is too long for float64")
    return table


def polyline_table(points: Numbers, radius: Numbers) -> np.ndarray:
    """Return the :func:`capsule_table` of a polyline, (n, 3) µm, with one radius in µm, or one for each segment."""
    line = _numbers(points, "points")
    if line.ndim != 2 or line.shape[1] != 3 or len(line) < 2:
        raise ValueError(f"points of shape {line.shape}: a polyline has at least two points, (n, 3)")
    return capsule_table(line[:-1], line[1:], radius)


def _numbers(value: Numbers, name: str) -> np.ndarray:
    """Check real numbers and return them as float64 on the host, copied from a device if necessary: a few bytes."""
    numbers = to_host(value)
    if numbers.dtype.kind not in "iuf":
        raise ValueError(f"{name}={value!r}: real numbers in µm are needed")
    return numbers.astype(np.float64)


def inside(capsule: np.ndarray, x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return which points (x, y, z arrays that broadcast, µm) lie in `capsule`, a row of :func:`capsule_table`."""
    px, py, pz, dx, dy, dz, length2, _, radius2 = map(float, capsule)
    vx, vy, vz = x - px, y - py, z - pz
    along = (vx * dx + vy * dy) + vz * dz
    # `length2` may be 0 by underflow while the direction is not: such a capsule is a ball
    t = np.minimum(np.maximum(along / length2, 0.0), 1.0) if length2 > 0 else np.zeros_like(along)
    ex, ey, ez = vx - t * dx, vy - t * dy, vz - t * dz
    return (ex * ex + ey * ey) + ez * ez <= radius2


def subtract(mask: np.ndarray, table: np.ndarray, grid: VoxelGrid) -> int:
    """Set the voxels in any capsule to False, in place, in a host array; return how many of them were true."""
    removed = 0
    for capsule in table:
        box = _box(capsule, grid)
        if box is None:
            continue
        (z0, z1), y, x = box[0], box[1], box[2]
        step = max(1, _BATCH // ((y[1] - y[0]) * (x[1] - x[0])))
        for first in range(z0, z1, step):
            last = min(first + step, z1)
            region = (slice(first, last), slice(*y), slice(*x))
            is_hit = inside(
                capsule, grid.centres(0, *x), grid.centres(1, *y)[:, None], grid.centres(2, first, last)[:, None, None]
            )
            is_hit &= mask[region]
            removed += int(np.count_nonzero(is_hit))
            mask[region] &= ~is_hit
    return removed


def _box(capsule: np.ndarray, grid: VoxelGrid) -> list[tuple[int, int]] | None:
    """Return (first, last + 1) of the voxels along z, y and x that a capsule may contain; None if it contains none.

    A margin allows for rounding.
    """
    start, end, radius = capsule[:3], capsule[:3] + capsule[3:6], capsule[7]
    slack = 1e-9 * (grid.reach + np.abs(start).max() + np.abs(end).max() + radius)
    box = []
    for axis in (2, 1, 0):
        low = min(start[axis], end[axis]) - radius - slack
        high = max(start[axis], end[axis]) + radius + slack
        offset, n = (grid.z_offset if axis == 2 else 0), grid.shape[2 - axis]
        first, last = ((edge - grid.origin[axis]) / grid.pitch[axis] - 0.5 - offset for edge in (low, high))
        bounds = (int(np.clip(np.floor(first), 0, n)), int(np.clip(np.floor(last) + 2, 0, n)))
        if bounds[0] >= bounds[1]:
            return None
        box.append(bounds)
    return box
