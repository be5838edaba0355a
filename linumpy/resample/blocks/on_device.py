"""Make the blocks of a resampled volume on a device, where two buffers hold boxes and two hold blocks.

In: a :class:`~linumpy.resample.blocks.pipeline.BlockJob`. Out: its stage. The reader is loaded only with this module.
"""

from __future__ import annotations

import itertools
import math
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import zarr

from linumpy.arrays import Array
from linumpy.device import kvikio_mode, require_cuda
from linumpy.gpu.kvikio_settings import transfer_settings
from linumpy.gpu.kvikio_zarr import OwnReader
from linumpy.gpu.zarr_io import read_region_into
from linumpy.plan.grid.blocks import Block
from linumpy.resample.blocks.pipeline import BlockJob, HostStage

if TYPE_CHECKING:
    from cupy.cuda import Event


class CudaStage(HostStage):
    """Makes blocks on CuPy's current stream. Buffers are allocated once, for the largest block, and rotate."""

    def __init__(self, job: BlockJob, *, slots: int) -> None:
        cupy = require_cuda()
        super().__init__(job, slots=slots)
        self._slots = slots
        source, output = job.plan.largest
        itemsize = self._dtype.itemsize
        self._boxes = [cupy.empty(source * itemsize, np.uint8) for _ in range(slots)]
        self._blocks = [cupy.empty(output * itemsize, np.uint8) for _ in range(slots)]
        cupy.cuda.get_current_stream().synchronize()  # earlier work may still use this memory of CuPy's pool
        self._made: list[Event | None] = [None] * slots
        self._reads, self._transforms = itertools.count(), itertools.count()
        # One reader for all reads: it keeps its threads, streams and pinned memory.
        self._reader = self._scope.enter_context(closing(OwnReader(job.scratch_bytes)))
        if kvikio_mode()[0] != "none":
            # Set once for all reads and writes, since each change restarts kvikio's threads.
            self._scope.enter_context(transfer_settings())

    def read(self, block: Block) -> Array:
        """Read the box into the next buffer, after the last block that was made from this buffer is complete."""
        slot = next(self._reads) % self._slots
        if self._made[slot] is not None:
            require_cuda().cuda.get_current_stream().wait_event(self._made[slot])
        box = _view(self._boxes[slot], block.source_shape, self._dtype)
        if box.size:
            region = self._source.region(block.source_box)
            read_region_into(self._source.array, region, box, self._reader)
        return box

    def transform(self, block: Block, source: Array) -> Array:
        """Start to transform the box into the block."""
        slot = next(self._transforms) % self._slots
        out = _view(self._blocks[slot], block.shape, self._dtype)
        self._make(block, source, out)
        self._made[slot] = require_cuda().cuda.get_current_stream().record()
        return out

    def _read_array(self, array: zarr.Array, region: tuple[int | slice, ...]) -> Array:
        return read_to_device(array, region, self._reader)


def read_to_device(array: zarr.Array, region: tuple[int | slice, ...], reader: OwnReader) -> Array:
    """Read a region into new device memory, by a reader with its own memory limit."""
    shape = tuple(side.stop - side.start for side in region if isinstance(side, slice))
    out = require_cuda().empty(shape, array.dtype.newbyteorder("="))
    read_region_into(array, region, out, reader)
    return out


def _view(buffer: Array, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return an array on the beginning of a buffer."""
    return buffer[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
