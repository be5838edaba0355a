"""If this fails, the command hides a fault, reads what it was told to leave, or loses what it had read."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import zarr
from scipy import ndimage

from linumpy.verification import chunks
from linumpy.write.writer import write_omezarr
from tests.support.object_server import serve
from tests.support.script_runs import check_refused, environment
from tests.support.zips import zip_folder

#: Says each unit that it reads; small units are many, and the one that is asked for waits.
_UNITS = """
import sys, time
from linumpy.verification import chunks
chunks._UNIT_NBYTES, stop, count, read = 16384, int(sys.argv.pop(1)), 0, chunks.UnitReader.read
def said(self, unit, *rest):
    global count
    count += 1
    print("unit", flush=True, file=sys.stderr)
    while count == stop:
        time.sleep(0.05)
    return read(self, unit, *rest)
chunks.UnitReader.read = said
from tests.support.script_runs import load
sys.exit(load("linum_verify").main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    voxels = ndimage.gaussian_filter(np.random.default_rng(3).random((40, 48, 56)), 2)
    voxels = (np.interp(voxels, (voxels.min(), voxels.max()), (1, 60_000))).astype("u2")
    folder = tmp_path_factory.mktemp("whole")
    for version in ("0.4", "0.5"):
        write_omezarr(folder / version, voxels, (2, 1, 1), chunks=(10, 16, 16), levels=3, ngff_version=version)
    return folder


@pytest.fixture(params=["0.4", "0.5"])
def image(request, whole, tmp_path):
    return shutil.copytree(whole / request.param, tmp_path / f'it\'s "ü" #{request.param}.zarr')


def _document(image):
    return image / (".zattrs" if (image / ".zattrs").exists() else "zarr.json")


def _move_level(image):
    """Write a wrong position of level 1; the right one is 0.5 along y."""
    text, count = re.subn(r'("translation":\s*\[\s*1\.0,\s*)0\.5', r"\g<1>7.5", _document(image).read_text())
    assert count == 1
    _document(image).write_text(text)


def _chunk(image, name="0", index="1/1/1"):
    return image / name / index if (image / ".zattrs").exists() else image / name / "c" / index


def _interrupted(words, *, stop, sent):
    """Run in small units with few descriptors, and send a signal at unit `stop`; returns exit code and other lines."""
    command = ["bash", "-c", 'ulimit -n 64; exec "$@"', "-", sys.executable, "-c", _UNITS, str(stop), *words]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment()) as child:
        try:
            assert [child.stderr.readline() for _ in range(stop)] == ["unit\n"] * stop
            child.send_signal(sent)
            err = child.communicate(timeout=60)[1]
        finally:
            child.kill()
    return child.returncode, err


def _result(text):
    """Parse JSON as strict parsers do; without the time that it took."""
    result = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return {key: value for key, value in result.items() if key not in ("seconds", "source")}


def test_sources_of_all_kinds(whole, tmp_path, main, capsys):
    """Folders, links, ZIP files, URLs and arrays in an image are read; the exit code is 0, and all chunks count."""
    link = tmp_path / "link"
    link.symlink_to(whole / "0.4")
    with serve(whole) as served:
        images = [whole / "0.4", link, f"{served.url}/0.5", *(
            zip_folder(whole / version, tmp_path / f"a{version}{suffix}")
            for version, suffix in (("0.4", ".zip"), ("0.5", ".ozx"))
        )]  # fmt: skip
        for source in images:
            for inside, count in (("", [48, 8, 1]), ("/1", [8])):
                assert main([f"{source}{inside}", "--json"]) == 0
                assert [array["chunks"] for array in _result(capsys.readouterr().out)["arrays"]] == count


def test_options_are_refused_before_anything_is_read(image, tmp_path, main, capsys, monkeypatch):
    monkeypatch.setattr("linumpy.verification.verify.verify", None)
    packed, page = zip_folder(image, tmp_path / "a.zip"), tmp_path / "page"
    page.write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "cut.zip").write_bytes(b"PK\x03\x04")
    for words, says in (
        ([tmp_path / "none\n\x1b[31m", "--repair"], "there is no folder"),
        ([tmp_path / "folder", "--repair"], "neither a Zarr array nor"),
        ([image, "--write"], "add --repair"),
        ([image, "--unit", ""], "add --repair"),
        ([image, "--repair", "--unit", "bogus"], "--unit 'bogus' is no unit of length"),
        ([packed, "--repair"], "is in a ZIP file: copy it"),
        (["http://127.0.0.1:9/a", "--repair"], "is a URL: copy it"),
        ([image, "--html", page], "replace it with --overwrite"),
        ([image, "--html", image / "page"], "inside the source"),
        ([image, "--journal", _chunk(image)], "inside the source"),
        ([image, "--journal", tmp_path / "folder"], "is a folder"),
        ([image, "--journal", tmp_path / "no/journal"], "there is no folder"),
        ([image, "--journal", page, "--html", page, "--overwrite"], "overlap"),
    ):
        check_refused(capsys, main, words, "linum-verify", says)
    assert page.read_text() == "mine"
    monkeypatch.undo()
    for name, says in (
        ("none", "there is no file"),
        ("folder", "neither a Zarr"),
        ("page", "is a text file"),
        ("cut.zip", "is no ZIP"),
    ):
        check_refused(capsys, main, [tmp_path / name], "linum-verify", says)


def test_a_damaged_and_an_exchanged_chunk_in_text_json_and_page(image, tmp_path, main, capsys):
    shutil.copy(_chunk(image, index="0/0/0"), _chunk(image, index="3/2/2"))
    hostile = image / "2\nevil\x1b[31m"
    shutil.copytree(image / "2", hostile)
    _chunk(image, "2", "0/0/0").write_bytes(b"xx")
    page = tmp_path / "page.html"
    assert main([str(image), "--html", str(page), "-q"]) == 1
    text = capsys.readouterr().out
    assert main([str(image), "--json"]) == 1
    found = {finding["path"]: finding["harm"] for finding in _result(capsys.readouterr().out)["findings"]}
    places = ("2", "0/0/0"), ("0", "3/2/2")
    damaged, exchanged = (str(_chunk(image, *place).relative_to(image)) for place in places)
    assert found == {damaged: "damaged", exchanged: "suspicious", hostile.name: "leftover"}
    assert "\x1b" not in text
    for path in (damaged, exchanged, r"2\nevil\x1b[31m"):
        assert path in text
        assert path in page.read_text()


def test_repair(image, main, capsys):
    """A dry run writes nothing; what is written is sound; and voxels remain."""
    _move_level(image)
    before, voxels = _document(image).read_bytes(), zarr.open_array(image / "1", mode="r")[...]
    names = sorted(os.listdir(image))
    assert main([str(image), "--repair", "--json"]) == 1
    told = capsys.readouterr()
    assert _result(told.out)["proposals"][0]["translation"] == [1, 0.5, 0.5]
    assert "nothing is written" in told.err
    assert (_document(image).read_bytes(), sorted(os.listdir(image))) == (before, names)
    assert main([str(image), "--repair", "--write", "-q"]) == 1
    assert f"{_document(image).name}.before-repair" in capsys.readouterr().out
    assert main([str(image), "--repair"]) == 0
    assert "no metadata that can be repaired" in capsys.readouterr().out
    assert (image / f"{_document(image).name}.before-repair").read_bytes() == before
    np.testing.assert_array_equal(zarr.open_array(image / "1", mode="r")[...], voxels)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_goes_on(whole, tmp_path, sent, main, capsys, monkeypatch):
    """The result is that of a run without an interrupt; finished units are not read again."""
    image, journal = shutil.copytree(whole / "0.4", tmp_path / "image"), tmp_path / "journal"
    _chunk(image, index="0/0/0").write_bytes(b"xx")  # in a unit that is finished before
    words = [str(image), "--json", "--journal", str(journal)]
    says = {signal.SIGINT: (130, "linum-verify: interrupted\n"), signal.SIGTERM: (143, "linum-verify: terminated\n")}
    assert _interrupted(words, stop=10, sent=sent) == says.get(sent, (-9, ""))
    monkeypatch.setattr(chunks, "_UNIT_NBYTES", 16384)
    units, read, results = [], chunks.UnitReader.read, []
    monkeypatch.setattr(chunks.UnitReader, "read", lambda self, *rest: units.append(rest[0]) or read(self, *rest))
    for arguments in (words, words[:2]):
        assert main(arguments) == 1
        results.append((len(units), _result(capsys.readouterr().out)))
        units.clear()
    assert results[0] == (results[1][0] - 9, results[1][1])
    assert results[1][0] > 20


def test_a_damaged_journal_is_read_again_or_refused(whole, tmp_path, main, capsys, monkeypatch):
    """Damaged lines are read anew; a journal of other units, options, images, or another file, is refused as it is."""
    monkeypatch.setattr(chunks, "_UNIT_NBYTES", 16384)
    journal = tmp_path / "journal"
    words = [str(whole / "0.5"), "--json", "--journal", str(journal)]
    assert main(words) == 0
    complete, expected = journal.read_bytes(), _result(capsys.readouterr().out)
    lines = complete.splitlines(keepends=True)
    for bad in (b"garbage\n", b"[0,1,5]\n", b"\0\n", b"[" * 10_000 + b"\n", lines[0], lines[3][:30] + b"\n"):
        journal.write_bytes(b"".join([*lines[:3], bad, *lines[4:-1], lines[-1][:20]]))
        assert main(words) == 0
        assert _result(capsys.readouterr().out) == expected
    journal.write_bytes(complete)
    for more in (["--thorough"], [str(whole / "0.4"), *words[1:]]):
        check_refused(capsys, main, more if len(more) > 1 else words + more, "linum-verify", "another source or other")
    monkeypatch.setattr(chunks, "_UNIT_NBYTES", 2**30)
    check_refused(capsys, main, words, "linum-verify", "another source or other")
    assert journal.read_bytes() == complete
    journal.write_text("mine\n")
    check_refused(capsys, main, words, "linum-verify", "is no journal")
    assert journal.read_text() == "mine\n"


def test_on_a_cluster(whole, tmp_path, main, dask_cluster, capsys, monkeypatch):
    """Workers find what is found here."""
    image = shutil.copytree(whole / "0.4", tmp_path / "image")
    monkeypatch.setattr(chunks, "_UNIT_NBYTES", 16384)
    _chunk(image).write_bytes(b"xx")
    results = []
    for more in ([], ["--cluster", dask_cluster.scheduler_address]):
        assert main([str(image), "--json", *more]) == 1
        results.append(_result(capsys.readouterr().out))
    assert results[0] == results[1]
    assert results[0]["arrays"][0]["damaged"] == 1
