#!/usr/bin/env python3
"""Compensate the attenuation of light along z of an OCT volume, or write its attenuation coefficients.

First divides out the loss of the beam outside of its focus and the fall-off of sensitivity, then computes the
attenuation of every voxel by the depth-resolved model (Vermeer et al., 2014). The background, the focus, the Rayleigh
length and the attenuation below the recorded range are estimated from a part of the volume, unless they are passed;
pass known values of the instrument. Reads an OME-Zarr volume of linear intensity with axes z, y and x, in any order,
and writes another with the same shape and chunks: intensities of the same dtype, or with --coefficients float32 in
1/mm.

For example:
  linum-compensate-attenuation mosaic.ome.zarr even.ome.zarr
  linum-compensate-attenuation mosaic.ome.zarr mu.ome.zarr --coefficients --focus 120 --rayleigh 300 --end 4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-compensate-attenuation", description=__doc__)
    parser.add_argument("input", type=cli.source, metavar="VOLUME", help="OME-Zarr volume.")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="OME-Zarr volume to write.")
    parser.add_argument("--coefficients", action="store_true", help="Write attenuation coefficients in 1/mm.")
    group = parser.add_argument_group("light")
    group.add_argument("--focus", type=float, metavar="UM", help="Depth of the focus along z, in µm. [estimated]")
    group.add_argument("--rayleigh", type=float, metavar="UM", help="Rayleigh length in tissue, in µm. [estimated]")
    group.add_argument(
        "--falloff", type=float, default=0.0, metavar="F",
        help="Fall-off of sensitivity in 1/mm: exp(-(F z)²). [%(default)s]",
    )  # fmt: skip
    group.add_argument(
        "--end", type=float, metavar="MU",
        help="Attenuation below the recorded range in 1/mm; 0 for no light from there. [estimated]",
    )  # fmt: skip
    group.add_argument(
        "--background", type=float, metavar="I", help="Intensity without light. [estimated from speckle]"
    )
    group.add_argument(
        "--max_gain", type=float, default=100.0, metavar="G", help="Maximum factor of compensation. [%(default)s]"
    )
    cli.add_image_arguments(parser)
    return parser


def _compensate(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.attenuation import AttenuationMethod, compensate_attenuation

    command = cli.TileCommand.start(parsed)
    nbytes = command.input_nbytes()
    method = AttenuationMethod(
        parsed.focus, parsed.rayleigh, parsed.falloff, parsed.end, parsed.background, parsed.max_gain
    )
    with command.progress("attenuation", nbytes) as shared:
        used = compensate_attenuation(parsed.input, parsed.output, method, coefficients=parsed.coefficients, **shared)
    print(
        f"background {used.background:.4g}, focus at {used.beam.focus_um:.4g} µm, Rayleigh length "
        f"{used.beam.rayleigh_um:.4g} µm, attenuation below the range {used.end_per_mm:.3g} per mm"
    )
    command.close(nbytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _compensate, arguments)


if __name__ == "__main__":
    sys.exit(main())
