"""The slices in a stack: the part of each, and how neighbours match where they meet.

In: a stack and its slices as OME-Zarr, and the file of their transforms. Out: an
:class:`~linumpy.quality.images.ImageSummary` of each part, and a :class:`Match` of each pair of neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import ndimage

from linumpy.arrays import DeviceName
from linumpy.io.output.results import JSON
from linumpy.io.volume import open_volumes
from linumpy.quality.findings import Finding, records
from linumpy.quality.images import Gray, ImageSummary, summarize
from linumpy.quality.run_folder import RunFolder
from linumpy.registration.masked_correlation import match_pairs

#: Minimum number of planes, on each side of where two slices meet, whose mean is compared.
_PLANES = 2
#: Standard deviation in pixels of the background that is subtracted, so that an outline of tissue alone is no match.
_BACKGROUND = 6.0
#: Pixels that two slices must share to be compared, and greatest shift as a fraction of the image.
_SHARED, _MAX_SHIFT = 400, 0.15
#: Correlation below which neighbours do not match. A shift of more pixels than the third number that raises the
#: correlation by more than the second, to more than twice the value, is a finding too.
_LEAST, _MORE, _PIXELS = 0.1, 0.15, 2.0


@dataclass(frozen=True, kw_only=True)
class Match:
    """How two neighbouring slices of a stack match.

    - `correlation`: Pearson's correlation of the structure where both meet; NaN if too few pixels are shared.
    - `best`: the greatest correlation at any shift.
    - `shift_um` (float, float): the shift of the greatest correlation, along the lateral axes.
    - `is_bad`: whether a reader should look at the pair.
    """

    correlation: float
    best: float = math.nan
    shift_um: tuple[float, float] = (0.0, 0.0)
    is_bad: bool = False


def find_stack(run: RunFolder, images: Sequence[ImageSummary]) -> tuple[Path, list[dict[str, JSON]]] | None:
    """Return the stack and the slices of its transforms; None if the folder does not have both.

    The stack is the image as deep as the transforms say, to 10 %.
    """
    for path, document in run.documents.items():
        slices = [entry for entry in records(document, "slices") if _has_depth(entry)]
        if not slices:
            continue
        depth = max(_bottom(entry) for entry in slices) - min(entry["top_um"] for entry in slices)
        near = sorted(images, key=lambda image: image.path.parent != path.parent)
        for image in near:
            if "z" in image.axes and len(image.axes) == 3:
                z = image.axes.index("z")
                if abs(image.shape[z] * image.spacing[z] - depth) <= max(0.1 * depth, 2 * image.spacing[z]):
                    return image.path, slices
    return None


def _has_depth(entry: Mapping[str, JSON]) -> bool:
    try:
        numbers = [float(entry["top_um"]), float(entry["depth_um"]), np.linalg.det(np.array(entry["matrix"], float))]
        return isinstance(entry["number"], int) and np.shape(entry["matrix"]) == (4, 4) and 0 not in numbers[1:]
    except (KeyError, TypeError, ValueError, np.linalg.LinAlgError):
        return False


def parts_of(path: Path, slices: Sequence[Mapping[str, JSON]], device: DeviceName) -> dict[int, ImageSummary]:
    """Return a summary of the part of each slice, by its number: the planes that no other slice has, if there are such.

    Where slices overlap, the stack blends them, which hides a step from one to the next.
    """
    tops, bottoms = [entry["top_um"] for entry in slices], [_bottom(entry) for entry in slices]
    parts = {}
    for n, entry in enumerate(slices):
        begin, end = tops[n], min([bottoms[n], *tops[n + 1 : n + 2]])
        own = max([begin, *bottoms[max(0, n - 1) : n]])
        parts[entry["number"]] = summarize(path, depth_um=(own if own < end else begin, end), device=device)
    return parts


def _bottom(entry: Mapping[str, JSON]) -> float:
    return float(entry["top_um"] + entry["depth_um"])


def matches_of(
    images: Mapping[int, ImageSummary], slices: Sequence[Mapping[str, JSON]], device: DeviceName
) -> dict[tuple[int, int], Match]:
    """Compare each slice with the next where the transforms say that they meet.

    Both are read between the same depths of the stack, those of the planes that both have, or of a few planes on each
    side of where one ends and the next begins. The means along depth are brought to the stack by the lateral part of
    the transforms.
    """
    matches = {}
    for upper, lower in itertools.pairwise(slices):
        pair = upper["number"], lower["number"]
        if not all(number in images and images[number].axes == "zyx" for number in pair):
            continue
        begin, end = float(lower["top_um"]), _bottom(upper)
        margin = max(0.0, _PLANES * images[pair[0]].spacing[0] - (end - begin) / 2)
        (above, above_to_stack), (below, below_to_stack) = (
            _seen_from_stack(images[entry["number"]], entry, (begin - margin, end + margin), device)
            for entry in (upper, lower)
        )
        # The lower plane is sampled at the pixels of the upper one; pixels outside of it are 0.
        to_below = np.linalg.inv(below_to_stack) @ above_to_stack
        sampled = ndimage.affine_transform(below.values, to_below[:2, :2], to_below[:2, 2], above.values.shape, order=1)
        matches[pair] = match(above.values, sampled, above.pixel)
    return matches


def _seen_from_stack(
    image: ImageSummary, entry: Mapping[str, JSON], depths: tuple[float, float], device: DeviceName
) -> tuple[Gray, np.ndarray]:
    """Return a mean along depth, and the map of its pixels to the stack: homogeneous, (y, x, 1), in µm."""
    matrix, origin = np.array(entry["matrix"], float), np.array(open_volumes(image.path).origin)
    inside = [depth - matrix[0, 3] for depth in depths]
    picture = summarize(image.path, depth_um=(inside[0], inside[1]), device=device).projection
    pixels = np.diag([*picture.pixel, 1.0])
    pixels[:2, 2] = origin[1:] + (np.array(picture.pixel) - image.spacing[1:]) / 2
    return picture, matrix[1:, 1:] @ pixels


def match(above: np.ndarray, below: np.ndarray, pixel_um: tuple[float, float]) -> Match:
    """Compare two planes of one shape; pixels that are 0 are not measured."""
    valid = (above > 0) & (below > 0)
    if np.count_nonzero(valid) < _SHARED:
        return Match(correlation=math.nan)
    a, b = (_structure(plane, valid) for plane in (above, below))
    spread = a[valid].std() * b[valid].std()
    correlation = float((a * b)[valid].mean() / spread) if spread > 0 else math.nan
    found = match_pairs(a[None], b[None], (valid[None], valid[None]), max_shift=_MAX_SHIFT)
    shift, best = found.matrices[0][:2, 2], float(found.correlations[0])
    is_shifted = np.hypot(*shift) > _PIXELS and best > max(2 * correlation, correlation + _MORE)
    shift_um = float(shift[0] * pixel_um[0]), float(shift[1] * pixel_um[1])
    return Match(correlation=correlation, best=best, shift_um=shift_um, is_bad=correlation < _LEAST or bool(is_shifted))


def _structure(plane: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Return a plane less its background, with a mean of 0 over the valid pixels and 0 elsewhere."""
    values = np.where(valid, plane, 0).astype(np.float32)
    weights = np.maximum(ndimage.gaussian_filter(valid.astype(np.float32), _BACKGROUND), 1e-6)
    values -= ndimage.gaussian_filter(values, _BACKGROUND) / weights
    return np.where(valid, values - values[valid].mean(), 0).astype(np.float32)


def of_matches(matches: Mapping[tuple[int, int], Match]) -> list[Finding]:
    """Return neighbours that do not match; across a missing slice they need not."""
    findings = []
    for (upper, lower), found in matches.items():
        if found.is_bad and lower == upper + 1:
            text = f"their structure hardly matches where they meet (correlation {found.correlation:.2f}"
            shift = f", {found.best:.2f} with a shift of {found.shift_um[0]:.0f} and {found.shift_um[1]:.0f} µm)"
            findings.append(Finding(text + shift, stages=("stack",), slices=(upper, lower)))
    return findings
