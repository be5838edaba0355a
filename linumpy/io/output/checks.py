"""Checks of the paths of outputs, before any work."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import zarr

from linumpy.io.output.objects import ObjectFolder, Target, check_objects, object_folder
from linumpy.io.paths import absolute, is_archive, is_zarr_folder
from linumpy.io.stores.remote import is_remote, open_store, place_of, without_credentials

#: Suffixes that an output folder may not have: people and other programs would mistake the folder for a file.
_FILE_SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif", ".pdf", ".svg"),
    *(".nii", ".gz", ".zip", ".h5", ".npy", ".json", ".csv", ".txt"),
)


def target_of(output: str | Path, storage_options: Mapping[str, Any] | None = None) -> Target:
    """Return where an image is to be written: the absolute path, or the place of a URL, opened with the options."""
    if isinstance(output, str) and "://" in output:
        return object_folder(output, storage_options)
    refuse_url(Path(output))
    return absolute(output)


def as_given(output: str | Path, target: Target) -> str | Path:
    """Return the output that a caller named, for him: a URL as it is, and anything else as a path."""
    return output if isinstance(target, ObjectFolder) else Path(output)


def check_target(path: Target, *, overwrite: bool) -> None:
    """Check the place of an OME-Zarr image to write; `overwrite` allows a Zarr folder or an ``.ozx`` file there."""
    if isinstance(path, ObjectFolder):
        check_objects(path, overwrite=overwrite)
        return
    refuse_url(path)
    if path.suffix.lower() in _FILE_SUFFIXES:
        kinds = "a folder, *.ome.zarr, or a ZIP file, *.ozx"
        raise ValueError(f"{path}: {path.suffix} is the name of a file, and an OME-Zarr image is {kinds}")
    if not (path.exists() or path.is_symlink()):
        check_parent(path)
        return
    if not overwrite:
        raise exists_error(path)
    if is_archive(path) and path.is_file():
        # For a path that cannot be opened, is_zipfile would return False instead of raising the error.
        with open(path, "rb") as file:
            if zipfile.is_zipfile(file):
                return
    if not is_zarr_folder(path):
        raise FileExistsError(f"{path} is not a Zarr folder, so it is not overwritten")


def checked_version(path: Target, ngff_version: str | None) -> str | None:
    """Return the NGFF version of an output: `ngff_version`, or 0.5 instead of None for an ``.ozx`` file."""
    if isinstance(path, ObjectFolder) or not is_archive(path):
        return ngff_version
    if ngff_version == "0.4":
        raise ValueError(
            f"{path}: an .ozx file holds NGFF 0.5 or 0.6 (zarr v3), not 0.4: choose a folder, or leave out 0.4"
        )
    return ngff_version or "0.5"


def check_parent(path: Target) -> None:
    """Check that the parent folder of a path exists; object stores have no folders."""
    if isinstance(path, ObjectFolder):
        return
    folder = absolute(path).parent
    if not folder.is_dir():
        missing = next(parent for parent in (*reversed(folder.parents), folder) if not parent.is_dir())
        raise FileNotFoundError(f"{path}: there is no folder {missing}: make it first, or choose another path")


def exists_error(path: Path) -> FileExistsError:
    """Return the error for an output whose path exists."""
    return FileExistsError(f"{path} exists: choose another path, or replace it with overwrite=True")


def refuse_url(path: Path) -> None:
    """Raise ``ValueError`` for a URL or an unexpanded ``~``: as paths they begin with a folder ``s3:`` or ``~``."""
    if len(path.parts) > 1 and path.parts[0].startswith("~") and not os.path.isdir(path.parts[0]):
        raise ValueError(f"{str(path)!r} begins with {path.parts[0]!r}, which only shells expand: give the whole path")
    if len(path.parts) > 1 and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]+:", path.parts[0]):
        url = str(path).replace(":/", "://", 1)
        raise ValueError(f"{url} is a URL: give a local path, or for an image the URL as a str")


def check_apart(outputs: Iterable[str | Target], sources: Iterable[str | Path | zarr.Array] = ()) -> None:
    """Check that outputs neither replace nor lie inside a source, nor overlap each other."""
    outputs, sources = list(outputs), list(sources)
    remote = [output for output in outputs if "://" in str(output)]
    for output, source in itertools.product(remote, sources):
        if any(f"{a}/".startswith(f"{b}/") or f"{b}/".startswith(f"{a}/") for a, b in _places(output, source)):
            name = without_credentials(str(source.store_path if isinstance(source, zarr.Array) else source))
            raise ValueError(f"the output {output} and the source {name.rstrip('/')} overlap: choose another URL")
    paths = [source for source in sources if not isinstance(source, zarr.Array)]
    # Path.resolve would raise RuntimeError for a link that leads to itself.
    targets = [(path, Path(os.path.realpath(str(path)))) for path in outputs if "://" not in str(path)]
    read = [(path, Path(os.path.realpath(path))) for path in paths if "://" not in str(path)]
    for (output, output_path), (source, source_path) in itertools.product(targets, read):
        if output_path == source_path or output_path in source_path.parents:
            raise ValueError(f"the output {output} would replace the source {source}: choose another path")
        if source_path in output_path.parents:
            raise ValueError(f"the output {output} would lie inside the source {source}: choose another path")
    for (first, first_path), (second, second_path) in itertools.combinations(targets, 2):
        if first_path == second_path or first_path in second_path.parents or second_path in first_path.parents:
            raise ValueError(f"the outputs {first} and {second} would overlap: choose separate paths")


def _places(*two: str | Target | zarr.Array) -> Iterator[tuple[str, str]]:
    """Yield the places of two images, as they were named, and in the buckets where both are."""
    yield tuple(str(one).rstrip("/") for one in two)  # type: ignore[misc]
    found = []
    for one in two:
        if isinstance(one, (ObjectFolder, zarr.Array)):
            found.append(place_of(one.store, one.inside if isinstance(one, ObjectFolder) else one.path))
        elif is_remote(str(one)):
            with suppress(Exception):  # a URL that cannot be opened is another check's error
                found.append(place_of(*open_store(str(one))))
    if len(found) == 2 and all(found):
        yield found[0], found[1]  # type: ignore[misc]


def check_free_space(path: Target, nbytes: int, *, encoded: bool) -> None:
    """Check that voxels fit on the file system of a path; if they are `encoded`, compressed 100 times."""
    if isinstance(path, ObjectFolder):
        return
    folder = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    free, needed = shutil.disk_usage(folder).free, nbytes // 100 if encoded else nbytes
    if needed > free:
        unit, size = ("GiB", 2**30) if needed >= 2**30 else ("MiB", 2**20)
        error = OSError(
            f"{path} would take {'at least ' if encoded else ''}{needed / size:,.1f} {unit}, and {free / size:,.1f} "
            f"{unit} are free there: choose another disk, or larger voxels"
        )
        error.errno = errno.ENOSPC
        raise error
