"""If this fails, linumpy.show draws other voxels than those of the volume, or reads more than the planes it shows."""

import sys

import numpy as np
import pytest
import zarr

import linumpy
from linumpy import viewer
from linumpy.errors import RegionError
from linumpy.write.writer import write_omezarr

VOLUME = np.random.default_rng(0).integers(0, 1000, (12, 20, 28), dtype=np.uint16)


def sections(shown):
    """The images of a picture, by title."""
    return {axes.get_title(): axes.images[0] for axes in shown.figure.axes if axes.images}


def texts(shown):
    return {
        text.get_text() for axes in shown.figure.axes for text in axes.findobj(lambda one: hasattr(one, "get_text"))
    }


def check(shown, volume, position, spacing):
    z, y, x = position
    titles = [f"{name} = {(i + 0.5) * step:g} µm" for name, i, step in zip("ZYX", position, spacing, strict=True)]
    images = sections(shown)
    expected = dict(zip(titles, (volume[z], volume[:, y], volume[:, :, x].T), strict=True))
    assert images.keys() == expected.keys()
    for title, values in expected.items():
        np.testing.assert_array_equal(images[title].get_array(), values)
        rows, columns = (n * step for n, step in zip(values.shape, _steps(title, spacing), strict=True))
        assert images[title].get_extent() == [0, columns, rows, 0]


def _steps(title, spacing):
    z, y, x = spacing
    return {"Z": (y, x), "Y": (z, x), "X": (y, z)}[title[0]]


def test_an_array(tmp_path):
    shown = linumpy.show(VOLUME, (5, 10, 20), limits=(100, 900))
    check(shown, VOLUME, (6, 10, 14), (5, 10, 20))
    planes = np.concatenate([VOLUME[6].ravel(), VOLUME[:, 10].ravel(), VOLUME[:, :, 14].ravel()])
    above, below = 100 * np.mean(planes > 900), 100 * np.mean(planes < 100)
    assert f"{above:.2g} % above\n{below:.2g} % below" in texts(shown)
    assert {"100 µm", "10 µm"} <= texts(shown)  # scale bars of 560 and 60 µm
    shown.move((0, 19, 3))
    check(shown, VOLUME, (0, 19, 3), (5, 10, 20))
    for name, start in (("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.SVG", b"<?xml")):
        shown.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    with pytest.raises(RegionError, match=r"position=\(12, 0, 0\) is outside of array on the host: 12 × 20 × 28"):
        shown.move((12, 0, 0))


def test_an_image_on_disk_of_which_only_the_planes_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(viewer, "_SHOWN_VOXELS", 16)
    write_omezarr(tmp_path / "a.ome.zarr", np.stack([VOLUME, VOLUME // 2]), (5, 10, 20), axes="czyx", levels=2)
    coarse = zarr.open_array(tmp_path / "a.ome.zarr/1", mode="r")[1]
    regions = []
    from linumpy.gpu import zarr_io

    read = zarr_io.read_zarr
    monkeypatch.setattr(zarr_io, "read_zarr", lambda *a, **k: regions.append(k["region"]) or read(*a, **k))
    shown = linumpy.show(str(tmp_path / "a.ome.zarr"), channel=1)
    check(shown, coarse, (3, 5, 7), (10, 20, 40))
    assert repr(shown) == "Sections of a.ome.zarr, level 1, channel 1: 6 × 10 × 14 (zyx), 10 × 20 × 40 µm at (3, 5, 7)"
    assert [[type(one) for one in region].count(int) for region in regions] == [2, 2, 2]
    check(linumpy.show(tmp_path / "a.ome.zarr", level=0, position=(1, 2, 3)), VOLUME, (1, 2, 3), (5, 10, 20))


def test_arrays_without_units_and_images_of_two_axes():
    shown = linumpy.show(VOLUME > 500)
    assert {"Z = 6", "X (voxels)"} <= texts(shown)
    assert not any("µm" in text for text in texts(shown))
    flat = linumpy.show(np.where(VOLUME[0] > 900, np.nan, VOLUME[0]), (10, 20))
    assert "100 µm" in texts(flat)
    assert linumpy.show(zarr.array(VOLUME)).position == (6, 10, 14)
    for wrong, message in ((VOLUME[None], "three axes"), (VOLUME[:0], "with voxels"), (VOLUME * 1j, "complex128")):
        with pytest.raises(ValueError, match=message):
            linumpy.show(wrong)
    with pytest.raises(ValueError, match="pass 3 positive numbers of µm"):
        linumpy.show(VOLUME, (1, 2))
    with pytest.raises(ValueError, match="a single array has no levels"):
        linumpy.show(VOLUME, level=1)


def test_sliders_of_a_notebook():
    pytest.importorskip("ipywidgets", reason="ipywidgets is not installed: pip install ipywidgets")
    shown = linumpy.show(VOLUME, (5, 10, 20))
    controls, picture = viewer.sliders(shown).children
    assert [(one.description, one.value, one.max) for one in controls.children] == [
        ("z", 6, 11),
        ("y", 10, 19),
        ("x", 14, 27),
    ]
    before = bytes(picture.value)
    controls.children[2].value = 3
    check(shown, VOLUME, (6, 10, 3), (5, 10, 20))
    assert bytes(picture.value).startswith(b"\x89PNG")
    assert bytes(picture.value) != before


def test_a_notebook_displays_the_sliders_or_the_picture(monkeypatch):
    display = pytest.importorskip("IPython.display", reason="IPython is not installed: pip install ipywidgets")
    shown = []
    monkeypatch.setattr(viewer, "_in_notebook", lambda: True)
    monkeypatch.setattr(display, "display", shown.append)
    linumpy.show(VOLUME)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    linumpy.show(VOLUME)
    assert [type(one).__name__ for one in shown] == ["VBox", "Image"]


@pytest.mark.gpu
def test_an_array_on_a_device_of_which_planes_are_copied(cupy, monkeypatch):
    copied, asnumpy = [], cupy.asnumpy
    monkeypatch.setattr(cupy, "asnumpy", lambda a, *rest, **how: copied.append(a.ndim) or asnumpy(a, *rest, **how))
    check(linumpy.show(cupy.asarray(VOLUME), (5, 10, 20)), VOLUME, (6, 10, 14), (5, 10, 20))
    assert copied == [2, 2, 2]


def test_names_are_no_formulas_and_wrong_parameters_are_named(tmp_path):
    path = tmp_path / "a$_{$.zarr"
    write_omezarr(path, np.arange(24, dtype="u1").reshape(2, 3, 4), (1, 1, 1))
    linumpy.show(path).save(tmp_path / "a.svg")
    with pytest.raises(ValueError, match=r"limits=\(5, 1\)"):
        linumpy.show(path, limits=(5, 1))
    with pytest.raises(TypeError, match="float"):
        linumpy.show(path, position=(0, 1.5, 2))
