"""What :func:`linumpy.stream.predict` makes of what: the new image, the request of a run, and the crops that are read.

In: volumes of a source, a grid of crops, and what the model returns. Out: :class:`Task`, a frozen record from which the
image, its metadata, the samples and everything that the result depends on follow.
"""

from __future__ import annotations

import functools
import hashlib
import json
import secrets
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from linumpy import __version__
from linumpy.io.carried import Carried, carried_from
from linumpy.io.source import name_on_disk
from linumpy.io.volume import Volume, Volumes
from linumpy.resample.identity import identify_data
from linumpy.resample.resumable import Request
from linumpy.stream.arguments import sizes
from linumpy.stream.config import Config, Sample
from linumpy.stream.crops.stitch import CropGrid, Window, cast
from linumpy.stream.errors import InvalidArgument
from linumpy.write.new_image import NewImage, plan_image


@dataclass(frozen=True)
class Task:
    """What is predicted of what.

    Attributes
    ----------
    volumes : Volumes
        The source.
    grid : CropGrid
        Crops along the axes of space.
    window : str
        Of the blending.
    channels : int or None
        Of the predictions.
    argmax : bool
        Whether the image has labels.
    model : str
        Name of the model.
    """

    volumes: Volumes
    grid: CropGrid
    window: Window
    channels: int | None
    argmax: bool
    model: str

    @property
    def times(self) -> list[int | None]:
        """Entries of the axis t; one None without."""
        where = self.volumes.leading.find("t")
        return [None] if where < 0 else list(range(self.volumes.leading_shape[where]))

    @property
    def inputs(self) -> int:
        """Channels of the source."""
        where = self.volumes.leading.find("c")
        return 1 if where < 0 else self.volumes.leading_shape[where]

    @property
    def written(self) -> int | None:
        """Channels of the image; None where it has no such axis."""
        return None if self.argmax else self.channels

    @property
    def leading(self) -> tuple[int, ...]:
        """Sizes of the image's axes before those of space."""
        times = () if self.times == [None] else (len(self.times),)
        return times if self.written is None else (*times, self.written)

    @property
    def downsampling(self) -> str:
        """How coarser levels are made."""
        return "label" if self.argmax else "mean"

    @property
    def carried(self) -> Carried:
        """Metadata of the source that are true for predictions."""
        kept = carried_from(self.volumes).without("own", "labels", "image_label", "omero")
        return replace(kept, leading={name: axis for name, axis in kept.leading.items() if name == "t"})

    def plan(self, dtype: DTypeLike | None, *, chunks: Any, shards: Any, **options: Any) -> NewImage:
        """Plan the image."""
        if dtype is None:
            dtype = ("u1" if (self.channels or 0) <= 256 else "u2") if self.argmax else "f4"
        if self.argmax and cast(np.array((self.channels or 1) - 1), dtype) != (self.channels or 1) - 1:
            raise InvalidArgument(f"dtype={np.dtype(dtype)} cannot hold the labels of channels={self.channels}")
        ones, carried, first = (1,) * len(self.leading), self.carried, self.volumes.first
        names = ("t" if self.times != [None] else "") + ("" if self.written is None else "c")
        about = {"source": name_on_disk(first.array), "model": self.model, "crop": list(self.grid.shape)}
        return plan_image(
            self.leading + first.shape,
            dtype,
            self.volumes.spacing,
            name=carried.name or options.pop("name"),
            axes=names + self.volumes.axes,
            chunks=None if chunks is None else (*ones, *sizes(chunks, "chunks")),
            shards=None if shards is None else (*ones, *sizes(shards, "shards")),
            origin=self.volumes.origin,
            downsampling=self.downsampling,
            attributes={"linumpy": {"predicted": about}},
            carried=carried,
            **{key: value for key, value in options.items() if key != "name"},
        )

    def request(self, image: NewImage, config: Config) -> Request:
        """Return everything that the bytes of the image depend on."""
        array = self.volumes.first.array
        settings = {
            "linumpy": __version__,
            "source": name_on_disk(array),
            "source metadata": _digest(array.metadata.to_dict()),
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
            "metadata": _digest(image.metadata),
        }
        counts = tuple(-(-n // size) for n, size in zip(image.shapes[0], image.stored[0], strict=True))
        data = identify_data(array) or f"not known {secrets.token_hex(8)}"  # then a run is never continued
        named = tuple((key, str(value)) for key, value in settings.items())
        return Request("predict", counts, named, (("source data", data),))

    def volume_of(self, time: int | None) -> Volume:
        """Return the volume of a time, of its first channel."""
        return self.volumes.volumes[tuple((time or 0) if name == "t" else 0 for name in self.volumes.leading)]

    def channel_axis(self) -> int | None:
        """Return which axis of a crop in a batch is that of channels; None where there is none."""
        chosen = self.volumes.chosen
        if "c" not in self.volumes.leading or chosen is None:
            return None
        axis = chosen.leading["c"]
        return sum(entry is None for entry in self.volumes.first.index[:axis])

    def sample(self, time: int | None, index: int) -> Sample:
        """Return a crop with all channels of a time."""
        spatial = iter(self.grid.sample_at(index).aabb)
        box: list[Any] = [next(spatial) if entry is None else entry for entry in self.volume_of(time).index]
        chosen = self.volumes.chosen
        if chosen is not None and "c" in self.volumes.leading:
            box[chosen.leading["c"]] = (0, self.inputs)
        return Sample(self.grid.uri, tuple(box), index=index)


def as_array(result: Any, xp: Any) -> Any:
    """Return what a model gives as an array of NumPy or CuPy."""
    if isinstance(result, xp.ndarray):
        return result
    if hasattr(result, "detach"):  # a tensor of PyTorch, which has a dtype that arrays lack
        result = result.detach()
        result = result.float() if str(result.dtype) == "torch.bfloat16" else result
    return xp.from_dlpack(result) if hasattr(result, "__dlpack__") else xp.asarray(result)


def name_of(model: Any) -> str:
    """Name a model by its function or class, and its parameters where it, or the object of the method, tells them."""
    if isinstance(model, functools.partial):
        given = (*model.args, *model.keywords.items())
        return f"{name_of(model.func)} of {[name_of(one) if hasattr(one, 'state_dict') else one for one in given]}"
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


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:16]
