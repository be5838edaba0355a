"""If this fails, bfloat16, float8 and int4 of zarr v3 are not read as tensorstore stores them, or are computed with."""

import json
import sys

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from linumpy import convert_zarr, read_zarr, resample_zarr
from linumpy.arrays import is_small
from linumpy.core import native
from linumpy.errors import SourceError
from linumpy.gpu import read_zarr_to_gpu, zarr_to_dask
from linumpy.gpu.read import request
from linumpy.gpu.read.reader import Reader
from linumpy.io.data_types import NAMES
from linumpy.io.open import open_source
from tests.support.budget import examples
from tests.support.gpu import reference
from tests.support.gpu.stand_in import needs_stand_in

ml_dtypes = pytest.importorskip("ml_dtypes")
tensorstore = pytest.importorskip("tensorstore")

SHAPE = (17, 23)
#: Without float8_e8m0fnu, of which tensorstore makes 0x3f, 2 to the power of -64, where the fill value is 1.
STORED = sorted(name for name in NAMES - {"float8_e8m0fnu"} if hasattr(tensorstore, name))


def stored(path, name, *, sharded=False, compressed=False, fill=1):
    """An array of which tensorstore wrote a part; what tensorstore reads of it."""
    bytes_codec = {"name": "bytes", "configuration": {"endian": "little"}} if name == "bfloat16" else {"name": "bytes"}
    codecs = [bytes_codec, *([{"name": "zstd", "configuration": {"level": 1}}] if compressed else [])]
    chunks = [8, 16] if sharded else [4, 8]
    if sharded:
        codecs = [{"name": "sharding_indexed", "configuration": {"chunk_shape": [4, 8], "codecs": codecs}}]
    grid = {"name": "regular", "configuration": {"chunk_shape": chunks}}
    metadata = {"shape": SHAPE, "data_type": name, "fill_value": fill, "chunk_grid": grid, "codecs": codecs}
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}, "metadata": metadata}
    array = tensorstore.open(spec, create=True, delete_existing=True).result()
    values = np.random.default_rng(0).uniform(-1, 4, (9, 23)).astype(np.float32)
    array[:9] = values.astype(getattr(ml_dtypes, name))
    return np.asarray(array.read().result())


@pytest.mark.parametrize("name", STORED)
def test_bits_and_dtype_are_tensorstores(tmp_path, name):
    """In parts, raw, compressed and in shards; a fill value; by zarr-python too, whose oracle is tensorstore."""

    @settings(max_examples=examples(12), deadline=None)
    @given(st.booleans(), st.booleans(), st.tuples(*(st.integers(0, n) for n in SHAPE)))
    def check(sharded, compressed, start):
        expected = stored(tmp_path / "a", name, sharded=sharded, compressed=compressed)
        region = tuple(slice(n, None) for n in start)
        strict = native.why_no_core() is None
        for found in (read_zarr(tmp_path / "a", region=region, strict=strict), open_source(tmp_path / "a")[region]):
            assert found.dtype == expected.dtype == np.dtype(getattr(ml_dtypes, name))
            assert found.tobytes() == expected[region].tobytes()

    check()


@pytest.mark.parametrize(("fill", "bits"), [("NaN", None), ("-Infinity", 0xFF80), ("0x7fc1", 0x7FC1), (-2.5, 0xC020)])
def test_fill_values_of_metadata(tmp_path, fill, bits):
    stored(tmp_path / "a", "bfloat16")
    document = json.loads((tmp_path / "a/zarr.json").read_text()) | {"fill_value": fill}
    (tmp_path / "a/zarr.json").write_text(json.dumps(document))
    (found,) = np.unique(read_zarr(tmp_path / "a")[12:].view("u2"))
    assert found == bits or (bits is None and np.isnan(np.array(found).view(ml_dtypes.bfloat16)))


@pytest.mark.parametrize("name", ["bfloat16", "int4"])
def test_on_a_device(tmp_path, name):
    expected = stored(tmp_path / "a", name, sharded=True, compressed=True)
    with reference.fake_device(), Reader() as reader:
        result = reader.submit(tmp_path / "a", np.s_[3:15, 1:20]).result()
        assert result.dtype == expected.dtype
        assert result.get().tobytes() == expected[3:15, 1:20].tobytes()


test_on_a_device.pytestmark = [*test_on_a_device.pytestmark, *needs_stand_in]


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "int4"])
def test_a_cupy_without_arrays_of_the_dtype(tmp_path, name, monkeypatch):
    """One error before anything is read, which says what works; CuPy's own is "Unsupported dtype int4"."""
    expected = stored(tmp_path / "a", name)
    with reference.fake_device() as device, Reader() as reader:
        empty = device.cupy.empty

        def empty_as_in_cupy(shape, dtype=float):
            if is_small(np.dtype(dtype)):
                raise TypeError(f"Unsupported dtype {dtype}")
            return empty(shape, dtype)

        monkeypatch.setattr(device.cupy, "empty", empty_as_in_cupy)
        monkeypatch.setattr(request, "free_memory", lambda needed: needed)
        bits = f"uint{8 * expected.itemsize}"
        message = rf"no arrays of {name}: .*device='cpu'.*values\.view\('{bits}'\)"
        for ask in (
            lambda: reader.submit(tmp_path / "a"),
            lambda: reader.submit_many(tmp_path / "a", np.array([[[0, 3], [1, 4]]])),
            lambda: read_zarr_to_gpu(tmp_path / "a", backend="zarr-gpu"),
            lambda: zarr_to_dask(tmp_path / "a", device="cuda"),
        ):
            with pytest.raises(TypeError, match=message):
                ask()
        # What the message says works.
        values = read_zarr(tmp_path / "a", device="cpu")
        assert device.cupy.asarray(values.view(bits)).get().view(expected.dtype).tobytes() == expected.tobytes()


test_a_cupy_without_arrays_of_the_dtype.pytestmark += needs_stand_in


def test_strings_are_refused_by_whatever_reads(tmp_path):
    zarr.create_array(tmp_path / "a", shape=(4,), chunks=(2,), dtype=str)[:] = "tissue"
    for ask in (
        lambda: read_zarr(tmp_path / "a", device="cpu"),
        lambda: zarr_to_dask(tmp_path / "a", device="cpu"),
        lambda: read_zarr_to_gpu(tmp_path / "a"),
    ):
        with pytest.raises(TypeError, match=r"/a has dtype StringDType\(\), elements of any length, .* by zarr-python"):
            ask()
    with Reader("cpu") as reader, pytest.raises(TypeError, match=r"/a has dtype StringDType\(\), elements of"):
        reader.submit(tmp_path / "a")


@pytest.mark.gpu
def test_bfloat16_on_a_gpu(tmp_path):
    expected = stored(tmp_path / "a", "bfloat16", compressed=True)
    result = read_zarr(tmp_path / "a", device="cuda", strict=True)
    assert result.dtype == expected.dtype
    assert result.get().tobytes() == expected.tobytes()


def test_what_computes_refuses_them(tmp_path, monkeypatch):
    """float8_e5m2 is of NumPy's kind "f"; nothing is cast, and without ml_dtypes a line says what to install."""
    for name in ("float8_e5m2", "bfloat16"):
        stored(tmp_path / "a", name)
        with pytest.raises(TypeError, match="read as stored, without a cast"):
            read_zarr(tmp_path / "a", dtype="f4")
        with pytest.raises(TypeError, match=f"voxels of {name} cannot be resampled"):
            resample_zarr(tmp_path / "a", tmp_path / "b", 2.0, spacing=(1, 1))
        with pytest.raises(SourceError, match=f"is of {name}"):
            convert_zarr(tmp_path / "a", tmp_path / "b", spacing=(1, 1))
    document = (tmp_path / "a/zarr.json").read_text()
    (tmp_path / "a/zarr.json").write_text(document.replace("little", "big"))
    with pytest.raises(SourceError, match="big-endian"):
        read_zarr(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(SourceError, match="pip install ml_dtypes"):
        read_zarr(tmp_path / "a")
