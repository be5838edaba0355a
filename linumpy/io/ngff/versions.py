"""Convert the attributes of a group to another version of NGFF.

In: attributes, and a version. Out: attributes with the same meaning in that version, and descriptions of the metadata
that it cannot express. Errors: :class:`~linumpy.errors.MetadataError` for coordinates that are not a scale and
translation along the axes.

Formats: https://ngff.openmicroscopy.org/0.4/, https://ngff.openmicroscopy.org/0.5/ and
https://ngff.openmicroscopy.org/0.6/: 0.5 has all attributes of 0.4 below ``ome``, with one version; 0.6 has
transformations between named coordinate systems.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from linumpy.io.ngff.coordinate_systems import (
    INTRINSIC,
    Metadata,
    Multiscale,
    Systems,
    Transformation,
    as_axes_and_scales,
    systems_of,
    with_systems,
)

#: Attributes defined by NGFF.
_KEYS = ("multiscales", "omero", "labels", "image-label", "plate", "well", "series", "bioformats2raw.layout", "scene")
#: Attributes with a version of their own in 0.4.
_VERSIONED = ("multiscales", "omero", "image-label", "plate", "well")


def version_of(attributes: Metadata) -> str | None:
    """Return the version of NGFF of a group's attributes; None for a group without attributes of NGFF."""
    ome = attributes.get("ome")
    if isinstance(ome, Mapping):
        return str(ome.get("version", "0.5"))
    return "0.4" if any(key in attributes for key in _KEYS) else None


def in_version(attributes: Metadata, version: str, name: str) -> tuple[dict[str, Any], list[str]]:
    """Return attributes in a version of NGFF, and descriptions of what is dropped.

    Parameters
    ----------
    attributes : mapping
        Attributes of a group.
    version : {"0.4", "0.5", "0.6"}
        The version.
    name : str
        Name of the group, for messages.
    """
    own, dropped = version_of(attributes), []
    if own is None or own == version:
        return dict(attributes), []
    ome = attributes["ome"] if own != "0.4" else {key: attributes[key] for key in _KEYS if key in attributes}
    kept = {key: value for key, value in ome.items() if key != "version"}
    others = {key: value for key, value in attributes.items() if key != "ome" and (own != "0.4" or key not in _KEYS)}
    if "scene" in kept and version != "0.6":
        del kept["scene"]
        dropped.append("'scene'")
    for key in set(_VERSIONED) & set(kept):
        kept[key] = _versioned(kept[key], version if version == "0.4" else None)
    if isinstance(kept.get("multiscales"), list):
        converted = [_multiscale(image, version, name) for image in kept["multiscales"]]
        kept["multiscales"] = [image for image, _ in converted]
        dropped += [description for _, lost in converted for description in lost]
    if version == "0.4":
        return {**others, **kept}, dropped
    return {**others, "ome": {"version": version, **kept}}, dropped


def _versioned(value: Any, version: str | None) -> Any:
    """Set or remove the version of an attribute, or of each entry of a list."""
    if isinstance(value, list):
        return [_versioned(entry, version) for entry in value]
    if not isinstance(value, Mapping):
        return value
    kept = {key: item for key, item in value.items() if key != "version"}
    return kept if version is None else {"version": version, **kept}


def _multiscale(image: Multiscale, version: str, name: str) -> tuple[dict[str, Any], list[str]]:
    systems = systems_of(image, name)
    if version == "0.6":
        return (dict(image) if systems is not None else _to_systems(image)), []
    if systems is None:
        return dict(image), []
    plain = dict(as_axes_and_scales(image, name))
    plain.pop("coordinateSystems", None)
    plain["datasets"] = [
        {**level, "coordinateTransformations": _composed(level["coordinateTransformations"])}
        for level in plain["datasets"]
    ]
    lost = [f"the coordinate system {system['name']!r}" for system in systems.others]
    return plain, lost


def _to_systems(image: Multiscale) -> dict[str, Any]:
    """Return a multiscale image of 0.6; transformations of all levels (before 0.6) are appended to each level's."""
    shared = list(image.get("coordinateTransformations", ()))
    own = {key: value for key, value in image.items() if key != "coordinateTransformations"}
    own["datasets"] = [
        {**level, "coordinateTransformations": [*level.get("coordinateTransformations", ()), *shared]}
        for level in image["datasets"]
    ]
    return with_systems(own, Systems(INTRINSIC, (), ()))


def _composed(chain: list[Transformation]) -> list[dict[str, Any]]:
    """Compose scales and translations into one scale and one translation, as before 0.6."""
    rank = len(next(iter(chain))["scale"])
    scale, translation = [1.0] * rank, [0.0] * rank
    for step in chain:
        if "scale" in step:
            scale = [a * b for a, b in zip(scale, step["scale"], strict=True)]
            translation = [a * b for a, b in zip(translation, step["scale"], strict=True)]
        else:
            translation = [a + b for a, b in zip(translation, step["translation"], strict=True)]
    return [{"type": "scale", "scale": scale}, {"type": "translation", "translation": translation}]
