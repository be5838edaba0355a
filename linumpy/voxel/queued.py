"""The operations that a session queues; each can be applied to a slab.

In: checked parameters. Out: frozen records, which give the planes and the memory that an operation needs, and whose
method ``apply`` computes a slab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from linumpy.arrays import Array
from linumpy.voxel.backends.operations import Backend
from linumpy.voxel.element import Element
from linumpy.voxel.grid import VoxelGrid
from linumpy.voxel.mesh import TriangleMesh


class Queued(Protocol):
    """An operation on a slab."""

    @property
    def halo(self) -> int:
        """Number of planes above and below a plane on which the result for that plane depends."""

    @property
    def voxel_bytes(self) -> int:
        """Bytes of temporary memory for each voxel of a slab, besides the slab and its result."""

    def apply(self, backend: Backend, mask: Array, grid: VoxelGrid) -> Array:
        """Return the result for a slab; `mask` may be changed in place."""


@dataclass(frozen=True)
class Combine:
    """A boolean operation with another mask; `read` returns planes of that mask in the memory of the backend."""

    operation: str
    read: Callable[[int, int], Array]
    halo: int = 0
    voxel_bytes: int = 2

    def apply(self, backend: Backend, mask: Array, grid: VoxelGrid) -> Array:
        """Combine with the planes of the other mask."""
        other = self.read(grid.z_offset, grid.z_offset + grid.shape[0])
        return backend.boolean(self.operation, mask, other, out=mask)


@dataclass(frozen=True)
class Morphology:
    """One of the methods ``dilate``, ``erode``, ``open`` and ``close`` of a backend."""

    method: str
    element: Element
    border_value: bool | None
    voxel_bytes: int = 2

    @property
    def halo(self) -> int:
        """The halo of the element, once for each step: opening and closing have two."""
        return self.element.halo * (2 if self.method in ("open", "close") else 1)

    def apply(self, backend: Backend, mask: Array, grid: VoxelGrid) -> Array:
        """Return a new mask."""
        result: Array = getattr(backend, self.method)(mask, self.element, border_value=self.border_value)
        return result


@dataclass(frozen=True)
class Subtract:
    """Capsules to remove in one pass: ends (n, 3) and radii (n,)."""

    p0: np.ndarray
    p1: np.ndarray
    radius: np.ndarray
    halo: int = 0
    voxel_bytes: int = 1

    def joined(self, other: Subtract) -> Subtract:
        """Return both operations as one."""
        return Subtract(
            np.concatenate([self.p0, other.p0]),
            np.concatenate([self.p1, other.p1]),
            np.concatenate([self.radius, other.radius]),
        )

    def apply(self, backend: Backend, mask: Array, grid: VoxelGrid) -> Array:
        """Remove the capsules in place."""
        backend.subtract_swept_capsule(
            mask, self.p0, self.p1, self.radius, pitch=grid.pitch, origin=grid.origin, z_offset=grid.z_offset
        )
        return mask


@dataclass(frozen=True)
class Voxelize:
    """A mesh, and the operation that combines its mask with the session's."""

    operation: str
    mesh: TriangleMesh
    fill_holes: bool
    halo: int = 0
    voxel_bytes: int = 6

    def apply(self, backend: Backend, mask: Array, grid: VoxelGrid) -> Array:
        """Voxelize the mesh on these planes, and combine its mask with the session's."""
        solid = backend.voxelize(self.mesh, grid, fill_holes=self.fill_holes)
        return backend.boolean(self.operation, mask, solid, out=mask)
