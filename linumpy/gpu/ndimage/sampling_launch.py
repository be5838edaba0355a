"""How the sampling kernels are compiled and launched.

In: dtypes, sizes, the spline's order and mode. Out: kernel specs and grids of blocks, by numbers as measured. Runs
without a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from linumpy.gpu.kernels import CUDA_TYPES, IN_FLOAT32, KernelSpec, index_type
from linumpy.plan.boundary import MODES  # the kernels number them in this order

#: Blocks along the second and third axis of a grid.
GRID_LIMIT = 2**16 - 1


@dataclass(frozen=True)
class Shape:
    """How a kernel's work is cut, as measured on an H200.

    Attributes
    ----------
    march : int
        Voxels of a thread, one after another along the slowest axis.
    tile_x, threads : int
        Columns of a tile, and threads of a block: as many columns, and as many rows as are left.
    blocks : int
        Blocks of a multiprocessor at least, which bounds the registers of a thread.
    together : int
        Voxels of a thread whose loads are under way at once; not of affine maps without a brick.
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


#: By order: of points in a list, of a grid of points (of small voxels, and of others), of an affine map without and
#: with a brick. Those of orders 2, 4 and 5 are chosen like that of order 3, with registers for more weights.
LISTS = {
    0: Shape(4, 4, together=4),
    1: Shape(4, 4, together=4),
    2: Shape(1, 5),
    3: Shape(1, 5),
    4: Shape(1, 3),
    5: Shape(1, 3),
}
SMALL_GRIDS = {0: Shape(16, 8), 1: Shape(16, 8), 2: Shape(16, 5), 3: Shape(16, 5), 4: Shape(16, 3), 5: Shape(16, 3)}
GRIDS = SMALL_GRIDS | {0: Shape(4, 5, together=4), 1: Shape(4, 5, together=4)}
#: Of a grid of points in several images: more is held of a place, which all of them share.
STACKED_GRIDS = {order: replace(cut, blocks=cut.blocks - 1) for order, cut in GRIDS.items()}
SMALL_STACKED_GRIDS = {order: replace(cut, blocks=cut.blocks - 1) for order, cut in SMALL_GRIDS.items()}
AFFINE = {0: Shape(16, 4), 1: Shape(16, 4), 2: Shape(2, 3), 3: Shape(2, 3), 4: Shape(1, 2), 5: Shape(1, 2)}
BRICKS = {
    1: Shape(16, 4, tile_x=16, together=2),
    2: Shape(16, 4),
    3: Shape(16, 4),
    4: Shape(8, 3, tile_x=16),
    5: Shape(8, 3, tile_x=16),
}


Kinds = tuple[str, str, int, int, str, bool, bool]


def kinds_of(image: Any, out: Any, order: int, mode: str, *others: Any) -> Kinds:
    """Say what kernels are compiled for, beside their own definitions."""
    big = any(index_type(one.size) == "int64" for one in (image, out, *others))
    return image.dtype.str[1:], out.dtype.str[1:], image.ndim, order, mode, is_wide(image, out), big


def spec_of(source: str, name: str, kinds: Kinds, cut: Shape, **more: str) -> KernelSpec:
    """Name a kernel and what it is compiled for; never a shape."""
    return _spec(source, name, kinds, cut, tuple(more.items()))


@functools.lru_cache(maxsize=1024)
def _spec(source: str, name: str, kinds: Kinds, cut: Shape, more: tuple[tuple[str, str], ...]) -> KernelSpec:
    kind, target, rank, order, mode, wide, big = kinds
    defines = {
        "SOURCE": CUDA_TYPES[kind],
        "TARGET": CUDA_TYPES[target],
        "COMPUTE": "double" if wide else "float",
        "WIDE": str(int(wide)),
        "RANK": str(rank),
        "ORDER": str(order),
        "MODE": str(MODES.index(mode)),
        "INDEX": "int64" if big else "int",
        "TILE_X": str(cut.tile_x),
        "THREADS": str(cut.threads),
        "MARCH": str(cut.march),
        "TOGETHER": str(cut.together),
        "BLOCKS": str(1 if wide else cut.blocks),  # double precision keeps its registers
    }
    return KernelSpec(source, name, (*defines.items(), *more), "linumpy.gpu.ndimage.cuda")


def blocks_of(shape: Sequence[int], tile: tuple[int, int, int], rank: int) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Cut a grid of voxels into blocks: the launch, and what the kernel must know of it (see ``tile_of_block``).

    The slowest axis of the image is the one that threads march along.
    """
    if rank == 2:
        tile = (1, tile[0] * tile[1], tile[2])
    z, y, x = (-(-n // t) for n, t in zip(shape, tile, strict=True))
    if y <= GRID_LIMIT and z <= GRID_LIMIT:
        return (x, y, z), (0, 0)
    return (x * y * z,), (y, x)


def is_wide(image: Any, out: Any) -> bool:
    """Say whether a kernel computes in double precision."""
    return not (image.dtype.str[1:] in IN_FLOAT32 and out.dtype.str[1:] in IN_FLOAT32)


def three(sizes: Sequence[float], first: int = 1) -> tuple[float, ...]:
    """Put an axis of one voxel before two."""
    return (first,) * (3 - len(sizes)) + tuple(sizes)
