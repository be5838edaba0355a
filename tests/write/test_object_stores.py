"""Images that are written to object stores: the objects are those of a local folder, and a run ends complete or not."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import obstore
import pytest
import zarr
from obstore.store import from_url

from linumpy import convert_zarr, open_image, read_zarr, resample_zarr, stream
from linumpy.errors import ResumeError
from linumpy.io.output import objects
from linumpy.io.stores.remote import RemoteStore
from linumpy.resample import resumable
from linumpy.write.new_image import create_labels_group
from linumpy.write.writer import OmeZarrWriter, write_omezarr
from tests.support.script_runs import load

moto = pytest.importorskip("moto.server")
VALUES = np.random.default_rng(3).integers(0, 999, (40, 35, 50), dtype="u2")
SECRET = "sEcReTkEy"


@pytest.fixture(scope="module")
def server():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    yield f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    server.stop()


@pytest.fixture
def bucket(server, request):
    """A new bucket: its URL, the options, and a function that returns its objects."""
    name = f"b{abs(hash(request.node.name)) % 10**9}"
    urllib.request.urlopen(urllib.request.Request(f"{server}/{name}", method="PUT"), timeout=10).close()
    options = {"endpoint": server, "access_key_id": "AKIAME", "secret_access_key": SECRET, "region": "us-east-1"}
    return Bucket(f"s3://{name}", options)


class Bucket:
    def __init__(self, url, options):
        self.url, self.options = url, {"storage_options": options}
        self.store = from_url(url, client_options={"allow_http": True}, **options)
        self.environment = {
            "AWS_ENDPOINT": options["endpoint"], "AWS_ACCESS_KEY_ID": "AKIAME", "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip

    def objects(self, prefix=""):
        keys = [entry["path"] for entry in obstore.list(self.store, prefix).collect()]
        return {key.removeprefix(prefix): obstore.get(self.store, key).bytes().to_bytes() for key in keys}


def files(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    "how",
    [
        {"codec": "zstd", "levels": 3},
        {"codec": "none", "chunks": (16, 16, 16)},
        {"codec": "zstd+crc32c", "chunks": (8, 16, 16), "shards": (32, 16, 32), "levels": 2},
        {"ngff_version": "0.4", "codec": "blosc:lz4", "levels": 2},
        {"compressors": zarr.codecs.BloscCodec(cname="blosclz"), "chunks": (20, 35, 50)},
    ],
)  # fmt: skip
def test_objects_are_those_of_a_folder(bucket, tmp_path, how):
    """Byte for byte, also over an older image of another layout; nothing is written beside the image."""
    url = f"{bucket.url}/deep/i.ome.zarr"
    write_omezarr(url, VALUES[:, :9], (1, 1, 1), chunks=(7, 3, 11), levels=2, **bucket.options)
    obstore.put(bucket.store, "deep/i.ome.zarr2/x", b"")  # of another image, whose name begins alike
    assert write_omezarr(url, VALUES, (1, 2, 3), overwrite=True, **how, **bucket.options) == url
    write_omezarr(tmp_path / "i.ome.zarr", VALUES, (1, 2, 3), **how)
    written = {f"deep/i.ome.zarr/{k}": v for k, v in files(tmp_path / "i.ome.zarr").items()}
    assert bucket.objects() == {**written, "deep/i.ome.zarr2/x": b""}
    assert np.array_equal(read_zarr(url, device="cpu", **bucket.options), VALUES)


def test_regions_that_cut_chunks_and_zeros(bucket, tmp_path):
    for path, options in ((f"{bucket.url}/i", bucket.options), (tmp_path / "i", {})):
        chunked = {"chunks": (16, 16, 16), "levels": 2, "buffer_bytes": 2**20, **options}
        with OmeZarrWriter(path, VALUES.shape, "u2", (1, 1, 1), **chunked) as writer:
            writer[:16, :16, :16] = VALUES[:16, :16, :16]
            writer[:16, :16, :16] = np.zeros((16, 16, 16), "u2")  # the chunk is removed again
            for z in range(3, 40):
                writer[z] = VALUES[z]
    assert bucket.objects("i/") == files(tmp_path / "i")


def test_nothing_is_left_after_an_error_and_nobody_sees_the_beginning(bucket):
    url, seen = f"{bucket.url}/i", []
    place = objects.object_folder(url, bucket.options["storage_options"])

    def interrupted():
        with OmeZarrWriter(url, VALUES.shape, "u2", (1, 1, 1), **bucket.options) as writer:
            writer[...] = VALUES
            seen.extend(bucket.objects("i/"))
            with pytest.raises(ResumeError, match=r"is being written by another run, which was active . s ago"):
                write_omezarr(url, VALUES, (1, 1, 1), overwrite=True, **bucket.options)
            with pytest.raises(ResumeError, match="is being written"):
                objects.clean_objects(place)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "c" in "".join(seen)
    assert "zarr.json" not in seen
    assert not bucket.objects()


def test_what_is_refused(bucket, tmp_path):
    write_omezarr(f"{bucket.url}/i", VALUES, (1, 1, 1), **bucket.options)
    obstore.put(bucket.store, "other/table.csv", b"1,2")
    before = bucket.objects()
    for url, message in (
        (f"{bucket.url}/i", "exists: choose another URL, or replace it with overwrite=True"),
        (f"{bucket.url}/other", r"has objects \(table.csv\) but is no Zarr image"),
        (bucket.url, "is a whole bucket: name an image in it"),
        (f"{bucket.url}/i/..", "is a whole bucket: name an image in it"),
        (f"{bucket.url}/a.ozx", "an .ozx file is written to a local folder only"),
        ("https://user:word@host/a", "^https://host/a is no URL of a bucket"),
        ("file:///a/b", "^file:///a/b: images are written to folders and to s3"),
        ("s3://nobody-has-this/a", "s3://nobody-has-this/a cannot be listed: .* 404"),
    ):
        with pytest.raises((OSError, ValueError), match=message) as caught:
            write_omezarr(url, VALUES, (1, 1, 1), **bucket.options)
        assert SECRET not in str(caught.value)
    for wrong, message in (
        ({"endpoint": "localhost:9000"}, "endpoint='localhost:9000': pass a URL, such as https://localhost:9000"),
        ({"nonsense": "1"}, "or storage_options= do not fit it: Configuration key: 'nonsense' is not valid for store"),
    ):
        options = {**bucket.options["storage_options"], **wrong}
        with pytest.raises(ValueError, match=message):
            write_omezarr(f"{bucket.url}/j", VALUES, (1, 1, 1), storage_options=options)
    for output, source in ((f"{bucket.url}/i", f"{bucket.url}/i"), (f"{bucket.url}/i/x", f"{bucket.url}/i")):
        with pytest.raises(ValueError, match=r"the output .* and the source .* overlap"):
            resample_zarr(source, output, 2.0, overwrite=True, device="cpu", **bucket.options)
    assert bucket.objects() == before


def test_commands_and_functions_from_bucket_to_bucket(bucket, tmp_path, monkeypatch, capsys):
    """Resampling with labels, conversion, predictions and a step of a mosaic: the objects are those of a folder."""
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    write_omezarr(tmp_path / "i", VALUES, (2, 2, 2), chunks=(16, 16, 16), levels=2)
    (tmp_path / "i/notes.txt").write_text("kept")
    convert_zarr(tmp_path / "i", f"{bucket.url}/i", codec="none", device="cpu")
    convert_zarr(tmp_path / "i", tmp_path / "j", codec="none", device="cpu")
    assert bucket.objects("i/") == files(tmp_path / "j")

    def double(crops):
        return crops * 2

    for source, base in ((f"{bucket.url}/i", bucket.url), (str(tmp_path / "j"), str(tmp_path))):
        resample_zarr(source, f"{base}/r", 3.0, levels=2, device="cpu")
        stream.predict(double, source, f"{base}/p", shape=(16, 16, 16), overlap=4, device="cpu", channels=1)
        assert load("linum_aip").main([source, f"{base}/a", "--device", "cpu"]) == 0
        assert load("linum_convert").main([source, f"{base}/k", "--codec", "zstd", "--device", "cpu"]) == 0
    assert "stored in" in capsys.readouterr().out
    for name in "rpak":
        remote, local = bucket.objects(f"{name}/"), files(tmp_path / name)
        assert remote.keys() == local.keys()
        # Metadata name the source.
        assert {k for k in remote if remote[k] != local[k]} <= {"zarr.json"}
    assert np.array_equal(open_image(f"{bucket.url}/r").levels[1], open_image(tmp_path / "r").levels[1])


@pytest.mark.parametrize("version", ["0.4", "0.5", "0.6"])
def test_labels_are_resampled_to_a_bucket(bucket, tmp_path, version):
    how = {"chunks": (16, 16, 16), "ngff_version": version}
    write_omezarr(tmp_path / "i", VALUES, (2, 2, 2), **how)
    for name in ("deep", "tissue"):
        (tmp_path / "i/labels").mkdir(exist_ok=True)
        write_omezarr(tmp_path / "i/labels" / name, (VALUES > 500).astype("u1"), (2, 2, 2), **how)
    create_labels_group(tmp_path / "labels", ["deep", "tissue"], version)
    [file.rename(tmp_path / "i/labels" / file.name) for file in (tmp_path / "labels").iterdir()]
    resample_zarr(tmp_path / "i", f"{bucket.url}/r", 3.0, levels=2, device="cpu", **bucket.options)
    resample_zarr(tmp_path / "i", tmp_path / "r", 3.0, levels=2, device="cpu")
    assert bucket.objects("r/") == files(tmp_path / "r")
    assert "labels/tissue/1/c/0/0/0" in {key.replace("1/0/0/0", "1/c/0/0/0") for key in bucket.objects("r/")}


def check_same(bucket, name, other):
    """Two images have the same objects, apart from their names."""
    renamed = {
        k: v.replace(f'"{other}"'.encode(), f'"{name}"'.encode()) for k, v in bucket.objects(f"{other}/").items()
    }
    assert bucket.objects(f"{name}/") == renamed


RUN = """
import sys, time
from linumpy import resample_zarr
from linumpy.io.output import objects
objects._BEAT_SECONDS, objects._LEASE_SECONDS = 0.2, 1.0
done = 0
def progress(nbytes):
    global done
    done += nbytes
    print(done, flush=True)
    time.sleep(0.1)
resample_zarr(sys.argv[1], sys.argv[2], 1.5, device="cpu", memory_bytes=1 << 17, chunks=(8, 8, 8), codec="none",
              progress=progress)
"""


def test_a_killed_run_is_continued_from_its_journal(bucket, monkeypatch):
    """The image has the bytes of a run that was not killed, and complete blocks are not made again."""
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(objects, "_LEASE_SECONDS", 1.0)
    source, target = f"{bucket.url}/i", f"{bucket.url}/r"
    write_omezarr(source, VALUES, (1, 1, 1), chunks=(16, 16, 16))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", RUN, source, target]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        for _ in range(3):
            assert run.stdout.readline(), run.communicate()
        time.sleep(0.5)
        run.send_signal(signal.SIGKILL)
    left = bucket.objects("r/")
    assert "zarr.json" not in left
    assert not any(SECRET.encode() in value for value in left.values())
    text = json.loads(left[".linumpy-unfinished"])["parts"][0]
    complete = np.argwhere(resumable._mask(text, (4, 3, 5))).tolist()
    assert 3 <= len(complete) < 60
    time.sleep(2.0)  # S3 tells whole seconds
    options = {"device": "cpu", "chunks": (8, 8, 8), "codec": "none", "memory_bytes": 1 << 17}
    with pytest.raises(ResumeError, match="the beginning of another request, which differs in"):
        resample_zarr(source, target, 1.4, **options)
    stored, put = [], RemoteStore.put
    monkeypatch.setattr(RemoteStore, "put", lambda self, key, *more: stored.append(key) or put(self, key, *more))
    resample_zarr(source, target, 1.5, **options)
    made = [key for key in stored if key.startswith("0/c/")]
    assert len(made) == 60 - len(complete)
    assert not {"0/c/" + "/".join(map(str, index)) for index in complete} & set(made)
    resample_zarr(source, f"{bucket.url}/once", 1.5, **options)
    check_same(bucket, "r", "once")


def test_another_source_and_the_command_that_cleans(bucket, tmp_path, monkeypatch, capsys, caplog):
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    source, target = f"{bucket.url}/i", f"{bucket.url}/r"
    write_omezarr(source, VALUES, (1, 1, 1), chunks=(16, 16, 16))

    def stop(_):
        raise KeyboardInterrupt

    def stopped():
        with pytest.raises(KeyboardInterrupt):
            resample_zarr(source, target, 1.5, device="cpu", memory_bytes=1 << 17, chunks=(8, 8, 8), progress=stop)

    stopped()
    assert "is incomplete: the same call continues it, and linum-clean removes it" in caplog.text
    write_omezarr(source, VALUES[::-1].copy(), (1, 1, 1), chunks=(16, 16, 16), overwrite=True)
    stopped()
    assert "it was made from another source data" in caplog.text
    assert load("linum_clean").main([target]) == 0
    assert "removed what a stopped run had left" in capsys.readouterr().out
    assert not bucket.objects("r/")
    assert load("linum_clean").main([target]) == 0
    assert load("linum_clean").main([str(tmp_path / "r")]) == 0
    assert capsys.readouterr().out.count("no stopped run has left anything") == 2
    # A folder, too: complete blocks of a stopped run.
    with pytest.raises(KeyboardInterrupt):
        resample_zarr(source, tmp_path / "r", 1.5, device="cpu", memory_bytes=1 << 17, chunks=(8, 8, 8), progress=stop)
    assert [*tmp_path.iterdir()]
    assert load("linum_clean").main([str(tmp_path / "r")]) == 0
    assert not [*tmp_path.iterdir()]


def test_a_run_that_was_taken_over_stops(bucket, monkeypatch):
    """It finds the journal of another run in place of its own, and leaves the objects to that run."""
    url = f"{bucket.url}/i"
    monkeypatch.setattr(objects, "_BEAT_SECONDS", 0.02)

    def taken_over():
        with OmeZarrWriter(url, VALUES.shape, "u2", (1, 1, 1), **bucket.options) as writer:
            writer[...] = VALUES
            obstore.put(bucket.store, "i/.linumpy-unfinished", b'{"run": "another"}')
            time.sleep(0.3)

    with pytest.raises(ResumeError, match="is being written by another run: this run stops"):
        taken_over()
    assert "zarr.json" not in bucket.objects("i/")
    assert "0/zarr.json" in bucket.objects("i/")


def test_two_runs_that_begin_at_the_same_time(bucket):
    """One of them makes the image."""
    outcomes, barrier = [], threading.Barrier(6)

    def write(value):
        barrier.wait()
        try:
            write_omezarr(f"{bucket.url}/i", np.full((8, 8, 8), value, "u1"), (1, 1, 1), **bucket.options)
            outcomes.append(value)
        except (ResumeError, FileExistsError) as error:
            outcomes.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(1, 7)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    made = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert len(made) == 1
    assert set(np.unique(read_zarr(f"{bucket.url}/i", device="cpu", **bucket.options))) == set(made)


def test_a_store_that_does_not_answer_ends_a_run(bucket, monkeypatch):
    monkeypatch.setattr(objects, "_BEAT_SECONDS", 0.02)
    monkeypatch.setattr(objects, "_SILENT_SECONDS", 0.1)
    put = RemoteStore.put

    def silent():
        with OmeZarrWriter(f"{bucket.url}/i", VALUES.shape, "u2", (1, 1, 1), **bucket.options) as writer:
            monkeypatch.setattr(RemoteStore, "put", lambda *_: (_ for _ in ()).throw(OSError("no answer")))
            time.sleep(0.5)
            monkeypatch.setattr(RemoteStore, "put", put)
            writer[...] = VALUES

    with pytest.raises(ResumeError, match="the store did not answer for 0 s: this run stops"):
        silent()
    assert not any(key.startswith("0/c") for key in bucket.objects("i/"))


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on, except that some writes are answered by an error."""

    target, status, after, writes, body = "", 0, 0, 0, b""

    def _pass(self):
        length = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(length)
        kind = type(self)
        kind.writes += self.command == "PUT"
        if kind.status and self.command == "PUT" and kind.writes > kind.after:
            self._answer(kind.status, {}, kind.body)
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        headers.setdefault("Content-Type", "application/octet-stream")  # else the body would be taken for a form
        request = urllib.request.Request(kind.target + self.path, data or None, headers, method=self.command)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                self._answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            self._answer(error.code, error.headers, error.read())

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815

    def _answer(self, status, headers, body):
        self.send_response(status)
        for name, value in dict(headers).items():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(dict(headers).get("Content-Length", len(body))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (403, b"<Error><Code>AccessDenied</Code></Error>", PermissionError),
        (507, b"quota", OSError),
        (404, b"", OSError),
    ],
)
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_bucket_that_refuses(bucket, status, body, error, after, caplog):
    """Read only, full, or gone in the middle: one error with the URL, without credentials; no image appears."""
    options = bucket.options["storage_options"]
    kind = type("OneProxy", (Proxy,), {"target": options["endpoint"], "status": status, "after": after, "body": body})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        through = {**options, "endpoint": f"http://127.0.0.1:{proxy.server_port}", "retry_config": {"max_retries": 1}}
        with caplog.at_level(logging.DEBUG), pytest.raises(error) as caught:
            write_omezarr(f"{bucket.url}/i", VALUES, (1, 1, 1), chunks=(16, 16, 16), storage_options=through)
        proxy.shutdown()
    assert f"{bucket.url}/i" in str(caught.value)
    assert SECRET not in str(caught.value) + caplog.text
    assert not bucket.objects()


@pytest.mark.parametrize("missing", [("If-Match",), ("If-None-Match", "If-Match")])
def test_a_store_without_conditional_requests(bucket, caplog, missing):
    """It answers 501; the image is written, with one warning."""
    options = bucket.options["storage_options"]

    class WithoutConditions(Proxy):
        target = options["endpoint"]

        def _pass(self):
            self.status = 501 if any(name in self.headers for name in missing) else 0
            type(self).status = self.status
            super()._pass()

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815

    with ThreadingHTTPServer(("127.0.0.1", 0), WithoutConditions) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        through = {**options, "endpoint": f"http://127.0.0.1:{proxy.server_port}", "retry_config": {"max_retries": 0}}
        write_omezarr(f"{bucket.url}/i", VALUES, (1, 1, 1), storage_options=through)
        proxy.shutdown()
    assert [record.message for record in caplog.records if "no conditional requests" in record.message] == [
        f"{bucket.url}/i: this store has no conditional requests; make sure that only one run writes there"
    ]
    assert np.array_equal(read_zarr(f"{bucket.url}/i", device="cpu", **bucket.options), VALUES)


ON_A_CLUSTER = """
import sys
from linumpy import resample_zarr
from linumpy.io.output import objects
objects._BEAT_SECONDS, objects._LEASE_SECONDS = 0.2, 1.0
def progress(nbytes):
    print(nbytes, flush=True)
resample_zarr(*sys.argv[1:3], 1.5, device="cpu", chunks=(8, 8, 8), codec="none", memory_bytes=1 << 18,
              distributed=sys.argv[3], progress=progress)
"""


def test_workers_without_a_shared_disk(bucket, dask_cluster):
    write_omezarr(f"{bucket.url}/i", VALUES, (1, 1, 1), chunks=(16, 16, 16), **bucket.options)
    options = {"device": "cpu", **bucket.options}
    convert_zarr(f"{bucket.url}/i", f"{bucket.url}/c", codec="none", distributed=dask_cluster, **options)
    assert np.array_equal(read_zarr(f"{bucket.url}/c", **options), VALUES)
    for name, cluster in (("r", dask_cluster), ("once", None)):
        resample_zarr(f"{bucket.url}/c", f"{bucket.url}/{name}", 1.5, codec="none", distributed=cluster, **options)
    check_same(bucket, "r", "once")


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["a worker", "workers", "scheduler", "caller"])
def test_processes_of_a_cluster_are_killed(bucket, monkeypatch, killed):
    """From bucket to bucket on dask, while processes are killed: the bytes are those of a run in one process."""
    distributed = pytest.importorskip("distributed")
    environment = {**os.environ, **bucket.environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(objects, "_LEASE_SECONDS", 1.0)
    source, target = f"{bucket.url}/i", f"{bucket.url}/r"
    write_omezarr(source, VALUES, (1, 1, 1), chunks=(16, 16, 16))

    def run(cluster, kill):
        command = [sys.executable, "-c", ON_A_CLUSTER, source, target, cluster.scheduler_address]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as it:
            assert it.stdout.readline(), it.communicate()
            kill(it)
            _, errors = it.communicate(timeout=100)
        return it.returncode, errors

    def kill(it):
        if killed == "caller":
            it.kill()
        elif killed == "scheduler":
            cluster.close()
        else:
            processes = [worker.process.process for worker in cluster.workers.values()]
            [process.kill() for process in processes[: 1 if killed == "a worker" else 2]]

    options = {"processes": True, "n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster:
        code, errors = run(cluster, kill)
    assert SECRET not in errors
    assert (code == 0) == (killed in ("a worker", "workers")), errors
    if code:
        assert "zarr.json" not in bucket.objects("r/")
        time.sleep(2.0)
        with distributed.LocalCluster(**options) as cluster:
            code, errors = run(cluster, lambda _: None)
        assert code == 0, errors
    resample_zarr(source, f"{bucket.url}/once", 1.5, device="cpu", chunks=(8, 8, 8), codec="none")
    check_same(bucket, "r", "once")


@pytest.mark.parametrize("spelling", ["i/", "x/../i", "x/%2e%2e/i", "%69", "i/inside"])
def test_a_source_is_not_replaced_whatever_its_name(bucket, spelling, monkeypatch):
    """With overwrite=True the target is removed first; it is refused before if the source is there."""
    write_omezarr(f"{bucket.url}/i", VALUES, (1, 1, 1), **bucket.options)
    before, options = bucket.objects(), {"overwrite": True, "device": "cpu", **bucket.options}
    store = zarr.storage.ObjectStore(bucket.store, read_only=True)
    url, target = f"{bucket.url}/i", f"{bucket.url}/{spelling}"
    with pytest.raises(ValueError, match="overlap: choose another URL"):
        resample_zarr(url, target, 2.0, **options)
    with pytest.raises(ValueError, match="overlap: choose another URL"):
        convert_zarr(url, target, **options)
    with pytest.raises(ValueError, match="overlap: choose another URL"):
        stream.predict(np.negative, url, target, shape=(8, 8, 8), **options)
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    assert load("linum_aip").main([url, target, "--overwrite"]) == 2
    if spelling != "i/inside":
        with pytest.raises(ValueError, match="overlap: choose another URL"):
            convert_zarr((store, "i"), target, **options)
    assert bucket.objects() == before


def test_journals_are_not_copied_and_broken_ones_are_replaced(bucket, tmp_path):
    write_omezarr(f"{bucket.url}/i", VALUES, (1, 1, 1), **bucket.options)
    obstore.put(bucket.store, "i/.linumpy-unfinished", b"{}")
    text = b'{"released": true, "request": {}, "parts": ["@"]}'
    obstore.put(bucket.store, "j/.linumpy-unfinished", text)
    for target in (f"{bucket.url}/j", tmp_path / "j"):
        convert_zarr(f"{bucket.url}/i", target, device="cpu", **bucket.options)
    assert bucket.objects("j/") == files(tmp_path / "j")
    assert ".linumpy-unfinished" not in bucket.objects("j/")
