"""Voxel operations by Warp, on the GPU.

In: CuPy arrays (Z, Y, X). Out: CuPy arrays. Warp uses the memory of CuPy's arrays and CuPy's current stream, so no mask
is copied. Only operations that need a number on the host synchronise: meshes, holes, labels, distances, surfaces.
``WarpBackend("cpu")`` runs the same kernels on NumPy arrays, so that tests compare them with SciPy without a GPU.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import is_device_array, require_cuda, to_host
from linumpy.gpu.kernels import address_of
from linumpy.voxel.backends.operations import OPERATIONS, Backend, Mask, check_writable
from linumpy.voxel.caps import ON_LIMIT, SHIFT
from linumpy.voxel.element import Element
from linumpy.voxel.grid import VoxelGrid
from linumpy.voxel.mesh import CLOSED, TriangleMesh, with_triangles

log = logging.getLogger(__name__)

_ALL_BITS = 2**64 - 1

#: Maximum number of 8-byte words in a launch, because their index is an int32.
_WORDS = 2**30

#: Maximum bytes of the table that says which capsules are near each brick; more capsules take several passes.
_TABLE_NBYTES = 2**28

#: Maximum number of voxels in a mask to label, because CuPy numbers voxels by int32.
_MAX_LABELLED = 2**31 - 1


class WarpBackend(Backend):
    """Warp on CuPy arrays; see :class:`~linumpy.voxel.backends.operations.Backend`.

    - `device`: ``"cuda"``, CuPy's current device, or ``"cpu"``: Warp's kernels on NumPy arrays.
    """

    def __init__(self, device: str = "cuda") -> None:
        import warp as wp

        self.xp = np if device == "cpu" else require_cuda()
        _quieten(wp)
        wp.init()
        self._index = None if device == "cpu" else int(self.xp.cuda.Device().id)
        self.name = "warp on the cpu" if self._index is None else f"cuda:{self._index}"
        self._device = "cpu" if self._index is None else self.name
        from linumpy.voxel.backends import warp_kernels, warp_mesh_kernels

        self._wp, self._kernels = wp, SimpleNamespace(**vars(warp_kernels) | vars(warp_mesh_kernels))

    def _check(self, name: str, mask: Mask, kinds: str = "b") -> None:
        super()._check(name, mask, kinds)
        if self._index is not None and mask.device.id != self._index:
            raise TypeError(f"{name} is on device {mask.device.id}, and this backend is {self.name}")

    def _array(self, array: Mask, dtype: type, start: int = 0, count: int | None = None) -> Any:
        """Wrap the memory of an array; with `count`, only `count` elements of `dtype` from byte `start` on."""
        shape, strides = (array.shape, array.strides) if count is None else ((count,), None)
        wrapped: Any = self._wp.array(
            ptr=address_of(array) + start, dtype=dtype, shape=shape, strides=strides, device=self._device
        )
        wrapped._linumpy_memory = array  # keeps the memory alive
        return wrapped

    def _bytes(self, mask: Mask) -> Any:
        return self._array(mask.view(np.uint8), self._wp.uint8)

    def _launch(self, name: str, dim: int | tuple[int, ...], *inputs: object) -> None:
        self._wp.launch(getattr(self._kernels, name), dim, inputs=inputs, device=self._device, stream=self._stream())

    def _stream(self) -> Any:
        """Return Warp's object for CuPy's current stream; None on the host."""
        return None if self._index is None else _stream(self._device, self.xp.cuda.get_current_stream().ptr)

    def _boolean(self, operation: str, a: Mask, b: Mask, out: Mask) -> Mask:
        number, words = OPERATIONS.index(operation), a.size // 8
        # Masks that can be read as words of 8 bytes, without up to 7 bytes at their end.
        if not all(mask.flags.c_contiguous and address_of(mask) % 8 == 0 for mask in (a, b, out)):
            return self._boolean_by_element(number, a, b, out)
        for first in range(0, words, _WORDS):
            count = min(_WORDS, words - first)
            arrays = (self._array(mask, self._wp.uint64, 8 * first, count) for mask in (a, b, out))
            self._launch("boolean_words", math.ceil(count / 64) * 32, number, count, *arrays)
        if words * 8 < a.size:
            tails = [mask.reshape(-1)[words * 8 :] for mask in (a, b, out)]
            self._boolean_by_element(number, *tails)
        return out

    def _boolean_by_element(self, number: int, a: Mask, b: Mask, out: Mask) -> Mask:
        x, y = a.view(np.uint8), b.view(np.uint8)  # a bool may be stored as another byte than 1
        if number == 2:
            return self.xp.logical_and(x, self.xp.logical_not(y), out=out)
        return (self.xp.logical_or, self.xp.logical_and)[number](x, y, out=out)

    def _dilate(self, mask: Mask, element: Element, border: bool) -> Mask:
        return self._spread(mask, element.runs(reflected=True), inverted=False, outside=border)

    def _erode(self, mask: Mask, element: Element, border: bool) -> Mask:
        return self._spread(mask, element.runs(reflected=False), inverted=True, outside=not border)

    def _spread(self, mask: Mask, runs: np.ndarray, *, inverted: bool, outside: bool) -> Mask:
        """Return the union of a mask shifted by each offset; with `inverted`, of an erosion, invert before and after.

        - `runs`: rows (dz, dy, first dx, length), sorted by length: offsets that are neighbours along x.
        - `outside`: the value beyond the mask, after inversion.

        Voxels are packed into words of 64 along x. For each length of runs, ``widen`` unites the mask with itself
        shifted along x by 1 to length - 1 voxels; ``gather`` then adds the result at the first offset of each run of
        this length.
        """
        xp, wp, (nz, ny, nx) = self.xp, self._wp, mask.shape
        runs = _clipped(runs, nx)
        margin, words = -(-max(0, -int(runs[:, 2].min())) // 64), -(-nx // 64)
        beyond = wp.uint64(_ALL_BITS if outside else 0)
        wide, other = (xp.empty((nz, ny, margin + words), np.uint64) for _ in range(2))
        out = xp.zeros((nz, ny, words), np.uint64)
        as_words = functools.partial(self._array, dtype=wp.uint64)
        self._launch("pack", wide.shape, self._bytes(mask), int(inverted), beyond, margin, as_words(wide))
        table = self._array(xp.asarray(runs[:, :3].astype(np.int32)), wp.int32)
        length = 1
        for run_length in np.unique(runs[:, 3]).tolist():
            while length < run_length:
                step = min(length, run_length - length)
                self._launch("widen", wide.shape, as_words(wide), beyond, step, as_words(other))
                wide, other, length = other, wide, length + step
            first, last = np.searchsorted(runs[:, 3], [run_length, run_length + 1]).tolist()
            self._launch("gather", out.shape, as_words(wide), beyond, margin, table, first, last, as_words(out))
        result = xp.empty(mask.shape, bool)
        self._launch("unpack", result.shape, as_words(out), int(inverted), self._bytes(result))
        return result

    def subtract_capsules(self, mask: Mask, table: np.ndarray, grid: VoxelGrid) -> Array:
        """Remove capsules brick by brick, as :meth:`.Backend.subtract_capsules`; return how many voxels it removed."""
        xp, wp, brick = self.xp, self._wp, self._kernels.BRICK
        bricks = tuple(-(-n // brick) for n in grid.shape)
        count = math.prod(bricks)
        removed = xp.zeros(count, np.int32)
        step = 32 * max(1, _TABLE_NBYTES // (4 * count))
        half = 0.5 * brick * math.hypot(*grid.pitch)
        place = (wp.vec3d(*grid.origin), wp.vec3d(*grid.pitch), grid.z_offset)
        for first in range(0, len(table), step):
            part = table[first : first + step]
            far = np.abs(part[:, :8]).max(axis=0)  # rounding errors are proportional to coordinates
            slack = half * (1 + 1e-6) + 1e-9 * (grid.reach + brick * max(grid.pitch) + far[[0, 1, 2, 3, 4, 5, 7]].sum())
            near, words = xp.empty((-(-len(part) // 32), count), np.uint32), xp.zeros((2, count), np.int32)
            rows = self._array(xp.asarray(part), wp.float64)
            tables = (self._array(near, wp.uint32), self._array(words, wp.int32))
            self._launch("cull_capsules", near.shape, rows, *place, slack, *bricks[1:], *tables)
            self._launch(
                "subtract_capsules", (count, brick**3 // self._kernels.RUN), self._bytes(mask), rows, *tables, *place,
                *bricks[1:], self._array(removed, wp.int32),
            )  # fmt: skip
        return removed.sum(dtype=np.int64)

    def _solid(self, mesh: TriangleMesh, grid: VoxelGrid) -> Mask:
        out, change = self.xp.empty(grid.shape, bool), self.xp.zeros(grid.shape, np.int32)
        self._cross(mesh.corners, mesh.bits, grid, 2, self.xp.empty((1, 1, 1), bool), change, solid=True)
        wp, caps = self._wp, mesh.caps
        if caps is None:
            odd = int(mesh.kind == CLOSED)
            self._launch("wind", grid.shape[1:], self._array(change, wp.int32), odd, self._bytes(out))
            return out
        winding = self._array(self.xp.cumsum(change, axis=0, out=change), wp.int32)
        shift = wp.vec3d(*(one * step for one, step in zip(SHIFT, grid.pitch, strict=True)))
        tables = (self._array(self.xp.asarray(table), wp.float64) for table in (caps.triangles, caps.groups))
        self._launch(
            "wind_open", out.shape, winding, *tables, shift, wp.vec3d(*grid.pitch), grid.z_offset, ON_LIMIT,
            self._bytes(out),
        )  # fmt: skip
        return out

    def _shell(self, mesh: TriangleMesh, grid: VoxelGrid) -> Mask:
        out, unused = self.xp.zeros(grid.shape, bool), self.xp.empty((1, 1, 1), np.int32)
        for axis in range(3):
            self._cross(mesh.given, mesh.bits, grid, axis, out, unused, solid=False)
        return out

    def _cross(
        self, triangles: Array, bits: int, grid: VoxelGrid, axis: int, marks: Mask, change: Mask, *, solid: bool
    ) -> None:
        count = len(triangles)
        lanes = 32 if count > 2**14 else 1024  # few triangles are usually large, so each gets more threads
        corners = self._array(self.xp.ascontiguousarray(triangles), self._wp.int64)
        self._launch(
            "cross_columns", (count, lanes), corners, bits, 2.0**-bits, axis, lanes, grid.z_offset,
            self._bytes(marks), self._array(change, self._wp.int32), int(solid),
        )  # fmt: skip

    def _label(self, mask: Mask, rank: int = 1, dtype: type | None = None) -> tuple[Mask, int]:
        if mask.size > _MAX_LABELLED:
            raise ValueError(f"a mask of shape {mask.shape} has more than 2^31 - 1 voxels: CuPy cannot label them")
        return super()._label(mask, rank, dtype)

    def _surface(self, mask: Mask, grid: VoxelGrid) -> tuple[Mask, Mask]:
        xp, wp = self.xp, self._wp
        if not bool(mask.any()):
            return xp.empty((0, 3)), xp.empty((0, 3), np.int32)
        field = xp.pad(mask, 1).astype(np.float32)
        with wp.ScopedDevice(self._device), wp.ScopedStream(self._stream(), sync_enter=False):
            cubes = _marching_cubes(wp)(*field.shape)
            cubes.surface(self._array(field, wp.float32), 0.5)
        verts, indices = (
            array.numpy() if self._index is None else xp.asarray(array) for array in (cubes.verts, cubes.indices)
        )
        triangles = indices.reshape(-1, 3)
        index = verts.reshape(-1, 3)[:, ::-1].astype(np.float64) - 1
        vertices = xp.asarray(grid.origin) + (index + 0.5) * xp.asarray(grid.pitch)
        a, b, c = (index[triangles[:, corner]] for corner in range(3))
        inwards = (a * xp.cross(b, c)).sum() < 0
        triangles = xp.where(inwards, triangles[:, ::-1], triangles).astype(np.int32)
        if self._index is not None:
            xp.cuda.get_current_stream().synchronize()  # Warp frees its arrays on a stream of its own
        return vertices, triangles


@functools.lru_cache(maxsize=16)
def _stream(device: str, pointer: int) -> Any:
    """Return Warp's object for a CUDA stream of CuPy."""
    import warp as wp

    return wp.Stream(device, cuda_stream=pointer)


def _quieten(wp: ModuleType) -> None:
    """Prevent Warp from printing its version and a line for each module that it loads on standard output."""
    if not hasattr(wp.config, "log_level"):
        wp.config.quiet = True
    elif wp.config.log_level == wp.LOG_INFO:  # the default, so the user did not set it
        wp.config.log_level = wp.LOG_WARNING


def _marching_cubes(wp: ModuleType) -> type:
    """Return Warp's class for surfaces, whose name depends on the version.

    Before Warp 1.9 the class needs the sizes of its results in advance, so these versions are refused.
    """
    if tuple(map(int, wp.config.version.split(".")[:2])) < (1, 9):
        raise NotImplementedError(
            f'marching_cubes needs Warp 1.9 or later, and this is {wp.config.version}: pip install "warp-lang>=1.9"'
        )
    try:
        from warp.geometry import IsoSurfaceMarchingCubes
    except ImportError:  # before the class was moved
        return wp.MarchingCubes
    return IsoSurfaceMarchingCubes


def _clipped(runs: np.ndarray, nx: int) -> np.ndarray:
    """Return the runs, clipped to offsets of at most `nx` voxels along x, without duplicates, sorted by length."""
    first, last = np.clip(runs[:, 2], -nx, nx), np.clip(runs[:, 2] + runs[:, 3] - 1, -nx, nx)
    rows = np.unique(np.column_stack([last - first + 1, runs[:, :2], first]), axis=0)
    return rows[:, [1, 2, 3, 0]]


#: Names of parameters that take masks.
_MASKS = ("mask", "a", "b", "out")


def _transferred(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that copies NumPy masks to the device, calls `method`, and copies its result to the host."""
    signature = inspect.signature(method)
    changed = "mask" if "mask" in signature.parameters else "out"

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
        result = method(*bound.args, **bound.kwargs)
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


class TransferBackend(WarpBackend):
    """Warp's backend that also takes NumPy arrays.

    Results lie in the memory of the first mask, of `out`, or of a mesh's vertices. Each call copies masks from the host
    to the device once, and copies the result or the mask that it changes in place back once.
    """

    def voxelize_mesh(self, *args: Any, **options: Any) -> Any:
        """Voxelize a mesh as :meth:`.Backend.voxelize_mesh`; the result lies in the memory of the vertices."""
        args = with_triangles(args)
        mask = super().voxelize_mesh(*args, **options)
        vertices = args[0] if args else options["vertices"]
        return mask if is_device_array(vertices) else _on_host(mask)


for _name in (
    "boolean", "dilate", "erode", "open", "close", "fill_holes", "subtract_swept_capsule", "subtract_swept_polyline",
    "distance_transform", "connected_components", "marching_cubes",
):  # fmt: skip
    setattr(TransferBackend, _name, _transferred(getattr(Backend, _name)))
