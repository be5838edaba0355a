"""Code that all commands share: options, the frame of a program, and its last line."""

from linumpy.cli.options import (
    add_cluster_argument,
    add_codec_argument,
    add_common_arguments,
    add_gpu_arguments,
    add_illumination_arguments,
    add_image_arguments,
    add_levels_argument,
    add_light_arguments,
    add_memory_argument,
    add_slice_config_argument,
    add_spacing_argument,
    add_surface_arguments,
    add_tile_arguments,
    add_tile_shape_argument,
    add_volume_arguments,
    choose_device,
    device_and_name,
    illumination_options,
    light_options,
    memory_bytes,
    new_spacing,
    source,
    spacing_of_axes,
    surface_options,
    volume_options,
    wished_device,
)  # fmt: skip
from linumpy.cli.program import EXPECTED, Parser, one_line, run
from linumpy.cli.tiles import TileCommand, closing_line, size_text

__all__ = [
    "EXPECTED", "Parser", "TileCommand", "add_cluster_argument", "add_codec_argument", "add_common_arguments",
    "add_gpu_arguments", "add_illumination_arguments", "add_image_arguments", "add_levels_argument",
    "add_light_arguments", "add_memory_argument", "add_slice_config_argument", "add_spacing_argument",
    "add_surface_arguments", "add_tile_arguments", "add_tile_shape_argument", "add_volume_arguments",
    "choose_device", "closing_line", "device_and_name", "illumination_options", "light_options", "memory_bytes",
    "new_spacing", "one_line", "run", "size_text", "source", "spacing_of_axes", "surface_options",
    "volume_options", "wished_device",
]  # fmt: skip
