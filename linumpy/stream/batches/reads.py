"""Reads of crops: what is read of an array, and where it is written → tickets.

All regions of a call that the native core reads share a ticket. Every other region has a ticket of its own, with the
same methods. An error affects one crop only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import CancelledError, Executor, Future, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from linumpy.arrays import Array
from linumpy.gpu.read.outputs import Regions
from linumpy.gpu.rounding import bfloat16_bits, cast_elements
from linumpy.io.zarr_mode import read_chunks_on_host
from linumpy.stream.batches.memory import Memory
from linumpy.stream.planning.records import ArrayInfo, CropRead

if TYPE_CHECKING:
    import zarr

    from linumpy.gpu import Reader
    from linumpy.gpu.read.ticket import Ticket

log = logging.getLogger(__name__)

#: A read, and the address and the strides in bytes of its output, along all axes of the array.
Placed = tuple[CropRead, int, Sequence[int]]


class ReadTicket(Protocol):
    """Reads that one call waits for."""

    def wait(self) -> None:
        """Wait until the reads have ended."""

    def errors(self, stream: Any = None) -> dict[int, BaseException]:
        """Wait for the regions, which are then ready on `stream`; return the errors of faulty regions by number."""

    def cancel(self) -> None:
        """Cancel the reads."""


def submit(
    reader: Reader, placed: Sequence[Placed], dtype: np.dtype, is_bfloat16: bool, lease: object
) -> tuple[list[int], ReadTicket]:
    """Submit reads of arrays of one rank by one call; return the row of the batch of each region, and the ticket.

    The native core reads these arrays, and holds `lease`, so that the memory is not reused while it writes there.
    """
    rows, infos, regions = regions_of(placed)
    layouts: list[Any] = [info.source for info in infos]
    looks = [info.look for info in infos]
    return rows, reader.submit_together(layouts, regions, "bfloat16" if is_bfloat16 else dtype, lease, looks)


def regions_of(placed: Sequence[Placed]) -> tuple[list[int], list[ArrayInfo], Regions]:
    """Return the row of the batch of each region that is read, the arrays, and the regions with their outputs."""
    numbers: dict[int, int] = {}
    arrays = [numbers.setdefault(id(read.info), len(numbers)) for read, _, _ in placed]
    infos = dict(zip(arrays, [read.info for read, _, _ in placed], strict=True))
    extents = np.array([read.region for read, _, _ in placed], np.int64)
    regions = Regions(
        array=np.array(arrays, np.int64),
        start=extents[:, :, 0],
        stop=extents[:, :, 1],
        strides=np.array([strides for _, _, strides in placed], np.int64),
        addresses=np.array([address for _, address, _ in placed], np.int64),
    )
    rows, regions = _needed_boxes(regions, [read for read, _, _ in placed])
    return rows, list(infos.values()), regions


def _needed_boxes(regions: Regions, reads: Sequence[CropRead]) -> tuple[list[int], Regions]:
    """Divide regions into the needed boxes of their reads; return the row of the batch of each box, and the boxes."""
    if all(read.needed is None for read in reads):
        return [read.row for read in reads], regions
    counts = [1 if read.needed is None else len(read.needed) for read in reads]
    repeated, first = regions.take(np.repeat(np.arange(len(reads)), counts)), 0
    start, stop = repeated.start.copy(), repeated.stop.copy()
    for read, count in zip(reads, counts, strict=True):
        if read.needed is not None:
            of_region, axes = slice(first, first + count), read.needed.shape[1]
            start[of_region, -axes:], stop[of_region, -axes:] = read.needed[:, :, 0], read.needed[:, :, 1]
        first += count
    addresses = repeated.addresses + ((start - repeated.start) * repeated.strides).sum(axis=1)
    rows = np.repeat([read.row for read in reads], counts).tolist()
    return rows, replace(repeated, start=start, stop=stop, addresses=addresses)


class OtherReads:
    """Reads of arrays that the native core does not read, region by region.

    `pool` has the threads that read by zarr-python, for arrays that the reader does not support; the reason is logged
    once for each array. `memory` holds the outputs.
    """

    def __init__(self, reader: Reader, pool: Executor, memory: Memory) -> None:
        self._reader, self._pool, self._memory = reader, pool, memory
        self._logged: set[str] = set()

    def submit(
        self, placed: Sequence[Placed], dtype: np.dtype, is_bfloat16: bool
    ) -> list[tuple[list[int], ReadTicket]]:
        """Submit reads; return the row and the ticket of each region, whose errors are those of its submission, too."""
        rows, infos, regions = regions_of(placed)
        boxes = np.stack([regions.start, regions.stop], axis=2)
        shapes, strides = (regions.stop - regions.start).tolist(), regions.strides.tolist()
        offsets = (regions.addresses - self._memory.address).tolist()
        tickets: list[tuple[list[int], ReadTicket]] = []
        for n, (row, number) in enumerate(zip(rows, regions.array.tolist(), strict=True)):
            submit_one = self._by_zarr if infos[number].unsupported is not None else self._by_reader
            out = self._memory.array(offsets[n], shapes[n], dtype, strides=tuple(strides[n]))
            tickets.append(([row], submit_one(infos[number], boxes[n], out, is_bfloat16)))
        return tickets

    def _by_zarr(self, info: ArrayInfo, box: np.ndarray, out: Array, is_bfloat16: bool) -> ReadTicket:
        if info.name not in self._logged:
            self._logged.add(info.name)
            log.warning("%s is read by zarr-python on the host: %s", info.name, info.unsupported)
        return FallbackTicket(self._pool.submit(_read, info, box, out, is_bfloat16), out)

    def _by_reader(self, info: ArrayInfo, box: np.ndarray, out: Array, is_bfloat16: bool) -> ReadTicket:
        source: Any = info.source
        try:
            dtype = "bfloat16" if is_bfloat16 else None
            return ReaderTicket(self._reader.submit_many([source], box[None], outs=[out], dtype=dtype)[0])
        except Exception as error:
            return ReaderTicket(error)


class FallbackTicket:
    """A region that zarr-python reads."""

    def __init__(self, future: Future[np.ndarray | None], out: Array) -> None:
        self._future, self._out = future, out

    def wait(self) -> None:
        """Wait until the read has ended."""
        wait([self._future])

    def errors(self, stream: Any = None) -> dict[int, BaseException]:
        """Wait for the region, and copy it to a device on `stream`; return its error as number 0."""
        try:
            values = self._future.result()
            if values is not None:
                import cupy

                with cupy.cuda.get_current_stream() if stream is None else stream:
                    self._out[...] = cupy.asarray(values)
                self._future = Future()
                self._future.set_result(None)
        except (Exception, CancelledError) as error:
            return {0: error}
        return {}

    def cancel(self) -> None:
        """Cancel the read unless it has begun."""
        self._future.cancel()


class ReaderTicket:
    """A region for which the reader has a ticket of its own, or the exception of its submission."""

    def __init__(self, ticket: Ticket | Exception) -> None:
        self._ticket = ticket

    def wait(self) -> None:
        """Wait until the read has ended."""
        self.errors()

    def errors(self, stream: Any = None) -> dict[int, BaseException]:
        """Wait for the region; return its error as number 0."""
        error = self._ticket if isinstance(self._ticket, Exception) else self._ticket.exception()
        return {} if error is None else {0: error}

    def cancel(self) -> None:
        """Cancel the read."""
        if not isinstance(self._ticket, Exception):
            self._ticket.cancel()


def _read(info: ArrayInfo, box: np.ndarray, out: Array, is_bfloat16: bool) -> np.ndarray | None:
    """Read a box, and cast it to the output's dtype; return the values if `out` is on a device, else write them."""
    region = tuple(slice(a, b) for a, b in box.tolist())
    values = np.ascontiguousarray(read_chunks_on_host(cast("zarr.Array", info.source), region))
    values = bfloat16_bits(values) if is_bfloat16 else cast_elements(values, out.dtype)
    if isinstance(out, np.ndarray):
        out[...] = values
        return None
    return values
