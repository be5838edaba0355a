"""Read through zarr-python's own GPU mode: any codec, any store, decoded on the host.

In: a request. Out: a CuPy array. This is the fallback, and what the kvikio reader is measured against.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import zarr

from linumpy.device import is_device_array, require_cuda
from linumpy.gpu import output
from linumpy.gpu.output import ReadRequest
from linumpy.gpu.report import ReadReport
from linumpy.io.layout import read_layout
from linumpy.io.source import Source, open_source
from linumpy.io.zarr_mode import config_lock
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read import plan_read

log = logging.getLogger(__name__)


@contextmanager
def gpu_zarr_context() -> Iterator[None]:
    """Make zarr arrays that are opened and sliced inside give CuPy arrays.

    zarr's configuration belongs to the whole process: arrays sliced by other threads meanwhile give CuPy arrays too.

    Raises
    ------
    GpuUnavailableError
        No CUDA device.
    """
    require_cuda()
    with config_lock, zarr.config.enable_gpu():
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
    """Read with zarr-python's GPU mode; see :func:`linumpy.gpu.zarr_io.read_zarr_to_gpu` for the parameters."""
    begin = time.perf_counter()
    array = open_source(source, level)
    request = output.make_request(plan_read(read_layout(array), region), dtype, out, None)
    result, report = read_request(array, request, begin, fallback="")
    return (result, report) if return_report else result


def read_request(array: zarr.Array, request: ReadRequest, begin: float, *, fallback: str) -> tuple[Any, ReadReport]:
    """Carry out a request on an open array.

    Parameters
    ----------
    array : zarr.Array
        The array that the request's plan was made for.
    request : ReadRequest
        What to read.
    begin : float
        ``time.perf_counter()`` at the start of the call, for the report.
    fallback : str
        Why the kvikio reader was not taken; empty where it was not asked.
    """
    with output.device_of(request):
        output.check_memory(request, _scratch(request))
        planned = time.perf_counter()
        result = _read(array, request)
        done = time.perf_counter()
    return result, ReadReport(
        source=request.plan.layout.name,
        backend="zarr-gpu",
        gds="not used",
        engine=f"zarr-python into {'host memory' if why_by_host(request.plan.layout) else 'device memory'}",
        fallback=fallback,
        shape=request.plan.shape,
        dtype=str(request.dtype),
        bytes_read=None,
        bytes_decoded=request.plan.region.size * request.dtype.itemsize,
        chunks_read=None,
        chunks_filled=None,
        files_opened=None,
        scratch_bytes=None,
        plan_seconds=planned - begin,
        read_seconds=done - planned,
        scatter_seconds=None,
    )


def _scratch(request: ReadRequest) -> int:
    """Bytes beyond the result: zarr fills an array of its own, which is cast or copied where the result is another."""
    same = request.out is None and request.dtype == request.plan.layout.dtype
    return 0 if same else request.plan.nbytes


def why_by_host(layout: ArrayLayout) -> str:
    """Say why zarr's GPU mode cannot read an array, so that zarr reads it into host memory; empty if it can.

    Measured with zarr 3.4 and CuPy 14.2.
    """
    if layout.zarr_format == 2:
        return "zarr's GPU mode hands device memory to the codecs of zarr v2, which take host memory only"
    if layout.swapped:
        return "zarr's GPU mode looks at stored bytes as a CuPy array, which has no foreign byte order"
    if layout.shard is not None and layout.dtype.itemsize > 1 and set(layout.codecs) <= _RAW_CODECS:
        # Not an exception: a kernel that fails so takes the GPU away from the process for good.
        return "zarr's GPU mode looks at raw inner chunks where they lie in their shard, which may be misaligned"
    return ""


_RAW_CODECS = {"transpose", "bytes", "crc32c"}


def _read(array: zarr.Array, request: ReadRequest) -> Any:
    cupy = require_cuda()
    selection = request.plan.region.selection
    reason = why_by_host(request.plan.layout)
    data: Any
    if not reason:
        # An array keeps the buffer kind of the configuration it was opened under.
        with gpu_zarr_context():
            opened = zarr.open_array(array.store, path=array.path, mode="r", zarr_format=array.metadata.zarr_format)
            data = opened[selection]
        # zarr's threads work on the default stream, which other streams need not wait for.
        cupy.cuda.Stream.null.synchronize()
    else:
        log.info("%s: %s", request.plan.layout.name, reason)
        data = array[selection]
    # 0-d arrays come back on the host in GPU mode too.
    if not is_device_array(data):
        data = cupy.asarray(np.asarray(data).astype(request.dtype, copy=False))
    cast = data.astype(request.dtype, copy=False).reshape(request.plan.shape)
    if request.out is not None:
        request.out[...] = cast
        result = request.out
    else:
        result = cupy.ascontiguousarray(cast)
    # Before `data` goes: zarr's threads allocated it on the default stream, whose next work does not wait for copies
    # of it on this one. And so that the report's time is that of the read.
    cupy.cuda.get_current_stream().synchronize()
    return result
