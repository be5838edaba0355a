"""Plan a read: a region of an array, and the chunks that the region touches.

In: :class:`~linumpy.plan.layout.ArrayLayout` and a region. Out: :class:`ReadPlan`; ``str(plan)`` describes the read,
one property a line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read.fallback import why_not_gpu_mode
from linumpy.plan.read.rectilinear import chunk_range
from linumpy.plan.region import Region, RegionLike, normalize_region


@dataclass(frozen=True)
class ReadPlan:
    """The read of one call.

    Attributes
    ----------
    layout : ArrayLayout
        How the array is stored.
    region : Region
        Region to read.
    decoding : str
        How chunks are decoded; empty if unknown.
    scratch_bytes : int or None
        Device memory in addition to the result; None if unknown.
    """

    layout: ArrayLayout
    region: Region
    decoding: str = ""
    scratch_bytes: int | None = None

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
        """The backend that ``backend="auto"`` chooses: ``"linumpy"``, ``"zarr-gpu"`` or ``"zarr-host"``.

        Valid for a read to device 0, without a cast.
        """
        if self.layout.unsupported is None:
            return "linumpy"
        return "zarr-host" if why_not_gpu_mode(self.layout, self.region) else "zarr-gpu"

    @property
    def chunk_count(self) -> int:
        """Number of (inner) chunks that the region touches."""
        return math.prod(last - first for first, last in self._chunk_box)

    @property
    def object_count(self) -> int:
        """Number of stored objects (files of a local store) that the region touches; some may not exist."""
        return math.prod(last - first for first, last in self.object_box)

    @property
    def object_box(self) -> list[tuple[int, int]]:
        """First stored object that the region touches, and one past the last, along each axis."""
        if self.layout.lengths is not None:
            return self._object_box(self.layout.lengths)
        return self._regular_box(self.layout.object_shape)

    @property
    def _chunk_box(self) -> list[tuple[int, int]]:
        """First chunk that the region touches, and one past the last, along each axis."""
        if self.layout.lengths is not None and self.layout.shard is None:
            return self._object_box(self.layout.lengths)
        return self._regular_box(self.layout.chunk_shape)

    def _regular_box(self, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
        bounds = zip(self.region.start, self.region.stop, sizes, strict=True)
        return [(start // size, -(-stop // size) if stop > start else start // size) for start, stop, size in bounds]

    def _object_box(self, lengths: tuple[np.ndarray, ...]) -> list[tuple[int, int]]:
        """Return the first stored object (rectilinear grid) that the region touches, and one past the last, by axis."""
        return [chunk_range(*axis) for axis in zip(lengths, self.region.start, self.region.stop, strict=True)]

    def __str__(self) -> str:
        return "\n".join(f"{label:<11}{text}" for label, text in _description(self))


def plan_read(layout: ArrayLayout, region: RegionLike = None) -> ReadPlan:
    """Plan the read of a region, by default of the whole array.

    Raises `RegionError`, `TypeError`: see :func:`~linumpy.plan.region.normalize_region`.
    """
    return ReadPlan(layout, normalize_region(region, layout.shape))


def _description(plan: ReadPlan) -> list[tuple[str, str]]:
    """Return the label and the text of each line that describes a plan."""
    layout = plan.layout
    order = "" if layout.stored_axes == tuple(range(layout.rank)) else f", axes stored as {layout.stored_axes}"
    swapped = ", bytes swapped on the device" if layout.swapped else ""
    rows = [
        ("array", f"{layout.name} (zarr v{layout.zarr_format})"),
        ("stored as", f"{layout.dtype} {_format_shape(layout.shape)}, {_format_nbytes(layout.nbytes)}{swapped}{order}"),
        (
            "chunks",
            f"{_format_shape(layout.chunk_shape)}, {_format_nbytes(layout.chunk_nbytes)} {_each_or_less(layout)}",
        ),
    ]
    if layout.shard is not None:
        where = "end" if layout.shard.index_at_end else "start"
        rows.append(
            (
                "shards",
                f"{_format_shape(layout.object_shape)}, {layout.shard.count} chunks each, index at the {where}",
            )
        )
    rows += [
        ("codecs", " → ".join(layout.codecs) or "none"),
        ("fill value", str(layout.fill_value)),
        ("region", f"{plan.region} → {_format_shape(plan.shape) or 'one element'}, {_format_nbytes(plan.nbytes)}"),
        ("touches", _format_touched(plan)),
    ]
    if layout.unsupported is None:
        if plan.decoding:
            rows.append(("decoding", plan.decoding))
        if plan.scratch_bytes is not None:
            rows.append(("scratch", f"{_format_nbytes(plan.scratch_bytes)} of device memory"))
        remote = layout.remote
        rows.append(("backend", "linumpy, from a local store" if remote is None else f"linumpy, by {remote.client}"))
    else:
        rows.append(("backend", f"{plan.backend}: {layout.unsupported}"))
        if reason := why_not_gpu_mode(layout, plan.region):
            rows.append(("by host", f"and one copy to the device: {reason}"))
    return rows


def _each_or_less(layout: ArrayLayout) -> str:
    return "each" if layout.lengths is None or layout.shard is not None else "or less (rectilinear)"


def _format_touched(plan: ReadPlan) -> str:
    chunks = f"{plan.chunk_count:,} chunk{'s' * (plan.chunk_count != 1)}"
    if plan.layout.unsupported is not None:
        return chunks
    if plan.layout.shard is not None:
        chunks += f" in {plan.object_count:,} shard{'s' * (plan.object_count != 1)}"
    up_to = "up to " if _each_or_less(plan.layout) != "each" else ""
    return f"{chunks}, {up_to}{_format_nbytes(plan.chunk_count * plan.layout.chunk_nbytes)} decoded"


def _format_shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


def _format_nbytes(nbytes: int) -> str:
    """Format a number of bytes with a binary prefix."""
    value, prefixes = float(nbytes), iter(("", "Ki", "Mi", "Gi", "Ti"))
    prefix = next(prefixes)
    while value >= 1024 and prefix != "Ti":
        value, prefix = value / 1024, next(prefixes)
    return f"{value:.0f} B" if not prefix else f"{value:.1f} {prefix}B"
