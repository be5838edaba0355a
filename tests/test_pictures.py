"""If this fails, a picture does not show what was measured: its lines, colours, labels or size, or its file."""

import base64
import io
import json
import re
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest
from PIL import Image

from linumpy.mosaic.focal import correct_mosaic
from linumpy.mosaic.io.figures import (
    draw_depth_map,
    draw_focal_curvature,
    draw_illumination,
    draw_positions,
    draw_section,
    draw_surface,
)
from linumpy.mosaic.surface import find_mosaic_surface
from linumpy.pictures import Colors, Line, Panel, Picture, _Axes, _ticks, clipping, colored, render, save
from linumpy.testing.synthetic import MosaicSpec, write_mosaic


def inside(picture, row=0, column=0):
    """Return the pixels of the axes of one panel."""
    return np.asarray(_Axes(picture.rows[row][column])._inside()).astype(int)


def distance(pixels, color):
    """Return the largest difference of each pixel from a colour, over the channels."""
    return np.abs(pixels - list(bytes.fromhex(color[1:]))).max(axis=-1)


def test_clipping():
    values = np.array([np.nan, -np.inf, *range(10)])
    assert clipping(values, (2, 8)) == ("10 % above\n20 % below", "both")
    assert clipping(values, (0, 8)) == ("10 % above", "max")
    assert clipping(values, (1, 9)) == ("10 % below", "min")
    assert clipping(values, (0, 9)) == ("", "neither")
    assert clipping(np.full(3, np.nan), (0, 1)) == ("", "neither")


@pytest.mark.parametrize("name", ["viridis", "gray"])
def test_colours_are_those_of_matplotlib(name):
    values = np.linspace(-1, 1, 999)[None]
    expected = matplotlib.colormaps[name]((values - -0.5) / 1.0, bytes=True)[..., :3].astype(int)
    assert np.abs(colored(values, (-0.5, 0.5), name) - expected).max() <= 6
    ugly = np.array([[np.nan, np.inf, -np.inf, 0.0]])
    assert (colored(ugly, (0, 1), name) == [[[255] * 3] * 3 + [colored(np.zeros((1, 1)), (0, 1), name)[0, 0]]]).all()
    assert (colored(np.full((2, 2), 7), (7, 7), name) == colored(np.zeros((1, 1)), (0, 1), name)).all()


@pytest.mark.parametrize(
    "limits", [(0, 3840), (500, 0), (-1.5, 2.5), (0.0097, 0.0103), (1e-9, 3e-9), (-4e7, 9e7), (0, 1), (0, 3e-300)]
)
@pytest.mark.parametrize("count", [0, 3, 9])
def test_ticks_are_round_numbers_at_their_places(limits, count):
    ticks = _ticks(limits, count)
    assert 1 <= len(ticks) <= max(2, count) + 1
    for share, text in ticks:
        assert -1e-9 < share < 1 + 1e-9
        assert float(text) == pytest.approx(limits[0] + share * (limits[1] - limits[0]), rel=1e-4, abs=1e-12)
    assert len({text for _, text in ticks}) == len(ticks)


@pytest.mark.parametrize("limits", [(3.0, 3.0), (1e9, 1e9 + 1e-6)])
def test_one_tick_for_one_value(limits):
    assert _ticks(limits, 5) == [(0.5, f"{limits[0]:g}")]


def test_lines_of_surfaces_are_at_their_depths():
    section = np.random.default_rng(0).integers(1, 2000, (60, 200)).astype(np.uint16)
    found, edge = np.full(200, 20.0), np.full(200, 40.0)
    found[100:] = np.nan
    edge[150:] = np.inf
    picture = draw_surface(section, found, edge, np.ones((80, 200)), (5, 8, 8), 320.0, source="m.zarr")
    pixels = inside(picture)
    height, width = pixels.shape[:2]
    for color, voxel, end in (("#ff7f0e", 20, 100), ("#17becf", 40, 150)):
        is_line = distance(pixels, color) < 8
        rows = np.flatnonzero(is_line.any(axis=1)) + 0.5
        assert abs(rows - (voxel + 0.5) / 60 * height).max() < 4
        columns = np.flatnonzero(is_line.any(axis=0))
        assert columns[0] < 10
        assert abs(columns[-1] - end / 200 * width) < 6
    below = inside(picture, 1)
    dashes = (distance(below, "#ffffff") == 0).sum(axis=1)
    assert abs(np.argmax(dashes) - 320 / 640 * len(below)) < 3
    assert [panel.title for (panel,) in picture.rows] == [
        "XZ section at Y = 320 µm",
        "Depth of the tissue surface (dashed: the section above)",
    ]
    same = draw_surface(section, found, found, np.ones((80, 200)), (5, 8, 8), 320.0)
    assert [line.label for line in same.rows[0][0].lines] == ["surface found"]


def test_an_image_fills_its_axes_pixel_by_pixel():
    values = np.array([[0.0, 1.0, np.nan], [1.0, 0.0, 0.0]])
    panel = Panel("", "x", "y", (3.0, 2.0), (0, 3), (0, 2), image=values, colors=Colors((0, 1), "", "gray"))
    pixels = inside(Picture(((panel,),)))
    assert pixels.shape == (240, 360, 3)
    np.testing.assert_array_equal(pixels[60::120, 60::120, 0], [[0, 255, 255], [255, 0, 0]])


def test_texts_are_written():
    """Each text adds dark pixels where it belongs; without it there are none."""
    panel = Panel("Title", "x (µm)", "y (µm)", (3.0, 2.0), (0, 100), (0, 50), has_scale_bar=True)

    def dark(part, **changes):
        pixels = np.asarray(render(Picture(((Panel(**{**vars(panel), **changes}),),))).convert("L"))
        return int((pixels[part] < 128).sum())

    axes = _Axes(panel)
    top, left = render(Picture(((panel,),))).height - axes.height - axes.below, axes.before
    above, under, beside = np.s_[: top - 2], np.s_[top + axes.height + 30 :], np.s_[:, : left - 45]
    for part, name in ((above, "title"), (under, "x_label"), (beside, "y_label")):
        assert dark(part) > dark(part, **{name: ""}) + 30
    assert dark(np.s_[top + 5 : -axes.below - 5, left + 5 : left + 350]) > 1000  # the scale bar
    assert dark(np.s_[top + 5 : -axes.below - 5, left + 5 : left + 350], has_scale_bar=False) == 0
    named = render(Picture(((panel,),), "brain.ome.zarr"))
    assert named.height > render(Picture(((panel,),))).height
    assert (np.asarray(named.convert("L"))[:30] < 128).sum() > 100


def test_the_legend_shows_each_line_that_has_a_label():
    x = np.arange(10.0)
    lines = tuple(
        Line(x, x * 0 + 20, color, label, style)
        for color, label, style in (
            ("#ff0000", "one", "-"), ("#00ff00", "two", "--"), ("#0000ff", "three", "."), ("#ff00ff", "four", "fill"),
            ("#00ffff", "", "-"),
        )
    )  # fmt: skip
    panel = Panel("", "", "", (2.0, 1.0), (0, 10), (0, 10), lines=lines)  # the lines are outside of the axes
    pixels = np.asarray(render(Picture(((panel,),)))).astype(int)
    assert [int((distance(pixels, line.color) < 30).sum()) > 10 for line in lines] == [True] * 4 + [False]


@pytest.mark.parametrize("style", ["-", "--", ":", ".", "fill"])
@pytest.mark.parametrize("length", [0, 1, 2, 300])
def test_lines_of_any_length_and_values(style, length):
    rng = np.random.default_rng(1)
    x, y = np.arange(length) + 0.5, rng.normal(5, 3, length)
    y[::7], y[3:20:11] = np.nan, 1e30
    panel = Panel("", "", "", (1.0, 1.0), (0, max(1, length)), (0, 10), lines=(Line(x, y, "#ff0000", "a", style),))
    assert render(Picture(((panel,),))).size > (120, 120)
    y[:] = 5.0
    drawn = distance(inside(Picture(((panel,),))), "#ff0000") < 8
    assert drawn.any() == (length > 0 and style != "fill")
    assert not drawn[:50].any()


@pytest.mark.parametrize("shape", [(1, 1), (1, 400), (400, 1), (3, 700), (700, 3), (30, 40)])
@pytest.mark.parametrize("fill", ["random", "constant", "nan", "inf", "some"])
def test_pictures_of_any_shape_and_values(shape, fill):
    rng = np.random.default_rng(0)
    values = rng.random(shape) if fill in ("random", "some") else np.full(shape, {"constant": 3.0}.get(fill, np.nan))
    if fill == "inf":
        values[:] = np.inf
    if fill == "some":
        values[rng.random(shape) < 0.5] = np.nan
    line = values[0] * 3
    pictures = [
        draw_section(values, line, line + 1, 5, 8, 40.0, source="odd\nname \udcff $x$"),
        draw_depth_map(values, (5, 8)),
        draw_surface(values, line, line + 1, values, (5, 8, 8), 3.0),
    ]
    if fill not in ("inf", "nan") and min(shape) > 1:
        finite = np.nan_to_num(values)
        pictures.append(draw_focal_curvature(values, finite, finite * 0.1, (5, 8), "a title"))
        volume = np.stack([finite] * 2)
        pictures.append(draw_illumination(volume, volume * 0, rng.random((3, 2)), (5, 8, 8)))
    for picture in pictures:
        pixels = render(picture)
        assert max(pixels.size) < 3000
        for row in picture.rows:
            for panel in row:
                assert max(panel.size) <= 9
                assert min(panel.size) >= 1.5


def test_focal_curvature_shows_mean_tile_and_fit():
    v, u = np.meshgrid(np.linspace(-1, 1, 60), np.linspace(-1, 1, 80), indexing="ij")
    focal, tissue = 40 * v**2 + 10 * u**2, 4 * u**2
    picture = draw_focal_curvature(focal + tissue + 900, focal, tissue, (10, 10), "mean of 9 tiles", ("A", "B"))
    mean, removed, profiles = picture.rows[0]
    np.testing.assert_allclose(mean.image, focal + tissue, atol=1e-9)  # without its distance from the fit
    np.testing.assert_array_equal(removed.image, focal)
    assert mean.colors == removed.colors
    assert (mean.x_label, mean.y_label, mean.title) == ("B (µm)", "A (µm)", "mean of 9 tiles")
    assert profiles.y_limits[0] < profiles.y_limits[1]  # deeper is lower
    assert (distance(inside(picture, 0, 2), "#d62728") < 8).sum() > 200
    assert (distance(inside(picture, 0, 2), "#1f77b4") < 8).sum() > 200


def test_positions_are_outlines_and_pairs():
    corners = np.array([[[0.0, 0.0], [0.0, 90.0]]])
    pairs = [((0, 0), (0, 1), 0.9, True)]
    picture = draw_positions(corners, np.array([[True, False]]), (100, 100), pairs, source="p.json")
    pixels = inside(picture)
    height, width = pixels.shape[:2]
    red = distance(pixels, "#d62728") < 8
    rows, columns = np.flatnonzero(red.any(axis=1)), np.flatnonzero(red.any(axis=0))
    assert abs(rows.mean() - height / 2) < 3  # the middle of the tiles
    assert abs(columns[0] - (50 + 3.8) / (190 + 7.6) * width) < 4
    assert 0.4 < red.any(axis=0)[columns[0] : columns[-1]].mean() < 0.9  # dashed
    assert height / width == pytest.approx(107.6 / 197.6, rel=0.02)
    row = np.stack([np.zeros((1, 50)), 90.0 * np.arange(50)[None]], axis=-1)
    (panel,) = draw_positions(row, np.ones((1, 50), bool), (100, 100), []).rows[0]
    assert panel.size == pytest.approx((4.8, 2.4))
    assert panel.x_limits[1] - panel.x_limits[0] == pytest.approx(2 * (panel.y_limits[1] - panel.y_limits[0]))


@pytest.mark.parametrize(("suffix", "start"), [(".pdf", b"%PDF"), (".svg", b"<?xml"), (".PNG", b"\x89PNG")])
def test_the_suffix_of_a_picture_is_its_format(tmp_path, suffix, start):
    write_mosaic(tmp_path / "m.zarr", MosaicSpec(tiles=(1, 1), tile_shape=(48, 20, 24)))
    find_mosaic_surface(tmp_path / "m.zarr", tmp_path / "s.zarr", overlay=tmp_path / f"s{suffix}")
    correct_mosaic(tmp_path / "m.zarr", tmp_path / "f.zarr", report=tmp_path / f"f{suffix}")
    for name in "sf":
        assert (tmp_path / f"{name}{suffix}").read_bytes().startswith(start)
    if suffix == ".svg":
        assert "<title>m.zarr</title>" in (tmp_path / "s.svg").read_text()
    assert json.loads((tmp_path / "f.json").read_text())["tiles"] == 1


def test_a_file_has_the_rendered_pixels(tmp_path):
    picture = draw_depth_map(np.arange(10_000.0).reshape(100, 100), (10, 20), source="a<b>&'c'.zarr")
    expected = np.asarray(render(picture))
    save(picture, tmp_path / "a.png")
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "a.png")), expected)
    save(picture, tmp_path / "temporary", ".SVG")
    text = (tmp_path / "temporary").read_text()
    (data,) = re.findall("base64,([^']*)'", text)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))), expected)
    assert ElementTree.fromstring(text)[0].text == "a<b>&'c'.zarr"
    save(picture, tmp_path / "a.pdf")
    assert (tmp_path / "a.pdf").read_bytes().rstrip().endswith(b"%%EOF")
