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
from linumpy.io.ngff.axes import MICROMETERS
from linumpy.io.ngff.collection import image_paths, ome_attributes
from linumpy.verification.place import NOT_UNDERSTOOD, Place, Told, listed, readable_image, reason_of, shown

_NOT_FOUND = "Programs that look for it by the metadata do not find it."


def check_labels(place: Place) -> Iterator[Told]:
    """Check a group of labels: the listed ones, and others in it."""
    names = place.ome.get("labels")
    if "multiscales" in place.ome or (names is None and place.group.path.rpartition("/")[2] != "labels"):
        return
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        yield place.tell("labels", f"labels is no list of paths: {shown(names)}", _NOT_FOUND)
        return
    for name in names or ():
        label = yield from place.opened(name, zarr.Group, "label image", "labels")
        if not isinstance(label, zarr.Group):
            continue
        if "image-label" not in ome_attributes(label):
            what = "it is listed as a label image, and has no attribute 'image-label'"
            yield place.tell("labels", what, "Programs do not know that its values are labels.", below=name)
        yield from _same_extent(place, name, label)
    known = {name.strip("/").split("/")[0] for name in names or ()}
    for name in member_names(place.group) or ():
        member = place.open(name)[0] if name not in known else None
        if isinstance(member, zarr.Group) and "multiscales" in ome_attributes(member):
            what = f"the image {name!r} is not among the labels that the metadata list: {', '.join(known) or 'none'}"
            effect = "Viewers do not show it, or show it beside the image."
            yield place.tell("labels", what, effect, "Add it to the list, or remove it.", below=name)


def _same_extent(place: Place, name: str, label: zarr.Group) -> Iterator[Told]:
    """Compare the voxels and the extent of a label image with those of the image, along each axis of space."""
    image = _image_at(place, "..") if place.group.path else None
    own, others = _sizes(label), _sizes(image) if image is not None else {}
    for axis in [axis for axis in own if axis in others]:
        (count, step, unit), (n, other_step, other_unit) = own[axis], others[axis]
        if unit in MICROMETERS and other_unit in MICROMETERS:
            step, other_step = step * MICROMETERS[unit], other_step * MICROMETERS[other_unit]
        same_scale = abs(step - other_step) <= 1e-6 * max(step, other_step)
        if abs(count * step - n * other_step) > (1e-6 if same_scale else 1.001) * max(step, other_step):
            what = f"{count} voxels of {step:g} along {axis}, and the image has {n} of {other_step:g}"
            effect = "Labels are shown in other places than what they label."
            yield place.tell("labels", what, effect, "Correct the scale of the labels.", "misplaced", name)


def _sizes(group: zarr.Group) -> dict[str, tuple[int, float, str]]:
    """Return number, step and unit of voxels of the finest level by axes of space; empty if they are not known."""
    image = readable_image(group)
    if image is None:
        return {}
    shape, scale = image.levels[0].shape, image.scale[0]
    return {image.axes[n].name: (shape[n], scale[n], str(image.axes[n].unit)) for n in image.spatial_axes}


def _image_at(place: Place, path: str) -> zarr.Group | None:
    """Open the image at a path relative to the group, which may lead out of it; None if there is none."""
    where = posixpath.normpath(posixpath.join(place.group.path or ".", path))
    try:
        node = open_stored(StorePath(place.group.store, "" if where == "." else where))
    except NOT_UNDERSTOOD as error:
        reason_of(error)
        return None
    return node if isinstance(node, zarr.Group) and "multiscales" in ome_attributes(node) else None


def check_image_label(place: Place) -> Iterator[Told]:
    """Check a label image: its type of voxels, and the image that it names as its source."""
    described = place.ome.get("image-label", {})
    source = described.get("source") if isinstance(described, Mapping) else described
    if not isinstance(described, Mapping) or not isinstance(source, Mapping | None):
        what = f"image-label or its source is no object: {shown(described)}"
        yield place.tell("image-label", what)
        return
    image = readable_image(place.group) if "image-label" in place.ome else None
    if image is not None and image.levels[0].dtype.kind not in "ui":
        what = f"the voxels of a label image are {image.levels[0].dtype}; NGFF wants integers"
        yield place.tell("image-label", what, "Programs refuse the labels, or show them as an image.")
    path = source.get("image") if source else None
    if path is None:
        return
    is_outside = posixpath.normpath(posixpath.join(place.group.path or ".", str(path))).startswith(("..", "/"))
    if not isinstance(path, str) or (not is_outside and _image_at(place, path) is None):
        what = f"the labels name the image {path!r} as their source, and there is none"
        yield place.tell("image-label", what, _NOT_FOUND, "Correct the path, which is relative to the label image.")


def check_plate(place: Place) -> Iterator[Told]:
    """Check a plate: rows, columns, and that wells are where their indices say, and exist."""
    if "plate" not in place.ome:
        return
    plate = place.ome["plate"]
    rows, columns, wells = (_objects(plate, key) for key in ("rows", "columns", "wells"))
    if rows is None or columns is None or wells is None:
        yield place.tell("plate", "the plate has no lists of objects for rows, columns, wells", _NOT_FOUND)
        return
    names = [[entry.get("name") for entry in entries] for entries in (rows, columns)]
    if any(len(set(map(repr, of))) < len(of) or not all(isinstance(name, str) for name in of) for of in names):
        what = f"the names of the plate's rows or columns are not different texts: {shown(names)}"
        yield place.tell("plate", what)
    problems = [problem for well in wells if (problem := _well_problem(well, *names))]
    if problems:
        what = f"{len(problems)} wells are not where their indices say: {listed(problems)}"
        yield place.tell("plate", what, "Programs show wells in wrong places of the plate.", count=len(problems))
    yield from _members(place, [well["path"] for well in wells if isinstance(well.get("path"), str)], "well", "plate")


def _objects(holder: object, key: str) -> list[Any] | None:
    """Return the list of objects at a key; None if there is no such list."""
    entries = holder.get(key) if isinstance(holder, Mapping) else None
    is_list = isinstance(entries, list) and all(isinstance(entry, Mapping) for entry in entries)
    return entries if is_list else None


def _well_problem(well: Mapping[str, Any], rows: list[Any], columns: list[Any]) -> str:
    """Return how the path of a well and its indices disagree; empty if they agree."""
    path, indices = well.get("path"), (well.get("rowIndex"), well.get("columnIndex"))
    parts = path.split("/") if isinstance(path, str) else []
    if len(parts) != 2 or parts[0] not in rows or parts[1] not in columns:
        return f"the path {path!r} is no row and column"
    expected = (rows.index(parts[0]), columns.index(parts[1]))
    # NGFF 0.1 to 0.3 have no indices.
    return "" if indices in (expected, (None, None)) else f"{path!r} has the indices {indices}, and is at {expected}"


def check_well(place: Place) -> Iterator[Told]:
    """Check that the images of a well exist."""
    if "well" in place.ome:
        images = _objects(place.ome["well"], "images")
        if images is None or not all(isinstance(image.get("path"), str) for image in images):
            yield place.tell("well", f"the well has no list of images with paths: {shown(images)}", _NOT_FOUND)
            return
        yield from _members(place, [image["path"] for image in images], "image", "well", "multiscales")


def check_series(place: Place) -> Iterator[Told]:
    """Check that the images of a collection of bioformats2raw exist."""
    key = "bioformats2raw.layout"
    if key in place.ome and "plate" not in place.ome:
        if place.ome[key] != 3:
            yield place.tell(key, f"{key} is {place.ome[key]!r}; only 3 is defined")
        yield from _members(place, list(image_paths(place.group)), "series", "series", "multiscales")


def _members(place: Place, paths: list[str], named: str, topic: str, key: str = "") -> Iterator[Told]:
    """Check that groups exist, and have the attribute `key`: by default, the name of what they are."""
    key, lost = key or named, []
    for path in paths:
        node, reason = place.open(path)
        if not isinstance(node, zarr.Group) or key not in ome_attributes(node):
            lost.append(f"{path!r}: {reason or f'no group with the attribute {key!r}'}")
    if lost:
        what = f"{len(lost)} of {len(paths)} {named}s that the metadata list are not there: {listed(lost)}"
        advice = "Copy them again from where they came from, or remove them from the list."
        yield place.tell(topic, what, _NOT_FOUND, advice, "missing", count=len(lost))


#: The checks of this module, by the attribute that each is about.
CHECKS = {
    "labels": check_labels, "image-label": check_image_label, "plate": check_plate, "well": check_well,
    "series": check_series,
}  # fmt: skip
