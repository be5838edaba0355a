"""Read by zarr-python in its GPU mode.

In: a request. Out: a CuPy array. The GPU mode is used for the few layouts against which
:func:`linumpy.plan.read.why_not_gpu_mode` has no reason; a Reader has zarr-python read all others into host
memory (:mod:`linumpy.gpu.read.engines.by_zarr`). A read names the kind of buffers, so it does not change zarr's
process-wide configuration; only :func:`gpu_zarr_context` does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import zarr

from linumpy.arrays import Array
from linumpy.device import require_cuda
from linumpy.gpu.read import request as requests
from linumpy.gpu.read.engines.by_zarr import array_of
from linumpy.gpu.read.report import ReadReport, job_report
from linumpy.gpu.read.request import ReadRequest
from linumpy.io.zarr_mode import gpu_mode, wait_for_zarr

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


def read_in_gpu_mode(request: ReadRequest, begin: float, reason: str) -> tuple[Array, ReadReport]:
    """Read into device memory.

    `begin`: ``time.perf_counter()`` at the start of the call, for the report. `reason`: why linumpy's reader cannot
    read the array, which is logged; empty if the caller chose zarr-python.
    """
    plan = request.plan
    if reason:
        log.warning("%s: read by zarr-python in its GPU mode, not by linumpy's reader: %s", plan.layout.name, reason)
    with requests.device_of(request):
        requests.check_memory(request, 0)
        planned = time.perf_counter()
        result = requests.allocate(request)
        _read(array_of(plan.layout), plan.region.selection, result)
    return result, replace(
        job_report(plan.layout.name, str(request.dtype), result),
        backend="zarr-gpu",
        engine="zarr-python in its GPU mode",
        fallback=reason,
        plan_seconds=planned - begin,
        read_seconds=time.perf_counter() - planned,
    )


def _read(array: zarr.Array, selection: tuple[slice | int, ...], result: Any) -> None:
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
