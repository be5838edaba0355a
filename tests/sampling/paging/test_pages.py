"""If this fails, volumes read in pages as they are needed give wrong samples, or outgrow memory."""

import contextlib
import threading
import time

import numpy as np
import pytest
import zarr

from linumpy.errors import ChunkError
from linumpy.gpu import Reader
from linumpy.sampling import create_sampler, volume, zarr_volumes
from linumpy.sampling.coordinates import boxes, draws
from linumpy.sampling.coordinates.generator import key_of
from linumpy.sampling.create import PagedSource
from linumpy.sampling.paging import pages
from linumpy.sampling.paging.plan import Paging, page_shape, plan_paging
from linumpy.sampling.sampler import Sampler
from tests.support.budget import first
from tests.support.gpu.emulator import emulated
from tests.support.oracles.sampling_reference import independent, truth

pytestmark = pytest.mark.needs_core

SHAPE, CHUNKS = (30, 37, 25), (8, 10, 6)
KEY = key_of(5)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    for module in (volume, draws, boxes, pages):
        monkeypatch.setattr(module, "load", emulated)
    monkeypatch.setattr(page_shape, "__defaults__", (1,))
    monkeypatch.setattr(plan_paging, "__defaults__", (1,))


@pytest.fixture
def reader():
    with Reader(device="cpu") as made:
        yield made


def stored(folder, dtype="u2", channels=None, axis=0, shape=SHAPE, chunks=CHUNKS, **kwargs):
    """An array, and its voxels (C, Z, Y, X)."""
    voxels = (np.random.default_rng(0).random((channels or 1, *shape)) * 1000).astype(dtype)
    data = voxels[0] if channels is None else np.moveaxis(voxels, 0, axis)
    whole = tuple(chunks) if channels is None else tuple(np.insert(chunks, axis % 4, 1).tolist())
    array = zarr.create_array(folder / "volume.zarr", data=data, chunks=whole, **kwargs)
    return voxels, array


def break_chunk(folder):
    """Shorten a chunk of the array; returns its path and its bytes."""
    chunk = folder / "volume.zarr" / "c" / "1" / "1" / "1"
    data = chunk.read_bytes()
    chunk.write_bytes(data[:-5])
    return chunk, data


def paged(folder, reader, cache=40, ahead=3000, window=None, low_high=None, voxels=None, array=None, **kwargs):
    if array is None:
        voxels, array = stored(folder, **kwargs)
    channel_axis = None if array.ndim == 3 else kwargs.get("axis", 0)
    kept = 4 if voxels.dtype.str[1:] in ("u4", "i4", "f8") else voxels.itemsize
    nbytes = cache * 480 * kept * len(voxels)
    source = PagedSource(
        source=array,
        channel_axis=channel_axis,
        range=low_high,
        cache_bytes=nbytes,
        ahead=ahead,
        reader=reader,
    )
    return voxels, zarr_volumes.open_pages(source, window=window, xp=np)


def check(voxels, coords, values, low_high=None):
    assert np.abs(values - truth(voxels, coords, 1, low_high)).max() < (1e-6 if low_high else 1e-3)


def points(count):
    return np.random.default_rng(1).uniform(-0.05, 1.05, (count, 3)).astype(np.float32)


@pytest.mark.parametrize("cache", [16, 40, 300])
@pytest.mark.parametrize("channels", [None, 2])
def test_values_at_points(cache, channels, tmp_path, reader):
    voxels, field = paged(tmp_path, reader, cache, channels=channels)
    for count in (1, 700):
        coords, values = points(count), np.full((len(voxels), count), np.nan, np.float32)
        field.decode(coords, values)
        check(voxels, coords, values)
    assert field._cache.slots.shape[0] == min(cache, 2 * 80 + 16)


@pytest.mark.parametrize("dtype", ["u1", "i2", "f2", "f4", "f8", "i4", ">u2"])
def test_dtypes(dtype, tmp_path, reader):
    voxels, field = paged(tmp_path, reader, dtype=dtype)
    coords, values = points(300), np.empty((1, 300), np.float32)
    field.decode(coords, values)
    check(voxels, coords, values)


@pytest.mark.parametrize(
    ("dtype", "low_high", "precise"),
    [
        ("f4", (1000.1, 1000.2), False),  # the lower end is no float32
        ("f4", (1000.0, 1000.25), True),
        ("i4", (16_777_216, 16_777_226), False),  # float32 holds every second of these voxels
        ("i4", (0, 2**31 - 1), True),
        ("f8", (1e6, 1e6 + 1), False),
        ("u2", (3.3, 700.1), True),
        ("i4", (7, 7), True),
    ],
)
def test_ranges_that_float32_does_not_resolve(dtype, low_high, precise, tmp_path, reader):
    low, high = low_high
    voxels = np.linspace(low - 1, high + 1, np.prod(SHAPE)).reshape(1, *SHAPE).clip(0, 2**31 - 1).astype(dtype)
    array = zarr.create_array(tmp_path / "volume.zarr", data=voxels[0], chunks=CHUNKS)
    if not precise:
        with pytest.raises(ValueError, match=r"float32 rounds such voxels by \S+ of the range"):
            paged(tmp_path, reader, voxels=voxels, array=array, low_high=low_high)
        return
    _, field = paged(tmp_path, reader, voxels=voxels, array=array, low_high=low_high)
    coords, values = points(500), np.empty((1, 500), np.float32)
    field.decode(coords, values)
    assert np.abs(values - truth(voxels, coords, 1, low_high)).max() < 2e-6
    assert field.value_range == (0, 1)


@pytest.mark.parametrize("options", [{"ahead": 0}, {"ahead": 1.5}, {"ahead": 2**33 + 1}])
def test_passes_of_no_size(options, tmp_path, reader):
    with pytest.raises((ValueError, TypeError), match="ahead="):
        paged(tmp_path, reader, **options)


def test_few_points_read_few_pages(tmp_path, reader):
    _, field = paged(tmp_path, reader, 300)
    coords, values = np.full((50, 3), 0.02, np.float32), np.empty((1, 50), np.float32)
    field.decode(coords, values)
    assert field._cache.read <= 8
    field.decode(coords, values)
    assert field._cache.read <= 8


def test_a_pass_reads_each_page_once_where_layers_fit(tmp_path, reader):
    _, field = paged(tmp_path, reader, cache=4 * 20 + 8)
    assert field._paging.part == (1, 4, 5)
    field.decode(points(3000), np.empty((1, 3000), np.float32))
    assert field._cache.read == 4 * 4 * 5


def test_the_stream_is_that_of_the_generator(tmp_path, reader):
    voxels, field = paged(tmp_path, reader, ahead=1000)
    sampler = Sampler(field, seed=5)
    made = [sampler.sample(count) for count in (300, 1, 900, 2500)]
    coords, values = (np.concatenate([one[k] for one in made], k) for k in (0, 1))
    assert np.array_equal(coords, independent(KEY, np.arange(3701)))
    check(voxels, coords, values)


@pytest.mark.parametrize("cache", [60, 300])
def test_binned(cache, tmp_path, reader):
    voxels, field = paged(tmp_path, reader, cache, window=9000)
    assert field.window_size == 9000
    sampler = Sampler(field, seed=5, order="binned")
    made = [sampler.sample(count) for count in (100, 400, 8500, 700)]
    for coords, values in made:
        check(voxels, coords, values)
    coords = np.concatenate([one[0] for one in made])[:9000]
    expected = np.empty((9000, 3), np.float32)
    draws.draw_window(boxes.make_window(field.boxes, KEY, 0, 9000), 0, expected)
    assert np.array_equal(coords, expected)


@pytest.mark.parametrize(
    ("shape", "chunks", "slots"),
    [
        ((40, 40, 40), (8, 8, 8), 16),
        ((40, 40, 40), (8, 8, 8), 24),
        ((64, 64, 64), (1, 64, 64), 20),
        ((20, 20, 40), (8, 8, 8), 18),
    ],
)
def test_boxes_that_need_more_pages_than_may_be_read_ahead(shape, chunks, slots, tmp_path, reader):
    voxels, array = stored(tmp_path, shape=shape, chunks=chunks)
    nbytes = slots * 2 * int(np.prod(chunks))
    source = PagedSource(source=array, cache_bytes=nbytes, reader=reader)
    field = zarr_volumes.open_pages(source, window=20_000, xp=np)
    assert len(field._cache.slots) == slots
    sampler = Sampler(field, seed=5, order="binned")
    for _ in range(20):
        check(voxels, *sampler.sample(1000))


def test_binned_inside_a_mask(tmp_path, reader, monkeypatch):
    voxels, field = paged(tmp_path, reader, 40, window=3000)
    mask = np.zeros((3, 2, 2), bool)
    mask[1] = True
    sampler = Sampler(field, seed=5, order="binned", weights=draws.weighted(mask))
    made = [sampler.sample(count) for count in (100, 2900, 500)]
    for coords, values in made:
        check(voxels, coords, values)
        assert (np.floor(coords[:, 2] * 3.0) == 1).all()
    # Planes 9 to 20 are sampled: pages of planes 0 to 7 are not read.
    pages = [n for n in range(np.prod(field._paging.pages)) if field._cache.holds(np.array([n]))]
    assert set(np.unravel_index(pages, field._paging.pages)[0].tolist()) <= {1, 2, 3}


def test_binned_reads_pages_about_once(tmp_path, reader):
    _, field = paged(tmp_path, reader, 100, window=9000)
    sampler = Sampler(field, seed=5, order="binned")
    for _ in range(30):
        sampler.sample(300)
    assert field._cache.read <= 1.6 * 80


@pytest.mark.parametrize("options", [{}, {"order": "sobol"}, {"order": "stratified"}])
def test_other_orders(options, tmp_path, reader):
    voxels, field = paged(tmp_path, reader)
    check(voxels, *Sampler(field, seed=5, **options).sample(500))


def test_a_broken_chunk_is_an_error_each_time(tmp_path, reader):
    voxels, array = stored(tmp_path)
    chunk, data = break_chunk(tmp_path)
    _, field = paged(tmp_path, reader, 300, voxels=voxels, array=array)
    coords, values = points(2000), np.empty((1, 2000), np.float32)
    for _ in range(2):
        with pytest.raises(ChunkError, match="1/1/1"):
            field.decode(coords, values)
    chunk.write_bytes(data)
    field.decode(coords, values)
    check(voxels, coords, values)


def test_a_page_is_not_taken_for_read_when_one_read_with_it_failed(tmp_path, reader):
    """Though its slot was given to another page before anybody waited for that read."""
    voxels, array = stored(tmp_path)
    chunk, data = break_chunk(tmp_path)
    _, field = paged(tmp_path, reader, 16, voxels=voxels, array=array)
    cache, paging = field._cache, field._paging
    broken = int(paging.numbers(np.array([[1, 1, 1]]))[0])
    together = np.array([broken, broken + 1, broken + 2])
    cache.request(together)
    others = np.setdiff1d(np.arange(16), together)[:13]
    cache.request(others)
    cache.request(np.array([60]), keep=np.union1d(others, together[1:]))  # takes the slot of the broken page
    assert not cache.holds(together[:1])
    assert cache.holds(together[1:])
    with pytest.raises(ChunkError, match="1/1/1"):
        cache.wait(together[1:])
    assert not cache.holds(together[1:2])
    cache.request(together[1:])
    cache.wait(np.concatenate([together[1:], others]))
    assert not cache._reads or set(cache._reads) == set(cache._read_of[cache._read_of >= 0].tolist())
    chunk.write_bytes(data)
    coords, values = points(2000), np.empty((1, 2000), np.float32)
    field.decode(coords, values)
    check(voxels, coords, values)


class Refusing:
    """A reader that refuses some requests before it reads anything."""

    def __init__(self, reader, refused):
        self._reader, self._refused, self.calls = reader, refused, 0

    def layout_of(self, source):
        return self._reader.layout_of(source)

    def submit_regions(self, *args):
        self.calls += 1
        if self.calls in self._refused:
            raise OSError("no descriptor is left")
        return self._reader.submit_regions(*args)


@pytest.mark.parametrize("refused", first([{2}, {1}, {4}]))
def test_pages_that_could_not_be_asked_for_are_asked_for_again(refused, tmp_path, reader):
    voxels, field = paged(tmp_path, reader, 40, channels=2)
    field._cache._reader = Refusing(reader, refused)
    coords, values = points(2000), np.full((2, 2000), np.nan, np.float32)
    for _ in range(3):
        with contextlib.suppress(OSError):
            field.decode(coords, values)
    assert field._cache._reader.calls > max(refused)
    check(voxels, coords, values)


class Interrupted:
    """A ticket whose first wait is interrupted; its read ends when it is waited for again."""

    def __init__(self):
        self.waits = 0

    def result(self):
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt


def test_an_interrupted_wait_leaves_no_read_behind(tmp_path, reader):
    voxels, field = paged(tmp_path, reader, 300)
    interrupted = Interrupted()
    coords, values = points(2000), np.full((1, 2000), np.nan, np.float32)
    field._cache.request(np.array([0]))
    field._cache._reads[1].insert(0, interrupted)
    with pytest.raises(KeyboardInterrupt):
        field.decode(coords, values)
    # The slot may hold another page from now on, so nothing may still be read into it.
    assert interrupted.waits == 2
    assert not field._cache.holds(np.array([0]))
    field.decode(coords, values)
    check(voxels, coords, values)


def test_two_threads_on_one_sampler(tmp_path, reader, monkeypatch):
    _, field = paged(tmp_path, reader, ahead=500)
    active, most = [0], [0]

    def counted(*args):
        active[0] += 1
        most[0] = max(most[0], active[0])
        time.sleep(0.001)  # long enough for another thread to begin, were it not kept out
        active[0] -= 1

    monkeypatch.setattr(pages, "load", lambda spec: lambda *args: None)
    monkeypatch.setattr(field, "_pass", counted)
    sampler, made = Sampler(field, seed=5), []

    def run():
        for count in (300, 500):
            made.append(sampler.sample(count))
            sampler.decode(made[-1][0])

    running = [threading.Thread(target=run) for _ in range(3)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    assert len(made) == 6
    assert most[0] == 1


def test_nan_voxels_stay_nan(tmp_path, reader):
    voxels, array = stored(tmp_path, "f4")
    voxels[0, 4, 5, 6] = array[4, 5, 6] = np.nan
    voxels[0, 20, 20, 20] = array[20, 20, 20] = np.inf
    _, field = paged(tmp_path, reader, voxels=voxels, array=array, low_high=(200, 700))
    coords, values = points(20_000), np.empty((1, 20_000), np.float32)
    field.decode(coords, values)
    beside = truth(np.isnan(voxels), coords, 1) > 0
    assert beside.any()
    assert np.array_equal(np.isnan(values), beside)
    expected = truth(np.nan_to_num(voxels, nan=0, posinf=1e6), coords, 1, (200, 700))
    assert np.abs(values - expected)[~beside].max() < 1e-6


@pytest.mark.parametrize("slots", [16, 100, 2000])
@pytest.mark.parametrize("dims", [(1000, 30, 500), (64, 64, 64), (3, 3, 3)])
def test_parts_fit_into_the_cache(slots, dims):
    paging = plan_paging(dims, (16, 16, 16), slots, 4096)
    seen = np.zeros(paging.pages, int)
    for begin, end in paging.parts():
        seen[tuple(slice(b, e) for b, e in zip(begin, end, strict=True))] += 1
        assert len(paging.with_neighbours(begin, end)) <= slots // 2
    assert (seen == 1).all()


def test_small_chunks_are_joined():
    assert page_shape((512, 512, 512), (64, 64, 64), 2**18) == (64, 64, 64)
    assert page_shape((512, 512, 512), (1, 512, 512), 2**18) == (1, 512, 512)
    assert page_shape((512, 512, 512), (16, 16, 16), 2**18) == (64, 64, 64)
    assert page_shape((5, 6, 7), (16, 16, 16), 2**18) == (5, 6, 7)
    assert Paging((5, 6, 7), (2, 3, 4), (1, 1, 1)).pages == (3, 2, 2)
    with pytest.raises(ValueError, match="memory for 15 pages of 16 × 16 × 16"):
        plan_paging((512, 512, 512), (16, 16, 16), 15, 4096)


def test_arrays_in_host_memory(tmp_path):
    voxels, array = stored(tmp_path, channels=3, axis=-1)
    sampler = create_sampler("zarr", "cpu", source=array, channel_axis=3, range=(0, 500), seed=1)
    assert sampler.n_channels() == 3
    check(voxels, *sampler.sample(500), (0, 500))
    check(voxels, *create_sampler("zarr", "cpu", source=tmp_path / "volume.zarr", channel_axis=-1).sample(500))
    with pytest.raises(ValueError, match="channel_axis= \\(0 to 3\\)"):
        create_sampler("zarr", "cpu", source=array)
    with pytest.raises(ValueError, match="single array"):
        create_sampler("zarr", "cpu", source=array, level=1, channel_axis=0)
    with pytest.raises(ValueError, match=r"channel_axis=1\.5"):
        create_sampler("zarr", "cpu", source=array, channel_axis=1.5)


@pytest.mark.parametrize("shape", [(0, 4, 4, 4), (2, 0, 4, 4), (2, 4, 4, 0)])
def test_arrays_without_voxels(shape, tmp_path):
    array = zarr.create_array(tmp_path / "empty.zarr", shape=shape, dtype="u2", chunks=(1, 4, 4, 4))
    with pytest.raises(ValueError, match=r"has shape \(.*\): an axis is empty"):
        create_sampler("zarr", "cpu", source=array, channel_axis=0)


def ome_image(folder, channels=2, times=1):
    group = zarr.open_group(folder / "image.zarr", mode="w")
    data = np.random.default_rng(0).integers(0, 255, (times, channels, 6, 7, 8), np.uint8)
    group.create_array("0", data=data, chunks=(1, 1, 4, 4, 4))
    kinds = [("t", "time"), ("c", "channel"), ("z", "space"), ("y", "space"), ("x", "space")]
    axes = [{"name": n, "type": k, **({"unit": "micrometer"} if k == "space" else {})} for n, k in kinds]
    scale = {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1.0] * 5}]}
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": [scale]}]}
    return folder / "image.zarr", data


def test_ome_images(tmp_path):
    path, data = ome_image(tmp_path)
    sampler = create_sampler("zarr", "cpu", source=path, seed=1)
    check(data[0], *sampler.sample(300))
    check(data[0, 1:], *create_sampler("zarr", "cpu", source=path, channel=1).sample(300))
    with pytest.raises(ValueError, match="names its axes"):
        create_sampler("zarr", "cpu", source=path, channel_axis=1)
    group = zarr.open_group(path)
    ome = group.attrs["ome"]
    for axis in ome["multiscales"][0]["axes"]:
        axis.pop("unit", None)
    group.attrs["ome"] = ome
    for spacing in (None, (1, 2, 3)):  # samples need no unit
        sampler = create_sampler("zarr", "cpu", source=path, seed=1, spacing=spacing)
        check(data[0], *sampler.sample(300))
        assert sampler.spacing == spacing
    with pytest.raises(ValueError, match="give three numbers above 0, along x, y and z"):
        create_sampler("zarr", "cpu", source=path, spacing=(1, 0, 1))
    path, data = ome_image(tmp_path, times=2)
    with pytest.raises(ValueError, match="time="):
        create_sampler("zarr", "cpu", source=path)
    check(data[1], *create_sampler("zarr", "cpu", source=path, time=1).sample(300))
