"""If this fails, results depend on how a mosaic is cut or how its axes lie, or memory grows with it."""

import tracemalloc

import numpy as np
import pytest
import zarr

from linumpy.errors import MetadataError, SourceError
from linumpy.geometry.focal import correct_focal_curvature, mean_tile
from linumpy.geometry.interface import find_tissue_interface
from linumpy.io.output.files import replacing
from linumpy.mosaic.aip import project_mosaic
from linumpy.mosaic.focal import correct_mosaic, surface_bounds
from linumpy.mosaic.grid import resample_mosaic_grid
from linumpy.mosaic.io.figures import draw_surface
from linumpy.mosaic.io.image import open_mosaic
from linumpy.mosaic.io.slice_table import find_slices
from linumpy.mosaic.io.tiles import boxes, column_shape
from linumpy.mosaic.options import FocalCorrection, SurfaceMethod, ZSearch
from linumpy.mosaic.slices import search_window, stack_mosaics
from linumpy.mosaic.stacking import blend_overlap, compose, plan_stack
from linumpy.mosaic.surface import edge_offset, find_mosaic_surface, zero_log_of
from linumpy.testing.synthetic import MosaicSpec, block, surface_depth, write_mosaic
from linumpy.write.writer import write_omezarr
from tests.support.budget import first, matrix, some
from tests.support.stacks import stack_slices
from tests.support.stores import values_of

SPEC = MosaicSpec(tiles=(2, 2), tile_shape=(64, 45, 51), spacing_um=(5.0, 8.0, 12.0), water_um=100.0, focal_um=20.0)
TILE_BYTES = [1, 300_000, 2**28]


def volume():
    return block(SPEC, (0, 0, 0), SPEC.shape)


@pytest.mark.parametrize(("tile_bytes", "s_xy"), matrix(TILE_BYTES, [1, 6, 15]))
def test_a_surface_does_not_show_where_the_mosaic_was_cut(tmp_path, tile_bytes, s_xy):
    write_mosaic(tmp_path / "m.zarr", SPEC, chunks=(16, 20, 34))
    method = SurfaceMethod(s_xy=s_xy, s_z=2.5)
    told = []
    find_mosaic_surface(tmp_path / "m.zarr", tmp_path / "s.zarr", method, tile_bytes=tile_bytes, progress=told.append)
    expected = find_tissue_interface(volume(), s_xy, 2.5, depth_axis=0)
    np.testing.assert_array_equal(values_of(tmp_path / "s.zarr") / 5.0, expected)
    assert sum(told) == SPEC.nbytes


@pytest.mark.parametrize("axes", some(["zyx", "yxz", "yzx", "xyz"], lambda axes: axes == "xyz"))
def test_axes_in_any_order(tmp_path, axes):
    spacing = dict(zip("zyx", SPEC.spacing_um, strict=True))
    source = write_omezarr(
        tmp_path / "m.zarr",
        volume().transpose(["zyx".index(name) for name in axes]),
        [spacing[name] for name in axes],
        axes=axes,
        chunks=(30, 30, 30),
    )
    find_mosaic_surface(source, tmp_path / "s.zarr", overlay=tmp_path / "s.png", tile_bytes=1)
    lateral = axes.replace("z", "")
    found = values_of(tmp_path / "s.zarr") / 5.0
    expected = find_tissue_interface(volume(), depth_axis=0)
    np.testing.assert_array_equal(found, expected if lateral == "yx" else expected.T)
    assert open_level_spacing(tmp_path / "s.zarr") == tuple(spacing[name] for name in lateral)
    tile = (45, 51) if lateral == "yx" else (51, 45)
    curvature = correct_mosaic(source, tmp_path / "f.zarr", tile, tile_bytes=1)
    assert curvature.tiles == 4
    assert values_of(tmp_path / "f.zarr").shape == tuple(SPEC.shape["zyx".index(name)] for name in axes)
    straight = write_mosaic(tmp_path / "z.zarr", SPEC)
    same = correct_mosaic(straight, tmp_path / "g.zarr", (45, 51))
    forms = (curvature.vv, curvature.uu) if lateral == "yx" else (curvature.uu, curvature.vv)
    np.testing.assert_allclose(forms, (same.vv, same.uu), rtol=1e-6)
    flat = values_of(tmp_path / "f.zarr").transpose([axes.index(name) for name in "zyx"])
    np.testing.assert_array_equal(flat, values_of(tmp_path / "g.zarr"))


def open_level_spacing(path):
    from linumpy.io.ome import read_omezarr

    return read_omezarr(path)[1]


@pytest.mark.parametrize("correction", [FocalCorrection(), FocalCorrection(interpolate=True, fill_value=3)])
def test_a_correction_does_not_show_where_the_mosaic_was_cut(tmp_path, correction):
    write_mosaic(tmp_path / "m.zarr", SPEC, chunks=(16, 20, 34))
    results = []
    for tile_bytes in TILE_BYTES:
        told = []
        out = tmp_path / f"{tile_bytes}.zarr"
        curvature = correct_mosaic(
            tmp_path / "m.zarr", out, (45, 51), None, correction, tile_bytes=tile_bytes, progress=told.append
        )
        assert sum(told) == 2 * SPEC.nbytes
        results.append((curvature, values_of(out)))
    for curvature, flat in results[1:]:
        assert curvature == results[0][0]
        np.testing.assert_array_equal(flat, results[0][1])


def test_of_a_huge_mosaic_the_middle_is_looked_at():
    assert surface_bounds((100, 100), (10, 20), 10**6) == (slice(0, 100), slice(0, 100))
    assert surface_bounds((109, 119), (10, 20), 10**6) == (slice(0, 100), slice(0, 100))
    rows, columns = surface_bounds((1000, 1000), (10, 20), 3000)
    assert (rows.stop - rows.start) * (columns.stop - columns.start) <= 3000
    assert rows.start % 10 == columns.start % 20 == 0
    assert abs(rows.start + rows.stop - 1000) <= 20
    assert abs(columns.start + columns.stop - 1000) <= 40
    # One tile is always looked at.
    rows, columns = surface_bounds((30, 30), (10, 10), 1)
    assert (rows, columns) == (slice(10, 20), slice(10, 20))


def test_the_mean_tile_shows_what_is_fitted():
    v, u = np.meshgrid(np.linspace(-1, 1, 20), np.linspace(-1, 1, 30), indexing="ij")
    tile = 3 * v**2 + 1.5 * u**2 - v * u
    y, x = np.mgrid[:60, :90]
    surface = np.tile(tile, (3, 3)) + 40 + 0.1 * y - 0.05 * x
    surface[:20, :30] = -1  # a tile that is unknown
    surface[25, 40] = np.nan
    found = mean_tile(surface, (20, 30))
    np.testing.assert_allclose(found - found.mean(), tile - tile.mean(), atol=1e-6)


def peak_bytes(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("script", first(["surface", "stack", "grid", "focal", "aip"], 3))
def test_memory_does_not_grow_with_the_mosaic(tmp_path, monkeypatch, script):
    # What may be taken whatever the mosaic's size is made small here, so that growth shows.
    monkeypatch.setattr("linumpy.mosaic.slices.SEARCH_BYTES", 2**18)
    monkeypatch.setattr("linumpy.geometry.focal._SAMPLES", 2**12)
    (tmp_path / "s.csv").write_text("fixed_id,moving_id,x_shift,y_shift,x_shift_mm,y_shift_mm\n1,2,0,0,0.0,0.0\n")
    out, tiles = tmp_path / "out.zarr", {"tile_bytes": 2**20, "overwrite": True}

    def work(source):
        if script == "surface":
            find_mosaic_surface(source, out, **tiles)
        elif script == "focal":
            correct_mosaic(source, out, (64, 64), **tiles)
        elif script == "grid":
            resample_mosaic_grid(source, out, 20.0, tile_shape=(64, 64), **tiles)
        elif script == "aip":
            project_mosaic(source, out, **tiles)
        else:
            stack_mosaics(source.parent, tmp_path / "s.csv", out, ZSearch(0.14, 0.02), **tiles)

    peaks, rng = [], np.random.default_rng(0)
    for width in (256, 256, 1024):  # the first is for what is imported and remembered
        voxels = rng.random((32, 128, width), np.float32)
        for name in ("slice_1.zarr", "slice_2.zarr"):
            source = tmp_path / str(width) / name
            source.parent.mkdir(exist_ok=True)
            write_omezarr(source, voxels, (5, 10, 10), chunks=(32, 64, 64), overwrite=True)
        del voxels
        peaks.append(peak_bytes(lambda source=source: work(source)))
    # Two slices grew by 24 MiB, one mosaic by 12; a map of the surface, which is kept to be fitted, by 0.6.
    assert peaks[2] - peaks[1] < 5 * 2**20


def test_columns_are_whole_along_depth_and_whole_in_storage(tmp_path):
    array = zarr.create_array(tmp_path / "a", shape=(50, 100, 70), chunks=(20, 30, 16), dtype="u2")
    assert column_shape(array, 0, 1) == (50, 30, 16)
    assert column_shape(array, 0, 2**30) == (50, 100, 70)
    middle = column_shape(array, 0, 50 * 60 * 32 * 2)
    assert middle == (50, 60, 32)
    assert column_shape(array, 2, 1) == (20, 30, 70)
    sharded = zarr.create_array(
        tmp_path / "b", shape=(50, 100, 70), chunks=(10, 10, 8), shards=(20, 20, 16), dtype="u2"
    )
    assert column_shape(sharded, 0, 1) == (50, 20, 16)
    seen = np.zeros((50, 100, 70), int)
    for box in boxes((50, 100, 70), middle):
        seen[box] += 1
    assert (seen == 1).all()


def test_what_is_no_mosaic_is_refused(tmp_path):
    write_omezarr(tmp_path / "flat.zarr", np.zeros((3, 3)), (1, 1))
    with pytest.raises(MetadataError, match="axes y, x"):
        open_mosaic(tmp_path / "flat.zarr")
    source = write_mosaic(tmp_path / "m.zarr", MosaicSpec(tiles=(1, 1), tile_shape=(8, 8, 8)))
    with pytest.raises(SourceError, match="no resolution level -1"):
        open_mosaic(source, -1)
    assert open_mosaic(source).lateral_axes == (1, 2)


@pytest.mark.parametrize("planes", [0, 5, 9])
def test_a_box_of_a_stack_is_that_box_of_the_whole(planes):
    rng = np.random.default_rng(planes)
    slices = [rng.integers(0, 5, (12, 9, 11)).astype("u2") for _ in range(4)]  # some voxels are 0: not valid
    overlaps, shifts = [planes, 4, 7], [(1.4, -2.0), (0, 3), (-2, 0.6)]
    whole = stack_slices(slices, overlaps, shifts)
    plan = plan_stack([one.shape for one in slices], overlaps, shifts)
    made = np.empty_like(whole)
    for box in boxes(plan.shape, (5, 4, 6)):
        made[box] = compose(plan, box, lambda number, part: slices[number][part], np, np.dtype("u2"))
    np.testing.assert_array_equal(made, whole)


def test_a_part_of_an_overlap_blends_as_the_whole_does():
    rng = np.random.default_rng(0)
    fixed, moving = rng.random((2, 9, 4, 5), np.float32)
    whole = blend_overlap(fixed, moving)
    np.testing.assert_array_equal(blend_overlap(fixed[3:7], moving[3:7], first=3, planes=9), whole[3:7])
    with pytest.raises(ValueError, match="not in an overlap of 9"):
        blend_overlap(fixed[3:7], moving[3:7], first=6, planes=9)


@pytest.mark.parametrize("seed", range(60))
def test_the_window_of_the_search_lies_in_both_slices(seed):
    rng = np.random.default_rng(seed)
    fixed, moving = (tuple(int(n) for n in rng.integers(1, 40, 2)) for _ in range(2))
    step = tuple(int(n) for n in rng.integers(-30, 31, 2))
    most = int(rng.choice([1, 7, 50, 10**6]))
    here, there = search_window(fixed, moving, step, most)
    shared = [min(f, m + s) - max(0, s) for f, m, s in zip(fixed, moving, step, strict=True)]
    if min(shared) <= 0:
        assert any(one.start >= one.stop for one in here)
        return
    sizes = [one.stop - one.start for one in here]
    assert sizes == [one.stop - one.start for one in there]
    assert 1 <= sizes[0] * sizes[1] <= most
    for axis in range(2):
        assert 0 <= here[axis].start < here[axis].stop <= fixed[axis]
        assert 0 <= there[axis].start < there[axis].stop <= moving[axis]
        assert here[axis].start - there[axis].start == step[axis]
    half = [(n + 1) // 2 for n in shared]
    if half[0] * half[1] <= most:
        assert sizes == half
    else:
        assert sizes[0] * sizes[1] > most / 4 or min(half) < 2


def test_slices_are_found_by_their_numbers(tmp_path):
    for name in ("slice_z12_10um.ome.zarr", "mosaic_3d_z02.zarr", "brain7.ome.zarr", ".brain8.zarr", "notes.txt"):
        (tmp_path / name).mkdir()
    names = {number: path.name for number, path in find_slices(tmp_path).items()}
    assert names == {2: "mosaic_3d_z02.zarr", 7: "brain7.ome.zarr", 12: "slice_z12_10um.ome.zarr"}
    assert list(names) == [2, 7, 12]


def test_a_file_is_complete_or_not_there(tmp_path):
    place = tmp_path / "new" / "a.txt"
    place.parent.mkdir()
    with pytest.raises(UnicodeEncodeError), replacing(place) as temporary:
        temporary.write_text("half" + "\ud800")
    assert list(place.parent.iterdir()) == []
    with replacing(place) as temporary:
        temporary.write_text("whole")
        assert not place.exists()
    assert place.read_text() == "whole"
    with pytest.raises(FileExistsError, match="exists"), replacing(place):
        pass
    with replacing(place, overwrite=True) as temporary:
        temporary.write_text("newer")
        assert place.read_text() == "whole"
    assert place.read_text() == "newer"
    with pytest.raises(FileExistsError, match="is a folder"), replacing(tmp_path, overwrite=True):
        pass
    assert [file.name for file in place.parent.iterdir()] == ["a.txt"]


def test_surface_and_truth_on_noisy_data(tmp_path):
    noisy = MosaicSpec(tiles=(2, 2), tile_shape=(64, 48, 48), looks=1, noise=400.0)
    write_mosaic(tmp_path / "m.zarr", noisy)
    find_mosaic_surface(tmp_path / "m.zarr", tmp_path / "s.zarr")
    assert np.median(np.abs(values_of(tmp_path / "s.zarr") / 5.0 - surface_depth(noisy))) <= 2


@pytest.mark.parametrize("dtype", some([">u2", "u1", ">f4", "f8", "i4"], lambda dtype: dtype == ">u2"))
def test_any_numbers_sharded_or_of_the_other_byte_order(tmp_path, dtype):
    voxels = (volume() / 40).clip(0, 255).astype(dtype)
    options = {"chunks": (16, 16, 16), "shards": (64, 32, 64)}
    (tmp_path / "in").mkdir()
    for name in ("slice_1.zarr", "slice_2.zarr"):
        source = write_omezarr(tmp_path / "in" / name, voxels, SPEC.spacing_um, **options)
    find_mosaic_surface(source, tmp_path / "s.zarr", overlay=tmp_path / "s.png", tile_bytes=1)
    np.testing.assert_array_equal(values_of(tmp_path / "s.zarr") / 5.0, find_tissue_interface(voxels, depth_axis=0))
    curvature = correct_mosaic(source, tmp_path / "f.zarr", (45, 51), report=tmp_path / "f.png", tile_bytes=1)
    np.testing.assert_array_equal(values_of(tmp_path / "f.zarr"), correct_focal_curvature(voxels, curvature))
    (tmp_path / "s.csv").write_text("fixed_id,moving_id,x_shift,y_shift,x_shift_mm,y_shift_mm\n1,2,0,0,0.012,0.0\n")
    _, decisions = stack_mosaics(
        tmp_path / "in", tmp_path / "s.csv", tmp_path / "o.zarr", ZSearch(0.3, 0.01), tile_bytes=1
    )
    expected = stack_slices([voxels, voxels], [row.overlap for row in decisions], [(0, 1)])
    np.testing.assert_array_equal(values_of(tmp_path / "o.zarr"), expected)
    for name in ("f.zarr", "o.zarr"):
        array = zarr.open_group(tmp_path / name, mode="r")["0"]
        assert (array.chunks, array.shards) == ((16, 16, 16), (64, 32, 64))
        assert array.dtype.newbyteorder("=") == voxels.dtype.newbyteorder("=")


@pytest.mark.parametrize(
    ("shape", "fill"), matrix([(1, 1, 1), (5, 1, 7), (1, 9, 9), (7, 3, 1)], ["random", "zeros", "nan"])
)
def test_surfaces_and_pictures_of_ugly_volumes(tmp_path, shape, fill):
    voxels = np.random.default_rng(0).random(shape, np.float32)
    voxels *= {"random": 1, "zeros": 0, "nan": np.nan}[fill]
    source = write_omezarr(tmp_path / "m.zarr", voxels, (5, 10, 12))
    find_mosaic_surface(source, tmp_path / "s.zarr", overlay=tmp_path / "s.png", tile_bytes=1)
    np.testing.assert_array_equal(values_of(tmp_path / "s.zarr") / 5.0, find_tissue_interface(voxels, depth_axis=0))
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_a_map_of_edges(tmp_path):
    """The same places as in memory, however the mosaic is cut, with NaN where there is none; and the picture of it."""
    vol = volume().copy()
    vol[:, :30] = np.random.default_rng(0).gamma(4, 10, vol[:, :30].shape)  # noise
    write_omezarr(tmp_path / "m.zarr", vol, SPEC.spacing_um, chunks=(16, 20, 34))
    expected = find_tissue_interface(vol, 9, depth_axis=0, definition="edge")
    assert 0.1 < np.isnan(expected).mean() < 0.5
    for tile_bytes in TILE_BYTES:
        method, out = SurfaceMethod(s_xy=9, definition="edge"), tmp_path / f"{tile_bytes}.zarr"
        picture = tmp_path / f"{tile_bytes}.png"
        find_mosaic_surface(tmp_path / "m.zarr", out, method, overlay=picture, tile_bytes=tile_bytes)
        image = open_mosaic(tmp_path / "m.zarr")
        shift = edge_offset(image, method, (), zero_log_of(image, method))
        assert abs(shift) < 0.2, "its voxels are not resampled"
        moved = np.where(expected > 0, expected + shift, expected)
        np.testing.assert_allclose(values_of(out) / SPEC.spacing_um[0], moved, atol=1e-4)
        assert picture.stat().st_size > 10_000


def test_a_picture_of_a_wide_mosaic_is_thinned_out_alike_however_it_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("linumpy.mosaic.surface._PICTURE_VOXELS", 20)
    drawn = []

    def draw(section, found, edge, depth_um, spacing, place_um, names, source):
        assert source == "m.zarr"
        drawn.append((section.copy(), found.copy(), edge.copy(), depth_um.copy(), spacing, place_um, names))
        return draw_surface(section, found, edge, depth_um, spacing, place_um, names, source=source)

    monkeypatch.setattr("linumpy.mosaic.io.figures.draw_surface", draw)
    write_mosaic(tmp_path / "m.zarr", SPEC, chunks=(16, 20, 34))
    for tile_bytes in TILE_BYTES:
        out = tmp_path / f"{tile_bytes}.zarr"
        find_mosaic_surface(tmp_path / "m.zarr", out, overlay=tmp_path / f"{tile_bytes}.png", tile_bytes=tile_bytes)
    surface = find_tissue_interface(volume(), depth_axis=0)
    edges = find_tissue_interface(volume(), depth_axis=0, definition="edge")
    # 90 × 102 voxels, at most 20 of which are shown: every fifth, every sixth.
    for section, found, edge, depth_um, spacing, place_um, names in drawn:
        np.testing.assert_array_equal(section, volume()[:, 45, ::6])
        np.testing.assert_array_equal(found, surface[45, ::6])
        np.testing.assert_allclose(edge, edges[45, ::6], atol=1e-4)
        np.testing.assert_array_equal(depth_um, surface[::5, ::6] * 5.0)
        assert (spacing, place_um, names) == ((5.0, 40.0, 72.0), 45 * 8.0, ("Y", "X"))
    assert len(drawn) == len(TILE_BYTES)


def test_tiles_that_are_missing_take_no_part_in_the_focal_curvature(tmp_path):
    """What was never acquired is 0 or NaN: its surface is unknown, not flat."""
    spec = MosaicSpec(tiles=(4, 5), tile_shape=(64, 48, 48), focal_um=20.0)
    vol = block(spec, (0, 0, 0), spec.shape)
    options = {"spacing": spec.spacing_um, "chunks": spec.tile_shape}
    write_omezarr(tmp_path / "a.zarr", vol, **options)
    whole = correct_mosaic(tmp_path / "a.zarr", tmp_path / "fa.zarr", (48, 48))
    vol[:, :48], vol[:, 96:, 48:144] = 0, np.nan
    write_omezarr(tmp_path / "b.zarr", vol, **options)
    found = correct_mosaic(tmp_path / "b.zarr", tmp_path / "fb.zarr", (48, 48))
    assert found.tiles < whole.tiles == 20
    assert found.vv == pytest.approx(whole.vv, rel=0.15)
    assert found.uu == pytest.approx(whole.uu, rel=0.15)
    write_omezarr(tmp_path / "c.zarr", np.zeros_like(vol), **options)
    with pytest.raises(ValueError, match="the surface is known in less than 25% of every tile"):
        correct_mosaic(tmp_path / "c.zarr", tmp_path / "fc.zarr", (48, 48))
