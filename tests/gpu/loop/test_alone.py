"""Small regions that are carried out by themselves, against zarr-python and against the way of all other jobs."""

import contextlib
import os
import random
import time
from dataclasses import asdict

import numpy as np
import pytest
import reference
import zarr
from decoders import needs_compiler
from file_batches import open_files
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from linumpy.gpu.loop import alone
from linumpy.io.reads.file_reads import NotCachedError
from stores import cases, encoded_cases, random_values, same, write

from linumpy.errors import ChunkError
from linumpy.gpu.read import reader
from linumpy.gpu.read.reader import Reader
from linumpy.plan.region import normalize_region

RAW, ZSTD = None, zarr.codecs.ZstdCodec()
KINDS = {
    "raw": {"compressors": RAW},
    "raw shards": {"compressors": RAW, "shards": (32, 48)},
    "zstd": {"compressors": ZSTD},
    "zstd shards": {"compressors": ZSTD, "shards": (32, 48)},
}
REGION = (slice(5, 15), slice(3, 40))  # 2 x 3 chunks
LATER = (slice(37, 47), slice(3, 40))  # in another shard


@pytest.fixture(params=sorted(KINDS))
def array(request, tmp_path):
    return written(tmp_path / "a", 1, **KINDS[request.param])


def written(folder, seed, **options):
    made = zarr.create_array(folder, shape=(64, 48), chunks=(8, 16), dtype="u2", fill_value=7, **options)
    made[...] = random_values("u2", (64, 48), seed)
    return made


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Reads on this machine may take longer than those that are left to other threads."""
    monkeypatch.setattr(alone, "SLOW", 10)


def kind_of(array):
    return KINDS[("zstd" if array.compressors else "raw") + (" shards" if array.shards else "")]


@pytest.fixture
def done(monkeypatch):
    """What became of each small job: whether it was carried out by itself."""
    results, real = [], alone.SmallJobs.carry_out

    def noted(self, job):
        results.append(real(self, job))
        return results[-1]

    monkeypatch.setattr(alone.SmallJobs, "carry_out", noted)
    return results


def in_the_way_of_others(array, region, times=1):
    """Read a region in the other way: (values, report) or the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "FEW_CHUNKS", 0)
        return read(array, region, times)


def read(array, region, times=1):
    with Reader(device="cpu") as one:
        for _ in range(times):
            ticket = one.submit_layout(one.layout_of(array), region)
            error = ticket.exception()
        return error or (ticket.result().copy(), ticket.report)


@contextlib.contextmanager
def place(on_device, seed):
    """Where outputs lie: a device argument, and functions that make and get arrays."""
    if not on_device:
        yield "cpu", np.empty, np.asarray
        return
    with reference.fake_device(seed) as device:
        yield 0, device.empty, lambda array: array.get()


@needs_compiler
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    case=st.one_of(cases(), encoded_cases()),
    data=st.data(),
    on_device=st.booleans(),
    target=st.sampled_from([None, "f4", "u1", "f8"]),
    seed=st.integers(1, 2**32 - 1),
)
def test_any_region_as_zarr_reads_it(tmp_path_factory, case, data, on_device, target, seed):
    array = write(case, tmp_path_factory.mktemp("store"))
    assume(target is None or np.dtype(case.dtype).kind in "biu")
    box = normalize_region(case.region, array.shape)
    whole = getattr(array, "shards", None) or array.chunks
    with place(on_device, seed) as (device, empty, get), pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "FEW_CHUNKS", alone.FEW_CHUNKS)
        with Reader(device) as one:
            layout = one.layout_of(array)
            for _ in range(3):  # also moved by whole stored objects, which is planned once
                most = [(n - stop) // size for n, stop, size in zip(array.shape, box.stop, whole, strict=True)]
                moved = [size * data.draw(st.integers(0, n)) for n, size in zip(most, whole, strict=True)]
                region = tuple(
                    slice(a + by, b + by) if kept else a + by
                    for a, b, kept, by in zip(box.start, box.stop, box.kept, moved, strict=True)
                )
                expected = np.asarray(array[region])
                dtype = np.dtype(target or expected.dtype).newbyteorder("=")
                out = None
                if data.draw(st.booleans()):
                    shape = expected.shape
                    large = empty((*(n + 1 for n in shape), data.draw(st.integers(1, 3))), dtype)
                    out = large[(*(slice(1, None) for _ in shape), 0, Ellipsis)]
                got = get(one.submit_layout(layout, region, out=out, dtype=dtype).result())
                assert same(got, expected.astype(dtype)), region


@pytest.mark.parametrize("times", [1, 3])
def test_it_is_done_and_told_as_other_jobs_are(array, done, times):
    expected, report = in_the_way_of_others(array, REGION, times)
    assert not any(done)
    done.clear()
    values, told = read(array, REGION, times)
    # The index of a shard is read by the other way, at the first time.
    assert done == [False, True, True][:times] if "shards" in str(array.metadata) else [True, True, True][:times]
    assert same(values, expected)
    assert same(values, array[REGION])
    differs = {"plan_seconds", "read_seconds", "host_decode_seconds"}
    if array.compressors:  # the other way opens a file for each of its chunks that the host decodes
        by_itself, other = (1, 7 if times == 1 else 6) if array.shards else (6, 6)
        assert told.files_opened == (by_itself if done[-1] else other)
        assert report.files_opened == other
        differs |= {"engine", "files_opened"}
    told, report = ({k: v for k, v in asdict(one).items() if k not in differs} for one in (told, report))
    assert told == report


def test_regions_that_lie_alike_are_planned_once(array, done, monkeypatch):
    plans, real = [], alone.plan_alone
    monkeypatch.setattr(alone, "plan_alone", lambda *some: plans.append(some) or real(*some))
    with Reader(device="cpu") as one:
        layout = one.layout_of(array)
        for _ in range(2):
            for row in (0, 32):
                region = (slice(row + 5, row + 15), slice(3, 40))
                assert same(one.submit_layout(layout, region).result(), array[region])
        limit = 16  # an address with another remainder moves other units
        assert 1 <= len(plans) <= limit
        for column in range(400):
            region = (slice(column % 50, column % 50 + 1), slice(column % 40, column % 40 + 1 + column // 50))
            assert same(one.submit_layout(layout, region).result(), array[region])
        assert len(one._loop._small._known) <= alone._PLANS
    assert any(done)


def missing(path):
    path.unlink()


def short(path):
    os.truncate(path, path.stat().st_size - 1)


def longer(path):
    path.write_bytes(path.read_bytes() + b"abcd")


def folder(path):
    path.unlink()
    path.mkdir()


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def broken(path):
    data = bytearray(path.read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    path.write_bytes(data)


def loop_of_links(path):
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("ruin", [missing, short, longer, folder, pipe, broken, loop_of_links])
@pytest.mark.parametrize("first", [True, False], ids=["at first", "later"])
def test_what_is_ruined_ends_as_in_other_jobs(array, tmp_path, done, ruin, first):
    is_shard = array.shards is not None
    region, path = (LATER, tmp_path / "a/c/1/0") if is_shard else (REGION, tmp_path / "a/c/1/1")
    before = open_files()
    with Reader(device="cpu") as one:
        layout = one.layout_of(array)
        if not first:  # once its plan and the indexes of its shards are known
            for _ in range(2):
                assert same(one.submit_layout(layout, region).result(), array[region])
        ruin(path)
        other = in_the_way_of_others(array, region)
        ticket = one.submit_layout(layout, region)
        error = ticket.exception()
        if isinstance(other, BaseException):
            assert (type(error), str(error)) == (type(other), str(other))
            assert isinstance(error, ChunkError)
        else:
            assert error is None
            assert same(ticket.result(), other[0])
            assert same(ticket.result(), array[region])
        elsewhere = (slice(21, 30), slice(3, 40))
        assert same(one.submit_layout(layout, elsewhere).result(), array[elsewhere])
    assert set(open_files()) <= set(before)


@pytest.mark.parametrize("change", ["written again", "another file"])
def test_a_file_that_changes_meanwhile_is_never_two_versions(array, tmp_path, done, monkeypatch, change):
    written(tmp_path / "b", 2, **kind_of(array))
    old, new = (tmp_path / name / "c/0/0" for name in "ab")
    versions = [array[REGION], None]
    real, calls = alone.read_cached, []

    def changed_then_read(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            if change == "another file":
                os.replace(new, old)
            else:
                old.write_bytes(new.read_bytes())
                os.utime(old, ns=(1, 1))
        return real(*arguments)

    with Reader(device="cpu") as one:
        layout = one.layout_of(array)
        for _ in range(2):
            one.submit_layout(layout, REGION).result()
        monkeypatch.setattr(alone, "read_cached", changed_then_read)
        ticket = one.submit_layout(layout, REGION)
        error = ticket.exception()
        versions[1] = array[REGION]
        # Chunks in files of their own may be of two versions, each chunk whole; a shard may not.
        if error is None and array.shards is not None:
            assert any(same(ticket.result(), one) for one in versions)
        elif error is None:
            step = 8, 16
            for row in range(3):
                for column in range(3):
                    part = (
                        slice(max(5, row * step[0]), min(15, (row + 1) * step[0])),
                        slice(max(3, column * step[1]), min(40, (column + 1) * step[1])),
                    )
                    at = tuple(slice(p.start - r.start, p.stop - r.start) for p, r in zip(part, REGION, strict=True))
                    assert any(same(ticket.result()[at], one[at]) for one in versions)
        else:
            assert isinstance(error, ChunkError)


def test_bytes_that_are_not_cached_are_read_in_the_other_way(array, done, monkeypatch):
    def not_cached(*_):
        raise NotCachedError

    with Reader(device="cpu") as one:
        layout = one.layout_of(array)
        one.submit_layout(layout, REGION).result()
        monkeypatch.setattr(alone, "read_cached", not_cached)
        done.clear()
        for _ in range(alone.COLD_BATCHES + 1):
            assert same(one.submit_layout(layout, REGION).result(), array[REGION])
        monkeypatch.undo()
        assert done == [False] * (alone.COLD_BATCHES + 1)
        assert same(one.submit_layout(layout, REGION).result(), array[REGION])


def test_slow_reads_are_left_to_the_threads_that_read(array, done, monkeypatch):
    real = alone.read_cached

    def slow(*arguments):
        time.sleep(0.003)
        return real(*arguments)

    with Reader(device="cpu") as one:
        layout = one.layout_of(array)
        one.submit_layout(layout, REGION).result()
        monkeypatch.setattr(alone, "SLOW", 0.002)
        monkeypatch.setattr(alone, "read_cached", slow)
        done.clear()
        for _ in range(alone.COLD_BATCHES + 2):
            assert same(one.submit_layout(layout, REGION).result(), array[REGION])
    assert done == [True] + [False] * alone.COLD_BATCHES + [True]


@pytest.mark.parametrize("what", ["take", "prepare", "open", "submit", "place"])
def test_a_call_that_fails_ends_no_other_job(array, done, what):
    """Before its kernel is queued a job is carried out again in the other way; behind that it has failed."""
    with reference.fake_device(3) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "FEW_CHUNKS", alone.FEW_CHUNKS)
        with Reader(0) as one:
            layout = one.layout_of(array)
            for _ in range(2):
                assert same(one.submit_layout(layout, REGION).result().get(), array[REGION])
            carrier = one._loop._small._carrier
            owner, name = {
                "take": (carrier, "take"),
                "prepare": (carrier.staging, "prepare"),
                "open": (alone.os, "open"),
                "submit": (carrier.pool, "submit"),
                "place": (carrier.staging, "place"),
            }[what]
            real, failed = getattr(owner, name), []

            def fails_once(*arguments, **options):
                if not failed:
                    failed.append(True)
                    raise MemoryError("none is left")
                return real(*arguments, **options)

            patch.setattr(owner, name, fails_once)
            ticket = one.submit_layout(layout, REGION)
            error = ticket.exception()
            if what == "place" and failed:
                assert isinstance(error, MemoryError)
            else:
                assert error is None
                assert same(ticket.result().get(), array[REGION])
            assert same(one.submit_layout(layout, REGION).result().get(), array[REGION])
        del device


def test_a_job_that_is_cancelled_meanwhile_is_not_written_to_later(array, done):
    rng = random.Random(4)
    with reference.fake_device(5) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "FEW_CHUNKS", alone.FEW_CHUNKS)
        with Reader(0) as one:
            layout = one.layout_of(array)
            for _ in range(40):
                out = device.empty((10, 37), "u2")
                ticket = one.submit_layout(layout, REGION, out=out)
                if rng.random() < 0.7 and ticket.cancel():
                    ticket.exception()
                    out.fill(3)
                    device.rest()
                    assert (out.get() == 3).all()
                else:
                    assert same(ticket.result().get(), array[REGION])
    assert any(done)
