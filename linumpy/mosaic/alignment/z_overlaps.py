"""Search the number of planes that neighbouring slices share along Z, in a central window of their shared area.

In: slices and the motor's shifts. Out: a :class:`FoundOverlap` for each pair; :mod:`linumpy.mosaic.slices` replaces
outliers among them. Lateral registration is in ``register``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.errors import SourceError
from linumpy.mosaic.io.image import MosaicImage
from linumpy.mosaic.io.slice_table import Shift
from linumpy.mosaic.io.tiles import Box, read_box
from linumpy.mosaic.options import ZSearch
from linumpy.mosaic.stacking import best_overlap, candidate_overlaps
from linumpy.resample.tile_work import TileWork

#: Maximum bytes of the correlated voxels of each slice.
SEARCH_BYTES = 128 * 2**20


class FoundOverlap(NamedTuple):
    """The overlap of two neighbouring slices.

    - `overlap`: number of shared planes with the greatest correlation; negative where missing slices leave a gap.
    - `correlation`: the greatest correlation; NaN if nothing was searched.
    - `expected`: number of shared planes by the slicing interval.
    """

    overlap: int
    correlation: float
    expected: float


def search_overlaps(
    images: tuple[MosaicImage, ...], moves: Sequence[Shift], search: ZSearch, work: TileWork
) -> list[FoundOverlap]:
    """Search the overlap of each pair of neighbours.

    Slices with missing slices between them are placed by the interval, without a search: they may share no tissue.

    - `images`: the slices from the top down, with axes z, y, x.
    - `moves`: the motor's shift of each slice to the one above.
    - `work`: reads and correlates, here or on workers.

    Returns: One for each pair.

    Raises `SourceError`: two neighbours share no area. `ValueError`: an interval or a range that is no length; no
    overlap in range.
    """
    device = work.device
    pairs: dict[int, _Pair] = {}
    overlaps: dict[int, FoundOverlap] = {}
    for number, (pair, move) in enumerate(zip(itertools.pairwise(images), moves, strict=True)):
        cuts = move.moving_id - move.fixed_id
        if cuts == 1:
            pairs[number] = _pair(*pair, move, search)
        else:
            expected = pair[0].array.shape[0] - cuts * search.slicing_interval_mm * 1e3 / pair[0].spacing[0]
            planes = min(math.floor(expected + 0.5), *(image.array.shape[0] for image in pair))
            overlaps[number] = FoundOverlap(planes, math.nan, expected)

    def correlate(number: int, windows: tuple[Array, Array]) -> FoundOverlap:
        pair = pairs[number]
        voxels_measured = (pair.fixed.measured(pair.fixed_box), pair.moving.measured(pair.moving_box))
        masks = [None if voxels is None else voxels.mask(array_module(windows[0])) for voxels in voxels_measured]
        overlap, correlation = best_overlap(*windows, pair.overlaps, pair.expected, (masks[0], masks[1]))
        return FoundOverlap(overlap, correlation, pair.expected)

    def read(number: int) -> tuple[Array, Array]:
        pair = pairs[number]
        above = read_box(pair.fixed.array, pair.fixed_box, device)
        return above, read_box(pair.moving.array, pair.moving_box, device)

    work(list(pairs), read, correlate, overlaps.__setitem__)
    return [overlaps[number] for number in range(len(moves))]


@dataclass(frozen=True)
class _Pair:
    """Two neighbouring slices, the box of each that is correlated, and the overlaps to try, in planes."""

    fixed: MosaicImage
    moving: MosaicImage
    fixed_box: Box
    moving_box: Box
    overlaps: tuple[int, ...]
    expected: float


def _pair(fixed: MosaicImage, moving: MosaicImage, move: Shift, search: ZSearch) -> _Pair:
    """Plan the search of a pair: the boxes to correlate and the overlaps to try."""
    above, below = fixed.array.shape[0], moving.array.shape[0]
    overlaps, expected = candidate_overlaps(
        above, below, search.slicing_interval_mm, search.search_range_mm, fixed.spacing[0]
    )
    dy, dx = (math.floor(v + 0.5) for v in shift_in_voxels(fixed, move))
    max_voxels = max(1, SEARCH_BYTES // (overlaps[-1] * fixed.array.dtype.itemsize))
    fixed_window, moving_window = search_window(fixed.lateral_shape, moving.lateral_shape, (dy, dx), max_voxels)
    if any(extent.start >= extent.stop for extent in fixed_window):
        raise SourceError(
            f"slices {move.fixed_id} and {move.moving_id} share no area: shifted by {move.y_mm} and {move.x_mm} mm"
        )
    last, first = slice(above - overlaps[-1], above), slice(0, overlaps[-1])
    return _Pair(fixed, moving, (last, *fixed_window), (first, *moving_window), tuple(overlaps), expected)


def search_window(
    fixed: tuple[int, int], moving: tuple[int, int], step: tuple[int, int], max_voxels: int
) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Plan the window that is correlated: the central half of the shared area, cut to at most `max_voxels`.

    - `fixed`, `moving` (int, int): voxels of the slices along Y and X.
    - `step` (int, int): voxel p of the moving slice is at p + step of the fixed one.
    - `max_voxels`: maximum voxels of a plane of the window.

    Returns: The window in each slice; empty if the slices share no area.
    """
    begin = [max(0, s) for s in step]
    size = [max(0, min(f, m + s) - b) for f, m, s, b in zip(fixed, moving, step, begin, strict=True)]
    half = [(n + 1) // 2 for n in size]
    if half[0] * half[1] > max_voxels:
        short = min(*half, math.isqrt(max_voxels))
        half = [min(n, max_voxels // short if n == max(half) else short) for n in half]
        half = half if half[0] * half[1] <= max_voxels else [short, short]
    windows = []
    for shift in ((0, 0), step):
        low = [b + (n - h) // 2 - s for b, n, h, s in zip(begin, size, half, shift, strict=True)]
        windows.append((slice(low[0], low[0] + half[0]), slice(low[1], low[1] + half[1])))
    return windows[0], windows[1]


def shift_in_voxels(image: MosaicImage, move: Shift) -> tuple[float, float]:
    """Return a shift in voxels along Y and X."""
    return move.y_mm * 1e3 / image.spacing[1], move.x_mm * 1e3 / image.spacing[2]
