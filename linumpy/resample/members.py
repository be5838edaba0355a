"""What lies in a group of Zarr: its groups and arrays, and files that are not of Zarr.

In: a group in a store that lists its keys. Out: nodes with their paths; paths of other files, and their copies. Errors:
:class:`~linumpy.errors.SourceError` for a node that cannot be read, or that lies in a folder that is no group: nothing
is left out silently, as zarr-python's ``members`` does, nor taken from consolidated metadata, which may be older.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import zarr
from zarr.abc.store import RangeByteRequest
from zarr.buffer import cpu
from zarr.core.sync import sync
from zarr.storage import StorePath

from linumpy.errors import SourceError
from linumpy.io.source import describe_source, open_at

_NODES = ("zarr.json", ".zgroup", ".zarray")
_METADATA = (*_NODES, ".zattrs", ".zmetadata")
#: Members that are looked at together: a store may be far away.
_THREADS = 16
#: Bytes of a file that are copied at a time.
_PIECE_NBYTES = 64 * 2**20
_BYTES = cpu.buffer_prototype

Node = zarr.Group | zarr.Array


@dataclass(frozen=True)
class Members:
    """What lies in a group.

    Attributes
    ----------
    nodes : dict of str to zarr.Group or zarr.Array
        All groups and arrays by their paths, with the group itself, whose path is empty; sorted.
    files : tuple of str
        Paths of the files that are neither metadata nor of an array, nor in a hidden folder.
    """

    nodes: dict[str, Node]
    files: tuple[str, ...]


@dataclass(frozen=True)
class _Found:
    """A file, if it has neither a node nor members; a node; or a folder."""

    path: str
    in_groups: bool
    node: Node | None = None
    members: tuple[str, ...] | None = None


def members_of(group: zarr.Group) -> Members:
    """List what lies in a group whose store lists its keys.

    Raises
    ------
    SourceError
        A group or an array cannot be read, or is in a folder that is no group; naming it.
    """
    found: list[_Found] = [_Found("", True, group, _names(group, ""))]
    with ThreadPoolExecutor(_THREADS, "linumpy-members") as pool:
        level = found
        while level:
            inside = [(f"{one.path}/{name}".lstrip("/"), one) for one in level for name in one.members or ()]
            level = [one for one in pool.map(partial(_look, group), inside) if one is not None]
            found += level
    files = tuple(sorted(one.path for one in found if one.node is None and one.members is None))
    return Members({one.path: one.node for one in sorted(found, key=lambda one: one.path) if one.node}, files)


def _look(group: zarr.Group, member: tuple[str, _Found]) -> _Found | None:
    """Look at what has a name in a group or folder; None for what is left out."""
    path, above = member
    name, in_groups = path.rpartition("/")[2], above.in_groups and above.node is not None
    if name in _METADATA and above.node is not None:
        return None
    if sync(group.store.exists(_key(group, path))):
        return _Found(path, in_groups)
    if not any(sync(group.store.exists(_key(group, f"{path}/{one}"))) for one in _NODES):
        return None if name.startswith(".") else _Found(path, in_groups, members=_names(group, path))
    node = _opened(group, path)
    if not in_groups:
        raise SourceError(
            f"{_name(group, path)!r} is not reached through the groups of {describe_source(group)}: a folder above it "
            "is no group of Zarr; make it one"
        )
    if isinstance(node, zarr.Array):
        return _Found(path, True, node)
    if not _is_group(group, path, node.metadata.zarr_format):
        raise SourceError(f"the Zarr metadata of {_name(group, path)!r} say neither that it is a group nor an array")
    return _Found(path, True, node, _names(group, path))


def _is_group(group: zarr.Group, path: str, zarr_format: int) -> bool:
    """Return whether there is the document of a group: to zarr-python a document that says nothing is one."""
    if zarr_format == 2:
        return sync(group.store.exists(_key(group, f"{path}/.zgroup")))
    document = sync(group.store.get(_key(group, f"{path}/zarr.json"), _BYTES))
    return document is not None and json.loads(document.to_bytes()).get("node_type") == "group"


def copy_files(group: zarr.Group, paths: Iterable[str], folder: Path) -> None:
    """Copy files of a group into a folder."""
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        key, begin = _key(group, path), 0
        size = sync(group.store.getsize(key))
        with open(folder / path, "wb") as target:
            while begin < size:
                end = min(begin + _PIECE_NBYTES, size)
                part = sync(group.store.get(key, _BYTES, RangeByteRequest(begin, end)))
                if part is None or len(part) != end - begin:
                    raise SourceError(f"{_name(group, path)!r} was changed while it was copied")
                target.write(part.to_bytes())
                begin = end


def _names(group: zarr.Group, path: str) -> tuple[str, ...]:
    async def listed() -> list[str]:
        return [name async for name in group.store.list_dir(_key(group, path).rstrip("/"))]

    return tuple(sorted(sync(listed())))


def _opened(group: zarr.Group, path: str) -> Node:
    try:
        return open_at(StorePath(group.store, _key(group, path)), name=_name(group, path))
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(f"{_name(group, path)!r} cannot be opened: {type(error).__name__}: {error}") from error


def _key(group: zarr.Group, path: str) -> str:
    return f"{group.path}/{path}" if group.path else path


def _name(group: zarr.Group, path: str) -> str:
    return f"{describe_source(group)}/{path}"
