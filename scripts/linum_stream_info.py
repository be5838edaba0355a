"""Estimate the read amplification of random crops of arrays, and the chunk shape with the least amplification.

A chunk is read and decoded whole, so that small crops of large chunks cost many times their size. For each array and
each crop shape the table has the average number of chunks that a crop touches, and the number of voxels read for each
voxel of the crop. It also has the chunk shape, of at least 64 KiB, that would read least, if that saves more than a
tenth.

For example:
  linum-stream-info brain.ome.zarr --crop 128 128 128
  linum-stream-info a.zarr b.zarr --crop 64 256 256 --crop 32 32 32
"""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from linumpy import cli


def _print(arguments: cli.Namespace) -> None:
    from linumpy.stream.config import Config
    from linumpy.stream.crops.survey import amplification, table
    from linumpy.stream.reading.arrays import Key, located, open_info

    config = Config(batch_size=1, host_buffer_bytes=1 << 20, device_buffer_bytes=1)
    keys = [Key(located(str(path), os.getcwd()), arguments.level) for path in arguments.arrays]
    opened = [replace(open_info(key, config), name=str(path)) for key, path in zip(keys, arguments.arrays, strict=True)]
    rows = [amplification(info, crop) for info in opened for crop in arguments.crop]
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


main = cli.Command(
    "linum-stream-info", __doc__, _print,
    cli.Option("arrays", nargs="+", type=cli.source, metavar="ARRAY", help="Zarr arrays or OME-Zarr images."),
    cli.Option("--crop", nargs="+", type=int, action="append", required=True, metavar="N",
                        help="Voxels of a crop along each axis; may be given several times."),
    cli.Option("--level", type=int, default=0, help="Resolution level of OME-Zarr images. [%(default)s]"),
    cli.Option("--json", type=Path, metavar="FILE", help="Also write the table to this file."),
)  # fmt: skip
