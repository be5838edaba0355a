"""The task of :func:`linumpy.stream.predict`: the crops, the new image, and the request that identifies a run.

In: volumes of a source, a grid of crops, and the channels of predictions. Out: :class:`Prediction`, a frozen record
from which follow the samples, the image with its metadata, and the request: everything on which the result depends.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from linumpy.arrays import Array
from linumpy.io.carried import Carried, carried_from
from linumpy.io.layout import read_layout
from linumpy.io.source import name_on_disk
from linumpy.io.volume import Volumes
from linumpy.resample.identity import digest_of, identify_data, unknown_data
from linumpy.resample.resumable import Request
from linumpy.stream.arguments import sizes
from linumpy.stream.config import Config, Sample
from linumpy.stream.crops.order import Columns, CropAxis, plan_columns
from linumpy.stream.crops.stitch import CropGrid, Window
from linumpy.stream.errors import InvalidArgument
from linumpy.version import __version__
from linumpy.write.new_image import NewImage, plan_image


@dataclass(frozen=True)
class Prediction:
    """The prediction of a new image from a source; `image` below means the output."""

    volumes: Volumes  # the source
    grid: CropGrid  # crops along the axes of space
    window: Window  # weights of the blending
    channels: int | None  # channels of the predictions; None if predictions have no axis of channels
    argmax: bool  # whether the image holds labels: the channel with the largest prediction
    model: str  # name of the model

    @property
    def times(self) -> list[int | None]:
        """Entries of the axis t; a single None without that axis."""
        axis = self.volumes.leading.find("t")
        return [None] if axis < 0 else list(range(self.volumes.leading_shape[axis]))

    @property
    def input_channels(self) -> int:
        """Number of channels of the source."""
        axis = self.volumes.leading.find("c")
        return 1 if axis < 0 else self.volumes.leading_shape[axis]

    @property
    def output_channels(self) -> int | None:
        """Number of channels of the image; None if the image has no axis of channels."""
        return None if self.argmax else self.channels

    @property
    def leading(self) -> tuple[int, ...]:
        """Sizes of the image's axes before the axes of space: times, then channels."""
        times = () if self.times == [None] else (len(self.times),)
        return times if self.output_channels is None else (*times, self.output_channels)

    @property
    def axes(self) -> list[tuple[int, int]]:
        """Voxels, and voxels of a chunk, along each axis of space; of a rectilinear array its longest chunk."""
        layout = read_layout(self.volumes.first.array)
        chunks = [n for n, entry in zip(layout.chunk_shape, self.volumes.first.index, strict=True) if entry is None]
        return list(zip(self.grid.volume, chunks, strict=True))

    @property
    def leading_chunks(self) -> int:
        """Number of chunks that hold the channels of a voxel."""
        chosen = self.volumes.chosen
        if chosen is None or "c" not in self.volumes.leading:
            return 1
        return -(-self.input_channels // read_layout(self.volumes.first.array).chunk_shape[chosen.leading["c"]])

    @property
    def chunk_count(self) -> int:
        """Number of chunks of the source that are needed."""
        return len(self.times) * self.leading_chunks * math.prod(-(-n // chunk) for n, chunk in self.axes)

    def columns(self, units: Sequence[int], memory: int) -> Columns:
        """Plan the columns within `memory` bytes; `units` is the shape of a chunk (or shard) of the image in space."""
        axes = [
            CropAxis(starts, size, n, chunk, unit)
            for starts, size, (n, chunk), unit in zip(self.grid.starts, self.grid.shape, self.axes, units, strict=True)
        ]
        # Of a line along the first axis: float32 sums, and as much for the planes that are being written.
        line_nbytes = 8 * (self.grid.shape[0] + units[0]) * (self.channels or 1)
        return plan_columns(
            axes, line_nbytes, read_layout(self.volumes.first.array).chunk_nbytes, self.leading_chunks, memory
        )

    @property
    def carried(self) -> Carried:
        """Metadata of the source that are also true for predictions."""
        carried = carried_from(self.volumes).without("own", "labels", "image_label", "omero")
        return replace(carried, leading={name: axis for name, axis in carried.leading.items() if name == "t"})

    def plan(
        self,
        dtype: DTypeLike | None,
        *,
        name: str,
        chunks: Sequence[int] | None,
        shards: Sequence[int] | None,
        **options: Any,
    ) -> NewImage:
        """Plan the image, which is called `name` if the source has no name."""
        if dtype is None:
            dtype = ("u1" if (self.channels or 0) <= 256 else "u2") if self.argmax else "f4"
        if self.argmax and np.array((self.channels or 1) - 1).astype(dtype) != (self.channels or 1) - 1:
            raise InvalidArgument(f"dtype={np.dtype(dtype)} cannot hold the labels of channels={self.channels}")
        ones, carried, first = (1,) * len(self.leading), self.carried, self.volumes.first
        axes = ("t" if self.times != [None] else "") + ("" if self.output_channels is None else "c") + self.volumes.axes
        predicted = {"source": name_on_disk(first.array), "model": self.model, "crop": list(self.grid.shape)}
        return plan_image(
            self.leading + first.shape,
            dtype,
            self.volumes.spacing,
            name=carried.name or name,
            axes=axes,
            chunks=None if chunks is None else (*ones, *sizes(chunks, "chunks")),
            shards=None if shards is None else (*ones, *sizes(shards, "shards")),
            origin=self.volumes.origin,
            downsampling="label" if self.argmax else "mean",
            attributes={"linumpy": {"predicted": predicted}},
            carried=carried,
            **options,
        )

    def request(self, image: NewImage, config: Config) -> Request:
        """Return everything on which the bytes of the image depend."""
        array = self.volumes.first.array
        settings = {
            "linumpy": __version__,
            "source": name_on_disk(array),
            "source metadata": digest_of(array.metadata.to_dict()),
            "source volumes": [volume.index for volume in self.volumes.volumes.values()],
            "model": self.model,
            "crops": (self.grid.shape, self.grid.starts),
            "window": self.window,
            "channels": (self.channels, self.argmax),
            "input": (config.dtype.label, config.pad, "cpu" if config.device == "cpu" else "cuda"),
            "dtype": image.dtype.str,
            "shapes": image.shapes,
            "chunks": image.chunks,
            "shards": image.shards,
            "compressors": image.compressors,
            "metadata": digest_of(image.metadata),
        }
        counts = tuple(-(-n // size) for n, size in zip(image.shapes[0], image.stored[0], strict=True))
        data = identify_data(array) or unknown_data()  # such a run is never continued
        named = tuple((key, str(value)) for key, value in settings.items())
        return Request("predict", counts, named, (("source data", data),))

    def channel_axis(self) -> int | None:
        """Return the axis of channels of a crop in a batch; None if the crop has no such axis."""
        chosen = self.volumes.chosen
        if "c" not in self.volumes.leading or chosen is None:
            return None
        return sum(entry is None for entry in self.volumes.first.index[: chosen.leading["c"]])

    def sample(self, time: int | None, index: int) -> Sample:
        """Return the sample of a crop, with all channels, at a time."""
        spatial = iter(self.grid.sample_at(index).aabb)
        first = tuple((time or 0) if name == "t" else 0 for name in self.volumes.leading)  # the first channel
        aabb: list[Any] = [next(spatial) if entry is None else entry for entry in self.volumes.volumes[first].index]
        chosen = self.volumes.chosen
        if chosen is not None and "c" in self.volumes.leading:
            aabb[chosen.leading["c"]] = (0, self.input_channels)
        return Sample(self.grid.uri, tuple(aabb), index=index)


def as_array(result: Any, xp: ModuleType) -> Array:
    """Convert the result of a model to an array of `xp`, NumPy or CuPy."""
    if hasattr(result, "detach"):  # a tensor of PyTorch, whose dtype arrays may lack
        result = result.detach()
        result = result.float() if str(result.dtype) == "torch.bfloat16" else result
    array: Array = result
    if not isinstance(result, xp.ndarray):
        array = xp.from_dlpack(result) if hasattr(result, "__dlpack__") else xp.asarray(result)
    return array


def name_of(model: Any) -> str:
    """Name a model by its function or class, and a digest of the ``state_dict()`` that it or a method's object has."""
    if isinstance(model, functools.partial):
        given = (*model.args, *model.keywords.items())
        listed = [name_of(argument) if hasattr(argument, "state_dict") else argument for argument in given]
        return f"{name_of(model.func)} of {listed}"
    kind = model if hasattr(model, "__qualname__") else type(model)
    name = f"{kind.__module__}.{kind.__qualname__}"
    owner: Any = model if hasattr(model, "state_dict") else getattr(model, "__self__", None)
    if not callable(getattr(owner, "state_dict", None)):
        return name
    digest = hashlib.sha256()
    for key, value in owner.state_dict().items():
        digest.update(key.encode())
        if hasattr(value, "detach"):
            value = as_array(value.detach().cpu(), np)
        digest.update(np.ascontiguousarray(value).tobytes())
    return f"{name} {digest.hexdigest()[:16]}"
