"""If this fails, grids of .vdb and .nvdb files hold other values than OpenVDB and Warp say (tests/data/write_*vdb*)."""

import contextlib
import struct
import zlib

import numpy as np
import pytest

from linumpy.errors import SourceError, UnsupportedLayoutError
from linumpy.sampling.fields.vdb import SparseGrid, open_vdb
from linumpy.sampling.files import nanovdb
from linumpy.sampling.files.tree import Levels, flatten
from tests.support.gpu.field_runs import SIDES, decode, grid_coords, on_gpu

OPENVDB = [
    *("float_none", "float_mask", "float_zip", "float_zip_mask", "float_blosc_mask", "float_half_blosc_mask"),
    *("float_half_zip", "double_blosc_mask", "int32_blosc", "int64_zip_mask"),
]


@pytest.fixture(scope="module")
def files(extracted):
    return extracted("vdb.zip")


def truth(file):
    """First voxel, and values of the box of active voxels, as OpenVDB gives them."""
    content = file.read_bytes()
    ends = np.frombuffer(content[:24], "<i4").reshape(2, 3)
    return ends[0], np.frombuffer(content[24:], "<f4").reshape(ends[1] - ends[0] + 1)


def trilinear(volume, coords):
    """Slow and obvious: (x, y, z) volume, points in the unit cube; float64."""
    size = np.array(volume.shape)
    at = np.clip(np.asarray(coords, float) * size - 0.5, 0, size - 1)
    low = np.floor(at).astype(int)
    result = np.zeros(len(coords))
    for corner in np.ndindex(2, 2, 2):
        voxel = np.minimum(low + corner, size - 1)
        share = np.where(corner, at - low, 1 - (at - low)).prod(1)
        result += share * volume[tuple(voxel.T)].astype(float)
    return result


@pytest.mark.parametrize("name", OPENVDB)
def test_voxels_of_every_kind_of_file(files, name):
    grid = open_vdb(files / f"{name}.vdb", "density")
    _, volume = truth(files / f"{name}.truth")
    assert grid.shape == volume.shape
    assert (grid.n_channels, grid.value_range[1]) == (1, max(7, volume.max()))
    centres = grid_coords(volume.shape, np.argwhere(np.ones(volume.shape)))
    found = decode(grid, centres)[0]
    # A coordinate in float32 is off its centre by 1e-6 of a voxel.
    np.testing.assert_allclose(found, volume.ravel(), atol=5e-5)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("name", "field"), [("float_blosc_mask", "density"), ("level_set", None)])
def test_between_voxels(files, name, field, side):
    _, volume = truth(files / f"{name}.truth")
    coords = np.random.default_rng(3).random((4000, 3), dtype=np.float32)
    coords[:6] = [[0, 0, 0], [1, 1, 1], [0, 1, 0.5], [1, 0, 0], [0.5, 0.5, 1], [0.25, 0, 1]]
    grid = open_vdb(files / f"{name}.vdb", field)
    np.testing.assert_allclose(decode(grid, coords, side)[0], trilinear(volume, coords), atol=2e-5)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", ["float", "vec3f", "int32"])
def test_as_warp_samples(files, kind, side):
    known = np.load(files / "warp.npz")
    points, values, (low, high) = known[f"{kind}_points"], known[f"{kind}_values"], known[f"{kind}_box"]
    grid = open_vdb(files / f"warp_{kind}.nvdb")
    assert grid.shape == tuple(high - low + 1)
    found = decode(grid, grid_coords(grid.shape, points - low), side)
    # Coordinates are off by 1e-5 of a voxel in a box of 200, and values of neighbours differ by up to 2000.
    tolerance = 0.03 if kind == "int32" else 1e-4
    np.testing.assert_allclose(found, values.reshape(len(points), -1).T, atol=tolerance)


@pytest.mark.parametrize("side", SIDES)
def test_tiles_of_all_levels_and_background(files, side):
    grid = open_vdb(files / "tiles.vdb")
    assert grid.shape == (4352, 4096, 4096)
    first = np.array([-4096, 0, 0])

    def at(*voxels):
        return decode(grid, grid_coords(grid.shape, np.array(voxels) - first), side)[0]

    np.testing.assert_allclose(at((-4000, 5, 4000), (-1, 0, 0)), 7)
    np.testing.assert_allclose(at((200, 100, 5), (128, 0, 0)), 2)
    np.testing.assert_allclose(at((64, 10, 10), (10, 4000, 4000)), 0.5)
    assert at((126.5, 64, 64))[0] == pytest.approx((0.5 + 9) / 2, abs=0.02)
    assert at((127.5, 64.5, 64))[0] == pytest.approx((9 + 5 + 2 + 2) / 4, abs=0.02)
    assert at((-0.5, 7, 7))[0] == pytest.approx((7 + 0.5) / 2, abs=0.02)


def test_vectors_instances_and_names(files):
    velocity = open_vdb(files / "vector.vdb")
    assert velocity.n_channels == 3
    found = decode(velocity, grid_coords((5, 5, 9), [[3, 2, 5], [0.5, 2, 5]]))
    np.testing.assert_allclose(found.T, [[3, 2, 5.5], [0.5, 2, 5.5]], atol=1e-5)
    coords = np.random.default_rng(0).random((100, 3))
    by_name = [decode(open_vdb(files / "instance.vdb", name), coords) for name in ("a", "b", None)]
    np.testing.assert_array_equal(by_name[0], by_name[1])
    np.testing.assert_array_equal(by_name[0], by_name[2])
    with pytest.raises(SourceError, match=r"no grid 'c'; its grids are \['a', 'b'\]"):
        open_vdb(files / "instance.vdb", "c")
    assert open_vdb(files / "float_none.vdb").shape == (1, 1, 1)  # the first, with one active voxel


def test_an_instance_of_what_is_not_there(files, tmp_path):
    content = (files / "instance.vdb").read_bytes()
    at = content.index(b"\1\0\0\0b") + 5  # the unique name; behind it the type, and the parent
    parent = content.index(b"\1\0\0\0a", at) + 4
    (tmp_path / "a.vdb").write_bytes(content[:parent] + b"b" + content[parent + 1 :])
    with pytest.raises(SourceError, match="'b' shares the tree of 'b', which is not before it"):
        open_vdb(tmp_path / "a.vdb", "b")


def test_a_file_without_offsets_is_read_in_order(files, tmp_path):
    content = bytearray((files / "float_mask.vdb").read_bytes())
    content[20] = 0  # the flag; nobody may use the offsets then
    (tmp_path / "a.vdb").write_bytes(content)
    coords = np.random.default_rng(1).random((50, 3))
    expected = decode(open_vdb(files / "float_mask.vdb", "density"), coords)
    np.testing.assert_array_equal(decode(open_vdb(tmp_path / "a.vdb", "density"), coords), expected)


# Damaged files.


def damaged(tmp_path, content, name="a.vdb"):
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


@pytest.mark.parametrize("name", ["float_none.vdb", "float_blosc_mask.vdb", "float_half_zip.vdb", "warp_float.nvdb"])
def test_truncated_anywhere(files, tmp_path, name):
    content = (files / name).read_bytes()
    field = None if name.endswith("nvdb") else "density"
    for size in np.linspace(0, len(content) - 1, 60).astype(int):
        with pytest.raises((SourceError, UnsupportedLayoutError)):
            open_vdb(damaged(tmp_path, content[:size], name), field)


def test_a_grid_that_a_nanovdb_file_does_not_have(files, tmp_path):
    """Warp does not count the length before a compressed grid as part of it; other writers do."""
    content = (files / "warp_float.nvdb").read_bytes()
    assert int.from_bytes(content[24:32], "little") + 8 == len(content) - 193
    with pytest.raises(SourceError, match=r"has no grid 'density'; its grids are \[''\]"):
        open_vdb(files / "warp_float.nvdb", "density")
    named = content[:192] + b"b" + content[193:]  # the name is a single byte
    for counted in (0, 8):
        size = (len(content) - 201 + counted).to_bytes(8, "little")
        both = damaged(tmp_path, content[:24] + size + content[32:] + named, "two.nvdb")
        coords = np.random.default_rng(3).random((50, 3), np.float32)
        assert np.array_equal(decode(open_vdb(both, "b"), coords), decode(open_vdb(both), coords), equal_nan=True)
        with pytest.raises(SourceError, match=r"has no grid 'c'; its grids are \['', 'b'\]"):
            open_vdb(both, "c")


def test_no_vdb_file(files, tmp_path):
    content = (files / "float_mask.vdb").read_bytes()
    with pytest.raises(SourceError, match="is no OpenVDB file: it begins with 0x2020202020202020"):
        open_vdb(damaged(tmp_path, b" " * 8 + content[8:]))
    with pytest.raises(UnsupportedLayoutError, match="file version 220 is not read"):
        open_vdb(damaged(tmp_path, content[:8] + struct.pack("<I", 220) + content[12:]))
    with pytest.raises(UnsupportedLayoutError, match="Tree_bools_5_4_3 is not read"):
        open_vdb(damaged(tmp_path, content.replace(b"Tree_float_5_4_3", b"Tree_bools_5_4_3")))
    with pytest.raises(UnsupportedLayoutError, match="NonlinearMap"):
        open_vdb(damaged(tmp_path, content.replace(b"UniformScaleMap", b"NonlinearMapXYZ")))
    with pytest.raises(SourceError, match=r"must end in one of \.vdb, \.nvdb"):
        open_vdb(damaged(tmp_path, content, "a.raw"))
    with pytest.raises(SourceError, match="is no NanoVDB file"):
        open_vdb(damaged(tmp_path, content, "a.nvdb"))


def test_counts_that_cannot_be(files, tmp_path):
    content = (files / "float_mask.vdb").read_bytes()
    head = 8 + 4 + 8 + 1 + 36
    for count in (-1, 2**31 - 1):
        broken = content[:head] + struct.pack("<i", count) + content[head + 4 :]
        with pytest.raises(SourceError, match=r"items of metadata: -?\d+ records of 12 bytes do not fit"):
            open_vdb(damaged(tmp_path, broken))


def test_a_grid_larger_than_any_memory(files, tmp_path):
    content = (files / "warp_float.nvdb").read_bytes()
    for size in (2**63 - 1, 2**64 - 1):
        broken = content[:16] + struct.pack("<Q", size) + content[24:]
        with pytest.raises(SourceError, match=f"they are not {size} bytes once unzipped"):
            open_vdb(damaged(tmp_path, broken, "warp_float.nvdb"))


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_gives_our_errors_or_values(files, tmp_path, seed):
    """No crash, no other exception, no memory beyond that of the file, whatever bytes are changed."""
    rng = np.random.default_rng(seed)
    for name in ("float_zip_mask.vdb", "float_blosc_mask.vdb", "warp_raw.nvdb"):
        known = raw_grid(files / "warp_float.nvdb") if name == "warp_raw.nvdb" else (files / name).read_bytes()
        for _ in range(15):
            content = bytearray(known)
            for position in rng.integers(0, min(len(content), 20_000), 4):
                content[position] = rng.integers(256)
            with contextlib.suppress(SourceError, UnsupportedLayoutError):
                decode(open_vdb(damaged(tmp_path, content, name)), rng.random((10, 3)))


# NanoVDB files that Warp does not write.


def raw_grid(file):
    """The memory of the grid of a file that Warp wrote."""
    content = file.read_bytes()
    start = 16 + 176 + struct.unpack("<I", content[16 + 136 : 16 + 140])[0]
    return zlib.decompress(content[start + 8 :])


def test_codecs_and_raw_grids_hold_the_same(files, tmp_path):
    from numcodecs import Blosc

    grid = raw_grid(files / "warp_float.nvdb")
    packed = Blosc("lz4").encode(grid)
    head = (files / "warp_float.nvdb").read_bytes()[:192]
    files_of = {
        "raw": grid,
        "none": head[:14] + b"\0\0" + head[16:] + name_of(files) + grid,
        "blosc": head[:14] + b"\2\0" + head[16:] + name_of(files) + struct.pack("<Q", len(packed)) + packed,
    }
    coords = np.random.default_rng(0).random((200, 3))
    expected = decode(open_vdb(files / "warp_float.nvdb"), coords)
    for name, content in files_of.items():
        found = decode(open_vdb(damaged(tmp_path, content, f"{name}.nvdb")), coords)
        np.testing.assert_array_equal(found, expected)


def name_of(files):
    content = (files / "warp_float.nvdb").read_bytes()
    return content[192 : 192 + struct.unpack("<I", content[152:156])[0]]


def quantised(grid, kind, codes, bits):
    """Make a grid of quantised leaves of one of floats: codes (leaves, 512)."""
    offsets = np.frombuffer(grid[672:704], "<u8")
    leaf, count = 672 + int(offsets[0]), len(codes)
    made = bytearray(grid)
    made[636:640] = struct.pack("<I", kind)
    places = [leaf + 2144 * n for n in range(count)]  # a quantised leaf is smaller than one of floats
    for n, place in enumerate(places):
        width = bits[n]
        packed = np.packbits(
            (codes[n][:, None] >> np.arange(width) & 1).astype(np.uint8).ravel(), bitorder="little"
        ).tobytes()
        made[place + 15] = (made[place + 15] & 0x1F) | width.bit_length() - 1 << 5
        made[place + 80 : place + 88] = struct.pack("<ff", -1.0 - n, 0.5)
        made[place + 96 : place + 96 + len(packed)] = packed
    return bytes(made)


@pytest.mark.parametrize(("kind", "width"), [(13, 4), (14, 8), (15, 16), (16, None)])
def test_quantised_leaves(files, tmp_path, kind, width):
    grid = raw_grid(files / "warp_float.nvdb")
    rng = np.random.default_rng(kind)
    count = struct.unpack("<I", grid[704:708])[0]
    bits = [width or 1 << int(rng.integers(5)) for _ in range(count)]
    codes = np.stack([rng.integers(0, 1 << one, 512) for one in bits])
    made = damaged(tmp_path, quantised(grid, kind, codes, bits), "q.nvdb")
    leaves = nanovdb.read_nanovdb(made).leaves[0]
    expected = codes * 0.5 - 1 - np.arange(count)[:, None]
    assert sorted(leaves.tolist()) == sorted(expected.tolist())


def test_a_tile_of_the_root_before_its_nodes(files, tmp_path):
    """The root is copied behind the grid, with one more entry: 4096 voxels along each axis that are 7."""
    grid, known = bytearray(raw_grid(files / "warp_float.nvdb")), np.load(files / "warp.npz")
    root, end = 672 + struct.unpack("<Q", grid[696:704])[0], len(grid)
    (count,) = struct.unpack("<I", grid[root + 24 : root + 28])
    tile = struct.pack("<QqIf8x", 2 << 42, 0, 1, 7.0)
    children = [grid[root + 64 + 32 * n : root + 96 + 32 * n] for n in range(count)]
    for child in children:
        child[8:16] = struct.pack("<q", struct.unpack("<q", child[8:16])[0] + root - end)
    head = grid[root : root + 24] + struct.pack("<I", count + 1) + grid[root + 28 : root + 64]
    grid += head + tile + b"".join(children)
    grid[696:704], grid[32:40] = struct.pack("<Q", end - 672), struct.pack("<Q", len(grid))
    found = open_vdb(damaged(tmp_path, grid, "tile.nvdb"))
    points, values, low = known["float_points"], known["float_values"], known["float_box"][0]
    first = np.minimum(low, (8192, 0, 0))
    coords = grid_coords(found.shape, np.concatenate([points, [[8200, 9, 7], [12200, 4000, 4000]]]) - first)
    np.testing.assert_allclose(decode(found, coords)[0], [*values, 7, 7], atol=0.1)


def levels_of_one_leaf(origin):
    nothing = np.zeros((0, 3), np.int64)
    node_leaves = np.full((1, 4096), -1, np.int32)
    node_leaves[0, 0] = 0
    return Levels(
        *(nothing, np.zeros((0, 1)), np.zeros(0, bool)),
        *(nothing, np.zeros((0, 32768, 1)), np.zeros((0, 32768), bool), np.zeros((0, 32768), bool)),
        *(np.array([origin]), np.zeros((1, 4096, 1)), np.zeros((1, 4096), bool), node_leaves),
        *(np.ones((1, 512, 1)), np.ones((1, 512), bool)),
    )


def test_parts_too_far_from_each_other():
    tree = flatten(levels_of_one_leaf([0, 0, 0]), np.zeros(1))
    far = type(tree)(**{**vars(tree), "high": np.array([2**30, 2**30, 2**30])})
    with pytest.raises(ValueError, match="too many to be sampled as one box"):
        SparseGrid(far)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "field"), [("float_blosc_mask.vdb", "density"), ("warp_vec3f.nvdb", None)])
@pytest.mark.sanitize
def test_on_gpu(files, name, field):
    grid = open_vdb(files / name, field)
    coords = np.random.default_rng(8).random((100_000, 3), dtype=np.float32)
    np.testing.assert_allclose(on_gpu(grid, coords), decode(grid, coords), atol=1e-4)
