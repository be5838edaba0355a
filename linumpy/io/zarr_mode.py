"""zarr's process-wide configuration: one thread at a time may count on it. And its event loop: waiting for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zarr
from zarr.core.sync import sync

# zarr keeps one configuration for the whole process: two threads must not put back each other's.
config_lock = threading.RLock()


@contextmanager
def host_zarr_context() -> Iterator[None]:
    """Make zarr work in host memory, and keep other threads from switching on its GPU mode meanwhile."""
    with config_lock, zarr.config.set({"buffer": "zarr.buffer.cpu.Buffer", "ndbuffer": "zarr.buffer.cpu.NDBuffer"}):
        yield


def wait_for_zarr(seconds: float = 30.0) -> None:
    """Wait until zarr has come to rest: when one chunk fails it raises, and goes on with the others behind its back."""

    async def others() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    sync(others())
