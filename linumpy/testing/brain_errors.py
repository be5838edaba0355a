"""How far the results of a pipeline are from the truth of a synthetic brain, stage by stage.

In: the brain's spec, and the folder of the results, in which each stage of :mod:`linumpy.pipeline` has one. Out: one or
two :class:`StageError` for each stage whose results are there and whose truth is known. Lengths are in µm, whatever the
spacing of the results.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from linumpy.io.ome import open_image
from linumpy.mosaic.alignment.transforms import read_transforms
from linumpy.testing import brain
from linumpy.testing.brain_spec import BrainSpec

_Floats = NDArray[np.floating]
#: Voxels of a volume that are compared at most.
_VOXELS = 2**23


@dataclass(frozen=True)
class StageError:
    """The error of a stage.

    Attributes
    ----------
    stage : str
        Its name.
    what : str
        What was compared, and how.
    value : float
        The error.
    unit : str
        Its unit; empty for a ratio.
    """

    stage: str
    what: str
    value: float
    unit: str = ""


def errors_of(spec: BrainSpec, results: str | Path) -> tuple[StageError, ...]:
    """Compare the results in a folder with the truth."""
    found: list[StageError] = []
    for stage, compare in _COMPARED.items():
        if (Path(results) / stage).is_dir():
            found += [StageError(stage, *one) for one in compare(spec, Path(results) / stage)]
    return tuple(found)


_Found = list[tuple[str, float, str]]


def _number(path: Path) -> int:
    """Return the number of a slice that :func:`linumpy.testing.brain_files.write_brain` wrote, or of its results."""
    return int(path.name.partition(".")[0].rpartition("z")[2])


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.ome.zarr") if not path.name.startswith("."))


def _voxels(path: Path) -> np.ndarray:
    return np.asarray(open_image(path).levels[0][...])


def _sampled(path: Path) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return a volume, and the coordinates of its voxels in µm along each axis; of a large one every n-th A-line."""
    image = open_image(path)
    array, spacing, origin = image.levels[0], image.spacing[0], image.origin[0]
    step = max(1, math.ceil(math.sqrt(math.prod(array.shape) / _VOXELS)))
    voxels = np.asarray(array[:, ::step, ::step])
    lines = [
        o + s * k * np.arange(n) for o, s, k, n in zip(origin, spacing, (1, step, step), voxels.shape, strict=True)
    ]
    return voxels, lines


def _tiles(spec: BrainSpec, grid: np.ndarray) -> np.ndarray:
    """Cut a mosaic grid (..., Y, X) into its tiles: (rows, columns, ..., y, x)."""
    rows = np.split(grid, spec.tiles[0], axis=-2)
    return np.stack([np.stack(np.split(row, spec.tiles[1], axis=-1)) for row in rows])


def _zoomed(field: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sample a smooth field (Y, X) of a tile on the grid of the same tile at another spacing."""
    from scipy.ndimage import zoom

    factors = [n / m for n, m in zip(shape, field.shape, strict=True)]
    return np.asarray(zoom(field, factors, order=1, grid_mode=True, mode="nearest"))


def _galvo(spec: BrainSpec, folder: Path) -> _Found:
    """Largest error of the columns by which tiles are rotated."""
    width, worst = spec.tile_shape[2], 0
    for path in folder.glob("*.json"):
        apart = (json.loads(path.read_text())["columns"] - brain.truth_galvo(spec, _number(path))) % width
        worst = max(worst, min(apart, width - apart))
    return [("shift of the galvo, worst slice", float(worst), "columns")]


def _focal(spec: BrainSpec, folder: Path) -> _Found:
    """Largest error of the fitted curvature over a tile."""
    worst, truth = 0.0, spec.faults.focal_um / 2
    for path in folder.glob("*.json"):
        fit = json.loads(path.read_text())["um"]
        worst = max(worst, abs(fit["vv"] - truth) + abs(fit["uu"] - truth) + abs(fit["vu"]))
    return [("curvature at a tile's corner, worst slice", worst, "µm")]


def _illumination(spec: BrainSpec, folder: Path) -> _Found:
    """Error of the flat field by which tiles were divided, which follows from them before and after."""
    errors = []
    for path in _images(folder):
        before, after = (
            _tiles(spec, _voxels(one / path.name)).astype(np.float64) for one in (folder.with_name("focal"), folder)
        )
        axes = (0, 1, 2)
        # Of each pixel: before = flat * after + dark, over all tiles and planes.
        middle = [part - part.mean(axis=axes) for part in (before, after)]
        flat = (middle[0] * middle[1]).sum(axis=axes) / (middle[1] ** 2).sum(axis=axes)
        truth = _zoomed(brain.truth_flat_field(spec).mean(axis=0), flat.shape)
        errors.append(flat / flat.mean() / (truth / truth.mean()) - 1)
    return [("RMS error of the flat field", 100 * float(np.sqrt(np.mean(np.square(errors)))), "%")]


def _surface(spec: BrainSpec, folder: Path) -> _Found:
    """Median error of the surface after focal correction, and its scatter about that."""
    flat = replace(spec, faults=replace(spec.faults, focal_um=0.0))
    apart = []
    for path in _images(folder):
        depths = _tiles(spec, _voxels(path))
        for row, column in np.ndindex(spec.tiles):
            truth = brain.truth_surface(flat, _number(path), row, column) * spec.spacing_um[0]
            apart.append(depths[row, column] - _zoomed(truth, depths.shape[2:]))
    errors = np.concatenate([part[np.isfinite(part)] for part in apart])
    middle = float(np.median(errors))
    return [
        ("median error of the depth", middle, "µm"),
        ("median deviation from that", float(np.median(np.abs(errors - middle))), "µm"),
    ]


def _positions(spec: BrainSpec, folder: Path) -> _Found:
    """Errors of the positions of tiles that were recorded, less their mean: where a slice begins is free."""
    errors: list[np.ndarray] = []
    for path in folder.glob("*.json"):
        found = json.loads(path.read_text())
        truth = brain.truth_positions(spec, _number(path)) * spec.spacing_um[1:]
        apart = [
            np.array([tile["y"], tile["x"]]) * found["spacing_um"] - truth[tile["row"], tile["column"]]
            for tile in found["tiles"]
            if tile["present"]
        ]
        errors += list(apart - np.mean(apart, axis=0))
    distances = np.linalg.norm(errors, axis=1)
    return [
        ("RMS error of a tile's position", float(np.sqrt(np.mean(distances**2))), "µm"),
        ("largest", float(distances.max()), "µm"),
    ]


def _first_tile(spec: BrainSpec, number: int) -> np.ndarray:
    """Return the matrix from a stitched slice, whose origin is its first tile, to the brain: (y, x, 1) in µm."""
    scale = np.diag([*spec.spacing_um[1:], 1.0])
    moved = np.eye(3)
    moved[:2, 2] = brain.truth_positions(spec, number)[0, 0]
    return np.asarray(scale @ brain.truth_transform(spec, number) @ moved @ np.linalg.inv(scale))


def _truth_at(spec: BrainSpec, z_um: _Floats, above_um: _Floats, y_um: _Floats, x_um: _Floats) -> np.ndarray:
    """Return the known volume at coordinates in µm, as :func:`linumpy.testing.brain.reflectivity_at`."""
    z, y, x = spec.spacing_um
    return np.asarray(brain.reflectivity_at(spec, z_um / z, above_um / z, y_um / y, x_um / x))


def _stitched(spec: BrainSpec, path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a stitched slice, the known volume at its voxels, and their depth below the surface in µm."""
    voxels, (z, y, x) = _sampled(path)
    number = _number(path)
    at = np.stack([*np.meshgrid(y, x, indexing="ij"), np.ones((len(y), len(x)))])
    there = np.tensordot(_first_tile(spec, number), at, 1)
    middle = [(n - 1) / 2 * s for n, s in zip(spec.slice_shape[1:], spec.spacing_um[1:], strict=True)]
    begin = brain.truth_positions(spec, number)[0, 0] * spec.spacing_um[1:]
    above = spec.faults.water_um + sum(
        slope * (at[k] + begin[k] - middle[k]) for k, slope in enumerate(spec.faults.tilt)
    )
    truth = _truth_at(spec, z + number * spec.interval_um, above, there[0], there[1])
    return voxels, truth, z[:, None, None] - above


def _alike(voxels: np.ndarray, truth: np.ndarray, valid: np.ndarray) -> float:
    """Return the correlation of the logarithms."""
    return float(np.corrcoef(np.log(voxels[valid]), np.log(truth[valid]))[0, 1])


def _tissue(spec: BrainSpec, voxels: np.ndarray, truth: np.ndarray) -> np.ndarray:
    return np.asarray((voxels > 0) & np.isfinite(voxels) & (truth > 0.1 * spec.peak))


def _stitching(spec: BrainSpec, folder: Path) -> _Found:
    """Correlation with the known volume in the 100 µm below the first 20 µm of each slice, of the worst one."""
    worst = 1.0
    for path in _images(folder):
        voxels, truth, depth = _stitched(spec, path)
        worst = min(worst, _alike(voxels, truth, _tissue(spec, voxels, truth) & (depth > 20) & (depth < 120)))
    return [("correlation with the volume, worst slice", worst, "")]


def _attenuation(spec: BrainSpec, folder: Path) -> _Found:
    """Attenuation that is left: how fast the ratio to the known volume falls along depth."""
    worst = 0.0
    for path in _images(folder):
        voxels, truth, depth = _stitched(spec, path)
        deepest = float(depth.max())
        valid = _tissue(spec, voxels, truth) & (depth > 20) & (depth < 0.8 * deepest)
        slope = np.polyfit(depth[valid] / 1e3, np.log(voxels[valid] / truth[valid]), 1)[0]
        worst = max(worst, abs(float(slope)) / 2)
    return [(f"attenuation left, of {spec.faults.attenuation_per_mm:g}, worst slice", worst, "1/mm")]


def _register(spec: BrainSpec, folder: Path) -> _Found:
    """Errors of the transforms between slices and the first one, at the corners of the slices."""
    found = read_transforms(folder / "transforms.json").slices
    gauge = np.array(found[0].matrix)[1:, 1:] @ np.linalg.inv(_first_tile(spec, found[0].number))
    ends = [(0.0, (n - 1) * s) for n, s in zip(spec.slice_shape[1:], spec.spacing_um[1:], strict=True)]
    corners = np.array([[y, x, 1.0] for y in ends[0] for x in ends[1]]).T
    apart, angles = [], []
    for one in found[1:]:
        matrix, truth = np.array(one.matrix)[1:, 1:], gauge @ _first_tile(spec, one.number)
        apart.append(np.linalg.norm(((matrix - truth) @ corners)[:2], axis=0))
        turn = matrix[:2, :2] @ np.linalg.inv(truth[:2, :2])
        angles.append(abs(np.degrees(np.arctan2(turn[1, 0], turn[0, 0]))))
    return [
        ("RMS error at the corners of a slice", float(np.sqrt(np.mean(np.square(apart)))), "µm"),
        ("largest error of a rotation", float(max(angles)), "°"),
    ]


def _stack(spec: BrainSpec, folder: Path) -> _Found:
    """Correlation with the known volume, placed by the first slice alone."""
    first = read_transforms(folder.with_name("register") / "transforms.json").slices[0]
    voxels, (z, y, x) = _sampled(folder / "stack.ome.zarr")
    to_brain = _first_tile(spec, first.number) @ np.linalg.inv(np.array(first.matrix)[1:, 1:])
    at = np.stack([*np.meshgrid(y, x, indexing="ij"), np.ones((len(y), len(x)))])
    there = np.tensordot(to_brain, at, 1)
    below = z - first.top_um + first.number * spec.interval_um
    truth = _truth_at(spec, below, np.zeros_like(there[0]), there[0], there[1])
    return [("correlation with the volume", _alike(voxels, truth, _tissue(spec, voxels, truth)), "")]


#: By stage.
_COMPARED: dict[str, Callable[[BrainSpec, Path], _Found]] = {
    "galvo": _galvo,
    "focal": _focal,
    "illumination": _illumination,
    "surface": _surface,
    "positions": _positions,
    "stitch": _stitching,
    "attenuation": _attenuation,
    "register": _register,
    "stack": _stack,
}
