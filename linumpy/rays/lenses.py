"""Lenses: pixel → ray in the camera's axes, in NumPy; the counterpart of camera.cuh, operation for operation.

In: coordinates u, v in [0, 1] across an image, and for each ray the :data:`~linumpy.rays.images.RECORD` of its image.
Out: float32 origins and directions (not normalized), and which rays are valid.
"""

from __future__ import annotations

import numpy as np

from linumpy.rays.arithmetic import sine_cosine
from linumpy.rays.images import LENS_NUMBERS

#: Iterations of Newton's method, for lenses without a closed-form inverse.
NEWTON_STEPS = 12
_HALF, _ONE, _TWO = np.float32(0.5), np.float32(1), np.float32(2)
#: Relative error at which Newton's method has a solution; smallest determinant (or slope) of an invertible lens.
_TOLERANCE, _FOLD = np.float32(1e-4), np.float32(1e-6)
#: Origins and directions (n, 3), and which rays are valid (n,).
_Rays = tuple[np.ndarray, np.ndarray, np.ndarray]


def lens_rays(rows: np.ndarray, u: np.ndarray, v: np.ndarray) -> _Rays:
    """Apply the lens of each ray.

    Parameters
    ----------
    rows : numpy.ndarray of RECORD, (n,)
        Record of the image of each ray.
    u, v : (n,) float32
        Position along the width and the height of the image.

    Returns
    -------
    origin, direction : (n, 3) float32
        In the camera's axes; directions are not normalized.
    valid : (n,) bool
        False where the lens has no ray.
    """
    origin, direction = np.zeros((len(u), 3), np.float32), np.empty((len(u), 3), np.float32)
    valid = np.ones(len(u), bool)
    for lens in np.unique(rows["lens"]):
        of_lens = np.flatnonzero(rows["lens"] == lens)
        with np.errstate(all="ignore"):
            o, d, good = _FUNCTIONS[int(lens)](rows[of_lens], u[of_lens], v[of_lens])
        origin[of_lens], direction[of_lens], valid[of_lens] = o, d, good
    return origin, direction, valid


def _from_principal(rows: np.ndarray, u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distances from the principal point in pixels."""
    principal = rows["principal"]
    return (
        u * rows["width"].astype(np.float32) - principal[:, 0],
        v * rows["height"].astype(np.float32) - principal[:, 1],
    )


def _plane(rows: np.ndarray, u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distances from the principal point, divided by the focal lengths."""
    x, y = _from_principal(rows, u, v)
    return x / rows["focal"][:, 0], y / rows["focal"][:, 1]


def _at_origin(x: np.ndarray, y: np.ndarray, z: np.ndarray, valid: np.ndarray | None = None) -> _Rays:
    direction = np.stack([x, y, z], axis=1)
    return np.zeros_like(direction), direction, np.ones(len(x), bool) if valid is None else valid


def _perspective(rows: np.ndarray, u: np.ndarray, v: np.ndarray) -> _Rays:
    x, y = _plane(rows, u, v)
    return _at_origin(x, y, np.ones_like(x))


def _opencv(rows: np.ndarray, u: np.ndarray, v: np.ndarray) -> _Rays:
    x, y = _plane(rows, u, v)
    k = rows["lens_params"].T
    px, py, good = x, y, np.ones(len(x), bool)
    six = np.float32(6)
    for step in range(NEWTON_STEPS + 1):
        r2 = px * px + py * py
        slope = _TWO * (k[0] + _TWO * k[1] * r2)
        radial, xy = _ONE + r2 * (k[0] + k[1] * r2), _TWO * px * py
        error_x = px * radial + k[2] * xy + k[3] * (r2 + _TWO * px * px) - x
        error_y = py * radial + k[3] * xy + k[2] * (r2 + _TWO * py * py) - y
        xx = radial + px * px * slope + _TWO * k[2] * py + six * k[3] * px
        yy = radial + py * py * slope + _TWO * k[3] * px + six * k[2] * py
        cross = px * py * slope + _TWO * k[2] * px + _TWO * k[3] * py
        determinant = xx * yy - cross * cross
        good &= determinant > _FOLD
        if step < NEWTON_STEPS:
            px, py = (
                px - (yy * error_x - cross * error_y) / determinant,
                py - (xx * error_y - cross * error_x) / determinant,
            )
    good &= np.abs(error_x) + np.abs(error_y) < _TOLERANCE * (_ONE + np.abs(x) + np.abs(y))
    return _at_origin(px, py, np.ones_like(px), good)


def _fisheye_angle(k: np.ndarray, distance: np.ndarray) -> np.ndarray:
    angle, good = np.fmin(distance, np.float32(1.5707964)), np.ones(len(distance), bool)
    a, b, c, d = (np.float32(n) for n in (3, 5, 7, 9))
    for step in range(NEWTON_STEPS + 1):
        q = angle * angle
        error = angle * (_ONE + q * (k[0] + q * (k[1] + q * (k[2] + q * k[3])))) - distance
        slope = _ONE + q * (a * k[0] + q * (b * k[1] + q * (c * k[2] + q * (d * k[3]))))
        good &= slope > _FOLD
        if step < NEWTON_STEPS:
            angle = angle - error / slope
    good &= np.abs(error) < _TOLERANCE * (_ONE + distance)
    return np.where(good, angle, np.float32(-1))


def _at_angle(angle: np.ndarray, x: np.ndarray, y: np.ndarray, r: np.ndarray) -> _Rays:
    valid = (angle >= 0) & (angle <= np.float32(3.1415927))
    sine, cosine = sine_cosine(np.where(valid, angle, np.float32(0)))
    zero = np.zeros_like(x)
    return _at_origin(np.where(r > 0, x / r * sine, zero), np.where(r > 0, y / r * sine, zero), cosine, valid)


def _fisheye(rows: np.ndarray, u: np.ndarray, v: np.ndarray) -> _Rays:
    x, y = _plane(rows, u, v)
    r = np.sqrt(x * x + y * y)
    return _at_angle(_fisheye_angle(rows["lens_params"].T, r), x, y, r)


def _ftheta(rows: np.ndarray, u: np.ndarray, v: np.ndarray) -> _Rays:
    x, y = _from_principal(rows, u, v)
    k, r = rows["lens_params"].T, np.sqrt(x * x + y * y)
    return _at_angle(k[0] + r * (k[1] + r * (k[2] + r * (k[3] + r * k[4]))), x, y, r)


def _on_sphere(longitude: np.ndarray, latitude: np.ndarray) -> _Rays:
    valid = (np.abs(longitude) <= np.float32(3.1415929)) & (np.abs(latitude) <= np.float32(1.5707965))
    zero = np.float32(0)
    sine, cosine = sine_cosine(np.where(valid, longitude, zero))
    sine_of_latitude, cosine_of_latitude = sine_cosine(np.where(valid, latitude, zero))
    return _at_origin(sine * cosine_of_latitude, sine_of_latitude, cosine * cosine_of_latitude, valid)


def _equirectangular(rows: np.ndarray, u: np.ndarray, v: np.ndarray) -> _Rays:
    return _on_sphere(*_plane(rows, u, v))


def _latlong(rows: np.ndarray, u: np.ndarray, v: np.ndarray) -> _Rays:
    return _on_sphere((u - _HALF) * np.float32(6.2831855), (v - _HALF) * np.float32(3.1415927))


def _orthographic(rows: np.ndarray, u: np.ndarray, v: np.ndarray) -> _Rays:
    x, y = _plane(rows, u, v)
    zero, one = np.zeros_like(x), np.ones_like(x)
    return np.stack([x, y, zero], axis=1), np.stack([zero, zero, one], axis=1), np.ones(len(x), bool)


_FUNCTIONS = {
    LENS_NUMBERS["perspective"]: _perspective,
    LENS_NUMBERS["opencv"]: _opencv,
    LENS_NUMBERS["opencv_fisheye"]: _fisheye,
    LENS_NUMBERS["ftheta"]: _ftheta,
    LENS_NUMBERS["equirectangular"]: _equirectangular,
    LENS_NUMBERS["latlong"]: _latlong,
    LENS_NUMBERS["orthographic"]: _orthographic,
}
