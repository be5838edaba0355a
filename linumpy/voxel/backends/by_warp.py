"""Voxel operations by Warp, on the GPU.

In: CuPy arrays. Out: CuPy arrays. Warp uses the memory of CuPy's arrays and CuPy's current stream, so no mask is
copied. Only operations that need a number on the host synchronise: meshes, holes, labels, distances, surfaces.
``WarpBackend("cpu")`` runs the same kernels on NumPy arrays, so that tests compare them with SciPy without a GPU.
"""

# mypy: disable-error-code="override"
# (A backend takes the arrays of its own memory, which is narrower than the base class.)

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from linumpy.arrays import Array
from linumpy.device import require_cuda
from linumpy.gpu.kernels import address_of
from linumpy.voxel.backends.by_ndimage import distances, fill_enclosed
from linumpy.voxel.backends.operations import OPERATIONS, Backend
from linumpy.voxel.backends.warp_kernels import BRICK, RUN, kernels
from linumpy.voxel.caps import ON_LIMIT, SHIFT, Caps
from linumpy.voxel.element import Element
from linumpy.voxel.grid import XYZ, VoxelGrid
from linumpy.voxel.mesh import CLOSED, TriangleMesh

#: A CuPy array, or a NumPy array for ``WarpBackend("cpu")``, whose memory is passed to Warp.
Mask: TypeAlias = Any

_ALL_BITS = 2**64 - 1

#: Maximum number of 8-byte words of a launch: the index of a word is an int32.
_WORDS = 2**30

#: Maximum size of the table that says which capsules are near each brick; more capsules take several passes.
_TABLE_NBYTES = 2**28

#: Maximum number of voxels of a mask that CuPy labels: it computes in int32.
_MAX_LABELLED = 2**31 - 1


class WarpBackend(Backend):
    """Warp on CuPy arrays; see :class:`~linumpy.voxel.backends.operations.Backend`.

    - `device`: ``"cuda"``, CuPy's current device, or ``"cpu"``: Warp's kernels on NumPy arrays.
    """

    def __init__(self, device: str = "cuda") -> None:
        import warp as wp

        if device not in ("cuda", "cpu"):
            raise ValueError(f"device {device!r} is unknown: choose 'cuda' or 'cpu'")
        self._xp: ModuleType = np if device == "cpu" else require_cuda()
        _quieten(wp)
        wp.init()
        self._index = None if device == "cpu" else int(self._xp.cuda.Device().id)
        self.name = "warp on the cpu" if self._index is None else f"cuda:{self._index}"
        self._device = "cpu" if self._index is None else self.name
        self._wp = wp

    @property
    def xp(self) -> ModuleType:
        """The array module: CuPy, or NumPy for ``WarpBackend("cpu")``."""
        return self._xp

    def _check(self, name: str, mask: Mask, kinds: str = "b") -> None:
        super()._check(name, mask, kinds)
        if self._index is not None and mask.device.id != self._index:
            raise TypeError(f"{name} is on device {mask.device.id}, and this backend is {self.name}")

    @property
    def _ndimage(self) -> ModuleType:
        if self._index is None:
            from scipy import ndimage
        else:
            from cupyx.scipy import ndimage
        return ndimage

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
        stream = None if self._index is None else _stream(self._device, self._xp.cuda.get_current_stream().ptr)
        self._wp.launch(getattr(kernels(), name), dim, inputs=inputs, device=self._device, stream=stream)

    def _boolean(self, operation: str, a: Mask, b: Mask, out: Mask) -> Mask:
        number, words = OPERATIONS.index(operation), a.size // 8
        if not all(map(self._is_in_words, (a, b, out))):
            return self._boolean_by_element(number, a, b, out)
        for first in range(0, words, _WORDS):
            count = min(_WORDS, words - first)
            arrays = (self._array(mask, self._wp.uint64, 8 * first, count) for mask in (a, b, out))
            self._launch("boolean_words", math.ceil(count / 64) * 32, number, count, *arrays)
        if words * 8 < a.size:
            tails = [mask.reshape(-1)[words * 8 :] for mask in (a, b, out)]
            self._boolean_by_element(number, *tails)
        return out

    def _is_in_words(self, mask: Mask) -> bool:
        """Return whether a mask can be read as words of 8 bytes, but for its last bytes."""
        return bool(mask.flags.c_contiguous) and address_of(mask) % 8 == 0

    def _boolean_by_element(self, number: int, a: Mask, b: Mask, out: Mask) -> Mask:
        x, y = a.view(np.uint8), b.view(np.uint8)  # a bool may be stored as another byte than 1
        if number == 2:
            return self._xp.logical_and(x, self._xp.logical_not(y), out=out)
        return (self._xp.logical_or, self._xp.logical_and)[number](x, y, out=out)

    def _dilate(self, mask: Mask, element: Element, border: bool) -> Mask:
        return self._spread(mask, element.runs(reflected=True), inverted=False, outside=border)

    def _erode(self, mask: Mask, element: Element, border: bool) -> Mask:
        return self._spread(mask, element.runs(reflected=False), inverted=True, outside=not border)

    def _spread(self, mask: Mask, runs: np.ndarray, *, inverted: bool, outside: bool) -> Mask:
        """Return the union of a mask shifted by each offset; for an erosion the mask is inverted before and after.

        A word is 64 voxels along x, and a run is a number of neighbouring offsets along x. For each length of runs,
        ``widen`` unites each word with its shifts by less than this length, and ``gather`` unites the results at the
        offset of each run of this length. `outside` is the value beyond the (inverted) mask.
        """
        xp, wp, (nz, ny, nx) = self._xp, self._wp, mask.shape
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

    def _fill_holes(self, mask: Mask) -> Mask:
        self._check_labelled(mask)
        return fill_enclosed(mask, self._ndimage)

    def _subtract(self, mask: Mask, table: np.ndarray, grid: VoxelGrid) -> Mask:
        xp, wp = self._xp, self._wp
        bricks = tuple(-(-n // BRICK) for n in grid.shape)
        count = math.prod(bricks)
        removed = xp.zeros(count, np.int32)
        step = 32 * max(1, _TABLE_NBYTES // (4 * count))
        half = 0.5 * BRICK * math.hypot(*grid.pitch)
        origin, pitch = wp.vec3d(*grid.origin), wp.vec3d(*grid.pitch)
        for first in range(0, len(table), step):
            part = table[first : first + step]
            far = np.abs(part[:, :8]).max(axis=0)  # rounding errors are proportional to coordinates
            slack = half * (1 + 1e-6) + 1e-9 * (grid.reach + BRICK * max(grid.pitch) + far[[0, 1, 2, 3, 4, 5, 7]].sum())
            capsules = xp.asarray(part)
            near = xp.empty((-(-len(part) // 32), count), np.uint32)
            words = xp.zeros((2, count), np.int32)
            rows, near_words = self._array(capsules, wp.float64), self._array(near, wp.uint32)
            word_range = self._array(words, wp.int32)
            self._launch(
                "cull_capsules",
                near.shape,
                rows,
                origin,
                pitch,
                grid.z_offset,
                slack,
                *bricks[1:],
                near_words,
                word_range,
            )
            self._launch(
                "subtract_capsules", (count, BRICK**3 // RUN), self._bytes(mask), rows, near_words, word_range, origin,
                pitch, grid.z_offset, *bricks[1:], self._array(removed, wp.int32),
            )  # fmt: skip
        return removed.sum(dtype=np.int64)

    def _solid(self, mesh: TriangleMesh, grid: VoxelGrid) -> Mask:
        out, change = self._xp.empty(grid.shape, bool), self._xp.zeros(grid.shape, np.int32)
        self._cross(mesh.corners, mesh.bits, grid, 2, self._xp.empty((1, 1, 1), bool), change, solid=True)
        if mesh.caps is not None:
            return self._solid_of_open(mesh.caps, grid, self._xp.cumsum(change, axis=0, out=change), out)
        odd = int(mesh.kind == CLOSED)
        self._launch("wind", grid.shape[1:], self._array(change, self._wp.int32), odd, self._bytes(out))
        return out

    def _solid_of_open(self, caps: Caps, grid: VoxelGrid, winding: Mask, out: Mask) -> Mask:
        wp = self._wp
        shift = wp.vec3d(*(one * step for one, step in zip(SHIFT, grid.pitch, strict=True)))
        tables = (self._array(self._xp.asarray(table), wp.float64) for table in (caps.triangles, caps.groups))
        self._launch(
            "wind_open", out.shape, self._array(winding, wp.int32), *tables, shift, wp.vec3d(*grid.pitch),
            grid.z_offset, ON_LIMIT, self._bytes(out),
        )  # fmt: skip
        return out

    def _shell(self, mesh: TriangleMesh, grid: VoxelGrid) -> Mask:
        out, unused = self._xp.zeros(grid.shape, bool), self._xp.empty((1, 1, 1), np.int32)
        for axis in range(3):
            self._cross(mesh.given, mesh.bits, grid, axis, out, unused, solid=False)
        return out

    def _cross(
        self, triangles: Array, bits: int, grid: VoxelGrid, axis: int, marks: Mask, change: Mask, *, solid: bool
    ) -> None:
        count = len(triangles)
        lanes = 32 if count > 2**14 else 1024  # the fewer triangles, the larger they are
        corners = self._array(self._xp.ascontiguousarray(triangles), self._wp.int64)
        self._launch(
            "cross_columns", (count, lanes), corners, bits, 2.0**-bits, axis, lanes, grid.z_offset,
            self._bytes(marks), self._array(change, self._wp.int32), int(solid),
        )  # fmt: skip

    def _distances(self, mask: Mask, pitch: XYZ) -> Mask:
        return distances(mask, pitch, self._ndimage)

    def _components(self, mask: Mask, rank: int) -> tuple[Mask, int]:
        self._check_labelled(mask)
        structure = self._ndimage.generate_binary_structure(3, rank)
        labels, count = self._ndimage.label(mask, structure, output=np.int32)
        return labels, int(count)

    def _check_labelled(self, mask: Mask) -> None:
        if mask.size > _MAX_LABELLED:
            raise ValueError(f"a mask of shape {mask.shape} has more than 2^31 - 1 voxels: CuPy cannot label them")

    def _surface(self, mask: Mask, grid: VoxelGrid) -> tuple[Mask, Mask]:
        xp, wp = self._xp, self._wp
        if not bool(mask.any()):
            return xp.empty((0, 3)), xp.empty((0, 3), np.int32)
        field = xp.pad(mask, 1).astype(np.float32)
        stream = None if self._index is None else _stream(self._device, xp.cuda.get_current_stream().ptr)
        with wp.ScopedDevice(self._device), wp.ScopedStream(stream, sync_enter=False):
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
    """Return Warp's class for surfaces, whose name depends on the version; before 1.9 it needs sizes in advance."""
    if tuple(map(int, wp.config.version.split(".")[:2])) < (1, 9):
        raise NotImplementedError(
            f'marching_cubes needs Warp 1.9 or later, and this is {wp.config.version}: pip install "warp-lang>=1.9"'
        )
    try:
        from warp.geometry import IsoSurfaceMarchingCubes
    except ImportError:  # in older versions
        return wp.MarchingCubes
    return IsoSurfaceMarchingCubes


def _clipped(runs: np.ndarray, nx: int) -> np.ndarray:
    """Return the runs, clipped to offsets of at most `nx` voxels along x, without duplicates, sorted by length."""
    first, last = np.clip(runs[:, 2], -nx, nx), np.clip(runs[:, 2] + runs[:, 3] - 1, -nx, nx)
    rows = np.unique(np.column_stack([last - first + 1, runs[:, :2], first]), axis=0)
    return rows[:, [1, 2, 3, 0]]
