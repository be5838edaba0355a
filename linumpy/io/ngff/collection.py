"""Groups of images: plates, wells, collections written by bioformats2raw, labels, scenes. Only metadata is read.

Formats: https://ngff.openmicroscopy.org/0.4/ and https://ngff.openmicroscopy.org/0.5/, sections "plate", "well",
"labels" and "bf2raw" (marked by the attribute ``bioformats2raw.layout``);
https://ngff.openmicroscopy.org/0.6/, section "scene".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import zarr

from linumpy.io.metadata import member_names, open_members, open_optional
from linumpy.io.ngff.axes import mappings_in

_BIOFORMATS2RAW = "bioformats2raw.layout"
#: Attributes that identify a group of images, and the kind of the group in words. The first one that it has counts.
_KINDS = {
    "plate": "a plate",  # before the next one: a plate may be written by bioformats2raw
    _BIOFORMATS2RAW: "a collection of bioformats2raw",
    "well": "a well",
    "labels": "a group of labels",
    "scene": "a scene",
}
#: Maximum number of images that a message lists.
_MAX_LISTED = 8


def ome_attributes(node: zarr.Group | zarr.Array) -> Mapping[str, Any]:
    """Return the attributes of NGFF: those below ``ome`` (since 0.5), or without ``ome`` all attributes (0.4)."""
    attributes: Mapping[str, Any] = node.attrs.asdict()
    ome = attributes.get("ome")
    return ome if isinstance(ome, Mapping) else attributes


def kind_of(group: zarr.Group) -> str | None:
    """Return the kind of a group of images in words, for messages; None for an image and for any other group."""
    holder = ome_attributes(group)
    return None if "multiscales" in holder else next((words for key, words in _KINDS.items() if key in holder), None)


def image_paths(group: zarr.Group) -> Iterator[str]:
    """Yield the paths of the images in a group; for a plate, open its wells as far as they are needed."""
    holder = ome_attributes(group)
    if "plate" in holder:
        paths = _paths(holder.get("plate"), "wells")
        for path, well in zip(paths, open_members(group, paths), strict=False):
            if isinstance(well, zarr.Group):
                yield from (f"{path}/{image}" for image in _paths(ome_attributes(well).get("well"), "images"))
    elif _BIOFORMATS2RAW in holder:
        yield from _series(group)
    elif "well" in holder:
        yield from _paths(holder.get("well"), "images")
    elif "labels" in holder:
        labels = holder.get("labels")
        yield from (name for name in labels if isinstance(name, str)) if isinstance(labels, list) else ()
    elif "scene" in holder:
        scene = holder.get("scene")
        transformations = mappings_in(scene, "coordinateTransformations") if isinstance(scene, Mapping) else []
        ends = [transformation.get(end) for transformation in transformations for end in ("input", "output")]
        named = [end.get("path") for end in ends if isinstance(end, Mapping)]
        yield from dict.fromkeys(path for path in named if isinstance(path, str) and path)


def why_not_image(group: zarr.Group, kind: str) -> str:
    """Return the message that a group is of another kind than an image; it lists the images of the group."""
    paths = list(itertools.islice(image_paths(group), _MAX_LISTED + 1))
    if not paths:
        return f"{group.store_path} is {kind}, not an image: it has no images"
    listed = ", ".join(map(repr, paths[:_MAX_LISTED])) + (" …" if len(paths) > _MAX_LISTED else "")
    return (
        f"{group.store_path} is {kind}, not an image: open one of its images, such as {group.store_path}/{paths[0]}; "
        f"it has the images {listed}"
    )


def _series(group: zarr.Group) -> list[str]:
    """List the images of a group of bioformats2raw: its group ``OME`` lists them, or else their names are numbers."""
    described = open_optional(group, "OME")
    if isinstance(described, zarr.Group):
        series = ome_attributes(described).get("series")
        if isinstance(series, list) and series and all(isinstance(name, str) for name in series):
            return [str(name) for name in series]
    names = member_names(group)
    if names is not None:
        numbers = sorted(filter(str.isdecimal, names), key=int)
        nodes = zip(numbers, open_members(group, numbers), strict=True)
        return [name for name, node in nodes if isinstance(node, zarr.Group)]
    consecutive = map(str, itertools.count())
    return list(itertools.takewhile(lambda name: isinstance(open_optional(group, name), zarr.Group), consecutive))


def _paths(holder: Any, key: str) -> list[str]:
    """Return the paths in a list of wells or images."""
    entries = mappings_in(holder, key) if isinstance(holder, Mapping) else []
    return [entry["path"] for entry in entries if isinstance(entry.get("path"), str)]
