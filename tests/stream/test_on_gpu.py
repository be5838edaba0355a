"""If this fails, batches on a device differ from those on the CPU."""

import itertools
import time

import numpy as np
import pytest

from linumpy import stream
from linumpy.write.writer import write_omezarr
from tests.support.stream_arrays import make_array

pytestmark = pytest.mark.gpu

AUGMENT = stream.Augment(
    rotation=30, scale=(0.8, 1.2), flip="zyx", elastic=(20.0, 3.0), gamma=(0.8, 1.2), noise=20.0, blur=(0.0, 2.0),
    intensity_range=(0, 60_000),
)  # fmt: skip


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arrays")
    rng = np.random.default_rng(0)
    made = []
    for number, dtype in enumerate(("u2", ">i2", "f4")):
        values = (rng.random((48, 96, 96)) * 30_000).astype(dtype)
        shards = (16, 64, 64) if number == 1 else None
        made.append((make_array(folder / f"{number}.zarr", values, (16, 32, 32), shards=shards), values))
    return made


def samples_of(arrays, count, size=(8, 24, 40)):
    for k in range(count):
        rng = np.random.default_rng(k)
        path, values = arrays[int(rng.integers(0, len(arrays)))]
        start = [int(rng.integers(0, n - s + 1)) for n, s in zip(values.shape, size, strict=True)]
        yield stream.Sample(path, [(a, a + s) for a, s in zip(start, size, strict=True)])


def crops_of(arrays, samples):
    values = dict(arrays)
    return np.stack([values[one.uri][tuple(slice(*pair) for pair in one.aabb)].astype("f4") for one in samples])


def config(**options):
    return stream.Config(**{
        "batch_size": 4, "host_buffer_bytes": 64 << 20, "device_buffer_bytes": 64 << 20, **options,
    })  # fmt: skip


def near(got, expected, dtype):
    return np.allclose(got, expected, rtol={"bf16": 2**-8, "f16": 2**-11}.get(dtype, 0), atol=0)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_batches_are_the_crops(arrays, dtype, cupy):
    with stream.Pipeline(config(dtype=dtype)) as p:
        p.push(samples_of(arrays, 42))
        for batch in p.batches():
            assert batch.info.device_ptr > 0
            with batch as tensor:
                assert tensor.__dlpack_device__()[0] == 2
                assert near(tensor.numpy(), crops_of(arrays, batch.samples), dtype)


def test_consumers_on_other_streams_that_are_late(arrays, cupy):
    """A batch is not overwritten before what its consumer has queued is done, also when it is given back at once."""
    busy = cupy.RawKernel(
        'extern "C" __global__ void busy(long long n) { for (const long long end = clock64() + n; clock64() < end;); }',
        "busy",
    )
    own = cupy.cuda.Stream(non_blocking=True)
    sums, expected = [], []
    with stream.Pipeline(config(device_buffer_bytes=3 * 4 * 8 * 24 * 40 * 4)) as p:
        p.push(samples_of(arrays, 160))
        for batch in p.batches():
            expected.append(crops_of(arrays, batch.samples).sum(axis=(1, 2, 3), dtype="f8"))
            with own:
                with batch as tensor:
                    crops = cupy.from_dlpack(tensor)
                busy((1,), (1,), (np.int64(3_000_000),))
                sums.append(crops.sum(axis=(1, 2, 3), dtype="f8"))
                del crops
        own.synchronize()
    assert np.allclose(np.concatenate([one.get() for one in sums]), np.concatenate(expected))


def test_tensors_that_are_held_keep_their_storage(arrays, cupy):
    held = []
    with stream.Pipeline(config(lookahead_batches=4)) as p:
        p.push(samples_of(arrays, 200))
        for number, batch in enumerate(p.batches()):
            with batch as tensor:
                if number % 10 == 0:
                    held.append((cupy.from_dlpack(tensor), batch.samples))
    for crops, samples in held:  # after the pipeline is closed, too
        assert np.array_equal(crops.get(), crops_of(arrays, samples))


@pytest.mark.parametrize("pad", ["constant", "edge", "reflect"])
def test_augmented_batches_are_those_of_the_cpu(arrays, pad, cupy):
    labels = stream.Part("labels", arrays[0][0], kind="labels")
    aabb = ((-3, 13), (60, 100), (70, 110))
    crops = [stream.Sample(arrays[0][0], aabb, parts=(labels,))] * 6
    found = []
    for device in (None, "cpu"):
        options = {"augment": AUGMENT, "pad": pad, "pad_value": 5.0, "spacing": (2.0, 1.0, 1.0), "device": device}
        with stream.Pipeline(config(**options)) as p:
            p.push(crops)
            batches = []
            for batch in p.batches():
                with batch as parts:
                    batches.append((parts.image.numpy(), parts.labels.numpy()))
            found.append([np.concatenate(one) for one in zip(*batches, strict=True)])
    (image, mask), (image_host, mask_host) = found
    assert np.allclose(image, image_host, rtol=1e-5, atol=0.05)
    assert (mask == mask_host).mean() > 0.9999


@pytest.mark.parametrize("augment", [None, AUGMENT])
def test_parts_of_other_coordinates_are_those_of_the_cpu(tmp_path, augment, cupy):
    """Labels of another spacing and origin, a coarser level, and an axis that is given as an int."""
    values = (np.random.default_rng(0).random((32, 64, 64)) * 30_000).astype("u2")
    image = write_omezarr(tmp_path / "i.ome.zarr", values, (4, 2, 2), origin=(8, 0, 0), levels=3)
    labels = write_omezarr(tmp_path / "l.ome.zarr", values[:, ::2, ::2] % 9, (4, 4, 4), origin=(8, 1, 1))
    parts = (stream.Part("labels", labels, kind="labels"), stream.Part("context", level=2, shape=(4, 8, 8)))
    crops = [stream.Sample(image, np.s_[k + 8, 20:36, k : k + 16], parts=parts) for k in range(8)]
    found = []
    for device in (None, "cpu"):
        with stream.Pipeline(config(augment=augment, pad="reflect", device=device)) as p:
            p.push(crops)
            batches = []
            for batch in p.batches():
                with batch as tensors:
                    batches.append([one.numpy() for one in tensors])
            found.append([np.concatenate(one) for one in zip(*batches, strict=True)])
    (image_, mask, context), (image_host, mask_host, context_host) = found
    assert (image_.shape, mask.shape, context.shape) == ((8, 16, 16), (8, 8, 8), (8, 4, 8, 8))
    assert np.allclose(image_, image_host, rtol=1e-5, atol=0.05)
    assert np.allclose(context, context_host, rtol=1e-5, atol=0.05)
    assert (mask == mask_host).mean() > (0.999 if augment else 1 - 1e-9)


def test_memory_is_filled_again_behind_the_event_of_a_consumer(arrays, cupy):
    """Of a stream that took nothing by DLPack, so that the pipeline does not know of it; as an object and a handle."""
    busy = cupy.RawKernel(
        'extern "C" __global__ void wait(long long n) { for (long long t = clock64(); clock64() - t < n;); }', "wait"
    )
    other = cupy.cuda.Stream(non_blocking=True)
    expected, sums, kept = [], [], []
    with stream.Pipeline(config(device_buffer_bytes=2 << 18)) as p:
        p.push(samples_of(arrays, 64))
        for number, batch in enumerate(p.batches()):
            expected.append(crops_of(arrays, batch.samples).sum(axis=(1, 2, 3), dtype="f8"))
            size = int(np.prod(batch.shape))
            memory = cupy.cuda.UnownedMemory(batch.info.device_ptr, 4 * size, None)
            crops = cupy.ndarray(batch.shape, "f4", cupy.cuda.MemoryPointer(memory, 0))
            event = cupy.cuda.Event(disable_timing=True)
            with other:
                other.wait_event(batch.tensors[0]._ready)
                busy((1,), (1,), (np.int64(3_000_000),))
                sums.append(crops.sum(axis=(1, 2, 3), dtype="f8"))
                event.record(other)
            batch.release(event if number % 2 else int(event.ptr))
            kept.append(event)  # a handle does not hold its event
        other.synchronize()
    assert np.allclose(np.concatenate([one.get() for one in sums]), np.concatenate(expected))


@pytest.mark.parametrize("pad", ["constant", "edge", "reflect"])
def test_borders_are_those_of_numpy_pad(arrays, pad, cupy):
    path, values = arrays[0]
    aabb = ((-30, 20), (80, 110), (-5, 100))
    width = [(30, 0), (0, 14), (5, 4)]
    options = {"constant_values": 9} if pad == "constant" else {}
    expected = np.pad(values.astype("f4"), width, pad, **options)[0:50, 80:110, 0:105]
    with stream.Pipeline(config(pad=pad, pad_value=9, batch_size=2)) as p:
        p.push([stream.Sample(path, aabb)] * 2)
        found = p.pop().numpy()
    assert np.array_equal(found, [expected] * 2)


def test_an_error_of_one_sample(arrays, tmp_path, cupy):
    good = list(samples_of(arrays, 3))
    missing = stream.Sample(tmp_path / "none", good[0].aabb)
    with stream.Pipeline(config(batch_size=2, on_error="skip")) as p:
        p.push([good[0], missing, good[1], good[2]])
        first, second = p.batches()
        assert np.array_equal(first.numpy(), crops_of(arrays, good[:1]))
        assert np.array_equal(second.numpy(), crops_of(arrays, good[1:]))


def test_times_of_the_device(arrays, cupy):
    with stream.Pipeline(config(dtype="bf16")) as p:
        p.push(itertools.cycle(list(samples_of(arrays, 64))))
        for batch in p.batches(30):
            batch.release()
        cupy.cuda.Device().synchronize()
        found = p.stats
        assert found.h2d.count > 0
        assert found.h2d.output_bytes > 0
        assert 0 < found.h2d.ms < 1e3 * found.seconds
        assert "h2d" in str(found)


@pytest.mark.gpu_alone  # the free memory is that of the device
def test_memory_is_flat_and_the_first_batch_is_soon_there(arrays, cupy):
    with stream.Pipeline(config(dtype="bf16")) as p:  # compiles, and opens what a process opens once
        p.push(samples_of(arrays, 8))
        p.pop()
    begin = time.perf_counter()
    with stream.Pipeline(config(dtype="bf16")) as p:
        made = time.perf_counter()
        p.push(itertools.cycle(list(samples_of(arrays, 64))))
        p.pop().release()
        cupy.cuda.Device().synchronize()
        first = time.perf_counter()
        for batch in p.batches(200):
            batch.release()
        cupy.cuda.Device().synchronize()
        free = cupy.cuda.runtime.memGetInfo()[0]
        for batch in p.batches(2000):
            batch.release()
        cupy.cuda.Device().synchronize()
        assert free - cupy.cuda.runtime.memGetInfo()[0] <= 4 << 20
    assert made - begin < 1.0
    assert first - made < 0.5
