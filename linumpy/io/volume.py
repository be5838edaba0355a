"""The volumes of an OME-Zarr image: the image at one time and channel, along the axes of space.

A volume is an array of any rank, and the selected entry of each axis that is not of space. No voxels are read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr

from linumpy.checks import is_integer
from linumpy.errors import MetadataError, SourceError
from linumpy.io.ngff.axes import Placement, Spacing, Unplaced
from linumpy.io.ome import OmeZarrImage, check_level, open_image
from linumpy.io.source import Source, describe_source, open_node
from linumpy.io.zarr_mode import read_chunks_on_host
from linumpy.plan.region import normalize_region

#: Types of axes other than space, in the order that NGFF requires, and the names of such axes.
KINDS = {"time": "t", "channel": "c"}


@dataclass(frozen=True)
class Volume:
    """The axes of space of an array, at one entry of each other axis.

    Attributes
    ----------
    array : zarr.Array
        The array that holds the volume.
    index : tuple of int or None
        The selected entry along each axis of the array; None for an axis of space.
    """

    array: zarr.Array
    index: tuple[int | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Voxels along each axis of space."""
        return self._spatial(self.array.shape)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Voxels of a chunk along each axis of space."""
        return self._spatial(self.array.chunks)

    @property
    def shards(self) -> tuple[int, ...] | None:
        """Voxels of a shard along each axis of space; None for an array without shards."""
        return None if self.array.shards is None else self._spatial(self.array.shards)

    @property
    def dtype(self) -> np.dtype:
        """Data type of a voxel."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """Number of axes of space."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all voxels, decoded."""
        return math.prod(self.shape) * self.dtype.itemsize

    def region(self, box: tuple[int | slice, ...]) -> tuple[int | slice, ...]:
        """Return the region of :attr:`array` that holds a box of this volume, as an index for NumPy and zarr."""
        slices = iter(box)
        return tuple(next(slices) if entry is None else entry for entry in self.index)

    def read(self, box: tuple[slice, ...] | None = None) -> np.ndarray:
        """Read a box, by default the whole volume, into host memory.

        Raises
        ------
        ChunkError
            A chunk cannot be read.
        RegionError
            The box reaches beyond the volume.
        """
        region = normalize_region(box, self.shape)
        return read_chunks_on_host(self.array, self.region(tuple(map(slice, region.start, region.stop))))

    def _spatial(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size for size, entry in zip(sizes, self.index, strict=True) if entry is None)


def as_volume(array: zarr.Array | Volume) -> Volume:
    """Return an array as a volume all of whose axes are axes of space; a volume is returned unchanged."""
    return array if isinstance(array, Volume) else Volume(array, (None,) * array.ndim)


@dataclass(frozen=True)
class Chosen:
    """The selected level, time and channel (None: all) of an image.

    - `leading`: the kept axes of time and channel: number of the axis in the array, by the name ``"t"`` or ``"c"``.
    """

    image: OmeZarrImage
    level: int
    leading: Mapping[str, int]
    time: int | None
    channel: int | None


@dataclass(frozen=True)
class Volumes:
    """The selected volumes of one resolution level of an image: one volume, or one for each time and channel.

    Attributes
    ----------
    name : str
        Path or URL of the image, for messages.
    axes : str
        Names of the axes of space in their order, such as ``"zyx"``.
    placement : Placement or Unplaced
        Voxel spacing along the axes of space and position of the first voxel in µm, or why they are unknown.
    leading : str
        Names of the leading axes, ``"t"``, ``"c"``, ``"tc"`` or empty: axes of time and channel that have several
        entries, of which the caller selected none.
    volumes : mapping of tuple of int to Volume
        Volumes by the entry along each leading axis; without leading axes, one volume at ``()``.
    linumpy : mapping
        As :attr:`linumpy.io.ome.OmeZarrImage.linumpy`.
    chosen : Chosen or None
        The selection; None for a single array.
    """

    name: str
    axes: str
    placement: Placement | Unplaced
    leading: str
    volumes: Mapping[tuple[int, ...], Volume]
    linumpy: Mapping[str, Any]
    chosen: Chosen | None = None

    @property
    def spacing(self) -> tuple[float, ...]:
        """Voxel spacing in µm along the axes of space; `MetadataError` if it is unknown."""
        return self.placement.spacing

    @property
    def origin(self) -> tuple[float, ...]:
        """Position of the centre of the first voxel in µm; `MetadataError` if it is unknown."""
        return self.placement.origin

    @property
    def first(self) -> Volume:
        """The first volume; all volumes have the same shape, chunks and dtype."""
        return next(iter(self.volumes.values()))

    @property
    def names(self) -> str:
        """Names of the axes of space, for messages."""
        image = None if self.chosen is None else self.chosen.image
        return ", ".join(self.axes if image is None else (image.axes[axis].name for axis in image.spatial_axes))

    @property
    def leading_shape(self) -> tuple[int, ...]:
        """Number of entries along each leading axis."""
        return tuple(n + 1 for n in max(self.volumes))

    @property
    def nbytes(self) -> int:
        """Bytes of the voxels of all volumes, decoded."""
        return sum(volume.nbytes for volume in self.volumes.values())

    def only(self, why: str) -> Volume:
        """Return the only volume.

        Parameters
        ----------
        why : str
            Why one volume is needed, for the error.

        Raises
        ------
        ValueError
            There are several volumes; the message names the parameters that select one.
        """
        if not self.leading:
            return self.first
        kinds = [kind for kind, name in KINDS.items() if name in self.leading]
        counts = " and ".join(f"{n} {kind}s" for kind, n in zip(kinds, self.leading_shape, strict=True))
        choices = " and ".join(f"{kind}= (0 to {n - 1})" for kind, n in zip(kinds, self.leading_shape, strict=True))
        raise ValueError(f"{self.name} has {counts}, but {why}: choose by {choices}")


def open_volumes(
    source: Source,
    level: int = 0,
    *,
    channel: int | None = None,
    time: int | None = None,
    spacing: Spacing | None = None,
    multiscale: int | str = 0,
) -> Volumes:
    """Open one resolution level of an OME-Zarr image as volumes.

    Parameters
    ----------
    source : str, Path or zarr.Group
        The image.
    level : int
        Resolution level; 0 is the finest.
    channel, time : int, optional
        The entry to select, counted from 0; by default all entries. Axes with one entry are never leading axes.
    spacing, multiscale
        As for :func:`linumpy.io.ome.open_image`.

    Returns
    -------
    Volumes
        The volumes; no voxels are read.

    Raises
    ------
    FileNotFoundError, SourceError, MetadataError, ValueError
        As :func:`linumpy.io.ome.open_image`. Besides, a level that does not exist and an axis without entries are a
        `SourceError`, a channel or time that does not exist is a `ValueError`, and an axis with several entries that is
        neither space, time nor channel is a `MetadataError`.

    Examples
    --------
    >>> from linumpy import read_zarr
    >>> from linumpy.io.volume import open_volumes
    >>> red = open_volumes("cells.ome.zarr", channel=0, time=0)  # doctest: +SKIP
    >>> read_zarr(red.first.array, region=red.first.region((slice(0, 64),) * 3))  # doctest: +SKIP
    """
    return select_volumes(open_image(source, spacing=spacing, multiscale=multiscale), level, channel=channel, time=time)


def open_source_volumes(
    source: Source, level: int, channel: int | None, time: int | None, spacing: Spacing | None
) -> Volumes:
    """Open the volumes of an image, or a single array of two or three axes as a volume with its first voxel at 0 µm.

    - `spacing`: voxel spacing of level 0 in µm. A single array needs it.
    """
    node = open_node(source)
    if isinstance(node, zarr.Array):
        name = describe_source(node)
        if level != 0:
            raise ValueError(f"level={level}, but {name} is a single array, which has no levels")
        if channel is not None or time is not None:
            raise ValueError(
                f"channel={channel}, time={time}: {name} is a single array, whose axes have no names; pass the "
                "OME-Zarr image that it is in"
            )
        if spacing is None:
            raise MetadataError(f"{name} is a single array, whose voxel spacing is unknown: pass spacing= in µm")
        if node.ndim not in (2, 3):
            raise ValueError(f"{name} has shape {node.shape}: pass a volume of two or three axes")
        axes = "zyx"[-node.ndim :]
        steps = [spacing.get(axis, math.nan) for axis in axes] if isinstance(spacing, Mapping) else spacing
        if len(steps) != node.ndim or not all(step > 0 for step in steps):
            raise ValueError(f"spacing={spacing!r}: {name} has {node.ndim} axes: pass a positive µm for each")
        single: dict[tuple[int, ...], Volume] = {(): as_volume(node)}
        return Volumes(name, axes, Placement(tuple(map(float, steps)), (0.0,) * node.ndim), "", single, {})
    image = open_image(node, spacing=spacing)
    volumes = select_volumes(image, level, channel=channel, time=time)
    if len(volumes.axes) != volumes.first.ndim or len(volumes.axes) < 2 or not set(volumes.axes) <= set("zyx"):
        raise MetadataError(f"{image.name} has the axes of space {volumes.names}: two or three of z, y, x are read")
    return volumes


def select_volumes(
    image: OmeZarrImage, level: int = 0, *, channel: int | None = None, time: int | None = None
) -> Volumes:
    """Select volumes of an open image; see :func:`open_volumes`."""
    check_level(level, len(image.levels), image.name)
    array = image.levels[level]
    selected: dict[int, range] = {}  # axis of the array → selected entries
    kept: dict[str, int] = {}  # kind → axis of the array
    counts = dict.fromkeys(KINDS, 1)
    by_name = {name: kind for kind, name in KINDS.items()}  # an axis without a type has that of its name, "t" or "c"
    for number, (axis, size) in enumerate(zip(image.axes, array.shape, strict=True)):
        kind = by_name.get(axis.name.lower(), "other") if axis.type is None else axis.type
        if kind == "space":
            continue
        if size != 1 and (kind not in KINDS or kind in kept):
            raise MetadataError(
                f"{image.name}: axis {axis.name!r} of type {axis.type!r} has {size} entries; axes of space, time and "
                "channel are read, and others with one entry"
            )
        if not size:
            raise SourceError(f"{image.name}: axis {axis.name!r} has no entries, so there are no voxels")
        selected[number] = range(size)
        if size != 1:
            kept[kind], counts[kind] = number, size
    for kind, entry in (("time", time), ("channel", channel)):
        if entry is None:
            continue
        if not is_integer(entry) or not 0 <= entry < counts[kind]:
            count = counts[kind]
            text = f"{count} {kind}s, numbered from 0" if count > 1 else f"one {kind}, number 0"
            raise ValueError(f"{kind}={entry!r}: {image.name} has {text}")
        if kind in kept:
            selected[kept.pop(kind)] = range(entry, entry + 1)
    leading = [kept[kind] for kind in KINDS if kind in kept]
    volumes = {}
    for entries in itertools.product(*(selected[number] for number in leading)):
        index: list[int | None] = [selected[number][0] if number in selected else None for number in range(array.ndim)]
        for number, entry in zip(leading, entries, strict=True):
            index[number] = entry
        volumes[entries] = Volume(array, tuple(index))
    named = {KINDS[kind]: kept[kind] for kind in KINDS if kind in kept}
    return Volumes(
        image.name, "".join(image.axes[axis].name.lower() for axis in image.spatial_axes), image.placements[level],
        "".join(named), volumes, image.linumpy, Chosen(image, level, named, time, channel),
    )  # fmt: skip
