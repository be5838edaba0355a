"""Make the blocks of a resampled volume: read the box of the source, transform it, write the block.

In: :class:`BlockJob`, which names everything by path and number, so that it can be sent to another process. Out: blocks
in the arrays of the target, each written whole: raw chunks straight to their files, many at a time
(``linumpy.write.raw_chunks``), all others by zarr. Reading, making and writing overlap (``linumpy.resample.overlap``);
on a device there are two buffers for boxes and two for blocks. :func:`make_block` makes a single one, for
``linumpy.resample.workers``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import zarr

from linumpy.device import kvikio_mode, require_cuda
from linumpy.gpu.kvikio_settings import transfer_settings
from linumpy.gpu.kvikio_zarr import OwnReader
from linumpy.gpu.zarr_io import read_region_into
from linumpy.io.open import open_source
from linumpy.io.source import Source, local_store
from linumpy.io.volume import Volume, as_volume
from linumpy.io.zarr_mode import read_chunks_on_host
from linumpy.plan.grid.blocks import Block, ResamplePlan
from linumpy.resample.block import make_box
from linumpy.resample.overlap import work_through
from linumpy.write.raw_chunks import Chunks, chunks_of, writing_threads


@dataclass(frozen=True)
class BlockJob:
    """What every block of a volume is made from.

    Attributes
    ----------
    source : Source
        The array to read; a path or a URL where other processes are to open it.
    target : str
        Path of the array to write.
    plan : ResamplePlan
        The blocks.
    cval : float
        Value outside of the source.
    device : {"cuda", "cpu"}
        Where blocks are made.
    scratch_bytes : int or None
        Device memory that a read may use beyond its result.
    index : tuple of int or None, optional
        Which volume of the source is read, as :class:`linumpy.io.volume.Volume` has it; by default all axes are of
        space.
    entries : tuple of int
        Where the volume lies in the target: the entry of each of its axes of time and channel.
    """

    source: Source
    target: str
    plan: ResamplePlan
    cval: float
    device: str
    scratch_bytes: int | None
    index: tuple[int | None, ...] | None = None
    entries: tuple[int, ...] = ()

    def open(self) -> tuple[Volume, zarr.Array]:
        """Open source and target."""
        # Without it a block of zeros would not be written, and a resumed run leave what was there before.
        target = zarr.open_array(local_store(self.target, read_only=False), mode="r+")
        target = target.with_config({"write_empty_chunks": True})
        source = open_source(self.source)
        return as_volume(source) if self.index is None else Volume(source, self.index), target


def make_block(job: BlockJob, number: int) -> int:
    """Make one block from beginning to end, on CuPy's current stream; returns its number.

    To make it twice does no harm: the same bytes are written to the same chunks.
    """
    block = job.plan.block(number)
    with closing(open_stage(job, slots=1)) as stage:
        stage.write(block, stage.transform(block, stage.read(block)))
    return number


def make_blocks(job: BlockJob, blocks: Iterable[Block], done: Callable[[Block], object]) -> None:
    """Make blocks one after another; reading, making and writing overlap.

    Parameters
    ----------
    job : BlockJob
        What to make.
    blocks : iterable of Block
        Those of its plan that are wanted.
    done : callable
        Called with each block when it is written, in this thread.
    """
    wanted = list(blocks)
    if not wanted:
        return
    with closing(open_stage(job, slots=2)) as stage:
        work_through(wanted, stage.read, stage.transform, stage.write, use_gpu=job.device == "cuda", done=done)


class Stage(Protocol):
    """What reads, makes and writes blocks, each in the same order, on a device on CuPy's current stream."""

    def read(self, block: Block) -> Any:
        """Read the box of the source that a block needs."""

    def transform(self, block: Block, source: Any) -> Any:
        """Make the block; on a device, start to."""

    def write(self, block: Block, result: Any) -> None:
        """Write the block, and return when all of it is written."""

    def close(self) -> None:
        """Wait for the threads that write."""


def open_stage(job: BlockJob, *, slots: int) -> Stage:
    """Choose by the job's device."""
    return CudaStage(job, slots=slots) if job.device == "cuda" else HostStage(job, alone=slots > 1)


class HostStage:
    """Blocks are made in host memory."""

    def __init__(self, job: BlockJob, *, alone: bool) -> None:
        self._job = job
        self._source, target = job.open()
        self._dtype = target.dtype
        self._scope = ExitStack()
        self._chunks = _open_chunks(target, self._scope, alone=alone)

    def read(self, block: Block) -> np.ndarray:
        """Read by zarr, into this machine's byte order."""
        native = self._source.dtype.newbyteorder("=")
        if not math.prod(block.source_shape):
            return np.empty(block.source_shape, native)
        region = self._source.region(block.source_box)
        return np.asarray(read_chunks_on_host(self._source.array, region), native, order="C")

    def transform(self, block: Block, source: np.ndarray) -> np.ndarray:
        """Make the block."""
        out = np.empty(block.shape, self._dtype)
        return make_box(source, self._job.plan.grid, block, self._job.cval, out)

    def write(self, block: Block, result: np.ndarray) -> None:
        """Write it."""
        write_block(self._chunks, block, result, self._job.entries)

    def close(self) -> None:
        """Wait for the threads that write."""
        self._scope.close()


class CudaStage:
    """Blocks are made on a device. Buffers are made once, for the largest block, and used in turn."""

    def __init__(self, job: BlockJob, *, slots: int) -> None:
        cupy = require_cuda()
        self._job, self._slots = job, slots
        self._source, target = job.open()
        self._dtype = target.dtype
        source, output = job.plan.largest
        itemsize = self._dtype.itemsize
        self._boxes = [cupy.empty(source * itemsize, np.uint8) for _ in range(slots)]
        self._blocks = [cupy.empty(output * itemsize, np.uint8) for _ in range(slots)]
        cupy.cuda.get_current_stream().synchronize()  # the pool's last use of this memory has ended
        self._made: list[Any] = [None] * slots
        self._reads, self._transforms = itertools.count(), itertools.count()
        self._scope = ExitStack()
        # For all reads at once: each by itself would make threads, streams and pinned memory anew.
        self._reader = self._scope.enter_context(closing(OwnReader(job.scratch_bytes)))
        self._chunks = _open_chunks(target, self._scope, alone=slots > 1)
        if kvikio_mode()[0] != "none":
            # For all reads and writes at once: each by itself would set kvikio's threads up anew.
            self._scope.enter_context(transfer_settings())

    def read(self, block: Block) -> Any:
        """Read into the next buffer, once the block made from it before is done."""
        slot = next(self._reads) % self._slots
        if self._made[slot] is not None:
            require_cuda().cuda.get_current_stream().wait_event(self._made[slot])
        box = _view(self._boxes[slot], block.source_shape, self._dtype)
        if box.size:
            region = self._source.region(block.source_box)
            read_region_into(self._source.array, region, box, self._reader)
        return box

    def transform(self, block: Block, source: Any) -> Any:
        """Start to make the block."""
        slot = next(self._transforms) % self._slots
        out = _view(self._blocks[slot], block.shape, self._dtype)
        make_box(source, self._job.plan.grid, block, self._job.cval, out)
        self._made[slot] = require_cuda().cuda.get_current_stream().record()
        return out

    def write(self, block: Block, result: Any) -> None:
        """Write it from the device."""
        write_block(self._chunks, block, result, self._job.entries)

    def close(self) -> None:
        """Wait for the threads that write, and free the reader's memory."""
        self._scope.close()


def _open_chunks(target: zarr.Array, scope: ExitStack, *, alone: bool) -> Chunks:
    """Open what writes whole chunks, by threads that live as long as the scope."""
    threads = writing_threads()
    pool = ThreadPoolExecutor(threads, "linumpy-chunks")
    scope.callback(pool.shutdown, cancel_futures=True)
    # A worker that was given up for lost may still be at work on a block that another one makes again.
    return chunks_of(target, pool, threads, renamed=not alone)


def _view(buffer: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Look at the beginning of a buffer as an array."""
    return buffer[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def write_block(chunks: Chunks, block: Block, data: Any, entries: tuple[int, ...] = ()) -> None:
    """Write a block of a volume, whole chunks or shards, to the last byte."""
    leading = tuple(slice(one, one + 1) for one in entries)
    chunks.write((*leading, *block.box), data[(None,) * len(entries)])
