"""The Reader with many jobs at once, against zarr-python: on the host, on :mod:`fake_cupy`, and on a GPU."""

import contextlib
import gc
import itertools
import os
import random
import signal
import tempfile
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import budget
import numpy as np
import pytest
import reference
import zarr
from decoders import needs_compiler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import cases, encoded_cases, plain_values, random_values, regions, same, write

from linumpy.errors import ChunkError, RegionError, UnsupportedLayoutError
from linumpy.gpu.read import loop, reader
from linumpy.gpu.read.reader import Reader, release, shared_reader
from linumpy.plan.region import normalize_region

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
    large = place.empty(tuple(n + 1 for n in reversed(shape)) + (2,), dtype)
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


def check(place, job):
    """Each job has its right array, or its own error."""
    try:
        array = job.ticket.result()
    except CancelledError:
        assert job.refused
        return
    except ChunkError as error:
        assert job.broken, error
        return
    assert not job.broken
    assert job.out is None or array is job.out
    assert same(place.get(array), job.expected)
    report = job.ticket.report
    assert report.shape == array.shape
    assert report.chunks_read + report.chunks_filled == chunks_of(job)


def chunks_of(job):
    box = normalize_region(job.region, job.array.shape)
    counts = [-(-b // c) - a // c if b > a else 0 for a, b, c in zip(box.start, box.stop, job.array.chunks, strict=True)]
    return int(np.prod(counts))


@st.composite
def sets_of_jobs(draw):
    """Arrays, and for each of them regions."""
    result = []
    for _ in range(draw(st.integers(1, 3))):
        case = draw(cases(max_elements=300) | encoded_cases(max_elements=300))
        whole = st.just((Ellipsis,))
        voxel = st.just(tuple(0 for _ in case.shape))
        some = draw(st.lists(regions(case.shape) | whole | voxel, min_size=1, max_size=6))
        wider = "c16" if np.dtype(case.dtype).kind == "c" else "f8"
        dtype = draw(st.sampled_from([None, wider])) if np.dtype(case.dtype).kind != "b" else None
        ways = [(draw(st.sampled_from(["one", "many", "out"])), draw(st.integers(0, 5)) == 0) for _ in some]
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
                for _, group in itertools.groupby(mine, key=lambda job: id(job.array)):
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
        array = write(case, folder / str(number), plain_values(case.dtype, case.shape, seed))
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


def sets_against_zarr(make, groups, seed, broken, threads, boxes, **options):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_REQUEST_BOXES", boxes)
        jobs = write_jobs(Path(folder), groups, seed, broken)
        with make(seed) as place, Reader(place.device, **options) as one:
            carry_out(one, place, jobs, threads, random.Random(seed))
            assert one.stats().jobs == len(jobs)


def on_host(seed):
    return contextlib.nullcontext(OnHost())


@contextlib.contextmanager
def on_fake(seed):
    with reference.fake_device(seed) as fake, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "ReadEngine", reference.SmallEngine)
        yield OnFake(fake)


SETS = {
    "groups": sets_of_jobs(),
    "seed": st.integers(0, 2**32 - 1),
    "broken": st.booleans(),
    "threads": st.sampled_from([1, 3]),
    "boxes": st.sampled_from([2**16, 3]),
}


@settings(inside_a_test, max_examples=budget.examples(300))
@given(**SETS)
def test_sets_of_arrays_and_regions_on_the_host(groups, seed, broken, threads, boxes):
    sets_against_zarr(on_host, groups, seed, broken, threads, boxes)


@needs_compiler
@settings(inside_a_test, max_examples=budget.examples(200))
@given(**SETS, decode_on=st.sampled_from(["device", "host", None]))
def test_sets_of_arrays_and_regions_on_the_fake_device(groups, seed, broken, threads, boxes, decode_on):
    sets_against_zarr(on_fake, groups, seed, broken, threads, boxes, decode_on=decode_on)
