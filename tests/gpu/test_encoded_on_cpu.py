"""The reader of encoded chunks on the CPU, against zarr-python: its loop, its plans, and the device's own decoders."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutants import CHAINS, disagreements
from reference import PreadEngine
from stores import encoded_cases, plain_values, random_values, same, write
from twin import Decoder, launch, needs_compiler

from linumpy.gpu.engines import PosixEngine

inside_a_test = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
values_of = {"random": random_values, "plain": plain_values}


def check(case, kind, *, kernels=None, **options):
    with tempfile.TemporaryDirectory() as folder:
        array = write(case, Path(folder) / "a", values_of[kind](case.dtype, case.shape, case.seed))
        job = reference.make_job(array, case.region, **options)
        engine = PreadEngine() if job.direct else PosixEngine(3)
        assert same(reference.execute(job, engine, kernels), array[case.region])
        return job


@inside_a_test
@given(
    case=encoded_cases(),
    kind=st.sampled_from(sorted(values_of)),
    slot=st.sampled_from([None, 2**18, 2**20]),
    direct=st.booleans(),
    decode_on=st.sampled_from(["device", "host", None]),
)
def test_same_bytes_as_zarr(case, kind, slot, direct, decode_on):
    """With numcodecs in place of the kernels: locating, joining, packing, placing."""
    check(case, kind, slab_nbytes=slot, direct=direct, decode_on=decode_on)


@needs_compiler
@inside_a_test
@given(case=encoded_cases(), kind=st.sampled_from(sorted(values_of)), slot=st.sampled_from([None, 2**18]))
def test_the_kernels_decode_what_zarr_encoded(case, kind, slot):
    job = check(case, kind, kernels=launch, slab_nbytes=slot, decode_on="device")
    if job.way is not None and job.way.slot is not None and kind == "plain":
        assert job.counts.by_host == 0, "chunks were left to the host"


@needs_compiler
@pytest.mark.parametrize("name", sorted(CHAINS))
@pytest.mark.parametrize("nbytes", [64, 5000, 70000])
def test_broken_bytes_are_refused_or_decoded_as_numcodecs_does(name, nbytes):
    """The kernels run with undefined behaviour trapped and with a guard around every chunk."""
    refused, wrong = disagreements(Decoder, np.random.default_rng(len(name) * nbytes), name, nbytes, 60)
    assert not wrong, [one[:40].hex() for one in wrong[:3]]
    assert refused > 10
