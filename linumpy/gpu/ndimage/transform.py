"""Sample images at given coordinates and through affine maps, and filter them for splines.

In: an image, and coordinates or a map. Out: samples. NumPy arrays are answered by SciPy, CuPy arrays by this package's
kernels (:mod:`~linumpy.gpu.ndimage.dispatch`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from linumpy.arrays import Array
from linumpy.device import array_module, is_device_array
from linumpy.gpu.ndimage import by_scipy, dispatch
from linumpy.gpu.ndimage.arguments import (
    check_image,
    check_spline,
    read_affine,
    read_coordinates,
    read_output,
    read_output_shape,
    read_spline,
)
from linumpy.gpu.ndimage.dispatch import GridMap
from linumpy.gpu.ndimage.nearest import Line
from linumpy.gpu.ndimage.target import Target


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
        Coordinates in voxels, one row for each axis of the image; where the image is. Where one is NaN or infinite the
        result is `cval` in the constant modes, and NaN (0 in integers) in the others; but with ``"nearest"`` an
        infinite coordinate is one beyond the outermost voxel.
    order : int
        Of the spline: 0 nearest, 1 linear, up to 5; 3 by default, as in SciPy.
    mode : str
        What lies outside, by SciPy's names: ``"constant"``, ``"grid-constant"``, ``"nearest"``, ``"reflect"``,
        ``"mirror"``, ``"wrap"``, ``"grid-wrap"``, ``"grid-mirror"`` (the same as ``"reflect"``).
    cval : float or complex
        The value outside, for the constant modes; complex for complex images alone.
    prefilter : bool
        Whether to find the spline's coefficients first, for orders above 1. False where the image holds them already.
    output : dtype or array, optional
        Dtype of the result, or where to put it. Integers are rounded, halves away from zero, and saturate; NaN becomes
        0 in them. Booleans are true from 1 and from -1 on: SciPy truncates.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of the shape of one row of `coordinates`.

    Raises
    ------
    ValueError
        An `order`, `mode` or shape that does not fit; an image without voxels, or of no axes.
    TypeError
        An image or coordinates that are not made of numbers; an image, coordinates and output that are not on the same
        side; a complex result of real numbers, or the other way round.

    Warns
    -----
    UserWarning
        Where a complex image is to give a dtype of real numbers, which is promoted, as SciPy does.

    Notes
    -----
    On a device, images of two and three axes and of up to 16 bits, or of float32, are sampled in float32, after
    coordinates were computed exactly; all others, of up to 16 axes, in float64.
    """
    check_image(image)
    how = read_spline(image, order, mode, cval, prefilter)
    points = read_coordinates("coordinates", image, coordinates)
    if points.shape[:1] != (image.ndim,):
        raise ValueError(f"coordinates of shape {points.shape}: an image of {image.ndim} axes needs as many rows")
    shape = tuple(points.shape[1:])
    target = Target(shape, *read_output(output, image, shape))
    return dispatch.sample_at(image, points, how, target)


def affine_transform(
    image: Array,
    matrix: Any,
    offset: Any = 0.0,
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
        Shape of the result, of as many axes as the matrix has columns; by default that of an array `output`, or of the
        image.
    order, mode, cval, prefilter, output
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
    On a device, axes that the map leaves alone (row and column those of the identity, no offset, as many voxels in as
    out) are taken for those of a stack: of images of four axes and more, and above order 1 a first one of three. All of
    its images are sampled in one launch, and a NaN stays in its image. Not so for ``prefilter=False`` above order 1,
    where SciPy mixes them. (It also does for a few images, ``mode="reflect"`` and orders above 1, by up to 1e-2 of the
    range: its filter of short axes is off there.)
    """
    check_image(image)
    how = read_spline(image, order, mode, cval, prefilter)
    shape = read_output_shape(output_shape, output, image.shape)
    linear, shift = read_affine(matrix, offset, image.ndim, len(shape))
    target = Target(shape, *read_output(output, image, shape))
    return dispatch.sample_grid(image, GridMap(linear, shift, _lines(linear, shift, image.shape, shape)), how, target)


def _lines(
    linear: np.ndarray, shift: np.ndarray, sizes: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[Line, ...] | None:
    """Take a diagonal map axis by axis; None for any other."""
    if linear.shape[0] != linear.shape[1]:
        return None
    rows = linear.tolist()
    if any(any(row[:k]) or any(row[k + 1 :]) for k, row in enumerate(rows)):
        return None
    scales = (row[k] for k, row in enumerate(rows))
    return tuple(Line(*one) for one in zip(sizes, lengths, scales, shift.tolist(), strict=True))


def geometric_transform(
    image: Array,
    mapping: Callable[..., Sequence[Any]],
    output_shape: Sequence[int] | None = None,
    *,
    order: int = 3,
    mode: str = "constant",
    cval: float = 0.0,
    prefilter: bool = True,
    output: Array | DTypeLike | None = None,
    extra_arguments: Sequence[Any] = (),
    extra_keywords: Mapping[str, Any] | None = None,
) -> Array:
    """Sample an image where a function says.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of any rank.
    mapping : callable
        Takes the coordinates of voxels of the result, a tuple with one entry for each of its axes, and returns those in
        the image, one for each of the image's axes. For a NumPy image it is SciPy's: called for each voxel with whole
        numbers. For a CuPy image it is called once, with CuPy arrays of int64 that broadcast to `output_shape` (axis k
        of the k-th is as long as the result, all others 1); what it returns must broadcast to it too, and may be plain
        numbers. A function of arithmetic, such as ``lambda o: (o[0] + 0.5, 2 * o[1])``, does for both.
    output_shape : sequence of int, optional
        Shape of the result; by default that of an array `output`, or of the image.
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
        An argument that does not fit; a `mapping` that returns another number of coordinates than the image has axes,
        or some that do not broadcast to `output_shape`; an image without voxels.
    TypeError
        As for :func:`map_coordinates`.

    Notes
    -----
    On a device, coordinates take 8 bytes a voxel of the result for each axis of the image.
    """
    check_image(image)
    how = read_spline(image, order, mode, cval, prefilter)
    shape = read_output_shape(output_shape, output, image.shape)
    target = Target(shape, *read_output(output, image, shape))
    if not callable(mapping):
        raise TypeError(
            f"mapping={mapping!r}: a function from coordinates of the result to those in the image is needed"
        )
    if not np.iterable(extra_arguments) or not isinstance(extra_keywords, Mapping | None):
        raise TypeError(
            f"extra_arguments={extra_arguments!r}, extra_keywords={extra_keywords!r}: a tuple and a mapping are needed"
        )
    extra = extra_keywords or {}
    if is_device_array(image):
        points = _mapped(array_module(image), mapping, shape, image.ndim, extra_arguments, extra)
        return dispatch.sample_at(image, points, how, target)
    from scipy import ndimage

    def call(source: Any, out: Any) -> Any:
        more = {"extra_arguments": tuple(extra_arguments), "extra_keywords": dict(extra)}
        return ndimage.geometric_transform(source, mapping, shape, out, **how.options, **more)

    return by_scipy.transform(np.asarray(image), how, target, call)


def _mapped(
    xp: ModuleType, mapping: Callable[..., Sequence[Any]], shape: tuple[int, ...], rank: int, extra: Any, keywords: Any
) -> Array:
    """Call a mapping once, for all voxels of the result: their coordinates, (rank, *shape)."""
    voxels = tuple(
        xp.arange(n, dtype=np.int64).reshape([-1 if other == axis else 1 for other in range(len(shape))])
        for axis, n in enumerate(shape)
    )
    found = tuple(mapping(voxels, *extra, **keywords))
    if len(found) != rank:
        raise ValueError(f"mapping returned {len(found)} coordinates: an image of {rank} axes needs as many")
    points = xp.empty((rank, *shape), np.float64)
    for row, one in zip(points, found, strict=True):
        row[...] = xp.asarray(one)
    return points


def spline_filter(image: Array, order: int = 3, output: Array | DTypeLike = np.float64, mode: str = "mirror") -> Array:
    """Find the coefficients of the spline that goes through an image's voxels.

    What the functions above do first for orders above 1, unless ``prefilter=False``: an image that is sampled many
    times need be filtered once.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of any rank, 0 included. Axes of one voxel are left as they are.
    order : int
        Of the spline, 2 to 5.
    output : dtype or array
        Dtype of the coefficients, or where to put them. Between two axes they are of it, too; integers are truncated
        after each, as SciPy does.
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
        An image that is not made of numbers; a complex result of real numbers, or the other way round.

    Warns
    -----
    UserWarning
        Where a complex image is to give a dtype of real numbers, which is promoted, as SciPy does.

    Notes
    -----
    On a device, NaN and infinities spoil what is near them on their lines and behind; with SciPy's filter, all of the
    lines. To sample with ``"nearest"`` or ``"grid-constant"`` and ``prefilter=True`` is not to sample these
    coefficients: SciPy, and so this package, adds 12 voxels at either end first.
    """
    check_image(image, least=0)
    name = check_spline(order, mode)
    if order < 2:
        raise ValueError(f"order={order!r}: splines of order 2 to 5 are filtered, those below are the image itself")
    return _filter(image, order, range(image.ndim), output, name)


def spline_filter1d(
    image: Array, order: int = 3, axis: int = -1, output: Array | DTypeLike = np.float64, mode: str = "mirror"
) -> Array:
    """Find the coefficients of the splines along one axis.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of one axis or more.
    order : int
        Of the spline, 0 to 5; below 2 they are the image itself.
    axis : int
        To filter along.
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
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)) or not -image.ndim <= axis < image.ndim:
        raise ValueError(f"axis={axis!r}: an image of {image.ndim} axes has none of that number")
    return _filter(image, order, [int(axis) % image.ndim], output, name)


def _filter(image: Array, order: int, axes: Sequence[int], output: Any, mode: str) -> Array:
    shape = tuple(image.shape)
    target = Target(shape, *read_output(output, image, shape))
    if is_device_array(image):
        return dispatch.filter_on_device(image, order, axes, mode, target)
    from scipy import ndimage

    def call(source: Any, out: Any) -> Any:
        for axis in axes:
            source = ndimage.spline_filter1d(source, order, axis, out, mode)
            out = source
        return source

    if not image.ndim:
        return target.take(np.asarray(image).astype(target.dtype))
    half, wide = np.dtype(np.float16), np.dtype(np.float32)
    source = image.astype(wide) if image.dtype == half else image
    if target.dtype == half:
        with np.errstate(over="ignore"):  # beyond float16 lies infinity
            return target.take(call(source, wide).astype(half))
    return target.take(call(source, target.dtype if target.out is None else target.out))
