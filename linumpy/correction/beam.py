"""The loss of light along depth by the confocal beam and the spectrometer, and estimates of beam and background.

In: intensities with depth first, on the host or a device, and spacings in µm. Out: :class:`Beam`, and numbers on the
host. :mod:`linumpy.correction.attenuation` divides by the loss before it resolves the attenuation in depth.

A beam and an attenuation darken tissue alike, so one mean profile cannot tell them from each other. Two things can. The
logarithm of an even attenuation is a straight line along depth, and that of a beam is bent. And where neighbouring
slices overlap, they show the same tissue at two depths: the logarithms of both profiles have the same slope there but
for the beam, whatever the tissue and its attenuation are. :func:`estimate_beam` uses both, from blocks of all slices,
and accepts a beam only if blocks that were left out of the fit agree with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any

import numpy as np

from linumpy.arrays import Array
from linumpy.declared import Declared, NotNegative, Range
from linumpy.device import array_module, to_host

#: Maximum mean of a dim plane, relative to the brightest plane, and minimum number of dim planes. Dim planes show how
#: speckle decreases with the intensity.
_DIM, _MIN_DIM_PLANES = 0.6, 6
#: Maximum mean of the darkest plane, relative to the brightest. From brighter planes no background is extrapolated.
_MAX_DARKEST = 0.2
#: Minimum brightness of an A-line of tissue, relative to bright A-lines. Agarose is darker.
_TISSUE = 0.3
#: Minimum number of planes of a profile, and number of first planes that are left out because they are part water.
MIN_PLANES, _RIM = 8, 2
#: Minimum mean of a usable plane, relative to the background and to the brightest plane.
_MIN_LIGHT = (1.0, 0.01)
#: Numbers of focuses and Rayleigh lengths that are tried.
_FOCUSES, _RAYLEIGHS = 31, 25
#: Least variance of the logarithm of a profile's plane, so that no pair of slices counts without limit.
_MIN_VARIANCE = 1e-4
#: Minimum evidence of a beam: the share that it explains of what profiles have left without it, in slices that were not
#: used for the fit, and the number of standard errors of this share. Uncertain beams made stacks worse than no beam.
#: A beam must also bend the profiles by at least this root mean square.
_MIN_EVIDENCE, _MIN_BEND = (0.95, 2.5), 0.02


@dataclass(frozen=True)
class Beam(Declared):
    """Loss of light along depth that does not depend on the tissue.

    - `focus_um`: depth of the focus, from the first plane.
    - `rayleigh_um`: Rayleigh length of the beam in tissue; infinite for no loss outside the focus.
    - `falloff_per_mm`: fall-off of the spectrometer's sensitivity: ``exp(-(falloff_per_mm * z)²)``, z in mm.
    """

    focus_um: Annotated[float, Range()] = 0.0
    rayleigh_um: Annotated[float, Range(above=0, infinite=True)] = math.inf
    falloff_per_mm: NotNegative = 0.0

    def factor(self, planes: int, spacing_um: float) -> np.ndarray:
        """Return the factor of the intensity of each plane as float32; plane k is at depth ``k * spacing_um``."""
        z = np.arange(planes) * spacing_um
        gate = 1 / (1 + ((z - self.focus_um) / self.rayleigh_um) ** 2)
        factor = gate * np.exp(-((self.falloff_per_mm * z / 1e3) ** 2))
        return np.maximum(factor, 1e-6).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The mean logarithm of the light along depth, in a block of a slice.

    - `block`: the block, which has the same number in all slices.
    - `logs` (float64, (Z,)): mean logarithm of the light of the A-lines of tissue, without background.
    - `first`, `stop`: the planes where all A-lines show tissue and are brighter than the background.
    - `surface`: median plane of the surface.
    """

    number: int
    block: int
    logs: np.ndarray
    first: int
    stop: int
    surface: float


#: Profiles, each with its misfit for each beam, and the number of planes.
_Misfits = list[tuple[Profile, tuple[np.ndarray, int]]]


@dataclass(frozen=True, kw_only=True)
class BeamEstimate:
    """The result of :func:`estimate_beam`.

    - `beam`: the beam, or None if it cannot be told from the attenuation.
    - `explained`: share of the misfit without a beam that the beam takes away in slices that were left out of its fit;
      negative if the beam of other slices makes the misfit larger.
    - `standard_errors`: mean of what the beam takes away from a slice, in standard errors of that mean.
    - `bend`: root mean square deviation of the logarithm of the beam's loss from a straight line, which an attenuation
      would have.
    - `profiles`, `pairs`: number of profiles, and number of pairs of profiles that show the same tissue at two depths.
    - `reason`: why there is no beam; empty if there is one.
    """

    beam: Beam | None
    explained: float = 0.0
    standard_errors: float = 0.0
    bend: float = 0.0
    profiles: int = 0
    pairs: int = 0
    reason: str = ""


def estimate_background(volume: Array) -> float:
    """Estimate the constant that is added to all intensities, from the speckle of each plane.

    Speckle is in proportion to the light, so its strength is 0 where the intensity is the background. The strength of a
    plane is the mean difference of neighbours along the last axis: like the mean intensity, and unlike a median, it
    keeps its proportion when A-lines differ more and more with depth. A line of strength against mean intensity is
    fitted to the dim planes of tissue and extrapolated to strength 0. This fails for a detector whose noise is as
    strong as its background: measure the background there.

    - `volume` (Z, ..., X): linear intensity. Only A-lines of tissue whose voxels are all finite and above 0 are used.

    Returns: From 0 to the mean of the darkest plane of tissue. It is 0 if there are no neighbouring A-lines to use,
    fewer than six dim planes, or no line of positive slope, and if the darkest plane has more than a fifth of the mean
    of the brightest.
    """
    xp = array_module(volume)
    usable = (xp.isfinite(volume) & (volume > 0)).all(axis=0)
    usable &= tissue_lines(volume.reshape((len(volume), -1)).astype(np.float32)).reshape(usable.shape)
    both = usable[..., 1:] & usable[..., :-1]
    if not bool(both.any()):
        return 0.0
    right, left = (part[:, both].astype(np.float32) for part in (volume[..., 1:], volume[..., :-1]))
    means, strengths = (part.mean(axis=1, dtype=np.float64) for part in ((right + left) / 2, xp.abs(right - left)))
    mean, strength = to_host(xp.stack([means, strengths]))
    brightest = int(np.argmax(mean))
    dim = (np.arange(len(mean)) > brightest) & (mean < _DIM * mean[brightest])
    if dim.sum() < _MIN_DIM_PLANES or mean[dim].min() > _MAX_DARKEST * mean[brightest]:
        return 0.0
    slope, intercept = np.polyfit(mean[dim], strength[dim], 1, w=1 / mean[dim])
    if not slope > 0:
        return 0.0
    return float(np.clip(-intercept / slope, 0.0, mean[dim].min()))


def tissue_lines(lines: Array) -> Any:
    """Return which A-lines show tissue: (N,) of bool, from intensities (Z, N); voxels that are not finite are dark.

    They are as bright as tissue over an eighth of the depth somewhere. The light of the whole depth would not tell
    tissue from agarose, which attenuates less.
    """
    xp, height = array_module(lines), min(len(lines), max(5, len(lines) // 8))
    sums = xp.cumsum(xp.where(xp.isfinite(lines), lines, 0), axis=0, dtype=np.float32)
    sums = xp.concatenate([xp.zeros_like(sums[:1]), sums])
    brightness = (sums[height:] - sums[:-height]).max(axis=0)
    lit = brightness > 0
    # Percentiles of nothing, and A-lines that were not recorded, would be no measure of brightness.
    limit = xp.percentile(xp.where(lit, brightness, 0), 100 - 10 * float(lit.mean())) if lines.shape[1] else 0
    return lit & (brightness >= _TISSUE * limit)


def first_planes(light: Any) -> Any:
    """Return the first plane of each A-line that has half of its largest light: (N,) of int, from (Z, N)."""
    smooth = light.copy()  # the mean of three planes, so that speckle moves the surface less
    smooth[1:-1] += light[:-2] + light[2:]
    smooth[1:-1] /= 3
    return array_module(light).argmax(smooth >= 0.5 * smooth.max(axis=0), axis=0)


def block_profile(lines: Any, number: int, block: int, background: float) -> Profile | None:
    """Average the logarithms of A-lines of tissue, which all belong to one block of a slice.

    The logarithm of a mean would flatten with depth, because the light from dense parts vanishes first.

    - `lines` (Z, N): linear intensity of the A-lines of tissue (:func:`tissue_lines`).
    - `number`, `block`: As in :class:`Profile`.
    - `background`: intensity without light, subtracted first.

    Returns: None with fewer than eight planes to use.
    """
    if lines.shape[1] < MIN_PLANES or len(lines) < MIN_PLANES:
        return None
    xp, light = clear_light(lines, 1.0, None, background)
    surface = to_host(first_planes(light))
    means = light.mean(axis=1, dtype=np.float64)
    # A voxel as dark as the background has no logarithm.
    floor = xp.maximum(0.05 * means, 1e-6).astype(np.float32)[:, None]
    mean, logs = to_host(xp.stack([means, xp.log(xp.maximum(light, floor)).mean(axis=1, dtype=np.float64)]))
    first = int(np.percentile(surface, 90)) + _RIM
    stop = first + bright_planes(mean[first:], background, float(mean.max()))
    return (
        Profile(number=number, block=block, logs=logs, first=first, stop=stop, surface=float(np.median(surface)))
        if stop - first >= MIN_PLANES
        else None
    )


def bright_planes(mean: np.ndarray, background: float, brightest: float) -> int:
    """Return the number of first planes that are brighter than the background, and not much darker than tissue."""
    dark = ~(mean > max(_MIN_LIGHT[0] * background, _MIN_LIGHT[1] * brightest))
    return int(np.argmax(dark)) if dark.any() else len(mean)


def estimate_beam(
    profiles: Sequence[Profile],
    spacing_um: float,
    interval_um: float | None = None,
    *,
    falloff_per_mm: float = 0.0,
) -> BeamEstimate:
    """Fit one focus and one Rayleigh length to profiles of all slices, and decide whether the data can tell them.

    Misfits of profiles from straight lines, and of pairs that show the same tissue at two depths from each other, are
    added up, each in units of its variance. A slice is then left out in turn, the beam of the others is applied to it,
    and its misfit is compared with that without a beam; with fewer than three slices the same is done with blocks.

    - `profiles`: of :func:`block_profile`.
    - `interval_um`: thickness that is cut off between slices. Without it, bends of the profiles alone are used.
    - `falloff_per_mm`: fall-off of sensitivity. It is hard to distinguish from the far side of a focus, and therefore
      not fitted.

    Returns: With a focus in the tissue.
    """
    if not profiles:
        return BeamEstimate(
            beam=None, reason="no part of a slice has eight planes of tissue brighter than the background"
        )
    planes = max(len(profile.logs) for profile in profiles)
    z = np.arange(planes) * spacing_um
    # With a focus above the tissue only the far side of the beam is seen, which a background looks like, too.
    surface, stop = np.median([profile.surface for profile in profiles]), max(profile.stop for profile in profiles)
    focus, rayleigh = (
        part.ravel() * spacing_um
        for part in np.meshgrid(np.linspace(surface, stop, _FOCUSES), np.geomspace(0.05, 4, _RAYLEIGHS) * planes)
    )
    # The first loss is that of no beam.
    gates = np.concatenate([np.zeros((planes, 1)), -np.log1p(((z[:, None] - focus) / rayleigh) ** 2)], axis=1)
    gates -= ((falloff_per_mm * z / 1e3) ** 2)[:, None]
    interval = None if interval_um is None else interval_um / spacing_um
    alone: _Misfits = []
    for profile in profiles:
        part = slice(profile.first, profile.stop)
        left = _without_line(profile.logs[part, None] - gates[part])
        alone.append((profile, ((left**2).sum(axis=0), profile.stop - profile.first)))
    pairs = [] if interval is None else _pairs(profiles, interval, gates)
    by_group = _by_group(alone, pairs)
    best = int(np.argmin(by_group.sum(axis=0)))
    explained, errors = _cross_validated(by_group)
    lit = np.arange(min(p.first for p in profiles), max(p.stop for p in profiles))
    bend = float(np.sqrt(np.mean(_without_line(gates[lit, best] - gates[lit, 0]) ** 2)))
    reason = ""
    if explained < _MIN_EVIDENCE[0] or errors < _MIN_EVIDENCE[1]:
        reason = (
            f"a beam fitted to other parts of the slices explains {100 * max(explained, 0):.0f} % of what profiles "
            f"have left ({errors:.1f} standard errors), which is too little to tell it from the attenuation"
        )
    elif bend < _MIN_BEND:
        reason = f"the beam that fits best bends the profiles by {100 * bend:.1f} % only, as an attenuation might"
    beam = None if reason else Beam(float(focus[best - 1]), float(rayleigh[best - 1]), falloff_per_mm)
    return BeamEstimate(
        beam=beam,
        explained=explained,
        standard_errors=errors,
        bend=bend,
        profiles=len(alone),
        pairs=len(pairs),
        reason=reason,
    )


def _without_line(logs: np.ndarray) -> np.ndarray:
    """Subtract the straight line that fits best along the first axis."""
    along = np.stack([np.ones(len(logs)), np.arange(len(logs)) - (len(logs) - 1) / 2], axis=1)
    along /= np.linalg.norm(along, axis=0)
    return np.asarray(logs - along @ (along.T @ logs))


def _pairs(profiles: Sequence[Profile], interval: float, gates: np.ndarray) -> _Misfits:
    """Compare each profile with that of the same block in the next slice, if they share eight planes of tissue."""
    found = []
    blocks = itertools.groupby(sorted(profiles, key=lambda p: (p.block, p.number)), key=lambda p: p.block)
    for upper, lower in itertools.chain.from_iterable(itertools.pairwise(group) for _, group in blocks):
        # Plane z of the upper slice is plane z + moved of the lower one.
        moved = lower.surface - upper.surface - (lower.number - upper.number) * interval
        z = np.arange(upper.first, upper.stop)
        z = z[(z + moved >= lower.first) & (z + moved <= lower.stop - 1)]
        if len(z) < MIN_PLANES:
            continue
        below = np.floor(z + moved).astype(int)
        above, part = np.minimum(below + 1, lower.stop - 1), (z + moved - below)[:, None]
        logs = lower.logs[:, None] - gates[: len(lower.logs)]
        left = upper.logs[z, None] - gates[z] - (logs[below] * (1 - part) + logs[above] * part)
        found.append((upper, (((left - left.mean(axis=0)) ** 2).sum(axis=0), len(z))))
    return found


def _by_group(alone: _Misfits, pairs: _Misfits) -> np.ndarray:
    """Add up the misfits of each slice, or with fewer than three slices of each block, in units of their variance."""
    few = len({profile.number for profile, _ in alone}) < 3
    groups: dict[tuple[int, ...], np.ndarray] = {}
    for misfits in filter(None, (alone, pairs)):
        total = sum(misfit for _, (misfit, _) in misfits)
        variance = float(np.min(total)) / sum(count for _, (_, count) in misfits) + _MIN_VARIANCE
        for profile, (misfit, _) in misfits:
            key = (profile.number, profile.block) if few else (profile.number,)
            groups[key] = groups.get(key, 0.0) + misfit / variance
    return np.stack(list(groups.values()))


def _cross_validated(groups: np.ndarray) -> tuple[float, float]:
    """Return what the beam of the other groups explains of a group: a share, and in standard errors; (K, beams)."""
    if len(groups) < 2:
        return 0.0, 0.0
    others = groups.sum(axis=0) - groups
    gains = groups[:, 0] - groups[np.arange(len(groups)), np.argmin(others, axis=1)]
    error = float(gains.std(ddof=1)) / math.sqrt(len(gains))
    return float(gains.sum() / groups[:, 0].sum()), float(gains.mean()) / (error + 1e-9)


def from_surface(profile: np.ndarray, share: float = 0.5) -> np.ndarray:
    """Return which planes have light and are at or below the first plane with `share` of the largest mean."""
    usable: np.ndarray = np.isfinite(profile) & (profile > 0)
    if usable.any():
        usable &= np.arange(len(profile)) >= int(
            np.argmax(np.where(usable, profile, 0) >= share * profile[usable].max())
        )
    return usable


def clear_light(volume: Array, spacing_um: float, beam: Beam | None, background: float) -> tuple[ModuleType, Any]:
    """Return the array module, and the light from each voxel: without background, divided by the loss of the beam.

    Voxels that are not finite have no light.
    """
    xp = array_module(volume)
    light = volume.astype(np.float32, copy=False)
    light = xp.maximum(xp.where(xp.isfinite(light), light, 0) - np.float32(background), 0)
    if beam is not None:
        light = light / xp.asarray(beam.factor(len(volume), spacing_um)).reshape(-1, *(1,) * (volume.ndim - 1))
    return xp, light
