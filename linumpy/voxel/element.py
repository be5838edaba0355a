"""Structuring elements: sets of voxel offsets, and their division into runs along x.

In: an array, or a radius in µm. Out: an :class:`Element`. Errors: ``ValueError`` that names the parameter. A ball is
converted to a set of integer offsets once, in float64 on the host; so all backends dilate by the same set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from linumpy.device import to_host
from linumpy.voxel.grid import XYZ, Lengths, Numbers, check_pitch

#: Maximum number of voxels of the box of a ball: more do not fit into memory.
_MAX_OFFSETS = 2**30

#: Balls with more offsets than this use a distance transform on the host, whose time does not depend on the radius.
_DIRECT_OFFSETS = 200


@dataclass(frozen=True, eq=False)
class Element:
    """A structuring element.

    Attributes
    ----------
    mask : numpy.ndarray of bool, rank 3
        (Z, Y, X). The element's origin is the voxel ``shape // 2``, as in SciPy.
    radius : float or None
        Radius of a ball, in µm; None for any other element.
    pitch : (float, float, float) or None
        Size of the voxels for which the ball was computed, (x, y, z) µm; None for any other element.
    """

    mask: np.ndarray
    radius: float | None = None
    pitch: XYZ | None = None

    @property
    def origin(self) -> tuple[int, int, int]:
        """The voxel of :attr:`mask` at offset 0."""
        z, y, x = self.mask.shape
        return z // 2, y // 2, x // 2

    @property
    def halo(self) -> int:
        """Number of planes above and below a plane on which the result for that plane depends."""
        planes = np.flatnonzero(self.mask.any(axis=(1, 2))) - self.origin[0]
        return int(np.abs(planes).max())

    @property
    def distance_limit(self) -> float | None:
        """A distance in µm between those of a ball's outermost offset and of the innermost offset outside the ball.

        A voxel lies in the ball exactly if its distance, as a distance transform rounds it, is less than this limit.
        None for small balls and other elements, and if the two distances are so close that rounding might change the
        result.
        """
        if self.radius is None or self.pitch is None or np.count_nonzero(self.mask) <= _DIRECT_OFFSETS:
            return None
        half = [n // 2 + 1 for n in self.mask.shape[::-1]]
        lengths = np.sqrt(_squared_distances(half, self.pitch))
        inside = np.pad(self.mask, 1)
        outermost, beyond = float(lengths[inside].max()), float(lengths[~inside].min())
        return (outermost + beyond) / 2 if beyond - outermost > 1e-9 * beyond else None

    def runs(self, *, reflected: bool) -> np.ndarray:
        """Divide the offsets, which `reflected` negates, into runs along x.

        Returns an array of int64, shape (n, 4): rows (dz, dy, first dx, length) in voxels, sorted by length.
        """
        mask, origin = self.mask, np.array(self.origin)
        if reflected:
            mask, origin = mask[::-1, ::-1, ::-1], np.array(mask.shape) - 1 - origin
        edges = np.diff(np.pad(mask, ((0, 0), (0, 0), (1, 1))).astype(np.int8), axis=2)
        first, last = np.argwhere(edges == 1), np.argwhere(edges == -1)
        rows = np.column_stack([first - origin, last[:, 2] - first[:, 2]])
        return rows[np.argsort(rows[:, 3], kind="stable")]


def as_element(structure: Numbers | Element | None, radius: float | None, pitch: Lengths = 1.0) -> Element:
    """Convert a caller's parameters to an element: an array or an :class:`Element`, or a radius and a pitch in µm."""
    if (structure is None) == (radius is None):
        raise ValueError("give either structure= (bool, three axes) or radius= in µm")
    if radius is not None:
        return ball(radius, pitch)
    if isinstance(structure, Element):
        return structure
    mask = to_host(structure)  # a few hundred bytes
    if mask.ndim != 3 or mask.dtype.kind not in "biu":
        raise ValueError(f"structure of shape {mask.shape}, {mask.dtype}: a bool array of three axes is needed")
    mask = mask != 0
    if not mask.any():
        raise ValueError(f"structure of shape {mask.shape} has no true voxel")
    return Element(mask)


def ball(radius: float, pitch: Lengths = 1.0) -> Element:
    """Make a ball: all voxels whose centres lie at most `radius` from the centre of the middle voxel.

    Parameters
    ----------
    radius : float
        In µm, at least 0. (Not the diameter.)
    pitch : float or sequence of float
        Size of a voxel in µm: one number, or (x, y, z).

    Returns
    -------
    Element
        A mask with an odd number of voxels along each axis.

    Raises
    ------
    ValueError
        An invalid radius or pitch, or a ball whose box has more than 2^30 voxels.
    """
    steps = check_pitch(pitch)
    try:
        size = float(radius)
    except (TypeError, ValueError):
        size = math.nan
    if isinstance(radius, bool) or not 0 <= size < math.inf:
        raise ValueError(f"radius={radius!r}: a number of µm >= 0 is needed")
    half = [math.floor(min(size / step, _MAX_OFFSETS)) + 1 for step in steps]  # a quotient may be infinite
    if math.prod(2 * n + 1 for n in half) > _MAX_OFFSETS:
        raise ValueError(f"radius={radius!r} µm is more than a thousand voxels of {steps} µm: use coarser voxels")
    inside = _squared_distances(half, steps) <= size * size
    reach = [
        int(np.abs(np.flatnonzero(inside.any(axis=tuple({0, 1, 2} - {axis}))) - half[2 - axis]).max())
        for axis in range(3)
    ]
    box = tuple(slice(half[2 - axis] - n, half[2 - axis] + n + 1) for axis, n in enumerate(reach))
    return Element(inside[box], size, steps)


def _squared_distances(half: list[int], steps: XYZ) -> np.ndarray:
    """Return the squared lengths of the offsets from ``-half`` to ``half`` voxels (x, y, z), in µm², as (Z, Y, X)."""
    x, y, z = ((np.arange(-n, n + 1) * step) ** 2 for n, step in zip(half, steps, strict=True))
    return (z[:, None, None] + y[:, None]) + x


def within(mask: np.ndarray, element: Element, limit: float, *, border: bool) -> np.ndarray:
    """Return the mask of the voxels whose distance to a true voxel is less than `limit` µm.

    `border`: whether voxels outside the mask are true.
    """
    inside = np.pad(mask, 1, constant_values=True) if border else mask
    if not inside.any():
        return np.zeros_like(mask)
    assert element.pitch is not None  # as of all elements with a distance limit
    within = np.asarray(ndimage.distance_transform_edt(~inside, sampling=element.pitch[::-1]) < limit)
    return within[1:-1, 1:-1, 1:-1] if border else within
