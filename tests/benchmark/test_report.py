"""If this fails, the benchmark's table, JSON document or picture says something else than was measured."""

import dataclasses
import json

import matplotlib.image
import numpy as np
import pytest

from linumpy.benchmark import machine, report
from linumpy.benchmark.command import Output
from tests.benchmark import made_up


def row(text, title):
    (line,) = [line for line in text.splitlines() if line.startswith(title)]
    return line


def test_every_line_fits_a_terminal():
    results = made_up.gpu_results()
    shown = [report.case_text(one) for one in results]
    shown += [report.summary_text(results), report.machine_text(made_up.gpu_machine())]
    assert max(len(line) for text in shown for line in text.splitlines()) <= report.WIDTH <= 110


def test_a_row_holds_rate_median_spread_and_ratio():
    text = report.case_text(made_up.gpu_results()[0])  # 2 GiB
    assert " ".join(row(text, "linumpy auto").split()) == "linumpy auto ok 32.0 62.5 ms 56.2 ms – 75.0 ms"
    assert row(text, "zarr-gpu  ").split()[-1] == "8.00"
    assert row(text, "flat file").split()[-1] == "0.89"
    noted = made_up.gpu_results()[0]
    entries = tuple(dataclasses.replace(one, note="by kvikio") for one in noted.entries)
    assert row(report.case_text(dataclasses.replace(noted, entries=entries)), "linumpy auto").endswith("  by kvikio")


def test_wrong_and_unavailable_rows_have_a_reason_in_place_of_numbers():
    text = report.case_text(made_up.gpu_results()[0])
    assert row(text, "linumpy kvikio").split()[2:5] == ["WRONG:", "voxel", "(0,"]
    assert "cannot run: voxel" in row(text, "zarrs")
    assert "GiB/s" not in row(text, "zarrs")


def test_the_mark_stands_beside_each_case():
    results = made_up.gpu_results()
    assert ["0.89" in line and "met" in line for line in report.summary_text(results).splitlines()[2:]] == [True] * 4
    slow = made_up.gpu_results(rates={**made_up.RATES, "linumpy-auto": 20.0})  # 0.56 of flat
    verdicts = [line.split()[-1] for line in report.summary_text(slow).splitlines()[2:]]
    assert verdicts == ["MISSED", "met", "MISSED", "MISSED"]
    assert report.case_text(slow[0]).splitlines()[-1].endswith("MISSED")
    assert "not judged: cold" in report.summary_text(made_up.gpu_results(cold=True))
    missing = made_up.gpu_results(rates={"flat": 36.0})
    assert [line.split()[-1] for line in report.summary_text(missing).splitlines()[2:]] == ["WRONG"] * 4


def test_how_it_was_timed_is_told():
    result = made_up.gpu_results()[0]
    assert "medians of up to 3 runs by the wall clock, after warm-ups" in report.case_text(result)
    events = dataclasses.replace(result, case=dataclasses.replace(result.case, clock="device"))
    assert "by CUDA events" in report.case_text(events)


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (0.0123, "0.01"), (9.876, "9.88"), (48.76, "48.8")])
def test_numbers_are_short(value, text):
    assert report.number(value) == text


def test_the_machine_says_that_compat_mode_is_not_gds():
    text = " ".join(report.machine_text(made_up.gpu_machine()).split())
    assert "NVIDIA H200" in text
    assert "GDS compat: compat mode, not GDS" in text
    assert "GPUDirect Storage is not confirmed" in text


@pytest.mark.parametrize(
    ("mode", "native", "expected"),
    [("compat", None, "compat"), ("none", None, "none"), ("cufile", True, "native"), ("cufile", False, "not native")],
)
def test_only_a_verdict_on_the_folder_makes_gds_native(tmp_path, monkeypatch, mode, native, expected):
    from linumpy.gpu import kvikio_zarr

    monkeypatch.setattr(machine, "kvikio_mode", lambda: (mode, "said kvikio"))
    monkeypatch.setattr(kvikio_zarr, "gds_mode", lambda folder: (native, f"of {folder}"))
    status = machine.gds_status(tmp_path)
    assert status.mode == expected
    assert status.evidence == ("said kvikio" if native is None else f"of {tmp_path}")
    assert (status.warning == "") == (expected == "native")


def test_the_file_system_is_that_of_the_longest_mount(monkeypatch, tmp_path):
    (tmp_path / "deep").mkdir()
    mounts = f"a / ext4 rw 0 0\nb {tmp_path} tmpfs rw 0 0\nc {tmp_path}-other xfs rw 0 0\n"
    monkeypatch.setattr(machine.Path, "read_text", lambda self: mounts)
    assert machine.file_system(tmp_path / "deep") == "tmpfs"
    assert machine.file_system(tmp_path.parent) == "ext4"


def test_a_machine_without_a_gpu_says_so():
    blind = dataclasses.replace(made_up.gpu_machine(), gpu="", why_no_gpu="no wool")
    assert "none: on the host only (no wool)" in report.machine_text(blind)


def document(tmp_path, **how):
    results = made_up.gpu_results(**how)
    content = report.document(results, made_up.gpu_machine(), results[0].settings, "linum x", "2026-01-02T03:04:05Z")
    report.write_json(tmp_path / "a.json", content)
    return json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)  # no NaN, no Infinity


def test_the_document_has_all_that_was_measured(tmp_path):
    content = document(tmp_path)
    assert set(content) == {"schema", "units", "date", "command", "hardware", "versions", "gds", "settings", "cases"}
    assert (content["schema"], content["command"], content["date"][:10]) == (2, "linum x", "2026-01-02")
    assert {"gpu", "cpu", "cores", "memory_bytes", "file_system"} <= set(content["hardware"])
    assert {"linumpy", "zarr", "CuPy", "kvikio", "tensorstore", "zarrs", "Linux"} <= set(content["versions"])
    assert content["gds"]["mode"] == "compat"
    assert {key: content["settings"][key] for key in ("runs", "cache")} == {"runs": 3, "cache": "warm"}
    case = content["cases"][2]
    assert (case["shape"], case["chunks"], case["shards"]) == ([512, 1024, 1024], [64] * 3, [256, 512, 512])
    assert (case["dtype"], case["nbytes"], case["chunk_files"]) == ("uint16", 2**30, 1)
    mark = {"least": 0.8, "of": ["flat"], "label": "× flat", "got": pytest.approx(32 / 36), "met": True}
    assert case["marks"] == [mark]


def test_the_document_has_every_second_and_the_check_of_every_path(tmp_path):
    paths = {one["name"]: one for one in document(tmp_path)["cases"][0]["entries"]}
    mine = paths["linumpy-auto"]
    assert mine["verdict"] == "ok"
    assert mine["seconds"] == pytest.approx([2 / 32, 1.8 / 32, 2.4 / 32])
    assert mine["median_s"] == pytest.approx(2 / 32)
    assert (mine["min_s"], mine["max_s"]) == (pytest.approx(1.8 / 32), pytest.approx(2.4 / 32))
    assert mine["gib_per_s"] == pytest.approx(32)
    assert paths["flat"]["linumpy_times_faster"] == pytest.approx(32 / 36)
    assert paths["zarr-gpu"]["linumpy_times_faster"] == pytest.approx(8)
    assert [one["role"] for one in paths.values()] == ["limit"] * 2 + ["ours"] * 2 + ["peer"] * 5
    wrong = paths["linumpy-kvikio"]
    assert (wrong["verdict"], wrong["seconds"], wrong["median_s"], wrong["gib_per_s"]) == ("WRONG", [], None, None)
    assert wrong["note"].endswith("and so on ")  # whole, where the table cuts it


def colours(file):
    return (matplotlib.image.imread(file)[..., :3] * 255).round().astype(int).reshape(-1, 3)


def count(pixels, colour):
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return int((np.abs(pixels - wanted).max(axis=1) <= 2).sum())


def test_the_picture_has_a_bar_for_each_rate_and_the_limits(tmp_path):
    results = made_up.gpu_results()[:1]
    report.draw(results, made_up.gpu_machine(), "2026-01-02", tmp_path / "a.png")
    pixels = colours(tmp_path / "a.png")
    # linumpy's one bar of 32 against all others' 0.5 + 1.9 + 2.5 + 4.0
    assert count(pixels, "#0072B2") / count(pixels, "#999999") == pytest.approx(32 / 8.9, rel=0.1)
    assert count(pixels, "#D55E00") > 200  # the h2d limit's line and the WRONG row


def test_the_picture_grows_with_the_cases_and_takes_other_formats(tmp_path):
    results = made_up.gpu_results()
    report.draw(results, made_up.gpu_machine(), "2026-01-02", tmp_path / "a.png")
    report.draw(results[:1], made_up.gpu_machine(), "2026-01-02", tmp_path / "b.png")
    report.draw(results[:1], made_up.gpu_machine(), "2026-01-02", tmp_path / "c.svg")
    heights = [matplotlib.image.imread(tmp_path / name).shape[0] for name in ("a.png", "b.png")]
    assert heights[0] > 3 * heights[1]
    assert "<svg" in (tmp_path / "c.svg").read_text()


def test_a_picture_without_any_rate_is_drawn_too(tmp_path):
    report.draw(made_up.gpu_results(rates={})[:1], made_up.gpu_machine(), "2026-01-02", tmp_path / "a.png")
    assert count(colours(tmp_path / "a.png"), "#0072B2") == 0


def test_files_that_cannot_be_written(tmp_path):
    for kind in ("json", "plot"):
        with pytest.raises(FileNotFoundError, match="no folder"):
            Output(**{kind: tmp_path / "no" / "out.png"})
    with pytest.raises(ValueError, match="a plot is"):
        Output(plot=tmp_path / "out.doc")
