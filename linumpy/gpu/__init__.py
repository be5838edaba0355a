"""Functions for GPUs: reading, resampling, surface detection. CuPy in, CuPy out.

Importing this package imports no GPU package.
"""

from linumpy.gpu.read.reader import Reader
from linumpy.gpu.read.shared import release
from linumpy.gpu.zarr_io import (
    gpu_zarr_context,
    plan_zarr_read,
    read_zarr,
    read_zarr_to_gpu,
    zarr_to_dask,
)

__all__ = [
    "Reader",
    "gpu_zarr_context",
    "plan_zarr_read",
    "read_zarr",
    "read_zarr_to_gpu",
    "release",
    "zarr_to_dask",
]
