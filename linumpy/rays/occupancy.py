"""Occupancy of space: a cascade of grids of 128³ bits.

In: densities of a field, or a volume. Out: :class:`OccupancyGrid`, whose bits the kernels read. A *mip* is one grid of
the cascade. Mip 0 is a cube around the centre; each further mip is a cube of twice the edge, with voxels of twice the
edge. NumPy in, NumPy out; CuPy in, CuPy out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from linumpy.arrays import Array, DeviceName, array_module, is_device_array, to_host
from linumpy.checks import integer
from linumpy.errors import SourceError
from linumpy.rays.arrays import as_array
from linumpy.rays.setting import GRID_SIZE, SPREAD

if TYPE_CHECKING:
    from linumpy.io.ngff.axes import Spacing

_VOXELS = GRID_SIZE**3
_MAX_MIPS = 8


@functools.cache
def _morton_order() -> np.ndarray:
    """Return the index into a C-ordered (z, y, x) grid of each voxel in Morton order, x in the lowest bit."""
    codes = SPREAD[:, None, None] << 2 | SPREAD[:, None] << 1 | SPREAD
    order = np.empty(_VOXELS, np.int32)
    order[codes.ravel()] = np.arange(_VOXELS, dtype=np.int32)
    return order


@functools.cache
def _order_on_device(device: int) -> Array:
    import cupy

    order: Array = cupy.asarray(_morton_order())
    cupy.cuda.get_current_stream().synchronize()  # once for each device, so that any stream may use the array
    return order


def _order_for(xp: ModuleType) -> Array:
    return _morton_order() if xp is np else _order_on_device(xp.cuda.runtime.getDevice())


@dataclass
class OccupancyGrid:
    """A cascade of occupancy grids.

    Attributes
    ----------
    density : (mips, 128, 128, 128) float32
        Density of each voxel, axes (mip, z, y, x).
    bits : (mips, 262144) uint8
        A bit for each voxel in Morton order (x in the lowest bit), 1 if the voxel is occupied: its density is above the
        threshold, or it contains an occupied voxel of a finer mip.
    centre : (float, float, float)
        Centre (x, y, z) in the world's units.
    edge : float
        Edge of mip 0 in the world's units; mip m is a cube of edge * 2^m.
    """

    density: Array
    bits: Array
    centre: tuple[float, float, float] = (0.5, 0.5, 0.5)
    edge: float = 1.0

    @classmethod
    def of(
        cls,
        density: Array,
        *,
        threshold: float = 0.0,
        centre: tuple[float, float, float] = (0.5, 0.5, 0.5),
        edge: float = 1.0,
    ) -> OccupancyGrid:
        """Make a grid from densities (mips, 128, 128, 128); voxels above the threshold are occupied, NaN is not.

        Raises
        ------
        ValueError
            Another shape, a threshold that is NaN, a centre that is not finite, or an edge that is not positive and
            finite.
        """
        density = as_array(density)
        if density.ndim != 4 or density.shape[1:] != (GRID_SIZE,) * 3 or not 1 <= density.shape[0] <= _MAX_MIPS:
            raise ValueError(
                f"density of shape {density.shape}: (mips, 128, 128, 128) is needed, 1 to {_MAX_MIPS} mips"
            )
        position, size = _checked_cube(centre, edge)
        _check_threshold(threshold)
        density = density.astype(np.float32)
        return cls(density, _pack(density > threshold), position, size)

    @classmethod
    def from_volume(cls, volume: Array, spacing: Iterable[float], *, threshold: float) -> OccupancyGrid:
        """Make a grid of one mip around a volume, occupied where a voxel above the threshold contributes to a value.

        The volume begins at the origin: voxel (k, j, i) has the centre ((i + 0.5) · spacing_x, (j + 0.5) · spacing_y,
        (k + 0.5) · spacing_z). A value is interpolated linearly between voxel centres. So a voxel of the grid is also
        occupied if only a neighbouring voxel of the volume is above the threshold.

        Parameters
        ----------
        volume : numpy.ndarray or cupy.ndarray, (Z, Y, X)
            Real numbers.
        spacing : (float, float, float)
            Spacing of voxels (Z, Y, X), in µm.
        threshold : float
            Voxels above the threshold are occupied; NaN is not above it.

        Returns
        -------
        OccupancyGrid
            In the memory of the volume, in µm. `density` holds the maximum of the voxels that contribute to a voxel of
            the grid, and 0 where there are none.

        Raises
        ------
        ValueError
            The volume has another number of axes or no real numbers, or the spacing is not three positive numbers.
        """
        volume = as_array(volume)
        _check_threshold(threshold)
        if volume.ndim != 3 or not volume.size or volume.dtype.kind not in "biuf":
            raise ValueError(f"a volume of {volume.dtype} {volume.shape}: real numbers (Z, Y, X) are needed")
        steps = list(map(float, spacing))
        if len(steps) != 3 or not all(0 < step < math.inf for step in steps):
            raise ValueError(f"spacing={spacing}: three positive numbers (Z, Y, X) are needed")
        sizes = [n * step for n, step in zip(volume.shape, steps, strict=True)]
        edge = max(sizes)
        xp = array_module(volume)
        # A maximum must ignore NaN.
        maxima = xp.where(xp.isnan(volume), -math.inf, volume) if volume.dtype.kind == "f" else volume
        for axis, (step, size) in enumerate(zip(steps, sizes, strict=True)):
            maxima = _maxima_along(xp, maxima, axis, step, size / 2 - edge / 2, edge)
        density = xp.where(xp.isneginf(maxima), 0, maxima)
        bits = _pack((maxima > threshold)[None])
        centre = (sizes[2] / 2, sizes[1] / 2, sizes[0] / 2)
        with np.errstate(over="ignore"):  # a density that overflows float32 is infinite, and occupied
            return cls(density[None].astype(np.float32), bits, centre, edge)

    @classmethod
    def from_zarr(
        cls,
        path: str | Path,
        *,
        threshold: float,
        level: int = 0,
        device: DeviceName | None = None,
        spacing: Spacing | None = None,
    ) -> OccupancyGrid:
        """Make a grid from a resolution level (Z, Y, X) of an OME-Zarr image, as :meth:`from_volume` does.

        `device` is as for :func:`linumpy.read_zarr`. A coarse level is read faster, but since its voxels are means, it
        may need a lower threshold. `spacing` is the spacing of level 0 in µm, in the order of axes or by their names,
        for metadata whose spacing is missing or wrong.
        """
        from linumpy.gpu.zarr_io import read_zarr
        from linumpy.io.ome import check_level, open_image

        image = open_image(path, spacing=spacing)
        check_level(level, len(image.levels), image.name)
        steps = image.spacing[level]
        return cls.from_volume(read_zarr(image.levels[level], device=device), steps, threshold=threshold)

    @property
    def mips(self) -> int:
        """Number of mips."""
        return int(self.density.shape[0])

    def update(self, density: Array, *, decay: float = 0.95, threshold: float = 0.01) -> None:
        """Update the densities of a field in training: each becomes the maximum of ``old * decay`` and the new density.

        NaN is ignored. `density` and `bits` become new arrays.

        Parameters
        ----------
        density : (mips, 128, 128, 128) array
            New densities, for example at :meth:`points`; in the memory of the grid.
        decay : float
            From 0, which discards the old densities, to 1.
        threshold : float
            Voxels above the threshold are occupied.

        Raises
        ------
        ValueError
            Another shape, a decay outside 0 to 1, or a threshold that is NaN.
        TypeError
            `density` is on a device and the grid on the host, or vice versa.
        """
        density = as_array(density)
        _check_threshold(threshold)
        if not 0 <= decay <= 1:
            raise ValueError(f"decay={decay}: a number between 0 and 1 is needed")
        if density.shape != self.density.shape:
            raise ValueError(f"density has shape {density.shape}, but the grid's has {self.density.shape}")
        if is_device_array(density) != is_device_array(self.density):
            raise TypeError("density and grid must both be on the host or both on the device")
        xp = array_module(self.density)
        self.density = xp.fmax(self.density * np.float32(decay), density.astype(np.float32))
        self.bits = _pack(self.density > threshold)

    def points(self, mip: int = 0) -> Array:
        """Return the centres of a mip's voxels, (128, 128, 128, 3) float32: (x, y, z) for each index (z, y, x)."""
        xp, mip = array_module(self.density), integer("mip", mip, 0, self.mips - 1)
        edge = self.edge * 2**mip
        line = ((xp.arange(GRID_SIZE) + 0.5) / GRID_SIZE - 0.5) * edge
        axes = [line + c for c in self.centre]
        z, y, x = xp.meshgrid(axes[2], axes[1], axes[0], indexing="ij")
        return xp.stack([x, y, z], axis=-1).astype(np.float32)

    def occupied(self, mip: int = 0) -> Array:
        """Return the bits of a mip as a bool array (128, 128, 128), axes (z, y, x)."""
        xp, mip = array_module(self.bits), integer("mip", mip, 0, self.mips - 1)
        dense = xp.empty(_VOXELS, bool)
        dense[_order_for(xp)] = xp.unpackbits(self.bits[mip], bitorder="little").astype(bool)
        return dense.reshape((GRID_SIZE,) * 3)

    def save(self, path: str | Path) -> None:
        """Write the grid to a file in NumPy's npz format."""
        from linumpy.io.output.files import replacing

        with replacing(Path(path), overwrite=True) as temporary, open(temporary, "wb") as file:
            density, bits = to_host(self.density), to_host(self.bits)
            np.savez_compressed(file, density=density, bits=bits, centre=self.centre, edge=self.edge)

    @classmethod
    def load(cls, path: str | Path, asarray: Callable[[np.ndarray], Array] = np.asarray) -> OccupancyGrid:
        """Read a file of :meth:`save`; pass ``asarray=cupy.asarray`` for a grid on the device.

        Raises
        ------
        OSError
            The file does not exist or cannot be opened.
        SourceError
            The file is damaged, or holds something else.
        """
        with open(path, "rb") as file:
            try:
                with np.load(file, allow_pickle=False) as arrays:
                    saved = {name: arrays[name] for name in arrays.files}
            except Exception as error:  # zipfile, zlib, tokenize and NumPy raise many kinds
                raise SourceError(f"{path} is not an occupancy grid, or it is damaged: {error}") from error
        missing = {"density", "bits", "centre", "edge"} - set(saved)
        if missing:
            raise SourceError(f"{path} is not an occupancy grid: it has no {', '.join(sorted(missing))}")
        density, bits = saved["density"], saved["bits"]
        mips = len(density) if density.ndim else 0
        has_shape = density.shape == (mips, *(GRID_SIZE,) * 3) and bits.shape == (mips, _VOXELS // 8)
        if not has_shape or not 1 <= mips <= _MAX_MIPS or density.dtype.kind != "f" or bits.dtype != np.uint8:
            contents = f"density of {density.dtype} {density.shape}, bits of {bits.dtype} {bits.shape}"
            raise SourceError(f"{path} is not an occupancy grid: {contents}")
        try:
            centre, edge = _checked_cube(saved["centre"], saved["edge"])
        except (TypeError, ValueError) as error:
            raise SourceError(f"{path} is not an occupancy grid: {error}") from error
        return cls(asarray(density.astype(np.float32)), asarray(bits), centre, edge)


def _checked_cube(centre: ArrayLike, edge: ArrayLike) -> tuple[tuple[float, float, float], float]:
    middle, size = np.asarray(centre), np.asarray(edge)
    is_edge = size.ndim == 0 and 0 < size < math.inf
    if not (middle.shape == (3,) and np.isfinite(middle).all() and is_edge):
        raise ValueError(f"centre={centre!s}, edge={edge!s}: three finite numbers and a positive one are needed")
    return (float(middle[0]), float(middle[1]), float(middle[2])), float(size)


def _check_threshold(threshold: float) -> None:
    if math.isnan(threshold):
        raise ValueError(f"threshold={threshold}: a number is needed")


def _pack(occupied: Array) -> Array:
    """Pack bool (mips, 128, 128, 128) into bits; occupied voxels of a mip also make voxels of the next mip occupied."""
    xp = array_module(occupied)
    order, quarter = _order_for(xp), GRID_SIZE // 4
    rows, finer = [], None
    for dense in occupied:
        if finer is not None:
            dense = dense.copy()
            pooled = finer.reshape((GRID_SIZE // 2, 2) * 3).any(axis=(1, 3, 5))
            dense[(slice(quarter, -quarter),) * 3] |= pooled
        rows.append(xp.packbits(dense.reshape(-1)[order], bitorder="little"))
        finer = dense
    return xp.stack(rows)


def _maxima_along(xp: ModuleType, volume: Array, axis: int, step: float, begin: float, edge: float) -> Array:
    """Return the maxima of the voxels that contribute to each of 128 equal parts of an axis, from `begin` over `edge`.

    `step` is the spacing of voxels. A part without voxels gets -inf.
    """
    size, parts = volume.shape[axis], []
    if volume.dtype.kind in "biu":
        volume = volume.astype(np.float64 if volume.dtype.itemsize > 2 else np.float32)
    for part in range(GRID_SIZE):
        first, last = begin + edge * part / GRID_SIZE, begin + edge * (part + 1) / GRID_SIZE
        low, high = max(0, math.floor(first / step - 0.5)), min(size, math.ceil(last / step + 0.5))
        inside = (slice(None),) * axis + (slice(low, high),)
        if low < high and last > 0 and first < size * step:
            parts.append(volume[inside].max(axis=axis))
        else:
            shape = volume.shape[:axis] + volume.shape[axis + 1 :]
            parts.append(xp.full(shape, -math.inf, volume.dtype))
    return xp.stack(parts, axis=axis)
