"""Flat field and dark field of a field of view, as far as tiles can tell them.

In: reduced tiles, NumPy or CuPy. Out: :class:`Shading`, in the memory of the input. The model of a voxel is
``tissue * flat + dark``, so that for each tile n and depth z

    log(I - dark) = brightness(n, z) + log flat(z, y, x) + structure(n, z, y, x) + noise

The logarithm of the flat field, and the structure of each tile, are sums of the same Legendre polynomials: of y and x,
and a few that change along depth. Structure is random, with variances that are estimated for each degree, for tissue
and for the background (such as agarose, which is smooth and therefore tells more) apart. What the tiles share is the
flat field. Its coefficients have a normal prior whose variances are estimated, too (empirical Bayes): each
coefficient becomes smaller by its uncertainty, down to 0 where the tiles cannot tell it. The variances are found by
expectation maximisation, as in Laird and Ware, Random-effects models for longitudinal data, Biometrics 38:963 (1982).
Pixels that do not fit, such as fibres and borders of tissue, get small weights.

The dark field is found in planes without light, such as water: the less their pattern is that of the flat field, the
more of their brightness is dark. It is at most the brightness of these planes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.declared import Declared, Positive
from linumpy.device import array_module

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
#: Rounds of new weights and classes, and iterations of the variances in each round and in the last one.
_ROUNDS, _ITERATIONS, _LAST_ITERATIONS = 4, 8, 24


@dataclass(frozen=True)
class ShadingOptions(Declared):
    """How the fields are estimated.

    Attributes
    ----------
    dark : bool
        Whether to return a dark field; otherwise it is zero.
    smoothness : float
        Factor of the variance that the tiles' structure seems to have: a larger one makes the flat field more even.
    force : bool
        Whether to return fields that are too uncertain to be of use.

    Raises
    ------
    ValueError
        A smoothness that is not positive.
    """

    dark: bool = False
    smoothness: Positive = 1.0
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class Shading:
    """The fields of a field of view, and how well they are known.

    Attributes
    ----------
    coefficients : array of float64, (polynomials, 2)
        The logarithm of the flat field: its mean over depth, and its change.
    depths : array of float64, (2,)
        First and last depth that has light, from 0 to 1 over a tile; beyond them the flat field does not change.
    dark : array of float64, (polynomials + 2,)
        Brightness of the darkest planes, its share that is light, and the pattern of the planes.
    floor : array of float64, ()
        The darkest pixels, which limit the dark field.
    tiles, independent_tiles : array of float64, ()
        Number of tiles with light, and of as many independent ones, since slices resemble their neighbours.
    coverage : array of float64, ()
        Share of the tiles that tell of a position of the field: at the position with the fewest.
    unevenness, error : array of float64, ()
        RMS of the logarithm of the flat field, and its expected RMS error.
    """

    coefficients: Array
    depths: Array
    dark: Array
    floor: Array
    tiles: Array
    independent_tiles: Array
    coverage: Array
    unevenness: Array
    error: Array

    def fields(self, shape: tuple[int, int, int]) -> tuple[Array, Array]:
        """Return the flat field (Z, Y, X), of mean 1 in each plane, and the dark field (Y, X), as float32."""
        xp = array_module(self.coefficients)
        modes = _modes(xp, shape[1:]).astype(np.float32)
        along = _along_depth(xp, shape[0], self.depths)
        flat = _even(xp.exp((along @ self.coefficients.T).astype(np.float32) @ modes.T))
        dark = _dark_field(xp, modes, self.coefficients, self.dark, self.floor)
        return flat.reshape(shape), dark.astype(np.float32).reshape(shape[1:])


def estimate_shading(
    images: Array, valid: Array | None, options: ShadingOptions, places: np.ndarray | None = None
) -> Shading:
    """Estimate the flat field and the dark field.

    Parameters
    ----------
    images : array of float32, (images, depths, height, width)
        Intensities, all finite. They are not changed.
    valid : array of bool, same shape, optional
        Pixels to use.
    options : ShadingOptions
        How to estimate the fields.
    places : numpy.ndarray of int, (images, 3), optional
        Slice, row and column of each image: how much images at one place of neighbouring slices resemble each other
        tells how many are independent. By default all are.
    """
    return _Fit(images, valid, options, places).solve()


def _legendre(xp: ModuleType, points: Any, count: int) -> Any:
    """Return the first polynomials, of mean square 1 from -1 to 1, at points: (count, points)."""
    rows = [xp.ones_like(points), points]
    for k in range(2, count):
        rows.append(((2 * k - 1) * points * rows[-1] - (k - 1) * rows[-2]) / k)
    return xp.stack([math.sqrt(2 * k + 1) * row for k, row in enumerate(rows[:count])])


def _degrees() -> np.ndarray:
    """Return the degree of each polynomial of :func:`_modes`."""
    return np.repeat(np.arange(1, _DEGREE + 1), np.arange(2, _DEGREE + 2))


def _modes(xp: ModuleType, size: tuple[int, ...]) -> Any:
    """Return the polynomials of y and x up to :data:`_DEGREE`, except for the constant: (pixels, polynomials)."""
    y, x = (_legendre(xp, (xp.arange(n) + 0.5) * (2 / n) - 1, _DEGREE + 1) for n in size)
    pairs = [(k, degree - k) for degree in range(1, _DEGREE + 1) for k in range(degree + 1)]
    return xp.stack([(y[a][:, None] * x[b]).ravel() for a, b in pairs], axis=1)


def _along_depth(xp: ModuleType, planes: int, depths: Any) -> Any:
    """Return the two factors along depth: 1, and a line from the first to the last depth with light: (planes, 2)."""
    position = ((xp.arange(planes) + 0.5) / planes - depths[0]) / xp.maximum(depths[1] - depths[0], 1e-6)
    return _legendre(xp, xp.clip(2 * position - 1, -1, 1), 2).T


def _even(field: Any) -> Any:
    """Give a field (..., pixels) a mean of 1."""
    return field / field.mean(axis=-1, keepdims=True)


def _dark_field(xp: ModuleType, modes: Any, coefficients: Any, dark: Any, floor: Any) -> Any:
    """Return the dark field (pixels,): the darkest planes without the light in them."""
    flat = _even(xp.exp(modes @ coefficients[:, 0]))
    pattern = 1 + modes[:, : len(dark) - 2] @ dark[2:]
    return xp.clip(dark[0] * (pattern - dark[1] * flat), 0, 0.95 * floor)


def _apart(xp: ModuleType, values: Any, used: Any) -> Any:
    """Return the threshold between background and tissue: the valley of the histogram; -inf if there is none."""
    low, high = xp.where(used, values, np.inf).min(), xp.where(used, values, -np.inf).max()
    step = xp.where(high > low, high - low, 1) / _BINS
    number = xp.where(used, xp.clip((values - low) / step, 0, _BINS - 1), 0).astype(np.int64)
    share = xp.bincount(number.ravel(), weights=used.ravel().astype(np.float64), minlength=_BINS)
    share = share / xp.maximum(share.sum(), 1)
    below = xp.cumsum(share)
    for _ in range(2):
        wide = xp.pad(share, 1)
        share = (wide[:-2] + 2 * share + wide[2:]) / 4
    # As triangles of bins, since CuPy has no running maximum.
    earlier = np.tri(_BINS, dtype=bool)
    peaks = [xp.where(xp.asarray(part), share, 0).max(axis=1) for part in (earlier, earlier.T)]
    depth = share / xp.maximum(xp.minimum(*peaks), 1e-9)
    depth = xp.where((below > _LEAST) & (below < 1 - _LEAST), depth, 1)
    valley = xp.argmin(depth)
    return xp.where(depth[valley] < _VALLEY, low + (valley + 0.5) * step, -np.inf)


def _inside(xp: ModuleType, mask: Any) -> Any:
    """Remove the pixels of a mask (..., y, x) at its border."""
    for axis in (-1, -2):
        edges = [(0, 0)] * mask.ndim
        edges[axis] = (1, 1)
        wide, n = xp.moveaxis(xp.pad(mask, edges, mode="edge"), axis, 0), mask.shape[axis]
        mask = xp.moveaxis(wide[:n] & wide[1 : n + 1] & wide[2:], 0, axis)
    return mask


class _Fit:
    """The state of the fit: n images of d depths and p pixels, and g = 2 n groups, tissue and background of each image.

    The coefficients are those of all polynomials, followed by those of low degree times the line along depth.
    """

    def __init__(self, images: Any, valid: Any, options: ShadingOptions, places: np.ndarray | None) -> None:
        xp = self.xp = array_module(images)
        self.options = options
        numbers = {} if places is None else {tuple(place): k for k, place in enumerate(places.tolist())}
        above = [(k, numbers.get((place[0] - 1, *place[1:]))) for place, k in numbers.items()]
        #: Numbers of the images of one place in neighbouring slices, and the number of slices.
        self.neighbours = np.array([pair for pair in above if pair[1] is not None], np.int64).reshape(-1, 2)
        self.slices = len({place[0] for place in numbers})
        self.size, (n, self.planes) = images.shape[2:], images.shape[:2]
        self.images = images.reshape(n, self.planes, -1)
        self.measured = self.images > 0
        if valid is not None:
            self.measured &= valid.reshape(self.images.shape)
        varies = xp.where(self.measured, self.images, -np.inf).max(axis=(1, 2)) > xp.where(
            self.measured, self.images, np.inf
        ).min(axis=(1, 2))  # constant tiles were not recorded
        self.measured &= varies[:, None, None]
        degree = _degrees()
        low = degree[degree <= _DEPTH_DEGREE]
        self.degree = np.concatenate([degree, low])
        self.is_deep = np.concatenate([degree * 0, low * 0 + 1])
        number = np.unique(2 * self.degree + self.is_deep, return_inverse=True)[1]
        #: Which coefficients have one variance: (coefficients, variances).
        self.groups = xp.asarray(number[:, None] == np.arange(number.max() + 1), np.float64)
        self.flat_prior = self._spread(_FLAT, 2, _FLAT_DEPTH)
        self.structure_prior = self._spread(_STRUCTURE, 1, _STRUCTURE_DEPTH)
        self.flat_variance = self.flat_prior
        self.structure_variance = xp.stack([self.structure_prior] * 2)
        self.modes = _modes(xp, self.size)
        rows, columns = np.triu_indices(self.modes.shape[1])
        self.products = xp.ascontiguousarray((self.modes[:, rows] * self.modes[:, columns]).astype(np.float32))
        self.pairs = np.zeros((self.modes.shape[1],) * 2, np.int64)
        self.pairs[rows, columns] = self.pairs[columns, rows] = np.arange(len(rows))
        self.theta = xp.zeros(len(self.degree))
        self.effects = xp.zeros((2 * n, len(self.degree)))
        self.independent: Any = xp.ones(())
        self.along = xp.zeros((self.planes, 2))
        self.dark = xp.zeros(2 + int((degree <= _DARK_DEGREE).sum()))
        self.floor = self._darkest()

    def _spread(self, first: float, power: int, deep: float) -> Any:
        """Return variances before anything is known."""
        variance = (first / self.degree**power * np.where(self.is_deep, deep, 1)) ** 2
        return self.groups.T @ self.xp.asarray(variance) / self.groups.sum(axis=0)

    def _darkest(self) -> Any:
        """Return the first percentile of all measured pixels; 0 if there are none."""
        xp = self.xp
        values = xp.sort(xp.where(self.measured, self.images, np.inf).ravel())
        value = values[(self.measured.sum() // 100).astype(np.int64)]
        return xp.where(xp.isfinite(value), value, 0).astype(np.float64)

    def solve(self) -> Shading:
        """Find the coefficients in rounds: classes and weights, then variances, then the dark field."""
        xp = self.xp
        for number in range(_ROUNDS):
            logs, weights, level = self._prepared()
            if number:
                weights, variance = self._robust(logs, weights)
            else:
                variance = None
            matrix, vector, misfit = self._normal_equations(logs, weights)
            variance = xp.maximum(misfit if variance is None else variance, 1e-9)
            last = number == _ROUNDS - 1
            covariance = self._estimate(matrix / variance, vector / variance, _LAST_ITERATIONS if last else _ITERATIONS)
            self._set_dark()
        used = (weights.reshape(-1, 2, self.planes, self.modes.shape[0]) > 0).any(axis=(1, 2))
        count = used.any(axis=1).sum()
        independent = count * self.independent
        darkness = self.dark_error * (weights.sum(axis=2) / xp.maximum(level, 1e-9)).sum() / weights.sum().clip(1e-9)
        unevenness = xp.sqrt((self.theta**2).sum())
        error = xp.trace(covariance) * (1 + 2 / xp.maximum(independent, 1)) + (darkness * unevenness) ** 2
        return Shading(
            coefficients=self._coefficients(self.theta), depths=self.depths, dark=self.dark,
            floor=self.floor, tiles=count, independent_tiles=independent,
            coverage=used.sum(axis=0).min() / xp.maximum(count, 1), unevenness=unevenness, error=xp.sqrt(error),
        )  # fmt: skip

    def _coefficients(self, theta: Any) -> Any:
        """Arrange coefficients (..., coefficients) as (..., polynomials, 2), with 0 for high degrees along depth."""
        xp, count = self.xp, self.modes.shape[1]
        out = xp.zeros((*theta.shape[:-1], count, 2))
        out[..., 0] = theta[..., :count]
        out[..., : theta.shape[-1] - count, 1] = theta[..., count:]
        return out

    def _prepared(self) -> tuple[Any, Any, Any]:
        """Return logarithms (n, d, p), weights (g, d, p) by class and brightness, and the brightness (g, d)."""
        xp, modes = self.xp, self.modes
        dark = _dark_field(xp, modes, self._coefficients(self.theta), self.dark, self.floor).astype(np.float32)
        light = self.images - dark
        usable = self.measured & (light > 0.2 * self.images)
        logs = xp.log(xp.where(usable, light, 1))
        field = (self.along @ self._coefficients(self.theta).T @ modes.T).astype(np.float32)
        even = xp.where(usable, light / xp.exp(field), 0)
        bright = xp.argsort(even.mean(axis=(0, 2)))[-max(1, self.planes // 3) :]
        lines = even[:, bright].mean(axis=1)
        seen = lines > 0
        lines = xp.log(xp.where(seen, lines, 1))
        is_tissue = lines >= _apart(xp, lines, seen)
        classes = xp.stack([seen & is_tissue, seen & ~is_tissue], axis=1)
        classes = _inside(xp, classes.reshape(*classes.shape[:2], *self.size)).reshape(classes.shape)
        weights = (classes[:, :, None] & usable[:, None]).astype(np.float32)
        count = weights.sum(axis=3)
        level = (weights * self.images[:, None]).sum(axis=3) / xp.maximum(count, 1)
        # The less a plane is above the dark level, the less its pattern is that of the light. The weight is that of the
        # whole plane, since weights by the brightness of pixels would make the field more even.
        trust = xp.where(count > 20, xp.clip(1 - self.floor / xp.maximum(level, 1e-9), 0, 1) ** 2, 0)
        # Near the cut surface a plane shows how the surface lies, which is similar in all tiles.
        steps = xp.abs(xp.diff(xp.log(xp.maximum(level, 1e-9)), axis=2))
        steps = xp.pad(steps, ((0, 0), (0, 0), (1, 1)))
        steps = xp.maximum(steps[..., 1:], steps[..., :-1])
        trust /= (1 + (steps / xp.maximum(xp.median(steps, axis=2, keepdims=True), _STEP)) ** 2) ** 2
        weights *= trust[..., None].astype(np.float32)
        weights, level = weights.reshape(-1, *weights.shape[2:]), level.reshape(-1, self.planes)
        self.bright = (weights.sum(axis=2) * level).sum() / weights.sum().clip(1e-9)
        total = weights.sum(axis=(0, 2))
        lit = total > 0.1 * total.max()
        ends = xp.stack([xp.argmax(lit), self.planes - 1 - xp.argmax(lit[::-1])])
        self.depths = (ends + 0.5) / self.planes
        self.along = _along_depth(xp, self.planes, self.depths)
        return logs, weights, level

    def _robust(self, logs: Any, weights: Any) -> tuple[Any, Any]:
        """Decrease the weights of pixels far from the fit; return them, and the variance of the rest."""
        xp = self.xp
        lines = self._coefficients(self.effects + self.theta) @ self.along.T
        rest = xp.repeat(logs, 2, axis=0) - (lines.swapaxes(1, 2) @ self.modes.T).astype(np.float32)
        used = weights
        for _ in range(3):
            total = xp.maximum(used.sum(axis=2, keepdims=True), 1e-9)
            centred = rest - (used * rest).sum(axis=2, keepdims=True) / total
            if used is weights:
                scale = 1.5 * (used * xp.abs(centred)).sum(axis=2, keepdims=True) / total + np.float32(1e-3)
            used = weights / (1 + (centred / (2.5 * scale)) ** 2) ** 2
        return used, (used * centred**2).sum() / xp.maximum(used.sum(), 1e-9)

    def _normal_equations(self, logs: Any, weights: Any) -> tuple[Any, Any, Any]:
        """Return matrix (g, c, c) and vector (g, c) of each group, without its brightness, and the mean square."""
        xp, modes = self.xp, self.modes.astype(np.float32)
        total = xp.maximum(weights.sum(axis=2), 1e-9)
        logs = xp.repeat(logs, 2, axis=0)
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
        vector = xp.concatenate([vector[..., 0], vector[:, :low, 1]], axis=1)
        return whole, vector, (centred * logs).sum() / xp.maximum(weights.sum(), 1e-9)

    def _estimate(self, matrix: Any, vector: Any, iterations: int) -> Any:
        """Estimate coefficients and variances from normal equations in units of the noise; return the covariance."""
        xp, groups = self.xp, self.groups
        identity = xp.eye(matrix.shape[1])
        used = (xp.trace(matrix, axis1=1, axis2=2) > 0).reshape(-1, 2).astype(np.float64)
        size = groups.sum(axis=0)
        for _ in range(iterations):
            precision = (1 / self.structure_variance) @ groups.T
            structure = xp.linalg.inv(matrix.reshape(-1, 2, *identity.shape) + precision[:, :, None] * identity)
            structure = structure.reshape(matrix.shape)
            gain = structure @ matrix
            # Sums over tiles, whose structure is integrated out.
            informed = (matrix - matrix @ gain).sum(axis=0)
            moved = (vector - (gain.swapaxes(1, 2) @ vector[..., None])[..., 0]).sum(axis=0)
            trust = self.independent / self.options.smoothness
            covariance = xp.linalg.inv(informed * trust + xp.diag(groups @ (1 / self.flat_variance)))
            self.theta = covariance @ moved * trust
            self.effects = (structure @ (vector - matrix @ self.theta)[..., None])[..., 0]
            square = self.effects**2 + xp.diagonal(structure, axis1=1, axis2=2) + ((gain @ covariance) * gain).sum(2)
            sums = (used.T[:, None] @ square.reshape(-1, 2, len(identity)).swapaxes(0, 1))[:, 0] @ groups
            number = used.sum(axis=0)[:, None] * size
            self.structure_variance = (sums + self.structure_prior) / (number + 1)
            self.flat_variance = ((self.theta**2 + xp.diagonal(covariance)) @ groups + self.flat_prior) / (size + 1)
            self._set_independent()
        return covariance

    def _set_independent(self) -> None:
        """Set the share of tiles that are independent, from the correlation of structure between neighbouring slices.

        The mean of K numbers that follow each other with the correlation r has the variance of K times this share.
        """
        xp = self.xp
        if not len(self.neighbours):
            return
        scaled = self.effects.reshape(-1, 2, len(self.degree)) / xp.sqrt(self.structure_variance @ self.groups.T)
        one, other = (scaled[numbers] for numbers in self.neighbours.T)
        correlation = (one * other).sum() / xp.sqrt(xp.maximum((one**2).sum() * (other**2).sum(), 1e-12))
        correlation = xp.clip(correlation, 0, 0.95)
        lags = xp.arange(1, self.slices)
        self.independent = 1 / (1 + 2 * ((1 - lags / self.slices) * correlation**lags).sum())

    def _set_dark(self) -> None:
        """Set the dark field from the darkest planes that were measured completely."""
        xp, low = self.xp, self.modes[:, : len(self.dark) - 2]
        pixels = len(low)
        level = self.images.mean(axis=2)
        is_dark = (self.measured.all(axis=2) & (level < _DARKEST * self.floor)).astype(np.float32)
        planes = is_dark.sum(axis=1)
        tile = (planes > 0).astype(np.float64)
        count = tile.sum()
        relative = self.images / xp.maximum(level, 1e-9)[..., None] - 1
        pattern = (is_dark[:, None] @ relative)[:, 0] / xp.maximum(planes, 1)[:, None]
        found = pattern.astype(np.float64) @ low / pixels
        mean = tile @ found / xp.maximum(count, 1)
        error = (tile @ (found - mean) ** 2) / xp.maximum(count * (count - 1), 1)
        flat = (_even(xp.exp(self.modes @ self.theta[: self.modes.shape[1]])) - 1) @ low / pixels
        degree = xp.asarray(_degrees()[: low.shape[1]])
        weight = 1 / (error + (_DARK / degree) ** 2)
        known = 1 / _LIGHT**2 + (weight * flat**2).sum()
        share = (1 / _LIGHT**2 + (weight * mean * flat).sum()) / known
        brightness = (level * is_dark).sum() / xp.maximum(is_dark.sum(), 1)
        brightness = xp.where((count >= 3) & (brightness < _DARKER * self.bright), brightness, 0)
        self.dark = xp.concatenate([xp.stack([brightness, xp.clip(share, 0, 1)]), mean])
        self.dark_error = brightness / xp.sqrt(known)
