"""If this fails, napari shows images at a wrong place or size, or reads whole chunks' columns for one plane."""

import tomllib
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import zarr

import linumpy.interop
from linumpy.interop import outer
from linumpy.interop.napari_reader import get_reader
from linumpy.io.carried import Carried, LeadingAxis
from linumpy.write.new_image import create_labels_group
from linumpy.write.writer import write_omezarr

npe2 = pytest.importorskip("npe2", reason="npe2 is not installed: pip install npe2")
MANIFEST = Path(linumpy.interop.__file__).with_name("napari.yaml")
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
SHAPE = (40, 50, 60)


def values(shape=SHAPE):
    return np.random.default_rng(0).integers(0, 60_000, shape).astype("u2")


@pytest.fixture
def manager():
    """napari's plugins: this one alone."""
    manager = npe2.PluginManager()
    manager.register(npe2.PluginManifest.from_file(MANIFEST))
    with patch.object(npe2.PluginManager, "instance", return_value=manager):
        yield manager


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "brain.ome.zarr"
    write_omezarr(path, values(), (10, 6, 5), chunks=(16, 16, 16), levels=3, origin=(100, -20, 3.5))
    return str(path)


def test_the_manifest_is_valid_and_an_entry_point_of_the_package():
    manifest = npe2.PluginManifest.from_file(MANIFEST)
    manifest.validate_imports()
    if PROJECT.exists():
        project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
        assert project["entry-points"]["napari.manifest"] == {manifest.name: "linumpy.interop:napari.yaml"}
        assert project["name"] == manifest.name


def test_an_image_is_a_multiscale_layer_in_micrometers(image, manager):
    assert [reader.command for reader in manager.iter_compatible_readers([image])] == ["linumpy-gpu.read"]
    ((data, about, kind),) = npe2.read([image], stack=False)
    assert kind == "image"
    assert about.pop("metadata")["path"].endswith("brain.ome.zarr")
    assert about == {
        "name": "brain.ome.zarr", "scale": [10, 6, 5], "translate": [100, -20, 3.5], "axis_labels": ["z", "y", "x"],
        "units": ["micrometer"] * 3, "multiscale": True,
    }  # fmt: skip
    for level, array in enumerate(data):
        expected = zarr.open_array(f"{image}/{level}", mode="r")[...]
        np.testing.assert_array_equal(np.asarray(array), expected)
        part = np.asarray(array[3:9:2, [4, 0, 7], ::-1])
        np.testing.assert_array_equal(part, expected[3:9:2][:, [4, 0, 7]][..., ::-1])


def test_of_a_plane_only_the_plane_is_read(image):
    ((data, *_),) = get_reader(image)(image)
    read = []
    read_outer = outer.read_outer

    def watched(*arguments):
        block = read_outer(*arguments)
        read.append(block.size)
        return block

    with patch.object(outer, "read_outer", watched):
        np.testing.assert_array_equal(np.asarray(data[0][7]), values()[7])
    assert sum(read) == 50 * 60


def test_channels_are_layers_and_labels_come_along(tmp_path):
    window = {"start": 5, "end": 900}
    channels = [{"label": "DAPI", "color": "0000FF", "window": window}, {"label": "GFP", "color": "00FF00"}]
    carried = Carried(leading={"t": LeadingAxis(2.5, 10, "second"), "c": LeadingAxis()}, omero={"channels": channels})
    path = tmp_path / "cells.ome.zarr"
    stored = values((3, 2, 8, 12, 10))
    write_omezarr(path, stored, (10, 6, 5), axes="tczyx", carried=carried, name="cells")
    create_labels_group(path / "labels", ["nuclei"], "0.5")
    nuclei = values((8, 12, 10)) % 5
    label = Carried(image_label={"colors": []})
    write_omezarr(path / "labels/nuclei", nuclei, (10, 6, 5), carried=label, name="nuclei")
    (cells, about, kind), (labels, label, kind_of_labels) = get_reader([str(path)])([str(path)])
    assert (kind, kind_of_labels) == ("image", "labels")
    np.testing.assert_array_equal(np.asarray(cells[0]), stored)
    np.testing.assert_array_equal(np.asarray(labels[0]), nuclei)
    assert (about["channel_axis"], about["name"], about["colormap"]) == (1, ["DAPI", "GFP"], ["#0000FF", "#00FF00"])
    assert (about["scale"], about["translate"]) == ([2.5, 10, 6, 5], [10, 0, 0, 0])
    assert (about["units"], about["axis_labels"]) == (["second", *["micrometer"] * 3], ["t", "z", "y", "x"])
    assert "contrast_limits" not in about  # one channel has none
    assert (label["name"], label["scale"]) == ("nuclei", [10, 6, 5])


def test_what_is_no_image_is_left_to_other_plugins(tmp_path):
    zarr.open_group(tmp_path / "group.zarr", mode="w")
    zarr.create_array(tmp_path / "array.zarr", shape=(4, 4), dtype="u1")
    for path in ("group.zarr", "array.zarr", "nothing.zarr"):
        assert get_reader(str(tmp_path / path)) is None
