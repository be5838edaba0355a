"""NGFF metadata of a multiscale image: axes, units of length, and the scales and translations of its levels.

In: the metadata as stored, versions 0.4 and 0.5; :mod:`linumpy.io.ngff.coordinate_systems` brings 0.6 into that form.
Out: :class:`Axis` records; steps and origins of the levels, in their own units and in µm. Nothing is opened. Errors:
:class:`~linumpy.errors.MetadataError` for metadata that is missing or ambiguous.

Formats: https://ngff.openmicroscopy.org/0.4/ and https://ngff.openmicroscopy.org/0.5/, section "multiscales".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from linumpy.errors import MetadataError

Numbers = tuple[tuple[float, ...], ...]
"""For each level a number for each axis."""

Spacing = Sequence[float] | Mapping[str, float]
"""Voxel spacing in µm: a number for each axis of space in their order, or by the axes' names."""

#: µm in symbols of units, which NGFF does not list; micro is U+00B5 or U+03BC.
SYMBOLS = {"nm": 1e-3, "um": 1.0, "\u00b5m": 1.0, "\u03bcm": 1.0, "\u00b5": 1.0, "\u03bc": 1.0, "mm": 1e3}

#: µm in each unit of length that NGFF names, and in those of :data:`SYMBOLS`.
MICROMETERS = {
    **SYMBOLS,
    "yoctometer": 1e-18,
    "zeptometer": 1e-15,
    "attometer": 1e-12,
    "femtometer": 1e-9,
    "picometer": 1e-6,
    "angstrom": 1e-4,
    "nanometer": 1e-3,
    "micrometer": 1.0,
    "millimeter": 1e3,
    "centimeter": 1e4,
    "decimeter": 1e5,
    "inch": 25_400.0,
    "foot": 304_800.0,
    "yard": 914_400.0,
    "meter": 1e6,
    "hectometer": 1e8,
    "kilometer": 1e9,
    "mile": 1_609_344_000.0,
    "megameter": 1e12,
    "gigameter": 1e15,
    "terameter": 1e18,
    "parsec": 3.0856775814913673e22,
    "petameter": 1e21,
    "exameter": 1e24,
    "zettameter": 1e27,
    "yottameter": 1e30,
}


@dataclass(frozen=True)
class Axis:
    """An axis of an image.

    Attributes
    ----------
    name : str
        Such as ``"z"``.
    type : str or None
        ``"space"``, ``"time"``, ``"channel"`` or another; None without one in the metadata.
    unit : str or None
        As the metadata spells it; None without one.
    orientation : mapping or None
        Anatomical orientation as the metadata has it (RFC-4); None without one.
    """

    name: str
    type: str | None
    unit: str | None
    orientation: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Placement:
    """Where the voxels of a resolution level lie: along the axes of type space, in their order, in µm.

    Attributes
    ----------
    spacing : tuple of float
        Voxel spacing.
    origin : tuple of float
        Position of the centre of the first voxel.
    """

    spacing: tuple[float, ...]
    origin: tuple[float, ...]


@dataclass(frozen=True)
class Unplaced:
    """An unknown :class:`Placement`: reading its spacing or origin raises `MetadataError`.

    Attributes
    ----------
    reason : str
        The message: the image, the axis, and the parameter to pass.
    """

    reason: str

    @property
    def spacing(self) -> tuple[float, ...]:
        """Unknown."""
        raise MetadataError(self.reason)

    @property
    def origin(self) -> tuple[float, ...]:
        """Unknown."""
        raise MetadataError(self.reason)


def datasets_of(multiscale: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the entries of the resolution levels, after checking that they are a list of paths."""
    datasets = multiscale.get("datasets") or []
    if not isinstance(datasets, list) or not all(isinstance(d, Mapping) and "path" in d for d in datasets):
        raise MetadataError(f"{name}: the multiscale image's datasets are no list of paths")
    return datasets


def axes_of(multiscale: Mapping[str, Any], name: str) -> tuple[Axis, ...]:
    """Read the axes; at least one is of type space."""
    described = multiscale.get("axes")
    if not isinstance(described, list) or not all(isinstance(axis, Mapping) and "name" in axis for axis in described):
        raise MetadataError(f"{name}: the metadata names no axes (NGFF 0.4, 0.5 and 0.6 are read)")
    axes = tuple(
        Axis(str(axis["name"]), axis.get("type"), axis.get("unit"), _mapping(axis.get("orientation")))
        for axis in described
    )
    if len({axis.name for axis in axes}) < len(axes):
        raise MetadataError(f"{name}: two of the axes {', '.join(a.name for a in axes)} have the same name")
    for axis in axes:
        if not isinstance(axis.type, str | None):
            raise MetadataError(f"{name}: axis {axis.name!r} has the type {axis.type!r}; NGFF wants a text")
        # Skipping such an axis would leave the spacing one number short.
        if axis.type is None and axis.name.lower() in ("z", "y", "x"):
            raise MetadataError(
                f"{name}: axis {axis.name!r} has no type; NGFF wants 'type': 'space' for an axis of space"
            )
    if not spatial_axes_of(axes):
        raise MetadataError(f"{name}: none of the axes {', '.join(a.name for a in axes)} is of type space")
    return axes


def _mapping(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, Mapping) else None


def spatial_axes_of(axes: tuple[Axis, ...]) -> tuple[int, ...]:
    """Return the indices of the axes of type space."""
    return tuple(number for number, axis in enumerate(axes) if axis.type == "space")


def transformations_of_levels(
    multiscale: Mapping[str, Any], datasets: list[Mapping[str, Any]], spacing_given: bool, name: str
) -> list[list[Mapping[str, Any]]]:
    """List the transformations of each level in the order of their application: its own, then those of all datasets.

    A level without a scale is refused, unless it is the only one, has no transformation at all, and the caller passes
    the spacing.
    """
    common = transformation_list(multiscale, name)
    chains = []
    for dataset in datasets:
        own = transformation_list(dataset, f"{name}, level {dataset['path']!r}")
        bare = spacing_given and len(datasets) == 1 and not own and not common
        if not bare and not any(transformation.get("type") == "scale" for transformation in own):
            advice = "" if spacing_given or len(datasets) > 1 or own or common else "; pass spacing= in µm"
            raise MetadataError(f"{name}: the resolution level {dataset['path']!r} has no scale{advice}")
        chains.append([*own, *common])
    return chains


def transformation_list(holder: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the coordinate transformations of a level or of a multiscale image; an empty list without any."""
    transformations = holder.get("coordinateTransformations") or []
    if not isinstance(transformations, list) or not all(
        isinstance(transformation, Mapping) for transformation in transformations
    ):
        raise MetadataError(
            f"{name}: the coordinate transformations {transformations!r} are no list of transformations"
        )
    return transformations


def compose_scales(
    transformations: list[Mapping[str, Any]], rank: int, name: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Apply scales and translations in order; returns the step between voxels and the position of the first voxel."""
    step, origin = [1.0] * rank, [0.0] * rank
    for transformation in transformations:
        kind = transformation.get("type")
        if kind == "identity":
            continue
        values = transformation.get(kind) if kind in ("scale", "translation") else None
        if not isinstance(values, list) or len(values) != rank or not all(map(is_number, values)):
            raise MetadataError(
                f"{name}: the coordinate transformation {dict(transformation)!r} is no scale or translation"
            )
        if kind == "scale":
            step = [a * b for a, b in zip(step, values, strict=True)]
            origin = [a * b for a, b in zip(origin, values, strict=True)]
        else:
            origin = [a + b for a, b in zip(origin, values, strict=True)]
    return tuple(map(float, step)), tuple(map(float, origin))


def is_number(value: Any) -> bool:
    """Return whether a value of JSON is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def place_levels(
    steps: Numbers, origins: Numbers, axes: tuple[Axis, ...], spacing_given: Spacing | None, name: str
) -> tuple[Placement | Unplaced, ...]:
    """Convert steps and origins of the spatial axes to µm, by their units or to the caller's spacing."""
    spatial = spatial_axes_of(axes)
    for step in steps:
        if not all(math.isfinite(step[axis]) and step[axis] > 0 for axis in spatial):
            raise MetadataError(f"{name}: the scale {step} is not positive and finite along each axis of space")
    if spacing_given is None:
        for axis in spatial:
            if not _is_length(axes[axis].unit):
                return (Unplaced(_missing_unit(axes[axis], name)),) * len(steps)
        factors = [MICROMETERS[str(axes[axis].unit)] for axis in spatial]
    else:
        numbers = _checked(spacing_given, [axes[axis].name.lower() for axis in spatial], name)
        factors = [g / steps[0][axis] for g, axis in zip(numbers, spatial, strict=True)]
    # Another spacing does not move the image: the origin of level 0 is in the unit of the axis, not in voxels.
    units = [MICROMETERS.get(str(axes[axis].unit), f) for axis, f in zip(spatial, factors, strict=True)]
    moved = [origins[0][axis] * (u - f) for axis, u, f in zip(spatial, units, factors, strict=True)]
    return tuple(
        Placement(
            tuple(step[axis] * f for axis, f in zip(spatial, factors, strict=True)),
            tuple(origin[axis] * f + m for axis, f, m in zip(spatial, factors, moved, strict=True)),
        )
        for step, origin in zip(steps, origins, strict=True)
    )


def _is_length(unit: Any) -> bool:
    return isinstance(unit, str) and unit in MICROMETERS


def _missing_unit(axis: Axis, name: str) -> str:
    if axis.unit is None:
        return f"{name}: axis {axis.name!r} has no unit; pass spacing= in µm, or add one to the metadata"
    return (
        f"{name}: axis {axis.name!r} has the unknown unit {axis.unit!r}; pass spacing= in µm, or correct the metadata"
    )


def _checked(spacing: Spacing, names: list[str], name: str) -> list[float]:
    """Check the caller's spacing and return it in the order of the axes of space."""
    numbers: Any = spacing
    if isinstance(spacing, Mapping):
        numbers = [spacing.get(axis) for axis in names]
    try:
        values = [float(value) for value in numbers]
    except (TypeError, ValueError):
        values = []
    if len(values) != len(names) or not all(math.isfinite(value) and value > 0 for value in values):
        count = f"{len(names)} axes of space ({', '.join(names)})"
        raise ValueError(f"spacing={spacing!r}: {name} has {count}, each needs a positive µm")
    return values
