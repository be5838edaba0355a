"""Time resampling of arrays, beside cupyx.scipy.ndimage and cuCIM.

Timed are map_coordinates and affine_transform on 512³ voxels: linear and cubic (from coefficients, without the filter),
at coordinates that follow the grid and at random coordinates; orders 2 and 5 with their filters; stacks of small
images, beside a loop over them; labels; and resize to half the size, smoothed first. Results are checked at 2000 points
or in some planes against SciPy in float64.

For example:
  linum-benchmark resampling
  linum-benchmark resampling --only affine-linear --runs 50 --json resampling.json
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from scipy import ndimage as scipy_ndimage

from benchmarks.arrays import Call, ndimage_of, scaled, suite_of_arrays, time_arrays
from linumpy.arrays import Array
from linumpy.benchmark.timing import Bench, peer_module
from linumpy.device import array_module, to_host
from linumpy.gpu.interpolation import affine_transform, apply_displacement_field, map_coordinates, resize, spline_filter

#: A rotation about all axes, with a small scale.
# So many digits that no coordinate is halfway between two voxels, where rounding would choose the label.
TURN = np.array(
    [
        [0.98031742, 0.11873921, -0.05171937],
        [-0.11057831, 0.97113743, 0.09041617],
        [0.06098351, -0.08071459, 0.99017273],
    ]
)
#: Random points of a result that are compared with SciPy. For results with filters, 200 times as many points are drawn,
#: and the points near the middle of the image are compared.
_POINTS, _OVERSAMPLING = 2000, 200
#: Number of planes that SciPy resizes at each of three depths.
_PLANES = 24
#: Side of a box that is compared, and the distance in voxels from a cut of the image beyond which the cut does not
#: change the result of a cubic filter, and of any filter.
_BOX_SIDE, _CUBIC_MARGIN, _MARGIN = 40, 24, 44


def _speckled(xp: ModuleType, side: int, dtype: str = "float32") -> Array:
    """Make smooth waves with speckle, 0 to 4000."""
    line = xp.sin(xp.linspace(0, 20, side, dtype=xp.float32))
    image = line[:, None, None] * line[None, :, None] * line[None, None, ::-1]
    noise = xp.random.RandomState(0).uniform(0, 1, (side, side)).astype(xp.float32)
    return ((image + 1) * 1500 + noise * 1000).astype(dtype)


def _off_by(worst: float, tolerance: float) -> str:
    return "" if worst <= tolerance else f"off by {worst:.3g} where {tolerance:.2g} is allowed"


# ---- maps of volumes


def _smooth_coordinates(xp: ModuleType, side: int) -> Array:
    """Return the grid's coordinates, moved by waves of up to 3 voxels; (3, side, side, side) float32."""
    wave = 3 * xp.sin(xp.linspace(0, 9, side, dtype=xp.float32))
    grid = xp.arange(side, dtype=xp.float32)
    coordinates = xp.empty((3, side, side, side), xp.float32)
    coordinates[0] = grid[:, None, None] + wave[None, :, None]
    coordinates[1] = grid[None, :, None] + wave[None, None, :]
    coordinates[2] = grid[None, None, :] + wave[:, None, None]
    return coordinates


def _random_coordinates(xp: ModuleType, side: int) -> Array:
    rng = xp.random.RandomState(1)
    return xp.stack([rng.uniform(0, side - 1, side**3).astype(xp.float32) for _ in range(3)])


def _sampled_differs(
    result: Array, source: Array, coords_of: Callable[[np.ndarray], np.ndarray], options: dict[str, Any],
    relative: float = 1e-5,
) -> str:  # fmt: skip
    """Compare random voxels with SciPy's samples of the source in float64; `coords_of` returns their coordinates.

    The tolerance is relative to the range; integers may be rounded.
    """
    filters = options["prefilter"]
    chosen = np.random.default_rng(0).integers(0, result.size, _POINTS * (_OVERSAMPLING if filters else 1))
    coords, data = coords_of(chosen), to_host(source)
    if filters:  # keep points near the middle, so that SciPy needs to filter only a part of the image
        middle = len(data) // 2
        near = (np.abs(coords - middle) <= _BOX_SIDE / 2).all(0)
        first = max(0, middle - _BOX_SIDE // 2 - _MARGIN)
        chosen, coords = chosen[near], coords[:, near] - first
        data = data[(slice(first, middle + _BOX_SIDE // 2 + _MARGIN + 1),) * 3]
    values = to_host(result.reshape(-1)[array_module(result).asarray(chosen)]).astype(np.float64)
    expected = np.asarray(scipy_ndimage.map_coordinates(data.astype(np.float64), coords, **options))
    tolerance = relative * float(data.max()) + (0.5 if result.dtype.kind in "iu" and relative else 0)
    return _off_by(float(np.abs(values - expected).max(initial=0)), tolerance)


def _spline_source(image: Array, order: int, *, filters: bool) -> Array:
    """Return the array to sample: the coefficients of a spline unless the timed call filters."""
    return image if order < 2 or filters else ndimage_of(image).spline_filter(image, order, output=np.float32)


def _map(
    bench: Bench, name: str, *, dtype: str = "float32", order: int = 1, smooth: bool = True, filters: bool = False
) -> None:
    side = scaled(512, bench)
    image = _speckled(bench.xp, side, dtype)
    coordinates = (_smooth_coordinates if smooth else _random_coordinates)(bench.xp, side)
    source = _spline_source(image, order, filters=filters)
    options: dict[str, Any] = {"order": order, "mode": "constant", "prefilter": filters}

    def coords_of(chosen: np.ndarray) -> np.ndarray:
        return to_host(coordinates.reshape((3, -1))[:, bench.xp.asarray(chosen)]).astype(np.float64)

    time_arrays(
        bench, name, image, coordinates.nbytes + source.nbytes,
        lambda: map_coordinates(source, coordinates, **options),
        lambda result: _sampled_differs(result, source, coords_of, options),
        peer=lambda: ndimage_of(image).map_coordinates(source, coordinates, **options),
    )  # fmt: skip


def _affine(bench: Bench, name: str, *, dtype: str = "float32", order: int, filters: bool = False) -> None:
    side = scaled(512, bench)
    image = _speckled(bench.xp, side, dtype)
    source = _spline_source(image, order, filters=filters)
    offset, matrix = side / 2 - TURN @ np.full(3, side / 2), bench.xp.asarray(TURN)
    options: dict[str, Any] = {"order": order, "mode": "constant", "prefilter": filters}

    def coords_of(chosen: np.ndarray) -> np.ndarray:
        return np.asarray(TURN @ np.stack(np.unravel_index(chosen, image.shape)) + offset[:, None])

    time_arrays(
        bench, name, image, 2 * source.nbytes,
        lambda: affine_transform(source, TURN, offset, **options),
        # Labels must be exact.
        lambda result: _sampled_differs(result, source, coords_of, options, 1e-5 if order else 0.0),
        peer=lambda: ndimage_of(image).affine_transform(source, matrix, offset.tolist(), **options),
    )  # fmt: skip


def _resize_to_half(bench: Bench, name: str) -> None:
    half = scaled(256, bench, 8)
    image = _speckled(bench.xp, 2 * half)

    def peer() -> Array:
        # scikit-image's resize, by cupyx, in float32.
        smooth = ndimage_of(image).gaussian_filter(image, 0.5, output=np.float32, mode="mirror")
        return ndimage_of(image).zoom(smooth, 0.5, order=1, mode="mirror", grid_mode=True)

    def cucim() -> Call:
        transform = peer_module("cucim.skimage.transform", "pip install cucim-cu13")
        options: dict[str, Any] = {"order": 1, "anti_aliasing": True, "preserve_range": True, "clip": False}
        return lambda: transform.resize(image, (half, half, half), **options)

    time_arrays(
        bench, name, image, image.nbytes + half**3 * 4, lambda: resize(image, (half, half, half)),
        partial(_differs_from_half, image=image), peer=peer, others={"cuCIM": cucim},
    )  # fmt: skip


def _differs_from_half(result: Array, image: Array) -> str:
    """Compare planes at both ends and in the middle with SciPy in float64, within 1e-5 of the range."""
    side = len(image)
    depth = min(side, _PLANES)
    if tuple(result.shape) != (side // 2,) * 3:
        return f"its shape is {tuple(result.shape)}"
    worst = 0.0
    for start in sorted({0, (side - depth) // 4 * 2, side - depth}):
        part = to_host(image[start : start + depth]).astype(np.float64)
        smooth = scipy_ndimage.gaussian_filter(part, 0.5, mode="mirror")
        expected = scipy_ndimage.zoom(smooth, 0.5, order=1, mode="mirror", grid_mode=True)
        planes = to_host(result[start // 2 : (start + depth) // 2])
        # Planes near a cut of the image lack neighbours.
        kept = slice(0 if start == 0 else 2, None if start + depth == side else -2)
        worst = max(worst, float(np.abs(planes - expected)[kept].max()))
    return _off_by(worst, 1e-5 * float(image.max()))


def _spline_filter(bench: Bench, name: str) -> None:
    image = _speckled(bench.xp, scaled(512, bench))
    host = to_host(image)

    def check(result: Array) -> str:
        starts = [[0] * 3, [n // 2 for n in host.shape], [max(0, n - _BOX_SIDE) for n in host.shape]]
        return _off_by(max(_box_error(result, host, start) for start in starts), 1e-5 * float(host.max()))

    time_arrays(
        bench, name, image, 6 * image.nbytes,  # three axes are read and written
        lambda: spline_filter(image, output=np.float32), check,
        peer=lambda: ndimage_of(image).spline_filter(image, output=np.float32),
    )  # fmt: skip


def _box_error(result: Array, image: np.ndarray, start: list[int]) -> float:
    """Return the largest difference between the coefficients of a box and SciPy's, in float64."""
    low = [max(0, a - _CUBIC_MARGIN) for a in start]
    part = image[tuple(slice(a, b + _BOX_SIDE + _CUBIC_MARGIN) for a, b in zip(low, start, strict=True))]
    truth = scipy_ndimage.spline_filter(part, output=np.float64)
    inside = tuple(slice(b - a, b - a + _BOX_SIDE) for a, b in zip(low, start, strict=True))
    coefficients = to_host(result[tuple(slice(b, b + _BOX_SIDE) for b in start)])
    return float(np.abs(coefficients - truth[inside]).max())


# ---- stacks of small images; the peer is a loop over them by CuPy


def _stack(xp: ModuleType, shape: tuple[int, ...]) -> Array:
    return xp.asarray(np.random.default_rng(0).uniform(0, 4000, shape).astype(np.float32))


def _wrong_images(result: Array, stack: Array, truth: Callable[[np.ndarray], Any]) -> str:
    """Compare some images of a stack with SciPy in float64."""
    for number in {0, len(stack) // 2, len(stack) - 1}:
        expected = truth(to_host(stack[number]).astype(np.float64))
        wrong = _off_by(float(np.abs(to_host(result[number]) - expected).max()), 4000 * 1e-5)
        if wrong:
            return f"image {number} is {wrong}"
    return ""


def _affine_stack(bench: Bench, name: str, *, shape: tuple[int, ...]) -> None:
    """Rotate every image of a stack, (images, ...), by the same matrix."""
    rank = len(shape) - 1
    sizes = (scaled(shape[0], bench, 2), *shape[1:])
    stack = _stack(bench.xp, sizes)
    linear = TURN[-rank:, -rank:]
    offset = np.array([n / 2 for n in sizes[1:]]) - linear @ [n / 2 for n in sizes[1:]]
    stack_matrix, stack_offset = np.eye(rank + 1), np.zeros(rank + 1)
    stack_matrix[1:, 1:], stack_offset[1:] = linear, offset
    options: dict[str, Any] = {"order": 1, "mode": "mirror"}
    ndimage, matrix = ndimage_of(stack), bench.xp.asarray(linear)

    def peer() -> Array:
        images = [ndimage.affine_transform(image, matrix, offset.tolist(), **options) for image in stack]
        return bench.xp.stack(images)

    def check(result: Array) -> str:
        return _wrong_images(
            result, stack, lambda image: scipy_ndimage.affine_transform(image, linear, offset, **options)
        )

    time_arrays(
        bench, name, stack, 2 * stack.nbytes,
        lambda: affine_transform(stack, stack_matrix, stack_offset, **options), check, peer=peer,
    )  # fmt: skip


def _displaced_channels(bench: Bench, name: str) -> None:
    """Deform all channels of an image by the same field."""
    xp = bench.xp
    stack = _stack(xp, (scaled(64, bench, 2), 48, 48, 48))
    field = xp.asarray(np.random.default_rng(1).uniform(-2, 2, (3, *stack.shape[1:])).astype(np.float32))
    coords = to_host(field).astype(np.float64) + np.stack(np.meshgrid(*map(np.arange, stack.shape[1:]), indexing="ij"))
    options: dict[str, Any] = {"order": 1, "mode": "mirror"}
    ndimage, device_coords = ndimage_of(stack), xp.asarray(coords)
    truth = partial(scipy_ndimage.map_coordinates, coordinates=coords, **options)
    time_arrays(
        bench, name, stack, 2 * stack.nbytes + field.nbytes,
        lambda: apply_displacement_field(stack, field, channel_axis=0, **options),
        lambda result: _wrong_images(result, stack, truth),
        peer=lambda: xp.stack([ndimage.map_coordinates(image, device_coords, **options) for image in stack]),
    )  # fmt: skip


def _resized_labels(bench: Bench, name: str, *, factor: float, side: int) -> None:
    """Take the nearest labels, at half or twice the resolution."""
    image = _speckled(bench.xp, max(8, round(side * bench.scale) // 2 * 2), "uint16")
    new_shape = (round(len(image) * factor),) * 3
    rows = np.floor((np.arange(new_shape[0]) + 0.5) / factor).astype(np.int64)

    def check(result: Array) -> str:
        chosen = np.random.default_rng(0).integers(0, new_shape[0], (3, _POINTS))
        expected = to_host(image)[tuple(rows[axis] for axis in chosen)]
        return "" if np.array_equal(to_host(result)[tuple(chosen)], expected) else "labels differ from the nearest ones"

    # At half the resolution, all memory sectors of half the planes and rows are read.
    nbytes = image.nbytes * (0.25 if factor < 1 else 1) + new_shape[0] ** 3 * 2
    time_arrays(
        bench, name, image, nbytes, lambda: resize(image, new_shape, order=0), check,
        peer=lambda: ndimage_of(image).zoom(image, factor, order=0, mode="nearest", grid_mode=True),
    )  # fmt: skip


_CASES: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "map-linear-smooth": (_map, {}),
    "map-linear-uint16": (_map, {"dtype": "uint16"}),
    "map-linear-random": (_map, {"smooth": False}),
    "map-cubic-smooth": (_map, {"order": 3}),
    "affine-linear": (_affine, {"order": 1}),
    "affine-cubic": (_affine, {"order": 3}),
    "resize-half": (_resize_to_half, {}),
    # with the filters of their splines
    "map-order2": (_map, {"order": 2, "filters": True}),
    "map-order5": (_map, {"order": 5, "filters": True}),
    "affine-order2": (_affine, {"order": 2, "filters": True}),
    "affine-order5": (_affine, {"order": 5, "filters": True}),
    "spline-filter": (_spline_filter, {}),
    "stack-planes": (_affine_stack, {"shape": (2048, 64, 64)}),
    "stack-volumes": (_affine_stack, {"shape": (256, 32, 32, 32)}),
    "stack-channels": (_displaced_channels, {}),
    "labels-half": (_resized_labels, {"factor": 0.5, "side": 512}),
    "labels-half-large": (_resized_labels, {"factor": 0.5, "side": 1024}),
    "labels-double": (_resized_labels, {"factor": 2, "side": 256}),
    "labels-turned": (_affine, {"dtype": "uint16", "order": 0}),
}
CASES = {name: partial(make, name=name, **options) for name, (make, options) in _CASES.items()}

SUITE = suite_of_arrays(__doc__, CASES)
