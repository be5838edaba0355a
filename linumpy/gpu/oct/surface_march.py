"""How the marching kernels of the tissue interface are launched: which kernel, on how many threads, with what.

In: sizes and strides of a volume, arrays. Out: :class:`Launch` records, which :mod:`linumpy.gpu.interface` starts.
Pure: nothing here touches a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, int32, int64, uint32

#: Sizes that the kernels of interface_march.cu keep in registers.
_WIDEST_MEAN, _WIDEST_RADIUS = 32, 16
_GROUP, _STRIP = 8, 256  # as in interface_march.cu
_THREADS, _COLUMN_THREADS = 256, 128
#: Voxels of depth for which a block of :func:`lines` has threads.
_LINE_THREADS = 256, 512
_LINES = 32  # that a block has at a time, at most
#: Rows that a thread marches, at least; those that it reads before them come on top.
_ROWS = 128


@dataclass(frozen=True)
class Launch:
    """A kernel and how it is started.

    Attributes
    ----------
    spec : KernelSpec
        The kernel.
    blocks, threads : int
        Of the grid, and of a block.
    args : tuple
        What it takes, each of its type.
    """

    spec: KernelSpec
    blocks: int
    threads: int
    args: tuple[Any, ...]


def fits(s: int, radius: int) -> bool:
    """Whether there are kernels for a mean of `s` voxels and a derivative that reaches `radius` voxels far."""
    return s <= _WIDEST_MEAN and 1 <= radius <= _WIDEST_RADIUS


def line_fits(depth: int, radius: int) -> bool:
    """Whether a block holds lines of `depth` voxels."""
    return radius + _GROUP <= depth <= _LINE_THREADS[-1]


def strips(
    vol: Any,
    mean: Any,
    sizes: tuple[int, int, int],
    strides: tuple[int, ...],
    rows: tuple[int, int],
    s: int,
    log: str,
    zero: Any,
) -> Launch:
    """Take the mean over s x s voxels where b is contiguous.

    Parameters
    ----------
    vol, mean : array
        Volume, and float32 of shape (depth, rows, b) to be written.
    sizes, strides : tuple of int
        Of the volume, along a, b and z; strides in voxels.
    rows : (int, int)
        The first of a, and how many.
    s : int
        Voxels of the mean.
    log : str
        ``"1"`` for the logarithm first, ``"2"`` with `zero` of voxels that have none.
    zero : array
        A float32 on the device.
    """
    size_a, size_b, depth = sizes
    wide, segment = -(-size_b // _STRIP), _segment(s)
    segments = -(-rows[1] // segment)
    args = (vol, mean, *int64(*strides), *int32(size_a, size_b, *rows), *uint32(wide, segments), *int32(segment), zero)
    spec = kernel_spec("march_strip", vol.dtype, log=log, s=s)
    return Launch(spec, wide * segments * depth, _STRIP, args)


def rows_of_lines(
    vol: Any,
    mean: Any,
    sizes: tuple[int, int, int],
    strides: tuple[int, ...],
    rows: tuple[int, int],
    s: int,
    log: str,
    zero: Any,
) -> Launch:
    """Take the mean over s voxels along a where depth is contiguous; as :func:`strips`, `mean` is (rows, b, depth)."""
    size_a, size_b, depth = sizes
    plane, segment = size_b * depth, _segment(s)
    blocks = -(-plane // _THREADS)
    args = (vol, mean, *int64(*strides), *int32(size_a, *rows, depth), *int64(plane), *uint32(blocks))
    spec = kernel_spec("march_rows", vol.dtype, log=log, s=s)
    return Launch(spec, blocks * -(-rows[1] // segment), _THREADS, (*args, *int32(segment), zero))


def columns(
    mean: Any,
    maps: tuple[Any, Any],
    profile: tuple[Any, ...],
    sizes: tuple[int, int, int],
    to: tuple[int, ...],
    radius: int,
    kind: tuple[str, str],
) -> Launch:
    """Find where the profile of each A-line is largest, in what :func:`strips` wrote.

    Parameters
    ----------
    mean : array
        float32 of shape (depth, rows, b).
    maps : (array, array)
        To be written: the surface, and its contrast, which is left alone where no edge is wanted.
    profile : tuple
        Weights of the derivative and of the Gaussian on the device, whether the order is odd, and the rule.
    sizes : (int, int, int)
        Rows, b, depth.
    to : tuple of int
        Strides of the map along a and b.
    radius : int
        How far the weights reach.
    kind : (str, str)
        ``"1"`` for the rule for cutting errors; ``"1"`` for the depth of the edge.
    """
    count, size_b, depth = sizes
    args = (mean, *maps, *profile, *int64(count * size_b), *int32(count, size_b, depth), *int64(*to))
    spec = kernel_spec("march_columns", np.dtype(np.float32), kind=kind, radius=radius)
    return Launch(spec, -(-count * size_b // _COLUMN_THREADS), _COLUMN_THREADS, args)


def lines(
    mean: Any,
    maps: tuple[Any, Any],
    profile: tuple[Any, ...],
    sizes: tuple[int, int, int],
    to: tuple[int, ...],
    s: int,
    radius: int,
    kind: tuple[str, str],
) -> Launch:
    """Take the mean over s voxels along b and find the surface, as :func:`columns` from what `rows_of_lines` wrote."""
    count, size_b, depth = sizes
    segment = -(-_ROWS // _LINES) * _LINES
    segments = -(-size_b // segment)
    threads = next(n for n in _LINE_THREADS if depth <= n)
    args = (mean, *maps, *profile, *int32(size_b, depth), *uint32(segments), *int32(segment), *int64(*to))
    spec = kernel_spec("march_lines", np.dtype(np.float32), kind=kind, s=s, radius=radius, threads=threads)
    return Launch(spec, count * segments, threads, args)


def _segment(s: int) -> int:
    """Rows of a march, such that they and the s - 1 before them are whole groups."""
    return -(-(_ROWS + s - 1) // _GROUP) * _GROUP - (s - 1)


def kernel_spec(
    name: str,
    source: np.dtype,
    *,
    log: str = "0",
    kind: tuple[str, str] = ("0", "0"),
    s: int = 1,
    radius: int = 1,
    threads: int = _LINE_THREADS[0],
) -> KernelSpec:
    """Choose a kernel of interface_march.cu; what it does not look at is left at its default."""
    defines = {
        "SOURCE": CUDA_TYPES[source.str[1:]],
        "LOG": log,
        "CUTTING": kind[0],
        "EDGE": kind[1],
        "S": str(s),
        "RADIUS": str(radius),
        "THREADS": str(threads),
    }
    return KernelSpec("interface_march", name, tuple(defines.items()), "linumpy.gpu.oct.cuda")
