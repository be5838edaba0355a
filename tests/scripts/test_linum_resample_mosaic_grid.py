"""If this fails, the script resamples a mosaic wrong, or a killed one leaves something that looks finished."""

import itertools

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, ZstdCodec

from linumpy.gpu.interpolation import resample_volume
from linumpy.io.ome import open_image, read_omezarr
from linumpy.mosaic import grid
from linumpy.mosaic.grid import resample_mosaic_grid
from linumpy.write.writer import write_omezarr
from tests.support.script_runs import check_refused, load, run_script

NAME, PROGRAM = "linum_resample_mosaic_grid", "linum-resample-mosaic-grid"
TILE = (20, 16, 15)
TILED = {"linumpy": {"tile_shape": {"y": 16, "x": 15}}}


def tiles(seed=0, shape=(20, 48, 60), tile=TILE):
    """Tiles that differ so much that one which bleeds into another is noticed."""
    rng = np.random.default_rng(seed)
    volume = rng.gamma(4, 50, shape)
    for number, (y, x) in enumerate(itertools.product(range(0, shape[1], tile[1]), range(0, shape[2], tile[2]))):
        volume[:, y : y + tile[1], x : x + tile[2]] += 3000 * (number % 5)
    return volume


def expected_grid(volume, spacing, target):
    """Each tile by itself, as the library resamples a volume."""
    counts = [n // t for n, t in zip(volume.shape, TILE, strict=True)]
    made, reached = {}, None
    for place in np.ndindex(*counts):
        box = tuple(slice(p * t, (p + 1) * t) for p, t in zip(place, TILE, strict=True))
        made[place], reached = resample_volume(volume[box].astype("f8"), spacing, target)
    return np.block(
        [[[made[z, y, x] for x in range(counts[2])] for y in range(counts[1])] for z in range(counts[0])]
    ), (reached)


def values(path, level=0):
    return zarr.open_group(path, mode="r")[str(level)][...]


@pytest.fixture
def mosaic(tmp_path):
    voxels, options = tiles().astype("u2"), {"chunks": (20, 48, 20), "origin": (0, 100, 200), "attributes": TILED}
    return write_omezarr(tmp_path / "m.ome.zarr", voxels, (5, 10, 12), **options)


def test_a_run(mosaic, tmp_path):
    out = tmp_path / "out.ome.zarr"
    done = run_script(NAME, mosaic, out, "--resolution", 10, 22, 25, "--levels", 2, "--device=cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{mosaic} -> {out} on CPU: ")
    assert "iB/s" in done.stdout
    array, spacing = read_omezarr(out)
    # 20 voxels of 5 µm are 10 of 10 µm; 16 of 10 are 7 of 22.86; 15 of 12 are 7 of 25.71.
    assert array.chunks == (10, 7, 7)
    assert array.shape == (10, 21, 28)
    assert array.dtype == np.uint16
    np.testing.assert_allclose(spacing, (10.0, 160 / 7, 180 / 7))
    expected, reached = expected_grid(tiles().astype("u2"), (5, 10, 12), (10, 22, 25))
    np.testing.assert_allclose(spacing, reached)
    assert np.abs(array[...] - expected).max() <= 0.51
    image = open_image(out)
    np.testing.assert_allclose(image.origin[0], (2.5, 100 + (160 / 7 - 10) / 2, 200 + (180 / 7 - 12) / 2))
    assert [axis.name for axis in image.axes] == ["z", "y", "x"]
    assert len(image.levels) == 2
    assert image.levels[1].shape == (5, 11, 14)
    np.testing.assert_allclose(
        values(out, 1)[:, :10], values(out)[:, :20].reshape(5, 2, 10, 2, 14, 2).mean((1, 3, 5)), atol=0.51
    )
    assert sorted(one.name for one in tmp_path.iterdir()) == ["m.ome.zarr", "out.ome.zarr"]


@pytest.mark.parametrize("axes", ["zyx", "yxz", "xzy"])
@pytest.mark.parametrize("tile_bytes", [1, 60_000, 2**30])
def test_the_same_however_axes_lie_and_batches_are_cut(tmp_path, axes, tile_bytes):
    order = [axes.index(c) for c in "zyx"]
    turned, per_axis = np.moveaxis(tiles().astype("f4"), (0, 1, 2), order), dict(zip("zyx", (5, 10, 12), strict=True))
    chunks = [dict(zip("zyx", (7, 16, 15), strict=True))[c] for c in axes]  # whole along z whatever the chunks
    options = {"axes": axes, "chunks": chunks, "attributes": TILED}
    source = write_omezarr(tmp_path / "m.zarr", turned, [per_axis[c] for c in axes], **options)
    told = []
    made = resample_mosaic_grid(source, tmp_path / "o.zarr", (10, 22, 25), tile_bytes=tile_bytes, progress=told.append)
    expected, _ = expected_grid(tiles().astype("f4"), (5, 10, 12), (10, 22, 25))
    np.testing.assert_allclose(np.moveaxis(values(tmp_path / "o.zarr"), order, (0, 1, 2)), expected, rtol=2e-5)
    assert sum(told) == turned.nbytes
    assert sorted(made.new_tile) == [7, 7, 10]


@pytest.mark.parametrize("dtype", ["u1", ">u2", "i4", "f4", ">f8"])
def test_ragged_tiles_and_any_numbers(tmp_path, dtype):
    # 53 and 64 voxels: the last tiles have 5 of 16 and 4 of 15. Along a ramp every voxel has the value of its place.
    shape = (20, 53, 64)
    z, y, x = np.meshgrid(*map(np.arange, shape), indexing="ij")
    ramp = (z + y + x if dtype == "u1" else 3 * z + 5 * y + 7 * x).astype(dtype)
    source = write_omezarr(tmp_path / "m.zarr", ramp, (10, 10, 10), chunks=TILE)
    resample_mosaic_grid(source, tmp_path / "o.zarr", 5, tile_shape=TILE[1:], tile_bytes=100_000)
    got, spacing = read_omezarr(tmp_path / "o.zarr")
    assert spacing == (5.0, 5.0, 5.0)
    assert got.shape == (40, 106, 128)
    assert got.dtype == np.dtype(dtype).newbyteorder("=")
    place = [np.clip((np.arange(2 * n) + 0.5) / 2 - 0.5, 0, n - 1) for n in shape]
    for axis, (size, tile) in enumerate(zip(shape, TILE, strict=True)):  # flat at the edges of each tile
        start = np.arange(2 * size) // (2 * tile) * tile
        place[axis] = np.clip(place[axis], start, np.minimum(start + tile, size) - 1)
    weights = (1, 1, 1) if dtype == "u1" else (3, 5, 7)
    expected = sum(w * p for w, p in zip(weights, np.meshgrid(*place, indexing="ij"), strict=True))
    assert np.abs(got[...] - expected).max() <= (0.51 if np.dtype(dtype).kind in "iu" else 1e-3)


def test_tiles_of_another_size_than_chunks(tmp_path):
    volume = tiles().astype("f4")
    source = write_omezarr(tmp_path / "m.zarr", volume, (5, 10, 12), chunks=(20, 48, 30))
    resample_mosaic_grid(source, tmp_path / "o.zarr", (10, 22, 25), tile_shape=TILE[1:], tile_bytes=1)
    expected, _ = expected_grid(volume, (5, 10, 12), (10, 22, 25))
    np.testing.assert_allclose(values(tmp_path / "o.zarr"), expected, rtol=2e-5)


def test_batches_are_small_where_tiles_grow(mosaic, tmp_path, monkeypatch):
    batches = []

    def counted(box, *rest):
        batches.append(1)
        return plain(box, *rest)

    plain = grid.read_box
    monkeypatch.setattr(grid, "read_box", counted)
    for resolution, count in ((12, 1), (1.5, 12)):  # 12 tiles, 115 kB; 7 × 6 × 3 and more times as many voxels
        batches.clear()
        resample_mosaic_grid(mosaic, tmp_path / "o.zarr", resolution, tile_bytes=2**17, overwrite=True)
        assert len(batches) == count


def test_tiles_in_shards(tmp_path):
    volume = tiles().astype("u2")
    source = write_omezarr(tmp_path / "m.zarr", volume, (5, 10, 12), chunks=(10, 8, 15), shards=(20, 16, 30))
    resample_mosaic_grid(source, tmp_path / "o.zarr", (10, 22, 25), tile_shape=TILE[1:], tile_bytes=1)
    expected, _ = expected_grid(volume, (5, 10, 12), (10, 22, 25))
    assert np.abs(values(tmp_path / "o.zarr") - expected).max() <= 0.51
    assert zarr.open_group(tmp_path / "o.zarr", mode="r")["0"].chunks == (10, 7, 7)


def test_the_same_spacing_gives_the_same_voxels(mosaic, tmp_path):
    resample_mosaic_grid(mosaic, tmp_path / "o.zarr", (5, 10, 12))
    assert np.array_equal(values(tmp_path / "o.zarr"), values(mosaic))
    assert open_image(tmp_path / "o.zarr").origin[0] == (0, 100, 200)


def test_refusals(mosaic, tmp_path, capsys):
    main, new, cpu = load(NAME).main, tmp_path / "x", "--device=cpu"
    untiled = write_omezarr(tmp_path / "s.zarr", np.zeros((8, 8, 8), "u2"), (5, 5, 5), chunks=(4,) * 3)
    flags = write_omezarr(tmp_path / "b.zarr", np.zeros((8, 8, 8), "?"), (5, 5, 5))
    for words, message in [
        ([mosaic, new, cpu], "--resolution"),
        ([mosaic, new, "--resolution", "ten", cpu], "'ten'"),
        ([mosaic, new, "--resolution", 0, cpu], "0.0"),
        ([mosaic, new, "--resolution", "nan", cpu], "nan"),
        ([mosaic, new, "--resolution", 10, 10, cpu], "--resolution (10.0, 10.0): pass one number, or three"),
        ([mosaic, new, "--resolution", 1000, cpu], "1000 µm: a tile is 100 µm wide"),
        ([mosaic, new, "--resolution", 10, "--levels", 0, cpu], "--levels 0"),
        ([mosaic, new, "--resolution", 10, "--tile-shape", 0, 4, cpu], "--tile-shape (0, 4): "),
        ([mosaic, new, "--resolution", 10, "--tile-shape", 16, 61, cpu], "has 60 voxels along x"),
        ([untiled, new, "--resolution", 10, cpu], "its metadata has no tile shape; pass --tile-shape A B"),
        ([flags, new, "--resolution", 10, cpu], "bool"),
    ]:
        check_refused(capsys, main, words, PROGRAM, message)
    assert not new.exists()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["u2", "f4"])
@pytest.mark.parametrize("tile_bytes", [1, 60_000, 2**30])
@pytest.mark.parametrize("codec", [None, "zstd", "blosclz"])  # blosclz is read through zarr's GPU mode
def test_the_same_on_a_gpu(tmp_path, dtype, tile_bytes, codec):
    codecs = {
        None: None,
        "zstd": ZstdCodec(),
        "blosclz": BloscCodec(cname="blosclz", typesize=np.dtype(dtype).itemsize),
    }
    source = write_omezarr(
        tmp_path / "m.zarr",
        tiles(1, (20, 53, 64)).astype(dtype),
        (5, 10, 12),
        chunks=TILE,
        compressors=codecs[codec],
        attributes=TILED,
    )
    for device in ("cuda", "cpu"):
        resample_mosaic_grid(source, tmp_path / device, (10, 22, 25), device=device, levels=2, tile_bytes=tile_bytes)
    for level in (0, 1):
        gpu, cpu = (values(tmp_path / one, level).astype("f8") for one in ("cuda", "cpu"))
        np.testing.assert_allclose(gpu, cpu, rtol=1e-5, atol=1 if dtype == "u2" else 0.02)
    assert load(NAME).main([str(source), str(tmp_path / "s"), "--resolution", "10", "--device=cuda"]) == 0
