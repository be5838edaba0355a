"""Staging for outputs in host memory: one ring, and NumPy in place of kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from linumpy.gpu.staging.scatter import Conversion
from linumpy.gpu.staging.tables import Placed, TablePlan, Tables
from linumpy.plan.read.ring import ALIGN, Range, Ring, aligned, ring_nbytes, staged_nbytes
from linumpy.plan.read.scatter import ScatterTable


class HostStaging:
    """A ring of host memory.

    Parameters
    ----------
    host_nbytes : int
        Memory at most.
    """

    on_device = False
    direct = False
    arena_nbytes = 0

    def __init__(self, host_nbytes: int) -> None:
        self.scratch_bytes = self.host_nbytes = host_nbytes // ALIGN * ALIGN
        self._ring, self._host = Ring(0), np.empty(0, np.uint8)

    def spare_nbytes(self) -> int:
        """Say that there is no memory beyond the scratch: there is no device."""
        return 0

    def rest(self) -> None:
        """Do nothing: memory is small."""

    def order_behind(self, events: list[Any]) -> None:
        """Do nothing: there are no streams."""

    def prepare(self, device_nbytes: int, host_nbytes: int) -> None:
        """Hold so much memory, or as much as the limit allows."""
        if host_nbytes > self._ring.nbytes < self.host_nbytes and self._ring.oldest() is None:
            self._host = np.empty(staged_nbytes(host_nbytes, self.host_nbytes), np.uint8)
            self._ring = Ring(self._host.nbytes)

    def take_host(self, nbytes: int) -> Range | None:
        """Give out memory; None until an older range is free."""
        if nbytes > self._ring.nbytes and self._ring.oldest() is None:
            self._host = np.empty(max(ring_nbytes(nbytes, self.host_nbytes), aligned(nbytes)), np.uint8)
            self._ring = Ring(self._host.nbytes)
        return self._ring.take(nbytes)

    def oldest_host(self) -> Range | None:
        """Return the memory that must be free before more can be given out."""
        return self._ring.oldest()

    def host_address(self, taken: Range) -> int:
        """Address of the memory."""
        return int(self._host.ctypes.data) + taken.offset

    def host_view(self, taken: Range) -> np.ndarray:
        """Return the memory as bytes."""
        return self._host[taken.offset : taken.offset + taken.nbytes]

    def await_copied(self, taken: Range) -> None:
        """Free memory."""
        taken.free = True

    def await_queued(self) -> None:
        """Do nothing: copies are made at once."""

    def plan_tables(self, tables: Tables, *, writes_cache: bool = False) -> TablePlan:
        """Leave tables as they are."""
        return TablePlan(tables, [])

    def place(self, taken: Range, nbytes: int, plan: TablePlan, *, timed: bool) -> Placed:
        """Copy boxes to their outputs; without bytes, fill values."""
        for conversion, table in plan.tables:
            _copy_boxes(self.host_view(taken)[:nbytes], conversion, table)
        taken.free = True
        return Placed(0, None)

    def close(self) -> None:
        """Give the memory back."""
        self._ring, self._host = Ring(0), np.empty(0, np.uint8)


def _copy_boxes(source: np.ndarray, conversion: Conversion, table: ScatterTable) -> None:
    stored = conversion.source.newbyteorder() if conversion.swapped else conversion.source
    fills = [fill[: conversion.target.itemsize].view(conversion.target)[0] for fill in table.fill]
    source_strides = [tuple(row) for row in table.source_strides.tolist()]
    target_strides = [tuple(row) for row in table.target_strides.tolist()]
    rows = zip(table.source.tolist(), table.target.tolist(), table.header.tolist(), table.extent.tolist(), strict=True)
    for begin, address, header, extent in rows:
        into = _at(address, tuple(extent), conversion.target, target_strides[header])
        if begin < 0:
            into[...] = fills[header]
            continue
        values = np.ndarray(tuple(extent), stored, source, begin, source_strides[header])
        if conversion.bfloat16 or (values.dtype.kind == "f" and into.dtype.kind in "iu"):
            into[...] = conversion.cast(values)
        else:  # as NumPy casts, without a copy of the values
            with np.errstate(all="ignore"):
                np.copyto(into, values, casting="unsafe")


def _at(address: int, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...]) -> np.ndarray:
    """View memory that the reader knows by its address alone."""
    nbytes = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + dtype.itemsize
    return np.ndarray(shape, dtype, memoryview((ctypes.c_char * nbytes).from_address(address)), 0, strides)
