"""If this fails, a half-written block counts as complete, or two requests mix in one folder."""

import errno
import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from linumpy.errors import ResumeError
from linumpy.io.output import folders
from linumpy.io.output.files import replacing
from linumpy.io.output.folders import new_folder
from linumpy.resample import resumable
from linumpy.resample.resumable import Request, resumable_folder
from tests.support.budget import first

ASKED = Request("test", (2, 3), (("order", "1"),))


def create(folder):
    folder.mkdir()
    (folder / "zarr.json").write_text("{}")


def fill(path, request=ASKED, boxes=(), **options):
    with resumable_folder(path, request, create, **options) as state:
        before = state.grids[0].copy()
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
    assert [line for line in told if line.startswith("box")] == ["box 0 0 0 1 1", "box 0 0 1 1 2"]


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
    with pytest.raises(FileExistsError, match="or remove it by linum-clean"):
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


# --- The journal is not believed.

EVERY = ((0, 0), (2, 3))


def journal_with(tmp_path, change):
    """Leave two rows of parts one by one, change the lines of their journal, and read which parts count."""
    shutil.rmtree(tmp_path / ".i.unfinished", ignore_errors=True)
    fill(tmp_path / "i", boxes=[((0, 0), (1, 1)), ((0, 1), (1, 2)), ((1, 0), (2, 1))])
    journal = tmp_path / ".i.unfinished" / "journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert [line.split()[1] for line in lines[1:]] == [b"boot", b"box", b"box", b"box"]
    journal.write_bytes(b"".join(change(lines)))
    return fill(tmp_path / "i").astype(int).tolist()


def signed(lines, text):
    """A line with the right checksum, as this journal's first line asks for."""
    return b"%08x %s\n" % (zlib.crc32(text, zlib.crc32(lines[0].rstrip(b"\n"))), text)


@pytest.mark.parametrize(
    ("change", "there"),
    [
        (lambda j: j, [[1, 1, 0], [1, 0, 0]]),
        (lambda j: [*j[:3], j[3][:-1], j[4]], [[1, 0, 0], [0, 0, 0]]),  # a short write has joined two lines
        (lambda j: [*j[:3], j[3].replace(b"0 0 1 1 2", b"0 0 1 2 3"), j[4]], [[1, 0, 0], [1, 0, 0]]),
        (lambda j: [*j[:3], j[3][9:], j[4]], [[1, 0, 0], [1, 0, 0]]),
        (lambda j: [*j[:3], bytes(40), b"\n", bytes(10) + j[4]], [[1, 0, 0], [0, 0, 0]]),
        (lambda j: [*j[:3], b"\xff\xfe garbage\n", *j[3:], b"\n"], [[1, 1, 0], [1, 0, 0]]),
        (lambda j: [*j[:3], signed(j, b"box 0 0 0 9 9"), *j[3:]], [[1, 1, 0], [1, 0, 0]]),  # out of the grid
        (lambda j: [*j[:3], signed(j, b"box 0 -2 -3 2 3"), *j[3:]], [[1, 1, 0], [1, 0, 0]]),
        (lambda j: [*j[:3], signed(j, b"box 0 1 2 0 0"), *j[3:]], [[1, 1, 0], [1, 0, 0]]),
        (lambda j: [*j[:3], signed(j, b"box 1 0 0 2 3"), *j[3:]], [[1, 1, 0], [1, 0, 0]]),  # there is no grid 1
        (lambda j: [*j[:3], signed(j, b"box"), *j[3:]], [[1, 1, 0], [1, 0, 0]]),
        (lambda j: [*j[:3], signed(j, b"box 0 0 0 2"), *j[3:]], [[1, 1, 0], [1, 0, 0]]),
        (lambda j: [*j[:3], signed(j, b"box 0 0 0 0 2 3 4"), *j[3:]], [[1, 1, 0], [1, 0, 0]]),
        (lambda j: [*j[:3], signed(j, b"box 0 a b c d"), *j[3:]], [[1, 1, 0], [1, 0, 0]]),
        (lambda j: [*j[:3], signed(j, b"box 0 0 2 1 3"), *j[3:]], [[1, 1, 1], [1, 0, 0]]),
        (lambda j: [j[0][:-2] + b"\n", *j[1:]], [[0, 0, 0], [0, 0, 0]]),
        (lambda j: [bytes(len(j[0]) - 1), b"\n", *j[1:]], [[0, 0, 0], [0, 0, 0]]),
        (lambda j: [], [[0, 0, 0], [0, 0, 0]]),
    ],
)
def test_broken_lines_do_not_count(tmp_path, change, there):
    assert journal_with(tmp_path, change) == there
    fill(tmp_path / "i", boxes=[EVERY])
    assert [one.name for one in tmp_path.iterdir()] == ["i"]


def test_any_broken_byte_takes_away_no_more_than_its_lines(tmp_path):
    """Whatever a byte turns into, no part counts that was not there."""
    whole = np.array([[1, 1, 0], [1, 0, 0]], bool)
    rng = np.random.default_rng(1)
    for _ in range(40):

        def change(lines):
            data = bytearray(b"".join(lines))
            data[rng.integers(len(data))] ^= int(rng.integers(1, 256))
            return [bytes(data)]

        assert not (np.array(journal_with(tmp_path, change), bool) & ~whole).any()


def test_after_a_restart_only_what_was_on_the_disk_counts(tmp_path, monkeypatch):
    """What a killed process has written is in the kernel's memory, until the machine is started again."""
    monkeypatch.setattr(resumable, "_SYNC_SECONDS", 0.0)
    fill(tmp_path / "i", boxes=[((0, 0), (1, 1))])
    monkeypatch.undo()
    fill(tmp_path / "i", boxes=[((0, 1), (1, 2))])
    assert fill(tmp_path / "i").sum() == 2
    monkeypatch.setattr(resumable, "boot_id", lambda: "another")
    assert fill(tmp_path / "i").tolist() == [[True, False, False], [False] * 3]


def test_a_torn_line_does_not_hide_the_restart_after_it(tmp_path, monkeypatch):
    fill(tmp_path / "i", boxes=[((0, 0), (1, 1))])
    with (tmp_path / ".i.unfinished" / "journal").open("ab") as file:
        file.write(b"1 0 2 3")
    monkeypatch.setattr(resumable, "boot_id", lambda: "another")
    fill(tmp_path / "i", boxes=[((0, 1), (1, 2))])
    assert fill(tmp_path / "i").tolist() == [[False, True, False], [False] * 3]


def test_without_durable_nothing_waits_for_the_disk(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("the disk is waited for")

    for module in (resumable, folders):
        monkeypatch.setattr(module, "sync_file_system", refuse)
    monkeypatch.setattr(folders, "sync_path", refuse)
    monkeypatch.setattr(resumable, "_SYNC_SECONDS", 0.0)
    fill(tmp_path / "i", boxes=[EVERY], durable=False)
    with new_folder(tmp_path / "j", overwrite=False, durable=False) as folder:
        (folder / "zarr.json").touch()
    with pytest.raises(AssertionError, match="waited"):
        fill(tmp_path / "k", boxes=[EVERY])


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path, monkeypatch):
    real = os.write

    def half(descriptor, data):
        if b"box" in bytes(data):
            real(descriptor, bytes(data)[:7])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    fill(tmp_path / "i", boxes=[((0, 0), (1, 1))])
    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space left on device; complete parts are in"):
        fill(tmp_path / "i", boxes=[((0, 1), (1, 2))])
    monkeypatch.undo()
    lines = (tmp_path / ".i.unfinished" / "journal").read_bytes().splitlines()
    assert [line.split()[1] for line in lines[1:]] == [b"boot", b"box", b"boot"]
    assert fill(tmp_path / "i").sum() == 1


# --- Runs that meet.


def test_a_lock_that_was_removed_meanwhile_keeps_others_out(tmp_path, monkeypatch):
    """Another run ends, and removes its lock, between this one's opening of the lock and its locking."""
    real, ended = fcntl.flock, []

    def flock(descriptor, how):
        if not ended:
            ended.append(True)
            fill(tmp_path / "i", boxes=[EVERY])
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with resumable_folder(tmp_path / "i", ASKED, create, overwrite=True) as state:
        assert ended
        with pytest.raises(ResumeError, match="another run"):
            fill(tmp_path / "i", overwrite=True)
        state.add(*EVERY)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["i"]


def test_many_runs_that_overwrite_leave_a_whole_one(tmp_path):
    """Each run is refused or ends well, and whoever comes last, what it wrote is all there."""
    numbers, ended = itertools.count(), []

    def run(number):
        try:
            with resumable_folder(tmp_path / "i", ASKED, create, overwrite=True, durable=False) as state:
                for name in "abc":
                    (state.folder / name).write_text(str(number))
                state.add(*EVERY)
        except ResumeError:
            time.sleep(0.002)
        else:
            ended.append(number)

    def runs(_):
        for number in numbers:  # at least 300, and on a busy machine until some have ended
            run(number)
            if number >= 300 and len(ended) > 1:
                break

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(runs, range(3)))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["i"]
    assert sorted(one.name for one in (tmp_path / "i").iterdir()) == ["a", "b", "c", "zarr.json"]
    assert len({(tmp_path / "i" / name).read_text() for name in "abc"}) == 1


def test_a_work_folder_that_is_removed_while_it_is_made(tmp_path, monkeypatch):
    """The run before ends just then: its folder is there at the first look, and gone at the second."""
    made, missed = os.mkdir, []

    def mkdir(path, *mode):
        if str(path).endswith(".unfinished") and not missed:
            missed.append(path)
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        made(path, *mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    fill(tmp_path / "i", boxes=[EVERY])
    assert missed
    assert (tmp_path / "i").is_dir()


def test_a_work_folder_that_is_a_link(tmp_path):
    (tmp_path / ".i.unfinished").symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="is a symbolic link"):
        fill(tmp_path / "i", boxes=[EVERY])


def test_parts_of_another_origin_are_removed(tmp_path, caplog):
    one, other = (Request("test", (2, 3), (("order", "1"),), (("source data", mark),)) for mark in "12")
    fill(tmp_path / "i", one, boxes=[((0, 0), (1, 1))])
    first = folder_in(tmp_path / ".i.unfinished")
    assert not fill(tmp_path / "i", other).any()
    assert not first.exists()  # so that a late worker of the first request does not find it
    assert [line.getMessage() for line in caplog.records] == [
        f"{tmp_path}/i: removed what a stopped run had left: it was made from another source data"
    ]
    assert list((tmp_path / ".i.unfinished").glob("image*")) == [folder_in(tmp_path / ".i.unfinished")]


# --- What killed runs leave.


def leave(path, *, how="new_folder"):
    """Let a process be killed while it fills a folder (or writes a file)."""
    code = (
        "import os, sys; from pathlib import Path; from linumpy.io.output.files import replacing\n"
        "from linumpy.io.output.folders import new_folder\n"
        f"with {how}(Path(sys.argv[1]), overwrite=True): os.kill(os.getpid(), 9)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = path.parent.glob(f".{path.name}.part-*")
    return left


@pytest.mark.parametrize("how", first(["replacing", "new_folder"]))
def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path, caplog, how):
    left = leave(tmp_path / "i", how=how)
    other = leave(tmp_path / "other", how=how)
    with new_folder(tmp_path / "i", overwrite=False) as folder:
        assert not left.exists()
        (folder / "zarr.json").touch()
    assert [line.getMessage() for line in caplog.records] == [
        f"{tmp_path}/i: removed what stopped runs had left: {left.name}"
    ]
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(["i", other.name])


@pytest.mark.parametrize("held", [new_folder, replacing])
def test_what_a_run_under_way_has_is_left_alone(tmp_path, held, caplog):
    def hold_and_write():
        with held(tmp_path / "i", overwrite=True) as mine:
            with new_folder(tmp_path / "i", overwrite=False):
                assert mine.exists()
            assert mine.exists()

    with pytest.raises(FileExistsError, match=r"not a Zarr folder|is a folder"):
        hold_and_write()
    assert caplog.records == []
    assert [one.name for one in tmp_path.iterdir()] == ["i"]


def test_where_there_are_no_locks_nothing_is_removed(tmp_path, monkeypatch, caplog):
    def no_locks(descriptor, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    left = leave(tmp_path / "i")
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with new_folder(tmp_path / "i", overwrite=False) as folder:
        (folder / "zarr.json").touch()
    assert f"without locks, a run may still need {left.name}: remove them yourself" in caplog.text
    assert left.exists()


def test_another_writer_that_ends_well_removes_what_was_unfinished(tmp_path, caplog):
    fill(tmp_path / "i", boxes=[((0, 0), (1, 1))])
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "i", overwrite=False):
        raise ZeroDivisionError
    assert fill(tmp_path / "i").sum() == 1
    with new_folder(tmp_path / "i", overwrite=False) as folder:
        (folder / "zarr.json").touch()
    assert "i: removed the unfinished .i.unfinished, since this one is complete" in caplog.text
    assert [one.name for one in tmp_path.iterdir()] == ["i"]


def test_names_as_long_as_names_may_be(tmp_path):
    """Two of them that begin alike do not share what is beside them."""
    places = [tmp_path / ("n" * 250 + end) for end in ("1", "2")]
    for number, one in enumerate(places):
        fill(one, boxes=[((0, 0), (1, 1 + number))])
    assert [fill(one).sum() for one in places] == [1, 2]
    for one in places:
        fill(one, boxes=[EVERY])
    assert sorted(tmp_path.iterdir()) == places


@pytest.mark.parametrize("kind", ["folder", "symlink"])
@pytest.mark.parametrize("without_exchange", [False, True])
def test_what_is_replaced_is_there_until_the_new_one_is(tmp_path, monkeypatch, kind, without_exchange):
    if without_exchange:
        monkeypatch.setattr(folders, "exchange", lambda *_: False)
    real = tmp_path / "real" if kind == "symlink" else tmp_path / "i"
    create(real)
    (real / "old").touch()
    if kind == "symlink":
        (tmp_path / "i").symlink_to(real)
    with new_folder(tmp_path / "i", overwrite=True) as folder:
        (folder / "zarr.json").touch()
        assert (tmp_path / "i" / "old").exists()
    assert not (tmp_path / "i" / "old").exists()
    assert not (tmp_path / "i").is_symlink()
    assert (real / "old").exists() == (kind == "symlink")
    assert {one.name for one in tmp_path.iterdir()} == {"i", real.name}


def test_a_lock_goes_with_its_process(tmp_path):
    code = (
        "import sys, os, time; from linumpy.resample.resumable import *; from pathlib import Path\n"
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
