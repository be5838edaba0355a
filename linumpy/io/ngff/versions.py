"""Convert the attributes of a group to another version of NGFF.

0.5 has all attributes of 0.4 below ``ome``, with one version; 0.6 has transformations between named coordinate systems.
Errors: :class:`~linumpy.errors.MetadataError` for an image of 0.6 whose coordinates are not a scale and translation
along the axes, which earlier versions cannot express.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from linumpy.errors import MetadataError
from linumpy.io.ngff.axes import common_transformations, transformation_list
from linumpy.io.ngff.coordinate_systems import (
    INTRINSIC,
    Metadata,
    Multiscale,
    Systems,
    as_axes_and_scales,
    referred,
    systems_of,
    with_systems,
)

#: Attributes defined by NGFF.
_KEYS = ("multiscales", "omero", "labels", "image-label", "plate", "well", "series", "bioformats2raw.layout", "scene")
#: Attributes with a version of their own in 0.4.
_VERSIONED = ("multiscales", "omero", "image-label", "plate", "well")


def version_of(attributes: Metadata) -> str | None:
    """Return the version of NGFF that the attributes of a group follow; None without attributes of NGFF."""
    ome = attributes.get("ome")
    if isinstance(ome, Mapping):
        return str(ome.get("version", "0.5"))
    return "0.4" if any(key in attributes for key in _KEYS) else None


def image_version(attributes: Metadata, image: Multiscale, name: str) -> str:
    """Return the version of NGFF of a multiscale image in the attributes of a group."""
    ome = attributes.get("ome")
    below_ome = isinstance(ome, Mapping)
    version = (ome.get("version") if isinstance(ome, Mapping) else attributes.get("version")) or image.get("version")
    version = str(version or ("0.5" if below_ome else "0.4"))
    if not re.fullmatch(r"0\.[456]([.-].*)?", version):
        raise MetadataError(f"{name} follows NGFF {version}; NGFF 0.4, 0.5 and 0.6 are read: convert it to one of them")
    return version


def in_version(attributes: Metadata, version: str, name: str) -> tuple[dict[str, Any], list[str]]:
    """Convert the attributes of a group, of any version, to a version of NGFF; others are unchanged.

    Returns the attributes, and descriptions of the metadata that are lost.
    """
    source_version, dropped = version_of(attributes), []
    if source_version is None or source_version == version:
        return dict(attributes), []
    at_top = source_version == "0.4"
    ome = {key: attributes[key] for key in _KEYS if key in attributes} if at_top else attributes["ome"]
    kept = {key: value for key, value in ome.items() if key != "version"}
    others = {key: value for key, value in attributes.items() if key != "ome" and not (at_top and key in _KEYS)}
    if "scene" in kept and version != "0.6":
        del kept["scene"]
        dropped.append("'scene'")
    for key in set(_VERSIONED) & set(kept):
        kept[key] = _versioned(kept[key], version if version == "0.4" else None)
    if isinstance(kept.get("multiscales"), list):
        for image in kept["multiscales"]:
            image_version(attributes, image, name)
        converted = [_convert_multiscale(image, version, name) for image in kept["multiscales"]]
        kept["multiscales"] = [image for image, _ in converted]
        dropped += [description for _, lost in converted for description in lost]
    if version == "0.4":
        return {**others, **kept}, dropped
    return {**others, "ome": {"version": version, **kept}}, dropped


def _versioned(value: Any, version: str | None) -> Any:
    """Set the version in an attribute, or in each entry of a list; remove it if `version` is None."""
    if isinstance(value, list):
        return [_versioned(entry, version) for entry in value]
    if not isinstance(value, Mapping):
        return value
    kept = {key: item for key, item in value.items() if key != "version"}
    return kept if version is None else {"version": version, **kept}


def _convert_multiscale(image: Multiscale, version: str, name: str) -> tuple[dict[str, Any], list[str]]:
    """Return a multiscale image in a version, and descriptions of the coordinate systems that are lost."""
    systems = systems_of(image, name)
    if version == "0.6":
        return (dict(image), []) if systems is not None else _to_systems(image, name)
    if systems is None:
        return dict(image), []
    plain = dict(as_axes_and_scales(image, name))
    plain.pop("coordinateSystems", None)
    lost = [f"the coordinate system {system['name']!r}" for system in systems.others]
    return plain, lost


def _to_systems(image: Multiscale, name: str) -> tuple[dict[str, Any], list[str]]:
    """Convert a multiscale image of 0.4 or 0.5 to 0.6; return also descriptions of transformations that are lost.

    Transformations that apply to all levels are appended to those of each level, since 0.6 has only the latter.
    """
    common = common_transformations(image, name)
    others = [one for one in transformation_list(image, name) if one not in common]
    lost = [f"the transformation to the coordinate system {referred(one.get('output'))!r}" for one in others]
    changed = {key: value for key, value in image.items() if key != "coordinateTransformations"}
    changed["datasets"] = [
        {**level, "coordinateTransformations": [*level.get("coordinateTransformations", ()), *common]}
        for level in image["datasets"]
    ]
    return with_systems(changed, Systems(INTRINSIC, (), ())), lost
