"""Process blocks in a pipeline: read block n + 1, compute block n and write block n - 1 at the same time.

About three blocks are in memory at a time, and on a device the stored bytes of some earlier blocks. Errors: the error
of the first step that failed, after the running steps of other blocks have ended.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from linumpy.arrays import DeviceName
from linumpy.device import require_cuda
from linumpy.io.zarr_mode import in_mode_of_caller
from linumpy.write.tasks import Finish
from linumpy.write.tasks import done as nothing

if TYPE_CHECKING:
    from cupy.cuda import Stream

Name = TypeVar("Name")
Source = TypeVar("Source")
Result = TypeVar("Result")

#: A point in a thread's work, which other work waits for: a CUDA event; None in host memory.
Mark = Any
#: Blocks whose files may be unfinished when the next block is computed.
_MAX_UNFINISHED = 2


def work_through(
    names: Iterable[Name],
    read: Callable[[Name], Source],
    compute: Callable[[Name, Source], Result],
    write: Callable[[Name, Result], Finish | None] = nothing,
    *,
    device: DeviceName = "cpu",
    done: Callable[[Name], object] = nothing,
) -> None:
    """Read, compute and write block after block; the three steps of different blocks overlap.

    While block k is computed, block k + 1 is read, and `write` takes block k - 1. So two buffers for results suffice;
    two buffers for sources suffice if `read` waits until the older source has been used. Files of some earlier blocks
    may be unfinished.

    - `names`: a name of each block, such as its box.
    - `read`: name → voxels, in a thread of its own.
    - `compute`: name, voxels → result, in the caller's thread, on a device on CuPy's current stream, where it may start
      work and return.
    - `write`: name, result → None, or a function that waits for the files, which the caller's thread calls. Called in a
      thread of its own, in order, when the work of `compute` on the device is complete. When `write` returns, the
      memory of the result may be reused; if it returns None, after the work that it has started on the device. By
      default nothing is written.
    - `device`: with ``"cuda"`` the threads use the caller's current CUDA device, with a stream for reads and one for
      writes.
    - `done`: called with the name of each written block, in the caller's thread.
    """
    ordering = _DeviceOrdering() if device == "cuda" else _HostOrdering()
    waiting = iter(names)
    reads: deque[tuple[Name, Future[tuple[Source, Mark]]]] = deque()
    writes: deque[tuple[Name, Future[Finish | None]]] = deque()
    unfinished: deque[tuple[Name, Finish]] = deque()

    def read_one(name: Name) -> tuple[Source, Mark]:
        with ordering.reading():
            return read(name), ordering.mark()

    def write_one(name: Name, source: list[Source], result: Result, computed: Mark) -> Finish | None:
        with ordering.writing():
            ordering.wait_for(computed)
            # If the source were freed earlier, the next block could reuse memory that a kernel still reads.
            source.clear()
            finish = write(name, result)
            if finish is None:  # such as a sum to which `result` is added on the stream of this thread
                ordering.wait_for(ordering.mark())
            return finish

    with (
        closing(ordering),
        ThreadPoolExecutor(1, "linumpy-read", in_mode_of_caller()) as reader,
        ThreadPoolExecutor(1, "linumpy-write", in_mode_of_caller()) as writer,
    ):

        def read_next() -> None:
            for name in waiting:
                reads.append((name, reader.submit(read_one, name)))
                return

        def finish_writes(max_writes: int, max_unfinished: int) -> None:
            while len(writes) > max_writes:
                name, future = writes.popleft()
                unfinished.append((name, future.result() or nothing))
            while len(unfinished) > max_unfinished or (unfinished and unfinished[0][1] is nothing):
                name, finish = unfinished.popleft()
                finish()
                done(name)

        def step() -> None:  # a function, so that no variable keeps a block alive
            name, future = reads.popleft()
            source, read_done = future.result()
            read_next()
            finish_writes(1, _MAX_UNFINISHED)
            ordering.follow(read_done)
            result = compute(name, source)
            writes.append((name, writer.submit(write_one, name, [source], result, ordering.mark())))

        read_next()
        try:
            while reads:
                step()
            finish_writes(0, 0)
        except BaseException:
            with suppress(Exception):
                for name, finish in unfinished:  # complete blocks need not be made again
                    finish()
                    done(name)
            raise


class _HostOrdering:
    """Orders the steps in host memory, where the order of calls suffices."""

    def reading(self) -> AbstractContextManager[None]:
        return nullcontext()

    writing = reading

    def mark(self) -> Mark:
        """Return a mark after the work of this thread so far."""

    def follow(self, mark: Mark) -> None:
        """Order later work of this thread after the mark."""

    def wait_for(self, mark: Mark) -> None:
        """Block this thread until the work before the mark is complete."""

    def close(self) -> None:
        """Wait for all streams."""


class _DeviceOrdering(_HostOrdering):
    """Orders the steps on the caller's device by events: reads and writes each have a stream of their own."""

    def __init__(self) -> None:
        self._cupy = require_cuda()
        self._number = self._cupy.cuda.Device().id  # a new thread begins on device 0
        self._reads, self._writes = _streams(self._number)

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._cupy.cuda.Device(self._number), self._reads:
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._cupy.cuda.Device(self._number), self._writes:
            yield

    def mark(self) -> Mark:
        return self._cupy.cuda.get_current_stream().record()

    def follow(self, mark: Mark) -> None:
        self._cupy.cuda.get_current_stream().wait_event(mark)

    def wait_for(self, mark: Mark) -> None:
        mark.synchronize()

    def close(self) -> None:
        for stream in (self._cupy.cuda.get_current_stream(), self._reads, self._writes):
            stream.synchronize()


@functools.cache
def _streams(device: int) -> tuple[Stream, Stream]:
    """Return a device's two streams, always the same: CuPy's pool keeps freed memory for the stream that used it."""
    cupy = require_cuda()
    with cupy.cuda.Device(device):
        return cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
