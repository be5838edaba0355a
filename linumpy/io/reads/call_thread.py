"""Calls that another thread carries out, one after another, and that no interrupt can lose.

A signal handler may raise between any two steps of Python code in the main thread. ``threading.Condition``, and with it
``concurrent.futures``, may then stay locked for ever, and nobody can tell whether a call was queued. The two threads
here share nothing but locks, lists and queues that are written in C, and use each by one step of the interpreter.

In: a :class:`Call`. Out: its result. Errors: those of the call; ``RuntimeError`` where the thread was ended.
"""

from __future__ import annotations

import atexit
import mmap
import queue
import resource
import threading
from collections.abc import Callable
from typing import Any

#: Bytes of a thread's stack at most, where the C library goes by the limit of the process; and what its start takes.
_MOST_STACK, _STARTED = 8 * 2**20, 2**20
#: Seconds after which who waits looks again: an interrupt may have come to who was to wake it up.
_LOOK_AGAIN = 0.1


def check_thread_memory() -> None:
    """Raise where a thread could be made, but would find no memory to begin.

    ``threading.Thread.start`` waits for ever for a thread that dies of that.

    Raises
    ------
    MemoryError
        There are less than some MiB left.
    """
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    stack = threading.stack_size() or (_MOST_STACK if limit < 0 else min(limit, _MOST_STACK))
    try:
        mmap.mmap(-1, stack + _STARTED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as error:
        raise MemoryError(f"no memory for a thread: {error.strerror}") from error


class Call:
    """A call of a function. To note its end allocates nothing, so that no lack of memory leaves who waits for it alone.

    Parameters
    ----------
    function : callable
        What to call. It and its arguments are let go when it has returned.
    *arguments
        What with.
    """

    __slots__ = ("_alive", "_call", "_ended", "_error", "_queued", "_result", "_running")

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = [(function, arguments)]
        self._queued: list[None] = []
        self._alive: threading.Lock | None = None  # of the thread, which holds it until its own end
        self._ended = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._running = threading.Lock()
        self._running.acquire()

    def put(self, calls: queue.SimpleQueue[Call | None], alive: threading.Lock) -> None:
        """Queue it for a thread, and note so in the same step."""
        self._alive = alive
        self._queued.extend(map(calls.put, (self,)))

    def carry_out(self) -> None:
        """Call the function; for the thread."""
        try:
            function, arguments = self._call.pop()
            self._result = function(*arguments)
        except BaseException as error:
            self._error = error
        self._ended = True
        self._running.release()

    def ended(self) -> bool:
        """Say whether the function has returned, or was never queued."""
        if self._ended or not self._queued:
            return True
        # The thread may have died of a lack of memory. An interrupt within Thread.is_alive() would count it as dead.
        return self._alive is not None and not self._alive.locked()

    def wait(self) -> BaseException | None:
        """Wait for the end, whatever interrupts come; return the last of them."""
        interrupt = None
        while True:
            try:
                while not self.ended():
                    if self._running.acquire(timeout=_LOOK_AGAIN):
                        self._running.release()
                return interrupt
            except BaseException as error:
                interrupt = error

    def result(self) -> Any:
        """Return what the function returned, or raise what it raised; only after its end."""
        if self._error is not None:
            raise self._error
        if not self._ended:
            raise RuntimeError("the thread that reads has ended")
        return self._result


class CallThread:
    """A thread that carries out calls. It is started at once, where an interrupt loses nothing.

    Parameters
    ----------
    name : str
        Of the thread.
    """

    def __init__(self, name: str) -> None:
        check_thread_memory()
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), False
        self._alive = threading.Lock()
        self._alive.acquire()
        # At the end of the interpreter the others are waited for before _end_all() could tell this one to end.
        self._thread = threading.Thread(target=_carry_out, args=(self._calls, self._alive), name=name, daemon=True)
        self._thread.start()
        _threads[self._thread] = self._calls

    def start(self, call: Call) -> None:
        """Queue a call.

        Raises
        ------
        RuntimeError
            The thread was ended.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed")
            call.put(self._calls, self._alive)

    def close(self) -> None:
        """Carry out what is queued, and end the thread."""
        with self._lock:
            self._closed = True
            self._calls.put(None)
        self._thread.join()

    def __del__(self) -> None:
        """End the thread when nobody can queue a call any more."""
        if hasattr(self, "_calls"):  # else an interrupt came before it was made
            self._calls.put(None)


_threads: dict[threading.Thread, queue.SimpleQueue[Call | None]] = {}


def _carry_out(calls: queue.SimpleQueue[Call | None], alive: threading.Lock) -> None:
    try:
        while (call := calls.get()) is not None:
            call.carry_out()
    finally:
        alive.release()
    _threads.pop(threading.current_thread(), None)


@atexit.register
def _end_all() -> None:
    """Wait for all calls: they may write into memory that the end of the interpreter frees."""
    for thread, calls in list(_threads.items()):
        calls.put(None)
        thread.join()
