"""The operations that a session has queued; each can be applied to a slab.

In: checked parameters. Out: records with the planes and the memory that they need, and :meth:`apply`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from linumpy.voxel.backend import Backend
from linumpy.voxel.element import Element
from linumpy.voxel.grid import Grid
from linumpy.voxel.mesh import Mesh


class Queued(Protocol):
    """An operation on a slab."""

    @property
    def halo(self) -> int:
        """How many planes above and below a plane have a part in its result."""

    @property
    def voxel_bytes(self) -> int:
        """Bytes of temporary memory for each voxel of a slab, beside the slab and its result."""

    def apply(self, backend: Backend, mask: Any, grid: Grid) -> Any:
        """Return the result on a slab, which may be changed."""


@dataclass(frozen=True)
class Combine:
    """A boolean operation with another mask, whose planes `read` gives where the backend works."""

    operation: str
    read: Callable[[int, int], Any]
    halo: int = 0
    voxel_bytes: int = 2

    def apply(self, backend: Backend, mask: Any, grid: Grid) -> Any:
        """Combine with the planes of the other mask."""
        other = self.read(grid.z_offset, grid.z_offset + grid.shape[0])
        return backend.boolean(self.operation, mask, other, out=mask)


@dataclass(frozen=True)
class Morphology:
    """``dilate``, ``erode``, ``open`` or ``close``."""

    method: str
    element: Element
    border_value: bool | None
    voxel_bytes: int = 2

    @property
    def halo(self) -> int:
        """That of the element, for each of its uses."""
        return self.element.halo * (2 if self.method in ("open", "close") else 1)

    def apply(self, backend: Backend, mask: Any, grid: Grid) -> Any:
        """Return a new mask."""
        return getattr(backend, self.method)(mask, self.element, border_value=self.border_value)


@dataclass(frozen=True)
class Subtract:
    """Capsules, as ends (n, 3) and radii (n,), all of them in one pass."""

    p0: np.ndarray
    p1: np.ndarray
    radius: np.ndarray
    halo: int = 0
    voxel_bytes: int = 1

    def joined(self, other: Subtract) -> Subtract:
        """Return both as one operation."""
        return Subtract(
            np.concatenate([self.p0, other.p0]),
            np.concatenate([self.p1, other.p1]),
            np.concatenate([self.radius, other.radius]),
        )

    def apply(self, backend: Backend, mask: Any, grid: Grid) -> Any:
        """Remove the capsules in place."""
        backend.subtract_swept_capsule(
            mask, self.p0, self.p1, self.radius, pitch=grid.pitch, origin=grid.origin, z_offset=grid.z_offset
        )
        return mask


@dataclass(frozen=True)
class Voxelize:
    """A mesh, and how its mask is combined with the session's."""

    operation: str
    mesh: Mesh
    halo: int = 0
    voxel_bytes: int = 6

    def apply(self, backend: Backend, mask: Any, grid: Grid) -> Any:
        """Combine with the mesh's mask of these planes."""
        made = backend.voxelize(self.mesh, grid, fill_holes=False)
        return backend.boolean(self.operation, mask, made, out=mask)
