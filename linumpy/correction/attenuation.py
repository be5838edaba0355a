"""Attenuation of light along depth.

In: intensities with depth first, on the host or a device, and spacings in µm. Out: attenuation coefficients in 1/mm, or
intensities without attenuation, in the memory of the input. The attenuation µ is resolved in depth after Vermeer et
al., Depth-resolved model-based reconstruction of attenuation coefficients in optical coherence tomography, Biomedical
Optics Express 5:322 (2014). With the intensity I(z) of a voxel of height Δ and the sum S(z) of all light from below it,

    µ(z) = log(1 + I(z) / S(z)) / (2 Δ),    S(z) = Σ_{k > z} I(k) + T.

The paper leaves out T, the light from below the recorded range, and overestimates µ near the end of the range. Here
tissue is assumed to continue below the range with the attenuation µ_end: T = I_end / (exp(2 µ_end Δ) - 1), with the
mean I_end of the last planes. The share of the light that reaches a voxel is I + S at its depth over I + S at the first
plane. This is exact for the same model, so that µ need not be integrated.

I_end of a single A-line has the structure and the speckle of the tissue in the last planes, and T adds both to all
planes above. This would displace structure by some micrometres, differently at each depth.
:func:`estimate_deep_light` therefore predicts T from all A-lines (:class:`DeepLight`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.correction.beam import (
    MIN_PLANES,
    Beam,
    bright_planes,
    clear_light,
    estimate_background,
    first_planes,
    from_surface,
    tissue_lines,
)
from linumpy.device import array_module, to_host

__all__ = [
    "Beam", "DeepLight", "Tissue", "attenuation", "compensate", "estimate_background", "estimate_deep_light",
    "estimate_end", "tissue_of", "trend_per_mm",
]  # fmt: skip

#: Planes at the end of the range whose mean gives I_end.
_END_PLANES = 4
#: Minimum decrease of the logarithm of light over the tissue, from which an attenuation can be told.
_MIN_DECREASE = 0.1
#: Planes of each A-line, from the surface down, where compensation keeps the mean.
_SURFACE_PLANES = 4
#: Bounds of the attenuation below the range in 1/mm, and maximum number of A-lines of a volume from which it is found.
_ENDS, _END_LINES = (0.05, 50.0), 2048


@dataclass(frozen=True, kw_only=True)
class DeepLight:
    """Model of the light T from below the range: ``level - slope * Σ I``, within bounds.

    Σ I is the sum of the light from all voxels of an A-line. If all A-lines receive the same light at the surface and
    backscatter the same share of the light that they attenuate, the slope is 1 and the level is the light at the
    surface. If T does not depend on Σ I, the slope is 0.

    - `level`: in units of the intensity, after the background was subtracted and the loss of the beam was divided out.
    - `slope`: from 0 to 1.
    """

    level: float
    slope: float = 0.0
    lowest: float = 0.0
    highest: float = math.inf

    def below(self, total: Array) -> Array:
        """Return T of each A-line as float32, from the sums Σ I."""
        xp = array_module(total)
        light = np.float32(self.level) - np.float32(self.slope) * total
        return xp.clip(light, np.float32(self.lowest), np.float32(self.highest))


def attenuation(
    volume: Array,
    spacing_um: float,
    beam: Beam | None = None,
    *,
    end_per_mm: float = 0.0,
    deep: DeepLight | None = None,
    background: float = 0.0,
) -> Array:
    """Return the attenuation coefficient of every voxel.

    - `volume` (Z, ...): linear intensity. Voxels that are not finite count as dark.
    - `beam`: loss of the beam, by which intensities are divided first.
    - `end_per_mm`: attenuation below the range; 0 for no light from there, as in the paper.
    - `deep`: light from below the range, in place of the estimate from `end_per_mm` and the last planes of each A-line.
    - `background`: intensity without light, subtracted first.

    Returns: In 1/mm; 0 where a voxel is dark. NaN where a voxel is not finite, or has light but no light comes from
    below.

    Raises `ValueError`: a spacing that is not positive, a negative attenuation, no planes, or voxels that are not real
    numbers.
    """
    xp, light, below = _light(volume, spacing_um, beam, end_per_mm, deep, background)
    # NumPy scalars, because np.where of Python numbers would make everything float64.
    without_below = xp.where(light > 0, np.float32(np.nan), np.float32(0))
    ratio = xp.where(below > 0, light / xp.where(below > 0, below, 1), without_below)
    return _nan_where_not_finite(xp, volume, xp.log1p(ratio) * np.float32(1e3 / (2 * spacing_um)))


def compensate(
    volume: Array,
    spacing_um: float,
    beam: Beam | None = None,
    *,
    end_per_mm: float = 0.0,
    deep: DeepLight | None = None,
    background: float = 0.0,
    scale: float = 1.0,
    max_gain: float = 100.0,
) -> Array:
    """Return intensities without the loss of light in tissue and in the instrument.

    - `volume`, `spacing_um`, `beam`, `end_per_mm`, `deep`, `background`: As for :func:`attenuation`.
    - `scale`: factor of all intensities. The loss of the beam is that at its focus without it.
    - `max_gain`: maximum of the whole factor (of `scale`, beam and attenuation), which limits the noise of dark voxels.

    Returns: NaN where `volume` is not finite.
    """
    if not max_gain >= 1:
        raise ValueError(f"max_gain={max_gain}: pass a factor from 1 on")
    xp, light, below = _light(volume, spacing_um, beam, end_per_mm, deep, background)
    reaching = light + below
    gain = xp.where(reaching > 0, reaching[:1] / xp.where(reaching > 0, reaching, 1), np.float32(np.inf))
    # The light was divided by the loss of the beam, so the largest factor is multiplied by it.
    limit = np.float32(max_gain)
    if beam is not None:
        limit = limit * xp.asarray(beam.factor(len(volume), spacing_um)).reshape(-1, *(1,) * (volume.ndim - 1))
    return _nan_where_not_finite(xp, volume, light * xp.minimum(np.float32(scale) * gain, limit))


def estimate_deep_light(
    volume: Array, spacing_um: float, beam: Beam | None = None, *, end_per_mm: float, background: float = 0.0
) -> DeepLight:
    """Fit the model of the light from below the range to all A-lines.

    The model is a regression of T, estimated from the last planes of each A-line, on Σ I. Both contain the structure of
    the last planes, which would bias the slope. The slope is therefore the ratio of their covariances with the light
    from the upper half of the tissue (an instrumental variable).

    - `volume`, `spacing_um`, `beam`, `background`: As for :func:`attenuation`: some thousand A-lines, spread over the
      tissue. A-lines that show no tissue (:func:`linumpy.correction.beam.tissue_lines`) are left out.

    Returns: With bounds of a third of the mean of T and three times the mean; 0 everywhere without an A-line of tissue.
    """
    xp, light = clear_light(volume, spacing_um, beam, background)
    lines = light.reshape((len(light), -1))
    lines = lines[:, tissue_lines(lines)]
    if not lines.shape[1]:
        return DeepLight(level=0.0)
    planes = np.flatnonzero(from_surface(to_host(lines.mean(axis=1, dtype=np.float64))))
    upper = lines[: planes[0] + (len(lines) - planes[0] + 1) // 2]
    total, above = (part.sum(axis=0, dtype=np.float64) for part in (lines, upper))
    ends = _light_from_below(lines, spacing_um, end_per_mm).astype(np.float64)
    total, above, ends = to_host(xp.stack([total, above, ends]))
    mean, centred = float(ends.mean()), above - above.mean()
    with_total, with_ends = float((centred * total).sum()), -float((centred * ends).sum())
    slope = min(max(with_ends / with_total, 0.0), 1.0) if with_total > 1e-9 * float((above * total).sum()) else 0.0
    return DeepLight(level=mean + slope * float(total.mean()), slope=slope, lowest=mean / 3, highest=3 * mean)


@dataclass(frozen=True, kw_only=True)
class Tissue:
    """The A-lines of tissue in a part of a volume.

    - `lines` (float32, (Z, N)): linear intensity.
    - `first`, `stop`: the planes where the mean A-line shows tissue and is brighter than the background.
    """

    lines: Any
    first: int
    stop: int
    background: float

    @property
    def can_be_told(self) -> bool:
        """Whether there are enough planes to tell an attenuation, and tissue gets darker over them by a tenth."""
        planes = self.stop - self.first
        if planes < MIN_PLANES:
            return False
        _, light = clear_light(self.lines, 1.0, None, self.background)
        return trend_per_mm(light, 1e3, self.first, self.stop) * planes < -_MIN_DECREASE

    def at_surface(self, volume: Array) -> float:
        """Return the mean over the first planes of tissue of each A-line; `volume` has the shape of `lines`."""
        xp, planes = array_module(volume), np.arange(_SURFACE_PLANES)[:, None]
        index = first_planes(self.lines)[None, :] + xp.asarray(planes)
        return float(xp.take_along_axis(volume, xp.minimum(index, len(volume) - 1), axis=0).mean(dtype=np.float64))


def tissue_of(lines: Array, background: float) -> Tissue:
    """Find tissue among A-lines (Z, N) of linear intensity, and the planes where it is brighter than the background."""
    lines = lines.astype(np.float32, copy=False)
    lines = lines[:, tissue_lines(lines)]
    _, light = clear_light(lines, 1.0, None, background)
    profile = to_host(light.mean(axis=1, dtype=np.float64)) if lines.shape[1] else np.zeros(len(lines))
    # If the surface is tilted, the first planes show water in some of the lines.
    first = int(np.argmax(from_surface(profile, 0.95)))
    stop = first + bright_planes(profile[first:], background, float(profile.max())) if profile.max() > 0 else first
    return Tissue(lines=lines, first=first, stop=stop, background=background)


def trend_per_mm(volume: Array, spacing_um: float, first: int, stop: int) -> float:
    """Return the slope of the logarithm of the mean intensity along depth, in 1/mm; NaN counts as dark."""
    xp = array_module(volume)
    means = to_host(xp.nan_to_num(volume[first:stop]).reshape((stop - first, -1)).mean(axis=1, dtype=np.float64))
    return float(np.polyfit(np.arange(len(means)) * spacing_um / 1e3, np.log(np.maximum(means, 1e-30)), 1)[0])


def estimate_end(tissues: Sequence[Tissue], spacing_um: float, beam: Beam | None = None) -> float:
    """Find the attenuation below the range with which compensated tissue has the same brightness at all depths.

    The mean attenuation of a profile would be too low if the tissue varies, because the light from dense parts vanishes
    first. In a single slice tissue need not be the same at all depths; the mean of many slices varies less.

    - `tissues`: of one slice, or of several slices of a brain. Those that cannot be told are left out.
    - `spacing_um`, `beam`: As for :func:`attenuation`.

    Returns: In 1/mm, from 0.05 to 50; 0 if no attenuation can be told.
    """
    usable = [tissue for tissue in tissues if tissue.can_be_told]
    if not usable:
        return 0.0

    def trend(log_end: float) -> float:
        trends = []
        for tissue in usable:
            lines = tissue.lines[:, :: -(-tissue.lines.shape[1] // _END_LINES)]
            light = {"end_per_mm": math.exp(log_end), "background": tissue.background}
            deep = estimate_deep_light(lines, spacing_um, beam, **light)
            even = compensate(lines, spacing_um, beam, deep=deep, background=tissue.background, max_gain=1e9)
            trends.append(trend_per_mm(even, spacing_um, tissue.first, tissue.stop))
        return float(np.mean(trends))

    low, high = map(math.log, _ENDS)
    if trend(low) > 0 or trend(high) < 0:
        return _ENDS[0] if trend(low) > 0 else _ENDS[1]
    from scipy.optimize import brentq

    return math.exp(brentq(trend, low, high, xtol=0.005))


def _light_from_below(light: Any, spacing_um: float, end_per_mm: float) -> Any:
    """Estimate T of each A-line from its last planes; 0 for an attenuation of 0."""
    if not end_per_mm:
        return 0 * light[0]
    optical = 2e-3 * end_per_mm * spacing_um
    planes = np.arange(min(_END_PLANES, len(light)))
    share = 1 / (np.exp(optical * planes).mean() * math.expm1(optical))
    return light[-_END_PLANES:].mean(axis=0) * np.float32(share)


def _light(
    volume: Array, spacing_um: float, beam: Beam | None, end_per_mm: float, deep: DeepLight | None, background: float
) -> tuple[ModuleType, Array, Array]:
    """Return the array module, the light from each voxel (I), and the light from below each voxel (S)."""
    if not 0 < spacing_um < math.inf or not 0 <= end_per_mm < math.inf:
        raise ValueError(f"spacing_um={spacing_um}, end_per_mm={end_per_mm}: pass a spacing above 0, and 0 or more")
    if volume.ndim < 1 or volume.shape[0] == 0 or volume.dtype.kind not in "biuf":
        raise ValueError(f"an array of {volume.dtype} and shape {tuple(volume.shape)} has no intensities along depth")
    xp, light = clear_light(volume, spacing_um, beam, background)
    total = xp.cumsum(light[::-1], axis=0, dtype=np.float32)[::-1]
    below = xp.concatenate([total[1:], xp.zeros_like(total[:1])])
    return (
        xp,
        light,
        below + (_light_from_below(light, spacing_um, end_per_mm) if deep is None else deep.below(total[0])),
    )


def _nan_where_not_finite(xp: ModuleType, volume: Array, result: Array) -> Array:
    """Put NaN where the input is not finite."""
    if volume.dtype.kind != "f":
        return result
    return xp.where(xp.isfinite(volume), result, np.float32(np.nan))
