"""If this fails, a wrong voxel passes the benchmark's check, or a right one does not."""

import numpy as np
import pytest
import zarr

from linumpy.benchmark.shared import stores
from linumpy.benchmark.shared.stores import difference, host_zarr, open_stored


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """Have more than one piece even here."""
    whole = stores.blocks
    monkeypatch.setattr(stores, "blocks", lambda shape, grain, itemsize: whole(shape, grain, itemsize, 400))


def make(tmp_path, data, **how):
    how = {"chunks": (3,) * data.ndim, **how}
    array = zarr.create_array(tmp_path / "a", shape=data.shape, dtype=data.dtype, **how)
    array[...] = data
    return open_stored(tmp_path / "a")


@pytest.mark.parametrize("dtype", ["bool", "i1", "u2", ">i4", "f2", ">f4", "f8", "c8"])
def test_what_is_equal_is_right(tmp_path, dtype):
    rng = np.random.default_rng(0)
    data = rng.integers(0, 100, (7, 8, 9)).astype(dtype)
    assert difference(make(tmp_path, data), data.astype(data.dtype.newbyteorder("="))) == ""


@pytest.mark.parametrize("at", [(0, 0, 0), (6, 7, 8), (3, 0, 5)])
def test_one_wrong_voxel_is_found_and_named(tmp_path, at):
    data = np.arange(7 * 8 * 9, dtype="u2").reshape(7, 8, 9)
    case = make(tmp_path, data)
    bad = data.copy()
    bad[at] = 60000
    assert difference(case, bad) == f"voxel {at} is 60000, not {data[at]}; 1 differ in its block"


@pytest.mark.parametrize("dtype", ["f4", "c16"])
def test_nan_equals_nan_and_no_number(tmp_path, dtype):
    data = np.ones((5, 5), dtype)
    data[2, 2] = np.nan
    case = make(tmp_path, data)
    assert difference(case, data.copy()) == ""
    assert "(2, 2)" in difference(case, np.ones_like(data))
    bad = data.copy()
    bad[4, 0] = np.nan
    assert "(4, 0)" in difference(case, bad)


def test_shape_and_type_count(tmp_path):
    data = np.arange(20, dtype="i4").reshape(4, 5)
    case = make(tmp_path, data)
    assert difference(case, data.T) == "shape (5, 4), not (4, 5)"
    assert difference(case, data.astype("i8")) == "dtype int64, not int32"


def test_missing_chunks_are_the_fill_value(tmp_path):
    zarr.create_array(tmp_path / "a", shape=(6, 6), chunks=(3, 3), dtype="f4", fill_value=7.0)
    case = open_stored(tmp_path / "a")
    assert difference(case, np.full((6, 6), 7, "f4")) == ""
    assert difference(case, np.zeros((6, 6), "f4")) is not None


def test_the_truth_does_not_hang_on_what_the_caller_has_set(tmp_path):
    data = np.arange(36, dtype="f4").reshape(6, 6)
    case = make(tmp_path, data)
    mine = {"buffer": "not.a.Buffer", "ndbuffer": "not.a.Buffer", "codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}
    with zarr.config.set(mine):
        with host_zarr():
            assert zarr.config.get("buffer") == "zarr.buffer.cpu.Buffer"
        assert difference(case, data) == ""
        assert zarr.config.get("ndbuffer") == "not.a.Buffer"
