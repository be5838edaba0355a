"""If this fails, samples of meshes are off where the value is known."""

import struct

import numpy as np
import pytest

from linumpy.errors import SourceError, UnsupportedLayoutError
from linumpy.sampling.fields.umesh import open_exastitch
from tests.support.gpu.field_runs import SIDES, decode, on_gpu

LINEAR = np.array([0.5, -1.0, 0.25])
#: Corners of VTK's elements in the unit cube, in the order of VTK's documentation.
CUBE = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1], [0, 1, 1]], float)
CORNERS = {
    "tets": np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], float),
    "pyramids": np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0.5, 0.5, 1]], float),
    "wedges": np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 1], [0, 1, 1]], float),
    "hexes": CUBE,
}
FIELDS = ("triangles", "quads", "tets", "pyramids", "wedges", "hexes")
WIDTHS = {"triangles": 3, "quads": 4, "tets": 4, "pyramids": 5, "wedges": 6, "hexes": 8}


def vector(values, dtype):
    values = np.asarray(values, dtype)
    return struct.pack("<Q", len(values)) + values.tobytes()


def content(vertices, values=(), tags=None, magic=0x234235567, width="<Q", names=("density",), **elements):
    """A umesh file."""
    made = struct.pack("<Q", magic) + vector(vertices, "<f4")
    if magic == 0x234235566:
        made += vector(values, "<f4")
    else:
        made += struct.pack("<Q", len(names))
        for number, name in enumerate(names):
            made += struct.pack(width, len(name)) + name.encode() + vector(np.asarray(values) + number, "<f4")
        made += struct.pack("<Q", 0)
    for name in FIELDS:
        made += vector(np.reshape(elements.get(name, []), (-1, WIDTHS[name])), "<i4")
    return made + (b"" if tags is None else vector(tags, "<u8"))


def mesh_file(folder, *args, **kwargs):
    (folder / "a.umesh").write_bytes(content(*args, **kwargs))
    return folder / "a.umesh"


def grid_file(folder, grids):
    """Grids (lower, level, cells, ids[x, y, z])."""
    parts = []
    for lower, level, cells, ids in grids:
        parts += [*lower, level, *cells, *np.asarray(ids).ravel(order="F")]
    np.array(parts, "<i4").tofile(folder / "a.grids")
    return folder / "a.grids"


def weights(kind, r, s, t):
    """VTK's shape functions at parametric coordinates: (n, corners)."""
    if kind == "tets":
        return np.stack([1 - r - s - t, r, s, t], -1)
    if kind == "wedges":
        low = np.stack([1 - r - s, r, s], -1)
        return np.concatenate([low * (1 - t)[:, None], low * t[:, None]], -1)
    base = np.stack([(1 - r) * (1 - s), r * (1 - s), r * s, (1 - r) * s], -1) * (1 - t)[:, None]
    if kind == "pyramids":
        return np.concatenate([base, t[:, None]], -1)
    return np.concatenate([base, base / (1 - t)[:, None] * t[:, None]], -1)


def parametric(kind, count, rng):
    r, s, t = rng.random((3, count)) * 0.999
    sums = {"tets": r + s + t, "wedges": r + s}
    inside = sums.get(kind, np.zeros(count)) < 1
    return r[inside], s[inside], t[inside]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("kind", list(CORNERS))
def test_a_curved_element(tmp_path, kind, flipped, side):
    """Points made from weights have the values of those weights, whichever way the element is turned."""
    rng = np.random.default_rng(len(kind))
    vertices = CORNERS[kind] + rng.uniform(-0.12, 0.12, CORNERS[kind].shape)
    vertices = (vertices @ np.array([[2, 0.3, 0], [0, 3, 0.2], [0.4, 0, 1.5]]) + [100, -7, 3]).astype(np.float32)
    vertices *= np.array([-1 if flipped else 1, 1, 1], np.float32)
    values = rng.standard_normal(len(vertices)).astype(np.float32)
    field = open_exastitch(mesh_file(tmp_path, vertices, values, **{kind: [np.arange(len(vertices))]}))
    share = weights(kind, *parametric(kind, 600, rng))
    coords = (share @ vertices.astype(float) - field.domain[0]) / (field.domain[1] - field.domain[0])
    found = decode(field, coords, side)[0]
    # A face may be missed by the rounding of coordinates to float32.
    lost = np.isnan(found)
    assert lost.mean() < 0.01
    assert share[lost].min(axis=1, initial=0).max(initial=0) < 1e-4
    np.testing.assert_allclose(found[~lost], (share @ values.astype(float))[~lost], atol=2e-4)
    corners = (vertices - field.domain[0]) / (field.domain[1] - field.domain[0])
    middle = corners.mean(0)
    np.testing.assert_allclose(decode(field, corners + 1e-5 * (middle - corners), side)[0], values, atol=1e-3)
    far = np.array([[0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]], float)
    if kind in ("tets", "pyramids"):
        assert np.isnan(decode(field, far, side)[0]).any()
    assert field.value_range == (values.min(), values.max())


def lattice(shape):
    """Vertices of a lattice (x fastest), and for each cell the eight of a hexahedron."""
    nx, ny, _ = np.array(shape) + 1
    points = np.stack(np.meshgrid(*[np.arange(n + 1.0) for n in shape], indexing="ij"), -1)
    points = points.transpose(2, 1, 0, 3).reshape(-1, 3)
    cells = np.array(list(np.ndindex(*shape)))
    corner = cells[:, None] + CUBE[None].astype(int)
    return points, (corner[..., 2] * ny + corner[..., 1]) * nx + corner[..., 0]


#: A cube in six tetrahedra around its diagonal, and in two wedges.
TETS = [[0, 1, 2, 6], [0, 2, 3, 6], [0, 3, 7, 6], [0, 7, 4, 6], [0, 4, 5, 6], [0, 5, 1, 6]]
WEDGES = [[0, 1, 2, 4, 5, 6], [0, 2, 3, 4, 6, 7]]
PYRAMIDS = [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 5, 4], [1, 2, 6, 5], [2, 3, 7, 6], [3, 0, 4, 7]]


def filled_mesh(shape, kinds, rng):
    """A lattice whose cells are one of some kinds of elements each; curved where these agree on curved faces."""
    points, hexes = lattice(shape)
    inner = ((points > 0) & (points < shape)).all(1)
    if set(kinds) <= {"hexes", "pyramids"}:
        points[inner] += rng.uniform(-0.2, 0.2, (inner.sum(), 3))
    elements = {kind: [] for kind in CORNERS}
    for cell in hexes:
        kind = kinds[rng.integers(len(kinds))]
        if kind == "pyramids":
            points = np.concatenate([points, points[cell].mean(0, keepdims=True)])
            elements[kind] += [[*cell[face], len(points) - 1] for face in PYRAMIDS]
        else:
            parts = {"tets": TETS, "wedges": WEDGES, "hexes": [range(8)]}[kind]
            elements[kind] += [cell[list(part)] for part in parts]
    return points, elements


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kinds", [("hexes", "pyramids"), ("tets", "wedges", "hexes", "pyramids"), ("tets",)])
def test_no_holes_between_elements(tmp_path, kinds, side):
    """A linear function is found everywhere in a filled box, on faces, edges and corners as well."""
    rng = np.random.default_rng(len(kinds))
    shape = (4, 3, 3)
    points, elements = filled_mesh(shape, kinds, rng)
    file = mesh_file(tmp_path, points, points @ LINEAR, **elements)
    field = open_exastitch(file)
    on_lattice = np.round(rng.random((300, 3)) * shape * 2) / 2 / shape
    halfway = points[rng.integers(0, len(points), 300)] * 0.5 + points[rng.integers(0, len(points), 300)] * 0.5
    coords = np.concatenate([rng.random((1500, 3)), on_lattice, halfway / shape]).astype(np.float32)
    found = decode(field, coords, side)[0]
    np.testing.assert_allclose(found, coords.astype(float) * shape @ LINEAR, atol=5e-6)


@pytest.mark.parametrize("side", SIDES)
def test_marching_over_grids_of_two_levels_and_what_stitches_them(tmp_path, side):
    grids, values, vertices = [], [], []

    def add(lower, level, cells):
        ids = len(values) + np.arange(np.prod(np.array(cells) + 1)).reshape(np.array(cells) + 1, order="F")
        grids.append((lower, level, cells, ids))
        index = np.moveaxis(np.indices(ids.shape), 0, -1)
        places = (np.array(lower) + index + 0.5) * 2**level
        values.extend((places @ LINEAR).ravel(order="F"))
        return places

    fine, coarse = add((0, 0, 0), 0, (4, 4, 4)), add((3, 0, 0), 1, (2, 2, 2))
    near, far = fine[-1, [0, -1, -1, 0], [0, 0, -1, -1]], coarse[0, [0, -1, -1, 0], [0, 0, -1, -1]]
    vertices = np.concatenate([near, far])  # one hexahedron from face to face
    tags = len(values) + np.arange(8)
    values.extend(vertices @ LINEAR)
    np.array(values, "<f4").tofile(tmp_path / "a.scalar")
    file = mesh_file(tmp_path, vertices, names=(), tags=tags, hexes=[np.arange(8)])
    field = open_exastitch(file, grid_file(tmp_path, grids), tmp_path / "a.scalar")
    assert field.domain.tolist() == [[0.5, 0.5, 0.5], [11, 5, 5]]
    line = np.stack([np.linspace(0.5, 11, 5001), np.full(5001, 2.7), np.full(5001, 3.1)], 1)
    coords = (line - 0.5) / (field.domain[1] - 0.5)
    found = decode(field, coords, side)[0]
    np.testing.assert_allclose(found, line @ LINEAR, atol=5e-6)


@pytest.mark.parametrize("side", SIDES)
def test_grid_cells_without_a_value_are_empty(tmp_path, side):
    ids = np.arange(27).reshape(3, 3, 3)
    ids[2, 2, 2], ids[0, 0, 0] = -1, 99
    np.arange(27, dtype="<f4").tofile(tmp_path / "a.scalar")
    grids = grid_file(tmp_path, [((0, 0, 0), 0, (2, 2, 2), ids)])
    field = open_exastitch(grids=grids, scalar=tmp_path / "a.scalar", background=-1)
    found = decode(field, [[0.75, 0.75, 0.75], [0.25, 0.25, 0.25], [0.75, 0.25, 0.25], [0.25, 0.75, 1]], side)[0]
    expected = [1.5 * 9 + 0.5 * 3 + 0.5, 0.5 * 9 + 1.5 * 3 + 2]
    np.testing.assert_allclose(found, [-1, -1, *expected], atol=1e-5)


def one_tet(**kwargs):
    return content(CORNERS["tets"], [1, 2, 3, 4], tets=[[0, 1, 2, 3]], **kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"magic": 0x234235566},
        {"width": "<Q"},
        {"width": "<I"},
        {"width": "<I", "names": ("a", "bc", "")},
        {"width": "<Q", "names": ("", "a")},
        {"width": "<Q", "names": ("density" * 9, "b")},
        {"width": "<I", "tags": [3, 2, 1, 0]},
        {"triangles": [[0, 1, 2]], "quads": [[0, 1, 2, 3]]},
    ],
)
def test_every_form_of_file(tmp_path, kwargs):
    (tmp_path / "a.umesh").write_bytes(one_tet(**kwargs))
    field = open_exastitch(tmp_path / "a.umesh")
    assert decode(field, [[0.25, 0.25, 0.25]])[0, 0] == pytest.approx(2.5)
    if "tags" in kwargs:
        np.array([10, 20, 30, 40], "<f4").tofile(tmp_path / "a.scalar")
        field = open_exastitch(tmp_path / "a.umesh", scalar=tmp_path / "a.scalar")
        assert decode(field, [[0.5, 0.25, 0.125]])[0, 0] == pytest.approx(0.125 * 40 + 15 + 5 + 1.25)


def test_truncated_anywhere(tmp_path):
    for kwargs in ({"magic": 0x234235566}, {"width": "<I"}, {"width": "<Q"}):
        made = one_tet(**kwargs)
        for size in range(len(made)):
            (tmp_path / "a.umesh").write_bytes(made[:size])
            with pytest.raises(SourceError, match=r"a\.umesh"):
                open_exastitch(tmp_path / "a.umesh")
        (tmp_path / "a.umesh").write_bytes(made + b"\0")
        with pytest.raises(SourceError):
            open_exastitch(tmp_path / "a.umesh")


def test_counts_that_cannot_be(tmp_path):
    made = one_tet(magic=0x234235566)
    for count in (2**63, 2**64 - 1, 2**60, 2**32):
        (tmp_path / "a.umesh").write_bytes(made[:8] + struct.pack("<Q", count) + made[16:])
        with pytest.raises(SourceError, match=f"vertices: {count} records of 12 bytes do not fit"):
            open_exastitch(tmp_path / "a.umesh")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: b"\1" * 100, "is no umesh file: it begins with 0x1010101"),
        (lambda: content([[0, 0, 0]], [1]), "no grid and no element"),
        (
            lambda: content([], width="<I", names=("", ""), tags=[]),
            "4 or of 8 bytes: the file can be read in both ways",
        ),
        (lambda: content(CORNERS["tets"], [1, 2, 3, 4], tets=[[0, 1, 2, 4]]), r"its tets has vertices \[0, 1, 2, 4\]"),
        (lambda: content(CORNERS["tets"], [1, 2, 3, 4], tets=[[0, -1, 2, 3]]), r"has vertices \[0, -1, 2, 3\]"),
        (lambda: content(CORNERS["tets"], [1, 2], tets=[[0, 1, 2, 3]]), "4 vertices and 2 values"),
        (lambda: content(CORNERS["tets"], names=(), tets=[[0, 1, 2, 3]]), "vertices have no values"),
        (lambda: content(CORNERS["tets"] * np.nan, [1, 2, 3, 4], tets=[[0, 1, 2, 3]]), "coordinate that is not finite"),
        (lambda: content(CORNERS["tets"] * 6e38 - 3e38, [1, 2, 3, 4], tets=[[0, 1, 2, 3]]), "6e\\+38 units"),
    ],
)
def test_faulty_meshes(tmp_path, make, problem):
    (tmp_path / "a.umesh").write_bytes(make())
    with pytest.raises(SourceError, match=problem):
        open_exastitch(tmp_path / "a.umesh")


def test_other_faulty_input(tmp_path):
    with pytest.raises(SourceError, match="give umesh=, grids= or both"):
        open_exastitch()
    (tmp_path / "a.umesh").write_bytes(one_tet(magic=0x234235568))
    with pytest.raises(UnsupportedLayoutError, match="with grids inside"):
        open_exastitch(tmp_path / "a.umesh")
    (tmp_path / "a.umesh").write_bytes(one_tet(tags=[0, 1, 2, 7]))
    np.zeros(3, "<f4").tofile(tmp_path / "a.scalar")
    with pytest.raises(SourceError, match="a vertex has tag 7, but scalar= holds 3 values"):
        open_exastitch(tmp_path / "a.umesh", None, tmp_path / "a.scalar")
    grids = grid_file(tmp_path, [((0, 0, 0), 0, (1, 1, 1), np.arange(8))])
    with pytest.raises(SourceError, match="give the file of the values as scalar="):
        open_exastitch(None, grids)
    grids.write_bytes(grids.read_bytes()[:-4])
    with pytest.raises(SourceError, match="8 ids, of which only 7 are there"):
        open_exastitch(None, grids, tmp_path / "a.scalar")


def test_flat_elements_contain_no_point(tmp_path):
    """An element without a volume is passed over; its neighbours are found."""
    vertices = np.concatenate([CORNERS["tets"], CORNERS["tets"] * [1, 1, 0]])
    file = mesh_file(tmp_path, vertices, np.arange(8.0), tets=[[4, 5, 6, 7], [0, 1, 2, 3]])
    for side in ("host", "kernel"):
        found = decode(open_exastitch(file), [[0.25, 0.25, 0.0], [0.25, 0.25, 0.25]], side)[0]
        np.testing.assert_allclose(found, [0.25 + 0.5, 0.25 + 0.5 + 0.75], atol=1e-5)


@pytest.mark.gpu
@pytest.mark.sanitize
def test_on_gpu(tmp_path):
    rng = np.random.default_rng(4)
    shape = (6, 5, 4)
    points, elements = filled_mesh(shape, ("tets", "wedges", "hexes", "pyramids"), rng)
    field = open_exastitch(mesh_file(tmp_path, points, points @ LINEAR, **elements))
    coords = rng.random((100_000, 3), dtype=np.float32)
    np.testing.assert_allclose(on_gpu(field, coords)[0], coords.astype(float) * shape @ LINEAR, atol=1e-5)
