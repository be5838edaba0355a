"""If this fails, a killed run or a full disk leaves neither the old output nor the new one.

In the manner of SQLite's crash tests. ``crash_shim.c`` counts the calls of a process and ends it at the n-th; a write
is cut in half. The short run takes some of the calls, and those that rename the output; ``-m slow`` takes each. Threads
write, so that a call has not the same number in each run: those at the renaming are counted from it.
"""

import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

from linumpy.write.writer import write_omezarr
from tests.support.budget import first, some
from tests.support.script_runs import environment

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    shim = tmp_path_factory.mktemp("shim") / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, HERE / "crash_shim.c"], check=True)
    more = {"LD_PRELOAD": str(shim), "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        [sys.executable, HERE / "crash_server.py"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(**more),
    ) as process:  # fmt: skip
        yield process
        process.stdin.close()
        process.wait(60)


def files_of(place):
    """What lies at a place: of each file below it a digest; None where nothing does."""
    if place.is_file():
        return place.read_bytes()
    if not os.path.lexists(place):
        return None
    files = sorted(one for one in place.rglob("*") if one.is_file())
    return {str(one.relative_to(place)): hashlib.sha256(one.read_bytes()).hexdigest() for one in files}


class Bench:
    """One job, its old output and its new one, and a fresh folder for each run of it."""

    def __init__(self, server, folder, job, *, overwrite, without_exchange=False):
        self.server, self.folder, self.job = server, folder, job
        self.overwrite, self.without_exchange = overwrite, without_exchange
        self.options, self.log, self.numbers = {}, folder / "log", itertools.count()
        #: A ZIP file is made where the name says so.
        self.name = "place.ozx" if job.endswith("ozx") else "place"
        job = self.job = job.removesuffix(" ozx")
        if job in ("resample", "script", "convert"):
            data = np.random.default_rng(5).integers(0, 60000, (8, 12, 12)).astype("u2")
            source = write_omezarr(folder / "source", data, (2.0, 2.0, 2.0), chunks=(8, 6, 6))
            self.options["source"] = str(source)
        if job in ("zstd", "shards"):
            self.job, self.options["codec"] = "write", job
        self.old, before = None, None
        if overwrite:
            before = folder / f"old{Path(self.name).suffix}"
            if job == "file":
                before.write_bytes(b"old")
            else:
                write_omezarr(before, np.ones((4, 5, 6), "u1"), (1, 1, 1), name=self.name)
            self.old = files_of(before)
        self.before = before
        place = self.fresh()
        told = self.run(place)
        assert told["status"] == 0
        assert told["error"] is None, told
        self.new, self.trace, self.made = files_of(place), told["trace"], told["made"]
        assert self.new is not None
        assert self.new != self.old
        assert os.listdir(place.parent) == [self.name]

    def fresh(self):
        place = self.folder / f"run{next(self.numbers)}" / self.name
        place.parent.mkdir()
        if self.before is not None:
            (shutil.copytree if self.before.is_dir() else shutil.copy)(self.before, place)
        return place

    def run(self, place, mode="off", call=(0, "\0", 0), *, overwrite=None, without_exchange=None):
        nth, *start = call
        overwrite = self.overwrite if overwrite is None else overwrite
        asked = {
            "job": self.job,
            "place": str(place),
            "mode": mode,
            "nth": nth,
            "start": start,
            "without_exchange": self.without_exchange if without_exchange is None else without_exchange,
            "options": self.options | {"overwrite": overwrite},
            "log": str(self.log),
        }
        print(json.dumps(asked), file=self.server.stdin, flush=True)
        told = json.loads(self.server.stdout.readline())
        assert told["status"] != "hangs", asked
        return told

    def calls(self, every, some=2, renames="x", last=1):
        """Choose calls, each by its number and from which call on it counts (letter, occurrence).

        All of them, or some, the last, and those at the last that rename.
        """
        count = len(self.trace)
        if every or self.job == "file":
            return [(number, "\0", 0) for number in range(1, count + 2)]
        found = self.trace.count(renames)
        spread = [(int(number), "\0", 0) for number in np.linspace(1, count, some + 2)[1:-1]]
        near = [(1 + step, renames, found - back) for back in range(last) for step in (0, 1, 4)]
        return [*spread, *near]

    def check_rerun(self, place):
        """Run it once more, to its end: the exact output, and nothing else is left beside it."""
        if not self.overwrite and files_of(place) is not None:
            assert self.run(place)["error"].startswith(("FileExistsError", "SystemExit: 2"))
            assert files_of(place) == self.new
            return
        left = place.parent / f".{self.name}.unfinished"
        journaled = boxes_in(left) if self.job == "resample" else 0
        told = self.run(place)
        assert told["error"] is None, (told, self.log.read_text())
        assert files_of(place) == self.new
        assert os.listdir(place.parent) == [self.name], self.log.read_text()
        if self.job == "resample":
            assert told["made"] == self.made - journaled


def boxes_in(work):
    """Count the blocks that a stopped run has told to be complete."""
    if not list(work.glob("image-????????/zarr.json")) or not (work / "journal").exists():
        return 0
    head, *lines = (work / "journal").read_bytes().split(b"\n")
    (folder,) = work.glob("image-????????")
    if folder.stat().st_ino != json.loads(head[9:])["inode"]:
        return 0
    return sum(b" box " in line for line in lines[:-1])


KINDS = [
    ("write", False), ("write", True), ("zstd", True), ("shards", True), ("resample", False),
    ("resample", True), ("script", True), ("convert", False), ("file", False), ("file", True),
    ("shards ozx", True), ("convert ozx", False),
]  # fmt: skip
#: Those that the short run kills; it fills the disk of the others.
KILLED = [("write", False), ("write", True), ("shards", True), ("resample", True), ("convert", False), ("file", True)]
_ALL = pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])
every = pytest.mark.parametrize("every", [False, _ALL], ids=["some", "all"])


@every
@pytest.mark.parametrize(("job", "overwrite"), some(KINDS, lambda *kind: kind in KILLED))
def test_killed_at_any_call(server, tmp_path, job, overwrite, every):
    bench = Bench(server, tmp_path, job, overwrite=overwrite)
    killed, seen = 0, set()
    for call in bench.calls(every):
        place = bench.fresh()
        told = bench.run(place, "kill", call)
        assert told["status"] in (0, -signal.SIGKILL), told
        killed += told["status"] != 0
        found = files_of(place)
        assert found in (bench.old, bench.new), f"killed at call {call} of {bench.trace}"
        seen.add(found == bench.new)
        bench.check_rerun(place)
        shutil.rmtree(place.parent)
    assert killed
    assert seen == {False, True}


@every
@pytest.mark.parametrize("job", ["write", "resample"])
def test_killed_where_names_cannot_be_exchanged(server, tmp_path, job, every):
    """Between its two renames nothing is at the place; whatever the next run does, it puts the old one back first."""
    bench = Bench(server, tmp_path, job, overwrite=True, without_exchange=True)
    put_back = 0
    for call in bench.calls(every, some=0, renames="r", last=2):
        place = bench.fresh()
        bench.run(place, "kill", call)
        found = files_of(place)
        assert found in (bench.old, bench.new, None), f"killed at call {call} of {bench.trace}"
        put_back += found is None
        refused = bench.run(place, overwrite=False)
        assert refused["error"].startswith("FileExistsError"), refused
        assert files_of(place) == (bench.old if found is None else found)
        bench.check_rerun(place)
        shutil.rmtree(place.parent)
    assert put_back


@every
@pytest.mark.parametrize(("job", "overwrite"), some(KINDS, lambda *kind: kind not in KILLED))
def test_a_disk_that_is_full_from_a_call_on(server, tmp_path, job, overwrite, every):
    """One clear error, and what was there is there."""
    bench = Bench(server, tmp_path, job, overwrite=overwrite)
    failed = 0
    for call in bench.calls(every, some=2):
        place = bench.fresh()
        told = bench.run(place, "full", call)
        assert told["status"] == 0, told
        found = files_of(place)
        if told["error"] is None:
            assert found == bench.new, call
        else:
            failed += 1
            text = told["error"] if job != "script" else bench.log.read_text()
            assert "No space left on device" in text, text
            assert str(place) in text, text
            assert found in (bench.old, bench.new), f"full from call {call} of {bench.trace} on"
            beside = set(os.listdir(place.parent)) - {bench.name}
            resumed = job.startswith(("resample", "convert"))
            assert beside <= ({f".{bench.name}.unfinished"} if resumed else set())
        bench.check_rerun(place)
        shutil.rmtree(place.parent)
    assert failed


@every
@pytest.mark.parametrize("job", first(["shards", "convert ozx", "resample", "convert"], 2))
def test_a_file_that_cannot_be_closed(server, tmp_path, job, every):
    """Its voxels are not stored: an error that names it, and what was written is not taken for complete."""
    bench = Bench(server, tmp_path, job, overwrite=False)
    count = bench.trace.count("c")
    for number in range(1, count + 1) if every else np.linspace(1, count, 5).astype(int).tolist():
        place = bench.fresh()
        told = bench.run(place, "broken", (1, "c", number))
        assert "Input/output error" in (told["error"] or ""), told
        assert str(place.parent) in told["error"], told
        assert files_of(place) is None
        bench.check_rerun(place)
        shutil.rmtree(place.parent)


@pytest.mark.parametrize("job", first(["resample", "shards", "convert", "convert ozx"], 2))
def test_few_descriptors(server, tmp_path, job):
    """An error that says so, and nothing is lost; or the run takes no more than there are."""
    bench = Bench(server, tmp_path, job, overwrite=True)
    failed = 0
    for count in (1, 3, 6, 10, 200):
        place = bench.fresh()
        told = bench.run(place, "few", (count, "\0", 0))
        if told["error"] is None:
            assert files_of(place) == bench.new
        else:
            failed += 1
            assert "Too many open files" in told["error"], told
            assert files_of(place) == bench.old
        bench.check_rerun(place)
        shutil.rmtree(place.parent)
    assert 0 < failed < 5


@every
@pytest.mark.parametrize(
    ("job", "sent"),
    some(
        itertools.product(["write", "resample", "script"], ["interrupt", "terminate"]),
        lambda job, sent: (job == "script") == (sent == "terminate"),
    ),
)
def test_signals_at_any_call(server, tmp_path, job, sent, every):
    """SIGINT, and in scripts SIGTERM, unwinds and leaves nothing but what a run may go on with."""
    bench = Bench(server, tmp_path, job, overwrite=True)
    stopped = 0
    for call in bench.calls(every, some=2):
        place = bench.fresh()
        told = bench.run(place, sent, call)
        unwinds = sent == "interrupt" or job == "script"
        assert told["status"] in ((0,) if unwinds else (0, -signal.SIGTERM)), told
        stopped += told["status"] != 0 or told["error"] is not None
        assert files_of(place) in (bench.old, bench.new), f"{sent} at call {call} of {bench.trace}"
        bench.check_rerun(place)
        shutil.rmtree(place.parent)
    assert stopped


@pytest.mark.parametrize("job", ["write", "shards", "resample", "file"])
def test_short_writes(server, tmp_path, job):
    """A write may take fewer bytes than it was given: the rest is written by further calls."""
    bench = Bench(server, tmp_path, job, overwrite=False)
    place = bench.fresh()
    told = bench.run(place, "short")
    assert told["error"] is None
    assert told["trace"].count("w") > 2 * bench.trace.count("w")
    assert files_of(place) == bench.new


def test_the_new_output_is_the_image(server, tmp_path):
    """The runs above compare with a run that was not stopped: zarr reads in it what was written."""
    bench = Bench(server, tmp_path, "write", overwrite=False)
    place = bench.fresh()
    bench.run(place)
    data = np.random.default_rng(1).integers(0, 60000, (8, 16, 24)).astype("u2")
    assert np.array_equal(zarr.open_array(place / "0", mode="r")[...], data)
