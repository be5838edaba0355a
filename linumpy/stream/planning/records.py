"""What planning passes on: frozen records of arrays, of what is read of them, and of how it is resampled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.stream.arguments import Box
from linumpy.stream.config import Dtype
from linumpy.stream.planning.alignment import Grid
from linumpy.stream.planning.warp import Intensity

ALIGNED = 512


@dataclass(frozen=True)
class ArrayInfo:
    """An array as crops of it are planned.

    Attributes
    ----------
    source : ArrayLayout or zarr.Array
        What the reader takes; an array where it does not take it.
    name : str
        In messages.
    shape, chunk_shape, object_shape : tuple of int
        Of the array, its (inner) chunks, and its shards or chunks.
    dtype : numpy.dtype
        In the byte order of this machine.
    grid : Grid
        Where its voxels lie.
    unsupported : str or None
        Why the reader does not take it.
    look : MetadataLook or None
        Tells whether all this still holds; None for an array that is not looked at again.
    """

    source: Any
    name: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    object_shape: tuple[int, ...]
    dtype: np.dtype
    grid: Grid
    unsupported: str | None = None
    look: Any = None

    @property
    def space(self) -> int:
        """Number of axes of space; they are the last ones, three at most."""
        return self.grid.space

    @property
    def holds(self) -> bool:
        """Whether its metadata files are what they were when it was opened."""
        return self.look is None or bool(self.look.holds())


@dataclass(frozen=True)
class Resampling:
    """How a staged crop is made; axes (Z, Y, X), those that the array does not have in front with one voxel.

    Attributes
    ----------
    matrix, offset : numpy.ndarray
        Voxel of the crop → coordinates in the volume: ``matrix @ voxel + offset``.
    box_start, box_shape, volume : tuple of int
        Box that is read, and shape of the whole volume.
    grid : numpy.ndarray or None
        Elastic displacements of control points in voxels of the volume, float64 (3, Z, Y, X).
    grid_scale, grid_origin : tuple of float
        Voxel of the crop → coordinates in the grid.
    sigma : tuple of float
        Of the blur in voxels; zeros for none.
    intensity : Intensity
        Change of the values.
    order : int
        0 for nearest voxels, 1 for linear interpolation.
    """

    matrix: np.ndarray
    offset: np.ndarray
    box_start: tuple[int, int, int]
    box_shape: tuple[int, int, int]
    volume: tuple[int, int, int]
    grid: np.ndarray | None
    grid_scale: tuple[float, float, float]
    grid_origin: tuple[float, float, float]
    sigma: tuple[float, float, float]
    intensity: Intensity
    order: int


@dataclass(frozen=True)
class CropRead:
    """A part of a sample in a batch.

    Attributes
    ----------
    row : int
        Position in the batch.
    info : ArrayInfo
        The array.
    region : Box or None
        What is read of it; None where nothing is.
    inside : Box
        Where the region lies in the crop, if it is direct.
    resampling : Resampling or None
        None for a direct crop.
    is_whole : bool
        Whether it is direct and all of it is read.
    needed : numpy.ndarray or None
        Boxes of the region that are read, of which no two meet, along its last axes, three at most: int64
        (boxes, axes, 2). None for all of it; the rest of the staged box is undefined.
    """

    row: int
    info: ArrayInfo
    region: Box | None
    inside: Box
    resampling: Resampling | None
    is_whole: bool = False
    needed: np.ndarray | None = None

    @property
    def stage_shape(self) -> tuple[int, ...]:
        """Shape of the staged box; axes as in the array."""
        return () if self.region is None else tuple([stop - start for start, stop in self.region])

    @property
    def stage_nbytes(self) -> int:
        """Bytes of the staging buffer that it takes; 0 for a direct crop."""
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
class PartShape:
    """What one part of every sample of a pipeline has in common.

    Attributes
    ----------
    name : str
        Of the part.
    shape : tuple of int
        Of the crop, with all axes of the array.
    dtype : Dtype
        f32, f16, bf16 or stored.
    element : numpy.dtype
        Of the batch in memory; uint16 for bf16.
    dropped : tuple of int
        Axes, of one voxel each, that the batch does not have.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    element: np.dtype
    dropped: tuple[int, ...] = ()

    @property
    def kept(self) -> tuple[int, ...]:
        """Shape of the crop in the batch."""
        return tuple([n for axis, n in enumerate(self.shape) if axis not in self.dropped])

    def nbytes(self, batch_size: int) -> int:
        """Bytes of a batch of it."""
        return aligned(batch_size * math.prod(self.shape) * self.element.itemsize)


def aligned(nbytes: int) -> int:
    """Round a number of bytes up to where the next array may begin."""
    return -(-nbytes // ALIGNED) * ALIGNED


def stage_offsets(reads: Sequence[CropRead]) -> list[int]:
    """Where each staged crop begins in the staging buffer of its batch, and at the end the size of that."""
    return [0, *itertools.accumulate(read.stage_nbytes for read in reads)]
