"""Decide whether zarr-python's GPU mode may read an array that linumpy's reader cannot.

In: a layout and a region. Out: the reason not to use the GPU mode, or None; ``linumpy.gpu.read.fallback`` reads
accordingly. Pure. The GPU mode is used only for kinds of reads that ``tests/gpu/read/test_fallback.py`` compares with
zarr-python on the host, bit for bit. For all others zarr-python reads into host memory, with one copy to the device;
this is as fast for encoded or small chunks.
"""

from __future__ import annotations

import numpy as np

from linumpy.plan.layout import ArrayLayout
from linumpy.plan.region import Region


def why_not_gpu_mode(layout: ArrayLayout, region: Region, dtype: np.dtype | None = None, device: int = 0) -> str | None:
    """Return why zarr's GPU mode is not used for a read; None if it is.

    - `layout`: how the array is stored, in any kind of store.
    - `dtype`: data type of the result; by default the data type of the array.
    - `device`: index of the CUDA device of the result.
    """
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
