"""One reader for rounds of jobs on arrays that change between them: caches, kept files, small rings, cancellations."""

import contextlib
import itertools
import json
import os
import random
import shutil
import tempfile
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import budget
import numpy as np
import pytest
import reference
import zarr
from decoders import needs_compiler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from linumpy.gpu.loop import cache, jobs
from linumpy.gpu.loop.jobs import Regions, make_request
from linumpy.gpu.loop.limits import limits_for
from linumpy.gpu.loop.ticket import Ticket
from linumpy.gpu.loop.wave import Part
from linumpy.gpu.staging import engines
from linumpy.gpu.staging.scatter import Conversion

from linumpy.gpu.read.reader import Reader
from linumpy.io.layout import read_layout

inside_a_test = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

GEOMETRIES = [
    {"shape": (40, 48), "chunks": (8, 16), "compressors": None},
    {"shape": (40, 48), "chunks": (8, 16), "compressors": "auto"},
    {"shape": (40, 48), "chunks": (8, 16), "compressors": None, "shards": (16, 48)},
    {"shape": (40, 48), "chunks": (8, 16), "compressors": "auto", "shards": (16, 48)},
    {"shape": (37, 50), "chunks": (16, 8), "compressors": "auto", "shards": (16, 48)},
    {"shape": (24, 20), "chunks": (10, 7), "compressors": "auto"},
    {"shape": (90, 100), "chunks": (90, 100), "compressors": None},
    {"shape": (700,), "chunks": (100,), "compressors": "auto", "shards": (300,)},
]


class World:
    """Arrays that change, and what they hold."""

    def __init__(self, folder, rng, clock):
        self.folder, self.rng, self.clock, self.arrays = Path(folder), rng, clock, {}

    def write(self, name):
        """Write an array anew, of any geometry."""
        path, geometry = self.folder / name, self.rng.choice(GEOMETRIES)
        shutil.rmtree(path, ignore_errors=True)
        dtype = self.rng.choice(["u2", "i2", "f4"])
        self.arrays[name] = zarr.create_array(path, dtype=dtype, fill_value=7, **geometry)
        self.fill(name)

    def fill(self, name):
        """Write other values to some part of an array."""
        array = self.arrays[name]
        values = np.random.default_rng(self.rng.randrange(2**32)).integers(0, 100, array.shape)
        rows = self.rng.choice([Ellipsis, slice(0, 8), slice(16, 20)])
        array[rows] = values[rows].astype(array.dtype)
        self.tick(name)

    def swap(self, name):
        """Let two arrays change their names."""
        other = self.rng.choice(sorted(self.arrays))
        if other != name:
            spare = self.folder / "spare"
            for old, new in ((name, spare), (other, self.folder / name), (spare, self.folder / other)):
                os.rename(self.folder / old, new)
            for one in (name, other):
                self.arrays[one] = zarr.open_array(self.folder / one)

    def reinterpret(self, name):
        """Write metadata of the same size anew: another type of as many bytes."""
        path = self.folder / name / "zarr.json"
        text = json.loads(path.read_text())
        text["data_type"] = {"uint16": "int16", "int16": "uint16"}.get(text["data_type"], text["data_type"])
        path.write_text(json.dumps(text))
        self.tick(name)
        self.arrays[name] = zarr.open_array(self.folder / name)

    def lose(self, name):
        """Remove a stored object, or put a link to it in its place."""
        files = sorted(one for one in (self.folder / name).rglob("*") if one.is_file() and one.name != "zarr.json")
        if files:
            file = self.rng.choice(files)
            if self.rng.random() < 0.5:
                file.unlink()
            else:
                aside = self.folder / f"aside{next(self.clock)}"
                os.rename(file, aside)
                self.rng.choice([os.symlink, os.link])(aside, file)

    def tick(self, name):
        """Let no two versions of a file have the same time: the clock of a file system ticks every few ms."""
        for file in (self.folder / name).rglob("*"):
            if file.is_file():
                os.utime(file, ns=(0, 10**18 + next(self.clock)))

    def change(self):
        name = self.rng.choice("abc")
        if name not in self.arrays:
            self.write(name)
        else:
            self.rng.choice([self.write, *[self.fill] * 5, self.swap, self.reinterpret, self.lose])(name)

    def region(self, array):
        return tuple(
            slice(*sorted(self.rng.sample(range(n + 1), 2))) if self.rng.random() < 0.8 else slice(None)
            for n in array.shape
        )


def carry_out_round(world, one, place, threads):
    """Ask for regions of all arrays, by several threads; cancel some, and check the others."""
    rng, failures = world.rng, []
    wanted = []
    for name in rng.choices(sorted(world.arrays), k=rng.randrange(1, 7)):
        array = world.arrays[name]
        region = world.region(array)
        dtype = rng.choice([None, None, "f8"])
        wanted.append((name, region, dtype, array[region].astype(dtype or array.dtype), rng.random() < 0.1))

    def work(mine):
        try:
            with place.stream():
                tickets = []
                for _, some in sorted_groups(mine, lambda job: (len(job[1]), job[2] or "")):
                    if len(some) % 2:
                        paths = [world.folder / job[0] for job in some]
                        tickets += one.submit_many(paths, [job[1] for job in some], dtype=some[0][2])
                    else:
                        tickets += [one.submit(world.folder / job[0], job[1], dtype=job[2]) for job in some]
                order = [
                    job for _, some in sorted_groups(mine, lambda job: (len(job[1]), job[2] or "")) for job in some
                ]
                cancelled = [job[4] and ticket.cancel() for job, ticket in zip(order, tickets, strict=True)]
                for job, ticket, gone in zip(order, tickets, cancelled, strict=True):
                    assert ticket._settled.wait(30), "a job waits for ever"
                    if gone:
                        assert isinstance(ticket.exception(), CancelledError | None), ticket.exception()
                        continue
                    got = place.get(ticket.result())
                    assert got.dtype == job[3].dtype
                    assert np.array_equal(got, job[3]), job[:3]
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=work, args=(wanted[number::threads],)) for number in range(threads)]
    [thread.start() for thread in running]
    [thread.join(60) for thread in running]
    if failures:
        raise failures[0]


def sorted_groups(items, key):
    groups = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return sorted(groups.items(), key=lambda pair: pair[0])


class Place:
    """Host memory, or the stand-in for a device."""

    def __init__(self, fake):
        self.fake = fake
        self.device = "cpu" if fake is None else 0

    def stream(self):
        return contextlib.nullcontext() if self.fake is None else self.fake.cupy.cuda.Stream(non_blocking=True)

    def get(self, array):
        return array if self.fake is None else array.get()


def rounds(fake, seed, count, threads, most_chunks, boxes, **options):
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "_MOST_CHUNKS", most_chunks)
        patch.setattr(jobs, "REQUEST_BOXES", boxes)
        patch.setattr(engines, "ReadEngine", reference.SmallEngine)
        if options.pop("small"):
            reference.use_small_rings(patch)
            options["scratch_bytes"] = reference.SMALL_RING
        world, place = World(folder, rng, itertools.count()), Place(fake)
        world.write("a")
        with Reader(place.device, **options) as one:
            for _ in range(count):
                for _ in range(rng.randrange(3)):
                    world.change()
                carry_out_round(world, one, place, threads)
            found = one._loop.carrier.cache
            if found is not None:
                for slots in found._slots.values():
                    assert (slots.used < 2**61).all(), "a place of the cache is never filled"
            return one.stats()


@needs_compiler
@settings(inside_a_test, max_examples=budget.examples(36))
@given(
    seed=st.integers(0, 2**32 - 1),
    threads=st.sampled_from([1, 3]),
    most_chunks=st.sampled_from([2**24, 20, 40]),
    boxes=st.sampled_from([2**16, 4]),
    decode_on=st.sampled_from(["host"] * 5 + ["device"]),
    cache_bytes=st.sampled_from([0, 200, 2**11, 2**13, 2**14, 2**20]),
    direct=st.booleans(),
    slab_nbytes=st.sampled_from([None, 4096]),
    small=st.booleans(),
)
def test_arrays_that_change_between_jobs(seed, direct, **options):
    with reference.fake_device(seed, reference.PreadFile if direct else None) as fake:
        rounds(fake, seed, 8, direct=direct, **options)


def test_a_place_of_the_cache_that_was_found_is_kept_until_it_was_read(tmp_path):
    """Two jobs of other types read a chunk at the same time, and a third one finds what the first of them has kept."""
    array = zarr.create_array(tmp_path / "a", shape=(16, 16), chunks=(8, 16), dtype="u2", compressors=None)
    layout = read_layout(array)
    region = Regions(*(np.array(one, np.int64) for one in ([0], [[0, 0]], [[16, 16]], [[32, 2]], [0])))
    limits = limits_for(2**20, on_device=True, decode_on=None, slab_nbytes=None)
    ticket = Ticket(None, "a", lambda *_: None, None)
    part = Part(
        [make_request(limits, [layout], Conversion(array.dtype, array.dtype, False), region, 2, None, [ticket])]
    )
    kept = cache.ChunkCache(512, lambda nbytes: (None, 4096))
    first, second = np.array([0]), np.array([1])
    assert kept.find(part, first) == [-1]
    slots = [kept.reserve(part, first) for _ in range(2)]
    kept.keep(part, first, slots[0])
    assert kept.find(part, first) == kept.addresses(part, slots[0])
    kept.keep(part, first, slots[1])
    assert kept.reserve(part, second) == [-1], "the place of a chunk that is about to be read"
    assert kept.find(part, second) == [-1]
    assert kept.reserve(part, second) == slots[0]
    assert kept.find(part, first) == kept.addresses(part, slots[1])
