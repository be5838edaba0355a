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
    mask: Any = None,
) -> Any:
    """Find the surface; arguments and result are those of :func:`linumpy.gpu.interface.find_tissue_interface`.

    Parameters
    ----------
    mask : numpy.ndarray or cupy.ndarray of bool, optional
        Of the volume's shape, or of the shape of its lateral axes. Voxels outside take no part: means are taken over
        voxels inside; along an A-line, voxels outside repeat the last one inside above them (those above the first,
        the first), so that the edge of the mask is no edge of intensity; and the surface is looked for inside. An
        A-line without any voxel inside has -1.
    """
    xp, ndimage = array_module(vol), ndimage_module(vol)
    lines = xp.moveaxis(vol, depth_axis, -1)
    inside = None if mask is None else _inside(xp, mask, lines, depth_axis)
    rows, columns, depth = lines.shape
    surface = xp.empty((rows, columns), np.int32)
    step = max(1, _BLOCK_VOXELS // (columns * depth))
    halo = s_xy  # lateral smoothing of a block needs its neighbours
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        low, high = max(0, begin - halo), min(rows, end + halo)
        part = slice(begin - low, end - low)
        values = intensities(xp, lines[low:high], use_log)
        if inside is None:
            smooth = _lateral_mean(xp, ndimage, values, s_xy)[part]
        else:
            smooth = _mean_inside(xp, ndimage, values, inside[low:high], s_xy)[part]
        profile = ndimage.gaussian_filter1d(smooth, s_z, axis=-1, order=order)
        here = None if inside is None else inside[begin:end]
        surface[begin:end] = _surface_of_profile(xp, profile, s_z, detect_cutting_errors, here)
    return surface


def _inside(xp: ModuleType, mask: Any, lines: Any, depth_axis: int) -> Any:
    """Bring a mask to the axes of the A-lines."""
    if mask.ndim == 3:
        mask = xp.moveaxis(mask, depth_axis, -1)
    elif mask.shape == lines.shape[:2]:
        mask = xp.broadcast_to(mask[..., None], lines.shape)
    if mask.shape != lines.shape:
        raise ValueError(f"a mask of {mask.shape} does not fit: the shape of the volume or of its lateral axes does")
    return mask.astype(bool)


def _lateral_mean(xp: ModuleType, ndimage: ModuleType, values: Any, s_xy: int) -> Any:
    """Take the mean over s_xy × s_xy A-lines.

    SciPy's mean is a running sum, which one NaN or infinity spoils to the end of the line. Where there is one, each sum
    is taken by itself, as CuPy and the kernels do, so that only the means over that voxel are lost.
    """
    if xp is not np or np.isfinite(values).all():
        return ndimage.uniform_filter(values, (s_xy, s_xy, 1))
    with np.errstate(invalid="ignore"):
        for axis in (0, 1):
            values = ndimage.correlate1d(values, np.full(s_xy, 1 / s_xy), axis)
    return values


def _mean_inside(xp: ModuleType, ndimage: ModuleType, values: Any, inside: Any, s_xy: int) -> Any:
    """Take lateral means over voxels inside, and let them stand for those outside along each A-line."""
    share = _lateral_mean(xp, ndimage, inside.astype(np.float32), s_xy)
    # Where a mean is taken its own voxel counts, so that the share is no rounding error of nothing.
    mean = _lateral_mean(xp, ndimage, xp.where(inside, values, np.float32(0)), s_xy) / xp.where(inside, share, 1)
    first = inside.argmax(axis=-1)[..., None]
    held = xp.take_along_axis(mean, first, axis=-1)[..., 0]
    for z in range(mean.shape[-1]):
        held = xp.where(inside[..., z], mean[..., z], held)
        mean[..., z] = held
    return mean


def intensities(xp: ModuleType, lines: Any, use_log: bool) -> Any:
    """Bring voxels to float32 and, if wanted, to their logarithm."""
    with np.errstate(over="ignore"):
        values = lines.astype(np.float32)
    if use_log:
        # A logarithm of 1 is 0: voxels that are not positive, NaN too, take part as nothing.
        values = xp.log(xp.where(values > 0, values, np.float32(1)))
    return values


def _surface_of_profile(xp: ModuleType, profile: Any, s_z: float, cutting_errors: bool, inside: Any) -> Any:
    """Find the surface where the profile along the last axis is largest, inside if there is such a thing."""
    nothing = np.float32(-np.inf)
    known = ~xp.isnan(profile)  # what is no number is no rise, and no change
    if inside is not None:
        known &= inside
    rise = xp.where(known, profile, nothing)
    surface = rise.argmax(axis=-1)
    if cutting_errors:
        change = xp.where(known, xp.abs(profile), nothing)
        surface = xp.minimum(surface, change.argmax(axis=-1))
    surface = xp.minimum(xp.ceil(surface + s_z / 2), profile.shape[-1] - 1).astype(np.int32)
    return surface if inside is None else xp.where(inside.any(axis=-1), surface, np.int32(-1))


def ndimage_module(vol: Any) -> ModuleType:
    """Return the ndimage package whose functions take `vol`."""
    if is_device_array(vol):
        import cupyx.scipy.ndimage as ndimage
    else:
        import scipy.ndimage as ndimage
    return ndimage
