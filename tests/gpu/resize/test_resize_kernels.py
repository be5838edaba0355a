"""If this fails, tables, plans or kernels of resizing give something else than SciPy."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import ndimage

from linumpy.gpu.resize import plan as resize_plan
from linumpy.gpu.resize import resizing
from linumpy.gpu.resize.plan import ResizeTuning
from linumpy.gpu.resize.tables import MODES, AxisPlan, axis_matrix, unchanged
from linumpy.plan.boundary import anti_aliasing_sigmas
from linumpy.plan.grid.blocks import AffineGrid, ResamplePlan
from linumpy.plan.grid.regrid import plan_regrid
from linumpy.resample.blocks import block as block_module
from tests.support.budget import examples
from tests.support.gpu.emulator import emulated, needs_compiler
from tests.support.gpu.nvrtc import compile_kernel

DTYPES = ["u1", "u2", "i2", "f2", "f4", "f8"]
#: The last two have no room for tiles, or hardly any.
TUNINGS = [
    ResizeTuning(),
    ResizeTuning(outputs=8, pack_most=8, unroll=2),
    ResizeTuning(shared=3000),
    ResizeTuning(shared=100),
]
sizes = st.one_of(st.integers(1, 40), st.sampled_from([8, 16, 32, 48]))
shapes = st.integers(1, 4).flatmap(lambda rank: st.lists(st.tuples(sizes, sizes), min_size=rank, max_size=rank))
shapes = shapes.map(lambda pairs: [(min(n, 9), min(m, 9)) for n, m in pairs] if len(pairs) > 3 else pairs)
sigmas_of = st.one_of(st.just(0.0), st.floats(0.01, 9))
whole_axes = st.builds(
    AxisPlan, st.integers(1, 60), st.integers(1, 60), st.sampled_from([0, 1]), st.sampled_from(MODES), sigmas_of
)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(resizing, "load", emulated)


def image_of(dtype, shape, seed):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return rng.normal(0, 100, shape).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, endpoint=True).astype(dtype)


def by_scipy(image, output_shape, order, mode, sigmas):
    smooth = ndimage.gaussian_filter(image.astype(np.float64), sigmas, mode=mode)
    zoom = [m / n for n, m in zip(image.shape, output_shape, strict=True)]
    return ndimage.zoom(smooth, zoom, order=order, mode=mode, grid_mode=True)


def by_kernels(image, axes, target=None, tuning=resizing.DEFAULT):
    between = np.dtype("f8" if image.dtype == "f8" else "f4")
    return resizing.run_passes(image, axes, between, np.dtype(target or between), tuning)


@needs_compiler
@settings(max_examples=examples(300), deadline=None)
@given(
    shapes,
    st.sampled_from(DTYPES),
    st.sampled_from([0, 1]),
    st.sampled_from(MODES),
    st.sampled_from(["half", "none", "wide"]),
    st.sampled_from(TUNINGS),
    st.integers(0, 999),
)
def test_kernels_as_scipy(pairs, dtype, order, mode, smoothing, tuning, seed):
    shape, wanted = zip(*pairs, strict=True)
    image = image_of(dtype, shape, seed)
    wide = np.random.default_rng(seed).uniform(0, 7, len(shape))
    half = [max(0.0, (n / m - 1) / 2) for n, m in pairs]
    sigmas = {"half": half, "none": [0.0] * len(shape), "wide": wide}[smoothing]
    axes = resizing.plan_axes(shape, wanted, order, mode, sigmas)
    expected = by_scipy(image, wanted, order, mode, sigmas)
    scale = max(1.0, float(np.abs(image.astype("f8")).max()))
    got = resizing.resample_axes(image, wanted, order=order, mode=mode, sigmas=sigmas)
    assert got.shape == expected.shape
    assert np.allclose(got, expected, rtol=0, atol=(1e-12 if dtype == "f8" else 3e-6) * scale)
    if any(plan != unchanged(plan.size) for plan in axes):
        got = by_kernels(image, axes, tuning=tuning)
        assert got.shape == expected.shape
        assert np.allclose(got, expected, rtol=0, atol=(1e-12 if dtype == "f8" else 3e-6) * scale)


@needs_compiler
@settings(max_examples=examples(100), deadline=None)
@given(shapes, st.sampled_from(MODES), st.sampled_from([0, 1]), st.sampled_from(TUNINGS), st.integers(0, 999))
def test_what_is_not_finite_spreads_as_far_as_weights_do(pairs, mode, order, tuning, seed):
    shape, wanted = zip(*pairs, strict=True)
    rng = np.random.default_rng(seed)
    image = np.ones(shape, "f4")
    image[tuple(rng.integers(0, n) for n in shape)] = rng.choice([np.nan, np.inf])
    axes = resizing.plan_axes(shape, wanted, order, mode, rng.uniform(0, 2, len(shape)))
    touched = ~np.isfinite(image)
    for axis, plan in enumerate(axes):
        lines = np.moveaxis(touched, axis, 0)
        seen = (axis_matrix(plan) != 0).astype(int) @ lines.reshape(plan.size, -1).astype(int) > 0
        touched = np.moveaxis(seen.reshape(plan.length, *lines.shape[1:]), 0, axis)
    for got in (by_kernels(image, axes, tuning=tuning), resizing._on_host(image, axes, *[np.dtype("f4")] * 2)):
        assert np.array_equal(np.isfinite(got), ~touched)
        assert np.array_equal(np.isnan(got).any(), np.isnan(image).any() and touched.any())


@needs_compiler
def test_images_that_begin_anywhere():
    whole = image_of("f4", 24 * 32 + 1, 3)
    for start in (0, 1):
        image = whole[start : start + 24 * 32].reshape(24, 32)
        axes = resizing.plan_axes(image.shape, (12, 16), 1, "mirror", (0.5, 0.5))
        expected = by_scipy(image, (12, 16), 1, "mirror", (0.5, 0.5))
        assert np.allclose(by_kernels(image, axes), expected, atol=1e-3)


@needs_compiler
@pytest.mark.parametrize(("dtype", "target"), [("u1", "u1"), ("u2", "u2"), ("i2", "i2"), ("f4", "u1"), ("f4", "f2")])
@pytest.mark.parametrize("wanted", [(4, 5, 12), (9, 10, 7), (3, 10, 12)])
def test_the_last_pass_rounds_and_saturates(dtype, target, wanted):
    image = image_of(dtype, (9, 10, 12), 5)
    got = by_kernels(image, resizing.plan_axes(image.shape, wanted, 1, "mirror", (0, 0, 0)), target)
    expected = by_scipy(image, wanted, 1, "mirror", (0, 0, 0))
    if np.dtype(target).kind in "iu":
        info = np.iinfo(target)
        expected = np.clip(expected, info.min, info.max)
    assert got.dtype == target
    # A unit where rounding decides; float16 has 11 bits.
    assert np.abs(got.astype("f8") - expected).max() <= (0.51 if np.dtype(target).kind in "iu" else 0.2)


@given(
    st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), min_size=1, max_size=4),
    st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 3),
)
def test_no_order_of_passes_moves_fewer_bytes(pairs, itemsizes):
    shape, wanted = zip(*pairs, strict=True)
    changed = [axis for axis, (n, m) in enumerate(pairs) if n != m]
    chosen = resize_plan.order_axes(shape, wanted, changed, itemsizes)
    assert sorted(itertools.chain(*chosen)) == changed
    units = [[(axis,) for axis in changed]]
    last = (len(shape) - 2, len(shape) - 1)
    if set(last) <= set(changed):
        units.append([last, *((axis,) for axis in changed if axis not in last)])
    least = min(
        resize_plan.bytes_moved(shape, wanted, order, itemsizes)
        for unit in units
        for order in itertools.permutations(unit)
    )
    assert resize_plan.bytes_moved(shape, wanted, chosen, itemsizes) == least


def test_several_elements_are_loaded_at_once_only_where_rows_begin_there():
    dtypes = [np.dtype("f4")] * 3
    for shape, aligned, packed in [
        ((16, 32, 64), True, [True, True]),
        ((16, 32, 64), False, [False, True]),
        ((16, 32, 66), True, [False, False]),
    ]:
        wanted = (8, 15, shape[2] // 2)
        axes = resizing.plan_axes(shape, wanted, 1, "mirror", (0.5, 0.5, 0.5))
        steps = resize_plan.plan_steps(axes, dtypes, aligned, ResizeTuning())
        assert [step.kernel for step in steps] == ["planes", "along"]
        # Behind Z lie 15 rows of half as many columns.
        assert packed[1] == (wanted[1] * wanted[2] % 4 == 0)
        assert [step.packed for step in steps] == packed


def test_half_of_a_volume_is_two_launches_and_few_bytes():
    shape, wanted = (512, 512, 512), (256, 256, 256)
    axes = resizing.plan_axes(shape, wanted, 1, "mirror", (0.5, 0.5, 0.5))
    for source, most in (("f4", 0.88e9), ("u2", 0.61e9)):
        steps = resize_plan.plan_steps(axes, [np.dtype(source), np.dtype("f4"), np.dtype("f4")], True, ResizeTuning())
        assert [(step.kernel, step.packed, step.shape) for step in steps] == [
            ("planes", True, (512, 256, 256)),
            ("along", True, (256, 256, 256)),
        ]
        assert steps[0].shared <= ResizeTuning().shared
        moved = resize_plan.bytes_moved(shape, wanted, [(1, 2), (0,)], (np.dtype(source).itemsize, 4, 4))
        assert moved < most


def test_nothing_is_compiled_for_a_shape(monkeypatch):
    specs = set()
    monkeypatch.setattr(resizing, "load", lambda spec: specs.add(spec) or (lambda *_, **__: None))
    rng = np.random.default_rng(0)
    for _ in range(50):
        shape, wanted = rng.integers(1, 50, 3), rng.integers(1, 50, 3)
        axes = resizing.plan_axes(shape, wanted, 1, "mirror", np.maximum(0, (shape / wanted - 1) / 2))
        if any(plan != unchanged(plan.size) for plan in axes):
            by_kernels(np.zeros(shape, "f4"), axes)
    assert len(specs) <= 3  # the three kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["planes", "along", "along_x"])
def test_the_kernels_compile(name, dtype):
    kinds = [("f8", "sm_90")] if dtype == "f8" else [("f4", "sm_80"), (dtype, "sm_90")]
    for target, architecture in kinds:
        spec = resizing.kernel_spec(name, np.dtype(dtype), np.dtype("f8" if dtype == "f8" else "f4"), np.dtype(target))
        assert name.encode() in compile_kernel(spec, architecture)


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(["u1", "i2", "f4", "f8"]), st.sampled_from(TUNINGS), st.integers(0, 999))
def test_a_block_from_its_box_has_the_bits_of_the_whole(data, dtype, tuning, seed):
    """On a device, by the kernels, and on the host: passes go in the order of the whole, sums in that of the axis."""
    rng = np.random.default_rng(seed)
    rank = data.draw(st.integers(2, 3))
    shape = tuple(rng.integers(1, 40, rank).tolist())
    wanted = tuple(
        max(1, round(n * f)) for n, f in zip(shape, rng.choice([0.2, 0.5, 0.7, 1.0, 1.4], rank), strict=True)
    )
    regrid = plan_regrid(1.0, shape, [m / n for n, m in zip(shape, wanted, strict=True)], (0.0,) * rank)
    sigmas = anti_aliasing_sigmas(regrid.matrix)
    assume(regrid.shape == wanted and any(sigmas))
    grid = AffineGrid(shape, wanted, regrid.matrix, regrid.offset, 1, "nearest", sigmas)
    image = image_of(dtype, shape, seed)
    whole_axes = resizing.plan_axes(shape, wanted, 1, "nearest", sigmas)
    kinds = np.dtype("f8" if dtype == "f8" else "f4"), np.dtype(dtype)
    by_kernels = resizing.run_passes(image, whole_axes, *kinds)
    on_host = resizing._on_host(image, whole_axes, *kinds)
    for block in ResamplePlan(grid, tuple(int(rng.integers(1, n + 1)) for n in wanted)):
        if math.prod(block.shape) * 20 < math.prod(wanted):
            continue  # enough are left
        box, axes = np.ascontiguousarray(image[block.source_box]), block_module._tables(grid, block)
        out = np.empty(block.shape, dtype)
        assert resizing.run_passes(box, axes, *kinds, tuning, out) is out
        assert out.tobytes() == np.ascontiguousarray(by_kernels[block.box]).tobytes()
        block_module.make_box(box, grid, block, 0.0, out)
        assert out.tobytes() == np.ascontiguousarray(on_host[block.box]).tobytes()
