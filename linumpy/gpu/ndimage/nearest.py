"""Copy the nearest voxels: order 0 where each axis of the result depends on one axis of the image.

In: an image of any dtype and rank, and for each axis the coordinates of the result's voxels. Out: the nearest voxels,
copied in one pass by the kernel of ``take.cu``. SciPy computes the indices of these voxels, so that ties are decided as
in SciPy. Tables with an entry for each row, plane and column are cached on the device for the stream that uses them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linumpy.arrays import Array
from linumpy.gpu.kernels import UNSIGNED_TYPES, KernelSpec, Queue, Uploaded, address_of, int32, load, queue_of, upload
from linumpy.gpu.rounding import rounded
from linumpy.plan.boundary import snap_to_edges

_UNITS = UNSIGNED_TYPES | {16: "uint4"}
_LANES, _WARPS, _MARCH = 32, 8, 8
_MAX_BLOCKS = 2**31 - 1
#: Tables with more entries are not cached, but made and uploaded by every call.
_CACHED_ENTRIES = 2**17
#: Coordinates beyond this need the kernels that handle infinite coordinates.
_FARTHEST = 2.0**50


@dataclass(frozen=True)
class Line:
    """Coordinates along an axis: voxel k of the result is at ``scale * (k + before) + offset``, rounded as in SciPy.

    `size`, `length`: voxels of the image and of the result. `scale`, `offset`, `before`: in voxels of the image, except
    `before`, which is in voxels of the result. `box` (int, int): offset and size, along this axis, of the box of the
    image that is in memory; None for the whole axis. `snaps`: whether coordinates outside of the axis by a rounding
    error are moved to its edge.
    """

    size: int
    length: int
    scale: float = 1.0
    offset: float = 0.0
    before: float = 0.0
    box: tuple[int, int] | None = None
    snaps: bool = False


def can_take(image: Array, lines: Sequence[Line]) -> bool:
    """Say whether the kernel supports this image and map: its indices of columns and blocks have 32 bits."""
    return image.size > 0 and _is_supported(tuple(lines), image.itemsize, max(image.shape))


@functools.lru_cache(maxsize=256)
def _is_supported(lines: tuple[Line, ...], itemsize: int, longest: int) -> bool:
    if itemsize not in _UNITS or longest >= 2**31:
        return False
    rows = math.prod(line.length for line in lines[:-1])
    tiles = -(-lines[-1].length // (_LANES * _pack(itemsize)))
    finite = all(abs(line.scale) * line.length + abs(line.offset) < _FARTHEST for line in lines)
    return finite and rows * tiles <= _MAX_BLOCKS


def take(image: Array, lines: Sequence[Line], mode: str, cval: complex, out: Array) -> None:
    """Copy the nearest voxels.

    `mode`: boundary mode, one of :data:`linumpy.plan.boundary.MODES`. `cval`: the value outside, for the constant
    modes; cast as SciPy casts it. `out`: C-contiguous, of the image's dtype and the lengths of `lines`.
    """
    if not out.size:
        return
    make_tables = _cached_tables if sum(out.shape) <= _CACHED_ENTRIES else _tables
    tables = make_tables(tuple(lines), mode, _bytes_of(cval, image.dtype), queue_of(image))
    blocks, sizes, spec, aligned = _plan_launch(tuple(out.shape), image.itemsize)
    packed = _YES if aligned and address_of(out) % aligned == 0 else _NO
    load(spec)((blocks,), (_LANES * _WARPS,), (image, out, *tables.get(), *sizes, packed))


_NO, _YES = int32(0, 1)


@functools.lru_cache(maxsize=256)
def _plan_launch(shape: tuple[int, ...], itemsize: int) -> tuple[int, tuple[np.int32, ...], KernelSpec, int]:
    """Plan a launch: number of blocks, sizes, kernel, and the bytes to which rows are aligned (0: no packed stores)."""
    height, width = (shape[-2] if len(shape) > 1 else 1), shape[-1]
    pack = _pack(itemsize)
    across, down = -(-width // (_LANES * pack)), -(-height // (_WARPS * _MARCH))
    blocks = across * down * math.prod(shape[:-2])
    aligned = pack * itemsize if width % pack == 0 else 0
    return blocks, int32(height, width, across, down), kernel_spec(itemsize), aligned


def _pack(itemsize: int) -> int:
    return max(1, 4 // itemsize)


def kernel_spec(itemsize: int) -> KernelSpec:
    """Return the kernel for voxels of `itemsize` bytes."""
    defines = {"UNIT": _UNITS[itemsize], "PACK": str(_pack(itemsize)), "MARCH": str(_MARCH)}
    return KernelSpec("take", "take", tuple(defines.items()), "linumpy.gpu.ndimage.cuda")


def _bytes_of(cval: complex, dtype: np.dtype) -> bytes:
    """Cast a constant as SciPy does, and return its bytes."""
    if cval == 0 and "-" not in str(cval):
        return bytes(dtype.itemsize)
    value = np.asarray(cval)
    if dtype.kind == "c":
        with np.errstate(over="ignore"):
            return value.astype(dtype).tobytes()
    return rounded(value.astype(np.float64), dtype).astype(dtype).tobytes()


def _tables(lines: tuple[Line, ...], mode: str, outside: bytes, queue: Queue) -> Uploaded:
    """Make and upload tables of offsets in elements, -1 for `outside`; all axes but the last two share one table."""
    offsets: list[np.ndarray] = []
    step = 1
    for line in reversed(lines):
        voxels, (first, size) = nearest_voxels(line, mode), line.box or (0, line.size)
        offsets.append(np.where((voxels < first) | (voxels >= first + size), -1, (voxels - first) * step))
        step *= size
    offsets += [np.zeros(1, np.int64)] * (2 - len(offsets))
    columns, rows, others = offsets[0], offsets[1], offsets[2:]
    planes = np.zeros(1, np.int64)
    for axis_offsets in reversed(others):
        joined = planes[:, None] + axis_offsets
        planes = np.where((planes[:, None] < 0) | (axis_offsets < 0), -1, joined).ravel()
    return upload([planes, rows, columns.astype(np.int32), np.frombuffer(outside, np.uint8)], queue)


_cached_tables = functools.lru_cache(maxsize=64)(_tables)


def nearest_voxels(line: Line, mode: str) -> np.ndarray:
    """Return the nearest voxel of each coordinate along an axis; -1 for none."""
    from scipy import ndimage

    coordinates = line.scale * (np.arange(line.length) + line.before) + line.offset
    if line.snaps:
        snap_to_edges(coordinates, line.size)
    indices = np.arange(line.size, dtype=np.float64)
    return ndimage.map_coordinates(indices, coordinates[None], order=0, mode=mode, cval=-1, output=np.int64)
