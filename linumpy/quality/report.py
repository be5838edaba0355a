"""A report of a run: one HTML page with pictures, figures of merit, positions, times and warnings, and nothing outside.

In: a folder of results, of ``linum-pipeline`` or of single commands. Out: the page.
"""

from __future__ import annotations

import base64
import datetime
import html
import io
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from linumpy import __version__
from linumpy.errors import LinumpyError
from linumpy.io.output.checks import check_apart
from linumpy.io.output.files import check_file, replacing
from linumpy.mosaic.io.figures import draw_positions
from linumpy.pictures import extent_um, percentiles, scale_bar_um
from linumpy.quality.images import ImageSummary, summarize, with_similarities
from linumpy.quality.run_folder import RunFolder, look_into, robust_outliers
from linumpy.registration.positions import TilePositions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

#: Pictures of files that are put into the page, at most.
_PICTURES = 60
#: Pixels along an axis of an image's picture, and of a file's, whose text has to be read; quality of JPEG.
_PIXELS, _FILE_PIXELS, _QUALITY = 320, 800, 80
#: Degrees from the median angle of the camera against the stage, above which positions get a warning.
_TURNED = 0.2
#: Share of rejected pairs, and RMS in voxels, above which positions get a warning.
_REJECTED, _RMS = 0.25, 0.5

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
    """What a page says.

    Attributes
    ----------
    images : tuple of ImageSummary
        In order.
    warnings : tuple of str
        What a user should look at.
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
        ``linum-pipeline``, also in folders below it.
    output : str or Path
        The page to write.
    use_gpu : bool
        Whether to read images to the GPU and compute there.
    overwrite : bool
        Whether to replace an existing page.
    follow_links : bool
        Whether files and images that symbolic links lead to are reported too. ``linum-pipeline`` links to mosaics that
        it need not change, which are left out by default.

    Returns
    -------
    Report
        What the page says. An image that cannot be read is a warning.

    Raises
    ------
    FileExistsError, FileNotFoundError, SourceError
        An existing page, a folder that does not exist or holds nothing to report.
    GpuUnavailableError
        `use_gpu` and there is no CUDA device.
    """
    check_file(output, overwrite=overwrite)
    found = look_into(folder, follow_links=follow_links)
    check_apart([output], found.images)
    warnings = [*found.unread, *(f"{name}: nothing was recorded in this slice" for name in found.empty)]
    images = []
    for path in found.images:
        try:
            images.append(summarize(path, use_gpu=use_gpu))
        except (LinumpyError, ValueError, OSError) as error:
            warnings.append(f"{_name(found, path)} cannot be read: {error}")
    images = with_similarities(images)
    warnings += [*_of_images(found, images), *_of_positions(found)]
    for line in warnings:
        log.warning("%s", line)
    with replacing(output, overwrite=overwrite) as temporary:
        temporary.write_text(_page(found, images, warnings), encoding="utf-8")
    return Report(tuple(images), tuple(warnings))


def _name(found: RunFolder, path: Path) -> str:
    return str(path.relative_to(found.folder))


def _of_images(found: RunFolder, images: Sequence[ImageSummary]) -> Iterable[str]:
    for image in images:
        if image.constant:
            yield f"{_name(found, image.path)}: all voxels are equal"
        elif image.not_finite > 0 and image.section is not None:
            yield f"{_name(found, image.path)}: {100 * image.not_finite:.2g} % of the voxels are NaN or infinite"
    for parent in sorted({image.path.parent for image in images}):
        group = [image for image in images if image.path.parent == parent and image.section is not None]
        for label, values in (
            ("share of tissue", [image.tissue for image in group]),
            ("sharpness", [image.sharpness for image in group]),
            ("similarity to the next slice", [image.similarity for image in group]),
        ):
            for image, odd in zip(group, robust_outliers(np.array(values, float)), strict=True):
                if odd:
                    yield f"{_name(found, image.path)}: its {label} is far from that of the others"


def _of_positions(found: RunFolder) -> Iterable[str]:
    for path, one in found.positions:
        missing, rejected = int((~one.present).sum()), sum(bool(pair.rejected) for pair in one.pairs)
        if missing:
            yield f"{_name(found, path)}: {missing} of {one.present.size} tiles are missing"
        if one.pairs and rejected > _REJECTED * len(one.pairs):
            yield f"{_name(found, path)}: {rejected} of {len(one.pairs)} pairs of tiles were rejected"
        if one.rms_residual > _RMS:
            yield f"{_name(found, path)}: tiles fit to {one.rms_residual:.2f} voxels RMS only"
    yield from _of_cameras(found)


def _of_cameras(found: RunFolder) -> Iterable[str]:
    """Warn of slices in which the camera is turned differently: it moved, or their positions are wrong."""
    located = [(path, one.model.degrees) for path, one in found.positions if one.pairs]
    for axis, name in enumerate(("rows", "columns")):
        degrees = np.array([both[axis] for _, both in located])
        for (path, _), angle, odd in zip(located, degrees, robust_outliers(degrees), strict=True):
            if odd and abs(angle - np.median(degrees)) > _TURNED:
                yield (
                    f"{_name(found, path)}: the camera is turned by {angle:.2f}° against the stage along {name}, "
                    f"{np.median(degrees):.2f}° is the median of all slices"
                )


def _page(found: RunFolder, images: Sequence[ImageSummary], warnings: Sequence[str]) -> str:
    title = html.escape(f"Report of {found.folder.resolve().name}")
    date = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
    listed = "".join(f"<li>{html.escape(line)}</li>" for line in warnings)
    parts = [
        f"<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>",
        f"</head><body><h1>{title}</h1><p>{date}, linumpy {__version__}, {len(images)} images</p><h2>Warnings</h2>",
        f"<ul class='warnings'>{listed}</ul>" if warnings else "<p class='none'>None.</p>",
    ]
    if found.stages:
        rows = [
            (str(s["name"]), str(s["done"]), str(s["kept"]), _number(s["seconds"]), _number(s["wall_seconds"]))
            for s in found.stages
        ]
        parts += ["<h2>Times</h2>", _html_table(("stage", "done", "kept", "task s", "last run s"), rows)]
    if images:
        parts += ["<h2>Images</h2>", _of_all_images(found, images)]
    if found.positions:
        parts.append("<h2>Positions of tiles</h2>")
        parts += [_of_tiles(_name(found, path), one) for path, one in found.positions]
    if images:
        parts.append("<h2>Pictures</h2>")
        parts += [_of_image(found, image) for image in images]
    parts += [_of_file(found, path) for path in found.pictures[:_PICTURES]]
    if len(found.pictures) > _PICTURES:
        parts.append(f"<p>{len(found.pictures) - _PICTURES} more pictures are in the folder.</p>")
    for path, table in found.tables:
        if table:
            parts += [f"<h2>{html.escape(_name(found, path))}</h2>", _html_table(table[0], table[1:])]
    return "\n".join([*parts, "</body></html>\n"])


def _of_all_images(found: RunFolder, images: Sequence[ImageSummary]) -> str:
    head = ("image", "voxels", "µm", "type", "tissue %", "sharpness", "SSIM to next", "not finite %")
    rows = [
        (
            _name(found, image.path), f"{image.axes} {' × '.join(map(str, image.shape))}",
            " × ".join(f"{step:.4g}" for step in image.spacing), image.dtype, _number(100 * image.tissue),
            _number(image.sharpness), _number(image.similarity), _number(100 * image.not_finite),
        )
        for image in images
    ]  # fmt: skip
    return _html_table(head, rows)


def _of_tiles(name: str, one: TilePositions) -> str:
    pairs = [(pair.fixed, pair.moving, pair.confidence, bool(pair.rejected)) for pair in one.pairs]
    figure = draw_positions(one.positions, one.present, one.tile_shape, pairs, source=name)
    rejected = sum(bool(pair.rejected) for pair in one.pairs)
    fit = f", the others fit to {one.rms_residual:.3f} voxels RMS" if math.isfinite(one.rms_residual) else ""
    text = f"{one.grid[0]} × {one.grid[1]} tiles, {len(one.pairs)} pairs, {rejected} rejected{fit}"
    return _figure(figure, text)


def _of_image(found: RunFolder, image: ImageSummary) -> str:
    name = _name(found, image.path)
    lateral = [axis.upper() for axis in image.axes if image.section is None or axis != "z"]
    names = lateral[0], lateral[1]
    text = f"{name}, resolution {image.level}"
    if image.section is None:
        return _small(image.projection, (image.pixel[0], image.pixel[1]), names, text)
    above = _small(image.projection, (image.pixel[1], image.pixel[2]), names, f"{text}, mean along Z")
    middle = f"{text}, the section in the middle"
    return above + _small(image.section, (image.pixel[0], image.pixel[2]), ("Z", names[1]), middle)


def _small(values: np.ndarray, pixel: tuple[float, float], names: tuple[str, str], text: str) -> str:
    """Return the picture of an image, with a scale bar below: a hundred times as fast as a figure of its own."""
    height, width = extent_um(values.shape, pixel)
    low, high = percentiles(values, (0.5, 99.5))
    bar = scale_bar_um(width)
    scale = f"<div class='bar' style='width: {100 * bar / width:.2f}%'></div>{bar:g} µm"
    caption = html.escape(f"{text}; {names[1]} to the right, {names[0]} down; black at {low:.4g}, white at {high:.4g}")
    shape = f" style='aspect-ratio: {width:.6g} / {height:.6g}'"
    return _embedded(
        _jpeg(_reduced(values, _PIXELS), low, high), f"{scale}<br>{caption}", caption, shape, " class='small'"
    )


def _reduced(values: np.ndarray, pixels: int) -> np.ndarray:
    """Return the means of blocks, such that at most so many are left along the first two axes."""
    step = [-(-count // pixels) for count in values.shape[:2]]
    rows, columns = (count // one for count, one in zip(values.shape, step, strict=False))
    whole = values[: rows * step[0], : columns * step[1]]
    blocks: np.ndarray = whole.reshape(rows, step[0], columns, step[1], *values.shape[2:]).mean(axis=(1, 3))
    return blocks


def _jpeg(values: np.ndarray, low: float, high: float) -> bytes:
    from matplotlib.image import imsave

    file = io.BytesIO()
    imsave(file, values, vmin=low, vmax=high, cmap="gray", format="jpg", pil_kwargs={"quality": _QUALITY})
    return file.getvalue()


def _of_file(found: RunFolder, path: Path) -> str:
    from matplotlib.image import imread

    name = html.escape(_name(found, path))
    try:
        pixels = imread(path)
    except (OSError, SyntaxError, ValueError) as error:  # SyntaxError: what Pillow raises for a damaged PNG
        return f"<p>{name} cannot be read: {html.escape(str(error))}</p>"
    return _embedded(_jpeg(_reduced(pixels.astype(np.float32), _FILE_PIXELS), 0, 1), name, name)


def _figure(figure: Figure, text: str) -> str:
    file = io.BytesIO()
    figure.savefig(file, dpi=90, format="jpg", pil_kwargs={"quality": _QUALITY})
    return _embedded(file.getvalue(), html.escape(text), html.escape(text))


def _embedded(jpeg: bytes, caption: str, alt: str, shape: str = "", kind: str = "") -> str:
    data = base64.b64encode(jpeg).decode()
    picture = f"<img alt='{alt}'{shape} src='data:image/jpeg;base64,{data}'>"
    return f"<figure{kind}>{picture}<figcaption>{caption}</figcaption></figure>"


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "–"


def _html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["<table><tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return "".join([*lines, "</table>"])
