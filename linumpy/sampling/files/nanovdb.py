"""Read a grid of a NanoVDB file (``.nvdb``).

In: a path and the name of a grid. Out: :class:`~linumpy.sampling.files.tree.VoxelTree`. It reads grids of ABI version
32, in files of segments (raw, zip or Blosc) and in files that are the memory of grids; of float, double, int16, int32,
int64, uint8, uint32, vec3f, vec3d, vec4f, vec4d, and the quantised fp4, fp8, fp16 and fpn. Everything else is refused.
Errors: ``SourceError`` for a damaged file, ``UnsupportedLayoutError`` for a version, codec or type that is not read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from linumpy.errors import UnsupportedLayoutError
from linumpy.sampling.files.binary import Cursor, no_such_error, opened, unpack_blosc, unzip
from linumpy.sampling.files.tree import UPPER, Levels, VoxelTree, flatten, mask_of, offsets_of

_MAGIC_FILES = (0x304244566F6E614E, 0x324244566F6E614E)  # NanoVDB0 and NanoVDB2
_MAGIC_GRIDS = (0x304244566F6E614E, 0x314244566F6E614E)  # NanoVDB0 and NanoVDB1
_MAJOR = 32
_GRID_NBYTES, _TREE_NBYTES = 672, 64
_BLOSC_PART = 2**30  # Blosc compresses a grid in parts of this size
_NONE, _ZIP, _BLOSC = 0, 1, 2
#: dtype and number of channels by number of grid type.
_TYPES = {
    1: ("<f4", 1),
    2: ("<f8", 1),
    3: ("<i2", 1),
    4: ("<i4", 1),
    5: ("<i8", 1),
    6: ("<f4", 3),
    7: ("<f8", 3),
    10: ("<u4", 1),
    17: ("<f4", 4),
    18: ("<f8", 4),
    26: ("<u1", 1),
}
#: Bits of a code by number of quantised grid type; 0 if each leaf has its own number. Nodes and tiles are float32.
_QUANTISED = {13: 4, 14: 8, 15: 16, 16: 0}
#: The description of a grid in a segment.
_META = np.dtype(
    {
        "names": ["grid_size", "file_size", "name_size"],
        "formats": ["<u8", "<u8", "<u4"],
        "offsets": [0, 8, 136],
        "itemsize": 176,
    }
)


@dataclass(frozen=True)
class _NodeLayout:
    """Sizes and offsets of the fields of a grid's nodes, in bytes from the beginning of a node."""

    dtype: np.dtype
    channels: int
    bits: int | None  # of a quantised code; 0: each leaf has its own number; None: values are not quantised
    alignment: int
    statistic_nbytes: int  # bytes of an average or a deviation

    @property
    def value_nbytes(self) -> int:
        """Bytes of a value, all channels."""
        return self.dtype.itemsize * self.channels

    def behind_statistics(self, start: int) -> int:
        """Return the offset of a table that follows the smallest, largest and average value and the deviation."""
        end = (
            _aligned(_aligned(start, self.alignment) + 2 * self.value_nbytes, self.statistic_nbytes)
            + 2 * self.statistic_nbytes
        )
        return _aligned(end, 32)

    @property
    def background_offset(self) -> int:
        """Offset of the background in the root."""
        return _aligned(28, self.alignment)

    @property
    def root_nbytes(self) -> int:
        """Bytes of the root, after which the table of root tiles begins."""
        return self.behind_statistics(self.background_offset + self.value_nbytes)

    @property
    def entry_nbytes(self) -> int:
        """Bytes of an entry of such a table, a value or a link to a child."""
        return _aligned(max(8, self.value_nbytes), 8)


def _aligned(offset: int, alignment: int) -> int:
    """Round an offset up to a multiple of `alignment`."""
    return -(-offset // alignment) * alignment


def read_nanovdb(path: str | os.PathLike[str], name: str | None = None) -> VoxelTree:
    """Read the grid with this name, by default the first; errors as for :func:`.openvdb.read_openvdb`."""
    with opened(path) as cursor:
        content = _find_raw(cursor, name) if _is_raw(cursor) else _find_in_segments(cursor, name)
        name = cursor.name
    if len(content) < _GRID_NBYTES + _TREE_NBYTES:
        raise cursor.error(f"holds a grid of {len(content)} bytes, fewer than the {_GRID_NBYTES} of its header")
    try:
        return _GridMemory(content).tree()
    except UnsupportedLayoutError as error:
        raise UnsupportedLayoutError(f"{name}: {error}") from None
    except (ValueError, IndexError) as error:
        raise cursor.error(str(error)) from error


def _is_raw(cursor: Cursor) -> bool:
    """Return whether a file begins with a grid instead of a segment.

    Both may begin with the same magic number; the next number, the version of a segment, tells them apart.
    """
    magic = cursor.number("<u8", "the magic number")
    version = cursor.number("<u4", "the version of the file")
    cursor.seek(0, "the file")
    if magic not in (*_MAGIC_FILES, *_MAGIC_GRIDS):
        raise cursor.error(f"is no NanoVDB file: it begins with {magic:#x}")
    return magic == _MAGIC_GRIDS[1] or (magic == _MAGIC_GRIDS[0] and version >> 21 != _MAJOR)


def _find_raw(cursor: Cursor, name: str | None) -> bytes:
    """Return the memory of a grid from a file that is the memory of grids."""
    names = []
    while cursor.left:
        start = cursor.position
        head = cursor.take(_GRID_NBYTES, "the header of a grid")
        magic = int.from_bytes(head[:8], "little")
        size = int.from_bytes(head[32:40], "little")
        if magic not in _MAGIC_GRIDS or size < _GRID_NBYTES:
            raise cursor.error(f"no grid begins at byte {start}, though one should")
        names.append(head[40:296].split(b"\0")[0].decode("utf-8", "replace"))
        content = head + cursor.take(size - _GRID_NBYTES, f"the grid {names[-1]!r}")
        if name is None or name == names[-1]:
            return content
    raise no_such_error("grid", name, names, cursor.name)


def _find_in_segments(cursor: Cursor, name: str | None) -> bytes:
    """Return the memory of a grid from a file of segments."""
    names: list[str] = []
    while cursor.left:
        magic, version = cursor.number("<u8", "a magic number"), cursor.number("<u4", "the version of a segment")
        grids, codec = cursor.array("<u2", 2, "the header of a segment").tolist()
        if magic not in _MAGIC_FILES:
            raise cursor.error(f"no segment begins at byte {cursor.position - 16}, though one should")
        if version >> 21 != _MAJOR:
            raise UnsupportedLayoutError(f"{cursor.name}: NanoVDB version {version >> 21} is not read, only {_MAJOR}")
        if codec > _BLOSC:
            raise UnsupportedLayoutError(f"{cursor.name}: codec {codec} is not read, only 0 (none), 1 (zip), 2 (Blosc)")
        metas = []
        for _ in range(grids):
            metas.append(cursor.array(_META, 1, "the description of a grid")[0])
            text = cursor.take(int(metas[-1]["name_size"]), "the name of a grid")
            names.append(text.split(b"\0")[0].decode("utf-8", "replace"))
        for meta, grid in zip(metas, names[len(names) - grids :], strict=True):
            if name is None or name == grid:
                return _read_content(cursor, int(meta["grid_size"]), codec)
            for _ in _stored_parts(cursor, int(meta["grid_size"]), codec):
                pass  # writers differ in what they count as the size of a grid in the file
    raise no_such_error("grid", name, names, cursor.name)


def _read_content(cursor: Cursor, size: int, codec: int) -> bytes:
    parts = []
    for stored, nbytes in _stored_parts(cursor, size, codec):
        try:
            if codec == _NONE:
                parts.append(stored)
            else:
                parts.append(unzip(stored, nbytes) if codec == _ZIP else unpack_blosc(stored, nbytes))
        except ValueError as error:
            raise cursor.error(f"a compressed grid: {error}") from error
    return b"".join(parts)


def _stored_parts(cursor: Cursor, size: int, codec: int) -> Iterator[tuple[bytes, int]]:
    """Yield the parts of a grid of `size` bytes as they are stored, and the bytes of each when it is decoded."""
    if codec == _NONE:
        yield cursor.take(size, "a grid"), size
        return
    for start in range(0, size, _BLOSC_PART if codec == _BLOSC else size or 1):
        stored = cursor.take(cursor.count("<u8", 1, "bytes of a compressed grid"), "a compressed grid")
        yield stored, min(_BLOSC_PART, size - start) if codec == _BLOSC else size


class _GridMemory:
    """The memory of a grid, and where the fields of nodes are."""

    def __init__(self, content: bytes) -> None:
        self.content = np.frombuffer(content, np.uint8)
        head = content[:_GRID_NBYTES]
        version, kind = int.from_bytes(head[16:20], "little"), int.from_bytes(head[636:640], "little")
        if int.from_bytes(head[:8], "little") not in _MAGIC_GRIDS:
            raise ValueError("its content does not begin with the magic number of a NanoVDB grid")
        if version >> 21 != _MAJOR:
            raise UnsupportedLayoutError(f"a grid of NanoVDB version {version >> 21} is not read, only {_MAJOR}")
        self.layout = _layout_of(kind)

    def at(self, offsets: np.ndarray | int, nbytes: int) -> np.ndarray:
        """Return `nbytes` bytes from each offset on: (n, nbytes) uint8; ValueError if they lie outside the grid."""
        offsets = np.atleast_1d(np.asarray(offsets, np.int64))
        if len(offsets) and (offsets.min() < 0 or offsets.max() > len(self.content) - nbytes):
            raise ValueError("a node lies outside of the grid; the file is truncated or damaged")
        if len(offsets) * nbytes > 2 * len(self.content) + 2**20:
            raise ValueError("its nodes are more than the grid has bytes; the file is damaged")
        rows = np.empty((len(offsets), nbytes), np.uint8)
        for row, offset in zip(rows, offsets.tolist(), strict=True):
            row[:] = self.content[offset : offset + nbytes]
        return rows

    def tree(self) -> VoxelTree:
        """Read the tree from the root to the leaves."""
        layout = self.layout
        tree = self.at(_GRID_NBYTES, _TREE_NBYTES).view("<u8")[0]
        # Limited, so that sums with it fit into int64; the limit lies outside of any file, which is an error below.
        root = _GRID_NBYTES + min(int(tree[3]), 2**62)
        head = self.at(root, layout.root_nbytes)
        entries = int(head[:, 24:28].view("<u4")[0, 0])
        # Offset of the value in a record of the root's table, and size of the record.
        offset = _aligned(20, layout.alignment)
        size = _aligned(offset + layout.value_nbytes, 32)
        if entries * size > len(self.content):
            raise ValueError(f"its root has {entries} entries, more than the grid has bytes")
        records = self.at(root + layout.root_nbytes + size * np.arange(entries), size)
        origins = _origins(records[:, :8].copy().view("<u8")[:, 0])
        child = records[:, 8:16].copy().view("<i8")[:, 0]
        is_tile = child == 0
        values = self.values(records[is_tile, offset : offset + layout.value_nbytes])
        active = records[is_tile, 16:20].copy().view("<u4")[:, 0] != 0
        background = self.values(head[:, layout.background_offset : layout.background_offset + layout.value_nbytes])[0]
        uppers = self.internal(root + child[~is_tile], 32)
        upper, position = np.nonzero(uppers.child)
        nodes = self.internal(uppers.offsets[upper, position], 16)
        node_origins = origins[~is_tile][upper] + offsets_of(position, 32, 128)
        node, number = np.nonzero(nodes.child)
        leaves = np.full(nodes.child.shape, -1, np.int32)
        leaves[node, number] = np.arange(len(node))
        leaf_values, leaf_active = self.leaves(nodes.offsets[node, number])
        levels = Levels(
            *(origins[is_tile], values, active),
            *(origins[~is_tile], uppers.values, uppers.active, uppers.child),
            *(node_origins, nodes.values, nodes.active, leaves),
            *(leaf_values, leaf_active),
        )
        return flatten(levels, background)

    def values(self, raw: np.ndarray) -> np.ndarray:
        """Convert stored values to float32: (n, bytes) → (n, channels)."""
        return (
            np.ascontiguousarray(raw).view(self.layout.dtype).reshape(len(raw), self.layout.channels).astype(np.float32)
        )

    def internal(self, offsets: np.ndarray, children: int) -> _Internal:
        """Read upper nodes (32 `children` along each axis) or nodes (16)."""
        layout, count = self.layout, children**3
        masks = count // 8
        table = layout.behind_statistics(32 + 2 * masks)
        raw = self.at(offsets, table + count * layout.entry_nbytes)
        active, child = mask_of(raw[:, 32 : 32 + masks]), mask_of(raw[:, 32 + masks : 32 + 2 * masks])
        entries = np.ascontiguousarray(raw[:, table:]).reshape(len(raw) * count, layout.entry_nbytes)
        values = self.values(entries[:, : layout.value_nbytes]).reshape(len(raw), count, layout.channels)
        links = np.ascontiguousarray(entries[:, :8]).view("<i8").reshape(len(raw), count)
        values[child] = 0  # these entries are links, not values
        return _Internal(active, child, values, offsets[:, None] + np.where(child, links, 0))

    def leaves(self, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read leaves: values, (n, 512, channels), and which voxels are active, (n, 512)."""
        layout = self.layout
        if layout.bits is None:
            table = layout.behind_statistics(80)
            raw = self.at(offsets, table + 512 * layout.value_nbytes)
            values = self.values(raw[:, table:].reshape(-1, layout.value_nbytes)).reshape(
                len(raw), 512, layout.channels
            )
            return values, mask_of(np.ascontiguousarray(raw[:, 16:80]))
        head = self.at(offsets, 96)
        lowest, quantum = np.ascontiguousarray(head[:, 80:88]).view("<f4").T
        bits = np.full(len(head), layout.bits) if layout.bits else 1 << (head[:, 15] >> 5).astype(int)
        values = np.empty((len(head), 512, 1), np.float32)
        if (bits > 16).any():
            raise ValueError(f"a leaf has codes of {bits.max()} bits; the file is damaged")
        for width in np.unique(bits).tolist():
            rows = bits == width
            codes = _codes(self.at(offsets[rows] + 96, 64 * width), width)
            values[rows, :, 0] = codes * quantum[rows, None] + lowest[rows, None]
        return values, mask_of(np.ascontiguousarray(head[:, 16:80]))


@dataclass(frozen=True)
class _Internal:
    """Upper nodes or nodes: masks of active tiles and of children, (n, children); values, (n, children, channels)."""

    active: np.ndarray
    child: np.ndarray
    values: np.ndarray
    offsets: np.ndarray  # of children, in the memory of the grid; (n, children)


def _codes(packed: np.ndarray, width: int) -> np.ndarray:
    """Unpack codes of `width` bits, the first in the lowest bits: (n, 64 * width) uint8 → (n, 512) float32."""
    if width >= 8:
        return packed.view(f"<u{width // 8}").astype(np.float32)
    parts = [(packed >> shift) & ((1 << width) - 1) for shift in range(0, 8, width)]
    return np.stack(parts, -1).reshape(len(packed), 512).astype(np.float32)


def _origins(keys: np.ndarray) -> np.ndarray:
    """Return the first voxels of the root's children from their keys: 21 bits for each coordinate / 4096, x highest."""
    parts = np.stack([keys >> 42, keys >> 21, keys], -1).astype(np.int64) & (2**21 - 1)
    top = 2**19  # the sign bit: an int32 without the 12 lowest bits has 20 bits
    return ((parts & (2 * top - 1)) ^ top) * UPPER - top * UPPER


def _layout_of(kind: int) -> _NodeLayout:
    if kind in _QUANTISED:
        return _NodeLayout(np.dtype("<f4"), 1, _QUANTISED[kind], 4, 4)
    if kind not in _TYPES:
        raise UnsupportedLayoutError(f"a grid of type {kind} is not read, only {sorted([*_TYPES, *_QUANTISED])}")
    dtype, channels = np.dtype(_TYPES[kind][0]), _TYPES[kind][1]
    return _NodeLayout(dtype, channels, None, dtype.itemsize, 8 if dtype.itemsize == 8 else 4)
