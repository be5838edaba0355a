"""The kvikio reader's own loop, on the CPU, against zarr-python: every kind of raw array it takes."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reference
from stores import cases, random_values, same, write


@pytest.fixture(autouse=True)
def no_kvikio_settings(monkeypatch):
    """There is no kvikio on a machine without a GPU; its settings are tested by themselves."""
    import contextlib

    monkeypatch.setattr("linumpy.gpu.kvikio_zarr.read_settings", contextlib.nullcontext)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), slab=st.sampled_from([None, 8192, 20480]), direct=st.booleans())
def test_same_bytes_as_zarr(case, slab, direct):
    with tempfile.TemporaryDirectory() as folder:
        array = write(case, Path(folder) / "a")
        job = reference.make_job(array, case.region, slab_nbytes=slab, direct=direct)
        assert same(reference.execute(job), array[case.region])
        assert reference.PosixFile.open_files == 0
