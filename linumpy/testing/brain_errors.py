"""How far the results of a pipeline are from the truth of a synthetic brain, stage by stage.

In: the brain's spec, and the paths of the results by role, as :class:`linumpy.pipeline.runner.Summary` has them. Out:
one :class:`StageError` for each stage whose result is there and whose truth is known. Lengths are in µm, whatever the
spacing of the results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linumpy.io.ome import open_image
from linumpy.testing import brain
from linumpy.testing.brain_spec import BrainSpec

Results = Mapping[str, Sequence[Path]]


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
    unit: str


def errors_of(spec: BrainSpec, results: Results) -> tuple[StageError, ...]:
    """Compare results with the truth."""
    found = []
    for role, compare in _COMPARED.items():
        if results.get(role):
            found += compare(spec, results[role])
    return tuple(found)


def _number(path: Path) -> int:
    """Return the number of a slice that :func:`linumpy.testing.brain_files.write_brain` wrote, or of its results."""
    return int(path.name.partition(".")[0].rpartition("z")[2])


def _focal(spec: BrainSpec, pictures: Sequence[Path]) -> list[StageError]:
    """Largest error of the fitted curvature over a tile."""
    worst = 0.0
    for picture in pictures:
        fit = json.loads(picture.with_suffix(".json").read_text())["um"]
        truth = spec.faults.focal_um / 2
        worst = max(worst, abs(fit["vv"] - truth) + abs(fit["uu"] - truth) + abs(fit["vu"]))
    return [StageError("focal", "curvature at a tile's corner, worst slice", worst, "µm")]


def _surface(spec: BrainSpec, maps: Sequence[Path]) -> list[StageError]:
    """Median error of the surface after focal correction, and its scatter about that."""
    from scipy.ndimage import zoom

    flat = _without_focal(spec)
    apart = []
    for path in maps:
        depth = np.asarray(open_image(path).levels[0][...])
        tile = [n // count for n, count in zip(depth.shape, spec.tiles, strict=True)]
        for row, column in np.ndindex(spec.tiles):
            truth = brain.truth_surface(flat, _number(path), row, column) * spec.spacing_um[0]
            factors = [n / m for n, m in zip(tile, truth.shape, strict=True)]
            truth = zoom(truth, factors, order=1, grid_mode=True, mode="nearest")
            box = tuple(slice(k * n, (k + 1) * n) for k, n in zip((row, column), tile, strict=True))
            apart.append(depth[box] - truth)
    errors = np.concatenate([part[np.isfinite(part)] for part in apart])
    middle = float(np.median(errors))
    return [
        StageError("surface", "median error of the depth", middle, "µm"),
        StageError("surface", "median deviation from that", float(np.median(np.abs(errors - middle))), "µm"),
    ]


def _without_focal(spec: BrainSpec) -> BrainSpec:
    from dataclasses import replace

    return replace(spec, faults=replace(spec.faults, focal_um=0.0))


def _positions(spec: BrainSpec, files: Sequence[Path]) -> list[StageError]:
    """Errors of the positions of tiles that were recorded, less their mean: where a slice begins is free."""
    errors = []
    for path in files:
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
        StageError("positions", "RMS error of a tile's position", float(np.sqrt(np.mean(distances**2))), "µm"),
        StageError("positions", "largest", float(distances.max()), "µm"),
    ]


#: By role of the results.
_COMPARED: dict[str, Callable[[BrainSpec, Sequence[Path]], list[StageError]]] = {
    "focal_picture": _focal,
    "surface": _surface,
    "positions": _positions,
}
