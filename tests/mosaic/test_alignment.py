"""If this fails, a pair is trusted or thrown away by a threshold, or a user is not told where a slice comes from."""

import csv
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from linumpy.mosaic.alignment.register import register_slices
from linumpy.mosaic.alignment.transforms import read_transforms
from linumpy.mosaic.io.slice_table import SHIFT_COLUMNS
from linumpy.mosaic.options import Alignment
from linumpy.testing.brain import BrainSpec, Faults, tile, truth_shift, truth_transform
from linumpy.testing.brain_spec import draw_brain
from linumpy.write.writer import write_omezarr
from tests.support.budget import first

FAULTS = Faults(rotation_degrees=2, translation=4, looks=4, motor_error=1.0, attenuation_per_mm=2.0)
SPEC = BrainSpec(slices=3, tiles=(1, 1), tile_shape=(24, 96, 104), interval_um=160.0, faults=FAULTS, seed=5)


def write(spec, folder, numbers):
    """Stitched slices, made from the truth, and the table of the motor."""
    folder.mkdir()
    for n in numbers:
        write_omezarr(folder / f"slice_z{n:02d}.ome.zarr", tile(spec, n, 0, 0), spec.spacing_um)
    with (folder.parent / "shifts.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(SHIFT_COLUMNS)
        for above, below in itertools.pairwise(numbers):
            y, x = np.sum([truth_shift(spec, n) for n in range(above + 1, below + 1)], axis=0)
            table.writerow([above, below, x, y, x * spec.spacing_um[2] / 1e3, y * spec.spacing_um[1] / 1e3])
    return folder, folder.parent / "shifts.csv"


def register(spec, folder, shifts, **options):
    return register_slices(folder, None, Alignment(interval_mm=spec.interval_um / 1e3, **options), shifts=shifts)


def error_um(spec, matrices):
    """Root mean square error at the corners, of all slices relative to the first."""
    scale = np.diag([*spec.spacing_um[1:], 1.0])
    height, width = (n * s for n, s in zip(spec.slice_shape[1:], spec.spacing_um[1:], strict=True))
    corners = np.array([[y, x, 1] for y in (0, height) for x in (0, width)]).T
    first, squares = min(matrices), []
    for n, matrix in matrices.items():
        truth = np.linalg.inv(truth_transform(spec, first)) @ truth_transform(spec, n)
        found = np.linalg.inv(matrices[first]) @ matrix
        squares.append(((((found - scale @ truth @ np.linalg.inv(scale)) @ corners)[:2]) ** 2).sum(axis=0).mean())
    return float(np.sqrt(np.mean(squares[1:])))


def errors(spec, found, numbers):
    """The error of the slices as found, and as the motor has them."""
    matrices = {one.number: np.array(one.matrix)[1:, 1:] for one in found.slices}
    motor, position = {}, np.zeros(2)
    for n in range(numbers[0], numbers[-1] + 1):
        position = position + (np.array(truth_shift(spec, n)) if n > numbers[0] else 0)
        if n in numbers:
            motor[n] = np.eye(3)
            motor[n][:2, 2] = position * spec.spacing_um[1:]
    return error_um(spec, matrices), error_um(spec, motor)


def test_there_is_no_cliff_where_slices_share_fewer_planes(tmp_path):
    folder, shifts = write(SPEC, tmp_path / "s", (0, 1, 2))
    evidence, apart = [], []
    for shared in (7, 5, 4, 3, 2, 1):
        depth_mm = (SPEC.interval_um / 10 + shared) / 100
        found = register(SPEC, folder, shifts, crop=False, depth_mm=depth_mm)
        by_pairs, by_motor = errors(SPEC, found, (0, 1, 2))
        evidence.append(min(pair.evidence for pair in found.pairs if pair.moving_id == pair.fixed_id + 1))
        apart.append(by_pairs)
        assert by_pairs < by_motor
        assert {one.placed_by for one in found.slices} == {"pairs"}
    assert min(evidence) > 0.95
    assert max(apart[:4]) < 6
    assert max(apart) < 20
    assert max(abs(a - b) for a, b in itertools.pairwise(apart)) < 6


@pytest.mark.parametrize("seed", first(range(2)))
def test_a_severe_brain_is_placed_better_than_by_the_motor(tmp_path, seed):
    drawn = draw_brain(seed, "severe")
    of_tiles = ("vignette", "dark", "jitter", "stage_degrees", "overlap_error", "focal_um", "rayleigh_um")
    none = dict.fromkeys((*of_tiles, "falloff_per_mm"), 0.0)
    spec = replace(
        drawn, tiles=(1, 1), tile_shape=(40, 110, 120), overlap=0.0, faults=replace(drawn.faults, **none, water_um=20.0)
    )
    numbers = spec.written
    assert len(numbers) < spec.slices  # one is missing
    found = register(spec, *write(spec, tmp_path / "s", numbers))
    neighbours = {(pair.fixed_id, pair.moving_id) for pair in found.pairs}
    assert set(itertools.pairwise(numbers)) <= neighbours
    by_pairs, by_motor = errors(spec, found, numbers)
    assert by_pairs < by_motor
    if {one.placed_by for one in found.slices} == {"pairs"} and not found.warnings:
        assert by_pairs < 40


def test_slices_that_cannot_be_compared_stay_where_the_motor_has_them(tmp_path, caplog):
    rng = np.random.default_rng(2)
    folder = tmp_path / "s"
    folder.mkdir()
    for n in (0, 1, 3):  # speckle alone
        write_omezarr(folder / f"slice_{n}.ome.zarr", rng.gamma(4, 25, (20, 80, 90)).astype("f4"), (10.0, 10.0, 10.0))
    (tmp_path / "shifts.csv").write_text(
        ",".join(SHIFT_COLUMNS) + "\n0,1,3,-2,0.03,-0.02\n1,3,0,4,0,0.04\n", encoding="utf-8"
    )
    found = register_slices(
        folder, tmp_path / "t.json", Alignment(interval_mm=0.25, crop=False), shifts=tmp_path / "shifts.csv"
    )
    moves = np.array([np.array(one.matrix)[1:3, 3] for one in found.slices])
    np.testing.assert_allclose(np.diff(moves, axis=0), [[-20, 30], [40, 0]], atol=1e-6)
    assert [one.placed_by for one in found.slices] == ["motor"] * 3
    assert [(pair.fixed_id, pair.moving_id) for pair in found.pairs] == [(0, 1), (0, 3), (1, 3)]
    assert all(pair.rejected.startswith("no peak stands out") for pair in found.pairs)
    assert "no pair of slices could be registered" in found.left_out
    assert found.warnings
    assert found.warnings[0] in caplog.text
    content = json.loads((tmp_path / "t.json").read_text())
    assert content["left_out"] == found.left_out
    assert content["warnings"] == list(found.warnings)
    assert read_transforms(tmp_path / "t.json") == found
