"""Transforms of many images to a common space, from transforms between pairs, so that errors do not accumulate.

In: links, which are measured transforms T between neighbours and between images further apart, with standard errors and
the probability that they are right. Out: a transform A for each image to a common space, and which links were rejected.
Links that agree with each other and with a prior (the motor's shifts or the identity) become more probable
(:func:`agreement`). The residuals
``A_moving @ T - A_fixed`` are linear in A and minimised by least squares: first the linear parts, which for rigid
transforms are replaced by the nearest rotations, then the translations. Links with a large residual relative to the
others lose their weight. The prior connects neighbours with the standard error that it has by the links: it hardly
moves what good links place, outweighs links of planes that lie far apart, and places an image without links.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from linumpy.registration.robust import robust_deviation

#: Weight of the assumed standard error of the prior, in links.
_PRIOR_LINKS = 0.5
#: Median distance from the origin of points that are normal in three dimensions, in standard deviations.
_MEDIAN_DISTANCE = 1.538
#: Probability that the prior holds with its standard error: otherwise a right link may lie anywhere, as a wrong one.
_PRIOR_TRUST = 0.8
#: Maximum number of reweighted solutions.
_ROUNDS = 30


@dataclass(frozen=True)
class PairLink:
    """A measured transform between two images.

    - `fixed`, `moving`: numbers of the images, in their order from 0.
    - `matrix` (rank + 1, rank + 1): homogeneous, in µm: a point p of the fixed image is at ``matrix @ (p, 1)`` in the
      moving one.
    - `error_um`: standard error of a position. A link whose error is infinite is not used.
    - `evidence`: probability that the link is right, from 0 to 1: its weight.
    """

    fixed: int
    moving: int
    matrix: np.ndarray
    error_um: float = 1.0
    evidence: float = 1.0


@dataclass(frozen=True)
class ChainSolution:
    """Transforms of images to a common space.

    - `matrices` (N, rank + 1, rank + 1): homogeneous, in µm: a point p of an image is at ``matrix @ (p, 1)`` in the
      common space.
    - `residuals_um` (number of links,): root mean square distance in the common space between the corners of the fixed
      image, placed by its transform, and the same corners, placed by the link and the transform of the moving image.
    - `rejected` (number of links,): links that the solution leaves out, also because their error is infinite.
    - `placed_by` (N,): "pairs" for an image with a link that is used; for others, which the prior places, "neighbours"
      if there are such images on both sides, otherwise "motor".
    """

    matrices: np.ndarray
    residuals_um: np.ndarray
    rejected: np.ndarray
    placed_by: tuple[str, ...]


def solve_chain(
    count: int,
    links: Sequence[PairLink],
    extent_um: Sequence[float],
    *,
    rigid: bool = True,
    prior: np.ndarray | None = None,
    prior_error_um: float = math.inf,
    reference: int | None = None,
    max_deviation: float = 5.0,
    tolerance_um: float | None = None,
) -> ChainSolution:
    """Solve for the transforms of all images.

    - `links`: the links, in any order.
    - `extent_um`: size of an image along each axis, in µm: residuals are distances at its corners.
    - `rigid`: whether the transforms are rotations and translations; otherwise they are affine.
    - `prior` (count - 1, rank + 1, rank + 1): assumed transform from each image to the next, as in :class:`PairLink`;
      by default the identity.
    - `prior_error_um`: standard error of the prior, above 0; by default it has a millionth of the median weight of the
      links.
    - `reference`: the image whose transform is the identity; by default the middle one.
    - `max_deviation`: robust standard deviations beyond which a link is rejected.
    - `tolerance_um`: a link with a smaller residual is never rejected, nor one whose residual is as small relative to
      its error; by default 0.2 % of the largest extent.
    """
    extent = np.asarray(extent_um, np.float64)
    rank = len(extent)
    reference_index = (count - 1) // 2 if reference is None else reference
    prior_links = (
        np.tile(np.eye(rank + 1), (max(0, count - 1), 1, 1)) if prior is None else np.asarray(prior, np.float64)
    )
    # Links are solved about the centre of the images, where rotation and translation are independent.
    centre = np.eye(rank + 1)
    centre[:-1, -1] = extent / 2
    shifted = np.linalg.inv(centre)
    is_usable = np.array([math.isfinite(link.error_um) and np.isfinite(link.matrix).all() for link in links], bool)
    measured = [shifted @ np.where(np.isfinite(link.matrix), link.matrix, 0) @ centre for link in links]
    weights = np.array([1 / max(link.error_um, 1e-9) ** 2 for link in links])
    ends = [(link.fixed, link.moving) for link in links]
    tolerance = 2e-3 * float(extent.max()) if tolerance_um is None else tolerance_um
    # Limited, so that a link whose error is far below the tolerance does not outweigh the others.
    weights[is_usable] = np.minimum(weights[is_usable], 1 / (tolerance / 40) ** 2)
    weights *= np.where(is_usable, [link.evidence for link in links], 0)
    median_weight = float(np.median(weights[is_usable])) if is_usable.any() else 1.0
    weak_prior = 1e-6 * median_weight
    # Residuals relative to the errors of the links, which are at least the tolerance.
    scales = 1 / np.hypot(1, np.where(is_usable, [link.error_um for link in links], 0) / tolerance)
    ends_all = ends + list(itertools.pairwise(range(count)))
    all_links = np.array([*measured, *(shifted @ prior_links @ centre)]).reshape(-1, rank + 1, rank + 1)
    robust_weights, corners = is_usable.astype(np.float64), _corners([(-e / 2, e / 2) for e in extent])

    def solve(prior_weight: float) -> tuple[np.ndarray, np.ndarray]:
        all_weights = np.concatenate([weights * robust_weights, np.full(len(prior_links), prior_weight)])
        solved = _solve(count, ends_all, all_links, all_weights, reference_index, rigid)
        pairs = zip(ends, measured, strict=True)
        return solved, np.array([_apart(solved[b] @ link, solved[a], corners) for (a, b), link in pairs])

    # Links are rejected where they contradict each other. Whether they contradict the prior is part of their evidence.
    for number in range(_ROUNDS):
        residuals = solve(weak_prior)[1]
        if number < _ROUNDS // 2:
            # First near least absolute distances: least squares would spread the error of a wrong link to others.
            new_weights = is_usable / np.sqrt(1 + (residuals * scales / (0.1 * tolerance)) ** 2)
        else:
            # Tukey's biweights: 0 beyond the tolerance and `max_deviation` robust standard deviations.
            scaled = residuals * scales
            spread = robust_deviation(scaled[is_usable]) if is_usable.any() else 0.0
            new_weights = is_usable * np.clip(1 - (scaled / max(max_deviation * spread, tolerance)) ** 2, 0, 1) ** 2
            if np.abs(new_weights - robust_weights).max(initial=0) < 1e-6:
                break
        robust_weights = new_weights
    solved, residuals = solve(max(1 / prior_error_um**2, weak_prior))
    rejected = robust_weights < 1e-3
    linked = {n for pair, is_rejected in zip(ends, rejected, strict=True) if not is_rejected for n in pair}
    low, high = min(linked, default=count), max(linked, default=-1)
    return ChainSolution(
        matrices=centre @ solved @ shifted, residuals_um=residuals, rejected=rejected,
        placed_by=tuple(
            "pairs" if n in linked else "neighbours" if low < n < high else "motor" for n in range(count)
        ),
    )  # fmt: skip


def agreement(
    links: Sequence[PairLink],
    prior: np.ndarray,
    extent_um: Sequence[float],
    *,
    range_um: float,
    assumed_error_um: float,
    tolerance_um: float,
) -> tuple[np.ndarray, float]:
    """Compute the probability that each link is right, from its own evidence, the prior, and the other links.

    A wrong link lies anywhere in the range of the search, so that it agrees with something else by chance only. Of two
    transforms the distance d is the root mean square over the corners of an image. Both a right link and a wrong one
    are random in three dimensions (shift and rotation): a right link is near, with a normal distribution, and a wrong
    one is anywhere in a ball. The ratio of their densities at d multiplies the odds that the link is right.

    - `links`: the links. Those of infinite error, whose probability is 0, say nothing of others.
    - `prior` (count - 1, rank + 1, rank + 1): As in :func:`solve_chain`.
    - `extent_um`: size of an image along each axis, in µm.
    - `range_um`: about the greatest distance from the prior that was searched.
    - `assumed_error_um`: standard error of the prior between neighbours, before any link is known.
    - `tolerance_um`: error that links have from distortions of the images.

    Returns: (1) The probabilities. (2) Standard error of the prior between neighbours, by the links; at least the
    tolerance.
    """
    corners = _corners([(0.0, e) for e in extent_um])
    distances = np.array([_apart(link.matrix, _composed(prior, link), corners) for link in links])
    own = np.array([link.evidence if math.isfinite(link.error_um) else 0.0 for link in links])
    bounded = np.clip(own, 1e-9, 1 - 1e-9)
    odds = np.log(bounded) - np.log1p(-bounded)
    # The error of the prior grows with the number of images between the ends of a link.
    steps = np.array([abs(link.moving - link.fixed) for link in links])
    errors = np.array([link.error_um for link in links])
    for n, distance in enumerate(distances):
        others = np.where(np.arange(len(links)) == n, 0.0, own)  # A link does not testify for itself.
        spread = _prior_error(distances, errors, steps, others, assumed_error_um) * math.sqrt(steps[n])
        if own[n] > 0:
            ratio = _ratio(distance, math.hypot(spread, tolerance_um, errors[n]), range_um)
            odds[n] += math.log(1 - _PRIOR_TRUST + _PRIOR_TRUST * ratio)
    known = 1 / (1 + np.exp(-odds))
    for triangle in _triangles(links, own):
        first, second, direct = (links[n] for n in triangle)
        distance = _apart(second.matrix @ first.matrix, direct.matrix, corners)
        error = math.hypot(tolerance_um, first.error_um, second.error_um, direct.error_um)
        ratio = _ratio(distance, error, range_um)
        for n in triangle:
            both = math.prod(float(known[m]) for m in triangle if m != n)
            odds[n] += math.log(1 - both + both * ratio + 1e-9)
    evidence = np.where(own > 0, 1 / (1 + np.exp(-odds)), 0.0)
    return evidence, max(tolerance_um, _prior_error(distances, errors, steps, evidence, assumed_error_um))


def _triangles(links: Sequence[PairLink], own: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield the numbers of two links one after the other, and of the link between their ends."""
    numbers = {(link.fixed, link.moving): n for n, link in enumerate(links) if own[n] > 0}
    following: dict[int, list[int]] = {}
    for fixed, moving in numbers:
        following.setdefault(fixed, []).append(moving)
    for (first, second), n in numbers.items():
        for third in following.get(second, ()):
            if (first, third) in numbers:
                yield n, numbers[second, third], numbers[first, third]


def _prior_error(
    distances: np.ndarray, errors: np.ndarray, steps: np.ndarray, evidence: np.ndarray, assumed: float
) -> float:
    """Return the standard error of the prior between neighbours, by its distances to links that are almost certain."""
    # Links whose own error is large say little. The median, because one wrong link must not make the prior worthless.
    own = np.where(evidence > 0, errors, 0)
    weights = np.append(evidence**8 / (1 + (own / assumed) ** 2) ** 2, _PRIOR_LINKS)
    spreads = np.append(np.sqrt(np.maximum(distances**2 - own**2, 0) / steps) / _MEDIAN_DISTANCE, assumed)
    order = np.argsort(spreads)
    below = np.cumsum(weights[order])
    return float(spreads[order][np.searchsorted(below, below[-1] / 2)])


def _ratio(distance: float, spread: float, range_um: float) -> float:
    """Return the density of right links at a distance, normal in three dimensions, relative to that of wrong ones."""
    normal = (2 * math.pi) ** -1.5 * spread**-3 * math.exp(-((distance / spread) ** 2) / 2)
    return normal * 4 / 3 * math.pi * max(range_um, spread) ** 3


def _composed(prior: np.ndarray, link: PairLink) -> np.ndarray:
    """Return what the prior says of a link."""
    low, high = sorted((link.fixed, link.moving))
    matrix = np.eye(prior.shape[-1])
    for step in prior[low:high]:
        matrix = step @ matrix
    return matrix if link.fixed < link.moving else np.linalg.inv(matrix)


def _corners(ends: Sequence[tuple[float, float]]) -> np.ndarray:
    """Return the homogeneous corners of a box: (rank + 1, corners)."""
    return np.array([[*corner, 1.0] for corner in itertools.product(*ends)]).T


def _apart(matrix: np.ndarray, other: np.ndarray, corners: np.ndarray) -> float:
    """Return the root mean square distance between two transforms over the corners of an image."""
    return math.sqrt(float(((((matrix - other) @ corners)[:-1]) ** 2).sum(axis=0).mean()))


def _solve(
    count: int, ends: Sequence[tuple[int, int]], links: np.ndarray, weights: np.ndarray, reference: int, rigid: bool
) -> np.ndarray:
    """Solve ``A[moving] @ link = A[fixed]`` by weighted least squares; A and links are about the centre."""
    rank = links.shape[-1] - 1
    free = [n for n in range(count) if n != reference]
    column = {n: k for k, n in enumerate(free)}
    root_weights = np.sqrt(weights)
    out = np.tile(np.eye(rank + 1), (count, 1, 1))
    if not free:
        return out
    # Rows of A are independent unknowns, so the transposed equations L.T @ A[moving].T - A[fixed].T = 0 are solved.
    left = np.zeros((len(ends) * rank, len(free) * rank))
    right = np.zeros((len(ends) * rank, rank))
    for n, (fixed, moving) in enumerate(ends):
        rows = slice(n * rank, (n + 1) * rank)
        for image, factor in ((moving, links[n, :-1, :-1].T), (fixed, -np.eye(rank))):
            if image == reference:
                right[rows] -= root_weights[n] * factor
            else:
                left[rows, column[image] * rank : (column[image] + 1) * rank] += root_weights[n] * factor
    solved = np.linalg.lstsq(left, right, rcond=1e-12)[0]
    for n in free:
        linear = solved[column[n] * rank : (column[n] + 1) * rank].T
        out[n, :-1, :-1] = _nearest_rotation(linear) if rigid else linear
    left, right = np.zeros((len(ends), len(free))), np.zeros((len(ends), rank))
    for n, (fixed, moving) in enumerate(ends):
        right[n] = -root_weights[n] * (out[moving, :-1, :-1] @ links[n, :-1, -1])
        for image, sign in ((moving, 1.0), (fixed, -1.0)):
            if image != reference:
                left[n, column[image]] = sign * root_weights[n]
    out[free, :-1, -1] = np.linalg.lstsq(left, right, rcond=1e-12)[0]
    return out


def _nearest_rotation(matrix: np.ndarray) -> np.ndarray:
    """Return the rotation nearest to a matrix, by singular value decomposition."""
    u, _, v = np.linalg.svd(matrix)
    turn = np.ones(len(matrix))
    turn[-1] = np.sign(np.linalg.det(u @ v))
    return u * turn @ v
