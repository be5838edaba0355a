"""A report of a run: one self-contained HTML page with pictures, figures of merit, positions, times and warnings.

In: a folder of results, made by ``linum-pipeline`` or by single commands. Out: the page.
"""

from __future__ import annotations

import base64
import datetime
import html
import io
import logging
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from linumpy import __version__
from linumpy.errors import LinumpyError
from linumpy.io.output.checks import check_apart
from linumpy.io.output.files import check_file, replacing
from linumpy.mosaic.io.figures import draw_positions
from linumpy.pictures import colored, extent_um, percentiles, render, scale_bar_label, scale_bar_um
from linumpy.quality.images import ImageSummary, summarize, with_similarities
from linumpy.quality.measures import robust_outliers
from linumpy.quality.run_folder import RunFolder, look_into
from linumpy.registration.positions import TilePositions

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)

#: Maximum number of picture files in the page.
_PICTURES = 60
#: Maximum pixels along an axis of an image's picture, and of a picture file, which may have text; quality of the JPEGs.
_PIXELS, _FILE_PIXELS, _QUALITY = 320, 800, 80
#: Difference from the median angle between camera and stage, in degrees, above which positions get a warning.
_MAX_TURN = 0.2
#: Share of rejected pairs, and RMS in voxels, above which positions get a warning.
_MAX_REJECTED, _MAX_RMS = 0.25, 0.5

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1080px; padding: 0 1em; color: #1a1a1a; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; font-size: 13px; margin: .6em 0; display: block; overflow-x: auto; }
th, td { padding: .2em .7em; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
ul.warnings li { color: #8a3b00; } .none { color: #2c6e2c; }
figure { display: inline-block; margin: .4em .6em .4em 0; width: 520px; max-width: 100%; vertical-align: top; }
figure.small { width: 320px; }
figure img { width: 100%; box-sizing: border-box; border: 1px solid #ddd; }
figcaption { font-size: 12px; color: #555; overflow-wrap: anywhere; }
.bar { border-top: 3px solid #1a1a1a; margin-top: 3px; }
"""


@dataclass(frozen=True)
class Report:
    """The content of a page.

    Attributes
    ----------
    images : tuple of ImageSummary
        In the order of their paths.
    warnings : tuple of str
        Results that a user should check.
    """

    images: tuple[ImageSummary, ...]
    warnings: tuple[str, ...]


def write_report(
    folder: str | Path,
    output: str | Path,
    *,
    use_gpu: bool = False,
    overwrite: bool = False,
    follow_links: bool = False,
) -> Report:
    """Write the report of a folder as one HTML page.

    Parameters
    ----------
    folder : str or Path
        Folder of results: OME-Zarr images, positions of tiles (JSON), tables (CSV), pictures (PNG), and the summary of
        ``linum-pipeline``; also in folders up to four levels below it.
    output : str or Path
        The page to write.
    use_gpu : bool
        Whether to read images to the GPU and compute there.
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
        `use_gpu` and there is no CUDA device.
    """
    check_file(output, overwrite=overwrite)
    run = look_into(folder, follow_links=follow_links)
    check_apart([output], run.images)
    warnings = [*run.unread, *(f"{name}: nothing was recorded in this slice" for name in run.empty)]
    images = []
    for path in run.images:
        try:
            images.append(summarize(path, use_gpu=use_gpu))
        except (LinumpyError, ValueError, OSError) as error:
            warnings.append(f"{_name(run, path)} cannot be read: {error}")
    images = with_similarities(images, use_gpu=use_gpu)
    warnings += [*_warnings_of_images(run, images), *_warnings_of_positions(run)]
    for line in warnings:
        log.warning("%s", line)
    with replacing(output, overwrite=overwrite) as temporary:
        temporary.write_text(_page(run, images, warnings), encoding="utf-8")
    return Report(tuple(images), tuple(warnings))


def _name(run: RunFolder, path: Path) -> str:
    """Return the path of a file in the folder, as text."""
    return str(path.relative_to(run.folder))


def _warnings_of_images(run: RunFolder, images: Sequence[ImageSummary]) -> Iterable[str]:
    for image in images:
        if image.constant:
            yield f"{_name(run, image.path)}: all voxels are equal"
        elif image.not_finite > 0 and image.section is not None:
            yield f"{_name(run, image.path)}: {100 * image.not_finite:.2g} % of the voxels are NaN or infinite"
    for parent in sorted({image.path.parent for image in images}):
        group = [image for image in images if image.path.parent == parent and image.section is not None]
        for quantity, values in (
            ("share of tissue", [image.tissue for image in group]),
            ("sharpness", [image.sharpness for image in group]),
            ("similarity to the next slice", [image.similarity for image in group]),
        ):
            for image, is_outlier in zip(group, robust_outliers(np.array(values, float)), strict=True):
                if is_outlier:
                    yield f"{_name(run, image.path)}: its {quantity} is far from that of the others"


def _warnings_of_positions(run: RunFolder) -> Iterable[str]:
    for path, positions in run.positions:
        missing, rejected = int((~positions.present).sum()), sum(bool(pair.rejected) for pair in positions.pairs)
        if missing:
            yield f"{_name(run, path)}: {missing} of {positions.present.size} tiles are missing"
        if positions.pairs and rejected > _MAX_REJECTED * len(positions.pairs):
            yield f"{_name(run, path)}: {rejected} of {len(positions.pairs)} pairs of tiles were rejected"
        if positions.rms_leave_one_out > _MAX_RMS:
            yield f"{_name(run, path)}: tiles fit to {positions.rms_leave_one_out:.2f} voxels RMS only"
    yield from _warnings_of_cameras(run)


def _warnings_of_cameras(run: RunFolder) -> Iterable[str]:
    """Warn of slices with another angle between camera and stage: the camera moved, or the positions are wrong."""
    located = [(path, positions.model.degrees) for path, positions in run.positions if positions.pairs]
    for axis, name in enumerate(("rows", "columns")):
        degrees = np.array([both[axis] for _, both in located])
        for (path, _), angle, is_outlier in zip(located, degrees, robust_outliers(degrees), strict=True):
            if is_outlier and abs(angle - np.median(degrees)) > _MAX_TURN:
                yield (
                    f"{_name(run, path)}: the camera is turned by {angle:.2f}° against the stage along {name}, "
                    f"{np.median(degrees):.2f}° is the median of all slices"
                )


def _page(run: RunFolder, images: Sequence[ImageSummary], warnings: Sequence[str]) -> str:
    title = html.escape(f"Report of {run.folder.resolve().name}")
    date = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
    listed = "".join(f"<li>{html.escape(line)}</li>" for line in warnings)
    parts = [
        f"<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>",
        f"</head><body><h1>{title}</h1><p>{date}, linumpy {__version__}, {len(images)} images</p><h2>Warnings</h2>",
        f"<ul class='warnings'>{listed}</ul>" if warnings else "<p class='none'>None.</p>",
    ]
    if run.stages:
        rows = [
            (
                str(stage["name"]),
                str(stage["done"]),
                str(stage["kept"]),
                _number(stage["seconds"]),
                _number(stage["wall_seconds"]),
            )
            for stage in run.stages
        ]
        parts += ["<h2>Times</h2>", _html_table(("stage", "done", "kept", "task s", "last run s"), rows)]
    if images:
        parts += ["<h2>Images</h2>", _table_of_images(run, images)]
    with ThreadPoolExecutor() as pool:  # Pillow and NumPy work outside of Python's lock
        if run.positions:
            parts.append("<h2>Positions of tiles</h2>")
            parts += pool.map(lambda both: _picture_of_tiles(_name(run, both[0]), both[1]), run.positions)
        if images:
            parts.append("<h2>Pictures</h2>")
            parts += pool.map(partial(_pictures_of_image, run), images)
        parts += pool.map(partial(_picture_file, run), run.pictures[:_PICTURES])
    if len(run.pictures) > _PICTURES:
        parts.append(f"<p>{len(run.pictures) - _PICTURES} more pictures are in the folder.</p>")
    for path, table in run.tables:
        if table:
            parts += [f"<h2>{html.escape(_name(run, path))}</h2>", _html_table(table[0], table[1:])]
    return "\n".join([*parts, "</body></html>\n"])


def _table_of_images(run: RunFolder, images: Sequence[ImageSummary]) -> str:
    head = ("image", "voxels", "µm", "type", "tissue %", "sharpness", "SSIM to next", "not finite %")
    rows = [
        (
            _name(run, image.path), f"{image.axes} {' × '.join(map(str, image.shape))}",
            " × ".join(f"{step:.4g}" for step in image.spacing), image.dtype, _number(100 * image.tissue),
            _number(image.sharpness), _number(image.similarity), _number(100 * image.not_finite),
        )
        for image in images
    ]  # fmt: skip
    return _html_table(head, rows)


def _picture_of_tiles(name: str, tiles: TilePositions) -> str:
    pairs = [(pair.fixed, pair.moving, pair.confidence, bool(pair.rejected)) for pair in tiles.pairs]
    picture = render(draw_positions(tiles.positions, tiles.present, tiles.tile_shape, pairs, source=name))
    rejected = sum(bool(pair.rejected) for pair in tiles.pairs)
    fit = (
        f", the others fit to {tiles.rms_leave_one_out:.3f} voxels RMS"
        if math.isfinite(tiles.rms_leave_one_out)
        else ""
    )
    text = f"{tiles.grid[0]} × {tiles.grid[1]} tiles, {len(tiles.pairs)} pairs, {rejected} rejected{fit}"
    return _embedded(_jpeg(picture), html.escape(text), html.escape(text))


def _pictures_of_image(run: RunFolder, image: ImageSummary) -> str:
    name = _name(run, image.path)
    lateral = [axis.upper() for axis in image.axes if image.section is None or axis != "z"]
    names = lateral[0], lateral[1]
    text = f"{name}, resolution {image.level}"
    if image.section is None:
        return _small(image.projection, (image.pixel[0], image.pixel[1]), names, text)
    above = _small(image.projection, (image.pixel[1], image.pixel[2]), names, f"{text}, mean along Z")
    middle = f"{text}, the section in the middle"
    return above + _small(image.section, (image.pixel[0], image.pixel[2]), ("Z", names[1]), middle)


def _small(values: np.ndarray, pixel: tuple[float, float], names: tuple[str, str], text: str) -> str:
    """Return a picture with a scale bar below."""
    from PIL import Image

    height, width = extent_um(values.shape, pixel)
    shown = _reduced(values, _PIXELS)
    low, high = percentiles(shown, (0.5, 99.5))
    bar = scale_bar_um(width)
    scale = f"<div class='bar' style='width: {100 * bar / width:.2f}%'></div>{scale_bar_label(bar)}"
    caption = html.escape(f"{text}; {names[1]} to the right, {names[0]} down; black at {low:.4g}, white at {high:.4g}")
    style = f" style='aspect-ratio: {width:.6g} / {height:.6g}'"
    picture = Image.fromarray(colored(shown, (low, high)))
    return _embedded(_jpeg(picture), f"{scale}<br>{caption}", caption, style, " class='small'")


def _reduced(values: np.ndarray, max_pixels: int) -> np.ndarray:
    """Return means over blocks, at most `max_pixels` along each axis."""
    step = [-(-count // max_pixels) for count in values.shape]
    rows, columns = (count // size for count, size in zip(values.shape, step, strict=True))
    complete = values[: rows * step[0], : columns * step[1]]
    # One axis after the other: both at a time take NumPy ten times as long.
    lines = complete.reshape(rows, step[0], complete.shape[1]).mean(axis=1)
    blocks: np.ndarray = lines.reshape(rows, columns, step[1]).mean(axis=2)
    return blocks


def _jpeg(picture: Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, format="JPEG", quality=_QUALITY)
    return file.getvalue()


def _picture_file(run: RunFolder, path: Path) -> str:
    from PIL import Image

    name = html.escape(_name(run, path))
    try:
        with Image.open(path) as opened:
            picture = _eight_bits(opened)
    # Pillow raises SyntaxError for a damaged PNG.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return f"<p>{name} cannot be read: {html.escape(str(error))}</p>"
    picture.thumbnail((_FILE_PIXELS, _FILE_PIXELS), reducing_gap=1.0)
    return _embedded(_jpeg(picture), name, name)


def _eight_bits(picture: Image) -> Image:
    """Return a picture in RGB, on white where it is transparent; Pillow would clip gray values of 16 bits at 255."""
    from PIL import Image

    if picture.mode.startswith("I"):
        return Image.fromarray((np.asarray(picture) / 257).astype(np.uint8)).convert("RGB")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    above = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("RGB")


def _embedded(jpeg: bytes, caption: str, alt: str, style: str = "", css_class: str = "") -> str:
    """Return the HTML of a picture; `style` and `css_class` are attributes of HTML that begin with a space."""
    data = base64.b64encode(jpeg).decode()
    picture = f"<img alt='{alt}'{style} src='data:image/jpeg;base64,{data}'>"
    return f"<figure{css_class}>{picture}<figcaption>{caption}</figcaption></figure>"


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "–"


def _html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["<table><tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return "".join([*lines, "</table>"])
