"""Open a single array, or a resolution level of an OME-Zarr image, from any kind of source, read-only."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import zarr

from linumpy.io.source import Source, describe_source, open_node, with_options


def open_source(source: Source, level: int = 0, storage_options: Mapping[str, Any] | None = None) -> zarr.Array:
    """Open an array, or resolution `level` of an OME-Zarr image; 0 is the finest.

    An array that the caller passes is returned unchanged, unless :mod:`linumpy.io.metadata` corrects its metadata.
    """
    level = checked_level(level)
    node = open_node(with_options(source, storage_options))
    if isinstance(node, zarr.Array):
        if level != 0:
            raise ValueError(f"level={level}, but {describe_source(source)} is a single array, which has no levels")
        return node
    from linumpy.io.ome import open_level  # only for images: an array is read without OME metadata

    return open_level(node, level)


def checked_level(level: Any) -> int:
    """Return a resolution level as an int; ``TypeError`` for a bool and for any other type than integers."""
    if isinstance(level, bool) or not hasattr(level, "__index__"):
        raise TypeError(f"level={level!r}: a resolution level is an integer, 0 for the finest")
    return operator.index(level)
