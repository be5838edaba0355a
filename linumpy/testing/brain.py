"""A synthetic brain: slices of tiles cut from one known volume, with the faults of a microscope.

In: a :class:`BrainSpec`. Out: the known volume, tiles as a microscope records them, and the true value of each fault. A
tile depends only on the spec and the numbers of slice, row and column; without faults it is a box of the volume.

There are three frames, all in voxels (Z, Y, X) of the spec's spacing. A *tile* is counted from its first voxel, a
*slice* from the nominal first voxel of tile (0, 0), and the *brain* has the frame of slice 0. :func:`truth_positions`
takes a tile to its slice, and :func:`truth_points` a slice to the brain: :func:`truth_transform`, and a deformation.
Plane z of slice k, counted from the surface of the slice, is plane ``k * interval_planes + z`` of the brain.

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

from linumpy.arrays import Array, DeviceName
from linumpy.device import array_module, array_module_of
from linumpy.errors import RegionError
from linumpy.testing.anatomy import reflectivity_at, tissue_share
from linumpy.testing.brain_spec import USUAL_FAULTS, BrainSpec, Faults, draw_brain
from linumpy.testing.texture import speckle, stored

__all__ = [
    "USUAL_FAULTS", "BrainSpec", "Faults", "draw_brain", "mosaic", "reference", "reflectivity_at", "tile",
    "truth_attenuation", "truth_axial", "truth_dark_field", "truth_deformation", "truth_flat_field", "truth_galvo",
    "truth_points", "truth_positions", "truth_shift", "truth_surface", "truth_tissue", "truth_transform",
]  # fmt: skip


def reference(spec: BrainSpec, start: tuple[int, int, int], stop: tuple[int, int, int]) -> np.ndarray:
    """Make a box of the known volume: reflectivity, without faults.

    - `start`, `stop` (int, int, int): bounds (Z, Y, X) in voxels; they may lie outside of the brain's shape.

    Returns: In the dtype of the spec.
    """
    y, x = np.meshgrid(
        *(np.arange(a, b, dtype=np.float64) for a, b in zip(start[1:], stop[1:], strict=True)), indexing="ij"
    )
    z = np.arange(start[0], stop[0], dtype=np.float64)
    return stored(reflectivity_at(spec, z, np.zeros_like(y), y, x), spec.dtype)


def tile(spec: BrainSpec, number: int, row: int, column: int, *, device: DeviceName = "cpu") -> Array:
    """Make a tile as a microscope records it.

    - `number`, `row`, `column`: slice, and row and column of the tile in its grid.
    - `device`: ``"cuda"`` makes the tile on the GPU, whose random generator makes other speckle than the host's.

    Returns: In the dtype of the spec.
    """
    _check(spec, number, row, column)
    faults, xp = spec.faults, array_module_of(device)
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
        out *= truth_flat_field(spec, device=device)
    if faults.dark:
        out += xp.asarray(truth_dark_field(spec))
    if faults.galvo:
        out = xp.roll(out, truth_galvo(spec, number), axis=2)
    return stored(out, spec.dtype)


def mosaic(spec: BrainSpec, number: int) -> np.ndarray:
    """Make a slice as a mosaic grid: its tiles side by side, so that tissue of overlaps appears twice.

    Returns: In the dtype of the spec.
    """
    rows, columns = spec.tiles
    return np.concatenate(
        [np.concatenate([tile(spec, number, row, column) for column in range(columns)], axis=2) for row in range(rows)],
        axis=1,
    )


def truth_flat_field(spec: BrainSpec, *, device: DeviceName = "cpu") -> Any:
    """Return the factor of illumination at each voxel of a tile: float32, (Z, Y, X), of mean 1 in each plane."""
    xp, (depth, height, width) = array_module_of(device), spec.tile_shape
    middle = [
        np.linspace(first, first + move, depth, dtype=np.float32)[:, None, None]
        for first, move in zip(spec.faults.vignette_centre, spec.faults.vignette_drift, strict=True)
    ]
    v, u = _from_centre(height)[:, None], _from_centre(width)[None, :]
    # The exponent is a sum of squares, so the field of each plane is the product of a column and a row.
    column, row = (
        np.exp(np.float32(-spec.faults.vignette / 2) * square)
        for square in ((v - middle[0]) ** 2, (u - middle[1]) ** 2)
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
        np.meshgrid(np.arange(rows) * spec.true_step[0], np.arange(columns) * spec.true_step[1], indexing="ij"), -1
    )
    turned = regular @ _rotation(spec.faults.stage_degrees).T
    return turned + _uniform(spec, 3, number, (rows, columns, 2)) * spec.faults.jitter


def truth_transform(spec: BrainSpec, number: int) -> np.ndarray:
    """Return the matrix from a slice to the brain: float64, (3, 3), homogeneous, for (y, x, 1) in voxels.

    The deformation of the slice, which is added, is :func:`truth_deformation`.
    """
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


def truth_deformation(spec: BrainSpec, number: int, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the displacement (Y, X) in the brain that deformation adds at points of a slice: float64, (2, ...)."""
    points = np.broadcast_arrays(y, x)
    if number == 0 or not spec.faults.warp:
        return np.zeros((2, *points[0].shape))
    waves, size = _uniform(spec, 8, number, (2, 3, 3)), spec.slice_shape[1:]
    # Each wave has at most one and a half periods over the slice, so that the deformation is smooth.
    return np.stack(
        [
            spec.faults.warp
            * np.mean(
                [
                    np.sin(2 * np.pi * (1.5 * (a * points[0] / size[0] + b * points[1] / size[1]) + phase))
                    for a, b, phase in part
                ],
                axis=0,
            )
            for part in waves
        ]
    )


def truth_points(spec: BrainSpec, number: int, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return where points of a slice are in the brain: float64, (2, ...), Y and X in voxels."""
    matrix, points = truth_transform(spec, number), np.stack(np.broadcast_arrays(y, x))
    move = matrix[:2, 2].reshape(2, *(1 for _ in points.shape[1:]))
    return np.tensordot(matrix[:2, :2], points, 1) + move + truth_deformation(spec, number, y, x)


def truth_tissue(spec: BrainSpec, number: int, row: int, column: int) -> np.ndarray:
    """Return which voxels of a tile are tissue, before the galvo shift: bool, (Z, Y, X).

    Others are water above the surface, or the surroundings of the brain.
    """
    _check(spec, number, row, column)
    planes, surface, y, x = _coordinates(spec, number, row, column, np)
    share = tissue_share(spec, number * spec.interval_planes + planes, surface, y, x)
    return np.asarray((share > 0.5) & (planes[:, None, None] >= surface))


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
    looks, agarose_looks = spec.faults.looks, spec.faults.agarose_looks
    if xp is np:
        out = speckle((spec.seed, 2, *tile_index), looks, (0, 0, 0), spec.tile_shape)
    else:
        seed = np.random.SeedSequence([spec.seed, 2, *tile_index]).generate_state(1)[0]
        out = xp.random.default_rng(int(seed)).standard_gamma(looks, spec.tile_shape, dtype=np.float32)
        out /= np.float32(looks)
    if agarose_looks:
        planes, surface, y, x = _coordinates(spec, *tile_index, xp)
        share = tissue_share(spec, tile_index[0] * spec.interval_planes + planes, surface, y, x)
        out = 1 + (out - 1) * xp.sqrt(share + (1 - share) * np.float32(looks / agarose_looks))
    return out


def _tissue(spec: BrainSpec, number: int, row: int, column: int, xp: ModuleType = np) -> Array:
    """Return the reflectivity at each voxel of a tile before the galvo shift, with water above the surface: float32."""
    planes, surface, y, x = _coordinates(spec, number, row, column, xp)
    out = reflectivity_at(spec, number * spec.interval_planes + planes, surface, y, x)
    out[planes[:, None, None] < surface] = spec.water * spec.peak
    return out


def _coordinates(
    spec: BrainSpec, number: int, row: int, column: int, xp: ModuleType
) -> tuple[Array, Array, Array, Array]:
    """Return the planes of a tile, and for each of its A-lines the surface, Y and X in the brain."""
    y, x = xp.asarray(truth_points(spec, number, *_slice_coordinates(spec, number, row, column)))
    surface = xp.asarray(truth_surface(spec, number, row, column))
    return xp.arange(spec.tile_shape[0], dtype=np.float64), surface, y, x


def _slice_coordinates(spec: BrainSpec, number: int, row: int, column: int) -> tuple[np.ndarray, np.ndarray]:
    """Return Y, as a column, and X, as a row, of a tile in its slice."""
    first = truth_positions(spec, number)[row, column]
    height, width = spec.tile_shape[1:]
    return (first[0] + np.arange(height))[:, None], (first[1] + np.arange(width))[None, :]


def _transmission(spec: BrainSpec, reflectivity: Array) -> Array:
    """Return the share of light that is not attenuated, there and back: the mean over the depth of each voxel."""
    xp = array_module(reflectivity)
    scale = spec.faults.attenuation_per_mm / spec.peak * spec.spacing_um[0] / 1e3
    within = np.float32(2 * scale) * reflectivity  # there and back
    left = xp.exp(within - xp.cumsum(within, axis=0))
    # (1 - exp(-x)) / x, which is 1 at 0.
    return left * xp.where(within > 0, -xp.expm1(-within) / xp.maximum(within, np.float32(1e-30)), 1)


def _uniform(spec: BrainSpec, stream: int, number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return numbers from -1 to 1 for a slice."""
    return np.random.default_rng([spec.seed, stream, number]).uniform(-1, 1, shape)


def _rotation(degrees: float) -> np.ndarray:
    angle = math.radians(degrees)
    return np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


def _from_centre(size: int) -> np.ndarray:
    """Return coordinates from -1 at the first voxel to 1 at the last."""
    return np.linspace(-1, 1, size, dtype=np.float32) if size > 1 else np.zeros(1, np.float32)
