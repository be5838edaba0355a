"""Find the surface of the tissue by a chain of array filters: SciPy's for NumPy, CuPy's for CuPy.

This is what :func:`linumpy.gpu.interface.find_tissue_interface` computes on the CPU, and what its kernels are compared
with. In: a volume and :class:`SurfaceOptions`. Out: for each A-line where tissue begins, and how clearly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.device import array_module, is_device_array

#: Voxels that are worked on at once; the filters take about six times their bytes.
_BLOCK_VOXELS = 2**26


@dataclass(frozen=True)
class SurfaceOptions:
    """How a surface is looked for; see :func:`linumpy.gpu.interface.find_tissue_interface`.

    Attributes
    ----------
    s_xy : int
        Voxels of the lateral mean along each axis.
    s_z : float
        Standard deviation of the Gaussian along depth, in voxels.
    use_log : bool
        Whether the logarithm is taken first.
    order : int
        Of the derivative along depth.
    cutting_errors : bool
        Whether the brightest voxel above the surface takes its place.
    depth_axis : int
        Axis of depth.
    edge : bool
        Whether the depth of the edge is wanted, as ``definition="edge"``, or the voxel of ``definition="linumpy"``.
    min_contrast : float
        Of an edge.
    """

    s_xy: int = 15
    s_z: float = 2.0
    use_log: bool = True
    order: int = 1
    cutting_errors: bool = False
    depth_axis: int = -1
    edge: bool = False
    min_contrast: float = 5.0

    @property
    def step_width(self) -> float:
        """Voxels over which the profile of an ideal step has the energy of its peak: a Gaussian of this `s_z`."""
        return float(self.s_z) * math.sqrt(math.pi)


def interface_by_filters(vol: Any, options: SurfaceOptions, mask: Any = None) -> tuple[Any, Any]:
    """Find the surface of a checked volume.

    Parameters
    ----------
    vol : numpy.ndarray or cupy.ndarray, rank 3
        The volume.
    options : SurfaceOptions
        What is looked for.
    mask : numpy.ndarray or cupy.ndarray of bool, optional
        Of the volume's shape, or of the shape of its lateral axes. Voxels outside take no part: means are taken over
        voxels inside; along an A-line, voxels outside repeat the last one inside above them (those above the first,
        the first), so that the edge of the mask is no edge of intensity; and the surface is looked for inside. An
        A-line without any voxel inside has -1, or NaN where an edge is wanted.

    Returns
    -------
    surface : numpy.ndarray or cupy.ndarray, rank 2
        int32 voxels, or float32 where an edge is wanted.
    contrast : numpy.ndarray or cupy.ndarray of float32, or None
        Of the edge; None where none is wanted.
    """
    xp, ndimage = array_module(vol), ndimage_module(vol)
    lines = xp.moveaxis(vol, options.depth_axis, -1)
    inside = None if mask is None else _inside(xp, mask, lines, options.depth_axis)
    rows, columns, depth = lines.shape
    surface = xp.empty((rows, columns), np.float32 if options.edge else np.int32)
    contrast = xp.empty((rows, columns), np.float32) if options.edge else None
    step = max(1, _BLOCK_VOXELS // (columns * depth))
    halo = options.s_xy  # lateral smoothing of a block needs its neighbours
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        low, high = max(0, begin - halo), min(rows, end + halo)
        part = slice(begin - low, end - low)
        values = intensities(xp, lines[low:high], options.use_log)
        if inside is None:
            smooth = _lateral_mean(xp, ndimage, values, options.s_xy)[part]
        else:
            smooth = _mean_inside(xp, ndimage, values, inside[low:high], options.s_xy)[part]
        here = None if inside is None else inside[begin:end]
        found, how = _surface_of_lines(xp, ndimage, smooth, options, here)
        surface[begin:end] = found
        if contrast is not None:
            contrast[begin:end] = how
    return surface, contrast


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


def _surface_of_lines(
    xp: ModuleType, ndimage: ModuleType, smooth: Any, options: SurfaceOptions, inside: Any
) -> tuple[Any, Any]:
    """Find the surface in smoothed A-lines along the last axis, inside if there is such a thing; and its contrast."""
    profile = ndimage.gaussian_filter1d(smooth, options.s_z, axis=-1, order=options.order)
    known = ~xp.isnan(profile)  # what is no number is no rise
    if inside is not None:
        known &= inside
    at = xp.where(known, profile, np.float32(-np.inf)).argmax(axis=-1)
    contrast = None
    if options.edge:
        contrast, offset = _contrast(xp, profile, known, at, options), _offset(xp, profile, at)
        found = (contrast >= options.min_contrast) & (contrast > 0)
        surface = xp.where(found, at + offset, np.float32(np.nan)).astype(np.float32)
    else:
        surface = xp.minimum(xp.ceil(at + options.s_z / 2), profile.shape[-1] - 1).astype(np.int32)
    if options.cutting_errors:
        level = xp.abs(ndimage.gaussian_filter1d(smooth, options.s_z, axis=-1))
        brightest = xp.where(known & ~xp.isnan(level), level, np.float32(-np.inf)).argmax(axis=-1)
        surface = xp.where(brightest < surface, brightest.astype(surface.dtype), surface)
    if inside is not None:
        surface = xp.where(inside.any(axis=-1), surface, surface.dtype.type(np.nan if options.edge else -1))
    return surface, contrast


def _contrast(xp: ModuleType, profile: Any, known: Any, at: Any, options: SurfaceOptions) -> Any:
    """Compare the largest profile with the root mean square of the rest of its line, without an ideal step there."""
    with np.errstate(all="ignore"):
        rise = xp.where(known.any(axis=-1), _take(xp, profile, at), np.float32(0)).astype(np.float64)
        energy = xp.where(known, profile, np.float32(0)).astype(np.float64)
        energy = xp.einsum("abz,abz->ab", energy, energy)
        depth = known.sum(axis=-1) if xp is np else known.sum(axis=-1, dtype=np.float64)
        rest = (energy - rise**2 * options.step_width) / xp.maximum(depth - options.step_width, 1)
        # A line that is all step leaves nothing: its contrast is four times that over the whole line.
        noise = xp.sqrt(xp.fmax(rest, energy / (16 * xp.maximum(depth, 1))))
        return xp.where(rise > 0, rise / noise, 0).astype(np.float32)


def _offset(xp: ModuleType, profile: Any, at: Any) -> Any:
    """Where the parabola through the largest profile and its two neighbours is highest, in voxels from the largest."""
    last = profile.shape[-1] - 1
    before, rise, after = (_take(xp, profile, xp.clip(at + step, 0, last)) for step in (-1, 0, 1))
    with np.errstate(all="ignore"):
        bend = before - 2 * rise + after
        bent = (at > 0) & (at < last) & (bend < 0)
        return xp.where(bent, 0.5 * (before - after) / xp.where(bent, bend, 1), 0)


def _take(xp: ModuleType, profile: Any, at: Any) -> Any:
    return xp.take_along_axis(profile, at[..., None], axis=-1)[..., 0]


def ndimage_module(vol: Any) -> ModuleType:
    """Return the ndimage package whose functions take `vol`."""
    if is_device_array(vol):
        import cupyx.scipy.ndimage as ndimage
    else:
        import scipy.ndimage as ndimage
    return ndimage
