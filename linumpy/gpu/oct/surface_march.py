"""Plan launches of the kernels of surface_march.cu, which find the tissue surface.

A thread of these kernels marches along one axis and keeps a window of voxels in registers. Axes of a volume: a, the
outer lateral axis; b, the inner lateral axis; z, depth. A strip is 256 neighbours along b. A march produces one segment
of rows along a (or of lines along b), in groups of 8.

In: arrays with their sizes and strides. Out: :class:`MarchLaunch` records, which ``surface_kernels.py`` starts. Pure:
does not touch a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from linumpy.arrays import Array
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, int32, int64, uint32

#: Maximum width of a mean and radius of a derivative that fit into registers.
_MAX_MEAN, _MAX_RADIUS = 32, 16
_GROUP, _STRIP = 8, 256  # as in surface_march.cu
_THREADS, _COLUMN_THREADS = 256, 128
#: Block sizes of the kernel march_lines, which has a thread for each voxel of depth.
_LINE_THREADS = 256, 512
_LINES = 32  # maximum number of lines in shared memory at a time
#: Minimum number of rows (or lines) that a march produces; it reads s - 1 more ahead of them.
_MIN_ROWS = 128

_Numbers = tuple[np.generic, ...]


@dataclass(frozen=True)
class MarchLaunch:
    """One launch of a marching kernel.

    `blocks`, `threads`: blocks of the grid, and threads of a block. `args`: typed arguments of the kernel.
    """

    spec: KernelSpec
    blocks: int
    threads: int
    args: tuple[Array | np.generic, ...]


@dataclass(frozen=True)
class MeanPass:
    """Arguments of a launch that computes a lateral mean.

    `vol`, `mean`: volume, and float32 output: (depth, rows, b) for :func:`plan_strip_mean`, (rows, b, depth) for
    :func:`plan_row_mean`. `sizes`, `strides`: shape and strides of the volume along a, b and z; strides in voxels.
    `rows` (int, int): the first row along a, and the number of rows. `s`: width of the mean in voxels. `log`: ``"0"``
    for no logarithm, ``"1"`` to take the logarithm first, with 0 for voxels that are not positive, ``"2"`` with `zero`
    for them. `zero`: one float32 on the device, read only for ``log="2"``.
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
    """Arguments of a launch that finds the maximum of each A-line's profile.

    `mean`: the output of a :class:`MeanPass`. `maps` (array, array): outputs: the surface, and its contrast, which is
    written only for ``definition="edge"``. `profile`: weights of the derivative and of the Gaussian on the device,
    whether the order is odd, and the number of the rule (see ``surface_kernels.py``). `sizes` (int, int, int): rows, b,
    depth. `strides`: strides of the maps along a and b. `radius`: radius of the weights, in voxels. `kind` (str, str):
    the macros CUTTING and EDGE: ``"1"`` for the rule for cutting errors, ``"1"`` for the depth of the edge, else
    ``"0"``.
    """

    mean: Array
    maps: tuple[Array, Array]
    profile: tuple[Array | np.generic, ...]
    sizes: tuple[int, int, int]
    strides: tuple[int, ...]
    radius: int
    kind: tuple[str, str]


def supports_window(s: int, radius: int) -> bool:
    """Return whether the kernels support means of width `s` and weights of this radius."""
    return s <= _MAX_MEAN and 1 <= radius <= _MAX_RADIUS


def supports_depth(depth: int, radius: int) -> bool:
    """Return whether march_lines supports lines of `depth` voxels: long enough for a group, one thread a voxel."""
    return radius + _GROUP <= depth <= _LINE_THREADS[-1]


def plan_strip_mean(p: MeanPass) -> MarchLaunch:
    """Plan march_strip: the mean over s x s voxels, for volumes in which b is contiguous."""
    size_a, size_b, depth = p.sizes
    strips_per_row, segment = -(-size_b // _STRIP), _segment(p.s)
    segments = -(-p.rows[1] // segment)
    sizes: _Numbers = (
        *int64(*p.strides),
        *int32(size_a, size_b, *p.rows),
        *uint32(strips_per_row, segments),
        *int32(segment),
    )
    spec = kernel_spec("march_strip", p.vol.dtype, log=p.log, s=p.s)
    return MarchLaunch(spec, strips_per_row * segments * depth, _STRIP, (p.vol, p.mean, *sizes, p.zero))


def plan_row_mean(p: MeanPass) -> MarchLaunch:
    """Plan march_rows: the mean over s voxels along a, for volumes in which depth is contiguous."""
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


def plan_column_search(p: ProfilePass) -> MarchLaunch:
    """Plan march_columns: the maximum of each profile, in the output of :func:`plan_strip_mean`."""
    count, size_b, depth = p.sizes
    sizes: _Numbers = (*int64(count * size_b), *int32(count, size_b, depth), *int64(*p.strides))
    spec = kernel_spec("march_columns", np.dtype(np.float32), kind=p.kind, radius=p.radius)
    blocks = -(-count * size_b // _COLUMN_THREADS)
    return MarchLaunch(spec, blocks, _COLUMN_THREADS, (p.mean, *p.maps, *p.profile, *sizes))


def plan_line_search(p: ProfilePass, s: int) -> MarchLaunch:
    """Plan march_lines: the mean over s voxels along b, and the maxima, in the output of :func:`plan_row_mean`."""
    count, size_b, depth = p.sizes
    segment = -(-_MIN_ROWS // _LINES) * _LINES
    segments = -(-size_b // segment)
    threads = next(n for n in _LINE_THREADS if depth <= n)
    sizes: _Numbers = (*int32(size_b, depth), *uint32(segments), *int32(segment), *int64(*p.strides))
    spec = kernel_spec("march_lines", np.dtype(np.float32), kind=p.kind, s=s, radius=p.radius, threads=threads)
    return MarchLaunch(spec, count * segments, threads, (p.mean, *p.maps, *p.profile, *sizes))


def _segment(s: int) -> int:
    """Return the rows that a march produces, so that these and the s - 1 rows ahead of them are whole groups."""
    return -(-(_MIN_ROWS + s - 1) // _GROUP) * _GROUP - (s - 1)


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
    """Choose a kernel of surface_march.cu; macros that the kernel ignores keep their defaults."""
    defines = {
        "SOURCE": CUDA_TYPES[source.str[1:]],
        "LOG": log,
        "CUTTING": kind[0],
        "EDGE": kind[1],
        "S": str(s),
        "RADIUS": str(radius),
        "THREADS": str(threads),
    }
    return KernelSpec("surface_march", name, tuple(defines.items()), "linumpy.gpu.oct.cuda")
