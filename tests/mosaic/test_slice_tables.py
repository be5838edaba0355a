"""If this fails, tables of shifts or slices are read wrong, or commands place the same slices differently."""

import csv
import itertools
import json
import logging

import numpy as np
import pytest

from linumpy.errors import MetadataError, SourceError
from linumpy.io.ome import open_image
from linumpy.mosaic.alignment.register import register_slices
from linumpy.mosaic.alignment.stack import stack_registered
from linumpy.mosaic.grid import resample_mosaic_grid
from linumpy.mosaic.io import slice_table
from linumpy.mosaic.io.slice_table import (
    SHIFT_COLUMNS,
    check_mosaics,
    find_slices,
    motor_shifts,
    read_shifts,
    read_slice_config,
    unreliable_warnings,
)  # fmt: skip
from linumpy.mosaic.options import Alignment, ZSearch
from linumpy.mosaic.slices import stack_mosaics
from linumpy.pipeline.runner import run_pipeline
from linumpy.pipeline.settings import Run, read_run
from linumpy.testing.brain import BrainSpec, Faults, truth_shift
from linumpy.testing.brain_files import write_brain
from linumpy.write.writer import write_omezarr
from tests.support.script_runs import check_refused, load

HEAD = ["fixed_id", "moving_id", "x_shift", "y_shift", "x_shift_mm", "y_shift_mm"]
ID_FORMATS = ("{:d}", "{:02d}", "{:d}.0", "{:04d}", " {:d} ", "{:d}.")
SPACING = (10.0, 5.0, 5.0)


def draw_table(path, seed):
    """Write a table as some program would: any order of rows and columns, more rows and columns than needed.

    Returns the numbers of the slices that exist, the position of every slice in mm, and the slices after which the
    motor's shift is not reliable.
    """
    rng = np.random.default_rng(seed)
    first, count = int(rng.integers(0, 12)), int(rng.integers(4, 12))
    numbers = np.arange(first, first + count)
    positions = {int(n): rng.normal(0, 0.5, 2).round(3) for n in numbers}
    found = sorted(map(int, rng.choice(numbers, int(rng.integers(2, count + 1)), replace=False)))
    # Rows of slices that are missing may be missing too, where one row leads across them.
    in_table = [n for n in map(int, numbers) if n in found or rng.random() < 0.7]
    doubtful = {n for n in in_table if rng.random() < 0.3}
    columns = [*HEAD, "note", *(["reliable"] if seed % 3 else [])]
    rng.shuffle(columns)
    spelled = ID_FORMATS[seed % len(ID_FORMATS)]
    truth = (("1", "0"), ("True", "False"), ("1.0", "0.0"), ("yes", "NO"))[seed % 4]
    rows = []
    for fixed, moving in itertools.pairwise(in_table):
        y, x = positions[moving] - positions[fixed]
        row = {"fixed_id": spelled.format(fixed), "moving_id": spelled.format(moving), "x_shift": 7, "y_shift": ""}
        row |= {"x_shift_mm": repr(float(x)), "y_shift_mm": repr(float(y)), "note": 'a, "b"'}
        rows.append(row | {"reliable": truth[fixed in doubtful]})
    rng.shuffle(rows)
    ending, mark = ("\r\n", "\n")[seed % 2], ("", "\ufeff")[seed // 2 % 2]
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(mark)
        table = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator=ending)
        table.writeheader()
        table.writerows(rows)
        file.write("," * (len(columns) - 1) + ending + ending)  # what spreadsheets leave at the end
    return found, positions, doubtful if "reliable" in columns else set(), in_table


@pytest.mark.parametrize("seed", range(40))
def test_shifts_are_differences_of_positions(tmp_path, seed):
    found, positions, doubtful, in_table = draw_table(tmp_path / "t.csv", seed)
    shifts = motor_shifts(tmp_path / "t.csv", found)
    assert [(one.fixed_id, one.moving_id) for one in shifts] == list(itertools.pairwise(found))
    for one in shifts:
        expected = positions[one.moving_id] - positions[one.fixed_id]
        np.testing.assert_allclose((one.y_mm, one.x_mm), expected, atol=1e-12)
        assert one.reliable == (not doubtful & {n for n in in_table if one.fixed_id <= n < one.moving_id})
    told = unreliable_warnings("t.csv", shifts)
    few = sum(not one.reliable for one in shifts)
    assert len(told) == (few > 0)
    assert not told or f"{few} of {len(shifts)} shifts as not reliable" in told[0]


def test_one_slice_needs_no_table(tmp_path):
    (tmp_path / "t.csv").write_text(",".join(HEAD))
    assert motor_shifts(tmp_path / "t.csv", (4,)) == ()


ROW = "0,1,0,0,0.1,0.2\n"
BAD_SHIFTS = {
    "empty": ("", "has no column fixed_id"),
    "semicolons": (";".join(HEAD) + "\n0;1;0;0;0,1;0,2\n", "separated by commas"),
    "decimal commas": (",".join(HEAD) + "\n0,1,0,0,0,1,0,2\n", "line 2: 8 fields do not fit 6 columns"),
    "a short row": (",".join(HEAD) + "\n0,1,0\n", "line 2: 3 fields do not fit 6 columns"),
    "no rows": (",".join(HEAD) + "\n,,,,,\n", "names no pair of slices"),
    "half an id": (",".join(HEAD) + "\n0.5,1,0,0,0,0\n", "line 2: fixed_id is '0.5': ids must be whole numbers"),
    "no id": (",".join(HEAD) + "\nnan,1,0,0,0,0\n", "line 2: fixed_id is 'nan'"),
    "nan": (",".join(HEAD) + "\n0,1,0,0,nan,0\n", "line 2: the shifts 0.0 and nan mm are not finite"),
    "a word": (",".join(HEAD) + "\n0,1,0,0,wool,0\n", "line 2: shifts must be numbers"),
    "twice": (",".join(HEAD) + "\n" + ROW + ROW, "line 3: the table has a shift from slice 0 to 1 already"),
    "upwards": (",".join(HEAD) + "\n1,0,0,0,0,0\n", "line 2: the moving slice 0 is not below the fixed slice 1"),
    "a column twice": (",".join([*HEAD, "fixed_id"]) + "\n", "has no column fixed_id: it needs"),
    "no truth": (",".join([*HEAD, "reliable"]) + "\n" + ROW.strip() + ",perhaps\n", "reliable is 'perhaps'"),
}


@pytest.mark.parametrize("name", BAD_SHIFTS)
def test_faulty_tables_of_shifts(tmp_path, name):
    text, message = BAD_SHIFTS[name]
    (tmp_path / "shifts_xy.csv").write_text(text)
    with pytest.raises(SourceError, match=r"shifts_xy\.csv") as caught:
        read_shifts(tmp_path / "shifts_xy.csv")
    assert message in str(caught.value)


def test_all_missing_rows_are_named(tmp_path):
    rows = ["0,1,0,0,0,0", "1,3,0,0,0,0", "3,4,0,0,0,0", "6,7,0,0,0,0", "7,8,0,0,0,0"]
    (tmp_path / "t.csv").write_text("\n".join([",".join(HEAD), *rows]))
    assert len(motor_shifts(tmp_path / "t.csv", (0, 1, 3, 4))) == 3
    # The row from 1 to 3 leads past slice 2.
    with pytest.raises(SourceError, match=r"no row for slices 1 and 2, 2 and 3, 4 and 6; there are slices 0,"):
        motor_shifts(tmp_path / "t.csv", (0, 1, 2, 3, 4, 6, 7))


@pytest.fixture
def folder(tmp_path):
    """Five slices of noise that have nothing in common: only the motor can place them."""
    (tmp_path / "slices").mkdir()
    rng = np.random.default_rng(0)
    for number in (2, 3, 4, 6, 7):
        voxels = rng.integers(90, 110, (12, 96, 100)).astype("u2")
        write_omezarr(tmp_path / f"slices/mosaic_grid_3d_z{number:02d}.ome.zarr", voxels, SPACING, chunks=(12, 48, 50))
    return tmp_path / "slices"


def write_table(path, numbers):
    """Write shifts of a few voxels; return the positions of the slices in voxels."""
    positions = {n: np.random.default_rng(n).integers(-6, 7, 2) for n in numbers}
    lines = [",".join([*HEAD, "reliable"])]
    for fixed, moving in itertools.pairwise(numbers):
        y, x = map(float, (positions[moving] - positions[fixed]) * 0.005)
        lines.append(f"{fixed}.0,{moving}.0,0,0,{x!r},{y!r},{int(fixed != 3)}")
    path.write_text("\n".join(lines) + "\n")
    return positions


CONFIG = "slice_id,use,why\n2.0,true,\n03,1,\n4,False,bubbles\n6,yes,\n7,true,\n9,no,\n"


def test_all_ways_to_a_volume_place_slices_alike(folder, tmp_path, caplog):
    """Slice 5 is missing, slice 4 left out, rows of 0, 1 and 8 to 10 are too many."""
    positions = write_table(tmp_path / "s.csv", range(11))
    (tmp_path / "c.csv").write_text(CONFIG)
    used = [2, 3, 6, 7]
    tables = {"slice_config": tmp_path / "c.csv", "shifts": tmp_path / "s.csv"}
    alignment = Alignment(interval_mm=0.06, crop=False)
    with caplog.at_level(logging.WARNING):
        registered = register_slices(folder, None, alignment, **tables)
        plan, stacked = stack_mosaics(folder, output=tmp_path / "o.zarr", search=ZSearch(0.06, 0.02), **tables)
    assert sum("marks 1 of 3 shifts as not reliable (between slices 3 and 6)" in line for line in caplog.messages) == 2
    assert [one.reliable_shift for one in registered.slices] == [True, True, False, True]
    for n, (one, other) in enumerate(itertools.pairwise(used)):
        expected = positions[other] - positions[one]
        above, below = np.array(plan.offsets[n : n + 2])
        np.testing.assert_array_equal((below - above)[1:], expected)
        a, b = (np.array(registered.slices[k].matrix)[1:3, 3] for k in (n, n + 1))
        np.testing.assert_allclose((b - a) / 5.0, expected, atol=1e-6)
    # 12 planes are 0.12 mm: slices 3 and 6 lie 0.18 mm apart, with a gap of 6 planes.
    row = stacked[1]
    assert (row.fixed_id, row.moving_id, row.overlap, row.mended) == (3, 6, -6, False)
    assert np.isnan(row.correlation)
    assert stacked[2].z_start - row.z_start == 12 - stacked[2].overlap
    # The same slices are stacked by their transforms, without the table.
    caplog.clear()
    space = stack_registered(folder, registered, tmp_path / "r.zarr")
    assert len(space.plan.offsets) == 4
    assert "slices without a transform are left out: mosaic_grid_3d_z04.ome.zarr" in caplog.text


STAGES_LEFT_OUT = ("galvo", "focal", "shading", "illumination", "aip", "surface", "attenuation", "report")


def test_a_run_takes_the_same_shifts(folder, tmp_path):
    write_table(tmp_path / "s.csv", range(11))
    (tmp_path / "c.csv").write_text(CONFIG)
    (tmp_path / "run.toml").write_text(
        'mosaics = "slices"\noutput = "out"\nshifts = "s.csv"\nslice_config = "c.csv"\ntile_shape = [48, 50]\n'
        f"slicing_interval_mm = 0.06\nskip = {list(STAGES_LEFT_OUT)}\n"
        "[resample]\nnew_spacing = [10, 5, 5]\n[register]\ncrop = false\n"
    )
    summary = run_pipeline(read_run(tmp_path / "run.toml"))
    assert [int(name[-2:]) for name in summary.slices] == [2, 3, 6, 7]
    written = json.loads((tmp_path / "out/register/transforms.json").read_text())
    alignment = Alignment(interval_mm=0.06, crop=False)
    direct = register_slices(tmp_path / "out/register/slices", None, alignment, shifts=tmp_path / "s.csv")
    assert [one["matrix"] for one in written["slices"]] == [[list(row) for row in one.matrix] for one in direct.slices]


def fault(folder, tmp_path, name):
    """Spoil one thing; return the message that a check of the brain must give."""
    tables = {"shifts": tmp_path / "s.csv", "slice_config": tmp_path / "c.csv"}
    if name == "a row":
        write_table(tables["shifts"], (0, 1, 2, 3, 4, 6))
        return "s.csv has no row for slices 6 and 7"
    if name == "a slice of the table":
        tables["slice_config"].write_text("slice_id,use\n2,1\n3,1\n6,0\n7,1\n")
        return "c.csv has no row for slice 4, found in"
    if name == "no slice used":
        tables["slice_config"].write_text("slice_id,use\n" + "".join(f"{n},no\n" for n in (2, 3, 4, 6, 7)))
        return "c.csv uses none of the slices in"
    last = folder / "mosaic_grid_3d_z07.ome.zarr"
    document = json.loads((last / "zarr.json").read_text())
    if name == "no unit":
        for axis in document["attributes"]["ome"]["multiscales"][0]["axes"]:
            axis.pop("unit", None)
        message = "z07.ome.zarr: axis 'z' has no unit"
    else:
        document["attributes"].pop("linumpy", None)
        message = "its metadata has no tile shape; pass tile_shape="
    (last / "zarr.json").write_text(json.dumps(document))
    return message


@pytest.mark.parametrize("name", ["a row", "a slice of the table", "no slice used", "no unit", "no tile shape"])
def test_faults_show_before_the_first_stage(folder, tmp_path, capsys, name):
    write_table(tmp_path / "s.csv", range(11))
    (tmp_path / "c.csv").write_text(CONFIG)
    message = fault(folder, tmp_path, name)
    tile_shape = None if name == "no tile shape" else (48, 50)
    tables = {"shifts": tmp_path / "s.csv", "slice_config": tmp_path / "c.csv"}
    run = Run(mosaics=folder, output=tmp_path / "out", slicing_interval_mm=0.06, tile_shape=tile_shape, **tables)
    with pytest.raises((SourceError, MetadataError)) as caught:
        run_pipeline(run)
    assert message in str(caught.value)
    assert not run.output.exists()
    words = [folder, "--shifts", tables["shifts"], "--slice-config", tables["slice_config"], "--list", tmp_path / "l"]
    words += ["--tile-shape", 48, 50] if tile_shape else []
    told = message.replace("tile_shape=", "--tile-shape A B")
    check_refused(capsys, load("linum_check_slices").main, words, "linum-check-slices", told)
    assert not (tmp_path / "l").exists()


def test_the_command_lists_what_is_used(folder, tmp_path, capsys, caplog):
    write_table(tmp_path / "s.csv", range(11))
    (tmp_path / "c.csv").write_text(CONFIG.replace("9,no", "9,yes"))
    words = [folder, "--shifts", tmp_path / "s.csv", "--slice-config", tmp_path / "c.csv", "--list", tmp_path / "l"]
    with caplog.at_level(logging.WARNING):
        assert load("linum_check_slices").main([*map(str, words), "--tile-shape", "48", "50"]) == 0
    assert (tmp_path / "l").read_text().split() == [f"mosaic_grid_3d_z{n:02d}" for n in (2, 3, 6, 7)]
    assert "4 slices can be processed" in capsys.readouterr().out
    assert "c.csv uses slice 9, which" in caplog.text
    assert "marks 1 of 3 shifts as not reliable" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slice_id;use\n0;1\n", "separated by commas"),
        ("slice_id,use\n0,1\n00,0\n", "line 3: the table has slice 0 more than once"),
        ("slice_id,use\n0,maybe\n", "line 2: use is 'maybe': write true or false"),
        ("slice_id,use\none,1\n", "line 2: slice_id is 'one'"),
        ("slice_id\n0\n", "has no column use"),
    ],
)
def test_faulty_tables_of_slices(tmp_path, text, message):
    (tmp_path / "c.csv").write_text(text)
    with pytest.raises(SourceError) as caught:
        read_slice_config(tmp_path / "c.csv")
    assert message in str(caught.value)


def test_a_tile_shape_needs_the_stage_that_writes_it(tmp_path):
    with pytest.raises(ValueError, match="skip must not have resample"):
        Run(mosaics=tmp_path, output=tmp_path / "o", slicing_interval_mm=0.2, tile_shape=(4, 4), skip=("resample",))


def test_millimetres(folder, tmp_path):
    """Mosaics in mm are those in µm."""
    (source,) = [path for number, path in find_slices(folder).items() if number == 2]
    resample_mosaic_grid(source, tmp_path / "um", 10, tile_shape=(48, 50))
    document = json.loads((source / "zarr.json").read_text())
    multiscale = document["attributes"]["ome"]["multiscales"][0]
    for axis in multiscale["axes"]:
        axis["unit"] = "millimeter"
    for dataset in multiscale["datasets"]:
        for transform in dataset["coordinateTransformations"]:
            key = transform["type"]
            transform[key] = [value / 1e3 for value in transform[key]]
    (source / "zarr.json").write_text(json.dumps(document))
    made = resample_mosaic_grid(source, tmp_path / "mm", 10, tile_shape=(48, 50))
    np.testing.assert_allclose(made.spacing, (10, 10, 10))
    one, other = (open_image(tmp_path / name) for name in ("um", "mm"))
    np.testing.assert_allclose(one.spacing, other.spacing)
    np.testing.assert_array_equal(one.levels[0][...], other.levels[0][...])
    assert list(check_mosaics(folder, tile_shape=(48, 50))) == [2, 3, 4, 6, 7]


@pytest.mark.parametrize("seed", range(4))
def test_a_stack_with_missing_slices_against_the_truth(tmp_path, seed):
    """Slices of a brain of which some are not there lie where they were cut, also along depth."""
    rng = np.random.default_rng(seed)
    absent = tuple(map(int, rng.choice(np.arange(1, 5), int(rng.integers(1, 3)), replace=False)))
    faults = Faults(translation=6, absent=absent)
    spec = BrainSpec(slices=6, tiles=(1, 1), tile_shape=(24, 40, 44), interval_um=160.0, seed=seed, faults=faults)
    write_brain(spec, tmp_path / "b")
    search = ZSearch(0.16, 0.03)
    made, _ = stack_mosaics(tmp_path / "b/mosaics", tmp_path / "b/shifts.csv", tmp_path / "o.zarr", search)
    there = [number for number in range(6) if number not in absent]
    steps = np.cumsum([(0.0, 0.0), *(truth_shift(spec, number) for number in range(1, 6))], axis=0)[there]
    depths = np.array(there) * 160.0 / spec.spacing_um[0]
    offsets = np.array(made.offsets, float)
    error = offsets - offsets[0] - np.column_stack([depths, steps - steps[0]])
    assert np.abs(error[:, 1:]).max() <= 0.5 + 1e-9
    assert np.abs(error[:, 0]).max() <= 2
    collapsed = np.cumsum([0, *(np.full(len(there) - 1, 160.0 / spec.spacing_um[0]))])
    assert np.abs(offsets[:, 0] - depths).max() < np.abs(collapsed - depths).max()


def test_the_check_of_slices_reads_the_table_of_shifts_once(folder, monkeypatch, capsys, caplog):
    rows = ["0,2,3,4,0.06,0.08,1", "2,3,0,0,0.0,0.0,0", "3,4,0,0,0.0,0.0,1", "4,6,0,0,0.0,0.0,1", "6,7,0,0,0.0,0.0,1"]
    table = folder.parent / "once.csv"
    table.write_text("\n".join([",".join([*SHIFT_COLUMNS, "reliable"]), *rows]) + "\n")
    read: list[object] = []
    original = slice_table.read_shifts
    monkeypatch.setattr(slice_table, "read_shifts", lambda path: read.append(path) or original(path))
    program = load("linum_check_slices")
    assert program.main([str(folder), "--shifts", str(table), "--tile-shape", "48", "50"]) == 0
    assert "5 slices can be processed" in capsys.readouterr().out
    assert read == [table]
    assert caplog.text.count("marks 1 of 4 shifts as not reliable (between slices 2 and 3)") == 1


def test_parameters_that_a_step_has_no_use_for_are_refused(tmp_path):
    with pytest.raises(TypeError, match="codec=: this step has no use"):
        register_slices(tmp_path, None, Alignment(interval_mm=0.1), codec="zstd")
