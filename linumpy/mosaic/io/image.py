"""A mosaic on disk: an OME-Zarr image with the axes z (depth), y and x, in any order.

In: a path, and a selection of times and channels. Out: a :class:`MosaicImage` with checked metadata; its voxels are not
read. Boxes and shapes follow the order of the image's axes.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from linumpy.arrays import Array, DeviceName
from linumpy.device import array_module
from linumpy.errors import MetadataError, SourceError
from linumpy.io.ome import open_image
from linumpy.io.volume import Volume, Volumes, select_volumes
from linumpy.mosaic.io.measured import Correction, MeasuredVoxels, measured_of_box, read_corrections
from linumpy.mosaic.io.tiles import Box, boxes, read_box

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MosaicImage(Volumes):
    """One resolution of an OME-Zarr mosaic: a volume with the axes z, y and x, or one for each time and channel.

    - `finest_shape`: voxels of the finest resolution along each axis.
    - `scale`: voxels of the finest resolution in one voxel of this resolution, along each axis.
    - `corrections`: focal corrections of the mosaic, from :func:`linumpy.mosaic.io.measured.read_corrections`.
    """

    finest_shape: tuple[int, ...] = ()
    scale: tuple[int, ...] = (1, 1, 1)
    corrections: tuple[Correction, ...] = ()

    @property
    def array(self) -> Volume:
        """The first volume; all have the same shape, chunks and dtype."""
        return self.first

    @property
    def depth_axis(self) -> int:
        """The axis called z."""
        return self.axes.index("z")

    @property
    def lateral_axes(self) -> tuple[int, int]:
        """The two axes that are not called z, in their order."""
        first, second = (axis for axis in range(3) if axis != self.depth_axis)
        return first, second

    @property
    def lateral_names(self) -> str:
        """Names of the lateral axes, such as ``"yx"``."""
        return self.axes.replace("z", "")

    @property
    def lateral_shape(self) -> tuple[int, int]:
        """Voxels along the lateral axes."""
        first, second = self.lateral_axes
        return self.array.shape[first], self.array.shape[second]

    @property
    def lateral_spacing(self) -> tuple[float, float]:
        """Voxel spacing along the lateral axes, in µm."""
        first, second = self.lateral_axes
        return self.spacing[first], self.spacing[second]

    @property
    def tile_shape(self) -> tuple[int, int] | None:
        """Voxels of a tile of the finest resolution along the lateral axes; None if the metadata has no tile shape.

        Raises `MetadataError`: the tile shape in the metadata is not two positive integers.
        """
        stored = self.linumpy.get("tile_shape")
        if stored is None:
            return None
        names = list(self.lateral_names)
        sizes = [stored.get(name) if isinstance(stored, Mapping) else None for name in names]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise MetadataError(
                f"{self.name}: the attribute 'linumpy' has the tile_shape {stored!r}, no positive integers for {names}"
            )
        return sizes[0], sizes[1]  # type: ignore[return-value]

    def measured(self, box: Box) -> MeasuredVoxels | None:
        """Return the measured voxels of a box; None if focal correction filled no voxel of the box."""
        if not self.corrections:
            return None
        voxels = measured_of_box(self.corrections, self.axes, self.finest_shape, self.scale, self.array.shape, box)
        return None if voxels.complete else voxels

    def valid_voxels(self, box: Box, voxels: Array) -> Array:
        """Return which voxels of a box are valid (measured, finite and not 0), as an array of bool."""
        xp = array_module(voxels)
        valid: Array = xp.isfinite(voxels) & (voxels != 0)
        measured = self.measured(box)
        return valid if measured is None else valid & measured.mask(xp)

    def read_filled(self, box: Box, device: DeviceName, entries: tuple[int, ...] = ()) -> Array:
        """Read a box; the nearest measured voxel of the A-line replaces each voxel that focal correction filled.

        `entries` selects the volume by time and channel if the mosaic has several.
        """
        voxels, measured = read_box(self.volumes[entries], box, device), self.measured(box)
        return voxels if measured is None else measured.repeat(voxels)

    def boxes(self, size: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Box]]:
        """Yield (entries, box) for all boxes of `size` voxels in all volumes; `entries` as for :meth:`read_filled`."""
        return itertools.product(self.volumes, list(boxes(self.array.shape, size)))


def tile_attributes(image: MosaicImage, tile_shape: Sequence[int]) -> dict[str, Any]:
    """Return the attributes from which :attr:`MosaicImage.tile_shape` is read."""
    return {"linumpy": {"tile_shape": dict(zip(image.lateral_names, map(int, tile_shape), strict=True))}}


def needed_tile(image: MosaicImage, tile_given: Sequence[int] | None) -> tuple[int, int]:
    """Return the voxels of a tile along the lateral axes, from the caller or else from the metadata.

    The chunk shape is never used instead: tiles with wrong borders give wrong results, which no check would find.

    Raises `MetadataError`: neither the caller nor the metadata has a tile shape, or that of the metadata is not two
    positive integers. `ValueError`: not two sizes, or a size below 1 or above that of the mosaic.
    """
    recorded_tile = image.tile_shape
    if tile_given is not None and recorded_tile not in (None, tuple(tile_given)):
        log.warning(
            "%s: tiles of %s voxels are taken as given; its metadata has %s",
            image.name, tuple(tile_given), recorded_tile,
        )  # fmt: skip
    tile = recorded_tile if tile_given is None else tile_given
    if tile is None:
        raise MetadataError(f"{image.name}: its metadata has no tile shape; pass tile_shape=")
    if len(tile) != 2:
        raise ValueError(f"tile_shape={tuple(tile)}: pass two sizes, along the lateral axes")
    for axis, size in zip(image.lateral_axes, tile, strict=True):
        if not 1 <= size <= image.array.shape[axis]:
            raise ValueError(
                f"tile_shape={tuple(tile)}: {image.name} has {image.array.shape[axis]} voxels along {image.axes[axis]}"
            )
    return tile[0], tile[1]


def open_mosaic(
    path: str | Path,
    level: int = 0,
    *,
    channel: int | None = None,
    time: int | None = None,
    spacing: Sequence[float] | None = None,
) -> MosaicImage:
    """Open one resolution of an OME-Zarr mosaic; `level` 0 is the finest.

    `channel`, `time` and `spacing` as in :class:`~linumpy.mosaic.io.step.StepOptions`.

    Raises, besides the errors of :func:`linumpy.io.volume.open_volumes`, `ValueError`: a spacing that is not three
    positive numbers. `MetadataError`: axes of space that are not z, y and x; focal corrections that cannot be read.
    `SourceError`: voxels that are not real numbers; a volume without voxels.
    """
    if spacing is not None and (len(spacing) != 3 or not all(0 < step < math.inf for step in spacing)):
        raise ValueError(f"spacing={tuple(spacing)}: pass three positive numbers in µm, along z, y and x")
    image = open_image(path, spacing=None if spacing is None else dict(zip("zyx", spacing, strict=True)))
    chosen = select_volumes(image, level, channel=channel, time=time)
    if sorted(chosen.axes) != ["x", "y", "z"]:
        raise MetadataError(
            f"{path}: axes {', '.join(a.name for a in image.axes)}; z, y and x of space are needed, besides t and c"
        )
    array = chosen.first
    if array.dtype.kind not in "biuf":
        raise SourceError(f"{path}: voxels of {array.dtype} have no intensity; real numbers are needed")
    if 0 in array.shape:
        raise SourceError(f"{path}: a volume of shape {array.shape} has no voxels")
    finest = select_volumes(image, 0, channel=channel, time=time)
    return replace(
        MosaicImage(*(getattr(chosen, member.name) for member in fields(chosen))),
        name=str(path),
        finest_shape=finest.first.shape,
        scale=tuple(max(1, round(b / a)) for a, b in zip(finest.spacing, chosen.spacing, strict=True)),
        corrections=read_corrections(chosen.linumpy, chosen.axes.replace("z", ""), str(path)),
    )
