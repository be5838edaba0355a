"""Stack slices of tissue: find their overlaps along Z, replace outliers, and blend.

A slice is a volume (Z, Y, X), its first plane next to the cut. The microscope images deeper than it cuts: the last
planes of one slice and the first planes of the next show the same tissue.

In: volumes on the host or the device. Out: overlaps in voxels; boxes of the stack, in the memory of the slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, to_host, transfers
from linumpy.gpu.oct.correlation import central_half, overlap_correlations
from linumpy.gpu.rounding import saturated
from linumpy.mosaic.io.tiles import Box, box_shape
from linumpy.registration.robust import robust_deviation
from linumpy.renamed import renamed_parameter


@renamed_parameter("resolution_um", "z_spacing")
def find_z_overlap(
    fixed_vol: Array,
    moving_vol: Array,
    slicing_interval_mm: float,
    search_range_mm: float,
    z_spacing: float,
    use_gpu: bool | None = None,
) -> tuple[int, float]:
    """Find how many planes at the end of a slice show the same tissue as those at the beginning of the next.

    Without error of the motor, slices of Z planes overlap in ``Z - slicing_interval / resolution`` planes. All whole
    overlaps within the search range around that number are tried, if they fit both slices. The result is the overlap of
    the greatest Pearson correlation over the central half of Y and X.

    Parameters
    ----------
    fixed_vol, moving_vol : numpy.ndarray or cupy.ndarray, (Z, Y, X)
        A slice and the next deeper one; the same Y and X.
    slicing_interval_mm : float
        Thickness that is cut off between them, in mm.
    search_range_mm : float
        Largest distance of the overlap from the expected one, to each side, in mm.
    z_spacing : float
        Voxel spacing along Z, in µm.
    use_gpu : bool, optional
        True computes on the GPU, False on the CPU; by default on the device of `fixed_vol`.

    Returns
    -------
    overlap : int
        In voxels along Z; of equal correlations, the overlap nearest to the expected one. If no overlap has variance in
        both slices, it is the expected one, rounded.
    correlation : float
        From -1 to 1; 0 if no overlap has variance in both slices.

    Raises
    ------
    ValueError
        Lengths that are not positive numbers, slices that do not fit each other, or a search range without an overlap.
    GpuUnavailableError
        `use_gpu` is True and there is no CUDA device.

    Notes
    -----
    Two numbers are copied to the host, which waits for the device.
    """
    overlaps, expected = candidate_overlaps(
        fixed_vol.shape[0], moving_vol.shape[0], slicing_interval_mm, search_range_mm, z_spacing
    )
    transfer, _ = transfers(fixed_vol, use_gpu)
    fixed, moving = central_half(fixed_vol)[-overlaps[-1] :], central_half(moving_vol)[: overlaps[-1]]
    return best_overlap(transfer(fixed), transfer(moving), overlaps, expected)


def best_overlap(
    fixed: Array,
    moving: Array,
    overlaps: Sequence[int],
    expected: float,
    measured: tuple[Array | None, Array | None] = (None, None),
) -> tuple[int, float]:
    """Return the overlap of the greatest correlation, and the correlation; see :func:`find_z_overlap`.

    Parameters
    ----------
    fixed, moving : numpy.ndarray or cupy.ndarray, (Z, Y, X)
        The last planes of a slice and the first of the next, both on the host or both on a device.
    overlaps, expected
        As :func:`candidate_overlaps` returns them.
    measured
        As for :func:`linumpy.gpu.oct.correlation.overlap_correlations`.
    """
    correlations = to_host(overlap_correlations(fixed, moving, overlaps, measured))
    best = min(range(len(overlaps)), key=lambda i: (-correlations[i], abs(overlaps[i] - expected)))
    return overlaps[best], float(correlations[best])


def candidate_overlaps(
    fixed_planes: int, moving_planes: int, slicing_interval_mm: float, search_range_mm: float, z_spacing: float
) -> tuple[list[int], float]:
    """Return the overlaps within the search range, and the expected overlap; see :func:`find_z_overlap`."""
    for name, value in (("slicing_interval_mm", slicing_interval_mm), ("z_spacing", z_spacing)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: pass a positive length")
    if not 0 <= search_range_mm < math.inf:
        raise ValueError(f"search_range_mm={search_range_mm}: pass a length from 0 on")
    expected = fixed_planes - slicing_interval_mm * 1e3 / z_spacing
    reach = search_range_mm * 1e3 / z_spacing
    # Rounded first, against rounding errors: 0.1 mm are 20 voxels of 5 µm.
    low, high = math.ceil(round(expected - reach, 6)), math.floor(round(expected + reach, 6))
    if low > high:
        low = high = round(expected)
    low, high = max(1, low), min(high, fixed_planes, moving_planes)
    if low > high:
        raise ValueError(
            f"slices of {fixed_planes} and {moving_planes} planes of {z_spacing:g} µm, cut every "
            f"{slicing_interval_mm:g} mm, have no overlap within {search_range_mm:g} mm of the expected "
            f"{expected:.1f} planes: check the interval and the spacing, or search further"
        )
    return list(range(low, high + 1)), expected


@dataclass(frozen=True)
class ConsistentOverlaps:
    """Overlaps of a stack, with outliers replaced.

    Attributes
    ----------
    overlaps : tuple of int
        In voxels along Z, one for each pair of neighbouring slices.
    mended : tuple of bool
        Whether each was replaced.
    typical : int
        The overlap that replaces outliers.
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
    """Replace outliers among overlaps by the typical one.

    The microtome cuts at a constant interval, so overlaps of one brain vary little. An overlap with enough correlation
    is trusted; the typical overlap is the median of the trusted ones. An overlap is replaced if it is not trusted, or
    farther from the typical one than `max_deviation` robust standard deviations (1.4826 times the median absolute
    deviation) and than `tolerance`.

    Parameters
    ----------
    overlaps : sequence of int
        In voxels along Z, one for each pair of neighbouring slices.
    correlations : sequence of float, optional
        The correlation of each, from :func:`find_z_overlap`; without correlations all overlaps are trusted.
    min_correlation : float
        An overlap whose correlation is less, or NaN, is not trusted. If none reaches it, all are trusted.
    max_deviation : float
        In robust standard deviations.
    tolerance : float
        A smaller distance, in voxels, is never an outlier.

    Raises
    ------
    ValueError
        No overlaps, or another number of correlations.
    """
    planes = np.asarray(overlaps, np.float64)
    if planes.ndim != 1 or not planes.size or not np.isfinite(planes).all():
        raise ValueError(f"overlaps={list(overlaps)}: pass a sequence of at least one number")
    trusted = np.ones(planes.size, bool)
    if correlations is not None:
        if len(correlations) != planes.size:
            raise ValueError(f"{len(correlations)} correlations do not match {planes.size} overlaps")
        trusted = np.asarray(correlations, np.float64) >= min_correlation
        if not trusted.any():
            trusted[:] = True
    middle = float(np.median(planes[trusted]))
    spread = robust_deviation(planes[trusted] - middle)
    mended = ~trusted | (np.abs(planes - middle) > max(tolerance, max_deviation * spread))
    typical = math.floor(middle + 0.5)
    result = np.where(mended, typical, planes).astype(np.int64)
    return ConsistentOverlaps(tuple(map(int, result)), tuple(map(bool, mended)), typical)


def blend_overlap(
    fixed: Array,
    moving: Array,
    *,
    first: int = 0,
    planes: int | None = None,
    measured: tuple[Array, Array] | None = None,
) -> Array:
    """Blend planes that two slices share.

    Weights follow a Hann ramp: in plane k of n the moving slice has the weight ``w = sin²(π (k + 1/2) / (2 n))`` and
    the fixed slice ``1 - w``. A voxel that is 0 or not finite is invalid: if one slice is invalid there, the other is
    taken; if both are, the result is 0.

    Parameters
    ----------
    fixed, moving : numpy.ndarray or cupy.ndarray, (Z, Y, X)
        The last planes of one slice, the first planes of the next; of one shape and dtype.
    first, planes : int
        These planes begin at plane `first` of an overlap of `planes` planes; by default they are the whole overlap.
    measured : (array of bool, array of bool), optional
        Measured voxels of each; other voxels are used only where neither slice has a measured one.

    Returns
    -------
    numpy.ndarray or cupy.ndarray, (Z, Y, X)
        In the dtype of `fixed`, integers rounded.

    Raises
    ------
    ValueError
        Shapes that are not of rank 3, or differ.
    """
    if fixed.ndim != 3 or fixed.shape != moving.shape or fixed.dtype != moving.dtype:
        raise ValueError(
            f"planes of {fixed.shape} {fixed.dtype} and {moving.shape} {moving.dtype} cannot be blended: "
            "pass (Z, Y, X) of one shape and dtype"
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
        valid_measured = left & measured[0], right & measured[1]
        any_measured = valid_measured[0] | valid_measured[1]
        left, right = (
            xp.where(any_measured, when_measured, otherwise)
            for when_measured, otherwise in zip(valid_measured, (left, right), strict=True)
        )
    weight = xp.where(left, xp.where(right, ramp, 0), 1)
    a, b = xp.where(left, fixed, 0).astype(kind), xp.where(right, moving, 0).astype(kind)
    # In this form equal voxels blend exactly to themselves.
    mixed = a + weight * (b - a)
    return (
        saturated(xp.rint(mixed), dtype.newbyteorder("=")).astype(dtype, copy=False)
        if dtype.kind in "iub"
        else mixed.astype(dtype)
    )


@dataclass(frozen=True)
class StackPlan:
    """Offsets of the slices in a stack.

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
        """Return the box of a slice in the stack."""
        z, y, x = (slice(p, p + n) for p, n in zip(self.offsets[number], self.shapes[number], strict=True))
        return z, y, x

    def shared(self, number: int) -> int:
        """Return how many of the first planes of a slice overlap slices above."""
        filled = max((self.box(above)[0].stop for above in range(number)), default=0)
        return min(self.shapes[number][0], max(0, filled - self.offsets[number][0]))


def plan_stack(
    shapes: Sequence[tuple[int, int, int]],
    overlaps: Sequence[int],
    shifts: Sequence[tuple[float, float]] | None = None,
) -> StackPlan:
    """Arrange slices in the smallest stack that holds all of them; pure.

    Parameters
    ----------
    shapes : sequence of (int, int, int)
        Voxels of each slice (Z, Y, X).
    overlaps : sequence of int
        Voxels along Z that each slice shares with the next.
    shifts : sequence of (float, float), optional
        Shift of each slice to the one above, in voxels along Y and X. Shifts are summed, then rounded to whole voxels.

    Raises
    ------
    ValueError
        No slices; another number of overlaps or shifts than of pairs; an overlap that is negative or exceeds one of its
        slices.
    """
    pairs = len(shapes) - 1
    if pairs < 0:
        raise ValueError("there are no slices to stack")
    moves = [(0.0, 0.0)] * pairs if shifts is None else [(float(y), float(x)) for y, x in shifts]
    if len(overlaps) != pairs or len(moves) != pairs:
        raise ValueError(f"{pairs + 1} slices need {pairs} overlaps and shifts, not {len(overlaps)} and {len(moves)}")
    if not all(math.isfinite(y) and math.isfinite(x) for y, x in moves):
        raise ValueError(f"shifts={moves}: pass finite numbers of voxels")
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


def compose(
    plan: StackPlan,
    box: Box,
    read: Callable[[int, Box], Array],
    xp: ModuleType,
    dtype: np.dtype,
    measured: Callable[[int, Box], Array | bool] | None = None,
) -> Array:
    """Make a box of a stack. Its voxels do not depend on how the stack is cut into boxes.

    Parameters
    ----------
    plan : StackPlan
        Offsets of the slices.
    box : tuple of slice
        Box of the stack, with start and stop.
    read : callable
        Takes the number of a slice and a box of the slice; returns its voxels as an array of `xp`.
    xp : module
        CuPy or NumPy.
    dtype : dtype
        Data type of all slices and the stack.
    measured : callable, optional
        Takes the arguments of `read`; returns which of the voxels were measured, as an array of bool or True.
    """
    measured_voxels = None if measured is None else xp.zeros(box_shape(box), bool)
    out = xp.zeros(box_shape(box), dtype)
    for number, part in parts(plan, box):
        voxels, offset = read(number, part), plan.offsets[number]
        inside = tuple(
            slice(s.start + p - b.start, s.stop + p - b.start) for s, p, b in zip(part, offset, box, strict=True)
        )
        target, first, planes = out[inside], part[0].start, plan.shared(number)
        blended = min(max(0, planes - first), voxels.shape[0])
        both = None
        if measured_voxels is not None and measured is not None:
            measured_part = xp.broadcast_to(xp.asarray(measured(number, part)), voxels.shape)
            both = measured_voxels[inside][:blended].copy(), measured_part[:blended]
            measured_voxels[inside] |= measured_part
        target[blended:] = voxels[blended:]
        if blended:
            target[:blended] = blend_overlap(
                target[:blended], voxels[:blended], first=first, planes=planes, measured=both
            )
    return out


def parts(plan: StackPlan, box: Box) -> Iterator[tuple[int, Box]]:
    """Yield number and box of each slice that a box of a stack intersects, from the top down."""
    for number, offset in enumerate(plan.offsets):
        shared = [slice(max(b.start, s.start), min(b.stop, s.stop)) for b, s in zip(box, plan.box(number), strict=True)]
        if all(extent.start < extent.stop for extent in shared):
            yield number, tuple(slice(t.start - p, t.stop - p) for t, p in zip(shared, offset, strict=True))
