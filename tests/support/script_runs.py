"""Run scripts as people do: in a process of their own, or by their ``main``; and kill them half way."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import tqdm

ROOT = Path(__file__).parents[2]

_HALF_WAY = """
import contextlib, sys, time
from linumpy import progress
from linumpy.write import new_image
new_image._CHUNK_NBYTES = {chunk_nbytes} or new_image._CHUNK_NBYTES
from linumpy.mosaic.io import tiles
tiles.HOST_TILE_BYTES = 1  # many small tiles
calls = 0

@contextlib.contextmanager
def bar(label, total, unit="B", instead=None):
    def progress(nbytes):
        global calls
        calls += 1
        if calls == {after}:
            print("half way", flush=True)
            for _ in range(12_000):  # a signal that comes right before one long sleep would be seen after it
                time.sleep(0.05)
    yield progress

progress.progress_bar = bar
from tests.support.script_runs import load
sys.exit(load({name!r}).main(sys.argv[1:]))
"""


def load(name):
    """Import a script of the top-level folder as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(**more):
    return os.environ | {"PYTHONPATH": str(ROOT)} | more


def command_of(name):
    """Return the command of a script, as ``linum`` takes it."""
    return name.removeprefix("linum_").replace("_", "-")


def run_script(name, *words, **more):
    """Run a script; returns the finished process."""
    return subprocess.run(
        [sys.executable, ROOT / "scripts/linum.py", command_of(name), *map(str, words)],
        capture_output=True, text=True, timeout=200, check=False, env=environment(**more),
    )  # fmt: skip


def help_of(name, capsys):
    """Return the help of a script, as it is shown where there is no terminal."""
    with mock.patch.dict(os.environ, COLUMNS="80"), pytest.raises(SystemExit) as stop:
        load(name).main(["--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def record_bars(monkeypatch):
    """Return what is counted by progress bars that are made from now on, by label: number, total, unit."""
    bars = {}

    class Bar(tqdm.tqdm):
        def __init__(self, *, desc, total, unit, **settings):
            super().__init__(desc=desc, total=total, unit=unit, **settings)
            self.counted = bars[desc] = [0, total, unit]

        def update(self, count):
            self.counted[0] += count

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    return bars


def kill_half_way(name, words, *, after, sent=signal.SIGKILL, chunk_nbytes=None):
    """Kill a script when it has reported progress `after` times; returns its exit status.

    Default chunks have at most `chunk_nbytes`, so that a small output has many.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _HALF_WAY.format(name=name, after=after, chunk_nbytes=chunk_nbytes), *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    ) as child:  # fmt: skip
        said = child.stdout.readline()
        assert said == "half way\n", said + child.stderr.read()
        child.send_signal(sent)
        try:
            return child.wait(timeout=60)
        finally:
            child.kill()  # nobody waits for one that lives on


def check_refused(capsys, main, words, program, message):
    """Check that ``main`` ends with 2 and one line that says why, and no traceback."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as stop:  # what the parser refuses
        code = stop.code
    told = capsys.readouterr()
    assert code == 2, told.err
    assert message in told.err
    assert told.err.startswith(f"{program}: error: ")
    assert told.err.count("\n") == 1
    assert told.out == ""
