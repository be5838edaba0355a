"""Functions for GPUs: reading, resampling, surface detection. CuPy in, CuPy out.

Importing this package imports no GPU package, and no reader before a name of the reader is used: kernels and functions
of arrays (:mod:`linumpy.gpu.interpolation`) do without Zarr.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linumpy.gpu.read.reader import Reader
    from linumpy.gpu.read.shared import release
    from linumpy.gpu.zarr_dask import zarr_to_dask
    from linumpy.gpu.zarr_io import gpu_zarr_context, plan_zarr_read, read_zarr, read_zarr_to_gpu

__all__ = [
    "Reader",
    "gpu_zarr_context",
    "plan_zarr_read",
    "read_zarr",
    "read_zarr_to_gpu",
    "release",
    "zarr_to_dask",
]

_MODULES = {
    "Reader": "read.reader",
    "release": "read.shared",
    "zarr_to_dask": "zarr_dask",
}


if not TYPE_CHECKING:  # for type checkers a misspelt name is an error

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'zarr_io')}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
