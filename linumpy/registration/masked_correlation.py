"""Search the translation and rotation between images by masked normalised cross-correlation.

In: pairs of images with masks, and angles. Out: for each pair the angle and the whole-voxel shift that match best, from
which :mod:`linumpy.registration.refine` starts, and how far they stand out among all that were tried. At each shift the
correlation r is Pearson's, over the n voxels that are valid in both images; the score is ``arctanh(r) * sqrt(n)``, of
which the spread at wrong shifts does not depend on n. The correlations at all shifts are computed by FFT, as in
Padfield, Masked object registration in the Fourier domain, IEEE Transactions on Image Processing 21(5), 2012. All
pairs, and as many angles as :data:`SCRATCH_BYTES` allows, are transformed together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import scipy.fft

from linumpy.arrays import Array
from linumpy.device import array_module, to_host
from linumpy.registration.stacked import StackedImages

#: Maximum bytes of the spectra and correlations in memory.
SCRATCH_BYTES = 2**30
#: A variance below this fraction of the greatest variance is a rounding error of the transforms.
_NO_VARIANCE = 1e-9
#: Score of a shift at which the images share too little.
_NOT_VALID = -1e9
#: Shifts along each side of the blocks whose greatest scores are compared: wider than a peak. Minimum number of blocks.
_BLOCK, _MIN_BLOCKS = 7, 8
#: Approximate side in voxels of an independent sample, where too few wrong shifts were tried to tell.
_SAMPLE = 3


@dataclass(frozen=True)
class CoarseMatches:
    """The best shift and angle of each pair: voxel p of the fixed image is at ``matrix @ (p, 1)`` in the moving image.

    - `matrices` (N, rank + 1, rank + 1): homogeneous, from the fixed to the moving image, in voxels.
    - `correlations` (N,): from 0 to 1; 0 for pairs without contrast, overlap or a positive correlation, whose matrix is
      the identity.
    - `evidence` (N,): probability, from 0 to 1, that images which do not match have no score as high as the best one.
      From the greatest scores of blocks of wrong shifts, as extreme values (Gumbel's distribution), and from the
      distance to the second-best peak.
    - `is_at_edge` (N,): whether the best shift or angle is at the end of those that were tried.
    """

    matrices: np.ndarray
    correlations: np.ndarray
    evidence: np.ndarray
    is_at_edge: np.ndarray


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
    """Find the shift and the angle of the greatest score of many pairs.

    - `fixed`, `moving` (N, [Z,] Y, X): the images, all of one shape. Voxels that are not finite are not valid.
    - `masks` (array of bool or None, array of bool or None): valid voxels of the fixed and the moving images, in their
      shape; None for all.
    - `angles`: angles to try, in degrees: rotations about the centre, in the plane of the last two axes.
    - `max_shift`: maximum shift along each axis, as a fraction of the image.
    - `min_overlap`: fraction of the smaller mask that must overlap.
    - `spacing`: voxel spacing in any unit, for the rotation; by default the same along all axes.

    Returns: On the host.
    """
    shape = fixed.shape[1:]
    reach = np.broadcast_to(np.asarray(max_shift, np.float64), (len(shape),))
    limits = tuple(min(math.ceil(n * r), n - 1) for n, r in zip(shape, reach, strict=True))
    steps = np.ones(len(shape)) if spacing is None else np.asarray(spacing, np.float64)
    rotations = [rotation_about_centre(angle, shape, steps) for angle in angles]
    search = _Search(fixed, moving, masks, limits, min_overlap)
    best = np.zeros((len(fixed), 3))  # score, correlation, combined index of angle and shift
    best[:, 2] = -1
    maxima = np.full((len(fixed), *map(len, search.blocks)), -np.inf)
    batch = max(1, int(SCRATCH_BYTES // search.nbytes))
    for first in range(0, len(rotations), batch):
        matches, block_maxima = map(to_host, search.correlate(np.array(rotations[first : first + batch])))
        better = matches[:, 0] > best[:, 0]
        matches[:, 2] += first * search.shifts
        best[better] = matches[better]
        maxima = np.maximum(maxima, block_maxima)
    matrices = np.tile(np.eye(len(shape) + 1), (len(fixed), 1, 1))
    evidence, is_at_edge = np.zeros(len(fixed)), np.zeros(len(fixed), bool)
    for pair in np.flatnonzero(best[:, 2] >= 0):
        number, shift_index = divmod(int(best[pair, 2]), search.shifts)
        position = np.array(np.unravel_index(shift_index, search.window))
        shift = position - limits
        matrices[pair, :-1] = rotations[number]
        matrices[pair, :-1, -1] += rotations[number][:, :-1] @ shift
        evidence[pair] = _evidence(best[pair, 0], position, maxima[pair], search.blocks)
        is_at_edge[pair] = bool((np.abs(shift) == limits)[np.array(limits) > 0].any()) or (
            len(angles) > 1 and angles[number] in (min(angles), max(angles))
        )
    return CoarseMatches(
        matrices=matrices, correlations=best[:, 1], evidence=evidence, is_at_edge=is_at_edge
    )  # fmt: skip


def _evidence(score: float, position: np.ndarray, maxima: np.ndarray, blocks: Sequence[Sequence[slice]]) -> float:
    """Return the probability that a score is not the greatest of many wrong shifts.

    - `score`, `position`: the greatest score, and its index among the shifts.
    - `maxima`: greatest score of each block of shifts, over all angles.
    - `blocks`: the blocks along each axis.
    """
    apart = [[max(b.start - p, p - b.stop + 1) for b in line] for p, line in zip(position, blocks, strict=True)]
    distance = np.max(np.meshgrid(*apart, indexing="ij"), axis=0)
    wrong = maxima[(distance >= _BLOCK) & (maxima > _NOT_VALID)]
    if len(wrong) < _MIN_BLOCKS:
        tried = math.prod(line[-1].stop for line in blocks)
        return max(0.0, 1 - tried * math.erfc(score / _SAMPLE / math.sqrt(2)) / 2)
    # Gumbel's distribution by its mean and standard deviation.
    scale = max(float(wrong.std()), 1e-9 * score) * math.sqrt(6) / math.pi
    location = float(wrong.mean()) - np.euler_gamma * scale
    chance = -math.expm1(-maxima.size * math.exp(min(0.0, (location - score) / scale)))
    # The two greatest of many values differ by an exponentially distributed step.
    return 1 - max(chance, math.exp(min(0.0, (float(wrong.max()) - score) / scale)))


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
        self.blocks = [_blocks(n) for n in self.window]
        self.axes = tuple(range(-len(limits), 0))
        self.size = tuple(fast_length(n + limit) for n, limit in zip(fixed.shape[1:], limits, strict=True))
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

    def correlate(self, maps: np.ndarray) -> tuple[Array, Array]:
        """Return the best match of each pair, and the greatest score of each block of shifts over all maps.

        A match is the score, the correlation, the overlap, and the combined index of map and shift.
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
        correlations = xp.clip(shared / spread, -1, 1)
        # Limited, because equal images have an infinite score.
        scores = xp.where(valid, xp.arctanh(xp.clip(correlations, -0.9999, 0.9999)) * xp.sqrt(safe), _NOT_VALID)
        maxima = scores.max(axis=1)
        for axis, line in enumerate(self.blocks, 1):
            maxima = xp.stack([maxima[(slice(None),) * axis + (part,)].max(axis=axis) for part in line], axis=axis)
        index = scores.reshape(pairs, -1).argmax(axis=1)[:, None]
        best = [xp.take_along_axis(part.reshape(pairs, -1), index, 1)[:, 0] for part in (scores, correlations)]
        return xp.stack([*best, index[:, 0].astype(np.float64)], axis=1), maxima


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


def _blocks(length: int) -> list[slice]:
    """Cut an axis of shifts into blocks of about equal length."""
    edges = np.linspace(0, length, max(1, length // _BLOCK) + 1).astype(int).tolist()
    return [slice(*edge) for edge in itertools.pairwise(edges)]


def _fft(xp: ModuleType) -> Any:
    return scipy.fft if xp is np else xp.fft


def fast_length(n: int) -> int:
    """Return the smallest length from `n` on of which a transform of real numbers is fast."""
    return int(scipy.fft.next_fast_len(n, real=True))
