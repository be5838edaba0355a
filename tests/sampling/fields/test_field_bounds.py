"""If this fails, kernels of fields read or write beyond their arrays, or points outside are not those of the border.

Arrays end, or begin, where memory is forbidden; a kernel that reads or writes there ends the process, so it runs in one
of its own.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from linumpy.sampling.field import Field
from linumpy.sampling.fields.amr import BrickField
from linumpy.sampling.fields.umesh import StitchedField
from linumpy.sampling.fields.vdb import SparseGrid
from linumpy.sampling.files.bricks import Blocks
from linumpy.sampling.files.tree import Levels, flatten
from linumpy.sampling.files.umesh import Mesh
from tests.support.gpu.emulator import needs_compiler
from tests.support.gpu.field_runs import SIDES, by_kernel, decode
from tests.support.gpu.guarded import guarded


def sparse_grid(rng):
    channels = int(rng.integers(1, 4))
    node_leaves = np.full((2, 4096), -1, np.int32)
    places = rng.choice(4096, 10, replace=False)
    node_leaves[rng.integers(0, 2, 10), places] = np.arange(10)
    nothing = np.zeros((0, 3), np.int64)
    levels = Levels(
        *(nothing, np.zeros((0, channels)), np.zeros(0, bool), nothing, np.zeros((0, 32768, channels))),
        *(np.zeros((0, 32768), bool), np.zeros((0, 32768), bool), np.array([[-128, 0, 0], [0, 128, 0]])),
        *(rng.standard_normal((2, 4096, channels)), np.zeros((2, 4096), bool), node_leaves),
        *(rng.standard_normal((10, 512, channels)), rng.random((10, 512)) < 0.5),
    )
    return SparseGrid(flatten(levels, rng.standard_normal(channels)))


def bricks(rng):
    count = 5
    size = rng.integers(1, 5, (count, 3))
    offset = np.cumsum(size.prod(1)) - size.prod(1)
    values = rng.standard_normal(size.prod(1).sum()).astype(np.float32)
    return BrickField(Blocks(rng.integers(-9, 9, (count, 3)), rng.integers(0, 3, count), size, offset, values))


def stitched(rng):
    vertices = rng.random((12, 3)).astype(np.float32) * 5
    parts = [np.array([rng.permutation(12)[:k] for _ in range(3)], np.int32) for k in (4, 5, 6, 8)]
    values = rng.standard_normal(12).astype(np.float32)
    size = np.array([[2, 3, 2]])
    grid = Blocks(np.array([[1, 0, 2]]), np.array([1]), size, np.zeros(1, int), np.arange(12, dtype=np.float32))
    return StitchedField(Mesh(vertices, values, np.zeros(0, np.uint64), *parts), values, grid)


MAKERS = {"vdb": sparse_grid, "amr": bricks, "umesh": stitched}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", list(MAKERS))
def test_outside_is_the_border_and_what_is_not_finite_has_no_value(name, side):
    field = MAKERS[name](np.random.default_rng(1))
    assert isinstance(field, Field)
    assert decode(field, np.zeros((0, 3)), side).shape == (field.n_channels, 0)
    coords = np.random.default_rng(2).uniform(-0.7, 1.7, (400, 3)).astype(np.float32)
    coords[:2] = [[3e38, 0.2, 0.1], [-1e30, 1, 1]]
    found = decode(field, coords, side)
    np.testing.assert_array_equal(found, decode(field, np.clip(coords, 0, 1), side))
    coords[np.arange(400), np.arange(400) % 3] = np.repeat([np.nan, np.inf, -np.inf, np.nan], 100)
    assert np.isnan(decode(field, coords, side)).all()


def run(name, seed):
    rng = np.random.default_rng(seed)
    field = MAKERS[name](rng)
    held = field._tables.host
    field._tables.host = tuple(guarded(one, rng.random() < 0.5) for one in held)
    coords = rng.uniform(-0.5, 1.5, (int(rng.integers(1, 600)), 3)).astype(np.float32)
    coords.reshape(-1)[:: max(1, coords.size // 5)] = rng.choice([np.nan, np.inf, -1e30, 2.0**30, 0.0, 1.0])
    out = guarded(np.zeros((field.n_channels, len(coords)), np.float32), rng.random() < 0.5)
    with by_kernel(field):
        field.decode(guarded(coords, rng.random() < 0.5), out)


@needs_compiler
@pytest.mark.parametrize("name", list(MAKERS))
def test_nothing_beyond_the_arrays(name):
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.sampling.fields import test_field_bounds
for seed in range(12):
    print(seed, flush=True)
    test_field_bounds.run({name!r}, seed)
print("done")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.endswith("done\n"), (result.stdout, result.stderr)
