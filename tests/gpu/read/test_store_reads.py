"""If this fails, arrays in zarr's own stores are read wrongly, or interrupts and lost arrays are (oracle: zarr)."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import zarr
from numcodecs.checksum32 import CRC32C
from zarr.abc.store import SuffixByteRequest
from zarr.storage import FsspecStore, LocalStore, MemoryStore, WrapperStore, ZipStore

import linumpy
from linumpy.core import requests
from linumpy.errors import ChunkError
from linumpy.gpu.read.reader import Reader
from linumpy.gpu.zarr_io import read_zarr
from tests.support.gpu import reference
from tests.support.object_server import Faults, serve

VALUES = np.random.default_rng(0).integers(0, 999, (24, 20, 18)).astype(np.uint16)
KINDS = {
    "raw": {"compressors": None},
    "zstd": {"compressors": zarr.codecs.ZstdCodec()},
    "raw shards": {"compressors": None, "shards": (16, 16, 16)},
    "blosc shards": {"compressors": zarr.codecs.BloscCodec(cname="lz4"), "shards": (16, 16, 16)},
    "v2": {"zarr_format": 2, "compressors": None},
}


class Elsewhere(LocalStore):
    """A store whose keys are in other files than those of a local folder."""

    def __init__(self, root, **options):
        super().__init__(root, **options)

    async def _at(self, method, key, *more):
        return await getattr(LocalStore, method)(self, f"elsewhere/{key}", *more)

    async def get(self, key, prototype=None, byte_range=None):
        return await self._at("get", key, prototype, byte_range)

    async def set(self, key, value):
        return await self._at("set", key, value)

    async def exists(self, key):
        return await self._at("exists", key)


@pytest.fixture(params=["memory", "fsspec", "subclass", "wrapper", "zip", "icechunk"])
def store(request, tmp_path):
    """Kinds of stores, which hold the same arrays."""
    name = request.param
    if name == "fsspec":
        pytest.importorskip("fsspec")
    if name == "icechunk":
        icechunk = pytest.importorskip("icechunk")
        repository = icechunk.Repository.create(icechunk.in_memory_storage())
        session = repository.writable_session("main")
        fill(session.store, v2=False)
        session.commit("arrays")
        return repository.readonly_session("main").store
    if name == "zip":
        with ZipStore(tmp_path / "a.zip", mode="w") as writable:
            fill(writable)
        return ZipStore(tmp_path / "a.zip", read_only=True)
    made = {
        "memory": MemoryStore,
        "fsspec": lambda: FsspecStore.from_url(f"memory://{tmp_path}"),
        "subclass": lambda: Elsewhere(tmp_path),
        "wrapper": lambda: WrapperStore(MemoryStore()),
    }[name]()
    fill(made)
    return made


def fill(store, *, v2=True):
    for name, how in KINDS.items():
        if name == "v2" and not v2:
            continue
        array = zarr.create_array(store, name=name, shape=VALUES.shape, chunks=(8, 8, 8), dtype="u2", fill_value=7,
                                  **how)  # fmt: skip
        array[:16] = VALUES[:16]


@pytest.mark.needs_core
def test_any_store_of_zarr_is_read_by_the_core(store):
    for name in KINDS:
        if name == "v2" and "Icechunk" in type(store).__name__:
            continue
        array = zarr.open_array(store, path=name, mode="r")
        for region in (np.s_[:], np.s_[3:20, 5, 1:17]):
            expected = array[region]
            values, report = read_zarr((store, name), region=region, device="cpu", strict=True, return_report=True)
            assert np.array_equal(values, expected)
            assert report.engine == f"requests by zarr's {type(store).__name__}, into host memory"
        assert np.array_equal(reference.execute(reference.Job(array, np.s_[3:20])), array[3:20])


@pytest.mark.needs_core
def test_requests_to_a_store_are_as_few_as_may_be():
    """One for each index of a shard, and one for what lies together; none for sizes."""
    asked = []

    class Counting(WrapperStore):
        async def get(self, key, prototype, byte_range=None):
            asked.append((key, byte_range))
            return await super().get(key, prototype, byte_range)

        async def getsize(self, key):
            raise AssertionError(f"the size of {key}")

    store = Counting(MemoryStore())
    fill(store)
    for name, most in (("raw", 2 * 3 * 3), ("blosc shards", 2 * 4)):
        array = zarr.open_array(store, path=name, mode="r")
        asked.clear()
        assert np.array_equal(read_zarr(array, region=np.s_[:16], device="cpu"), VALUES[:16])
        assert len(asked) == most
        indexes = [key for key, wanted in asked if isinstance(wanted, SuffixByteRequest)]
        assert len(indexes) == (most // 2 if "shards" in name else 0)


def test_errors_of_a_store_name_the_object():
    failing = []

    class Failing(WrapperStore):
        async def get(self, key, prototype, byte_range=None):
            if key.endswith("c/0/1/1") and failing:
                raise PermissionError("not for you")
            return await super().get(key, prototype, byte_range)

        def __str__(self):
            return "s3://me:secret@bucket"

    store = Failing(MemoryStore())
    fill(store)
    failing.append(True)
    for name in ("raw", "zstd", "blosc shards"):
        with pytest.raises(ChunkError, match=rf"s3://bucket/{name}/c/0/1/1 cannot be read: .*not for you") as caught:
            read_zarr((store, name), device="cpu")
        assert "secret" not in str(caught.value)
        part = np.s_[:8, :8, :8]
        assert np.array_equal(read_zarr((store, name), region=part, device="cpu"), VALUES[part])


@pytest.mark.parametrize("more", [-1, 1])
def test_a_store_that_brings_other_bytes_than_asked_for(more):
    class Wrong(WrapperStore):
        async def get(self, key, prototype, byte_range=None):
            found = await super().get(key, prototype, byte_range)
            if found is None or not key.endswith("c/0/1/1") or isinstance(byte_range, SuffixByteRequest):
                return found
            return prototype.buffer.from_bytes((found.to_bytes() + b"x")[: len(found) + more])

    store = Wrong(MemoryStore())
    fill(store)
    for name in ("raw", "raw shards"):
        with pytest.raises(ChunkError, match=rf"{name}/c/0/1/1:? .* bytes"):
            read_zarr((store, name), device="cpu")


@pytest.mark.needs_core
def test_an_array_that_is_gone_is_no_fill_value(tmp_path):
    pytest.importorskip("obstore")
    memory = MemoryStore()
    fill(memory)
    for name in KINDS:
        zarr.create_array(tmp_path / name, shape=VALUES.shape, chunks=(8, 8, 8), dtype="u2", fill_value=7)
    with serve(tmp_path) as served, Reader("cpu") as reader:
        for name in ("raw", "raw shards"):
            layouts = [reader.layout_of(source) for source in ((memory, name), f"{served.url}/{name}")]
            served.requests.clear()
            assert (reader.submit(layouts[1]).result() == 7).all()
            metadata = [path for _, path, _ in served.requests if path.endswith("zarr.json")]
            assert len(metadata) == 1  # not one for each missing chunk
            for key in list(memory._store_dict):
                if key.startswith(f"{name}/"):
                    del memory._store_dict[key]
            (tmp_path / name / "zarr.json").unlink()
            for layout in layouts:
                with pytest.raises(ChunkError, match=rf"/{name} are missing, and so is {name}/zarr.json: is the array"):
                    reader.submit(layout).result()


def test_bytes_are_lent_until_they_are_used():
    store = MemoryStore()
    fill(store)
    assert np.array_equal(read_zarr((store, "zstd"), device="cpu")[:16], VALUES[:16])
    end = time.monotonic() + 10
    while requests._STORES._lent and time.monotonic() < end:
        time.sleep(0.001)
    assert not requests._STORES._lent


@pytest.mark.needs_core
def test_an_interrupt_does_not_wait_for_requests(tmp_path):
    pytest.importorskip("obstore")
    zarr.create_array(tmp_path / "a", shape=VALUES.shape, chunks=(8, 8, 8), dtype="u2", compressors=None)[...] = VALUES
    program = """
import sys, time
import linumpy
try:
    linumpy.read_zarr(sys.argv[1], device="cpu")
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.readline()
assert linumpy.read_zarr(sys.argv[1], device="cpu")[0, 0, 0] == int(sys.argv[2])
"""
    with serve(tmp_path) as served:
        served.faults = Faults("/c/", hold=threading.Event())
        with subprocess.Popen(
            [sys.executable, "-c", program, f"{served.url}/a", str(VALUES[0, 0, 0])], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "LINUMPY_DEVICE": "cpu"},
        ) as child:  # fmt: skip
            while served.under_way < 20:
                time.sleep(0.01)
            child.send_signal(signal.SIGINT)
            assert child.stdout.readline() == "interrupted\n"  # while all requests are held
            asked = len(served.of("/c/"))
            assert served.under_way == asked
            served.faults.hold.set()
            child.communicate("\n", timeout=30)
            assert child.returncode == 0
        assert len(served.of("/c/")) == asked + 27  # the interrupted read asked for nothing more


def test_predictions_from_a_url_with_options(tmp_path):
    pytest.importorskip("obstore")
    from linumpy import stream
    from linumpy.write.writer import write_omezarr

    write_omezarr(tmp_path / "image", VALUES, (4, 2, 2), levels=1, chunks=(8, 8, 8))
    options = {"shape": (8, 8, 8), "device": "cpu"}

    def model(batch):
        return batch[:, 0] * 2

    with serve(tmp_path) as served:
        given = {"client_options": {"default_headers": {"authorization": "Basic token"}}}
        stream.predict(model, f"{served.url}/image", tmp_path / "far", storage_options=given, **options)
        assert served.credentials == {"Basic token"}
    stream.predict(model, tmp_path / "image", tmp_path / "near", **options)
    far, near = (linumpy.open_image(tmp_path / name).levels[0][...] for name in ("far", "near"))
    assert np.array_equal(far, near)


def test_ranges_of_nginx(tmp_path):
    """A real server: ranges, ETags, missing objects."""
    pytest.importorskip("obstore")
    import shutil

    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed")
    fill(LocalStore(tmp_path / "www"))
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for folder in ("body", "proxy", "fastcgi", "uwsgi", "scgi"):
        (tmp_path / folder).mkdir()
    paths = "".join(f"{n}_temp_path {tmp_path}/{n};" for n in ("proxy", "fastcgi", "uwsgi", "scgi"))
    user = "user root;" if os.geteuid() == 0 else ""
    (tmp_path / "nginx.conf").write_text(
        f"{user} daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log; events {{}}"
        f"http {{ access_log off; client_body_temp_path {tmp_path}/body; {paths}"
        f"server {{ listen 127.0.0.1:{port}; root {tmp_path}/www; }} }}"
    )
    with subprocess.Popen([nginx, "-e", f"{tmp_path}/error.log", "-c", f"{tmp_path}/nginx.conf"]) as server:
        try:
            end = time.monotonic() + 10
            while time.monotonic() < end:
                with socket.socket() as probe:
                    if not probe.connect_ex(("127.0.0.1", port)):
                        break
                time.sleep(0.02)
            for name in KINDS:
                url = f"http://127.0.0.1:{port}/{name}"
                values, report = read_zarr(url, device="cpu", strict=True, return_report=True)
                assert np.array_equal(values[:16], VALUES[:16])
                assert (values[16:] == 7).all()
                assert "obstore" in report.engine
                assert np.array_equal(reference.execute(reference.Job(url, np.s_[2:20])), values[2:20])
        finally:
            server.terminate()


@pytest.mark.parametrize("location", ["start", "end"])
def test_checksums_of_zarr_v2_before_and_behind_a_chunk(tmp_path, location):
    checksum = CRC32C(location=location)
    array = zarr.create_array(
        tmp_path / "a", shape=(8, 8), chunks=(4, 8), dtype="u2", zarr_format=2, compressors=checksum
    )
    array[...] = np.arange(64).reshape(8, 8)
    assert (read_zarr(tmp_path / "a", device="cpu") == array[...]).all()


def test_options_of_a_store_are_refused_for_what_is_no_url(tmp_path):
    array = zarr.create_array(tmp_path / "a", shape=(4,), chunks=(4,), dtype="u1")
    with Reader(device="cpu") as reader:
        for source in (array, tmp_path / "a", reader.layout_of(array)):
            with pytest.raises(ValueError, match="storage_options= are for URLs"):
                reader.layout_of(source, storage_options={"skip_signature": True})
