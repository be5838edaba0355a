"""Code that all commands share: options, the frame of a program, and its last line."""

from argparse import Namespace

from linumpy.cli.options import (
    IMAGE,
    TILES,
    VOLUME,
    Option,
    device_and_name,
    memory_bytes,
    new_spacing,
    options_of,
    path_or_url,
    paths,
    record_of,
    shared,
    spacing_of_axes,
    volume_options,
)
from linumpy.cli.program import Command, Parser
from linumpy.cli.tiles import TileCommand, closing_line, size_text
from linumpy.progress import say

__all__ = [
    "IMAGE", "TILES", "VOLUME", "Command", "Namespace", "Option", "Parser", "TileCommand", "closing_line",
    "device_and_name", "memory_bytes", "new_spacing", "options_of", "path_or_url", "paths", "record_of",
    "say", "shared", "size_text", "spacing_of_axes", "volume_options",
]  # fmt: skip
