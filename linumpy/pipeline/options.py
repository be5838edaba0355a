"""The options of each stage of the pipeline: frozen records with the parameters and defaults of the library."""

from __future__ import annotations

from dataclasses import dataclass

from linumpy.mosaic.beam import AttenuationMethod


@dataclass(frozen=True)
class Galvo:
    """Options of ``galvo``: :func:`linumpy.mosaic.galvo.fix_galvo_shift`."""

    columns: int | None = None
    min_contrast: float = 1.5


@dataclass(frozen=True)
class Resample:
    """Options of ``resample``: :func:`linumpy.mosaic.grid.resample_mosaic_grid`."""

    new_spacing: float | tuple[float, float, float] = 10.0


@dataclass(frozen=True)
class Survey:
    """``survey`` has no options."""


@dataclass(frozen=True)
class Focal:
    """Options of ``focal``: :class:`linumpy.mosaic.surface.SurfaceMethod` and ``FocalCorrection``."""

    s_xy: int = 15
    s_z: float = 2.0
    interpolate: bool = True


@dataclass(frozen=True)
class Shading:
    """Options of ``shading``: :class:`linumpy.correction.shading.ShadingOptions`."""

    dark: bool = False
    smoothness: float = 1.0
    force: bool = False


@dataclass(frozen=True)
class Illumination:
    """``illumination`` has no options."""


@dataclass(frozen=True)
class Aip:
    """``aip`` has no options."""


@dataclass(frozen=True)
class Surface:
    """Options of ``surface``: :class:`linumpy.mosaic.surface.SurfaceMethod`."""

    s_xy: int = 15
    s_z: float = 2.0
    definition: str = "linumpy"


@dataclass(frozen=True)
class Positions:
    """Options of ``positions``: :func:`linumpy.mosaic.tile_positions.estimate_positions`."""

    overlap: float = 0.2
    min_evidence: float = 0.6


@dataclass(frozen=True)
class Stitch:
    """Options of ``stitch``: :func:`linumpy.mosaic.stitching.stitch_mosaic`."""

    blending: str = "distance"
    interpolate: bool = True


@dataclass(frozen=True)
class Beam(AttenuationMethod):
    """Options of ``beam``: :class:`linumpy.mosaic.beam.AttenuationMethod`, for all slices."""


@dataclass(frozen=True)
class Attenuation:
    """Options of ``attenuation``: :func:`linumpy.mosaic.attenuation.compensate_attenuation`."""

    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class Register:
    """Options of ``register``: :class:`linumpy.mosaic.alignment.register.Alignment`."""

    model: str = "rigid"
    reach: int = 2
    max_angle: float = 10.0
    max_shift: float = 0.25
    min_evidence: float = 0.95
    max_deviation: float = 5.0
    crop: bool = True
    depth_mm: float | None = None


@dataclass(frozen=True)
class Stack:
    """Options of ``stack``: :func:`linumpy.mosaic.common_space.stack_registered`."""

    new_spacing: float | tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Report:
    """``report`` has no options."""


#: The type of each stage's record, in the order in which stages run.
OPTIONS: dict[str, type] = {
    "galvo": Galvo,
    "resample": Resample,
    "survey": Survey,
    "focal": Focal,
    "shading": Shading,
    "illumination": Illumination,
    "positions": Positions,
    "aip": Aip,
    "surface": Surface,
    "stitch": Stitch,
    "beam": Beam,
    "attenuation": Attenuation,
    "register": Register,
    "stack": Stack,
    "report": Report,
}
