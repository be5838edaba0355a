"""Maps of points as a sequence of steps: affine maps, and vector fields on regular grids. Pure: fields are not read.

``linumpy.resample.blocks.warp`` applies such maps to the voxels of a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Affine:
    """An affine map: for each coordinate of the result the weights of a point's coordinates, and the translation."""

    matrix: tuple[tuple[float, ...], ...]

    @property
    def inputs(self) -> int:
        """Number of coordinates of a point."""
        return len(self.matrix[0]) - 1

    @property
    def outputs(self) -> int:
        """Number of coordinates of the result."""
        return len(self.matrix)


@dataclass(frozen=True)
class Field:
    """A field of vectors: displacements of points (`relative`), or the coordinates that points are mapped to.

    - `array`: the vectors, not read yet: an axis for each input coordinate, in their order, and the axis
      `component_axis` for the components of a vector.
    - `scale`, `translation`: distance between vectors, and position of the first vector, along each axis but
      `component_axis`, in the coordinate system of the points.
    - `order`: spline order of the interpolation between vectors: 0, 1 or 3.
    - `first`: index of the first coordinate of a point that the field takes; the others are unchanged.
    """

    array: Any
    component_axis: int
    scale: tuple[float, ...]
    translation: tuple[float, ...]
    relative: bool
    order: int
    first: int = 0

    @property
    def inputs(self) -> int:
        """Number of input coordinates."""
        return len(self.scale)

    @property
    def outputs(self) -> int:
        """Number of components of a vector."""
        return int(self.array.shape[self.component_axis])

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of vectors along each axis."""
        return tuple(n for axis, n in enumerate(self.array.shape) if axis != self.component_axis)


PointMap = tuple[Affine | Field, ...]
"""Steps in the order of their application; none for the identity."""


def affine(linear: ArrayLike, translation: ArrayLike) -> Affine:
    """Make an affine map from its linear part and its translation."""
    matrix = np.column_stack([np.asarray(linear, np.float64), np.asarray(translation, np.float64)])
    return Affine(tuple(map(tuple, matrix.tolist())))


def compose(*maps: Iterable[Affine | Field]) -> PointMap:
    """Compose maps in the order of their application; consecutive affine steps are merged, identities are dropped."""
    steps: list[Affine | Field] = []
    for step in itertools.chain(*maps):
        if isinstance(step, Affine) and steps and isinstance(last := steps[-1], Affine):
            steps.pop()
            step = Affine(_as_rows(_homogeneous(step) @ _homogeneous(last)))
        steps.append(step)
    return tuple(
        step
        for step in steps
        if not (isinstance(step, Affine) and np.array_equal(step.matrix, np.eye(step.inputs, step.inputs + 1)))
    )


def as_matrix(steps: PointMap, rank: int) -> np.ndarray | None:
    """Return a composed map without fields as a matrix, (outputs, inputs + 1); None for a map with fields."""
    if not steps:
        return np.eye(rank, rank + 1)
    return np.array(steps[0].matrix) if len(steps) == 1 and isinstance(steps[0], Affine) else None


def inverted(step: Affine) -> Affine | None:
    """Return the inverse of an affine map; None if it has none."""
    matrix = _homogeneous(step)
    if step.inputs != step.outputs or np.linalg.matrix_rank(matrix) <= step.inputs:
        return None
    return Affine(_as_rows(np.linalg.inv(matrix)))


def within_point(steps: PointMap, before: int, after: int) -> PointMap:
    """Extend a map to points with further coordinates, `before` first and `after` last, which the map keeps."""
    extended: list[Affine | Field] = []
    for step in steps:
        if isinstance(step, Field):
            extended.append(replace(step, first=step.first + before))
            continue
        matrix = np.zeros((before + step.outputs + after, before + step.inputs + after + 1))
        matrix[:before, :before] = np.eye(before)
        step_matrix = np.array(step.matrix)
        matrix[before : before + step.outputs, before : before + step.inputs] = step_matrix[:, :-1]
        matrix[before : before + step.outputs, -1] = step_matrix[:, -1]
        matrix[before + step.outputs :, before + step.inputs : -1] = np.eye(after)
        extended.append(Affine(tuple(map(tuple, matrix.tolist()))))
    return tuple(extended)


def outputs_of(steps: PointMap, rank: int) -> int:
    """Count the coordinates of the result for points of `rank` coordinates; ``ValueError`` if a step takes others."""
    for step in steps:
        first = step.first if isinstance(step, Field) else 0
        is_accepted = first + step.inputs <= rank if isinstance(step, Field) else step.inputs == rank
        if not is_accepted:
            raise ValueError(f"it takes points of {first + step.inputs} coordinates, and gets {rank}")
        rank = rank - step.inputs + step.outputs
    return rank


def _homogeneous(step: Affine) -> np.ndarray:
    return np.vstack([np.array(step.matrix, np.float64), [0.0] * step.inputs + [1.0]])


def _as_rows(homogeneous: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, homogeneous[:-1].tolist()))
