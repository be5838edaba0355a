"""Regions and the arrays that they are read into, many at once: bounds, dtypes, shapes and strides.

In: regions and outputs as callers pass them. Out: arrays of numbers, a row for each region. Errors: ``RegionError``,
``ValueError`` and ``TypeError`` that name the value.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from linumpy.arrays import Array, is_small
from linumpy.errors import RegionError
from linumpy.gpu.kernels import address_of
from linumpy.gpu.read.request import cast_dtype, check_out
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.region import Region

#: A ``cupy.cuda.Event``; CuPy has no types.
Event = Any


@dataclass(frozen=True, eq=False)
class Regions:
    """Regions of arrays and their outputs: a row for each region.

    Attributes
    ----------
    array : numpy.ndarray of int64, (regions,)
        Index of the region's array.
    start, stop : numpy.ndarray of int64, (regions, rank)
        Bounds, ``0 <= start <= stop <= shape``.
    strides : numpy.ndarray of int64, (regions, rank)
        Bytes between neighbours in each output, along the axes of the array.
    addresses : numpy.ndarray of int64, (regions,)
        Address of each output.
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


def bounds_of(
    regions: np.ndarray, layouts: list[ArrayLayout], numbers: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, list[tuple[int, ...]]]:
    """Return start, stop and shape of regions (n, rank, 2); `numbers` are the indices of their layouts.

    Raises
    ------
    RegionError
        A region that leaves its array; another shape or dtype of `regions`; arrays of different numbers of axes.
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
    return bounds[0], bounds[1], list(map(tuple, (bounds[1] - bounds[0]).tolist()))


def columns_of(boxes: list[Region]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return start and stop of regions, and which axes each region keeps; None in place of these if all keep all."""
    start, stop = np.array([[box.start for box in boxes], [box.stop for box in boxes]], np.int64)
    return start, stop, None if all(all(box.kept) for box in boxes) else np.array([box.kept for box in boxes], bool)


def targets_of(
    layouts: list[ArrayLayout], numbers: list[int], outs: Sequence[Array] | None, dtype: DTypeLike | None
) -> list[np.dtype]:
    """Return the dtype of each output: `dtype`, else that of its array in `outs`, else that of the stored elements."""
    if dtype is not None or outs is None:
        array_targets = [cast_dtype(layout.dtype, dtype) for layout in layouts]
        return [array_targets[number] for number in numbers]
    out_dtypes = [getattr(out, "dtype", None) for out in outs]
    pairs = list(zip(numbers, out_dtypes, strict=True))
    targets = {pair: cast_dtype(layouts[pair[0]].dtype, pair[1]) for pair in set(pairs)}
    return [targets[pair] for pair in pairs]


def grouped(layouts: list[ArrayLayout], numbers: list[int], targets: list[np.dtype]) -> list[list[int]]:
    """Group the rows of regions that are cut, decoded and cast in the same way."""
    if len(layouts) == 1 and targets.count(targets[0]) == len(targets):
        return [list(range(len(targets)))]
    groups: dict[tuple[object, np.dtype], list[int]] = {}
    rows_of_pair: dict[tuple[int, np.dtype], list[int]] = {}
    for row, pair in enumerate(zip(numbers, targets, strict=True)):
        rows = rows_of_pair.get(pair)
        if rows is None:
            rows = rows_of_pair[pair] = groups.setdefault((layouts[pair[0]].geometry, pair[1]), [])
        rows.append(row)
    return list(groups.values())


def check_output(out: Array, shape: tuple[int, ...], dtype: np.dtype, device: int | None) -> None:
    """Raise if a region of `shape` and `dtype` cannot be read into an array; `device` None for host memory."""
    check_out(out, shape, dtype, on_device=device is not None)
    if device is not None and out.device.id != device:
        raise ValueError(f"out lies on device {out.device.id}, but this reader reads to device {device}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out is read-only: pass an array that can be written to")
    if out.size and not out.flags.c_contiguous and _overlaps(shape, out.strides, out.itemsize):
        raise ValueError(f"out has strides {out.strides}: its elements must lie apart, in increasing order")


def rows_of(
    out: Array, rows: np.ndarray, extent: np.ndarray, kept: np.ndarray, device: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return strides and address of the row of `out` for each region; raise if a row or a region does not fit."""
    check_output(out, getattr(out, "shape", ()), getattr(out, "dtype", np.dtype(np.uint8)), device)
    shape = out.shape[1:]
    if kept.dtype != bool:
        raise TypeError(f"kept is {kept.tolist()}: one bool for each axis of the array")
    if not out.ndim or kept.shape != extent.shape[1:] or len(shape) != kept.sum() or rows.shape != extent.shape[:1]:
        raise ValueError(
            f"out has shape {out.shape}, for {len(extent)} regions of {extent.shape[1]} axes, {len(rows)} rows and "
            f"kept={kept.tolist()}: pass a row for each region, with an axis for each axis that is kept"
        )
    if rows.dtype.kind not in "iu":
        raise TypeError(f"rows are of dtype {rows.dtype}: pass integers")
    if len(rows) and (rows.min() < 0 or rows.max() >= len(out)):
        raise ValueError(f"rows go from {rows.min()} to {rows.max()}: out has {len(out)}")
    values, counts = np.unique(rows, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"row {values[counts > 1][0]} is given for several regions: each needs a row of its own")
    if (extent[:, kept] > np.array(shape, np.int64)).any() or (extent[:, ~kept] > 1).any():
        raise ValueError(f"regions of up to {extent.max(axis=0).tolist()} voxels do not fit rows of {shape}")
    strides = np.zeros(extent.shape, np.int64)
    strides[:, kept] = out.strides[1:]
    return strides, address_of(out) + rows.astype(np.int64) * out.strides[0]


def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Say whether elements may share bytes: a stride is smaller than the bytes that axes of smaller strides span."""
    spanned_nbytes = itemsize
    for step, count in sorted((step, count) for step, count in zip(strides, shape, strict=True) if count > 1):
        if step < spanned_nbytes:
            return True
        spanned_nbytes += (count - 1) * step
    return False


def addresses_of(arrays: list[Array]) -> np.ndarray:
    """Return the address of the first element of each output."""
    return np.array([_address(array) for array in arrays], np.int64)


def _address(array: Array) -> int:
    if isinstance(array, np.ndarray) and array.size and array.flags.carray and not is_small(array.dtype):
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # `array.ctypes` takes four times as long
    return address_of(array)


def strides_of(arrays: list[Array], kept: np.ndarray | None, shape: tuple[int, int]) -> np.ndarray:
    """Return the strides of outputs in bytes, along all axes of the array; 0 for axes that were dropped."""
    if kept is None:
        return np.array([array.strides for array in arrays], np.int64).reshape(shape)
    strides = np.zeros(shape, np.int64)
    for row, array in enumerate(arrays):
        strides[row, kept[row]] = array.strides
    return strides


def with_all_axes(output: Array, kept: np.ndarray | None, extent: np.ndarray) -> Array:
    """View the first voxels of an output with all axes of the array; axes that were dropped have one voxel."""
    kept = np.ones(len(extent), bool) if kept is None else kept
    index = [slice(0, n) if is_kept else None for n, is_kept in zip(extent.tolist(), kept.tolist(), strict=True)]
    return output[(*index, ...)]
