"""Compensate the attenuation of light along depth and the loss of the beam in a volume, from disk to disk.

In: an OME-Zarr volume, and the light of its brain (:mod:`linumpy.mosaic.beam`). Out: its attenuation coefficients, or
its intensities without attenuation, as OME-Zarr with the same axes, chunks, spacing and origin. First, up to 16 columns
(boxes of the whole depth) are read, from which the light from below the range is estimated. Then the volume is read
once.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Unpack

import numpy as np

from linumpy.arrays import Array
from linumpy.correction.attenuation import (
    DeepLight,
    Tissue,
    attenuation,
    clear_light,
    compensate,
    tissue_of,
    trend_per_mm,
)
from linumpy.device import array_module
from linumpy.io.output.results import write_result
from linumpy.mosaic.beam import (
    MAX_CLIPPED,
    BrainLight,
    brain_light,
    light_of,
    read_brain_light,
    sample_of,
)
from linumpy.mosaic.io.corrected import write_corrected
from linumpy.mosaic.io.step import ImageOptions, Step
from linumpy.mosaic.io.tiles import Box
from linumpy.mosaic.options import AttenuationMethod

log = logging.getLogger(__name__)

#: Minimum brightness of tissue at the surface, relative to that of the brain. Agarose is darker.
_MIN_SURFACE = 0.3


@dataclass(frozen=True, kw_only=True)
class AttenuationUsed:
    """The parameters and the effect of a compensation.

    - `deep`: light from below the recorded range.
    - `attenuation_per_mm`: mean attenuation of the tissue, from its mean profile; None if it cannot be told.
    - `gain_at_surface`: mean factor of the intensities of tissue at the surface; 1 if the volume was left alone.
    - `max_gain`: largest factor that a voxel may have.
    - `clipped`: share of the voxels of the output that are at the largest value of its dtype.
    - `warnings`: what a user should know.
    - `left_out`: why the intensities were left alone; empty if they were compensated.
    """

    light: BrainLight
    deep: DeepLight
    attenuation_per_mm: float | None
    remaining_per_mm: float | None
    gain_at_surface: float
    max_gain: float
    dtype: str
    clipped: float = 0.0
    warnings: tuple[str, ...] = ()
    left_out: str = ""


def compensate_attenuation(
    source: str | Path,
    output: str | Path,
    method: AttenuationMethod | None = None,
    *,
    light: BrainLight | str | Path | None = None,
    coefficients: bool = False,
    dtype: str | None = None,
    report: str | Path | None = None,
    **common: Unpack[ImageOptions],
) -> AttenuationUsed:
    """Write an OME-Zarr volume without attenuation, or its attenuation coefficients.

    Where the attenuation cannot be told, intensities are left alone, with a warning. Tissue at the surface keeps its
    mean over the slices of the brain.

    Parameters
    ----------
    source : str or Path
        The volume: axes z, y and x in any order. Light enters at the first plane along z.
    output : str or Path
        The OME-Zarr image to write.
    method : AttenuationMethod, optional
        Parameters, in place of `light`; those that are None are estimated from this volume alone. If the attenuation
        below the range is given, the volume is compensated in any case.
    light : BrainLight or path, optional
        Parameters of the brain, or the file of :func:`linumpy.mosaic.beam.estimate_brain_light`.
    coefficients : bool
        Whether to write attenuation coefficients in 1/mm, as float32.
    dtype : str, optional
        Dtype of the intensities: integers are rounded and clipped to their range. By default that of `light`: the
        source's dtype, or float32 if more than 0.1 % of the voxels would be clipped.
    report : str or Path, optional
        JSON file to write: the result.
    **common
        :class:`~linumpy.mosaic.io.step.ImageOptions`, which also says what is raised.
    """
    if method is not None and light is not None:
        raise ValueError("pass parameters (method) or those of the brain (light), not both")
    step = Step(output, **common)
    image = step.open(source, one="attenuation is computed in one volume", file=report)
    spacing_um = image.spacing[image.depth_axis]
    with step.work() as work:
        sample = sample_of(image, work.device_here)
        if light is None:
            light = brain_light({0: sample}, spacing_um, image.array.dtype, method or AttenuationMethod())
        elif not isinstance(light, BrainLight):
            light = read_brain_light(light)
        is_forced = coefficients or (method is not None and method.end_per_mm is not None)
        used = _prepared(light, tissue_of(sample.lines, light.background), spacing_um, is_forced=is_forced)
        out_dtype = np.dtype("float32" if coefficients else dtype or light.dtype)
        # The smallest positive intensity that the output can hold.
        smallest = np.float32(1 if out_dtype.kind in "iu" else np.finfo(np.float32).tiny)
        dark, beam, deep, scale, max_gain = light.background, light.beam, used.deep, light.scale, light.max_gain

        def correct(_: Box, voxels: Array) -> Array:
            if coefficients:
                return attenuation(voxels, spacing_um, beam, deep=deep, background=dark)
            if used.left_out:
                return voxels
            clear = compensate(voxels, spacing_um, beam, deep=deep, background=dark, scale=scale, max_gain=max_gain)
            # Later steps treat 0 as not measured, so a measured voxel as dark as the background must not become 0.
            xp = array_module(voxels)
            return xp.where(voxels > 0, xp.maximum(clear, smallest), clear)

        clipped = write_corrected(image, step, step.column(image, work), correct, work, dtype=out_dtype)
    used = replace(
        used, clipped=clipped, dtype=out_dtype.name, warnings=_warnings(used, image.array.dtype, out_dtype, clipped)
    )
    for warning in used.warnings:
        log.warning("%s: %s", image.name, warning)
    log.info("%s: %s", image.name, light.described())
    if report is not None:
        numbers = asdict(used) | {"light": light.described()}
        write_result(report, numbers, warnings=used.warnings, left_out=used.left_out, overwrite=step.overwrite)
    return used


def _prepared(light: BrainLight, tissue: Tissue, spacing_um: float, *, is_forced: bool) -> AttenuationUsed:
    """Estimate the light from below the range, and decide whether to compensate."""
    surface = tissue.at_surface(tissue.lines) if tissue.lines.shape[1] else 0.0
    used = AttenuationUsed(
        light=light, deep=light.deep, attenuation_per_mm=None, remaining_per_mm=None, gain_at_surface=1.0,
        max_gain=light.max_gain, dtype=light.dtype, left_out=light.left_out,
    )  # fmt: skip
    if not surface:
        return replace(used, left_out=light.left_out or "there is no tissue")
    deep, even = light_of(light, tissue, spacing_um)
    used = replace(used, deep=deep)
    if surface < _MIN_SURFACE * light.surface:
        reason = f"at the surface it has {surface:.4g}, and tissue of the brain {light.surface:.4g}: there is no tissue"
        used = replace(used, left_out=reason)
    before = after = None
    if tissue.can_be_told:
        parts = (clear_light(tissue.lines, spacing_um, light.beam, light.background)[1], tissue.lines, even)
        without_beam, before, after = (-trend_per_mm(part, spacing_um, tissue.first, tissue.stop) / 2 for part in parts)
        used = replace(used, attenuation_per_mm=without_beam, remaining_per_mm=before)
        # The flatness of a single slice is no proof: a brain's light was told from many.
        if light.slices < 2 and abs(after) >= abs(before) and not used.left_out:
            reason = f"{after:.2g} per mm would be left, and {before:.2g} without compensation"
            used = replace(used, left_out=reason)
    if used.left_out and not is_forced:
        return used
    gain = tissue.at_surface(even) / surface
    return replace(used, remaining_per_mm=after, gain_at_surface=gain, left_out="")


def _warnings(used: AttenuationUsed, dtype: np.dtype, out_dtype: np.dtype, clipped: float) -> tuple[str, ...]:
    """Return what a user should know."""
    warnings = []
    if used.left_out:
        warnings.append(f"Attenuation is not compensated: {used.left_out}.")
    if out_dtype.kind == "f" and dtype.kind in "iu":
        warnings.append(f"Intensities are written as float32, because {dtype} would clip more than 0.1 % of them.")
    if clipped > MAX_CLIPPED:
        warnings.append(
            f"{100 * clipped:.2g} % of the voxels are clipped at the largest {out_dtype}: write all values with "
            '--dtype float32 (dtype = "float32" of the stage attenuation).'
        )
    return tuple(warnings)
