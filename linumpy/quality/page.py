"""The HTML page of a report: warnings, the table of slices, numbers, and the pictures that stages wrote.

In: :class:`Contents`. Out: the text of the page, which refers to no other file.
"""

from __future__ import annotations

import datetime
import html
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from linumpy.io.output.results import JSON
from linumpy.mosaic.io.figures import draw_positions
from linumpy.pictures import data_url, render, scale_bar_label, scale_bar_um
from linumpy.quality.findings import (
    Finding,
    empty_slices,
    gap_text,
    is_jump,
    records,
    rejection,
    stage_of,
)
from linumpy.quality.images import ImageSummary
from linumpy.quality.overview import Cells, Column, draw_cells, layout_of
from linumpy.quality.run_folder import RunFolder
from linumpy.quality.stack_parts import Match
from linumpy.registration.positions import TilePositions
from linumpy.version import __version__

#: Pixels of a cell's width and of its section's height; pixels of the width of other images.
_WIDTH, _SECTION, _LARGE = 200, 64, 480
#: Maximum number of pictures of stages in the page, their width and height in pixels, and quality of all JPEGs.
_PICTURES, _SIZE, _QUALITY = 400, (640, 480), 80
#: Maximum numbers of a list that a table shows, and columns up to which a table of a stage is not collapsed.
_LIST, _OPEN = 4, 12

#: Style of every page that linumpy writes, in the light and the dark colours of the reader's system.
_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1a1a1a; --faint: #555; --line: #ccc; --bad: #c00000;
  --warning: #8a3b00; --good: #2c6e2c; }
@media (prefers-color-scheme: dark) { :root { --page: #16181a; --text: #e6e6e6; --faint: #a8adb2; --line: #484c50;
  --bad: #ff8078; --warning: #ffb070; --good: #7fce7f; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em; color: var(--text); background: var(--page); }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid var(--line); }
h3 { font-size: 1em; margin-bottom: 0; }
p, ul { max-width: 1080px; } ul.warnings li { color: var(--warning); } .none { color: var(--good); }
table { border-collapse: collapse; font-size: 13px; margin: .6em 0; }
.wide { overflow-x: auto; max-width: calc(100vw - 4em); } summary { font-weight: bold; margin: .6em 0; }
th, td { padding: .2em .7em; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr.bad td, .bad { color: var(--bad); } .small { font-size: 11px; color: var(--faint); font-weight: normal; }
figcaption { font-size: 12px; color: var(--faint); }
"""
#: Style of the slices and pictures of a report.
_SLICES = f"""
table.slices {{ border-collapse: separate; border-spacing: 2px; }}
table.slices th, table.slices td {{ padding: 2px; border: 0; white-space: normal; }}
table.slices th, table.slices td {{ text-align: left; vertical-align: top; }}
table.slices tr.head th {{ font-weight: normal; position: sticky; top: 0; background: var(--page); }}
table.slices th.row {{ width: 110px; min-width: 110px; }}
table.slices td {{ border: 3px solid var(--page); }} table.slices td.bad {{ border-color: #d00000; }}
table.slices td.text {{ color: var(--faint); }} table.slices td.bad {{ color: var(--bad); }}
table.slices img {{ display: block; }}
.why {{ font-size: 11px; line-height: 1.25; max-height: 3.75em; overflow: hidden; width: {_WIDTH}px; }}
.bar {{ border-top: 3px solid var(--text); margin: 3px 0 0; }}
figure {{ display: inline-block; margin: 4px; width: 400px; vertical-align: top; }}
figure img {{ width: 400px; }} figcaption {{ height: 2.8em; overflow: hidden; overflow-wrap: anywhere; }}
"""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a page shows.

    - `others`: images that are none of a slice, such as the whole stack.
    - `columns`: the images of slices, by stage.
    - `findings`: what a reader should know.
    - `faults` ((str, int) to list of str): those that concern a slice in a stage, which is red.
    - `ratios` ((int, int) to float): by stage, the brightness of a slice over that of the slice above.
    - `matches` ((int, int) to Match): how neighbours match in the stack.
    """

    run: RunFolder
    images: tuple[ImageSummary, ...]
    others: tuple[ImageSummary, ...]
    columns: tuple[Column, ...]
    findings: tuple[Finding, ...]
    faults: Mapping[tuple[str, int], Sequence[str]]
    ratios: Mapping[str, Mapping[tuple[int, int], float]]
    matches: Mapping[tuple[int, int], Match]


def page_of(contents: Contents) -> str:
    """Return the text of the page."""
    run = contents.run
    listed = "".join(f"<li>{html.escape(str(line))}</li>" for line in contents.findings)
    parts = [
        f"<h2>Warnings</h2><ul class='warnings'>{listed}</ul>"
        if listed
        else "<h2>Warnings</h2><p class='none'>None.</p>",
    ]
    with ThreadPoolExecutor() as pool:  # Pillow and NumPy work outside of Python's lock
        if contents.columns:
            parts += ["<h2>Slices</h2>", *_slices(contents, pool)]
        parts += _others(contents, pool)
        parts += _numbers(contents)
        parts += _pictures(run, pool)
    for path, lines in run.tables:
        if lines:
            parts.append(_details(str(path.relative_to(run.folder)), table(lines[0], lines[1:])))
    about = f"{len(contents.images)} images"
    return document(f"Report of {run.folder.resolve().name}", parts, style=_SLICES, about=about)


def document(title: str, parts: Iterable[str], *, style: str, about: str) -> str:
    """Return the text of a page of HTML, from a title and `about` as plain texts, and parts in HTML."""
    title, about = html.escape(title), html.escape(about)
    date = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
    head = f"<meta charset='utf-8'><title>{title}</title><style>{_STYLE}{style}</style>"
    return "\n".join([
        f"<!DOCTYPE html><html lang='en'><head>{head}</head>",
        f"<body><h1>{title}</h1><p>{date}, linumpy {__version__}, {about}</p>", *parts, "</body></html>\n",
    ])  # fmt: skip


def _slices(contents: Contents, pool: ThreadPoolExecutor) -> Iterable[str]:
    """Yield the table of slices: a row for each slice, a column for each stage."""
    columns, layout = contents.columns, layout_of(contents.columns, _WIDTH, _SECTION)
    drawn = list(pool.map(lambda column: draw_cells(column, layout) if column.images else None, columns))
    yield (
        "<p>In each cell: the mean along depth, below it the middle section, stretched along depth as the head says. "
        "The plans of a column have one grey scale, and its sections have one. Red: a warning concerns this slice.</p>"
    )
    yield "<table class='slices'><tr class='head'><th class='row'>slice</th>"
    for column, cells in zip(columns, drawn, strict=True):
        yield f"<th><b>{html.escape(column.stage)}</b>{_scale(cells)}</th>"
    yield "</tr>"
    empty, last = empty_slices(contents.run), None
    for number in sorted({*empty, *(n for column in columns for n in (*column.images, *column.unchanged))}):
        if last is not None and number - last > 1:
            yield f"<tr><th class='bad' colspan='{len(columns) + 1}'>{gap_text(last, number)}</th></tr>"
        last, above = number, last
        if number in empty:
            text = html.escape(f"slice {number}: nothing was recorded in {empty[number]}")
            yield f"<tr><th class='bad' colspan='{len(columns) + 1}'>{text}</th></tr>"
            continue
        yield f"<tr><th class='row'>slice {number}{_between(contents, above, number)}</th>"
        for column, cells in zip(columns, drawn, strict=True):
            why = contents.faults.get((column.stage, number), ())
            yield _cell(column, cells, number, f"{column.stage}, slice {number}", why)
        yield "</tr>"
    yield "</table>"


def _scale(cells: Cells | None) -> str:
    """Return the scale bar and the limits of the grey scale of a column."""
    if cells is None:
        return ""
    width = next(iter(cells.pictures.values())).shape[1]
    bar = scale_bar_um(width * cells.pixel_um)
    line = f"<div class='bar' style='width: {bar / cells.pixel_um:.0f}px'></div>"
    limits = " to ".join(map(_text, cells.plan_limits))
    section = f"section × {cells.stretch:.2g}, {' to '.join(map(_text, cells.section_limits))}"
    below = section if cells.stretch else "below: profile of the middle row"
    return f"{line}<div class='small'>{scale_bar_label(bar)}, {limits}<br>{below}</div>"


def _between(contents: Contents, last: int | None, number: int) -> str:
    """Return what was measured between a slice and the one above."""
    if last is None:
        return ""
    pair, lines = (last, number), []
    known = [of_stage[pair] for of_stage in contents.ratios.values() if pair in of_stage]
    if known:
        lines.append((f"brightness × {known[-1]:.2f}", is_jump(known[-1])))
    if pair in contents.matches and math.isfinite(contents.matches[pair].correlation):
        match = contents.matches[pair]
        lines.append((f"correlation {match.correlation:.2f}", match.is_bad))
    shown = "".join(f"<br><span{' class=bad' if bad else ''}>{text}</span>" for text, bad in lines)
    return f"<div class='small'>to slice {last}:{shown}</div>" if lines else ""


def _cell(column: Column, cells: Cells | None, number: int, alt: str, faults: Sequence[str]) -> str:
    why = html.escape("; ".join(faults), quote=True)
    below = f"<div class='why' title='{why}'>{why}</div>" if why else ""
    if cells is None or number not in cells.pictures:
        text = "unchanged" if number in column.unchanged else "no image"
        return f"<td class='text{' bad' if why else ''}'>{text}{below}</td>"
    pixels = cells.pictures[number]
    size = f"width='{pixels.shape[1]}' height='{pixels.shape[0]}'"
    picture = f"<img {size} alt='{html.escape(alt)}' src='{_source(Image.fromarray(pixels))}'>"
    return f"<td{' class=bad' if why else ''}>{picture}{below}</td>"


def _others(contents: Contents, pool: ThreadPoolExecutor) -> Iterable[str]:
    """Yield a table of one row with the images that are none of a slice."""
    if not contents.others:
        return
    names = [str(image.path.relative_to(contents.run.folder)) for image in contents.others]
    columns = [Column(name, {0: image}) for name, image in zip(names, contents.others, strict=True)]
    layout = layout_of(columns, _LARGE)
    drawn = list(pool.map(lambda column: draw_cells(column, layout), columns))
    yield "<h2>Whole volumes and other images</h2><table class='slices'><tr class='head'>"
    yield from (f"<th><b>{html.escape(name)}</b>{_scale(cells)}</th>" for name, cells in zip(names, drawn, strict=True))
    yield "</tr><tr>"
    yield from (_cell(column, cells, 0, column.stage, ()) for column, cells in zip(columns, drawn, strict=True))
    yield "</tr></table>"


def _numbers(contents: Contents) -> Iterable[str]:
    """Yield tables of what stages wrote and what was measured."""
    run = contents.run
    yield "<h2>Numbers</h2>"
    for path, document in run.documents.items():
        if records(document, "slices") and records(document, "pairs"):
            yield f"<h3>Registrations of slices, {html.escape(str(path.relative_to(run.folder)))}</h3>"
            yield _registrations(document)
    if run.positions:
        head = ("positions", "tiles", "missing", "by the model", "pairs", "rejected", "RMS voxels", "why")
        rows = [_tiles(path, run.documents[path]) for path, _ in run.positions]
        yield "<h3>Positions of tiles</h3>" + table(head, rows)
    groups: dict[str, dict[Path, dict[str, str]]] = {}
    for path, document in run.documents.items():
        numbers = {} if records(document, "pairs") or records(document, "tiles") else dict(_scalars(document))
        if numbers:
            groups.setdefault(stage_of(run, path), {})[path] = numbers
    for stage, files in groups.items():
        keys = list(dict.fromkeys(key for numbers in files.values() for key in numbers))
        rows = [(path.stem, *(numbers.get(key, "–") for key in keys)) for path, numbers in files.items()]
        yield _details(f"Numbers of {stage}", table(("file", *keys), rows), is_open=len(keys) <= _OPEN)
    if run.stages:
        keys = ["name", "done", "kept", "seconds", "wall_seconds"]
        rows = [tuple(_text(stage[key]) for key in keys) for stage in run.stages]
        rows += [(name, "left out", *["–"] * 3) for name in run.left_out]
        yield "<h3>Times</h3>" + table(("stage", "done", "kept", "task s", "last run s"), rows)
    if contents.images:
        yield _details("Images", _images(contents))


def _registrations(document: Mapping[str, JSON]) -> str:
    pairs = records(document, "pairs")
    head = ("slices", "correlation", "overlap %", "error µm", "residual µm", "evidence", "verdict")
    rows = []
    for pair in pairs:
        overlap = pair.get("overlap")
        share = 100 * overlap if isinstance(overlap, float) else overlap
        numbers = [pair.get("correlation"), share, *(pair.get(key) for key in ("error_um", "residual_um", "evidence"))]
        rows.append((
            f"{pair.get('fixed_id')} and {pair.get('moving_id')}", *map(_text, numbers), rejection(pair) or "accepted"
        ))  # fmt: skip
    places = Counter(str(entry.get("placed_by", "pairs")) for entry in records(document, "slices"))
    placed = ", ".join(f"{count} by {place}" for place, count in places.items())
    bad = {number for number, pair in enumerate(pairs) if rejection(pair)}
    return f"<p class='small'>Slices placed: {html.escape(placed)}.</p>" + table(head, rows, bad)


def _tiles(path: Path, document: Mapping[str, JSON]) -> tuple[str, ...]:
    tiles, pairs = records(document, "tiles"), records(document, "pairs")
    present = [tile for tile in tiles if tile.get("present", True)]
    by_model = sum(tile.get("placed_by") == "model" for tile in present)
    reasons = Counter(rejection(pair) for pair in pairs if pair.get("rejected"))
    numbers = (len(tiles), len(tiles) - len(present), by_model, len(pairs), sum(reasons.values()))
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    return (path.stem, *map(str, numbers), _text(document.get("rms_leave_one_out")), why)


def _scalars(document: Mapping[str, JSON], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield the numbers and short lists of numbers of a document, also those of objects in it."""
    for key, value in document.items():
        values = value if isinstance(value, list) else [value]
        if isinstance(value, dict) and not prefix:
            yield from _scalars(value, f"{key}.")
        elif 0 < len(values) <= _LIST and all(type(one) in (int, float) for one in values):
            yield prefix + key, ", ".join(map(_text, values))


def _images(contents: Contents) -> str:
    head = ("image", "voxels", "µm", "type", "tissue %", "sharpness", "not finite %", "resolution")
    rows = [
        (
            str(image.path.relative_to(contents.run.folder)), f"{image.axes} {' × '.join(map(str, image.shape))}",
            " × ".join(f"{step:.4g}" for step in image.spacing), image.dtype, _text(100 * image.tissue),
            _text(image.sharpness), _text(100 * image.not_finite), str(image.level),
        )
        for image in contents.images
    ]  # fmt: skip
    return table(head, rows)


def _pictures(run: RunFolder, pool: ThreadPoolExecutor) -> Iterable[str]:
    """Yield the positions of tiles and the pictures that stages wrote, in collapsed parts of the page."""
    if run.positions:
        yield _details("Positions of tiles", *pool.map(partial(_picture_of_tiles, run), run.positions))
    by_stage: dict[str, list[Path]] = {}
    for path in run.pictures[:_PICTURES]:
        by_stage.setdefault(stage_of(run, path), []).append(path)
    for stage, paths in by_stage.items():
        yield _details(f"Pictures of {stage}", *pool.map(partial(_picture_file, run), paths))
    if len(run.pictures) > _PICTURES:
        yield f"<p>{len(run.pictures) - _PICTURES} more pictures are in the folder.</p>"


def _details(title: str, *parts: str, is_open: bool = False) -> str:
    return "\n".join(
        [f"<details{' open' if is_open else ''}><summary>{html.escape(title)}</summary>", *parts, "</details>"]
    )


def _picture_of_tiles(run: RunFolder, located: tuple[Path, TilePositions]) -> str:
    path, tiles = located
    pairs = [(pair.fixed, pair.moving, pair.confidence, bool(pair.rejected)) for pair in tiles.pairs]
    name = str(path.relative_to(run.folder))
    return _figure(render(draw_positions(tiles.positions, tiles.present, tiles.tile_shape, pairs, source=name)), name)


def _picture_file(run: RunFolder, path: Path) -> str:
    name = str(path.relative_to(run.folder))
    try:
        with Image.open(path) as opened:
            return _figure(_eight_bits(opened), name)
    # Pillow raises SyntaxError for a damaged PNG.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return f"<p>{html.escape(name)} cannot be read: {html.escape(str(error))}</p>"


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Return a picture in RGB, on white where it is transparent; Pillow would clip gray values of 16 bits at 255."""
    if picture.mode.startswith("I"):
        return Image.fromarray((np.asarray(picture) / 257).astype(np.uint8)).convert("RGB")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    above = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("RGB")


def _figure(picture: Image.Image, name: str) -> str:
    picture.thumbnail(_SIZE, reducing_gap=1.0)
    caption = html.escape(name, quote=True)
    return f"<figure><img alt='{caption}' src='{_source(picture)}'><figcaption>{caption}</figcaption></figure>"


def _source(picture: Image.Image) -> str:
    """Return a picture as the address of an image in HTML."""
    file = io.BytesIO()
    picture.save(file, format="JPEG", quality=_QUALITY)
    return data_url(file.getvalue(), "jpeg")


def _text(value: JSON) -> str:
    """Return a value of JSON as text, without an exponent where it is large."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    return str(value) if not isinstance(value, float) else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], bad: Iterable[int] = ()) -> str:
    """Return a table; the rows whose numbers are in `bad` are red."""
    lines = ["<div class='wide'><table><tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"]
    for number, row in enumerate(rows):
        style = " class='bad'" if number in bad else ""
        lines.append(f"<tr{style}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>")
    return "".join([*lines, "</table></div>"])
