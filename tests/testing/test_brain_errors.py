"""If this fails, the errors of a synthetic brain's results are not those that the results have."""

import dataclasses
import json

import numpy as np
import pytest

from linumpy.mosaic.alignment.transforms import SliceTransform, SliceTransforms
from linumpy.mosaic.grid import resample_mosaic_grid
from linumpy.mosaic.options import SurfaceMethod
from linumpy.mosaic.surface import find_mosaic_surface
from linumpy.pipeline.runner import run_pipeline
from linumpy.pipeline.settings import OPTIONS
from linumpy.testing import brain
from linumpy.testing.brain import BrainSpec, Faults, draw_brain
from linumpy.testing.brain_errors import errors_of, flat_field_error, tissue_tiles
from linumpy.testing.brain_files import write_brain
from tests.support import budget

SPEC = BrainSpec(
    slices=4, tiles=(3, 3), coverage=0.5, agarose=0.1, radius=np.inf, spacing_um=(10.0, 8.0, 8.0),
    faults=Faults(jitter=2.0, overlap_error=0.04, rotation_degrees=2.0, translation=5.0, motor_error=1.0, absent=(1,)),
)  # fmt: skip
#: Stages that other changes mend, and lose to doing nothing until then; and the surface of tiny brains, which is about
#: as plane as its error.
EXEMPT = ("surface",)


def write_positions(spec, folder, moved=0.0):
    """Write the true positions as a result, of another origin, all but one of them moved by some µm."""
    folder.mkdir()
    for number in spec.written:
        truth = brain.truth_positions(spec, number) + 7.0
        tiles = [
            {"row": i, "column": j, "y": truth[i, j, 0] + moved / 8.0 * (i + j > 0), "x": truth[i, j, 1], "present": 1}
            for i, j in np.ndindex(spec.tiles)
        ]
        content = {"spacing_um": [8.0, 8.0], "tiles": tiles}
        (folder / f"slice_z{number:02d}.json").write_text(json.dumps(content))


def test_positions_beside_nominal_ones(tmp_path):
    write_positions(SPEC, tmp_path / "positions")
    rms, largest = errors_of(SPEC, tmp_path)
    assert (rms.stage, rms.value) == ("positions", pytest.approx(0, abs=1e-9))
    # The nominal grid lacks 4 % of 48 voxels of 8 µm from tile to tile, and jitter of up to 2 voxels.
    assert 10 < rms.nothing < largest.nothing < 60
    write_positions(SPEC, tmp_path / "off", 100.0)
    (tmp_path / "positions").rename(tmp_path / "before")
    (tmp_path / "off").rename(tmp_path / "positions")
    worse = errors_of(SPEC, tmp_path, ["positions"])
    # Only tiles with tissue count: the corner may have none, and then all of the others are moved alike.
    assert worse[0].value < 60


def write_transforms(spec, folder, origin):
    """Write the true transforms of slices whose origins, as voxels of the slice, a function gives by their numbers."""

    def matrix(number):
        scale = np.diag([8.0, 8.0, 1.0])
        to_slice = np.eye(3)
        to_slice[:2, 2] = origin(number)
        whole = np.eye(4)
        whole[1:, 1:] = scale @ brain.truth_transform(spec, number) @ to_slice @ np.linalg.inv(scale)
        return whole

    # Any frame of the stack will do: that of the first slice is arbitrary.
    stack = np.eye(4)
    stack[1:3, 3] = 50.0, -30.0
    parts = [
        SliceTransform(number=k, name=f"slice_z{k:02d}", matrix=(stack @ matrix(k)).tolist(), top_um=0.0, depth_um=9.0)
        for k in spec.written
    ]
    (folder / "register").mkdir(exist_ok=True)
    SliceTransforms(200.0, tuple(parts)).write(folder / "register" / "transforms.json", overwrite=True)


def test_transforms_beside_the_motors(tmp_path):
    write_transforms(SPEC, tmp_path, lambda number: brain.truth_positions(SPEC, number)[0, 0])
    rms, turned = errors_of(SPEC, tmp_path)
    assert rms.value == pytest.approx(0, abs=1e-6)
    assert turned.value == pytest.approx(0, abs=1e-5)
    assert rms.nothing > 5
    angles = [np.degrees(np.arcsin(brain.truth_transform(SPEC, k)[1, 0])) for k in SPEC.written]
    assert turned.nothing == pytest.approx(np.abs(np.array(angles[1:]) - angles[0]).max())
    # A deformation is an error that no matrix mends, of its own size.
    warped = dataclasses.replace(SPEC, faults=dataclasses.replace(SPEC.faults, warp=2.0))
    assert 2.0 < errors_of(warped, tmp_path)[0].value < 16.0 * 2**0.5


def test_a_first_tile_of_agarose_is_no_error_of_registration(tmp_path):
    """Tiles with tissue, and so the images, are 100 µm off from the first tile, which nothing in the images tells."""
    spec = dataclasses.replace(SPEC, tiles=(4, 4), coverage=0.3, seed=1)
    assert not any(tissue_tiles(spec, number)[0, 0] for number in spec.written)
    write_positions(spec, tmp_path / "positions", 100.0)
    write_transforms(spec, tmp_path, lambda number: np.array([-7 - 100 / 8, -7]))
    assert errors_of(spec, tmp_path, ["register"])[0].value == pytest.approx(0, abs=1e-6)
    # A slice that is moved as a whole is one.
    write_transforms(spec, tmp_path, lambda number: np.array([-7 - 100 / 8 + 2 * (number > 0), -7]))
    assert errors_of(spec, tmp_path, ["register"])[0].value == pytest.approx(16.0, abs=1e-6)


def test_a_flat_field_of_any_mean():
    spec = BrainSpec(faults=Faults(vignette=0.5))
    truth = brain.truth_flat_field(spec).mean(axis=0)
    assert flat_field_error(spec, 3 * truth) == pytest.approx(0, abs=1e-4)
    assert flat_field_error(spec, np.ones_like(truth)) == pytest.approx(100 * np.std(1 / truth), rel=0.2)


def test_the_surface_of_resampled_voxels_counts_from_their_centre(tmp_path):
    spec = BrainSpec(
        slices=1, tiles=(1, 2), tile_shape=(80, 64, 64), spacing_um=(5.0, 5.0, 5.0), radius=np.inf,
        faults=Faults(water_um=100.0, tilt=(0.02, -0.03), looks=8),
    )  # fmt: skip
    source = write_brain(spec, tmp_path / "brain") / "mosaics" / "slice_z00.ome.zarr"
    method, found = SurfaceMethod(s_xy=9, s_z=2.0, definition="edge"), {}
    for name, spacing in {"recorded": 5.0, "resampled": 10.0}.items():
        (tmp_path / name / "resample").mkdir(parents=True)
        (tmp_path / name / "surface").mkdir()
        mosaic, surface = (tmp_path / name / stage / source.name for stage in ("resample", "surface"))
        resample_mosaic_grid(source, mosaic, spacing)
        find_mosaic_surface(mosaic, surface, method)
        depth, deviation = errors_of(spec, tmp_path / name)
        found[name] = depth.value
        assert deviation.value < 0.5 * deviation.nothing  # of the tilted surface from a plane in one depth
    # 6.7 µm too high without the centre of the first resampled voxel, and without that of the logarithm's edge.
    assert abs(found["recorded"]) < 1
    assert abs(found["resampled"]) < 1.5


def test_attenuation_is_that_of_light_on_its_way_down(tmp_path):
    """And not of both ways."""
    spec = BrainSpec(slices=1, tiles=(1, 1), radius=np.inf, white=1.0, faults=Faults(attenuation_per_mm=2.0))
    write_brain(spec, tmp_path / "brain")
    (tmp_path / "brain/mosaics").rename(tmp_path / "attenuation")
    assert errors_of(spec, tmp_path, ["attenuation"])[0].value == pytest.approx(2.0, rel=0.1)


def test_no_stage_loses_to_doing_nothing(tmp_path):
    """From end to end, in the median over brains of several kinds."""
    from linumpy.demo_brain import run_of

    geometry, found = BrainSpec(slices=3, tiles=(2, 2), tile_shape=(32, 56, 56), interval_um=150.0), []
    for seed, kind in ((1, "partial"), (2, "full"), (0, "full"))[: 3 if budget.SLOW else 2]:
        spec, folder = draw_brain(seed, kind, geometry=geometry), tmp_path / f"{seed}"
        folder.mkdir()
        write_brain(spec, folder / "brain")
        run = dataclasses.replace(run_of(spec, folder), skip=("aip", "report"))
        run_pipeline(run)
        found.append(errors_of(spec, run.output))
    unmeasured = {"resample", "survey", "shading", "aip", "report", "beam"}
    assert {error.stage for error in found[0]} == set(OPTIONS) - unmeasured
    for same in zip(*found, strict=True):  # the errors of one quantity, of all brains
        if same[0].nothing is not None and same[0].stage not in EXEMPT:
            off = [(abs(error.value - error.best), abs(error.nothing - error.best)) for error in same]
            with_it, without = np.median(off, axis=0)
            assert with_it <= without, same[0]
