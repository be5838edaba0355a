"""If this fails, `resample_zarr` gives other voxels than the call in memory, or a killed run does not go on."""

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage
from skimage.transform import resize as skimage_resize
from zarr.codecs import ZstdCodec

from linumpy.errors import ChunkError, DeviceMemoryError, GpuUnavailableError, MetadataError, ResumeError, SourceError
from linumpy.gpu.interpolation import resample_volume
from linumpy.io.ome import open_image
from linumpy.io.output import checks
from linumpy.plan.boundary import MODES
from linumpy.resample import filling, target_images
from linumpy.resample import resample_zarr as room
from linumpy.resample.blocks import pipeline as resample_blocks
from linumpy.resample.identity import identify_data, identify_path
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.pyramid import halved
from linumpy.write.writer import write_omezarr
from tests.resample.blocks.test_block import DTYPES, random_image, turned
from tests.support.budget import matrix
from tests.support.object_server import serve
from tests.support.script_runs import record_bars

ROOT = Path(__file__).parents[2]
HERE = {"device": "cpu"}


def volume(shape=(30, 41, 52), dtype="u2", seed=0):
    return np.random.default_rng(seed).integers(0, 60000, shape).astype(dtype)


def write(folder, image, spacing=None, **options):
    """An image whose last chunks along each axis are cut by its end."""
    options = {"chunks": tuple(min(n, 11) for n in image.shape), "compressors": None} | options
    write_omezarr(folder, image, spacing or (10.0, 6.0, 5.0)[-image.ndim :], **options)
    return folder


def at_decimals(image, matrix, offset, shape, **options):
    """By SciPy, with coordinates of few decimals, so that no rounding error puts one outside."""
    points = np.tensordot(matrix, np.indices(shape, float), 1) + offset[:, None, None, None]
    return ndimage.map_coordinates(image, points.round(12), **{"order": 1} | options)


def in_memory(image, matrix, offset, shape, **options):
    return ndimage.affine_transform(image, matrix, offset, tuple(shape), **({"order": 1} | options))


def by_spacing(image, shape, **options):
    """What a new spacing should give: the extent stays, and nothing beyond the outermost voxels turns black."""
    old, new = np.array(image.shape), np.array(shape)
    return in_memory(image, np.diag(old / new), (old - new) / (2 * new), shape, **{"mode": "nearest", **options})


def result(folder, level=0):
    return open_image(folder).levels[level][...]


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def times_and_channels(folder, **options):
    """An image of two times and three channels."""
    image = volume((2, 3, 12, 13, 14))
    write_omezarr(folder, image, (10.0, 6.0, 5.0), axes="tczyx", **{"chunks": (1, 1, 5, 6, 7), **options})
    return image


@pytest.mark.parametrize(
    "options", [{}, {"chunks": (4, 4, 4)}, {"chunks": (2, 2, 2), "shards": (4, 4, 4), "compressors": ZstdCodec()}]
)
def test_each_time_and_channel_by_itself(tmp_path, options, device):
    image = times_and_channels(tmp_path / "a", chunks=(2, 2, 5, 6, 7))
    resample_zarr(tmp_path / "a", tmp_path / "b", 8.0, levels=2, device=device, **options)
    got = open_image(tmp_path / "b")
    assert "".join(axis.name for axis in got.axes) == "tczyx"
    assert got.levels[0].chunks[:2] == (1, 1)
    for t, c in np.ndindex(2, 3):
        write(tmp_path / "one", image[t, c], overwrite=True)
        resample_zarr(tmp_path / "one", tmp_path / "two", 8.0, levels=2, device=device, overwrite=True)
        for level in (0, 1):
            assert same(got.levels[level][t, c], result(tmp_path / "two", level))
    assert got.spacing == open_image(tmp_path / "two").spacing


def test_a_chosen_time_and_channel(tmp_path):
    image = times_and_channels(tmp_path / "a")
    for chosen, axes, data in [
        ({"channel": 2}, "tzyx", image[:, 2]),
        ({"time": 1}, "czyx", image[1]),
        ({"time": 1, "channel": 0}, "zyx", image[1, 0]),
    ]:
        resample_zarr(tmp_path / "a", tmp_path / "b", (10, 6, 5), overwrite=True, **chosen, **HERE)
        assert "".join(axis.name for axis in open_image(tmp_path / "b").axes) == axes
        assert same(result(tmp_path / "b"), data)
    with pytest.raises(ValueError, match=r"channel=3: .* has 3 channels"):
        resample_zarr(tmp_path / "a", tmp_path / "c", 8.0, channel=3, **HERE)
    with pytest.raises(ValueError, match=r"chunks=\(1, 1, 4, 4, 4\): pass 3 sizes, along the axes of space"):
        resample_zarr(tmp_path / "a", tmp_path / "c", 8.0, chunks=(1, 1, 4, 4, 4), **HERE)


def test_a_stopped_run_goes_on_within_a_volume(tmp_path, monkeypatch):
    image, real, made = times_and_channels(tmp_path / "a"), resample_blocks.write_block, []

    def write_until(chunks, block, data, entries):
        if len(made) == 13:
            raise OSError("the disk is gone")
        made.append((entries, block.number))
        return real(chunks, block, data, entries)

    monkeypatch.setattr(resample_blocks, "write_block", write_until)
    options = {"chunks": (6, 13, 14), "memory_bytes": 14_000, **HERE}
    with pytest.raises(OSError, match="gone"):
        resample_zarr(tmp_path / "a", tmp_path / "b", (5, 6, 5), **options)
    assert not (tmp_path / "b").exists()
    first, made[:] = list(made), []
    made.append(None)  # so that the count does not stop the second run

    def write(chunks, block, data, entries):
        made.append((entries, block.number))
        return real(chunks, block, data, entries)

    monkeypatch.setattr(resample_blocks, "write_block", write)
    resample_zarr(tmp_path / "a", tmp_path / "b", (5, 6, 5), **options)
    assert len(first) == 13
    # What was under way when the disk went may be written twice.
    assert len(set(first) & set(made[1:])) <= 2
    for t, c in np.ndindex(2, 3):
        assert same(result(tmp_path / "b")[t, c], by_spacing(image[t, c], (24, 13, 14)))


@pytest.mark.parametrize(
    ("spacing", "mode"),
    matrix([(20.0, 12.0, 10.0), (7.0, 9.0, 3.3), 4.0, (10.0, 6.0, 5.0)], ["constant", "nearest"]),
)
def test_a_new_spacing(tmp_path, spacing, mode):
    image = volume()
    write(tmp_path / "a", image, origin=(3.0, 2.0, 1.0))
    options = {"chunks": (8, 8, 8), "memory_bytes": 80_000, "mode": mode, "anti_aliasing": False, **HERE}
    assert resample_zarr(tmp_path / "a", tmp_path / "b", spacing, **options) == tmp_path / "b"
    got = open_image(tmp_path / "b")
    factors = np.divide(image.shape, got.levels[0].shape)
    expected = by_spacing(image, got.levels[0].shape, mode=mode)
    assert same(result(tmp_path / "b"), expected)
    assert got.levels[0].chunks == (8, 8, 8)
    assert np.allclose(got.spacing[0], factors * (10.0, 6.0, 5.0))
    assert np.allclose(got.spacing[0], spacing, rtol=0.06)
    assert np.allclose(np.array(got.origin[0]) - np.array(got.spacing[0]) / 2, np.subtract((3, 2, 1), (5, 3, 2.5)))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b"]


def to_dtype(image, dtype):
    """Floats as an image stores them: integers rounded, halves away from zero."""
    if np.dtype(dtype).kind == "f":
        return image.astype(dtype)
    info, whole = np.iinfo(dtype), np.trunc(image + np.copysign(0.5, image))
    return np.clip(whole, info.min, info.max).astype(dtype)


@pytest.mark.parametrize(
    ("dtype", "spacing"),
    matrix(["u1", "i2", "f2", "f4", "f8", "i4", "u8", "i8"], [(20.0, 12.0, 10.0), (31.0, 9.0, 3.3), (10.0, 6.0, 23.0)]),
)
def test_a_coarser_spacing_is_smoothed(tmp_path, spacing, dtype):
    """Whatever the blocks, the bits of ``resample_volume`` on the whole, and the values of scikit-image."""
    image = (volume() % (200 if dtype == "u1" else 30000)).astype(dtype)
    if np.dtype(dtype).itemsize >= 4 and image.dtype.kind in "iu":  # more than float32 holds
        image += np.dtype(dtype).type(2**29)
    write(tmp_path / "a", image)
    for name, chunks, memory in (("small", (4, 8, 8), 150_000 * max(2, image.itemsize)), ("large", (16, 8, 32), 10**7)):
        options = {"chunks": chunks, "memory_bytes": memory, **HERE}
        resample_zarr(tmp_path / "a", tmp_path / name, spacing, **options)
        wide = image.astype("f8") if image.dtype.kind in "iu" and image.itemsize >= 4 else image
        expected, reached = resample_volume(wide, (10.0, 6.0, 5.0), spacing)
        got = result(tmp_path / name)
        assert same(got, to_dtype(expected, dtype))
        assert np.allclose(open_image(tmp_path / name).spacing[0], reached)
    options = {"order": 1, "mode": "edge", "anti_aliasing": True, "preserve_range": True, "clip": False}
    truth = skimage_resize(image.astype("f8"), got.shape, **options)
    rounding = {"f2": 8.0, "f4": 0.01, "f8": 1e-8}.get(dtype, 0.51)
    assert np.abs(got.astype("f8") - truth).max() <= rounding


@pytest.mark.parametrize(("dtype", "mode"), matrix(["u2", "f4", "f8"], MODES))
def test_a_smoothed_source_through_any_map(tmp_path, mode, dtype):
    """Smoothed along the axes of the source by how far a step of the output goes; the same whatever the blocks."""
    image = volume((24, 33, 35)).astype(dtype)
    write(tmp_path / "a", image)
    matrix = np.array([[2.1, 0.0, 0.9], [0.0, 1.7, 0.3], [0.2, -0.3, 0.7]])
    offset = np.array([-1.25, 2.5, 1.0])
    shape, cval = (12, 20, 35), 77.0
    options = {"mode": mode, "cval": cval, "anti_aliasing": True, "output_shape": shape, "chunks": (6, 8, 8), **HERE}
    for name, memory in (("parts", 1_200_000), ("whole", 10**8)):
        resample_zarr(
            tmp_path / "a", tmp_path / name, np.column_stack([matrix, offset]), memory_bytes=memory, **options
        )
    assert same(result(tmp_path / "parts"), result(tmp_path / "whole"))
    sigmas = np.maximum(0, (np.linalg.norm(matrix, axis=1) - 1) / 2)
    smooth = ndimage.gaussian_filter(image.astype("f8"), sigmas, mode="nearest")
    by_scipy = at_decimals if mode == "constant" else in_memory
    expected = by_scipy(smooth, matrix, offset, shape, mode=mode, cval=cval)
    error = np.abs(result(tmp_path / "whole") - expected).max()
    assert error <= {"u2": 0.52, "f4": 0.05, "f8": 1e-6}[dtype]
    kept = zarr.open_group(tmp_path / "whole").attrs["linumpy"]["resampled"]
    assert np.allclose(kept["anti_aliasing_sigma"], sigmas)


def test_matrices_and_labels_are_not_smoothed_unasked(tmp_path):
    image = volume((20, 21, 22))
    write(tmp_path / "a", image)
    shape = (7, 7, 7)
    resample_zarr(tmp_path / "a", tmp_path / "b", np.diag([3.0, 3, 3]), output_shape=shape, **HERE)
    assert same(result(tmp_path / "b"), in_memory(image, [3.0] * 3, 0, shape))
    resample_zarr(tmp_path / "a", tmp_path / "c", (30.0, 18.0, 15.0), order=0, anti_aliasing=True, **HERE)
    assert same(result(tmp_path / "c"), by_spacing(image, (7, 7, 7), order=0))
    assert zarr.open_group(tmp_path / "c").attrs["linumpy"]["resampled"]["anti_aliasing_sigma"] == [0, 0, 0]


def test_a_coarser_grid_beyond_the_source(tmp_path):
    """With a shape of the caller's the grid may end before the source does, or after it."""
    image = volume((20, 21, 22), "f8")
    write(tmp_path / "a", image)
    for name, shape in (("less", (4, 10, 5)), ("more", (9, 30, 9))):
        options = {"output_shape": shape, "chunks": (2, 8, 2), "memory_bytes": 500_000, **HERE}
        resample_zarr(tmp_path / "a", tmp_path / name, (30.0, 6.0, 15.0), **options)
        smooth = ndimage.gaussian_filter(image, (1, 0, 1), mode="nearest")
        expected = in_memory(smooth, [3.0, 1.0, 3.0], (1.0, 0, 1.0), shape, mode="nearest")
        assert np.abs(result(tmp_path / name) - expected).max() < 1e-8


def test_smoothed_blocks_read_no_more_than_their_gaussian_needs(tmp_path, monkeypatch):
    boxes = []
    read = resample_blocks.HostStage.read

    def note(stage, block):
        boxes.append((block.start, block.stop, block.source_start, block.source_stop))
        return read(stage, block)

    monkeypatch.setattr(resample_blocks.HostStage, "read", note)
    image = volume((60, 60, 20))
    write(tmp_path / "a", image, spacing=(5.0, 5.0, 5.0))
    resample_zarr(tmp_path / "a", tmp_path / "b", (15.0, 10.0, 5.0), chunks=(10, 10, 10), memory_bytes=300_000, **HERE)
    assert len(boxes) > 3
    for start, stop, low, high in boxes:
        # By a factor of 3 the centres lie on voxels, and 4 sigmas are 4 voxels; by 2, between voxels, and 2 voxels.
        assert low == (max(0, 3 * start[0] + 1 - 4), max(0, 2 * start[1] - 2), start[2])
        assert high == (min(60, 3 * stop[0] - 2 + 1 + 4), min(60, 2 * stop[1] + 2), stop[2])


def test_an_output_that_cannot_fit_is_refused_before_work(tmp_path, monkeypatch):
    write(tmp_path / "a", volume())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage._replace(free=volume().nbytes - 1))
    with pytest.raises(OSError, match="iB are free"):
        resample_zarr(tmp_path / "a", tmp_path / "b", (10.0, 6.0, 5.0), **HERE)
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


@pytest.mark.filterwarnings("ignore:invalid value")
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_any_transform_is_that_in_memory(tmp_path_factory, data, seed):
    """Ragged shapes, axes of one voxel, turned and flipped grids, every mode, shards, missing chunks, NaN."""
    folder, rng = tmp_path_factory.mktemp("any"), np.random.default_rng(seed)
    rank = data.draw(st.integers(2, 3))
    shape, output = (tuple(rng.choice([1, 2, 5, 13, 24], rank).tolist()) for _ in range(2))
    image = random_image(rng, shape, data.draw(st.sampled_from(DTYPES)))
    write(folder / "a", image, chunks=tuple(int(rng.integers(1, n + 1)) for n in shape))
    matrix, offset = turned(rng, rank), np.round(rng.normal(size=rank) * 5, int(rng.integers(0, 8)))
    options = {"order": data.draw(st.integers(0, 1)), "mode": data.draw(st.sampled_from(MODES)), "cval": 2.5}
    chunks = tuple(int(rng.integers(1, n + 1)) for n in output)
    shards = tuple(c * int(rng.integers(1, 3)) for c in chunks) if data.draw(st.booleans()) else None
    resample_zarr(
        folder / "a",
        folder / "b",
        np.column_stack([matrix, offset]),
        output_shape=output,
        chunks=chunks,
        shards=shards,
        memory_bytes=data.draw(st.sampled_from([300_000, 3_000_000])),
        progress=int,
        **options,
        **HERE,
    )
    assert same(result(folder / "b"), in_memory(image, matrix, offset, output, **options))


def test_missing_chunks_are_fill_values_and_bytes_may_be_swapped(tmp_path):
    image = volume((20, 20, 20), "i4")
    array = zarr.create_array(
        tmp_path / "a", shape=image.shape, chunks=(8, 8, 8), dtype=">i4", zarr_format=2, compressors=None, fill_value=7
    )
    array[8:, :, 3:] = image[8:, :, 3:]
    image[:8] = image[:, :, :3] = 7
    (tmp_path / "a" / "1.1.1").unlink()
    image[8:16, 8:16, 8:16] = 7
    resample_zarr(
        tmp_path / "a",
        tmp_path / "b",
        1.3,
        spacing=(1.0, 2.0, 1.0),
        anti_aliasing=False,
        chunks=(8, 8, 8),
        **HERE | {"memory_bytes": 60_000},
    )
    shape = (15, 31, 15)
    assert same(result(tmp_path / "b"), by_spacing(image, shape))


@pytest.mark.parametrize("order", [2, 3])
def test_splines_are_those_of_the_whole_but_for_rounding(tmp_path, order):
    image = volume((24, 70, 71), "f4")
    write(tmp_path / "a", image)
    matrix = np.array([[0.9, 0.0, 0.1], [0.0, 0.8, 0.3], [0.1, -0.3, 0.8]])
    options = {"order": order, "memory_bytes": 10_000_000}
    resample_zarr(tmp_path / "a", tmp_path / "b", matrix, chunks=(8, 8, 8), **options, **HERE)
    expected = at_decimals(image, matrix, np.zeros(3), image.shape, order=order)
    assert np.abs(result(tmp_path / "b") - expected).max() < 0.05
    resample_zarr(tmp_path / "a", tmp_path / "c", 13.0, order=order, chunks=(8, 8, 8), memory_bytes=2 * 10**7, **HERE)
    expected, _ = resample_volume(image.astype("f8"), (10.0, 6.0, 5.0), 13.0, order=order)  # a coarser one is smoothed
    assert np.abs(result(tmp_path / "c") - expected).max() < 0.05


def test_masks_by_their_nearest_voxel(tmp_path):
    image = volume((9, 10), "u1") > 90
    write(tmp_path / "a", image)
    resample_zarr(tmp_path / "a", tmp_path / "b", (3.0, 4.0), order=0, mode="nearest", **HERE)
    got = result(tmp_path / "b")
    assert same(got, by_spacing(image, got.shape, order=0))


def test_levels_of_source_and_target(tmp_path):
    write(tmp_path / "a", volume(), levels=2)
    resample_zarr(tmp_path / "a", tmp_path / "b", 15.0, level=1, levels=2, chunks=(5, 5, 5), **HERE)
    finer, coarser = result(tmp_path / "b"), result(tmp_path / "b", 1)
    source = open_image(tmp_path / "a")
    expected = np.multiply(source.levels[1].shape, source.spacing[1]) / open_image(tmp_path / "b").spacing[0]
    assert np.allclose(finer.shape, expected)
    assert same(coarser, halved(finer, tuple(slice(0, n) for n in coarser.shape)))
    centre = np.add(open_image(tmp_path / "b").origin[0], np.array(open_image(tmp_path / "b").spacing[0]) / 2)
    assert np.allclose(open_image(tmp_path / "b").origin[1], centre)


def test_the_transform_is_kept_beside_the_metadata(tmp_path):
    write(tmp_path / "a", volume())
    turn = [[0, 0, 1.0, 4], [0, 1.0, 0, 0], [1.0, 0, 0, 0]]
    resample_zarr(tmp_path / "a", tmp_path / "b", turn, **HERE)
    kept = zarr.open_group(tmp_path / "b").attrs["linumpy"]["resampled"]
    assert kept["matrix"] == [row[:3] for row in turn]
    assert kept["offset"] == [4, 0, 0]
    assert kept["source"].endswith("a/0")
    assert open_image(tmp_path / "b").spacing == ((5.0, 6.0, 10.0),)
    assert open_image(tmp_path / "b").origin == ((40.0, 0.0, 0.0),)


def test_the_source_is_not_replaced(tmp_path):
    write(tmp_path / "a", volume())
    for target in ("a", "a/0"):
        with pytest.raises(ValueError, match="the source"):
            resample_zarr(tmp_path / "a", tmp_path / target, 4.0, overwrite=True, **HERE)
        array, here = open_image(tmp_path / "a").levels[0], {"spacing": (1, 1, 1), **HERE}
        with pytest.raises(ValueError, match="the source"):  # an array that is open has a place, too
            resample_zarr(array, tmp_path / target, 4.0, overwrite=True, **here)
    assert same(result(tmp_path / "a"), volume())


def test_progress_is_the_bytes_of_the_output(tmp_path):
    write(tmp_path / "a", volume())
    seen = []
    resample_zarr(
        tmp_path / "a", tmp_path / "b", 9.0, memory_bytes=150_000, chunks=(8,) * 3, progress=seen.append, **HERE
    )
    assert len(seen) > 5
    assert sum(seen) == result(tmp_path / "b").nbytes


def test_reading_making_and_writing_overlap_within_two_buffers(tmp_path, monkeypatch):
    """While a block is made, the next one is read and the last one written; nothing runs further ahead."""
    under_way, most, together, lock = {}, {"read": 0, "made": 0}, set(), threading.Lock()

    class Slow(resample_blocks.HostStage):
        def count(self, name, block, seconds=0.01):
            with lock:
                under_way[name] = block.number
                together.add(frozenset(under_way))
            time.sleep(seconds)
            with lock:
                del under_way[name]

        def read(self, block):
            self.count("read", block)
            begun[0] += 1
            most["read"] = max(most["read"], begun[0] - done[0])
            return super().read(block)

        def transform(self, block, source):
            self.count("make", block, 0.03)
            return super().transform(block, source)

        def write(self, block, result):
            self.count("write", block, 0.02)
            super().write(block, result)

    begun, done = [0], [0]

    def note(_):
        done[0] += 1

    monkeypatch.setattr(resample_blocks, "HostStage", Slow)
    write(tmp_path / "a", volume())
    options = {"memory_bytes": 60_000, "chunks": (8, 8, 8), "progress": note, "anti_aliasing": False, **HERE}
    resample_zarr(tmp_path / "a", tmp_path / "b", 15.0, **options)
    assert frozenset(["read", "make"]) in together
    assert frozenset(["make", "write"]) in together
    assert most["read"] <= 4


@pytest.mark.needs_core
@pytest.mark.parametrize(
    ("shape", "spacing", "memory", "most"),
    [
        ((60, 90, 70), 2.0, None, 1.0), ((60, 50, 70), 0.8, 800_000, 1.05), ((45, 150, 61), 1.4, 2_000_000, 1.05),
    ],
)  # fmt: skip
def test_chunks_of_a_server_are_fetched_once_where_memory_keeps_those_that_blocks_share(
    tmp_path, caplog, shape, spacing, memory, most
):
    pytest.importorskip("obstore")
    (tmp_path / "served").mkdir()
    values = np.random.default_rng(0).integers(0, 999, shape, "u2")
    array = zarr.create_array(tmp_path / "served/a", data=values, chunks=(8, 8, 8))
    options = {"spacing": (1, 1, 1), "chunks": (8, 8, 8), "memory_bytes": memory, "levels": 1, **HERE}
    with serve(tmp_path / "served") as server, caplog.at_level("INFO", "linumpy"):
        resample_zarr(f"{server.url}/a", tmp_path / "b", spacing, **options)
        fetched = [path for command, path, _ in server.of("/c/") if command == "GET"][1:]  # one to look for labels
    resample_zarr(array, tmp_path / "c", spacing, **{**options, "memory_bytes": None})
    assert same(result(tmp_path / "b"), result(tmp_path / "c"))
    assert len(set(fetched)) == math.prod(-(-n // 8) for n in shape)
    assert len(fetched) <= most * len(set(fetched))
    assert f"{len(fetched)} chunks fetched, {len(set(fetched))} needed" in caplog.text


RUN = """
import os, signal, sys, time
from linumpy.resample import resample_zarr as room
from linumpy.resample.blocks import pipeline as resample_blocks
written, voxels, stop = [0], [0], int(sys.argv[3])
real = resample_blocks.write_block
def write(chunks, block, data, entries):
    if written[0] == stop:
        # A part of a chunk's file, and then the end.
        real(chunks, block, data * 0, entries)()
        os.truncate(chunks._files.paths(block.box, (8, 8, 8))[0], 100)
        os.kill(os.getpid(), signal.SIGKILL)
    written[0] += 1
    voxels[0] += data.size
    return real(chunks, block, data, entries)
resample_blocks.write_block = write
room.resample_zarr(sys.argv[1], sys.argv[2], 4.0, chunks=(8, 8, 8), memory_bytes=int(sys.argv[4]), device=sys.argv[5])
print(voxels[0])
"""


def run_until_killed(tmp_path, stop, memory=60_000, device="cpu"):
    return subprocess.run(
        [sys.executable, "-c", RUN, tmp_path / "a", tmp_path / "b", str(stop), str(memory), device],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_killed_run_goes_on_from_its_complete_blocks(tmp_path):
    """Killed twice in the middle of a block, the second time with other blocks: the result is that of one run."""
    image = volume()
    write(tmp_path / "a", image)
    assert run_until_killed(tmp_path, 20).returncode == -signal.SIGKILL
    assert not (tmp_path / "b").exists()
    assert run_until_killed(tmp_path, 45, 100_000).returncode == -signal.SIGKILL
    assert sorted(one.name for one in tmp_path.iterdir()) == [".b.unfinished", "a"]
    head, *lines = (tmp_path / ".b.unfinished" / "journal").read_text().splitlines()
    there = np.zeros(json.loads(head.split(" ", 1)[1])["request"]["grid"], bool)
    for line in lines:
        if line.split()[1] == "box":
            corners = [int(word) for word in line.split()[2:]]
            there[tuple(map(slice, corners[:3], corners[3:]))] = True
    assert 0.2 < there.mean() < 0.9
    (image_of,) = (tmp_path / ".b.unfinished").glob("image-*")
    (image_of / "0" / "c" / "0" / "0" / "0.1.partial").touch()
    last = run_until_killed(tmp_path, -1)
    assert last.returncode == 0, last.stderr
    resample_zarr(tmp_path / "a", tmp_path / "whole", 4.0, chunks=(8, 8, 8), **HERE)
    shape = result(tmp_path / "b").shape
    # Blocks that the second run, with larger ones, had but a part of are made again.
    assert 0 < int(last.stdout) < (1.1 - there.mean()) * np.prod(shape)
    assert same(result(tmp_path / "b"), result(tmp_path / "whole"))
    assert same(result(tmp_path / "b"), by_spacing(image, shape))
    assert not list((tmp_path / "b").rglob("*.partial"))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b", "whole"]


@pytest.mark.gpu
def test_a_run_on_a_device_is_killed_and_goes_on(tmp_path):
    write(tmp_path / "a", volume((100, 120, 140)), chunks=(32, 32, 32))
    memory = 3 * 2**20
    assert run_until_killed(tmp_path, 9, memory, "cuda").returncode == -signal.SIGKILL
    assert not (tmp_path / "b").exists()
    last = run_until_killed(tmp_path, -1, memory, "cuda")
    assert last.returncode == 0, last.stderr
    resample_zarr(tmp_path / "a", tmp_path / "whole", 4.0, chunks=(8, 8, 8), device="cuda")
    assert same(result(tmp_path / "b"), result(tmp_path / "whole"))
    assert 0 < int(last.stdout) < result(tmp_path / "b").size


class StopError(Exception):
    pass


def begin(tmp_path, spacing=4.0, **options):
    """Start a run and let it fail after some blocks."""
    seen = itertools.count()

    def stop(_):
        if next(seen) == 6:
            raise StopError

    write(tmp_path / "a", volume())
    options = {"chunks": (8, 8, 8), "memory_bytes": 60_000, **HERE, **options}
    with pytest.raises(StopError):
        resample_zarr(tmp_path / "a", tmp_path / "b", spacing, progress=stop, **options)
    return options


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": 0}, "differs in order"),
        ({"mode": "constant"}, "differs in mode"),
        ({"cval": 3.0}, "differs in cval"),
        ({"spacing": (12.0, 9.0, 7.0), "anti_aliasing": False}, "differs in anti_aliasing"),
        ({"chunks": (8, 8, 4)}, "differs in chunks, grid"),
        ({"shards": (16, 16, 16)}, "differs in grid, shards"),
        ({"levels": 2}, "differs in metadata, output shapes"),
        ({"output_shape": (9, 9, 9)}, "differs in grid, metadata, output shapes, transform"),
    ],
)
def test_an_unfinished_run_of_another_request_is_in_the_way(tmp_path, change, message):
    change = dict(change)
    spacing = change.pop("spacing", 4.0)
    options = begin(tmp_path, spacing, memory_bytes=60_000 if spacing == 4.0 else 120_000)
    with pytest.raises(ResumeError, match=message):
        resample_zarr(tmp_path / "a", tmp_path / "b", spacing, **options | change)
    resample_zarr(tmp_path / "a", tmp_path / "b", spacing, **options)


def rewrite_all(folder):
    write(folder, volume(seed=1), overwrite=True)


def rewrite_in_place(folder):
    zarr.open_array(folder / "0", mode="r+")[...] = volume(seed=1)


def rewrite_last_chunk(folder):
    """By another tool, which keeps the size of the file and the times of all folders."""
    last = folder / "0" / "c" / "2" / "3" / "4"
    data = np.fromfile(last, "u2")
    with last.open("r+b") as file:
        file.write((data[::-1]).tobytes())


@pytest.mark.parametrize("rewrite", [rewrite_all, rewrite_in_place, rewrite_last_chunk])
def test_a_source_that_was_written_anew_is_another(tmp_path, rewrite, caplog):
    options = begin(tmp_path)
    rewrite(tmp_path / "a")
    resample_zarr(tmp_path / "a", tmp_path / "b", 4.0, **options)
    assert "b: removed what a stopped run had left: it was made from another source data" in caplog.text
    image, got = open_image(tmp_path / "a").levels[0][...], result(tmp_path / "b")
    assert same(got, by_spacing(image, got.shape))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("spelling", ["x/../a", "link/../a", "a/", "here/a", "there/../other"])
def test_a_run_is_gone_on_with_by_another_spelling_of_the_source(tmp_path, spelling):
    """Behind a link ``..`` is the folder above the one that it leads to; the metadata tells the folder itself."""
    options = begin(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "x")
    (tmp_path / "here").symlink_to(tmp_path)
    far = tmp_path / "far"
    (far / "deep").mkdir(parents=True)
    (tmp_path / "there").symlink_to(far / "deep")
    (far / "other").symlink_to(tmp_path / "a")
    marked = zarr.open_array(next((tmp_path / ".b.unfinished").glob("image-*/0")), mode="r+")
    marked[:8, :8, :8] = 77
    resample_zarr(f"{tmp_path}/{spelling}", tmp_path / "b", 4.0, **options)
    assert (result(tmp_path / "b")[:8, :8, :8] == 77).all()
    written = zarr.open_group(tmp_path / "b", mode="r").attrs["linumpy"]["resampled"]["source"]
    assert written == f"file://{os.path.realpath(tmp_path / 'a' / '0')}"


def test_what_the_dots_of_text_would_name_is_another_source(tmp_path):
    options = begin(tmp_path)
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "deep")
    write(tmp_path / "far" / "a", volume(seed=1))
    resample_zarr(f"{tmp_path}/link/../a", tmp_path / "b", 4.0, **options)
    got = result(tmp_path / "b")
    assert same(got, by_spacing(volume(seed=1), got.shape))


def test_a_source_that_is_written_meanwhile_gives_no_result(tmp_path):
    write(tmp_path / "a", volume())
    seen = itertools.count()

    def change(_):
        if next(seen) == 6:
            rewrite_last_chunk(tmp_path / "a")

    options = {"chunks": (8, 8, 8), "memory_bytes": 60_000, **HERE}
    with pytest.raises(SourceError, match="was changed while it was resampled"):
        resample_zarr(tmp_path / "a", tmp_path / "b", 4.0, progress=change, **options)
    assert not (tmp_path / "b").exists()
    resample_zarr(tmp_path / "a", tmp_path / "b", 4.0, **options)
    image, got = open_image(tmp_path / "a").levels[0][...], result(tmp_path / "b")
    assert same(got, by_spacing(image, got.shape))


def test_a_source_of_which_nothing_is_known_is_read_anew(tmp_path):
    """An array in memory is another one in each process, whatever its name."""
    for number in range(2):
        source = zarr.create_array(zarr.storage.MemoryStore(), shape=(30, 31), chunks=(8, 8), dtype="u2")
        source[...] = image = volume((30, 31), seed=number)
        seen = itertools.count()

        def stop(_, number=number, seen=seen):
            if next(seen) == 6 and number == 0:
                raise StopError

        options = {"spacing": (2.0, 2.0), "chunks": (8, 8), "memory_bytes": 3_000, "progress": stop, **HERE}
        with pytest.raises(StopError) if number == 0 else nullcontext():
            resample_zarr(source, tmp_path / "b", 1.5, **options)
    assert same(result(tmp_path / "b"), by_spacing(image, result(tmp_path / "b").shape))


def test_a_remote_source_is_known_by_its_servers_marks(tmp_path):
    store = zarr.storage.FsspecStore.from_url("memory://linumpy-remote")
    array = zarr.create_array(store, shape=(8, 8), chunks=(4, 4), dtype="u2")
    array[...] = 1
    before = identify_data(array)
    assert before == identify_data(zarr.open_array(store, mode="r"))
    array[4:, 4:] = 2
    assert identify_data(array) not in (before, None)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_files_whose_names_are_no_text_are_identified(tmp_path):
    before = identify_path(tmp_path)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).write_bytes(b"1")
    assert identify_path(tmp_path) != before


def test_another_version_of_linumpy_does_not_go_on(tmp_path, monkeypatch):
    options = begin(tmp_path)
    monkeypatch.setattr(target_images, "__version__", "0.0.9")
    with pytest.raises(ResumeError, match="differs in linumpy:"):
        resample_zarr(tmp_path / "a", tmp_path / "b", 4.0, **options)


def test_coarser_levels_of_labels_are_labels(tmp_path, device):
    """A mean of two labels would be a third one; the most frequent of eight voxels counts, and the metadata says so."""
    labels = np.random.default_rng(3).choice(np.array([1, 5, 9], "u2"), (21, 22, 23))
    write(tmp_path / "a", labels)
    options = {"order": 0, "levels": 3, "chunks": (8, 8, 8), "device": device}
    for name, downsampling in (("label", None), ("nearest", "nearest"), ("mean", "mean")):
        resample_zarr(tmp_path / "a", tmp_path / name, (10.0, 6.0, 5.0), downsampling=downsampling, **options)
        for level in (1, 2):
            finer, coarser = result(tmp_path / name, level - 1), result(tmp_path / name, level)
            assert same(coarser, halved(finer, tuple(slice(0, n) for n in coarser.shape), name))
            assert (set(np.unique(coarser)) <= {1, 5, 9}) == (name != "mean")
        assert zarr.open_group(tmp_path / name).attrs["ome"]["multiscales"][0]["type"] == name
    resample_zarr(tmp_path / "a", tmp_path / "means", (20.0, 12.0, 10.0), levels=2, chunks=(8, 8, 8), device=device)
    assert zarr.open_group(tmp_path / "means").attrs["ome"]["multiscales"][0]["type"] == "mean"


def test_a_run_stopped_at_the_coarser_levels_makes_no_block_again(tmp_path, monkeypatch):
    write(tmp_path / "a", volume())
    options = {"chunks": (8, 8, 8), "memory_bytes": 60_000, "levels": 2, **HERE}

    def stop(*_):
        raise StopError

    def no_block(*_):
        raise AssertionError("a block is made again")

    monkeypatch.setattr(filling, "halve_by_threads", stop)
    with pytest.raises(StopError):
        resample_zarr(tmp_path / "a", tmp_path / "b", 4.0, **options)
    assert not (tmp_path / "b").exists()
    monkeypatch.undo()
    monkeypatch.setattr(resample_blocks, "open_stage", no_block)
    resample_zarr(tmp_path / "a", tmp_path / "b", 4.0, **options)
    coarser = result(tmp_path / "b", 1)
    assert same(coarser, halved(result(tmp_path / "b"), tuple(slice(0, n) for n in coarser.shape)))


def test_broken_data_raises_and_the_rest_is_kept(tmp_path):
    write(tmp_path / "a", volume(), compressors="auto")
    chunk = tmp_path / "a" / "0" / "c" / "2" / "3" / "4"
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[: len(whole) // 2])
    options = {"chunks": (8, 8, 8), "memory_bytes": 60_000, **HERE}
    with pytest.raises(ChunkError, match="c/2/3/4 cannot be decoded"):
        resample_zarr(tmp_path / "a", tmp_path / "b", 6.0, **options)
    assert not (tmp_path / "b").exists()
    chunk.write_bytes(whole)
    resample_zarr(tmp_path / "a", tmp_path / "b", 6.0, **options)
    resample_zarr(tmp_path / "a", tmp_path / "c", 6.0, **options)
    assert same(result(tmp_path / "b"), result(tmp_path / "c"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"transform_or_spacing": np.zeros((3, 3))}, ValueError, "singular"),
        ({"transform_or_spacing": np.eye(2)}, ValueError, r"a transform of shape \(2, 2\)"),
        ({"transform_or_spacing": -1.0}, ValueError, "positive number of µm"),
        ({"output_shape": (0, 1, 1)}, ValueError, "output_shape"),
        ({"order": 7}, ValueError, "order=7"),
        ({"mode": "edge"}, ValueError, "mode='edge' is unknown"),
        ({"order": 3, "mode": "mirror"}, ValueError, "cannot be computed block by block"),
        ({"chunks": (4, 4)}, ValueError, "chunks="),
        ({"shards": (8, 8, 8)}, ValueError, "need chunks="),
        ({"levels": 40}, ValueError, "levels=40"),
        ({"level": 3}, SourceError, "no resolution level 3"),
        ({"source": "nothing"}, FileNotFoundError, "nothing"),
        ({"spacing": (1.0,)}, ValueError, "spacing="),
        ({"memory_bytes": 0}, ValueError, "memory_bytes=0"),
        ({"memory_bytes": 100}, DeviceMemoryError, "need .* bytes, but 100 may be used: choose smaller chunks"),
        ({"device": "tpu"}, ValueError, "tpu"),
        ({"transform_or_spacing": "a"}, ValueError, "transform_or_spacing='a'"),
        ({"transform_or_spacing": 1e-9}, OSError, "choose another disk, or larger voxels"),
        ({"transform_or_spacing": 1e-320}, ValueError, "1e-320 is too small: the number of voxels"),
        ({"output_shape": 5}, ValueError, "output_shape=5"),
        ({"order": np.float32(2)}, ValueError, "order=.*is an integer"),
        ({"cval": None}, TypeError, "cval=None"),
        ({"memory_bytes": "8"}, ValueError, "memory_bytes='8'"),
        ({"compressors": {}}, ValueError, "compressors={}"),
        ({"compressors": [1]}, (ValueError, TypeError), r"compressors=\[1\]"),
    ],
)
def test_bad_input(tmp_path, options, error, message):
    write(tmp_path / "a", volume((9, 9, 9)))
    arguments = {"source": tmp_path / "a", "transform_or_spacing": 5.0, **HERE} | options
    if arguments["source"] == "nothing":
        arguments["source"] = tmp_path / "nothing"
    with pytest.raises(error, match=message):
        resample_zarr(output=tmp_path / "b", **arguments)
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def test_bad_sources(tmp_path):
    plain = zarr.create_array(tmp_path / "p", shape=(4, 4, 4), dtype="u2")
    with pytest.raises(MetadataError, match="pass spacing="):
        resample_zarr(plain, tmp_path / "b", 2.0, **HERE)
    with pytest.raises(ValueError, match="level=1"):
        resample_zarr(plain, tmp_path / "b", 2.0, level=1, spacing=(1, 1, 1), **HERE)
    with pytest.raises(ValueError, match="has 3 axes"):
        resample_zarr(plain, tmp_path / "b", 2.0, spacing=(1, 1), **HERE)
    line = zarr.create_array(tmp_path / "l", shape=(4,), dtype="u2")
    with pytest.raises(ValueError, match="two or three axes"):
        resample_zarr(line, tmp_path / "b", 2.0, spacing=(1,), **HERE)
    empty = zarr.create_array(tmp_path / "e", shape=(0, 4, 4), chunks=(1, 4, 4), dtype="u2")
    with pytest.raises(ValueError, match=r"shape \(0, 4, 4\) has no voxels"):
        resample_zarr(empty, tmp_path / "b", np.eye(3), output_shape=(2, 2, 2), spacing=(1, 1, 1), **HERE)
    spectrum = zarr.create_array(tmp_path / "s", shape=(4, 4), dtype="c8")
    with pytest.raises(TypeError, match="complex64 cannot be resampled"):
        resample_zarr(spectrum, tmp_path / "b", 2.0, spacing=(1, 1), **HERE)
    write(tmp_path / "m", volume((4, 4, 4)) > 5)
    with pytest.raises(TypeError, match="bool cannot be resampled with order=1"):
        resample_zarr(tmp_path / "m", tmp_path / "b", 2.0, **HERE)
    write(tmp_path / "c", volume((4, 4, 4)))
    metadata = tmp_path / "c" / "zarr.json"
    document = json.loads(metadata.read_text())
    document["attributes"]["ome"]["multiscales"][0]["axes"][0] = {"name": "angle", "type": "array"}
    metadata.write_text(json.dumps(document))
    with pytest.raises(MetadataError, match="axis 'angle' of type 'array' has 4 entries"):
        resample_zarr(tmp_path / "c", tmp_path / "b", 2.0, **HERE)
    with pytest.raises(ValueError, match="whose axes have no names"):
        resample_zarr(plain, tmp_path / "b", 2.0, channel=0, spacing=(1, 1, 1), **HERE)
    assert not (tmp_path / "b").exists()
    assert not (tmp_path / ".b.unfinished").exists()


def test_the_bar_is_there_without_progress(tmp_path, monkeypatch):
    bars = record_bars(monkeypatch)
    write(tmp_path / "a", volume((9, 9, 9)))
    resample_zarr(tmp_path / "a", tmp_path / "b", 5.0, **HERE)
    size = result(tmp_path / "b").nbytes
    assert bars == {"resample": [size, size, "B"]}


def test_the_device_is_asked_for_by_name(tmp_path):
    if room.resolve("auto").is_cuda:
        pytest.skip("there is one")
    write(tmp_path / "a", volume((9, 9, 9)))
    with pytest.raises(GpuUnavailableError):
        resample_zarr(tmp_path / "a", tmp_path / "b", 5.0, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["u1", "u2", "i2", "f4", "f8"])
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("compressors", [None, "auto"])
def test_on_a_device_blocks_are_one_block(tmp_path, dtype, order, compressors):
    """The same bits whatever the memory, and SciPy's values."""
    image = volume((70, 81, 93), dtype) if dtype[0] == "u" else volume((70, 81, 93), "u2").astype(dtype)
    write(tmp_path / "a", image, chunks=(16, 20, 24), compressors=compressors)
    # No round numbers: half-way between two voxels rounding may go either way.
    matrix = np.eye(3, 4) + np.random.default_rng(5).normal(scale=0.15, size=(3, 4)) + [0, 0, 0, 2]
    options = {"output_shape": (60, 70, 75), "order": order, "mode": "nearest", "device": "cuda", "chunks": (16,) * 3}
    resample_zarr(tmp_path / "a", tmp_path / "whole", matrix, **options)
    resample_zarr(tmp_path / "a", tmp_path / "parts", matrix, memory_bytes=3 * 2**20, **options)
    assert same(result(tmp_path / "parts"), result(tmp_path / "whole"))
    expected = in_memory(image.astype("f8"), matrix[:, :3], matrix[:, 3], (60, 70, 75), order=order, mode="nearest")
    difference = np.abs(result(tmp_path / "parts").astype("f8") - expected)
    if order == 1:
        assert difference.max() <= 1e-5 * 60000 + (0.5 if dtype[0] in "ui" else 0)
    else:
        assert (difference > 0).mean() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["u1", "i2", "f2", "f4", "f8", "i4", "u8"])
@pytest.mark.parametrize("spacing", [(20.0, 12.0, 10.0), (31.0, 9.0, 3.3), (10.0, 6.0, 23.0)])
@pytest.mark.parametrize("compressors", [None, "auto"])
def test_on_a_device_a_coarser_spacing_is_smoothed(tmp_path, cupy, dtype, spacing, compressors):
    """Blocks are the bits of ``resample_volume`` on the whole, on the device too; and the host's values."""
    image = (volume((70, 81, 93)) % (200 if dtype == "u1" else 30000)).astype(dtype)
    write(tmp_path / "a", image, chunks=(16, 20, 24), compressors=compressors)
    options = {"device": "cuda", "chunks": (16,) * 3}
    resample_zarr(tmp_path / "a", tmp_path / "whole", spacing, **options)
    resample_zarr(tmp_path / "a", tmp_path / "parts", spacing, memory_bytes=6 * 2**20, **options)
    assert same(result(tmp_path / "parts"), result(tmp_path / "whole"))
    wide = image.astype("f8") if dtype in ("i4", "u8") else image
    expected, _ = resample_volume(cupy.asarray(wide), (10.0, 6.0, 5.0), spacing)
    assert same(result(tmp_path / "parts"), to_dtype(expected.get(), dtype))
    resample_zarr(tmp_path / "a", tmp_path / "host", spacing, device="cpu", chunks=(16,) * 3)
    difference = np.abs(result(tmp_path / "parts").astype("f8") - result(tmp_path / "host"))
    assert difference.max() <= {"f2": 16, "f4": 0.05, "f8": 1e-8}.get(dtype, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["u2", "f2", "f4", "f8", "i8"])
@pytest.mark.parametrize(("order", "mode"), [(1, "constant"), (1, "reflect"), (1, "grid-constant"), (3, "nearest")])
def test_on_a_device_a_smoothed_source_through_any_map(tmp_path, dtype, order, mode):
    image = (volume((60, 81, 83)) % 2000).astype(dtype)
    write(tmp_path / "a", image)
    # No coordinate is a whole number, of which rounding would decide whether the last voxel is inside.
    matrix = np.array([[2.1, 0.0, 0.9, -1.2537], [0.0, 1.7, 0.3, 2.5113], [0.2, -0.3, 0.7, 1.0071]])
    options = {"order": order, "mode": mode, "cval": 7.0, "anti_aliasing": True, "chunks": (8,) * 3}
    options |= {"output_shape": (30, 45, 83)}
    memory = 2**20 * (60 if order == 3 else 12)
    resample_zarr(tmp_path / "a", tmp_path / "whole", matrix, device="cuda", **options)
    resample_zarr(tmp_path / "a", tmp_path / "parts", matrix, device="cuda", memory_bytes=memory, **options)
    resample_zarr(tmp_path / "a", tmp_path / "host", matrix, device="cpu", **options)
    whole, parts, host = (result(tmp_path / name).astype("f8") for name in ("whole", "parts", "host"))
    rounding = {"f2": 2, "f4": 0.05, "f8": 1e-3}.get(dtype, 1)
    assert np.abs(whole - host).max() <= rounding
    if order == 1:
        assert np.array_equal(parts, whole)
    else:
        assert np.abs(parts - whole).max() <= rounding


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bool", "f2", "i4", "u8"])
def test_dtypes_that_a_device_interpolates_in_another(tmp_path, dtype):
    image = volume((20, 30, 40)) > 30000 if dtype == "bool" else (volume((20, 30, 40)) % 2000).astype(dtype)
    if dtype == "i4":
        image += 2**25  # beyond what float32 holds to the last digit
    write(tmp_path / "a", image)
    options = {"order": 0 if dtype == "bool" else 1, "mode": "nearest", "chunks": (8,) * 3}
    resample_zarr(tmp_path / "a", tmp_path / "gpu", 7.3, device="cuda", memory_bytes=3 * 2**20, **options)
    resample_zarr(tmp_path / "a", tmp_path / "cpu", 7.3, device="cpu", **options)
    got, expected = result(tmp_path / "gpu"), result(tmp_path / "cpu")
    assert got.dtype == expected.dtype == image.dtype
    assert np.abs(got.astype("f8") - expected.astype("f8")).max() <= 1


@pytest.mark.gpu
def test_a_broken_chunk_on_a_device(tmp_path):
    write(tmp_path / "a", volume())
    (tmp_path / "a" / "0" / "c" / "1" / "1" / "1").write_bytes(b"short")
    with pytest.raises(ChunkError, match=r"chunk \(1, 1, 1\)"):
        resample_zarr(tmp_path / "a", tmp_path / "b", 6.0, device="cuda", chunks=(8,) * 3)
    assert not (tmp_path / "b").exists()
