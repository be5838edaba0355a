"""Parameters of a pipeline: :class:`Config`, :class:`Sample` and :class:`Part`, validated before CUDA is used."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import numpy as np

from linumpy.stream.arguments import (
    Box,
    check_choice,
    check_name,
    checked_aabb,
    dropped_axes,
    integer,
    put,
    put_coordinates,
    real_number,
    sizes,
    uri_text,
)
from linumpy.stream.augment import Augment
from linumpy.stream.errors import ArgumentTypeError, InvalidArgument

PADS = ("constant", "edge", "reflect")
Pad = Literal["constant", "edge", "reflect"]
#: Seeds, epochs and indices are less than this, since Philox takes them as words of 64 bits.
WORD = 2**64


class Dtype(enum.IntEnum):
    """Element type of a batch."""

    F32 = 0
    BF16 = 1
    F16 = 2
    STORED = 3

    @property
    def label(self) -> str:
        """Name of the type as a parameter, such as ``"f32"``."""
        return self.name.lower()

    @classmethod
    def coerce(cls, value: object) -> Dtype:
        """Return the type that `value` names.

        Parameters
        ----------
        value : Dtype, int, str, dtype
            ``"f32"``, ``"float32"``, ``numpy.float32``, ``torch.bfloat16``, ``"stored"``, …, or a member's number.

        Raises
        ------
        InvalidArgument
            `value` names none of the four types.
        """
        if isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_)) and 0 <= value < len(cls):
            return cls(int(value))
        name = value if isinstance(value, str) else getattr(value, "__name__", None) or str(value)
        name = "float64" if value is float else name  # as in NumPy; torch.float32 is named "float"
        try:
            return _DTYPE_NAMES[name.lower().rpartition(".")[2]]
        except KeyError:
            raise InvalidArgument(f"dtype must be one of f32, f16, bf16, stored (got {value!r})") from None

    def numpy(self, stored: np.dtype | None = None) -> np.dtype:
        """Return the NumPy dtype of the elements: uint16, which holds the bits, for bfloat16, which NumPy lacks.

        Raises
        ------
        InvalidArgument
            The type is STORED, and `stored`, the dtype of the array, is None.
        """
        if self is Dtype.STORED:
            if stored is None:
                raise InvalidArgument("dtype=stored: pass the dtype of the array")
            return stored
        return _ELEMENTS[self]


_ELEMENTS: dict[int, np.dtype] = {Dtype.F32: np.dtype("f4"), Dtype.F16: np.dtype("f2"), Dtype.BF16: np.dtype("u2")}
_DTYPE_NAMES = {
    "f32": Dtype.F32, "float32": Dtype.F32, "float": Dtype.F32, "f4": Dtype.F32,
    "f16": Dtype.F16, "float16": Dtype.F16, "half": Dtype.F16, "f2": Dtype.F16,
    "bf16": Dtype.BF16, "bfloat16": Dtype.BF16,
    "stored": Dtype.STORED,
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A further array of a sample, such as labels, or another level around the same centre.

    The part shows the physical coordinates of the sample's crop. Axes are matched by their names; spacing and origin
    come from the metadata of both images. An array without such metadata must have the shape of the image, and then
    takes the coordinates of the image.

    Attributes
    ----------
    name : str
        Name of the part in the batch.
    uri : str or None
        The array or OME-Zarr image; None for the sample's own image.
    kind : {"image", "labels"}
        Labels are resampled by nearest neighbour and keep their stored dtype; their intensities are not changed.
    level : int
        Resolution level of an OME-Zarr image.
    shape : tuple of int or None
        Voxels of the part's crop at the part's level. Both crops have the same centre. None for the same field of view.
    dtype : Dtype or None
        Dtype of this part; None for the dtype of the configuration, or the stored dtype for labels.
    spacing, origin : tuple of float or None
        Voxel spacing of level 0, and coordinates of the centre of the first voxel of level 0, in µm along the axes of
        space. Used where the metadata of `uri` lack them.
    """

    name: str
    uri: str | None = None
    kind: Literal["image", "labels"] = "image"
    level: int = 0
    shape: tuple[int, ...] | None = None
    dtype: Dtype | None = None
    spacing: tuple[float, ...] | None = None
    origin: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.kind not in ("image", "labels"):
            raise InvalidArgument(f"kind must be image or labels (got {self.kind!r})")
        put(self, "level", integer("level", self.level, 0))
        if self.uri is not None:
            put(self, "uri", uri_text(self.uri))
        if self.shape is not None:
            put(self, "shape", sizes(self.shape))
        if self.dtype is not None:
            put(self, "dtype", Dtype.coerce(self.dtype))
        put_coordinates(self)
        if self.uri is None and (self.spacing or self.origin):
            raise InvalidArgument(
                f"part {self.name!r} shows the sample's own array, whose spacing and origin are parameters of Config"
            )


@dataclass(frozen=True)
class Sample:
    """A crop of an array.

    Attributes
    ----------
    uri : str
        Path or URL of an array or of an OME-Zarr image. A relative path starts from the working folder of the process
        at the time when the sample, or the iterable that yields the sample, is pushed.
    aabb : tuple of (int, int)
        The crop (axis-aligned bounding box): half-open (start, stop) for each axis, in voxels of level 0 and in stored
        axis order. A slice is accepted, too; its open start is 0. An int reads one voxel, and the batch does not have
        that axis. A crop may reach out of the array if the configuration has a `pad`. A negative number is a voxel
        before the first voxel, as opposed to Python's indices.
    level : int
        Resolution level of an OME-Zarr image that is read; `aabb` remains in voxels of level 0.
    parts : tuple of Part
        Further arrays.
    name : str
        Name of the first part.
    index, epoch : int or None
        With the seed, they determine the augmentation; by default the sample's number in the order of pushing, and the
        epoch of the configuration.
    dropped : tuple of int
        Axes of `aabb` that the batch does not have, of one voxel each: all axes that were given as an int.
    """

    uri: str
    aabb: Box
    level: int = 0
    parts: tuple[Part, ...] = ()
    name: str = "image"
    index: int | None = field(default=None, compare=False)
    epoch: int | None = field(default=None, compare=False)
    dropped: tuple[int, ...] = ()

    if TYPE_CHECKING:

        def __init__(
            self,
            uri: str | Path,
            aabb: Sequence[slice | tuple[SupportsIndex, SupportsIndex] | SupportsIndex] | np.ndarray | slice,
            level: int = 0,
            parts: Iterable[Part] = (),
            name: str = "image",
            index: int | None = None,
            epoch: int | None = None,
            dropped: Iterable[int] = (),
        ) -> None: ...

    def __post_init__(self) -> None:
        put(self, "uri", uri_text(self.uri))
        aabb, single = checked_aabb(self.aabb)
        put(self, "aabb", aabb)
        put(self, "dropped", dropped_axes(self.dropped, single, aabb))
        put(self, "level", integer("level", self.level, 0))
        if not isinstance(self.parts, Iterable):
            raise ArgumentTypeError(f"parts must be a sequence of Parts (got {type(self.parts).__name__})")
        put(self, "parts", tuple(self.parts))
        for part in self.parts:
            if not isinstance(part, Part):
                raise ArgumentTypeError(f"parts must be a sequence of Parts (got a {type(part).__name__})")
        check_name(self.name)
        for name in ("index", "epoch"):
            if getattr(self, name) is not None:
                put(self, name, integer(name, getattr(self, name), 0, WORD))
        names = [self.name, *(part.name for part in self.parts)]
        if len(set(names)) < len(names):
            raise InvalidArgument(f"parts of a sample must have different names (got {', '.join(names)})")

    @classmethod
    def _drawn(cls, uri: str, aabb: Box, parts: tuple[Part, ...], index: int, epoch: int | None = None) -> Sample:
        """Make a sample of valid values without checking them: a check takes longer than drawing a crop."""
        sample = object.__new__(cls)
        sample.__dict__.update(
            uri=uri, aabb=aabb, level=0, parts=parts, name="image", index=index, epoch=epoch, dropped=()
        )
        return sample

    def all_parts(self) -> tuple[Part, ...]:
        """Return all parts, the sample's own array first."""
        return (_own_part(self.name, self.level), *self.parts)

    def __str__(self) -> str:
        extents = (str(a) if axis in self.dropped else f"{a}:{b}" for axis, (a, b) in enumerate(self.aabb))
        return f"{self.uri}[{', '.join(extents)}]"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of a pipeline.

    Attributes
    ----------
    batch_size : int
        Samples in a batch.
    host_buffer_bytes : int
        Limit of the device memory in which the pipeline's reader stages and decodes chunks; 1 MiB at least. The reader
        also takes up to 200 MiB of pinned host memory.
    device_buffer_bytes : int
        Device memory of batches, and of staged crops, which wait for resampling; allocated when the pipeline is made.
        Without a GPU it is host memory.
    dtype : Dtype
        Dtype of batches: f32, f16, bf16 or as stored; whatever :meth:`Dtype.coerce` takes.
    lookahead_batches : int
        Maximum number of batches that are read ahead; memory may allow fewer. Of lists, tuples and samplers up to eight
        times as many beside Python threads that never sleep, where `device_buffer_bytes` holds them.
    n_io_threads : int
        Threads that open arrays ahead. The reader has threads of its own for chunks.
    n_compute_threads : int
        Threads that resample where there is no GPU; 0 for one per core that the process may use.
    n_zarrs_meta_cache : int
        Number of arrays whose metadata are kept; metadata of a local array are kept while the metadata files are
        unchanged. Any other array is opened again, which takes a core up to a millisecond, unless it is one of the last
        2048 local arrays that the reader supports.
    n_shards_meta_cache : int
        Has no effect; accepted for code that sets it. The reader limits its cache of shard indexes by size.
    max_chunk_uncompressed_bytes : int
        Maximum size of a chunk, decoded; 0 for no limit. Arrays with larger chunks are refused.
    max_gpu_memory_bytes : int
        Limit of all device memory of the pipeline and its reader; 0 for no limit. The cache of chunks gets the rest
        after `host_buffer_bytes` and `device_buffer_bytes`, at most `cache_bytes`.
    max_bytes_per_element : int
        Maximum size of an element; 0 for no limit. Arrays with larger elements are refused.
    device : None, int or "cpu"
        CUDA device; None for CuPy's current device, or for the CPU where there is no GPU.
    cache_bytes : int
        Memory of a cache of decoded chunks, on the device or, with ``"cpu"``, on the host.
    pad : {"constant", "edge", "reflect"} or None
        Values outside of an array, as in ``numpy.pad``; None refuses crops that extend beyond it.
    pad_value : float
        Fill value for ``pad="constant"``, in the dtype of the batch; rounded and saturated for integers.
    augment : Augment or None
        Augmentation, which needs a `pad`.
    spacing, origin : tuple of float or None
        Voxel spacing of level 0 of the samples' own arrays, and coordinates of the centre of the first voxel of level
        0, in µm along the axes of space. Used where the metadata lack them. See :class:`Part` for other arrays.
    seed, epoch : int
        With the index of a sample, they determine the augmentation of the sample; below 2**64.
    on_error : {"raise", "skip"}
        Whether :meth:`Pipeline.push` and :meth:`Pipeline.pop` raise for a faulty sample, or batches leave it out. In
        either case the batch comes with the other samples, and its ``errors`` hold the errors of faulty ones.
    storage_options : mapping or None
        Options for all URLs, as obstore's ``from_url`` takes them; see docs/remote.md.
    rank, world_size : int
        This process serves samples ``rank``, ``rank + world_size``, … of all that are pushed.

    Raises
    ------
    InvalidArgument
        A value is invalid (also a ``ValueError``), or has a wrong type (also a ``TypeError``).
    """

    batch_size: int
    host_buffer_bytes: int
    device_buffer_bytes: int
    dtype: Any = Dtype.F32
    lookahead_batches: int = 2
    n_io_threads: int = 4
    n_compute_threads: int = 0
    n_zarrs_meta_cache: int = 64
    n_shards_meta_cache: int = 256
    max_chunk_uncompressed_bytes: int = 0
    max_gpu_memory_bytes: int = 0
    max_bytes_per_element: int = 0
    device: int | Literal["cpu"] | None = None
    cache_bytes: int = 0
    pad: Pad | None = None
    pad_value: float = 0.0
    augment: Augment | None = None
    spacing: tuple[float, ...] | None = None
    origin: tuple[float, ...] | None = None
    seed: int = 0
    epoch: int = 0
    on_error: Literal["raise", "skip"] = "raise"
    # Not printed: it may hold credentials.
    storage_options: Mapping[str, object] | None = field(default=None, repr=False, hash=False)
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        for name, minimum in _MINIMA.items():
            put(self, name, integer(name, getattr(self, name), minimum, WORD))
        put(self, "dtype", Dtype.coerce(self.dtype))
        if self.device is not None and self.device != "cpu":
            put(self, "device", integer("device (None, a CUDA device's number or 'cpu')", self.device, 0))
        check_choice("pad", self.pad, (None, *PADS))
        check_choice("on_error", self.on_error, ("raise", "skip"))
        put(self, "pad_value", real_number("pad_value", self.pad_value))
        if self.rank >= self.world_size:
            raise InvalidArgument(f"rank must be < world_size (got {self.rank} of {self.world_size})")
        put_coordinates(self)
        if self.augment is not None and not isinstance(self.augment, Augment):
            raise ArgumentTypeError(f"augment must be an Augment or None (got {type(self.augment).__name__})")
        if self.augment is not None and self.pad is None:
            raise InvalidArgument(
                "augment needs pad 'constant', 'edge' or 'reflect', since warped crops reach out of arrays"
            )
        committed = self.host_buffer_bytes + self.device_buffer_bytes
        if 0 < self.max_gpu_memory_bytes < committed:
            raise InvalidArgument(
                f"max_gpu_memory_bytes must be >= host_buffer_bytes + device_buffer_bytes = {committed}, "
                f"since both take device memory (got {self.max_gpu_memory_bytes})"
            )

    @property
    def allowed_cache_bytes(self) -> int:
        """Bytes of the cache of chunks: `cache_bytes`, reduced to respect `max_gpu_memory_bytes`."""
        if self.max_gpu_memory_bytes == 0:
            return self.cache_bytes
        remaining = self.max_gpu_memory_bytes - self.host_buffer_bytes - self.device_buffer_bytes
        return min(self.cache_bytes, remaining)


_MINIMA = {
    "batch_size": 1, "host_buffer_bytes": 2**20, "device_buffer_bytes": 1, "lookahead_batches": 2, "n_io_threads": 1,
    "n_compute_threads": 0, "n_zarrs_meta_cache": 1, "n_shards_meta_cache": 1, "max_chunk_uncompressed_bytes": 0,
    "max_gpu_memory_bytes": 0, "max_bytes_per_element": 0, "cache_bytes": 0, "seed": 0, "epoch": 0, "rank": 0,
    "world_size": 1,
}  # fmt: skip
assert set(_MINIMA) <= {field.name for field in fields(Config)}


@lru_cache(maxsize=1024)
def _own_part(name: str, level: int) -> Part:
    return Part(name, None, "image", level)
