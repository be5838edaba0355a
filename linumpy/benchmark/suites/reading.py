"""Reading a Zarr array: linumpy, other ways to the GPU, and the limits of the hardware.

In: a :class:`ReadRequest`. Out: a :class:`~linumpy.benchmark.cases.Case` for each array. Stores that are made in a
folder of the caller's stay; those of a temporary folder, and every flat file, are removed.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from linumpy.benchmark.cases import Case, Entry, Mark, Prepared
from linumpy.benchmark.report import size
from linumpy.benchmark.suites.read_paths import PATH_NAMES, ReadPath, standard_paths
from linumpy.benchmark.suites.specs import CaseSpec
from linumpy.benchmark.suites.stores import StoredArray, difference, generate, new_store, open_stored
from linumpy.device import is_device_array, why_no_cuda


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What to read.

    Attributes
    ----------
    array : str or None
        An array that is there.
    specs : tuple of CaseSpec
        Stores to make.
    folder : Path or None
        Where they are made; a temporary folder by default.
    only : tuple of str
        Names of the paths; all by default.
    cold : bool
        Whether files will be dropped from the page cache before each run: marks are for a warm one.
    """

    array: str | None = None
    specs: tuple[CaseSpec, ...] = ()
    folder: Path | None = None
    only: tuple[str, ...] = ()
    cold: bool = False

    def __post_init__(self) -> None:
        if (self.array is None) == (not self.specs):
            raise ValueError("give either an array that is there or stores to make")
        unknown = [name for name in self.only if name not in PATH_NAMES]
        if unknown:
            raise ValueError(f"path {unknown[0]!r} is unknown: choose from {', '.join(PATH_NAMES)}")


@contextmanager
def read_cases(request: ReadRequest) -> Iterator[tuple[Path, Iterator[Case]]]:
    """Give the folder that is read, and the cases, which are made one after another.

    Raises
    ------
    Exception
        What opening or making an array raises. What a path raises stands in its row.
    """
    gpu = why_no_cuda() is None
    paths = [path for path in standard_paths(gpu) if not request.only or path.name in request.only]
    if request.array is not None:
        stored = open_stored(request.array)
        yield stored.path, iter([read_case(stored, paths, gpu=gpu, cold=request.cold)])
        return
    with _folder(request) as folder:
        for spec in request.specs:  # all of them, before hours are spent on the first
            new_store(spec, folder)
        yield folder, _generated(request, folder, paths, gpu)


def _generated(request: ReadRequest, folder: Path, paths: list[ReadPath], gpu: bool) -> Iterator[Case]:
    for spec in request.specs:
        stored = generate(spec, folder)
        yield read_case(stored, paths, spec.mark, gpu=gpu, cold=request.cold)
        if request.folder is None:
            shutil.rmtree(stored.path)


@contextmanager
def _folder(request: ReadRequest) -> Iterator[Path]:
    if request.folder is not None:
        yield request.folder
        return
    with tempfile.TemporaryDirectory(prefix="linum-benchmark-") as made:
        yield Path(made)


def read_case(
    stored: StoredArray, paths: list[ReadPath], mark: Mark | None = None, *, gpu: bool, cold: bool = False
) -> Case:
    """Describe the ways to read an array; the first of linumpy's is judged by the mark."""
    entries = [Entry(path.name, path.title, _checked(path, stored, gpu), _role(path)) for path in paths]
    return Case(
        name=stored.name,
        nbytes=stored.nbytes,
        entries=tuple(entries),
        description=_lines(stored),
        facts=_facts(stored),
        marks=() if mark is None else (mark,),
        not_judged="no GPU" if not gpu else "cold page cache" if cold else "",
        files=stored.files,
    )


def _role(path: ReadPath) -> Literal["ours", "peer", "limit"]:
    return "limit" if path.is_limit else "ours" if path.name.startswith("linumpy") else "peer"


def _checked(path: ReadPath, stored: StoredArray, gpu: bool) -> Callable[[], AbstractContextManager[Prepared]]:
    """Add to a way of reading the comparison with zarr-python."""

    def check(array: Any) -> str:
        if is_device_array(array) != gpu:
            return f"the result is on the wrong side: {type(array).__module__}.{type(array).__name__}"
        return difference(stored, array) or ""

    @contextmanager
    def prepare() -> Iterator[Prepared]:
        with path.prepare(stored) as prepared:
            yield replace(prepared, check=check)

    return prepare


def _lines(stored: StoredArray) -> tuple[str, ...]:
    shards = f", in shards {_times(stored.shards)}" if stored.shards else ""
    region = f", of which {_times(stored.result_shape)} are read" if stored.region else ""
    return (
        f"{_times(stored.shape)} {stored.dtype}, chunks {_times(stored.chunks)}{shards}{region}, codecs "
        f"{stored.codecs}, zarr v{stored.zarr_format}",
        f"{size(stored.nbytes)} decoded, {size(stored.stored_bytes)} in {stored.chunk_files:,} files "
        f"(ratio {stored.ratio:.2f}); voxels: {stored.data}",
    )


def _facts(stored: StoredArray) -> dict[str, Any]:
    return {
        "path": str(stored.path),
        "shape": list(stored.shape),
        "region": None if stored.region is None else [list(bounds) for bounds in stored.region],
        "chunks": list(stored.chunks),
        "shards": None if stored.shards is None else list(stored.shards),
        "dtype": str(stored.dtype),
        "codecs": stored.codecs,
        "zarr_format": stored.zarr_format,
        "data": stored.data,
        "stored_bytes": stored.stored_bytes,
        "ratio": stored.ratio if math.isfinite(stored.ratio) else None,
        "chunk_files": stored.chunk_files,
    }


def _times(sizes: tuple[int, ...] | None) -> str:
    return "×".join(map(str, sizes or ()))
