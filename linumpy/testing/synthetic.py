"""Synthetic OCT mosaics with a known surface.

A mosaic is a volume (Z, Y, X) of several tiles, depth first: water above, then tissue whose surface is tilted and
curved. The focal curvature of the objective is added to the surface in each tile. Intensity falls with depth by the law
of Beer and Lambert, for light that goes down and back. It is multiplied by speckle, the mean of `looks` exponentially
distributed intensities (Goodman, Speckle Phenomena in Optics, 2007, ch. 3). A voxel depends only on the parameters and
its coordinates, so any box can be made by itself.

In: a :class:`MosaicSpec`. Out: boxes of voxels, the true surface, an OME-Zarr image written chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from linumpy.arrays import Array
from linumpy.declared import Count, Declared, Positive, Range
from linumpy.device import usable_cores
from linumpy.errors import RegionError
from linumpy.testing.texture import Dtype, log_normal, speckle, stored, sum_of_waves

if TYPE_CHECKING:
    from linumpy.write.writer import OmeZarrWriter, Progress

#: Number of plane waves in the structure of the tissue.
_WAVES = 6


@dataclass(frozen=True)
class MosaicSpec(Declared):
    """Parameters of a mosaic.

    - `tiles` (int, int): tiles along Y and X.
    - `tile_shape` (int, int, int): voxels of a tile (Z, Y, X).
    - `spacing_um` (float, float, float): voxel spacing (Z, Y, X) in µm.
    - `seed`: seed of structure and speckle.
    - `dtype`: ``"float32"`` or ``"uint16"``.
    - `water_um`: depth of the surface in the middle of the mosaic; negative for tissue that begins above the first
      voxel.
    - `tilt` (float, float): slope of the surface along Y and X (µm of depth per µm).
    - `curvature_um`: depth that curvature adds to the surface at the middle of an edge, relative to the middle of the
      mosaic.
    - `focal_um`: depth that focal curvature adds at the corner of a tile, relative to its centre.
    - `attenuation_per_mm`: attenuation coefficient of the tissue, 1/mm.
    - `looks`: number of intensities whose mean is a voxel's speckle; fewer make stronger speckle.
    - `peak`: mean intensity at the surface.
    - `noise`: mean intensity of the water.
    - `slice_number`: number of the slice: speckle differs from slice to slice, structure does not.
    - `first_plane`: plane of the tissue's structure at the first plane of the volume.
    """

    tiles: tuple[Count, Count] = (2, 2)
    tile_shape: tuple[Count, Count, Count] = (112, 96, 96)
    spacing_um: tuple[Positive, Positive, Positive] = (5.0, 10.0, 10.0)
    seed: Annotated[int, Range(least=0)] = 0
    dtype: Dtype = "float32"
    water_um: float = 120.0
    tilt: tuple[float, float] = (0.01, -0.015)
    curvature_um: float = 30.0
    focal_um: float = 10.0
    attenuation_per_mm: float = 4.0
    looks: Count = 4
    peak: float = 4000.0
    noise: float = 40.0
    slice_number: int = 0
    first_plane: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Voxels of the mosaic (Z, Y, X)."""
        depth, height, width = self.tile_shape
        return depth, self.tiles[0] * height, self.tiles[1] * width

    @property
    def nbytes(self) -> int:
        """Bytes of the mosaic."""
        depth, height, width = self.shape
        return depth * height * width * np.dtype(self.dtype).itemsize


#: Mosaics of 16 MiB, 1 GiB and 8 GiB.
SIZES = {
    "small": MosaicSpec(),
    "medium": MosaicSpec(tiles=(4, 4), tile_shape=(256, 256, 256), water_um=300.0, attenuation_per_mm=2.0),
    "large": MosaicSpec(tiles=(8, 8), tile_shape=(512, 256, 256), spacing_um=(3.0, 10.0, 10.0), water_um=300.0),
}

_Bounds = tuple[int, int]


def tissue_depth(spec: MosaicSpec, rows: _Bounds | None = None, columns: _Bounds | None = None) -> np.ndarray:
    """Return the depth of the tissue's surface without focal curvature.

    - `rows`, `columns` (int, int): voxels along Y and X; by default all.

    Returns: In voxels along Z. A voxel whose index is at least this depth is tissue.
    """
    y, x = (  # in µm from the middle of the mosaic
        (_indices(spec, axis, bounds) - (spec.shape[axis] - 1) / 2) * spec.spacing_um[axis]
        for axis, bounds in ((1, rows), (2, columns))
    )
    half = [n * s / 2 for n, s in zip(spec.shape[1:], spec.spacing_um[1:], strict=True)]
    bowl = spec.curvature_um * ((y / half[0]) ** 2 + (x / half[1]) ** 2)
    return (spec.water_um + spec.tilt[0] * y + spec.tilt[1] * x + bowl) / spec.spacing_um[0]


def surface_depth(spec: MosaicSpec, rows: _Bounds | None = None, columns: _Bounds | None = None) -> np.ndarray:
    """Return the depth of the surface in the volume, with the focal curvature of each tile.

    Parameters and result are those of :func:`tissue_depth`.
    """
    v, u = (_within_tile(spec, axis, bounds) for axis, bounds in ((1, rows), (2, columns)))
    return tissue_depth(spec, rows, columns) + spec.focal_um * (v**2 + u**2) / 2 / spec.spacing_um[0]


def _indices(spec: MosaicSpec, axis: int, bounds: _Bounds | None) -> np.ndarray:
    index = np.arange(*(bounds or (0, spec.shape[axis])), dtype=np.float64)
    return index[:, None] if axis == 1 else index[None, :]


def _within_tile(spec: MosaicSpec, axis: int, bounds: _Bounds | None) -> np.ndarray:
    """Return coordinates within the tile, from -1 at its first voxel to 1 at its last."""
    size = spec.tile_shape[axis]
    return (_indices(spec, axis, bounds) % size) / max(1, size - 1) * 2 - 1


def block(spec: MosaicSpec, start: tuple[int, int, int], stop: tuple[int, int, int]) -> np.ndarray:
    """Make a box of the mosaic.

    - `start`, `stop` (int, int, int): bounds (Z, Y, X) in voxels.

    Returns: In the dtype of the mosaic. Voxels do not depend on the box.
    """
    if not all(0 <= a <= b <= n for a, b, n in zip(start, stop, spec.shape, strict=True)):
        raise RegionError(f"the box from {tuple(start)} to {tuple(stop)} does not lie in a mosaic of {spec.shape}")
    surface = surface_depth(spec, (start[1], stop[1]), (start[2], stop[2])).astype(np.float32)
    index = np.arange(start[0], stop[0], dtype=np.float32)[:, None, None]
    below = (index - surface[None]) * np.float32(spec.spacing_um[0] / 1e3)
    mean = np.exp(np.float32(-2 * spec.attenuation_per_mm) * np.maximum(below, 0))
    mean *= np.where(below >= 0, np.float32(spec.peak), np.float32(0))
    # Waves are equal in all slices.
    z, y, x = (np.arange(a, b, dtype=np.float64) for a, b in zip(start, stop, strict=True))
    waves = sum_of_waves((spec.seed, 1), _WAVES, (40, 300), spec.spacing_um, (z + spec.first_plane, 0, y[:, None], x))
    mean *= log_normal(waves, _WAVES)
    mean += np.float32(spec.noise)
    mean *= speckle((spec.seed, 2, spec.slice_number), spec.looks, start, stop)
    return stored(mean, spec.dtype)


def write_mosaic(
    path: str | Path,
    spec: MosaicSpec,
    *,
    chunks: tuple[int, int, int] | None = None,
    shards: tuple[int, int, int] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a mosaic as an OME-Zarr image, chunk by chunk.

    - `chunks`, `shards`, `overwrite`, `progress`: As for :class:`linumpy.write.writer.OmeZarrWriter`.

    Returns: `path`. The true depths are :func:`surface_depth` and :func:`tissue_depth` of `spec`; the metadata has the
    tile shape.
    """
    from linumpy.write.writer import OmeZarrWriter

    attributes = {"linumpy": {"tile_shape": dict(zip("yx", spec.tile_shape[1:], strict=True))}}
    with OmeZarrWriter(
        path, spec.shape, spec.dtype, spec.spacing_um, chunks=chunks, shards=shards, overwrite=overwrite,
        attributes=attributes,
    ) as writer:  # fmt: skip

        def make(box: tuple[slice, ...]) -> np.ndarray:
            depth, rows, columns = ((b.start, b.stop) for b in box)
            return block(spec, *zip(depth, rows, columns, strict=True))  # type: ignore[arg-type]

        write_boxes(writer, make, progress)
    return Path(path)


def write_boxes(
    writer: OmeZarrWriter,
    make: Callable[[tuple[slice, ...]], Array],
    progress: Progress | None,
    threads: int | None = None,
) -> None:
    """Make an image in threads, one chunk or shard after another, and write it; `progress` is called with the bytes."""
    from linumpy.io.zarr_mode import in_mode_of_caller

    def write(box: tuple[slice, ...]) -> int:
        voxels = make(box)
        writer[box] = voxels
        return int(voxels.nbytes)

    pool = ThreadPoolExecutor(threads or min(8, usable_cores()), "linumpy-synthetic", in_mode_of_caller())
    try:
        for nbytes in pool.map(write, writer.regions(nbytes=0)):
            if progress is not None:
                progress(nbytes)
    finally:
        pool.shutdown(cancel_futures=True)
