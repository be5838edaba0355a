"""What an image that is being written has: regions under way, chunks that are there, coarser ones yet to be made.

In: boxes that writers begin and end, from several threads. Out: what is left to make. Errors: ``ValueError`` where
regions meet, or come too late.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from linumpy.plan.pyramid import Box, Pyramid, split
from linumpy.write.cut_chunks import BufferFullError


class WriteState:
    """What is being written, what is there, and what is yet to be made of the coarser resolutions."""

    def __init__(self, pyramid: Pyramid) -> None:
        self.lock = threading.RLock()
        self._pyramid = pyramid
        self._idle = threading.Condition(self.lock)
        self._writes = 0
        self._open = self._failed = False
        levels = range(len(pyramid.shapes))
        self._busy = np.zeros(pyramid.grid(0), bool)
        self._there = [np.zeros(pyramid.grid(level), bool) for level in levels]
        self._touched = [np.zeros(pyramid.grid(level), bool) for level in levels]

    def open(self) -> None:
        """Take writes from now on."""
        with self.lock:
            self._open = True

    def close(self) -> None:
        """Take no more writes, and wait for those that other threads have begun."""
        with self._idle:
            self._open = False
            self._idle.wait_for(lambda: not self._writes)

    def check(self, path: Path) -> None:
        """Refuse to finish what lacks a region."""
        if self._failed:
            raise ValueError(f"{path}: a region could not be written and the error was passed over; nothing is left")

    @contextmanager
    def writing(self, whole: Box | None, box: Box, name: str) -> Iterator[None]:
        """Note that a region is being written: `whole` is the part that no other thread may write meanwhile."""
        with self.lock:
            if not self._open:
                raise ValueError(f"region {name} cannot be written: write inside the writer's `with` block")
            if self._busy[self._pyramid.units(0, box)].any():
                raise ValueError(f"region {name} shares a chunk with one that is being written by another thread")
            if whole is not None:
                self._busy[self._pyramid.units(0, whole)] = True
            self._writes += 1
            for level in range(1, len(self._there)):
                units = self._pyramid.touched(level, box)
                self._touched[level][units] = True
                self._there[level][units] = False
        try:
            yield
        except BufferFullError:
            raise  # before anything was written
        except BaseException:
            self._failed = True
            raise
        finally:
            with self._idle:
                if whole is not None:
                    self._busy[self._pyramid.units(0, whole)] = False
                self._writes -= 1
                self._idle.notify_all()

    def begin(self, unit: Box) -> None:
        """Note that a chunk or shard is being written that regions had cut."""
        self._busy[self._pyramid.units(0, unit)] = True

    def end(self, unit: Box) -> None:
        """Note that it is written."""
        with self.lock:
            self._busy[self._pyramid.units(0, unit)] = False

    def stored(self, level: int, box: Box) -> None:
        """Note that a box is in its files."""
        with self.lock:
            self._there[level][self._pyramid.units(level, box)] = True

    def is_stored(self, unit: Box) -> bool:
        """Say whether a chunk or shard of the finest resolution is in its file."""
        return bool(self._there[0][self._pyramid.units(0, unit)].all())

    def missing(self) -> tuple[int, int]:
        """Count the chunks or shards of the finest resolution that were not written, and all of them."""
        with self.lock:
            return int((~self._there[0]).sum()), self._there[0].size

    def to_make(self, level: int, nbytes: int) -> Iterator[Box]:
        """Yield what was touched and is not there, in boxes of as many stored objects as may be made at once."""
        step = self._pyramid.step(level - 1, nbytes, first=1)
        everything = tuple(map(slice, (0,) * len(step), self._pyramid.shapes[level - 1]))
        for finer in split(everything, step):
            box = self._pyramid.coarser(level - 1, finer)
            assert box is not None
            units = self._pyramid.units(level, box)
            missing = self._touched[level][units] & ~self._there[level][units]
            if missing.all():
                yield box
            elif missing.any():
                for index in np.argwhere(missing).tolist():
                    one = tuple(slice(u.start + i, u.start + i + 1) for u, i in zip(units, index, strict=True))
                    yield self._pyramid.voxels(level, one)
