"""Percentiles of each plane, and the normalisation that maps two of them to 0 and 1.

In: volumes with depth first, on the host or a device. Out: percentiles; normalised volumes, in the memory of the input.
Volumes that do not fit into memory are counted in histograms, box by box. The bin of a voxel is the upper 16 bits of
the voxel as float32, mapped to an integer such that bins rise with the intensity. A bin is less than 0.8 % of the
intensity wide, and each integer up to 256 is the lower edge of a bin.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module

#: Bins of a histogram.
BINS = 2**16


def check_shares(low: float, high: float) -> None:
    """Check two percentiles: from 0 to 100, the lower one first."""
    if not 0 <= low < high <= 100:
        raise ValueError(f"low={low:g}, high={high:g}: pass two percentiles from 0 to 100, the lower one first")


def plane_percentiles(volume: Array, shares: tuple[float, float]) -> Array:
    """Return the percentiles `shares` of the finite voxels of each plane: float32, (2, Z).

    NaN for a plane without a finite voxel.
    """
    xp = array_module(volume)
    rows = xp.sort(_finite_or_nan(xp, volume).reshape((len(volume), -1)), axis=1)  # NaN comes last
    count = xp.isfinite(rows).sum(axis=1)
    results = []
    for share in shares:
        position = xp.maximum(count - 1, 0) * (share / 100)
        below = xp.floor(position).astype(np.int64)
        above = xp.minimum(below + 1, xp.maximum(count - 1, 0))
        first, second = (xp.take_along_axis(rows, index[:, None], 1)[:, 0] for index in (below, above))
        results.append(first + (second - first) * (position - below))
    return xp.stack(results).astype(np.float32)


def histograms(volume: Array) -> Array:
    """Count the finite voxels of each plane in bins: int64, (Z, BINS)."""
    xp = array_module(volume)
    rows = _finite_or_nan(xp, volume).reshape((len(volume), -1))
    bits = xp.ascontiguousarray(rows).view(np.uint32)
    ordered = xp.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)) >> 16
    plane = xp.arange(len(volume))[:, None] * BINS
    chosen = (ordered.astype(np.int64) + plane)[xp.isfinite(rows)]
    return xp.bincount(chosen, minlength=len(volume) * BINS).reshape(len(volume), BINS)


def histogram_percentiles(counts: np.ndarray, shares: tuple[float, float]) -> np.ndarray:
    """Return the percentiles `shares` of each histogram, interpolated linearly within a bin: float32, (2, Z).

    NaN for an empty histogram.
    """
    # The lower edge of each bin, and the upper edge of the last.
    ordered = np.minimum(np.arange(BINS + 1, dtype=np.uint64) << np.uint64(16), 2**32 - 1).astype(np.uint32)
    bits = np.where(ordered >> 31, ordered & np.uint32(2**31 - 1), ~ordered)
    edges = np.nan_to_num(bits.view(np.float32), nan=0.0, posinf=3.4e38, neginf=-3.4e38).astype(np.float64)
    cumulative = np.cumsum(counts, axis=1)
    results = np.full((2, len(counts)), np.nan, np.float32)
    for plane, row in enumerate(cumulative):
        if row[-1] == 0:
            continue
        for number, share in enumerate(shares):
            rank = share / 100 * (row[-1] - 1)
            index = int(np.searchsorted(row, rank, side="right"))
            before = row[index] - counts[plane, index]
            within = (rank - before) / counts[plane, index]
            results[number, plane] = edges[index] + within * (edges[index + 1] - edges[index])
    return results


def normalise(volume: Array, bounds: Array, *, clip: bool = True) -> Array:
    """Map two intensities of each plane to 0 and 1.

    - `volume` (Z, ...): intensities.
    - `bounds` (float32, (2, Z)): the intensities that become 0 and 1.
    - `clip`: whether results are clipped to 0 and 1.

    Returns: NaN where `volume` is NaN; 0 in a plane whose two intensities are equal or NaN.
    """
    xp = array_module(volume)
    low, high = (xp.asarray(bound).reshape(-1, *(1,) * (volume.ndim - 1)) for bound in bounds)
    has_range = high > low
    # In a plane without a range all finite voxels are divided by infinity, which gives 0.
    offset, width = xp.where(has_range, low, 0), xp.where(has_range, high - low, np.inf)
    result = (volume.astype(np.float32, copy=False) - offset) / width
    if clip:
        result = xp.clip(result, 0, 1)
    return result.astype(np.float32, copy=False)


def _finite_or_nan(xp: ModuleType, volume: Array) -> Array:
    """Return a volume as float32, with NaN in place of infinite voxels."""
    voxels = volume.astype(np.float32, copy=False)
    return voxels if volume.dtype.kind != "f" else xp.where(xp.isfinite(voxels), voxels, np.float32(np.nan))
