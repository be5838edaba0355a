"""If this fails, displaced voxels, channels or stacks are sampled unlike SciPy."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import ndimage

from linumpy.device import to_host
from linumpy.gpu import interpolation
from linumpy.gpu.interpolation import affine_transform, resample_volume, resize
from linumpy.gpu.ndimage import dispatch, sampling, sampling_launch, transform
from linumpy.gpu.ndimage.geometric import apply_displacement_field, rotate
from linumpy.gpu.ndimage.sampling_launch import MODES
from tests.gpu.ndimage.test_sampling import KINDS, close, image_of
from tests.support.budget import examples, matrix
from tests.support.gpu.emulator import COMPILER, needs_compiler
from tests.support.gpu.on_cpu import by_kernels

ORDERS = [0, 1, 3]


def shapes_of(rank, most=9):
    return st.tuples(*[st.integers(1, most)] * rank)


@st.composite
def fields(draw):
    """An image, a field on a grid of another shape, the size of a voxel in its unit, and what to do."""
    rank = draw(st.sampled_from([2, 3]))
    shape = draw(shapes_of(rank))
    grid = draw(
        st.sampled_from([shapes_of(rank), st.tuples(*[st.sampled_from([1, 2, 33, 40])] * rank)]).flatmap(lambda s: s)
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spacing = draw(st.sampled_from([None, "µm"])) and tuple(float(one) for one in rng.uniform(0.3, 20, rank))
    far = draw(st.sampled_from([0.4, 3.0, 40.0]))
    field = rng.uniform(-far, far, (rank, *grid))
    whole = rng.uniform(size=grid) < 0.3  # these hit voxels, and the ends of the image
    field[:, whole] = np.round(field[:, whole])
    field *= np.reshape(spacing or 1.0, (-1, *[1] * rank))
    field = field.astype(draw(st.sampled_from(["f4", "f8", "i2", "f2", "i4"])))
    dtype, order, mode = draw(st.sampled_from(KINDS))
    image = image_of(dtype, shape, draw(st.integers(0, 99)))
    return image, field, spacing, {"order": order, "mode": mode, "cval": 7.0}


def by_scipy(image, field, spacing, **options):
    """Places in float64, one after another."""
    places = field.astype("f8")
    for axis, n in enumerate(field.shape[1:]):
        line = np.arange(n).reshape([-1 if other == axis else 1 for other in range(len(field))])
        places[axis] = places[axis] / (spacing[axis] if spacing else 1) + line
    return places, ndimage.map_coordinates(image, places, **options)


def agree(got, expected, image, places, order):
    """All but places next to a tie, where the nearest voxel is asked for."""
    good = close(got, expected, image, order)
    tie = (np.abs(places - np.floor(places) - 0.5) < 1e-6).any(0)
    return (good | tie).all() if order == 0 else good.all()


@by_kernels
@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields())
def test_displaced_voxels_as_scipy(case):
    image, field, spacing, options = case
    got = apply_displacement_field(image, field, spacing=spacing, **options)
    places, expected = by_scipy(image, field, spacing, **options)
    assert got.dtype == image.dtype
    assert agree(got, expected, image, places, options["order"])


@by_kernels
def test_units_are_divided_by_as_a_division_does():
    """One bit more or less, and a voxel at the end lies outside. The product with 1 / size is off for many of these."""
    image = np.arange(1.0, 51.0).reshape(50, 1)
    rng = np.random.default_rng(0)
    off = 0
    for size in (49.0, 0.1, 3.3, *rng.uniform(0.01, 1000, 20)):
        back = np.arange(50.0).reshape(50, 1) * size
        field = np.stack([-back, np.zeros_like(back)])
        got = apply_displacement_field(image, field, spacing=(size, 1.0), cval=-1.0)
        assert np.array_equal(got, by_scipy(image, field, (size, 1.0), cval=-1.0, order=1)[1])
        off += (back * (1 / size) != back / size).sum()
    assert off > 50


@by_kernels
@pytest.mark.parametrize(("order", "rank"), matrix(ORDERS, [2, 3]))
def test_grids_that_are_longer_than_launches(monkeypatch, rank, order):
    """Their blocks are numbered along one axis."""
    image = image_of("f4", (9, 8, 7)[:rank], 0)
    field = np.random.default_rng(0).uniform(-3, 3, (rank, *(70, 20, 40)[:rank]))
    expected = apply_displacement_field(image, field, order=order, mode="mirror")
    monkeypatch.setattr(sampling_launch, "GRID_LIMIT", 1)
    assert np.array_equal(apply_displacement_field(image, field, order=order, mode="mirror"), expected)
    places, truth = by_scipy(image, field, None, order=order, mode="mirror")
    assert agree(expected, truth, image, places, order)


@by_kernels
@pytest.mark.parametrize(("mode", "spacing"), matrix(MODES, [None, (2.0, 3.0, 0.5)]))
def test_fields_that_are_no_numbers(mode, spacing):
    image = image_of("f4", (5, 6, 7), 1)
    bad = [np.nan, np.inf, -np.inf, 1e300, -1e300]
    for axis in range(3):
        field = np.zeros((3, 5, 6, 7))
        field[axis, 0, 0, :5] = bad
        got = apply_displacement_field(image, field, mode=mode, cval=5.0, spacing=spacing)
        with pytest.MonkeyPatch.context() as patch:
            for module in (transform, dispatch):
                patch.setattr(module, "is_device_array", lambda _: False)
            host = apply_displacement_field(image, field, mode=mode, cval=5.0, spacing=spacing)
        assert np.array_equal(got, host, equal_nan=True)
        assert np.array_equal(got[1:], image[1:])
        if mode in ("constant", "grid-constant"):
            assert (got[0, 0, :5] == 5).all()


def affine_of(seed, rank, turned):
    rng = np.random.default_rng(seed)
    matrix = np.diag(rng.uniform(0.5, 2, rank)) + (rng.normal(0, 0.3, (rank, rank)) if turned else 0)
    return matrix, rng.uniform(-2, 2, rank), tuple(int(n) for n in rng.integers(1, 12, rank))


@by_kernels
@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=shapes_of(4, 7),
    kind=st.sampled_from(KINDS),
    turned=st.booleans(),
    layout=st.sampled_from(["C", "F", "gaps"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_channels_as_scipy(shape, kind, turned, layout, seed):
    dtype, order, mode = kind
    image = image_of(dtype, shape, seed)
    if layout == "F":
        image = np.asfortranarray(image)
    elif layout == "gaps":
        image = np.repeat(image, 2, axis=3)[..., ::2]
    matrix, offset, out_shape = affine_of(seed, 3, turned)
    full, moved = np.eye(4), np.zeros(4)
    full[1:, 1:], moved[1:] = matrix, offset
    options = {"output_shape": (shape[0], *out_shape), "order": order, "mode": mode, "cval": 3.0}
    out = np.full((shape[0], *out_shape[:2], 2 * out_shape[2]), 9, image.dtype)[..., ::2] if layout == "gaps" else None
    got = affine_transform(image, np.column_stack([full, moved]), output=out, **options)
    assert out is None or got is out
    expected = ndimage.affine_transform(image, full, moved, **options)
    if mode == "reflect" and order > 1:  # SciPy's filter of short axes is off there, and mixes channels a little
        options["output_shape"] = out_shape
        expected = np.stack([ndimage.affine_transform(one, matrix, offset, **options) for one in image])
    off = ~close(got, expected, image, order)
    # At the ends of the image the constant modes jump: rounding decides on which side a place is.
    assert off.mean() <= (0.02 if mode == "constant" or order == 0 else 0)


@by_kernels
@pytest.mark.parametrize(("order", "rank"), matrix([0, 1, 2], [3, 2]))
def test_a_stack_is_its_images_to_the_bit(monkeypatch, rank, order):
    """In one launch, and in several where a launch is short of blocks."""
    stack = image_of("f4", (3, 2, 9, 20, 12)[: rank + 2], 0)
    linear = np.eye(rank) * 0.8 + np.random.default_rng(1).normal(0, 0.2, (rank, rank))
    offset = (0.25, -1.5, 2.0)[:rank]
    full, moved = np.eye(rank + 2), np.zeros(rank + 2)
    full[2:, 2:], moved[2:] = linear, offset
    options = {"order": order, "mode": "grid-wrap"}
    expected = np.stack([[affine_transform(one, linear, offset, **options) for one in row] for row in stack])
    channels = image_of("f4", (19, 9, 20, 12)[: rank + 1], 3)
    field = np.random.default_rng(2).normal(0, 1, (rank, *channels.shape[1:]))
    field.flat[5] = np.nan
    singly = np.stack([apply_displacement_field(one, field, **options) for one in channels])
    for most in (2**31 - 1, 1):
        monkeypatch.setattr(sampling, "_MAX_BLOCKS", most)
        assert affine_transform(stack, full, moved, **options).tobytes() == expected.tobytes()
        for enough in (2**20, 1):  # a block for each image, and for several of them, the last ones being fewer
            monkeypatch.setattr(sampling, "_ENOUGH_BLOCKS", enough)
            got = apply_displacement_field(channels, field, channel_axis=0, **options)
            assert got.tobytes() == singly.tobytes()


@by_kernels
@pytest.mark.parametrize("axes", [(1, 2), (0, 1), (0, 3)])
@pytest.mark.parametrize("order", [1, 3])
def test_planes_are_turned_by_themselves(order, axes):
    """What is not finite, and coefficients that are given, stay in their plane, as in SciPy."""
    image = image_of("f8", (5, 6, 7, 3), 0)
    if order == 1:
        image[2, 3, 4, 1] = np.nan
    options = {"order": order, "mode": "grid-constant", "prefilter": False}
    got, expected = rotate(image, 25, axes, **options), ndimage.rotate(image, 25, axes, **options)
    assert np.allclose(got, expected, atol=1e-9 * np.nanmax(np.abs(image)), equal_nan=True)


@by_kernels
@pytest.mark.parametrize("order", [0, 1, 3])
def test_places_in_an_array_of_more_axes_than_the_image(order):
    """They were sampled as far as the first two axes reach; the rest was what memory held."""
    image = image_of("f4", (9, 11), 0)
    places = np.random.default_rng(0).uniform(0, 8, (2, 3, 2, 9, 17))
    got = interpolation.map_coordinates(image, places, order=order)
    assert agree(got, ndimage.map_coordinates(image, places, order=order), image, places, order)


@pytest.mark.usefixtures("as_if_on_a_device")
@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda m, o: m.__setitem__((0, 0), 2.0), {}),
        (lambda m, o: m.__setitem__((0, 1), 0.1), {}),
        (lambda m, o: m.__setitem__((2, 0), 0.1), {}),
        (lambda m, o: o.__setitem__(0, 1.0), {}),
        (lambda m, o: None, {"output_shape": (2, 4, 4, 4)}),
        (lambda m, o: None, {"order": 3, "prefilter": False}),
        (lambda m, o: None, {"order": 2}),
    ],
)
@needs_compiler
def test_maps_that_mix_channels(change, options):
    image, matrix, offset = image_of("f4", (3, 4, 4, 4), 0), np.eye(4), np.zeros(4)
    change(matrix, offset)
    options = {"order": 1, **options}
    got = affine_transform(image, matrix, offset, **options)
    assert np.allclose(got, ndimage.affine_transform(image, matrix, offset, **options), atol=1e-3)


@pytest.fixture(params=["host", "device"])
def either(request):
    if request.param == "device":
        if COMPILER is None:
            pytest.skip("no C++ compiler")
        request.getfixturevalue("as_if_on_a_device")


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(("order", "rank"), matrix(ORDERS, [3, 2]))
def test_channels_are_deformed_alike(order, rank):
    shape, grid = (6, 7, 8)[:rank], (5, 9, 4)[:rank]
    field = np.random.default_rng(0).normal(0, 2, (rank, *grid))
    channels = [image_of("u2", shape, seed) // 4 + 20000 for seed in range(3)]  # splines that overshoot fit, too
    options = {"order": order, "mode": "reflect"}
    expected = [apply_displacement_field(one, field, **options) for one in channels]
    for axis in range(-rank - 1, rank + 1):
        image, wanted = np.stack(channels, axis), np.stack(expected, axis)
        got = apply_displacement_field(image, field, channel_axis=axis, **options)
        assert got.dtype == image.dtype
        assert np.array_equal(got, wanted)
        for out in (
            np.empty(wanted.shape, "f4"),
            np.empty((*wanted.shape[:-1], 2 * wanted.shape[-1]), "f4")[..., 1::2],
        ):
            assert apply_displacement_field(image, field, channel_axis=axis, output=out, **options) is out
            assert np.abs(out - wanted).max() <= 0.5 + 1e-2


@pytest.mark.usefixtures("either")
def test_an_image_may_be_its_own_output():
    image = image_of("f4", (4, 6, 7, 8), 0)
    expected = affine_transform(image, np.eye(4), (0, 1, 0.5, 0), mode="nearest")
    assert affine_transform(image, np.eye(4), (0, 1, 0.5, 0), mode="nearest", output=image) is image
    assert np.array_equal(image, expected)
    field = np.random.default_rng(0).normal(size=(3, 6, 7, 8))
    expected = apply_displacement_field(image[0], field, output="f8")
    assert np.array_equal(apply_displacement_field(image[0], field, output=field[1]), expected)


@pytest.mark.parametrize("order", [0, 1, 3])
def test_resizing_leaves_channels_alone(order):
    image = image_of("f4", (3, 6, 7, 8), 0)
    got = resize(image, (3, 4, 9, 5), order=order)
    assert np.allclose(got, np.stack([resize(one, (4, 9, 5), order=order) for one in image]), atol=1e-3)
    got, spacing = resample_volume(image, (1, 1, 2, 3), (1, 2, 1.5, 2), order=order)
    singly = np.stack([resample_volume(one, (1, 2, 3), (2, 1.5, 2), order=order)[0] for one in image])
    assert spacing[0] == 1
    assert np.allclose(got, singly, atol=1e-3)


@pytest.mark.gpu
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields())
def test_displaced_voxels_on_the_gpu(cupy, case):
    image, field, spacing, options = case
    got = apply_displacement_field(cupy.asarray(image), cupy.asarray(field), spacing=spacing, **options)
    assert isinstance(got, cupy.ndarray)
    places, expected = by_scipy(image, field, spacing, **options)
    assert agree(to_host(got), expected, image, places, options["order"])


@pytest.mark.gpu
@pytest.mark.parametrize("order", range(6))
@pytest.mark.parametrize("rank", [2, 3])
def test_stacks_on_the_gpu(cupy, rank, order):
    stack = image_of("f4", (40, 3, 20, 31, 18)[: rank + 2], 0)
    linear = np.eye(rank) * 0.8 + np.random.default_rng(1).normal(0, 0.2, (rank, rank))
    full = np.eye(rank + 2)
    full[2:, 2:] = linear
    options = {"order": order, "mode": "mirror"}
    got = affine_transform(cupy.asarray(stack), full, **options)
    for place in ((0, 0), (17, 1), (39, 2)):
        single = affine_transform(cupy.asarray(stack[place]), linear, **options)
        assert got[place].get().tobytes() == single.get().tobytes()
        expected = ndimage.affine_transform(stack[place], linear, **options)
        assert close(got[place].get(), expected, stack, order).mean() > 0.999
    turned = rotate(cupy.asarray(stack), 20, (1, 2), **options).get()
    assert close(turned, ndimage.rotate(stack, 20, (1, 2), **options), stack, order).mean() > 0.999
    places = np.random.default_rng(0).uniform(0, 8, (2, 3, 2, 9, 17))
    got = interpolation.map_coordinates(
        cupy.asarray(stack[0, 0, :20, :18].reshape(-1, 18)), cupy.asarray(places), **options
    )
    expected = ndimage.map_coordinates(stack[0, 0, :20, :18].reshape(-1, 18), places, **options)
    assert close(got.get(), expected, stack, order).all()


@pytest.mark.gpu
@pytest.mark.parametrize("spacing", [None, (2.0, 3.0, 0.5)])
@pytest.mark.parametrize("order", [0, 1])
def test_no_memory_but_the_output_for_a_field(cupy, order, spacing):
    shape = (100, 110, 120)
    image = cupy.asarray(np.random.default_rng(0).random(shape, "f4"))
    field = cupy.asarray(np.random.default_rng(1).random((3, *shape), "f4"))
    apply_displacement_field(image, field, order=order, spacing=spacing)  # compiled, and all that is kept is there
    pool = cupy.get_default_memory_pool()
    cupy.cuda.get_current_stream().synchronize()
    pool.free_all_blocks()
    before = pool.total_bytes()
    out = apply_displacement_field(image, field, order=order, spacing=spacing)
    assert pool.total_bytes() - before <= out.nbytes + 2**21


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["u2", "f4", "f8"])
def test_channels_are_deformed_on_the_gpu(cupy, order, dtype):
    image = image_of(dtype, (3, 20, 21, 22), 0)
    field = np.random.default_rng(0).normal(0, 2, (3, 20, 21, 22)).astype("f4")
    for axis in (0, 3):
        stack = np.moveaxis(image, 0, axis)
        got = apply_displacement_field(
            cupy.asarray(stack), cupy.asarray(field), channel_axis=axis, order=order, mode="mirror"
        )
        expected = np.stack([by_scipy(one, field, None, order=order, mode="mirror")[1] for one in image], axis)
        assert close(to_host(got), expected, image, order).mean() > 0.999


@pytest.mark.gpu
@pytest.mark.parametrize("order", [0, 1, 3])
def test_resizing_leaves_channels_alone_on_the_gpu(cupy, order):
    image = image_of("f4", (3, 16, 17, 18), 0)
    got = to_host(resize(cupy.asarray(image), (3, 8, 20, 5), order=order))
    assert np.abs(got - resize(image, (3, 8, 20, 5), order=order)).max() < 1e-4 * np.abs(image).max()
    got, spacing = resample_volume(cupy.asarray(image), (1, 1, 2, 3), (1, 2, 1.5, 2), order=order)
    expected, reached = resample_volume(image, (1, 1, 2, 3), (1, 2, 1.5, 2), order=order)
    assert spacing == reached
    assert np.abs(to_host(got) - expected).max() < 1e-4 * np.abs(image).max()
