"""Parameters of a pipeline: :class:`Config`, :class:`Sample` and :class:`Part`, validated before CUDA is used."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from linumpy.stream.arguments import (
    Box,
    box_of,
    check_name,
    choice,
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
#: Seeds, epochs and indexes are below it: Philox takes them as words of 64 bits.
WORD = 2**64


class Dtype(enum.IntEnum):
    """Element type of a batch."""

    F32 = 0
    F16 = 1
    BF16 = 2
    STORED = 3

    @property
    def label(self) -> str:
        """Its name as a parameter, such as ``"f32"``."""
        return self.name.lower()

    @classmethod
    def coerce(cls, value: Any) -> Dtype:
        """Return the type that `value` names.

        Parameters
        ----------
        value : Dtype, int, str, dtype
            ``"f32"``, ``"float32"``, ``numpy.float32``, ``torch.bfloat16``, ``"stored"``, …, or a member's number.

        Raises
        ------
        InvalidArgument
            It names none of the four types.
        """
        if isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_)) and 0 <= value < len(cls):
            return cls(int(value))
        name = value if isinstance(value, str) else getattr(value, "__name__", None) or str(value)
        name = "float64" if value is float else name  # as in NumPy; the name "float" is that of torch.float32
        try:
            return _DTYPE_NAMES[name.lower().rpartition(".")[2]]
        except KeyError:
            raise InvalidArgument(f"dtype must be one of f32, f16, bf16, stored (got {value!r})") from None

    def numpy(self, stored: np.dtype | None = None) -> np.dtype:
        """Return the NumPy dtype of the elements; bfloat16 has none and gives uint16, its bits."""
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

    Its voxels are those at the physical coordinates of the sample's crop: axes are matched by their names, spacing and
    origin come from the metadata of both images. An array that has none must have the shape of the image, whose voxels
    it then has.

    Attributes
    ----------
    name : str
        Name of the part in the batch.
    uri : str or None
        The array or OME-Zarr image; None for that of the sample.
    kind : {"image", "labels"}
        Labels are resampled by nearest neighbour and keep their stored dtype; their intensities are not changed.
    level : int
        Resolution level of an OME-Zarr image.
    shape : tuple of int or None
        Voxels of the crop at that level, around the centre of the sample's; None for the same field of view.
    dtype : Dtype or None
        Of this part; None for the dtype of the configuration, or for labels the stored dtype.
    spacing, origin : tuple of float or None
        Voxel spacing of level 0 and coordinates of the centre of its first voxel, in µm along the axes of space, where
        the metadata of `uri` lacks them.
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
                f"part {self.name!r} is of the sample's own array, whose spacing and origin are parameters of Config"
            )


@dataclass(frozen=True)
class Sample:
    """A crop of an array.

    Attributes
    ----------
    uri : str
        Path or URL of an array or of an OME-Zarr image. A path that is not absolute is one from the working folder of
        the process at the time when the sample, or the iterable that holds it, is pushed.
    aabb : tuple of (int, int)
        Half-open (start, stop) for each axis, in voxels of level 0 and in stored axis order; slices are taken, too, and
        an open start is 0. Of an axis with an int that one voxel is read, and the batch does not have the axis. A box
        may reach out of the array where the configuration has a `pad`; a negative number lies before the first voxel.
    level : int
        Resolution level of an OME-Zarr image that is read.
    parts : tuple of Part
        Further arrays.
    name : str
        Name of the first part.
    index, epoch : int or None, int
        Number of the sample, on which its augmentation depends; by default its number in the order of pushing.
    dropped : tuple of int
        Axes of `aabb`, of one voxel each, that the batch does not have: those that were given as an int.
    """

    uri: str
    aabb: Box
    level: int = 0
    parts: tuple[Part, ...] = ()
    name: str = "image"
    index: int | None = field(default=None, compare=False)
    epoch: int | None = field(default=None, compare=False)
    dropped: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        put(self, "uri", uri_text(self.uri))
        box, single = box_of(self.aabb)
        put(self, "aabb", box)
        put(self, "dropped", dropped_axes(self.dropped, single, box))
        put(self, "level", integer("level", self.level, 0))
        put(self, "parts", _parts(self.parts))
        check_name(self.name)
        for name in ("index", "epoch"):
            if getattr(self, name) is not None:
                put(self, name, integer(name, getattr(self, name), 0, WORD))
        names = [self.name, *(part.name for part in self.parts)]
        if len(set(names)) < len(names):
            raise InvalidArgument(f"parts of a sample must have different names (got {', '.join(names)})")

    @classmethod
    def _drawn(cls, uri: str, aabb: Box, parts: tuple[Part, ...], index: int, epoch: int | None = None) -> Sample:
        """Make a sample without validation, which takes longer than drawing a crop: the caller passes valid values."""
        sample = object.__new__(cls)
        sample.__dict__.update(
            uri=uri, aabb=aabb, level=0, parts=parts, name="image", index=index, epoch=epoch, dropped=()
        )
        return sample

    def all_parts(self) -> tuple[Part, ...]:
        """Return all parts, the sample's own array first; a part without `uri` is of that array."""
        return (_own_part(self.name, self.level), *self.parts)

    def __str__(self) -> str:
        axes = (str(a) if axis in self.dropped else f"{a}:{b}" for axis, (a, b) in enumerate(self.aabb))
        return f"{self.uri}[{', '.join(axes)}]"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of a pipeline.

    Attributes
    ----------
    batch_size : int
        Samples in a batch.
    host_buffer_bytes : int
        Memory of the reader: its staging ring in pinned host memory and on the device; 1 MiB at least.
    device_buffer_bytes : int
        Device memory of batches and of crops before they are resampled, allocated at construction. With
        ``device="cpu"`` it is host memory.
    dtype : Dtype
        Of the batch: f32, f16, bf16 or as stored; whatever :meth:`Dtype.coerce` takes.
    lookahead_batches : int
        Batches that are read ahead at most; memory may allow fewer.
    n_io_threads : int
        Threads that open arrays ahead. Chunks are read by the reader's own engine.
    n_compute_threads : int
        Threads that resample where there is no GPU; 0 for one per core.
    n_zarrs_meta_cache : int
        Arrays whose metadata is kept; of local ones while their metadata files are the same. Others are opened again,
        which takes up to a millisecond of a core each, unless they are local and among the last 2048 that the reader
        takes.
    n_shards_meta_cache : int
        Accepted for code that sets it; the reader limits the shard indexes that it keeps by their size.
    max_chunk_uncompressed_bytes : int
        Largest chunk of an array that is accepted; 0 for no limit.
    max_gpu_memory_bytes : int
        Hard cap of all device memory of the pipeline; 0 for no cap. The chunk cache is reduced to respect it.
    max_bytes_per_element : int
        Largest element of an array that is accepted; 0 for no limit.
    device : None, int or "cpu"
        CUDA device; None for CuPy's current one, or the CPU where there is none.
    cache_bytes : int
        Decoded chunks that are kept on the device.
    pad : {"constant", "edge", "reflect"} or None
        Values outside of an array, as in ``numpy.pad``; None refuses crops that extend beyond it.
    pad_value : float
        For ``pad="constant"``; to integers rounded and saturated.
    augment : Augment or None
        Augmentation, which needs a `pad`.
    spacing, origin : tuple of float or None
        Voxel spacing of level 0 of the samples' own arrays and coordinates of the centre of its first voxel, in µm
        along the axes of space, where their metadata lacks them. See :class:`Part` for other arrays.
    seed, epoch : int
        What augmentation depends on, together with the number of the sample; below 2**64.
    on_error : {"raise", "skip"}
        Whether a batch with a faulty sample raises when it is popped, or is returned without that sample.
    storage_options : mapping or None
        Of all URLs: what obstore's ``from_url`` takes; see docs/remote.md.
    rank, world_size : int
        This process serves samples ``rank``, ``rank + world_size``, … of what is pushed.

    Raises
    ------
    InvalidArgument
        A value is invalid (also a ``ValueError``), or of a wrong type (also a ``TypeError``).
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
    # May hold credentials, so that it is not printed.
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            put(self, name, integer(name, getattr(self, name), least, WORD))
        put(self, "dtype", Dtype.coerce(self.dtype))
        if self.device is not None and self.device != "cpu":
            put(self, "device", integer("device", self.device, 0))
        choice("pad", self.pad, (None, *PADS))
        choice("on_error", self.on_error, ("raise", "skip"))
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
                f"since both have device memory (got {self.max_gpu_memory_bytes})"
            )

    @property
    def allowed_cache_bytes(self) -> int:
        """Bytes of the chunk cache within the cap of device memory."""
        if self.max_gpu_memory_bytes == 0:
            return self.cache_bytes
        remaining = self.max_gpu_memory_bytes - self.host_buffer_bytes - self.device_buffer_bytes
        return min(self.cache_bytes, remaining)


_LEAST = {
    "batch_size": 1, "host_buffer_bytes": 2**20, "device_buffer_bytes": 1, "lookahead_batches": 2, "n_io_threads": 1,
    "n_compute_threads": 0, "n_zarrs_meta_cache": 1, "n_shards_meta_cache": 1, "max_chunk_uncompressed_bytes": 0,
    "max_gpu_memory_bytes": 0, "max_bytes_per_element": 0, "cache_bytes": 0, "seed": 0, "epoch": 0, "rank": 0,
    "world_size": 1,
}  # fmt: skip
assert set(_LEAST) <= {field.name for field in fields(Config)}


@lru_cache(maxsize=1024)
def _own_part(name: str, level: int) -> Part:
    return Part(name, None, "image", level)


def _parts(parts: Any) -> tuple[Part, ...]:
    if not isinstance(parts, Iterable):
        raise ArgumentTypeError(f"parts must be a sequence of Parts (got {type(parts).__name__})")
    result = tuple(parts)
    for part in result:
        if not isinstance(part, Part):
            raise ArgumentTypeError(f"parts must be a sequence of Parts (got a {type(part).__name__})")
    return result
