"""Estimate the beam, the background and the attenuation that all slices of an OCT brain share.

A beam outside of its focus darkens tissue as its attenuation does, so they cannot be told from each other in one mean
profile. This command compares parts of all slices, and the same tissue at two depths where neighbouring slices overlap.
It writes a focus and a Rayleigh length if the slices agree on them, otherwise none, and says so. Reads a folder of
OME-Zarr volumes of linear intensity with axes z, y and x, numbered from the top down, such as slice_z00.ome.zarr, and
writes a JSON file for linum-compensate-attenuation --beam.

For example:
  linum-estimate-beam stitched/ beam.json --slicing-interval-mm 0.2
  linum-estimate-beam stitched/ beam.json --focus 120 --rayleigh 300
"""

from pathlib import Path

from linumpy import cli
from linumpy.mosaic.options import AttenuationMethod


def _estimate(parsed: cli.Namespace) -> None:
    from linumpy.mosaic.beam import estimate_brain_light
    from linumpy.mosaic.io.slice_table import find_slices

    command = cli.TileCommand(parsed)
    slices, interval = find_slices(parsed.input), parsed.slicing_interval_mm
    light = estimate_brain_light(
        slices, parsed.output, cli.record_of(parsed, AttenuationMethod),
        interval_um=None if interval is None else 1e3 * interval, **command.parameters(),
    )  # fmt: skip
    command.close(light.described(), what=f"{len(slices)} slices")


main = cli.Command(
    "linum-estimate-beam", __doc__, _estimate,
    cli.Option("input", type=Path, metavar="FOLDER", help="Folder of the slices."),
    cli.Option("output", type=Path, metavar="OUTPUT", help="JSON file to write."),
    cli.Option(
        "--slicing-interval-mm", type=float, metavar="MM",
        help="Thickness cut off between slices; with it, tissue that slices share helps to tell the beam. [unknown]",
    ),
    *cli.options_of(AttenuationMethod, "light"),
    *cli.shared(*cli.VOLUME, "device", "overwrite"),
)  # fmt: skip
