"""If this fails, the table of many brains does not show the errors that they have, with and without a stage."""

import dataclasses
import json

import numpy as np
import pytest

from benchmarks.brains import WITHOUT, run_without, table
from linumpy.demo_brain import run_of
from linumpy.mosaic.alignment.transforms import read_transforms
from linumpy.pipeline.runner import run_pipeline
from linumpy.pipeline.stages import STAGES
from linumpy.testing.brain import BrainSpec, draw_brain
from linumpy.testing.brain_errors import errors_of, motor_matrix
from linumpy.testing.brain_files import write_brain


def test_medians_worst_and_failures():
    def brain(seed, value, nothing, **further):
        error = {"stage": "positions", "what": "RMS, of 3, worst", "unit": "µm", "value": value, "nothing": nothing}
        return {"kind": "full", "seed": seed, "errors": [error | {"best": 0.0}], **further}

    peer = {"peer": "skimage", "stage": "positions", "what": "RMS, worst", "value": 6.5}
    brains = [brain(4, 1.0, 5.0, peers=[peer]), brain(5, 3.0, 4.0), brain(6, 9.0, 8.0)]
    brains.append({"kind": "full", "seed": 7, "errors": [], "failed": "ValueError: no"})
    head, _, row, *rest = table(brains).splitlines()
    assert head.endswith("better in | skimage |")
    assert row == "| full | positions | RMS, worst, µm | 3 | 9 | 6 | 5 | 8 | 2 of 3 | 6.5 (worst 6.5) |"
    assert rest[1:] == ["Failed, 1 of 4:", "- full, seed 7: ValueError: no"]


@pytest.mark.slow
def test_the_end_of_a_run_without_a_stage(tmp_path):
    geometry = BrainSpec(slices=3, tiles=(2, 2), tile_shape=(24, 64, 64), interval_um=120.0)
    spec = draw_brain(1, "full", geometry=geometry)
    write_brain(spec, tmp_path / "brain")
    leave_out = ("aip", "report", "focal", "shading", "illumination", "surface", "beam", "attenuation")
    run = dataclasses.replace(run_of(spec, tmp_path), skip=tuple(stage for stage in leave_out if stage in STAGES))
    run_pipeline(run)
    before = dict(STAGES)
    for name in ("positions", "register"):
        run_without(spec, run, name, tmp_path / "without" / name)
        assert before == STAGES
        assert (
            errors_of(spec, tmp_path / "without" / name, ["stack"])[0].value
            != errors_of(spec, run.output, ["stack"])[0].value
        )
    (rms, _) = errors_of(spec, tmp_path / "without" / "positions", ["positions"])
    assert abs(rms.value - rms.nothing) < 1e-6
    for part in read_transforms(tmp_path / "without/register/register/transforms.json").slices:
        assert np.allclose(np.array(part.matrix)[1:, 1:], motor_matrix(spec, part.number, 0))
    told = json.loads((tmp_path / "without" / "register" / "pipeline.json").read_text())
    assert [stage["name"] for stage in told["stages"]] == ["positions", "stitch", "register", "stack"]
    assert set(WITHOUT["all of these"]) >= {"focal", "illumination", "positions", "attenuation", "register"}
