"""The slices of a run side by side: a row for each slice, a column for each stage, one grey scale in each column.

In: summaries of images. Out: a :class:`Column` for each stage, and a cell for each of its slices: the plan (the mean
along depth), and below it the section (a plane in the middle, with depth downwards).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linumpy.mosaic.io.slice_table import slice_number
from linumpy.pictures import colored, percentiles
from linumpy.quality.images import ImageSummary

#: Rows of pixels between plan and section.
_GAP = 4
#: Minimum and maximum height of plans and sections, as a fraction of the width of a cell.
_ASPECTS = 0.3, 1.5
#: Percentiles of all pixels of a column that are black and white.
_PERCENTS = 0.5, 99.5
#: Folders of the stages in the order in which they run, as linum-pipeline and Nextflow name them.
_ORDER = (
    "mosaics", "galvo", "resample", "resampled", "focal", "flat", "shading", "illumination", "even", "positions", "aip",
    "surface", "stitch", "stitched", "beam", "attenuation", "compensated", "register", "stack",
)  # fmt: skip


@dataclass(frozen=True)
class Column:
    """The images that a stage made of slices.

    - `stage`: name of the stage, which is that of its folder.
    - `images`: by number of the slice, in the order of the numbers.
    - `unchanged`: numbers of slices whose image is a link to that of an earlier stage.
    """

    stage: str
    images: Mapping[int, ImageSummary]
    unchanged: frozenset[int] = frozenset()


def columns_of(folder: Path, images: Iterable[ImageSummary], links: Iterable[Path]) -> list[Column]:
    """Arrange the images of slices in columns, in the order of the stages; other images are left out.

    The images of a folder are a column if their names have different numbers. If numbers are repeated, because the
    folder has images of several stages, those whose names differ by digits only are a column.
    """
    summaries = {image.path: image for image in images}
    groups: dict[str, list[Path]] = {}
    for parent, members in itertools.groupby(sorted({*summaries, *links}), key=lambda path: path.parent):
        numbered = [path for path in members if slice_number(path.name) is not None]
        has_one_stage = len({slice_number(path.name) for path in numbered}) == len(numbered)
        for path in numbered:
            name = parent if has_one_stage else parent / re.sub(r"\d+", "#", path.name)
            stage = folder.resolve().name if name == folder else str(name.relative_to(folder))
            groups.setdefault(stage, []).append(path)
    columns = []
    for stage, paths in groups.items():
        if len(paths) == 1 and not re.search(r"(?:^|[^a-zA-Z])z\d", paths[0].name):
            continue  # the number is no slice's, as in brain_10um.ome.zarr
        by_number = dict(sorted((slice_number(path.name) or 0, path) for path in paths))
        made = {number: summaries[path] for number, path in by_number.items() if path in summaries}
        columns.append(Column(stage, made, frozenset(by_number) - frozenset(made)))
    return sorted(columns, key=lambda column: _rank(column.stage))


def _rank(stage: str) -> tuple[int, str]:
    """Return the sort key of a column."""
    first = stage.split("/")[0]
    return (_ORDER.index(first) if first in _ORDER else len(_ORDER)), stage


#: Width of all cells of a table, height of their plans, and height of their sections, in pixels.
Layout = tuple[int, int, int]


def layout_of(columns: Sequence[Column], width: int, section: int = 0) -> Layout:
    """Return one layout for all columns; the heights follow from the median shapes of the columns.

    `section`: height of the sections in pixels, to which they are stretched; 0 for the height by the median shape.
    """
    extents = np.array([_extent(column) for column in columns if column.images])
    tall, wide, deep = extents.T
    low, high = _ASPECTS
    plan = round(width * float(np.clip(np.median(tall / wide), low, high)))
    return width, plan, section or round(width * float(np.clip(np.median(deep / wide), low, high)))


def _extent(column: Column) -> tuple[float, float, float]:
    """Return the greatest height and width of the plans and the greatest depth of the sections, in µm."""
    plans = [image.projection.extent for image in column.images.values()]
    depths = [image.section.extent[0] for image in column.images.values() if image.section is not None]
    height, width = (max(lengths) for lengths in zip(*plans, strict=True))
    return height, width, max(depths, default=0.0)


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The drawn cells of a column.

    - `pictures` (mapping of int to numpy.ndarray of uint8, (rows, columns)): by number of the slice; all of one shape.
    - `plan_limits`, `section_limits` (float, float): intensities of black and white in all plans, and in all sections.
    - `pixel_um`: length of a pixel of the plans, and of a pixel along the width of sections.
    - `stretch`: factor by which sections are magnified along depth, relative to the width; 0 without sections.
    """

    pictures: Mapping[int, np.ndarray]
    plan_limits: tuple[float, float]
    section_limits: tuple[float, float]
    pixel_um: float
    stretch: float


def draw_cells(column: Column, layout: Layout) -> Cells:
    """Draw the cells of a column; pixels that no image fills are white.

    An image of two axes has no section. Below its plan is a graph of the values along its middle row, filled below the
    curve; its height is the range from black to white of the plans.
    """
    (tall, wide, deep), (width, height, depth) = _extent(column), layout
    pixel, step = max(wide / width, tall / height), deep / depth or 1.0
    plans = {
        number: _placed(image.projection.resized((pixel, pixel)), (height, width))
        for number, image in column.images.items()
    }
    limits = percentiles(np.stack(list(plans.values())), _PERCENTS)
    sections = {
        number: _profile(plans[number], limits, depth)
        if image.section is None
        else _placed(image.section.resized((step, pixel)), (depth, width))
        for number, image in column.images.items()
    }
    depth_limits = percentiles(np.stack(list(sections.values())), _PERCENTS) if deep else limits
    gap = np.full((_GAP, width), 255, np.uint8)
    pictures = {
        number: np.concatenate([colored(plan, limits)[..., 0], gap, colored(sections[number], depth_limits)[..., 0]])
        for number, plan in plans.items()
    }
    return Cells(
        pictures=pictures,
        plan_limits=limits,
        section_limits=depth_limits,
        pixel_um=pixel,
        stretch=pixel / step if deep else 0.0,
    )


def _placed(picture: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return a picture in the upper left corner of a canvas that is NaN elsewhere."""
    canvas = np.full(shape, np.nan, np.float32)
    rows, columns = (min(sizes) for sizes in zip(shape, picture.shape, strict=True))
    canvas[:rows, :columns] = picture[:rows, :columns]
    return canvas


def _profile(plan: np.ndarray, limits: tuple[float, float], height: int) -> np.ndarray:
    """Return a graph of the values along the middle one of the rows that have values, filled below the curve."""
    rows = np.flatnonzero(np.isfinite(plan).any(axis=1))
    line = plan[rows[len(rows) // 2]] if rows.size else plan[0]
    levels = np.linspace(limits[1], limits[0], height, dtype=np.float32)[:, None]
    return np.where(np.isfinite(line), np.where(levels <= line, limits[1], limits[0]), np.nan)
