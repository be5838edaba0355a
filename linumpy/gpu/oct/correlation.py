"""Correlate the end of one stack of planes with the beginning of another, for every overlap at once.

In: two volumes, planes first, and overlaps in planes. Out: the normalised cross-correlation (Pearson's) at each, where
the volumes are. All come from one Gram matrix, the products of each of the last planes of one with each of the first
planes of the other: an overlap is one of its diagonals. Each volume is read once, in strips of rows that keep scratch
memory within :data:`SCRATCH_BYTES`; sums are taken in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.device import array_module
from linumpy.gpu.oct.projection import project

#: What a strip of rows takes at most.
SCRATCH_BYTES = 512 * 2**20
#: A variance below this part of the mean square is none: float64's rounding makes as much.
_NO_VARIANCE = 1e-13


def overlap_correlations(
    fixed: Any,
    moving: Any,
    overlaps: Sequence[int],
    measured: tuple[Any | None, Any | None] = (None, None),
) -> Any:
    """Correlate the last n planes of a volume with the first n planes of another.

    Parameters
    ----------
    fixed, moving : numpy.ndarray or cupy.ndarray, (Z, Y, X)
        Real numbers, both in the same memory and with the same Y and X. An A-line that is not finite somewhere in the
        planes that are looked at, in either volume, takes no part.
    overlaps : sequence of int
        Values of n, each from 1 to the planes of the shorter volume.
    measured : (array of bool or None, array of bool or None)
        Which voxels of either volume count, of its shape; None for all.

    Returns
    -------
    numpy.ndarray or cupy.ndarray of float64, (len(overlaps),)
        Pearson's correlation coefficient of the voxels that lie upon each other; 0 where one side has no variance.
        On the device without waiting for it.

    Raises
    ------
    ValueError
        Volumes that do not fit each other, no overlaps, or one that cannot be.
    TypeError
        Complex voxels.
    """
    _check(fixed, moving, overlaps)
    xp, deepest = array_module(fixed), max(overlaps)
    ends = slice(fixed.shape[0] - deepest, None), slice(deepest)
    volumes = fixed[ends[0]], moving[ends[1]]
    masks = None
    if any(one is not None for one in measured):
        masks = [
            xp.ones(vol.shape, bool) if mask is None else mask[end]
            for vol, mask, end in zip(volumes, measured, ends, strict=True)
        ]
    shifts = [_offset(xp, vol, mask) for vol, mask in zip(volumes, masks or (None, None), strict=True)]
    rows, width = fixed.shape[1:]
    per_row = 8 * (4 * deepest * width + deepest * deepest) * (1 if masks is None else 3)
    step = max(1, min(rows, SCRATCH_BYTES // per_row))
    sums = _Sums(xp, deepest) if masks is None else _MaskedSums(xp, deepest)
    for begin in range(0, rows, step):
        strip = slice(begin, min(begin + step, rows))
        strips = [_strip(xp, vol[:, strip], shift) for vol, shift in zip(volumes, shifts, strict=True)]
        if masks is not None:
            strips += [_strip(xp, mask[:, strip], 0.0) for mask in masks]
        sums.add(*strips)
    return sums.correlations(overlaps, *shifts)


def central_half(vol: Any) -> Any:
    """Return the middle half of a volume in Y and X, a view."""
    bounds = [((n - (n + 1) // 2) // 2, (n + 1) // 2) for n in vol.shape[1:]]
    return vol[:, *(slice(begin, begin + size) for begin, size in bounds)]


def _check(fixed: Any, moving: Any, overlaps: Sequence[int]) -> None:
    if fixed.ndim != 3 or moving.ndim != 3 or fixed.shape[1:] != moving.shape[1:] or not all(fixed.shape[1:]):
        raise ValueError(f"volumes of {fixed.shape} and {moving.shape} do not fit: (Z, Y, X) with the same Y and X do")
    if array_module(fixed) is not array_module(moving):
        raise ValueError("one volume is on the device and the other is not: copy one of them to the other side")
    for vol in (fixed, moving):
        if vol.dtype.kind not in "biuf":
            raise TypeError(f"a volume of {vol.dtype} cannot be correlated: real numbers can")
    deepest = min(fixed.shape[0], moving.shape[0])
    if not len(overlaps) or min(overlaps) < 1 or max(overlaps) > deepest:
        raise ValueError(f"overlaps={list(overlaps)}: volumes of {fixed.shape} and {moving.shape} have 1 to {deepest}")


def _offset(xp: ModuleType, vol: Any, mask: Any = None) -> Any:
    """About the mean of a volume, from some of its voxels: sums of squares lose fewer digits without it."""
    part = (slice(None, None, max(1, vol.shape[0] // 8)), slice(None, None, 16), slice(None, None, 16))
    some = vol[part].astype(np.float64)
    finite = xp.isfinite(some) if mask is None else xp.isfinite(some) & mask[part]
    return xp.where(finite, some, 0).sum() / xp.maximum(finite.sum(), 1)


def _strip(xp: ModuleType, planes: Any, shift: Any) -> Any:
    """Bring rows of a volume to (Y, Z, X) in float64: a batch of matrices for the Gram matrix."""
    rows = planes.transpose(1, 0, 2)
    out = xp.empty(rows.shape, np.float64)
    if planes.dtype.kind == "b":
        rows = rows.view(np.uint8)
    return xp.subtract(rows, shift, out=out)


def _mean(array: Any, axis: int) -> Any:
    return project(array, axis, accumulate="float64")


class _Sums:
    """Sums over A-lines of the products of planes, of planes and of their squares."""

    def __init__(self, xp: ModuleType, planes: int) -> None:
        self.xp, self.planes = xp, planes
        self.products = xp.zeros((planes, planes), np.float64)
        self.first, self.second = (xp.zeros((2, planes), np.float64) for _ in range(2))
        self.count = xp.zeros((), np.float64)

    def add(self, fixed: Any, moving: Any) -> None:
        """Add a strip; both are (Y, Z, X)."""
        xp = self.xp
        with np.errstate(invalid="ignore"):
            # One voxel that is not finite makes the mean of its A-line so.
            good = xp.isfinite(_mean(fixed, 1) + _mean(moving, 1))[:, None, :]
        self.count += good.sum()
        for number, side in enumerate((fixed, moving)):
            xp.copyto(side, 0, where=xp.broadcast_to(~good, side.shape))
            mean, spread = project(side, 2, ("mean", "std"), accumulate="float64")
            self.first[number] += mean.sum(axis=0) * side.shape[2]
            self.second[number] += (mean * mean + spread * spread).sum(axis=0) * side.shape[2]
        self.products += _mean(xp.matmul(fixed, moving.transpose(0, 2, 1)), 0) * fixed.shape[0]

    def correlations(self, overlaps: Sequence[int], *shifts: Any) -> Any:
        """Put the sums of each overlap together."""
        xp, deepest = self.xp, self.planes
        n, k = _overlaps(xp, overlaps, deepest)
        last, first = k >= deepest - n, k < n
        (a, b), (aa, bb) = (
            [xp.where(which, one[side], 0).sum(axis=1) for side, which in enumerate((last, first))]
            for one in (self.first, self.second)
        )
        return _pearson(xp, self.count * n[:, 0], (a, b), (aa, bb), _along(xp, self.products, n, k), shifts)


class _MaskedSums:
    """The same sums over those pairs of voxels of which both count: matrices, in which an overlap is a diagonal."""

    def __init__(self, xp: ModuleType, planes: int) -> None:
        self.xp = xp
        #: Count, sum and sum of squares of either side, products: one for each plane of one and each of the other.
        self.sums = xp.zeros((6, planes, planes), np.float64)

    def add(self, fixed: Any, moving: Any, known: Any, known_too: Any) -> None:
        """Add a strip and what counts of it, 1 or 0; all are (Y, Z, X)."""
        xp = self.xp
        for side, mask in ((fixed, known), (moving, known_too)):
            xp.copyto(side, 0, where=mask == 0)
        with np.errstate(invalid="ignore"):
            good = xp.isfinite(_mean(fixed, 1) + _mean(moving, 1))[:, None, :]
        for side, mask in ((fixed, known), (moving, known_too)):
            for one in (side, mask):
                xp.copyto(one, 0, where=xp.broadcast_to(~good, one.shape))
        pairs = (
            (known, known_too), (fixed, known_too), (known, moving), (fixed * fixed, known_too),
            (known, moving * moving), (fixed, moving),
        )  # fmt: skip
        for number, (one, other) in enumerate(pairs):
            self.sums[number] += _mean(xp.matmul(one, other.transpose(0, 2, 1)), 0) * fixed.shape[0]

    def correlations(self, overlaps: Sequence[int], *shifts: Any) -> Any:
        """Put the sums of each overlap together."""
        n, k = _overlaps(self.xp, overlaps, self.sums.shape[1])
        count, a, b, aa, bb, along = (_along(self.xp, one, n, k) for one in self.sums)
        return _pearson(self.xp, count, (a, b), (aa, bb), along, shifts)


def _overlaps(xp: ModuleType, overlaps: Sequence[int], deepest: int) -> tuple[Any, Any]:
    return xp.asarray(np.asarray(overlaps, np.int64))[:, None], xp.arange(deepest)[None, :]


def _along(xp: ModuleType, matrix: Any, n: Any, k: Any) -> Any:
    """Sum the diagonal of each overlap: of n planes it is that on which fixed is deepest - n planes ahead."""
    deepest = matrix.shape[0]
    return xp.where(k < n, matrix[xp.minimum(k + deepest - n, deepest - 1), k], 0).sum(axis=1)


def _pearson(
    xp: ModuleType, count: Any, sums: tuple[Any, Any], squares: tuple[Any, Any], along: Any, shifts: tuple[Any, ...]
) -> Any:
    safe = xp.maximum(count, 1)
    # One by one: their product could leave the range of float64.
    spread = xp.ones_like(along)
    valid = count > 0
    for total, square, shift in zip(sums, squares, shifts, strict=True):
        variance = square - total * total / safe
        valid &= variance > _NO_VARIANCE * (square + count * shift * shift)
        spread *= xp.sqrt(xp.maximum(variance, 0))
    covariance = along - sums[0] * sums[1] / safe
    return xp.where(valid, xp.clip(covariance / xp.where(valid, spread, 1), -1, 1), 0)
