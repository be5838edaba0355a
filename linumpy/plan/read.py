"""Plan a read: a region of an array, the chunks that it touches, the backend that reads it; and cut regions. Pure.

In: :class:`~linumpy.plan.layout.ArrayLayout` and a region. Out: :class:`ReadPlan`; boxes of regular arrays
(:func:`cut_by_shape`); a region for each device. Errors: :class:`~linumpy.errors.RegionError`, ``TypeError``.

Rectilinear grids: along an axis, a run of stored objects (chunks, or shards) of one length `n` is part of a shifted
regular grid, in which object `i` begins at ``i · n`` and has the same key. Neighbouring objects of one shape therefore
are a box of a regular array all of whose objects have that shape, and are read as such.

zarr-python's GPU mode is used only for kinds of reads that ``tests/gpu/read/test_fallback.py`` compares with
zarr-python on the host, bit for bit. For all others zarr-python reads into host memory, with one copy to the device;
this is as fast for encoded or small chunks.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from linumpy.errors import RegionError
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.region import Region, RegionLike, normalize_region


def why_not_gpu_mode(layout: ArrayLayout, region: Region, dtype: np.dtype | None = None, device: int = 0) -> str | None:
    """Return why zarr's GPU mode is not used for a read to `dtype` (None: the array's) on a device; None if it is."""
    reasons = (
        (layout.zarr_format != 3, "zarr's codec of format 2 takes host memory"),
        (layout.grid != "regular", f"chunk grid {layout.grid!r}"),
        (layout.shard is not None, "inner chunks may lie at addresses that CUDA cannot read their dtype from"),
        (layout.codecs != ("bytes",), f"codecs {' + '.join(layout.codecs)} work in host memory"),
        (layout.swapped, "CuPy has no foreign byte order"),
        (layout.fill_value is None, f"dtype {layout.dtype}"),
        (not any(region.kept), "zarr returns single elements in host memory"),
        (region.size == 0, "the region is empty"),
        (_is_negative_zero_or_nan(layout.fill_value), f"CuPy may store a fill value of {layout.fill_value} otherwise"),
        (dtype is not None and dtype != layout.dtype, f"a cast to {dtype}"),
        (device != 0, "zarr's threads work on device 0"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def _is_negative_zero_or_nan(value: np.generic | None) -> bool:
    """Return whether the real or the imaginary part of a number is a negative zero or NaN."""
    number = np.asarray(0 if value is None else value)
    return any(bool(part != part) or (part == 0 and any(part.tobytes())) for part in (number.real, number.imag))


@dataclass(frozen=True)
class RegularBox:
    """A box of stored objects of one shape, with bounds in the regular array of such objects, which share its `layout`.

    - `offset`: offset of the box from the start of the region, in voxels.
    """

    layout: ArrayLayout
    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset: tuple[int, ...]


def cut_by_shape(layout: ArrayLayout, start: Sequence[int], stop: Sequence[int]) -> Iterator[RegularBox]:
    """Cut a region of a rectilinear array into boxes of stored objects of one shape."""
    assert layout.lengths is not None
    axes = [list(_runs(*axis)) for axis in zip(layout.lengths, start, stop, strict=True)]
    for box in itertools.product(*axes):
        lengths, begin, end, offset = zip(*box, strict=True)
        yield RegularBox(_regular_layout(layout, lengths), begin, end, offset)


def chunk_range(lengths: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """Return the first object along an axis that a range of voxels touches, and one past the last."""
    ends = np.cumsum(lengths)
    first = int(np.searchsorted(ends, start, "right"))
    return first, first if stop <= start else int(np.searchsorted(ends, stop, "left")) + 1


def _runs(lengths: np.ndarray, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each run of objects of one length: length, start and stop in the regular grid, offset in the region."""
    index, end = chunk_range(lengths, start, stop)
    run_start = int(lengths[:index].sum())
    while index < end:
        length = int(lengths[index])
        others = np.flatnonzero(lengths[index:end] != length)
        count = int(others[0]) if len(others) else end - index
        first, last = max(start, run_start), min(stop, run_start + count * length)
        shift = index * length - run_start
        yield length, first + shift, last + shift, first - start
        index, run_start = index + count, run_start + count * length


def _regular_layout(layout: ArrayLayout, lengths: tuple[int, ...]) -> ArrayLayout:
    """Return the layout of the regular array whose stored objects have the shape `lengths`; cached in `layout`."""
    cached: dict[tuple[int, ...], ArrayLayout] = layout.__dict__.setdefault("_of_shapes", {})
    if lengths not in cached:
        chunk, shard = lengths, layout.shard
        if shard is not None:
            chunk = layout.chunk_shape
            per_shard = tuple(n // c for n, c in zip(lengths, chunk, strict=True))
            shard = replace(shard, chunks_per_shard=per_shard)
        cached[lengths] = replace(layout, grid="regular", lengths=None, chunk_shape=chunk, shard=shard)
    return cached[lengths]


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
        return math.prod(last - first for first, last in self.chunk_box)

    @property
    def object_count(self) -> int:
        """Number of stored objects (files of a local store) that the region touches; some may not exist."""
        return math.prod(last - first for first, last in self.object_box)

    @property
    def object_box(self) -> list[tuple[int, int]]:
        """First stored object that the region touches, and one past the last, along each axis."""
        return self._box(self.layout.object_shape, self.layout.lengths)

    @property
    def chunk_box(self) -> list[tuple[int, int]]:
        """First chunk that the region touches, and one past the last, along each axis."""
        return self._box(self.layout.chunk_shape, None if self.layout.shard is not None else self.layout.lengths)

    def _box(self, sizes: tuple[int, ...], lengths: tuple[np.ndarray, ...] | None) -> list[tuple[int, int]]:
        """Return the first object that the region touches, and one past the last, by axis: of a size, or of lengths."""
        if lengths is not None:
            return [chunk_range(*axis) for axis in zip(lengths, self.region.start, self.region.stop, strict=True)]
        bounds = zip(self.region.start, self.region.stop, sizes, strict=True)
        return [(start // size, -(-stop // size) if stop > start else start // size) for start, stop, size in bounds]

    def __str__(self) -> str:
        return "\n".join(f"{label:<11}{text}" for label, text in _description(self))

    def _repr_html_(self) -> str:
        return html_table(_description(self))


def html_table(rows: Iterable[Sequence[str]]) -> str:
    """Return rows of texts as a table for a notebook; the first text of a row is its heading."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(heading)}</th>"
        + "".join(f"<td style='text-align:left'>{html.escape(text)}</td>" for text in texts)
        + "</tr>"
        for heading, *texts in rows
    )
    return f"<table>{cells}</table>"


def plan_read(layout: ArrayLayout, region: RegionLike = None) -> ReadPlan:
    """Plan the read of a region, by default of the whole array."""
    return ReadPlan(layout, normalize_region(region, layout.shape))


def _description(plan: ReadPlan) -> list[tuple[str, str]]:
    """Return the label and the text of each line that describes a plan."""
    layout = plan.layout
    order = "" if layout.stored_axes == tuple(range(layout.rank)) else f", axes stored as {layout.stored_axes}"
    swapped = ", bytes swapped on the device" if layout.swapped else ""
    rows = [
        ("array", f"{layout.name} (zarr v{layout.zarr_format})"),
        ("stored as", f"{layout.dtype} {format_shape(layout.shape)}, {format_nbytes(layout.nbytes)}{swapped}{order}"),
        (
            "chunks",
            f"{format_shape(layout.chunk_shape)}, {format_nbytes(layout.chunk_nbytes)} {_each_or_less(layout)}",
        ),
    ]
    if layout.shard is not None:
        where = "end" if layout.shard.index_at_end else "start"
        rows.append(
            (
                "shards",
                f"{format_shape(layout.object_shape)}, {layout.shard.count} chunks each, index at the {where}",
            )
        )
    rows += [
        ("codecs", " → ".join(layout.codecs) or "none"),
        ("fill value", str(layout.fill_value)),
        ("region", f"{plan.region} → {format_shape(plan.shape) or 'one element'}, {format_nbytes(plan.nbytes)}"),
        ("touches", _format_touched(plan)),
    ]
    if layout.unsupported is None:
        if plan.decoding:
            rows.append(("decoding", plan.decoding))
        if plan.scratch_bytes is not None:
            rows.append(("scratch", f"{format_nbytes(plan.scratch_bytes)} of device memory"))
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
    return f"{chunks}, {up_to}{format_nbytes(plan.chunk_count * plan.layout.chunk_nbytes)} decoded"


def format_shape(shape: Sequence[int]) -> str:
    """Format the size of an array, such as ``64 × 128 × 128``."""
    return " × ".join(map(str, shape))


def format_nbytes(nbytes: int) -> str:
    """Format a number of bytes with a binary prefix."""
    value, prefixes = float(nbytes), iter(("", "Ki", "Mi", "Gi", "Ti"))
    prefix = next(prefixes)
    while value >= 1024 and prefix != "Ti":
        value, prefix = value / 1024, next(prefixes)
    return f"{value:.0f} B" if not prefix else f"{value:.1f} {prefix}B"


def cut_for_devices(layout: ArrayLayout, region: Region, count: int) -> list[Region]:
    """Cut a region along the first axis of the result, between stored objects: no two devices read one chunk or shard.

    Sizes are as equal as the chunks (or shards) allow; some regions are empty if there are fewer chunks than devices.
    """
    if not any(region.kept):
        raise RegionError(f"region {region} is one element: it cannot be cut for {count} devices")
    axis = region.kept.index(True)
    start, stop = region.start[axis], region.stop[axis]
    if layout.lengths is not None:
        borders = np.cumsum(layout.lengths[axis])
    else:
        size = layout.object_shape[axis]
        borders = np.arange(start // size + 1, -(-stop // size), dtype=np.int64) * size
    borders = np.array([start, *borders[(start < borders) & (borders < stop)].tolist(), stop])
    equal_cuts = [start + (stop - start) * number / count for number in range(1, count)]
    cuts = [start, *(int(borders[np.abs(borders - cut).argmin()]) for cut in equal_cuts), stop]

    def with_bounds(first: int, last: int) -> Region:
        def changed(bounds: tuple[int, ...], bound: int) -> tuple[int, ...]:
            return (*bounds[:axis], bound, *bounds[axis + 1 :])

        return replace(region, start=changed(region.start, first), stop=changed(region.stop, last))

    return [with_bounds(first, last) for first, last in itertools.pairwise(cuts)]
