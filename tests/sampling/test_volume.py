"""If this fails, values of volumes differ from SciPy's, or the kernels from NumPy's."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from linumpy import device
from linumpy.gpu.kernels import source_text
from linumpy.sampling import volume
from linumpy.sampling.coordinates import boxes, draws
from linumpy.sampling.coordinates.boxes import make_window
from linumpy.sampling.coordinates.generator import key_of
from linumpy.sampling.fields import amr, umesh, vdb
from linumpy.sampling.host import HostVolume
from linumpy.sampling.paging import pages
from linumpy.sampling.volume import KEPT, LAYOUTS, DeviceVolume
from tests.support.budget import first, matrix
from tests.support.gpu.emulator import Kernel, emulated, library
from tests.support.gpu.nvrtc import compilations, compile_kernel
from tests.support.oracles.sampling_reference import independent, truth

pytestmark = pytest.mark.needs_core

KEY = key_of(3)
RAGGED = (7, 5, 11)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    for module in (volume, draws, boxes):
        monkeypatch.setattr(module, "load", emulated)


def random_volume(shape=RAGGED, dtype="f4", channels=1, seed=0):
    made = np.random.default_rng(seed).normal(20, 30, (channels, *shape))
    if np.dtype(dtype).kind in "ui":
        info = np.iinfo(dtype)
        made = np.clip(made * (info.max / 100), info.min, info.max)
    return made.astype(dtype)


def points(count, seed=1):
    """Points inside, at the border, outside and on voxel centres."""
    made = np.random.default_rng(seed).uniform(-0.1, 1.1, (count, 3)).astype(np.float32)
    made[: count // 4] = independent(KEY, np.arange(count // 4))
    made[count // 4 : count // 4 + 8] = list(itertools.product((0, 1), repeat=3))
    centres = (np.random.default_rng(2).integers(0, 5, (10, 3)) + 0.5) / np.array(RAGGED[::-1])
    made[-10:] = centres
    return made


def decoded(field, coords, gradient=False):
    out = np.full((field.n_channels, len(coords)), -99, field.values_dtype)
    slopes = np.full((field.n_channels, 3, len(coords)), np.nan, np.float32) if gradient else None
    field.decode_with_gradient(coords, out, slopes) if gradient else field.decode(coords, out)
    return (out, slopes) if gradient else out


def spread(voxels):
    return max(1e-30, float(np.ptp(voxels.astype(np.float64))))


@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "f2", "f4", "f8", ">u2", ">f4"])
def test_host_volume_is_scipy(order, dtype):
    voxels, coords = random_volume(dtype=dtype, channels=2), points(500)
    made = decoded(HostVolume(voxels, spline_order=order), coords)
    assert np.abs(made - truth(voxels, coords, order)).max() < 1e-6 * (spread(voxels) + abs(voxels.astype(float)).max())


@pytest.mark.parametrize("make", [HostVolume, DeviceVolume])
@pytest.mark.parametrize("low_high", [(0.0, 40.0), (10.0, 10.0), (-1000.0, 1000.0)])
@pytest.mark.parametrize("order", [0, 1, 3])
def test_normalised_voxel_by_voxel(make, low_high, order):
    voxels, coords = random_volume(dtype="i2") // 300, points(500)
    field = make(voxels, low_high=low_high, spline_order=order)
    made = decoded(field, coords)
    assert np.abs(made - truth(voxels, coords, order, low_high)).max() < 1e-6
    assert field.value_range == (0, 1)


@pytest.mark.parametrize(("layout", "dtype"), matrix(LAYOUTS, KEPT))
def test_layouts_hold_the_volume(layout, dtype):
    voxels, coords = random_volume(dtype=dtype, channels=2), points(700)
    field = DeviceVolume(voxels, layout=layout)
    assert np.abs(decoded(field, coords) - truth(voxels, coords, 1)).max() < 1e-6 * spread(voxels)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 3), (2, 1, 17), (9, 4, 1)])
def test_thin_volumes(layout, shape):
    for dtype in ("u1", "u2", "f4"):
        voxels, coords = random_volume(shape, dtype), points(300)
        field = DeviceVolume(voxels, layout=layout)
        assert np.abs(decoded(field, coords) - truth(voxels, coords, 1)).max() <= 1e-6 * spread(voxels)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_points_along_rows_give_the_same_bits(layout):
    voxels = random_volume((6, 8, 200))
    x = (np.arange(400, dtype=np.float32) + 0.3) / 400
    coords = np.stack([x, np.full_like(x, 0.4), np.full_like(x, 0.7)], 1)
    rows = decoded(DeviceVolume(voxels, layout="rows"), coords)
    shuffle = np.random.default_rng(0).permutation(400)
    field = DeviceVolume(voxels, layout=layout)
    assert np.array_equal(decoded(field, coords), rows)
    assert np.array_equal(decoded(field, np.ascontiguousarray(coords[shuffle])), rows[:, shuffle])


@pytest.mark.parametrize("order", [0, 3])
@pytest.mark.parametrize("dtype", ["u1", "u2", "f4"])
def test_other_orders_of_the_kernel(order, dtype):
    voxels, coords = random_volume(dtype=dtype, channels=2), points(500)
    made = decoded(DeviceVolume(voxels, spline_order=order), coords)
    assert np.abs(made - truth(voxels, coords, order)).max() < 2e-6 * spread(voxels)


@pytest.mark.parametrize("make", [HostVolume, DeviceVolume])
@pytest.mark.parametrize("order", [1, 3])
def test_gradient_is_the_difference_quotient(make, order):
    voxels, coords = random_volume(channels=2), points(400)[:300]
    # Not where the derivative jumps.
    place = coords.astype(np.float64) * np.array(RAGGED[::-1]) - 0.5
    coords = coords[np.abs(place - np.round(place)).min(1) > 1e-3]
    values, slopes = decoded(make(voxels, spline_order=order), coords, gradient=True)
    assert np.abs(values - truth(voxels, coords, order)).max() < 2e-6 * spread(voxels)
    step = 2.0**-16
    for axis in range(3):
        moved = [coords.astype(np.float64) + sign * step * np.eye(3)[axis] for sign in (1, -1)]
        quotient = np.subtract(*(truth(voxels, one, order) for one in moved)) / (2 * step)
        assert np.abs(slopes[:, axis] - quotient).max() < 1e-3 * spread(voxels)
    assert (slopes != 0).mean() > 0.3


@pytest.mark.parametrize("make", [HostVolume, DeviceVolume])
@pytest.mark.parametrize("order", [0, 1, 3])
def test_a_point_that_is_no_number_has_no_value(make, order):
    coords = np.full((4, 3), 0.5, np.float32)
    coords[1, 0] = coords[2, 2] = np.nan
    made = decoded(make(random_volume(), spline_order=order), coords)
    assert np.isnan(made[0]).tolist() == [False, True, True, False]


@pytest.mark.parametrize("make", [HostVolume, DeviceVolume])
def test_labels(make):
    voxels, coords = np.random.default_rng(0).integers(-5, 2**31 - 1, (1, *RAGGED), np.int32), points(300)
    made = decoded(make(voxels, labels=True, spline_order=0), coords)
    assert made.dtype == np.int32
    assert np.array_equal(made, truth(voxels, coords, 0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("count", "offset"), [(1, 0), (1000, 0), (1023, 1)])
def test_samples_are_those_of_the_generator(layout, count, offset):
    voxels, first = random_volume(channels=2), 2**32 - 100
    field = DeviceVolume(voxels, layout=layout)
    memory = np.full(3 * count + 8, -7, np.float32)
    coords = memory[offset : offset + 3 * count].reshape(-1, 3)  # by one float: not aligned for stores of 16 bytes
    values = np.empty((2, count), np.float32)
    field.sample(KEY, first, coords, values)
    assert np.array_equal(coords, independent(KEY, first + np.arange(count)))
    assert np.array_equal(values, decoded(field, coords))
    assert (memory[:offset] == -7).all()
    assert (memory[offset + 3 * count :] == -7).all()


@pytest.mark.parametrize("dtype", ["f4", "u2"])
@pytest.mark.parametrize(("shape", "total", "begin", "count"), [
    ((40, 33, 70), 12_000, 0, 12_000),
    ((20, 33, 72), 12_000, 0, 12_000),
    ((40, 33, 70), 12_000, 4096, 3000),
    ((40, 33, 70), 12_000, 37, 1001),
    ((1, 9, 5), 3000, 0, 3000),
    ((3, 3, 3), 3_000, 1, 2_500),
])  # fmt: skip
def test_samples_in_boxes(dtype, shape, total, begin, count, monkeypatch):
    monkeypatch.setattr(volume, "_BLOCK_SAMPLES", 8)
    voxels = random_volume(shape, dtype, channels=2)
    field = DeviceVolume(voxels, box_voxels=3000)
    made = make_window(field.boxes, KEY, 99, total)
    coords, values = np.full((count, 3), np.nan, np.float32), np.full((2, count), np.nan, np.float32)
    field.sample_boxes(made, begin, coords, values)
    expected = np.empty((count, 3), np.float32)
    draws.draw_window(made, begin, expected)
    assert np.array_equal(coords, expected)
    assert np.array_equal(values, decoded(DeviceVolume(voxels, layout="rows"), coords))


@pytest.mark.parametrize("along_rows", [True, False])
def test_several_tiles_of_a_warp(along_rows, monkeypatch):
    monkeypatch.setattr(volume, "_MANY_SAMPLES", 1)
    voxels = random_volume((6, 9, 70))
    coords = np.random.default_rng(0).uniform(-0.1, 1.1, (7003, 3)).astype(np.float32)
    if along_rows:
        coords = coords[np.lexsort(np.floor(coords.T * [[70], [9], [6]]))]
    coords[5, 1], coords[4000, 0], coords[7002, 2] = np.nan, np.inf, -np.inf
    values = decoded(DeviceVolume(voxels, layout="cells"), coords)
    finite = np.isfinite(coords).all(1)
    assert np.isnan(values[:, ~finite]).all()
    assert np.abs(values[:, finite] - truth(voxels, coords[finite], 1)).max() < 1e-6 * spread(voxels)


def test_a_long_axis():
    n = 2**22 + 2
    voxels = np.random.default_rng(0).random((1, 1, 1, n), np.float32)
    x = 1 - np.arange(1, 400, dtype=np.float64) * 2.0**-24
    coords = np.stack([np.concatenate([x, 1 - x]), *np.full((2, 2 * x.size), 0.5)], 1).astype(np.float32)
    values = decoded(DeviceVolume(voxels, layout="rows"), coords)
    assert np.abs(values - truth(voxels, coords, 1)).max() < 1e-6


@pytest.mark.parametrize("offset", [0, 1])
def test_boxes_of_voxels_anywhere_in_memory(offset):
    """Rows that begin at multiples of 16 bytes are read by vectors, others by voxels."""
    memory = np.zeros(4 + 20 * 24 * 32 + offset, np.float32)
    begin = -memory.ctypes.data // 4 % 4 + offset
    voxels = memory[begin : begin + 20 * 24 * 32].reshape(1, 20, 24, 32)
    voxels[...] = random_volume((20, 24, 32))
    field = DeviceVolume(voxels, layout="rows", box_voxels=900)
    coords, values = np.empty((30_000, 3), np.float32), np.empty((1, 30_000), np.float32)
    field.sample_boxes(make_window(field.boxes, KEY, 0, 30_000), 0, coords, values)
    assert np.array_equal(values, decoded(field, coords))


def test_samples_in_boxes_are_normalised():
    field = DeviceVolume(random_volume((20, 20, 20), "u2"), low_high=(1000, 30000))
    coords, values = np.empty((5000, 3), np.float32), np.empty((1, 5000), np.float32)
    field.sample_boxes(make_window(field.boxes, KEY, 0, 5000), 0, coords, values)
    assert np.array_equal(values, decoded(field, coords))


def test_memory_decides_on_the_layout(monkeypatch):
    voxels = random_volume()
    sizes = {8: "cells", 7.9: "quads", 3.9: "bricks", 0.9: "rows"}
    for factor, name in sizes.items():
        assert DeviceVolume(voxels, memory_limit=int(voxels.nbytes * factor)).layout == name
    # Of a small volume, the copy that stays in the cache.
    monkeypatch.setattr(volume, "_CACHED_NBYTES", voxels.nbytes * 5)
    assert DeviceVolume(voxels, memory_limit=2**30).layout == "quads"
    with pytest.raises(ValueError, match="layout='tiles'"):
        DeviceVolume(voxels, layout="tiles")


@pytest.mark.parametrize(
    ("limit", "layout"), [(0, "cells"), (300, "cells"), (200, "quads"), (101, "rows"), (50, "rows")]
)
def test_the_limit_of_the_memory_pool_decides_on_the_layout(monkeypatch, limit, layout):
    """A volume, of which 100 are used, on a device with plenty of free memory."""
    voxels = random_volume()
    unit = voxels.nbytes * 0.2
    pool = SimpleNamespace(
        free_bytes=lambda: 0, used_bytes=lambda: int(100 * unit), get_limit=lambda: int(limit * unit)
    )
    runtime = SimpleNamespace(memGetInfo=lambda: (2**40, 2**40))
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime), get_default_memory_pool=lambda: pool)
    monkeypatch.setattr(device, "require_cuda", lambda: cupy)
    monkeypatch.setattr(volume, "is_device_array", lambda _: True)
    assert DeviceVolume(voxels).layout == layout
    assert device.free_memory() >= 0


@pytest.mark.parametrize("seed", first(range(1, 4)))
def test_shared_memory_is_free_of_races(seed, monkeypatch):
    """With each access checked, and undefined behaviour too: samples in boxes, staged coordinates, counts of boxes."""

    def checked(spec):
        made = library(source_text(spec.source, spec.package), spec.defines, (spec.name,), checked=True)
        kernel = Kernel(getattr(made, f"emulate_{spec.name}"))
        kernel.seed = seed
        return kernel

    for module in (volume, boxes):
        monkeypatch.setattr(module, "load", checked)
    monkeypatch.setattr(volume, "_BLOCK_SAMPLES", 500)
    voxels = random_volume((20, 9, 12), channels=2)
    field = DeviceVolume(voxels, layout="quads", box_voxels=1000)
    coords, values = np.empty((2, 1000, 3), np.float32), np.empty((2, 2, 1000), np.float32)
    made = make_window(field.boxes, KEY, 0, 1000, np)
    assert np.array_equal(boxes.count_on_device(field.boxes, KEY, 0, 1000, np), made.starts)
    field.sample_boxes(made, 0, coords[0], values[0])
    field.sample(KEY, 0, coords[1], values[1])
    for points, got in zip(coords, values, strict=True):
        assert np.abs(got - truth(voxels, points, 1)).max() < 1e-6 * spread(voxels)


def specs():
    base = {"NORMALISE": "0", "INDEX": "int", "BLOCKS": "3", "LABELS": "0", "TARGET": "float", "GRADIENT": "0"}
    base |= {"LONG": "0", "AHEAD": "1"}
    types = [volume.CUDA_TYPES[one] for one in KEPT]
    made = []
    for source, layout, draw in itertools.product(types, "0123", "01"):
        made.append({"SOURCE": source, "LAYOUT": layout, "DRAW": draw, "ORDER": "1", "GROUPS": "4"})
    made += [
        {"SOURCE": "float", "LAYOUT": "3", "DRAW": "0", "ORDER": "1", "GROUPS": "4", k: "1"}
        for k in ("GRADIENT", "NORMALISE")
    ]
    made += [{"SOURCE": one, "LAYOUT": "0", "DRAW": "0", "ORDER": "0", "GROUPS": "1"} for one in types]
    made.append(
        {"SOURCE": "int", "LAYOUT": "0", "DRAW": "0", "ORDER": "0", "GROUPS": "1", "TARGET": "int", "LABELS": "1"}
    )
    made += [{"SOURCE": "float", "LAYOUT": "0", "DRAW": "0", "ORDER": "3", "GROUPS": "1", "GRADIENT": g} for g in "01"]
    wide = {"SOURCE": "float", "LAYOUT": "3", "DRAW": "1", "ORDER": "1", "GROUPS": "4", "INDEX": "int64"}
    for one in [*made, wide]:
        yield volume._spec("sample", base | one)
    for source, layout in itertools.product(types, "123"):
        yield volume._spec("pack", {"SOURCE": source, "LAYOUT": layout, "INDEX": "int64", "NORMALISE": "0"})
    boxes_of = {"LAYOUT": "0", "INDEX": "int", "THREADS": "384", "BLOCKS": "3"}
    for source, fours, normalise in [*itertools.product(types, "01", "1"), ("float", "1", "0")]:
        yield volume._spec("sample_boxes", boxes_of | {"SOURCE": source, "FOURS": fours, "NORMALISE": normalise})
    yield from map(draws.kernel_spec, ("draw", "draw_boxes", "draw_in_parts"))
    base = {"INDEX": "int64", "LAYOUT": "0"}
    for source, draw in itertools.product(types, "01"):
        normalise = str(int(draw) * (2 if source in ("float", "half_bits") else 1))
        yield pages._spec("sample_pages", base | {"SOURCE": source, "DRAW": draw, "NORMALISE": normalise})
    yield pages._spec("mark", base | {"SOURCE": "float", "DRAW": "0", "NORMALISE": "0"})
    yield from (boxes._SPLIT, amr.BrickField._spec, umesh.StitchedField._spec, vdb.SparseGrid._spec)


@pytest.mark.parametrize(("one", "architecture"), compilations(specs()))
def test_kernels_compile(one, architecture):
    assert one.name.encode() in compile_kernel(one, architecture)
