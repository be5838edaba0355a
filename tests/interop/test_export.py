"""If this fails, TIFF or NIfTI files of an image have other voxels, spacing or orientation than the image."""

import sys
from unittest.mock import patch

import numpy as np
import pytest
import zarr

from linumpy import convert_zarr, open_image, to_nifti, to_tiff
from linumpy.errors import MetadataError
from linumpy.interop import export
from linumpy.io.carried import Carried, LeadingAxis
from linumpy.write.writer import write_omezarr

nibabel = pytest.importorskip("nibabel", reason="nibabel is not installed: pip install nibabel")
tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed: pip install tifffile")


def image(path, shape=(9, 12, 14), axes=None, dtype="u2", orientations=None, **options):
    values = np.random.default_rng(0).integers(0, 2 if dtype == "?" else 60_000, shape).astype(dtype)
    leading = {"t": LeadingAxis(2.5, 10, "second"), "c": LeadingAxis()}
    channels = [{"label": "DAPI"}, {"label": "GFP"}]
    carried = Carried(leading=leading, omero={"channels": channels}, orientations=orientations or {})
    options = {"chunks": (1,) * (len(shape) - 3) + (4, 5, 6), **options}
    write_omezarr(path, values, (10, 6, 5)[-min(3, len(shape)) :], axes=axes, carried=carried, **options)
    return values


def ome(path):
    """Attributes of the pixels, and names of the channels."""
    with tifffile.TiffFile(path) as file:
        about = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]["Pixels"]
        return file.asarray(), file.series[0].axes, about


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_a_tiff_has_the_voxels_and_spacing_of_the_image(tmp_path, compression):
    values = image(tmp_path / "a", levels=2)
    with patch.object(export, "_SLAB_NBYTES", 12 * 14 * 2 * 5):
        to_tiff(tmp_path / "a", tmp_path / "a.ome.tif", compression=compression)
    found, axes, about = ome(tmp_path / "a.ome.tif")
    assert (axes, found.dtype) == ("ZYX", "u2")
    np.testing.assert_array_equal(found, values)
    assert [about[f"PhysicalSize{axis}"] for axis in "ZYX"] == [10, 6, 5]
    assert {about[f"PhysicalSize{axis}Unit"] for axis in "ZYX"} == {"µm"}
    with pytest.raises(FileExistsError):
        to_tiff(tmp_path / "a", tmp_path / "a.ome.tif")
    to_tiff(tmp_path / "a", tmp_path / "a.ome.tif", level=1, overwrite=True)
    found, _, about = ome(tmp_path / "a.ome.tif")
    np.testing.assert_array_equal(found, zarr.open_array(tmp_path / "a/1", mode="r")[...])
    assert about["PhysicalSizeX"] == 10


def test_a_tiff_has_times_and_channels(tmp_path):
    values = image(tmp_path / "a", (3, 2, 9, 12, 14), "tczyx")
    to_tiff(tmp_path / "a", tmp_path / "a.tif")
    found, axes, about = ome(tmp_path / "a.tif")
    assert axes == "TCZYX"
    np.testing.assert_array_equal(found, values)
    assert [one["Name"] for one in about["Channel"]] == ["DAPI", "GFP"]
    to_tiff(tmp_path / "a", tmp_path / "b.tif", channel=1, time=2)
    np.testing.assert_array_equal(tifffile.imread(tmp_path / "b.tif"), values[2, 1])


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
def test_a_nifti_file_is_in_mm(tmp_path, name):
    values = image(tmp_path / "a", origin=(1000, -200, 35))
    with patch.object(export, "_SLAB_NBYTES", 12 * 14 * 2 * 5):
        to_nifti(tmp_path / "a", tmp_path / name)
    found = nibabel.load(tmp_path / name)
    np.testing.assert_array_equal(np.asanyarray(found.dataobj), values.T)
    assert found.get_data_dtype() == "u2"
    assert found.header.get_xyzt_units()[0] == "mm"
    np.testing.assert_allclose(found.header.get_zooms(), (0.005, 0.006, 0.010))
    expected = [[0.005, 0, 0, 0.035], [0, 0.006, 0, -0.2], [0, 0, 0.010, 1.0], [0, 0, 0, 1]]
    np.testing.assert_allclose(found.affine, expected, atol=1e-7)
    np.testing.assert_allclose(found.get_qform(), expected, atol=1e-6)
    assert nibabel.aff2axcodes(found.affine) == ("R", "A", "S")


def test_a_nifti_file_has_orientation_times_and_channels(tmp_path):
    values = {"z": "anterior-to-posterior", "y": "inferior-to-superior", "x": "right-to-left"}
    orientations = {axis: {"type": "anatomical", "value": value} for axis, value in values.items()}
    stored = image(tmp_path / "a", (3, 2, 9, 12, 14), "tczyx", orientations=orientations, origin=(1000, -200, 35))
    to_nifti(tmp_path / "a", tmp_path / "a.nii")
    found = nibabel.load(tmp_path / "a.nii")
    np.testing.assert_array_equal(np.asanyarray(found.dataobj), stored.transpose(4, 3, 2, 0, 1))
    np.testing.assert_allclose(found.header.get_zooms()[:4], (0.005, 0.006, 0.010, 2.5))
    assert nibabel.aff2axcodes(found.affine) == ("L", "S", "P")
    # the first voxel, 35 µm along x, -200 along y and 1000 along z, in mm to the right, anterior, superior
    np.testing.assert_allclose(found.affine @ (0, 0, 0, 1), (-0.035, -1.0, -0.2, 1), atol=1e-7)
    to_nifti(tmp_path / "a", tmp_path / "b.nii", channel=0)
    np.testing.assert_array_equal(np.asanyarray(nibabel.load(tmp_path / "b.nii").dataobj), stored[:, 0].T)


@pytest.mark.parametrize(
    ("unit", "seconds", "symbol"),
    [("millisecond", 0.5, "ms"), ("second", 500.0, "s"), ("minute", 30_000.0, "min"), ("microsecond", 5e-4, "µs")],
)
def test_times_in_other_units_than_seconds(tmp_path, unit, seconds, symbol):
    carried = Carried(leading={"t": LeadingAxis(500, 0, unit)})
    write_omezarr(tmp_path / "a", np.zeros((3, 4, 5, 6), "u2"), (1, 1, 1), axes="tzyx", carried=carried)
    to_nifti(tmp_path / "a", tmp_path / "a.nii")
    header = nibabel.load(tmp_path / "a.nii").header
    assert header.get_xyzt_units() == ("mm", "sec")
    assert float(header.get_zooms()[3]) == pytest.approx(seconds, rel=1e-6)
    to_tiff(tmp_path / "a", tmp_path / "a.ome.tif")
    about = ome(tmp_path / "a.ome.tif")[2]
    assert (about["TimeIncrement"], about["TimeIncrementUnit"]) == (500, symbol)
    convert_zarr(tmp_path / "a.ome.tif", tmp_path / "b", device="cpu")
    assert open_image(tmp_path / "b").axes == open_image(tmp_path / "a").axes
    assert open_image(tmp_path / "b").scale == open_image(tmp_path / "a").scale


def test_times_without_a_unit_are_in_no_unit(tmp_path):
    carried = Carried(leading={"t": LeadingAxis(4, 0, None)})
    write_omezarr(tmp_path / "a", np.zeros((3, 4, 5, 6), "u2"), (1, 1, 1), axes="tzyx", carried=carried)
    to_nifti(tmp_path / "a", tmp_path / "a.nii")
    header = nibabel.load(tmp_path / "a.nii").header
    assert (float(header.get_zooms()[3]), header.get_xyzt_units()) == (4, ("mm", "unknown"))


@pytest.mark.parametrize("name", ["a.png", "a", "a.ome.zarr", "tif"])
def test_a_name_of_another_format_is_refused(tmp_path, name):
    image(tmp_path / "source")
    with pytest.raises(ValueError, match=r"the name of a TIFF file ends in \.tif"):
        to_tiff(tmp_path / "source", tmp_path / name)
    assert [one.name for one in tmp_path.iterdir()] == ["source"]


def test_sections_masks_long_images_and_what_cannot_be_written(tmp_path):
    section = image(tmp_path / "section", (12, 14), dtype="f4", chunks=(5, 6))
    to_nifti(tmp_path / "section", tmp_path / "section.nii")
    found = nibabel.load(tmp_path / "section.nii")
    np.testing.assert_array_equal(np.asanyarray(found.dataobj), section.T)
    np.testing.assert_allclose(found.header.get_zooms(), (0.005, 0.006))
    to_tiff(tmp_path / "section", tmp_path / "section.tif")
    np.testing.assert_array_equal(tifffile.imread(tmp_path / "section.tif"), section)
    mask = image(tmp_path / "mask", (1, 2, 40_000), dtype="?", chunks=(1, 2, 9000))
    to_nifti(tmp_path / "mask", tmp_path / "mask.nii")
    found = nibabel.load(tmp_path / "mask.nii")
    assert isinstance(found, nibabel.Nifti2Image)
    np.testing.assert_array_equal(np.asanyarray(found.dataobj), mask.T)
    to_tiff(tmp_path / "mask", tmp_path / "mask.tif")
    np.testing.assert_array_equal(tifffile.imread(tmp_path / "mask.tif"), mask[0])
    image(tmp_path / "half", dtype="f2")
    for write, path in ((to_nifti, tmp_path / "half.nii"), (to_tiff, tmp_path / "half.tif")):
        with pytest.raises(TypeError, match="float16"):
            write(tmp_path / "half", path)
    with pytest.raises(ValueError, match=r"\.nii"):
        to_nifti(tmp_path / "half", tmp_path / "half.img")
    image(tmp_path / "none")
    group = zarr.open_group(tmp_path / "none", mode="r+")
    about = group.attrs["ome"]
    for axis in about["multiscales"][0]["axes"]:
        axis.pop("unit", None)
    group.attrs["ome"] = about
    with pytest.raises(MetadataError, match="spacing="):
        to_tiff(tmp_path / "none", tmp_path / "none.tif")
    assert not (tmp_path / "none.tif").exists()
    to_tiff(tmp_path / "none", tmp_path / "none.tif", spacing=(3, 2, 1))
    assert ome(tmp_path / "none.tif")[2]["PhysicalSizeZ"] == 3


@pytest.mark.parametrize(("function", "package"), [(to_tiff, "tifffile"), (to_nifti, "nibabel")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, function, package):
    image(tmp_path / "a")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"{package} is not installed"):
        function(tmp_path / "a", tmp_path / "a.nii")
