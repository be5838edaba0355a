"""The writer: complete or not at all, and readable by others."""

import errno
import os
import signal
import subprocess
import sys
import time

import numpy as np
import ome_zarr.io
import ome_zarr.reader
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from skimage.transform import downscale_local_mean

from linumpy.io import writer
from linumpy.io.ome import open_image
from linumpy.io.writer import halved, write_omezarr


def volume(shape=(20, 30, 40), dtype="f4"):
    return np.random.default_rng(1).uniform(0, 100, shape).astype(dtype)


@pytest.mark.parametrize("options", [{}, {"chunks": (8, 8, 8)}, {"chunks": (4, 8, 8), "shards": (8, 16, 16)}])
@pytest.mark.parametrize("compressors", [None, "auto"])
def test_what_is_written_is_read(tmp_path, options, compressors):
    seen, data = [], volume()
    write_omezarr(
        tmp_path / "i", data, (5, 2, 1), origin=(7, 0, 0), compressors=compressors, progress=seen.append, **options
    )
    image = open_image(tmp_path / "i")
    assert np.array_equal(image.levels[0][...], data)
    assert image.spacing == ((5.0, 2.0, 1.0),)
    assert image.origin == ((7.0, 0.0, 0.0),)
    assert sum(seen) == data.nbytes
    assert [path.name for path in tmp_path.iterdir()] == ["i"]


def test_others_can_read_it(tmp_path):
    from ome_zarr_models import open_ome_zarr

    data = volume()
    write_omezarr(tmp_path / "i", data, (5, 2, 1), levels=3)
    model = open_ome_zarr(zarr.open_group(tmp_path / "i", mode="r"))
    assert "v05.image" in type(model).__module__
    (node,) = ome_zarr.reader.Reader(ome_zarr.io.parse_url(tmp_path / "i"))()
    assert np.array_equal(np.asarray(node.data[0]), data)
    assert len(node.data) == 3


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from(["f4", "f8", "u1", "i2", "u4"]))
def test_a_coarser_level_is_the_mean(shape, dtype):
    data = volume(tuple(shape), dtype)
    got = halved(data, tuple(slice(0, -(-n // 2)) for n in shape))
    padded = np.pad(data.astype(float), [(0, n % 2) for n in shape], mode="edge")
    expected = downscale_local_mean(padded, (2,) * len(shape))
    assert got.dtype == dtype
    assert np.allclose(got, np.rint(expected) if data.dtype.kind in "iu" else expected, atol=1e-4)


def test_levels_keep_their_place(tmp_path):
    """A ramp in µm stays the same ramp: value at a place does not depend on the level."""
    ramp = np.broadcast_to(np.arange(32) * 3.0, (8, 8, 32)).astype("f4")
    write_omezarr(tmp_path / "i", ramp, (1, 1, 3), levels=3)
    image = open_image(tmp_path / "i")
    for array, spacing, origin in zip(image.levels, image.spacing, image.origin, strict=True):
        places = origin[2] + np.arange(array.shape[2]) * spacing[2]
        assert np.allclose(array[0, 0], places)


def test_a_place_that_is_taken(tmp_path):
    data = volume()
    write_omezarr(tmp_path / "i", data, (1, 1, 1))
    with pytest.raises(FileExistsError, match=r"i exists: choose another place, or overwrite it"):
        write_omezarr(tmp_path / "i", data, (1, 1, 1))
    write_omezarr(tmp_path / "i", data + 1, (1, 1, 1), overwrite=True)
    assert np.array_equal(open_image(tmp_path / "i").levels[0][...], data + 1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="mine is not a Zarr folder, so it is not overwritten"):
        write_omezarr(tmp_path / "mine", data, (1, 1, 1), overwrite=True)
    assert (tmp_path / "mine/thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["i", "mine"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, overwrite):
    data = volume()
    if overwrite:
        write_omezarr(tmp_path / "i", data, (1, 1, 1))

    def full(array):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, "to_host", full)
    with pytest.raises(OSError, match="No space left"):
        write_omezarr(tmp_path / "i", data + 1, (1, 1, 1), overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["i"] * overwrite
    if overwrite:
        assert np.array_equal(open_image(tmp_path / "i").levels[0][...], data)


def test_a_killed_run_leaves_nothing_that_looks_finished(tmp_path):
    code = (
        "import sys, time, numpy as np; from linumpy.io.writer import write_omezarr\n"
        "def wait(nbytes): print('block', flush=True); time.sleep(60)\n"
        "write_omezarr(sys.argv[1], np.ones((64, 64, 64), 'f4'), (1, 1, 1), chunks=(16, 64, 64), progress=wait)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path / "i"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "block\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "i").exists()
    assert all(path.name.startswith(".i.part-") for path in tmp_path.iterdir())
    begin = time.monotonic()
    write_omezarr(tmp_path / "i", volume(), (1, 1, 1))  # what is left does not stand in the way
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spacing": (1, 1)}, r"spacing=\(1, 1\): an array of shape \(20, 30, 40\) needs 3"),
        ({"spacing": (1, 1, 0)}, "needs 3 positive"),
        ({"axes": "zy"}, "axes 'zy' do not fit"),
        ({"levels": 0}, "levels=0"),
        ({"origin": (1,)}, r"origin=\(1,\)"),
    ],
)
def test_what_does_not_fit(tmp_path, options, message):
    options = {"spacing": (1, 1, 1)} | options
    with pytest.raises(ValueError, match=message):
        write_omezarr(tmp_path / "i", volume(), **options)
    assert list(tmp_path.iterdir()) == []
