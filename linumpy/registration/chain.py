"""Transforms of many images to a common space, from transforms between pairs, so that errors do not accumulate.

In: links, which are measured transforms T between neighbours and between images further apart, with standard errors.
Out: a transform A for each image to a common space, and which links were rejected. The residuals
``A_moving @ T - A_fixed`` are linear in A and minimised by least squares: first the linear parts, which for rigid
transforms are replaced by the nearest rotations, then the translations. Links with a large residual relative to the
others lose their weight. A prior of negligible weight, the motor's shifts or the identity, connects neighbours, and
places an image without links between its neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linumpy.registration.robust import robust_deviation

#: Weight of the prior, relative to the median weight of the links.
_PRIOR = 1e-6
#: Maximum number of reweighted solutions.
_ROUNDS = 30


@dataclass(frozen=True)
class PairLink:
    """A measured transform between two images.

    Attributes
    ----------
    fixed, moving : int
        Numbers of the images, in their order from 0.
    matrix : numpy.ndarray, (rank + 1, rank + 1)
        Homogeneous, in µm: a point p of the fixed image is at ``matrix @ (p, 1)`` in the moving one.
    error_um : float
        Standard error of a position. A link whose error is infinite is not used.
    """

    fixed: int
    moving: int
    matrix: np.ndarray
    error_um: float = 1.0


@dataclass(frozen=True)
class ChainSolution:
    """Transforms of images to a common space.

    Attributes
    ----------
    matrices : numpy.ndarray, (N, rank + 1, rank + 1)
        Homogeneous, in µm: a point p of an image is at ``matrix @ (p, 1)`` in the common space.
    residuals_um : numpy.ndarray, (number of links,)
        Root mean square distance in the common space between the corners of the fixed image, placed by its transform,
        and the same corners, placed by the link and the transform of the moving image.
    rejected : numpy.ndarray of bool, (number of links,)
        Links that the solution leaves out, also because their error is infinite.
    interpolated : numpy.ndarray of bool, (N,)
        Images without a link that is used, which the prior placed.
    """

    matrices: np.ndarray
    residuals_um: np.ndarray
    rejected: np.ndarray
    interpolated: np.ndarray


def solve_chain(
    count: int,
    links: Sequence[PairLink],
    extent_um: Sequence[float],
    *,
    rigid: bool = True,
    prior: np.ndarray | None = None,
    reference: int | None = None,
    max_deviation: float = 5.0,
    tolerance_um: float | None = None,
) -> ChainSolution:
    """Solve for the transforms of all images.

    Parameters
    ----------
    count : int
        Number of images.
    links : sequence of PairLink
        The links, in any order.
    extent_um : sequence of float
        Size of an image along each axis, in µm: residuals are distances at its corners.
    rigid : bool
        Whether the transforms are rotations and translations; otherwise they are affine.
    prior : numpy.ndarray, (count - 1, rank + 1, rank + 1), optional
        Assumed transform from each image to the next, as in :class:`PairLink`; by default the identity.
    reference : int, optional
        The image whose transform is the identity; by default the middle one.
    max_deviation : float
        Robust standard deviations beyond which a link is rejected.
    tolerance_um : float, optional
        A link with a smaller residual is never rejected; by default 0.2 % of the largest extent.

    Raises
    ------
    ValueError
        No images; a reference or links to images that do not exist; a link of an image to itself; matrices or a prior
        whose shape does not fit.
    """
    extent = np.asarray(extent_um, np.float64)
    rank = len(extent)
    reference_index = (count - 1) // 2 if reference is None else reference
    if count < 1 or not 0 <= reference_index < count:
        raise ValueError(f"count={count}, reference={reference}: pass one image or more, and one of them")
    for link in links:
        if link.fixed == link.moving or not (0 <= link.fixed < count and 0 <= link.moving < count):
            raise ValueError(f"a link of image {link.fixed} to {link.moving}: there are {count} images")
        if np.shape(link.matrix) != (rank + 1, rank + 1):
            raise ValueError(f"a matrix of {np.shape(link.matrix)} does not fit {rank} axes")
    prior_links = (
        np.tile(np.eye(rank + 1), (max(0, count - 1), 1, 1)) if prior is None else np.asarray(prior, np.float64)
    )
    if prior_links.shape != (max(0, count - 1), rank + 1, rank + 1):
        raise ValueError(f"a prior of shape {prior_links.shape}: one for each of {count - 1} neighbours is needed")
    # Links are solved about the centre of the images, where rotation and translation are independent.
    centre = np.eye(rank + 1)
    centre[:-1, -1] = extent / 2
    shifted = np.linalg.inv(centre)
    is_usable = np.array([math.isfinite(link.error_um) and np.isfinite(link.matrix).all() for link in links], bool)
    measured = [shifted @ np.where(np.isfinite(link.matrix), link.matrix, 0) @ centre for link in links]
    weights = np.array(
        [1 / max(link.error_um, 1e-9) ** 2 if good else 0.0 for link, good in zip(links, is_usable, strict=True)]
    )
    ends = [(link.fixed, link.moving) for link in links]
    tolerance = 2e-3 * float(extent.max()) if tolerance_um is None else tolerance_um
    # Limited, so that a link whose error is far below the tolerance does not outweigh the others.
    weights[is_usable] = np.minimum(weights[is_usable], 1 / (tolerance / 40) ** 2)
    median_weight = float(np.median(weights[is_usable])) if is_usable.any() else 1.0
    ends_all = ends + list(itertools.pairwise(range(count)))
    all_links = np.array([*measured, *(shifted @ prior_links @ centre)]).reshape(-1, rank + 1, rank + 1)
    robust_weights = is_usable.astype(np.float64)
    solved, residuals = np.tile(np.eye(rank + 1), (count, 1, 1)), np.zeros(len(links))
    for number in range(_ROUNDS):
        all_weights = np.concatenate([weights * robust_weights, np.full(len(prior_links), _PRIOR * median_weight)])
        solved = _solve(count, ends_all, all_links, all_weights, reference_index, rigid)
        residuals = _residuals(solved, ends, measured, extent)
        if number < _ROUNDS // 2:
            # First near least absolute distances: least squares would spread the error of a wrong link to others.
            new_weights = is_usable / np.sqrt(1 + (residuals / (0.1 * tolerance)) ** 2)
        else:
            new_weights = is_usable * _biweights(residuals, is_usable, tolerance, max_deviation)
            if np.abs(new_weights - robust_weights).max(initial=0) < 1e-6:
                break
        robust_weights = new_weights
    rejected = robust_weights < 1e-3
    linked = {n for pair, is_rejected in zip(ends, rejected, strict=True) if not is_rejected for n in pair}
    interpolated = np.array([n not in linked for n in range(count)])
    return ChainSolution(centre @ solved @ shifted, residuals, rejected, interpolated)


def _biweights(residuals: np.ndarray, is_usable: np.ndarray, tolerance: float, max_deviation: float) -> np.ndarray:
    """Return Tukey's biweights of residuals: 0 beyond the tolerance and `max_deviation` robust standard deviations."""
    spread = robust_deviation(residuals[is_usable]) if is_usable.any() else 0.0
    weights: np.ndarray = np.clip(1 - (residuals / max(max_deviation * spread, tolerance)) ** 2, 0, 1) ** 2
    return weights


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
    rotation: np.ndarray = u * turn @ v
    return rotation


def _residuals(
    solved: np.ndarray, ends: Sequence[tuple[int, int]], links: Sequence[np.ndarray], extent: np.ndarray
) -> np.ndarray:
    """Return the root mean square distance of each link from the solution, over the corners, in µm."""
    corners = np.array(list(itertools.product(*((-e / 2, e / 2) for e in extent))))
    points = np.c_[corners, np.ones(len(corners))].T
    out = np.zeros(len(links))
    for n, ((fixed, moving), link) in enumerate(zip(ends, links, strict=True)):
        difference = (solved[moving] @ link - solved[fixed])[:-1] @ points
        out[n] = math.sqrt(float((difference**2).sum(axis=0).mean()))
    return out
