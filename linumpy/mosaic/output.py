"""Write an OME-Zarr image box by box, from the device or the host: the only place where a mosaic leaves the device.

In: what an image is, then its boxes. Out: the image, complete or not at all, with its coarser resolutions. Errors:
those of :class:`linumpy.write.writer.OmeZarrWriter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from linumpy.write.writer import OmeZarrWriter

Write = Callable[[tuple[int | slice, ...], Any], None]
"""Takes a box of the image, whole in storage, and its voxels, on the device or the host, and returns when they are
written."""


@contextmanager
def new_image(
    path: str | Path, shape: Sequence[int], dtype: Any, spacing: Sequence[float], *, n_levels: int = 1, **options: Any
) -> Iterator[tuple[Write, tuple[int, ...]]]:
    """Make an OME-Zarr image whose finest resolution the caller writes.

    Parameters
    ----------
    path, shape, dtype, spacing, n_levels
        As for :class:`linumpy.write.writer.OmeZarrWriter`.
    options
        What else that class takes.

    Yields
    ------
    write : callable
        As :data:`Write` says.
    stored : tuple of int
        What is whole in storage: shards where the image has them, else chunks.
    """
    with OmeZarrWriter(path, shape, dtype, spacing, n_levels=n_levels, **options) as writer:
        yield writer.write, writer.stored
