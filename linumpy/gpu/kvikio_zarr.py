"""Read an array by linumpy's reader: into device memory, decoded there, or into host memory.

Only GPUDirect Storage needs kvikio; the module keeps its name because users import from it.

In: a source or a :class:`~linumpy.plan.read.ReadPlan`. Out: a complete CuPy array, which any stream may
use, or a NumPy array. Errors: :class:`~linumpy.errors.UnsupportedLayoutError` (a ``NotImplementedError``) for codecs
that the reader does not decode, stores in GPU memory, and dtypes without a CUDA type;
:class:`~linumpy.errors.ChunkError` for broken chunks; :class:`~linumpy.errors.DeviceMemoryError` for results that do
not fit into device memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from linumpy.arrays import Array
from linumpy.device import kvikio_mode, require_cuda
from linumpy.gpu.read import request as requests
from linumpy.gpu.read.engines.by_zarr import array_of, why_unsupported
from linumpy.gpu.read.layouts import LAYOUTS
from linumpy.gpu.read.reader import Reader
from linumpy.gpu.read.report import ReadReport, job_report
from linumpy.gpu.read.request import DEFAULT_SCRATCH_BYTES, check_scratch
from linumpy.gpu.read.shared import shared_reader
from linumpy.gpu.read.ticket import Ticket
from linumpy.io.source import Source
from linumpy.io.zarr_mode import wait_for_zarr
from linumpy.kernel_cache import compiled
from linumpy.plan.read import ReadPlan, plan_read, why_not_gpu_mode

log = logging.getLogger(__name__)


def read_zarr_via_kvikio(
    source: Source,
    *,
    region: Any = None,
    level: int = 0,
    dtype: DTypeLike | None = None,
    out: Array | None = None,
    scratch_bytes: int | None = None,
    return_report: bool = False,
) -> Any:
    """Read by linumpy's reader; see :func:`linumpy.gpu.zarr_io.read_zarr_to_gpu` for the parameters.

    Raises
    ------
    UnsupportedLayoutError
        The reader does not support a codec, the store or the dtype; the message names it.
    """
    begin = time.perf_counter()
    plan = plan_read(LAYOUTS.get(source, level), region)
    with closing(OwnReader(check_scratch(scratch_bytes))) as own:
        array, report = read_to_device(plan, dtype, out, own, begin, strict=True, timed=return_report)
    return (array, report) if return_report else array


class OwnReader:
    """A reader with a separate limit of device memory, for many reads; the first read creates it.

    With the default limit, the reader that the process shares is used instead. Only one thread may use an `OwnReader`
    at a time.

    `scratch_bytes`: maximum device memory beyond results; None for the default.
    """

    def __init__(self, scratch_bytes: int | None) -> None:
        self.scratch_bytes = DEFAULT_SCRATCH_BYTES if scratch_bytes is None else scratch_bytes
        self._readers: dict[tuple[int, bool], Reader] = {}

    @contextmanager
    def use(self, device: int, *, direct: bool) -> Iterator[Reader]:
        """Use the reader of a device; `direct` for GPUDirect Storage."""
        if self.scratch_bytes == DEFAULT_SCRATCH_BYTES:
            with shared_reader(device, direct=direct) as reader:
                yield reader
            return
        if (device, direct) not in self._readers:
            self._readers[device, direct] = Reader(device, self.scratch_bytes, direct=direct)
        yield self._readers[device, direct]

    def close(self) -> None:
        """Close the readers that this object has created, but not the shared ones."""
        while self._readers:
            self._readers.popitem()[1].close()


def read_to_device(
    plan: ReadPlan,
    dtype: DTypeLike | None,
    out: Array | None,
    own: OwnReader,
    begin: float,
    *,
    strict: bool = False,
    timed: bool = False,
) -> tuple[Any, ReadReport]:
    """Read a plan by a reader, or in zarr's GPU mode if only that mode supports the array.

    `dtype`, `out`, `strict`: as for :func:`linumpy.gpu.zarr_io.read_zarr_to_gpu`. `begin`: ``time.perf_counter()`` at
    the start of the call, for the report. `timed`: whether to time the kernels; the call then waits for the last one.
    """
    layout, compiled_before = plan.layout, compiled()
    target = requests.check_result(plan, dtype, out)
    reason = why_unsupported(layout)
    if strict and reason:
        raise requests.unsupported_error(layout, reason)
    by_zarr = layout.unsupported is not None or bool(reason)
    nbytes = 0 if out is not None else plan.region.size * target.itemsize
    with requests.device_of(out) as device:
        requests.check_memory(layout.name, nbytes, 0)  # raise before a reader is made if the result does not fit
        why_host = why_not_gpu_mode(layout, plan.region, target, device.id) if by_zarr else ""
        if why_host is None:
            return _read_in_gpu_mode(plan, target, out, begin, reason)
        direct, gds = False, "not used" if by_zarr else "not used (an object store)"
        if not by_zarr and layout.remote is None:
            direct, gds = gds_mode(layout.root or "")
        with own.use(device.id, direct=direct) as reader:
            if not by_zarr and plan.chunk_count and not reader.device_bytes:
                requests.check_memory(layout.name, nbytes, reader.scratch_nbytes)
            planned = time.perf_counter()
            array, report = _wait_for(
                reader.submit(layout, plan.region, out=out, dtype=target, timed=timed), out is None
            )
    if by_zarr:
        engine = f"zarr-python into host memory and one copy to the device: {why_host}"
        report = replace(report, backend="zarr-host", engine=engine, decoder="")
    report = replace(report, gds=gds, plan_seconds=planned - begin, compiled=compiled() - compiled_before)
    return array, replace(report, read_seconds=time.perf_counter() - planned)


def _read_in_gpu_mode(plan: ReadPlan, dtype: np.dtype, out: Any, begin: float, reason: str) -> tuple[Any, ReadReport]:
    """Have zarr write into the result, which has the dtype of the array and lies on the current device, device 0.

    The read names the kind of buffers, so zarr's process-wide configuration does not change. `reason`: why linumpy's
    reader cannot read the array, which is logged; empty if the caller chose zarr-python.
    """
    from zarr.buffer import gpu

    name, cupy = plan.layout.name, require_cuda()
    if reason:
        log.warning("%s: read by zarr-python in its GPU mode, not by linumpy's reader: %s", name, reason)
    planned = time.perf_counter()
    result = out if out is not None else requests.new_array(cupy, plan.shape, dtype)
    array = array_of(plan.layout)
    # zarr's threads use default streams, which do not wait for what is queued on this one.
    cupy.cuda.get_current_stream().synchronize()
    try:
        array.get_basic_selection(plan.region.selection, out=gpu.NDBuffer(result), prototype=gpu.buffer_prototype)
    except BaseException:
        wait_for_zarr()  # otherwise reads of other chunks would change the result after the error
        raise
    cupy.cuda.Device().synchronize()
    return result, replace(
        job_report(name, str(dtype), result),
        backend="zarr-gpu",
        engine="zarr-python in its GPU mode",
        fallback=reason,
        plan_seconds=planned - begin,
        read_seconds=time.perf_counter() - planned,
    )


def read_into_host(plan: ReadPlan, dtype: np.dtype, why: str, begin: float) -> tuple[np.ndarray, ReadReport]:
    """Read a plan into host memory, by the shared reader.

    `why`: why the result is in host memory, for the report. `begin`: ``time.perf_counter()`` at the start of the call,
    for the report.
    """
    planned = time.perf_counter()
    with shared_reader("cpu") as reader:
        array, report = _wait_for(reader.submit(plan.layout, plan.region, dtype=dtype), True)
    if report.fallback:
        why, report = f"{why}; zarr-python: {report.fallback}", replace(report, decoder="")
    report = replace(report, fallback=f"host memory: {why}", scratch_bytes=None, plan_seconds=planned - begin)
    return array, replace(report, read_seconds=time.perf_counter() - planned)


def _wait_for(ticket: Ticket, is_new: bool) -> tuple[Any, ReadReport]:
    """Wait for a read, and cancel it after an interrupt.

    Unless the output `is_new`, it is the caller's, which must not be written after the return.
    """
    try:
        return ticket.result(), ticket.report
    except BaseException:
        ticket.cancel()
        if not is_new:
            ticket.exception()
        raise


def gds_mode(folder: str) -> tuple[bool, str]:
    """Say whether reads from a folder use native GDS, and how that is known."""
    mode, reason = kvikio_mode()
    if mode == "none":
        return False, f"not used ({reason})"
    if mode != "cufile":
        return False, reason
    from linumpy.gds import gds_verdict

    verdict = gds_verdict(folder)
    answer = "native" if verdict.is_native else "not native"
    return verdict.is_native, f"{answer} ({verdict.path}, says gds_doctor.sh)"
