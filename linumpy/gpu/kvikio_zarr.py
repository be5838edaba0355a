"""Read chunks of a local Zarr array into device memory with kvikio's ``CuFile.pread``, and decode them there.

In: a :class:`~linumpy.plan.read.plan.ReadPlan` or what names an array. Out: a CuPy array, ordered on the caller's
current stream. Errors: :class:`~linumpy.errors.UnsupportedLayoutError` (a ``NotImplementedError``) for codecs that are
not decoded here, stores that are not local, and dtypes of no CUDA type; :class:`~linumpy.errors.ChunkError` for stored
bytes that cannot be right.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

from numpy.typing import DTypeLike

from linumpy.arrays import Array
from linumpy.device import kvikio_mode
from linumpy.errors import GpuUnavailableError, UnsupportedLayoutError
from linumpy.gpu.loop.report import ReadReport
from linumpy.gpu.loop.works import estimate_scratch
from linumpy.gpu.read import request as output
from linumpy.gpu.read.layouts import LAYOUTS
from linumpy.gpu.read.reader import Reader
from linumpy.gpu.read.request import ReadRequest
from linumpy.gpu.read.shared import shared_reader
from linumpy.io.source import Source
from linumpy.plan.read.plan import plan_read


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
    """Read with kvikio; see :func:`linumpy.gpu.zarr_io.read_zarr_to_gpu` for the parameters.

    Raises
    ------
    UnsupportedLayoutError
        Chunks of a codec that is not decoded here, a store that is not local, or the like. The message says what it is.
    """
    begin = time.perf_counter()
    plan = plan_read(LAYOUTS.get(source, level), region)
    if plan.layout.unsupported is not None:
        raise UnsupportedLayoutError(f"kvikio cannot read {plan.layout.name}: {plan.layout.unsupported}")
    request = output.make_request(plan, dtype, out, scratch_bytes)
    array, report = read_request(request, begin, timed=return_report)
    return (array, report) if return_report else array


class OwnReader:
    """A reader that a caller keeps for many reads with a limit of their own; made by the first of them.

    With the default limit it is the reader that all callers share. One thread at a time may use it.

    Parameters
    ----------
    scratch_bytes : int or None
        Device memory beyond results; None for the default.
    """

    def __init__(self, scratch_bytes: int | None) -> None:
        self.scratch_bytes = output.DEFAULT_SCRATCH_BYTES if scratch_bytes is None else scratch_bytes
        self._readers: dict[tuple[int, bool], Reader] = {}

    @contextmanager
    def use(self, device: int, *, direct: bool) -> Iterator[Reader]:
        """Use the reader of a device; `direct` for GPUDirect Storage."""
        if self.scratch_bytes == output.DEFAULT_SCRATCH_BYTES:
            with shared_reader(device, direct=direct) as reader:
                yield reader
            return
        if (device, direct) not in self._readers:
            self._readers[device, direct] = Reader(device, self.scratch_bytes, direct=direct)
        yield self._readers[device, direct]

    def close(self) -> None:
        """Free memory and threads, but those that are shared."""
        while self._readers:
            self._readers.popitem()[1].close()


def read_request(
    request: ReadRequest, begin: float, *, timed: bool, own: OwnReader | None = None
) -> tuple[Any, ReadReport]:
    """Carry out a request whose layout kvikio can read.

    Parameters
    ----------
    request : ReadRequest
        What to read.
    begin : float
        ``time.perf_counter()`` at the start of the call, for the report.
    timed : bool
        Whether to time the kernels, which waits for the last of them.
    own : OwnReader, optional
        The reader to use. By default the shared one, or one for this read where `request` has another limit.
    """
    require_kvikio()
    plan = request.plan
    with output.device_of(request) as device:
        output.check_memory(request, 0)  # what cannot fit anyway is not planned
        direct, gds = gds_mode(plan.layout.root or "")
        with ExitStack() as scope:
            if own is None:
                own = scope.enter_context(closing(OwnReader(request.scratch_bytes)))
            reader = scope.enter_context(own.use(device.id, direct=direct))
            if (more := estimate_scratch(plan, reader.limits) - reader.device_bytes) > 0:
                output.check_memory(request, more)
            planned = time.perf_counter()
            ticket = reader.submit_layout(plan.layout, plan.region, out=request.out, dtype=request.dtype, timed=timed)
            try:
                array = ticket.result()
            except BaseException:
                ticket.cancel()  # an interrupt: nothing may write into the output any more
                ticket.exception()
                raise
            report = ticket.report
    report = replace(report, gds=gds, plan_seconds=planned - begin)
    return array, replace(report, read_seconds=time.perf_counter() - planned)


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
