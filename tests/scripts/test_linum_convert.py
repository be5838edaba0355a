"""If this fails, `linum-convert` does not store an image in another way, or does not say what it stored."""

import re

import numpy as np
import tifffile

from linumpy.io.codecs import encoding_of
from linumpy.io.ome import open_image
from linumpy.write.new_image import ZARR_FORMATS
from linumpy.write.writer import write_omezarr
from tests.support.script_runs import load

DATA = np.random.default_rng(1).integers(0, 99, (16, 20, 24)).astype("u2")


def test_an_image(main, tmp_path, capsys):
    write_omezarr(tmp_path / "a", DATA, (5, 2, 3), levels=2, chunks=(8, 8, 8), codec="none")
    words = ["--codec", "blosc:zstd:bit", "--chunks", "4", "4", "4", "--shards", "8", "8", "8", "--ngff-version", "0.6"]
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), *words, "--device=cpu"]) == 0
    image = open_image(tmp_path / "b")
    assert (image.version, image.spacing) == ("0.6", open_image(tmp_path / "a").spacing)
    for mine, other in zip(image.levels, open_image(tmp_path / "a").levels, strict=True):
        assert np.array_equal(mine[...], other[...])
        assert (str(encoding_of(mine)), mine.chunks, mine.shards) == ("blosc:zstd:bit", (4, 4, 4), (8, 8, 8))
    told = capsys.readouterr().out
    assert re.search(r"a -> .*b on CPU: 16\.9 KiB, .*/s; 16\.9 KiB stored in \d.*iB, ratio \d\.\d", told), told


def test_by_default_and_of_tiff(main, tmp_path, capsys):
    tifffile.imwrite(tmp_path / "a.tif", DATA, photometric="minisblack")
    assert main([str(tmp_path / "a.tif"), str(tmp_path / "b")]) == 2
    assert "pass --spacing UM" in capsys.readouterr().err
    assert main([str(tmp_path / "a.tif"), str(tmp_path / "b"), "--spacing", "5", "2", "3", "--levels", "2"]) == 0
    assert main([str(tmp_path / "b"), str(tmp_path / "c")]) == 0
    for path in ("b", "c"):
        image = open_image(tmp_path / path)
        assert np.array_equal(image.levels[0][...], DATA)
        assert (len(image.levels), image.spacing[0], str(encoding_of(image.levels[0]))) == (2, (5.0, 2.0, 3.0), "zstd")


def test_a_stopped_acquisition(main, tmp_path, capsys):
    """Its missing planes are an error that names the option, or zeros; the spacing is that of the file."""
    metadata = {"axes": "TYX", "PhysicalSizeX": 2, "PhysicalSizeY": 3}
    tifffile.imwrite(tmp_path / "a.ome.tif", DATA, metadata=metadata, photometric="minisblack")
    whole = (tmp_path / "a.ome.tif").read_bytes()
    whole = whole.replace(b'SizeT="16"', b'SizeT="17"').replace(b'PlaneCount="16"', b'PlaneCount="17"')
    (tmp_path / "a.ome.tif").write_bytes(whole)
    words = [str(tmp_path / "a.ome.tif"), str(tmp_path / "b"), "--device=cpu"]
    assert main(words) == 2
    assert re.search(r"1 of 17 planes .*: t 16\. .*--missing 'fill'", capsys.readouterr().err)
    assert not (tmp_path / "b").exists()
    assert main([*words, "--missing", "fill"]) == 0
    image = open_image(tmp_path / "b")
    assert np.array_equal(image.levels[0][...], np.concatenate([DATA, np.zeros_like(DATA[:1])]))
    assert image.spacing == ((3.0, 2.0),)


def test_what_is_refused(main, tmp_path, capsys):
    write_omezarr(tmp_path / "a", DATA, (5, 2, 3))
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--codec", "zst"]) == 2
    assert "--codec 'zst': choose one of" in capsys.readouterr().err
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--memory", "0"]) == 2
    assert "--memory 0" in capsys.readouterr().err
    parser = load("linum_convert").main.parser()
    (ngff,) = (action for action in parser._actions if "--ngff-version" in action.option_strings)
    assert tuple(ngff.choices) == tuple(ZARR_FORMATS)
    assert not (tmp_path / "b").exists()
