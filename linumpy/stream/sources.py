"""Arrays that samples name, and reads of them.

A path and a level → :class:`~linumpy.stream.plan.ArrayInfo`, kept for the next sample. Regions of arrays → a ticket
each, in their order: of arrays that the reader takes the reader's, of others one with the same methods, read by
zarr-python in threads. An error is that of its job alone.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr

from linumpy.errors import MetadataError
from linumpy.gpu.read.layouts import LAYOUTS
from linumpy.gpu.rounding import bfloat16_bits, cast_elements
from linumpy.io.layout import read_layout
from linumpy.io.ome import open_image
from linumpy.io.place import absolute
from linumpy.io.source import open_node, open_source
from linumpy.io.zarr_mode import read_chunks_on_host
from linumpy.plan.layout import ArrayLayout
from linumpy.stream.config import Config, Sample
from linumpy.stream.errors import InvalidArgument
from linumpy.stream.plan import ArrayInfo, Box

log = logging.getLogger(__name__)

Key = tuple[str, int]


class Sources:
    """The arrays of a pipeline, opened by threads ahead of their use.

    Parameters
    ----------
    config : Config
        ``n_zarrs_meta_cache`` arrays are kept, ``n_io_threads`` open them; limits of chunks and elements.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.pool = ThreadPoolExecutor(config.n_io_threads, "linumpy-stream-open")
        self._kept: OrderedDict[Key, Future[ArrayInfo] | ArrayInfo] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    def request(self, sample: Sample) -> list[Future[ArrayInfo] | ArrayInfo]:
        """Return the arrays of a sample, one for each part; those that are not open yet begin to be opened."""
        if not sample.parts:
            return [self._get((sample.uri, sample.level))]
        return [self._get((part.uri or sample.uri, part.level)) for part in sample.all_parts()]

    def _get(self, key: Key) -> Future[ArrayInfo] | ArrayInfo:
        with self._lock:
            found = self._kept.get(key)
            if isinstance(found, Future) and found.done():
                found = None if found.exception() else found.result()
                if found is not None:
                    self._kept[key] = found
            if found is not None:
                self._kept.move_to_end(key)
                self.hits += 1
                return found
            self.misses += 1
            opened = self.pool.submit(open_info, key[0], key[1], self._config)
            self._kept[key] = opened
            while len(self._kept) > self._config.n_zarrs_meta_cache:
                self._kept.popitem(last=False)
            return opened

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        self._kept.clear()


def open_info(uri: str, level: int, config: Config) -> ArrayInfo:
    """Open an array, or a level of an OME-Zarr image, and check it against the limits of the configuration.

    Raises
    ------
    InvalidArgument
        Its chunks or elements exceed the limits.
    FileNotFoundError, SourceError, ValueError
        See :func:`linumpy.io.source.open_source`.
    """
    layout = None if "://" in uri else LAYOUTS.get(uri, level)  # opened again only where its metadata have changed
    if layout is not None and layout.unsupported is None and layout.root == str(absolute(uri)):
        info = _plain_info(layout, None, uri, config)
    elif isinstance(node := open_node(uri), zarr.Array):
        array = open_source(node, level)
        info = _plain_info(read_layout(array), array, uri, config)
    else:
        info = _image_info(node, uri, level, config)
    most = config.max_bytes_per_element
    if 0 < most < info.dtype.itemsize:
        raise InvalidArgument(f"{uri} holds {info.dtype}, more than max_bytes_per_element={most}")
    nbytes = info.dtype.itemsize
    for n in info.chunk_shape:
        nbytes *= n
    if 0 < config.max_chunk_uncompressed_bytes < nbytes:
        raise InvalidArgument(
            f"{uri} has chunks of {nbytes} bytes, more than "
            f"max_chunk_uncompressed_bytes={config.max_chunk_uncompressed_bytes}"
        )
    return info


def _plain_info(layout: ArrayLayout, array: zarr.Array | None, uri: str, config: Config) -> ArrayInfo:
    space = min(layout.rank, 3)
    spacing = None if config.spacing is None else _fitting(config.spacing, space, uri)
    return _info(layout, array, uri, space, spacing, (1.0,) * layout.rank)


def _image_info(group: zarr.Group, uri: str, level: int, config: Config) -> ArrayInfo:
    try:
        image = open_image(group, spacing=config.spacing)
    except MetadataError:  # axes or units are missing: crops need neither, augmentation raises an error of its own
        array, finest = open_source(group, level), open_source(group, 0)
        factors = tuple(float(round(a / b)) for a, b in zip(finest.shape, array.shape, strict=True))
        return _info(read_layout(array), array, uri, min(array.ndim, 3), None, factors)
    array = open_source(group, level)
    axes = image.spatial_axes
    if axes != tuple(range(array.ndim - len(axes), array.ndim)):
        raise InvalidArgument(f"{uri}: axes of space must be the last ones (they are {axes} of {array.ndim})")
    ratios = [there / here for there, here in zip(image.spacing[level], image.spacing[0], strict=True)]
    factors = (1.0,) * (array.ndim - len(axes)) + tuple(round(r) if abs(r - round(r)) < 1e-6 else r for r in ratios)
    return _info(read_layout(array), array, uri, len(axes), image.spacing[level], factors)


def _info(
    layout: ArrayLayout,
    array: zarr.Array | None,
    uri: str,
    space: int,
    spacing: Sequence[float] | None,
    factors: tuple[float, ...],
) -> ArrayInfo:
    """Tell of an array; `array` is needed where the reader does not take it."""
    if layout.rank == 0:
        raise InvalidArgument(f"{uri} has no axes to crop")
    known: Any = None if spacing is None else tuple(spacing)
    source = layout if layout.unsupported is None else array
    return ArrayInfo(
        source, uri, layout.shape, layout.chunk_shape, layout.object_shape, layout.dtype,
        space, known, factors, layout.unsupported,
    )  # fmt: skip


def _fitting(spacing: tuple[float, ...], space: int, uri: str) -> tuple[float, ...]:
    if len(spacing) != space:
        raise InvalidArgument(f"spacing has {len(spacing)} numbers, {uri} has {space} axes of space")
    return spacing


@dataclass(frozen=True)
class ReadJob:
    """A region and where it goes.

    Attributes
    ----------
    info : ArrayInfo
        The array.
    region : Box
        What is read of it.
    out : cupy.ndarray or numpy.ndarray
        Strides may be any that are positive; elements are cast to its dtype.
    bfloat16 : bool
        Whether they are cast to bfloat16, whose bits `out` holds.
    """

    info: ArrayInfo
    region: Box
    out: Any
    bfloat16: bool = False


class Fallback:
    """Reads by zarr-python what the reader does not support, and logs the reason once for each array.

    Parameters
    ----------
    pool : Executor
        Its threads.
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._named: set[str] = set()

    def submit(self, job: ReadJob) -> FallbackTicket:
        """Begin to read."""
        if job.info.name not in self._named:
            self._named.add(job.info.name)
            log.warning("%s is read by zarr-python on the host: %s", job.info.name, job.info.unsupported)
        return FallbackTicket(self._pool.submit(_read, job), job.out)


class FallbackTicket:
    """A region that zarr-python reads."""

    def __init__(self, future: Future[Any], out: Any) -> None:
        self._future, self._out = future, out

    def result(self, stream: Any = None) -> Any:
        """Wait for the region; copy it to a device on `stream`."""
        values = self._future.result()
        if values is not None:
            import cupy

            with cupy.cuda.get_current_stream() if stream is None else stream:
                self._out[...] = cupy.asarray(values)
            self._future = Future()
            self._future.set_result(None)
        return self._out

    def exception(self) -> BaseException | None:
        """Wait for the end; return the error, or None."""
        try:
            return self._future.exception()
        except CancelledError as error:
            return error

    def done(self) -> bool:
        """Return whether the read is over."""
        return self._future.done()

    def cancel(self) -> bool:
        """Cancel the read unless it has begun."""
        return self._future.cancel()


class FailedTicket:
    """A read that could not be submitted."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self, stream: Any = None) -> Any:
        """Raise the error."""
        raise self._error

    def exception(self) -> BaseException | None:
        """Return the error."""
        return self._error

    def done(self) -> bool:
        """Return True: the read is over."""
        return True

    def cancel(self) -> bool:
        """Return False: there is nothing to cancel."""
        return False


def _read(job: ReadJob) -> Any:
    """Read and cast; returns what is to be copied to a device, None where the output is in host memory."""
    values = read_chunks_on_host(job.info.source, tuple(slice(a, b) for a, b in job.region))
    values = np.ascontiguousarray(values)
    values = bfloat16_bits(values) if job.bfloat16 else cast_elements(values, job.out.dtype)
    if isinstance(job.out, np.ndarray):
        job.out[...] = values
        return None
    return values


def submit(reader: Any, jobs: Sequence[ReadJob], fallback: Fallback) -> list[Any]:
    """Submit jobs together, so that those of arrays of one geometry are planned together.

    Parameters
    ----------
    reader : linumpy.gpu.Reader
        On the device of the outputs.
    jobs : sequence of ReadJob
        What to read.
    fallback : Fallback
        Reads what the reader does not take.
    """
    tickets: list[Any] = [None] * len(jobs)
    alike: dict[tuple[int, bool], list[int]] = {}
    for number, job in enumerate(jobs):
        if job.info.unsupported is not None:
            tickets[number] = fallback.submit(job)
        else:
            alike.setdefault((len(job.region), job.bfloat16), []).append(number)
    for chosen in alike.values():
        made: Sequence[Any]
        try:
            made = _submit_together(reader, [jobs[number] for number in chosen])
        except Exception:  # of one of them: the others are read nevertheless
            made = [_submit_alone(reader, jobs[number]) for number in chosen]
        for number, ticket in zip(chosen, made, strict=True):
            tickets[number] = ticket
    return tickets


def _submit_together(reader: Any, jobs: Sequence[ReadJob]) -> list[Any]:
    regions = np.array([job.region for job in jobs], np.int64)
    sources, outs = [job.info.source for job in jobs], [job.out for job in jobs]
    dtype = "bfloat16" if jobs[0].bfloat16 else None
    tickets: list[Any] = reader.submit_many(sources, regions, outs=outs, dtype=dtype)
    return tickets


def _submit_alone(reader: Any, job: ReadJob) -> Any:
    try:
        return _submit_together(reader, [job])[0]
    except Exception as error:
        return FailedTicket(error)
