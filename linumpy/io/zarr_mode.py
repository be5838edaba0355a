"""zarr's process-wide configuration: one thread at a time may count on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zarr

# zarr keeps one configuration for the whole process: two threads must not put back each other's.
config_lock = threading.RLock()


@contextmanager
def host_zarr_context() -> Iterator[None]:
    """Make zarr work in host memory, and keep other threads from switching on its GPU mode meanwhile."""
    with config_lock, zarr.config.set({"buffer": "zarr.buffer.cpu.Buffer", "ndbuffer": "zarr.buffer.cpu.NDBuffer"}):
        yield
