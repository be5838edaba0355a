#!/usr/bin/env python3
"""Write the arrays of ``zarr_2_18.zip``, with zarr-python 2.18, in a virtual environment of its own::

    python3.11 -m venv venv && venv/bin/pip install "zarr==2.18.7" "numcodecs<0.16"
    venv/bin/python tests/data/write_zarr_2_18.py

Its defaults are what old data has: Blosc with lz4 and byte shuffle. The values are a formula, so that tests need no
other file.
"""

import shutil
import tempfile
from pathlib import Path

import numcodecs
import numpy as np

SHAPE = (23, 40, 37)
ARRAYS = {
    "defaults": {},
    "default-f4": {"dtype": "<f4"},
    "f-order-big-endian": {"order": "F", "dtype": ">i2"},
    "slash": {"dimension_separator": "/", "fill_value": 7},
    "no-fill-value": {"fill_value": None, "compressor": numcodecs.Blosc("lz4hc", 9, numcodecs.Blosc.SHUFFLE)},
    "blosc-zstd-bitshuffle": {"compressor": numcodecs.Blosc("zstd", 1, numcodecs.Blosc.BITSHUFFLE)},
    "blosc-zlib": {"compressor": numcodecs.Blosc("zlib", 5, numcodecs.Blosc.NOSHUFFLE), "dtype": "<f8"},
    "blosc-blosclz": {"compressor": numcodecs.Blosc("blosclz")},
    "zstd": {"compressor": numcodecs.Zstd(3)},
    "lz4": {"compressor": numcodecs.LZ4()},
    "gzip": {"compressor": numcodecs.GZip(5)},
    "zlib": {"compressor": numcodecs.Zlib(6)},
    "shuffle-zlib": {"compressor": numcodecs.Zlib(6), "filters": [numcodecs.Shuffle(2)]},
    "delta-zstd": {"compressor": numcodecs.Zstd(3), "filters": [numcodecs.Delta("<u2")]},
}


def values(dtype):
    """Voxels that compress, by a formula."""
    z, y, x = np.ogrid[: SHAPE[0], : SHAPE[1], : SHAPE[2]]
    return ((z * 31 + (y // 3) * 7 + (x // 5) * 3) % 251).astype(dtype)


def main():
    """Write the file beside this script."""
    import zarr

    assert zarr.__version__.startswith("2.18"), zarr.__version__
    with tempfile.TemporaryDirectory() as folder:
        for name, options in ARRAYS.items():
            options = {"dtype": "<u2", "chunks": (16, 16, 16), **options}
            array = zarr.open_array(str(Path(folder) / name), mode="w", shape=SHAPE, **options)
            array[:16] = values(array.dtype)[:16]  # the other chunks are missing
        shutil.make_archive(str(Path(__file__).with_name("zarr_2_18")), "zip", folder)


if __name__ == "__main__":
    main()
