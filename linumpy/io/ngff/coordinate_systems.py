"""Convert the coordinate systems of NGFF 0.6 (RFC-5) to the axes, scales and translations of 0.5, and back.

In 0.6 each level has one transformation, to the coordinate system of the image. Transformations from that system to
other systems (such as an atlas) are left out. But if the system of the image has no axes of space, the first system
with axes of space to which it is mapped takes its place. Errors: :class:`~linumpy.errors.MetadataError`, and
:class:`TurnedLevelError` for levels that are not scaled and translated along the axes.

Format: https://ngff.openmicroscopy.org/rfc/5/
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.errors import MetadataError
from linumpy.io.ngff.axes import datasets_of, transformation_list
from linumpy.io.ngff.transformations import (
    Metadata,
    Transformation,
    TransformationReader,
    UnknownTransformationError,
    transformation_error,
)
from linumpy.plan.grid.point_map import PointMap, as_matrix, compose

Multiscale = Metadata
Axes = list[Metadata]

#: Name of the coordinate system of a new image whose source has no name for it.
INTRINSIC = "physical"


@dataclass(frozen=True)
class Systems:
    """Coordinate systems of an image of NGFF 0.6, as the metadata describe them.

    - `intrinsic`: name of the system to which all levels are mapped, or that is used in its place.
    - `transformations`: transformations from the system `intrinsic` to others.
    """

    intrinsic: str
    others: tuple[Metadata, ...]
    transformations: tuple[Transformation, ...]


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
        scale[list(order)], shift[list(order)] = matrix[range(len(axes)), order], matrix[:, -1]
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
        linear = _level_matrix(dataset, further, rank, name)[:, :-1]
        order = tuple(map(int, np.abs(linear).argmax(axis=1))) if rank else ()
        off = np.count_nonzero(linear) != rank or sorted(order) != list(range(rank))
        if off or not (linear[range(rank), order] > 0).all():
            raise _level_error([_level_transformation(dataset, name), *further][-1], name)
        orders[order] = dataset
    if len(orders) != 1:
        raise TurnedLevelError(f"{name}: the levels have their axes in different orders")
    return next(iter(orders))


def _level_matrix(dataset: Metadata, further: list[Transformation], rank: int, name: str) -> np.ndarray:
    """Return the map from voxels of a level to the coordinate system of the image, as a matrix of (rank, rank + 1)."""
    steps: PointMap = ()
    for transformation in (_level_transformation(dataset, name), *further):
        try:
            steps = compose(steps, TransformationReader(None, name).read(transformation, rank))
        except UnknownTransformationError as error:
            raise _level_error(error.transformation, name) from None
    matrix = as_matrix(steps, rank)
    assert matrix is not None  # there are no fields without a group
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
    """Return the name of the image's coordinate system, and transformations to apply after those of the levels.

    Usually this is the system that the levels are mapped to, and the list is empty; see the module's docstring.
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


class TurnedLevelError(MetadataError):
    """A level is not placed by a positive scale and a translation along the axes."""


def _level_error(transformation: Transformation, name: str) -> TurnedLevelError:
    problem = "is no positive scale and translation along the axes, which place the levels of an image"
    return TurnedLevelError(str(transformation_error(transformation, name, problem)))
