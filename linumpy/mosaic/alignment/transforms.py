"""Transforms of slices to the common space of their stack, as JSON and as a scene of NGFF 0.6.

In: matrices. Out: a file that ``linum-stack-slices`` reads; metadata that make the folder of the slices a scene
(RFC-5), in which any reader of NGFF 0.6 finds the transforms, such as ``resample_zarr(slice, out, 10.0,
coordinate_system="stack")``. Lengths are in µm, axes z, y and x. Errors: :class:`~linumpy.errors.SourceError` for a
file without transforms.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from linumpy.errors import SourceError
from linumpy.io.ngff.collection import ome_attributes
from linumpy.io.ngff.coordinate_systems import systems_of
from linumpy.io.ome import open_image
from linumpy.io.output.files import replacing
from linumpy.io.output.results import JSON, read_result, write_result

#: Name of the coordinate system of the stack.
SYSTEM = "stack"
#: Value of the key "linumpy", by which a file of transforms is recognised.
_KIND = "transforms of slices"

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class SliceTransform:
    """The transform of a slice.

    - `matrix` (4, 4): homogeneous, from the coordinates in the slice's metadata to the stack: (z, y, x, 1) in µm.
    - `top_um`: coordinate in the stack along z at which the used part of the slice begins, below its cut surface.
    - `depth_um`: depth of the used part of the slice.
    - `placed_by` ("pairs", "neighbours", "motor"): what places the slice: registered pairs; without any, its neighbours
      and the motor's shifts to them; or, at an end of the stack, the motor's shifts alone. Without a table of shifts
      the motor says that nothing moved.
    - `reliable_shift`: whether the table trusts the motor's shift from the slice above.
    """

    number: int
    name: str
    matrix: Matrix
    top_um: float
    depth_um: float
    placed_by: str = "pairs"
    reliable_shift: bool = True


@dataclass(frozen=True)
class PairResult:
    """The registration of two slices.

    - `matrix` (3, 3): homogeneous, from the fixed to the moving slice: (y, x, 1) in µm from their first voxels.
    - `correlation`: Pearson's correlation, where the slices overlap.
    - `overlap`: fraction of the fixed slice that overlaps.
    - `error_um`: standard error of a corner's position, with what planes that lie apart add; infinite if the slices
      could not be compared.
    - `residual_um`: root mean square distance from the solution of all pairs, over the corners.
    - `evidence`: probability that the transform is right, from the scores of wrong transforms, the motor and the other
      pairs.
    - `rejected`: why the pair is not used; empty if it is.
    """

    fixed_id: int
    moving_id: int
    matrix: Matrix
    correlation: float
    overlap: float
    error_um: float
    residual_um: float
    evidence: float
    rejected: str


@dataclass(frozen=True)
class SliceTransforms:
    """The transforms of all slices of a stack, and the registered pairs.

    - `interval_um`: thickness that was cut off between slices.
    - `pairs`: in the order of the slices.
    - `warnings`: what a user should know, in sentences.
    - `left_out`: why no slice could be registered; empty if some were.
    """

    interval_um: float
    slices: tuple[SliceTransform, ...]
    pairs: tuple[PairResult, ...] = ()
    warnings: tuple[str, ...] = ()
    left_out: str = ""

    def write(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the transforms as JSON. NaN and infinities are written as null.

        Raises `FileExistsError`: the file exists.
        """
        content = {"linumpy": _KIND, "version": 2, **asdict(self)}
        write_result(path, content, warnings=self.warnings, left_out=self.left_out, overwrite=overwrite)


def read_transforms(path: str | Path) -> SliceTransforms:
    """Read a file of :meth:`SliceTransforms.write`. Numbers of pairs that are null become infinite.

    Raises `FileNotFoundError`: there is no such file. `SourceError`: the file has no transforms of slices, or
    transforms that are not invertible.
    """
    try:
        content = read_result(path)
        if content.get("linumpy") != _KIND:
            raise SourceError(f"{path} has no {_KIND}: linum-register-pairwise writes them")
        slices = tuple(map(_slice, content["slices"]))
        pairs = tuple(map(_pair, content["pairs"]))
        return SliceTransforms(
            interval_um=float(content["interval_um"]), slices=slices, pairs=pairs,
            warnings=tuple(content.get("warnings", ())), left_out=content.get("left_out", ""),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{path} is no file of {_KIND}, or is damaged ({error})") from None


def _slice(entry: Mapping[str, JSON]) -> SliceTransform:
    matrix, number = _matrix(entry["matrix"], 4), entry["number"]
    linear, last = np.array(matrix)[:3, :3], matrix[3]
    if last != (0, 0, 0, 1) or np.linalg.matrix_rank(linear) < 3:
        raise ValueError(f"the matrix of slice {number} is no invertible affine transform")
    top, depth = float(entry["top_um"]), float(entry["depth_um"])
    if not math.isfinite(top) or not 0 < depth < math.inf:
        raise ValueError(f"slice {number} begins at {top} µm and is {depth} µm deep")
    return SliceTransform(**{**entry, "number": int(number), "matrix": matrix, "top_um": top, "depth_um": depth})


def _pair(entry: Mapping[str, JSON]) -> PairResult:
    values: dict[str, JSON] = {key: math.inf if value is None else value for key, value in entry.items()}
    return PairResult(**(values | {"matrix": _matrix(entry["matrix"], 3)}))


def _matrix(rows: JSON, size: int) -> Matrix:
    matrix = np.array(rows, np.float64)
    if matrix.shape != (size, size) or not np.isfinite(matrix).all():
        raise ValueError(f"a matrix of {matrix.shape}; {size} × {size} numbers are needed")
    return tuple(map(tuple, matrix.tolist()))


def check_scene(folder: str | Path, *, overwrite: bool = False) -> Path:
    """Return the path of the scene, ``zarr.json``.

    Raises
    ------
    FileExistsError
        The folder has a ``zarr.json``, and `overwrite` is False.
    """
    path = Path(folder) / "zarr.json"
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: pass overwrite=True to replace it by the scene")
    return path


def write_scene(folder: str | Path, transforms: SliceTransforms, *, overwrite: bool = False) -> Path:
    """Make the folder of the slices a Zarr group whose metadata are a scene of NGFF 0.6.

    Parameters
    ----------
    folder : str or Path
        Folder of the slices, in which ``zarr.json`` is written.
    transforms : SliceTransforms
        The transforms.
    overwrite : bool
        Whether to replace an existing ``zarr.json``.

    Returns
    -------
    Path
        The ``zarr.json``.

    Raises
    ------
    FileExistsError
        The folder has a ``zarr.json``, and `overwrite` is False.
    FileNotFoundError, SourceError, MetadataError
        A slice that cannot be opened.
    """
    axes = [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
    entries = []
    for part in transforms.slices:
        image = open_image(Path(folder) / part.name)
        multiscale = ome_attributes(image.group)["multiscales"][image.multiscale]
        systems = systems_of(multiscale, image.name)  # images before NGFF 0.6 have no such names
        source = {"path": part.name} | ({"name": systems.intrinsic} if systems else {})
        matrix = [list(row) for row in part.matrix[:3]]
        entries.append({"type": "affine", "affine": matrix, "input": source, "output": {"name": SYSTEM}})
    scene = {"coordinateSystems": [{"name": SYSTEM, "axes": axes}], "coordinateTransformations": entries}
    attributes = {"ome": {"version": "0.6", "scene": scene}}
    path = check_scene(folder, overwrite=overwrite)
    with replacing(path, overwrite=overwrite) as temporary:
        document = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path
