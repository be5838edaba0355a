"""Records of the arguments by which :func:`linumpy.sampling.create_sampler` describes a volume, by type and device.

In: keyword arguments. Out: frozen records, and the voxels of raw files and arrays. Errors: ``ValueError`` for missing
or contradictory arguments, and for shapes and dtypes that are not sampled; ``TypeError`` for a masked array and for
numbers that are not integers; ``OSError`` for a file that cannot be read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from linumpy.arrays import Array
from linumpy.checks import integer
from linumpy.device import is_device_array
from linumpy.sampling.arguments import Buffer, from_dlpack
from linumpy.sampling.raw_voxels import RawFile, as_channels, check_range, checked_dims, raw_dtype

if TYPE_CHECKING:
    from linumpy.gpu import Reader
    from linumpy.io.source import Source

Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """A file of raw voxels: ``structuredRegular`` on ``virtual_memory``; attributes as for ``create_sampler``."""

    filename: str | os.PathLike[str] | None
    dims: Sequence[int] | None = None
    dtype: DTypeLike | None = None
    n_channels: int = 1
    offset: int = 0
    is_big_endian: bool = False
    range: Range | None = None

    def file(self) -> RawFile:
        """Describe the file, without reading it."""
        if self.filename is None:
            raise ValueError("filename: give the file of raw voxels")
        if self.dims is None or self.dtype is None:
            raise ValueError("a file of raw voxels has no header: give dims=[Dx, Dy, Dz] and dtype=")
        x, y, z = checked_dims(self.dims)
        channels = integer("n_channels", self.n_channels, 1, 2**31, meaning="the number of volumes in the file")
        offset = integer("offset", self.offset, 0, 2**62, meaning="the bytes before the first voxel")
        return RawFile(os.fspath(self.filename), (channels, z, y, x), raw_dtype(self.dtype, self.is_big_endian), offset)

    def needed_range(self) -> Range:
        """Return the checked range; raise ``ValueError`` if the caller gave none."""
        low_high = check_range(self.range)
        if low_high is None:
            raise ValueError(
                "range: give the lowest and the highest value; this device does not read the whole file to find them"
            )
        return low_high


@dataclass(frozen=True, kw_only=True)
class SlabSource(FileSource):
    """A file of raw voxels that is read in slabs: ``structuredRegular`` on ``out_of_core``."""

    num_blocks: int | None = None
    num_concurrent_blocks: int | None = None


@dataclass(frozen=True, kw_only=True)
class RawSource(FileSource):
    """A file of raw voxels or an array: ``structuredRegular`` on ``cuda`` and ``cpu``."""

    filename: str | os.PathLike[str] | None = None
    array: Array | None = None

    def voxels(self) -> Array:
        """Read the voxels of the file, or return the array: (C, Z, Y, X), in host memory or on a device."""
        if (self.filename is None) == (self.array is None):
            raise ValueError("filename and array: give one of them")
        if self.array is None:
            return self.file().read()
        has_shape = self.dims is not None or self.dtype is not None or self.n_channels != 1
        if has_shape or self.offset or self.is_big_endian:
            raise ValueError(
                "dims, dtype, n_channels, offset and is_big_endian describe a file: leave them out with array="
            )
        return as_channels(_as_array(self.array))

    def host_voxels(self) -> np.ndarray:
        """Return the voxels, C-contiguous, in host memory; an array on a device is a ``ValueError``."""
        voxels = self.voxels()
        if not isinstance(voxels, np.ndarray):
            raise ValueError("array lies on a device; give device='cuda', or an array of host memory")
        return np.ascontiguousarray(voxels)


@dataclass(frozen=True, kw_only=True)
class ZarrSource:
    """An array or an OME-Zarr image: ``zarr`` on ``cuda`` and ``cpu``; attributes as for ``create_sampler``."""

    source: Source
    level: int = 0
    channel_axis: int | None = None
    channel: int | None = None
    time: int | None = None
    range: Range | None = None
    # Not printed: it may hold credentials.
    storage_options: Mapping[str, object] | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class PagedSource(ZarrSource):
    """An array or an image that is read in pages: ``zarr`` on ``cuda_out_of_core``."""

    cache_bytes: int | None = None
    ahead: int | None = None
    reader: Reader | None = None


def _as_array(array: Buffer) -> Array:
    """Return an array of any package as a NumPy or CuPy array."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("array is a masked array: give array.filled(value), and the mask as mask=")
    if isinstance(array, np.ndarray):
        return array.view(np.ndarray)
    if is_device_array(array):
        return array
    return from_dlpack(array) if hasattr(array, "__dlpack__") else np.asarray(array)
