"""Say what crops of arrays cost before any chunk is read, and propose chunks and shards.

A chunk is read and decoded whole, so that small crops of large chunks cost many times their size. For each array and
each shape of a crop the table has the bytes that are fetched and decoded for each byte of a crop at a random position;
the same for each byte of the array by a grid of crops without overlap, without a cache; and the bytes that are fetched
if a cache keeps the chunks that several crops touch. Fetched bytes follow from the sizes of some chunks, or from the
index of a shard. Better chunks, of at least 64 KiB, are proposed if they save more than a tenth; linum-convert --for
writes them.

For example:
  linum-stream-info brain.ome.zarr --crop 128 128 128
  linum-stream-info a.zarr b.zarr --crop 64 256 256 --crop 32 32 32
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

from linumpy import cli


def _print(arguments: cli.Namespace) -> None:
    from linumpy.io.layout import read_layout, stored_chunks
    from linumpy.io.open import open_source
    from linumpy.plan.crops import crop_cost, table

    rows = []
    for path in arguments.arrays:
        array = open_source(path, arguments.level)
        layout, stored = replace(read_layout(array), name=str(path)), stored_chunks(array)
        rows += [crop_cost(layout, crop, stored) for crop in arguments.crop]
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


main = cli.Command(
    "linum-stream-info", __doc__, _print,
    cli.Option("arrays", nargs="+", type=cli.path_or_url, metavar="ARRAY", help="Zarr arrays or OME-Zarr images."),
    cli.Option(
        "--crop", nargs="+", type=int, action="append", required=True, metavar="N",
        help="Voxels of a crop along each axis; may be given several times.",
    ),
    *cli.shared("level"),
    cli.Option("--json", type=Path, metavar="FILE", help="Also write the table to this file."),
)  # fmt: skip
