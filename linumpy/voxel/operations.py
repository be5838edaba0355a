"""The operations that every backend offers, with the checks that all of them share.

In: bool arrays (Z, Y, X), positions and sizes in (x, y, z) µm. Out: arrays where the backend works. SciPy's backend
works on NumPy arrays, Warp's on CuPy arrays; neither copies masks between host and device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import is_device_array
from linumpy.gpu.kernels import address_of
from linumpy.voxel.capsules import capsule_table, polyline_table
from linumpy.voxel.element import Element, as_element
from linumpy.voxel.grid import Grid, check_pitch, grid_of_box, make_grid
from linumpy.voxel.mesh import SHELL, Mesh, make_mesh

OPERATIONS = ("union", "intersect", "subtract")


class Operations:
    """The checks that all backends share; each backend defines the methods that begin with an underscore.

    Every method takes bool arrays of three axes (Z, Y, X) that are where the backend works, and returns new ones there,
    unless it says otherwise.

    Raises
    ------
    TypeError
        An array that is not of bool, or lies elsewhere.
    ValueError
        Shapes, positions or sizes that cannot be; the message names the parameter.
    """

    name = ""

    @property
    def xp(self) -> Any:
        """The array module: NumPy or CuPy."""
        return np

    def boolean(self, operation: str, a: Array, b: Array, out: Array | None = None) -> Array:
        """Combine two masks: ``"union"``, ``"intersect"`` or ``"subtract"`` (`b` from `a`).

        `out` may be one of them, or share memory with them; without it, a new array is returned.
        """
        if operation not in OPERATIONS:
            raise ValueError(f"operation {operation!r} is unknown: choose one of {', '.join(OPERATIONS)}")
        for name, mask in (("a", a), ("b", b), ("out", a if out is None else out)):
            self._check(name, mask)
            if mask.shape != a.shape:
                raise ValueError(f"{name} has shape {mask.shape}, but a has {a.shape}")
        if out is None:
            return self._boolean(operation, a, b, self.xp.empty(a.shape, bool))
        _check_writable("out", out)
        if any(_overlaps_in_part(self.xp, one, out) for one in (a, b)):
            out[...] = self._boolean(operation, a, b, self.xp.empty(a.shape, bool))
            return out
        return self._boolean(operation, a, b, out)

    def dilate(
        self, mask: Array, structure: Any = None, *, radius: Any = None, pitch: Any = None, border_value: bool = False
    ) -> Array:
        """Dilate a mask by a structuring element, or by a ball.

        Parameters
        ----------
        mask : array of bool
            (Z, Y, X).
        structure : array_like of bool or Element
            (Z, Y, X), of any size; its origin is ``shape // 2``, as for :func:`scipy.ndimage.binary_dilation`.
        radius : float
            Of a ball, instead of `structure`, in µm.
        pitch : float or (float, float, float)
            With `radius`: size of a voxel, one number or (x, y, z) µm.
        border_value : bool
            What voxels outside the mask count as.
        """
        self._check("mask", mask)
        return self._dilate(mask, as_element(structure, radius, pitch), bool(border_value))

    def erode(
        self, mask: Array, structure: Any = None, *, radius: Any = None, pitch: Any = None, border_value: bool = False
    ) -> Array:
        """Erode a mask; parameters as for :meth:`dilate`, which see."""
        self._check("mask", mask)
        return self._erode(mask, as_element(structure, radius, pitch), bool(border_value))

    def open(
        self, mask: Array, structure: Any = None, *, radius: Any = None, pitch: Any = None,
        border_value: bool | None = None,
    ) -> Array:  # fmt: skip
        """Erode, then dilate: what is thinner than the element goes.

        Parameters are those of :meth:`dilate`, but that by default voxels outside the mask have no part in the result:
        nothing is removed because it lies at the border. False and True count in both steps, as for SciPy.
        """
        element = as_element(structure, radius, pitch)
        first, second = (True, False) if border_value is None else (border_value, border_value)
        return self.dilate(self.erode(mask, element, border_value=first), element, border_value=second)

    def close(
        self, mask: Array, structure: Any = None, *, radius: Any = None, pitch: Any = None,
        border_value: bool | None = None,
    ) -> Array:  # fmt: skip
        """Dilate, then erode: gaps that are thinner than the element close; parameters as for :meth:`open`.

        With the default `border_value` no voxel is removed; SciPy, whose default is False, removes some at the border.
        """
        element = as_element(structure, radius, pitch)
        first, second = (False, True) if border_value is None else (border_value, border_value)
        return self.erode(self.dilate(mask, element, border_value=first), element, border_value=second)

    def fill_holes(self, mask: Array) -> Array:
        """Fill what no path of face neighbours outside the mask connects with the border of the volume."""
        self._check("mask", mask)
        return self._fill_holes(mask)

    def subtract_swept_capsule(
        self, mask: Array, p0: Any, p1: Any, radius: Any, *, pitch: Any, origin: Any = (0, 0, 0), z_offset: int = 0
    ) -> Any:
        """Set to False, in place, the voxels whose centres lie within `radius` of a line segment, or of any of several.

        Parameters
        ----------
        mask : array of bool
            (Z, Y, X); it is changed.
        p0, p1 : array_like, shape (3,) or (n, 3)
            Ends of the segments, (x, y, z) µm. Equal ends make a ball.
        radius : float or array_like, shape (n,)
            In µm, from 0 on.
        pitch, origin : float or (float, float, float); (float, float, float)
            Size of a voxel, and corner of voxel 0, (x, y, z) µm.
        z_offset : int
            Index, in the whole volume, of the first plane of `mask`.

        Returns
        -------
        int64
            How many voxels were removed; on a device an array of rank 0, so that nothing waits for it.
        """
        self._check("mask", mask)
        _check_writable("mask", mask)
        grid = make_grid(mask.shape, origin, pitch, z_offset)
        return self._subtract(mask, capsule_table(p0, p1, radius), grid)

    def subtract_swept_polyline(
        self, mask: Array, points: Any, radius: Any, *, pitch: Any, origin: Any = (0, 0, 0), z_offset: int = 0
    ) -> Any:
        """Set to False the voxels along a polyline, (n, 3) µm; otherwise as :meth:`subtract_swept_capsule`."""
        self._check("mask", mask)
        _check_writable("mask", mask)
        grid = make_grid(mask.shape, origin, pitch, z_offset)
        return self._subtract(mask, polyline_table(points, radius), grid)

    def voxelize_mesh(self, vertices: Any, triangles: Any, bbox: Any, pitch: Any, fill_holes: bool = True) -> Array:
        """Make a mask of a mesh.

        Parameters
        ----------
        vertices : array_like, shape (n, 3)
            (x, y, z) µm; on the host or where the backend works.
        triangles : array_like of int, shape (m, 3)
            Indices of vertices.
        bbox : ((float, float, float), (float, float, float))
            Lower and upper corner of the mask, (x, y, z) µm. The upper one is rounded up to whole voxels.
        pitch : float or (float, float, float)
            Size of a voxel, one number or (x, y, z) µm.
        fill_holes : bool
            Of a mesh that is not watertight, whether to fill what its shell of voxels encloses.

        Returns
        -------
        array of bool
            (Z, Y, X), where the backend works. Of a watertight mesh the voxels whose centres lie inside, by its winding
            number; see :mod:`linumpy.voxel.mesh`.
        """
        grid = grid_of_box(bbox, pitch)
        return self.voxelize(make_mesh(self.xp, vertices, triangles, grid), grid, fill_holes=fill_holes)

    def voxelize(self, mesh: Mesh, grid: Grid, *, fill_holes: bool = True) -> Array:
        """Make a mask of a mesh on any box of the volume that it was made for; otherwise as :meth:`voxelize_mesh`."""
        if mesh.kind != SHELL:
            return self._solid(mesh, grid)
        return self._fill_holes(self._shell(mesh, grid)) if fill_holes else self._shell(mesh, grid)

    def distance_transform(self, mask: Array, pitch: Any) -> Array:
        """Return the distance of each true voxel to the nearest false one, in µm (float64); infinite without one."""
        self._check("mask", mask)
        return self._distances(mask, check_pitch(pitch))

    def connected_components(self, mask: Array, connectivity: int = 6) -> tuple[Array, int]:
        """Number the connected parts of a mask.

        Parameters
        ----------
        mask : array of bool
            (Z, Y, X).
        connectivity : {6, 18, 26}
            Neighbours of a voxel: by faces, by edges too, by corners too.

        Returns
        -------
        array of int32, int
            0 outside, and numbers from 1 on in the order of their first voxels; how many there are (a device is waited
            for).
        """
        self._check("mask", mask)
        if connectivity not in (6, 18, 26):
            raise ValueError(f"connectivity={connectivity!r}: a voxel has 6, 18 or 26 neighbours")
        return self._components(mask, (6, 18, 26).index(connectivity) + 1)

    def marching_cubes(self, mask: Array, pitch: Any, origin: Any = (0, 0, 0)) -> tuple[Array, Array]:
        """Return the surface of a mask, closed also where it meets the border of the volume.

        Returns
        -------
        array of float64, shape (n, 3); array of int32, shape (m, 3)
            Vertices, (x, y, z) µm, half a voxel from the centres on either side; triangles, which face outwards. Both
            are empty for an empty mask.
        """
        self._check("mask", mask)
        return self._surface(mask, make_grid(mask.shape, origin, pitch))

    def _check(self, name: str, mask: Any) -> None:
        on_device = self.xp is not np
        if not isinstance(mask, np.ndarray) and not is_device_array(mask):
            kind = "CuPy" if on_device else "NumPy"
            raise TypeError(f"{name} is {type(mask).__name__}: a {kind} array of bool (Z, Y, X) is needed")
        if is_device_array(mask) != on_device:
            there = "the device" if is_device_array(mask) else "the host"
            other = "cpu" if on_device else "cuda"
            raise TypeError(
                f"{name} is {type(mask).__name__} on {there}, and this backend is {self.name}: take "
                f"get_backend({other!r}) or copy the array"
            )
        if mask.dtype != bool or mask.ndim != 3 or not mask.size:
            raise TypeError(f"{name} of shape {mask.shape}, {mask.dtype}: a bool array (Z, Y, X) with voxels is needed")

    def _boolean(self, operation: str, a: Any, b: Any, out: Any) -> Any:
        raise NotImplementedError

    def _dilate(self, mask: Any, element: Element, border: bool) -> Any:
        raise NotImplementedError

    def _erode(self, mask: Any, element: Element, border: bool) -> Any:
        raise NotImplementedError

    def _fill_holes(self, mask: Any) -> Any:
        raise NotImplementedError

    def _subtract(self, mask: Any, table: np.ndarray, grid: Grid) -> Any:
        raise NotImplementedError

    def _solid(self, mesh: Mesh, grid: Grid) -> Any:
        raise NotImplementedError

    def _shell(self, mesh: Mesh, grid: Grid) -> Any:
        raise NotImplementedError

    def _distances(self, mask: Any, pitch: tuple[float, float, float]) -> Any:
        raise NotImplementedError

    def _components(self, mask: Any, rank: int) -> tuple[Any, int]:
        raise NotImplementedError

    def _surface(self, mask: Any, grid: Grid) -> tuple[Any, Any]:
        raise NotImplementedError


def is_writable(array: Any) -> bool:
    """Say whether voxels can be changed in place, each by itself: not in read-only memory nor in a broadcast view."""
    shared = any(n > 1 and step == 0 for n, step in zip(array.shape, array.strides, strict=True))
    return not shared and bool(getattr(array.flags, "writeable", True))  # CuPy's arrays have no such flag


def _overlaps_in_part(xp: Any, one: Any, out: Any) -> bool:
    same = address_of(one) == address_of(out) and one.strides == out.strides
    return not same and bool(xp.may_share_memory(one, out))


def _check_writable(name: str, mask: Any) -> None:
    if not is_writable(mask):
        raise ValueError(f"{name} is read-only or a broadcast view, and it is changed in place: give a copy of it")
