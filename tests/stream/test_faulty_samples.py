"""If this fails, a faulty sample spoils others of its batch, or passes."""

import shutil

import numpy as np
import pytest
import zarr

from linumpy import stream
from tests.support.stream_arrays import make_array

BOX = ((0, 4), (0, 5), (0, 6))


def truncated(folder, values):
    path = make_array(folder / "truncated", values, (8, 8, 16))
    chunk = folder / "truncated" / "c" / "0" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:20])
    return stream.Sample(path, BOX)


def truncated_shard(folder, values):
    path = make_array(folder / "shard", values, (4, 8, 8), shards=(20, 32, 40))
    shard = folder / "shard" / "c" / "0" / "0" / "0"
    shard.write_bytes(shard.read_bytes()[:-9])
    return stream.Sample(path, BOX)


def unreadable(folder, values):
    path = make_array(folder / "folder", values, (8, 8, 16))
    chunk = folder / "folder" / "c" / "0" / "0" / "0"
    chunk.unlink()
    chunk.mkdir()
    return stream.Sample(path, BOX)


def metadata(folder, values):
    path = make_array(folder / "metadata", values, (8, 8, 16))
    document = folder / "metadata" / "zarr.json"
    document.write_bytes(document.read_bytes()[:40])
    return stream.Sample(path, BOX)


def group(folder, values):
    zarr.create_group(folder / "group")
    return stream.Sample(folder / "group", BOX)


def missing_part(folder, values):
    part = stream.Part("labels", folder / "no labels", kind="labels")
    return stream.Sample(make_array(folder / "parts", values), BOX, parts=[part])


def unlike(change=lambda values: values, box=BOX, **options):
    """Make a crop of an array whose values or crop are not those of the others."""
    return lambda folder, values: stream.Sample(make_array(folder / "a", change(values)), box, **options)


FAULTS = {
    "truncated chunk": (truncated, stream.DecodeError),
    "truncated shard": (truncated_shard, stream.DecodeError),
    "a folder for a chunk": (unreadable, stream.StreamError),
    "truncated metadata": (metadata, stream.StreamError),
    "no array": (lambda folder, _: stream.Sample(folder / "none", BOX), stream.NotFound),
    "a group": (group, stream.StreamError),
    "no such level": (unlike(level=1), stream.InvalidArgument),
    "axes of the crop": (unlike(box=BOX[:2]), stream.RankMismatch),
    "axes of the array": (unlike(lambda values: values[0], BOX[1:]), stream.RankMismatch),
    "shape": (unlike(box=((0, 4),) * 3), stream.InvalidArgument),
    "dtype": (unlike(lambda values: values.astype("f4")), stream.DtypeMismatch),
    "behind the end": (unlike(box=((17, 21), *BOX[1:])), stream.InvalidArgument),
    "before the start": (unlike(box=((-1, 3), *BOX[1:])), stream.InvalidArgument),
    "parts": (missing_part, stream.StreamError),
}


#: zarr-python takes a folder in place of a chunk for a missing chunk.
BY_CORE = ["a folder for a chunk"]


@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=[pytest.mark.needs_core] * (one in BY_CORE)) for one in FAULTS]
)
def test_a_faulty_sample_at_every_position(volume, tmp_path, pipeline, fault):
    path, values = volume
    make, error = FAULTS[fault]
    bad = make(tmp_path, values)
    good = [stream.Sample(path, ((k, k + 4), *BOX[1:])) for k in range(8)]
    crops = [values[k : k + 4, :5, :6] for k in range(8)]
    for position in range(3):
        second = [*good[3:5]]
        second.insert(position, bad)
        samples = [*good[:3], *second, *good[5:8]]

        p = pipeline(batch_size=3, dtype="stored")
        p.push(iter(samples))
        assert np.array_equal(p.pop().numpy(), crops[:3])
        with pytest.raises(error) as raised:
            p.pop()
        assert isinstance(raised.value, stream.StreamError)
        assert raised.value.sample == bad
        assert str(bad) in str(raised.value)
        assert raised.value.detail in str(raised.value)
        with p.pop() as batch:
            assert (batch.batch_id, batch.errors, batch.samples) == (1, (raised.value,), tuple(good[3:5]))
            assert np.array_equal(batch.numpy(), crops[3:5])
        assert np.array_equal(p.pop().numpy(), crops[5:])
        assert (p.stats.samples_skipped, p.stats.batches_truncated) == (1, 1)
        p.close()

        p = pipeline(batch_size=3, dtype="stored", on_error="skip")
        p.push(samples)
        found = []
        for batch in p.batches():
            with batch:
                assert np.array_equal(batch.numpy(), [crops[good.index(one)] for one in batch.samples])
                assert [one.sample for one in batch.errors] == [bad] * (3 - len(batch))
                found.append(len(batch))
        assert found == [3, 2, 3]
        assert (p.stats.samples_skipped, p.stats.batches_truncated) == (1, 1)
        p.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_push_of_a_faulty_sample_leaves_earlier_samples_alone(volume, tmp_path, pipeline, fault):
    """A list is refused as a whole, but for faults that only reading shows."""
    path, values = volume
    make, error = FAULTS[fault]
    bad = make(tmp_path, values)
    good = [stream.Sample(path, ((k, k + 4), *BOX[1:])) for k in range(8)]
    is_read = fault in ("truncated chunk", "truncated shard", "a folder for a chunk")
    p = pipeline(batch_size=4, dtype="stored")
    p.push(good[:2])
    for pushed in (bad, [good[7], bad], (bad, good[7])):
        if is_read:
            break
        with pytest.raises(error) as raised:
            p.push(pushed)
        assert raised.value.sample == bad
    p.push(good[2:6])
    p.flush()
    assert [batch.samples for batch in p.batches()] == [tuple(good[:4]), tuple(good[4:6])]


def test_faulty_samples_of_one_batch_are_raised_one_by_one(volume, tmp_path, pipeline):
    """Of the plan and of the read; a batch without other samples ends with its last error."""
    path, _ = volume
    good, missing = stream.Sample(path, BOX), stream.Sample(tmp_path / "none", BOX)
    cut = truncated(tmp_path, volume[1])
    p = pipeline(batch_size=3)
    p.push(iter([good, missing, cut, cut, missing, missing, good, good, good]))
    found = []
    while p.pending:
        try:
            with p.pop() as batch:
                found.append((batch.batch_id, len(batch), len(batch.errors)))
        except stream.StreamError as error:
            found.append(type(error))
            position = p.state_dict()["position"]
            assert position in (0, 3, 6)
    gone, damaged = stream.NotFound, stream.DecodeError
    assert found == [gone, damaged, (0, 1, 2), gone, gone, damaged, (2, 3, 0)]
    assert p.stats.samples_skipped == 5


def test_an_array_that_vanishes_is_an_error_of_its_samples(volume, tmp_path, pipeline):
    """Chunks that were never written are fill value; a missing array is an error, also where it was open."""
    path, values = volume
    gone = make_array(tmp_path / "gone", values, (8, 8, 16))
    p = pipeline(batch_size=1, n_zarrs_meta_cache=1)
    p.push(stream.Sample(gone, BOX))
    assert np.array_equal(p.pop().numpy()[0], values[:4, :5, :6].astype("f4"))
    shutil.rmtree(gone)
    p.push(iter([stream.Sample(path, BOX), stream.Sample(gone, BOX), stream.Sample(path, BOX)]))
    p.pop()
    with pytest.raises(stream.NotFound):
        p.pop()
    assert np.array_equal(p.pop().numpy()[0], values[:4, :5, :6].astype("f4"))
