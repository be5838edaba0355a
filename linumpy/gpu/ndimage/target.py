"""How an image is interpolated, and where the result goes.

Records that the functions of :mod:`~linumpy.gpu.interpolation` make of their arguments, for SciPy and for the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module


@dataclass(frozen=True)
class Spline:
    """How an image is interpolated, and what lies outside.

    Attributes
    ----------
    order, mode, cval, prefilter
        As for :func:`linumpy.gpu.interpolation.map_coordinates`; the mode by the first of its names.
    """

    order: int
    mode: str
    cval: Any = 0.0
    prefilter: bool = True

    @property
    def is_local(self) -> bool:
        """Whether a whole coordinate takes the voxel there and no other: whether channels can be taken one by one."""
        return self.order <= 1 or self.prefilter

    @property
    def filters(self) -> bool:
        """Whether the coefficients of the spline are found first."""
        return self.order > 1 and self.prefilter

    @property
    def options(self) -> dict[str, Any]:
        """As SciPy's functions take them."""
        return {"order": self.order, "mode": self.mode, "cval": self.cval, "prefilter": self.prefilter}

    def part(self, name: str) -> Spline:
        """For the real or the imaginary part of an image."""
        return replace(self, cval=float(getattr(np.asarray(self.cval), name)))


@dataclass(frozen=True)
class Target:
    """Where a result goes.

    Attributes
    ----------
    shape : tuple of int
        Of it.
    dtype : numpy.dtype
        Of it.
    out : array or None
        To put it in; None for a new one.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    out: Array | None = None

    def array(self, *sources: Array) -> Array:
        """Make the array that is written to: `out`, unless it has gaps or may share memory with what is read."""
        xp = array_module(sources[0])
        out = self.out
        if out is not None and out.flags.c_contiguous and not any(xp.may_share_memory(out, one) for one in sources):
            return out
        return xp.empty(self.shape, self.dtype)

    def take(self, result: Array) -> Array:
        """Bring the result to where it goes."""
        if self.out is None or result is self.out:
            return result
        self.out[...] = result
        return self.out
