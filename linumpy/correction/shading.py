"""Flat field and dark field of a field of view, as far as tiles can tell them.

In: reduced tiles on the host, where the fit of some hundred takes about a second. Out: :class:`Shading`. The model of a
voxel is ``tissue * flat + dark``, so that for each tile n and depth z

    log(I - dark) = brightness(n, z) + log flat(z, y, x) + structure(n, z, y, x) + noise

The logarithm of the flat field, and the structure of each tile, are sums of the same Legendre polynomials: of y and x,
and a few that change along depth. Structure is random, with variances that are estimated for each degree, for tissue
and for the background (such as agarose, which is smooth and therefore tells more) apart. What the tiles share is the
flat field. Its coefficients have a normal prior whose variances are estimated, too (empirical Bayes): each
coefficient becomes smaller by its uncertainty, down to 0 where the tiles cannot tell it. The variances are found by
expectation maximisation, as in Laird and Ware, Random-effects models for longitudinal data, Biometrics 38:963 (1982).
Pixels that do not fit, such as fibres and borders of tissue, get small weights.

A ramp that all tiles have is no flat field if it is that of the sample: where the cut surface is tilted, a plane of
each tile lies deeper in the tissue at one side than at the other, and is darker there. Where neighbouring tiles
overlap, the same tissue is seen at two positions of the field at the same depth, and the ratio of its intensities is
that of the flat field alone. From these ratios the ramp of the flat field is found, along each lateral axis.

The dark field is found in planes without light, such as water: the less their pattern is that of the flat field, the
more of their brightness is dark. It is at most the brightness of these planes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.polynomial.legendre import legvander

from linumpy.declared import Declared, Help, Positive

#: Degree of the polynomials of y and x; of those that change along depth; and of the pattern of the dark field.
_DEGREE, _DEPTH_DEGREE, _DARK_DEGREE = 6, 3, 3
#: Standard deviations of the logarithm before anything is known, for the first degree: of the flat field, of the
#: structure of a tile, and of the dark field relative to its mean.
_FLAT, _STRUCTURE, _DARK = 0.1, 0.1, 0.1
#: The same for polynomials that change along depth, relative to the others.
_FLAT_DEPTH, _STRUCTURE_DEPTH = 0.1, 0.5
#: Standard deviation of the share of light in the darkest planes, which is taken for 1 before anything is known.
_LIGHT = 0.5
#: Darkest planes are at most this much brighter than the darkest pixels.
_DARKEST = 2.0
#: And at most this share of the mean brightness; otherwise there are no planes without light.
_DARKER = 1 / 3
#: Bins of the histogram of brightness. Its valley lies between tissue and background if it is lower than this share of
#: the lower one of the peaks at its sides, and this share of the pixels or more lies at each side.
_BINS, _VALLEY, _LEAST = 32, 0.6, 0.02
#: Change of the logarithm of brightness from plane to plane, from which on a plane has little weight; or the median.
_STEP = 0.25
#: Minimum number of overlapping pairs of tiles along an axis; with fewer, the ramp of the flat field is not corrected.
_LEAST_PAIRS = 3
#: Rounds of new weights and classes, and iterations of the variances in each round and in the last one.
_ROUNDS, _ITERATIONS, _LAST_ITERATIONS = 4, 8, 24


@dataclass(frozen=True)
class ShadingOptions(Declared):
    """How the fields are estimated.

    - `dark`: whether to return a dark field; otherwise it is zero.
    - `smoothness`: factor of the variance that the tiles' structure seems to have: a larger one makes the flat field
      more even.
    - `force`: whether to return fields that are too uncertain to be of use.

    Raises `ValueError`: a smoothness that is not positive.
    """

    dark: Annotated[bool, Help("Estimate an offset, too, from planes without light.")] = False
    smoothness: Annotated[
        Positive, Help("How much tiles are taken to differ by themselves: a larger S makes the fields more even.", "S")
    ] = 1.0
    force: Annotated[bool, Help("Use fields that are too uncertain to be of use.")] = False


@dataclass(frozen=True, kw_only=True)
class Shading:
    """The fields of a field of view, and how well they are known.

    - `coefficients` (float64, (polynomials, 2)): the logarithm of the flat field: its mean over depth, and its change.
    - `depths` (float, float): first and last depth that has light, from 0 to 1 over a tile; beyond them the flat field
      does not change.
    - `dark` (float64, (polynomials + 2,)): brightness of the darkest planes, its share that is light, and the pattern
      of the planes.
    - `floor`: the darkest pixels, which limit the dark field.
    - `tiles`: number of tiles with light.
    - `independent_tiles`: of as many independent ones, since slices resemble their neighbours.
    - `coverage`: share of the tiles that tell of a position of the field: at the position with the fewest.
    - `unevenness`, `error`: RMS of the logarithm of the flat field, and its expected RMS error.
    """

    coefficients: np.ndarray
    depths: tuple[float, float]
    dark: np.ndarray
    floor: float
    tiles: int
    independent_tiles: float
    coverage: float
    unevenness: float
    error: float

    def fields(self, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the flat field (Z, Y, X), of mean 1 in each plane, and the dark field (Y, X), as float32."""
        modes = _modes(shape[1:]).astype(np.float32)
        along = _along_depth(shape[0], self.depths)
        flat = _even(np.exp((along @ self.coefficients.T).astype(np.float32) @ modes.T))
        dark = _dark_field(modes, self.coefficients, self.dark, self.floor)
        return flat.reshape(shape), dark.astype(np.float32).reshape(shape[1:])


def estimate_shading(images: np.ndarray, options: ShadingOptions, places: np.ndarray | None = None) -> Shading:
    """Estimate the flat field and the dark field.

    - `images` (float32, (images, depths, height, width)): intensities; NaN where there is none.
    - `options`: how to estimate the fields.
    - `places` (images, 3): slice, row and column of each image. How much images at one place of neighbouring slices
      resemble each other tells how many are independent, and images at neighbouring places of a slice may overlap. By
      default all images are independent.
    """
    return _Fit(images, options, places).solve()


def _legendre(points: np.ndarray, count: int) -> np.ndarray:
    """Return the first polynomials, of mean square 1 from -1 to 1, at points: (count, points)."""
    return legvander(points, count - 1).T * np.sqrt(2 * np.arange(count) + 1)[:, None]


def _degrees() -> np.ndarray:
    """Return the degree of each polynomial of :func:`_modes`."""
    return np.repeat(np.arange(1, _DEGREE + 1), np.arange(2, _DEGREE + 2))


def _modes(size: tuple[int, ...]) -> np.ndarray:
    """Return the polynomials of y and x up to :data:`_DEGREE`, except for the constant: (pixels, polynomials)."""
    y, x = (_legendre((np.arange(n) + 0.5) * (2 / n) - 1, _DEGREE + 1) for n in size)
    pairs = [(k, degree - k) for degree in range(1, _DEGREE + 1) for k in range(degree + 1)]
    return np.stack([(y[a][:, None] * x[b]).ravel() for a, b in pairs], axis=1)


def _along_depth(planes: int, depths: tuple[float, float]) -> np.ndarray:
    """Return the two factors along depth: 1, and a line from the first to the last depth with light: (planes, 2)."""
    position = ((np.arange(planes) + 0.5) / planes - depths[0]) / max(depths[1] - depths[0], 1e-6)
    return _legendre(np.clip(2 * position - 1, -1, 1), 2).T


def _even(field: np.ndarray) -> np.ndarray:
    """Give a field (..., pixels) a mean of 1."""
    return np.asarray(field / field.mean(axis=-1, keepdims=True))


def _dark_field(modes: np.ndarray, coefficients: np.ndarray, dark: np.ndarray, floor: float) -> np.ndarray:
    """Return the dark field (pixels,): the darkest planes without the light in them."""
    flat = _even(np.exp(modes @ coefficients[:, 0]))
    pattern = 1 + modes[:, : len(dark) - 2] @ dark[2:]
    return np.clip(dark[0] * (pattern - dark[1] * flat), 0, 0.95 * floor)


def _apart(values: np.ndarray) -> float:
    """Return the threshold between background and tissue: the valley of the histogram; -inf if there is none."""
    if not values.size:
        return -math.inf
    counts, edges = np.histogram(values, _BINS)
    share = counts / values.size
    below = np.cumsum(share)
    for _ in range(2):
        share = np.convolve(share, (0.25, 0.5, 0.25), "same")
    peaks = np.minimum(np.maximum.accumulate(share), np.maximum.accumulate(share[::-1])[::-1])
    depth = np.where((below > _LEAST) & (below < 1 - _LEAST), share / np.maximum(peaks, 1e-9), 1)
    valley = int(np.argmin(depth))
    return float(edges[valley : valley + 2].mean()) if depth[valley] < _VALLEY else -math.inf


class _Fit:
    """The state of the fit: n images of d depths and p pixels, and g = 2 n groups, tissue and background of each image.

    The coefficients are those of all polynomials, followed by those of low degree times the line along depth.
    """

    def __init__(self, images: np.ndarray, options: ShadingOptions, places: np.ndarray | None) -> None:
        self.options = options
        numbers = {} if places is None else {tuple(place): k for k, place in enumerate(places.tolist())}
        #: Numbers of the images at neighbouring places along slices, rows and columns: (pairs, 2) each.
        self.neighbours = [_neighbours(numbers, step) for step in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
        self.slices = len({place[0] for place in numbers})
        self.size, (n, self.planes) = images.shape[2:], images.shape[:2]
        measured = images.reshape(n, self.planes, -1) > 0  # NaN is not
        self.images = np.where(measured, images.reshape(measured.shape), 0)
        varies = self.images.max(axis=(1, 2)) > np.where(measured, self.images, np.inf).min(axis=(1, 2))
        self.measured = measured & varies[:, None, None]  # constant tiles were not recorded
        degree = _degrees()
        low = degree[degree <= _DEPTH_DEGREE]
        self.degree = np.concatenate([degree, low])
        self.is_deep = np.concatenate([degree * 0, low * 0 + 1])
        number = np.unique(2 * self.degree + self.is_deep, return_inverse=True)[1]
        #: Which coefficients have one variance: (coefficients, variances).
        self.groups = np.asarray(number[:, None] == np.arange(number.max() + 1), np.float64)
        self.flat_prior = self._spread(_FLAT, 2, _FLAT_DEPTH)
        self.structure_prior = self._spread(_STRUCTURE, 1, _STRUCTURE_DEPTH)
        self.flat_variance = self.flat_prior
        self.structure_variance = np.stack([self.structure_prior] * 2)
        self.modes = _modes(self.size)
        rows, columns = np.triu_indices(self.modes.shape[1])
        self.products = np.ascontiguousarray((self.modes[:, rows] * self.modes[:, columns]).astype(np.float32))
        self.pairs = np.zeros((self.modes.shape[1],) * 2, np.int64)
        self.pairs[rows, columns] = self.pairs[columns, rows] = np.arange(len(rows))
        self.theta = np.zeros(len(self.degree))
        self.effects = np.zeros((2 * n, len(self.degree)))
        self.independent = 1.0
        self.along = np.zeros((self.planes, 2))
        self.dark = np.zeros(2 + int((degree <= _DARK_DEGREE).sum()))
        self.floor = float(np.percentile(self.images[self.measured], 1)) if self.measured.any() else 0.0

    def _spread(self, first: float, power: int, deep: float) -> np.ndarray:
        """Return variances before anything is known."""
        variance = (first / self.degree**power * np.where(self.is_deep, deep, 1)) ** 2
        return np.asarray(self.groups.T @ variance / self.groups.sum(axis=0))

    def solve(self) -> Shading:
        """Find the coefficients in rounds: classes and weights, variances, the ramp, the dark field."""
        for number in range(_ROUNDS):
            logs, weights, level = self._prepared()
            if number:
                weights, variance = self._robust(logs, weights)
            matrix, vector, misfit = self._normal_equations(logs, weights)
            variance = max(variance if number else misfit, 1e-9)
            last = number == _ROUNDS - 1
            covariance = self._estimate(matrix / variance, vector / variance, _LAST_ITERATIONS if last else _ITERATIONS)
            for axis in range(2):
                self._correct_ramp(axis, logs, weights)
            self._set_dark()
        used = np.asarray((weights.reshape(-1, 2, self.planes, len(self.modes)) > 0).any(axis=(1, 2)))
        count = int(np.any(used, axis=1).sum())
        independent = count * self.independent
        darkness = self.dark_error * (weights.sum(axis=2) / np.maximum(level, 1e-9)).sum() / max(weights.sum(), 1e-9)
        unevenness = float(np.linalg.norm(self.theta))
        error = math.sqrt(np.trace(covariance) * (1 + 2 / max(independent, 1)) + (darkness * unevenness) ** 2)
        return Shading(
            coefficients=self._coefficients(self.theta), depths=self.depths, dark=self.dark, floor=self.floor,
            tiles=count, independent_tiles=independent, coverage=float(used.sum(axis=0).min() / max(count, 1)),
            unevenness=unevenness, error=error,
        )  # fmt: skip

    def _coefficients(self, theta: np.ndarray) -> np.ndarray:
        """Arrange coefficients (..., coefficients) as (..., polynomials, 2), with 0 for high degrees along depth."""
        count = self.modes.shape[1]
        out = np.zeros((*theta.shape[:-1], count, 2))
        out[..., 0] = theta[..., :count]
        out[..., : theta.shape[-1] - count, 1] = theta[..., count:]
        return out

    def _field(self) -> np.ndarray:
        """Return the logarithm of the flat field (d, p)."""
        return np.asarray((self.along @ self._coefficients(self.theta).T @ self.modes.T).astype(np.float32))

    def _prepared(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return logarithms (n, d, p), weights (g, d, p) by class and brightness, and the brightness (g, d)."""
        from scipy.ndimage import binary_erosion

        dark = _dark_field(self.modes, self._coefficients(self.theta), self.dark, self.floor).astype(np.float32)
        light = self.images - dark
        usable = self.measured & (light > 0.2 * self.images)
        logs = np.log(np.where(usable, light, 1))
        even = np.where(usable, light / np.exp(self._field()), 0)
        bright = np.argsort(even.mean(axis=(0, 2)))[-max(1, self.planes // 3) :]
        lines = even[:, bright].mean(axis=1)
        seen = lines > 0
        lines = np.log(np.where(seen, lines, 1))
        is_tissue = lines >= _apart(lines[seen])
        classes = np.stack([seen & is_tissue, seen & ~is_tissue], axis=1)
        # Pixels at the borders of a class are of both.
        classes = binary_erosion(
            classes.reshape(-1, 2, *self.size), np.ones((1, 1, 3, 3), bool), border_value=1
        ).reshape(classes.shape)  # fmt: skip
        weights = (classes[:, :, None] & usable[:, None]).astype(np.float32)
        count = weights.sum(axis=3)
        level = (weights * self.images[:, None]).sum(axis=3) / np.maximum(count, 1)
        # The less a plane is above the dark level, the less its pattern is that of the light. The weight is that of the
        # whole plane, since weights by the brightness of pixels would make the field more even.
        trust = np.where(count > 20, np.clip(1 - self.floor / np.maximum(level, 1e-9), 0, 1) ** 2, 0)
        # Near the cut surface a plane shows how the surface lies, which is similar in all tiles.
        steps = np.abs(np.diff(np.log(np.maximum(level, 1e-9)), axis=2))
        steps = np.pad(steps, ((0, 0), (0, 0), (1, 1)))
        steps = np.maximum(steps[..., 1:], steps[..., :-1])
        trust /= (1 + (steps / np.maximum(np.median(steps, axis=2, keepdims=True), _STEP)) ** 2) ** 2
        weights *= trust[..., None].astype(np.float32)
        weights, level = weights.reshape(-1, *weights.shape[2:]), level.reshape(-1, self.planes)
        self.bright = (weights.sum(axis=2) * level).sum() / max(weights.sum(), 1e-9)
        total = weights.sum(axis=(0, 2))
        lit = np.flatnonzero(total >= 0.1 * total.max())
        self.depths = (lit[0] + 0.5) / self.planes, (lit[-1] + 0.5) / self.planes
        self.along = _along_depth(self.planes, self.depths)
        return logs, weights, level

    def _robust(self, logs: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, float]:
        """Decrease the weights of pixels far from the fit; return them, and the variance of the rest."""
        lines = self._coefficients(self.effects + self.theta) @ self.along.T
        rest = np.repeat(logs, 2, axis=0) - (lines.swapaxes(1, 2) @ self.modes.T).astype(np.float32)
        used = weights
        for _ in range(3):
            total = np.maximum(used.sum(axis=2, keepdims=True), 1e-9)
            centred = rest - (used * rest).sum(axis=2, keepdims=True) / total
            if used is weights:
                scale = 1.5 * (used * np.abs(centred)).sum(axis=2, keepdims=True) / total + np.float32(1e-3)
            used = weights / (1 + (centred / (2.5 * scale)) ** 2) ** 2
        return used, float((used * centred**2).sum() / max(used.sum(), 1e-9))

    def _normal_equations(self, logs: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """Return matrix (g, c, c) and vector (g, c) of each group, without its brightness, and the mean square."""
        modes = self.modes.astype(np.float32)
        total = np.maximum(weights.sum(axis=2), 1e-9)
        logs = np.repeat(logs, 2, axis=0)
        centred = weights * (logs - ((weights * logs).sum(axis=2) / total)[..., None])
        sums = (weights @ modes).astype(np.float64)
        products = weights.reshape(-1, len(modes)) @ self.products  # one product of matrices, not one for each group
        matrix = products.astype(np.float64).reshape(*weights.shape[:2], -1)[..., self.pairs]
        matrix -= sums[..., :, None] * sums[..., None, :] / total[..., None, None]
        vector = (centred @ modes).astype(np.float64).swapaxes(1, 2) @ self.along
        count, low = self.modes.shape[1], len(self.degree) - self.modes.shape[1]
        groups, planes = matrix.shape[:2]
        factors = (self.along[:, :, None] * self.along[:, None]).reshape(planes, 4)
        parts = (factors.T @ matrix.reshape(groups, planes, -1)).reshape(groups, 2, 2, count, count)
        whole = parts.transpose(0, 1, 3, 2, 4).reshape(groups, 2 * count, 2 * count)[:, : count + low, : count + low]
        vector = np.concatenate([vector[..., 0], vector[:, :low, 1]], axis=1)
        return whole, vector, float((centred * logs).sum() / max(weights.sum(), 1e-9))

    def _estimate(self, matrix: np.ndarray, vector: np.ndarray, iterations: int) -> np.ndarray:
        """Estimate coefficients and variances from normal equations in units of the noise; return the covariance."""
        groups, size = self.groups, self.groups.sum(axis=0)
        identity = np.eye(matrix.shape[1])
        used = (np.trace(matrix, axis1=1, axis2=2) > 0).reshape(-1, 2).astype(np.float64)
        for _ in range(iterations):
            precision = (1 / self.structure_variance) @ groups.T
            structure = np.linalg.inv(matrix.reshape(-1, 2, *identity.shape) + precision[:, :, None] * identity)
            structure = structure.reshape(matrix.shape)
            gain = structure @ matrix
            # Sums over tiles, whose structure is integrated out.
            informed = (matrix - matrix @ gain).sum(axis=0)
            moved = (vector - (gain.swapaxes(1, 2) @ vector[..., None])[..., 0]).sum(axis=0)
            trust = self.independent / self.options.smoothness
            covariance = np.linalg.inv(informed * trust + np.diag(groups @ (1 / self.flat_variance)))
            self.theta = covariance @ moved * trust
            self.effects = (structure @ (vector - matrix @ self.theta)[..., None])[..., 0]
            square = self.effects**2 + np.diagonal(structure, axis1=1, axis2=2) + ((gain @ covariance) * gain).sum(2)
            sums = (used.T[:, None] @ square.reshape(-1, 2, len(identity)).swapaxes(0, 1))[:, 0] @ groups
            number = used.sum(axis=0)[:, None] * size
            self.structure_variance = (sums + self.structure_prior) / (number + 1)
            self.flat_variance = ((self.theta**2 + np.diagonal(covariance)) @ groups + self.flat_prior) / (size + 1)
            self._set_independent()
        return np.asarray(covariance)

    def _set_independent(self) -> None:
        """Set the share of tiles that are independent, from the correlation of structure between neighbouring slices.

        The mean of K numbers that follow each other with the correlation r has the variance of K times this share.
        """
        if not len(self.neighbours[0]):
            return
        scaled = self.effects.reshape(-1, 2, len(self.degree)) / np.sqrt(self.structure_variance @ self.groups.T)
        one, other = (scaled[numbers] for numbers in self.neighbours[0].T)
        correlation = (one * other).sum() / math.sqrt(max((one**2).sum() * (other**2).sum(), 1e-12))
        correlation = min(max(correlation, 0.0), 0.95)
        lags = np.arange(1, self.slices)
        self.independent = float(1 / (1 + 2 * ((1 - lags / self.slices) * correlation**lags).sum()))

    def _correct_ramp(self, axis: int, logs: np.ndarray, weights: np.ndarray) -> None:
        """Correct the ramp along an axis, and its change along depth, by pixels where neighbouring tiles overlap.

        The step from a tile to the next is that at which neighbours differ least.
        """
        numbers, length = self.neighbours[1 + axis], self.size[axis]
        rest, known = (
            np.moveaxis(part.reshape(len(self.images), self.planes, *self.size), 2 + axis, -1)
            for part in (logs - self._field(), weights.reshape(len(self.images), 2, *logs.shape[1:]).sum(axis=1))
        )

        def compared(step: int) -> tuple[np.ndarray, np.ndarray]:
            """Return the differences of pixels so many apart, and their weights: (pairs, d, pixels)."""
            one, other = numbers.T
            both = np.sqrt(known[one][..., step:] * known[other][..., :-step])
            difference = rest[one][..., step:] - rest[other][..., :-step]
            return difference.reshape(len(one), self.planes, -1), both.reshape(len(one), self.planes, -1)

        def spread(step: int) -> float:
            """Return the variance of the differences of pixels within planes."""
            difference, weight = compared(step)
            mean = (weight * difference).sum(axis=2) / np.maximum(weight.sum(axis=2), 1e-9)
            return float((weight * (difference - mean[..., None]) ** 2).sum() / max(weight.sum(), 1e-9))

        if len(numbers) < _LEAST_PAIRS:
            return
        step = min(range(length // 2, length - 1), key=spread)
        difference, weight = compared(step)
        total = weight.sum(axis=2)
        # Least squares of each pair for the two factors along depth.
        vector = (weight * difference).sum(axis=2) @ self.along
        matrix = np.einsum("pd,da,db->pab", total, self.along, self.along)
        whole = matrix.sum(axis=0) + 1e-9 * np.eye(2)
        found = np.linalg.solve(whole, vector.sum(axis=0))
        scatter = np.linalg.solve(whole, (vector - matrix @ found).T)
        found *= np.clip(1 - (scatter**2).sum(axis=1) / np.maximum(found**2, 1e-12), 0, 1)
        # A difference of so many pixels, as the coefficient of the polynomial of degree 1.
        ramp = found * length / (2 * math.sqrt(3) * step)
        change = np.zeros(len(self.theta))
        change[[1 - axis, self.modes.shape[1] + 1 - axis]] = ramp
        self.theta += change
        self.effects -= change

    def _set_dark(self) -> None:
        """Set the dark field from the darkest planes that were measured completely."""
        low = self.modes[:, : len(self.dark) - 2]
        level = self.images.mean(axis=2)
        is_dark = (self.measured.all(axis=2) & (level < _DARKEST * self.floor)).astype(np.float32)
        planes = is_dark.sum(axis=1)
        tile = (planes > 0).astype(np.float64)
        count = tile.sum()
        relative = self.images / np.maximum(level, 1e-9)[..., None] - 1
        pattern = (is_dark[:, None] @ relative)[:, 0] / np.maximum(planes, 1)[:, None]
        found = pattern.astype(np.float64) @ low / len(low)
        mean = tile @ found / max(count, 1)
        error = (tile @ (found - mean) ** 2) / max(count * (count - 1), 1)
        flat = (_even(np.exp(self.modes @ self.theta[: self.modes.shape[1]])) - 1) @ low / len(low)
        weight = 1 / (error + (_DARK / _degrees()[: low.shape[1]]) ** 2)
        known = 1 / _LIGHT**2 + (weight * flat**2).sum()
        share = (1 / _LIGHT**2 + (weight * mean * flat).sum()) / known
        brightness = (level * is_dark).sum() / max(is_dark.sum(), 1)
        if count < 3 or brightness >= _DARKER * self.bright:
            brightness = 0.0
        self.dark = np.concatenate([[brightness, np.clip(share, 0, 1)], mean])
        self.dark_error = brightness / math.sqrt(known)


def _neighbours(numbers: dict[tuple[int, ...], int], step: tuple[int, ...]) -> np.ndarray:
    """Return the numbers of places, and of those a step further: (pairs, 2)."""
    others = (numbers.get(tuple(np.add(place, step).tolist())) for place in numbers)
    pairs = [pair for pair in zip(numbers.values(), others, strict=True) if pair[1] is not None]
    return np.array(pairs, np.int64).reshape(-1, 2)
