"""zarr-python's own arrays, read by the native core: :func:`accelerate`.

In: arrays that are opened while it is on. Out: the values that zarr-python reads. A codec pipeline of zarr gets all
chunks of a selection in one call, which becomes one job of the reader that this process shares. What the core does not
read (other stores, codecs and dtypes, GPU buffers, lists of indices into shards), all writes, and each read that fails
go to the pipeline that was configured before; so errors are zarr's. Where that one reads a chunk in which the core
found a fault twice, the core's error is raised.
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
from typing import Any, Self

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

log = logging.getLogger(__name__)

_KEY = "codec_pipeline.path"
#: Kinds of stores that the core reads from; a subclass may read its bytes from elsewhere.
_STORES = (LocalStore, ObjectStore, RemoteStore)
#: Whole chunks are read together, for selections that are no boxes, up to this many bytes.
_CHUNKS_NBYTES = 64 * 2**20

ChunkItem = tuple[Any, Any, tuple[Any, ...], tuple[Any, ...], bool]
"""StorePath and ArraySpec of a chunk, what is selected of it, where that goes, whether it is the whole chunk."""


@dataclass(frozen=True)
class LinumpyCodecPipeline(CodecPipeline):
    """Reads selections of arrays in local and object stores by the core, and leaves all else to another pipeline.

    Attributes
    ----------
    own : CodecPipeline
        Of the class that was configured before.
    metadata : zarr.core.metadata.ArrayMetadata
        Of the array.
    """

    own: CodecPipeline
    metadata: Any
    _layouts: dict[str, ArrayLayout] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_array_metadata_and_store(cls, array_metadata: Any, store: Any) -> Self:
        """Make the pipeline of an array."""
        try:
            own = _switch.own_class.from_array_metadata_and_store(array_metadata=array_metadata, store=store)
        except NotImplementedError:
            own = create_codec_pipeline(array_metadata)
        return cls(own, array_metadata)

    @classmethod
    def from_codecs(cls, codecs: Iterable[Any]) -> Any:
        """Make the other pipeline: without metadata, as inside of shards, nothing can be read by the core."""
        return _switch.own_class.from_codecs(codecs)

    def evolve_from_array_spec(self, array_spec: Any) -> Self:
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

    def validate(self, **about: Any) -> None:
        """Check that codecs fit an array."""
        self.own.validate(**about)

    def compute_encoded_size(self, byte_length: int, array_spec: Any) -> int:
        """Return the size of an encoded chunk."""
        return self.own.compute_encoded_size(byte_length, array_spec)

    async def decode(self, chunk_bytes_and_specs: Any) -> Any:
        """Decode chunks."""
        return await self.own.decode(chunk_bytes_and_specs)

    async def encode(self, chunk_arrays_and_specs: Any) -> Any:
        """Encode chunks."""
        return await self.own.encode(chunk_arrays_and_specs)

    async def write(self, batch_info: Any, value: Any, drop_axes: tuple[int, ...] = ()) -> None:
        """Write chunks."""
        await self.own.write(batch_info, value, drop_axes)

    async def read(self, batch_info: Iterable[Any], out: Any, drop_axes: tuple[int, ...] = ()) -> Any:
        """Read a selection into an array: all of its chunks as one job."""
        items: list[ChunkItem] = list(batch_info)
        error: Exception | None = None
        layout: ArrayLayout | None = None
        try:
            layout = self._layout_for(items, out)
            # Not in this thread, which runs the event loop of all calls of zarr.
            if layout is not None and await asyncio.to_thread(self._read, layout, items, out, drop_axes):
                # zarr looks at these where missing chunks are errors, which its own pipeline reads.
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
            # zarr-python does not notice every fault: what is found again is the data's, not a writer's.
            await asyncio.to_thread(self._read, layout, items, out, drop_axes)
        elif error is not None:
            log.warning("zarr-python read %s, which linumpy did not: %s", items[0][0], error)
        return result

    def _layout_for(self, items: list[ChunkItem], out: Any) -> ArrayLayout | None:
        """Return the layout of the array that chunks are of; None where the core does not read them."""
        if not items or not _is_on() or native.why_no_core() is not None:
            return None
        where, spec = items[0][:2]
        if type(where) is not StorePath or type(where.store) not in _STORES:
            return None
        if getattr(spec.config, "read_missing_chunks", True) is False:
            return None
        key = self._key.fullmatch(where.path)
        if key is None:
            return None
        root = key[1] or ""
        # zarr finds a relative store from the working directory of each read.
        folder = getattr(where.store, "root", None)
        location = root if folder is None or folder.is_absolute() else f"{os.getcwd()}\0{root}"
        layout = self._layouts.get(location)
        if layout is None:
            layout = self._layouts[location] = self._read_layout(StorePath(where.store, root))
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
        # Whole chunks: zarr cuts selections to the shape, which may change while the array is open.
        return _up_to(layout, layout.shape)

    def _coordinates(self, where: Any) -> list[int]:
        key = self._key.fullmatch(where.path)
        assert key is not None
        return [int(number) for number in key.groups()[1:]]

    def _read(self, layout: ArrayLayout, items: list[ChunkItem], out: Any, drop_axes: tuple[int, ...]) -> bool:
        """Read a selection; False where the core does not read the array, or reads more of it than zarr."""
        with shared_reader("cpu") as reader:
            if not reader.reads_natively(layout):
                return False
            first, last = items[0], items[-1]
            region = None
            if not drop_axes and _is_box(first[2]) and _is_box(last[2]):
                begin, end = self._coordinates(first[0]), self._coordinates(last[0])
                region = _box(layout.object_shape, (begin, first[2]), (end, last[2]), len(items))
            values = out.as_ndarray_like()
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
        self, reader: Any, layout: ArrayLayout, items: Sequence[ChunkItem], out: Any, drop_axes: tuple[int, ...]
    ) -> None:
        """Read whole chunks, and select of each what zarr selects."""
        chunk = np.array(layout.chunk_shape)
        count = max(1, _CHUNKS_NBYTES // layout.chunk_nbytes)
        for begin in range(0, len(items), count):
            part = items[begin : begin + count]
            start = np.array([self._coordinates(item[0]) for item in part]) * chunk
            stop = start + chunk
            tickets = reader.submit_many(_up_to(layout, stop.max(axis=0)), np.stack([start, stop], axis=2))
            for (_, _, chosen, target, _), ticket in zip(part, tickets, strict=True):
                values = ticket.result()[chosen]
                out.as_ndarray_like()[target] = values.squeeze(axis=drop_axes) if drop_axes else values


def _is_box(selection: tuple[Any, ...]) -> bool:
    return all(
        isinstance(one, (int, np.integer)) or (isinstance(one, slice) and one.step in (None, 1)) for one in selection
    )


def _box(
    chunk: tuple[int, ...],
    first: tuple[list[int], tuple[Any, ...]],
    last: tuple[list[int], tuple[Any, ...]],
    count: int,
) -> Region | None:
    """Join what is selected of the chunks of a box, in C order, of which the first and the last say where it ends."""
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
    """Return a layout of whole chunks that reaches as far as a selection."""
    if all(b <= n and not n % size for b, n, size in zip(stop, layout.shape, layout.object_shape, strict=True)):
        return layout
    most = (max(int(b), n) for b, n in zip(stop, layout.shape, strict=True))
    return replace(layout, shape=tuple(-(-n // size) * size for n, size in zip(most, layout.object_shape, strict=True)))


_NAME = f"{LinumpyCodecPipeline.__module__}.{LinumpyCodecPipeline.__qualname__}"


def _is_on() -> bool:
    return bool(zarr.config.get(_KEY) == _NAME)


class _Switch:
    """How many callers want the pipeline, and what was configured before the first of them; for several threads."""

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
        """Configure what was there before, unless another caller wants the pipeline or has configured another one."""
        with self._lock:
            self._users -= 1
            if not self._users and self._path is not None and _is_on():
                zarr.config.set({_KEY: self._path})

    def after_fork(self) -> None:
        """Make the lock new in a child process, whose parent may have held it."""
        self._lock = threading.Lock()


_switch = _Switch()
os.register_at_fork(after_in_child=_switch.after_fork)
register_pipeline(LinumpyCodecPipeline)


class Acceleration:
    """What :func:`accelerate` has switched on, until :meth:`undo` or the end of its ``with`` block."""

    def __init__(self) -> None:
        self._undo = threading.Lock()  # taken by the first call of undo, and kept
        _switch.add()

    def undo(self) -> None:
        """Switch it off; nothing happens the second time."""
        if self._undo.acquire(blocking=False):
            _switch.remove()

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def accelerate() -> Acceleration:
    """Have zarr-python read local arrays by linumpy's core, with the same values, dtypes and errors.

    Arrays that anything in this process opens by zarr-python from now on are read by the core where it can: in a local
    folder, of dtypes and codecs that it knows, into host memory. Everything else, and all writing, is done as before.
    Arrays that were opened before are not changed.

    Returns
    -------
    Acceleration
        A context manager; when it ends, arrays that were opened within are read as before, too. Outside of a ``with``
        statement its method ``undo`` does that; without, it lasts as long as the process. Where several callers have
        switched it on, it lasts until the last of them switches it off.

    Raises
    ------
    ImportError
        zarr-python is too old: from 3.1.4 on it tells a pipeline which array it is for.

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
