"""If this fails, a killed training resumes with other batches, or a long run takes ever more memory."""

import contextlib
import gc
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from linumpy import stream
from tests.support.stream_arrays import make_array

TRAINING = '''
"""A training process: each batch's bytes into a log, and behind each step the state into a file."""
import hashlib, json, os, sys, time
from linumpy import stream

folder, batches = sys.argv[1], int(sys.argv[2])
volumes = [stream.Volume(f"{folder}/{k}", parts=(stream.Part("labels", kind="labels"),)) for k in range(2)]
sampler = stream.CropSampler(volumes, (4, 5, 6), length=20, epochs=10, seed=3)
augment = stream.Augment(rotation=20, flip="zyx", elastic=(6.0, 1.0), noise=3.0)
config = stream.Config(
    batch_size=3, host_buffer_bytes=1 << 20, device_buffer_bytes=1 << 20, device="cpu", augment=augment, pad="reflect",
    spacing=(2.0, 1.0, 1.0), lookahead_batches=int(sys.argv[3]), seed=5,
)
with stream.Pipeline(config) as pipeline, open(f"{folder}/log", "a") as log:
    if os.path.exists(f"{folder}/state"):
        with open(f"{folder}/state") as file:
            pipeline.load_state_dict(json.load(file))
    pipeline.push(sampler)
    while pipeline.state_dict()["batch_id"] < batches:
        with pipeline.pop() as parts:
            seen = hashlib.sha256(parts.image.numpy().tobytes() + parts.labels.numpy().tobytes()).hexdigest()
        state = pipeline.state_dict()
        with open(f"{folder}/state.new", "w") as file:
            json.dump(state, file)
        os.replace(f"{folder}/state.new", f"{folder}/state")
        log.write(json.dumps([state["batch_id"], seen]) + chr(10))
        log.flush()
        if state["batch_id"] == int(sys.argv[4]):
            print("waits to be killed", flush=True)
            time.sleep(1000)
'''


@pytest.fixture
def run(tmp_path):
    """Make a folder for a training, and start one in it."""
    rng = np.random.default_rng(0)
    values = [(rng.random((12, 15, 18)) * 200).astype("u2") for _ in range(2)]

    def start(name, lookahead=2, killed_at=0):
        folder = tmp_path / name
        if not folder.exists():
            folder.mkdir()
            for k in range(2):
                make_array(folder / str(k), values[k], (4, 5, 6))
        command = [sys.executable, "-c", TRAINING, str(folder), str(BATCHES), str(lookahead), str(killed_at)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), folder / "log"

    return start


BATCHES = 16


def logged(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize(
    "kills",
    [((4, 5),), pytest.param(((2, 1), (5, 2), (3, 11), (2, 15)), marks=pytest.mark.slow)],
    ids=["once", "often"],
)
def test_a_training_that_is_killed_resumes_with_the_same_batches(run, kills):
    """Killed while batches behind it are read ahead, by a signal that no process sees, whatever the lookahead."""
    unbroken, expected = run("unbroken")
    for lookahead, stop in kills:
        process, found = run("broken", lookahead, stop)
        assert process.stdout.readline() == "waits to be killed\n"
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        assert [number for number, _ in logged(found)] == list(range(1, stop + 1))
    for process in (unbroken, run("broken", 3)[0]):
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0
    assert logged(found) == logged(expected)
    assert len({seen for _, seen in logged(found)}) == BATCHES


def test_states_go_through_json_and_pickle_in_the_middle_of_an_epoch(tmp_path, pipeline):
    """The sampler that is pushed again has counted on meanwhile: the state says which epochs it had."""
    paths = [make_array(tmp_path / str(k), np.full((9, 9), k, "u1"), (3, 3)) for k in range(5)]
    sampler = stream.CropSampler(paths, (4, 4), length=23, epochs=3, seed=8)
    options = {"augment": stream.Augment(rotation=30, noise=4.0), "pad": "edge", "spacing": (1.0, 1.0), "seed": 2}

    def run(p, count=None):
        p.push(sampler)
        found = []
        for batch in p.batches(count):
            with batch as tensor:
                found.append(
                    (batch.batch_id, batch.samples, [one.epoch for one in batch.samples], tensor.numpy().tobytes())
                )
        return found

    expected = run(pipeline(batch_size=4, **options))
    assert len(expected) == -(-69 // 4)
    for stop, form in ((1, json), (5, pickle), (17, json)):
        sampler.set_epoch(0)
        p = pipeline(batch_size=4, lookahead_batches=5, **options)
        first = run(p, stop)
        state = form.loads(form.dumps(p.state_dict()))
        q = pipeline(batch_size=4, n_compute_threads=3, **options)
        q.load_state_dict(state)
        assert first + run(q) == expected


@pytest.mark.parametrize(("world", "count"), [(1, 7), (2, 7), (3, 7), (3, 9), (5, 3), (4, 1)])
def test_ranks_share_any_number_of_samples(tmp_path, pipeline, world, count):
    """Of sequences and of iterables, one behind the other; also resumed in the middle."""
    path = make_array(tmp_path / "a", np.zeros((64, 4), "u1"), (8, 4))
    sampler = stream.CropGrid(path, (4, 4), volume=(4 * count, 4))
    more = [stream.Sample(path, ((k, k + 4), (0, 4))) for k in range(1, 4)]
    straight = [*sampler, *more, *sampler]
    found = []
    for rank in range(world):
        for stop in (0, 1, 2):
            p = pipeline(batch_size=2, rank=rank, world_size=world)
            q = pipeline(batch_size=2, rank=rank, world_size=world)
            seen = []
            for one, most in ((p, stop), (q, None)):
                if one is q:
                    q.load_state_dict(p.state_dict())
                for samples in (sampler, iter(more), sampler):
                    one.push(samples)
                seen += [sample for batch in one.batches(most) for sample in batch.samples]
            assert seen == straight[rank::world]
        found += seen
    assert sorted(map(str, found)) == sorted(map(str, straight))


def descriptors():
    """Count those of this process, but a file once at most: a reader keeps files open until it has nothing to do."""
    links = []
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing, and files that are closed just now
            links.append(os.readlink(f"/proc/self/fd/{one}"))
    files = [link for link in links if link.startswith("/")]
    return len(links) - len(set(files))


def resources():
    """Resident memory in bytes, descriptors and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), descriptors(), threading.active_count()


#: Threads that pools of zarr-python and asyncio start when they are first busy, whatever reads.
_POOLS = 40


def _long_run(tmp_path, batches):
    """Read batches, and sample what the process holds."""
    rng = np.random.default_rng(0)
    values = [(rng.random((16, 16, 16)) * 200).astype("u2") for _ in range(12)]
    paths = [
        make_array(tmp_path / str(k), one, (4, 4, 4), shards=(8, 8, 8) if k % 2 else None)
        for k, one in enumerate(values)
    ]
    sampler = stream.CropSampler(paths, (4, 4, 4), seed=1)
    config = stream.Config(
        batch_size=1, host_buffer_bytes=1 << 20, device_buffer_bytes=1 << 16, device="cpu", n_zarrs_meta_cache=10,
        dtype="stored", on_error="skip",
    )  # fmt: skip
    missing = stream.Sample(tmp_path / "none", ((0, 4),) * 3)
    faulty = (missing if k % 50 == 0 else sampler.sample_at(k) for k in itertools.count())
    found, held = [], []
    every = max(1, batches // 20)
    with stream.Pipeline(config) as pipeline:
        pipeline.push(faulty)
        for number, batch in enumerate(pipeline.batches(batches)):
            with batch as tensor:
                crops = np.from_dlpack(tensor)
            if number % 97 == 0:
                for crop, sample in zip(crops, batch.samples, strict=True):
                    where = tuple(slice(*one) for one in sample.aabb)
                    assert np.array_equal(crop, values[paths.index(sample.uri)][where])
                held.append(crops)  # now and then a consumer keeps some for longer
                del held[:-1]
            if number % every == every - 1:
                gc.collect()
                found.append(resources())
        assert pipeline.stats.samples_skipped >= batches // 50
    return found


def _assert_flat(found, grown):
    memory, files, threads = (list(one) for one in zip(*found, strict=True))
    quarter = len(found) // 4
    assert max(memory[-quarter:]) - max(memory[quarter : 2 * quarter]) < grown
    assert max(files[-quarter:]) <= max(files[quarter : 2 * quarter]) + 8
    assert max(threads) <= threads[0] + _POOLS


def test_a_run_holds_no_more_at_its_end_than_before(tmp_path):
    _assert_flat(_long_run(tmp_path, 320), 8 << 20)


@pytest.mark.slow
def test_a_hundred_thousand_batches_hold_no_more_at_the_end(tmp_path):
    _assert_flat(_long_run(tmp_path, 100_000), 8 << 20)
