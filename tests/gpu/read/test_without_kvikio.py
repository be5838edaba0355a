"""If this fails, reads need kvikio where it is not installed, or fail where GPUDirect Storage does."""

import contextlib
import ctypes
import errno
import os
import sys

import numpy as np
import pytest
import zarr

from linumpy.errors import ChunkError, GpuUnavailableError
from linumpy.gpu import read_zarr_to_gpu, release
from linumpy.gpu.kvikio_zarr import read_zarr_via_kvikio
from linumpy.gpu.read import request
from linumpy.gpu.read.engines import direct
from linumpy.gpu.read.reader import Reader
from tests.support import budget
from tests.support.budget import matrix
from tests.support.gpu import reference
from tests.support.gpu.emulator import needs_compiler
from tests.support.stores import plain_values, random_values, same, stored

KINDS = {
    "raw": {"compressors": None},
    "zstd": {},
    "shards": {"shards": (16, 48), "compressors": None},
    "zstd shards": {"shards": (16, 48)},
}


@pytest.fixture(autouse=True)
def made_up_kvikio(request, monkeypatch):
    """It has no settings, and the device memory of the stand-in is the host's."""
    if request.node.get_closest_marker("gpu") is None:
        missing = "none", "kvikio is not installed"
        monkeypatch.setattr(direct, "kvikio_mode", lambda: ("cufile", "") if sys.modules.get("kvikio") else missing)
        monkeypatch.setattr(direct, "transfer_settings", contextlib.nullcontext)
        monkeypatch.setattr(
            direct._Reads, "_view", lambda self, address, nbytes: (ctypes.c_ubyte * nbytes).from_address(address)
        )


def make(folder, kind="raw", shape=(40, 48), values=random_values):
    return stored(folder, values("u2", shape, 1), (8, 16), **KINDS[kind])


@pytest.mark.needs_core
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["auto", "linumpy", "kvikio"])
def test_without_kvikio_linumpy_reads_all_the_same(tmp_path, monkeypatch, caplog, kind, backend):
    array = make(tmp_path / "a", kind)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    monkeypatch.setattr(request, "free_memory", lambda *_: 2**30)
    with reference.fake_device(), contextlib.ExitStack() as scope:
        scope.callback(release)
        found, report = read_zarr_to_gpu(array, backend=backend, strict=True, return_report=True)
        assert same(found.get(), array[...])
        assert same(read_zarr_via_kvikio(array, region=np.s_[3:30, 7]).get(), array[3:30, 7])
    assert (report.backend, report.fallback) == ("linumpy", "")
    assert report.gds == "not used (kvikio is not installed, which only GPUDirect Storage needs)"
    assert not caplog.records


def test_gpudirect_storage_is_what_needs_kvikio(monkeypatch):
    with (
        reference.fake_device(),
        pytest.raises(GpuUnavailableError, match=r"direct=True reads through kvikio, but .*: pip install .*kvikio"),
    ):
        Reader(0, direct=True)


def failing(error, when, every):
    """What opens files for kvikio: every so many files it fails in one of three ways."""

    class File(reference.PreadFile):
        tried = 0

        def __init__(self, path):
            type(self).tried += 1
            self._fails = self.tried % every == 0
            if self._fails and when == "open":
                raise error
            super().__init__(path)

        def pread(self, *arguments):
            if self._fails and when == "start":
                raise error
            future = super().pread(*arguments)
            if self._fails:
                future.result()
                future.get = self._refuse
            return future

        def _refuse(self):
            raise error

    return File


DRIVER = RuntimeError("cuFile error: 5011\nnvidia-fs driver error")
ERRORS = {"driver": DRIVER, "its number": OSError(errno.EIO, "Input/output error")}


@pytest.mark.needs_core
@needs_compiler
@pytest.mark.parametrize(
    ("stored", "failure"),
    matrix(
        [("raw", None), ("zstd shards", "device"), ("shards", None), ("zstd", "device")],
        [
            ("driver", "get", 1),
            ("driver", "get", 3),
            ("driver", "start", 2),
            ("driver", "open", 2),
            ("its number", "get", 2),
        ],
    ),
)
def test_what_gpudirect_storage_fails_to_read_goes_through_the_host(tmp_path, caplog, stored, failure):
    (kind, decode_on), (error, when, every) = stored, failure
    array = make(tmp_path / "a", kind, values=plain_values if decode_on else random_values)
    expected = array[...]
    for seed in range(budget.examples(3)):
        caplog.clear()
        job = reference.make_job(array, seed=seed, direct=True, decode_on=decode_on)
        with reference.fake_device(seed, failing(ERRORS[error], when, every)) as device:
            assert same(job.run_on(device), expected)
        assert reference.PreadFile.open_files == 0
        report = job.report
        assert report.reads_repeated > 0
        assert f"{type(ERRORS[error]).__name__}: " in report.engine
        assert "\n" not in report.engine
        assert f"{report.reads_repeated} reads failed" in str(report)
        (said,) = [one.getMessage() for one in caplog.records if one.name == direct.__name__]
        assert "which go through host memory without it" in said


@pytest.mark.needs_core
def test_it_is_logged_once_and_told_of_each_read(tmp_path, caplog):
    array = make(tmp_path / "a")
    with reference.fake_device(0, failing(DRIVER, "get", 1)), Reader(0, direct=True) as reader:
        tickets = [reader.submit(array, slice(0, n)) for n in (9, 17, 40)]
        for ticket, stop in zip(tickets, (9, 17, 40), strict=True):
            assert same(ticket.result().get(), array[:stop])
            assert ticket.report.reads_repeated > 0
        assert len([one for one in caplog.records if one.name == direct.__name__]) == 1


@pytest.mark.needs_core
def test_an_error_of_the_file_is_an_error_all_the_same(tmp_path):
    array = make(tmp_path / "a")
    os.truncate(tmp_path / "a/c/1/1", 5)
    with reference.fake_device(0, failing(DRIVER, "get", 1)), Reader(0, direct=True) as reader:
        rows = reader.submit_many(array, [np.s_[:8], np.s_[8:16]])
        assert same(rows[0].result().get(), array[:8])
        with pytest.raises(ChunkError, match=r"c/1/1 has 5 bytes"):
            rows[1].result()


@pytest.mark.needs_core
def test_reads_that_do_not_fail_are_not_repeated(tmp_path):
    array = make(tmp_path / "a")
    with reference.fake_device(0, reference.PreadFile), Reader(0, direct=True) as reader:
        ticket = reader.submit(array)
        assert same(ticket.result().get(), array[...])
        assert ticket.report.reads_repeated == 0
        assert ticket.report.engine == "kvikio CuFile.pread into device memory"
        assert "failed" not in str(ticket.report)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "chunks"), [("raw", (64, 96, 128)), ("raw", (16, 16, 16)), ("zstd", (32, 32, 32))])
def test_a_device_is_read_to_without_kvikio(tmp_path, monkeypatch, cupy, kind, chunks):
    """Short reads and long ones, which kvikio would do where it is."""
    values = plain_values("u2", (130, 100, 140), 1)
    array = zarr.create_array(tmp_path / "a", shape=values.shape, chunks=chunks, dtype="u2", **KINDS[kind])
    array[...] = values
    release()
    monkeypatch.setitem(sys.modules, "kvikio", None)
    try:
        found, report = read_zarr_to_gpu(array, strict=True, return_report=True)
    finally:
        release()
    assert same(found.get(), values)
    assert (report.backend, report.gds.split(" (")[0]) == ("linumpy", "not used")
    assert "kvikio" not in report.engine


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "decode_on"), [("raw", None), ("shards", None), ("zstd", "device")])
def test_direct_reads_that_fail_on_a_device(tmp_path, monkeypatch, cupy, kind, decode_on):
    kvikio = pytest.importorskip("kvikio")
    array, real = make(tmp_path / "a", kind, shape=(400, 480), values=plain_values), kvikio.CuFile

    class Refused:
        def get(self):
            raise DRIVER

    class Failing:
        tried = 0

        def __init__(self, path):
            self._file = real(path, "r")
            self.fileno, self.close = self._file.fileno, self._file.close

        def pread(self, *arguments):
            future = self._file.pread(*arguments)
            Failing.tried += 1
            if Failing.tried % 2:
                return future
            future.get()
            return Refused()

    monkeypatch.setattr(kvikio, "CuFile", Failing)
    with Reader(0, direct=True, decode_on=decode_on) as reader:
        for _ in range(3):
            ticket = reader.submit(array)
            assert same(ticket.result().get(), array[...])
            assert ticket.report.reads_repeated > 0
