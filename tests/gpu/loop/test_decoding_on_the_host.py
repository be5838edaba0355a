"""Chunks that the host decodes: how many of them at a time, whatever their size."""

import os
import threading

import numpy as np
import pytest
import zarr
from linumpy.gpu.loop import host_decode, limits
from linumpy.gpu.loop.jobs import Regions, make_request
from linumpy.gpu.loop.limits import limits_for
from linumpy.gpu.loop.ticket import Ticket
from linumpy.gpu.loop.wave import Part
from linumpy.gpu.loop.works import Cutter
from linumpy.gpu.staging.scatter import Conversion
from stores import plain_values, same

from linumpy.errors import ChunkError
from linumpy.gpu.read.reader import Reader
from linumpy.io.layout import read_layout

THREADS = 16


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(THREADS))


def of_rows(folder, **options):
    """Write an array of 24 chunks of 100 kB."""
    array = zarr.create_array(folder, shape=(24, 50_000), chunks=(1, 50_000), dtype="u2", **options)
    array[...] = plain_values("u2", array.shape, 1)
    return array


@pytest.mark.parametrize("slab_nbytes", [2**16, 2**18])
def test_long_chunks_are_decoded_side_by_side(tmp_path, monkeypatch, cores, slab_nbytes):
    """Also those that are larger than a slab, which were decoded one after another."""
    array, real = of_rows(tmp_path / "a", compressors=zarr.codecs.GzipCodec()), host_decode.decode_chunk
    met = threading.Barrier(12)

    def meet(*arguments):
        met.wait(20)  # raises where fewer are decoded at the same time
        real(*arguments)

    monkeypatch.setattr(host_decode, "decode_chunk", meet)
    with Reader("cpu", slab_nbytes=slab_nbytes) as reader:
        assert same(reader.submit(array).result(), array[...])


@pytest.mark.parametrize("most", [1, 2 * 100_000])
def test_memory_for_chunks_larger_than_a_slab(tmp_path, monkeypatch, cores, most):
    array, real = of_rows(tmp_path / "a", compressors=zarr.codecs.GzipCodec()), host_decode.decode_chunk
    counts, at_work, lock = [], [], threading.Lock()

    def count(*arguments):
        with lock:
            at_work.append(1)
            counts.append(len(at_work))
        real(*arguments)
        with lock:
            at_work.pop()

    monkeypatch.setattr(host_decode, "decode_chunk", count)
    monkeypatch.setattr("linumpy.gpu.loop.carrier.LARGE_NBYTES", most)
    with Reader("cpu", slab_nbytes=2**16) as reader:
        assert same(reader.submit(array).result(), array[...])
    assert len(counts) == 24
    assert max(counts) <= max(1, most // 100_000)


def test_a_broken_chunk_larger_than_a_slab_ends_its_jobs_alone(tmp_path, cores):
    array = of_rows(tmp_path / "a", compressors=zarr.codecs.GzipCodec())
    expected = array[...]
    (tmp_path / "a/c/3/0").write_bytes(b"no gzip")
    with Reader("cpu", slab_nbytes=2**16) as reader:
        tickets = reader.submit_many(array, [(slice(n, n + 2), slice(7, None)) for n in range(0, 24, 2)])
        for number, ticket in enumerate(tickets):
            if number == 1:
                with pytest.raises(ChunkError, match=r"chunk \(3, 0\) of .* cannot be decoded \(gzip\)"):
                    ticket.result()
            else:
                assert same(ticket.result(), expected[2 * number : 2 * number + 2, 7:])


@pytest.mark.parametrize("mib", [1, 8, 32, 64])
def test_the_ring_holds_what_is_decoded_at_the_same_time(tmp_path, cores, mib):
    """96 MiB, enough for what the device decodes, held three chunks of 32 MiB, two of which were one work."""
    side = mib * 2**20
    array = zarr.create_array(
        tmp_path / "a", shape=(64, side), chunks=(1, side), dtype="u1", compressors=zarr.codecs.GzipCodec()
    )
    bounds, region = limits_for(2**29, on_device=True, decode_on="host", slab_nbytes=None), array.shape
    layout, ticket = read_layout(array), Ticket(None, "a", lambda *_: None, None)
    regions = Regions(*(np.array(one, np.int64) for one in ([0], [[0, 0]], [region], [[side, 1]], [0])))
    conversion = Conversion(array.dtype, array.dtype, False)
    part = Part([make_request(bounds, [layout], conversion, regions, 64, None, [ticket])])
    nbytes = Cutter([part], bounds, lambda _: 0).host_nbytes
    assert nbytes >= min(limits.DECODE_AHEAD, THREADS) * side
    assert nbytes >= 3 / 4 * min(THREADS, limits.DECODE_AHEAD * max(1, 64 // mib)) * side
    assert nbytes < 2**29
