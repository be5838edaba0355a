"""If this fails, a Reader with many jobs gives a job wrong voxels, or those of another (oracle: zarr-python)."""

import contextlib
import gc
import itertools
import os
import random
import signal
import tempfile
import threading
import time
import warnings
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linumpy.core import native
from linumpy.errors import ChunkError, RegionError, SourceError
from linumpy.gpu.read.layouts import LAYOUTS
from linumpy.gpu.read.reader import Reader
from linumpy.plan.region import normalize_region
from tests.support import budget
from tests.support.gpu import reference
from tests.support.regions import into_rows
from tests.support.stores import cases, encoded_cases, plain_values, random_values, regions, same, stored, write

inside_a_test = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


class OnHost:
    """Where outputs lie: host memory."""

    device = "cpu"
    empty = staticmethod(np.empty)
    get = staticmethod(np.asarray)

    @staticmethod
    def stream():
        return contextlib.nullcontext()


class OnFake:
    """The device of the tests."""

    device = 0

    def __init__(self, fake):
        self.empty, self._stream = fake.empty, fake.cupy.cuda.Stream

    @staticmethod
    def get(array):
        return array.get()

    def stream(self):
        return self._stream(non_blocking=True)


class OnGpu(OnFake):
    """A GPU."""

    def __init__(self, cupy):
        self.empty, self._stream = cupy.empty, cupy.cuda.Stream


@dataclass
class Job:
    """A region that is asked for, with what becomes of it."""

    array: zarr.Array
    region: Any
    dtype: Any
    way: str
    cancelled: bool
    broken: bool
    ticket: Any = None
    out: Any = None
    refused: bool = False

    @property
    def expected(self):
        values = np.asarray(self.array[self.region]) if not self.broken else None
        return values if values is None or self.dtype is None else values.astype(self.dtype)


def objects(array):
    """Stored objects: coordinates and paths, of those that are there."""
    step = getattr(array, "shards", None) or array.chunks
    counts = [range(-(-n // s)) for n, s in zip(array.shape, step, strict=True)]
    for where in itertools.product(*counts):
        path = Path(str(array.store.root)) / array.metadata.encode_chunk_key(where)
        if path.exists():
            yield where, path, step


def touches(array, region, where, step):
    box = normalize_region(region, array.shape)
    bounds = zip(box.start, box.stop, where, step, strict=True)
    return all(a < b and a < (w + 1) * s and b > w * s for a, b, w, s in bounds)


def out_of(place, job):
    """An output whose elements lie apart, and whose axes lie in another order."""
    shape = normalize_region(job.region, job.array.shape).shape
    dtype = np.dtype(job.dtype or job.array.dtype).newbyteorder("=")
    large = place.empty((*(n + 1 for n in reversed(shape)), 2), dtype)
    return large[(*(slice(0, n) for n in reversed(shape)), 0, Ellipsis)].transpose(*reversed(range(len(shape))))


def submit(one, place, jobs):
    """Submit jobs of one array, in the way that each names."""
    many = [job for job in jobs if job.way == "many"]
    for job in jobs:
        if job.way != "many":
            job.out = out_of(place, job) if job.way == "out" else None
            job.ticket = one.submit(job.array, job.region, out=job.out, dtype=job.dtype)
    boxes = [normalize_region(job.region, job.array.shape) for job in many]
    wanted = [job.region for job in many]
    if many and all(all(box.kept) for box in boxes):
        wanted = np.array([[box.start, box.stop] for box in boxes]).transpose(0, 2, 1)
    if len(many) % 2:
        for job in many:
            job.out = out_of(place, job)
    outs = [job.out for job in many] if len(many) % 2 else None
    tickets = one.submit_many(many[0].array, wanted, outs=outs, dtype=many[0].dtype) if many else []
    for job, ticket in zip(many, tickets, strict=True):
        job.ticket = ticket
    for job in jobs:
        job.refused = job.cancelled and job.ticket.cancel()


def submit_together(one, place, jobs):
    """Submit jobs of several arrays by one call for each number of axes."""
    for _, some in itertools.groupby(sorted(jobs, key=lambda job: job.array.ndim), key=lambda job: job.array.ndim):
        group, outs = list(some), None
        if len(group) % 2 or any(job.dtype is not None for job in group):
            outs = [out_of(place, job) for job in group]
        tickets = one.submit_many([job.array for job in group], [job.region for job in group], outs=outs)
        for number, job in enumerate(group):
            job.ticket, job.out = tickets[number], None if outs is None else outs[number]
    for job in jobs:
        job.refused = job.cancelled and job.ticket.cancel()


def check(place, job):
    """Each job has its right array, or its own error."""
    error = job.ticket.exception()
    if error is not None:
        allowed = [CancelledError] * job.refused + [ChunkError] * job.broken
        assert type(error) in allowed, error
        with pytest.raises(type(error)):
            job.ticket.result()
        return
    assert not job.broken
    array = job.ticket.result()
    assert job.out is None or array is job.out
    assert same(place.get(array), job.expected)
    report = job.ticket.report
    assert report.shape == array.shape
    if native.why_no_core() is None:
        assert report.chunks_read + report.chunks_filled == chunks_of(job)


def chunks_of(job):
    box = normalize_region(job.region, job.array.shape)
    bounds = zip(box.start, box.stop, job.array.chunks, strict=True)
    return int(np.prod([-(-b // c) - a // c if b > a else 0 for a, b, c in bounds]))


@st.composite
def sets_of_jobs(draw):
    """Arrays, and for each of them regions."""
    result = []
    all_ways = draw(st.sampled_from([["one", "many", "out", "together"], ["together"]]))
    for _ in range(draw(st.integers(1, 3))):
        case = draw(cases(max_elements=300) | encoded_cases(max_elements=300))
        if result and draw(st.booleans()):
            case = result[-1][0]  # another array of the same geometry
        whole = st.just((Ellipsis,))
        voxel = st.just(tuple(0 for _ in case.shape))
        some = draw(st.lists(regions(case.shape) | whole | voxel, min_size=1, max_size=6))
        wider = "c16" if np.dtype(case.dtype).kind == "c" else "f8"
        dtype = draw(st.sampled_from([None, wider])) if np.dtype(case.dtype).kind != "b" else None
        ways = [(draw(st.sampled_from(all_ways)), draw(st.integers(0, 5)) == 0) for _ in some]
        result.append((case, some, dtype, ways))
    return result


def carry_out(one, place, jobs, threads, order):
    """Submit from several threads, in some order, and check everything."""
    order.shuffle(jobs)
    errors, ready = [], threading.Barrier(threads)

    def work(mine):
        try:
            ready.wait(30)
            with place.stream():
                submit_together(one, place, [job for job in mine if job.way == "together"])
                rest = [job for job in mine if job.way != "together"]
                for _, group in itertools.groupby(rest, key=lambda job: id(job.array)):
                    submit(one, place, list(group))
                for job in order.sample(mine, len(mine)):
                    check(place, job)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=work, args=(jobs[number::threads],)) for number in range(threads)]
    [thread.start() for thread in running]
    [thread.join(60) for thread in running]
    if errors:
        raise errors[0]


def write_jobs(folder, groups, seed, broken):
    """Write arrays; break a chunk of the first one."""
    jobs = []
    for number, (case, some, dtype, ways) in enumerate(groups):
        array = write(case, folder / str(number), plain_values(case.dtype, case.shape, seed + number))
        bad = None
        if broken and number == 0:
            there = [one for one in objects(array) if one[1].stat().st_size > 3]
            if there:
                bad = there[seed % len(there)]
        for region, (way, cancelled) in zip(some, ways, strict=True):
            lost = bad is not None and touches(array, region, bad[0], bad[2])
            jobs.append(Job(array, region, dtype, way, cancelled, lost))
        if bad is not None:
            [job.expected for job in jobs]
            os.truncate(bad[1], 3)
    return jobs


def sets_against_zarr(make, groups, seed, broken, threads, **options):
    with tempfile.TemporaryDirectory() as folder:
        wanted = write_jobs(Path(folder), groups, seed, broken)
        with make(seed) as place, Reader(place.device, **options) as one:
            carry_out(one, place, wanted, threads, random.Random(seed))
            assert one.stats().jobs == len(wanted)


def on_host(seed):
    return contextlib.nullcontext(OnHost())


@contextlib.contextmanager
def on_fake(seed):
    with reference.fake_device(seed) as fake:
        yield OnFake(fake)


@contextlib.contextmanager
def on_gpu(seed):
    import cupy

    yield OnGpu(cupy)


@pytest.fixture(params=[on_host, on_fake, pytest.param(on_gpu, marks=pytest.mark.gpu)])
def place(request):
    """Where outputs lie."""
    with request.param(1) as made:
        yield made


SETS = {
    "groups": sets_of_jobs(),
    "seed": st.integers(0, 2**32 - 1),
    "broken": st.booleans(),
    "threads": st.sampled_from([1, 3]),
}


@settings(inside_a_test, max_examples=budget.examples(200))
@given(**SETS)
def test_sets_of_arrays_and_regions_on_the_host(groups, seed, broken, threads):
    sets_against_zarr(on_host, groups, seed, broken, threads)


@settings(inside_a_test, max_examples=budget.examples(120))
@given(
    **SETS, decode_on=st.sampled_from(["device", "host", None]), cache=st.sampled_from([0, 2**10, 2**20]),
    scratch=st.sampled_from(reference.SCRATCHES),
)  # fmt: skip
def test_sets_of_arrays_and_regions_on_the_fake_device(groups, seed, broken, threads, decode_on, cache, scratch):
    options = {"decode_on": decode_on, "cache_bytes": cache, "scratch_bytes": scratch}
    sets_against_zarr(on_fake, groups, seed, broken, threads, **options)


def make(folder, shape=(40, 48), chunks=(8, 16), dtype="u2", **options):
    return stored(folder, random_values(dtype, shape, 1), chunks, **({"compressors": None} | options))


@pytest.fixture
def one():
    """A reader into host memory."""
    with Reader("cpu") as made:
        yield made


def native_threads():
    """All threads of the process that are none of Python's: zarr-python starts others when it likes."""
    return set(map(int, os.listdir("/proc/self/task"))) - {one.native_id for one in threading.enumerate()}


KINDS = {"raw": {}, "zstd": {"compressors": "auto"}, "shards": {"shards": (16, 48)}}


@pytest.mark.needs_core
@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_that_several_jobs_want_is_read_once(tmp_path, one, kind):
    array = make(tmp_path / "a", **KINDS[kind])
    regions = [np.s_[0:9, :], np.s_[3:12, 4:40], np.s_[...], np.s_[7:8, 5:6], np.s_[8:16, 0:16]]
    tickets = one.submit_many(array, regions)
    for ticket, region in zip(tickets, regions, strict=True):
        assert same(ticket.result(), array[region])
    assert one.stats().chunks == 15
    assert "regions 5, chunks 15, stored" in one._repr_html_()
    assert [ticket.report.chunks_read for ticket in tickets] == [6, 6, 15, 1, 1]
    if kind == "raw":
        # A chunk counts for each job that wants it.
        assert [ticket.report.bytes_read for ticket in tickets] == [6 * 256, 6 * 256, 15 * 256, 256, 256]


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_jobs_that_want_a_broken_chunk_fail(tmp_path, one, kind):
    array = make(tmp_path / "a", **KINDS[kind])
    expected = array[...]
    os.truncate(tmp_path / "a/c/1/0", 3)
    rows = 16 if kind == "shards" else 8
    tickets = one.submit_many(array, [slice(k, k + 8) for k in range(0, 40, 8)])
    for number, ticket in enumerate(tickets):
        begin = 8 * number
        if rows <= begin < 2 * rows:
            with pytest.raises(ChunkError, match=r"c/1/0"):
                ticket.result()
            with pytest.raises(ChunkError, match=r"c/1/0"):
                ticket.report  # noqa: B018
        else:
            assert same(ticket.result(), expected[begin : begin + 8])
    assert same(one.submit(array, slice(0, 8)).result(), expected[:8])


def test_closing_cancels_what_is_queued_and_finishes_what_is_under_way(tmp_path):
    array = make(tmp_path / "a", compressors="auto")
    expected, ends = array[...], set()
    for number in range(20):
        one, tickets = Reader("cpu"), []
        closing = threading.Timer(0.002 * number, one.close)
        closing.start()
        while not one.is_closed:
            tickets += one.submit_many(array, [...] * 5)
        late = one.submit(array)
        closing.join(30)
        assert isinstance(late.exception(), RuntimeError)
        for ticket in tickets:
            assert ticket.done()
            error = ticket.exception()
            assert isinstance(error, CancelledError | RuntimeError | None), error
            ends.add(type(error))
            if error is None:
                assert same(ticket.result(), expected)
        one.close()
        with pytest.raises(RuntimeError, match="the reader is closed"):
            one.submit(array).result()
    assert len(ends) > 1
    assert type(None) in ends


def test_closing_a_reader_gives_everything_back(tmp_path, one):
    array = make(tmp_path / "a")
    one.submit(array).result()  # threads of the process are started
    threads, files = native_threads(), reference.open_files()
    for _ in range(5):
        with Reader("cpu") as other:
            other.submit_many(array, [slice(k, k + 8) for k in range(0, 40, 8)])
    assert native_threads() <= threads  # those of other tests may end meanwhile
    assert set(reference.open_files()) <= set(files)


def test_a_cancelled_job_is_not_written_once_it_is_over(tmp_path, one):
    array = make(tmp_path / "a")
    cancelled = 0
    for _ in range(40):
        outs = [np.full((40, 48), 7, "u2") for _ in range(20)]
        tickets = one.submit_many(array, [...] * 20, outs=outs)
        refused = [ticket.cancel() for ticket in tickets[::2]]
        for ticket, out, gone in zip(tickets[::2], outs[::2], refused, strict=True):
            assert isinstance(ticket.exception(), CancelledError) == gone
            if gone:
                out[...] = 9
        for ticket in tickets[1::2]:
            assert same(ticket.result(), array[...])
            assert not ticket.cancel()
        assert all((out == 9).all() for out, gone in zip(outs[::2], refused, strict=True) if gone)
        cancelled += sum(refused)
    assert cancelled


def test_interrupts_at_random_times_leave_the_reader_usable(tmp_path, one):
    array = make(tmp_path / "a", shape=(400, 480))
    expected, rng, interrupts = array[...], random.Random(1), 0
    longest = 0.03  # seconds until the interrupt; becomes about twice the time of a read, whatever machine this is
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(60):
            ticket = one.submit(array)
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, longest))
                got = ticket.result()
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert same(got, expected)
                longest = max(1e-4, longest * 0.8)
            except KeyboardInterrupt:
                interrupts += 1
                longest *= 1.25
                ticket.cancel()
                assert ticket.exception() is None or isinstance(ticket.exception(), CancelledError)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert interrupts > 5
    assert same(one.submit(array).result(), expected)


def memory_of_process():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_very_many_jobs_on_one_chunk(tmp_path):
    """Their table is longer than all that a reader with little scratch has."""
    array = make(tmp_path / "a", shape=(64, 64), chunks=(64, 64), compressors="auto")
    expected = array[...]
    start = np.random.default_rng(1).integers(0, 60, (30_000, 2))
    for place in (on_host, on_fake):
        with place(1) as where, Reader(where.device, 2**20) as one, where.stream():
            out = where.empty((len(start), 4, 4), "u2")
            outs = [out[number] for number in range(len(start))]
            tickets = one.submit_many(array, np.stack([start, start + 4], 2), outs=outs)
            assert [ticket for ticket in tickets if ticket.exception()] == []
            for number in range(0, len(start), 500):
                (a, b), ticket = start[number], tickets[number]
                assert np.array_equal(where.get(ticket.result()), expected[a : a + 4, b : b + 4])


@pytest.mark.parametrize("name", ["a", "group/s0"])
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_metadata_that_were_written_again_are_noticed(tmp_path, one, name, how):
    """Of an array, and of one that a group names as it likes."""
    group = tmp_path / "group"
    array = make(tmp_path / name)
    source = tmp_path / name.split("/")[0]
    if "/" in name:
        multiscale = {"axes": [{"name": "y", "type": "space"}, {"name": "x", "type": "space"}], "datasets": [{
            "path": "s0", "coordinateTransformations": [{"type": "scale", "scale": [1, 1]}]}]}  # fmt: skip
        zarr.open_group(group, mode="a").attrs["ome"] = {"version": "0.5", "multiscales": [multiscale]}
    before = one.stats()
    assert same(one.submit(source).result(), array[...])
    assert same(one.submit(source).result(), array[...])
    after = one.stats()
    assert (after.layout_hits - before.layout_hits, after.layout_misses - before.layout_misses) == (1, 1)
    file = tmp_path / name / "zarr.json"
    text = file.read_text().replace("uint16", "int16")
    time.sleep(0.02)
    if how == "in place":
        file.write_text(text)
    else:
        (tmp_path / "new").write_text(text)
        os.replace(tmp_path / "new", file)
    got = one.submit(source).result()
    assert got.dtype == np.int16
    assert same(got, zarr.open_array(tmp_path / name)[...])
    assert one.stats().layout_misses == before.layout_misses + 2
    os.unlink(file)
    with pytest.raises(SourceError, match=r"neither a Zarr array|does not exist"):
        one.submit(source)


def test_dots_behind_a_link_name_another_array(tmp_path, one):
    (tmp_path / "near").mkdir()
    (tmp_path / "far/inside").mkdir(parents=True)
    (tmp_path / "near/here").symlink_to(tmp_path / "far/inside")
    far, near = make(tmp_path / "far/a"), make(tmp_path / "near/a", shape=(7, 9), chunks=(7, 9))
    for _ in range(2):
        assert same(one.submit(tmp_path / "near/here/../a").result(), far[...])
        assert same(one.submit(tmp_path / "near/a").result(), near[...])


def test_a_relative_path_of_another_folder(tmp_path, one, monkeypatch):
    for name in "ab":
        make(tmp_path / name / "x", shape=(8 + ord(name), 9))
        monkeypatch.chdir(tmp_path / name)
        assert one.submit("x").result().shape == (8 + ord(name), 9)


@pytest.mark.needs_core
def test_a_shard_is_opened_once_for_its_index_and_its_data(tmp_path, one):
    array = make(tmp_path / "a", shards=(16, 48))
    ticket = one.submit(array)
    assert same(ticket.result(), array[...])
    assert ticket.report.files_opened == 3


@pytest.mark.needs_core
def test_a_shard_that_is_replaced_between_two_reads_is_noticed(tmp_path, one):
    array = make(tmp_path / "a", compressors="auto", shards=(16, 48))
    for seed in range(3):
        array[...] = values = random_values("u2", (40, 48), seed)
        array[16:24] = 0  # chunks of other lengths
        values[16:24] = 0
        for _ in range(2):
            assert same(one.submit(array).result(), values)
        time.sleep(0.02)
    stats = one.stats()
    assert (stats.index_misses, stats.index_hits) == (9, 9)
    (tmp_path / "a/c/1/0").unlink()
    values[16:32] = 0
    assert same(one.submit(array).result(), values)


BAD_REGIONS = [
    (np.zeros((3, 2), int), RegionError, r"shape \(3, 2\)"),
    (np.zeros((3, 3, 2), int), RegionError, r"shape \(3, 3, 2\)"),
    (np.zeros((3, 2, 2), float), RegionError, "dtype float64"),
    (np.array([[[0, 5], [0, 5]], [[-1, 5], [0, 5]]]), RegionError, r"region 1, \[\[-1, 5\], \[0, 5\]\].*\(40, 48\)"),
    (np.array([[[0, 41], [0, 5]]]), RegionError, r"region 0.*41"),
    (np.array([[[6, 5], [0, 5]]]), RegionError, r"region 0.*\[6, 5\]"),
    ([slice(None), (1, 2, 3)], RegionError, "3"),
    ([100], RegionError, "100"),
]


@pytest.mark.parametrize(("wanted", "error", "message"), BAD_REGIONS)
def test_regions_that_cannot_be(tmp_path, one, wanted, error, message):
    with pytest.raises(error, match=message):
        one.submit_many(make(tmp_path / "a"), wanted)


def test_outputs_that_cannot_be(tmp_path, one):
    array = make(tmp_path / "a")
    good = np.empty((40, 48), "u2")
    for out, options, error, message in (
        (np.empty((40, 47), "u2"), {}, ValueError, r"\(40, 47\).*\(40, 48\)"),
        (good, {"dtype": "f4"}, TypeError, "uint16.*float32"),
        ([[1, 2]], {}, TypeError, "list"),
        (np.lib.stride_tricks.as_strided(good, (40, 48), (0, 2)), {}, ValueError, "strides"),
        (np.lib.stride_tricks.as_strided(good, (40, 48), (94, 2)), {}, ValueError, "strides"),
        (np.lib.stride_tricks.as_strided(good, (40, 48), (2, 78)), {}, ValueError, "strides"),
        (good[::-1], {}, ValueError, "strides"),
        (np.empty((40, 48), ">u2"), {}, TypeError, ">u2"),
    ):
        with pytest.raises(error, match=message):
            one.submit(array, out=out, **options)
    with pytest.raises(ValueError, match="1 arrays, but there are 2 regions"):
        one.submit_many(array, [slice(1), slice(2)], outs=[good])
    good.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        one.submit(array, out=good)
    with reference.fake_device() as device, Reader(0) as other:
        with pytest.raises(TypeError, match=r"numpy\.ndarray.*CuPy"):
            other.submit(array, out=np.empty((40, 48), "u2"))
        elsewhere = device.empty((40, 48), "u2")
        other.device = 1
        with pytest.raises(ValueError, match="out lies on device 0, but this reader reads to device 1"):
            other.submit(array, out=elsewhere)


def test_readers_that_cannot_be():
    Reader("cpu", 2**20, slab_nbytes=4096).close()  # the smallest
    with pytest.raises(ValueError, match="scratch_bytes=1048575: at least 1048576"):
        Reader("cpu", 2**20 - 1)
    for options, message in (
        ({"device": "gpu"}, "device='gpu'"),
        ({"device": -1}, "device=-1"),
        ({"device": "cpu", "decode_on": "moon"}, "decode_on='moon'"),
        ({"device": "cpu", "slab_nbytes": 4095}, "slab_nbytes=4095"),
        ({"device": "cpu", "cache_bytes": -1}, "cache_bytes=-1"),
    ):
        with reference.fake_device(), pytest.raises(ValueError, match=message):
            Reader(**options)


def test_arrays_that_are_left_to_zarr(place, tmp_path, caplog):
    """By every submit, beside an array whose chunks differ in the codec only; said once in the log, and in reports."""
    values = random_values("u2", (9, 14), 3)
    codecs = {"raw": None, "lzma": [zarr.codecs.numcodecs.LZMA()]}
    paths = [tmp_path / name for name in codecs]
    for path, codec in zip(paths, codecs.values(), strict=True):
        zarr.create_array(path, data=values, chunks=(4, 5), compressors=codec)
    with Reader(place.device) as one, place.stream():
        layouts = [one.layout_of(path) for path in paths]
        assert layouts[0].geometry == layouts[1].geometry
        assert [one.reads_natively(layout) for layout in layouts] == [native.why_no_core() is None, False]
        tickets = one.submit_many(paths * 2, [np.s_[2:7, 3], np.s_[2:7, 3], ..., ...], dtype="f4")
        for ticket, region in zip(tickets, [np.s_[2:7, 3]] * 2 + [...] * 2, strict=True):
            assert same(place.get(ticket.result()), values[region].astype("f4"))
        assert tickets[1].report.backend == "zarr-python"
        assert "lzma" in tickets[1].report.fallback
        out = place.empty((14, 9), "u2")
        one.submit(paths[1], out=out.transpose(1, 0)).result()
        assert same(place.get(out), values.T.copy())
        held = place.empty((2, 2, 6, 8), "u2")
        held[...] = np.array(99, "u2")
        regions = into_rows([[[2, 7], [3, 9]], [[0, 5], [8, 14]]], held[:, 1], [1, 0], [True, True])
        one.submit_regions(layouts, replace(regions, array=np.array([0, 1])), "u2", held).result()
        filled = np.full((2, 2, 6, 8), 99, "u2")
        filled[1, 1, :5, :6], filled[0, 1, :5, :6] = values[2:7, 3:9], values[:5, 8:14]
        assert same(place.get(held), filled)
        (paths[1] / "c/0/0").write_bytes(b"no stream of lzma")
        with pytest.raises(ChunkError, match="lzma/c/0/0"):
            one.submit(paths[1], np.s_[:3, :3]).result()
    said = [record.message for record in caplog.records if str(tmp_path) in record.message]
    assert len(said) == 1
    assert "lzma: read by zarr-python, not by linumpy's reader: codec" in said[0]


def test_what_is_refused(tmp_path, one):
    with pytest.raises(FileNotFoundError, match="nothing"):
        one.submit(tmp_path / "nothing")
    with pytest.raises(TypeError, match="imaginary"):
        one.submit(make(tmp_path / "a", dtype="c8"), dtype="f4")
    with pytest.raises(TypeError, match="dtype='bfloat16' would drop the imaginary parts of complex64"):
        one.submit(tmp_path / "a", dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "u2", "i4", ">u4", "i8", "u8", "f2", ">f4", "f8"])
def test_bfloat16(place, tmp_path, dtype):
    """Of a region by itself, of many, with borders of fill values, into memory of the caller and into new arrays."""
    values = random_values(dtype, (20, 33), 5)
    if np.dtype(dtype).kind == "f":
        with np.errstate(over="ignore"):
            special = [np.nan, -np.nan, np.inf, -np.inf, 0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 1e-40, 65280]
            values[1, : len(special)] = np.array(special).astype(dtype)
    array = zarr.create_array(tmp_path / "a", shape=(30, 33), chunks=(7, 9), dtype=dtype, fill_value=3)
    array[:20] = values
    whole = array[...]
    with np.errstate(all="ignore"):
        single = whole.astype("f4")
        expected = single.astype(ml_dtypes.bfloat16)

    def check(got, region):
        got = place.get(got)
        assert got.dtype == np.uint16
        nan = np.isnan(single[region])
        assert np.array_equal(got[~nan], expected[region].view("u2")[~nan])
        assert np.isnan(got.view(ml_dtypes.bfloat16)[nan].astype("f4")).all()

    regions = [(slice(3, 12), slice(4, 20)), (slice(0, 20), slice(0, 33)), (slice(18, 30), slice(5, 33))]
    with Reader(place.device) as one:
        for _ in range(2):
            for region in regions:
                out = place.empty(whole[region].shape, np.uint16)
                check(one.submit(array, region, dtype="bfloat16").result(), region)
                check(one.submit(array, region, out=out, dtype="bfloat16").result(), region)
            tickets = one.submit_many(array, regions, dtype="bfloat16")
            for ticket, region in zip(tickets, regions, strict=True):
                check(ticket.result(), region)
                assert ticket.report.dtype == "bfloat16"
        with pytest.raises(TypeError, match="uint16"):
            one.submit(array, regions[0], out=place.empty(whole[regions[0]].shape, np.float32), dtype="bfloat16")


@pytest.mark.needs_core
@pytest.mark.parametrize("options", [{"compressors": None}, {}, {"compressors": None, "shards": (1, 16, 14)}])
def test_rows_of_one_array(place, tmp_path, options):
    """Regions of several sizes into rows of a view, with an axis that rows do not have, to wait for together."""
    values = random_values("u2", (3, 40, 30), 4)
    array = zarr.create_array(tmp_path / "a", shape=values.shape, chunks=(1, 8, 7), dtype="u2", fill_value=5, **options)
    array[:, :32] = values[:, :32]  # the rest is not stored
    expected, rng = array[...], np.random.default_rng(0)
    kept = [False, True, True]
    with Reader(place.device) as one:
        for dtype in ("u2", "f4"):
            held = place.empty((12, 2, 9, 11), dtype)
            held[...] = np.array(99, dtype)
            at = rng.integers(0, (3, 32, 20), (7, 3))
            size = rng.integers(0, (1, 10, 12), (7, 3)) + np.array([1, 0, 0])
            regions = np.stack([at, np.minimum(at + size, values.shape)], 2)
            rows = rng.permutation(12)[:7]
            layout = one.layout_of(array)
            one.submit_regions([layout], into_rows(regions, held[:, 1], rows, kept), dtype, held).result()
            filled = np.full((12, 2, 9, 11), 99, dtype)
            for row, ((z, _), (y, y_end), (x, x_end)) in zip(rows, regions.tolist(), strict=True):
                filled[row, 1, : y_end - y, : x_end - x] = expected[z, y:y_end, x:x_end]
            assert same(place.get(held), filled)
            nothing = into_rows(regions[:0], held[:, 1], rows[:0], kept)
            assert one.submit_regions([layout], nothing, dtype, held).done()
        (tmp_path / "a/c/0/0/0").write_bytes(b"ab")
        regions = np.array([[[0, 1], [0, 8], [0, 7]], [[0, 1], [16, 24], [0, 7]]])
        together = one.submit_regions([layout], into_rows(regions, held[:, 1], [0, 1], kept), dtype, held)
        assert {row: type(error) for row, error in together.errors().items()} == {0: ChunkError}
        with pytest.raises(ChunkError):
            together.result()
        one.submit_regions([layout], into_rows(regions[1:], held[:, 1], [1], kept), dtype, held).result()


def test_the_same_level_is_refused_before_and_after_a_read(tmp_path):
    array = zarr.create_array(tmp_path / "a", shape=(8, 8), chunks=(4, 4), dtype="u2")
    with Reader(device="cpu") as one:
        for _ in range(2):
            for level in (False, 0.0, [0]):
                with pytest.raises(TypeError, match=r"level=.*: a resolution level is an integer"):
                    one.submit(str(tmp_path / "a"), level=level)
            assert one.submit(str(tmp_path / "a")).result().shape == array.shape


def test_metadata_of_another_array_with_the_size_and_time_of_the_first(tmp_path):
    folder = tmp_path / "a"
    for value in (1, 2):
        zarr.create_array(tmp_path / str(value), shape=(4,), chunks=(4,), dtype="u1", fill_value=value)
    folder.mkdir()
    file = folder / "zarr.json"
    with Reader(device="cpu") as one:
        for value in (1, 2):
            with open(file, "r+b" if file.exists() else "wb") as opened:
                opened.write((tmp_path / str(value) / "zarr.json").read_bytes())
            os.utime(file, ns=(1, 1))
            assert (one.submit(folder).result() == value).all()


def test_a_child_of_a_process_that_looks_at_metadata_reads(tmp_path):
    array = make(tmp_path / "a")
    with LAYOUTS._lock:  # as another thread may
        child = os.fork()
        if not child:
            with Reader(device="cpu") as one:
                os._exit(0 if same(one.submit(str(tmp_path / "a")).result(), array[...]) else 1)
    for _ in range(200):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child waits for ever")
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_fill_value_that_the_dtype_cannot_hold_is_cast_without_a_warning(tmp_path):
    array = zarr.create_array(tmp_path / "a", shape=(8,), chunks=(4,), dtype="f4", fill_value=np.nan)
    array[...] = np.arange(8)
    with Reader(device="cpu") as one, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(one.submit(array, dtype="i4").result(), np.arange(8, dtype="i4"))


# --- On a GPU.


@pytest.mark.gpu
@settings(inside_a_test, max_examples=20)  # each pair of dtypes compiles a kernel
@given(**SETS, decode_on=st.sampled_from(["device", "host", None]), cache=st.sampled_from([0, 2**20]))
def test_sets_of_arrays_and_regions_on_a_gpu(groups, seed, broken, threads, decode_on, cache):
    sets_against_zarr(on_gpu, groups, seed, broken, threads, decode_on=decode_on, cache_bytes=cache)


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    """Arrays of the same values, stored raw, encoded and in shards."""
    folder = tmp_path_factory.mktemp("volumes")
    values = plain_values("u2", (96, 128, 160), 1)
    options = {"shape": values.shape, "chunks": (16, 32, 32), "dtype": "u2"}
    kinds = {
        "raw": {"compressors": None},
        "zstd": {"compressors": zarr.codecs.ZstdCodec(level=3)},
        "raw shards": {"compressors": None, "shards": (48, 64, 160)},
        "zstd shards": {"compressors": zarr.codecs.ZstdCodec(level=3), "shards": (48, 64, 160)},
    }
    for name, kind in kinds.items():
        zarr.create_array(folder / name, **options, **kind)[...] = values
    return folder, values, sorted(kinds)


def crops(rng, count, shape, size=(24, 40, 40)):
    start = rng.integers(0, np.array(shape) - np.array(size) + 1, (count, len(shape)))
    return np.stack([start, start + np.array(size)], axis=2)


def right(got, values, box):
    return np.array_equal(got.get(), values[tuple(slice(a, b) for a, b in box)])


@pytest.mark.gpu
@pytest.mark.parametrize("decode_on", ["device", "host", None])
def test_many_crops_from_eight_threads(cupy, volumes, decode_on):
    folder, values, kinds = volumes
    errors = []

    def work(number, one):
        try:
            rng = np.random.default_rng(number)
            with cupy.cuda.Stream(non_blocking=True):
                for kind in kinds:
                    boxes = crops(rng, 32, values.shape)
                    for box, ticket in zip(boxes, one.submit_many(folder / kind, boxes), strict=True):
                        assert right(ticket.result(), values, box), (kind, box)
        except BaseException as error:
            errors.append(error)

    with Reader(decode_on=decode_on) as one:
        running = [threading.Thread(target=work, args=(number, one)) for number in range(8)]
        [thread.start() for thread in running]
        [thread.join(60) for thread in running]
    assert errors == []


@pytest.mark.gpu
def test_a_result_on_another_stream(cupy, volumes):
    """What is queued on the stream of ``result`` finds the array complete, and its memory outlives the reading."""
    folder, values, kinds = volumes
    rng = np.random.default_rng(1)
    with Reader() as one:
        for number in range(40):
            first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
            (box,) = crops(rng, 1, values.shape)
            with first:
                (ticket,) = one.submit_many(folder / kinds[number % len(kinds)], box[None], dtype="f4")
            array = ticket.result(second)
            with second:
                got = (array + 1).get()
            del array, ticket
            assert np.array_equal(got, values[tuple(slice(a, b) for a, b in box)].astype("f4") + 1)


@pytest.mark.gpu
def test_memory_of_the_device_stays_flat(cupy, volumes):
    folder, values, kinds = volumes
    rng, pool = np.random.default_rng(1), cupy.get_default_memory_pool()
    with Reader() as one:

        def some(count):
            for number in range(count // 20):
                boxes = crops(rng, 20, values.shape)
                tickets = one.submit_many(folder / kinds[number % len(kinds)], boxes)
                assert right(tickets[0].result(), values, boxes[0])
                [ticket.result() for ticket in tickets[1:10]]  # and nobody waits for the others
            assert right(one.submit_many(folder / kinds[0], boxes)[-1].result(), values, boxes[-1])

        some(400)
        cupy.cuda.Device().synchronize()
        gc.collect()
        files, threads = reference.open_files(), native_threads()
        memory, used, reserved = memory_of_process(), pool.used_bytes(), pool.total_bytes()
        some(2000)
        cupy.cuda.Device().synchronize()
        gc.collect()
        assert set(reference.open_files()) <= set(files)
        assert native_threads() <= threads
        assert pool.used_bytes() <= used + 2**22
        assert pool.total_bytes() <= reserved + 2**26
        assert memory_of_process() - memory < 64 * 2**20
