"""Write whole chunks of a resolution and the coarser chunks made from them; the state of an image that is written.

A *unit* is a stored object (chunk or shard); ``Pyramid.units`` maps a box of voxels to the grid of units. Threads may
write at the same time; ``ValueError`` for a region that shares a chunk with one that another thread is writing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from linumpy.arrays import Array
from linumpy.device import is_device_array, to_host
from linumpy.io.output.objects import Target
from linumpy.plan.pyramid import Box, Pyramid, shape_of, split, within
from linumpy.write.chunks import Chunks, read_back
from linumpy.write.pyramid import halve, halve_by_threads
from linumpy.write.regions import BufferFullError
from linumpy.write.tasks import Finish, finish_all


@dataclass(frozen=True)
class WriteReport:
    """What a writer has written. Chunks that are written again count again.

    - `decoded_nbytes`: bytes of the voxels that were written, of all resolutions.
    - `stored_nbytes`: bytes of the files of chunks and shards, of all resolutions.
    - `seconds`: duration of the ``with`` block; of a running block, the time since its beginning.
    - `why_host`: why the host encoded chunks of device arrays; empty if the device did, or if there were no device
      arrays.
    """

    decoded_nbytes: int
    stored_nbytes: int
    seconds: float
    why_host: str

    @property
    def ratio(self) -> float:
        """Decoded bytes per stored byte; infinite if nothing is stored, since all voxels are the fill value."""
        return self.decoded_nbytes / self.stored_nbytes if self.stored_nbytes else math.inf

    @property
    def rate(self) -> float:
        """Decoded bytes per second."""
        return self.decoded_nbytes / max(self.seconds, 1e-9)


class WriteState:
    """Running writes, stored chunks, and coarser chunks to make; thread-safe."""

    def __init__(self, pyramid: Pyramid) -> None:
        self.lock = threading.RLock()
        self.nbytes = 0  # of the stored voxels
        self._pyramid = pyramid
        self._idle = threading.Condition(self.lock)
        self._writes = 0
        self._open = self._failed = False
        levels = range(len(pyramid.shapes))
        self._busy = np.zeros(pyramid.grid(0), bool)
        self._stored = [np.zeros(pyramid.grid(level), bool) for level in levels]
        self._touched = [np.zeros(pyramid.grid(level), bool) for level in levels]

    def open(self) -> None:
        """Accept writes from now on; :meth:`writing` raises an error before."""
        with self.lock:
            self._open = True

    def close(self) -> None:
        """Refuse further writes, and wait until no write is running."""
        with self._idle:
            self._open = False
            self._idle.wait_for(lambda: not self._writes)

    def check(self, path: Target) -> None:
        """Raise an error if a write has failed: the image at `path` must not be finished."""
        if self._failed:
            raise ValueError(f"{path}: a region was not written, and its error was ignored; the image is removed")

    @contextmanager
    def writing(self, whole: Box | None, box: Box, name: str) -> Iterator[None]:
        """Mark a region as being written during the ``with`` block; another thread that needs its chunks gets an error.

        - `whole`: the whole chunks (or shards) of the region, which no other thread may touch; None if there are none.
        - `box`: the region, in voxels of the finest resolution.
        """
        with self.lock:
            if not self._open:
                raise ValueError(f"region {name} cannot be written: write inside the writer's `with` block")
            if self._busy[self._pyramid.units(0, box)].any():
                raise ValueError(f"region {name} shares a chunk with one that is being written by another thread")
            if whole is not None:
                self._busy[self._pyramid.units(0, whole)] = True
            self._writes += 1
            for level in range(1, len(self._stored)):
                units = self._pyramid.touched(level, box)
                self._touched[level][units] = True
                self._stored[level][units] = False
        try:
            yield
        except BufferFullError:
            raise  # nothing was written: the writer may go on
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
        """Mark a chunk (or shard) that several regions completed as being written; the caller holds :attr:`lock`."""
        self._busy[self._pyramid.units(0, unit)] = True

    def end(self, unit: Box) -> None:
        """Mark a chunk (or shard) as no longer being written, after :meth:`begin`."""
        with self.lock:
            self._busy[self._pyramid.units(0, unit)] = False

    def mark_stored(self, level: int, box: Box) -> None:
        """Mark a box of whole chunks (or shards) as stored."""
        with self.lock:
            self.nbytes += math.prod(shape_of(box)) * self._pyramid.itemsize
            self._stored[level][self._pyramid.units(level, box)] = True

    def is_stored(self, unit: Box) -> bool:
        """Return whether a chunk (or shard) of the finest resolution is stored."""
        return bool(self._stored[0][self._pyramid.units(0, unit)].all())

    def missing(self) -> tuple[int, int]:
        """Return how many chunks (or shards) of the finest resolution are not stored, and how many there are."""
        with self.lock:
            return int((~self._stored[0]).sum()), self._stored[0].size

    def to_make(self, level: int, nbytes: int) -> Iterator[Box]:
        """Yield boxes of coarser chunks (or shards) that written regions touch and that are not stored.

        A step of at most about `nbytes` of finer voxels is one box if all its chunks are missing, else a box for each.
        """
        step = self._pyramid.step(level - 1, nbytes, first=1)
        everything = tuple(map(slice, (0,) * len(step), self._pyramid.shapes[level - 1]))
        for finer in split(everything, step):
            box = self._pyramid.coarser(level - 1, finer)
            assert box is not None
            units = self._pyramid.units(level, box)
            missing = self._touched[level][units] & ~self._stored[level][units]
            if missing.all():
                yield box
            elif missing.any():
                for index in np.argwhere(missing).tolist():
                    unit = tuple(slice(u.start + i, u.start + i + 1) for u, i in zip(units, index, strict=True))
                    yield self._pyramid.voxels(level, unit)


class Levels:
    """The arrays of an image, finest first, while they are written."""

    def __init__(
        self,
        chunks: list[Chunks],
        pyramid: Pyramid,
        downsampling: str,
        state: WriteState,
        pool: ThreadPoolExecutor,
        threads: int,
    ) -> None:
        self._chunks = chunks
        self._pyramid, self._downsampling, self._state = pyramid, downsampling, state
        self._pool, self._threads = pool, threads

    def store(self, level: int, box: Box, block: Array) -> list[Finish]:
        """Start to write whole chunks, and all coarser chunks that are made from these chunks alone.

        Returns a function for each resolution, which waits until its chunks are stored.
        """
        finish = self._chunks[level].start(box, block)

        def wait_until_stored() -> None:
            finish()
            self._state.mark_stored(level, box)

        if level + 1 == len(self._chunks) or (coarser := self._pyramid.coarser(level, box)) is None:
            return [wait_until_stored]
        finer = within(self._pyramid.finer(level + 1, coarser), box)
        return [wait_until_stored, *self.store(level + 1, coarser, self._halved(level + 1, block[finer]))]

    def _halved(self, level: int, block: Array) -> Array:
        """Make the voxels of `level` from a block of the next finer resolution, on the host or device of the block."""
        factors = self._pyramid.factors(level)
        if is_device_array(block):
            return halve(block, self._downsampling, factors)
        return halve_by_threads(to_host(block), self._downsampling, self._pool, self._threads, factors)

    def make_shared(self, nbytes: int, *, on_device: bool) -> None:
        """Make the coarser chunks that several regions share, from stored finer chunks, at most `nbytes` at a time."""
        for level in range(1, len(self._chunks)):
            for box in self._state.to_make(level, nbytes):
                array = self._chunks[level - 1].array
                finer = read_back(array, self._pyramid.finer(level, box), on_device=on_device)
                finish_all(self.store(level, box, self._halved(level, finer)))
