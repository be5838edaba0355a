"""If this fails, spacing, axes or levels of OME-Zarr images are read wrong (oracle: ome-zarr-py)."""

import base64
import io
import re

import numpy as np
import ome_zarr.format
import ome_zarr.writer
import pytest
import zarr
from PIL import Image

from linumpy.errors import MetadataError, SourceError
from linumpy.gpu.zarr_io import read_zarr
from linumpy.io.carried import carried_from
from linumpy.io.ngff.axes import MICROMETERS, SYMBOLS
from linumpy.io.ome import open_image, open_level, read_omezarr
from linumpy.io.open import open_source
from linumpy.io.volume import open_volumes
from linumpy.rays import OccupancyGrid
from linumpy.resample.convert_zarr import convert_zarr
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.sampling import create_sampler
from tests.support.script_runs import check_refused, load

FORMATS = {"0.4": ome_zarr.format.FormatV04(), "0.5": ome_zarr.format.FormatV05()}


def axes(unit="micrometer", names="zyx"):
    return [{"name": name, "type": "space", **({"unit": unit} if unit else {})} for name in names]


def scale(*values):
    return {"type": "scale", "scale": list(values)}


def translation(*values):
    return {"type": "translation", "translation": list(values)}


def by_ome_zarr_py(folder, version, unit="millimeter"):
    pyramid = [np.arange(8 * 12 * 16, dtype="u2").reshape(8, 12, 16)]
    pyramid.append(pyramid[0][::2, ::2, ::2])
    transformations = [[scale(0.01, 0.002, 0.003)], [scale(0.02, 0.004, 0.006), translation(0.005, 0.001, 0.0015)]]
    fmt = FORMATS[version]
    group = zarr.open_group(folder, mode="w", zarr_format=fmt.zarr_format)
    ome_zarr.writer.write_multiscale(
        pyramid,
        group,
        fmt=fmt,
        axes="zyx",
        axes_units=dict.fromkeys("zyx", unit),
        coordinate_transformations=transformations,
    )
    return pyramid


@pytest.mark.parametrize("version", FORMATS)
def test_images_written_by_ome_zarr_py(tmp_path, version):
    pyramid = by_ome_zarr_py(tmp_path / "i", version)
    image = open_image(tmp_path / "i")
    assert image.version == version
    assert [axis.name for axis in image.axes] == ["z", "y", "x"]
    assert {axis.unit for axis in image.axes} == {"millimeter"}
    assert image.spacing[0] == pytest.approx((10, 2, 3))
    assert image.spacing[1] == pytest.approx((20, 4, 6))
    assert image.origin == (pytest.approx((0, 0, 0)), pytest.approx((5, 1, 1.5)))
    for level, expected in enumerate(pyramid):
        array, spacing = read_omezarr(tmp_path / "i", level)
        assert np.array_equal(array[...], expected)
        assert spacing == image.spacing[level]
        assert np.array_equal(open_level(zarr.open_group(tmp_path / "i", mode="r"), level)[...], expected)
    assert "level 1: 4 × 6 × 8 uint16, 20 × 4 × 6 µm" in str(image)


def by_hand(folder, *, unit="micrometer", dataset=None, whole=(), names="zyx", shape=(4, 5, 6), more=()):
    group = zarr.create_group(folder)
    group.create_array("0", shape=shape, dtype="u1")
    multiscale = {
        "axes": [*more, *axes(unit, names)],
        "datasets": [{"path": "0", "coordinateTransformations": list(dataset or [scale(1, 2, 3)])}],
        **({"coordinateTransformations": list(whole)} if whole else {}),
    }
    group.attrs["ome"] = {"version": "0.5", "multiscales": [multiscale]}
    return group


def test_dataset_comes_before_multiscale(tmp_path):
    """x → 3 (2 x + 5) + 7, as NGFF has the transformations of a dataset applied before those of all."""
    by_hand(
        tmp_path / "i", dataset=(scale(2, 2, 2), translation(5, 5, 5)), whole=(scale(3, 3, 3), translation(7, 7, 7))
    )
    image = open_image(tmp_path / "i")
    assert image.spacing == ((6.0, 6.0, 6.0),)
    assert image.origin == ((22.0, 22.0, 22.0),)


def test_axes_that_are_not_of_space_are_left_out(tmp_path):
    more = ({"name": "t", "type": "time", "unit": "second"}, {"name": "c", "type": "channel"})
    by_hand(tmp_path / "i", dataset=(scale(9, 8, 1, 2, 3),), more=more, shape=(1, 2, 4, 5, 6))
    image = open_image(tmp_path / "i")
    assert image.spacing == ((1.0, 2.0, 3.0),)
    assert image.spatial_axes == (2, 3, 4)


def test_prefixes_are_powers_of_ten():
    small = {"yocto": -24, "zepto": -21, "atto": -18, "femto": -15, "pico": -12, "nano": -9, "micro": -6, "milli": -3}
    large = {"kilo": 3, "mega": 6, "giga": 9, "tera": 12, "peta": 15, "exa": 18, "zetta": 21, "yotta": 24}
    for prefix, power in (small | large | {"centi": -2, "deci": -1, "": 0, "hecto": 2}).items():
        assert MICROMETERS[f"{prefix}meter"] == pytest.approx(10.0 ** (power + 6), rel=1e-12)


def test_the_units_are_those_of_ngff():
    """As ome-zarr-py lists them."""
    from ome_zarr.axes import KNOWN_SPATIAL_UNITS

    assert set(MICROMETERS) - set(SYMBOLS) == set(KNOWN_SPATIAL_UNITS)


@pytest.mark.parametrize(
    ("unit", "micrometers"),
    [("nm", 1e-3), ("um", 1), ("mm", 1e3), ("\u00b5m", 1), ("\u03bcm", 1), ("\u00b5", 1), ("\u03bc", 1)],
)
def test_symbols_of_units(tmp_path, unit, micrometers):
    """Read, and written again as they were spelled."""
    by_hand(tmp_path / "i", unit=unit)
    assert open_image(tmp_path / "i").spacing[0] == pytest.approx(np.array([1, 2, 3]) * micrometers)
    resample_zarr(tmp_path / "i", tmp_path / "o", np.array([2, 4, 6]) * micrometers, device="cpu")
    image = open_image(tmp_path / "o")
    assert {axis.unit for axis in image.axes} == {unit}
    assert image.scale[0] == pytest.approx((2, 4, 6), rel=0.3)  # a whole number of voxels
    assert image.spacing[0] == pytest.approx(np.array(image.scale[0]) * micrometers)


@pytest.mark.parametrize("unit", ["angstrom", "inch", "foot", "yard", "mile", "parsec"])
def test_units_that_are_no_powers_of_ten(unit):
    """As SciPy has them."""
    import scipy.constants

    assert MICROMETERS[unit] == pytest.approx(getattr(scipy.constants, unit) * 1e6, rel=1e-9)


@pytest.mark.parametrize(
    ("unit", "message"), [(None, "axis 'z' has no unit"), ("furlong", "axis 'z' has the unknown unit 'furlong'")]
)
def test_nobody_guesses_a_unit(tmp_path, unit, message):
    """The image opens; what is in µm is an error, until the caller passes the spacing."""
    group = by_hand(tmp_path / "i", unit=unit, dataset=[scale(1, 2, 3), translation(4, 5, 6)])
    image, volumes = open_image(tmp_path / "i"), open_volumes(tmp_path / "i")
    assert (image.scale, image.translation) == (((1, 2, 3),), ((4, 5, 6),))
    assert [axis.unit for axis in image.axes] == [unit] * 3
    assert image.levels[0].shape == volumes.first.shape == (4, 5, 6)
    assert "level 0: 4 × 5 × 6 uint8, 1 × 2 × 3 (no unit)" in str(image)
    for ask in (
        lambda: image.spacing,
        lambda: image.origin,
        lambda: volumes.spacing,
        lambda: volumes.origin,
        lambda: resample_zarr(tmp_path / "i", tmp_path / "o", 2, device="cpu"),
    ):
        with pytest.raises(MetadataError, match=rf"/i: {message}; pass spacing= in µm"):
            ask()
    assert not (tmp_path / "o").exists()
    array, spacing = read_omezarr(tmp_path / "i")
    assert (array.shape, spacing) == ((4, 5, 6), None)
    array, spacing = read_omezarr(tmp_path / "i", spacing=(1.5, 2.5, 3.5))
    assert spacing == (1.5, 2.5, 3.5)
    assert array.shape == (4, 5, 6)
    assert open_level(group, 0).shape == (4, 5, 6)  # a read needs no unit


def test_a_given_spacing_scales_all_levels(tmp_path):
    by_ome_zarr_py(tmp_path / "i", "0.5")
    image = open_image(tmp_path / "i", spacing=(1, 1, 2))
    assert image.spacing == (pytest.approx((1, 1, 2)), pytest.approx((2, 2, 4)))
    assert image.origin[1] == pytest.approx((0.5, 0.5, 1))


@pytest.mark.parametrize(
    ("unit", "first", "second"),
    [
        ("micrometer", (100, 20, 30), (104, 21, 31)),  # half a voxel of 8, 2, 2 µm further
        ("millimeter", (100e3, 20e3, 30e3), (100_004, 20_001, 30_001)),
        (None, (200, 40, 60), (204, 41, 61)),  # 4, 1, 1 of an unknown unit are 8, 2, 2 µm, so one is 2 µm
    ],
)
def test_another_spacing_moves_no_image_that_says_where_it_lies(tmp_path, unit, first, second):
    group = zarr.open_group(tmp_path / "i", mode="w")
    for name in "01":
        group.create_array(name, shape=(4, 4, 4), dtype="u1")
    datasets = [
        {"path": "0", "coordinateTransformations": [scale(4, 1, 1), translation(100, 20, 30)]},
        {"path": "1", "coordinateTransformations": [scale(8, 2, 2), translation(102, 20.5, 30.5)]},
    ]
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes(unit), "datasets": datasets}]}
    image = open_image(tmp_path / "i", spacing=(8, 2, 2))
    assert image.spacing == ((8, 2, 2), (16, 4, 4))
    np.testing.assert_allclose(image.origin, [first, second], rtol=1e-12)
    if unit == "micrometer":  # what the metadata says, said once more
        assert open_image(tmp_path / "i", spacing=(4, 1, 1)).origin == open_image(tmp_path / "i").origin


@pytest.mark.parametrize(
    "spacing", [(1, 2), (1, 2, 0), (1, 2, -3), (1, 2, float("nan")), (1, 2, float("inf")), 3.0, "abc"]
)
def test_a_given_spacing_that_cannot_be(tmp_path, spacing):
    by_hand(tmp_path / "i")
    with pytest.raises(ValueError, match=r"spacing=.*i has 3 axes of space"):
        open_image(tmp_path / "i", spacing=spacing)


@pytest.mark.parametrize(
    ("transformation", "message"),
    [
        (scale(1, 2), r"the scale \[1, 2\] has 2 numbers, and the image has 3 axes"),
        (translation(1, 2, 3, 4), r"the translation \[1, 2, 3, 4\] has 4 numbers, and the image has 3 axes"),
        ({"type": "affine", "affine": [[1, 0, 0, 0]]}, "is no scale or translation"),
        ({"type": "scale", "path": "somewhere"}, "is no scale or translation"),
        (scale("1", "1", "1"), "is no scale or translation"),
        (scale(True, None, 1), "is no scale or translation"),
        (translation(float("nan"), 0, 0), "is no scale or translation"),
        (scale(1, 1, 0), r"scale \(1\.0, 1\.0, 0\.0\) is not positive"),
        (scale(1, 1, -2), "is not positive"),
        ("scale", "are no list of objects"),
    ],
)
@pytest.mark.parametrize("spacing", [None, (1, 1, 1)])
def test_transformations_that_cannot_be_read(tmp_path, transformation, message, spacing):
    by_hand(tmp_path / "i", dataset=(transformation, scale(1, 1, 1)))
    with pytest.raises(MetadataError, match=message):
        open_image(tmp_path / "i", spacing=spacing)


def test_nobody_guesses_a_scale(tmp_path):
    group = by_hand(tmp_path / "i")
    ome_attributes = group.attrs["ome"]

    def describe(*transformations):
        levels = [{"path": "0", "coordinateTransformations": list(one)} for one in transformations]
        ome_attributes["multiscales"][0]["datasets"] = levels
        group.attrs["ome"] = ome_attributes

    describe(())
    with pytest.raises(MetadataError, match=r"level '0' has no scale; pass spacing= in µm"):
        open_image(group)
    image = open_image(group, spacing=(3, 2, 1))
    assert (image.spacing, image.origin) == (((3.0, 2.0, 1.0),), ((0.0, 0.0, 0.0),))
    # By how much the levels differ, or where the first voxel lies, no spacing of level 0 can say.
    for transformations in (((), ()), ((scale(1, 1, 1),), ()), ((translation(1, 1, 1),),)):
        describe(*transformations)
        with pytest.raises(MetadataError, match=r"level '0' has no scale$"):
            open_image(group, spacing=(3, 2, 1))


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (None, "names no axes"),
        (["z", "y", "x"], "the axes z, y, x have names but no types, as in NGFF 0.3"),
        ([{"name": name, "unit": "micrometer"} for name in "zyx"], "axis 'z' has no type"),
        ([{"name": name, "type": "space", "unit": "micrometer"} for name in "zyy"], "same name"),
        ([{"name": name, "type": "channel"} for name in "abc"], "none of the axes a, b, c is of type space"),
        (5, "names no axes"),
        ([{"name": "x", "type": ["space"]}], r"axis 'x' has the type \['space'\]"),
        ([{"name": name, "type": "space", "unit": ["micrometer"]} for name in "zyx"], "unknown unit"),
        ([{"name": name, "type": "space", "unit": "pixel"} for name in "zyx"], "unknown unit 'pixel'; pass spacing="),
    ],
)
def test_axes_that_cannot_be_read(tmp_path, described, message):
    group = by_hand(tmp_path / "i")
    ome_attributes = group.attrs["ome"]
    ome_attributes["multiscales"][0]["axes"] = described
    group.attrs["ome"] = ome_attributes
    with pytest.raises(MetadataError, match=message):
        _ = open_image(group).spacing


@pytest.mark.parametrize("datasets", [["0"], {"path": "0"}, [{"coordinateTransformations": []}]])
def test_datasets_that_cannot_be_read(tmp_path, datasets):
    group = by_hand(tmp_path / "i")
    ome_attributes = group.attrs["ome"]
    ome_attributes["multiscales"][0]["datasets"] = datasets
    group.attrs["ome"] = ome_attributes
    for ask in (lambda: open_image(group), lambda: open_level(group, 0)):
        with pytest.raises(MetadataError, match="datasets are no list of paths"):
            ask()


def test_axes_and_array_must_agree(tmp_path):
    by_hand(tmp_path / "i", shape=(4, 5))
    with pytest.raises(MetadataError, match="has 2 axes, but the metadata names 3"):
        open_image(tmp_path / "i")


@pytest.mark.parametrize("level", [1, -1, True])
def test_a_level_that_is_not_there(tmp_path, level):
    group = by_hand(tmp_path / "i")
    for ask in (lambda: read_omezarr(tmp_path / "i", level), lambda: open_level(group, level)):
        with pytest.raises(SourceError, match=f"no resolution level {level}: it has 1"):
            ask()


def test_what_is_no_image(tmp_path):
    group = zarr.create_group(tmp_path / "g")
    group.create_array("thing", shape=(3,), dtype="u1")
    with pytest.raises(SourceError, match=r"g is a Zarr group but no OME-Zarr image; it holds thing"):
        open_image(tmp_path / "g")
    with pytest.raises(SourceError, match="single array"):
        open_image(tmp_path / "g/thing")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_image(tmp_path / "nowhere")
    by_hand(tmp_path / "i")
    (tmp_path / "i/0/zarr.json").unlink()
    with pytest.raises(SourceError, match="the resolution level '0' does not exist"):
        open_image(tmp_path / "i")


@pytest.mark.parametrize("version", ["0.1", "0.3", "0.7", "0.9.dev1", "1.0", "0.55", "latest"])
def test_versions_that_are_not_read(tmp_path, version):
    """Of another version nobody knows what its metadata mean, even if they look like those of a known one."""
    group = by_hand(tmp_path / "i")
    group.attrs["ome"] = {**group.attrs["ome"], "version": version}
    advice = rf"follows NGFF {re.escape(version)}; NGFF 0\.4, 0\.5 and 0\.6 are read: convert it"
    for ask in (open_image, open_source, lambda path: convert_zarr(path, tmp_path / "b", ngff_version="0.4")):
        with pytest.raises(MetadataError, match=advice):
            ask(tmp_path / "i")
    old = zarr.open_group(tmp_path / "old", mode="w", zarr_format=2)
    old.attrs["multiscales"] = [{**group.attrs["ome"]["multiscales"][0], "version": version}]
    with pytest.raises(MetadataError, match=advice):
        open_image(tmp_path / "old")


@pytest.mark.parametrize("version", ["0.4", "0.4-dev", "0.5-dev-spatialdata", "0.5.2", "0.6.dev3"])
def test_drafts_of_versions_are_read(tmp_path, version):
    group = by_hand(tmp_path / "i")
    group.attrs["ome"] = {**group.attrs["ome"], "version": version}
    assert open_image(tmp_path / "i").spacing == ((1.0, 2.0, 3.0),)


def test_images_without_units_written_by_ome_zarr_py(tmp_path):
    pyramid = [np.arange(8 * 12 * 16, dtype="u2").reshape(8, 12, 16)]
    ome_zarr.writer.write_multiscale(pyramid, zarr.open_group(tmp_path / "i", mode="w"), axes="zyx")
    assert np.array_equal(read_zarr(tmp_path / "i", level=0, device="cpu"), pyramid[0])
    image = open_image(tmp_path / "i")
    assert [axis.unit for axis in image.axes] == [None] * 3
    with pytest.raises(MetadataError, match="axis 'z' has no unit"):
        _ = image.spacing
    resample_zarr(tmp_path / "i", tmp_path / "o", 2, spacing={"x": 1, "y": 1, "z": 2}, device="cpu")
    assert open_image(tmp_path / "o").spacing == ((2, 2, 2),)
    with pytest.raises(MetadataError, match="axis 'z' has no unit; pass spacing="):
        OccupancyGrid.from_zarr(tmp_path / "i", threshold=5, device="cpu")
    given = OccupancyGrid.from_zarr(tmp_path / "i", threshold=5, device="cpu", spacing=(2, 1, 1))
    assert np.array_equal(given.density, OccupancyGrid.from_volume(pyramid[0], (2, 1, 1), threshold=5).density)


def test_several_multiscale_images(tmp_path):
    group = by_hand(tmp_path / "i")
    group.create_array("raw", shape=(2, 2, 2), dtype="u1")
    first = {**group.attrs["ome"]["multiscales"][0], "name": "fused"}
    second = {**first, "name": "raw", "datasets": [{**first["datasets"][0], "path": "raw"}]}
    group.attrs["ome"] = {"version": "0.5", "multiscales": [first, second]}
    for wanted, path in ((0, "0"), ("fused", "0"), (1, "raw"), ("raw", "raw")):
        volumes = open_volumes(tmp_path / "i", multiscale=wanted)
        assert volumes.first.array.basename == path
        assert carried_from(volumes).name == {"0": "fused", "raw": "raw"}[path]
        assert carried_from(volumes).dropped[0] == f"the multiscale image {int(path == '0')}"
    assert open_image(group).levels[0].basename == "0"
    for wanted in (2, -1, True, "other", None):
        with pytest.raises(SourceError, match=rf"no multiscale image {wanted!r}: it has 0 'fused', 1 'raw'"):
            open_image(group, multiscale=wanted)


def test_two_axes(tmp_path, capsys):
    """They open and are resampled; what needs a volume tells so in one line."""
    by_hand(tmp_path / "i", names="yx", shape=(5, 6), dataset=[scale(2, 3)], unit=None)
    array, spacing = read_omezarr(tmp_path / "i", spacing={"y": 2, "x": 3})
    assert (array.shape, spacing) == ((5, 6), (2, 3))
    assert (
        load("linum_resample").main(
            [str(tmp_path / "i"), str(tmp_path / "o"), "--resolution", "1", "--spacing", "9", "2", "3"]
        )
        == 0
    )
    assert open_image(tmp_path / "o").levels[0].shape == (10, 18)
    capsys.readouterr()
    words = [str(tmp_path / "i"), str(tmp_path / "p"), "--spacing", "9", "2", "3"]
    check_refused(capsys, load("linum_aip").main, words, "linum-aip", "axes y, x; z, y and x of space are needed")


@pytest.mark.needs_core
def test_two_axes_are_sampled_as_one_plane(tmp_path):
    """With units and without, which an array alone does not have."""
    by_hand(tmp_path / "i", names="yx", shape=(5, 6), dataset=[scale(2, 3)], unit=None)
    values = np.arange(30, dtype="u1").reshape(5, 6)
    zarr.open_array(tmp_path / "i/0", mode="a")[...] = values
    for source in (tmp_path / "i", tmp_path / "i/0"):
        points, found = create_sampler("zarr", "cpu", source=source, spline_order=0, spacing=(3, 2, 1)).sample(99)
        x, y = np.clip((points[:, :2] * (6, 5)).astype(int), 0, (5, 4)).T
        assert np.array_equal(found[0], values[y, x])


def test_a_metadata_document_that_is_a_list(tmp_path):
    (tmp_path / "zarr.json").write_text("[]")
    with pytest.raises(SourceError, match="holds list, not an object"):
        open_image(tmp_path)


def test_a_notebook_shows_levels_and_a_picture(tmp_path):
    """The picture is the middle plane; a broken chunk costs the picture alone."""
    by_ome_zarr_py(tmp_path / "a<b", "0.5")
    image = open_image(tmp_path / "a<b")
    page = image._repr_html_()
    assert "a&lt;b" in page
    assert "a<b" not in page
    assert page.count("<tr>") == 3
    assert "8 × 12 × 16</td><td style='text-align:left'>uint16</td><td style='text-align:left'>10 × 2 × 3 µm" in page
    (content,) = re.findall(r"src='data:image/png;base64,([^']+)'", page)
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))).convert("L")).astype(float)
    plane = image.levels[0][4]
    assert shown.shape == plane.shape
    assert np.corrcoef(shown.ravel(), plane.ravel())[0, 1] > 0.99
    for chunk in (tmp_path / "a<b" / image.levels[0].path).rglob("c/*/*/*"):
        chunk.write_bytes(b"broken")
    assert image._repr_html_().count("<tr>") == 3
    assert "<img" not in image._repr_html_()
