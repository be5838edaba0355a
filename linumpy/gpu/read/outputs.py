"""Regions and the arrays that they are read into, many at once: bounds, dtypes, shapes and strides.

In: regions and outputs as callers pass them. Out: arrays of numbers, a row for each region. Errors: ``RegionError``,
``ValueError`` and ``TypeError`` that name the value.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.errors import RegionError
from linumpy.gpu.kernels import address_of
from linumpy.gpu.read.request import check_out
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.region import Region

#: A ``cupy.cuda.Event``; CuPy has no types.
Event = Any


@dataclass(frozen=True, eq=False)
class Regions:
    """Regions of arrays and their outputs: a row for each region.

    `array` (int64, (regions,)): index of the region's array. `start`, `stop` (int64, (regions, rank)): bounds, ``0 <=
    start <= stop <= shape``. `strides` (int64, (regions, rank)): bytes between neighbours in each output, along the
    axes of the array. `addresses` (int64, (regions,)): address of each output.
    """

    array: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    strides: np.ndarray
    addresses: np.ndarray

    def __len__(self) -> int:
        return len(self.array)

    @property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """All columns, in the order of the core's arguments."""
        return self.array, self.start, self.stop, self.strides, self.addresses

    def take(self, rows: np.ndarray | slice) -> Regions:
        """Return some of the rows."""
        return Regions(
            self.array[rows], self.start[rows], self.stop[rows], self.strides[rows], self.addresses[rows]
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Boxes:
    """Bounds of regions, before they have outputs.

    `start`, `stop` (int64, (regions, rank)): bounds, within the arrays. `kept` ((regions, rank), or None): axes of the
    array that each output has; None if all have all.
    """

    start: np.ndarray
    stop: np.ndarray
    shapes: list[tuple[int, ...]]
    kept: np.ndarray | None = None

    def into(self, arrays: Sequence[Array], numbers: list[int]) -> Regions:
        """Return the regions with their outputs; `numbers` are the indices of their arrays."""
        addresses = np.array([_address(array) for array in arrays], np.int64)
        if self.kept is None:
            strides = np.array([array.strides for array in arrays], np.int64).reshape(self.start.shape)
        else:
            strides = np.zeros(self.start.shape, np.int64)
            for row, array in enumerate(arrays):
                strides[row, self.kept[row]] = array.strides  # 0 for axes that were dropped
        return Regions(np.array(numbers, np.int64), self.start, self.stop, strides, addresses)


def bounds_of(regions: np.ndarray, layouts: list[ArrayLayout], numbers: Sequence[int]) -> Boxes:
    """Check regions (n, rank, 2); `numbers` are the indices of their layouts.

    `RegionError`: A region that leaves its array; another shape or dtype of `regions`; arrays of different numbers of
    axes.
    """
    rank = layouts[0].rank
    if regions.ndim != 3 or regions.shape[1:] != (rank, 2) or regions.dtype.kind not in "iu":
        raise RegionError(f"regions have shape {regions.shape} and dtype {regions.dtype}: integers (n, {rank}, 2)")
    if any(layout.rank != rank for layout in layouts):
        raise RegionError(f"regions have {rank} axes, but not all arrays do")
    bounds = regions.transpose(2, 0, 1).astype(np.int64, order="C")
    start, stop = bounds.view(np.uint64)  # a negative number is larger than any size
    shape = np.array([layout.shape for layout in layouts], np.uint64).reshape(-1, rank)
    wrong = (start > stop) | (stop > (shape if len(shape) == 1 else shape[numbers]))
    if np.count_nonzero(wrong):
        row = int(np.flatnonzero(wrong.any(axis=1))[0])
        array_shape = layouts[numbers[row]].shape
        raise RegionError(f"region {row}, {regions[row].tolist()}, does not lie in the array of shape {array_shape}")
    return Boxes(bounds[0], bounds[1], list(map(tuple, (bounds[1] - bounds[0]).tolist())))


def boxes_of(regions: list[Region]) -> Boxes:
    """Return the bounds of regions of arrays with the same number of axes."""
    start, stop = np.array([[region.start for region in regions], [region.stop for region in regions]], np.int64)
    kept = None
    if not all(all(region.kept) for region in regions):
        kept = np.array([region.kept for region in regions], bool)
    return Boxes(start, stop, [region.shape for region in regions], kept)


def check_output(out: Any, shape: tuple[int, ...], dtype: np.dtype, device: int | None) -> None:
    """Raise if a region of `shape` and `dtype` cannot be read into an array; `device` None for host memory."""
    check_out(out, shape, dtype, on_device=device is not None)
    if device is not None and out.device.id != device:
        raise ValueError(f"out lies on device {out.device.id}, but this reader reads to device {device}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out is read-only: pass an array that can be written to")
    if out.size and not out.flags.c_contiguous and _overlaps(shape, out.strides, out.itemsize):
        raise ValueError(f"out has strides {out.strides}: its elements must lie apart, in increasing order")


def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Say whether elements may share bytes: a stride is smaller than the bytes that axes of smaller strides span."""
    spanned_nbytes = itemsize
    for step, count in sorted((step, count) for step, count in zip(strides, shape, strict=True) if count > 1):
        if step < spanned_nbytes:
            return True
        spanned_nbytes += (count - 1) * step
    return False


def _address(array: Array) -> int:
    if isinstance(array, np.ndarray) and array.size and array.flags.carray and array.dtype.isbuiltin == 1:
        # Only of NumPy's own dtypes; `array.ctypes` takes four times as long.
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    return address_of(array)


def view_of(
    address: int, strides: Sequence[int], shape: Sequence[int], dtype: np.dtype, owner: object, device: Any
) -> Array:
    """View an output, which is not empty, by its address and its strides in bytes.

    `owner` has the memory; `device` is CuPy and the number of the device, or None in host memory.
    """
    if device is None:
        interface = {"data": (address, False), "shape": tuple(shape), "strides": tuple(strides), "version": 3}
        memory = SimpleNamespace(__array_interface__=interface | {"typestr": f"|V{dtype.itemsize}"}, owner=owner)
        return np.asarray(memory).view(dtype)
    cupy, number = device
    nbytes = dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, nbytes, owner, number), 0)
    return cupy.ndarray(tuple(shape), dtype, pointer, tuple(strides))
