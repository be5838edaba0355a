"""Opens the array that a sample names: path or URL, level → :class:`~linumpy.stream.planning.records.ArrayInfo`.

Coordinates of voxels come from OME-Zarr metadata. Where the metadata lack them, the user may pass them.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import zarr

from linumpy.device import call_after_fork
from linumpy.errors import MetadataError, SourceError
from linumpy.gpu.read.layouts import LAYOUTS
from linumpy.io.layout import read_layout
from linumpy.io.ome import check_level, level_transforms, open_image, open_level
from linumpy.io.open import open_source
from linumpy.io.paths import MetadataLook, absolute
from linumpy.io.source import local_name, local_path, open_node, with_options
from linumpy.plan.layout import ArrayLayout
from linumpy.stream.config import Config, Sample
from linumpy.stream.errors import InvalidArgument
from linumpy.stream.planning.alignment import Grid
from linumpy.stream.planning.records import ArrayInfo

_Lengths = tuple[float, ...] | None


class Key(NamedTuple):
    """Key of an open array: absolute path or URL, level, and the coordinates that the user passes."""

    uri: str
    level: int
    spacing: _Lengths = None
    origin: _Lengths = None


@lru_cache(maxsize=4096)
def located(uri: str, folder: str) -> str:
    """Return the absolute path of an array, where a relative path starts from a folder; return a URL unchanged."""
    path = local_name(uri)
    return uri if path is None else str(absolute(os.path.join(folder, path)))


def with_absolute_paths(sample: Sample) -> Sample:
    """Return a sample whose paths are absolute; relative paths start from the current working folder."""
    folder = os.getcwd()
    parts = tuple(part if part.uri is None else replace(part, uri=located(part.uri, folder)) for part in sample.parts)
    return replace(sample, uri=located(sample.uri, folder), parts=parts)


class OpenedArrays:
    """Local arrays that pipelines have opened. The caller checks whether the metadata files are unchanged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._infos: OrderedDict[Key, ArrayInfo] = OrderedDict()

    def get(self, key: Key) -> ArrayInfo | None:
        """Return an array in the state in which it was opened; None where it is not kept."""
        with self._lock:
            if key in self._infos:
                self._infos.move_to_end(key)
            return self._infos.get(key)

    def keep(self, key: Key, info: ArrayInfo) -> None:
        """Keep an array that the reader supports and whose metadata files can be checked; ignore any other array."""
        if info.look is not None and info.unsupported is None:
            with self._lock:
                self._infos[key] = info
                self._infos.move_to_end(key)
                while len(self._infos) > _MAX_OPENED:
                    self._infos.popitem(last=False)

    def forget(self, key: Key) -> None:
        """Forget an array that was rewritten."""
        with self._lock:
            self._infos.pop(key, None)

    def after_fork(self) -> None:
        """Replace the lock in a child process: the parent may have held it at the fork."""
        self._lock = threading.Lock()


#: Maximum number of arrays that are kept, for all pipelines together.
_MAX_OPENED = 2048
OPENED = OpenedArrays()
call_after_fork(OPENED.after_fork)


def open_info(key: Key, config: Config) -> ArrayInfo:
    """Open an array, or a level of an OME-Zarr image, and check it against the limits of the configuration.

    An array in :data:`OPENED` is returned in the state in which it was opened.

    Raises
    ------
    InvalidArgument
        Chunks or elements exceed the limits; the array has no axes; an axis of space is not among the last axes; or
        the spacing or origin of `key` has another number of axes of space.
    FileNotFoundError, SourceError, ValueError
        See :func:`linumpy.io.open.open_source`.
    """
    info = OPENED.get(key)
    if info is None:
        info = _opened(key, config.storage_options)
        OPENED.keep(key, info)
    _check_limits(info, key.uri, config)
    return info


def _opened(key: Key, options: Mapping[str, object] | None) -> ArrayInfo:
    uri, level = key.uri, key.level
    is_local = local_name(uri) is not None
    look = MetadataLook.at(uri) if is_local else None
    layout = LAYOUTS.get(uri, level) if is_local else None  # None where the metadata files have changed
    if layout is not None and layout.unsupported is None and layout.root == uri:
        return _info(layout, None, _plain_grid(key, layout.shape), look)
    if isinstance(node := open_node(uri if is_local else with_options(uri, options)), zarr.Array):
        array = open_source(node, level)
        return _info(read_layout(array), array, _plain_grid(key, array.shape), look)
    return _image_info(node, key)


def _check_limits(info: ArrayInfo, uri: str, config: Config) -> None:
    limit = config.max_bytes_per_element
    if 0 < limit < info.dtype.itemsize:
        raise InvalidArgument(f"{uri} holds {info.dtype}, more than max_bytes_per_element={limit}")
    nbytes = math.prod(info.chunk_shape) * info.dtype.itemsize
    if 0 < config.max_chunk_uncompressed_bytes < nbytes:
        raise InvalidArgument(
            f"{uri} has chunks of {nbytes} bytes, more than "
            f"max_chunk_uncompressed_bytes={config.max_chunk_uncompressed_bytes}"
        )


def _image_info(group: zarr.Group, key: Key) -> ArrayInfo:
    look, image, missing = None, None, ""
    if (path := local_name(key.uri)) is not None:
        arrays = [open_level(group, level) for level in {key.level, 0}]
        look = MetadataLook.at(*dict.fromkeys(folder for array in arrays for folder in _folders(path, array)))
        group = _reopened(key.uri)  # after `look` has recorded the state of the metadata files
    for spacing in dict.fromkeys((None, key.spacing)):
        try:
            opened = open_image(group, spacing=spacing)
            _ = opened.spacing  # raises MetadataError if the spacing is unknown
            image = opened
            break
        except MetadataError as error:
            missing = missing or str(error)
    if image is None:
        array, finest = (open_level(group, level) for level in (key.level, 0))
        grid = _grid(group, array, finest.shape, key)
        grid = replace(grid, missing=missing)
    else:
        check_level(key.level, len(image.levels), image.name)
        array = image.levels[key.level]
        grid = _grid(group, array, image.levels[0].shape, key)
        origin = image.origin[0] if key.origin is None or not missing else key.origin
        grid = replace(grid, spacing=image.spacing[0], origin=origin)
    return _info(read_layout(array), array, grid, look)


def _reopened(uri: str) -> zarr.Group:
    node = open_node(uri)
    if isinstance(node, zarr.Array):
        raise SourceError(f"{uri} was replaced while it was being opened")
    return node


def _folders(path: str, array: zarr.Array) -> list[str]:
    """List the folders from an image down to one of its arrays."""
    below = Path(local_path(array)).relative_to(path).parts
    return [str(Path(path, *below[:n])) for n in range(len(below) + 1)]


def _grid(group: zarr.Group, array: zarr.Array, finest: tuple[int, ...], key: Key) -> Grid:
    """Return the grid of a level: relative to level 0 by the metadata, and level 0 in the user's coordinates."""
    try:
        axes, scales, translations = level_transforms(group)
    except MetadataError:
        if key.level:
            raise
        return _plain_grid(key, finest)
    space = [number for number, axis in enumerate(axes) if axis.type == "space"]
    if space != list(range(array.ndim - len(space), array.ndim)):
        raise InvalidArgument(f"{key.uri}: axes of space must be the last ones (they are {space} of {array.ndim})")
    names = tuple("c" if axis.type == "channel" else axis.name.lower() for axis in axes)
    lead = array.ndim - len(space)
    levels = list(zip(scales[key.level], translations[key.level], scales[0], translations[0], strict=True))[lead:]
    factors = (1.0,) * lead + tuple(_rounded(scale / finest_scale) for scale, _, finest_scale, _ in levels)
    shifts = (0.0,) * lead + tuple((begin - finest_begin) / scale for _, begin, scale, finest_begin in levels)
    leading = tuple(zip(scales[key.level], translations[key.level], (axis.unit for axis in axes), strict=True))[:lead]
    return Grid(key.uri, names, len(space), finest, factors, shifts, key.spacing, key.origin, lead=leading)


def _plain_grid(key: Key, shape: tuple[int, ...]) -> Grid:
    """Return the grid of an array whose axes have no names, with the user's coordinates, if any."""
    rank, space = len(shape), min(len(shape), 3)
    for name in ("spacing", "origin"):
        given = getattr(key, name)
        if given is not None and len(given) != space:
            raise InvalidArgument(f"{name} has {len(given)} numbers, {key.uri} has {space} axes of space")
    return Grid(key.uri, None, space, shape, (1.0,) * rank, (0.0,) * rank, key.spacing, key.origin)


def _rounded(value: float) -> float:
    """Remove the rounding error of a whole number."""
    return float(round(value)) if abs(value - round(value)) < 1e-6 else value


def _info(layout: ArrayLayout, array: zarr.Array | None, grid: Grid, look: MetadataLook | None) -> ArrayInfo:
    """Describe an array; `array` is needed where the reader does not support the layout."""
    if layout.rank == 0:
        raise InvalidArgument(f"{grid.name} has no axes to crop")
    source: ArrayLayout | zarr.Array = layout
    if layout.unsupported is not None:
        assert array is not None
        source = array
    return ArrayInfo(
        source, grid.name, layout.shape, layout.chunk_shape,
        layout.object_shape, layout.dtype, grid, layout.unsupported, look,
    )  # fmt: skip
