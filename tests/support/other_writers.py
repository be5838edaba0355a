"""Encoded stores that zarr-python 3 did not write: by zarr-python 2.18, and by tensorstore."""

import runpy
import zipfile
from pathlib import Path

import numpy as np
import tensorstore as ts

from tests.support.stores import plain_values

DATA = Path(__file__).parents[1] / "data"
#: What each needs that is not decoded on the device.
LEFT_TO_ZARR = {"blosc-blosclz": "blosclz"}
#: What the host undoes.
HOST_ONLY = ("delta-zstd",)


def old_stores(folder):
    """Unpack what zarr-python 2.18 wrote; for each name its folder and its values."""
    with zipfile.ZipFile(DATA / "zarr_2_18.zip") as archive:
        archive.extractall(folder)
    script = _script()
    for name, options in script["ARRAYS"].items():
        expected = np.full(script["SHAPE"], options.get("fill_value", 0) or 0, options.get("dtype", "<u2"))
        expected[:16] = script["values"](expected.dtype)[:16]
        yield name, Path(folder) / name, expected


def _script():
    """Read the formula and the names out of the script that wrote them, without the zarr that it needs."""
    return runpy.run_path(str(DATA / "write_zarr_2_18.py"))


def _v3(*codecs, inner=None):
    chain = [{"name": "bytes", "configuration": {"endian": "little"}}, *codecs]
    if inner:
        chain = [{"name": "sharding_indexed", "configuration": {"chunk_shape": inner, "codecs": chain}}]
    grid = {"name": "regular", "configuration": {"chunk_shape": [16, 32, 32]}}
    return {"driver": "zarr3", "metadata": {"chunk_grid": grid, "codecs": chain}}


def _blosc(cname, shuffle):
    return {
        "name": "blosc",
        "configuration": {"cname": cname, "clevel": 5, "shuffle": shuffle, "typesize": 2, "blocksize": 0},
    }


ZSTD = {"name": "zstd", "configuration": {"level": 3, "checksum": True}}
TENSORSTORE = {
    "zarr2-default": {"driver": "zarr", "metadata": {"chunks": [16, 32, 32]}},
    "zarr2-zlib": {"driver": "zarr", "metadata": {"chunks": [16, 32, 32], "compressor": {"id": "zlib", "level": 6}}},
    "zarr2-zstd": {"driver": "zarr", "metadata": {"chunks": [16, 32, 32], "compressor": {"id": "zstd", "level": 3}}},
    "zarr3-zstd": _v3(ZSTD),
    "zarr3-gzip": _v3({"name": "gzip", "configuration": {"level": 5}}),
    "zarr3-blosc": _v3(_blosc("lz4", "shuffle")),
    "zarr3-blosc-zstd": _v3(_blosc("zstd", "bitshuffle"), {"name": "crc32c"}),
    "zarr3-sharded": _v3(ZSTD, inner=[8, 16, 16]),
}


def tensorstore_store(name, folder):
    """Write one; returns its values."""
    values = plain_values("u2", (20, 40, 65), 1)  # the last chunks are cut along every axis
    spec = TENSORSTORE[name] | {"kvstore": {"driver": "file", "path": str(folder)}}
    ts.open(spec, create=True, dtype=ts.uint16, shape=values.shape).result()[...] = values
    return values
