"""Planes of a volume, wherever it is: an array in memory, a Zarr array, or an OME-Zarr image that is being written.

In: what a session works on. Out: :class:`Planes`, which reads and writes ranges of planes where a backend works.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zarr

from linumpy.device import is_device_array, to_host
from linumpy.io.volume import Volume, as_volume
from linumpy.io.zarr_mode import read_chunks_on_host, write_from_host
from linumpy.voxel.operations import is_writable


class Planes:
    """The planes of a volume (Z, Y, X) of bool or integers.

    Parameters
    ----------
    array : numpy.ndarray, cupy.ndarray, zarr.Array or Volume
        Three axes of space, Z first.
    xp : module
        NumPy or CuPy: where planes that are read shall be.
    name : str
        Of the parameter, for errors.
    """

    def __init__(self, array: Any, xp: Any, name: str) -> None:
        self._xp = xp
        self._stored = isinstance(array, (zarr.Array, Volume))
        self._array: Any = as_volume(array) if self._stored else array
        if not self._stored and not isinstance(array, np.ndarray) and not is_device_array(array):
            raise TypeError(f"{name} is {type(array).__name__}: a NumPy, CuPy or Zarr array is needed")
        if len(self.shape) != 3 or self.dtype.kind not in "biu" or min(self.shape) < 1:
            raise TypeError(f"{name} of shape {self.shape}, {self.dtype}: bool or integers (Z, Y, X) are needed")

    @property
    def shape(self) -> tuple[int, ...]:
        """Voxels along (Z, Y, X)."""
        return tuple(self._array.shape)

    @property
    def dtype(self) -> np.dtype:
        """Of the voxels."""
        return np.dtype(self._array.dtype)

    @property
    def step(self) -> int:
        """Planes that are whole in storage; 1 in memory."""
        return int((self._array.shards or self._array.chunks)[0]) if self._stored else 1

    @property
    def writes_in_parts(self) -> bool:
        """Whether a write that fails may have stored some of its planes."""
        return self._stored

    @property
    def writable(self) -> bool:
        """Whether :meth:`write` works."""
        if self._stored:
            return not self._array.array.read_only
        return is_writable(self._array)

    def shares(self, other: Planes) -> bool:
        """Say whether writing to one may change the other."""
        if self._stored or other._stored:
            both = self._stored and other._stored
            return both and self._array.array.store_path == other._array.array.store_path
        mine, theirs = self._array, other._array
        if is_device_array(mine) or is_device_array(theirs):
            both = is_device_array(mine) and is_device_array(theirs)
            return both and mine.data.mem.ptr == theirs.data.mem.ptr
        return bool(np.may_share_memory(mine, theirs))

    def read(self, start: int, stop: int) -> Any:
        """Return a copy of some planes, in the machine's byte order."""
        if not self._stored:
            return self._here(self._array[start:stop])
        region = self._array.region((slice(start, stop), slice(None), slice(None)))
        if self._xp is np:
            return self._here(read_chunks_on_host(self._array.array, region))
        from linumpy.gpu.zarr_io import read_zarr_to_gpu

        return read_zarr_to_gpu(self._array.array, region=region)

    def write(self, start: int, planes: Any) -> None:
        """Write some planes."""
        stop = start + planes.shape[0]
        if self._stored:
            box = (slice(start, stop), slice(None), slice(None))
            write_from_host(self._array.array, self._array.region(box), to_host(planes))
        else:
            self._array[start:stop] = planes if is_device_array(self._array) else to_host(planes)

    def _here(self, planes: Any) -> Any:
        if is_device_array(planes) and self._xp is np:
            planes = to_host(planes)
        if not is_device_array(planes):
            planes = np.asarray(planes, dtype=planes.dtype.newbyteorder("="))
        return self._xp.array(planes)


class NoPlanes:
    """A volume of zeros that is not stored."""

    step, writable, writes_in_parts = 1, False, False

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, xp: Any) -> None:
        self.shape, self.dtype, self._xp = shape, dtype, xp

    def read(self, start: int, stop: int) -> Any:
        """Return zeros."""
        return self._xp.zeros((stop - start, *self.shape[1:]), self.dtype)

    def write(self, start: int, planes: Any) -> None:
        """Not possible: the volume is not stored."""
        raise NotImplementedError


class WriterPlanes:
    """The planes of an image that an ``OmeZarrWriter`` writes."""

    writable, writes_in_parts = True, True

    def __init__(self, writer: Any, shape: tuple[int, ...] | None) -> None:
        self._writer = writer
        self.shape, self.dtype, self.step = tuple(writer.shape), np.dtype(writer.dtype), int(writer.stored[0])
        if len(self.shape) != 3 or self.dtype.kind not in "biu" or (shape is not None and shape != self.shape):
            wanted = "(Z, Y, X)" if shape is None else shape
            raise ValueError(f"out writes {self.shape}, {self.dtype}: bool or integers of {wanted} are needed")

    def write(self, start: int, planes: Any) -> None:
        """Write some planes, from the host or a device."""
        self._writer.write(slice(start, start + planes.shape[0]), planes)
