"""List the members of a Zarr group: groups, arrays, and files that do not belong to Zarr; copy such files.

Errors: :class:`~linumpy.errors.SourceError` for a node that cannot be read, a node in a folder that is not a group, or
a file that changes while it is copied. zarr-python's ``members`` leaves such nodes out silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import zarr
from zarr.abc.store import RangeByteRequest
from zarr.buffer import cpu
from zarr.core.sync import sync

from linumpy.errors import SourceError
from linumpy.io.metadata import Node, member_names, open_member
from linumpy.io.output.objects import JOURNAL, ObjectFolder, Target
from linumpy.io.paths import METADATA_FILES
from linumpy.io.source import describe_source
from linumpy.io.stores.zips import ArchiveStore

#: Members that are examined concurrently, since a remote store answers slowly.
_THREADS = 16
#: Bytes of a file that are copied at a time.
_PIECE_NBYTES = 64 * 2**20
_BYTES = cpu.buffer_prototype


@dataclass(frozen=True)
class Members:
    """The members of a group.

    - `nodes`: all groups and arrays by their paths, sorted; the path of the group itself is empty.
    - `files`: paths of other files, except metadata, journals, chunks of arrays, and files in hidden folders.
    """

    nodes: dict[str, Node]
    files: tuple[str, ...]


@dataclass(frozen=True)
class _Entry:
    """An entry. A group has a node and `members`; an array has a node; a folder has `members`; a file has neither.

    `in_groups` says whether all folders above the entry are groups.
    """

    path: str
    in_groups: bool
    node: Node | None = None
    members: tuple[str, ...] | None = None


def members_of(group: zarr.Group) -> Members | None:
    """List the members of a group; None if its store does not list its keys."""
    names = member_names(group)
    if names is None:
        return None
    entries = [_Entry("", True, group, names)]
    with ThreadPoolExecutor(_THREADS, "linumpy-members") as pool:
        level = entries
        while level:
            for entry in level:
                _check_names(group, entry)
            below = [(f"{entry.path}/{name}".lstrip("/"), entry) for entry in level for name in entry.members or ()]
            level = [entry for entry in pool.map(partial(_examine, group), below) if entry is not None]
            entries += level
    entries.sort(key=lambda entry: entry.path)
    files = tuple(entry.path for entry in entries if entry.node is None and entry.members is None)
    return Members({entry.path: entry.node for entry in entries if entry.node is not None}, files)


def _check_names(group: zarr.Group, entry: _Entry) -> None:
    """Raise `SourceError` for a member without a name, which would be listed again and again, or made of dots."""
    folder = _key(group, entry.path).rstrip("/")

    async def first(prefix: str) -> str:
        async for key in group.store.list_prefix(prefix):
            return key
        return prefix

    for name in entry.members or ():
        if name in ("", ".", ".."):
            member = sync(first(f"{folder}/{name}/" if folder else f"{name}/"))
            raise SourceError(
                f"{describe_source(group)} has the member {member!r}, which no folder can hold: a part of the path is "
                "empty or made of dots; write it again without this member"
            )


def _examine(group: zarr.Group, member: tuple[str, _Entry]) -> _Entry | None:
    """Return the entry at a path below another entry; None for metadata, journals and hidden folders."""
    path, above = member
    name, in_groups = path.rpartition("/")[2], above.in_groups and above.node is not None
    if name == JOURNAL or (name in METADATA_FILES and above.node is not None):
        return None
    if sync(group.store.exists(_key(group, path))):
        return _Entry(path, in_groups)
    node = open_member(group, path)
    if node is None:
        return None if name.startswith(".") else _Entry(path, in_groups, members=member_names(group, path))
    if not in_groups:
        raise SourceError(
            f"{_name(group, path)!r} is not reached through the groups of {describe_source(group)}: a folder above it "
            "is no group of Zarr; make it one"
        )
    if isinstance(node, zarr.Array):
        return _Entry(path, True, node)
    return _Entry(path, True, node, member_names(group, path))


def copy_files(group: zarr.Group, paths: Iterable[str], folder: Target) -> None:
    """Copy files of a group into a folder."""
    for path in paths:
        if isinstance(folder, ObjectFolder):
            folder.store.put(f"{folder.inside}/{path}".lstrip("/"), b"".join(_pieces(group, path)))
            continue
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with open(folder / path, "wb") as target:
            target.writelines(_pieces(group, path))


def _pieces(group: zarr.Group, path: str) -> Iterator[bytes]:
    """Yield the bytes of a file of a group."""
    key, begin = _key(group, path), 0
    if isinstance(group.store, ArchiveStore):
        group.store.verify(key)
    size = sync(group.store.getsize(key))
    while begin < size:
        end = min(begin + _PIECE_NBYTES, size)
        part = sync(group.store.get(key, _BYTES, RangeByteRequest(begin, end)))
        if part is None or len(part) != end - begin:
            raise SourceError(f"{_name(group, path)!r} was changed while it was copied")
        yield part.to_bytes()
        begin = end


def keys_of(group: zarr.Group, path: str) -> list[str]:
    """List the paths of all files of an array: its metadata and its chunks."""

    async def listed() -> list[str]:
        return [key async for key in group.store.list_prefix(f"{_key(group, path)}/")]

    return [key.removeprefix(f"{group.path}/") for key in sorted(sync(listed()))]


def _key(group: zarr.Group, path: str) -> str:
    return f"{group.path}/{path}" if group.path else path


def _name(group: zarr.Group, path: str) -> str:
    return f"{describe_source(group)}/{path}"
