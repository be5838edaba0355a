"""Samples sorted by boxes of the volume, for ``order="binned"``.

In: the shape of a volume, the generator's key, a number of samples. Out: the number of samples in each box, and their
coordinates. As a set, the samples of a window are as independent and uniform as samples drawn one by one, exactly: the
counts of the boxes follow a multinomial distribution, and coordinates have the same 24 bits.

A window is a number of consecutive samples that are sorted together. The unit cube is halved again and again, each time
along the axis on which boxes are widest; so consecutive boxes are neighbours, and boxes are the leaves of a binary
tree. Of n samples in a node of this tree as many fall into the lower half as there are ones among n random bits.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from linumpy.arrays import Array
from linumpy.gpu.kernels import KernelSpec, int32, load
from linumpy.gpu.philox import philox
from linumpy.sampling.coordinates.generator import COORDINATE_BITS, USE_SHIFT, Use

#: Random bits of a coordinate in a box: three coordinates take two words, so a call of the generator makes two samples.
FIELD_BITS = 21
#: Fewest and most halvings of an axis; the number of a box gives the bits of a coordinate above the random bits.
_MIN_HALVINGS = COORDINATE_BITS - FIELD_BITS
_MAX_HALVINGS = 20
#: Largest number of halvings before the fewest halvings of each axis are added: 28 bits number the nodes of the tree.
_MAX_LEVELS = 24
#: Default of the largest number of voxels that interpolation in a box needs: they must fit into shared memory.
BOX_VOXELS = 13_000
_THREADS = 256
#: On a device: number of top levels at which several blocks split each node; most levels that one block splits.
_TOP, _BELOW = 8, 12
#: On a device: calls of the generator by a thread at a top level, and the largest number of blocks of such a level.
_CALLS_OF_A_THREAD, _MAX_BLOCKS = 4, 512
#: Calls of the generator that the host evaluates at a time.
_BATCH = 2**13
#: The structure ``Boxes`` of boxes.cuh.
_BOXES = np.dtype(
    [("window", "u8"), ("total", "i8"), ("axes", "u8"), ("key", "u4", 2), ("levels", "i4"), ("top", "i4")], align=True
)
assert _BOXES.itemsize == 40
_SPLIT = KernelSpec("boxes", "split", (), "linumpy.sampling.cuda")


@dataclass(frozen=True)
class Boxes:
    """Boxes of the unit cube."""

    #: Axis of each halving: 0 is z, 1 is y, 2 is x. The bits of a box's number, the highest first, say in which half
    #: (0: lower) the box lies at each halving.
    axes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of boxes."""
        return 1 << len(self.axes)

    @property
    def halved(self) -> tuple[int, int, int]:
        """Number of halvings along z, y and x."""
        return self.axes.count(0), self.axes.count(1), self.axes.count(2)

    def indices(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the indices of boxes along each axis (z, y, x) from their numbers."""
        indices = [np.zeros_like(numbers) for _ in range(3)]
        for level, axis in enumerate(self.axes):
            indices[axis] = indices[axis] << 1 | numbers >> (len(self.axes) - 1 - level) & 1
        return indices[0], indices[1], indices[2]

    def numbers(self, z: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the numbers of boxes from their indices along each axis: the inverse of :meth:`indices`."""
        shift = list(self.halved)
        box = np.zeros_like(z)
        for axis in self.axes:
            shift[axis] -= 1
            box = box << 1 | (z, y, x)[axis] >> shift[axis] & 1
        return box

    def voxels(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the largest number of voxels along each axis that interpolation in a box needs, neighbours included.

        Rows are extended to multiples of four voxels at both ends.
        """
        z, y, x = (math.ceil(n / 2**k) + 2 for n, k in zip(shape, self.halved, strict=True))
        return z, y, (x + 6) // 4 * 4


@functools.lru_cache(maxsize=64)
def plan_boxes(shape: tuple[int, int, int], voxels: int) -> Boxes:
    """Choose the halvings so that a box, with its neighbours, needs at most `voxels` voxels, as far as possible."""
    axes: list[int] = []
    while len(axes) < _MAX_LEVELS:
        boxes = Boxes(tuple(axes))
        widths = [n / 2**k for n, k in zip(shape, boxes.halved, strict=True)]
        too_few = [axis for axis in range(3) if boxes.halved[axis] < _MIN_HALVINGS]
        if math.prod(boxes.voxels(shape)) > voxels:
            axis = max(range(3), key=lambda number: (widths[number], -number))
            if widths[axis] < 1 or boxes.halved[axis] >= _MAX_HALVINGS:
                break
        elif too_few:
            axis = max(too_few, key=lambda number: (widths[number], -number))
        else:
            break
        axes.append(axis)
    axes += [axis for axis in range(3) for _ in range(_MIN_HALVINGS - axes.count(axis))]
    return Boxes(tuple(axes))


@dataclass(frozen=True)
class Window:
    """Consecutive samples of a stream that are sorted by box together."""

    boxes: Boxes  # boxes of the volume
    key: tuple[int, int]  # key of the generator
    first: int  # number of the first sample in the stream of the sampler; no two windows of a stream share it
    total: int  # number of samples
    starts: Array  # position of the first sample of each box, and :attr:`total` at the end; NumPy or CuPy

    @functools.cached_property
    def record(self) -> np.ndarray:
        """The structure ``Boxes`` of boxes.cuh."""
        return _record(self.boxes, self.key, self.first, self.total)


def make_window(boxes: Boxes, key: tuple[int, int], first: int, total: int, xp: ModuleType = np) -> Window:
    """Make a window: draw how many of the samples fall into each box, by NumPy, or on CuPy's current stream."""
    if xp is not np:
        return Window(boxes, key, first, total, count_on_device(boxes, key, first, total, xp))
    counts = np.array([total], np.int64)
    for level in range(len(boxes.axes)):
        lower = _ones(counts, 1 << level, first, key)
        counts = np.stack([lower, counts - lower], 1).reshape(-1)
    return Window(boxes, key, first, total, np.concatenate([[0], np.cumsum(counts)]))


def _record(boxes: Boxes, key: tuple[int, int], first: int, total: int) -> np.ndarray:
    record = np.zeros((), _BOXES)
    levels = len(boxes.axes)
    record["window"], record["total"], record["key"], record["levels"] = first, total, key, levels
    record["axes"] = sum(axis << 2 * level for level, axis in enumerate(boxes.axes))
    record["top"] = min(levels, max(_TOP, levels - _BELOW))
    return record


def count_on_device(boxes: Boxes, key: tuple[int, int], first: int, total: int, xp: ModuleType) -> Array:
    """Count the samples of boxes on a device; return the position of the first sample of each box."""
    record = _record(boxes, key, first, total)
    top = int(record["top"])
    # A power of two of blocks splits a level, so that each of its nodes gets the same number.
    blocks = min(_MAX_BLOCKS, total // (128 * _THREADS * _CALLS_OF_A_THREAD))
    per_level = max(1 << max(0, top - 1), 1 << max(0, blocks.bit_length() - 1))
    state, starts = xp.zeros((1 << top) + top, np.uint64), xp.empty(boxes.count + 1, np.int64)
    grid, shared_nbytes = top * per_level + (1 << top), 8 << len(boxes.axes) - top
    args = (state, starts, *int32(per_level), record)
    load(_SPLIT)((grid,), (_THREADS,), args, shared_mem=shared_nbytes)
    return starts


def _ones(counts: np.ndarray, node: int, first: int, key: tuple[int, int]) -> np.ndarray:
    """Return how many of the first ``counts[i]`` random bits of node ``node + i`` are ones, for all i of a level."""
    calls = -(-counts // 128)
    ends = np.cumsum(calls)
    sums = np.zeros(counts.size, np.int64)
    for begin in range(0, int(ends[-1]), _BATCH):
        number = np.arange(begin, min(begin + _BATCH, int(ends[-1])))
        entry = np.searchsorted(ends, number, side="right")
        call = number - (ends - calls)[entry]
        use = np.uint64(Use.SPLIT << USE_SHIFT) | (entry + node).astype(np.uint64)
        words = philox((first & 0xFFFFFFFF, first >> 32, use, call), key)
        for k, word in enumerate(words):
            n_bits = np.clip(counts[entry] - call * 128 - 32 * k, 0, 32).astype(np.uint64)
            ones = np.bitwise_count(word & ((np.uint64(1) << n_bits) - np.uint64(1)))
            sums += np.bincount(entry, ones, counts.size).astype(np.int64)
    return sums
