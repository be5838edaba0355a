"""If this fails, commands over mosaics fail on axes t and c, on images without units, or on bioformats2raw's."""

import json
import logging
import shutil

import numpy as np
import pytest
import zarr

from linumpy.io.ome import open_image
from linumpy.mosaic.aip import project_mosaic
from linumpy.mosaic.grid import resample_mosaic_grid
from linumpy.testing.synthetic import MosaicSpec, write_mosaic
from linumpy.write.writer import write_omezarr
from tests.support.script_runs import check_refused, help_of, load

SPACING, TILE = (5.0, 10.0, 10.0), (8, 9)
SHAPE = (16, 24, 27)
#: Commands, and what they need besides input and output.
COMMANDS = {
    "linum_aip": [],
    "linum_aip_png": [],
    "linum_resample_mosaic_grid": ["--resolution", "7", "9", "9"],
    "linum_find_tissue_interface": ["--s-xy", "3"],
    "linum_detect_focal_curvature": ["--s-xy", "1"],
    "linum_stack_slices_motor": ["--slicing-interval-mm", "0.04", "--search-range-mm", "0.01"],
}
#: Those that must know how large a tile is, of mosaics whose metadata does not say it.
OF_TILES = {name: ["--tile-shape", "8", "9"] for name in ("linum_resample_mosaic_grid", "linum_detect_focal_curvature")}
#: Those whose output holds every time and channel.
HOLD_ALL = ("linum_aip", "linum_resample_mosaic_grid", "linum_find_tissue_interface")
EVERY = pytest.mark.parametrize("name", COMMANDS)


def voxels(*leading):
    """Tissue from about the middle on, another one for each time and channel."""
    rng = np.random.default_rng(1)
    surface = 6 + rng.integers(0, 3, (*leading, 1, *SHAPE[1:]))
    mean = np.where(np.arange(SHAPE[0])[:, None, None] >= surface, 3000, 30)
    return (mean * rng.gamma(20, 1 / 20, (*leading, *SHAPE))).astype("u2")


class Command:
    """A command, its input and its output; slices to be stacked are two in a folder, the others one image."""

    def __init__(self, name, folder):
        self.name, self.folder, self.slices = name, folder, name == "linum_stack_slices_motor"
        self.program = name.replace("_", "-")
        self.source = folder / ("slices" if self.slices else "m.zarr")
        self.images = [self.source / f"slice_z{n}.zarr" for n in range(2)] if self.slices else [self.source]
        (folder / "shifts.csv").write_text(
            "fixed_id,moving_id,x_shift,y_shift,x_shift_mm,y_shift_mm\n0,1,0,0,0,0\n", encoding="utf-8"
        )

    def write(self, data, axes="zyx", spacing=SPACING, **options):
        for one in self.images:
            one.parent.mkdir(exist_ok=True)
            shutil.rmtree(one, ignore_errors=True)
            write_omezarr(one, data, spacing, axes=axes, **options)

    def place(self, out):
        return self.folder / (f"{out}.png" if self.name == "linum_aip_png" else out)

    def words(self, out, *more):
        table = [self.folder / "shifts.csv"] if self.slices else []
        return [
            str(one)
            for one in (
                self.source,
                *table,
                self.place(out),
                *COMMANDS[self.name],
                *OF_TILES.get(self.name, []),
                "--device=cpu",
                *more,
            )
        ]

    def run(self, out, *more):
        assert load(self.name).main(self.words(out, *more)) == 0
        return self.result(out)

    def result(self, out):
        if self.name == "linum_aip_png":
            from PIL import Image

            with Image.open(self.place(out)) as picture:
                return np.asarray(picture)
        return open_image(self.place(out)).levels[0][...]


@pytest.fixture
def command(name, tmp_path):
    return Command(name, tmp_path)


def drop_units(path):
    document = json.loads((path / "zarr.json").read_text())
    for axis in document["attributes"]["ome"]["multiscales"][0]["axes"]:
        axis.pop("unit", None)
    (path / "zarr.json").write_text(json.dumps(document))


@EVERY
def test_the_help_names_the_options(capsys, name):
    shown = help_of(name, capsys)
    for option in ("--channel C", "--time T", "--spacing Z Y X"):
        assert option in shown
    assert ("to read, counted from 0. [all]" in " ".join(shown.split())) == (name in HOLD_ALL)


@EVERY
def test_single_times_and_channels(command):
    data = voxels()
    command.write(data)
    expected = command.run("three")
    command.write(data[None, None], "tczyx")
    assert np.array_equal(command.run("five"), expected)
    assert np.array_equal(command.run("named", "--channel", "0", "--time", "0"), expected)
    if command.name != "linum_aip_png":
        three, five = (open_image(command.folder / one) for one in ("three", "five"))
        assert (three.axes, three.spacing, three.origin) == (five.axes, five.spacing, five.origin)


@EVERY
def test_several_times_and_channels(command, capsys):
    data = voxels(2, 3)
    command.write(data, "tczyx", chunks=(1, 2, 16, 8, 9))
    chosen = command.run("chosen", "--time", "1", "--channel", "2")
    times = command.run("times", "--channel", "2") if command.name in HOLD_ALL else None
    every = command.run("all") if command.name in HOLD_ALL else None
    if every is None:
        capsys.readouterr()
        main, out = load(command.name).main, "refused"
        for more, message in [
            ([], "choose by --time T (0 to 1) and --channel C (0 to 2)"),
            (["--time", "1"], "3 channels, but"),
        ]:
            check_refused(capsys, main, command.words(out, *more), command.program, message)
        assert not command.place(out).exists()
    for t, c in np.ndindex(2, 3) if every is not None else [(1, 2)]:
        command.write(data[t, c])
        expected = command.run("one", "--overwrite")
        if every is not None:
            assert np.array_equal(every[t, c], expected)
            assert c != 2 or np.array_equal(times[t], expected)
        if (t, c) == (1, 2):
            assert np.array_equal(chosen, expected)
    if every is not None:
        axes = [[axis.name for axis in open_image(command.folder / one).axes] for one in ("all", "times")]
        space = [axis.name for axis in open_image(command.folder / "one").axes]
        assert axes == [["t", "c", *space], ["t", *space]]


@EVERY
def test_a_channel_that_is_not_there(command, capsys):
    command.write(voxels(3), "czyx")
    words = command.words("x", "--channel", "3")
    check_refused(capsys, load(command.name).main, words, command.program, "--channel 3: ")


@EVERY
def test_no_units(command, capsys):
    data = voxels()
    command.write(data)
    expected = command.run("known")
    command.write(data, spacing=(1, 1, 1))
    for one in command.images:
        drop_units(one)
    main, out = load(command.name).main, "x"
    capsys.readouterr()
    check_refused(capsys, main, command.words(out), command.program, "has no unit; pass --spacing Z Y X in µm")
    assert np.array_equal(command.run("x", "--spacing", "5", "10", "10"), expected)
    if command.name != "linum_aip_png":
        assert open_image(command.place(out)).spacing == open_image(command.folder / "known").spacing
    capsys.readouterr()
    words = command.words("y", "--spacing", "5", "0", "10")
    check_refused(capsys, main, words, command.program, "--spacing (5.0, 0.0, 10.0): pass three positive numbers")


@pytest.mark.parametrize("axes", ["zyx", "xzy"])
def test_a_spacing_is_along_z_y_and_x_however_axes_lie(tmp_path, axes):
    command = Command("linum_find_tissue_interface", tmp_path)
    data = np.transpose(voxels(), ["zyx".index(one) for one in axes])
    command.write(data, axes, spacing=[1, 1, 1])
    command.run("x", "--spacing", "5", "10", "12")
    assert open_image(tmp_path / "x").spacing[0] == tuple({"y": 10.0, "x": 12.0}[one] for one in axes if one != "z")


@EVERY
def test_what_bioformats2raw_wrote(command, capsys):
    command.write(voxels())
    expected = command.run("plain")
    for one in command.images:
        inner = one.with_name("inner")
        one.rename(inner)
        root = zarr.create_group(one)
        root.update_attributes({"ome": {"version": "0.5", "bioformats2raw.layout": 3}})
        inner.rename(one / "0")
    assert np.array_equal(command.run("raw"), expected)
    shutil.copytree(command.images[0] / "0", command.images[0] / "1")
    capsys.readouterr()
    words = command.words("x")
    check_refused(capsys, load(command.name).main, words, command.program, "is a collection of bioformats2raw, not")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "linum_stack_slices_motor"])
def test_the_mosaic_of_the_demo(name, tmp_path, caplog):
    """Its chunks are not its tiles, which its metadata has: no command need be told."""
    spec = MosaicSpec(tiles=(2, 2), tile_shape=(20, 12, 10), water_um=40.0, curvature_um=5.0, focal_um=5.0)
    write_mosaic(tmp_path / "m.zarr", spec)
    suffix = ".png" if name == "linum_aip_png" else ""
    with caplog.at_level(logging.WARNING):
        assert (
            load(name).main([str(tmp_path / "m.zarr"), str(tmp_path / f"x{suffix}"), *COMMANDS[name], "--device=cpu"])
            == 0
        )
    assert not caplog.records


def tiles(path):
    return zarr.open_group(path, mode="r").attrs["linumpy"]["tile_shape"]


def test_tiles_are_kept_and_taken(tmp_path, caplog):
    spec = MosaicSpec(tiles=(2, 3), tile_shape=(20, 12, 10), water_um=40.0, curvature_um=5.0, focal_um=5.0)
    write_mosaic(tmp_path / "m", spec)
    assert open_image(tmp_path / "m").levels[0].chunks != (20, 12, 10)
    assert tiles(tmp_path / "m") == {"y": 12, "x": 10}
    main = load("linum_detect_focal_curvature").main
    assert main([str(tmp_path / "m"), str(tmp_path / "flat"), "--s-xy", "3", "--device=cpu"]) == 0
    assert tiles(tmp_path / "flat") == {"y": 12, "x": 10}
    with caplog.at_level(logging.WARNING):
        made = resample_mosaic_grid(tmp_path / "flat", tmp_path / "coarse", 20)
    assert made.tile == (20, 12, 10)
    assert tiles(tmp_path / "coarse") == {"y": 6, "x": 5}
    assert not caplog.records
    # As with the sizes named, and not as chunks would have it.
    document = json.loads((tmp_path / "flat/zarr.json").read_text())
    del document["attributes"]["linumpy"]
    (tmp_path / "flat/zarr.json").write_text(json.dumps(document))
    resample_mosaic_grid(tmp_path / "flat", tmp_path / "named", 20, tile_shape=(12, 10))
    one, other = (open_image(tmp_path / name).levels[0][...] for name in ("coarse", "named"))
    assert np.array_equal(one, other)


def test_only_a_map_of_the_finest_resolution_has_its_tile_shape(tmp_path):
    attributes = {"linumpy": {"tile_shape": {"y": 12, "x": 10}}}
    source = write_omezarr(
        tmp_path / "m", np.ones((8, 24, 20), "f4"), (5, 10, 10), chunks=(8, 12, 10), levels=2, attributes=attributes
    )
    for level in (0, 1):
        project_mosaic(source, tmp_path / f"map{level}", level=level)
    assert tiles(tmp_path / "map0") == {"y": 12, "x": 10}
    assert "linumpy" not in zarr.open_group(tmp_path / "map1", mode="r").attrs


def test_tiles_that_differ_from_the_metadata_are_told(tmp_path, caplog):
    write_mosaic(tmp_path / "m", MosaicSpec(tiles=(2, 2), tile_shape=(8, 12, 10)))
    with caplog.at_level(logging.WARNING):
        made = resample_mosaic_grid(tmp_path / "m", tmp_path / "x", 20, tile_shape=(6, 10))
    assert made.tile == (8, 6, 10)
    assert "tiles of (6, 10) voxels are taken as given; its metadata has (12, 10)" in caplog.text


TILED_COMMANDS = {
    "linum_fix_galvo_shift": [],
    "linum_resample_mosaic_grid": ["--resolution", 9],
    "linum_detect_focal_curvature": [],
    "linum_fix_illumination": [],
    "linum_estimate_transform": [],
    "linum_stitch_3d": [],
}


@pytest.mark.parametrize("name", TILED_COMMANDS)
def test_no_command_takes_a_chunk_for_a_tile(tmp_path, capsys, name):
    """Every command that needs tiles has the option, and names it."""
    write_omezarr(tmp_path / "m", voxels(), SPACING, chunks=(16, 8, 9))
    between = [tmp_path / "p.json"] if name == "linum_stitch_3d" else []
    (tmp_path / "p.json").write_text("{}")
    output = tmp_path / ("x.json" if name == "linum_estimate_transform" else "x")
    words = [tmp_path / "m", *between, output, *TILED_COMMANDS[name], "--device=cpu"]
    program = name.replace("_", "-")
    check_refused(capsys, load(name).main, words, program, "its metadata has no tile shape; pass --tile-shape A B")
    assert not output.exists()


@pytest.mark.gpu
@pytest.mark.parametrize("name", HOLD_ALL)
def test_every_time_and_channel_on_a_gpu(command):
    """Read to the device as regions of the whole array, and written from there with the axes t and c."""
    command.write(voxels(2, 3), "tczyx", chunks=(1, 2, 16, 8, 9))
    levels = ["--levels", "2"] if command.name == "linum_resample_mosaic_grid" else []
    command.run("cpu", *levels)
    command.run("gpu", *levels, "--device=cuda")
    cpu, gpu = (open_image(command.place(one)) for one in ("cpu", "gpu"))
    assert gpu.axes == cpu.axes
    for one, other in zip(gpu.levels, cpu.levels, strict=True):
        np.testing.assert_allclose(one[...].astype("f8"), other[...], rtol=1e-5, atol=1 if levels else 1e-3)
