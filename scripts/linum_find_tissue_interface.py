"""Find the surface of the tissue in an OCT mosaic.

Reads an OME-Zarr volume with axes z, y and x, in any order, and finds for each A-line where intensity rises most along
z, after a lateral mean. Writes the depth of the surface in µm as an OME-Zarr image (float32; divide by the spacing
along z to get voxels). --overlay draws a picture: a section with the surface, and the map. --time and --channel select
one of several volumes, of which a picture can show only one; by default all are processed.

--definition linumpy returns the voxel ceil(argmax + s_z / 2), about s_z / 2 + 1 voxels below the edge, for every
A-line, also in noise. --definition edge returns the edge itself, to fractions of a voxel, for slopes up to about 3
voxels for each voxel; 0 where tissue begins at or above the first voxel, NaN where there is no tissue, and infinity
where there may be tissue but no surface is found. The picture shows the edge beside the surface where they differ.

Voxels that focal correction filled are replaced by the nearest measured voxels.

For example:
  linum-find-tissue-interface mosaic.ome.zarr surface.ome.zarr
  linum-find-tissue-interface mosaic.ome.zarr surface.ome.zarr --definition edge
  linum-find-tissue-interface mosaic.ome.zarr surface.ome.zarr --overlay surface.png --s-xy 9 --device cuda
"""

from pathlib import Path

from linumpy import cli
from linumpy.mosaic.options import SurfaceMethod


def _find(parsed: cli.Namespace) -> None:
    from linumpy.mosaic.surface import find_mosaic_surface

    command, method = cli.TileCommand(parsed), cli.record_of(parsed, SurfaceMethod)
    command.call("surface", find_mosaic_surface, parsed.input, parsed.output, method, overlay=parsed.overlay)
    command.close()


main = cli.Command(
    "linum-find-tissue-interface", __doc__, _find,
    *cli.paths("OME-Zarr volume.", "OME-Zarr image to write: depth in µm."),
    cli.Option("--overlay", type=Path, metavar="PICTURE", help="Picture to write (.png, .pdf, .svg)."),
    *cli.shared("level", *cli.VOLUME, channel="all", time="all"),
    *cli.options_of(SurfaceMethod, "surface detection"),
    *cli.shared("codec", *cli.TILES),
)  # fmt: skip
