"""Read a grid of an OpenVDB file (``.vdb``).

In: a path and the name of a grid. Out: :class:`~linumpy.sampling.files.tree.VoxelTree`. File versions 222 to 224 are
read: trees ``5_4_3`` of float, double, int32, int64 and vec3s, also in half precision; raw, zip or Blosc, with or
without inactive values. Everything else is refused. Errors: see :func:`read_openvdb`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

import numpy as np

from linumpy.errors import UnsupportedLayoutError
from linumpy.sampling.files.binary import Cursor, no_such_error, opened, unpack_blosc, unzip
from linumpy.sampling.files.tree import (
    NODE,
    NODE_CHILDREN,
    UPPER,
    UPPER_CHILDREN,
    Levels,
    VoxelTree,
    flatten,
    mask_of,
    offsets_of,
)

_MAGIC = 0x56444220
_VERSIONS = range(222, 225)
_ZIP, _ACTIVE_MASK, _BLOSC = 1, 2, 4
_TYPES = {"float": ("<f4", 1), "double": ("<f8", 1), "int32": ("<i4", 1), "int64": ("<i8", 1), "vec3s": ("<f4", 3)}
#: Sizes of transforms in bytes. Frustums are refused: a box in index space is not a box in the world.
_MAPS = {
    **dict.fromkeys(["ScaleMap", "UniformScaleMap"], 120),
    **dict.fromkeys(["ScaleTranslateMap", "UniformScaleTranslateMap"], 144),
    **dict.fromkeys(["AffineMap", "UnitaryMap"], 128),
    "TranslationMap": 24,
}
_SEPARATOR = "\x1e"  # between a name and the number that makes it unique


@dataclass(frozen=True)
class _Stored:
    """How the values of a grid are stored."""

    dtype: np.dtype
    channels: int
    is_half: bool
    compression: int
    background: np.ndarray


#: Values of a node, (n, channels), and the masks of active values and of children, (n,).
_Node = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass
class _Topology:
    """Origins, values and masks of all nodes, and masks of leaves, which the file stores before values of leaves."""

    upper_origins: list[np.ndarray] = field(default_factory=list)
    uppers: list[_Node] = field(default_factory=list)
    node_origins: list[np.ndarray] = field(default_factory=list)
    nodes: list[_Node] = field(default_factory=list)
    leaf_masks: list[np.ndarray] = field(default_factory=list)


def read_openvdb(path: str | os.PathLike[str], name: str | None = None) -> VoxelTree:
    """Read the grid with this name, by default the first."""
    with opened(path) as cursor:
        version = _read_header(cursor)
        seekable = bool(cursor.number("u1", "the flag of grid offsets"))
        cursor.take(36, "the identifier of the file")
        _skip_metadata(cursor)
        names: list[str] = []
        uniques: list[str] = []
        for _ in range(cursor.count("<i4", 36, "grids")):
            unique = cursor.text("the name of a grid")
            kind, parent = cursor.text("the type of a grid"), cursor.text("the parent of a grid")
            grid, _, end = cursor.array("<i8", 3, "the offsets of a grid").tolist()
            names.append(unique.split(_SEPARATOR)[0])
            is_chosen = name is None or name in (unique, names[-1])
            if is_chosen and parent:  # the grid shares the tree of an earlier grid, whose unique name is `parent`
                if parent not in uniques:
                    raise cursor.error(f"the grid {names[-1]!r} shares the tree of {parent!r}, which is not before it")
                return read_openvdb(path, parent)
            uniques.append(unique)
            if is_chosen or not seekable:
                if seekable:
                    cursor.seek(grid, f"the grid {names[-1]!r}")
                tree = _read_grid(cursor, kind, version)
                if is_chosen:
                    return tree
            else:
                cursor.seek(end, f"what follows the grid {names[-1]!r}")
        raise no_such_error("grid", name, names, cursor.name)


def _read_header(cursor: Cursor) -> int:
    magic = cursor.number("<i8", "the magic number")
    if magic != _MAGIC:
        raise cursor.error(f"is no OpenVDB file: it begins with {magic:#x} instead of {_MAGIC:#x}")
    version = cursor.number("<u4", "the version of the file")
    if version not in _VERSIONS:
        raise UnsupportedLayoutError(
            f"{cursor.name}: file version {version} is not read, only {_VERSIONS[0]} to {_VERSIONS[-1]} "
            "(OpenVDB 3 and later); write it again with a newer OpenVDB"
        )
    cursor.take(8, "the version of the library")
    return version


def _skip_metadata(cursor: Cursor) -> None:
    for _ in range(cursor.count("<i4", 12, "items of metadata")):
        cursor.text("the name of an item of metadata")
        cursor.text("the type of an item of metadata")
        cursor.take(cursor.count("<u4", 1, "bytes of an item of metadata"), "an item of metadata")


def _read_grid(cursor: Cursor, kind: str, version: int) -> VoxelTree:
    match = re.fullmatch(r"Tree_(\w+?)_5_4_3(_HalfFloat)?", kind)
    if not match or match[1] not in _TYPES:
        raise UnsupportedLayoutError(
            f"{cursor.name}: a grid of type {kind} is not read, only Tree_TYPE_5_4_3 with TYPE one of {list(_TYPES)}"
        )
    compression = cursor.number("<u4", "the compression of a grid")
    if compression & ~(_ZIP | _ACTIVE_MASK | _BLOSC):
        raise UnsupportedLayoutError(f"{cursor.name}: compression {compression:#x} is not known")
    _skip_metadata(cursor)
    transform = cursor.text("the type of the transform")
    if transform not in _MAPS:
        raise UnsupportedLayoutError(f"{cursor.name}: transform {transform!r} is not read, only {list(_MAPS)}")
    cursor.take(_MAPS[transform], "the transform")
    if (buffers := cursor.number("<i4", "the number of buffers of the tree")) != 1:
        raise UnsupportedLayoutError(f"{cursor.name}: a tree of {buffers} buffers is not read, only of one")
    dtype, channels = np.dtype(_TYPES[match[1]][0]), _TYPES[match[1]][1]
    background = cursor.array(dtype, channels, "the background")
    return _read_tree(cursor, _Stored(dtype, channels, bool(match[2]) and dtype.kind == "f", compression, background))


def _read_tree(cursor: Cursor, form: _Stored) -> VoxelTree:
    entry = 12 + form.background.nbytes
    tiles = cursor.count("<u4", entry + 1, "tiles of the root")
    children = cursor.count("<u4", 12, "children of the root")
    record = np.dtype([("origin", "<i4", 3), ("value", form.dtype, form.channels), ("active", "u1")])
    root = cursor.array(record, tiles, "tiles of the root")
    topology = _Topology()
    for _ in range(children):
        _read_upper(cursor, form, topology)
    masks = [np.empty((0, 64), np.uint8), *topology.leaf_masks]
    leaf_active = mask_of(np.concatenate(masks))
    leaf_values = np.empty((len(leaf_active), 512, form.channels), np.float32)
    for values, active in zip(leaf_values, leaf_active, strict=True):
        cursor.take(64, "the mask of a leaf")
        values[:] = _read_values(cursor, active, form)
    try:
        return flatten(_levels(root, topology, form, leaf_values, leaf_active), form.background)
    except ValueError as error:
        raise cursor.error(str(error)) from error


def _levels(root: np.ndarray, topology: _Topology, form: _Stored, values: np.ndarray, active: np.ndarray) -> Levels:
    uppers, nodes = _stack(topology.uppers, 8 * UPPER, form), _stack(topology.nodes, NODE_CHILDREN**3, form)
    leaves = nodes[2].cumsum(dtype=np.int32).reshape(nodes[2].shape) - 1
    return Levels(
        root["origin"].astype(np.int64),
        root["value"].reshape(-1, form.channels).astype(np.float32),
        root["active"] != 0,
        np.array(topology.upper_origins, np.int64).reshape(-1, 3),
        *uppers,
        np.array(topology.node_origins, np.int64).reshape(-1, 3),
        *nodes[:2],
        np.where(nodes[2], leaves, np.int32(-1)),
        values,
        active,
    )


def _stack(nodes: list[_Node], size: int, form: _Stored) -> _Node:
    if not nodes:
        no_masks = np.zeros((0, size), bool)
        return np.zeros((0, size, form.channels), np.float32), no_masks, no_masks
    values, active, child = zip(*nodes, strict=True)
    return np.stack(values), np.stack(active), np.stack(child)


def _read_upper(cursor: Cursor, form: _Stored, topology: _Topology) -> None:
    origin = cursor.array("<i4", 3, "the origin of an upper node").astype(np.int64)
    if (origin % UPPER).any():
        raise cursor.error(f"an upper node begins at voxel {origin.tolist()}, which is no multiple of {UPPER}")
    values, active, child = _read_internal(cursor, form, UPPER_CHILDREN**3)
    topology.upper_origins.append(origin)
    topology.uppers.append((values, active, child))
    for node in origin + offsets_of(np.flatnonzero(child), UPPER_CHILDREN, NODE):
        inside = _read_internal(cursor, form, NODE_CHILDREN**3)
        topology.node_origins.append(node)
        topology.nodes.append(inside)
        leaves = int(np.count_nonzero(inside[2]))
        topology.leaf_masks.append(cursor.array("u1", 64 * leaves, "masks of leaves").reshape(leaves, 64))


def _read_internal(cursor: Cursor, form: _Stored, size: int) -> _Node:
    child = mask_of(cursor.array("u1", size // 8, "the mask of children"))
    active = mask_of(cursor.array("u1", size // 8, "the mask of values"))
    return _read_values(cursor, active, form).astype(np.float32), active, child


def _read_values(cursor: Cursor, active: np.ndarray, form: _Stored) -> np.ndarray:
    """Read the values of a node or a leaf, (n, channels).

    The file may have the values of active voxels only, and two values (`outside`, `other`) and a mask for the rest.
    """
    code = cursor.number("u1", "the code of inactive values")
    if code > 6:
        raise cursor.error(f"the code of inactive values is {code}; it is one of 0 to 6")
    # The values of inactive voxels unless the file has others: outside and inside of its mask.
    outside, other = (form.background if code == 0 else -form.background), form.background
    if code in (2, 4, 5):
        outside = cursor.array(form.dtype, form.channels, "an inactive value")
    if code == 5:
        other = cursor.array(form.dtype, form.channels, "an inactive value")
    is_other = np.zeros(len(active), bool)
    if code in (3, 4, 5):
        is_other = mask_of(cursor.array("u1", len(active) // 8, "the mask of inactive values"))
    is_masked = form.compression & _ACTIVE_MASK and code != 6
    stored = _read_buffer(cursor, int(np.count_nonzero(active)) if is_masked else len(active), form)
    if len(stored) == len(active):
        return stored
    values = np.where(is_other[:, None], other, outside)
    values[active] = stored
    return values


def _read_buffer(cursor: Cursor, count: int, form: _Stored) -> np.ndarray:
    dtype = np.dtype("<f2") if form.is_half else form.dtype
    nbytes = count * form.channels * dtype.itemsize
    if form.is_half and not count:
        return np.empty((0, form.channels), form.dtype)  # the file stores nothing, not even a size
    if not form.compression & (_ZIP | _BLOSC):
        content = cursor.take(nbytes, "values of a node")
    else:
        size = cursor.number("<i8", "the size of compressed values")
        if size <= 0 and -size != nbytes:
            raise cursor.error(f"a node stores {-size} bytes of values where {nbytes} are needed")
        content = cursor.take(abs(size), "values of a node")
        if size > 0:
            decode = unpack_blosc if form.compression & _BLOSC else unzip
            try:
                content = decode(content, nbytes) if nbytes else b""
            except ValueError as error:
                raise cursor.error(f"compressed values before byte {cursor.position}: {error}") from error
    return np.frombuffer(content, dtype).reshape(count, form.channels).astype(form.dtype)
