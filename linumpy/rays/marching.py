"""Points along rays, and the samples among them, in NumPy: the counterpart of march.cuh.

In: rays in the world's units, a :class:`~linumpy.rays.setting.Setting`, an occupancy grid. Out: samples, in the order
of the rays. The points of a ray are spaced by steps; the samples are the points in occupied voxels. NumPy tests all
points inside the box; the kernel skips empty space, and finds the same samples. Float32 operations have the order of
the kernel's, so that results are equal bit for bit. :mod:`~linumpy.rays.setting` defines the grid's coordinates and t.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from linumpy.rays.arithmetic import exp2, log2
from linumpy.rays.setting import GRID_SIZE, MOST_POINTS, SPREAD, Setting

#: Maximum number of points that are processed together; their arrays fit a processor's cache.
_BLOCK_POINTS = 2**16


@dataclass(frozen=True)
class GridRays:
    """Rays in the grid's coordinates.

    Attributes
    ----------
    origin, direction : (n, 3) float32
        In the grid's coordinates, directions per unit of t.
    start : (n,) float32
        t of the first point; with growing steps, the number of steps from t = 0 to the first point.
    end : (n,) int64
        Number of points inside the box; 0 for an invalid ray.
    """

    origin: np.ndarray
    direction: np.ndarray
    start: np.ndarray
    end: np.ndarray


@dataclass(frozen=True)
class SampleIndices:
    """The samples of rays.

    Attributes
    ----------
    ray, point : (m,) int64
        Index of each sample's ray, and of the sample among the points of the ray; in order.
    count : (n,) int64
        Number of samples of each ray.
    """

    ray: np.ndarray
    point: np.ndarray
    count: np.ndarray


def step_at(setting: Setting, t: np.ndarray) -> np.ndarray:
    """Return the length of the step at t, in the world's units."""
    s = setting.steps
    if not setting.grows:
        return np.full_like(t, s["min_step"])
    return np.fmin(np.fmax(t * s["cone"], s["min_step"]), s["max_step"])


def point_at(setting: Setting, start: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return t of point k. The next point is one :func:`step_at` away, except where steps begin or cease to grow."""
    s, k = setting.steps, k.astype(np.float32)
    if not setting.grows:
        return start + k * s["min_step"]
    at = start + k
    growing = s["t_grows"] * exp2(np.clip((at - s["s_grows"]) * s["log_growth"], 0, 126).astype(np.float32))
    full = s["t_full"] + (at - s["s_full"]) * s["max_step"]
    return np.where(at < s["s_grows"], at * s["min_step"], np.where(at < s["s_full"], growing, full))


def _steps_until(setting: Setting, t: np.ndarray) -> np.ndarray:
    """Return the number of growing steps from t = 0 to t; the inverse of :func:`point_at`."""
    s = setting.steps
    growing = s["s_grows"] + log2(np.fmax(t / s["t_grows"], np.float32(1))) * s["inverse_log_growth"]
    full = s["s_full"] + (t - s["t_full"]) / s["max_step"]
    return np.where(t < s["t_grows"], t / s["min_step"], np.where(t < s["t_full"], growing, full))


def normalized(d: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return normalized directions (n, 3), the lengths before normalization, and which directions are valid.

    A direction is valid if its length is between 1e-30 and 1e30; an invalid direction is not changed.
    """
    with np.errstate(all="ignore"):
        length = np.sqrt(d[:, 0] * d[:, 0] + d[:, 1] * d[:, 1] + d[:, 2] * d[:, 2])
        valid = (length > np.float32(1e-30)) & (length < np.float32(1e30))
        return np.where(valid[:, None], d / length[:, None], d), length, valid


def to_grid(
    setting: Setting, origin: np.ndarray, direction: np.ndarray, jitter: np.ndarray, valid: np.ndarray
) -> GridRays:
    """Transform rays (n, 3) from the world to the grid, and clip them to the box; invalid rays have no points."""
    with np.errstate(all="ignore"):
        o = (origin - setting.centre) * setting.voxels_per_unit
        d = direction * setting.voxels_per_unit
        enter, leave = np.full(len(o), setting.near), np.full(len(o), np.float32(1e30))
        crosses = valid.copy()
        for axis in range(3):
            low, high = setting.box[0, axis], setting.box[1, axis]
            parallel = d[:, axis] == 0
            a, b = (low - o[:, axis]) / d[:, axis], (high - o[:, axis]) / d[:, axis]
            crosses &= ~parallel | ((o[:, axis] >= low) & (o[:, axis] <= high))
            enter = np.where(parallel, enter, np.fmax(enter, np.fmin(a, b)))
            leave = np.where(parallel, leave, np.fmin(leave, np.fmax(a, b)))
        crosses &= (enter < leave) & (leave < np.float32(1e30))
        enter, leave = np.where(crosses, enter, np.float32(0)), np.where(crosses, leave, np.float32(0))
        start, count = _start_and_count(setting, enter, leave, jitter)
    end = np.fmin(np.fmax(count, 0), MOST_POINTS).astype(np.int64)
    end = _exact_end(setting, start, leave, np.where(crosses, end, 0))
    return GridRays(o, d, start, np.where(crosses, end, 0))


def _start_and_count(
    setting: Setting, enter: np.ndarray, leave: np.ndarray, jitter: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the start of rays, as :class:`GridRays` defines it, and the rounded number of points until `leave`."""
    if setting.grows:
        start = _steps_until(setting, enter) + jitter
        return start, np.ceil(_steps_until(setting, leave) - start)
    start = enter + jitter * setting.steps["min_step"]
    return start, np.ceil((leave - start) / setting.steps["min_step"])


def _exact_end(setting: Setting, start: np.ndarray, leave: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Correct the rounding error of the number of points, by testing whether the last points lie before `leave`."""
    while True:
        too_many = (end > 0) & ~(point_at(setting, start, end - 1) < leave)
        if not too_many.any():
            break
        end = end - too_many
    while True:
        too_few = (end < MOST_POINTS) & (point_at(setting, start, end) < leave)
        if not too_few.any():
            return end
        end = end + too_few


def _ceil_log2(x: np.ndarray) -> np.ndarray:
    """Return the smallest integer m with x <= 2^m."""
    bits = x.view(np.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0)


def is_occupied(setting: Setting, bits: np.ndarray, position: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Return which points lie in occupied voxels.

    A point is looked up in the finest mip that contains it and whose voxels are at least as long as the step there.

    Parameters
    ----------
    bits : (mips, 262144) uint8
        Bits of the grid.
    position : (m, 3) float32
        Positions of points, in the grid's coordinates.
    t : (m,) float32
        Parameter t of each point.
    """
    mip = _mips_of(setting, len(bits), position, t)
    scale = ((127 - mip) << 23).view(np.float32)
    code = mip * np.int32(GRID_SIZE**3)  # index into the voxels of all mips, one mip after another
    for axis in range(3):
        voxel = np.floor(position[:, axis] * scale) + np.float32(64)
        code |= SPREAD[np.clip(voxel, 0, GRID_SIZE - 1).astype(np.int32)] << axis
    return bits.reshape(-1)[code >> 3] & (1 << (code & 7)).astype(np.uint8) != 0


def _mips_of(setting: Setting, mips: int, position: np.ndarray, t: np.ndarray) -> np.ndarray:
    if mips == 1:
        return np.zeros(len(t), np.int32)
    distance = np.abs(position)
    farthest = np.maximum(np.maximum(distance[:, 0], distance[:, 1]), distance[:, 2]) * np.float32(1 / 64)
    mip = np.maximum(_ceil_log2(step_at(setting, t) * setting.steps["mip_scale"]), _ceil_log2(farthest))
    return np.clip(mip, 0, mips - 1)


def positions_of(rays_in_grid: GridRays, ray: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Return the positions (m, 3) of points, given by ray and t, in the grid's coordinates."""
    position = np.empty((len(t), 3), np.float32)
    for axis in range(3):
        position[:, axis] = rays_in_grid.origin[:, axis][ray] + t * rays_in_grid.direction[:, axis][ray]
    return position


def find_samples(setting: Setting, bits: np.ndarray, rays_in_grid: GridRays) -> SampleIndices:
    """Find the samples of all rays: the first ``setting.max_steps`` points of each ray in occupied voxels."""
    rays, points, counts = [], [], np.zeros(len(rays_in_grid.end), np.int64)
    begin = 0
    while begin < len(rays_in_grid.end):
        total = np.cumsum(rays_in_grid.end[begin:])
        stop = begin + max(1, int(np.searchsorted(total, _BLOCK_POINTS, side="right")))
        ray = np.repeat(np.arange(begin, stop), rays_in_grid.end[begin:stop])
        point = np.arange(len(ray)) - np.repeat(
            total[: stop - begin] - rays_in_grid.end[begin:stop], rays_in_grid.end[begin:stop]
        )
        t = point_at(setting, rays_in_grid.start[ray], point)
        occupied = is_occupied(setting, bits, positions_of(rays_in_grid, ray, t), t)
        ray, point = ray[occupied], point[occupied]
        count = np.bincount(ray - begin, minlength=stop - begin)
        rank = np.arange(len(ray)) - np.repeat(np.cumsum(count) - count, count)
        kept = rank < setting.max_steps
        rays.append(ray[kept])
        points.append(point[kept])
        counts[begin:stop] = np.minimum(count, setting.max_steps)
        begin = stop
    empty = np.zeros(0, np.int64)
    return SampleIndices(np.concatenate([empty, *rays]), np.concatenate([empty, *points]), counts)
