"""Errors of the results of a pipeline against the truth of a synthetic brain, beside those of doing nothing.

In: the brain's spec, and the folder of the results, in which each stage of :mod:`linumpy.pipeline` has a folder. Out:
a few :class:`StageError` for each stage that has results and a known truth. Lengths are in µm, whatever the voxel
spacing of a result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from linumpy.io.ome import open_image
from linumpy.mosaic.alignment.transforms import read_transforms
from linumpy.testing import brain
from linumpy.testing.anatomy import tissue_share
from linumpy.testing.brain_spec import BrainSpec

_Floats = NDArray[np.floating]
#: Maximum voxels of a volume that are compared.
_VOXELS = 2**18
#: Minimum share of tissue in a tile whose position is compared.
_TISSUE = 0.05


@dataclass(frozen=True)
class StageError:
    """The error of a stage.

    - `what`: the compared quantity, and the measure of the error.
    - `value`: the error, or a correlation or ratio.
    - `unit`: unit of the value; empty for a ratio.
    - `nothing`: the value without the stage: nominal positions, the motor's transforms, uncorrected intensities.
    - `best`: the value of a result without error.
    """

    stage: str
    what: str
    value: float
    unit: str = ""
    nothing: float | None = None
    best: float = 0.0


def errors_of(spec: BrainSpec, results: str | Path, stages: Sequence[str] | None = None) -> tuple[StageError, ...]:
    """Compare the results in a folder with the truth; stages without a folder, or not in `stages`, are left out."""
    return tuple(
        replace(error, stage=stage)
        for stage, compare in _COMPARED.items()
        if (stages is None or stage in stages) and (Path(results) / stage).is_dir()
        for error in compare(spec, Path(results) / stage)
    )


def slice_number(path: Path) -> int:
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


def tiles_of(spec: BrainSpec, grid: np.ndarray) -> np.ndarray:
    """Cut a mosaic grid (..., Y, X) into its tiles: (rows, columns, ..., y, x)."""
    rows = np.split(grid, spec.tiles[0], axis=-2)
    return np.stack([np.stack(np.split(row, spec.tiles[1], axis=-1)) for row in rows])


def _zoomed(field: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sample a smooth field (Y, X) of a tile on the grid that the tile has at another spacing."""
    from scipy.ndimage import zoom

    factors = [n / m for n, m in zip(shape, field.shape, strict=True)]
    return np.asarray(zoom(field, factors, order=1, grid_mode=True, mode="nearest"))


def _error(what: str, value: float, unit: str = "", nothing: float | None = None, best: float = 0.0) -> StageError:
    return StageError("", what, float(value), unit, None if nothing is None else float(nothing), best)


def _rms(vectors: _Floats) -> float:
    return float(np.sqrt((vectors**2).sum(axis=-1).mean()))


def _galvo(spec: BrainSpec, folder: Path) -> list[StageError]:
    """Maximum error of the number of columns by which tiles are rotated."""
    width, found, nothing = spec.tile_shape[2], [0], [0]
    for path in folder.glob("*.json"):
        truth = brain.truth_galvo(spec, slice_number(path))
        for errors, columns in ((found, json.loads(path.read_text())["columns"]), (nothing, 0)):
            error = (columns - truth) % width
            errors.append(min(error, width - error))
    return [_error("shift of the galvo, worst slice", max(found), "columns", max(nothing))]


def _focal(spec: BrainSpec, folder: Path) -> list[StageError]:
    """Maximum error of the fitted curvature over a tile."""
    worst, truth = 0.0, spec.faults.focal_um / 2
    for path in folder.glob("*.json"):
        fit = json.loads(path.read_text())["um"]
        worst = max(worst, abs(fit["vv"] - truth) + abs(fit["uu"] - truth) + abs(fit["vu"]))
    return [_error("curvature at a tile's corner, worst slice", worst, "µm", 2 * truth)]


def flat_field_error(spec: BrainSpec, flat: _Floats) -> float:
    """Return the RMS error of a flat field (Y, X) of any mean, in percent of the true one, averaged over depth."""
    truth = _zoomed(brain.truth_flat_field(spec).mean(axis=0), flat.shape)
    return 100 * float(np.sqrt(np.mean((flat / flat.mean() / (truth / truth.mean()) - 1) ** 2)))


def _illumination(spec: BrainSpec, folder: Path) -> list[StageError]:
    """Error of the flat field by which tiles were divided, computed from the tiles before and after."""
    errors, axes = [], (0, 1, 2)
    for path in _images(folder):
        earlier = (folder.with_name(stage) / path.name for stage in ("focal", "resample", "galvo"))
        source = next(one for one in earlier if one.exists())
        before, after = (tiles_of(spec, _voxels(image)).astype(np.float64) for image in (source, path))
        # For each pixel, before = flat * after + dark over all tiles and planes: flat is the slope of a regression.
        centred = [part - part.mean(axis=axes) for part in (before, after)]
        flat = (centred[0] * centred[1]).sum(axis=axes) / (centred[1] ** 2).sum(axis=axes)
        errors.append(flat_field_error(spec, flat))
    nothing = flat_field_error(spec, np.ones(flat.shape))
    return [_error("RMS error of the flat field, worst slice", max(errors), "%", nothing)]


def _surface(spec: BrainSpec, folder: Path) -> list[StageError]:
    """Median error of the surface after focal correction, and the median deviation from it.

    Doing nothing is a plane surface in the median depth of the true one.
    """
    flat, parts, truths = replace(spec, faults=replace(spec.faults, focal_um=0.0)), [], []
    for path in _images(folder):
        depths, origin = tiles_of(spec, _voxels(path)), _depth_origin(folder, path.name)
        for row, column in np.ndindex(spec.tiles):
            truth = brain.truth_surface(flat, slice_number(path), row, column) * spec.spacing_um[0]
            truths.append(_zoomed(truth, depths.shape[2:]))
            parts.append(depths[row, column] + origin - truths[-1])
    errors = np.concatenate([part[np.isfinite(part)] for part in parts])
    level = np.concatenate(truths)
    deviations = [np.median(np.abs(part - np.median(part))) for part in (errors, level)]
    return [
        _error("median error of the depth", np.median(errors), "µm"),
        _error("median deviation from that", deviations[0], "µm", deviations[1]),
    ]


def _depth_origin(folder: Path, name: str) -> float:
    """Return the depth of the mosaic's first voxel in µm: that of a resampled voxel lies below the recorded one."""
    paths = [folder.with_name(stage) / name for stage in ("illumination", "focal", "resample")]
    return next((float(open_image(path).origin[0][0]) for path in paths if path.exists()), 0.0)


def tissue_tiles(spec: BrainSpec, number: int) -> np.ndarray:
    """Return which tiles of a slice have tissue, by whose structure a position can be told: bool, (rows, columns)."""
    deepest = np.array([number * spec.interval_planes + spec.tile_shape[0] - 1])
    shares, (height, width) = [], spec.tile_shape[1:]
    for place in np.ndindex(spec.tiles):
        first = brain.truth_positions(spec, number)[place]
        y, x = first[0] + np.arange(height), first[1] + np.arange(width)
        points = brain.truth_points(spec, number, y[:, None], x)
        is_tissue = tissue_share(spec, deepest, brain.truth_surface(spec, number, *place), *points)[0] > 0.5
        shares.append(is_tissue.mean())
    return np.reshape(shares, spec.tiles) > _TISSUE


def position_errors(spec: BrainSpec, number: int, positions_um: _Floats, recorded: np.ndarray) -> _Floats:
    """Return the errors in µm of positions (rows, columns, 2) of recorded tiles with tissue, less their mean: (n, 2).

    The mean is arbitrary: it is the origin of the slice (:func:`slice_origin`).
    """
    errors = positions_um - brain.truth_positions(spec, number) * spec.spacing_um[1:]
    return np.asarray((errors + _origin(spec, number, positions_um, recorded))[recorded & tissue_tiles(spec, number)])


def slice_origin(spec: BrainSpec, number: int, results: Path) -> _Floats:
    """Return where the origin of a stitched slice truly lies, in µm from the nominal first voxel: (2,).

    It is the mean over the tiles with tissue of their true less their found positions. The first tile alone, at which
    the found positions begin, does not tell it: where it holds no tissue, its position cannot be found. Without a file
    of positions tiles are assumed to be stitched by the true ones.
    """
    path = next((one for one in (results / "positions").glob("*.json") if slice_number(one) == number), None)
    if path is None:
        return np.asarray(brain.truth_positions(spec, number)[0, 0] * spec.spacing_um[1:])
    return _origin(spec, number, *_found_positions(spec, path))


def _origin(spec: BrainSpec, number: int, positions_um: _Floats, recorded: np.ndarray) -> _Floats:
    is_compared = recorded & tissue_tiles(spec, number)
    is_compared = is_compared if is_compared.any() else recorded
    moves = brain.truth_positions(spec, number) * spec.spacing_um[1:] - positions_um
    return np.asarray(moves[is_compared].mean(axis=0))


def _found_positions(spec: BrainSpec, path: Path) -> tuple[_Floats, np.ndarray]:
    """Return the positions of tiles in µm, (rows, columns, 2), and which tiles were recorded."""
    content, positions, recorded = json.loads(path.read_text()), np.zeros((*spec.tiles, 2)), np.zeros(spec.tiles, bool)
    for tile in content["tiles"]:
        place = tile["row"], tile["column"]
        positions[place] = np.array([tile["y"], tile["x"]]) * content["spacing_um"]
        recorded[place] = tile["present"]
    return positions, recorded


def nominal_positions(spec: BrainSpec) -> _Floats:
    """Return the positions of tiles in µm by the nominal step: (rows, columns, 2)."""
    return np.moveaxis(np.indices(spec.tiles), 0, -1) * np.array(spec.step) * spec.spacing_um[1:]


def _positions(spec: BrainSpec, folder: Path) -> list[StageError]:
    """Errors of the positions of recorded tiles with tissue."""
    found, nothing = [], []
    for path in folder.glob("*.json"):
        number, (positions, recorded) = slice_number(path), _found_positions(spec, path)
        found.append(position_errors(spec, number, positions, recorded))
        nothing.append(position_errors(spec, number, nominal_positions(spec), recorded))
    errors, nominal = np.concatenate(found), np.concatenate(nothing)
    largest = [float(np.linalg.norm(part, axis=1).max()) for part in (errors, nominal)]
    return [
        _error("RMS error of a tile's position", _rms(errors), "µm", _rms(nominal)),
        _error("largest", largest[0], "µm", largest[1]),
    ]


def _to_brain(spec: BrainSpec, number: int, origin_um: _Floats, y_um: _Floats, x_um: _Floats) -> _Floats:
    """Return where points of a stitched slice, counted from its origin, are in the brain: (2, ...), in µm."""
    _, y, x = spec.spacing_um
    points = brain.truth_points(spec, number, (y_um + origin_um[0]) / y, (x_um + origin_um[1]) / x)
    return np.stack([points[0] * y, points[1] * x])


def _truth_at(spec: BrainSpec, z_um: _Floats, above_um: _Floats, y_um: _Floats, x_um: _Floats) -> np.ndarray:
    """Return the known volume at coordinates in µm, as :func:`linumpy.testing.anatomy.reflectivity_at`; tissue only."""
    z, y, x = spec.spacing_um
    at = z_um / z, above_um / z, y_um / y, x_um / x
    return np.asarray(brain.reflectivity_at(spec, *at) * (tissue_share(spec, *at) > 0.5))


def _stitched(spec: BrainSpec, path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a stitched slice, the known volume at its voxels, and their depth below the surface in µm."""
    voxels, (z, y, x) = _sampled(path)
    number = slice_number(path)
    points = np.meshgrid(y, x, indexing="ij")
    begin = slice_origin(spec, number, path.parent.parent)
    in_brain = _to_brain(spec, number, begin, points[0], points[1])
    middle = [(n - 1) / 2 * s for n, s in zip(spec.slice_shape[1:], spec.spacing_um[1:], strict=True)]
    above = spec.faults.water_um + sum(
        slope * (points[k] + begin[k] - middle[k]) for k, slope in enumerate(spec.faults.tilt)
    )
    truth = _truth_at(spec, z + number * spec.interval_um, above, in_brain[0], in_brain[1])
    return voxels, truth, z[:, None, None] - above


def _is_tissue(spec: BrainSpec, voxels: np.ndarray, truth: np.ndarray) -> np.ndarray:
    return np.asarray((voxels > 0) & np.isfinite(voxels) & (truth > 0.1 * spec.peak))


def _correlation(voxels: np.ndarray, truth: np.ndarray, valid: np.ndarray) -> float:
    return float(np.corrcoef(np.log(voxels[valid]), np.log(truth[valid]))[0, 1])


def _stitching(spec: BrainSpec, folder: Path) -> list[StageError]:
    """Minimum correlation of a slice with the known volume, from 20 µm to 120 µm below its surface."""
    worst = 1.0
    for path in _images(folder):
        voxels, truth, depth = _stitched(spec, path)
        valid = _is_tissue(spec, voxels, truth) & (depth > 20) & (depth < 120)
        worst = min(worst, _correlation(voxels, truth, valid))
    return [_error("correlation with the volume, worst slice", worst, best=1.0)]


def _attenuation(spec: BrainSpec, folder: Path) -> list[StageError]:
    """Attenuation that is left, brightness of the same tissue in different slices, and voxels that are clipped."""
    found, nothing = (
        np.array([_light(spec, path) for path in _images(stage)]) for stage in (folder, folder.with_name("stitch"))
    )
    (left, ratio, clipped), raw = _worst_light(found), _worst_light(nothing) if len(nothing) else (None, None, None)
    return [
        _error(f"attenuation left, of {spec.faults.attenuation_per_mm:.3g}, worst slice", left, "1/mm", raw[0]),
        _error("brightness of the same tissue, max / min of slices", ratio, "", raw[1], best=1.0),
        _error("clipped tissue, worst slice", clipped, "%", raw[2]),
    ]


def _worst_light(slices: np.ndarray) -> tuple[float, float, float]:
    return float(np.abs(slices[:, 0]).max()), float(slices[:, 1].max() / slices[:, 1].min()), 100 * slices[:, 2].max()


def _light(spec: BrainSpec, path: Path) -> tuple[float, float, float]:
    """Return for tissue of a stitched slice: attenuation in 1/mm, brightness relative to the truth, share clipped.

    The attenuation is the slope of the logarithm of the ratio to the known volume along depth.
    """
    voxels, truth, depth = _stitched(spec, path)
    valid = _is_tissue(spec, voxels, truth) & (depth > 20) & (depth < 0.8 * float(depth.max()))
    ratio = voxels[valid] / truth[valid]
    slope = np.polyfit(depth[valid] / 1e3, np.log(ratio), 1)[0]
    highest = np.iinfo(voxels.dtype).max if voxels.dtype.kind == "u" else np.inf
    return -float(slope) / 2, float(np.median(ratio)), float((voxels[valid] == highest).mean())


def transform_errors(
    spec: BrainSpec, number: int, matrix: _Floats, first: int, origins: Mapping[int, _Floats]
) -> _Floats:
    """Return the errors in µm of a transform from a stitched slice to the first one, at points with tissue: (n, 2).

    `matrix` (3, 3) is for (y, x, 1) in µm. `origins` are those of :func:`slice_origin`.
    """
    ends = [np.linspace(0, (n - 1) * s, 13) for n, s in zip(spec.slice_shape[1:], spec.spacing_um[1:], strict=True)]
    y, x = np.meshgrid(*ends, indexing="ij")
    truth = _to_brain(spec, number, origins[number], y, x)
    moved = np.tensordot(matrix, np.stack([y, x, np.ones_like(y)]), 1)
    depth, voxels = np.array([number * spec.interval_planes + 5]), truth / np.reshape(spec.spacing_um[1:], (2, 1, 1))
    tissue = tissue_share(spec, depth, np.zeros_like(y), voxels[0], voxels[1])[0] > 0.5
    errors = _to_brain(spec, first, origins[first], moved[0], moved[1]) - truth
    return np.asarray(errors[:, np.broadcast_to(tissue, y.shape)].T)


def motor_matrix(spec: BrainSpec, number: int, first: int) -> _Floats:
    """Return the transform of a slice to the first one by the motor's shifts: (3, 3), for (y, x, 1) in µm."""
    matrix, shifts = np.eye(3), [brain.truth_shift(spec, k) for k in range(first + 1, number + 1)]
    matrix[:2, 2] = np.reshape(shifts, (-1, 2)).sum(axis=0) * spec.spacing_um[1:]
    return matrix


def _register(spec: BrainSpec, folder: Path) -> list[StageError]:
    """Errors of the transforms of slices relative to the first slice, over their tissue."""
    slices = read_transforms(folder / "transforms.json").slices
    from_stack, first = np.linalg.inv(np.array(slices[0].matrix)[1:, 1:]), slices[0].number
    origins = {part.number: slice_origin(spec, part.number, folder.parent) for part in slices}
    errors, angles = [], []
    for part in slices[1:]:
        matrix = from_stack @ np.array(part.matrix)[1:, 1:]
        both = matrix, motor_matrix(spec, part.number, first)
        errors.append([transform_errors(spec, part.number, one, first, origins) for one in both])
        truth = [brain.truth_transform(spec, number)[:2, :2] for number in (first, part.number)]
        turns = [truth[0].T @ truth[1] @ linear.T for linear in (matrix[:2, :2], np.eye(2))]
        angles.append([abs(np.degrees(np.arctan2(turn[1, 0], turn[0, 0]))) for turn in turns])
    turned, unturned = np.max(angles, axis=0)
    by_pairs, by_motor = (_rms(np.concatenate(side)) for side in zip(*errors, strict=True))
    return [
        _error("RMS error of a slice's tissue", by_pairs, "µm", by_motor),
        _error("largest error of a rotation", turned, "°", unturned),
    ]


def _stack(spec: BrainSpec, folder: Path) -> list[StageError]:
    """Correlation with the known volume, placed by the first slice alone."""
    first = read_transforms(folder.with_name("register") / "transforms.json").slices[0]
    voxels, (z, y, x) = _sampled(folder / "stack.ome.zarr")
    points = np.stack([*np.meshgrid(y, x, indexing="ij"), np.ones((len(y), len(x)))])
    in_slice = np.tensordot(np.linalg.inv(np.array(first.matrix)[1:, 1:]), points, 1)
    origin = slice_origin(spec, first.number, folder.parent)
    in_brain = _to_brain(spec, first.number, origin, in_slice[0], in_slice[1])
    depth = z - first.top_um + first.number * spec.interval_um
    truth = _truth_at(spec, depth, np.zeros_like(in_brain[0]), in_brain[0], in_brain[1])
    correlation = _correlation(voxels, truth, _is_tissue(spec, voxels, truth))
    return [_error("correlation with the volume", correlation, best=1.0)]


#: By stage, whose name :func:`errors_of` adds to the errors.
_COMPARED: dict[str, Callable[[BrainSpec, Path], list[StageError]]] = {
    "galvo": _galvo, "focal": _focal, "illumination": _illumination, "surface": _surface, "positions": _positions,
    "stitch": _stitching, "attenuation": _attenuation, "register": _register, "stack": _stack,
}  # fmt: skip
