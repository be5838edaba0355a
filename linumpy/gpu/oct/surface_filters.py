"""Find the tissue surface by array filters: SciPy's for NumPy, CuPy's for CuPy.

In: a volume and :class:`SurfaceOptions`. Out: for each A-line the depth of the surface, and its contrast.
:func:`linumpy.gpu.interface.find_tissue_interface` uses these filters on the CPU, and on the GPU for volumes with a
mask and for an `s_z` above 1024; tests compare the kernels (``surface_kernels.py``) with them. The profile of an A-line
is its smoothed derivative along depth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array, array_module, is_device_array

#: Second pass: maximum of `s_xy`, and factor of `s_z`.
_SECOND_MAX_S_XY, _SECOND_S_Z_FACTOR = 3, 2.0
#: An A-line is not noise if its variance is at least this multiple of the variance of noise.
_STRUCTURE = 4.0
#: Maximum voxels of a block of rows; the filters need about six times the memory of a block.
_BLOCK_VOXELS = 2**26


@dataclass(frozen=True)
class SurfaceOptions:
    """How to find a surface: arguments of :func:`linumpy.gpu.interface.find_tissue_interface`.

    `cutting_errors` is its `detect_cutting_errors`; `edge`: True for ``definition="edge"``. `zero_log`: None for 0, or
    with `edge` for :func:`log_of_zero`.
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
        """Sum of squares over squared maximum of the profile of an ideal step, a Gaussian of this `s_z`; in voxels."""
        return float(self.s_z) * math.sqrt(math.pi)

    @property
    def second_pass(self) -> SurfaceOptions | None:
        """Options to find steep surfaces in A-lines without a clear edge; None for no second pass.

        A narrower lateral mean spreads a steep surface over fewer voxels of depth. A wider Gaussian along depth makes
        up for the noise that the narrower mean leaves.
        """
        if not self.edge or self.order != 1:
            return None
        return replace(self, s_xy=min(int(self.s_xy), _SECOND_MAX_S_XY), s_z=_SECOND_S_Z_FACTOR * float(self.s_z))


def log_of_zero(xp: ModuleType, lines: Array, inside: Array | None = None) -> Array:
    """Choose a value for the logarithm of voxels that are not positive, independent of the unit of intensity.

    `inside`: voxels that count, in the same shape.

    Returns: Mean minus two standard deviations minus 1 of the logarithms of the positive and finite voxels in a sample,
    a regular grid of at most 32 × 32 × 16 voxels; 0 without any such voxel.
    """
    count, mean, spread = log_statistics(xp, lines, inside)
    return xp.where(count > 0, mean - 2 * spread - 1, 0).astype(np.float32)


def log_statistics(xp: ModuleType, lines: Array, inside: Array | None = None) -> tuple[Array, Array, Array]:
    """Return count, mean and standard deviation of the logarithms for the sample of :func:`log_of_zero`."""
    counts = (min(size, n) for size, n in zip(lines.shape, (32, 32, 16), strict=True))
    axes = ((2 * np.arange(n) + 1) * size // (2 * n) for n, size in zip(counts, lines.shape, strict=True))
    index = tuple(map(xp.asarray, np.ix_(*axes)))
    with np.errstate(over="ignore"):
        sample = lines[index].astype(np.float32)
    valid = (sample > 0) & xp.isfinite(sample)
    if inside is not None:
        valid &= inside[index]
    values = xp.where(valid, xp.log(xp.where(valid, sample, np.float32(1))).astype(np.float64), 0)
    count = valid.sum()
    mean = values.sum() / xp.maximum(count, 1)
    return count, mean, xp.sqrt(xp.maximum((values**2).sum() / xp.maximum(count, 1) - mean**2, 0))


def interface_by_filters(vol: Array, options: SurfaceOptions, mask: Array | None = None) -> tuple[Array, Array | None]:
    """Find the surface of a checked volume.

    `options`: how to find the surface. `mask`: voxels that count; see
    :func:`linumpy.gpu.interface.find_tissue_interface`. The surface of an A-line without any voxel inside is -1, or NaN
    with ``options.edge``.

    Returns: (1) int32 voxels; with ``options.edge`` float32: 0 where intensity falls from the first voxel on, infinity
    where an A-line is not noise but has no edge, NaN where it is noise. (2) Contrast of the edge or of the fall; None
    without ``options.edge``.

    `ValueError`: A mask of another shape than the volume and its lateral axes.
    """
    xp, ndimage = array_module(vol), ndimage_module(vol)
    lines = xp.moveaxis(vol, options.depth_axis, -1)
    inside = None if mask is None else _inside(xp, mask, lines, options.depth_axis)
    rows, columns, depth = lines.shape
    surface: Array = xp.empty((rows, columns), np.float32 if options.edge else np.int32)
    contrast: Array | None = xp.empty((rows, columns), np.float32) if options.edge else None
    step = max(1, _BLOCK_VOXELS // (columns * depth))
    zero_log: Array | float = options.zero_log or 0.0
    if options.use_log and options.edge and options.zero_log is None:
        zero_log = log_of_zero(xp, lines, inside)
    halo = options.s_xy  # the lateral mean of a block reads rows around it
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        low, high = max(0, begin - halo), min(rows, end + halo)
        part = slice(begin - low, end - low)
        values = intensities(xp, lines[low:high], options.use_log, zero_log)
        halo_inside = None if inside is None else inside[low:high]
        block_inside = None if inside is None else inside[begin:end]
        smooth = _mean(xp, ndimage, values, halo_inside, options.s_xy)[part]
        depths, contrasts = _surface_of_lines(xp, ndimage, smooth, options, block_inside)
        second = options.second_pass
        if second is not None:
            unclear = ~((contrasts >= options.min_contrast) & (contrasts > 0))
            if xp is not np or unclear.any():
                narrow = _mean(xp, ndimage, values, halo_inside, second.s_xy)[part]
                depths, contrasts = _second_pass(
                    xp, ndimage, narrow, second, block_inside, unclear, (depths, contrasts)
                )
        surface[begin:end] = depths
        if contrast is not None:
            contrast[begin:end] = contrasts
    return surface, contrast


def _inside(xp: ModuleType, mask: Array, lines: Array, depth_axis: int) -> Array:
    """Return a mask as an array of bool in the shape of the A-lines, (rows, columns, depth)."""
    if mask.ndim == 3:
        mask = xp.moveaxis(mask, depth_axis, -1)
    elif mask.shape == lines.shape[:2]:
        mask = xp.broadcast_to(mask[..., None], lines.shape)
    if mask.shape != lines.shape:
        raise ValueError(f"a mask of {mask.shape} does not fit: the shape of the volume or of its lateral axes does")
    return mask.astype(bool)


def _lateral_mean(xp: ModuleType, ndimage: ModuleType, values: Array, s_xy: int) -> Array:
    """Compute the mean over s_xy × s_xy A-lines.

    SciPy's mean is a running sum, in which a NaN or infinity spreads to the end of the line. If the block contains one,
    each sum is computed separately, as CuPy and the kernels do: then only means over that voxel are not finite.
    """
    if xp is not np or xp.isfinite(values).all():
        return ndimage.uniform_filter(values, (s_xy, s_xy, 1))
    with np.errstate(invalid="ignore"):
        for axis in (0, 1):
            values = ndimage.correlate1d(values, np.full(s_xy, 1 / s_xy), axis)
    return values


def _mean(xp: ModuleType, ndimage: ModuleType, values: Array, inside: Array | None, s_xy: int) -> Array:
    """Compute lateral means; with a mask those over voxels inside, and voxels outside repeat means of their A-line."""
    if inside is None:
        return _lateral_mean(xp, ndimage, values, s_xy)
    share = _lateral_mean(xp, ndimage, inside.astype(np.float32), s_xy)
    # The mean of a voxel inside contains that voxel: the share is at least 1 / s_xy², never a rounding error of 0.
    mean = _lateral_mean(xp, ndimage, xp.where(inside, values, np.float32(0)), s_xy) / xp.where(inside, share, 1)
    first = inside.argmax(axis=-1)[..., None]
    last_inside = xp.take_along_axis(mean, first, axis=-1)[..., 0]
    for z in range(mean.shape[-1]):
        last_inside = xp.where(inside[..., z], mean[..., z], last_inside)
        mean[..., z] = last_inside
    return mean


def intensities(xp: ModuleType, lines: Array, use_log: bool, zero: Array | float = 0.0) -> Array:
    """Convert voxels to float32 and, with `use_log`, to their logarithm: `zero` where they are not positive."""
    with np.errstate(over="ignore"):
        values = lines.astype(np.float32)
    if use_log:
        positive = values > 0  # NaN is not
        values = xp.where(positive, xp.log(xp.where(positive, values, np.float32(1))), xp.asarray(zero, np.float32))
    return values


def _surface_of_lines(
    xp: ModuleType, ndimage: ModuleType, smooth: Array, options: SurfaceOptions, inside: Array | None
) -> tuple[Array, Any]:
    """Return surface and contrast (None without ``options.edge``) of smoothed A-lines along the last axis."""
    profile = ndimage.gaussian_filter1d(smooth, options.s_z, axis=-1, order=options.order)
    valid = ~xp.isnan(profile)
    if inside is not None:
        valid &= inside
    at = xp.where(valid, profile, np.float32(-np.inf)).argmax(axis=-1)
    contrast = None
    if options.edge:
        contrast, offset = _contrast(xp, profile, valid, at, options), _offset(xp, profile, at)
        is_clear = (contrast >= options.min_contrast) & (contrast > 0)
        surface = xp.where(is_clear, at + offset, np.float32(np.nan)).astype(np.float32)
    else:
        surface = xp.minimum(xp.ceil(at + options.s_z / 2), profile.shape[-1] - 1).astype(np.int32)
    if options.cutting_errors:
        level = ndimage.gaussian_filter1d(smooth, options.s_z, axis=-1)
        surface = _brightest_above(xp, level, valid, surface)
    if inside is not None:
        surface = xp.where(inside.any(axis=-1), surface, surface.dtype.type(np.nan if options.edge else -1))
    return surface, contrast


def _brightest_above(xp: ModuleType, level: Array, valid: Array, surface: Array) -> Array:
    """Replace the surface by the voxel with the largest absolute value where that lies above it."""
    size = xp.abs(level)
    brightest = xp.where(valid & ~xp.isnan(size), size, np.float32(-np.inf)).argmax(axis=-1)
    return xp.where(brightest < surface, brightest.astype(surface.dtype), surface)


def _second_pass(
    xp: ModuleType,
    ndimage: ModuleType,
    lines: Array,
    options: SurfaceOptions,
    inside: Array | None,
    unclear: Array,
    first_pass: tuple[Array, Array],
) -> tuple[Array, Array]:
    """Process the `unclear` A-lines, those without a clear edge, again; return surface and contrast of all A-lines.

    On the host the arrays of `first_pass` are changed and returned.
    """
    if xp is not np:  # process all A-lines: to select the unclear ones, the host would wait for the device
        again = _steep_surface_of_lines(xp, ndimage, lines, options, inside, first_pass[1])
        surface, contrast = (xp.where(unclear, new, old) for new, old in zip(again, first_pass, strict=True))
        return surface, contrast
    unclear_inside = None if inside is None else inside[unclear][None]
    contrast = first_pass[1][unclear][None]
    again = _steep_surface_of_lines(xp, ndimage, lines[unclear][None], options, unclear_inside, contrast)
    for new, old in zip(again, first_pass, strict=True):
        old[unclear] = new[0]
    return first_pass


def _steep_surface_of_lines(
    xp: ModuleType, ndimage: ModuleType, lines: Array, options: SurfaceOptions, inside: Array | None, contrast: Array
) -> tuple[Array, Array]:
    """Find a steep edge in A-lines (rows, columns, depth), and classify A-lines without an edge.

    Returns: (1) The edge; else 0 where intensity falls from the first voxel on; else infinity where a line is not
    noise, NaN where it is noise. (2) Contrast of the edge or of the fall; without either, the larger contrast of this
    pass and the first (`contrast`).
    """
    profile = ndimage.gaussian_filter1d(lines, options.s_z, axis=-1, order=1)
    smooth = ndimage.gaussian_filter1d(lines, options.s_z, axis=-1)
    valid = ~xp.isnan(profile)
    if inside is not None:
        valid &= inside
    at = xp.where(valid, profile, np.float32(-np.inf)).argmax(axis=-1)
    clear = _contrast(xp, profile, valid, at, options)
    edge = at + _offset(xp, profile, at)
    if options.cutting_errors:
        edge = _brightest_above(xp, smooth, valid, edge)
    # White noise of standard deviation 1 has `share` in the profile, and `share * ratio` in the smoothed line.
    share, ratio = math.sqrt(1 / (4 * math.sqrt(math.pi) * options.s_z**3)), math.sqrt(2) * options.s_z
    with np.errstate(all="ignore"):
        n = lines.shape[-1] if inside is None else xp.maximum(inside.sum(axis=-1), 1)
        steps = xp.diff(lines, axis=-1)
        measured = True if inside is None else inside[..., 1:] & inside[..., :-1]
        steps = xp.where(xp.isfinite(steps) & measured, steps, 0).astype(np.float64)
        noise = share * xp.sqrt((steps**2).sum(axis=-1) / (2 * n))
        slopes = xp.where(valid, profile, 0).astype(np.float64)
        energy, mean = (slopes**2).sum(axis=-1), slopes.sum(axis=-1) / n
        # In a short line too little of the profile remains to estimate noise from it: use the voxels, too.
        clear = xp.where(noise > 0, xp.minimum(clear, _take(xp, profile, at) / noise), clear)
        clear = xp.where(xp.isfinite(clear), clear, 0)
        profile_noise = xp.maximum(xp.sqrt(xp.maximum(energy / n - mean**2, 1e-6 * energy / n)), noise)
        level = smooth - smooth[..., :1]
        level = xp.where(xp.isfinite(level) & (True if inside is None else inside), level, 0).astype(np.float64)
        variance = (level**2).sum(axis=-1) - level.sum(axis=-1) ** 2 / n
        fall = xp.where(profile_noise > 0, -level.sum(axis=-1) / n / (ratio * profile_noise), 0)
        if inside is not None:
            fall = xp.where(inside[..., 0], fall, 0)  # the border of the mask is not an edge
        structure = variance > _STRUCTURE * ratio**2 * xp.maximum(energy, n * noise**2)
    surface = xp.where(structure, np.inf, np.nan)
    contrast = xp.fmax(contrast, clear)
    for depth, strength in ((0.0, fall), (edge, clear)):  # an edge takes precedence over a fall
        is_clear = (strength >= options.min_contrast) & (strength > 0)
        surface, contrast = xp.where(is_clear, depth, surface), xp.where(is_clear, strength, contrast)
    if inside is not None:
        surface = xp.where(inside.any(axis=-1), surface, np.nan)
    return surface.astype(np.float32), contrast.astype(np.float32)


def _contrast(xp: ModuleType, profile: Array, valid: Array, at: Array, options: SurfaceOptions) -> Array:
    """Divide the maximum of each profile by the root mean square of the rest: without the energy of an ideal step."""
    with np.errstate(all="ignore"):
        rise = xp.where(valid.any(axis=-1), _take(xp, profile, at), np.float32(0)).astype(np.float64)
        energy = xp.where(valid, profile, np.float32(0)).astype(np.float64)
        energy = xp.einsum("abz,abz->ab", energy, energy)
        depth = valid.sum(axis=-1, dtype=np.int64 if xp is np else np.float64)
        rest = (energy - rise**2 * options.step_width) / xp.maximum(depth - options.step_width, 1)
        # An ideal step leaves no rest: noise is at least a quarter of the root mean square of the whole line.
        noise = xp.sqrt(xp.fmax(rest, energy / (16 * xp.maximum(depth, 1))))
        return xp.where(rise > 0, rise / noise, 0).astype(np.float32)


def _offset(xp: ModuleType, profile: Array, at: Array) -> Array:
    """Return the vertex of the parabola through the maximum and its two neighbours, in voxels from the maximum."""
    last = profile.shape[-1] - 1
    before, rise, after = (_take(xp, profile, xp.clip(at + step, 0, last)) for step in (-1, 0, 1))
    with np.errstate(all="ignore"):
        curvature = before - 2 * rise + after
        has_vertex = (at > 0) & (at < last) & (curvature < 0)
        return xp.where(has_vertex, 0.5 * (before - after) / xp.where(has_vertex, curvature, 1), 0)


def _take(xp: ModuleType, profile: Array, at: Array) -> Array:
    return xp.take_along_axis(profile, at[..., None], axis=-1)[..., 0]


def ndimage_module(vol: Array) -> ModuleType:
    """Return the ndimage package whose functions take `vol`."""
    if is_device_array(vol):
        import cupyx.scipy.ndimage as ndimage
    else:
        import scipy.ndimage as ndimage
    return ndimage
