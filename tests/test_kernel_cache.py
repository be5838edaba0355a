"""If this fails, CuPy's kernels lie in another folder, a full disk stops a command, or compilations are not counted."""

import errno
import os
import subprocess
import sys
import types

import pytest

from linumpy import kernel_cache
from linumpy.kernel_cache import Compiled


class CupysFolder:
    """What linumpy uses of CuPy's folder of kernels."""

    def __init__(self, folder=None):
        self._cache_dir = folder or os.environ["CUPY_CACHE_DIR"]
        if "file" in self._cache_dir:
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", self._cache_dir)
        self._save_cuda_source = False

    def _encode_cubin(self, cubin):
        return b"sum" + cubin

    def load(self, name):
        path = os.path.join(self._cache_dir, name)
        if not os.path.exists(path):
            return None
        with open(path, "rb") as file:
            return file.read().removeprefix(b"sum")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of CuPy, watched: its backend, and the path."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    kernel_cache._warn_once.cache_clear()
    compiler = types.SimpleNamespace(_DiskKernelCacheBackend=CupysFolder, _kernel_cache_backend=CupysFolder())
    compiler._set_kernel_cache_backend = lambda backend: setattr(compiler, "_kernel_cache_backend", backend)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(compiler=compiler))
    kernel_cache.watch(cupy)
    first = compiler._kernel_cache_backend
    kernel_cache.watch(cupy)
    assert compiler._kernel_cache_backend is first
    return first


def compile_one(folder, name="a.cubin"):
    found = folder.load(name)
    if found is None:
        folder.save(name, b"code", "source")
    return found


def test_a_kernel_is_compiled_once_and_counted(folder, tmp_path):
    before = kernel_cache.compiled()
    assert [compile_one(folder) for _ in range(3)] == [None, b"code", b"code"]
    new = kernel_cache.compiled() - before
    assert new.kernels == 1
    assert new.seconds >= 0
    assert kernel_cache.count() == 1
    assert os.listdir(tmp_path) == ["a.cubin"]
    assert str(Compiled(2, 1.25)) == "2 compiled in 1.2 s of all threads"
    assert str(Compiled()) == "none compiled"


@pytest.mark.parametrize("call", ["open", "os.replace"])
def test_a_full_disk_costs_the_time_to_compile_again(folder, tmp_path, monkeypatch, caplog, call):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if call == "open":
            patch.setattr(kernel_cache, "open", full, raising=False)
        else:
            patch.setattr(os, "replace", full)
        before = kernel_cache.compiled().kernels
        assert [compile_one(folder) for _ in range(3)] == [None] * 3
        assert kernel_cache.compiled().kernels - before == 3
    assert os.listdir(tmp_path) == []
    assert len(caplog.messages) == 1
    assert "No space left" in caplog.messages[0]
    assert "LINUMPY_KERNEL_CACHE" in caplog.messages[0]
    assert [compile_one(folder), compile_one(folder)] == [None, b"code"]


def test_what_cannot_be_read_is_compiled_again(folder, tmp_path):
    (tmp_path / "a.cubin").mkdir()
    assert compile_one(folder) is None


def test_another_version_of_cupy_is_left_alone():
    kernel_cache.watch(types.SimpleNamespace(cuda=types.SimpleNamespace()))


def chosen(**environment):
    """Run a process that chooses its folder; returns the folder, the other settings, and what it logs."""
    code = (
        "import os; from linumpy import kernel_cache; kernel_cache.choose_folder()\n"
        "print(kernel_cache.folder(), os.environ.get('WARP_CACHE_PATH'), kernel_cache.folder().is_dir(), sep='\\n')"
    )
    kept = {name: value for name, value in os.environ.items() if "CACHE" not in name and "CUPY" not in name}
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split("\n")[:3], done.stderr


def test_the_folder_is_cupys_or_the_one_that_is_named(tmp_path):
    assert chosen(HOME=str(tmp_path)) == ([f"{tmp_path}/.cupy/kernel_cache", "None", "True"], "")
    assert chosen(HOME=str(tmp_path), CUPY_CACHE_DIR="")[0][0] == f"{tmp_path}/.cupy/kernel_cache"
    assert chosen(CUPY_CACHE_DIR=f"{tmp_path}/c") == ([f"{tmp_path}/c", "None", "True"], "")
    named = {"LINUMPY_KERNEL_CACHE": f"{tmp_path}/k", "CUPY_CACHE_DIR": f"{tmp_path}/c"}
    assert chosen(**named) == ([f"{tmp_path}/k/cupy", f"{tmp_path}/k/warp", "True"], "")
    assert (tmp_path / "k/cupy").is_dir()


def test_a_folder_that_cannot_be_made_is_replaced_with_a_warning(tmp_path):
    (tmp_path / "file").touch()
    for broken in (f"{tmp_path}/file", f"{tmp_path}/file/below"):
        (folder, _, exists), said = chosen(LINUMPY_KERNEL_CACHE=broken)
        assert "linumpy-kernels-" in folder
        assert exists == "True"
        assert not os.path.exists(folder)  # it is removed with the process
        assert "Not a directory" in said or "File exists" in said
        assert "LINUMPY_KERNEL_CACHE" in said


def test_settings_of_a_cupy_that_was_imported_before(tmp_path, monkeypatch, caplog):
    """Zarr imports CuPy. The named folder is used all the same, and one that the user gave CuPy is kept."""
    called = []
    monkeypatch.setattr(kernel_cache, "_is_command", True)
    monkeypatch.delenv("CUPY_ACCELERATORS", raising=False)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "c"))
    core = types.SimpleNamespace(set_reduction_accelerators=called.append)
    kernel_cache._warn_once.cache_clear()
    for named in (None, tmp_path / "k", tmp_path / "file"):
        if named is not None:
            monkeypatch.setenv("LINUMPY_KERNEL_CACHE", str(named))
            monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace())
            kernel_cache.choose_folder()
        compiler = types.SimpleNamespace(
            _DiskKernelCacheBackend=CupysFolder, _kernel_cache_backend=CupysFolder("/user's"), _use_pch=False
        )
        compiler._set_kernel_cache_backend = lambda backend, to=compiler: setattr(to, "_kernel_cache_backend", backend)
        kernel_cache.watch(types.SimpleNamespace(cuda=types.SimpleNamespace(compiler=compiler), _core=core))
        wanted = f"{named}/cupy" if named == tmp_path / "k" else "/user's"
        assert compiler._kernel_cache_backend._cache_dir == wanted
        assert compiler._use_pch
    assert called == [[], [], []]
    assert ["kept in /user's" in message for message in caplog.messages] == [True]


_READS = """
import numpy as np, sys, zarr, linumpy
array = zarr.create_array(sys.argv[1], shape=(64, 64), chunks=(16, 64), dtype="u2", compressors=zarr.codecs.ZstdCodec())
array[...] = values = np.arange(4096, dtype="u2").reshape(64, 64)
volume, report = linumpy.read_zarr(array, device="cuda", return_report=True)
np.testing.assert_array_equal(volume.get(), values)
print(report.compiled.kernels)
"""


def read_on_gpu(path, **environment):
    command = [sys.executable, "-c", _READS, str(path)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout), done.stderr


@pytest.mark.gpu
def test_the_first_process_compiles_and_the_second_does_not(tmp_path):
    cache = {"LINUMPY_KERNEL_CACHE": str(tmp_path / "k")}
    first, _ = read_on_gpu(tmp_path / "a", **cache)
    second, _ = read_on_gpu(tmp_path / "b", **cache)
    assert first > 0
    assert second == 0


@pytest.mark.gpu
def test_reads_where_nothing_can_be_kept(tmp_path):
    (tmp_path / "file").touch()
    cache = {"LINUMPY_KERNEL_CACHE": str(tmp_path / "file"), "HOME": str(tmp_path)}
    compiled, said = read_on_gpu(tmp_path / "a", **cache)
    assert compiled > 0
    assert "LINUMPY_KERNEL_CACHE" in said


@pytest.mark.gpu
def test_two_processes_compile_at_the_same_time(tmp_path):
    environment = os.environ | {"LINUMPY_KERNEL_CACHE": str(tmp_path / "k")}
    running = [
        subprocess.Popen([sys.executable, "-c", _READS, str(tmp_path / name)], env=environment) for name in "abcd"
    ]
    assert [process.wait() for process in running] == [0] * 4
    assert all(name.endswith(".cubin") for name in os.listdir(tmp_path / "k/cupy"))
