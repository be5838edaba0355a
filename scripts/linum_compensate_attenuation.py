"""Compensate the attenuation of light along z of an OCT volume, or write its attenuation coefficients.

First divides out the loss of the beam outside of its focus and the fall-off of sensitivity, then computes the
attenuation of every voxel by the depth-resolved model (Vermeer et al., 2014). Parameters that are not passed are
estimated: for all slices of a brain by linum-estimate-beam, whose file --beam takes, otherwise from a part of the
volume alone. Tissue at the surface keeps its mean. If the attenuation cannot be told, the intensities are left alone,
with a warning. Reads an OME-Zarr volume of linear intensity with axes z, y and x, in any order, and writes another with
the same shape and chunks: intensities or, with --coefficients, float32 in 1/mm.

For example:
  linum-compensate-attenuation slice.ome.zarr even.ome.zarr --beam beam.json
  linum-compensate-attenuation slice.ome.zarr mu.ome.zarr --coefficients --focus 120 --rayleigh 300 --end 4
"""

from pathlib import Path

from linumpy import cli
from linumpy.mosaic.options import AttenuationMethod


def _compensate(parsed: cli.Namespace) -> None:
    from linumpy.mosaic.attenuation import compensate_attenuation

    command, method = cli.TileCommand(parsed), cli.record_of(parsed, AttenuationMethod)
    used = command.call(
        "attenuation", compensate_attenuation, parsed.input, parsed.output,
        None if method == AttenuationMethod() else method, light=parsed.beam, coefficients=parsed.coefficients,
        dtype=parsed.dtype, report=parsed.json,
    )  # fmt: skip
    command.close(
        used.light.described(),
        f"intensities times {used.gain_at_surface:.3g} at the surface, at most times {used.max_gain:.3g}; "
        f"{100 * used.clipped:.2g} % clipped",
    )


main = cli.Command(
    "linum-compensate-attenuation", __doc__, _compensate,
    *cli.paths("OME-Zarr volume.", "OME-Zarr volume to write."),
    cli.Option("--coefficients", action="store_true", help="Write attenuation coefficients in 1/mm."),
    cli.Option(
        "--beam", type=Path, metavar="JSON",
        help="Parameters of all slices, from linum-estimate-beam, in place of the options of light. [none]",
    ),
    cli.Option(
        "--dtype", choices=("float32", "uint8", "uint16"),
        help="Dtype of intensities; integers clip. [as the input; float32 if more than 0.1 %% would be clipped]",
    ),
    cli.Option("--json", type=Path, metavar="JSON", help="File of the parameters and gains to write. [none]"),
    *cli.options_of(AttenuationMethod, "light"),
    *cli.shared(*cli.IMAGE),
)  # fmt: skip
