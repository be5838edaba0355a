"""The report of a read (``return_report=True``), and the counters and times of a reader."""

from __future__ import annotations

from dataclasses import dataclass, field

from linumpy.arrays import Array
from linumpy.kernel_cache import Compiled
from linumpy.plan.read import format_shape, html_table

#: `ReadReport.backend` of reads by linumpy's own reader, with any engine.
LINUMPY = "linumpy"


@dataclass(frozen=True)
class ReadReport:
    """Report of one read: how it was done, how much was read, and how long it took.

    Attributes
    ----------
    source : str
        The array.
    backend : str
        ``"linumpy"``: linumpy's own reader; ``"zarr-gpu"``: zarr-python in its GPU mode; ``"zarr-host"``: zarr-python
        into host memory, and one copy to the device; ``"zarr-python"``: a read by zarr-python that stays in host
        memory, or a job of a ``Reader`` that zarr-python carried out.
    gds : str
        ``"native"``, ``"compat"`` or ``"not used"``, and how that is known. Compat mode is not GPUDirect Storage.
    engine : str
        What read the bytes, and into which memory. For ``"linumpy"``: the native core's threads, by system calls, by
        kvikio, or by requests to an object store. For ``"zarr-host"`` also why not in zarr's GPU mode.
    fallback : str
        Why zarr-python was used in place of linumpy's reader, or why the read went into host memory; otherwise empty.
    shape : tuple of int
        Shape of the result.
    dtype : str
        Dtype of the result.
    bytes_read : int or None
        Bytes read from files or object stores; None if zarr-python read them.
    bytes_decoded : int
        Bytes of the result.
    chunks_read, chunks_filled : int or None
        (Inner) chunks that were stored, and missing chunks that became fill values; None if zarr-python read them.
    files_opened : int or None
        Files opened; a file that was opened twice counts twice. None if zarr-python read them.
    scratch_bytes : int or None
        Device memory that the reader holds for slabs and cached chunks, beyond the result; None for reads by
        zarr-python and by :func:`linumpy.read_zarr` into host memory.
    plan_seconds, read_seconds : float
        Time on the host for metadata and plan, and for the rest of the call. In a ticket's report `plan_seconds` is 0,
        and `read_seconds` lasts from ``submit`` to the end of the job.
    scatter_seconds : float or None
        Time of the scatter kernels on the device, which overlap the reading; None if it was not measured. It is summed
        over slabs; a slab that is shared with other jobs counts as a whole.
    decoder : str
        How chunks were decoded; empty for raw chunks. Reads by zarr-python have it only in a ticket's report.
    decode_seconds : float or None
        Time of the decoding kernels on the device, summed in the same way; None if it was not measured.
    chunks_decoded_by_host : int
        Chunks that the host decoded, because it is faster or because the device could not.
    host_decode_seconds : float
        Time of decoding by linumpy on the host, summed over all threads.
    reads_repeated : int
        Reads by GPUDirect Storage that failed in kvikio and were repeated by plain system calls.
    compiled : Compiled
        Kernels that this process compiled during the call of ``read_zarr_to_gpu``, also for other threads.
    """

    source: str
    backend: str
    gds: str
    engine: str
    fallback: str
    shape: tuple[int, ...]
    dtype: str
    bytes_read: int | None = None
    bytes_decoded: int = 0
    chunks_read: int | None = None
    chunks_filled: int | None = None
    files_opened: int | None = None
    scratch_bytes: int | None = None
    plan_seconds: float = 0.0
    read_seconds: float = 0.0
    scatter_seconds: float | None = None
    decoder: str = ""
    decode_seconds: float | None = None
    chunks_decoded_by_host: int = 0
    host_decode_seconds: float = 0.0
    reads_repeated: int = 0
    compiled: Compiled = field(default_factory=Compiled)

    @property
    def seconds(self) -> float:
        """Time of the whole call on the host."""
        return self.plan_seconds + self.read_seconds

    @property
    def gib_per_second(self) -> float:
        """GiB of result a second, over the whole call."""
        return self.bytes_decoded / 2**30 / self.seconds if self.seconds > 0 else 0.0

    def rows(self) -> list[tuple[str, str]]:
        """Return label and text of each printed line; lines of what was not counted, or not done, are left out."""
        read = "" if self.bytes_read is None else f"{self.bytes_read:,} read, "
        by_host = self.chunks_decoded_by_host
        rows = [
            ("source", self.source),
            ("backend", self.backend),
            ("fallback", self.fallback),
            ("GDS", self.gds + (f"; {self.reads_repeated:,} reads failed" if self.reads_repeated else "")),
            ("engine", self.engine),
            ("decoder", f"{self.decoder}; chunks decoded by the host: {by_host:,}" if by_host else self.decoder),
            ("result", f"{format_shape(self.shape) or 'one element'} {self.dtype}"),
            ("bytes", f"{read}{self.bytes_decoded:,} in the result"),
            ("chunks", "" if self.chunks_read is None else f"{self.chunks_read:,} read, {self.chunks_filled:,} filled"),
            ("files", "" if self.files_opened is None else f"{self.files_opened:,} opened"),
            ("scratch", "" if self.scratch_bytes is None else f"{self.scratch_bytes:,} bytes of device memory"),
            ("time", self._times()),
            ("speed", self._speed()),
            ("kernels", str(self.compiled) if self.compiled.kernels else ""),
        ]
        return [(label, text) for label, text in rows if text]

    def _speed(self) -> str:
        rate = self.gib_per_second
        return f"{rate:.2f} GiB/s" if rate >= 1 else f"{rate * 1024:.3g} MiB/s"

    def _times(self) -> str:
        decode = "" if not self.decode_seconds else f", decode {self.decode_seconds * 1e3:.2f} ms on the device"
        if self.host_decode_seconds:
            decode += f", decode {self.host_decode_seconds * 1e3:.2f} ms in threads of the host"
        scatter = "" if self.scatter_seconds is None else f", scatter {self.scatter_seconds * 1e3:.2f} ms on the device"
        return f"plan {self.plan_seconds * 1e3:.2f} ms, read {self.read_seconds * 1e3:.2f} ms{decode}{scatter}"

    def __str__(self) -> str:
        return "\n".join(f"{label:<10}{text}" for label, text in self.rows())

    def _repr_html_(self) -> str:
        return html_table(self.rows())


def job_report(source: str, dtype: str, output: Array) -> ReadReport:
    """Make the report of a read by linumpy's reader, with the fields that follow from its output."""
    return ReadReport(
        source=source,
        backend=LINUMPY,
        gds="not used",
        engine="",
        fallback="",
        shape=tuple(output.shape),
        dtype=dtype,
        bytes_decoded=int(output.size) * int(output.dtype.itemsize),
    )


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
        Submitted sources whose layout was given or cached, and those whose layout was read from metadata; the same for
        shard indexes, counted at each use.
    files_opened : int
        Files opened; a file that was opened twice counts twice.
    requests_hedged : int
        Requests to object stores that were sent a second time because the response was late.
    plan_seconds, io_seconds, place_seconds : float
        Time of planning, of reading stored bytes, and of copying chunks to outputs in host memory.
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
    requests_hedged: int = 0
    plan_seconds: float = 0.0
    io_seconds: float = 0.0
    place_seconds: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0
    device_bytes: int = 0
    times: Times = field(default_factory=Times)
    chunks_decoded_by_host: int = 0
    host_decode_seconds: float = 0.0
