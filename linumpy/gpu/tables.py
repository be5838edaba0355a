"""Upload small tables for kernels in one copy. A caller that caches them does so for one queue of work.

In: NumPy arrays. Out: :class:`~linumpy.gpu.kernels.Uploaded` views of one device array; of a host array in tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from linumpy.arrays import Array, is_device_array
from linumpy.gpu.kernels import Uploaded, current_queue, uploaded

#: Alignment of a table in bytes, so that a thread may load a row of weights at once.
_ALIGNED = 64

#: The queue of work that a table belongs to, a key of :func:`linumpy.gpu.kernels.current_queue`; None on the host.
Queue = tuple[int, int, int] | None


def queue_of(array: Array) -> Queue:
    """Return the current queue of work for an array; None on the host."""
    return current_queue() if is_device_array(array) else None


def upload(tables: Sequence[np.ndarray], queue: Queue) -> Uploaded:
    """Upload tables; return each as an array of uint8 that begins at, and is padded to, a multiple of 64 bytes."""
    sizes = [-(-table.nbytes // _ALIGNED) * _ALIGNED for table in tables]
    ends = np.cumsum(sizes)
    packed: Array = np.zeros(int(ends[-1]), np.uint8)
    for table, size, end in zip(tables, sizes, ends, strict=True):
        packed[end - size : end - size + table.nbytes] = table.reshape(-1).view(np.uint8)
    if queue is not None:
        import cupy

        packed = cupy.asarray(packed)
    parts = tuple(packed[end - size : end] for size, end in zip(sizes, ends, strict=True))
    return Uploaded(parts, None) if queue is None else uploaded(parts)
