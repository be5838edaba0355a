"""If this fails, a stitched volume is not its tiles, or a voxel of them is read twice."""

import numpy as np
import pytest
from scipy import ndimage

from linumpy.errors import SourceError
from linumpy.io.ome import open_image
from linumpy.mosaic.options import Stitch
from linumpy.mosaic.stitching import diffusion_weights, distance_weights, stitch_mosaic
from linumpy.registration.position_files import write_positions
from linumpy.registration.positions import AcquisitionModel, TilePositions
from linumpy.write.writer import write_omezarr
from tests.support.script_runs import check_refused, load, run_script
from tests.support.stores import values_of

NAME, PROGRAM = "linum_stitch_3d", "linum-stitch-3d"
TILE, DEPTH = (20, 24), 7


def positions_of(rng, grid=(3, 2), whole=False, missing=()):
    places = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), -1) * [14.0, 18.0]
    places += rng.uniform(-2, 2, places.shape)
    places = np.rint(places) if whole else places
    present = np.ones(grid, bool)
    for tile in missing:
        present[tile] = False
    return TilePositions(
        positions=places - places[0, 0], present=present, tile_shape=TILE, model=AcquisitionModel((14, 0), (0, 18))
    )


def write_grid(path, tiles, axes="zyx", chunks=None):
    """Write tiles (rows, columns, Z, Y, X) as a mosaic grid with axes in any order."""
    rows, columns, depth, height, width = tiles.shape
    volume = tiles.transpose(2, 0, 3, 1, 4).reshape(depth, rows * height, columns * width)
    sizes = {"z": depth, "y": height, "x": width} if chunks is None else chunks
    kept = {"linumpy": {"tile_shape": {"y": height, "x": width}}}
    order = ["zyx".index(name) for name in axes]
    return write_omezarr(
        path, np.ascontiguousarray(volume.transpose(order)), [(5.0, 10.0, 12.0)[k] for k in order], axes=axes,
        chunks=[sizes[name] for name in axes], attributes=kept, origin=[(0.0, 100.0, 200.0)[k] for k in order],
    )  # fmt: skip


def expected_volume(tiles, found):
    """Each tile shifted as a whole by SciPy, and the weighted mean of all."""
    present = [tuple(place) for place in np.argwhere(found.present)]
    low = np.min([found.positions[place] for place in present], axis=0)
    high = np.max([found.positions[place] for place in present], axis=0)
    size = np.floor(high - low + 1e-4).astype(int) + TILE
    total, weights = np.zeros((DEPTH, *size)), np.zeros((1, *size))
    weight = distance_weights(TILE).astype(np.float64)
    for place in present:
        at = found.positions[place] - low
        options = {"output_shape": None, "order": 1, "mode": "constant", "cval": np.nan}
        options["output_shape"] = tuple(size)
        one = ndimage.affine_transform(weight, np.ones(2), -at, **options)
        inside = np.isfinite(one)
        for z in range(DEPTH):
            voxels = ndimage.affine_transform(tiles[place][z].astype("f8"), np.ones(2), -at, **options)
            total[z][inside] += (one * voxels)[inside]
        weights[0][inside] += one[inside]
    return np.divide(total, weights, out=np.zeros_like(total), where=weights > 0)


@pytest.mark.parametrize("axes", ["zyx", "xzy"])
@pytest.mark.parametrize("memory", [{}, {"tile_bytes": 1, "kept_bytes": 12_000}, {"tile_bytes": 1, "kept_bytes": 0}])
def test_tiles_of_one_volume_become_that_volume(tmp_path, axes, memory):
    rng = np.random.default_rng(1)
    found = positions_of(rng, whole=True)
    corners = (found.positions - found.positions.min(axis=(0, 1))).astype(int)
    size = corners.max(axis=(0, 1)) + TILE
    volume = rng.integers(1, 60000, (DEPTH, *size)).astype("u2")
    covered = np.zeros(size, bool)
    tiles = np.empty((3, 2, DEPTH, *TILE), "u2")
    for place in np.ndindex(3, 2):
        y, x = (slice(c, c + n) for c, n in zip(corners[place], TILE, strict=True))
        tiles[place] = volume[:, y, x]
        covered[y, x] = True
    source = write_grid(tmp_path / "m.ome.zarr", tiles, axes, {"z": 2, "y": 20, "x": 24})
    if axes == "xzy":  # positions are along the lateral axes in the order of the mosaic's: x, y
        found = TilePositions(
            positions=found.positions.transpose(1, 0, 2)[..., ::-1],
            present=found.present.T,
            tile_shape=TILE[::-1],
            model=AcquisitionModel((18, 0), (0, 14)),
        )
    out, told = tmp_path / "out.ome.zarr", []
    done = stitch_mosaic(
        source, found, out, chunks=[{"z": 4, "y": 16, "x": 16}[name] for name in axes], levels=2, progress=told.append,
        **memory,
    )  # fmt: skip
    order = ["zyx".index(name) for name in axes]
    np.testing.assert_array_equal(values_of(out), np.where(covered, volume, 0).transpose(order))
    image = open_image(out)
    assert len(image.levels) == 2
    np.testing.assert_allclose(image.spacing[0], [(5.0, 10.0, 12.0)[k] for k in order])
    low = found.positions.min(axis=(0, 1)) if axes == "zyx" else found.positions.min(axis=(0, 1))[::-1]
    offset = (0.0, 100 + 10 * low[0], 200 + 12 * low[1])
    np.testing.assert_allclose(image.origin[0], [offset[k] for k in order])
    assert done.nbytes == tiles.nbytes
    assert sum(told) == tiles.nbytes
    assert done.read_nbytes == tiles.nbytes, "each voxel once"


@pytest.mark.parametrize("missing", [(), ((0, 0), (2, 1))])
@pytest.mark.parametrize("memory", [{}, {"tile_bytes": 1, "kept_bytes": 0}])
def test_tiles_at_fractions_of_voxels_are_blended_by_their_weights(tmp_path, missing, memory):
    rng = np.random.default_rng(2)
    found = positions_of(rng, missing=missing)
    tiles = rng.gamma(2, 50, (3, 2, DEPTH, *TILE)).astype("f4")
    source = write_grid(tmp_path / "m.ome.zarr", tiles)
    done = stitch_mosaic(source, found, tmp_path / "out.ome.zarr", chunks=(3, 10, 11), **memory)
    assert done.read_nbytes > done.nbytes if memory else done.read_nbytes <= tiles.nbytes, "kept tiles are read once"
    np.testing.assert_allclose(
        values_of(tmp_path / "out.ome.zarr"), expected_volume(tiles, found), rtol=2e-4, atol=1e-3
    )


def test_without_interpolation_voxels_are_not_mixed_within_a_tile(tmp_path):
    found = positions_of(np.random.default_rng(3), grid=(1, 1))
    found = TilePositions(positions=found.positions + 0.4, present=found.present, tile_shape=TILE, model=found.model)
    tiles = np.random.default_rng(3).integers(0, 255, (1, 1, DEPTH, *TILE)).astype("u1")
    source = write_grid(tmp_path / "m.ome.zarr", tiles)
    stitch_mosaic(source, found, tmp_path / "out.ome.zarr", Stitch(interpolate=False))
    np.testing.assert_array_equal(values_of(tmp_path / "out.ome.zarr"), tiles[0, 0])


def test_not_a_number_gives_way_to_the_other_tile(tmp_path):
    found = positions_of(np.random.default_rng(4), grid=(1, 2), whole=True)
    tiles = np.ones((1, 2, DEPTH, *TILE), "f4")
    tiles[0, 0, 2] = np.nan
    source = write_grid(tmp_path / "m.ome.zarr", tiles)
    stitch_mosaic(source, found, tmp_path / "out.ome.zarr")
    volume = values_of(tmp_path / "out.ome.zarr")
    assert set(np.unique(volume[2])) == {0, 1}
    left = int(found.positions[0, 1, 1])
    top = int(found.positions[0, :, 0].max() - found.positions[0, :, 0].min())
    assert (volume[2, top:20, left : left + 24] == 1).all()


def test_diffusion_is_a_ramp_between_two_tiles_and_whole_where_one_lies_alone():
    left, right = diffusion_weights((10, 30), np.array([[0.0, 0.0], [0.0, 20.0]]))
    np.testing.assert_allclose(left[:, :20], 1)
    np.testing.assert_allclose(left[:, 20:], np.tile(1 - np.arange(1, 11) / 11, (10, 1)), atol=1e-6)
    np.testing.assert_allclose(left[:, 20:] + right[:, :10], 1, atol=1e-6)
    corner = diffusion_weights((12, 12), np.array([[0, 0], [1, 8], [8, -1], [9, 7.6]]))
    assert all((one > 0).all() and (one <= 1 + 1e-6).all() for one in corner)
    covered = diffusion_weights((8, 8), np.array([[0, 0], [0, 0]]))  # neither lies alone anywhere
    assert all((one > 0).all() for one in covered)


def test_a_run(tmp_path):
    rng = np.random.default_rng(5)
    found = positions_of(rng)
    tiles = rng.integers(0, 60000, (3, 2, DEPTH, *TILE)).astype("u2")
    source = write_grid(tmp_path / "m.ome.zarr", tiles)
    write_positions(tmp_path / "p.csv", found, "m", (10, 12))
    out = tmp_path / "out.ome.zarr"
    words = (source, tmp_path / "p.csv", out, "--blending", "diffusion", "--levels", 2, "--codec", "none")
    done = run_script(NAME, *words, "--device=cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("6 tiles stitched to ")
    assert np.abs(values_of(out) - expected_volume(tiles, found)).mean() < 3000  # other weights


def test_what_is_refused(tmp_path, capsys):
    found = positions_of(np.random.default_rng(6))
    source = write_grid(tmp_path / "m.ome.zarr", np.zeros((3, 3, DEPTH, *TILE), "u2"))
    write_positions(tmp_path / "p.json", found, "m", (10, 12))
    words = [source, tmp_path / "p.json", tmp_path / "out.ome.zarr", "--device=cpu"]
    check_refused(capsys, load(NAME).main, words, PROGRAM, "3 × 2 tiles")
    check_refused(capsys, load(NAME).main, [*words, "--tile-shape", 10, 24], PROGRAM, "p.json")
    none = TilePositions(
        positions=np.zeros((3, 3, 2)), present=np.zeros((3, 3), bool), tile_shape=TILE, model=found.model
    )
    with pytest.raises(ValueError, match="all tiles are missing"):
        stitch_mosaic(source, none, tmp_path / "out.ome.zarr")
    with pytest.raises(SourceError, match="3 × 2"):
        stitch_mosaic(source, found, tmp_path / "out.ome.zarr")
    assert not (tmp_path / "out.ome.zarr").exists()


def test_positions_of_another_unit_are_refused(tmp_path):
    """A table in nm, or a damaged number, would stitch a volume of mostly nothing."""
    rng = np.random.default_rng(8)
    source = write_grid(tmp_path / "m.ome.zarr", np.ones((3, 2, DEPTH, *TILE), "u2"))
    for wrong in (5000.0, 1e300):
        found = positions_of(rng)
        found.positions[2, 1, 0] *= wrong
        with pytest.raises(ValueError, match="in voxels of the mosaic"):
            stitch_mosaic(source, found, tmp_path / "out.ome.zarr")
    assert not (tmp_path / "out.ome.zarr").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("blending", ["distance", "diffusion"])
@pytest.mark.parametrize("memory", [{}, {"tile_bytes": 1}, {"tile_bytes": 1, "kept_bytes": 0}])
def test_on_the_device(tmp_path, memory, blending):
    rng = np.random.default_rng(7)
    found = positions_of(rng, missing=((1, 1),))
    tiles = rng.integers(0, 60000, (3, 2, DEPTH, *TILE)).astype("u2")
    source = write_grid(tmp_path / "m.ome.zarr", tiles)
    for device, name in (("cpu", "host"), ("cuda", "device")):
        stitch_mosaic(
            source, found, tmp_path / name, Stitch(blending), chunks=(4, 16, 16), levels=2, device=device, **memory
        )
    for level in (0, 1):
        host, device = (values_of(tmp_path / name, level).astype(int) for name in ("host", "device"))
        assert np.abs(host - device).max() <= 1
