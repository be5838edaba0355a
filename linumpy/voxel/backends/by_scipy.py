"""Voxel operations by SciPy and NumPy, on the host.

In: NumPy arrays. Out: NumPy arrays, equal to those of Warp's backend.
"""

# mypy: disable-error-code="override"
# (A backend takes the arrays of its own memory, which is narrower than the base class.)

from __future__ import annotations

import numpy as np
import scipy

from linumpy.packages import install_line
from linumpy.voxel import capsules, mesh
from linumpy.voxel.backends.by_ndimage import distances, fill_enclosed
from linumpy.voxel.backends.operations import Backend
from linumpy.voxel.element import Element, squared_distances
from linumpy.voxel.grid import XYZ, VoxelGrid

#: Balls with more offsets than this use a distance transform, whose time does not depend on the radius.
_DIRECT_OFFSETS = 200


class ScipyBackend(Backend):
    """SciPy on NumPy arrays; see :class:`~linumpy.voxel.backends.operations.Backend`."""

    name = "cpu"

    def _boolean(self, operation: str, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
        if operation == "union":
            return np.logical_or(a, b, out=out)
        if operation == "intersect":
            return np.logical_and(a, b, out=out)
        return np.logical_and(a, np.logical_not(b), out=out)

    def _dilate(self, mask: np.ndarray, element: Element, border: bool) -> np.ndarray:
        limit = _distance_limit(element)
        if limit is None:
            return scipy.ndimage.binary_dilation(mask, element.mask, border_value=border)
        return _within(mask, element, limit, border=border)

    def _erode(self, mask: np.ndarray, element: Element, border: bool) -> np.ndarray:
        limit = _distance_limit(element)
        if limit is None:
            return scipy.ndimage.binary_erosion(mask, element.mask, border_value=border)
        return ~_within(~mask, element, limit, border=not border)

    def _fill_holes(self, mask: np.ndarray) -> np.ndarray:
        return fill_enclosed(mask, scipy.ndimage)

    def _subtract(self, mask: np.ndarray, table: np.ndarray, grid: VoxelGrid) -> np.int64:
        return np.int64(capsules.subtract(mask, table, grid))

    def _solid(self, shape: mesh.TriangleMesh, grid: VoxelGrid) -> np.ndarray:
        return mesh.solid(shape, grid)

    def _shell(self, shape: mesh.TriangleMesh, grid: VoxelGrid) -> np.ndarray:
        return mesh.shell(shape, grid)

    def _distances(self, mask: np.ndarray, pitch: XYZ) -> np.ndarray:
        return distances(mask, pitch, scipy.ndimage)

    def _components(self, mask: np.ndarray, rank: int) -> tuple[np.ndarray, int]:
        labels, count = scipy.ndimage.label(mask, scipy.ndimage.generate_binary_structure(3, rank), output=np.int32)
        return labels, int(count)

    def _surface(self, mask: np.ndarray, grid: VoxelGrid) -> tuple[np.ndarray, np.ndarray]:
        try:
            from skimage.measure import marching_cubes
        except ImportError as error:
            raise ImportError(f"marching_cubes on the CPU needs scikit-image: {install_line('mesh')}") from error
        if not mask.any():
            return np.empty((0, 3)), np.empty((0, 3), np.int32)
        vertices, triangles, _, _ = marching_cubes(np.pad(mask, 1), 0.5, allow_degenerate=False)
        index = vertices[:, ::-1].astype(np.float64) - 1
        return np.asarray(grid.origin) + (index + 0.5) * np.asarray(grid.pitch), triangles.astype(np.int32)


def _distance_limit(element: Element) -> float | None:
    """Return a distance in µm between those of a ball's outermost offset and of the innermost offset outside the ball.

    A voxel lies in the ball exactly if its distance, as a distance transform rounds it, is less than this limit. None
    for small balls and other elements, and if the two distances are so close that rounding might change the result.
    """
    if element.radius is None or element.pitch is None or np.count_nonzero(element.mask) <= _DIRECT_OFFSETS:
        return None
    half = [n // 2 + 1 for n in element.mask.shape[::-1]]
    lengths = np.sqrt(squared_distances(half, element.pitch))
    inside = np.pad(element.mask, 1)
    outermost, beyond = float(lengths[inside].max()), float(lengths[~inside].min())
    return (outermost + beyond) / 2 if beyond - outermost > 1e-9 * beyond else None


def _within(mask: np.ndarray, element: Element, limit: float, *, border: bool) -> np.ndarray:
    """Return the mask of the voxels whose distance to a true voxel is less than `limit` µm.

    `border`: whether voxels outside the mask are true.
    """
    inside = np.pad(mask, 1, constant_values=True) if border else mask
    if not inside.any():
        return np.zeros_like(mask)
    z, y, x = element.pitch[::-1] if element.pitch is not None else (1.0, 1.0, 1.0)
    within = np.asarray(scipy.ndimage.distance_transform_edt(~inside, sampling=(z, y, x)) < limit)
    return within[1:-1, 1:-1, 1:-1] if border else within
