"""If this fails, images are put on the grid of another wrongly (oracle: SciPy and NumPy on the whole volumes)."""

import importlib.util
import itertools
import json
from fractions import Fraction

import dask.array
import numpy as np
import pytest
import zarr
from ome_zarr_models import open_ome_zarr
from scipy import ndimage

from linumpy.errors import DeviceMemoryError, MetadataError
from linumpy.io.carried import Carried
from linumpy.io.ome import open_image, open_images
from linumpy.io.volume import open_volumes
from linumpy.resample.blocks import pipeline
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.writer import write_omezarr
from scripts import linum_resample
from tests.support.budget import matrix

try:  # a GPU machine may lack it, and has other tests here to run
    import ngff_zarr
except ImportError:
    ngff_zarr = None
needs_ngff_zarr = pytest.mark.skipif(ngff_zarr is None, reason="ngff-zarr is not installed: pip install ngff-zarr")

FAST = {"device": "cpu", "durable": False}
SPACE = [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
TURN = np.array([[0.96, -0.28, 0.0], [0.28, 0.96, 0.0], [0.0, 0.0, 1.0]])
RNG = np.random.default_rng(5)
#: Grids of the source and of the other image: shape, spacing, origin.
SOURCE = (24, 20, 18), (2.0, 3.0, 4.0), (10.0, -20.0, 5.0)
OTHER = (15, 22, 13), (3.0, 2.5, 5.0), (12.0, -17.0, 4.0)
#: Of the field of vectors, which does not reach all voxels of the other image.
FIELD = (5, 6, 4), (9.0, 8.0, 15.0), (9.0, -18.0, 6.0)
VALUES = ndimage.gaussian_filter(RNG.normal(size=SOURCE[0]), 1).astype("f4")
VECTORS = RNG.normal(scale=3.0, size=(*FIELD[0], 3)).astype("f4")


def scene(folder, transformations, systems=(), **images):
    """Write images into a group whose metadata have transformations between them."""
    group = zarr.create_group(folder)
    group.attrs["ome"] = {
        "version": "0.6",
        "scene": {"coordinateSystems": list(systems), "coordinateTransformations": transformations},
    }
    for name, (voxels, (_, spacing, origin)) in images.items():
        options = {"ngff_version": "0.6", "chunks": (8, 7, 6), "durable": False}
        write_omezarr(folder / name, voxels, spacing, origin=origin, **options)
    return group


def both(folder, *transformations, systems=(), **more):
    images = {"source": (VALUES, SOURCE), "other": (np.zeros(OTHER[0], "u1"), OTHER)}
    return scene(folder, list(transformations), systems, **images, **more)


def end(path, name="physical"):
    return {"path": path, "name": name} if path else {"name": name}


def between(one, begin="other", last="source"):
    return {**one, "input": end(begin), "output": end(last)}


def affine(linear, shift):
    return {"type": "affine", "affine": np.column_stack([linear, shift]).tolist()}


def write_field(group, path, vectors=VECTORS, kind="displacement"):
    """An array that describes itself."""
    axes = [*SPACE, {"name": "d", "type": kind, "discrete": True}]
    scale, shift = {"type": "scale", "scale": [*FIELD[1], 1]}, {"type": "translation", "translation": [*FIELD[2], 0]}
    array = group.create_array(path, data=vectors, chunks=(2, 3, 2, 3))
    array.attrs["coordinateSystems"] = [{"name": "field", "axes": axes}]
    array.attrs["coordinateTransformations"] = [
        {"type": "sequence", "transformations": [scale, shift], "output": {"name": "field"}}
    ]


def points(grid):
    """Positions of the voxels of a grid in µm, (3, ...)."""
    shape, spacing, origin = grid
    voxels = np.indices(shape, float)
    return voxels * np.array(spacing)[:, None, None, None] + np.array(origin)[:, None, None, None]


def voxels(positions, grid):
    return (positions - np.array(grid[2])[:, None, None, None]) / np.array(grid[1])[:, None, None, None]


def linear(matrix, positions):
    return np.einsum("ij,j...->i...", matrix, positions)


def looked_up(positions, order=1, empty=0.0, vectors=VECTORS):
    """Vectors at positions: at the edge those of the outermost, beyond half a step the empty one."""
    indices = voxels(positions, FIELD)
    last = np.array(FIELD[0])[:, None, None, None] - 0.5
    outside = ((indices < -0.5) | (indices > last)).any(axis=0)
    rows = [ndimage.map_coordinates(vectors[..., n], indices, np.float64, order, mode="nearest") for n in range(3)]
    return np.where(outside, empty, rows)


def sampled(positions, values=VALUES, **options):
    options = {"order": 1, "mode": "constant"} | options
    inside = voxels(positions, SOURCE)
    known = np.isfinite(inside).all(axis=0)
    result = ndimage.map_coordinates(values, np.where(known, inside, -1e6), **options)
    return np.where(known, result, options.get("cval", 0))


def validated(folder):
    """Read by ngff-zarr, which checks the metadata by the schemas of the specification if it has jsonschema."""
    if ngff_zarr is None:
        return None
    return ngff_zarr.from_ngff_zarr(folder, validate=importlib.util.find_spec("jsonschema") is not None)


def result(folder, level=0):
    return open_image(folder).levels[level][...]


def test_images_meet_in_micrometers(tmp_path, caplog):
    """Of whatever version and unit; the output has the shape, place, axes and resolutions of the other."""
    coloured = np.stack([VALUES, -VALUES])
    write_omezarr(tmp_path / "a", coloured, SOURCE[1], origin=SOURCE[2], axes="czyx", ngff_version="0.4")
    orientation = {"type": "anatomical", "value": "left-to-right"}
    carried = Carried(units={"x": "nanometer"}, orientations={"x": orientation})
    blank = np.zeros(OTHER[0], "u1")
    write_omezarr(tmp_path / "b", blank, OTHER[1], origin=OTHER[2], levels=3, ngff_version="0.6", carried=carried)
    resample_zarr(tmp_path / "a", tmp_path / "o", like=tmp_path / "b", anti_aliasing=False, **FAST)
    expected = sampled(points(OTHER))
    assert np.allclose(result(tmp_path / "o"), [expected, -expected], atol=1e-6)
    open_ome_zarr(zarr.open_group(tmp_path / "o", mode="r"))  # a validator
    validated(tmp_path / "o")
    made, other = open_image(tmp_path / "o"), open_image(tmp_path / "b")
    assert (made.version, made.spacing, made.origin) == ("0.4", other.spacing, other.origin)
    assert [(axis.name, axis.unit, axis.orientation) for axis in made.axes[1:]] == [
        (axis.name, axis.unit, axis.orientation) for axis in other.axes
    ]
    level = open_volumes(tmp_path / "b", 1)
    resample_zarr(tmp_path / "a", tmp_path / "p", like=level, channel=0, levels=1, cval=9, **FAST)
    image = open_image(tmp_path / "p")
    assert (image.spacing, image.origin) == (other.spacing[1:2], other.origin[1:2])
    # A coarser grid is smoothed, as for a spacing.
    smooth = ndimage.gaussian_filter(
        VALUES, [(2 * a / b - 1) / 2 for a, b in zip(OTHER[1], SOURCE[1], strict=True)], mode="nearest"
    )
    grid = image.levels[0].shape, image.spacing[0], image.origin[0]
    assert np.allclose(result(tmp_path / "p"), sampled(points(grid), smooth, cval=9), atol=1e-5)


def test_an_equal_grid_gives_equal_voxels(tmp_path):
    """Rounding of positions puts no voxel outside."""
    write_omezarr(tmp_path / "a", VALUES, (0.1, 0.3, 0.7), origin=(0.1, 12.3, 45.6))
    write_omezarr(tmp_path / "b", VALUES, (0.1, 0.3, 0.7), origin=(0.1, 12.3, 45.6), ngff_version="0.6")
    resample_zarr(tmp_path / "a", tmp_path / "o", like=tmp_path / "b", cval=7, **FAST)
    assert np.array_equal(result(tmp_path / "o"), VALUES)
    both(tmp_path / "s", between(affine(TURN, (1, 2, 3))))
    resample_zarr(tmp_path / "s/source", tmp_path / "p", like=tmp_path / "s/source", cval=7, **FAST)
    assert np.array_equal(result(tmp_path / "p"), VALUES)


@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize(
    ("old", "new", "first"),
    [("3", "1", "-3"), ("0.7", "4.9", "0"), ("0.3", "0.1", "0.6"), ("6.5", "0.325", "12.35"), ("0.35", "0.05", "-0.1")],
)
def test_no_plane_at_the_edge_is_lost(tmp_path, order, old, new, first):
    """Exact fractions decide what is inside of the image, and of its labels."""
    n, m, (old, new, first) = 8, 40, map(Fraction, (old, new, first))
    write_omezarr(tmp_path / "a", np.full((n, 4, 4), 100, "u2"), [float(old)] * 3)
    zarr.create_group(tmp_path / "a/labels", attributes={"ome": {"version": "0.5", "labels": ["cells"]}})
    write_omezarr(tmp_path / "a/labels/cells", np.full((n, 4, 4), 9, "u1"), [float(old)] * 3)
    origin = float(first), 0.0, 0.0
    write_omezarr(tmp_path / "b", np.zeros((m, 4, 4), "u1"), [float(new), float(old), float(old)], origin=origin)
    resample_zarr(tmp_path / "a", tmp_path / "o", like=tmp_path / "b", order=order, anti_aliasing=False, **FAST)
    inside = [0 <= (first + i * new) / old <= n - 1 for i in range(m)]
    assert (result(tmp_path / "o")[:, 1, 1] > 0).tolist() == inside
    assert (result(tmp_path / "o/labels/cells")[:, 1, 1] > 0).tolist() == inside


@pytest.mark.parametrize("inverse", [False, True])
def test_scenes_turn_images(tmp_path, inverse):
    """Through a system of the scene's own, by transformations in either direction."""
    shift = np.array([3.0, -9.0, 2.0])
    back = np.linalg.inv(TURN)
    to_atlas = {**affine(back, back @ -shift), "input": end("source"), "output": end(None, "atlas")}
    from_atlas = {**affine(TURN, shift), "input": end(None, "atlas"), "output": end("source")}
    same = {"type": "identity", "input": end("other"), "output": end(None, "atlas")}
    both(tmp_path / "s", to_atlas if inverse else from_atlas, same, systems=[{"name": "atlas", "axes": SPACE}])
    resample_zarr(tmp_path / "s/source", tmp_path / "o", like=tmp_path / "s/other", anti_aliasing=False, **FAST)
    expected = sampled(linear(TURN, points(OTHER)) + shift[:, None, None, None])
    assert np.count_nonzero(expected) > 1000
    assert np.allclose(result(tmp_path / "o"), expected, atol=1e-5)
    # In the atlas itself: the least grid that covers the source.
    resample_zarr(tmp_path / "s/source", tmp_path / "p", (3, 2.5, 5), coordinate_system="atlas", order=3, **FAST)
    image = open_image(tmp_path / "p")
    corners = np.array(list(itertools.product(*((-0.5, n - 0.5) for n in SOURCE[0])))).T * np.array(SOURCE[1])[:, None]
    corners = back @ (corners + np.array(SOURCE[2])[:, None] - shift[:, None])
    assert np.allclose(image.origin[0], corners.min(axis=1) + np.array(image.spacing[0]) / 2)
    covered = np.array(image.spacing[0]) * image.levels[0].shape - np.ptp(corners, axis=1)
    assert ((covered >= -1e-6) & (covered < image.spacing[0])).all()
    validated(tmp_path / "p")
    (system,) = image.group.attrs["ome"]["multiscales"][0]["coordinateSystems"]
    assert system == {"name": "atlas", "axes": SPACE}
    grid = image.levels[0].shape, image.spacing[0], image.origin[0]
    sigmas = [max(0, (np.linalg.norm(row) - 1) / 2) for row in TURN * np.array(grid[1]) / np.array(SOURCE[1])[:, None]]
    smooth = ndimage.gaussian_filter(VALUES, sigmas, mode="nearest")
    expected = sampled(linear(TURN, points(grid)) + shift[:, None, None, None], smooth, order=3)
    assert np.allclose(result(tmp_path / "p"), expected, atol=1e-4)


@needs_ngff_zarr
def test_scenes_of_ngff_zarr(tmp_path):
    """Axes are exchanged by index, one of them scaled, and turned, in a scene that ngff-zarr wrote."""
    from ngff_zarr.v06 import zarr_metadata as v06

    images = {}
    for name, (values, (_, spacing, origin)) in {"a": (VALUES, SOURCE), "b": (np.zeros(OTHER[0], "u1"), OTHER)}.items():
        image = ngff_zarr.to_ngff_image(
            values, dims=tuple("zyx"), scale=dict(zip("zyx", spacing, strict=True)),
            translation=dict(zip("zyx", origin, strict=True)), axes_units=dict.fromkeys("zyx", "micrometer"),
        )  # fmt: skip
        images[name] = ngff_zarr.to_multiscales(image, scale_factors=[])
    parts = [
        v06.MapAxis(mapAxis=[1, 0, 2]),
        v06.ByDimension(
            transformations=[
                v06.ByDimensionItem(v06.Scale(scale=[1.5]), [2], [2]),
                v06.ByDimensionItem(v06.Rotation(rotation=TURN[:2, :2].tolist()), [1, 0], [0, 1]),
            ]
        ),
        v06.Translation(translation=[8.0, 3.0, -2.0]),
    ]
    first, last = (v06.CoordinateSystemIdentifier(path=name, name="intrinsic") for name in "ba")
    sequence = v06.TransformSequence(transformations=parts, input=first, output=last)
    written = ngff_zarr.NgffScene(images=images, coordinateTransformations=[sequence])
    written.to_ome_zarr(str(tmp_path / "s"), version="0.6")
    resample_zarr(tmp_path / "s/a", tmp_path / "o", like=tmp_path / "s/b", anti_aliasing=False, **FAST)
    z, y, x = points(OTHER)
    turned = np.einsum("ij,j...->i...", TURN[:2, :2], np.stack([z, y]))  # [1, 0] of the exchanged ones
    expected = np.stack([turned[0] + 8, turned[1] + 3, 1.5 * x - 2])
    assert np.count_nonzero(sampled(expected)) > 300
    assert np.allclose(result(tmp_path / "o"), sampled(expected), atol=1e-5)
    assert list(open_images(tmp_path / "s")) == ["b", "a"]


@needs_ngff_zarr
def test_turned_images_say_where_they_are(tmp_path):
    """By a transformation to the system of the source, through which it is found again."""
    orientation = {"type": "anatomical", "value": "left-to-right"}
    carried = Carried(units={"x": "nanometer"}, orientations={"x": orientation})
    smooth = ndimage.gaussian_filter(VALUES, 2)
    two = np.stack([smooth, -smooth])
    options = {"origin": SOURCE[2], "axes": "czyx", "ngff_version": "0.6", "carried": carried}
    write_omezarr(tmp_path / "a", two, SOURCE[1], **options)
    group = zarr.open_group(tmp_path / "a", mode="a")
    ome = group.attrs["ome"]
    ome["multiscales"][0]["coordinateSystems"].append(
        {"name": "atlas", "axes": [{"name": "c", "type": "channel"}, *SPACE]}
    )
    flip = np.diag([1.0, 1, 1, -0.001]).tolist()
    to_atlas = {"type": "affine", "affine": [[*row, 0.0] for row in flip]}
    ends = {"input": {"name": "physical"}, "output": {"name": "atlas"}, "name": "flip"}
    ome["multiscales"][0]["coordinateTransformations"] = [{**to_atlas, **ends}]
    group.attrs["ome"] = ome
    labels = zarr.create_group(tmp_path / "a/labels", attributes={"ome": {"version": "0.6", "labels": ["half"]}})
    coarse = np.ones([n // 2 for n in SOURCE[0]], "u1")
    write_omezarr(
        f"{labels.store.root}/half", coarse, [2 * step for step in SOURCE[1]], origin=SOURCE[2], ngff_version="0.6"
    )
    matrix = np.column_stack([np.diag(1 / np.array(SOURCE[1])) @ TURN * [1.5, 1.5, 2], (0, -16 / 3, -1)])
    resample_zarr(tmp_path / "a", tmp_path / "o", matrix, output_shape=(46, 50, 40), levels=2, **FAST)
    found = validated(tmp_path / "o")
    assert [system.name for system in found.metadata.coordinateSystems] == ["resampled", "physical", "atlas"]
    made = open_image(tmp_path / "o")
    image, half = (
        folder.attrs["ome"]["multiscales"][0]["coordinateTransformations"][0]["affine"]
        for folder in (made.group, open_image(tmp_path / "o/labels/half").group)
    )
    to_nanometers = np.array([1, 1, 1000])  # the image's unit along x, which its labels do not have
    inner = np.array(image)[1:, 1:]
    assert np.allclose(inner[:, :3] / to_nanometers[:, None] * to_nanometers, np.array(half)[:, :3])
    assert np.allclose(inner[:, 3] / to_nanometers, np.array(half)[:, 3])
    assert made.axes[-1].orientation is None
    assert made.group.attrs["ome"]["multiscales"][0]["coordinateSystems"][1]["axes"][-1]["orientation"] == orientation
    blank = np.zeros(SOURCE[0], "u1")
    write_omezarr(tmp_path / "p", blank, SOURCE[1], origin=SOURCE[2], ngff_version="0.6")
    write_omezarr(
        tmp_path / "q", blank, SOURCE[1], origin=(*SOURCE[2][:2], -SOURCE[2][2] - 17 * SOURCE[1][2]), ngff_version="0.6"
    )
    for name, system, expected in (("p", "physical", smooth), ("q", "atlas", smooth[..., ::-1])):
        other = zarr.open_group(tmp_path / name, mode="a")
        ome = other.attrs["ome"]
        axes = [{"name": "c", "type": "channel"}, *SPACE]
        if system == "physical":
            axes = made.group.attrs["ome"]["multiscales"][0]["coordinateSystems"][1]["axes"]
        add_channel = {"type": "projectAxis", "createdOutputs": [0]}
        factors = {"type": "scale", "scale": [1, 1, 1, 1000.0 if system == "physical" else 1.0]}
        ome["multiscales"][0]["coordinateSystems"] = [{"name": "own", "axes": SPACE}, {"name": system, "axes": axes}]
        ome["multiscales"][0]["datasets"][0]["coordinateTransformations"][0]["output"]["name"] = "own"
        there = {"input": {"name": "own"}, "output": {"name": system}}
        ome["multiscales"][0]["coordinateTransformations"] = [
            {"type": "sequence", "transformations": [add_channel, factors], **there}
        ]
        other.attrs["ome"] = ome
        target = tmp_path / f"{name}-back"
        resample_zarr(
            tmp_path / "o", target, like=tmp_path / name, coordinate_system=system, anti_aliasing=False, **FAST
        )
        back = result(target)
        inner = (slice(2, -2),) * 3  # at the edges outside is mixed in
        assert np.abs(back[0] - expected)[inner].max() < 0.05 * np.ptp(smooth)
        assert np.array_equal(back[1], -back[0])


@pytest.mark.parametrize(("way", "memory"), matrix([("cubic", 3), ("nearest", 0), ("linear", 1)], [200_000, None]))
def test_displacements_are_streamed(tmp_path, monkeypatch, way, memory):
    """Rotated, displaced and scaled; blocks are cut where field and source do not fit into the memory."""
    interpolation, order = way
    warp = {"type": "displacements", "path": "coordinateTransformations/f", "interpolation": interpolation}
    parts = [{"type": "rotation", "rotation": TURN.tolist()}, warp, affine(np.diag([1.1, 0.9, 1]), (-1, 2, 3))]
    group = both(tmp_path / "s", between({"type": "sequence", "transformations": parts}))
    write_field(group, "coordinateTransformations/f")
    options = {"memory_bytes": memory, "chunks": (5, 6, 7), "anti_aliasing": False, "cval": -2.0}
    read, real = [], pipeline.HostStage._read_array

    def reading(stage, array, region):
        read.append(real(stage, array, region))
        return read[-1]

    monkeypatch.setattr(pipeline.HostStage, "_read_array", reading)
    resample_zarr(tmp_path / "s/source", tmp_path / "o", like=tmp_path / "s/other", **options, **FAST)
    if memory is not None:
        assert len(read) > 2 * 3 * 4 * 2  # a field and a source for each block
        assert max(one.nbytes for one in read) <= memory // 16
    turned = linear(TURN, points(OTHER))
    moved = looked_up(turned, order)
    outside = (moved == 0).all(axis=0)
    assert 0.05 < outside.mean() < 0.95
    expected = linear(np.diag([1.1, 0.9, 1]), turned + moved) + np.array([-1, 2, 3])[:, None, None, None]
    expected = sampled(expected, cval=-2.0)
    found = result(tmp_path / "o")
    wrong = ~np.isclose(found, expected, atol=2e-4)
    # Positions halfway between two vectors, or at the edge of the source, may round either way.
    assert wrong.mean() < 0.002
    (step, field, last) = open_image(tmp_path / "o").linumpy["resampled"]["warp"]
    assert field["relative"]
    assert field["field"].endswith("/s/coordinateTransformations/f")
    json.dumps([step, last])


def test_a_field_of_two_axes(tmp_path):
    values = ndimage.gaussian_filter(RNG.normal(size=(20, 30)), 1).astype("f4")
    images = {
        "source": (values, ((20, 30), (2.0, 3.0), (0.0, 5.0))),
        "other": (values, ((20, 30), (2.0, 3.0), (4.0, 0.0))),
    }
    group = zarr.create_group(tmp_path / "s")
    transformation = between({"type": "displacements", "path": "f"})
    group.attrs["ome"] = {"version": "0.6", "scene": {"coordinateTransformations": [transformation]}}
    for name, (voxels_of_image, (_, spacing, origin)) in images.items():
        write_omezarr(tmp_path / "s" / name, voxels_of_image, spacing, origin=origin, ngff_version="0.6", chunks=(7, 8))
    vectors = RNG.normal(scale=2, size=(2, 5, 6)).astype("f4")
    field = group.create_array("f", data=vectors)
    axes = [{"name": "d", "type": "displacement"}, *SPACE[1:]]
    field.attrs["coordinateSystems"] = [{"name": "f", "axes": axes}]
    field.attrs["coordinateTransformations"] = [{"type": "scale", "scale": [1, 10.0, 20.0], "output": {"name": "f"}}]
    resample_zarr(tmp_path / "s/source", tmp_path / "o", like=tmp_path / "s/other", **FAST)
    positions = np.indices((20, 30)) * np.array([2.0, 3.0])[:, None, None] + np.array([4.0, 0.0])[:, None, None]
    indices = positions / np.array([10.0, 20.0])[:, None, None]
    rows = [ndimage.map_coordinates(one, indices, np.float64, order=1, mode="nearest") for one in vectors]
    moved = positions + rows * (indices <= np.array([4.5, 5.5])[:, None, None]).all(axis=0)
    inside = (moved - np.array([0, 5])[:, None, None]) / np.array([2, 3])[:, None, None]
    assert np.allclose(result(tmp_path / "o"), ndimage.map_coordinates(values, inside, order=1), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("interpolation", ["nearest", "linear", "cubic"])
def test_displacements_on_a_device(tmp_path, cupy, interpolation):
    """As on the host; the device's memory holds a part at a time."""
    warp = {"type": "displacements", "path": "f", "interpolation": interpolation}
    group = both(tmp_path / "s", between({"type": "sequence", "transformations": [warp, affine(TURN, (1, 2, 3))]}))
    write_field(group, "f")
    options = {"like": tmp_path / "s/other", "cval": 5, "durable": False}
    resample_zarr(tmp_path / "s/source", tmp_path / "h", device="cpu", **options)
    resample_zarr(tmp_path / "s/source", tmp_path / "d", device="cuda", memory_bytes=64 * 2**20, **options)
    assert (~np.isclose(result(tmp_path / "h"), result(tmp_path / "d"), atol=1e-3)).mean() < 0.002


def test_smoothing_and_labels_through_a_field(tmp_path):
    group = both(tmp_path / "s", between({"type": "displacements", "path": "f"}))
    write_field(group, "f")
    cells = RNG.integers(0, 5, SOURCE[0]).astype("u2")
    listed = {"ome": {"version": "0.6", "labels": ["cells"]}}
    zarr.create_group(tmp_path / "s/source/labels", attributes=listed)
    write_omezarr(tmp_path / "s/source/labels/cells", cells, SOURCE[1], origin=SOURCE[2], ngff_version="0.6")
    resample_zarr(tmp_path / "s/source", tmp_path / "o", like=tmp_path / "s/other", memory_bytes=10**6, **FAST)
    moved = points(OTHER) + looked_up(points(OTHER))
    sigmas = [max(0, (a / b - 1) / 2) for a, b in zip(OTHER[1], SOURCE[1], strict=True)]
    smooth = ndimage.gaussian_filter(VALUES, sigmas, mode="nearest")
    wrong = ~np.isclose(result(tmp_path / "o"), sampled(moved, smooth), atol=1e-4)
    assert wrong.mean() < 0.002
    labels = sampled(moved, cells, order=0)
    for folder in ("o", "o/labels/cells"):
        validated(tmp_path / folder)
    assert (result(tmp_path / "o/labels/cells") != labels).mean() < 0.002


@needs_ngff_zarr
def test_coordinates_that_are_unknown_are_outside(tmp_path):
    """A field of the source's coordinates; ngff-zarr wrote the one that displaces them, its component axis first."""
    group = both(tmp_path / "s", between({"type": "sequence", "transformations": []}))
    vectors = np.moveaxis(points(FIELD), 0, -1) + VECTORS
    write_field(group, "c", vectors, "coordinate")
    image = ngff_zarr.NgffImage(
        dask.array.full((3, 2, 2, 2), 1.5, dtype="f4"), dims=("c", "z", "y", "x"), axes_types={"c": "displacement"},
        scale={"c": 1.0, "z": 900.0, "y": 900, "x": 900}, translation={"c": 0.0, "z": -400.0, "y": -400, "x": -400},
        axes_units=dict.fromkeys("zyx", "micrometer"),
    )  # fmt: skip
    declared = ngff_zarr.declare_field_transform(ngff_zarr.to_multiscales(image, scale_factors=[]))
    ngff_zarr.to_ngff_zarr(tmp_path / "s/d", declared, version="0.6")
    both_fields = [{"type": "coordinates", "path": "c"}, {"type": "displacements", "path": "d"}]
    ome = group.attrs["ome"]
    ome["scene"]["coordinateTransformations"] = [between({"type": "sequence", "transformations": both_fields})]
    group.attrs["ome"] = ome
    moved = looked_up(points(OTHER), empty=np.nan, vectors=vectors) + 1.5
    assert 0.05 < np.isnan(moved).mean() < 0.95
    for mode in ("constant", "nearest"):
        resample_zarr(
            tmp_path / "s/source",
            tmp_path / mode,
            like=tmp_path / "s/other",
            mode=mode,
            cval=3,
            anti_aliasing=False,
            **FAST,
        )
        expected = sampled(moved, mode=mode, cval=3)
        expected[np.isnan(moved).any(axis=0)] = 3
        wrong = ~np.isclose(result(tmp_path / mode), expected, atol=2e-4, equal_nan=True)
        assert wrong.mean() < 0.002


def test_the_command(tmp_path, capsys):
    """Images of different folders, each with a transformation to a system of the same name."""
    for name, linear_part in (("source", np.eye(3)), ("other", TURN)):
        _, spacing, origin = SOURCE if name == "source" else OTHER
        values = VALUES if name == "source" else np.zeros(OTHER[0], "u1")
        write_omezarr(tmp_path / name, values, spacing, origin=origin, ngff_version="0.6")
        group = zarr.open_group(tmp_path / name, mode="a")
        ome = group.attrs["ome"]
        ome["multiscales"][0]["coordinateSystems"].append({"name": "atlas", "axes": SPACE})
        to_atlas = {**affine(linear_part, (0, 0, 0)), "input": {"name": "physical"}, "output": {"name": "atlas"}}
        ome["multiscales"][0]["coordinateTransformations"] = [to_atlas]
        group.attrs["ome"] = ome
    source, other = str(tmp_path / "source"), str(tmp_path / "other")
    command = [source, str(tmp_path / "o"), "--like", other, "--device", "cpu", "--no-anti-aliasing"]
    assert linum_resample.main([*command, "--coordinate-system", "atlas"]) == 0
    assert np.allclose(result(tmp_path / "o"), sampled(linear(TURN, points(OTHER))), atol=1e-5)
    command[1] = str(tmp_path / "p")
    assert linum_resample.main(command) == 0  # in µm
    assert np.allclose(result(tmp_path / "p"), sampled(points(OTHER)), atol=1e-5)
    command[1] = str(tmp_path / "q")
    assert linum_resample.main([*command, "--coordinate-system", "brain"]) != 0
    assert "'brain'; it is connected with 'atlas', 'physical'" in capsys.readouterr().err
    assert linum_resample.main([source, str(tmp_path / "q")]) != 0
    assert "--resolution" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "pass a spacing in µm or a matrix, or like="),
        ({"like": "other", "transform_or_spacing": 2.0}, ValueError, "pass a spacing"),
        ({"like": "other", "output_shape": (3, 3, 3)}, ValueError, "leave out one of them"),
        ({"like": "other"}, MetadataError, "a field of vectors has no inverse"),
        ({"like": "other", "coordinate_system": 5}, TypeError, "pass the name"),
        ({"like": "other", "coordinate_system": "brain"}, MetadataError, "it is connected with 'atlas', 'physical'"),
        ({"like": "flat"}, MetadataError, "has the axes of space y, x, and .* z, y, x"),
        ({"transform_or_spacing": 2, "coordinate_system": "atlas"}, MetadataError, "is not affine"),
        ({"transform_or_spacing": np.eye(3), "coordinate_system": "physical"}, ValueError, "and no matrix"),
        ({"transform_or_spacing": 2, "coordinate_system": "units"}, MetadataError, r"axes of space z \(no unit\)"),
        ({"like": "third", "mode": "reflect"}, ValueError, "through a field of vectors cannot"),
        ({"like": "third", "memory_bytes": 10_000}, DeviceMemoryError, "blocks of one chunk"),
        ({"like": "third", "spacing": (1, 1, 1)}, ValueError, "leave out spacing="),
    ],
)
def test_what_cannot_be_is_named(tmp_path, options, error, message):
    warp = {"type": "displacements", "path": "f"}
    units = [{"name": name, "type": "space"} for name in "zyx"]
    group = both(
        tmp_path / "s",
        between(warp, "source", "other"),
        between(warp, "third", "source"),
        {**warp, "input": end(None, "atlas"), "output": end("source")},
        {"type": "identity", "input": end(None, "units"), "output": end("source")},
        systems=[{"name": "atlas", "axes": SPACE}, {"name": "units", "axes": units}],
        third=(np.zeros(OTHER[0], "u1"), OTHER),
    )
    write_field(group, "f")
    write_omezarr(tmp_path / "s/flat", np.zeros((4, 4), "u1"), (1, 1), durable=False)
    options = {key: str(tmp_path / "s" / value) if key == "like" else value for key, value in options.items()}
    with pytest.raises(error, match=message):
        resample_zarr(tmp_path / "s/source", tmp_path / "o", **options, **FAST)
    assert not (tmp_path / "o").exists()
