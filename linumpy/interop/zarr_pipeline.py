"""zarr-python's own arrays, read by the native core: :func:`accelerate`.

In: arrays that are opened while it is on. Out: the values that zarr-python reads. A codec pipeline of zarr gets all
chunks of a selection in one call, which becomes one job of the process's shared reader. Reads that the core does not
support (other stores, codecs and dtypes, GPU buffers, lists of indices into shards), all writes, and all failed reads
go to the pipeline that was configured before, so errors are zarr's. If that pipeline reads a chunk in which the core
finds a fault twice, the core's error is raised.
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
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import zarr
from zarr.abc.codec import CodecPipeline
from zarr.core.array import create_codec_pipeline
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.registry import get_pipeline_class, register_pipeline
from zarr.storage import LocalStore, ObjectStore, StorePath

from linumpy.core import native
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

_KEY = "codec_pipeline.path"
#: Classes of stores that the core reads from; not their subclasses, which may read their bytes from elsewhere.
_STORES = (LocalStore, ObjectStore, RemoteStore)
#: Maximum bytes of whole chunks that are read together, for selections other than boxes.
_CHUNKS_NBYTES = 64 * 2**20

Selection = tuple[Any, ...]
"""An index for each axis, as zarr has it: an int, a slice or an array."""
ChunkItem = tuple[Any, "ArraySpec", Selection, Selection, bool]
"""StorePath and ArraySpec of a chunk, selection in the chunk and in the output, whether the whole chunk is selected."""


@dataclass(frozen=True)
class LinumpyCodecPipeline(CodecPipeline):
    """Reads selections of arrays in local and object stores by the core, and does all else by another pipeline.

    Attributes
    ----------
    own : CodecPipeline
        Pipeline of the class that was configured before.
    metadata : zarr.core.metadata.ArrayMetadata
        Metadata of the array.
    """

    own: CodecPipeline
    metadata: ArrayMetadata
    _layouts: dict[str, ArrayLayout] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_array_metadata_and_store(cls, array_metadata: ArrayMetadata, store: Store) -> Self:
        """Make the pipeline of an array."""
        try:
            own = _switch.own_class.from_array_metadata_and_store(array_metadata=array_metadata, store=store)
        except NotImplementedError:
            own = create_codec_pipeline(array_metadata)
        return cls(own, array_metadata)

    @classmethod
    def from_codecs(cls, codecs: Iterable[Codec]) -> Any:
        """Make the other pipeline: without metadata, as inside of shards, the core cannot read."""
        return _switch.own_class.from_codecs(codecs)

    def evolve_from_array_spec(self, array_spec: ArraySpec) -> Self:
        """Fit the codecs to a dtype."""
        return replace(self, own=self.own.evolve_from_array_spec(array_spec))

    @property
    def supports_partial_decode(self) -> bool:
        """Whether parts of a chunk can be decoded."""
        return self.own.supports_partial_decode

    @property
    def supports_partial_encode(self) -> bool:
        """Whether parts of a chunk can be encoded."""
        return self.own.supports_partial_encode

    def validate(self, **properties: Any) -> None:
        """Check that codecs fit an array."""
        self.own.validate(**properties)

    def compute_encoded_size(self, byte_length: int, array_spec: ArraySpec) -> int:
        """Return the size of an encoded chunk."""
        return self.own.compute_encoded_size(byte_length, array_spec)

    async def decode(
        self, chunk_bytes_and_specs: Iterable[tuple[Buffer | None, ArraySpec]]
    ) -> Iterable[NDBuffer | None]:
        """Decode chunks."""
        return await self.own.decode(chunk_bytes_and_specs)

    async def encode(
        self, chunk_arrays_and_specs: Iterable[tuple[NDBuffer | None, ArraySpec]]
    ) -> Iterable[Buffer | None]:
        """Encode chunks."""
        return await self.own.encode(chunk_arrays_and_specs)

    async def write(self, batch_info: Iterable[Any], value: NDBuffer, drop_axes: tuple[int, ...] = ()) -> None:
        """Write chunks."""
        await self.own.write(batch_info, value, drop_axes)

    async def read(self, batch_info: Iterable[Any], out: NDBuffer, drop_axes: tuple[int, ...] = ()) -> Any:
        """Read a selection into an array: all of its chunks as one job."""
        items: list[ChunkItem] = list(batch_info)
        error: Exception | None = None
        layout: ArrayLayout | None = None
        try:
            layout = self._layout_for(items, out)
            # In another thread: this one runs the event loop of all calls of zarr.
            if layout is not None and await asyncio.to_thread(self._read, layout, items, out, drop_axes):
                # zarr checks these only if missing chunks are errors, and such arrays are not read here.
                return ({"status": "present"},) * len(items)
        except Exception as raised:
            error = raised
        try:
            result = await self.own.read(items, out, drop_axes)  # type: ignore[func-returns-value]
        except Exception as raised:
            if error is not None:
                raised.add_note(f"linumpy: {error}")
            raise
        if isinstance(error, ChunkError) and layout is not None:
            # zarr-python does not notice every fault. If the core finds it again, it is in the data, not a writer's.
            await asyncio.to_thread(self._read, layout, items, out, drop_axes)
        elif error is not None:
            log.warning("zarr-python read %s, after linumpy failed: %s", items[0][0], error)
        return result

    def _layout_for(self, items: list[ChunkItem], out: NDBuffer) -> ArrayLayout | None:
        """Return the layout of the array of the chunks; None if the core does not read them."""
        if not items or not _is_on() or native.why_no_core() is not None:
            return None
        path, spec = items[0][:2]
        if type(path) is not StorePath or type(path.store) not in _STORES:
            return None
        if getattr(spec.config, "read_missing_chunks", True) is False:
            return None
        key = self._key.fullmatch(path.path)
        if key is None:
            return None
        root = key[1] or ""
        # zarr resolves the path of a relative store by the working directory at each read.
        folder = getattr(path.store, "root", None)
        location = root if folder is None or folder.is_absolute() else f"{os.getcwd()}\0{root}"
        layout = self._layouts.get(location)
        if layout is None:
            layout = self._layouts[location] = self._read_layout(StorePath(path.store, root))
        values = out.as_ndarray_like()
        if layout.unsupported is not None or not isinstance(values, np.ndarray):
            return None
        return layout if values.dtype.newbyteorder("=") == layout.dtype else None

    @cached_property
    def _key(self) -> re.Pattern[str]:
        """Match the path of a chunk in its store: the path of the array, and the chunk's number along each axis."""
        key = re.escape(self.metadata.encode_chunk_key((0,) * len(self.metadata.shape)))
        return re.compile(r"(?:(.*)/)?" + key.replace("0", r"(\d+)"))

    def _read_layout(self, path: StorePath) -> ArrayLayout:
        layout = read_layout(zarr.Array(zarr.AsyncArray(metadata=self.metadata, store_path=path)))
        if layout.unsupported is not None:
            return layout
        # Up to whole chunks, since the shape may change while the array is open; zarr cuts selections to it.
        return _up_to(layout, layout.shape)

    def _coordinates(self, path: StorePath) -> list[int]:
        key = self._key.fullmatch(path.path)
        assert key is not None
        return [int(number) for number in key.groups()[1:]]

    def _read(self, layout: ArrayLayout, items: list[ChunkItem], out: NDBuffer, drop_axes: tuple[int, ...]) -> bool:
        """Read a selection; False if the core does not support the array, or would read more of it than zarr."""
        with shared_reader("cpu") as reader:
            if not reader.reads_natively(layout):
                return False
            first, last = items[0], items[-1]
            region = None
            if not drop_axes and _is_box(first[2]) and _is_box(last[2]):
                begin, end = self._coordinates(first[0]), self._coordinates(last[0])
                region = _box(layout.object_shape, (begin, first[2]), (end, last[2]), len(items))
            values: Any = out.as_ndarray_like()
            if region is not None and region.shape == values.shape:
                native_values = values.view(layout.dtype)
                reader.submit_layout(_up_to(layout, region.stop), region, out=native_values).result()
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
            start = np.array([self._coordinates(item[0]) for item in part]) * chunk
            stop = start + chunk
            tickets = reader.submit_many(_up_to(layout, stop.max(axis=0)), np.stack([start, stop], axis=2))
            for (_, _, selection, target, _), ticket in zip(part, tickets, strict=True):
                values = ticket.result()[selection]
                output[target] = values.squeeze(axis=drop_axes) if drop_axes else values


def _is_box(selection: Selection) -> bool:
    return all(
        isinstance(index, (int, np.integer)) or (isinstance(index, slice) and index.step in (None, 1))
        for index in selection
    )


def _box(
    chunk: tuple[int, ...], first: tuple[list[int], Selection], last: tuple[list[int], Selection], count: int
) -> Region | None:
    """Return the region of a selection, given coordinates and selections of its first and last chunk in C order.

    None if its `count` chunks do not fill the box from the first to the last chunk.
    """
    if math.prod(b - a + 1 for a, b in zip(first[0], last[0], strict=True)) != count:
        return None
    start, stop, kept = [], [], []
    for size, a, b, begin, end in zip(chunk, first[0], last[0], first[1], last[1], strict=True):
        if isinstance(begin, slice):
            start.append(a * size + begin.indices(size)[0])
            stop.append(b * size + end.indices(size)[1])
        else:
            start.append(a * size + int(begin))
            stop.append(start[-1] + 1)
        kept.append(isinstance(begin, slice))
    return Region(tuple(start), tuple(stop), tuple(kept))


def _up_to(layout: ArrayLayout, stop: Sequence[int]) -> ArrayLayout:
    """Return a layout of whole chunks whose shape contains a selection that ends at `stop`."""
    if all(b <= n and not n % size for b, n, size in zip(stop, layout.shape, layout.object_shape, strict=True)):
        return layout
    ends = (max(int(b), n) for b, n in zip(stop, layout.shape, strict=True))
    return replace(layout, shape=tuple(-(-n // size) * size for n, size in zip(ends, layout.object_shape, strict=True)))


_NAME = f"{LinumpyCodecPipeline.__module__}.{LinumpyCodecPipeline.__qualname__}"


def _is_on() -> bool:
    return bool(zarr.config.get(_KEY) == _NAME)


class _Switch:
    """The number of callers that use the pipeline, and the pipeline that was configured before; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self.own_class: type[CodecPipeline] = BatchedCodecPipeline
        self._path: str | None = None

    def add(self) -> None:
        """Configure the pipeline."""
        with self._lock:
            if not _is_on():
                self.own_class, self._path = get_pipeline_class(), zarr.config.get(_KEY)
                zarr.config.set({_KEY: _NAME})
            self._users += 1

    def remove(self) -> None:
        """Configure the former pipeline, unless others use this one or somebody has configured another one."""
        with self._lock:
            self._users -= 1
            if not self._users and self._path is not None and _is_on():
                zarr.config.set({_KEY: self._path})

    def after_fork(self) -> None:
        """Replace the lock in a child process, whose parent may have held it."""
        self._lock = threading.Lock()


_switch = _Switch()
os.register_at_fork(after_in_child=_switch.after_fork)
register_pipeline(LinumpyCodecPipeline)


class Acceleration:
    """Result of :func:`accelerate`, which lasts until :meth:`undo` or the end of its ``with`` block."""

    def __init__(self) -> None:
        self._undo = threading.Lock()  # taken by the first call of undo, and kept
        _switch.add()

    def undo(self) -> None:
        """Switch it off; further calls do nothing."""
        if self._undo.acquire(blocking=False):
            _switch.remove()

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
        A context manager; when it ends, arrays that were opened within it are read as before. Outside of a ``with``
        statement its method ``undo`` ends it; otherwise it lasts as long as the process. If several callers have
        switched it on, it lasts until the last of them switches it off.

    Raises
    ------
    ImportError
        zarr-python is older than 3.1.4, and does not give a pipeline the metadata of its array.

    Examples
    --------
    >>> import linumpy, zarr
    >>> with linumpy.accelerate():  # doctest: +SKIP
    ...     volume = zarr.open_array("brain.ome.zarr/0", mode="r")[...]
    """
    if not hasattr(CodecPipeline, "from_array_metadata_and_store"):
        raise ImportError(f"accelerate() needs a newer zarr-python than {zarr.__version__}: pip install -U zarr")
    if (reason := native.why_no_core()) is not None:
        log.warning("accelerate() changes nothing, since there is no native core: %s", reason)
    return Acceleration()
