"""Parameters of ray marching: the box, the steps and the limits, checked.

In: arguments of users, in the world's units. Out: a frozen :class:`Setting`, which the NumPy path and the kernels read.
Pure. In the *grid's coordinates*, the unit is a voxel of mip 0, and the origin is the centre of the grid. The parameter
*t* of a point is the distance from the ray's origin, in the world's units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from linumpy.checks import integer

#: Number of voxels of a mip along an axis.
GRID_SIZE = 128
#: Spreads the bits of a voxel's index three apart, as in a Morton code.
SPREAD = np.bitwise_or.reduce([(np.arange(GRID_SIZE, dtype=np.int32) >> bit & 1) << 3 * bit for bit in range(7)])
#: Maximum number of samples of a ray.
MOST_STEPS = 1024
#: Maximum number of points of a ray inside the box, in occupied and in empty voxels.
MOST_POINTS = 2**20
#: ``struct Steps`` of march.cuh.
STEPS = np.dtype([(name, "f4") for name in (
    "min_step", "max_step", "cone", "t_grows", "t_full", "s_grows", "s_full", "log_growth", "inverse_log_growth",
    "mip_scale",
)])  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Parameters of ray marching, as the kernels read them.

    - `box` ((2, 3) float32): lower and upper corner (x, y, z), in the grid's coordinates.
    - `per_box` ((3,) float32): 1 / the box's edges, in the grid's coordinates.
    - `centre` ((3,) float32): centre of the grid, in the world's units.
    - `voxels_per_unit` (numpy.float32): voxels of mip 0 per unit of length.
    - `near` (numpy.float32): minimum t of samples.
    - `dt_scale` (numpy.float32): 1 / the box's longest edge, in the world's units.
    - `max_steps`: maximum number of samples of a ray.
    - `grows`: whether steps grow with distance.
    - `steps`: the steps, in the world's units.
    """

    box: np.ndarray
    per_box: np.ndarray
    centre: np.ndarray
    voxels_per_unit: np.float32
    near: np.float32
    dt_scale: np.float32
    max_steps: int
    grows: bool
    steps: np.void


def make_setting(
    centre: tuple[float, float, float],
    edge: float,
    mips: int,
    aabb: ArrayLike | None,
    cone_angle: float,
    min_step: float | None,
    max_step: float | None,
    max_steps: int,
    near: float,
) -> Setting:
    """Check parameters of :func:`linumpy.rays.generate_training_samples`, and convert them for a grid.

    Raises `ValueError`: a parameter is out of its range, the box reaches beyond the grid, or the box's diagonal has too
    many steps.
    """
    low, high = _box(aabb, np.asarray(centre, np.float64), edge, mips)
    shortest = math.sqrt(3) / MOST_STEPS * edge if min_step is None else float(min_step)
    longest = shortest * 2.0 ** (mips - 1) if max_step is None else float(max_step)
    if not 0 < shortest <= longest < math.inf:
        raise ValueError(f"min_step={shortest:g}, max_step={longest:g}: 0 < min_step <= max_step is needed")
    if cone_angle != 0 and not 2**-14 <= cone_angle <= 1:
        raise ValueError(f"cone_angle={cone_angle}: 0 for equal steps, else between {2**-14} and 1")
    max_steps = integer("max_steps", max_steps, 1, MOST_STEPS)
    if not 0 <= near < math.inf:
        raise ValueError(f"near={near}: a finite number >= 0 is needed")
    points = float(np.linalg.norm(high - low)) / shortest
    if points > MOST_POINTS / 2:
        raise ValueError(
            f"min_step={shortest:g}: the box is {points:.3g} steps across, more than the limit of {MOST_POINTS // 2}"
        )
    scale = GRID_SIZE / edge
    return Setting(
        box=((np.array([low, high]) - centre) * scale).astype(np.float32),
        per_box=(1 / ((high - low) * scale)).astype(np.float32),
        centre=np.asarray(centre, np.float32),
        voxels_per_unit=np.float32(scale),
        near=np.float32(near),
        dt_scale=np.float32(1 / (high - low).max()),
        max_steps=max_steps,
        grows=bool(cone_angle != 0 and longest > shortest),
        steps=_steps(shortest, longest, cone_angle, scale),
    )


def _box(aabb: ArrayLike | None, centre: np.ndarray, edge: float, mips: int) -> tuple[np.ndarray, np.ndarray]:
    half = edge * 2.0 ** (mips - 1) / 2
    if aabb is None:
        return centre - edge / 2, centre + edge / 2
    box = np.asarray(aabb, np.float64)
    if box.shape != (2, 3) or not np.isfinite(box).all() or not np.all(box[0] < box[1]):
        raise ValueError(f"aabb={box.tolist()}: a lower and a higher corner (x, y, z) are needed, (2, 3)")
    if np.any(box[0] < centre - half * (1 + 1e-6)) or np.any(box[1] > centre + half * (1 + 1e-6)):
        raise ValueError(
            f"aabb={box.tolist()} reaches beyond the occupancy grid, {(centre - half).tolist()} to "
            f"{(centre + half).tolist()}: give the grid more mips, or a longer edge"
        )
    return box[0], box[1]


def _steps(shortest: float, longest: float, cone: float, scale: float) -> np.void:
    steps = np.zeros((), STEPS)
    steps["min_step"], steps["max_step"], steps["cone"], steps["mip_scale"] = shortest, longest, cone, scale
    if cone:
        growth = math.log2(1 + cone)
        steps["t_grows"], steps["t_full"], steps["s_grows"] = shortest / cone, longest / cone, 1 / cone
        steps["s_full"] = 1 / cone + math.log2(longest / shortest) / growth
        steps["log_growth"], steps["inverse_log_growth"] = growth, 1 / growth
    record = steps[()]
    assert isinstance(record, np.void)
    return record
