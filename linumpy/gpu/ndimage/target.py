"""Records of interpolation parameters and of outputs.

The functions of :mod:`~linumpy.gpu.interpolation` make these records from their arguments, for SciPy and the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from linumpy.arrays import Array, array_module


@dataclass(frozen=True)
class Spline:
    """Interpolation parameters.

    `order`, `mode`, `cval`, `prefilter`: as for :func:`linumpy.gpu.interpolation.map_coordinates`; ``"grid-mirror"`` is
    named ``"reflect"``.
    """

    order: int
    mode: str
    cval: Any = 0.0
    prefilter: bool = True

    @property
    def is_local(self) -> bool:
        """Whether a sample at integer coordinates is the value of that voxel, so that images of a stack do not mix."""
        return self.order <= 1 or self.prefilter

    @property
    def needs_filter(self) -> bool:
        """Whether the spline's coefficients are computed from the image first."""
        return self.order > 1 and self.prefilter

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of SciPy's functions."""
        return {"order": self.order, "mode": self.mode, "cval": self.cval, "prefilter": self.prefilter}

    def part(self, name: str) -> Spline:
        """Return the parameters for the real or the imaginary part of an image."""
        return replace(self, cval=float(getattr(np.asarray(self.cval), name)))


@dataclass(frozen=True)
class Target:
    """The output of a call.

    `dtype`: data type of the result. `out`: output array; None for a new one.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    out: Array | None = None

    def array(self, *sources: Array) -> Array:
        """Return an array to write to: `out`, or a new one if `out` is not contiguous or may overlap a source."""
        xp = array_module(sources[0])
        out = self.out
        if (
            out is not None
            and out.flags.c_contiguous
            and not any(xp.may_share_memory(out, source) for source in sources)
        ):
            return out
        return xp.empty(self.shape, self.dtype)

    def take(self, result: Array) -> Array:
        """Return the result, copied to `out` if `out` is given and another array."""
        if self.out is None or result is self.out:
            return result
        self.out[...] = result
        return self.out
