"""If this fails, code that was written for the interface breaks: names, numbers, errors."""

import dataclasses
import enum
import logging
import pickle
import time

import numpy as np
import pytest

from linumpy import stream
from linumpy.core import native
from tests.support.stream_arrays import make_array

BOX = ((0, 4), (0, 4))
NEEDED = {"batch_size": 1, "host_buffer_bytes": 1 << 20, "device_buffer_bytes": 1 << 20}


@pytest.fixture
def path(tmp_path):
    return make_array(tmp_path / "a", np.arange(64, dtype="u1").reshape(8, 8))


def slowly(path, count):
    for _ in range(count):
        time.sleep(0.01)
        yield stream.Sample(path, BOX)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 6])
@pytest.mark.parametrize("lazily", [False, True])
def test_a_loop_while_samples_are_pending_serves_all(path, pipeline, count, lazily):
    """As soon as they are pushed, though nothing is read yet; the rest of a batch is pending until it is flushed."""
    p = pipeline(batch_size=2)
    assert p.pending is False
    p.push(slowly(path, count) if lazily else [stream.Sample(path, BOX)] * count)
    p.push(iter([]))
    p.flush()
    found = []
    while p.pending:
        found.append(len(p.pop()))
    assert sum(found) == count
    p.push(slowly(path, count))
    assert [len(p.pop()) for _ in range(count // 2) if p.pending] == [2] * (count // 2)
    assert p.pending is (count % 2 == 1)
    message = "1 samples wait for a batch of 2: push more, or flush" if p.pending else "push samples first"
    with pytest.raises(stream.TryAgain, match=message):
        p.pop()


def test_an_error_is_pending(tmp_path, pipeline):
    p = pipeline(batch_size=1)
    p.push(iter([stream.Sample(tmp_path / "none", BOX)]))
    assert p.pending
    with pytest.raises(stream.NotFound):
        p.pop()
    assert not p.pending
    p.close()
    assert not p.pending


def test_the_number_of_batches_in_flight(path, pipeline):
    p = pipeline(batch_size=1, lookahead_batches=3)
    assert p.in_flight == 0
    p.push([stream.Sample(path, BOX)] * 5)
    p.flush()
    assert p.in_flight == 3
    for left in (3, 3, 2, 1, 0):
        p.pop().release()
        p.flush()
        assert p.in_flight == min(left, 3)


def test_an_int_takes_one_voxel_and_drops_its_axis(path, pipeline):
    values = np.arange(64, dtype="u1").reshape(8, 8)
    p = pipeline(batch_size=2, dtype="stored", pad="constant", pad_value=99)
    crops = [stream.Sample(path, np.s_[k, 2:6]) for k in (3, np.int64(4), 7, -1)]
    p.push(crops)
    first, second = p.batches()
    assert first.shape == (2, 4)
    assert np.array_equal(np.from_dlpack(first), values[3:5, 2:6])
    assert second.numpy().tolist() == [values[7, 2:6].tolist(), [99] * 4]
    assert crops[0] != stream.Sample(path, np.s_[3:4, 2:6])
    assert [pickle.loads(pickle.dumps(one)) for one in crops] == crops
    assert dataclasses.replace(crops[0], level=0) == crops[0]
    for wrong, message in (((7,), "dropped must be <"), ((1,), "axis 1 of aabb has more than one voxel")):
        with pytest.raises(stream.InvalidArgument, match=message):
            stream.Sample(path, np.s_[3, 2:6], dropped=wrong)
    p.push(iter([stream.Sample(path, np.s_[3:4, 2:6])]))
    p.flush()
    with pytest.raises(stream.RankMismatch, match=r"crop of \(1, 4\), of \(4,\) in the first sample"):
        p.pop()
    q = pipeline(batch_size=1, dtype="stored")
    q.push([stream.Sample(path, (3, 5))])
    assert q.pop().numpy().tolist() == [values[3, 5]]


def test_metrics_have_the_fields_of_the_interface(path, pipeline):
    names = [one.name for one in dataclasses.fields(stream.Metric)]
    assert names == ["name", "ms", "best_ms", "input_bytes", "output_bytes", "count"]
    metric = stream.Metric("a stage")
    for seconds in (0.25, 0.125, 0.5):
        metric = metric.plus(seconds, 1000)
    assert metric == stream.Metric("a stage", 875.0, 125.0, 0, 3000, 3)
    assert metric.mean_ms == pytest.approx(875 / 3)
    assert metric.gb_per_s == pytest.approx(3000 / 0.875 / 1e9)
    p = pipeline(batch_size=1)
    p.push([stream.Sample(path, BOX)] * 4)
    for batch in p.batches():
        batch.release()
    found = p.stats
    stages = [one.name for one in dataclasses.fields(found) if isinstance(getattr(found, one.name), stream.Metric)]
    assert [getattr(found, name).name for name in stages] == stages
    assert 0 < found.plan.best_ms <= found.plan.mean_ms <= found.plan.ms
    assert (found.plan.count, found.plan.output_bytes) == (4, 4 * 16)
    assert found.io.count >= 1 or native.why_no_core()  # zarr-python counts no reads
    assert found.io.input_bytes == found.io.output_bytes
    assert "best ms" in str(found)
    p.stats_reset()
    assert (p.stats.plan.count, p.stats.plan.best_ms, p.stats.pop_wait_io.ms) == (0, np.inf, 0.0)
    assert stream.Metric().plus(0.25) == stream.Metric("", 250.0, 250.0, count=1)
    assert stream.Metric.summed("io", 1, 0.25).best_ms == 250
    for count in (0, 2):
        assert stream.Metric.summed("io", count, 0.25).best_ms == np.inf


def test_enumerations_are_ints(path):
    for kind in (stream.Dtype, stream.Status):
        assert issubclass(kind, enum.IntEnum)
        assert [int(one) for one in kind] == list(range(len(kind)))
    for member in stream.Dtype:
        for spelled in (int(member), np.int64(member), member, member.label):
            assert stream.Config(**NEEDED, dtype=spelled).dtype is member
            assert stream.Part("a", dtype=spelled).dtype is member
    for wrong in (4, -1, True, 1.0):
        with pytest.raises(stream.InvalidArgument, match="dtype must be one of"):
            stream.Config(**NEEDED, dtype=wrong)


def test_the_first_dtype_of_a_part_is_not_that_of_the_configuration(path, pipeline):
    """Its number is 0."""
    p = pipeline(batch_size=1, dtype="f16")
    p.push(stream.Sample(path, BOX, parts=(stream.Part("wide", dtype=stream.Dtype.F32),)))
    with p.pop() as parts:
        assert (parts.image.dtype, parts.wide.dtype) == ("float16", "float32")


def test_levels_of_the_log():
    logger = logging.getLogger("linumpy.stream")
    before = logger.level
    try:
        for level, expected in (
            (0, 5), (1, logging.DEBUG), (2, logging.INFO), (3, logging.WARNING), (4, logging.ERROR),
            (5, logging.CRITICAL), (logging.INFO, logging.INFO), (logging.CRITICAL, logging.CRITICAL),
            ("TRACE", 5), ("warn", logging.WARNING), ("FATAL", logging.CRITICAL), ("INFO", logging.INFO),
        ):  # fmt: skip
            stream.set_log_level(level)
            assert logger.level == expected
        for wrong in (-1, 6, 9, True, "loud", None, 2.5, "NOTSET"):
            with pytest.raises(stream.InvalidArgument, match="level must be 0"):
                stream.set_log_level(wrong)
    finally:
        logger.setLevel(before)


def test_errors_name_their_stage(tmp_path, path, pipeline):
    assert stream.DamacyError is stream.StreamError
    p = pipeline(batch_size=1)
    missing = stream.Sample(tmp_path / "none", BOX)
    far = stream.Sample(path, ((0, 99), (0, 4)))
    whole = stream.Sample(path, BOX)

    def failing():
        raise ValueError("no more")
        yield

    for pushed, kind, stage, detail in (
        (iter([missing]), stream.NotFound, "open", "there is no file"),
        (iter([far]), stream.InvalidArgument, "plan", "reaches out of"),
        (failing(), stream.InvalidArgument, "pull", "ValueError: no more"),
    ):  # fmt: skip
        p.push(pushed)
        with pytest.raises(kind) as caught:
            p.pop()
        assert caught.value.what == stage
        assert detail in caught.value.detail
        assert caught.value.detail in str(caught.value)
    p.push(whole)
    p.pop().release()
    with pytest.raises(stream.TryAgain) as caught:
        p.pop()
    assert (caught.value.what, caught.value.status) == ("pop", stream.Status.TRY_AGAIN)


def test_a_batch_says_what_it_is(path, pipeline):
    p = pipeline(batch_size=2, dtype="bf16")
    p.push([stream.Sample(path, BOX, parts=(stream.Part("labels", kind="labels"),))] * 2)
    batch = p.pop()
    assert repr(batch) == "<Batch 0: image (2, 4, 4) bfloat16, labels (2, 4, 4) uint8>"
    batch.release()
    assert repr(batch) == "<Batch 0, released>"


class Event:
    """What a consumer records; waiting for it is noted."""

    def __init__(self):
        self.waited = 0

    def synchronize(self):
        self.waited += 1


def test_memory_is_filled_again_behind_the_event_of_a_consumer(path, pipeline):
    p = pipeline(batch_size=1, dtype="stored", device_buffer_bytes=2 * 512)
    p.push([stream.Sample(path, BOX)] * 6)
    events = [Event() for _ in range(6)]
    for batch, event in zip(p.batches(), events, strict=True):
        assert event.waited == 0
        batch.release(event)
        batch.release(event)  # the second time there is nothing to give back
    assert [one.waited for one in events[:4]] == [1] * 4
    p.push(stream.Sample(path, BOX))
    batch = p.pop()
    for wrong in ("event", 1.5, True, object()):
        with pytest.raises(stream.InvalidArgument, match="event must be an event"):
            batch.release(wrong)
    assert batch.shape == (1, 4, 4)


def test_numpy_takes_a_batch_in_host_memory(path, pipeline):
    """Without ``__array__`` NumPy would make an array of objects."""
    with pipeline(batch_size=2) as p:
        p.push([stream.Sample(path, ((n, n + 2), (1, 4))) for n in (0, 3)])
        batch = p.pop()
        values = np.arange(64).reshape(8, 8)
        expected = np.stack([values[0:2, 1:4], values[3:5, 1:4]])
        for taken in (np.asarray(batch), np.asarray(batch.tensors[0]), np.asarray(batch, "f8")):
            np.testing.assert_array_equal(taken, expected)
        assert np.asarray(batch, "f8").dtype == "f8"
