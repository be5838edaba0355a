"""OME-Zarr volumes from disk into GPU memory, resampled and analysed there.

Axes are ordered (Z, Y, X), spacings are in µm, and an array stays where it is: CuPy in, CuPy out; NumPy in,
NumPy out. Importing this package, or any module of it, needs no GPU and no GPU package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from linumpy.version import __version__ as __version__

if TYPE_CHECKING:
    # isort: off
    from linumpy import correction as correction, geometry as geometry, gpu as gpu, interop as interop, io as io
    from linumpy import mosaic as mosaic, quality as quality, rays as rays, registration as registration
    from linumpy import resample as resample, sampling as sampling, stream as stream, testing as testing
    from linumpy import voxel as voxel, write as write

    # isort: on
    from linumpy.gpu.zarr_io import plan_zarr_read, read_zarr, read_zarr_to_gpu
    from linumpy.interop.export import to_nifti, to_tiff
    from linumpy.interop.zarr_pipeline import accelerate
    from linumpy.io.ome import open_image, open_images
    from linumpy.resample.convert_zarr import convert_zarr
    from linumpy.resample.resample_zarr import resample_zarr
    from linumpy.verification.verify import verify
    from linumpy.viewer import show
    from linumpy.write.writer import OmeZarrWriter

__all__ = [
    "OmeZarrWriter",
    "accelerate",
    "convert_zarr",
    "open_image",
    "open_images",
    "plan_zarr_read",
    "read_zarr",
    "read_zarr_to_gpu",
    "resample_zarr",
    "show",
    "to_nifti",
    "to_tiff",
    "verify",
]

#: The module of each public name. Modules are imported on first use, so that ``import linumpy`` takes milliseconds.
_MODULES = {
    "OmeZarrWriter": "linumpy.write.writer",
    "accelerate": "linumpy.interop.zarr_pipeline",
    "convert_zarr": "linumpy.resample.convert_zarr",
    "open_image": "linumpy.io.ome",
    "open_images": "linumpy.io.ome",
    "plan_zarr_read": "linumpy.gpu.zarr_io",
    "read_zarr": "linumpy.gpu.zarr_io",
    "read_zarr_to_gpu": "linumpy.gpu.zarr_io",
    "resample_zarr": "linumpy.resample.resample_zarr",
    "show": "linumpy.viewer",
    "to_nifti": "linumpy.interop.export",
    "to_tiff": "linumpy.interop.export",
    "verify": "linumpy.verification.verify",
}
#: Packages that are imported when they are used as attributes, as in ``linumpy.stream.Pipeline``.
_PACKAGES = (
    "correction", "geometry", "gpu", "interop", "io", "mosaic", "quality", "rays", "registration", "resample",
    "sampling", "stream", "testing", "voxel", "write",
)  # fmt: skip


if not TYPE_CHECKING:  # for type checkers a misspelt name is an error

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *_PACKAGES, *__all__})
