"""Code that all commands share: options, the frame of a program, and its last line."""

from argparse import Namespace

from linumpy.cli.options import (
    add_cluster_argument,
    add_codec_argument,
    add_common_arguments,
    add_device_argument,
    add_image_arguments,
    add_level_argument,
    add_levels_argument,
    add_memory_argument,
    add_ngff_argument,
    add_paths,
    add_record,
    add_slice_tables,
    add_spacing_argument,
    add_tile_arguments,
    add_tile_shape_argument,
    add_volume_arguments,
    device_and_name,
    image_output,
    memory_bytes,
    new_spacing,
    record_of,
    source,
    spacing_of_axes,
    values_of,
    volume_options,
)
from linumpy.cli.program import EXPECTED, Command, Parser, one_line, run
from linumpy.cli.tiles import TileCommand, closing_line, size_text

__all__ = [
    "EXPECTED", "Command", "Namespace", "Parser", "TileCommand", "add_cluster_argument", "add_codec_argument",
    "add_common_arguments", "add_device_argument", "add_image_arguments", "add_level_argument", "add_levels_argument",
    "add_memory_argument", "add_ngff_argument", "add_paths", "add_record", "add_slice_tables", "add_spacing_argument",
    "add_tile_arguments", "add_tile_shape_argument", "add_volume_arguments", "closing_line", "device_and_name",
    "image_output", "memory_bytes", "new_spacing", "one_line", "record_of", "run", "size_text", "source",
    "spacing_of_axes", "values_of", "volume_options",
]  # fmt: skip
