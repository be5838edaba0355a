"""Regions of an image and the voxels that are written to them: checked, and named in messages."""

from __future__ import annotations

from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import is_device_array
from linumpy.plan.pyramid import Box
from linumpy.plan.region import normalize_region


def checked_block(region: Any, block: Any, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Box, Array]:
    """Return the box of a region of an image and the voxels for it; ``OmeZarrWriter.write`` names the errors."""
    wanted = normalize_region(region, shape)
    box = tuple(slice(a, b) for a, b in zip(wanted.start, wanted.stop, strict=True))
    if not wanted.size:
        raise ValueError(f"region {wanted} of an image of shape {shape} has no voxels to write")
    if not hasattr(block, "shape") or not hasattr(block, "dtype"):
        block = np.asarray(block)
    if np.ma.is_masked(block):
        raise TypeError("the block has masked voxels, and files hold no masks: fill them first")
    if tuple(block.shape) != wanted.shape:
        raise ValueError(f"region {wanted} has shape {wanted.shape}, but the block has {tuple(block.shape)}")
    if np.dtype(block.dtype).newbyteorder("=") != dtype.newbyteorder("="):
        raise TypeError(f"the block is of {block.dtype}, the image of {dtype}: round and cast it first")
    if not all(wanted.kept):
        block = (block if is_device_array(block) else np.asarray(block)).reshape(wanted.box_shape)
    return box, block


def region_text(box: Box) -> str:
    """Return a box as messages show it, such as ``[0:64, 0:128]``."""
    return "[" + ", ".join(f"{b.start}:{b.stop}" for b in box) + "]"
