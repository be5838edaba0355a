"""Read coordinate transformations of NGFF (RFC-5) as maps of points.

In: the metadata of a transformation, and the group that has it. Out: a
:data:`~linumpy.plan.grid.point_map.PointMap`: steps, each an affine map or a field of vectors. Fields refer to open
arrays, of which no voxels are read. Errors: :class:`~linumpy.errors.MetadataError` for transformations that cannot be
read or inverted.

Supported types: identity, scale, translation, rotation, affine, mapAxis, projectAxis, sequence, byDimension, bijection,
displacements, coordinates, and ``inverseOf`` of drafts. Matrices may be stored in arrays. A field (displacements or
coordinates) is an image, or an array with a coordinate system. It has one axis of type displacement or coordinate,
along which the components of the vectors are stored.

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
from linumpy.io.metadata import open_member
from linumpy.io.ngff.axes import compose_scales, datasets_of, is_number, transformations_of_levels
from linumpy.io.ngff.collection import ome_attributes
from linumpy.io.ngff.coordinate_systems import (
    Multiscale,
    Transformation,
    as_axes_and_scales,
    mappings_in,
    transformation_error,
)
from linumpy.io.paths import has_dots
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

#: Names of interpolations between the vectors of a field, and their spline orders.
INTERPOLATION = {"nearest": 0, "linear": 1, "cubic": 3}
#: Types with an inverse, except for singular matrices.
_INVERTIBLE = ("identity", "scale", "translation", "rotation", "affine", "mapAxis")
#: Types that are fields, and the type of the axis of their components.
_FIELDS = {"displacements": "displacement", "coordinates": "coordinate"}
#: Maximum number of elements of an array that holds a matrix or a vector.
_MAX_MATRIX_SIZE = 10_000


def is_invertible(transformation: Transformation) -> bool:
    """Return whether a transformation has an inverse by its type; its matrix may still be singular."""
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

    - `rank`: number of coordinates of the points to map.
    - `group`: the group whose metadata have the transformation; paths of arrays are relative to this group.
    - `name`: name of that group, for messages.
    - `inverse`: whether to return the inverse, from outputs to inputs.

    Returns the steps of the map; the voxels of fields are not read.
    """
    return _Reader(group, name).read(transformation, rank, inverse)


@dataclass(frozen=True)
class _Reader:
    """Reads the transformations of a group; its methods take `rank`, the number of coordinates of points."""

    group: zarr.Group
    name: str

    def read(self, transform: object, rank: int, inverse: bool) -> PointMap:
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
        elif isinstance(kind, str) and kind in _FIELDS:
            if inverse:
                raise self._error(
                    transform, "has no inverse: one is given by a bijection, or by the opposite direction"
                )
            steps = (self._field(transform, kind),)
        else:
            steps = self._affine(transform, rank, inverse)
        try:
            outputs_of(steps, rank)
        except ValueError as error:
            raise self._error(transform, f"does not fit: {error}") from None
        return steps

    def _error(self, transform: Transformation, problem: str) -> MetadataError:
        return transformation_error(transform, self.name, problem)

    def _parts(self, transform: Transformation) -> list[Transformation]:
        parts = transform.get("transformations")
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            raise self._error(transform, "has no list of transformations")
        return parts

    def _sequence(self, transform: Transformation, rank: int, inverse: bool) -> PointMap:
        steps: PointMap = ()
        for part in reversed(self._parts(transform)) if inverse else self._parts(transform):
            more = self.read(part, rank, inverse)
            rank, steps = outputs_of(more, rank), compose(steps, more)
        return steps

    def _by_dimension(self, transform: Transformation, rank: int, inverse: bool) -> PointMap:
        """Read parts that map some of the coordinates each.

        The map gathers the inputs of all parts side by side, applies each part to its own, and sorts the outputs.
        """
        input_axes: list[int] = []
        output_axes: list[int] = []
        parts = []
        for part in self._parts(transform):
            ends = [part.get(f"{end}Axes", part.get(f"{end}_axes")) for end in ("input", "output")]
            if not all(isinstance(end, list) and end and all(_is_index(n) for n in end) for end in ends):
                raise self._error(transform, "has parts without inputAxes and outputAxes, which are lists of indices")
            inputs, outputs = reversed(ends) if inverse else ends
            parts.append((len(inputs), self.read(part.get("transformation"), len(inputs), inverse)))
            if outputs_of(parts[-1][1], len(inputs)) != len(outputs):
                raise self._error(transform, f"has a part that does not give {len(outputs)} coordinates")
            input_axes, output_axes = input_axes + inputs, output_axes + outputs
        if not input_axes or max(input_axes) >= rank or sorted(output_axes) != list(range(len(output_axes))):
            raise self._error(transform, f"does not take {rank} coordinates and give each one of its results once")
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
            raise self._error(transform, "has no inverse")
        return compose((inverse_step,))

    def _forward(self, transform: Transformation, rank: int) -> Affine:
        """Read a transformation of a type that is an affine map."""
        kind = transform.get("type")
        if kind == "mapAxis":
            axes = transform.get("mapAxis")
            if not isinstance(axes, list) or not all(_is_index(n) for n in axes) or sorted(axes) != list(range(rank)):
                raise self._error(transform, f"is no order of the axes 0 to {rank - 1}")
            return affine(np.eye(rank)[axes], np.zeros(rank))
        if kind == "projectAxis":
            return self._projection(transform, rank)
        shapes = {"scale": (rank,), "translation": (rank,), "rotation": (rank, rank), "affine": (None, rank + 1)}
        if not isinstance(kind, str) or kind not in shapes:
            raise self._error(transform, "is not known")
        values = self._numbers(transform, kind)
        wanted = shapes[kind]
        if values.ndim != len(wanted) or any(w not in (None, n) for w, n in zip(wanted, values.shape, strict=True)):
            raise self._error(transform, f"has numbers of shape {values.shape}, and points have {rank} coordinates")
        if kind == "scale":
            return scaling(values.tolist(), [0.0] * rank)
        if kind == "translation":
            return affine(np.eye(rank), values)
        return affine(values, np.zeros(rank)) if kind == "rotation" else affine(values[:, :-1], values[:, -1])

    def _projection(self, transform: Transformation, rank: int) -> Affine:
        dropped, created = transform.get("droppedInputs") or [], transform.get("createdOutputs") or []
        kept = [n for n in range(rank) if n not in dropped]
        count = len(kept) + len(created)
        if not all(_is_index(n) for n in (*dropped, *created)) or set(dropped) - set(range(rank)):
            raise self._error(transform, f"drops axes that are not among {rank}")
        if len(set(created)) != len(created) or set(created) - set(range(count)):
            raise self._error(transform, f"makes axes that are not among {count}")
        linear = np.zeros((count, rank))
        linear[[n for n in range(count) if n not in created], kept] = 1
        return affine(linear, np.zeros(count))

    def _numbers(self, transform: Transformation, kind: str) -> np.ndarray:
        """Return the numbers of a transformation, from the array at its path or, without a path, from its metadata."""
        path = transform.get("path")
        if isinstance(path, str):
            array = self._open(transform, path)
            if not isinstance(array, zarr.Array) or array.size > _MAX_MATRIX_SIZE:
                raise self._error(transform, f"has the path {path!r}, where there is no array of a few numbers")
            values = np.asarray(array[...], np.float64)
        else:
            stored: Any = transform.get(kind)
            flat = [n for row in stored for n in (row if isinstance(row, list) else [row])] if _is_list(stored) else []
            try:
                values = np.array(stored if flat and all(map(is_number, flat)) else np.nan, np.float64)
            except ValueError:  # rows of different lengths
                values = np.array(np.nan)
        if not np.isfinite(values).all():
            raise self._error(transform, f"has no {kind} of numbers")
        return values

    def _open(self, transform: Transformation, path: str) -> zarr.Array | zarr.Group:
        if has_dots(path):
            raise self._error(transform, f"has the path {path!r}, which may not leave its group")
        node = open_member(self.group, path)
        if node is None:
            raise self._error(transform, f"has the path {path!r}, where there is nothing")
        return node

    def _field(self, transform: Transformation, kind: str) -> Field:
        """Open a field of displacements or coordinates."""
        path, interpolation = transform.get("path"), transform.get("interpolation") or "linear"
        if not isinstance(path, str):
            raise self._error(transform, "has no path of an array")
        if interpolation not in INTERPOLATION:
            raise self._error(
                transform, f"has the interpolation {interpolation!r}: {', '.join(INTERPOLATION)} are read"
            )
        for described, array in self._described(transform, path):
            field_name = f"{self.name}, field {path!r}"
            plain = as_axes_and_scales(described, field_name)
            axes = plain.get("axes")
            if not isinstance(axes, list) or len(axes) != array.ndim:
                continue
            components = [number for number, axis in enumerate(axes) if axis.get("type") == _FIELDS[kind]]
            if len(components) != 1:
                raise self._error(
                    transform,
                    f"has the path {path!r}, whose axes are not one of type {_FIELDS[kind]!r}, and others",
                )
            (chain,) = transformations_of_levels(plain, datasets_of(plain, field_name), False, field_name)
            scale, translation = compose_scales(chain, len(axes), field_name)
            kept = [number for number in range(len(axes)) if number != components[0]]
            field = Field(
                array, components[0], tuple(scale[n] for n in kept), tuple(translation[n] for n in kept),
                kind == "displacements", INTERPOLATION[interpolation],
            )  # fmt: skip
            if field.relative and field.outputs != field.inputs:
                raise self._error(transform, f"has {field.outputs} components at points of {field.inputs} coordinates")
            if not all(step > 0 for step in field.scale):
                raise self._error(transform, f"has the scale {field.scale}, which is not positive")
            return field
        raise self._error(transform, f"has the path {path!r}, and no metadata describe its axes")

    def _described(self, transform: Transformation, path: str) -> Iterator[tuple[Multiscale, zarr.Array]]:
        """Yield the array of a field, with metadata that describe its axes in the form of an image of one level.

        They are the metadata of the image at the path, of the array itself, or of a group above it.
        """
        node = self._open(transform, path)
        if isinstance(node, zarr.Group):
            for multiscale in mappings_in(ome_attributes(node), "multiscales"):
                finest = datasets_of(multiscale, self.name)[:1]
                for dataset in finest:
                    array = self._open(transform, posixpath.join(path, str(dataset["path"])))
                    if isinstance(array, zarr.Array):
                        yield {**multiscale, "datasets": finest}, array
            return
        own = ome_attributes(node)
        if "coordinateSystems" in own:
            transformations = own.get("coordinateTransformations") or [{"type": "identity"}]
            output = {"name": own["coordinateSystems"][0].get("name")} if _is_list(own["coordinateSystems"]) else None
            level = [{"output": output, **transform} for transform in transformations[:1]]
            yield {**own, "datasets": [{"path": path, "coordinateTransformations": level}]}, node
        parts = path.split("/")
        for count in range(len(parts) - 1, -1, -1):
            above = self.group if count == 0 else self._open(transform, "/".join(parts[:count]))
            group_metadata = ome_attributes(above) if isinstance(above, zarr.Group) else {}
            for multiscale in mappings_in(group_metadata, "multiscales"):
                for dataset in datasets_of(multiscale, self.name):
                    if dataset["path"] == "/".join(parts[count:]):
                        yield {**multiscale, "datasets": [dataset]}, node


def _is_list(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
