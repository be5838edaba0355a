"""Register the slices of a stack against each other, and solve for the transforms of all slices.

FOLDER holds the slices as OME-Zarr with axes z, y, x, numbered from the top down: by the digits after a z in the name
(slice_z03.ome.zarr), or else by the last digits. Each slice is compared with the next ones by projections of the planes
that show the same tissue, counted from the cut surfaces. Translation and rotation are searched by masked correlation,
then refined to fractions of a voxel, all pairs at once. The evidence of a pair is the probability that it is right:
from the scores of the wrong transforms that were searched, and its agreement with the other pairs and the motor. A
least-squares solution over the pairs with enough evidence gives the transforms, which are written to OUTPUT (JSON)
with the evidence of each pair and why it is rejected, if it is. A slice without a pair is placed by its neighbours and
the motor's shifts, with a warning. linum-stack-slices makes the stack.

For example:
  linum-register-pairwise slices transforms.json --slicing-interval-mm 0.2
  linum-register-pairwise slices transforms.json --slicing-interval-mm 0.2 --shifts shifts.csv --scene
"""

from pathlib import Path

from linumpy import cli
from linumpy.mosaic.options import Alignment


def _register(parsed: cli.Namespace) -> None:
    from linumpy.mosaic.alignment.register import register_slices
    from linumpy.mosaic.alignment.transforms import check_scene, write_scene

    command, alignment = cli.TileCommand(parsed), cli.record_of(parsed, Alignment)
    if parsed.scene:
        check_scene(parsed.input, overwrite=parsed.overwrite)
    transforms = register_slices(
        parsed.input, parsed.output, alignment, shifts=parsed.shifts, slice_config=parsed.slice_config,
        **command.parameters(),
    )  # fmt: skip
    if parsed.scene:
        cli.say(f"scene in {write_scene(parsed.input, transforms, overwrite=parsed.overwrite)}")
    rows = (
        f"{pair.fixed_id:5d} {pair.moving_id:6d} {pair.evidence:9.3f} {pair.correlation:12.3f} "
        f"{pair.error_um:9.2f} {pair.residual_um:12.2f}  {pair.rejected}".rstrip()
        for pair in transforms.pairs
    )
    title = "fixed moving  evidence  correlation  error µm  residual µm  rejected"
    command.close(title, *rows, what=f"{len(transforms.slices)} slices")


main = cli.Command(
    "linum-register-pairwise", __doc__, _register,
    cli.Option("input", type=Path, metavar="FOLDER", help="Folder of the slices."),
    cli.Option("output", type=Path, metavar="OUTPUT", help="JSON file to write."),
    *cli.options_of(Alignment),
    *cli.shared("shifts", "slice_config"),
    cli.Option(
        "--scene", action="store_true",
        help="Also write the transforms to FOLDER/zarr.json: a scene of NGFF 0.6 with the coordinate system 'stack'.",
    ),
    *cli.shared(*cli.VOLUME, *cli.TILES),
)  # fmt: skip
