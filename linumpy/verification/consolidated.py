"""Consolidated metadata, and whether they say what the documents of the nodes say.

In: a group, or the parsed documents below a group. Out: findings; or consolidated metadata that agree. In Zarr format 2
they are the document ``.zmetadata``, with an entry for each other document; in format 3 they are a part of the group's
``zarr.json``, with an entry for each node.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import zarr
from zarr.buffer import cpu
from zarr.core.metadata.v2 import ArrayV2Metadata
from zarr.core.metadata.v3 import ArrayV3Metadata
from zarr.core.sync import sync
from zarr.storage import StorePath

from linumpy.io.metadata import member_names, stored_documents
from linumpy.io.paths import METADATA_FILES
from linumpy.io.stores.remote import AccessError
from linumpy.verification.place import NOT_UNDERSTOOD, Place, Told

CONSOLIDATED_V2, KEY_V3 = ".zmetadata", "consolidated_metadata"
_EFFECT = (
    "Programs that use consolidated metadata, such as zarr-python's open_consolidated and xarray, see other shapes, "
    "attributes or members than the rest."
)
_ADVICE = "Let `linum-verify --repair` or zarr.consolidate_metadata make them anew."
_MAX_LISTED = 3

Documents = Mapping[str, dict[str, Any] | None]
"""Parsed documents by their paths below a group; None for one that is no JSON object."""


def stored_tree(group: zarr.Group) -> dict[str, bytes]:
    """Read the documents of a group and of all nodes below, by their paths below the group; not below arrays."""
    documents: dict[str, bytes] = {}
    waiting = [""]
    while waiting:
        path = waiting.pop()
        where = group.store_path / path if path else group.store_path
        own = stored_documents(where, str(where))
        if not own:
            continue
        if (consolidated := _read(where, CONSOLIDATED_V2)) is not None:
            own[CONSOLIDATED_V2] = consolidated
        documents |= {f"{path}/{key}".lstrip("/"): stored for key, stored in own.items()}
        if ".zarray" not in own and (_parsed(own.get("zarr.json", b"")) or {}).get("node_type") != "array":
            names = [name for name in member_names(group, path) or () if name not in METADATA_FILES]
            waiting += [f"{path}/{name}".lstrip("/") for name in names]
    return documents


def _read(where: StorePath, key: str) -> bytes | None:
    try:
        stored = sync((where / key).get(prototype=cpu.buffer_prototype))
    except (AccessError, NotADirectoryError):
        return None
    return None if stored is None else stored.to_bytes()


def _parsed(stored: bytes) -> dict[str, Any] | None:
    """Parse a document; None if it is no JSON object."""
    try:
        document = json.loads(stored)
    except NOT_UNDERSTOOD:
        return None
    return document if isinstance(document, dict) else None


def parsed_tree(stored: Mapping[str, bytes]) -> dict[str, dict[str, Any] | None]:
    """Parse documents; None for those that are no JSON objects."""
    return {path: _parsed(document) for path, document in stored.items()}


@dataclass(frozen=True)
class Differences:
    """Keys of consolidated metadata: of entries that differ with what differs, that lack, and without a document."""

    different: dict[str, tuple[str, ...]]
    lacking: tuple[str, ...]
    gone: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.different or self.lacking or self.gone)


def entries_of(document: Mapping[str, Any], is_v2: bool) -> dict[str, Any] | None:
    """Return the entries of consolidated metadata, out of the document that has them; None if they are no object."""
    holder = document if is_v2 else document.get(KEY_V3)
    entries = holder.get("metadata") if isinstance(holder, Mapping) else None
    return entries if isinstance(entries, dict) else None


def with_entries(document: dict[str, Any], entries: dict[str, Any], is_v2: bool) -> dict[str, Any]:
    """Return the document that has consolidated metadata, with other entries."""
    if is_v2:
        return {**document, "zarr_consolidated_format": 1, "metadata": entries}
    held = document.get(KEY_V3)
    own = held if isinstance(held, dict) else {"kind": "inline", "must_understand": False}
    return {**document, KEY_V3: {**own, "metadata": entries}}


def entries_for(documents: Documents, folder: str, is_v2: bool) -> dict[str, Any]:
    """Return the entries that consolidated metadata of the group at a path should have; None for unknown ones."""
    start = f"{folder}/" if folder else ""
    below = {path.removeprefix(start): document for path, document in documents.items() if path.startswith(start)}
    if is_v2:
        return {
            path: document
            for path, document in below.items()
            if path.rpartition("/")[2] in (".zarray", ".zgroup", ".zattrs")
        }
    nodes = {path.removesuffix("/zarr.json"): doc for path, doc in below.items() if path.endswith("/zarr.json")}
    return {path: doc and {key: value for key, value in doc.items() if key != KEY_V3} for path, doc in nodes.items()}


def differences(entries: Mapping[str, Any], expected: Mapping[str, Any]) -> Differences:
    """Compare consolidated metadata with the documents of the nodes."""
    different = {}
    for key in [key for key in entries if expected.get(key) is not None]:
        if keys := _different_keys(entries[key], expected[key]):
            different[key] = keys
    # Attributes of a node may be stored as an empty object, or not at all.
    bare = {f"{path.rpartition('.')[0]}.zattrs" for path in expected if path.endswith((".zarray", ".zgroup"))}
    lacking = [key for key in expected if key not in entries and expected[key] not in (None, {})]
    gone = [key for key in entries if key not in expected and not (entries[key] == {} and key in bare)]
    return Differences(dict(sorted(different.items())), tuple(sorted(lacking)), tuple(sorted(gone)))


def _different_keys(entry: Any, document: Any) -> tuple[str, ...]:
    """Return the keys that differ in two metadata of a node, which may be written in different ways."""
    if _text(entry) == _text(document):
        return ()
    one, other = _normal(entry), _normal(document)
    if not isinstance(one, dict) or not isinstance(other, dict):
        return ("the entry is no object",)
    absent = object()
    return tuple(key for key in {**other, **one} if _text(one.get(key, absent)) != _text(other.get(key, absent)))


def _normal(document: Any) -> Any:
    """Return metadata of a node in the form in which zarr-python writes them, if it can read them."""
    if not isinstance(document, dict):
        return document
    plain = {key: value for key, value in document.items() if key != KEY_V3}
    try:
        if plain.get("node_type") == "array":
            return ArrayV3Metadata.from_dict(plain).to_dict()
        if plain.get("node_type") == "group":
            return {"attributes": {}, **plain}
        if "chunks" in plain and "dtype" in plain:
            return ArrayV2Metadata.from_dict(plain).to_dict()
    except NOT_UNDERSTOOD:
        pass
    return plain


def _text(value: Any) -> str:
    """Return a value as text, in which a NaN equals itself, and the order of keys does not matter."""
    return "absent" if type(value) is object else json.dumps(value, sort_keys=True, default=str)


def check_consolidated(place: Place) -> Iterator[Told]:
    """Compare the consolidated metadata of a group, if it has some, with the documents of its nodes."""
    where = place.group.store_path
    is_v2 = place.group.metadata.zarr_format == 2
    key = CONSOLIDATED_V2 if is_v2 else "zarr.json"
    stored = _read(where, key)
    document = _parsed(stored or b"") or {}
    if stored is None or (not is_v2 and document.get(KEY_V3) is None):
        return
    entries = entries_of(document, is_v2)
    if entries is None:
        yield place.tell(
            "consolidated", "the consolidated metadata are no object with metadata", _EFFECT, _ADVICE, below=key
        )
        return
    found = differences(entries, entries_for(parsed_tree(stored_tree(place.group)), "", is_v2))
    listed = {
        "differ from the documents of the nodes": [f"{k or '.'} ({', '.join(v)})" for k, v in found.different.items()],
        "lack": found.lacking,
        "name documents that do not exist": found.gone,
    }
    for problem, names in listed.items():
        if names:
            shown = ", ".join(names[:_MAX_LISTED]) + (" …" if len(names) > _MAX_LISTED else "")
            what = f"the consolidated metadata {problem}: {len(names)} of {len(entries)} entries, such as {shown}"
            yield place.tell("consolidated", what, _EFFECT, _ADVICE, below=key, count=len(names))
