"""If this fails, several GPUs make other voxels than one GPU, make some twice, or run them in the wrong threads."""

import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import linumpy.gpu.devices as several
from linumpy.errors import GpuUnavailableError, RegionError
from linumpy.gpu import read_zarr_to_gpu
from linumpy.gpu.read import request
from linumpy.gpu.read.shared import release
from linumpy.io.layout import read_layout
from linumpy.io.ome import open_image
from linumpy.plan.read import cut_for_devices
from linumpy.plan.region import normalize_region
from linumpy.resample import resample_zarr as module
from linumpy.resample.blocks import pipeline
from linumpy.resample.blocks.pipeline import make_blocks_on_each
from linumpy.write.writer import write_omezarr
from tests.support.gpu import reference
from tests.support.gpu.emulator import needs_compiler


@pytest.fixture(scope="module")
def array(tmp_path_factory):
    """An array in chunks of 4 along its leading axis, two to a shard."""
    made = zarr.create_array(
        tmp_path_factory.mktemp("a") / "a", shape=(45, 6, 7), chunks=(4, 3, 7), shards=(8, 6, 7), dtype="u2"
    )
    made[...] = np.random.default_rng(0).integers(0, 999, made.shape)
    return made


class Devices:
    """As much of CuPy as the threads of several devices need; knows which device is current in each thread."""

    def __init__(self, count):
        self.mine = threading.local()
        stream = SimpleNamespace(synchronize=lambda: None)
        self.cuda = SimpleNamespace(
            Device=self.device, get_current_stream=lambda: stream, runtime=SimpleNamespace(getDeviceCount=lambda: count)
        )

    def device(self, number):
        test = self

        class Device:
            pci_bus_id = f"0000:{number:02X}:00.0"

            def __enter__(self):
                test.mine.number = number

            def __exit__(self, *_):
                del test.mine.number

        return Device()

    @property
    def current(self):
        return self.mine.number


@pytest.fixture
def three(monkeypatch):
    devices = Devices(3)

    def require(number=None):
        if number is not None and number >= 3:
            raise GpuUnavailableError(f"there is no CUDA device {number}")
        return devices

    monkeypatch.setattr(several, "require_cuda", require)
    return devices


@given(st.data())
def test_shares_are_the_region_once_cut_between_shards(array, data):
    layout = read_layout(array)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, 45), st.integers(0, 45))))
    first = data.draw(st.sampled_from([slice(start, stop), min(start, 44)]))
    region, count = normalize_region((first, slice(1, 5)), array.shape), data.draw(st.integers(1, 5))
    shares = cut_for_devices(layout, region, count)
    values = array[...]
    axis = 0 if isinstance(first, slice) else 1  # an axis that is dropped is not cut
    assert len(shares) == count
    assert np.array_equal(np.concatenate([values[share.selection] for share in shares]), values[region.selection])
    size = layout.object_shape[axis]
    lengths = [share.stop[axis] - share.start[axis] for share in shares]
    for share in shares[1:]:
        assert share.start[axis] % size == 0 or share.start[axis] in (region.start[axis], region.stop[axis])
    assert max(lengths) - sum(lengths) / count <= size


def test_one_element_cannot_be_cut(array):
    with pytest.raises(RegionError, match="one element"):
        cut_for_devices(read_layout(array), normalize_region((0, 0, 0), array.shape), 2)


def test_each_device_has_a_thread_near_it(three, tmp_path, monkeypatch):
    """Its own device is current there, all work at the same time, and the caller's cores stay as they were."""
    cores = sorted(os.sched_getaffinity(0))
    (tmp_path / "0000:02:00.0").mkdir()
    (tmp_path / "0000:02:00.0" / "local_cpulist").write_text(f"{cores[-1]}\n")
    stay_near = several.stay_near
    monkeypatch.setattr(several, "stay_near", lambda bus, allowed: stay_near(bus, allowed, tmp_path))
    meet = threading.Barrier(2, timeout=30)

    def work(position):
        meet.wait()
        return position, three.current, os.sched_getaffinity(0)

    assert several.on_each([2, 0], work) == [(0, 2, {cores[-1]}), (1, 0, set(cores))]
    assert sorted(os.sched_getaffinity(0)) == cores
    assert several.cores_of("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}


def test_errors_come_when_all_have_ended(three):
    ended = []

    def work(position):
        if position == 1:
            raise KeyError("of device 1")
        time.sleep(0.05)
        ended.append(position)

    with pytest.raises(KeyError, match="of device 1"):
        several.on_each([0, 1, 2], work)
    assert sorted(ended) == [0, 2]


@pytest.mark.parametrize(
    ("devices", "error"), [("some", ValueError), ([], ValueError), ([1, 1], ValueError), ([-1], ValueError),
                           (["0"], TypeError), ([0, 3], GpuUnavailableError)],
)  # fmt: skip
def test_devices_that_cannot_be(three, devices, error):
    with pytest.raises(error):
        several.checked_devices(devices)
    assert several.checked_devices("all") == [0, 1, 2]


def read_by_two(source, **options):
    """Read by the reader itself, whose stand-in has one device under two names."""
    with reference.fake_device(), pytest.MonkeyPatch.context() as patch:
        cupy = several.require_cuda()
        patch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 2)
        patch.setattr(type(cupy.cuda.Device()), "pci_bus_id", "none", raising=False)
        patch.setattr(request, "free_memory", lambda enough: enough)
        reference.use_own_readers(patch)
        try:
            return [(part.get(), report) for part, report in zip(
                *read_zarr_to_gpu(source, device=[0, 1], return_report=True, **options), strict=True
            )]  # fmt: skip
        finally:
            release()


@needs_compiler
@pytest.mark.needs_core
def test_parts_of_a_read(array):
    parts = read_by_two(array, region=np.s_[3:40, 2], dtype="f4")
    assert [part.shape for part, _ in parts] == [(21, 7), (16, 7)]
    assert np.array_equal(np.concatenate([part for part, _ in parts]), array[3:40, 2].astype("f4"))
    # No shard is read by both: their chunks add up to those of the whole.
    assert sum(report.chunks_read for _, report in parts) == 10
    assert all(report.backend == "linumpy" for _, report in parts)
    with pytest.raises(ValueError, match="pass one of them"):
        read_zarr_to_gpu(array, device=[0, 1], out=np.empty(3))


@pytest.fixture
def image(tmp_path):
    write_omezarr(tmp_path / "a", np.random.default_rng(0).integers(0, 99, (24, 24, 24)).astype("u2"), (5, 5, 5))
    return tmp_path / "a"


OPTIONS = {"device": "cpu", "chunks": (8, 8, 8), "progress": int, "memory_bytes": 2**16}


def test_blocks_are_dealt_out(three, image, tmp_path, monkeypatch):
    """Each block is made once, by any of the devices, in host memory here; all of them take some."""
    module.resample_zarr(image, tmp_path / "one", 3.0, **OPTIONS)
    makers, lock, numbers = set(), threading.Lock(), []

    def make(job, wanted, done):
        numbers.extend(block.number for block in wanted)

        def settle(block):
            assert not lock.locked()
            with lock:
                makers.add(three.current)
                numbers.remove(block.number)
                time.sleep(0.002)
                done(block)

        make_blocks_on_each(job, wanted, settle, [0, 1, 2])

    begin, open_stage = threading.Barrier(3, timeout=30), pipeline.open_stage

    def open_together(*arguments, **options):
        begin.wait()
        return open_stage(*arguments, **options)

    monkeypatch.setattr(pipeline, "open_stage", open_together)
    monkeypatch.setattr(module, "make_blocks", make)
    module.resample_zarr(image, tmp_path / "three", 3.0, **OPTIONS)
    assert not numbers
    assert makers == {0, 1, 2}
    one, many = (open_image(tmp_path / name).levels[0][...] for name in ("one", "three"))
    assert np.array_equal(one, many)


def test_a_device_that_fails_stops_the_others(three, image, tmp_path, monkeypatch):
    counted, blocks = [], []

    def make(job, wanted, done):
        def settle(block):
            counted.append(block.number)
            raise OSError("disk full")

        wanted = list(wanted)
        blocks.append(len(wanted))
        make_blocks_on_each(job, wanted, settle, [0, 1, 2])

    monkeypatch.setattr(module, "make_blocks", make)
    with pytest.raises(OSError, match="disk full"):
        module.resample_zarr(image, tmp_path / "three", 3.0, **OPTIONS | {"memory_bytes": 2**14})
    assert blocks[0] > 30
    assert len(counted) <= 6  # of each device the one that fails, and one that was complete then


def test_devices_go_with_this_machine(image, tmp_path):
    with pytest.raises(ValueError, match="not together with device='cpu'"):
        module.resample_zarr(image, tmp_path / "b", 7.0, devices="all", device="cpu")
    with pytest.raises(ValueError, match="not together with distributed="):
        module.resample_zarr(image, tmp_path / "b", 7.0, devices=[0], distributed="tcp://127.0.0.1:1")


def two_gpus(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip(f"needs two GPUs: this machine shows {cupy.cuda.runtime.getDeviceCount()}")


@pytest.mark.gpu
def test_two_gpus_read_what_one_reads(array, cupy):
    two_gpus(cupy)
    parts = read_zarr_to_gpu(array, device=[1, 0])
    assert [part.device.id for part in parts] == [1, 0]
    assert np.array_equal(np.concatenate([part.get() for part in parts]), array[...])
    assert read_zarr_to_gpu(array, device=1).device.id == 1


@pytest.mark.gpu
def test_two_gpus_make_what_one_makes(tmp_path, cupy):
    two_gpus(cupy)
    values = np.random.default_rng(0).integers(0, 60000, (160, 192, 224)).astype("u2")
    write_omezarr(tmp_path / "a", values, (5, 5, 5), chunks=(64, 64, 64))
    options = {"mode": "nearest", "chunks": (32, 32, 32), "levels": 2, "memory_bytes": 4 * 2**20, "progress": int}
    module.resample_zarr(tmp_path / "a", tmp_path / "one", 7.3, device="cuda", **options)
    module.resample_zarr(tmp_path / "a", tmp_path / "two", 7.3, devices="all", **options)
    for two, one in zip(open_image(tmp_path / "two").levels, open_image(tmp_path / "one").levels, strict=True):
        assert np.array_equal(two[...], one[...])
