"""If this fails, the sampling kernels compute something else than SciPy."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from linumpy.gpu import kernels
from linumpy.gpu.ndimage import cells, sampling
from linumpy.gpu.ndimage import sampling_launch as launch
from linumpy.gpu.ndimage.sampling import AffineMap, SplineSampling
from linumpy.gpu.ndimage.sampling_launch import MODES
from tests.support.budget import examples, matrix
from tests.support.gpu.emulator import emulated, needs_compiler
from tests.support.gpu.nvrtc import compile_kernel, declared_shared

DTYPES = ["u1", "u2", "i2", "f4", "f8", "i4", "u4"]


#: Dtype, order and mode: each of them with some of the others. A compilation of every one takes about a second;
#: test_random_calls draws from all of them, now and then.
KINDS = [
    ("u1", 0, "constant"),
    ("i4", 0, "wrap"),
    ("f4", 0, "grid-constant"),
    ("u2", 1, "grid-wrap"),
    ("i2", 1, "reflect"),
    ("f4", 1, "nearest"),
    ("f8", 1, "wrap"),
    ("u4", 2, "reflect"),
    ("f4", 2, "constant"),
    ("f4", 3, "mirror"),
    ("f8", 3, "grid-constant"),
    ("u1", 4, "grid-wrap"),
    ("f8", 5, "nearest"),
    ("f4", 5, "mirror"),
]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    for module in (cells, sampling):
        monkeypatch.setattr(module, "load", emulated)


def image_of(dtype, shape, seed):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return rng.normal(0, 100, shape).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(max(info.min, -(2**30)), min(info.max, 2**31), shape, endpoint=True).astype(dtype)


def scipy_dtype(array):
    """SciPy knows no float16."""
    return array.astype(np.float32) if array.dtype == np.float16 else array


shapes = st.integers(2, 3).flatmap(lambda rank: st.tuples(*(st.integers(1, 9) for _ in range(rank))))


def close(got, expected, image, order):
    """Integers by one at most where rounding decides; floats by 1e-5 of the range."""
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    scale = float(np.abs(image.astype(np.float64)).max(initial=1))
    tolerance = 1e-5 * scale if image.dtype.kind == "f" else max(1.0, 1e-5 * scale)
    same = np.abs(got - expected) <= tolerance
    return same | (np.isnan(got) & np.isnan(expected))


@needs_compiler
@settings(max_examples=examples(150))
@given(
    shape=shapes,
    how=st.sampled_from(KINDS),
    kind=st.sampled_from(["f4", "f8"]),
    far=st.sampled_from([0.4, 3.0, 40.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_points_as_scipy(shape, how, kind, far, seed):
    dtype, order, mode = how
    rng = np.random.default_rng(seed)
    image = image_of(dtype, shape, seed)
    places = np.stack([rng.uniform(-far, n - 1 + far, 40) for n in shape]).astype(kind)
    # Whole voxels are exact; halves are where rounding decides, and are left alone.
    places[:, :10] = np.round(places[:, :10])
    got = np.empty(40, dtype)
    sampling.sample_points(image, places, SplineSampling(order, mode, 7.0), got)
    expected = ndimage.map_coordinates(image, places, order=order, mode=mode, cval=7.0, prefilter=False)
    assert close(got, expected, image, order).all()


@needs_compiler
@settings(max_examples=examples(150))
@given(shape=shapes, how=st.sampled_from(KINDS), brick=st.sampled_from([0, 96 * 1024]), seed=st.integers(0, 2**32 - 1))
def test_affine_as_scipy_and_blocks_as_the_whole(shape, how, brick, seed):
    dtype, order, mode = how
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_BRICK_NBYTES", brick)
        check_affine(shape, dtype, order, mode, seed)


def check_affine(shape, dtype, order, mode, seed):
    rng = np.random.default_rng(seed)
    rank = len(shape)
    image = image_of(dtype, shape, seed)
    matrix = np.eye(rank) * rng.uniform(0.5, 2, rank) + rng.normal(0, 0.2, (rank, rank)) * rng.integers(0, 2)
    offset = rng.uniform(-2, 2, rank)
    out_shape = tuple(int(n) for n in rng.integers(1, 12 if rank == 2 else 40, rank))
    affine = AffineMap(tuple(map(tuple, matrix.tolist())), tuple(offset.tolist()))
    how = SplineSampling(order, mode, 3.0)
    got = np.empty(out_shape, dtype)
    sampling.sample_affine(image, affine, how, got)
    expected = ndimage.affine_transform(
        image, matrix, offset, out_shape, order=order, mode=mode, cval=3.0, prefilter=False
    )
    assert close(got, expected, image, order).mean() > 0.99
    cut = tuple(int(rng.integers(0, n)) for n in out_shape)
    block = np.empty(tuple(n - c for n, c in zip(out_shape, cut, strict=True)), dtype)
    sampling.sample_affine(image, affine, how, block, out_start=cut)
    assert block.tobytes() == got[tuple(slice(c, None) for c in cut)].tobytes()


@needs_compiler
@pytest.mark.parametrize(("dtype", "rank"), matrix(["u1", "i2", "u2", "f4", "u4", "f8", "i8"], [2, 3]))
def test_turned_labels_halfway_between_two_voxels(dtype, rank):
    """Voxels are taken as they are: the one that SciPy takes at a tie, wherever a block begins."""
    rng = np.random.default_rng(rank)
    image = rng.integers(0, 120, (44, 44, 44)[:rank]).astype(dtype)
    if dtype == "i8":
        image += 2**60  # SciPy takes it through float64
    matrix = np.array([[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]])[:rank, :rank]
    offset = (0.5, 1.0, 0.25)[:rank]
    shape = (40, 39, 70)[3 - rank :]
    affine = AffineMap(tuple(map(tuple, matrix.tolist())), offset)
    got = np.empty(shape, dtype)
    sampling.sample_affine(image, affine, SplineSampling(0, "nearest", 0.0), got)
    expected = ndimage.affine_transform(image, matrix, offset, shape, order=0, mode="nearest")
    assert np.array_equal(got, expected)
    start = (7, 3, 1)[:rank]
    block = np.empty(tuple(n - one for n, one in zip(shape, start, strict=True)), dtype)
    sampling.sample_affine(image, affine, SplineSampling(0, "nearest", 0.0), block, out_start=start)
    assert np.array_equal(block, got[tuple(slice(one, None) for one in start)])


@needs_compiler
@pytest.mark.parametrize(("mode", "order"), matrix(MODES, range(6)))
def test_places_that_are_no_numbers(mode, order):
    image = image_of("f4", (5, 6, 7), 1)
    bad = np.array([np.nan, np.inf, -np.inf, 1e300, -1e300, 2.0**40])
    places = np.ones((3, 6))
    for axis in range(3):
        here = places.copy()
        here[axis] = bad
        got = np.empty(6, "f4")
        sampling.sample_points(image, here, SplineSampling(order, mode, 5.0), got)
        if mode in ("constant", "grid-constant"):
            assert np.allclose(got, 5)


@needs_compiler
@pytest.mark.parametrize("dtype", ["f4", "f8", "u2"])
@pytest.mark.parametrize("n", [1, 6])
def test_what_is_nearest_to_the_border_is_its_voxel(dtype, n):
    """Beyond the border it is that voxel, and no sum of its parts that is rounded; also where it is infinite."""
    image = image_of(dtype, (n, 5, 4), 3)
    if image.dtype.kind == "f":
        image[0, 0, 0], image[-1, -1, -1] = np.inf, np.nan
    rng = np.random.default_rng(0)
    beyond = np.concatenate([rng.uniform(0, 1.6, 300), [1e-9, 0.5, 1.5, 2.5, 40.0, 1e6]])
    places = np.full((3, 2, len(beyond)), 2.0)
    places[0] = np.stack([-beyond, n - 1 + beyond])
    got = np.empty((2, len(beyond)), dtype)
    sampling.sample_points(image, places, SplineSampling(1, "nearest", 0.0), got)
    assert (got == image[[0, -1], 2, 2][:, None]).all()
    last = np.reshape(image.shape, (3, 1)) - 1.0
    corners = np.concatenate([last * 0 - beyond, last + beyond], axis=1)
    got = np.empty(corners.shape[1], dtype)
    sampling.sample_points(image, corners, SplineSampling(1, "nearest", 0.0), got)
    expected = image[[0, -1], [0, -1], [0, -1]].repeat(len(beyond))
    assert np.array_equal(got, expected, equal_nan=image.dtype.kind == "f")


@needs_compiler
def test_a_linear_field_is_exact():
    z, y, x = np.meshgrid(*(np.arange(n, dtype="f4") for n in (8, 9, 10)), indexing="ij")
    image = 2 * z + 3 * y - x
    places = np.random.default_rng(0).uniform(0, 7, (3, 500))
    got = np.empty(500, "f4")
    sampling.sample_points(image, places, SplineSampling(1, "nearest", 0.0), got)
    assert np.allclose(got, 2 * places[0] + 3 * places[1] - places[2], atol=1e-5)


@needs_compiler
def test_a_box_gives_what_the_whole_gives():
    image = image_of("u2", (20, 22, 24), 3)
    affine = AffineMap(((0.7, 0.1, 0), (-0.1, 0.8, 0.05), (0, 0.1, 0.9)), (1.3, 2.1, 0.4))
    for mode in MODES:
        how = SplineSampling(1, mode, 9.0)
        whole = np.empty((15, 15, 15), "u2")
        sampling.sample_affine(image, affine, how, whole)
        box = np.ascontiguousarray(image[2:18, 1:20, 3:22])
        block = np.empty((4, 4, 4), "u2")
        where = {"whole": image.shape, "box_start": (2, 1, 3), "out_start": (5, 5, 6)}
        sampling.sample_affine(box, affine, how, block, **where)
        assert np.array_equal(block, whole[5:9, 5:9, 6:10])


def specs():
    for source, target, rank, order, mode in [
        ("u1", "u1", 3, 0, "constant"),
        ("u2", "u2", 3, 1, "grid-wrap"),
        ("i2", "i2", 2, 1, "reflect"),
        ("f2", "f2", 3, 1, "nearest"),
        ("f4", "f4", 3, 3, "mirror"),
        ("f4", "u2", 2, 3, "wrap"),
        ("f8", "f8", 3, 3, "grid-constant"),
        ("i8", "u4", 2, 0, "mirror"),
        ("f8", "f2", 2, 1, "constant"),
        ("f4", "f4", 3, 2, "reflect"),
        ("f4", "f4", 3, 5, "mirror"),
        ("f8", "u1", 2, 4, "nearest"),
    ]:
        image, out = np.empty((1,) * rank, source), np.empty((1,) * rank, target)
        kinds = (*launch.kinds_of(image, out, order, mode)[:-1], source in ("u2", "f4"))  # of these, in 64-bit numbers
        for warp_x in ("32", "8"):
            snaps = {"ROUNDING": "1e-06"} if mode == "constant" and warp_x == "8" else {}
            yield launch.spec_of("affine", "affine", kinds, launch.AFFINE[order], WARP_X=warp_x, **snaps)
        if rank == 3 and order in launch.BRICKS:
            yield launch.spec_of("affine", "affine_brick", kinds, launch.BRICKS[order], PITCH="40")
        for coordinate, field, grid in (
            ("float", "0", "0"),
            ("double", "0", "1"),
            ("float", "1", "1"),
            ("double", "2", "1"),
        ):
            places = {"COORDINATE": coordinate, "FIELD": field, "GRID": grid, "CELLS": "0"}
            cut = launch.GRIDS[order]
            yield launch.spec_of("points", "map_points", kinds, cut, **places)

        if rank == 3 and order < 3:
            places |= {"FIELD": "0", "GRID": "0", "CELLS": "1", **cells.cell_defines(image.itemsize)}
            yield launch.spec_of("points", "map_points", kinds, launch.LISTS[order], **places)
            yield cells.kernel_spec(image.itemsize, 2**31 if kinds[-1] else 1)


class Recorder:
    """Takes the place of a kernel and notes what shared memory each launch asks for."""

    max_dynamic_shared_size_bytes = 48 * 1024

    def __call__(self, grid, block, args, shared_mem=0):
        self.asked, self.shared = self.max_dynamic_shared_size_bytes, shared_mem


@pytest.mark.parametrize("order", [1, 3])
def test_a_brick_leaves_what_the_kernel_declares(monkeypatch, order):
    """48 KiB and the corner that the kernel declares are more than a block has without asking."""
    recorder, specs = Recorder(), []
    monkeypatch.setattr(sampling, "load", lambda spec: specs.append(spec) or recorder)
    scale = [(n - 1.5 - order) / (tile - 1) for n, tile in zip((16, 32, 20), launch.BRICKS[order].tile, strict=True)]
    affine = AffineMap(tuple(map(tuple, np.diag(scale).tolist())), (0.0, 0.0, 0.0))
    image = np.zeros((60,) * 3, "f4")
    sampling.sample_affine(image, affine, SplineSampling(order, "nearest", 0.0), np.zeros((30, 30, 30), "f4"))
    assert recorder.shared == 48 * 1024
    (spec,) = specs
    declared = declared_shared(compile_kernel(spec, "sm_75"), spec.name)
    assert 0 < declared <= sampling._DECLARED_NBYTES
    assert recorder.asked >= recorder.shared, "the launch would fail"
    device = SimpleNamespace(device=SimpleNamespace(id=0))
    for kib in (64, 99, 227):
        monkeypatch.setattr(sampling, "is_device_array", lambda _: True)
        monkeypatch.setattr(sampling, "_shared_nbytes", lambda _, kib=kib: kib * 1024)
        assert sampling._shared_limit(device) + declared <= kib * 1024


def stacks():
    """Kernels for stacks of images, of each form."""
    image = np.empty((2, 2, 2), "f4")
    for order in (1, 2):
        kinds = launch.kinds_of(image, image, order, "mirror")
        yield launch.spec_of("affine", "affine", kinds, launch.AFFINE[order], WARP_X="32", BATCH="1")
        yield launch.spec_of("affine", "affine_brick", kinds, launch.BRICKS[order], PITCH="40", BATCH="1")
        places = {"COORDINATE": "float", "FIELD": "2", "GRID": "1", "CELLS": "0", "BATCH": "1"}
        yield launch.spec_of("points", "map_points", kinds, launch.STACKED_GRIDS[order], **places)
        yield launch.spec_of("points", "map_points", kinds, launch.LISTS[order], **places | {"FIELD": "0", "GRID": "0"})


@needs_compiler
def test_a_copy_in_cells_that_is_larger_than_the_image_is_numbered_by_itself(monkeypatch):
    """Cells are whole: three planes take four. What numbers the image's voxels may be too narrow for the copy's."""
    specs = []
    for module in (cells, sampling):
        monkeypatch.setattr(module, "load", lambda spec: specs.append(spec) or emulated(spec))
    monkeypatch.setattr(cells, "_CACHED_NBYTES", 0)
    image = image_of("f4", (3, 9, 10), 0)
    places = np.random.default_rng(0).uniform(0, 2, (3, 60))
    monkeypatch.setattr(kernels, "_INT_LIMIT", image.size + 1)
    got = np.empty(60, "f4")
    sampling.sample_points(image, places, SplineSampling(1, "mirror", 0.0), got)
    assert [(spec.source, dict(spec.defines)["INDEX"]) for spec in specs] == [("cells", "int64"), ("points", "int64")]
    assert np.allclose(got, ndimage.map_coordinates(image, places, order=1, mode="mirror"), atol=1e-3)
