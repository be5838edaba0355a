"""Fixtures that tests of several packages use, and which tests run where there is no GPU."""

import asyncio
import gc
import os
import signal
import sys
import threading

# Before anything imports NumPy. BLAS and OpenMP take a thread for each core and spin while they wait: beside another
# worker, small products take ten times as long. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests count requests: on a busy machine responses are late.
os.environ.setdefault("LINUMPY_HEDGING", "0")
# Before anything imports dask. Workers are forked from one process that has imported dask: each need not import it.
os.environ.setdefault("DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD", "forkserver")

import hypothesis
import numpy as np
import pytest

from linumpy.core import native
from linumpy.device import why_no_cuda
from tests.support import budget

# Slow tests take their number of examples from budget.examples. There are no deadlines: a busy machine may be slow.
ANY_SPEED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("ci", **ANY_SPEED, derandomize=True, max_examples=40, print_blob=True)
hypothesis.settings.register_profile("dev", **ANY_SPEED, max_examples=60)
hypothesis.settings.register_profile("thorough", **ANY_SPEED, max_examples=600)


hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser):
    parser.addoption("--require-gpu", action="store_true", help="fail where a GPU test would be skipped")
    parser.addoption("--slow", action="store_true", help="run slow tests, too, with more examples")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: the long matrix of what the short run shows once (pytest --slow)")
    # A shell has what it starts in the background ignore SIGINT, and nohup SIGHUP, which tests send to themselves and
    # to scripts: these inherit what is ignored.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    budget.SLOW = config.getoption("--slow")


def freeze_objects():
    """Exclude all current objects (modules, results, caches of libraries) from later garbage collections."""
    gc.collect()
    gc.freeze()


pytest_collection_finish = freeze_objects


@pytest.fixture(autouse=True, scope="module")
def frozen_objects():
    yield
    freeze_objects()


_to_thread = asyncio.to_thread


async def _without_a_thread(function, /, *args, **options):
    """Run functions of zarr-python's event loop in its own thread: a thread for each key and chunk takes longer."""
    if threading.current_thread().name == "zarr_io":
        return function(*args, **options)
    return await _to_thread(function, *args, **options)


asyncio.to_thread = _without_a_thread


def pytest_collection_modifyitems(config, items):
    """Deselect slow tests, unless ``--slow``, an expression of ``-m`` or the name of a test selects them."""
    asked = config.getoption("--slow") or "slow" in config.getoption("-m") or any("::" in arg for arg in config.args)
    slow = [] if asked else [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_ignore_collect(collection_path, config):
    """Import only files with the mark for ``-m gpu_alone``: to import all takes longer than these few tests."""
    if config.getoption("-m") == "gpu_alone" and collection_path.suffix == ".py":
        return True if "gpu_alone" not in collection_path.read_text(encoding="utf-8") else None
    return None


def pytest_runtest_setup(item):
    if item.get_closest_marker("needs_core") and (why := native.why_no_core()):
        pytest.skip(f"needs the native core: {why}")
    if item.get_closest_marker("gpu") is None:
        return
    missing = why_no_cuda()
    if missing is None:
        from linumpy.gpu.read.engines import core_device

        # Tests say where chunks are decoded, whether or not the kernels are compiled on this machine.
        core_device._LOAD_SECONDS = None
        return
    if item.config.getoption("--require-gpu"):
        pytest.fail(f"needs a GPU: {missing}", pytrace=False)
    pytest.skip(f"needs a GPU: {missing}")


@pytest.fixture
def cupy():
    """CuPy, in tests marked ``gpu``."""
    import cupy

    return cupy


@pytest.fixture(params=["numpy", "stand-in", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    """NumPy; CuPy in host memory, which refuses NumPy's arrays as CuPy does; and CuPy on a device."""
    if request.param == "stand-in":
        from tests.support.gpu.cupy_on_host import install

        return install(request.getfixturevalue("monkeypatch"))
    return np if request.param == "numpy" else request.getfixturevalue("cupy")


@pytest.fixture
def as_if_on_a_device(monkeypatch):
    """NumPy arrays go where CuPy's go, to kernels that the CPU carries out."""
    from tests.support.gpu import on_cpu

    on_cpu.patch(monkeypatch)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """What a function takes as ``device=``."""
    return request.param


@pytest.fixture(scope="session")
def dask_cluster():
    """A cluster of two workers, each a process with one thread, for all modules: a test leaves it as it was."""
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster:
        yield cluster


@pytest.fixture(autouse=True, scope="session")
def steps_on_the_cpu():
    """Steps that are not told a device use the CPU, also on a machine with a GPU: voxels are compared bit by bit."""
    steps = {"linumpy.mosaic.beam": "estimate_brain_light", "linumpy.pipeline.runner": "run_pipeline"}
    steps |= {"linumpy.quality.report": "write_report", "linumpy.mosaic.io.step": "Step"}
    for module, name in steps.items():
        if module in sys.modules:
            step = getattr(sys.modules[module], name)
            (step.__init__ if isinstance(step, type) else step).__kwdefaults__["device"] = "cpu"
