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
from scipy import ndimage

from linumpy.mosaic.io.slice_table import slice_number
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


SHAPE, SPACING, DEPTH, INTERVAL = (10, 72, 80), (10.0, 10.0, 10.0), 100.0, 60.0


def gray(source):
    """The pixels of a picture in the page."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))).convert("L")).astype(float)


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
        TilePair(fixed=(0, 0), moving=(0, 1), shift=(0.5, 30.0), confidence=0.9, residual=0.01, rejected=""),
        TilePair(
            fixed=(0, 1), moving=(0, 2), shift=(9.0, 3.0), confidence=0.1, residual=27.0, rejected="low correlation"
        ),
    )
    places = np.array([[[0.0, 0], [0.5, 30], [1, 60], [1.5, 90]]])
    found = TilePositions(
        positions=places,
        present=np.array([[True, True, True, False]]),
        tile_shape=(40, 50),
        model=AcquisitionModel((0, 0), (0.5, 30)),
        pairs=pairs,
    )
    write_positions(folder / "positions.json", found, "m", (10, 20))
    (folder / "decisions.csv").write_text("fixed_id,overlap\n0,7&\n")
    stage = {"name": "aip", "done": 2, "kept": 1, "seconds": 3.25, "wall_seconds": 1.5}
    (folder / "pipeline.json").write_text(json.dumps({"stages": [stage], "empty": ["slice_z09"]}))
    return folder, volumes


def test_the_page(results, tmp_path):
    folder, _ = results
    report = write_report(folder, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    page = Page(text)
    assert not page._open or page._open == ["meta"], "all elements are closed"
    for wanted in (
        "slice_z09: nothing was recorded", "1 of 4 tiles are missing",
        "all voxels are equal", "broken.ome.zarr cannot be read", "NaN or infinite",
    ):  # fmt: skip
        assert [line for line in report.warnings if wanted in line], wanted
        assert wanted in text
    rows = {row[0]: row for row in page.rows if row}
    first = rows["stitched/slice_z0.ome.zarr"]
    assert first[1:4] == ["zyx 6 × 40 × 50", "5 × 10 × 20", "float32"]
    assert float(first[4]) == pytest.approx(100 * np.pi * 15**2 / 2000, rel=0.15)
    assert rows["aip"] == ["aip", "2", "1", "3.25", "1.5"]
    assert rows["0"] == ["0", "7&"]
    assert "<b>map" not in text
    assert "&lt;b&gt;map.ome.zarr" in text
    assert len(page.sources) == 5  # three slices, the map, the positions
    spreads = [np.ptp(gray(source)[:70]) for source in page.sources]
    assert sum(spread > 100 for spread in spreads) == 4  # not that of the constant volume
    assert "width: 40px'></div><div class='small'>200 µm" in text  # of 50 × 20 µm in 200 pixels
    assert not re.search(r"https?://", text)


def test_a_run_and_what_is_refused(results, tmp_path, capsys):
    folder, _ = results
    done = run_script(NAME, folder, tmp_path / "r.html", "--device", "cpu")
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
    odd = {
        "slices": [{"number": 1}, {"number": 2, "placed_by": 3}, 4],
        "pairs": [5, {"fixed_id": [1], "rejected": True}],
    }
    (folder / "odd.json").write_text(json.dumps(odd | {"warnings": 6, "left_out": 7, "tiles": [{}], "clipped": "no"}))
    (folder / "deep.json").write_text(json.dumps({"a": {"b": {"c": 1}}, "d": [1, None], "e": [], "f": True, "g": 2.5}))
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
    assert main([*map(str, words), "--follow-links", "--device", "cpu"]) == 0
    text = (tmp_path / "r.html").read_text()
    assert "stitched/slice_z1.ome.zarr" in text
    assert "positions.json" in text
    assert "7&amp;" in text


def test_a_slice_whose_camera_is_turned_differently_is_warned_of(tmp_path):
    for number, degrees in enumerate((0.30, 0.32, 0.28, 0.75, 0.31, 0.29, 0.30)):
        c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
        pairs = (
            TilePair(fixed=(0, 0), moving=(0, 1), shift=(-30 * s, 30 * c), confidence=0.9, residual=0.01, rejected=""),
        )
        found = TilePositions(
            positions=np.array([[[0.0, 0], [-30 * s, 30 * c]]]), present=np.ones((1, 2), bool), tile_shape=(40, 50),
            model=AcquisitionModel((30 * np.cos(0.005), 30 * np.sin(0.005)), (-30 * s, 30 * c)), pairs=pairs,
        )  # fmt: skip
        write_positions(tmp_path / f"slice_z{number}.json", found, "m", (10, 20))
    warnings = [line for line in write_report(tmp_path, tmp_path / "r.html").warnings if "camera" in line]
    assert warnings == [
        "slice_z3.json, slice 3: the camera is turned by 0.75° against the stage along columns, "
        "0.30° is the median of all slices"
    ]


@pytest.mark.gpu
def test_the_device_reports_the_same(results, tmp_path):
    folder, _ = results
    host, device = (
        write_report(folder, tmp_path / f"{device}.html", device=device).images for device in ("cpu", "cuda")
    )
    assert len(host) == len(device)
    for one, other in zip(host, device, strict=True):
        assert (one.path, one.constant) == (other.path, other.constant)
        np.testing.assert_allclose(other.projection.values, one.projection.values, rtol=1e-5)
        for name in ("tissue", "sharpness", "median", "not_finite"):
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
        assert shown[name].size == (640, 480)
        pixels = np.asarray(shown[name].convert("L")).astype(float)
        expected = np.linspace(0, 255, 480)[:, None]
        assert np.abs(pixels - expected).max() < 6
    red = np.asarray(shown["clear.png"].convert("RGB")).astype(int)
    assert (red[:, :10] > 245).all()
    assert (np.abs(red[:, -10:] - [255, 0, 0]) < 12).all()


def cells(text):
    """The source of each picture of a slice, by stage and number, and which cells are red."""
    found = re.findall(r"<td( class=bad)?><img [^>]*alt='([^']*), slice (\d+)' src='([^']*)'", text)
    return {(stage, int(n)): source for _, stage, n, source in found}, {(s, int(n)) for bad, s, n, _ in found if bad}


def brain(rng, slices):
    """A stack that changes slowly along depth."""
    planes = round(INTERVAL / 10) * (slices - 1) + SHAPE[0]
    field = ndimage.gaussian_filter(rng.normal(size=(planes + 48, *SHAPE[1:])), (6, 2, 2))[24:-24]
    y, x = np.ogrid[: SHAPE[1], : SHAPE[2]]
    tissue = ((y - 36) / 30) ** 2 + ((x - 40) / 34) ** 2 < 1
    return np.where(tissue, 1000 * (1 + 0.25 * field / field.std()).clip(0.2), 40).astype("f4")


def make_run(folder, faults=frozenset(), slices=6, seed=1):
    """Results of a pipeline with stitched slices, surfaces, a stack and the JSON of all stages; faults in slice 3."""
    rng = np.random.default_rng(seed)
    truth = brain(rng, slices)
    stack = truth.copy()
    document = {"linumpy": "transforms of slices", "interval_um": INTERVAL, "slices": [], "pairs": []}
    for name in ("stitch", "surface", "stack", "register", "positions", "attenuation", "shading"):
        (folder / name).mkdir(parents=True)
    for n in range(slices):
        name, is_faulty = f"slice_z{n:02d}", n == 3
        volume = truth[6 * n : 6 * n + 10] * rng.gamma(8, 1 / 8, SHAPE).astype("f4")
        if is_faulty and "bright" in faults:
            volume = volume * 1.5
        if is_faulty and "shift" in faults:
            volume = np.roll(volume, (7, -6), (1, 2))
        if not (is_faulty and "gone" in faults):
            write_omezarr(folder / f"stitch/{name}.ome.zarr", volume, SPACING)
        stack[6 * n + 4 : 6 * n + 10] = volume[4:]
        depth = np.full(SHAPE[1:], 60 if is_faulty and "surface" in faults else 20 + n, "f4")
        depth += rng.uniform(0, 1, depth.shape).astype("f4")
        write_omezarr(folder / f"surface/{name}.ome.zarr", depth, SPACING[1:])
        matrix = np.eye(4)
        matrix[0, 3] = INTERVAL * n
        document["slices"].append({
            "number": n, "name": f"{name}.ome.zarr", "matrix": matrix.tolist(), "top_um": INTERVAL * n,
            "depth_um": DEPTH, "placed_by": "motor" if is_faulty and "motor" in faults else "pairs",
        })  # fmt: skip
        if n:
            rejected = "no peak stands out" if is_faulty and "rejected" in faults else ""
            document["pairs"].append(
                {"fixed_id": n - 1, "moving_id": n, "correlation": 0.8, "evidence": 0.99, "rejected": rejected}
            )
        clipped = 0.02 if is_faulty and "clipped" in faults else 0.0
        told = ["2 % of the voxels are clipped."] if clipped else []
        reason = "there is no tissue" if is_faulty and "left out" in faults else ""
        (folder / f"attenuation/{name}.json").write_text(
            json.dumps({"clipped": clipped, "gain": 1.5, "warnings": told, "left_out": reason})
        )
        by = "model" if is_faulty and "model" in faults else "pairs"
        tiles = [{"row": 0, "column": k, "y": 0, "x": 30 * k, "present": True, "placed_by": by} for k in range(3)]
        (folder / f"positions/{name}.json").write_text(json.dumps({
            "tile_shape": [72, 40], "model": {"row": [0, 0], "column": [0, 30]}, "tiles": tiles, "pairs": [],
            "warnings": ["3 of 3 tiles are placed by the regular grid."] if by == "model" else [], "left_out": "",
        }))  # fmt: skip
    write_omezarr(folder / "stack/stack.ome.zarr", stack, SPACING)
    document["warnings"] = ["No pair places slice 3: placed by the motor's shifts."] if "motor" in faults else []
    (folder / "register/transforms.json").write_text(json.dumps(document))
    said = ["The flat field reaches the limits."] if "said" in faults else []
    (folder / "shading/brain.json").write_text(json.dumps({"tiles": 9, "warnings": said, "left_out": ""}))
    return folder


#: What a fault in slice 3 lets the page say.
SAID = {
    "bright": "slices 2 and 3: tissue is 1.5 times as bright in slice 3 as in slice 2",
    "shift": "slices 2 and 3: their structure hardly matches where they meet",
    "surface": "surface, slice 3: its median is far from that of its neighbours",
    "motor": "register, slice 3: No pair places slice 3: placed by the motor's shifts.",
    "rejected": "the registration of slice 2 with slice 3 was rejected: no peak stands out",
    "clipped": "attenuation, slice 3: 2 % of the voxels are clipped",
    "left out": "attenuation, slice 3: left out: there is no tissue",
    "model": "positions, slice 3: 3 of 3 tiles are placed by the regular grid.",
    "said": "shading: The flat field reaches the limits.",
}


def record_run(folder, left_out, slices=6):
    """Write the summary that linum-pipeline writes of a run of some stages of some slices."""
    stages = []
    for name in ("positions", "surface", "stitch", "attenuation", "shading", "register", "stack"):
        files = [str(path.relative_to(folder)) for path in sorted((folder / name).iterdir())]
        used = [file for file in files if (number := slice_number(file)) is None or number < slices]
        row = {"name": name, "done": 1, "kept": 0, "seconds": 1.0, "wall_seconds": 1.0, "files": used}
        stages += [] if name in left_out else [row]
    summary = {"slices": [], "empty": [], "stages": stages, "left_out": left_out, "results": {}}
    (folder / "pipeline.json").write_text(json.dumps(summary))


def test_results_of_earlier_runs_are_not_shown(tmp_path):
    """Faults of what the last run did not use are no faults of this run; without its record they cannot be told."""
    folder = make_run(tmp_path / "run", {"surface", "clipped"})
    assert len(write_report(folder, tmp_path / "no_record.html").warnings) == 2
    record_run(folder, ["surface", "attenuation"])
    assert write_report(folder, tmp_path / "r.html").warnings == (
        "attenuation, surface: left out; 6 files of earlier runs are not shown",
    )
    text = (tmp_path / "r.html").read_text()
    assert {stage for stage, _ in cells(text)[0]} == {"stitch", "stack"}
    assert "<td>surface</td><td>left out</td>" in text
    assert "<td>attenuation</td><td>left out</td>" in text
    assert "Numbers of attenuation" not in text


def test_slices_that_a_run_did_not_use_are_not_shown(tmp_path):
    folder = make_run(tmp_path / "run", slices=7)
    record_run(folder, [], slices=6)
    warnings = write_report(folder, tmp_path / "r.html").warnings
    assert "attenuation, positions, stitch, surface: 1 file of an earlier run is not shown" in warnings
    assert ("stitch", 6) not in cells((tmp_path / "r.html").read_text())[0]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_clean_run_has_no_warnings(tmp_path, seed):
    report = write_report(make_run(tmp_path / "run", seed=seed), tmp_path / "r.html")
    assert report.warnings == ()
    text = (tmp_path / "r.html").read_text()
    assert "<p class='none'>None.</p>" in text
    drawn, red = cells(text)
    assert set(drawn) == {(stage, n) for stage in ("stitch", "surface", "stack") for n in range(6)}
    assert not red
    sizes = {gray(source).shape for source in drawn.values()}
    assert len(sizes) == 1  # nothing blank: all cells have one size
    correlations = [float(value) for value in re.findall(r"correlation (-?[\d.]+)", text)]
    assert len(correlations) == 5
    assert min(correlations) > 0.5


def test_each_fault_is_a_warning_and_red(tmp_path):
    report = write_report(make_run(tmp_path / "run", frozenset(SAID)), tmp_path / "r.html")
    for name, wanted in SAID.items():
        assert [line for line in report.warnings if wanted in line], (name, report.warnings)
    _, red = cells((tmp_path / "r.html").read_text())
    assert {(stage, 3) for stage in ("stitch", "surface", "stack")} <= red
    assert not {(stage, n) for stage, n in red if n not in (2, 3, 4)}


def test_a_warning_of_the_brain_is_red_at_the_slices_that_it_names(tmp_path):
    folder = make_run(tmp_path / "run", {"motor", "model"})
    assert write_report(folder, tmp_path / "r.html").warnings == (
        "positions, slice 3: 3 of 3 tiles are placed by the regular grid.",
        "register, slice 3: No pair places slice 3: placed by the motor's shifts.",
    )
    assert cells((tmp_path / "r.html").read_text())[1] == {("stack", 3)}


def test_missing_and_empty_slices_have_rows(tmp_path):
    folder = make_run(tmp_path / "run", {"gone"})
    stage = {"name": "stitch", "done": 6, "kept": 0, "seconds": 1.0, "wall_seconds": 1.0}
    (folder / "pipeline.json").write_text(json.dumps({"stages": [stage], "empty": ["slice_z07"]}))
    warnings = write_report(folder, tmp_path / "r.html").warnings
    assert "slice_z07: nothing was recorded in this slice" in warnings
    assert "slice 6 is missing" in warnings
    text = (tmp_path / "r.html").read_text()
    assert ">slice 6 is missing</th>" in text
    assert ">slice 7: nothing was recorded in slice_z07</th>" in text
    assert "<td class='text'>no image</td>" in text


def test_a_column_has_one_gray_scale(tmp_path):
    """Twice the intensity is twice the gray, whatever the slice."""
    ramp = np.linspace(100, 1000, 60, dtype="f4")[:, None] * np.ones((1, 60), "f4")
    (tmp_path / "run/stitch").mkdir(parents=True)
    for n, gain in enumerate((1.0, 0.5)):
        write_omezarr(tmp_path / f"run/stitch/slice_z{n}.ome.zarr", np.stack([gain * ramp] * 4), SPACING)
    write_report(tmp_path / "run", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    low, high = (float(value) for value in re.search(r"µm, ([\d.]+) to ([\d.]+)<br>", text).groups())
    drawn, _ = cells(text)
    full, half = (low + gray(drawn["stitch", n])[10:190] * (high - low) / 255 for n in (0, 1))
    inside = (full < 0.95 * high) & (half > 0.9 * low + 0.1 * high)
    assert inside.mean() > 0.5
    np.testing.assert_allclose((half / full)[inside], 0.5, rtol=0.06)
    assert full[90].mean() == pytest.approx(ramp[30].mean(), rel=0.05)


def test_images_of_several_stages_in_one_folder_are_columns(tmp_path):
    """The names of commands' outputs differ by the stage, and links to images of the folder are no images."""
    folder = tmp_path / "all"
    folder.mkdir()
    volume = np.random.default_rng(5).gamma(4, 100, (4, 30, 40)).astype("f4")
    for name in ("a_z00_flat", "a_z00_even", "a_z01_flat", "a_z01_even"):
        write_omezarr(folder / f"{name}.ome.zarr", volume, SPACING)
    write_report(folder, tmp_path / "r.html")
    drawn, _ = cells((tmp_path / "r.html").read_text())
    assert set(drawn) == {(f"a_z#_{stage}.ome.zarr", n) for stage in ("flat", "even") for n in (0, 1)}
    (folder / "linked").mkdir()
    for n in (0, 1):
        (folder / f"linked/a_z0{n}.ome.zarr").symlink_to(folder / f"a_z0{n}_flat.ome.zarr")
    (folder / "linked/a_z01.json").write_text('{"left_out": "too few tiles", "warnings": []}')
    for follow in (False, True):
        report = write_report(folder, tmp_path / "r.html", follow_links=follow, overwrite=True)
        assert "linked, slice 1: left out: too few tiles" in report.warnings
        assert len(report.images) == 4
        text = (tmp_path / "r.html").read_text()
        assert "<td class='text'>unchanged</td>" in text
        assert "<td class='text bad'>unchanged<div class='why'" in text
