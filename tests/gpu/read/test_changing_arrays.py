"""If this fails, arrays that change between reads or during one give old or mixed voxels."""

import contextlib
import itertools
import json
import os
import random
import shutil
import tempfile
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linumpy.errors import ChunkError
from linumpy.gpu.read.reader import Reader
from tests.support import budget
from tests.support.budget import matrix
from tests.support.gpu import reference
from tests.support.gpu.stand_in import needs_stand_in
from tests.support.stores import random_values, stored

pytestmark = needs_stand_in
inside_a_test = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

BLOSC = zarr.codecs.BloscCodec(cname="lz4", shuffle="shuffle")
GEOMETRIES = [
    {"shape": (40, 48), "chunks": (8, 16), "compressors": None},
    {"shape": (40, 48), "chunks": (8, 16), "compressors": "auto"},
    {"shape": (40, 48), "chunks": (8, 16), "compressors": None, "shards": (16, 48)},
    {"shape": (40, 48), "chunks": (8, 16), "compressors": "auto", "shards": (16, 48)},
    {"shape": (37, 50), "chunks": (16, 8), "compressors": "auto", "shards": (16, 48)},
    {"shape": (24, 20), "chunks": (10, 7), "compressors": BLOSC},
    {"shape": (90, 100), "chunks": (90, 100), "compressors": None},
    {"shape": (700,), "chunks": (100,), "compressors": "auto", "shards": (300,)},
    {"shape": (5, 1, 30, 7), "chunks": (2, 1, 9, 7), "compressors": zarr.codecs.GzipCodec()},
]


class World:
    """Arrays that change, and what they hold."""

    def __init__(self, folder, rng, clock):
        self.folder, self.rng, self.clock, self.arrays = Path(folder), rng, clock, {}

    def write(self, name):
        """Write an array anew, of any geometry."""
        path, geometry = self.folder / name, self.rng.choice(GEOMETRIES)
        shutil.rmtree(path, ignore_errors=True)
        dtype = self.rng.choice(["u2", "i2", "f4", ">u2"])
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
            slice(*sorted(self.rng.choices(range(n + 1), k=2))) if self.rng.random() < 0.8 else slice(None)
            for n in array.shape
        )


def over(ticket):
    """Wait for a ticket, which must end."""
    limit = time.monotonic() + 30
    while not ticket.done():
        assert time.monotonic() < limit, "a job waits for ever"
        time.sleep(0.0002)
    return ticket


def at_the_same_time(work, shares):
    """Call `work` with each share in a thread of its own; raise the first error."""
    failures = []

    def call(share):
        try:
            work(share)
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=call, args=(share,)) for share in shares]
    [thread.start() for thread in running]
    [thread.join(60) for thread in running]
    if failures:
        raise failures[0]


def carry_out_round(world, one, place, threads):
    """Ask for regions of all arrays, by several threads; cancel some, and check the others."""
    rng, wanted = world.rng, []
    for name in rng.choices(sorted(world.arrays), k=rng.randrange(1, 7)):
        array = world.arrays[name]
        region, dtype = world.region(array), rng.choice([None, None, "f8"])
        values = np.asarray(array[region]).astype(dtype or array.dtype.newbyteorder("="))
        wanted.append((name, region, dtype, values, rng.random() < 0.1))

    def work(mine):
        with place.stream():
            tickets = []
            for key in {(len(job[1]), job[2]) for job in mine}:
                some = [job for job in mine if (len(job[1]), job[2]) == key]
                if len(some) % 2:
                    paths = [world.folder / job[0] for job in some]
                    made = one.submit_many(paths, [job[1] for job in some], dtype=some[0][2])
                else:
                    made = [one.submit(world.folder / job[0], job[1], dtype=job[2]) for job in some]
                tickets += zip(some, made, strict=True)
            cancelled = [job[4] and ticket.cancel() for job, ticket in tickets]
            for (job, ticket), gone in zip(tickets, cancelled, strict=True):
                if gone:
                    assert isinstance(over(ticket).exception(), CancelledError), ticket.exception()
                    continue
                got = place.get(over(ticket).result())
                assert got.dtype == job[3].dtype
                assert np.array_equal(got, job[3]), job[:3]

    at_the_same_time(work, [wanted[number::threads] for number in range(threads)])


class Place:
    """Host memory, or the stand-in for a device."""

    def __init__(self, fake, on_host):
        self.fake, self.device = fake, "cpu" if on_host else 0
        self.empty = np.empty if on_host else fake.empty
        self.get = np.asarray if on_host else (lambda array: array.get())
        self.memory = np.asarray if on_host else (lambda array: array.host)

    def stream(self):
        return contextlib.nullcontext() if self.device == "cpu" else self.fake.cupy.cuda.Stream(non_blocking=True)


@settings(inside_a_test, max_examples=budget.examples(60))
@given(
    seed=st.integers(0, 2**32 - 1),
    on_host=st.booleans(),
    threads=st.sampled_from([1, 3]),
    decode_on=st.sampled_from(["host", "host", "device"]),
    cache_bytes=st.sampled_from([0, 200, 2**11, 2**14, 2**20]),
    scratch_bytes=st.sampled_from(reference.SCRATCHES),
)
def test_arrays_that_change_between_jobs(seed, on_host, threads, **options):
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, reference.fake_device(seed) as fake:
        world, place = World(folder, rng, itertools.count()), Place(fake, on_host)
        world.write("a")
        with Reader(place.device, **({} if on_host else options)) as one:
            for _ in range(8):
                for _ in range(rng.randrange(3)):
                    world.change()
                carry_out_round(world, one, place, threads)


KINDS = {
    "raw": {"compressors": None},
    "zstd": {"compressors": "auto"},
    "raw shards": {"compressors": None, "shards": (16, 48)},
    "zstd shards": {"compressors": "auto", "shards": (16, 48)},
}


def make(folder, kind, seed=1, shape=(160, 48)):
    return stored(folder, random_values("u2", shape, seed), (8, 16), **KINDS[kind])


class Asker:
    """A caller that asks for regions, cancels some, and writes to the outputs of those that have ended in vain."""

    def __init__(self, seed, one, arrays, place):
        self.rng, self.one, self.arrays, self.place, self.ended = random.Random(seed), one, arrays, place, []

    def __call__(self):
        for _ in range(self.rng.randrange(1, 4)):
            self.ask(*self.rng.choice(self.arrays))

    def ask(self, array, expected, allowed):
        rows = [slice(*sorted(self.rng.sample(range(len(expected) + 1), 2))) for _ in range(self.rng.randrange(1, 8))]
        outs = [self.place.empty((mine.stop - mine.start, expected.shape[1]), "u2") for mine in rows]
        tickets = self.one.submit_many(array, rows, outs=outs)
        for ticket in tickets:
            if self.rng.random() < 0.3:
                ticket.cancel()
        for ticket, out, mine in self.rng.sample(list(zip(tickets, outs, rows, strict=True)), len(rows)):
            error = over(ticket).exception()
            if error is None:
                assert np.array_equal(self.place.get(ticket.result()), expected[mine])
            else:
                assert isinstance(error, (CancelledError, *allowed)) or "is closed" in str(error), error
                if self.place.device == 0:
                    self.place.fake.default_stream.synchronize()  # of its memory there may have been an earlier user
                self.ended.append(out)
                self.place.memory(out)[...] = 12345


def end_at_any_time(seed, arrays):
    rng = random.Random(seed)
    with reference.fake_device(seed) as fake:
        place = Place(fake, rng.random() < 0.3)
        options = {}
        if place.device == 0:
            options = {"cache_bytes": rng.choice([0, 2**20]), "decode_on": rng.choice(["host", "host", "device"])}
        one = Reader(place.device, rng.choice(reference.SCRATCHES), **options)
        askers = [Asker(number + 3 * seed, one, arrays, place) for number in range(rng.choice([1, 3]))]
        closing = threading.Timer(rng.random() * 0.02, one.close)
        if rng.random() < 0.7:
            closing.start()
        try:
            at_the_same_time(lambda asker: asker(), askers)
        finally:
            one.close()
            closing.cancel()
        fake.rest()
        for asker in askers:
            for out in asker.ended:
                assert (place.memory(out) == 12345).all(), "an output is written to after the job is over"


def test_jobs_that_end_at_any_time(tmp_path):
    """By a cancellation, a broken chunk, or the end of the reader: their outputs are their callers' then."""
    arrays = []
    for kind in (*KINDS, "broken"):
        array = make(tmp_path / kind, kind if kind in KINDS else "zstd")
        arrays.append((array, array[...], (ChunkError,) if kind == "broken" else ()))
    os.truncate(tmp_path / "broken/c/3/1", 5)
    for seed in range(budget.examples(150)):
        end_at_any_time(seed, arrays)


def of_one_version(got, versions):
    """Say whether each chunk is that of one version."""
    for y in range(0, got.shape[0], 8):
        for x in range(0, got.shape[1], 16):
            part = np.s_[y : y + 8, x : x + 16]
            if not any(np.array_equal(got[part], one[part]) for one in versions):
                return False
    return True


@pytest.mark.parametrize(("kind", "on_host"), matrix(KINDS, [True, False]))
def test_files_that_are_replaced_under_way(tmp_path, kind, on_host):
    """Random values, which zstd cannot make shorter: files of two versions have the same size."""
    arrays = [make(tmp_path / name, kind, seed) for seed, name in enumerate("ab")]
    versions = [array[...] for array in arrays]
    files = sorted(one for one in (tmp_path / "a/c").rglob("*") if one.is_file())
    names = [file.relative_to(tmp_path / "a") for file in files]
    held = [[(tmp_path / folder / name).read_bytes() for folder in "ab"] for name in names]
    rng, over_now, limit = random.Random(len(kind)), threading.Event(), time.monotonic() + (30 if budget.SLOW else 0.5)

    def replace():
        while not over_now.is_set():
            number = rng.randrange(len(files))
            if rng.random() < 0.2:
                os.truncate(files[number], rng.randrange(len(held[number][0])))
            (tmp_path / "new").write_bytes(rng.choice(held[number]))
            os.replace(tmp_path / "new", files[number])

    changing = threading.Thread(target=replace)
    changing.start()
    read = 0
    try:
        with reference.fake_device(1) as fake:
            place = Place(fake, on_host)
            with Reader(place.device, 2**22) as one:
                while time.monotonic() < limit:
                    for ticket in one.submit_many(arrays[0], [...] * rng.randrange(1, 5)):
                        error = over(ticket).exception()
                        if error is None:
                            read += 1
                            assert of_one_version(place.get(ticket.result()), versions)
                        else:
                            assert isinstance(error, ChunkError)
                            assert "/a/c/" in str(error)
                over_now.set()
                changing.join()
                for file, (_, last) in zip(files, held, strict=True):
                    file.write_bytes(last)
                    os.utime(file, ns=(0, 10**18))
                assert np.array_equal(place.get(over(one.submit(arrays[0])).result()), versions[1])
    finally:
        over_now.set()
    assert read


OTHER_METADATA = {
    "a wider type": (("uint16", "uint32"), r"inner chunk \(0, 0\) has 256 bytes and must have 512"),
    "smaller chunks": (('"chunk_shape": [8, 16]', '"chunk_shape": [4, 16]'), "checksum of the shard index"),
    "an index elsewhere": (('"index_location": "end"', '"index_location": "start"'), "checksum of the shard index"),
}


@pytest.mark.parametrize("name", OTHER_METADATA)
def test_a_shard_whose_metadata_were_written_again(tmp_path, name):
    """Its index says something else then, though its file is the same: it is not the one that was kept."""
    (old, new), message = OTHER_METADATA[name]
    array = make(tmp_path / "a", "raw shards")
    file = tmp_path / "a/zarr.json"
    with Reader("cpu") as one:
        assert np.array_equal(one.submit(tmp_path / "a").result(), array[...])
        text = json.dumps(json.loads(file.read_text()))
        assert old in text
        file.write_text(text.replace(old, new) + " ")
        with pytest.raises(ChunkError, match=message):
            one.submit(tmp_path / "a").result()
