"""If this fails, a resampling kernel is left out of `make sanitize`, or compute-sanitizer finds an error in it.

On the CPU the same calls run under the emulator, which shows that no kernel of these packages is left out.
"""

import importlib.resources
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage

from linumpy.device import to_host
from linumpy.gpu.interpolation import (
    affine_transform,
    apply_displacement_field,
    map_coordinates,
    resize,
    shift,
    spline_filter,
    zoom,
)
from linumpy.gpu.ndimage import cells
from tests.support.gpu import on_cpu
from tests.support.gpu.emulator import needs_compiler

RNG = np.random.default_rng(0)
# So many digits that no coordinate lies halfway between two voxels.
TURN = np.array([[0.980317, 0.118739, -0.051719], [-0.110578, 0.971137, 0.090416], [0.060983, -0.080714, 0.990172]])
#: Larger than a tile of every kernel.
SHAPE = (20, 21, 70)
IMAGE = RNG.uniform(0, 100, SHAPE).astype("f4")
LABELS = RNG.integers(0, 250, SHAPE).astype("u1")
POINTS = RNG.uniform(-3, 22, (3, 5000))
FIELD = RNG.uniform(-3, 3, (3, *SHAPE)).astype("f4")
GRID = np.stack(np.meshgrid(*map(np.arange, SHAPE), indexing="ij"))
CHANNELS = np.stack([IMAGE, IMAGE[::-1], 2 * IMAGE])


def displaced(image, order):
    return ndimage.map_coordinates(image, GRID + FIELD, order=order, mode="mirror")


#: What is called with a module of arrays, and what SciPy makes of the same.
CALLS = {
    "list of points": (
        lambda xp: map_coordinates(xp.asarray(IMAGE), xp.asarray(POINTS), order=1, mode="grid-wrap"),
        lambda: ndimage.map_coordinates(IMAGE, POINTS, order=1, mode="grid-wrap"),
    ),
    "grid of points": (
        lambda xp: apply_displacement_field(xp.asarray(LABELS), xp.asarray(FIELD), order=3, mode="mirror"),
        lambda: displaced(LABELS, 3),
    ),
    "channels": (
        lambda xp: apply_displacement_field(
            xp.asarray(CHANNELS), xp.asarray(FIELD), channel_axis=0, order=1, mode="mirror"
        ),
        lambda: np.stack([displaced(one, 1) for one in CHANNELS]),
    ),
    "turned labels": (
        lambda xp: affine_transform(xp.asarray(LABELS), TURN, 1.3137, order=0),
        lambda: ndimage.affine_transform(LABELS, TURN, 1.3137, order=0),
    ),
    "a turn by bricks": (
        lambda xp: affine_transform(xp.asarray(IMAGE), TURN, 1.3137, order=2, mode="nearest"),
        lambda: ndimage.affine_transform(IMAGE, TURN, 1.3137, order=2, mode="nearest"),
    ),
    "turned planes": (
        lambda xp: affine_transform(xp.asarray(IMAGE[:, :20, :20]), np.diag([1.0, 0.7, 0.6]), 0, order=3),
        lambda: ndimage.affine_transform(IMAGE[:, :20, :20], np.diag([1.0, 0.7, 0.6]), 0, order=3),
    ),
    "labels to half": (
        lambda xp: zoom(xp.asarray(LABELS), 0.5, order=0, mode="nearest", grid_mode=True),
        lambda: ndimage.zoom(LABELS, 0.5, order=0, mode="nearest", grid_mode=True),
    ),
    "moved labels": (
        lambda xp: shift(xp.asarray(LABELS), (3, -2, 5), order=0, cval=7),
        lambda: ndimage.shift(LABELS, (3, -2, 5), order=0, cval=7),
    ),
    "four axes": (
        lambda xp: zoom(xp.asarray(IMAGE.reshape(4, 5, 21, 70)[..., :9]), 1.3, order=3, mode="grid-mirror"),
        lambda: ndimage.zoom(IMAGE.reshape(4, 5, 21, 70)[..., :9], 1.3, order=3, mode="grid-mirror"),
    ),
    "long lines": (
        lambda xp: spline_filter(xp.asarray(IMAGE.reshape(7, 3, -1)[..., ::2]), 5, np.float32, "reflect"),
        lambda: ndimage.spline_filter(IMAGE.reshape(7, 3, -1)[..., ::2], 5, np.float64, "reflect"),
    ),
    "deep columns": (
        lambda xp: spline_filter(xp.asarray(IMAGE.reshape(-1, 3, 2)), 3, np.float32),
        lambda: ndimage.spline_filter(IMAGE.reshape(-1, 3, 2), 3),
    ),
    "a resized volume": (
        lambda xp: resize(xp.asarray(IMAGE), (10, 11, 35), anti_aliasing_sigma=0.5),
        lambda: ndimage.zoom(
            ndimage.gaussian_filter(IMAGE.astype("f8"), 0.5, mode="mirror"),
            np.array([10, 11, 35]) / SHAPE,
            order=1,
            mode="mirror",
            grid_mode=True,
        ),
    ),
    "a wide window": (
        lambda xp: resize(xp.asarray(IMAGE.reshape(2, -1)), (2, 7)),
        lambda: ndimage.zoom(
            ndimage.gaussian_filter1d(IMAGE.reshape(2, -1).astype("f8"), (14700 / 7 - 1) / 2, mode="mirror"),
            (1, 7 / 14700),
            order=1,
            mode="mirror",
            grid_mode=True,
        ),
    ),
    "one resized axis": (
        lambda xp: resize(xp.asarray(IMAGE), (20, 21, 90)),
        lambda: ndimage.zoom(IMAGE.astype("f8"), (1, 1, 90 / 70), order=1, mode="mirror", grid_mode=True),
    ),
}


def check(name, xp):
    ours, truth = CALLS[name]
    got, expected = to_host(ours(xp)), truth()
    assert got.shape == expected.shape
    assert np.isclose(got, expected, atol=2e-3).mean() > 0.999, name  # rounding decides at the ends of an image


@needs_compiler
def test_no_kernel_is_left_out(monkeypatch):
    launched = set()
    on_cpu.patch(monkeypatch)
    monkeypatch.setattr(cells, "_CACHED_NBYTES", 0)
    for module in on_cpu.LAUNCHING:
        monkeypatch.setattr(module, "load", lambda spec, load=module.load: launched.add(spec.name) or load(spec))
    for name in CALLS:
        check(name, np)
    sources = Path(str(importlib.resources.files("linumpy.gpu")))
    text = "".join(file.read_text() for part in ("ndimage", "resize") for file in (sources / part).rglob("*.cu"))
    every = re.findall(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(', text)
    assert launched | {"correlate_lines"} == set(every)  # test_correlate.py has the tests of that one


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("name", CALLS)
def test_on_the_gpu(cupy, monkeypatch, name):
    monkeypatch.setattr(cells, "_CACHED_NBYTES", 0)
    check(name, cupy)
