"""Resample images where they are: CuPy in, CuPy out; NumPy in, NumPy out.

In: an image, and coordinates, a map, or voxel spacings. Out: samples. SciPy samples NumPy arrays, kernels of this
package CuPy arrays: images of two and three axes and stacks of them (axes that a map leaves alone, channels) by fast
ones, others of up to 16 axes by a general one. `resize` and `resample_volume` (:mod:`~linumpy.gpu.resize.rescaling`)
smooth and sample an image of any rank axis by axis at orders 0 and 1. Spacings are in µm, or in any one unit.

float32 results are within 1e-5 of SciPy's, relative to the range of the image; at order 0, and where integers are
rounded, coordinates next to a tie may be decided the other way. Integers are rounded, halves away from zero, and
saturate (what is read, not interpolated, is cast as by ``astype``); float16 beyond 65504 is infinity. The dtype of a
result is that of the image unless `output` says otherwise.
"""

from __future__ import annotations

from linumpy.gpu.ndimage.geometric import apply_displacement_field, compose_affine, rotate, shift, zoom
from linumpy.gpu.ndimage.transform import (
    affine_transform,
    geometric_transform,
    map_coordinates,
    spline_filter,
    spline_filter1d,
)
from linumpy.gpu.resize.rescaling import resample_volume, resize

__all__ = [
    "affine_transform",
    "apply_displacement_field",
    "compose_affine",
    "geometric_transform",
    "map_coordinates",
    "resample_volume",
    "resize",
    "rotate",
    "shift",
    "spline_filter",
    "spline_filter1d",
    "zoom",
]
