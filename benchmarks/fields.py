"""Time values of fields that are not arrays at 2²⁶ random points, in made-up data as large as measured data.

"dense" samples a volume of 512³ at the same points by CuPy's map_coordinates: the cost of random points without a
search for the cell of each point. 4096 values are compared with the host's first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.arrays import ndimage_of, scaled, suite_of_arrays
from linumpy.arrays import Array
from linumpy.benchmark.timing import Bench
from linumpy.device import to_host
from linumpy.sampling.field import Field
from linumpy.sampling.fields.amr import BrickField
from linumpy.sampling.fields.umesh import StitchedField
from linumpy.sampling.fields.vdb import SparseGrid
from linumpy.sampling.files.bricks import Blocks
from linumpy.sampling.files.tree import NODE_CHILDREN, Levels, flatten, offsets_of
from linumpy.sampling.files.umesh import Mesh

#: Points of a case.
_POINTS = 2**26
#: Number of points whose values are compared with the host's.
_CHECKED = 4096
#: Side of a brick in cells, and side of the dense volume in voxels.
_BRICK, _DENSE = 16, 512


def _bricks(scale: float, levels: int) -> BrickField:
    """Make about 100,000 bricks of 16³ cells; with several levels, coarser bricks follow finer bricks along x."""
    rng = np.random.default_rng(0)
    side = max(2, round(47 * scale))
    number = np.arange(side**3)
    index = np.stack([number // side**2, number // side % side, number % side], 1)
    level = index[:, 0] * levels // side
    # A brick of level 1 covers eight bricks of level 0: along each axis only every other index has a brick.
    kept = (index % (1 << level)[:, None] == 0).all(1) & (index[:, 0] + (1 << level) <= side)
    index, level = index[kept], level[kept]
    count = len(index)
    values = np.tile(rng.random(4096 * _BRICK**3, np.float32), -(-count // 4096))[: count * _BRICK**3]
    size = np.full((count, 3), _BRICK)
    return BrickField(Blocks(index * _BRICK, level, size, np.arange(count) * _BRICK**3, values))


def _sparse(scale: float) -> SparseGrid:
    """Make a sparse grid of 1024³ voxels; about one leaf in eight exists, in blobs."""
    rng = np.random.default_rng(1)
    nodes = max(1, round(8 * scale))
    origins = np.stack(np.meshgrid(*[np.arange(nodes)] * 3, indexing="ij"), -1).reshape(-1, 3) * 128
    leaf = (origins[:, None] + offsets_of(np.arange(4096), NODE_CHILDREN, 8)[None]) / (128 * nodes)
    exists = np.sin(leaf * 40).prod(-1) > 0.25
    exists[0, 0] = exists[-1, -1] = True
    count = int(exists.sum())
    leaves = np.where(exists, exists.cumsum().reshape(exists.shape) - 1, -1).astype(np.int32)
    empty = np.zeros((0, 3), np.int64)
    levels = Levels(
        *(empty, np.zeros((0, 1)), np.zeros(0, bool)),
        *(empty, np.zeros((0, 32768, 1)), np.zeros((0, 32768), bool), np.zeros((0, 32768), bool)),
        *(origins, np.zeros((len(origins), 4096, 1), np.float32), np.zeros((len(origins), 4096), bool), leaves),
        *(rng.random((count, 512, 1), np.float32), np.ones((count, 512), bool)),
    )
    return SparseGrid(flatten(levels, np.zeros(1)))


def _mesh(scale: float) -> StitchedField:
    """Make a mesh of 40³ cells of six tetrahedra each, whose inner vertices are moved at random."""
    rng = np.random.default_rng(2)
    side = max(2, round(40 * scale))
    points = np.stack(np.meshgrid(*[np.arange(side + 1.0)] * 3, indexing="ij"), -1).reshape(-1, 3)
    inner = ((points > 0) & (points < side)).all(1)
    points[inner] += rng.uniform(-0.15, 0.15, (int(inner.sum()), 3))
    cell = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 1, 3)
    corner = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1], [0, 1, 1]])
    number = (cell + corner) @ np.array([(side + 1) ** 2, side + 1, 1])
    parts = [[0, 1, 2, 6], [0, 2, 3, 6], [0, 3, 7, 6], [0, 7, 4, 6], [0, 4, 5, 6], [0, 5, 1, 6]]
    tets = np.concatenate([number[:, part] for part in parts]).astype(np.int32)
    none = [np.zeros((0, corners), np.int32) for corners in (5, 6, 8)]
    values = rng.random(len(points), np.float32)
    return StitchedField(Mesh(points.astype(np.float32), values, np.zeros(0, np.uint64), tets, *none), values, None)


def _case(bench: Bench, name: str, make: Callable[[float], Field], text: str) -> None:
    xp, field = bench.xp, make(bench.scale)
    count = max(2**14, round(_POINTS * bench.scale**3))
    coords = xp.asarray(np.random.default_rng(3).random((min(count, 2**22), 3), np.float32))
    coords = xp.tile(coords, (-(-count // len(coords)), 1))[:count]
    # Each copy of the points is moved by another fraction of the volume, so that no cache helps.
    coords += xp.arange(count, dtype=np.float32)[:, None] // 2**22 * np.float32(0.061803)
    coords %= 1
    out = xp.empty((1, count), np.float32)
    side = scaled(_DENSE, bench, 8)
    volume = xp.ones((side,) * 3, np.float32)
    voxels = (coords.T * np.float32(side) - np.float32(0.5)).copy()

    def ours() -> Array:
        field.decode(coords, out)
        return out

    def check(result: Array) -> str:
        expected = np.empty((1, _CHECKED), np.float32)
        field.decode(to_host(coords[:_CHECKED]), expected)
        # For points on the border of the data, rounding decides whether they are inside.
        differs = ~np.isclose(to_host(result[:, :_CHECKED]), expected, atol=1e-3, equal_nan=True)
        return f"{int(differs.sum())} of {_CHECKED} values differ" if differs.mean() > 0.001 else ""

    with bench.case(name, count / 1e9, unit="10⁹ values", description=text, by_events=True) as case:
        case.time("linumpy", ours, check)
        case.time("dense", lambda: ndimage_of(volume).map_coordinates(volume, voxels, order=1, mode="nearest"))


_CASES: dict[str, tuple[Callable[[float], Field], str]] = {
    "exabrick": (lambda scale: _bricks(scale, 1), "47³ bricks of 16³ cells"),
    "exabrick-levels": (lambda scale: _bricks(scale, 3), "bricks of 16³ cells, three levels"),
    "openvdb": (_sparse, "1024³ voxels, one leaf in eight"),
    "exastitch": (_mesh, "384,000 tetrahedra"),
}
SUITE = suite_of_arrays(
    __doc__,
    {name: partial(_case, name=name, make=make, text=text) for name, (make, text) in _CASES.items()},
    runs=10,
)
