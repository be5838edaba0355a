"""The options of each stage of the pipeline: frozen records with the parameters and defaults of the library.

A record is checked when it is made (:mod:`linumpy.declared`), which is before the first stage of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from linumpy.correction.shading import ShadingOptions
from linumpy.declared import Count, Declared, NotNegative, Positive, Range, Share
from linumpy.mosaic.beam import AttenuationMethod
from linumpy.mosaic.surface import Definition
from linumpy.registration.positions import Overlap

#: Voxel spacing in µm along all axes, or along z, y and x.
Spacing = Positive | tuple[Positive, Positive, Positive]


@dataclass(frozen=True)
class Galvo(Declared):
    """Options of ``galvo``: :func:`linumpy.mosaic.galvo.fix_galvo_shift`."""

    columns: int | None = None
    min_contrast: NotNegative = 1.5


@dataclass(frozen=True)
class Resample(Declared):
    """Options of ``resample``: :func:`linumpy.mosaic.grid.resample_mosaic_grid`."""

    new_spacing: Spacing = 10.0


@dataclass(frozen=True)
class Survey(Declared):
    """``survey`` has no options."""


@dataclass(frozen=True)
class Focal(Declared):
    """Options of ``focal``: :class:`linumpy.mosaic.surface.SurfaceMethod` and ``FocalCorrection``."""

    s_xy: Count = 15
    s_z: Positive = 2.0
    interpolate: bool = True


@dataclass(frozen=True)
class Shading(ShadingOptions):
    """Options of ``shading``: :class:`linumpy.correction.shading.ShadingOptions`."""


@dataclass(frozen=True)
class Illumination(Declared):
    """``illumination`` has no options."""


@dataclass(frozen=True)
class Aip(Declared):
    """``aip`` has no options."""


@dataclass(frozen=True)
class Surface(Declared):
    """Options of ``surface``: :class:`linumpy.mosaic.surface.SurfaceMethod`."""

    s_xy: Count = 15
    s_z: Positive = 2.0
    definition: Definition = "linumpy"


@dataclass(frozen=True)
class Positions(Declared):
    """Options of ``positions``: :func:`linumpy.mosaic.tile_positions.estimate_positions`."""

    overlap: Overlap = 0.2
    min_evidence: Share = 0.6


@dataclass(frozen=True)
class Stitch(Declared):
    """Options of ``stitch``: :func:`linumpy.mosaic.stitching.stitch_mosaic`."""

    blending: Literal["distance", "diffusion"] = "distance"
    interpolate: bool = True


@dataclass(frozen=True)
class Beam(AttenuationMethod):
    """Options of ``beam``: :class:`linumpy.mosaic.beam.AttenuationMethod`, for all slices."""


@dataclass(frozen=True)
class Attenuation(Declared):
    """Options of ``attenuation``: :func:`linumpy.mosaic.attenuation.compensate_attenuation`."""

    dtype: Literal["float32", "uint8", "uint16"] | None = None


@dataclass(frozen=True, kw_only=True)
class Register(Declared):
    """Options of ``register``: :class:`linumpy.mosaic.alignment.register.Alignment`."""

    model: Literal["rigid", "affine", "translation"] = "rigid"
    reach: Count = 2
    max_angle: Annotated[float, Range(least=0, most=180)] = 10.0
    max_shift: Share = 0.25
    min_evidence: Share = 0.95
    max_deviation: Annotated[float, Range(above=0, infinite=True)] = 5.0
    crop: bool = True
    depth_mm: Positive | None = None


@dataclass(frozen=True)
class Stack(Declared):
    """Options of ``stack``: :func:`linumpy.mosaic.common_space.stack_registered`."""

    new_spacing: Spacing | None = None


@dataclass(frozen=True)
class Report(Declared):
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
