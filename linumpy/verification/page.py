"""The HTML page of a verification: its findings, maps of the chunks of arrays, and pictures of the levels.

In: a :class:`Verification`, and its source, of which planes of voxels are read. Out: one page that refers to no other
file, for light and dark screens. Paths and texts of the source are not trusted: they are shown as plain text.
"""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import zarr
from PIL import Image

from linumpy.gpu.zarr_io import read_zarr
from linumpy.io.metadata import Node, open_member
from linumpy.io.ngff.collection import ome_attributes
from linumpy.io.ome import OmeZarrImage, open_image
from linumpy.io.output.checks import check_apart
from linumpy.io.output.files import check_file, replacing
from linumpy.io.source import Source, open_node
from linumpy.pictures import colored, data_url, percentiles, png
from linumpy.plan.read import format_nbytes, format_shape
from linumpy.quality.page import document, table
from linumpy.verification.findings import HARMS, STATES, ArrayResult, Verification, printable

#: Colours of :data:`STATES`: blue, orange and black of Okabe and Ito, which colour-blind people can tell apart too.
COLORS = ("#e3e6e8", "#bcd8ea", "#0072b2", "#e69f00", "#000000")
#: Maximum rows of a table, letters of a text, and characters of all maps and of all pictures of levels.
_ROWS, _LETTERS, _MAPS, _PICTURES = 1000, 300, 500_000, 700_000
#: Maximum pixels of a side of a map, and of a chunk in it; minimum pixels of a side; maximum pixels of a level's side.
_MAP, _CHUNK, _THIN, _LEVEL = 512, 24, 12, 220
#: Maximum voxels of a plane that is read for a picture, and voxels of the chunks that it meets.
_PLANE, _DECODED = 2**24, 2**31
#: Percentiles of the coarsest level that are black and white.
_PERCENTS = 0.5, 99.5

_STYLE = """
th, td { text-align: left; vertical-align: top; white-space: normal; overflow-wrap: anywhere; }
th { white-space: nowrap; } td:first-child, td:nth-child(3) { min-width: 6em; } h3 { overflow-wrap: anywhere; }
figure { display: inline-block; margin: .6em 1.2em .6em 0; vertical-align: top; }
figcaption { max-width: 512px; overflow-wrap: anywhere; } .level figcaption { width: 220px; margin-top: 4px; }
.map { display: grid; grid-template-columns: auto 1fr; gap: 2px 4px; width: max-content; font-size: 11px; }
.across, .down { display: flex; justify-content: space-between; gap: .8em; color: var(--faint); }
.across, .map figcaption { grid-column: 2; } .down { flex-direction: column; text-align: right; }
img { image-rendering: pixelated; } .map img { outline: 1px solid var(--faint); justify-self: start; }
.state { margin-right: 1.2em; white-space: nowrap; }
.key { display: inline-block; width: 1em; height: 1em; margin-right: .3em; vertical-align: -.15em;
  outline: 1px solid var(--faint); }
.frame { position: relative; outline: 1px dotted var(--faint); } .frame img { position: absolute; }
"""


def write_page(verification: Verification, source: Source, path: str | Path, *, overwrite: bool = False) -> None:
    """Write a verification as one HTML page.

    Parameters
    ----------
    verification : Verification
        The result of :func:`linumpy.verify`.
    source : str, Path, zarr.Group, store, StorePath or (store, path)
        The source that was verified, of whose images the middle plane of each level is read. What cannot be read is
        named in the page.
    path : str or Path
        The page to write, complete or not at all.
    overwrite : bool
        Whether to replace an existing file.

    Raises
    ------
    FileExistsError, FileNotFoundError, ValueError
        An existing file, no folder to write to, or a page inside the source.
    """
    check_file(path, overwrite=overwrite)
    if isinstance(source, (str, Path)):
        check_apart([path], [source])
    images = list(_images(source, verification.arrays))
    parts = [_verdict(verification), _arrays(verification.arrays), *_findings(verification)]
    parts += _section("Maps of chunks", _maps(verification.arrays, _axis_names(images)), _MAPS)
    parts += _section("Levels", (_levels(*image) for image in images), _PICTURES)
    read = f"{format_nbytes(verification.nbytes)} read in {verification.seconds:.1f} s"
    text = document(f"Verification of {_plain(verification.source)}", parts, style=_STYLE, about=read)
    with replacing(path, overwrite=overwrite) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _verdict(verification: Verification) -> str:
    """Return whether the source is sound, or how many findings of which harm there are, and what that means."""
    if verification.sound:
        return "<p class='none'>Sound: nothing was found.</p>"
    counts = Counter(finding.harm for finding in verification.findings)
    kinds = [f"<li><b>{counts[harm]:,} {harm}</b>: {HARMS[harm]}</li>" for harm in HARMS if counts[harm]]
    count = len(verification.findings)
    return f"<p class='bad'>{count:,} finding{'s' * (count != 1)}</p><ul>{''.join(kinds)}</ul>"


def _arrays(arrays: Sequence[ArrayResult]) -> str:
    """Return the table of the arrays; those with chunks that are damaged, or differ from a level, are red."""
    head = (
        "array",
        "voxels",
        "type",
        "chunk",
        "chunks",
        "damaged",
        "different",
        "missing",
        "of zeros",
        "how it was made",
    )
    rows = [
        (
            array.path or ".", format_shape(array.shape), array.dtype, format_shape(array.chunk_shape),
            *(f"{n:,}" for n in (array.chunks, array.damaged, array.differ, array.missing, array.zero)), array.made_by,
        )
        for array in arrays
    ]  # fmt: skip
    bad = [number for number, array in enumerate(arrays) if array.damaged or array.differ]
    return "<h2>Arrays</h2>" + _table(head, rows, bad)


def _findings(verification: Verification) -> Iterator[str]:
    """Yield the tables of the findings and of what was not checked."""
    if verification.findings:
        head = ("harm", "where", "what", "effect", "what to do")
        rows = [(each.harm, each.path or ".", each.what, each.effect, each.advice) for each in verification.findings]
        yield "<h2>Findings</h2>" + _table(head, rows)
    if verification.notes:
        yield "<h2>Not checked</h2>" + _table(("what, and why",), [(note,) for note in verification.notes])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], bad: Sequence[int] = ()) -> str:
    """Return the table of the first rows, and how many are left out."""
    left_out = f"<p>{len(rows) - _ROWS:,} more rows are left out.</p>" if len(rows) > _ROWS else ""
    return table(head, [[*map(_plain, row)] for row in rows[:_ROWS]], bad) + left_out


def _plain(text: str) -> str:
    """Return a text of the source, short and with escapes for what cannot be printed, such as newlines."""
    short = text if len(text) <= _LETTERS else f"{text[: _LETTERS // 2]} … {text[-_LETTERS // 2 :]}"
    return printable(short)


def _escaped(text: str) -> str:
    return html.escape(_plain(text))


def _section(title: str, parts: Iterable[str], limit: int) -> Iterator[str]:
    """Yield a heading and the parts, as long as they have less than `limit` characters together."""
    size = 0
    for number, part in enumerate(parts):
        if not number:
            yield f"<h2>{title}</h2>"
        if size >= limit:
            yield "<p>Others are left out: the page would become too large.</p>"
            return
        size += len(part)
        yield part


def _maps(arrays: Iterable[ArrayResult], names: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the maps of each array that has chunks of other states than sound."""
    for array in arrays:
        states = array.states
        if states is None or not states.any():
            continue
        counts = [np.count_nonzero(states == number) for number in range(len(STATES))]
        key = "".join(
            f"<span class='state'><span class='key' style='background: {color}'></span>{count:,} {state}</span>"
            for color, count, state in zip(COLORS, counts, STATES, strict=True)
        )
        axes = [*names.get(array.path, (f"axis {axis}" for axis in range(states.ndim)))]
        maps = "".join(_projections(states, axes))
        yield f"<h3>array {_escaped(array.path or '.')}</h3><p>{key}</p>{maps}"


def _projections(states: np.ndarray, axes: Sequence[str]) -> Iterator[str]:
    """Yield the worst states along each of the last three axes; one map if it shows each chunk of these axes."""
    collapsed = range(max(0, states.ndim - 3))
    grid = states.max(axis=tuple(collapsed)).reshape((1,) * (3 - states.ndim) + states.shape[-3:])
    last = ["", "", "", *axes][-3:]
    single = [axis for axis in range(3) if grid.shape[axis] == 1]
    for along in single[:1] or range(3):
        several = [last[along]] * (grid.shape[along] > 1) + [axes[axis] for axis in collapsed if states.shape[axis] > 1]
        caption = f"worst along {', '.join(several)}" if several else "each chunk"
        yield _map(grid.max(axis=along), [name for axis, name in enumerate(last) if axis != along], caption)


def _map(states: np.ndarray, axes: Sequence[str], caption: str) -> str:
    """Return a figure of a grid of states (rows, columns), a pixel for each chunk or, of many, for a block of them."""
    steps = [-(-count // _MAP) for count in states.shape]
    pixels = states
    for axis, step in enumerate(steps):
        pixels = np.maximum.reduceat(pixels, np.arange(0, states.shape[axis], step), axis=axis)
    picture = Image.fromarray(np.ascontiguousarray(pixels, np.uint8))
    picture.putpalette(b"".join(bytes.fromhex(color[1:]) for color in COLORS))
    zoom = max(1, min(_CHUNK, _MAP // max(pixels.shape)))
    height, width = (max(_THIN, count * zoom) for count in pixels.shape)
    if max(steps) > 1:
        caption += f"; a pixel is the worst of {steps[0]} × {steps[1]} chunks"
    down, across = (
        "".join(f"<span>{_escaped(name)} = {end}</span>" for end in dict.fromkeys((0, count - 1)) if name)
        for name, count in zip(axes, states.shape, strict=True)
    )
    image = f"<img alt='map of chunks' width='{width}' height='{height}' src='{data_url(png(picture))}'>"
    return (
        f"<figure><div class='map'><div class='across'>{across}</div><div class='down'>{down}</div>{image}"
        f"<figcaption>{_escaped(caption)}</figcaption></div></figure>"
    )


def _images(source: Source, arrays: Sequence[ArrayResult]) -> Iterator[tuple[str, OmeZarrImage | Exception]]:
    """Yield the path of each image that has one of the arrays, and the image, or why it cannot be opened."""
    folders = dict.fromkeys(str(folder) for array in arrays for folder in reversed(PurePosixPath(array.path).parents))
    root: Node | None = None
    for folder in folders:
        try:
            root = open_node(source) if root is None else root
            group = open_member(root, folder) if isinstance(root, zarr.Group) and folder != "." else root
            if isinstance(group, zarr.Group):
                described = ome_attributes(group).get("multiscales")
                for number in range(len(described) if isinstance(described, list) else 0):
                    yield folder, open_image(group, multiscale=number)
        except Exception as error:  # of a damaged source; the page is written all the same
            yield folder, error


def _axis_names(images: Iterable[tuple[str, OmeZarrImage | Exception]]) -> dict[str, list[str]]:
    """Return the names of the axes of each level by its path in the source."""
    return {
        str(PurePosixPath(folder, level.path.removeprefix(image.group.path).strip("/"))): [a.name for a in image.axes]
        for folder, image in images
        if isinstance(image, OmeZarrImage)
        for level in image.levels
    }


def _levels(folder: str, image: OmeZarrImage | Exception) -> str:
    """Return the pictures of all levels of an image on one scale."""
    number = image.multiscale if isinstance(image, OmeZarrImage) else 0
    heading = f"<h3>image {_escaped(folder)}{f', multiscale image {number}' if number else ''}</h3>"
    if isinstance(image, Exception):
        return f"{heading}<p>Not drawn: {_escaped(str(image))}</p>"
    if len(image.spatial_axes) < 2:
        return f"{heading}<p>Not drawn: it has fewer than two axes of space.</p>"
    corners, sides, placed = _frames(image)
    drawn = [_middle(image, level, sides[level]) for level in range(len(image.levels))]
    planes = [plane for plane in drawn if not isinstance(plane, str) and np.isfinite(plane).any()]
    coarsest_first = [percentiles(plane, _PERCENTS) for plane in reversed(planes)]
    limits = next(((low, high) for low, high in coarsest_first if low < high), (0.0, 1.0))
    height, width = (corners + sides).max(axis=0)
    frame = f"<div class='frame' style='width: {width:.1f}px; height: {height:.1f}px'>"
    figures = []
    for level, step, plane, corner, side in zip(image.levels, image.scale, drawn, corners, sides, strict=True):
        name, steps = level.path.removeprefix(image.group.path), " × ".join(f"{one:g}" for one in step)
        caption = f"{name.strip('/')}: {format_shape(level.shape)}, steps {steps}"
        picture = "" if isinstance(plane, str) else _picture(plane, limits, corner, side)
        caption += f"; not drawn: {plane}" if isinstance(plane, str) else ""
        below = f"<figcaption>{_escaped(caption)}</figcaption>"
        figures.append(f"<figure class='level'>{frame}{picture}</div>{below}</figure>")
    place = "lies where its metadata say" if placed else "fills its frame, because the metadata put them far apart"
    scale = f"black is {limits[0]:.6g}, white is {limits[1]:.6g}"
    return f"{heading}<p>The middle plane of each level: in all, {scale}; each {place}.</p>{''.join(figures)}"


def _frames(image: OmeZarrImage) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return where levels lie in pixels: first corner and size (level, 2); and whether that is by their metadata."""
    axes = [*image.spatial_axes[-2:]]
    shapes, steps, first = (
        np.array(each)[:, axes] for each in ([level.shape for level in image.levels], image.scale, image.translation)
    )
    with np.errstate(all="ignore"):  # the metadata may hold any numbers
        sizes, corners = shapes * steps, first - steps / 2
        corners = corners - corners.min(axis=0)
        whole = (corners + sizes).max(axis=0)
        placed = bool(np.isfinite(whole).all() and (sizes > 0).all() and (whole <= 4 * sizes.min(axis=0)).all())
    if not placed:
        corners, sizes = np.zeros(shapes.shape), np.maximum(np.broadcast_to(shapes[0], shapes.shape), 1)
    zoom = _LEVEL / (corners + sizes).max()
    return corners * zoom, np.maximum(sizes * zoom, _THIN), placed


def _middle(image: OmeZarrImage, number: int, side: np.ndarray) -> np.ndarray | str:
    """Read the middle plane of a level, of the first time and channel, as means over pixels; or why there is none."""
    level, shown = image.levels[number], image.spatial_axes[-2:]
    try:
        if not level.size or level.dtype.kind not in "biuf":
            return f"it has {level.size} voxels of {level.dtype}"
        count = math.prod(level.shape[axis] for axis in shown)
        met = [n if axis in shown else min(n, level.chunks[axis]) for axis, n in enumerate(level.shape)]
        if count > _PLANE or math.prod(met) > _DECODED:
            return f"its plane is large, {count:,} voxels in chunks of {math.prod(met):,}"
        middle = [n // 2 if axis in image.spatial_axes else 0 for axis, n in enumerate(level.shape)]
        region = tuple(slice(None) if axis in shown else index for axis, index in enumerate(middle))
        plane = Image.fromarray(np.asarray(read_zarr(level, region=region, device="cpu"), np.float32))
    except Exception as error:  # of damaged chunks; the other levels are drawn all the same
        return str(error)
    width, height = (max(1, min(n, round(one))) for n, one in zip(plane.size, side[::-1].tolist(), strict=True))
    return np.asarray(plane.resize((width, height), Image.Resampling.BOX))


def _picture(values: np.ndarray, limits: tuple[float, float], corner: np.ndarray, side: np.ndarray) -> str:
    """Return values as an image in its frame."""
    picture = Image.fromarray(colored(values, limits)).convert("L")
    (top, left), (height, width) = corner, side
    place = f"left: {left:.1f}px; top: {top:.1f}px; width: {width:.1f}px; height: {height:.1f}px"
    return f"<img alt='middle plane' style='{place}' src='{data_url(png(picture))}'>"
