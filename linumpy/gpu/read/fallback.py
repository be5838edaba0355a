"""Read by zarr-python: any codec, any store, decoded on the host.

In: an array and a request. Out: a CuPy array, or a NumPy array. zarr-python reads into host memory, from which one copy
goes to the device; or in its GPU mode, for the few layouts against which
:func:`linumpy.plan.read.why_not_gpu_mode` has no reason. Each read names the kind of buffers, so it does not
change zarr's process-wide configuration; only :func:`gpu_zarr_context` does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import zarr

from linumpy.arrays import Array
from linumpy.device import require_cuda
from linumpy.errors import ChunkError, UnsupportedLayoutError
from linumpy.gpu.read import request as requests
from linumpy.gpu.read.report import ReadReport, host_report
from linumpy.gpu.read.request import ReadRequest
from linumpy.gpu.rounding import cast_elements
from linumpy.io.layout import read_layout
from linumpy.io.open import open_source
from linumpy.io.source import Source
from linumpy.io.zarr_mode import gpu_mode, read_chunks_on_host, wait_for_zarr
from linumpy.plan.read import ReadPlan, plan_read, why_not_gpu_mode

log = logging.getLogger(__name__)


@contextmanager
def gpu_zarr_context() -> Iterator[None]:
    """Make zarr arrays that are opened and sliced inside give CuPy arrays.

    zarr's configuration belongs to the whole process: arrays sliced by other threads meanwhile give CuPy arrays too.
    linumpy's own reads and writes give the same results inside. Some of them need zarr's host mode (shards and zarr
    format 2). In this thread, and in threads that linumpy's functions start for it, these switch to host mode while
    they run; in other threads they wait until the block ends.

    Raises
    ------
    GpuUnavailableError
        No CUDA device.
    """
    require_cuda()
    with gpu_mode():
        yield


def read_zarr_via_zarr_gpu(
    source: Source,
    *,
    region: Any = None,
    level: int = 0,
    dtype: Any = None,
    out: Any = None,
    return_report: bool = False,
) -> Any:
    """Read by zarr-python; see :func:`linumpy.gpu.zarr_io.read_zarr_to_gpu` for the parameters."""
    begin = time.perf_counter()
    array = open_source(source, level)
    request = requests.make_request(plan_read(read_layout(array), region), dtype, out, None)
    result, report = read_request(array, request, begin, reason="")
    return (result, report) if return_report else result


def read_request(array: zarr.Array, request: ReadRequest, begin: float, *, reason: str) -> tuple[Array, ReadReport]:
    """Read into device memory.

    Parameters
    ----------
    array : zarr.Array
        The array that the request's plan was made for.
    request : ReadRequest
        What to read.
    begin : float
        ``time.perf_counter()`` at the start of the call, for the report.
    reason : str
        Why linumpy's reader cannot read the array, which is logged; empty if the caller chose zarr-python.
    """
    plan = request.plan
    why_not_gpu = why_not_gpu_mode(plan.layout, plan.region, request.dtype, requests.device_of(request).id)
    if reason:
        _log_fallback(plan, reason, " in its GPU mode" if why_not_gpu is None else " through host memory")
    with requests.device_of(request):
        requests.check_memory(request, 0)
        planned = time.perf_counter()
        result = requests.allocate(request)
        if why_not_gpu is None:
            _read_in_gpu_mode(array, plan.region.selection, result)
        else:
            _read_by_host(array, request, result)
        done = time.perf_counter()
    return result, ReadReport(
        source=plan.layout.name,
        backend="zarr-gpu" if why_not_gpu is None else "zarr-host",
        gds="not used",
        engine="zarr-python in its GPU mode"
        if why_not_gpu is None
        else f"zarr-python into host memory and one copy to the device: {why_not_gpu}",
        fallback=reason,
        shape=plan.shape,
        dtype=str(request.dtype),
        bytes_read=None,
        bytes_decoded=plan.region.size * request.dtype.itemsize,
        chunks_read=None,
        chunks_filled=None,
        files_opened=None,
        scratch_bytes=None,
        plan_seconds=planned - begin,
        read_seconds=done - planned,
        scatter_seconds=None,
    )


def read_into_host(
    array: zarr.Array, plan: ReadPlan, dtype: np.dtype, reasons: tuple[str, str], begin: float
) -> tuple[np.ndarray, ReadReport]:
    """Read into host memory; `reasons` say why into host memory, and why by zarr-python."""
    why_host, why_zarr = reasons
    _log_fallback(plan, why_zarr)
    planned = time.perf_counter()
    result = _read_values(array, plan, dtype.newbyteorder("="))
    why = f"{why_host}; zarr-python: {why_zarr}"
    return result, host_report(plan, result, why, planned - begin, time.perf_counter() - planned)


def _log_fallback(plan: ReadPlan, reason: str, method: str = "") -> None:
    log.warning("%s: read by zarr-python%s, not by linumpy's reader: %s", plan.layout.name, method, reason)


def _read_values(array: zarr.Array, plan: ReadPlan, dtype: np.dtype) -> np.ndarray:
    """Read into host memory, and cast: C-contiguous, of the plan's shape."""
    try:
        stored = read_chunks_on_host(array, plan.region.selection)
    except ChunkError as error:
        if not isinstance(error.__cause__, NotImplementedError) or plan.layout.unsupported is None:
            raise
        why = f"{plan.layout.unsupported}, which zarr-python does not read either"
        raise UnsupportedLayoutError(f"{plan.layout.name}: {why}") from error.__cause__
    # A selection of rank 0 is a scalar, and stored bytes may be in the other byte order.
    return np.asarray(cast_elements(np.asarray(stored), dtype), order="C").reshape(plan.shape)


def _read_in_gpu_mode(array: zarr.Array, selection: tuple[slice | int, ...], result: Any) -> None:
    """Have zarr write into the result, which has the dtype of the array and lies on device 0."""
    from zarr.buffer import gpu

    cuda = require_cuda().cuda
    # zarr's threads use default streams, which do not wait for what is queued on this one.
    cuda.get_current_stream().synchronize()
    try:
        array.get_basic_selection(selection, out=gpu.NDBuffer(result), prototype=gpu.buffer_prototype)
    except BaseException:
        wait_for_zarr()  # otherwise reads of other chunks would change the result after the error
        raise
    cuda.Device().synchronize()


def _read_by_host(array: zarr.Array, request: ReadRequest, result: Any) -> None:
    """Read into host memory, cast there, and copy to the result on the current stream, which is waited for.

    The host memory is not pinned: pinning costs about 0.7 ms/MiB, as much as the read itself.
    """
    data = _read_values(array, request.plan, request.dtype)
    if data.size:
        stream = require_cuda().cuda.get_current_stream()
        result.set(data, stream=stream)
        stream.synchronize()  # until then the copy may read the host memory
