#!/usr/bin/env python3
"""Estimate the beam, the background and the attenuation that all slices of an OCT brain share.

A beam outside of its focus darkens tissue as its attenuation does, so they cannot be told from each other in one mean
profile. This command compares parts of all slices, and the same tissue at two depths where neighbouring slices overlap.
It writes a focus and a Rayleigh length if the slices agree on them, otherwise none, and says so. Reads a folder of
OME-Zarr volumes of linear intensity with axes z, y and x, numbered from the top down, such as slice_z00.ome.zarr, and
writes a JSON file for linum-compensate-attenuation --beam.

For example:
  linum-estimate-beam stitched/ beam.json --slicing_interval_mm 0.2
  linum-estimate-beam stitched/ beam.json --focus 120 --rayleigh 300
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-estimate-beam", description=__doc__)
    parser.add_argument("input", type=Path, metavar="FOLDER", help="Folder of the slices.")
    parser.add_argument("output", type=Path, metavar="JSON", help="JSON file to write.")
    parser.add_argument(
        "--slicing_interval_mm", type=float, metavar="MM",
        help="Thickness cut off between slices; with it, tissue that slices share helps to tell the beam. [unknown]",
    )  # fmt: skip
    cli.add_light_arguments(parser)
    cli.add_volume_arguments(parser, all_of_them=False)
    cli.add_gpu_arguments(parser)
    cli.add_common_arguments(parser)
    return parser


def _estimate(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.beam import AttenuationMethod, estimate_brain_light
    from linumpy.mosaic.io.slice_table import find_slices

    use_gpu, begin = cli.choose_device(parsed), time.perf_counter()
    slices, interval = find_slices(parsed.input), parsed.slicing_interval_mm
    light = estimate_brain_light(
        slices, parsed.output, AttenuationMethod(**cli.light_options(parsed)),
        interval_um=None if interval is None else 1e3 * interval, use_gpu=use_gpu, overwrite=parsed.overwrite,
        **cli.volume_options(parsed),
    )  # fmt: skip
    print(light.described())
    if light.estimate.reason:
        print(f"no beam: {light.estimate.reason}")
    seconds = time.perf_counter() - begin
    print(f"{parsed.input} -> {parsed.output} on {'GPU' if use_gpu else 'CPU'}: {len(slices)} slices, {seconds:.2f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _estimate, arguments)


if __name__ == "__main__":
    sys.exit(main())
