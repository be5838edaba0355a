"""A mosaic on disk, as the microscope's scripts take it: three axes of space, of which one is depth.

In: an OME-Zarr image. Out: a :class:`MosaicImage`, unread, with everything that its metadata must say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import zarr

from linumpy.errors import MetadataError, SourceError
from linumpy.io.ome import open_image


@dataclass(frozen=True)
class MosaicImage:
    """One resolution of an OME-Zarr volume.

    Attributes
    ----------
    name : str
        Where it is, for people.
    array : zarr.Array
        Unread, rank 3.
    axes : str
        Names of its axes in their order, such as ``"zyx"``.
    spacing : (float, float, float)
        Voxel spacing in µm, in the order of the axes.
    origin : (float, float, float)
        Where the centre of the first voxel lies, in µm.
    """

    name: str
    array: zarr.Array
    axes: str
    spacing: tuple[float, ...]
    origin: tuple[float, ...]

    @property
    def depth_axis(self) -> int:
        """The axis called z."""
        return self.axes.index("z")

    @property
    def lateral_axes(self) -> tuple[int, int]:
        """The other two, in their order."""
        first, second = (axis for axis in range(3) if axis != self.depth_axis)
        return first, second

    @property
    def nbytes(self) -> int:
        """Bytes of all voxels, decoded."""
        return math.prod(self.array.shape) * self.array.dtype.itemsize


def open_mosaic(path: str | Path, level: int = 0) -> MosaicImage:
    """Open one resolution of an OME-Zarr volume of OCT.

    Parameters
    ----------
    path : str or Path
        The image.
    level : int
        Resolution level; 0 is the finest.

    Raises
    ------
    FileNotFoundError, SourceError, MetadataError
        As :func:`linumpy.io.ome.open_image`; a level that is not there; axes that are not z, y and x; voxels that are
        not real numbers, or none at all.
    """
    image = open_image(path)
    if not 0 <= level < len(image.levels):
        raise SourceError(f"{image.name} has no resolution level {level}: it has {len(image.levels)}, numbered from 0")
    axes = "".join(axis.name.lower() for axis in image.axes)
    if sorted(axes) != ["x", "y", "z"] or image.spatial_axes != (0, 1, 2):
        raise MetadataError(f"{path}: axes {', '.join(a.name for a in image.axes)}; z, y and x of space are needed")
    array = image.levels[level]
    if array.dtype.kind not in "biuf":
        raise SourceError(f"{path}: voxels of {array.dtype} have no intensity; real numbers have")
    if 0 in array.shape:
        raise SourceError(f"{path}: a volume of shape {array.shape} has no voxels")
    return MosaicImage(str(path), array, axes, image.spacing[level], image.origin[level])
