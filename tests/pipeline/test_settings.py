"""If this fails, a run's file is read as something else than it says, or its faults are not named."""

import json

import pytest

from linumpy.pipeline.options import OPTIONS, Resample
from linumpy.pipeline.settings import read_run
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
        (TOML + "attenuation.focus_um = 1", r"attenuation: 'focus_um' is no option of this stage any more: .*\[beam\]"),
        (TOML + "illumination.dark = true", r"'dark' is no option of this stage any more: .*\[shading\]"),
        (TOML + "positions.min_confidence = 0.3", "any more: use min_evidence"),
        (TOML + "register.min_correlation = 0.3", "any more: use min_evidence"),
        ("mosaics =", "run.toml: Invalid value"),
    ],
)
def test_what_no_run_can_be(tmp_path, text, message):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path / "run.toml")


def test_files_of_other_kinds(tmp_path):
    (tmp_path / "run.txt").write_text(TOML)
    with pytest.raises(ValueError, match=r"a \.toml, \.yaml"):
        read_run(tmp_path / "run.txt")
    with pytest.raises(FileNotFoundError):
        read_run(tmp_path / "run.toml")


def test_each_stage_has_a_record_in_the_same_order():
    assert list(STAGES) == list(OPTIONS)
