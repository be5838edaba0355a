"""Make a label image of a mesh, such as a region of a brain atlas, on the grid of an image.

Reads a mesh (.stl, .obj, .ply and other formats of trimesh) in the coordinates of an OME-Zarr image, in the order x, y,
z, and writes an OME-Zarr image of the same shape, spacing and origin: --label where the centre of a voxel is inside the
mesh, and 0 elsewhere. The voxels of the image are not read. A mesh that is not watertight is solid where its
generalised winding number is above 1/2, and a warning says what is open; with --no-fill-holes it becomes a shell of one
voxel.

With --cluster, workers of dask voxelize blocks of whole chunks, and this process writes them.

For example:
  linum-voxelize cortex.stl brain.ome.zarr cortex.ome.zarr --unit um
  linum-voxelize cortex.ply brain.ome.zarr cortex.ome.zarr --unit mm --shift -1500 0 0 --label 7 --levels 4
"""

import argparse
from pathlib import Path

from linumpy import cli


def _voxelize(parsed: argparse.Namespace) -> None:
    import numpy as np

    from linumpy.io.volume import open_volumes
    from linumpy.voxel.backends.choose import get_backend
    from linumpy.voxel.mesh_image import load_mesh, voxelize_onto_image

    if not np.isfinite(parsed.shift).all():
        raise ValueError(f"shift={parsed.shift}: pass three finite numbers in µm")
    command = cli.TileCommand(parsed)
    backend = get_backend(parsed.device if parsed.distributed is None else "cpu")
    image = open_volumes(parsed.image, parsed.level, spacing=cli.spacing_of_axes(parsed))
    vertices, triangles = load_mesh(parsed.input, parsed.unit)
    result = voxelize_onto_image(
        vertices + np.asarray(parsed.shift[::-1]), triangles, image, parsed.output, label=parsed.label,
        fill_holes=parsed.fill_holes, levels=parsed.levels, backend=backend, overwrite=parsed.overwrite,
        codec=parsed.codec, distributed=parsed.distributed, device=command.device,
    )  # fmt: skip
    kind = "watertight" if result.watertight else "not watertight"
    command.close(
        f"{len(triangles)} triangles, {kind}: {result.voxels} voxels, {result.volume_um3 / 1e9:.4g} mm³",
        nbytes=result.nbytes,
    )


main = cli.Command(
    "linum-voxelize", __doc__, _voxelize,
    cli.Option("input", type=Path, metavar="MESH", help="File with triangles."),
    cli.Option("image", type=cli.path_or_url, metavar="IMAGE", help="OME-Zarr image with the grid."),
    cli.Option("output", type=cli.path_or_url, metavar="OUTPUT", help="OME-Zarr label image to write."),
    cli.Option(
        "--unit", choices=("nm", "um", "mm", "cm", "m"), help="Unit of the mesh's coordinates. [as the file says]"
    ),
    cli.Option(
        "--shift", type=float, nargs=3, default=(0.0, 0.0, 0.0), metavar=("Z", "Y", "X"),
        help="Shift of the mesh's coordinates in µm. [0 0 0]",
    ),
    cli.Option("--label", type=int, default=1, metavar="N", help="Value inside, from 1 on. [%(default)s]"),
    cli.Option(
        "--fill-holes", action=argparse.BooleanOptionalAction, default=True,
        help="Fill a mesh that is not watertight. [on]",
    ),
    cli.Option("--level", type=int, default=0, help="Resolution level of IMAGE; 0 is the finest. [0]"),
    *cli.shared("levels", "codec", "spacing", *cli.TILES, codec="zstd"),
)  # fmt: skip
