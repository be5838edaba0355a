"""The structure of a synthetic brain: reflectivity of its tissue, its outline, and what surrounds it.

In: a :class:`~linumpy.testing.brain_spec.BrainSpec`, and coordinates in voxels of the brain. Out: reflectivities, and
shares of tissue. A value depends only on the spec and the coordinates, so any box can be made by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.testing.brain_spec import BrainSpec
from linumpy.testing.texture import add_cosine, lattice, log_normal, sum_of_waves

#: Plane waves of the structure, and of the border between tissues.
_WAVES, _BORDER_WAVES = 16, 4
#: Steepness of the outline of the brain and of the borders between tissues, in units of their fields.
_OUTLINE_SLOPE, _BORDER_SLOPE = 20.0, 4.0
#: Numbers of lobes of an irregular outline, their heights, and the depth in µm over which a lobe turns by a radian.
_LOBES, _LOBE_HEIGHTS, _LOBE_DEPTH_UM = (2, 3, 5), (0.15, 0.1, 0.06), 1500.0


@dataclass(frozen=True)
class _Points:
    """Points of a brain: ``(z[k] - above[i, j], y[i, j], x[i, j])`` in voxels."""

    z: Array
    above: Array
    y: Array
    x: Array


def reflectivity_at(spec: BrainSpec, z: Array, above: Array, y: Array, x: Array) -> Array:
    """Sample the known volume at ``(z[k] - above[i, j], y[i, j], x[i, j])`` in voxels of the brain.

    - `z` (float64, (Z,)): planes.
    - `above`, `y`, `x` (float64, (Y, X)): depth of the surface in each A-line, which is subtracted from `z`, and the
      lateral coordinates of the A-line.

    Returns: In the memory of `y`.
    """
    xp, at = array_module(y), _Points(z, above, y, x)
    if spec.volume is not None:
        from linumpy.gpu.ndimage.transform import map_coordinates

        coordinates = xp.stack(xp.broadcast_arrays(z[:, None, None] - above, y, x))
        return map_coordinates(xp.asarray(spec.volume.astype(np.float32)), coordinates, order=1, mode="constant")
    structure = _TISSUES[spec.anatomy](spec, at)
    around: Any = np.float32(spec.water)
    if spec.agarose is not None:
        longest = spec.texture_um[1]
        waves = _sum_of_waves(spec, 9, 2, (2 * longest, 4 * longest), at)
        around = np.float32(spec.agarose) * (1 + np.float32(0.05) * waves)
    inside = tissue_share(spec, z, above, y, x)
    return np.float32(spec.peak) * (structure * inside + around * (1 - inside))


def tissue_share(spec: BrainSpec, z: Array, above: Array, y: Array, x: Array) -> Array:
    """Return the share of tissue at the coordinates of :func:`reflectivity_at`: float32, from 0 to 1.

    The rest are the surroundings. Of a brain without outline the share is 1 everywhere, as a volume's.
    """
    if spec.volume is not None or (spec.coverage is None and not np.isfinite(spec.radius)):
        return array_module(y).ones((len(z), *y.shape), np.float32)
    if spec.coverage is None:
        half = [n / 2 for n in spec.slice_shape[1:]]
        outline = ((y / half[0] - 1) ** 4 + (x / half[1] - 1) ** 4) ** 0.25
        return _smooth_step((spec.radius - outline).astype(np.float32), _OUTLINE_SLOPE)[None]
    edge, half_width = _edge(spec), min(spec.slice_shape[1:]) / 2
    # The border is about two voxels wide.
    return _smooth_step(edge - _irregular(spec, _Points(z, above, y, x)), 2 * half_width)


def _irregular(spec: BrainSpec, at: _Points) -> Array:
    """Return the distance from the middle of the tissue relative to the outline's, up to a factor (:func:`_edge`)."""
    xp, rng = array_module(at.y), np.random.default_rng([spec.seed, 10])
    shift, phases, turns = rng.uniform(-0.2, 0.2, 2), rng.uniform(0, 2 * np.pi, 3), rng.uniform(-1, 1, 3)
    v, u = (2 * p / n - 1 - move for p, n, move in zip((at.y, at.x), spec.slice_shape[1:], shift, strict=True))
    angle, radius = xp.arctan2(v, u), xp.ones((len(at.z), *at.y.shape), np.float32)
    for lobes, height, phase, turn in zip(_LOBES, _LOBE_HEIGHTS, phases, turns, strict=True):
        along_z = turn * spec.spacing_um[0] / _LOBE_DEPTH_UM
        add_cosine(radius, along_z * at.z, lobes * angle + phase - along_z * at.above, height)
    return xp.hypot(v, u).astype(np.float32) / radius


@lru_cache(maxsize=16)
def _edge(spec: BrainSpec) -> np.float32:
    """Return the value of :func:`_irregular` within which the tissue covers its share of the field."""
    y, x = np.meshgrid(*((np.arange(128) + 0.5) * n / 128 for n in spec.slice_shape[1:]), indexing="ij")
    return np.float32(
        np.quantile(np.asarray(_irregular(spec, _Points(np.zeros(1), np.zeros_like(y), y, x))), spec.coverage or 1.0)
    )


def _waves(spec: BrainSpec, at: _Points) -> Array:
    """Return structure of plane waves, with smooth borders between grey and white matter."""
    structure = log_normal(_sum_of_waves(spec, 1, _WAVES, spec.texture_um, at), _WAVES)
    longest = spec.texture_um[1]
    border = _sum_of_waves(spec, 7, _BORDER_WAVES, (longest, 3 * longest), at)
    structure *= 1 + np.float32(spec.white - 1) * _smooth_step(border - 1, _BORDER_SLOPE)
    return structure


def _lattice(spec: BrainSpec, at: _Points) -> Array:
    """Return structure of noise of several periods: three tissues with sharp borders, and thin bright fibres."""
    longest = spec.texture_um[1]
    tissue, sharp = _noise(spec, 20, 1.5 * longest, at), 3 * longest / max(spec.spacing_um)
    level = 1 + np.float32(spec.white - 1) * _smooth_step(tissue - np.float32(0.25), sharp)
    level -= np.float32(0.45) * _smooth_step(np.float32(-0.4) - tissue, sharp)
    return level * _texture(spec, at, 0.35) * (1 + 2 * _tubes(spec, at, 2.0))


def _layers(spec: BrainSpec, at: _Points) -> Array:
    """Return folded layers of random reflectivities, with dark vessels."""
    xp, longest, rng = array_module(at.y), spec.texture_um[1], np.random.default_rng([spec.seed, 11])
    direction, levels = rng.normal(size=3), xp.asarray(rng.uniform(0.6, spec.white, 64).astype(np.float32))
    slope = 2 * direction / np.linalg.norm(direction) * spec.spacing_um / longest
    flat = slope[0] * (at.z[:, None, None] - at.above) + slope[1] * at.y + slope[2] * at.x
    folded = flat.astype(np.float32) + np.float32(1.5) * _noise(spec, 21, 2 * longest, at)
    layer = xp.floor(folded)
    upper, lower = (levels[(layer.astype(np.int32) + k) % len(levels)] for k in (0, 1))
    width = np.float32(min(1.0, 6 * max(spec.spacing_um) / longest))
    level = upper + (lower - upper) * xp.clip((folded - layer - 1) / width + 1, 0, 1)
    return level * _texture(spec, at, 0.25) * (1 - np.float32(0.7) * _tubes(spec, at, 3.0))


#: Structure of tissue relative to grey matter, by anatomy.
_TISSUES: dict[str, Callable[[BrainSpec, _Points], Array]] = {"waves": _waves, "lattice": _lattice, "layers": _layers}


def _texture(spec: BrainSpec, at: _Points, deviation: float) -> Array:
    """Return fine structure of about mean 1, and a deviation of its logarithm: noise of periods that halve."""
    (shortest, period), stream = spec.texture_um, 30
    total: Any = 0
    while (period := max(shortest, period / 2)) > shortest or stream == 30:
        total, stream = total + _noise(spec, stream, period, at), stream + 1
    total, stream = total + _noise(spec, stream, shortest, at), stream + 1
    # Interpolation between the nodes of a lattice leaves about a third of the variance of its numbers.
    spread = deviation / ((stream - 30) / 3) ** 0.5
    return array_module(at.y).exp(np.float32(spread) * total - np.float32(deviation**2 / 2))


def _tubes(spec: BrainSpec, at: _Points, voxels: float) -> Array:
    """Return 1 on random curves, and less around them: tubes of about a number of voxels in diameter."""
    period = spec.texture_um[1]
    width = voxels * max(spec.spacing_um) / period
    square = _noise(spec, 40, period / 2, at) ** 2 + _noise(spec, 41, period / 2, at) ** 2
    return array_module(at.y).exp(square * np.float32(-0.5 / width**2))


def _noise(spec: BrainSpec, stream: int, period_um: float, at: _Points) -> Array:
    """Return noise of about a period: random numbers at nodes half a period apart, interpolated smoothly."""
    from linumpy.gpu.ndimage.transform import map_coordinates

    xp, seed = array_module(at.y), (spec.seed, stream)
    rng = np.random.default_rng([*seed, 1])
    # The lattice is turned, so that no structure is aligned with the axes of tiles.
    axes, depth = (
        np.linalg.qr(rng.normal(size=(3, 3)))[0] * spec.spacing_um * 2 / period_um,
        at.z[:, None, None] - at.above,
    )
    points = [
        a * depth + (b * at.y + c * at.x + first) for (a, b, c), first in zip(axes, rng.uniform(0, 32, 3), strict=True)
    ]
    nodes = [xp.floor(line) for line in points]
    within = [line - node for line, node in zip(points, nodes, strict=True)]
    smooth = [node + part * part * (3 - 2 * part) for node, part in zip(nodes, within, strict=True)]
    coordinates = xp.stack(xp.broadcast_arrays(*smooth))
    return map_coordinates(xp.asarray(lattice(seed)), coordinates, order=1, mode="grid-wrap")


def _sum_of_waves(spec: BrainSpec, stream: int, number: int, periods_um: tuple[float, float], at: _Points) -> Array:
    return sum_of_waves((spec.seed, stream), number, periods_um, spec.spacing_um, (at.z, at.above, at.y, at.x))


def _smooth_step(field: Array, slope: float) -> Array:
    """Return 1 where a field is well above 0, and 0 where it is well below, with a smooth step between."""
    xp = array_module(field)
    return 1 / (1 + xp.exp(xp.minimum(-np.float32(slope) * field, np.float32(80))))
