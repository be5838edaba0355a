"""The channels of an image: their names and settings in omero's metadata, and their voxels in one array.

In: omero's metadata, or volumes of an image. Out: settings, names, a NumPy array. Errors: those of
:func:`linumpy.read_zarr`, when voxels are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from linumpy.gpu.zarr_io import read_zarr
from linumpy.io.ngff.axes import mappings_in
from linumpy.io.volume import Volumes


def channel_settings(omero: object) -> list[Mapping[str, Any]]:
    """Return the settings of each channel in omero's metadata; an empty list without such metadata."""
    return mappings_in(omero, "channels") if isinstance(omero, Mapping) else []


def channel_names(omero: object) -> list[str]:
    """Return the names of the channels in omero's metadata; an empty list if one of the names is missing."""
    names = [channel.get("label") for channel in channel_settings(omero)]
    return [str(name) for name in names] if all(isinstance(name, str) for name in names) else []


def read_channels(volumes: Volumes, box: tuple[slice, ...], dtype: DTypeLike) -> np.ndarray:
    """Read a box of all volumes, which are the channels of one time, as (channel, z, y, x), or (channel, y, x)."""
    return np.stack(
        [
            read_zarr(volume.array, region=volume.region(box), dtype=dtype, device="cpu")
            for volume in volumes.volumes.values()
        ]
    )
