"""kvikio's settings around a read, with a made-up kvikio."""

import os
import subprocess
import sys
import threading
import types

import pytest

from linumpy.gpu.read import kvikio_settings
from linumpy.gpu.read.kvikio_settings import transfer_settings, wanted_threads


@pytest.fixture
def defaults(monkeypatch):
    """What the reader uses of ``kvikio.defaults``: settings that a scope puts back."""
    values = {"num_threads": 1, "gds_threshold": 16384}
    history = []

    class Scope:
        def __init__(self, config):
            self._old = {name: values[name] for name in config}
            values.update(config)
            history.append(dict(config))

        def __exit__(self, *error):
            values.update(self._old)

    module = types.ModuleType("kvikio.defaults")
    module.get, module.set, module.values, module.history = values.__getitem__, Scope, values, history
    kvikio = types.ModuleType("kvikio")
    kvikio.defaults = module
    monkeypatch.setitem(sys.modules, "kvikio", kvikio)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", module)
    monkeypatch.setattr(kvikio_settings.os, "sched_getaffinity", lambda _: set(range(64)))
    for name in ("KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS", "KVIKIO_GDS_THRESHOLD"):
        monkeypatch.delenv(name, raising=False)
    return module


def test_set_for_the_read_and_put_back(defaults):
    with transfer_settings():
        assert defaults.values == {"num_threads": 16, "gds_threshold": 0}
    assert defaults.values == {"num_threads": 1, "gds_threshold": 16384}


def test_put_back_after_an_error(defaults):
    with pytest.raises(RuntimeError), transfer_settings():
        raise RuntimeError
    assert defaults.values == {"num_threads": 1, "gds_threshold": 16384}


def test_what_the_caller_set_stays(defaults, monkeypatch):
    defaults.values["num_threads"] = 3
    with transfer_settings():
        assert defaults.values["num_threads"] == 3
    defaults.values["num_threads"] = 1
    monkeypatch.setenv("KVIKIO_NTHREADS", "1")
    assert wanted_threads() == 1
    with transfer_settings():
        assert defaults.values["num_threads"] == 1


def test_few_cores_few_threads(defaults, monkeypatch):
    monkeypatch.setattr(kvikio_settings.os, "sched_getaffinity", lambda _: {0, 1})
    with transfer_settings():
        assert defaults.values["num_threads"] == 2
    assert wanted_threads() == 20  # those of the C library mostly wait, and are as many as it has by itself
    defaults.values["num_threads"] = 7
    assert wanted_threads() == 7


def test_reads_side_by_side_share_one_scope(defaults):
    inside, leave = threading.Barrier(3), threading.Barrier(3)

    def read():
        with transfer_settings():
            inside.wait()
            leave.wait()

    threads = [threading.Thread(target=read) for _ in range(2)]
    [thread.start() for thread in threads]
    inside.wait()
    assert len(defaults.history) == 1
    with transfer_settings():
        pass
    assert defaults.values["num_threads"] == 16, "the first to leave must not put back what others still use"
    leave.wait()
    [thread.join() for thread in threads]
    assert defaults.values == {"num_threads": 1, "gds_threshold": 16384}


COUNT_READING_THREADS = """
import os, sys, types
import numpy as np
from linumpy.gpu.read.engines import choose_engine
from linumpy.io import posix_aio

kvikio, defaults = types.ModuleType("kvikio"), types.ModuleType("kvikio.defaults")
defaults.get = lambda name: int(os.environ["KVIKIO_NTHREADS"])
kvikio.defaults = defaults
sys.modules |= {"kvikio": kvikio, "kvikio.defaults": defaults}

path = sys.argv[1]
before = len(os.listdir("/proc/self/task"))
with choose_engine(direct=False, read_nbytes=100) as engine:
    files = [os.open(path, os.O_RDONLY) for _ in range(64)]
    got = np.zeros((64, 100), np.uint8)
    posix_aio.read_batch(np.array(files), got.ctypes.data + np.arange(64) * 100, np.full(64, 100), np.zeros(64, int))
    print(engine.name.split()[1], len(os.listdir("/proc/self/task")) - before, (got == 7).all())
"""


@pytest.mark.parametrize("threads", [1, 3])
def test_the_c_library_reads_with_as_many_threads_as_kvikio_is_told_to(tmp_path, threads):
    """In a process of its own, because the C library takes the number once."""
    (tmp_path / "f").write_bytes(bytes([7] * 100))
    command = [sys.executable, "-c", COUNT_READING_THREADS, str(tmp_path / "f")]
    environment = os.environ | {"KVIKIO_NTHREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == f"lio_listio {threads} True\n", done.stderr
