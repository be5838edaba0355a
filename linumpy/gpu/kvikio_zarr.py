"""Read chunks of a local Zarr array into device memory with kvikio's ``CuFile.pread``, and decode them there.

In: a :class:`~linumpy.plan.read.ReadPlan` or what names an array. Out: a CuPy array, ordered on the caller's current
stream. Errors: :class:`~linumpy.errors.UnsupportedLayoutError` (a ``NotImplementedError``) for codecs that are not
decoded here, stores that are not local, and dtypes of no CUDA type; :class:`~linumpy.errors.ChunkError` for stored
bytes that cannot be right.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.device import kvikio_mode
from linumpy.errors import GpuUnavailableError, UnsupportedLayoutError
from linumpy.gpu import output, reader
from linumpy.gpu.encoded_slots import EncodedSlots
from linumpy.gpu.engines import choose_engine
from linumpy.gpu.host_decode import DeviceHostSlots, buffer_count
from linumpy.gpu.job import Job, make_job
from linumpy.gpu.output import ReadRequest
from linumpy.gpu.report import ReadReport
from linumpy.gpu.slots import Target
from linumpy.io.layout import read_layout
from linumpy.io.source import Source, open_source
from linumpy.plan.read import plan_read


def read_zarr_via_kvikio(
    source: Source,
    *,
    region: Any = None,
    level: int = 0,
    dtype: Any = None,
    out: Any = None,
    scratch_bytes: int | None = None,
    return_report: bool = False,
) -> Any:
    """Read with kvikio; see :func:`linumpy.gpu.zarr_io.read_zarr_to_gpu` for the parameters.

    Raises
    ------
    UnsupportedLayoutError
        Chunks of a codec that is not decoded here, a store that is not local, or the like. The message says what it is.
    """
    begin = time.perf_counter()
    plan = plan_read(read_layout(open_source(source, level)), region)
    if plan.layout.unsupported is not None:
        raise UnsupportedLayoutError(f"kvikio cannot read {plan.layout.name}: {plan.layout.unsupported}")
    request = output.make_request(plan, dtype, out, scratch_bytes)
    array, report = read_request(request, begin, timed=return_report)
    return (array, report) if return_report else array


def read_request(request: ReadRequest, begin: float, *, timed: bool) -> tuple[Any, ReadReport]:
    """Carry out a request whose layout kvikio can read.

    Parameters
    ----------
    request : ReadRequest
        What to read.
    begin : float
        ``time.perf_counter()`` at the start of the call, for the report.
    timed : bool
        Whether to time the kernels, which waits for the last of them.
    """
    require_kvikio()
    with output.device_of(request):
        direct, gds = gds_mode(request.plan.layout.root or "")
        job = make_job(request, direct=direct)
        output.check_memory(request, job.scratch_bytes)
        array = output.allocate(request)
        planned = time.perf_counter()
        work = _carry_out(job, array, timed=timed) if array.size else _Work("none", 0.0, 0.0)
        done = time.perf_counter()
        return array, _report(job, gds, work, planned - begin, done - planned)


@dataclass(frozen=True)
class _Work:
    """What read the bytes, and the seconds of the kernels; None where they were not taken."""

    engine: str
    decode_seconds: float | None
    scatter_seconds: float | None


def _carry_out(job: Job, array: Any, *, timed: bool) -> _Work:
    target = Target(array, job.conversion, job.fill)
    if job.way is not None and job.way.slot is None:
        return _by_host(job, target)
    engine = choose_engine(direct=job.direct, read_nbytes=job.mean_read, encoded=job.way is not None)
    slots = job.slots(array, timed=timed)
    reader.run(job, slots, engine)
    if not isinstance(slots, EncodedSlots):
        return _Work(engine.name, 0.0, slots.scatter_seconds())
    rows, _ = slots.failed()
    rows = np.union1d(rows, job.counts.too_long)
    if len(rows):
        count = buffer_count(job.plan.layout.chunk_nbytes, len(rows), job.threads)
        reader.run_on_host(job, DeviceHostSlots(target, count, job.plan.layout.chunk_nbytes, slots.arena), [rows])
    return _Work(engine.name, slots.decode_seconds(), slots.scatter_seconds())


def _by_host(job: Job, target: Target) -> _Work:
    import cupy

    layout = job.plan.layout
    count = buffer_count(layout.chunk_nbytes, job.plan.chunk_count, job.threads)
    reader.run_all_on_host(
        job, DeviceHostSlots(target, count, layout.chunk_nbytes, cupy.empty(job.scratch_bytes, np.uint8))
    )
    return _Work("threads that read and decode into pinned host memory", None, None)


def _report(job: Job, gds: str, work: _Work, plan_seconds: float, read_seconds: float) -> ReadReport:
    filled = len(np.unique(job.pieces.chunk[job.counts.filled], axis=0))
    return ReadReport(
        source=job.plan.layout.name,
        backend="kvikio",
        gds=gds,
        engine=work.engine,
        fallback="",
        shape=job.plan.shape,
        dtype=str(job.request.dtype),
        bytes_read=job.counts.bytes_read,
        bytes_decoded=job.plan.region.size * job.request.dtype.itemsize,
        chunks_read=job.plan.chunk_count - filled,
        chunks_filled=filled,
        files_opened=job.counts.files_opened,
        scratch_bytes=job.scratch_bytes,
        plan_seconds=plan_seconds,
        read_seconds=read_seconds,
        scatter_seconds=work.scatter_seconds,
        decoder="" if job.way is None else str(job.way),
        decode_seconds=work.decode_seconds,
        chunks_decoded_by_host=job.counts.by_host,
    )


def require_kvikio() -> None:
    """Raise where kvikio cannot be used.

    Raises
    ------
    GpuUnavailableError
        Saying why.
    """
    from linumpy.device import install_line

    mode, reason = kvikio_mode()
    if mode == "none":
        raise GpuUnavailableError(f"{reason}: {install_line()}")


def gds_mode(folder: str) -> tuple[bool, str]:
    """Say whether reads from a folder are native GDS, and how that is known."""
    mode, reason = kvikio_mode()
    if mode != "cufile":
        return False, reason
    from linumpy.gds import gds_verdict

    verdict = gds_verdict(folder)
    answer = "native" if verdict.is_native else "not native"
    return verdict.is_native, f"{answer} ({verdict.path}, says gds_doctor.sh)"
