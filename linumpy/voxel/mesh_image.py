"""A mesh in a file, made to a mask on the grid of an image.

In: .stl, .obj, .ply or whatever trimesh reads, and an OME-Zarr image. Out: an OME-Zarr label image of the same shape
and spacing at the same position. Errors: ``SourceError`` for what is no mesh, ``MetadataError`` for a mesh whose unit
neither the file nor the caller gives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linumpy.device import install_line, is_device_array
from linumpy.errors import MetadataError, SourceError
from linumpy.io.carried import Carried, carried_from
from linumpy.io.paths import check_apart
from linumpy.io.volume import Volumes
from linumpy.renamed import renamed_parameter
from linumpy.voxel.backend import Backend, get_backend
from linumpy.voxel.grid import Grid, make_grid
from linumpy.voxel.mesh import SHELL, Mesh, make_mesh
from linumpy.write.writer import OmeZarrWriter

log = logging.getLogger(__name__)

#: Units that a mesh may be in, with their size in µm.
UNITS = {"nm": 1e-3, "um": 1.0, "mm": 1e3, "cm": 1e4, "m": 1e6}

_NAMES = {
    "nanometers": "nm", "micrometers": "um", "microns": "um", "millimeters": "mm", "centimeters": "cm", "meters": "m",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Voxelized:
    """What :func:`voxelize_onto_image` wrote.

    Attributes
    ----------
    voxels : int
        How many have the label.
    volume_um3 : float
        Their volume in µm³.
    watertight : bool
        Whether the mesh was closed.
    nbytes : int
        Bytes of the finest resolution.
    """

    voxels: int
    volume_um3: float
    watertight: bool
    nbytes: int


def load_mesh(path: str | Path, unit: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Read a mesh; all parts of a scene become one.

    Parameters
    ----------
    path : str or Path
        A file that trimesh reads.
    unit : {"nm", "um", "mm", "cm", "m"}, optional
        Of its coordinates; by default what the file says.

    Returns
    -------
    numpy.ndarray of float64, shape (n, 3); numpy.ndarray of int64, shape (m, 3)
        Vertices, (x, y, z) µm, and triangles.

    Raises
    ------
    FileNotFoundError, SourceError
        There is no such file; it holds no triangles; trimesh is not installed.
    MetadataError
        Neither the file nor `unit` says what a coordinate is.
    ValueError
        Another unit.
    """
    if unit is not None and unit not in UNITS:
        raise ValueError(f"unit={unit!r} is unknown: choose one of {', '.join(UNITS)}")
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    try:
        import trimesh
    except ImportError as error:
        raise SourceError(
            f"{path}: meshes are read by trimesh, which is not installed: {install_line('mesh')}"
        ) from error
    try:
        scene = trimesh.load_scene(path)
        found = scene.to_mesh()
    except Exception as error:  # each of its readers has errors of its own
        raise SourceError(f"{path} is no mesh that trimesh reads: {error or type(error).__name__}") from error
    if not len(found.faces):
        raise SourceError(f"{path} holds no triangles")
    size = UNITS[unit or _unit_of(found.units or scene.units, path)]
    return np.asarray(found.vertices, np.float64) * size, np.asarray(found.faces, np.int64)


def _unit_of(name: str | None, path: str | Path) -> str:
    unit = name if name in UNITS else _NAMES.get(str(name))
    if unit is None:
        raise MetadataError(f"{path} does not say in what unit its coordinates are: give unit= ({', '.join(UNITS)})")
    return unit


def grid_of_image(image: Volumes) -> tuple[Grid, list[int]]:
    """Return the grid of an image, whose axes may come in any order, and the columns (of x, y, z) that its axes are.

    Column k of the result says which of x, y and z the grid's k-th direction is, the last axis of the array first.
    """
    if sorted(image.axes) != ["x", "y", "z"]:
        raise MetadataError(f"{image.name}: axes {image.axes!r} of space; x, y and z are needed")
    columns = ["xyz".index(name) for name in reversed(image.axes)]
    pitch = image.spacing[::-1]
    corner = [centre - step / 2 for centre, step in zip(image.origin[::-1], pitch, strict=True)]
    return make_grid(image.first.shape, corner, pitch), columns


@renamed_parameter("n_levels", "levels")
def voxelize_onto_image(
    vertices: Any,
    triangles: Any,
    image: Volumes,
    output: str | Path,
    *,
    label: int = 1,
    fill_holes: bool = True,
    levels: int = 1,
    backend: Backend | None = None,
    slab_bytes: int = 2 * 2**30,
    overwrite: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Voxelized:
    """Write a label image that holds a mesh, on the grid of an image.

    Parameters
    ----------
    vertices, triangles
        The mesh, (x, y, z) µm in the coordinates of the image; see :func:`load_mesh`.
    image : Volumes
        Gives the grid (shape, spacing, position, order of axes); its voxels are not read.
    output : str or Path
        OME-Zarr image to write, of the smallest unsigned integers that hold the label, in units and NGFF version of the
        image.
    label : int
        From 1 on.
    fill_holes : bool
        Of a mesh that is not watertight, whether to fill what its shell encloses. All of the volume is in memory then.
    levels : int
        Resolutions; a coarser voxel takes the most frequent label.
    backend : Backend, optional
        What computes; by default :func:`~linumpy.voxel.get_backend`'s choice.
    slab_bytes : int
        About how much memory of the backend a slab may take.
    overwrite : bool
        Whether to replace an image that is there.
    progress : callable, optional
        Called with bytes written.

    Returns
    -------
    Voxelized
        What was written. Where no voxel has the label, a warning says so.

    Raises
    ------
    ValueError
        A label out of range, an invalid mesh, or an `output` that would take the place of the image.
    FileExistsError
        There is such an output, without `overwrite`.
    """
    check_apart([output], [image.name.removeprefix("file://")])
    backend = get_backend() if backend is None else backend
    if isinstance(label, bool) or not isinstance(label, (int, np.integer)) or not 1 <= label < 2**32:
        raise ValueError(f"label={label!r}: a whole number from 1 to 2^32 - 1 is needed")
    dtype = np.min_scalar_type(int(label))
    grid, columns = grid_of_image(image)
    points = vertices if is_device_array(vertices) else np.asarray(vertices)
    if points.ndim == 2 and points.shape[1] == 3:  # else an error follows
        points = points[:, columns]
    mesh = make_mesh(backend.xp, points, triangles, grid)
    if mesh.kind == SHELL:
        what = "what its shell encloses is filled" if fill_holes else "only its shell is written"
        log.warning("the mesh is not watertight: %s", what)
    voxels, said = 0, carried_from(image)
    with OmeZarrWriter(
        output, grid.shape, dtype, image.spacing, axes=image.axes, origin=image.origin, levels=levels,
        downsampling="label", overwrite=overwrite, progress=progress,
        carried=Carried(ngff_version=said.ngff_version, units=said.units),
    ) as writer:  # fmt: skip
        for start, mask in _slabs(backend, mesh, grid, writer.stored[0], slab_bytes, fill_holes=fill_holes):
            voxels += int(mask.sum())
            writer.write(slice(start, start + mask.shape[0]), mask * dtype.type(label))
    if not voxels:
        log.warning("no voxel centre of %s lies in the mesh: are its unit and its position right?", image.name)
    nbytes = int(np.prod(grid.shape)) * dtype.itemsize
    return Voxelized(voxels, voxels * float(np.prod(grid.pitch)), mesh.kind != SHELL, nbytes)


def _slabs(backend: Backend, mesh: Mesh, grid: Grid, step: int, slab_bytes: int, *, fill_holes: bool) -> Any:
    """Yield masks of slabs of whole chunks, each with its first plane; one of all planes where a shell is filled."""
    depth, height, width = grid.shape
    planes = depth
    if mesh.kind != SHELL or not fill_holes:
        planes = max(1, slab_bytes // (8 * height * width) // step) * step  # a mask, its winding numbers, its labels
    for start in range(0, depth, planes):
        shape = (min(planes, depth - start), height, width)
        part = Grid(shape, grid.origin, grid.pitch, start)
        yield start, backend.voxelize(mesh, part, fill_holes=fill_holes)
