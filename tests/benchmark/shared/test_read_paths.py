"""If this fails, a way of reading is timed that gives wrong voxels, or another way than its name."""

import os
from pathlib import Path
from types import SimpleNamespace

import numcodecs
import numpy as np
import pytest
import zarr

from linumpy.benchmark import cases, machine
from linumpy.benchmark.cases import CannotRunError
from linumpy.benchmark.shared import read_paths as paths
from linumpy.benchmark.shared.read_paths import PATHS, read_entries
from linumpy.benchmark.shared.stores import StoreSpec, difference, generate, open_stored

HOST = ("flat", "zarr-numpy", "tensorstore", "zarrs")
DATA = np.random.default_rng(0).integers(1, 60000, (10, 11, 12)).astype("u2")


def prepare(name, stored, gpu=False):
    return next(entry for entry in read_entries(stored, gpu) if entry.name == name).prepare()


def zarr_config():
    return [zarr.config.get(key) for key in ("buffer", "ndbuffer", "codec_pipeline.path")]


def need(name):
    if name in ("tensorstore", "zarrs"):
        pytest.importorskip(name)


STORES = {
    "raw": {},
    "zstd": {"compressors": zarr.codecs.ZstdCodec()},
    "sharded": {"shards": (8, 8, 8)},
    "v2 blosc": {"zarr_format": 2, "filters": None, "compressors": numcodecs.Blosc("lz4", 5, 1)},
    "big endian": {"dtype": ">u2", "compressors": None},
}


@pytest.mark.parametrize("name", HOST)
@pytest.mark.parametrize("store", STORES)
def test_a_host_path_reads_the_voxels_that_were_written(tmp_path, name, store):
    need(name)
    how = {"compressors": None, "dtype": "u2", **STORES[store]}
    array = zarr.create_array(tmp_path / "a", shape=DATA.shape, chunks=(4, 4, 4), **how)
    array[...] = DATA
    before = zarr_config()
    with prepare(name, open_stored(tmp_path / "a")) as prepared:
        first, second = prepared.call(), prepared.call()
    np.testing.assert_array_equal(first, DATA)
    assert first.dtype == np.dtype("u2")
    assert not np.shares_memory(first, second)  # a new array each time
    assert zarr_config() == before


@pytest.mark.parametrize("name", HOST)
def test_a_path_sees_what_is_on_the_disk_and_not_what_it_read_before(tmp_path, name):
    need(name)
    case = generate(StoreSpec("a", (8, 8), (4, 4), "u2"), tmp_path)
    with prepare(name, case) as prepared:
        prepared.call()
        file = prepared.files[0] if name == "flat" else case.path / "c/0/0"
        content = bytearray(file.read_bytes())
        content[0] ^= 255
        file.write_bytes(content)
        got = prepared.call()
    assert got.view("u1").reshape(-1)[0] == content[0]


def test_the_flat_file_lies_beside_the_array_and_goes_away(tmp_path):
    case = generate(StoreSpec("a", (9, 10), (4, 4), "f4"), tmp_path)

    def break_off():
        with prepare("flat", case) as prepared:
            (flat,) = prepared.files
            assert flat.parent == tmp_path
            np.testing.assert_array_equal(np.fromfile(flat, "f4").reshape(9, 10), zarr.open_array(case.path)[...])
            raise RuntimeError("broke")

    with pytest.raises(RuntimeError, match="broke"):
        break_off()
    assert list(tmp_path.iterdir()) == [case.path]


@pytest.mark.parametrize("name", ["flat", "zarr-numpy", "zarrs"])
def test_a_host_path_does_not_hang_on_what_the_caller_has_set(tmp_path, name):
    need(name)
    case = generate(StoreSpec("a", (9, 10), (4, 4), "f4"), tmp_path)
    mine = {"buffer": "not.a.Buffer", "ndbuffer": "not.a.Buffer", "codec_pipeline.path": "not.a.Pipeline"}
    with zarr.config.set(mine):
        with prepare(name, case) as prepared:
            got = prepared.call()
        assert zarr_config() == list(mine.values())
    assert difference(case, got) == ""


def test_the_flat_file_is_not_mapped_as_no_mapped_page_leaves_the_cache(tmp_path):
    case = generate(StoreSpec("a", (9, 10), (4, 4), "f4"), tmp_path)
    with prepare("flat", case) as prepared:
        assert str(prepared.files[0]) not in Path("/proc/self/maps").read_text()


def test_a_flat_file_cut_short_is_no_result(tmp_path):
    case = generate(StoreSpec("a", (9, 10), (4, 4), "f4"), tmp_path)
    with prepare("flat", case) as prepared:
        os.truncate(prepared.files[0], 100)
        with pytest.raises(OSError, match="100 of 360 bytes"):
            prepared.call()


def test_a_flat_file_without_room_or_right_is_not_written(tmp_path, monkeypatch):
    case = generate(StoreSpec("a", (9, 10), (4, 4), "f4"), tmp_path)
    monkeypatch.setattr(paths.shutil, "disk_usage", lambda folder: SimpleNamespace(free=7))
    with pytest.raises(CannotRunError, match="takes 360 bytes, 7 bytes free"), prepare("flat", case):
        pass
    monkeypatch.setattr(paths.os, "access", lambda folder, mode: False)
    with pytest.raises(CannotRunError, match="no right to write"), prepare("flat", case):
        pass
    assert list(tmp_path.iterdir()) == [case.path]


@pytest.mark.parametrize("name", HOST)
def test_what_does_not_fit_into_the_host_is_not_read(tmp_path, name, monkeypatch):
    need(name)
    case = generate(StoreSpec("a", (9, 10), (4, 4), "f4"), tmp_path)
    monkeypatch.setattr(paths, "available_host_bytes", lambda: 1000)
    with pytest.raises(CannotRunError, match="360 bytes to hold, 1,000 bytes"), prepare(name, case):
        pass


def test_the_available_memory_is_some_of_the_machines():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < paths.available_host_bytes() <= total


@pytest.mark.parametrize("name", sorted(set(PATHS) - set(HOST)))
def test_without_a_device_its_paths_say_what_is_missing(tmp_path, name, monkeypatch):
    case = generate(StoreSpec("a", (9, 10), (4, 4), "f4"), tmp_path)
    monkeypatch.setattr(paths, "why_no_cuda", lambda: "CuPy is not installed: pip install it")
    with pytest.raises(CannotRunError, match="CuPy is not installed"), prepare(name, case):
        pass


@pytest.mark.parametrize(("name", "package"), [("tensorstore", "tensorstore"), ("zarrs", "zarrs")])
def test_a_package_that_is_missing_is_named(tmp_path, name, package, monkeypatch):
    case = generate(StoreSpec("a", (9, 10), (4, 4), "f4"), tmp_path)
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(CannotRunError, match=f"^{package} is not installed"), prepare(name, case):
        pass


# ---- the device's paths, over NumPy in place of CuPy


class FakeArray(np.ndarray):
    def set(self, host):
        self[...] = host


class FakeCuFile:
    def __init__(self, file, flags):
        assert flags == "r"
        self._file = open(file, "rb")  # noqa: SIM115

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def read(self, buffer, task_size):
        assert task_size == 4 * 2**20
        return self._file.readinto(memoryview(buffer))


@pytest.fixture
def fake_gpu(monkeypatch):
    settings = []

    class Scope:
        def __init__(self, wanted):
            self.wanted = wanted

        def __enter__(self):
            settings.append(self.wanted)

        def __exit__(self, *error):
            settings.remove(self.wanted)

    cupy = SimpleNamespace(
        empty=lambda shape, dtype: np.zeros(shape, dtype).view(FakeArray),
        asarray=lambda host: host.copy().view(FakeArray),
    )
    modules = {
        "kvikio": SimpleNamespace(CuFile=FakeCuFile),
        "kvikio.defaults": SimpleNamespace(get=lambda name: 1, set=Scope),
        "cupyx": SimpleNamespace(empty_pinned=np.empty),
    }
    really = paths.importlib.import_module
    monkeypatch.setattr(paths, "_need_cuda", lambda: cupy)
    monkeypatch.setattr(paths, "free_memory", lambda: 10**6)
    for module in (paths, cases, machine):
        monkeypatch.setattr(
            module, "importlib", SimpleNamespace(import_module=lambda name: modules.get(name) or really(name))
        )
    return SimpleNamespace(cupy=cupy, settings=settings)


@pytest.mark.parametrize("name", ["flat", "h2d", "zarr-numpy", "tensorstore", "zarrs"])
@pytest.mark.parametrize("dtype", ["bool", "u2", "c8"])
def test_a_device_path_ends_on_the_device_with_the_right_voxels(tmp_path, name, dtype, fake_gpu):
    need(name)
    if dtype == "bool" and name == "tensorstore":
        pytest.importorskip("tensorstore")
    case = generate(StoreSpec("a", (9, 10), (4, 4), dtype), tmp_path)
    with prepare(name, case, gpu=True) as prepared:
        got = prepared.call()
    assert isinstance(got, FakeArray)
    assert difference(case, got) == ""


def test_the_flat_limit_has_the_readers_threads_for_as_long_as_it_is_timed(tmp_path, fake_gpu):
    from linumpy.gpu.kvikio_settings import read_threads

    case = generate(StoreSpec("a", (9, 10), (4, 4), "u2"), tmp_path)
    with prepare("flat", case, gpu=True):
        assert fake_gpu.settings == [{"num_threads": read_threads(1), "task_size": 4 * 2**20}]
    assert fake_gpu.settings == []


def test_what_does_not_fit_into_the_device_gets_no_flat_file(tmp_path, fake_gpu, monkeypatch):
    case = generate(StoreSpec("a", (9, 10), (4, 4), "u2"), tmp_path)
    monkeypatch.setattr(paths, "free_memory", lambda: 100)
    with pytest.raises(CannotRunError, match="180 bytes to read, 100 bytes"), prepare("flat", case, gpu=True):
        pass


def test_the_host_is_not_asked_to_lock_more_than_its_limit(tmp_path, fake_gpu, monkeypatch):
    case = generate(StoreSpec("a", (9, 10), (4, 4), "u2"), tmp_path)
    monkeypatch.setattr(paths, "_MAX_PINNED_NBYTES", 100)
    with pytest.raises(CannotRunError, match="would lock 180 bytes"), prepare("h2d", case, gpu=True):
        pass


@pytest.mark.parametrize(("name", "backend"), [("linumpy-auto", "auto"), ("linumpy-kvikio", "kvikio")])
def test_linumpy_is_timed_without_a_report_and_asked_once_for_one(tmp_path, name, backend, fake_gpu, monkeypatch):
    from linumpy.gpu import zarr_io

    calls = []

    def reader(path, *, region, backend, return_report=False):
        assert region == (slice(0, 9), slice(0, 10))
        calls.append((path, backend, return_report))
        array = np.zeros(1)
        return (
            (array, SimpleNamespace(backend="zarr-gpu", decoder="", fallback="codec 'zstd'"))
            if return_report
            else array
        )

    monkeypatch.setattr(zarr_io, "read_zarr_to_gpu", reader)
    case = generate(StoreSpec("a", (9, 10), (4, 4), "u2"), tmp_path)
    with prepare(name, case, gpu=True) as prepared:
        prepared.call()
        assert prepared.note() == "by zarr-gpu: codec 'zstd'"
    assert calls == [(case.path, backend, False), (case.path, backend, True)]
