"""NGFF metadata of a multiscale image: axes, units of length, and the scales and translations of its levels.

In: the stored metadata in the form of versions 0.4 and 0.5, into which :mod:`linumpy.io.ngff.coordinate_systems`
converts 0.6. Nothing is opened. Errors: :class:`~linumpy.errors.MetadataError` for metadata that is missing or
ambiguous, ``ValueError`` for a spacing of the caller that does not fit the axes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from linumpy.errors import MetadataError

NumbersOfLevels = tuple[tuple[float, ...], ...]
"""For each level a number for each axis."""

Spacing = Sequence[float] | Mapping[str, float]
"""Voxel spacing in µm: a number for each axis of space in the order of the axes, or by the name of the axis."""

#: Length in µm of units by their symbols, which NGFF does not list; the micro sign is U+00B5 or U+03BC.
SYMBOLS = {"nm": 1e-3, "um": 1.0, "\u00b5m": 1.0, "\u03bcm": 1.0, "\u00b5": 1.0, "\u03bc": 1.0, "mm": 1e3}

#: Powers of ten of the prefixes of the metre that NGFF names.
_PREFIXES = {
    "yocto": -24, "zepto": -21, "atto": -18, "femto": -15, "pico": -12, "nano": -9, "micro": -6, "milli": -3,
    "centi": -2, "deci": -1, "": 0, "hecto": 2, "kilo": 3, "mega": 6, "giga": 9, "tera": 12, "peta": 15, "exa": 18,
    "zetta": 21, "yotta": 24,
}  # fmt: skip

#: Length in µm of each unit that NGFF names, and of the symbols.
MICROMETERS = {
    **SYMBOLS,
    **{f"{prefix}meter": float(f"1e{power + 6}") for prefix, power in _PREFIXES.items()},
    "angstrom": 1e-4,
    "inch": 25_400.0,
    "foot": 304_800.0,
    "yard": 914_400.0,
    "mile": 1_609_344_000.0,
    "parsec": 3.0856775814913673e22,
}

#: Units that NGFF names for axes of type space, and of type time.
UNITS_OF_SPACE = tuple(unit for unit in MICROMETERS if unit not in SYMBOLS)
UNITS_OF_TIME = (*(f"{prefix}second" for prefix in _PREFIXES), "minute", "hour", "day")


@dataclass(frozen=True)
class Axis:
    """An axis of an image, with its type, unit and anatomical orientation (RFC-4), None where the metadata has none."""

    name: str
    type: str | None
    unit: str | None
    orientation: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Placement:
    """The spacing of a level and the centre of its first voxel, in µm along the axes of type space, in their order."""

    spacing: tuple[float, ...]
    origin: tuple[float, ...]


@dataclass(frozen=True)
class Unplaced:
    """A :class:`Placement` that is unknown: its spacing and origin raise `MetadataError`."""

    reason: str

    @property
    def spacing(self) -> tuple[float, ...]:
        """Raise `MetadataError`."""
        raise MetadataError(self.reason)

    @property
    def origin(self) -> tuple[float, ...]:
        """Raise `MetadataError`."""
        raise MetadataError(self.reason)


def datasets_of(multiscale: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the metadata of each resolution level; `MetadataError` if they are no list of objects with a path."""
    datasets = multiscale.get("datasets") or []
    if not isinstance(datasets, list) or not all(isinstance(d, Mapping) and "path" in d for d in datasets):
        raise MetadataError(f"{name}: the multiscale image's datasets are no list of paths")
    return datasets


def mappings_in(holder: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return the mappings in the list at a key of the metadata; an empty list if there is no list."""
    entries = holder.get(key)
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []


def axes_of(multiscale: Mapping[str, Any], name: str) -> tuple[Axis, ...]:
    """Read the axes of a multiscale image; `name` is the name of the image, for messages."""
    described = multiscale.get("axes")
    if isinstance(described, list) and described and all(isinstance(axis, str) for axis in described):
        raise MetadataError(
            f"{name}: the axes {', '.join(described)} have names but no types, as in NGFF 0.3; NGFF 0.4, 0.5 and 0.6 "
            "are read: convert the image to one of them"
        )
    if not isinstance(described, list) or not all(isinstance(axis, Mapping) and "name" in axis for axis in described):
        raise MetadataError(f"{name}: the metadata names no axes (NGFF 0.4, 0.5 and 0.6 are read)")
    axes = tuple(
        Axis(
            str(axis["name"]),
            axis.get("type"),
            axis.get("unit"),
            axis["orientation"] if isinstance(axis.get("orientation"), Mapping) else None,
        )
        for axis in described
    )
    if len({axis.name for axis in axes}) < len(axes):
        raise MetadataError(f"{name}: two of the axes {', '.join(a.name for a in axes)} have the same name")
    for axis in axes:
        if not isinstance(axis.type, str | None):
            raise MetadataError(f"{name}: axis {axis.name!r} has the type {axis.type!r}; NGFF wants a text")
        # Without its type, such an axis would be no axis of space, and the spacing would lack a number.
        if axis.type is None and axis.name.lower() in ("z", "y", "x"):
            raise MetadataError(
                f"{name}: axis {axis.name!r} has no type; NGFF wants 'type': 'space' for an axis of space"
            )
    if not spatial_axes_of(axes):
        raise MetadataError(f"{name}: none of the axes {', '.join(a.name for a in axes)} is of type space")
    return axes


def spatial_axes_of(axes: tuple[Axis, ...]) -> tuple[int, ...]:
    """Return the indices of the axes of type space."""
    return tuple(number for number, axis in enumerate(axes) if axis.type == "space")


def transformations_of_levels(
    multiscale: Mapping[str, Any], datasets: list[Mapping[str, Any]], spacing_given: bool, name: str
) -> list[list[Mapping[str, Any]]]:
    """List the transformations of each level in order: the level's own, then the transformations of all levels."""
    common = common_transformations(multiscale, name)
    chains = []
    for dataset in datasets:
        own = transformation_list(dataset, f"{name}, level {dataset['path']!r}")
        bare = spacing_given and len(datasets) == 1 and not own and not common
        if not bare and not any(transformation.get("type") == "scale" for transformation in own):
            advice = "" if spacing_given or len(datasets) > 1 or own or common else "; pass spacing= in µm"
            raise MetadataError(f"{name}: the resolution level {dataset['path']!r} has no scale{advice}")
        chains.append([*own, *common])
    return chains


def common_transformations(multiscale: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the transformations of all levels: not those that lead to another coordinate system, as SpatialData's."""
    return [one for one in transformation_list(multiscale, name) if "output" not in one]


def transformation_list(holder: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the coordinate transformations in the metadata of a level or of a multiscale image; empty without any."""
    transformations = holder.get("coordinateTransformations") or []
    if not isinstance(transformations, list) or not all(
        isinstance(transformation, Mapping) for transformation in transformations
    ):
        raise MetadataError(f"{name}: the coordinate transformations are no list of objects")
    return transformations


def compose_scales(
    transformations: list[Mapping[str, Any]], rank: int, name: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compose scales, translations and identities in order: step between voxels and position of the first, by axis."""
    step, origin = [1.0] * rank, [0.0] * rank
    for transformation in transformations:
        kind = transformation.get("type")
        if kind == "identity":
            continue
        values = transformation.get(kind) if kind in ("scale", "translation") else None
        if isinstance(values, list) and len(values) != rank:
            raise MetadataError(f"{name}: the {kind} {values} has {len(values)} numbers, and the image has {rank} axes")
        if not isinstance(values, list) or len(values) != rank or not all(map(is_number, values)):
            raise MetadataError(
                f"{name}: a coordinate transformation of type {kind!r} is no scale or translation by {rank} numbers"
            )
        if kind == "scale":
            step = [a * b for a, b in zip(step, values, strict=True)]
            origin = [a * b for a, b in zip(origin, values, strict=True)]
        else:
            origin = [a + b for a, b in zip(origin, values, strict=True)]
    return tuple(map(float, step)), tuple(map(float, origin))


def is_number(value: Any) -> bool:
    """Return whether a value in a JSON document is a finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max  # JSON has integers beyond every float


def place_levels(
    steps: NumbersOfLevels, origins: NumbersOfLevels, axes: tuple[Axis, ...], spacing_given: Spacing | None, name: str
) -> tuple[Placement | Unplaced, ...]:
    """Convert steps and origins of levels, along all axes in their units, to µm along the axes of space.

    - `spacing_given`: the voxel spacing of level 0 in µm, which replaces the units; None to use the units.
    """
    spatial = spatial_axes_of(axes)
    for step in steps:
        if not all(math.isfinite(step[axis]) and step[axis] > 0 for axis in spatial):
            raise MetadataError(f"{name}: the scale {step} is not positive and finite along each axis of space")
    if spacing_given is None:
        for axis in spatial:
            unit = axes[axis].unit
            if str(unit) not in MICROMETERS:
                problem, cure = ("no unit", "add one to") if unit is None else (f"the unknown unit {unit!r}", "correct")
                reason = f"axis {axes[axis].name!r} has {problem}; pass spacing= in µm, or {cure} the metadata"
                return (Unplaced(f"{name}: {reason}"),) * len(steps)
        factors = [MICROMETERS[str(axes[axis].unit)] for axis in spatial]
    else:
        given = _checked_spacing(spacing_given, [axes[axis].name.lower() for axis in spatial], name)
        factors = [spacing / steps[0][axis] for spacing, axis in zip(given, spatial, strict=True)]
    # A spacing of the caller scales the steps, but does not move level 0, whose origin keeps its unit of length.
    units = [MICROMETERS.get(str(axes[axis].unit), factor) for axis, factor in zip(spatial, factors, strict=True)]
    shifts = [origins[0][axis] * (unit - factor) for axis, unit, factor in zip(spatial, units, factors, strict=True)]
    return tuple(
        Placement(
            tuple(step[axis] * factor for axis, factor in zip(spatial, factors, strict=True)),
            tuple(origin[axis] * factor + shift for axis, factor, shift in zip(spatial, factors, shifts, strict=True)),
        )
        for step, origin in zip(steps, origins, strict=True)
    )


def _checked_spacing(spacing: Spacing, names: list[str], name: str) -> list[float]:
    """Return the caller's spacing in the order of the axes of space; ``ValueError`` if it does not fit them."""
    numbers: Any = [spacing.get(axis) for axis in names] if isinstance(spacing, Mapping) else spacing
    try:
        values = [float(value) for value in numbers]
    except (TypeError, ValueError):
        values = []
    if len(values) != len(names) or not all(math.isfinite(value) and value > 0 for value in values):
        count = f"{len(names)} axes of space ({', '.join(names)})"
        raise ValueError(f"spacing={spacing!r}: {name} has {count}, each needs a positive µm")
    return values
