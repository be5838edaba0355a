"""Sample images at given places and through affine maps, and filter them for splines.

In: an image, and places or a map. Out: samples. NumPy arrays are answered by SciPy. CuPy arrays of two and three axes
are sampled by this package's kernels for orders 0, 1 and 3, and so are those of four axes whose first one, of channels,
a map leaves alone; all else goes to ``cupyx.scipy.ndimage``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from linumpy.device import is_device_array
from linumpy.gpu import sampling_paths, spline
from linumpy.gpu.interpolation_args import (
    check_image,
    check_spline,
    read_affine,
    read_output,
    read_places,
    read_shape,
)
from linumpy.gpu.sampling_paths import Spline, Target


def map_coordinates(
    image: Any,
    coordinates: Any,
    *,
    order: int = 3,
    mode: str = "constant",
    cval: float = 0.0,
    prefilter: bool = True,
    output: Any = None,
    interpolation: str = "exact",
) -> Any:
    """Sample an image at given places.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of any rank.
    coordinates : numpy.ndarray or cupy.ndarray, (rank, ...)
        Places in voxels, one row for each axis of the image; where the image is. Where one is NaN or infinite the
        result is `cval` in the constant modes, and NaN (0 in integers) in the others; but with ``"nearest"`` an
        infinite place is one beyond the outermost voxel.
    order : int
        Of the spline: 0 nearest, 1 linear, up to 5; 3 by default, as in SciPy.
    mode : str
        What lies outside, by SciPy's names: ``"constant"``, ``"grid-constant"``, ``"nearest"``, ``"reflect"``,
        ``"mirror"``, ``"wrap"``, ``"grid-wrap"``.
    cval : float
        The value outside, for the constant modes.
    prefilter : bool
        Whether to find the spline's coefficients first, for orders above 1. False where the image holds them already.
    output : dtype or array, optional
        Dtype of the result, or where to put it.
    interpolation : {"exact", "texture"}
        ``"texture"`` lets the GPU's texture unit interpolate images of 2 or 3 axes of up to 16384 voxels each, of
        uint8, uint16, float16 or float32, at order 1. Its weights have 8 bits: a sample is off by at most rank / 192 of
        the range of the voxels around it (1.6 % at three axes), of float16 by 1/2048 and of uint16 by half a grey
        level besides. Places outside stay exact. The image is copied into a texture, which is kept for the next image
        of its shape and dtype (:func:`linumpy.gpu.texture.release_textures` lets it go). It is meant for many places
        scattered all over a large image; an H200 samples those exactly in the same time. NumPy arrays are always
        sampled exactly.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of the shape of one row of `coordinates`.

    Raises
    ------
    ValueError
        An `order`, `mode`, `interpolation` or shape that does not fit; an image without voxels.
    TypeError
        An image or places that are not made of numbers; an image, coordinates and output that are not on the same side.
    """
    check_image(image)
    check_spline(order, mode, interpolation)
    places = read_places("coordinates", image, coordinates)
    if places.shape[:1] != (image.ndim,):
        raise ValueError(f"coordinates of shape {places.shape}: an image of {image.ndim} axes needs as many rows")
    shape = tuple(places.shape[1:])
    target = Target(shape, *read_output(output, image, shape))
    how = Spline(order, mode, cval, prefilter, interpolation)
    return sampling_paths.sample_at(image, places, how, target)


def affine_transform(
    image: Any,
    matrix: Any,
    offset: Any = 0.0,
    *,
    output_shape: Sequence[int] | None = None,
    order: int = 3,
    mode: str = "constant",
    cval: float = 0.0,
    prefilter: bool = True,
    output: Any = None,
    interpolation: str = "exact",
) -> Any:
    """Sample an image on the grid of an affine map.

    Voxel ``o`` of the result is the image at ``matrix @ o + offset``.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of any rank.
    matrix : array_like
        ``(rank,)`` for a diagonal, ``(rank, rank)``, ``(rank, rank + 1)`` with the offset in its last column, or
        ``(rank + 1, rank + 1)``, homogeneous. It may be singular, as in SciPy: voxels of the result then share places
        (a diagonal of 0, 1, 1 repeats one plane).
    offset : float or array_like, (rank,)
        In voxels of the image.
    output_shape : sequence of int, optional
        Shape of the result; by default that of the image.
    order, mode, cval, prefilter, output, interpolation
        As for :func:`map_coordinates`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of `output_shape`.

    Raises
    ------
    ValueError
        A matrix, offset or shape that does not fit, or holds numbers that are not finite; an image without voxels.
    TypeError
        An image that is not made of numbers; an image and output that are not on the same side.

    Notes
    -----
    On a device, an image of four axes whose map leaves the first one alone (row and column those of the identity, no
    offset, as many channels in as out) is sampled channel by channel, by the kernels for three axes. A channel's NaN
    then stays in it. Not so for ``prefilter=False`` above order 1, where SciPy mixes channels. (It also does for up to
    8 channels, ``mode="reflect"`` and order 3, by up to 6e-4 of the range: its filter of short axes is off there.)
    """
    check_image(image)
    check_spline(order, mode, interpolation)
    linear, shift = read_affine(matrix, offset, image.ndim)
    shape = read_shape("output_shape", output_shape, image.shape)
    target = Target(shape, *read_output(output, image, shape))
    how = Spline(order, mode, cval, prefilter, interpolation)
    return sampling_paths.sample_grid(image, linear, shift, how, target)


def spline_filter(image: Any, order: int = 3, output: Any = np.float64, mode: str = "mirror") -> Any:
    """Find the coefficients of the spline that goes through an image's voxels.

    What the functions above do first for orders above 1, unless ``prefilter=False``: an image that is sampled many
    times need be filtered once.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of any rank. Axes of one voxel are left as they are.
    order : int
        Of the spline, 2 to 5.
    output : dtype or array
        Dtype of the coefficients, or where to put them.
    mode : str
        How the image goes on beyond its ends, by SciPy's names: ``"mirror"``, ``"reflect"`` and ``"grid-wrap"`` have
        filters of their own; ``"nearest"`` takes that of ``"reflect"``, the others that of ``"mirror"``.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of the image's shape.

    Raises
    ------
    ValueError
        An `order`, `mode` or `output` that does not fit.
    TypeError
        An image that is not made of numbers.

    Notes
    -----
    On a device, this package's kernels filter for order 3, where the result is float32 or float64;
    ``cupyx.scipy.ndimage`` does all else. NaN and infinities spoil what is near them on their lines and behind; with
    SciPy's filter, all of the lines. To sample with ``"nearest"`` or ``"grid-constant"`` and ``prefilter=True`` is not
    to sample these coefficients: SciPy, and so this package, adds 12 voxels at either end first.
    """
    check_image(image)
    check_spline(order, mode)
    if order < 2:
        raise ValueError(f"order={order!r}: splines of order 2 to 5 are filtered, those below are the image itself")
    target = Target(tuple(image.shape), *read_output(output, image, tuple(image.shape)))
    if is_device_array(image) and order == 3 and target.dtype.str[1:] in ("f4", "f8") and spline.can_filter(image):
        return target.take(spline.filtered(image, spline.Ends(mode), target.dtype, target.array(image)))
    return sampling_paths.filter_by_ndimage(image, order, mode, target)
