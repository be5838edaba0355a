"""If this fails, the kernels find the tissue surface elsewhere than SciPy's filters."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from linumpy.gpu.kernels import CUDA_TYPES, source_text
from linumpy.gpu.oct import surface, surface_kernels
from linumpy.gpu.oct.surface_filters import SurfaceOptions, interface_by_filters
from tests.support.budget import matrix, some
from tests.support.gpu.emulator import emulated, needs_compiler
from tests.support.gpu.nvrtc import ARCHITECTURES, compile_kernel

DTYPES = ["f4", "f8", "f2", "u1", "u2", "i2", "i8", "b1"]


def volume(shape, dtype, rng):
    """Make gamma-distributed voxels, some zero, in a random memory order and sometimes with steps backwards."""
    values = rng.gamma(2.0, 40.0, shape)
    values[rng.random(shape) < 0.05] = 0
    values = (values > 80) if dtype == "b1" else values.astype(dtype)
    order = rng.permutation(3)
    values = np.ascontiguousarray(values.transpose(order)).transpose(np.argsort(order))
    return values[::-1, :, ::-1] if rng.random() < 0.3 else values


def draw_options(rng, shape):
    s_xy, s_z = int(rng.choice([1, 2, 3, 7, 8, 9, 15, 16, 31])), float(rng.choice([0.5, 1, 2, 2.5, 6]))
    use_log, order, cutting = bool(rng.random() < 0.7), int(rng.integers(0, 3)), bool(rng.random() < 0.5)
    axis = int(rng.integers(-3, 3))
    # Of an A-line that the Gaussian has made flat, rounding chooses the brightest voxel.
    return SurfaceOptions(s_xy, s_z, use_log, order, cutting and shape[axis] >= 6 * s_z, axis)


@pytest.fixture
def by_kernels(monkeypatch):
    """The kernels, run on the CPU."""
    monkeypatch.setattr(surface_kernels, "load", emulated)
    return surface_kernels.interface_by_kernels


@needs_compiler
# The short run takes one volume of each dtype, every second one with marches.
@pytest.mark.parametrize(
    ("seed", "march"),
    some(itertools.product(range(24), [False, True]), lambda seed, march: seed < len(DTYPES) and march == seed % 2),
)
def test_same_as_the_filters(monkeypatch, by_kernels, seed, march):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(surface_kernels, "MARCH", march)
    monkeypatch.setattr(surface_kernels, "_MIN_ROWS", int(rng.choice([1, 20, 128])))
    monkeypatch.setattr(surface_kernels, "SCRATCH_BYTES", int(rng.choice([2**29, 200_000, 4_000])))
    monkeypatch.setattr(surface_kernels, "_SHARED_BYTES", int(rng.choice([48 * 1024, 48 * 1024, 100])))
    vol = volume(rng.integers(1, [50, 50, 60] if seed % 3 else 8, 3), DTYPES[seed % len(DTYPES)], rng)
    options = draw_options(rng, vol.shape)
    (got, _), (expected, _) = by_kernels(vol, options), interface_by_filters(vol, options)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 1
    assert (got != expected).sum() <= max(1, 0.001 * got.size)
    check_edges(vol, replace(options, edge=True, min_contrast=float(rng.choice([0, 2, 4]))))


def check_edges(vol, options, load=surface_kernels.interface_by_kernels):
    """Edges and their contrast are those of the filters, but where rounding decides between two rises."""
    if vol.shape[options.depth_axis] < 6 * options.s_z:
        return  # the Gaussian makes such A-lines flat, and all that is left in them is rounding
    (edge, contrast), (expected, how) = load(vol, options), interface_by_filters(vol, options)
    assert edge.dtype == contrast.dtype == np.float32
    assert edge.shape == contrast.shape == expected.shape
    close = np.isclose(edge, expected, atol=0.02, equal_nan=True) & np.isclose(contrast, how, rtol=0.01, atol=0.01)
    near = np.isclose(how, options.min_contrast, rtol=0.01)  # of these either is right
    assert (~close & ~near).sum() <= max(1, 0.002 * edge.size)
    assert np.array_equal(np.isfinite(edge), (contrast >= options.min_contrast) & (contrast > 0))


MARCHES = [
    ((20, 16, 530), 0, 15, 2, 1),  # more columns than a strip, and the last one narrow
    ((17, 20, 512), 0, 32, 4, 2),  # exactly two; the widest window, the longest reach
    ((5, 300, 257), 0, 4, 2, 1),  # more rows than a segment, a strip of one column, shallower than the reach
    ((9, 150, 200), 2, 15, 2, 1),  # more lines than a segment
    ((2, 40, 257), 2, 9, 2.5, 1),  # deeper than a small block, by one voxel
    ((30, 4, 300), 2, 7, 3.9, 0),  # deeper than a warp's lanes take at once
    ((2, 3, 512), 2, 31, 2, 1),
    ((6, 40, 16), 2, 1, 2, 1),  # as shallow as lines may be, and no mean
    ((6, 20, 15), 2, 15, 2, 1),  # shallower
]


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "depth_axis", "s_xy", "s_z", "order", "cutting"),
    [
        pytest.param(*case, cutting, marks=[] if cutting == (number % 2) else pytest.mark.slow)
        for number, case in enumerate(MARCHES)
        for cutting in (False, True)
    ],
)
def test_marches_of_every_size(monkeypatch, shape, depth_axis, s_xy, s_z, order, cutting):
    started = []
    monkeypatch.setattr(surface_kernels, "load", lambda spec: started.append(spec.name) or emulated(spec))
    rng = np.random.default_rng(sum(shape))
    vol = rng.gamma(2.0, 40.0, shape).astype("u2")
    options = SurfaceOptions(s_xy, s_z, True, order, cutting, depth_axis)
    (got, _), (expected, _) = surface_kernels.interface_by_kernels(vol, options), interface_by_filters(vol, options)
    assert any(name.startswith("march") for name in started) == (shape[2] != 15)
    assert (np.abs(got - expected) > 1).sum() <= 1
    assert (got != expected).sum() <= max(1, 0.001 * got.size)
    check_edges(vol, replace(options, edge=True, min_contrast=2.5))


@needs_compiler
@pytest.mark.parametrize("depth_axis", [0, 1, 2])
def test_a_line_without_any_change_has_its_surface_at_the_top(by_kernels, depth_axis):
    """Sums of equal values must cancel to nothing, or rounding would choose the surface."""
    plane = np.random.default_rng(0).gamma(2.0, 40.0, (30, 41)).astype("f4")
    vol = np.repeat(np.expand_dims(plane, depth_axis), 50, depth_axis)
    options = SurfaceOptions(15, 2, True, 1, False, depth_axis)
    assert (by_kernels(vol, options)[0] == 1).all()
    edge, contrast = by_kernels(vol, replace(options, edge=True, min_contrast=0))
    assert np.isnan(edge).all()
    assert (contrast == 0).all()


@needs_compiler
def test_one_bright_voxel_spoils_no_other_mean(by_kernels):
    vol = np.random.default_rng(0).gamma(2.0, 40.0, (60, 40, 200)).astype("f4")
    clean = by_kernels(vol, SurfaceOptions(5, 2, False, 1, False, 0))[0]
    vol[30, 20, 10] = 1e30
    dirty = by_kernels(vol, SurfaceOptions(5, 2, False, 1, False, 0))[0]
    far = np.ones(clean.shape, bool)
    far[18:23, 8:13] = False
    assert np.array_equal(clean[far], dirty[far])
    assert (dirty[~far] != clean[~far]).any()


@needs_compiler
@pytest.mark.parametrize("depth_axis", [0, 2])
@pytest.mark.parametrize("use_log", [False, True])
def test_infinity_and_nan_as_the_filters_take_them(by_kernels, depth_axis, use_log):
    rng = np.random.default_rng(0)
    vol = rng.gamma(2.0, 40.0, (40, 36, 44)).astype("f4")
    vol[rng.random(vol.shape) < 0.0005] = np.inf
    vol[rng.random(vol.shape) < 0.0005] = np.nan
    options = SurfaceOptions(5, 2, use_log, 1, False, depth_axis)
    (got, _), (expected, _) = by_kernels(vol, options), interface_by_filters(vol, options)
    assert (got == expected).mean() > 0.99
    assert len(np.unique(got)) > 10
    options = replace(options, edge=True, min_contrast=0)
    (edge, _), (known, _) = by_kernels(vol, options), interface_by_filters(vol, options)
    assert np.isclose(edge, known, atol=0.02, equal_nan=True).mean() > 0.99


def ugly_surfaces(dtype, seed):
    """Steep ones, flat ones, tissue from the first voxel on, none, a slow rise, voxels of 0: (Z, Y, X)."""
    rng = np.random.default_rng(seed)
    z, x = np.arange(110)[:, None, None], np.arange(60)[None, None, :]
    slopes = rng.choice([0, 1, 2, 3, 12], (1, 30, 1))[:, np.arange(30) // 6]
    below = z - np.where(x < 30, 10 + slopes * x, np.where(x < 45, -5, 300)) + 0 * slopes
    values = np.where(below >= 0, 200 * np.exp(-np.maximum(below, 0) / 30), 0) + 4
    values[:, :, 52:] = 4 * np.exp(np.arange(110) / 30)[:, None, None]
    values *= rng.gamma(4, 1 / 4, values.shape)
    values[rng.random(values.shape) < 0.01] = 0
    return values.astype(dtype)


SECOND_LOOKS = [
    (0, 15, "f4", True, False),
    (2, 15, "u2", True, False),
    (0, 45, "f4", True, False),
    (2, 9, "f8", False, True),
    (1, 15, "f2", True, True),
    (0, 2, "f4", True, False),
]


@needs_compiler
@pytest.mark.parametrize(
    ("depth_axis", "s_xy", "dtype", "use_log", "cutting", "march"),
    [
        pytest.param(*look, march, marks=[] if march == (number % 2) else pytest.mark.slow)
        for number, look in enumerate(SECOND_LOOKS)
        for march in (False, True)
    ],
)
def test_a_second_look_as_the_filters_take_it(
    monkeypatch, by_kernels, depth_axis, s_xy, dtype, use_log, cutting, march
):
    monkeypatch.setattr(surface_kernels, "MARCH", march)
    monkeypatch.setattr(surface_kernels, "SCRATCH_BYTES", 400_000)
    second_looks(depth_axis, s_xy, dtype, use_log, cutting, by_kernels)


def second_looks(depth_axis, s_xy, dtype, use_log, cutting, run):
    vol = np.ascontiguousarray(np.moveaxis(ugly_surfaces(dtype, 3), 0, depth_axis))
    options = SurfaceOptions(s_xy, 2, use_log, 1, cutting, depth_axis, True, 5)
    expected, _ = interface_by_filters(vol, options)
    kinds = [(expected == 0).sum(), (expected > 0).sum(), np.isinf(expected).sum(), np.isnan(expected).sum()]
    assert min(kinds) > 5 or not use_log or s_xy > 15, kinds  # a wide mean mixes them
    check_edges(vol, options, run)
    if not use_log:
        return
    # The unit does not matter, but for what float32 makes of the logarithms.
    for told in (None, -9.5):
        changed = replace(options, zero_log=told)
        known, _ = interface_by_filters(vol, changed)
        found, _ = run(vol, changed)
        assert np.isclose(found, known, atol=0.02, equal_nan=True).mean() > 0.995
    if dtype == "f4":
        found, _ = run(vol * np.float32(1e-6), options)
        assert np.isclose(found, expected, atol=0.02, equal_nan=True).mean() > 0.99


@needs_compiler
@pytest.mark.parametrize("depth_axis", [0, 2])
def test_the_widest_derivative(by_kernels, depth_axis):
    """Its weights, and those of the Gaussian, fit the shared memory that a block has without asking for more."""
    vol = np.random.default_rng(0).gamma(2.0, 40.0, (9, 6, 7)).astype("f4")
    options = SurfaceOptions(1, surface._MAX_S_Z_ON_DEVICE, False, 1, True, depth_axis)
    (got, _), (expected, _) = by_kernels(vol, options), interface_by_filters(vol, options)
    assert got.shape == expected.shape
    options = replace(options, cutting_errors=False)
    got, expected = (one(vol, options)[0] for one in (by_kernels, interface_by_filters))
    assert np.array_equal(got, expected)


def test_headers_stand_in_place_of_their_names():
    text = source_text("surface", "linumpy.gpu.oct.cuda")
    assert "#include" not in text
    assert "inline int reflected(" in text


KERNELS = [
    ("mean_tile", "1", ("0", "0")),
    ("mean_along", "0", ("0", "0")),
    ("steepest_columns", "0", ("0", "1")),
    ("steepest_lines", "0", ("1", "1")),
    ("look_again", "2", ("0", "1")),
    ("look_again", "0", ("1", "1")),
    ("log_of_zero", "0", ("0", "0")),
]
#: Each kernel for a dtype, those of other sizes and kinds among them.
SHOWN = list(zip(["b1", "u2", "f2", "f4", "f8", "i8", "u1"], KERNELS, strict=True))


MARCHED = [("u2", 1), ("f2", 15), ("f4", 32), ("i8", 15)]


@pytest.mark.parametrize(("dtype", "s"), some(itertools.product(CUDA_TYPES, (1, 15, 32)), lambda *one: one in MARCHED))
def test_marches_compile(dtype, s):
    for name in ("march_rows", "march_strip"):
        spec = surface_kernels.march_spec(name, np.dtype(dtype), log="1", s=s)
        assert name.encode() in compile_kernel(spec, "sm_90")


KINDS = [("0", "0"), ("1", "0"), ("0", "1"), ("1", "1")]


@pytest.mark.parametrize(("size", "architecture", "kind"), matrix([(1, 1), (15, 8), (32, 16)], ARCHITECTURES, KINDS))
def test_marches_along_depth_compile(size, architecture, kind):
    s, radius = size
    for name in ("march_columns", "march_lines"):
        options = {"kind": kind, "s": s, "radius": radius, "threads": 512 if s == 32 else 256}
        spec = surface_kernels.march_spec(name, np.dtype("f4"), **options)
        assert name.encode() in compile_kernel(spec, architecture)


@pytest.mark.parametrize(
    ("dtype", "kernel", "architecture"),
    some(
        itertools.product(CUDA_TYPES, KERNELS, ARCHITECTURES),
        lambda dtype, kernel, architecture: (dtype, kernel) in SHOWN and architecture == ARCHITECTURES[0],
    ),
)
def test_interface_compiles(dtype, kernel, architecture):
    name, log, cutting = kernel
    spec = surface_kernels.kernel_spec(name, np.dtype(dtype), log, cutting)
    assert name.encode() in compile_kernel(spec, architecture)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.sanitize), *range(1, 60)])
def test_same_on_a_device(cupy, monkeypatch, seed):
    rng = np.random.default_rng(1000 + seed)
    monkeypatch.setattr(surface_kernels, "SCRATCH_BYTES", int(rng.choice([2**29, 400_000])))
    host = volume(rng.integers(1, [90, 200, 150] if seed % 4 else 8, 3), DTYPES[seed % len(DTYPES)], rng)
    vol = cupy.asarray(host)
    if rng.random() < 0.5:
        vol = cupy.ascontiguousarray(vol.transpose(2, 0, 1)).transpose(1, 2, 0)
    options = draw_options(rng, vol.shape)
    got, expected = surface_kernels.interface_by_kernels(vol, options)[0], interface_by_filters(host, options)[0]
    difference = np.abs(cupy.asnumpy(got) - expected)
    assert got.dtype == np.int32
    assert (difference > 0).sum() <= max(1, 0.001 * difference.size)
    # Where speckle alone decides, two distant voxels may be next to equal: once in thousands of A-lines.
    assert (difference > 1).sum() <= max(1, 0.0002 * difference.size)
    edges = replace(options, edge=True, min_contrast=float(rng.choice([0, 3])))
    check_edges(host, edges, lambda _, how: tuple(map(cupy.asnumpy, surface_kernels.interface_by_kernels(vol, how))))


@pytest.mark.gpu
@pytest.mark.parametrize(("depth_axis", "s_xy", "dtype", "use_log", "cutting"), SECOND_LOOKS)
@pytest.mark.parametrize("march", [False, pytest.param(True, marks=pytest.mark.sanitize)])
def test_a_second_look_on_a_device(cupy, monkeypatch, depth_axis, s_xy, dtype, use_log, cutting, march):
    monkeypatch.setattr(surface_kernels, "MARCH", march)
    monkeypatch.setattr(surface_kernels, "SCRATCH_BYTES", 400_000)

    def run(vol, options):
        return tuple(map(cupy.asnumpy, surface_kernels.interface_by_kernels(cupy.asarray(vol), options)))

    second_looks(depth_axis, s_xy, dtype, use_log, cutting, run)


@pytest.mark.gpu
def test_slabs_and_deep_lines_on_a_device(cupy, monkeypatch):
    rng = np.random.default_rng(5)
    vol = rng.gamma(2.0, 40.0, (70, 90, 120)).astype("f4")
    for s_xy, depth_axis, march in [
        (15, 0, True),
        (15, 2, True),
        (15, 0, False),
        (15, 2, False),
        (61, 0, True),
        (61, 1, True),
        (61, 2, True),
    ]:
        expected = interface_by_filters(vol, SurfaceOptions(s_xy, depth_axis=depth_axis))[0]
        monkeypatch.setattr(surface_kernels, "MARCH", march)
        for scratch, shared in [(2**29, 48 * 1024), (2**18, 48 * 1024), (2**18, 100)]:
            monkeypatch.setattr(surface_kernels, "SCRATCH_BYTES", scratch)
            monkeypatch.setattr(surface_kernels, "_SHARED_BYTES", shared)
            got = surface.find_tissue_interface(cupy.asarray(vol), s_xy, depth_axis=depth_axis)
            assert (cupy.asnumpy(got) != expected).mean() <= 0.001


@pytest.mark.gpu
def test_weights_are_uploaded_once_a_stream(cupy):
    first = surface_kernels._weights_on_device(cupy, 2.0, 1)
    assert surface_kernels._weights_on_device(cupy, 2.0, 1) is first
    with cupy.cuda.Stream(non_blocking=True) as stream:
        other = surface_kernels._weights_on_device(cupy, 2.0, 1)
        stream.synchronize()
    assert other is not first
    assert np.array_equal(cupy.asnumpy(other), surface_kernels.gaussian_weights(2.0, 1))
