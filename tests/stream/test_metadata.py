"""Metadata of arrays: opened ahead and side by side, kept, counted."""

import threading

import numpy as np
import pytest
from stream_arrays import make_array

from linumpy import stream
from linumpy.stream import sources

BOX = ((0, 4), (0, 4))


@pytest.fixture
def paths(tmp_path):
    return [make_array(tmp_path / str(k), np.full((4, 4), k, "u1")) for k in range(8)]


@pytest.fixture
def opened(monkeypatch):
    """Paths in the order in which they are opened; those that are held wait."""
    state = {"paths": [], "held": set(), "go": threading.Event(), "changed": threading.Condition()}
    original = sources.open_info

    def open_info(uri, level, config):
        with state["changed"]:
            state["paths"].append(uri)
            state["changed"].notify_all()
        if uri in state["held"]:
            assert state["go"].wait(30)
        return original(uri, level, config)

    monkeypatch.setattr(sources, "open_info", open_info)
    yield state
    state["go"].set()


def test_arrays_of_all_batches_of_the_lookahead_are_opened_at_the_same_time(paths, pipeline, opened):
    """Though nothing of the first batch is known yet."""
    opened["held"] = set(paths[:6])
    p = pipeline(batch_size=2, lookahead_batches=3, n_io_threads=6)
    p.push(stream.Sample(path, BOX) for path in paths)
    with opened["changed"]:
        assert opened["changed"].wait_for(lambda: len(opened["paths"]) == 6, timeout=30)
        assert set(opened["paths"]) == set(paths[:6])  # and no more than the lookahead
    opened["go"].set()
    found = [int(crop[0, 0]) for batch in p.batches() for crop in batch.numpy()]
    assert found == list(range(8))


def test_no_more_arrays_are_opened_at_a_time_than_threads_are_asked_for(paths, pipeline, opened):
    opened["held"] = set(paths)
    p = pipeline(batch_size=4, n_io_threads=2)
    p.push(stream.Sample(path, BOX) for path in paths)
    with opened["changed"]:
        assert opened["changed"].wait_for(lambda: len(opened["paths"]) == 2, timeout=30)
        assert not opened["changed"].wait_for(lambda: len(opened["paths"]) > 2, timeout=0.2)
    opened["go"].set()
    assert sum(len(batch) for batch in p.batches()) == 8


def test_the_cache_keeps_the_last_arrays_and_counts(paths, pipeline, opened):
    order = [0, 1, 2, 0, 1, 3, 0, 2, 2, 4]  # with 3 kept: the use of an array keeps it longer than others
    misses = [0, 1, 2, 3, 2, 4]
    p = pipeline(batch_size=1, n_zarrs_meta_cache=3)
    p.push(stream.Sample(paths[k], BOX) for k in order)
    assert [int(batch.numpy()[0, 0, 0]) for batch in p.batches()] == order
    assert sorted(opened["paths"]) == sorted(paths[k] for k in misses)
    assert (p.stats.zarr_meta_misses, p.stats.zarr_meta_hits) == (len(misses), len(order) - len(misses))


def test_parts_of_one_array_open_it_once(paths, pipeline, opened):
    p = pipeline(batch_size=1)
    p.push(stream.Sample(paths[1], BOX, parts=[stream.Part("labels", kind="labels"), stream.Part("other", paths[2])]))
    with p.pop() as parts:
        assert [int(one.numpy()[0, 0, 0]) for one in parts] == [1, 1, 2]
    assert sorted(opened["paths"]) == paths[1:3]
    assert (p.stats.zarr_meta_misses, p.stats.zarr_meta_hits) == (2, 1)


def test_an_array_that_could_not_be_opened_is_looked_for_again(tmp_path, pipeline):
    p = pipeline(batch_size=1)
    p.push(stream.Sample(tmp_path / "later", BOX))
    with pytest.raises(stream.NotFound):
        p.pop()
    make_array(tmp_path / "later", np.full((4, 4), 9, "u1"))
    p.push(stream.Sample(tmp_path / "later", BOX))
    assert (p.pop().numpy() == 9).all()
