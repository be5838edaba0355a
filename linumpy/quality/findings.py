"""What a reader of a report should know: what stages wrote, and what only the comparison of slices shows.

In: the JSON of the stages, and summaries of images. Out: a :class:`Finding` for each fault or decision.

Stages write their notes by :mod:`linumpy.io.output.results`. Missing tiles and rejected registrations, of which stages
do not warn, are findings too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

import numpy as np

from linumpy.io.output.results import JSON, notes_of
from linumpy.mosaic.io.slice_table import slice_number
from linumpy.quality.images import ImageSummary
from linumpy.quality.run_folder import RunFolder
from linumpy.registration.robust import robust_deviation

#: Difference from the median angle between camera and stage, in degrees, above which positions are a finding.
_MAX_TURN = 0.2
#: RMS of the positions of tiles in voxels above which it is a finding.
_MAX_RMS = 0.5
#: Robust standard deviations from which on a value is an outlier, and the least step that is one.
_DEVIATIONS, _LEAST_STEP = 4.0, 0.3
#: Ratio of the brightness of tissue of neighbouring slices that is a finding.
MAX_RATIO = 1.3


@dataclass(frozen=True)
class Finding:
    """A fault, or a decision that a reader should know.

    - `text`: what is to be said.
    - `stages`: names of the stages, which are those of their folders.
    - `slices`: numbers of the slices; none for a finding of the whole brain.
    - `left_out`: whether the stage left the data as they were.
    """

    text: str
    _: KW_ONLY
    stages: tuple[str, ...] = ()
    slices: tuple[int, ...] = ()
    left_out: bool = False

    def __str__(self) -> str:
        parts = [", ".join(self.stages), numbered("slice", self.slices) if self.slices else ""]
        where = ", ".join(part for part in parts if part)
        return f"{where}: {self.text}" if where else self.text


def numbered(word: str, numbers: Iterable[int]) -> str:
    """Return numbers as text: ``slices 0 to 3 and 7``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else " and ".join(map(str, run)) for run in runs]
    plural = "s" if sum(map(len, runs)) > 1 else ""
    return f"{word}{plural} {' and '.join(parts) if len(parts) < 3 else ', '.join(parts)}"


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Join findings of one text: first those of one stage, then those of the same slices."""
    by_stage: dict[tuple[object, ...], Finding] = {}
    for one in findings:
        known = by_stage.setdefault((one.text, one.stages), one)
        by_stage[one.text, one.stages] = replace(one, slices=tuple(sorted({*known.slices, *one.slices})))
    by_slices: dict[tuple[object, ...], Finding] = {}
    for one in by_stage.values():
        known = by_slices.setdefault((one.text, one.slices), one)
        by_slices[one.text, one.slices] = replace(one, stages=tuple(dict.fromkeys((*known.stages, *one.stages))))
    return tuple(by_slices.values())


def stage_of(run: RunFolder, path: Path) -> str:
    """Return the name of the stage that made a file: that of its folder, or of the file in the folder itself."""
    parent = str(path.parent.relative_to(run.folder))
    return path.name if parent == "." else parent


def of_documents(run: RunFolder) -> Iterable[Finding]:
    """Yield what the JSON of the stages says."""
    for path, document in run.documents.items():
        number = slice_number(path.name)
        slices = () if number is None else (number,)
        for note in (*notes(document), *_of_tiles(document), *_of_pairs(document)):
            yield replace(note, stages=(stage_of(run, path),), slices=slices or note.slices)


def of_earlier_runs(run: RunFolder) -> Iterable[Finding]:
    """Yield stages in whose folder are files that the last run did not make, which the report does not show."""
    for stage, count in run.earlier.items():
        are = "file of an earlier run is" if count == 1 else "files of earlier runs are"
        left_out = stage in run.left_out
        yield Finding(f"{'left out; ' if left_out else ''}{count} {are} not shown", stages=(stage,), left_out=left_out)


def notes(document: Mapping[str, JSON]) -> list[Finding]:
    """Return the notes of a stage: its warnings, and why it was left out unless a warning says it."""
    lines, reason = notes_of(document)
    found = [Finding(line, slices=_named(line), left_out=bool(reason) and reason in line) for line in lines]
    if reason and not any(note.left_out for note in found):
        found.insert(0, Finding(f"left out: {reason}", left_out=True))
    return found


def _named(text: str) -> tuple[int, ...]:
    """Return the slices that a sentence names, such as 3, 4 and 7 in "slices 3, 4 and 7"."""
    lists = re.findall(r"\bslices? (\d+(?:(?:, | and | with )\d+)*)", text)
    return tuple(sorted({int(number) for numbers in lists for number in re.findall(r"\d+", numbers)}))


def _of_tiles(document: Mapping[str, JSON]) -> Iterable[Finding]:
    tiles, rms = records(document, "tiles"), document.get("rms_leave_one_out")
    missing = sum(not tile.get("present", True) for tile in tiles)
    if missing:
        yield Finding(f"{missing} of {len(tiles)} tiles are missing")
    if isinstance(rms, float) and rms > _MAX_RMS:
        yield Finding(f"tiles fit to {rms:.2f} voxels RMS only")


def _of_pairs(document: Mapping[str, JSON]) -> Iterable[Finding]:
    """Yield rejected registrations of neighbours; those of others, which share fewer planes, only support them."""
    neighbours = list(itertools.pairwise(entry.get("number") for entry in records(document, "slices")))
    for pair in records(document, "pairs"):
        reason, both = rejection(pair), (pair.get("fixed_id"), pair.get("moving_id"))
        if reason and both in neighbours:
            text = f"the registration of slice {both[0]} with slice {both[1]} was rejected: {reason}"
            yield Finding(text, slices=_named(text))


def rejection(pair: Mapping[str, JSON]) -> str:
    """Return why a pair was rejected; empty for a pair that was not."""
    return str(pair.get("rejected") or "")


def records(document: Mapping[str, JSON], key: str) -> list[dict[str, JSON]]:
    """Return the objects in a list of a document; none if there is no such list."""
    entries = document.get(key)
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def of_cameras(run: RunFolder) -> Iterable[Finding]:
    """Yield slices with another angle between camera and stage: the camera moved, or the positions are wrong."""
    located = [
        (path, positions.model.degrees)
        for path, positions in run.positions
        if not all(pair.rejected for pair in positions.pairs)
    ]
    for axis, name in enumerate(("rows", "columns")):
        degrees = np.array([both[axis] for _, both in located])
        for (path, _), angle, is_outlier in zip(located, degrees, robust_outliers(degrees), strict=True):
            if is_outlier and abs(angle - np.median(degrees)) > _MAX_TURN:
                number = slice_number(path.name)
                median = f"{np.median(degrees):.2f}° is the median of all slices"
                text = f"the camera is turned by {angle:.2f}° against the stage along {name}, {median}"
                yield Finding(text, stages=(stage_of(run, path),), slices=() if number is None else (number,))


def of_voxels(image: ImageSummary) -> Iterable[str]:
    """Yield faults of an image that need no other image."""
    if image.constant:
        yield "all voxels are equal"
    elif image.not_finite > 0 and image.section is not None:
        yield f"{100 * image.not_finite:.2g} % of the voxels are NaN or infinite"


#: Figures of merit that are compared with those of the neighbouring slices.
_FIGURES: dict[str, Callable[[ImageSummary], float]] = {
    "share of tissue": lambda image: image.tissue,
    "sharpness": lambda image: image.sharpness,
    "median": lambda image: image.median,
}


def of_neighbours(stage: str, images: Mapping[int, ImageSummary]) -> Iterable[Finding]:
    """Yield slices whose figures of merit are far from those of their neighbours; slices in their order."""
    for name, figure in _FIGURES.items():
        values = np.array([figure(image) for image in images.values()], float)
        for number, is_outlier in zip(images, step_outliers(values), strict=True):
            if is_outlier:
                yield Finding(f"its {name} is far from that of its neighbours", stages=(stage,), slices=(number,))


def of_brightness(ratios: Mapping[str, Mapping[tuple[int, int], float]]) -> Iterable[Finding]:
    """Yield pairs of neighbouring slices between which brightness jumps in the last stage that has both.

    `ratios` is for each stage, in their order, the brightness of a slice over that of the slice above, where known.
    """
    pairs = dict.fromkeys(pair for of_stage in ratios.values() for pair in of_stage)
    for pair in pairs:
        known = {stage: of_stage[pair] for stage, of_stage in ratios.items() if pair in of_stage}
        if is_jump(last := list(known.values())[-1]):
            text = f"tissue is {last:.2g} times as bright in slice {pair[1]} as in slice {pair[0]}"
            yield Finding(text, stages=tuple(stage for stage, ratio in known.items() if is_jump(ratio)), slices=pair)


def is_jump(ratio: float) -> bool:
    """Return whether a ratio of brightness is a finding."""
    return ratio > MAX_RATIO or 0 < ratio < 1 / MAX_RATIO


def of_gaps(run: RunFolder, numbers: Iterable[int]) -> Iterable[Finding]:
    """Yield slices in which nothing was recorded, and slices that are missing among the numbers of the others."""
    yield from (Finding(f"{name}: nothing was recorded in this slice") for name in run.empty)
    for before, after in itertools.pairwise(sorted({*numbers, *empty_slices(run)})):
        if after - before > 1:
            yield Finding(gap_text(before, after))


def gap_text(before: int, after: int) -> str:
    """Return that the slices between two numbers are missing."""
    return (
        f"slice {before + 1} is missing" if after - before == 2 else f"slices {before + 1} to {after - 1} are missing"
    )


def empty_slices(run: RunFolder) -> dict[int, str]:
    """Return the names of the slices in which nothing was recorded, by their numbers."""
    return {number: name for name in run.empty if (number := slice_number(name)) is not None}


def robust_outliers(values: np.ndarray) -> np.ndarray:
    """Return which values are further from the median than four robust standard deviations.

    Values that are not finite are no outliers; of fewer than five finite values none is an outlier.
    """
    finite = np.isfinite(values)
    if finite.sum() < 5:
        return np.zeros(values.shape, bool)
    median = float(np.median(values[finite]))
    spread = robust_deviation(values[finite] - median)
    with np.errstate(invalid="ignore"):
        return finite & (np.abs(values - median) > _DEVIATIONS * max(spread, 1e-3 * abs(median)))


def step_outliers(values: np.ndarray) -> np.ndarray:
    """Return which values are far from both of their neighbours, or at the ends from the only one.

    Steps are relative to the greater magnitude of both values. Far is a step of more than four robust standard
    deviations of all steps, and of more than 0.3, so that neither a trend nor noise makes outliers. Values that are
    not finite are left out; of fewer than five finite values none is an outlier.
    """
    result, finite = np.zeros(values.shape, bool), np.isfinite(values)
    if finite.sum() < 5:
        return result
    kept = values[finite]
    greater = np.maximum(np.abs(kept[1:]), np.abs(kept[:-1]))
    steps = np.diff(kept) / np.where(greater > 0, greater, 1)
    spread = _DEVIATIONS * robust_deviation(steps - np.median(steps))
    far = np.concatenate([[np.inf], np.abs(steps), [np.inf]])
    result[finite] = np.minimum(far[:-1], far[1:]) > max(spread, _LEAST_STEP)
    return result
