"""How long the device copies, decodes and scatters: sums of events, on the stand-in of CuPy and on a device."""

import types

import fake_cupy
import numpy as np
import pytest
import reference
import zarr
from linumpy.gpu.loop.clock import Clock, Times
from linumpy.gpu.staging.tables import Placed
from stores import random_values, same

from linumpy.gpu import Reader


def event(time, done=True):
    return types.SimpleNamespace(time=time, done=done)


def elapsed(first, last):
    return last.time - first.time


def test_only_slabs_that_are_complete_are_counted():
    clock = Clock(elapsed)
    slabs = [
        Placed(0, event(9), timing=(event(2), event(5), event(9)), copied=(event(0), event(1), 100)),
        Placed(0, event(30), timing=(event(20), event(20), event(30)), copied=(event(12), event(19), 7)),
        Placed(0, event(41), timing=(event(40), event(40), event(41))),  # its chunks were on the device
        Placed(0, event(50)),  # nobody wants to know
    ]
    slabs[1].event.done = False
    for slab, nbytes in zip(slabs, (1000, 0, 0, 0), strict=True):
        clock.add(slab, nbytes)
    first = Times(1, 1, 1, 3, 4, 100, 1000)
    assert clock.times() == first
    assert clock.times() == first
    slabs[1].event.done = True
    assert clock.times() == Times(2, 1, 8, 3, 15, 107, 1000)
    assert first == Times(1, 1, 1, 3, 4, 100, 1000)


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_times_of_a_reader(tmp_path, codec):
    compressors = None if codec is None else zarr.codecs.ZstdCodec(level=1)
    array = zarr.create_array(tmp_path / "a", shape=(40, 40), chunks=(8, 8), dtype="u2", compressors=compressors)
    array[...] = random_values("u2", (40, 40), 1)
    with reference.fake_device() as device, Reader(0, timed=True, decode_on="device") as reader:
        device.cupy.cuda.get_elapsed_time = lambda first, last: 0.0 if first is last else 250.0
        assert same(reader.submit(array).result().get(), array[...])
        device.rest()
        stats = reader.stats()
        assert stats.times.copies == stats.slabs > 0
        assert stats.times.copied_nbytes > stats.bytes_read
        assert stats.times.copy_seconds == 0.25 * stats.slabs
        assert stats.times.decoded == (0 if codec is None else stats.slabs)
        assert stats.times.decoded_nbytes == (0 if codec is None else array.nbytes)
        assert stats.times.decode_seconds == 0.25 * stats.times.decoded
        assert stats.times.scatter_seconds == 0.25 * stats.slabs
    with reference.fake_device() as device, Reader(0) as reader:
        reader.submit(array).result()
        device.rest()
        assert reader.stats().times == Times()


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_copies_are_timed_without_what_they_wait_for(tmp_path, monkeypatch, codec):
    """A copy may wait for device memory that is being decoded in: that is no time of copying."""
    compressors = None if codec is None else zarr.codecs.ZstdCodec(level=1)
    array = zarr.create_array(tmp_path / "a", shape=(64, 4096), chunks=(1, 4096), dtype="u2", compressors=compressors)
    array[...] = random_values("u2", (64, 4096), 1)
    queued, copied = [], []
    add, note = fake_cupy.Stream.add, Clock.add

    def logged(stream, operation):
        queued.append((stream, operation))
        add(stream, operation)

    def noted(clock, placed, nbytes):
        copied.append(placed.copied)
        note(clock, placed, nbytes)

    monkeypatch.setattr(fake_cupy.Stream, "add", logged)
    monkeypatch.setattr(Clock, "add", noted)
    monkeypatch.setattr(Clock, "_take_in", lambda clock: None)
    with reference.fake_device(), Reader(0, timed=True, decode_on="device", slab_nbytes=2**16) as reader:
        for _ in range(4):
            reader.submit(array).result()
    waits = 0
    for first, last, _ in copied:
        mine = [operation for stream, operation in queued if stream is first.mark.stream]
        begin, end = mine.index(first.mark), mine.index(last.mark)
        assert not [operation for operation in mine[begin:end] if isinstance(operation, tuple)]
        waits += isinstance(mine[begin - 1], tuple)
    assert waits > 0


def test_what_storage_writes_to_the_device_is_not_copied(tmp_path):
    """With GPUDirect Storage only records and tables are."""
    compressor = zarr.codecs.ZstdCodec(level=1)
    array = zarr.create_array(tmp_path / "a", shape=(40, 4000), chunks=(8, 4000), dtype="u2", compressors=compressor)
    array[...] = random_values("u2", (40, 4000), 1)
    fake = reference.fake_device(0, reference.PreadFile)
    with fake as device, Reader(0, timed=True, decode_on="device", direct=True) as reader:
        device.cupy.cuda.get_elapsed_time = lambda first, last: 1.0
        assert same(reader.submit(array).result().get(), array[...])
        device.rest()
        stats = reader.stats()
    assert stats.times.copies == stats.times.decoded > 0
    assert 0 < stats.times.copied_nbytes < stats.bytes_read


@pytest.mark.gpu
def test_times_of_a_reader_on_a_device(cupy, tmp_path):
    array = zarr.create_array(
        tmp_path / "a", shape=(64, 64, 64), chunks=(16,) * 3, dtype="u2", compressors=zarr.codecs.ZstdCodec(level=1)
    )
    array[...] = np.arange(64**3).reshape(64, 64, 64) % 1000
    with Reader(timed=True, decode_on="device") as reader:
        for _ in range(3):
            assert same(reader.submit(array).result().get(), array[...])
        times = reader.stats().times
        assert times.copies == times.decoded > 0
        assert times.decoded_nbytes == 3 * array.nbytes
        assert min(times.copy_seconds, times.decode_seconds, times.scatter_seconds) > 0
        assert times.copied_nbytes > reader.stats().bytes_read
