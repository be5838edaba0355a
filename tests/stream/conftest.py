"""Arrays and pipelines for the tests of batches."""

import numpy as np
import pytest

from linumpy import stream
from tests.support.stream_arrays import make_array


@pytest.fixture
def volume(tmp_path):
    """A path and the values of a small array."""
    values = np.random.default_rng(1).integers(0, 60_000, (20, 30, 40)).astype("u2")
    return make_array(tmp_path / "a.zarr", values, (8, 8, 16)), values


@pytest.fixture
def pipeline():
    """Make pipelines on the CPU, closed at the end."""
    made = []

    def make(**options):
        options = {"batch_size": 2, "host_buffer_bytes": 4 << 20, "device_buffer_bytes": 1 << 24, **options}
        made.append(stream.Pipeline(stream.Config(device="cpu", **options)))
        return made[-1]

    yield make
    for one in made:
        one.close()
