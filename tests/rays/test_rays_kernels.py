"""If this fails, the kernels of rays give other bits than the CPU."""

import functools
import re
from dataclasses import fields

import numpy as np
import pytest

from linumpy.gpu.kernels import source_text
from linumpy.rays import PCG32, compositing, generate_training_samples, launch, march, samples
from tests.support.budget import first, matrix
from tests.support.gpu.emulator import Kernel, emulated, library, needs_compiler
from tests.support.gpu.nvrtc import compilations, compile_kernel, compile_with_ptx, declared_shared
from tests.support.oracles.ray_scenes import BOX, grid, images, to_device, without_distributions

pytestmark = pytest.mark.needs_core
SPECS = [
    launch.kernel_spec(images=from_images, grows=grows, ordered=ordered)
    for from_images in (False, True)
    for grows in (False, True)
    for ordered in (False, True)
]
SPECS += [
    launch.kernel_spec(images=True, grows=False, ordered=False, **{option: True})
    for option in ("weighted", "lengths", "per_sample")
]
COMPOSITES = [compositing.kernel_spec(name) for name in ("composite", "composite_backward")]
STEPS = [{}, {"cone_angle": 1 / 64, "max_step": 0.05}]


@pytest.fixture
def by_kernel(monkeypatch):
    """Run calls with NumPy arrays by the emulated kernels."""

    def patch(most_runs=None, load=emulated):
        monkeypatch.setattr(launch, "load", load)
        monkeypatch.setattr(samples, "are_on_device", lambda **_: True)
        if most_runs:
            few = functools.partial(launch.kernel_spec, most_runs=most_runs)
            monkeypatch.setattr(launch, "kernel_spec", few)

    return patch


def generate(scene=None, where=None, **options):
    options = {"n_rays": 300, "max_samples": 200_000, "min_step": 0.006} | options
    scene = images() if scene is None else scene
    box = options.pop("box", BOX)
    return generate_training_samples(PCG32.seeded(11, 5), scene, box, where, random_max_level=True, **options)


def given_rays(count=300, seed=0):
    rng = np.random.default_rng(seed)
    rays = np.concatenate([rng.normal(0.5, 2, (count, 3)), rng.normal(0.3, 1, (count, 3))], axis=1).astype("f4")
    rays[:, 3:] -= rays[:, :3]
    rays[5, 3:], rays[6, 0], rays[7, 4] = 0, np.nan, 0
    return rays, rng.random(count).astype("f4")


def assert_same(got, expected):
    got, expected = got.trimmed(), expected.trimmed()
    for one in fields(expected):
        ours, theirs = getattr(got, one.name), getattr(expected, one.name)
        if theirs is None:
            assert ours is None
            continue
        ours = ours if isinstance(ours, np.ndarray | np.generic) else ours.get()
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs, equal_nan=theirs.dtype.kind == "f"), one.name


def in_order(found):
    """The same rays and samples, sorted by the numbers of rays."""
    found = found.trimmed()
    order = np.argsort(found.ray_indices)
    parts = [np.arange(found.base[r], found.base[r] + found.n_steps[r]) for r in order]
    every = np.concatenate([np.zeros(0, int), *parts])
    assert np.array_equal(np.sort(every), np.arange(int(found.n_samples)))  # without gaps, each of one ray
    values = {one.name: getattr(found, one.name) for one in fields(found)}
    for name, value in values.items():
        if value is not None and value.ndim:
            values[name] = value[every if name in samples.OF_SAMPLES else order]
    values["base"] = np.cumsum(values["n_steps"]) - values["n_steps"]
    return samples.RaySamples(**values)


@needs_compiler
@pytest.mark.parametrize(("steps", "image"), matrix(STEPS, [("blobs", 2), ("sparse", 2), ("full", 3), ("empty", 2)]))
def test_rays_of_images_are_those_of_the_cpu(by_kernel, steps, image):
    kind, mips = image
    where, scene = grid(kind, mips), images() if kind in ("sparse", "full") else without_distributions(images())
    assert scene.weighted == (kind in ("sparse", "full"))
    options = {"train_envmap": kind != "full", "snap_to_pixel_centers": kind == "blobs", **steps}
    expected = generate(scene, where, **options)
    by_kernel()
    assert_same(generate(scene, where, deterministic=True, **options), expected)
    assert kind == "empty" or expected.n_samples > 1500


@needs_compiler
@pytest.mark.parametrize("steps", STEPS, ids=["equal", "growing"])
def test_images_by_their_weights_and_other_options(by_kernel, steps):
    where, share = grid("blobs", 1), np.arange(10.0)
    cdf = (np.cumsum(share) / share.sum()).astype("f4")
    options = {"image_cdf": cdf, "box": None, "near": 2.4, "max_steps": 100, **steps}
    options |= {"unit_directions": False, "per_sample": True}
    expected = generate(where=where, **options)
    assert 0 not in expected.image_indices
    assert set(expected.image_indices.tolist()) > {1, 8}
    assert expected.n_samples < generate(where=where, **(options | {"near": 0.0})).n_samples
    by_kernel()
    assert_same(generate(where=where, deterministic=True, **options), expected)


@needs_compiler
@pytest.mark.parametrize(("steps", "kind"), matrix(STEPS, ["sparse", "blobs"]))
def test_given_rays_are_those_of_the_cpu(by_kernel, steps, kind):
    (rays, jitter), where = given_rays(), grid(kind)
    options = {"aabb": BOX, "jitter": jitter, "max_samples": 200_000, "min_step": 0.006, **steps}
    expected = march(rays, where, **options)
    assert expected.n_samples > 1500
    by_kernel()
    assert_same(march(rays, where, deterministic=True, **options), expected)
    without = march(rays, where, **options)
    every = [np.arange(b, b + n) for b, n in zip(without.base, without.n_steps, strict=True)]
    assert np.array_equal(without.n_steps, expected.n_steps)
    assert np.array_equal(without.positions[np.concatenate(every)], expected.positions)


@needs_compiler
@pytest.mark.parametrize("seed", first(range(3)))
def test_any_order_of_threads_gives_the_same_rays(by_kernel, monkeypatch, seed):
    where = grid("blobs")
    expected = generate(where=where)
    monkeypatch.setattr(Kernel, "seed", seed)
    by_kernel()
    assert_same(in_order(generate(where=where)), expected)


@needs_compiler
@pytest.mark.parametrize(("ordered", "most_runs"), matrix([False, True], [1, 3]))
def test_rays_with_more_runs_than_are_kept(by_kernel, most_runs, ordered):
    where = grid("sparse")
    expected = generate(where=where, max_steps=40)
    assert expected.n_steps.max() == 40
    by_kernel(most_runs)
    assert_same(in_order(generate(where=where, max_steps=40, deterministic=ordered)), expected)


@needs_compiler
@pytest.mark.parametrize("ordered", [False, True])
def test_what_does_not_fit_is_dropped_and_nothing_is_written_beyond(by_kernel, monkeypatch, ordered):
    where = grid("blobs")
    every = generate(where=where)
    limit = int(every.base[100]) + 3
    expected = generate(where=where, max_samples=limit, per_sample=True)
    by_kernel()
    room = 50_000
    allocate = launch.allocate

    def with_a_margin(xp, n_rays, max_samples, n_extra, **options):
        arrays = allocate(xp, n_rays, max_samples, n_extra, **options)
        for name in set(samples.OF_SAMPLES) & set(arrays):
            arrays[name] = np.full((max_samples + room, *arrays[name].shape[1:]), 7, "f4")
        return arrays

    monkeypatch.setattr(launch, "allocate", with_a_margin)
    found = generate(where=where, max_samples=limit, deterministic=ordered, per_sample=True)
    for name in samples.OF_SAMPLES:
        assert (getattr(found, name)[int(found.n_samples) :] == 7).all()
    assert found.n_rays + found.n_dropped == every.n_rays
    assert found.n_samples <= limit
    assert not found.n_steps[int(found.n_rays) :].any()
    if ordered:
        assert_same(found, expected)
    given, _ = given_rays()
    by_hand = march(given, where, aabb=BOX, min_step=0.006, max_samples=3000, deterministic=ordered)
    assert by_hand.n_samples <= 3000
    assert by_hand.n_rays == len(given) - by_hand.n_dropped
    assert by_hand.n_steps.sum() == by_hand.n_samples


_LOOKS_BACK = """
extern "C" __global__ void looks_back(uint64 *states, uint64 *out, int block) {
    const uint64 sum = sum_before(states, block, threadIdx.x);
    out[threadIdx.x] = sum;
}
"""


@needs_compiler
@pytest.mark.parametrize("known", [0, 1, 37, 68, 69, 98, 99])
def test_a_block_adds_aggregates_back_to_an_inclusive_prefix(known):
    """Under the emulator blocks run one after another, so each finds its neighbour ready; on a device it may not."""
    text = source_text("trace", "linumpy.rays.cuda") + _LOOKS_BACK
    run = Kernel(library(text, SPECS[7].defines, ("looks_back",)).emulate_looks_back)
    counts = np.random.default_rng(known).integers(0, 1000, (100, 2)).astype(np.uint64)
    sums = counts[:, 0] << np.uint64(36) | counts[:, 1]
    states = sums | np.uint64(1 << 62)
    states[known] = np.cumsum(sums)[known] | np.uint64(2 << 62)
    states[:known] = 0  # as of blocks that are not done
    for block in (100, known + 1):
        out = np.zeros(32, np.uint64)
        run((1,), (32,), (states, out, np.int32(block)))
        assert (out == sums[:block].sum()).all()


_FUNCTIONS = """
extern "C" __global__ void functions(const float *x, float *out, int n) {
    for (int i = threadIdx.x; i < n; i += 32) {
        sine_cosine(x[i], out[i], out[n + i]);
        out[2 * n + i] = exact_exp2(x[i]), out[3 * n + i] = exact_log2(fabsf(x[i]));
    }
}
"""


@needs_compiler
def test_elementary_functions():
    x = np.concatenate([np.linspace(-50, 50, 20001), np.geomspace(1e-6, 1e2, 5000)]).astype("f4")
    x, out = x[x != 0], np.zeros((4, np.count_nonzero(x)), "f4")
    text = source_text("trace", "linumpy.rays.cuda") + _FUNCTIONS
    run = Kernel(library(text, SPECS[7].defines, ("functions",)).emulate_functions)
    run((1,), (32,), (x, out, np.int32(len(x))))
    exact = x.astype(float)
    assert np.abs(out[:2] - [np.sin(exact), np.cos(exact)]).max() < 6.1e-8
    assert np.allclose(out[2], 2.0**exact, rtol=4e-7)
    assert np.allclose(out[3], np.log2(np.abs(exact)), rtol=3e-7, atol=2e-7)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True])
def test_without_races_or_undefined_behaviour(by_kernel, ordered):
    def checked(spec):
        made = library(source_text(spec.source, spec.package), spec.defines, (spec.name,), True)
        return Kernel(getattr(made, f"emulate_{spec.name}"))

    where, options = grid("blobs"), {"n_rays": 150, "per_sample": True, "unit_directions": False}
    expected = generate(where=where, **options)
    by_kernel(2, checked)
    assert_same(in_order(generate(where=where, deterministic=ordered, **options)), expected)


@pytest.mark.parametrize(("spec", "architecture"), compilations([*SPECS, *COMPOSITES]))
def test_they_compile(spec, architecture):
    code = compile_kernel(spec, architecture)
    assert spec.name.encode() in code
    assert declared_shared(code, spec.name) <= 48 * 1024


@pytest.mark.parametrize("spec", first([SPECS[7], SPECS[5]]), ids=["growing", "equal"])
def test_no_multiply_and_add_is_fused(spec):
    """What decides the number of samples is rounded after each operation, as NumPy does it."""
    _, ptx = compile_with_ptx(spec, "sm_90")
    assert "mul.f32" in ptx or "mul.rn.f32" in ptx
    assert not re.search(r"\bfma\.rn\.f(32|64)", ptx)
    assert not re.search(r"\b(div|sqrt|rcp)\.approx", ptx)
    assert ".ftz" not in ptx


@pytest.mark.parametrize("steps", STEPS, ids=["equal", "growing"])
@pytest.mark.parametrize("kind", [pytest.param("sparse", marks=pytest.mark.sanitize), "blobs"])
def test_the_same_on_a_device(device, many, kind, steps):
    cupy = device
    where, scene = grid(kind), images() if kind == "blobs" else without_distributions(images())
    there = type(where)(cupy.asarray(where.density), cupy.asarray(where.bits), where.centre, where.edge)
    uploaded = to_device(scene, cupy.asarray)
    options = {"n_rays": many, "max_samples": 2_000_000, "per_sample": kind == "blobs", **steps}
    options["unit_directions"] = kind != "blobs"
    cdf = np.linspace(0.1, 1, len(scene), dtype="f4") ** 2 if kind == "blobs" else None
    expected = generate(scene, where, image_cdf=cdf, **options)
    assert expected.n_samples > 4 * many
    options["image_cdf"] = None if cdf is None else cupy.asarray(cdf)
    found = generate(uploaded, there, deterministic=True, **options)
    assert isinstance(found.n_samples, cupy.ndarray)
    assert_same(found, expected)
    found = generate(uploaded, there, **options)
    values = {one.name: getattr(found, one.name) for one in fields(found)}
    host = {name: None if value is None else cupy.asnumpy(value) for name, value in values.items()}
    assert_same(in_order(samples.RaySamples(**host)), expected)
    rays, jitter = given_rays(many)
    options = {"aabb": BOX, "max_samples": 2_000_000, "min_step": 0.006, **steps}
    expected = march(rays, where, jitter=jitter, **options)
    found = march(cupy.asarray(rays), there, jitter=cupy.asarray(jitter), deterministic=True, **options)
    assert_same(found, expected)


@pytest.mark.gpu
def test_a_call_on_a_device_waits_for_nothing(cupy, monkeypatch):
    where = grid("blobs")
    there = type(where)(cupy.asarray(where.density), cupy.asarray(where.bits), where.centre, where.edge)
    scene = to_device(images(), cupy.asarray)
    generate(scene, there, deterministic=True)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        busy = cupy.random.random((4096, 4096), dtype=np.float32)
        for _ in range(40):
            busy = busy @ busy
            busy /= busy.max()
        found = generate(scene, there, deterministic=True)
        assert not stream.done  # the call came back before the work before it was done
        stream.synchronize()
    assert_same(found, generate(images(), where))


def test_arrays_on_two_sides_are_refused(device):
    cupy = device
    where = grid("empty")
    with pytest.raises(TypeError, match="rays on the device, grid on the host"):
        march(cupy.zeros((3, 6), np.float32), where, max_samples=1)
