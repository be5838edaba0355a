"""A file of raw voxels larger than memory: the type ``structuredRegular`` on the device ``out_of_core``.

In: a :class:`~linumpy.sampling.raw_voxels.RawFile`. Out: samples of the slabs in memory, values at any points. A slab
is a box of whole rows (along x), with the neighbouring voxels that interpolation needs. A fixed number of slabs is
sampled at a time. Each call requests the next slabs, which replace the oldest when the next call begins. Slabs come in
passes; each pass reads every slab once, in a new random order. Errors: a file that is too short when it is opened is a
:class:`ValueError`; the file is read by ``preadv``, so a file that becomes shorter later is an :class:`OSError`.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from linumpy.arrays import Array
from linumpy.device import usable_cores
from linumpy.sampling.coordinates.generator import Use, numbers
from linumpy.sampling.field import Field
from linumpy.sampling.host import along, linear, normalised
from linumpy.sampling.raw_voxels import RawFile
from linumpy.sampling.threads import in_threads

#: Approximate size of a slab in the file.
_SLAB_NBYTES = 8 * 2**20
#: If two planes exceed the size of a slab, a slab is a part of the rows of so many planes.
_PLANES = 16


@dataclass(frozen=True)
class SlabPlan:
    """The slabs of a volume: `z` × `y` boxes of whole rows. They divide the unit cube into equal parts."""

    dims: tuple[int, int, int]  # voxels along z, y and x
    #: Number of slabs along each axis.
    z: int
    y: int

    @property
    def count(self) -> int:
        """Number of slabs."""
        return self.z * self.y

    def box(self, number: int) -> tuple[slice, slice]:
        """Return the planes (along z) and the rows (along y) that interpolation in a slab needs."""
        z, y = divmod(number, self.y)
        return _needed(z, self.z, self.dims[0]), _needed(y, self.y, self.dims[1])

    def of(self, coords: Array) -> np.ndarray:
        """Return the number of the slab that contains each point."""
        number = np.zeros(len(coords), np.int64)
        for column, n in ((2, self.z), (1, self.y)):
            index = np.floor(np.nan_to_num(coords[:, column].astype(np.float64)) * n)
            number = number * n + np.clip(index, 0, n - 1).astype(np.int64)
        return number


def _needed(k: int, n: int, size: int) -> slice:
    """Return the voxels along an axis of `size` voxels that float32 points in part `k` of `n` equal parts need."""
    low, high = k / n * size - 0.5, (k + 1) / n * size - 0.5
    slack = 1e-6 * size
    first = max(0, min(size - 1, math.floor(low - slack)))
    return slice(first, max(first, min(size - 1, math.floor(high + slack) + 1)) + 1)


def plan_slabs(shape: tuple[int, int, int, int], itemsize: int, nbytes: int = _SLAB_NBYTES) -> SlabPlan:
    """Plan slabs of about `nbytes` bytes of a volume (C, Z, Y, X); a volume of one plane is one slab."""
    channels, z, y, x = shape
    plane = channels * y * x * itemsize
    if plane * 2 <= nbytes or z == 1:
        return SlabPlan((z, y, x), min(z, max(1, math.ceil(z * plane / nbytes))), 1)
    planes = min(_PLANES, z)
    rows = max(1, nbytes // (planes * channels * x * itemsize))
    return SlabPlan((z, y, x), math.ceil(z / planes), math.ceil(y / rows))


def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(usable_cores(), thread_name_prefix="linumpy-slabs")


def _take(voxels: np.ndarray, index: np.ndarray, offset: int) -> np.ndarray:
    return voxels[offset:].take(index)


@dataclass(frozen=True)
class _HeldSlab:
    """A slab in memory."""

    number: int
    first: tuple[int, int]  # plane and row of the volume
    voxels: np.ndarray  # (C, planes, rows, X), float32 in 0 to 1


class SlabVolume(Field):
    """A field whose samples come from the slabs in memory.

    `slabs` are in memory, of which `replaced` are replaced after each batch; `key` shuffles them. The range `low_high`
    is mapped to 0 to 1. `slab_nbytes` is the approximate size of a slab in the file.
    """

    orders = ("iid", "binned")
    has_own_order = True

    def __init__(
        self,
        source: RawFile,
        low_high: tuple[float, float],
        *,
        slabs: int,
        replaced: int,
        key: tuple[int, int],
        slab_nbytes: int = _SLAB_NBYTES,
    ) -> None:
        if not 1 <= replaced <= slabs:
            raise ValueError(f"{replaced} of {slabs} slabs replaced after each batch: give 1 to {slabs}")
        self._source, self._low_high, self._key = source, low_high, key
        self.n_channels = source.shape[0]
        self.value_range = (0.0, 1.0)
        self.plan = plan_slabs(source.shape, source.dtype.itemsize, slab_nbytes)
        self.held, self.replaced = min(slabs, self.plan.count), min(replaced, self.plan.count)
        self._file = os.open(source.filename, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        source.check_size(os.fstat(self._file).st_size)
        self._pool, self._process = _readers(), os.getpid()
        self._taken = 0  # number of slabs of the random order that were requested
        self._turn: tuple[int, np.ndarray] | None = None  # number of the pass over all slabs, and their order
        self._coming: list[Future[_HeldSlab]] = []
        self._slabs: list[_HeldSlab] = []
        self._lock = threading.Lock()

    def sample(self, key: tuple[int, int], first: int, coords: Array, out: Array) -> None:
        """Draw points uniformly in the slabs in memory and evaluate them; then request the slabs of the next batch."""
        self._batch(key, first, coords, out, in_order=False)

    def sample_in_order(self, key: tuple[int, int], first: int, coords: Array, out: Array) -> None:
        """Draw as :meth:`sample` does, but return the samples of one slab after another."""
        self._batch(key, first, coords, out, in_order=True)

    def decode(self, coords: Array, out: Array) -> None:
        """Evaluate at any points; slabs that are not in memory are read for this call only."""
        with self._lock:
            in_memory = {slab.number: slab for slab in self._slabs}
            slab_of = self.plan.of(coords)
            order = np.argsort(slab_of, kind="stable")
            needed, starts = np.unique(slab_of[order], return_index=True)
            parts = np.split(order, starts[1:]) if len(needed) else []
            for number, part in zip(needed.tolist(), parts, strict=True):
                slab = in_memory.get(number) or self._read(number)
                values = np.empty((self.n_channels, len(part)), np.float32)
                self._evaluate(slab, coords[part], values)
                out[:, part] = values

    def _batch(self, key: tuple[int, int], first: int, coords: Array, out: Array, in_order: bool) -> None:
        with self._lock:
            self._receive()
            count, held = len(coords), len(self._slabs)
            chosen = np.empty(count, np.int32)

            def choose(begin: int, end: int) -> None:
                index = np.arange(first + begin, first + end, dtype=np.uint64)
                chosen[begin:end] = numbers(index, Use.CELL, key)[0] * np.uint64(held) >> np.uint64(32)

            in_threads(choose, count)
            counts = np.bincount(chosen, minlength=held)
            ends = np.cumsum(counts)
            order = None if in_order else np.argsort(chosen, kind="stable")
            for slab, begin, end in zip(self._slabs, ends - counts, ends, strict=True):
                self._fill(slab, key, first, coords, out, slice(begin, end), order)
            if self.held < self.plan.count:  # else all slabs are in memory
                self._submit(self.replaced)

    def _fill(
        self,
        slab: _HeldSlab,
        key: tuple[int, int],
        first: int,
        coords: Array,
        out: Array,
        span: slice,
        order: np.ndarray | None,
    ) -> None:
        z, y = divmod(slab.number, self.plan.y)

        def part(begin: int, end: int) -> None:
            samples = slice(span.start + begin, span.start + end)
            index = np.arange(samples.start, samples.stop) if order is None else order[samples]
            rows = samples if order is None else index
            words = numbers(index.astype(np.uint64) + np.uint64(first), Use.WEIGHTED, key)
            points = np.empty((len(index), 3), np.float32)
            points[:, 0] = (words[0] >> np.uint64(8)) * 2.0**-24
            points[:, 1] = (y + (words[1] + 0.5) * 2.0**-32) / self.plan.y
            points[:, 2] = (z + (words[2] + 0.5) * 2.0**-32) / self.plan.z
            values = np.empty((self.n_channels, len(index)), np.float32)
            self._values(slab, points, values)
            coords[rows] = points
            out[:, rows] = values

        in_threads(part, span.stop - span.start)

    def _evaluate(self, slab: _HeldSlab, coords: Array, out: Array) -> None:
        in_threads(lambda begin, end: self._values(slab, coords[begin:end], out[:, begin:end]), len(coords))

    def _values(self, slab: _HeldSlab, coords: Array, out: Array) -> None:
        _, planes, rows, columns = slab.voxels.shape
        positions = [along(coords[:, 2 - axis], size) for axis, size in enumerate(self.plan.dims)]
        positions[0] = (positions[0][0] - slab.first[0], positions[0][1])
        positions[1] = (positions[1][0] - slab.first[1], positions[1][1])
        for channel, values in zip(slab.voxels, out, strict=True):
            take = functools.partial(_take, channel.reshape(-1))
            values[...] = linear(take, positions, (planes, rows, columns))[0]

    def _receive(self) -> None:
        """Wait for the requested slabs, which replace the oldest slabs; the first call requests a full set."""
        if self._process != os.getpid():
            # Request the pending slabs again, from new threads: a forked child does not inherit its parent's threads.
            count, self._coming = len(self._coming), []
            self._pool, self._process = _readers(), os.getpid()
            self._taken -= count
            self._submit(count)
        if not self._slabs and not self._coming:
            self._submit(self.held)
        coming, self._coming = self._coming, []
        try:
            new = [slab.result() for slab in coming]
        except BaseException:
            # The next batch requests the same slabs again: a failed read must not remove slabs from a pass.
            self._taken -= len(coming)
            if self._slabs:
                self._submit(len(coming))
            raise
        self._slabs = (self._slabs + new)[-self.held :]

    def _submit(self, count: int) -> None:
        # The next pass may begin with slabs that are still in memory.
        in_memory = {slab.number: slab for slab in self._slabs}
        numbers_ahead = [self._number(self._taken + k) for k in range(count)]
        self._coming = [self._pool.submit(lambda n: in_memory.get(n) or self._read(n), n) for n in numbers_ahead]
        self._taken += count

    def _number(self, position: int) -> int:
        """Return the number of the slab at a position in the random order; a pass contains each slab once."""
        turn, index = divmod(position, self.plan.count)
        if self._turn is None or self._turn[0] != turn:
            words = numbers(np.arange(self.plan.count, dtype=np.uint64), Use.STRATA, self._key, turn)
            self._turn = turn, np.lexsort((words[1], words[0]))
        return int(self._turn[1][index])

    def _read(self, number: int) -> _HeldSlab:
        planes, rows = self.plan.box(number)
        channels, z, y, x = self._source.shape
        raw = np.empty((channels, planes.stop - planes.start, rows.stop - rows.start, x), self._source.dtype)
        row_nbytes = x * raw.itemsize
        for c in range(channels):
            if rows == slice(0, y):  # planes lie one after another
                self._pread(raw[c], ((c * z + planes.start) * y) * row_nbytes)
                continue
            for k in range(len(raw[c])):
                self._pread(raw[c, k], (((c * z + planes.start + k) * y) + rows.start) * row_nbytes)
        return _HeldSlab(number, (planes.start, rows.start), normalised(raw, self._low_high))

    def _pread(self, out: Array, offset: int) -> None:
        target = out.reshape(-1).view(np.uint8).data
        begin = self._source.offset + offset
        while len(target):
            count = os.preadv(self._file, [target], begin)
            if count == 0:
                raise OSError(errno.EIO, f"the file ends at byte {begin}, before its last voxel", self._source.filename)
            target, begin = target[count:], begin + count
