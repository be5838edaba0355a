"""The contents of a folder of results: images, JSON of the stages, positions of tiles, tables, pictures and times.

In: a folder. Out: a :class:`RunFolder` of paths and records. Voxels of images are not read.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from linumpy.errors import SourceError
from linumpy.io.output.results import JSON, read_result
from linumpy.registration.position_files import read_positions
from linumpy.registration.positions import TilePositions

#: Levels of folders below the folder that are searched, and rows of a table that are read.
_DEPTH, _ROWS = 4, 200
#: Name of the summary of ``linum-pipeline`` in the folder of its results.
_SUMMARY = "pipeline.json"
#: Keys of a stage in the summary of ``linum-pipeline``.
_STAGE_KEYS = {"name", "done", "kept", "seconds", "wall_seconds"}
#: Files by which a Zarr folder is recognised.
_ZARR_FILES = ("zarr.json", ".zgroup", ".zattrs")


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The contents of a folder; all paths are in the order of their names.

    - `links`: symbolic links to OME-Zarr images that are not followed, or that lead to images of the folder: by them a
      stage passes on an image that it leaves unchanged.
    - `documents`: objects in JSON files, other than summaries of ``linum-pipeline``.
    - `positions` (Path, TilePositions): positions of tiles, from JSON.
    - `tables` (Path, tuple of tuple of str): CSV tables, the head first: at most 200 rows.
    - `stages`: stages of ``linum-pipeline``, from its summary: name, done, kept, seconds and wall_seconds.
    - `empty`: slices that the pipeline left out, because nothing was recorded in them.
    - `left_out`: stages that the run left out, as the summary of ``linum-pipeline`` says.
    - `earlier`: by stage, the number of files of earlier runs in its folder, which the last run did not write or use.
      They are not among the contents.
    - `unread`: errors of positions, tables and summaries that cannot be read.
    """

    folder: Path
    images: tuple[Path, ...]
    links: tuple[Path, ...]
    documents: dict[Path, dict[str, JSON]]
    positions: tuple[tuple[Path, TilePositions], ...]
    tables: tuple[tuple[Path, tuple[tuple[str, ...], ...]], ...]
    pictures: tuple[Path, ...]
    stages: tuple[dict[str, JSON], ...] = ()
    empty: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    earlier: Mapping[str, int] = field(default_factory=dict)
    unread: tuple[str, ...] = ()


def look_into(folder: str | Path, *, follow_links: bool = False) -> RunFolder:
    """List the contents of a folder and of folders below it; `follow_links` includes those behind symbolic links.

    Raises `FileNotFoundError`: the folder does not exist. `SourceError`: the folder has no contents that a report
    shows.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    images: list[Path] = []
    links: list[Path] = []
    files: list[Path] = []
    summary, earlier = _json_object(folder / _SUMMARY), Counter[str]()
    summary = summary if _is_summary(summary) else {}
    # By stage the files of the last run, relative to its folder: none of a stage that it left out.
    made = {entry["name"]: frozenset(entry["files"]) for entry in summary.get("stages", ()) if "files" in entry}
    made |= dict.fromkeys(summary.get("left_out", ()), frozenset())
    for path in _walk(folder, _DEPTH, follow_links):
        name = path.relative_to(folder)
        if name.parts[0] in made and str(name) not in made[name.parts[0]]:
            earlier[name.parts[0]] += not path.is_symlink()
            continue
        is_link = path.is_symlink() and (not follow_links or path.resolve().is_relative_to(folder.resolve()))
        (files if not path.is_dir() else links if is_link else images).append(path)
    documents = {}
    positions, tables, unread = [], [], []
    for path in files:
        if path.suffix == ".json":
            content = _json_object(path)
            if path.name == _SUMMARY and "stages" in content:
                if not _is_summary(content):
                    unread.append(f"{path} is no summary of linum-pipeline")
                continue
            if content:
                documents[path] = content
            if {"tiles", "pairs", "model", "tile_shape"} <= content.keys():
                try:
                    positions.append((path, read_positions(path, _tile_shape(content["tile_shape"]))))
                except SourceError as error:
                    unread.append(str(error))
        elif path.suffix == ".csv":
            try:
                tables.append((path, _table(path)))
            except (OSError, csv.Error) as error:
                unread.append(f"{path} cannot be read: {error}")
    pictures = tuple(path for path in files if path.suffix == ".png")
    contents = RunFolder(
        folder=folder, images=tuple(images), links=tuple(links), documents=documents,
        positions=tuple(positions), tables=tuple(tables), pictures=pictures,
        stages=tuple(summary.get("stages", ())), empty=tuple(summary.get("empty", ())),
        left_out=tuple(summary.get("left_out", ())), earlier={stage: n for stage, n in earlier.items() if n},
        unread=tuple(unread),
    )  # fmt: skip
    if not any((images, documents, tables, pictures, contents.stages, unread)):
        raise SourceError(f"{folder} holds no OME-Zarr images, JSON, tables or pictures to report")
    return contents


def _walk(folder: Path, depth: int, follow_links: bool) -> Iterator[Path]:
    """Yield files and Zarr folders; Zarr folders are not searched, and hidden files and folders are left out.

    Of what lies behind symbolic links only Zarr folders are yielded, unless links are followed.
    """
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        is_zarr = entry.is_dir() and any((path / name).is_file() for name in _ZARR_FILES)
        if entry.name.startswith(".") or (entry.is_symlink() and not follow_links and not is_zarr):
            continue
        if is_zarr or entry.is_file():  # reading a pipe would block
            yield path
        elif entry.is_dir() and depth:
            yield from _walk(path, depth - 1, follow_links)


def _json_object(path: Path) -> dict[str, JSON]:
    """Return the object in a JSON file; empty if the file cannot be read or holds another value."""
    try:
        return read_result(path)
    except (OSError, ValueError):
        return {}


def _is_summary(content: dict[str, JSON]) -> bool:
    """Return whether each stage has the keys of a summary of ``linum-pipeline``."""
    stages = content.get("stages")
    return isinstance(stages, list) and all(isinstance(stage, dict) and stage.keys() >= _STAGE_KEYS for stage in stages)


def _tile_shape(value: JSON) -> tuple[int, int]:
    """Return the tile shape of positions, or (0, 0) if it is no pair: then :func:`read_positions` raises an error."""
    return (value[0], value[1]) if isinstance(value, list) and len(value) == 2 else (0, 0)


def _table(path: Path) -> tuple[tuple[str, ...], ...]:
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        return tuple(tuple(row) for row, _ in zip(csv.reader(file), range(_ROWS + 1), strict=False))
