#!/usr/bin/env python3
"""Resample an OME-Zarr image of any size to another voxel spacing, or onto the grid of another image.

Reads an OME-Zarr image with two or three axes of space block by block, each time and channel separately, and writes
another of the same dtype. Its extent is divided into the nearest whole number of voxels, to which the spacing in its
metadata is adapted. Axes that get coarser are smoothed first, unless --no-anti_aliasing is given; --order 0 takes the
nearest voxel, for labels, and never smooths.

With --like the output has the grid of another image: shape, spacing, position, resolutions. The images meet in µm, or,
in NGFF 0.6, through the transformations of a scene that both are in, or of the system --coordinate-system: rotations,
affine maps, and fields of displacements or coordinates. With --resolution and --coordinate-system the output lies in
that system.

Units, times, channels, names and attributes of other programs are copied, and labels inside the image are resampled
with it, by their nearest voxels; a warning lists what is not copied.

With --cluster, workers of dask make the blocks; they must see both paths. Start `dask scheduler` on one machine, and
`dask worker tcp://THAT:8786` on each that works.

A stopped run leaves its complete blocks in .OUTPUT.unfinished beside the output; the same command continues from them.

For example:
  linum-resample brain.ome.zarr brain_25um.ome.zarr --resolution 25
  linum-resample brain.ome.zarr out.ome.zarr --resolution 10 5 5 --level 1 --levels 4
  linum-resample brain.ome.zarr in_atlas.ome.zarr --like atlas.ome.zarr --coordinate-system atlas
  linum-resample labels.ome.zarr labels_25um.ome.zarr --resolution 25 --order 0
  linum-resample /data/brain.ome.zarr /data/brain_25um.ome.zarr --resolution 25 --cluster tcp://head:8786
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-resample", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=cli.source, metavar="INPUT", help="OME-Zarr image.")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="OME-Zarr image to write.")
    parser.add_argument(
        "--resolution", type=float, nargs="+", metavar="UM",
        help="New voxel spacing in µm: one number, or one for each axis in their order (z, y, x).",
    )  # fmt: skip
    parser.add_argument(
        "--like", type=cli.source, metavar="OTHER", help="Another OME-Zarr image, whose grid the output takes."
    )
    parser.add_argument(
        "--coordinate-system", "--coordinate_system", metavar="NAME",
        help="The coordinate system in which the images meet, or in which the output lies.",
    )  # fmt: skip
    parser.add_argument("--level", type=int, default=0, help="Resolution level to read; 0 is the finest. [0]")
    cli.add_levels_argument(parser, "1; with --like, as it has")
    cli.add_codec_argument(parser)
    parser.add_argument(
        "--order", type=int, default=1, metavar="N",
        help="Order of the spline: 0 nearest, for labels; 1 linear; 3 cubic; up to 5. [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--anti_aliasing", action=argparse.BooleanOptionalAction, default=True,
        help="Smooth axes that get coarser, against aliasing. [on]",
    )  # fmt: skip
    parser.add_argument(
        "--device_memory", type=float, metavar="GIB",
        help="Memory of the blocks in the pipeline, on the GPU or the host. [80 %% of the free; on the CPU at most 8]",
    )  # fmt: skip
    parser.add_argument(
        "--labels", choices=("resample", "drop"), default="resample",
        help="Resample the labels inside the image too, or drop them. [%(default)s]",
    )  # fmt: skip
    parser.add_argument("--ngff_version", choices=("0.6", "0.5", "0.4"), help="NGFF of the output. [as the input]")
    cli.add_cluster_argument(parser)
    parser.add_argument(
        "--devices", type=_devices, metavar="all|N,N",
        help="Make blocks on several GPUs of this machine: all, or their numbers, such as 0,1. [one]",
    )  # fmt: skip
    cli.add_volume_arguments(parser, all_of_them=True)
    cli.add_gpu_arguments(parser)
    cli.add_common_arguments(parser)
    return parser


def _devices(text: str) -> str | list[int]:
    """Parse ``--devices``."""
    if text == "all":
        return text
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: pass all, or numbers of CUDA devices such as 0,1") from None


def _resample(parsed: argparse.Namespace) -> None:
    from linumpy.io.volume import open_volumes
    from linumpy.resample.resample_zarr import resample_zarr

    wanted = parsed.resolution
    if (wanted is None) == (parsed.like is None):
        raise ValueError("pass one of --resolution and --like")
    if wanted is not None and len(wanted) == 1:
        wanted = wanted[0]
    begin = time.perf_counter()
    if parsed.devices is None:
        device, where = cli.device_and_name(parsed)
    elif parsed.use_gpu is False:
        raise ValueError("--devices are GPUs: not together with --no-use_gpu")
    else:
        device, where = "cuda", "several GPUs"
    memory = None if parsed.device_memory is None else cli.gib(parsed.device_memory)
    chosen = cli.volume_options(parsed)
    # By the names of axes, so that an image of y and x takes two of them.
    chosen["spacing"] = parsed.spacing and dict(zip("zyx", parsed.spacing, strict=True))
    resample_zarr(
        parsed.input, parsed.output, wanted, order=parsed.order, anti_aliasing=parsed.anti_aliasing,
        level=parsed.level, levels=parsed.levels, device=device, device_memory=memory,
        overwrite=parsed.overwrite, codec=parsed.codec, channel=parsed.channel, time=parsed.time,
        spacing=chosen["spacing"], labels=parsed.labels, like=parsed.like, coordinate_system=parsed.coordinate_system,
        distributed=parsed.distributed, devices=parsed.devices, ngff_version=parsed.ngff_version,
    )  # fmt: skip
    nbytes = open_volumes(parsed.input, parsed.level, **chosen).nbytes
    print(cli.closing_line(parsed.input, parsed.output, where, time.perf_counter() - begin, nbytes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _resample, arguments)


if __name__ == "__main__":
    sys.exit(main())
