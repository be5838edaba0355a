"""The options of each stage of the pipeline: frozen records with the parameters and defaults of the library.

A record is checked when it is made (:mod:`linumpy.declared`), which is before the first stage of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from linumpy.correction.shading import ShadingOptions
from linumpy.declared import Declared
from linumpy.mosaic.options import (
    AttenuationMethod,
    Definition,
    Galvo,
    Positions,
    Registration,
    Smoothing,
    Spacing,
    Stitch,
)


@dataclass(frozen=True)
class NoOptions(Declared):
    """Of a stage without options."""


@dataclass(frozen=True)
class Resample(Declared):
    """Options of ``resample``: :func:`linumpy.mosaic.grid.resample_mosaic_grid`."""

    new_spacing: Spacing = 10.0


@dataclass(frozen=True, kw_only=True)
class Focal(Smoothing):
    """Options of ``focal``: :class:`linumpy.mosaic.options.SurfaceMethod` and ``FocalCorrection``."""

    interpolate: bool = True


@dataclass(frozen=True, kw_only=True)
class Surface(Smoothing):
    """Options of ``surface``: :class:`linumpy.mosaic.options.SurfaceMethod`."""

    definition: Definition = "linumpy"


@dataclass(frozen=True)
class Attenuation(Declared):
    """Options of ``attenuation``: :func:`linumpy.mosaic.attenuation.compensate_attenuation`."""

    dtype: Literal["float32", "uint8", "uint16"] | None = None


@dataclass(frozen=True)
class Stack(Declared):
    """Options of ``stack``: :func:`linumpy.mosaic.alignment.stack.stack_registered`."""

    new_spacing: Spacing | None = None


#: The type of each stage's record, in the order in which stages run.
OPTIONS: dict[str, type] = {
    "galvo": Galvo,
    "resample": Resample,
    "survey": NoOptions,
    "focal": Focal,
    "shading": ShadingOptions,
    "illumination": NoOptions,
    "positions": Positions,
    "aip": NoOptions,
    "surface": Surface,
    "stitch": Stitch,
    "beam": AttenuationMethod,
    "attenuation": Attenuation,
    "register": Registration,
    "stack": Stack,
    "report": NoOptions,
}
