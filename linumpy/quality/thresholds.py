"""Thresholds between two classes of intensities, by the methods of Otsu and of Li.

In: an array, on the host or the device. Out: a number; voxels above it are foreground. Results are those of
scikit-image. The threshold of equal values is their value.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module

#: Maximum range of integers up to which a histogram has a bin for each value.
_MAX_BINS = 2**20
#: Maximum number of iterations of Li's method.
_MAX_ROUNDS = 1000


def otsu_threshold(values: Array, bins: int = 256) -> float:
    """Return the threshold with the greatest variance between both classes (Otsu, 1979).

    - `values`: integers or floats of any shape; values that are not finite are left out.
    - `bins`: bins of the histogram of floats, and of integers whose range is 2**20 or more; otherwise each integer has
      a bin.

    The call waits for the device.
    """
    xp, finite = array_module(values), _finite(values)
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        return low
    if finite.dtype.kind in "iu" and high - low < _MAX_BINS:
        counts = xp.bincount((finite - finite.min()).astype(np.int64))
        centres = xp.arange(counts.size) + low
    else:
        counts, edges = xp.histogram(finite, bins, range=(low, high))
        centres = (edges[1:] + edges[:-1]) / 2
    counts = counts.astype(np.float64)
    below, above = xp.cumsum(counts), counts.sum() - xp.cumsum(counts)
    moment = xp.cumsum(counts * centres)
    mean_below = moment / xp.maximum(below, 1)
    mean_above = (moment[-1] - moment) / xp.maximum(above, 1)
    return float(centres[int((below * above * (mean_below - mean_above) ** 2)[:-1].argmax())])


def li_threshold(values: Array, tolerance: float | None = None) -> float:
    """Return the threshold of minimum cross entropy, by iteration from the mean (Li and Tam, 1998).

    - `values`: integers or floats of any shape; values that are not finite are left out.
    - `tolerance`: a smaller step ends the iteration; by default 0.5 for integers, and 1e-6 of the range for floats.

    Each step copies two numbers to the host, which waits for the device.
    """
    xp, finite = array_module(values), _finite(values)
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        return low
    shifted = finite.astype(np.float64) - low  # logarithms of means need values from 0 on
    if tolerance is None:
        tolerance = 0.5 if finite.dtype.kind in "iu" else 1e-6 * (high - low)
    total, count = float(shifted.sum()), shifted.size
    threshold = total / count
    for _ in range(_MAX_ROUNDS):
        above = shifted > threshold
        inside, number = float(xp.where(above, shifted, 0).sum()), int(above.sum())
        mean_above, mean_below = inside / max(number, 1), (total - inside) / max(count - number, 1)
        if mean_below == 0:
            break
        last, threshold = threshold, (mean_below - mean_above) / (np.log(mean_below) - np.log(mean_above))
        if abs(threshold - last) <= tolerance:
            break
    return float(threshold + low)


#: Functions of the thresholds, by the names that :func:`linumpy.quality.tissue.tissue_mask` takes.
METHODS: dict[str, Callable[[Array], float]] = {"otsu": otsu_threshold, "li": li_threshold}


def _finite(values: Array) -> Array:
    """Return the finite values as an array of one axis."""
    finite: Array
    if values.dtype.kind in "iu":
        finite = values.ravel()
    elif values.dtype.kind == "f":
        finite = values[array_module(values).isfinite(values)]
    else:
        raise TypeError(f"values of {values.dtype} have no threshold: pass integers or floats")
    if not finite.size:
        raise ValueError("there is no finite value: a threshold needs at least one")
    return finite
