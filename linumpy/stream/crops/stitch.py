"""Inference on a whole volume: :class:`CropGrid` covers it with crops, :class:`Stitcher` blends their predictions.

The positions of crops are all combinations of positions along each axis, and the weight of a voxel in a crop is a
product of weights along each axis. So the weights are normalized in advance, axis by axis, to a sum of 1 at each voxel.
Predictions are multiplied by these weights and added; no sum of weights is stored.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

import numpy as np
from numpy.typing import DTypeLike

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.errors import not_pickled
from linumpy.io.open import open_source
from linumpy.plan.grid.blocks import position_in_blocks
from linumpy.stream.arguments import integer, sizes
from linumpy.stream.config import Part, Sample
from linumpy.stream.errors import InvalidArgument
from linumpy.stream.reading.arrays import with_absolute_paths


class Writer(Protocol):
    """An array, or a writer of an image."""

    def __setitem__(self, region: tuple[slice, ...], block: Array, /) -> None:
        """Write a region."""


Window = Literal["linear", "gaussian", "flat"]


def positions(n: int, size: int, overlap: int) -> list[int]:
    """Return where crops begin along an axis: `size` - `overlap` apart, and the last crop ends with the axis."""
    if size >= n:
        return [0]
    return [*range(0, n - size, size - overlap), n - size]


class CropGrid:
    """Crops that cover a volume; a sequence for :meth:`Pipeline.push`.

    Parameters
    ----------
    uri : str or Path
        The array or OME-Zarr image.
    shape : sequence of int
        Voxels of a crop; if the array is smaller, the configuration of the pipeline needs a `pad`.
    overlap : int or sequence of int
        Minimum number of voxels that neighbouring crops share.
    volume : sequence of int, optional
        Shape of the array; by default the array is opened to find it.
    parts : sequence of Part
        Further parts of the samples.
    block : sequence of int, optional
        Number of crops along each axis that come together: block after block in C order, and within a block in C order.
        By default all crops are one block. With blocks of some crops along the first axis and few along the others,
        less memory keeps the chunks that several crops touch, and a :class:`Stitcher` holds more unfinished planes.

    Raises
    ------
    InvalidArgument
        `shape`, `block` or `overlap` does not fit the array, or an overlap is not smaller than the crop.
    """

    def __init__(
        self,
        uri: str | Path,
        shape: Sequence[int],
        overlap: int | Sequence[int] = 0,
        *,
        volume: Sequence[int] | None = None,
        parts: Iterable[Part] = (),
        block: Sequence[int] | None = None,
    ) -> None:
        checked = with_absolute_paths(Sample(uri, ((0, 1),), parts=parts))  # type: ignore[arg-type]
        self.uri, self.shape, self.parts = checked.uri, sizes(shape), checked.parts
        self.volume = sizes(open_source(uri).shape if volume is None else volume, "volume")
        each = overlap if isinstance(overlap, (Sequence, np.ndarray)) else (overlap,) * len(self.shape)
        shared = tuple(integer("overlap", n, 0) for n in each)
        if not len(self.shape) == len(self.volume) == len(shared):
            raise InvalidArgument(
                f"shape={self.shape} and overlap={shared} need a number for each axis of {uri}, {self.volume}"
            )
        for axis, (size, n) in enumerate(zip(self.shape, shared, strict=True)):
            if n >= size:
                raise InvalidArgument(f"overlap along axis {axis} must be from 0 to {size - 1} (got {n})")
        self.starts = [positions(*axis) for axis in zip(self.volume, self.shape, shared, strict=True)]
        self._counts = [len(starts) for starts in self.starts]
        self.block = tuple(self._counts) if block is None else sizes(block, "block")
        if len(self.block) != len(self.shape):
            raise InvalidArgument(f"block={self.block} needs a number for each axis of {uri}, {self.volume}")

    @property
    def count(self) -> int:
        """Number of crops."""
        return math.prod(self._counts)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Sample]:
        return (self.sample_at(index) for index in range(self.count))

    def sample_at(self, index: int) -> Sample:
        """Return a crop; raise IndexError if the grid has fewer crops."""
        position = self.position_of(index)
        aabb = tuple((s[i], s[i] + n) for s, i, n in zip(self.starts, position, self.shape, strict=True))
        return Sample._drawn(self.uri, aabb, self.parts, operator.index(index))

    def position_of(self, index: int) -> tuple[int, ...]:
        """Return the index of a crop along each axis."""
        if not 0 <= index < self.count:
            raise IndexError(f"crop {index}: there are {self.count}")
        return position_in_blocks(index, self._counts, self.block)


class Blend:
    """Adds up weighted predictions of crops, within a box of the volume, and writes complete planes.

    The value of a voxel does not depend on the box, since predictions are added in the order of :meth:`add`.

    `write` takes a region of the volume and its voxels in float32, with the leading axes of predictions. Regions end at
    multiples of `planes` along the first axis, or at the end of `box`, which is the whole volume by default.
    """

    def __init__(
        self,
        grid: CropGrid,
        write: Callable[[tuple[slice, ...], Array], object],
        window: Window,
        planes: int,
        box: tuple[slice, ...] | None = None,
    ) -> None:
        if window not in ("linear", "gaussian", "flat"):
            raise InvalidArgument(f"window must be linear, gaussian or flat (got {window!r})")
        self.grid, self._write, self._planes = grid, write, planes
        self.box = tuple(slice(0, n) for n in grid.volume) if box is None else box
        axes = list(zip(grid.starts, grid.volume, grid.shape, strict=True))
        self._weights = [_weights(starts, n, size, window) for starts, n, size in axes]
        # Along each axis, the indices of crops that touch the box.
        self._touching = [
            [i for i, start in enumerate(starts) if start < side.stop and start + size > side.start]
            for (starts, _, size), side in zip(axes, self.box, strict=True)
        ]
        count = math.prod(map(len, self._touching[1:]))
        # Number of crops that were not added yet, for each start along the first axis.
        self._missing = {grid.starts[0][i]: count for i in self._touching[0]}
        self._begin = self.box[0].start  # first plane that is not written
        self._sum: Any = None  # sums of the planes from `_begin` on

    def indices(self) -> Iterator[int]:
        """Yield the indices of the crops that touch the box, in the order of the grid."""
        counts = [len(starts) for starts in self.grid.starts]
        for position in itertools.product(*self._touching):
            yield int(np.ravel_multi_index(position, counts))

    def add(self, index: int, prediction: Array) -> None:
        """Add the prediction of a crop, of the shape of a crop after any leading axes."""
        position, rank = self.grid.position_of(index), len(self.grid.shape)
        start = [starts[i] for starts, i in zip(self.grid.starts, position, strict=True)]
        inside: tuple[Any, ...] = tuple(
            slice(max(side.start - a, 0), min(size, side.stop - a))
            for a, size, side in zip(start, self.grid.shape, self.box, strict=True)
        )
        xp = array_module(prediction)
        block = xp.asarray(prediction[(..., *inside)], np.float32)
        for axis, (weights, i) in enumerate(zip(self._weights, position, strict=True)):
            shape = [1] * rank
            shape[axis] = -1
            block = block * xp.asarray(weights[i][inside[axis]], np.float32).reshape(shape)
        begin = [a + side.start for a, side in zip(start, inside, strict=True)]
        lead, sizes = block.shape[:-rank], block.shape[-rank:]
        held = 0 if self._sum is None else self._sum.shape[len(lead)]
        if (more := begin[0] + sizes[0] - self._begin - held) > 0:
            across = (side.stop - side.start for side in self.box[1:])
            planes = xp.zeros((*lead, more, *across), np.float32)
            self._sum = planes if self._sum is None else xp.concatenate([self._sum, planes], axis=len(lead))
        origin = [self._begin, *(side.start for side in self.box[1:])]
        target = [slice(a - o, a - o + n) for a, o, n in zip(begin, origin, sizes, strict=True)]
        self._sum[(..., *target)] += block
        self._missing[start[0]] -= 1

    def write_complete(self) -> None:
        """Write the planes for which all crops were added."""
        missing = [start for start, count in self._missing.items() if count]
        end = min(min(missing), self.box[0].stop) if missing else self.box[0].stop
        if missing:
            end -= end % self._planes
        if end <= self._begin or self._sum is None:
            return
        count, rank = end - self._begin, len(self.box)
        across = (slice(None),) * (rank - 1)
        self._write((slice(self._begin, end), *self.box[1:]), self._sum[(..., slice(None, count), *across)])
        remaining = self._sum[(..., slice(count, None), *across)]
        self._sum = remaining.copy() if remaining.size else None
        self._begin = end


class Stitcher:
    """Blends predictions of the crops of a grid into one volume, and writes the volume plane by plane.

    Parameters
    ----------
    grid : CropGrid
        The crops.
    writer : OmeZarrWriter or array
        Takes ``writer[region] = block``, and has the shape of the volume. An OmeZarrWriter needs `buffer_bytes` if
        regions divide chunks, which is not so if `planes` is a multiple of the chunk's size along the first axis.
    window : {"linear", "gaussian", "flat"}
        Weights within a crop: falling linearly to the faces, a Gaussian with a standard deviation of an eighth of the
        crop's size, or all equal.
    planes : int
        Planes along the first axis that are written at a time; the last write may have fewer.

    Notes
    -----
    Predictions may come in any order. The order of a grid without `block` takes the least memory: the planes of one
    crop, and up to `planes` more; with `block` the planes of a block of crops. Sums are on the host or the device,
    where the predictions are. Each crop is added once.
    """

    def __init__(self, grid: CropGrid, writer: Writer, *, window: Window = "linear", planes: int = 1) -> None:
        self.grid, self._writer = grid, writer
        self._blend = Blend(grid, self._write, window, integer("planes", planes, 1))
        self._added: set[int] = set()

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send predictions to the process that has it")

    def add(self, samples: Sequence[Sample], predictions: Array) -> None:
        """Add the predictions of a batch.

        Parameters
        ----------
        samples : sequence of Sample
            The samples of the batch: ``batch.samples``.
        predictions : numpy.ndarray or cupy.ndarray
            (samples, *crop); voxels beyond the volume are ignored.

        Raises
        ------
        InvalidArgument
            Predictions have another shape; a sample is no crop of the grid, or was added already.
        """
        if tuple(predictions.shape) != (len(samples), *self.grid.shape):
            raise InvalidArgument(
                f"predictions have shape {tuple(predictions.shape)}, expected {(len(samples), *self.grid.shape)}"
            )
        for sample, prediction in zip(samples, predictions, strict=True):
            index = sample.index
            if index is None or sample != self.grid.sample_at(index):
                raise InvalidArgument(f"{sample} is no crop of the grid")
            if index in self._added:
                raise InvalidArgument(f"{sample} was added already")
            self._added.add(index)
            self._blend.add(index, prediction)
        self._blend.write_complete()

    def _write(self, region: tuple[slice, ...], block: Array) -> None:
        self._writer[region] = cast(block, getattr(self._writer, "dtype", np.dtype("f4")))

    def close(self) -> None:
        """Check that all crops were added.

        Raises
        ------
        InvalidArgument
            Crops are missing.
        """
        missing = self.grid.count - len(self._added)
        if missing:
            raise InvalidArgument(f"{missing} of {self.grid.count} crops were never added")

    def __enter__(self) -> Stitcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()


def cast(block: Array, dtype: DTypeLike) -> Array:
    """Cast in up to 8 parts, to save memory; round halves to even and saturate; `block` itself if nothing changes."""
    dtype = np.dtype(dtype)
    if dtype.kind not in "iu":
        return block.astype(dtype, copy=False)
    xp, exact = array_module(block), np.dtype("f4" if dtype.itemsize < 4 else "f8")
    low, high = (exact.type(limit) for limit in (np.iinfo(dtype).min, np.iinfo(dtype).max))
    if int(high) > np.iinfo(dtype).max:  # 2**63 and 2**64 are no int64 and uint64
        high = np.nextafter(high, exact.type(0))
    whole: Array = xp.empty(block.shape, dtype)
    step = max(1, -(-len(block) // 8))
    for begin in range(0, len(block), step):
        rounded = xp.rint(block[begin : begin + step].astype(exact))
        whole[begin : begin + step] = xp.clip(rounded, low, high, out=rounded)
    return whole


def _weights(starts: Sequence[int], n: int, size: int, window: str) -> list[np.ndarray]:
    """Return the weights of each crop along an axis; at each voxel the weights of all crops add up to 1."""
    voxel = np.arange(size)
    if window == "flat":
        profile = np.ones(size)
    elif window == "linear":
        profile = np.minimum(voxel + 1, size - voxel).astype(float)
    else:
        profile = np.exp(-0.5 * ((voxel - (size - 1) / 2) / (size / 8)) ** 2)
    total = np.zeros(max(n, size))
    for start in starts:
        total[start : start + size] += profile
    return [profile / total[start : start + size] for start in starts]
