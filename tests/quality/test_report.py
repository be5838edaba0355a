"""If this fails, the report of a run lacks what is wrong with it, or is no page by itself."""

import base64
import io
import json
import os
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from skimage import metrics

from linumpy.quality.report import write_report
from linumpy.registration.position_files import write_positions
from linumpy.registration.positions import AcquisitionModel, TilePair, TilePositions
from linumpy.write.writer import write_omezarr
from tests.support.script_runs import check_refused, load, run_script

NAME, PROGRAM = "linum_report", "linum-report"


class Page(HTMLParser):
    """The rows of all tables, and the addresses that the page refers to."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.sources, self._open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1].append(data)


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    (folder / "stitched").mkdir(parents=True)
    rng = np.random.default_rng(0)
    y, x = np.ogrid[:40, :50]
    tissue = np.where((y - 20) ** 2 + (x - 25) ** 2 < 15**2, 1000.0, 10.0)
    volumes = [(tissue * rng.gamma(20, 1 / 20, (6, 40, 50))).astype("f4") for _ in range(2)]
    volumes[1][0, 0, 0] = np.nan
    for number, volume in enumerate(volumes):
        write_omezarr(folder / f"stitched/slice_z{number}.ome.zarr", volume, (5, 10, 20), levels=2)
    write_omezarr(folder / "stitched/slice_z2.ome.zarr", np.full((6, 40, 50), 3, "u2"), (5, 10, 20))
    write_omezarr(folder / "<b>map.ome.zarr", volumes[0][0], (10, 20))
    (folder / "broken.ome.zarr").mkdir()
    (folder / "broken.ome.zarr/zarr.json").write_text("{")
    pairs = (
        TilePair((0, 0), (0, 1), (0.5, 30.0), 0.9, 0.01, ""),
        TilePair((0, 1), (0, 2), (9.0, 3.0), 0.1, 27.0, "low correlation"),
    )
    places = np.array([[[0.0, 0], [0.5, 30], [1, 60], [1.5, 90]]])
    found = TilePositions(
        places, np.array([[True, True, True, False]]), (40, 50), AcquisitionModel((0, 0), (0.5, 30)), pairs
    )
    write_positions(folder / "positions.json", found, "m", (10, 20))
    (folder / "decisions.csv").write_text("fixed_id,overlap\n0,7&\n")
    stage = {"name": "aip", "done": 2, "kept": 1, "seconds": 3.25, "wall_seconds": 1.5}
    (folder / "pipeline.json").write_text(json.dumps({"stages": [stage], "empty": ["slice_z09"]}))
    return folder, volumes


def test_the_page(results, tmp_path):
    folder, volumes = results
    report = write_report(folder, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    page = Page(text)
    assert not page._open or page._open == ["meta"], "all elements are closed"
    for wanted in (
        "slice_z09: nothing was recorded", "1 of 4 tiles are missing", "1 of 2 pairs", "all voxels are equal",
        "broken.ome.zarr cannot be read", "NaN or infinite",
    ):  # fmt: skip
        assert [line for line in report.warnings if wanted in line], wanted
        assert wanted in text
    rows = {row[0]: row for row in page.rows}
    first = rows["stitched/slice_z0.ome.zarr"]
    assert first[1:4] == ["zyx 6 × 40 × 50", "5 × 10 × 20", "float32"]
    assert float(first[4]) == pytest.approx(100 * np.pi * 15**2 / 2000, rel=0.15)
    flat = [np.nan_to_num(volume).mean(0) for volume in volumes]
    extent = np.ptp(np.percentile(flat, (0.5, 99.5)))
    assert float(first[6]) == pytest.approx(metrics.structural_similarity(*flat, data_range=extent), rel=0.01)
    assert rows["aip"] == ["aip", "2", "1", "3.25", "1.5"]
    assert rows["0"] == ["0", "7&"]
    assert "<b>map" not in text
    assert "&lt;b&gt;map.ome.zarr" in text
    assert len(page.sources) == 8  # two of each volume, the map, the positions
    spreads = []
    for source in page.sources:
        kind, data = source.split(",")
        assert kind == "data:image/jpeg;base64"
        spreads.append(np.ptp(np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("L"))))
    assert sum(spread > 100 for spread in spreads) == 6  # not the two of the constant volume
    assert "width: 20.00%'></div>200 µm" in text  # of 50 × 20 µm
    assert "aspect-ratio: 1000 / 400" in text
    assert not re.search(r"https?://", text)


def test_a_run_and_what_is_refused(results, tmp_path, capsys):
    folder, _ = results
    done = run_script(NAME, folder, tmp_path / "r.html", "--no-use_gpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder} -> {tmp_path / 'r.html'}: 4 images, 6 warnings\n"
    main = load(NAME).main
    check_refused(capsys, main, [folder, tmp_path / "r.html"], PROGRAM, "--overwrite")
    (tmp_path / "nothing").mkdir()
    check_refused(capsys, main, [tmp_path / "nothing", tmp_path / "s.html"], PROGRAM, "to report")
    check_refused(capsys, main, [tmp_path / "no", tmp_path / "s.html"], PROGRAM, "no such folder")
    assert not (tmp_path / "s.html").exists()


def test_damaged_files_are_warnings(results, tmp_path):
    """One of them must not cost the whole page; nor may a pipe be waited for."""
    folder, _ = results
    (folder / "cut.json").write_text('{"tiles": 1, "pairs": 2, "model": 3, "tile_shape": 4}')
    (folder / "long.csv").write_text("a\n" + "x" * 200_000)
    (folder / "pipeline.json").write_text('{"stages": [1]}')
    os.mkfifo(folder / "pipe.csv")
    text = "\n".join(write_report(folder, tmp_path / "page.html").warnings)
    for name in ("cut.json", "long.csv", "pipeline.json"):
        assert name in text
    assert "pipe.csv" not in text


def test_links_are_followed_where_that_is_asked_for(results, tmp_path, capsys):
    folder, _ = results
    (tmp_path / "links").mkdir()
    for name in ("stitched", "positions.json", "decisions.csv"):
        (tmp_path / "links" / name).symlink_to(folder / name)
    words, main = [tmp_path / "links", tmp_path / "r.html"], load(NAME).main
    check_refused(capsys, main, words, PROGRAM, "holds no OME-Zarr images")
    assert main([*map(str, words), "--follow_links", "--no-use_gpu"]) == 0
    text = (tmp_path / "r.html").read_text()
    assert "stitched/slice_z1.ome.zarr" in text
    assert "positions.json" in text
    assert "7&amp;" in text


def test_a_slice_whose_camera_is_turned_differently_is_warned_of(tmp_path):
    for number, degrees in enumerate((0.30, 0.32, 0.28, 0.75, 0.31, 0.29, 0.30)):
        c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
        pairs = (TilePair((0, 0), (0, 1), (-30 * s, 30 * c), 0.9, 0.01, ""),)
        found = TilePositions(
            np.array([[[0.0, 0], [-30 * s, 30 * c]]]), np.ones((1, 2), bool), (40, 50),
            AcquisitionModel((30 * np.cos(0.005), 30 * np.sin(0.005)), (-30 * s, 30 * c)), pairs,
        )  # fmt: skip
        write_positions(tmp_path / f"slice_z{number}.json", found, "m", (10, 20))
    warnings = [line for line in write_report(tmp_path, tmp_path / "r.html").warnings if "camera" in line]
    assert warnings == [
        "slice_z3.json: the camera is turned by 0.75° against the stage along columns, "
        "0.30° is the median of all slices"
    ]


@pytest.mark.gpu
def test_the_device_reports_the_same(results, tmp_path):
    folder, _ = results
    host, device = (
        write_report(folder, tmp_path / f"{use_gpu}.html", use_gpu=use_gpu).images for use_gpu in (False, True)
    )
    assert len(host) == len(device)
    for one, other in zip(host, device, strict=True):
        assert (one.path, one.constant) == (other.path, other.constant)
        np.testing.assert_allclose(other.projection, one.projection, rtol=1e-5)
        for name in ("tissue", "sharpness", "similarity", "not_finite"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-3, abs=1e-3, nan_ok=True)


def test_pictures_of_any_kind_are_shown(tmp_path):
    """16 bits keep their gray, transparent pixels are white, and a picture that cannot be read is named."""
    ramp = np.linspace(0, 65535, 1200 * 900).reshape(900, 1200)
    Image.fromarray(ramp.astype(np.uint16)).save(tmp_path / "a16.png")
    Image.fromarray((ramp / 257).astype(np.uint8)).save(tmp_path / "b8.png")
    clear = np.zeros((30, 40, 4), np.uint8)
    clear[:, 20:] = 255, 0, 0, 255
    Image.fromarray(clear).save(tmp_path / "clear.png")
    Image.fromarray(clear[..., 0] > 0).save(tmp_path / "mask.png")
    (tmp_path / "damaged.png").write_bytes((tmp_path / "b8.png").read_bytes()[:500])
    (tmp_path / "text.png").write_text("no picture")
    write_report(tmp_path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    data = dict(re.findall("alt='([^']*)' src='data:image/jpeg;base64,([^']*)'", page))
    shown = {name: Image.open(io.BytesIO(base64.b64decode(text))) for name, text in data.items()}
    assert set(shown) == {"a16.png", "b8.png", "clear.png", "mask.png"}
    assert page.count("cannot be read") == 2
    for name in ("a16.png", "b8.png"):
        assert shown[name].size == (800, 600)
        pixels = np.asarray(shown[name].convert("L")).astype(float)
        expected = np.linspace(0, 255, 600)[:, None]
        assert np.abs(pixels - expected).max() < 6
    red = np.asarray(shown["clear.png"].convert("RGB")).astype(int)
    assert (red[:, :10] > 245).all()
    assert (np.abs(red[:, -10:] - [255, 0, 0]) < 12).all()
