"""Normalise the intensities of an OCT volume between two percentiles.

Maps two percentiles of each plane along z, or of the whole slice, to 0 and 1. Reads an OME-Zarr volume with axes z, y
and x, in any order, and writes another with the same shape and chunks, float32. If the planes of a chunk (with --per
slice: the volume) are small enough, the volume is read once. If they are larger, and always with --cluster, histograms
are counted first, and the volume is read twice.

For example:
  linum-normalize-intensities mosaic.ome.zarr normalised.ome.zarr
  linum-normalize-intensities mosaic.ome.zarr normalised.ome.zarr --percentiles 0.5 99.5 --per slice
"""

from linumpy import cli
from linumpy.mosaic.options import Normalization


def _normalize(parsed: cli.Namespace) -> None:
    from linumpy.mosaic.intensities import normalize_intensities

    command, options = cli.TileCommand(parsed), cli.record_of(parsed, Normalization)
    bounds = command.call(
        "normalisation", normalize_intensities, parsed.input, parsed.output, *parsed.percentiles, options
    )
    low, high = bounds[:, bounds.shape[1] // 2]
    command.close(f"middle plane: {low:.6g} becomes 0, {high:.6g} becomes 1")


main = cli.Command(
    "linum-normalize-intensities", __doc__, _normalize,
    *cli.paths("OME-Zarr volume.", "OME-Zarr volume to write."),
    cli.Option(
        "--percentiles", type=float, nargs=2, default=(1.0, 99.0), metavar=("LOW", "HIGH"),
        help="Percentiles that become 0 and 1. [1 99]",
    ),
    *cli.options_of(Normalization),
    *cli.shared(*cli.IMAGE),
)  # fmt: skip
