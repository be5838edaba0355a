"""Volumes of raw voxels, in a file or an array: the type ``structuredRegular``.

In: the arguments by which :func:`linumpy.sampling.create_sampler` describes a file of voxels without a header, or an
array. Out: voxels (C, Z, Y, X), in memory, mapped, or in device memory. Errors: ``ValueError`` and ``TypeError`` for
wrong arguments and for a file that is shorter than they say; :class:`OSError` for a file that cannot be read or becomes
shorter later.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from linumpy.arrays import Array, is_device_array
from linumpy.checks import integer
from linumpy.gpu.rounding import cast_elements
from linumpy.sampling.arguments import from_dlpack
from linumpy.sampling.volume import KEPT
from linumpy.sampling.voxel_field import normalised

Range = tuple[float, float]

#: Names of dtypes in other samplers, for NumPy's names.
_DTYPE_ALIASES = {"float": "f4", "double": "f8", "half": "f2"}
#: dtypes that are sampled.
_DTYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "f2", "f4", "f8")
#: Numbers of voxels along an axis are smaller than this: float32 represents them.
_AXIS_LIMIT = 2**24
#: Largest absolute value of a range: float32 represents the value, the difference of two such values, and the inverse.
_MAX_RANGE_VALUE = 1e36
#: Bytes that are converted and copied to a device at a time.
_PART_NBYTES = 64 * 2**20


@dataclass(frozen=True)
class RawFile:
    """Voxels in a file without a header."""

    filename: str  # path of the file
    shape: tuple[int, int, int, int]  # (C, Z, Y, X): channels lie one after another, x fastest
    dtype: np.dtype  # dtype of the voxels, with their byte order
    offset: int  # bytes before the first voxel

    @property
    def nbytes(self) -> int:
        """Size of all voxels in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def check_size(self, size: int) -> None:
        """Refuse a file of `size` bytes if it is too short: ``ValueError``."""
        if size < self.offset + self.nbytes:
            shape = " × ".join(map(str, self.shape))
            raise ValueError(
                f"{self.filename} has {size} bytes; {self.offset} before the voxels and {self.nbytes} of {shape} "
                f"voxels of {self.dtype} (channels, Z, Y, X) are {self.offset + self.nbytes}"
            )

    def read(self) -> np.ndarray:
        """Read the voxels into host memory."""
        self.check_size(os.path.getsize(self.filename))
        flat = np.fromfile(self.filename, self.dtype, math.prod(self.shape), offset=self.offset)
        if flat.nbytes != self.nbytes:
            problem = f"{flat.nbytes} bytes of voxels could be read instead of {self.nbytes}"
            raise OSError(errno.EIO, problem, self.filename)
        return flat.reshape(self.shape)

    def map(self) -> np.memmap:
        """Map the voxels into memory, read-only."""
        self.check_size(os.path.getsize(self.filename))
        return np.memmap(self.filename, self.dtype, "r", self.offset, self.shape)

    def check_mapped(self, voxels: np.memmap) -> None:
        """Refuse a mapped file that was shortened (``OSError``): a read beyond the end would kill the process."""
        size = voxels._mmap.size()  # type: ignore[attr-defined]  # the file's present size
        if size < self.offset + self.nbytes:
            problem = f"{self.offset + self.nbytes} bytes were mapped, and the file has {size} now"
            raise OSError(errno.EIO, problem, self.filename)


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
        if np.shape(self.dims) != (3,):
            raise ValueError(f"dims={self.dims!r}: give the voxels along x, y and z")
        x, y, z = (
            integer("dims", n, 1, _AXIS_LIMIT - 1, meaning="the number of voxels along an axis") for n in self.dims
        )
        try:
            dtype = np.dtype(_DTYPE_ALIASES.get(self.dtype, self.dtype) if isinstance(self.dtype, str) else self.dtype)
        except TypeError as error:
            raise ValueError(f"dtype={self.dtype!r} is not a dtype of NumPy") from error
        if dtype.str[1:] not in _DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: voxels are integers of 8 to 32 bits or floats of 16 to 64 bits")
        dtype = dtype.newbyteorder(">") if self.is_big_endian else dtype
        channels = integer("n_channels", self.n_channels, 1, 2**31, meaning="the number of volumes in the file")
        offset = integer("offset", self.offset, 0, 2**62, meaning="the bytes before the first voxel")
        return RawFile(os.fspath(self.filename), (channels, z, y, x), dtype, offset)

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
        array = self.array
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError("array is a masked array: give array.filled(value), and the mask as mask=")
        if isinstance(array, np.ndarray):
            array = array.view(np.ndarray)
        elif not is_device_array(array):
            array = from_dlpack(array) if hasattr(array, "__dlpack__") else np.asarray(array)
        return as_channels(array)

    def host_voxels(self) -> np.ndarray:
        """Return the voxels, C-contiguous, in host memory; an array on a device is a ``ValueError``."""
        voxels = self.voxels()
        if not isinstance(voxels, np.ndarray):
            raise ValueError("array lies on a device; give device='cuda', or an array of host memory")
        return np.ascontiguousarray(voxels)


def as_channels(array: Array) -> Array:
    """View an array (Z, Y, X) or (C, Z, Y, X) as (C, Z, Y, X), bool as uint8; refuse dtypes that are not sampled."""
    if array.ndim not in (3, 4) or 0 in array.shape or max(array.shape[-3:]) >= _AXIS_LIMIT:
        raise ValueError(
            f"array has shape {array.shape}; give one of shape (Z, Y, X) or (C, Z, Y, X), without empty axes"
        )
    if array.dtype == bool:
        array = array.view(np.uint8)  # type: ignore[attr-defined]
    if array.dtype.str[1:] not in _DTYPES:
        raise ValueError(
            f"array has dtype {array.dtype}; voxels are integers of 8 to 32 bits or floats of 16 to 64 bits"
        )
    return array if array.ndim == 4 else array[None]


def check_range(value_range: Iterable[float] | None) -> Range | None:
    """Check the range that is mapped to 0 to 1, and return it as floats; None stays None."""
    if value_range is None:
        return None
    try:
        low, high = (float(v) for v in value_range)
    except (TypeError, ValueError) as error:
        raise ValueError(f"range={value_range!r}: give the lowest and the highest value") from error
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(f"range={value_range!r}: give two finite values, the lower one first")
    if max(abs(low), abs(high)) > _MAX_RANGE_VALUE or 0 < high - low < 1 / _MAX_RANGE_VALUE:
        raise ValueError(
            f"range={value_range!r}: float32 arithmetic needs values up to {_MAX_RANGE_VALUE:g}, and 0 or at least "
            f"{1 / _MAX_RANGE_VALUE:g} between them"
        )
    return low, high


def is_kept(dtype: np.dtype, low_high: Range | None) -> bool:
    """Return whether voxels keep their dtype on a device; other voxels become float32, with a range normalised first.

    With a range only integers of up to 16 bits keep their dtype, if float32 represents `low`: the kernel's subtraction
    is then exact.
    """
    if low_high is None:
        return dtype.str[1:] in KEPT
    return dtype.str[1:] in ("u1", "i1", "u2", "i2") and float(np.float32(low_high[0])) == low_high[0]


def to_device(voxels: Array, low_high: Range | None, labels: bool) -> tuple[Array, bool]:
    """Copy voxels to device memory, part by part; a CuPy array is copied only if order or dtype must change.

    `voxels`, (C, Z, Y, X), are NumPy (in memory or mapped) or CuPy, of any dtype and byte order that is sampled; labels
    become int32. Returns a C-contiguous CuPy array, and whether `low_high`, the range that is mapped to 0 to 1, has
    been applied; if not, kernels apply it.
    """
    import cupy

    kept = not labels and is_kept(voxels.dtype, low_high)
    if isinstance(voxels, cupy.ndarray):
        if labels or kept:
            return cupy.ascontiguousarray(voxels.astype(np.int32, copy=False) if labels else voxels), False
        result = cupy.empty(voxels.shape, np.float32)
        for source, out in zip(voxels, result, strict=True):
            out[...] = normalised(source, low_high)
        return result, low_high is not None
    native = voxels.dtype.newbyteorder("=")
    target = native if kept else np.dtype(np.int32 if labels else np.float32)
    target_voxels = cupy.empty(voxels.shape, target)
    planes = max(1, _PART_NBYTES // max(1, voxels[0, 0].size * 8))
    for channel, out in zip(voxels, target_voxels, strict=True):
        for z in range(0, len(channel), planes):
            part = channel[z : z + planes]
            out[z : z + planes].set(
                np.ascontiguousarray(cast_elements(part, target) if kept or labels else normalised(part, low_high))
            )
    return target_voxels, low_high is not None and not kept
