"""If this fails, commands with ``--cluster`` make another image than without, or do not run on the workers."""

import functools
import os

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("distributed")

import dask
from distributed import Client

import linumpy.mosaic.io.tiles
import linumpy.resample.convert.conversion
import linumpy.resample.convert_zarr
import linumpy.resample.tile_work
import linumpy.voxel.mesh_image
from linumpy.errors import WorkerError
from linumpy.io.ome import open_image
from linumpy.mosaic.alignment.transforms import SliceTransform, SliceTransforms
from linumpy.mosaic.options import Positions
from linumpy.mosaic.tile_positions import estimate_positions
from linumpy.resample.tile_work import tile_work
from linumpy.testing.synthetic import MosaicSpec, block, write_mosaic
from linumpy.write.writer import write_omezarr
from tests.support.budget import first
from tests.support.script_runs import load

SPEC = MosaicSpec(tiles=(2, 2), tile_shape=(40, 32, 32), focal_um=30.0, water_um=60.0, curvature_um=20.0, looks=8)
TISSUE = MosaicSpec((1, 1), (70, 66, 70), (5.0, 10.0, 10.0), water_um=-99, tilt=(0, 0), curvature_um=0, focal_um=0)

TETRAHEDRON = "v 0 0 0\nv 18 1 2\nv 2 25 4\nv 3 5 44\nf 1 3 2\nf 1 2 4\nf 1 4 3\nf 2 3 4\n"


@pytest.fixture
def address(dask_cluster):
    return dask_cluster.scheduler_address


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A mosaic, and two slices of a tissue with their shifts."""
    folder = tmp_path_factory.mktemp("sources")
    write_mosaic(folder / "mosaic", SPEC, chunks=(20, 16, 16))
    estimate_positions(folder / "mosaic", folder / "positions.csv", Positions(min_evidence=0))
    volume = block(TISSUE, (0, 0, 0), TISSUE.shape).astype("f4")
    (folder / "slices").mkdir()
    for number, (z, y, x) in enumerate([(0, 2, 4), (24, 5, 2)], 1):
        part = volume[z : z + 40, y : y + 60, x : x + 60]
        write_omezarr(folder / f"slices/slice_z{number:02d}.ome.zarr", part, (5, 10, 10), chunks=(20, 30, 30))
    write_omezarr(folder / "image", np.zeros((12, 15, 19), "u2"), (4.0, 2.0, 1.0), chunks=(4, 8, 8))
    (folder / "mesh.obj").write_text(TETRAHEDRON)
    head = "fixed_id,moving_id,x_shift,y_shift,x_shift_mm,y_shift_mm"
    (folder / "shifts.csv").write_text(f"{head}\n1,2,-2,3,-0.02,0.03\n")
    moved = ((1.0, 0.0, 0.0, 120.0), (0.0, 1.0, 0.02, 30.0), (0.0, -0.02, 1.0, -20.0), (0.0, 0.0, 0.0, 1.0))
    slices = [
        SliceTransform(number, f"slice_z{number:02d}.ome.zarr", matrix, top, 200.0)
        for number, matrix, top in ((1, tuple(map(tuple, np.eye(4).tolist())), 0.0), (2, moved, 120.0))
    ]
    SliceTransforms(120.0, tuple(slices)).write(folder / "transforms.json")
    return folder


#: The short run takes the first eight: all commands share the frame of a step.
COMMANDS = {
    "convert": ["mosaic", "OUT", "--codec", "lz4", "--chunks", "20", "32", "16"],
    "voxelize": ["mesh.obj", "image", "OUT", "--unit", "um", "--label", "7"],
    "aip_png": ["mosaic", "OUT.png"],
    "fix_illumination": ["mosaic", "OUT", "--tile-shape", "32", "32"],
    "estimate_transform": ["mosaic", "OUT.csv", "--min-evidence", "0"],
    "stitch_3d": ["mosaic", "positions.csv", "OUT", "--no-interpolate"],
    "resample_mosaic_grid": ["mosaic", "OUT", "--resolution", "20"],
    "stack_slices": ["slices", "transforms.json", "OUT"],
    "aip": ["mosaic", "OUT"],
    "fix_galvo_shift": ["mosaic", "OUT", "--min-contrast", "0"],
    "compensate_attenuation": ["mosaic", "OUT"],
    "detect_focal_curvature": ["mosaic", "OUT", "--tile-shape", "32", "32", "--s-xy", "5"],
    "find_tissue_interface": ["mosaic", "OUT", "--s-xy", "5"],
    "stack_slices_motor": ["slices", "shifts.csv", "OUT", "--slicing-interval-mm", "0.12"],
}


def _read(path):
    if path.endswith("csv"):
        return np.genfromtxt(path, delimiter=",", skip_header=1)
    return np.asarray(Image.open(path)) if path.endswith("png") else open_image(path).levels[0][...]


@pytest.mark.parametrize("name", first(list(COMMANDS), 8))
def test_the_same_bits_as_here(name, address, folder, tmp_path, monkeypatch, capsys):
    """Tiles come from both workers, none is made here, and progress counts all of them."""
    if name == "voxelize":
        pytest.importorskip("trimesh")
    monkeypatch.setattr(linumpy.mosaic.io.tiles, "HOST_TILE_BYTES", 40 * 16 * 16 * 4)
    monkeypatch.setattr(linumpy.resample.convert.conversion, "STEP_BYTES", 40 * 32 * 16 * 4)
    monkeypatch.setattr(linumpy.voxel.mesh_image, "_ON_WORKERS", 2**30)  # slabs of a chunk
    main, made = load(f"linum_{name}").main, []
    for where in ("here", "there"):
        words = [word.replace("OUT", str(tmp_path / where)) for word in COMMANDS[name]]
        words = [str(folder / word) if (folder / word).exists() else word for word in words]
        if where == "there":
            for module in (linumpy.resample.tile_work, linumpy.resample.convert_zarr):
                monkeypatch.setattr(module, "work_through", None)
        more = ["--cluster", address] if where == "there" else ["--device=cpu"]
        assert main(words + more) == 0, capsys.readouterr().err
        out = next(word for word in words if str(tmp_path) in word)
        made.append(_read(out))
    assert made[0].std() > 0
    np.testing.assert_array_equal(made[1], made[0])


def test_tiles_run_in_the_workers(address):
    """Each tile is read and computed by a worker, and written here; an error there is an error here."""
    written, over = {}, []
    with Client(address, set_as_default=False) as client:
        processes = set(client.run(os.getpid).values())
        with tile_work(client, device="cpu") as work:
            read = lambda name: name * 2  # noqa: E731
            work(range(20), read, lambda name, two: (name, two, os.getpid()), written.__setitem__, done=over.append)
            assert sorted(over) == sorted(written) == list(range(20))
            assert all(written[name][:2] == (name, 2 * name) for name in written)
            assert {process for *_, process in written.values()} <= processes
            with pytest.raises(ZeroDivisionError):
                work(range(3), read, lambda name, two: 1 // name)


def test_missing_workers_are_one_clear_line(folder, tmp_path, capsys):
    main = load("linum_aip").main
    for address, says in (("nowhere", "no address of a scheduler"), ("tcp://127.0.0.1:9", "no dask scheduler answers")):
        with dask.config.set({"distributed.comm.timeouts.connect": "500ms"}):
            assert main([str(folder / "mosaic"), str(tmp_path / "out"), "--cluster", address]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line
        assert "--cluster" in line


def test_a_worker_of_another_version_is_refused(address, monkeypatch):
    other = functools.partial(linumpy.resample.workers.Needs, version="0.0.1")
    monkeypatch.setattr(linumpy.resample.tile_work, "Needs", other)
    with pytest.raises(WorkerError, match=r"lacks linumpy 0\.0\.1"), tile_work(address, device="cpu"):
        pass


def test_a_picture_of_voxels_needs_them_here(folder, tmp_path, address, capsys):
    words = [str(folder / "mosaic"), str(tmp_path / "map"), "--overlay", str(tmp_path / "a.png"), "--cluster", address]
    assert load("linum_find_tissue_interface").main(words) == 2
    assert "not together with" in capsys.readouterr().err
