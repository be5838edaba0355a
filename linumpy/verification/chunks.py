"""Read all chunks of the levels of an image: which cannot be read, which hold only zeros, which differ from a level.

Levels are read in *units*: a box of one level with all that lies below it in the finer levels, so that each chunk is
read once, while the coarser voxels are in memory, which it is compared with. Each unit is independent of others, which
workers and resumed runs use.

In: :class:`LevelPlan`. Out: :class:`LevelUnit` for each level. Memory: a few blocks of at most 32 MiB, on a device of
128 MiB, or of one stored object.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from linumpy.arrays import Array, array_module, to_host
from linumpy.device import usable_cores
from linumpy.errors import ChunkError, StorageRefusedError
from linumpy.gpu.read.reader import Reader
from linumpy.gpu.read.ticket import Ticket
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.pyramid import grown, split
from linumpy.verification.levels import Box, Comparison, Link, compare
from linumpy.verification.stored import Grid

#: Bytes of a block on the host and on a device, of the blocks that are read at a time, and of a unit.
_BLOCK_NBYTES, _DEVICE_BLOCK_NBYTES, _AHEAD_NBYTES, _UNIT_NBYTES = 32 * 2**20, 128 * 2**20, 2**29, 2**32
#: Compared coarse voxels are that far from each other, unless all are compared.
_STEP = 4
#: Fewest voxels of a chunk from which a smoothed level tells whether the chunk differs.
_MIN_COMPARED = 8

#: A chunk that cannot be read, why, and whether only the storage refused to give it.
Damage = tuple[tuple[int, ...], str, bool]


@dataclass(frozen=True, kw_only=True)
class LevelPlan:
    """A level to read.

    - `path`: of its array below the source.
    - `link`: how the next coarser level was made of this one; None for the coarsest, and for arrays without levels.
    """

    path: str
    layout: ArrayLayout
    grid: Grid
    link: Link | None = None


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A box of a level, and how many finer levels lie below it and are read with it.

    - `level`: index of the level of `box`, in voxels of it; it is compared with the coarser level, if that is linked.
    """

    level: int
    below: int
    box: Box


@dataclass(kw_only=True)
class LevelUnit:
    """What a unit found in a level; chunks are in the grid of the level.

    - `damaged`: chunks that cannot be read.
    - `zero`: chunks that hold only zeros.
    - `differ`: chunks that differ from the coarser level: voxels that differ, and voxels that were compared.
    - `nbytes`: decoded bytes that were read.
    """

    damaged: list[Damage] = field(default_factory=list)
    zero: list[tuple[int, ...]] = field(default_factory=list)
    differ: list[tuple[tuple[int, ...], int, int]] = field(default_factory=list)
    nbytes: int = 0


def units_of(levels: Sequence[LevelPlan]) -> list[Unit]:
    """Cut the levels of an image, finest first, into units."""
    units, top = list[Unit](), len(levels) - 1
    while top >= 0:
        below = 0
        while below < top and _is_aligned(levels[top - below - 1], levels[top - below]):
            below += 1
        # A unit holds at least one stored object of its level; where finer levels are then too much, fewer go together.
        while below and _unit_nbytes(levels, top, below, levels[top].layout.object_shape) > _UNIT_NBYTES:
            below -= 1
        step = grown(
            levels[top].layout.object_shape, levels[top].layout.shape,
            max(1, _unit_nbytes(levels, top, below, (1,) * levels[top].layout.rank)), _UNIT_NBYTES,
        )  # fmt: skip
        shape = levels[top].layout.shape
        if all(shape):
            whole = tuple(slice(0, n) for n in shape)
            boxes = split(whole, step) if levels[top].layout.lengths is None else [whole]
            units += [Unit(level=top, below=below, box=box) for box in boxes]
        top -= below + 1
    return units


def _is_aligned(fine: LevelPlan, coarse: LevelPlan) -> bool:
    """Return whether each stored object of a level covers whole stored objects of the finer level."""
    if fine.link is None or not fine.link.factors or fine.layout.lengths or coarse.layout.lengths:
        return False
    axes = zip(
        fine.link.factors, coarse.layout.object_shape, fine.layout.object_shape, fine.layout.shape,
        coarse.layout.shape, strict=True,
    )  # fmt: skip
    return all((f * c) % o == 0 or c >= m or o == 1 for f, c, o, n, m in axes)


def _unit_nbytes(levels: Sequence[LevelPlan], top: int, below: int, shape: Sequence[int]) -> int:
    """Count the bytes of a box of level `top` of this shape with all that lies below it."""
    size, nbytes = list(shape), math.prod(shape) * levels[top].layout.dtype.itemsize
    for level in range(top - 1, top - below - 1, -1):
        axes = zip(size, _factors(levels[level]), levels[level].layout.shape, strict=True)
        size = [min(n * f, extent) for n, f, extent in axes]
        nbytes += math.prod(size) * levels[level].layout.dtype.itemsize
    return nbytes


def _factors(plan: LevelPlan) -> tuple[int, ...]:
    """Return the voxels for a voxel of the coarser level along each axis; empty if that is not known."""
    return () if plan.link is None else plan.link.factors


@dataclass(eq=False)
class _Task:
    """A block that is read; its voxels remain while finer blocks are compared with them.

    - `users`: blocks that still need the voxels, itself among them.
    """

    level: int
    box: Box
    above: _Task | None
    ticket: Ticket
    buffer: np.ndarray | None
    partner: tuple[Box, Ticket] | None = None
    voxels: Array | None = None
    damaged: list[Damage] = field(default_factory=list)
    users: int = 1


class UnitReader:
    """Reads units of the levels of one image.

    - `thorough`: whether all coarse voxels are compared, not one of :data:`_STEP` along each axis.
    """

    def __init__(self, reader: Reader, levels: Sequence[LevelPlan], *, thorough: bool) -> None:
        self._reader, self._levels, self._thorough = reader, levels, thorough
        self._buffers = list[np.ndarray]()
        self._block_nbytes = _DEVICE_BLOCK_NBYTES if reader.on_device else _BLOCK_NBYTES

    def read(self, unit: Unit, progress: Callable[[int], object] = int) -> dict[int, LevelUnit]:
        """Read a unit; return what was found in each level."""
        found = {unit.level - n: LevelUnit() for n in range(unit.below + 1)}
        waiting, examined, ahead = deque[_Task](), deque[tuple[_Task, Future[LevelUnit]]](), 0
        threads = usable_cores()

        def finish() -> None:
            task, future = examined.popleft()
            result, into = future.result(), found[task.level]
            into.damaged += result.damaged
            into.zero += result.zero
            into.differ += result.differ
            into.nbytes += result.nbytes
            self._release(task)
            progress(result.nbytes)

        # The oldest block is awaited first: coarser blocks come before the finer ones that are compared with them.
        with ThreadPoolExecutor(threads, "linumpy-verify") as pool:
            for task in itertools.chain(self._tasks(unit), itertools.repeat(None)):
                if task is not None:
                    waiting.append(task)
                    ahead += self._nbytes(task)
                while waiting and (task is None or (ahead > _AHEAD_NBYTES and len(waiting) > 1)):
                    oldest = waiting.popleft()
                    ahead -= self._nbytes(oldest)
                    self._receive(oldest)
                    examined.append((oldest, self._examination(oldest, pool)))
                    while len(examined) > 2 * threads:
                        finish()
                if task is None:
                    break
            while examined:
                finish()
        return found

    def _examination(self, task: _Task, pool: ThreadPoolExecutor) -> Future[LevelUnit]:
        """Look at a block: in host memory in another thread, on a device on the stream of this thread."""
        if isinstance(task.voxels, np.ndarray):
            return pool.submit(self._examine, task)
        future = Future[LevelUnit]()
        future.set_result(self._examine(task))
        return future

    def _output(self, level: int, box: Box) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return an output in host memory that is used again and again, and its buffer; None for other outputs.

        The kernel takes longer to give new memory to a process than the core to fill it.
        """
        layout = self._levels[level].layout
        nbytes = math.prod(part.stop - part.start for part in box) * layout.dtype.itemsize
        if self._reader.on_device or not 2**20 <= nbytes <= _BLOCK_NBYTES:
            return None, None
        buffer = self._buffers.pop() if self._buffers else np.empty(_BLOCK_NBYTES, np.uint8)
        return buffer[:nbytes].view(layout.dtype).reshape([part.stop - part.start for part in box]), buffer

    def _release(self, task: _Task | None) -> None:
        """Give up a use of the voxels of a block, and of the coarser blocks that it was compared with."""
        while task is not None:
            task.users -= 1
            if task.users:
                return
            if task.buffer is not None:
                self._buffers.append(task.buffer)
            task.voxels = task.buffer = None
            task = task.above

    def _tasks(self, unit: Unit) -> Iterator[_Task]:
        for box in self._blocks(unit.level, unit.box):
            yield from self._descend(unit.level, box, None, unit.level - unit.below)

    def _descend(self, level: int, box: Box, above: _Task | None, last: int) -> Iterator[_Task]:
        """Yield the block of a box and, after each coarse block, the finer blocks that lie in it."""
        plan = self._levels[level]
        partner = None
        if above is None and plan.link is not None and plan.link.can_tell:
            partner = self._partner(level, box)
        output, buffer = self._output(level, box)
        task = _Task(level, box, above, self._reader.submit(plan.layout, box, out=output), buffer, partner)
        if above is not None:
            above.users += 1
        task.users += level > last  # until its finer blocks are submitted
        yield task
        if level > last:
            finer = self._levels[level - 1]
            inner = tuple(
                slice(b.start * f, n if b.stop == m else min(b.stop * f, n))
                for b, f, n, m in zip(box, _factors(finer), finer.layout.shape, plan.layout.shape, strict=True)
            )
            if all(part.stop > part.start for part in inner):
                for part in self._blocks(level - 1, inner):
                    yield from self._descend(level - 1, part, task, last)
            self._release(task)

    def _partner(self, level: int, box: Box) -> tuple[Box, Ticket] | None:
        """Read the voxels of the coarser level that a box is compared with."""
        factors, coarser = _factors(self._levels[level]), self._levels[level + 1].layout
        outer = tuple(
            slice(-(-b.start // f), min(b.stop // f, m)) for b, f, m in zip(box, factors, coarser.shape, strict=True)
        )
        if not all(part.stop > part.start for part in outer):
            return None
        return outer, self._reader.submit(coarser, outer)

    def _blocks(self, level: int, box: Box) -> Iterator[Box]:
        """Cut a box into boxes of whole stored objects."""
        layout, grid = self._levels[level].layout, self._levels[level].grid
        if layout.lengths is not None:
            for number in itertools.product(*map(range, grid.object_counts)):
                yield tuple(slice(int(b[n]), int(b[n + 1])) for b, n in zip(grid.objects, number, strict=True))
            return
        shape, itemsize = tuple(part.stop - part.start for part in box), layout.dtype.itemsize
        base = layout.object_shape
        if math.prod(base) * itemsize > self._block_nbytes:  # a large shard is read in parts
            base = layout.chunk_shape
        yield from split(box, grown(base, shape, itemsize, self._block_nbytes))

    def _nbytes(self, task: _Task) -> int:
        return math.prod(b.stop - b.start for b in task.box) * self._levels[task.level].layout.dtype.itemsize

    def _receive(self, task: _Task) -> None:
        """Wait for the voxels of a block; where a chunk cannot be read, find out which."""
        try:
            task.voxels = task.ticket.result()
        except ChunkError:
            task.voxels, task.damaged = self._one_by_one(task)

    def _examine(self, task: _Task) -> LevelUnit:
        """Look at the voxels of a block."""
        link, damaged = self._levels[task.level].link, {chunk for chunk, _, _ in task.damaged}
        differ = self._differing(task, link) if link is not None and link.can_tell else []
        return LevelUnit(
            damaged=task.damaged,
            zero=[chunk for chunk in self._zero_chunks(task) if chunk not in damaged],
            differ=[row for row in differ if row[0] not in damaged],
            nbytes=self._nbytes(task),
        )

    def _one_by_one(self, task: _Task) -> tuple[Array, list[Damage]]:
        """Read the chunks of a block each by itself; those that cannot be read are zeros."""
        plan, damaged = self._levels[task.level], list[Damage]()
        chunks = list(itertools.product(*(range(p.start, p.stop) for p in plan.grid.within(task.box))))
        boxes = [plan.grid.voxels(chunk) for chunk in chunks]
        tickets = [self._reader.submit(plan.layout, box) for box in boxes]
        voxels = None
        for chunk, box, ticket in zip(chunks, boxes, tickets, strict=True):
            try:
                part = ticket.result()
            except ChunkError as error:
                damaged.append((chunk, str(error), isinstance(error, StorageRefusedError)))
                continue
            if voxels is None:
                voxels = array_module(part).zeros([b.stop - b.start for b in task.box], part.dtype)
            voxels[_within(box, task.box)] = part
        if voxels is None:
            voxels = np.zeros([b.stop - b.start for b in task.box], plan.layout.dtype)
        return voxels, damaged

    def _zero_chunks(self, task: _Task) -> list[tuple[int, ...]]:
        """Return the chunks of a block that hold only zeros."""
        plan, voxels = self._levels[task.level], task.voxels
        assert voxels is not None
        chunks = plan.grid.within(task.box)
        if not isinstance(voxels, np.ndarray):
            zero = to_host(_zero_mask(voxels, [p.stop - p.start for p in chunks], plan.layout.chunk_shape))
            return [tuple(row) for row in (np.argwhere(zero) + [p.start for p in chunks]).tolist()]
        axes = zip(plan.grid.chunks, chunks, task.box, strict=True)
        firsts = voxels[np.ix_(*(bounds[p.start : p.stop] - b.start for bounds, p, b in axes))]
        # The first voxel tells most chunks, so that few are looked at.
        few = map(tuple, (np.argwhere(firsts == 0) + [p.start for p in chunks]).tolist())
        return [chunk for chunk in few if not voxels[_within(plan.grid.voxels(chunk), task.box)].any()]

    def _differing(self, task: _Task, link: Link) -> list[tuple[tuple[int, ...], int, int]]:
        """Return the chunks of a block that differ from the coarser level, with the voxels that differ and all."""
        try:
            coarse_box, coarse = self._coarse(task)
        except ChunkError:
            return []  # the coarser chunk is found by itself
        plan, fine = self._levels[task.level], task.voxels
        assert fine is not None
        if coarse is None or type(coarse) is not type(fine):
            return []
        steps = [1] * len(link.factors)
        if not self._thorough:
            axes = zip(plan.layout.chunk_shape, link.factors, strict=True)
            steps = [max(1, min(_STEP, c // f // 2)) for c, f in axes]
        compared = compare(link, fine, task.box, coarse, coarse_box, steps)
        return [] if compared is None else _chunks_that_differ(compared, plan.grid, link)

    def _coarse(self, task: _Task) -> tuple[Box, Array | None]:
        if task.above is not None:
            return task.above.box, task.above.voxels
        if task.partner is None:
            return (), None
        box, ticket = task.partner
        return box, ticket.result()


def _within(box: Box, outer: Box) -> Box:
    return tuple(slice(b.start - o.start, b.stop - o.start) for b, o in zip(box, outer, strict=True))


def _zero_mask(voxels: Array, counts: Sequence[int], chunk_shape: Sequence[int]) -> Array:
    """Return a mask of the chunks of a block that hold only zeros, computed where the block is."""
    xp = array_module(voxels)
    padded = [n * c for n, c in zip(counts, chunk_shape, strict=True)]
    if list(voxels.shape) != padded:
        whole = xp.zeros(padded, voxels.dtype)
        whole[tuple(slice(0, n) for n in voxels.shape)] = voxels
        voxels = whole
    parts = voxels.reshape([size for pair in zip(counts, chunk_shape, strict=True) for size in pair])
    return ~(parts != 0).any(axis=tuple(range(1, 2 * len(counts), 2)))


def _chunks_that_differ(compared: Comparison, grid: Grid, link: Link) -> list[tuple[tuple[int, ...], int, int]]:
    """Return the chunks with voxels that differ, how many differ, and how many were compared."""
    numbers = [np.searchsorted(b, places, "right") - 1 for b, places in zip(grid.chunks, compared.places, strict=True)]
    bounds = [np.concatenate([[0], np.flatnonzero(np.diff(n)) + 1, [len(n)]]) for n in numbers]
    if compared.differ is not None and not bool(compared.differ.any()):
        return []
    rows = []
    mean, coarse = (None, None) if compared.differ is not None else (to_host(compared.mean), to_host(compared.coarse))
    mask = None if compared.differ is None else to_host(compared.differ)
    for index in itertools.product(*(range(len(b) - 1) for b in bounds)):
        part = tuple(slice(int(b[i]), int(b[i + 1])) for b, i in zip(bounds, index, strict=True))
        chunk = tuple(int(n[p.start]) for n, p in zip(numbers, part, strict=True))
        size = math.prod(p.stop - p.start for p in part)
        if mask is not None:
            count = int(mask[part].sum())
        elif size < _MIN_COMPARED or mean is None or coarse is None:
            continue
        else:
            a, b = (np.nan_to_num(abs(image[part]).astype(np.float64)) for image in (mean, coarse))
            count = size if link.is_other(a, b) else 0
        if count:
            rows.append((chunk, count, size))
    return rows
