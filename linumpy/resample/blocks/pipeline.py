"""Make the blocks of a resampled volume: read the box of the source, transform the box, write the block.

:class:`BlockJob` can be sent to another process if its source can. Blocks are whole chunks of the target
(``linumpy.write.chunks``). Reading, transforming and writing overlap (``linumpy.resample.blocks.overlap``).
``linumpy.resample.blocks.on_device`` has the stage of a device.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

import numpy as np
import zarr

from linumpy.arrays import Array, DeviceName
from linumpy.io.open import open_source
from linumpy.io.output.objects import Target, writable_store
from linumpy.io.source import Source, describe_source
from linumpy.io.stores.zips import verify_region
from linumpy.io.volume import Volume, as_volume
from linumpy.plan.grid.blocks import Block, ResamplePlan
from linumpy.plan.read import plan_read
from linumpy.resample.blocks.block import make_box
from linumpy.resample.blocks.overlap import work_through
from linumpy.write.chunks import Batch, Chunks, chunks_of
from linumpy.write.tasks import Finish, writing_threads

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlockJob:
    """The parameters of all blocks of a volume.

    - `source`, `target`: the array to read, which other processes open again; place of the array to write.
    - `cval`: value outside of the source.
    - `device` (``"cuda"`` or ``"cpu"``): device of the transform.
    - `scratch_bytes`: device memory that a read may use beyond its result; None on the CPU, or for the default.
    - `index`: the volume in the source, as in :class:`linumpy.io.volume.Volume`; by default the source is a volume.
    - `entries`: the volume in the target: an index for each axis of time and channel.
    - `batch`: the batches that a device encodes; None for the default.
    - `cache_bytes`: memory for decoded chunks of the source that several blocks need.
    """

    source: Source
    target: Target
    plan: ResamplePlan
    cval: float
    device: DeviceName
    scratch_bytes: int | None
    index: tuple[int | None, ...] | None = None
    entries: tuple[int, ...] = ()
    batch: Batch | None = None
    cache_bytes: int = 0

    def open(self) -> tuple[Volume, zarr.Array]:
        """Open source and target."""
        source = open_source(self.source)
        return as_volume(source) if self.index is None else Volume(source, self.index), _open_target(self.target)


def _open_target(place: Target) -> zarr.Array:
    array = zarr.open_array(writable_store(place), mode="r+")
    # Otherwise a block of zeros would not be written, and a resumed run would leave older voxels.
    return array.with_config({"write_empty_chunks": True})


def make_block(job: BlockJob, number: int) -> int:
    """Read, transform and write one block, on CuPy's current stream; return the number of the block.

    Making a block twice is harmless: the same bytes are written to the same chunks.
    """
    block = job.plan.block(number)
    with closing(open_stage(job, slots=1)) as stage:
        stage.write(block, stage.transform(block, stage.read(block)))()
    return number


def make_blocks(job: BlockJob, blocks: Iterable[Block], done: Callable[[Block], object]) -> None:
    """Make blocks of the job's plan in turn; the steps overlap. `done` is called with each, in this thread."""
    with closing(open_stage(job, slots=2)) as stage:
        work_through(blocks, stage.read, stage.transform, stage.write, device=job.device, done=done)


def make_blocks_on_each(
    job: BlockJob, blocks: Iterable[Block], done: Callable[[Block], object], devices: Sequence[int]
) -> None:
    """Make blocks on several devices; one takes the next block when it has read its last block.

    `done` is called with each written block, by one thread at a time.
    """
    from linumpy.gpu.devices import on_each

    queue, lock = deque(blocks), threading.Lock()

    def next_blocks() -> Iterator[Block]:
        with suppress(IndexError):  # the queue is empty
            while True:
                yield queue.popleft()

    def settle(block: Block) -> None:
        with lock:
            done(block)

    def work(_: int) -> None:
        try:
            make_blocks(job, next_blocks(), settle)
        except BaseException:
            queue.clear()  # the other devices complete the blocks that they have begun, and then stop
            raise

    on_each(devices[: len(queue)], work)


class HostStage:
    """Reads, transforms and writes blocks in the same order, in host memory."""

    def __init__(self, job: BlockJob, *, slots: int) -> None:
        from linumpy.gpu import Reader  # only for reads

        self._job = job
        self._source, self._target = job.open()
        self._dtype = self._target.dtype
        self._scope = ExitStack()
        if job.device == "cpu":
            self._on_host = self._scope.enter_context(Reader("cpu", cache_bytes=job.cache_bytes if slots > 1 else 0))
            layout = self._on_host.layout_of(self._source.array)
            self._needed = np.zeros([-(-n // c) for n, c in zip(layout.shape, layout.chunk_shape, strict=True)], bool)
        threads = writing_threads(job.target)
        pool = ThreadPoolExecutor(threads, "linumpy-chunks")
        self._scope.callback(pool.shutdown, cancel_futures=True)
        # A worker, which makes one block, may still write when dask considers it lost and another repeats the block.
        self._chunks = chunks_of(self._target, pool, threads, renamed=slots == 1, batch=job.batch)

    def read(self, block: Block) -> Array:
        """Read the box of the source that a block needs, into this machine's byte order."""
        if not math.prod(block.source_shape):
            return np.empty(block.source_shape, self._source.dtype.newbyteorder("="))
        if self._job.device == "cpu":
            plan = plan_read(self._on_host.layout_of(self._source.array), self._source.region(block.source_box))
            self._needed[tuple(slice(*sides) for sides in plan.chunk_box)] = True
        return self._read_box(block.source_box)

    def transform(self, block: Block, source: Array) -> Array:
        """Transform the box into the block. With a warp, read field and source here."""
        return self._make(block, source, np.empty(block.shape, self._dtype))

    def write(self, block: Block, result: Array) -> Finish:
        """Start to write the block; `result` may change when this returns."""
        return write_block(self._chunks, block, result, self._job.entries)

    def close(self) -> None:
        """Wait for the writing threads, and log how often chunks of the source were fetched."""
        if self._job.device == "cpu":
            log_fetches(describe_source(self._source.array), self._on_host.stats().chunks, int(self._needed.sum()))
        self._scope.close()

    def _read_array(self, array: zarr.Array, region: tuple[int | slice, ...]) -> Array:
        """Read a region of an array into the memory of blocks, in this machine's byte order."""
        verify_region(plan_read(self._on_host.layout_of(array), region))
        return self._on_host.submit(array, region).result()

    def _read_box(self, box: tuple[slice, ...]) -> Array:
        return self._read_array(self._source.array, self._source.region(box))

    def _make(self, block: Block, source: Array, out: Array) -> Array:
        grid, cval = self._job.plan.grid, self._job.cval
        if grid.warp:
            from linumpy.resample.blocks.warp import make_warped

            return make_warped(grid, block, cval, out, self._read_box, self._read_array, self._job.plan.part_bytes)
        return make_box(source, grid, block, cval, out)


def open_stage(job: BlockJob, *, slots: int) -> HostStage:
    """Return the stage for the job's device, with `slots` buffers: 1 on a worker, which makes one block; here 2."""
    if job.device == "cuda":
        from linumpy.resample.blocks.on_device import CudaStage

        return CudaStage(job, slots=slots)
    return HostStage(job, slots=slots)


def log_fetches(name: str, fetched: int, needed: int) -> None:
    """Log how many chunks of a source were fetched, and how many were needed."""
    if fetched and needed:
        log.info("%s: %d chunks fetched, %d needed: %.2f each", name, fetched, needed, fetched / needed)


def level_chunks(folder: Target, pool: ThreadPoolExecutor, threads: int, batch: Batch | None = None) -> Chunks:
    """Open an array in a work folder, such as a resolution of an image, for writing whole chunks."""
    return chunks_of(_open_target(folder), pool, threads, batch=batch)


def write_block(chunks: Chunks, block: Block, data: Array, entries: tuple[int, ...] = ()) -> Finish:
    """Start to write a block of a volume, which consists of whole chunks or shards."""
    leading = tuple(slice(entry, entry + 1) for entry in entries)
    return chunks.start((*leading, *block.box), data[(None,) * len(entries)])
