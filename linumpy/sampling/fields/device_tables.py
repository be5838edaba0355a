"""Base class of fields that NumPy and a kernel evaluate from the same tables.

In: tables, which are NumPy arrays; coordinates and an array for the values, on the host or on a device. Out: values.
Tables are uploaded to a device once and kept as long as the field. Kernels are queued on CuPy's current stream.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from linumpy.arrays import Array
from linumpy.device import is_device_array
from linumpy.gpu.kernels import KernelSpec, Uploaded, int64, load, uploaded
from linumpy.sampling.field import Field
from linumpy.sampling.threads import in_threads

_THREADS = 256


class DeviceTables:
    """The tables of a field, on the host and on every device that has evaluated the field."""

    def __init__(self, *arrays: np.ndarray) -> None:
        self.host = tuple(np.ascontiguousarray(array) for array in arrays)
        self._uploaded: dict[int, Uploaded] = {}  # by device
        self._lock = threading.Lock()

    def beside(self, array: Array) -> tuple[Array, ...]:
        """Return the tables in the memory of `array`, ready for later work on CuPy's current stream."""
        if not is_device_array(array):
            return self.host
        import cupy

        with self._lock:
            device = int(array.device.id)  # type: ignore[attr-defined]  # of CuPy's array
            if device not in self._uploaded:
                with cupy.cuda.Device(device):
                    self._uploaded[device] = uploaded(tuple(cupy.asarray(table) for table in self.host))
            tables = self._uploaded[device]
        return tables.get()


class TableField(Field):
    """A field with tables; subclasses set their kernel and tables, and evaluate points by NumPy."""

    _spec: KernelSpec
    _tables: DeviceTables

    def decode(self, coords: Array, out: Array) -> None:
        """Evaluate the field; see :class:`linumpy.sampling.field.Field`."""
        if not (isinstance(coords, np.ndarray) and isinstance(out, np.ndarray)):
            self.launch(coords, out)
            return

        def part(begin: int, end: int) -> None:
            points, values = coords[begin:end], out[:, begin:end]
            self._decode_host(np.clip(np.nan_to_num(points), np.float32(0), np.float32(1)), values)
            values[:, ~np.isfinite(points).all(1)] = np.nan

        in_threads(part, len(coords))

    def launch(self, coords: Array, out: Array) -> None:
        """Launch the kernel with a thread for each point."""
        if count := len(coords):
            args = (coords, out, *int64(count), *self._tables.beside(coords))
            load(self._spec)((-(-count // _THREADS),), (_THREADS,), args)

    @abc.abstractmethod
    def _decode_host(self, coords: np.ndarray, out: np.ndarray) -> None:
        """Evaluate points inside the unit cube: (n, 3) → `out`, (channels, n)."""


def record(fields: Sequence[tuple[str, str, ArrayLike]]) -> np.ndarray:
    """Make a record of fields (name, dtype, value), aligned as a kernel's structure; kernels take its bytes."""
    values = np.zeros(1, np.dtype([(name, dtype, np.shape(value)) for name, dtype, value in fields], align=True))
    for name, _, value in fields:
        values[name] = value
    return values
