"""If this fails, arrays in object stores are read wrongly, or a server's faults are hidden (oracle: zarr-python)."""

import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import types
from concurrent.futures import CancelledError, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import linumpy
from linumpy.core import requests
from linumpy.errors import ChunkError, SourceError, UnsupportedLayoutError
from linumpy.gpu.read.engines import direct as direct_reads
from linumpy.gpu.read.reader import Reader
from linumpy.gpu.read.shared import shared_reader
from linumpy.gpu.zarr_io import read_zarr
from linumpy.io.ome import open_image, open_images
from linumpy.io.open import open_source
from linumpy.io.source import describe_source, open_node
from linumpy.io.stores import remote
from linumpy.resample.convert_zarr import convert_zarr
from linumpy.resample.identity import identify_data
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.writer import write_omezarr
from tests.support import budget
from tests.support.gpu import reference
from tests.support.object_server import Faults, serve
from tests.support.stores import cases, encoded_cases, same, write

obstore = pytest.importorskip("obstore")
from obstore.store import HTTPStore, MemoryStore  # noqa: E402
from zarr.core.sync import sync  # noqa: E402
from zarr.storage import ObjectStore  # noqa: E402

VALUES = np.random.default_rng(0).integers(0, 999, (24, 40, 36)).astype(np.uint16)
#: How arrays are stored: chunks as objects and in shards, raw and encoded.
KINDS = {
    "raw": {"compressors": None},
    "zstd": {"compressors": zarr.codecs.ZstdCodec()},
    "raw shards": {"compressors": None, "shards": (16, 16, 16)},
    "blosc shards": {"compressors": zarr.codecs.BloscCodec(cname="lz4"), "shards": (16, 16, 16)},
}
FAST = {"backoff": {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=2)}}


def options(retries=6):
    return {"retry_config": {"max_retries": retries, **FAST}}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objects")
    for name, how in KINDS.items():
        array = zarr.create_array(folder / name, shape=VALUES.shape, chunks=(8, 8, 8), dtype="u2", fill_value=7, **how)
        array[:16] = VALUES[:16]
    (folder / "bucket").symlink_to(folder)
    with serve(folder) as server:
        server.folder = folder
        yield server


@pytest.fixture(autouse=True)
def without_faults(request):
    if "served" in request.fixturenames:
        server = request.getfixturevalue("served")
        server.faults = Faults()
        server.requests.clear()
        server.most_under_way = 0


def wait_for(over):
    end = time.monotonic() + 20
    while not over():
        assert time.monotonic() < end
        time.sleep(0.001)


def expected():
    values = VALUES.copy()
    values[16:] = 7
    return values


@given(case=st.one_of(cases(), encoded_cases()), on_device=st.booleans(), kept=st.booleans())
@settings(
    max_examples=budget.examples(40), deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
def test_any_array_is_read_as_from_its_folder(served, case, on_device, kept):
    with tempfile.TemporaryDirectory(dir=served.folder) as work:
        wanted = np.asarray(write(case, Path(work, "a"))[case.region])
        url = f"{served.url}/{Path(work).name}/a"
        by_zarr = zarr.open_array(ObjectStore(HTTPStore(served.url, client_options={"allow_http": True})), mode="r",
                                  path=f"{Path(work).name}/a")[case.region]  # fmt: skip
        assert np.asarray(by_zarr).tobytes() == wanted.tobytes()
        if on_device and open_source(url).ndim:
            job = reference.Job(url, case.region, cache_bytes=2**20 if kept else 0)
            assert same(reference.execute(job), wanted)
        else:
            assert same(np.asarray(read_zarr(url, region=case.region, device="cpu")), wanted)


@pytest.mark.needs_core
@pytest.mark.parametrize("kind", KINDS)
def test_requests_are_as_few_as_may_be(served, kind):
    """A request for each chunk without shards; with them one for the index, and one for chunks that lie together."""
    region = np.s_[3:14, 10:30]
    values, report = read_zarr(f"{served.url}/{kind}", region=region, device="cpu", return_report=True)
    assert np.array_equal(values, expected()[region])
    assert (report.backend, report.fallback.partition(":")[0]) == ("linumpy", "host memory")
    assert report.engine == "requests by obstore, into host memory"
    asked = served.of("/c/")
    objects = {path for _, path, _ in asked}
    assert report.files_opened == len(asked)
    if "shards" in kind:
        assert len(objects) == 6
        assert len(asked) <= 6 + 2 * 3 * 5  # no more than the tasks that chunks are cut into
    else:
        assert len(asked) == len(objects) == 2 * 3 * 5


def test_indexes_of_shards_are_asked_for_at_the_same_time(served, monkeypatch):
    """Those of the six shards with chunks all come before one is answered."""
    together, fetch = threading.Barrier(6, timeout=20), requests._STORES._fetch

    def wait_for_all(request):
        if request.offset < 0:
            together.wait()
        fetch(request)

    with Reader(device="cpu") as reader:
        layout = reader.layout_of(f"{served.url}/raw shards")
        monkeypatch.setattr(requests._STORES, "_fetch", wait_for_all)
        values = reader.submit(layout, np.s_[:16, :, :32]).result()
    assert np.array_equal(values, VALUES[:16, :, :32])


@pytest.mark.needs_core
def test_all_open_the_same_way(served, tmp_path):
    url, region = f"{served.url}/zstd", np.s_[2:20, 5:9, 1:35]
    store = ObjectStore(HTTPStore(served.url, client_options={"allow_http": True}), read_only=True)
    memory = MemoryStore()
    for file in sorted((served.folder / "raw shards").rglob("*")):
        if file.is_file():
            obstore.put(memory, f"in/it/{file.relative_to(served.folder / 'raw shards')}", file.read_bytes())
    sources = [url, (store, "zstd"), zarr.open_array(store, path="zstd", mode="r"), (ObjectStore(memory), "in/it")]
    with Reader("cpu") as reader:
        for source in sources:
            assert np.array_equal(reader.submit(source, region).result(), expected()[region])
            assert np.array_equal(read_zarr(source, region=region, device="cpu", strict=True), expected()[region])
        many = reader.submit_many([url, sources[3]], np.array([[[0, 9]] * 3, [[8, 24]] * 3]))
        assert np.array_equal(many[0].result(), expected()[:9, :9, :9])
        assert np.array_equal(many[1].result(), expected()[8:, 8:24, 8:24])
    assert describe_source(open_source(url)) == url
    assert identify_data(open_source(sources[3])) is not None
    assert identify_data(open_source(url)) is None  # an HTTP server does not list
    read_again = open_source(pickle.loads(pickle.dumps(open_source(url))))
    assert np.array_equal(read_zarr(read_again, device="cpu"), expected())


@pytest.mark.needs_core
@pytest.mark.parametrize("kind", KINDS)
def test_zarr_s_own_arrays_are_accelerated(served, kind):
    store = ObjectStore(HTTPStore(served.url, client_options={"allow_http": True}), read_only=True)
    with shared_reader("cpu") as reader, linumpy.accelerate():
        array, jobs = zarr.open_array(store, path=kind, mode="r"), reader.stats().jobs
        for region in (np.s_[:], np.s_[3:20, 5, 1:30]):
            assert np.array_equal(array[region], expected()[region])
        assert reader.stats().jobs == jobs + 2
        served.faults = Faults("/c/0/1/1", status=403)
        with pytest.raises(obstore.exceptions.PermissionDeniedError) as caught:
            array[:]
        assert "c/0/1/1 cannot be read" in caught.value.__notes__[0]


def test_images_streams_and_resampling(served, tmp_path):
    from linumpy import stream
    from linumpy.write.writer import write_omezarr

    write_omezarr(served.folder / "image", VALUES, (4, 2, 2), levels=2, chunks=(8, 8, 8), overwrite=True)
    url, given_options = f"{served.url}/image", options()
    image = linumpy.open_image(url, storage_options=given_options)
    assert np.array_equal(image.levels[0][...], VALUES)
    config = stream.Config(
        batch_size=1, host_buffer_bytes=2**22, device_buffer_bytes=2**22, dtype="stored", device="cpu",
        storage_options=given_options,
    )  # fmt: skip
    assert "storage_options" not in repr(config)
    with stream.Pipeline(config) as pipeline:
        pipeline.push(stream.Sample(url, ((3, 19), (4, 20), (5, 21))))
        assert np.array_equal(pipeline.pop().numpy()[0], VALUES[3:19, 4:20, 5:21])
    for source, target in ((url, "far"), (served.folder / "image", "near")):
        more = {"storage_options": given_options} if source == url else {}
        resample_zarr(source, tmp_path / target, 4.0, device="cpu", **more)
    far, near = (linumpy.open_image(tmp_path / name).levels[0][...] for name in ("far", "near"))
    assert np.array_equal(far, near)


@pytest.mark.needs_core
def test_samplers(served):
    from linumpy.sampling import create_sampler

    given = {"seed": 1, "spline_order": 0}
    sampler = create_sampler("zarr", "cpu", source=f"{served.url}/raw", storage_options=options(), **given)
    local = create_sampler("zarr", "cpu", source=served.folder / "raw", **given)
    for one, other in zip(sampler.sample(50), local.sample(50), strict=True):
        assert np.array_equal(one, other)


def test_the_device_gets_what_a_reader_by_gpudirect_storage_reads_from_elsewhere(served, monkeypatch):
    monkeypatch.setattr(direct_reads, "kvikio_mode", lambda: ("cufile", ""))
    for kind in KINDS:
        job = reference.Job(f"{served.url}/{kind}", np.s_[1:23], direct=True)
        assert np.array_equal(reference.execute(job, reference.PreadFile), expected()[1:23])


@pytest.mark.needs_core
def test_kept_chunks_are_read_again_where_the_object_is_another(served, tmp_path):
    for name, codec in (("kept raw", None), ("kept", zarr.codecs.ZstdCodec())):
        folder = served.folder / name
        array = zarr.create_array(folder, shape=VALUES.shape, chunks=(8, 40, 36), dtype="u2", compressors=codec)
        array[...] = VALUES
        with reference.fake_device(1), Reader(0, cache_bytes=2**20) as reader:
            for _ in range(2):
                assert np.array_equal(reader.submit(f"{served.url}/{name}").result().get(), VALUES)
            hits = reader.stats().cache_hits
            assert hits == 3
            zarr.open_array(folder, mode="r+")[:8] = VALUES[8:16]
            assert np.array_equal(reader.submit(f"{served.url}/{name}").result().get()[:8], VALUES[8:16])
            assert reader.stats().cache_hits == hits + 2
            served.faults.no_etags = True  # nothing tells whether an object is the same: it is read
            before = reader.stats().bytes_read
            assert np.array_equal(reader.submit(f"{served.url}/{name}").result().get()[8:], VALUES[8:])
            assert reader.stats().bytes_read - before > 3 * 8
            assert reader.stats().cache_hits == hits + 2
            served.faults.no_etags = False


@pytest.mark.needs_core
@pytest.mark.parametrize("codec", [None, zarr.codecs.ZstdCodec()], ids=["raw", "zstd"])
def test_indexes_of_shards_are_kept_while_the_object_is_the_same(served, codec):
    name = f"indexes {codec is None}"
    array = zarr.create_array(
        served.folder / name, shape=VALUES.shape, chunks=(4, 4, 4), shards=(24, 40, 36), dtype="u2", compressors=codec
    )
    array[...] = VALUES
    region = np.s_[5:19, 3:30, 7]

    def read():
        served.requests.clear()
        values = reader.submit(layout, region).result()
        asked = [(method, range_) for method, _, range_ in served.of("/c/")]
        return values, [one for one in asked if one[1] and one[1].startswith("bytes=-")], asked

    with Reader("cpu") as reader:
        layout = reader.layout_of(f"{served.url}/{name}")
        values, indexes, _ = read()
        assert np.array_equal(values, VALUES[region])
        assert len(indexes) == 1
        values, indexes, asked = read()
        assert np.array_equal(values, VALUES[region])
        assert not indexes
        assert {method for method, _ in asked} == {"GET"}  # what is read says of which version the object is
        crop = np.s_[8:12, 8:12, 8:12]
        served.requests.clear()
        assert np.array_equal(reader.submit(layout, crop).result(), VALUES[crop])
        assert len(served.of("/c/")) == 1
        zarr.open_array(served.folder / name, mode="r+")[...] = VALUES[::-1] // 7
        values, indexes, _ = read()
        assert np.array_equal(values, (VALUES[::-1] // 7)[region])
        assert len(indexes) == 1
        served.faults.no_etags = True
        for _ in range(2):
            values, indexes, _ = read()
            assert np.array_equal(values, (VALUES[::-1] // 7)[region])
            assert len(indexes) == 1
        (served.folder / name / "c/0/0/0").unlink()
        assert (read()[0] == 0).all()


@pytest.mark.needs_core
@pytest.mark.parametrize(
    "faults",
    [
        {"busy": 9},
        {"no_ranges": True},
        {"no_etags": True},
        {"cut": 3},
        {"cut": 3, "resets": True, "no_etags": True},
        {"redirects": True},
        {"seconds": 0.002},
    ],
    ids=lambda faults: " ".join(faults),
)
@pytest.mark.parametrize("kind", ["raw", "blosc shards"])
def test_a_poor_server_is_read_all_the_same(served, kind, faults):
    served.faults = Faults("/c/", **faults)
    values = read_zarr(f"{served.url}/{kind}", region=np.s_[3:20, :, 1:30], device="cpu", storage_options=options(30))
    assert np.array_equal(values, expected()[3:20, :, 1:30])


@pytest.mark.needs_core
@pytest.mark.slow
def test_a_server_that_is_busy_for_seconds(served):
    """By default requests are repeated for longer than obstore does by itself, 1 to 2 s."""
    served.faults = Faults("/c/0/0/0", busy_until=time.monotonic() + 4)
    assert np.array_equal(read_zarr(f"{served.url}/raw", device="cpu"), expected())


@pytest.mark.needs_core
def test_a_late_response_is_requested_again(served, monkeypatch):
    """Once there is something to compare with; the late response is not waited for."""
    monkeypatch.setenv("LINUMPY_HEDGING", "1")
    with Reader("cpu") as reader:
        layout = reader.layout_of(f"{served.url}/zstd")
        served.faults = Faults("/zstd/c/", seconds=0.005)
        for _ in range(3):  # more responses than are compared with, so that those of other tests do not count
            reader.submit(layout).result()
        served.faults = Faults("/zstd/c/", seconds=0.005, late=8, each=60)
        begin = time.monotonic()
        assert np.array_equal(reader.submit(layout).result(), expected())
        assert time.monotonic() - begin < 6
        assert 1 <= reader.stats().requests_hedged <= 9 + len(served.requests) // 50
        assert len(served.of("/c/")) <= 300 + reader.stats().requests_hedged


@pytest.mark.parametrize("kind", ["raw", "zstd", "blosc shards"])
@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"status": 403}, "403 Forbidden"),
        ({"status": 401}, "401 Unauthorized"),
        ({"busy": 10**9}, "503 Service Unavailable"),
        ({"cut": 10**9}, "body error|Requested|decoding"),
    ],
    ids=["403", "401", "503", "cut"],
)
def test_an_error_names_the_object_and_the_reason_without_credentials(served, kind, faults, reason):
    served.faults = Faults("/c/0/1/1", **faults)
    url = served.url.replace("//", "//user:pass%20word@") + f"/{kind}"
    with Reader("cpu") as reader:
        layout = reader.layout_of(url, storage_options=options(2))
        whole = reader.submit(layout, np.s_[:8, :8, :8])
        with pytest.raises(ChunkError, match=reason) as caught:
            reader.submit(layout).result()
        whole.result()
    text = str(caught.value)
    assert f"{served.url}/{kind}/c/0/1/1 cannot be read: " in text
    for secret in ("user", "pass", "token", "Debug", "\n"):
        assert secret not in text
    assert "Basic dXNlcjpwYXNzIHdvcmQ=" in served.credentials


@pytest.mark.needs_core
@pytest.mark.parametrize("faults", [{"status": 401}, {"status": 403}, {"status": 400}, {"status": 500}, {"status": 404},
                                    {"cut": 10**9}, {"loops": True}], ids=str)  # fmt: skip
@pytest.mark.parametrize("way", ["user", "header", "s3"])
def test_credentials_are_never_shown(served, caplog, faults, way):
    """Neither in errors nor in the log nor by repr, also if the server repeats them in its page."""
    caplog.set_level("DEBUG")
    served.credentials.clear()
    url, given, secret = f"{served.url}/raw shards", options(1), "planted"
    if way == "user":
        url = url.replace("//", f"//me:{secret}@")
    elif way == "header":
        given["client_options"] = {"default_headers": {"authorization": f"Bearer {secret}"}}
    else:
        url = "s3://bucket/raw shards"
        given |= {"endpoint": served.url, "region": "a", "access_key_id": f"{secret}1", "secret_access_key": secret,
                  "token": secret, "virtual_hosted_style_request": False}  # fmt: skip
    with Reader("cpu") as reader:
        layout = reader.layout_of(url, storage_options=given)
        ticket = reader.submit(layout, np.s_[:3])
        shown = [repr(layout), repr(ticket.result()), repr(ticket.report), repr(reader.stats()), repr(layout.remote)]
        for where in ("/c/0/1/1", "zarr.json")[faults.get("status") == 404 :]:  # a missing chunk is no error
            served.faults = Faults(where, **faults)
            with pytest.raises((ChunkError, SourceError)) as caught:
                read_zarr(url, storage_options=given, device="cpu")
            shown += [str(caught.value), repr(caught.value)]
    assert any(one in text for text in served.credentials for one in (secret, "bWU6cGxhbnRlZA"))  # they were sent
    for text in (*shown, caplog.text):
        assert not any(one in text for one in (secret, "bWU6cGxhbnRlZA", "token="))


@pytest.mark.needs_core
@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"short": True}, "Requested|came"),
        ({"moved": True}, "Requested|came"),
        ({"gone_after": 1}, "was replaced"),
        ({"no_ranges": True}, "its server ignores ranges of bytes, and the object has 8324 bytes"),
        ({"loops": True}, "redirect"),
    ],
    ids=["short", "moved", "gone", "no ranges", "loops"],
)
def test_ranges_that_are_not_what_was_asked_for(served, monkeypatch, caplog, faults, reason):
    """A response of other bytes, a shard that is gone behind its index, a large one that would come whole, a loop."""
    monkeypatch.setattr(requests, "_WHOLE_NBYTES", 1000)
    caplog.set_level("DEBUG")
    served.faults = Faults("/c/0/1/1", **faults)
    url = served.url.replace("//", "//user:pass%20word@") + "/raw shards"
    with Reader("cpu") as reader:
        layout = reader.layout_of(url, storage_options=options(2))
        with pytest.raises(ChunkError, match=reason) as caught:
            reader.submit(layout).result()
        assert np.array_equal(reader.submit(layout, np.s_[:16, :16]).result(), expected()[:16, :16])
    assert f"{served.url}/raw shards/c/0/1/1 " in str(caught.value)
    for secret in ("user", "pass", "dXNlcjpw"):
        assert secret not in str(caught.value) + caplog.text


@pytest.mark.needs_core
def test_ranges_are_asked_for_again(served, monkeypatch):
    """A response of a whole object holds for a while, and not for as long as the process."""
    served.faults = Faults("/c/", no_ranges=True)
    given, region = options(3), np.s_[:8, :8, :8]

    def ranges():
        served.requests.clear()
        values = read_zarr(f"{served.url}/raw shards", region=region, device="cpu", storage_options=given)
        assert np.array_equal(values, expected()[region])
        return [range_ is not None for *_, range_ in served.of("/c/")]

    assert ranges()[:2] == [True, False]
    served.faults = Faults()
    assert not any(ranges())
    monkeypatch.setattr(requests, "time", types.SimpleNamespace(monotonic=lambda: time.monotonic() + 61))
    assert all(ranges())


@pytest.mark.needs_core
def test_a_redirect_takes_no_credentials_to_another_server(served):
    with serve(served.folder) as other:
        served.faults = Faults("/c/", elsewhere=other.url)
        url = served.url.replace("//", "//user:pass%20word@") + "/zstd"
        assert np.array_equal(read_zarr(url, device="cpu", strict=True), expected())
        assert len(other.of("/c/")) == 75
        # Hosts are told apart by name and port.
        assert other.credentials == {""}


@pytest.mark.needs_core
def test_a_raw_chunk_in_pieces_that_changes_between_them(served):
    array = zarr.create_array(served.folder / "pieces", shape=(2, 1024, 1024), chunks=(2, 1024, 1024), dtype="u1",
                              compressors=None, overwrite=True)  # fmt: skip
    array[...] = 3
    url, region = f"{served.url}/pieces", np.s_[:, :2]
    assert (read_zarr(url, region=region, device="cpu") == 3).all()
    assert len(served.of("/c/")) > 1
    served.requests.clear()
    served.faults = Faults("/c/", changes_after=1)
    with pytest.raises(ChunkError, match="/pieces/c/0/0/0 was replaced while it was being read"):
        read_zarr(url, region=region, device="cpu")


@pytest.mark.needs_core
def test_an_object_that_changes_while_it_is_read(served):
    url = f"{served.url}/blosc shards"
    served.faults = Faults("/c/0/1/1", changes_after=1)
    with (
        Reader("cpu") as reader,  # which has no index of it yet
        pytest.raises(ChunkError, match=r"/blosc shards/c/0/1/1 was replaced while it was being read"),
    ):
        reader.submit(url).result()
    served.faults = Faults()
    assert np.array_equal(read_zarr(url, device="cpu"), expected())


@pytest.mark.needs_core
def test_a_raw_object_of_another_size(served):
    url = f"{served.url}/raw"
    file = served.folder / "raw/c/0/0/0"
    content = file.read_bytes()
    for wrong in (content + b"12", content[:-2], b""):
        file.write_bytes(wrong)
        with pytest.raises(ChunkError, match=rf"c/0/0/0 has {len(wrong)} bytes, but a raw chunk of .* has 1024"):
            read_zarr(url, device="cpu")
    file.write_bytes(content)


@pytest.mark.needs_core
def test_an_encoded_object_that_is_longer_than_expected(served):
    """Its size is not known before it comes: it is asked for a second time."""
    folder = served.folder / "long"
    array = zarr.create_array(folder, shape=(4, 4), chunks=(4, 4), dtype="u1", compressors=zarr.codecs.ZstdCodec())
    array[...] = 3
    file = folder / "c/0/0"
    file.write_bytes(file.read_bytes() + bytes(20_000))
    with pytest.raises(ChunkError, match="cannot be decoded") as local:
        read_zarr(folder, device="cpu")
    with pytest.raises(ChunkError, match="cannot be decoded") as caught:
        read_zarr(f"{served.url}/long", device="cpu")
    assert str(local.value).partition(" cannot")[2] == str(caught.value).partition(" cannot")[2]
    assert len(served.of("/long/c/0/0")) == 2


@pytest.mark.needs_core
def test_many_requests_are_under_way_and_cancelled_ones_do_not_begin(served):
    served.faults = Faults("/c/", hold=threading.Event())
    with Reader("cpu") as reader:
        layout = reader.layout_of(f"{served.url}/zstd")
        tickets = reader.submit_many(layout, [np.s_[:16], np.s_[:16, ::1, :8]])
        wait_for(lambda: served.under_way >= 32)
        out = tickets[1].array
        assert [ticket.cancel() for ticket in tickets] == [True, True]
        time.sleep(0.2)  # requests that had begun arrive
        asked = len(served.of("/c/"))
        served.faults.hold.set()
        for ticket in tickets:
            with pytest.raises(CancelledError):
                ticket.result()
        before = out.copy()
        assert len(served.of("/c/")) == asked
        assert np.array_equal(reader.submit(layout).result(), expected())
        assert np.array_equal(out, before)


@pytest.mark.needs_core
def test_a_reader_is_closed_while_requests_are_under_way(served):
    zarr.create_array(served.folder / "many", data=np.zeros((64, 64, 64), "u1"), chunks=(8, 8, 8), compressors=None)
    zarr.open_array(served.folder / "many")[...] = 1
    served.faults = Faults("/c/", hold=threading.Event())
    reader = Reader("cpu")
    layout = reader.layout_of(f"{served.url}/many")  # 512 chunks, and at most 256 requests are in flight
    first = reader.submit(layout)
    wait_for(lambda: served.under_way >= 32)
    closing = threading.Thread(target=reader.close)
    closing.start()
    wait_for(lambda: reader._is_closed)
    time.sleep(0.2)
    served.faults.hold.set()
    closing.join(20)
    assert not closing.is_alive()
    assert len(served.of("/c/")) <= 256  # those in flight when it was closed: the server may see them later
    assert isinstance(first.exception(), CancelledError)
    with pytest.raises(RuntimeError, match="the reader is closed"):
        reader.submit(layout).result()


@pytest.mark.needs_core
def test_threads_share_readers_and_stores(served):
    def one(number):
        kind = list(KINDS)[number % len(KINDS)]
        return np.array_equal(read_zarr(f"{served.url}/{kind}", device="cpu"), expected())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(one, range(24)))


def test_metadata_are_read_anew_by_each_call(served):
    folder = served.folder / "changing"
    for dtype in ("u2", "f4"):
        zarr.create_array(folder, shape=(4, 4), chunks=(4, 4), dtype=dtype, overwrite=True)[...] = 2
        assert read_zarr(f"{served.url}/changing", device="cpu").dtype == dtype


def test_what_the_core_does_not_decode_is_read_by_zarr(served, monkeypatch):
    array = zarr.create_array(
        served.folder / "lzma", shape=(8, 8), chunks=(4, 4), dtype="u2", compressors=[zarr.codecs.numcodecs.LZMA()],
        overwrite=True,
    )  # fmt: skip
    array[...] = 5
    values, report = read_zarr(f"{served.url}/lzma", device="cpu", return_report=True)
    assert (values == 5).all()
    assert "zarr-python: codec" in report.fallback
    with pytest.raises(UnsupportedLayoutError, match=r"http://127.0.0.1:\d+/lzma: codec"):
        read_zarr(f"{served.url}/lzma", device="cpu", strict=True)
    served.faults = Faults("/c/", status=403)
    with pytest.raises(ChunkError, match=r"/lzma/c/\d/\d cannot be read: .*403 Forbidden") as caught:
        read_zarr(served.url.replace("//", "//me:secret@") + "/lzma", device="cpu")
    assert "secret" not in str(caught.value)
    assert "Debug" not in str(caught.value)
    served.faults = Faults()
    monkeypatch.setenv("LINUMPY_CORE", "0")
    assert np.array_equal(read_zarr(f"{served.url}/zstd", device="cpu"), expected())
    with Reader("cpu") as reader:
        ticket = reader.submit(f"{served.url}/zstd")
        assert np.array_equal(ticket.result(), expected())
        assert ticket.report.backend == "zarr-python"


def test_urls_that_cannot_be_opened(served, monkeypatch):
    with pytest.raises(SourceError, match=r"'http://127.0.0.1:\d+/nothing' is neither a Zarr array nor a Zarr group"):
        open_source(f"{served.url}/nothing")
    with pytest.raises(SourceError, match=r"'https://host/a' cannot be opened: .*not passed on") as caught:
        open_source("https://host/a?X-Amz-Signature=secret")
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="storage_options= are for URLs"):
        read_zarr(served.folder / "raw", storage_options={"a": 1}, device="cpu")
    with pytest.raises(
        SourceError, match=r"'s3://bucket/a' cannot be opened: UnknownConfigurationKeyError.*: check storage_options=$"
    ):
        read_zarr("s3://bucket/a", storage_options={"nonsense": "secret"}, device="cpu")
    for user in ("", "me:se cr'et@"):
        with pytest.raises(SourceError, match=r"'http://127\.0\.0\.1:1/a' cannot be opened"):
            read_zarr(f"http://{user}127.0.0.1:1/a", storage_options=options(1), device="cpu")
    served.faults = Faults(status=403)
    with pytest.raises(
        SourceError,
        match=r"raw' cannot be opened: \S+/zarr.json cannot be read: .*403 Forbidden: check the credentials in",
    ):
        open_source(f"{served.url}/raw")
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setattr(remote, "_stores", [])
    with pytest.raises(SourceError, match=r"pip install \"linumpy-gpu\[remote\]\""):
        open_source("https://nowhere/a")


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_denies_access_to_missing_objects(served, status):
    """Buckets that may not be listed answer so; the document that is there is read."""
    served.faults = Faults("/.z", status=status)
    assert np.array_equal(read_zarr(f"{served.url}/zstd", device="cpu"), expected())


@pytest.mark.parametrize("faults", [{"cut": 99}, {"status": 500}, {"loops": True}], ids=["cut", "500", "loops"])
@pytest.mark.parametrize("document", ["/i.zarr/zarr.json", "/i.zarr/0/zarr.json"])
def test_an_error_in_metadata_is_linumpy_s(served, faults, document):
    write_omezarr(served.folder / "i.zarr", VALUES, (1, 1, 1), overwrite=True)
    url = served.url.replace("//", "//me:secret@") + "/i.zarr"
    assert open_image(url, storage_options=options(1)).levels[0].shape == VALUES.shape
    served.faults = Faults(document, **faults)
    with pytest.raises(SourceError, match=rf"cannot be opened: {served.url}{document} cannot be read: ") as caught:
        open_image(url, storage_options=options(1))
    for secret in ("secret", "Debug", "\n"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize("status", [401, 403])
def test_labels_of_a_server_that_denies_access_to_missing_objects(served, status, tmp_path):
    """The image has none, which the server does not say: it is converted and resampled, and a level is not left out."""
    write_omezarr(served.folder / "n.zarr", VALUES, (1, 1, 1), overwrite=True)
    served.faults = Faults("/labels/", status=status)
    convert_zarr(f"{served.url}/n.zarr", tmp_path / "a", device="cpu")
    assert np.array_equal(zarr.open_array(tmp_path / "a/0")[...], VALUES)
    resample_zarr(f"{served.url}/n.zarr", tmp_path / "b", 2.0, device="cpu")
    served.faults = Faults("/n.zarr/0/", status=status)
    with pytest.raises(SourceError, match=rf"n\.zarr/0' cannot be opened: .* {status} "):
        convert_zarr(f"{served.url}/n.zarr", tmp_path / "c", device="cpu")


@pytest.mark.parametrize("call", ["exists", "getsize"])
@pytest.mark.parametrize(("status", "error"), [(403, remote.AccessError), (500, ChunkError)])
def test_errors_of_requests_without_data_are_linumpy_s(served, call, status, error):
    store = open_source(f"{served.url}/raw", storage_options=options(0)).store
    served.faults = Faults("/c/", status=status)
    with pytest.raises(error, match=rf"^{store.url}/raw/c/0/0/0 cannot be read: .*{status}"):
        sync(getattr(store, call)("raw/c/0/0/0"))


def test_data_that_are_not_listed_to_the_end_are_not_identified(monkeypatch):
    array = zarr.create_array(ObjectStore(MemoryStore()), shape=(8,), chunks=(2,), dtype="u1")
    array[...] = 1
    assert identify_data(array) is not None
    listed = obstore.list

    def torn(*arguments):
        yield from listed(*arguments)
        raise OSError

    monkeypatch.setattr(obstore, "list", torn)
    assert identify_data(array) is None


def test_stores_of_zarr_have_linumpy_s_errors(served, tmp_path):
    """As a caller makes them, without a URL."""
    zarr.create_group(served.folder / "g", overwrite=True)
    store = ObjectStore(HTTPStore(served.url, client_options={"allow_http": True}, retry_config={"max_retries": 0}))
    assert np.array_equal(open_source((store, "raw"))[...], expected())
    with pytest.raises(SourceError, match="g is a Zarr group but no OME-Zarr image"):
        open_image(open_node((store, "g")))
    with pytest.raises(SourceError, match="g holds no arrays to convert"):
        convert_zarr((store, "g"), tmp_path / "a", device="cpu")
    served.faults = Faults(status=500)
    with pytest.raises(SourceError, match=r"cannot be opened: .*raw/zarr.json cannot be read: .* 500 ") as caught:
        open_source((store, "raw"))
    assert "Debug" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("raw/zarr.json", "is a metadata file of Zarr: pass the folder that holds it"),
        ("image.ozx", "ZIP and TIFF files are read from local folders only: download it first"),
        ("stack.TIF", "ZIP and TIFF files are read from local folders only: download it first"),
    ],
)
def test_urls_of_files(served, path, message):
    with pytest.raises(SourceError, match=rf"{served.url}/{path}' .*{message}$"):
        open_source(f"{served.url}/{path}")


def test_a_web_page_in_place_of_metadata(served):
    """Servers of applications answer with their page to whatever is asked for."""
    served.faults = Faults(status=200)
    with pytest.raises(SourceError, match=rf"{served.url}/raw' cannot be read: a web page or another document of HTML"):
        open_source(f"{served.url}/raw")


@pytest.mark.parametrize("url", ["{}/raw/", "{}//raw//", "{}/r%61w"])
def test_urls_of_one_array(served, url):
    assert np.array_equal(read_zarr(url.format(served.url), device="cpu"), expected())


@pytest.mark.needs_core
def test_a_fill_value_is_read_with_the_rest_of_the_document(served):
    """The exact bits of a NaN take no second request, which could fail with an error of obstore's."""
    zarr.create_array(
        served.folder / "nan", shape=(4,), chunks=(2,), dtype="f4", fill_value=float("nan"), overwrite=True
    )
    assert np.isnan(read_zarr(f"{served.url}/nan", device="cpu")).all()
    assert [method for method, *_ in served.of("/nan/zarr.json")].count("GET") == 1


def test_groups_of_a_server_that_lists_nothing(served):
    folder = served.folder / "groups"
    zarr.create_group(folder / "nothing", overwrite=True)
    plate = {"bioformats2raw.layout": 3, "plate": {"wells": [{"path": "A/1"}, {"path": "A/2"}]}}
    zarr.create_group(folder / "plate", attributes={"ome": plate}, overwrite=True)
    for well in ("A/1", "A/2"):
        attributes = {"ome": {"well": {"images": [{"path": "0"}]}}}
        zarr.create_group(folder / "plate" / well, attributes=attributes, overwrite=True)
    zarr.create_group(folder / "series", attributes={"ome": {"bioformats2raw.layout": 3}}, overwrite=True)
    for number in "012":
        zarr.create_group(folder / "series" / number, overwrite=True)
    for ask in (open_image, open_source):
        with pytest.raises(SourceError, match=r"groups/nothing is a Zarr group but no OME-Zarr image"):
            ask(f"{served.url}/groups/nothing")
    assert list(open_images(f"{served.url}/groups/plate/")) == ["A/1/0", "A/2/0"]
    assert list(open_images(f"{served.url}/groups/series")) == ["0", "1", "2"]
    with pytest.raises(SourceError, match=r"no image '3': .* it has the images '0', '1', '2'"):
        open_images(f"{served.url}/groups/series")["3"]
    assert not [method for method, *_ in served.requests if method not in ("GET", "HEAD")]


def test_levels_are_opened_at_the_same_time(served):
    write_omezarr(served.folder / "p.zarr", VALUES, (1, 1, 1), levels=4, overwrite=True)
    served.faults = Faults("/p.zarr/", seconds=0.2)
    began = time.monotonic()
    assert len(open_image(f"{served.url}/p.zarr").levels) == 4
    assert time.monotonic() - began < 0.8  # two round trips, not five


@pytest.mark.parametrize("in_parent", [True, False])
def test_a_forked_child_reads_or_says_why_not(served, in_parent):
    program = f"""
import os, signal, sys
import numpy as np
from linumpy import read_zarr
url, folder = {f"{served.url}/zstd"!r}, {str(served.folder / "zstd")!r}
if {in_parent}:
    assert read_zarr(url, device="cpu").shape == (24, 40, 36)
child = os.fork()
if not child:
    signal.alarm(20)
    assert read_zarr(folder, device="cpu").shape == (24, 40, 36)
    try:
        state = 0 if read_zarr(url, device="cpu").shape == (24, 40, 36) and not {in_parent} else 1
    except Exception as error:
        state = 0 if {in_parent} and "spawn" in str(error) else 2
    os._exit(state)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert read_zarr(url, device="cpu").shape == (24, 40, 36)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "LINUMPY_DEVICE": "cpu"})  # fmt: skip
    assert done.returncode == 0, done.stderr


async def denied_listing(store, prefix):
    raise remote.AccessError(f"{prefix} cannot be listed: 403")
    yield


@pytest.mark.needs_core
def test_s3(tmp_path, monkeypatch):
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        access = {"access_key_id": "AKIAME", "secret_access_key": "secret", "region": "us-east-1"}
        settings = {"endpoint": f"http://{host}:{port}", **access, **options(2)}
        import urllib.request

        request = urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")
        urllib.request.urlopen(request, timeout=10).close()
        writable = ObjectStore(remote._make_store("s3://bucket", settings, is_plain_http=False))
        part = VALUES[:, :16, :16]
        for kind, how in KINDS.items():
            array = zarr.create_array(writable, name=f"deep/{kind}", shape=part.shape, chunks=(8, 8, 8), dtype="u2",
                                      fill_value=7, **how)  # fmt: skip
            array[:16] = part[:16]
            url = f"s3://bucket/deep/{kind}"
            values, report = read_zarr(url, device="cpu", storage_options=settings, strict=True, return_report=True)
            assert np.array_equal(values, expected()[:, :16, :16])
            assert (report.backend, report.source) == ("linumpy", url)
            job = reference.Job((writable, f"deep/{kind}"), np.s_[3:20, 5:15])
            assert np.array_equal(reference.execute(job), expected()[3:20, 5:15, :16])
        digest = identify_data(zarr.open_array(writable, path="deep/raw", mode="r"))
        zarr.open_array(writable, path="deep/raw", mode="r+")[0, 0, 0] = 3
        assert identify_data(zarr.open_array(writable, path="deep/raw", mode="r")) != digest
        write_omezarr(tmp_path / "i", part, (1, 1, 1), levels=2)
        for file in (file for file in (tmp_path / "i").rglob("*") if file.is_file()):
            obstore.put(writable.store, f"i/{file.relative_to(tmp_path / 'i')}", file.read_bytes())
        # Consoles make a folder by an empty object whose name ends in "/", which obstore does not write.
        client = pytest.importorskip("boto3").client(
            "s3", endpoint_url=settings["endpoint"], region_name="us-east-1",
            aws_access_key_id="AKIAME", aws_secret_access_key="secret",
        )  # fmt: skip
        for key in ("i/", "i/empty/", "i/0/"):
            client.put_object(Bucket="bucket", Key=key, Body=b"")
        convert_zarr("s3://bucket/i", tmp_path / "copy", device="cpu", storage_options=settings)
        assert np.array_equal(zarr.open_array(tmp_path / "copy/0")[...], part)
        monkeypatch.setattr(remote.RemoteStore, "list_dir", denied_listing)  # as of a bucket that may not be listed
        convert_zarr("s3://bucket/i", tmp_path / "named", device="cpu", storage_options=settings)
        assert np.array_equal(zarr.open_array(tmp_path / "named/1")[...], zarr.open_array(tmp_path / "i/1")[...])
        monkeypatch.undo()
        for key in ("i/a//b.txt", "i/x/../../c"):
            client.put_object(Bucket="bucket", Key=key, Body=b"")
            with pytest.raises(SourceError, match=rf"s3://bucket/{key[:3]} cannot be listed: .*{key[:4]}") as caught:
                convert_zarr("s3://bucket/i", tmp_path / "other", device="cpu", storage_options=settings)
            assert "Debug" not in str(caught.value)
            client.delete_object(Bucket="bucket", Key=key)
        with pytest.raises(SourceError, match="'s3://other/a' ") as caught:
            read_zarr("s3://other/a", device="cpu", storage_options=settings)
        assert "secret" not in str(caught.value)
    finally:
        server.stop()
