"""If this fails, another device is chosen than there is, or the reason is not told."""

import importlib.metadata
import logging
import os
import re
import shlex
import sys
import tomllib
import types
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from linumpy import device, packages
from linumpy.errors import GpuUnavailableError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def cupy_with(monkeypatch):
    """Put a CuPy in place that finds a number of devices, or fails to."""

    def make(count):
        def devices():
            if isinstance(count, Exception):
                raise count
            return count

        fake = types.ModuleType("cupy")
        fake.ndarray = type("ndarray", (), {})
        fake.cuda = types.SimpleNamespace(
            runtime=types.SimpleNamespace(getDeviceCount=devices), Device=lambda: types.SimpleNamespace(id=1)
        )
        monkeypatch.setitem(sys.modules, "cupy", fake)
        monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: object())
        return fake

    monkeypatch.delenv(device.DEVICE_VARIABLE, raising=False)
    return make


@pytest.fixture
def no_cupy(monkeypatch):
    """A machine with a driver for CUDA 13, and without CuPy."""
    monkeypatch.delenv(device.DEVICE_VARIABLE, raising=False)
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(packages, "driver_cuda_version", lambda: (13, 0))


def test_auto_takes_the_gpu_if_there_is_one(cupy_with, caplog):
    cupy_with(2)
    with caplog.at_level(logging.INFO, "linumpy.device"):
        chosen = device.resolve()
    assert (chosen.kind, chosen.index, str(chosen)) == ("cuda", 1, "cuda:1")
    assert [record.message for record in caplog.records] == ["device: cuda:1 (a CUDA device is there)"]
    assert device.resolve("cuda", 0).index == 0


def test_auto_takes_the_cpu_if_there_is_none(no_cupy, caplog):
    with caplog.at_level(logging.INFO, "linumpy.device"):
        chosen = device.resolve("auto")
    assert (chosen.kind, chosen.index, str(chosen), chosen.xp) == ("cpu", None, "cpu", np)
    assert len(caplog.records) == 1
    assert 'CuPy is not installed: pip install "cupy-cuda13x' in caplog.text


def test_cuda_says_what_is_missing(no_cupy):
    with pytest.raises(
        GpuUnavailableError, match=r'CuPy is not installed: pip install "cupy-cuda13x.*" "kvikio-cu13.*"'
    ) as caught:
        device.resolve("cuda")
    assert isinstance(caught.value, RuntimeError)
    with pytest.raises(GpuUnavailableError, match="CuPy is not installed"):
        device.require_cuda()


@pytest.mark.parametrize(
    ("count", "message"), [(0, "CUDA finds no device"), (RuntimeError("insufficient driver"), "CUDA finds no device")]
)
def test_no_device(cupy_with, count, message):
    cupy_with(count)
    with pytest.raises(GpuUnavailableError, match=message):
        device.resolve("cuda")
    assert device.resolve("auto").kind == "cpu"


def test_a_device_that_is_not_there(cupy_with):
    cupy_with(2)
    with pytest.raises(GpuUnavailableError, match="no CUDA device 2: this machine has 2, numbered from 0"):
        device.resolve("cuda", 2)
    with pytest.raises(GpuUnavailableError, match="no CUDA device 5"):
        device.resolve("auto", 5)  # a number was asked for


@pytest.mark.parametrize("device_id", [-1, 1.5, True])
def test_what_is_no_number_of_a_device(cupy_with, device_id):
    cupy_with(2)
    with pytest.raises(ValueError, match=rf"device_id={device_id}"):
        device.resolve("cuda", device_id)


def test_the_environment_sets_the_default(cupy_with, monkeypatch):
    cupy_with(1)
    monkeypatch.setenv("LINUMPY_DEVICE", "cpu")
    assert device.resolve().kind == "cpu"
    assert device.resolve("cuda").kind == "cuda"
    monkeypatch.setenv("LINUMPY_DEVICE", " CUDA ")
    assert device.resolve().kind == "cuda"
    monkeypatch.setenv("LINUMPY_DEVICE", "tpu")
    with pytest.raises(ValueError, match="LINUMPY_DEVICE='tpu' is unknown: set it to one of auto, cuda, cpu"):
        device.resolve()


def test_a_child_forked_after_cuda_was_started_says_so(cupy_with, monkeypatch):
    cupy_with(2)
    monkeypatch.setattr(device, "_cuda_started", False)
    assert in_a_forked_child(lambda: str(device.why_no_cuda())) == "None"
    assert device.resolve("auto").is_cuda
    assert in_a_forked_child(lambda: device.resolve("auto").kind) == "cpu"
    reason = in_a_forked_child(lambda: device.why_no_cuda())
    assert "forked after CUDA had been started" in reason
    assert "spawn" in reason
    assert device.why_no_cuda() is None


def in_a_forked_child(function):
    """Run a function that returns text in a child made by ``os.fork``."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(write, function().encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as text:
        answer = text.read()
    os.waitpid(child, 0)
    return answer


def test_bad_wishes():
    with pytest.raises(ValueError, match="device 'gpu' is unknown: choose one of auto, cuda, cpu"):
        device.resolve("gpu")
    with pytest.raises(ValueError, match="device_id=0 goes with a CUDA device"):
        device.resolve("cpu", 0)


def test_array_modules(cupy_with):
    fake = cupy_with(1)
    array = fake.ndarray()
    assert device.array_module(array) is fake
    assert device.array_module(np.ones(3)) is np
    assert device.array_module([1, 2]) is np
    fake.asnumpy = lambda x: "copied"
    assert device.to_host(array) == "copied"
    host = np.ones(3)
    assert device.to_host(host) is host


@pytest.mark.parametrize(
    ("driver", "extra"), [((12, 4), "cuda12"), ((13, 0), "cuda13"), ((14, 1), "cuda13"), (None, "cuda13")]
)
def test_the_install_line_fits_the_driver(monkeypatch, driver, extra):
    monkeypatch.setattr(packages, "driver_cuda_version", lambda: driver)
    # The oracle is the project's own table: the line must install what the extra would.
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [Requirement(one) for one in table["optional-dependencies"][extra]]
    words = shlex.split(packages.install_line())
    assert words[:2] == ["pip", "install"]
    assert sorted(map(Requirement, words[2:]), key=str) == sorted(wanted, key=str)


def test_no_line_names_the_package_index_s_linumpy(monkeypatch):
    """What pip finds there under the name ``linumpy`` is another package."""
    for extra in (None, "cuda12", "dask"):
        assert "linumpy" not in packages.install_line(extra)

    def none(name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(packages.importlib.metadata, "requires", none)
    assert packages.install_line("cuda12") == 'pip install ".[cuda12]"'  # a source tree that was never installed
    files = [ROOT / "README.md", *(ROOT / "linumpy").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    for file in files:
        assert not re.search(r"pip install \S*linumpy(?!-gpu)\b", file.read_text(encoding="utf-8")), file


def test_packages_are_no_advice_without_a_driver(no_cupy, monkeypatch):
    monkeypatch.setattr(packages, "driver_cuda_version", lambda: None)
    reason = device.why_no_cuda()
    assert "no NVIDIA driver" in reason
    assert "pip install" not in reason


@pytest.mark.parametrize(
    ("names", "others"),
    [(["linumpy-gpu"], ()), (["linumpy_gpu", "linumpy"], ("linumpy",)), (["linumpy"], ("linumpy",)), ([], ())],
)
def test_another_distribution_of_that_name_is_told(no_cupy, monkeypatch, names, others):
    monkeypatch.setattr(packages, "_providers", lambda: {"linumpy": names})

    def metadata(name):
        if name not in names:
            raise importlib.metadata.PackageNotFoundError
        return {"Name": name}

    monkeypatch.setattr(packages.importlib.metadata, "metadata", metadata)
    info = device.describe()
    assert info.others == others
    assert ("pip uninstall linumpy" in str(info)) == bool(others)


def test_describe_reads_well(no_cupy):
    text = str(device.describe())
    for part in (
        "device",
        "no GPU      CuPy is not installed",
        "Python",
        "CuPy",
        "zarr",
        "GDS         kvikio is not installed, which only GPUDirect Storage needs",
    ):
        assert part in text


@pytest.mark.gpu
def test_describe_on_a_gpu(cupy):
    info = device.describe()
    assert "NVIDIA" in info.name
    assert info.memory_total >= info.memory_free > 0
    assert info.driver
    assert dict(info.versions)["CuPy"] == cupy.__version__
    device.synchronize()
