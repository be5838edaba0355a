"""Draw rays from images: pixel, origin and direction of each ray, in NumPy; the counterpart of camera.cuh.

In: a random generator, :class:`~linumpy.rays.images.Images`. Out: :class:`DrawnRays`. Float32 operations have the order
of the kernel's, so that results are equal bit for bit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from linumpy.rays.arithmetic import sine_cosine
from linumpy.rays.images import Images
from linumpy.rays.lenses import lens_rays
from linumpy.rays.marching import normalized
from linumpy.rays.pcg32 import PCG32, as_unit_float

#: Random numbers reserved for a ray. It uses the first five: u, v, time, jitter and level.
NUMBERS_PER_RAY = 8
_USED = 5
#: The largest float32 below 1.
_BELOW_ONE = np.float32(0.99999994)


@dataclass(frozen=True)
class DrawnRays:
    """Rays drawn from images.

    Attributes
    ----------
    image : (n,) int64
        Index of the image.
    pdf : (n, 2) float32
        Probability of the image, and of the position in it, relative to uniform drawing.
    uv : (n, 2) float32
        Position in the image, in [0, 1].
    rgba : (n, 4) float32
        Colour of the pixel, linear, premultiplied.
    unmasked : (n,) bool
        False for masked pixels.
    origin, direction : (n, 3) float32
        In the world's axes and units; directions have length 1.
    length : (n,) float32
        Lengths of the directions before normalization.
    jitter, level : (n,) float32
        Random numbers in [0, 1): shift of the ray's points in steps, and number for `max_level`.
    """

    image: np.ndarray
    pdf: np.ndarray
    uv: np.ndarray
    rgba: np.ndarray
    unmasked: np.ndarray
    origin: np.ndarray
    direction: np.ndarray
    length: np.ndarray
    jitter: np.ndarray
    level: np.ndarray


@functools.cache
def linear_of_bytes() -> np.ndarray:
    """Return the linear value, float32, of each byte 0 to 255 of sRGB (IEC 61966-2-1)."""
    value = np.arange(256) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4).astype(np.float32)


def draw_rays(rng: PCG32, images: Images, n_rays: int, *, image_cdf: np.ndarray | None, snap: bool) -> DrawnRays:
    """Draw `n_rays` rays; `rng` is not advanced. With `snap`, rays pass through pixel centres."""
    index = np.arange(n_rays, dtype=np.int64)
    u, v, time, jitter, level = as_unit_float(rng.numbers(index, NUMBERS_PER_RAY, _USED))
    image = choose_images(index, len(images), n_rays, image_cdf, rng.state >> 32)
    pdf = np.ones((n_rays, 2), np.float32)
    if image_cdf is not None:
        pdf[:, 0] = _probability(image_cdf[None], np.zeros_like(image), image) * np.float32(len(images))
    u, v, column, row, pdf[:, 1] = _draw_pixels(images, image, u, v, snap=snap)
    rgba, unmasked = _read_pixels(images, image, column, row)
    origin, direction, length = world_rays(images, image, u, v, column, row, time)
    return DrawnRays(image, pdf, np.stack([u, v], axis=1), rgba, unmasked, origin, direction, length, jitter, level)


def choose_images(index: np.ndarray, n_images: int, n_rays: int, cdf: np.ndarray | None, shift: int) -> np.ndarray:
    """Choose the image of each ray: in order of the rays, or from a distribution.

    The random numbers for the distribution are multiples of the golden ratio, modulo 1, shifted by `shift` / 2^32.
    """
    if cdf is None:
        return index * n_images // n_rays % n_images
    number = (index.astype(np.uint64) * np.uint64(2654435769) + np.uint64(shift)).astype(np.uint32)
    return first_above(cdf, as_unit_float(number))


def first_above(cdf: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Return the first index whose cumulative value is above `u`; the last index where there is none."""
    return np.minimum(np.searchsorted(cdf, u, side="right"), len(cdf) - 1)


def _start(cdf: np.ndarray, line: np.ndarray, cell: np.ndarray) -> np.ndarray:
    return np.where(cell > 0, cdf[line, np.maximum(cell - 1, 0)], np.float32(0))


def _probability(cdf: np.ndarray, line: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """Return the probabilities of cells in lines of `cdf` (lines, cells); the last cell includes the rounding error."""
    end = np.where(cell < cdf.shape[1] - 1, cdf[line, cell], np.float32(1))
    return end - _start(cdf, line, cell)


def _position_and_density(
    cdf: np.ndarray, u: np.ndarray, line: np.ndarray, cell: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the position in [0, 1) at which the cumulative distribution of a line reaches `u`; the density there."""
    probability, size = _probability(cdf, line, cell), np.float32(cdf.shape[1])
    with np.errstate(all="ignore"):
        part = np.fmin((u - _start(cdf, line, cell)) / probability, _BELOW_ONE)
    return np.fmin((cell.astype(np.float32) + part) / size, _BELOW_ONE), probability * size


def _draw_pixels(
    images: Images, image: np.ndarray, u: np.ndarray, v: np.ndarray, *, snap: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    u, v, pdf = u.copy(), v.copy(), np.ones_like(u)
    for number in np.unique(image):
        cdf = images.images[number].pixel_cdf
        if cdf is None:
            continue
        of_image = np.flatnonzero(image == number)
        row = first_above(cdf.y, v[of_image])
        v[of_image], row_density = _position_and_density(cdf.y[None], v[of_image], np.zeros_like(row), row)
        above = cdf.x[row] > u[of_image, None]
        column = np.where(above.any(axis=1), above.argmax(axis=1), cdf.x.shape[1] - 1)
        u[of_image], column_density = _position_and_density(cdf.x, u[of_image], row, column)
        pdf[of_image] = row_density * column_density
    width, height = images.table["width"][image], images.table["height"][image]
    width_f, height_f = width.astype(np.float32), height.astype(np.float32)
    column = np.minimum((u * width_f).astype(np.int32), width - 1)
    row = np.minimum((v * height_f).astype(np.int32), height - 1)
    if snap:
        u = (column.astype(np.float32) + np.float32(0.5)) / width_f
        v = (row.astype(np.float32) + np.float32(0.5)) / height_f
    return u, v, column, row, pdf


def _read_pixels(
    images: Images, image: np.ndarray, column: np.ndarray, row: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    rgba, unmasked = np.empty((len(image), 4), np.float32), np.empty(len(image), bool)
    for number in np.unique(image):
        of_image = np.flatnonzero(image == number)
        values = images.images[number].pixels[row[of_image], column[of_image]]
        if values.dtype == np.uint8:
            rgba[of_image, :3] = linear_of_bytes()[values[:, :3]]
            rgba[of_image, 3] = values[:, 3].astype(np.float32) / np.float32(255)
            unmasked[of_image] = (values != (255, 0, 255, 0)).any(axis=1)
        else:
            rgba[of_image] = values
            unmasked[of_image] = ~(values[:, 0] < 0)
        if images.table["straight"][number]:
            rgba[of_image, :3] *= rgba[of_image, 3:]
    return rgba, unmasked


def _distortion(shifts: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Interpolate a distortion map (height, width, 2), whose cells have their centres at (k + 0.5) / size."""
    height, width = shifts.shape[:2]
    half, one = np.float32(0.5), np.float32(1)
    x = np.fmin(np.fmax(u * np.float32(width) - half, 0), np.float32(width) - one)
    y = np.fmin(np.fmax(v * np.float32(height) - half, 0), np.float32(height) - one)
    x0, y0 = x.astype(np.int32), y.astype(np.int32)
    x1, y1 = np.minimum(x0 + 1, width - 1), np.minimum(y0 + 1, height - 1)
    part_x, part_y = (x - x0.astype(np.float32))[:, None], (y - y0.astype(np.float32))[:, None]
    above = shifts[y0, x0] + part_x * (shifts[y0, x1] - shifts[y0, x0])
    below = shifts[y1, x0] + part_x * (shifts[y1, x1] - shifts[y1, x0])
    return above + part_y * (below - above)


def world_rays(
    images: Images,
    image: np.ndarray,
    u: np.ndarray,
    v: np.ndarray,
    column: np.ndarray,
    row: np.ndarray,
    time: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return origins and unit directions (n, 3) in the world's axes, and the lengths before normalization.

    `time`, in [0, 1), is the moment of a ray between the opening and the closing of the shutter.
    """
    rows = images.table[image]
    o, d, valid = lens_rays(rows, u, v)
    in_world = np.zeros(len(image), bool)
    for number in np.unique(image):
        source, of_image = images.images[number], np.flatnonzero(image == number)
        if source.rays is not None:
            given = source.rays[row[of_image], column[of_image]]
            o[of_image], d[of_image], in_world[of_image] = given[:, :3], given[:, 3:], source.rays_frame == "world"
            with np.errstate(all="ignore"):
                size = np.abs(given[:, 0]) + np.abs(given[:, 1]) + np.abs(given[:, 2])
                valid[of_image] = size < np.float32(1e30)
        elif source.distortion is not None:
            d[of_image, :2] = d[of_image, :2] + _distortion(source.distortion, u[of_image], v[of_image])
    d, length, has_length = normalized(d)
    bad = ~(valid & has_length)
    o[bad], d[bad], length[bad] = 0, (0, 0, 1), 1
    stays = (in_world & ~bad)[:, None]
    s = rows["shutter"]
    when = s[:, 0] + s[:, 1] * u + s[:, 2] * v + s[:, 3] * time
    turned_o, turned_d = _turned(rows, when, o, d)
    moved = rows["translation"] + when[:, None] * rows["motion"]
    origin = np.where(stays, o, _rotated(rows["rotation"], turned_o) + moved)
    return origin, np.where(stays, d, _rotated(rows["rotation"], turned_d)), length


def _rotated(r: np.ndarray, v: np.ndarray) -> np.ndarray:
    return r[:, :, 0] * v[:, 0, None] + r[:, :, 1] * v[:, 1, None] + r[:, :, 2] * v[:, 2, None]


def _turned(rows: np.ndarray, when: np.ndarray, *vectors: np.ndarray) -> list[np.ndarray]:
    """Rotate vectors about the fixed axis of each camera (slerp), by the fraction `when` of the angle."""
    angle = rows["angle"] * when
    sine, cosine = (values[:, None] for values in sine_cosine(angle))
    a, versine = rows["axis"], np.float32(1) - cosine
    turned = []
    for w in vectors:
        along = (a[:, 0] * w[:, 0] + a[:, 1] * w[:, 1] + a[:, 2] * w[:, 2])[:, None] * versine
        cross = np.roll(a, -1, 1) * np.roll(w, -2, 1) - np.roll(a, -2, 1) * np.roll(w, -1, 1)
        turned.append(np.where(rows["angle"][:, None] != 0, w * cosine + cross * sine + a * along, w))
    return turned
