"""If this fails, reads of arrays with chunks of several shapes (rectilinear grids) differ from zarr-python's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import linumpy
from linumpy.core import native
from linumpy.errors import ChunkError, RegionError
from linumpy.gpu import Reader
from linumpy.gpu.read.engines.by_core import PartsJob
from linumpy.gpu.zarr_io import plan_zarr_read
from linumpy.io.layout import read_layout
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read import cut_by_shape, plan_read
from tests.support.gpu import reference
from tests.support.gpu.stand_in import needs_stand_in
from tests.support.regions import into_rows
from tests.support.zips import zip_folder

HAS_RECTILINEAR = "rectilinear_chunks" in zarr.config.get("array")
by_zarr = pytest.mark.skipif(not HAS_RECTILINEAR, reason="this zarr-python reads no rectilinear chunk grids")

lengths_of_an_axis = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def stored_by_hand(folder: Path, lengths: list[list[int]], dtype: str = "<u2") -> tuple[np.ndarray, ArrayLayout]:
    """Write raw chunks, whole also beyond the edge, and describe them as a rectilinear array."""
    shape = [sum(axis) - (axis[-1] > 1) for axis in lengths]  # the last chunk overhangs
    whole = np.arange(np.prod([sum(axis) for axis in lengths]), dtype=dtype).reshape([sum(axis) for axis in lengths])
    array = zarr.create_array(folder / "a", shape=shape, chunks=shape, dtype=dtype, compressors=None, fill_value=7)
    layout = dataclasses.replace(
        read_layout(array),
        grid="rectilinear",
        lengths=tuple(np.array(axis, np.int64) for axis in lengths),
        chunk_shape=tuple(map(max, lengths)),
    )
    starts = [np.cumsum([0, *axis]) for axis in lengths]
    for index in np.ndindex(*map(len, lengths)):
        box = tuple(slice(starts[a][i], starts[a][i + 1]) for a, i in enumerate(index))
        path = folder / "a" / "c" / "/".join(map(str, index))
        if sum(index) % 5 == 3:
            whole[box] = 7  # missing: the fill value
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole[box].tobytes())
    return whole[tuple(map(slice, shape))], layout


@given(st.data())
def test_parts_of_a_region_are_all_of_it_once(data: st.DataObject) -> None:
    """Each voxel of the region is in one part, at the place of its chunk's own voxel in the regular grid."""
    lengths = data.draw(st.lists(lengths_of_an_axis, min_size=1, max_size=3))
    shape = tuple(map(sum, lengths))
    layout = ArrayLayout(
        "a", "/a", 3, shape, tuple(map(max, lengths)), np.dtype("u1"), False, tuple(range(len(shape))), None,
        np.uint8(0), None, ("bytes",), None, grid="rectilinear", lengths=tuple(map(np.array, lengths)),
    )  # fmt: skip
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    start, stop = zip(*bounds, strict=True)
    # Of each voxel along each axis: its chunk, and where it is in it.
    axes = [[(i, v, n) for i, n in enumerate(axis) for v in range(n)] for axis in lengths]
    seen = np.zeros([b - a for a, b in bounds], int)
    for part in cut_by_shape(layout, start, stop):
        extent = [b - a for a, b in zip(part.start, part.stop, strict=True)]
        seen[tuple(slice(o, o + n) for o, n in zip(part.offset, extent, strict=True))] += 1
        for axis, n in enumerate(extent):
            size = part.layout.chunk_shape[axis]
            got = [divmod(part.start[axis] + k, size) for k in range(n)]
            wanted = [axes[axis][start[axis] + part.offset[axis] + k] for k in range(n)]
            assert [(*pair, size) for pair in got] == wanted
    assert (seen == 1).all()


@pytest.mark.needs_core
@given(st.data())
def test_chunks_written_by_hand(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Regions through a Reader, several at once and cast, are those of the NumPy array; missing chunks too."""
    lengths = data.draw(st.lists(lengths_of_an_axis, min_size=1, max_size=3))
    expected, layout = stored_by_hand(tmp_path_factory.mktemp("rectilinear"), lengths)
    boxes = [[sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in expected.shape] for _ in "ab"]
    with Reader("cpu") as reader:
        tickets = reader.submit_many(layout, np.array(boxes), dtype="f4")
        rows = np.zeros((2, *expected.shape), "u2")
        regions = into_rows(boxes, rows, [1, 0], [True] * expected.ndim)
        every = reader.submit_regions([layout], regions, "u2", rows)
        for box, ticket in zip(boxes, tickets, strict=True):
            region = expected[tuple(slice(*pair) for pair in box)]
            np.testing.assert_array_equal(ticket.result(), region.astype("f4"))
            assert ticket.report.chunks_read + ticket.report.chunks_filled == chunks_in(layout, box)
        every.result()
        for row, box in zip((1, 0), boxes, strict=True):
            region = expected[tuple(slice(*pair) for pair in box)]
            np.testing.assert_array_equal(rows[row][tuple(map(slice, region.shape))], region)


def chunks_in(layout: ArrayLayout, box: list[list[int]]) -> int:
    """Count the chunks that a box touches, voxel by voxel, and compare with the plan."""
    axes = zip(layout.lengths, box, strict=True)
    numbers = [np.repeat(np.arange(len(axis)), axis)[slice(*pair)] for axis, pair in axes]
    count = int(np.prod([len(set(axis.tolist())) for axis in numbers]))
    plan = plan_read(layout, tuple(slice(*pair) for pair in box))
    assert plan.chunk_count == plan.object_count == count
    return count


@pytest.mark.needs_core
def test_errors_name_the_chunk_and_regions_are_checked(tmp_path: Path) -> None:
    """A chunk of the wrong size is named by its own path and shape; a region must lie in the array."""
    _, layout = stored_by_hand(tmp_path, [[2, 3, 3], [4, 1]])
    (tmp_path / "a/c/1/0").write_bytes(b"short")
    with Reader("cpu") as reader:
        assert not reader.reads_natively(layout)
        with pytest.raises(ChunkError, match=r"chunk \(1, 0\) of .*c/1/0 has 5 bytes, .* uint16 \(3, 4\) has 24"):
            reader.submit(layout).result()
        with pytest.raises(RegionError):
            reader.submit_many(layout, np.array([[[0, 9], [0, 1]]]))


def test_reports_of_parts_are_added_up() -> None:
    """Parts are read at the same time, so the time of a read is that of the slowest."""
    job = PartsJob(None)
    for seconds in (0.5, 2.0, 1.0):
        report = native.Report(chunks=3, bytes_read=10, seconds=seconds, decode_seconds=seconds)
        job.add(SimpleNamespace(report=lambda report=report: report), None)
    total = job.report()
    assert (total.chunks, total.bytes_read, total.seconds, total.decode_seconds) == (9, 30, 2.0, 3.5)


def test_on_a_device(tmp_path: Path) -> None:
    """Slabs hold chunks of several shapes, each with records of its own."""
    expected, layout = stored_by_hand(tmp_path, [[2, 3, 3, 2], [4, 1, 4], [5, 2]])
    with reference.fake_device(), Reader() as reader:
        for region in (np.s_[:], np.s_[1:9, 3:8, 4]):
            result = reader.submit(layout, region, dtype="i4").result()
            np.testing.assert_array_equal(result.get(), expected[region])


test_on_a_device.pytestmark = needs_stand_in


@by_zarr
@pytest.mark.parametrize("kind", ["raw", "zstd, swapped", "shards", "zip"])
def test_zarr_python_is_the_oracle(tmp_path: Path, kind: str) -> None:
    """What zarr-python writes with lists of lengths is read by the core, bit for bit, whole and in parts."""
    values = np.random.default_rng(1).integers(0, 999, (13, 9, 21)).astype("u2")
    options: dict[str, Any] = {
        "raw": {"compressors": None, "chunks": [[5, 5, 3], [1, 7, 1], 8]},
        "zstd, swapped": {"chunks": [[6, 7], [4, 5], [20, 1]], "serializer": zarr.codecs.BytesCodec(endian="big")},
        "shards": {"chunks": (1, 3, 3), "shards": [[4, 8, 1], [6, 3], [12, 3, 6]]},
        "zip": {"compressors": None, "chunks": [[5, 5, 3], [1, 7, 1], 8]},
    }[kind]
    path = tmp_path / "a.zarr"
    with zarr.config.set({"array.rectilinear_chunks": True}):
        array = zarr.create_array(path, shape=values.shape, dtype=values.dtype, fill_value=3, **options)
        array[:, :, :17] = values[:, :, :17]
        assert json.loads((path / "zarr.json").read_text())["chunk_grid"]["name"] == "rectilinear"
        if kind == "zip":
            path = zip_folder(path, tmp_path / "a.zip")
        for region in (np.s_[:], np.s_[3:12, 4, 7:], np.s_[..., 15:20]):
            got, report = linumpy.read_zarr(path, region=region, device="cpu", strict=True, return_report=True)
            np.testing.assert_array_equal(got, array[region])
            assert report.backend == "linumpy"
        assert "rectilinear" in str(plan_zarr_read(path)) or kind == "shards"
