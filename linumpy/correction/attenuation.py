"""Attenuation of light along depth, and the loss of a confocal beam and of the spectrometer.

In: intensities with depth first, on the host or a device, and spacings in µm. Out: attenuation coefficients in 1/mm, or
intensities without attenuation, there too. The attenuation is resolved in depth after Vermeer et al., Depth-resolved
model-based reconstruction of attenuation coefficients in optical coherence tomography, Biomedical Optics Express 5:322
(2014): with the sum S of all light that comes from below a voxel of height Δ,

    µ(z) = log(1 + I(z) / S(z)) / (2 Δ),    S(z) = Σ_{k > z} I(k) + T.

The paper leaves out T, the light from below the recorded range, and overestimates µ near its end. Here it is what comes
from there if tissue goes on with the attenuation µ_end: T = I_end / (exp(2 µ_end Δ) - 1), with the mean I_end of the
last planes. The light that reaches a voxel is (I + S) at this depth over that at the first, which is exact for the same
model, so that no integral of µ is taken.

I_end of one A-line has the structure and the speckle of the tissue there, and T carries them up into the planes above:
what they show is then displaced by some micrometres, differently at each depth. :func:`estimate_deep_light` takes T
from all A-lines instead: as the light that has not come back from the range predicts it (:class:`DeepLight`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, to_host

#: Planes at the end of the range whose mean gives I_end.
_END_PLANES = 4
#: Planes below the brightest one, of less than this fraction of its mean, show how speckle falls with the intensity.
_DIM, _DIM_PLANES = 0.6, 6
#: The darkest plane, relative to the brightest, from which the line is not extended to no light.
_DARK = 0.2
#: Profiles of lines with like surfaces, and planes of tissue that are left out of them: the first are part water.
_GROUPS, _RIM = 8, 2
#: Root mean square misfit of logarithms above which profiles do not have one incident light.
_MISFIT = 0.15


@dataclass(frozen=True)
class Beam:
    """How much light is lost along depth without any tissue.

    Attributes
    ----------
    focus_um : float
        Depth of the focus, from the first plane.
    rayleigh_um : float
        Rayleigh length of the beam in tissue; infinite for no loss beside the focus.
    falloff_per_mm : float
        Fall-off of the spectrometer's sensitivity: ``exp(-(falloff_per_mm * z)²)``.
    """

    focus_um: float = 0.0
    rayleigh_um: float = math.inf
    falloff_per_mm: float = 0.0

    def __post_init__(self) -> None:
        if not self.rayleigh_um > 0 or not math.isfinite(self.focus_um) or not 0 <= self.falloff_per_mm < math.inf:
            raise ValueError(f"{self}: pass a finite focus, a positive Rayleigh length and a fall-off from 0 on")

    def factor(self, planes: int, spacing_um: float) -> np.ndarray:
        """Return the factor of the intensity of each plane, plane k being at depth ``k * spacing_um``: float32."""
        z = np.arange(planes) * spacing_um
        gate = 1 / (1 + ((z - self.focus_um) / self.rayleigh_um) ** 2)
        return np.asarray(gate * np.exp(-((self.falloff_per_mm * z / 1e3) ** 2)), np.float32)


@dataclass(frozen=True)
class DeepLight:
    """Light T from below the range, by the sum Σ I of the light from an A-line: ``level - slope * Σ I``, within bounds.

    If all A-lines receive the same light at the surface and backscatter the same part of what they attenuate, the slope
    is 1 and the level is that light. If light that comes back tells nothing of what goes on, the slope is 0.

    Attributes
    ----------
    level : float
        In units of the intensity, without background and loss of the beam.
    slope : float
        From 0 to 1.
    lowest, highest : float
        Bounds of T.
    """

    level: float
    slope: float = 0.0
    lowest: float = 0.0
    highest: float = math.inf

    def below(self, total: Any) -> Any:
        """Return T of A-lines by the sums of their light, as float32."""
        xp = array_module(total)
        light = np.float32(self.level) - np.float32(self.slope) * total
        return xp.clip(light, np.float32(self.lowest), np.float32(self.highest))


@dataclass(frozen=True)
class DepthProfile:
    """What :func:`estimate_beam` finds.

    Attributes
    ----------
    beam : Beam
        Focus, Rayleigh length and fall-off.
    attenuation_per_mm : float
        Mean attenuation of the tissue, which is that below the range, too.
    rms : float
        Root mean square of what the fit leaves of the logarithm of the profile.
    """

    beam: Beam
    attenuation_per_mm: float
    rms: float


def attenuation(
    volume: Array,
    spacing_um: float,
    beam: Beam | None = None,
    *,
    end_per_mm: float = 0.0,
    deep: DeepLight | None = None,
    background: float = 0.0,
) -> Any:
    """Return the attenuation coefficient of every voxel.

    Parameters
    ----------
    volume : numpy.ndarray or cupy.ndarray, (Z, ...)
        Intensity, linear. Voxels that are not finite count as dark.
    spacing_um : float
        Voxel spacing along Z.
    beam : Beam, optional
        Loss of the beam, which is divided out first.
    end_per_mm : float
        Attenuation below the range; 0 for no light from there, as in the paper.
    deep : DeepLight, optional
        Light from below the range, in place of what `end_per_mm` and the last planes of each A-line tell.
    background : float
        Intensity without light, subtracted first.

    Returns
    -------
    array of float32, (Z, ...)
        In 1/mm; 0 where a voxel is dark, NaN where it is not finite, or has light and none comes from below it.

    Raises
    ------
    ValueError
        A spacing or an attenuation that is none, or no planes.
    """
    xp, light, below = _light(volume, spacing_um, beam, end_per_mm, deep, background)
    # Of two Python numbers np.where makes float64, and all that follows with it.
    without = xp.where(light > 0, np.float32(np.nan), np.float32(0))
    ratio = xp.where(below > 0, light / xp.where(below > 0, below, 1), without)
    return _mark(xp, volume, xp.log1p(ratio) * np.float32(1e3 / (2 * spacing_um)))


def compensate(
    volume: Array,
    spacing_um: float,
    beam: Beam | None = None,
    *,
    end_per_mm: float = 0.0,
    deep: DeepLight | None = None,
    background: float = 0.0,
    max_gain: float = 100.0,
) -> Any:
    """Return intensities as if no light was lost on its way, in tissue or in the instrument.

    Parameters
    ----------
    volume, spacing_um, beam, end_per_mm, deep, background
        As for :func:`attenuation`.
    max_gain : float
        Factor at most by which attenuation is compensated, which limits the noise of dark voxels far below.

    Returns
    -------
    array of float32, (Z, ...)
        NaN where `volume` is not finite.
    """
    if not max_gain >= 1:
        raise ValueError(f"max_gain={max_gain}: pass a factor from 1 on")
    xp, light, below = _light(volume, spacing_um, beam, end_per_mm, deep, background)
    reaching = light + below
    gain = xp.where(reaching > 0, reaching[:1] / xp.where(reaching > 0, reaching, 1), max_gain)
    return _mark(xp, volume, light * xp.minimum(gain, np.float32(max_gain)))


def estimate_deep_light(
    volume: Array, spacing_um: float, beam: Beam | None = None, *, end_per_mm: float, background: float = 0.0
) -> DeepLight:
    """Predict the light from below the range by the light from within it: a line through all A-lines.

    Its slope is that of T, as the last planes of each A-line tell it, on Σ I, both by how they vary with the light from
    the upper half of the tissue alone (an instrumental variable): Σ I has the last planes in it, whose structure T has.

    Parameters
    ----------
    volume, spacing_um, beam, background
        As for :func:`attenuation`: some thousand A-lines, spread over the tissue. Those with less than half of the
        light that bright ones have are left out: they show water, or are not whole.
    end_per_mm : float
        Attenuation below the range.

    Returns
    -------
    DeepLight
        Bounded by a third and three times of its mean.

    Raises
    ------
    ValueError
        As :func:`attenuation`.
    """
    xp, light = _clear(volume, spacing_um, beam, end_per_mm, background)
    lines = _tissue_lines(light)
    if not lines.shape[1]:
        return DeepLight(0.0)
    planes = np.flatnonzero(_from_surface(to_host(lines.mean(axis=1, dtype=np.float64))))
    upper = lines[: planes[0] + (len(lines) - planes[0] + 1) // 2]
    total, above = (part.sum(axis=0, dtype=np.float64) for part in (lines, upper))
    ends = _from_below(lines, spacing_um, end_per_mm).astype(np.float64)
    total, above, ends = to_host(xp.stack([total, above, ends]))
    mean, apart = float(ends.mean()), above - above.mean()
    shared, told = float((apart * total).sum()), -float((apart * ends).sum())
    slope = min(max(told / shared, 0.0), 1.0) if shared > 1e-9 * float((above * total).sum()) else 0.0
    return DeepLight(mean + slope * float(total.mean()), slope, mean / 3, 3 * mean)


def estimate_end(volume: Array, spacing_um: float, beam: Beam | None = None, *, background: float = 0.0) -> float:
    """Find the attenuation below the range with which tissue is as bright at all depths once it is compensated.

    The mean attenuation of a profile (:func:`estimate_beam`) is less than that where the tissue varies: dense parts are
    the first to be dark. Bisected, by :func:`estimate_deep_light`.

    Parameters
    ----------
    volume, spacing_um, beam, background
        As for :func:`estimate_deep_light`.

    Returns
    -------
    float
        In 1/mm, from 0.05 to 50; 0 for fewer than eight planes of tissue.
    """
    _, light = _clear(volume, spacing_um, beam, 0.0, background)
    lines = _tissue_lines(light)
    profile = to_host(lines.mean(axis=1, dtype=np.float64)) if lines.shape[1] else np.zeros(1)
    # Where the surface is tilted, the first planes show water in part of the lines.
    planes = np.flatnonzero(_from_surface(profile, 0.95))
    if len(planes) < 8:
        return 0.0

    def trend(end_per_mm: float) -> float:
        deep = estimate_deep_light(lines, spacing_um, end_per_mm=end_per_mm)
        means = to_host(compensate(lines, spacing_um, deep=deep)[planes[0] :].mean(axis=1, dtype=np.float64))
        return float(np.polyfit(planes, np.log(np.maximum(means[planes - planes[0]], 1e-30)), 1)[0])

    low, high = 0.05, 50.0
    for _ in range(14):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if trend(middle) < 0 else (low, middle)
    return math.sqrt(low * high)


def _tissue_lines(light: Any) -> Any:
    """Return the A-lines of tissue: (Z, N)."""
    return light.reshape(len(light), -1)[:, _tissue(light)]


def _tissue(light: Any) -> Any:
    """Tell which A-lines have at least half of the light that bright ones have: (N,)."""
    total = light.reshape(len(light), -1).sum(axis=0)
    if not total.size:
        return total > 0
    return (total > 0) & (total >= 0.5 * array_module(light).percentile(total, 90))


def _from_surface(profile: np.ndarray, share: float = 0.5) -> np.ndarray:
    """Tell which planes have light and lie at or below the first that has this share of the largest mean."""
    usable: np.ndarray = np.isfinite(profile) & (profile > 0)
    if usable.any():
        usable &= np.arange(len(profile)) >= int(
            np.argmax(np.where(usable, profile, 0) >= share * profile[usable].max())
        )
    return usable


def _clear(
    volume: Array, spacing_um: float, beam: Beam | None, end_per_mm: float, background: float
) -> tuple[ModuleType, Any]:
    """Return the array module, and the light from each voxel without background and loss of the beam."""
    if not 0 < spacing_um < math.inf or not 0 <= end_per_mm < math.inf:
        raise ValueError(f"spacing_um={spacing_um}, end_per_mm={end_per_mm}: pass a spacing above 0, and 0 or more")
    if volume.ndim < 1 or volume.shape[0] == 0 or volume.dtype.kind not in "biuf":
        raise ValueError(f"an array of {volume.dtype} and shape {tuple(volume.shape)} has no intensities along depth")
    xp = array_module(volume)
    light = volume.astype(np.float32, copy=False)
    light = xp.maximum(xp.where(xp.isfinite(light), light, 0) - np.float32(background), 0)
    if beam is not None:
        factor = xp.asarray(beam.factor(len(volume), spacing_um))
        light = light / xp.maximum(factor, np.float32(1e-6)).reshape(-1, *(1,) * (volume.ndim - 1))
    return xp, light


def _from_below(light: Any, spacing_um: float, end_per_mm: float) -> Any:
    """Return the light from below each A-line, as its last planes tell."""
    if not end_per_mm:
        return 0 * light[0]
    optical = 2e-3 * end_per_mm * spacing_um
    planes = np.arange(min(_END_PLANES, len(light)))
    share = 1 / (np.exp(optical * planes).mean() * math.expm1(optical))
    return light[-_END_PLANES:].mean(axis=0) * np.float32(share)


def _light(
    volume: Array, spacing_um: float, beam: Beam | None, end_per_mm: float, deep: DeepLight | None, background: float
) -> tuple[ModuleType, Any, Any]:
    """Return the array module, the light from each voxel and that from below it."""
    xp, light = _clear(volume, spacing_um, beam, end_per_mm, background)
    total = xp.cumsum(light[::-1], axis=0, dtype=np.float32)[::-1]
    below = xp.concatenate([total[1:], xp.zeros_like(total[:1])])
    return xp, light, below + (_from_below(light, spacing_um, end_per_mm) if deep is None else deep.below(total[0]))


def _mark(xp: ModuleType, volume: Array, result: Any) -> Any:
    """Put NaN where the input is not finite."""
    if volume.dtype.kind != "f":
        return result
    return xp.where(xp.isfinite(volume), result, np.float32(np.nan))


def estimate_background(volume: Array) -> float:
    """Estimate the constant that is added to all intensities, by the speckle of each plane.

    Speckle is in proportion to the light, so its strength falls to 0 where the intensity is that without light: a line
    through planes of tissue, of the median difference of neighbours along the last axis against the mean. A detector
    whose noise is as strong as its background hides the latter from this: there, pass the one that was measured.

    Parameters
    ----------
    volume : numpy.ndarray or cupy.ndarray, (Z, ..., X)
        Intensity, linear. Only A-lines without a voxel that is 0 or not finite are used.

    Returns
    -------
    float
        From 0 to the mean of the darkest plane of tissue; 0 where there are fewer than six dim planes, or the darkest
        has more than a fifth of the light of the brightest.
    """
    xp = array_module(volume)
    whole = (xp.isfinite(volume) & (volume > 0)).all(axis=0)
    both = whole[..., 1:] & whole[..., :-1]
    if not bool(both.any()):
        return 0.0
    means, strengths = [], []
    for plane in volume:
        plane = plane.astype(np.float32)
        means.append(plane[..., 1:][both].mean())
        strengths.append(xp.median(xp.abs(plane[..., 1:] - plane[..., :-1])[both]))
    mean, strength = to_host(xp.stack([xp.stack(means), xp.stack(strengths)])).astype(np.float64)
    brightest = int(np.argmax(mean))
    dim = (np.arange(len(mean)) > brightest) & (mean < _DIM * mean[brightest])
    if dim.sum() < _DIM_PLANES or mean[dim].min() > _DARK * mean[brightest]:
        return 0.0
    slope, at_none = np.polyfit(mean[dim], strength[dim], 1, w=1 / mean[dim])
    if not slope > 0:
        return 0.0
    return float(np.clip(-at_none / slope, 0.0, mean[dim].min()))


def depth_profiles(volume: Array, background: float = 0.0) -> np.ndarray:
    """Average A-lines of tissue whose surface lies at about the same depth.

    The mean of all lines would show water above the tissue where the surface is tilted.

    Parameters
    ----------
    volume : numpy.ndarray or cupy.ndarray, (Z, ...)
        Intensity, linear. Voxels that are not finite are left out, and lines with less than half of the light that
        bright ones have.
    background : float
        Intensity without light, subtracted first.

    Returns
    -------
    numpy.ndarray of float64, (Z, K)
        At most eight profiles, from the highest surface to the lowest; NaN where no voxel is known.
    """
    xp, light = _clear(volume, 1.0, None, 0.0, background)
    known = xp.isfinite(volume).reshape(len(volume), -1)
    lines, known = (part[:, _tissue(light)] for part in (light.reshape(len(light), -1), known))
    if not lines.shape[1]:
        return np.full((len(light), 1), np.nan)
    smooth = lines.copy()  # of three planes, by which speckle moves a surface less
    smooth[1:-1] += lines[:-2] + lines[2:]
    smooth[1:-1] /= 3
    surface = to_host(xp.argmax(smooth >= 0.5 * smooth.max(axis=0), axis=0))
    groups = np.array_split(np.argsort(surface, kind="stable"), min(_GROUPS, len(surface)))
    sums = [[part[:, xp.asarray(g)].sum(axis=1, dtype=np.float64) for part in (lines, known)] for g in groups]
    total, count = (to_host(xp.stack(parts, axis=1)) for parts in zip(*sums, strict=True))
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def estimate_beam(profiles: np.ndarray, spacing_um: float, *, falloff_per_mm: float | None = 0.0) -> DepthProfile:
    """Fit focus, Rayleigh length and attenuation to mean intensities along depth.

    A profile of tissue of even attenuation, whose surface is at s, is ``c exp(-2 µ (z - s)) exp(-(f z)²) /
    (1 + ((z - focus) / rayleigh)²)``. All are fitted by their logarithms with one c, from the third plane of tissue to
    the last, with a robust norm: tissue begins at the first plane that has half of the largest intensity. What changes
    with z is the beam, and what changes with z - s the attenuation, which surfaces at several depths tell apart. Where
    they do not fit, because tissue differs more than surfaces do, their mean is fitted. A fall-off looks much like the
    far side of a focus: give it, where it is known.

    Parameters
    ----------
    profiles : numpy.ndarray, (Z,) or (Z, K)
        Mean intensities of tissue, without background, such as :func:`depth_profiles` gives.
    spacing_um : float
        Voxel spacing along Z.
    falloff_per_mm : float, optional
        Fall-off of sensitivity; None to fit it, too.

    Returns
    -------
    DepthProfile
        With fewer than eight usable planes: no loss of the beam, and no attenuation.
    """
    from scipy.optimize import least_squares

    profiles = np.asarray(profiles, np.float64).reshape(len(profiles), -1)
    tissue = np.stack([_from_surface(profile) for profile in profiles.T], axis=1)
    surface = np.argmax(tissue, axis=0)
    usable = tissue & (np.arange(len(profiles))[:, None] >= surface + _RIM)
    if usable.any(axis=1).sum() < 8:
        return DepthProfile(Beam(falloff_per_mm=falloff_per_mm or 0.0), 0.0, 0.0)
    planes, columns = np.nonzero(usable)
    z, below = planes * spacing_um / 1e3, (planes - surface[columns]) * spacing_um / 1e3
    log = np.log(profiles[usable])
    depth = float(z.max() - z.min())

    def misfit(p: np.ndarray) -> np.ndarray:
        level, focus, narrowness, mu, falloff = (*p, falloff_per_mm) if falloff_per_mm is not None else p
        return np.asarray(level - 2 * mu * below - np.log1p(((z - focus) * narrowness) ** 2) - (falloff * z) ** 2 - log)

    bounds = [(-np.inf, np.inf), (z.min() - depth, z.max() + depth), (0.0, 20 / depth), (0.0, 100.0), (0.0, 3 / depth)]
    low, high = zip(*bounds[: 5 if falloff_per_mm is None else 4], strict=True)
    fits = []
    for share in (0.0, 0.25, 0.5, 0.75):  # the focus has several minima
        start = [log.max(), z.min() + share * depth, 2 / depth, 1.0, 0.5 / depth][: len(low)]
        fits.append(least_squares(misfit, start, bounds=(low, high), loss="soft_l1", f_scale=0.05))
    best = min(fits, key=lambda fit: fit.cost)
    _, focus, narrowness, mu, *rest = best.x
    # A beam of which less than 1 % is lost over the range has no focus that could be told.
    rayleigh = 1e3 / float(narrowness) if narrowness * depth > 0.1 else math.inf
    beam = Beam(
        float(focus) * 1e3 if math.isfinite(rayleigh) else 0.0,
        rayleigh,
        float(rest[0]) if rest else falloff_per_mm or 0.0,
    )
    rms = float(np.sqrt(np.mean(misfit(best.x) ** 2)))
    if rms > _MISFIT and profiles.shape[1] > 1:
        known = np.isfinite(profiles)
        mean = np.where(known, profiles, 0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
        return estimate_beam(mean, spacing_um, falloff_per_mm=falloff_per_mm)
    return DepthProfile(beam, float(mu), rms)
