"""Take voxels as they are: order 0 where each axis of the result depends on one axis of the image alone.

In: an image of any dtype and rank, and for each axis the coordinates of the result's voxels. Out: the voxels that lie
nearest, in one pass by the kernel of ``take.cu``; SciPy itself decides which ones those are, ties included. Tables of
an entry for each row, plane and column are kept on the device for the stream that uses them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.gpu.kernels import KernelSpec, Uploaded, address_of, int32, load
from linumpy.gpu.rounding import rounded
from linumpy.gpu.tables import Queue, queue_of, upload

_UNITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long", 16: "uint4"}
_LANES, _WARPS, _MARCH = 32, 8, 8
_MOST_BLOCKS = 2**31 - 1
#: Tables of more entries are made and sent up again at every call.
_KEPT = 2**17
#: Coordinates beyond this are left to kernels that know what is infinitely far.
_FARTHEST = 2.0**50


@dataclass(frozen=True)
class Line:
    """The coordinates of an axis: of its voxel k they are ``scale * (k + before) + offset``, rounded as SciPy does.

    Attributes
    ----------
    size, length : int
        Voxels of the image and of the result.
    scale, offset, before : float
        See above.
    box : (int, int), optional
        Where a box of the image begins and how many voxels it has, if that is all there is of it.
    """

    size: int
    length: int
    scale: float = 1.0
    offset: float = 0.0
    before: float = 0.0
    box: tuple[int, int] | None = None


def can_take(image: Array, lines: Sequence[Line]) -> bool:
    """Say whether the kernel takes voxels of this image: it numbers columns in 32 bits."""
    return image.size > 0 and _is_taken(tuple(lines), image.itemsize, max(image.shape))


@functools.lru_cache(maxsize=256)
def _is_taken(lines: tuple[Line, ...], itemsize: int, longest: int) -> bool:
    if itemsize not in _UNITS or longest >= 2**31:
        return False
    rows = math.prod(line.length for line in lines[:-1])
    tiles = -(-lines[-1].length // (_LANES * _pack(itemsize)))
    near = all(abs(line.scale) * line.length + abs(line.offset) < _FARTHEST for line in lines)
    return near and rows * tiles <= _MOST_BLOCKS


def take(image: Array, lines: Sequence[Line], mode: str, cval: Any, out: Array) -> None:
    """Take the nearest voxels.

    Parameters
    ----------
    image : cupy.ndarray
        C-contiguous, not empty.
    lines : sequence of Line
        One for each axis.
    mode : str
        One of :data:`linumpy.plan.grid.blocks.MODES`: what lies outside.
    cval : float or complex
        The value there, for the constant modes; cast as SciPy does.
    out : cupy.ndarray
        C-contiguous, of the image's dtype and the lengths of `lines`.
    """
    if not out.size:
        return
    make = _kept if sum(out.shape) <= _KEPT else _tables
    tables = make(tuple(lines), mode, _bytes_of(cval, image.dtype), queue_of(image))
    blocks, sizes, spec, aligned = _launch(tuple(out.shape), image.itemsize)
    packed = _YES if aligned and address_of(out) % aligned == 0 else _NO
    load(spec)((blocks,), (_LANES * _WARPS,), (image, out, *tables.get(), *sizes, packed))


_NO, _YES = int32(0, 1)


@functools.lru_cache(maxsize=256)
def _launch(shape: tuple[int, ...], itemsize: int) -> tuple[int, tuple[np.int32, ...], KernelSpec, int]:
    """Cut a result into blocks: their number, what the kernel is told, and which; 0 for rows that begin anywhere."""
    height, width = (shape[-2] if len(shape) > 1 else 1), shape[-1]
    pack = _pack(itemsize)
    across, down = -(-width // (_LANES * pack)), -(-height // (_WARPS * _MARCH))
    blocks = across * down * math.prod(shape[:-2])
    aligned = pack * itemsize if width % pack == 0 else 0
    return blocks, int32(height, width, across, down), kernel_spec(itemsize), aligned


def _pack(itemsize: int) -> int:
    return max(1, 4 // itemsize)


def kernel_spec(itemsize: int) -> KernelSpec:
    """Describe the kernel for voxels of so many bytes."""
    defines = {"UNIT": _UNITS[itemsize], "PACK": str(_pack(itemsize)), "MARCH": str(_MARCH)}
    return KernelSpec("take", "take", tuple(defines.items()), "linumpy.gpu.ndimage.cuda")


def _bytes_of(cval: Any, dtype: np.dtype) -> bytes:
    """Cast a constant as SciPy does."""
    if cval == 0 and "-" not in str(cval):
        return bytes(dtype.itemsize)
    value = np.asarray(cval)
    if dtype.kind == "c":
        with np.errstate(over="ignore"):
            return value.astype(dtype).tobytes()
    return rounded(value.astype(np.float64), dtype).astype(dtype).tobytes()


def _tables(lines: tuple[Line, ...], mode: str, outside: bytes, queue: Queue) -> Uploaded:
    """Make tables of offsets in elements, those of all axes but the last two joined; and bring them to the device."""
    offsets: list[np.ndarray] = []
    step = 1
    for line in reversed(lines):
        voxels, (first, held) = nearest_voxels(line, mode), line.box or (0, line.size)
        offsets.append(np.where((voxels < first) | (voxels >= first + held), -1, (voxels - first) * step))
        step *= held
    offsets += [np.zeros(1, np.int64)] * (2 - len(offsets))
    columns, rows, others = offsets[0], offsets[1], offsets[2:]
    planes = np.zeros(1, np.int64)
    for one in reversed(others):
        joined = planes[:, None] + one
        planes = np.where((planes[:, None] < 0) | (one < 0), -1, joined).ravel()
    return upload([planes, rows, columns.astype(np.int32), np.frombuffer(outside, np.uint8)], queue)


_kept = functools.lru_cache(maxsize=64)(_tables)


def nearest_voxels(line: Line, mode: str) -> np.ndarray:
    """Number the voxels that lie nearest to an axis's coordinates; -1 for none."""
    from scipy import ndimage

    coordinates = line.scale * (np.arange(line.length) + line.before) + line.offset
    numbers = np.arange(line.size, dtype=np.float64)
    return ndimage.map_coordinates(numbers, coordinates[None], order=0, mode=mode, cval=-1, output=np.int64)
