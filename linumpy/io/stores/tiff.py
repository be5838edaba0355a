"""TIFF stacks as arrays of zarr, for conversion.

In: a file of one or more pages, or a folder of files of one page each, in the order of the numbers in their names. Out:
:class:`TiffStack`, read by tifffile, page by page, or strip by strip or tile by tile where the file has them. tifffile
is imported inside. Errors: :class:`~linumpy.errors.SourceError` for files that are no stack, or broken,
:class:`~linumpy.errors.MetadataError` for axes that no image has.
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
from typing import Any

import zarr

from linumpy.device import install_line
from linumpy.errors import MetadataError, SourceError

SUFFIXES = (".tif", ".tiff", ".btf", ".tf8")
#: Axes of NGFF by those of tifffile: pages without a meaning are planes.
_AXES = {"T": "t", "C": "c", "Z": "z", "Q": "z", "I": "z", "Y": "y", "X": "x"}


@dataclass(frozen=True)
class TiffStack:
    """An open stack.

    Attributes
    ----------
    array : zarr.Array
        Its voxels.
    axes : str
        Names of the axes, such as ``"zyx"``.
    files : tuple of str
        Paths of its files.
    """

    array: zarr.Array
    axes: str
    files: tuple[str, ...]


def tiff_files(path: str | Path) -> list[str]:
    """Return the files of a stack: the path itself, or the TIFF files of a folder; none for anything else."""
    path = Path(path)
    if path.suffix.lower() in SUFFIXES and not path.is_dir():
        return [str(path)]
    if not path.is_dir() or any((path / name).exists() for name in ("zarr.json", ".zgroup", ".zarray")):
        return []
    return sorted((str(one) for one in path.iterdir() if one.suffix.lower() in SUFFIXES), key=_numbers)


def _numbers(name: str) -> list[tuple[int, str]]:
    """Order names by the numbers in them: ``page10`` comes after ``page9``."""
    return [(int(word), "") if word.isdigit() else (0, word) for word in re.split(r"(\d+)", name)]


@contextmanager
def open_stack(files: list[str]) -> Iterator[TiffStack]:
    """Open a stack; its array can be read within the block."""
    try:
        import tifffile
    except ImportError as error:
        raise ImportError(f"tifffile is not installed ({error}): {install_line('export')}") from error
    name = files[0] if len(files) == 1 else os.path.dirname(files[0])
    for one in files:
        if not os.path.exists(one):
            raise FileNotFoundError(f"{one} does not exist")
    try:
        with tifffile.TiffFile(files[0]) as first:
            series = _series(first)[0]
            if len(first.series) > 1:
                shapes = ", ".join("×".join(map(str, one.shape)) for one in first.series)
                raise SourceError(
                    f"{files[0]} holds {len(first.series)} series of pages ({shapes}), and a stack is one: write each "
                    "to a file"
                )
            if len(files) == 1:
                with series.aszarr(level=0) as store:
                    yield TiffStack(_opened(store), _axes(series.axes, name), tuple(files))
                return
            _check_pages(tifffile, files, series)
        with tifffile.TiffSequence(files).aszarr() as store:
            yield TiffStack(_opened(store), _axes(f"Z{series.axes}", name), tuple(files))
    except tifffile.TiffFileError as error:
        raise SourceError(f"{name} cannot be read as TIFF: {error}") from error


def _opened(store: Any) -> zarr.Array:
    return zarr.open_array(store, mode="r")


def _series(file: Any) -> Any:
    """Return the series of a file; what tifffile only logs of broken pages, which it leaves out, is an error."""
    thread, found = threading.get_ident(), []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.thread == thread:
                found.append(record.getMessage())

    logger, listener = logging.getLogger("tifffile"), Listener(logging.ERROR)
    logger.addHandler(listener)
    try:
        series = file.series
        len(file.pages)  # looks for all of them
    finally:
        logger.removeHandler(listener)
    if found:
        raise SourceError(f"{file.filehandle.path} is cut off or broken: {found[0]}")
    return series


def _check_pages(tifffile: Any, files: list[str], first: Any) -> None:
    """Refuse a folder whose files have other shapes or types than the first, which tifffile would mix up."""
    for name in files[1:]:
        with tifffile.TiffFile(name) as file:
            page = _series(file)[0]
            if (page.shape, page.dtype) != (first.shape, first.dtype):
                raise SourceError(
                    f"{name} has shape {page.shape}, {page.dtype}, and {files[0]} {first.shape}, {first.dtype}: the "
                    "pages of a stack are alike"
                )


def _axes(axes: str, name: str) -> str:
    found = "".join(_AXES.get(axis, "?") for axis in axes)
    if "?" in found or len(set(found)) < len(found) or found not in _in_order():
        raise MetadataError(
            f"{name} has the axes {axes} as tifffile names them: planes of y and x are converted, with z, channels and "
            "times before them in the order t, c, z; colours (S) are not"
        )
    return found


def _in_order() -> set[str]:
    return {t + c + z + "yx" for t in ("", "t") for c in ("", "c") for z in ("", "z")}
