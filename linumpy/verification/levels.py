"""How a level was made of the next finer one, where it lies, and whether voxels of both agree.

A coarse voxel `i` is made from the window of the fine voxels ``f i`` to ``f i + f - 1`` along each axis with factor
`f`. The *offset* of a level is the position of its voxel 0 in voxels of the finer level: ``(f - 1) / 2`` for means of
windows, and the number of the voxel that is taken where one of each window is.

In: voxels of both levels, NumPy or CuPy. Out: :class:`Link`, and masks of voxels that differ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from scipy import ndimage

from linumpy.arrays import Array, array_module

Box = tuple[slice, ...]
Method = Literal["mean", "stride", "picked", "smooth", "foreign", "unknown"]

#: Blocks of which a link is found, tries to find blocks with contrast, and maximum voxels of a block of both levels.
_BLOCKS, _FIRST_BLOCKS, _TRIES, _COARSE_VOXELS, _FINE_VOXELS = 12, 4, 64, 2**14, 2**20
#: Share of the voxels that a method must explain in a part; of the parts, in small levels and in others; of the parts
#: for values that are merely in the window, which low contrast explains, too; of the parts if no more are needed.
_VOXELS_EXPLAINED, _PARTS_EXPLAINED, _PARTS_PICKED, _PARTS_SURE = 0.99, (0.25, 0.6), 0.6, 0.95
#: Windows of different voxels that a block must have to tell methods apart.
_MIN_WINDOWS = 16
#: Correlation below which blocks are unrelated; fewest coarse voxels of all blocks for saying so; maximum shift between
#: levels, in coarse voxels.
_UNRELATED, _FEW_VOXELS, _MAX_SHIFT = 0.3, 2**11, 8
#: Correlation from which on blocks are certainly related, and how far it must be above that with the mirrored block.
_RELATED, _ABOVE_MIRRORED = 0.6, 2
#: For smoothed levels: residual of parts that show something else; voxels of a part along each axis, and how far above
#: the difference of such parts a limit lies, but for the share of them that may be damaged.
_UNLIKE, _PART, _ABOVE_PARTS, _MOST_PARTS = 0.8, 4, 3, 0.9
#: Voxels along an axis from which on a shift along it is found.
_MIN_LENGTH = 8
#: How means are rounded to integers.
_ROUNDINGS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda xp, mean: xp.rint(mean),
    lambda xp, mean: xp.floor(mean + 0.5),
    lambda xp, mean: xp.trunc(mean),
    lambda xp, mean: xp.floor(mean),
)
#: Relative difference of means of floats that rounding explains, by the bytes of a voxel.
_FLOAT_ERRORS = {2: 4e-3, 4: 1e-5, 8: 1e-9}


@dataclass(frozen=True, kw_only=True)
class Link:
    """How a level was made of the next finer one.

    - `factors`: fine voxels for a coarse one along each axis; empty if they are no whole numbers.
    - `offset`, `spread`: the offset along each axis, and its uncertainty.
    - `roundings`, `slack`: indexes of the roundings of means that explain the blocks, and how far voxels may be off.
    - `limit`: for ``"smooth"``: median difference of the voxels of a chunk, from which on it shows something else.
    - `reason`: for ``"unknown"``: why nothing can be said.
    """

    factors: tuple[int, ...]
    method: Method
    offset: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()
    roundings: tuple[int, ...] = (0,)
    slack: int = 0
    limit: float = math.inf
    reason: str = ""

    @property
    def can_tell(self) -> bool:
        """Whether chunks of both levels can be compared."""
        return self.method in ("mean", "stride", "picked") or (self.method == "smooth" and self.limit < math.inf)

    def is_other(self, mean: np.ndarray, level: np.ndarray) -> bool:
        """Return whether a part of a smoothed level shows something else than the means of the finer level."""
        return _difference(mean, level) > self.limit and residual(mean, level) > _UNLIKE

    def __str__(self) -> str:
        size = "×".join(map(str, self.factors))
        texts = {
            "mean": f"mean of windows of {size} voxels",
            "stride": f"one voxel of each window of {size}: number {', '.join(f'{n:g}' for n in self.offset)}",
            "picked": f"a value of each window of {size} voxels, such as the most frequent",
            "smooth": "smoothed or interpolated",
            "foreign": "not made of the finer level",
            "unknown": f"not compared with the finer level: {self.reason}",
        }
        return texts[self.method]


def factors_of(fine: Sequence[int], coarse: Sequence[int], stated: Sequence[float]) -> tuple[int, ...] | None:
    """Return the factors between the shapes of two levels; `stated` are the ratios of their scales."""
    factors = []
    for n, m, ratio in zip(fine, coarse, stated, strict=True):
        candidates = [round(ratio) if math.isfinite(ratio) else 1, round(n / max(m, 1)), -(-n // max(m, 1))]
        fitting = [f for f in candidates if f >= 1 and m in (max(n // f, 1), -(-n // f))]
        if not fitting:
            return None
        factors.append(fitting[0])
    return tuple(factors)


@dataclass(frozen=True)
class Sample:
    """A block of both levels in host memory: the fine voxels of each window, along a last axis, and the coarse ones."""

    windows: np.ndarray
    coarse: np.ndarray

    @cached_property
    def differ(self) -> np.ndarray:
        """Mask of the windows whose voxels are not all the same, which alone tell methods apart."""
        return (self.windows != self.windows[..., :1]).any(axis=-1)


def sample_blocks(
    read_fine: Callable[[Box], np.ndarray | None],
    read_coarse: Callable[[Box], np.ndarray | None],
    fine: Sequence[int],
    coarse: Sequence[int],
    factors: tuple[int, ...],
) -> Iterator[Sample]:
    """Read a few blocks with contrast that are spread over two levels.

    `read_fine`, `read_coarse`: return the voxels of a box in host memory; None if nothing of it can be read. `fine`,
    `coarse`: shapes of the levels.
    """
    count = 0
    for box in _sample_boxes(fine, coarse, factors):
        level = read_coarse(box)
        finer = read_fine(tuple(slice(b.start * k, b.stop * k) for b, k in zip(box, factors, strict=True)))
        if level is None or finer is None:
            continue
        sample = Sample(windows(finer, factors), level)
        # Where the finer level has only zeros and the coarse one has contrast, the finer one has lost its voxels.
        contrast = int(sample.differ.sum()) if finer.any() else int((level != level.flat[0]).sum())
        if contrast and contrast >= min(_MIN_WINDOWS, level.size):
            count += 1
            yield sample
        if count == _BLOCKS:
            return


def find_link(blocks: Iterator[Sample], factors: tuple[int, ...]) -> tuple[Link, list[Sample]]:
    """Find out how a level was made, from a few blocks; return the blocks that were looked at, too."""
    samples = list(itertools.islice(blocks, _FIRST_BLOCKS))
    if not samples:
        return Link(factors=factors, method="unknown", reason="the voxels that were tried are constant"), samples
    link = _exact_link(samples, factors, _PARTS_SURE)
    if link is None:
        samples += blocks
        # Of a small level, damaged chunks are a large part.
        enough = _PARTS_EXPLAINED[0] if len(samples) < _BLOCKS // 2 else _PARTS_EXPLAINED[1]
        link = _exact_link(samples, factors, enough) or _smooth_link(samples, factors)
    return link, samples


def ids_of_no_finer_level(samples: Sequence[Sample]) -> list[int]:
    """Return the values of a coarse level that its blocks do not have in the finer level, sorted."""
    found = set[int]()
    for sample in samples:
        found |= set(np.setdiff1d(sample.coarse, sample.windows).tolist())
    return sorted(found)


def _sample_boxes(fine: Sequence[int], coarse: Sequence[int], factors: Sequence[int]) -> Iterator[Box]:
    """Yield boxes of the coarse level that are spread over it, of whole windows."""
    whole = [min(m, n // f) for n, m, f in zip(fine, coarse, factors, strict=True)]
    if not all(whole):
        return
    length, sizes = 64, [1] * len(whole)
    while length:
        sizes = [min(n, length) for n in whole]
        if math.prod(sizes) <= _COARSE_VOXELS and math.prod(sizes) * math.prod(factors) <= _FINE_VOXELS:
            break
        length -= 1 if length <= 8 else 4
    seen = set()
    # A low-discrepancy sequence, so that few blocks are near each other.
    root = _unit_root(len(whole))
    for number in range(_TRIES):
        fractions = [(0.5 + number / root ** (axis + 1)) % 1 for axis in range(len(whole))]
        start = tuple(round(x * (n - size)) for x, n, size in zip(fractions, whole, sizes, strict=True))
        if start not in seen:
            seen.add(start)
            yield tuple(slice(a, a + size) for a, size in zip(start, sizes, strict=True))


def _unit_root(rank: int) -> float:
    """Return the root above 1 of ``x ** (rank + 1) = x + 1``, which spreads points best."""
    x = 2.0
    for _ in range(32):
        x = (1 + x) ** (1 / (rank + 1))
    return x


def windows(fine: np.ndarray, factors: Sequence[int]) -> np.ndarray:
    """Return the voxels of each window along a last axis."""
    rank = fine.ndim
    split = fine.reshape([part for n, f in zip(fine.shape, factors, strict=True) for part in (n // f, f)])
    return split.transpose([*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]).reshape(*split.shape[::2], -1)


def _exact_link(samples: Sequence[Sample], factors: tuple[int, ...], enough: float) -> Link | None:
    """Return the link that explains nearly all voxels of most parts, at least the share `enough`; else None."""
    centre = tuple((f - 1) / 2 for f in factors)
    strides, means, picked, misses = [], [], [], []
    for sample in samples:
        window, coarse = sample.windows, sample.coarse
        equal = _equal(window, coarse[..., None])
        strides.append(_explained(sample, equal))
        picked.append(_explained(sample, np.asarray(equal.any(axis=-1))))
        mean = window.mean(axis=-1, dtype=np.complex128 if window.dtype.kind == "c" else np.float64)
        hits = [_is_mean(mean, coarse, rounding) for rounding in range(len(_ROUNDINGS))]
        means.append(_explained(sample, np.stack(hits, axis=-1)))
        each = np.concatenate([equal, np.stack(hits, axis=-1), equal.any(axis=-1, keepdims=True)], axis=-1)
        misses.append((~each).sum(axis=tuple(range(coarse.ndim))))
    count = sum(map(len, picked))
    if not count:
        return None
    by_voxel, by_rounding, by_any = (np.concatenate(votes).sum(axis=0) for votes in (strides, means, picked))
    of_voxels, of_roundings, (of_any,) = np.split(np.sum(misses, axis=0), np.cumsum([len(by_voxel), len(_ROUNDINGS)]))
    voxel, rounding = int(by_voxel.argmax()), int(by_rounding.argmax())
    best = max(by_voxel[voxel], by_rounding[rounding])
    # The most frequent value is mostly the first one, or the mean: where other voxels explain the rest, it was picked.
    is_picked = of_any == 0 < min(of_voxels[voxel], of_roundings[rounding])
    if is_picked or by_any >= max(_PARTS_PICKED * count, best + 1):
        return Link(factors=factors, method="picked", offset=centre, spread=(0.0,) * len(factors))
    if best < enough * count:
        return None
    # A level without contrast has lost few voxels by means, and may have by taking any voxel: so means are assumed.
    has_contrast = any((sample.coarse != sample.coarse.flat[0]).any() for sample in samples)
    if by_voxel[voxel] == best and (has_contrast or by_rounding[rounding] < best):
        offset = tuple(map(float, np.unravel_index(voxel, factors)))
        return Link(factors=factors, method="stride", offset=offset, spread=(0.0,) * len(factors))
    slack = int(of_roundings[rounding] > 0 and samples[0].coarse.dtype.kind in "iu")
    return Link(
        factors=factors, method="mean", offset=centre, spread=(0.0,) * len(factors), slack=slack,
        roundings=tuple(np.flatnonzero((by_rounding == best) & (of_roundings == of_roundings[rounding])).tolist()),
    )  # fmt: skip


def _explained(sample: Sample, hits: np.ndarray) -> np.ndarray:
    """Return whether nearly all voxels of a part hit, for each part of a block that tells methods apart.

    Parts are small, so that a damaged chunk of a small level lies in few of them.
    """
    differ = sample.differ
    hits = hits & differ.reshape(differ.shape + (1,) * (hits.ndim - differ.ndim))
    counts, sums = differ.astype(np.int64), hits.astype(np.int64)
    for axis, n in enumerate(differ.shape):
        starts = np.arange(0, max(1, n - _PART + 1), _PART)
        counts, sums = (np.add.reduceat(image, starts, axis=axis) for image in (counts, sums))
    tells = counts >= max(1, min(_MIN_WINDOWS, counts.max()))
    return sums[tells] >= _VOXELS_EXPLAINED * counts[tells].reshape((-1,) + (1,) * (hits.ndim - differ.ndim))


def _equal(a: Array, b: Array) -> Array:
    equal = a == b
    return equal | ((a != a) & (b != b)) if a.dtype.kind in "fc" else equal


def _is_mean(mean: Array, coarse: Array, rounding: int) -> Array:
    """Return where voxels are the means of their windows, rounded in one of the ways."""
    xp = array_module(mean)
    if coarse.dtype.kind in "fc":
        error = _FLOAT_ERRORS.get(coarse.real.dtype.itemsize, 1e-9)
        with np.errstate(over="ignore", invalid="ignore"):
            close = abs(mean - coarse) <= error * xp.maximum(abs(mean), abs(coarse))
            # Infinities and sums that overflow give infinities or NaN, depending on the order of the sum.
            return close | ~(xp.isfinite(coarse) | xp.isfinite(mean.astype(coarse.dtype)))
    return _ROUNDINGS[rounding](xp, mean) == coarse


def _smooth_link(samples: Sequence[Sample], factors: tuple[int, ...]) -> Link:
    """Find the shift between means of windows and the level, and how well they agree."""
    shifts, related, mirrored, differences, contrast = [], [], [], [], 0.0
    for sample in samples:
        mean = np.nan_to_num(abs(sample.windows).mean(axis=-1, dtype=np.float64))
        level = np.nan_to_num(abs(sample.coarse).astype(np.float64))
        if level.std() == 0 or mean.std() == 0:
            related.append(0.0)
            continue
        shift, correlation = find_shift(mean, level)
        related.append(correlation)
        if correlation >= _RELATED:
            shifts.append(shift)
            differences += [_difference(*part) for part in _parts(mean, level)]
            contrast = max(contrast, float(level.std()))
        else:
            mirrored.append(find_shift(mean, np.flip(level))[1])
    typical = float(np.median(related))
    if 0 < typical < _RELATED and sum(sample.coarse.size for sample in samples) < _FEW_VOXELS:
        return Link(
            factors=factors, method="unknown", reason="the level is too small to tell whether it is another one"
        )
    if typical < _UNRELATED or (typical < _RELATED and typical < _ABOVE_MIRRORED * np.median(mirrored or [0.0])):
        return Link(factors=factors, method="foreign")
    if not shifts:
        return Link(factors=factors, method="unknown", reason="their voxels agree too little to tell a shift")
    middle = np.median(shifts, axis=0)
    deviation = 1.4826 * np.median(abs(np.array(shifts) - middle), axis=0) + 1 / np.array(samples[0].coarse.shape)
    spread = 1.25 / math.sqrt(len(shifts)) * deviation + 0.02  # the error of a median
    offset = tuple(float((f - 1) / 2 + f * d) for f, d in zip(factors, middle, strict=True))
    limit = _ABOVE_PARTS * float(np.quantile(differences, _MOST_PARTS))
    return Link(
        factors=factors, method="smooth", offset=offset,
        spread=tuple(float(f * s) for f, s in zip(factors, spread, strict=True)),
        limit=limit if limit < contrast and (abs(middle) < 0.75).all() else math.inf,
    )  # fmt: skip


def _difference(mean: np.ndarray, level: np.ndarray) -> float:
    return float(np.median(abs(mean - level)))


def _parts(mean: np.ndarray, level: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cut two blocks into parts as small as the smallest chunks that are compared."""
    starts = (range(0, max(1, n - _PART + 1), _PART) for n in mean.shape)
    for start in itertools.product(*starts):
        part = tuple(slice(n, n + _PART) for n in start)
        yield mean[part], level[part]


def residual(mean: np.ndarray, level: np.ndarray) -> float:
    """Return the root mean square of differences over that of two unrelated blocks: 0 for equal, 1 for unrelated."""
    scale = math.sqrt(float(mean.var() + level.var())) + 1e-12 * float(abs(mean).max() + 1e-300)
    return math.sqrt(float(np.square(mean - level).mean())) / scale


def find_shift(mean: np.ndarray, level: np.ndarray) -> tuple[np.ndarray, float]:
    """Find ``d`` with ``level[x] = mean[x + d]``, to fractions of a voxel, and the correlation there.

    Whole voxels by the maximum of the cross-correlation, fractions by least squares on gradients (Lucas and Kanade,
    1981).
    """
    axes = [axis for axis, n in enumerate(mean.shape) if n >= _MIN_LENGTH]
    shift = np.zeros(mean.ndim)
    tapered = [_tapered(image, axes) for image in (mean, level)]
    spectrum = np.fft.rfftn(tapered[0]) * np.conj(np.fft.rfftn(tapered[1]))
    surface = np.fft.irfftn(spectrum, mean.shape, axes=range(mean.ndim))
    for axis, n in enumerate(mean.shape):
        far = np.minimum(np.arange(n), n - np.arange(n)) > (min(_MAX_SHIFT, n // 4) if axis in axes else 0)
        surface[(slice(None),) * axis + (far,)] = -np.inf
    peak = np.unravel_index(int(surface.argmax()), surface.shape)
    shift[:] = [p if p <= n // 2 else p - n for p, n in zip(peak, mean.shape, strict=True)]
    inner = tuple(
        slice(margin, n - margin)
        for n, margin in ((n, min(_MAX_SHIFT, n // 4) if a in axes else 0) for a, n in enumerate(mean.shape))
    )
    for _ in range(8):
        moved = _moved(mean, -shift)
        columns = [np.gradient(moved, axis=axis)[inner].ravel() for axis in axes]
        if not columns:
            break
        matrix = np.stack([*columns, np.ones(columns[0].size), moved[inner].ravel()], axis=1)
        step = np.linalg.lstsq(matrix, level[inner].ravel(), rcond=None)[0]
        gain = step[-1] if abs(step[-1]) > 1e-3 else 1.0
        update = np.clip(step[: len(axes)] / gain, -0.5, 0.5)
        shift[axes] += update
        if abs(update).max() < 1e-3:
            break
    moved = _moved(mean, -shift)[inner].ravel()
    other = level[inner].ravel()
    if moved.std() == 0 or other.std() == 0:
        return shift, 0.0
    return shift, float(np.corrcoef(moved, other)[0, 1])


def _moved(image: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Shift an image by cubic splines, axis by axis: in five axes at once each voxel would be made of 1,024."""
    for axis in np.flatnonzero(shift):
        rows = np.moveaxis(image, axis, 0)
        moved = ndimage.shift(rows.reshape(len(rows), -1), (shift[axis], 0), order=3, mode="nearest")
        image = np.moveaxis(moved.reshape(rows.shape), 0, axis)
    return image


def _tapered(image: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Return an image without its mean, faded out at the ends of long axes, as Fourier transforms need."""
    result = image - image.mean()
    for axis in axes:
        shape = [1] * image.ndim
        shape[axis] = -1
        result = result * np.hanning(image.shape[axis] + 2)[1:-1].reshape(shape)
    return result


def _wide(dtype: np.dtype, count: int) -> type[np.generic]:
    """Return a type of floats that holds sums of so many voxels exactly, or as well as can be."""
    if dtype.kind == "c":
        return np.complex128
    return np.float32 if dtype.kind in "biu" and dtype.itemsize <= 2 and count <= 128 else np.float64


@dataclass(frozen=True)
class Comparison:
    """Which voxels of a block differ from the coarser level.

    - `places`: for each axis the fine voxel where the window of each compared coarse voxel begins.
    - `differ`: mask of the compared voxels for exact links, else their differences; on the device of the voxels.
    """

    places: tuple[np.ndarray, ...]
    mean: Array
    coarse: Array
    differ: Array | None


def compare(
    link: Link, fine: Array, fine_box: Box, coarse: Array, coarse_box: Box, steps: Sequence[int]
) -> Comparison | None:
    """Compare a block of the fine level with the coarse level.

    `coarse`: voxels of `coarse_box`, which holds all windows that lie within `fine_box`. `steps`: every so many coarse
    voxels are compared along each axis. None if no window lies within the block.
    """
    picks = []
    for f, box, outer, step in zip(link.factors, fine_box, coarse_box, steps, strict=True):
        start, stop = max(-(-box.start // f), outer.start), min(box.stop // f, outer.stop)
        if start >= stop:
            return None
        picks.append((start, start + (stop - start - 1) // step * step + 1, step))
    part = coarse[tuple(slice(a - o.start, b - o.start, s) for (a, b, s), o in zip(picks, coarse_box, strict=True))]

    def voxel(numbers: Sequence[int]) -> Array:
        axes = zip(picks, fine_box, link.factors, numbers, strict=True)
        return fine[
            tuple(slice(a * f + n - o.start, (b - 1) * f + n - o.start + 1, s * f) for (a, b, s), o, f, n in axes)
        ]

    places = tuple(np.arange(*pick) * f for pick, f in zip(picks, link.factors, strict=True))
    if link.method == "stride":
        return Comparison(places, part, part, ~_equal(voxel([int(n) for n in link.offset]), part))
    each = itertools.product(*(range(f) for f in link.factors))
    if link.method == "picked":
        found = array_module(part).zeros(part.shape, bool)
        for numbers in each:
            found |= _equal(voxel(numbers), part)
        return Comparison(places, part, part, ~found)
    total = array_module(part).zeros(part.shape, _wide(part.dtype, math.prod(link.factors)))
    for numbers in each:
        total += voxel(numbers)
    mean = total / total.dtype.type(math.prod(link.factors))
    if link.method == "mean":
        differ = abs(mean - part) > link.slack + 0.5 if link.slack else ~_is_mean(mean, part, link.roundings[0])
        for rounding in link.roundings[1:]:
            differ &= ~_is_mean(mean, part, rounding)
        return Comparison(places, mean, part, differ)
    return Comparison(places, mean, part, None)


def check_offset(
    link: Link, stated: Sequence[float], fine: Sequence[int], coarse: Sequence[int]
) -> tuple[float, ...] | None:
    """Return the offset that the voxels show along each axis where it contradicts the stated one; None if it does not.

    `fine`, `coarse`: shapes of the levels. Where sizes are no multiples of the factors, some writers state or make
    levels whose whole extents are equal. Where one voxel of each window was taken, its own position and the centre of
    the window are right.
    """
    if not link.offset:
        return None
    measured = []
    axes = zip(link.factors, link.offset, link.spread, stated, fine, coarse, strict=True)
    for f, offset, spread, said, n, m in axes:
        centre = (f - 1) / 2
        rest = n - m * f
        tolerance = max(0.02 * f, 0.15 * f if link.method == "smooth" else 0.0, 3 * spread) + abs(rest) / m / 2
        low, high = (min(offset, centre), max(offset, centre)) if link.method == "stride" else (offset, offset)
        if link.method == "smooth":  # what was resized drifts from the windows, up to the rest at the end
            offset = centre if abs(offset - centre) <= tolerance else offset
            low, high = offset - max(0, rest), offset - min(0, rest)
        measured.append(said if low - tolerance <= said <= high + tolerance else offset)
    return None if tuple(measured) == tuple(stated) else tuple(measured)
