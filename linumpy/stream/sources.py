"""Arrays that samples name, and reads of them.

A path and a level → :class:`~linumpy.stream.plan.ArrayInfo`, kept while the array's metadata files are the same.
Regions of arrays → a ticket each, in their order: of arrays that the reader takes the reader's, of others one with the
same methods, read by zarr-python in threads. An error is that of its job alone.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from linumpy.gpu.rounding import bfloat16_bits, cast_elements
from linumpy.io.zarr_mode import read_chunks_on_host
from linumpy.stream.alignment import is_own
from linumpy.stream.arguments import Box
from linumpy.stream.arrays import Key, located, open_info
from linumpy.stream.config import Config, Sample
from linumpy.stream.plan import ArrayInfo

log = logging.getLogger(__name__)


class Request(NamedTuple):
    """An array that a sample needs."""

    key: Key
    opened: Future[ArrayInfo] | ArrayInfo
    is_shared: bool = False  # it was asked for before


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

    def request(self, sample: Sample, folder: str) -> list[Request]:
        """Return the arrays of a sample, one for each part; those that are not open yet begin to be opened.

        Parameters
        ----------
        sample : Sample
            The sample.
        folder : str
            From where paths are that are not absolute.
        """
        try:
            return [self._get(key) for key in self._keys(sample, folder)]
        except Exception as error:
            failed: Future[ArrayInfo] = Future()
            failed.set_exception(error)
            return [Request(Key(sample.uri, sample.level), failed)]

    def _keys(self, sample: Sample, folder: str) -> list[Key]:
        keys = [Key(located(sample.uri, folder), sample.level, self._config.spacing, self._config.origin)]
        for part in sample.parts:
            if is_own(sample, part):
                keys.append(keys[0]._replace(level=part.level))
            else:
                keys.append(Key(located(part.uri or sample.uri, folder), part.level, part.spacing, part.origin))
        return keys

    def _get(self, key: Key) -> Request:
        with self._lock:
            found = self._kept.get(key)
            if isinstance(found, Future) and found.done():
                found = None if found.exception() else found.result()
                if found is not None:
                    self._kept[key] = found
            if found is not None:
                self._kept.move_to_end(key)
                self.hits += 1
                return Request(key, found, is_shared=True)
            self.misses += 1
            opened = self.pool.submit(open_info, key, self._config)
            self._keep(key, opened)
            return Request(key, opened)

    def _keep(self, key: Key, opened: Future[ArrayInfo] | ArrayInfo) -> None:
        self._kept[key] = opened
        self._kept.move_to_end(key)
        while len(self._kept) > self._config.n_zarrs_meta_cache:
            self._kept.popitem(last=False)

    def settled(self, requests: Sequence[Request], looked: dict[Key, ArrayInfo]) -> list[ArrayInfo]:
        """Wait for arrays, look at their metadata files, and open those again that were written anew meanwhile.

        Parameters
        ----------
        requests : sequence of Request
            What :meth:`request` returned.
        looked : dict
            Arrays that need not be looked at again; those that are looked at are added.
        """
        found = []
        for request in requests:
            info = looked.get(request.key)
            if info is None:
                info = looked[request.key] = self._settled(request)
            found.append(info)
        return found

    def _settled(self, request: Request) -> ArrayInfo:
        opened = request.opened
        try:
            info = opened if isinstance(opened, ArrayInfo) else opened.result()
            if info.holds:
                return info
        except Exception:
            if not request.is_shared:  # what was missing for an earlier sample may be there for this one
                raise
        info = open_info(request.key, self._config)
        with self._lock:
            self.misses += 1
            self._keep(request.key, info)
        return info

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        self._kept.clear()


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
