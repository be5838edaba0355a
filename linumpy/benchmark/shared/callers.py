"""Callers whose Python is busy while batches are read, such as by a training step, a logger or a plot."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from linumpy.benchmark.cases import Mark


@dataclass(frozen=True)
class Caller:
    """The work of a caller besides taking batches, in plain Python, which holds the interpreter's lock.

    The caller computes for `step_seconds` between two batches, and has `threads` further threads that never sleep. The
    mark is a rate (`least`, GiB/s) or, without one, the time of a batch (`batch_seconds`).
    """

    title: str
    step_seconds: float = 0.0
    threads: int = 0
    least: float = 0.0
    batch_seconds: float = 0.0

    def mark(self, nbytes: int) -> Mark:
        """Return the mark for a batch of `nbytes`."""
        if self.least:
            return Mark(self.least)
        label = f"GiB/s: {1e3 * self.batch_seconds:g} ms a batch"
        return Mark(round(nbytes / 2**30 / self.batch_seconds, 2), label=label)

    def step(self) -> None:
        """Compute for `step_seconds`, as a training step does."""
        end = time.perf_counter() + self.step_seconds
        while time.perf_counter() < end:
            pass

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Run the other threads during the ``with`` block."""
        stopped = False

        def spin() -> None:
            while not stopped:
                pass

        name = "linumpy-benchmark-busy"
        threads = [threading.Thread(target=spin, name=name, daemon=True) for _ in range(self.threads)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stopped = True
            for thread in threads:
                thread.join()


IDLE = Caller("an idle caller", least=15.0)
#: Marks are for W1a on an H200. A batch is read during a step, and a step takes longer than the read of a batch.
CALLERS = (
    IDLE,
    Caller("5 ms of Python a batch", 0.005, batch_seconds=0.0055),
    Caller("10 ms of Python a batch", 0.010, batch_seconds=0.0108),
    Caller("beside a busy thread of Python", threads=1, least=8.0),
    Caller("beside two such threads", threads=2, least=6.0),
)
