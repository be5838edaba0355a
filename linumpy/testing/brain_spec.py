"""Parameters of a synthetic brain, of its acquisition and of the faults of the microscope.

In: sizes, lengths in µm, and strengths, or a seed to draw them by. Out: frozen records, checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

import numpy as np

from linumpy.declared import Count, Declared, Positive, Range, Share
from linumpy.testing.texture import Dtype

#: Kinds of structure (:mod:`linumpy.testing.anatomy`).
ANATOMIES = ("waves", "lattice", "layers")


@dataclass(frozen=True)
class Faults:
    """Strengths of the faults of a microscope; by default there are none.

    - `vignette`: approximate decrease of illumination at the corners of a tile, as a fraction of the maximum.
    - `vignette_centre`, `vignette_drift` (float, float): centre of illumination along Y and X at the first plane of a
      tile, and its move to the last plane, where -1 and 1 are the first and the last voxel of the tile.
    - `dark`: mean of the dark field, as a fraction of `peak`; over a tile the dark field varies by half of its mean to
      each side.
    - `water_um`: depth of the cut surface at the middle of a slice and of a tile; above the surface is water.
    - `tilt` (float, float): slope of the surface along Y and X (µm of depth per µm).
    - `focal_um`: depth that focal curvature adds at the corner of a tile, relative to its centre.
    - `attenuation_per_mm`: attenuation coefficient of tissue whose reflectivity is `peak`; other tissue attenuates in
      proportion to its reflectivity.
    - `agarose_looks`: looks of the speckle of the surroundings; 0 for those of tissue.
    - `focus_um`, `rayleigh_um`: depth of the focus in a tile, and Rayleigh length: intensities are multiplied by ``1 /
      (1 + ((z - focus) / rayleigh)²)``. A Rayleigh length of 0 makes no loss.
    - `falloff_per_mm`: fall-off of sensitivity: intensities are multiplied by ``exp(-(falloff_per_mm * z)²)``, z in mm.
    - `jitter`: maximum error of a tile's position along Y and X, in voxels; uniform.
    - `overlap_error`: the true overlap less the nominal one that users are told, as a fraction of a tile.
    - `stage_degrees`: angle between the axes of the stage and of the camera.
    - `rotation_degrees`, `translation`: maximum rotation of a slice about its middle, and translation along Y and X in
      voxels; uniform. Slice 0 is not moved.
    - `warp`: maximum displacement of a smooth deformation of a slice in its plane, along Y and X in voxels. Slice 0 is
      not deformed.
    - `motor_error`: maximum error of the table of shifts along Y and X, in voxels; uniform.
    - `galvo`: maximum number of columns by which the tiles of a slice are rotated cyclically along X.
    - `looks`: number of intensities whose mean is a voxel's speckle: fewer make stronger speckle, 0 makes no speckle.
    - `missing` (int, int, int): slice, row and column of tiles that were not recorded: their voxels are 0.
    - `empty`: slices that were not recorded: their voxels are 0.
    - `absent`: slices that are not written to disk: their numbers are left out.
    """

    vignette: float = 0.0
    vignette_centre: tuple[float, float] = (0.1, -0.1)
    vignette_drift: tuple[float, float] = (0.15, -0.15)
    dark: float = 0.0
    water_um: float = 0.0
    tilt: tuple[float, float] = (0.0, 0.0)
    focal_um: float = 0.0
    attenuation_per_mm: float = 0.0
    agarose_looks: int = 0
    focus_um: float = 0.0
    rayleigh_um: float = 0.0
    falloff_per_mm: float = 0.0
    jitter: float = 0.0
    overlap_error: float = 0.0
    stage_degrees: float = 0.0
    rotation_degrees: float = 0.0
    translation: float = 0.0
    warp: float = 0.0
    motor_error: float = 0.0
    galvo: int = 0
    looks: int = 0
    missing: tuple[tuple[int, int, int], ...] = ()
    empty: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()


@dataclass(frozen=True)
class BrainSpec(Declared):
    """Parameters of a brain and of its acquisition.

    - `slices`: number of slices, from the top down.
    - `tiles` (int, int): tiles of a slice along Y and X.
    - `tile_shape` (int, int, int): voxels of a tile (Z, Y, X).
    - `overlap`: nominal fraction of a tile that it shares with the next; steps between tiles are whole voxels.
    - `spacing_um` (float, float, float): voxel spacing (Z, Y, X) in µm.
    - `interval_um`: thickness that is cut off between slices.
    - `seed`: seed of structure, faults and speckle.
    - `dtype`: ``"float32"`` or ``"uint16"``.
    - `anatomy` ("waves", "lattice", "layers"): kind of structure: plane waves with smooth borders between tissues;
      noise on lattices of several periods, with sharp borders and thin bright fibres; or folded layers with dark
      vessels.
    - `peak`: mean reflectivity of grey matter.
    - `white`: mean reflectivity of white matter, relative to grey matter.
    - `water`: reflectivity of water, relative to grey matter.
    - `agarose`: mean reflectivity of the surroundings of the brain below the surface, relative to grey matter; by
      default water.
    - `radius`: size of the brain, relative to the size of a slice. Above 1 only the corners are water; infinite for no
      outline.
    - `coverage`: share of a slice that is tissue, at the top of the brain: with an irregular outline, off centre, in
      place of the outline of `radius`.
    - `texture_um` (float, float): shortest and longest period of the structure along an axis.
    - `volume` (Z, Y, X): reflectivity of the brain in voxels of `spacing_um`, such as a template, in place of the
      synthetic one. The volume is interpolated linearly, and 0 outside.
    """

    slices: Count = 4
    tiles: tuple[Count, Count] = (2, 2)
    tile_shape: tuple[Count, Count, Count] = (32, 48, 48)
    overlap: Share = 0.25
    spacing_um: tuple[Positive, Positive, Positive] = (10.0, 10.0, 10.0)
    interval_um: Positive = 200.0
    seed: int = 0
    dtype: Dtype = "float32"
    anatomy: Literal["waves", "lattice", "layers"] = "waves"
    peak: float = 4000.0
    white: float = 1.8
    water: float = 0.01
    agarose: float | None = None
    radius: float = 1.1
    coverage: Annotated[float, Range(above=0, most=1)] | None = None
    texture_um: tuple[float, float] = (80.0, 600.0)
    volume: np.ndarray | None = field(default=None, compare=False, repr=False)
    faults: Faults = Faults()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.overlap < 1 and 0 <= self.overlap + self.faults.overlap_error < 1):
            raise ValueError(
                f"overlap={self.overlap}, overlap_error={self.faults.overlap_error}: the overlap is from 0 to below 1"
            )
        if self.volume is not None and self.volume.ndim != 3:
            raise ValueError(f"volume: an array of {self.volume.ndim} axes is no volume (Z, Y, X)")

    @property
    def step(self) -> tuple[int, int]:
        """Nominal step of the stage from a tile to the next, in voxels along Y and X."""
        return self._step(self.overlap)

    @property
    def true_step(self) -> tuple[int, int]:
        """True step of the stage: the nominal one unless the overlap has an error."""
        return self._step(self.overlap + self.faults.overlap_error)

    def _step(self, overlap: float) -> tuple[int, int]:
        y, x = (max(1, round(n * (1 - overlap))) for n in self.tile_shape[1:])
        return y, x

    @property
    def interval_planes(self) -> float:
        """Thickness that is cut off between slices, in voxels along Z."""
        return self.interval_um / self.spacing_um[0]

    @property
    def slice_shape(self) -> tuple[int, int, int]:
        """Voxels of a stitched slice (Z, Y, X), by regular positions of the true step."""
        y, x = ((n - 1) * s + t for n, s, t in zip(self.tiles, self.true_step, self.tile_shape[1:], strict=True))
        return self.tile_shape[0], y, x

    @property
    def shape(self) -> tuple[int, int, int]:
        """Voxels of the brain (Z, Y, X): its slices without faults."""
        depth, height, width = self.slice_shape
        return math.ceil((self.slices - 1) * self.interval_planes) + depth, height, width

    @property
    def written(self) -> tuple[int, ...]:
        """Numbers of the slices on disk."""
        return tuple(number for number in range(self.slices) if number not in self.faults.absent)

    @property
    def nbytes(self) -> int:
        """Bytes of all tiles that are written."""
        return len(self.written) * math.prod(self.tiles) * math.prod(self.tile_shape) * np.dtype(self.dtype).itemsize


#: Faults of about the strengths that microscopes have, for tiles of 48 and more voxels.
USUAL_FAULTS = Faults(
    vignette=0.3, dark=0.01, water_um=60.0, tilt=(0.01, -0.02), focal_um=15.0, attenuation_per_mm=2.0, focus_um=150.0,
    rayleigh_um=250.0, falloff_per_mm=0.5, jitter=1.5, stage_degrees=0.3, rotation_degrees=2.0, translation=3.0,
    motor_error=0.5, looks=8,
)  # fmt: skip

#: Bounds of the uniform distributions of a drawn brain, by kind: of the faults, of both parts of a pair, of the brain.
_DRAWN: dict[str, dict[str, tuple[float, float]]] = {
    "full": {
        "vignette": (0.1, 0.4), "dark": (0.0, 0.015), "water_um": (50, 90), "focal_um": (5, 20),
        "attenuation_per_mm": (1.0, 3.0), "focus_um": (100, 250), "rayleigh_um": (150, 400), "falloff_per_mm": (0, 0.6),
        "jitter": (0.5, 2.0), "overlap_error": (-0.02, 0.02), "stage_degrees": (-0.5, 0.5),
        "rotation_degrees": (0.5, 2.0), "translation": (1.0, 4.0), "motor_error": (0.3, 1.0), "warp": (0.0, 0.3),
        "vignette_centre": (-0.3, 0.3), "vignette_drift": (-0.15, 0.15), "tilt": (-0.02, 0.02),
        "overlap": (0.2, 0.3), "interval_um": (150, 200), "white": (1.4, 2.2),
    },
}  # fmt: skip
_DRAWN["partial"] = {**_DRAWN["full"], "coverage": (0.4, 0.7), "agarose": (0.05, 0.25)}
_DRAWN["severe"] = {
    **_DRAWN["partial"], "vignette": (0.4, 0.6), "dark": (0.015, 0.025), "water_um": (80, 110), "focal_um": (10, 30),
    "attenuation_per_mm": (3.5, 4.5), "jitter": (1.0, 3.0), "overlap_error": (-0.03, 0.03),
    "stage_degrees": (-1.5, 1.5), "rotation_degrees": (1.0, 3.0), "translation": (2.0, 6.0), "motor_error": (0.5, 2.0),
    "warp": (0.2, 1.0), "tilt": (-0.03, 0.03), "overlap": (0.2, 0.2), "interval_um": (100, 150),
    "coverage": (0.55, 0.65),
}  # fmt: skip
#: Slices, tiles and bounds of the looks of a drawn brain, by kind.
_SIZES = {"full": (4, (3, 3), (4, 16)), "partial": (4, (3, 4), (4, 16)), "severe": (5, (4, 5), (4, 4))}


def draw_brain(seed: int, kind: str, scale: float = 1.0, geometry: BrainSpec | None = None) -> BrainSpec:
    """Draw a brain: its structure, its outline and all of its faults.

    - `seed`: the same seed and kind draw the same brain.
    - `kind` ("full", "partial", "severe"): ``"full"``: tissue fills the slices, and faults have about the strengths of
      :data:`USUAL_FAULTS`. ``"partial"``: 40 to 70 % of a slice are tissue, the rest is agarose. ``"severe"``: 55 to 65
      % are tissue, faults are strong, and one slice is absent.
    - `scale`: size of tiles, relative to 40 x 64 x 64 voxels of 10 µm.
    - `geometry`: slices, tiles, spacing, interval, dtype and maximum galvo shift, in place of those of the kind. Drawn
      lengths in voxels, which are those of 10 µm, become as long in µm.
    """
    if kind not in _DRAWN:
        raise ValueError(f"kind={kind!r}: choose one of {', '.join(_DRAWN)}")
    rng = np.random.default_rng([seed, list(_DRAWN).index(kind)])
    pairs = ("vignette_centre", "vignette_drift", "tilt")
    drawn: dict[str, Any] = {
        name: tuple(map(float, rng.uniform(*bounds, 2))) if name in pairs else float(rng.uniform(*bounds))
        for name, bounds in _DRAWN[kind].items()
    }
    slices, tiles, looks = _SIZES[kind]
    drawn["looks"] = int(rng.integers(looks[0], looks[1] + 1))
    drawn["agarose_looks"] = 4 * drawn["looks"]
    slices = slices if geometry is None else geometry.slices
    absent = int(rng.integers(1, max(2, slices - 1)))
    drawn["absent"] = (absent,) if kind == "severe" else ()
    drawn["anatomy"], drawn["dtype"] = str(rng.choice(ANATOMIES)), str(rng.choice(["float32", "uint16"]))
    faults = Faults(**{part.name: drawn.pop(part.name) for part in fields(Faults) if part.name in drawn})
    spec = BrainSpec(
        slices=slices, tiles=tiles, tile_shape=(round(40 * scale), round(64 * scale), round(64 * scale)), seed=seed,
        radius=np.inf, faults=faults, **drawn,
    )  # fmt: skip
    return spec if geometry is None else _on_geometry(spec, geometry)


def _on_geometry(spec: BrainSpec, geometry: BrainSpec) -> BrainSpec:
    """Return a drawn brain with the tiles of another; its tilt is limited so that the surface stays in the tiles."""
    taken = ("slices", "tiles", "tile_shape", "spacing_um", "interval_um", "dtype")
    spec = replace(spec, **{name: getattr(geometry, name) for name in taken})
    voxel_um = spec.spacing_um[2]
    extent_um = sum(n * voxel_um for n in spec.slice_shape[1:])
    lengths = {
        name: getattr(spec.faults, name) * 10 / voxel_um for name in ("jitter", "translation", "motor_error", "warp")
    }
    y, x = (slope * min(1.0, 3000 / extent_um) for slope in spec.faults.tilt)
    return replace(spec, faults=replace(spec.faults, tilt=(y, x), galvo=geometry.faults.galvo, **lengths))
