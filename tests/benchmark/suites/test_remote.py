"""If this fails, remote reads are timed that are wrong, or the benchmark's server is not one that readers can trust."""

import contextlib
import types
import urllib.error
import urllib.parse
import urllib.request

import numpy as np
import pytest

from linumpy.benchmark.command import run
from linumpy.benchmark.runner import Settings
from linumpy.benchmark.shared import volumes
from linumpy.benchmark.shared.loopback import serve
from linumpy.benchmark.suites import remote

pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, size in (("SHAPE", 48), ("CHUNK", 12), ("SHARD", 24)):
        monkeypatch.setattr(volumes, name, (size,) * 3)


def measure(folder, **options):
    with remote.remote_cases(folder=folder, scale=1, use_gpu=False, **options) as (where, cases):
        return run(cases, Settings(1), None, where)


def test_a_small_run(tmp_path):
    (result,) = measure(tmp_path, only=("zstd shards",))
    assert {entry.name: entry.verdict for entry in result.entries} == dict.fromkeys(
        ("obstore", "host", "zarr", "zarr-64"), "ok"
    )
    assert all("CPU s/GiB" in entry.note for entry in result.entries)
    assert list(tmp_path.iterdir()) == []


def test_whole_shards_are_laid_out_as_they_are_indexed(tmp_path, monkeypatch):
    """kvikio's RemoteFile is one of files here, where there is no kvikio."""
    opened = []

    class RemoteFile:
        def __init__(self, file, size):
            self.data = np.frombuffer(file.read_bytes(), np.uint8)
            assert len(self.data) == size
            opened.append(file.name)

        @classmethod
        def open_http(cls, url, size):
            (folder,) = tmp_path.iterdir()
            return contextlib.nullcontext(cls(folder / urllib.parse.unquote(url.split("/", 3)[3]), size))

        def pread(self, buffer, size):
            buffer[:] = self.data
            return types.SimpleNamespace(get=lambda: size)

    monkeypatch.setattr(remote.remote_shards, "_remote_file", lambda on_gpu: RemoteFile)
    monkeypatch.setattr(remote.remote_shards, "transfer_settings", contextlib.nullcontext)
    monkeypatch.setattr(remote.remote_shards, "REQUEST_NBYTES", 5000)
    (result,) = measure(tmp_path, only=("raw shards",))
    names = ("obstore", "host", "kvikio", "obstore-whole", "zarr", "zarr-64")
    assert {entry.name: entry.verdict for entry in result.entries} == dict.fromkeys(names, "ok")
    assert len(set(opened)) == 2


def test_wrong_results_are_noticed(tmp_path, monkeypatch):
    own, moved = remote._linumpy, remote._obstore
    monkeypatch.setattr(remote, "_linumpy", lambda *given: own(*given) + 1)
    monkeypatch.setattr(remote, "_obstore", lambda *given: moved(*given) - 1)
    (result,) = measure(tmp_path, only=("raw chunks",))
    assert [result.entry(name).verdict for name in ("host", "obstore", "zarr")] == ["WRONG", "WRONG", "ok"]


def test_the_server_answers_as_http_has_it(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a b").write_bytes(bytes(range(100)))
    (tmp_path / "outside").write_bytes(b"secret")

    def get(path, **headers):
        with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers), timeout=10) as response:
            return response.status, response.read(), response.headers

    with serve(tmp_path / "in", 2) as url:
        assert get("/a%20b")[:2] == (200, bytes(range(100)))
        status, body, headers = get("/a%20b", Range="bytes=10-19")
        assert (status, body, headers["Content-Range"]) == (206, bytes(range(10, 20)), "bytes 10-19/100")
        assert get("/a%20b", Range="bytes=-7")[1] == bytes(range(93, 100))
        assert get("/a%20b", Range="bytes=95-300")[1] == bytes(range(95, 100))
        assert headers["ETag"] == get("/a%20b")[2]["ETag"]
        for path, asked, status in (
            ("/b", {}, 404),
            ("/../outside", {}, 404),
            ("/a%20b", {"Range": "bytes=100-"}, 416),
        ):
            with pytest.raises(urllib.error.HTTPError) as caught:
                get(path, **asked)
            assert caught.value.code == status
