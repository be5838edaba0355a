"""The positions of the voxels of a mask.

In: origin, pitch and shape. Out: a :class:`VoxelGrid`, checked. Errors: ``ValueError`` that names the parameter. Arrays
are indexed (Z, Y, X); positions, `origin` and `pitch` are (x, y, z) in µm. The centre of voxel i along an axis lies at
``origin + (i + 0.5) * pitch``, in float64 and in this order of operations everywhere, so that the host and a device
give the same results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from linumpy.arrays import Array
from linumpy.checks import is_integer

#: A position, or a size, in µm.
XYZ = tuple[float, float, float]
#: Numbers as callers pass them: an array_like on the host, or an array on a device.
Numbers: TypeAlias = ArrayLike | Array
#: The size of a voxel as callers pass it: one number, or (x, y, z).
Lengths: TypeAlias = float | Iterable[float]

#: Maximum number of voxels of a volume along an axis: kernels compute twice an index in int32.
_MAX_VOXELS = 2**30

#: Smallest and largest size of a voxel in µm: squares of distances neither underflow nor overflow.
_MIN_PITCH, _MAX_PITCH = 1e-50, 1e50


@dataclass(frozen=True, slots=True)
class VoxelGrid:
    """A box of voxels.

    - `shape` (int, int, int): number of voxels along (Z, Y, X).
    - `origin` (float, float, float): corner of voxel 0 of the whole volume, (x, y, z) µm.
    - `pitch` (float, float, float): size of a voxel, (x, y, z) µm.
    - `z_offset`: index, in the whole volume, of the first plane of this box.
    """

    shape: tuple[int, int, int]
    origin: XYZ
    pitch: XYZ
    z_offset: int = 0

    def centres(self, axis: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the centres of voxels `start` to `stop` of this box along axis 0 (x), 1 (y) or 2 (z), in µm."""
        offset = self.z_offset if axis == 2 else 0
        index = np.arange(start, self.shape[2 - axis] if stop is None else stop, dtype=np.int64) + offset
        return self.origin[axis] + (index.astype(np.float64) + 0.5) * self.pitch[axis]

    @property
    def reach(self) -> float:
        """Upper bound of the absolute coordinates of the box, in µm: rounding errors are proportional to it."""
        sizes = (self.shape[2], self.shape[1], self.shape[0] + self.z_offset)
        axes = zip(self.origin, sizes, self.pitch, strict=True)
        return max(abs(start) + n * step for start, n, step in axes)


def make_grid(shape: Sequence[int], origin: Iterable[float], pitch: Lengths, z_offset: int = 0) -> VoxelGrid:
    """Check the parameters of a :class:`VoxelGrid`; `pitch` may be one number for all axes."""
    sizes = tuple(int(n) for n in shape)
    if len(sizes) != 3 or min(sizes) < 1:
        raise ValueError(f"shape={tuple(shape)}: a grid has three axes (Z, Y, X) with at least one voxel each")
    if not is_integer(z_offset) or z_offset < 0:
        raise ValueError(f"z_offset={z_offset!r}: the index of a plane is an integer >= 0")
    if max(sizes[0] + int(z_offset), *sizes[1:]) > _MAX_VOXELS:
        offset = f" with z_offset={z_offset}" if z_offset else ""
        raise ValueError(f"shape={sizes}{offset}: a volume has at most {_MAX_VOXELS} voxels along an axis")
    return VoxelGrid((sizes[0], sizes[1], sizes[2]), xyz(origin, "origin"), check_pitch(pitch), int(z_offset))


def grid_of_box(bbox: Iterable[Iterable[float]], pitch: Lengths) -> VoxelGrid:
    """Return the grid that fills a box, (lower corner, upper corner) in (x, y, z) µm.

    The upper corner is rounded up to whole voxels; an excess of less than a millionth of a voxel is ignored.
    """
    try:
        low, high = bbox
    except (TypeError, ValueError):
        raise ValueError(f"bbox={bbox!r}: a lower and an upper corner (x, y, z) in µm are needed") from None
    start, stop, steps = xyz(low, "bbox"), xyz(high, "bbox"), check_pitch(pitch)
    lengths = [(b - a) / step - 1e-6 for a, b, step in zip(start, stop, steps, strict=True)]
    if min(lengths) <= 0:
        raise ValueError(f"bbox={bbox!r}: the upper corner must exceed the lower one along x, y and z")
    if max(lengths) > _MAX_VOXELS:
        raise ValueError(
            f"bbox={bbox!r} is {max(lengths):.3g} voxels long, more than {_MAX_VOXELS}: is pitch={pitch} right?"
        )
    shape = tuple(map(math.ceil, lengths))
    return VoxelGrid((shape[2], shape[1], shape[0]), start, steps)


def check_pitch(pitch: Lengths) -> XYZ:
    """Check the size of a voxel in µm, one number for all axes or (x, y, z), and return (x, y, z)."""
    steps = xyz((pitch,) * 3 if np.ndim(pitch) == 0 else pitch, "pitch")  # type: ignore[arg-type]
    if min(steps) <= 0:
        raise ValueError(f"pitch={pitch}: the size of a voxel must be more than 0 µm")
    if not _MIN_PITCH <= min(steps) <= max(steps) <= _MAX_PITCH:
        raise ValueError(f"pitch={pitch}: the size of a voxel must be between {_MIN_PITCH:g} and {_MAX_PITCH:g} µm")
    return steps


def xyz(value: Iterable[float], name: str) -> XYZ:
    """Check three finite numbers (x, y, z), and return them as floats; errors name the parameter `name`."""
    try:
        numbers = tuple(map(float, value))
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r}: three numbers (x, y, z) in µm are needed") from None
    if len(numbers) != 3 or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{name}={value!r}: three finite numbers (x, y, z) in µm are needed")
    return numbers
