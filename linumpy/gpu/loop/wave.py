"""What several jobs want of arrays of one geometry at the same time, and how far it has been done.

In: requests. Out: spans to read, tables that scatter them, and the tickets whose last box is done.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from linumpy.errors import ChunkError
from linumpy.gpu.loop.jobs import Regions, Request
from linumpy.gpu.loop.ticket import JobCounts, Ticket, Together
from linumpy.gpu.staging.scatter import Conversion
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read.boxes import Boxes, cut_boxes
from linumpy.plan.read.scatter import ScatterTable, geometry
from linumpy.plan.read.wanted import merge

#: Inode, size and time of the last write; how a file is told from the one that replaces it.
VERSION_COLUMNS = 3


class Part:
    """Requests of arrays of one geometry that are carried out together.

    Parameters
    ----------
    requests : list of Request
        Of one geometry and one conversion.
    whole_chunks : bool
        Whether raw chunks that one read takes are read whole, as those are that are kept.
    """

    def __init__(self, requests: list[Request], *, whole_chunks: bool = False) -> None:
        first = requests[0]
        self.layout, self.conversion, self.by_chunk = first.layouts[0], first.conversion, first.boxes is None
        self.layouts, self._array = _arrays_of(requests)
        self.tickets: list[Ticket] = [ticket for request in requests for ticket in request.tickets]
        self._first_of_ticket = _first_of_each(self.tickets)
        regions = Regions.joined([request.regions for request in requests])
        self._boxes = boxes = _boxes_of(requests, regions)
        # An encoded chunk is decoded once, in however many boxes it is scattered.
        whole = self.by_chunk or self.layout.chain is not None
        self.wanted = merge(self.layout, boxes, self._array[boxes.region], by_chunk=whole)
        self._geometry = geometry(self.layout, boxes, regions.strides)
        if whole_chunks and self.by_chunk and self.layout.chain is None:
            none, size = np.zeros(len(self.wanted), np.int64), self.layout.chunk_nbytes
            self.wanted = replace(self.wanted, offset=none, nbytes=none + size)
        self._target = regions.addresses[boxes.region] + boxes.target_offset
        self._source = boxes.offset
        if self.layout.chain is None:  # of a raw chunk no more is read than its boxes need
            self._source = boxes.offset - _of_boxes(self.wanted.offset, self.wanted.first_box, self.wanted.boxes)
        self._fill = self.conversion.fill_bytes(self.layout.fill_value)
        self._one_header = bool((self._geometry.target_strides == self._geometry.target_strides[:1]).all())
        jobs, spans = len(self.tickets), len(self.wanted)
        self._remaining = np.bincount(boxes.region, minlength=jobs)
        self._dead = np.array([ticket.given_up for ticket in self.tickets], bool)
        self.versions = np.full((len(self.wanted.objects), VERSION_COLUMNS), -1, np.int64)
        self.stored_offset, self.stored_nbytes = np.zeros(spans, np.int64), np.zeros(spans, np.int64)
        self.bytes_read, self.filled, self.by_host = (np.zeros(jobs, np.int64) for _ in range(3))
        self.chunks = self._remaining.copy() if self.by_chunk else _count_chunks(boxes, jobs)
        self.together = Together()
        self._over = np.zeros(jobs, bool)

    @property
    def boxes(self) -> int:
        """Boxes of all jobs."""
        return len(self._boxes)

    def table(self, spans: np.ndarray, source: np.ndarray | None) -> tuple[Conversion, ScatterTable]:
        """Make the table that scatters spans.

        Parameters
        ----------
        spans : numpy.ndarray of int64, (n,)
            Which of them.
        source : numpy.ndarray of int64, (n,), or None
            First byte of each in the buffer; None for spans of fill values.
        """
        rows, which = self.wanted.boxes_of(spans)
        self._note_cancelled()
        region = self._boxes.region[rows]
        if self._dead.any():
            alive = ~self._dead[region]
            rows, which, region = rows[alive], which[alive], region[alive]
        used, header = np.zeros(1, np.int64), np.zeros(len(rows), np.int64)
        if not self._one_header:
            used, header = np.unique(region, return_inverse=True)
        target_strides = self._geometry.target_strides[used]
        return self.conversion, ScatterTable(
            source_itemsize=self.conversion.source.itemsize,
            target_itemsize=self.conversion.target.itemsize,
            source_strides=np.broadcast_to(self._geometry.source_strides, target_strides.shape),
            target_strides=target_strides,
            fill=np.broadcast_to(self._fill, (len(target_strides), len(self._fill))).copy(),
            source=np.full(len(rows), -1, np.int64) if source is None else source[which] + self._source[rows],
            target=self._target[rows],
            header=header,
            extent=self._geometry.extent[rows],
            widen=self.conversion.is_copy,
        )

    def box_windows(self, span: int, nbytes: int) -> list[tuple[int, int]]:
        """Part the bytes of one decoded chunk into windows of at most `nbytes` that hold whole boxes."""
        rows = self.wanted.boxes[self.wanted.first_box[span] : self.wanted.first_box[span + 1]]
        begin, end = self._boxes.offset[rows], self._boxes.offset[rows] + self._boxes.nbytes[rows]
        order = np.argsort(begin, kind="stable")
        windows: list[tuple[int, int]] = []
        for low, high in zip((begin[order] // 16 * 16).tolist(), end[order].tolist(), strict=True):
            if windows and high - windows[-1][0] <= nbytes:
                windows[-1] = (windows[-1][0], max(windows[-1][1], high))
            else:
                windows.append((low, high))
        return windows

    def window_table(self, span: int, window: tuple[int, int]) -> tuple[Conversion, ScatterTable]:
        """Make the table of those boxes of a span that begin and end in a window, which lies at the buffer's start."""
        conversion, table = self.table(np.array([span]), np.zeros(1, np.int64))
        last = table.source + ((table.extent - 1) * table.source_strides[table.header]).sum(axis=1)
        rows = (table.source >= window[0]) & (last < window[1])
        return conversion, ScatterTable(
            table.source_itemsize, table.target_itemsize, table.source_strides, table.target_strides, table.fill,
            table.source[rows] - window[0], table.target[rows], table.header[rows], table.extent[rows], table.widen,
        )  # fmt: skip

    def fail(self, spans: np.ndarray, error: BaseException) -> None:
        """Note an error for the jobs that want these spans."""
        rows, _ = self.wanted.boxes_of(spans)
        for job in np.unique(self._boxes.region[rows]).tolist():
            self.tickets[job].fail(error)
            self._dead[job] = True

    def fail_all(self, error: BaseException) -> None:
        """Note an error for all jobs."""
        for ticket in self.tickets:
            ticket.fail(error)
        self._dead[:] = True

    def finish(self, spans: np.ndarray, *, stored: bool = True, by_host: bool = False) -> list[int]:
        """Count spans as done; return the jobs that have now nothing left to do."""
        rows, which = self.wanted.boxes_of(spans)
        region, jobs = self._boxes.region[rows], len(self.tickets)
        done = np.bincount(region, minlength=jobs)
        if stored:
            wanting, read = region, which
            if not self.by_chunk:  # a chunk that a job has several boxes of is read once
                wanting, read = np.unique(np.column_stack([region, which]), axis=0).T
            self.bytes_read += np.bincount(wanting, self.stored_nbytes[spans][read], jobs).astype(np.int64)
        chunks = done if self.by_chunk else _count_chunks(self._boxes, jobs, rows)
        self.by_host += chunks if by_host else 0
        self.filled += 0 if stored else chunks
        self._remaining -= done
        return self._newly_over()

    @property
    def is_over(self) -> bool:
        """Whether all jobs are over."""
        return bool(self._over.all())

    def without_boxes(self) -> list[int]:
        """Return the jobs that want nothing."""
        return self._newly_over()

    def counts_of(self, jobs: list[int]) -> JobCounts:
        """Say what was done for jobs."""
        columns = (self.chunks, self.filled, self.by_host, self.bytes_read)
        if len(jobs) == 1:
            return JobCounts(*(int(column[jobs[0]]) for column in columns))
        return JobCounts(*(int(column[jobs].sum()) for column in columns))

    def all_jobs(self) -> list[int]:
        """Give up what is left; return the jobs that were not over yet."""
        self._remaining[:] = 0
        return self._newly_over()

    def _newly_over(self) -> list[int]:
        jobs = np.flatnonzero((self._remaining == 0) & ~self._over)
        self._over[jobs] = True
        return jobs.tolist()

    def _note_cancelled(self) -> None:
        first = self._first_of_ticket
        if len(first) < len(self.tickets):  # a ticket that several regions have is looked at once
            for begin, end in zip(first, [*first[1:], len(self.tickets)], strict=True):
                if self.tickets[begin].given_up:
                    self._dead[begin:end] = True
            return
        for job in np.flatnonzero(~self._dead & ~self._over).tolist():
            if self.tickets[job].given_up:
                self._dead[job] = True

    def by_ticket(self, jobs: list[int]) -> list[list[int]]:
        """Bring jobs together that have the same ticket, as regions of one job do that follow each other."""
        if len(self._first_of_ticket) == len(self.tickets):
            return [[job] for job in jobs]
        ends = np.searchsorted(jobs, [*self._first_of_ticket[1:], len(self.tickets)]).tolist()
        return [jobs[begin:end] for begin, end in zip([0, *ends], ends, strict=False) if begin < end]

    def wanted_by_nobody(self) -> bool:
        """Say whether every job has failed or been cancelled."""
        self._note_cancelled()
        return bool(self._dead.all())

    def paths(self, objects: np.ndarray) -> list[str]:
        """Paths of stored objects."""
        keys = [layout.chunk_path for layout in self.layouts]
        arrays, rows = self.wanted.object_array[objects].tolist(), self.wanted.objects[objects].tolist()
        return [keys[array][0] + keys[array][1].join(map(str, row)) for array, row in zip(arrays, rows, strict=True)]

    def layout_of(self, job: int) -> ArrayLayout:
        """Layout of the array that a job reads."""
        return self.layouts[self._array[job]]

    def object_name(self, number: int) -> str:
        """Name a stored object as an error does."""
        layout = self.layouts[self.wanted.object_array[number]]
        kind = "chunk" if layout.shard is None else "shard"
        where = tuple(self.wanted.objects[number].tolist())
        return f"{kind} {where} of {layout.name}: {self.paths(np.array([number]))[0]}"

    def chunk_name(self, span: int) -> str:
        """Name the chunk of a span as an error does."""
        number = self.wanted.object_index[span]
        chunk = tuple(self.wanted.chunk[span].tolist())
        name = f"chunk {chunk} of {self.layouts[self.wanted.array[span]].name}: {self.paths(number[None])[0]}"
        if self.layout.shard is None:
            return name
        begin = int(self.stored_offset[span])
        return f"{name}, bytes {begin} to {begin + int(self.stored_nbytes[span])}"

    def replaced(self, number: int, found_nbytes: int) -> ChunkError:
        """Say that an object is another one than it was."""
        return ChunkError(
            f"{self.object_name(number)} was replaced while it was being read (it had {self.versions[number, 1]} bytes,"
            f" and has {found_nbytes} now): read it again when its writer is done"
        )

    def check_still_there(self, spans: np.ndarray) -> None:
        """Tell chunks that were never written from arrays that have gone: a disk unmounted, a folder moved."""
        for number in np.unique(self.wanted.array[spans]).tolist():
            layout = self.layouts[number]
            metadata = f"{layout.root}/{'zarr.json' if layout.zarr_format == 3 else '.zarray'}"
            if not os.path.exists(metadata):
                gone = ChunkError(f"chunks of {layout.name} are missing, and so is {metadata}: is the folder gone?")
                self.fail(spans[self.wanted.array[spans] == number], gone)

    @property
    def file_nbytes(self) -> int | None:
        """Size that every file must have; None for encoded chunks and for shards, which differ."""
        return self.layout.chunk_nbytes if self.layout.shard is None and self.layout.chain is None else None


def parts_of(requests: list[Request], *, whole_chunks: bool = False) -> list[Part]:
    """Bring the requests of each geometry and output type together; see :class:`Part`."""
    alike: dict[object, list[Request]] = {}
    for request in requests:
        kind = (request.layouts[0].geometry, request.conversion, request.boxes is None)
        alike.setdefault(kind, []).append(request)
    return [Part(some, whole_chunks=whole_chunks) for some in alike.values()]


def _first_of_each(tickets: list[Ticket]) -> list[int]:
    """Find where runs of the same ticket begin."""
    return [n for n, ticket in enumerate(tickets) if not n or ticket is not tickets[n - 1]]


def _arrays_of(requests: list[Request]) -> tuple[list[ArrayLayout], np.ndarray]:
    """List the arrays of requests, each once, and which of them each region is of."""
    if len(requests) == 1:
        return requests[0].layouts, requests[0].regions.array
    numbers: dict[int, int] = {}
    layouts: list[ArrayLayout] = []
    arrays = []
    for request in requests:
        for layout in request.layouts:
            if numbers.setdefault(id(layout), len(layouts)) == len(layouts):
                layouts.append(layout)
        arrays.append(np.array([numbers[id(layout)] for layout in request.layouts])[request.regions.array])
    return layouts, np.concatenate(arrays)


def _boxes_of(requests: list[Request], regions: Regions) -> Boxes:
    """Cut the regions of all requests, unless they have been cut; boxes number the regions of all requests."""
    if requests[0].boxes is None:
        return cut_boxes(requests[0].layouts[0], regions.start, regions.stop, regions.strides)
    boxes = [request.boxes for request in requests if request.boxes is not None]
    first = np.cumsum([0, *(len(request.tickets) for request in requests)]).tolist()
    region = [one.region + begin for one, begin in zip(boxes, first, strict=False)]
    return replace(Boxes.joined(boxes), region=np.concatenate(region))


def _of_boxes(of_spans: np.ndarray, first_box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Give each box what its span has."""
    values = np.empty(len(boxes), np.int64)
    values[boxes] = of_spans if len(of_spans) == len(boxes) else np.repeat(of_spans, np.diff(first_box))
    return values


def _count_chunks(boxes: Boxes, jobs: int, rows: np.ndarray | None = None) -> np.ndarray:
    """Chunks of each job where a chunk may have several boxes."""
    region, chunk = (boxes.region, boxes.chunk) if rows is None else (boxes.region[rows], boxes.chunk[rows])
    unique = np.unique(np.column_stack([region, chunk]), axis=0)
    return np.bincount(unique[:, 0], minlength=jobs)
