"""Other packages that do a stage of the pipeline, on the results of the pipeline's stage before it.

In: the spec of a synthetic brain, and the folder of its results. Out: their errors; none if the package is not
installed.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from linumpy.benchmark.timing import peer_module
from linumpy.io.ome import open_image
from linumpy.testing import brain_errors
from linumpy.testing.brain_errors import StageError
from linumpy.testing.brain_spec import BrainSpec


def _images(folder: Path) -> dict[int, tuple[np.ndarray, tuple[float, ...]]]:
    """Return voxels and spacing of each slice in a folder of results."""
    found = {}
    for path in sorted(folder.glob("*.ome.zarr")):
        image = open_image(path)
        found[brain_errors.slice_number(path)] = np.asarray(image.levels[0][...]), tuple(image.spacing[0])
    return found


def basicpy(spec: BrainSpec, results: Path) -> list[StageError]:
    """BaSiC: the flat field of the mean of each tile over depth."""
    if find_spec("basicpy") is None:
        return []
    tiles = [brain_errors.tiles_of(spec, voxels.mean(axis=0)) for voxels, _ in _images(results / "focal").values()]
    images = np.concatenate([part.reshape(-1, *part.shape[2:]) for part in tiles]).astype(np.float32)
    model = importlib.import_module("basicpy").BaSiC(get_darkfield=False)
    model.fit(images)
    error = brain_errors.flat_field_error(spec, np.asarray(model.flatfield, np.float64))
    return [StageError("illumination", "RMS error of the flat field, worst slice", error, "%")]


def skimage(spec: BrainSpec, results: Path) -> list[StageError]:
    """Phase correlation of the nominal overlaps of neighbours, and least squares over all pairs."""
    if find_spec("skimage") is None:
        return []
    found = []
    for number, (voxels, spacing) in _images(results / "illumination").items():
        tiles = brain_errors.tiles_of(spec, voxels.mean(axis=0))
        positions = _positions_by_pairs(tiles, brain_errors.nominal_positions(spec) / spacing[1:])
        found.append(brain_errors.position_errors(spec, number, positions * spacing[1:], np.ones(spec.tiles, bool)))
    errors = np.concatenate(found)
    value = float(np.sqrt((errors**2).sum(axis=1).mean()))
    return [StageError("positions", "RMS error of a tile's position", value, "µm")]


def _positions_by_pairs(tiles: np.ndarray, nominal: np.ndarray) -> np.ndarray:
    """Return positions in voxels that fit the shifts of all pairs of neighbours: (rows, columns, 2)."""
    from skimage.registration import phase_cross_correlation

    grid, rows, shifts = nominal.shape[:2], [], []
    for place in np.ndindex(grid):
        for axis in range(2):
            other = place[0] + (axis == 0), place[1] + (axis == 1)
            if other[0] == grid[0] or other[1] == grid[1]:
                continue
            step = round(nominal[other][axis] - nominal[place][axis])
            fixed, moving = np.moveaxis(tiles[place], axis, 0)[step:], np.moveaxis(tiles[other], axis, 0)[:-step]
            parts = [part - part.mean() for part in (fixed, moving[: len(fixed)])]
            shift, *_ = phase_cross_correlation(*parts, upsample_factor=10, normalization=None)
            shift = shift if axis == 0 else shift[::-1]
            row = np.zeros(grid)
            row[other], row[place] = 1, -1
            rows.append(row.ravel())
            shifts.append(nominal[other] - nominal[place] + shift)
    return np.linalg.lstsq(np.array(rows), np.array(shifts), rcond=None)[0].reshape(nominal.shape)


def simple_itk(spec: BrainSpec, results: Path) -> list[StageError]:
    """Rigid registration of the shared depth of neighbours, which begins with the motor's shift."""
    if find_spec("SimpleITK") is None:
        return []
    slices = _images(results / "attenuation")
    numbers, to_first, errors = list(slices), np.eye(3), []
    origins = {number: brain_errors.slice_origin(spec, number, results) for number in numbers}
    for above, below in itertools.pairwise(numbers):
        interval = (below - above) * spec.interval_um
        planes = [_shared(spec, *slices[number], depth) for number, depth in ((above, interval), (below, 0.0))]
        motor = brain_errors.motor_matrix(spec, below, above)
        to_first = to_first @ _registered(planes[0], planes[1], slices[above][1], motor)
        errors.append(brain_errors.transform_errors(spec, below, to_first, numbers[0], origins))
    value = float(np.sqrt((np.concatenate(errors) ** 2).sum(axis=1).mean()))
    return [StageError("register", "RMS error of a slice's tissue", value, "µm")]


def _shared(spec: BrainSpec, voxels: np.ndarray, spacing: tuple[float, ...], depth_um: float) -> np.ndarray:
    """Return the mean over 60 µm below a depth under the mean surface, or over what there is."""
    first = round((spec.faults.water_um + 20 + depth_um) / spacing[0])
    first = min(first, len(voxels) - 2)
    part = voxels[first : first + max(1, round(60 / spacing[0]))].astype(np.float32)
    return np.asarray(np.log(np.maximum(np.nan_to_num(part.mean(axis=0)), 1)))


def _registered(fixed: np.ndarray, moving: np.ndarray, spacing: tuple[float, ...], motor: np.ndarray) -> np.ndarray:
    """Return the matrix from the moving to the fixed plane, for (y, x, 1) in µm."""
    sitk = peer_module("SimpleITK")
    images = [sitk.GetImageFromArray(plane) for plane in (fixed, moving)]
    for image in images:
        image.SetSpacing([float(spacing[2]), float(spacing[1])])
    begin = sitk.Euler2DTransform()
    middle = [float((n - 1) * s / 2) for n, s in zip(fixed.shape[::-1], spacing[:0:-1], strict=True)]
    begin.SetCenter(middle)
    begin.SetTranslation([-float(motor[1, 2]), -float(motor[0, 2])])
    method = sitk.ImageRegistrationMethod()
    method.SetMetricAsCorrelation()
    method.SetInterpolator(sitk.sitkLinear)
    method.SetOptimizerAsRegularStepGradientDescent(4.0, 1e-3, 200)
    method.SetOptimizerScalesFromPhysicalShift()
    method.SetShrinkFactorsPerLevel([4, 2, 1])
    method.SetSmoothingSigmasPerLevel([4 * spacing[1], 2 * spacing[1], spacing[1]])
    method.SetMetricFixedMask(images[0] > 0)
    method.SetMetricMovingMask(images[1] > 0)
    method.SetInitialTransform(begin, inPlace=False)
    found = method.Execute(*images)
    # ITK's transform takes (x, y) of the fixed image to the moving one.
    corner = np.array(found.TransformPoint([0.0, 0.0]))
    linear = np.stack([np.array(found.TransformPoint(unit)) - corner for unit in ([1.0, 0.0], [0.0, 1.0])], axis=1)
    matrix = np.eye(3)
    matrix[:2, :2], matrix[:2, 2] = linear[::-1, ::-1], corner[::-1]
    return np.linalg.inv(matrix)


#: By name: takes a spec and the folder of the results, returns the errors.
PEERS: dict[str, Callable[[BrainSpec, Path], list[StageError]]] = {
    "basicpy": basicpy,
    "skimage": skimage,
    "SimpleITK": simple_itk,
}
