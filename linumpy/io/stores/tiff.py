"""TIFF stacks as arrays of zarr, for conversion.

In: a file of one or more pages, or a folder of files of one page each, in the order of the numbers in their names. Out:
a :class:`TiffStack`, whose array tifffile reads by pages, strips or tiles, as they are stored. tifffile is imported
inside functions. Errors: ``ImportError`` without tifffile, ``FileNotFoundError``,
:class:`~linumpy.errors.SourceError` for files that are broken or no stack, :class:`~linumpy.errors.MetadataError` for
axes that are not converted.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import zarr

from linumpy.errors import MetadataError, SourceError
from linumpy.io.paths import is_zarr_folder
from linumpy.packages import needs

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPageSeries

#: Suffixes of TIFF files.
SUFFIXES = (".tif", ".tiff", ".btf", ".tf8")
#: Axes of NGFF by tifffile's names of axes; pages whose axis has no meaning (Q, I) are taken as planes along z.
_AXES = {"T": "t", "C": "c", "Z": "z", "Q": "z", "I": "z", "Y": "y", "X": "x"}


@dataclass(frozen=True)
class TiffStack:
    """An open stack.

    Attributes
    ----------
    array : zarr.Array
        The voxels.
    axes : str
        Names of the axes of the array in NGFF, such as ``"zyx"``.
    files : tuple of str
        Paths of the files.
    """

    array: zarr.Array
    axes: str
    files: tuple[str, ...]


def tiff_files(path: str | Path) -> list[str]:
    """Return the files of a stack: a TIFF file itself, or the TIFF files in a folder; an empty list for other paths."""
    path = Path(path)
    if path.suffix.lower() in SUFFIXES and not path.is_dir():
        return [str(path)]
    if not path.is_dir() or is_zarr_folder(path):
        return []
    names = (file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith("."))
    return sorted(map(str, names), key=_numbers)


def _numbers(name: str) -> list[tuple[int, str]]:
    """Return a sort key by the numbers in a name: ``page10`` comes after ``page9``."""
    return [(int(word), "") if word.isdigit() else (0, word) for word in re.split(r"(\d+)", name)]


@contextmanager
def open_stack(files: list[str]) -> Iterator[TiffStack]:
    """Open a stack, whose array can be read within the block.

    Parameters
    ----------
    files : list of str
        Files from :func:`tiff_files`.

    Raises
    ------
    ImportError
        tifffile is not installed.
    FileNotFoundError
        A file does not exist.
    SourceError
        A file is broken or has several series of pages, or files of a folder differ in shape or dtype.
    MetadataError
        The stack has axes that are not converted, such as colours.
    """
    with needs("tifffile", "export"):
        import tifffile
    name = files[0] if len(files) == 1 else os.path.dirname(files[0])
    for file in files:
        if not os.path.exists(file):
            raise FileNotFoundError(f"{file} does not exist")
    try:
        with tifffile.TiffFile(files[0]) as first:
            series = _series(first)[0]
            is_set = len(files) > 1 and _files_of(series) == set(map(os.path.realpath, files))
            if len(first.series) > 1:
                shapes = ", ".join("×".join(map(str, pages.shape)) for pages in first.series)
                raise SourceError(
                    f"{files[0]} holds {len(first.series)} series of pages ({shapes}), but a stack has one: write each "
                    "series to a file of its own"
                )
            if len(files) == 1 or is_set:
                with series.aszarr(level=0) as store:
                    yield TiffStack(_open_array(store), _axes(series.axes, name), tuple(files))
                return
            _check_pages(tifffile, files, series)
        with tifffile.TiffSequence(files).aszarr() as store:
            yield TiffStack(_open_array(store), _axes(f"Z{series.axes}", name), tuple(files))
    except tifffile.TiffFileError as error:
        raise SourceError(f"{files[0]} cannot be read as TIFF: {error}") from error


def _open_array(store: Any) -> zarr.Array:
    return zarr.open_array(store, mode="r")


def _series(file: TiffFile) -> list[TiffPageSeries]:
    """Return the series of pages of a file; `SourceError` if tifffile logs that it leaves out broken pages."""
    thread, messages = threading.get_ident(), []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.thread == thread:
                messages.append(record.getMessage())

    logger, listener = logging.getLogger("tifffile"), Listener(logging.ERROR)
    logger.addHandler(listener)
    try:
        series = file.series
        len(file.pages)  # makes tifffile search for all pages
    finally:
        logger.removeHandler(listener)
    if messages:
        raise SourceError(f"{file.filehandle.path} is cut off or broken: {messages[0]}")
    return series


def _files_of(series: TiffPageSeries) -> set[str]:
    """Return the files of a series: several for an OME-TIFF set, each of whose files describes all of them."""
    return {os.path.realpath(page.parent.filehandle.path) for page in series.pages if page is not None}


def _check_pages(tifffile: ModuleType, files: list[str], first: TiffPageSeries) -> None:
    """Check that all files have the shape and dtype of the first file, which tifffile does not check."""
    for name in files[1:]:
        try:
            file = tifffile.TiffFile(name)
        except tifffile.TiffFileError as error:
            raise SourceError(f"{name} cannot be read as TIFF: {error}") from error
        with file:
            page = _series(file)[0]
            if len(_files_of(page)) > 1:
                raise SourceError(
                    f"{name} belongs to an OME-TIFF set of {len(_files_of(page))} files, and the folder holds "
                    f"{len(files)}: pass one file of the set, or a folder of all its files and no others"
                )
            if (page.shape, page.dtype) != (first.shape, first.dtype):
                raise SourceError(
                    f"{name} has shape {page.shape}, {page.dtype}, and {files[0]} {first.shape}, {first.dtype}: the "
                    "pages of a stack are alike"
                )


def _axes(axes: str, name: str) -> str:
    """Convert tifffile's names of axes to NGFF's names; `MetadataError` for axes or orders that are not converted."""
    names = "".join(_AXES.get(axis, "?") for axis in axes)
    if "?" in names or len(set(names)) < len(names) or names not in _supported_axes():
        raise MetadataError(
            f"{name} has the axes {axes} as tifffile names them: planes of y and x are converted, with z, channels and "
            "times before them in the order t, c, z; colours (S) are not"
        )
    return names


def _supported_axes() -> set[str]:
    return {t + c + z + "yx" for t in ("", "t") for c in ("", "c") for z in ("", "z")}
