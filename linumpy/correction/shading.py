"""The model of BaSiC: images of one field of view = baseline × flat field + dark field + sparse residual.

In: reduced images, NumPy or CuPy. Out: :class:`Shading`, in the memory of the input. The method is that of Peng et al.,
A BaSiC tool for background and shading correction of optical microscopy images, Nature Communications 8:14836 (2017).
The fields are sparse in the discrete cosine transform (DCT), residuals have a reweighted L1 norm, and the alternating
direction method of multipliers (ADMM) minimises

    Σ_n |W_n (I_n - b_n S - D)|₁ + λ_S |DCT S|₁ + λ_D |DCT D|₁

with the images I_n, their baselines b_n, the flat field S, the dark field D, and weights W_n of the pixels. Every depth
has its own S, D and b_n; all depths are minimised in one batch. The DCT is orthonormal, so the update of a field is
exact: a soft threshold of its coefficients. The means of S and D have no penalty. The transform of a field of at most
128 × 128 pixels is two products with a matrix, which BLAS computes for all depths at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module

#: Penalty of ADMM, in units of the mean intensity: a residual below the pixel's weight over this penalty becomes zero.
_PENALTY = 10.0
#: Minimum of a flat field, as a share of its mean.
_MIN_FLAT = 0.01
#: Minimum variance of the baselines, as a share of their mean square: with less, dark and flat field are not separable.
_MIN_VARIANCE = 1e-3
#: Number of reweighted fits of the lines whose offsets are the dark field.
_LINE_FITS = 3


@dataclass(frozen=True)
class ShadingOptions:
    """How the fields are estimated.

    Attributes
    ----------
    dark : bool
        Whether to estimate a dark field; otherwise it is zero.
    smoothness : float
        Weight of the penalties, relative to the weight that suppresses the coefficients of white noise.
    epsilon : float
        Residual, in units of the local intensity, above which the weight of a pixel decreases.
    reweights, iterations : int
        Maximum number of reweighted problems, and iterations of ADMM for each problem.
    tolerance : float
        Mean relative change of the flat field from one problem to the next, below which the fit has converged.

    Raises
    ------
    ValueError
        A number out of range.
    """

    dark: bool = False
    smoothness: float = 1.0
    epsilon: float = 0.1
    reweights: int = 10
    iterations: int = 20
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        # These comparisons refuse NaN, which would make the fields flat.
        if not 0 <= self.smoothness < math.inf or not 0 < self.epsilon < math.inf or not self.tolerance >= 0:
            raise ValueError(f"{self}: pass a smoothness and a tolerance from 0 on, and an epsilon above 0")
        if min(self.reweights, self.iterations) < 1:
            raise ValueError(f"{self}: pass one reweighted problem and one iteration or more")


@dataclass(frozen=True)
class Shading:
    """The fields of one field of view, for each depth.

    Attributes
    ----------
    flat : array, (depths, height, width)
        Illumination, with a mean of 1.
    dark : array, (depths, height, width)
        Offset, in units of intensity.
    baseline : array, (images, depths)
        Brightness of each image, in units of intensity.
    """

    flat: Array
    dark: Array
    baseline: Array


def dct_matrix(xp: ModuleType, size: int, count: int | None = None) -> Any:
    """Return the first `count` rows of the matrix of the orthonormal DCT-II of `size` samples, as float32."""
    frequency, sample = np.arange(size if count is None else count)[:, None], np.arange(size)
    rows = np.cos(np.pi * frequency * (sample + 0.5) / size) * math.sqrt(2 / size)
    rows[0] /= math.sqrt(2)
    return xp.asarray(rows, np.float32)


def estimate_shading(images: Array, valid: Array | None, options: ShadingOptions) -> Shading:
    """Estimate flat field, dark field and baselines.

    Parameters
    ----------
    images : array of float32, (images, depths, height, width)
        Intensities, all finite. They are not changed.
    valid : array of bool, same shape, optional
        Pixels to use.
    options : ShadingOptions
        How to estimate the fields.
    """
    xp = array_module(images)
    scale = xp.abs(images).mean(axis=(0, 2, 3))  # of each depth
    scale = xp.where(scale > 0, scale, 1).astype(np.float32)
    problem = _ShadingProblem(xp, images, valid, scale, options)
    problem.solve()
    shape = images.shape[1:]
    flat, dark = problem.flat.reshape(shape), (problem.dark * scale[:, None]).reshape(shape)
    return Shading(flat, dark, (problem.baseline * scale[:, None]).T)


class _ShadingProblem:
    """The state of ADMM for z depths and n images of p pixels: images (z, n, p), fields (z, p), baselines (z, n).

    With the residual R, the scaled multiplier u and thresholds t, an iteration computes the misfit m = I - b S - D + u,
    R = shrink(m, t), and the new u = m - R, which is m clipped to ±t. So R need not be stored: the updates of S and b
    use only the target I - D - R + u = I - D - m + 2 u.
    """

    def __init__(self, xp: ModuleType, images: Any, valid: Any, scale: Any, options: ShadingOptions) -> None:
        count, depths, *size = images.shape
        self.xp, self.options, self.size = xp, options, tuple(size)
        self.images = xp.ascontiguousarray((images / scale[:, None, None]).swapaxes(0, 1)).reshape(depths, count, -1)
        self.valid = None if valid is None else valid.swapaxes(0, 1).reshape(self.images.shape)
        self.rows, self.columns = (dct_matrix(xp, length) for length in size)
        self.flat = xp.ones((depths, math.prod(size)), np.float32)
        self.dark = xp.zeros_like(self.flat)
        self.baseline = self._baselines(self.images)
        self.multiplier = xp.zeros_like(self.images)
        # White noise in n images gives a coefficient a gradient of about sqrt(n). The largest gradient of all
        # coefficients is about sqrt(2 log(pixels)) times as large.
        noise = math.sqrt(2 * count * math.log(max(2, math.prod(size))))
        self.threshold = options.smoothness * noise / _PENALTY

    def solve(self) -> None:
        """Solve the problem again with new weights, until the flat field stays the same."""
        residual: Any = self.xp.zeros((1, 1, 1), np.float32)
        for number in range(self.options.reweights):
            before = self.flat
            if self.options.dark and number:
                self._set_dark()
            limits = self._weights(residual) * np.float32(1 / _PENALTY)
            light = self.images - self.dark[:, None]
            target = light + 2 * self.multiplier - self._misfit(light) if number else light.copy()
            for _ in range(self.options.iterations):
                self._set_flat(target)
                self.baseline = self._baselines(target)
                misfit = self._misfit(light)
                self.xp.clip(misfit, -limits, limits, out=self.multiplier)
                self.xp.multiply(self.multiplier, 2, out=target)
                target += light
                target -= misfit
            residual = misfit - self.multiplier
            if float(self.xp.abs(self.flat - before).mean(axis=1).max()) < self.options.tolerance:
                break

    def _misfit(self, light: Any) -> Any:
        """Return the misfit ``light - b S + u``; `light` is ``I - D``."""
        misfit = self.baseline[:, :, None] * self.flat[:, None]
        self.xp.subtract(light, misfit, out=misfit)
        misfit += self.multiplier
        return misfit

    def _set_flat(self, target: Any) -> None:
        """Fit the flat field to all images by least squares, smooth it, and give it a mean of 1."""
        xp = self.xp
        energy = xp.maximum((self.baseline**2).sum(axis=1), 1e-12)
        field = (self.baseline[:, None] @ target)[:, 0] / energy[:, None]
        flat = self._smooth(field, self.threshold / energy)
        mean = flat.mean(axis=1)[:, None]
        usable = mean > _MIN_FLAT
        flat = xp.where(usable, flat / xp.where(usable, mean, 1), 1)
        self.flat = xp.maximum(flat, np.float32(_MIN_FLAT)).astype(np.float32)

    def _set_dark(self) -> None:
        """Fit a line of intensity over baseline to each pixel; the dark field is made of the offsets of the lines.

        Baselines are known only up to a constant, so the offsets are known only up to a multiple of the flat field. The
        dark field is the constant part of the offsets, and the part that is orthogonal to the flat field. It is 0 where
        the baselines vary too little.
        """
        xp, light, flat = self.xp, self.baseline[:, :, None], self.flat
        variance = self.baseline.var(axis=1)[:, None]
        is_separable = variance > _MIN_VARIANCE * (self.baseline**2).mean(axis=1)[:, None]
        slope, offset = flat, self.dark
        for _ in range(_LINE_FITS):
            weights = self._weights(self.images - light * slope[:, None] - offset[:, None])
            total = xp.maximum(weights.sum(axis=1), 1e-6)
            mean, mean_light = (weights * self.images).sum(axis=1) / total, (weights * light).sum(axis=1) / total
            centred = weights * (light - mean_light[:, None])
            energy = (centred * light).sum(axis=1)
            slope = xp.where(energy > 1e-6, (centred * self.images).sum(axis=1) / xp.maximum(energy, 1e-6), 1)
            offset = mean - slope * mean_light
        shape = flat - 1
        power = (shape**2).sum(axis=1)[:, None]
        share = (offset * shape).sum(axis=1)[:, None] / xp.where(power > 1e-6, power, np.inf)
        noise = self.threshold / xp.maximum(light.shape[1] * variance[:, 0], 1e-6)
        dark = self._smooth(offset - share * flat, noise)
        self.dark = xp.where(is_separable, xp.maximum(dark, 0), 0).astype(np.float32)

    def _baselines(self, images: Any) -> Any:
        """Fit the brightness of each image to the flat field by least squares; negative results become zero."""
        brightness = (images @ self.flat[:, :, None])[:, :, 0] / (self.flat**2).sum(axis=1)[:, None]
        return self.xp.maximum(brightness, 0)

    def _smooth(self, field: Any, threshold: Any) -> Any:
        """Shrink the coefficients of fields (z, p), except for their means, by a threshold for each field."""
        coefficients = self.rows @ field.reshape(-1, *self.size) @ self.columns.T
        smooth = _shrink(self.xp, coefficients, threshold.astype(np.float32)[:, None, None])
        smooth[:, 0, 0] = coefficients[:, 0, 0]
        return (self.rows.T @ smooth @ self.columns).reshape(field.shape)

    def _weights(self, residual: Any) -> Any:
        """Return weights that decrease with the residual, of mean 1 at each depth; 0 for pixels that are not valid."""
        xp = self.xp
        model = (self.baseline.mean(axis=1)[:, None] * self.flat)[:, None]
        weights = 1 / (xp.abs(residual) / xp.maximum(model, 1e-6) + np.float32(self.options.epsilon))
        if self.valid is not None:
            weights = weights * self.valid
        weights = xp.broadcast_to(weights, self.images.shape)
        mean = weights.mean(axis=(1, 2))[:, None, None]
        return (weights / xp.where(mean > 0, mean, 1)).astype(np.float32)


def _shrink(xp: ModuleType, values: Array, threshold: Array) -> Array:
    """Move values towards zero by a threshold (soft threshold)."""
    return xp.sign(values) * xp.maximum(xp.abs(values) - threshold, 0)
