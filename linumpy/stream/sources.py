"""Arrays that samples name: a path and a level → :class:`~linumpy.stream.plan.ArrayInfo`, kept for the next sample."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import zarr

from linumpy.errors import MetadataError
from linumpy.io.layout import read_layout
from linumpy.io.ome import open_image
from linumpy.io.source import open_node, open_source
from linumpy.stream.config import Config, Sample
from linumpy.stream.errors import InvalidArgument
from linumpy.stream.plan import ArrayInfo

Key = tuple[str, int]


class Sources:
    """The arrays of a pipeline, opened by threads ahead of their use.

    Parameters
    ----------
    config : Config
        ``n_zarrs_meta_cache`` arrays are kept, ``n_io_threads`` open them; limits of chunks and elements.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.pool = ThreadPoolExecutor(config.n_io_threads, "linumpy-stream-open")
        self._kept: OrderedDict[Key, Future[ArrayInfo]] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    def request(self, sample: Sample) -> list[Future[ArrayInfo]]:
        """Begin to open the arrays of a sample, one for each part."""
        return [self._get((part.uri or sample.uri, part.level)) for part in sample.all_parts()]

    def _get(self, key: Key) -> Future[ArrayInfo]:
        with self._lock:
            found = self._kept.get(key)
            if found is not None and not (found.done() and found.exception()):
                self._kept.move_to_end(key)
                self.hits += 1
                return found
            self.misses += 1
            opened = self.pool.submit(open_info, key[0], key[1], self._config)
            self._kept[key] = opened
            while len(self._kept) > self._config.n_zarrs_meta_cache:
                self._kept.popitem(last=False)
            return opened

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        self._kept.clear()


def open_info(uri: str, level: int, config: Config) -> ArrayInfo:
    """Open an array, or a level of an OME-Zarr image, and check it against the limits of the configuration.

    Raises
    ------
    InvalidArgument
        Its chunks or elements exceed the limits.
    FileNotFoundError, SourceError, ValueError
        See :func:`linumpy.io.source.open_source`.
    """
    node = open_node(uri)
    if isinstance(node, zarr.Array):
        array = open_source(node, level)
        space = min(array.ndim, 3)
        spacing = None if config.spacing is None else _fitting(config.spacing, space, uri)
        info = _info(array, uri, space, spacing, (1.0,) * array.ndim)
    else:
        info = _image_info(node, uri, level, config)
    most = config.max_bytes_per_element
    if 0 < most < info.dtype.itemsize:
        raise InvalidArgument(f"{uri} holds {info.dtype}, more than max_bytes_per_element={most}")
    nbytes = info.dtype.itemsize
    for n in info.chunk_shape:
        nbytes *= n
    if 0 < config.max_chunk_uncompressed_bytes < nbytes:
        raise InvalidArgument(
            f"{uri} has chunks of {nbytes} bytes, more than "
            f"max_chunk_uncompressed_bytes={config.max_chunk_uncompressed_bytes}"
        )
    return info


def _image_info(group: zarr.Group, uri: str, level: int, config: Config) -> ArrayInfo:
    try:
        image = open_image(group, spacing=config.spacing)
    except MetadataError:  # axes or units are missing: crops need neither, and augmentation says so
        array, finest = open_source(group, level), open_source(group, 0)
        factors = tuple(float(round(a / b)) for a, b in zip(finest.shape, array.shape, strict=True))
        return _info(array, uri, min(array.ndim, 3), None, factors)
    array = open_source(group, level)
    axes = image.spatial_axes
    if axes != tuple(range(array.ndim - len(axes), array.ndim)):
        raise InvalidArgument(f"{uri}: axes of space must be the last ones (they are {axes} of {array.ndim})")
    ratios = [there / here for there, here in zip(image.spacing[level], image.spacing[0], strict=True)]
    factors = (1.0,) * (array.ndim - len(axes)) + tuple(round(r) if abs(r - round(r)) < 1e-6 else r for r in ratios)
    return _info(array, uri, len(axes), image.spacing[level], factors)


def _info(
    array: zarr.Array, uri: str, space: int, spacing: Sequence[float] | None, factors: tuple[float, ...]
) -> ArrayInfo:
    if array.ndim == 0:
        raise InvalidArgument(f"{uri} has no axes to crop")
    layout = read_layout(array)
    known: Any = None if spacing is None else tuple(spacing)
    return ArrayInfo(
        array, uri, tuple(array.shape), layout.chunk_shape, layout.object_shape, array.dtype.newbyteorder("="),
        space, known, factors, layout.unsupported,
    )  # fmt: skip


def _fitting(spacing: tuple[float, ...], space: int, uri: str) -> tuple[float, ...]:
    if len(spacing) != space:
        raise InvalidArgument(f"spacing has {len(spacing)} numbers, {uri} has {space} axes of space")
    return spacing
