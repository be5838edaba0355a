"""Resample images where they are: CuPy in, CuPy out; NumPy in, NumPy out.

In: an image, and places, a map, or voxel spacings. Out: samples. NumPy arrays are answered by SciPy. CuPy arrays of two
and three axes are sampled by this package's kernels for orders 0, 1 and 3, and so are those of four axes whose first
one, of channels, a map leaves alone; all else goes to ``cupyx.scipy.ndimage``. `resize` and `resample_volume`
(:mod:`~linumpy.gpu.rescaling`) smooth and sample an image of any rank axis by axis, orders 0 and 1 by kernels of their
own. Spacings are in µm, or in any one unit.

float32 results are within 1e-5 of SciPy's, relative to the range of the image; at order 0, and where integers are
rounded, places that lie next to a tie may be decided the other way. Integers are rounded, halves away from zero, and
saturate; float16 beyond 65504 is infinity. The dtype of a result is that of the image unless `output` says otherwise.
"""

from __future__ import annotations

from linumpy.gpu.geometric import apply_displacement_field, compose_affine, rotate, shift, zoom
from linumpy.gpu.rescaling import resample_volume, resize
from linumpy.gpu.spline_transform import affine_transform, map_coordinates, spline_filter

__all__ = [
    "affine_transform",
    "apply_displacement_field",
    "compose_affine",
    "map_coordinates",
    "resample_volume",
    "resize",
    "rotate",
    "shift",
    "spline_filter",
    "zoom",
]
