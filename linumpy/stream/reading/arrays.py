"""Arrays that samples name: path or URL, level → :class:`~linumpy.stream.planning.records.ArrayInfo`.

:class:`Sources` opens them ahead, by threads, and keeps them while their metadata files are unchanged. Coordinates of
voxels come from OME-Zarr metadata. Where the metadata lack them, the user may pass them.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import zarr

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
from linumpy.stream.planning.alignment import Grid, is_own
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


#: Maximum number of arrays that are kept, for all pipelines together.
_MAX_OPENED = 2048
#: Local arrays that pipelines have opened, the least recently used first. A dict's own methods need no lock: if two
#: threads look for an array at the same time, one of them may have to open it again.
OPENED: dict[Key, ArrayInfo] = {}


def opened_before(key: Key) -> ArrayInfo | None:
    """Return an array in the state in which it was opened; None where it is not kept."""
    info = OPENED.pop(key, None)
    if info is not None:
        OPENED[key] = info
    return info


def open_info(key: Key, config: Config) -> ArrayInfo:
    """Return an array, as in :data:`OPENED` or opened now, and check it against the limits of the configuration."""
    info = opened_before(key)
    if info is None:
        info = _opened(key, config.storage_options)
        if info.look is not None and info.source.unsupported is None:  # its metadata files can be checked
            OPENED[key] = info
            for oldest in list(OPENED)[:-_MAX_OPENED]:
                OPENED.pop(oldest, None)
    limit = config.max_bytes_per_element
    if 0 < limit < info.dtype.itemsize:
        raise InvalidArgument(f"{key.uri} holds {info.dtype}, more than max_bytes_per_element={limit}")
    nbytes = math.prod(info.chunk_shape) * info.dtype.itemsize
    if 0 < config.max_chunk_uncompressed_bytes < nbytes:
        raise InvalidArgument(
            f"{key.uri} has chunks of {nbytes} bytes, more than "
            f"max_chunk_uncompressed_bytes={config.max_chunk_uncompressed_bytes}"
        )
    return info


def _opened(key: Key, options: Mapping[str, object] | None) -> ArrayInfo:
    uri, level = key.uri, key.level
    is_local = local_name(uri) is not None
    look = MetadataLook.at(uri) if is_local else None
    layout = LAYOUTS.get(uri, level) if is_local else None  # None where the metadata files have changed
    if layout is not None and layout.unsupported is None and layout.root == uri:
        return _info(layout, _plain_grid(key, layout.shape), look)
    if isinstance(node := open_node(uri if is_local else with_options(uri, options)), zarr.Array):
        array = open_source(node, level)
        return _info(read_layout(array), _plain_grid(key, array.shape), look)
    return _image_info(node, key)


def _image_info(group: zarr.Group, key: Key) -> ArrayInfo:
    look, image, missing = None, None, ""
    if (path := local_name(key.uri)) is not None:
        arrays = [open_level(group, level) for level in {key.level, 0}]
        folders: dict[str, None] = {}  # from the image down to its arrays
        for array in arrays:
            below = Path(local_path(array)).relative_to(path).parts
            folders.update((str(Path(path, *below[:n])), None) for n in range(len(below) + 1))
        look = MetadataLook.at(*folders)
        reopened = open_node(key.uri)  # after `look` has recorded the state of the metadata files
        if isinstance(reopened, zarr.Array):
            raise SourceError(f"{key.uri} was replaced while it was being opened")
        group = reopened
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
    return _info(read_layout(array), grid, look)


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


def _info(layout: ArrayLayout, grid: Grid, look: MetadataLook | None) -> ArrayInfo:
    if layout.rank == 0:
        raise InvalidArgument(f"{grid.name} has no axes to crop")
    return ArrayInfo(
        source=layout,
        name=grid.name,
        shape=layout.shape,
        chunk_shape=layout.chunk_shape,
        dtype=layout.dtype,
        grid=grid,
        look=look,
    )


class ArrayRequest(NamedTuple):
    """An array that a sample needs: open, or being opened."""

    key: Key
    opened: Future[ArrayInfo] | ArrayInfo
    is_shared: bool = False  # whether another sample requested the array before

    @property
    def is_open(self) -> bool:
        """Whether the array is not still being opened."""
        return isinstance(self.opened, ArrayInfo) or self.opened.done()


class Sources:
    """The arrays of a pipeline, opened by threads ahead of their use."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.pool = ThreadPoolExecutor(config.n_io_threads, "linumpy-stream-open")
        self._kept: OrderedDict[Key, Future[ArrayInfo] | ArrayInfo] = OrderedDict()
        self._lock = threading.Lock()
        #: Address, level and folder of the last sample, and its requests if its array was open: the next is often so.
        self._last: tuple[tuple[str, int, str], list[ArrayRequest]] | None = None
        self.hits = self.misses = 0  # requests for kept arrays; requests for others, and arrays opened again

    def request(self, sample: Sample, folder: str) -> list[ArrayRequest]:
        """Request the arrays of a sample, one for each part; threads start to open arrays that are not kept.

        An error, such as of a path, is returned as a single request, which raises the error. Relative paths start from
        `folder`.
        """
        last, place = self._last, (sample.uri, sample.level, folder)
        if last is not None and last[0] == place and not sample.parts:
            with self._lock:
                self.hits += 1
            return last[1]
        try:
            keys = [Key(located(sample.uri, folder), sample.level, self._config.spacing, self._config.origin)]
            for part in sample.parts:
                if is_own(sample, part):
                    keys.append(keys[0]._replace(level=part.level))
                else:
                    keys.append(Key(located(part.uri or sample.uri, folder), part.level, part.spacing, part.origin))
            requests = [self._get(key) for key in keys]
            if len(requests) == 1 and requests[0].is_shared and isinstance(requests[0].opened, ArrayInfo):
                self._last = place, requests
            return requests
        except Exception as error:
            failed: Future[ArrayInfo] = Future()
            failed.set_exception(error)
            return [ArrayRequest(Key(sample.uri, sample.level), failed)]

    def _get(self, key: Key) -> ArrayRequest:
        with self._lock:
            kept = self._kept.get(key)
            if isinstance(kept, Future) and kept.done():
                kept = None if kept.exception() else kept.result()
            is_shared = kept is not None
            self.hits += is_shared
            self.misses += not is_shared
            if kept is None and opened_before(key) is None:
                kept = self.pool.submit(open_info, key, self._config)
            elif kept is None:  # faster here than in a thread
                kept = open_info(key, self._config)
            self._keep(key, kept)
            return ArrayRequest(key, kept, is_shared)

    def _keep(self, key: Key, opened: Future[ArrayInfo] | ArrayInfo) -> None:
        self._kept[key], self._last = opened, None
        self._kept.move_to_end(key)
        while len(self._kept) > self._config.n_zarrs_meta_cache:
            self._kept.popitem(last=False)

    def wait_for(
        self,
        requests: Sequence[ArrayRequest],
        checked: dict[Key, ArrayInfo],
        is_current: Callable[[ArrayInfo], bool],
    ) -> list[ArrayInfo]:
        """Wait for requested arrays, and open again those that are not current, because they were rewritten.

        Arrays in `checked` are not checked again; the arrays of `requests` are added to it.
        """
        infos = []
        for request in requests:
            info = checked.get(request.key)
            if info is None:
                info = checked[request.key] = self._wait_for_one(request, is_current)
            infos.append(info)
        return infos

    def _wait_for_one(self, request: ArrayRequest, is_current: Callable[[ArrayInfo], bool]) -> ArrayInfo:
        opened = request.opened
        try:
            info = opened if isinstance(opened, ArrayInfo) else opened.result()
            if is_current(info):
                return info
        except Exception:
            if not request.is_shared:
                raise  # else open it again: an array that was missing for an earlier sample may exist now
        OPENED.pop(request.key, None)
        info = open_info(request.key, self._config)
        with self._lock:
            self.misses += 1
            self._keep(request.key, info)
        return info

    def close(self) -> None:
        """Stop the threads, and forget all arrays."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        self._kept.clear()
