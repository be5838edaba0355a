"""If this fails, the workflow names what does not exist, or its commands make wrong images."""

import itertools
import json
import os
import re
import shlex
import subprocess
import tomllib

import numpy as np
import pytest
import zarr

from linumpy.mosaic.aip import project_mosaic
from linumpy.mosaic.alignment.register import register_slices
from linumpy.mosaic.alignment.stack import stack_registered
from linumpy.mosaic.attenuation import compensate_attenuation
from linumpy.mosaic.beam import estimate_brain_light
from linumpy.mosaic.focal import correct_mosaic
from linumpy.mosaic.galvo import fix_galvo_shift
from linumpy.mosaic.grid import resample_mosaic_grid
from linumpy.mosaic.illumination import estimate_illumination, fix_illumination
from linumpy.mosaic.options import Alignment, FocalCorrection, Positions, SurfaceMethod
from linumpy.mosaic.stitching import stitch_mosaic
from linumpy.mosaic.surface import find_mosaic_surface
from linumpy.mosaic.tile_positions import estimate_positions
from linumpy.testing.brain import USUAL_FAULTS, BrainSpec
from linumpy.testing.brain_files import write_brain
from tests.support import nextflow_text as nf
from tests.support.script_runs import ROOT, load

TEXT = (nf.WORKFLOWS / "soct_3d_reconst.nf").read_text(encoding="utf-8")
CONFIG = (nf.WORKFLOWS / "nextflow.config").read_text(encoding="utf-8")
GUIDE = (nf.WORKFLOWS / "README.md").read_text(encoding="utf-8")
PROCESSES = {name: nf.process(TEXT, name) for name in nf.names(TEXT, "process")}
PARAMS = nf.defaults(CONFIG)
COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
GIVEN = {"input": "mosaics", "shifts": "shifts.csv", "slicing_interval_mm": "0.12"}
#: The workflow's first channels, which :func:`run_workflow` makes itself.
FIRST = {
    "mosaics": "Channel.fromPath(\"${params.input}/*.ome.zarr\", type: 'dir', checkIfExists: true)"
    ".map { mosaic -> tuple(mosaic.name.replace('.ome.zarr', ''), mosaic) }",
    "shifts": "file(params.shifts, checkIfExists: true)",
    "slice_config": "params.slice_config == null ? [] : file(params.slice_config, checkIfExists: true)",
    "used": "mosaics.join(check_slices.out.slices.splitText().map { line -> tuple(line.trim()) })",
}
#: What makes a channel of paths out of one of names and paths.
PATHS = ".map { slice -> slice[1] }"
SKIPS = ("skip_galvo", "skip_focal", "skip_illumination")


PER_SLICE = [
    "fix_galvo_shift", "resample_mosaic_grid", "fix_focal_curvature", "fix_illumination", "find_tissue_interface",
    "aip", "estimate_transform", "stitch_3d", "compensate_attenuation",
]  # fmt: skip


def script_of(command):
    """Find the script of a command that ``pyproject.toml`` installs."""
    return load(COMMANDS[command].removesuffix(":main").removeprefix("linumpy_scripts."))


def rendered(name, variables, **params):
    return nf.render(PROCESSES[name].script, PARAMS | GIVEN | params, variables).strip()


@pytest.mark.parametrize("text", [TEXT, CONFIG], ids=["nf", "config"])
def test_brackets_balance(text):
    nf.check_balanced(text)
    for spoilt in (text.rstrip()[:-1], text + "}", text.rstrip()[:-1] + ")", text + "'"):
        with pytest.raises(ValueError, match=r"line \d+|a string"):
            nf.check_balanced(spoilt)


def test_the_processes_are_there():
    assert list(PROCESSES) == [
        "check_slices", *PER_SLICE[:3], "estimate_illumination", *PER_SLICE[3:-1], "estimate_beam", PER_SLICE[-1],
        "register_slices", "stack", "report",
    ]  # fmt: skip


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", PROCESSES)
def test_commands_and_options_exist(name, device):
    """Parsed by the script's own parser, which refuses what it does not know."""
    given = {"mosaic": "a.ome.zarr", "volume": "b.ome.zarr", "shifts": "s.csv", "slices": "unused", "slice_config": "c"}
    given |= {"name": "slice_z00", "beam": "b.json", "fields": "f.npz"}
    variables = given | {"positions": "p.json", "transforms": "t.json"}
    command, *words = shlex.split(rendered(name, variables, device=device, tile_shape="24 24", resolution="10 15 15"))
    assert COMMANDS[command].split(":")[0].removeprefix("linumpy_scripts.") in {
        one.stem for one in (ROOT / "scripts").iterdir()
    }
    parser = script_of(command).main.parser()
    assert getattr(parser.parse_args(words), "device", device) == device
    for word in words:
        assert not word.startswith("--") or word in parser._option_string_actions, word  # no abbreviation
    assert ("--device ${params.device}" in PROCESSES[name].script) == ("--device" in parser._option_string_actions)


def test_parameters_are_those_of_the_configuration():
    used = set(re.findall(r"params\.(\w+)", TEXT + CONFIG))
    assert used == set(PARAMS)
    assert set(re.findall(r"`--(\w+)`", GUIDE)) - {"help"} <= set(PARAMS)
    words = re.findall(r"--(\w+)", "".join(re.findall(r"^nextflow run (?:.*\\\n)*.*$", GUIDE, re.MULTILINE)))
    assert len(words) >= 5
    assert set(words) <= set(PARAMS)


def test_the_functions_are_what_the_tests_take_them_for():
    for head, body in nf.FUNCTIONS.items():
        assert nf.block(TEXT, "def " + re.escape(head)).strip() == body
    assert TEXT.count("def ") == len(nf.FUNCTIONS)


def test_a_parameter_that_is_null_is_no_option():
    variables = {"name": "s", "mosaic": "m"}
    assert "--tile-shape" not in rendered("resample_mosaic_grid", variables)
    assert "--tile-shape 24 25" in rendered("resample_mosaic_grid", variables, tile_shape="24 25")
    variables = {"shifts": "s.csv", "slice_config": []}
    assert "--slice-config" not in rendered("check_slices", variables)
    assert "--slice-config c.csv" in rendered("check_slices", variables | {"slice_config": "c.csv"})


@pytest.mark.parametrize("skipped", list(itertools.product((False, True), repeat=3)))
def test_channels_meet(skipped):
    """Each process is called once, with as many channels as it has inputs, of as many elements, made before."""
    values, called = {"mosaics": 2, "shifts": 1, "slice_config": 1, "used": 2}, []
    for name, what in nf.statements(TEXT, PARAMS | GIVEN | dict(zip(SKIPS, skipped, strict=True))):
        if isinstance(what, str):
            assert FIRST.get(name, what) == what
            if name not in FIRST:
                values[name] = 1 if what == "Channel.empty()" or what.endswith(PATHS) else values[what]
            continue
        called.append(name)
        assert len(what) == len(PROCESSES[name].inputs)
        for argument, elements in zip(what, PROCESSES[name].inputs, strict=True):
            assert values[channel_of(argument)] == len(elements), (name, argument)
            # A channel that may be empty needs a default: otherwise the process would never start.
            assert argument.endswith(".ifEmpty([])") == argument.startswith(("pictures.", "numbers.")), argument
        for emit, elements in PROCESSES[name].outputs.items():
            values[f"{name}.out.{emit}"] = len(elements)
    left_out = (["fix_galvo_shift"], ["fix_focal_curvature"], ["estimate_illumination", "fix_illumination"])
    dropped = {process for one, skip in zip(left_out, skipped, strict=True) if skip for process in one}
    assert called == [name for name in PROCESSES if name not in dropped]


def channel_of(argument):
    return argument.removesuffix(".ifEmpty([])").removesuffix(".collect()")


@pytest.mark.parametrize("name", PROCESSES)
def test_scripts_use_what_goes_in_and_make_what_comes_out(name):
    one = PROCESSES[name]
    inputs = {given for elements in one.inputs for _, given, _ in elements}
    in_script = set(re.findall(r"\$\{(\w+)\}|(?<=, )(\w+) \?: null", one.script))
    in_script = {name for pair in in_script for name in pair if name}
    staged = {given for elements in one.inputs for _, given, folder in elements if folder}
    assert in_script == inputs - staged
    for elements in one.outputs.values():
        for kind, spelled, _ in elements:
            if kind == "path":
                assert set(re.findall(r"\$\{(\w+)\}", spelled)) <= inputs
            else:
                assert spelled in inputs
    assert one.publish.startswith("${params.output}/")
    assert re.findall(r"^    (\w+):$", one.body, re.MULTILINE) == ["input", "output", "script"]


def test_forks():
    """On a GPU 3 of each process, or as asked; on the CPU none but Nextflow's own."""
    forks = {}
    for name in re.findall(r"withName: (\w+)", CONFIG):
        line = nf.block(CONFIG, f"withName: {name}").strip()
        (forks[name],) = re.fullmatch(
            r"maxForks = params\.device == 'cuda' \? \(params\.gpu_forks \?: (\d+)\) : null", line
        ).groups()
    assert forks == dict.fromkeys(PER_SLICE, "3")  # there is one stack
    assert f"{sum(map(int, forks.values()))} GiB" in GUIDE


def test_profiles():
    profiles = nf.block(CONFIG, "profiles")
    assert re.findall(r"^    (\w+) \{", profiles, re.MULTILINE) == ["standard", "slurm", "docker", "apptainer"]
    for name in ("docker", "apptainer"):
        assert "params.device == 'cuda' ?" in nf.block(profiles, name)
    for name in ("standard", "slurm", "docker", "apptainer"):
        assert f"`{name}`" in GUIDE


SHIM = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" > .argv
"""


def run_task(name, inputs, folder, shims, params):
    """Run a task as Nextflow does: inputs linked into a folder of its own, and the script by ``bash -ue`` in it.

    The commands that bash calls tell their words, and run in this process, which spares their start.
    """
    folder.mkdir(parents=True)
    variables = {given: [] for elements in PROCESSES[name].inputs for _, given, _ in elements}
    for elements, values in zip(PROCESSES[name].inputs, inputs, strict=True):
        for (kind, given, staged), value in zip(elements, values, strict=True):
            for path in [value] if not isinstance(value, list) else value:
                if kind == "path":
                    link = folder / (staged or "*").replace("*", path.name)
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(path, target_is_directory=path.is_dir())
                    variables[given] = path.name
                else:
                    variables[given] = path
    (folder / ".command.sh").write_text("#!/bin/bash -ue\n" + nf.render(PROCESSES[name].script, params, variables))
    path = f"{shims}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["bash", "-ue", ".command.sh"], cwd=folder, env=os.environ | {"PATH": path}, check=True)
    command, *words = (folder / ".argv").read_bytes().decode().split("\0")[:-1]
    before = os.getcwd()
    os.chdir(folder)
    try:
        assert script_of(command).main(words) == 0
    finally:
        os.chdir(before)
    made = {}
    for emit, elements in PROCESSES[name].outputs.items():
        made[emit] = [
            folder / nf.render(spelled, params, variables) if kind == "path" else variables[spelled]
            for kind, spelled, _ in elements
        ]
        for one, (kind, _, _) in zip(made[emit], elements, strict=True):
            assert kind == "val" or one.exists(), one
    return made


def run_workflow(mosaics, work, params):
    """Carry out the workflow's statements one after another; returns what each channel holds."""
    shims = work / "bin"
    shims.mkdir(parents=True)
    for command in COMMANDS:
        (shims / command).write_text(SHIM)
        (shims / command).chmod(0o755)
    found = sorted(mosaics.glob("*.ome.zarr"))
    named = [[one.name.replace(".ome.zarr", ""), one] for one in found]
    slice_config = [] if params["slice_config"] is None else params["slice_config"]
    channels = {"mosaics": named, "shifts": [[params["shifts"]]], "slice_config": [[slice_config]]}
    single = {"shifts", "slice_config"}  # channels of one value, which every task of a process takes
    for name, what in nf.statements(TEXT, params):
        if name == "used":
            listed = channels["check_slices.out.slices"][0][0].read_text().split()
            channels["used"] = [one for one in named if one[0] in listed]
        elif isinstance(what, str) and what.endswith(PATHS):
            channels[name] = [one[1:] for one in channels[what.removesuffix(PATHS)]]
        elif isinstance(what, str):
            if name not in FIRST:
                channels[name] = [] if what == "Channel.empty()" else channels[what]
        else:
            queues = []
            for argument in what:
                items = channels[channel_of(argument)]
                collected = ".collect()" in argument
                queues.append([[[one for item in items for one in item]]] if collected else items)
            shared = [argument in single or ".collect()" in argument for argument in what]
            if all(shared):
                single |= {f"{name}.out.{emit}" for emit in PROCESSES[name].outputs}
            for number in range(max(map(len, queues))):
                inputs = [queue[0 if one else number] for queue, one in zip(queues, shared, strict=True)]
                made = run_task(name, inputs, work / name / str(number), shims, params)
                for emit, values in made.items():
                    channels.setdefault(f"{name}.out.{emit}", []).append(values)
    return channels


def values(path):
    return zarr.open_group(path, mode="r")["0"][...]


def test_the_whole_chain(tmp_path):
    """Two slices through all processes, on the CPU; every result is that of the library's functions, to the bit.

    It takes some seconds: each command and each function runs for each slice, with the pictures.
    """
    spec = BrainSpec(slices=2, faults=USUAL_FAULTS)
    write_brain(spec, tmp_path / "brain")
    mosaics, shifts = tmp_path / "brain" / "mosaics", tmp_path / "brain" / "shifts.csv"
    asked = {"device": "cpu", "resolution": "10 15 15", "s_xy": "5", "overlap": "0.25", "levels": "2"}
    asked |= {"shifts": shifts, "slicing_interval_mm": "0.2"}
    channels = run_workflow(mosaics, tmp_path / "work", PARAMS | GIVEN | asked)

    here, method = tmp_path / "direct", SurfaceMethod(s_xy=5, s_z=2.0)
    outputs = {
        "fix_galvo_shift.out.mosaic": "galvo", "resample_mosaic_grid.out.mosaic": "resampled",
        "fix_focal_curvature.out.mosaic": "flat",
        "fix_illumination.out.mosaic": "even", "find_tissue_interface.out.surface": "surface",
        "aip.out.projection": "aip", "stitch_3d.out.volume": "stitched", "compensate_attenuation.out.slice": "slices",
    }  # fmt: skip
    for kind in outputs.values():
        (here / kind).mkdir(parents=True)
    for number in range(2):
        name = f"slice_z{number:02d}"
        steps = {kind: here / kind / f"{name}.ome.zarr" for kind in outputs.values()}
        fix_galvo_shift(mosaics / f"{name}.ome.zarr", steps["galvo"])
        resample_mosaic_grid(steps["galvo"], steps["resampled"], (10, 15, 15), levels=2)
        correct_mosaic(steps["resampled"], steps["flat"], (32, 32), method, FocalCorrection(interpolate=True), levels=2)
    fields = estimate_illumination(sorted((here / "flat").iterdir()))
    for number in range(2):
        name = f"slice_z{number:02d}"
        steps = {kind: here / kind / f"{name}.ome.zarr" for kind in outputs.values()}
        fix_illumination(steps["flat"], steps["even"], fields=fields, levels=2)
        find_mosaic_surface(steps["even"], steps["surface"], method)
        project_mosaic(steps["even"], steps["aip"])
        positions = estimate_positions(steps["even"], options=Positions(0.25))
        stitch_mosaic(steps["even"], positions, steps["stitched"], levels=2)
    stitched = {number: here / "stitched" / f"slice_z{number:02d}.ome.zarr" for number in range(2)}
    light = estimate_brain_light(stitched, interval_um=200.0)
    for number in range(2):
        name = f"slice_z{number:02d}"
        steps = {kind: here / kind / f"{name}.ome.zarr" for kind in outputs.values()}
        compensate_attenuation(steps["stitched"], steps["slices"], light=light, levels=2)
        for output, kind in outputs.items():
            made = channels[output][number]
            assert len(made) == 1 or made[0] == name
            assert values(made[-1]).size
            assert np.array_equal(values(made[-1]), values(steps[kind])), output
        for picture in ("fix_focal_curvature", "find_tissue_interface"):
            assert channels[f"{picture}.out.picture"][number][0].read_bytes().startswith(b"\x89PNG")
    register_slices(here / "slices", here / "transforms.json", Alignment(interval_mm=0.2), shifts=shifts)
    stack_registered(here / "slices", here / "transforms.json", here / "stack.ome.zarr", levels=2)
    (volume,) = channels["stack.out.volume"][0]
    assert np.array_equal(values(volume), values(here / "stack.ome.zarr"))
    assert values(volume).std() > 0
    text = channels["report.out.page"][0][0].read_text()
    # Inputs are links, which a report leaves out unless it is told to follow them.
    for name in ("compensated/slice_z00_compensated", "compensated/slice_z01_compensated", "stack/stack"):
        assert f"{name}.ome.zarr" in text
    assert "Positions of tiles" in text
    assert "surface/slice_z01_surface.png" in text
    assert text.count("data:image/") >= 7


def test_slices_and_corrections_left_out(tmp_path):
    """A slice that the table leaves out enters no process, and shifts are summed across it."""
    spec = BrainSpec(slices=3, faults=USUAL_FAULTS)
    write_brain(spec, tmp_path / "brain")
    (tmp_path / "slice_config.csv").write_text("slice_id,use\n00,true\n01,false\n02,true\n")
    asked = dict.fromkeys(SKIPS, True) | {
        "device": "cpu", "s_xy": "5", "overlap": "0.25", "slicing_interval_mm": "0.2",
        "shifts": tmp_path / "brain/shifts.csv", "slice_config": tmp_path / "slice_config.csv",
    }  # fmt: skip
    channels = run_workflow(tmp_path / "brain/mosaics", tmp_path / "work", PARAMS | GIVEN | asked)
    assert [name for name, _ in channels["resample_mosaic_grid.out.mosaic"]] == ["slice_z00", "slice_z02"]
    assert "fix_illumination.out.mosaic" not in channels
    placed = json.loads(channels["register_slices.out.transforms"][0][0].read_text())
    assert [one["number"] for one in placed["slices"]] == [0, 2]
    assert values(channels["stack.out.volume"][0][0]).std() > 0
