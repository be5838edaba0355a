"""If this fails, voxels come to the host between read and write."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.codecs import ZstdCodec

import linumpy
from linumpy.mosaic.aip import project_mosaic, project_mosaic_to_png
from linumpy.mosaic.focal import correct_mosaic
from linumpy.mosaic.grid import resample_mosaic_grid
from linumpy.mosaic.options import ZSearch
from linumpy.mosaic.slices import stack_mosaics
from linumpy.mosaic.surface import find_mosaic_surface
from linumpy.testing.synthetic import MosaicSpec, write_mosaic
from tests.support.host_copies import WRITERS, counted_host_copies

SPEC = MosaicSpec(tiles=(3, 3), tile_shape=(64, 64, 64), water_um=100.0)
#: A fit, a few correlations, two percentiles: single copies, and all of them together.
ONE, ALL = 1024, 32 * 1024
OPTIONS = {"device": "cuda", "tile_bytes": 2**20}


def aip(source, out):
    project_mosaic(source, out, **OPTIONS)


def aip_png(source, out):
    project_mosaic_to_png(source, out, **OPTIONS)


def grid(source, out):
    resample_mosaic_grid(source, out, (10.0, 15.0, 15.0), **OPTIONS)


def surface(source, out):
    find_mosaic_surface(source, out, **OPTIONS)


def focal(source, out):
    correct_mosaic(source, out, (64, 64), **OPTIONS)


def stack(source, out):
    shifts = source.parent / "shifts.csv"
    shifts.write_text("fixed_id,moving_id,x_shift,y_shift,x_shift_mm,y_shift_mm\n1,2,0,0,0.0,0.0\n")
    stack_mosaics(source.parent, shifts, out, ZSearch(0.2, 0.05), **OPTIONS)


@pytest.fixture
def source(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("slice_1.zarr", "slice_2.zarr"):
        write_mosaic(tmp_path / "in" / name, SPEC, chunks=(64, 64, 64))
    return tmp_path / "in" / "slice_1.zarr"


@pytest.mark.gpu
@pytest.mark.parametrize("script", [aip, aip_png, grid, surface, focal, stack], ids=lambda one: one.__name__)
def test_only_results_come_to_the_host(cupy, tmp_path, source, script):
    assert SPEC.nbytes > 50 * ALL  # a volume that came by could not hide
    out = tmp_path / ("out.png" if script is aip_png else "out")
    with counted_host_copies() as copies:
        script(source, out)
    if script is aip_png:  # a picture of 16 bits is what is written
        picture = (2 * math.prod(SPEC.shape[1:]),)
        assert [nbytes for nbytes, _ in copies.others if nbytes > ONE] == list(picture)
        copies.others = [one for one in copies.others if one[0] not in picture]
        expected = 0
    else:
        array = zarr.open_group(out, mode="r")["0"]
        whole = [-(-n // c) * c for n, c in zip(array.shape, array.chunks, strict=True)]  # as chunks are written
        expected = math.prod(whole) * array.dtype.itemsize
        assert array[...].any()
    assert sum(copies.written) <= expected  # each voxel that is written once at most
    assert [one for one in copies.others if one[0] > ONE] == []
    assert sum(nbytes for nbytes, _ in copies.others) <= ALL


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["get", "asnumpy", "tolist", "item", "float", "to_host", "written"])
def test_a_copy_is_noticed(cupy, tmp_path, how):
    from linumpy.device import to_host
    from linumpy.write.writer import write_omezarr

    array = cupy.arange(6 if how not in ("item", "float") else 1, dtype="f8")
    ways = {
        "get": lambda: array.get(),
        "asnumpy": lambda: cupy.asnumpy(array),
        "tolist": array.tolist,
        "item": array.item,
        "float": lambda: float(array[0]),
        "to_host": lambda: to_host(array),
        "written": lambda: write_omezarr(tmp_path / "a", array.reshape(2, 3), (1, 1), compressors=ZstdCodec()),
    }
    with counted_host_copies() as copies:
        ways[how]()
    assert copies.written == ([array.nbytes] if how == "written" else [])
    assert [nbytes for nbytes, _ in copies.others] == ([] if how == "written" else [array.nbytes])


@pytest.mark.gpu
def test_a_script_that_brings_its_tiles_to_the_host_is_noticed(cupy, tmp_path, source, monkeypatch):
    from linumpy.mosaic import aip as room

    plain = room.project
    monkeypatch.setattr(room, "project", lambda column, axis: cupy.asarray(plain(column.get(), axis)))
    with counted_host_copies() as copies:
        aip(source, tmp_path / "out")
    assert sum(nbytes for nbytes, _ in copies.others) == SPEC.nbytes
    assert np.isfinite(zarr.open_group(tmp_path / "out", mode="r")["0"][...]).all()


#: What would take arrays to the host without being counted; zarr's own GPU mode is no part of this package.
_OTHER_WAYS = re.compile(r"copy_to_host|DeviceToHost|DtoH|memcpyPeer|from_dlpack|toDlpack|__dlpack__")


def test_there_is_no_other_way_to_the_host():
    folder = Path(linumpy.__file__).parent
    # Beside what mosaics pass through: packages whose callers hand arrays of other libraries over.
    others = [folder / name for name in ("benchmark", "rays", "sampling", "stream", "voxel")]
    files = [one for one in folder.rglob("*.py") if not any(one.is_relative_to(other) for other in others)]
    assert len(files) > 50
    found = [str(file.relative_to(folder)) for file in files if _OTHER_WAYS.search(file.read_text())]
    # The native core copies the status of chunks back, four bytes of each that is decoded on the device.
    assert found == [], "copies that counted_host_copies does not see"
    assert all(Path(one).is_file() for one in WRITERS)
