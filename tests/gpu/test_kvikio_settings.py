"""If this fails, a read leaves kvikio's process-wide settings changed."""

import sys
import threading
import types

import pytest

from linumpy.gpu import kvikio_settings
from linumpy.gpu.kvikio_settings import read_threads, transfer_settings


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
    assert read_threads(1) == 1
    with transfer_settings():
        assert defaults.values["num_threads"] == 1


def test_few_cores_few_threads(defaults, monkeypatch):
    monkeypatch.setattr(kvikio_settings.os, "sched_getaffinity", lambda _: {0, 1})
    with transfer_settings():
        assert defaults.values["num_threads"] == 2
    defaults.values["num_threads"] = 7
    with transfer_settings():
        assert defaults.values["num_threads"] == 7


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
