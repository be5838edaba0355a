"""Stack OCT slices into one volume by their transforms, each voxel resampled once.

FOLDER holds the slices as OME-Zarr with axes z, y, x, numbered from the top down. TRANSFORMS is the file that
linum-register-pairwise wrote for these slices; slices that it lacks are left out, with a warning. Slices begin at their
cut surface and are blended where they overlap; voxels that are 0, not finite or filled by focal correction are
excluded.

For example:
  linum-stack-slices slices transforms.json stack.ome.zarr --levels 3
  linum-stack-slices slices transforms.json stack.ome.zarr --resolution 25 --device cuda
"""

from pathlib import Path

from linumpy import cli


def _stack(parsed: cli.Namespace) -> None:
    from linumpy.mosaic.alignment.stack import open_stack, stack_registered

    command = cli.TileCommand(parsed)
    steps, new_spacing = parsed.resolution, cli.new_spacing(parsed)
    if steps is not None and len(steps) not in (1, 3):
        raise ValueError(f"--resolution {' '.join(f'{step:g}' for step in steps)}: pass one number, or three")
    images, space = open_stack(parsed.input, parsed.transforms, new_spacing, **cli.volume_options(parsed))
    command.call(
        "stack", stack_registered, parsed.input, parsed.transforms, parsed.output, new_spacing=new_spacing,
        nbytes=space.nbytes,
    )  # fmt: skip
    command.close(nbytes=sum(image.nbytes for image in images))


main = cli.Command(
    "linum-stack-slices", __doc__, _stack,
    cli.Option("input", type=Path, metavar="FOLDER", help="Folder of the slices."),
    cli.Option("transforms", type=Path, metavar="TRANSFORMS", help="JSON file of the transforms."),
    cli.Option("output", type=cli.path_or_url, metavar="OUTPUT", help="OME-Zarr volume to write."),
    cli.Option(
        "--resolution", type=float, nargs="+", metavar="UM",
        help="Voxel spacing of the stack in µm, one number or three (z, y, x). [as the slices]",
    ),
    *cli.shared(*cli.IMAGE),
)  # fmt: skip
