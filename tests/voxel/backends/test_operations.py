"""If this fails, operations on masks differ from loops over voxels and from SciPy."""

import itertools

import numpy as np
import pytest
import zarr
from scipy import ndimage

from linumpy.voxel.backends.operations import Backend
from linumpy.voxel.element import ball
from tests.support.oracles.voxel_backends import needs_warp
from tests.support.oracles.voxel_reference import ball_offsets, components, dilated, eroded, filled, offsets_of

METHODS = ("dilate", "erode", "open", "close")


def random_mask(shape, part=0.3, seed=0):
    return np.random.default_rng(seed).random(shape) < part


@pytest.mark.parametrize("operation", ["union", "intersect", "subtract"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (2, 8, 64), (5, 6, 133)])
def test_boolean(backend, operation, shape):
    a, b = random_mask(shape, 0.5), random_mask(shape, 0.5, seed=1)
    right = {"union": a | b, "intersect": a & b, "subtract": a & ~b}[operation]
    assert np.array_equal(backend.boolean(operation, a, b), right)
    here = backend.put(a)
    assert backend.backend.boolean(operation, here, backend.put(b), out=here) is here
    assert np.array_equal(backend.boolean("union", backend._get(here), np.zeros(shape, bool)), right)


@pytest.mark.parametrize("where", [np.s_[:, :, 1:], np.s_[:, ::2, :], np.s_[::-1, :, :]])
def test_boolean_of_views_and_of_bytes_other_than_one(backend, where):
    """Memory without alignment, with gaps, or with true voxels that are not stored as 1."""
    rng = np.random.default_rng(0)
    a, b = (rng.choice(np.array([0, 1, 2, 255], np.uint8), (4, 6, 40)) for _ in range(2))
    xp = backend.backend.xp
    for cut in (where, np.s_[...]):
        x, y = xp.asarray(a).view(bool)[cut], xp.asarray(b).view(bool)[cut]
        for operation, right in (("union", (a != 0) | (b != 0)), ("intersect", (a != 0) & (b != 0))):
            found = backend._get(backend.backend.boolean(operation, x, y)).view(np.uint8)
            assert np.array_equal(found, right[cut])
        found = backend._get(backend.backend.boolean("subtract", x, y)).view(np.uint8)
        assert np.array_equal(found, ((a != 0) & (b == 0))[cut])


@pytest.mark.parametrize("operation", ["union", "subtract"])
@pytest.mark.parametrize("shift", [-2, -1, 0, 1])
def test_boolean_into_memory_that_overlaps(backend, operation, shift):
    """Each voxel is that of the masks as they were, also where words that are written are still to be read."""
    xp, width = backend.backend.xp, 4 * 8 * 128
    memory = random_mask((8, 8, 128), 0.5)
    planes = [slice(2, 6), slice(2 + shift, 6 + shift), slice(2 - shift, 6 - shift)]
    a, b = memory[planes[0]], memory[planes[1]]
    right = a | b if operation == "union" else a & ~b
    for out in (1, 2):
        here = xp.array(memory)
        found = backend.backend.boolean(operation, here[planes[0]], here[planes[1]], out=here[planes[out]])
        assert found.size == width
        assert np.array_equal(backend._get(here[planes[out]]), right)
        rest = np.ones(8, bool)
        rest[planes[out]] = False
        assert np.array_equal(backend._get(here)[rest], memory[rest])


def test_memory_that_cannot_be_changed(backend):
    """Read-only on the host; and voxels that share a byte, of which no count would be right."""
    xp, call = backend.backend.xp, backend.backend
    frozen = [xp.broadcast_to(xp.ones((1, 3, 4), bool), (2, 3, 4))]
    if isinstance(frozen[0], np.ndarray):
        frozen.append(np.frombuffer(bytes(24), bool).reshape(2, 3, 4))
    for mask in frozen:
        with pytest.raises(ValueError, match=r"mask is read-only or a broadcast view.*pass a copy"):
            call.subtract_swept_capsule(mask, (0, 0, 0), (9, 9, 9), 9, pitch=1)
        with pytest.raises(ValueError, match="mask is read-only"):
            call.subtract_swept_polyline(mask, [(0, 0, 0), (9, 9, 9)], 9, pitch=1)
        with pytest.raises(ValueError, match="out is read-only"):
            call.boolean("union", xp.ones((2, 3, 4), bool), xp.ones((2, 3, 4), bool), out=mask)
        assert backend._get(call.dilate(mask, radius=1, pitch=1)).all() == backend._get(mask).all()


ELEMENTS = {
    "cross": ndimage.generate_binary_structure(3, 1),
    "even": np.ones((2, 4, 2), bool),
    "asymmetric": np.array([[[0, 1, 1, 0, 0, 1, 0]], [[1, 0, 0, 0, 0, 0, 0]]], bool),
    "one beside the origin": np.array([[[0, 0, 0, 0, 1]]], bool),
    "ball": ball(2.0, (1, 1.5, 0.7)).mask,
}


@pytest.mark.parametrize("border", [False, True])
@pytest.mark.parametrize("name", ELEMENTS)
def test_morphology_by_loops(backend, name, border):
    mask, element = random_mask((4, 5, 9), 0.2), ELEMENTS[name]
    offsets = offsets_of(element)
    assert np.array_equal(backend.dilate(mask, element, border_value=border), dilated(mask, offsets, border))
    assert np.array_equal(backend.erode(~mask, element, border_value=border), eroded(~mask, offsets, border))


@pytest.mark.parametrize("method", METHODS)
def test_morphology_by_scipy(backend, method):
    """Over words of 64 voxels, runs longer than words and than rows, and views with gaps."""
    rng = np.random.default_rng(3)
    oracle = {"dilate": "dilation", "erode": "erosion", "open": "opening", "close": "closing"}[method]
    for shape, part in itertools.product([(3, 4, 63), (3, 4, 64), (4, 3, 65), (2, 5, 200)], [0.01, 0.5, 0.97]):
        mask = rng.random(shape) < part
        for size in [(1, 1, 130), (1, 1, 500), (3, 2, 70), (5, 9, 4)]:
            structure = rng.random(size) < 0.9
            structure[0, 0, 0] = True
            right = getattr(ndimage, f"binary_{oracle}")(mask, structure)
            found = getattr(backend, method)(mask, structure, border_value=False)
            assert np.array_equal(found, right), (shape, size, part)
    view = backend.put(rng.random((6, 8, 150)) < 0.1)[::2, 1:, ::-1]
    right = getattr(ndimage, f"binary_{oracle}")(backend._get(view.copy()), ELEMENTS["cross"])
    found = getattr(backend.backend, method)(view, ELEMENTS["cross"], border_value=False)
    assert np.array_equal(backend._get(found), right)


@pytest.mark.parametrize("options", [{"structure": ELEMENTS["even"]}, {"radius": 2.5, "pitch": (1, 1, 2)}])
def test_the_border_has_no_part_in_opening_and_closing(backend, options):
    """Unless it is asked for: an opening removes, and a closing adds, what a larger volume around would not undo."""
    mask = random_mask((9, 10, 11), 0.5)
    element = options["structure"] if "structure" in options else ball(2.5, (1, 1, 2)).mask
    closed, opened = backend.close(mask, **options), backend.open(mask, **options)
    wide = ndimage.binary_dilation(mask, element)
    assert np.array_equal(closed, ndimage.binary_erosion(wide, element, border_value=1))
    narrow = ndimage.binary_erosion(mask, element, border_value=1)
    assert np.array_equal(opened, ndimage.binary_dilation(narrow, element))
    assert not (mask & ~closed).any()
    assert not (opened & ~mask).any()
    assert (mask & ~ndimage.binary_closing(mask, element)).any()  # SciPy's removes voxels at the border


@pytest.mark.parametrize(
    ("radius", "pitch"), [*((radius, (1, 1, 1)) for radius in (0, 0.999, 1, 3, 5)), (6, (1.5, 2, 3)), (2, (0.5, 1, 4))]
)
def test_a_ball_is_exact(backend, radius, pitch):
    """Radii that reach voxel centres exactly (3-4-5 triangles, too) take these voxels in; a diameter would not do."""
    offsets = ball_offsets(radius, pitch)
    mask = np.zeros((9, 17, 25), bool)
    mask[4, 8, 12] = True
    right = np.zeros_like(mask)
    for offset in offsets:
        place = tuple(np.array([4, 8, 12]) + offset)
        if all(0 <= i < n for i, n in zip(place, mask.shape, strict=True)):
            right[place] = True
    assert np.array_equal(backend.dilate(mask, radius=radius, pitch=pitch), right)
    assert np.array_equal(backend.erode(~mask, radius=radius, pitch=pitch, border_value=True), ~right)
    assert right[4, 8, 12 + int(radius / pitch[0])]


@pytest.mark.parametrize("border", [False, True])
@pytest.mark.parametrize("method", ["dilate", "erode"])
def test_large_balls_are_the_sets_of_their_offsets(backend, method, border):
    """Also where SciPy's backend takes distances instead of offsets."""
    rng = np.random.default_rng(5)
    for radius, pitch in [(7, (1, 1, 1)), (9, (1, 2, 1.5)), (6.5, (1, 1, 0.7))]:
        element = ball(radius, pitch)
        assert element.mask.sum() > 200
        mask = rng.random((14, 15, 70)) < (0.002 if method == "dilate" else 0.998)
        oracle = ndimage.binary_dilation if method == "dilate" else ndimage.binary_erosion
        found = getattr(backend, method)(mask, radius=radius, pitch=pitch, border_value=border)
        assert np.array_equal(found, oracle(mask, element.mask, border_value=border))


@pytest.mark.parametrize("method", METHODS)
def test_masks_of_one_value(backend, method):
    for value, border in itertools.product((False, True), repeat=2):
        mask = np.full((5, 6, 70), value)
        for options in ({"radius": 7, "pitch": 1}, {"structure": ELEMENTS["cross"]}):
            element = ball(7, 1).mask if "radius" in options else ELEMENTS["cross"]
            right = getattr(Backend(), method)(mask, element, border_value=border)
            assert np.array_equal(getattr(backend, method)(mask, border_value=border, **options), right)


def test_fill_holes(backend):
    mask = random_mask((7, 8, 9), 0.55)
    mask[2:5, 2:6, 2:6] = True
    mask[3, 3:5, 3:5] = False
    found = backend.fill_holes(mask)
    assert np.array_equal(found, filled(mask))
    assert found[3, 3, 3]
    assert not backend.fill_holes(np.zeros((2, 3, 4), bool)).any()
    assert backend.fill_holes(np.ones((2, 3, 4), bool)).all()


@pytest.mark.parametrize("connectivity", [6, 18, 26])
def test_connected_components(backend, connectivity):
    for part in (0.1, 0.3, 1.0):
        mask = random_mask((6, 7, 8), part)
        labels, count = backend.connected_components(mask, connectivity)
        right, many = components(mask, connectivity)
        assert (count, labels.dtype) == (many, np.int32)
        assert np.array_equal(labels, right)


def test_distance_transform(backend):
    mask = random_mask((6, 7, 8), 0.9)
    pitch = (0.5, 2.0, 3.0)
    found = backend.distance_transform(mask, pitch)
    empty = np.argwhere(~mask) * np.array(pitch[::-1])
    for index in np.argwhere(mask):
        right = np.linalg.norm(empty - index * np.array(pitch[::-1]), axis=1).min()
        assert found[tuple(index)] == pytest.approx(right, rel=1e-6)
    assert not found[~mask].any()
    assert np.isinf(backend.distance_transform(np.ones((2, 3, 4), bool), 1)).all()


def test_marching_cubes(backend):
    """Closed, outwards, vertices halfway between a true and a false voxel; and voxelised again it is the mask.

    scikit-image adds a vertex within a cell where the cell alone does not say which corners are connected.
    """
    if backend.name != "scipy":
        pytest.importorskip("warp", "1.9", reason="surfaces need Warp 1.9")
    mask = Backend().dilate(random_mask((9, 10, 11), 0.01), radius=2.3, pitch=1)
    pitch, origin = (1.0, 2.0, 4.0), (10.0, -20.0, 30.0)
    vertices, triangles = backend.marching_cubes(mask, pitch, origin)
    assert (vertices.dtype, triangles.dtype) == (np.float64, np.int32)
    index = (vertices - origin) / pitch - 0.5
    halves = np.abs(index - np.round(index)) > 0.25
    on_edge = halves.sum(axis=1) == 1
    assert on_edge.mean() > (0.95 if backend.name == "scipy" else 0.999999)
    index, step = index[on_edge], 0.5 * halves[on_edge]
    padded = np.pad(mask, 1)
    ends = [np.round(index + sign * step).astype(int) + 1 for sign in (-1, 1)]
    values = [padded[end[:, 2], end[:, 1], end[:, 0]] for end in ends]
    assert (values[0] != values[1]).all()
    a, b, c = (vertices[triangles[:, corner]] for corner in range(3))
    assert np.einsum("ij,ij->i", a - origin, np.cross(b - origin, c - origin)).sum() > 0
    upper = np.array(origin) + np.array(mask.shape[::-1]) * pitch
    assert np.array_equal(backend.voxelize_mesh(vertices, triangles, (origin, upper), pitch), mask)
    nothing = backend.marching_cubes(np.zeros((2, 3, 4), bool), 1)
    assert [one.shape for one in nothing] == [(0, 3), (0, 3)]


@needs_warp
@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_surfaces_take_no_class_that_warp_is_about_to_remove():
    pytest.importorskip("warp", "1.9", reason="surfaces need Warp 1.9")
    from linumpy.voxel.backends.by_warp import WarpBackend

    vertices, triangles = WarpBackend("cpu").marching_cubes(np.ones((1, 1, 1), bool), 1)
    assert (vertices.shape, triangles.shape) == ((6, 3), (8, 3))  # an octahedron


@needs_warp
def test_surfaces_need_a_newer_warp(monkeypatch):
    import warp

    from linumpy.voxel.backends.by_warp import WarpBackend

    monkeypatch.setattr(warp.config, "version", "1.8.1")
    with pytest.raises(NotImplementedError, match=r"needs Warp 1\.9 or later, and this is 1\.8\.1"):
        WarpBackend("cpu").marching_cubes(np.ones((2, 3, 4), bool), 1)


@pytest.mark.parametrize("dtype", ["u1", "i8", ">u2"])
def test_masks_of_integers_are_true_where_they_are_not_0(backend, dtype):
    labels = np.random.default_rng(6).integers(-1, 2, (5, 6, 7)).astype(dtype)
    mask, xp = labels != 0, backend.backend.xp
    labels = xp.array(labels.astype(np.dtype(dtype).newbyteorder("=")) if xp is not np else labels)
    for name, arguments in (
        ("dilate", {"radius": 1}), ("erode", {"radius": 1}), ("fill_holes", {}), ("distance_transform", {}),
        ("connected_components", {}),
    ):  # fmt: skip
        found = backend._get(getattr(backend.backend, name)(labels, **arguments)) if name[0] != "c" else None
        if found is None:
            found = backend._get(backend.backend.connected_components(labels)[0])
            assert np.array_equal(found != 0, mask)
        else:
            assert np.array_equal(found, getattr(backend, name)(mask.copy(), **arguments))
    other = np.roll(mask, 1, axis=2)
    found = backend._get(backend.backend.boolean("subtract", labels, backend.put(other)))
    assert found.dtype == bool
    assert np.array_equal(found, mask & ~other)


def test_no_second_mask_is_one_without_a_true_voxel(backend):
    mask = np.random.default_rng(7).random((3, 4, 5)) < 0.5
    for operation, right in (("union", mask), ("intersect", np.zeros_like(mask)), ("subtract", mask)):
        assert np.array_equal(backend.boolean(operation, mask.copy()), right)
        assert np.array_equal(backend.boolean(operation, mask.copy(), None), right)


MASK = np.zeros((3, 4, 5), bool)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda b: b.boolean("xor", MASK, MASK), ValueError, "'xor' is unknown: choose one of union"),
        (lambda b: b.boolean("union", MASK, np.zeros((3, 4, 6), bool)), ValueError, r"b has shape \(3, 4, 6\)"),
        (lambda b: b.backend.boolean("union", b.put(MASK), b.put(MASK * 1.0)), TypeError, "b of shape .* float64"),
        (
            lambda b: b.backend.boolean("union", b.put(MASK), out=b.put(MASK.view("u1"))),
            TypeError,
            r"out of shape .* uint8: bool \(Z, Y, X\)",
        ),
        (
            lambda b: b.backend.subtract_swept_capsule(b.put(MASK.view("u1")), (0, 0, 0), (1, 1, 1), 1),
            TypeError,
            "mask of shape .* uint8",
        ),
        (lambda b: b.dilate(MASK[0], radius=1, pitch=1), TypeError, "mask of shape"),
        (lambda b: b.dilate(MASK), ValueError, "structure= .* or radius="),
        (lambda b: b.dilate(MASK, radius=-1, pitch=1), ValueError, "radius=-1"),
        (lambda b: b.dilate(MASK, radius=np.nan, pitch=1), ValueError, "radius=nan"),
        (lambda b: b.dilate(MASK, radius=1, pitch=(1, 0, 1)), ValueError, "pitch="),
        (lambda b: b.dilate(MASK, radius=1e6, pitch=1), ValueError, "more than a thousand voxels"),
        (lambda b: b.dilate(MASK, radius=1e300, pitch=1e-20), ValueError, "more than a thousand voxels"),
        (lambda b: b.dilate(MASK, radius=1, pitch=1e-320), ValueError, "pitch=1e-320: .* between 1e-50 and 1e"),
        (lambda b: b.distance_transform(MASK, (1, 1, 1e308)), ValueError, "pitch=.*between 1e-50 and 1e"),
        (lambda b: b.dilate(MASK, np.zeros((3, 3, 3), bool)), ValueError, "no true voxel"),
        (lambda b: b.dilate(MASK, [[1, 1]]), ValueError, "three axes"),
        (lambda b: b.connected_components(MASK, 8), ValueError, "connectivity=8"),
        (lambda b: b.fill_holes([[[True]]]), TypeError, "mask is list: a (NumPy|CuPy) array of bool"),
        (lambda b: b.fill_holes(zarr.array(MASK)), TypeError, "mask is Array: a (NumPy|CuPy) array of bool"),
    ],
)
def test_invalid_arguments(backend, call, error, message):
    with pytest.raises(error, match=message):
        call(backend)
