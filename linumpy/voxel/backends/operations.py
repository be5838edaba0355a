"""The operations on masks, by SciPy on the host; Warp's backend computes some of them by kernels of its own.

In: bool arrays (Z, Y, X); positions and sizes (x, y, z) in µm. Out: arrays in the same memory. Errors: ``TypeError``
and ``ValueError`` that name the parameter. No backend copies masks between host and device.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any, TypeAlias, overload

import numpy as np
import scipy

from linumpy.arrays import Array, is_writable
from linumpy.device import is_device_array
from linumpy.gpu.kernels import address_of
from linumpy.gpu.oct.surface_filters import ndimage_module
from linumpy.packages import install_line
from linumpy.voxel import capsules, mesh
from linumpy.voxel.capsules import capsule_table, polyline_table
from linumpy.voxel.element import Element, as_element, within
from linumpy.voxel.grid import Lengths, Numbers, VoxelGrid, check_pitch, grid_of_box, make_grid
from linumpy.voxel.mesh import OPEN, TriangleMesh, Trimesh, make_mesh, with_triangles

#: A NumPy or CuPy array that is checked.
Mask: TypeAlias = Any

OPERATIONS = ("union", "intersect", "subtract")


class Backend:
    """Operations on bool volumes (Z, Y, X), by SciPy on NumPy arrays; Warp's backend has the same on CuPy arrays.

    Unless stated otherwise, every method takes bool arrays in the memory of the backend and returns new ones there. In
    a mask of integers, which cannot be changed in place, all voxels but 0 are true.

    Raises
    ------
    TypeError
        An array of floats, or in other memory.
    ValueError
        Invalid shapes, positions or sizes; the message names the parameter.
    """

    #: Where the backend computes, for messages.
    name: str = "cpu"
    #: NumPy or CuPy.
    xp: ModuleType = np

    def boolean(self, operation: str, a: Array, b: Array | None = None, out: Array | None = None) -> Array:
        """Combine two masks: ``"union"``, ``"intersect"`` or ``"subtract"`` (`b` from `a`).

        `b` may be None, a mask without a true voxel. The result is written to `out`, which may be `a` or `b` or share
        memory with them; by default to a new array.
        """
        check_operation(operation)
        a = self._mask("a", a)
        b = self.xp.zeros(a.shape, bool) if b is None else self._mask("b", b)
        if out is not None:
            self._check("out", out)
        for name, mask in (("b", b), ("out", a if out is None else out)):
            if mask.shape != a.shape:
                raise ValueError(f"{name} has shape {mask.shape}, but a has {a.shape}")
        if out is None:
            return self._boolean(operation, a, b, self.xp.empty(a.shape, bool))
        check_writable("out", out)
        if any(_overlaps_in_part(self.xp, mask, out) for mask in (a, b)):
            out[...] = self._boolean(operation, a, b, self.xp.empty(a.shape, bool))
            return out
        return self._boolean(operation, a, b, out)

    def dilate(
        self,
        mask: Array,
        structure: Numbers | Element | None = None,
        *,
        radius: float | None = None,
        pitch: Lengths = 1.0,
        border_value: bool = False,
    ) -> Array:
        """Dilate a mask by a structuring element, or by a ball.

        Parameters
        ----------
        mask : array of bool
            (Z, Y, X).
        structure : array_like of bool or Element
            (Z, Y, X), of any size; its origin is ``shape // 2``, as for :func:`scipy.ndimage.binary_dilation`.
        radius : float
            Radius of a ball in µm, instead of `structure`. (Not the diameter.)
        pitch : float or (float, float, float)
            With `radius`: size of a voxel, one number or (x, y, z) µm. By default 1: `radius` is then in voxels.
        border_value : bool
            Value of the voxels outside the volume.
        """
        return self._dilate(self._mask("mask", mask), as_element(structure, radius, pitch), bool(border_value))

    def erode(
        self,
        mask: Array,
        structure: Numbers | Element | None = None,
        *,
        radius: float | None = None,
        pitch: Lengths = 1.0,
        border_value: bool = False,
    ) -> Array:
        """Erode a mask; parameters as for :meth:`dilate`."""
        return self._erode(self._mask("mask", mask), as_element(structure, radius, pitch), bool(border_value))

    def open(
        self,
        mask: Array,
        structure: Numbers | Element | None = None,
        *,
        radius: float | None = None,
        pitch: Lengths = 1.0,
        border_value: bool | None = None,
    ) -> Array:
        """Erode, then dilate: remove parts of the mask that are thinner than the element.

        Parameters as for :meth:`dilate`. By default voxels outside the volume do not influence the result: no part is
        removed because it lies at the border. A `border_value` of False or True applies to both steps, as in SciPy.
        """
        element = as_element(structure, radius, pitch)
        first, second = (True, False) if border_value is None else (border_value, border_value)
        return self.dilate(self.erode(mask, element, border_value=first), element, border_value=second)

    def close(
        self,
        mask: Array,
        structure: Numbers | Element | None = None,
        *,
        radius: float | None = None,
        pitch: Lengths = 1.0,
        border_value: bool | None = None,
    ) -> Array:
        """Dilate, then erode: close gaps that are thinner than the element; parameters as for :meth:`open`.

        The default `border_value` removes no voxel; False, SciPy's default, removes some at the border.
        """
        element = as_element(structure, radius, pitch)
        first, second = (False, True) if border_value is None else (border_value, border_value)
        return self.erode(self.dilate(mask, element, border_value=first), element, border_value=second)

    def fill_holes(self, mask: Array) -> Array:
        """Set to True the false voxels that no path of false face neighbours connects with the border of the volume."""
        mask, xp = self._mask("mask", mask), self.xp
        labels, count = self._label(~mask)
        enclosed = xp.ones(count + 1, bool)
        for axis in range(3):
            for side in (0, -1):
                enclosed[xp.take(labels, side, axis=axis).ravel()] = False
        enclosed[0] = True  # label 0 is the mask itself
        return enclosed[labels]

    def subtract_swept_capsule(
        self,
        mask: Array,
        p0: Numbers,
        p1: Numbers,
        radius: Numbers,
        *,
        pitch: Lengths = 1.0,
        origin: Iterable[float] = (0, 0, 0),
        z_offset: int = 0,
    ) -> np.int64 | Array:
        """Set to False, in place, the voxels whose centres lie within `radius` of any of the given line segments.

        Parameters
        ----------
        mask : array of bool
            (Z, Y, X); changed in place.
        p0, p1 : array_like, shape (3,) or (n, 3)
            Ends of the segments, (x, y, z) µm. A segment with equal ends makes a ball.
        radius : float or array_like, shape (n,)
            Radius of all capsules or of each, in µm, at least 0.
        pitch, origin : float or (float, float, float); (float, float, float)
            Size of a voxel, and corner of voxel 0, (x, y, z) µm.
        z_offset : int
            Index of the first plane of `mask` in the whole volume.

        Returns
        -------
        int64
            Number of voxels that became false; on a device an array of rank 0, which needs no synchronisation.
        """
        grid = self._grid_to_change(mask, pitch, origin, z_offset)
        return self.subtract_capsules(mask, capsule_table(p0, p1, radius), grid)

    def subtract_swept_polyline(
        self,
        mask: Array,
        points: Numbers,
        radius: Numbers,
        *,
        pitch: Lengths = 1.0,
        origin: Iterable[float] = (0, 0, 0),
        z_offset: int = 0,
    ) -> np.int64 | Array:
        """Set to False the voxels along a polyline, (n, 3) µm; otherwise as :meth:`subtract_swept_capsule`."""
        grid = self._grid_to_change(mask, pitch, origin, z_offset)
        return self.subtract_capsules(mask, polyline_table(points, radius), grid)

    def subtract_capsules(self, mask: Mask, table: np.ndarray, grid: VoxelGrid) -> np.int64 | Array:
        """Remove a table of checked capsules; otherwise as :meth:`subtract_swept_capsule`."""
        return np.int64(capsules.subtract(mask, table, grid))

    def _grid_to_change(self, mask: Array, pitch: Lengths, origin: Iterable[float], z_offset: int) -> VoxelGrid:
        """Check a mask that is changed in place, and return its grid."""
        self._check("mask", mask)
        check_writable("mask", mask)
        return make_grid(mask.shape, origin, pitch, z_offset)

    @overload
    def voxelize_mesh(
        self,
        vertices: Numbers,
        triangles: Numbers,
        bbox: Iterable[Iterable[float]],
        pitch: Lengths = 1.0,
        fill_holes: bool = True,
    ) -> Array: ...

    @overload
    def voxelize_mesh(
        self, mesh: Trimesh, /, bbox: Iterable[Iterable[float]], pitch: Lengths = 1.0, fill_holes: bool = True
    ) -> Array: ...

    def voxelize_mesh(self, *args: Any, **options: Any) -> Array:
        """Voxelize a mesh: ``voxelize_mesh(vertices, triangles, bbox, pitch)`` or ``voxelize_mesh(mesh, bbox, pitch)``.

        Parameters
        ----------
        vertices : array_like, shape (n, 3)
            (x, y, z) µm; on the host or in the memory of the backend.
        triangles : array_like of int, shape (m, 3)
            Indices of vertices.
        mesh : trimesh.Trimesh
            A mesh in µm, instead of `vertices` and `triangles`.
        bbox : ((float, float, float), (float, float, float))
            Lower and upper corner of the result, (x, y, z) µm. The upper corner is rounded up to whole voxels.
        pitch : float or (float, float, float)
            Size of a voxel, one number or (x, y, z) µm.
        fill_holes : bool
            For a mesh that is not watertight: whether to return the voxels inside it, and not only its shell.

        Returns
        -------
        array of bool
            (Z, Y, X): the voxels whose centres lie inside the mesh. For a mesh that is not watertight these are the
            voxels where the generalised winding number is above 1/2, and a warning says what is open; see
            :mod:`linumpy.voxel.mesh`.
        """
        return self._voxelize_mesh(*with_triangles(args), **options)

    def _voxelize_mesh(
        self,
        vertices: Numbers,
        triangles: Numbers,
        bbox: Iterable[Iterable[float]],
        pitch: Lengths = 1.0,
        fill_holes: bool = True,
    ) -> Array:
        grid = grid_of_box(bbox, pitch)
        return self.voxelize(make_mesh(self.xp, vertices, triangles, grid), grid, fill_holes=fill_holes)

    def voxelize(self, shape: TriangleMesh, grid: VoxelGrid, *, fill_holes: bool = True) -> Array:
        """Voxelize a checked mesh on any box of the volume; otherwise as :meth:`voxelize_mesh`."""
        return self._solid(shape, grid) if fill_holes or shape.kind != OPEN else self._shell(shape, grid)

    def distance_transform(self, mask: Array, pitch: Lengths = 1.0) -> Array:
        """Return the distance of each voxel to the nearest false voxel, in µm (float64), for voxels of size `pitch`.

        It is 0 for false voxels, and infinite if all voxels are true.
        """
        mask, steps = self._mask("mask", mask), check_pitch(pitch)
        if bool(mask.all()):
            return self.xp.full(mask.shape, np.inf)
        return ndimage_module(mask).distance_transform_edt(mask, sampling=steps[::-1])

    def connected_components(self, mask: Array, connectivity: int = 6) -> tuple[Array, int]:
        """Label the connected components of a mask.

        Parameters
        ----------
        connectivity : {6, 18, 26}
            Neighbours of a voxel: by faces, by edges too, by corners too.

        Returns
        -------
        array of int32, int
            Labels: 0 for false voxels, and 1, 2, ... for components in the order of their first voxels; and the number
            of components, for which a device is synchronised.
        """
        if connectivity not in (6, 18, 26):
            raise ValueError(f"connectivity={connectivity!r}: a voxel has 6, 18 or 26 neighbours")
        return self._label(self._mask("mask", mask), (6, 18, 26).index(connectivity) + 1, np.int32)

    def marching_cubes(
        self, mask: Array, pitch: Lengths = 1.0, origin: Iterable[float] = (0, 0, 0)
    ) -> tuple[Array, Array]:
        """Return the surface of a mask as a mesh, which is closed also where it meets the border of the volume.

        Parameters
        ----------
        pitch, origin : float or (float, float, float); (float, float, float)
            Size of a voxel, and corner of voxel 0, (x, y, z) µm.

        Returns
        -------
        array of float64, shape (n, 3); array of int32, shape (m, 3)
            Vertices, (x, y, z) µm, halfway between voxel centres; triangles, which face outwards. Both are empty for an
            empty mask.

        Raises
        ------
        ImportError, NotImplementedError
            scikit-image is missing (SciPy's backend); Warp is older than 1.9 (Warp's backend).
        """
        mask = self._mask("mask", mask)
        return self._surface(mask, make_grid(mask.shape, origin, pitch))

    def _mask(self, name: str, mask: Array) -> Array:
        """Check a mask that is only read, and return it as bool."""
        self._check(name, mask, kinds="biu")
        return mask if mask.dtype == bool else mask != 0

    def _check(self, name: str, mask: Array, kinds: str = "b") -> None:
        on_device = self.xp is not np
        kind, side, other = ("CuPy", "the host", "cpu") if on_device else ("NumPy", "the device", "cuda")
        if not isinstance(mask, np.ndarray) and not is_device_array(mask):
            raise TypeError(f"{name} is {type(mask).__name__}: a {kind} array of bool (Z, Y, X) is needed")
        if is_device_array(mask) != on_device:
            raise TypeError(
                f"{name} is {type(mask).__name__} on {side}, but this backend is {self.name}: use "
                f"get_backend({other!r}) or copy the array"
            )
        if mask.dtype.kind not in kinds or mask.ndim != 3 or not mask.size:
            needed = "bool" if kinds == "b" else "bool or integers"
            raise TypeError(f"{name} of shape {mask.shape}, {mask.dtype}: {needed} (Z, Y, X) with voxels is needed")

    def _boolean(self, operation: str, a: Mask, b: Mask, out: Mask) -> Mask:
        if operation == "subtract":
            return np.logical_and(a, np.logical_not(b), out=out)
        return (np.logical_or if operation == "union" else np.logical_and)(a, b, out=out)

    def _dilate(self, mask: Mask, element: Element, border: bool) -> Mask:
        limit = element.distance_limit
        if limit is None:
            return scipy.ndimage.binary_dilation(mask, element.mask, border_value=border)
        return within(mask, element, limit, border=border)

    def _erode(self, mask: Mask, element: Element, border: bool) -> Mask:
        limit = element.distance_limit
        if limit is None:
            return scipy.ndimage.binary_erosion(mask, element.mask, border_value=border)
        return ~within(~mask, element, limit, border=not border)

    def _solid(self, shape: TriangleMesh, grid: VoxelGrid) -> Mask:
        return mesh.solid(shape, grid)

    def _shell(self, shape: TriangleMesh, grid: VoxelGrid) -> Mask:
        return mesh.shell(shape, grid)

    def _label(self, mask: Mask, rank: int = 1, dtype: type | None = None) -> tuple[Mask, int]:
        ndimage = ndimage_module(mask)
        labels, count = ndimage.label(mask, ndimage.generate_binary_structure(3, rank), output=dtype)
        return labels, int(count)

    def _surface(self, mask: Mask, grid: VoxelGrid) -> tuple[Mask, Mask]:
        try:
            from skimage.measure import marching_cubes
        except ImportError as error:
            raise ImportError(f"marching_cubes on the CPU needs scikit-image: {install_line('mesh')}") from error
        if not mask.any():
            return np.empty((0, 3)), np.empty((0, 3), np.int32)
        vertices, triangles, _, _ = marching_cubes(np.pad(mask, 1), 0.5, allow_degenerate=False)
        index = vertices[:, ::-1].astype(np.float64) - 1
        return np.asarray(grid.origin) + (index + 0.5) * np.asarray(grid.pitch), triangles.astype(np.int32)


def check_operation(operation: str) -> None:
    """Check the name of a boolean operation."""
    if operation not in OPERATIONS:
        raise ValueError(f"operation {operation!r} is unknown: choose one of {', '.join(OPERATIONS)}")


def _overlaps_in_part(xp: ModuleType, mask: Mask, out: Array) -> bool:
    """Return whether `out` shares memory with a mask and is not the same array: writing may change voxels too early."""
    is_same = address_of(mask) == address_of(out) and mask.strides == out.strides
    return not is_same and bool(xp.may_share_memory(mask, out))


def check_writable(name: str, mask: Mask) -> None:
    """Refuse a mask that cannot be changed in place."""
    if not is_writable(mask):
        raise ValueError(f"{name} is read-only or a broadcast view and cannot be changed in place: pass a copy")
