"""Outer indexing of a Zarr array: an int, a slice of any step or a list of indices for each axis.

In: a layout, and an index for each axis. Out: a NumPy or CuPy array of the voxels that ``numpy.ix_`` would select.
Errors: those of :func:`linumpy.read_zarr`; ``IndexError`` for an index out of bounds.

The core reads boxes. So a list, or a slice with a step, is cut into *runs*: successive indices in one chunk, which are
read from the smallest to the largest. Chunks without an index are not read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array, ReadDevice
from linumpy.device import require_cuda
from linumpy.errors import StaleLayoutError
from linumpy.gpu.read.layouts import LAYOUTS
from linumpy.gpu.read.shared import shared_reader
from linumpy.io.source import Source
from linumpy.plan.layout import ArrayLayout

AxisIndex = int | np.integer | slice | np.ndarray
"""Index of one axis; an int drops the axis."""

#: A batch of boxes ends before it exceeds 8 MiB if it has at least 16 boxes, which occupy the reader's threads. A
#: larger batch costs more time for new memory than it saves.
_TARGET_NBYTES, _MIN_BOXES = 8 * 2**20, 16
#: Maximum bytes and boxes of any batch; a single box may have more bytes.
_MAX_NBYTES, _MAX_BOXES = 64 * 2**20, 4096


class LazyArray:
    """An array that is read where it is indexed; no file stays open.

    - `source`, `layout`: the array, or the path that is kept of it, and its layout.
    - `device`: as for :func:`read_outer`.
    """

    def __init__(self, source: Source, layout: ArrayLayout, device: ReadDevice = "cpu") -> None:
        self.source, self.device = source, device
        self.shape, self.dtype = layout.shape, layout.dtype.newbyteorder("=")
        self.chunks = tuple(map(min, layout.chunk_shape, layout.shape))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __getitem__(self, index: Any) -> Any:
        layout = LAYOUTS.get(self.source, 0)
        if (layout.shape, layout.dtype.newbyteorder("=")) != (self.shape, self.dtype):
            raise StaleLayoutError(
                f"{layout.name} was opened with shape {self.shape} and dtype {self.dtype} and has shape {layout.shape} "
                f"and dtype {layout.dtype} now: open it again"
            )
        given = index if isinstance(index, tuple) else (index,)
        return read_outer(layout, (*given, *[slice(None)] * (self.ndim - len(given))), self.device)


@dataclass(frozen=True)
class Run:
    """Indices along one axis that are read together.

    - `start`, `stop`: the voxels to read.
    - `inside`: the selected voxels, counted from `start`.
    - `target`: voxels of the result into which the selected voxels are written.
    """

    start: int
    stop: int
    inside: slice | np.ndarray
    target: slice

    @property
    def is_whole(self) -> bool:
        """Whether the selected voxels are those that are read, in their order."""
        return isinstance(self.inside, slice) and self.inside == slice(None)


Box = tuple[Run, ...]
"""A run for each axis: a box of the array."""


def read_outer(layout: ArrayLayout, index: Sequence[AxisIndex], device: ReadDevice = "cpu") -> Any:
    """Read the voxels that an index of each axis selects.

    - `layout`: layout of the array.
    - `index`: an index for each axis. Negative indices count from the end.
    - `device`: number of the CUDA device to read to, or host memory.

    Returns the voxels, C-contiguous and in this machine's byte order; axes with an int are dropped.
    """
    if device == "cpu":
        return _read_outer(layout, index, device, np)
    cupy = require_cuda(device)
    with cupy.cuda.Device(device):
        return _read_outer(layout, index, device, cupy)


def _read_outer(layout: ArrayLayout, index: Sequence[AxisIndex], device: ReadDevice, xp: ModuleType) -> Any:
    axes = [runs(*axis) for axis in zip(index, layout.shape, layout.chunk_shape, strict=True)]
    shape = tuple(axis[-1].target.stop if axis else 0 for axis in axes)
    kept = tuple(n for n, selected in zip(shape, index, strict=True) if isinstance(selected, (slice, np.ndarray)))
    dtype = layout.dtype.newbyteorder("=")
    if not all(shape):
        return xp.empty(kept, dtype)
    if all(len(axis) == 1 and axis[0].is_whole for axis in axes):
        (values,) = _read(layout, [tuple(axis[0] for axis in axes)], device)
        return values.reshape(kept)
    out = xp.empty(shape, dtype)
    for boxes in _batches(itertools.product(*axes), dtype.itemsize):
        for box, values in zip(boxes, _read(layout, boxes, device), strict=True):
            for axis, run in enumerate(box):
                values = values[(slice(None),) * axis + (run.inside,)]
            out[tuple(run.target for run in box)] = values
    return out.reshape(kept)


def runs(index: AxisIndex, size: int, chunk: int) -> list[Run]:
    """Cut an index of one axis into runs.

    A slice with step 1 is one run. Other indices are cut where they go from one chunk to another.

    - `size`, `chunk`: voxels of the array, and of a chunk, along the axis.
    """
    inside = None  # of a slice: how to select its voxels in a run
    if isinstance(index, slice):
        voxels = range(*index.indices(size))
        if not voxels:
            return []
        if voxels.step == 1:
            return [Run(voxels.start, voxels.stop, slice(None), slice(0, len(voxels)))]
        indices, inside = np.arange(voxels.start, voxels.stop, voxels.step), slice(None, None, voxels.step)
    else:
        indices = np.atleast_1d(np.asarray(index, np.int64))
        outside = indices[(indices < -size) | (indices >= size)]
        if len(outside):
            raise IndexError(f"index {outside[0]} is out of bounds for an axis of {size} voxels")
        indices = np.where(indices < 0, indices + size, indices)
    cuts = [0, *(np.flatnonzero(np.diff(indices // chunk)) + 1).tolist(), len(indices)]
    result = []
    for begin, end in itertools.pairwise(cuts):
        if begin < end:
            part = indices[begin:end]
            start, stop = int(part.min()), int(part.max()) + 1
            selected = slice(None) if len(part) == 1 else inside
            result.append(Run(start, stop, part - start if selected is None else selected, slice(begin, end)))
    return result


def _batches(boxes: Iterable[Box], itemsize: int) -> Iterator[list[Box]]:
    """Group boxes into batches, each of which is read by one call."""
    batch: list[Box] = []
    nbytes = 0
    for box in boxes:
        size = math.prod(run.stop - run.start for run in box) * itemsize
        is_large_enough = nbytes + size > _TARGET_NBYTES and len(batch) >= _MIN_BOXES
        if batch and (is_large_enough or nbytes + size > _MAX_NBYTES or len(batch) == _MAX_BOXES):
            yield batch
            batch, nbytes = [], 0
        batch.append(box)
        nbytes += size
    if batch:
        yield batch


def _read(layout: ArrayLayout, boxes: list[Box], device: ReadDevice) -> Iterator[Array]:
    """Read boxes by the process's shared reader."""
    regions = [tuple(slice(run.start, run.stop) for run in box) for box in boxes]
    with shared_reader(device) as reader:
        for ticket in reader.submit_many(layout, regions):
            yield ticket.result()
