"""A backend on a device that also takes masks on the host.

In: NumPy or CuPy arrays. Out: arrays in the memory of the first mask, of `out`, or of a mesh's vertices. Each call
copies masks from the host to the device once, and copies the result or the mask that it changes in place back once.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import is_device_array, to_host
from linumpy.voxel.backends.operations import Backend, check_writable
from linumpy.voxel.grid import VoxelGrid
from linumpy.voxel.mesh import TriangleMesh, with_triangles

log = logging.getLogger(__name__)

_MASKS = ("mask", "a", "b", "out")


def _transferred(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that copies masks to the device, calls the method of the inner backend, and copies back."""
    signature, name = inspect.signature(method), method.__name__
    changed = "mask" if name.startswith("subtract_") else "out"

    @functools.wraps(method)
    def call(self: TransferBackend, *args: Any, **options: Any) -> Any:
        bound = signature.bind(self, *args, **options)
        arguments = bound.arguments
        masks = {key: arguments[key] for key in _MASKS if isinstance(arguments.get(key), np.ndarray)}
        if changed in masks:
            check_writable(changed, masks[changed])
        if masks:
            _log_once(self.name)
        arguments.update({key: self.xp.asarray(mask) for key, mask in masks.items()})
        result = getattr(self.inner, name)(*bound.args[1:], **bound.kwargs)
        if changed in masks:
            masks[changed][...] = to_host(arguments[changed])
        if arguments.get("out") is not None:
            return masks.get("out", result)
        return _on_host(result) if masks.keys() & {"mask", "a"} else result

    return call


@functools.cache
def _log_once(name: str) -> None:
    log.info("voxel operations on NumPy arrays run on %s: each call copies the arrays there and the result back", name)


def _on_host(result: Any) -> Any:
    """Copy arrays on a device, also those in a tuple, to the host; return other objects unchanged."""
    if isinstance(result, tuple):
        return tuple(map(_on_host, result))
    if not is_device_array(result):
        return result
    return to_host(result)[()]  # rank 0 becomes a NumPy scalar, as SciPy's backend returns


class TransferBackend(Backend):
    """A backend on a device that also takes NumPy arrays, and returns NumPy arrays for them.

    - `inner`: the backend on the device.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = inner.name

    @property
    def xp(self) -> ModuleType:
        """The array module of the device."""
        return self.inner.xp

    boolean = _transferred(Backend.boolean)
    dilate = _transferred(Backend.dilate)
    erode = _transferred(Backend.erode)
    open = _transferred(Backend.open)
    close = _transferred(Backend.close)
    fill_holes = _transferred(Backend.fill_holes)
    subtract_swept_capsule = _transferred(Backend.subtract_swept_capsule)
    subtract_swept_polyline = _transferred(Backend.subtract_swept_polyline)
    distance_transform = _transferred(Backend.distance_transform)
    connected_components = _transferred(Backend.connected_components)
    marching_cubes = _transferred(Backend.marching_cubes)

    def voxelize_mesh(self, *args: Any, **options: Any) -> Any:
        """Voxelize a mesh as :meth:`.Backend.voxelize_mesh`; the result lies in the memory of the vertices."""
        args = with_triangles(args)
        mask = self.inner.voxelize_mesh(*args, **options)
        vertices = args[0] if args else options["vertices"]
        return mask if is_device_array(vertices) else _on_host(mask)

    def voxelize(self, mesh: TriangleMesh, grid: VoxelGrid, *, fill_holes: bool = True) -> Array:
        """Voxelize a checked mesh on the device; the result stays there."""
        return self.inner.voxelize(mesh, grid, fill_holes=fill_holes)
