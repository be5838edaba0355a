"""Halve an image: take the mean of 2 × 2 × … voxels, the most frequent value, or the first voxel.

In: a NumPy or CuPy array. Out: an array of the same module and dtype, half as long (rounded up) along all axes or along
selected axes. Host and device give the same bits.

Means of integers are exact and rounded half to even. Means of floats are summed pair by pair, axis after axis, in
float64 (float16 in float32) and rounded once. The last voxel along an axis of odd length counts twice. Of equally
frequent values the first is taken, with the last axis fastest.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.plan.pyramid import Box, grown, split

#: Bytes of coarser voxels that a thread makes at once: with the finer voxels they fit into a processor's cache.
_PIECE_NBYTES = 2**17


def halved(
    finer: np.ndarray, box: Box, downsampling: str = "mean", factors: tuple[int, ...] | None = None
) -> np.ndarray:
    """Make a box of a coarser resolution, in its voxels, from all voxels of the next finer resolution, on the host."""
    factors = factors or (2,) * len(box)
    sizes = zip(box, finer.shape, factors, strict=True)
    finer_box = tuple(slice(f * b.start, min(f * b.stop, n)) for b, n, f in sizes)
    return np.asarray(halve(np.asarray(finer[finer_box]), downsampling, factors))


def halve(block: Array, downsampling: str = "mean", factors: tuple[int, ...] | None = None) -> Array:
    """Halve a block that begins at even voxels of the image; the result has this machine's byte order.

    - `downsampling`: as for :class:`linumpy.write.writer.OmeZarrWriter`.
    - `factors`: for each axis 2, or 1 for an axis that is not halved, such as the channels; by default 2 for all axes.
    """
    xp, dtype = array_module(block), block.dtype.newbyteorder("=")
    factors = factors or (2,) * block.ndim
    if downsampling == "nearest":
        return xp.ascontiguousarray(block[tuple(slice(None, None, f) for f in factors)], dtype)
    block = block.astype(dtype, copy=False)
    if downsampling == "label":
        return _most_frequent(xp, block, factors)
    axes = [axis for axis, (n, f) in enumerate(zip(block.shape, factors, strict=True)) if n > 1 and f > 1]
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype.kind == "f":
            sum_dtype = np.dtype(np.float32 if dtype.itemsize == 2 else np.float64)
            # The factor is a power of two, so the product is exact.
            mean = _sums(xp, block, axes, sum_dtype) * sum_dtype.type(0.5 ** len(axes))
        else:
            mean = _mean_of_integers(xp, block, axes)
    return mean.astype(dtype)


def halve_by_threads(
    block: np.ndarray,
    downsampling: str,
    pool: ThreadPoolExecutor,
    threads: int,
    factors: tuple[int, ...] | None = None,
) -> np.ndarray:
    """Halve a block in host memory as :func:`halve` does, piece by piece in several threads."""
    factors = factors or (2,) * block.ndim
    result = np.empty([-(-n // f) for n, f in zip(block.shape, factors, strict=True)], block.dtype.newbyteorder("="))
    step = grown((1,) * result.ndim, result.shape, result.itemsize, _PIECE_NBYTES)
    boxes = list(split(tuple(map(slice, (0,) * result.ndim, result.shape)), step))

    def make(some_boxes: list[Box]) -> None:
        for box in some_boxes:
            result[box] = halved(block, box, downsampling, factors)

    for future in [pool.submit(make, boxes[k::threads]) for k in range(threads)]:
        future.result()
    return result


def _most_frequent(xp: ModuleType, block: Array, factors: tuple[int, ...]) -> Array:
    """Return the most frequent value of 2 × 2 × … voxels; the first of equally frequent values."""
    for axis, n in enumerate(block.shape):
        if n % 2 and factors[axis] == 2:  # the last voxel of an odd length counts twice
            last = block[(slice(None),) * axis + (slice(n - 1, None),)]
            block = xp.concatenate([block, last], axis=axis)
    voxels = [
        block[tuple(slice(k, None, f) for k, f in zip(corner, factors, strict=True))]
        for corner in itertools.product(*(range(f) for f in factors))
    ]
    result = xp.ascontiguousarray(voxels[0])
    largest_count = xp.zeros(result.shape, np.int8)
    for number, value in enumerate(voxels):
        count = xp.ones(result.shape, np.int8)
        for other in voxels[:number] + voxels[number + 1 :]:
            count += value == other
        if number:
            result = xp.where(count > largest_count, value, result)
        xp.maximum(largest_count, count, out=largest_count)
    return result


def _mean_of_integers(xp: ModuleType, block: Array, axes: list[int]) -> Array:
    block = block.view(np.uint8) if block.dtype.kind == "b" else block
    if not axes:
        return block
    bits = len(axes)
    if block.dtype.itemsize <= 4:
        total = _sums(xp, block, axes, np.dtype(np.int32 if block.dtype.itemsize <= 2 else np.int64))
        return _divided(total, total >> total.dtype.type(bits), bits)
    # The sum of eight voxels does not fit into 64 bits: quotients and remainders are summed separately.
    number = block.dtype.type
    quotients = _sums(xp, block >> number(bits), axes, block.dtype)
    remainders = _sums(xp, block & number(2**bits - 1), axes, block.dtype)
    return quotients + _divided(remainders, quotients + (remainders >> number(bits)), bits)


def _divided(total: Array, floor: Array, bits: int) -> Array:
    """Divide by a power of two, rounding half to even; `floor` is the quotient rounded down.

    Adding half of the divisor minus one rounds a fraction of exactly one half down; adding one more where `floor` is
    odd rounds it up.
    """
    number = total.dtype.type
    return (total + number(2 ** (bits - 1) - 1) + (floor & number(1))) >> number(bits)


def _sums(xp: ModuleType, block: Array, axes: list[int], sum_dtype: np.dtype) -> Array:
    """Sum pairs of voxels along axes; the last voxel of an odd length counts twice."""
    for axis in axes:
        pairs, odd = divmod(block.shape[axis], 2)
        total = xp.empty([n if k != axis else pairs + odd for k, n in enumerate(block.shape)], sum_dtype)
        before = (slice(None),) * axis
        first, second = block[(*before, slice(0, 2 * pairs, 2))], block[(*before, slice(1, 2 * pairs, 2))]
        xp.add(first, second, out=total[(*before, slice(0, pairs))], dtype=sum_dtype)
        if odd:
            last = block[(*before, slice(2 * pairs, None))]
            xp.add(last, last, out=total[(*before, slice(pairs, None))], dtype=sum_dtype)
        block = total
    return block.astype(sum_dtype, copy=False)
