"""Resampling of arrays, beside ``cupyx.scipy.ndimage`` on the same arrays; SciPy in float64 is the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.benchmark.cases import (
    CannotRunError,
    Case,
    Check,
    Makers,
    Prepared,
    copy_of,
    kernel_case,
    kernel_suite,
    peer_module,
    scaled,
)
from linumpy.device import array_module, is_device_array, to_host
from linumpy.gpu.interpolation import affine_transform, apply_displacement_field, map_coordinates, resize, spline_filter

_DESCRIPTION = """Time resampling, beside cupyx.scipy.ndimage on the same arrays, on this machine's GPU.

Timed are map_coordinates and affine_transform on 512³ voxels: linear and cubic (from coefficients, without the filter),
at coordinates that follow the grid and at random coordinates; orders 2 and 5 with their filters; stacks of small
images, beside a loop over them; labels; and resize to half the size, smoothed first. A further peer of linear maps of
float32 is torch's grid_sample, if PyTorch is installed. Each result is checked first, at 2000 points or in some planes,
against SciPy in float64; a wrong result is reported as WRONG and has no time. Times are medians, by CUDA events after
warm-ups; × is the peer's time divided by linumpy's; "× copy" is the rate relative to a plain copy, where bytes are the
minimum to read and write (coordinates and result, or image and result).

For example:
  linum-benchmark resampling
  linum-benchmark resampling --only affine-linear --runs 50 --json resampling.json
"""

#: Options of a call.
Options = dict[str, Any]
#: Takes an image in float64; returns SciPy's result.
Truth = Callable[[np.ndarray], np.ndarray]

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
_CHECKED, _DRAWN = 2000, 200
#: Number of planes that SciPy resizes at each of three depths.
_PLANES = 24
#: Boxes of coefficients that are compared with SciPy; the side of a box; and the distance in voxels from a cut of the
#: image beyond which the cut does not change the result of a cubic filter, and of any filter.
_BOXES, _BOX_SIDE, _CUBIC_MARGIN, _MARGIN = 8, 40, 24, 44


def _speckled(xp: ModuleType, side: int, dtype: str = "float32") -> Array:
    """Make smooth waves with speckle, 0 to 4000."""
    line = xp.sin(xp.linspace(0, 20, side, dtype=xp.float32))
    image = line[:, None, None] * line[None, :, None] * line[None, None, ::-1]
    noise = xp.random.RandomState(0).uniform(0, 1, (side, side)).astype(xp.float32)
    return ((image + 1) * 1500 + noise * 1000).astype(dtype)


def _peer_module(array: Array) -> ModuleType:
    """Return CuPy's ``ndimage`` for its arrays, else SciPy's."""
    if not is_device_array(array):
        return _scipy()
    import cupyx.scipy.ndimage as ndimage

    return ndimage


def _scipy() -> ModuleType:
    import scipy.ndimage as ndimage

    return ndimage


def _off_by(worst: float, tolerance: float) -> str:
    return "" if worst <= tolerance else f"off by {worst:.3g} where {tolerance:.2g} is allowed"


def _map_truth(coords: np.ndarray, options: Options) -> Truth:
    return lambda data: np.asarray(_scipy().map_coordinates(data, coords, **options))


@contextmanager
def grid_sample(image: Array, coordinates: Array, check: Check) -> Iterator[Prepared]:
    """Prepare linear sampling by PyTorch, of float32 images without an axis of one voxel.

    PyTorch takes coordinates from -1 to 1, x first, in another layout: they are converted here, not in the call.
    """
    torch = peer_module("torch")
    if is_device_array(image) and not torch.cuda.is_available():
        raise CannotRunError("torch does not see the GPU")
    xp = array_module(image)
    steps = zip((2, 1, 0), reversed(image.shape), strict=True)
    grid = xp.stack([coordinates[axis] * xp.float32(2 / (n - 1)) - xp.float32(1) for axis, n in steps], axis=-1)
    # PyTorch needs a batch, and three axes of coordinates.
    grid = torch.from_dlpack(grid.reshape((1,) * (4 - (coordinates.ndim - 1)) + grid.shape))
    volume = torch.from_dlpack(image[None, None])
    options = {"mode": "bilinear", "padding_mode": "zeros", "align_corners": True}

    def check_array(result: Any) -> str:
        return check(xp.from_dlpack(result).reshape(coordinates.shape[1:]))

    yield Prepared(lambda: torch.nn.functional.grid_sample(volume, grid, **options), check_array)


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
    result: Array, source: Array, coords_of: Callable[[np.ndarray], np.ndarray], options: Options,
    relative: float = 1e-5, *, border: bool = True,
) -> str:  # fmt: skip
    """Compare random voxels with SciPy's samples of the source in float64; `coords_of` returns their coordinates.

    The tolerance is relative to the range; integers may be rounded. Without `border`, coordinates outside are left out.
    """
    filters = options["prefilter"]
    chosen = np.random.default_rng(0).integers(0, result.size, _CHECKED * (_DRAWN if filters else 1))
    coords, data = coords_of(chosen), to_host(source)
    if filters:  # keep points near the middle, so that SciPy needs to filter only a part of the image
        middle = len(data) // 2
        near = (np.abs(coords - middle) <= _BOX_SIDE / 2).all(0)
        first = max(0, middle - _BOX_SIDE // 2 - _MARGIN)
        chosen, coords = chosen[near], coords[:, near] - first
        data = data[(slice(first, middle + _BOX_SIDE // 2 + _MARGIN + 1),) * 3]
    if not border:
        inside = ((coords >= 0) & (coords <= len(data) - 1)).all(0)
        chosen, coords = chosen[inside], coords[:, inside]
    values = to_host(result.reshape(-1)[array_module(result).asarray(chosen)]).astype(np.float64)
    expected = _map_truth(coords, options)(data.astype(np.float64))
    tolerance = relative * float(data.max()) + (0.5 if result.dtype.kind in "iu" else 0)
    return _off_by(float(np.abs(values - expected).max(initial=0)), tolerance)


def _spline_source(image: Array, order: int, *, filters: bool) -> Array:
    """Return the array to sample: the coefficients of a spline unless the timed call filters."""
    return image if order < 2 or filters else _peer_module(image).spline_filter(image, order, output=np.float32)


def _map(
    name: str, xp: ModuleType, scale: float, *,
    dtype: str = "float32", order: int = 1, smooth: bool = True, reach: float, filters: bool = False,
) -> Case:  # fmt: skip
    side = scaled(512, scale)
    image = _speckled(xp, side, dtype)
    coordinates = (_smooth_coordinates if smooth else _random_coordinates)(xp, side)
    ndimage, source = _peer_module(image), _spline_source(image, order, filters=filters)
    options: Options = {"order": order, "mode": "constant", "prefilter": filters}

    def coords_of(chosen: np.ndarray) -> np.ndarray:
        return to_host(coordinates.reshape((3, -1))[:, xp.asarray(chosen)]).astype(np.float64)

    def check(result: Array) -> str:
        return _sampled_differs(result, source, coords_of, options)

    def check_torch(result: Array) -> str:
        # PyTorch's coordinates from -1 to 1 are less exact, and beyond the outermost voxels its result fades to 0.
        return _sampled_differs(result, source, coords_of, options, 1e-3, border=False)

    by_torch = lambda: grid_sample(image, coordinates, check_torch)  # noqa: E731
    return kernel_case(
        name, image,
        lambda: map_coordinates(source, coordinates, **options),
        lambda: ndimage.map_coordinates(source, coordinates, **options),
        check, coordinates.nbytes + source.nbytes, reach,
        copy_reach=0.75 if name == "map-linear-smooth" else None,
        third=("torch", by_torch) if order == 1 and dtype == "float32" else None,
    )  # fmt: skip


def _affine(
    name: str, xp: ModuleType, scale: float, *,
    dtype: str = "float32", order: int, reach: float | None = None, filters: bool = False,
) -> Case:  # fmt: skip
    side = scaled(512, scale)
    image = _speckled(xp, side, dtype)
    ndimage, source = _peer_module(image), _spline_source(image, order, filters=filters)
    offset, matrix = side / 2 - TURN @ np.full(3, side / 2), xp.asarray(TURN)
    options: Options = {"order": order, "mode": "constant", "prefilter": filters}

    def coords_of(chosen: np.ndarray) -> np.ndarray:
        return np.asarray(TURN @ np.stack(np.unravel_index(chosen, image.shape)) + offset[:, None])

    return kernel_case(
        name, image,
        lambda: affine_transform(source, TURN, offset, **options),
        lambda: ndimage.affine_transform(source, matrix, offset.tolist(), **options),
        # Labels must be exact.
        lambda result: _sampled_differs(result, source, coords_of, options, 1e-5 if order else 0.0),
        2 * source.nbytes, reach, **({} if order else _of_copy(xp, 2 * source.nbytes)),
    )  # fmt: skip


def _resize_to_half(name: str, xp: ModuleType, scale: float, *, dtype: str = "float32") -> Case:
    half = scaled(256, scale, 8)
    image = _speckled(xp, 2 * half, dtype)
    ndimage = _peer_module(image)

    def peer() -> Array:
        # scikit-image's resize, by cupyx, in float32.
        smooth = ndimage.gaussian_filter(image, 0.5, output=np.float32, mode="mirror")
        return ndimage.zoom(smooth, 0.5, order=1, mode="mirror", grid_mode=True)

    return kernel_case(
        name, image, lambda: resize(image, (half, half, half)), peer, partial(_differs_from_half, image=image),
        image.nbytes + half**3 * 4, 6.0,
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
        smooth = _scipy().gaussian_filter(part, 0.5, mode="mirror")
        expected = _scipy().zoom(smooth, 0.5, order=1, mode="mirror", grid_mode=True)
        planes = to_host(result[start // 2 : (start + depth) // 2])
        # Planes near a cut of the image lack neighbours.
        kept = slice(0 if start == 0 else 2, None if start + depth == side else -2)
        worst = max(worst, float(np.abs(planes - expected)[kept].max()))
    return _off_by(worst, 1e-5 * float(image.max()))


def _spline_filter(name: str, xp: ModuleType, scale: float) -> Case:
    image = _speckled(xp, scaled(512, scale))
    ndimage = _peer_module(image)
    host = to_host(image)

    def check(result: Array) -> str:
        rng = np.random.default_rng(0)
        # The image's first and last corner, and random boxes.
        starts = [[0] * 3, [max(0, n - _BOX_SIDE) for n in host.shape]]
        starts += [[int(rng.integers(0, n)) for n in host.shape] for _ in range(_BOXES - 2)]
        return _off_by(max(_box_error(result, host, start) for start in starts), 1e-5 * float(host.max()))

    return kernel_case(
        name, image,
        lambda: spline_filter(image, output=np.float32),
        lambda: ndimage.spline_filter(image, output=np.float32),
        check, 6 * image.nbytes, 5.0,  # three axes are read and written
    )  # fmt: skip


def _box_error(result: Array, image: np.ndarray, start: list[int]) -> float:
    """Return the largest difference between the coefficients of a box and SciPy's, in float64."""
    low = [max(0, a - _CUBIC_MARGIN) for a in start]
    part = image[tuple(slice(a, b + _BOX_SIDE + _CUBIC_MARGIN) for a, b in zip(low, start, strict=True))]
    truth = _scipy().spline_filter(part, output=np.float64)
    inside = tuple(slice(b - a, b - a + _BOX_SIDE) for a, b in zip(low, start, strict=True))
    coefficients = to_host(result[tuple(slice(b, b + _BOX_SIDE) for b in start)])
    return float(np.abs(coefficients - truth[inside]).max())


# ---- stacks of small images; the peer is a loop over them by CuPy


def _stack(xp: ModuleType, shape: tuple[int, ...]) -> Array:
    return xp.asarray(np.random.default_rng(0).uniform(0, 4000, shape).astype(np.float32))


def _wrong_images(result: Array, stack: Array, truth: Truth) -> str:
    """Compare some images of a stack with SciPy in float64."""
    for number in {0, len(stack) // 2, len(stack) - 1}:
        expected = truth(to_host(stack[number]).astype(np.float64))
        wrong = _off_by(float(np.abs(to_host(result[number]) - expected).max()), 4000 * 1e-5)
        if wrong:
            return f"image {number} is {wrong}"
    return ""


def _affine_stack(name: str, xp: ModuleType, scale: float, *, shape: tuple[int, ...], order: int = 1) -> Case:
    """Rotate every image of a stack, (images, ...), by the same matrix."""
    rank = len(shape) - 1
    sizes = (scaled(shape[0], scale, 2), *shape[1:])
    stack = _stack(xp, sizes)
    linear = TURN[-rank:, -rank:]
    offset = np.array([n / 2 for n in sizes[1:]]) - linear @ [n / 2 for n in sizes[1:]]
    stack_matrix, stack_offset = np.eye(rank + 1), np.zeros(rank + 1)
    stack_matrix[1:, 1:], stack_offset[1:] = linear, offset
    options: Options = {"order": order, "mode": "mirror"}
    ndimage, matrix = _peer_module(stack), xp.asarray(linear)
    truth = lambda image: _scipy().affine_transform(image, linear, offset, **options)  # noqa: E731
    return kernel_case(
        name, stack,
        lambda: affine_transform(stack, stack_matrix, stack_offset, **options),
        lambda: xp.stack([ndimage.affine_transform(image, matrix, offset.tolist(), **options) for image in stack]),
        lambda result: _wrong_images(result, stack, truth), 2 * stack.nbytes, 10.0,
    )  # fmt: skip


def _displaced_channels(name: str, xp: ModuleType, scale: float) -> Case:
    """Deform all channels of an image by the same field."""
    stack = _stack(xp, (scaled(64, scale, 2), 48, 48, 48))
    field = xp.asarray(np.random.default_rng(1).uniform(-2, 2, (3, *stack.shape[1:])).astype(np.float32))
    grid = np.stack(np.meshgrid(*map(np.arange, stack.shape[1:]), indexing="ij"))
    coords = to_host(field).astype(np.float64) + grid
    options: Options = {"order": 1, "mode": "mirror"}
    ndimage, device_coords = _peer_module(stack), xp.asarray(coords)
    return kernel_case(
        name, stack,
        lambda: apply_displacement_field(stack, field, channel_axis=0, **options),
        lambda: xp.stack([ndimage.map_coordinates(image, device_coords, **options) for image in stack]),
        lambda result: _wrong_images(result, stack, _map_truth(coords, options)), 2 * stack.nbytes + field.nbytes, 10.0,
    )  # fmt: skip


# ---- labels


def _of_copy(xp: ModuleType, nbytes: int) -> Options:
    """Return options of :func:`kernel_case` that add a copy of as many bytes: the launch dominates small images."""
    return {"copy_reach": 0.7, "third": ("copy-as-many", copy_of(xp, nbytes))}


def _resized_labels(name: str, xp: ModuleType, scale: float, *, factor: float, side: int) -> Case:
    """Take the nearest labels, at half or twice the resolution."""
    image = _speckled(xp, max(8, round(side * scale) // 2 * 2), "uint16")
    new_shape = (round(len(image) * factor),) * 3
    ndimage = _peer_module(image)
    rows = np.floor((np.arange(new_shape[0]) + 0.5) / factor).astype(np.int64)

    def check(result: Array) -> str:
        chosen = np.random.default_rng(0).integers(0, new_shape[0], (3, _CHECKED))
        expected = to_host(image)[tuple(rows[axis] for axis in chosen)]
        return "" if np.array_equal(to_host(result)[tuple(chosen)], expected) else "labels differ from the nearest ones"

    # At half the resolution, all memory sectors of half the planes and rows are read.
    nbytes = int(image.nbytes * (0.25 if factor < 1 else 1) + new_shape[0] ** 3 * 2)
    return kernel_case(
        name, image,
        lambda: resize(image, new_shape, order=0),
        lambda: ndimage.zoom(image, factor, order=0, mode="nearest", grid_mode=True),
        check, nbytes, **_of_copy(xp, nbytes),
    )  # fmt: skip


#: The cases, in order; `reach` is relative to CuPy.
_CASES: dict[str, tuple[Callable[..., Case], Options]] = {
    "map-linear-smooth": (_map, {"reach": 1.8}),
    "map-linear-uint16": (_map, {"dtype": "uint16", "reach": 2.5}),
    "map-linear-random": (_map, {"smooth": False, "reach": 1.3}),
    "map-cubic-smooth": (_map, {"order": 3, "reach": 4.0}),
    "affine-linear": (_affine, {"order": 1, "reach": 3.0}),
    "affine-cubic": (_affine, {"order": 3, "reach": 5.0}),
    "resize-half": (_resize_to_half, {}),
    "resize-half-uint16": (_resize_to_half, {"dtype": "uint16"}),
    # with the filters of their splines
    "map-order2": (_map, {"order": 2, "reach": 4.0, "filters": True}),
    "map-order5": (_map, {"order": 5, "reach": 4.0, "filters": True}),
    "affine-order2": (_affine, {"order": 2, "reach": 4.0, "filters": True}),
    "affine-order5": (_affine, {"order": 5, "reach": 4.0, "filters": True}),
    "stack-planes": (_affine_stack, {"shape": (2048, 64, 64)}),
    "stack-planes-cubic": (_affine_stack, {"shape": (2048, 64, 64), "order": 3}),
    "stack-volumes": (_affine_stack, {"shape": (256, 32, 32, 32)}),
    "stack-channels": (_displaced_channels, {}),
    "labels-half": (_resized_labels, {"factor": 0.5, "side": 512}),
    "labels-half-large": (_resized_labels, {"factor": 0.5, "side": 1024}),
    "labels-double": (_resized_labels, {"factor": 2, "side": 256}),
    "labels-turned": (_affine, {"dtype": "uint16", "order": 0}),
    "spline-filter": (_spline_filter, {}),
}
MAKERS: Makers = {name: partial(make, name, **options) for name, (make, options) in _CASES.items()}

SUITE = kernel_suite("resampling", _DESCRIPTION, MAKERS, 20, "Shrink every axis.")
