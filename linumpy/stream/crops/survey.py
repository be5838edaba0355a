"""Read amplification of crops: arrays and crop shapes → estimates, and better chunk shapes. Pure.

A chunk is read whole. Crops begin anywhere with the same probability, so that along an axis one of ``s`` voxels touches
about ``1 + (s - 1) / c`` chunks of ``c`` voxels on average.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from linumpy.stream.planning.records import ArrayInfo

#: Chunks smaller than this cost more by their number than they save by their size.
LEAST_CHUNK_BYTES = 64 * 2**10
_SIDES = [2**k for k in range(10)]


@dataclass(frozen=True)
class Amplification:
    """Reading crops of a shape from an array.

    Attributes
    ----------
    name : str
        The array.
    crop, chunk : tuple of int
        Voxels.
    chunks : float
        Chunks that a crop touches on average.
    factor : float
        Voxels that are read for each voxel of a crop.
    better_chunk : tuple of int
        Of those with sides of powers of two and at least 64 KiB, the shape that reads least; `chunk` where none is
        better by 10 %.
    better_factor : float
        With it.
    """

    name: str
    crop: tuple[int, ...]
    chunk: tuple[int, ...]
    chunks: float
    factor: float
    better_chunk: tuple[int, ...]
    better_factor: float


def amplification(info: ArrayInfo, crop: Sequence[int]) -> Amplification:
    """Estimate what reading random crops costs.

    Raises
    ------
    ValueError
        The crop has other numbers of axes than the array, or does not lie in it.
    """
    crop = tuple(int(n) for n in crop)
    if len(crop) != len(info.shape):
        raise ValueError(f"shape={crop} has {len(crop)} axes, {info.name} has {len(info.shape)}")
    if any(not 0 < s <= n for s, n in zip(crop, info.shape, strict=True)):
        raise ValueError(f"crops of {crop} do not lie in {info.name} of {info.shape}")
    chunks, factor = _cost(crop, info.chunk_shape, info.shape)
    better = _better(info, crop)
    better_factor = _cost(crop, better, info.shape)[1]
    if better_factor > 0.9 * factor:
        better, better_factor = info.chunk_shape, factor
    return Amplification(info.name, crop, info.chunk_shape, chunks, factor, better, better_factor)


def _touched(s: int, c: int, n: int) -> float:
    """Chunks along an axis that a crop touches, on average over all its positions."""
    count = n - s + 1

    def begun(k: int) -> int:
        """Sum of ``i // c`` for i from 0 to k - 1."""
        whole, remainder = divmod(k, c)
        return c * (whole * (whole - 1) // 2) + whole * remainder

    return 1 + (begun(n) - begun(s - 1) - begun(count)) / count


def _cost(crop: Sequence[int], chunk: Sequence[int], shape: Sequence[int]) -> tuple[float, float]:
    counts = [_touched(s, c, n) for s, c, n in zip(crop, chunk, shape, strict=True)]
    return math.prod(counts), math.prod(k * c / s for k, c, s in zip(counts, chunk, crop, strict=True))


def _better(info: ArrayInfo, crop: Sequence[int]) -> tuple[int, ...]:
    sides = [[side for side in _SIDES if side <= 2 ** math.ceil(math.log2(n))] for n in info.shape[-3:]]
    lead = (1,) * (len(crop) - len(sides))
    costs: list[tuple[float, tuple[int, ...]]] = []
    for last in itertools.product(*sides):
        nbytes = math.prod(last) * info.dtype.itemsize
        if LEAST_CHUNK_BYTES <= nbytes < 4 * LEAST_CHUNK_BYTES:
            costs.append((_cost(crop, lead + last, info.shape)[1], lead + last))
    return min(costs)[1] if costs else info.chunk_shape


def table(rows: Sequence[Amplification]) -> str:
    """Return the estimates as text."""

    def spell(shape: Sequence[int]) -> str:
        return "×".join(map(str, shape))

    width = max(len("array"), *(len(row.name) for row in rows))
    head = f"{'crop':>15}{'chunk':>15}{'chunks/crop':>13}{'read ×':>9}{'better chunk':>15}{'×':>7}"
    lines = [f"{'array':<{width}}  {head}"]
    for row in rows:
        same = row.better_chunk == row.chunk
        better, factor = ("-", "") if same else (spell(row.better_chunk), f"{row.better_factor:.2f}")
        lines.append(
            f"{row.name:<{width}}  {spell(row.crop):>15}{spell(row.chunk):>15}{row.chunks:>13.1f}{row.factor:>9.2f}"
            f"{better:>15}{factor:>7}"
        )
    return "\n".join(lines)
