"""If this fails, the script stacks slices wrong, or a killed one leaves something that looks finished."""

import csv
import signal

import numpy as np
import pytest
import zarr

from linumpy.io.ome import open_image, read_omezarr
from linumpy.testing.synthetic import MosaicSpec, block
from linumpy.write.writer import write_omezarr
from tests.support.budget import first
from tests.support.script_runs import check_refused, kill_half_way, run_script
from tests.support.stacks import consecutive_slices

NAME, PROGRAM = "linum_stack_slices_motor", "linum-stack-slices-motor"
SPACING = (5.0, 10.0, 10.0)
#: Tissue from the first voxel on, out of which slices of 40 planes are cut.
TISSUE = MosaicSpec((1, 1), (130, 120, 136), SPACING, water_um=-99, tilt=(0, 0), curvature_um=0, focal_um=0)
OVERLAPS, PLACES = (16, 15, 17), ((5, 9), (8, 3), (0, 7), (3, 0))
SIZE = (40, 110, 120)
HEAD = "fixed_id,moving_id,x_shift,y_shift,x_shift_mm,y_shift_mm"
MOTOR = ["--slicing-interval-mm", "0.12", "--search-range-mm", "0.03"]


def tissue(dtype="float32"):
    return block(TISSUE, (0, 0, 0), TISSUE.shape).astype(dtype)


def cut(folder, volume, first=3, **options):
    """Cut slices out of a volume, with numbers from `first` on; write them and their shifts."""
    z, rows = 0, [HEAD]
    (folder / "slices").mkdir()
    for number, (y, x) in enumerate(PLACES):
        name = folder / "slices" / f"slice_z{first + number:02d}.ome.zarr"
        box = volume[z : z + SIZE[0], y : y + SIZE[1], x : x + SIZE[2]]
        write_omezarr(name, box, SPACING, chunks=(20, 33, 64), **options)
        if number < len(OVERLAPS):
            z += SIZE[0] - OVERLAPS[number]
            dy, dx = (b - a for a, b in zip(PLACES[number], PLACES[number + 1], strict=True))
            # In voxels of another resolution: those in mm count.
            rows.append(f"{first + number},{first + number + 1},{dx / 2},{dy / 2},{dx * 0.01},{dy * 0.01}")
    (folder / "shifts.csv").write_text("\n".join(rows) + "\n")
    return folder / "slices", folder / "shifts.csv"


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("dtype", first(["uint16", "float32"]))
def test_slices_of_one_volume_become_that_volume_again(tmp_path, dtype):
    volume = tissue(dtype)
    folder, shifts = cut(tmp_path, volume, origin=(50.0, 20.0, 30.0))
    out = tmp_path / "stack.ome.zarr"
    done = run_script(NAME, folder, shifts, out, *MOTOR, "--device=cpu", "--levels", "2")
    assert (done.returncode, done.stderr) == (0, "")
    said, line = done.stdout.splitlines()
    assert said == f"3 overlaps, 0 of them replaced by the typical one; decisions in {tmp_path / 'stack_decisions.csv'}"
    assert line.startswith(f"{folder} -> {out} on CPU: ")
    stack, spacing = read_omezarr(out)
    assert (stack.shape, stack.dtype, spacing) == ((112, 118, 129), np.dtype(dtype), SPACING)
    found = stack[...]
    inside = np.zeros(stack.shape, bool)
    for z, (y, x) in zip(np.cumsum([0, 24, 25, 23]), PLACES, strict=True):
        inside[z : z + SIZE[0], y : y + SIZE[1], x : x + SIZE[2]] = True
    # No seam anywhere, to the voxel; and nothing where no slice is.
    np.testing.assert_array_equal(found, np.where(inside, volume[:112, :118, :129], 0))
    # The first slice began at (5, 9) of the stack, and at (20, 30) µm.
    image = open_image(out)
    assert image.origin[0] == (50.0, 20.0 - 50.0, 30.0 - 90.0)
    assert image.levels[1].shape == (56, 59, 65)
    rows = table(tmp_path / "stack_decisions.csv")
    assert [int(row["overlap"]) for row in rows] == list(OVERLAPS)
    assert [int(row["found_overlap"]) for row in rows] == list(OVERLAPS)
    assert [row["mended"] for row in rows] == ["False"] * 3
    assert [(row["fixed_id"], row["moving_id"]) for row in rows] == [("3", "4"), ("4", "5"), ("5", "6")]
    assert [(int(row["z_start"]), int(row["y_start"]), int(row["x_start"])) for row in rows] == [
        (24, 8, 3), (49, 0, 7), (72, 3, 0)
    ]  # fmt: skip
    assert all(float(row["expected_overlap"]) == 16 and float(row["correlation"]) > 0.999 for row in rows)


def test_an_overlap_that_cannot_be_trusted_is_mended(main, tmp_path, capsys):
    volume = tissue()
    folder, shifts = cut(tmp_path, volume)
    spoilt = np.random.default_rng(1).random(SIZE, np.float32)
    write_omezarr(folder / "slice_z06.ome.zarr", spoilt, SPACING, overwrite=True)
    decisions = tmp_path / "tables" / "why.csv"
    decisions.parent.mkdir()
    words = [folder, shifts, tmp_path / "stack.zarr", *MOTOR, "--device=cpu", "--decisions", decisions]
    assert main(list(map(str, words))) == 0
    rows = table(decisions)
    assert [row["mended"] for row in rows] == ["False", "False", "True"]
    assert abs(float(rows[2]["correlation"])) < 0.2
    assert rows[2]["overlap"] == "16"  # the median of 16 and 15, rounded
    assert "3 overlaps, 1 of them replaced" in capsys.readouterr().out


def test_slices_with_speckle_of_their_own(main, tmp_path, capsys):
    spec = MosaicSpec((1, 1), (48, 96, 112), SPACING, looks=4)
    (tmp_path / "slices").mkdir()
    for number, one in enumerate(consecutive_slices(spec, 13)):
        voxels = block(one, (0, 0, 0), one.shape)
        write_omezarr(tmp_path / "slices" / f"brain_{number:04d}.zarr", voxels, SPACING)
    (tmp_path / "shifts.csv").write_text(f"{HEAD}\n0, 1, 0, 0, 0.0, 0.0\n")
    words = [tmp_path / "slices", tmp_path / "shifts.csv", tmp_path / "stack.zarr", "--device=cpu"]
    assert main([*map(str, words), "--slicing-interval-mm", "0.16"]) == 0
    (row,) = table(tmp_path / "stack_decisions.csv")
    assert (row["expected_overlap"], row["overlap"], row["mended"]) == ("16.0", "13", "False")
    assert zarr.open_group(tmp_path / "stack.zarr", mode="r")["0"].shape == (83, 96, 112)


def test_slices_that_are_not_used_are_left_out(main, tmp_path, capsys):
    folder, shifts = cut(tmp_path, tissue("uint16"))
    (tmp_path / "use.csv").write_text("slice_id,use\n3,true\n4,true\n5,true\n6,false\n")
    words = [folder, shifts, tmp_path / "stack.zarr", *MOTOR, "--device=cpu", "--slice-config", tmp_path / "use.csv"]
    assert main(list(map(str, words))) == 0
    assert [row["moving_id"] for row in table(tmp_path / "stack_decisions.csv")] == ["4", "5"]


def test_outputs_are_kept_unless_they_may_go(main, tmp_path, capsys):
    folder, shifts = cut(tmp_path, tissue("uint16"))
    out, decisions = tmp_path / "stack.zarr", tmp_path / "stack_decisions.csv"
    decisions.write_text("mine")
    words = [folder, shifts, out, *MOTOR, "--device=cpu"]
    check_refused(
        capsys, main, words, PROGRAM, "stack_decisions.csv exists: choose another path, or replace it with --overwrite"
    )
    assert decisions.read_text() == "mine"
    assert not out.exists()
    assert main([*map(str, words), "--overwrite"]) == 0
    decisions.unlink()
    capsys.readouterr()
    check_refused(capsys, main, words, PROGRAM, "stack.zarr exists")


def made(folder):
    """Two slices of 12 planes of 10 µm, and tables that fit them more or less."""
    for name in ("good", "numbers", "twice", "dtypes", "spacings", "order", "alone"):
        (folder / name).mkdir()
        for number in (1, 2):
            dtype = "uint16" if (name, number) == ("dtypes", 2) else "float32"
            spacing = (10, 5 if (name, number) == ("spacings", 2) else 6, 6)
            label = {("numbers", 2): "slice", ("twice", 2): "again_1"}.get((name, number), f"slice_z{number}_6um")
            axes = "yxz" if (name, number) == ("order", 2) else "zyx"
            if (name, number) != ("alone", 2):
                voxels = np.arange(12 * 8 * 8).reshape(12, 8, 8).astype(dtype)
                write_omezarr(folder / name / f"{label}.ome.zarr", voxels, spacing, axes=axes)
    (folder / "empty").mkdir()
    tables = {"good": f"{HEAD}\n1,2,0,0,0.0,0.0\n", "far": f"{HEAD}\n1,2,0,0,5.0,0.0\n"}
    for name, text in tables.items():
        (folder / f"{name}.csv").write_text(text)
    (folder / "bytes.csv").write_bytes(b"\xff\xfe\x00\x01")
    return folder


M = ["--slicing-interval-mm", "0.08", "--device=cpu"]
BAD = {
    "no arguments": ([], "required: FOLDER, SHIFTS, OUTPUT, --slicing-interval-mm"),
    "no interval": (["good", "good.csv", "o"], "required: --slicing-interval-mm"),
    "an interval of nothing": (["good", "good.csv", "o", "--slicing-interval-mm", "0"], "--slicing-interval-mm 0.0"),
    "a range below nothing": (["good", "good.csv", "o", *M, "--search-range-mm", "-1"], "--search-range-mm -1.0"),
    "no overlap in reach": (["good", "good.csv", "o", "--slicing-interval-mm", "0.4"], "no overlap within 0.1 mm"),
    "no folder": (["nowhere", "good.csv", "o", *M], "there is no folder"),
    "no slices": (["empty", "good.csv", "o", *M], "there are no slices"),
    "one slice": (["alone", "good.csv", "o", *M], "is the only slice"),
    "a slice without a number": (["numbers", "good.csv", "o", *M], "slice.ome.zarr has no number"),
    "a number twice": (["twice", "good.csv", "o", *M], "are both slice 1"),
    "two dtypes": (["dtypes", "good.csv", "o", *M], "uint16"),
    "two spacings": (["spacings", "good.csv", "o", *M], "resample them"),
    "another order": (["order", "good.csv", "o", *M], "axes y, x, z; slices are stacked with axes z, y, x"),
    "no table": (["good", "nowhere.csv", "o", *M], "nowhere.csv"),
    "no text": (["good", "bytes.csv", "o", *M], "is no CSV table"),
    "far apart": (["good", "far.csv", "o", *M], "slices 1 and 2 share no area"),
    "levels": (["good", "good.csv", "o", *M, "--levels", "40"], "--levels 40"),
    "decisions over the table": (
        ["good", "good.csv", "o", *M, "--decisions", "good.csv", "--overwrite"],
        "would replace the source",
    ),
    "decisions in the stack": (["good", "good.csv", "o", *M, "--decisions", "o/why.csv"], "would overlap"),
}


def test_what_is_refused_is_refused_in_one_line(main, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(made(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    for words, message in BAD.values():
        check_refused(capsys, main, words, PROGRAM, message)
        assert sorted(tmp_path.rglob("*")) == before, words


@pytest.mark.parametrize("sent", first([signal.SIGKILL, signal.SIGTERM]))
def test_a_kill_in_the_middle_leaves_nothing_that_looks_finished(main, tmp_path, capsys, sent):
    folder, shifts = cut(tmp_path, tissue("uint16"))
    words = [folder, shifts, tmp_path / "stack.zarr", *MOTOR, "--device=cpu"]
    before = {folder, shifts}
    assert kill_half_way(NAME, words, after=20, sent=sent) != 0
    left = [file.name for file in set(tmp_path.iterdir()) - before]
    assert len(left) == (sent == signal.SIGKILL)
    assert all(name.startswith(".stack.zarr.part-") for name in left)
    assert main([str(word) for word in words]) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_on_a_gpu_as_on_the_cpu(main, tmp_path, capsys, dtype):
    volume = tissue(dtype)
    folder, shifts = cut(tmp_path, volume)
    assert main([str(folder), str(shifts), str(tmp_path / "g.zarr"), *MOTOR, "--device=cuda"]) == 0
    assert " on GPU: " in capsys.readouterr().out
    found = zarr.open_group(tmp_path / "g.zarr", mode="r")["0"][...]
    assert main([str(folder), str(shifts), str(tmp_path / "c.zarr"), *MOTOR, "--device=cpu"]) == 0
    np.testing.assert_array_equal(found, zarr.open_group(tmp_path / "c.zarr", mode="r")["0"][...])
    rows = [table(tmp_path / f"{name}_decisions.csv") for name in "gc"]
    for on_gpu, on_cpu in zip(*rows, strict=True):
        assert float(on_gpu.pop("correlation")) == pytest.approx(float(on_cpu.pop("correlation")), abs=1e-5)
        assert on_gpu == on_cpu
