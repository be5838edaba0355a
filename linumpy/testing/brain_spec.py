"""Parameters of a synthetic brain, of its acquisition and of the faults of the microscope.

In: sizes, lengths in µm, and strengths. Out: frozen records, checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Faults:
    """Strengths of the faults of a microscope; by default there are none.

    Attributes
    ----------
    vignette : float
        Approximate decrease of illumination at the corners of a tile, as a fraction of the maximum. The centre of
        illumination differs from the tile's centre, and moves with depth.
    dark : float
        Mean of the dark field, as a fraction of `peak`; over a tile the dark field varies by half of its mean to each
        side.
    water_um : float
        Depth of the cut surface at the middle of a slice and of a tile; above the surface is water.
    tilt : (float, float)
        Slope of the surface along Y and X (µm of depth per µm).
    focal_um : float
        Depth that focal curvature adds at the corner of a tile, relative to its centre.
    attenuation_per_mm : float
        Attenuation coefficient of tissue whose reflectivity is `peak`; other tissue attenuates in proportion to its
        reflectivity.
    focus_um, rayleigh_um : float
        Depth of the focus in a tile, and Rayleigh length: intensities are multiplied by
        ``1 / (1 + ((z - focus) / rayleigh)²)``. A Rayleigh length of 0 makes no loss.
    falloff_per_mm : float
        Fall-off of sensitivity: intensities are multiplied by ``exp(-(falloff_per_mm * z)²)``, z in mm.
    jitter : float
        Maximum error of a tile's position along Y and X, in voxels; uniform.
    stage_degrees : float
        Angle between the axes of the stage and of the camera.
    rotation_degrees, translation : float
        Maximum rotation of a slice about its middle, and translation along Y and X in voxels; uniform. Slice 0 is not
        moved.
    motor_error : float
        Maximum error of the table of shifts along Y and X, in voxels; uniform.
    galvo : int
        Maximum number of columns by which the tiles of a slice are rotated cyclically along X.
    looks : int
        Number of intensities whose mean is a voxel's speckle: fewer make stronger speckle, 0 makes no speckle.
    missing : tuple of (int, int, int)
        Slice, row and column of tiles that were not recorded: their voxels are 0.
    empty : tuple of int
        Slices that were not recorded: their voxels are 0.
    """

    vignette: float = 0.0
    dark: float = 0.0
    water_um: float = 0.0
    tilt: tuple[float, float] = (0.0, 0.0)
    focal_um: float = 0.0
    attenuation_per_mm: float = 0.0
    focus_um: float = 0.0
    rayleigh_um: float = 0.0
    falloff_per_mm: float = 0.0
    jitter: float = 0.0
    stage_degrees: float = 0.0
    rotation_degrees: float = 0.0
    translation: float = 0.0
    motor_error: float = 0.0
    galvo: int = 0
    looks: int = 0
    missing: tuple[tuple[int, int, int], ...] = ()
    empty: tuple[int, ...] = ()


@dataclass(frozen=True)
class BrainSpec:
    """Parameters of a brain and of its acquisition.

    Attributes
    ----------
    slices : int
        Number of slices, from the top down.
    tiles : (int, int)
        Tiles of a slice along Y and X.
    tile_shape : (int, int, int)
        Voxels of a tile (Z, Y, X).
    overlap : float
        Fraction of a tile that it shares with the next; steps between tiles are whole voxels.
    spacing_um : (float, float, float)
        Voxel spacing (Z, Y, X) in µm.
    interval_um : float
        Thickness that is cut off between slices.
    seed : int
        Seed of structure, faults and speckle.
    dtype : str
        ``"float32"`` or ``"uint16"``.
    peak : float
        Mean reflectivity of grey matter.
    white : float
        Mean reflectivity of white matter, relative to grey matter.
    water : float
        Reflectivity of water and of the surroundings of the brain, relative to grey matter.
    radius : float
        Size of the brain, relative to the size of a slice. Above 1 only the corners are water; infinite for no outline.
    texture_um : (float, float)
        Shortest and longest period of the structure along an axis.
    volume : numpy.ndarray, (Z, Y, X), optional
        Reflectivity of the brain in voxels of `spacing_um`, such as a template, in place of the synthetic one. The
        volume is interpolated linearly, and 0 outside.
    faults : Faults
        Strengths of the faults.

    Raises
    ------
    ValueError
        A parameter out of range.
    """

    slices: int = 4
    tiles: tuple[int, int] = (2, 2)
    tile_shape: tuple[int, int, int] = (32, 48, 48)
    overlap: float = 0.25
    spacing_um: tuple[float, float, float] = (10.0, 10.0, 10.0)
    interval_um: float = 200.0
    seed: int = 0
    dtype: str = "float32"
    peak: float = 4000.0
    white: float = 1.8
    water: float = 0.01
    radius: float = 1.1
    texture_um: tuple[float, float] = (80.0, 600.0)
    volume: np.ndarray | None = field(default=None, compare=False, repr=False)
    faults: Faults = Faults()

    def __post_init__(self) -> None:
        if len(self.tiles) != 2 or len(self.tile_shape) != 3 or min(self.slices, *self.tiles, *self.tile_shape) < 1:
            raise ValueError(f"{self}: pass slices, two numbers of tiles and three of voxels, each from 1 on")
        if not 0 <= self.overlap < 1:
            raise ValueError(f"overlap={self.overlap}: pass a fraction from 0 to below 1")
        if len(self.spacing_um) != 3 or not all(0 < step < np.inf for step in (*self.spacing_um, self.interval_um)):
            raise ValueError(
                f"spacing_um={self.spacing_um}, interval_um={self.interval_um}: pass positive lengths in µm"
            )
        if self.dtype not in ("float32", "uint16"):
            raise ValueError(f"dtype={self.dtype!r}: a brain is float32 or uint16")
        if self.volume is not None and self.volume.ndim != 3:
            raise ValueError(f"volume: an array of {self.volume.ndim} axes is no volume (Z, Y, X)")

    @property
    def step(self) -> tuple[int, int]:
        """Nominal step of the stage from a tile to the next, in voxels along Y and X."""
        y, x = (max(1, round(n * (1 - self.overlap))) for n in self.tile_shape[1:])
        return y, x

    @property
    def interval_planes(self) -> float:
        """Thickness that is cut off between slices, in voxels along Z."""
        return self.interval_um / self.spacing_um[0]

    @property
    def slice_shape(self) -> tuple[int, int, int]:
        """Voxels of a stitched slice (Z, Y, X), by the nominal positions."""
        y, x = ((n - 1) * s + t for n, s, t in zip(self.tiles, self.step, self.tile_shape[1:], strict=True))
        return self.tile_shape[0], y, x

    @property
    def shape(self) -> tuple[int, int, int]:
        """Voxels of the brain (Z, Y, X): its slices without faults."""
        depth, height, width = self.slice_shape
        return math.ceil((self.slices - 1) * self.interval_planes) + depth, height, width

    @property
    def nbytes(self) -> int:
        """Bytes of all tiles."""
        return self.slices * math.prod(self.tiles) * math.prod(self.tile_shape) * np.dtype(self.dtype).itemsize


#: Faults of about the strengths that microscopes have, for tiles of 48 and more voxels.
USUAL_FAULTS = Faults(
    vignette=0.3, dark=0.01, water_um=60.0, tilt=(0.01, -0.02), focal_um=15.0, attenuation_per_mm=2.0, focus_um=150.0,
    rayleigh_um=250.0, falloff_per_mm=0.5, jitter=1.5, stage_degrees=0.3, rotation_degrees=2.0, translation=3.0,
    motor_error=0.5, looks=8,
)  # fmt: skip
