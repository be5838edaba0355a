"""If this fails, readers that a process shares leak, hang after a fork, or are closed under their callers."""

import os
import signal
import threading

import pytest
import zarr

from linumpy.gpu.read.shared import release, shared_reader
from tests.support.stores import random_values, same


@pytest.fixture
def array(tmp_path):
    array = zarr.create_array(tmp_path / "a", shape=(40, 48), chunks=(8, 16), dtype="u2", compressors=None)
    array[...] = random_values("u2", (40, 48), 1)
    release()
    yield array
    release()


def read(array):
    with shared_reader("cpu") as reader:
        assert same(reader.submit(array).result(), array[...])
        return reader


def threads_of_readers():
    """Their threads; zarr-python starts others when it likes."""
    return {one for one in threading.enumerate() if one.name.startswith("linumpy")}


@pytest.mark.timeout(60)
def test_a_child_makes_its_own(array):
    expected = array[...]
    parent = read(array)
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(30)
            try:
                parent.submit(array)
            except RuntimeError as error:
                status = 3 if "made by the parent of this process: make one here" in str(error) else 4
            with shared_reader("cpu") as mine:
                right = mine is not parent and same(mine.submit(array).result(), expected)
            parent.close()
            release()
            status = 0 if right and status == 3 else status
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert read(array) is parent


def test_release(array):
    before = threads_of_readers()
    first = read(array)
    assert read(array) is first
    release()
    assert threads_of_readers() <= before  # those of other tests may end meanwhile
    second = read(array)
    assert second is not first
    second.close()
    assert read(array) is not second, "a closed reader must not be handed out"


def test_a_reader_that_is_in_use_is_closed_by_its_last_user(array):
    before, expected = threads_of_readers(), array[...]
    with shared_reader("cpu") as first, shared_reader("cpu") as same_one:
        assert same_one is first
        tickets = [first.submit(array) for _ in range(20)]
        release()
        with shared_reader("cpu") as second:
            assert second is not first
            release()
        assert second.is_closed
        assert not first.is_closed
        assert all(same(ticket.result(), expected) for ticket in tickets)
        assert same(first.submit(array).result(), expected)
    assert first.is_closed
    assert threads_of_readers() <= before


def test_releases_while_threads_read(array):
    expected, wrong, ended = array[...], [], threading.Event()

    def work():
        try:
            while not ended.is_set():
                with shared_reader("cpu") as reader:
                    if not same(reader.submit(array).result(), expected):
                        wrong.append("other values")
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    for _ in range(100):
        release()
    ended.set()
    [thread.join(30) for thread in threads]
    assert not wrong
