"""If this fails, a run's file is read as something else than it says, or its faults are not named."""

import dataclasses
import json
import re
from typing import Annotated, Literal

import numpy as np
import pytest

from linumpy.declared import Count, Range, Share, check_value
from linumpy.pipeline.settings import OPTIONS, Resample, Run, read_run
from linumpy.pipeline.stages import STAGES

ASKED = {
    "mosaics": "in", "output": "/abs/out", "slicing_interval_mm": 0.2, "skip": ["surface"], "levels": 2,
    "resample": {"new_spacing": [5.0, 10.0, 10.0]}, "focal": {"s_xy": 3},
}  # fmt: skip
TOML = """
mosaics = "in"
output = "/abs/out"
slicing_interval_mm = 0.2
skip = ["surface"]
levels = 2
resample.new_spacing = [5.0, 10.0, 10.0]
focal = {s_xy = 3}
"""


def test_one_run_in_three_languages(tmp_path):
    yaml = pytest.importorskip("yaml")
    texts = {"toml": TOML, "json": json.dumps(ASKED), "yaml": yaml.safe_dump(ASKED), "yml": yaml.safe_dump(ASKED)}
    for suffix, text in texts.items():
        (tmp_path / f"run.{suffix}").write_text(text)
    runs = [read_run(tmp_path / f"run.{suffix}") for suffix in texts]
    assert all(run == runs[0] for run in runs)
    run = runs[0]
    assert (run.mosaics, str(run.output), run.shifts) == (tmp_path / "in", "/abs/out", None)
    assert (run.skip, run.levels) == (("surface",), 2)
    assert run.options_of("resample") == Resample((5.0, 10.0, 10.0))
    assert (run.options_of("focal").s_xy, run.options_of("focal").s_z) == (3, 2.0)
    assert run.options_of("aip") == OPTIONS["aip"]()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('mosaics = "in"', "lacks output, slicing_interval_mm"),
        (TOML + "codecs = 3", "'codecs' is no key: there are mosaics, output"),
        (TOML + "[stack]\nrange = 1", "stack: 'range' is no option of this stage: there are"),
        (TOML + "stack = 3", "stack: a table of"),
        (TOML.replace('"surface"', '"curvature"'), "skip: 'curvature' is no stage: there are galvo, resample"),
        (TOML.replace("0.2", "-0.2"), "slicing_interval_mm=-0.2"),
        (TOML.replace('["surface"]', '"surface"'), r"skip='surface': pass a list of stages"),
        (TOML.replace("surface", "shading"), "skip has 'shading', but 'illumination' needs its results"),
        (TOML.replace("surface", "positions"), "skip has 'positions', but 'stitch' needs"),
        (TOML.replace("surface", "stitch"), "skip has 'stitch', but 'beam' needs"),
        (TOML.replace("surface", "register"), "skip has 'register', but 'stack' needs"),
        (TOML + "attenuation.focus_um = 1", "attenuation: 'focus_um' is no option of this stage: there are dtype"),
        ("mosaics =", "run.toml: Invalid value"),
        (TOML + 'positions.overlap = "0.2"', r"run.toml: positions: overlap='0\.2': pass a number above 0 and"),
        (TOML + "positions.overlap = 0.7", r"positions: overlap=0\.7: pass a number above 0 and not above 0\.5"),
        (TOML + "positions.min_evidence = nan", "min_evidence=nan: pass a number not below 0 and not above 1"),
        (TOML + 'attenuation.dtype = "uint12"', "dtype='uint12': pass 'float32' or 'uint8' or 'uint16'"),
        (TOML + "surface.s_z = -2", "surface: s_z=-2: pass a number above 0"),
        (TOML + "surface.s_xy = 2.5", r"surface: s_xy=2\.5: pass a whole number not below 1"),
        (TOML + "register.reach = true", "register: reach=True: pass a whole number"),
        (TOML + "register.depth_mm = 0", "register: depth_mm=0: pass a number above 0"),
        (TOML + 'stitch.blending = "linear"', "blending='linear': pass 'distance' or 'diffusion'"),
        (TOML + "shading.smoothness = 0.0", r"shading: smoothness=0\.0: pass a number above 0"),
        (TOML + "beam.max_gain = -1", "beam: max_gain=-1: pass a number above 0"),
        (TOML + "stack.new_spacing = [10, 10]", r"new_spacing=\(10, 10\): pass a number above 0 or 3 values"),
        (TOML.replace("levels = 2", "levels = 0"), "levels=0: pass a whole number not below 1"),
        (TOML.replace("levels = 2", 'codec = "zip"'), "codec='zip': choose one of zstd"),
        (TOML.replace("levels = 2", "tile_shape = [512]"), r"tile_shape=\(512,\): pass 2 values, each a whole number"),
    ],
)
def test_what_no_run_can_be(tmp_path, text, message):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path / "run.toml")


class Strange:
    """A value that no option can have."""


@pytest.mark.parametrize(
    ("stage", "name"), [(stage, member.name) for stage, kind in OPTIONS.items() for member in dataclasses.fields(kind)]
)
def test_each_option_of_each_stage_is_checked_when_it_is_given(stage, name):
    """Here and not hours later, when the stage begins."""
    far = "-1" if name in ("focus_um", "columns") else -1e9
    for value in (Strange(), [1.0], "no such choice", far, float("nan")):
        if isinstance(value, float) and name == "background":
            continue
        with pytest.raises(ValueError, match=f"^{name}="):
            OPTIONS[stage](**{name: value})
    default = getattr(OPTIONS[stage](), name)
    assert getattr(OPTIONS[stage](**{name: default}) if default is not None else OPTIONS[stage](), name) == default


def test_the_options_of_another_stage_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no options of focal: pass Focal"):
        Run(mosaics=tmp_path, output=tmp_path, slicing_interval_mm=0.2, options={"focal": Resample()})


@pytest.mark.parametrize(
    ("declaration", "good", "bad"),
    [
        (Annotated[float, Range(above=0, infinite=True)], [1, 1e-9, float("inf"), np.float32(2)], [0, -1, True, "1"]),
        (Annotated[float, Range()], [-5.0, 0], [float("inf"), float("nan"), None]),
        (Share | None, [None, 0, 1, 0.5], [1.01, -0.01, False]),
        (Count, [1, np.int64(7)], [0, 1.0, "1", None]),
        (Literal["a", "b"], ["a", "b"], ["c", None, 1]),
        (tuple[Count, Count] | None, [(1, 2), None], [(1,), (1, 0), [1, 2], 1]),
        (bool, [True, False], [0, 1, None]),
    ],
)
def test_declarations(declaration, good, bad):
    for value in good:
        check_value("it", value, declaration)
    for value in bad:
        with pytest.raises(ValueError, match=f"^it={re.escape(repr(value))}: pass "):
            check_value("it", value, declaration)


def test_files_of_other_kinds(tmp_path):
    (tmp_path / "run.txt").write_text(TOML)
    with pytest.raises(ValueError, match=r"a \.toml, \.yaml"):
        read_run(tmp_path / "run.txt")
    with pytest.raises(FileNotFoundError):
        read_run(tmp_path / "run.toml")


@pytest.mark.parametrize("kind", ["toml", "json", "yaml"])
def test_a_broken_file_is_named(tmp_path, kind):
    path = tmp_path / f"run.{kind}"
    path.write_text("a = [")
    if kind == "yaml":
        pytest.importorskip("yaml")
        path.write_text("a: [")
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: "):
        read_run(path)


def test_each_stage_has_a_record_in_the_same_order():
    assert list(STAGES) == list(OPTIONS)
