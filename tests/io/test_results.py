"""If this fails, the result of a stage is no valid JSON, or the report misses what a stage says of it."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from linumpy.correction.attenuation import Beam, DeepLight
from linumpy.correction.beam import BeamEstimate
from linumpy.correction.illumination import Evidence, Illumination
from linumpy.io.output.results import notes_of, read_result, write_result
from linumpy.mosaic.beam import BrainLight, read_brain_light
from linumpy.mosaic.illumination import write_fields
from linumpy.quality.findings import notes
from linumpy.registration.position_files import write_positions
from linumpy.registration.positions import AcquisitionModel, TilePair, TilePositions


def strict(path):
    """Parse JSON as other programs do, which know neither NaN nor Infinity."""

    def refuse(name):
        raise AssertionError(f"{path.name} has {name}, which JSON does not have")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_a_result_with_numbers_that_json_has_not(tmp_path):
    path = tmp_path / "r.json"
    write_result(path, {"a": math.nan, "b": [1.5, math.inf, {"c": -math.inf}]}, warnings=("Größer.",), left_out="dark")
    assert strict(path) == {"a": None, "b": [1.5, None, {"c": None}], "warnings": ["Größer."], "left_out": "dark"}
    assert notes_of(read_result(path)) == (("Größer.",), "dark")
    with pytest.raises(FileExistsError):
        write_result(path, {})
    path.write_text("[1]")
    with pytest.raises(ValueError, match="no JSON object"):
        read_result(path)


def light(**notes):
    beam = Beam(rayleigh_um=math.inf)
    return BrainLight(
        beam=beam, beam_from="none", estimate=BeamEstimate(beam=beam), background=1.0, end_per_mm=2.0,
        deep=DeepLight(level=0.5), slices=2, surface=3.0, scale=1.0, max_gain=4.0, dtype="uint16", **notes,
    )  # fmt: skip


def positions(**notes):
    pair = TilePair(
        fixed=(0, 0), moving=(0, 1), shift=(0.0, 9.0), confidence=0.1, residual=math.inf, rejected="no evidence"
    )
    return TilePositions(
        positions=np.array([[[0.0, 0], [0, 9]]]), present=np.ones((1, 2), bool), tile_shape=(12, 12),
        model=AcquisitionModel((0, 0), (0, 9)), pairs=(pair,), **notes,
    )  # fmt: skip


def fields(left_out):
    evidence = Evidence(tiles=1, independent_tiles=1.0, coverage=1.0, unevenness=0.1, error=math.inf, left_out=left_out)
    flat = np.ones((2, 3, 3), np.float32)
    return Illumination(flat=flat, dark=0 * flat[0], baseline=np.ones(1, np.float32), evidence=evidence)


def test_all_stages_write_one_form_which_the_report_reads(tmp_path):
    names = [tmp_path / f"{name}.json" for name in ("beam", "positions", "shading")]
    reason = "there is no tissue"
    dark = light(warnings=("Nothing is done: there is no tissue.",), left_out=reason)
    write_result(names[0], asdict(dark), warnings=dark.warnings, left_out=reason)
    write_positions(names[1], positions(warnings=("All tiles are placed by the grid.",)), "mosaic", (5.0, 5.0))
    write_fields(fields(reason), tmp_path / "f.npz", names[2])
    for path, is_left_out in zip(names, (True, False, True), strict=True):
        document = strict(path)
        assert list(document)[-2:] == ["warnings", "left_out"]
        warnings, left_out = notes_of(document)
        assert len(warnings) == 1
        assert left_out == (reason if is_left_out else "")
        (finding,) = notes(document)
        assert (finding.text, finding.left_out) == (warnings[0], is_left_out)
    assert read_brain_light(names[0]) == dark
