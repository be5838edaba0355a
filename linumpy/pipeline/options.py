"""The options of each stage of the pipeline: frozen records, of the library's own parameters and defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Resample:
    """Options of ``resample``: :func:`linumpy.mosaic.grid.resample_mosaic_grid`."""

    new_spacing: float | tuple[float, float, float] = 10.0
    tile_shape: tuple[int, int] | None = None


@dataclass(frozen=True)
class Survey:
    """``survey`` has no options."""


@dataclass(frozen=True)
class Focal:
    """Options of ``focal``: :class:`linumpy.mosaic.surface.SurfaceMethod` and ``FocalCorrection``."""

    s_xy: int = 15
    s_z: float = 2.0
    interpolate: bool = False


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
    min_confidence: float = 0.3


@dataclass(frozen=True)
class Stack:
    """Options of ``stack``: :class:`linumpy.mosaic.slices.ZSearch`."""

    search_range_mm: float = 0.1
    min_correlation: float = 0.2
    max_deviation: float = 3.0


#: The record of each stage, in the order in which they are carried out.
OPTIONS: dict[str, type] = {
    "resample": Resample,
    "survey": Survey,
    "focal": Focal,
    "aip": Aip,
    "surface": Surface,
    "positions": Positions,
    "stack": Stack,
}
