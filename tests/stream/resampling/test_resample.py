"""If this fails, crops beyond borders or augmented crops differ from NumPy's pad and SciPy on the whole volume."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from scipy.spatial.transform import Rotation

from linumpy import stream
from linumpy.gpu.rounding import bfloat16_bits
from linumpy.stream.augment import draw_warp
from linumpy.stream.config import Dtype, Part
from linumpy.stream.planning.reach import with_regions
from linumpy.stream.planning.records import PartShape
from linumpy.stream.planning.samples import plan_sample
from linumpy.stream.resampling import resample as resample_module
from linumpy.stream.resampling.on_host import Staged, coordinates, fill_row, normals
from linumpy.stream.resampling.resample import kernel_spec
from tests.support.budget import examples, first
from tests.support.gpu.emulator import emulated, needs_compiler
from tests.support.gpu.nvrtc import compilations, compile_kernel
from tests.support.stream_arrays import array_info, make_array, small_config, staged

SCIPY = {"constant": "constant", "edge": "nearest", "reflect": "mirror"}
FULL = stream.Augment(
    rotation=180, scale=(0.7, 1.4), shear=0.2, flip="zyx", elastic=(9.0, 2.0), translation=6.0,
    gamma=(0.7, 1.5), contrast=(0.7, 1.3), noise=(1.0, 20.0), blur=(0.0, 4.0), intensity_range=(0, 60_000),
)  # fmt: skip
GEOMETRY = stream.Augment(rotation=180, scale=(0.7, 1.4), shear=0.2, flip="zyx", elastic=(9.0, 2.0), translation=6.0)


def planned(values, aabb, settings_, *, index=0, spacing=None, parts=(), infos=None):
    sample = stream.Sample("a", aabb, parts=parts)
    infos = infos or [array_info(values, spacing=spacing)] * (1 + len(parts))
    shapes, crops = plan_sample(sample, infos, settings_, 0, index, settings_.epoch)
    return shapes, tuple(with_regions(crops, settings_.pad or "edge"))


def made(shape, read, pad, fill=0.0):
    row = np.empty(shape.shape, shape.element)
    fill_row(row, shape, staged(read), pad, fill)
    return row


@st.composite
def bordered(draw):
    rank = draw(st.integers(1, 4))
    shape = draw(st.tuples(*[st.integers(1, 7)] * rank))
    size = draw(st.tuples(*[st.integers(1, 9)] * rank))
    start = [draw(st.integers(-12, n + 8)) for n in shape]
    for axis in range(rank - 3):  # leading axes stay inside
        size = (min(size[axis], shape[axis]), *size[1:])
        start[axis] = draw(st.integers(0, shape[axis] - size[axis]))
    return shape, [(a, a + n) for a, n in zip(start, size, strict=True)]


@settings(max_examples=examples(120))
@given(bordered(), st.sampled_from(["constant", "edge", "reflect"]), st.sampled_from(["u2", "f4", "i8", "b1"]),
       st.sampled_from(["f32", "f16", "bf16", "stored"]), st.integers(0, 99))  # fmt: skip
def test_borders_are_those_of_numpy_pad(tmp_path_factory, case, pad, stored, dtype, seed):
    shape, aabb = case
    values = (np.random.default_rng(seed).random(shape) * 300).astype(stored)
    width = [(max(0, -a), max(0, b - n)) for (a, b), n in zip(aabb, shape, strict=True)]
    options = {"constant_values": 7} if pad == "constant" else {}
    target = {"f32": "f4", "f16": "f2", "bf16": ml_dtypes.bfloat16, "stored": stored}[dtype]
    cast = values.astype("f4").astype(target) if dtype == "bf16" else values.astype(target)
    around = np.pad(cast, width, pad, **options)
    expected = around[tuple(slice(a + w[0], b + w[0]) for (a, b), w in zip(aabb, width, strict=True))]
    path = make_array(tmp_path_factory.mktemp("a") / "a.zarr", values, (2,) * len(shape))
    settings_ = small_config(dtype=dtype, pad=pad, pad_value=7)
    with stream.Pipeline(settings_) as p:
        p.push(stream.Sample(path, aabb))
        batch = p.pop()
        got = batch.numpy()[0]
        batch.release()
    assert np.array_equal(got, expected.astype("f4") if dtype == "bf16" else expected)


@pytest.mark.parametrize("value", [300, 300.0, -1, np.int64(2**40), float("nan"), np.float32(7.5)])
@pytest.mark.parametrize("augment", [None, stream.Augment(flip="z")])
def test_the_value_of_borders_is_rounded_and_saturated(tmp_path, pipeline, value, augment):
    """In crops that are read into the batch, and in those that are resampled."""
    path = make_array(tmp_path / "a.zarr", np.full((4, 4), 7, "u1"))
    p = pipeline(batch_size=1, dtype="stored", pad="constant", pad_value=value, augment=augment)
    p.push(stream.Sample(path, ((2, 6), (0, 4))))
    expected = 0 if np.isnan(value) else min(max(int(value + 0.5), 0), 255)
    assert p.pop().numpy()[0, :, 0].tolist() == [7, 7, expected, expected]


def scipy_coordinates(warp, start, size, spacing):
    """The map as the documentation says it, with SciPy's spline for displacements."""
    start, size, spacing = (np.array(one, float) for one in (start, size, spacing))
    middle = (size - 1) / 2
    at = np.stack(np.meshgrid(*(np.arange(n) for n in size), indexing="ij"))
    offset = (at - middle[:, None, None, None]) * spacing[:, None, None, None]
    places = np.einsum("ij,jzyx->izyx", warp.matrix, offset) + warp.translation[:, None, None, None]
    if warp.nodes is not None:
        centre = (np.array(warp.nodes.shape[1:]) - 1) / 2
        nodes = offset / warp.node_spacing + centre[:, None, None, None]
        for axis in range(3):
            places[axis] += ndimage.map_coordinates(warp.nodes[axis], nodes, order=3, prefilter=False, mode="mirror")
    return places / spacing[:, None, None, None] + (start + middle)[:, None, None, None]


def half_of(size, spacing):
    return [(n - 1) / 2 * s for n, s in zip(size, spacing, strict=True)]


@pytest.mark.parametrize("pad", SCIPY)
@pytest.mark.parametrize("index", range(7))
def test_augmented_crops_are_those_of_the_whole_volume(pad, index):
    rng = np.random.default_rng(index)
    values = (rng.random((18, 25, 31)) * 60_000).astype(["u2", "f4", "i2"][index % 3])
    spacing, size, start = (4.0, 1.5, 1.0), (6, 9, 11), [(-2, 5, 22), (6, 8, 10)][index % 2]
    start = (90, 90, 90) if index == 6 else start  # no voxel of the array is needed
    aabb = [(a, a + n) for a, n in zip(start, size, strict=True)]
    settings_ = small_config(augment=GEOMETRY, pad=pad, pad_value=11, seed=5)
    labels = Part("labels", kind="labels")
    shapes, reads = planned(values, aabb, settings_, index=index, spacing=spacing, parts=(labels,))
    warp = draw_warp(GEOMETRY, half_of(size, spacing), seed=5, epoch=0, index=index, flat=0)
    places = scipy_coordinates(warp, start, size, spacing)
    whole = values.astype(float)
    linear = ndimage.map_coordinates(whole, places, order=1, mode=SCIPY[pad], cval=11)
    assert np.allclose(made(shapes[0], reads[0], pad, 11), linear, rtol=1e-6, atol=1e-3)
    nearest = ndimage.map_coordinates(values, places, order=0, mode=SCIPY[pad], cval=11)
    got = made(shapes[1], reads[1], pad, 11)
    assert got.dtype == values.dtype
    assert np.array_equal(got, nearest)
    assert reads[0].read_nbytes <= values.nbytes


def test_a_quarter_turn_of_anisotropic_voxels():
    values = np.random.default_rng(0).random((9, 19, 3)).astype("f4")
    turn = stream.Augment(rotation=((0, 0), (0, 0), (90, 90)))
    settings_ = small_config(augment=turn, pad="constant")
    shapes, reads = planned(values, ((0, 9), (0, 19), (0, 3)), settings_, spacing=(2.0, 1.0, 1.0))
    got = made(shapes[0], reads[0], "constant", -1.0)
    # About X by 90 degrees, which turns Y to Z: an offset (z, y) in µm shows (y, -z).
    fine = np.full((17, 19, 3), np.nan)
    fine[::2] = values
    turned = np.rot90(fine[:, 1:18], axes=(0, 1))[::2]
    known = ~np.isnan(turned)
    assert np.allclose(got[:, 1:18][known], turned[known], atol=1e-6)
    assert known.mean() > 0.4


@pytest.mark.parametrize("flat", [0, 1])
def test_angles_are_right_handed_about_each_axis(flat):
    """As SciPy turns about fixed axes x, then y, then z."""
    rng = np.random.default_rng(0)
    for degrees in (*np.eye(3) * 90, *rng.uniform(-180, 180, (20, 3))):
        turn = stream.Augment(rotation=[(angle, angle) for angle in degrees])
        found = draw_warp(turn, (1, 1, 1), seed=0, epoch=0, index=0, flat=flat).matrix
        about_zyx = (degrees[0], 0, 0) if flat else degrees
        expected = Rotation.from_euler("xyz", about_zyx[::-1], degrees=True).as_matrix()
        assert np.allclose(found, expected[::-1, ::-1], atol=1e-12)


def test_flips_alone_move_voxels_without_interpolation():
    values = np.random.default_rng(0).integers(0, 999, (5, 6, 7)).astype("u2")
    seen = set()
    for index in range(30):
        settings_ = small_config(augment=stream.Augment(flip="zx"), pad="edge", dtype="stored")
        shapes, reads = planned(values, ((1, 4), (2, 6), (0, 5)), settings_, index=index)
        got = made(shapes[0], reads[0], "edge")
        crop = values[1:4, 2:6, :5]
        for flips in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
            if np.array_equal(got, crop[:: flips[0], :, :: flips[1]]):
                seen.add(flips)
                break
        else:
            pytest.fail("not a flipped crop")
    assert len(seen) == 4


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32), st.sampled_from(["constant", "edge", "reflect"]))
def test_every_voxel_that_is_needed_is_read(seed, pad):
    rng = np.random.default_rng(seed)
    size, shape = rng.integers(1, 9, 3), rng.integers(1, 12, 3)
    start = rng.integers(-10, 14, 3)
    spacing = tuple(rng.uniform(0.5, 4, 3))
    values = rng.random(shape)
    settings_ = small_config(augment=GEOMETRY, pad=pad, seed=seed)
    aabb = [(int(a), int(a + n)) for a, n in zip(start, size, strict=True)]
    (shape_,), (read,) = planned(values, aabb, settings_, spacing=spacing)
    places, inside = coordinates(read.resampling, shape_.shape, pad)
    for axis in range(3):
        at = places[axis][inside]
        if at.size:
            upper = np.where(at > np.floor(at), np.floor(at) + 1, np.floor(at))
            begin = read.resampling.box_start[axis]
            assert begin <= np.floor(at).min()
            assert upper.max() < begin + read.resampling.box_shape[axis]


def test_noise_is_normal_and_begins_with_the_known_answer():
    """Of the reference implementation: counter 0, key 0."""
    first, second = 0x6627E8D5, 0xE169C58D
    right = np.sqrt(-2 * np.log((first + 1) / 2**32)) * np.cos(2 * np.pi * second / 2**32)
    assert normals(0, 1) == pytest.approx(right, rel=1e-12)
    drawn = normals(77, 100_000)
    assert abs(drawn.mean()) < 0.02
    assert abs(drawn.std() - 1) < 0.01


def test_bfloat16_is_rounded_as_by_ml_dtypes():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    values = np.concatenate([bits.view("f4"), np.float32([0, -0.0, np.inf, -np.inf, 65280.0, 1 + 2**-8, 3.4e38])])
    values = values[~np.isnan(values)]
    assert np.array_equal(bfloat16_bits(values), values.astype(ml_dtypes.bfloat16).view("u2"))
    assert np.isnan(bfloat16_bits(np.float32([np.nan])).view(ml_dtypes.bfloat16).astype("f4")).all()


def test_blur_is_scipys_and_intensities_change_behind_it():
    values = np.random.default_rng(0).random((12, 13, 14)).astype("f4")
    blur = stream.Augment(blur=3.0, gamma=(2, 2), contrast=(0.5, 0.5), intensity_range=(-1, 3))
    shapes, reads = planned(
        values, ((0, 12), (0, 13), (0, 14)), small_config(augment=blur, pad="edge"), spacing=(3, 2, 1.5)
    )
    smooth = ndimage.gaussian_filter(values.astype(float), (1.0, 1.5, 2.0), mode="reflect")
    bent = -1 + 4 * ((smooth + 1) / 4) ** 2
    assert np.allclose(made(shapes[0], reads[0], "edge"), 1 + (bent - 1) * 0.5, atol=1e-6)


def test_labels_keep_their_values():
    values = np.random.default_rng(0).choice([3, 77, 2**40], (16, 16, 16))
    settings_ = small_config(augment=FULL, pad="edge")
    shapes, reads = planned(values, ((2, 12),) * 3, settings_, spacing=(1, 1, 1), parts=(Part("m", kind="labels"),))
    assert set(np.unique(made(shapes[1], reads[1], "edge"))) <= {3, 77, 2**40}
    assert shapes[1].element == np.int64


def test_augmentation_depends_on_seed_epoch_and_index_alone(tmp_path, pipeline):
    values = (np.random.default_rng(0).random((20, 20, 20)) * 60_000).astype("u2")
    path = make_array(tmp_path / "a.zarr", values, (8, 8, 8))
    crops = [stream.Sample(path, [(k, k + 8)] * 3) for k in range(12)]

    def run(**options):
        p = pipeline(augment=FULL, pad="reflect", spacing=(2, 1, 1), **options)
        p.push(crops)
        found = []
        for batch in p.batches():
            found += list(batch.numpy())
            batch.release()
        return np.stack(found)

    first = run(batch_size=3, seed=4)
    assert np.array_equal(first, run(batch_size=4, seed=4, lookahead_batches=3, n_compute_threads=3))
    half = run(batch_size=2, seed=4, rank=1, world_size=2)
    assert np.array_equal(half, first[1::2])
    assert not np.array_equal(first, run(batch_size=3, seed=5))
    assert not np.array_equal(first, run(batch_size=3, seed=4, epoch=1))


def test_augmentation_without_a_spacing_is_an_error(tmp_path, pipeline):
    path = make_array(tmp_path / "a.zarr", np.zeros((8, 8, 8), "u1"))
    p = pipeline(augment=stream.Augment(rotation=5), pad="edge", batch_size=1)
    for pushes in (lambda: p.push(stream.Sample(path, [(0, 4)] * 3)), p.pop):
        with pytest.raises(stream.InvalidArgument, match="no voxel spacing"):
            pushes()
        p.push(iter([stream.Sample(path, [(0, 4)] * 3)]))


# The kernels.

DTYPES = ["u1", "i1", "u2", "i2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "b1"]


def specs():
    pairs = [(one, "f4", Dtype.F32) for one in DTYPES] + [(one, one, Dtype.STORED) for one in DTYPES]
    pairs += [("u2", "f2", Dtype.F16), ("f8", "f2", Dtype.F16), ("u2", "u2", Dtype.BF16), ("f8", "u2", Dtype.BF16)]
    found = [
        kernel_spec(name, np.dtype(source), np.dtype(out), dtype, order, list(SCIPY)[k % 3])
        for k, (source, out, dtype) in enumerate(pairs)
        for order in (0, 1)
        for name in ("augment", "blur")
    ]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize(("one", "architecture"), compilations(specs()))
def test_kernels_compile(one, architecture):
    code = compile_kernel(one, architecture)
    assert code[:4] == b"\x7fELF"
    assert one.name.encode() in code


@needs_compiler
@pytest.mark.parametrize("seed", first(range(12), 6))
def test_the_kernels_do_what_numpy_does(monkeypatch, seed):
    monkeypatch.setattr(resample_module, "load", emulated)
    rng = np.random.default_rng(seed)
    source = np.dtype(["u2", "f4", "u1", "f8", "i2", "f2"][seed % 6])
    pad = list(SCIPY)[seed % 3]
    dtype = list(Dtype)[seed % 4]
    values = (rng.random((2, 14, 17, 19)) * 250).astype(source)
    augment = FULL if seed % 2 else (None if seed % 4 else GEOMETRY)
    settings_ = small_config(augment=augment, pad=pad, dtype=dtype, seed=seed)
    rows, shapes = [], None
    for row in (0, 2, 1):
        start = rng.integers(-6, 12, 3)
        aabb = [(0, 2), *((int(a), int(a + n)) for a, n in zip(start, (7, 5, 40), strict=True))]
        sample = stream.Sample("a", aabb, parts=(Part("m", kind="labels"),))
        shapes, reads = plan_sample(sample, [array_info(values, spacing=(3.0, 2.0, 1.0))] * 2, settings_, row, row, 0)
        rows.append(with_regions(reads, settings_.pad or "edge"))
    for part, shape in enumerate(shapes):
        chosen = [staged(reads[part]) for reads in rows if reads[part].resampling is not None]
        expected = np.zeros((3, *shape.shape), shape.element)
        got = expected.copy()
        for one in chosen:
            fill_row(expected[one.read.row], shape, one, pad, 3.0)
        resample_module.launch(got, shape, chosen, pad, 3.0)
        assert_near(got, expected, shape)


def assert_near(got, expected, shape):
    if shape.dtype is Dtype.BF16:
        got, expected = (one.view(ml_dtypes.bfloat16).astype("f8") for one in (got, expected))
        assert np.allclose(got, expected, rtol=2**-7, atol=1e-6)
        assert (got == expected).mean() > 0.99
    elif shape.element.kind == "f":
        assert np.allclose(got, expected, rtol=2e-3 if shape.element.itemsize == 2 else 1e-6, atol=1e-3)
    else:
        assert np.abs(got.astype("i8") - expected.astype("i8")).max() <= 1
        assert (got == expected).mean() > 0.999


@pytest.mark.gpu
@pytest.mark.parametrize("pad", [pytest.param("constant", marks=pytest.mark.sanitize), "edge", "reflect"])
def test_the_device_does_what_numpy_does(cupy, pad):
    rng = np.random.default_rng(1)
    values = (rng.random((40, 50, 60)) * 60_000).astype("u2")
    info = array_info(values, spacing=(3.0, 2.0, 1.0))
    for dtype, augment in ((Dtype.F32, GEOMETRY), (Dtype.STORED, GEOMETRY), (Dtype.BF16, FULL), (Dtype.F32, FULL)):
        settings_ = small_config(augment=augment, pad=pad, dtype=dtype)
        sample = stream.Sample("a", ((-5, 27), (10, 42), (20, 90)))
        planned_ = [plan_sample(sample, [info], settings_, row, row, 0) for row in range(4)]
        shape: PartShape = planned_[0][0][0]
        chosen = [staged(read) for read in with_regions([reads[0] for _, reads in planned_], pad)]
        expected = np.zeros((4, *shape.shape), shape.element)
        for one in chosen:
            fill_row(expected[one.read.row], shape, one, pad, 3.0)
        got = cupy.zeros(expected.shape, expected.dtype)
        on_device = [Staged(one.read, None if one.voxels is None else cupy.asarray(one.voxels)) for one in chosen]
        resample_module.launch(got, shape, on_device, pad, 3.0)
        assert_near(got.get(), expected, shape)


def test_plain_labels_have_the_voxels_of_their_image():
    rng = np.random.default_rng(0)
    image, mask = rng.random((20, 20, 20)).astype("f4"), rng.integers(0, 9, (20, 20, 20)).astype("u1")
    settings_ = small_config(augment=GEOMETRY, pad="edge")
    infos = [array_info(image, spacing=(3.0, 1.0, 2.0)), array_info(mask)]
    parts = (Part("labels", kind="labels"),)
    shapes, reads = planned(image, ((4, 14),) * 3, settings_, parts=parts, infos=infos)
    known = [array_info(image, spacing=(3.0, 1.0, 2.0)), array_info(mask, spacing=(3.0, 1.0, 2.0))]
    _, expected = planned(image, ((4, 14),) * 3, settings_, parts=parts, infos=known)
    assert np.array_equal(made(shapes[1], reads[1], "edge"), made(shapes[1], expected[1], "edge"))
    with pytest.raises(stream.InvalidArgument, match="no voxel spacing"):
        planned(image, ((4, 14),) * 3, settings_, parts=parts, infos=infos[::-1])
