"""Shifts between neighbouring tiles, each with the probability that it is right.

In: tiles in their grid. Out: :class:`MeasuredPairs`.

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

from dataclasses import dataclass

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, to_host
from linumpy.registration.shift_scores import ScoreMaps, refine_shifts, score_shifts
from linumpy.registration.tile_structure import find_structure

#: Share of the nominal overlap by which a shift may differ from the nominal one.
_REACH = 0.75
#: Scale of Fisher's z of pairs that match.
_MATCH = 0.7
#: Standard deviations in pixels of the scatter about the step of an axis, and the weight of each; the rest is uniform.
_SCATTERS = ((1.5, 0.6), (4.0, 0.35))
#: Probability of a match before anything is known.
_PRIOR = 0.5
#: Pixels around a maximum that belong to it: of a pair, and of the step of an axis.
_PEAK, _STEP_PEAK = 2, 3


@dataclass(frozen=True)
class MeasuredPairs:
    """Shifts of neighbouring tiles.

    Attributes
    ----------
    fixed, moving : numpy.ndarray of int, (n, 2)
        Row and column of the tiles of each pair, neighbours along one axis.
    shifts, deviations : numpy.ndarray, (n, 2)
        Measured position of each moving tile relative to the fixed one in pixels, and its standard deviation.
    correlation : numpy.ndarray, (n,)
        Correlation of the overlap.
    evidence : numpy.ndarray, (n,)
        Probability that the shift is right.
    """

    fixed: np.ndarray
    moving: np.ndarray
    shifts: np.ndarray
    deviations: np.ndarray
    correlation: np.ndarray
    evidence: np.ndarray


def measure_pairs(tiles: Array, present: np.ndarray, overlap: tuple[int, int]) -> MeasuredPairs:
    """Measure the shifts of all neighbours.

    Parameters
    ----------
    tiles : numpy.ndarray or cupy.ndarray, (rows, columns, Y, X)
        The tiles.
    present : numpy.ndarray of bool, (rows, columns)
        False for tiles without contrast.
    overlap : (int, int)
        Nominal overlap of neighbours along Y and X in pixels.
    """
    structure = find_structure(tiles[present])
    numbers = np.cumsum(present).reshape(present.shape) - 1
    along = [_measure_axis(structure, present, numbers, axis, overlap[axis]) for axis in (0, 1)]
    return MeasuredPairs(*(np.concatenate(parts) for parts in zip(*along, strict=True)))


def _measure_axis(structure, present, numbers, axis, overlap):
    fixed = np.array([tile for tile in np.argwhere(present) if tile[axis] + 1 < present.shape[axis]], np.int64)
    fixed = fixed.reshape(-1, 2)
    moving = fixed + np.eye(2, dtype=np.int64)[axis]
    both = present[moving[:, 0], moving[:, 1]]
    fixed, moving = fixed[both], moving[both]
    if not len(fixed):
        return fixed, moving, np.zeros((0, 2)), np.zeros((0, 2)), np.zeros(0), np.zeros(0)
    size, reach = structure.band.shape[1 + axis], int(_REACH * overlap)
    strip = min(size, overlap + reach)
    cut = [slice(None), slice(None)]
    sides = []
    for tile, part in ((fixed, slice(size - strip, None)), (moving, slice(strip))):
        cut[axis] = part
        index = numbers[tile[:, 0], tile[:, 1]]
        sides.append([images[index][(slice(None), *cut)] for images in (structure.band, structure.variance, structure.smooth)])
    across = min(reach, structure.band.shape[2 - axis] // 2)
    low, high = [-across, -across], [across, across]
    low[axis], high[axis] = strip - overlap - reach, strip - overlap + reach
    others, flip = _strangers(len(fixed)), (slice(None), *(slice(None, None, -1 if k != axis else 1) for k in (0, 1)))
    maps = score_shifts(sides[0][:2], sides[1][:2], tuple(low), tuple(high))
    stranger = [part[others] if len(fixed) > 2 else part[flip] for part in sides[1][:2]]
    chance = score_shifts(sides[0][:2], stranger, tuple(low), tuple(high))
    nominal = np.array([0, 0])
    nominal[axis] = strip - overlap
    factors = _bayes_factors(maps, chance)
    whole, evidence = find_evidence(factors, nominal - low)
    whole = whole + low
    xp = array_module(structure.band)
    refined = refine_shifts(sides[0][2], sides[1][2], xp.asarray(whole.astype(np.float64)))
    shifts = to_host(refined.shifts)
    shifts[:, axis] += size - strip
    return fixed, moving, shifts, to_host(refined.deviations), to_host(refined.correlation), evidence


def _strangers(count: int) -> np.ndarray:
    """Return for each pair another pair, whose moving tile is no neighbour of the pair's fixed tile."""
    return np.roll(np.arange(count), count // 2)


def _bayes_factors(maps: ScoreMaps, chance: ScoreMaps) -> np.ndarray:
    """Return the logarithms of the Bayes factors of a match at each shift, float64, on the host."""
    from scipy.special import log_ndtr

    z, deviation, other_z, other_deviation = (
        to_host(part).astype(np.float64) for part in (maps.z, maps.deviation, chance.z, chance.deviation)
    )
    inflation = max(1.0, float(np.sqrt(np.mean((other_z / other_deviation) ** 2))))
    import os
    if os.environ.get("DBG"): print("inflation", inflation, "max null", (other_z/other_deviation).max(axis=(1,2)).round(1), "real", (z/deviation).max(axis=(1,2)).round(1))
    deviation = deviation * inflation
    both = np.sqrt(deviation**2 + _MATCH**2)
    score = z / deviation
    return np.log(2 * deviation / both) + 0.5 * (score * _MATCH / both) ** 2 + log_ndtr(score * _MATCH / both)


def find_evidence(factors: np.ndarray, nominal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the most probable shift of each pair along an axis, and the probability of each.

    Parameters
    ----------
    factors : numpy.ndarray, (n, shifts along Y, shifts along X)
        Logarithm of the Bayes factor of each shift.
    nominal : numpy.ndarray, (2,)
        Index of the nominal shift.

    Returns
    -------
    shifts : numpy.ndarray of int, (n, 2)
        Index of the most probable shift.
    evidence : numpy.ndarray, (n,)
        Its probability.
    """
    from scipy.ndimage import gaussian_filter

    shape = factors.shape[1:]
    count = shape[0] * shape[1]
    highest = factors.max(axis=(1, 2), keepdims=True)
    scaled = np.exp(factors - highest)
    rest = (1 - sum(weight for _, weight in _SCATTERS)) / count
    spread = rest * scaled.sum(axis=(1, 2), keepdims=True) + sum(
        weight * gaussian_filter(scaled, (0, sigma, sigma), mode="constant") for sigma, weight in _SCATTERS
    )
    # log((1 - p) + p * spread * exp(highest)), summed over pairs
    total = np.logaddexp(np.log(1 - _PRIOR), np.log(_PRIOR) + np.log(spread + 1e-300) + highest).sum(axis=0)
    grid = np.meshgrid(*(np.arange(size) for size in shape), indexing="ij")
    distance = np.hypot(*(line - middle for line, middle in zip(grid, nominal, strict=True)))
    total -= 0.5 * (distance / (max(shape) / 4)) ** 2
    step = np.unravel_index(total.argmax(), shape)
    near = np.maximum(*(abs(line - middle) for line, middle in zip(grid, step, strict=True))) <= _STEP_PEAK
    probable = np.exp(total - total.max())
    agreed = probable[near].sum() / probable.sum()
    square = sum((line - middle) ** 2 for line, middle in zip(grid, step, strict=True))
    prior = rest + sum(
        weight * np.exp(-0.5 * square / sigma**2) / (2 * np.pi * sigma**2) for sigma, weight in _SCATTERS
    )
    posterior = _PRIOR * prior * scaled
    best = posterior.reshape(len(factors), -1).argmax(axis=1)
    shifts = np.stack(np.unravel_index(best, shape), axis=1)
    mine = np.maximum(*(abs(grid[k] - shifts[:, k, None, None]) for k in (0, 1))) <= _PEAK
    evidence = (posterior * mine).sum(axis=(1, 2)) / (
        posterior.sum(axis=(1, 2)) + (1 - _PRIOR) * np.exp(-highest[:, 0, 0])
    )
    return shifts, agreed * evidence
