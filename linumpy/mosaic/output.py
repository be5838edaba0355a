"""Write an OME-Zarr image box by box, from the device or the host: the only place where a mosaic leaves the device.

In: what an image is, then its boxes. Out: the image, complete or not at all; coarser resolutions are made from the
finest when that is complete. Errors: those of :func:`linumpy.io.writer.create_omezarr`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from linumpy.device import is_device_array, require_cuda
from linumpy.gpu.zarr_gpu import host_zarr_context
from linumpy.io.writer import blocks, create_omezarr, halved

Write = Callable[[tuple[slice, ...], Any], None]
"""Takes a box of the image and its voxels, on the device or the host, and returns when they are written. One at a time:
the boxes share a buffer."""


@contextmanager
def new_image(
    path: str | Path, shape: Sequence[int], dtype: Any, spacing: Sequence[float], *, n_levels: int = 1, **options: Any
) -> Iterator[tuple[Write, tuple[int, ...]]]:
    """Make an OME-Zarr image whose finest resolution the caller writes.

    Parameters
    ----------
    path, shape, dtype, spacing
        As for :func:`linumpy.io.writer.create_omezarr`.
    n_levels : int
        Resolutions.
    options
        What else that function takes.

    Yields
    ------
    write : callable
        As :data:`Write` says.
    stored : tuple of int
        What is whole in storage: shards where the image has them, else chunks.
    """
    with create_omezarr(path, shape, dtype, spacing, levels=n_levels, **options) as targets:
        finest = targets[0]
        landing = _Landing()

        def write(box: tuple[slice, ...], voxels: Any) -> None:
            host = landing.bring(voxels)
            with host_zarr_context():  # where zarr reads the source, it does so in its GPU mode, in another thread
                finest[box] = host

        yield write, finest.shards or finest.chunks
        for finer, coarser in itertools.pairwise(targets):
            for box in blocks(coarser):
                coarser[box] = halved(finer, box)


class _Landing:
    """Pinned host memory that voxels from a device land in before zarr writes them, made once for the largest box.

    New memory for every box would cost more than the copy: the kernel clears each page when it is first touched.
    """

    def __init__(self) -> None:
        self._memory: Any = None
        self._nbytes = 0

    def bring(self, voxels: Any) -> np.ndarray:
        """Bring voxels to host memory; valid until the next call."""
        if not is_device_array(voxels):
            return np.asarray(voxels)
        cupy = require_cuda()
        if voxels.nbytes > self._nbytes:
            self._memory = None
            self._memory, self._nbytes = cupy.cuda.alloc_pinned_memory(voxels.nbytes), voxels.nbytes
        host = np.frombuffer(self._memory, voxels.dtype, voxels.size).reshape(voxels.shape)
        cupy.ascontiguousarray(voxels).get(out=host)
        return host
