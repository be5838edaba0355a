"""Coordinate transformations of NGFF (RFC-5) as maps of points.

In: the metadata of a transformation, and the group that has it. Out: a
:data:`~linumpy.plan.grid.point_map.PointMap`, whose fields of vectors refer to arrays that are opened and not read.
Errors: :class:`~linumpy.errors.MetadataError` for transformations that cannot be read or inverted.

Read are identity, scale, translation, rotation, affine, mapAxis, projectAxis, sequence, byDimension, bijection,
displacements, coordinates, and ``inverseOf`` of drafts. Matrices may be stored in arrays. A field is an image or an
array with a coordinate system, which has an axis of type displacement or coordinate.

Format: https://ngff.openmicroscopy.org/0.6/, section "coordinateTransformations metadata".
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr

from linumpy.errors import MetadataError
from linumpy.io.metadata import REFUSALS, checked_array
from linumpy.io.ngff.axes import compose_scales, datasets_of, is_number, transformations_of_levels
from linumpy.io.ngff.coordinate_systems import Transformation, as_axes_and_scales
from linumpy.plan.grid.point_map import (
    Affine,
    Field,
    PointMap,
    affine,
    compose,
    inverted,
    outputs_of,
    scaling,
    within_point,
)

#: Interpolation between the vectors of a field, and the order of the spline.
INTERPOLATION = {"nearest": 0, "linear": 1, "cubic": 3}
#: Transformations with an inverse, if their parts have one.
_INVERTIBLE = ("identity", "scale", "translation", "rotation", "affine", "mapAxis")
_FIELDS = {"displacements": "displacement", "coordinates": "coordinate"}


def is_invertible(transformation: Transformation) -> bool:
    """Tell whether the inverse of a transformation can be read; a matrix may still turn out to have none."""
    kind = transformation.get("type")
    if kind in ("sequence", "byDimension"):
        parts = transformation.get("transformations")
        parts = parts if isinstance(parts, list) else []
        inner = [part.get("transformation", part) for part in parts if isinstance(part, Mapping)]
        return all(isinstance(part, Mapping) and is_invertible(part) for part in inner)
    return kind in (*_INVERTIBLE, "bijection", "inverseOf")


def read_map(
    transformation: Transformation, rank: int, group: zarr.Group, name: str, *, inverse: bool = False
) -> PointMap:
    """Read a transformation.

    Parameters
    ----------
    transformation : mapping
        As the metadata have it.
    rank : int
        Coordinates of the points that it maps; of its results for the inverse.
    group : zarr.Group
        The group whose metadata have it, from which paths lead to arrays.
    name : str
        Name of that group, for messages.
    inverse : bool
        Whether to map in the other direction.

    Returns
    -------
    PointMap
        Steps, with fields unread.

    Raises
    ------
    MetadataError
        The transformation is of another type, is incomplete, does not fit `rank`, has no inverse, or refers to an array
        that does not exist.
    """
    return _Reader(group, name).read(transformation, rank, inverse)


@dataclass(frozen=True)
class _Reader:
    group: zarr.Group
    name: str

    def read(self, one: Any, rank: int, inverse: bool) -> PointMap:
        if not isinstance(one, Mapping):
            raise MetadataError(f"{self.name}: the coordinate transformation {one!r} is no object")
        kind = one.get("type")
        if kind == "identity":
            steps: PointMap = ()
        elif kind == "sequence":
            steps = self._sequence(one, rank, inverse)
        elif kind == "byDimension":
            steps = self._by_dimension(one, rank, inverse)
        elif kind == "bijection":
            steps = self.read(one.get("inverse" if inverse else "forward"), rank, False)
        elif kind == "inverseOf":
            steps = self.read(one.get("transformation", one.get("transform")), rank, not inverse)
        elif isinstance(kind, str) and kind in _FIELDS:
            if inverse:
                raise self._error(one, "has no inverse: one is given by a bijection, or by the opposite direction")
            steps = (self._field(one, kind),)
        else:
            steps = self._affine(one, rank, inverse)
        try:
            outputs_of(steps, rank)
        except ValueError as error:
            raise self._error(one, f"does not fit: {error}") from None
        return steps

    def _error(self, one: Transformation, what: str) -> MetadataError:
        called = f"{one['name']!r} " if one.get("name") else ""
        return MetadataError(f"{self.name}: the coordinate transformation {called}of type {one.get('type')!r} {what}")

    def _parts(self, one: Transformation) -> list[Mapping[str, Any]]:
        parts = one.get("transformations")
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            raise self._error(one, "has no list of transformations")
        return parts

    def _sequence(self, one: Transformation, rank: int, inverse: bool) -> PointMap:
        steps: PointMap = ()
        for part in reversed(self._parts(one)) if inverse else self._parts(one):
            more = self.read(part, rank, inverse)
            rank, steps = outputs_of(more, rank), compose(steps, more)
        return steps

    def _by_dimension(self, one: Transformation, rank: int, inverse: bool) -> PointMap:
        """Gather the coordinates of all parts side by side, apply each part to its own, and order the results."""
        taken: list[int] = []
        given: list[int] = []
        parts = []
        for part in self._parts(one):
            ends = [part.get(f"{end}Axes", part.get(f"{end}_axes")) for end in ("input", "output")]
            if not all(isinstance(end, list) and end and all(_is_index(n) for n in end) for end in ends):
                raise self._error(one, "has parts without inputAxes and outputAxes, which are lists of indices")
            inputs, outputs = reversed(ends) if inverse else ends
            parts.append((len(taken), len(inputs), self.read(part.get("transformation"), len(inputs), inverse)))
            if outputs_of(parts[-1][2], len(inputs)) != len(outputs):
                raise self._error(one, f"has a part that does not give {len(outputs)} coordinates")
            taken, given = taken + inputs, given + outputs
        if not taken or max(taken) >= rank or sorted(given) != list(range(len(given))):
            raise self._error(one, f"does not take {rank} coordinates and give each one of its results once")
        steps: PointMap = (affine(np.eye(rank)[taken], np.zeros(len(taken))),)
        for number, (_, count, inner) in reversed(list(enumerate(parts))):
            before = sum(count for _, count, _ in parts[:number])
            after = sum(outputs_of(part, n) for _, n, part in parts[number + 1 :])
            steps = compose(steps, within_point(inner, before, after))
        return compose(steps, (affine(np.eye(len(given))[np.argsort(given)], np.zeros(len(given))),))

    def _affine(self, one: Transformation, rank: int, inverse: bool) -> PointMap:
        step = self._forward(one, rank)
        if not inverse:
            return compose((step,))
        back = inverted(step)
        if back is None:
            raise self._error(one, "has no inverse")
        return compose((back,))

    def _forward(self, one: Transformation, rank: int) -> Affine:
        kind = one.get("type")
        if kind == "mapAxis":
            axes = one.get("mapAxis")
            if not isinstance(axes, list) or not all(_is_index(n) for n in axes) or sorted(axes) != list(range(rank)):
                raise self._error(one, f"is no order of the axes 0 to {rank - 1}")
            return affine(np.eye(rank)[axes], np.zeros(rank))
        if kind == "projectAxis":
            return self._projection(one, rank)
        shapes = {"scale": (rank,), "translation": (rank,), "rotation": (rank, rank), "affine": (None, rank + 1)}
        if not isinstance(kind, str) or kind not in shapes:
            raise self._error(one, "is not known")
        values = self._numbers(one, kind)
        wanted = shapes[kind]
        if values.ndim != len(wanted) or any(w not in (None, n) for w, n in zip(wanted, values.shape, strict=True)):
            raise self._error(one, f"has numbers of shape {values.shape}, and points have {rank} coordinates")
        if kind == "scale":
            return scaling(values.tolist(), [0.0] * rank)
        if kind == "translation":
            return affine(np.eye(rank), values)
        return affine(values, np.zeros(rank)) if kind == "rotation" else affine(values[:, :-1], values[:, -1])

    def _projection(self, one: Transformation, rank: int) -> Affine:
        dropped, created = one.get("droppedInputs") or [], one.get("createdOutputs") or []
        kept = [n for n in range(rank) if n not in dropped]
        count = len(kept) + len(created)
        if not all(_is_index(n) for n in (*dropped, *created)) or set(dropped) - set(range(rank)):
            raise self._error(one, f"drops axes that are not among {rank}")
        if len(set(created)) != len(created) or set(created) - set(range(count)):
            raise self._error(one, f"makes axes that are not among {count}")
        linear = np.zeros((count, rank))
        linear[[n for n in range(count) if n not in created], kept] = 1
        return affine(linear, np.zeros(count))

    def _numbers(self, one: Transformation, kind: str) -> np.ndarray:
        """Return parameters: of the array that the transformation refers to, or else its own."""
        path = one.get("path")
        if isinstance(path, str):
            array = self._open(one, path)
            if not isinstance(array, zarr.Array) or array.size > 10_000:
                raise self._error(one, f"has the path {path!r}, where no array of a few numbers is")
            values = np.asarray(array[...], np.float64)
        else:
            stored: Any = one.get(kind)
            flat = [n for row in stored for n in (row if isinstance(row, list) else [row])] if _is_list(stored) else []
            try:
                values = np.array(stored if flat and all(map(is_number, flat)) else np.nan, np.float64)
            except ValueError:  # rows of different lengths
                values = np.array(np.nan)
        if not np.isfinite(values).all():
            raise self._error(one, f"has no {kind} of numbers")
        return values

    def _open(self, one: Transformation, path: str) -> zarr.Array | zarr.Group:
        if {".", ".."} & set(path.replace("\\", "/").split("/")):
            raise self._error(one, f"has the path {path!r}, which may not leave its group")
        try:
            node = self.group[path]
        except REFUSALS:
            raise self._error(one, f"has the path {path!r}, where nothing is") from None
        return checked_array(node) if isinstance(node, zarr.Array) else node

    def _field(self, one: Transformation, kind: str) -> Field:
        path, interpolation = one.get("path"), one.get("interpolation") or "linear"
        if not isinstance(path, str):
            raise self._error(one, "has no path of an array")
        if interpolation not in INTERPOLATION:
            raise self._error(one, f"has the interpolation {interpolation!r}: {', '.join(INTERPOLATION)} are read")
        for described, array in self._described(one, path):
            where = f"{self.name}, field {path!r}"
            named = as_axes_and_scales(described, where)
            axes = named.get("axes")
            if not isinstance(axes, list) or len(axes) != array.ndim:
                continue
            components = [number for number, axis in enumerate(axes) if axis.get("type") == _FIELDS[kind]]
            if len(components) != 1:
                raise self._error(
                    one, f"has the path {path!r}, whose axes are not one of type {_FIELDS[kind]!r}, and others"
                )
            (chain,) = transformations_of_levels(named, datasets_of(named, where), False, where)
            scale, translation = compose_scales(chain, len(axes), where)
            kept = [number for number in range(len(axes)) if number != components[0]]
            field = Field(
                array, components[0], tuple(scale[n] for n in kept), tuple(translation[n] for n in kept),
                kind == "displacements", INTERPOLATION[interpolation],
            )  # fmt: skip
            if field.relative and field.outputs != field.inputs:
                raise self._error(one, f"has {field.outputs} components at points of {field.inputs} coordinates")
            if not all(step > 0 for step in field.scale):
                raise self._error(one, f"has the scale {field.scale}, which is not positive")
            return field
        raise self._error(one, f"has the path {path!r}, and no metadata say what its axes are")

    def _described(self, one: Transformation, path: str) -> Iterator[tuple[Mapping[str, Any], zarr.Array]]:
        """Find metadata of a field, as of a multiscale image of one level: its own, or of a group that lists it."""
        node = self._open(one, path)
        if isinstance(node, zarr.Group):
            for multiscale in _multiscales(node):
                first = datasets_of(multiscale, self.name)[:1]
                for dataset in first:
                    array = self._open(one, posixpath.join(path, str(dataset["path"])))
                    if isinstance(array, zarr.Array):
                        yield {**multiscale, "datasets": first}, array
            return
        attributes: Mapping[str, Any] = node.attrs.asdict()
        ome = attributes.get("ome")
        own: Mapping[str, Any] = ome if isinstance(ome, Mapping) else attributes
        if "coordinateSystems" in own:
            transformations = own.get("coordinateTransformations") or [{"type": "identity"}]
            output = {"name": own["coordinateSystems"][0].get("name")} if _is_list(own["coordinateSystems"]) else None
            level = [{"output": output, **transformation} for transformation in transformations[:1]]
            yield {**own, "datasets": [{"path": path, "coordinateTransformations": level}]}, node
        parts = path.split("/")
        for count in range(len(parts) - 1, -1, -1):
            above = self.group if count == 0 else self._open(one, "/".join(parts[:count]))
            for multiscale in _multiscales(above) if isinstance(above, zarr.Group) else []:
                for dataset in datasets_of(multiscale, self.name):
                    if dataset["path"] == "/".join(parts[count:]):
                        yield {**multiscale, "datasets": [dataset]}, node


def _multiscales(group: zarr.Group) -> list[Mapping[str, Any]]:
    attributes = group.attrs.asdict()
    ome = attributes.get("ome")
    found = (ome if isinstance(ome, Mapping) else attributes).get("multiscales")
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
