"""Plan the launches of the marching kernels of the tissue surface.

In: sizes and strides of a volume, arrays. Out: :class:`MarchLaunch` records, which ``surface_kernels.py`` starts. Pure:
does not touch a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from linumpy.arrays import Array
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, int32, int64, uint32

#: Sizes that the kernels of interface_march.cu keep in registers.
_MAX_MEAN, _MAX_RADIUS = 32, 16
_GROUP, _STRIP = 8, 256  # as in interface_march.cu
_THREADS, _COLUMN_THREADS = 256, 128
#: Possible threads of a block of :func:`lines`, one for each voxel of depth.
_LINE_THREADS = 256, 512
_LINES = 32  # maximum number of lines of a block at a time
#: Minimum number of rows of a march, without those that it reads before them.
_ROWS = 128

_Numbers = tuple[np.generic, ...]


@dataclass(frozen=True)
class MarchLaunch:
    """One launch of a marching kernel.

    Attributes
    ----------
    spec : KernelSpec
        The kernel.
    blocks, threads : int
        Blocks of the grid, and threads of a block.
    args : tuple
        Typed arguments of the kernel.
    """

    spec: KernelSpec
    blocks: int
    threads: int
    args: tuple[Array | np.generic, ...]


@dataclass(frozen=True)
class MeanPass:
    """The mean of rows of a volume.

    Attributes
    ----------
    vol, mean : array
        Volume, and float32 output: (depth, rows, b) for :func:`strips`, (rows, b, depth) for :func:`rows_of_lines`.
    sizes, strides : tuple of int
        Of the volume, along a, b and z; strides in voxels.
    rows : (int, int)
        The first row along a, and the number of rows.
    s : int
        Voxels of the mean.
    log : str
        ``"1"`` to take the logarithm first, ``"2"`` with `zero` for voxels without a logarithm.
    zero : array
        A float32 on the device.
    """

    vol: Array
    mean: Array
    sizes: tuple[int, int, int]
    strides: tuple[int, ...]
    rows: tuple[int, int]
    s: int
    log: str
    zero: Array


@dataclass(frozen=True)
class ProfilePass:
    """The search for the maximum of each A-line's profile.

    Attributes
    ----------
    mean : array
        The output of a :class:`MeanPass`.
    maps : (array, array)
        Outputs: the surface, and its contrast, which is written only for ``definition="edge"``.
    profile : tuple
        Weights of the derivative and of the Gaussian on the device, whether the order is odd, and the rule.
    sizes : (int, int, int)
        Rows, b, depth.
    strides : tuple of int
        Strides of the maps along a and b.
    radius : int
        Reach of the weights, in voxels.
    kind : (str, str)
        ``"1"`` for the rule for cutting errors; ``"1"`` for the depth of the edge.
    """

    mean: Array
    maps: tuple[Array, Array]
    profile: tuple[Array | np.generic, ...]
    sizes: tuple[int, int, int]
    strides: tuple[int, ...]
    radius: int
    kind: tuple[str, str]


def fits(s: int, radius: int) -> bool:
    """Return whether there are kernels for a mean of `s` voxels and weights that reach `radius` voxels."""
    return s <= _MAX_MEAN and 1 <= radius <= _MAX_RADIUS


def line_fits(depth: int, radius: int) -> bool:
    """Return whether a block holds lines of `depth` voxels."""
    return radius + _GROUP <= depth <= _LINE_THREADS[-1]


def strips(p: MeanPass) -> MarchLaunch:
    """Take the mean over s x s voxels where b is contiguous."""
    size_a, size_b, depth = p.sizes
    wide, segment = -(-size_b // _STRIP), _segment(p.s)
    segments = -(-p.rows[1] // segment)
    sizes: _Numbers = (
        *int64(*p.strides),
        *int32(size_a, size_b, *p.rows),
        *uint32(wide, segments),
        *int32(segment),
    )
    spec = kernel_spec("march_strip", p.vol.dtype, log=p.log, s=p.s)
    return MarchLaunch(spec, wide * segments * depth, _STRIP, (p.vol, p.mean, *sizes, p.zero))


def rows_of_lines(p: MeanPass) -> MarchLaunch:
    """Take the mean over s voxels along a where depth is contiguous."""
    size_a, size_b, depth = p.sizes
    plane, segment = size_b * depth, _segment(p.s)
    blocks = -(-plane // _THREADS)
    sizes: _Numbers = (
        *int64(*p.strides),
        *int32(size_a, *p.rows, depth),
        *int64(plane),
        *uint32(blocks),
        *int32(segment),
    )
    spec = kernel_spec("march_rows", p.vol.dtype, log=p.log, s=p.s)
    return MarchLaunch(spec, blocks * -(-p.rows[1] // segment), _THREADS, (p.vol, p.mean, *sizes, p.zero))


def columns(p: ProfilePass) -> MarchLaunch:
    """Find the maximum of each profile in the output of :func:`strips`."""
    count, size_b, depth = p.sizes
    sizes: _Numbers = (*int64(count * size_b), *int32(count, size_b, depth), *int64(*p.strides))
    spec = kernel_spec("march_columns", np.dtype(np.float32), kind=p.kind, radius=p.radius)
    blocks = -(-count * size_b // _COLUMN_THREADS)
    return MarchLaunch(spec, blocks, _COLUMN_THREADS, (p.mean, *p.maps, *p.profile, *sizes))


def lines(p: ProfilePass, s: int) -> MarchLaunch:
    """Take the mean over s voxels along b and find the maxima, in the output of :func:`rows_of_lines`."""
    count, size_b, depth = p.sizes
    segment = -(-_ROWS // _LINES) * _LINES
    segments = -(-size_b // segment)
    threads = next(n for n in _LINE_THREADS if depth <= n)
    sizes: _Numbers = (*int32(size_b, depth), *uint32(segments), *int32(segment), *int64(*p.strides))
    spec = kernel_spec("march_lines", np.dtype(np.float32), kind=p.kind, s=s, radius=p.radius, threads=threads)
    return MarchLaunch(spec, count * segments, threads, (p.mean, *p.maps, *p.profile, *sizes))


def _segment(s: int) -> int:
    """Return the rows of a march: with the s - 1 rows before them they form whole groups."""
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
    """Choose a kernel of interface_march.cu; definitions that it does not use keep their defaults."""
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
