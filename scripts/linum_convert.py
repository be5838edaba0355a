"""Store an OME-Zarr image, or a TIFF stack, in other chunks, shards, codecs, or another version of NGFF.

Copies all resolutions, labels and metadata of an image, or any other Zarr group, such as a plate. Blocks are decoded
and encoded on the GPU, if there is one. Voxels stay the same, bit for bit. INPUT may be larger than memory.

INPUT may also be a TIFF file, or a folder of TIFF files of one page each, whose spacing, channels and time step are
read; or, with --spacing, an array of two or three axes.

With --cluster, workers of dask copy the blocks of Zarr arrays; all workers must see both paths.

A stopped run leaves its complete blocks in .OUTPUT.unfinished beside the output; the same command continues from them.

For example:
  linum-convert raw.ome.zarr small.ome.zarr --codec blosc:zstd:bit
  linum-convert brain.ome.zarr sharded.ome.zarr --chunks 64 64 64 --shards 512 512 512 --ngff-version 0.5
  linum-convert brain.ome.zarr training.ome.zarr --for crops:64,256,256
  linum-convert pages/ brain.ome.zarr --spacing 5 2 2 --levels 4
"""

import argparse
from contextlib import suppress

from linumpy import cli
from linumpy.errors import LinumpyError


def _crops(text: str) -> tuple[int, ...]:
    kind, _, sizes = text.partition(":")
    if kind != "crops" or not all(size.isdecimal() and int(size) for size in sizes.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: pass crops: and voxels of a crop, such as crops:64,256,256")
    return tuple(map(int, sizes.split(",")))


def _convert(parsed: cli.Namespace) -> None:
    from linumpy.io.source import sizes_of
    from linumpy.resample.convert_zarr import convert_zarr

    command = cli.TileCommand(parsed)
    if parsed.crop is not None:
        with suppress(LinumpyError, OSError):  # a TIFF stack or a plate is no array
            _print_cost(parsed.input, parsed.crop)
    convert_zarr(
        parsed.input, parsed.output, codec=parsed.codec, chunks=parsed.chunks, shards=parsed.shards, crop=parsed.crop,
        ngff_version=parsed.ngff_version, spacing=parsed.spacing, levels=parsed.levels,
        downsampling=parsed.downsampling, missing=parsed.missing,
        device=command.device, memory_bytes=cli.memory_bytes(parsed), overwrite=parsed.overwrite,
        distributed=parsed.distributed,
    )  # fmt: skip
    command.close(nbytes=sizes_of(parsed.output)[0])


def _print_cost(source: object, crop: tuple[int, ...]) -> None:
    """Print what crops of an array cost, and with the chunks that are proposed."""
    from linumpy.io.layout import read_layout, stored_chunks
    from linumpy.io.open import open_source
    from linumpy.plan.crops import crop_cost, table

    array = open_source(source)
    crop = (1,) * (array.ndim - len(crop)) + tuple(map(min, crop, array.shape[-len(crop) :]))
    cli.say(table([crop_cost(read_layout(array), crop, stored_chunks(array))]))


_SIZES = "along the axes of space; 1 along the others."
main = cli.Command(
    "linum-convert", __doc__, _convert,
    *cli.paths("OME-Zarr image, array, or TIFF.", "OME-Zarr image to write."),
    *cli.shared("codec", codec="as the input's; of TIFF zstd"),
    cli.Option("--chunks", type=int, nargs="+", metavar="N", help=f"Chunks {_SIZES} [as the input's]"),
    cli.Option(
        "--shards", type=int, nargs="+", metavar="N",
        help=f"Shards {_SIZES} [as the input's; with --chunks none]",
    ),
    cli.Option(
        "--for", type=_crops, dest="crop", metavar="crops:Z,Y,X",
        help="Choose the chunks, and the shards from NGFF 0.5 on, for which random crops of this shape decode the "
        "fewest bytes; --chunks and --shards precede. What such crops cost is printed before anything is read.",
    ),
    *cli.shared("ngff_version"),
    cli.Option(
        "--spacing", type=float, nargs="+", metavar="UM",
        help="Voxel spacing in µm along z, y, x (or y, x), of an array, or of a TIFF stack. [of TIFF from the file]",
    ),
    cli.Option(
        "--missing", choices=("error", "fill"), default="error",
        help="Planes of a TIFF stack that are in no file are an error, or are written as 0. [%(default)s]",
    ),
    *cli.shared("levels"),
    cli.Option(
        "--downsampling", choices=("mean", "label", "nearest"),
        help="How coarser resolutions are made: means, the most frequent value (for labels), or the first. [mean]",
    ),
    *cli.shared("memory", *cli.TILES),
)  # fmt: skip
