"""A codec pipeline with which zarr-python reads arrays by the native core; :func:`accelerate` switches it on.

In: arrays that are opened while it is on. Out: the values that zarr-python reads. zarr passes all chunks of a selection
to its pipeline in one call, and the pipeline submits them to the process's shared reader, which lies in
:mod:`linumpy.gpu.read` and reads into host memory too. The former pipeline does everything else: reads that the core
does not support (other stores, codecs and dtypes, GPU buffers, selections of sharded arrays that are no boxes), all
writes, and all reads that fail, so that errors are zarr's. If the former pipeline accepts a chunk that the core
refused, the core reads it again, and raises its own error if it finds the fault again.

Importing this module registers the pipeline and a fork handler; it does not change zarr's configuration.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import zarr
from zarr.abc.codec import CodecPipeline
from zarr.core.array import create_codec_pipeline
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.registry import get_pipeline_class, register_pipeline
from zarr.storage import LocalStore, ObjectStore, StorePath

from linumpy.core import native
from linumpy.device import call_after_fork
from linumpy.errors import ChunkError
from linumpy.gpu.read.shared import shared_reader
from linumpy.io.layout import read_layout
from linumpy.io.stores.remote import RemoteStore
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.region import Region

if TYPE_CHECKING:
    from zarr.abc.codec import Codec
    from zarr.abc.store import Store
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer, NDBuffer
    from zarr.core.metadata import ArrayMetadata

    from linumpy.gpu.read.reader import Reader

log = logging.getLogger(__name__)

_CONFIG_KEY = "codec_pipeline.path"
#: Classes of stores that the core reads from. Not their subclasses: these may read from another place.
_STORES = (LocalStore, ObjectStore, RemoteStore)
#: Maximum bytes of the chunks of one batch, when a selection that is no box is read as whole chunks.
_CHUNKS_NBYTES = 64 * 2**20

Selection = tuple[Any, ...]
"""An index for each axis, as zarr has it: an int, a slice or an array."""


class ChunkItem(NamedTuple):
    """A chunk of a selection, as zarr passes it to its pipeline."""

    path: StorePath
    spec: ArraySpec
    selection: Selection  # in the chunk
    target: Selection  # in the output
    is_whole: bool


@dataclass(frozen=True)
class LinumpyCodecPipeline(CodecPipeline):
    """Reads selections of arrays in local and object stores by the core, and delegates all other calls.

    - `fallback`: the former pipeline: of the class that was configured before.
    """

    fallback: CodecPipeline
    metadata: ArrayMetadata
    _layouts: dict[str, ArrayLayout] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_array_metadata_and_store(cls, array_metadata: ArrayMetadata, store: Store) -> Self:
        """Make the pipeline of an array."""
        try:
            fallback = _switch.fallback_class.from_array_metadata_and_store(array_metadata=array_metadata, store=store)
        except NotImplementedError:
            fallback = create_codec_pipeline(array_metadata)
        return cls(fallback, array_metadata)

    @classmethod
    def from_codecs(cls, codecs: Iterable[Codec]) -> Any:
        """Make a pipeline of the former class: zarr passes no metadata here, for codecs inside shards."""
        return _switch.fallback_class.from_codecs(codecs)

    def evolve_from_array_spec(self, array_spec: ArraySpec) -> Self:
        """Return the pipeline with codecs that fit a dtype."""
        return replace(self, fallback=self.fallback.evolve_from_array_spec(array_spec))

    @property
    def supports_partial_decode(self) -> bool:
        """Whether parts of a chunk can be decoded."""
        return self.fallback.supports_partial_decode

    @property
    def supports_partial_encode(self) -> bool:
        """Whether parts of a chunk can be encoded."""
        return self.fallback.supports_partial_encode

    def validate(self, **properties: Any) -> None:
        """Check that codecs fit an array."""
        self.fallback.validate(**properties)

    def compute_encoded_size(self, byte_length: int, array_spec: ArraySpec) -> int:
        """Return the size of an encoded chunk."""
        return self.fallback.compute_encoded_size(byte_length, array_spec)

    async def decode(
        self, chunk_bytes_and_specs: Iterable[tuple[Buffer | None, ArraySpec]]
    ) -> Iterable[NDBuffer | None]:
        """Decode chunks."""
        return await self.fallback.decode(chunk_bytes_and_specs)

    async def encode(
        self, chunk_arrays_and_specs: Iterable[tuple[NDBuffer | None, ArraySpec]]
    ) -> Iterable[Buffer | None]:
        """Encode chunks."""
        return await self.fallback.encode(chunk_arrays_and_specs)

    async def write(self, batch_info: Iterable[Any], value: NDBuffer, drop_axes: tuple[int, ...] = ()) -> None:
        """Write chunks."""
        await self.fallback.write(batch_info, value, drop_axes)

    async def read(self, batch_info: Iterable[Any], out: NDBuffer, drop_axes: tuple[int, ...] = ()) -> Any:
        """Read the chunks of a selection into `out`."""
        items = [ChunkItem(*item) for item in batch_info]
        error: Exception | None = None
        layout: ArrayLayout | None = None
        try:
            layout = self._layout_for(items, out)
            # In another thread: this thread runs zarr's event loop.
            if layout is not None and await asyncio.to_thread(self._read_by_core, layout, items, out, drop_axes):
                # zarr inspects the states only with read_missing_chunks=False, which `_layout_for` refuses.
                return ({"status": "present"},) * len(items)
        except Exception as raised:
            error = raised
        try:
            result = await self.fallback.read(items, out, drop_axes)  # type: ignore[func-returns-value]
        except Exception as raised:
            if error is not None:
                raised.add_note(f"linumpy: {error}")
            raise
        if isinstance(error, ChunkError) and layout is not None:
            # zarr-python misses some faults. A fault that the core finds twice is in the data; found once, it may come
            # from a concurrent writer.
            await asyncio.to_thread(self._read_by_core, layout, items, out, drop_axes)
        elif error is not None:
            log.warning(
                "zarr-python read the selection that begins in %s, after linumpy failed: %s", items[0].path, error
            )
        return result

    def _layout_for(self, items: list[ChunkItem], out: NDBuffer) -> ArrayLayout | None:
        """Return the layout of the array of the chunks; None if the core cannot read the array."""
        if not items or not _is_on() or native.why_no_core() is not None:
            return None
        path, spec = items[0].path, items[0].spec
        if type(path) is not StorePath or type(path.store) not in _STORES:
            return None
        if getattr(spec.config, "read_missing_chunks", True) is False:
            return None
        key = self._chunk_path.fullmatch(path.path)
        if key is None:
            return None
        root = key[1] or ""
        # zarr resolves a relative store at each read, so the working directory is part of the cache key.
        folder = getattr(path.store, "root", None)
        cache_key = root if folder is None or folder.is_absolute() else f"{os.getcwd()}\0{root}"
        layout = self._layouts.get(cache_key)
        if layout is None:
            where = StorePath(path.store, root)
            layout = read_layout(zarr.Array(zarr.AsyncArray(metadata=self.metadata, store_path=where)))
            if layout.unsupported is None:
                # Whole stored objects: the array may grow while it is open, and zarr clips selections to its shape.
                layout = _extended_to(layout, layout.shape)
            self._layouts[cache_key] = layout
        values = out.as_ndarray_like()
        if layout.unsupported is not None or not isinstance(values, np.ndarray):
            return None
        return layout if values.dtype.newbyteorder("=") == layout.dtype else None

    @cached_property
    def _chunk_path(self) -> re.Pattern[str]:
        """Pattern of the path of a chunk: the path of the array, and the chunk's number along each axis."""
        key = re.escape(self.metadata.encode_chunk_key((0,) * len(self.metadata.shape)))
        return re.compile(r"(?:(.*)/)?" + key.replace("0", r"(\d+)"))

    def _object_index(self, path: StorePath) -> list[int]:
        key = self._chunk_path.fullmatch(path.path)
        assert key is not None
        return [int(number) for number in key.groups()[1:]]

    def _read_by_core(
        self, layout: ArrayLayout, items: list[ChunkItem], out: NDBuffer, drop_axes: tuple[int, ...]
    ) -> bool:
        """Read a selection; False if the core does not support the array, or would read more than zarr does."""
        with shared_reader("cpu") as reader:
            if not reader.reads_natively(layout):
                return False
            first, last = items[0], items[-1]
            region = None
            if not drop_axes and _is_box(first.selection) and _is_box(last.selection):
                begin, end = self._object_index(first.path), self._object_index(last.path)
                region = _box(layout.object_shape, (begin, first.selection), (end, last.selection), len(items))
            values: Any = out.as_ndarray_like()
            if region is not None and region.shape == values.shape:
                native_values = values.view(layout.dtype)
                reader.submit(_extended_to(layout, region.stop), region, out=native_values).result()
                if not values.dtype.isnative:
                    native_values.byteswap(inplace=True)
                return True
            if layout.shard is not None:
                return False
            self._read_chunks(reader, layout, items, out, drop_axes)
            return True

    def _read_chunks(
        self, reader: Reader, layout: ArrayLayout, items: Sequence[ChunkItem], out: NDBuffer, drop_axes: tuple[int, ...]
    ) -> None:
        """Read whole chunks, and copy the selection of each chunk to the output."""
        chunk = np.array(layout.chunk_shape)
        count = max(1, _CHUNKS_NBYTES // layout.chunk_nbytes)
        output: Any = out.as_ndarray_like()
        for begin in range(0, len(items), count):
            part = items[begin : begin + count]
            start = np.array([self._object_index(item.path) for item in part]) * chunk
            stop = start + chunk
            tickets = reader.submit_many(_extended_to(layout, stop.max(axis=0)), np.stack([start, stop], axis=2))
            for item, ticket in zip(part, tickets, strict=True):
                values = ticket.result()[item.selection]
                output[item.target] = values.squeeze(axis=drop_axes) if drop_axes else values


def _is_box(selection: Selection) -> bool:
    return all(
        isinstance(index, (int, np.integer)) or (isinstance(index, slice) and index.step in (None, 1))
        for index in selection
    )


def _box(
    object_shape: tuple[int, ...], first: tuple[list[int], Selection], last: tuple[list[int], Selection], count: int
) -> Region | None:
    """Return the region of a selection; None if its `count` stored objects are not the whole box from first to last.

    `first` and `last` are the index of a stored object, and the selection in it.
    """
    if math.prod(b - a + 1 for a, b in zip(first[0], last[0], strict=True)) != count:
        return None
    start, stop, kept = [], [], []
    for size, a, b, begin, end in zip(object_shape, first[0], last[0], first[1], last[1], strict=True):
        if isinstance(begin, slice):
            start.append(a * size + begin.indices(size)[0])
            stop.append(b * size + end.indices(size)[1])
        else:
            start.append(a * size + int(begin))
            stop.append(start[-1] + 1)
        kept.append(isinstance(begin, slice))
    return Region(tuple(start), tuple(stop), tuple(kept))


def _extended_to(layout: ArrayLayout, stop: Sequence[int]) -> ArrayLayout:
    """Return the layout with a shape of whole stored objects that covers a selection ending at `stop`."""
    if all(b <= n and not n % size for b, n, size in zip(stop, layout.shape, layout.object_shape, strict=True)):
        return layout
    ends = (max(int(b), n) for b, n in zip(stop, layout.shape, strict=True))
    return replace(layout, shape=tuple(-(-n // size) * size for n, size in zip(ends, layout.object_shape, strict=True)))


_PIPELINE_NAME = f"{LinumpyCodecPipeline.__module__}.{LinumpyCodecPipeline.__qualname__}"


def _is_on() -> bool:
    return bool(zarr.config.get(_CONFIG_KEY) == _PIPELINE_NAME)


class _Switch:
    """The active accelerations, and the pipelines in whose place they configured theirs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: For each acceleration in order, the name and class of the pipeline that it replaced, or None.
        self._replaced: dict[object, tuple[str, type[CodecPipeline]] | None] = {}
        self.fallback_class: type[CodecPipeline] = BatchedCodecPipeline

    def add(self, acceleration: object) -> None:
        """Configure the pipeline."""
        with self._lock:
            replaced = None if _is_on() else (zarr.config.get(_CONFIG_KEY), get_pipeline_class())
            if replaced is not None:
                self.fallback_class = replaced[1]
                zarr.config.set({_CONFIG_KEY: _PIPELINE_NAME})
            self._replaced[acceleration] = replaced

    def remove(self, acceleration: object) -> None:
        """Configure the replaced pipeline, unless another one was configured meanwhile.

        The first of several accelerations leaves this to the next one.
        """
        with self._lock:
            is_first = next(iter(self._replaced)) is acceleration
            replaced = self._replaced.pop(acceleration)
            if is_first and self._replaced:
                self._replaced[next(iter(self._replaced))] = replaced
            elif replaced is not None and _is_on():
                zarr.config.set({_CONFIG_KEY: replaced[0]})
            if remaining := [one for one in self._replaced.values() if one is not None]:
                self.fallback_class = remaining[-1][1]

    def after_fork(self) -> None:
        """Replace the lock in a child process, whose parent may have held it."""
        self._lock = threading.Lock()


_switch = _Switch()
call_after_fork(_switch.after_fork)
register_pipeline(LinumpyCodecPipeline)


class Acceleration:
    """An active acceleration; :meth:`undo` or the end of its ``with`` block ends it."""

    def __init__(self) -> None:
        self._undone = threading.Lock()  # acquired once and never released, so that only the first undo counts
        _switch.add(self)

    def undo(self) -> None:
        """End this acceleration; further calls have no effect."""
        if self._undone.acquire(blocking=False):
            _switch.remove(self)

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def accelerate() -> Acceleration:
    """Make zarr-python read by linumpy's core, with the same values, dtypes and errors.

    The core then reads all arrays that this process opens by zarr-python, if they are in a local folder or an object
    store, in supported dtypes and codecs, into host memory. Everything else, and all writing, is done as before. Arrays
    that are already open are not changed.

    Returns
    -------
    Acceleration
        A context manager. The end of the ``with`` block, or the method ``undo``, ends this acceleration; without either
        it lasts until the process ends. The last of several accelerations restores the former pipeline, and arrays that
        were opened before then are read as before.

    Raises
    ------
    ImportError
        zarr-python is older than 3.1.4, the first version that passes a pipeline the metadata of its array.

    Examples
    --------
    >>> import linumpy, zarr
    >>> with linumpy.accelerate():  # doctest: +SKIP
    ...     volume = zarr.open_array("brain.ome.zarr/0", mode="r")[...]
    """
    if not hasattr(CodecPipeline, "from_array_metadata_and_store"):
        raise ImportError(
            f"accelerate() needs zarr-python 3.1.4, and {zarr.__version__} is installed: pip install -U zarr"
        )
    if (reason := native.why_no_core()) is not None:
        log.warning("accelerate() changes nothing, since there is no native core: %s", reason)
    return Acceleration()
