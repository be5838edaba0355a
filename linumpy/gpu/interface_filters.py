"""Find the surface of the tissue by a chain of array filters: SciPy's for NumPy, CuPy's for CuPy.

This is what :func:`linumpy.gpu.interface.find_tissue_interface` computes on the CPU, and what its kernels are compared
with. In: a volume and its depth axis. Out: for each A-line the voxel at which tissue begins.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from linumpy.device import array_module, is_device_array

#: Voxels that are worked on at once; the filters take about six times their bytes.
_BLOCK_VOXELS = 2**26


def interface_by_filters(
    vol: Any,
    s_xy: int = 15,
    s_z: float = 2,
    use_log: bool = True,
    order: int = 1,
    detect_cutting_errors: bool = False,
    depth_axis: int = -1,
) -> Any:
    """Find the surface; arguments and result are those of :func:`linumpy.gpu.interface.find_tissue_interface`."""
    xp, ndimage = array_module(vol), ndimage_module(vol)
    lines = xp.moveaxis(vol, depth_axis, -1)
    rows, columns, depth = lines.shape
    surface = xp.empty((rows, columns), np.int32)
    step = max(1, _BLOCK_VOXELS // (columns * depth))
    halo = s_xy  # lateral smoothing of a block needs its neighbours
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        low, high = max(0, begin - halo), min(rows, end + halo)
        values = intensities(xp, lines[low:high], use_log)
        smooth = ndimage.uniform_filter(values, (s_xy, s_xy, 1))[begin - low : end - low]
        profile = ndimage.gaussian_filter1d(smooth, s_z, axis=-1, order=order)
        surface[begin:end] = surface_of_profile(xp, profile, s_z, detect_cutting_errors)
    return surface


def intensities(xp: ModuleType, lines: Any, use_log: bool) -> Any:
    """Bring voxels to float32 and, if wanted, to their logarithm."""
    values = lines.astype(np.float32)
    if use_log:
        # A logarithm of 1 is 0: voxels that are not positive, NaN too, take part as nothing.
        values = xp.log(xp.where(values > 0, values, np.float32(1)))
    return values


def surface_of_profile(xp: ModuleType, profile: Any, s_z: float, cutting_errors: bool) -> Any:
    """Find the surface where the profile along the last axis is largest."""
    surface = profile.argmax(axis=-1)
    if cutting_errors:
        surface = xp.minimum(surface, xp.abs(profile).argmax(axis=-1))
    return xp.minimum(xp.ceil(surface + s_z / 2), profile.shape[-1] - 1).astype(np.int32)


def ndimage_module(vol: Any) -> ModuleType:
    """Return the ndimage package whose functions take `vol`."""
    if is_device_array(vol):
        import cupyx.scipy.ndimage as ndimage
    else:
        import scipy.ndimage as ndimage
    return ndimage
