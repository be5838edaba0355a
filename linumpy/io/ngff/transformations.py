"""Read coordinate transformations of NGFF (RFC-5) as maps of points.

Supported types: identity, scale, translation, rotation, affine, mapAxis, projectAxis, sequence, byDimension, bijection,
and ``inverseOf`` of drafts; displacements and coordinates by :mod:`linumpy.io.scenes`. Matrices may be stored in
arrays. :class:`UnknownTransformationError` if the metadata alone do not say what a transformation is.

Format: https://ngff.openmicroscopy.org/0.6/, section "coordinateTransformations metadata".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr

from linumpy.errors import MetadataError
from linumpy.io.metadata import open_member
from linumpy.io.ngff.axes import is_number
from linumpy.io.paths import has_dots
from linumpy.plan.grid.point_map import (
    Affine,
    Field,
    PointMap,
    affine,
    compose,
    inverted,
    outputs_of,
    within_point,
)

Metadata = Mapping[str, Any]
"""Attributes of a group, or a part of them, as NGFF defines them."""
Transformation = Metadata

#: Types with an inverse, except for singular matrices.
_INVERTIBLE = ("identity", "scale", "translation", "rotation", "affine", "mapAxis")
#: Types that are fields, and the type of the axis of their components.
FIELDS = {"displacements": "displacement", "coordinates": "coordinate"}
#: Maximum number of elements of an array that holds a matrix or a vector.
_MAX_MATRIX_SIZE = 10_000


class UnknownTransformationError(MetadataError):
    """`transformation` is of an unknown type, takes other axes, is a field, or has its numbers in an unread array."""

    transformation: Transformation


def transformation_error(transformation: Transformation, name: str, problem: str) -> MetadataError:
    """Return the error for a transformation, of which `problem` is a predicate; `name` is the name of its group."""
    called = f"{transformation['name']!r} " if transformation.get("name") else ""
    kind = transformation.get("type")
    return MetadataError(f"{name}: the coordinate transformation {called}of type {kind!r} {problem}")


def is_invertible(transformation: Transformation) -> bool:
    """Return whether a transformation has an inverse by its type; its matrix may still be singular."""
    kind = transformation.get("type")
    if kind in ("sequence", "byDimension"):
        parts = transformation.get("transformations")
        parts = parts if isinstance(parts, list) else []
        inner = [part.get("transformation", part) for part in parts if isinstance(part, Mapping)]
        return all(isinstance(part, Mapping) and is_invertible(part) for part in inner)
    return kind in (*_INVERTIBLE, "bijection", "inverseOf")


@dataclass(frozen=True)
class TransformationReader:
    """Reads the transformations of a group; its methods take `rank`, the number of coordinates of points."""

    group: zarr.Group | None
    name: str

    def read(self, transform: object, rank: int, inverse: bool = False) -> PointMap:
        """Read a transformation, or its inverse."""
        if not isinstance(transform, Mapping):
            raise MetadataError(f"{self.name}: a coordinate transformation is no object")
        kind = transform.get("type")
        if kind == "identity":
            steps: PointMap = ()
        elif kind == "sequence":
            steps = self._sequence(transform, rank, inverse)
        elif kind == "byDimension":
            steps = self._by_dimension(transform, rank, inverse)
        elif kind == "bijection":
            steps = self.read(transform.get("inverse" if inverse else "forward"), rank, False)
        elif kind == "inverseOf":
            steps = self.read(transform.get("transformation", transform.get("transform")), rank, not inverse)
        elif isinstance(kind, str) and kind in FIELDS:
            if inverse:
                raise self.error(transform, "has no inverse: one is given by a bijection, or by the opposite direction")
            steps = (self.field(transform, kind),)
        else:
            steps = self._affine(transform, rank, inverse)
        try:
            outputs_of(steps, rank)
        except ValueError as error:
            raise self.error(transform, f"does not fit: {error}") from None
        return steps

    def error(self, transform: Transformation, problem: str) -> MetadataError:
        """Return the error for a transformation, of which `problem` is a predicate."""
        return transformation_error(transform, self.name, problem)

    def field(self, transform: Transformation, kind: str) -> Field:
        """Open a field of vectors; here they are not read."""
        raise self._unknown(transform, "is a field of vectors")

    def open(self, transform: Transformation, path: str) -> zarr.Array | zarr.Group:
        """Open an array or a group at a path."""
        if self.group is None:
            raise self._unknown(transform, f"has its numbers in an array at {path!r}")
        if has_dots(path):
            raise self.error(transform, f"has the path {path!r}, which may not leave its group")
        node = open_member(self.group, path)
        if node is None:
            raise self.error(transform, f"has the path {path!r}, where there is nothing")
        return node

    def _unknown(self, transform: Transformation, problem: str) -> UnknownTransformationError:
        error = UnknownTransformationError(str(self.error(transform, problem)))
        error.transformation = transform
        return error

    def _parts(self, transform: Transformation) -> list[Transformation]:
        parts = transform.get("transformations")
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            raise self.error(transform, "has no list of transformations")
        return parts

    def _sequence(self, transform: Transformation, rank: int, inverse: bool) -> PointMap:
        steps: PointMap = ()
        for part in reversed(self._parts(transform)) if inverse else self._parts(transform):
            more = self.read(part, rank, inverse)
            rank, steps = outputs_of(more, rank), compose(steps, more)
        return steps

    def _by_dimension(self, transform: Transformation, rank: int, inverse: bool) -> PointMap:
        """Read parts that map some coordinates each: gather all inputs, apply each part, sort the outputs."""
        input_axes: list[int] = []
        output_axes: list[int] = []
        parts = []
        for part in self._parts(transform):
            ends = [part.get(f"{end}Axes", part.get(f"{end}_axes")) for end in ("input", "output")]
            if not all(isinstance(end, list) and end and all(_is_index(n) for n in end) for end in ends):
                raise self._unknown(transform, "has parts without inputAxes and outputAxes, which are lists of indices")
            inputs, outputs = reversed(ends) if inverse else ends
            parts.append((len(inputs), self.read(part.get("transformation"), len(inputs), inverse)))
            if outputs_of(parts[-1][1], len(inputs)) != len(outputs):
                raise self.error(transform, f"has a part that does not give {len(outputs)} coordinates")
            input_axes, output_axes = input_axes + inputs, output_axes + outputs
        if not input_axes or max(input_axes) >= rank or sorted(output_axes) != list(range(len(output_axes))):
            raise self._unknown(transform, f"does not take {rank} coordinates and give each one of its results once")
        steps: PointMap = (affine(np.eye(rank)[input_axes], np.zeros(len(input_axes))),)
        # From the last part to the first: the parts before have their inputs then, the parts after their outputs.
        for number, (_, part_map) in reversed(list(enumerate(parts))):
            before = sum(count for count, _ in parts[:number])
            after = sum(outputs_of(other_map, count) for count, other_map in parts[number + 1 :])
            steps = compose(steps, within_point(part_map, before, after))
        order = np.argsort(output_axes)
        return compose(steps, (affine(np.eye(len(order))[order], np.zeros(len(order))),))

    def _affine(self, transform: Transformation, rank: int, inverse: bool) -> PointMap:
        step = self._forward(transform, rank)
        if not inverse:
            return compose((step,))
        inverse_step = inverted(step)
        if inverse_step is None:
            raise self.error(transform, "has no inverse")
        return compose((inverse_step,))

    def _forward(self, transform: Transformation, rank: int) -> Affine:
        """Read a transformation of a type that is an affine map."""
        kind = transform.get("type")
        if kind == "mapAxis":
            axes = transform.get("mapAxis")
            if not isinstance(axes, list) or not all(_is_index(n) for n in axes) or sorted(axes) != list(range(rank)):
                raise self._unknown(transform, f"is no order of the axes 0 to {rank - 1}")
            return affine(np.eye(rank)[axes], np.zeros(rank))
        if kind == "projectAxis":
            return self._projection(transform, rank)
        shapes = {"scale": (rank,), "translation": (rank,), "rotation": (rank, rank), "affine": (None, rank + 1)}
        if not isinstance(kind, str) or kind not in shapes:
            raise self._unknown(transform, "is not known")
        values = self._numbers(transform, kind)
        wanted = shapes[kind]
        if values.ndim != len(wanted) or any(w not in (None, n) for w, n in zip(wanted, values.shape, strict=True)):
            raise self.error(transform, f"has numbers of shape {values.shape}, and points have {rank} coordinates")
        if kind == "scale":
            return affine(np.diag(values), np.zeros(rank))
        if kind == "translation":
            return affine(np.eye(rank), values)
        return affine(values, np.zeros(rank)) if kind == "rotation" else affine(values[:, :-1], values[:, -1])

    def _projection(self, transform: Transformation, rank: int) -> Affine:
        dropped, created = transform.get("droppedInputs") or [], transform.get("createdOutputs") or []
        kept = [n for n in range(rank) if n not in dropped]
        count = len(kept) + len(created)
        if not all(_is_index(n) for n in (*dropped, *created)) or set(dropped) - set(range(rank)):
            raise self.error(transform, f"drops axes that are not among {rank}")
        if len(set(created)) != len(created) or set(created) - set(range(count)):
            raise self.error(transform, f"makes axes that are not among {count}")
        linear = np.zeros((count, rank))
        linear[[n for n in range(count) if n not in created], kept] = 1
        return affine(linear, np.zeros(count))

    def _numbers(self, transform: Transformation, kind: str) -> np.ndarray:
        """Return the numbers of a transformation, from the array at its path or, without a path, from its metadata."""
        path = transform.get("path")
        if isinstance(path, str):
            array = self.open(transform, path)
            if not isinstance(array, zarr.Array) or array.size > _MAX_MATRIX_SIZE:
                raise self.error(transform, f"has the path {path!r}, where there is no array of a few numbers")
            values = np.asarray(array[...], np.float64)
        else:
            stored: Any = transform.get(kind)
            rows = stored if isinstance(stored, list) else []
            flat = [n for row in rows for n in (row if isinstance(row, list) else [row])]
            try:
                values = np.array(stored if flat and all(map(is_number, flat)) else np.nan, np.float64)
            except ValueError:  # rows of different lengths
                values = np.array(np.nan)
        if not np.isfinite(values).all():
            raise self.error(transform, f"has no {kind} of numbers")
        return values


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
