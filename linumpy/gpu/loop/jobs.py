"""What is submitted to a reader, in the portions that its loop takes.

In: :class:`Regions` of arrays of one geometry, and their tickets. Out: :class:`Request` records: one, or several where
the regions are large, made when it is their turn. A small region that is submitted by itself is a :class:`SmallJob`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from linumpy.gpu.loop.limits import Limits
from linumpy.gpu.loop.ticket import Ticket, Together
from linumpy.gpu.staging.scatter import Conversion
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read.boxes import Boxes, cut_boxes, is_cut_whole
from linumpy.plan.read.plan import ReadPlan
from linumpy.plan.region import Region

#: Boxes that one request has; a larger region becomes several.
REQUEST_BOXES = 2**16


@dataclass(frozen=True, eq=False)
class Regions:
    """Regions of arrays and their outputs; one row a region.

    Attributes
    ----------
    array : numpy.ndarray of int64, (regions,)
        Which array each is of.
    start, stop : numpy.ndarray of int64, (regions, rank)
        Bounds, ``0 <= start <= stop <= shape``.
    strides : numpy.ndarray of int64, (regions, rank)
        Bytes between neighbours in each output, along the axes of the array.
    addresses : numpy.ndarray of int64, (regions,)
        Where each output begins.
    """

    array: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    strides: np.ndarray
    addresses: np.ndarray

    def __len__(self) -> int:
        return len(self.array)

    def take(self, rows: np.ndarray | slice) -> Regions:
        """Pick some of them."""
        return Regions(
            self.array[rows], self.start[rows], self.stop[rows], self.strides[rows], self.addresses[rows]
        )  # fmt: skip

    @staticmethod
    def joined(parts: list[Regions]) -> Regions:
        """Put regions of several lists one behind the other; arrays keep their numbers."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*((one.array, one.start, one.stop, one.strides, one.addresses) for one in parts), strict=True)
        return Regions(*(np.concatenate(column) for column in columns))


@dataclass(eq=False)
class Request:
    """Regions of arrays of one geometry that are carried out together.

    Attributes
    ----------
    layouts : list of ArrayLayout
        How the arrays are stored.
    conversion : Conversion
        Stored type and type of the outputs.
    regions : Regions
        What is wanted of them.
    boxes : Boxes or None
        Of all regions, where a chunk may have several boxes; None where each chunk that a region touches is one box.
    count : int
        Number of boxes.
    ready : object
        Event that the outputs' memory may be written after; None in host memory.
    tickets : list of Ticket
        One for each region.
    """

    layouts: list[ArrayLayout]
    conversion: Conversion
    regions: Regions
    boxes: Boxes | None
    count: int
    ready: Any
    tickets: list[Ticket]


def chunk_counts(layout: ArrayLayout, regions: Regions) -> np.ndarray:
    """Chunks that each region touches, as floating-point numbers: there may be very many."""
    chunk = layout.chunk_sizes
    count = -(-regions.stop // chunk) - regions.start // chunk
    count[regions.stop <= regions.start] = 0
    return count.prod(axis=1, dtype=np.float64)


def make_request(
    limits: Limits,
    layouts: list[ArrayLayout],
    conversion: Conversion,
    regions: Regions,
    count: float,
    ready: Any,
    tickets: list[Ticket],
) -> Request:
    """Make a request of regions that touch `count` chunks; see :class:`Request`."""
    layout, boxes = layouts[0], None
    longest = limits.box_nbytes(layout.chunk_nbytes, raw=layout.chain is None)
    if not is_cut_whole(layout, longest):
        boxes = cut_boxes(layout, regions.start, regions.stop, regions.strides, longest)
    return Request(layouts, conversion, regions, boxes, int(count) if boxes is None else len(boxes), ready, tickets)


class Jobs:
    """Regions of arrays of one geometry as the loop takes them: one request, or several where the regions are large."""

    def __init__(
        self,
        limits: Limits,
        layouts: list[ArrayLayout],
        conversion: Conversion,
        regions: Regions,
        ready: Any,
        tickets: list[Ticket],
    ) -> None:
        self._limits, self._layouts, self._conversion, self._regions = limits, layouts, conversion, regions
        self._ready, self._tickets = ready, tickets
        self._most = min(REQUEST_BOXES, limits.boxes)
        self._counts = chunk_counts(layouts[0], regions)
        total = float(self._counts.sum())
        self.boxes = int(min(total, self._most))
        self._given = 0  # jobs whose last request has been given
        #: Requests, and how many jobs each of them is the last of.
        self._portions: Iterator[tuple[Request, int]] = iter(())
        self._first: tuple[Request, int] | None
        if total <= self._most:
            self._first = self._request(regions, total, tickets), len(tickets)
        else:
            self._portions = self._cut()
            # The first request is made by the caller's thread, the others when it is their turn.
            self._first = next(self._portions)

    def next_request(self) -> Request | None:
        """Return the next request; None at the end."""
        portion, self._first = self._first or next(self._portions, None), None
        if portion is None:
            return None
        request, ended = portion
        if not ended:
            request.tickets[0].portions += 1  # its job is not over before the last request is
        self._given += ended
        return request

    def abandon(self, error: BaseException) -> None:
        """Give no further request: jobs that wait for one are over as soon as those are that they were given."""
        waiting = self._tickets[self._given :]
        self._given, self._first, self._portions = len(self._tickets), None, iter(())
        for ticket in waiting:
            ticket.fail(error)
            if ticket.end_request(Together()):
                ticket.settle([], None)

    def _cut(self) -> Iterator[tuple[Request, int]]:
        rows = np.arange(len(self._regions))
        small = self._counts <= self._most
        while len(rows):
            if not small[rows[0]]:
                yield from self._cut_one(int(rows[0]))
                rows = rows[1:]
                continue
            end = int(np.searchsorted(np.cumsum(self._counts[rows]), self._most, side="right"))
            large = np.flatnonzero(~small[rows])
            some = rows[: max(1, min(end, int(large[0]) if len(large) else len(rows)))]
            rows = rows[len(some) :]
            tickets = [self._tickets[row] for row in some.tolist()]
            yield self._request(self._regions.take(some), float(self._counts[some].sum()), tickets), len(tickets)

    def _cut_one(self, row: int) -> Iterator[tuple[Request, int]]:
        """Part a large region along the grid of stored objects."""
        one, ticket = self._regions.take(slice(row, row + 1)), self._tickets[row]
        layout, start, stop = self._layouts[one.array[0]], one.start[0], one.stop[0]
        plan = ReadPlan(layout, Region(tuple(start.tolist()), tuple(stop.tolist()), (True,) * layout.rank))
        chunk = layout.chunk_sizes
        pending = None
        for box in plan.batches(self._most):
            if pending is not None:
                if ticket.given_up:
                    break
                yield pending, 0
            corners = np.array(box, np.int64)
            begin = np.maximum(start, corners[:, 0] * chunk)
            end = np.minimum(stop - corners[:, 1] * chunk + chunk, chunk) + (corners[:, 1] - 1) * chunk
            at = one.addresses + ((begin - start) * one.strides).sum(axis=1)
            part = Regions(one.array, begin[None], end[None], one.strides, at)
            pending = self._request(part, float(chunk_counts(layout, part)[0]), [ticket])
        if pending is not None:
            yield pending, 1

    def _request(self, regions: Regions, count: float, tickets: list[Ticket]) -> Request:
        return make_request(self._limits, self._layouts, self._conversion, regions, count, self._ready, tickets)


@dataclass(eq=False)
class SmallJob:
    """One region of few chunks, which the loop may carry out by itself; else it is a request as others are.

    Attributes
    ----------
    limits : Limits
        Of slabs.
    layout : ArrayLayout
        Of the array.
    conversion : Conversion
        Stored type and type of the output.
    start, stop : tuple of int
        Bounds of the region.
    strides : tuple of int
        Bytes between neighbours in the output, along the axes of the array; 0 along those that it does not have.
    address : int
        Where the output begins.
    ready : object
        Event that the output's memory may be written after; None in host memory.
    ticket : Ticket
        Of the region.
    boxes : int
        Chunks that it touches.
    """

    limits: Limits
    layout: ArrayLayout
    conversion: Conversion
    start: tuple[int, ...]
    stop: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    ready: Any
    ticket: Ticket
    boxes: int

    @cached_property
    def jobs(self) -> Jobs:
        """The same as the only one of many regions, which is what the loop's other steps take."""
        columns = ((0,), (self.start,), (self.stop,), (self.strides,), (self.address,))
        regions = Regions(*(np.array(column, np.int64) for column in columns))
        return Jobs(self.limits, [self.layout], self.conversion, regions, self.ready, [self.ticket])

    def next_request(self) -> Request | None:
        """Return the only request; None at the end."""
        return self.jobs.next_request()

    def abandon(self, error: BaseException) -> None:
        """Give no request."""
        self.jobs.abandon(error)
