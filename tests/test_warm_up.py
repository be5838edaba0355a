"""If this fails, the kernels of the pipeline are not compiled beside it, or processes that compile are left behind."""

import contextlib
import errno
import pickle
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from linumpy import device, warm_up
from linumpy.pipeline.runner import run_pipeline
from linumpy.pipeline.settings import OPTIONS, Run
from linumpy.pipeline.stages import STAGES


def test_each_stage_is_rehearsed_with_what_it_needs():
    assert {stage for group in warm_up._GROUPS for stage in group} == set(OPTIONS)
    for group in warm_up._GROUPS:
        made = {role for stage in group for role in STAGES[stage].makes}
        for stage in group:
            assert set(STAGES[stage].needs) <= made | {"image"}


def test_a_rehearsal_carries_out_its_stages(tmp_path, monkeypatch):
    monkeypatch.setattr(warm_up, "run_pipeline", lambda run, device: run_pipeline(run))
    run = Run(mosaics=tmp_path, output=tmp_path, slicing_interval_mm=0.2)
    groups = (("galvo", "resample", "survey", "aip"), ("positions", "stitch"))
    assert warm_up._rehearse(warm_up._Rehearsal(run, "uint16", groups, True), tmp_path)
    assert sorted(path.name for path in (tmp_path / "0").iterdir() if path.is_dir() and path.name[0] != ".") == [
        "aip", "galvo", "resample", "survey",
    ]  # fmt: skip
    assert (tmp_path / "1/stitch/slice_z01.ome.zarr").is_dir()


def test_a_rehearsal_that_fails_does_not_stop_the_next(tmp_path, monkeypatch):
    tried = []

    def fails(run, device):
        tried.append(run.skip)
        raise ValueError("no tissue")

    monkeypatch.setattr(warm_up, "run_pipeline", fails)
    monkeypatch.setattr(warm_up, "write_brain", lambda *_: None)
    rehearsal = warm_up._Rehearsal(
        Run(mosaics=tmp_path, output=tmp_path, slicing_interval_mm=0.2), "float32", warm_up._GROUPS, True
    )
    assert not warm_up._rehearse(rehearsal, tmp_path)
    assert len(tried) == len(warm_up._GROUPS)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A machine with a device; the processes run a line of Python that the test sets."""
    runtime = types.SimpleNamespace(memGetInfo=lambda: (2**36, 2**37))
    cuda = types.SimpleNamespace(runtime=runtime, Device=lambda: types.SimpleNamespace(compute_capability="90"))
    monkeypatch.setattr(device, "require_cuda", lambda: types.SimpleNamespace(cuda=cuda, __version__="1"))
    monkeypatch.setattr(device, "usable_cores", lambda: 6)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    said = types.SimpleNamespace(code="pass", groups=[])

    def start(rehearsal, folder):
        said.groups.append(rehearsal.groups)
        return subprocess.Popen([sys.executable, "-c", said.code], stdin=subprocess.PIPE)

    monkeypatch.setattr(warm_up, "_start", start)
    return said


def test_processes_share_the_groups_and_are_started_once_for_a_machine(start, tmp_path):
    run = Run(mosaics=tmp_path, output=tmp_path, slicing_interval_mm=0.2)
    for _ in range(2):
        with warm_up.warming_up(run, np.uint16) as processes:
            for process in processes:
                process.wait()
    assert len(start.groups) == 3
    assert sorted(group for groups in start.groups for group in groups) == sorted(warm_up._GROUPS)
    with warm_up.warming_up(run, np.dtype(">f4")) as processes:
        assert len(processes) == 3
    with warm_up.warming_up(run, np.uint8) as processes:
        assert not processes


@pytest.mark.parametrize("code", ["import time; time.sleep(60)", "raise SystemExit(1)"])
def test_processes_end_with_the_pipeline_and_are_started_again_next_time(start, tmp_path, code):
    start.code, run = code, Run(mosaics=tmp_path, output=tmp_path, slicing_interval_mm=0.2)
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt), warm_up.warming_up(run, np.uint16) as processes:
            raise KeyboardInterrupt
        assert len(processes) == 3
        assert all(process.poll() is not None for process in processes)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_or_memory_does_not_stop_the_pipeline(start, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "touch", full)
    with warm_up.warming_up(Run(mosaics=tmp_path, output=tmp_path, slicing_interval_mm=0.2), np.uint16) as processes:
        assert [process.wait() for process in processes] == [0, 0, 0]
    monkeypatch.setattr(warm_up, "_start", full)
    with warm_up.warming_up(Run(mosaics=tmp_path, output=tmp_path, slicing_interval_mm=0.2), np.uint16) as processes:
        assert not processes


def test_a_process_ends_with_its_parent(tmp_path):
    """Also if the parent was killed: the process sees the end of its standard input, and removes the folder."""
    (tmp_path / "work/0").mkdir(parents=True)
    code = "import time; from linumpy import warm_up; warm_up._rehearse = lambda *_: time.sleep(60); warm_up.main()"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "work/0")], stdin=subprocess.PIPE)
    process.stdin.write(
        pickle.dumps(
            warm_up._Rehearsal(Run(mosaics=tmp_path, output=tmp_path, slicing_interval_mm=0.2), "uint16", (), False)
        )
    )
    process.stdin.close()
    assert process.wait(timeout=30) == 1
    assert not (tmp_path / "work").exists()


def test_a_process_that_rehearsed_ends_by_itself(tmp_path):
    code = "from linumpy import warm_up; warm_up._rehearse = lambda *_: True; warm_up.main()"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE)
    process.stdin.write(
        pickle.dumps(
            warm_up._Rehearsal(Run(mosaics=tmp_path, output=tmp_path, slicing_interval_mm=0.2), "uint16", (), False)
        )
    )
    process.stdin.flush()
    assert process.wait(timeout=30) == 0
    process.stdin.close()


def test_a_small_machine_does_not_warm_up(start, tmp_path, monkeypatch):
    monkeypatch.setattr(device, "usable_cores", lambda: 1)
    with warm_up.warming_up(Run(mosaics=tmp_path, output=tmp_path, slicing_interval_mm=0.2), np.uint16) as processes:
        assert not processes
