"""Sample adaptive meshes of cells that are stored as bricks (ExaBrick's ``.bricks`` and ``.scalar``).

In: paths. Out: a field over the box of all bricks. Each cell has a hat function, its weight: 1 at the cell's centre,
falling linearly, two cells of the cell's level wide along each axis. The value at a point is the sum of weight times
value, divided by the sum of weights, over all cells of all bricks.
"""

from __future__ import annotations

import os

import numpy as np

from linumpy.errors import SourceError
from linumpy.gpu.kernels import KernelSpec
from linumpy.sampling.fields import box_lists, device_tables
from linumpy.sampling.files.bricks import Blocks, read_bricks, read_scalars
from linumpy.sampling.voxel_field import finite_range

#: Largest number of entries of the box lists per brick.
_PER_BRICK = 64
#: Largest number of finest cells along an axis of the domain: float32 represents their indices.
_MAX_CELLS = 2**24
_BRICK = np.dtype([("lower", "<f4", 3), ("cells", "<f4"), ("offset", "<i8"), ("size", "<u2", 3), ("unused", "<u2")])


def open_exabrick(
    bricks: str | os.PathLike[str], scalar: str | os.PathLike[str], background: float = np.nan
) -> BrickField:
    """Open bricks of cells.

    The file `bricks` has records of int32: size[3], lower[3], level, and the ids of all cells, x fastest; `scalar` has
    float32 values, indexed by id. `background` is the value where all hat functions are 0.
    """
    blocks = read_bricks(bricks, read_scalars(scalar))
    try:
        return BrickField(blocks, background)
    except ValueError as error:
        raise SourceError(f"{os.fspath(bricks)}: {error}") from error


class BrickField(device_tables.TableField):
    """Bricks of cells of several levels; the unit cube covers `domain`, (2, 3) float64 in cells of the finest level."""

    n_channels = 1
    _spec = KernelSpec("amr", "amr", (), "linumpy.sampling.fields.cuda")

    def __init__(self, blocks: Blocks, background: float = np.nan) -> None:
        width = 2.0**blocks.level
        high = blocks.lower + blocks.size * width[:, None]
        self.domain = np.stack([blocks.lower.min(0), high.max(0)]).astype(float)
        extent = self.domain[1] - self.domain[0]
        if extent.max() > _MAX_CELLS:
            raise ValueError(f"the bricks reach over {int(extent.max())} cells of the finest level, 2^24 at most")
        if blocks.size.max() >= 2**16:
            raise ValueError(f"a brick has {blocks.size.max()} cells along an axis, 65535 at most")
        self.value_range = finite_range(blocks.values)
        self._records = np.zeros(len(blocks.level), _BRICK)
        self._records["lower"] = blocks.lower - self.domain[0]
        self._records["cells"] = 1 / width
        self._records["offset"] = blocks.offset
        self._records["size"] = blocks.size
        low, margin = blocks.lower - self.domain[0], width[:, None] / 2
        self._lists = box_lists.build(low - margin, high - self.domain[0] + margin, extent, _PER_BRICK)
        self._frame = device_tables.record(
            [("extent", "<f4", extent), ("background", "<f4", background), *self._lists.fields]
        )
        self._tables = device_tables.DeviceTables(
            self._frame.view(np.uint8),
            self._lists.table,
            self._lists.items,
            self._records.view(np.uint8),
            blocks.values,
        )

    def _decode_host(self, coords: np.ndarray, out: np.ndarray) -> None:
        points = coords * self._frame["extent"][0]
        starts, counts = self._lists.find(points)
        sums = np.zeros((2, len(points)), np.float32)
        for k in range(counts.max(initial=0)):
            rows = np.flatnonzero(counts > k)
            self._add(points[rows], self._lists.items[starts[rows] + k], rows, sums)
        background = self._frame["background"][0]
        out[0] = np.where(sums[1] > 0, sums[0] / np.where(sums[1] > 0, sums[1], 1), background)

    def _add(self, points: np.ndarray, numbers: np.ndarray, targets: np.ndarray, sums: np.ndarray) -> None:
        """Add a brick for each point to the point's sums of weight times value and of weights.

        `numbers`: brick of each point; `targets`: column of each point in `sums`, (2, all points).
        """
        brick = self._records[numbers]
        size = brick["size"].astype(np.int64)
        position = (points - brick["lower"]) * brick["cells"][:, None] - np.float32(0.5)
        inside = ((position > -1) & (position < size)).all(1)
        brick, size, position, targets = brick[inside], size[inside], position[inside], targets[inside]
        low = np.floor(position).astype(np.int64)
        weight = position - np.floor(position)
        values = self._tables.host[4]
        for corner in np.ndindex(2, 2, 2):
            cell = low + corner
            share = np.where(corner, weight, 1 - weight).prod(1)
            valid = ((cell >= 0) & (cell < size)).all(1) & (share != 0)
            offset = (cell[valid, 2] * size[valid, 1] + cell[valid, 1]) * size[valid, 0] + cell[valid, 0]
            sums[0, targets[valid]] += share[valid] * values[brick["offset"][valid] + offset]
            sums[1, targets[valid]] += share[valid]
