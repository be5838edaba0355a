"""Repair the metadata of an image in a local folder; voxels are never touched.

In: the folder, and a :class:`~linumpy.verification.findings.Verification`. Out: a plan of changed documents, which can
be shown, and written. The old document is kept beside the new one. Errors: :class:`~linumpy.errors.SourceError` for
sources that are no local folder, or were changed meanwhile; ``ValueError`` for an unknown unit.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import logging
import os
import posixpath
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zarr

from linumpy.errors import SourceError
from linumpy.io.ngff.axes import UNITS_OF_SPACE, common_transformations, compose_scales, mappings_in
from linumpy.io.ngff.coordinate_systems import as_axes_and_scales, referred
from linumpy.io.output.syscalls import sync_path
from linumpy.io.paths import ZARR_FILES, absolute, has_dots, split_archive
from linumpy.io.source import local_name, open_node
from linumpy.verification.consolidated import (
    CONSOLIDATED_V2,
    KEY_V3,
    differences,
    entries_for,
    entries_of,
    parsed_tree,
    stored_tree,
    with_entries,
)
from linumpy.verification.findings import Proposal, Verification
from linumpy.verification.place import NOT_UNDERSTOOD

log = logging.getLogger(__name__)

#: Appended to the name of a document: of the old one, and of a new one that is not whole yet.
KEPT, UNFINISHED = ".before-repair", ".unfinished-repair"

_TYPES = {"t": "time", "c": "channel", "z": "space", "y": "space", "x": "space"}


@dataclass(frozen=True)
class Change:
    """A document that a repair changes.

    Attributes
    ----------
    path : str
        Path of the document below the source.
    before : bytes or None
        The stored document; None if there is none.
    after : bytes
        The new document.
    why : str
        What is changed in it.
    """

    path: str
    before: bytes | None
    after: bytes
    why: str


def plan_repairs(source: str | Path, verification: Verification, unit: str | None = None) -> tuple[Change, ...]:
    """Plan the repair of metadata; nothing is written.

    Levels are placed as `verification` proposes; versions of NGFF and types of axes are added where they are certain;
    and consolidated metadata that do not agree with the documents are made anew. All else in a document is kept.

    Parameters
    ----------
    source : str or Path
        Local folder of the image.
    verification : Verification
        What was found.
    unit : str, optional
        Unit along axes of space that have none, such as ``"micrometer"``.

    Returns
    -------
    tuple of Change
        Documents to change; empty if nothing can be repaired.

    Raises
    ------
    FileNotFoundError, SourceError
        The source does not exist, is no local folder, or is a part of an image with consolidated metadata.
    ValueError
        NGFF does not name the unit.
    """
    folder = _local_folder(source)
    if unit is not None and unit not in UNITS_OF_SPACE:
        raise ValueError(f"unit={unit!r} is no unit of length of NGFF: pass one of {', '.join(UNITS_OF_SPACE)}")
    group = open_node(folder)
    if not isinstance(group, zarr.Group):
        return ()
    stored = stored_tree(group)
    plan = _Plan(parsed_tree(stored))
    original = parsed_tree(stored)
    for proposal in verification.proposals:
        _place_level(plan, proposal)
    _complete(plan, unit)
    _consolidate(plan)
    changes = tuple(
        Change(path, stored[path], _written(document, stored[path]), "; ".join(dict.fromkeys(plan.reasons[path])))
        for path, document in plan.documents.items()
        if json.dumps(document) != json.dumps(original[path])
    )
    if changes:
        _refuse_part_of_another(folder)
    return changes


@dataclass
class _Plan:
    """Documents by their paths, which are changed in place, and why."""

    documents: dict[str, dict[str, Any] | None]
    reasons: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def attributes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the path of each document that can hold attributes of NGFF, and the attributes."""
        for path, document in self.documents.items():
            name = posixpath.basename(path)
            holder = document.get("attributes") if document and name == "zarr.json" else document
            if isinstance(holder, dict) and name in ("zarr.json", ".zattrs"):
                yield path, holder


def _local_folder(source: str | Path) -> Path:
    name = local_name(str(source))
    if name is None or split_archive(name) is not None:
        kind = "a URL" if name is None else "in a ZIP file"
        raise SourceError(f"{str(source)!r} is {kind}: copy it to a local folder, whose metadata can be repaired")
    if not Path(name).is_dir():
        raise FileNotFoundError(f"there is no folder {name!r}")
    return absolute(name)


def _refuse_part_of_another(folder: Path) -> None:
    """Raise for a folder in a group whose consolidated metadata a repair would make untrue."""
    for above in folder.parents:
        if not any((above / name).is_file() for name in ZARR_FILES):
            return
        documents = {path: (above / path) for path in (CONSOLIDATED_V2, "zarr.json")}
        parsed = parsed_tree({path: file.read_bytes() for path, file in documents.items() if file.is_file()})
        if CONSOLIDATED_V2 in parsed or (parsed.get("zarr.json") or {}).get(KEY_V3) is not None:
            raise SourceError(f"{str(folder)!r} is in {str(above)!r}, which has consolidated metadata: repair that")


def _place_level(plan: _Plan, proposal: Proposal) -> None:
    """Write the scale and translation of a level, or log why they cannot be written."""
    for path, attributes in plan.attributes():
        if posixpath.dirname(path) != proposal.image.strip("/"):
            continue
        try:
            image = attributes.get("ome", attributes)["multiscales"][proposal.multiscale]
            dataset = image["datasets"][proposal.level]
            if _set_level(image, dataset, proposal):
                plan.reasons[path].append(f"level {dataset['path']!r} is placed as its voxels are")
        except NOT_UNDERSTOOD as error:
            log.warning("%s: level %d is not repaired: %s", path, proposal.level, error)


def _set_level(image: dict[str, Any], dataset: dict[str, Any], proposal: Proposal) -> bool:
    """Write the scale and translation of a level; return whether they change anything."""
    rank, name = len(proposal.scale), f"level {dataset['path']!r}"
    plain = as_axes_and_scales(image, name)
    common = common_transformations(plain, name) if plain is image else []
    factor, shift = compose_scales(common, rank, name)
    scale = [value / f for value, f in zip(proposal.scale, factor, strict=True)]
    translation = [(value - s) / f for value, f, s in zip(proposal.translation, factor, shift, strict=True)]
    own = dataset["coordinateTransformations"]
    is_sequence = len(own) == 1 and own[0].get("type") == "sequence"
    chain = own[0]["transformations"] if is_sequence else own
    if [part.get("type") for part in chain] not in (["scale"], ["scale", "translation"]):
        raise ValueError("its transformation is not a scale and a translation; correct it by hand")
    if plain is not image:  # axes in another order, or a further transformation to space, are none of the level's own
        placed = plain["datasets"][proposal.level]["coordinateTransformations"]
        if compose_scales(chain, rank, name) != compose_scales(placed, rank, name):
            raise ValueError("its transformation is not all that places it; correct it by hand")
    before = compose_scales(chain, rank, name)
    if before == (tuple(scale), tuple(translation)):
        return False
    chain[0]["scale"] = _kept_numbers(chain[0]["scale"], scale)
    if len(chain) == 2:
        chain[1]["translation"] = _kept_numbers(chain[1]["translation"], translation)
        return True
    moved = {"type": "translation", "translation": translation}
    if is_sequence or plain is image:
        chain.append(moved)
    else:
        ends = {key: value for key, value in chain[0].items() if key not in ("type", "scale")}
        steps = [{"type": "scale", "scale": chain[0]["scale"]}, moved]
        dataset["coordinateTransformations"] = [{"type": "sequence", **ends, "transformations": steps}]
    return True


def _kept_numbers(old: list[Any], new: list[float]) -> list[Any]:
    """Return the new numbers, those that are equal as they were written."""
    return [a if a == b else b for a, b in zip(old, new, strict=True)]


def _complete(plan: _Plan, unit: str | None) -> None:
    """Add versions, types of axes, and the unit, where they are missing."""
    holders = [(path, attributes["ome"]) for path, attributes in plan.attributes() if _is_object(attributes.get("ome"))]
    versions = {str(ome["version"]) for _, ome in holders if "version" in ome}
    for path, ome in holders:
        if "version" not in ome and len(versions) == 1:  # NGFF wants one version in all groups below one
            ome["version"] = versions.copy().pop()
            plan.reasons[path].append("the version of NGFF of the other groups")
    for path, attributes in plan.attributes():
        ome = attributes.get("ome", attributes)
        for image in mappings_in(ome, "multiscales") if _is_object(ome) else ():
            reasons = [*_set_version(image, path, ome is attributes), *_set_axes(image, unit)]
            plan.reasons[path].extend(reasons)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _set_version(image: Any, path: str, at_top: bool) -> Iterator[str]:
    axes = mappings_in(image, "axes")
    if at_top and path.endswith(".zattrs") and axes and "version" not in image:
        image["version"] = "0.4"  # the only version that has axes with types, and no attribute "ome"
        yield "the version 0.4"


def _set_axes(image: Any, unit: str | None) -> Iterator[str]:
    for axis in _axes_of_levels(image):
        name = axis.get("name")
        if "type" not in axis and isinstance(name, str) and name in _TYPES:
            axis["type"] = _TYPES[name]
            yield f"the type of axis {name}"
        if unit is not None and axis.get("type") == "space" and axis.get("unit") is None:
            axis["unit"] = unit
            yield f"the unit {unit} of axis {name}"


def _axes_of_levels(image: Mapping[str, Any]) -> list[Any]:
    """Return the axes of an image; in NGFF 0.6, those of the coordinate system that its levels are mapped to."""
    levels = mappings_in(image, "datasets")
    outputs = {referred(t.get("output")) for level in levels for t in mappings_in(level, "coordinateTransformations")}
    systems = [s for s in mappings_in(image, "coordinateSystems") if referred(s) in outputs]
    return [axis for holder in (image, *systems) for axis in mappings_in(holder, "axes")]


def _consolidate(plan: _Plan) -> None:
    """Make consolidated metadata anew where they do not agree with the documents."""
    for path, document in list(plan.documents.items()):
        folder, name = posixpath.split(path)
        is_v2 = name == CONSOLIDATED_V2
        if not is_v2 and (name != "zarr.json" or not document or document.get(KEY_V3) is None):
            continue
        entries, expected = entries_of(document or {}, is_v2), entries_for(plan.documents, folder, is_v2)
        found = differences(entries or {}, expected)
        if found or entries is None:
            fresh = {key: entry for key, entry in (entries or {}).items() if key not in found.gone}
            fresh |= {key: deepcopy(expected[key]) for key in (*found.different, *found.lacking)}
            plan.documents[path] = with_entries(document or {}, fresh, is_v2)
            plan.reasons[path].append("consolidated metadata as the documents")


def _written(document: dict[str, Any] | None, before: bytes) -> bytes:
    """Write a document in the style of the one before: its indentation, separators, escapes and last line."""
    text = before.decode(json.detect_encoding(before), "surrogatepass")
    indented = re.search(r"[\[{]\r?\n([ \t]+)", text)
    indent = indented.group(1) if indented else None
    comma = ", " if indent is None and re.search(r'[\]}"\d], ', text) else ","
    colon = ": " if '": ' in text or '":' not in text else ":"
    written = json.dumps(document, indent=indent, separators=(comma, colon), ensure_ascii=text.isascii())
    return (written + text[len(text.rstrip()) :]).encode(errors="surrogatepass")


def show_changes(changes: tuple[Change, ...]) -> str:
    """Return the changes as a unified diff of each document, whose values are shown one a line."""
    shown = []
    for change in changes:
        before, after = (
            [] if document is None else json.dumps(json.loads(document), indent=2, ensure_ascii=False).splitlines()
            for document in (change.before, change.after)
        )
        lines = difflib.unified_diff(before, after, change.path, f"{change.path} ({change.why})", lineterm="")
        shown.append("\n".join(lines))
    return "\n".join(shown)


def apply_repairs(source: str | Path, changes: tuple[Change, ...]) -> list[str]:
    """Write changed documents, each whole or not at all, and keep the old ones beside them.

    Parameters
    ----------
    source : str or Path
        Local folder of the image.
    changes : tuple of Change
        What :func:`plan_repairs` planned for it.

    Returns
    -------
    list of str
        Paths below the source of the old documents that are kept: ``NAME.before-repair``, or ``.before-repair.2`` and
        so on if there is one.

    Raises
    ------
    SourceError
        The source is no local folder, or a document was changed since the plan was made; that one is not written.
    """
    folder = _local_folder(source)
    for change in changes:
        _check_unchanged(folder, change)
    kept = [_keep(folder, change) for change in changes if change.before is not None]
    for change in changes:
        file = folder / change.path
        with _whole_file(file, change.after) as unfinished:
            if file.exists():
                shutil.copymode(file, unfinished)
            _check_unchanged(folder, change)
    return kept


def _keep(folder: Path, change: Change) -> str:
    """Write the old document beside the new one; return its path below the source."""
    ends = itertools.chain([KEPT], (f"{KEPT}.{number}" for number in itertools.count(2)))
    name = next(f"{change.path}{end}" for end in ends if not os.path.lexists(folder / f"{change.path}{end}"))
    with _whole_file(folder / name, change.before or b""):
        return name


@contextlib.contextmanager
def _whole_file(file: Path, data: bytes) -> Iterator[Path]:
    """Write a file beside its place, for the block, and rename it at the end; remove it if the block raises."""
    unfinished = Path(f"{file}{UNFINISHED}.{os.getpid()}")
    try:
        with open(unfinished, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        yield unfinished
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_path(file.parent)


def _check_unchanged(folder: Path, change: Change) -> None:
    if has_dots(change.path):
        raise SourceError(f"{change.path!r} is no path of a document below {str(folder)!r}")
    file = folder / change.path
    stored = file.read_bytes() if file.exists() else None
    if stored != change.before:
        raise SourceError(f"{str(file)!r} was changed since the repair was planned: verify the image again")
