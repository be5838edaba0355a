"""Metadata of a TIFF stack: spacing in µm, time step, names and colours of channels.

They are from the first of these that the file has: OME-XML, ImageJ's description, resolution tags. Lengths in other
units, such as ``pixel``, and what cannot be read are left out.

Formats: https://docs.openmicroscopy.org/ome-model/latest/ome-tiff/specification.html; ImageJ's TiffEncoder for its
description, in which the resolution tags are pixels per ``unit``; TIFF 6.0 for the tags.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

import numpy as np

from linumpy.io.carried import LeadingAxis
from linumpy.io.ngff.axes import MICROMETERS
from linumpy.io.stores.tiff import TiffStack

#: Length in µm of the units of OME and ImageJ.
_LENGTHS = {
    **MICROMETERS, "pm": 1e-6, "\u00c5": 1e-4, "\u212b": 1e-4, "micron": 1.0, "microns": 1.0, "cm": 1e4, "m": 1e6,
    "in": 25_400.0,
}  # fmt: skip
#: NGFF's names of the units of time of OME and ImageJ.
_TIMES = {
    "ns": "nanosecond", "\u00b5s": "microsecond", "us": "microsecond", "ms": "millisecond", "msec": "millisecond",
    "s": "second", "sec": "second", "min": "minute", "h": "hour", "hour": "hour", "d": "day", "day": "day",
}  # fmt: skip
#: Length in µm of the units of TIFF's tag ResolutionUnit: inch, centimetre, and tifffile's millimetre and micrometre.
_RESOLUTION_UNITS = {2: 25_400.0, 3: 1e4, 4: 1e3, 5: 1.0}


@dataclass(frozen=True)
class TiffMetadata:
    """The metadata of a TIFF stack.

    - `spacing`: voxel spacing in µm of each axis of space for which the file has a known length.
    - `leading`: the time step, by ``"t"``, if the file has one in a known unit.
    - `channels`: name, and colour as six hexadecimal digits, of each channel; empty if the file has neither.
    - `windows`: range of values that viewers show of each channel; empty without such ranges.
    - `is_of_tags`: whether the spacing is from resolution tags alone, which may be meant for printing.
    """

    spacing: Mapping[str, float] = field(default_factory=dict)
    leading: Mapping[str, LeadingAxis] = field(default_factory=dict)
    channels: tuple[tuple[str | None, str | None], ...] = ()
    windows: tuple[tuple[float, float], ...] = ()
    is_of_tags: bool = False

    def omero(self, dtype: np.dtype) -> dict[str, Any] | None:
        """Return omero's metadata of NGFF; None without names and colours.

        NGFF requires a colour and a range of values: white is OME's default, and without a range in the file it is that
        of the integer type, or 0 to 1.
        """
        if not any(name or colour for name, colour in self.channels):
            return None
        limits = (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (0, 1)
        windows = self.windows if len(self.windows) == len(self.channels) else (limits,) * len(self.channels)
        channels = []
        for number, ((name, colour), (start, end)) in enumerate(zip(self.channels, windows, strict=True)):
            window = {"start": start, "end": end, "min": min(limits[0], start), "max": max(limits[1], end)}
            label = name or f"channel {number}"
            channels.append({"label": label, "color": colour or "FFFFFF", "window": window, "active": True})
        return {"channels": channels}


def metadata_of(stack: TiffStack) -> TiffMetadata:
    """Read the metadata of a stack."""
    file, channel_count = stack.file, 1
    if "c" in stack.axes:
        channel_count = int(stack.array.shape[stack.order[stack.axes.index("c")]])
    if stack.series.kind == "ome" and (pixels := _ome_pixels(stack)) is not None:
        return _of_ome(pixels, channel_count)
    unit = file.pages.first.tags.valueof("ResolutionUnit")
    factor = _RESOLUTION_UNITS.get(int(unit)) if isinstance(unit, int) else None
    if file.imagej_metadata is not None:
        return _of_imagej(file.imagej_metadata, _tag_spacing(stack), factor, channel_count)
    return TiffMetadata() if factor is None else TiffMetadata(_known(_tag_spacing(stack), factor), is_of_tags=True)


def _known(steps: Mapping[str, float], factor: float) -> dict[str, float]:
    """Return the steps that are positive, multiplied by a factor."""
    return {axis: step * factor for axis, step in steps.items() if math.isfinite(step) and step > 0}


def _tag_spacing(stack: TiffStack) -> dict[str, float]:
    """Return the length of a pixel along y and x, in the unit of the resolution tags; empty without the tags."""
    tags, steps = stack.file.pages.first.tags, {}
    for axis, tag in (("y", "YResolution"), ("x", "XResolution")):
        fraction = tags.valueof(tag)
        if isinstance(fraction, tuple) and len(fraction) == 2 and fraction[0]:
            steps[axis] = fraction[1] / fraction[0]
    return steps


def _number(value: object) -> float:
    """Return a number in metadata as a float; NaN for anything else."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def _time_axis(step: object, unit: str) -> dict[str, LeadingAxis]:
    number, name = _number(step), _TIMES.get(unit.replace("\u03bc", "\u00b5"))
    if name is None or not (math.isfinite(number) and number > 0):
        return {}
    return {"t": LeadingAxis(scale=number, unit=name)}


# --- OME-TIFF.


def _ome_pixels(stack: TiffStack) -> ElementTree.Element | None:
    """Return the element Pixels of the series: the first one of its shape."""
    sizes = dict(zip(stack.series.get_axes(False), stack.series.get_shape(False), strict=True))
    for pixels in ElementTree.fromstring(stack.file.ome_metadata or "").iterfind(".//{*}Pixels"):
        if all(int(pixels.get(f"Size{axis}", 1)) == sizes.get(axis, 1) for axis in "TZYX"):
            return pixels
    return None


def _of_ome(pixels: ElementTree.Element, count: int) -> TiffMetadata:
    spacing: dict[str, float] = {}
    for axis in "ZYX":
        factor = _LENGTHS.get(pixels.get(f"PhysicalSize{axis}Unit", "\u00b5m"))
        if factor is not None:
            spacing |= _known({axis.lower(): _number(pixels.get(f"PhysicalSize{axis}"))}, factor)
    channels = tuple(
        (channel.get("Name"), _ome_colour(channel.get("Color"))) for channel in pixels.iterfind(".//{*}Channel")
    )
    return TiffMetadata(
        spacing,
        _time_axis(pixels.get("TimeIncrement"), pixels.get("TimeIncrementUnit", "s")),
        channels if len(channels) == count else (),
    )


def _ome_colour(text: str | None) -> str | None:
    """Return a colour of OME, a signed number of 32 bits (red, green, blue, alpha), as six hexadecimal digits."""
    if text is None or re.fullmatch(r"[+-]?\d+", text) is None:
        return None
    return f"{int(text) & 0xFFFFFFFF:08X}"[:6]


# --- ImageJ.


def _of_imagej(
    metadata: Mapping[str, Any], tag_spacing: Mapping[str, float], tag_unit: float | None, count: int
) -> TiffMetadata:
    """Read ImageJ's description; `tag_unit` is the unit of the resolution tags in µm, used if it has no unit."""
    steps = dict(tag_spacing)
    if "spacing" in metadata:
        steps["z"] = _number(metadata["spacing"])
    spacing: dict[str, float] = {}
    for axis, key in (("z", "zunit"), ("y", "yunit"), ("x", "unit")):  # the units of z and y, if they are others
        text = str(metadata.get(key, metadata.get("unit", "")))
        unit = re.sub(r"\\u([0-9a-fA-F]{4})", lambda code: chr(int(code[1], 16)), text)
        factor = _LENGTHS.get(unit) if unit else tag_unit
        if axis in steps and factor is not None:
            spacing |= _known({axis: steps[axis]}, factor)
    names: Sequence[str | None] = _channel_labels(metadata.get("Labels"), count)
    colours = [_lut_colour(table) for table in _listed(metadata.get("LUTs"), count)] or [None] * count
    ranges = [_number(value) for value in np.ravel(metadata.get("Ranges", ()))]
    return TiffMetadata(
        spacing,
        _time_axis(metadata.get("finterval"), str(metadata.get("tunit", "sec"))),
        tuple(zip(names, colours, strict=True)),
        tuple(zip(ranges[::2], ranges[1::2], strict=True))
        if len(ranges) == 2 * count and all(map(math.isfinite, ranges))
        else (),
    )


def _listed(values: object, count: int) -> list[Any]:
    """Return values of ImageJ, one for each channel; empty if there are others."""
    return list(values) if isinstance(values, (list, tuple)) and len(values) == count else []


def _channel_labels(labels: object, count: int) -> Sequence[str | None]:
    """Return the names of channels: ImageJ's labels of planes, of which the channel varies fastest, if they repeat."""
    texts = [str(label) for label in labels] if isinstance(labels, (list, tuple)) else []
    if count == 1 or len(texts) % count or not texts or texts != texts[:count] * (len(texts) // count):
        return [None] * count
    return texts[:count]


def _lut_colour(table: object) -> str | None:
    """Return the colour of the highest value of a lookup table of ImageJ, of shape (3, 256)."""
    colours = np.asarray(table)
    return "".join(f"{int(value):02X}" for value in colours[:, -1]) if colours.shape == (3, 256) else None
