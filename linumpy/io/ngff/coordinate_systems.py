"""Convert the coordinate systems of NGFF 0.6 (RFC-5) to the axes, scales and translations of 0.5, and back.

In: the metadata of a multiscale image. Out: the metadata with ``axes``, in the order of the arrays, and with
transformations of the types scale and translation only. Errors: :class:`~linumpy.errors.MetadataError` for missing or
ambiguous metadata, and :class:`TurnedLevelError` for levels that are not scaled and translated along the axes.

In 0.6 each level has one transformation, to the coordinate system of the image. Transformations from that system to
other systems (such as an atlas) are left out. But if the system of the image has no axes of space, the first system
with axes of space to which it is mapped takes its place.

Format: https://ngff.openmicroscopy.org/rfc/5/
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from linumpy.errors import MetadataError
from linumpy.io.ngff.axes import datasets_of, is_number, transformation_list

Metadata = Mapping[str, Any]
"""Attributes of a group, or a part of them, as NGFF defines them."""
Multiscale = Metadata
Transformation = Metadata
Axes = list[Metadata]

#: Name of the coordinate system of a new image whose source has no name for it.
INTRINSIC = "physical"


@dataclass(frozen=True)
class Systems:
    """Coordinate systems of an image of NGFF 0.6, as the metadata describe them.

    - `intrinsic`: name of the system of the image, to which all levels are mapped; if it has no axes of space, of the
      system that takes its place.
    - `transformations`: transformations from the system `intrinsic` to others.
    """

    intrinsic: str
    others: tuple[Metadata, ...]
    transformations: tuple[Transformation, ...]


def mappings_in(holder: Metadata, key: str) -> list[Metadata]:
    """Return the mappings in the list at a key of the metadata; an empty list if there is no list."""
    entries = holder.get(key)
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []


def as_axes_and_scales(multiscale: Multiscale, name: str) -> Multiscale:
    """Convert a multiscale image of NGFF 0.6 to the form of 0.5; return metadata of earlier versions unchanged."""
    if "axes" in multiscale or "coordinateSystems" not in multiscale:
        return multiscale
    system, further = _image_system(multiscale, name)
    axes = _axes_of_systems(multiscale, name)[system]
    order = order_of_axes(multiscale, name)
    datasets = []
    for dataset in datasets_of(multiscale, name):
        matrix = _level_matrix(dataset, further, len(axes), name)
        scale, shift = np.ones(len(axes)), np.zeros(len(axes))
        scale[list(order)], shift[list(order)] = matrix[range(len(axes)), order], matrix[:-1, -1]
        steps = [
            {"type": "scale", "scale": scale.tolist()}, {"type": "translation", "translation": shift.tolist()}
        ]  # fmt: skip
        datasets.append({"path": dataset["path"], "coordinateTransformations": steps})
    kept = {key: value for key, value in multiscale.items() if key != "coordinateTransformations"}
    return {**kept, "axes": [axes[order.index(axis)] for axis in range(len(axes))], "datasets": datasets}


def with_unit_steps(multiscale: Multiscale, name: str) -> Multiscale:
    """Convert as :func:`as_axes_and_scales`, with steps of 1 in place of the transformations of the levels."""
    axes = _axes_of_systems(multiscale, name)[_image_system(multiscale, name)[0]]
    steps = [{"type": "scale", "scale": [1.0] * len(axes)}]
    datasets = [{**dataset, "coordinateTransformations": steps} for dataset in datasets_of(multiscale, name)]
    kept = {key: value for key, value in multiscale.items() if key != "coordinateTransformations"}
    return {**kept, "axes": axes, "datasets": datasets}


def order_of_axes(multiscale: Multiscale, name: str) -> tuple[int, ...]:
    """Return, for each axis of the coordinate system of an image of NGFF 0.6, the axis of its arrays that it scales."""
    system, further = _image_system(multiscale, name)
    rank, orders = len(_axes_of_systems(multiscale, name)[system]), {}
    for dataset in datasets_of(multiscale, name):
        linear = _level_matrix(dataset, further, rank, name)[:-1, :-1]
        order = tuple(map(int, np.abs(linear).argmax(axis=1))) if rank else ()
        off = np.count_nonzero(linear) != rank or sorted(order) != list(range(rank))
        if off or not (linear[range(rank), order] > 0).all():
            raise _level_error([_level_transformation(dataset, name), *further][-1], name)
        orders[order] = dataset
    if len(orders) != 1:
        raise TurnedLevelError(f"{name}: the levels have their axes in different orders")
    return next(iter(orders))


def _level_matrix(dataset: Metadata, further: list[Transformation], rank: int, name: str) -> np.ndarray:
    """Return the map from voxels of a level to the coordinate system of the image, as a homogeneous matrix."""
    matrix = np.eye(rank + 1)
    for transformation in (_level_transformation(dataset, name), *further):
        matrix = _affine(transformation, rank, name) @ matrix
    return matrix


def systems_of(multiscale: Multiscale, name: str) -> Systems | None:
    """Read the coordinate systems of a multiscale image; None before NGFF 0.6."""
    if "axes" in multiscale or "coordinateSystems" not in multiscale:
        return None
    intrinsic = _image_system(multiscale, name)[0]
    return Systems(
        intrinsic,
        tuple(system for system in multiscale["coordinateSystems"] if system["name"] != intrinsic),
        tuple(
            transformation
            for transformation in transformation_list(multiscale, name)
            if referred(transformation.get("input")) == intrinsic
        ),
    )


def with_systems(multiscale: Multiscale, systems: Systems) -> dict[str, Any]:
    """Convert a multiscale image of NGFF 0.5 to 0.6, with `systems`: the inverse of :func:`as_axes_and_scales`."""
    datasets = []
    for dataset in multiscale["datasets"]:
        ends = {"input": {"path": dataset["path"]}, "output": {"name": systems.intrinsic}}
        chain = dataset["coordinateTransformations"]
        datasets.append(
            {
                "path": dataset["path"],
                "coordinateTransformations": [{"type": "sequence", **ends, "transformations": chain}],
            }
        )
    own = {"name": systems.intrinsic, "axes": multiscale["axes"]}
    changed: dict[str, Any] = {"coordinateSystems": [own, *systems.others], "datasets": datasets}
    if systems.transformations:
        changed["coordinateTransformations"] = list(systems.transformations)
    return {key: value for key, value in multiscale.items() if key != "axes"} | changed


def stored_paths(transformation: object) -> list[str]:
    """List the paths of the stored arrays that a transformation, and the transformations in it, refer to."""
    if isinstance(transformation, list):
        return [path for part in transformation for path in stored_paths(part)]
    if not isinstance(transformation, Mapping):
        return []
    parts = [transformation.get(key) for key in ("transformations", "transformation", "forward", "inverse")]
    own = [path] if isinstance(path := transformation.get("path"), str) else []
    return own + [path for part in parts for path in stored_paths(part)]


def _axes_of_systems(multiscale: Multiscale, name: str) -> dict[str, Axes]:
    """Return the axes of each coordinate system by its name."""
    systems = multiscale["coordinateSystems"]
    if not isinstance(systems, list) or not all(
        isinstance(system, Mapping)
        and isinstance(system.get("name"), str)
        and isinstance(system.get("axes"), list)
        and all(isinstance(axis, Mapping) for axis in system["axes"])
        for system in systems
    ):
        raise MetadataError(f"{name}: the coordinate systems are no list of names and axes")
    return {system["name"]: system["axes"] for system in systems}


def _image_system(multiscale: Multiscale, name: str) -> tuple[str, list[Transformation]]:
    """Return the name of the image's coordinate system, and transformations to apply after the levels' transformations.

    Usually this is the system that the levels are mapped to, and the list is empty. If that system has no axes of
    space, it is the first system with axes of space to which that system is mapped, by the transformation in the list.
    """
    systems = _axes_of_systems(multiscale, name)
    names = dict.fromkeys(
        referred(_level_transformation(dataset, name).get("output")) for dataset in datasets_of(multiscale, name)
    )
    if len(names) != 1 or not names.keys() <= systems.keys():
        raise MetadataError(
            f"{name}: the levels are mapped to the coordinate systems {', '.join(map(repr, names)) or 'none'}; one of "
            f"{', '.join(map(repr, systems)) or 'none'} is needed, the same for all levels"
        )
    (intrinsic,) = map(str, names)
    if _has_space(systems[intrinsic]):
        return intrinsic, []
    for transformation in transformation_list(multiscale, name):
        output = str(referred(transformation.get("output")))
        if referred(transformation.get("input")) == intrinsic and _has_space(systems.get(output, [])):
            return output, [transformation]
    return intrinsic, []


def _has_space(axes: Axes) -> bool:
    return any(axis.get("type") == "space" for axis in axes)


def referred(reference: object) -> str | None:
    """Return the name in a reference to a coordinate system: an object in 0.6, a text in its drafts; None without."""
    name = reference.get("name") if isinstance(reference, Mapping) else reference
    return name if isinstance(name, str) else None


def _level_transformation(dataset: Metadata, name: str) -> Transformation:
    """Return the transformation of a level; `MetadataError` unless there is exactly one."""
    transformations = transformation_list(dataset, f"{name}, level {dataset['path']!r}")
    if len(transformations) != 1:
        raise MetadataError(
            f"{name}: the resolution level {dataset['path']!r} has {len(transformations)} coordinate transformations; "
            "NGFF 0.6 requires one"
        )
    return transformations[0]


def _affine(transformation: Transformation, rank: int, name: str) -> np.ndarray:
    """Return a transformation of `rank` coordinates as a homogeneous matrix, if its metadata hold the numbers."""
    kind, matrix = transformation.get("type"), np.eye(rank + 1)
    if kind == "sequence":
        for part in _parts(transformation, name):
            matrix = _affine(part, rank, name) @ matrix
    elif kind == "byDimension":
        matrix[:rank] = 0
        for part in _parts(transformation, name):
            inputs, outputs = (part.get(f"{end}Axes", part.get(f"{end}_axes")) for end in ("input", "output"))
            inner = part.get("transformation")
            if not (_are_axes(inputs, rank) and _are_axes(outputs, rank) and len(inputs) == len(outputs)):
                raise _level_error(transformation, name)
            part_matrix = _affine(inner if isinstance(inner, Mapping) else {}, len(inputs), name)
            matrix[np.ix_(outputs, inputs)], matrix[outputs, -1] = part_matrix[:-1, :-1], part_matrix[:-1, -1]
    elif kind == "mapAxis" and _are_axes(axes := transformation.get("mapAxis"), rank) and len(axes) == rank:
        matrix[:rank] = matrix[axes]
    elif kind in ("scale", "translation"):
        values = _numbers(transformation, (rank,), name)
        matrix[range(rank), range(rank) if kind == "scale" else rank] = values
    elif kind in ("affine", "rotation"):
        columns = rank + (kind == "affine")
        matrix[:rank, :columns] = _numbers(transformation, (rank, columns), name)
    elif kind != "identity":
        raise _level_error(transformation, name)
    return matrix


def _parts(transformation: Transformation, name: str) -> list[Transformation]:
    parts = transformation.get("transformations")
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise transformation_error(transformation, name, "has no list of transformations")
    return parts


def _are_axes(axes: object, rank: int) -> TypeGuard[list[int]]:
    """Return whether a value is a list of different indices of axes."""
    return isinstance(axes, list) and all(axis in range(rank) for axis in axes) and len(set(axes)) == len(axes) > 0


def _numbers(transformation: Transformation, shape: tuple[int, ...], name: str) -> list[Any]:
    """Return the numbers of a transformation, which its metadata must hold in this shape."""
    kind = str(transformation.get("type"))
    values = transformation.get(kind)
    if values is None and "path" in transformation:
        raise _level_error(transformation, name)
    rows = values if len(shape) > 1 else [values]
    if not isinstance(rows, list) or len(rows) != (shape[0] if len(shape) > 1 else 1) or not all(
        isinstance(row, list) and len(row) == shape[-1] and all(map(is_number, row)) for row in rows
    ):  # fmt: skip
        raise transformation_error(transformation, name, f"has no {' × '.join(map(str, shape))} numbers")
    return values  # type: ignore[return-value]


def transformation_error(transformation: Transformation, name: str, problem: str) -> MetadataError:
    """Return the error for a transformation, of which `problem` is a predicate; `name` is the name of its group."""
    called = f"{transformation['name']!r} " if transformation.get("name") else ""
    kind = transformation.get("type")
    return MetadataError(f"{name}: the coordinate transformation {called}of type {kind!r} {problem}")


class TurnedLevelError(MetadataError):
    """A level is not placed by a positive scale and a translation along the axes."""


def _level_error(transformation: Transformation, name: str) -> TurnedLevelError:
    problem = "is no positive scale and translation along the axes, which place the levels of an image"
    return TurnedLevelError(str(transformation_error(transformation, name, problem)))
