"""Random crops: :class:`CropSampler` → samples, each of which depends only on (seed, epoch, index)."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from linumpy.io.layout import read_layout
from linumpy.io.open import open_source
from linumpy.plan.crops import cache_nbytes
from linumpy.stream.arguments import integer, sizes
from linumpy.stream.augment import CROP_STREAM, generator
from linumpy.stream.config import WORD, Part, Sample
from linumpy.stream.crops.histogram import Histogram
from linumpy.stream.crops.order import most_chunks
from linumpy.stream.errors import InvalidArgument
from linumpy.stream.reading.arrays import with_absolute_paths

#: Blocks whose crops are shuffled; crops that are drawn together where there are no blocks.
_BLOCKS = 8
_DRAWN = 256


@dataclass(frozen=True)
class Volume:
    """An array from which crops are drawn.

    Attributes
    ----------
    uri : str
        The array or OME-Zarr image.
    shape : tuple of int or None
        Shape of level 0; by default the array is opened to find it.
    weight : float or None
        In mode uniform, the relative frequency of crops of this volume; by default the number of voxels of the volume.
        In the modes foreground and balanced, a factor of the counts in `histogram`; by default 1.
    histogram : Histogram or None
        Histogram of labels, of a mask or of a coarse level of the volume, for the modes foreground and balanced. The
        array of the histogram must cover the same space as the volume. Along each axis the voxels of one of both must
        be a whole multiple of the voxels of the other.
    parts : tuple of Part
        Further parts of the samples, such as labels.
    """

    uri: str
    shape: tuple[int, ...] | None = None
    weight: float | None = None
    histogram: Histogram | None = None
    parts: tuple[Part, ...] = ()


class _CellTable(NamedTuple):
    """Cells of all volumes that hold voxels of a class, or of any class."""

    #: Index of the volume, and of the cell in the histogram of the volume.
    volumes: np.ndarray
    cells: np.ndarray
    cumulative: np.ndarray  # cumulative probability of the cells; see :func:`_cumulative`


class CropSampler:
    """A finite or infinite sequence of random crops; crop `index` depends only on (seed, epoch, index).

    Each iteration, by ``for`` or by a push, is the next epoch, or the next `epochs`.

    Parameters
    ----------
    volumes : sequence of Volume or path
        Arrays from which crops are drawn.
    shape : sequence of int
        Voxels of a crop at level 0.
    mode : {"uniform", "foreground", "balanced"}
        "uniform" draws any crop that lies inside a volume. "foreground" draws a cell of the histograms, with a
        probability in proportion to the foreground voxels of the cell, and centres the crop in the cell. "balanced"
        first draws a class, uniformly or by `class_weights`, and then a cell in proportion to the voxels of that class.
    foreground : float
        With mode "foreground", the fraction of crops that are centred on foreground; the others are uniform.
    class_weights : mapping of int to float, optional
        With mode "balanced", the relative frequency of each class; a class without weight is not drawn.
    locality : int
        Number of crops that are drawn in one block, with mode "uniform"; below 65,536. A block holds about as many
        voxels as these crops together, and 8 blocks are drawn at a time, whose crops come in random order. So a chunk
        is fetched once for all crops of its blocks, if ``Config(cache_bytes=sampler.cache_nbytes)`` keeps it. Each
        crop is as probable as without blocks. By default 1: no blocks. Ranks of one configuration would share the
        blocks; rather give each rank a sampler of its own seed.
    length : int, optional
        Samples of an epoch. By default the sequence is infinite, and is one epoch.
    epochs : int, optional
        Number of successive epochs in one iteration, with `length`; by default 1.
    seed, epoch : int
        Seed of the random numbers; number of the first epoch.

    Attributes
    ----------
    epoch : int
        First epoch of the next iteration, and of :meth:`sample_at`.

    Raises
    ------
    InvalidArgument
        A parameter is out of its range; crops do not fit into a volume; a histogram is missing, has no foreground or
        does not fit the volume. Also where a parameter would have no effect: `class_weights` of classes that no
        histogram has, or in another mode than "balanced"; `foreground` in another mode than "foreground".

    Notes
    -----
    Within a cell the centre is drawn uniformly, so the centre of a crop need not be a foreground voxel. A crop that
    would reach out of its array is shifted inside.
    """

    def __init__(
        self,
        volumes: Sequence[Volume | str | Path],
        shape: Sequence[int],
        *,
        mode: Literal["uniform", "foreground", "balanced"] = "uniform",
        foreground: float = 1.0,
        class_weights: Mapping[int, float] | None = None,
        locality: int = 1,
        length: int | None = None,
        epochs: int = 1,
        seed: int = 0,
        epoch: int = 0,
    ) -> None:
        if mode not in ("uniform", "foreground", "balanced"):
            raise InvalidArgument(f"mode must be uniform, foreground or balanced (got {mode!r})")
        if not 0 <= foreground <= 1:
            raise InvalidArgument(f"foreground must be from 0 to 1 (got {foreground})")
        if foreground != 1 and mode != "foreground":
            raise InvalidArgument(f"foreground={foreground} does nothing in mode {mode!r}: pass mode='foreground'")
        if class_weights is not None and mode != "balanced":
            raise InvalidArgument(f"class_weights do nothing in mode {mode!r}: pass mode='balanced'")
        if isinstance(volumes, (str, Path)) or not len(volumes):
            raise InvalidArgument(f"volumes must be a sequence of volumes, at least one (got {volumes!r})")
        self.shape = sizes(shape)
        self.volumes = tuple(_with_shape(volume) for volume in volumes)
        for volume in self.volumes:
            _check_fits(volume, self.shape)
        self.mode, self.foreground, self.locality = mode, foreground, integer("locality", locality, 1, 2**16)
        if self.locality > 1 and mode != "uniform":
            raise InvalidArgument(f"locality={locality} does nothing in mode {mode!r}: pass mode='uniform'")
        #: Number of positions of crops along each axis: int64 (volumes, axes).
        self._positions = np.array([_shape_of(volume) for volume in self.volumes]) - self.shape + 1
        self._group: tuple[tuple[int, int, int], np.ndarray, np.ndarray] | None = None
        self.length = None if length is None else integer("length", length, 1, WORD)
        self.seed, self.epoch = integer("seed", seed, 0, WORD), integer("epoch", epoch, 0, WORD)
        self.epochs = integer("epochs", epochs, 1, WORD - self.epoch)
        self._choice = _cumulative([math.prod(_shape_of(v)) if v.weight is None else v.weight for v in self.volumes])
        self._classes, self._class_choice = np.zeros(0, np.int64), np.zeros(0)
        self._tables: dict[int, _CellTable] = {}
        if mode != "uniform":
            self._prepare(class_weights)

    @property
    def count(self) -> int | None:
        """Number of samples in all epochs; None for infinitely many."""
        return None if self.length is None else self.length * self.epochs

    def __len__(self) -> int:
        if self.count is None:
            raise TypeError("an infinite CropSampler has no length; pass length=")
        return self.count

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch with which the next iteration begins, for users who count epochs themselves."""
        self.epoch = integer("epoch", epoch, 0, WORD - self.epochs)

    def next_iteration(self) -> CropSampler:
        """Return a sampler of the next iteration, whose epoch stays as it is; advance this sampler by one iteration."""
        self.set_epoch(self.epoch)  # raises if no epoch remains
        sampler = copy.copy(self)
        self.epoch += self.epochs
        return sampler

    def __iter__(self) -> Iterator[Sample]:
        sampler = self.next_iteration()
        numbers = itertools.count() if sampler.count is None else range(sampler.count)
        return (sampler.sample_at(number) for number in numbers)

    def sample_at(self, index: int) -> Sample:
        """Return a sample; `index` counts through the epochs of an iteration.

        Raises
        ------
        IndexError
            The iteration has fewer samples.
        """
        index = operator.index(index)
        if not 0 <= index < (WORD if self.count is None else self.count):
            raise IndexError(f"crop {index}: there are {'infinitely many' if self.count is None else self.count}")
        epochs_before, index_in_epoch = (0, index) if self.length is None else divmod(index, self.length)
        epoch = self.epoch + epochs_before
        if self.mode == "uniform":
            volume, start = self._drawn_in_group(epoch, index_in_epoch)
        else:
            numbers = generator(CROP_STREAM, self.seed, epoch, index_in_epoch)
            if self.mode == "balanced" or numbers.random() < self.foreground:
                volume, start = self._draw_centred(numbers)
            else:
                number, starts = self._draw_uniform(numbers, 1)
                volume, start = self.volumes[number[0]], starts[0].tolist()
        aabb = tuple([(a, a + c) for a, c in zip(start, self.shape, strict=True)])
        return Sample._drawn(volume.uri, aabb, volume.parts, index_in_epoch, epoch)

    @property
    def cache_nbytes(self) -> int:
        """Decoded bytes of the chunks of the volumes that the crops of 8 blocks, and of the next one, touch, at most.

        For ``Config(cache_bytes=…)``; further parts of samples need memory of their own.
        """
        needed = []
        for volume, spans in zip(self.volumes, self._spans.tolist(), strict=True):
            layout = read_layout(open_source(volume.uri))
            counts = [
                most_chunks(span + c - 1, chunk, n)
                for span, c, chunk, n in zip(spans, self.shape, layout.chunk_shape, layout.shape, strict=True)
            ]
            needed.append(cache_nbytes((_BLOCKS + 1) * math.prod(counts), layout.chunk_nbytes))
        return max(needed)

    @cached_property
    def _spans(self) -> np.ndarray:
        """Number of positions of a block along each axis, int64 (volumes, axes); found only where blocks are drawn."""
        return np.array([self._spans_of(shape) for shape in map(_shape_of, self.volumes)])

    def _spans_of(self, shape: tuple[int, ...]) -> list[int]:
        """Return the number of positions along each axis that a block has; blocks are equal, but for rounding."""
        sizes_, spans, crops = self.shape, [1] * len(shape), float(self.locality)
        free = sorted((n / c, axis) for axis, (n, c) in enumerate(zip(shape, sizes_, strict=True)) if n > c)
        for number, (most, axis) in enumerate(free):
            side = min(most, crops ** (1 / (len(free) - number)))  # voxels of a block, in sizes of a crop
            crops /= side
            positions = shape[axis] - sizes_[axis] + 1
            spans[axis] = math.ceil(positions / max(1, round(positions / (sizes_[axis] * (side - 1) + 1))))
        return spans

    def _drawn_in_group(self, epoch: int, index: int) -> tuple[Volume, list[int]]:
        """Return the volume and start of a crop; crops are drawn in groups, since each draw of one takes 40 µs."""
        group, place = divmod(index, _DRAWN if self.locality == 1 else _BLOCKS * self.locality)
        key, held = (self.seed, epoch, group), self._group
        if held is None or held[0] != key:
            numbers = generator(CROP_STREAM, *key)
            drawn = self._draw_uniform(numbers, _DRAWN) if self.locality == 1 else self._draw_in_blocks(numbers)
            held = self._group = key, *drawn
        return self.volumes[held[1][place]], held[2][place].tolist()

    def _draw_in_blocks(self, numbers: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw crops in :data:`_BLOCKS` blocks, each with a probability in proportion to the positions in it."""
        chosen, first = self._draw_uniform(numbers, _BLOCKS)
        begin = first // self._spans[chosen] * self._spans[chosen]
        end = np.minimum(begin + self._spans[chosen], self._positions[chosen])
        order = numbers.permutation(_BLOCKS * self.locality) // self.locality
        return chosen[order], begin[order] + _below(numbers, (end - begin)[order])

    def _draw_uniform(self, numbers: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw crops that lie inside a volume; return the indices of their volumes, and starts (crops, axes)."""
        chosen = np.searchsorted(self._choice, numbers.random(count), side="right")
        positions = self._positions[chosen]
        return chosen, _below(numbers, positions)

    def _prepare(self, class_weights: Mapping[int, float] | None) -> None:
        """Concatenate the cells of all volumes: a table for each class, or in mode foreground one for all classes."""
        for volume in self.volumes:
            if volume.histogram is None:
                raise InvalidArgument(
                    f"mode {self.mode!r} needs the histogram of {volume.uri}: Histogram.of(its labels)"
                )
            if any(c > 2 * n for c, n in zip(volume.histogram.cell, self.shape, strict=False)):
                text = "%s: crops of %s may miss their class in cells of %s: pass a smaller cell= to Histogram.of"
                logging.getLogger(__name__).warning(text, volume.uri, self.shape, volume.histogram.cell)
        classes = sorted({int(value) for volume in self.volumes for value in _histogram(volume).classes})
        groups = {value: [value] for value in classes} if self.mode == "balanced" else {0: classes}
        for key, members in groups.items():
            volumes, cells, weights = [], [], []
            for number, volume in enumerate(self.volumes):
                histogram = _histogram(volume)
                counts = histogram.counts[:, np.isin(histogram.classes, members)].sum(axis=1)
                cell_weights = counts * (1.0 if volume.weight is None else volume.weight)
                volumes.append(np.full(int((cell_weights > 0).sum()), number))
                cells.append(histogram.cells[cell_weights > 0])
                weights.append(cell_weights[cell_weights > 0])
            if sum(map(len, weights)):
                cumulative = _cumulative(np.concatenate(weights))
                self._tables[key] = _CellTable(np.concatenate(volumes), np.concatenate(cells), cumulative)
        if not self._tables:
            raise InvalidArgument("no volume has foreground: all histograms are empty")
        self._classes = np.array(list(self._tables))
        unknown = [] if class_weights is None else [value for value in class_weights if value not in self._tables]
        if unknown:
            raise InvalidArgument(
                f"class_weights has {', '.join(map(repr, unknown))}, but the histograms hold the classes "
                f"{', '.join(map(str, self._tables))}"
            )
        of_classes = [1.0 if class_weights is None else float(class_weights.get(int(k), 0)) for k in self._classes]
        self._class_choice = _cumulative(of_classes)

    def _draw_centred(self, numbers: np.random.Generator) -> tuple[Volume, list[int]]:
        """Draw a crop that is centred in a cell of a histogram; return its volume and start."""
        key = int(self._classes[np.searchsorted(self._class_choice, numbers.random(), side="right")])
        table = self._tables[key]
        row = int(np.searchsorted(table.cumulative, numbers.random(), side="right"))
        volume = self.volumes[int(table.volumes[row])]
        histogram, full = _histogram(volume), _shape_of(volume)
        start = []
        for axis, i in enumerate(np.unravel_index(int(table.cells[row]), histogram.grid)):
            begin = int(i) * histogram.cell[axis]
            end = min(begin + histogram.cell[axis], histogram.shape[axis])
            scale = full[axis] / histogram.shape[axis]
            centre = int(numbers.integers(math.floor(begin * scale), math.ceil(end * scale)))
            first = centre - self.shape[axis] // 2
            start.append(min(max(first, 0), full[axis] - self.shape[axis]))
        return volume, start


def _below(numbers: np.random.Generator, ends: np.ndarray) -> np.ndarray:
    """Draw a whole number from 0 to below each end, in a fifth of the time of ``numbers.integers``."""
    return (numbers.random(ends.shape) * ends).astype(np.int64)


def _with_shape(volume: Volume | str | Path) -> Volume:
    """Return a volume with absolute paths and its shape, for which the array is opened unless the shape is given."""
    given = volume if isinstance(volume, Volume) else Volume(str(volume))
    checked = with_absolute_paths(Sample(given.uri, ((0, 1),), parts=given.parts))
    shape = open_source(checked.uri).shape if given.shape is None else given.shape
    return replace(given, uri=checked.uri, parts=checked.parts, shape=sizes(shape))


def _shape_of(volume: Volume) -> tuple[int, ...]:
    assert volume.shape is not None
    return volume.shape


def _histogram(volume: Volume) -> Histogram:
    assert volume.histogram is not None
    return volume.histogram


def _check_fits(volume: Volume, shape: tuple[int, ...]) -> None:
    full = _shape_of(volume)
    if len(full) != len(shape):
        raise InvalidArgument(f"shape={shape} has {len(shape)} axes, {volume.uri} has {len(full)}")
    if any(c > n for c, n in zip(shape, full, strict=True)):
        raise InvalidArgument(f"crops of {shape} do not lie in {volume.uri} of {full}")
    counted = full if volume.histogram is None else volume.histogram.shape
    if len(counted) != len(full) or not all(map(_are_levels, counted, full)):
        raise InvalidArgument(
            f"the histogram, of an array of {counted}, does not fit {volume.uri} of {full}: pass the histogram of an "
            "array that covers the same space, in voxels that are whole multiples: labels of this shape, a coarse level"
        )


def _are_levels(a: int, b: int) -> bool:
    """Whether one number of voxels is the other divided by a whole factor, rounded up or down."""
    few, many = min(a, b), max(a, b)
    return any(few in (many // factor, -(-many // factor)) for factor in (many // few, -(-many // few)))


def _cumulative(weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return cumulative probabilities; from the last positive weight on they are 2, above every number from 0 to 1."""
    values = np.asarray(weights, np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all() and values.sum() > 0):
        raise InvalidArgument("weights must be finite numbers >= 0, not all of them 0")
    result = np.cumsum(values) / values.sum()
    result[np.flatnonzero(values)[-1] :] = 2.0
    return result
