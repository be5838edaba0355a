"""Read and write planes of a volume: an array in memory, a Zarr array, or an OME-Zarr image that is being written.

In: the volume of a session. Out: :class:`Planes` or :class:`WriterPlanes`, which read ranges of planes into the memory
of a backend and write them. Errors: ``TypeError`` and ``ValueError`` that name the parameter.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import zarr

from linumpy.arrays import Array, is_writable
from linumpy.checks import is_integer
from linumpy.device import is_device_array, to_host
from linumpy.io.volume import Volume, as_volume
from linumpy.io.zarr_mode import read_chunks_on_host, write_from_host
from linumpy.write.writer import OmeZarrWriter


class Planes:
    """The planes of a volume (Z, Y, X) of bool or integers.

    - `array`: three axes of space, Z first; bool or integers.
    - `xp`: array module of planes that are read: NumPy or CuPy.
    - `name`: name of the parameter, for errors.
    """

    def __init__(self, array: Array | zarr.Array | Volume, xp: ModuleType, name: str) -> None:
        self._xp = xp
        self._volume: Volume | None = as_volume(array) if isinstance(array, (zarr.Array, Volume)) else None
        if self._volume is None and not isinstance(array, np.ndarray) and not is_device_array(array):
            raise TypeError(f"{name} is {type(array).__name__}: a NumPy, CuPy or Zarr array is needed")
        self._array: Any = array  # in memory; unused where there is a volume
        held: Any = self._volume or array
        self.shape: tuple[int, ...] = tuple(held.shape)
        self.dtype = np.dtype(held.dtype)
        if len(self.shape) != 3 or self.dtype.kind not in "biu" or min(self.shape) < 1:
            raise TypeError(f"{name} of shape {self.shape}, {self.dtype}: bool or integers (Z, Y, X) are needed")
        #: Number of planes of a stored object (a shard or a chunk); 1 in memory.
        self.step = 1 if self._volume is None else int((self._volume.shards or self._volume.chunks)[0])
        #: Whether a write that fails may have stored some of its planes.
        self.writes_in_parts = self._volume is not None
        self.writable = is_writable(held) if self._volume is None else not self._volume.array.read_only

    def shares(self, other: Planes) -> bool:
        """Return whether writing to one of the volumes may change the other."""
        if self._volume is not None and other._volume is not None:
            return self._volume.array.store_path == other._volume.array.store_path
        if self._volume is not None or other._volume is not None:
            return False
        mine, theirs = self._array, other._array
        if is_device_array(mine) or is_device_array(theirs):
            both = is_device_array(mine) and is_device_array(theirs)
            return both and mine.data.mem.ptr == theirs.data.mem.ptr
        return bool(np.may_share_memory(mine, theirs))

    def read(self, start: int, stop: int) -> Array:
        """Return a copy of planes `start` to `stop`, in the machine's byte order."""
        if self._volume is None:
            return self._copy(self._array[start:stop])
        region = self._volume.region((slice(start, stop), slice(None), slice(None)))
        if self._xp is np:
            return self._copy(read_chunks_on_host(self._volume.array, region))
        from linumpy.gpu.zarr_io import read_zarr_to_gpu

        return read_zarr_to_gpu(self._volume.array, region=region)

    def write(self, start: int, planes: Array) -> None:
        """Write planes from index `start` on."""
        stop = start + planes.shape[0]
        if self._volume is not None:
            box = (slice(start, stop), slice(None), slice(None))
            write_from_host(self._volume.array, self._volume.region(box), to_host(planes))
        else:
            self._array[start:stop] = planes if is_device_array(self._array) else to_host(planes)

    def _copy(self, planes: Array) -> Array:
        if is_device_array(planes) and self._xp is np:
            planes = to_host(planes)
        if not is_device_array(planes):
            planes = np.asarray(planes, dtype=planes.dtype.newbyteorder("="))
        return self._xp.array(planes)


class WriterPlanes:
    """The planes of an image that an ``OmeZarrWriter`` writes, of the shape of `source`; attributes as of `Planes`."""

    writable, writes_in_parts = True, True

    def __init__(self, writer: OmeZarrWriter, source: Planes | None) -> None:
        self._writer = writer
        self.shape, self.dtype, self.step = tuple(writer.shape), np.dtype(writer.dtype), int(writer.stored[0])
        needed = "(Z, Y, X)" if source is None else source.shape
        if len(self.shape) != 3 or self.dtype.kind not in "biu" or (source is not None and needed != self.shape):
            raise ValueError(f"out writes {self.shape}, {self.dtype}: bool or integers of {needed} are needed")
        if source is not None and self.dtype.kind != "b" and not np.can_cast(source.dtype, self.dtype):
            raise ValueError(f"out writes {self.dtype}, which cannot hold all labels of the array's {source.dtype}")

    def write(self, start: int, planes: Array) -> None:
        """Write planes from index `start` on, from the host or a device."""
        self._writer.write(slice(start, start + planes.shape[0]), planes)


def check_label(label: int | None, dtype: np.dtype) -> int | None:
    """Check a label of a volume of a dtype, and return it."""
    if label is None:
        return None
    if dtype.kind == "b":
        raise ValueError(f"label={label!r}: the volume is bool and has no labels")
    limits = np.iinfo(dtype)
    if not is_integer(label) or label == 0 or not limits.min <= label <= limits.max:
        raise ValueError(f"label={label!r}: a label of {dtype} is an integer other than 0, at most {limits.max}")
    return int(label)
