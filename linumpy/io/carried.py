"""Metadata that an image made from another image keeps: all except the spatial grid. Unknown metadata are not copied.

Formats: https://ngff.openmicroscopy.org/0.4/ and https://ngff.openmicroscopy.org/0.5/, sections "multiscales", "omero"
and "labels".
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import zarr
from zarr.storage import LocalStore

from linumpy.errors import MetadataError
from linumpy.io.codecs import encoding_like
from linumpy.io.metadata import open_optional
from linumpy.io.ngff.axes import MICROMETERS
from linumpy.io.ngff.collection import image_paths, ome_attributes
from linumpy.io.ngff.coordinate_systems import Multiscale, Systems, referred, stored_paths, systems_of
from linumpy.io.ome import OmeZarrImage
from linumpy.io.paths import is_zarr_folder
from linumpy.io.volume import Chosen, Volumes

log = logging.getLogger(__name__)

#: Attributes of a group that NGFF defines, at the top (0.4) or below ``ome`` (0.5).
_NGFF = ("version", "multiscales", "omero", "image-label", "labels", "plate", "well", "bioformats2raw.layout", "series")
#: Attributes of a group that NGFF or linumpy defines.
_DEFINED = ("ome", "linumpy", *_NGFF)
#: Keys of a multiscale image that the writer of a new image sets.
_REWRITTEN = ("version", "name", "axes", "datasets", "coordinateSystems", "coordinateTransformations", "type")
#: Keys of the ``metadata`` of a multiscale image that describe how its resolutions were made.
_METHOD_KEYS = {"description", "method", "version", "args", "kwargs"}


@dataclass(frozen=True)
class LeadingAxis:
    """Step between entries, and position of the first, along an axis of time or channel, in the metadata's unit."""

    scale: float = 1.0
    translation: float = 0.0
    unit: str | None = None


@dataclass(frozen=True)
class Carried:
    """The metadata that an image made from another image keeps.

    Attributes
    ----------
    name : str or None
        Name of the multiscale image.
    ngff_version : str
        NGFF version of the source, or the closest one for its Zarr format.
    units : mapping of str to str
        Unit of length of each axis of space, by the name of the axis; axes without a known unit are written in µm.
    orientations : mapping of str to mapping
        Anatomical orientations (RFC-4) of axes of space, by the name of the axis.
    leading : mapping of str to LeadingAxis
        Coordinates along the kept axes among ``"t"`` and ``"c"``.
    omero : mapping or None
        Names and display settings of the kept channels; None without such metadata.
    image_label : mapping or None
        Colors and properties of labels, if the source is a label image.
    attributes : mapping
        Attributes of the group that neither NGFF nor linumpy defines.
    labels : tuple of str
        Names of the label images inside the source.
    systems : Systems or None
        Coordinate systems (NGFF 0.6) to which the transformations of the image lead; None before NGFF 0.6.
    own : mapping
        linumpy's own metadata, without the origin of a resampled image.
    codec : str or None
        Name of the codec most similar to the codecs of the chunks; None if no name is similar.
    dropped : tuple of str
        Descriptions of all metadata that are not copied.
    """

    name: str | None = None
    ngff_version: str = "0.5"
    units: Mapping[str, str] = field(default_factory=dict)
    orientations: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    leading: Mapping[str, LeadingAxis] = field(default_factory=dict)
    omero: Mapping[str, object] | None = None
    image_label: Mapping[str, object] | None = None
    attributes: Mapping[str, object] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    systems: Systems | None = None
    own: Mapping[str, object] = field(default_factory=dict)
    codec: str | None = None
    dropped: tuple[str, ...] = ()

    def without(self, *parts: str) -> Carried:
        """Drop some of orientations, omero, image_label, labels, systems, attributes and own.

        Those that are not empty are added to :attr:`dropped`.
        """
        present = [part for part in parts if getattr(self, part)]
        words = tuple(word for part in present if (word := _describe(part, getattr(self, part))))
        empty = Carried()
        return replace(self, **{part: getattr(empty, part) for part in present}, dropped=self.dropped + words)

    def on_another_grid(self) -> Carried:
        """Drop omero's ``defaultZ``, the plane that viewers show first, which is an index of the source's planes."""
        rdefs = self.omero.get("rdefs") if self.omero is not None else None
        if self.omero is None or not isinstance(rdefs, Mapping) or "defaultZ" not in rdefs:
            return self
        kept = {key: value for key, value in rdefs.items() if key != "defaultZ"}
        return replace(self, omero={**self.omero, "rdefs": kept}, dropped=(*self.dropped, "omero's defaultZ"))

    def shared_with(self, others: Sequence[Carried]) -> Carried:
        """Merge the metadata of several sources.

        Omero, orientations and each attribute stay if all sources agree. The labels of all sources stay. Name and
        coordinate systems are dropped. The rest is taken from this source.
        """
        attributes = {
            key: value
            for key, value in self.attributes.items()
            if all(key in other.attributes and other.attributes[key] == value for other in others)
        }
        orientations = self.orientations if all(o.orientations == self.orientations for o in others) else {}
        omero = self.omero if all(other.omero == self.omero for other in others) else None
        keys = {key for carried in (self, *others) for key in carried.attributes} - attributes.keys()
        words = [f"the attribute {key!r}, in which they differ" for key in sorted(keys)]
        words += [word for carried in (self, *others) if (word := _describe("systems", carried.systems))]
        if not orientations and any(carried.orientations for carried in (self, *others)):
            words.append("the orientations of axes, in which they differ")
        if omero is None and any(carried.omero for carried in (self, *others)):
            words.append("omero, in which they differ")
        dropped = dict.fromkeys([*(word for carried in (self, *others) for word in carried.dropped), *words])
        labels = dict.fromkeys(name for carried in (self, *others) for name in carried.labels)
        return replace(
            self, name=None, orientations=orientations, omero=omero, attributes=attributes, labels=tuple(labels),
            systems=None, dropped=tuple(dropped),
        )  # fmt: skip

    def log_dropped(self, source: object, target: object) -> None:
        """Log a warning that lists the metadata that are not copied from the source to the new image, if any."""
        if self.dropped:
            log.warning("%s: not carried over from %s: %s", target, source, "; ".join(self.dropped))


def carried_from(volumes: Volumes) -> Carried:
    """Collect the metadata to copy from the selected volumes of an image; for a single array only the codec."""
    chosen, encoding = volumes.chosen, encoding_like(volumes.first.array)
    codec = None if encoding is None else str(encoding)
    if chosen is None:
        return Carried(codec=codec)
    image, group = chosen.image, chosen.image.group
    scale, translation = image.scale[chosen.level], image.translation[chosen.level]
    everything, ome = group.attrs.asdict(), ome_attributes(group)
    multiscale = ome["multiscales"][image.multiscale]
    name = multiscale.get("name")
    omero, label, listed = ome.get("omero"), ome.get("image-label"), open_optional(group, "labels")
    labels = tuple(image_paths(listed)) if isinstance(listed, zarr.Group) else ()
    systems, lost = _systems(chosen, multiscale)
    version, zarr_format = image.version, group.metadata.zarr_format
    if (version == "0.4") != (zarr_format == 2):  # the closest one that is for the Zarr format of the image
        version = "0.4" if zarr_format == 2 else "0.5"
    spatial, method = [image.axes[axis] for axis in image.spatial_axes], multiscale.get("metadata")
    describes_levels = isinstance(method, Mapping) and method.keys() <= _METHOD_KEYS
    rewritten = (*_REWRITTEN, *(["metadata"] if describes_levels else []))
    return Carried(
        name=name if isinstance(name, str) and name else None,
        ngff_version=version,
        units={axis.name.lower(): str(axis.unit) for axis in spatial if _text(axis.unit) in MICROMETERS},
        orientations={axis.name.lower(): axis.orientation for axis in spatial if axis.orientation is not None},
        leading={
            name: LeadingAxis(scale[axis], translation[axis], _text(image.axes[axis].unit))
            for name, axis in chosen.leading.items()
        },
        omero=_omero(omero, chosen) if isinstance(omero, Mapping) else None,
        image_label=label if isinstance(label, Mapping) else None,
        attributes=other_attributes(group),
        labels=labels,
        systems=systems,
        own={key: value for key, value in image.linumpy.items() if key != "resampled"},
        codec=codec,
        dropped=(
            *(
                f"the multiscale image {number}"
                for number in range(len(ome["multiscales"]))
                if number != image.multiscale
            ),
            *lost,
            *(f"{key!r} of the multiscale image" for key in multiscale if key not in rewritten),
            *(f"{key!r} of NGFF" for key in ome if key in ("plate", "well")),
            *(f"{key!r} below 'ome'" for key in ome if "ome" in everything and key not in _NGFF),
            *_single_entries(chosen),
            *(
                f"attribute {key!r} of array {array.basename}"
                for array in image.levels
                for key in array.attrs
                if key != "_ARRAY_DIMENSIONS"
            ),
            *(f"the group {name!r}" for name in _other_groups(image, labels)),
        ),
    )


def _systems(chosen: Chosen, multiscale: Multiscale) -> tuple[Systems | None, list[str]]:
    """Return the coordinate systems that a new image on the same axes keeps, and descriptions of the others."""
    image = chosen.image
    systems = systems_of(multiscale, image.name)
    if systems is None:
        return None, []
    try:
        has_order_of_arrays = image.system_order == tuple(range(len(image.axes)))
    except MetadataError:  # the levels are turned
        has_order_of_arrays = False
    # Transformations need all axes, in the order of the new image.
    has_all_axes = has_order_of_arrays and len(image.axes) == len(chosen.leading) + len(image.spatial_axes)
    # Paths of stored arrays are relative to the group of the source.
    kept = [one for one in systems.transformations if has_all_axes and not stored_paths(one)]
    named = [referred(transformation.get("output")) for transformation in kept]
    others = tuple(system for system in systems.others if system["name"] in named)
    lost = [f"the coordinate system {system['name']!r}" for system in systems.others if system not in others]
    return Systems(systems.intrinsic, others, tuple(kept)), lost


def other_attributes(group: zarr.Group) -> dict[str, Any]:
    """Return the attributes of an image's group that neither NGFF nor linumpy defines."""
    return {key: value for key, value in group.attrs.asdict().items() if key not in _DEFINED}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _omero(omero: Mapping[str, object], chosen: Chosen) -> Mapping[str, object]:
    """Return omero's metadata for the kept channels, without the default time if one time is selected."""
    kept, channels, rdefs = dict(omero), omero.get("channels"), omero.get("rdefs")
    if chosen.channel is not None and isinstance(channels, list):
        kept["channels"] = channels[chosen.channel : chosen.channel + 1]
    if chosen.time is not None and isinstance(rdefs, Mapping):
        kept["rdefs"] = {key: value for key, value in rdefs.items() if key != "defaultT"}
    return kept


def _single_entries(chosen: Chosen) -> Iterator[str]:
    """Describe the dropped axes, of which one entry is selected, if they have a unit, scale or translation."""
    image, level = chosen.image, chosen.level
    kept = {*image.spatial_axes, *chosen.leading.values()}
    for number, axis in enumerate(image.axes):
        step, first = image.scale[level][number], image.translation[level][number]
        if number not in kept and (axis.unit is not None or (step, first) != (1, 0)):
            yield f"the axis {axis.name} (scale {step:g}, translation {first:g}, {axis.unit or 'no unit'})"


def _other_groups(image: OmeZarrImage, labels: tuple[str, ...]) -> list[str]:
    """List the groups and arrays in a local image that are neither its resolution levels nor its labels."""
    store = image.group.store
    if not isinstance(store, LocalStore):
        return []
    prefix = image.group.path
    members = {level.path.removeprefix(prefix).strip("/").split("/")[0] for level in image.levels}
    members |= {"labels"} if labels else set()
    with suppress(OSError):  # needed for a log line only
        folders = sorted(
            folder for folder in (Path(store.root) / prefix).iterdir() if folder.is_dir() and folder.name not in members
        )
        return [folder.name for folder in folders if is_zarr_folder(folder)]
    return []


def _describe(part: str, value: Any) -> str:
    """Describe metadata that are dropped: the value of an attribute of :class:`Carried`; empty for no systems."""
    if part == "labels":
        return f"the labels {', '.join(value)}"
    if part in ("attributes", "own"):
        return ("the attributes " if part == "attributes" else "linumpy's ") + ", ".join(map(repr, value))
    if part == "systems":
        return "; ".join(f"the coordinate system {system['name']!r}" for system in (value.others if value else ()))
    if part == "orientations":
        return f"the orientations of the axes {', '.join(value)}"
    return {"omero": "omero (names, colours and windows of channels)", "image_label": "'image-label' of NGFF"}[part]
