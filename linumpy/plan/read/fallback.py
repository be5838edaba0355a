"""How zarr-python reads what linumpy's reader leaves to it: straight into device memory, or into host memory first.

In: a layout and a region. Out: why zarr's GPU mode is not taken. Pure. What is not refused here is what
``tests/gpu/test_fallback.py`` compares with zarr-python on the host, bit for bit, on a device; everything else is read
into host memory and copied to the device once, which is as fast wherever chunks are encoded or small.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from linumpy.plan.layout import ArrayLayout
from linumpy.plan.region import Region


def why_not_gpu_mode(layout: ArrayLayout, region: Region, dtype: np.dtype | None = None, device: int = 0) -> str | None:
    """Say why zarr's GPU mode is not taken for a read; None where it is.

    Parameters
    ----------
    layout : ArrayLayout
        How the array is stored, wherever that is.
    region : Region
        What is read of it.
    dtype : numpy.dtype, optional
        Of the result; by default that of the array.
    device : int
        Number of the CUDA device that the result goes to.
    """
    reasons = (
        (layout.zarr_format != 3, "zarr's codec of format 2 takes host memory"),
        (layout.grid != "regular", f"chunk grid {layout.grid!r}"),
        (layout.shard is not None, "inner chunks may lie at addresses that CUDA cannot read their dtype from"),
        (layout.codecs != ("bytes",), f"codecs {' + '.join(layout.codecs)} work in host memory"),
        (layout.swapped, "CuPy has no foreign byte order"),
        (layout.fill_value is None, f"dtype {layout.dtype}"),
        (not any(region.kept), "single elements come back in host memory"),
        (region.size == 0, "there is nothing to read"),
        (_is_negative_zero_or_nan(layout.fill_value), f"CuPy may store a fill value of {layout.fill_value} otherwise"),
        (dtype is not None and dtype != layout.dtype, f"a cast to {dtype}"),
        (device != 0, "zarr's threads work on device 0"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def _is_negative_zero_or_nan(value: Any) -> bool:
    """Say whether a part of a number is a negative zero or not a number."""
    parts = [] if value is None else [value.real, value.imag]
    return any(bool(part != part) or (part == 0 and any(np.asarray(part).tobytes())) for part in parts)
