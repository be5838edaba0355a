"""How an image is sampled, in numbers that kernels and plans share: boundaries, padding, smoothing, centred voxels.

Boundary modes are named as in SciPy: how a coordinate beyond the ends of an image maps to a voxel. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from linumpy.arrays import Array

#: Every mode; kernels number them in this order.
MODES = ("constant", "grid-constant", "nearest", "reflect", "mirror", "wrap", "grid-wrap")
#: Upper bound of the rounding error of a coordinate, in voxels.
ROUNDING = 1e-6
#: Voxels by which SciPy pads an image before it filters for mode "nearest".
SPLINE_PAD = 12
#: Standard deviations at which a Gaussian is cut, as in SciPy's gaussian_filter.
_TRUNCATE = 4.0


def snap_to_edges(coordinates: Array, size: int) -> None:
    """Move coordinates that are outside of an axis of `size` voxels by a rounding error to its edge, in place."""
    coordinates[(coordinates < 0) & (coordinates >= -ROUNDING)] = 0
    coordinates[(coordinates > size - 1) & (coordinates <= size - 1 + ROUNDING)] = size - 1


def period(size: np.ndarray | int, mode: str) -> np.ndarray:
    """Return the period, in voxels, at least 1, of an image that its boundary mode repeats."""
    size = np.asarray(size)
    periods = {"reflect": 2 * size, "mirror": 2 * size - 2, "wrap": size - 1, "grid-wrap": size}
    return np.maximum(1, periods[mode])


def fold(index: np.ndarray, size: np.ndarray | int, mode: str) -> np.ndarray:
    """Map indices beyond the ends of an axis of `size` voxels to voxels of the image.

    -1 stands for an index outside the image with ``"constant"`` and ``"grid-constant"``. With ``"wrap"`` the last voxel
    coincides with the first voxel of the next period and maps to 0.
    """
    if mode == "nearest":
        return np.clip(index, 0, np.asarray(size) - 1)
    if mode in ("constant", "grid-constant"):
        return np.where((index >= 0) & (index < size), index, -1)
    length = period(size, mode)
    inside = index % length
    if mode == "reflect":
        return np.minimum(inside, length - 1 - inside)
    return np.minimum(inside, length - inside) if mode == "mirror" else inside


def gaussian_radius(sigma: float) -> int:
    """Return the radius in voxels of a Gaussian of `sigma` voxels, as in SciPy."""
    return int(_TRUNCATE * sigma + 0.5) if sigma > 1e-15 else 0


def anti_aliasing_sigmas(matrix: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Compute the standard deviations, in voxels, of the Gaussian that smooths each axis of a source before sampling.

    (scale - 1) / 2, as in scikit-image's ``resize``, or 0 if the output is not coarser. The scale is the length of the
    axis's row of the matrix: how far one voxel of the output reaches along that axis of the source.
    """
    lengths = []
    for row in matrix:
        steps = [abs(m) for m in row if m]
        lengths.append(steps[0] if len(steps) == 1 else math.hypot(*steps))
    return tuple(max(0.0, (length - 1) / 2) for length in lengths)


def centred(old: float, new: float) -> tuple[float, float]:
    """Map voxels along one axis without changing the extent: the centre of new voxel i is at old factor × i + offset.

    `old`, `new`: voxels of the source and of the output; or spacings of the output and of the source. The offset takes
    one division, so that a coordinate of exactly 0 is not rounded below 0.
    """
    return old / new, (old - new) / (2 * new)
