"""Copy the blocks of an array: read a box, write it as whole chunks (or shards), encoded on the device or the host.

In: :class:`CopyJob`, which can be sent to another process if its source is a path. Out: chunks of an existing array.
Errors: those of reading and writing, and :class:`~linumpy.errors.DeviceMemoryError` if a block of one chunk (or shard)
does not fit into the memory of the device. In host memory such a block may exceed the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zarr

from linumpy.arrays import Array
from linumpy.device import kvikio_mode, require_cuda
from linumpy.errors import DeviceMemoryError, SourceError
from linumpy.gpu.kvikio_settings import transfer_settings
from linumpy.gpu.kvikio_zarr import OwnReader
from linumpy.gpu.read.layouts import LAYOUTS
from linumpy.gpu.zarr_io import read_zarr
from linumpy.io.open import open_source
from linumpy.io.stores.tiff import TiffStack
from linumpy.io.stores.zips import verify_region
from linumpy.io.zarr_mode import read_on_host
from linumpy.plan.pyramid import Box, grown, split
from linumpy.plan.read import plan_read
from linumpy.resample.blocks.pipeline import level_chunks, read_to_device
from linumpy.resample.blocks.plans import memory_budget, scratch_within
from linumpy.resample.convert.hierarchy import ArrayCopy
from linumpy.write.encoded_chunks import NO_BATCH, Batch, plan_batch
from linumpy.write.raw_chunks import writing_threads
from linumpy.write.regions import region_text
from linumpy.write.tasks import Finish
from linumpy.write.writer import STEP_BYTES

#: Maximum number of blocks in memory: one that is read, two that wait, two that are being written.
_BLOCKS = 5


@dataclass(frozen=True)
class CopyJob:
    """The parameters of all blocks of a copy.

    - `source`: the array to copy; a path if other processes open it.
    - `target`: path of the array to write.
    - `dtype`: data type of the copy, in this machine's byte order.
    - `shape`, `block`: voxels of the array, and of a block.
    - `device` (``"cuda"`` or ``"cpu"``): device that decodes and encodes chunks.
    - `stack`: the source, if it is a TIFF stack.
    - `scratch_bytes`: device memory that a read may use beyond its result; None on the CPU.
    - `batch`: the batches that a device encodes; None on the CPU.
    """

    source: str | zarr.Array
    target: str
    dtype: np.dtype
    shape: tuple[int, ...]
    block: tuple[int, ...]
    device: str
    stack: TiffStack | None = None
    scratch_bytes: int | None = None
    batch: Batch | None = None

    @property
    def boxes(self) -> list[Box]:
        """All blocks."""
        return list(split(tuple(slice(0, n) for n in self.shape), self.block))

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block."""
        return math.prod(self.block) * self.dtype.itemsize


@contextmanager
def open_copier(job: CopyJob) -> Iterator[tuple[Callable[[Box], Array], Callable[[Box, Array], Finish]]]:
    """Yield two functions: one reads a box, one starts to write a box; on a device, on CuPy's current stream."""
    threads, on_device = writing_threads(), job.device == "cuda"
    source = open_source(job.source) if isinstance(job.source, str) else job.source
    with ExitStack() as scope:
        pool = scope.enter_context(ThreadPoolExecutor(threads, "linumpy-chunks"))
        chunks = level_chunks(Path(job.target), pool, threads, job.batch)
        if on_device:
            reader = scope.enter_context(closing(OwnReader(job.scratch_bytes)))
            if kvikio_mode()[0] != "none":
                scope.enter_context(transfer_settings())

        def read(box: Box) -> Array:
            if job.stack is not None:
                voxels = _read_pages(job.stack, box)
                return require_cuda().asarray(voxels) if on_device else voxels  # type: ignore[no-any-return]
            verify_region(plan_read(LAYOUTS.get(source, 0), box))
            if on_device:
                return read_to_device(source, box, reader)
            return np.asarray(read_zarr(source, region=box, device="cpu"), job.dtype)

        yield read, chunks.start


def _read_pages(stack: TiffStack, box: Box) -> np.ndarray:
    """Read a box of a stack; raise an error that names the file if a page cannot be read."""
    stored, others = [slice(0, 1)] * stack.array.ndim, tuple(set(range(stack.array.ndim)).difference(stack.order))
    for axis, part in zip(stack.order, box, strict=True):
        stored[axis] = part
    try:
        voxels = np.asarray(read_on_host(stack.array, tuple(stored)), stack.array.dtype.newbyteorder("="))
    except Exception as error:  # a decoder may raise anything
        axis = stack.axes.find("z")
        files = stack.files[box[axis]] if stack.is_folder else stack.files[:1]
        for z in range(box[axis].start, box[axis].stop) if len(files) > 1 and stack.is_folder else ():
            _read_pages(stack, (*box[:axis], slice(z, z + 1), *box[axis + 1 :]))  # raises the error of the broken page
        name = (
            files[0]
            if len(stack.files) == 1 or stack.is_folder
            else f"one of the {len(stack.files)} files of {files[0]}"
        )
        raise SourceError(f"{name} cannot be read at {region_text(box)}: {error}") from error
    return np.ascontiguousarray(voxels.squeeze(others).transpose(np.argsort(np.argsort(stack.order))))


def copy_box(job: CopyJob, number: int) -> None:
    """Copy one block; `number` is the index in the boxes of the job."""
    box = job.boxes[number]
    with open_copier(job) as (read, write):
        write(box, read(box))()


def plan_copy(copy: ArrayCopy, kind: str, limit: int | None, *, stack: TiffStack | None = None) -> CopyJob:
    """Plan blocks of whole chunks (or shards) of the copy and, if memory allows it, also of the source.

    `kind` is ``"cuda"`` or ``"cpu"``, `limit` the memory in bytes. The caller sets the job's `target`, which is empty.
    """
    budget, itemsize = memory_budget(kind, limit), copy.dtype.itemsize
    min_nbytes, scratch, batch = math.prod(copy.stored) * itemsize, None, None
    if kind == "cuda":
        chunk_nbytes = math.prod(copy.chunks) * itemsize
        scratch, batch = scratch_within(budget), plan_batch(copy.encoding, chunk_nbytes, min_nbytes, budget)
        budget -= scratch
        if _BLOCKS * min_nbytes > budget - batch.device_nbytes:
            batch = NO_BATCH
        budget -= batch.device_nbytes
        if _BLOCKS * min_nbytes > budget:
            raise DeviceMemoryError(
                f"blocks of one chunk (or shard) {copy.stored} need {_BLOCKS * min_nbytes} bytes, and {max(0, budget)} "
                "may be used: pass a larger device_memory, or smaller chunks and shards"
            )
    shape, max_nbytes = copy.shape, max(1, min(STEP_BYTES, budget // _BLOCKS))
    size = [min(s, n) for s, n in zip(copy.stored, shape, strict=True)]
    for axis in reversed(range(len(shape))):  # the last axes first, along which voxels are contiguous
        longer = min(math.lcm(copy.stored[axis], copy.source_stored[axis]), shape[axis])
        if math.prod(size) // size[axis] * longer * itemsize <= max_nbytes:
            size[axis] = longer
    block = grown(tuple(size), shape, itemsize, max_nbytes)
    return CopyJob(copy.source, "", copy.dtype, shape, block, kind, stack, scratch, batch)
