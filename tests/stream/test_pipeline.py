"""If this fails, batches hold wrong crops, come in a wrong order, or take too much memory (oracle: zarr-python)."""

import gc
import itertools
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from linumpy import stream
from linumpy.stream import Metric
from tests.support.stream_arrays import make_array


def samples_of(path, count=None, size=(4, 5, 6), shape=(20, 30, 40)):
    """Crops at positions that their number determines."""
    for k in itertools.count() if count is None else range(count):
        rng = np.random.default_rng(k)
        start = [int(rng.integers(0, n - s + 1)) for n, s in zip(shape, size, strict=True)]
        yield stream.Sample(path, [(a, a + s) for a, s in zip(start, size, strict=True)])


def cut(values, sample):
    return values[tuple(slice(*one) for one in sample.aabb)]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "stored"])
def test_batches_are_the_crops(volume, pipeline, dtype):
    path, values = volume
    p = pipeline(dtype=dtype, batch_size=3)
    p.push(samples_of(path))  # infinite
    expected = samples_of(path)
    target = {"f32": "f4", "f16": "f2", "bf16": ml_dtypes.bfloat16, "stored": "u2"}[dtype]
    for number, batch in enumerate(p.batches(7)):
        crops = np.stack([cut(values, sample) for sample in itertools.islice(expected, 3)])
        with batch as tensor, np.errstate(over="ignore"):
            assert batch.batch_id == number
            assert batch.info.shape == (3, 4, 5, 6)
            assert batch.info.dtype is stream.Dtype.coerce(dtype)
            assert batch.tensors[0].dtype == np.dtype(target).name
            crops = crops.astype("f4").astype(target) if dtype == "bf16" else crops.astype(target)
            assert np.array_equal(tensor.numpy(), crops.astype("f4") if dtype == "bf16" else crops)
    assert number == 6


def test_storage_of_a_batch_is_kept_while_a_dlpack_consumer_holds_it(volume, pipeline):
    path, values = volume
    p = pipeline(dtype="stored", device_buffer_bytes=2 * 512 + 4 * 2 * 240)  # two batches of 480 B, aligned
    p.push(samples_of(path))
    held = []
    for batch in p.batches(2):
        with batch as tensor:
            held.append(np.from_dlpack(tensor))
    kept = [one.copy() for one in held]
    for _ in range(2):  # those that memory still allows
        held.append(np.from_dlpack(p.pop()))
        kept.append(held[-1].copy())
    for _ in range(2):  # each call waits: another thread may release a batch
        begin = time.perf_counter()
        with pytest.raises(stream.TryAgain, match="held by the consumer"):
            p.pop()
        assert time.perf_counter() - begin > 0.9
    assert all(np.array_equal(one, other) for one, other in zip(held, kept, strict=True))
    assert np.array_equal(held[0], [cut(values, one) for one in samples_of(path, 2)])
    count = len(held)
    del held[0]
    gc.collect()
    later = p.pop()
    assert np.array_equal(later.numpy(), [cut(values, one) for one in samples_of(path, 2 * count + 2)][-2:])


def test_bf16_capsules_have_the_type_bfloat16(volume, pipeline):
    p = pipeline(dtype="bf16")
    p.push(samples_of(volume[0]))
    import ctypes

    for options, name, at in (({}, b"dltensor", 20), ({"max_version": (1, 0)}, b"dltensor_versioned", 52)):
        capsule = p.pop().__dlpack__(**options)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer(capsule, name)
        assert list((ctypes.c_uint8 * 2).from_address(pointer + at)) == [4, 16]


def test_a_batch_that_was_given_back_is_refused(volume, pipeline):
    p = pipeline()
    p.push(samples_of(volume[0]))
    with p.pop() as tensor:
        part = tensor.tensors[0]
    for use in (lambda: tensor.info, lambda: tensor.__dlpack__(), lambda: part.array.shape, lambda: part.shape):
        with pytest.raises(stream.ShutdownError, match="released"):
            use()


def test_iterables_are_pulled_lazily(volume, pipeline):
    pulled = []

    def counted():
        for sample in samples_of(volume[0]):
            pulled.append(sample)
            yield sample

    p = pipeline(lookahead_batches=2)
    p.push(counted())
    p.flush()
    assert p.in_flight == 2
    time.sleep(0.05)
    assert len(pulled) == 4
    p.pop()
    p.flush()
    assert len(pulled) == 6


def test_flush_gives_a_partial_batch_once(volume, pipeline):
    path, values = volume
    p = pipeline(batch_size=4)
    p.push(samples_of(path, 6))
    assert len(p.pop()) == 4
    with pytest.raises(stream.TryAgain, match="2 samples wait for a batch of 4"):
        p.pop()
    p.flush()
    p.flush()
    last = p.pop()
    assert last.shape == (2, 4, 5, 6)
    assert np.array_equal(last.numpy(), [cut(values, one) for one in samples_of(path, 6)][4:])
    with pytest.raises(stream.TryAgain, match="push samples first"):
        p.pop()
    assert (p.stats.batches_emitted, p.stats.batches_truncated) == (2, 1)
    p.push(samples_of(path, 5))
    assert [len(batch) for batch in p.batches()] == [4, 1]


def broken_array(tmp_path, values):
    path = make_array(tmp_path / "broken.zarr", values, (8, 8, 16))
    (chunk,) = (tmp_path / "broken.zarr" / "c" / "0" / "0").glob("0")
    chunk.write_bytes(chunk.read_bytes()[:20])
    return path


def test_skip_leaves_faulty_samples_out(volume, tmp_path, pipeline):
    path, values = volume
    broken = broken_array(tmp_path, values)
    good = list(samples_of(path, 4))
    bad = stream.Sample(broken, ((0, 4), (0, 5), (0, 6)))
    fine = stream.Sample(broken, ((9, 13), (9, 14), (17, 23)))
    outside = stream.Sample(path, ((18, 22), (0, 5), (0, 6)))
    p = pipeline(batch_size=4, on_error="skip")
    p.push([bad, good[0], outside, fine, bad, bad, outside, bad, *good])
    first, second = p.batches()
    assert first.samples == (good[0], fine)
    assert np.array_equal(first.numpy(), [cut(values, one) for one in (good[0], fine)])
    assert np.array_equal(second.numpy(), [cut(values, one) for one in good])
    assert (p.stats.samples_skipped, p.stats.batches_truncated) == (6, 1)


def test_crops_must_be_alike(volume, tmp_path, pipeline):
    path, values = volume
    other = make_array(tmp_path / "f.zarr", values.astype("f8"))
    flat = make_array(tmp_path / "flat.zarr", values[0])
    aabb = ((0, 4), (0, 5), (0, 6))
    wrong = {
        stream.Sample(path, ((0, 4), (0, 5), (0, 7))): (stream.InvalidArgument, r"crop of \(4, 5, 7\)"),
        stream.Sample(other, aabb): (stream.DtypeMismatch, "dtype float64, uint16"),
        stream.Sample(flat, aabb): (stream.RankMismatch, "aabb has 3 axes"),
        stream.Sample(flat, aabb[:2]): (stream.RankMismatch, "2 axes, 3 in the first"),
        stream.Sample(path, ((0, 4), (0, 5), (36, 42))): (stream.InvalidArgument, "axis 2: .* 40 voxels"),
    }
    p = pipeline(batch_size=1, dtype="stored")
    p.push([stream.Sample(path, aabb)])
    for sample, (kind, message) in wrong.items():
        with pytest.raises(kind, match=message):
            p.push(sample)
    p.push(iter(wrong))
    p.pop()
    for kind, message in wrong.values():
        with pytest.raises(kind, match=message):
            p.pop()


def test_mixed_dtypes_in_one_batch(tmp_path, pipeline):
    rng = np.random.default_rng(3)
    aabb = ((1, 5), (2, 6), (0, 6))
    arrays = [(rng.random((6, 7, 8)) * 200).astype(dtype) for dtype in ("u1", ">i4", "f2", "f8", "bool")]
    p = pipeline(batch_size=5)
    p.push([stream.Sample(make_array(tmp_path / str(k), one), aabb) for k, one in enumerate(arrays)])
    assert np.array_equal(p.pop().numpy(), np.stack([one[1:5, 2:6, 0:6].astype("f4") for one in arrays]))


def test_too_little_memory_is_an_error_with_the_size_needed(volume, pipeline):
    p = pipeline(device_buffer_bytes=1000)
    p.push(samples_of(volume[0], 2))
    with pytest.raises(stream.InvalidArgument, match="pass at least 2048"):
        p.pop()


@pytest.mark.parametrize("first", ["partial", "faulty", "outside"])
def test_memory_is_divided_for_full_batches_whatever_the_first_one_is(volume, tmp_path, pipeline, first):
    path, values = volume
    slot, stage = 2048, 8 * 512  # eight crops of 240 B, aligned in the batch as a whole and by themselves when staged
    p = pipeline(batch_size=8, dtype="bf16", device_buffer_bytes=2 * slot + stage, on_error="skip", pad="constant")
    one = next(samples_of(path))
    begin = {
        "partial": [one],
        "faulty": [one, *[stream.Sample(tmp_path / "none", one.aabb)] * 7],
        "outside": [stream.Sample(path, [(start + 50, stop + 50) for start, stop in one.aabb])] * 8,
    }[first]
    p.push(begin)
    p.flush()
    p.pop().release()
    p.push(samples_of(path, 24))
    found = []
    for batch in p.batches():
        with batch as tensor:
            found += list(tensor.numpy())
    expected = np.stack([cut(values, sample) for sample in samples_of(path, 24)])
    assert np.array_equal(found, expected.astype("f4").astype(ml_dtypes.bfloat16).astype("f4"))


def test_limits_of_arrays(volume, pipeline):
    for limit in ({"max_bytes_per_element": 1}, {"max_chunk_uncompressed_bytes": 2047}):
        p = pipeline(batch_size=1, **limit)
        p.push(samples_of(volume[0], 1))
        with pytest.raises(stream.InvalidArgument, match=next(iter(limit))):
            p.pop()


def test_calls_after_close_raise(volume, pipeline):
    p = pipeline()
    p.push(samples_of(volume[0]))
    p.pop()
    p.close()
    p.close()
    calls = (p.pop, p.flush, lambda: p.push([]), lambda: p.stats, p.stats_reset, p.state_dict)
    for use in calls:
        with pytest.raises(stream.ShutdownError):
            use()
    assert not [one for one in threading.enumerate() if one.name.startswith("linumpy-stream")]


def test_states_that_are_refused(pipeline):
    p = pipeline()
    state = p.state_dict()
    for name, wrong in (("position", -1), ("position", 2.5), ("batch_id", "3"), ("version", 99)):
        with pytest.raises((ValueError, TypeError), match=name):
            p.load_state_dict({**state, name: wrong})
    for wrong, message in ((3, "a list of ints"), ([-1], "epochs must be >= 0"), (["1"], "epochs must be an int")):
        with pytest.raises(stream.InvalidArgument, match=message):
            p.load_state_dict({**state, "epochs": wrong})
    with pytest.raises(ValueError, match="has no batch_id, position"):
        p.load_state_dict({key: value for key, value in state.items() if key not in ("position", "batch_id")})
    with pytest.raises(TypeError, match="state must be what"):
        p.load_state_dict(None)
    assert p.state_dict() == state
    with pytest.raises(ValueError, match="seed=0, this pipeline has 1"):
        pipeline(seed=1).load_state_dict(state)
    p.push([])
    with pytest.raises(RuntimeError, match="before samples are pushed"):
        p.load_state_dict(state)


def test_parts_come_as_a_named_tuple(volume, tmp_path, pipeline):
    path, values = volume
    labels = make_array(tmp_path / "l.zarr", (values // 20_000).astype("i8"))
    part = stream.Part("labels", labels, kind="labels")
    context = stream.Part("context", shape=(8, 9, 10))
    aabb = ((6, 10), (10, 15), (20, 26))
    p = pipeline(batch_size=3)
    p.push([stream.Sample(path, aabb, parts=(part, context))] * 2)
    p.flush()
    batch = p.pop()
    with pytest.raises(TypeError, match="3 parts"):
        batch.__dlpack__()
    with batch as crops:
        image, mask, around = crops
        assert crops.labels is mask
        assert np.array_equal(np.from_dlpack(image)[1], cut(values, batch.samples[0]).astype("f4"))
        assert np.array_equal(np.from_dlpack(mask)[0], cut(values // 20_000, batch.samples[0]))
        assert np.array_equal(np.from_dlpack(around)[0], values[4:12, 8:17, 18:28].astype("f4"))


def test_many_batches_in_flat_memory(volume, pipeline):
    path = volume[0]
    p = pipeline(batch_size=1, n_zarrs_meta_cache=2)
    p.push(itertools.cycle(list(samples_of(path, 7))))
    for batch in p.batches(200):
        batch.release()
    gc.collect()
    before = len(gc.get_objects())
    for batch in p.batches(600):
        batch.release()
    gc.collect()
    assert len(gc.get_objects()) - before < 300  # less than one object a batch


def wait(ms):
    return Metric("a stage", ms, count=3)


@pytest.mark.parametrize(
    ("waited", "bound"),
    [
        ({}, "consumer"),
        ({"pop_wait_io": wait(100), "pop_wait_compute": wait(90)}, "consumer"),
        ({"pop_wait_io": wait(100), "pop_wait_compute": wait(200)}, "resampling"),
        ({"pop_wait_io": wait(300), "io": wait(200), "assemble": wait(100)}, "I/O"),
        ({"pop_wait_io": wait(300), "io": wait(100), "assemble": wait(200)}, "decode and scatter"),
    ],
)
def test_statistics_name_the_bottleneck(waited, bound):
    found = stream.Stats(batches_emitted=3, seconds=2.0, **waited)
    assert found.bound == bound
    assert f"bound by: {bound}" in str(found)


def test_statistics_of_some_batches(volume, pipeline):
    p = pipeline()
    p.push(samples_of(volume[0]))
    p.pop().release()
    misses = p.stats.zarr_meta_misses
    p.flush()  # what was read ahead has opened the array, too
    p.stats_reset()
    for batch in p.batches(3):
        batch.release()
        time.sleep(0.05)
    text, found = str(p.stats), p.stats
    assert (found.batches_emitted, found.pop_wait_io.count) == (3, 3)
    assert found.seconds >= 0.15
    for name in ("plan", "io", "h2d", "decompress", "assemble", "pop_wait_io", "pop_wait_compute", "flush_wait"):
        assert name in text
    assert misses == 1
    assert p.stats.zarr_meta_misses == 0
    assert p.stats.gpu_bytes_committed == 0
    p.stats_reset()
    assert p.stats.batches_emitted == 0
