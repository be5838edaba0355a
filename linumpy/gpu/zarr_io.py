"""The dispatcher: read a Zarr array into GPU memory by the fastest backend that supports it, or into host memory.

In: a source and a region. Out: a complete CuPy array, by default on the current device; from :func:`read_zarr` a NumPy
array where there is no GPU. linumpy's own reader reads local and object stores with raw chunks or supported codecs;
zarr-python reads everything else, in its GPU mode or into host memory with one copy to the device. The log and the
report give the reason for this fallback, which is an error with ``strict=True``. Broken data are always an error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, overload

import zarr
from numpy.typing import DTypeLike

from linumpy.arrays import Array, DeviceName
from linumpy.device import require_cuda, resolve
from linumpy.gpu.kvikio_zarr import OwnReader, read_into_host, read_to_device, read_zarr_via_kvikio
from linumpy.gpu.read import request as requests
from linumpy.gpu.read.engines.by_zarr import why_unsupported
from linumpy.gpu.read.layouts import LAYOUTS
from linumpy.gpu.read.limits import Limits, describe_placement
from linumpy.gpu.read.report import LINUMPY, ReadReport
from linumpy.io.layout import read_layout
from linumpy.io.open import open_source
from linumpy.io.source import Source
from linumpy.io.stores.zips import verify_region
from linumpy.io.zarr_mode import gpu_mode
from linumpy.plan.read import ReadPlan, plan_read
from linumpy.plan.region import RegionLike

__all__ = [
    "gpu_zarr_context",
    "plan_zarr_read",
    "read_zarr",
    "read_zarr_to_gpu",
    "read_zarr_via_kvikio",
    "read_zarr_via_zarr_gpu",
]

#: Backends by the names that callers give.
_BACKENDS = {"auto": "auto", LINUMPY: LINUMPY, "zarr-gpu": "zarr-gpu", "kvikio": LINUMPY}
Backend = Literal["auto", "linumpy", "zarr-gpu", "kvikio"]


class _Options(TypedDict, total=False):
    """For type checkers: parameters that :func:`read_zarr` and :func:`read_zarr_to_gpu` share."""

    region: RegionLike
    level: int
    dtype: DTypeLike | None
    strict: bool
    verify: bool
    storage_options: Mapping[str, Any] | None


class _GpuOptions(_Options, total=False):
    backend: Backend
    out: Array | None
    scratch_bytes: int | None


def plan_zarr_read(source: Source, *, region: RegionLike = None, level: int = 0) -> ReadPlan:
    """Plan a read without a GPU and without opening a chunk.

    Parameters
    ----------
    source, region, level
        As for :func:`read_zarr_to_gpu`.

    Returns
    -------
    ReadPlan
        ``print(plan)`` explains it: chunks, codecs, where they are decoded, device memory.
    """
    plan = plan_read(read_layout(open_source(source, level)), region)
    layout, limits = plan.layout, Limits(requests.DEFAULT_SCRATCH_BYTES, may_exceed=True)
    if layout.unsupported is not None or not plan.region.size:
        return plan
    chain, raw = layout.chain, "none: chunks are raw"
    decoding = raw if chain is None else describe_placement(chain, layout.chunk_nbytes, plan.chunk_count, limits)
    return replace(plan, decoding=decoding, scratch_bytes=limits.held_nbytes)


@overload
def read_zarr(
    source: Source,
    *,
    device: DeviceName | None = None,
    return_report: Literal[False] = False,
    **options: Unpack[_Options],
) -> Array: ...


@overload
def read_zarr(
    source: Source, *, device: DeviceName | None = None, return_report: Literal[True], **options: Unpack[_Options]
) -> tuple[Array, ReadReport]: ...


@overload
def read_zarr(
    source: Source, *, device: DeviceName | None = None, return_report: bool, **options: Unpack[_Options]
) -> Any: ...


def read_zarr(
    source: Source,
    *,
    region: RegionLike = None,
    level: int = 0,
    device: DeviceName | None = None,
    dtype: DTypeLike | None = None,
    strict: bool = False,
    verify: bool = False,
    return_report: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Read a Zarr array, or a region of it: into GPU memory where there is a GPU, else into host memory.

    Parameters
    ----------
    source, region, level
        As for :func:`read_zarr_to_gpu`.
    device : {"auto", "cuda", "cpu"}, optional
        ``"cuda"`` reads by :func:`read_zarr_to_gpu`, ``"cpu"`` into host memory, ``"auto"`` to the GPU if there is one.
        By default the environment variable ``LINUMPY_DEVICE``, and without it ``"auto"``. Both use linumpy's own
        reader, and zarr-python for arrays that it does not support.
    dtype : dtype, optional
        Data type of the result; by default that of the array, in this machine's byte order. Elements are cast as by
        :func:`read_zarr_to_gpu`; both support bool, integers, floats and complex numbers, but not complex to real.
    strict : bool
        Whether to raise where linumpy's own reader cannot read the array, instead of reading it by zarr-python.
    verify : bool
        As for :func:`read_zarr_to_gpu`.
    return_report : bool
        Whether to return a report beside the array.
    storage_options : mapping, optional
        Of a URL: what obstore's ``from_url`` takes, such as ``{"skip_signature": True}``; see docs/remote.md.

    Returns
    -------
    cupy.ndarray or numpy.ndarray
        Axes in the order of the array, C-contiguous; the same voxels on both.
    ReadReport
        Only with `return_report`: backend, bytes, seconds, and in `fallback` why the array was not read to the GPU.

    Raises
    ------
    GpuUnavailableError
        ``device="cuda"`` and there is none.
    UnsupportedLayoutError
        ``strict=True``, and linumpy's reader cannot read the array; the message says why.
    TypeError
        Elements without a fixed size, such as strings: use zarr-python for those.
    FileNotFoundError, SourceError, RegionError, TypeError, ValueError, ChunkError
        As :func:`read_zarr_to_gpu`, on the CPU too.
    DeviceMemoryError
        As :func:`read_zarr_to_gpu`, on the GPU only.

    Examples
    --------
    >>> import linumpy
    >>> volume = linumpy.read_zarr("brain.ome.zarr", level=1)  # doctest: +SKIP
    """
    where = resolve(device)
    if where.is_cuda:
        with where.xp.cuda.Device(where.index):
            return read_zarr_to_gpu(
                source,
                region=region,
                level=level,
                dtype=dtype,
                strict=strict,
                verify=verify,
                return_report=return_report,
                storage_options=storage_options,
            )
    begin = time.perf_counter()
    plan = plan_read(LAYOUTS.get(source, level, storage_options), region)
    if verify:
        verify_region(plan)
    requests.check_elements(plan.layout)
    target = plan.layout.dtype if dtype is None else requests.cast_dtype(plan.layout.dtype, dtype)
    if strict and (reason := why_unsupported(plan.layout)):
        raise requests.unsupported_error(plan.layout, reason)
    result, report = read_into_host(plan, target, where.reason, begin)
    return (result, report) if return_report else result


@overload
def read_zarr_to_gpu(
    source: Source, *, device: int | None = None, return_report: Literal[False] = False, **options: Unpack[_GpuOptions]
) -> Array: ...


@overload
def read_zarr_to_gpu(
    source: Source, *, device: int | None = None, return_report: Literal[True], **options: Unpack[_GpuOptions]
) -> tuple[Array, ReadReport]: ...


@overload
def read_zarr_to_gpu(
    source: Source, *, device: Sequence[int], return_report: Literal[False] = False, **options: Unpack[_GpuOptions]
) -> list[Array]: ...


@overload
def read_zarr_to_gpu(
    source: Source, *, device: Sequence[int], return_report: Literal[True], **options: Unpack[_GpuOptions]
) -> tuple[list[Array], list[ReadReport]]: ...


@overload
def read_zarr_to_gpu(
    source: Source, *, device: int | Sequence[int] | None = None, return_report: bool, **options: Unpack[_GpuOptions]
) -> Any: ...


def read_zarr_to_gpu(
    source: Source,
    *,
    region: RegionLike = None,
    level: int = 0,
    backend: Backend = "auto",
    dtype: DTypeLike | None = None,
    out: Array | None = None,
    strict: bool = False,
    verify: bool = False,
    scratch_bytes: int | None = None,
    return_report: bool = False,
    device: int | Sequence[int] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Read a Zarr array, or a region of it, into GPU memory.

    Parameters
    ----------
    source : str, Path, zarr.Array, zarr.Group, Store, StorePath or (Store, str)
        An array of zarr format 2 or 3, or an OME-Zarr image (NGFF 0.4 to 0.6) of which `level` picks the resolution;
        on disk, in a ZIP file, or in an object store (``s3://``, ``gs://``, ``az://``, ``http(s)://``).
    region : slice, int, Ellipsis, or a tuple of these, optional
        A basic index with steps of 1; ints drop their axis. By default the whole array. Only chunks, and inner chunks
        of a shard, that it touches are read.
    level : int
        Resolution level of an OME-Zarr image; 0 is the finest.
    backend : {"auto", "linumpy", "zarr-gpu"}
        ``"auto"`` uses linumpy's reader for local and object stores whose chunks are raw or encoded by zstd, Blosc
        (zstd, lz4, lz4hc or zlib inside), lz4, gzip or zlib, and zarr-python for everything else: its GPU mode for raw
        chunks of zarr format 3 without shards, else host memory and one copy to the device. ``"linumpy"`` and
        ``"zarr-gpu"`` force one of the two; ``"kvikio"`` is an alias of ``"linumpy"``. The report names the backend.
    dtype : dtype, optional
        Data type of the result; by default that of the array, in this machine's byte order. Elements are cast as by
        ``astype``: integers that overflow keep their low bits (1802 as int8 is 10), floats are truncated. Where C
        leaves a cast undefined, floats beyond the range of an integer type become its nearest limit, and NaN becomes 0.
    out : cupy.ndarray, optional
        Output array, C-contiguous, of the result's shape; without `dtype` elements are cast to its dtype.
    strict : bool
        Whether to raise instead of falling back with ``"auto"``.
    verify : bool
        Whether to compare the CRC-32 of each member of a ZIP file that the region touches before it is read, which
        reads these members once more; a difference is a `ChunkError`. No effect outside of ZIP files.
    scratch_bytes : int, optional
        Device memory that linumpy's reader may use beyond the result; by default 512 MiB.
    return_report : bool
        Whether to return a report beside the array; linumpy's reader then also times its kernels.
    device : int or sequence of int, optional
        CUDA device of the result, by default that of `out`, or else the current one. With several, such as ``[0, 1]``,
        the leading axis of the region is cut between chunks (or shards), and each device reads its own part, all at the
        same time: a list of arrays is returned, whose concatenation is the region, and with `return_report` a list of
        reports. Where there are fewer chunks than devices, some parts are empty. Not together with `out`.
    storage_options : mapping, optional
        Of a URL: what obstore's ``from_url`` takes, such as ``{"skip_signature": True}``; see docs/remote.md.

    Returns
    -------
    cupy.ndarray
        Axes in the order of the array, C-contiguous and complete: any stream may use it. A list with several devices.
    ReadReport
        Only with `return_report`: backend, GDS mode, reasons, bytes, chunks, seconds.

    Raises
    ------
    FileNotFoundError, SourceError
        No such path; neither an array nor an OME-Zarr image.
    RegionError, TypeError, ValueError
        An invalid region, dtype, `out`, `backend`, `device` or `scratch_bytes`; `device` together with `out`.
    UnsupportedLayoutError
        ``backend="linumpy"`` or ``strict=True``, and linumpy's reader cannot read the array; the message says why.
    ChunkError
        A broken chunk or shard index: wrong length, wrong checksum, outside its file, or undecodable.
    DeviceMemoryError
        The result, or scratch memory that the reader has yet to allocate, does not fit into device memory; raised
        before any chunk is read.
    GpuUnavailableError
        No CUDA device, or not the one that `device` names.

    Examples
    --------
    >>> from linumpy.gpu import read_zarr_to_gpu
    >>> volume = read_zarr_to_gpu("brain.ome.zarr", level=1)  # doctest: +SKIP
    >>> section = read_zarr_to_gpu("brain.ome.zarr", region=(slice(None), 512, ...))  # doctest: +SKIP
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown: choose one of {', '.join(_BACKENDS)}")
    begin = time.perf_counter()
    plan = plan_read(LAYOUTS.get(source, level, storage_options), region)
    if device is not None and out is not None:
        raise ValueError("device= and out= both choose the device of the result: pass one of them")
    if verify:
        verify_region(plan)
    if backend == "zarr-gpu":
        plan = replace(plan, layout=replace(plan.layout, unsupported=""))
    is_strict = strict or _BACKENDS[backend] == LINUMPY

    def read(plan: ReadPlan) -> tuple[Any, ReadReport]:
        with closing(OwnReader(requests.check_scratch(scratch_bytes))) as own:
            return read_to_device(plan, dtype, out, own, begin, strict=is_strict, timed=return_report)

    if isinstance(device, Sequence):
        from linumpy.gpu.devices import checked_devices, on_each
        from linumpy.plan.read import cut_for_devices

        numbers = checked_devices(device)
        shares = [replace(plan, region=share) for share in cut_for_devices(plan.layout, plan.region, len(numbers))]
        results, reports = zip(*on_each(numbers, lambda position: read(shares[position])), strict=True)
        return (list(results), list(reports)) if return_report else list(results)
    with nullcontext() if device is None else require_cuda(device).cuda.Device(device):
        result, report = read(plan)
    return (result, report) if return_report else result


def read_zarr_via_zarr_gpu(
    source: Source,
    *,
    region: Any = None,
    level: int = 0,
    dtype: DTypeLike | None = None,
    out: Array | None = None,
    return_report: bool = False,
) -> Any:
    """Read by zarr-python; see :func:`read_zarr_to_gpu` for the parameters."""
    return read_zarr_to_gpu(
        source, region=region, level=level, backend="zarr-gpu", dtype=dtype, out=out, return_report=return_report
    )


def read_region_into(array: zarr.Array[Any], region: Any, out: Array, own: OwnReader) -> None:
    """Read a region into `out` as :func:`read_zarr_to_gpu` does, by a reader that the caller reuses."""
    begin = time.perf_counter()
    plan = plan_read(LAYOUTS.get(array, 0), region)
    read_to_device(plan, None, out, own, begin)


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
