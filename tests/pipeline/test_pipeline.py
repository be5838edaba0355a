"""If this fails, a pipeline does not go on where it was stopped, or misses what has changed."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from linumpy.correction.shading import ShadingOptions
from linumpy.errors import ResumeError, SourceError
from linumpy.io.ome import open_image
from linumpy.mosaic.beam import read_brain_light
from linumpy.pipeline import runner
from linumpy.pipeline.runner import run_pipeline
from linumpy.pipeline.settings import OPTIONS, Focal, Galvo, NoOptions, Positions, Run, Surface
from linumpy.pipeline.stages import STAGES, Common, Task, carry_out
from linumpy.resample.tile_work import TileWork
from linumpy.testing.brain import USUAL_FAULTS, BrainSpec, Faults, truth_galvo
from linumpy.testing.brain_errors import errors_of
from linumpy.testing.brain_files import write_brain
from tests.support.budget import first
from tests.support.script_runs import ROOT, load, record_bars

#: Structures that tiles of 48 voxels show whole.
SPEC = BrainSpec(
    slices=3, texture_um=(60.0, 240.0), faults=dataclasses.replace(USUAL_FAULTS, rotation_degrees=0.0, galvo=20)
)
SLICES = [f"slice_z{number:02d}" for number in range(3)]
PER_SLICE = [name for name, stage in STAGES.items() if not stage.of_brain]
OF_BRAIN = [name for name, stage in STAGES.items() if stage.of_brain]
SMALL = {"focal": Focal(s_xy=5), "surface": Surface(s_xy=5), "positions": Positions(0.25)}
#: Stages that take long.
LONG = ("focal", "shading", "illumination", "report")


def run_of(folder, spec=SPEC, **changes):
    """Write a brain, and return the run that takes it to a volume."""
    write_brain(spec, folder / "brain")
    given = {"shifts": folder / "brain/shifts.csv", "options": SMALL} | changes
    return Run(
        mosaics=folder / "brain/mosaics", output=folder / "out", slicing_interval_mm=spec.interval_um / 1e3, **given
    )


def carry_out_one(stage, name, options, inputs, outputs):
    common = Common(levels=1, codec=None)
    task = Task(stage=stage, name=name, options=options, common=common, inputs=inputs, outputs=outputs)
    carry_out(task, TileWork("cpu"))


def done(summary):
    return {stage.name: stage.done for stage in summary.stages if stage.done}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that is over; tests copy it, with its times, or leave it as it is."""
    folder = tmp_path_factory.mktemp("finished")
    run = run_of(folder)
    return run, run_pipeline(run)


def voxels(path):
    return open_image(path).levels[0][...]


def test_all_stages_of_all_slices(finished):
    run, summary = finished
    assert done(summary) == dict.fromkeys(PER_SLICE, 3) | dict.fromkeys(OF_BRAIN, 1)
    assert (list(summary.slices), summary.empty) == (SLICES, ())
    assert voxels(summary.results["stack"][0]).std() > 0
    assert len(summary.results["image"]) == len(summary.results["projection"]) == 3
    told = json.loads((run.output / "pipeline.json").read_text())
    assert [stage["name"] for stage in told["stages"]] == list(OPTIONS)
    errors = {(one.stage, one.what.split()[0]): one.value for one in errors_of(SPEC, run.output)}
    most = {
        ("focal", "curvature"): 6.0, ("surface", "median"): 6.0, ("positions", "RMS"): 8.0,
        ("register", "RMS"): 15.0, ("register", "largest"): 1.5,
    }  # fmt: skip
    assert {key: errors[key] for key in most if errors[key] > most[key]} == {}
    assert errors["galvo", "shift"] == 0
    assert errors["attenuation", "attenuation"] < 0.7
    assert errors["stack", "correlation"] > 0.7
    light = read_brain_light(run.output / "beam/brain.json").described()
    assert {json.loads(path.read_text())["light"] for path in (run.output / "attenuation").glob("*.json")} == {light}
    again = run_pipeline(run)
    assert done(again) == {}
    assert again.results == summary.results


def test_a_stage_that_is_left_out_later_is_not_in_the_report(finished, tmp_path):
    """Its files of the first run remain, but the second run did not use them."""
    run = dataclasses.replace(finished[0], output=tmp_path / "out")
    shutil.copytree(finished[0].output, run.output, symlinks=True)
    run_pipeline(dataclasses.replace(run, skip=("surface",)))
    page = (run.output / "report/report.html").read_text()
    assert (run.output / "surface/slice_z00.ome.zarr").is_dir()
    assert "alt='surface, slice 0'" not in page
    assert "surface: left out; 6 files of earlier runs are not shown" in page
    assert "<td>surface</td><td>left out</td>" in page
    assert "alt='stack, slice 0'" in page


def test_the_report_of_a_run(finished):
    """A page with the times of all stages but its own, and pictures of the volume; all images are read."""
    page = (finished[0].output / "report/report.html").read_text()
    assert [name for name in OPTIONS if f"<td>{name}</td>" not in page] == ["report"]
    assert "alt='stack/stack.ome.zarr'" in page
    assert "alt='stack, slice 0'" in page
    assert "cannot be read" not in page
    assert "earlier run" not in page


def test_what_the_galvo_did_not_rotate_is_not_copied(tmp_path, finished):
    """A slice as it should be is a link; one that is mended, and then not, and again, leaves its source as it was."""
    run = finished[0]
    shifts = [truth_galvo(SPEC, number) for number in range(3)]
    assert sum(map(bool, shifts)) > 0, "the synthetic brain has no shift to mend"
    links = [(run.output / f"galvo/{name}.ome.zarr").is_symlink() for name in SLICES]
    assert links == [shift == 0 for shift in shifts]
    write_brain(dataclasses.replace(SPEC, slices=1, faults=Faults(looks=8)), tmp_path / "brain")
    source = tmp_path / "brain/mosaics/slice_z00.ome.zarr"
    before, out = voxels(source), tmp_path / "galvo/slice_z00.ome.zarr"
    outputs = {"image": out, "galvo": tmp_path / "galvo/slice_z00.json"}
    for columns in (0, 5, 0, 7):
        carry_out_one("galvo", "slice_z00", Galvo(columns), {"image": (source,)}, outputs)
        assert out.is_symlink() == (columns == 0)
        np.testing.assert_array_equal(voxels(source), before)
        np.testing.assert_array_equal(voxels(out)[..., :48], np.roll(before[..., :48], -columns, axis=-1))


def test_illumination_that_tiles_cannot_tell_is_left_alone(tmp_path, caplog):
    """The output is a link, the reason is in the JSON and the log; with `force` the files are corrected."""
    spec = dataclasses.replace(SPEC, slices=1, tiles=(2, 1), faults=Faults(vignette=0.5, looks=8))
    write_brain(spec, tmp_path / "brain")
    source = tmp_path / "brain/mosaics/slice_z00.ome.zarr"
    before = voxels(source)
    made = {"fields": "fields.npz", "shading": "brain.json", "shading_picture": "shading.png"}
    fields = {role: tmp_path / "shading" / name for role, name in made.items()}
    out = tmp_path / "illumination/slice_z00.ome.zarr"
    for force in (False, True, False):
        carry_out_one("shading", "brain", ShadingOptions(force=force), {"image": (source,)}, fields)
        inputs = {"image": (source,), "fields": (fields["fields"],)}
        carry_out_one("illumination", "slice_z00", NoOptions(), inputs, {"image": out})
        told = json.loads(fields["shading"].read_text())
        assert out.is_symlink() == bool(told["left_out"]) == (not force)
        assert np.array_equal(voxels(out), before) == (not force)
        np.testing.assert_array_equal(voxels(source), before)
        assert told["gain_min"] >= 0.2
    (warning,) = told["warnings"]
    assert "parts are needed" in warning
    assert caplog.text.count("The illumination is not corrected: 2 tiles") == 2


def test_what_depends_on_a_change_is_made_anew(tmp_path):
    """An option, an output that is gone, and a source."""
    copied = run_of(tmp_path, skip=LONG)
    run_pipeline(copied)
    changed = dataclasses.replace(copied, options=SMALL | {"surface": Surface(s_xy=7)})
    assert done(run_pipeline(changed)) == {"surface": 3}
    shutil.rmtree(copied.output / "aip" / "slice_z01.ome.zarr")
    assert done(run_pipeline(changed))["aip"] == 1
    shutil.copytree(copied.mosaics / "slice_z01.ome.zarr", tmp_path / "other")
    shutil.rmtree(copied.mosaics / "slice_z01.ome.zarr")
    os.rename(tmp_path / "other", copied.mosaics / "slice_z01.ome.zarr")
    after = done(run_pipeline(changed))
    # One slice changes the light of the brain, on which all slices depend.
    assert after == {name: 1 for name in OPTIONS if name not in LONG} | {"attenuation": 3}
    head, *rows = copied.shifts.read_text().splitlines()
    copied.shifts.write_text("\n".join([f"{head},reliable", f"{rows[0]},1", f"{rows[1]},0"]) + "\n")
    assert done(run_pipeline(changed)) == {"register": 1, "stack": 1}
    slices = json.loads((copied.output / "register/transforms.json").read_text())["slices"]
    assert [one["reliable_shift"] for one in slices] == [True, True, False]
    thinner = dataclasses.replace(changed, slicing_interval_mm=0.19)
    assert done(run_pipeline(thinner)) == {"beam": 1, "attenuation": 3, "register": 1, "stack": 1}


@pytest.mark.parametrize("stage", first(["stitch", "resample", "register"]))
def test_after_an_error_a_run_goes_on(tmp_path, monkeypatch, stage):
    """The second task of a stage fails: nothing before it is done again, and the result is that of one run."""
    run = run_of(tmp_path, skip=(*LONG, "surface"))
    calls, usual = itertools.count(), STAGES[stage].call

    def fails(task, where):
        if next(calls) == min(1, len(SLICES) - 1 if not STAGES[stage].of_brain else 0):
            raise KeyboardInterrupt
        usual(task, where)

    monkeypatch.setitem(STAGES, stage, dataclasses.replace(STAGES[stage], call=fails))
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(run)
    summary = run_pipeline(run)
    kept = {one.name: one.kept for one in summary.stages}
    order = [name for name in OPTIONS if name not in run.skip]
    for name in order[: order.index(stage)]:
        assert kept[name] == (1 if STAGES[name].of_brain else 3)
    assert kept[stage] == (0 if STAGES[stage].of_brain else 1)
    assert done(run_pipeline(run)) == {}


def test_killed_and_started_again(tmp_path, capsys, monkeypatch):
    """SIGKILL while a stage is under way; what the command makes then is what it makes in one go."""
    run = run_of(tmp_path, BrainSpec(slices=2, faults=Faults(water_um=60.0, looks=8)))
    text = 'mosaics = "brain/mosaics"\nshifts = "brain/shifts.csv"\noutput = "{}"\nslicing_interval_mm = 0.2\n'
    text += 'skip = ["focal", "shading", "illumination", "surface", "report"]\n'
    for name in ("killed", "whole"):
        (tmp_path / f"{name}.toml").write_text(text.format(name))
    command = [sys.executable, "-m", "linumpy_scripts.linum", "pipeline", tmp_path / "killed.toml", "--device=cpu"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout.readline().startswith("galvo of slice_z00")
    process.send_signal(signal.SIGKILL)
    process.wait()
    script = load("linum_pipeline")
    assert script.main([str(tmp_path / "killed.toml"), "--device=cpu"]) == 0
    assert "results in" in capsys.readouterr().out
    bars = record_bars(monkeypatch)
    assert script.main([str(tmp_path / "whole.toml"), "--device=cpu", "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert bars["stitch"] == [2, 2, "slice"]
    stack = "stack/stack.ome.zarr"
    assert np.array_equal(voxels(tmp_path / "killed" / stack), voxels(tmp_path / "whole" / stack))
    assert run.mosaics.is_dir()


def test_missing_tiles_and_empty_slices(tmp_path, caplog):
    faults = dataclasses.replace(SPEC.faults, missing=((1, 0, 1),), empty=(2,))
    summary = run_pipeline(run_of(tmp_path, dataclasses.replace(SPEC, faults=faults), skip=("surface", *LONG[1:])))
    assert summary.empty == ("slice_z02",)
    assert "slice_z02: nothing was recorded, so it is left out" in caplog.text
    assert [json.loads(path.read_text())["tiles"] for path in summary.results["survey"]] == [
        [[True, True], [True, True]],
        [[True, False], [True, True]],
    ]
    assert len(summary.results["image"]) == 2
    assert voxels(summary.results["stack"][0]).std() > 0


def test_one_tile_of_one_slice(tmp_path):
    spec = dataclasses.replace(SPEC, slices=1, tiles=(1, 1))
    summary = run_pipeline(run_of(tmp_path, spec))
    assert summary.results["image"][0].is_dir()
    # Alone it is its own stack: levelled, from its cut surface on.
    stack, slice_ = voxels(summary.results["stack"][0]), voxels(summary.results["image"][0])
    assert stack.shape[1:] == slice_.shape[1:]
    assert (stack > 0).mean() > 0.8
    planes = len(slice_) - len(stack)
    fits = [np.corrcoef(stack[:-1].ravel(), slice_[k : k + len(stack) - 1].ravel())[0, 1] for k in range(planes + 2)]
    # Its planes lie between those of the slice, so they are smoother.
    assert planes - 2 <= np.argmax(fits) <= planes + 1, fits
    assert max(fits) > 0.8


def test_nothing_at_all(tmp_path):
    spec = dataclasses.replace(SPEC, slices=1, faults=Faults(empty=(0,)))
    with pytest.raises(SourceError, match="nothing was recorded in any slice"):
        run_pipeline(run_of(tmp_path, spec, shifts=None))


def test_folders_that_are_not_ours(tmp_path):
    run = run_of(tmp_path, dataclasses.replace(SPEC, slices=1, tiles=(1, 1)))
    run.output.mkdir()
    (run.output / "letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="no folder of this pipeline"):
        run_pipeline(run)
    os.unlink(run.output / "letter.txt")
    with pytest.raises(ValueError, match="skip has 'positions', but 'stitch' needs"):
        run_pipeline(dataclasses.replace(run, skip=(*LONG, "surface", "positions")))
    with runner.open_records(run.output), pytest.raises(ResumeError, match="written by another run"):
        run_pipeline(run)


def test_on_a_cluster(tmp_path, finished):
    distributed = pytest.importorskip("distributed")
    run = dataclasses.replace(finished[0], output=tmp_path / "out")
    options = {"n_workers": 1, "threads_per_worker": 2, "dashboard_address": None}
    with distributed.LocalCluster(processes=False, **options) as cluster:
        summary = run_pipeline(run, distributed=cluster.scheduler_address)
    for role in ("image", "projection", "stack"):
        for here, there in zip(finished[1].results[role], summary.results[role], strict=True):
            assert np.array_equal(voxels(here), voxels(there))
