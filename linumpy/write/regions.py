"""Check a region of an image and the voxels for it, and format regions for messages."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from linumpy.arrays import Array
from linumpy.device import is_device_array
from linumpy.plan.pyramid import Box
from linumpy.plan.region import RegionLike, normalize_region


def checked_block(
    region: RegionLike, block: Array | ArrayLike, shape: tuple[int, ...], dtype: np.dtype
) -> tuple[Box, Array]:
    """Check a region and its voxels; return the box of the region, and the voxels with all axes of the box.

    Errors are those of ``OmeZarrWriter.write``.
    """
    normalized = normalize_region(region, shape)
    box = tuple(slice(a, b) for a, b in zip(normalized.start, normalized.stop, strict=True))
    if not normalized.size:
        raise ValueError(f"region {normalized} of an image of shape {shape} has no voxels to write")
    voxels: Array = block if hasattr(block, "shape") and hasattr(block, "dtype") else np.asarray(block)  # type: ignore[assignment]
    if np.ma.is_masked(voxels):
        raise TypeError("the block has masked voxels, and files hold no masks: fill them first")
    if tuple(voxels.shape) != normalized.shape:
        raise ValueError(f"region {normalized} has shape {normalized.shape}, but the block has {tuple(voxels.shape)}")
    if np.dtype(voxels.dtype).newbyteorder("=") != dtype.newbyteorder("="):
        raise TypeError(f"the block is of {voxels.dtype}, the image of {dtype}: round and cast it first")
    if not all(normalized.kept):
        voxels = (voxels if is_device_array(voxels) else np.asarray(voxels)).reshape(normalized.box_shape)
    return box, voxels


def region_text(box: Box) -> str:
    """Return a box as messages show it, such as ``[0:64, 0:128]``."""
    return "[" + ", ".join(f"{b.start}:{b.stop}" for b in box) + "]"


def cut_refusal(region: str, unit: Box, stored: tuple[int, ...], kind: str) -> str:
    """Return the error message for a region that cuts `unit`, a ``"chunk"`` or ``"shard"`` (`kind`)."""
    return (
        f"region {region} cuts the {kind} {region_text(unit)}: write whole {kind}s of {stored} (only the end of the "
        f"image may be ragged), or buffer incomplete {kind}s in memory with buffer_bytes="
    )
