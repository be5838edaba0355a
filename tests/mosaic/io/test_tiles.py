"""If this fails, tiles are lost or mixed while one is read, one computed and one written."""

import contextlib
import gc
import threading
import time
import weakref
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest

from linumpy.errors import GpuUnavailableError
from linumpy.mosaic.io.step import Step
from linumpy.mosaic.io.tiles import boxes, tile_shape
from linumpy.resample.blocks import overlap
from linumpy.resample.blocks.overlap import work_through


class Tile:
    """Something that weak references can point to."""

    def __init__(self, number):
        self.number = number


def test_about_three_tiles_are_in_memory():
    alive, most = weakref.WeakSet(), []

    def read(number):
        tile = Tile(number)
        alive.add(tile)
        return tile

    def compute(number, tile):
        assert tile.number == number
        time.sleep(0.005)
        gc.collect()
        most.append(len(alive))
        return number * 2

    written = []
    work_through(range(20), read, compute, lambda number, result: written.append((number, result)))
    assert written == [(n, 2 * n) for n in range(20)]
    assert 2 <= max(most) <= 4  # one that is read, one computed, one let go by the thread that writes
    gc.collect()
    assert not alive


def test_a_step_runs_where_it_is_asked_to(tmp_path, monkeypatch):
    monkeypatch.setattr("linumpy.device.why_no_cuda", lambda *_: "there is none")
    with pytest.raises(GpuUnavailableError, match="there is none"), Step(tmp_path / "o.zarr", device="cuda").work():
        pass


def test_a_slow_writer_holds_up_reads():
    read, written = [], []

    def write(number, result):
        time.sleep(0.02)
        assert len(read) - len(written) <= 4
        written.append(number)

    work_through(range(8), lambda n: read.append(n) or n, lambda n, tile: tile, write)
    assert written == list(range(8))


def test_steps_run_where_they_are_said_to():
    names = {"read": set(), "compute": set(), "write": set()}

    def here(step):
        names[step].add(threading.current_thread().name)

    work_through(range(3), lambda n: here("read"), lambda n, tile: here("compute"), lambda n, result: here("write"))
    assert names["compute"] == {threading.current_thread().name}
    assert len(names["read"] | names["write"] | names["compute"]) == 3


def test_no_tiles_and_nothing_to_write():
    work_through([], lambda n: 1 / 0, lambda n, tile: 1 / 0)
    seen = []
    work_through(range(3), lambda n: n, lambda n, tile: seen.append(tile))
    assert seen == [0, 1, 2]


class Stream(contextlib.nullcontext):
    """A stream of a device whose work is done when something waits for it."""

    of_thread = threading.local()

    def __init__(self):
        super().__init__()
        self.work = []

    def __enter__(self):
        self.of_thread.current = self

    def synchronize(self):
        while self.work:
            self.work.pop(0)()

    def record(self):
        return self

    def wait_event(self, event):
        event.synchronize()


def test_no_result_is_let_go_while_a_device_still_adds_it_up(monkeypatch):
    """A write may start work on its stream, and return."""
    here, streams, alive, added = Stream(), (Stream(), Stream()), weakref.WeakValueDictionary(), []

    def current():
        return getattr(Stream.of_thread, "current", here)

    device = contextlib.nullcontext()
    device.id = 0
    cuda = SimpleNamespace(Device=lambda *_: device, get_current_stream=current)
    monkeypatch.setattr(overlap, "require_cuda", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(overlap, "_streams", lambda device: streams)

    def compute(number, tile):
        result = alive[number] = Tile(number)
        return result

    def write(number, result):
        current().work.append(lambda: added.append(number in alive))

    work_through(range(5), lambda number: None, compute, write, device="cuda")
    assert added == [True] * 5


def test_an_interrupt_ends_it():
    def compute(number, tile):
        if number == 2:
            raise KeyboardInterrupt
        return tile

    written = []
    with pytest.raises(KeyboardInterrupt):
        work_through(range(50), lambda n: n, compute, lambda n, result: written.append(n))
    assert written == [0, 1]


def test_steps_choose_the_device_by_themselves():
    """Only in these tests the default is the CPU."""
    assert [field.default for field in fields(Step) if field.name == "device"] == ["auto"]


@pytest.mark.parametrize("seed", range(30))
def test_boxes_cover_a_shape_once(seed):
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 12, rng.integers(1, 4)))
    step = tuple(int(n) for n in rng.integers(1, 6, len(shape)))
    size = tile_shape(shape, step, 2, int(rng.integers(1, 4000)))
    assert all(s == n or s % p == 0 for s, p, n in zip(size, step, shape, strict=True))
    seen = np.zeros(shape, int)
    for box in boxes(shape, size):
        seen[box] += 1
    assert (seen == 1).all()


class FakeCuda:
    """The order of what streams and threads do, without a device."""

    def __init__(self):
        self.log, self._here, self._lock = [], threading.local(), threading.Lock()
        self.cuda = self
        self.null = FakeStream(self, "null")

    def Device(self, number=0):  # noqa: N802
        return FakeDevice(number)

    def Stream(self, non_blocking):  # noqa: N802
        assert non_blocking
        with self._lock:
            self.made = getattr(self, "made", 0) + 1
            return FakeStream(self, ("reads", "writes")[self.made - 1])

    def get_current_stream(self):
        return getattr(self._here, "stream", self.null)

    def use(self, stream):
        self._here.stream = stream

    def note(self, *what):
        with self._lock:
            self.log.append(what)


class FakeDevice:
    def __init__(self, number):
        self.id = number

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


class FakeStream:
    def __init__(self, cuda, name):
        self.cuda, self.name, self.marks = cuda, name, 0

    def __enter__(self):
        self.before = self.cuda.get_current_stream()
        self.cuda.use(self)

    def __exit__(self, *error):
        self.cuda.use(self.before)

    def record(self):
        self.marks += 1
        return FakeEvent(self.cuda, f"{self.name} {self.marks}")

    def wait_event(self, event):
        self.cuda.note(self.name, "follows", event.name)

    def synchronize(self):
        self.cuda.note("at rest", self.name)


class FakeEvent:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def synchronize(self):
        self.cuda.note("waited for", self.name)


def test_on_a_device_each_step_waits_for_the_one_before_it(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setattr(overlap, "require_cuda", lambda: cuda)
    overlap._streams.cache_clear()

    class DeviceTile(Tile):
        def __del__(self):
            cuda.note("let go", self.number)

    def step(name, result=None):
        def work(number, *rest):
            cuda.note(name, number, cuda.get_current_stream().name)
            return result(number) if result else number

        return work

    work_through(range(4), step("read", DeviceTile), step("compute"), step("write", lambda _: None), device="cuda")
    overlap._streams.cache_clear()
    log = cuda.log
    for n in range(4):
        # Each on its own stream; compute follows the read; the write begins, and the tile goes, when compute is done.
        order = [
            ("read", n, "reads"), ("null", "follows", f"reads {n + 1}"), ("compute", n, "null"),
            ("waited for", f"null {n + 1}"), ("write", n, "writes"),
        ]  # fmt: skip
        places = [log.index(one) for one in order]
        assert places == sorted(places), log
        assert log.index(("let go", n)) > log.index(("waited for", f"null {n + 1}"))
    assert log[-3:] == [("at rest", name) for name in ("null", "reads", "writes")]


@pytest.mark.gpu
@pytest.mark.parametrize("own_stream", [False, True])
def test_no_tile_is_written_over_while_a_device_still_works_on_it(cupy, own_stream):
    # Reads fill memory that was just let go; kernels that come late would see the next tile in it.
    shape, count = (256, 1024, 64), 40
    results = {}

    def read(number):
        return cupy.full(shape, number, np.float32)

    def compute(number, tile):
        total = cupy.zeros(shape[1:], np.float64)
        for _ in range(20):  # started here, done later
            total += tile.sum(axis=0, dtype=np.float64)
        return total

    def write(number, result):
        results[number] = result.get()

    stream = cupy.cuda.Stream(non_blocking=True) if own_stream else cupy.cuda.Stream.null
    with stream:
        work_through(range(count), read, compute, write, device="cuda")
    for number in range(count):
        assert (results[number] == 20.0 * shape[0] * number).all()


@pytest.mark.gpu
def test_threads_work_on_the_callers_device_on_streams_of_their_own(cupy):
    seen = {}

    def note(step):
        seen[step] = (cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr)

    work_through(
        range(2), lambda n: note("read"), lambda n, tile: note("compute"), lambda n, made: note("write"), device="cuda"
    )
    assert {device for device, _ in seen.values()} == {cupy.cuda.Device().id}
    assert len({stream for _, stream in seen.values()}) == 3
    assert overlap._streams(cupy.cuda.Device().id) is overlap._streams(cupy.cuda.Device().id)
