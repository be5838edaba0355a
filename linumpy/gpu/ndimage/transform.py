"""Sample images at coordinates and through maps, and filter them for splines: as ``scipy.ndimage``.

In: an image, and coordinates, an affine map or a function. Out: samples, or coefficients of splines. NumPy arrays are
processed by SciPy, CuPy arrays by this package's kernels (:mod:`~linumpy.gpu.ndimage.dispatch`). Users import these
functions from :mod:`linumpy.gpu.interpolation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from linumpy.arrays import Array, array_module, is_device_array
from linumpy.checks import is_integer
from linumpy.gpu.ndimage import by_scipy, dispatch
from linumpy.gpu.ndimage.arguments import (
    check_image,
    check_spline,
    read_affine,
    read_coordinates,
    read_output_shape,
    read_spline,
    read_target,
)
from linumpy.gpu.ndimage.dispatch import GridMap
from linumpy.gpu.ndimage.nearest import Line


def map_coordinates(
    image: Array,
    coordinates: Array,
    *,
    order: int = 3,
    mode: str = "constant",
    cval: float = 0.0,
    prefilter: bool = True,
    output: Array | DTypeLike | None = None,
) -> Array:
    """Sample an image at given coordinates.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of any rank.
    coordinates : numpy.ndarray or cupy.ndarray, (rank, ...)
        Coordinates in voxels, one row for each axis of the image; on the same side (host or device) as the image.
        Where one is NaN or infinite, the result is `cval` in the constant modes and NaN in the others (both parts of a
        complex number, 0 in integers); SciPy's result is then undefined, such as `cval` with ``"reflect"``.
        With ``"nearest"`` an infinite coordinate means the outermost voxel.
    order : int
        Spline order: 0 nearest, 1 linear, up to 5; 3 by default, as in SciPy.
    mode : str
        Boundary mode, by SciPy's names: ``"constant"``, ``"grid-constant"``, ``"nearest"``, ``"reflect"``,
        ``"mirror"``, ``"wrap"``, ``"grid-wrap"``, ``"grid-mirror"`` (the same as ``"reflect"``).
    cval : float or complex
        Value outside, for the constant modes; complex only for complex images.
    prefilter : bool
        Whether to compute the spline's coefficients first, for orders above 1. False if the image holds coefficients.
    output : dtype or array, optional
        Dtype of the result, or the array to write to. Integers are rounded, halves away from zero, and saturate; NaN
        becomes 0. Booleans are true where the sample is at least 1 or at most -1, since SciPy truncates.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of the shape of one row of `coordinates`.

    Raises
    ------
    ValueError
        An `order`, `mode` or shape that does not fit; an image without voxels, or of no axes; on a device, an image of
        more than 16 axes.
    TypeError
        An image or coordinates that are not made of numbers; an image, coordinates and output that are not on the same
        side (host or device); a complex result of real numbers, or vice versa.

    Warns
    -----
    UserWarning
        If `output` is a real dtype and the image is complex: the dtype is promoted, as in SciPy.

    Notes
    -----
    On a device, an image of two or three axes is sampled in float32, after coordinates were computed exactly, if both
    image and result are of up to 16 bits or of float32; all others, of up to 16 axes, are sampled in float64.
    """
    spline = read_spline(image, order, mode, cval, prefilter)
    points = read_coordinates("coordinates", image, coordinates)
    if points.shape[:1] != (image.ndim,):
        raise ValueError(f"coordinates of shape {points.shape}: an image of {image.ndim} axes needs as many rows")
    shape = tuple(points.shape[1:])
    target = read_target(output, image, shape)
    return dispatch.sample_at(image, points, spline, target)


def affine_transform(
    image: Array,
    matrix: ArrayLike,
    offset: ArrayLike = 0.0,
    *,
    output_shape: Sequence[int] | None = None,
    order: int = 3,
    mode: str = "constant",
    cval: float = 0.0,
    prefilter: bool = True,
    output: Array | DTypeLike | None = None,
) -> Array:
    """Sample an image on the grid of an affine map.

    Voxel ``o`` of the result is the image at ``matrix @ o + offset``.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of any rank.
    matrix : array_like
        ``(rank,)`` for a diagonal, ``(rank, axes of the result)``, ``(rank, rank + 1)`` with the offset in its last
        column, or ``(rank + 1, rank + 1)``, homogeneous. It may be singular, as in SciPy: voxels of the result then
        share coordinates (a diagonal of 0, 1, 1 repeats one plane).
    offset : float or array_like, (rank,)
        In voxels of the image.
    output_shape : sequence of int, optional
        Shape of the result, of as many axes as the matrix has columns; by default the shape of an array `output`, or
        of the image.
    order, mode, cval, prefilter, output
        As for :func:`map_coordinates`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of `output_shape`.

    Raises
    ------
    ValueError
        An `order`, `mode`, matrix, offset or shape that does not fit; numbers that are not finite; an image without
        voxels; on a device, more than 16 axes.
    TypeError
        An image that is not made of numbers; an image and output that are not on the same side; a complex result of
        real numbers, or vice versa.

    Notes
    -----
    On a device, an axis that the map does not change (row and column of the identity, no offset, the same size) is
    treated as an axis of a stack: any such axis of images of four or more axes, and above order 1 the first of three.
    All images of a stack are sampled in one launch, and a NaN affects only its own image. The exception is
    ``prefilter=False`` above order 1, where SciPy, too, mixes the images. (SciPy also mixes stacks of a few images for
    ``mode="reflect"`` above order 1, by up to 1e-2 of the range: an error of its filter for short axes.)
    """
    spline = read_spline(image, order, mode, cval, prefilter)
    shape = read_output_shape(output_shape, output, image.shape)
    linear, shift = read_affine(matrix, offset, image.ndim, len(shape))
    target = read_target(output, image, shape)
    return dispatch.sample_grid(
        image, GridMap(linear, shift, _lines(linear, shift, image.shape, shape)), spline, target
    )


def _lines(
    linear: np.ndarray, shift: np.ndarray, sizes: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[Line, ...] | None:
    """Return a diagonal map axis by axis; None if the map is not diagonal."""
    if linear.shape[0] != linear.shape[1]:
        return None
    rows = linear.tolist()
    if any(any(row[:k]) or any(row[k + 1 :]) for k, row in enumerate(rows)):
        return None
    scales = (row[k] for k, row in enumerate(rows))
    return tuple(map(Line, sizes, lengths, scales, shift.tolist()))


def geometric_transform(
    image: Array,
    mapping: Callable[..., Sequence[Array | float]],
    output_shape: Sequence[int] | None = None,
    *,
    order: int = 3,
    mode: str = "constant",
    cval: float = 0.0,
    prefilter: bool = True,
    output: Array | DTypeLike | None = None,
    extra_arguments: Sequence[object] = (),
    extra_keywords: Mapping[str, object] | None = None,
) -> Array:
    """Sample an image at coordinates that a function computes.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of any rank.
    mapping : callable
        Takes coordinates in the result, a tuple with one entry for each of its axes, and returns coordinates in the
        image, one for each of the image's axes. For a NumPy image SciPy calls it for each voxel, with integers.
        For a CuPy image it is called once, with CuPy arrays of int64 that broadcast to `output_shape` (the k-th has the
        result's size along axis k and 1 along the others); its results must broadcast to `output_shape`, too, and may
        be plain numbers. A function of arithmetic, such as ``lambda o: (o[0] + 0.5, 2 * o[1])``, works for both.
    output_shape : sequence of int, optional
        Shape of the result; by default the shape of an array `output`, or of the image.
    order, mode, cval, prefilter, output
        As for :func:`map_coordinates`.
    extra_arguments, extra_keywords
        Passed to `mapping` behind the coordinates.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of `output_shape`.

    Raises
    ------
    ValueError
        An argument that does not fit; a `mapping` whose results are not one for each axis of the image or do not
        broadcast to `output_shape`; an image without voxels.
    TypeError
        As for :func:`map_coordinates`; a `mapping` that is no function, or extra arguments of another type.

    Notes
    -----
    On a device, coordinates take 8 bytes a voxel of the result for each axis of the image.
    """
    spline = read_spline(image, order, mode, cval, prefilter)
    shape = read_output_shape(output_shape, output, image.shape)
    target = read_target(output, image, shape)
    if not callable(mapping):
        raise TypeError(
            f"mapping={mapping!r}: a function from coordinates in the result to coordinates in the image is needed"
        )
    if not np.iterable(extra_arguments) or not isinstance(extra_keywords, Mapping | None):
        raise TypeError(
            f"extra_arguments={extra_arguments!r}, extra_keywords={extra_keywords!r}: a tuple and a mapping are needed"
        )
    extra = extra_keywords or {}
    if is_device_array(image):
        points = _mapped(array_module(image), mapping, shape, image.ndim, extra_arguments, extra)
        return dispatch.sample_at(image, points, spline, target)
    passed_on = {"extra_arguments": tuple(extra_arguments), "extra_keywords": dict(extra)}
    call = by_scipy.scipy_call("geometric_transform", mapping, shape, **spline.options, **passed_on)
    return by_scipy.transform(np.asarray(image), spline, target, call)


def _mapped(
    xp: ModuleType,
    mapping: Callable[..., Sequence[Array | float]],
    shape: tuple[int, ...],
    rank: int,
    extra: Sequence[object],
    keywords: Mapping[str, object],
) -> Array:
    """Call a mapping once for all voxels of the result; return coordinates in the image, (rank, *shape)."""
    voxels = tuple(
        xp.arange(n, dtype=np.int64).reshape([-1 if other == axis else 1 for other in range(len(shape))])
        for axis, n in enumerate(shape)
    )
    mapped = tuple(mapping(voxels, *extra, **keywords))
    if len(mapped) != rank:
        raise ValueError(f"mapping returned {len(mapped)} coordinates: an image of {rank} axes needs as many")
    points: Array = xp.empty((rank, *shape), np.float64)
    for row, coordinate in zip(points, mapped, strict=True):
        row[...] = xp.asarray(coordinate)
    return points


def spline_filter(image: Array, order: int = 3, output: Array | DTypeLike = np.float64, mode: str = "mirror") -> Array:
    """Compute the coefficients of the spline that interpolates an image.

    The sampling functions do this first for orders above 1. To sample an image many times, filter it once with this
    function and pass ``prefilter=False`` to them.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of any rank, including 0. Axes of one voxel are not filtered.
    order : int
        Spline order, 2 to 5.
    output : dtype or array
        Dtype of the coefficients, or the array to write to. Intermediate results between axes have this dtype, too:
        integers are truncated after each axis and keep their low bits, as by a cast in C and in SciPy. Coefficients are
        not limited to the range of the image: as uint16, -3 becomes 65533. Beyond the range of int64 the cast is
        undefined.
    mode : str
        Boundary mode, by SciPy's names. ``"mirror"``, ``"reflect"`` and ``"grid-wrap"`` have filters of their own;
        ``"nearest"`` uses the filter of ``"reflect"``, all others use the filter of ``"mirror"``.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of the image's shape.

    Raises
    ------
    ValueError
        An `order`, `mode` or `output` that does not fit.
    TypeError
        An image that is not made of numbers; a complex result of real numbers, or vice versa.

    Warns
    -----
    UserWarning
        If `output` is a real dtype and the image is complex: the dtype is promoted, as in SciPy.

    Notes
    -----
    On a device, a NaN or infinity affects nearby voxels of the lines that contain it, and all voxels after it; on the
    host it affects the whole lines. Sampling with ``"nearest"`` or ``"grid-constant"`` and ``prefilter=True`` does not
    use these coefficients: SciPy, and so this package, pads the image by 12 voxels at either end first.
    """
    check_image(image, min_axes=0)
    name = check_spline(order, mode)
    if order < 2:
        raise ValueError(f"order={order!r}: splines of order 2 to 5 are filtered, lower orders are the image itself")
    return _filter(image, order, range(image.ndim), output, name)


def spline_filter1d(
    image: Array, order: int = 3, axis: int = -1, output: Array | DTypeLike = np.float64, mode: str = "mirror"
) -> Array:
    """Compute the coefficients of splines along one axis.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of one axis or more.
    order : int
        Spline order, 0 to 5; below 2 the coefficients are the image itself.
    axis : int
        Axis to filter along.
    output, mode
        As for :func:`spline_filter`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of the image's shape.

    Raises
    ------
    ValueError
        An `order`, `axis`, `mode` or `output` that does not fit.
    TypeError
        As for :func:`spline_filter`.
    """
    check_image(image)
    name = check_spline(order, mode)
    if not is_integer(axis) or not -image.ndim <= axis < image.ndim:
        raise ValueError(f"axis={axis!r}: an image of {image.ndim} axes has none of that number")
    return _filter(image, order, [int(axis) % image.ndim], output, name)


def _filter(image: Array, order: int, axes: Sequence[int], output: Array | DTypeLike, mode: str) -> Array:
    shape = tuple(image.shape)
    target = read_target(output, image, shape)
    if is_device_array(image):
        return dispatch.filter_on_device(image, order, axes, mode, target)
    from scipy import ndimage

    def call(source: Array, out: Array | np.dtype) -> Array:
        for axis in axes:
            source = ndimage.spline_filter1d(source, order, axis, out, mode)
            out = source
        return source

    if not image.ndim:
        return target.take(np.asarray(image).astype(target.dtype))
    float16, float32 = np.dtype(np.float16), np.dtype(np.float32)
    source = image.astype(float32) if image.dtype == float16 else image
    if target.dtype == float16:
        with np.errstate(over="ignore"):  # beyond its range float16 is infinite
            return target.take(call(source, float32).astype(float16))
    return target.take(call(source, target.dtype if target.out is None else target.out))
