"""Records of planning: arrays, the regions that are read for crops, and how staged crops are resampled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from linumpy.stream.arguments import Box
from linumpy.stream.augment import Intensity, Warp
from linumpy.stream.config import Dtype
from linumpy.stream.planning.alignment import Crop, Grid

if TYPE_CHECKING:
    from linumpy.io.paths import MetadataLook
    from linumpy.plan.layout import ArrayLayout

Vector = tuple[float, float, float]
#: Alignment of arrays in the memory of batches, in bytes.
ALIGNED = 512


@dataclass(frozen=True)
class ArrayInfo:
    """An array, as planning needs it."""

    source: ArrayLayout
    name: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]  # of inner chunks, where the array has shards
    dtype: np.dtype  # dtype of the array, in the byte order of this machine
    grid: Grid  # coordinates of the voxels
    #: Detects a change of the metadata files; None for an array that is not checked again, such as at a URL.
    look: MetadataLook | None = None

    @property
    def space(self) -> int:
        """Number of axes of space, three at most; they are the last axes."""
        return self.grid.space

    @property
    def holds(self) -> bool:
        """Whether the metadata files are unchanged since the array was opened; True where nothing is checked."""
        return self.look is None or self.look.holds()


@dataclass(frozen=True)
class Resampling:
    """How a staged crop is resampled. Axes are (Z, Y, X); an axis that the array lacks has one voxel."""

    #: Voxel of the crop → coordinates in the volume: ``matrix @ voxel + offset``.
    matrix: np.ndarray
    offset: np.ndarray
    #: Start and shape of the box that is read, 0 where nothing is read; shape of the whole volume.
    box_start: tuple[int, int, int]
    box_shape: tuple[int, int, int]
    volume: tuple[int, int, int]
    grid: np.ndarray | None  # elastic displacements of control points in voxels of the volume, float64 (3, Z, Y, X)
    #: Voxel of the crop → coordinates in the grid: ``grid_scale * voxel + grid_origin``.
    grid_scale: Vector
    grid_origin: Vector
    sigma: Vector  # standard deviation of the blur in voxels; 0 for no blur
    intensity: Intensity  # change of intensities
    order: int  # 0 for nearest voxels, 1 for linear interpolation


@dataclass(frozen=True)
class CropRead:
    """The read for the crop of one part of a sample."""

    row: int  # position in the batch
    info: ArrayInfo
    #: Region of the array that is read. For a direct crop it is the `aabb` of the crop, without voxels outside of the
    #: array. For a staged crop it holds all voxels that the resampling may use. None where nothing is read.
    region: Box | None
    inside: Box  # position of the region in a direct crop; empty for a staged crop
    resampling: Resampling | None  # how a staged crop is resampled; None for a direct crop
    is_whole: bool = False  # whether the crop is direct and lies completely in the array
    #: Disjoint boxes of the region that are read, along the last axes, three at most: int64 (boxes, axes, 2). Staged
    #: voxels outside of the boxes are undefined. None where the whole region is read.
    needed: np.ndarray | None = None

    @property
    def stage_shape(self) -> tuple[int, ...]:
        """Shape of the region, with all axes of the array; () where nothing is read."""
        return () if self.region is None else tuple([stop - start for start, stop in self.region])

    @property
    def stage_nbytes(self) -> int:
        """Bytes of the crop in the stage of its batch; 0 for a direct crop."""
        return 0 if self.resampling is None else aligned(self._region_nbytes)

    @property
    def read_nbytes(self) -> int:
        """Bytes that are read, in the stored dtype."""
        if self.needed is None or self.region is None:
            return self._region_nbytes
        lead = math.prod([stop - start for start, stop in self.region[: -self.needed.shape[1]]])
        voxels = int((self.needed[:, :, 1] - self.needed[:, :, 0]).prod(axis=1).sum())
        return lead * voxels * self.info.dtype.itemsize

    @property
    def _region_nbytes(self) -> int:
        return 0 if self.region is None else math.prod(self.stage_shape) * self.info.dtype.itemsize


@dataclass(frozen=True)
class WarpedCrop:
    """A staged crop before :mod:`~linumpy.stream.planning.reach` has planned the region that is read."""

    row: int
    info: ArrayInfo
    crop: Crop  # the crop without the augmentation
    warp: Warp  # the augmentation; the identity for a crop that is only padded
    order: int  # 0 for nearest voxels, 1 for linear interpolation


@dataclass(frozen=True)
class PartShape:
    """Shape and dtype of one part, the same for all samples of a pipeline."""

    name: str  # name of the part
    shape: tuple[int, ...]  # shape of the crop, with all axes of the array
    dtype: Dtype  # f32, f16, bf16 or stored
    element: np.dtype  # dtype of the batch in memory; uint16 for bf16
    dropped: tuple[int, ...] = ()  # axes, of one voxel each, that the batch does not have

    @property
    def kept(self) -> tuple[int, ...]:
        """Shape of the crop in the batch."""
        return tuple([n for axis, n in enumerate(self.shape) if axis not in self.dropped])

    def nbytes(self, batch_size: int) -> int:
        """Return the bytes of this part in a batch, with the bytes that align the next part."""
        return aligned(batch_size * math.prod(self.shape) * self.element.itemsize)


def zyx(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the last three sizes of a shape, along (Z, Y, X); 1 for an axis that is missing."""
    nz, ny, nx = (1,) * (3 - len(shape)) + tuple(shape[-3:])
    return nz, ny, nx


def aligned(nbytes: int) -> int:
    """Round a number of bytes up to the next multiple of the alignment."""
    return -(-nbytes // ALIGNED) * ALIGNED


def stage_offsets(reads: Sequence[CropRead]) -> list[int]:
    """Return the offset of each staged crop in the stage of its batch, and last the size of the stage, in bytes."""
    return [0, *itertools.accumulate(read.stage_nbytes for read in reads)]
