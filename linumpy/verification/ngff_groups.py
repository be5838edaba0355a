"""Check groups of images: labels, plates, wells, and collections of bioformats2raw.

In: a group. Out: findings; members are opened, no voxel is read.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

import zarr
from zarr.storage import StorePath

from linumpy.io.metadata import member_names, open_stored
from linumpy.io.ngff.axes import MICROMETERS, datasets_of, mappings_in
from linumpy.io.ngff.collection import image_paths, ome_attributes
from linumpy.io.ome import open_image
from linumpy.io.paths import METADATA_FILES
from linumpy.verification.place import NOT_UNDERSTOOD, Place, Told, is_of_document

_NOT_FOUND = "Programs that look for it by the metadata do not find it."
_NOT_SHOWN = "Viewers do not show it, or show it beside the image."


def check_labels(place: Place) -> Iterator[Told]:
    """Check a group of labels: the listed ones, and others in it."""
    listed = place.ome.get("labels")
    if "multiscales" in place.ome or (listed is None and place.group.path.rpartition("/")[2] != "labels"):
        return
    if listed is not None and not (isinstance(listed, list) and all(isinstance(name, str) for name in listed)):
        yield place.tell("labels", f"labels is no list of paths: {listed!r}", _NOT_FOUND)
        return
    image = _image_above(place)
    for name in listed or ():
        label = yield from place.opened(name, zarr.Group, "label image", "labels")
        if not isinstance(label, zarr.Group):
            continue
        if "image-label" not in ome_attributes(label):
            what = "it is listed as a label image, and has no attribute 'image-label'"
            yield place.tell("labels", what, "Programs do not know that its values are labels.", below=name)
        if image is not None:
            yield from _same_extent(place, name, label, image)
    known = {name.strip("/").split("/")[0] for name in listed or ()}
    for name in member_names(place.group) or ():
        if name in known or name in METADATA_FILES:
            continue
        member, _ = place.open(name)
        if isinstance(member, zarr.Group) and "multiscales" in ome_attributes(member):
            what = f"the image {name!r} is not among the labels that the metadata list: {', '.join(known) or 'none'}"
            yield place.tell("labels", what, _NOT_SHOWN, "Add it to the list, or remove it.", below=name)


def _image_above(place: Place) -> zarr.Group | None:
    """Open the image that a group of labels belongs to; None if it is not in the same store, or is no image."""
    path = place.group.path
    if not path:
        return None
    try:
        node = open_stored(StorePath(place.group.store, posixpath.dirname(path)))
    except NOT_UNDERSTOOD as error:
        if not is_of_document(error):
            raise
        return None
    return node if isinstance(node, zarr.Group) and "multiscales" in ome_attributes(node) else None


def _same_extent(place: Place, name: str, label: zarr.Group, image: zarr.Group) -> Iterator[Told]:
    """Compare the voxels and the extent of a label image with those of the image, along each axis of space."""
    own, others = _sizes(label), _sizes(image)
    for axis in [axis for axis in own if axis in others]:
        (count, step, unit), (n, other_step, other_unit) = own[axis], others[axis]
        if unit in MICROMETERS and other_unit in MICROMETERS:
            step, other_step = step * MICROMETERS[unit], other_step * MICROMETERS[other_unit]
        same_scale = abs(step - other_step) <= 1e-6 * max(step, other_step)
        if abs(count * step - n * other_step) > (1e-6 if same_scale else 1.001) * max(step, other_step):
            what = f"{count} voxels of {step:g} along {axis}, and the image has {n} of {other_step:g}"
            effect, advice = (
                "Labels are shown in other places than what they label.",
                "Correct the scale of the labels.",
            )
            yield place.tell("labels", what, effect, advice, "misplaced", name)


def _sizes(group: zarr.Group) -> dict[str, tuple[int, float, str]]:
    """Return number, step and unit of voxels of the finest level by axes of space; empty if they are not known."""
    try:
        image = open_image(group)
    except NOT_UNDERSTOOD:
        return {}  # told where the image is checked
    shape, scale = image.levels[0].shape, image.scale[0]
    return {image.axes[n].name: (shape[n], scale[n], str(image.axes[n].unit)) for n in image.spatial_axes}


def check_image_label(place: Place) -> Iterator[Told]:
    """Check a label image: its type of voxels, and the image that it names as its source."""
    if "image-label" not in place.ome:
        return
    described = place.ome["image-label"]
    if not isinstance(described, Mapping):
        yield place.tell("image-label", f"image-label is {described!r}, not an object")
        return
    for image in mappings_in(place.ome, "multiscales")[:1]:
        for dataset in datasets_of(image, "image-label")[:1]:
            array, _ = place.open(str(dataset["path"]))
            if isinstance(array, zarr.Array) and array.dtype.kind not in "ui":
                what = f"the voxels of a label image are {array.dtype}; NGFF wants integers"
                yield place.tell("image-label", what, "Programs refuse the labels, or show them as an image.")
    source = described.get("source")
    if source is None:
        return
    path = source.get("image") if isinstance(source, Mapping) else source
    if not isinstance(path, str | None) or not isinstance(source, Mapping):
        yield place.tell("image-label", f"the source of the labels is {source!r}, no object with the path of an image")
    elif path is not None and not _resolves(place, path):
        what = f"the labels name the image {path!r} as their source, and there is none"
        yield place.tell("image-label", what, _NOT_FOUND, "Correct the path, which is relative to the label image.")


def _resolves(place: Place, path: str) -> bool:
    """Return whether there is an image at a path relative to the group; also if that is outside of the store."""
    where = posixpath.normpath(posixpath.join(place.group.path or ".", path))
    if where.startswith(("..", "/")):
        return True
    try:
        node = open_stored(StorePath(place.group.store, "" if where == "." else where))
    except NOT_UNDERSTOOD as error:
        if not is_of_document(error):
            raise
        return False
    return isinstance(node, zarr.Group) and "multiscales" in ome_attributes(node)


def check_plate(place: Place) -> Iterator[Told]:
    """Check a plate: rows, columns, and that wells are where their indices say, and exist."""
    if "plate" not in place.ome:
        return
    plate = place.ome["plate"]
    keys = ("rows", "columns", "wells")
    if not isinstance(plate, Mapping) or not all(_is_list_of_objects(plate.get(key)) for key in keys):
        yield place.tell("plate", f"the plate has no lists of objects for {', '.join(keys)}", _NOT_FOUND)
        return
    rows, columns, wells = (plate[key] for key in keys)
    names = [[entry.get("name") for entry in entries] for entries in (rows, columns)]
    for key, of_key in zip(keys, names, strict=False):
        if len(set(map(repr, of_key))) < len(of_key) or not all(isinstance(name, str) for name in of_key):
            yield place.tell("plate", f"the names of the plate's {key} are not different texts: {of_key}")
    problems = [problem for well in wells if (problem := _well_problem(well, *names))]
    if problems:
        what = f"{len(problems)} wells are not where their indices say: {'; '.join(problems[:3])}"
        yield place.tell("plate", what, "Programs show wells in wrong places of the plate.", count=len(problems))
    paths = [well["path"] for well in wells if isinstance(well.get("path"), str)]
    yield from _members(place, paths, "well", "plate")


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)


def _well_problem(well: Mapping[str, Any], rows: list[Any], columns: list[Any]) -> str:
    """Return how the path of a well and its indices disagree; empty if they agree."""
    path, indices = well.get("path"), (well.get("rowIndex"), well.get("columnIndex"))
    parts = path.split("/") if isinstance(path, str) else []
    if len(parts) != 2 or parts[0] not in rows or parts[1] not in columns:
        return f"the path {path!r} is no row and column"
    if indices == (None, None):  # NGFF 0.1 to 0.3 have no indices
        return ""
    expected = (rows.index(parts[0]), columns.index(parts[1]))
    return "" if indices == expected else f"{path!r} has the indices {indices}, and is at {expected}"


def check_well(place: Place) -> Iterator[Told]:
    """Check that the images of a well exist."""
    if "well" in place.ome:
        well = place.ome["well"]
        images = well.get("images") if isinstance(well, Mapping) else None
        if not isinstance(images, list) or not all(
            isinstance(i, Mapping) and isinstance(i.get("path"), str) for i in images
        ):
            yield place.tell("well", f"the well has no list of images with paths: {well!r}", _NOT_FOUND)
            return
        yield from _members(place, [image["path"] for image in images], "image", "well", "multiscales")


def check_series(place: Place) -> Iterator[Told]:
    """Check that the images of a collection of bioformats2raw exist."""
    layout = place.ome.get("bioformats2raw.layout")
    if "bioformats2raw.layout" not in place.ome or "plate" in place.ome:
        return
    if layout != 3:
        yield place.tell("bioformats2raw.layout", f"bioformats2raw.layout is {layout!r}; only 3 is defined")
    yield from _members(place, list(image_paths(place.group)), "series", "series", "multiscales")


def _members(place: Place, paths: list[str], named: str, topic: str, key: str = "") -> Iterator[Told]:
    """Check that groups exist, and have the attribute `key`: by default, the name of what they are."""
    key = key or named
    lost = []
    for path in paths:
        node, reason = place.open(path)
        if not isinstance(node, zarr.Group) or key not in ome_attributes(node):
            lost.append(f"{path!r}: {reason or f'no group with the attribute {key!r}'}")
    if lost:
        what = f"{len(lost)} of {len(paths)} {named}s that the metadata list are not there: {'; '.join(lost[:3])}"
        advice = "Copy them again from where they came from, or remove them from the list."
        yield place.tell(topic, what, _NOT_FOUND, advice, "missing", count=len(lost))


#: The checks of this module.
CHECKS = (check_labels, check_image_label, check_plate, check_well, check_series)
