"""If this fails, samplers on a device differ from those on the host."""

import numpy as np
import pytest
import zarr

from linumpy import sampling
from linumpy.sampling import create_sampler
from linumpy.sampling.coordinates import draws
from linumpy.sampling.coordinates.boxes import make_window, plan_boxes
from linumpy.sampling.coordinates.generator import Use, key_of
from linumpy.sampling.create import gradient_density
from linumpy.sampling.volume import DeviceVolume
from tests.support.oracles.sampling_reference import raw_file, truth, voxels_of

pytestmark = pytest.mark.gpu

DTYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "float", "double"]
LAYOUTS = ["rows", "bricks", "quads", "cells"]
DIMS = (70, 61, 50)


def close(sampler, voxels, coords, values, low_high=None, order=1):
    expected = truth(voxels, coords.get(), order, low_high)
    span = 1 if low_high else np.ptp(voxels.astype(float))
    assert np.abs(values.get() - expected).max() < 1e-6 * span + 2e-7 * abs(expected).max()


# Each dtype and each layout; all pairs run in the emulator, and would take a minute to compile here.
@pytest.mark.parametrize(("layout", "dtype"), list(zip(LAYOUTS * 2, DTYPES, strict=True)))
def test_files(layout, dtype, tmp_path, cupy):
    voxels, kwargs = raw_file(tmp_path, dtype, 2, 6, True)
    host = create_sampler("structuredRegular", "cpu", seed=11, **kwargs)
    for low_high in (None, (10, 90), (7, 7)):
        sampler = create_sampler("structuredRegular", "cuda", layout=layout, seed=11, range=low_high, **kwargs)
        coords, values = sampler.sample(5000)
        if low_high == (7, 7):
            assert not values.any()
            continue
        close(sampler, voxels, coords, values, low_high)
        if low_high is None:
            assert np.array_equal(coords.get(), host.sample(5000)[0])
        outside = cupy.random.RandomState(0).uniform(-0.2, 1.2, (2000, 3)).astype(np.float32)
        close(sampler, voxels, outside, sampler.decode(outside), low_high)


@pytest.mark.parametrize("order", ["iid", "binned", "stratified", "sobol"])
def test_the_device_draws_what_the_host_draws(order, cupy):
    voxels = voxels_of("float", dims=DIMS)
    there, here = (
        create_sampler("structuredRegular", d, array=voxels, seed=2**50 + 1, order=order) for d in ("cuda", "cpu")
    )
    for count in (1, 100_003, 1_000_000):
        coords, values = there.sample(count)
        expected, host_values = here.sample(count)
        assert np.array_equal(coords.get(), expected)
        assert np.abs(values.get() - host_values).max() < 1e-4


@pytest.mark.sanitize
@pytest.mark.parametrize("name", ["mask", "density"])
def test_weights(name, cupy):
    grid = np.random.default_rng(0).random((20, 30, 40))
    how = draws.weighted(grid > 0.9 if name == "mask" else grid)
    expected, coords = np.empty((10_000, 3), np.float32), cupy.empty((10_000, 3), np.float32)
    draws.draw(how, key_of(1), 2**33, expected)
    draws.draw(how.moved(cupy), key_of(1), 2**33, coords)
    assert np.array_equal(coords.get(), expected)


@pytest.mark.parametrize("total", [0, pytest.param(5, marks=pytest.mark.sanitize), 10_000_001])
def test_counts_of_boxes(total, cupy):
    boxes = plan_boxes((512, 512, 512), 6000)
    assert np.array_equal(
        make_window(boxes, key_of(3), 9, total, cupy).starts.get(), make_window(boxes, key_of(3), 9, total).starts
    )


@pytest.mark.parametrize("dtype", ["float32", "uint16", "uint8"])
def test_a_large_volume_in_boxes_and_at_once(dtype, cupy):
    voxels = (cupy.random.RandomState(0).random_sample((1, 250, 200, 300)) * 250).astype(dtype)
    sampler = create_sampler("structuredRegular", "cuda", array=voxels, seed=5)
    for order in ("binned", "iid"):
        coords, values = sampler.sample(2**23 + 77, order)
        assert bool((values == sampler.decode(coords)).all())
        part = cupy.arange(0, len(coords), 997)
        close(sampler, voxels.get(), coords[part], values[:, part])
        counts = cupy.histogramdd(coords[::2], bins=8, range=[(0, 1)] * 3)[0].get().reshape(-1)
        expected = counts.mean()
        assert ((counts - expected) ** 2 / expected).sum() < 511 + 6 * np.sqrt(2 * 511)


def test_splines_gradients_and_labels(cupy):
    voxels = voxels_of("float", dims=DIMS)
    coords = cupy.random.RandomState(0).random_sample((3000, 3)).astype(np.float32)
    for order in (0, 3):
        sampler = create_sampler("structuredRegular", "cuda", array=voxels, spline_order=order)
        assert np.abs(sampler.decode(coords).get() - truth(voxels, coords.get(), order)).max() < 3e-4
    for order in (1, 3):
        there, here = (
            create_sampler("structuredRegular", device, array=voxels, spline_order=order) for device in ("cuda", "cpu")
        )
        values, slopes = there.decode(coords, gradient=True)
        host_values, host_slopes = here.decode(coords.get(), gradient=True)
        assert np.abs(values.get() - host_values).max() < 1e-3
        assert np.abs(slopes.get() - host_slopes).max() < 1
    labels = np.random.default_rng(0).integers(0, 2**31, DIMS[::-1], np.uint32)
    sampler = create_sampler("structuredRegular", "cuda", array=labels, labels=True)
    coords, values = sampler.sample(1000)
    assert values.dtype == np.int32
    assert np.array_equal(values.get(), truth(labels[None], coords.get(), 0))


@pytest.mark.sanitize
def test_guard_pages(cupy):
    """What lies around the arrays, and around the volume, stays as it was; coordinates are extreme."""
    voxels = voxels_of("float", dims=(33, 7, 5))
    for layout in LAYOUTS:
        sampler = create_sampler("structuredRegular", "cuda", array=voxels, layout=layout, seed=0)
        for order in ("iid", "binned"):
            for offset in (0, 1, 4):
                memory = [cupy.full(size + 1024, -7, np.float32) for size in (3 * 1001, 1001)]
                pointers = [one.data.ptr + 4 * (512 + offset) for one in memory]
                sampling.sample(sampler, *pointers, 1001, order)
                for one, size in zip(memory, (3 * 1001, 1001), strict=True):
                    assert bool((one[: 512 + offset] == -7).all())
                    assert bool((one[512 + offset + size :] == -7).all())
                    assert bool((one[512 + offset : 512 + offset + size] != -7).all())
        extreme = np.array([0, 1, -0.0, 1e30, -1e30, np.inf, -np.inf, np.nan, 1 - 2**-24, 1e-45], np.float32)
        coords = np.stack(np.meshgrid(extreme, extreme, extreme), -1).reshape(-1, 3)
        values = sampler.decode(cupy.asarray(coords)).get()
        assert np.isnan(values[0]).tolist() == (~np.isfinite(coords).all(1)).tolist()


def test_copies_of_a_volume_keep_to_the_limit_of_the_pool(cupy):
    voxels = cupy.zeros((1, 64, 64, 64), np.float32)
    pool = cupy.get_default_memory_pool()
    before = pool.get_limit()
    pool.free_all_blocks()
    try:
        pool.set_limit(size=pool.used_bytes() + 2 * voxels.nbytes)
        assert DeviceVolume(voxels).layout == "rows"
        pool.set_limit(size=pool.used_bytes() + 40 * voxels.nbytes)
        assert DeviceVolume(voxels).layout == "cells"
    finally:
        pool.set_limit(size=before)


def test_arguments(cupy):
    sampler = create_sampler("structuredRegular", "cuda", array=voxels_of("float"), seed=1)
    coords, values = cupy.empty((50, 3), np.float32), cupy.empty((1, 50), np.float32)
    sampling.sample(sampler, coords, values, 50)
    again = create_sampler("structuredRegular", "cuda", array=cupy.asarray(voxels_of("float")), seed=1)
    half = cupy.empty((1, 50), np.float16)
    sampling.sample(again, coords.data.ptr, half, 50)
    assert bool((half == values.astype(np.float16)).all())
    for bad, text in [
        (np.empty((50, 3), np.float32), "coords lies in host memory"),
        (np.empty((50, 3), np.float32).ctypes.data, "not in device memory; give a pointer into device 0"),
        (cupy.empty((50, 3)), "dtype float64"),
        (cupy.empty((49, 3), np.float32), r"shape \(49, 3\)"),
        (cupy.empty((3, 50), np.float32).T, "contiguous"),
    ]:
        with pytest.raises((ValueError, TypeError), match=text):
            sampling.sample(sampler, bad, values, 50)
    host = create_sampler("structuredRegular", "cpu", array=voxels_of("float"))
    with pytest.raises(ValueError, match="coords lies in the memory of a device"):
        sampling.sample(host, coords, np.empty((1, 50), np.float32), 50)


def test_torch(cupy):
    torch = pytest.importorskip("torch")
    voxels = voxels_of("float")
    sampler = create_sampler("structuredRegular", "cuda", array=torch.from_numpy(voxels).cuda(), seed=1)
    coords, values = torch.empty((500, 3), device="cuda"), torch.empty((1, 500), device="cuda")
    sampling.sample(sampler, coords, values, 500)
    assert np.abs(values.cpu().numpy() - truth(voxels, coords.cpu().numpy(), 1)).max() < 1e-4
    narrow = torch.empty((1, 500), device="cuda", dtype=torch.bfloat16)
    sampling.decode(sampler, coords.data_ptr(), narrow, 500)
    assert bool((narrow == values.to(torch.bfloat16)).all())
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        # On torch's stream: the fill before, and the copy behind, are in order without waiting.
        for _ in range(20):
            coords.fill_(0.5)
            sampling.sample(sampler, coords, values, 500)
            copy = coords.clone()
    side.synchronize()
    assert copy.std() > 0.2
    batches = list(sampling.sample_dataset(sampler, 100, batches=2))
    assert batches[0][0].is_cuda
    assert batches[1][1].shape == (100, 1)


def test_streams(cupy):
    voxels = voxels_of("float", dims=DIMS)
    sampler = create_sampler("structuredRegular", "cuda", array=voxels, seed=1, order="binned", window=600_000)
    expected = create_sampler("structuredRegular", "cpu", array=voxels, seed=1, order="binned", window=600_000)
    for _ in range(6):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            coords, values = sampler.sample(100_000)
            stream.synchronize()
        there, host_values = expected.sample(100_000)
        assert np.array_equal(coords.get(), there)
        assert np.abs(values.get() - host_values).max() < 1e-4


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_zarr(codec, tmp_path, cupy):
    voxels = np.random.default_rng(0).integers(0, 60000, (2, 150, 140, 130), np.uint16)
    codecs = {} if codec else {"compressors": None}
    array = zarr.create_array(tmp_path / "v.zarr", data=voxels, chunks=(1, 32, 32, 32), **codecs)
    page = 64**3 * 2 * 2
    samplers = {
        "cuda": create_sampler("zarr", "cuda", source=array, channel_axis=0, seed=1),
        "pages": create_sampler(
            "zarr", "cuda_out_of_core", source=array, channel_axis=0, seed=1, cache_bytes=20 * page, ahead=300_000
        ),
        "all pages": create_sampler(
            "zarr", "cuda_out_of_core", source=array, channel_axis=0, seed=1, cache_bytes=2**30
        ),
    }
    for name, sampler in samplers.items():
        for count in (100_000, 1, 400_000):
            coords, values = sampler.sample(count)
            part = cupy.arange(0, count, 101)
            close(sampler, voxels, coords[part], values[:, part])
        points = cupy.random.RandomState(0).random_sample((5000, 3)).astype(np.float32)
        close(sampler, voxels, points, sampler.decode(points))
        assert name != "pages" or sampler.field._cache.slots.shape[0] == 20
    binned = create_sampler(
        "zarr", "cuda_out_of_core", source=array, channel_axis=0, seed=1, cache_bytes=20 * page, order="binned",
        window=1_000_000,
    )  # fmt: skip
    drawn = [binned.sample(100_000) for _ in range(10)]
    close(
        binned,
        voxels,
        cupy.concatenate([one[0][::31] for one in drawn]),
        cupy.concatenate([one[1][:, ::31] for one in drawn], 1),
    )
    expected = np.empty((1_000_000, 3), np.float32)
    draws.draw_window(make_window(binned.field.boxes, key_of(1), 0, 1_000_000), 0, expected)
    assert np.array_equal(cupy.concatenate([one[0] for one in drawn]).get(), expected)


@pytest.mark.parametrize("labels", [False, True])
def test_importance_of_gradients(cupy, labels):
    voxels = np.zeros((40, 40, 40), np.int32 if labels else np.float32)
    voxels[..., 20:] = 1
    options = {"array": voxels, "labels": labels, "importance": "gradient", "seed": 0}
    sampler = create_sampler("structuredRegular", "cuda", **options)
    # As floats, the bits of small labels are almost 0, and so are their gradients.
    expected = gradient_density(create_sampler("structuredRegular", "cpu", **options).field)
    assert np.allclose(gradient_density(sampler.field, cupy), expected)
    coords, _ = sampler.sample(10_000)
    assert float((cupy.abs(coords[:, 0] - 0.5) < 0.06).mean()) > 0.5


def test_any_use_is_its_own_stream(cupy):
    seen = []
    for use in (Use.IID, Use.SOBOL):
        coords = cupy.empty((1000, 3), np.float32)
        draws.draw(draws.Draw(use), key_of(0), 0, coords)
        seen.append(coords.get())
    assert not np.intersect1d(seen[0], seen[1]).size > 10


@pytest.mark.parametrize("low_high", [(10, 90), (5, 5), None])
def test_voxels_that_are_not_finite(low_high, cupy):
    voxels = voxels_of("float", dims=DIMS)
    voxels[0, 20, 30, 40] = np.nan
    if low_high:
        voxels[0, 10, 10, 10], voxels[0, 30, 50, 20] = np.inf, -np.inf
    coords = np.random.default_rng(0).random((20_000, 3), np.float32)
    coords[:500] = (np.array([40, 30, 20]) + np.random.default_rng(1).random((500, 3))) / DIMS
    expected = create_sampler("structuredRegular", "cpu", array=voxels, range=low_high).decode(coords)
    assert np.isnan(expected).any()
    for array in (voxels, cupy.asarray(voxels)):
        sampler = create_sampler("structuredRegular", "cuda", array=array, range=low_high)
        values = sampler.decode(cupy.asarray(coords)).get()
        assert np.array_equal(np.isnan(values), np.isnan(expected))
        assert np.nanmax(np.abs(values - expected)) < 1e-4
        if low_high is None:
            assert sampler.value_range == (float(np.nanmin(voxels)), float(np.nanmax(voxels)))
