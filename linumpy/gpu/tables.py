"""Small tables that kernels read, brought to the device in one copy and kept for the stream that uses them.

In: NumPy arrays. Out: views of one device array; of a host array in tests.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from linumpy.device import is_device_array

#: Of a table, so that a thread may load a row of weights at once.
_ALIGNED = 64

#: Device, stream and thread: by them work comes in order, so that what was uploaded in one call serves the next.
Place = tuple[int, int, int] | None


def place_of(array: Any) -> Place:
    """Name the queue of work in which a table is made and used; None for the host."""
    if not is_device_array(array):
        return None
    import cupy

    return int(cupy.cuda.Device().id), int(cupy.cuda.get_current_stream().ptr), threading.get_ident()


def upload(tables: Sequence[np.ndarray], place: Place) -> tuple[Any, ...]:
    """Bring tables to the device; bytes, each from a multiple of 64 on."""
    sizes = [-(-table.nbytes // _ALIGNED) * _ALIGNED for table in tables]
    ends = np.cumsum(sizes)
    packed: Any = np.zeros(int(ends[-1]), np.uint8)
    for table, size, end in zip(tables, sizes, ends, strict=True):
        packed[end - size : end - size + table.nbytes] = table.reshape(-1).view(np.uint8)
    if place is not None:
        import cupy

        packed = cupy.asarray(packed)
    return tuple(packed[end - size : end] for size, end in zip(sizes, ends, strict=True))
