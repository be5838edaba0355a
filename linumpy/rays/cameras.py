"""Draw rays from images: pixel, origin and direction of each ray, in NumPy; the counterpart of camera.cuh.

In: a random generator, :class:`~linumpy.rays.images.Images`. Out: :class:`DrawnRays`. Float32 operations are in the
kernel's order, so that results are equal bit for bit.
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
_LAST = np.float32(0.99999994)


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
        In the world's units; directions have length 1.
    length : (n,) float32
        Lengths of the directions before normalization.
    jitter, level : (n,) float32
        Random numbers in [0, 1).
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
    """Return the linear values of the 256 byte values of sRGB (IEC 61966-2-1), float32."""
    value = np.arange(256) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4).astype(np.float32)


def draw_rays(rng: PCG32, images: Images, n_rays: int, *, image_cdf: np.ndarray | None, snap: bool) -> DrawnRays:
    """Draw `n_rays` rays."""
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
    """Choose the image of each ray: in order, or from a distribution, with multiples of the golden ratio as numbers."""
    if cdf is None:
        return index * n_images // n_rays % n_images
    number = (index.astype(np.uint64) * np.uint64(2654435769) + np.uint64(shift)).astype(np.uint32)
    return first_above(cdf, as_unit_float(number))


def first_above(cdf: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Return the first index whose cumulative value is above `u`; the last index where there is none."""
    return np.minimum(np.searchsorted(cdf, u, side="right"), len(cdf) - 1)


def _below(cdf: np.ndarray, line: np.ndarray, cell: np.ndarray) -> np.ndarray:
    return np.where(cell > 0, cdf[line, np.maximum(cell - 1, 0)], np.float32(0))


def _probability(cdf: np.ndarray, line: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """Return the probabilities of cells in lines of `cdf` (lines, cells); the last cell includes the rounding error."""
    above = np.where(cell < cdf.shape[1] - 1, cdf[line, cell], np.float32(1))
    return above - _below(cdf, line, cell)


def _inside(cdf: np.ndarray, u: np.ndarray, line: np.ndarray, cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the position at which the cumulative distribution of a line reaches `u`, and the density there."""
    probability, size = _probability(cdf, line, cell), np.float32(cdf.shape[1])
    with np.errstate(all="ignore"):
        part = np.fmin((u - _below(cdf, line, cell)) / probability, _LAST)
    return np.fmin((cell.astype(np.float32) + part) / size, _LAST), probability * size


def _draw_pixels(
    images: Images, image: np.ndarray, u: np.ndarray, v: np.ndarray, *, snap: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    u, v, pdf = u.copy(), v.copy(), np.ones_like(u)
    for number in np.unique(image):
        cdf = images.images[number].pixel_cdf
        if cdf is None:
            continue
        these = np.flatnonzero(image == number)
        row = first_above(cdf.y, v[these])
        v[these], of_row = _inside(cdf.y[None], v[these], np.zeros_like(row), row)
        above = cdf.x[row] > u[these, None]
        column = np.where(above.any(axis=1), above.argmax(axis=1), cdf.x.shape[1] - 1)
        u[these], of_column = _inside(cdf.x, u[these], row, column)
        pdf[these] = of_row * of_column
    width, height = images.table["width"][image], images.table["height"][image]
    wide, high = width.astype(np.float32), height.astype(np.float32)
    column = np.minimum((u * wide).astype(np.int32), width - 1)
    row = np.minimum((v * high).astype(np.int32), height - 1)
    if snap:
        u = (column.astype(np.float32) + np.float32(0.5)) / wide
        v = (row.astype(np.float32) + np.float32(0.5)) / high
    return u, v, column, row, pdf


def _read_pixels(
    images: Images, image: np.ndarray, column: np.ndarray, row: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    rgba, unmasked = np.empty((len(image), 4), np.float32), np.empty(len(image), bool)
    for number in np.unique(image):
        these = np.flatnonzero(image == number)
        values = images.images[number].pixels[row[these], column[these]]
        if values.dtype == np.uint8:
            rgba[these, :3] = linear_of_bytes()[values[:, :3]]
            rgba[these, 3] = values[:, 3].astype(np.float32) / np.float32(255)
            unmasked[these] = (values != (255, 0, 255, 0)).any(axis=1)
        else:
            rgba[these] = values
            unmasked[these] = ~(values[:, 0] < 0)
        if images.table["straight"][number]:
            rgba[these, :3] *= rgba[these, 3:]
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

    `time`, in [0, 1), is the moment of the ray while the shutter is open.
    """
    rows = images.table[image]
    o, d, valid = lens_rays(rows, u, v)
    in_world = np.zeros(len(image), bool)
    for number in np.unique(image):
        source, these = images.images[number], np.flatnonzero(image == number)
        if source.rays is not None:
            given = source.rays[row[these], column[these]]
            o[these], d[these], in_world[these] = given[:, :3], given[:, 3:], source.rays_frame == "world"
            with np.errstate(all="ignore"):
                size = np.abs(given[:, 0]) + np.abs(given[:, 1]) + np.abs(given[:, 2])
                valid[these] = size < np.float32(1e30)
        elif source.distortion is not None:
            d[these, :2] = d[these, :2] + _distortion(source.distortion, u[these], v[these])
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
    """Rotate vectors about the fixed axis of each camera: slerp from the start pose."""
    angle = rows["angle"] * when
    sine, cosine = (values[:, None] for values in sine_cosine(angle))
    a, versine = rows["axis"], np.float32(1) - cosine
    turned = []
    for w in vectors:
        along = (a[:, 0] * w[:, 0] + a[:, 1] * w[:, 1] + a[:, 2] * w[:, 2])[:, None] * versine
        cross = np.roll(a, -1, 1) * np.roll(w, -2, 1) - np.roll(a, -2, 1) * np.roll(w, -1, 1)
        turned.append(np.where(rows["angle"][:, None] != 0, w * cosine + cross * sine + a * along, w))
    return turned
