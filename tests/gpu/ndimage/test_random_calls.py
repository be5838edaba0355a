"""If this fails, some combination of arguments resamples unlike SciPy.

``LINUMPY_KINDS=400 LINUMPY_CALLS=250 pytest -m "gpu and slow" --require-gpu tests/gpu/ndimage/test_random_calls.py``
makes 10^5 calls of 400 kinds, each of which compiles a few kernels; ``LINUMPY_FIRST_KIND=400`` goes on where that
ended.
"""

import os

import numpy as np
import pytest

from tests.support.budget import some
from tests.support.gpu import on_cpu
from tests.support.gpu.emulator import needs_compiler
from tests.support.gpu.random_calls import call_of, kind_of

#: Kinds that have every function, order and mode, and ranks from 1 to 5 among them.
FEW = (0, 2, 4, 6, 9, 11, 13, 57)


def check(seed, count, convert=lambda a: a, back=lambda a: a):
    """Make calls of a kind; return what is wrong with each that is."""
    kind = kind_of(seed)
    faults = []
    for number in range(count):
        call = call_of(kind, 1000 * seed + number)
        try:
            wrong = call.wrong(back(call.run(convert)))
        except Exception as error:  # any of them is a fault
            wrong = repr(error)
        if wrong:
            options = {key: value for key, value in call.options.items() if not callable(value)}
            faults.append(f"kind {seed}, call {number}: {kind} {call.image.shape} {call.layout} {options}: {wrong}")
    return faults


@needs_compiler
@pytest.mark.parametrize("seed", FEW)
def test_kernels_on_the_cpu(monkeypatch, seed):
    on_cpu.patch(monkeypatch)
    assert check(seed, 6) == []


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_more_kernels_on_the_cpu(monkeypatch):
    on_cpu.patch(monkeypatch)
    assert [fault for seed in range(120) for fault in check(seed, 6)] == []


@pytest.mark.parametrize("seed", some(range(60), lambda seed: seed % 3 == 0 or seed in FEW))
def test_the_host_too(seed):
    assert check(seed, 4) == []


def test_a_wrong_number_is_noticed():
    for seed in range(12):
        call = call_of(kind_of(seed), seed)
        got = call.run()
        with np.errstate(over="ignore"):
            got = ~got if got.dtype.kind == "b" else got + np.array(3 + 0.03 * call.scale).astype(got.dtype)
        assert call.loose.all() or not np.isfinite(call.expected).all() or call.wrong(got)


def on_the_gpu(cupy, first, kinds, calls):
    return [
        fault
        for seed in range(first, first + kinds)
        for fault in check(seed, calls, lambda a: cupy.asarray(a), lambda a: a.get())
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 80, 2))  # processes share them
def test_calls_on_the_gpu(cupy, first):
    assert on_the_gpu(cupy, first, 2, 10) == []


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_calls_on_the_gpu(cupy):
    first, kinds, calls = (int(os.environ.get(f"LINUMPY_{name}", 0)) for name in ("FIRST_KIND", "KINDS", "CALLS"))
    faults = on_the_gpu(cupy, first, kinds or 100, calls or 100)
    assert not faults, "\n".join([f"{len(faults)} faults", *faults[:50]])
