"""Shapes fitted to a tissue surface: plane, quadratic, Gaussian, sphere.

In: a map of depths, and a mask. Out: an :class:`InterfaceFit`, whose map is in the memory of the input. In the code z
is the measured depth of each A-line, y and x its coordinates, and `valid` the A-lines to fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array, DeviceName
from linumpy.device import array_module, to_host, transfers

_MAX_STEPS = 60  # of Levenberg and Marquardt's method


@dataclass(frozen=True, kw_only=True)
class InterfaceFit:
    """A shape fitted to a surface.

    Attributes
    ----------
    model : str
        ``"plane"``, ``"quadratic"``, ``"gaussian"`` or ``"spherical"``.
    surface : numpy.ndarray or cupy.ndarray of float64, (height, width)
        The fitted depth in voxels; NaN where a sphere has no surface.
    parameters : dict of str to float
        In voxels; the coordinates Y and X count from the first voxel. ``plane``: offset, y, x (depth = offset + y Y +
        x X). ``quadratic``: also yy, yx, xx (the coefficients of Y², Y X and X²). ``gaussian``: offset, height,
        centre_y, centre_x, sigma_y, sigma_x (depth = offset + height exp(-((Y - centre_y) / sigma_y)² / 2 - ((X -
        centre_x) / sigma_x)² / 2)). ``spherical``: centre_z, centre_y, centre_x in voxels, and radius in the unit of
        the spacing.
    rms : float
        Root mean square of the residuals of the fitted voxels, along depth in voxels. Voxels where a sphere has no
        surface count as 0.
    """

    model: str
    surface: Array
    parameters: dict[str, float]
    rms: float


def fit_interface(
    surface: Array,
    model: str = "quadratic",
    *,
    mask: Array | None = None,
    spacing: tuple[float, float, float] = (1.0, 1.0, 1.0),
    device: DeviceName | None = None,
) -> InterfaceFit:
    """Fit a shape to a surface, by least squares along depth.

    Parameters
    ----------
    surface : numpy.ndarray or cupy.ndarray, (height, width)
        Depth in voxels. Negative and non-finite values are unknown and not fitted.
    model : {"plane", "quadratic", "gaussian", "spherical"}
        The shape.
    mask : numpy.ndarray or cupy.ndarray of bool, optional
        Voxels to fit; by default all known ones.
    spacing : (float, float, float)
        Voxel spacing (Z, Y, X) in any unit, which the radius then has; only the sphere depends on it.
    device : {"auto", "cuda", "cpu"}, optional
        Where to compute; by default where the input lies.

    Returns
    -------
    InterfaceFit
        Its surface is in the memory of the input.

    Raises
    ------
    ValueError
        An unknown model; a surface that is not a map of real numbers; a mask or spacing that does not fit; fewer voxels
        to fit than a linear start of the shape has parameters (plane 3, quadratic 6, Gaussian 3, sphere 4), or all of
        them on one line.
    GpuUnavailableError
        `device` is ``"cuda"``, and there is no CUDA device.

    Notes
    -----
    Gaussian and sphere are found by Levenberg and Marquardt's method (Marquardt, J. SIAM 11, 1963), the sphere from the
    algebraic fit of Kåsa (IEEE Trans. Instrum. Meas. 25, 1976). Parameters are copied to the host, which waits for the
    device.
    """
    if model not in _MODELS:
        raise ValueError(f"model={model!r}: choose one of {', '.join(_MODELS)}")
    if surface.ndim != 2 or surface.dtype.kind not in "iuf":
        raise ValueError(f"a surface of shape {surface.shape}, {surface.dtype}: a map (height, width) is needed")
    if mask is not None and mask.shape != surface.shape:
        raise ValueError(f"a mask of {mask.shape} does not fit a surface of {surface.shape}")
    if len(spacing) != 3 or not all(0 < step < np.inf for step in spacing):
        raise ValueError(f"spacing={spacing}: three positive steps are needed")
    transfer, back = transfers(surface, device)
    z = transfer(surface).astype(np.float64)
    xp = array_module(z)
    valid = xp.isfinite(z) & (z >= 0)
    if mask is not None:
        valid &= transfer(mask).astype(bool)
    y, x = xp.meshgrid(*(xp.arange(n, dtype=np.float64) for n in surface.shape), indexing="ij")
    fitted, parameters = _MODELS[model](xp, y, x, z, valid, spacing)
    residuals = xp.where(valid & xp.isfinite(fitted), z - fitted, 0)
    rms = float(xp.sqrt((residuals**2).sum() / xp.maximum(valid.sum(), 1)))
    return InterfaceFit(model=model, surface=back(fitted), parameters=parameters, rms=rms)


def _polynomial(
    xp: ModuleType,
    y: Array,
    x: Array,
    z: Array,
    valid: Array,
    spacing: tuple[float, ...],
    *,
    powers: dict[str, tuple[int, int]],
) -> tuple[Array, dict[str, float]]:
    """Fit a polynomial with the given powers of y and x, by the names of their coefficients."""
    # Coordinates from -1 to 1: in voxels the sums of high powers would swamp those of low ones.
    scale = [(n - 1) / 2 or 1.0 for n in z.shape]
    v, u = y / scale[0] - 1, x / scale[1] - 1
    coefficients = _solve(xp, [v**p * u**q for p, q in powers.values()], z, valid)
    fitted: Any = sum(float(c) * v**p * u**q for c, (p, q) in zip(coefficients, powers.values(), strict=True))
    # Expand (y / s - 1)^p (x / t - 1)^q in powers of y and x.
    full = np.zeros((3, 3))
    for c, (p, q) in zip(coefficients, powers.values(), strict=True):
        left, right = (np.polynomial.polynomial.polypow([-1, 1 / s], k) for s, k in zip(scale, (p, q), strict=True))
        full[: p + 1, : q + 1] += c * np.outer(left, right)
    return fitted, {name: float(full[p, q]) for name, (p, q) in powers.items()}


def _solve(xp: ModuleType, columns: list[Array], z: Array, valid: Array) -> np.ndarray:
    """Fit z by a weighted sum of columns, by normal equations on the host; return the weights.

    Raise ValueError if there are too few voxels, or the columns are not independent.
    """
    rows = xp.stack([xp.where(valid, column, 0).reshape(-1) for column in columns])
    target = xp.where(valid, z, 0).reshape(-1)
    matrix, right = to_host(rows @ rows.T), to_host(rows @ target)
    count = int(to_host(valid.sum()))
    if count < len(columns) or np.linalg.matrix_rank(matrix, hermitian=True) < len(columns):
        raise ValueError(f"{count} voxels of the surface are known, which is too few or in one line for the shape")
    return np.linalg.solve(matrix, right)


def _gaussian(
    xp: ModuleType, y: Array, x: Array, z: Array, valid: Array, spacing: tuple[float, ...]
) -> tuple[Array, dict[str, float]]:
    def shape(p: np.ndarray) -> tuple[Array, list[Array]]:
        offset, height, cy, cx, sy, sx = (float(number) for number in p)
        v, u = (y - cy) / sy, (x - cx) / sx
        bell = xp.exp(-(v**2 + u**2) / 2)
        slopes = [height * bell * factor for factor in (v / sy, u / sx, v**2 / sy, u**2 / sx)]
        return offset + height * bell, [xp.ones_like(bell), bell, *slopes]

    _solve(xp, [xp.ones_like(z), y / y.size, x / x.size], z, valid)  # raises where nothing can be fitted
    low, high, middle = (float(to_host(f(z[valid]))) for f in (xp.min, xp.max, xp.median))
    sizes = [n / 4 + 1 for n in z.shape]
    best: tuple[float, np.ndarray] | None = None
    # Fit a hill and a hollow, and take the better one.
    for offset, height in ((middle, high - middle), (middle, low - middle)):
        at = z - middle if height > 0 else middle - z
        weight = xp.where(valid, xp.maximum(at - abs(height) / 2, 0), 0)
        total = xp.maximum(weight.sum(), 1e-12)
        centre = [float(to_host((weight * coordinate).sum() / total)) for coordinate in (y, x)]
        start = np.array([offset, height or 1.0, *centre, *sizes])
        error, fitted = _levenberg_marquardt(xp, shape, start, z, valid)
        if best is None or error < best[0]:
            best = error, fitted
    assert best is not None
    names = ("offset", "height", "centre_y", "centre_x", "sigma_y", "sigma_x")
    fitted = best[1].copy()
    fitted[4:] = np.abs(fitted[4:])
    return shape(fitted)[0], dict(zip(names, map(float, fitted), strict=True))


def _spherical(
    xp: ModuleType, y: Array, x: Array, z: Array, valid: Array, spacing: tuple[float, ...]
) -> tuple[Array, dict[str, float]]:
    # Coordinates from the middle of the map, in parts of its size, with equal units along all axes.
    unit = max(n * s for n, s in zip(z.shape, spacing[1:], strict=True))
    middle = [(n - 1) / 2 for n in z.shape]
    b, a = ((coordinate - m) * s / unit for coordinate, m, s in zip((y, x), middle, spacing[1:], strict=True))
    depth = float(to_host(xp.where(valid, z, 0).sum() / xp.maximum(valid.sum(), 1)))
    c = (z - depth) * spacing[0] / unit
    square = a**2 + b**2 + c**2
    # |p - m|² = r² is linear in m and r² - |m|².
    mx, my, mz, constant = _solve(xp, [2 * a, 2 * b, 2 * c, xp.ones_like(a)], square, valid)
    radius = np.sqrt(max(constant + mx**2 + my**2 + mz**2, 1e-12))
    side = -1.0 if mz > 0 else 1.0  # the surface lies above the centre, or below it

    def shape(p: np.ndarray) -> tuple[Array, list[Array]]:
        pz, py, px, r = (float(number) for number in p)
        root = xp.sqrt(xp.maximum(r**2 - (b - py) ** 2 - (a - px) ** 2, 1e-9))
        return pz + side * root, [xp.ones_like(root), side * (b - py) / root, side * (a - px) / root, side * r / root]

    _, fitted = _levenberg_marquardt(xp, shape, np.array([mz, my, mx, radius]), c, valid)
    pz, py, px, r = (float(number) for number in fitted)
    fitted = shape(fitted)[0] * unit / spacing[0] + depth
    fitted = xp.where((b - py) ** 2 + (a - px) ** 2 <= r**2, fitted, np.nan)
    centre = {
        "centre_z": pz * unit / spacing[0] + depth,
        "centre_y": py * unit / spacing[1] + middle[0],
        "centre_x": px * unit / spacing[2] + middle[1],
    }
    return fitted, {**centre, "radius": abs(r) * unit}


def _levenberg_marquardt(
    xp: ModuleType,
    shape: Callable[[np.ndarray], tuple[Array, list[Array]]],
    start: np.ndarray,
    z: Array,
    valid: Array,
) -> tuple[float, np.ndarray]:
    """Fit the parameters of a shape, a function of them that returns values and derivatives.

    Return the sum of squared residuals, and the parameters.
    """

    def at(p: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        values, slopes = shape(p)
        rows = xp.stack([xp.where(valid, slope, 0).reshape(-1) for slope in slopes])
        residuals = xp.where(valid, z - values, 0).reshape(-1)
        sums = to_host(xp.concatenate([rows, residuals[None]]) @ xp.concatenate([rows, residuals[None]]).T)
        return float(sums[-1, -1]), sums[:-1, :-1], sums[:-1, -1]

    p, damping = start.astype(np.float64), 1e-3
    error, matrix, right = at(p)
    for _ in range(_MAX_STEPS):
        step = np.linalg.lstsq(matrix + damping * np.diag(np.diag(matrix) + 1e-12), right, rcond=None)[0]
        trial = at(p + step)
        if np.isfinite(trial[0]) and trial[0] <= error:
            done = error - trial[0] <= 1e-12 * error
            p, (error, matrix, right), damping = p + step, trial, damping / 5
            if done:
                break
        else:
            damping *= 4
            if damping > 1e12:
                break
    return error, p


_PLANE = {"offset": (0, 0), "y": (1, 0), "x": (0, 1)}
_MODELS: dict[str, Callable[..., tuple[Array, dict[str, float]]]] = {
    "plane": partial(_polynomial, powers=_PLANE),
    "quadratic": partial(_polynomial, powers=_PLANE | {"yy": (2, 0), "yx": (1, 1), "xx": (0, 2)}),
    "gaussian": _gaussian,
    "spherical": _spherical,
}
