"""The plan of a read: what is wanted of an array, and what has to be read for it.

In: :class:`~linumpy.plan.layout.ArrayLayout` and a region. Out: :class:`ReadPlan`, which explains itself
(``str(plan)``) and from which the reader draws pieces and spans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read.fallback import why_not_gpu_mode
from linumpy.plan.read.pieces import ChunkBox, PieceCount, Pieces, chunk_box, count_pieces, cut_pieces
from linumpy.plan.region import Region, normalize_region


@dataclass(frozen=True)
class Survey:
    """What a look at the stored objects has shown.

    Attributes
    ----------
    way : str
        How chunks are decoded; empty for raw ones.
    scratch_bytes : int
        Device memory beyond the result, by default.
    pieces, reads : int or None
        Spans of stored bytes that are wanted, and reads that they are joined into.
    stored_nbytes : int or None
        Stored bytes of the chunks; None for raw ones.
    unknown : str
        Why the last three are not known; empty where they are.
    """

    way: str
    scratch_bytes: int
    pieces: int | None
    reads: int | None
    stored_nbytes: int | None
    unknown: str


@dataclass(frozen=True)
class ReadPlan:
    """What one call reads.

    Attributes
    ----------
    layout : ArrayLayout
        How the array is stored.
    region : Region
        What is wanted of it.
    survey : Survey or None
        What is known of the stored objects.
    """

    layout: ArrayLayout
    region: Region
    survey: Survey | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return self.region.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the result in the dtype of the array."""
        return self.region.size * self.layout.dtype.itemsize

    @property
    def backend(self) -> str:
        """What ``backend="auto"`` takes: ``"linumpy"``, ``"zarr-gpu"`` or ``"zarr-host"``.

        That of a read without a cast, to device 0.
        """
        if self.layout.unsupported is None:
            return "linumpy"
        return "zarr-host" if why_not_gpu_mode(self.layout, self.region) else "zarr-gpu"

    @property
    def chunk_count(self) -> int:
        """(Inner) chunks that the region touches."""
        return math.prod(last - first for first, last in chunk_box(self.layout, self.region))

    @property
    def object_count(self) -> int:
        """Stored objects, files of a local store, that the region touches; some may be missing."""
        axes = zip(chunk_box(self.layout, self.region), self.chunks_per_object, strict=True)
        return math.prod(-(-last // n) - first // n if first < last else 0 for (first, last), n in axes)

    @property
    def chunks_per_object(self) -> tuple[int, ...]:
        """(Inner) chunks of a stored object along each axis."""
        shard = self.layout.shard
        return (1,) * self.layout.rank if shard is None else shard.chunks_per_shard

    def pieces(self, max_nbytes: int | None, box: ChunkBox | None = None) -> Pieces:
        """Cut what is read, or those of its chunks that lie in `box`, into pieces; see :func:`cut_pieces`."""
        return cut_pieces(self.layout, self.region, max_nbytes, box)

    def count(self, max_nbytes: int | None) -> PieceCount:
        """Count the pieces without cutting them."""
        return count_pieces(self.layout, self.region, max_nbytes)

    def batches(self, max_chunks: int) -> Iterator[ChunkBox]:
        """Part the chunks that the region touches, in C order, so that each part can be planned by itself.

        Parameters
        ----------
        max_chunks : int
            (Inner) chunks of a batch at most, or one stored object, which is never parted.

        Yields
        ------
        tuple of (int, int)
            First chunk and the one behind the last, along each axis. One box without chunks for an empty region.
        """
        box, per_object = chunk_box(self.layout, self.region), self.chunks_per_object
        if not self.chunk_count:
            yield box
            return
        # A layer is one object thick along an axis and those before it. The first axis whose layers are small enough
        # is cut into runs of them, the axes before it into single objects.
        thick = [min(n, last - first) for (first, last), n in zip(box, per_object, strict=True)]
        layers = [
            math.prod(thick[: axis + 1]) * math.prod(last - first for first, last in box[axis + 1 :])
            for axis in range(len(box))
        ]
        split = next((axis for axis, layer in enumerate(layers) if layer <= max_chunks), len(box) - 1)
        steps = [*per_object[:split], per_object[split] * max(1, max_chunks // layers[split])]
        yield from _cut_box(box, steps)

    def objects(self, pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
        """Find the stored objects of `pieces`.

        Returns
        -------
        coordinates : numpy.ndarray of int64, (objects, rank)
            In the grid of stored objects.
        number : numpy.ndarray of int64, (n,)
            Which of them each piece lies in.
        """
        if not len(pieces):
            return np.empty((0, self.layout.rank), np.int64), np.empty(0, np.int64)
        grid = pieces.chunk // np.array(self.chunks_per_object)
        # Counted from the first one, so that no index leaves int64 however large the array is.
        first = grid.min(axis=0)
        shape = tuple(grid.max(axis=0) - first + 1)
        flat, number = np.unique(np.ravel_multi_index(tuple((grid - first).T), shape), return_inverse=True)
        return np.stack(np.unravel_index(flat, shape), axis=1) + first, number

    def __str__(self) -> str:
        return "\n".join(f"{label:<11}{text}" for label, text in _explain(self))


def plan_read(layout: ArrayLayout, region: Any = None) -> ReadPlan:
    """Plan the read of a region.

    Raises
    ------
    RegionError, TypeError
        See :func:`~linumpy.plan.region.normalize_region`.
    """
    return ReadPlan(layout, normalize_region(region, layout.shape))


def _cut_box(box: ChunkBox, steps: list[int]) -> Iterator[ChunkBox]:
    """Cut a box along its first axes at multiples of `steps`."""
    if not steps:
        yield box
        return
    (first, last), step = box[0], steps[0]
    for begin in range(first // step * step, last, step):
        for rest in _cut_box(box[1:], steps[1:]):
            yield (max(first, begin), min(last, begin + step)), *rest


def _explain(plan: ReadPlan) -> list[tuple[str, str]]:
    layout = plan.layout
    order = "" if layout.stored_axes == tuple(range(layout.rank)) else f", axes stored as {layout.stored_axes}"
    swapped = ", bytes swapped on the device" if layout.swapped else ""
    rows = [
        ("array", f"{layout.name} (zarr v{layout.zarr_format})"),
        ("stored as", f"{layout.dtype} {_times(layout.shape)}, {_binary(layout.nbytes)}{swapped}{order}"),
        ("chunks", f"{_times(layout.chunk_shape)}, {_binary(layout.chunk_nbytes)} each"),
    ]
    if layout.shard is not None:
        where = "end" if layout.shard.index_at_end else "start"
        rows.append(
            (
                "shards",
                f"{_times(layout.object_shape)}, {layout.shard.count} chunks each, index at the {where}",
            )
        )
    rows += [
        ("codecs", " → ".join(layout.codecs) or "none"),
        ("fill value", str(layout.fill_value)),
        ("region", f"{plan.region} → {_times(plan.shape) or 'one element'}, {_binary(plan.nbytes)}"),
        ("touches", _touches(plan)),
    ]
    if layout.unsupported is None:
        rows += _explain_survey(plan)
        rows.append(("backend", "linumpy, from a local store"))
    else:
        rows.append(("backend", f"{plan.backend}: {layout.unsupported}"))
        if reason := why_not_gpu_mode(layout, plan.region):
            rows.append(("by host", f"and one copy to the device: {reason}"))
    return rows


def _explain_survey(plan: ReadPlan) -> list[tuple[str, str]]:
    survey = plan.survey
    if survey is None:
        return []
    rows = [("decoding", survey.way or "none: chunks are raw")]
    if survey.unknown:
        rows.append(("stored", f"not looked at: {survey.unknown}"))
    elif survey.stored_nbytes is not None and survey.pieces is not None and plan.layout.chain is not None:
        decoded = survey.pieces * plan.layout.chunk_nbytes
        ratio = f", ratio {decoded / survey.stored_nbytes:.2f}" if survey.stored_nbytes else ""
        rows.append(("stored", f"{survey.pieces:,} chunks, {_binary(survey.stored_nbytes)}{ratio}"))
    if survey.reads is not None:
        rows.append(("reads", f"{survey.pieces:,}, joined into {survey.reads:,}"))
    rows.append(("scratch", f"{_binary(survey.scratch_bytes)} of device memory"))
    return rows


def _touches(plan: ReadPlan) -> str:
    chunks = f"{plan.chunk_count:,} chunk{'s' * (plan.chunk_count != 1)}"
    if plan.layout.unsupported is not None:
        return chunks
    if plan.layout.shard is not None:
        chunks += f" in {plan.object_count:,} shard{'s' * (plan.object_count != 1)}"
    if plan.layout.chain is not None:
        return chunks
    return f"{chunks}, {_binary(plan.count(2**62).nbytes)} to read if all are stored"


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


def _binary(nbytes: int) -> str:
    """Spell a number of bytes with the binary prefix that fits."""
    value, prefixes = float(nbytes), iter(("", "Ki", "Mi", "Gi", "Ti"))
    prefix = next(prefixes)
    while value >= 1024 and prefix != "Ti":
        value, prefix = value / 1024, next(prefixes)
    return f"{value:.0f} B" if not prefix else f"{value:.1f} {prefix}B"
