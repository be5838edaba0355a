"""Specialisations and launch configurations of the sampling kernels.

In: dtypes, sizes, the spline's order and mode. Out: kernel specs and grids of blocks, tuned on an H200. Runs without a
GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from linumpy.arrays import Array
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, index_type, needs_float64
from linumpy.plan.boundary import MODES  # the kernels number them in this order

#: Maximum number of blocks along the second and third axis of a grid.
GRID_LIMIT = 2**16 - 1


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel's work is divided, tuned on an H200.

    `march`: voxels of a thread along the slowest axis. `blocks`: minimum number of blocks on a multiprocessor, which
    bounds the registers of a thread. `tile_x`, `threads`: columns of a tile, and threads of a block, which cover the
    columns and as many rows as this leaves. `together`: voxels of a thread whose loads are in flight at once; unused
    for affine maps without a brick.
    """

    march: int
    blocks: int
    tile_x: int = 32
    threads: int = 256
    together: int = 1

    @property
    def tile(self) -> tuple[int, int, int]:
        """Voxels of a block along each axis."""
        return self.march, self.threads // self.tile_x, self.tile_x


def _by_order(linear: LaunchConfig, cubic: LaunchConfig, quintic: LaunchConfig) -> dict[int, LaunchConfig]:
    """Return the configurations of all orders: each serves two of them."""
    return {0: linear, 1: linear, 2: cubic, 3: cubic, 4: quintic, 5: quintic}


#: By order: points in a list (LISTS), a grid of points with voxels of less than 4 bytes (SMALL_GRIDS) and with others
#: (GRIDS), an affine map without (AFFINE) and with a brick (BRICKS). Orders 2, 4 and 5 follow order 3, with registers
#: for more weights.
LISTS = _by_order(LaunchConfig(4, 4, together=4), LaunchConfig(1, 5), LaunchConfig(1, 3))
SMALL_GRIDS = _by_order(LaunchConfig(16, 8), LaunchConfig(16, 5), LaunchConfig(16, 3))
GRIDS = SMALL_GRIDS | {0: LaunchConfig(4, 5, together=4), 1: LaunchConfig(4, 5, together=4)}
#: A grid of points in several images needs more registers: the images share the weights of a point.
STACKED_GRIDS = {order: replace(config, blocks=config.blocks - 1) for order, config in GRIDS.items()}
SMALL_STACKED_GRIDS = {order: replace(config, blocks=config.blocks - 1) for order, config in SMALL_GRIDS.items()}
AFFINE = _by_order(LaunchConfig(16, 4), LaunchConfig(2, 3), LaunchConfig(1, 2))
BRICKS = {
    1: LaunchConfig(16, 4, tile_x=16, together=2),
    2: LaunchConfig(16, 4),
    3: LaunchConfig(16, 4),
    4: LaunchConfig(8, 3, tile_x=16),
    5: LaunchConfig(8, 3, tile_x=16),
}


#: What a kernel is compiled for: types of image and output, rank, spline order, mode, whether it computes in double
#: precision, and whether indices have 64 bits.
Kinds = tuple[str, str, int, int, str, bool, bool]


def kinds_of(image: Array, out: Array, order: int, mode: str, *others: Array) -> Kinds:
    """Return what a kernel is compiled for; `others` are further arrays, whose size affects the type of indices."""
    has_long_indices = any(index_type(array.size) == "int64" for array in (image, out, *others))
    is_double = needs_float64(image.dtype, out.dtype)
    return image.dtype.str[1:], out.dtype.str[1:], image.ndim, order, mode, is_double, has_long_indices


def spec_of(source: str, name: str, kinds: Kinds, config: LaunchConfig, **more: str) -> KernelSpec:
    """Return a kernel; its definitions never hold a shape."""
    return _spec(source, name, kinds, config, tuple(more.items()))


@functools.lru_cache(maxsize=1024)
def _spec(source: str, name: str, kinds: Kinds, config: LaunchConfig, more: tuple[tuple[str, str], ...]) -> KernelSpec:
    source_type, target_type, rank, order, mode, is_double, has_long_indices = kinds
    defines = {
        "SOURCE": CUDA_TYPES[source_type],
        "TARGET": CUDA_TYPES[target_type],
        "COMPUTE": "double" if is_double else "float",
        "WIDE": str(int(is_double)),
        "RANK": str(rank),
        "ORDER": str(order),
        "MODE": str(MODES.index(mode)),
        "INDEX": "int64" if has_long_indices else "int",
        "TILE_X": str(config.tile_x),
        "THREADS": str(config.threads),
        "MARCH": str(config.march),
        "TOGETHER": str(config.together),
        "BLOCKS": str(1 if is_double else config.blocks),  # double precision keeps its registers
    }
    return KernelSpec(source, name, (*defines.items(), *more), "linumpy.gpu.ndimage.cuda")


def blocks_of(shape: Sequence[int], tile: tuple[int, int, int], rank: int) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Cut a grid of voxels into blocks: return the launch's grid, and ``counts`` of `tile_of_block` in sampling.cuh.

    Threads march along the slowest axis of the image.
    """
    if rank == 2:
        tile = (1, tile[0] * tile[1], tile[2])
    z, y, x = (-(-n // t) for n, t in zip(shape, tile, strict=True))
    if y <= GRID_LIMIT and z <= GRID_LIMIT:
        return (x, y, z), (0, 0)
    return (x * y * z,), (y, x)


def three(sizes: Sequence[Any], first: int = 1) -> tuple[Any, ...]:
    """Put values for missing axes before the others, up to three."""
    return (first,) * (3 - len(sizes)) + tuple(sizes)
