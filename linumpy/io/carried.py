"""What an image's metadata say beside its voxels and their grid of space, for an image that is made from it.

In: volumes of an OME-Zarr image. Out: :class:`Carried`, which names what
cannot be carried over too; linumpy's commands log it once. Errors: none, since what is not understood is not carried.

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

from linumpy.io.ngff import MICROMETERS
from linumpy.io.ome import OmeZarrImage, ome_attributes
from linumpy.io.volume import Chosen, Volumes

log = logging.getLogger(__name__)

#: Attributes of a group that NGFF has for itself, at the top (0.4) or below ``ome`` (0.5), and linumpy's own.
_NGFF = ("version", "multiscales", "omero", "image-label", "labels", "plate", "well", "bioformats2raw.layout", "series")
_OWN = ("ome", "linumpy", *_NGFF)
#: Keys of a multiscale image that every image has anew.
_ANEW = ("version", "name", "axes", "datasets", "coordinateTransformations", "type")


@dataclass(frozen=True)
class LeadingAxis:
    """The coordinates along an axis of time or channel.

    Attributes
    ----------
    scale, translation : float
        Step and position of the first entry, in the unit.
    unit : str or None
        As the metadata spells it.
    """

    scale: float = 1.0
    translation: float = 0.0
    unit: str | None = None


@dataclass(frozen=True)
class Carried:
    """What an image made from another may keep of its metadata.

    Attributes
    ----------
    name : str or None
        Of the multiscale image.
    ngff_version : str
        Of the source.
    units : mapping of str to str
        Unit of length of each axis of space, by its name; axes without a known one are written in µm.
    leading : mapping of str to LeadingAxis
        Those of ``"t"`` and ``"c"`` that are kept.
    omero : mapping or None
        How channels are named and shown, of those that are kept.
    image_label : mapping or None
        Colors and properties of labels, where the source is a label image.
    attributes : mapping
        Of the group, as others have written them.
    labels : tuple of str
        Names of the label images inside of the source.
    own : mapping
        What linumpy keeps beside NGFF's metadata, but for where a resampled image comes from.
    dropped : tuple of str
        What is not carried over, in words.
    """

    name: str | None = None
    ngff_version: str = "0.5"
    units: Mapping[str, str] = field(default_factory=dict)
    leading: Mapping[str, LeadingAxis] = field(default_factory=dict)
    omero: Mapping[str, Any] | None = None
    image_label: Mapping[str, Any] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    own: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()

    def without(self, *parts: str) -> Carried:
        """Leave out any of omero, image_label, labels, attributes and own; note those that are there."""
        gone = [part for part in parts if getattr(self, part)]
        words = tuple(_words(part, getattr(self, part)) for part in gone)
        empty = Carried()
        return replace(self, **{part: getattr(empty, part) for part in gone}, dropped=self.dropped + words)

    def on_another_grid(self) -> Carried:
        """Leave out what counts planes of the source: the one that viewers show first."""
        rdefs = self.omero.get("rdefs") if self.omero is not None else None
        if self.omero is None or not isinstance(rdefs, Mapping) or "defaultZ" not in rdefs:
            return self
        kept = {key: value for key, value in rdefs.items() if key != "defaultZ"}
        return replace(self, omero={**self.omero, "rdefs": kept}, dropped=(*self.dropped, "omero's defaultZ"))

    def shared_with(self, others: Sequence[Carried]) -> Carried:
        """Keep of omero and attributes what all of several sources say alike."""
        attributes = {
            key: value
            for key, value in self.attributes.items()
            if all(key in one.attributes and one.attributes[key] == value for one in others)
        }
        omero = self.omero if all(one.omero == self.omero for one in others) else None
        found = {key for one in (self, *others) for key in one.attributes} - attributes.keys()
        words = [f"the attribute {key!r}, in which they differ" for key in sorted(found)]
        if omero is None and any(one.omero for one in (self, *others)):
            words.append("omero, in which they differ")
        dropped = dict.fromkeys([*(word for one in (self, *others) for word in one.dropped), *words])
        labels = dict.fromkeys(name for one in (self, *others) for name in one.labels)
        return replace(
            self, name=None, omero=omero, attributes=attributes, labels=tuple(labels), dropped=tuple(dropped)
        )

    def log_dropped(self, source: object, target: object) -> None:
        """Log once what is not carried over from the source to the new image."""
        if self.dropped:
            log.warning("%s: not carried over from %s: %s", target, source, "; ".join(self.dropped))


def carried_from(volumes: Volumes) -> Carried:
    """Collect what may be carried over from the volumes that are taken of an image; of a single array nothing."""
    chosen = volumes.chosen
    if chosen is None:
        return Carried()
    image, group = chosen.image, chosen.image.group
    scale, translation = image.scale[chosen.level], image.translation[chosen.level]
    everything, ome = group.attrs.asdict(), ome_attributes(group)
    multiscale, name = ome["multiscales"][0], ome["multiscales"][0].get("name")
    omero, label, labels = ome.get("omero"), ome.get("image-label"), _label_names(group)
    spatial = [image.axes[axis] for axis in image.spatial_axes]
    return Carried(
        name=name if isinstance(name, str) and name else None,
        ngff_version=image.version,
        units={axis.name.lower(): str(axis.unit) for axis in spatial if _text(axis.unit) in MICROMETERS},
        leading={
            one: LeadingAxis(scale[axis], translation[axis], _text(image.axes[axis].unit))
            for one, axis in chosen.leading.items()
        },
        omero=_omero(omero, chosen) if isinstance(omero, Mapping) else None,
        image_label=label if isinstance(label, Mapping) else None,
        attributes={key: value for key, value in everything.items() if key not in _OWN},
        labels=labels,
        own={key: value for key, value in image.linumpy.items() if key != "resampled"},
        dropped=(
            *(f"the multiscale image {number}" for number in range(1, len(ome["multiscales"]))),
            *(f"{key!r} of the multiscale image" for key in multiscale if key not in _ANEW),
            *(f"{key!r} of NGFF" for key in ome if key in ("plate", "well")),
            *(f"{key!r} below 'ome'" for key in ome if "ome" in everything and key not in _NGFF),
            *_single_entries(chosen),
            *(f"attribute {key!r} of array {array.basename}" for array in image.levels for key in _attributes(array)),
            *(f"the group {name!r}" for name in _other_groups(image, labels)),
        ),
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _attributes(array: zarr.Array) -> list[str]:
    return [key for key in array.attrs if key != "_ARRAY_DIMENSIONS"]


def _omero(omero: Mapping[str, Any], chosen: Chosen) -> Mapping[str, Any]:
    """Take omero's settings of the channels that are kept; of one channel, that alone."""
    kept, channels, rdefs = dict(omero), omero.get("channels"), omero.get("rdefs")
    if chosen.channel is not None and isinstance(channels, list):
        kept["channels"] = channels[chosen.channel : chosen.channel + 1]
    if chosen.time is not None and isinstance(rdefs, Mapping):
        kept["rdefs"] = {key: value for key, value in rdefs.items() if key != "defaultT"}
    return kept


def _single_entries(chosen: Chosen) -> Iterator[str]:
    """Describe axes of which one entry is taken, and which say where that is."""
    image, level = chosen.image, chosen.level
    kept = {*image.spatial_axes, *chosen.leading.values()}
    for number, axis in enumerate(image.axes):
        step, first = image.scale[level][number], image.translation[level][number]
        if number not in kept and (axis.unit is not None or (step, first) != (1, 0)):
            yield f"the axis {axis.name} (scale {step:g}, translation {first:g}, {axis.unit or 'no unit'})"


def _label_names(group: zarr.Group) -> tuple[str, ...]:
    """Names of the label images that the group lists."""
    try:
        labels = group.get("labels")
    except PermissionError as error:  # some object stores answer so for what is not there
        log.warning("%s: its labels, if there are any, cannot be read: %s", group.store_path, error)
        labels = None
    names = ome_attributes(labels).get("labels") if isinstance(labels, zarr.Group) else None
    return tuple(one for one in names if isinstance(one, str)) if isinstance(names, list) else ()


def _other_groups(image: OmeZarrImage, labels: tuple[str, ...]) -> list[str]:
    """Name what else a local image holds: groups and arrays that are neither a resolution of it nor its labels."""
    store = image.group.store
    if not isinstance(store, LocalStore):
        return []
    prefix = image.group.path
    known = {one.path.removeprefix(prefix).strip("/").split("/")[0] for one in image.levels}
    known |= {"labels"} if labels else set()
    files = ("zarr.json", ".zgroup", ".zarray")
    with suppress(OSError):  # only to say what is left out
        found = sorted(one for one in (Path(store.root) / prefix).iterdir() if one.is_dir() and one.name not in known)
        return [one.name for one in found if any((one / name).is_file() for name in files)]
    return []


def _words(part: str, value: Any) -> str:
    if part == "labels":
        return f"the labels {', '.join(value)}"
    if part in ("attributes", "own"):
        return ("the attributes " if part == "attributes" else "linumpy's ") + ", ".join(map(repr, value))
    return {"omero": "omero (names, colours and windows of channels)", "image_label": "'image-label' of NGFF"}[part]
