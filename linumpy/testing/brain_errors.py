"""Errors of the results of a pipeline against the truth of a synthetic brain, stage by stage.

In: the brain's spec, and the folder of the results, in which each stage of :mod:`linumpy.pipeline` has a folder. Out:
one or two :class:`StageError` for each stage that has results and a known truth. Lengths are in µm, whatever the voxel
spacing of a result.
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
#: Maximum voxels of a volume that are compared.
_VOXELS = 2**20


@dataclass(frozen=True)
class StageError:
    """The error of a stage.

    Attributes
    ----------
    stage : str
        Name of the stage.
    what : str
        The compared quantity, and the measure of the error.
    value : float
        The error, or a correlation.
    unit : str
        Unit of the value; empty for a ratio.
    """

    stage: str
    what: str
    value: float
    unit: str = ""


def errors_of(spec: BrainSpec, results: str | Path) -> tuple[StageError, ...]:
    """Compare the results in a folder with the truth; stages without a folder are left out."""
    errors: list[StageError] = []
    for stage, compare in _COMPARED.items():
        if (Path(results) / stage).is_dir():
            errors += [StageError(stage, *error) for error in compare(spec, Path(results) / stage)]
    return tuple(errors)


#: Quantity, value and unit of each error.
_Errors = list[tuple[str, float, str]]


def _number(path: Path) -> int:
    """Return the number of a slice that :func:`linumpy.testing.brain_files.write_brain` wrote, or of its results."""
    return int(path.name.partition(".")[0].rpartition("z")[2])


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.ome.zarr") if not path.name.startswith("."))


def _voxels(path: Path) -> np.ndarray:
    return np.asarray(open_image(path).levels[0][...])


def _sampled(path: Path) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return a volume and the coordinates of its voxels in µm along each axis; of a large volume every n-th A-line."""
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
    """Sample a smooth field (Y, X) of a tile on the grid that the tile has at another spacing."""
    from scipy.ndimage import zoom

    factors = [n / m for n, m in zip(shape, field.shape, strict=True)]
    return np.asarray(zoom(field, factors, order=1, grid_mode=True, mode="nearest"))


def _galvo(spec: BrainSpec, folder: Path) -> _Errors:
    """Maximum error of the number of columns by which tiles are rotated."""
    width, worst = spec.tile_shape[2], 0
    for path in folder.glob("*.json"):
        error = (json.loads(path.read_text())["columns"] - brain.truth_galvo(spec, _number(path))) % width
        worst = max(worst, min(error, width - error))
    return [("shift of the galvo, worst slice", float(worst), "columns")]


def _focal(spec: BrainSpec, folder: Path) -> _Errors:
    """Maximum error of the fitted curvature over a tile."""
    worst, truth = 0.0, spec.faults.focal_um / 2
    for path in folder.glob("*.json"):
        fit = json.loads(path.read_text())["um"]
        worst = max(worst, abs(fit["vv"] - truth) + abs(fit["uu"] - truth) + abs(fit["vu"]))
    return [("curvature at a tile's corner, worst slice", worst, "µm")]


def _illumination(spec: BrainSpec, folder: Path) -> _Errors:
    """Error of the flat field by which tiles were divided, computed from the tiles before and after."""
    errors = []
    for path in _images(folder):
        before, after = (
            _tiles(spec, _voxels(stage / path.name)).astype(np.float64) for stage in (folder.with_name("focal"), folder)
        )
        axes = (0, 1, 2)
        # For each pixel, before = flat * after + dark over all tiles and planes: flat is the slope of a regression.
        centred = [part - part.mean(axis=axes) for part in (before, after)]
        flat = (centred[0] * centred[1]).sum(axis=axes) / (centred[1] ** 2).sum(axis=axes)
        truth = _zoomed(brain.truth_flat_field(spec).mean(axis=0), flat.shape)
        errors.append(flat / flat.mean() / (truth / truth.mean()) - 1)
    return [("RMS error of the flat field", 100 * float(np.sqrt(np.mean(np.square(errors)))), "%")]


def _surface(spec: BrainSpec, folder: Path) -> _Errors:
    """Median error of the surface after focal correction, and the median deviation from it."""
    flat = replace(spec, faults=replace(spec.faults, focal_um=0.0))
    parts = []
    for path in _images(folder):
        depths = _tiles(spec, _voxels(path))
        for row, column in np.ndindex(spec.tiles):
            truth = brain.truth_surface(flat, _number(path), row, column) * spec.spacing_um[0]
            parts.append(depths[row, column] - _zoomed(truth, depths.shape[2:]))
    errors = np.concatenate([part[np.isfinite(part)] for part in parts])
    middle = float(np.median(errors))
    return [
        ("median error of the depth", middle, "µm"),
        ("median deviation from that", float(np.median(np.abs(errors - middle))), "µm"),
    ]


def _positions(spec: BrainSpec, folder: Path) -> _Errors:
    """Errors of the positions of recorded tiles, less their mean, since the origin of a slice is arbitrary."""
    errors: list[np.ndarray] = []
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        truth = brain.truth_positions(spec, _number(path)) * spec.spacing_um[1:]
        of_slice = [
            np.array([tile["y"], tile["x"]]) * content["spacing_um"] - truth[tile["row"], tile["column"]]
            for tile in content["tiles"]
            if tile["present"]
        ]
        errors += list(of_slice - np.mean(of_slice, axis=0))
    distances = np.linalg.norm(errors, axis=1)
    return [
        ("RMS error of a tile's position", float(np.sqrt(np.mean(distances**2))), "µm"),
        ("largest", float(distances.max()), "µm"),
    ]


def _first_tile_to_brain(spec: BrainSpec, number: int) -> np.ndarray:
    """Return the matrix from a stitched slice, whose origin is its first tile, to the brain: (y, x, 1) in µm."""
    scale = np.diag([*spec.spacing_um[1:], 1.0])
    to_slice = np.eye(3)
    to_slice[:2, 2] = brain.truth_positions(spec, number)[0, 0]
    return np.asarray(scale @ brain.truth_transform(spec, number) @ to_slice @ np.linalg.inv(scale))


def _truth_at(spec: BrainSpec, z_um: _Floats, above_um: _Floats, y_um: _Floats, x_um: _Floats) -> np.ndarray:
    """Return the known volume at coordinates in µm, as :func:`linumpy.testing.brain.reflectivity_at`."""
    z, y, x = spec.spacing_um
    return np.asarray(brain.reflectivity_at(spec, z_um / z, above_um / z, y_um / y, x_um / x))


def _stitched(spec: BrainSpec, path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a stitched slice, the known volume at its voxels, and their depth below the surface in µm."""
    voxels, (z, y, x) = _sampled(path)
    number = _number(path)
    points = _lateral_points(y, x)
    in_brain = np.tensordot(_first_tile_to_brain(spec, number), points, 1)
    middle = [(n - 1) / 2 * s for n, s in zip(spec.slice_shape[1:], spec.spacing_um[1:], strict=True)]
    begin = brain.truth_positions(spec, number)[0, 0] * spec.spacing_um[1:]
    above = spec.faults.water_um + sum(
        slope * (points[k] + begin[k] - middle[k]) for k, slope in enumerate(spec.faults.tilt)
    )
    truth = _truth_at(spec, z + number * spec.interval_um, above, in_brain[0], in_brain[1])
    return voxels, truth, z[:, None, None] - above


def _lateral_points(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return homogeneous coordinates (y, x, 1) of a grid: (3, Y, X)."""
    return np.stack([*np.meshgrid(y, x, indexing="ij"), np.ones((len(y), len(x)))])


def _log_correlation(voxels: np.ndarray, truth: np.ndarray, valid: np.ndarray) -> float:
    """Return the correlation of the logarithms."""
    return float(np.corrcoef(np.log(voxels[valid]), np.log(truth[valid]))[0, 1])


def _is_tissue(spec: BrainSpec, voxels: np.ndarray, truth: np.ndarray) -> np.ndarray:
    return np.asarray((voxels > 0) & np.isfinite(voxels) & (truth > 0.1 * spec.peak))


def _stitching(spec: BrainSpec, folder: Path) -> _Errors:
    """Minimum correlation of a slice with the known volume, from 20 µm to 120 µm below its surface."""
    worst = 1.0
    for path in _images(folder):
        voxels, truth, depth = _stitched(spec, path)
        valid = _is_tissue(spec, voxels, truth) & (depth > 20) & (depth < 120)
        worst = min(worst, _log_correlation(voxels, truth, valid))
    return [("correlation with the volume, worst slice", worst, "")]


def _attenuation(spec: BrainSpec, folder: Path) -> _Errors:
    """Remaining attenuation: the slope of the logarithm of the ratio to the known volume along depth."""
    worst = 0.0
    for path in _images(folder):
        voxels, truth, depth = _stitched(spec, path)
        deepest = float(depth.max())
        valid = _is_tissue(spec, voxels, truth) & (depth > 20) & (depth < 0.8 * deepest)
        slope = np.polyfit(depth[valid] / 1e3, np.log(voxels[valid] / truth[valid]), 1)[0]
        worst = max(worst, abs(float(slope)) / 2)
    return [(f"attenuation left, of {spec.faults.attenuation_per_mm:g}, worst slice", worst, "1/mm")]


def _register(spec: BrainSpec, folder: Path) -> _Errors:
    """Errors of the transforms of slices relative to the first slice, at the corners of the slices."""
    slices = read_transforms(folder / "transforms.json").slices
    from_brain = np.array(slices[0].matrix)[1:, 1:] @ np.linalg.inv(_first_tile_to_brain(spec, slices[0].number))
    ends = [(0.0, (n - 1) * s) for n, s in zip(spec.slice_shape[1:], spec.spacing_um[1:], strict=True)]
    corners = np.array([[y, x, 1.0] for y in ends[0] for x in ends[1]]).T
    distances, angles = [], []
    for part in slices[1:]:
        matrix, truth = np.array(part.matrix)[1:, 1:], from_brain @ _first_tile_to_brain(spec, part.number)
        distances.append(np.linalg.norm(((matrix - truth) @ corners)[:2], axis=0))
        turn = matrix[:2, :2] @ np.linalg.inv(truth[:2, :2])
        angles.append(abs(np.degrees(np.arctan2(turn[1, 0], turn[0, 0]))))
    return [
        ("RMS error at the corners of a slice", float(np.sqrt(np.mean(np.square(distances)))), "µm"),
        ("largest error of a rotation", float(max(angles)), "°"),
    ]


def _stack(spec: BrainSpec, folder: Path) -> _Errors:
    """Correlation with the known volume, placed by the first slice alone."""
    first = read_transforms(folder.with_name("register") / "transforms.json").slices[0]
    voxels, (z, y, x) = _sampled(folder / "stack.ome.zarr")
    to_brain = _first_tile_to_brain(spec, first.number) @ np.linalg.inv(np.array(first.matrix)[1:, 1:])
    in_brain = np.tensordot(to_brain, _lateral_points(y, x), 1)
    depth = z - first.top_um + first.number * spec.interval_um
    truth = _truth_at(spec, depth, np.zeros_like(in_brain[0]), in_brain[0], in_brain[1])
    return [("correlation with the volume", _log_correlation(voxels, truth, _is_tissue(spec, voxels, truth)), "")]


#: By stage.
_COMPARED: dict[str, Callable[[BrainSpec, Path], _Errors]] = {
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
