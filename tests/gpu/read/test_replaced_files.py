"""Files that are replaced, written again or removed while they are read: one version or an error, never two."""

import os
import time

import pytest
import reference
import zarr
from stores import random_values, same

from linumpy.errors import ChunkError
from linumpy.gpu.read import host_decode
from linumpy.gpu.read import locate as stored
from linumpy.gpu.read import slab_loop as reader
from linumpy.io import posix_aio

RAW, ZSTD = None, zarr.codecs.ZstdCodec()
SHAPE = (64, 48)


def write(folder, seed, **options):
    """An array of random values, which zstd cannot make shorter: files of two versions have the same size."""
    options = {"shape": SHAPE, "chunks": (8, 16), "dtype": "u2", "fill_value": 7} | options
    array = zarr.create_array(folder, **options)
    array[...] = random_values("u2", SHAPE, seed)
    return array


def renamed(new, old):
    os.replace(new, old)


def written_again(new, old):
    time.sleep(0.02)  # the file system's clock ticks every few milliseconds
    with open(old, "r+b") as file:
        file.write(new.read_bytes())


def removed(new, old):
    os.unlink(old)


CHANGED = "was replaced while it was being read|No such file"
CHANGES = [renamed, written_again, removed]

KINDS = {
    "shards": {"compressors": RAW, "shards": (32, 48)},
    "encoded shards, device": {"compressors": ZSTD, "shards": (32, 48), "decode_on": "device"},
    "encoded shards, host": {"compressors": ZSTD, "shards": (32, 48), "decode_on": "host"},
    "encoded chunks, device": {"compressors": ZSTD, "decode_on": "device"},
    "encoded chunks, host": {"compressors": ZSTD, "decode_on": "host"},
}


@pytest.fixture(params=sorted(KINDS))
def kind(request):
    return KINDS[request.param]


def two_versions(tmp_path, decode_on=None, **options):
    """An array, a chunk or shard of it, the same one of another array, and where chunks are decoded."""
    array = write(tmp_path / "a", 0, **options)
    write(tmp_path / "b", 1, **options)
    return array, tmp_path / "a/c/1/0", tmp_path / "b/c/1/0", decode_on


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_between_its_index_or_size_and_its_data(tmp_path, monkeypatch, kind, change, direct):
    array, old, new, decode_on = two_versions(tmp_path, **kind)

    def found_first(job):
        found = list(stored.locate(job))
        change(new, old)
        yield from found

    job = reference.make_job(array, decode_on=decode_on, direct=direct)
    monkeypatch.setattr(reader, "locate", found_first)
    with pytest.raises(ChunkError, match=rf"\(\d, 0\) of .*/a/c/1/0.*({CHANGED})"):
        reference.execute(job)
    assert job.versions, "nothing was noted"


def test_written_in_place_while_its_data_are_read(tmp_path, monkeypatch, kind):
    array, old, new, decode_on = two_versions(tmp_path, **kind)

    def after(real):
        def call(*arguments, **options):
            got = real(*arguments, **options)
            written_again(new, old)
            return got

        return call

    job = reference.make_job(array, decode_on=decode_on)
    monkeypatch.setattr(posix_aio, "read_batch", after(posix_aio.read_batch))
    monkeypatch.setattr(host_decode, "_pread", after(host_decode._pread))
    with pytest.raises(ChunkError, match=r"\(1, 0\) of .*/a/c/1/0 was replaced while it was being read"):
        reference.execute(job)


def test_what_is_open_is_read_to_its_end_when_another_file_takes_its_name(tmp_path, monkeypatch, kind):
    array, old, new, decode_on = two_versions(tmp_path, **kind)
    begin = 32 if "shards" in kind else 8
    region = (slice(begin, begin + 8), slice(0, 16))
    expected, calls = array[region], []

    def before(real):
        def call(*arguments, **options):
            calls.append(renamed(new, old))
            return real(*arguments, **options)

        return call

    job = reference.make_job(array, region, decode_on=decode_on)
    monkeypatch.setattr(posix_aio, "read_batch", before(posix_aio.read_batch))
    monkeypatch.setattr(host_decode, "_pread", before(host_decode._pread))
    assert same(reference.execute(job), expected)
    assert len(calls) == 1
    assert not same(array[region], expected)


@pytest.mark.parametrize("change", CHANGES)
def test_between_two_pieces_of_a_raw_chunk(tmp_path, monkeypatch, change):
    """A chunk that is longer than a slab is opened for each of them."""
    shape = (512, 48)
    array, other = (
        zarr.create_array(tmp_path / name, shape=shape, chunks=shape, dtype="u2", compressors=RAW) for name in "ab"
    )
    array[...], other[...] = random_values("u2", shape, 0), random_values("u2", shape, 1)
    old, new = tmp_path / "a/c/0/0", tmp_path / "b/c/0/0"
    expected, placed = array[...], []
    assert same(reference.execute(reference.make_job(array, slab_nbytes=8192)), expected)
    place = reader._InFlight._place

    def once(self, slots):
        placed.append(self)
        if len(placed) == 1:
            change(new, old)
        place(self, slots)

    monkeypatch.setattr(reader._InFlight, "_place", once)
    with pytest.raises(ChunkError, match=rf"chunk \(0, 0\) of .*({CHANGED})"):
        reference.execute(reference.make_job(array, slab_nbytes=8192))
