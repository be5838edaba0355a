"""What is complete counts, what is half-written does not, and two requests do not mix."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from linumpy.errors import ResumeError
from linumpy.io.resumable import Request, resumable_folder

ASKED = Request("test", (2, 3), (("order", "1"),))


def create(folder):
    folder.mkdir()
    (folder / "zarr.json").write_text("{}")


def fill(path, request=ASKED, boxes=(), **options):
    with resumable_folder(path, request, create, **options) as state:
        before = state.complete.copy()
        for start, stop in boxes:
            state.add(start, stop)
    return before


def test_it_takes_its_place_when_all_is_there(tmp_path):
    place = tmp_path / "image"
    fill(place, boxes=[((0, 0), (2, 2))])
    assert not place.exists()
    before = fill(place, boxes=[((0, 2), (2, 3))])
    assert before.tolist() == [[True, True, False]] * 2
    assert [one.name for one in tmp_path.iterdir()] == ["image"]
    assert [one.name for one in place.iterdir()] == ["zarr.json"]


def fail_half_way(path):
    with resumable_folder(path, ASKED, create) as state:
        state.add((0, 0), (1, 3))
        assert state.holds((0, 0), (1, 2))
        assert not state.holds((0, 0), (2, 1))
        raise ZeroDivisionError


def test_an_error_leaves_what_was_complete(tmp_path):
    with pytest.raises(ZeroDivisionError):
        fail_half_way(tmp_path / "i")
    assert not (tmp_path / "i").exists()
    assert fill(tmp_path / "i").sum() == 3


def folder_in(work):
    (folder,) = work.glob("image-*")
    return folder


@pytest.mark.parametrize("torn", [b"1 0 2 3", b"1", b"1 0 2"])
def test_a_torn_line_does_not_count(tmp_path, torn):
    fill(tmp_path / "i", boxes=[((0, 0), (1, 1))])
    journal = tmp_path / ".i.unfinished" / "journal"
    with journal.open("ab") as file:
        file.write(torn)
    assert fill(tmp_path / "i", boxes=[((0, 1), (1, 2))]).sum() == 1
    assert fill(tmp_path / "i").tolist() == [[True, True, False], [False] * 3]
    told = [line.split(" ", 1)[1] for line in journal.read_text().splitlines()[1:]]
    assert [line for line in told if line.startswith("box")] == ["box 0 0 1 1", "box 0 1 1 2"]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("test", (2, 3), (("order", "0"),)), "differs in order:"),
        (Request("other", (2, 4), (("order", "1"),)), "differs in grid, kind:"),
        (Request("test", (2, 3), ()), "differs in order:"),
    ],
)
def test_another_request_is_refused(tmp_path, request_, message):
    fill(tmp_path / "i", boxes=[((0, 0), (1, 1))])
    with pytest.raises(ResumeError, match=message):
        fill(tmp_path / "i", request_)
    with pytest.raises(FileExistsError, match="delete that folder"):
        fill(tmp_path / "i", request_, overwrite=True)
    assert fill(tmp_path / "i").sum() == 1


@pytest.mark.parametrize("left", ["folder", "journal", "empty"])
def test_a_run_killed_at_its_beginning_or_end_is_begun_anew(tmp_path, left):
    """Without the folder the journal does not count, nor does the folder without the journal."""
    fill(tmp_path / "i", boxes=[((0, 0), (1, 3))])
    work = tmp_path / ".i.unfinished"
    folder = folder_in(work)
    if left == "folder":
        (work / "journal").unlink()
    elif left == "journal":
        shutil.rmtree(folder)
    else:
        folder.rename(f"{folder}.empty")
    assert not fill(tmp_path / "i").any()
    assert (folder / "zarr.json").exists()
    fill(tmp_path / "i", boxes=[((0, 0), (2, 3))])
    assert [one.name for one in tmp_path.iterdir()] == ["i"]


def test_two_runs_at_once(tmp_path):
    with resumable_folder(tmp_path / "i", ASKED, create), pytest.raises(ResumeError, match="by another run"):
        fill(tmp_path / "i")
    fill(tmp_path / "i", boxes=[((0, 0), (2, 3))])


def test_a_lock_goes_with_its_process(tmp_path):
    code = (
        "import sys, os, time; from linumpy.io.resumable import *; from pathlib import Path\n"
        "with resumable_folder(Path(sys.argv[1]), Request('test', (2, 3), (('order', '1'),)), os.mkdir) as state:\n"
        "    state.add((0, 0), (1, 2)); print('ready', flush=True); time.sleep(60)"
    )
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "i")], stdout=subprocess.PIPE, env=environment, cwd=root
    )
    assert process.stdout.readline() == b"ready\n"
    with pytest.raises(ResumeError, match="another run"):
        fill(tmp_path / "i")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert np.array_equal(fill(tmp_path / "i"), [[True, True, False], [False] * 3])


def test_a_place_that_is_taken(tmp_path):
    (tmp_path / "i").mkdir()
    with pytest.raises(FileExistsError, match="exists"):
        fill(tmp_path / "i")
    with pytest.raises(FileExistsError, match="not a Zarr folder"):
        fill(tmp_path / "i", overwrite=True)
    create(tmp_path / "z")
    (tmp_path / "z" / "old").touch()
    fill(tmp_path / "z", boxes=[((0, 0), (2, 3))], overwrite=True)
    assert [one.name for one in (tmp_path / "z").iterdir()] == ["zarr.json"]
