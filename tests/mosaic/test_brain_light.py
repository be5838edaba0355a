"""If this fails, the slices of a brain differ in brightness, are clipped, or are spoilt where nothing can be told."""

import json
import math

import numpy as np
import pytest

from linumpy.correction.attenuation import Beam
from linumpy.correction.beam import block_profile
from linumpy.errors import MetadataError, SourceError
from linumpy.mosaic.attenuation import compensate_attenuation
from linumpy.mosaic.beam import Sample, _profiles, estimate_brain_light, read_brain_light, sample_of
from linumpy.mosaic.io.image import open_mosaic
from linumpy.mosaic.options import AttenuationMethod
from linumpy.testing import brain
from linumpy.write.writer import write_omezarr
from tests.support.script_runs import load
from tests.support.stores import values_of

FAULTS = brain.Faults(attenuation_per_mm=2.5, water_um=60.0, tilt=(0.03, 0.02), looks=8, dark=0.01)
SPEC = brain.BrainSpec(slices=4, tiles=(1, 1), tile_shape=(50, 64, 64), radius=0.9, agarose=0.08, dtype="uint16")


def brain_with(**faults):
    return brain.BrainSpec(**vars(SPEC) | {"faults": brain.Faults(**vars(FAULTS) | faults)})


def write(folder, spec, factor=1.0):
    folder.mkdir()
    paths = {}
    for number in range(spec.slices):
        voxels = brain.tile(spec, number, 0, 0)
        if factor != 1:
            voxels = np.clip(np.rint(voxels * factor), 0, np.iinfo(voxels.dtype).max).astype(voxels.dtype)
        paths[number] = write_omezarr(folder / f"slice_z{number:02}.ome.zarr", voxels, (10.0,) * 3, chunks=(50, 32, 32))
    return paths


def against_truth(spec, number, voxels):
    """Return the slope along depth in 1/mm (of both ways), and the brightness, of the ratio to the known volume."""
    truth = brain.truth_attenuation(spec, number, 0, 0) * spec.peak / spec.faults.attenuation_per_mm
    z = np.arange(len(voxels))[:, None, None] - brain.truth_surface(spec, number, 0, 0)
    tissue = brain.truth_tissue(spec, number, 0, 0) & (z > 2) & (z < 35) & (truth > 0.3 * spec.peak)
    ratio = np.log(np.maximum(voxels[tissue], 1) / truth[tissue])
    return np.polyfit(np.broadcast_to(z, voxels.shape)[tissue] / 100, ratio, 1)[0] / 2, np.median(ratio)


@pytest.mark.parametrize("beam", [None, (150.0, 250.0)])
def test_slices_of_a_brain_are_alike(tmp_path, beam):
    """Better than doing nothing: tissue is as bright at all depths and in all slices, and nothing is clipped."""
    spec = brain_with() if beam is None else brain_with(focus_um=beam[0], rayleigh_um=beam[1])
    paths = write(tmp_path / "in", spec)
    light = estimate_brain_light(paths, tmp_path / "beam.json", interval_um=200.0)
    assert read_brain_light(tmp_path / "beam.json") == light
    # The few blocks of this tissue explain half of the beam: too little to tell it from the attenuation.
    assert light.beam_from == "none"
    assert (light.dtype, light.left_out, light.warnings) == ("uint16", "", ())
    told, before, after = [], [], []
    for number, path in paths.items():
        out, report = tmp_path / f"{number}.zarr", tmp_path / f"{number}.json"
        compensate_attenuation(path, out, light=tmp_path / "beam.json", report=report)
        told.append(json.loads(report.read_text()))
        before.append(against_truth(spec, number, values_of(path)))
        after.append(against_truth(spec, number, values_of(out)))
    slopes, levels = np.array(before).T, np.array(after).T
    assert np.abs(levels[0]).max() < (0.35 if beam is None else 0.6) < 1.5 < np.abs(slopes[0]).min()
    assert math.exp(np.ptp(levels[1])) < 1.15
    assert {(part["clipped"], part["left_out"], tuple(part["warnings"])) for part in told} == {(0.0, "", ())}
    assert abs(np.mean([part["gain_at_surface"] for part in told]) - 1) < 0.02
    assert max(part["max_gain"] for part in told) <= 50
    # The tissue of a single slice is not the same at all depths, so its own profile need not be flat.
    remaining, found = ([part[f"{name}_per_mm"] for part in told] for name in ("remaining", "attenuation"))
    assert np.abs(remaining).max() < 0.5 * min(found)
    assert abs(np.mean(remaining)) < 0.1 * np.mean(found)


def test_what_cannot_be_told_is_left_alone(tmp_path, caplog):
    """Noise, tissue without attenuation, agarose, and tissue as dim as the background: voxels stay as they are."""
    rng = np.random.default_rng(0)
    paths = write(tmp_path / "in", brain_with())
    light = estimate_brain_light(paths, interval_um=200.0)
    noise = rng.gamma(8, 100 / 8, (50, 40, 40))
    for name, voxels, parameters in (
        ("noise", noise, None), ("brighter", noise * np.linspace(1, 3, 50)[:, None, None], light),
        ("agarose", noise * np.exp(-0.002 * np.arange(50))[:, None, None], light), ("black", 0 * noise, light),
    ):  # fmt: skip
        source = write_omezarr(tmp_path / name, voxels.astype("u2"), (10.0,) * 3)
        caplog.clear()
        used = compensate_attenuation(source, tmp_path / f"{name}.out", light=parameters)
        np.testing.assert_array_equal(values_of(tmp_path / f"{name}.out"), voxels.astype("u2"))
        assert used.left_out
        assert used.gain_at_surface == 1
        assert used.warnings[0] in caplog.text
    # A brain that tells nothing says so, and all of its slices are left alone.
    nothing = estimate_brain_light({0: tmp_path / "noise", 1: tmp_path / "brighter"}, tmp_path / "none.json")
    assert nothing.left_out
    assert len(nothing.warnings) == 1
    used = compensate_attenuation(paths[0], tmp_path / "alone", light=tmp_path / "none.json")
    assert used.left_out == nothing.left_out
    np.testing.assert_array_equal(values_of(tmp_path / "alone"), values_of(paths[0]))
    # Who passes the attenuation below the range wants it.
    used = compensate_attenuation(paths[0], tmp_path / "given", AttenuationMethod(end_per_mm=2.5))
    assert not used.left_out


def test_a_dtype_that_holds_the_values(tmp_path, caplog):
    """Slices whose surface fills the range of their dtype become float32, all of them; else clipping is told."""
    spec = brain_with(attenuation_per_mm=4.0)
    paths = write(tmp_path / "in", spec, 18.0)
    light = estimate_brain_light(paths, interval_um=200.0)
    assert light.dtype == "float32"
    # Voxels exceed the range until they are scaled to the brightness of the surface.
    assert estimate_brain_light(write(tmp_path / "dimmer", spec, 3.7), interval_um=200.0).dtype == "uint16"
    used = compensate_attenuation(paths[1], tmp_path / "a", light=light)
    values = values_of(tmp_path / "a")
    assert values.dtype == np.float32
    assert values.max() > 65535
    assert "float32" in used.warnings[0]
    used = compensate_attenuation(paths[1], tmp_path / "b", light=light, dtype="uint16")
    clipped = values_of(tmp_path / "b")
    assert math.isclose(used.clipped, np.mean(clipped[clipped > 0] == 65535), rel_tol=1e-6)
    assert used.clipped > 1e-3
    assert "--dtype float32" in used.warnings[0]
    assert used.warnings[0] in caplog.text


def test_lines_lie_in_their_quarters(tmp_path):
    """The voxels of each quarter have its number."""
    y, x = np.indices((64, 64)) // 32
    path = write_omezarr(tmp_path / "i", np.stack([2 * y + x] * 4).astype("u1"), (10.0,) * 3, chunks=(4, 16, 16))
    sample = sample_of(open_mosaic(path), "cpu")
    assert np.array_equal(sample.lines[0], sample.blocks)
    assert np.bincount(sample.blocks).min() > 0


def test_profiles_are_those_of_tissue():
    """Agarose in two thirds of the slice changes the logarithms little; as tissue it would change them by 0.7."""
    spec = brain.BrainSpec(**vars(brain_with(tilt=(0.0, 0.0))) | {"radius": 0.6, "agarose": 0.3})
    lines = brain.tile(spec, 0, 0, 0).astype("f4").reshape(50, -1)
    known = brain.truth_tissue(spec, 0, 0, 0).any(axis=0).ravel()
    expected = block_profile(lines[:, known], 0, 0, 10.0)
    (found,) = _profiles(0, Sample(lines, np.zeros(known.size, int)), 10.0)
    lit = slice(max(found.first, expected.first), min(found.stop, expected.stop))
    assert lit.stop - lit.start > 30
    assert np.abs(found.logs - expected.logs)[lit].max() < 0.3


def test_a_beam_that_is_given(tmp_path):
    spec = brain_with(focus_um=150.0, rayleigh_um=250.0)
    paths = write(tmp_path / "in", spec)
    method = AttenuationMethod(focus_um=150.0, rayleigh_um=250.0, max_gain=7.0)
    light = estimate_brain_light(paths, tmp_path / "beam.json", method)
    assert (light.beam, light.beam_from, light.max_gain) == (Beam(150.0, 250.0), "options", 7.0)
    used = compensate_attenuation(paths[0], tmp_path / "a", light=light)
    source, out = values_of(paths[0]), values_of(tmp_path / "a")
    assert (out <= 7.0 * source + 1).all()
    assert used.max_gain == 7
    none = estimate_brain_light(paths, method=AttenuationMethod(focus_um=0.0, rayleigh_um=math.inf))
    assert (none.beam, none.beam_from) == (Beam(), "options")


def test_the_commands(tmp_path, capsys):
    write(tmp_path / "in", brain_with())
    estimate, correct = load("linum_estimate_beam").main, load("linum_compensate_attenuation").main
    beam, source, out = (str(tmp_path / name) for name in ("beam.json", "in/slice_z01.ome.zarr", "out.zarr"))
    assert estimate([str(tmp_path / "in"), beam, "--slicing-interval-mm", "0.2", "--device=cpu"]) == 0
    assert "no beam" in capsys.readouterr().out
    json_file = tmp_path / "out.json"
    assert correct([source, out, "--beam", beam, "--json", str(json_file), "--device=cpu"]) == 0
    assert "at the surface" in capsys.readouterr().out
    assert json.loads(json_file.read_text())["left_out"] == ""
    assert correct([source, out, "--beam", beam, "--end", "2", "--overwrite", "--device=cpu"]) == 2
    assert correct([source, out, "--focus", "2", "--overwrite", "--device=cpu"]) == 2
    assert estimate([str(tmp_path / "in"), beam, "--device=cpu"]) == 2  # exists
    json_file.write_text("{}")
    assert correct([source, out, "--beam", str(json_file), "--overwrite", "--device=cpu"]) == 2
    assert "linum-estimate-beam" in capsys.readouterr().err


def test_what_is_refused(tmp_path):
    a, b = (
        write_omezarr(tmp_path / name, np.ones((9, 8, 8), "u2"), (step, 10, 10)) for name, step in (("a", 5), ("b", 6))
    )
    with pytest.raises(MetadataError, match="different spacings"):
        estimate_brain_light({0: a, 1: b})
    with pytest.raises(ValueError, match="at least one"):
        estimate_brain_light({})
    with pytest.raises(ValueError, match="both or none"):
        AttenuationMethod(rayleigh_um=100.0)
    (tmp_path / "bad.json").write_text('{"beam": {"focus_um": "x"}}')
    with pytest.raises(SourceError, match="no beam of a brain"):
        read_brain_light(tmp_path / "bad.json")
