"""If this fails, a call hangs, a batch is lost or wrong beside threads, interrupts and forks."""

import gc
import itertools
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from linumpy import stream
from linumpy.stream.batches import consumer as consumer_module
from linumpy.stream.batches.consumer import Consumer

SIZE = (4, 5, 6)


def crop(path, start=0):
    return stream.Sample(path, [(start, start + SIZE[0]), (0, SIZE[1]), (0, SIZE[2])])


def starts(batch):
    return [one.aabb[0][0] for one in batch.samples]


def cut(values, start):
    return values[start : start + SIZE[0], : SIZE[1], : SIZE[2]].astype("f4")


def drain(p, most=99):
    """What each pop gives: where its crops begin, or the type of its error."""
    found = []
    for _ in range(most):
        try:
            with p.pop() as batch:
                found.append(starts(batch))
        except stream.TryAgain:
            break
        except stream.StreamError as error:
            found.append(type(error))
    return found


@pytest.mark.parametrize("lookahead", [2, 3, 8])
def test_flush_ends_a_batch_behind_what_was_pushed_before_it(volume, pipeline, lookahead):
    """However far the pipeline reads ahead."""
    p = pipeline(batch_size=4, lookahead_batches=lookahead)
    p.push(crop(volume[0]) for _ in range(14))
    p.flush()
    p.flush()
    p.push(crop(volume[0], 1) for _ in range(5))
    assert [len(batch) for batch in p.batches()] == [4, 4, 4, 2, 4, 1]


def test_flush_returns_where_memory_holds_one_batch_of_staged_crops(volume, pipeline):
    slot = 512 * -(-2 * 4 * 120 // 512)
    stage = 2 * 512 * -(-2 * 120 // 512)
    p = pipeline(augment=stream.Augment(flip="z"), pad="edge", device_buffer_bytes=2 * slot + stage + stage // 4)
    p.push(crop(volume[0], k % 9) for k in itertools.count())
    flushed = threading.Thread(target=p.flush, daemon=True)
    flushed.start()
    flushed.join(20)
    assert not flushed.is_alive()
    assert starts(p.pop()) == [0, 1]


def test_what_cannot_be_pushed(pipeline):
    p = pipeline()
    for wrong in (3, None, "cell.zarr", b"cell.zarr"):
        with pytest.raises(TypeError, match=f"push takes a Sample or an iterable of them .got {type(wrong).__name__}"):
            p.push(wrong)
    assert drain(p) == []


def test_an_element_that_is_no_sample_is_an_error_of_its_own(volume, pipeline):
    path = volume[0]
    for on_error in ("raise", "skip"):
        p = pipeline(on_error=on_error)
        crops = [crop(path, 0), crop(path, 1), crop(path, 2), "no sample", crop(path, 3), crop(path, 4), crop(path, 5)]
        if on_error == "raise":
            with pytest.raises(stream.InvalidArgument, match=r"push takes Samples \(got str in a list\)"):
                p.push(crops)
        p.push(iter(crops))
        assert drain(p) == [[0, 1], stream.InvalidArgument, [2, 3], [4, 5]]


def test_an_element_of_a_sequence_that_cannot_be_made_is_an_error_of_its_own(volume, pipeline):
    """And the numbers of those behind it stay what they are in other ranks."""

    class Crops:
        count = 9

        def sample_at(self, index):
            if index == 4:
                raise ValueError("no such crop")
            return crop(volume[0], index)

    for rank, expected in ((0, [[0, 2], stream.InvalidArgument, [6, 8]]), (1, [[1, 3], [5, 7]])):
        p = pipeline(rank=rank, world_size=2)
        p.push(Crops())
        p.push([crop(volume[0], 10), crop(volume[0], 11)])  # numbers 9 and 10
        p.flush()
        assert drain(p) == [*expected, [11] if rank == 0 else [10]]


@pytest.mark.parametrize(
    ("error", "raised"),
    [(KeyError, stream.InvalidArgument), (RuntimeError, stream.InvalidArgument), (OSError, stream.StorageError),
     (stream.TryAgain, stream.TryAgain), (SystemExit, SystemExit), (KeyboardInterrupt, KeyboardInterrupt),
     (GeneratorExit, GeneratorExit)],
)  # fmt: skip
def test_whatever_an_iterable_raises_the_pipeline_goes_on(volume, pipeline, error, raised):
    """Errors are those of the stage ``pull``; an interrupt stays one."""

    def failing():
        yield crop(volume[0], 0)
        raise error("of the user")

    p = pipeline()
    p.push(failing())
    p.push([crop(volume[0], 1)])
    p.flush()
    with pytest.raises(raised, match="of the user") as caught:
        p.pop()
    assert type(caught.value) is raised
    assert getattr(caught.value, "what", "pull") == "pull"
    assert drain(p) == [[0, 1]]


def test_close_does_not_wait_for_an_iterable_that_blocks(volume, pipeline):
    """It is left to its thread, which ends with it and opens nothing more."""
    gate, pulling = threading.Event(), threading.Event()

    def blocked():
        yield crop(volume[0])
        pulling.set()
        gate.wait(30)
        yield crop("nowhere")

    p = pipeline()
    p.push(blocked())
    assert pulling.wait(10)
    begin = time.monotonic()
    p.close()
    assert time.monotonic() - begin < 1
    (left,) = [one for one in p._producer._threads if one.is_alive()]
    gate.set()
    left.join(10)
    assert not left.is_alive()
    assert p._producer.failure is None


def test_an_iterable_may_push_but_not_wait_for_itself(volume, pipeline):
    path = volume[0]
    p = pipeline()
    refused = []

    def pushing():
        yield crop(path, 0)
        p.push([crop(path, 1), crop(path, 2)])
        for wait in (p.pop, p.flush, lambda: next(p.batches())):
            try:
                wait()
            except stream.InvalidArgument as error:
                refused.append(str(error))
        yield crop(path, 3)

    p.push(pushing())
    assert drain(p) == [[0, 3], [1, 2]]
    assert len(refused) == 3
    assert "waits for that iterable itself" in refused[0]


def test_an_iterable_may_close_the_pipeline(volume, pipeline):
    p = pipeline()

    def closing():
        yield crop(volume[0])
        p.close()
        yield crop(volume[0])

    p.push(closing())
    with pytest.raises(stream.ShutdownError):
        p.pop()


class Interrupting:
    """A ticket whose first wait is interrupted."""

    def __init__(self, ticket):
        self._ticket, self._interrupted = ticket, False

    def errors(self, *arguments):
        if not self._interrupted:
            self._interrupted = True
            raise KeyboardInterrupt
        return self._ticket.errors(*arguments)

    def __getattr__(self, name):
        return getattr(self._ticket, name)


def test_an_interrupt_of_a_pop_loses_no_batch(volume, pipeline):
    path, values = volume
    p = pipeline()
    p.push(crop(path, k) for k in range(8))
    p.flush()
    item = p._producer.ready[0]
    item.tickets = [(rows, Interrupting(ticket)) for rows, ticket in item.tickets]
    assert item.tickets
    for _ in item.tickets:
        before = p.state_dict()
        with pytest.raises(KeyboardInterrupt):
            p.pop()
        assert p.state_dict() == before
    assert before["position"] == 0
    found = np.concatenate([batch.numpy() for batch in p.batches()])
    assert np.array_equal(found, [cut(values, k) for k in range(8)])


def test_close_ends_the_reads_of_an_interrupted_pop(volume, pipeline):
    ended = []

    class Ticket(Interrupting):
        def cancel(self):
            ended.append(self)
            self._ticket.cancel()

    p = pipeline()
    p.push(crop(volume[0], k) for k in range(8))
    p.flush()
    item = p._producer.ready[0]
    item.tickets = [(rows, Ticket(ticket)) for rows, ticket in item.tickets]
    with pytest.raises(KeyboardInterrupt):
        p.pop()
    p.close()
    assert ended == [ticket for _, ticket in item.tickets] != []


@pytest.mark.parametrize("at", ["before", "within"])
def test_an_interrupt_while_a_batch_is_made_loses_none_and_mixes_no_rows(volume, tmp_path, pipeline, monkeypatch, at):
    """Rows are moved over faulty ones; what was moved before the interrupt is not moved again."""
    path, values = volume
    p = pipeline(batch_size=5, on_error="skip", pad="edge")
    p.push([crop(path, 0), crop(tmp_path / "none", 1), *(crop(path, k) for k in (2, 18, 4))])
    p.push(crop(path, k) for k in range(5))
    p.flush()
    item = p._producer.ready[0]
    rows, ticket = item.tickets[0]

    class Faulty:
        def errors(self, *_):
            assert not ticket.errors()
            return {rows.index(0): OSError("cannot be read")}

        def __getattr__(self, name):
            return getattr(ticket, name)

    item.tickets[0] = (rows, Faulty())
    original, interrupted = Consumer._assembled, []

    class Rows:
        """The batch; an interrupt comes when the last row was moved."""

        def __init__(self, array):
            self._array = array

        def __getitem__(self, index):
            return self._array[index]

        def __setitem__(self, index, value):
            self._array[index] = value
            if index == 2 and not interrupted:
                interrupted.append(at)
                raise KeyboardInterrupt

    def assembled(self, *arguments):
        if at == "before" and not interrupted:
            interrupted.append(at)
            raise KeyboardInterrupt
        return original(self, *arguments)

    if at == "within":
        monkeypatch.setattr("linumpy.stream.batches.consumer.resample", lambda array, *rest: make(array._array, *rest))
        from linumpy.stream.resampling.resample import resample as make

        item.arrays = [Rows(item.arrays[0])]
    else:
        monkeypatch.setattr(Consumer, "_assembled", assembled)
    with pytest.raises(KeyboardInterrupt):
        p.pop()
    assert interrupted
    around = np.pad(values, ((0, 4), (0, 0), (0, 0)), mode="edge")
    with p.pop() as batch:
        assert starts(batch) == [2, 18, 4]
        assert np.array_equal(batch.numpy(), [cut(around, k) for k in (2, 18, 4)])
    assert np.array_equal(p.pop().numpy(), [cut(values, k) for k in range(5)])
    assert p.stats.samples_skipped == 2


def test_an_error_while_a_batch_is_made_has_a_cause_and_ends_nothing(volume, pipeline, monkeypatch):
    made, original = [], consumer_module.resample

    def failing(*arguments):
        made.append(arguments)
        if len(made) == 1:
            raise RuntimeError("launch failed")
        return original(*arguments)

    monkeypatch.setattr(consumer_module, "resample", failing)
    p = pipeline(augment=stream.Augment(flip="x"), pad="edge")
    p.push(crop(volume[0], k) for k in range(4))
    with pytest.raises(stream.StreamError, match="launch failed") as raised:
        p.pop()
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert drain(p) == [[2, 3]]


def test_many_threads_push_and_pop(volume, pipeline):
    path, values = volume
    p = pipeline(batch_size=3)
    done, found, faults = threading.Event(), [], []

    def pushes(first):
        for k in range(first, 16, 4):
            p.push([crop(path, k)] * 6)

    def pops():
        while not done.is_set() or p.pending:
            try:
                with p.pop() as batch:
                    if not np.array_equal(batch.numpy(), [cut(values, k) for k in starts(batch)]):
                        faults.append(starts(batch))
                    found.extend(starts(batch))
            except stream.TryAgain:
                continue

    pushing = [threading.Thread(target=pushes, args=(k,)) for k in range(4)]
    popping = [threading.Thread(target=pops) for _ in range(3)]
    for one in pushing + popping:
        one.start()
    for one in pushing:
        one.join()
    p.flush()
    done.set()
    for one in popping:
        one.join()
    found += [k for start in drain(p) for k in start]
    assert not faults
    assert sorted(found) == sorted(6 * list(range(16)))


def test_a_pop_during_close_returns_a_batch_or_raises(volume, pipeline):
    path, values = volume
    for _ in range(20):
        p = pipeline(dtype="bf16")
        p.push(crop(path, k % 16) for k in itertools.count())
        found = []

        def pops(p=p, found=found):
            while True:
                try:
                    batch = p.pop()
                except BaseException as error:
                    found.append(error)
                    return
                found.append((starts(batch), batch.numpy()))

        popping = threading.Thread(target=pops)
        popping.start()
        p.close()
        popping.join(20)
        assert not popping.is_alive()
        assert isinstance(found[-1], stream.ShutdownError)
        for begun, crops in found[:-1]:
            assert np.allclose(crops, [cut(values, k) for k in begun], rtol=2**-8)


def test_iterators_of_a_closed_pipeline_raise(volume, pipeline):
    p = pipeline()
    p.push([crop(volume[0])] * 4)
    found = p.batches()
    held = next(found)
    crops = np.from_dlpack(held)
    p.close()
    for use in (lambda: next(found), lambda: list(p.batches()), lambda: list(p.batches(3))):
        with pytest.raises(stream.ShutdownError, match="closed"):
            use()
    assert np.array_equal(crops, held.numpy())
    assert np.array_equal(crops[0], cut(volume[1], 0))
    for wrong in (1.5, "2", True):
        with pytest.raises(TypeError, match="n must be an int"):
            p.batches(wrong)


def test_calls_in_a_fork_raise(volume, pipeline):
    p = pipeline()
    p.push(crop(volume[0], k % 9) for k in itertools.count())
    batch = p.pop()
    expected = batch.numpy()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # no assertion here: pytest would go on in the child
        told = 0
        try:
            calls = (p.pop, p.flush, lambda: next(p.batches()), lambda: p.push([]))
            for use in (*calls, lambda: p.pending, lambda: p.in_flight, lambda: p.stats, p.stats_reset, p.state_dict):
                try:
                    use()
                except stream.ShutdownError as error:
                    told += "make one here" in str(error)
            p.close()
            told += np.array_equal(batch.numpy(), expected)
        finally:
            os.write(write, bytes([told]))
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        assert said.read() == bytes([10])
    os.waitpid(child, 0)
    assert starts(p.pop()) == [2, 3]


def test_a_pipeline_that_is_not_closed_is_freed(volume):
    def threads():
        return [one for one in threading.enumerate() if one.name.startswith("linumpy-stream")]

    config = stream.Config(batch_size=2, host_buffer_bytes=1 << 20, device_buffer_bytes=1 << 16, device="cpu")
    before = set(threads())
    p = stream.Pipeline(config)
    p.push(crop(volume[0]) for _ in itertools.count())
    batch = p.pop()
    made = set(threads()) - before
    assert made
    del p
    gc.collect()
    for _ in range(2):  # the threads, and the one that ends them
        for one in {*made, *threads()} - before:
            one.join(20)
    assert not set(threads()) - before
    assert np.array_equal(batch.numpy()[0], cut(volume[1], 0))


NEVER_CLOSED = """
import itertools, sys, time
from linumpy import stream
crop = stream.Sample(sys.argv[1], ((0, 4), (0, 5), (0, 6)))
def blocking():
    yield crop
    yield crop
    time.sleep(1000)
for samples in (itertools.repeat(crop), blocking()):
    p = stream.Pipeline(stream.Config(batch_size=2, host_buffer_bytes=1 << 20, device_buffer_bytes=4096, device="cpu"))
    p.push(samples)
    p.pop()
print("end")
"""


def test_a_process_ends_with_open_pipelines(volume):
    done = subprocess.run(
        [sys.executable, "-c", NEVER_CLOSED, volume[0]], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
