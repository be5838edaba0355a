"""How an image is continued beyond its ends, by SciPy's names of modes: which voxel stands for one outside."""

from __future__ import annotations

import numpy as np

#: Every mode; kernels number them in this order.
MODES = ("constant", "grid-constant", "nearest", "reflect", "mirror", "wrap", "grid-wrap")


def period(size: np.ndarray | int, mode: str) -> np.ndarray:
    """Return after how many voxels an image that is continued periodically repeats itself; at least 1.

    Parameters
    ----------
    size : numpy.ndarray of int, or int
        Voxels along the axis.
    mode : {"reflect", "mirror", "wrap", "grid-wrap"}
        How the image is continued.
    """
    size = np.asarray(size)
    periods = {"reflect": 2 * size, "mirror": 2 * size - 2, "wrap": size - 1, "grid-wrap": size}
    return np.maximum(1, periods[mode])


def fold(index: np.ndarray, size: np.ndarray | int, mode: str) -> np.ndarray:
    """Return the voxels that stand for `index`.

    Parameters
    ----------
    index : numpy.ndarray of int
        Voxels, inside or outside of the image.
    size : numpy.ndarray of int, or int
        Voxels along the axis, in a shape that broadcasts with that of `index`.
    mode : str
        One of :data:`MODES`.

    Returns
    -------
    numpy.ndarray of int
        From 0 to ``size - 1``; -1 for none, outside with ``"constant"`` and ``"grid-constant"``. With ``"wrap"``, where
        the last voxel coincides with the first one of the next period, always the first.
    """
    if mode == "nearest":
        return np.clip(index, 0, np.asarray(size) - 1)
    if mode in ("constant", "grid-constant"):
        return np.where((index >= 0) & (index < size), index, -1)
    turn = period(size, mode)
    inside = index % turn
    if mode == "reflect":
        return np.minimum(inside, turn - 1 - inside)
    return np.minimum(inside, turn - inside) if mode == "mirror" else inside
