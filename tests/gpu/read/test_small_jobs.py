"""If this fails, memory, descriptors or threads grow with the number of jobs."""

import gc
import os
import threading
import time

import numpy as np
import pytest
import zarr

from linumpy.gpu.read.limits import SLABS
from linumpy.gpu.read.reader import Reader
from tests.gpu.read.test_reader import memory_of_process
from tests.support import budget
from tests.support.gpu import reference
from tests.support.gpu.stand_in import needs_stand_in
from tests.support.stores import random_values

pytestmark = needs_stand_in

KINDS = {"raw": {"compressors": None}, "zstd": {}, "shards": {"compressors": None, "shards": (16, 48)}}
#: Seconds of the short run.
SECONDS = 1


def native_threads():
    """All threads of the process that are none of Python's: zarr-python starts others when it likes."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


@pytest.mark.parametrize(("where", "count"), [("cpu", 10**6), (0, 2 * 10**4)])
def test_many_small_jobs_in_flat_memory(tmp_path, where, count):
    """As many as the short run has time for; all of them in the long one."""
    arrays = []
    for kind, options in KINDS.items():
        arrays.append(zarr.create_array(tmp_path / kind, shape=(40, 48), chunks=(8, 16), dtype="u2", **options))
        arrays[-1][...] = random_values("u2", (40, 48), 1)
    expected = [array[...] for array in arrays]
    rng, limit = np.random.default_rng(1), time.monotonic() + (10**6 if budget.SLOW else SECONDS)

    def some(reader, wanted):
        done = 0
        while done < wanted and (time.monotonic() < limit or done < 2000):
            which = int(rng.integers(3))
            start = rng.integers(0, (32, 40), (200, 2))
            tickets = reader.submit_many(arrays[which], np.stack([start, start + 8], 2))
            for ticket, (a, b) in list(zip(tickets, start, strict=True))[::3]:  # nobody waits for the others
                got = ticket.result()
                assert np.array_equal(got if where == "cpu" else got.get(), expected[which][a : a + 8, b : b + 8])
            done += len(tickets)
        return done

    with reference.fake_device(1) as device, Reader(where, 2**22) as reader:
        before = some(reader, 2000)
        misses, files, threads = reader.stats().layout_misses, reference.open_files(), native_threads()
        memory, held = memory_of_process(), device.given_out()
        done = some(reader, count)
        gc.collect()
        assert set(reference.open_files()) <= set(files)
        assert native_threads() <= threads + 8  # those of the pool and of slabs that were not needed before
        assert memory_of_process() - memory < 32 * 2**20
        # Of each slab a stream, an event, and two pieces of pinned memory; some slabs were not needed before.
        assert device.driver.alive() <= 4 * SLABS
        assert device.given_out() - held < 2**20
        for array, values in zip(arrays, expected, strict=True):  # behind all others
            got = reader.submit(array).result()
            assert np.array_equal(got if where == "cpu" else got.get(), values)
        assert reader.stats().layout_misses == misses
        assert reader.stats().jobs == before + done + 3
