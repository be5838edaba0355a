"""Stack slices of tissue: find their overlaps along Z, replace outliers, and blend.

A slice is a volume (Z, Y, X), its first plane next to the cut. The microscope images deeper than the microtome cuts, so
the last planes of one slice and the first planes of the next show the same tissue. Of two neighbouring slices the upper
one is fixed and the lower one is moving.

In: volumes on the host or the device. Out: overlaps in planes; boxes of the stack, in the memory of the slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from linumpy.arrays import Array, DeviceName
from linumpy.device import array_module, to_host, transfers
from linumpy.gpu.oct.correlation import central_half, overlap_correlations
from linumpy.gpu.rounding import saturated
from linumpy.mosaic.io.tiles import Box, box_shape
from linumpy.registration.robust import robust_deviation


def find_z_overlap(
    fixed_vol: Array,
    moving_vol: Array,
    slicing_interval_mm: float,
    search_range_mm: float,
    z_spacing: float,
    device: DeviceName | None = None,
) -> tuple[int, float]:
    """Find how many planes at the end of a slice show the same tissue as planes at the beginning of the next slice.

    The expected overlap of a slice of Z planes is ``Z - slicing_interval_mm * 1000 / z_spacing`` planes. All whole
    overlaps within the search range around it are tried, or the nearest one if the range has none, as far as they fit
    both slices. The result is the overlap of the greatest Pearson correlation over the central half of Y and X.

    Parameters
    ----------
    fixed_vol, moving_vol : numpy.ndarray or cupy.ndarray, (Z, Y, X)
        A slice and the next deeper slice; the same Y and X.
    slicing_interval_mm : float
        Thickness that is cut off between slices, in mm.
    search_range_mm : float
        Largest distance of the overlap from the expected one, to each side, in mm.
    z_spacing : float
        Voxel spacing along Z, in µm.
    device : {"auto", "cuda", "cpu"}, optional
        Where to compute; by default where `fixed_vol` lies.

    Returns
    -------
    overlap : int
        In planes. Of overlaps of equal correlation the nearest to the expected one is returned, also if no overlap has
        variance in both slices.
    correlation : float
        From -1 to 1; 0 if no overlap has variance in both slices.

    Raises
    ------
    ValueError
        An interval or a spacing that is not positive, a negative range, slices that do not fit each other, or a search
        range without an overlap.
    TypeError
        Complex voxels.
    GpuUnavailableError
        `device` is ``"cuda"``, and there is no CUDA device.

    Notes
    -----
    The correlations of all overlaps are copied to the host, which waits for the device.
    """
    overlaps, expected = candidate_overlaps(
        fixed_vol.shape[0], moving_vol.shape[0], slicing_interval_mm, search_range_mm, z_spacing
    )
    transfer, _ = transfers(fixed_vol, device)
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

    - `fixed`, `moving` (Z, Y, X): the last planes of a slice and the first planes of the next, both on the host or both
      on a device.
    - `overlaps`, `expected`: As :func:`candidate_overlaps` returns them.
    - `measured`: As for :func:`linumpy.gpu.oct.correlation.overlap_correlations`.
    """
    correlations = to_host(overlap_correlations(fixed, moving, overlaps, measured))
    best = min(range(len(overlaps)), key=lambda i: (-correlations[i], abs(overlaps[i] - expected)))
    return overlaps[best], float(correlations[best])


def candidate_overlaps(
    fixed_planes: int, moving_planes: int, slicing_interval_mm: float, search_range_mm: float, z_spacing: float
) -> tuple[list[int], float]:
    """Return the overlaps to try, in rising order, and the expected overlap; see :func:`find_z_overlap`.

    Raises `ValueError`: an interval or a spacing that is not positive, a negative range, or a range without an overlap.
    """
    for name, value in (("slicing_interval_mm", slicing_interval_mm), ("z_spacing", z_spacing)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: pass a positive length")
    if not 0 <= search_range_mm < math.inf:
        raise ValueError(f"search_range_mm={search_range_mm}: pass a length from 0 on")
    expected = fixed_planes - slicing_interval_mm * 1e3 / z_spacing
    reach = search_range_mm * 1e3 / z_spacing
    # Rounding errors must not exclude the ends of the range: 0.1 mm are 20 voxels of 5 µm.
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

    - `overlaps`: in planes, one for each pair of neighbouring slices.
    - `mended`: whether the overlap was replaced.
    - `typical`: the overlap that replaces outliers.
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
    """Replace outliers among overlaps by the typical overlap.

    The microtome cuts at a constant interval, so overlaps of one brain vary little. An overlap with enough correlation
    is trusted; the typical overlap is the median of the trusted overlaps, rounded. An overlap is replaced if it is not
    trusted, or if its distance from the median exceeds both `tolerance` and `max_deviation` robust standard deviations
    (1.4826 times the median absolute deviation).

    - `overlaps`: in planes, one for each pair of neighbouring slices.
    - `correlations`: the correlation of each overlap, from :func:`find_z_overlap`; without correlations all overlaps
      are trusted.
    - `min_correlation`: an overlap whose correlation is less, or NaN, is not trusted. If no overlap reaches it, all are
      trusted.
    - `tolerance`: in planes. A trusted overlap within this distance of the median is never replaced.

    Raises `ValueError`: no overlaps, an overlap that is not finite, or another number of correlations.
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
    the fixed slice ``1 - w``. A voxel that is 0 or not finite is invalid. Where the voxel of one slice is invalid, the
    other slice is taken; where both are, the result is 0.

    - `fixed`, `moving` (Z, Y, X): planes at the end of one slice and at the beginning of the next; of one shape and
      dtype.
    - `first`, `planes`: `fixed` and `moving` begin at plane `first` of an overlap of `planes` planes; by default they
      are all of it.
    - `measured` (array of bool, array of bool): measured voxels of each slice. Other voxels are used only where neither
      slice has a valid measured voxel.

    Returns: In the dtype of `fixed`, integers rounded.

    Raises `ValueError`: shapes that are not of rank 3; shapes or dtypes that differ; planes that are not in the
    overlap.
    """
    if fixed.ndim != 3 or fixed.shape != moving.shape or fixed.dtype != moving.dtype:
        raise ValueError(
            f"planes of {fixed.shape} {fixed.dtype} and {moving.shape} {moving.dtype} cannot be blended: "
            "pass (Z, Y, X) of one shape and dtype"
        )
    xp, dtype = array_module(fixed), fixed.dtype
    float_dtype = np.float64 if dtype.itemsize > 4 or (dtype.kind in "iu" and dtype.itemsize > 2) else np.float32
    count = fixed.shape[0] if planes is None else planes
    if not 0 <= first <= count - fixed.shape[0]:
        raise ValueError(f"{fixed.shape[0]} planes from plane {first} on are not in an overlap of {count}")
    ramp = np.sin(np.pi * (np.arange(first, first + fixed.shape[0]) + 0.5) / (2 * max(1, count))) ** 2
    ramp = xp.asarray(ramp.astype(float_dtype))[:, None, None]
    use_fixed, use_moving = xp.isfinite(fixed) & (fixed != 0), xp.isfinite(moving) & (moving != 0)
    if measured is not None:
        valid_measured = use_fixed & measured[0], use_moving & measured[1]
        any_measured = valid_measured[0] | valid_measured[1]
        use_fixed, use_moving = (
            xp.where(any_measured, when_measured, otherwise)
            for when_measured, otherwise in zip(valid_measured, (use_fixed, use_moving), strict=True)
        )
    weight = xp.where(use_fixed, xp.where(use_moving, ramp, 0), 1)
    upper = xp.where(use_fixed, fixed, 0).astype(float_dtype)
    lower = xp.where(use_moving, moving, 0).astype(float_dtype)
    # In this form equal voxels blend exactly to themselves.
    mixed = upper + weight * (lower - upper)
    return (
        saturated(xp.rint(mixed), dtype.newbyteorder("=")).astype(dtype, copy=False)
        if dtype.kind in "iub"
        else mixed.astype(dtype)
    )


@dataclass(frozen=True)
class StackPlan:
    """Offsets of the slices in a stack.

    - `shape` (int, int, int): voxels of the stack (Z, Y, X).
    - `offsets` (int, int, int): first voxel (Z, Y, X) of each slice in the stack.
    - `shapes` (int, int, int): voxels of each slice.
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
    """Plan the smallest stack that holds all slices; pure.

    - `shapes` (int, int, int): voxels of each slice (Z, Y, X).
    - `overlaps`: planes that each slice shares with the next; negative for planes that are missing between them.
    - `shifts` (float, float): shift of each slice but the first to the slice above, in voxels along Y and X: voxel p is
      at p + shift above. Shifts are summed, then rounded to whole voxels; by default all are 0.

    Raises `ValueError`: no slices; another number of overlaps or shifts than of pairs; a shift that is not finite; an
    overlap that exceeds one of its slices.
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
        if overlap > min(shapes[number][0], shapes[number + 1][0]):
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
    """Compute a box of a stack. Its voxels do not depend on how the stack is cut into boxes.

    - `box`: box of the stack, with start and stop.
    - `read`: takes the number of a slice and a box of the slice; returns its voxels as an array of `xp`.
    - `dtype`: data type of all slices and the stack.
    - `measured`: takes the arguments of `read`; returns which of the voxels were measured, as an array of bool, or True
      for all.
    """
    measured_voxels = None if measured is None else xp.zeros(box_shape(box), bool)
    out = xp.zeros(box_shape(box), dtype)
    for number, part in slices_in_box(plan, box):
        voxels, offset = read(number, part), plan.offsets[number]
        inside = tuple(
            slice(s.start + p - b.start, s.stop + p - b.start) for s, p, b in zip(part, offset, box, strict=True)
        )
        target, first, planes = out[inside], part[0].start, plan.shared(number)
        blended = min(max(0, planes - first), voxels.shape[0])
        measured_pair = None
        if measured_voxels is not None and measured is not None:
            measured_part = xp.broadcast_to(xp.asarray(measured(number, part)), voxels.shape)
            measured_pair = measured_voxels[inside][:blended].copy(), measured_part[:blended]
            measured_voxels[inside] |= measured_part
        target[blended:] = voxels[blended:]
        if blended:
            target[:blended] = blend_overlap(
                target[:blended], voxels[:blended], first=first, planes=planes, measured=measured_pair
            )
    return out


def slices_in_box(plan: StackPlan, box: Box) -> Iterator[tuple[int, Box]]:
    """Yield the number of each slice that a box of a stack intersects, and the box in the slice, from the top down."""
    for number, offset in enumerate(plan.offsets):
        shared = [slice(max(b.start, s.start), min(b.stop, s.stop)) for b, s in zip(box, plan.box(number), strict=True)]
        if all(extent.start < extent.stop for extent in shared):
            yield number, tuple(slice(t.start - p, t.stop - p) for t, p in zip(shared, offset, strict=True))
