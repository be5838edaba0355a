"""If this fails, plans count wrong, say something else than happens, or touch files."""

import ast
import importlib.resources
from dataclasses import replace
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numcodecs.checksum32 import CRC32C

from linumpy.gpu import plan_zarr_read
from linumpy.io.layout import read_layout
from linumpy.plan.read import plan_read


def make(shape=(100, 200, 300), chunks=(16, 16, 16), **options):
    store = zarr.storage.MemoryStore()
    return zarr.create_array(store, shape=shape, chunks=chunks, dtype="u2", **({"compressors": None} | options))


def test_it_explains_itself(tmp_path):
    zarr.create_array(
        tmp_path / "a", shape=(100, 200, 300), chunks=(16, 16, 16), shards=(64, 64, 64), dtype=">u2", compressors=None
    )
    plan = plan_zarr_read(tmp_path / "a", region=(slice(3, 50), ..., 5))
    text = str(plan)
    assert plan._repr_html_().count("<tr>") == len(text.splitlines())
    for part in (
        "uint16 100 × 200 × 300, 11.4 MiB",
        "16 × 16 × 16, 8.0 KiB each",
        "64 × 64 × 64, 64 chunks each, index at the end",
        "[3:50, 0:200, 5] → 47 × 200, 18.4 KiB",
        "52 chunks in 4 shards",
        "linumpy, from a local store",
    ):
        assert part in text, text


def test_it_says_why_it_goes_through_the_host():
    deep = {"shape": (2,) * 7, "chunks": (1,) * 7}
    plan = plan_zarr_read(make(**deep))
    assert plan.backend == "zarr-gpu"
    assert "zarr-gpu: rank 7: 1 to 6 axes are read" in str(plan)
    plan = plan_zarr_read(make(**deep, zarr_format=2))
    assert plan.backend == "zarr-host"
    assert "zarr-host: rank 7: 1 to 6 axes are read" in str(plan)
    assert "one copy to the device: zarr's codec of format 2 takes host memory" in str(plan)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"zarr_format": 2, "compressors": numcodecs.BZ2()}, "codec 'bz2' is not decoded on the device"),
        (
            {"zarr_format": 2, "compressors": numcodecs.Zstd(), "filters": [numcodecs.Zstd()]},
            "codec 'zstd' is not decoded at this position",
        ),
        ({"zarr_format": 2, "compressors": CRC32C(location="start")}, "codec 'crc32c', whose checksum may come first"),
        ({"zarr_format": 2, "filters": [numcodecs.Delta("<u2")]}, "filter 'delta' without a compressor"),
        ({"compressors": [zarr.codecs.BloscCodec(cname="blosclz")]}, "codec 'blosc' with 'blosclz' inside"),
        (
            {"shards": (64, 64, 64), "compressors": [zarr.codecs.BloscCodec(cname="snappy")]},
            "codec 'blosc' with 'snappy'",
        ),
        ({"compressors": [zarr.codecs.Crc32cCodec(), zarr.codecs.Crc32cCodec()]}, "several checksums"),
        ({"compressors": [zarr.codecs.ZstdCodec(), zarr.codecs.GzipCodec()]}, "codec 'gzip' is not decoded"),
        ({"shape": (2,) * 7, "chunks": (1,) * 7}, "rank 7: 1 to 6 axes are read"),
        ({"shape": (), "chunks": ()}, "rank 0"),
        ({"dtype": "datetime64[s]"}, "dtype datetime64"),
        ({"dtype": "S4", "zarr_format": 2}, "dtype |S4"),
    ],
)
def test_layouts_that_kvikio_cannot_read(tmp_path, options, reason):
    options = {"shape": (100, 200, 300), "chunks": (16, 16, 16), "dtype": "u2", "compressors": None} | options
    layout = read_layout(zarr.create_array(tmp_path / "a", **options))
    assert layout.unsupported is not None
    assert layout.unsupported.startswith(reason)
    assert reason in str(plan_read(layout))


def test_inner_chunks_of_shards_of_several_lengths_are_counted():
    layout = read_layout(make((12, 6), (2, 3), shards=(4, 6)))
    layout = replace(layout, grid="rectilinear", lengths=(np.array([4, 8]), np.array([6])))
    plan = plan_read(layout, (slice(3, 9), slice(0, 3)))
    assert (plan.chunk_count, plan.object_count) == (4, 2)


def test_nested_sharding_is_left_to_zarr(tmp_path):
    inner = zarr.codecs.ShardingCodec(chunk_shape=(2, 2), codecs=[zarr.codecs.BytesCodec()])
    outer = zarr.codecs.ShardingCodec(chunk_shape=(4, 4), codecs=[inner])
    array = zarr.create(store=tmp_path / "a", shape=(8, 8), chunks=(8, 8), dtype="u2", codecs=[outer], zarr_format=3)
    assert "sharding_indexed" in read_layout(array).unsupported


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=3),
    st.booleans(),
    st.data(),
)
def test_chunks_and_objects_are_counted_as_their_voxels_say(axes, sharded, data):
    shape, chunks, per_shard = (tuple(column) for column in zip(*axes, strict=True))
    shards = {"shards": tuple(np.multiply(chunks, per_shard).tolist())} if sharded else {}
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    plan = plan_read(read_layout(make(shape, chunks, **shards)), tuple(slice(a, b) for a, b in bounds))
    touched = [len({voxel // size for voxel in range(a, b)}) for (a, b), size in zip(bounds, chunks, strict=True)]
    objects = shards.get("shards", chunks)
    files = [len({voxel // size for voxel in range(a, b)}) for (a, b), size in zip(bounds, objects, strict=True)]
    assert (plan.chunk_count, plan.object_count) == (np.prod(touched), np.prod(files))
    counts = f"{plan.chunk_count:,} chunk{'s' * (plan.chunk_count != 1)}"
    assert counts in str(plan)


@pytest.mark.parametrize(
    ("nbytes", "says"),
    [
        (2**16, "on the host, by"),
        (2**27, "on the device, 1 slab of about 1 chunk at a time, all blocks in parallel"),
        (2**30, "where 7.1 GiB of device memory are free beside the result; else zstd, on the host"),
    ],
)
def test_a_plan_says_where_chunks_are_decoded_and_in_how_much_memory(tmp_path, monkeypatch, nbytes, says):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    array = zarr.create_array(tmp_path / "a", shape=(4 * nbytes,), chunks=(nbytes,), dtype="u1", fill_value=9)
    text = str(plan_zarr_read(array))
    assert says in text, text
    assert "512.0 MiB of device memory" in text


def test_the_plan_imports_no_gpu_package_and_opens_no_file():
    files = list(Path(str(importlib.resources.files("linumpy.plan"))).rglob("*.py"))
    assert len(files) > 15
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = {n.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names}
        names |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert names <= {
            "__future__",
            "collections",
            "dataclasses",
            "functools",
            "html",
            "itertools",
            "json",
            "math",
            "operator",
        } | {"types", "typing", "numpy", "linumpy"}, file.name
        calls = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert "open" not in calls
