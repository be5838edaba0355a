"""The loss of light along depth by the confocal beam and the spectrometer, and estimates of beam and background.

In: intensities with depth first, on the host or a device, and spacings in µm. Out: :class:`Beam`, and numbers on the
host. :mod:`linumpy.correction.attenuation` divides by the loss before it resolves the attenuation in depth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, to_host

#: Maximum mean of a dim plane, relative to the brightest plane, and minimum number of dim planes. Dim planes show how
#: speckle decreases with the intensity.
_DIM, _MIN_DIM_PLANES = 0.6, 6
#: Maximum mean of the darkest plane, relative to the brightest. From brighter planes no background is extrapolated.
_MAX_DARKEST = 0.2
#: Maximum number of profiles, and number of first planes of tissue that a fit leaves out because they are part water.
_GROUPS, _RIM = 8, 2
#: Maximum root mean square misfit of logarithms up to which profiles are fitted with one incident light.
_MAX_MISFIT = 0.15


@dataclass(frozen=True)
class Beam:
    """Loss of light along depth that does not depend on the tissue.

    Attributes
    ----------
    focus_um : float
        Depth of the focus, from the first plane.
    rayleigh_um : float
        Rayleigh length of the beam in tissue; infinite for no loss outside the focus.
    falloff_per_mm : float
        Fall-off of the spectrometer's sensitivity: ``exp(-(falloff_per_mm * z)²)``, z in mm.

    Raises
    ------
    ValueError
        A number out of range.
    """

    focus_um: float = 0.0
    rayleigh_um: float = math.inf
    falloff_per_mm: float = 0.0

    def __post_init__(self) -> None:
        if not self.rayleigh_um > 0 or not math.isfinite(self.focus_um) or not 0 <= self.falloff_per_mm < math.inf:
            raise ValueError(f"{self}: pass a finite focus, a positive Rayleigh length and a fall-off from 0 on")

    def factor(self, planes: int, spacing_um: float) -> np.ndarray:
        """Return the factor of the intensity of each plane as float32; plane k is at depth ``k * spacing_um``."""
        z = np.arange(planes) * spacing_um
        gate = 1 / (1 + ((z - self.focus_um) / self.rayleigh_um) ** 2)
        return np.asarray(gate * np.exp(-((self.falloff_per_mm * z / 1e3) ** 2)), np.float32)


@dataclass(frozen=True)
class DepthProfile:
    """The fit of :func:`estimate_beam`.

    Attributes
    ----------
    beam : Beam
        Focus, Rayleigh length and fall-off.
    attenuation_per_mm : float
        Mean attenuation of the tissue.
    rms : float
        Root mean square residual of the logarithm of the profile.
    """

    beam: Beam
    attenuation_per_mm: float
    rms: float


def estimate_background(volume: Array) -> float:
    """Estimate the constant that is added to all intensities, from the speckle of each plane.

    Speckle is in proportion to the light, so its strength is 0 where the intensity is the background. The strength of a
    plane is the median difference of neighbours along the last axis. A line of strength against mean intensity is
    fitted to the dim planes of tissue and extrapolated to strength 0. This fails for a detector whose noise is as
    strong as its background: measure the background there.

    Parameters
    ----------
    volume : numpy.ndarray or cupy.ndarray, (Z, ..., X)
        Linear intensity. Only A-lines whose voxels are all finite and above 0 are used.

    Returns
    -------
    float
        From 0 to the mean of the darkest plane of tissue. It is 0 if there are no neighbouring A-lines to use, fewer
        than six dim planes, or no line of positive slope, and if the darkest plane has more than a fifth of the mean of
        the brightest.
    """
    xp = array_module(volume)
    is_complete = (xp.isfinite(volume) & (volume > 0)).all(axis=0)
    both_complete = is_complete[..., 1:] & is_complete[..., :-1]
    if not bool(both_complete.any()):
        return 0.0
    means, strengths = [], []
    for plane in volume:
        plane = plane.astype(np.float32)
        means.append(plane[..., 1:][both_complete].mean())
        strengths.append(xp.median(xp.abs(plane[..., 1:] - plane[..., :-1])[both_complete]))
    mean, strength = to_host(xp.stack([xp.stack(means), xp.stack(strengths)])).astype(np.float64)
    brightest = int(np.argmax(mean))
    dim = (np.arange(len(mean)) > brightest) & (mean < _DIM * mean[brightest])
    if dim.sum() < _MIN_DIM_PLANES or mean[dim].min() > _MAX_DARKEST * mean[brightest]:
        return 0.0
    slope, intercept = np.polyfit(mean[dim], strength[dim], 1, w=1 / mean[dim])
    if not slope > 0:
        return 0.0
    return float(np.clip(-intercept / slope, 0.0, mean[dim].min()))


def depth_profiles(volume: Array, background: float = 0.0) -> np.ndarray:
    """Average A-lines of tissue in groups whose surface lies at about the same depth.

    If the surface is tilted, the mean of all A-lines would show water above the tissue.

    Parameters
    ----------
    volume : numpy.ndarray or cupy.ndarray, (Z, ...)
        Linear intensity. Voxels that are not finite are left out, and so are A-lines with less than half of the light
        of bright A-lines.
    background : float
        Intensity without light, subtracted first.

    Returns
    -------
    numpy.ndarray of float64, (Z, K)
        At most eight profiles, from the highest surface to the lowest; NaN where no voxel is finite. Without an A-line
        of tissue one profile of NaN.

    Raises
    ------
    ValueError
        No planes, or voxels that are not real numbers.
    """
    xp, light = clear_light(volume, 1.0, None, 0.0, background)
    finite = xp.isfinite(volume).reshape(len(volume), -1)
    lines, finite = (part[:, _is_tissue(light)] for part in (light.reshape((len(light), -1)), finite))
    if not lines.shape[1]:
        return np.full((len(light), 1), np.nan)
    smooth = lines.copy()  # the mean of three planes, so that speckle moves the surface less
    smooth[1:-1] += lines[:-2] + lines[2:]
    smooth[1:-1] /= 3
    surface = to_host(xp.argmax(smooth >= 0.5 * smooth.max(axis=0), axis=0))
    groups = np.array_split(np.argsort(surface, kind="stable"), min(_GROUPS, len(surface)))
    sums = [[part[:, xp.asarray(g)].sum(axis=1, dtype=np.float64) for part in (lines, finite)] for g in groups]
    total, count = (to_host(xp.stack(parts, axis=1)) for parts in zip(*sums, strict=True))
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def estimate_beam(profiles: np.ndarray, spacing_um: float, *, falloff_per_mm: float | None = 0.0) -> DepthProfile:
    """Fit focus, Rayleigh length and attenuation to mean intensities along depth.

    The profile of tissue with an even attenuation µ and its surface at depth s is ``c exp(-2 µ (z - s)) exp(-(f z)²) /
    (1 + ((z - focus) / rayleigh)²)``, with the incident light c and the fall-off f. The logarithms of all profiles are
    fitted with one c and a robust norm, from the third plane of tissue to the last. Tissue begins at the first plane
    that has half of the largest intensity. The beam depends on z and the attenuation on z - s, so surfaces at several
    depths distinguish them. If the profiles do not fit one c, because the tissue differs more than the surfaces, the
    mean of the profiles is fitted. A fall-off is hard to distinguish from the far side of a focus: pass it if it is
    known.

    Parameters
    ----------
    profiles : numpy.ndarray, (Z,) or (Z, K)
        Mean intensities of tissue without background, such as those of :func:`depth_profiles`.
    spacing_um : float
        Voxel spacing along Z.
    falloff_per_mm : float, optional
        Fall-off of sensitivity; None to fit it.

    Returns
    -------
    DepthProfile
        For fewer than eight usable planes a beam without loss outside the focus, and an attenuation of 0.
    """
    from scipy.optimize import least_squares

    profiles = np.asarray(profiles, np.float64).reshape(len(profiles), -1)
    tissue = np.stack([from_surface(profile) for profile in profiles.T], axis=1)
    surface = np.argmax(tissue, axis=0)
    usable = tissue & (np.arange(len(profiles))[:, None] >= surface + _RIM)
    if usable.any(axis=1).sum() < 8:
        return DepthProfile(Beam(falloff_per_mm=falloff_per_mm or 0.0), 0.0, 0.0)
    planes, columns = np.nonzero(usable)
    z, below = planes * spacing_um / 1e3, (planes - surface[columns]) * spacing_um / 1e3
    log_profile = np.log(profiles[usable])
    depth = float(z.max() - z.min())

    def misfit(parameters: np.ndarray) -> np.ndarray:
        fitted = parameters if falloff_per_mm is None else (*parameters, falloff_per_mm)
        level, focus, narrowness, mu, falloff = fitted
        gate = np.log1p(((z - focus) * narrowness) ** 2)
        return np.asarray(level - 2 * mu * below - gate - (falloff * z) ** 2 - log_profile)

    bounds = [(-np.inf, np.inf), (z.min() - depth, z.max() + depth), (0.0, 20 / depth), (0.0, 100.0), (0.0, 3 / depth)]
    low, high = zip(*bounds[: 5 if falloff_per_mm is None else 4], strict=True)
    fits = []
    for share in (0.0, 0.25, 0.5, 0.75):  # the focus has several minima
        start = [log_profile.max(), z.min() + share * depth, 2 / depth, 1.0, 0.5 / depth][: len(low)]
        fits.append(least_squares(misfit, start, bounds=(low, high), loss="soft_l1", f_scale=0.05))
    best = min(fits, key=lambda fit: fit.cost)
    _, focus, narrowness, mu, *rest = best.x
    # The focus of a beam that loses less than 1 % over the range cannot be measured.
    rayleigh = 1e3 / float(narrowness) if narrowness * depth > 0.1 else math.inf
    beam = Beam(
        float(focus) * 1e3 if math.isfinite(rayleigh) else 0.0,
        rayleigh,
        float(rest[0]) if rest else falloff_per_mm or 0.0,
    )
    rms = float(np.sqrt(np.mean(misfit(best.x) ** 2)))
    if rms > _MAX_MISFIT and profiles.shape[1] > 1:
        finite = np.isfinite(profiles)
        mean = np.where(finite, profiles, 0).sum(axis=1) / np.maximum(finite.sum(axis=1), 1)
        return estimate_beam(mean, spacing_um, falloff_per_mm=falloff_per_mm)
    return DepthProfile(beam, float(mu), rms)


def tissue_lines(light: Array) -> Any:
    """Return the A-lines of tissue, which have at least half of the light of bright A-lines: (Z, N)."""
    return light.reshape((len(light), -1))[:, _is_tissue(light)]


def _is_tissue(light: Array) -> Array:
    """Return which A-lines have at least half of the light of bright A-lines (the 90th percentile): (N,)."""
    total = light.reshape((len(light), -1)).sum(axis=0)
    if not total.size:
        return total > 0
    return (total > 0) & (total >= 0.5 * array_module(light).percentile(total, 90))


def from_surface(profile: np.ndarray, share: float = 0.5) -> np.ndarray:
    """Return which planes have light and are at or below the first plane with `share` of the largest mean."""
    usable: np.ndarray = np.isfinite(profile) & (profile > 0)
    if usable.any():
        usable &= np.arange(len(profile)) >= int(
            np.argmax(np.where(usable, profile, 0) >= share * profile[usable].max())
        )
    return usable


def clear_light(
    volume: Array, spacing_um: float, beam: Beam | None, end_per_mm: float, background: float
) -> tuple[ModuleType, Array]:
    """Return the array module, and the light from each voxel: without background, divided by the loss of the beam.

    Voxels that are not finite have no light.

    Raises
    ------
    ValueError
        A spacing that is not positive, a negative attenuation, no planes, or voxels that are not real numbers.
    """
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
