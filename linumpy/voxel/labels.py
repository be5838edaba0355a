"""Operations that SciPy and CuPy offer with the same signatures: holes by labels, distances.

In: a bool array and the ``ndimage`` module that takes it. Out: an array beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from linumpy.device import array_module
from linumpy.voxel.grid import XYZ


def fill_enclosed(mask: Any, ndimage: Any) -> Any:
    """Fill the parts of the background that do not reach the border of the volume (connected by faces)."""
    xp = array_module(mask)
    labels, count = ndimage.label(~mask)
    enclosed = xp.ones(int(count) + 1, bool)
    for axis in range(3):
        for side in (0, -1):
            enclosed[xp.take(labels, side, axis=axis).ravel()] = False
    enclosed[0] = True  # the mask itself
    return enclosed[labels]


def distances(mask: Any, pitch: XYZ, ndimage: Any) -> Any:
    """Return the distance to the nearest false voxel in µm; infinite where there is none."""
    xp = array_module(mask)
    if bool(mask.all()):
        return xp.full(mask.shape, np.inf)
    return ndimage.distance_transform_edt(mask, sampling=pitch[::-1])
