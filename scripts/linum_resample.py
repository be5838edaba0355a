"""Resample an OME-Zarr image of any size to another voxel spacing, or onto the grid of another image.

Reads an OME-Zarr image with two or three axes of space block by block, each time and channel separately, and writes
another of the same dtype. Its extent is divided into the nearest whole number of voxels, to which the spacing in its
metadata is adapted. Axes that get coarser are smoothed first, unless --no-anti-aliasing is given; --order 0 takes the
nearest voxel, for labels, and never smooths.

With --like the output has the grid of another image: shape, spacing, position, resolutions. The images are aligned by
their coordinates in µm. In NGFF 0.6 they may be aligned by the transformations of a scene that contains both, or by
those to the coordinate system --coordinate-system: rotations, affine maps, and fields of displacements or coordinates.
With --resolution and --coordinate-system the output has the coordinates of that system.

Units, times, channels, names and attributes of other programs are copied, and labels inside the image are resampled
with it, by their nearest voxels; a warning lists metadata that are not copied.

With --cluster, workers of dask make the blocks; all workers must see both paths. Start `dask scheduler` on one machine,
and `dask worker tcp://THAT:8786` on each worker.

A stopped run leaves its complete blocks in .OUTPUT.unfinished beside the output; the same command continues from them.

For example:
  linum-resample brain.ome.zarr brain_25um.ome.zarr --resolution 25
  linum-resample brain.ome.zarr out.ome.zarr --resolution 10 5 5 --level 1 --levels 4
  linum-resample brain.ome.zarr in_atlas.ome.zarr --like atlas.ome.zarr --coordinate-system atlas
  linum-resample labels.ome.zarr labels_25um.ome.zarr --resolution 25 --order 0
  linum-resample /data/brain.ome.zarr /data/brain_25um.ome.zarr --resolution 25 --cluster tcp://head:8786
"""

import argparse

from linumpy import cli


def _devices(text: str) -> str | list[int]:
    """Parse ``--devices``."""
    if text == "all":
        return text
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: pass all, or numbers of CUDA devices such as 0,1") from None


def _resample(parsed: argparse.Namespace) -> None:
    from linumpy.io.volume import open_source_volumes
    from linumpy.resample.resample_zarr import resample_zarr

    if (parsed.resolution is None) == (parsed.like is None):
        raise ValueError("pass one of --resolution and --like")
    command = cli.TileCommand(parsed)
    if parsed.devices is not None:
        if parsed.device == "cpu":
            raise ValueError("--devices are GPUs: not together with --device cpu")
        command.device, command.device_name = "cuda", "several GPUs"
    volume = cli.volume_options(parsed) | {"spacing": cli.spacing_of_axes(parsed)}
    nbytes = open_source_volumes(parsed.input, parsed.level, **volume).nbytes
    resample_zarr(
        parsed.input, parsed.output, cli.new_spacing(parsed), order=parsed.order, anti_aliasing=parsed.anti_aliasing,
        level=parsed.level, levels=parsed.levels, device=command.device, memory_bytes=cli.memory_bytes(parsed),
        overwrite=parsed.overwrite, codec=parsed.codec, labels=parsed.labels, like=parsed.like,
        coordinate_system=parsed.coordinate_system, distributed=parsed.distributed, devices=parsed.devices,
        ngff_version=parsed.ngff_version, **volume,
    )  # fmt: skip
    command.close(nbytes=nbytes)


main = cli.Command(
    "linum-resample", __doc__, _resample,
    *cli.paths("OME-Zarr image; or an array, with --spacing.", "OME-Zarr image to write."),
    cli.Option(
        "--resolution", type=float, nargs="+", metavar="UM",
        help="New voxel spacing in µm: one number, or one for each axis in their order (z, y, x).",
    ),
    cli.Option(
        "--like", type=cli.path_or_url, metavar="OTHER", help="Another OME-Zarr image, whose grid the output has."
    ),
    cli.Option(
        "--coordinate-system", metavar="NAME",
        help="Coordinate system by which the images are aligned, or of the output.",
    ),
    *cli.shared("level", "levels", "codec", levels="1; with --like, as many as OTHER has"),
    cli.Option(
        "--order", type=int, metavar="N",
        help="Order of the spline: 0 nearest; 1 linear; 3 cubic; up to 5. [0 for label images, else 1]",
    ),
    cli.Option(
        "--anti-aliasing", action=argparse.BooleanOptionalAction, default=True,
        help="Smooth axes that get coarser, against aliasing. [on]",
    ),
    *cli.shared("memory"),
    cli.Option(
        "--labels", choices=("resample", "drop"), default="resample",
        help="Resample the labels inside the image too, or drop them. [%(default)s]",
    ),
    *cli.shared("ngff_version", "cluster"),
    cli.Option(
        "--devices", type=_devices, metavar="all|N,N",
        help="Make blocks on several GPUs of this machine: all, or their numbers, such as 0,1. [one]",
    ),
    *cli.shared(*cli.VOLUME, "device", "overwrite", channel="all", time="all"),
)  # fmt: skip
