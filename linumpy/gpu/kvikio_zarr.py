"""Read chunks of a local Zarr array into device memory with kvikio's ``CuFile.pread``, and decode them there.

In: a :class:`~linumpy.plan.read.plan.ReadPlan` or what names an array. Out: a CuPy array, ordered on the caller's
current stream. Errors: :class:`~linumpy.errors.UnsupportedLayoutError` (a ``NotImplementedError``) for codecs that are
not decoded here, stores that are not local, and dtypes of no CUDA type; :class:`~linumpy.errors.ChunkError` for stored
bytes that cannot be right.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.device import kvikio_mode
from linumpy.errors import GpuUnavailableError, UnsupportedLayoutError
from linumpy.gpu.read import host_decode
from linumpy.gpu.read import request as output
from linumpy.gpu.read import slab_loop as reader
from linumpy.gpu.read.encoded_staging import EncodedSlots
from linumpy.gpu.read.engines import choose_engine
from linumpy.gpu.read.host_decode import DeviceHostSlots
from linumpy.gpu.read.job import Counts, Job, Transfer, plan_transfer
from linumpy.gpu.read.report import ReadReport
from linumpy.gpu.read.request import ReadRequest
from linumpy.gpu.read.staging import Target
from linumpy.io.layout import read_layout
from linumpy.io.source import Source, open_source
from linumpy.plan.read.plan import plan_read


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
        output.check_memory(request, 0)  # what cannot fit anyway is not planned
        direct, gds = gds_mode(request.plan.layout.root or "")
        transfer = plan_transfer(request, direct=direct)
        output.check_memory(request, transfer.scratch_bytes)
        array = output.allocate(request)
        jobs = transfer.jobs()
        first = next(jobs)
        planned = time.perf_counter()
        done = [_carry_out(job, array, timed=timed) for job in itertools.chain([first], jobs)] if array.size else []
        return array, _report(transfer, gds, done, planned - begin, time.perf_counter() - planned)


@dataclass(frozen=True)
class _Work:
    """What read the bytes of a job, its counts, and the seconds of the kernels; None where they were not taken."""

    engine: str
    counts: Counts
    chunks_filled: int
    decode_seconds: float | None
    scatter_seconds: float | None


def _carry_out(job: Job, array: Any, *, timed: bool) -> _Work:
    target = Target(array, job.conversion, job.fill)
    if job.way is not None and job.way.slot is None:
        return _by_host(job, target)
    engine = choose_engine(direct=job.direct, read_nbytes=job.mean_read, encoded=job.way is not None)
    with job.reading(engine.descriptors_per_file):
        slots = job.slots(array, timed=timed)
        reader.run(job, slots, engine)
    if not isinstance(slots, EncodedSlots):
        return _work(job, engine.name, 0.0, slots.scatter_seconds())
    rows, _ = slots.failed()
    rows = np.union1d(rows, job.counts.too_long)
    if len(rows):
        with host_decode.decoding(job, len(rows)) as share:
            given_up = DeviceHostSlots(target, share.buffers, job.plan.layout.chunk_nbytes, slots.arena)
            reader.run_on_host(job, given_up, [rows])
    return _work(job, engine.name, slots.decode_seconds(), slots.scatter_seconds())


def _by_host(job: Job, target: Target) -> _Work:
    import cupy

    chunk_nbytes = job.plan.layout.chunk_nbytes
    with host_decode.decoding(job, job.plan.chunk_count) as share:
        arena = cupy.empty(job.scratch_bytes, np.uint8)
        reader.run_all_on_host(job, DeviceHostSlots(target, share.buffers, chunk_nbytes, arena))
    return _work(job, "threads that read and decode into pinned host memory", None, None)


def _work(job: Job, engine: str, decode_seconds: float | None, scatter_seconds: float | None) -> _Work:
    filled = len(np.unique(job.pieces.chunk[job.counts.filled], axis=0))
    return _Work(engine, job.counts, filled, decode_seconds, scatter_seconds)


def _sum(seconds: list[float | None]) -> float | None:
    taken = [one for one in seconds if one is not None]
    return sum(taken, 0.0) if len(taken) == len(seconds) else None


def _report(transfer: Transfer, gds: str, done: list[_Work], plan_seconds: float, read_seconds: float) -> ReadReport:
    request, plan, counts = transfer.request, transfer.request.plan, [work.counts for work in done]
    filled = sum(work.chunks_filled for work in done)
    return ReadReport(
        source=plan.layout.name,
        backend="kvikio",
        gds=gds,
        engine=done[0].engine if done else "none",
        fallback="",
        shape=plan.shape,
        dtype=str(request.dtype),
        bytes_read=sum(one.bytes_read for one in counts),
        bytes_decoded=plan.region.size * request.dtype.itemsize,
        chunks_read=plan.chunk_count - filled,
        chunks_filled=filled,
        files_opened=sum(one.files_opened for one in counts),
        scratch_bytes=transfer.scratch_bytes,
        plan_seconds=plan_seconds,
        read_seconds=read_seconds,
        scatter_seconds=_sum([work.scatter_seconds for work in done]),
        decoder="" if transfer.way is None else str(transfer.way),
        decode_seconds=_sum([work.decode_seconds for work in done]),
        chunks_decoded_by_host=sum(one.by_host for one in counts),
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
