"""Operations that all backends share, by ``ndimage`` of SciPy or CuPy: holes by labels, distances.

In: a bool array, and the ``ndimage`` module for the memory of the array. Out: an array in the same memory. On a device
both functions synchronise.
"""

from __future__ import annotations

from types import ModuleType
from typing import TypeVar

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.voxel.grid import XYZ

Mask = TypeVar("Mask", bound=Array)


def fill_enclosed(mask: Mask, ndimage: ModuleType) -> Mask:
    """Fill the connected parts (by faces) of the false voxels that do not touch the border of the volume."""
    xp = array_module(mask)
    labels, count = ndimage.label(~mask)
    enclosed = xp.ones(int(count) + 1, bool)
    for axis in range(3):
        for side in (0, -1):
            enclosed[xp.take(labels, side, axis=axis).ravel()] = False
    enclosed[0] = True  # label 0 is the mask itself
    filled: Mask = enclosed[labels]
    return filled


def distances(mask: Mask, pitch: XYZ, ndimage: ModuleType) -> Mask:
    """Return the distance of each voxel to the nearest false voxel in µm; infinite if all voxels are true."""
    xp = array_module(mask)
    if bool(mask.all()):
        infinite: Mask = xp.full(mask.shape, np.inf)
        return infinite
    result: Mask = ndimage.distance_transform_edt(mask, sampling=pitch[::-1])
    return result
