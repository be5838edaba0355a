"""What is timed of resampling, beside ``cupyx.scipy.ndimage`` on the same arrays; SciPy in float64 is the truth.

In: an array module and a scale. Out: :class:`~linumpy.benchmark.cases.Case` records.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.benchmark.cases import Case, Prepared
from linumpy.benchmark.kernels import kernel_case
from linumpy.benchmark.suites import resampling_stacks
from linumpy.benchmark.suites.peers import TURN, grid_sample, peer_module, scipy_module, speckled, wrong_voxels
from linumpy.device import to_host
from linumpy.gpu.interpolation import affine_transform, map_coordinates, resize, spline_filter

#: Points of a result that are compared with SciPy.
_CHECKED = 2000
#: Planes of an image that are resized by SciPy, three times.
_PLANES = 24


def _smooth_coordinates(xp: ModuleType, side: int) -> Any:
    """Coordinates of the grid, moved by up to 3 voxels by waves; (3, side, side, side) float32."""
    wave = 3 * xp.sin(xp.linspace(0, 9, side, dtype=xp.float32))
    grid = xp.arange(side, dtype=xp.float32)
    coordinates = xp.empty((3, side, side, side), xp.float32)
    coordinates[0] = grid[:, None, None] + wave[None, :, None]
    coordinates[1] = grid[None, :, None] + wave[None, None, :]
    coordinates[2] = grid[None, None, :] + wave[:, None, None]
    return coordinates


def _random_coordinates(xp: ModuleType, side: int) -> Any:
    rng = xp.random.RandomState(1)
    return xp.stack([rng.uniform(0, side - 1, side**3).astype(xp.float32) for _ in range(3)])


def _map(
    xp: ModuleType,
    scale: float,
    name: str,
    dtype: str,
    order: int,
    *,
    smooth: bool,
    reach: float,
    filters: bool = False,
) -> Case:
    side = max(16, round(512 * scale))
    image = speckled(xp, side, dtype)
    coordinates = _smooth_coordinates(xp, side) if smooth else _random_coordinates(xp, side)
    ndimage = peer_module(image)
    source = image if order < 2 or filters else ndimage.spline_filter(image, order, output=np.float32)
    options: dict[str, Any] = {"order": order, "mode": "constant", "prefilter": filters}

    def check(got: Any, relative: float = 1e-5, border: bool = True) -> str:
        some = np.random.default_rng(0).integers(0, got.size, _CHECKED * (_MORE if filters else 1))
        at = to_host(coordinates.reshape(3, -1)[:, xp.asarray(some)]).astype(np.float64)
        data = to_host(source)
        if filters:
            some, at, data = _in_the_middle(some, at, data)
        if not border:
            inside = ((at >= 0) & (at <= side - 1)).all(0)
            some, at = some[inside], at[:, inside]
        return wrong_voxels(got, some, data, lambda data: scipy_module().map_coordinates(data, at, **options), relative)

    def by_torch() -> AbstractContextManager[Prepared]:
        # PyTorch samples floats linearly; its coordinates from -1 to 1 are a little less exact, and beyond the
        # outermost voxels it fades out where SciPy stops.
        return grid_sample(image, coordinates, lambda got: check(got, 1e-3, border=False))

    nbytes = coordinates.nbytes + source.size * source.itemsize
    return kernel_case(
        name,
        tuple(image.shape),
        dtype,
        lambda: map_coordinates(source, coordinates, **options),
        lambda: ndimage.map_coordinates(source, coordinates, **options),
        check,
        int(nbytes),
        reach,
        copy_reach=0.75 if name == "map-linear-smooth" else None,
        third=("torch", by_torch) if order == 1 and dtype == "float32" else None,
    )


def _affine(xp: ModuleType, scale: float, name: str, order: int, reach: float, *, filters: bool = False) -> Case:
    side = max(16, round(512 * scale))
    image = speckled(xp, side, "float32")
    ndimage = peer_module(image)
    source = image if order < 2 or filters else ndimage.spline_filter(image, order, output=np.float32)
    offset = side / 2 - TURN @ np.full(3, side / 2)
    options: dict[str, Any] = {"order": order, "mode": "constant", "prefilter": filters}

    def check(got: Any) -> str:
        some = np.random.default_rng(0).integers(0, got.size, _CHECKED * (_MORE if filters else 1))
        at, data = TURN @ np.stack(np.unravel_index(some, got.shape)) + offset[:, None], to_host(source)
        if filters:
            some, at, data = _in_the_middle(some, at, data)
        return wrong_voxels(got, some, data, lambda data: scipy_module().map_coordinates(data, at, **options))

    matrix = xp.asarray(TURN)
    return kernel_case(
        name,
        tuple(image.shape),
        "float32",
        lambda: affine_transform(source, TURN, offset, **options),
        lambda: ndimage.affine_transform(source, matrix, offset.tolist(), **options),
        check,
        2 * int(source.nbytes),
        reach,
    )


def _in_the_middle(some: np.ndarray, at: np.ndarray, data: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keep the voxels sampled near the middle, and the part of the image from which SciPy can filter what they need."""
    middle = len(data) // 2
    kept = (np.abs(at - middle) <= _BOX_SIDE / 2).all(0)
    first = max(0, middle - _BOX_SIDE // 2 - _FORGOTTEN)
    part = (slice(first, middle + _BOX_SIDE // 2 + _FORGOTTEN + 1),) * 3
    return some[kept], at[:, kept] - first, data[part]


def _resize(xp: ModuleType, scale: float, name: str, dtype: str, reach: float) -> Case:
    half = max(8, round(256 * scale))
    image = speckled(xp, 2 * half, dtype)
    ndimage = peer_module(image)

    def peer() -> Any:
        # What scikit-image's resize does, by cupyx, in float32.
        smooth = ndimage.gaussian_filter(image, 0.5, output=np.float32, mode="mirror")
        return ndimage.zoom(smooth, 0.5, order=1, mode="mirror", grid_mode=True)

    return kernel_case(
        name,
        tuple(image.shape),
        dtype,
        lambda: resize(image, (half, half, half)),
        peer,
        lambda got: _differs_from_half(got, image),
        image.nbytes + half**3 * 4,
        reach,
    )


def _differs_from_half(got: Any, image: Any) -> str:
    """Compare planes at both ends and in the middle with SciPy in float64, within 1e-5 of the range."""
    side = len(image)
    depth = min(side, _PLANES)
    if tuple(got.shape) != (side // 2,) * 3:
        return f"its shape is {tuple(got.shape)}"
    worst = 0.0
    for start in sorted({0, (side - depth) // 4 * 2, side - depth}):
        part = to_host(image[start : start + depth]).astype(np.float64)
        smooth = scipy_module().gaussian_filter(part, 0.5, mode="mirror")
        expected = scipy_module().zoom(smooth, 0.5, order=1, mode="mirror", grid_mode=True)
        found = to_host(got[start // 2 : (start + depth) // 2])
        # Planes near a cut lack their neighbours.
        kept = slice(0 if start == 0 else 2, None if start + depth == side else -2)
        worst = max(worst, float(np.abs(found - expected)[kept].max()))
    tolerance = 1e-5 * float(image.max())
    return "" if worst <= tolerance else f"off by {worst:.3g} where {tolerance:.2g} is allowed"


#: Boxes of coefficients that are compared with SciPy, their sides, and the voxels after which a cubic filter has
#: forgotten where its image was cut, and any filter.
_BOXES, _BOX_SIDE, _MARGIN, _FORGOTTEN = 8, 40, 24, 44
#: How many times as many voxels are drawn, of which those in the middle are compared.
_MORE = 200


def _spline_filter(xp: ModuleType, scale: float, name: str, reach: float) -> Case:
    image = speckled(xp, max(16, round(512 * scale)), "float32")
    ndimage = peer_module(image)
    host = to_host(image)

    def check(got: Any) -> str:
        rng = np.random.default_rng(0)
        # The image's first and last corner, and some more.
        starts = [[0] * 3, [max(0, n - _BOX_SIDE) for n in host.shape]]
        starts += [[int(rng.integers(0, n)) for n in host.shape] for _ in range(_BOXES - 2)]
        tolerance = 1e-5 * float(host.max())
        worst = max(_box_error(got, host, start) for start in starts)
        return f"off by {worst:.3g} where {tolerance:.2g} is allowed" if worst > tolerance else ""

    return kernel_case(
        name,
        tuple(image.shape),
        "float32",
        lambda: spline_filter(image, output=np.float32),
        lambda: ndimage.spline_filter(image, output=np.float32),
        check,
        6 * int(image.nbytes),  # an axis after another
        reach,
    )


def _box_error(got: Any, image: np.ndarray, start: list[int]) -> float:
    """The largest difference between a box of coefficients and SciPy's, in float64."""
    near = [max(0, a - _MARGIN) for a in start]
    part = image[tuple(slice(a, b + _BOX_SIDE + _MARGIN) for a, b in zip(near, start, strict=True))]
    truth = scipy_module().spline_filter(part, output=np.float64)
    inside = tuple(slice(b - a, b - a + _BOX_SIDE) for a, b in zip(near, start, strict=True))
    found = to_host(got[tuple(slice(b, b + _BOX_SIDE) for b in start)])
    return float(np.abs(found - truth[inside]).max())


#: In their order, each with what it is to reach, × CuPy.
MAKERS: dict[str, Callable[[ModuleType, float], Case]] = {
    "map-linear-smooth": lambda xp, s: _map(xp, s, "map-linear-smooth", "float32", 1, smooth=True, reach=1.8),
    "map-linear-uint16": lambda xp, s: _map(xp, s, "map-linear-uint16", "uint16", 1, smooth=True, reach=2.5),
    "map-linear-random": lambda xp, s: _map(xp, s, "map-linear-random", "float32", 1, smooth=False, reach=1.3),
    "map-cubic-smooth": lambda xp, s: _map(xp, s, "map-cubic-smooth", "float32", 3, smooth=True, reach=4.0),
    "affine-linear": lambda xp, s: _affine(xp, s, "affine-linear", 1, 3.0),
    "affine-cubic": lambda xp, s: _affine(xp, s, "affine-cubic", 3, 5.0),
    "resize-half": lambda xp, s: _resize(xp, s, "resize-half", "float32", 6.0),
    "resize-half-uint16": lambda xp, s: _resize(xp, s, "resize-half-uint16", "uint16", 6.0),
    # Orders of which the spline is found, too.
    "map-order2": lambda xp, s: _map(xp, s, "map-order2", "float32", 2, smooth=True, reach=4.0, filters=True),
    "map-order5": lambda xp, s: _map(xp, s, "map-order5", "float32", 5, smooth=True, reach=4.0, filters=True),
    "affine-order2": lambda xp, s: _affine(xp, s, "affine-order2", 2, 4.0, filters=True),
    "affine-order5": lambda xp, s: _affine(xp, s, "affine-order5", 5, 4.0, filters=True),
    "stack-planes": lambda xp, s: resampling_stacks.affine_stack(xp, s, "stack-planes", (2048, 64, 64), 1),
    "stack-planes-cubic": lambda xp, s: resampling_stacks.affine_stack(xp, s, "stack-planes-cubic", (2048, 64, 64), 3),
    "stack-volumes": lambda xp, s: resampling_stacks.affine_stack(xp, s, "stack-volumes", (256, 32, 32, 32), 1),
    "stack-channels": lambda xp, s: resampling_stacks.displaced_channels(xp, s, "stack-channels"),
    "labels-half": lambda xp, s: resampling_stacks.resized_labels(xp, s, "labels-half", 0.5, "uint16", 512),
    "labels-half-large": lambda xp, s: resampling_stacks.resized_labels(
        xp, s, "labels-half-large", 0.5, "uint16", 1024
    ),
    "labels-double": lambda xp, s: resampling_stacks.resized_labels(xp, s, "labels-double", 2, "uint16", 256),
    "labels-turned": lambda xp, s: resampling_stacks.turned_labels(xp, s, "labels-turned", "uint16"),
    "spline-filter": lambda xp, s: _spline_filter(xp, s, "spline-filter", 5.0),
}
