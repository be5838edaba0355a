"""Transforms of slices to the common space of their stack, as JSON and as a scene of NGFF 0.6.

In: matrices. Out: a file that ``linum-stack-slices`` reads; and the group above the slices made a scene (RFC-5), so
that any reader of NGFF 0.6 finds them: ``resample_zarr(slice, out, 10.0, coordinate_system="stack")``. Lengths are in
µm, axes z, y and x. Errors: :class:`~linumpy.errors.SourceError` for a file that is none.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linumpy.errors import SourceError
from linumpy.io.ngff.collection import ome_attributes
from linumpy.io.ngff.coordinate_systems import systems_of
from linumpy.io.ome import open_image
from linumpy.io.output.files import replacing

#: Name of the coordinate system of the stack.
SYSTEM = "stack"
_KIND = "transforms of slices"

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class SliceTransform:
    """The transform of a slice.

    Attributes
    ----------
    number : int
        Number of the slice.
    name : str
        Name of its folder.
    matrix : tuple of tuple of float, (4, 4)
        Homogeneous, from coordinates in the slice, as its metadata have them, to the stack: (z, y, x, 1) in µm.
    top_um, depth_um : float
        Where the slice begins in the stack along z, below its cut surface, and how deep it is from there.
    interpolated : bool
        Whether no pair placed it: it lies between its neighbours.
    """

    number: int
    name: str
    matrix: Matrix
    top_um: float
    depth_um: float
    interpolated: bool = False


@dataclass(frozen=True)
class PairResult:
    """What was found of two slices.

    Attributes
    ----------
    fixed_id, moving_id : int
        Numbers of the slices.
    matrix : tuple of tuple of float, (3, 3)
        Homogeneous, from the fixed to the moving slice: (y, x, 1) in µm from their first voxels.
    correlation : float
        Pearson's, where the slices overlap.
    overlap : float
        Fraction of the fixed slice that overlaps.
    error_um : float
        Standard error of a corner's position; infinite where nothing could be compared.
    residual_um : float
        Distance from where all pairs together place the slices.
    rejected : bool
        Whether the pair had no part in that.
    """

    fixed_id: int
    moving_id: int
    matrix: Matrix
    correlation: float
    overlap: float
    error_um: float
    residual_um: float
    rejected: bool


@dataclass(frozen=True)
class SliceTransforms:
    """The transforms of all slices of a stack, and the pairs that they come from.

    Attributes
    ----------
    interval_um : float
        Thickness that was cut off between slices.
    slices : tuple of SliceTransform
        From the top down.
    pairs : tuple of PairResult
        In the order of the slices.
    """

    interval_um: float
    slices: tuple[SliceTransform, ...]
    pairs: tuple[PairResult, ...] = ()

    def write(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the transforms as JSON.

        Raises
        ------
        FileExistsError
            The file exists.
        """
        text = json.dumps({"linumpy": _KIND, "version": 1, **_finite(asdict(self))}, indent=1)
        with replacing(path, overwrite=overwrite) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_transforms(path: str | Path) -> SliceTransforms:
    """Read the transforms of slices.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    SourceError
        The file has no transforms of slices.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if found.get("linumpy") != _KIND:
            raise SourceError(f"{path} has no {_KIND}: linum-register-pairwise writes them")
        slices = tuple(map(_slice, found["slices"]))
        pairs = tuple(map(_pair, found["pairs"]))
        return SliceTransforms(float(found["interval_um"]), slices, pairs)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{path} is no file of {_KIND}, or is damaged ({error})") from None


def _slice(one: dict[str, Any]) -> SliceTransform:
    matrix = _matrix(one["matrix"], 4)
    linear, last = np.array(matrix)[:3, :3], matrix[3]
    if last != (0, 0, 0, 1) or np.linalg.matrix_rank(linear) < 3:
        raise ValueError(f"the matrix of slice {one['number']} is no invertible affine transform")
    top, depth = float(one["top_um"]), float(one["depth_um"])
    if not math.isfinite(top) or not 0 < depth < math.inf:
        raise ValueError(f"slice {one['number']} begins at {top} µm and is {depth} µm deep")
    return SliceTransform(**{**one, "number": int(one["number"]), "matrix": matrix, "top_um": top, "depth_um": depth})


def _pair(one: dict[str, Any]) -> PairResult:
    known: dict[str, Any] = {key: math.inf if value is None else value for key, value in one.items()}
    return PairResult(**(known | {"matrix": _matrix(one["matrix"], 3)}))


def _matrix(rows: Any, size: int) -> Matrix:
    matrix = np.array(rows, np.float64)
    if matrix.shape != (size, size) or not np.isfinite(matrix).all():
        raise ValueError(f"a matrix of {matrix.shape}; {size} × {size} numbers are needed")
    return tuple(map(tuple, matrix.tolist()))


def check_scene(folder: str | Path, *, overwrite: bool = False) -> Path:
    """Refuse a folder that has a ``zarr.json``; see :func:`write_scene`."""
    path = Path(folder) / "zarr.json"
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: pass overwrite=True to replace it by the scene")
    return path


def write_scene(folder: str | Path, transforms: SliceTransforms, *, overwrite: bool = False) -> Path:
    """Make the folder of the slices a group of Zarr whose metadata are a scene of NGFF 0.6.

    Parameters
    ----------
    folder : str or Path
        Folder of the slices. It gets a file ``zarr.json``.
    transforms : SliceTransforms
        The transforms.
    overwrite : bool
        Whether to replace such a file.

    Raises
    ------
    FileExistsError
        The folder has a ``zarr.json``.
    """
    axes = [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
    found = []
    for one in transforms.slices:
        start = {"path": one.name} | _system_of(Path(folder) / one.name)
        matrix = [list(row) for row in one.matrix[:3]]
        found.append({"type": "affine", "affine": matrix, "input": start, "output": {"name": SYSTEM}})
    scene = {"coordinateSystems": [{"name": SYSTEM, "axes": axes}], "coordinateTransformations": found}
    attributes = {"ome": {"version": "0.6", "scene": scene}}
    path = check_scene(folder, overwrite=overwrite)
    with replacing(path, overwrite=overwrite) as temporary:
        document = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def _system_of(path: Path) -> dict[str, str]:
    """Name the coordinate system of an image; before NGFF 0.6 it has no name."""
    image = open_image(path)
    multiscale = ome_attributes(image.group)["multiscales"][image.multiscale]
    systems = systems_of(multiscale, str(path))
    return {"name": systems.intrinsic} if systems else {}
