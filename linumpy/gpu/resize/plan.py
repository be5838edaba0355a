"""Plan how an image is resized: the order of axes, their kernels and tiles.

In: shapes, dtypes and an :class:`~linumpy.gpu.resize.tables.AxisPlan` for each axis. Out: :class:`Step` records, one
for each launch. Pure.

A pass resamples one axis, or X and Y at once, of the whole image. A group is `outputs` neighbouring voxels of the
result along an axis, which one thread computes; a pack is the elements of one load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linumpy.gpu.resize.tables import AxisPlan, Windows, join, unchanged, windows_of

_THREADS = 256
_MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True)
class ResizeTuning:
    """Parameters that affect speed only.

    `outputs`: voxels of a group: neighbours along an axis that a thread computes; a power of 2. `pack_bytes`,
    `pack_most`: size of one load in bytes, and its maximum number of elements. `unroll`: loads in flight in a thread.
    `blocks`: blocks on a multiprocessor, which bounds registers; half as many in double precision. `shared`: maximum
    shared memory of a tile, in bytes.
    """

    outputs: int = 4
    pack_bytes: int = 16
    pack_most: int = 4
    unroll: int = 4
    blocks: int = 4
    shared: int = 36 * 1024

    def pack(self, itemsize: int) -> int:
        """Return the number of elements of one load."""
        return max(1, min(self.pack_most, self.pack_bytes // itemsize))


@dataclass(frozen=True)
class Tile:
    """Tiles of the kernel ``planes``.

    `width`, `groups`: columns of the result in a tile, and groups of its rows. `pitch`: elements from row to row of the
    tile in shared memory. `spans` (int, int): first column of the image, and number of columns, that each tile along X
    needs.
    """

    width: int
    groups: int
    pitch: int
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Step:
    """One launch.

    `kernel`: ``"planes"``, ``"along"`` or ``"along_x"``. `source`, `compute`, `target`: data types of input, sums and
    output. `axes`: Y and X for ``"planes"``, else one axis. `outer`, `inner`: number of elements along all axes before,
    and along all axes after those in `axes`. `packed`: whether rows are aligned, so that threads load packs. `tile`:
    the tiles of ``"planes"``; None for the other kernels. `blocks`, `shared`: blocks of the launch, and their shared
    memory in bytes.
    """

    kernel: str
    source: np.dtype
    compute: np.dtype
    target: np.dtype
    shape: tuple[int, ...]
    axes: tuple[AxisPlan, ...]
    outer: int
    inner: int
    packed: bool
    tile: Tile | None
    blocks: int
    shared: int


def in_tile(column: int) -> int:
    """Return a column's index in a row of the tile, as ``in_tile`` of resize.cu."""
    return column + (column >> 5)


def order_axes(
    shape: Sequence[int], output_shape: Sequence[int], changed: Sequence[int], sizes: Sequence[int]
) -> list[tuple[int, ...]]:
    """Plan which axes are resampled together, and in which order, to move the fewest bytes.

    Axes that shrink most come first. The last two axes are resampled together if that moves fewer bytes.

    `shape`, `output_shape`: of the image and of the result. `sizes`: bytes of an element of the image, of results
    between passes, and of the result.

    Returns: The axes of each pass.
    """
    rank = len(shape)
    last = (rank - 2, rank - 1)
    candidates: list[list[tuple[int, ...]]] = [[(axis,) for axis in changed]]
    if set(last) <= set(changed):
        candidates.insert(0, [last, *((axis,) for axis in changed if axis not in last)])
    growth = [m / n for n, m in zip(shape, output_shape, strict=True)]
    ordered = [
        sorted(passes, key=lambda axes: (math.prod(growth[axis] for axis in axes), axes)) for passes in candidates
    ]
    return min(ordered, key=lambda passes: bytes_moved(shape, output_shape, passes, sizes))


def bytes_moved(
    shape: Sequence[int], output_shape: Sequence[int], passes: Sequence[Sequence[int]], sizes: Sequence[int]
) -> int:
    """Count the bytes that passes read and write."""
    current = list(shape)
    total = 0
    for number, axes in enumerate(passes):
        total += math.prod(current) * (sizes[0] if number == 0 else sizes[1])
        for axis in axes:
            current[axis] = output_shape[axis]
        total += math.prod(current) * (sizes[2] if number == len(passes) - 1 else sizes[1])
    return total


def plan_steps(
    axes: Sequence[AxisPlan], dtypes: Sequence[np.dtype], aligned: bool, tuning: ResizeTuning
) -> tuple[Step, ...]:
    """Plan the launches that resize a C-contiguous image.

    `axes`: one for each axis; unchanged axes have no pass. `dtypes`: of the image, of sums and results between passes,
    and of the result. `aligned`: whether the image begins at a multiple of 16 bytes. `tuning`: parameters that affect
    speed only.

    Returns: Empty where no axis changes.
    """
    shape = [plan.size for plan in axes]
    changed = [axis for axis, plan in enumerate(axes) if plan != unchanged(plan.size)]
    # A block is resampled in the order of the whole image, so that its voxels are the same bit for bit.
    whole_shapes = [plan.whole[0] for plan in axes], [plan.whole[1] for plan in axes]
    passes = order_axes(*whole_shapes, changed, [dtype.itemsize for dtype in dtypes])
    steps: list[Step] = []
    while passes:
        current, passes = passes[0], passes[1:]
        source = dtypes[1] if steps else dtypes[0]
        target = dtypes[1] if passes else dtypes[2]
        step = _plan_step(axes, shape, current, (source, dtypes[1], target), aligned or bool(steps), tuning)
        if step is None:  # resample the two axes one after the other
            passes = [(current[0],), (current[1],), *passes]
            continue
        steps.append(step)
        for axis in current:
            shape[axis] = axes[axis].length
    return tuple(steps)


def _plan_step(
    axes: Sequence[AxisPlan],
    shape: Sequence[int],
    resampled: Sequence[int],
    dtypes: tuple[np.dtype, np.dtype, np.dtype],
    aligned: bool,
    tuning: ResizeTuning,
) -> Step | None:
    """Plan one pass; None if both axes cannot be resampled at once, because no tile fits or there are too many."""
    source, compute, _ = dtypes
    rank, axis = len(shape), resampled[-1]
    result = tuple(axes[a].length if a in resampled else n for a, n in enumerate(shape))
    pack = tuning.pack(source.itemsize)
    if axis < rank - 1:
        outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        packed = aligned and inner % pack == 0
        threads = outer * -(-axes[axis].length // tuning.outputs) * (inner // pack if packed else inner)
        blocks = -(-threads // _THREADS)
        return Step("along", *dtypes, result, (axes[axis],), outer, inner, packed, None, blocks, 0)
    x = axes[axis]
    rows = shape[-2] if rank > 1 else 1
    y = axes[resampled[0]] if len(resampled) == 2 else unchanged(rows)
    packed = aligned and x.size % pack == 0
    tile = plan_tile(y, x, pack if packed else 1, compute.itemsize, tuning)
    outer = math.prod(shape[:-2])
    if tile is not None:
        blocks = outer * len(tile.spans) * -(-y.length // (tile.groups * tuning.outputs))
        if blocks <= _MAX_BLOCKS:
            shared = tile.groups * tuning.outputs * tile.pitch * compute.itemsize
            return Step("planes", *dtypes, result, (y, x), outer, 1, packed, tile, blocks, shared)
    if len(resampled) == 2:
        return None
    outer *= rows
    return Step("along_x", *dtypes, result, (x,), outer, 1, False, None, -(-outer * x.length // _THREADS), 0)


def plan_tile(y: AxisPlan, x: AxisPlan, pack: int, itemsize: int, tuning: ResizeTuning) -> Tile | None:
    """Plan the tiles of a plane that cost the fewest loads.

    The cost adds the loads of all threads, idle ones included, and the packs that each tile needs. The needs of
    neighbouring tiles overlap, which makes small tiles expensive.

    `itemsize`: bytes of an element of the tile.

    Returns: None where no tile fits shared memory.
    """
    groups = join(windows_of(y), tuning.outputs)
    best, min_loads = None, math.inf
    heights = sorted({min(len(groups.first), height) for height in (1, 2, 3, 4, 6, 8, 12, 16)})
    for width in _widths(x.length):
        spans = column_spans(windows_of(x), width, pack)
        columns = max(count for _, count in spans)
        pitch = in_tile(columns - 1) + 1
        for height in heights:
            if height * tuning.outputs * pitch * itemsize > tuning.shared:
                break
            packs = columns // pack
            slots = -(-packs * height // _THREADS) * _THREADS
            tops = np.arange(0, len(groups.first), height)
            rows = np.maximum.reduceat(groups.first + groups.count, tops) - np.minimum.reduceat(groups.first, tops)
            loads = len(spans) * len(tops) * (slots * float(groups.count.mean()) + packs * float(rows.mean()))
            if loads < min_loads:
                best, min_loads = Tile(width, height, pitch, spans), loads
    return best


def _widths(length: int) -> list[int]:
    """List widths of tiles to try: even shares of a row, rounded up to 8 columns, and powers of 2."""
    widths = {min(length, -(-length // (8 * tiles)) * 8) for tiles in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24)}
    return sorted(widths | {min(length, width) for width in (16, 32, 64, 128, 256, 512)}, reverse=True)


def column_spans(windows: Windows, width: int, pack: int) -> tuple[tuple[int, int], ...]:
    """Find the columns that tiles of `width` need: (first, count), in whole packs."""
    starts = np.arange(0, len(windows.first), width)
    first = np.minimum.reduceat(windows.first, starts) // pack * pack
    last = np.maximum.reduceat(windows.first + windows.count, starts)
    count = -(-(last - first) // pack) * pack
    return tuple((int(a), int(n)) for a, n in zip(first, count, strict=True))
