"""If this fails, occupancy grids mark wrong cells, or lose them in mips and files."""

import numpy as np
import pytest

from linumpy.errors import SourceError
from linumpy.rays import OccupancyGrid
from linumpy.write.writer import write_omezarr
from tests.support.oracles.ray_scenes import Foreign


def morton(x, y, z):
    """Interleave bits, one at a time."""
    return sum(((c >> bit) & 1) << (3 * bit + axis) for axis, c in enumerate((x, y, z)) for bit in range(7))


def sparse(mips, seed=0, share=0.02):
    return (np.random.default_rng(seed).random((mips, 128, 128, 128)) < share).astype("f4")


def empty(**options):
    return OccupancyGrid.of(np.zeros((1, 128, 128, 128), "f4"), **options)


def test_bits_are_in_morton_order():
    density = sparse(1)
    grid = OccupancyGrid.of(density)
    assert grid.bits.shape == (1, 128**3 // 8)
    assert grid.bits.dtype == np.uint8
    for x, y, z in np.random.default_rng(1).integers(0, 128, (300, 3)):
        code = morton(int(x), int(y), int(z))
        assert grid.bits[0, code // 8] >> (code % 8) & 1 == density[0, z, y, x]
    assert int(np.unpackbits(grid.bits).sum()) == int(density.sum())
    assert np.array_equal(grid.occupied(), density[0] > 0)


def test_coarser_mips_hold_what_finer_ones_do():
    density = sparse(3, share=1e-5)
    grid = OccupancyGrid.of(density)
    for mip in (1, 2):
        expected = density[mip] > 0
        for z, y, x in np.argwhere(grid.occupied(mip - 1)):
            expected[tuple(32 + c // 2 for c in (z, y, x))] = True
        assert np.array_equal(grid.occupied(mip), expected)
    assert grid.occupied(2).sum() > (density[2] > 0).sum()


def test_points_are_the_centres_of_voxels():
    grid = OccupancyGrid.of(np.zeros((2, 128, 128, 128), "f4"), centre=(1.0, 2.0, 3.0), edge=12.8)
    points = grid.points(1)
    assert points.dtype == np.float32
    assert np.allclose(points[5, 6, 7], [1 + (7.5 - 64) * 0.2, 2 + (6.5 - 64) * 0.2, 3 + (5.5 - 64) * 0.2], atol=1e-5)


def test_an_update_decays_old_densities():
    grid = OccupancyGrid.of(np.full((1, 128, 128, 128), 1.0, "f4"))
    new = np.zeros((1, 128, 128, 128), "f4")
    new[0, 3, 4, 5] = 2
    for _ in range(2):
        grid.update(new, decay=0.5, threshold=0.3)
    assert grid.density[0, 3, 4, 5] == 2
    assert grid.density[0, 0, 0, 0] == 0.25
    assert grid.occupied().sum() == 1
    assert grid.occupied()[3, 4, 5]


@pytest.mark.parametrize(("shape", "spacing"), [((40, 60, 30), (5.0, 2.0, 3.0)), ((200, 30, 130), (1.0, 4.0, 1.0))])
def test_a_volume_is_covered(shape, spacing):
    """No point whose interpolated value may be above the threshold lies in an empty voxel, and few others do not."""
    rng = np.random.default_rng(2)
    volume = (rng.random(shape) < 2e-4).astype("f4") * 7
    volume[0, 0, 0] = np.nan
    grid = OccupancyGrid.from_volume(volume, spacing, threshold=1.0)
    sizes = np.array(shape) * spacing
    assert grid.edge == sizes.max()
    assert np.allclose(grid.centre, sizes[::-1] / 2)
    occupied, step = grid.occupied(), grid.edge / 128
    low = np.array(grid.centre)[::-1] - grid.edge / 2
    expected = np.zeros((128,) * 3, bool)
    for index in np.argwhere(volume > 1):
        reach = [  # of linear interpolation: a voxel to both sides of its centre
            ((index[a] + 0.5 - 1) * spacing[a] - low[a], (index[a] + 0.5 + 1) * spacing[a] - low[a]) for a in range(3)
        ]
        cells = [slice(max(0, int(np.floor(b / step))), int(np.ceil(e / step))) for b, e in reach]
        expected[tuple(cells)] = True
    # Outside the volume nothing needs to be marched.
    centres = [(np.arange(128) + 0.5) * step + low[a] for a in range(3)]
    inside = [(c + step / 2 > 0) & (c - step / 2 < size) for c, size in zip(centres, sizes, strict=True)]
    expected &= inside[0][:, None, None] & inside[1][:, None] & inside[2]
    assert expected.any()
    assert not (expected & ~occupied).any()
    assert occupied.sum() <= 1.6 * expected.sum()
    assert np.isfinite(grid.density).all()


def test_a_level_of_an_image(tmp_path):
    volume = np.zeros((20, 30, 40), "f4")
    volume[3, 10, 20] = 5
    path = write_omezarr(tmp_path / "image.ome.zarr", volume, (4.0, 3.0, 2.0))
    grid = OccupancyGrid.from_zarr(path, threshold=1, device="cpu")
    same = OccupancyGrid.from_volume(volume, (4.0, 3.0, 2.0), threshold=1)
    assert np.array_equal(grid.bits, same.bits)
    assert (grid.centre, grid.edge) == (same.centre, same.edge)
    # The point (x, y, z) of that voxel's centre is occupied.
    x, y, z = ((np.array([41.0, 31.5, 14.0]) - grid.centre) / grid.edge * 128 + 64).astype(int)
    assert grid.occupied()[z, y, x]


def test_save_and_load(tmp_path):
    grid = OccupancyGrid.of(sparse(2), centre=(1.0, 2.0, 3.0), edge=5.0)
    grid.save(tmp_path / "grid.npz")
    back = OccupancyGrid.load(tmp_path / "grid.npz")
    assert np.array_equal(back.bits, grid.bits)
    assert np.array_equal(back.density, grid.density)
    assert (back.centre, back.edge, back.mips) == (grid.centre, grid.edge, 2)
    np.savez(tmp_path / "other.npz", bits=1)
    with pytest.raises(ValueError, match=r"other.npz is not an occupancy grid: it has no centre, density, edge"):
        OccupancyGrid.load(tmp_path / "other.npz")


def test_damaged_files_are_named(tmp_path):
    grid = OccupancyGrid.of(sparse(1))
    grid.save(tmp_path / "grid.npz")
    whole = (tmp_path / "grid.npz").read_bytes()
    flipped, method = bytearray(whole), bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    for record, offset in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
        method[whole.index(record) + offset] = 99  # a compression method that zipfile does not have
    np.save(tmp_path / "single.npy", grid.bits)
    single = (tmp_path / "single.npy").read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"hello" * 9, bytes(flipped), bytes(method), single):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(SourceError, match=r"bad.npz is not an occupancy grid, or it is damaged"):
            OccupancyGrid.load(tmp_path / "bad.npz")
    with pytest.raises(FileNotFoundError):
        OccupancyGrid.load(tmp_path / "none.npz")


@pytest.mark.parametrize(
    "change",
    [
        {"centre": (1, 2)}, {"centre": (np.nan, 0, 0)}, {"edge": -1.0}, {"edge": np.nan}, {"edge": np.ones(3)},
        {"edge": "a"}, {"density": np.float32(1)},
        {"density": np.zeros((0, 128, 128, 128), "f4"), "bits": np.zeros((0, 2**18), "u1")},
        {"density": np.zeros((1, 128, 128, 128), "u1")}, {"bits": np.zeros((1, 2**18), "i8")},
        {"density": np.zeros((9, 128, 128, 128), "f2"), "bits": np.zeros((9, 2**18), "u1")},
    ],
)  # fmt: skip
def test_files_of_other_arrays_are_named(tmp_path, change):
    """A kernel that read such bits would read beyond them."""
    good = {"density": np.zeros((1, 128, 128, 128), "f4"), "bits": np.zeros((1, 2**18), "u1")}
    np.savez(tmp_path / "bad.npz", **(good | {"centre": (0, 0, 0), "edge": 1.0} | change))
    with pytest.raises(SourceError, match=r"bad.npz is not an occupancy grid: "):
        OccupancyGrid.load(tmp_path / "bad.npz")


def test_a_density_that_is_no_number_does_not_stay():
    """One NaN of a field in training would leave its voxel empty for ever."""
    density = np.full((1, 128, 128, 128), 0.5, "f4")
    grid = OccupancyGrid.of(density)
    density[0, 1, 2, 3] = np.nan
    grid.update(density, decay=0.9)
    assert grid.occupied().all()
    assert grid.density[0, 1, 2, 3] == np.float32(0.5) * np.float32(0.9)
    grid = OccupancyGrid.of(density)
    assert not grid.occupied()[1, 2, 3]
    grid.update(np.ones_like(density))
    assert grid.occupied().all()


def test_densities_of_other_libraries_come_in_by_dlpack():
    density = sparse(1)
    grid = OccupancyGrid.of(Foreign(density))
    assert np.array_equal(grid.occupied(), density[0] > 0)
    grid.update(Foreign(1 - density), decay=0)
    assert np.array_equal(grid.occupied(), density[0] == 0)
    grid = OccupancyGrid.from_volume(Foreign(density[0]), (1, 1, 1), threshold=0)
    assert np.array_equal(grid.bits, OccupancyGrid.from_volume(density[0], (1, 1, 1), threshold=0).bits)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OccupancyGrid.of(np.zeros((128, 128, 128), "f4")), r"density of shape \(128, 128, 128\)"),
        (lambda: OccupancyGrid.of(np.zeros((1, 128, 128, 128), "f4"), edge=0.0), "edge=0.0"),
        (lambda: OccupancyGrid.of(np.zeros((1, 128, 128, 128), "f4"), centre=(0, 0, np.nan)), "centre="),
        (
            lambda: OccupancyGrid.from_volume(np.zeros((4, 4)), (1, 1, 1), threshold=0),
            r"\(4, 4\): real numbers \(Z, Y, X\)",
        ),
        (lambda: OccupancyGrid.from_volume(np.zeros((4, 4, 4)), (1, 0, 1), threshold=0), r"spacing=\(1, 0, 1\)"),
        (lambda: OccupancyGrid.from_volume(np.zeros((4, 4, 4), complex), (1, 1, 1), threshold=0), "complex128"),
        (lambda: OccupancyGrid.from_volume(np.zeros((4, 4, 4)), (1, 1, 1), threshold=np.nan), "threshold=nan"),
        (lambda: empty(threshold=np.nan), "threshold=nan"),
        (lambda: empty().update(empty().density, threshold=np.nan), "threshold=nan"),
        (lambda: empty().update(empty().density, decay=np.nan), "decay=nan"),
        (lambda: empty().update(empty().density, decay=-1), "decay=-1"),
        (lambda: empty().update(empty().density, decay=1.5), "decay=1.5"),
        (lambda: empty().points(1), "mip=1: an integer from 0 up to 0"),
        (lambda: empty().points(-1), "mip=-1"),
        (lambda: empty().occupied(1), "mip=1"),
        (lambda: empty().occupied(-1), "mip=-1"),
        (
            lambda: OccupancyGrid.of(np.zeros((1, 128, 128, 128), "f4")).update(np.zeros(3)),
            r"density has shape \(3,\), but the grid's has \(1, 128",
        ),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_same_on_a_device(device):
    cupy = device
    density = sparse(2)
    volume = np.random.default_rng(0).random((30, 40, 50)).astype("f4")
    for host, device in (
        (OccupancyGrid.of(density, edge=3.0), OccupancyGrid.of(cupy.asarray(density), edge=3.0)),
        (
            OccupancyGrid.from_volume(volume, (3, 2, 1), threshold=0.999),
            OccupancyGrid.from_volume(cupy.asarray(volume), (3, 2, 1), threshold=0.999),
        ),
    ):
        assert isinstance(device.bits, cupy.ndarray)
        assert np.array_equal(host.bits, cupy.asnumpy(device.bits))
        assert np.array_equal(host.occupied(), cupy.asnumpy(device.occupied()))
        assert np.allclose(host.points(), cupy.asnumpy(device.points()), atol=1e-5)
        new = np.random.default_rng(1).random(host.density.shape).astype("f4")
        host.update(new, threshold=0.9)
        device.update(cupy.asarray(new), threshold=0.9)
        assert np.array_equal(host.bits, cupy.asnumpy(device.bits))
