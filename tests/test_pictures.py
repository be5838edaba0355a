"""If this fails, a figure does not say what it shows: its file, or how many values its colours clip."""

import numpy as np
import pytest

from linumpy.mosaic.focal import correct_mosaic
from linumpy.mosaic.surface import find_mosaic_surface
from linumpy.pictures import clipping, draw_depth_map
from linumpy.testing.synthetic import MosaicSpec, write_mosaic


def test_clipping():
    values = np.array([np.nan, -np.inf, *range(10)])
    assert clipping(values, (2, 8)) == ("10 % above\n20 % below", "both")
    assert clipping(values, (0, 8)) == ("10 % above", "max")
    assert clipping(values, (1, 9)) == ("10 % below", "min")
    assert clipping(values, (0, 9)) == ("", "neither")
    assert clipping(np.full(3, np.nan), (0, 1)) == ("", "neither")


def test_a_map_names_its_source_and_what_it_clips():
    figure = draw_depth_map(np.arange(10_000.0).reshape(100, 100), (10, 20), source="brain.ome.zarr")
    bar = figure.axes[1]
    assert figure.get_suptitle() == "brain.ome.zarr"
    assert bar.get_title() == "0.5 % above\n0.5 % below"


@pytest.mark.parametrize(("suffix", "start"), [(".pdf", b"%PDF"), (".svg", b"<?xml"), (".PNG", b"\x89PNG")])
def test_the_suffix_of_a_picture_is_its_format(tmp_path, suffix, start):
    write_mosaic(tmp_path / "m.zarr", MosaicSpec(tiles=(1, 1), tile_shape=(48, 20, 24)))
    find_mosaic_surface(tmp_path / "m.zarr", tmp_path / "s.zarr", overlay=tmp_path / f"s{suffix}")
    correct_mosaic(tmp_path / "m.zarr", tmp_path / "f.zarr", report=tmp_path / f"f{suffix}")
    for name in "sf":
        assert (tmp_path / f"{name}{suffix}").read_bytes().startswith(start)
    if suffix == ".svg":
        assert "m.zarr" in (tmp_path / "s.svg").read_text()  # in the comment before the text's outlines
