"""Read amplification of crops: arrays and crop shapes → estimates, and better chunk shapes. Pure.

The estimates assume that chunks are read as a whole, and that all positions of a crop are equally probable. Then, along
an axis, a crop of ``s`` voxels touches on average about ``1 + (s - 1) / c`` chunks of ``c`` voxels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from linumpy.stream.planning.records import ArrayInfo

#: Minimum size of a better chunk: the number of smaller chunks costs more than their size saves.
MIN_CHUNK_BYTES = 64 * 2**10
#: Sides of better chunks.
_SIDES = [2**k for k in range(10)]


@dataclass(frozen=True)
class Amplification:
    """The cost of reading crops of a shape from an array."""

    name: str  # name of the array
    #: Shapes of the crop and of the array's chunks, in voxels.
    crop: tuple[int, ...]
    chunk: tuple[int, ...]
    chunks: float  # chunks that a crop touches on average
    factor: float  # voxels that are read for each voxel of a crop
    #: The chunk shape for which the fewest voxels are read, among shapes of 64 KiB to less than 256 KiB: sides are
    #: powers of two up to 512 along the last three axes, and 1 along other axes. `chunk` if none is better by 10 %.
    better_chunk: tuple[int, ...]
    better_factor: float  # `factor` with that chunk shape


def amplification(info: ArrayInfo, crop: Sequence[int]) -> Amplification:
    """Estimate how many chunks and voxels are read for random crops."""
    crop = tuple(int(n) for n in crop)
    if len(crop) != len(info.shape):
        raise ValueError(f"shape={crop} has {len(crop)} axes, {info.name} has {len(info.shape)}")
    if any(not 0 < s <= n for s, n in zip(crop, info.shape, strict=True)):
        raise ValueError(f"crops of {crop} do not lie in {info.name} of {info.shape}")
    chunks, factor = _cost(crop, info.chunk_shape, info.shape)
    better = _better_chunk(info, crop)
    better_factor = _cost(crop, better, info.shape)[1]
    if better_factor > 0.9 * factor:
        better, better_factor = info.chunk_shape, factor
    return Amplification(info.name, crop, info.chunk_shape, chunks, factor, better, better_factor)


def _touched(s: int, c: int, n: int) -> float:
    """Return the number of chunks along an axis that a crop touches, on average over all its positions."""
    count = n - s + 1

    def sum_of_chunks(k: int) -> int:
        """Return the sum of ``i // c`` for i from 0 to k - 1."""
        chunks, remainder = divmod(k, c)
        return c * (chunks * (chunks - 1) // 2) + chunks * remainder

    return 1 + (sum_of_chunks(n) - sum_of_chunks(s - 1) - sum_of_chunks(count)) / count


def _cost(crop: Sequence[int], chunk: Sequence[int], shape: Sequence[int]) -> tuple[float, float]:
    """Return the mean number of chunks that a crop touches, and the voxels that are read for each voxel of a crop."""
    counts = [_touched(s, c, n) for s, c, n in zip(crop, chunk, shape, strict=True)]
    return math.prod(counts), math.prod(k * c / s for k, c, s in zip(counts, chunk, crop, strict=True))


def _better_chunk(info: ArrayInfo, crop: Sequence[int]) -> tuple[int, ...]:
    """Return the best of the chunk shapes that :attr:`Amplification.better_chunk` describes."""
    sides = [[side for side in _SIDES if side <= 2 ** math.ceil(math.log2(n))] for n in info.shape[-3:]]
    lead = (1,) * (len(crop) - len(sides))
    costs: list[tuple[float, tuple[int, ...]]] = []
    for last in itertools.product(*sides):
        nbytes = math.prod(last) * info.dtype.itemsize
        if MIN_CHUNK_BYTES <= nbytes < 4 * MIN_CHUNK_BYTES:
            costs.append((_cost(crop, lead + last, info.shape)[1], lead + last))
    return min(costs)[1] if costs else info.chunk_shape


def table(rows: Sequence[Amplification]) -> str:
    """Return the estimates as a table in text."""

    def spell(shape: Sequence[int]) -> str:
        return "×".join(map(str, shape))

    width = max(len("array"), *(len(row.name) for row in rows))
    head = f"{'crop':>15}{'chunk':>15}{'chunks/crop':>13}{'read ×':>9}{'better chunk':>15}{'×':>7}"
    lines = [f"{'array':<{width}}  {head}"]
    for row in rows:
        is_best = row.better_chunk == row.chunk
        better, factor = ("-", "") if is_best else (spell(row.better_chunk), f"{row.better_factor:.2f}")
        lines.append(
            f"{row.name:<{width}}  {spell(row.crop):>15}{spell(row.chunk):>15}{row.chunks:>13.1f}{row.factor:>9.2f}"
            f"{better:>15}{factor:>7}"
        )
    return "\n".join(lines)
