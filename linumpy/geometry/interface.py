"""The surface of the tissue, on the CPU or the GPU; results are in the memory of the input.

In: a NumPy or CuPy volume. Out: for each A-line the voxel at which tissue begins; that map without outliers; the volume
below it. :mod:`linumpy.geometry.surfaces` fits shapes to a surface.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, transfers
from linumpy.geometry.surfaces import InterfaceFit, fit_interface
from linumpy.gpu.oct import surface as surface_module
from linumpy.gpu.oct.shift import shift_along_depth
from linumpy.gpu.oct.surface_filters import ndimage_module

__all__ = ["InterfaceFit", "crop_below_interface", "find_tissue_interface", "fit_interface", "remove_outliers"]


def find_tissue_interface(
    vol: Array,
    s_xy: int = 15,
    s_z: float = 2,
    use_log: bool = True,
    mask: Array | None = None,
    order: int = 1,
    detect_cutting_errors: bool = False,
    *,
    depth_axis: int | None = None,
    definition: str = "linumpy",
    min_contrast: float = 5.0,
    return_confidence: bool = False,
    zero_log: float | None = None,
    use_gpu: bool | None = None,
) -> Any:
    """Find for each A-line where tissue begins, on the caller's choice of device.

    Parameters
    ----------
    vol, s_xy, s_z, use_log, mask, order, detect_cutting_errors, depth_axis, definition, min_contrast, \
    return_confidence, zero_log
        As for :func:`linumpy.gpu.interface.find_tissue_interface`, and so are results and errors.
    use_gpu : bool, optional
        True computes on the GPU, False on the CPU; by default on the device of the volume.

    Returns
    -------
    numpy.ndarray or cupy.ndarray, rank 2
        Voxels along depth: int32, or float32 for ``definition="edge"``: NaN where there is no tissue, infinity where
        its surface is not found. In the memory of the volume. With `return_confidence` a second array, the contrast.

    Raises
    ------
    GpuUnavailableError
        `use_gpu` is True and there is no CUDA device.
    """
    transfer, back = transfers(vol, use_gpu)
    result = surface_module.find_tissue_interface(
        transfer(vol), s_xy, s_z, use_log, None if mask is None else transfer(mask), order, detect_cutting_errors,
        depth_axis=depth_axis, definition=definition, min_contrast=min_contrast, return_confidence=return_confidence,
        zero_log=zero_log,
    )  # fmt: skip
    return tuple(map(back, result)) if return_confidence else back(result)


def remove_outliers(
    surface: Array, size: int = 11, threshold: float = 3.5, *, tolerance: float = 1.0, use_gpu: bool | None = None
) -> tuple[Array, Array]:
    """Replace outliers of a surface by the median of their neighbourhood.

    A voxel is an outlier if its absolute difference from the median of its neighbourhood exceeds `threshold` robust
    standard deviations of all these differences (1.4826 times their median absolute deviation; Iglewicz and Hoaglin,
    How to Detect and Handle Outliers, 1993, propose 3.5) and exceeds `tolerance`. Negative and non-finite values are
    unknown: they count as outliers.

    Parameters
    ----------
    surface : numpy.ndarray or cupy.ndarray, (height, width)
        Depth in voxels.
    size : int
        Voxels of the neighbourhood along both axes.
    threshold : float
        In robust standard deviations.
    tolerance : float
        In voxels: a smaller difference is never an outlier.
    use_gpu : bool, optional
        True computes on the GPU, False on the CPU; by default on the device of the surface.

    Returns
    -------
    surface : numpy.ndarray or cupy.ndarray, (height, width)
        In the dtype of the input, integers rounded.
    outliers : numpy.ndarray or cupy.ndarray of bool, (height, width)
        The replaced voxels.

    Raises
    ------
    ValueError
        Not a map of numbers; an invalid size, threshold or tolerance; a surface without a known value.
    """
    if surface.ndim != 2 or surface.dtype.kind not in "iuf" or not surface.size:
        raise ValueError(f"a surface of shape {surface.shape}, {surface.dtype}: a map (height, width) is needed")
    if int(size) != size or size < 1 or not threshold > 0 or not tolerance >= 0:
        raise ValueError(f"size={size}, threshold={threshold}, tolerance={tolerance}: pass positive numbers")
    transfer, back = transfers(surface, use_gpu)
    moved = transfer(surface)
    xp, dtype = array_module(moved), moved.dtype
    values = moved.astype(np.float64)
    valid = xp.isfinite(values) & (values >= 0)
    if not bool(valid.any()):
        raise ValueError("the surface has no known value: all are negative or not finite")
    # Unknown values become the median of all known ones, which changes the medians around them least.
    values = xp.where(valid, values, xp.median(values[valid]))
    around = ndimage_module(moved).median_filter(values, size=int(size), mode="reflect")
    away = xp.abs(values - around)
    limit = xp.maximum(threshold * 1.4826 * xp.median(away[valid]), tolerance)
    outliers = ~valid | (away > limit)
    if dtype.kind in "iu":
        around = xp.rint(around)
    result = xp.where(outliers, around, values).astype(dtype)
    return back(result), back(outliers)


def crop_below_interface(
    vol: Array,
    surface: Array,
    planes: int | None = None,
    *,
    offset: int = 0,
    depth_axis: int = 0,
    fill_value: float = 0,
    use_gpu: bool | None = None,
) -> Array:
    """Cut out the tissue below a surface: each A-line begins at its surface, which becomes flat.

    Parameters
    ----------
    vol : numpy.ndarray or cupy.ndarray, rank 3
        Of real numbers.
    surface : numpy.ndarray or cupy.ndarray, rank 2
        First voxel of tissue for each A-line, lateral axes as in `vol`; floats are rounded. A negative or non-finite
        value means no tissue, and the A-line is filled.
    planes : int, optional
        Voxels along depth to keep; by default all.
    offset : int
        Voxels below the surface at which to begin; negative for above.
    depth_axis : int
        Axis of depth.
    fill_value : float
        Value of voxels outside the volume.
    use_gpu : bool, optional
        True computes on the GPU, False on the CPU; by default on the device of the volume.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        In the dtype and memory of `vol`, with `planes` voxels along depth.

    Raises
    ------
    ValueError, TypeError
        A surface that does not fit the volume; otherwise as :func:`linumpy.gpu.oct.shift.shift_along_depth`.
    """
    if vol.ndim != 3 or not -3 <= depth_axis < 3:
        raise ValueError(f"a volume of shape {vol.shape} and depth_axis={depth_axis}: three axes are needed")
    lateral = tuple(n for axis, n in enumerate(vol.shape) if axis != depth_axis % 3)
    if tuple(surface.shape) != lateral or surface.dtype.kind not in "iuf":
        raise ValueError(f"a surface of shape {surface.shape}, {surface.dtype} does not fit: pass numbers of {lateral}")
    transfer, back = transfers(vol, use_gpu)
    moved = transfer(surface)
    xp = array_module(moved)
    valid = xp.isfinite(moved) & (moved >= 0)
    depths = xp.floor(xp.where(valid, moved, 0) + 0.5).astype(np.int64) + int(offset)
    outside = 2**30  # beyond every volume
    shifts = xp.where(valid, depths, outside)
    out = shift_along_depth(transfer(vol), shifts, depth_axis=depth_axis, fill_value=fill_value, planes=planes)
    return back(out)  # type: ignore[no-any-return]
