"""What is timed of stacks of small images, and of labels; see :mod:`linumpy.benchmark.suites.resampling`.

In: an array module and a scale. Out: :class:`~linumpy.benchmark.cases.Case` records. A stack's peer is a loop over
its images by CuPy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.benchmark.cases import Case, Prepared, ready
from linumpy.benchmark.kernels import kernel_case
from linumpy.benchmark.suites.peers import TURN, peer_module, scipy_module, speckled, wrong_voxels
from linumpy.device import to_host
from linumpy.gpu.interpolation import affine_transform, apply_displacement_field, resize


def affine_stack(xp: ModuleType, scale: float, name: str, shape: tuple[int, ...], order: int) -> Case:
    """Turn every image of a stack, (images, ...), alike."""
    rank = len(shape) - 1
    sizes = (max(2, round(shape[0] * scale)), *shape[1:])
    stack = _stack(xp, sizes)
    linear = TURN[-rank:, -rank:]
    offset = np.array([n / 2 for n in sizes[1:]]) - linear @ [n / 2 for n in sizes[1:]]
    full, moved = np.eye(rank + 1), np.zeros(rank + 1)
    full[1:, 1:], moved[1:] = linear, offset
    options: dict[str, Any] = {"order": order, "mode": "mirror"}
    ndimage, matrix = peer_module(stack), xp.asarray(linear)

    def peer() -> Any:
        return xp.stack([ndimage.affine_transform(one, matrix, offset.tolist(), **options) for one in stack])

    def truth(image: np.ndarray) -> np.ndarray:
        return np.asarray(scipy_module().affine_transform(image, linear, offset, **options))

    def check(got: Any) -> str:
        return _wrong_images(got, stack, truth)

    ours = lambda: affine_transform(stack, full, moved, **options)  # noqa: E731
    return kernel_case(name, tuple(stack.shape), "float32", ours, peer, check, 2 * int(stack.nbytes), 10.0)


def displaced_channels(xp: ModuleType, scale: float, name: str) -> Case:
    """Deform all channels of an image alike."""
    stack = _stack(xp, (max(2, round(64 * scale)), 48, 48, 48))
    field = xp.asarray(np.random.default_rng(1).uniform(-2, 2, (3, *stack.shape[1:])).astype(np.float32))
    grid = np.stack(np.meshgrid(*map(np.arange, stack.shape[1:]), indexing="ij"))
    places = to_host(field).astype(np.float64) + grid
    options: dict[str, Any] = {"order": 1, "mode": "mirror"}
    ndimage, near = peer_module(stack), xp.asarray(places)

    def peer() -> Any:
        return xp.stack([ndimage.map_coordinates(one, near, **options) for one in stack])

    def truth(image: np.ndarray) -> np.ndarray:
        return np.asarray(scipy_module().map_coordinates(image, places, **options))

    def check(got: Any) -> str:
        return _wrong_images(got, stack, truth)

    ours = lambda: apply_displacement_field(stack, field, channel_axis=0, **options)  # noqa: E731
    nbytes = 2 * int(stack.nbytes) + int(field.nbytes)
    return kernel_case(name, tuple(stack.shape), "float32", ours, peer, check, nbytes, 10.0)


def _stack(xp: ModuleType, shape: tuple[int, ...]) -> Any:
    return xp.asarray(np.random.default_rng(0).uniform(0, 4000, shape).astype(np.float32))


def _wrong_images(got: Any, stack: Any, truth: Any) -> str:
    """Compare some images of a stack with SciPy in float64."""
    for number in {0, len(stack) // 2, len(stack) - 1}:
        expected = truth(to_host(stack[number]).astype(np.float64))
        off = float(np.abs(to_host(got[number]) - expected).max())
        if off > 4000 * 1e-5:
            return f"image {number} is off by {off:.3g} where {4000 * 1e-5:.2g} is allowed"
    return ""


def resized_labels(xp: ModuleType, scale: float, name: str, factor: float, dtype: str, whole: int) -> Case:
    """Take the nearest labels, of an image of `whole` voxels a side: to half the resolution, or to twice."""
    side = max(8, round(whole * scale) // 2 * 2)
    image = speckled(xp, side, dtype)
    wanted = (round(side * factor),) * 3
    ndimage = peer_module(image)
    rows = np.floor((np.arange(wanted[0]) + 0.5) / factor).astype(np.int64)

    def peer() -> Any:
        return ndimage.zoom(image, factor, order=0, mode="nearest", grid_mode=True)

    def check(got: Any) -> str:
        some = np.random.default_rng(0).integers(0, wanted[0], (3, 2000))
        expected = to_host(image)[tuple(rows[axis] for axis in some)]
        return "" if np.array_equal(to_host(got)[tuple(some)], expected) else "labels differ from the nearest ones"

    # Of half the planes and rows all sectors are read.
    nbytes = image.nbytes * (0.25 if factor < 1 else 1) + wanted[0] ** 3 * image.itemsize
    ours = lambda: resize(image, wanted, order=0)  # noqa: E731
    about = (name, tuple(image.shape), dtype)
    return kernel_case(
        *about, ours, peer, check, int(nbytes), copy_reach=0.7, third=("copy-as-many", _copy_of(xp, int(nbytes)))
    )


def _copy_of(xp: ModuleType, nbytes: int) -> Callable[[], AbstractContextManager[Prepared]]:
    """Copy as many bytes as are read and written: of small images the launch takes most of the time."""
    source = xp.zeros(nbytes // 2, xp.uint8)
    target = xp.empty_like(source)
    return ready(lambda: xp.copyto(target, source))


def turned_labels(xp: ModuleType, scale: float, name: str, dtype: str) -> Case:
    """Turn labels."""
    side = max(16, round(512 * scale))
    image = speckled(xp, side, dtype)
    offset = side / 2 - TURN @ np.full(3, side / 2)
    ndimage, matrix = peer_module(image), xp.asarray(TURN)

    def truth_at(some: np.ndarray) -> Any:
        at = TURN @ np.stack(np.unravel_index(some, image.shape)) + offset[:, None]
        return lambda data: scipy_module().map_coordinates(data, at, order=0)

    def check(got: Any) -> str:
        some = np.random.default_rng(0).integers(0, got.size, 2000)
        return wrong_voxels(got, some, to_host(image), truth_at(some), 0.0)

    return kernel_case(
        name,
        tuple(image.shape),
        dtype,
        lambda: affine_transform(image, TURN, offset, order=0),
        lambda: ndimage.affine_transform(image, matrix, offset.tolist(), order=0),
        check,
        2 * int(image.nbytes),
        None,
        copy_reach=0.7,
        third=("copy-as-many", _copy_of(xp, 2 * int(image.nbytes))),
    )
