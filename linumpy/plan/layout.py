"""Records of how an array is stored. ``linumpy.io.layout`` makes them, and every plan of a read starts from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from linumpy.plan.codecs import DecodeChain

#: Maximum number of axes of an array.
MAX_RANK = 6


@dataclass(frozen=True)
class ChunkKeys:
    """How the key of a stored object is made from the coordinates of the chunk (or shard).

    - `prefix`: text before the coordinates: ``"c"`` and a separator in the default encoding of zarr v3, empty in v2.
    """

    prefix: str
    separator: str

    def __str__(self) -> str:
        return self.prefix + self.separator.join("zyx")


@dataclass(frozen=True)
class ShardLayout:
    """How inner chunks, and the index with their offsets and lengths (uint64), are stored in a shard."""

    chunks_per_shard: tuple[int, ...]
    index_at_end: bool
    index_big_endian: bool
    index_checksum: bool

    @property
    def count(self) -> int:
        """Inner chunks in a shard."""
        return math.prod(self.chunks_per_shard)

    @property
    def index_nbytes(self) -> int:
        """Bytes of the index: offset and length of each inner chunk as uint64, and the checksum."""
        return 16 * self.count + (4 if self.index_checksum else 0)


@dataclass(frozen=True, eq=False)
class StoredEntries:
    """Entries of a ZIP file that hold the chunks (or shards) of an array.

    - `stamp`: state of the ZIP file when its directory was read: see :func:`linumpy.io.paths.stamp_of`.
    - `grid`: chunks (or shards) along each axis.
    - `table` (int64, (n, 3)): a row for each entry: number of the chunk (or shard) in C order, ascending; offset of the
      entry's header in the ZIP file; bytes of the entry.
    - `is_compressed`: whether zarr-python must read the array: an entry is compressed, or the core cannot use the
      table.
    """

    path: str
    stamp: tuple[int, ...]
    grid: tuple[int, ...]
    table: np.ndarray
    is_compressed: bool


@dataclass(frozen=True, eq=False)
class RemoteArray:
    """The location of an array that is read by requests to a store instead of from files.

    - `objects`: the store that answers the core's requests: obstore's store, or `store`.
    - `client`: name of the client that sends the requests, for reports.
    """

    store: Any
    objects: Any
    client: str
    path: str
    url: str


class ChunkGeometry(tuple[object, ...]):
    """Value of :attr:`ArrayLayout.geometry`. Its hash is cached, because every submit uses it as a dictionary key."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[ChunkGeometry], tuple[tuple[object, ...]]]:
        return ChunkGeometry, (tuple(self),)  # without the hash, since hashes of text differ between processes


@dataclass(frozen=True)
class ArrayLayout:
    """How an array is stored.

    - `name`: path or URL, for messages.
    - `root`: local folder of the array; None if the store is not local.
    - `chunk_shape`: of inner chunks, with shards. Like `shape`, in the order of the array's axes.
    - `dtype`: element type, in the byte order of this machine.
    - `swapped`: whether the stored byte order differs from this machine's.
    - `stored_axes`: axes of the array in the order in which a chunk stores them, slowest first: ``(0, 1, 2)`` for order
      C, ``(2, 1, 0)`` for order F.
    - `keys`: None if the encoding of chunk keys is neither "default" nor "v2".
    - `fill_value`: value of a missing chunk; None for a dtype that is not supported.
    - `codecs`: names of the codecs of an (inner) chunk, in the order of encoding.
    - `unsupported`: why the native core cannot read this array; None if it can.
    - `chain`: how a chunk is decoded; None for raw chunks.
    - `grid`: name of the chunk grid: ``"regular"``, or ``"rectilinear"`` with `lengths`. Regions of a rectilinear array
      are first cut into regions of regular arrays (``linumpy.plan.read``).
    - `lengths`: for a rectilinear grid: voxels of each stored object (chunk, or shard) along each axis. `chunk_shape`
      and the shape of a shard are then the largest shapes.
    - `entries`: for an array in a ZIP file: the entries of its chunks (or shards). `root` then leads into the ZIP file.
    - `remote`: for an array that is neither in local files nor in a ZIP file that the core reads.
    - `array`: the array, for zarr-python, where linumpy's reader does not support it.
    """

    name: str
    root: str | None
    zarr_format: int
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: np.dtype
    swapped: bool
    stored_axes: tuple[int, ...]
    keys: ChunkKeys | None
    fill_value: np.generic | None
    shard: ShardLayout | None
    codecs: tuple[str, ...]
    unsupported: str | None
    chain: DecodeChain | None = None
    grid: str = "regular"
    lengths: tuple[np.ndarray, ...] | None = field(default=None, compare=False, repr=False)
    entries: StoredEntries | None = field(default=None, compare=False, repr=False)
    remote: RemoteArray | None = field(default=None, compare=False, repr=False)
    array: Any = field(default=None, compare=False, repr=False)

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @cached_property
    def chunk_nbytes(self) -> int:
        """Decoded bytes of an (inner) chunk, also at the edge of the array, where chunks are stored whole."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @cached_property
    def chunk_path(self) -> tuple[str, str]:
        """Path (or key) of a stored object up to the object's coordinates, and the separator of the coordinates."""
        assert self.keys is not None
        if self.remote is not None:
            return f"{self.remote.path}/{self.keys.prefix}".lstrip("/"), self.keys.separator
        return f"{self.root}/{self.keys.prefix}", self.keys.separator

    @cached_property
    def geometry(self) -> ChunkGeometry:
        """All properties that determine how regions are read; regions of arrays of equal geometry form one batch."""
        fill = None if self.fill_value is None else np.asarray(self.fill_value).tobytes()
        return ChunkGeometry((
            self.chunk_shape, self.dtype.str, self.swapped, self.stored_axes, fill, self.shard, self.chain, self.grid
        ))  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Decoded bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def object_shape(self) -> tuple[int, ...]:
        """Shape of one stored object: a shard, or a chunk."""
        if self.shard is None:
            return self.chunk_shape
        return tuple(n * c for n, c in zip(self.shard.chunks_per_shard, self.chunk_shape, strict=True))
