"""Search the translation and rotation between images by masked normalised cross-correlation.

In: pairs of images with masks, and angles. Out: for each pair the angle and the whole-voxel shift of the greatest
correlation, from which :mod:`linumpy.registration.refine` starts. At each shift the correlation is Pearson's, over the
voxels that are valid in both images. The correlations at all shifts are computed by FFT, as in Padfield, Masked object
registration in the Fourier domain, IEEE Transactions on Image Processing 21(5), 2012. All pairs, and as many angles as
:data:`SCRATCH_BYTES` allows, are transformed together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, is_device_array, to_host
from linumpy.registration.stacked import StackedImages

#: Maximum bytes of the spectra and correlations in memory.
SCRATCH_BYTES = 2**30
#: A variance below this fraction of the greatest variance is a rounding error of the transforms.
_NO_VARIANCE = 1e-9


@dataclass(frozen=True)
class CoarseMatches:
    """The best shift and angle of each pair: voxel p of the fixed image is at ``matrix @ (p, 1)`` in the moving image.

    Attributes
    ----------
    matrices : numpy.ndarray, (N, rank + 1, rank + 1)
        Homogeneous, from the fixed to the moving image, in voxels.
    angles : numpy.ndarray, (N,)
        In degrees, from Y to X.
    correlations : numpy.ndarray, (N,)
        From 0 to 1; 0 for pairs without contrast, overlap or a positive correlation, whose matrix is the identity.
    overlaps : numpy.ndarray, (N,)
        Fraction of the smaller mask that both images share.
    """

    matrices: np.ndarray
    angles: np.ndarray
    correlations: np.ndarray
    overlaps: np.ndarray


def match_pairs(
    fixed: Array,
    moving: Array,
    masks: tuple[Array | None, Array | None] = (None, None),
    *,
    angles: Sequence[float] = (0.0,),
    max_shift: float | Sequence[float] = 0.25,
    min_overlap: float = 0.3,
    spacing: Sequence[float] | None = None,
) -> CoarseMatches:
    """Find the shift and the angle of the greatest correlation of many pairs.

    Parameters
    ----------
    fixed, moving : numpy.ndarray or cupy.ndarray, (N, [Z,] Y, X)
        The images, all of one shape. Voxels that are not finite are not valid.
    masks : (array of bool or None, array of bool or None)
        Valid voxels of the fixed and the moving images, in their shape; None for all.
    angles : sequence of float
        Angles to try, in degrees: rotations about the centre, in the plane of the last two axes.
    max_shift : float or sequence of float
        Maximum shift along each axis, as a fraction of the image.
    min_overlap : float
        Fraction of the smaller mask that must overlap.
    spacing : sequence of float, optional
        Voxel spacing in any unit, for the rotation; by default the same along all axes.

    Returns
    -------
    CoarseMatches
        On the host.

    Raises
    ------
    ValueError
        As :func:`check_pairs`; no angles, or angles that are not finite; fractions outside of 0 to 1.
    """
    check_pairs(fixed, moving, masks)
    shape = fixed.shape[1:]
    reach = np.broadcast_to(np.asarray(max_shift, np.float64), (len(shape),))
    if not len(angles) or not all(map(math.isfinite, angles)):
        raise ValueError(f"angles={list(angles)}: pass one angle or more, in degrees")
    if not (reach >= 0).all() or not (reach <= 1).all() or not 0 <= min_overlap <= 1:
        raise ValueError(f"max_shift={max_shift}, min_overlap={min_overlap}: pass fractions from 0 to 1")
    limits = tuple(min(math.ceil(n * r), n - 1) for n, r in zip(shape, reach, strict=True))
    steps = np.ones(len(shape)) if spacing is None else np.asarray(spacing, np.float64)
    rotations = [rotation_about_centre(angle, shape, steps) for angle in angles]
    search = _Search(fixed, moving, masks, limits, min_overlap)
    best = np.zeros((len(fixed), 3))  # correlation, overlap, combined index of angle and shift
    best[:, 2] = -1
    batch = max(1, int(SCRATCH_BYTES // search.nbytes))
    for first in range(0, len(rotations), batch):
        matches = to_host(search.correlate(np.array(rotations[first : first + batch])))
        better = matches[:, 0] > best[:, 0]
        matches[:, 2] += first * search.shifts
        best[better] = matches[better]
    matrices = np.tile(np.eye(len(shape) + 1), (len(fixed), 1, 1))
    chosen = np.zeros(len(fixed))
    for pair in np.flatnonzero(best[:, 2] >= 0):
        number, shift_index = divmod(int(best[pair, 2]), search.shifts)
        shift = np.array(np.unravel_index(shift_index, search.window)) - limits
        matrices[pair, :-1] = rotations[number]
        matrices[pair, :-1, -1] += rotations[number][:, :-1] @ shift
        chosen[pair] = angles[number]
    return CoarseMatches(matrices, chosen, best[:, 0], best[:, 1])


def check_pairs(fixed: Array, moving: Array, masks: tuple[Array | None, Array | None]) -> None:
    """Check that images and masks form pairs.

    Raises
    ------
    ValueError
        Images of other axes, of different shapes or of fewer than four voxels along an axis; masks of another shape;
        arrays of which some are on the device and others on the host.
    """
    if fixed.shape != moving.shape or fixed.ndim not in (3, 4) or min(fixed.shape) < 1 or min(fixed.shape[1:]) < 4:
        raise ValueError(
            f"images of {fixed.shape} and {moving.shape} are no pairs: pass (N, Y, X) or (N, Z, Y, X) of one shape, "
            "with four voxels or more along each axis"
        )
    for mask in masks:
        if mask is not None and mask.shape != fixed.shape:
            raise ValueError(f"a mask of {mask.shape} does not fit images of {fixed.shape}")
    arrays = [fixed, moving, *(mask for mask in masks if mask is not None)]
    if len({is_device_array(array) for array in arrays}) > 1:
        raise ValueError("some images or masks are on the device and others are on the host: copy them to one side")


def rotation_about_centre(angle: float, shape: Sequence[int], spacing: np.ndarray) -> np.ndarray:
    """Return the map of voxels (rank, rank + 1) that rotates the last two axes about the centre, by degrees."""
    rank = len(shape)
    rotation = np.eye(rank)
    cosine, sine = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    rotation[-2:, -2:] = [[cosine, -sine], [sine, cosine]]
    linear = rotation * spacing / spacing[:, None]
    centre = (np.array(shape) - 1) / 2
    return np.concatenate([linear, (centre - linear @ centre)[:, None]], axis=1)


class _Search:
    """Correlates pairs at all shifts; the images and spectra that all angles share are prepared once."""

    def __init__(
        self, fixed: Array, moving: Array, masks: tuple[Array | None, Array | None],
        limits: tuple[int, ...], min_overlap: float,
    ) -> None:  # fmt: skip
        self.xp = array_module(fixed)
        self.limits, self.min_overlap = limits, min_overlap
        self.window = tuple(2 * n + 1 for n in limits)
        self.shifts = math.prod(self.window)
        self.axes = tuple(range(-len(limits), 0))
        self.size = tuple(_fast_length(n + limit) for n, limit in zip(fixed.shape[1:], limits, strict=True))
        image, mask = standardized(fixed, masks[0])
        self.fixed = [self._spectrum(part).conj() for part in (mask, image, image * image)]
        self.voxels = mask.sum(axis=self.axes)
        image, mask = standardized(moving, masks[1])
        # The mask is sampled like the image: a sample is valid if all voxels around it are.
        self.moving, self.moving_mask = StackedImages(image, 1, "zero"), StackedImages(mask, 1, "zero")
        self.voxels = self.xp.minimum(self.voxels, mask.sum(axis=self.axes))
        # Three spectra and six correlations of double precision, and their temporaries, for each pair and angle.
        self.nbytes = len(fixed) * math.prod(self.size) * 8 * 14

    def _spectrum(self, images: Array) -> Any:
        return _fft(self.xp).rfftn(images.astype(np.float64), self.size, axes=self.axes)

    def _correlations(self, fixed: Array, moving: Array) -> Array:
        """Sum over p the products of the fixed image at p and the moving image at p + shift, for all shifts tried."""
        xp = self.xp
        sums = _fft(xp).irfftn(fixed[:, None] * moving, self.size, axes=self.axes)
        for axis, limit in zip(self.axes, self.limits, strict=True):
            sums = xp.take(sums, xp.arange(-limit, limit + 1) % sums.shape[axis], axis=axis)
        return sums

    def correlate(self, maps: np.ndarray) -> Array:
        """Return for each pair the greatest correlation, the overlap there, and the combined index of map and shift.

        A correlation of -2 means that no shift is valid.
        """
        xp, pairs = self.xp, len(self.voxels)
        rows = slice(0, self.moving.shape[0])
        all_maps = np.tile(maps, (pairs, 1, 1)), np.repeat(np.arange(pairs), len(maps))
        shape = (pairs, len(maps), *self.moving.shape)
        mask = (self.moving_mask.sample(*all_maps, rows) > 0.999).astype(np.float64).reshape(shape)
        image = self.moving.sample(*all_maps, rows).reshape(shape) * mask
        spectra = [self._spectrum(part) for part in (mask, image, image * image)]
        counts = xp.rint(self._correlations(self.fixed[0], spectra[0]))
        safe = xp.maximum(counts, 1)
        sums = [self._correlations(*pair) for pair in ((self.fixed[1], spectra[0]), (self.fixed[0], spectra[1]))]
        squares = [self._correlations(*pair) for pair in ((self.fixed[2], spectra[0]), (self.fixed[0], spectra[2]))]
        spreads = [square - total * total / safe for square, total in zip(squares, sums, strict=True)]
        shared = self._correlations(self.fixed[1], spectra[1]) - sums[0] * sums[1] / safe
        needed = xp.maximum(self.min_overlap * self.voxels, 1)
        valid = counts >= needed.reshape((-1, *[1] * (counts.ndim - 1)))
        for spread, square in zip(spreads, squares, strict=True):
            valid &= spread > _NO_VARIANCE * square.max()
        spread = xp.sqrt(xp.where(valid, spreads[0] * spreads[1], 1))
        scores = xp.where(valid, xp.clip(shared / spread, -1, 1), -2).reshape(pairs, -1)
        index = scores.argmax(axis=1)[:, None]
        share = xp.take_along_axis(counts.reshape((pairs, -1)), index, 1)[:, 0] / xp.maximum(self.voxels, 1)
        return xp.stack([xp.take_along_axis(scores, index, 1)[:, 0], share, index[:, 0].astype(np.float64)], axis=1)


def standardized(images: Array, mask: Array | None) -> tuple[Any, Any]:
    """Return images of mean 0 and standard deviation 1 in their masks and 0 elsewhere, and the masks; both float32."""
    xp = array_module(images)
    valid = xp.isfinite(images) if mask is None else xp.isfinite(images) & mask.astype(bool)
    axes = tuple(range(1, images.ndim))
    voxels = xp.where(valid, images, 0).astype(np.float64)
    count = xp.maximum(valid.sum(axis=axes, keepdims=True), 1)
    voxels -= voxels.sum(axis=axes, keepdims=True) / count
    voxels *= valid
    spread = xp.sqrt((voxels * voxels).sum(axis=axes, keepdims=True) / count)
    return (voxels / xp.where(spread > 0, spread, 1)).astype(np.float32), valid.astype(np.float32)


def _fft(xp: ModuleType) -> Any:
    if xp is np:
        import scipy.fft

        return scipy.fft
    return xp.fft


def _fast_length(n: int) -> int:
    import scipy.fft

    return int(scipy.fft.next_fast_len(n, real=True))
