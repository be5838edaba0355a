"""Shift, rotate, zoom and deform images: each is an affine map, or a displacement of every voxel.

In: an image and the parameters of a map. Out: the image sampled on its new grid. NumPy arrays are transformed by
SciPy's functions of the same names, CuPy arrays by this package's kernels (:mod:`~linumpy.gpu.ndimage.dispatch`) with
SciPy's maps. `order`, `mode`, `cval`, `prefilter` and `output` are as for
:func:`~linumpy.gpu.interpolation.map_coordinates`. Axes that the map does not change cost nothing (see
:func:`~linumpy.gpu.interpolation.affine_transform`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from linumpy.arrays import Array, array_module
from linumpy.gpu.ndimage.arguments import Target, read_coordinates, read_per_axis, read_spline, read_target
from linumpy.gpu.ndimage.by_scipy import scipy_call
from linumpy.gpu.ndimage.dispatch import GridMap, sample_displaced, sample_grid
from linumpy.gpu.ndimage.nearest import Line
from linumpy.plan.boundary import centred


def shift(
    image: Array,
    shift: float | Sequence[float],
    *,
    order: int = 3,
    mode: str = "constant",
    cval: float = 0.0,
    prefilter: bool = True,
    output: Array | DTypeLike | None = None,
) -> Array:
    """Shift an image by `shift` voxels along each axis: voxel ``o`` of the result is the image at ``o - shift``."""
    how = read_spline(image, order, mode, cval, prefilter)
    offsets = [-distance for distance in read_per_axis("shift", shift, image.ndim)]
    target = read_target(output, image, tuple(image.shape))
    lines = tuple(Line(n, n, 1.0, offset) for n, offset in zip(image.shape, offsets, strict=True))
    call = scipy_call("shift", [-offset for offset in offsets], **how.options)
    return sample_grid(image, GridMap(np.eye(image.ndim), np.array(offsets), lines), how, target, call)


def zoom(
    image: Array,
    zoom: float | Sequence[float],
    *,
    order: int = 3,
    mode: str = "constant",
    cval: float = 0.0,
    prefilter: bool = True,
    output: Array | DTypeLike | None = None,
    grid_mode: bool = False,
) -> Array:
    """Scale an image; the centres of its outermost voxels keep their positions.

    With `grid_mode` the image's extent is kept instead, as in :func:`~linumpy.gpu.interpolation.resample_volume`. The
    modes ``"constant"`` and ``"wrap"`` do not suit `grid_mode`, and give SciPy's ``UserWarning``. If all factors are 1
    and `prefilter` is True, the result is a copy of the image.
    """
    how = read_spline(image, order, mode, cval, prefilter)
    factors = read_per_axis("zoom", zoom, image.ndim)
    if min(factors) <= 0:
        raise ValueError(f"zoom={zoom!r}: factors must be above 0")
    shape = tuple(round(n * factor) for n, factor in zip(image.shape, factors, strict=True))
    target = read_target(output, image, shape)
    if prefilter and set(factors) == {1.0}:
        result = target.array(image)
        result[...] = image
        return target.take(result)
    if grid_mode and mode in ("constant", "wrap"):
        text = f"It is recommended to use mode = grid-{mode} instead of {mode} when grid_mode is True."
        warnings.warn(text, UserWarning, stacklevel=2)
    scale, offset = zoom_map(image.shape, shape, grid_mode=grid_mode)
    zoom_by_scipy = scipy_call("zoom", factors, **how.options, grid_mode=bool(grid_mode))

    def call(source: Array, output: Array | np.dtype) -> Array:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "It is recommended to use mode")  # this function has warned
            return zoom_by_scipy(source, output)

    before, line_offset = (0.5, -0.5) if grid_mode else (0.0, 0.0)
    lines = tuple(Line(n, m, s, line_offset, before) for n, m, s in zip(image.shape, shape, scale, strict=True))
    # SciPy 1.17 ignores grid_mode for complex images: use its affine_transform for them.
    by_affine = grid_mode and image.dtype.kind == "c"
    grid = GridMap(np.diag(scale), np.array(offset), lines)
    return sample_grid(image, grid, how, target, None if by_affine else call)


def zoom_map(shape: Sequence[int], new_shape: Sequence[int], *, grid_mode: bool) -> tuple[list[float], list[float]]:
    """Return diagonal and offset of the map that :func:`zoom` applies."""
    pairs = list(zip(shape, new_shape, strict=True))
    if grid_mode:
        maps = [centred(n, m) if m else (1.0, 0.0) for n, m in pairs]
        return [scale for scale, _ in maps], [offset for _, offset in maps]
    return [(n - 1) / (m - 1) if m > 1 else 1.0 for n, m in pairs], [0.0] * len(pairs)


def rotate(
    image: Array,
    angle: float,
    axes: tuple[int, int] = (1, 0),
    *,
    reshape: bool = True,
    order: int = 3,
    mode: str = "constant",
    cval: float = 0.0,
    prefilter: bool = True,
    output: Array | DTypeLike | None = None,
) -> Array:
    """Rotate an image about its centre by `angle` degrees in the plane of two axes, each plane by itself.

    With `reshape` the result is large enough to contain the whole image.
    """
    how = read_spline(image, order, mode, cval, prefilter, min_axes=2)
    matrix, offset, shape = rotation_map(image.shape, angle, axes, reshape=reshape)
    target = read_target(output, image, shape)
    planes = tuple(sorted(axis % image.ndim for axis in axes))
    call = scipy_call("rotate", float(angle), axes, bool(reshape), **how.options)
    return sample_grid(image, GridMap(matrix, offset, planes=planes), how, target, call)


def rotation_map(
    shape: Sequence[int], angle: float, axes: tuple[int, int], *, reshape: bool
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Return matrix, offset and result shape of the map that :func:`rotate` applies."""
    rank = len(shape)
    valid = isinstance(axes, (Sequence, np.ndarray)) and all(isinstance(axis, (int, np.integer)) for axis in axes)
    valid = valid and len(axes) == 2 and all(-rank <= axis < rank for axis in axes)
    if not valid or axes[0] % rank == axes[1] % rank:
        raise ValueError(f"axes={axes!r}: two different axes of {rank} are needed")
    first, second = sorted(axis % rank for axis in axes)
    if not isinstance(angle, (int, float, np.integer, np.floating)) or not math.isfinite(angle):
        raise ValueError(f"angle={angle!r}: a finite number of degrees is needed")
    radians = math.radians(angle)
    quarter = angle / 90
    cos, sin = math.cos(radians), math.sin(radians)
    if quarter == int(quarter):  # without the rounding of pi
        cos, sin = ((1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0))[int(quarter) % 4]
    plane = np.array([[cos, sin], [-sin, cos]])
    sizes = np.array([shape[first], shape[second]], float)
    new_sizes = sizes
    if reshape:
        corners = plane @ np.array([[0, 0, sizes[0], sizes[0]], [0, sizes[1], 0, sizes[1]]])
        new_sizes = np.floor(np.ptp(corners, axis=1) + 0.5)
    matrix, offset = np.eye(rank), np.zeros(rank)
    matrix[np.ix_((first, second), (first, second))] = plane
    offset[[first, second]] = (sizes - 1) / 2 - plane @ ((new_sizes - 1) / 2)
    result = list(shape)
    result[first], result[second] = int(new_sizes[0]), int(new_sizes[1])
    return matrix, offset, tuple(result)


def apply_displacement_field(
    image: Array,
    field: Array,
    *,
    spacing: float | Sequence[float] | None = None,
    channel_axis: int | None = None,
    order: int = 1,
    mode: str = "constant",
    cval: float = 0.0,
    prefilter: bool = True,
    output: Array | DTypeLike | None = None,
) -> Array:
    """Deform an image: voxel ``o`` of the result is the image at ``o + field[:, o]``.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of any rank.
    field : numpy.ndarray or cupy.ndarray, (axes, ...)
        Displacements in voxels, a component for each axis of the image except the axis of channels, on a grid of as
        many axes and of any shape; on the same side (host or device) as the image. NaN and infinity as for
        :func:`~linumpy.gpu.interpolation.map_coordinates`.
    spacing : float or sequence of float, optional
        Voxel spacing in µm along each axis of `field`, whose components are then in µm; by default they are in voxels.
    channel_axis : int, optional
        Axis of channels in the image, which are all deformed alike; by default there is none.
    order, mode, cval, prefilter, output
        As for :func:`~linumpy.gpu.interpolation.map_coordinates`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of the shape of one component of `field`, with the channels along `channel_axis`. A new array holds the channels
        one after another in memory.

    Raises
    ------
    ValueError
        A `field`, `spacing`, `channel_axis` or any other argument that does not fit; an image without voxels.
    TypeError
        An image or field that is not made of numbers; an image, field and output that are not on the same side.

    Notes
    -----
    Coordinates are computed in float64 for any dtype of `field`. On a device, they take no memory for two and three
    axes of space, where a `field` that is not contiguous, or not of float32 or float64, is copied; otherwise they take
    an array. Channels are sampled in one launch there.
    """
    how = read_spline(image, order, mode, cval, prefilter)
    field = read_coordinates("field", image, field)
    axis = None if channel_axis is None else _axis("channel_axis", channel_axis, image.ndim)
    rank = image.ndim - (axis is not None)
    if field.shape[:1] != (rank,) or field.ndim != rank + 1:
        hint = " (give channel_axis= for channels)" if field.ndim == image.ndim == len(field) + 1 else ""
        raise ValueError(
            f"field of shape {field.shape}: an image of {rank} axes needs shape ({rank}, ...) of {rank + 1}{hint}"
        )
    sizes = None if spacing is None else read_per_axis("spacing", spacing, rank)
    if sizes is not None and min(sizes) <= 0:
        raise ValueError(f"spacing={spacing!r}: voxels are larger than 0")
    grid = tuple(field.shape[1:])
    if axis is None:
        target = read_target(output, image, grid)
        return sample_displaced(image, field, sizes, how, target)
    shape = (*grid[:axis], image.shape[axis], *grid[axis:])
    target = read_target(output, image, shape)
    if axis == 0:
        return sample_displaced(image, field, sizes, how, target)
    xp = array_module(image)
    channels = xp.moveaxis(image, axis, 0)
    result = sample_displaced(channels, field, sizes, how, Target((len(channels), *grid), target.dtype))
    return target.take(xp.moveaxis(result, 0, axis))


def _axis(name: str, axis: int, rank: int) -> int:
    if not isinstance(axis, (int, np.integer)) or not -rank <= axis < rank:
        raise ValueError(f"{name}={axis!r}: an image of {rank} axes has none of that number")
    if rank == 1:
        raise ValueError(f"{name}={axis!r}: an image of 1 axis has no axis beside that")
    return int(axis) % rank


def compose_affine(transforms: Sequence[Mapping[str, Any]], rank: int) -> np.ndarray:
    """Compose NGFF coordinate transformations into one homogeneous matrix.

    Parameters
    ----------
    transforms : sequence of mapping
        In the order in which they are applied; ``"type"`` is ``identity``, ``scale``, ``translation``, ``rotation``,
        ``affine`` (rank rows of rank + 1 numbers) or ``sequence``.
    rank : int
        Number of axes.

    Returns
    -------
    numpy.ndarray of float64, (rank + 1, rank + 1)
        Maps voxels, as a homogeneous column, to the transforms' output.

    Raises
    ------
    ValueError
        A transformation of an unknown type or of another shape, or with numbers that are not finite; one
        transformation in place of a list.
    """
    if isinstance(transforms, Mapping):
        raise ValueError(f"transforms={transforms!r} is one transformation: pass a list of them")
    matrix = np.eye(rank + 1)
    for transform in transforms:
        matrix = _ngff_matrix(transform, rank) @ matrix
    return matrix


def _ngff_matrix(transform: Mapping[str, Any], rank: int) -> np.ndarray:
    kind = transform.get("type")
    if kind == "sequence":
        if "transformations" not in transform:
            raise ValueError("a transformation 'sequence' has no 'transformations'")
        return compose_affine(transform["transformations"], rank)
    matrix = np.eye(rank + 1)
    if kind == "identity":
        return matrix
    shapes = {"scale": (rank,), "translation": (rank,), "rotation": (rank, rank), "affine": (rank, rank + 1)}
    if kind not in shapes:
        raise ValueError(f"transformation {kind!r} is not known: identity, {', '.join(shapes)} and sequence are")
    values = np.asarray(transform.get(kind), float)
    if values.shape != shapes[kind]:
        raise ValueError(f"transformation {kind!r} has shape {values.shape}: {rank} axes need {shapes[kind]}")
    if not np.isfinite(values).all():
        raise ValueError(f"transformation {kind!r} holds numbers that are not finite: {values.tolist()}")
    if kind == "scale":
        matrix[:rank, :rank] = np.diag(values)
    elif kind == "translation":
        matrix[:rank, rank] = values
    elif kind == "rotation":
        matrix[:rank, :rank] = values
    else:
        matrix[:rank] = values
    return matrix
