"""If this fails, the workflow names what does not exist, or its commands make wrong images."""

import os
import re
import shlex
import subprocess
import tomllib

import numpy as np
import pytest
import zarr

from linumpy.mosaic.aip import project_mosaic
from linumpy.mosaic.alignment.register import Alignment, register_slices
from linumpy.mosaic.attenuation import compensate_attenuation
from linumpy.mosaic.beam import estimate_brain_light
from linumpy.mosaic.common_space import stack_registered
from linumpy.mosaic.focal import correct_mosaic
from linumpy.mosaic.galvo import fix_galvo_shift
from linumpy.mosaic.grid import resample_mosaic_grid
from linumpy.mosaic.illumination import fix_illumination
from linumpy.mosaic.stitching import stitch_mosaic
from linumpy.mosaic.surface import SurfaceMethod, find_mosaic_surface
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
    assert list(PROCESSES) == [*PER_SLICE[:-1], "estimate_beam", PER_SLICE[-1], "register_slices", "stack", "report"]


@pytest.mark.parametrize("use_gpu", [True, False])
@pytest.mark.parametrize("name", PROCESSES)
def test_commands_and_options_exist(name, use_gpu):
    """Parsed by the script's own parser, which refuses what it does not know."""
    given = {"mosaic": "a.ome.zarr", "volume": "b.ome.zarr", "shifts": "s.csv", "slices": "unused"}
    variables = given | {"name": "slice_z00", "positions": "p.json", "transforms": "t.json", "beam": "b.json"}
    command, *words = shlex.split(rendered(name, variables, use_gpu=use_gpu, tile_shape="24 24", resolution="10 15 15"))
    assert COMMANDS[command].split(":")[0].removeprefix("linumpy_scripts.") in {
        one.stem for one in (ROOT / "scripts").iterdir()
    }
    parser = script_of(command)._build_arg_parser()
    assert parser.parse_args(words).use_gpu is use_gpu
    for word in words:
        assert not word.startswith("--") or word in parser._option_string_actions, word  # no abbreviation
    assert "${device()}" in PROCESSES[name].script


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
    assert "--tile_shape" not in rendered("resample_mosaic_grid", variables)
    assert "--tile_shape 24 25" in rendered("resample_mosaic_grid", variables, tile_shape="24 25")


def test_channels_meet():
    """Each process is called once, with as many channels as it has inputs, of as many elements, made before."""
    made, rest = nf.calls(TEXT)
    assert [name for name, _ in made] == list(PROCESSES)
    values = {"mosaics": 2, "shifts": 1}
    assert [line.split(" = ")[0] for line in rest if " = " in line] == list(values)
    for name, arguments in made:
        assert len(arguments) == len(PROCESSES[name].inputs)
        for argument, elements in zip(arguments, PROCESSES[name].inputs, strict=True):
            assert values[argument.removesuffix(".collect()")] == len(elements), (name, argument)
        for emit, elements in PROCESSES[name].outputs.items():
            values[f"{name}.out.{emit}"] = len(elements)


@pytest.mark.parametrize("name", PROCESSES)
def test_scripts_use_what_goes_in_and_make_what_comes_out(name):
    one = PROCESSES[name]
    inputs = {given for elements in one.inputs for _, given, _ in elements}
    in_script = set(re.findall(r"\$\{(\w+)\}", one.script))
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
            r"maxForks = params\.use_gpu \? \(params\.gpu_forks \?: (\d+)\) : null", line
        ).groups()
    assert forks == dict.fromkeys(PER_SLICE, "3")  # there is one stack
    assert f"{sum(map(int, forks.values()))} GiB" in GUIDE


def test_profiles():
    profiles = nf.block(CONFIG, "profiles")
    assert re.findall(r"^    (\w+) \{", profiles, re.MULTILINE) == ["standard", "slurm", "docker", "apptainer"]
    for name in ("docker", "apptainer"):
        assert "params.use_gpu ?" in nf.block(profiles, name)
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
    variables = {}
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


def run_workflow(mosaics, shifts, work, params):
    """Carry out the workflow's calls one after another; returns what each channel holds."""
    shims = work / "bin"
    shims.mkdir(parents=True)
    for command in COMMANDS:
        (shims / command).write_text(SHIM)
        (shims / command).chmod(0o755)
    found = sorted(mosaics.glob("*.ome.zarr"))
    channels = {"mosaics": [[one.name.replace(".ome.zarr", ""), one] for one in found], "shifts": [[shifts]]}
    single = {"shifts"}  # channels of one value, which every task of a process takes
    for name, arguments in nf.calls(TEXT)[0]:
        queues = []
        for argument in arguments:
            items = channels[argument.removesuffix(".collect()")]
            if argument.endswith(".collect()"):
                queues.append([[[one for item in items for one in item]]])
            else:
                queues.append(items)
        shared = [argument in single or argument.endswith(".collect()") for argument in arguments]
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


def test_the_lines_that_make_the_first_channels():
    """What :func:`run_workflow` does in their place."""
    _, rest = nf.calls(TEXT)
    assert rest[-3:-1] == [
        "mosaics = Channel.fromPath(\"${params.input}/*.ome.zarr\", type: 'dir', checkIfExists: true)"
        ".map { mosaic -> tuple(mosaic.name.replace('.ome.zarr', ''), mosaic) }",
        "shifts = file(params.shifts, checkIfExists: true)",
    ]
    assert rest[-1] == ""


def test_the_whole_chain(tmp_path):
    """Two slices through all processes, on the CPU; every result is that of the library's functions, to the bit.

    It takes some seconds: each command and each function runs for each slice, with the pictures.
    """
    spec = BrainSpec(slices=2, faults=USUAL_FAULTS)
    write_brain(spec, tmp_path / "brain")
    mosaics, shifts = tmp_path / "brain" / "mosaics", tmp_path / "brain" / "shifts.csv"
    asked = {"use_gpu": False, "resolution": "10 15 15", "s_xy": "5", "overlap": "0.25", "levels": "2"}
    channels = run_workflow(mosaics, shifts, tmp_path / "work", PARAMS | GIVEN | asked | {"slicing_interval_mm": "0.2"})

    here, method = tmp_path / "direct", SurfaceMethod(5, 2.0)
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
        correct_mosaic(steps["resampled"], steps["flat"], (32, 32), method, levels=2)
        fix_illumination(steps["flat"], steps["even"], levels=2)
        find_mosaic_surface(steps["even"], steps["surface"], method)
        project_mosaic(steps["even"], steps["aip"])
        positions = estimate_positions(steps["even"], overlap=0.25)
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
        for picture in ("fix_focal_curvature", "fix_illumination", "find_tissue_interface"):
            assert channels[f"{picture}.out.picture"][number][0].read_bytes().startswith(b"\x89PNG")
    register_slices(here / "slices", here / "transforms.json", Alignment(0.2), shifts=shifts)
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
