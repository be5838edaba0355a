"""If this fails, the sampling kernels read or write beyond their arrays.

A kernel that reads or writes there ends the process, so cases run in one of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from linumpy.gpu.ndimage import cells, general, nearest, sampling
from linumpy.gpu.ndimage.sampling import AffineMap, SplineSampling
from tests.support.budget import examples
from tests.support.gpu.emulator import emulated, needs_compiler
from tests.support.gpu.guarded import guarded

#: Dtype, order and mode; every pair of them is compiled.
HOW = [
    *[("u1", 0, "constant"), ("u2", 1, "nearest"), ("f4", 1, "grid-constant"), ("f4", 2, "mirror"), ("f4", 3, "wrap")],
    *[("f8", 3, "reflect"), ("f8", 5, "grid-wrap")],
]
_ROOT = Path(__file__).parents[3]


def draw(rng):
    """Draw an image, between guards, and how it is sampled."""
    rank = int(rng.integers(2, 4))
    shape = tuple(int(n) for n in rng.integers(1, 14, rank))
    dtype, order, mode = HOW[rng.integers(len(HOW))]
    return guarded(rng.uniform(0, 200, shape).astype(dtype), rng.random() < 0.5), SplineSampling(order, mode, 3.0)


def points(rng):
    image, how = draw(rng)
    grid = (
        tuple(int(n) for n in rng.integers(1, 40, image.ndim)) if rng.random() < 0.5 else (int(rng.integers(1, 3000)),)
    )
    sizes = np.array(image.shape).reshape(-1, *[1] * len(grid))
    places = rng.uniform(-3, sizes + 3, (image.ndim, *grid)).astype(rng.choice(["f4", "f8"]))
    places.reshape(-1)[:: max(1, places.size // 5)] = rng.choice([np.nan, np.inf, -1e300, 2.0**30, 0.0])
    cells._CACHED_NBYTES = int(rng.choice([0, 2**30]))  # with a copy in cells, or without
    out = guarded(np.zeros(grid, image.dtype), rng.random() < 0.5)
    sampling.sample_points(image, guarded(places, rng.random() < 0.5), how, out)


def affine(rng):
    image, how = draw(rng)
    rank = image.ndim
    matrix = np.eye(rank) * rng.uniform(0.3, 3, rank) + rng.normal(0, 0.4, (rank, rank)) * rng.integers(0, 2)
    shape = tuple(int(n) for n in rng.integers(1, 40, rank))
    out = guarded(np.zeros(shape, image.dtype), rng.random() < 0.5)
    offset = tuple(rng.uniform(-5, 5, rank).tolist())
    sampling.sample_affine(image, AffineMap(tuple(map(tuple, matrix.tolist())), offset), how, out)


def stacks(rng):
    """The kernels of `affine`, on images that lie one after another."""
    image, how = draw(rng)
    if image.ndim < 3:
        return
    shape = tuple(int(n) for n in rng.integers(1, 40, 2))
    matrix = np.eye(2) * rng.uniform(0.3, 3, 2) + rng.normal(0, 0.4, (2, 2))
    out = guarded(np.zeros((len(image), *shape), image.dtype), rng.random() < 0.5)
    affine = AffineMap(tuple(map(tuple, matrix.tolist())), tuple(rng.uniform(-5, 5, 2).tolist()))
    sampling.sample_affine(image, affine, how, out)
    sampling._ENOUGH_BLOCKS = int(rng.choice([1, 4]))  # so that a block samples several images
    field = guarded(rng.normal(0, 30, (2, *shape)), rng.random() < 0.5)
    sampling.sample_displaced(image, field, None, how, out)


def others(rng):
    """Kernels for any number of axes, and for voxels that are taken as they are."""
    image, how = draw(rng)
    out = guarded(np.zeros(tuple(int(n) for n in rng.integers(1, 20, 2)), image.dtype), rng.random() < 0.5)
    matrix, offset = rng.normal(0, 2, (image.ndim, 2)).tolist(), rng.uniform(-5, 5, image.ndim).tolist()
    affine = AffineMap(tuple(map(tuple, matrix)), tuple(offset))
    general.sample_affine(image, affine, how, out)
    lines = [nearest.Line(n, int(rng.integers(1, 70)), *rng.normal(0, 2, 3).tolist()) for n in image.shape]
    out = guarded(np.zeros([line.length for line in lines], image.dtype), rng.random() < 0.5)
    nearest.take(image, lines, how.mode, 3, out)


def run(kind, seed, count):
    cells.load = sampling.load = general.load = nearest.load = emulated
    np.seterr(all="ignore")
    for number in range(count):
        rng = np.random.default_rng((seed, number))
        print(number, flush=True)  # the last one is at fault
        {"points": points, "affine": affine, "stacks": stacks, "others": others}[kind](rng)


def _environment():
    folders = [_ROOT, os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}


@needs_compiler
@pytest.mark.parametrize(("kind", "count"), [("points", 20), ("affine", 20), ("stacks", 8), ("others", 12)])
def test_nothing_beyond_the_arrays_is_touched(kind, count):
    command = [sys.executable, str(Path(__file__)), kind, "0", str(examples(count))]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout[-20:], done.stderr[-2000:])


@pytest.mark.parametrize("at_end", [True, False])
def test_the_guards_hold(at_end):
    """A byte too far ends the process."""
    code = "import ctypes, numpy as np; from tests.support.gpu.guarded import guarded;"
    code += f"a = guarded(np.ones(5, 'u2'), {at_end});"
    code += f"ctypes.c_char.from_address(a.ctypes.data + {10 if at_end else -1}).value"
    done = subprocess.run([sys.executable, "-c", code], env=_environment(), capture_output=True)
    assert done.returncode < 0


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
