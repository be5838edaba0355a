"""Sampling by the texture unit: what it takes, its kernel on the CPU with a texture made up, and on a device."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
from budget import examples
from emulator import COMPILER, emulated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nvrtc import compilations, compile_kernel
from scipy import ndimage

from linumpy.device import to_host
from linumpy.gpu import sampling_launch, sampling_paths, texture
from linumpy.gpu.geometric import apply_displacement_field, rotate, shift, zoom
from linumpy.gpu.interpolation import affine_transform, map_coordinates
from linumpy.gpu.kernels import KernelSpec
from linumpy.gpu.sampling_launch import MODES

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: the kernels run on a GPU only")
DTYPES = ["u1", "u2", "f2", "f4"]
TEXTURE = {"interpolation": "texture", "order": 1}


@contextmanager
def made_up_texture(image):
    """What emulator.h takes for a texture: floats, integers as parts of their largest number."""
    largest = np.iinfo(image.dtype).max if image.dtype.kind == "u" else 1
    data = np.ascontiguousarray(image.astype("f4") / np.float32(largest))
    depth, height, width = (1,) * (3 - image.ndim) + image.shape
    record = np.array([data.ctypes.data, width, height, depth], np.int64)
    yield np.uint64(record.ctypes.data)


@pytest.fixture
def as_if_on_a_device(monkeypatch):
    monkeypatch.setattr(sampling_paths, "is_device_array", lambda _: True)
    monkeypatch.setattr(texture, "load", emulated)
    monkeypatch.setattr(texture, "_texture_of", made_up_texture)


def image_of(dtype, shape, seed):
    rng = np.random.default_rng(seed)
    return (
        rng.integers(0, np.iinfo(dtype).max, shape, dtype)
        if dtype[0] == "u"
        else rng.uniform(-9, 9, shape).astype(dtype)
    )


def tolerance(image):
    """As documented, of the range of the whole image; and rounding."""
    image = image.astype("f8")
    return texture.ERROR[image.ndim] * float(np.ptp(image)) + 1e-5 * float(np.abs(image).max())


def agree(got, image, expected, within):
    """Within the tolerance where a place is inside, and exact elsewhere."""
    exact = 1e-5 * float(np.abs(image.astype("f8")).max()) + 1e-6
    rounded = {"u": 0.5, "f": 5e-3 if image.dtype == np.float16 else 0}[image.dtype.kind]
    allowed = np.where(within, tolerance(image), exact) + rounded
    return (np.abs(got.astype("f8") - expected) <= allowed).all()


@st.composite
def cases(draw):
    rank = draw(st.sampled_from([2, 3]))
    shape = draw(st.tuples(*[st.integers(1, 9)] * rank))
    seed = draw(st.integers(0, 2**32 - 1))
    options = {"mode": draw(st.sampled_from(MODES)), "cval": 7.0}
    return image_of(draw(st.sampled_from(DTYPES)), shape, seed), np.random.default_rng(seed), options


def is_within(image, places):
    return np.all([(c >= 0) & (c <= n - 1) for c, n in zip(places, image.shape, strict=True)], axis=0)


def check_points(image, rng, options, kind, given_shape, send=lambda a: a):
    rank = image.ndim
    places = np.stack([rng.uniform(-3, n + 2, given_shape) for n in image.shape]).astype(kind)
    whole = rng.uniform(size=given_shape) < 0.2
    places[:, whole] = np.round(places[:, whole])
    got = to_host(map_coordinates(send(image), send(places), **options, **TEXTURE))
    assert got.shape == given_shape
    assert got.dtype == image.dtype
    line = places.astype("f8").reshape(rank, -1)
    expected = ndimage.map_coordinates(image.astype("f8"), line, order=1, **options).reshape(given_shape)
    assert agree(got, image, expected, is_within(image, places))


def check_grids(image, rng, options, send=lambda a: a):
    rank = image.ndim
    matrix = np.diag(rng.uniform(0.5, 2, rank)) + rng.normal(0, 0.3, (rank, rank)) * rng.integers(0, 2)
    offset, shape = rng.uniform(-2, 2, rank), tuple(int(n) for n in rng.integers(1, 35, rank))
    voxels = np.indices(shape).reshape(rank, -1)
    places = (matrix @ voxels + offset[:, None]).reshape(rank, *shape)
    # Beside the ends of the image the constant mode jumps: rounding decides on which side a place is.
    edge = np.any([np.minimum(abs(c), abs(c - n + 1)) < 1e-9 for c, n in zip(places, image.shape, strict=True)], axis=0)
    got = to_host(affine_transform(send(image), matrix, offset, output_shape=shape, **options, **TEXTURE))
    assert got.shape == shape
    expected = ndimage.affine_transform(image.astype("f8"), matrix, offset, shape, order=1, **options)
    expected[edge], got[edge] = 0, 0
    assert agree(got, image, expected, is_within(image, places))
    field = rng.uniform(-3, 3, (rank, *shape)).astype(rng.choice(["f4", "f8"]))
    spacing = None if rng.integers(2) else tuple(rng.uniform(0.3, 3, rank))
    sizes = np.reshape(spacing or 1.0, (-1, *[1] * rank))
    places = field.astype("f8") / sizes + np.indices(shape)
    got = to_host(apply_displacement_field(send(image), send(field), spacing=spacing, **options, **TEXTURE))
    expected = ndimage.map_coordinates(image.astype("f8"), places, order=1, **options)
    assert agree(got, image, expected, is_within(image, places))


@needs_compiler
@pytest.mark.usefixtures("as_if_on_a_device")
@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), st.sampled_from(["f4", "f8", "i4"]), st.sampled_from([(), (0,), (1,), (2000,), (3, 4, 5)]))
def test_points_as_scipy(case, kind, shape):
    check_points(*case, kind, shape)


@needs_compiler
@pytest.mark.usefixtures("as_if_on_a_device")
@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_grids_as_scipy(case):
    check_grids(*case)


@needs_compiler
@pytest.mark.usefixtures("as_if_on_a_device")
def test_a_fraction_is_rounded_to_1_256():
    """By the kernel: what the hardware does with further bits does not matter."""
    image = np.array([[0.0, 256.0]] * 2, "f4")
    for kind in ("f4", "f8"):
        x = np.random.default_rng(0).uniform(0, 1, 500).astype(kind)
        got = map_coordinates(image, np.stack([np.zeros(500, kind), x]), **TEXTURE)
        assert np.array_equal(got, np.rint(x * 256))
    # And where a float has few bits left.
    image = np.zeros((1, texture.LARGEST), "f4")
    image[0, -1] = 256
    x = np.linspace(texture.LARGEST - 2, texture.LARGEST - 1, 4097)
    for kind in ("f4", "f8"):
        places = np.stack([np.zeros_like(x), x]).astype(kind)
        got = map_coordinates(image, places, **TEXTURE)
        assert np.abs(got - (places[1].astype("f8") - texture.LARGEST + 2) * 256).max() <= 0.5


def test_the_documented_error_is_what_rounding_can_do():
    """The steepest that a linear interpolation can be: one voxel unlike all others around a place."""
    for rank in (2, 3):
        image = np.ones((2,) * rank)
        image[(0,) * rank] = 0
        place = np.full((rank, 1), 1 / 512)
        off = ndimage.map_coordinates(image, place, order=1)[0]
        assert off <= texture.ERROR[rank] < 2.7 * off  # the unit's products of weights take the rest


@needs_compiler
@pytest.mark.usefixtures("as_if_on_a_device")
@pytest.mark.parametrize("mode", MODES)
def test_places_that_are_no_numbers(mode):
    image = image_of("f4", (5, 6, 7), 0)
    places = np.ones((3, 6), "f8")
    places[1] = [np.nan, np.inf, -np.inf, 1e300, -1e300, 2]
    with pytest.MonkeyPatch.context() as patch:
        got = map_coordinates(image, places, mode=mode, cval=5, **TEXTURE)
        patch.setattr(sampling_paths, "is_device_array", lambda _: False)
        expected = map_coordinates(image, places, mode=mode, cval=5, order=1)
    assert np.array_equal(got[:5], expected[:5], equal_nan=True)
    assert got[5] == image[1, 2, 1]


@needs_compiler
@pytest.mark.usefixtures("as_if_on_a_device")
def test_channels_and_all_that_calls_it():
    image = image_of("u2", (3, 6, 7, 8), 0)
    close = {"rtol": 0, "atol": 1 + texture.ERROR[3] * 65535}
    options = {"mode": "nearest"}
    for call in (
        lambda **more: shift(image, (0, 0.3, -1.2, 2.7), **options, **more),
        lambda **more: zoom(image, (1, 1.3, 0.7, 2), **options, **more),
        lambda **more: rotate(image, 17.3, (1, 3), **options, **more),
    ):
        got = call(**TEXTURE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling_paths, "is_device_array", lambda _: False)
            exact = call(order=1)
        assert not np.array_equal(got, exact)
        assert np.allclose(got.astype("f8"), exact, **close)


@needs_compiler
@pytest.mark.usefixtures("as_if_on_a_device")
def test_grids_that_are_longer_than_launches(monkeypatch):
    monkeypatch.setattr(sampling_launch, "GRID_LIMIT", 1)
    for seed in range(4):
        check_grids(image_of("f4", (9, 8, 7)[: 2 + seed % 2], seed), np.random.default_rng(seed), {"mode": "mirror"})


def test_host_arrays_are_sampled_exactly():
    image = image_of("f4", (5, 6, 7), 0)
    places = np.random.default_rng(0).uniform(0, 5, (3, 100))
    expected = ndimage.map_coordinates(image, places, order=3)
    assert np.array_equal(map_coordinates(image, places, order=3, interpolation="texture"), expected)


@pytest.mark.usefixtures("as_if_on_a_device")
@pytest.mark.parametrize(
    ("image", "options", "message"),
    [
        (np.ones((3, 3), "f4"), {"order": 0}, "it needs order=1, not order=0"),
        (np.ones((3, 3), "f4"), {"order": 3}, "it needs order=1, not order=3"),
        (np.ones((3, 3), "f8"), {}, "not float64: cast the image first"),
        (np.ones((3, 3), "i2"), {}, "not int16"),
        (np.ones(3, "f4"), {}, "images of 2 or 3 axes, and this one has 1"),
        (np.ones((1, 16385), "u1"), {}, r"up to 16384 voxels along an axis, and the image's shape is \(1, 16385\)"),
    ],
)
def test_what_a_texture_does_not_take(image, options, message):
    with pytest.raises(ValueError, match=message):
        affine_transform(image, np.eye(image.ndim), **{**TEXTURE, **options})
    with pytest.raises(ValueError, match=message):
        map_coordinates(image, np.zeros((image.ndim, 1)), **{**TEXTURE, **options})
    with pytest.raises(ValueError, match=message):
        apply_displacement_field(image, np.zeros((image.ndim, *image.shape)), **{**TEXTURE, **options})


@pytest.mark.usefixtures("as_if_on_a_device")
def test_four_axes_that_are_turned():
    with pytest.raises(ValueError, match="this one has 4"):
        affine_transform(np.ones((2, 2, 2, 2), "f4"), np.eye(4) * 2, **TEXTURE)


@pytest.mark.parametrize("wrong", ["linear", None, ["texture"]])
def test_another_interpolation(wrong):
    image = np.ones((3, 3))
    for call in (
        lambda: map_coordinates(image, np.zeros((2, 1)), interpolation=wrong),
        lambda: affine_transform(image, np.eye(2), interpolation=wrong),
        lambda: apply_displacement_field(image, np.zeros((2, 3, 3)), interpolation=wrong),
        lambda: shift(image, 1, interpolation=wrong),
    ):
        with pytest.raises(ValueError, match="is unknown: choose one of exact, texture"):
            call()


def specs():
    for source, target, rank, mode, places, kind in [
        ("u1", "u1", 3, "constant", "0", "f4"),
        ("u2", "f4", 3, "grid-wrap", "0", "f8"),
        ("f2", "f2", 2, "reflect", "1", "f4"),
        ("f4", "i4", 3, "mirror", "1", "f8"),
        ("f4", "f8", 3, "grid-constant", "2", "f4"),
        ("u2", "u2", 2, "nearest", "3", "f4"),
        ("f4", "f4", 3, "wrap", "3", "f4"),
    ]:
        image, out = np.empty((1,) * rank, source), np.empty((1,) * rank, target)
        spec = texture.kernel_spec(image, np.empty((rank, 1), kind), mode, out, places)
        yield spec
    large = {**dict(spec.defines), "INDEX": "int64"}
    yield KernelSpec(spec.source, spec.name, tuple(large.items()))


@pytest.mark.parametrize(("spec", "architecture"), compilations(specs()))
def test_the_kernels_compile(spec, architecture):
    assert spec.name.encode() in compile_kernel(spec, architecture)


@pytest.fixture
def released(cupy):
    yield
    texture.release_textures()


@pytest.mark.gpu
@pytest.mark.usefixtures("released")
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), st.sampled_from(["f4", "f8", "i4"]), st.sampled_from([(), (0,), (1,), (2000,), (3, 4, 5)]))
def test_points_on_the_gpu(cupy, case, kind, shape):
    check_points(*case, kind, shape, cupy.asarray)


@pytest.mark.gpu
@pytest.mark.usefixtures("released")
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_grids_on_the_gpu(cupy, case):
    check_grids(*case, cupy.asarray)


@pytest.mark.gpu
@pytest.mark.usefixtures("released")
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_voxels_and_a_linear_field(cupy, dtype):
    """Voxels come back as they are, and of a linear field the error is known: below 1/192 of a voxel an axis."""
    image = image_of(dtype, (30, 31, 32), 0)
    got = to_host(affine_transform(cupy.asarray(image), np.eye(3), **TEXTURE))
    assert np.allclose(got.astype("f8"), image, rtol=1e-6 if dtype != "f2" else 1e-3, atol=0)
    z, y, x = np.indices((30, 31, 32))
    ramp = (2 * z + 3 * y + x).astype(dtype)
    places = np.random.default_rng(1).uniform(0, 29, (3, 20000)).astype("f4")
    got = to_host(map_coordinates(cupy.asarray(ramp), cupy.asarray(places), output=np.float32, **TEXTURE))
    exact = 2 * places[0].astype("f8") + 3 * places[1] + places[2]
    off = np.abs(got - exact)
    # uint16 is read as parts of 65535, of whose bits the unit keeps 17; float16 is rounded as such.
    besides = {"u2": 65535 / 2**17, "f2": 180 / 2**11}.get(dtype, 1e-3)
    assert off.max() <= 6 / 192 + besides
    assert off.max() > 1 / 512  # it was the texture unit


@pytest.mark.gpu
@pytest.mark.usefixtures("released")
def test_a_kept_texture_is_no_other_image(cupy):
    """On several streams and in several threads, one image after another of the same shape."""
    places = np.random.default_rng(0).uniform(0, 59, (3, 200_000)).astype("f4")
    there = cupy.asarray(places)
    images = [cupy.full((60, 60, 60), 1000 * number, "f4") for number in range(8)]
    cupy.cuda.get_current_stream().synchronize()
    wrong = []

    def work(mine):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            for number in mine * 5:
                got = map_coordinates(images[number], there, mode="nearest", **TEXTURE)
                if not bool((abs(got - 1000 * number) < 1).all()):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=([number, 7 - number],)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    assert len(texture._kept) == 1
    texture.release_textures()
    assert not texture._kept


@pytest.mark.gpu
@pytest.mark.usefixtures("released")
def test_nothing_is_compiled_for_a_shape(cupy, monkeypatch):
    made = []
    real = cupy.RawModule
    monkeypatch.setattr(cupy, "RawModule", lambda *args, **options: made.append(1) or real(*args, **options))
    for number in range(1, 20):
        image = cupy.ones((number, 20 - number, 7), "u1")
        map_coordinates(image, cupy.zeros((3, number), "f4"), **TEXTURE)
        affine_transform(image, np.eye(3), output_shape=(4, number, 2), **TEXTURE)
    assert len(made) <= 2


@pytest.mark.gpu
@pytest.mark.usefixtures("released")
def test_what_a_texture_does_not_take_on_the_gpu(cupy):
    with pytest.raises(ValueError, match="up to 16384 voxels"):
        map_coordinates(cupy.ones((1, 1, 16385), "u1"), cupy.zeros((3, 1)), **TEXTURE)
    largest = cupy.arange(16384, dtype="f4").reshape(1, 1, -1)
    places = cupy.zeros((3, 3))
    places[2] = cupy.asarray([0.5, 9999.25, 16383])
    assert to_host(map_coordinates(largest, places, **TEXTURE)) == pytest.approx([0.5, 9999.25, 16383])
    with pytest.raises(ValueError, match="not float64"):
        affine_transform(cupy.ones((3, 3)), np.eye(2), **TEXTURE)
