"""Plan the blocks of a resampling within a memory limit.

Errors: :class:`~linumpy.errors.DeviceMemoryError` if not even a block of one chunk (or shard) fits, ``ValueError`` for
a limit that is not a number of bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from linumpy.arrays import DeviceName
from linumpy.device import free_memory, machine_memory, require_cuda
from linumpy.errors import DeviceMemoryError
from linumpy.io.layout import read_layout
from linumpy.io.volume import Volume
from linumpy.plan.codecs import Encoding
from linumpy.plan.crops import cache_nbytes
from linumpy.plan.grid.block_shape import BlockBytes, choose_block_shape, voxels_read
from linumpy.plan.grid.blocks import AffineGrid, ResamplePlan
from linumpy.resample.blocks.block import box_work_bytes
from linumpy.resample.blocks.pipeline import BlockJob
from linumpy.write.chunks import NO_BATCH, Batch, plan_batch

#: Default memory limit: a share of the free memory; and the maximum of that limit in host memory, in bytes.
_SHARE, _MAX_HOST_NBYTES = 0.8, 8 * 2**30
#: In host memory, blocks that read the source more often than this share a cache of chunks.
_FEW_READ_AGAIN = 1.02
#: Limit of a block that is sampled through fields of vectors, in bytes.
_MAX_WARPED_NBYTES = 128 * 2**20


def plan_blocks(
    grid: AffineGrid,
    source: Volume,
    stored: tuple[int, ...],
    device: DeviceName,
    memory_bytes: int | None = None,
    encoding: Encoding | None = None,
    chunk_nbytes: int = 0,
    *,
    may_cache: bool = True,
) -> BlockJob:
    """Plan the blocks of :func:`resample_zarr`, and the memory that reads and writes take; the job has no target.

    - `stored`: shape of a shard, or else of a chunk, of the target, along the axes of space.
    - `encoding`, `chunk_nbytes`: encoding and bytes of the voxels of an (inner) chunk; by default the chunks are raw.
    - `may_cache`: whether one process makes all blocks, so that decoded chunks in host memory serve several of them.
    """
    budget, itemsize = memory_budget(device, memory_bytes), source.dtype.itemsize
    if device == "cpu" or encoding is None:
        return _planned(grid, source, stored, device, budget, None, may_cache=may_cache)
    batch = plan_batch(encoding, chunk_nbytes, math.prod(stored) * itemsize, budget)
    try:
        return _planned(grid, source, stored, device, budget - batch.device_nbytes, batch)
    except DeviceMemoryError:
        return _planned(grid, source, stored, device, budget, NO_BATCH)  # the host encodes


def _planned(
    grid: AffineGrid,
    source: Volume,
    stored: tuple[int, ...],
    device: DeviceName,
    budget: int,
    batch: Batch | None,
    *,
    may_cache: bool = False,
) -> BlockJob:
    """Plan blocks within `budget`, the memory that encoding does not take."""
    itemsize = source.dtype.itemsize
    scratch = None if device == "cpu" else scratch_within(budget)
    if grid.warp:
        plan = _plan_warped_blocks(grid, stored, itemsize, budget)
        return BlockJob(source.array, Path(), plan, 0.0, device, scratch, batch=batch)
    work, output_work = box_work_bytes(source.dtype, grid, device)
    # Writing copies a block into the order of its chunks: raw chunks all at once, encoded chunks batch by batch.
    copied = itemsize if device == "cuda" and not (batch and batch.nbytes) else 0
    cost, budget = BlockBytes(itemsize, itemsize, work, output_work + copied), budget - (scratch or 0)
    shape, cache = choose_block_shape(grid, stored, cost, budget, source.chunks), 0
    read_again = voxels_read(grid, shape, source.chunks) / math.prod(grid.source_shape)
    if may_cache and device == "cpu" and read_again > _FEW_READ_AGAIN:
        layout = read_layout(source.array)
        count = math.prod(-(-n // c) for n, c in zip(layout.shape, layout.chunk_shape, strict=True))
        for share in (1 / 2, 1 / 4, 1 / 8):  # smaller blocks may take more than half of the memory
            with suppress(DeviceMemoryError):
                shape = choose_block_shape(grid, stored, cost, int(budget * (1 - share)), source.chunks)
                cache = min(int(budget * share), cache_nbytes(count, layout.chunk_nbytes))
                break
    return BlockJob(
        source.array, Path(), ResamplePlan(grid, shape), 0.0, device, scratch, batch=batch, cache_bytes=cache
    )


def memory_budget(device: DeviceName, memory_bytes: int | None) -> int:
    """Return the bytes that blocks may take, on a device or in host memory: the limit, or a default."""
    if memory_bytes is not None:
        return int(memory_bytes)
    return min(int(_SHARE * host_memory()), _MAX_HOST_NBYTES) if device == "cpu" else int(_SHARE * free_memory())


def _plan_warped_blocks(grid: AffineGrid, stored: tuple[int, ...], itemsize: int, budget: int) -> ResamplePlan:
    """Plan blocks, of whole chunks (or shards), that are sampled through fields of vectors.

    The three blocks in the pipeline take at most a fourth of the memory, or a half if one chunk (or shard) is so large.
    The rest is for a part of a block, whose boxes of field and source are read when the part is made
    (:func:`linumpy.resample.blocks.warp.make_warped`).
    """
    min_nbytes = 3 * math.prod(stored) * itemsize
    if min_nbytes > budget // 2:
        raise DeviceMemoryError(
            f"blocks of one chunk (or shard) {stored} need {2 * min_nbytes} bytes, and {budget} may be used: pass a "
            "larger memory_bytes or smaller chunks="
        )
    max_nbytes, shape = min(budget // 12, _MAX_WARPED_NBYTES), list(stored)
    while growing := [axis for axis, n in enumerate(shape) if n < grid.output_shape[axis]]:
        axis = min(growing, key=lambda axis: shape[axis])
        if 2 * math.prod(shape) * itemsize > max_nbytes:
            break
        shape[axis] *= 2
    return ResamplePlan(grid, tuple(shape), budget // 16)


def memory_of_each(devices: Sequence[int]) -> int:
    """Return the default memory limit if several devices make blocks: the smallest of their defaults."""
    cupy, budgets = require_cuda(), []
    for number in devices:
        with cupy.cuda.Device(number):
            budgets.append(memory_budget("cuda", None))
    return min(budgets)


def scratch_within(budget: int) -> int:
    """Return the device memory of a reader beyond its results: a fourth of the budget, within minimum and default."""
    from linumpy.gpu.read.request import DEFAULT_SCRATCH_BYTES, MIN_SCRATCH_BYTES

    return min(DEFAULT_SCRATCH_BYTES, max(MIN_SCRATCH_BYTES, int(budget) // 4))


def check_limit(memory_bytes: object) -> None:
    """Raise an error if a memory limit is not a number of bytes."""
    is_number = isinstance(memory_bytes, (int, float, np.integer))
    if memory_bytes is not None and not (is_number and 1 <= memory_bytes < math.inf):  # type: ignore[operator]
        raise ValueError(f"memory_bytes={memory_bytes!r}: pass a number of bytes")


def host_memory() -> int:
    """Return the bytes of host memory that are free; half of all where the system does not tell (macOS)."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return machine_memory() // 2
