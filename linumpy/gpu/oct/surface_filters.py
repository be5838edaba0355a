"""Find the surface of the tissue by a chain of array filters: SciPy's for NumPy, CuPy's for CuPy.

This is what :func:`linumpy.gpu.interface.find_tissue_interface` computes on the CPU, and what its kernels are compared
with. In: a volume and :class:`SurfaceOptions`. Out: for each A-line where tissue begins, and how clearly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.device import array_module, is_device_array

#: Second look: A-lines of its mean along each axis at most, and its Gaussian as a multiple of that of the first.
_NARROW, _WIDER = 3, 2.0
#: A line is not noise if its variance is so many times the one that noise would have.
_STRUCTURE = 4.0
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
    zero_log : float or None
        What stands for the logarithm of voxels that are not positive; None for 0, and of an edge for
        :func:`log_of_zero`.
    """

    s_xy: int = 15
    s_z: float = 2.0
    use_log: bool = True
    order: int = 1
    cutting_errors: bool = False
    depth_axis: int = -1
    edge: bool = False
    min_contrast: float = 5.0
    zero_log: float | None = None

    @property
    def step_width(self) -> float:
        """Voxels over which the profile of an ideal step has the energy of its peak: a Gaussian of this `s_z`."""
        return float(self.s_z) * math.sqrt(math.pi)

    @property
    def second_look(self) -> SurfaceOptions | None:
        """How A-lines are looked at in which no edge stands out: for a steep one. None where there is no second look.

        Over fewer A-lines the mean spreads a steep edge over fewer voxels of depth; a wider Gaussian makes up for the
        noise.
        """
        if not self.edge or self.order != 1:
            return None
        return replace(self, s_xy=min(int(self.s_xy), _NARROW), s_z=_WIDER * float(self.s_z))


def log_of_zero(xp: ModuleType, lines: Any, inside: Any = None) -> Any:
    """Choose what stands for the logarithm of voxels that are not positive, so that their unit does not matter.

    Parameters
    ----------
    lines : numpy.ndarray or cupy.ndarray, rank 3
        Intensity.
    inside : array of bool, optional
        Of the same shape: voxels that count.

    Returns
    -------
    numpy.ndarray or cupy.ndarray of float32, ()
        Two standard deviations and 1 below the mean logarithm of the positive and finite voxels, of a sample on a
        regular grid of at most 32 × 32 × 16 voxels; 0 where there are none.
    """
    count, mean, spread = log_statistics(xp, lines, inside)
    return xp.where(count > 0, mean - 2 * spread - 1, 0).astype(np.float32)


def log_statistics(xp: ModuleType, lines: Any, inside: Any = None) -> tuple[Any, Any, Any]:
    """Count the positive voxels of the sample, and take the mean and standard deviation of their logarithms."""
    counts = (min(size, n) for size, n in zip(lines.shape, (32, 32, 16), strict=True))
    axes = ((2 * np.arange(n) + 1) * size // (2 * n) for n, size in zip(counts, lines.shape, strict=True))
    index = tuple(map(xp.asarray, np.ix_(*axes)))
    with np.errstate(over="ignore"):
        sample = lines[index].astype(np.float32)
    known = (sample > 0) & xp.isfinite(sample)
    if inside is not None:
        known &= inside[index]
    values = xp.where(known, xp.log(xp.where(known, sample, np.float32(1))).astype(np.float64), 0)
    count = known.sum()
    mean = values.sum() / xp.maximum(count, 1)
    return count, mean, xp.sqrt(xp.maximum((values**2).sum() / xp.maximum(count, 1) - mean**2, 0))


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
        int32 voxels, or float32 where an edge is wanted: infinity where one is not found in what is no noise, NaN in
        noise.
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
    zero: Any = options.zero_log or 0.0
    if options.use_log and options.edge and options.zero_log is None:
        zero = log_of_zero(xp, lines, inside)
    halo = options.s_xy  # lateral smoothing of a block needs its neighbours
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        low, high = max(0, begin - halo), min(rows, end + halo)
        part = slice(begin - low, end - low)
        values = intensities(xp, lines[low:high], options.use_log, zero)
        within = None if inside is None else inside[low:high]
        here = None if inside is None else inside[begin:end]
        smooth = _mean(xp, ndimage, values, within, options.s_xy)[part]
        found, how = _surface_of_lines(xp, ndimage, smooth, options, here)
        second = options.second_look
        if second is not None:
            unclear = ~((how >= options.min_contrast) & (how > 0))
            if xp is not np or unclear.any():
                narrow = _mean(xp, ndimage, values, within, second.s_xy)[part]
                found, how = _look_again(xp, ndimage, narrow, second, here, unclear, (found, how))
        surface[begin:end] = found
        if contrast is not None:
            contrast[begin:end] = how
    return surface, contrast


def _mean(xp: ModuleType, ndimage: ModuleType, values: Any, inside: Any, s_xy: int) -> Any:
    """Take the lateral mean, over voxels inside where there is a mask."""
    if inside is None:
        return _lateral_mean(xp, ndimage, values, s_xy)
    return _mean_inside(xp, ndimage, values, inside, s_xy)


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


def intensities(xp: ModuleType, lines: Any, use_log: bool, zero: Any = 0.0) -> Any:
    """Bring voxels to float32 and, if wanted, to their logarithm, which is `zero` of those that are not positive."""
    with np.errstate(over="ignore"):
        values = lines.astype(np.float32)
    if use_log:
        positive = values > 0  # NaN is not
        values = xp.where(positive, xp.log(xp.where(positive, values, np.float32(1))), xp.asarray(zero, np.float32))
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
        level = ndimage.gaussian_filter1d(smooth, options.s_z, axis=-1)
        surface = _brightest_above(xp, level, known, surface)
    if inside is not None:
        surface = xp.where(inside.any(axis=-1), surface, surface.dtype.type(np.nan if options.edge else -1))
    return surface, contrast


def _brightest_above(xp: ModuleType, level: Any, known: Any, surface: Any) -> Any:
    """Take the voxel that is largest in size where it lies above the surface."""
    level = xp.abs(level)
    brightest = xp.where(known & ~xp.isnan(level), level, np.float32(-np.inf)).argmax(axis=-1)
    return xp.where(brightest < surface, brightest.astype(surface.dtype), surface)


def _look_again(
    xp: ModuleType,
    ndimage: ModuleType,
    lines: Any,
    options: SurfaceOptions,
    inside: Any,
    unclear: Any,
    first_look: tuple[Any, Any],
) -> tuple[Any, Any]:
    """Look for a steep edge in those A-lines (a, b, depth) where none is clear; returns all, as found first or now."""
    if xp is not np:  # all of them, so that the device is not waited for
        again = _second_look_at(xp, ndimage, lines, options, inside, first_look[1])
        surface, contrast = (xp.where(unclear, new, old) for new, old in zip(again, first_look, strict=True))
        return surface, contrast
    here = None if inside is None else inside[unclear][None]
    again = _second_look_at(xp, ndimage, lines[unclear][None], options, here, first_look[1][unclear][None])
    for new, old in zip(again, first_look, strict=True):
        old[unclear] = new[0]
    return first_look


def _second_look_at(
    xp: ModuleType, ndimage: ModuleType, lines: Any, options: SurfaceOptions, inside: Any, contrast: Any
) -> tuple[Any, Any]:
    """Look at A-lines (a, b, depth) for a steep edge, and else say what they are.

    Returns
    -------
    surface : array of float32, (a, b)
        The edge; 0 where intensity falls from the first voxel on; infinity where a line is no noise; NaN where it is.
    contrast : array of float32, (a, b)
        Where nothing is found no less than that given.
    """
    profile = ndimage.gaussian_filter1d(lines, options.s_z, axis=-1, order=1)
    smooth = ndimage.gaussian_filter1d(lines, options.s_z, axis=-1)
    known = ~xp.isnan(profile)
    if inside is not None:
        known &= inside
    at = xp.where(known, profile, np.float32(-np.inf)).argmax(axis=-1)
    clear = _contrast(xp, profile, known, at, options)
    edge = at + _offset(xp, profile, at)
    if options.cutting_errors:
        edge = _brightest_above(xp, smooth, known, edge)
    # White noise of one voxel has so much of it in its profile, and `ratio` times as much in the smoothed line.
    share, ratio = math.sqrt(1 / (4 * math.sqrt(math.pi) * options.s_z**3)), math.sqrt(2) * options.s_z
    with np.errstate(all="ignore"):
        n = lines.shape[-1] if inside is None else xp.maximum(inside.sum(axis=-1), 1)
        steps = xp.diff(lines, axis=-1)
        measured = True if inside is None else inside[..., 1:] & inside[..., :-1]
        steps = xp.where(xp.isfinite(steps) & measured, steps, 0).astype(np.float64)
        noise = share * xp.sqrt((steps**2).sum(axis=-1) / (2 * n))
        slopes = xp.where(known, profile, 0).astype(np.float64)
        energy, mean = (slopes**2).sum(axis=-1), slopes.sum(axis=-1) / n
        # In a short line the rest of the profile is too little to tell the noise.
        clear = xp.where(noise > 0, xp.minimum(clear, _take(xp, profile, at) / noise), clear)
        clear = xp.where(xp.isfinite(clear), clear, 0)
        bends = xp.maximum(xp.sqrt(xp.maximum(energy / n - mean**2, 1e-6 * energy / n)), noise)
        level = smooth - smooth[..., :1]
        level = xp.where(xp.isfinite(level) & (True if inside is None else inside), level, 0).astype(np.float64)
        variance = (level**2).sum(axis=-1) - level.sum(axis=-1) ** 2 / n
        fall = xp.where(bends > 0, -level.sum(axis=-1) / n / (ratio * bends), 0)
        if inside is not None:
            fall = xp.where(inside[..., 0], fall, 0)  # the edge of a mask is none
        structure = variance > _STRUCTURE * ratio**2 * xp.maximum(energy, n * noise**2)
    surface = xp.where(structure, np.inf, np.nan)
    contrast = xp.fmax(contrast, clear)
    for depth, how in ((0.0, fall), (edge, clear)):  # the edge goes before the border
        stands = (how >= options.min_contrast) & (how > 0)
        surface, contrast = xp.where(stands, depth, surface), xp.where(stands, how, contrast)
    if inside is not None:
        surface = xp.where(inside.any(axis=-1), surface, np.nan)
    return surface.astype(np.float32), contrast.astype(np.float32)


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
