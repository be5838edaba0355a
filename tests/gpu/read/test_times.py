"""If this fails, a timed reader reports wrong times of copies, decoding and scatter."""

import numpy as np
import pytest
import zarr

from linumpy.gpu import Reader
from linumpy.gpu.read.report import Times
from tests.support.gpu import reference
from tests.support.gpu.stand_in import needs_stand_in
from tests.support.stores import random_values, same, stored


def make(folder, codec):
    compressors = None if codec is None else zarr.codecs.ZstdCodec(level=1)
    return stored(folder, random_values("u2", (40, 40), 1), (8, 8), compressors=compressors)


@needs_stand_in[0]
@needs_stand_in[1]
@pytest.mark.parametrize("codec", [None, "zstd"])
def test_times_of_a_reader(tmp_path, codec):
    array = make(tmp_path / "a", codec)
    with reference.fake_device(), Reader(0, timed=True, decode_on="device") as reader:
        assert same(reader.submit(array).result().get(), array[...])
        stats = reader.stats()
        assert stats.times.copies == stats.slabs > 0
        assert stats.times.copied_nbytes >= stats.bytes_read
        assert stats.times.decoded == (0 if codec is None else stats.slabs)
        assert stats.times.decoded_nbytes == (0 if codec is None else array.nbytes)
        assert stats.times.copy_seconds > 0
        assert stats.times.scatter_seconds > 0
        assert (stats.times.decode_seconds > 0) == (codec is not None)
    with reference.fake_device(), Reader(0) as reader:
        reader.submit(array).result()
        assert reader.stats().times == Times()


@needs_stand_in[0]
@needs_stand_in[1]
def test_times_of_one_job(tmp_path):
    array = make(tmp_path / "a", "zstd")
    with reference.fake_device(), Reader(0, decode_on="device") as reader:
        layout = reader.layout_of(array)
        report = reader.submit(layout, timed=True).report
        assert report.decode_seconds > 0
        assert report.scatter_seconds > 0
        report = reader.submit(layout).report
        assert report.decode_seconds is report.scatter_seconds is None


@pytest.mark.gpu
def test_times_of_a_reader_on_a_device(cupy, tmp_path):
    array = zarr.create_array(
        tmp_path / "a", shape=(64, 64, 64), chunks=(16,) * 3, dtype="u2", compressors=zarr.codecs.ZstdCodec(level=1)
    )
    array[...] = np.arange(64**3).reshape(64, 64, 64) % 1000
    with Reader(timed=True, decode_on="device") as reader:
        for _ in range(3):
            assert same(reader.submit(array).result().get(), array[...])
        times = reader.stats().times
        assert times.copies == times.decoded > 0
        assert times.decoded_nbytes == 3 * array.nbytes
        assert min(times.copy_seconds, times.decode_seconds, times.scatter_seconds) > 0
        assert times.copied_nbytes > reader.stats().bytes_read
