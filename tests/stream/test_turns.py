"""If this fails, a batch takes more turns of the interpreter's lock, each of which waits for a busy thread."""

import sys
import threading
import time
from contextlib import contextmanager

import numcodecs
import numpy as np
import pytest
import zarr

from linumpy import stream
from linumpy.core.reader import CoreReader
from tests.support.stream_arrays import make_array

pytestmark = pytest.mark.needs_core
BOX = ((0, 4), (0, 5), (0, 6))


class Waits:
    """Counts the waits of a library by their threads."""

    def __init__(self, waiting):
        self._waiting, self.threads = waiting, []

    def __getattr__(self, name):
        function = getattr(self._waiting, name)

        def counted(*arguments):
            self.threads.append((name, threading.current_thread().name))
            return function(*arguments)

        return counted


@pytest.fixture
def waits(monkeypatch):
    counted = []
    original = CoreReader.__init__

    def begin(self, *arguments, **options):
        original(self, *arguments, **options)
        library = self._library

        class Counted:
            quick, waiting = library.quick, Waits(library.waiting)

        self._library = Counted
        counted.append(Counted.waiting)

    monkeypatch.setattr(CoreReader, "__init__", begin)
    return counted


def files(calls):
    """Calls of the file system among those of builtin functions."""
    return [one for one in calls if one[0].startswith(("posix.", "_io.")) and one[0] not in ("posix.getpid",)]


def test_a_batch_waits_once_and_looks_at_no_file_in_python(tmp_path, pipeline, waits):
    """However many samples and arrays it has; the core looks at the metadata files."""
    values = np.random.default_rng(0).integers(0, 999, (20, 30, 40)).astype("u2")
    paths = [make_array(tmp_path / str(k), values + np.uint16(k), (8, 8, 16)) for k in range(6)]
    samples = [stream.Sample(paths[k % 6], ((k % 9, k % 9 + 4), *BOX[1:])) for k in range(400)]
    calls = []

    def profile(frame, event, argument):
        if event == "c_call":
            module = getattr(argument, "__module__", None) or ""
            calls.append((f"{module}.{argument.__name__}", threading.current_thread().name))

    threading.setprofile(profile)
    try:
        p = pipeline(batch_size=8, lookahead_batches=3)
    finally:
        threading.setprofile(None)
    p.push(samples)
    for batch in p.batches(10):
        batch.release()
    p.flush()  # arrays are open, and nothing is pulled or submitted now
    (waited,) = waits
    waited.threads.clear()
    calls.clear()
    sys.setprofile(profile)
    try:
        for batch in p.batches(30):
            with batch as tensor:
                first = batch.samples[0]
                found = tensor.numpy()[0]
            start = first.aabb[0][0]
            assert np.array_equal(found, values[start : start + 4, :5, :6] + paths.index(first.uri))
    finally:
        sys.setprofile(None)
    assert len(waited.threads) <= 30
    assert {name for name, _ in waited.threads} <= {"lc_wait_jobs"}
    assert calls
    assert files(calls) == []


def test_a_batch_that_was_read_is_not_waited_for(volume, pipeline, waits):
    p = pipeline(batch_size=4)
    p.push([stream.Sample(volume[0], BOX)] * 8)
    p.flush()
    (waited,) = waits
    assert not [name for name, _ in waited.threads if name != "lc_wait_jobs"]
    waited.threads.clear()
    assert np.array_equal(p.pop().numpy()[0], volume[1][:4, :5, :6])
    assert waited.threads == []


@contextmanager
def busy_thread():
    """Another thread that never sleeps, and from which the interpreter's lock is had after 20 ms."""
    stopped = False

    def spin():
        while not stopped:
            pass

    other, before = threading.Thread(target=spin, daemon=True), sys.getswitchinterval()
    sys.setswitchinterval(0.02)
    try:
        other.start()
        yield
    finally:
        sys.setswitchinterval(before)
        stopped = True
        other.join()


def test_batches_beside_a_busy_thread(volume, pipeline):
    """A batch takes a few turns of the interpreter, not some for each crop."""
    p = pipeline(batch_size=32, lookahead_batches=4)
    p.push([stream.Sample(volume[0], BOX)] * 32 * 40)
    for batch in p.batches(4):
        batch.release()
    with busy_thread():
        begin = time.perf_counter()
        for batch in p.batches(20):
            batch.release()
        seconds = time.perf_counter() - begin
    assert seconds / 20 < 8 * 0.02  # 32 crops, each waited for by itself, would take 32 turns


@pytest.mark.parametrize(
    ("slots", "least", "most", "pushed"), [(40, 8, 16, list), (7, 4, 5, list), (4, 1, 2, list), (40, 1, 2, iter)]
)
def test_more_batches_are_read_ahead_beside_a_busy_thread(volume, pipeline, slots, least, most, pushed):
    """Where they fit, and nobody notices that further samples are pulled."""
    path, values = volume
    boxes = [((k % 16, k % 16 + 4), *BOX[1:]) for k in range(12_000)]
    p = pipeline(batch_size=2, lookahead_batches=2, device_buffer_bytes=slots * 1024)  # a batch has 960 bytes
    p.push(pushed([stream.Sample(path, box) for box in boxes]))
    found, in_flight = [], []

    def pop(count):
        for batch in p.batches(count):
            with batch as tensor:
                found.append(tensor.numpy()[:, 0, 0, 0])
            in_flight.append(p.in_flight)

    with busy_thread():
        end = time.monotonic() + 20
        while (len(found) < 30 or max(in_flight) < least) and time.monotonic() < end and len(found) < 5000:
            pop(1)
        pop(5)
    assert least <= max(in_flight) <= most
    for _ in range(50):  # until turns are timely again
        time.sleep(0.005)
        pop(1)
    p.flush()
    assert p.in_flight <= 2
    assert np.array_equal(np.concatenate(found), [values[box[0][0], 0, 0] for box in boxes[: 2 * len(found)]])


def rewritten(path, values, **options):
    zarr.create_array(path, shape=values.shape, dtype=values.dtype, overwrite=True, **options)[...] = values


def test_an_array_that_another_pipeline_has_opened_is_known_and_looked_at(tmp_path, pipeline):
    """Also of the stored dtype, which the first batch of a pipeline settles."""
    values = np.arange(16).reshape(4, 4)
    for dtype, chunks in (("u2", (4, 4)), ("f4", (2, 4)), ("u2", (1, 2))):
        rewritten(tmp_path / "a", values.astype(dtype), chunks=chunks)
        p = pipeline(batch_size=1, dtype="stored")
        p.push([stream.Sample(tmp_path / "a", ((0, 4), (0, 4)))] * 3)
        for batch in p.batches():
            assert batch.tensors[0].dtype == np.dtype(dtype).name
            assert np.array_equal(batch.numpy()[0], values)


def test_more_arrays_than_are_kept_are_not_opened_by_threads_again(tmp_path, pipeline, monkeypatch):
    paths = [make_array(tmp_path / str(k), np.full((4, 4), k, "u1")) for k in range(12)]
    p = pipeline(batch_size=3, n_zarrs_meta_cache=2)
    samples = [stream.Sample(path, ((0, 4), (0, 4))) for path in paths]
    p.push(samples)
    assert [np.unique(crop).tolist() for batch in p.batches() for crop in batch.numpy()] == [[k] for k in range(12)]
    submitted = []
    original = p._producer.sources.pool.submit
    monkeypatch.setattr(p._producer.sources.pool, "submit", lambda *work: submitted.append(work) or original(*work))
    for k in (3, 7):
        rewritten(tmp_path / str(k), np.full((4, 4), 100 + k, "i4"), chunks=(2, 2))
    p.push(samples)
    expected = [[100 + k] if k in (3, 7) else [k] for k in range(12)]
    assert [np.unique(crop).tolist() for batch in p.batches() for crop in batch.numpy()] == expected
    assert submitted == []


def test_one_of_two_arrays_that_is_written_anew_during_the_wait_for_memory(tmp_path, pipeline):
    """The core does not read them, so that it does not notice."""
    stored = {"zarr_format": 2, "compressors": numcodecs.BZ2()}
    rewritten(tmp_path / "a", np.full((4, 4), 1, "u1"), chunks=(4, 4), **stored)
    rewritten(tmp_path / "b", np.full((4, 4), 2, "u1"), chunks=(4, 4), **stored)
    p = pipeline(dtype="stored", device_buffer_bytes=2 * 512)
    p.push([stream.Sample(tmp_path / name, ((0, 4), (0, 4))) for name in "abab" + "ab"])
    held = [p.pop(), p.pop()]
    end = time.monotonic() + 10
    while p._producer.submitter.starved_since is None and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.05)
    rewritten(tmp_path / "b", np.full((4, 4), 3, "u1"), chunks=(2, 1), **stored)
    for batch in held:
        batch.release()
    assert np.unique(p.pop().numpy(), axis=-1).tolist() == [[[1]] * 4, [[3]] * 4]


def test_an_array_that_grows_is_read_where_it_has_grown(tmp_path, pipeline):
    rewritten(tmp_path / "a", np.zeros((4, 4), "u1"), chunks=(4, 4))
    p = pipeline(batch_size=1)
    p.push(stream.Sample(tmp_path / "a", ((0, 4), (0, 4))))
    p.pop().release()
    rewritten(tmp_path / "a", np.full((8, 4), 5, "u1"), chunks=(4, 4))
    p.push(stream.Sample(tmp_path / "a", ((4, 8), (0, 4))))
    assert (p.pop().numpy() == 5).all()


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_array_that_shrinks_is_an_error_of_its_sample(tmp_path, pipeline, on_error):
    """The core says that its metadata are others; they are read anew, and tell that the crop lies outside."""
    for name in "ab":
        rewritten(tmp_path / name, np.full((8, 4), 3, "u1"), chunks=(4, 4))
    one, other = (stream.Sample(tmp_path / name, ((4, 8), (0, 4))) for name in "ab")
    p = pipeline(batch_size=2, on_error=on_error)
    p.push([one, other])
    p.pop().release()
    rewritten(tmp_path / "a", np.full((4, 4), 3, "u1"), chunks=(4, 4))
    p.push(iter([one, other]))
    if on_error == "raise":
        with pytest.raises(stream.InvalidArgument, match="with 4 voxels") as raised:
            p.pop()
        assert raised.value.sample == one
    with p.pop() as batch:
        assert batch.samples == (other,)
        assert (batch.numpy() == 3).all()


def test_staged_crops_of_an_array_that_is_written_anew(tmp_path, pipeline):
    p = pipeline(batch_size=2, pad="edge")
    for turn, size in enumerate((8, 6, 12)):
        rewritten(tmp_path / "a", np.full((size, 4), 7 + turn, "u1"), chunks=(2 + turn, 4))
        p.push([stream.Sample(tmp_path / "a", ((2, 10), (0, 4)))] * 2)
        assert (p.pop().numpy() == 7 + turn).all()
