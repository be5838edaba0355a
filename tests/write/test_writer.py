"""If this fails, images are written half, or cannot be read by others."""

import subprocess
import sys

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from linumpy.io.ome import open_image
from linumpy.write.new_image import default_chunks
from linumpy.write.writer import write_omezarr


def volume(shape=(20, 30, 40), dtype="f4"):
    return np.random.default_rng(1).uniform(0, 100, shape).astype(dtype)


@pytest.mark.parametrize("depth", [1, 2, 3, 8])
def test_levels_keep_their_place(tmp_path, depth):
    """A ramp in µm stays the same ramp: value at a place does not depend on the level.

    Two or three planes are one after one or two levels; from there on their spacing and place must stay.
    """
    planes = np.arange(depth)[:, None, None] * 5.0
    ramp, along_z = np.broadcast_arrays(np.arange(32) * 3.0, np.broadcast_to(planes, (depth, 8, 32)))
    write_omezarr(tmp_path / "z", along_z.astype("f4"), (5, 1, 3), levels=5)
    image = open_image(tmp_path / "z")
    for array, spacing, origin in zip(image.levels, image.spacing, image.origin, strict=True):
        if depth % 2 == 0 or depth == 1:  # an odd last plane stands alone
            assert np.allclose(array[:, 0, 0], origin[0] + np.arange(array.shape[0]) * spacing[0])
    assert [array.shape[2] for array in image.levels] == [32, 16, 8, 4, 2]
    assert image.levels[-1].shape[:2] == (1, 1)
    assert image.spacing[-1] == (5.0 * 2 ** (depth - 1).bit_length(), 8.0, 48.0)
    write_omezarr(tmp_path / "i", ramp.astype("f4"), (1, 1, 3), levels=3)
    image = open_image(tmp_path / "i")
    for array, spacing, origin in zip(image.levels, image.spacing, image.origin, strict=True):
        places = origin[2] + np.arange(array.shape[2]) * spacing[2]
        assert np.allclose(array[0, 0], places)


def test_a_place_that_is_taken(tmp_path):
    data = volume()
    write_omezarr(tmp_path / "i", data, (1, 1, 1))
    with pytest.raises(FileExistsError, match=r"i exists: choose another path, or replace it with overwrite=True"):
        write_omezarr(tmp_path / "i", data, (1, 1, 1))
    write_omezarr(tmp_path / "i", data + 1, (1, 1, 1), overwrite=True)
    assert np.array_equal(open_image(tmp_path / "i").levels[0][...], data + 1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="mine is not a Zarr folder, so it is not overwritten"):
        write_omezarr(tmp_path / "mine", data, (1, 1, 1), overwrite=True)
    assert (tmp_path / "mine/thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["i", "mine"]


def test_someone_else_comes_first(tmp_path):
    """A place that is taken while the image is written is not replaced."""

    def take(nbytes):
        (tmp_path / "i").mkdir(exist_ok=True)
        (tmp_path / "i/thesis.txt").write_text("years of work")

    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match="i"):
            write_omezarr(tmp_path / "i", volume(), (1, 1, 1), overwrite=overwrite, progress=take)
        assert [path.name for path in tmp_path.rglob("*")] == ["i", "thesis.txt"]


@pytest.mark.parametrize("options", [{}, {"chunks": (16, 16, 16), "shards": (64, 64, 64)}])
def test_the_system_refuses_to_write(tmp_path, options):
    """The real thing: a process that may not write files of more than 64 KiB."""
    code = (
        "import resource, sys, numpy as np; from linumpy.write.writer import write_omezarr\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))\n"
        "noise = np.random.default_rng(1).normal(size=(64, 64, 64)).astype('f4')\n"
        f"write_omezarr(sys.argv[1], noise, (1, 1, 1), **{options})\n"
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path / "i"], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == f"OSError: [Errno 27] File too large; nothing is left of: '{tmp_path}/i'"
    assert list(tmp_path.iterdir()) == []


def test_two_axes_and_a_name(tmp_path):
    from ome_zarr_models import open_ome_zarr

    data = volume((9, 11))
    write_omezarr(tmp_path / "i", data, (2, 3), name="depth of the surface", origin=np.array([1.0, 2.0]), levels=2)
    image = open_image(tmp_path / "i")
    assert [axis.name for axis in image.axes] == ["y", "x"]
    assert np.array_equal(image.levels[0][...], data)
    assert image.origin == ((1.0, 2.0), (2.0, 3.5))
    (multiscale,) = open_ome_zarr(zarr.open_group(tmp_path / "i", mode="r")).ome_attributes.multiscales
    assert multiscale.name == "depth of the surface"


@given(st.lists(st.integers(1, 5000), min_size=2, max_size=3), st.sampled_from([1, 2, 4, 8]))
def test_default_chunks(shape, itemsize):
    chunk = default_chunks(tuple(shape), itemsize)
    nbytes = np.prod(chunk, dtype=int) * itemsize
    assert nbytes <= 8 * 2**20
    assert all(c == n or c & (c - 1) == 0 for c, n in zip(chunk, shape, strict=True))
    assert chunk == tuple(shape) or nbytes > 2 * 2**20
    sides = [c for c, n in zip(chunk, shape, strict=True) if c < n]
    assert not sides or max(sides) <= 2 * min(sides)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spacing": (1, 1)}, r"spacing=\(1, 1\): an array of shape \(20, 30, 40\) needs 3"),
        ({"spacing": (1, 1, 0)}, "needs 3 positive"),
        ({"axes": "zy"}, "axes 'zy' do not fit"),
        ({"axes": "tyx"}, "with axes 'tyx' needs 2 positive µm"),
        ({"axes": "cx"}, "axes 'cx' do not fit"),
        ({"axes": "ycx"}, "axes 'ycx': the order is t, c, then axes of space"),
        ({"axes": "zyy"}, "axes 'zyy': the order is t, c, then axes of space"),
        ({"levels": 0}, "levels=0"),
        ({"levels": 8}, r"levels=8: an array of shape \(20, 30, 40\) can have 1 to 7 resolutions"),
        ({"origin": (1,)}, r"origin=\(1,\)"),
        ({"origin": (1, 1, float("nan"))}, "origin="),
        ({"chunks": (8, 8)}, r"chunks=\(8, 8\): .* needs 3 sizes"),
        ({"chunks": (8, 8, 0)}, "chunks="),
        ({"shards": (8, 8, 8)}, "need chunks= that divide them"),
        ({"chunks": (8, 8, 8), "shards": (16, 16, 12)}, "no whole numbers of chunks"),
    ],
)
def test_what_does_not_fit(tmp_path, options, message):
    options = {"spacing": (1, 1, 1)} | options
    with pytest.raises(ValueError, match=message):
        write_omezarr(tmp_path / "i", volume(), **options)
    assert list(tmp_path.iterdir()) == []
