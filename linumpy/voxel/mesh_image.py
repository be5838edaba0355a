"""Convert a mesh in a file to a label image on the grid of an image.

In: .stl, .obj, .ply or any other format that trimesh reads, and an OME-Zarr image. Out: an OME-Zarr label image of the
same shape, spacing and position. Errors: ``SourceError`` for a file that is not a mesh, ``MetadataError`` for a mesh
whose unit neither the file nor the caller gives, and for an image without the axes x, y and z.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from linumpy.arrays import Array, DeviceName
from linumpy.checks import is_integer
from linumpy.device import is_device_array, to_host
from linumpy.errors import MetadataError, SourceError
from linumpy.io.carried import Carried, carried_from
from linumpy.io.output.checks import check_apart
from linumpy.io.volume import Volumes
from linumpy.packages import install_line
from linumpy.progress import progress_bar
from linumpy.resample.blocks.overlap import nothing
from linumpy.resample.tile_work import Workers, tile_work
from linumpy.voxel.backends.choose import Backend, get_backend
from linumpy.voxel.grid import Numbers, VoxelGrid, make_grid
from linumpy.voxel.mesh import OPEN, TriangleMesh, make_mesh
from linumpy.write.writer import OmeZarrWriter

log = logging.getLogger(__name__)

#: Lengths of the units of a mesh, in µm.
UNITS = {"nm": 1e-3, "um": 1.0, "mm": 1e3, "cm": 1e4, "m": 1e6}

#: Approximate memory of a slab in the backend.
_SLAB_BYTES = 2 * 2**30
#: Slabs are this many times smaller on a worker, whose threads voxelize several slabs at a time and hold the masks.
_ON_WORKERS = 8

#: Names of units that trimesh uses.
_NAMES = {
    "nanometers": "nm", "micrometers": "um", "microns": "um", "millimeters": "mm", "centimeters": "cm", "meters": "m",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Voxelized:
    """Result of :func:`voxelize_onto_image`.

    - `voxels`: number of voxels with the label.
    - `volume_um3`: volume of these voxels in µm³.
    - `watertight`: whether the mesh was closed.
    - `nbytes`: bytes of the finest resolution.
    """

    voxels: int
    volume_um3: float
    watertight: bool
    nbytes: int


def load_mesh(path: str | Path, unit: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Read a mesh from a file; all parts of a scene are merged.

    Parameters
    ----------
    path : str or Path
        A file that trimesh reads.
    unit : {"nm", "um", "mm", "cm", "m"}, optional
        Unit of the coordinates; by default the unit in the file.

    Returns
    -------
    numpy.ndarray of float64, shape (n, 3); numpy.ndarray of int64, shape (m, 3)
        Vertices, (x, y, z) µm, and triangles.

    Raises
    ------
    FileNotFoundError, SourceError
        There is no such file; trimesh cannot read it; it contains no triangles; trimesh is not installed.
    MetadataError
        Neither the file nor `unit` gives the unit of coordinates.
    ValueError
        Unknown unit.
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
        mesh = scene.to_mesh()
    except Exception as error:  # each reader of trimesh has errors of its own
        raise SourceError(f"trimesh cannot read {path} as a mesh: {error or type(error).__name__}") from error
    if not len(mesh.faces):
        raise SourceError(f"{path} contains no triangles")
    name = unit or mesh.units or scene.units
    size = UNITS.get(_NAMES.get(str(name), str(name)))
    if size is None:
        raise MetadataError(f"{path} does not give the unit of its coordinates: give unit= ({', '.join(UNITS)})")
    return np.asarray(mesh.vertices, np.float64) * size, np.asarray(mesh.faces, np.int64)


def grid_of_image(image: Volumes) -> tuple[VoxelGrid, list[int]]:
    """Return the grid of an image with axes in any order, and the order of its axes.

    Element k of the order is the index in "xyz" of the array's k-th axis, the last axis first.
    """
    if sorted(image.axes) != ["x", "y", "z"]:
        raise MetadataError(f"{image.name}: spatial axes are {image.axes!r}; x, y and z are needed")
    columns = ["xyz".index(name) for name in reversed(image.axes)]
    pitch = image.spacing[::-1]
    corner = [centre - step / 2 for centre, step in zip(image.origin[::-1], pitch, strict=True)]
    return make_grid(image.first.shape, corner, pitch), columns


def voxelize_onto_image(
    vertices: Numbers,
    triangles: Numbers,
    image: Volumes,
    output: str | Path,
    *,
    label: int = 1,
    fill_holes: bool = True,
    levels: int = 1,
    codec: str | None = None,
    backend: Backend | None = None,
    overwrite: bool = False,
    distributed: Workers = None,
    device: DeviceName | None = "auto",
) -> Voxelized:
    """Voxelize a mesh onto the grid of an image, as an OME-Zarr label image.

    - `vertices`, `triangles`: the mesh, (x, y, z) in µm in the image's coordinates, as :func:`load_mesh` returns it.
    - `image`: its grid (shape, spacing, position, order of axes) is used; no voxels are read.
    - `output`: OME-Zarr image to write, in the smallest unsigned integers that represent the label, with the units,
      orientations and NGFF version of `image`.
    - `label`: value of the voxels in the mesh, 1 to 2^32 - 1.
    - `fill_holes`: whether a mesh that is not watertight is filled; else its shell is written.
    - `levels`: number of resolutions; a coarser voxel takes the most frequent label.
    - `codec`, `overwrite`: as for :class:`linumpy.write.writer.OmeZarrWriter`.
    - `backend`: by default the choice of :func:`~linumpy.voxel.get_backend`.
    - `distributed`: a dask client, a cluster, or the address of a scheduler. Its workers voxelize the slabs; this
      process writes.
    - `device`: where workers of `distributed` compute: "auto", which is the GPU if all have one, "cuda" or "cpu".
      Without `distributed`, `backend` decides.

    A warning is logged if no voxel has the label, and if the mesh is not watertight. Raises `ValueError` (a label out
    of range, an invalid mesh, an `output` over the image), `MetadataError` (axes other than x, y, z) and
    `FileExistsError`.
    """
    check_apart([output], [image.name.removeprefix("file://")])
    backend = get_backend() if backend is None else backend
    if not is_integer(label) or not 1 <= label < 2**32:
        raise ValueError(f"label={label!r}: an integer from 1 to 2^32 - 1 is needed")
    dtype = np.min_scalar_type(int(label))
    grid, columns = grid_of_image(image)
    points = vertices if is_device_array(vertices) else np.asarray(vertices)
    if points.ndim == 2 and points.shape[1] == 3:  # else make_mesh raises
        points = points[:, columns]
    mesh = make_mesh(backend.xp, points, triangles, grid)
    voxels, metadata = 0, carried_from(image)
    if distributed is None:
        device = "cpu" if backend.xp is np else "cuda"
    bar = progress_bar("voxelizing", grid.shape[0], "plane")
    with tile_work(distributed, device=device) as work, bar as advance, OmeZarrWriter(
        output, grid.shape, dtype, image.spacing, axes=image.axes, origin=image.origin, levels=levels,
        downsampling="label", codec=codec, overwrite=overwrite,
        carried=Carried(
            ngff_version=metadata.ngff_version, units=metadata.units, orientations=metadata.orientations
        ),
    ) as writer:  # fmt: skip
        if work.client is None:
            voxelize = partial(backend.voxelize, mesh, fill_holes=fill_holes)
        else:
            sent = replace(mesh, corners=to_host(mesh.corners))
            voxelize = partial(_voxelize_on_worker, work.device, sent, fill_holes=fill_holes)

        def write(slab: VoxelGrid, mask: Array) -> None:
            nonlocal voxels
            voxels += int(mask.sum())
            writer.write(slice(slab.z_offset, slab.z_offset + slab.shape[0]), mask * dtype.type(label))
            advance(slab.shape[0])

        slabs = _slabs(grid, writer.stored[0], _SLAB_BYTES // (1 if work.client is None else _ON_WORKERS))
        work(slabs, nothing, lambda slab, _: voxelize(slab), write)
    if not voxels:
        log.warning("no voxel centre of %s lies in the mesh: are its unit and its position right?", image.name)
    nbytes = int(np.prod(grid.shape)) * dtype.itemsize
    return Voxelized(voxels, voxels * float(np.prod(grid.pitch)), mesh.kind != OPEN, nbytes)


def _slabs(grid: VoxelGrid, step: int, slab_bytes: int) -> Iterator[VoxelGrid]:
    """Yield slabs of whole chunks, `step` planes each."""
    depth, height, width = grid.shape
    voxel_nbytes = 8  # mask, winding number, label
    planes = max(1, slab_bytes // (voxel_nbytes * height * width) // step) * step
    for start in range(0, depth, planes):
        yield VoxelGrid((min(planes, depth - start), height, width), grid.origin, grid.pitch, start)


def _voxelize_on_worker(kind: DeviceName, mesh: TriangleMesh, slab: VoxelGrid, *, fill_holes: bool) -> Array:
    """Voxelize a slab, with a backend of this process and a mesh in host memory."""
    backend = get_backend(kind)
    mesh = replace(mesh, corners=backend.xp.asarray(mesh.corners))
    return backend.voxelize(mesh, slab, fill_holes=fill_holes)
