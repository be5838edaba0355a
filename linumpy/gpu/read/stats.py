"""Counters and times of a reader, for :meth:`linumpy.gpu.read.reader.Reader.stats`. A ``ReadReport`` is of one read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Times:
    """Times of copies, decoders and scatter kernels on the device, for slabs that were timed.

    Attributes
    ----------
    copies, decoded : int
        Slabs copied to the device, and slabs decoded there.
    copy_seconds, decode_seconds, scatter_seconds : float
        Sums over these slabs; times of slabs that are processed side by side overlap.
    copied_nbytes, decoded_nbytes : int
        Bytes that these slabs copied to the device, and bytes that they decoded to.
    """

    copies: int = 0
    decoded: int = 0
    copy_seconds: float = 0.0
    decode_seconds: float = 0.0
    scatter_seconds: float = 0.0
    copied_nbytes: int = 0
    decoded_nbytes: int = 0


@dataclass(frozen=True)
class ReaderStats:
    """Counters and times of a reader since it was made; times are sums over all threads.

    Attributes
    ----------
    jobs, chunks, boxes : int
        Jobs that have ended; chunks read; boxes cut. Arrays that zarr-python reads count only as jobs.
    slabs : int
        Slabs processed on the device; in host memory, tasks of the threads.
    bytes_read : int
        Stored bytes of chunks; shard indexes and reads by zarr-python are not counted.
    layout_hits, layout_misses, index_hits, index_misses : int
        Submitted sources whose layout was given or cached, and whose layout was read; uses of shard indexes that were
        cached, and that were read.
    files_opened : int
        Files opened; a file that was opened twice counts twice.
    plan_seconds, io_seconds, place_seconds : float
        Planning; reading; copying chunks to outputs in host memory.
    cache_hits, cache_misses : int
        Chunks that were in the cache on the device, and chunks that were not.
    device_bytes : int
        Device memory that slabs and cached chunks take.
    times : Times
        Seconds of copies, decoders and scatter kernels on the device; zeros without ``timed=True``.
    chunks_decoded_by_host : int
        Chunks that the host decoded.
    host_decode_seconds : float
        Time of decoding these chunks on the host.
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
    files_opened: int = 0
    plan_seconds: float = 0.0
    io_seconds: float = 0.0
    place_seconds: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0
    device_bytes: int = 0
    times: Times = field(default_factory=Times)
    chunks_decoded_by_host: int = 0
    host_decode_seconds: float = 0.0
