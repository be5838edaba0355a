"""If this fails, coordinate transformations (RFC-5) map points elsewhere (oracle: each type written out in NumPy)."""

import numpy as np
import pytest
import zarr

from linumpy.errors import MetadataError
from linumpy.io.ngff.coordinate_systems import stored_paths
from linumpy.io.ngff.transformations import is_invertible
from linumpy.io.scenes import MapReader
from linumpy.plan.grid.point_map import Affine, as_matrix, compose

TURN = [[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
SKEW = [[1.0, 0.5, 0.0, 3.0], [0.0, 2.0, -0.25, -1.0], [0.1, 0.0, 0.5, 0.0]]
SCALE = {"type": "scale", "scale": [2.0, 3.0, 0.5]}
SHIFT = {"type": "translation", "translation": [5.0, -6.0, 7.0]}
SWAP = {"type": "mapAxis", "mapAxis": [2, 0, 1]}
ONE = {"type": "scale", "scale": [4.0]}
POINTS = np.random.default_rng(0).normal(size=(3, 50))


def test_a_projection_is_no_identity():
    """Also one that leaves out the last coordinate."""
    cut = Affine(((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0)))
    assert compose((cut,)) == (cut,)
    assert compose((Affine(((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))),)) == ()


def applied(one, points):
    """Apply a transformation to points, a row for each coordinate."""
    kind = one["type"]
    if kind == "sequence":
        for part in one["transformations"]:
            points = applied(part, points)
        return points
    if kind == "byDimension":
        results = {}
        for part in one["transformations"]:
            inputs, outputs = (part.get(f"{end}Axes") or part[f"{end}_axes"] for end in ("input", "output"))
            results.update(zip(outputs, applied(part["transformation"], points[inputs]), strict=True))
        return np.array([results[axis] for axis in sorted(results)])
    if kind == "projectAxis":
        rows = [row for axis, row in enumerate(points) if axis not in one.get("droppedInputs", ())]
        for axis in sorted(one.get("createdOutputs", ())):
            rows.insert(axis, np.zeros(points.shape[1]))
        return np.array(rows)
    return {
        "identity": lambda: points,
        "scale": lambda: points * np.array(one["scale"])[:, None],
        "translation": lambda: points + np.array(one["translation"])[:, None],
        "mapAxis": lambda: points[one["mapAxis"]],
        "rotation": lambda: np.array(one["rotation"]) @ points,
        "affine": lambda: np.array(one["affine"]) @ np.vstack([points, np.ones(points.shape[1])]),
        "bijection": lambda: applied(one["forward"], points),
    }[kind]()


def mapped(steps, points):
    for step in steps:
        assert isinstance(step, Affine)
        matrix = np.array(step.matrix)
        points = matrix[:, :-1] @ points + matrix[:, -1:]
    return points


def sequence(*parts):
    return {"type": "sequence", "transformations": list(parts)}


def by_dimension(*parts, keys=("inputAxes", "outputAxes")):
    return {
        "type": "byDimension",
        "transformations": [{"transformation": one, keys[0]: a, keys[1]: b} for one, a, b in parts],
    }


@pytest.fixture
def group(tmp_path):
    return zarr.create_group(tmp_path / "g")


@pytest.mark.parametrize(
    "one",
    [
        {"type": "identity"},
        SCALE,
        SHIFT,
        SWAP,
        {"type": "rotation", "rotation": TURN},
        {"type": "affine", "affine": SKEW},
        sequence(SCALE, SHIFT, SWAP, {"type": "affine", "affine": SKEW}, sequence(SHIFT, SCALE)),
        by_dimension((ONE, [1], [0]), ({"type": "rotation", "rotation": [[0, -1], [1, 0]]}, [0, 2], [2, 1])),
        by_dimension((SWAP, [2, 0, 1], [1, 2, 0]), keys=("input_axes", "output_axes")),
        sequence(SCALE, by_dimension((sequence(ONE, ONE), [2], [1]), ({"type": "identity"}, [0, 1], [2, 0])), SHIFT),
        {"type": "bijection", "forward": SCALE, "inverse": {"type": "scale", "scale": [0.5, 1 / 3, 2.0]}},
        {"type": "projectAxis", "droppedInputs": [1]},
        {"type": "projectAxis", "createdOutputs": [0, 4]},
        sequence({"type": "projectAxis", "droppedInputs": [0, 2], "createdOutputs": [1]}, {"type": "identity"}),
        {"type": "affine", "affine": [[1.0, 2.0, 0.0, 3.0], [0.0, 0.0, 4.0, 1.0]]},
    ],
    ids=lambda one: one["type"],
)
def test_points_are_mapped_and_back(group, one):
    steps = MapReader(group, "g").read(one, 3)
    result = applied(one, POINTS)
    assert np.allclose(mapped(steps, POINTS), result, atol=1e-12)
    assert len(steps) <= 1  # one matrix
    assert as_matrix(steps, 3).shape == (len(result), 4)
    if len(result) == 3:
        assert is_invertible(one)
        assert np.allclose(mapped(MapReader(group, "g").read(one, 3, True), result), POINTS, atol=1e-9)
        there_and_back = {"type": "inverseOf", "transformation": {"type": "inverseOf", "transformation": one}}
        assert np.allclose(mapped(MapReader(group, "g").read(there_and_back, 3), POINTS), result, atol=1e-9)
    else:
        with pytest.raises(MetadataError, match=r"has no inverse|does not fit|numbers of shape|drops axes"):
            MapReader(group, "g").read(one, len(result), True)


def test_matrices_in_arrays(group):
    group.create_array("coordinateTransformations/m", data=np.array(SKEW))
    steps = MapReader(group, "g").read({"type": "affine", "path": "coordinateTransformations/m"}, 3)
    assert np.array_equal(as_matrix(steps, 3), SKEW)


def field(group, path, values, *, kind="displacement", last=True):
    """Write a field as an array with metadata of its own: steps of 2 from 10, 20, ... on."""
    array = group.create_array(path, data=values)
    rank = values.ndim - 1
    axes = [{"name": name, "type": "space"} for name in "zyx"[-rank:]]
    scale, shift = [2.0] * rank, [10.0 * n for n in range(1, rank + 1)]
    where = rank if last else 0
    for values_of_axes, one in ((axes, {"name": "d", "type": kind, "discrete": True}), (scale, 1.0), (shift, 0.0)):
        values_of_axes.insert(where, one)
    array.attrs["ome"] = {
        "coordinateSystems": [{"name": "f", "axes": axes}],
        "coordinateTransformations": [
            {
                **sequence({"type": "scale", "scale": scale}, {"type": "translation", "translation": shift}),
                "output": "f",
            }
        ],
    }
    return array


@pytest.mark.parametrize("last", [True, False])
def test_fields_are_opened_unread(group, last):
    shape = (4, 5, 6, 3) if last else (3, 4, 5, 6)
    field(group, "f", np.zeros(shape, "f4"), last=last)
    one = {"type": "displacements", "path": "f", "interpolation": "cubic"}
    (found,) = MapReader(group, "g").read(one, 3)
    assert (found.shape, found.outputs, found.component_axis) == ((4, 5, 6), 3, 3 if last else 0)
    assert (found.scale, found.translation, found.relative, found.order) == ((2,) * 3, (10, 20, 30), True, 3)
    whole = by_dimension((SCALE, [0, 1, 2], [2, 0, 3]), (one, [3, 1, 4], [1, 4, 5]))
    first, inside, after = MapReader(group, "g").read(whole, 5)
    assert (first.inputs, first.outputs, inside.first, after.inputs) == (5, 6, 3, 6)
    assert not is_invertible(whole)
    both = {"type": "bijection", "forward": one, "inverse": {"type": "identity"}}
    assert is_invertible(both)
    assert MapReader(group, "g").read(both, 3, True) == ()


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (5, "g: a coordinate transformation is no object"),
        ({"type": "spline", "name": "s"}, "'s' of type 'spline' is not known"),
        ({"type": ["scale"]}, "is not known"),
        ({"type": "scale", "scale": [1, 2]}, r"numbers of shape \(2,\), and points have 3"),
        ({"type": "scale", "scale": [1, 2, "3"]}, "has no scale of numbers"),
        ({"type": "affine", "affine": [[1, 2], [3]]}, "has no affine of numbers"),
        ({"type": "affine"}, "has no affine of numbers"),
        ({"type": "affine", "path": "../m"}, "may not leave its group"),
        ({"type": "affine", "path": "m"}, "where there is nothing"),
        ({"type": "mapAxis", "mapAxis": [0, 0, 1]}, "is no order of the axes 0 to 2"),
        ({"type": "mapAxis", "mapAxis": {"x": "y"}}, "is no order of the axes"),
        ({"type": "projectAxis", "droppedInputs": [3]}, "drops axes that are not among 3"),
        ({"type": "sequence", "transformations": [1]}, "no list of transformations"),
        (by_dimension((ONE, [0], [0]), (ONE, [5], [1])), "does not take 3"),
        (by_dimension((ONE, [0], [0]), (ONE, [1], [0])), "does not take 3"),
        (by_dimension((ONE, ["z"], ["z"])), "lists of indices"),
        ({"type": "displacements"}, "has no path"),
        ({"type": "displacements", "path": "bare"}, "no metadata describe its axes"),
        ({"type": "displacements", "path": "f", "interpolation": "sinc"}, "nearest, linear, cubic are read"),
        ({"type": "coordinates", "path": "f"}, "not one of type 'coordinate'"),
        ({"type": "displacements", "path": "flat"}, "2 components at points of 3|does not fit"),
        ({"type": "inverseOf", "transformation": {"type": "displacements", "path": "f"}}, "has no inverse"),
        ({"type": "affine", "affine": [[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0]]}, None),
    ],
)
def test_what_cannot_be_read_is_named(group, one, message):
    group.create_array("bare", data=np.zeros((2, 2, 2, 3)))
    field(group, "f", np.zeros((2, 2, 2, 3)))
    field(group, "flat", np.zeros((2, 2, 2, 2)))
    if message is None:  # singular: no inverse
        MapReader(group, "g").read(one, 3)
        message, one = "has no inverse", {"type": "inverseOf", "transformation": one}
    with pytest.raises(MetadataError, match=message):
        MapReader(group, "g").read(one, 3)


@pytest.mark.parametrize("key", ["transformations", "transformation", "forward", "inverse"])
def test_paths_of_stored_arrays_are_found_in_every_transformation(key):
    field = {"type": "displacements", "path": "field"}
    outer = {"type": "outer", key: [field] if key == "transformations" else field}
    assert stored_paths([{"type": "scale", "scale": [1]}, {"transformations": [outer]}]) == ["field"]
