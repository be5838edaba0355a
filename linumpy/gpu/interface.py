"""Find the surface of the tissue in an OCT volume, where the volume is: CuPy in, CuPy out; NumPy in, NumPy out.

In: a volume and its depth axis. Out: for each A-line the voxel at which tissue begins.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from linumpy.device import array_module, is_device_array

#: Voxels that are worked on at once; the filters take about six times their bytes.
_BLOCK_VOXELS = 2**26


def find_tissue_interface(
    vol: Any,
    s_xy: int = 15,
    s_z: float = 2,
    use_log: bool = True,
    order: int = 1,
    detect_cutting_errors: bool = False,
    depth_axis: int = -1,
) -> Any:
    """Find for each A-line the voxel at which tissue begins.

    The volume is smoothed laterally and the derivative of a Gaussian is taken along depth; the surface is where
    intensity rises most.

    Parameters
    ----------
    vol : numpy.ndarray or cupy.ndarray, rank 3
        OCT intensity, of real numbers.
    s_xy : int
        Voxels along each lateral axis over which the mean is taken.
    s_z : float
        Standard deviation of the Gaussian along depth, in voxels.
    use_log : bool
        Whether to take the natural logarithm of positive voxels; the others become 0.
    order : int
        Of the derivative along depth.
    detect_cutting_errors : bool
        Whether an A-line whose strongest change, up or down, lies above the surface takes that instead.
    depth_axis : int
        Axis of depth.

    Returns
    -------
    numpy.ndarray or cupy.ndarray of int32, rank 2
        The lateral axes in their order; voxels along depth, ``ceil(argmax + s_z / 2)`` and at most the last one.

    Raises
    ------
    ValueError
        A volume that is not of rank 3 or is empty; an `s_xy` or `s_z` that cannot be; a `depth_axis` out of bounds.
    """
    if vol.ndim != 3 or not all(vol.shape):
        raise ValueError(f"a volume of shape {vol.shape} has no surface: three axes with voxels are needed")
    if not -3 <= depth_axis < 3:
        raise ValueError(f"depth_axis={depth_axis}: a volume has axes 0, 1 and 2")
    if s_xy < 1 or not s_z > 0:
        raise ValueError(f"s_xy={s_xy}, s_z={s_z}: at least 1 voxel and more than 0 are needed")
    xp, ndimage = array_module(vol), _ndimage(vol)
    lines = xp.moveaxis(vol, depth_axis, -1)
    rows, columns, depth = lines.shape
    surface = xp.empty((rows, columns), np.int32)
    step = max(1, _BLOCK_VOXELS // (columns * depth))
    halo = s_xy  # lateral smoothing of a block needs its neighbours
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        low, high = max(0, begin - halo), min(rows, end + halo)
        smooth = _smoothed(xp, ndimage, lines[low:high], s_xy, use_log)[begin - low : end - low]
        surface[begin:end] = _steepest(xp, ndimage, smooth, s_z, order, detect_cutting_errors)
    return surface


def _smoothed(xp: ModuleType, ndimage: ModuleType, lines: Any, s_xy: int, use_log: bool) -> Any:
    values = lines.astype(np.float32)
    if use_log:
        # A logarithm of 1 is 0: voxels that are not positive, NaN too, take part as nothing.
        values = xp.log(xp.where(values > 0, values, np.float32(1)))
    return ndimage.uniform_filter(values, (s_xy, s_xy, 1))


def _steepest(xp: ModuleType, ndimage: ModuleType, smooth: Any, s_z: float, order: int, cutting_errors: bool) -> Any:
    profile = ndimage.gaussian_filter1d(smooth, s_z, axis=-1, order=order)
    surface = profile.argmax(axis=-1)
    if cutting_errors:
        surface = xp.minimum(surface, xp.abs(profile).argmax(axis=-1))
    return xp.minimum(xp.ceil(surface + s_z / 2), smooth.shape[-1] - 1).astype(np.int32)


def _ndimage(vol: Any) -> ModuleType:
    if is_device_array(vol):
        import cupyx.scipy.ndimage as ndimage
    else:
        import scipy.ndimage as ndimage
    return ndimage
