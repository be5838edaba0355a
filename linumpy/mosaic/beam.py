"""The light of a brain: one beam, one background and one attenuation below the range, estimated from all slices.

In: the slices as OME-Zarr volumes, or parameters of the caller. Out: a :class:`BrainLight`, also as a JSON file. Up to
64 slices are read, and of each up to 16 columns (boxes of the whole depth), of which some thousand A-lines are kept.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from linumpy.arrays import DeviceName
from linumpy.correction.attenuation import (
    Beam,
    DeepLight,
    Tissue,
    compensate,
    estimate_background,
    estimate_deep_light,
    estimate_end,
    tissue_of,
)
from linumpy.correction.beam import BeamEstimate, Profile, block_profile, estimate_beam, tissue_lines
from linumpy.device import array_module, resolve, to_host
from linumpy.errors import MetadataError, SourceError
from linumpy.io.output.files import check_file
from linumpy.io.output.results import notes_of, read_result, write_result
from linumpy.mosaic.io.image import MosaicImage, open_mosaic
from linumpy.mosaic.io.tiles import boxes, column_shape, read_box
from linumpy.mosaic.options import AttenuationMethod
from linumpy.progress import progress_bar

log = logging.getLogger(__name__)

#: Maximum number of slices, of columns of a slice, of A-lines of a slice, and of A-lines of all slices.
_SLICES, _COLUMNS, _LINES, _ALL_LINES = 64, 16, 8192, 2**18
#: Maximum factor of compensation where the background does not allow less.
_MAX_GAIN = 50.0
#: Numbers of the records that may be infinite.
_INFINITE = ("rayleigh_um", "highest")
#: Share of clipped voxels above which a dtype is too small.
MAX_CLIPPED = 1e-3


@dataclass(frozen=True, kw_only=True)
class BrainLight:
    """Parameters that the slices of a brain share.

    - `beam`: loss of the beam; without loss if none is known.
    - `beam_from`: ``"options"``, ``"profiles"`` if it was estimated, or ``"none"``.
    - `estimate`: how well the beam could be told.
    - `end_per_mm`: attenuation below the recorded range.
    - `deep`: mean of the slices' light from below the range.
    - `slices`: number of slices from which the attenuation was told.
    - `surface`: mean intensity of tissue at the surface.
    - `scale`: factor of all intensities, with which tissue at the surface keeps its mean over the slices.
    - `dtype`: the slices' dtype, or float32 if more than 0.1 % of the voxels of a slice would be clipped.
    - `warnings`: what a user should know.
    - `left_out`: why attenuation is not compensated; empty if it is.
    """

    beam: Beam
    beam_from: str
    estimate: BeamEstimate
    background: float
    end_per_mm: float
    deep: DeepLight
    slices: int
    surface: float
    scale: float
    max_gain: float
    dtype: str
    warnings: tuple[str, ...] = ()
    left_out: str = ""

    def described(self) -> str:
        """Return one line for people."""
        beam = (
            "no beam"
            if not math.isfinite(self.beam.rayleigh_um)
            else f"focus at {self.beam.focus_um:.4g} µm, Rayleigh length {self.beam.rayleigh_um:.4g} µm"
        )
        reason = f"; no beam: {self.estimate.reason}" if self.estimate.reason else ""
        return (
            f"background {self.background:.4g}, {beam} (from {self.beam_from}), "
            f"attenuation below the range {self.end_per_mm:.3g} per mm{reason}"
        )


@dataclass(frozen=True)
class Sample:
    """A-lines of a slice.

    Attributes
    ----------
    lines : numpy.ndarray or cupy.ndarray of float32, (Z, N)
        Linear intensity; most neighbours are neighbours in the slice.
    blocks : numpy.ndarray of int, (N,)
        The quarter of the slice in which an A-line lies.
    """

    lines: Any
    blocks: np.ndarray = field(repr=False)


def sample_of(image: MosaicImage, device: DeviceName, max_lines: int = _LINES) -> Sample:
    """Read parts of rows of A-lines in up to 16 columns that are spread over a slice."""
    z, array, height, width = image.depth_axis, image.array, *image.lateral_shape
    columns = list(boxes(array.shape, column_shape(array, z, 1)))
    first, second = image.lateral_axes
    rows = len({box[first].start for box in columns})
    along = len(columns) // rows
    count = min(_COLUMNS, len(columns))
    if count == len(columns):
        chosen = list(range(count))
    else:  # by the golden ratio, so that columns of one row or one multiple are not preferred
        chosen = [int((k + 0.5) / count * rows) * along + int((0.5 + k * 0.618034) % 1 * along) for k in range(count)]
    parts, blocks = [], []
    for box in (columns[k] for k in chosen):
        voxels = read_box(array, box, device)
        xp = array_module(voxels)
        lines = xp.moveaxis(voxels, z, 0)
        number = min(lines.shape[1], max(1, max_lines // count // lines.shape[2]))
        at = (2 * np.arange(number) + 1) * lines.shape[1] // (2 * number)
        parts.append(lines[:, xp.asarray(at)].reshape(len(lines), -1).astype(np.float32))
        lower = box[first].start + at >= height / 2
        right = np.arange(box[second].start, box[second].stop) >= width / 2
        blocks.append((2 * lower[:, None] + right).ravel())
    return Sample(xp.concatenate(parts, axis=1), np.concatenate(blocks))


def estimate_brain_light(
    slices: Mapping[int, str | Path],
    output: str | Path | None = None,
    method: AttenuationMethod | None = None,
    *,
    interval_um: float | None = None,
    channel: int | None = None,
    time: int | None = None,
    spacing: Sequence[float] | None = None,
    device: DeviceName | None = "auto",
    overwrite: bool = False,
) -> BrainLight:
    """Estimate the parameters that all slices of a brain share.

    Parameters
    ----------
    slices : mapping of int to path
        The volumes by number, from the top down: axes z, y and x in any order. Light enters at the first plane.
    output : str or Path, optional
        JSON file to write.
    method : AttenuationMethod, optional
        Parameters that are known; by default all are estimated, without fall-off.
    interval_um : float, optional
        Thickness that is cut off between slices. With it, tissue that neighbours share helps to tell the beam.
    channel, time, spacing, device, overwrite
        As :class:`linumpy.mosaic.io.step.StepOptions` says.

    Raises
    ------
    FileExistsError, FileNotFoundError, SourceError, MetadataError, ValueError, TypeError, GpuUnavailableError
        An existing output, a source that is no volume, slices of different spacing, parameters out of range; no CUDA
        device.
    """
    if not slices:
        raise ValueError("no slices: pass at least one")
    if output is not None:
        check_file(output, overwrite=overwrite)
    images = {number: open_mosaic(path, channel=channel, time=time, spacing=spacing) for number, path in slices.items()}
    images = {number: images[number] for number in _chosen(sorted(images))}
    for image in images.values():
        image.only("attenuation is computed in one volume")
    steps = {number: image.spacing[image.depth_axis] for number, image in images.items()}
    step = next(iter(steps.values()))
    if not np.allclose(list(steps.values()), step, rtol=1e-4, atol=0):
        raise MetadataError(f"slices have different spacings along z, in µm: {sorted(set(steps.values()))}")
    lines = min(_LINES, _ALL_LINES // len(images))
    kind = resolve(device).kind
    samples = {}
    with progress_bar("samples", len(images), "slice") as advance:
        for number, image in images.items():
            samples[number] = sample_of(image, kind, lines)
            advance(1)
    dtype = next(iter(images.values())).array.dtype
    light = brain_light(samples, step, dtype, method or AttenuationMethod(), interval_um)
    for warning in light.warnings:
        log.warning("%s", warning)
    log.info("%s", light.described())
    if output is not None:
        write_result(output, asdict(light), warnings=light.warnings, left_out=light.left_out, overwrite=overwrite)
    return light


def _chosen(numbers: Sequence[int]) -> list[int]:
    """Return at most 64 slices: pairs of neighbours that are spread over the brain."""
    if len(numbers) <= _SLICES:
        return list(numbers)
    begins = np.linspace(0, len(numbers) - 2, _SLICES // 2).astype(int)
    return [numbers[k] for k in sorted({*begins, *(begins + 1)})]


def brain_light(
    samples: Mapping[int, Sample],
    spacing_um: float,
    dtype: np.dtype,
    method: AttenuationMethod,
    interval_um: float | None = None,
) -> BrainLight:
    """Estimate what :func:`estimate_brain_light` writes, from A-lines of each slice and the slices' dtype."""
    background = method.background
    if background is None:
        background = float(np.median([estimate_background(sample.lines) for sample in samples.values()]))
    if method.rayleigh_um is not None and method.focus_um is not None:
        beam = Beam(method.focus_um, method.rayleigh_um, method.falloff_per_mm)
        estimate, beam_from = BeamEstimate(beam=beam), "options"
    else:
        profiles = [p for number, sample in samples.items() for p in _profiles(number, sample, background)]
        estimate = estimate_beam(profiles, spacing_um, interval_um, falloff_per_mm=method.falloff_per_mm)
        beam = estimate.beam or Beam(falloff_per_mm=method.falloff_per_mm)
        beam_from = "none" if estimate.beam is None else "profiles"
    tissues = [tissue_of(sample.lines, background) for sample in samples.values()]
    end = estimate_end(tissues, spacing_um, beam) if method.end_per_mm is None else method.end_per_mm
    usable = [tissue for tissue in tissues if tissue.can_be_told]
    no_tissue = "in no slice is there tissue that gets darker by a tenth over eight planes above the background"
    left_out = "" if usable else no_tissue
    surface = float(np.median([tissue.at_surface(tissue.lines) for tissue in usable])) if usable else 0.0
    max_gain = method.max_gain or max(1.0, min(_MAX_GAIN, surface / background if background else math.inf))
    own = [_own_deep(tissue, spacing_um, beam, end) for tissue in usable]
    deep = _mean_deep(own) if usable else DeepLight(level=0.0, slope=0.0, lowest=0.0, highest=0.0)
    light = BrainLight(
        beam=beam, beam_from=beam_from, estimate=estimate, background=background, end_per_mm=end, deep=deep,
        slices=len(usable), surface=surface, scale=1.0, max_gain=max_gain, dtype=dtype.name,
        warnings=(f"Attenuation is not compensated: {left_out}.",) if left_out else (), left_out=left_out,
    )  # fmt: skip
    return _scaled(light, usable, spacing_um, dtype) if usable else light


def _profiles(number: int, sample: Sample, background: float) -> list[Profile]:
    """Return the profiles of the quarters of a slice."""
    is_tissue = to_host(tissue_lines(sample.lines))
    xp, found = array_module(sample.lines), []
    for block in range(4):
        chosen = np.flatnonzero(is_tissue & (sample.blocks == block))
        found.append(block_profile(sample.lines[:, xp.asarray(chosen)], number, block, background))
    return [profile for profile in found if profile is not None]


def _scaled(light: BrainLight, tissues: Sequence[Tissue], spacing_um: float, dtype: np.dtype) -> BrainLight:
    """Choose the scale and, of all slices, the dtype."""
    even = [light_of(light, tissue, spacing_um)[1] for tissue in tissues]
    pairs = list(zip(tissues, even, strict=True))
    gains = [tissue.at_surface(part) / tissue.at_surface(tissue.lines) for tissue, part in pairs]
    scale = 1 / float(np.mean(gains))
    if dtype.kind not in "iu":
        return replace(light, scale=scale)
    largest = np.iinfo(dtype).max
    clipped = max(float((part * np.float32(scale) > largest).mean()) for part in even)
    return replace(light, scale=scale, dtype=dtype.name if clipped <= MAX_CLIPPED else "float32")


def light_of(light: BrainLight, tissue: Tissue, spacing_um: float) -> tuple[DeepLight, Any]:
    """Return the light from below a slice, and its A-lines of tissue without attenuation.

    The light from below is the mean of what the slice and what the brain tells. Tissue of a slice need not be the same
    at all depths, by which its own estimate errs; the light of a slice may differ, by which the brain's errs.
    """
    lines, beam, dark = tissue.lines, light.beam, light.background
    deep = _mean_deep([_own_deep(tissue, spacing_um, beam, light.end_per_mm), light.deep])
    return deep, compensate(
        lines, spacing_um, beam, deep=deep, background=dark, scale=light.scale, max_gain=light.max_gain
    )


def _own_deep(tissue: Tissue, spacing_um: float, beam: Beam, end_per_mm: float) -> DeepLight:
    return estimate_deep_light(tissue.lines, spacing_um, beam, end_per_mm=end_per_mm, background=tissue.background)


def _mean_deep(parts: Sequence[DeepLight]) -> DeepLight:
    """Return the mean of several models of the light from below."""
    return DeepLight(
        **{member.name: float(np.mean([getattr(part, member.name) for part in parts])) for member in fields(DeepLight)}
    )


def read_brain_light(path: str | Path) -> BrainLight:
    """Read what :func:`estimate_brain_light` wrote.

    Raises `FileNotFoundError`: the file does not exist. `SourceError`: a file that has no parameters of a brain.
    """
    try:
        content = read_result(path)
        for name, record in (("beam", Beam), ("estimate", BeamEstimate), ("deep", DeepLight)):
            content[name] = record(**_with_infinities(content[name]))
        warnings, left_out = notes_of(content)
        return BrainLight(**content | {"warnings": warnings, "left_out": left_out})
    except (ValueError, TypeError, KeyError) as error:
        raise SourceError(f"{path} has no beam of a brain, as linum-estimate-beam writes it ({error})") from error


def _with_infinities(values: dict[str, Any]) -> dict[str, Any]:
    """Put back infinite numbers, which JSON cannot hold, also of the record within."""
    inner = values.get("beam")
    if isinstance(inner, dict):
        return values | {"beam": Beam(**_with_infinities(inner))}
    return values | {name: math.inf for name in _INFINITE if name in values and values[name] is None}
