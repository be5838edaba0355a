"""The options of the steps: frozen records, each checked when it is made, from which commands and pipeline take theirs.

A field's :class:`~linumpy.declared.Help` describes it. A value out of range is a ``ValueError``. Only light modules are
imported here: a command's help needs the records and not the steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from linumpy.declared import Count, Declared, Help, NotNegative, Positive, Range, Share

#: Definitions of the surface.
Definition = Literal["linumpy", "edge"]
#: Voxel spacing in µm along all axes, or along z, y and x.
Spacing = Positive | tuple[Positive, Positive, Positive]


@dataclass(frozen=True, kw_only=True)
class Smoothing(Declared):
    """How intensities are smoothed before the surface is detected."""

    s_xy: Annotated[Count, Help("Lateral mean over N × N voxels.", "N")] = 15
    s_z: Annotated[Positive, Help("Standard deviation of the Gaussian along z, voxels.", "S")] = 2.0


@dataclass(frozen=True, kw_only=True)
class SurfaceMethod(Smoothing):
    """Parameters of the surface detection; see :func:`linumpy.geometry.interface.find_tissue_interface`.

    With the definition ``"edge"`` the map is NaN where there is no tissue, and infinity where the surface of tissue is
    not found.
    """

    use_log: Annotated[bool, Help("Use the logarithm of the intensity, or the intensity.", option="log")] = True
    detect_cutting_errors: Annotated[
        bool, Help("Where the smoothed intensity has its maximum above the surface, take the maximum as the surface.")
    ] = False
    definition: Annotated[
        Definition,
        Help(
            "linumpy: s_z / 2 below the voxel of the steepest rise, that is about s_z / 2 + 1 voxels below the edge. "
            "edge: the edge itself, to fractions of a voxel, where its contrast suffices."
        ),
    ] = "linumpy"
    min_contrast: Annotated[
        NotNegative, Help("Minimum contrast of an edge: its rise over the noise along its A-line.", "C")
    ] = 5.0


@dataclass(frozen=True)
class FocalCorrection(Declared):
    """How A-lines are shifted; see :func:`linumpy.geometry.focal.correct_focal_curvature`."""

    interpolate: Annotated[bool, Help("Shift by fractions of voxels. [by whole voxels]")] = False
    wrap: Annotated[bool, Help("Let voxels that leave at one end enter at the other.")] = False
    fill_value: Annotated[
        float | None,
        Help("Value of voxels from outside, without --wrap. [the nearest measured voxel of the A-line]", "V"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class AttenuationMethod(Declared):
    """How attenuation is computed; parameters that are None are estimated from the data.

    The fall-off of sensitivity, from the calibration of the instrument, is not estimated. Focus and Rayleigh length
    (:class:`linumpy.correction.beam.Beam`) are passed both or not at all; an infinite Rayleigh length needs no
    focus. By default the maximum factor is that with which the background is as bright as tissue at the surface, but at
    most 50.
    """

    focus_um: Annotated[
        Annotated[float, Range()] | None,
        Help("Depth of the focus along z, in µm; with --rayleigh. [estimated]", "UM", option="focus"),
    ] = None
    rayleigh_um: Annotated[
        Annotated[float, Range(above=0, infinite=True)] | None,
        Help(
            "Rayleigh length in tissue, in µm; inf for no beam. [estimated if it can be told from the attenuation]",
            "UM",
            option="rayleigh",
        ),
    ] = None
    falloff_per_mm: Annotated[
        NotNegative, Help("Fall-off of sensitivity in 1/mm: exp(-(F z)²).", "F", option="falloff")
    ] = 0.0
    end_per_mm: Annotated[
        NotNegative | None,
        Help(
            "Attenuation below the recorded range in 1/mm; 0 for no light from there. [estimated]", "MU", option="end"
        ),
    ] = None
    background: Annotated[
        Annotated[float, Range()] | None, Help("Intensity without light. [estimated from speckle]", "I")
    ] = None
    max_gain: Annotated[
        Positive | None,
        Help(
            "Maximum factor of compensation. [with which the background is as bright as tissue at the surface; 50]", "G"
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.focus_um is None and self.rayleigh_um == math.inf:
            object.__setattr__(self, "focus_um", 0.0)
        if (self.focus_um is None) != (self.rayleigh_um is None):
            raise ValueError(f"focus_um={self.focus_um}, rayleigh_um={self.rayleigh_um}: pass both or none")


@dataclass(frozen=True, kw_only=True)
class Registration(Declared):
    """How slices are registered, besides the interval between them."""

    model: Annotated[Literal["rigid", "affine", "translation"], Help("Transforms in the plane of the slices.")] = (
        "rigid"
    )
    reach: Annotated[Count, Help("Compare each slice with the next N slices.", "N")] = 2
    max_angle: Annotated[float, Range(least=0, most=180), Help("Maximum rotation to search, to each side.", "DEG")] = (
        10.0
    )
    max_shift: Annotated[Share, Help("Maximum shift to search, as a fraction of the slice.", "F")] = 0.25
    min_evidence: Annotated[Share, Help("Reject pairs that are less probably right.", "P")] = 0.95
    max_deviation: Annotated[
        float,
        Range(above=0, infinite=True),
        Help("Reject pairs further than D robust standard deviations from the solution of all pairs.", "D"),
    ] = 5.0
    crop: Annotated[
        bool, Help("Look for the cut surfaces of the slices, or let slices begin at their first plane.")
    ] = True
    depth_mm: Annotated[Positive | None, Help("Use slices to this depth below their surface. [all]", "MM")] = None


#: Thickness that is cut off between slices.
Interval = Annotated[Positive, Help("Thickness cut off between slices.", "MM", option="slicing-interval-mm")]


@dataclass(frozen=True, kw_only=True)
class Alignment(Registration):
    """How slices are aligned: :class:`Registration`, and the thickness that is cut off between slices."""

    interval_mm: Interval


@dataclass(frozen=True)
class ZSearch(Declared):
    """Parameters of the search for overlaps along Z; see :func:`linumpy.mosaic.stacking.enforce_z_consistency`."""

    slicing_interval_mm: Interval
    search_range_mm: Annotated[
        NotNegative, Help("Largest distance of an overlap from the expected one, to each side.", "MM")
    ] = 0.1
    min_correlation: Annotated[float, Range(least=-1, most=1), Help("Replace overlaps that correlate less.", "R")] = 0.2
    max_deviation: Annotated[
        float,
        Range(least=0, infinite=True),
        Help("Replace overlaps further than D robust standard deviations from the typical overlap.", "D"),
    ] = 3.0


@dataclass(frozen=True)
class Galvo(Declared):
    """Options of :func:`linumpy.mosaic.galvo.fix_galvo_shift`."""

    columns: Annotated[int | None, Help("Columns by which tiles are rotated. [detected]", "N")] = None
    min_contrast: Annotated[
        NotNegative,
        Help(
            "Minimum contrast of a seam: the difference of its columns over the greatest difference of other "
            "neighbouring columns.",
            "C",
        ),
    ] = 1.5


@dataclass(frozen=True)
class Positions(Declared):
    """Options of :func:`linumpy.mosaic.tile_positions.estimate_positions`."""

    overlap: Annotated[
        float,
        Range(above=0, most=0.5),
        Help(
            "Nominal overlap of neighbouring tiles, as a share of a tile; the true overlap may differ by three "
            "quarters of the nominal one.",
            "SHARE",
        ),
    ] = 0.2
    min_evidence: Annotated[Share, Help("A shift is rejected if it is right with less probability.", "P")] = 0.6


@dataclass(frozen=True)
class Stitch(Declared):
    """Options of :func:`linumpy.mosaic.stitching.stitch_mosaic`."""

    blending: Annotated[
        Literal["distance", "diffusion"],
        Help(
            "Weights of tiles where they overlap: by the distance to their borders, or by diffusion from the parts "
            "where one tile lies alone, which also suits displaced tiles."
        ),
    ] = "distance"
    interpolate: Annotated[
        bool, Help("Place tiles to fractions of voxels, interpolated linearly, or at the nearest whole voxel.")
    ] = True


@dataclass(frozen=True)
class Normalization(Declared):
    """Options of :func:`linumpy.mosaic.intensities.normalize_intensities`."""

    per: Annotated[Literal["plane", "slice"], Help("Take percentiles of each plane or of the slice.")] = "plane"
    clip: Annotated[bool, Help("Clip intensities to 0 and 1.")] = True
