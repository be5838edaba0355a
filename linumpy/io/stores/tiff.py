"""TIFF stacks as arrays of zarr, for conversion.

A stack is a file of one or more pages, or of a set of files (OME-TIFF); or a folder of files of one page each, in the
order of the numbers in their names. tifffile reads it by pages, strips or tiles, as they are stored; its warnings are
logged. Errors: :class:`~linumpy.errors.SourceError` for files that are broken, incomplete or no stack,
:class:`~linumpy.errors.MetadataError` for axes that are not converted.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from linumpy.errors import MetadataError, SourceError
from linumpy.io.paths import is_zarr_folder
from linumpy.packages import needs

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPageSeries

log = logging.getLogger(__name__)

#: Suffixes of TIFF files.
SUFFIXES = (".tif", ".tiff", ".btf", ".tf8")
#: Axes of NGFF by tifffile's names of axes; pages whose axis has no meaning (Q, I) are taken as planes along z.
_AXES = {"T": "t", "C": "c", "Z": "z", "Q": "z", "I": "z", "Y": "y", "X": "x"}
#: Maximum number of planes that a message lists.
_LISTED_PLANES = 8


@dataclass(frozen=True)
class TiffStack:
    """An open stack.

    - `array`: the voxels, with the axes in the order in which planes are stored.
    - `axes`: names of the axes of the stack in NGFF, such as ``"tczyx"``.
    - `order`: for each axis of the stack, its index among the axes of `array`, whose other axes have one entry.
    - `files`: paths of the files: of a folder one for each plane along z, in order.
    - `file`, `series`: the (first) file, and the series of pages in it.
    """

    array: zarr.Array
    axes: str
    order: tuple[int, ...]
    files: tuple[str, ...]
    file: TiffFile
    series: TiffPageSeries
    is_folder: bool = False


def tiff_files(path: str | Path) -> list[str]:
    """Return the files of a stack: a TIFF file itself, or the TIFF files in a folder; an empty list for other paths."""
    path = Path(path)
    if path.suffix.lower() in SUFFIXES and not path.is_dir():
        return [str(path)]
    if not path.is_dir() or is_zarr_folder(path):
        return []
    names = (file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith("."))
    # By the numbers in the names: page10 comes after page9.
    return sorted(
        map(str, names),
        key=lambda name: [(int(word), "") if word.isdigit() else (0, word) for word in re.split(r"(\d+)", name)],
    )


@contextmanager
def open_stack(files: list[str], missing: str = "error") -> Iterator[TiffStack]:
    """Open a stack, whose voxels can be read within the block; `missing` is as for :func:`linumpy.convert_zarr`."""
    with needs("tifffile", "export"):
        import tifffile
    name = files[0] if len(files) == 1 else os.path.dirname(files[0])
    for file in files:
        if not os.path.exists(file):
            raise FileNotFoundError(f"{file} does not exist")
    logged: set[str] = set()
    with _opened(tifffile, files[0], logged) as (first, all_series):
        series = all_series[0]
        if len(all_series) > 1:
            shapes = ", ".join("×".join(map(str, pages.shape)) for pages in all_series)
            raise SourceError(
                f"{files[0]} holds {len(all_series)} series of pages ({shapes}), but a stack has one: write each "
                "series to a file of its own"
            )
        _check_planes(files[0], series, missing)
        of_series = _files_of(files[0], series)
        # A file of a set leads to the others: a folder of such a set is read as that file.
        is_folder = len(files) > 1 and not set(map(os.path.abspath, files)) <= set(map(os.path.abspath, of_series))
        store: Any
        if is_folder:
            _check_pages(tifffile, files, series, missing, logged)
            _warn_of_gaps(files)
            store, stored_axes = tifffile.TiffSequence(files).aszarr(), f"Z{series.axes}"
            kept = stored_axes
        else:
            store, stored_axes = series.aszarr(level=0, squeeze=False), series.get_axes(False)
            # A file with a spacing of planes is a volume, even of one plane.
            has_spacing = "spacing" in (first.imagej_metadata or {}) or "PhysicalSizeZ=" in (first.ome_metadata or "")
            kept = series.axes + ("Z" if has_spacing else "")
        with store:
            array = zarr.open_array(store, mode="r")
            axes, order = _axes(stored_axes, array.shape, kept, name)
            yield TiffStack(
                array=array, axes=axes, order=order, files=tuple(files) if is_folder else of_series,
                file=first, series=series, is_folder=is_folder,
            )  # fmt: skip


@contextmanager
def _opened(tifffile: ModuleType, name: str, logged: set[str]) -> Iterator[tuple[TiffFile, list[TiffPageSeries]]]:
    """Open a file, log tifffile's warnings that are not in `logged` yet, and yield the file and its series of pages."""
    with ExitStack() as scope:
        try:
            with _messages() as (errors, warnings):
                file = scope.enter_context(tifffile.TiffFile(name))
                series = file.series
                len(file.pages)  # makes tifffile search for all pages
        except OSError:
            raise
        except Exception as error:  # of a cut file, tifffile raises many kinds, such as struct.error
            raise SourceError(f"{name} cannot be read as TIFF: {error}") from error
        for message in warnings:
            if (text := message.replace(os.path.basename(name), "")) not in logged:
                log.warning("tifffile: %s", message)
                logged.add(text)
        if errors or not series:
            raise SourceError(f"{name} is cut off or broken: {errors[0] if errors else 'it has no pages'}")
        yield file, series


@contextmanager
def _messages() -> Iterator[tuple[list[str], list[str]]]:
    """Yield lists of the errors and warnings that tifffile logs in this thread, in place of its log."""
    thread = threading.get_ident()
    errors: list[str] = []
    warnings: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.thread != thread or record.levelno < logging.WARNING:
            return True
        message = record.getMessage()
        # A broken tag loses no page, unless it is ImageDescription (270), which says what the pages are.
        is_error = record.levelno >= logging.ERROR and ("<TiffTag." not in message or "TiffTag 270 " in message)
        (errors if is_error else warnings).append(message)
        return False

    logger = logging.getLogger("tifffile")
    logger.addFilter(keep)
    try:
        yield errors, warnings
    finally:
        logger.removeFilter(keep)


def _files_of(name: str, series: TiffPageSeries) -> tuple[str, ...]:
    """Return the paths of the files that hold the pages of a series; `name` is the path of the first."""
    if not series.is_multifile:
        return (name,)
    return tuple(dict.fromkeys([name, *(page.parent.filehandle.path for page in series if page is not None)]))


def _check_planes(name: str, series: TiffPageSeries, missing: str) -> None:
    """Raise `SourceError`, or with ``missing="fill"`` log a warning, if the files lack planes of a series."""
    leading = [
        (axis, n) for axis, n in zip(series.get_axes(False), series.get_shape(False), strict=True) if axis not in "YXS"
    ]
    counts = tuple(n for _, n in leading)
    count = math.prod(counts)
    if series.dataoffset is not None:  # the planes follow each other in one file
        if series.dataoffset + series.nbytes > series.keyframe.parent.filehandle.size:
            raise SourceError(f"{name} is cut off or broken: it ends before the last of {count} planes")
        return
    absent = [plane for plane, page in enumerate(series) if page is None]
    if not absent:
        return
    names = [_AXES.get(axis, axis.lower()) for axis, n in leading if n > 1]
    listed = []
    for plane in absent[:_LISTED_PLANES]:
        index = [number for number, n in zip(np.unravel_index(plane, counts), counts, strict=True) if n > 1]
        listed.append(" ".join(f"{axis} {number}" for axis, number in zip(names, index, strict=True)))
    planes = ", ".join(listed) + (" …" if len(absent) > _LISTED_PLANES else "")
    text = f"{name}: {len(absent)} of {count} planes are in no file, counted from 0: {planes}"
    if missing == "error":
        raise SourceError(f"{text}. Complete the set of files, or pass missing='fill' to write 0 there")
    log.warning("%s; they are written as 0", text)


def _axes(stored: str, shape: tuple[int, ...], kept: str, name: str) -> tuple[str, tuple[int, ...]]:
    """Return the names of the axes of a stack in NGFF, and the index of each among the stored axes.

    `kept` are axes that a stack keeps even if they have one entry.
    """
    indices = [axis for axis, (label, n) in enumerate(zip(stored, shape, strict=True)) if n > 1 or label in kept]
    names = [_AXES.get(stored[axis], "?") for axis in indices]
    if "?" in names or len(set(names)) < len(names) or names[-2:] != ["y", "x"]:
        raise MetadataError(
            f"{name} has the axes {''.join(stored[axis] for axis in indices)} as tifffile names them: planes of y and "
            "x are converted, with at most one axis each of z, channels and times; colours (S) are not"
        )
    order = tuple(sorted(range(len(names)), key=lambda axis: "tczyx".index(names[axis])))
    return "".join(names[axis] for axis in order), tuple(indices[axis] for axis in order)


def _check_pages(tifffile: ModuleType, files: list[str], first: TiffPageSeries, missing: str, logged: set[str]) -> None:
    """Check that all files are pages with the shape and dtype of the first, which tifffile does not check."""
    for name in files[1:]:
        with _opened(tifffile, name, logged) as (_, (page, *_)):
            if page.is_multifile:
                raise SourceError(
                    f"{name} belongs to an OME-TIFF set of {len(_files_of(name, page))} files, and the folder holds "
                    f"{len(files)}: pass one file of the set, or a folder of all its files and no others"
                )
            _check_planes(name, page, missing)
            if (page.shape, page.dtype) != (first.shape, first.dtype):
                raise SourceError(
                    f"{name} has shape {page.shape}, {page.dtype}, and {files[0]} {first.shape}, {first.dtype}: the "
                    "pages of a stack are alike"
                )


def _warn_of_gaps(files: list[str]) -> None:
    """Log a warning if few numbers are missing in the names of the files of a folder."""
    words = [re.findall(r"\d+", os.path.basename(file)) for file in files]
    changing = [place for place in zip(*words, strict=False) if len(set(place)) > 1]
    if len(changing) != 1 or len(set(map(len, words))) != 1:
        return
    numbers = sorted(map(int, changing[0]))
    step = min(b - a for a, b in itertools.pairwise(numbers))
    absent = (numbers[-1] - numbers[0]) // step + 1 - len(files) if step else 0
    if 0 < absent <= len(files):  # with more, the numbers do not count the files
        expected = range(numbers[0], numbers[-1], step)
        first = next(number for number in expected if number not in numbers)
        log.warning(
            "%s: %d numbers are missing in the names of the files, the first is %d; the files are taken as neighbours",
            os.path.dirname(files[0]), absent, first,
        )  # fmt: skip
