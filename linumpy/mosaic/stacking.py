"""Stack slices of tissue: find how far they overlap along Z, mend what does not fit, and blend.

A slice is a volume (Z, Y, X), its first plane next to the cut. The microscope images deeper than it cuts: the last
planes of one slice show the tissue that the first planes of the next show again.

In: volumes on the host or the device. Out: overlaps in voxels; one volume, where the slices are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.device import array_module, is_device_array, require_cuda, to_host
from linumpy.gpu.oct.correlation import central_half, overlap_correlations
from linumpy.gpu.rounding import saturated


def find_z_overlap(
    fixed_vol: Any,
    moving_vol: Any,
    slicing_interval_mm: float,
    search_range_mm: float,
    resolution_um: float,
    use_gpu: bool | None = None,
) -> tuple[int, float]:
    """Find how many planes at the end of a slice show the same tissue as those at the beginning of the next.

    Without error of the motor, slices of Z planes overlap in ``Z - slicing_interval / resolution`` of them. All whole
    overlaps within the search range around that are tried, those that fit both slices, and the one of the greatest
    correlation is taken: Pearson's, over the central half of Y and X.

    Parameters
    ----------
    fixed_vol, moving_vol : numpy.ndarray or cupy.ndarray, (Z, Y, X)
        A slice and the next deeper one; the same Y and X.
    slicing_interval_mm : float
        Thickness that is cut off between them, in mm.
    search_range_mm : float
        How far the overlap may be from the expected one, to each side, in mm.
    resolution_um : float
        Voxel spacing along Z, in µm.
    use_gpu : bool, optional
        True computes on the GPU, False on the CPU; by default where `fixed_vol` is.

    Returns
    -------
    overlap : int
        In voxels along Z. Of equals, that nearest to the expected one: the expected one itself (rounded) where no
        overlap has variance on both sides.
    correlation : float
        From -1 to 1; 0 where nothing could be correlated.

    Raises
    ------
    ValueError
        Lengths that are not positive numbers, slices that do not fit each other, or a search range in which there is
        no overlap.
    GpuUnavailableError
        `use_gpu` is True and there is no CUDA device.

    Notes
    -----
    Two numbers come back to the host: this waits for the device.
    """
    overlaps, expected = candidate_overlaps(
        fixed_vol.shape[0], moving_vol.shape[0], slicing_interval_mm, search_range_mm, resolution_um
    )
    on_device = is_device_array(fixed_vol) if use_gpu is None else use_gpu
    fixed, moving = central_half(fixed_vol)[-overlaps[-1] :], central_half(moving_vol)[: overlaps[-1]]
    transfer = require_cuda().asarray if on_device else to_host
    return best_overlap(transfer(fixed), transfer(moving), overlaps, expected)


def best_overlap(
    fixed: Any,
    moving: Any,
    overlaps: Sequence[int],
    expected: float,
    measured: tuple[Any | None, Any | None] = (None, None),
) -> tuple[int, float]:
    """Take the overlap of the greatest correlation, of equals that nearest to the expected one.

    Parameters
    ----------
    fixed, moving : numpy.ndarray or cupy.ndarray, (Z, Y, X)
        The last planes of a slice and the first of the next, both in one memory.
    overlaps, expected
        As :func:`candidate_overlaps` lists them.
    measured
        As for :func:`linumpy.gpu.oct.correlation.overlap_correlations`.
    """
    correlations = to_host(overlap_correlations(fixed, moving, overlaps, measured))
    best = min(range(len(overlaps)), key=lambda i: (-correlations[i], abs(overlaps[i] - expected)))
    return overlaps[best], float(correlations[best])


def candidate_overlaps(
    fixed_planes: int, moving_planes: int, slicing_interval_mm: float, search_range_mm: float, resolution_um: float
) -> tuple[list[int], float]:
    """List the overlaps within the search range, and the expected one; see :func:`find_z_overlap`."""
    for name, value in (("slicing_interval_mm", slicing_interval_mm), ("resolution_um", resolution_um)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: a positive length is needed")
    if not 0 <= search_range_mm < math.inf:
        raise ValueError(f"search_range_mm={search_range_mm}: a length from 0 on is needed")
    expected = fixed_planes - slicing_interval_mm * 1e3 / resolution_um
    reach = search_range_mm * 1e3 / resolution_um
    # Rounded first: 0.1 mm of 5 µm are 20 voxels, whatever the sum of two floats says.
    low, high = math.ceil(round(expected - reach, 6)), math.floor(round(expected + reach, 6))
    if low > high:
        low = high = round(expected)
    low, high = max(1, low), min(high, fixed_planes, moving_planes)
    if low > high:
        raise ValueError(
            f"slices of {fixed_planes} and {moving_planes} planes of {resolution_um:g} µm, cut every "
            f"{slicing_interval_mm:g} mm, have no overlap within {search_range_mm:g} mm of the expected "
            f"{expected:.1f} planes: check the interval and the resolution, or search further"
        )
    return list(range(low, high + 1)), expected


@dataclass(frozen=True)
class ConsistentOverlaps:
    """Overlaps of a stack in which outliers were mended.

    Attributes
    ----------
    overlaps : tuple of int
        In voxels along Z, one for each pair of neighbouring slices.
    mended : tuple of bool
        Which of them were replaced.
    typical : int
        What they were replaced by.
    """

    overlaps: tuple[int, ...]
    mended: tuple[bool, ...]
    typical: int


def enforce_z_consistency(
    overlaps: Sequence[int],
    correlations: Sequence[float] | None = None,
    *,
    min_correlation: float = 0.2,
    max_deviation: float = 3.0,
    tolerance: float = 2.0,
) -> ConsistentOverlaps:
    """Replace overlaps that cannot be trusted by the typical one.

    The microtome cuts at a steady interval, so overlaps of one brain scatter little. Trusted are those with enough
    correlation; the typical overlap is their median. An overlap is replaced if it is not trusted, or farther from the
    typical one than `max_deviation` robust standard deviations (1.4826 times the median absolute deviation) and
    than `tolerance`.

    Parameters
    ----------
    overlaps : sequence of int
        In voxels along Z, one for each pair of neighbouring slices.
    correlations : sequence of float, optional
        What :func:`find_z_overlap` found for each; without them all are trusted.
    min_correlation : float
        Below it, or NaN, an overlap is not trusted. If none reaches it, all are taken.
    max_deviation : float
        In robust standard deviations.
    tolerance : float
        Voxels that are never too far.

    Raises
    ------
    ValueError
        No overlaps, or another number of correlations.
    """
    found = np.asarray(overlaps, np.float64)
    if found.ndim != 1 or not found.size or not np.isfinite(found).all():
        raise ValueError(f"overlaps={list(overlaps)}: at least one number, in one row, is needed")
    trusted = np.ones(found.size, bool)
    if correlations is not None:
        if len(correlations) != found.size:
            raise ValueError(f"{len(correlations)} correlations do not go with {found.size} overlaps")
        trusted = np.asarray(correlations, np.float64) >= min_correlation
        if not trusted.any():
            trusted[:] = True
    middle = float(np.median(found[trusted]))
    spread = 1.4826 * float(np.median(np.abs(found[trusted] - middle)))
    mended = ~trusted | (np.abs(found - middle) > max(tolerance, max_deviation * spread))
    typical = math.floor(middle + 0.5)
    result = np.where(mended, typical, found).astype(np.int64)
    return ConsistentOverlaps(tuple(map(int, result)), tuple(map(bool, mended)), typical)


def blend_overlap(
    fixed: Any,
    moving: Any,
    *,
    first: int = 0,
    planes: int | None = None,
    measured: tuple[Any, Any] | None = None,
) -> Any:
    """Blend planes that two slices share.

    Weights follow a Hann ramp: plane k of n takes ``sin²(π (k + 1/2) / (2 n))`` of the moving slice and the rest of the
    fixed one. A voxel that is 0 or not finite is not valid: where one slice has none, the other counts alone; where
    both have none, the result is 0.

    Parameters
    ----------
    fixed, moving : numpy.ndarray or cupy.ndarray, (Z, Y, X)
        The last planes of one slice, the first planes of the next; of one shape and dtype.
    first, planes : int
        The planes given are those from `first` on of an overlap of so many; by default all.
    measured : (array of bool, array of bool), optional
        Which voxels of either were measured: the others count only where neither slice has one that was.

    Returns
    -------
    numpy.ndarray or cupy.ndarray, (Z, Y, X)
        In the dtype of `fixed`, integers rounded.

    Raises
    ------
    ValueError
        Other shapes, or different ones.
    """
    if fixed.ndim != 3 or fixed.shape != moving.shape or fixed.dtype != moving.dtype:
        raise ValueError(
            f"planes of {fixed.shape} {fixed.dtype} and {moving.shape} {moving.dtype} cannot be blended: "
            "(Z, Y, X) of one shape and dtype can"
        )
    xp, dtype = array_module(fixed), fixed.dtype
    kind = np.float64 if dtype.itemsize > 4 or (dtype.kind in "iu" and dtype.itemsize > 2) else np.float32
    count = fixed.shape[0] if planes is None else planes
    if not 0 <= first <= count - fixed.shape[0]:
        raise ValueError(f"{fixed.shape[0]} planes from plane {first} on are not in an overlap of {count}")
    ramp = np.sin(np.pi * (np.arange(first, first + fixed.shape[0]) + 0.5) / (2 * max(1, count))) ** 2
    ramp = xp.asarray(ramp.astype(kind))[:, None, None]
    left, right = xp.isfinite(fixed) & (fixed != 0), xp.isfinite(moving) & (moving != 0)
    if measured is not None:
        known = left & measured[0], right & measured[1]
        some = known[0] | known[1]
        left, right = (xp.where(some, one, there) for one, there in zip(known, (left, right), strict=True))
    weight = xp.where(left, xp.where(right, ramp, 0), 1)
    a, b = xp.where(left, fixed, 0).astype(kind), xp.where(right, moving, 0).astype(kind)
    # In this form equal voxels blend to themselves, exactly.
    mixed = a + weight * (b - a)
    return (
        saturated(xp.rint(mixed), dtype.newbyteorder("=")).astype(dtype, copy=False)
        if dtype.kind in "iub"
        else mixed.astype(dtype)
    )


@dataclass(frozen=True)
class StackPlan:
    """Where slices lie in a stack.

    Attributes
    ----------
    shape : (int, int, int)
        Voxels of the stack (Z, Y, X).
    offsets : tuple of (int, int, int)
        First voxel (Z, Y, X) of each slice in the stack.
    shapes : tuple of (int, int, int)
        Voxels of each slice.
    """

    shape: tuple[int, int, int]
    offsets: tuple[tuple[int, int, int], ...]
    shapes: tuple[tuple[int, int, int], ...]

    def box(self, number: int) -> tuple[slice, slice, slice]:
        """The box of a slice in the stack."""
        z, y, x = (slice(p, p + n) for p, n in zip(self.offsets[number], self.shapes[number], strict=True))
        return z, y, x

    def shared(self, number: int) -> int:
        """How many of the first planes of a slice lie upon those of slices above."""
        filled = max((self.box(above)[0].stop for above in range(number)), default=0)
        return min(self.shapes[number][0], max(0, filled - self.offsets[number][0]))


def plan_stack(
    shapes: Sequence[tuple[int, int, int]],
    overlaps: Sequence[int],
    shifts: Sequence[tuple[float, float]] | None = None,
) -> StackPlan:
    """Arrange slices in a stack that holds all of them; pure.

    Parameters
    ----------
    shapes : sequence of (int, int, int)
        Voxels of each slice (Z, Y, X).
    overlaps : sequence of int
        Voxels along Z that each slice shares with the next.
    shifts : sequence of (float, float), optional
        Where each next slice lies relative to the one before, in voxels along Y and X. They are added up and then
        rounded to whole voxels.

    Raises
    ------
    ValueError
        No slices; overlaps or shifts that are not one for each pair; an overlap that is negative or greater than one
        of its slices.
    """
    pairs = len(shapes) - 1
    if pairs < 0:
        raise ValueError("there are no slices to stack")
    moves = [(0.0, 0.0)] * pairs if shifts is None else [(float(y), float(x)) for y, x in shifts]
    if len(overlaps) != pairs or len(moves) != pairs:
        raise ValueError(f"{pairs + 1} slices need {pairs} overlaps and shifts: {len(overlaps)} and {len(moves)} given")
    if not all(math.isfinite(y) and math.isfinite(x) for y, x in moves):
        raise ValueError(f"shifts={moves}: numbers of voxels are needed")
    z, y, x = 0, 0.0, 0.0
    offsets = [(0, 0, 0)]
    for number, (overlap, move) in enumerate(zip(overlaps, moves, strict=True)):
        if not 0 <= overlap <= min(shapes[number][0], shapes[number + 1][0]):
            raise ValueError(f"slices {number} and {number + 1} cannot overlap in {overlap} planes")
        z, y, x = z + shapes[number][0] - int(overlap), y + move[0], x + move[1]
        offsets.append((z, math.floor(y + 0.5), math.floor(x + 0.5)))
    low = [min(offset[axis] for offset in offsets) for axis in range(3)]
    high = [max(p[axis] + s[axis] for p, s in zip(offsets, shapes, strict=True)) for axis in range(3)]
    moved = tuple((p[0] - low[0], p[1] - low[1], p[2] - low[2]) for p in offsets)
    size = (high[0] - low[0], high[1] - low[1], high[2] - low[2])
    return StackPlan(size, moved, tuple((int(a), int(b), int(c)) for a, b, c in shapes))


def stack_slices(
    slices: Sequence[Any], overlaps: Sequence[int], shifts: Sequence[tuple[float, float]] | None = None
) -> Any:
    """Stack slices, blended where they overlap.

    Parameters
    ----------
    slices : sequence of numpy.ndarray or cupy.ndarray, (Z, Y, X)
        From the top down, of one dtype, all on the host or all on the device.
    overlaps, shifts
        As for :func:`plan_stack`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray, (Z, Y, X)
        The stack; 0 where no slice is. Overlaps are blended by :func:`blend_overlap`.

    Raises
    ------
    ValueError
        As :func:`plan_stack`; slices of different dtypes or offsets.
    """
    plan = plan_stack([tuple(one.shape) for one in slices], overlaps, shifts)  # type: ignore[misc]
    if len({(one.dtype, is_device_array(one)) for one in slices}) > 1:
        raise ValueError("slices of one stack have one dtype and lie in one memory")
    xp = array_module(slices[0])
    whole = tuple(slice(0, n) for n in plan.shape)
    return compose(plan, whole, lambda number, box: slices[number][box], xp, slices[0].dtype)


def compose(
    plan: StackPlan,
    box: tuple[slice, ...],
    read: Callable[[int, tuple[slice, ...]], Any],
    xp: ModuleType,
    dtype: np.dtype,
    measured: Callable[[int, tuple[slice, ...]], Any] | None = None,
) -> Any:
    """Make a box of a stack; the same voxels come out whichever way the stack is cut.

    Parameters
    ----------
    plan : StackPlan
        Where slices lie.
    box : tuple of slice
        Of the stack, with start and stop.
    read : callable
        Takes the number of a slice and a box of it, and returns its voxels: an array of `xp`.
    xp : module
        CuPy or NumPy.
    dtype : dtype
        Of all slices and the stack.
    measured : callable, optional
        Takes the same as `read`, and returns which of those voxels were measured: an array of bool, or True.
    """
    known = None if measured is None else xp.zeros([one.stop - one.start for one in box], bool)
    out = xp.zeros([one.stop - one.start for one in box], dtype)
    for number, part in parts(plan, box):
        voxels, offset = read(number, part), plan.offsets[number]
        where = tuple(
            slice(s.start + p - b.start, s.stop + p - b.start) for s, p, b in zip(part, offset, box, strict=True)
        )
        target, first, planes = out[where], part[0].start, plan.shared(number)
        blended = min(max(0, planes - first), voxels.shape[0])
        both = None
        if known is not None and measured is not None:
            here = xp.broadcast_to(xp.asarray(measured(number, part)), voxels.shape)
            both = known[where][:blended].copy(), here[:blended]
            known[where] |= here
        target[blended:] = voxels[blended:]
        if blended:
            target[:blended] = blend_overlap(
                target[:blended], voxels[:blended], first=first, planes=planes, measured=both
            )
    return out


def parts(plan: StackPlan, box: tuple[slice, ...]) -> Iterator[tuple[int, tuple[slice, ...]]]:
    """Say which slices a box of a stack shows, from the top down: the number of each, and the box of it."""
    for number, offset in enumerate(plan.offsets):
        there = [slice(max(b.start, s.start), min(b.stop, s.stop)) for b, s in zip(box, plan.box(number), strict=True)]
        if all(one.start < one.stop for one in there):
            yield number, tuple(slice(t.start - p, t.stop - p) for t, p in zip(there, offset, strict=True))
