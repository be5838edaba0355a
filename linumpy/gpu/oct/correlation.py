"""Correlate the last planes of one volume with the first planes of another, for several overlaps at once.

In: two volumes (Z, Y, X), and overlaps in planes. Out: Pearson's correlation at each overlap, in the memory (host or
device) of the volumes. All correlations are computed from one Gram matrix: the products of each of the last planes of
one volume with each of the first planes of the other. An overlap is a diagonal of this matrix. Each volume is read
once, in strips: a strip is a range of rows (Y) of all planes, with scratch memory of at most :data:`SCRATCH_BYTES`.
Sums are in float64. In the code `n` is an overlap, `k` a plane, and `deepest` the largest overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from linumpy.arrays import Array, array_module
from linumpy.gpu.oct.projection import project

#: Maximum scratch memory of a strip.
SCRATCH_BYTES = 512 * 2**20
#: A variance below this fraction of the mean square counts as 0: it may be a rounding error of float64.
_NO_VARIANCE = 1e-13


def overlap_correlations(
    fixed: Array,
    moving: Array,
    overlaps: Sequence[int],
    measured: tuple[Array | None, Array | None] = (None, None),
) -> Array:
    """Correlate the last n planes of a volume with the first n planes of another.

    `fixed`, `moving` (Z, Y, X): real numbers, both on the host or both on the device, with the same Y and X. An A-line
    is left out if either volume has a voxel in it that is not finite, in the planes of the largest overlap. `overlaps`:
    values of n, each from 1 to the planes of the shorter volume. `measured` (array of bool or None, array of bool or
    None): voxels that count, for each volume a mask of its shape; None for all.

    Returns: Pearson's correlation coefficient of overlapping voxels; 0 where one side has no variance. On a device the
    call does not wait for the result.

    `ValueError`: Volumes of other ranks, of different Y and X, or on different sides; no overlaps, or an overlap out of
    range. `TypeError`: Complex voxels.
    """
    _check(fixed, moving, overlaps)
    xp, deepest = array_module(fixed), max(overlaps)
    ends = slice(fixed.shape[0] - deepest, None), slice(deepest)
    volumes = fixed[ends[0]], moving[ends[1]]
    masks = None
    if any(mask is not None for mask in measured):
        masks = [
            xp.ones(vol.shape, bool) if mask is None else mask[end]
            for vol, mask, end in zip(volumes, measured, ends, strict=True)
        ]
    shifts = [_sampled_mean(xp, vol, mask) for vol, mask in zip(volumes, masks or (None, None), strict=True)]
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


def central_half(vol: Array) -> Array:
    """Return a view of the middle half of a volume along Y and X."""
    bounds = [((n - (n + 1) // 2) // 2, (n + 1) // 2) for n in vol.shape[1:]]
    return vol[:, *(slice(begin, begin + size) for begin, size in bounds)]


def _check(fixed: Array, moving: Array, overlaps: Sequence[int]) -> None:
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


def _sampled_mean(xp: ModuleType, vol: Array, mask: Array | None = None) -> Array:
    """Estimate the mean of a volume from a sample. It is subtracted from all voxels, so that sums lose fewer digits."""
    part = (slice(None, None, max(1, vol.shape[0] // 8)), slice(None, None, 16), slice(None, None, 16))
    sample = vol[part].astype(np.float64)
    finite = xp.isfinite(sample) if mask is None else xp.isfinite(sample) & mask[part]
    return xp.where(finite, sample, 0).sum() / xp.maximum(finite.sum(), 1)


def _strip(xp: ModuleType, planes: Array, shift: Array | float) -> Array:
    """Return rows of a volume minus `shift` as float64 (Y, Z, X): a batch of matrices for the Gram matrix."""
    rows = planes.transpose(1, 0, 2)
    out = xp.empty(rows.shape, np.float64)
    if planes.dtype.kind == "b":
        rows = rows.view(np.uint8)
    return xp.subtract(rows, shift, out=out)


def _mean(array: Array, axis: int) -> Array:
    return project(array, axis, accumulate="float64")


class _Sums:
    """Sums over A-lines: products for each pair of planes; voxels and their squares for each plane."""

    def __init__(self, xp: ModuleType, planes: int) -> None:
        self.xp, self.planes = xp, planes
        self.products = xp.zeros((planes, planes), np.float64)
        self.voxels, self.squares = (xp.zeros((2, planes), np.float64) for _ in range(2))
        self.count = xp.zeros((), np.float64)

    def add(self, fixed: Array, moving: Array) -> None:
        """Add a strip of both volumes, (Y, Z, X), which is overwritten."""
        xp = self.xp
        with np.errstate(invalid="ignore"):
            # The mean of an A-line is finite only if all its voxels are.
            is_finite = xp.isfinite(_mean(fixed, 1) + _mean(moving, 1))[:, None, :]
        self.count += is_finite.sum()
        for number, side in enumerate((fixed, moving)):
            xp.copyto(side, 0, where=xp.broadcast_to(~is_finite, side.shape))
            mean, spread = project(side, 2, ("mean", "std"), accumulate="float64")
            self.voxels[number] += mean.sum(axis=0) * side.shape[2]
            self.squares[number] += (mean * mean + spread * spread).sum(axis=0) * side.shape[2]
        self.products += _mean(xp.matmul(fixed, moving.transpose(0, 2, 1)), 0) * fixed.shape[0]

    def correlations(self, overlaps: Sequence[int], *shifts: Array) -> Array:
        """Compute the correlation at each overlap."""
        xp, deepest = self.xp, self.planes
        n, k = _as_grid(xp, overlaps, deepest)
        last, first = k >= deepest - n, k < n
        (a, b), (aa, bb) = (
            [xp.where(planes, total[side], 0).sum(axis=1) for side, planes in enumerate((last, first))]
            for total in (self.voxels, self.squares)
        )
        return _pearson(xp, self.count * n[:, 0], (a, b), (aa, bb), _diagonal_sums(xp, self.products, n, k), shifts)


class _MaskedSums:
    """As :class:`_Sums`, over pairs of voxels inside both masks. Each sum is a matrix, an element for two planes."""

    def __init__(self, xp: ModuleType, planes: int) -> None:
        self.xp = xp
        #: Count, sum of fixed, of moving, of fixed², of moving², of fixed · moving, for each pair of planes.
        self.sums = xp.zeros((6, planes, planes), np.float64)

    def add(self, fixed: Array, moving: Array, fixed_mask: Array, moving_mask: Array) -> None:
        """Add a strip of both volumes with masks of 1 and 0; all are (Y, Z, X) and are overwritten."""
        xp = self.xp
        for side, mask in ((fixed, fixed_mask), (moving, moving_mask)):
            xp.copyto(side, 0, where=mask == 0)
        with np.errstate(invalid="ignore"):
            is_finite = xp.isfinite(_mean(fixed, 1) + _mean(moving, 1))[:, None, :]
        for side, mask in ((fixed, fixed_mask), (moving, moving_mask)):
            for array in (side, mask):
                xp.copyto(array, 0, where=xp.broadcast_to(~is_finite, array.shape))
        pairs = (
            (fixed_mask, moving_mask), (fixed, moving_mask), (fixed_mask, moving), (fixed * fixed, moving_mask),
            (fixed_mask, moving * moving), (fixed, moving),
        )  # fmt: skip
        for number, (left, right) in enumerate(pairs):
            self.sums[number] += _mean(xp.matmul(left, right.transpose(0, 2, 1)), 0) * fixed.shape[0]

    def correlations(self, overlaps: Sequence[int], *shifts: Array) -> Array:
        """Compute the correlation at each overlap."""
        n, k = _as_grid(self.xp, overlaps, self.sums.shape[1])
        count, a, b, aa, bb, products = (_diagonal_sums(self.xp, matrix, n, k) for matrix in self.sums)
        return _pearson(self.xp, count, (a, b), (aa, bb), products, shifts)


def _as_grid(xp: ModuleType, overlaps: Sequence[int], deepest: int) -> tuple[Array, Array]:
    """Return the overlaps as a column, and the numbers of the planes as a row."""
    return xp.asarray(np.asarray(overlaps, np.int64))[:, None], xp.arange(deepest)[None, :]


def _diagonal_sums(xp: ModuleType, matrix: Array, n: Array, k: Array) -> Array:
    """Sum a diagonal for each overlap n: the elements (k + deepest - n, k) with k < n."""
    deepest = matrix.shape[0]
    return xp.where(k < n, matrix[xp.minimum(k + deepest - n, deepest - 1), k], 0).sum(axis=1)


def _pearson(
    xp: ModuleType,
    count: Array,
    sums: tuple[Array, Array],
    squares: tuple[Array, Array],
    products: Array,
    shifts: tuple[Array, ...],
) -> Array:
    """Compute Pearson's correlation from the sums of both sides, whose voxels had `shifts` subtracted."""
    safe = xp.maximum(count, 1)
    # The root of each side's variance: the product of both variances may overflow float64.
    spread = xp.ones_like(products)
    valid = count > 0
    for total, square, shift in zip(sums, squares, shifts, strict=True):
        variance = square - total * total / safe
        valid &= variance > _NO_VARIANCE * (square + count * shift * shift)
        spread *= xp.sqrt(xp.maximum(variance, 0))
    covariance = products - sums[0] * sums[1] / safe
    return xp.where(valid, xp.clip(covariance / xp.where(valid, spread, 1), -1, 1), 0)
