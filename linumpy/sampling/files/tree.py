"""The sparse tree of voxels that OpenVDB and NanoVDB files hold, flattened into arrays.

In: :class:`Levels`, which ``openvdb.py`` and ``nanovdb.py`` read from files. Out: a :class:`VoxelTree`, which
``fields/vdb.py`` samples. Errors: ``ValueError`` for a tree that cannot be sampled. Pure.

A leaf has 8³ voxels, a node 16³ leaves (128³ voxels), an upper node 32³ nodes (4096³ voxels); the root lists upper
nodes. A tile, a single value for all voxels, may replace a leaf, a node or an upper node. z is the fastest axis.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Voxels of a leaf, a node and an upper node along each axis.
LEAF, NODE, UPPER = 8, 128, 4096
#: Children of a node and of an upper node along each axis.
NODE_CHILDREN, UPPER_CHILDREN = 16, 32


@dataclass(frozen=True)
class VoxelTree:
    """A tree in the form that kernels sample: a list of nodes, without upper nodes."""

    background: np.ndarray  # value of voxels that no leaf and no tile contains: (channels,) float32
    origins: np.ndarray  # first voxel (x, y, z) of each node; unique multiples of 128: (nodes, 3) int64
    #: For each child of a node the index of a leaf, or ``-1 - tile``, where `tile` is an index into `tiles`: (nodes,
    #: 4096) int32.
    children: np.ndarray
    leaves: np.ndarray  # values of the voxels of each leaf: (channels, leaves, 512) float32
    tiles: np.ndarray  # the background, then the distinct values of tiles: (tiles, channels) float32
    #: First voxel of each tile of 128³ or 4096³ voxels that has another value than the background or lies in the root:
    #: (blocks, 3) int64.
    blocks: np.ndarray
    #: Voxels of each of these tiles along an axis (128 or 4096), and the index of the tile's value in `tiles`:
    #: (blocks,) int64.
    block_sizes: np.ndarray
    block_tiles: np.ndarray
    #: First and last voxel of the bounding box of all active voxels, including those of active tiles: (3,) int64.
    low: np.ndarray
    high: np.ndarray


def offsets_of(indices: np.ndarray, children: int, size: int) -> np.ndarray:
    """Return the first voxel of children relative to the parent, from indices in the parent: (n,) → (n, 3) int64."""
    index = np.asarray(indices, np.int64)
    return np.stack([index // children**2, index // children % children, index % children], -1) * size


def mask_of(words: np.ndarray) -> np.ndarray:
    """Unpack bit masks, lowest bit first: (..., bytes) uint8 → (..., bits) bool."""
    return np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").view(bool)


@dataclass(frozen=True)
class Levels:
    """A tree as it is stored, level by level: t tiles, u upper nodes, n nodes, l leaves, c channels."""

    #: Tiles of the root, of 4096³ voxels: (t, 3) int64, (t, c), (t,) bool.
    tile_origins: np.ndarray
    tile_values: np.ndarray
    tile_active: np.ndarray
    #: Upper nodes: values of tiles, whether tiles are active, and which children are nodes instead of tiles: (u, 3)
    #: int64, (u, 32768, c), two (u, 32768) bool.
    upper_origins: np.ndarray
    upper_values: np.ndarray
    upper_active: np.ndarray
    upper_child: np.ndarray
    #: Nodes: values of tiles, and whether tiles are active: (n, 3) int64, (n, 4096, c), (n, 4096) bool.
    node_origins: np.ndarray
    node_values: np.ndarray
    node_active: np.ndarray
    node_leaves: np.ndarray  # index of the leaf of each child of a node, or -1 for a tile: (n, 4096) int32
    #: Leaves: values of voxels, and whether voxels are active: (l, 512, c), (l, 512) bool.
    leaf_values: np.ndarray
    leaf_active: np.ndarray


def flatten(levels: Levels, background: np.ndarray) -> VoxelTree:
    """Convert a tree to the form that kernels sample."""
    background = np.asarray(background, np.float32).reshape(-1)
    is_leaf = levels.node_leaves >= 0
    upper_tile = ~levels.upper_child & _differs(levels.upper_values, background)
    upper, position = np.nonzero(upper_tile)
    node, child = np.nonzero(~is_leaf & _differs(levels.node_values, background))
    values = levels.node_values[node, child], levels.upper_values[upper, position], levels.tile_values
    tiles, numbers = np.unique(np.concatenate(values), axis=0, return_inverse=True)
    numbers = numbers.reshape(-1) + 1  # tile 0 is the background
    children = np.where(is_leaf, levels.node_leaves, np.int32(-1))
    children[node, child] = -1 - numbers[: len(node)]
    low, high = _active_box(levels, is_leaf)
    if len(np.unique(levels.node_origins, axis=0)) != len(levels.node_origins):
        raise ValueError("two nodes of the tree lie at the same voxels")
    origins = levels.upper_origins[upper] + offsets_of(position, UPPER_CHILDREN, NODE)
    return VoxelTree(
        background,
        levels.node_origins,
        children.astype(np.int32),
        np.ascontiguousarray(np.moveaxis(levels.leaf_values.astype(np.float32), 2, 0)),
        np.concatenate([background[None], tiles]).astype(np.float32),
        np.concatenate([levels.tile_origins, origins]),
        np.repeat([UPPER, NODE], [len(levels.tile_origins), len(origins)]),
        np.concatenate([numbers[len(node) + len(upper) :], numbers[len(node) : len(node) + len(upper)]]),
        low,
        high,
    )


def _differs(values: np.ndarray, background: np.ndarray) -> np.ndarray:
    same = (values == background) | (np.isnan(values) & np.isnan(background))
    return ~same.all(-1)


def _active_box(levels: Levels, is_leaf: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last voxel of the bounding box of all active voxels and tiles."""
    upper, position = np.nonzero(levels.upper_active & ~levels.upper_child)
    node, child = np.nonzero(levels.node_active & ~is_leaf)
    blocks = [
        (levels.tile_origins[levels.tile_active], UPPER),
        (levels.upper_origins[upper] + offsets_of(position, UPPER_CHILDREN, NODE), NODE),
        (levels.node_origins[node] + offsets_of(child, NODE_CHILDREN, LEAF), LEAF),
    ]
    node, child = np.nonzero(is_leaf)
    cubes = levels.leaf_active[levels.node_leaves[node, child]].reshape(-1, LEAF, LEAF, LEAF)
    # Whether a plane of a leaf across x, y or z has an active voxel: (leaves, planes, 3).
    planes = np.stack([cubes.any(axis=others) for others in ((2, 3), (1, 3), (1, 2))], axis=-1)
    occupied = planes.any(axis=(1, 2))
    origins = (levels.node_origins[node] + offsets_of(child, NODE_CHILDREN, LEAF))[occupied]
    first = origins + planes[occupied].argmax(axis=1)
    last = origins + LEAF - 1 - planes[occupied, ::-1].argmax(axis=1)
    low = np.concatenate([first, *(block for block, _ in blocks)])
    high = np.concatenate([last, *(block + size - 1 for block, size in blocks)])
    if not len(low):
        raise ValueError("the grid has no active voxel, so there is no box to be sampled")
    return low.min(axis=0), high.max(axis=0)
