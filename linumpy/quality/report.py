"""A report of a run: one self-contained HTML page with warnings, the slices side by side, and numbers.

In: a folder of results, made by ``linum-pipeline``, by Nextflow or by single commands. Out: the page. What a page warns
of is read from the files of the stages, and measured: brightness and figures of merit of neighbouring slices, and how
neighbours match in the stack.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from linumpy.arrays import DeviceName
from linumpy.device import resolve
from linumpy.errors import LinumpyError
from linumpy.io.output.checks import check_apart
from linumpy.io.output.files import check_file, replacing
from linumpy.progress import progress_bar
from linumpy.quality import findings
from linumpy.quality.findings import Finding
from linumpy.quality.images import ImageSummary, brightness_ratio, summarize
from linumpy.quality.overview import Column, columns_of
from linumpy.quality.page import Contents, page_of
from linumpy.quality.run_folder import RunFolder, look_into
from linumpy.quality.stack_parts import find_stack, matches_of, of_matches, parts_of

log = logging.getLogger(__name__)

#: Stages that make images, and the stages that decide for them, whose findings concern those images.
_MADE_FROM = {"illumination": "shading", "stack": "register"}


@dataclass(frozen=True)
class Report:
    """The content of a page.

    - `images`: in the order of their paths.
    - `warnings`: results that a user should check.
    """

    images: tuple[ImageSummary, ...]
    warnings: tuple[str, ...]


def write_report(
    folder: str | Path,
    output: str | Path,
    *,
    device: DeviceName | None = "auto",
    overwrite: bool = False,
    follow_links: bool = False,
) -> Report:
    """Write the report of a folder as one HTML page.

    Parameters
    ----------
    folder : str or Path
        Folder of results: OME-Zarr images, JSON of the stages such as positions of tiles, tables (CSV), pictures (PNG),
        and the summary of ``linum-pipeline``; also in folders up to four levels below it.
    output : str or Path
        The page to write.
    device : {"auto", "cuda", "cpu"}
        Where images are read to and computed; ``"auto"`` is the GPU if there is one.
    overwrite : bool
        Whether to replace an existing page.
    follow_links : bool
        Whether files and images behind symbolic links are reported too. ``linum-pipeline`` links to mosaics that it
        does not change, which are left out by default.

    Returns
    -------
    Report
        The content of the page. An image, positions or a table that cannot be read give a warning.

    Raises
    ------
    FileExistsError, FileNotFoundError, SourceError, ValueError
        An existing page, a folder that does not exist or holds nothing to report; a page inside an image.
    GpuUnavailableError
        There is no CUDA device.
    """
    check_file(output, overwrite=overwrite)
    kind, run = resolve(device).kind, look_into(folder, follow_links=follow_links)
    check_apart([output], run.images)
    images, unread = [], [Finding(line) for line in run.unread]
    with progress_bar("images", len(run.images), "image") as advance:
        for path in run.images:
            try:
                images.append(summarize(path, device=kind))
            except (LinumpyError, ValueError, OSError) as error:
                unread.append(Finding(f"{path.relative_to(run.folder)} cannot be read: {error}"))
            advance(1)
    contents = _measured(run, images, unread, kind)
    warnings = tuple(map(str, contents.findings))
    for line in warnings:
        log.warning("%s", line)
    with replacing(output, overwrite=overwrite) as temporary:
        temporary.write_text(page_of(contents), encoding="utf-8")
    return Report(tuple(images), warnings)


def _measured(run: RunFolder, images: Sequence[ImageSummary], unread: list[Finding], device: DeviceName) -> Contents:
    """Compare neighbouring slices, and gather all findings."""
    columns = columns_of(run.folder, images, run.links)
    slices = {image.path for column in columns for image in column.images.values()}
    others = tuple(image for image in images if image.path not in slices)
    seen = findings.merged(_seen(run, columns, others))
    found, matches = find_stack(run, others), {}
    if found is not None:
        stage = findings.stage_of(run, found[0])
        registered = [column.images for column in columns if any(image.section for image in column.images.values())]
        matches = matches_of(registered[-1], found[1], device) if registered else {}
        columns.append(Column(stage, parts_of(*found, device)))
    ratios = {
        column.stage: {
            (first, second): ratio
            for first, second in itertools.pairwise(column.images)
            if not math.isnan(ratio := brightness_ratio(column.images[first], column.images[second]))
        }
        for column in columns
    }
    said = findings.merged([*unread, *findings.of_earlier_runs(run), *findings.of_documents(run)])
    jumps = findings.merged([*findings.of_brightness(ratios), *of_matches(matches), *findings.of_cameras(run)])
    everything = (*said, *seen, *jumps)
    faults = _faults(columns, everything)
    shown = tuple(column for column in columns if column.images or any(stage == column.stage for stage, _ in faults))
    return Contents(
        run=run, images=tuple(images), others=others, columns=shown, findings=everything, faults=faults,
        ratios=ratios, matches=matches,
    )  # fmt: skip


def _faults(columns: Sequence[Column], everything: Iterable[Finding]) -> dict[tuple[str, int], list[str]]:
    """Return the texts of the findings that concern a cell, by stage and slice.

    A stage that was left out for the brain was left out for all slices.
    """
    faults: dict[tuple[str, int], list[str]] = {}
    for line, column in itertools.product(everything, columns):
        if column.stage in line.stages or _MADE_FROM.get(column.stage) in line.stages:
            all_slices = (*column.images, *column.unchanged) if line.left_out else ()
            for number in line.slices or all_slices:
                faults.setdefault((column.stage, number), []).append(line.text)
    return faults


def _seen(run: RunFolder, columns: Sequence[Column], others: Sequence[ImageSummary]) -> Iterable[Finding]:
    """Yield what images show one by one, and beside their neighbours."""
    numbers, empty = {n for column in columns for n in (*column.images, *column.unchanged)}, findings.empty_slices(run)
    yield from findings.of_gaps(run, numbers)
    for image in others:
        name = str(image.path.relative_to(run.folder))
        yield from (Finding(text, stages=(name,)) for text in findings.of_voxels(image))
    for column in columns:
        for number, image in column.images.items():
            if number not in empty:
                yield from (
                    Finding(text, stages=(column.stage,), slices=(number,)) for text in findings.of_voxels(image)
                )
        yield from findings.of_neighbours(column.stage, column.images)
