"""Sample sparse grids of OpenVDB and NanoVDB files.

In: a path. Out: a field over the box of the grid's active voxels: x, y, z of the unit cube are the grid's indices
i, j, k between the outer faces of the first and the last active voxel. Voxel centres lie at (i + 0.5) / N; points
beyond the outermost centres have the values at these centres. An inactive voxel has the value that the file has for the
voxel or its tile, or else the background.
"""

from __future__ import annotations

import os

import numpy as np

from linumpy.errors import SourceError
from linumpy.gpu.kernels import KernelSpec
from linumpy.sampling.fields import device_tables
from linumpy.sampling.files.nanovdb import read_nanovdb
from linumpy.sampling.files.openvdb import read_openvdb
from linumpy.sampling.files.tree import LEAF, NODE, NODE_CHILDREN, VoxelTree
from linumpy.sampling.voxel_field import finite_range

#: Largest number of nodes that the table of a box has; only grids whose parts are far from each other need more.
_MAX_NODES = 2**26
_READERS = {".vdb": read_openvdb, ".nvdb": read_nanovdb}


def open_vdb(filename: str | os.PathLike[str], field: str | None = None) -> SparseGrid:
    """Open a grid, by default the first one, of a ``.vdb`` or ``.nvdb`` file, as its suffix says."""
    suffix = os.path.splitext(filename)[1].lower()
    if suffix not in _READERS:
        raise SourceError(f"{os.fspath(filename)}: filename must end in one of {', '.join(_READERS)}")
    tree = _READERS[suffix](filename, field)
    try:
        return SparseGrid(tree)
    except ValueError as error:
        raise SourceError(f"{os.fspath(filename)}: {error}") from error


class SparseGrid(device_tables.TableField):
    """A tree of voxels as a field.

    `shape` has the voxels of the box along x, y, z. The range of values includes leaves, tiles and the background
    outside of the box.
    """

    _spec = KernelSpec("vdb", "vdb", (), "linumpy.sampling.fields.cuda")

    def __init__(self, tree: VoxelTree) -> None:
        self.n_channels = len(tree.background)
        self.shape = tuple((tree.high - tree.low + 1).tolist())
        first = tree.low // NODE
        nodes = tree.high // NODE - first + 1
        if np.prod(nodes.astype(float)) > _MAX_NODES:
            raise ValueError(f"the box of its active voxels has {self.shape} voxels, too many to be sampled as one box")
        self.value_range = finite_range(tree.leaves, tree.tiles)
        top = np.full(nodes, -1, np.int32)
        for origin, size, tile in zip(tree.blocks, tree.block_sizes, tree.block_tiles, strict=True):
            start = origin // NODE - first
            stop = np.minimum(start + size // NODE, nodes)
            if (stop > 0).all():
                top[tuple(map(slice, np.maximum(start, 0), stop))] = -1 - tile
        inside = tree.origins // NODE - first
        in_box = ((inside >= 0) & (inside < nodes)).all(1)
        top[tuple(inside[in_box].T)] = np.flatnonzero(in_box)
        self._frame = device_tables.record(
            [
                ("size", "<i4", self.shape),
                ("shift", "<i4", tree.low - first * NODE),
                ("nodes", "<i4", nodes),
                ("channels", "<i4", self.n_channels),
                ("stride", "<i8", tree.leaves[0].size),
            ]
        )
        self._tables = device_tables.DeviceTables(
            self._frame.view(np.uint8), top, tree.children, tree.leaves, tree.tiles
        )

    def _decode_host(self, coords: np.ndarray, out: np.ndarray) -> None:
        _, _, children, leaves, tiles = self._tables.host
        size, shift = self._frame["size"][0], self._frame["shift"][0]
        position = np.clip(coords * size.astype(np.float32) - np.float32(0.5), 0, (size - 1).astype(np.float32))
        low = position.astype(np.int64)
        weight = position - low
        ends = np.stack([low, np.minimum(low + 1, size - 1)]) + shift
        out[:] = 0
        for corner in np.ndindex(2, 2, 2):
            voxel = np.stack([ends[side, :, axis] for axis, side in enumerate(corner)], -1)
            share = np.prod([weight[:, a] if side else 1 - weight[:, a] for a, side in enumerate(corner)], 0)
            leaf = self._find(voxel, children)
            inside = voxel % LEAF @ np.array([LEAF**2, LEAF, 1])
            values = tiles[np.where(leaf < 0, -1 - leaf, 0)].T
            is_leaf = leaf >= 0
            values[:, is_leaf] = leaves[:, leaf[is_leaf], inside[is_leaf]]
            out += np.where(share == 0, np.float32(0), share * values)

    def _find(self, voxel: np.ndarray, children: np.ndarray) -> np.ndarray:
        """Return the leaf of each voxel, or -1 - its tile."""
        node = self._tables.host[1][tuple((voxel // NODE).T)]
        child = voxel // LEAF % NODE_CHILDREN @ np.array([NODE_CHILDREN**2, NODE_CHILDREN, 1])
        return np.where(node < 0, node, children[np.maximum(node, 0), child] if len(children) else node)
