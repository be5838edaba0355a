"""The surface of the tissue, on the CPU or the GPU; results are in the memory of the input.

In: a NumPy or CuPy volume, or its surface. Out: the surface, a map of the depth at which tissue begins; a surface
without outliers; the volume below a surface. :mod:`linumpy.geometry.surfaces` fits shapes to a surface.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np

from linumpy.arrays import Array, DeviceName
from linumpy.device import array_module, transfers
from linumpy.geometry.surfaces import InterfaceFit, fit_interface
from linumpy.gpu.oct import surface as surface_module
from linumpy.gpu.oct.shift import shift_along_depth
from linumpy.gpu.oct.surface import Definition
from linumpy.gpu.oct.surface_filters import ndimage_module

__all__ = ["InterfaceFit", "crop_below_interface", "find_tissue_interface", "fit_interface", "remove_outliers"]


@overload
def find_tissue_interface(
    vol: Array, s_xy: int = ..., s_z: float = ..., use_log: bool = ..., mask: Array | None = ..., order: int = ...,
    detect_cutting_errors: bool = ..., *, depth_axis: int | None = ..., definition: Definition = ...,
    min_contrast: float = ..., return_confidence: Literal[False] = ..., zero_log: float | None = ...,
    device: DeviceName | None = ...,
) -> Array: ...  # fmt: skip
@overload
def find_tissue_interface(
    vol: Array, s_xy: int = ..., s_z: float = ..., use_log: bool = ..., mask: Array | None = ..., order: int = ...,
    detect_cutting_errors: bool = ..., *, depth_axis: int | None = ..., definition: Definition = ...,
    min_contrast: float = ..., return_confidence: Literal[True], zero_log: float | None = ...,
    device: DeviceName | None = ...,
) -> tuple[Array, Array]: ...  # fmt: skip
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
    definition: Definition = "linumpy",
    min_contrast: float = 5.0,
    return_confidence: bool = False,
    zero_log: float | None = None,
    device: DeviceName | None = None,
) -> Array | tuple[Array, Array]:
    """Find for each A-line where tissue begins, on the device that the caller chooses.

    Parameters
    ----------
    vol, s_xy, s_z, use_log, mask, order, detect_cutting_errors, depth_axis, definition, min_contrast, \
    return_confidence, zero_log
        As for :func:`linumpy.gpu.interface.find_tissue_interface`, whose results and errors this function has, too.
    device : {"auto", "cuda", "cpu"}, optional
        Where to compute; by default where the input lies.

    Returns
    -------
    numpy.ndarray or cupy.ndarray, rank 2
        Depth in voxels, in the memory of the volume: int32, -1 for an A-line outside the mask. For
        ``definition="edge"`` float32: 0 where tissue begins at or before the first voxel, NaN where there is no tissue,
        infinity where its surface is not found. With `return_confidence` a second array, the contrast.

    Raises
    ------
    ValueError, TypeError
        As :func:`linumpy.gpu.interface.find_tissue_interface`.
    GpuUnavailableError
        `device` is ``"cuda"``, and there is no CUDA device.
    """
    transfer, back = transfers(vol, device)
    find: Any = surface_module.find_tissue_interface
    result = find(
        transfer(vol), s_xy, s_z, use_log, None if mask is None else transfer(mask), order, detect_cutting_errors,
        depth_axis=depth_axis, definition=definition, min_contrast=min_contrast, return_confidence=return_confidence,
        zero_log=zero_log,
    )  # fmt: skip
    return tuple(map(back, result)) if return_confidence else back(result)


def remove_outliers(
    surface: Array, size: int = 11, threshold: float = 3.5, *, tolerance: float = 1.0, device: DeviceName | None = None
) -> tuple[Array, Array]:
    """Replace outliers of a surface by the median of their neighbourhood.

    A voxel is an outlier if its difference from the median of its neighbourhood exceeds both `tolerance` and
    `threshold` robust standard deviations: 1.4826 times the median of the absolute differences of all known voxels
    (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993, propose a threshold of 3.5). Negative and non-finite
    values are unknown, and count as outliers.

    Parameters
    ----------
    surface : numpy.ndarray or cupy.ndarray, (height, width)
        Depth in voxels.
    size : int
        Voxels of the neighbourhood along both axes; beyond its ends the map is mirrored (SciPy's mode ``"reflect"``).
    threshold : float
        In robust standard deviations, above 0.
    tolerance : float
        In voxels, 0 or more: a voxel with a smaller difference is not an outlier.
    device : {"auto", "cuda", "cpu"}, optional
        Where to compute; by default where the input lies.

    Returns
    -------
    surface : numpy.ndarray or cupy.ndarray, (height, width)
        In the dtype of the input, integers rounded.
    outliers : numpy.ndarray or cupy.ndarray of bool, (height, width)
        The replaced voxels.

    Raises
    ------
    ValueError
        A surface that is not a map of real numbers, or has no known value; an invalid size, threshold or tolerance.
    GpuUnavailableError
        `device` is ``"cuda"``, and there is no CUDA device.
    """
    if surface.ndim != 2 or surface.dtype.kind not in "iuf" or not surface.size:
        raise ValueError(f"a surface of shape {surface.shape}, {surface.dtype}: a map (height, width) is needed")
    if int(size) != size or size < 1 or not threshold > 0 or not tolerance >= 0:
        raise ValueError(f"size={size}, threshold={threshold}, tolerance={tolerance}: pass positive numbers")
    transfer, back = transfers(surface, device)
    moved = transfer(surface)
    xp, dtype = array_module(moved), moved.dtype
    values = moved.astype(np.float64)
    valid = xp.isfinite(values) & (values >= 0)
    if not bool(valid.any()):
        raise ValueError("the surface has no known value: all are negative or not finite")
    # Unknown values become the median of all known values, which disturbs the medians of their neighbours least.
    values = xp.where(valid, values, xp.median(values[valid]))
    medians = ndimage_module(moved).median_filter(values, size=int(size), mode="reflect")
    differences = xp.abs(values - medians)
    limit = xp.maximum(threshold * 1.4826 * xp.median(differences[valid]), tolerance)
    outliers = ~valid | (differences > limit)
    if dtype.kind in "iu":
        medians = xp.rint(medians)
    result = xp.where(outliers, medians, values).astype(dtype)
    return back(result), back(outliers)


def crop_below_interface(
    vol: Array,
    surface: Array,
    planes: int | None = None,
    *,
    offset: int = 0,
    depth_axis: int = 0,
    fill_value: float = 0,
    device: DeviceName | None = None,
) -> Array:
    """Cut out the volume below a surface: each A-line of the result begins at the surface, which becomes flat.

    Parameters
    ----------
    vol : numpy.ndarray or cupy.ndarray, rank 3
        Of real numbers.
    surface : numpy.ndarray or cupy.ndarray, rank 2
        First voxel of tissue for each A-line, lateral axes as in `vol`; floats are rounded. A negative or non-finite
        value means no tissue, and the A-line is filled.
    planes : int, optional
        Voxels of the result along depth; by default as many as the volume has.
    offset : int
        Voxels below the surface at which to begin; negative for above.
    depth_axis : int
        Axis of depth.
    fill_value : float
        Value of voxels outside the volume, and of A-lines without tissue.
    device : {"auto", "cuda", "cpu"}, optional
        Where to compute; by default where the input lies.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        In the dtype and memory of `vol`, with `planes` voxels along depth.

    Raises
    ------
    ValueError
        A volume that is not of rank 3; a surface that does not fit the volume, or is not of real numbers.
    ValueError, TypeError
        As :func:`linumpy.gpu.oct.shift.shift_along_depth`.
    GpuUnavailableError
        `device` is ``"cuda"``, and there is no CUDA device.
    """
    if vol.ndim != 3 or not -3 <= depth_axis < 3:
        raise ValueError(f"a volume of shape {vol.shape} and depth_axis={depth_axis}: three axes are needed")
    lateral = tuple(n for axis, n in enumerate(vol.shape) if axis != depth_axis % 3)
    if tuple(surface.shape) != lateral or surface.dtype.kind not in "iuf":
        raise ValueError(f"a surface of shape {surface.shape}, {surface.dtype} does not fit: pass numbers of {lateral}")
    transfer, back = transfers(vol, device)
    moved = transfer(surface)
    xp = array_module(moved)
    valid = xp.isfinite(moved) & (moved >= 0)
    depths = xp.floor(xp.where(valid, moved, 0) + 0.5).astype(np.int64) + int(offset)
    outside = 2**30  # beyond every volume
    shifts = xp.where(valid, depths, outside)
    out = shift_along_depth(transfer(vol), shifts, depth_axis=depth_axis, fill_value=fill_value, planes=planes)
    return back(out)  # type: ignore[no-any-return]
