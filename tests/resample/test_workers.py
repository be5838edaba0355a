"""If this fails, `resample_zarr` fails on clusters that grow, run out of memory, or lack what blocks need."""

import asyncio
import contextlib
import functools
import itertools
import os
import random
import re
import threading

import numpy as np
import pytest
import zarr

pytest.importorskip("distributed")

import dask
from distributed import Client, LocalCluster
from distributed.diagnostics.plugin import SchedulerPlugin

import linumpy.resample.workers as tasks
import linumpy.resample.workers as workers
from linumpy.errors import DeviceMemoryError, GpuUnavailableError, WorkerError
from linumpy.io.ome import open_image
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.writer import write_omezarr
from tests.support.script_runs import load

OPTIONS = {"device": "cpu", "chunks": (16, 16, 16), "memory_bytes": 100_000, "mode": "nearest"}
CLUSTER = {"threads_per_worker": 1, "processes": True, "dashboard_address": None}


@pytest.fixture(scope="module")
def client(dask_cluster):
    with Client(dask_cluster, set_as_default=False) as client:
        client.wait_for_workers(2)
        yield client


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """An image, and what one process makes of it."""
    folder = tmp_path_factory.mktemp("image")
    values = np.random.default_rng(0).integers(0, 60_000, (40, 44, 36)).astype("u2")
    write_omezarr(folder / "a", values, (10, 6, 5), chunks=(8, 12, 12))
    resample_zarr(folder / "a", folder / "one", 4.0, progress=int, **OPTIONS)
    return folder / "a"


def check(source, made):
    one, two = (open_image(path).levels[0][...] for path in (source.parent / "one", made))
    assert np.array_equal(one, two)


def test_the_command_on_a_cluster(dask_cluster, source, tmp_path, capsys):
    main = load("linum_resample").main
    for name, more in (("alone", ["--device", "cpu"]), ("workers", ["--cluster", dask_cluster.scheduler_address])):
        assert main([str(source), str(tmp_path / name), "--resolution", "4", *more]) == 0
    one, two = (open_image(tmp_path / name).levels[0][...] for name in ("alone", "workers"))
    assert np.array_equal(one, two)
    assert " on the workers: " in capsys.readouterr().out
    assert main([str(source), str(tmp_path / "c"), "--resolution", "4", "--cluster", "nowhere"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("linum-resample: error: --cluster 'nowhere': no address of a scheduler"), error


def within(seconds, function, *arguments, **options):
    """Call a function that may wait for ever, in a thread that does not hold the tests up."""
    outcome = []

    def call():
        try:
            outcome.append(function(*arguments, **options))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, f"still waiting after {seconds} s"
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


@pytest.mark.slow  # workers that come later take part in the short run, too
def test_an_adaptive_cluster_of_no_workers_gets_some(source, tmp_path):
    """dask's default, adapt(minimum=0), asks for a worker when a task waits for one."""
    with LocalCluster(n_workers=0, **CLUSTER) as cluster:
        cluster.adapt(minimum=0, maximum=2, interval="100ms")
        within(120, resample_zarr, source, tmp_path / "b", 4.0, distributed=cluster, progress=int, **OPTIONS)
    check(source, tmp_path / "b")


class Made(SchedulerPlugin):
    """Which worker made each block, and how many blocks were under way."""

    def __init__(self, scheduler):
        self.scheduler, self.by, self.under_way = scheduler, [], []

    def transition(self, key, start, finish, *args, worker=None, **kwargs):
        if start == "processing" and finish == "memory" and str(key).startswith("run-"):
            self.by.append(worker)
            self.under_way.append(len(self.scheduler.tasks))


def test_workers_that_come_later_take_part(source, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_MIN_PENDING", 1)
    monkeypatch.setattr(tasks, "_COUNT_SECONDS", 0.0)
    with LocalCluster(n_workers=1, **CLUSTER) as cluster, Client(cluster, set_as_default=False) as client:
        client.wait_for_workers(1)
        made, seen = Made(cluster.scheduler), itertools.count()
        cluster.scheduler.add_plugin(made, name="made")

        def grow(_):
            if next(seen) == 20:
                cluster.scale(3)
                client.wait_for_workers(3)

        resample_zarr(source, tmp_path / "b", 4.0, distributed=client, progress=grow, **OPTIONS)
    check(source, tmp_path / "b")
    assert len(set(made.by)) == 3
    assert max(made.under_way[:20]) <= 6  # four for a thread, and those that are done but not yet forgotten
    assert 8 < max(made.under_way) <= 14


def test_blocks_fit_the_memory_of_a_worker(tmp_path):
    """As one block, the coefficients alone would take 256 MiB and as much again: more than the worker may."""
    shape = (256, 256, 256)
    array = zarr.create_array(tmp_path / "a", shape=shape, chunks=(64, 64, 64), dtype="u1", compressors=None)
    for box in itertools.product((0, 128), repeat=3):
        corner = tuple(slice(a, a + 64) for a in box)
        array[corner] = np.random.default_rng(box).integers(0, 255, (64, 64, 64)).astype("u1")
    options = {
        "spacing": (1, 1, 1), "order": 3, "output_shape": (24, 24, 24), "chunks": (8, 8, 8), "device": "cpu",
        "progress": int,
    }  # fmt: skip
    matrix = np.diag([10.5, 10.5, 10.5])
    killed = {"distributed.worker.memory.monitor-interval": "20ms"}
    with (
        dask.config.set(killed),
        LocalCluster(n_workers=1, memory_limit="450MiB", **CLUSTER) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.wait_for_workers(1)
        before = client.run(os.getpid)
        resample_zarr(tmp_path / "a", tmp_path / "b", matrix, distributed=client, **options)
        assert client.run(os.getpid) == before
        too_large = {**options, "chunks": (24, 24, 24), "memory_bytes": 2**40}
        with pytest.raises(DeviceMemoryError, match=r"worker tcp://.* has a memory limit of \d+ bytes for 1 threads"):
            resample_zarr(tmp_path / "a", tmp_path / "c", matrix, distributed=client, **too_large)
    resample_zarr(tmp_path / "a", tmp_path / "one", matrix, **options)
    one, two = (open_image(tmp_path / name).levels[0][...].astype(int) for name in ("one", "b"))
    assert one.any()
    assert abs(one - two).max() <= 1  # rounding, since blocks are others


def answers(count, **given):
    draw = random.Random(count)
    for number in range(count):
        some = {
            "host": draw.choice("ab"),
            "device": draw.choice("01"),
            "threads": draw.randint(1, 4),
            "limit": draw.choice([0, draw.randint(2**28, 2**34)]),
            "used": draw.randint(2**26, 2**29),
            "host_free": draw.randint(2**30, 2**36),
            "device_free": draw.randint(2**28, 2**36),
            "no_gpu": draw.choice(["", "", "there is none"]),
        }
        yield f"tcp://{number}", {**some, **given}


@pytest.mark.parametrize("count", range(1, 30))
def test_no_thread_is_given_more_than_all_of_them_have(count):
    """The threads of all workers of a host together fit what is free there; those of one, its limit."""
    every = dict(answers(count))
    found = workers._capacity(every)
    assert found.kind == ("cpu" if any(one["no_gpu"] for one in every.values()) else "cuda")
    bounds = [8 * 2**30] if found.kind == "cpu" else []
    for one in every.values():
        if found.kind == "cuda":
            together = [two for two in every.values() if (two["host"], two["device"]) == (one["host"], one["device"])]
            bounds.append(0.8 * one["device_free"] / sum(two["threads"] for two in together))
        else:
            together = [two for two in every.values() if two["host"] == one["host"]]
            bounds.append(0.8 * one["host_free"] / sum(two["threads"] for two in together))
            if one["limit"]:
                bounds.append(max(0, 0.6 * one["limit"] - one["used"]) / one["threads"])
    assert found.nbytes == pytest.approx(min(bounds), abs=1)


def test_workers_with_a_gpu_are_bound_by_its_memory():
    found = workers._capacity(dict(answers(3, no_gpu="", host="a", device="0", threads=2, device_free=6_000)))
    assert (found.kind, found.nbytes) == ("cuda", 800)
    assert "GPU 0 has 6000 bytes free for 6 threads" in found.reason


# What may be passed as distributed=


def test_a_cluster_and_an_address_are_taken(source, tmp_path, dask_cluster, client):
    for number, given in enumerate((dask_cluster, dask_cluster.scheduler_address)):
        resample_zarr(source, tmp_path / str(number), 4.0, distributed=given, progress=int, **OPTIONS)
        check(source, tmp_path / str(number))
    assert client.status == "running"
    assert dask_cluster.status.name == "running"
    assert len(dask_cluster.scheduler.clients) <= 2  # those that were made here are closed


def closed_client(cluster):
    with Client(cluster, set_as_default=False) as client:
        pass
    return client


def closed_cluster(_):
    with LocalCluster(n_workers=0, processes=False, dashboard_address=None) as closed:
        pass
    return closed


REFUSED = {
    "closed client": (closed_client, ValueError, "this client is closed; make a new one"),
    "closed cluster": (closed_cluster, ValueError, "this cluster is closed; make a new one"),
    "a number": (lambda _: 4, TypeError, "distributed=4: pass a distributed.Client, a cluster"),
    "True": (lambda _: True, TypeError, "distributed=True: pass a distributed.Client, a cluster"),
    "no address": (lambda _: "threads", ValueError, "distributed='threads': no address of a scheduler"),
    "nobody there": (
        lambda _: "tcp://127.0.0.1:1", ConnectionError, "distributed='tcp://127.0.0.1:1': no dask scheduler answers",
    ),
    "no such protocol": (lambda _: "what://127.0.0.1:1", ConnectionError, "distributed='what://127.0.0.1:1'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_cluster_is_one_clear_error(source, tmp_path, dask_cluster, client, name):
    make, kind, message = REFUSED[name]
    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}), pytest.raises(kind, match=message):
        resample_zarr(source, tmp_path / "b", 4.0, distributed=make(dask_cluster), progress=int, **OPTIONS)
    assert not any(tmp_path.iterdir())


def test_a_client_of_an_event_loop_is_one_clear_error(source, tmp_path, dask_cluster):
    async def run():
        async with Client(dask_cluster.scheduler_address, asynchronous=True, set_as_default=False) as client:
            resample_zarr(source, tmp_path / "b", 4.0, distributed=client, progress=int, **OPTIONS)

    with pytest.raises(TypeError, match="this client is asynchronous; make one without"):
        asyncio.run(run())


# Workers that lack something. What they lack is taken from one of two that have it all.


def replace(owner, name, make):
    """Put another function in the place of one, on a worker, until `restore`."""
    import sys

    before = getattr(owner, name)
    setattr(owner, name, make(before))
    sys.linumpy_tests = [*getattr(sys, "linumpy_tests", []), lambda: setattr(owner, name, before)]


def restore():
    import sys

    for one in reversed(getattr(sys, "linumpy_tests", [])):
        one()
    sys.linumpy_tests = []


def forget_linumpy():
    """As on a machine where it is not installed."""
    import sys

    class Missing:
        @staticmethod
        def find_spec(name, *_):
            if name.split(".")[0] == "linumpy":
                raise ModuleNotFoundError("No module named 'linumpy'")

    replace(sys, "meta_path", lambda path: [Missing, *path])
    for name in [name for name in sys.modules if name.split(".")[0] == "linumpy"]:
        del sys.modules[name]


def hide(part):
    """As on a machine without the disk of the folders whose names hold a text."""
    import os

    replace(os.path, "isdir", lambda there: lambda path: part not in str(path) and there(path))


def protect(part):
    import os

    replace(os, "access", lambda allowed: lambda path, mode: part not in str(path) and allowed(path, mode))


def another_version():
    import linumpy.resample.workers as workers

    replace(workers, "__version__", lambda _: "0.0.9")


def another_source(part):
    import linumpy.resample.workers as workers

    replace(workers, "metadata_digest", lambda one: lambda folder: "another" if part in folder else one(folder))


LACKING = {
    "linumpy": (forget_linumpy, "lacks linumpy: No module named 'linumpy'"),
    "another linumpy": (another_version, "lacks linumpy .*: it has 0.0.9"),
    "source": (functools.partial(hide, "/a/0"), "lacks the disk of the source: there is no folder .*/a/0"),
    "other source": (
        functools.partial(another_source, "/a/0"),
        "lacks the source: the array in .* another",
    ),
    "target": (functools.partial(hide, "/out"), "lacks the disk of the target: there is no folder .*/out"),
    "rights": (functools.partial(protect, "/out"), "lacks the right to write to .*/out"),
}


@contextlib.contextmanager
def one_of(client):
    """One of the workers; what was replaced there is put back afterwards."""
    address = min(client.run(os.getpid))
    try:
        yield address
    finally:
        client.run(restore)


@pytest.mark.parametrize("name", LACKING)
def test_a_worker_that_lacks_something_is_named(source, tmp_path, client, name):
    """At once, where it is there at the beginning; else with its first block. A run is gone on with afterwards."""
    take, message = LACKING[name]
    (tmp_path / "out").mkdir()
    seen = itertools.count()
    with one_of(client) as address:

        def later(_):
            if next(seen) == 1:  # long before the last block
                client.run(take, workers=[address])

        run = functools.partial(resample_zarr, source, tmp_path / "out" / "b", 4.0, distributed=client, **OPTIONS)
        named = f"worker {address} {message}"
        with pytest.raises(WorkerError, match=named):
            run(progress=later)
        assert len(list((tmp_path / "out" / ".b.unfinished").glob("image-*"))) == 1
        with pytest.raises(WorkerError, match=named) as caught:
            run(progress=int)
        assert "\n" not in str(caught.value)
    run(progress=int)
    check(source, tmp_path / "out" / "b")


def test_a_gpu_that_a_worker_lacks(source, tmp_path, client):
    with one_of(client) as address:
        client.run(os.environ.__setitem__, "CUDA_VISIBLE_DEVICES", "", workers=[address])
        with pytest.raises(GpuUnavailableError, match=r"worker tcp://\S+ on \S+: "):
            resample_zarr(source, tmp_path / "b", 4.0, distributed=client, **OPTIONS | {"device": "cuda"})
        client.restart_workers([address])  # a process that has found no GPU finds none later


def test_a_block_too_large_for_a_worker_that_comes_later(source, tmp_path, client):
    def shrink(dask_worker):
        # Else dask lets a worker that is beyond its limit begin no block, for ever.
        replace(dask_worker.memory_manager, "memory_pause_fraction", lambda _: False)
        replace(dask_worker.memory_manager, "memory_limit", lambda _: 10_000)

    seen = itertools.count()
    with one_of(client) as address:

        def later(_):
            if next(seen) == 5:
                client.run(shrink, workers=[address])

        with pytest.raises(WorkerError, match=f"worker {address} lacks memory: its limit is 10000 bytes for 1 threads"):
            resample_zarr(source, tmp_path / "b", 4.0, distributed=client, progress=later, **OPTIONS)


def test_an_error_of_a_block_names_the_worker(source, tmp_path, client):
    def fail(dask_worker):
        import linumpy.resample.blocks.pipeline as pipeline

        def make_block(*_):
            raise OSError(5, "Input/output error", "a chunk")

        replace(pipeline, "make_block", lambda _: make_block)

    with one_of(client) as address:
        client.run(fail, workers=[address])
        with pytest.raises(OSError, match="Input/output") as caught:
            resample_zarr(source, tmp_path / "b", 4.0, distributed=client, progress=int, **OPTIONS)
        assert f"on worker {address}" in caught.value.__notes__


@pytest.mark.slow  # on a busy machine dask at times starts the workers again before their deaths count
def test_a_block_that_its_workers_die_of(source, tmp_path, monkeypatch, dask_cluster, client):

    def die(dask_worker):
        import os

        import linumpy.resample.blocks.pipeline as pipeline

        pipeline.make_block = lambda *_: os.kill(os.getpid(), 9)

    monkeypatch.setattr(dask_cluster.scheduler, "allowed_failures", 0)
    addresses = "|".join(map(re.escape, client.run(os.getpid)))
    client.run(die)  # each of them: which one is given a block is dask's choice
    try:
        with pytest.raises(WorkerError, match=rf"the last of them ({addresses}): .* smaller memory_bytes="):
            resample_zarr(source, tmp_path / "b", 4.0, distributed=client, progress=int, **OPTIONS)
    finally:
        client.restart()  # by new processes
