"""A synthetic brain: slices of tiles cut from one known volume, with the faults of a microscope.

In: a :class:`BrainSpec`. Out: the known volume, tiles as a microscope records them, and the true value of each fault. A
tile depends only on the spec and the numbers of slice, row and column; without faults it is a box of the volume.

There are three frames, all in voxels (Z, Y, X) of the spec's spacing. A *tile* is counted from its first voxel, a
*slice* from the nominal first voxel of tile (0, 0), and the *brain* has the frame of slice 0. :func:`truth_positions`
takes a tile to its slice, and :func:`truth_transform` a slice to the brain. Plane z of slice k, counted from the
surface of the slice, is plane ``k * interval_planes + z`` of the brain.

An intensity is ``flat(z, y, x) * axial(z) * exp(-2 ∫ µ dz) * R * speckle + dark(y, x)``, with the reflectivity R of the
volume, µ = ``attenuation_per_mm * R / peak``, and the integral from the tile's first plane to the voxel. The
exponential is averaged over the depth of a voxel, as Vermeer et al. (2014) discretise it. Galvo shifts move the columns
of the result.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, require_cuda
from linumpy.errors import RegionError
from linumpy.testing.brain_spec import USUAL_FAULTS, BrainSpec, Faults
from linumpy.testing.texture import plane_waves, speckle

__all__ = [
    "USUAL_FAULTS", "BrainSpec", "Faults", "mosaic", "reference", "reflectivity_at", "tile", "truth_attenuation",
    "truth_axial", "truth_dark_field", "truth_flat_field", "truth_galvo", "truth_positions", "truth_shift",
    "truth_surface", "truth_transform",
]  # fmt: skip

#: Plane waves of the structure and of the border between tissues, and standard deviation of the structure's logarithm.
_WAVES, _BORDER_WAVES, _STRUCTURE = 16, 4, 0.5
#: Steepness of the outline of the brain and of the borders between tissues, in units of their fields.
_OUTLINE_SLOPE, _BORDER_SLOPE = 20.0, 4.0


def reference(spec: BrainSpec, start: tuple[int, int, int], stop: tuple[int, int, int]) -> np.ndarray:
    """Make a box of the known volume: reflectivity, without faults.

    Parameters
    ----------
    spec : BrainSpec
        The brain.
    start, stop : (int, int, int)
        Bounds (Z, Y, X) in voxels; they may lie outside of the brain's shape.

    Returns
    -------
    numpy.ndarray, (Z, Y, X)
        In the dtype of the spec.
    """
    y, x = np.meshgrid(
        *(np.arange(a, b, dtype=np.float64) for a, b in zip(start[1:], stop[1:], strict=True)), indexing="ij"
    )
    return _stored(spec, reflectivity_at(spec, np.arange(start[0], stop[0], dtype=np.float64), np.zeros_like(y), y, x))


def tile(spec: BrainSpec, number: int, row: int, column: int, *, use_gpu: bool = False) -> Array:
    """Make a tile as a microscope records it.

    Parameters
    ----------
    spec : BrainSpec
        The brain.
    number, row, column : int
        Slice, and row and column of the tile in its grid.
    use_gpu : bool
        Whether to make the tile on the device, whose random generator makes other speckle than the host's.

    Returns
    -------
    numpy.ndarray or cupy.ndarray, (Z, Y, X)
        In the dtype of the spec.

    Raises
    ------
    RegionError
        There is no such tile.
    GpuUnavailableError
        `use_gpu` and there is no CUDA device.
    """
    _check(spec, number, row, column)
    faults, xp = spec.faults, require_cuda() if use_gpu else np
    if number in faults.empty or (number, row, column) in faults.missing:
        return xp.zeros(spec.tile_shape, spec.dtype)
    out = _tissue(spec, number, row, column, xp)
    if faults.attenuation_per_mm:
        out *= _transmission(spec, out)
    if faults.rayleigh_um or faults.falloff_per_mm:
        out *= xp.asarray(truth_axial(spec))[:, None, None]
    if faults.looks:
        out *= _speckle(spec, (number, row, column), xp)
    if faults.vignette:
        out *= truth_flat_field(spec, use_gpu=use_gpu)
    if faults.dark:
        out += xp.asarray(truth_dark_field(spec))
    if faults.galvo:
        out = xp.roll(out, truth_galvo(spec, number), axis=2)
    return _stored(spec, out)


def mosaic(spec: BrainSpec, number: int) -> np.ndarray:
    """Make a slice as a mosaic grid: its tiles side by side, so that tissue of overlaps appears twice.

    Returns
    -------
    numpy.ndarray, (Z, rows * Y, columns * X)
        In the dtype of the spec.
    """
    rows, columns = spec.tiles
    return np.concatenate(
        [np.concatenate([tile(spec, number, row, column) for column in range(columns)], axis=2) for row in range(rows)],
        axis=1,
    )


def truth_flat_field(spec: BrainSpec, *, use_gpu: bool = False) -> Any:
    """Return the factor of illumination at each voxel of a tile: float32, (Z, Y, X), of mean 1 in each plane."""
    xp, (depth, height, width) = require_cuda() if use_gpu else np, spec.tile_shape
    middle = np.linspace(0.1, 0.25, depth, dtype=np.float32)[:, None, None]
    v, u = _from_centre(height)[:, None], _from_centre(width)[None, :]
    # The exponent is a sum of squares, so the field of each plane is the product of a column and a row.
    column, row = (
        np.exp(np.float32(-spec.faults.vignette / 2) * square) for square in ((v - middle) ** 2, (u + middle) ** 2)
    )
    column, row = (xp.asarray(part / part.mean(axis=(1, 2), keepdims=True)) for part in (column, row))
    return column * row


def truth_dark_field(spec: BrainSpec) -> np.ndarray:
    """Return the dark field of a tile: float32, (Y, X), added to the intensities."""
    height, width = spec.tile_shape[1:]
    v, u = _from_centre(height)[:, None], _from_centre(width)[None, :]
    return np.float32(spec.faults.dark * spec.peak) * (1 + np.float32(0.25) * (u - v * u))


def truth_axial(spec: BrainSpec) -> np.ndarray:
    """Return the factor of the confocal gate and of the fall-off at each plane of a tile: float32, (Z,)."""
    faults, z_um = spec.faults, np.arange(spec.tile_shape[0]) * spec.spacing_um[0]
    gate = 1 / (1 + ((z_um - faults.focus_um) / faults.rayleigh_um) ** 2) if faults.rayleigh_um else 1.0
    return (gate * np.exp(-((faults.falloff_per_mm * z_um / 1e3) ** 2))).astype(np.float32)


def truth_positions(spec: BrainSpec, number: int) -> np.ndarray:
    """Return the first voxel (Y, X) of each tile in its slice: float64, (rows, columns, 2)."""
    rows, columns = spec.tiles
    regular = np.stack(
        np.meshgrid(np.arange(rows) * spec.step[0], np.arange(columns) * spec.step[1], indexing="ij"), -1
    )
    turned = regular @ _rotation(spec.faults.stage_degrees).T
    return turned + _uniform(spec, 3, number, (rows, columns, 2)) * spec.faults.jitter


def truth_transform(spec: BrainSpec, number: int) -> np.ndarray:
    """Return the matrix from a slice to the brain: float64, (3, 3), homogeneous, for (y, x, 1) in voxels."""
    matrix = np.eye(3)
    if number == 0:
        return matrix
    angle, *move = _uniform(spec, 4, number, (3,)) * np.array(
        [spec.faults.rotation_degrees, spec.faults.translation, spec.faults.translation]
    )
    middle = (np.array(spec.slice_shape[1:]) - 1) / 2
    matrix[:2, :2] = _rotation(angle)
    matrix[:2, 2] = middle - matrix[:2, :2] @ middle + move
    return matrix


def truth_surface(spec: BrainSpec, number: int, row: int, column: int) -> np.ndarray:
    """Return the depth of the cut surface in a tile: float64, (Y, X), in voxels along Z, before the galvo shift.

    A voxel whose index is at least this depth is tissue.
    """
    faults, (height, width) = spec.faults, spec.tile_shape[1:]
    v, u = (np.linspace(-1, 1, n) if n > 1 else np.zeros(1) for n in (height, width))
    depth = faults.water_um + faults.focal_um * (v[:, None] ** 2 + u[None, :] ** 2) / 2
    middle = (np.array(spec.slice_shape[1:]) - 1) / 2
    y, x = (p - m for p, m in zip(_slice_coordinates(spec, number, row, column), middle, strict=True))
    return (
        depth + faults.tilt[0] * y * spec.spacing_um[1] + faults.tilt[1] * x * spec.spacing_um[2]
    ) / spec.spacing_um[0]


def truth_attenuation(spec: BrainSpec, number: int, row: int, column: int) -> np.ndarray:
    """Return the attenuation coefficient in 1/mm at each voxel, before the galvo shift: float32, (Z, Y, X)."""
    _check(spec, number, row, column)
    return _tissue(spec, number, row, column) * np.float32(spec.faults.attenuation_per_mm / spec.peak)


def truth_galvo(spec: BrainSpec, number: int) -> int:
    """Return the number of columns by which tiles are rotated: voxel x of a tile is at ``(x + shift) % columns``."""
    return round(float(_uniform(spec, 5, number, (1,))[0]) * spec.faults.galvo)


def truth_shift(spec: BrainSpec, number: int) -> tuple[float, float]:
    """Return the motor's shift of a slice to the slice above, along Y and X in voxels."""
    middle = np.array([*((n - 1) / 2 for n in spec.slice_shape[1:]), 1.0])
    below, above = (truth_transform(spec, k) @ middle for k in (number, number - 1))
    y, x = (below - above)[:2] + _uniform(spec, 6, number, (2,)) * spec.faults.motor_error
    return float(y), float(x)


def _check(spec: BrainSpec, number: int, row: int, column: int) -> None:
    grid = (spec.slices, *spec.tiles)
    if not all(0 <= k < n for k, n in zip((number, row, column), grid, strict=True)):
        raise RegionError(f"there is no tile ({row}, {column}) of slice {number} among {grid} (slices, rows, columns)")


def _speckle(spec: BrainSpec, tile_index: tuple[int, int, int], xp: ModuleType) -> Array:
    """Return the speckle of a tile, given by slice, row and column: of mean 1."""
    looks = spec.faults.looks
    if xp is np:
        return speckle((spec.seed, 2, *tile_index), looks, (0, 0, 0), spec.tile_shape)
    seed = np.random.SeedSequence([spec.seed, 2, *tile_index]).generate_state(1)[0]
    return xp.random.default_rng(int(seed)).standard_gamma(looks, spec.tile_shape, dtype=np.float32) / np.float32(looks)


def _tissue(spec: BrainSpec, number: int, row: int, column: int, xp: ModuleType = np) -> Array:
    """Return the reflectivity at each voxel of a tile before the galvo shift, with water above the surface: float32."""
    position = np.stack([*np.broadcast_arrays(*_slice_coordinates(spec, number, row, column))])
    matrix = truth_transform(spec, number)
    y, x = xp.asarray(np.tensordot(matrix[:2, :2], position, 1) + matrix[:2, 2, None, None])
    surface = xp.asarray(truth_surface(spec, number, row, column))
    planes = xp.arange(spec.tile_shape[0], dtype=np.float64)
    out = reflectivity_at(spec, number * spec.interval_planes + planes, surface, y, x)
    out[planes[:, None, None] < surface] = spec.water * spec.peak
    return out


def _slice_coordinates(spec: BrainSpec, number: int, row: int, column: int) -> tuple[np.ndarray, np.ndarray]:
    """Return Y, as a column, and X, as a row, of a tile in its slice."""
    first = truth_positions(spec, number)[row, column]
    height, width = spec.tile_shape[1:]
    return (first[0] + np.arange(height))[:, None], (first[1] + np.arange(width))[None, :]


def reflectivity_at(spec: BrainSpec, z: Array, above: Array, y: Array, x: Array) -> Array:
    """Sample the known volume at ``(z[k] - above[i, j], y[i, j], x[i, j])`` in voxels of the brain.

    Parameters
    ----------
    spec : BrainSpec
        The brain.
    z : array of float64, (Z,)
        Planes.
    above, y, x : array of float64, (Y, X)
        Depth of the surface in each A-line, which is subtracted from `z`, and the lateral coordinates of the A-line.

    Returns
    -------
    array of float32, (Z, Y, X)
        In the memory of `y`.
    """
    xp = array_module(y)
    if spec.volume is not None:
        from linumpy.gpu.ndimage.transform import map_coordinates

        coordinates = xp.stack(xp.broadcast_arrays(z[:, None, None] - above, y, x))
        return map_coordinates(xp.asarray(spec.volume.astype(np.float32)), coordinates, order=1, mode="constant")
    structure = xp.exp(
        np.float32(_STRUCTURE * (2 / _WAVES) ** 0.5) * _sum_of_waves(spec, 1, _WAVES, spec.texture_um, z, above, y, x)
        - np.float32(_STRUCTURE**2 / 2)
    )
    longest = spec.texture_um[1]
    border = _sum_of_waves(spec, 7, _BORDER_WAVES, (longest, 3 * longest), z, above, y, x)
    structure *= 1 + np.float32(spec.white - 1) * _smooth_step(border - 1, _BORDER_SLOPE)
    half = [n / 2 for n in spec.slice_shape[1:]]
    outline = ((y / half[0] - 1) ** 4 + (x / half[1] - 1) ** 4) ** 0.25
    inside = _smooth_step((spec.radius - outline).astype(np.float32), _OUTLINE_SLOPE) if np.isfinite(spec.radius) else 1
    return np.float32(spec.peak) * (structure * inside + np.float32(spec.water) * (1 - inside))


def _sum_of_waves(
    spec: BrainSpec,
    stream: int,
    number: int,
    periods_um: tuple[float, float],
    z: Array,
    above: Array,
    y: Array,
    x: Array,
) -> Array:
    """Sum plane waves at the coordinates of :func:`reflectivity_at`, each a product of a line along Z and a plane."""
    xp = array_module(y)
    total = xp.zeros((len(z), *y.shape), np.float32)
    product = xp.empty_like(total)
    for wave in plane_waves((spec.seed, stream), number, *periods_um):
        turns = [2 * np.pi * step / period for step, period in zip(spec.spacing_um, wave.periods_um, strict=True)]
        line, plane = turns[0] * z[:, None, None], turns[1] * y + turns[2] * x + wave.phase - turns[0] * above
        total += xp.multiply(xp.cos(line).astype(np.float32), xp.cos(plane).astype(np.float32), out=product)
        total -= xp.multiply(xp.sin(line).astype(np.float32), xp.sin(plane).astype(np.float32), out=product)
    return total


def _smooth_step(field: Array, slope: float) -> Array:
    """Return 1 where a field is well above 0, and 0 where it is well below, with a smooth step between."""
    return 1 / (1 + array_module(field).exp(-np.float32(slope) * field))


def _transmission(spec: BrainSpec, reflectivity: Array) -> Array:
    """Return the share of light that is not attenuated, there and back: the mean over the depth of each voxel."""
    xp = array_module(reflectivity)
    scale = spec.faults.attenuation_per_mm / spec.peak * spec.spacing_um[0] / 1e3
    within = np.float32(2 * scale) * reflectivity  # there and back
    left = xp.exp(within - xp.cumsum(within, axis=0))
    # (1 - exp(-x)) / x, which is 1 at 0.
    return left * xp.where(within > 0, -xp.expm1(-within) / xp.maximum(within, np.float32(1e-30)), 1)


def _stored(spec: BrainSpec, voxels: Array) -> Any:
    """Return voxels in the dtype of the spec."""
    if spec.dtype == "uint16":
        xp = array_module(voxels)
        return xp.clip(xp.rint(voxels), 0, 65535).astype(np.uint16)
    return voxels.astype(spec.dtype, copy=False)


def _uniform(spec: BrainSpec, stream: int, number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return numbers from -1 to 1 for a slice."""
    return np.random.default_rng([spec.seed, stream, number]).uniform(-1, 1, shape)


def _rotation(degrees: float) -> np.ndarray:
    angle = math.radians(degrees)
    return np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


def _from_centre(size: int) -> np.ndarray:
    """Return coordinates from -1 at the first voxel to 1 at the last."""
    return np.linspace(-1, 1, size, dtype=np.float32) if size > 1 else np.zeros(1, np.float32)
