"""Check the NGFF metadata of a group, versions 0.1 to 0.6: multiscale images and their channels.

In: a group, and its path for the findings. Out: findings, also for documents that nobody can interpret. Arrays are
opened, no voxel is read. Groups of images are checked by :mod:`linumpy.verification.ngff_groups`, consolidated metadata
by :mod:`linumpy.verification.consolidated`. Errors: only those of the storage.

Formats: https://ngff.openmicroscopy.org/0.1/ and so on to https://ngff.openmicroscopy.org/0.6/
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import zarr

from linumpy.errors import MetadataError
from linumpy.io.ngff.axes import (
    UNITS_OF_SPACE,
    UNITS_OF_TIME,
    Axis,
    axes_of,
    compose_scales,
    datasets_of,
    is_number,
    mappings_in,
    transformations_of_levels,
)
from linumpy.io.ngff.coordinate_systems import TurnedLevelError, as_axes_and_scales, referred, with_unit_steps
from linumpy.io.ngff.transformations import FIELDS, TransformationReader, UnknownTransformationError
from linumpy.plan.grid.point_map import as_matrix
from linumpy.plan.read import format_shape
from linumpy.verification.consolidated import check_consolidated
from linumpy.verification.findings import Finding
from linumpy.verification.ngff_groups import CHECKS
from linumpy.verification.place import Place, Told, check_schema, readable_image, shown

#: Voxels by which the size and the origin of a level may be off.
_TOLERANCE = 1e-3
#: Coarse voxels by which a level may begin before and after the finest one.
_EARLIEST, _LATEST = -0.5, 1.0

_NAMES = ("t", "c", "z", "y", "x")
#: Types of axes in the order that NGFF wants; other types come with the channels.
_ORDER = {"time": 0, "space": 2}

_MISPLACED = "Programs show this level in another place or size than the finest one, and measure wrong lengths in it."
_CORRECT_LEVEL = "Correct the scale and translation of the level, or make the level again."

Step = tuple[tuple[float, ...], tuple[float, ...]]
"""Scale and translation of a level along all axes."""


def check_group(group: zarr.Group, path: str, notes: list[str]) -> Iterator[Finding]:
    """Check the NGFF attributes of a group, without its members, and its consolidated metadata.

    - `path`: path of the group below the source, for the findings.
    - `notes`: what the metadata do not tell, though NGFF does not demand it, is appended.
    """
    place, told = Place(group, path), set[str]()
    images = {"version": _versions, "multiscales": lambda place: _images(place, notes), "omero": _omero}
    for key, check in {**images, **CHECKS, "consolidated": check_consolidated}.items():
        for topic, finding in place.guarded(check(place), key):
            told.add(topic)
            yield finding
    yield from check_schema(place, told)


def _versions(place: Place) -> Iterator[Told]:
    """Check that the stated versions are known, and belong where they are stated."""
    if "ome" in place.attributes:
        if not isinstance(place.attributes["ome"], Mapping):
            yield place.tell("version", f"the attribute 'ome' is {shown(place.attributes['ome'])}, not an object")
            return
        stated, pattern, known = [("ome", place.ome)], r"0\.[56]([.-].*)?", "0.5 and 0.6"
    else:
        keys = ("plate", "well", "image-label", "omero")
        stated = [(key, place.ome[key]) for key in keys if isinstance(place.ome.get(key), Mapping)]
        stated += [("multiscales", image) for image in mappings_in(place.ome, "multiscales")]
        pattern, known = r"0\.[1-4]", "0.1 to 0.4; later ones have their attributes below 'ome'"
    for key, holder in stated:
        version = holder.get("version")
        if version is None and key in ("ome", "multiscales"):
            advice = "Add the version: --repair does it where it is sure."
            yield place.tell("version", f"{key} has no version of NGFF", advice=advice)
        elif version is not None and not (isinstance(version, str) and re.fullmatch(pattern, version)):
            yield place.tell("version", f"{key} has the version {version!r}; known there are {known}")


def _minor_version(place: Place, image: Mapping[str, Any]) -> int:
    """Return the minor version of a multiscale image; if none is stated, the one whose form it has."""
    version = (place.ome if "ome" in place.attributes else image).get("version")
    if isinstance(version, str) and re.match(r"0\.[1-6](\D|$)", version):
        return int(version[2])
    axes = image.get("axes")
    if "coordinateSystems" in image or axes is None:
        return 6 if "coordinateSystems" in image else 2
    return 3 if isinstance(axes, list) and all(isinstance(axis, str) for axis in axes) else 4


def _images(place: Place, notes: list[str]) -> Iterator[Told]:
    if "multiscales" not in place.ome:
        return
    images = place.ome["multiscales"]
    if not isinstance(images, list) or not images or not all(isinstance(image, Mapping) for image in images):
        yield place.tell("multiscales", f"multiscales is no list of objects: {shown(images)}")
        return
    for number, image in enumerate(images):
        yield from place.guarded(_image(place, image, f"multiscale image {number}", notes), "multiscales")


def _image(place: Place, image: Mapping[str, Any], name: str, notes: list[str]) -> Iterator[Told]:
    minor, turned, plain = _minor_version(place, image), False, image
    arrays = yield from _levels(place, image, name)
    if minor <= 3:
        names = image.get("axes", [*_NAMES] if minor < 3 else None)
        if not isinstance(names, list) or not names or names != [axis for axis in _NAMES if axis in names]:
            what = f"{name}: the axes {shown(names)} are no names out of t, c, z, y, x in this order"
            yield place.tell("axes", what)
            return
    else:
        if minor == 6 and "coordinateSystems" in image:
            yield from _transformations(place, image, name)
            try:
                plain = as_axes_and_scales(image, name)
            except TurnedLevelError:
                plain, turned = with_unit_steps(image, name), True
        axes = axes_of(plain, name)
        yield from _axes(place, axes, name, notes)
        names = [axis.name for axis in axes]
    for path, array in arrays.items():
        if array.ndim != len(names):
            what = f"level {path!r} has {array.ndim} axes, and the metadata name {', '.join(names)}"
            yield place.tell("axes", what)
            return
    if minor >= 4 and not turned:
        steps = yield from _steps(place, plain, len(axes), name)
        yield from _compare_levels(place, axes, {path: (arrays[path], steps[path]) for path in arrays if path in steps})


def _levels(place: Place, image: Mapping[str, Any], name: str) -> Generator[Told, None, dict[str, zarr.Array]]:
    """Open the levels; check that they exist, have one dtype, and do not grow."""
    arrays: dict[str, zarr.Array] = {}
    datasets = datasets_of(image, name)
    if not datasets:
        yield place.tell("datasets", f"{name} names no resolution levels")
    for dataset in datasets:
        path = str(dataset["path"])
        node = yield from place.opened(path, zarr.Array, "resolution level", "datasets")
        if isinstance(node, zarr.Array):
            arrays[path] = node
    for (finer, before), (path, array) in itertools.pairwise(arrays.items()):
        if array.dtype != before.dtype:
            what = f"level {path!r} has dtype {array.dtype}, and level {finer!r} has {before.dtype}"
            yield place.tell("datasets", what, "Programs that take one dtype for all levels convert or misread it.")
        if array.ndim == before.ndim and any(n > m for n, m in zip(array.shape, before.shape, strict=True)):
            sizes = f"{format_shape(array.shape)}, more than {format_shape(before.shape)} of level {finer!r}"
            advice = "List the levels from the finest to the coarsest."
            yield place.tell("datasets", f"level {path!r} has {sizes}", _MISPLACED, advice, "misplaced", path)
    return arrays


def _axes(place: Place, axes: Sequence[Axis], name: str, notes: list[str]) -> Iterator[Told]:
    """Check the types, the order and the units of axes; note axes of space without a unit, which NGFF allows."""
    described = ", ".join(f"{axis.name} ({axis.type})" for axis in axes)
    untyped = [axis.name for axis in axes if axis.type is None and axis.name.lower() in _NAMES]
    ranks = [_ORDER.get(str(axis.type), 1) for axis in axes]
    if untyped:
        advice = "Add the types: --repair does it for t, c, z, y and x."
        yield place.tell("axes", f"{name}: axes without a type: {', '.join(untyped)}", advice=advice)
    elif not 2 <= sum(axis.type == "space" for axis in axes) <= 3:
        yield place.tell("axes", f"{name}: NGFF wants 2 or 3 axes of type space, and there are {described}")
    elif ranks != sorted(ranks) and not {axis.type for axis in axes} & set(FIELDS.values()):
        yield place.tell("axes", f"{name}: NGFF wants time, then channel, then space, and the axes are {described}")
    missing = ", ".join(axis.name for axis in axes if axis.type == "space" and axis.unit is None)
    note = f"lengths along {missing}, which have no unit; `linum-verify --repair --unit NAME` adds one"
    if missing and note not in notes:
        notes.append(note)
    for axis in axes:
        known = {"space": UNITS_OF_SPACE, "time": UNITS_OF_TIME}.get(str(axis.type))
        if known and axis.unit is not None and axis.unit not in known:
            what = f"{name}: axis {axis.name!r} has the unit {axis.unit!r}, which NGFF does not name"
            effect = "Some programs refuse it, others show lengths without a unit."
            yield place.tell("unit", what, effect, "Write a name of the list, such as 'micrometer' or 'second'.")


def _steps(place: Place, image: Mapping[str, Any], rank: int, name: str) -> Generator[Told, None, dict[str, Step]]:
    """Return the scale and translation of each level that has good ones."""
    steps = {}
    for dataset in datasets_of(image, name):
        path = str(dataset["path"])
        try:
            (chain,) = transformations_of_levels(image, [dataset], True, name)
            if any("path" in transformation for transformation in chain):  # numbers in an array, which no program reads
                continue
            scale, translation = compose_scales(chain, rank, f"{name}, level {path!r}")
        except MetadataError as error:
            yield place.tell("datasets", str(error), _MISPLACED, _CORRECT_LEVEL, "misplaced", path)
            continue
        if all(step > 0 and math.isfinite(step) for step in scale) and all(map(math.isfinite, translation)):
            steps[path] = scale, translation
        else:
            what = f"{name}: level {path!r} has the scale {_numbers(scale)} and the translation {_numbers(translation)}"
            what += ", which must be finite, and the scale positive"
            yield place.tell("datasets", what, _MISPLACED, _CORRECT_LEVEL, "misplaced", path)
    return steps


def _compare_levels(
    place: Place, axes: Sequence[Axis], levels: Mapping[str, tuple[zarr.Array, Step]]
) -> Iterator[Told]:
    """Compare sizes and scales of a level with those of the finer one, and its origin with that of the finest one."""
    paths = list(levels)
    for number, path in enumerate(paths[1:], 1):
        array, (scale, translation) = levels[path]
        for axis, described in enumerate(axes):
            finer = [
                (levels[p][0].shape[axis], levels[p][1][0][axis]) for p in dict.fromkeys((paths[number - 1], paths[0]))
            ]
            size, step = array.shape[axis], scale[axis]
            if not any(_is_size(size, n * fine / step) for n, fine in finer):
                n, fine = finer[0]
                what = (
                    f"level {path!r} has {size} voxels of {step:g} along {described.name}, and {paths[number - 1]!r} "
                    f"has {n} of {fine:g}: a factor of {step / fine:g} gives {n * fine / step:g} voxels"
                )
                yield place.tell("datasets", what, _MISPLACED, _CORRECT_LEVEL, "misplaced", path)
            first = levels[paths[0]][1][1][axis]
            shift = (translation[axis] - first) / step
            if described.type == "space" and not _EARLIEST - _TOLERANCE <= shift <= _LATEST + _TOLERANCE:
                what = (
                    f"level {path!r} begins at {translation[axis]:g} along {described.name}, and level {paths[0]!r} at "
                    f"{first:g}: apart by {shift:g} voxels of {step:g}, not by {_EARLIEST:g} to {_LATEST:g}"
                )
                yield place.tell("datasets", what, _MISPLACED, _CORRECT_LEVEL, "misplaced", path)


def _is_size(size: int, exact: float) -> bool:
    """Return whether a level of so many voxels is what a whole or broken factor makes of a finer one."""
    return math.isfinite(exact) and math.floor(exact + _TOLERANCE) <= size <= math.ceil(exact - _TOLERANCE)


def _transformations(place: Place, image: Mapping[str, Any], name: str) -> Iterator[Told]:
    """Check the transformations of NGFF 0.6: systems that are not described, and maps that cannot be inverted."""
    ranks = {referred(system): len(mappings_in(system, "axes")) for system in mappings_in(image, "coordinateSystems")}
    further = mappings_in(image, "coordinateTransformations")
    for transformation in further:
        for end in ("input", "output"):
            reference = transformation.get(end)
            if isinstance(reference, Mapping) and reference.get("path"):  # a system of another group
                continue
            if referred(reference) not in ranks:
                what = f"{name}: a transformation has the {end} {shown(reference)}, which is no coordinate system here"
                yield place.tell("datasets", what, advice="Describe the system, or correct the name.")
    of_levels = [t for level in mappings_in(image, "datasets") for t in mappings_in(level, "coordinateTransformations")]
    for transformation in (*further, *of_levels):
        is_level = transformation in of_levels
        system = referred(transformation.get("output" if is_level else "input"))
        try:
            rank = ranks.get(system, 0)
            matrix = as_matrix(TransformationReader(None, name).read(transformation, rank), rank) if rank else None
        except UnknownTransformationError:
            continue  # its numbers are in an array, or it is a field
        if matrix is None or len(matrix) != rank:
            continue
        linear = matrix[:, :-1]
        is_flipped = is_level and np.array_equal(linear, np.diag(np.diag(linear))) and (np.diag(linear) < 0).any()
        if is_flipped or np.linalg.matrix_rank(linear) < rank:
            problem = "has a negative scale" if is_flipped else "is singular: points cannot be mapped back"
            what = f"{name}: a transformation of type {transformation.get('type')!r} to or from {system!r} {problem}"
            yield place.tell("datasets", what, _MISPLACED, "Correct its numbers.", "misplaced")


def _omero(place: Place) -> Iterator[Told]:
    if "omero" not in place.ome:
        return
    omero, effect = place.ome["omero"], "Viewers show channels with wrong colours or contrast, or refuse the image."
    channels = omero.get("channels") if isinstance(omero, Mapping) else None
    if not isinstance(channels, list) or not all(isinstance(channel, Mapping) for channel in channels):
        yield place.tell("omero", f"omero has no list of channels: {shown(omero)}", effect)
        return
    wanted = _channels(place)
    if wanted is not None and len(channels) != wanted:
        yield place.tell("omero", f"omero has {len(channels)} channels, and the image has {wanted}", effect)
    for number, channel in enumerate(channels):
        color, window = channel.get("color"), channel.get("window")
        if color is not None and not (isinstance(color, str) and re.fullmatch("[0-9a-fA-F]{6}", color)):
            yield place.tell(
                "omero", f"channel {number} has the color {shown(color)}, not 6 hexadecimal digits", effect
            )
        if window is None:
            continue
        start, end = [window.get(key) for key in ("start", "end")] if isinstance(window, Mapping) else (None, None)
        if start is None or end is None or not (is_number(start) and is_number(end) and start < end):
            what = f"channel {number} has the window {shown(window)}, whose start and end are no numbers start < end"
            yield place.tell("omero", what, effect)


def _channels(place: Place) -> int | None:
    """Return the number of channels of the first multiscale image; None if it is not known."""
    image = readable_image(place.group)
    if image is None:
        return None
    return next((n for n, axis in zip(image.levels[0].shape, image.axes, strict=True) if axis.type == "channel"), 1)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
