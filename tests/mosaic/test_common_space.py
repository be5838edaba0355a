"""If this fails, slices are not where their transforms say, or are placed where the brain was not."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import zarr
from scipy import ndimage

from linumpy.errors import SourceError
from linumpy.mosaic.alignment.register import register_slices
from linumpy.mosaic.alignment.stack import stack_registered
from linumpy.mosaic.alignment.transforms import SliceTransform, SliceTransforms, read_transforms, write_scene
from linumpy.mosaic.options import Alignment
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.testing.brain import BrainSpec, Faults, reference, truth_transform
from linumpy.testing.brain_files import write_brain
from linumpy.write.writer import write_omezarr
from tests.support.stores import values_of

FAULTS = Faults(rotation_degrees=3, translation=4, water_um=45, tilt=(0.02, -0.03))
SPEC = BrainSpec(
    slices=4, tiles=(1, 1), tile_shape=(30, 100, 110), spacing_um=(10.0, 8.0, 8.0), interval_um=160.0, faults=FAULTS
)
INTERVAL = Alignment(interval_mm=0.16)


@pytest.fixture(scope="module")
def brain(tmp_path_factory):
    folder = write_brain(SPEC, tmp_path_factory.mktemp("brain") / "b") / "mosaics"
    transforms = register_slices(folder, folder.parent / "t.json", INTERVAL)
    space = stack_registered(folder, folder.parent / "t.json", folder.parent / "stack.zarr")
    return folder, transforms, space


def lateral(one, spec=SPEC):
    """The transform of a slice along Y and X, in voxels."""
    matrix, spacing = np.array(one.matrix), np.array([*spec.spacing_um[1:], 1.0])
    return matrix[1:, 1:] * spacing / spacing[:, None]


def distances(found, truth, spec=SPEC):
    """Root mean square error at the corners in voxels, and that of the angle in degrees."""
    height, width = spec.slice_shape[1:]
    corners = np.array([[y, x, 1] for y in (0, height - 1) for x in (0, width - 1)]).T
    angle = np.degrees(np.arctan2(found[1, 0], found[0, 0]) - np.arctan2(truth[1, 0], truth[0, 0]))
    return np.sqrt(((((found - truth) @ corners)[:2]) ** 2).sum(axis=0).mean()), abs(angle)


def test_slices_lie_where_the_brain_has_them(brain):
    _, transforms, _ = brain
    middle = np.linalg.inv(truth_transform(SPEC, 1))
    for one in transforms.slices:
        apart, angle = distances(lateral(one), middle @ truth_transform(SPEC, one.number))
        assert apart < 0.05
        assert angle < 0.02
        slopes = np.array(one.matrix)[0, 1:3]
        np.testing.assert_allclose(slopes, [-0.02, 0.03], atol=4e-3)
    assert {one.placed_by for one in transforms.slices} == {"pairs"}


def test_a_stack_is_the_brain(brain):
    folder, _, space = brain
    stack = values_of(folder.parent / "stack.zarr")
    # Sampled where the stack has its voxels, in the frame of the reference slice.
    start = [-30, *(-30 for _ in range(2))]
    known = reference(SPEC, tuple(start), tuple(n + 30 for n in SPEC.shape))
    spacing = np.array(SPEC.spacing_um)
    grid = np.stack(np.meshgrid(*(np.arange(n) for n in stack.shape), indexing="ij")).astype(float)
    grid += (np.array(space.origin) / spacing)[:, None, None, None]
    matrix = truth_transform(SPEC, 1)
    y, x = np.tensordot(matrix[:2, :2], grid[1:], 1) + matrix[:2, 2, None, None, None]
    expected = ndimage.map_coordinates(known, [grid[0] + 30, y + 30, x + 30], order=1)
    inside = stack > 0
    assert 0.7 < inside.mean() < 0.95
    error = np.abs(stack - expected)[inside] / expected[inside].mean()
    assert error.mean() < 0.03
    assert np.quantile(error, 0.99) < 0.15


def test_a_stack_does_not_show_where_it_was_cut(brain, tmp_path):
    folder, transforms, _ = brain
    stack_registered(folder, transforms, tmp_path / "s.zarr", tile_bytes=1)
    np.testing.assert_array_equal(values_of(tmp_path / "s.zarr"), values_of(folder.parent / "stack.zarr"))


def test_other_programs_apply_the_transforms(brain, tmp_path):
    """A scene of NGFF 0.6, which resample_zarr follows to the same voxels."""
    folder, transforms, space = brain
    write_scene(folder, transforms)
    try:
        with pytest.raises(FileExistsError):
            write_scene(folder, transforms)
        document = json.loads((folder / "zarr.json").read_text())["attributes"]["ome"]
        assert document["version"] == "0.6"
        assert len(document["scene"]["coordinateTransformations"]) == SPEC.slices
        name = transforms.slices[2].name
        resample_zarr(folder / name, tmp_path / "one.zarr", list(space.spacing), coordinate_system="stack", order=1)
    finally:
        (folder / "zarr.json").unlink()
    group = zarr.open_group(tmp_path / "one.zarr", mode="r")
    one, stack = group["0"][...], values_of(folder.parent / "stack.zarr")
    place = group.attrs["ome"]["multiscales"][0]["datasets"][0]["coordinateTransformations"]
    if place[0]["type"] == "sequence":
        place = place[0]["transformations"]
    origin = next(t["translation"] for t in place if t["type"] == "translation")
    shift = (np.array(space.origin) - origin) / space.spacing
    # Planes that slice 2 alone fills; grids that are shifted by fractions of a voxel agree to their interpolation.
    planes = slice(2 * 16 + 11, 3 * 16 - 1)
    moved = ndimage.affine_transform(one.astype(float), np.ones(3), shift, output_shape=stack.shape, order=1)
    both = moved[planes, :90, :90], stack[planes, :90, :90]
    inside = ndimage.binary_erosion((both[0] > 0) & (both[1] > 0), np.ones((1, 5, 5)))
    assert inside.sum() > 1000
    assert np.corrcoef(both[0][inside], both[1][inside])[0, 1] > 0.99


def test_one_resampling_equals_that_of_scipy(tmp_path):
    """Two slices that do not overlap, against a call on the whole slice."""
    rng = np.random.default_rng(0)
    volumes, slices = rng.uniform(100, 1000, (2, 6, 40, 50)).astype(np.uint16), []
    (tmp_path / "s").mkdir()
    angle = np.radians(4)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    for n, (volume, linear) in enumerate(zip(volumes, (np.eye(2), turn), strict=True)):
        write_omezarr(tmp_path / "s" / f"slice_z{n}.ome.zarr", volume, (5.0, 2.0, 2.0), chunks=(3, 20, 20))
        matrix = np.eye(4)
        matrix[1:3, 1:3], matrix[:3, 3] = linear, (n * 30.0, n * 1.7, n * -3.1)
        rows = tuple(map(tuple, matrix.tolist()))
        slices.append(SliceTransform(n, f"slice_z{n}.ome.zarr", rows, n * 30.0, 30.0))
    space = stack_registered(tmp_path / "s", SliceTransforms(30.0, tuple(slices)), tmp_path / "o.zarr")
    found = values_of(tmp_path / "o.zarr")
    assert found.shape[0] == 12
    for n, (one, volume) in enumerate(zip(slices, volumes, strict=True)):
        matrix = np.array(one.matrix)[1:, 1:]
        back = np.linalg.inv(matrix)
        offset = back[:2, :2] @ (np.array(space.origin[1:])) + back[:2, 2]
        for plane in range(6):
            expected = ndimage.affine_transform(
                volume[plane].astype(float), back[:2, :2], offset / 2, output_shape=found.shape[1:], order=1
            )
            plane_found = found[n * 6 + plane]
            known = (expected > 0) & (plane_found > 0)
            assert known.mean() > 0.6
            np.testing.assert_allclose(plane_found[known], expected[known], atol=1.01)


@pytest.mark.parametrize("hole", [0, np.nan])
def test_what_was_not_measured_leaves_no_seam(tmp_path, hole):
    volume = np.full((4, 40, 40), 500, np.float32)
    below = volume.copy()
    below[:, 10:20, 12:30] = hole
    (tmp_path / "s").mkdir()
    slices = []
    for n, voxels in enumerate((volume, below)):
        write_omezarr(tmp_path / "s" / f"slice_z{n}.ome.zarr", voxels, (5.0, 2.0, 2.0))
        matrix = np.eye(4)
        matrix[:3, 3] = (n * 10.0, n * 0.9, n * 0.7)
        slices.append(SliceTransform(n, f"slice_z{n}.ome.zarr", tuple(map(tuple, matrix.tolist())), n * 10.0, 20.0))
    stack_registered(tmp_path / "s", SliceTransforms(10.0, tuple(slices)), tmp_path / "o.zarr")
    found = values_of(tmp_path / "o.zarr")
    assert found.shape[0] == 6
    np.testing.assert_allclose(found[found != 0], 500, rtol=1e-5)
    assert (found[2:4, 5:35, 5:35] != 0).all()  # the slice above has them
    assert (found[4:, 12:18, 14:28] == 0).all()


def test_an_empty_slice_lies_between_its_neighbours(tmp_path):
    faults = Faults(translation=3, rotation_degrees=1, empty=(2,))
    spec = BrainSpec(slices=5, tiles=(1, 1), tile_shape=(26, 72, 80), interval_um=100.0, faults=faults)
    folder = write_brain(spec, tmp_path / "b")
    found = register_slices(folder / "mosaics", None, Alignment(interval_mm=0.1, crop=False))
    assert [one.placed_by for one in found.slices] == ["pairs", "pairs", "neighbours", "pairs", "pairs"]
    assert all(pair.rejected for pair in found.pairs if 2 in (pair.fixed_id, pair.moving_id))
    # Slices 1 and 3 share planes: they are placed right.
    for one in (found.slices[0], found.slices[1], found.slices[3], found.slices[4]):
        truth = np.linalg.inv(truth_transform(spec, 1)) @ truth_transform(spec, one.number)
        first = np.linalg.inv(lateral(found.slices[1], spec)) @ lateral(one, spec)
        assert distances(first, truth, spec)[0] < 0.1
    stack_registered(folder / "mosaics", found, tmp_path / "o.zarr", new_spacing=20.0, levels=2)
    assert values_of(tmp_path / "o.zarr").max() > 0


def test_transforms_are_read_as_they_were_written(brain, tmp_path):
    folder, transforms, _ = brain
    assert read_transforms(folder.parent / "t.json") == transforms
    for text in ("{", "[]", '{"linumpy": "else"}', '{"linumpy": "transforms of slices", "interval_um": 1}'):
        (tmp_path / "t.json").write_text(text)
        with pytest.raises(SourceError, match="transforms of slices"):
            read_transforms(tmp_path / "t.json")
    others = SliceTransforms(1.0, (*transforms.slices[:2], replace(transforms.slices[2], number=9)))
    with pytest.raises(SourceError, match=r"slices 0, 1, 9, and .* has 0, 1, 2, 3"):
        stack_registered(folder, others, tmp_path / "o.zarr")
    with pytest.raises(FileExistsError):
        register_slices(folder, folder.parent / "t.json", INTERVAL)


def test_what_is_read_is_not_replaced(brain, tmp_path):
    folder, transforms, _ = brain
    zarr.open_group(tmp_path / "o.zarr", mode="w")
    transforms.write(tmp_path / "o.zarr/t.json")
    shifts = shutil.copy(folder.parent / "shifts.csv", tmp_path)
    with pytest.raises(ValueError, match="would replace the source"):
        stack_registered(folder, tmp_path / "o.zarr/t.json", tmp_path / "o.zarr", overwrite=True)
    with pytest.raises(ValueError, match="would replace the source"):
        register_slices(folder, shifts, INTERVAL, shifts=shifts, overwrite=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"matrix": np.zeros((4, 4)).tolist()}, {"matrix": np.diag([1.0, 1, 1, 2]).tolist()}, {"top_um": "low"},
        {"top_um": float("nan")}, {"depth_um": -5.0}, {"depth_um": None},
    ],
)  # fmt: skip
def test_damaged_transforms_are_refused(brain, tmp_path, wrong):
    content = json.loads((brain[0].parent / "t.json").read_text())
    content["slices"][1].update(wrong)
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(SourceError, match="damaged"):
        read_transforms(tmp_path / "t.json")


def test_numbers_that_are_none_are_refused(brain):
    with pytest.raises(ValueError, match="max_deviation"):
        Alignment(interval_mm=0.16, max_deviation=float("nan"))
    with pytest.raises(ValueError, match="one positive number in µm, or three"):
        stack_registered(brain[0], brain[1], brain[0].parent / "no.zarr", new_spacing=(8.0, 8.0))


@pytest.mark.gpu
def test_the_device_makes_the_same_stack(brain, tmp_path):
    folder, transforms, _ = brain
    device = register_slices(folder, None, INTERVAL, device="cuda")
    for one, other in zip(device.slices, transforms.slices, strict=True):
        assert distances(lateral(one), lateral(other))[0] < 0.02
    stack_registered(folder, transforms, tmp_path / "s.zarr", device="cuda")
    host = values_of(folder.parent / "stack.zarr")
    np.testing.assert_allclose(values_of(tmp_path / "s.zarr"), host, rtol=1e-3, atol=1e-3 * host.max())
