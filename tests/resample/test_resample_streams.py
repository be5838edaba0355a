"""If this fails, `resample_zarr` uses a buffer on a device before or after its time.

In place of CuPy there are NumPy arrays and streams that put off all work until somebody waits for it, but for one that
does it at once: the worst that a device may do. A wait that is missing shows as a wrong block.
"""

import functools
import threading
import time
import types
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import zarr

from linumpy.gpu import kvikio_zarr
from linumpy.gpu.read import request as output
from linumpy.gpu.read.reader import Reader
from linumpy.plan.grid.blocks import AffineGrid, ResamplePlan
from linumpy.plan.grid.point_map import Field, affine
from linumpy.resample import filling
from linumpy.resample.blocks import on_device, overlap, pipeline, warp
from linumpy.resample.blocks.pipeline import BlockJob, make_block, make_blocks
from linumpy.write.new_image import plan_image
from tests.support.gpu import reference

lock = threading.RLock()
here = threading.local()


class Event:
    def __init__(self, stream):
        self.stream, self.place = stream, stream.first + len(stream.work)

    def synchronize(self):
        self.stream.run(self.place)


class Stream:
    """Work in order, done when it is waited for, or at once if it is the eager one."""

    made, eager = 0, None

    def __init__(self, non_blocking=False):
        self.work, self.first, self.at_once = [], 0, Stream.made == Stream.eager
        Stream.made += 1

    def __enter__(self):
        self.before = getattr(here, "stream", None)
        here.stream = self
        return self

    def __exit__(self, *_):
        here.stream = self.before

    def put(self, call):
        with lock:
            self.work.append(call)
            if self.at_once:
                self.synchronize()

    def run(self, until):
        with lock:
            while self.first < until:
                call = self.work.pop(0)
                self.first += 1
                call()

    def record(self):
        with lock:
            return Event(self)

    def wait_event(self, event):
        self.put(lambda: event.stream.run(event.place))

    def synchronize(self):
        self.run(self.first + len(self.work))


class DeviceArray(np.ndarray):
    pass


class Device:
    id = 0

    def __init__(self, _=0):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def empty(shape, dtype):
    array = np.empty(shape, dtype).view(DeviceArray)
    array.view(np.uint8).fill(0xA5)
    return array


NULL = Stream()


def current():
    return getattr(here, "stream", None) or NULL


FAKE = types.SimpleNamespace(
    empty=empty, cuda=types.SimpleNamespace(Device=Device, Stream=Stream, get_current_stream=current)
)


@pytest.fixture
def device(monkeypatch):
    """Reads and transforms that are put on the current stream, as those of a device are."""
    real = pipeline.make_box

    def read(array, region, out, own):
        assert type(out) is DeviceArray
        assert own.scratch_bytes == 12345
        current().put(lambda: np.copyto(out, array[region]))

    def transform(source, grid, block, cval, out):
        current().put(lambda: real(source.view(np.ndarray), grid, block, cval, out.view(np.ndarray)))

    real_warped = warp.make_warped

    def warped(grid, block, cval, out, read, read_field, limit):
        """What is read is needed at once: the extrema of coordinates are copied to the host."""

        def at_once(call):
            def one(*arguments):
                array = call(*arguments)
                current().synchronize()
                return array.view(np.ndarray)

            return one

        values = np.empty(out.shape, out.dtype)
        real_warped(grid, block, cval, values, at_once(read), at_once(read_field), limit)
        current().put(lambda: np.copyto(out.view(np.ndarray), values))

    write_block = pipeline.write_block

    def write(chunks, block, data, entries):
        """As ``device_chunks.start_writing``: on the current stream, which is waited for."""
        host = np.empty(data.shape, data.dtype)
        time.sleep(0.002)  # so that the others run ahead
        current().put(lambda: np.copyto(host, data.view(np.ndarray)))
        current().synchronize()
        return write_block(chunks, block, host, entries)

    streams = functools.lru_cache(overlap._streams.__wrapped__)  # its own for each test
    monkeypatch.setattr(overlap, "_streams", streams)
    monkeypatch.setattr(overlap, "require_cuda", lambda: FAKE)
    monkeypatch.setattr(pipeline, "write_block", write)
    monkeypatch.setattr(on_device, "require_cuda", lambda: FAKE)
    monkeypatch.setattr(on_device, "read_region_into", read)
    monkeypatch.setattr(pipeline, "make_box", transform)
    monkeypatch.setattr(warp, "make_warped", warped)


@pytest.fixture
def job(tmp_path):
    image = np.random.default_rng(0).normal(size=(40, 35)).astype("f4")
    source = zarr.create_array(tmp_path / "a", data=image, chunks=(8, 8))
    zarr.create_array(tmp_path / "b", shape=(40, 45), chunks=(10, 10), dtype="f4", compressors=None)
    grid = AffineGrid((40, 35), (40, 45), ((0.9, 0.2), (-0.1, 1.1)), (-3.0, 1.0), 1, "constant")
    return BlockJob(source, str(tmp_path / "b"), ResamplePlan(grid, (10, 10)), 7.0, "cuda", 12345)


def by_hand(job):
    host = BlockJob(job.source, job.target, job.plan, job.cval, "cpu", None)
    make_blocks(host, job.plan, int_of)
    expected = zarr.open_array(job.target)[...]
    zarr.open_array(job.target, mode="r+")[...] = 0
    return expected


def int_of(block):
    return block.number


@pytest.mark.parametrize("eager", [None, 0, 1, 2])
def test_blocks_through_two_buffers(job, request, monkeypatch, eager):
    expected = by_hand(job)
    request.getfixturevalue("device")
    monkeypatch.setattr(Stream, "made", 0)
    monkeypatch.setattr(Stream, "eager", eager)
    done = []
    with Stream():  # the caller's
        make_blocks(job, job.plan, done.append)
    assert [block.number for block in done] == list(range(20))
    assert np.array_equal(zarr.open_array(job.target)[...], expected)


def test_blocks_through_a_field_of_vectors(job, request, tmp_path):
    vectors = np.random.default_rng(1).normal(scale=3, size=(5, 2, 6)).astype("f8")
    field = Field(
        zarr.create_array(tmp_path / "f", data=vectors, chunks=(2, 1, 3)), 1, (9.0, 8.0), (1.0, -2.0), True, 1
    )
    grid = replace(job.plan.grid, warp=(affine(np.diag([0.9, 0.8]), (2, 1)), field))
    job = replace(job, plan=ResamplePlan(grid, (10, 10), 2000))
    expected = by_hand(job)
    assert 100 < np.count_nonzero(expected == 7) < 1500
    request.getfixturevalue("device")
    make_blocks(job, job.plan, int_of)
    assert np.array_equal(zarr.open_array(job.target)[...], expected)


def test_one_block_through_one_buffer(job, request):
    expected = by_hand(job)
    request.getfixturevalue("device")
    for number in (7, 3, 7):
        assert make_block(job, number) == number
        box = job.plan.block(number).box
        assert np.array_equal(zarr.open_array(job.target)[box], expected[box])


def test_a_block_of_a_worker_takes_the_place_of_its_chunk(job, tmp_path):
    """The file is not written to: another worker may be writing the same one."""
    host = BlockJob(job.source, job.target, job.plan, job.cval, "cpu", None)
    make_block(host, 7)
    (tmp_path / "first").hardlink_to(tmp_path / "b/c/1/2")
    make_block(host, 7)
    assert not (tmp_path / "b/c/1/2").samefile(tmp_path / "first")
    assert (tmp_path / "b/c/1/2").read_bytes() == (tmp_path / "first").read_bytes()


def test_a_missing_wait_would_show(job, request, monkeypatch):
    expected = by_hand(job)
    request.getfixturevalue("device")
    monkeypatch.setattr(Stream, "wait_event", lambda *_: None)
    with Stream():
        make_blocks(job, job.plan, int_of)
    assert not np.array_equal(zarr.open_array(job.target)[...], expected)


@pytest.mark.needs_core
def test_all_blocks_are_read_by_one_reader(tmp_path, monkeypatch):
    """By the production reader: a limit of its own makes threads, streams and pinned memory once, and frees them."""
    image = np.random.default_rng(0).integers(0, 60000, (40, 36)).astype("u2")
    source = zarr.create_array(tmp_path / "a", data=image, chunks=(8, 12), compressors=None)
    zarr.create_array(tmp_path / "b", shape=(20, 18), chunks=(5, 6), dtype="u2", compressors=None)
    grid = AffineGrid((40, 36), (20, 18), ((2.0, 0.0), (0.0, 2.0)), (0.5, 0.5), 1, "nearest")
    job = BlockJob(source, str(tmp_path / "b"), ResamplePlan(grid, (5, 6)), 0.0, "cuda", 2**21)
    made = []

    class Counted(Reader):
        def __init__(self, device, scratch_bytes, **options):
            super().__init__(device, scratch_bytes, **options)
            made.append(self)

    monkeypatch.setattr(kvikio_zarr, "Reader", Counted)
    monkeypatch.setattr(kvikio_zarr, "gds_mode", lambda _: (False, "a test"))
    monkeypatch.setattr(output, "free_memory", lambda *_: 2**30)
    with reference.fake_device():
        with closing(pipeline.open_stage(job, slots=2)) as stage:
            boxes = {block.number: stage.read(block).get() for block in job.plan}
            assert len(made) == 1
            assert 2**20 < made[0].scratch_nbytes <= 2**21
            assert not made[0].is_closed
        assert made[0].is_closed
    assert len(boxes) == 12
    for block in job.plan:
        assert np.array_equal(boxes[block.number], image[block.source_box])


@pytest.mark.needs_core
def test_coarser_levels_are_read_by_one_reader_within_the_limit(tmp_path, monkeypatch):
    """The device has no byte more: the reader that all callers share would take 512 MiB."""
    limit, made = 2**23, []
    image = np.random.default_rng(0).integers(0, 60000, (64, 90, 70)).astype("u2")
    planned = plan_image(image.shape, "u2", (1, 1, 1), name="a", chunks=(16, 16, 16), compressors=None, levels=3)
    planned.create(tmp_path / "a")[0][...] = image

    class Counted(Reader):
        def __init__(self, device, scratch_bytes, **options):
            super().__init__(device, scratch_bytes, **options)
            made.append(self)

    real = filling.halve
    monkeypatch.setattr(kvikio_zarr, "Reader", Counted)
    monkeypatch.setattr(kvikio_zarr, "gds_mode", lambda _: (False, "a test"))
    monkeypatch.setattr(output, "free_memory", lambda *_: limit)
    monkeypatch.setattr(filling, "STEP_BYTES", 2**16)
    monkeypatch.setattr(filling, "halve", lambda block, *how: real(block.get(), *how))
    with reference.fake_device():
        filling.make_coarser_levels(tmp_path / "a", planned, "cuda", limit)
    (reader,) = made
    assert reader.scratch_nbytes <= limit // 4
    assert reader.is_closed
    got = [zarr.open_array(tmp_path / "a" / str(level))[...] for level in (1, 2)]
    filling.make_coarser_levels(tmp_path / "a", planned, "cpu")
    for level, values in enumerate(got, 1):
        assert values.any()
        assert np.array_equal(values, zarr.open_array(tmp_path / "a" / str(level))[...])
