"""Open a single array, or a resolution level of an OME-Zarr image, from any kind of source.

In: a source and a level. Out: the ``zarr.Array``, opened read-only. Errors: those of :mod:`linumpy.io.source` and
:mod:`linumpy.io.ome`; ``ValueError`` for a level of a single array; ``TypeError`` for a level that is no integer.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import zarr

from linumpy.io.source import Source, describe_source, open_node, with_options


def open_source(source: Source, level: int = 0, storage_options: Mapping[str, Any] | None = None) -> zarr.Array:
    """Open an array.

    - `source`: an array, or an OME-Zarr image (NGFF 0.4 to 0.6), of which `level` selects a resolution.
    - `level`: resolution level of an OME-Zarr image; 0 is the finest.
    - `storage_options`: options for a URL; see :func:`linumpy.io.source.with_options`.

    Returns the array. An array that the caller passes is returned unchanged, unless :mod:`linumpy.io.metadata` corrects
    its metadata.

    Raises `FileNotFoundError`: the path does not exist.
    Raises `SourceError`: the source is neither an array nor an OME-Zarr image, or has no such level.
    Raises `MetadataError`: the shape or chunks of the array are impossible, or the list of levels cannot be read.
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
