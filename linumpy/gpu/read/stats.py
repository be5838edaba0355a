"""What a reader has done so far: :class:`ReaderStats`, of the native core, of a loop, or of both."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from linumpy.core import native
from linumpy.gpu.loop.clock import Times
from linumpy.gpu.loop.loop import Loop


@dataclass(frozen=True)
class ReaderStats:
    """What a reader has done so far.

    Attributes
    ----------
    jobs, chunks, boxes, slabs : int
        Jobs that are over; chunks read; boxes cut; slabs.
    bytes_read : int
        Stored bytes of chunks, those that the host decodes counted in, shard indexes not.
    layout_hits, layout_misses, index_hits, index_misses : int
        Of arrays that were opened before, and of shard indexes.
    file_hits, file_misses : int
        Of shards that were open when they were read.
    plan_seconds, io_seconds, place_seconds : float
        Of the reader's thread: planning; starting reads and waiting for them; queueing copies and kernels.
    cache_hits, cache_misses : int
        Of chunks that are kept on the device.
    device_bytes : int
        Device memory that is held for slabs and kept chunks.
    times : Times
        Seconds of copies, decoders and scatter kernels on the device; zeros without ``timed=True``.
    chunks_decoded_by_host : int
        Chunks that the host decoded.
    host_decode_seconds : float
        What that took, of all threads together.
    """

    jobs: int = 0
    chunks: int = 0
    boxes: int = 0
    slabs: int = 0
    bytes_read: int = 0
    layout_hits: int = 0
    layout_misses: int = 0
    index_hits: int = 0
    index_misses: int = 0
    file_hits: int = 0
    file_misses: int = 0
    plan_seconds: float = 0.0
    io_seconds: float = 0.0
    place_seconds: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0
    device_bytes: int = 0
    times: Times = field(default_factory=Times)
    chunks_decoded_by_host: int = 0
    host_decode_seconds: float = 0.0


def with_core(stats: ReaderStats, core: native.Stats) -> ReaderStats:
    """Take in what the native core has done."""
    return replace(
        stats,
        jobs=core.jobs,
        chunks=core.chunks,
        boxes=core.boxes,
        slabs=core.tasks,
        bytes_read=core.bytes_read,
        index_hits=core.index_hits,
        index_misses=core.index_misses,
        file_misses=core.files_opened,
        plan_seconds=core.plan_seconds,
        io_seconds=core.read_seconds,
        place_seconds=core.copy_seconds,
        chunks_decoded_by_host=core.decoded,
        host_decode_seconds=core.decode_seconds,
    )


def with_loop(stats: ReaderStats, loop: Loop) -> ReaderStats:
    """Add what a loop has done."""
    counts, indexes, carrier = loop.counts, loop.indexes, loop.carrier
    cache = None if carrier is None else carrier.cache
    file_hits, file_misses = (0, 0) if carrier is None else carrier.engines.open_file_counts
    held = 0 if carrier is None else int(carrier.staging.arena_nbytes)
    return replace(
        stats,
        jobs=stats.jobs + int(counts["jobs"]),
        chunks=stats.chunks + int(counts["chunks"]),
        boxes=stats.boxes + int(counts["boxes"]),
        slabs=stats.slabs + int(counts["slabs"]),
        bytes_read=stats.bytes_read + int(counts["bytes_read"]),
        index_hits=stats.index_hits + indexes.hits,
        index_misses=stats.index_misses + indexes.misses,
        file_hits=file_hits,
        file_misses=stats.file_misses + file_misses,
        plan_seconds=stats.plan_seconds + counts["plan"],
        io_seconds=stats.io_seconds + counts["io"],
        place_seconds=stats.place_seconds + counts["place"],
        cache_hits=0 if cache is None else cache.hits,
        cache_misses=0 if cache is None else cache.misses,
        device_bytes=held + (0 if cache is None else cache.held),
        times=Times() if carrier is None or carrier.clock is None else carrier.clock.times(),
        chunks_decoded_by_host=stats.chunks_decoded_by_host + int(counts["by_host"]),
        host_decode_seconds=stats.host_decode_seconds + counts["host"],
    )
