"""Shifts between neighbouring tiles, each with the probability that it is right.

In: tiles in their grid. Out: :class:`MeasuredPairs`.

Tiles are compared by their structure, which moves with the sample. Illumination (flat and dark field), dust and seams
of the galvo are fixed in the frame of a tile: they make all tiles alike, and would align tiles without sample. So tiles
are band-pass filtered, by local linear regression with Gaussian weights, so that the border of a tile, where tiles
overlap, has no bias. What is left of the shared pattern is, at each pixel, proportional to the local level (flat field)
plus a constant (dark field). Both are fitted over all tiles by weighted, robust least squares. The fit explains some
variance by chance, more so with few tiles; so it is taken out only as far as it explains more (an F statistic over all
pixels).

1. The score maps of all pairs along an axis are calibrated: what tiles that are no neighbours score, which share what
   is fixed in a tile but no sample, is chance.
2. A score becomes a Bayes factor of "this is the shift" against "the images do not match", with all strengths of a
   match likely before (a half-normal prior of Fisher's z, integrated).
3. The step that all pairs of an axis have in common is found from the sum over pairs of the logarithm of the Bayes
   factor, averaged over the scatter about the step. Pairs that do not match hardly change the sum. Shifts far from the
   nominal one are less probable before.
4. Given the step, the posterior of each pair's shift is the Bayes factor times the scatter about the step, which has
   wide tails. The evidence is its share within two pixels of its maximum, where "no match" takes part: an edge along
   which tiles slide, or two equal peaks, are no evidence.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from scipy.ndimage import gaussian_filter
from scipy.special import expit, log_ndtr

from linumpy.arrays import Array
from linumpy.device import array_module, to_host
from linumpy.registration.shift_scores import refine_shifts, score_shifts

#: Standard deviations in pixels of the Gaussians whose difference is the band-pass filter.
BAND = (1.0, 6.0)
#: Number of tiles from which on a dark field is fitted besides the flat field.
_MIN_TILES_OF_DARK = 5
#: Error of the shared pattern that must be expected, as a share of the variance of a tile that shows nothing else.
_PATTERN_LEFT = 0.05
#: Residuals beyond this number of standard deviations have less weight.
_HUBER = 2.0
#: Share of the nominal overlap by which a shift may differ from the nominal one.
_REACH = 0.75
#: Scale of Fisher's z of pairs that match.
_MATCH = 0.7
#: Standard deviations in pixels of the scatter about the step of an axis that are tried, and the share of shifts that
#: are anywhere.
_SCATTERS, _RARE = (1.0, 2.0, 4.0), 0.05
#: Probability of a match before anything is known.
_PRIOR = 0.5
#: Pixels around a maximum that belong to it: of a pair, and of the step of an axis.
_PEAK, _STEP_PEAK = 2, 3
#: Bayes factor of "pairs of this axis match" against "none does" at which both are equally probable for noise of single
#: pixels, times the number of independent samples of an overlap.
_BY_CHANCE = 1000.0
#: Number of independent samples below which an overlap has few.
_FEW = 15.0
#: Two strips show structure if a sample of both has more than so many pixels (noise of single pixels has 6 after
#: smoothing), and if the mean of their relative local variance, which is 0.5 in the mean of all tiles, is above this.
_STRUCTURED, _CONTRAST = 20.0, 0.2
#: Number of pairs that are compared at the same time.
_BATCH = 64


@dataclass(frozen=True)
class TileStructure:
    """The structure of tiles.

    - `smooth` (float32, (n, Y, X)): tiles without noise of single pixels, for fractions of pixels, where the shared
      pattern hardly matters.
    - `band` (float32, (n, Y, X)): the same after the band-pass filter, of about equal contrast everywhere.
    - `variance` (float32, (n, Y, X)): local mean square of `band`, below 1.
    """

    smooth: Array
    band: Array
    variance: Array


@dataclass(frozen=True, kw_only=True)
class MeasuredPairs:
    """Shifts of neighbouring tiles.

    - `fixed`, `moving` (n, 2): row and column of the tiles of each pair, neighbours along one axis.
    - `shifts`, `deviations` (n, 2): measured position of each moving tile relative to the fixed one in pixels, and its
      standard deviation.
    - `correlation` (n,): correlation of the overlap.
    - `evidence` (n,): probability that the shift is right.
    - `structured` (n,): whether both tiles show more than noise where they would overlap.
    """

    fixed: np.ndarray
    moving: np.ndarray
    shifts: np.ndarray
    deviations: np.ndarray
    correlation: np.ndarray
    evidence: np.ndarray
    structured: np.ndarray


def measure_pairs(tiles: Array, present: np.ndarray, overlap: tuple[int, int]) -> MeasuredPairs:
    """Measure the shifts of all neighbours.

    - `tiles` (rows, columns, Y, X): the tiles.
    - `present` (rows, columns): false for tiles without contrast.
    - `overlap` (int, int): nominal overlap of neighbours along Y and X in pixels.
    """
    structure = find_structure(tiles[present])
    along = [_measure_axis(structure, present, axis, overlap[axis]) for axis in (0, 1)]
    return MeasuredPairs(**{name: np.concatenate([part[name] for part in along]) for name in along[0]})


def _measure_axis(structure: TileStructure, present: np.ndarray, axis: int, overlap: int) -> dict[str, np.ndarray]:
    """Return the fields of :class:`MeasuredPairs` for the neighbours along an axis of the grid."""
    fixed, moving = _neighbours(present, axis)
    if not len(fixed):
        none = {"shifts": np.zeros((0, 2)), "deviations": np.zeros((0, 2)), "structured": np.zeros(0, bool)}
        return {"fixed": fixed, "moving": moving, "correlation": np.zeros(0), "evidence": np.zeros(0)} | none
    size, reach = structure.band.shape[1 + axis], int(_REACH * overlap)
    # Wide enough for the greatest overlap of the search.
    strip = min(size, overlap + reach)
    nominal = np.array([0, 0])
    nominal[axis] = strip - overlap
    limit = np.array([min(reach, n // 2) for n in structure.band.shape[1:]])
    limit[axis] = reach
    before = (slice(None),) * (1 + axis)
    number = np.cumsum(present).reshape(present.shape) - 1
    first, second = (
        TileStructure(*(images[number[tuple(tile.T)]][(*before, cut)] for images in vars(structure).values()))
        for tile, cut in ((fixed, slice(size - strip, None)), (moving, slice(strip)))
    )
    factors, alike, samples = _bayes_factors(first, second, nominal - limit, nominal + limit, axis)
    whole, evidence = find_evidence(factors, limit, structured=float(alike.mean()), samples=samples)
    xp = array_module(structure.band)
    refined = refine_shifts(first.smooth, second.smooth, xp.asarray((whole + nominal - limit).astype(np.float64)))
    shifts, deviations, correlation = map(to_host, refined)
    shifts[:, axis] += size - strip
    return {
        "fixed": fixed, "moving": moving, "shifts": shifts, "deviations": deviations, "correlation": correlation,
        "evidence": evidence, "structured": alike,
    }  # fmt: skip


def _neighbours(present: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns of all pairs of neighbours along an axis that are both present, (n, 2) each."""
    ahead = np.roll(present, -1, axis=axis)
    ahead[(slice(None),) * axis + (-1,)] = False
    fixed = np.argwhere(present & ahead)
    return fixed, fixed + np.eye(2, dtype=np.int64)[axis]


def _bayes_factors(
    first: TileStructure, second: TileStructure, low: np.ndarray, high: np.ndarray, axis: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Compare pairs of strips at all shifts.

    Returns: (1) Logarithm of the Bayes factor of a match at each shift. (2) Whether both strips show more than noise.
    (3) Median number of independent samples of an overlap at the nominal shift.
    """
    maps, chance = [], []
    bounds: tuple[list[int], list[int]] = low.tolist(), high.tolist()
    count = len(first.band)
    across = slice(None, None, -1)
    # Tiles that are no neighbours; of a single pair, or of two, the mirrored tile.
    others = np.roll(np.arange(count), count // 2)
    mirror = (slice(None), across) if axis else (slice(None), slice(None), across)
    for start in range(0, count, _BATCH):
        part = slice(start, start + _BATCH)
        stranger = [images[others[part]] if count > 2 else images[mirror] for images in (second.band, second.variance)]
        fixed = first.band[part], first.variance[part]
        maps.append(score_shifts(fixed, (second.band[part], second.variance[part]), *bounds))
        chance.append(score_shifts(fixed, (stranger[0], stranger[1]), *bounds)[:2])
    z, deviation, area = (np.concatenate(list(map(to_host, part))).astype(float) for part in zip(*maps, strict=True))
    contrast = [to_host(array_module(strip.variance).mean(strip.variance, axis=(1, 2))) for strip in (first, second)]
    structured = (area > _STRUCTURED) & (np.minimum(*contrast) > _CONTRAST)
    by_chance, spread = (np.concatenate(list(map(to_host, part))).astype(float) for part in zip(*chance, strict=True))
    square, whole = (by_chance / spread) ** 2, deviation.copy()
    deviation *= max(1.0, float(np.sqrt(square.mean())))
    few = spread**-2 < _FEW
    if few.any():
        # The local contrast of a narrow overlap, which scales correlations, is that of its surroundings.
        narrow = (whole**-2 < _FEW) & ~structured[:, None, None]
        deviation = np.where(narrow, np.maximum(deviation, whole * np.sqrt(square[few].mean())), deviation)
    both = np.sqrt(deviation**2 + _MATCH**2)
    score = z / deviation
    factors = np.log(2 * deviation / both) + 0.5 * (score * _MATCH / both) ** 2 + log_ndtr(score * _MATCH / both)
    nominal = tuple(size // 2 for size in z.shape[1:])
    return factors, structured, float(np.median(whole[:, *nominal] ** -2))


def find_evidence(
    factors: np.ndarray, nominal: np.ndarray, *, structured: float, samples: float
) -> tuple[np.ndarray, np.ndarray]:
    """Find the most probable shift of each pair along an axis, and the probability of each.

    - `factors` (n, shifts along Y, shifts along X): logarithm of the Bayes factor of each shift.
    - `nominal` (2,): index of the nominal shift.
    - `structured`: share of the pairs that show more than noise of single pixels. Others need more evidence that any
      pair matches.
    - `samples`: number of independent samples of an overlap: of few, chance gives large scores more often.

    Returns: (1) Index of the most probable shift. (2) Its probability.
    """
    shape = factors.shape[1:]
    rest = _RARE / (shape[0] * shape[1])
    highest = factors.max(axis=(1, 2), keepdims=True)
    scaled = np.exp(factors - highest)
    totals = np.stack([_total(scaled, highest, sigma, rest) for sigma in _SCATTERS])
    grid = np.stack(np.meshgrid(*(np.arange(size) for size in shape), indexing="ij"))
    square = np.square(grid - nominal[:, None, None]).sum(axis=0)
    # The reach is two standard deviations.
    before = np.exp(-0.5 * square / (max(shape) / 4) ** 2)
    probable = np.exp(totals - totals.max()) * before / before.sum() / len(_SCATTERS)
    # The Bayes factor of "pairs match" against "none does" exceeds x by chance with a probability of at most 1 / x.
    any_match = float(np.log(probable.sum()) + totals.max())
    known = float(expit(any_match - np.log(max(1.0, _BY_CHANCE / samples))))
    probable /= probable.sum()
    step = np.array(np.unravel_index(probable.sum(axis=0).argmax(), shape))
    near = abs(grid - step[:, None, None]).max(axis=0) <= _STEP_PEAK
    agreed = probable[:, near].sum(axis=1)
    square = np.square(grid - step[:, None, None]).sum(axis=0)
    prior = rest + (1 - _RARE) * sum(
        share * np.exp(-0.5 * square / sigma**2) / (2 * np.pi * sigma**2)
        for share, sigma in zip(agreed / agreed.sum(), _SCATTERS, strict=True)
    )
    posterior = _PRIOR * prior * scaled
    best = posterior.reshape(len(factors), -1).argmax(axis=1)
    shifts = np.stack(np.unravel_index(best, shape), axis=1)
    mine = abs(grid - shifts[:, :, None, None]).max(axis=1) <= _PEAK
    evidence = (posterior * mine).sum(axis=(1, 2)) / (
        posterior.sum(axis=(1, 2)) + (1 - _PRIOR) * np.exp(-highest[:, 0, 0])
    )
    return shifts, (structured + (1 - structured) * known) * agreed.sum() * evidence


def _total(scaled: np.ndarray, highest: np.ndarray, sigma: float, rest: float) -> np.ndarray:
    """Return for each step of an axis the logarithm of the probability of all pairs, which scatter about the step."""
    spread = rest * scaled.sum(axis=(1, 2), keepdims=True)
    spread = spread + (1 - _RARE) * gaussian_filter(scaled, (0, sigma, sigma), mode="constant")
    matched = np.log(_PRIOR) + np.log(spread + 1e-300) + highest
    return np.logaddexp(np.log(1 - _PRIOR), matched).sum(axis=0)


def find_structure(tiles: Array) -> TileStructure:
    """Separate the structure of tiles from the pattern that they share.

    - `tiles` (n, Y, X): tiles with contrast. Pixels that are not finite count as the tile's mean.
    """
    xp = array_module(tiles)
    pixels = _normalized(xp, tiles)
    fine, level = (_smoothed(xp, pixels, sigma) for sigma in BAND)
    band = fine - level
    variance = _smoothed(xp, band * band, BAND[1], order=0)
    before = xp.mean(variance, axis=(1, 2), keepdims=True)
    weight = 1 / (variance + 1e-3 * before + 1e-12)
    pattern = _shared_pattern(xp, band, level, weight)
    band -= pattern
    # Edges have much more contrast than the texture, and would decide alone. What is left of tiles that show only the
    # shared pattern is not amplified.
    variance = _smoothed(xp, band * band, BAND[1], order=0)
    total = variance + xp.mean(variance, axis=(1, 2), keepdims=True) + _PATTERN_LEFT * before + 1e-12
    return TileStructure(fine, band / xp.sqrt(total), variance / total)


def _normalized(xp: ModuleType, tiles: Array) -> Array:
    """Return tiles of float32, less their common mean, and relative to their common extent."""
    pixels = tiles.astype(np.float32)
    finite = xp.isfinite(pixels)
    count = xp.maximum(finite.sum(axis=(1, 2), keepdims=True), 1)
    mean = xp.where(finite, pixels, 0).sum(axis=(1, 2), keepdims=True, dtype=np.float64) / count
    pixels = xp.where(finite, pixels, mean.astype(np.float32))
    return pixels / abs(pixels).max()


def _smoothed(xp: ModuleType, images: Array, sigma: float, order: int = 1) -> Array:
    """Smooth images by local regression of an order: 0 for means, 1 for lines."""
    height, width = images.shape[1:]
    rows, columns = (xp.asarray(_smoother(size, sigma, order)) for size in (height, width))
    return rows @ (images @ columns.T)


@functools.lru_cache(maxsize=64)
def _smoother(size: int, sigma: float, order: int) -> np.ndarray:
    """Return the matrix of local regression with Gaussian weights: float32, (size, size)."""
    offset = np.arange(size)[None, :] - np.arange(size)[:, None]
    weight = np.exp(-0.5 * (offset / min(sigma, size / 6)) ** 2)
    sums = [(weight * offset**k).sum(axis=1, keepdims=True) for k in (0, 1, 2)]
    if order == 1:
        weight = weight * (sums[2] - sums[1] * offset)
    return (weight / weight.sum(axis=1, keepdims=True)).astype(np.float32)


def _shared_pattern(xp: ModuleType, band: Array, level: Array, weight: Array) -> Array:
    """Return the part of band-passed tiles that is fixed in their frame, (n, Y, X)."""
    number = len(band)
    parameters = 2 if number >= _MIN_TILES_OF_DARK else 1
    if number <= parameters:
        return xp.zeros_like(band)
    pattern = _fit(band, level, weight, parameters)
    total, left = ((weight * part * part).sum(dtype=np.float64) for part in (band, band - pattern))
    explained, chance = (total - left) / parameters, left / (number - parameters)
    share = xp.where(explained > chance, 1 - chance / xp.maximum(explained, 1e-30), 0).astype(np.float32)
    deviation = abs(band - pattern) * xp.sqrt(weight)
    return share * _fit(band, level, weight * xp.minimum(1, _HUBER / xp.maximum(deviation, 1e-6)), parameters)


def _fit(band: Array, level: Array, weight: Array, parameters: int) -> Array:
    """Fit ``flat * level + dark`` at each pixel over all tiles; with one parameter `dark` is 0."""
    total = weight.sum(axis=0)
    if parameters == 1:
        return level * ((weight * level * band).sum(axis=0) / ((weight * level * level).sum(axis=0) + 1e-6 * total))
    mean_level, mean_band = ((weight * part).sum(axis=0) / total for part in (level, band))
    varied = level - mean_level
    spread = (weight * varied * varied).sum(axis=0) + 1e-6 * total
    return mean_band + varied * ((weight * varied * band).sum(axis=0) / spread)
