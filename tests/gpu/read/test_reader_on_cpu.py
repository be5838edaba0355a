"""The reader on the CPU, against zarr-python: every kind of raw array it takes."""

import dataclasses
import errno
import os
import shutil
import signal
import struct
import tempfile
import threading
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import reference
import tensorstore as ts
import zarr
from decoders import needs_compiler
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from linumpy.gpu.loop import carrier, jobs
from linumpy.gpu.loop.ticket import Ticket
from linumpy.gpu.staging import engines
from linumpy.io.reads import plain_reads
from stores import DTYPES, cases, random_values, same, same_but_nan, write

from linumpy.errors import ChunkError
from linumpy.gpu.read.reader import Reader
from linumpy.plan.read import boxes as plan_boxes
from linumpy.plan.read import pieces as plan_pieces

inside_a_test = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def nothing_stays_open():
    before = open_chunks()
    yield
    assert reference.PreadFile.open_files == 0
    assert open_chunks() == before


def open_chunks():
    """Descriptors of files below the folder for temporary ones."""
    links = [f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd")]
    return sorted(
        os.readlink(one) for one in links if os.path.exists(one) and tempfile.gettempdir() in os.readlink(one)
    )


@inside_a_test
@given(
    case=cases(),
    slab=st.sampled_from([None, 8192, 20480]),
    direct=st.booleans(),
    read_through=st.sampled_from([2**18, 100]),
    boxes=st.sampled_from([2**16, 5]),
    seed=st.integers(0, 2**32 - 1),
)
def test_same_bytes_as_zarr(case, slab, direct, read_through, boxes, seed):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_pieces, "READ_THROUGH_BYTES", read_through)
        patch.setattr(plan_boxes, "READ_THROUGH_BYTES", read_through)
        patch.setattr(jobs, "REQUEST_BOXES", boxes)
        array = write(case, Path(folder) / "a")
        got = reference.read(array, case.region, slab_nbytes=slab, direct=direct, seed=seed)
        assert same(got, array[case.region])


@inside_a_test
@given(case=cases(max_elements=500), target=st.sampled_from(DTYPES))
def test_same_casts_as_numpy(case, target):
    source, target = np.dtype(case.dtype), np.dtype(target)
    assume(source.kind != "c" or target.kind in "cb")
    if source.kind in "fc" and target.kind in "iu":
        # What does not fit is undefined in C, in CUDA and so in NumPy.
        case = dataclasses.replace(case, fill=1.5)
        values = np.random.default_rng(case.seed).uniform(0, 100, case.shape).astype(source)
    else:
        values = random_values(source, case.shape, case.seed)
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        array = write(case, Path(folder) / "a", values)
        assert same_but_nan(reference.read(array, case.region, dtype=target), array[case.region], target)


TENSORSTORE = {
    "zarr2": lambda separator: {"driver": "zarr", "metadata": {"compressor": None, "dimension_separator": separator}},
    "zarr3": lambda separator: {
        "driver": "zarr3",
        "metadata": {
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": separator}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "big"}}],
        },
    },
    "zarr3-sharded": lambda separator: {
        "driver": "zarr3",
        "metadata": {
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [16, 16, 32]}},
            "chunk_key_encoding": {"name": "v2", "configuration": {"separator": separator}},
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": [4, 8, 16],
                        "codecs": [
                            {"name": "transpose", "configuration": {"order": [2, 0, 1]}},
                            {"name": "bytes", "configuration": {"endian": "little"}},
                        ],
                        "index_location": "start",
                    },
                }
            ],
        },
    },
}


@pytest.mark.parametrize("separator", ["/", "."])
@pytest.mark.parametrize("kind", TENSORSTORE)
def test_stores_written_by_tensorstore(tmp_path, kind, separator):
    values = random_values("u2", (19, 33, 45), 3)
    spec = TENSORSTORE[kind](separator) | {"kvstore": {"driver": "file", "path": str(tmp_path / "a")}}
    if kind != "zarr3-sharded":
        spec["metadata"]["chunks" if kind == "zarr2" else "chunk_grid"] = (
            [8, 16, 16] if kind == "zarr2" else {"name": "regular", "configuration": {"chunk_shape": [8, 16, 16]}}
        )
    stored = ts.open(spec, create=True, dtype=ts.uint16, shape=values.shape).result()
    stored[...] = values
    assert same(reference.read(tmp_path / "a"), values)
    assert same(reference.read(tmp_path / "a", (slice(3, 18), -4, slice(7, 40))), values[3:18, -4, 7:40])


def raw(folder, shape=(10, 12), chunks=(4, 5), **options):
    array = zarr.create_array(folder, shape=shape, chunks=chunks, dtype="u2", compressors=None, fill_value=7, **options)
    array[...] = random_values("u2", shape, 1)
    return array


@pytest.mark.parametrize("there", [(0,), (1,), (0, 2), (1, 2), ()])
def test_chunks_of_two_tasks_of_which_some_are_missing(tmp_path, there):
    """As many tasks as there are chunks, but not one for each."""
    shape = (3 if len(there) == 2 else 2, 2**21)
    array = zarr.create_array(
        tmp_path / "a", shape=shape, chunks=(1, 2**21), dtype="u1", compressors=None, fill_value=7
    )
    for row in there:
        array[row] = random_values("u1", shape[1:], row)
    job = reference.make_job(tmp_path / "a")
    assert same(reference.execute(job), array[...])
    assert job.report.chunks_filled == shape[0] - len(there)


@pytest.mark.timeout(60)
def test_a_child_forked_after_a_read_reads(tmp_path):
    array = raw(tmp_path / "a")
    expected = array[...]
    assert same(reference.read(tmp_path / "a"), expected)
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(30)  # a child that hangs is no child that is waited for
            status = 0 if same(reference.read(tmp_path / "a"), expected) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("region", [..., (..., slice(1, None))], ids=["straight", "by table"])
def test_a_lost_read_is_never_placed(tmp_path, monkeypatch, region):
    """Its bytes of the buffer are those of another read, of whatever array."""
    array = raw(tmp_path / "a", shape=(12, 5), chunks=(2, 5))
    for row in (1, 4):
        (tmp_path / f"a/c/{row}/0").unlink()
    placed, real = [], carrier.Carrier._place

    def place(self, work):
        rows = [row for part, spans in work.rows for row in part.wanted.chunk[spans, 0].tolist()]
        placed.append((work.kind, sorted(rows)))
        return real(self, work)

    monkeypatch.setattr(carrier.Carrier, "_place", place)
    assert same(reference.read(array, region), zarr.open_array(tmp_path / "a")[region])
    assert placed == [("raw", [0, 2, 3, 5]), ("fill", [1, 4])]


@pytest.mark.parametrize("change", [-1, 1, -40], ids=["short", "long", "empty"])
def test_a_chunk_of_the_wrong_length_is_an_error(tmp_path, change):
    raw(tmp_path / "a")
    file = tmp_path / "a/c/1/2"
    os.truncate(file, 40 + change)
    with pytest.raises(ChunkError, match=rf"chunk \(1, 2\) of .*c/1/2 has {40 + change} bytes.* has 40"):
        reference.read(tmp_path / "a")
    # A region that does not touch it is read all the same.
    assert same(reference.read(tmp_path / "a", slice(0, 4)), zarr.open_array(tmp_path / "a")[:4])


def test_a_folder_in_place_of_a_chunk_is_an_error(tmp_path):
    raw(tmp_path / "a")
    (tmp_path / "a/c/1/2").unlink()
    (tmp_path / "a/c/1/2").mkdir()
    with pytest.raises(ChunkError, match=r"chunk \(1, 2\)"):
        reference.read(tmp_path / "a")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["chunk", "shard"])
def test_a_pipe_in_place_of_a_chunk_is_not_waited_for(tmp_path, kind):
    (raw if kind == "chunk" else sharded)(tmp_path / "a")
    (tmp_path / "a/c/1/1").unlink()
    os.mkfifo(tmp_path / "a/c/1/1")
    with pytest.raises(ChunkError, match=rf"{kind} \(1, 1\)"):
        reference.read(tmp_path / "a")


def sharded(folder, **options):
    return raw(folder, shape=(12, 20), chunks=(2, 5), shards=(6, 10), **options)


def index_of(file):
    data = bytearray(file.read_bytes())
    return data, len(data) - 16 * 6 - 4


def write_index(file, data, begin):
    data[-4:] = struct.pack("<I", google_crc32c.value(bytes(data[begin:-4])))
    file.write_bytes(data)


def test_a_shard_index_with_a_wrong_checksum_is_an_error(tmp_path):
    sharded(tmp_path / "a")
    file = tmp_path / "a/c/1/1"
    data, begin = index_of(file)
    data[begin] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChunkError, match=r"shard \(1, 1\) of .*c/1/1: the checksum of the shard index"):
        reference.read(tmp_path / "a")


@pytest.mark.parametrize(
    ("offset", "nbytes", "message"),
    [
        (10**6, 20, "inner chunk (1, 0) lies at bytes 1000000 to 1000020, but the file has"),
        (2**63 + 5, 20, "inner chunk (1, 0) lies at bytes"),
        (2**64 - 2, 20, "inner chunk (1, 0) lies at bytes"),
        (0, 19, "inner chunk (1, 0) has 19 bytes and must have 20"),
        (0, 2**64 - 1, "inner chunk (1, 0) has 18446744073709551615 bytes"),
        (2**64 - 1, 20, "inner chunk (1, 0) lies at bytes"),
    ],
)
def test_ranges_of_a_shard_that_cannot_be_are_errors(tmp_path, offset, nbytes, message):
    sharded(tmp_path / "a")
    file = tmp_path / "a/c/0/1"
    data, begin = index_of(file)
    data[begin + 32 : begin + 48] = struct.pack("<QQ", offset, nbytes)
    write_index(file, data, begin)
    with pytest.raises(ChunkError) as caught:
        reference.read(tmp_path / "a")
    assert message in str(caught.value)
    assert "shard (0, 1)" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 3, 50, 99])
def test_a_shard_shorter_than_its_index_is_an_error(tmp_path, keep):
    sharded(tmp_path / "a")
    os.truncate(tmp_path / "a/c/0/0", keep)
    with pytest.raises(ChunkError, match=rf"the shard index has {keep} bytes and must have 100"):
        reference.read(tmp_path / "a")


def test_a_flipped_bit_anywhere_in_a_shard_index_is_noticed(tmp_path):
    """By one reader, which must not keep any of these indexes."""
    array = sharded(tmp_path / "a")
    file, expected = tmp_path / "a/c/0/0", array[...]
    good, begin = index_of(file)
    with reference.fake_device() as device, Reader(0) as reader:
        for bit in range(8 * begin, 8 * len(good)):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            file.write_bytes(bad)
            with pytest.raises(ChunkError, match=r"shard \(0, 0\)"):
                reader.submit(array, (slice(0, 2), slice(0, 5))).result()
        file.write_bytes(good)
        assert same(reader.submit(array).result().get(), expected)
        assert not device.faults


def test_only_the_touched_inner_chunks_are_read(tmp_path):
    sharded(tmp_path / "a")
    job = reference.make_job(tmp_path / "a", (slice(2, 4), slice(5, 10)))
    reference.execute(job)
    assert job.report.files_opened == 2  # the index, then the data
    assert job.report.bytes_read == 100 + 20


def test_thin_regions_read_little(tmp_path):
    raw(tmp_path / "a", shape=(16, 256, 1024), chunks=(16, 256, 1024))
    job = reference.make_job(tmp_path / "a", (slice(None), 5))
    assert same(reference.execute(job), zarr.open_array(tmp_path / "a")[:, 5])
    assert job.report.bytes_read == 16 * 1024 * 2
    plane = reference.make_job(tmp_path / "a", 7)
    reference.execute(plane)
    assert plane.report.bytes_read == 256 * 1024 * 2


class Failing(reference.PreadFile):
    """Fails in a chosen way at a chosen chunk."""

    where, when, error = "", "", None

    def __init__(self, path):
        if self.when == "open" and path.endswith(self.where):
            raise self.error
        super().__init__(path)
        self._path = path

    def pread(self, *arguments):
        future = super().pread(*arguments)
        if self._path.endswith(self.where):
            if self.when == "get":
                future.get = self._fail
            if self.when == "less":
                future.get = lambda: 3
        return future

    def _fail(self):
        raise self.error


def failing_engine(where, when, number):
    """An engine that gives an error number, or too few bytes, for one file."""

    class Engine(reference.SmallEngine):
        def start(self, reads):
            pending = super().start(reads)
            rows = [n for n, path in enumerate(reads.paths) if path.endswith(where)]
            real = pending.wait

            def wait():
                results = real()
                for file in rows:
                    results.nbytes[reads.file == file] = 3 if when == "less" else -number
                    if when == "open":
                        results.opened[file] = -number
                return results

            pending.wait = wait
            return pending

    return Engine


@pytest.mark.parametrize("where", ["c/0/0", "c/1/2", "c/2/2"])
@pytest.mark.parametrize("when", ["open", "get"])
@pytest.mark.parametrize("direct", [False, True])
def test_a_failing_read_is_a_chunk_error_and_leaves_nothing_open(tmp_path, monkeypatch, where, when, direct):
    raw(tmp_path / "a")
    monkeypatch.setattr(Failing, "where", where)
    monkeypatch.setattr(Failing, "when", when)
    monkeypatch.setattr(Failing, "error", OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(reference, "SmallEngine", failing_engine(where, when, errno.EIO))
    with pytest.raises(ChunkError, match=f"{where}.*Input/output error"):
        reference.execute(reference.make_job(tmp_path / "a", slab_nbytes=8192, direct=direct), Failing)


def few_files(error, failing):
    """What opens files for kvikio: of each three it opens one, or reads one."""

    class FewFiles(reference.PreadFile):
        tried = 0

        def __init__(self, path):
            type(self).tried += 1
            self._fails = self.tried % 3 > 0
            if self._fails and failing == "open":
                raise error
            super().__init__(path)

        def pread(self, *arguments):
            future = super().pread(*arguments)
            if self._fails:
                future.result()
                future.get = self._refuse
            return future

        def _refuse(self):
            raise error

    return FewFiles


@pytest.mark.parametrize("failing", ["open", "get"])
@pytest.mark.parametrize("error", [RuntimeError("kvikio's own"), OSError(errno.EMFILE, "Too many open files")])
def test_what_kvikio_fails_to_read_into_host_memory_is_read_without_it(tmp_path, monkeypatch, error, failing):
    raw(tmp_path / "a")
    opener = few_files(error, failing)
    with reference.fake_device(0, opener) as device:
        monkeypatch.setattr(engines, "LONG_READ_NBYTES", 0)
        found = reference.make_job(tmp_path / "a").run_on(device)
    assert opener.tried > 3
    assert same(found, zarr.open_array(tmp_path / "a")[...])


def test_what_kvikio_and_the_system_fail_to_read_names_the_error_of_the_system(tmp_path, monkeypatch):
    raw(tmp_path / "a")
    real = plain_reads.os.open

    def refused(path, *arguments):
        if str(path).endswith("c/1/2"):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *arguments)

    monkeypatch.setattr(plain_reads.os, "open", refused)
    with reference.fake_device(0, few_files(RuntimeError("kvikio's own"), "open")) as device:
        monkeypatch.setattr(engines, "LONG_READ_NBYTES", 0)
        with pytest.raises(ChunkError, match=r"c/1/2.*Too many open files"):
            reference.make_job(tmp_path / "a").run_on(device)


@pytest.mark.parametrize("direct", [False, True])
def test_too_few_bytes_are_an_error(tmp_path, monkeypatch, direct):
    raw(tmp_path / "a")
    monkeypatch.setattr(Failing, "where", "c/1/2")
    monkeypatch.setattr(Failing, "when", "less")
    monkeypatch.setattr(reference, "SmallEngine", failing_engine("c/1/2", "less", 0))
    with pytest.raises(ChunkError, match=r"3 of 34 bytes"):
        reference.execute(reference.make_job(tmp_path / "a", direct=direct), Failing)


def test_open_files_stay_within_the_limit_of_the_process(tmp_path, monkeypatch):
    import resource

    raw(tmp_path / "a", shape=(40, 40), chunks=(1, 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used, made = len(os.listdir("/proc/self/fd")), []

    class Engine(reference.SmallEngine):
        def __init__(self, **options):
            made.append(options)
            super().__init__(**options)

    monkeypatch.setattr(reference, "SmallEngine", Engine)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2)))  # each core has a thread that decodes
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 64 + 120, hard))
    try:
        result = reference.read(tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # 64 are spared, and half of the other 120 are for further reads; of 60 each decoding thread may have one, and each
    # of the two slabs that are read at a time half of the rest.
    (options,) = made
    assert 15 <= options["descriptors"] < 30
    assert same(result, zarr.open_array(tmp_path / "a")[...])


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    raw(tmp_path / "a")

    class Engine(reference.SmallEngine):
        def start(self, reads):
            real = super().start(reads)
            results = real.wait()
            os.truncate(tmp_path / "a/c/1/2", 10)
            row = [path.endswith("c/1/2") for path in reads.paths].index(True)
            results.nbytes[reads.file == row], results.after[row, 1] = 10, 10
            real.wait = lambda: results
            return real

    monkeypatch.setattr(reference, "SmallEngine", Engine)
    with pytest.raises(ChunkError, match=r"c/1/2 was replaced while it was being read"):
        reference.read(tmp_path / "a")


def test_an_interrupt_while_a_batch_is_read(tmp_path, monkeypatch):
    """The caller gives up at once; the reader goes on to the end of the batch, which still writes into its buffers."""
    raw(tmp_path / "a")
    began, given_up, ended = threading.Event(), threading.Event(), []

    class Engine(reference.SmallEngine):
        def start(self, reads):
            began.set()
            assert given_up.wait(30)
            pending = super().start(reads)
            ended.append(pending.wait() is not None)
            return pending

    def interrupted(self, *_):
        assert began.wait(30)
        assert not self.done()
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            given_up.set()

    monkeypatch.setattr(reference, "SmallEngine", Engine)
    monkeypatch.setattr(Ticket, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reference.read(tmp_path / "a")
    assert ended == [True]


def test_an_array_that_has_gone_is_no_fill_value(tmp_path, monkeypatch):
    for make in (raw, sharded):
        array = make(tmp_path / make.__name__)
        shutil.rmtree(tmp_path / make.__name__)
        with pytest.raises(ChunkError, match=r"are missing, and so is .*zarr\.json"):
            reference.read(array)


def test_a_relative_path_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw("a")
    job = reference.make_job("a")
    expected = zarr.open_array("a")[...]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert same(reference.execute(job), expected)


@pytest.mark.parametrize("kind", ["chunk", "shard"])
def test_a_link_to_nothing_is_an_error(tmp_path, kind):
    (raw if kind == "chunk" else sharded)(tmp_path / "a")
    (tmp_path / "a/c/1/1").unlink()
    (tmp_path / "a/c/1/1").symlink_to(tmp_path / "gone")
    with pytest.raises(ChunkError, match=rf"{kind} \(1, 1\).*cannot be opened"):
        reference.read(tmp_path / "a")


@pytest.mark.parametrize("location", ["start", "end"])
def test_a_range_over_the_index_is_an_error(tmp_path, location):
    from zarr.codecs import BytesCodec, ShardingCodec

    codec = ShardingCodec(chunk_shape=(2,), codecs=[BytesCodec()], index_codecs=[BytesCodec()], index_location=location)
    array = zarr.create(store=tmp_path / "a", shape=(8,), chunks=(8,), dtype="u8", codecs=[codec], zarr_format=3)
    array[...] = np.arange(1, 9)
    assert same(reference.read(tmp_path / "a"), array[...])
    file = tmp_path / "a/c/0"
    data = bytearray(file.read_bytes())
    begin = 0 if location == "start" else len(data) - 64
    data[begin : begin + 8] = struct.pack("<Q", begin)
    file.write_bytes(data)
    with pytest.raises(ChunkError, match="inner chunk"):
        reference.read(tmp_path / "a")


def test_the_report_counts_files_that_were_opened(tmp_path):
    array = raw(tmp_path / "a")
    (tmp_path / "a/c/1/1").unlink()
    job = reference.make_job(array)
    assert same(reference.execute(job), array[...])
    assert (job.report.chunks_read, job.report.chunks_filled, job.report.files_opened) == (8, 1, 8)
    assert job.report.scratch_bytes > 0
    empty = reference.make_job(array, slice(3, 3))
    assert reference.execute(empty).shape == (0, 12)
    assert (empty.report.bytes_read, empty.report.chunks_read, empty.report.scratch_bytes) == (0, 0, 0)


@needs_compiler
@pytest.mark.parametrize("decode_on", ["device", "host"])
def test_the_report_says_where_chunks_were_decoded(tmp_path, decode_on):
    array = zarr.create_array(tmp_path / "a", shape=(10, 12), chunks=(4, 5), dtype="u2")
    array[...] = random_values("u2", (10, 12), 1)
    job = reference.make_job(array, decode_on=decode_on)
    assert same(reference.execute(job), array[...])
    assert job.report.decoder == f"zstd, on the {decode_on}"
    assert job.report.chunks_decoded_by_host == (9 if decode_on == "host" else 0)
