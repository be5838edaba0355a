"""Files that are replaced, written again or removed while they are read: one version or an error, never two."""

import json
import os
import time

import pytest
import reference
import zarr
from linumpy.gpu.loop import carrier, host_decode, loop
from linumpy.io.reads import posix_aio
from linumpy.io.reads.file_reads import Pending
from linumpy.io.reads.plain_reads import read_files
from stores import random_values, same

from linumpy.errors import ChunkError
from linumpy.gpu.read.reader import Reader

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
    real, noted = loop.locate, []

    def found_first(part, engine, indexes):
        found = list(real(part, engine, indexes))
        change(new, old)
        noted.append((part.versions[:, 1] > 0).all())
        yield from found

    job = reference.make_job(array, decode_on=decode_on, direct=direct)
    monkeypatch.setattr(loop, "locate", found_first)
    expected = array[...]
    if "shards" in kind and decode_on != "host" and not direct and change is not written_again:
        assert same(reference.execute(job), expected), "a shard is open from its index to its data: its old version"
    else:
        with pytest.raises(ChunkError, match=rf"\(\d, \d\) of .*/a/c/1/0.*({CHANGED})"):
            reference.execute(job)
    assert noted == [True]


@pytest.fixture
def around_reads(monkeypatch):
    """Run functions before and after each read of chunks, between its looks at the file; returns where to put them."""
    located, hooks, real = [], {}, loop.locate

    def hooked(read):
        def call(*arguments):
            begun = bool(located)  # else it is the index of a shard
            if begun and "before" in hooks:
                hooks["before"]()
            got = read(*arguments)
            if begun and "after" in hooks:
                hooks["after"]()
            return got

        return call

    class Engine(reference.SmallEngine):
        def start(self, reads):
            pending = Pending(reads, self._kept)
            pending.settle(read_files(reads, hooked(posix_aio.read_now)))
            return pending

    def locate(*arguments):
        found = list(real(*arguments))
        located.append(True)
        return iter(found)

    monkeypatch.setattr(loop, "locate", locate)
    monkeypatch.setattr(reference, "SmallEngine", Engine)
    monkeypatch.setattr(host_decode, "_pread", hooked(host_decode._pread))
    return hooks


def test_written_in_place_while_its_data_are_read(tmp_path, around_reads, kind):
    array, old, new, decode_on = two_versions(tmp_path, **kind)
    around_reads["after"] = lambda: written_again(new, old)
    with pytest.raises(ChunkError, match=r"\(1, 0\) of .*/a/c/1/0 was replaced while it was being read"):
        reference.execute(reference.make_job(array, decode_on=decode_on))


def test_what_is_open_is_read_to_its_end_when_another_file_takes_its_name(tmp_path, around_reads, kind):
    array, old, new, decode_on = two_versions(tmp_path, **kind)
    begin = 32 if "shards" in kind else 8
    region = (slice(begin, begin + 8), slice(0, 16))
    expected, calls = array[region], []
    around_reads["before"] = lambda: calls.append(renamed(new, old))
    assert same(reference.execute(reference.make_job(array, region, decode_on=decode_on)), expected)
    assert len(calls) == 1
    assert not same(array[region], expected)


@pytest.mark.parametrize("change", CHANGES)
def test_a_raw_chunk_is_kept_in_the_version_that_was_looked_at(tmp_path, monkeypatch, change):
    """With a cache raw chunks are looked at before they are read: another file of the same size is no such chunk."""
    array, old, new, _ = two_versions(tmp_path, compressors=RAW)
    real, calls = loop.locate, []

    def found_first(part, engine, indexes, *, versions):
        found = list(real(part, engine, indexes, versions=versions))
        calls.append(change(new, old))
        yield from found

    monkeypatch.setattr(loop, "locate", found_first)
    with pytest.raises(ChunkError, match=rf"\(1, 0\) of .*/a/c/1/0.*({CHANGED})"):
        reference.execute(reference.make_job(array, cache_bytes=2**20))
    assert len(calls) == 1


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
    place = carrier.Carrier._place

    def once(self, work):
        placed.append(work)
        if len(placed) == 1:
            change(new, old)
        place(self, work)

    monkeypatch.setattr(carrier.Carrier, "_place", once)
    with pytest.raises(ChunkError, match=rf"chunk \(0, 0\) of .*({CHANGED})"):
        reference.execute(reference.make_job(array, slab_nbytes=8192))


OTHER_METADATA = {
    "a wider type": (("uint16", "uint32"), r"inner chunk \(0, 0\) has 256 bytes and must have 512"),
    "smaller chunks": (('"chunk_shape": [8, 16]', '"chunk_shape": [4, 16]'), "checksum of the shard index"),
    "an index elsewhere": (('"index_location": "end"', '"index_location": "start"'), "checksum of the shard index"),
}


@pytest.mark.parametrize("name", OTHER_METADATA)
def test_a_shard_whose_metadata_were_written_again(tmp_path, name):
    """Its index says something else then, though its file is the same: it is not the one that was kept."""
    (old, new), message = OTHER_METADATA[name]
    array = write(tmp_path / "a", 0, compressors=RAW, shards=(32, 48))
    file = tmp_path / "a/zarr.json"
    with Reader("cpu") as one:
        assert same(one.submit(tmp_path / "a").result(), array[...])
        text = json.dumps(json.loads(file.read_text()))
        assert old in text
        file.write_text(text.replace(old, new) + " ")
        with pytest.raises(ChunkError, match=message):
            one.submit(tmp_path / "a").result()
