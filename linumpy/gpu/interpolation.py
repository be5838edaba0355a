"""Resample images: CuPy in, CuPy out; NumPy in, NumPy out.

In: an image, and coordinates, a map, or voxel spacings. Out: samples. SciPy samples NumPy arrays, this package's
kernels sample CuPy arrays: fast kernels for images of two and three axes and for stacks of such images (along axes that
the map does not change, or channels), a general kernel for all other images of up to 16 axes. At orders 0 and 1
`resize` and `resample_volume` (:mod:`~linumpy.gpu.resize.rescaling`) smooth and sample an image of any rank axis by
axis, on the host too. Spacings are in µm, or in any other unit, the same for all.

float32 results are within 1e-5 of SciPy's, relative to the range of the image; at order 0, and where integers are
rounded, values next to a tie may differ. Integers are rounded, halves away from zero, and saturate; float16 beyond
65504 is infinite. A result has the dtype of the image unless `output` specifies another one.
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
