"""Cut what many jobs want into works: slabs to be read, decoded and scattered, each of them one step of the loop.

In: the parts of a wave. Out: :class:`Work` records, a batch of stored objects after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from linumpy.gpu.loop.cache import ChunkCache
from linumpy.gpu.loop.limits import (
    DECODE_AHEAD,
    DEPTH,
    MAX_FILES,
    ROW_NBYTES,
    SLAB_ALIGN,
    STAGED_ENCODED,
    STAGED_RAW,
    Limits,
)
from linumpy.gpu.loop.locate import Found
from linumpy.gpu.loop.wave import Part
from linumpy.gpu.staging.device import Placed, TablePlan
from linumpy.plan.codecs import DecodeChain
from linumpy.plan.decode.placement import DecodeWay, choose_way, may_be_grouped
from linumpy.plan.decode.workspace import decoded_room
from linumpy.plan.read.plan import ReadPlan
from linumpy.plan.read.ring import Range, ring_nbytes
from linumpy.plan.read.scatter import table_nbytes
from linumpy.plan.read.slabs import MAX_PIECES, Slab, SlabLimits, Spans, pack, run_starts

#: Chunks that a thread of the host decodes one after another, at most.
_ROUNDS = 4
#: Bytes between two encoded chunks of a shard that are read along: about what a read of its own costs.
_GAP = 64 * 1024

Kind = tuple[DecodeChain, int]


@dataclass(eq=False)
class Work:
    """One slab on its way.

    Attributes
    ----------
    kind : {"raw", "device", "host", "large", "fill", "cached"}
        Raw chunks; chunks that the device decodes; that the host decodes; one that is larger than a slab; fill values;
        chunks that are on the device already.
    rows : list of (Part, numpy.ndarray)
        Spans, part by part, in the order of the slab's pieces.
    slab : Slab or None
        Reads, of the first two kinds.
    way : DecodeWay or None
        How the device decodes.
    plan : TablePlan or None
        Tables of all spans.
    taken : Range or None
        Host memory.
    pending : object
        Reads or decoding under way.
    placed : Placed or None
        Once its kernels are queued.
    files : list of (Part, numpy.ndarray)
        Numbers of the stored objects that the slab reads, part by part.
    file_of_read : numpy.ndarray or None
        Which of them each read is of.
    addresses : list of numpy.ndarray
        Of chunks that are on the device already, part by part.
    slots : list of numpy.ndarray
        Places in the cache for the chunks of each part, -1 for none; empty without a cache.
    buffer : numpy.ndarray or None
        Host memory that a chunk larger than a slab is decoded into.
    """

    kind: str
    rows: list[tuple[Part, np.ndarray]]
    slab: Slab | None = None
    way: DecodeWay | None = None
    plan: TablePlan | None = None
    taken: Range | None = None
    pending: Any = None
    placed: Placed | None = None
    files: list[tuple[Part, np.ndarray]] = field(default_factory=list)
    file_of_read: np.ndarray | None = None
    addresses: list[np.ndarray] = field(default_factory=list)
    slots: list[np.ndarray] = field(default_factory=list)
    buffer: np.ndarray | None = None

    @property
    def by_host(self) -> bool:
        """Whether the host decodes it."""
        return self.kind in ("host", "large")

    @property
    def timed(self) -> bool:
        """Whether the times of its kernels are wanted."""
        return any(ticket.timed for part, _ in self.rows for ticket in part.tickets[:1])

    def sources(self) -> list[tuple[Part, np.ndarray, np.ndarray | None]]:
        """Say where in the buffer of decoded bytes the spans of each part begin; None for fill values."""
        count = 0
        result: list[tuple[Part, np.ndarray, np.ndarray | None]] = []
        for part, spans in self.rows:
            mine = np.arange(count, count + len(spans))
            count += len(spans)
            place: np.ndarray | None = None
            if self.kind == "raw":
                assert self.slab is not None
                place = self.slab.piece_place[mine]
            elif self.kind == "device":
                assert self.way is not None
                place = mine * decoded_room(self.way.chain, part.layout.chunk_nbytes)
            elif self.kind == "host":
                place = mine * buffer_nbytes(part.layout.chunk_nbytes)
            elif self.kind == "cached":
                place = self.addresses[len(result)]
            result.append((part, spans, place))
        return result


def buffer_nbytes(chunk_nbytes: int) -> int:
    """Bytes of the buffer that the host decodes a chunk into."""
    return -(-chunk_nbytes // SLAB_ALIGN) * SLAB_ALIGN


class Cutter:
    """Cuts a wave.

    Parameters
    ----------
    parts : list of Part
        Of the wave.
    limits : Limits
        Of slabs.
    in_flight : callable
        Says how many chunks of a kind are being decoded.
    cache : ChunkCache or None
        Chunks that are on the device already.
    spare_nbytes : callable, optional
        Says how much device memory there is beyond the scratch, for chunks that do not fit it.
    """

    def __init__(
        self,
        parts: list[Part],
        limits: Limits,
        in_flight: Callable[[Kind], int],
        cache: ChunkCache | None = None,
        spare_nbytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._parts, self._limits, self._cache = parts, limits, cache
        self._span_base = np.cumsum([0, *(len(part.wanted) for part in parts)])
        self._object_base = np.cumsum([0, *(len(part.wanted.objects) for part in parts)])
        self._rest: dict[Kind | None, Spans] = {}
        self.ways = self._choose_ways(in_flight)
        if limits.may_exceed:
            self.ways = {kind: long_way(way, kind, limits, spare_nbytes) for kind, way in self.ways.items()}

    def _choose_ways(self, in_flight: Callable[[Kind], int]) -> dict[Kind, DecodeWay]:
        chunks: dict[Kind, int] = {}
        for part in self._parts:
            if (kind := kind_of(part)) is not None:
                chunks[kind] = chunks.get(kind, 0) + len(part.wanted)
        tables = sum(table_nbytes(part.layout.rank, part.boxes) for part in self._parts)
        return {
            kind: way_of(kind, count + in_flight(kind), self._limits, tables) for kind, count in chunks.items() if count
        }

    @property
    def device_nbytes(self) -> int:
        """Device memory that all slabs would take at once."""
        total = 0
        for part in self._parts:
            kind = kind_of(part)
            way = None if kind is None else self.ways.get(kind)
            if way is not None and way.slot is not None:
                total = max(total, way.depth * way.slot.nbytes)
            else:
                total += self._host_nbytes(part)
        return total

    @property
    def host_nbytes(self) -> int:
        """Host memory for slabs: what keeps those who copy raw chunks, the device, and the decoding threads busy."""
        raw = sum(self._host_nbytes(part) for part in self._parts if part.layout.chain is None)
        encoded = sum(self._host_nbytes(part) for part in self._parts if part.layout.chain is not None)
        by_host = max(map(self._decoded_ahead, self._parts), default=0)
        return max(min(raw + min(encoded, STAGED_ENCODED), STAGED_RAW), min(encoded, by_host))

    def _decoded_ahead(self, part: Part) -> int:
        """Bytes that the host decodes at the same time."""
        kind, chunk_nbytes = kind_of(part), part.layout.chunk_nbytes
        way = None if kind is None else self.ways.get(kind)
        if way is None or way.slot is not None or buffer_nbytes(chunk_nbytes) > self._limits.slab_nbytes:
            return 0
        work = host_step(chunk_nbytes, len(part.wanted), self._limits) * (buffer_nbytes(chunk_nbytes) + ROW_NBYTES)
        return DECODE_AHEAD * (work + 2**16)

    def _host_nbytes(self, part: Part) -> int:
        raw = part.layout.chain is None
        nbytes = int(part.wanted.nbytes.sum()) if raw else len(part.wanted) * part.layout.chunk_nbytes
        return min(nbytes + part.boxes * ROW_NBYTES + 2**16, 2**40)

    def cut(
        self, find: Callable[[Part], Iterator[Found]], failed: Callable[[Part, np.ndarray], None]
    ) -> Iterator[Work]:
        """Yield works; `find` locates the spans of a part, and `failed` takes those that are broken."""
        for number, part in enumerate(self._parts):
            for found in find(part):
                if len(found.failed):
                    failed(part, found.failed)
                for first in range(0, len(found.missing), self._limits.pieces):
                    yield Work("fill", [(part, found.missing[first : first + self._limits.pieces])])
                if len(found.spans):
                    yield from self._of_stored(number, part, found.spans)
        for kind, spans in self._rest.items():
            yield from self._packed(kind, spans, last=True)

    def _of_stored(self, number: int, part: Part, spans: np.ndarray) -> Iterator[Work]:
        if self._cache is not None and self._cache.keeps(part):
            address = self._cache.find(part, spans)
            there = np.flatnonzero(address >= 0)
            for first in range(0, len(there), self._limits.pieces):
                some = there[first : first + self._limits.pieces]
                yield Work("cached", [(part, spans[some])], addresses=[address[some]])
            spans = spans[address < 0]
            if not len(spans):
                return
        kind = kind_of(part)
        way = None if kind is None else self.ways[kind]
        if way is not None and way.slot is None:
            yield from host_works(part, spans, self._limits)
            return
        stored = part.stored_nbytes[spans]
        weight = None
        if way is not None and way.slot is not None:
            weight = way.slot.weights(stored)
            bounds = encoded_limits(way)
            long = (stored > bounds.largest_piece) | (stored + weight > bounds.capacity)
            if long.any():
                yield from host_works(part, spans[long], self._limits)
                spans, stored, weight = spans[~long], stored[~long], weight[~long]
        objects = part.wanted.object_index[spans] + self._object_base[number]
        new = Spans(spans + self._span_base[number], objects, part.stored_offset[spans], stored, weight)
        rest = self._rest.pop(kind, None)
        spans_so_far = new if rest is None else rest.joined(new)
        if self._fits_one(kind, spans_so_far):
            self._rest[kind] = spans_so_far
        else:
            yield from self._packed(kind, spans_so_far, last=False)

    def _fits_one(self, kind: Kind | None, spans: Spans) -> bool:
        """Say whether spans are sure to fit one slab, so that they need not be packed before the others are known."""
        limits = self._limits.raw if kind is None else encoded_limits(self.ways[kind])
        nbytes = int(spans.nbytes.sum()) + len(spans) * (limits.align + limits.gap)
        weight = 0 if spans.weight is None else int(spans.weight.sum())
        few = len(spans) <= min(limits.pieces, limits.objects)
        return few and nbytes <= limits.nbytes - limits.align and nbytes + weight <= limits.capacity

    def _packed(self, kind: Kind | None, spans: Spans, *, last: bool) -> Iterator[Work]:
        """Pack spans; the last slab is kept, unless nothing follows, to be filled up from what is found next."""
        way = None if kind is None else self.ways[kind]
        slabs = list(pack(spans, self._limits.raw if way is None else encoded_limits(way)))
        if slabs and not last:
            self._rest[kind] = spans.take(slice(len(spans) - len(slabs[-1].pieces), None))
            slabs.pop()
        for slab in slabs:
            yield self._work(slab, way)

    def _work(self, slab: Slab, way: DecodeWay | None) -> Work:
        rows = [(self._parts[n], slab.pieces[mine] - self._span_base[n]) for n, mine in self._by_part(slab.pieces)]
        heads = run_starts(slab.object)
        objects = slab.object[heads]
        file = np.zeros(len(slab.object), np.int64)
        file[heads[1:]] = 1
        if len(self._parts) == 1:
            files = [(self._parts[0], objects)]
        else:
            part = np.searchsorted(self._object_base, objects, side="right") - 1
            cuts = run_starts(part).tolist()
            files = [
                (self._parts[part[a]], objects[a:b] - self._object_base[part[a]])
                for a, b in zip(cuts, [*cuts[1:], len(part)], strict=True)
            ]
        kind = "raw" if way is None else "device"
        return Work(kind, rows, slab, way, files=files, file_of_read=np.cumsum(file))

    def _by_part(self, pieces: np.ndarray) -> list[tuple[int, slice]]:
        if len(self._parts) == 1:
            return [(0, slice(None))]
        part = np.searchsorted(self._span_base, pieces, side="right") - 1
        heads = run_starts(part).tolist()
        return [(int(part[a]), slice(a, b)) for a, b in zip(heads, [*heads[1:], len(part)], strict=True)]


def kind_of(part: Part) -> Kind | None:
    """Say which chunks may be decoded together with these; None for raw ones."""
    return None if part.layout.chain is None else (part.layout.chain, part.layout.chunk_nbytes)


def way_of(kind: Kind, chunks: int, limits: Limits, tables_nbytes: int = 0) -> DecodeWay:
    """Choose where chunks are decoded, by how many of them are in flight; beside it lie tables of so many bytes."""
    room = limits.scratch_bytes - max(tables_nbytes, DEPTH * limits.pieces * ROW_NBYTES)
    return choose_way(
        kind[0],
        kind[1],
        chunks=chunks,
        room=room if limits.slot_nbytes is None else min(room, DEPTH * limits.slot_nbytes),
        cores=limits.threads,
        table_nbytes=8,
        margin=256,
        decode_on=limits.decode_on,
    )


def long_way(way: DecodeWay, kind: Kind, limits: Limits, spare_nbytes: Callable[[], int]) -> DecodeWay:
    """Choose where to decode chunks that do not fit the scratch: one by one in half of the spare memory, if there."""
    if way.slot is not None or limits.decode_on == "host" or not may_be_grouped(*kind):
        return way
    if way_of(kind, 1, replace(limits, decode_on="device")).slot is not None:
        return way
    long = choose_way(
        *kind,
        chunks=1,
        room=spare_nbytes() // 2,
        cores=limits.threads,
        table_nbytes=8,
        margin=256,
        decode_on="device",
    )
    return way if long.slot is None else long


def encoded_limits(way: DecodeWay) -> SlabLimits:
    """Bound the stored bytes of a slab by the memory for them, and its chunks by the memory for what they decode to."""
    slot = way.slot
    assert slot is not None
    return SlabLimits(
        slot.stored_nbytes, MAX_FILES, SLAB_ALIGN, pieces=min(slot.chunks, MAX_PIECES), capacity=slot.capacity, gap=_GAP
    )


def host_step(chunk_nbytes: int, chunks: int, limits: Limits) -> int:
    """Choose how many chunks the host decodes as one work.

    Few, so that the first ones are scattered while the threads decode the others; but of many chunks some for each
    thread, since a task costs as much Python as a chunk.
    """
    rounds = max(1, min(_ROUNDS, chunks // (2 * limits.threads)))
    return max(1, min(limits.slab_nbytes // buffer_nbytes(chunk_nbytes), rounds * limits.threads, limits.pieces))


def host_works(part: Part, spans: np.ndarray, limits: Limits) -> Iterator[Work]:
    """Cut spans whose chunks the host decodes."""
    each = buffer_nbytes(part.layout.chunk_nbytes)
    if each > limits.slab_nbytes:
        for span in spans.tolist():
            yield Work("large", [(part, np.array([span]))])
        return
    step = host_step(part.layout.chunk_nbytes, len(spans), limits)
    for first in range(0, len(spans), step):
        yield Work("host", [(part, spans[first : first + step])])


def estimate_scratch(plan: ReadPlan, limits: Limits) -> int:
    """Say how much device memory a read takes beyond its output, without cutting a box."""
    layout, chunks = plan.layout, plan.chunk_count
    if not chunks or not limits.on_device:
        return 0
    needed = chunks * (layout.chunk_nbytes + ROW_NBYTES + SLAB_ALIGN) + 2**16
    if layout.chain is not None:
        way = way_of((layout.chain, layout.chunk_nbytes), chunks, limits)
        if way.slot is not None:
            needed = way.depth * way.slot.nbytes
    return ring_nbytes(needed, limits.scratch_bytes)
