"""Plans: what they count, what they say, and that they stay pure."""

import ast
import importlib.resources
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from linumpy.plan.read.pieces import axis_windows
from linumpy.plan.read.slabs import SlabLimits, Spans, pack

from linumpy.gpu import plan_zarr_read
from linumpy.io.layout import read_layout
from linumpy.plan.read import pieces as plan_pieces
from linumpy.plan.read.plan import plan_read


def make(shape=(100, 200, 300), chunks=(16, 16, 16), **options):
    store = zarr.storage.MemoryStore()
    return zarr.create_array(store, shape=shape, chunks=chunks, dtype="u2", **({"compressors": None} | options))


def test_it_explains_itself(tmp_path):
    zarr.create_array(
        tmp_path / "a", shape=(100, 200, 300), chunks=(16, 16, 16), shards=(64, 64, 64), dtype=">u2", compressors=None
    )
    text = str(plan_zarr_read(tmp_path / "a", region=(slice(3, 50), ..., 5)))
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
    plan = plan_zarr_read(make())
    assert plan.backend == "zarr-gpu"
    assert "zarr-gpu: the store is a MemoryStore, not a local folder" in str(plan)
    plan = plan_zarr_read(make(zarr_format=2))
    assert plan.backend == "zarr-host"
    assert "zarr-host: the store is a MemoryStore, not a local folder" in str(plan)
    assert "one copy to the device: zarr's codec of format 2 takes host memory" in str(plan)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"zarr_format": 2, "compressors": numcodecs.BZ2()}, "codec 'bz2' is not decoded on the device"),
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


def test_nested_sharding_is_left_to_zarr(tmp_path):
    inner = zarr.codecs.ShardingCodec(chunk_shape=(2, 2), codecs=[zarr.codecs.BytesCodec()])
    outer = zarr.codecs.ShardingCodec(chunk_shape=(4, 4), codecs=[inner])
    array = zarr.create(store=tmp_path / "a", shape=(8, 8), chunks=(8, 8), dtype="u2", codecs=[outer], zarr_format=3)
    assert "sharding_indexed" in read_layout(array).unsupported


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 60)), min_size=1, max_size=3),
    st.integers(1, 2**9),
    st.data(),
)
def test_pieces_cover_the_region_once(axes, max_elements, data):
    shape, chunks = tuple(a for a, _ in axes), tuple(b for _, b in axes)
    region = tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape)
    plan = plan_read(read_layout(make(shape, chunks)), tuple(slice(a, b) for a, b in region))
    pieces = plan.pieces(2 * max_elements)
    seen = np.zeros(plan.region.size, int)
    target = np.arange(plan.region.size).reshape(plan.region.box_shape)
    for row in range(len(pieces)):
        corner = np.unravel_index(pieces.target[row], plan.region.box_shape)
        box = tuple(slice(c, c + e) for c, e in zip(corner, pieces.extent[row], strict=True))
        seen[target[box]] += 1
        assert target[box].shape == tuple(pieces.extent[row])
    assert (seen == 1).all()
    assert (pieces.nbytes <= 2 * max_elements).all()
    assert (pieces.offset >= 0).all()
    assert (pieces.offset + pieces.nbytes <= plan.layout.chunk_nbytes).all()


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=3),
    st.sampled_from([None, 2, 30, 2**20]),
    st.integers(1, 30),
    st.booleans(),
    st.data(),
)
def test_batches_are_whole_objects_and_counted_without_cutting(axes, max_nbytes, max_chunks, sharded, data):
    shape, chunks = tuple(a for a, _, _ in axes), tuple(b for _, b, _ in axes)
    shards = {"shards": tuple(b * c for _, b, c in axes)} if sharded else {}
    region = tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape)
    plan = plan_read(read_layout(make(shape, chunks, **shards)), tuple(slice(a, b) for a, b in region))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_pieces, "READ_THROUGH_BYTES", data.draw(st.sampled_from([0, 20, 2**18])))
        whole, count = plan.pieces(max_nbytes), plan.count(max_nbytes)
        parts = [plan.pieces(max_nbytes, box) for box in plan.batches(max_chunks)]
    chunk = np.unique(whole.chunk, axis=0)
    assert (count.pieces, count.nbytes) == (len(whole), whole.nbytes.sum())
    assert count.most == (np.unique(whole.chunk, axis=0, return_counts=True)[1].max() if len(whole) else 0)
    assert (plan.chunk_count, plan.object_count) == (len(chunk), len(plan.objects(whole)[0]))
    seen = {}
    for number, part in enumerate(parts):
        objects = {tuple(row) for row in (part.chunk // np.array(plan.chunks_per_object)).tolist()}
        assert len(np.unique(part.chunk, axis=0)) <= max_chunks or len(objects) == 1
        assert all(seen.setdefault(one, number) == number for one in objects), "an object is in two batches"
    together = [np.concatenate([getattr(part, name) for part in parts]) for name in ("target", "offset", "nbytes")]
    order, expected = np.argsort(together[0]), np.argsort(whole.target)
    for mine, theirs in zip(together, (whole.target, whole.offset, whole.nbytes), strict=True):
        assert (mine[order] == theirs[expected]).all()


def test_windows_of_a_region():
    plan = plan_read(read_layout(make((10,), (4,))), slice(3, 9))
    (window,) = axis_windows(plan.layout, plan.region)
    assert window.chunk.tolist() == [0, 1, 2]
    assert window.inside.tolist() == [3, 0, 0]
    assert window.target.tolist() == [0, 1, 5]
    assert window.length.tolist() == [1, 4, 1]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 500), st.booleans()), min_size=1),
    st.integers(600, 3000),
    st.integers(1, 4),
    st.sampled_from([(16, False), (64, False), (64, True)]),
)
def test_slabs_hold_every_span_once_and_within_their_limits(rows, slab, objects, alignment):
    number = np.sort(np.cumsum([step for step, *_ in rows]))
    offset, straight, place = [], [], 0
    for row, (_, gap, nbytes, is_straight) in enumerate(rows):
        begin = 0 if row == 0 or number[row] != number[row - 1] else offset[-1] + rows[row - 1][2] + 16 * gap
        offset.append(begin)
        straight.append(place if is_straight else -1)
        place += nbytes
    nbytes = np.array([row[2] for row in rows])
    spans = Spans(np.arange(len(rows)), number, np.array(offset), nbytes, np.array(straight))
    align, congruent = alignment
    limits = SlabLimits(slab, objects, align, congruent=congruent)
    covered = []
    for one in pack(spans, limits):
        assert one.end <= slab
        assert len(np.unique(one.object)) <= objects
        order = np.argsort(one.place)
        assert (one.place[order][1:] >= (one.place + one.nbytes)[order][:-1]).all(), "reads overlap in the slab"
        for read in range(len(one.object)):
            bytes_of_read = range(one.offset[read], one.offset[read] + one.nbytes[read])
            covered += [(int(one.object[read]), byte) for byte in bytes_of_read]
        for piece, at in zip(one.pieces, one.piece_place, strict=True):
            inside = (one.place <= at) & (at + nbytes[piece] <= one.place + one.nbytes)
            inside &= (one.object == number[piece]) & (one.offset + at - one.place == offset[piece])
            assert inside.sum() == 1, "a piece lies in exactly the read that holds its bytes"
    wanted = [(int(n), byte) for n, o, k in zip(number, offset, nbytes, strict=True) for byte in range(o, o + k)]
    assert sorted(covered) == sorted(wanted)


def test_a_piece_that_does_not_fit_is_refused():
    one = np.array([0])
    spans = Spans(one, one, one, np.array([1000]), np.array([-1]))
    with pytest.raises(ValueError, match="1000 bytes does not fit into a slab of 1000"):
        list(pack(spans, SlabLimits(1000, 4)))


def test_the_plan_imports_no_gpu_package_and_opens_no_file():
    files = list(Path(str(importlib.resources.files("linumpy.plan"))).rglob("*.py"))
    assert len(files) > 20
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = {n.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names}
        names |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert names <= {
            "__future__",
            "collections",
            "dataclasses",
            "functools",
            "itertools",
            "json",
            "math",
            "operator",
        } | {
            "types",
            "typing",
            "numpy",
            "google_crc32c",
            "linumpy",
        }, file.name
        calls = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert "open" not in calls
