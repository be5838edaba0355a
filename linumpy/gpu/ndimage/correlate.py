"""Smooth images along their axes by weights; beyond a border the nearest voxel is repeated (SciPy's ``"nearest"``).

In: images of float32 or float64, in C order or not. Out: new images of the same dtype, in the same memory: SciPy
computes NumPy's, one kernel for all axes and weights CuPy's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from linumpy.arrays import Array, array_module, is_device_array
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, int32, int64, load
from linumpy.plan.boundary import gaussian_radius

_THREADS = 256


def kernel_spec(dtype: np.dtype) -> KernelSpec:
    """Choose a kernel of correlate.cu."""
    return KernelSpec(
        "correlate", "correlate_lines", (("VALUE", CUDA_TYPES[dtype.str[1:]]),), "linumpy.gpu.ndimage.cuda"
    )


def gaussian(images: Array, sigmas: Sequence[float]) -> Array:
    """Smooth images by a Gaussian; ``sigmas`` has the standard deviation along each axis in voxels, 0 for none."""
    for axis, sigma in enumerate(sigmas):
        radius = gaussian_radius(sigma)
        if sigma > 0:
            weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
            images = correlate(images, weights / weights.sum(), axis)
    return images


def correlate(images: Array, weights: np.ndarray, axis: int) -> Array:
    """Correlate images along an axis with an odd number of weights, whose middle one belongs to the voxel itself."""
    if not is_device_array(images):
        from scipy.ndimage import correlate1d

        return correlate1d(images, weights, axis, mode="nearest")  # type: ignore[no-any-return]
    xp, axis = array_module(images), axis % images.ndim
    images = xp.ascontiguousarray(images)
    out = xp.empty_like(images)
    if images.size:
        inner = math.prod(images.shape[axis + 1 :])
        load(kernel_spec(images.dtype))(
            (-(-images.size // _THREADS),),
            (_THREADS,),
            (
                images, out, xp.asarray(weights, np.float64), *int32(len(weights) // 2),
                *int64(images.shape[axis], inner, images.size),
            ),
        )  # fmt: skip
    return out  # type: ignore[no-any-return]
