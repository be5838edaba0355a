"""If this fails, a fill value that is NaN is read with other bits than zarr v3 spells."""

import json

import numpy as np
import pytest
import zarr
from zarr.codecs import BytesCodec

from linumpy.gpu import zarr_to_dask
from linumpy.gpu.read.reader import Reader
from linumpy.gpu.zarr_io import read_zarr
from linumpy.io.open import open_source

BITS = {
    "f2": ["0x7e05", "0x7c01", "0xfe33", "0xFC05", "0x7e00", "0xffff"],
    "f4": ["0x7fc00005", "0x7f800001", "0xffc12345", "0x7fc00000"],
    "f8": ["0x7ff8000000000005", "0x7ff0000000000001", "0xfff8000000000123"],
    "c8": [["0x7f800001", "0xffc12345"], [1.5, "0x7fc00007"], ["0x7fc00009", "Infinity"]],
}
EVERY = [(dtype, fill) for dtype, fills in BITS.items() for fill in fills]


def expected(dtype, fill):
    word = np.dtype(dtype).itemsize // (2 if dtype == "c8" else 1)
    parts = fill if isinstance(fill, list) else [fill]
    values = [
        np.array(int(part, 16), f"u{word}")
        if str(part).startswith("0x")
        else np.array(float(part), f"f{word}").view(f"u{word}")
        for part in parts
    ]
    return np.array(values, f"u{word}").tobytes()


def with_fill(folder, dtype, fill, **options):
    """An array of which only the second chunk is stored, and holds ones."""
    options = {"compressors": None, "chunks": (4,)} | options
    array = zarr.create_array(folder, shape=(10,), dtype=dtype, **options)
    array[4:8] = 1
    document = json.loads((folder / "zarr.json").read_text())
    document["fill_value"] = fill
    (folder / "zarr.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize("options", [{}, {"serializer": BytesCodec(endian="big")}, {"shards": (8,)}])
@pytest.mark.parametrize(("dtype", "fill"), EVERY)
def test_nan_keeps_its_bits(tmp_path, dtype, fill, options, device):
    folder = with_fill(tmp_path / "a", dtype, fill, **options)
    wanted = expected(dtype, fill)
    whole = wanted * 4 + np.ones(4, dtype).tobytes() + wanted * 2
    with Reader(device="cpu" if device == "cpu" else None) as reader:
        tickets = [reader.submit(folder), reader.submit(folder, slice(2, 9))]
        first, second = (one.result() for one in tickets)
        for found, data in ((first, whole), (second, whole[2 * len(wanted) : 9 * len(wanted)])):
            assert (found if device == "cpu" else found.get()).tobytes() == data
    found = read_zarr(folder, device=device)
    assert (found if device == "cpu" else found.get()).tobytes() == whole
    if device == "cpu":
        assert zarr_to_dask(folder, device="cpu").compute(scheduler="sync").tobytes() == whole
        assert open_source(folder)[...].tobytes() == whole


@pytest.mark.parametrize("core", ["", "0"])
def test_a_fill_value_that_was_given_in_memory_is_kept(tmp_path, monkeypatch, core):
    """Also where zarr-python reads: the document says NaN, and does not say which."""
    value = np.array(0x7E05, "u2").view("f2")[()]
    array = zarr.create_array(tmp_path / "a", shape=(4,), chunks=(2,), dtype="f2", fill_value=value)
    monkeypatch.setenv("LINUMPY_CORE", core)
    with Reader(device="cpu") as reader:
        assert reader.submit(array).result().tobytes() == value.tobytes() * 4
    assert read_zarr(array, device="cpu").tobytes() == value.tobytes() * 4
