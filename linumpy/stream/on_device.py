"""CuPy's streams and events as protocols, for type checks without CuPy; a context that makes a stream current."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Event(Protocol):
    """An event of CuPy or PyTorch."""

    def synchronize(self) -> None:
        """Wait until the work before the event is done."""


class CupyEvent(Event, Protocol):
    """An event that CuPy recorded."""

    @property
    def done(self) -> bool:
        """Whether the work before the event is done."""


class Stream(Protocol):
    """A stream of CuPy."""

    @property
    def ptr(self) -> int:
        """The stream's ``cudaStream_t``."""

    def record(self, event: CupyEvent) -> CupyEvent:
        """Record an event after the work that is queued."""

    def synchronize(self) -> None:
        """Wait until the work that is queued is done."""

    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> object: ...


class _OnStream:
    """Make a device CuPy's current device, and a stream CuPy's current stream, in a ``with`` block."""

    def __init__(self, stream: Stream, device_id: int | None) -> None:
        import cupy

        self._device, self._stream = cupy.cuda.Device(device_id), stream

    def __enter__(self) -> None:
        self._device.__enter__()
        self._stream.__enter__()

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)
        self._device.__exit__(*error)


def on_stream(stream: Stream | None, device_id: int | None) -> AbstractContextManager[None]:
    """Make a stream CuPy's current stream, on its device, in a ``with`` block; do nothing for None."""
    return nullcontext() if stream is None else _OnStream(stream, device_id)


def recorded(stream: Stream) -> CupyEvent:
    """Record a new event on a stream."""
    import cupy

    return stream.record(cupy.cuda.Event(disable_timing=True))
