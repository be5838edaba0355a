"""If this fails, batches on a device are used before they are there: an order that no event gives is relied on.

The production pipeline and reader run on :mod:`fake_cupy`, the kernels under the emulator.
"""

import contextlib
import gc
import types

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linumpy import stream
from linumpy.device import Device
from linumpy.stream import pipeline as pipeline_module
from linumpy.stream.resampling import resample as resample_module
from tests.support.budget import examples
from tests.support.gpu import reference
from tests.support.gpu.emulator import emulated, needs_compiler
from tests.support.gpu.fake_cupy import Array
from tests.support.stream_arrays import make_array

pytestmark = needs_compiler
SHAPE, SIZE = (20, 24, 28), (5, 6, 7)


class _ArrayType(type):
    """``cupy.ndarray``: a type that arrays are instances of, and that makes them at an address."""

    device = None

    def __instancecheck__(cls, one):
        return isinstance(one, Array)

    def __call__(cls, shape, dtype, pointer):
        nbytes = int(np.prod(shape)) * dtype.itemsize
        return Array(cls.device, cls.device.at(pointer.mem.ptr)[:nbytes].view(dtype).reshape(shape), pointer.mem)


class _Memory:
    def __init__(self, device, nbytes):
        self.memory = device.take(device.stream, nbytes)
        self.ptr = self.memory.ctypes.data


@contextlib.contextmanager
def fake_device(seed):
    with reference.fake_device(seed) as device, pytest.MonkeyPatch.context() as patch:
        cuda = device.cupy.cuda
        device.cupy.ndarray = _ArrayType("ndarray", (), {"device": device})
        _ArrayType.device = device
        cuda.Memory = lambda nbytes: _Memory(device, nbytes)
        cuda.UnownedMemory = lambda ptr, nbytes, owner, _: types.SimpleNamespace(ptr=ptr, owner=owner)
        cuda.MemoryPointer = lambda memory, offset: types.SimpleNamespace(mem=memory)
        cuda.ExternalStream = lambda ptr: next(one for one in device._streams if one.ptr == ptr)
        cuda.runtime.memGetInfo = lambda: (2**40, 2**40)
        patch.setattr(pipeline_module, "resolve", lambda *_: Device("cuda", 0, "in tests"))
        patch.setattr(resample_module, "load", lambda spec: queued(device, spec))
        yield device


def queued(device, spec):
    """Run a kernel when its stream comes to it."""
    kernel = emulated(spec)

    def launch(grid, block, args, shared_mem=0):
        arguments = [one.host if isinstance(one, Array) else one for one in args]
        device.stream.add(lambda: kernel(grid, block, arguments, shared_mem))

    return launch


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arrays")
    rng = np.random.default_rng(0)
    made = {}
    for number, dtype in enumerate(("u2", "i2")):
        values = (rng.random(SHAPE) * 30_000).astype(dtype)
        made[make_array(folder / f"{number}.zarr", values, (8, 8, 16))] = values
    return made


def samples_of(arrays, count, reach):
    for k in range(count):
        rng = np.random.default_rng(k)
        path = list(arrays)[int(rng.integers(0, 2))]
        start = [int(rng.integers(-reach, n - s + 1 + reach)) for n, s in zip(SHAPE, SIZE, strict=True)]
        yield stream.Sample(path, [(a, a + s) for a, s in zip(start, SIZE, strict=True)])


def expected(arrays, sample, pad):
    width = 6
    values = np.pad(arrays[sample.uri].astype("f4"), width, **({"mode": pad} if pad else {}))
    return values[tuple(slice(a + width, b + width) for a, b in sample.aabb)]


@settings(max_examples=examples(45))
@given(
    st.integers(0, 2**32 - 1), st.sampled_from(["f32", "bf16", "f16"]), st.sampled_from([None, "reflect", "constant"]),
    st.integers(2, 4), st.integers(0, 2), st.sampled_from([0, 50_000, 1 << 20]),
)  # fmt: skip
def test_batches_are_right_in_any_order_of_the_streams(arrays, seed, dtype, pad, lookahead, kept, cache):
    """A consumer copies each batch on a stream of its own and gives it back before that is done."""
    found, held = [], []
    with fake_device(seed) as device:
        slot = 512 * -(-2 * 210 * (4 if dtype == "f32" else 2) // 512)
        config = stream.Config(
            batch_size=2, host_buffer_bytes=1 << 20, device_buffer_bytes=(lookahead + 4) * slot + 6000, dtype=dtype,
            lookahead_batches=lookahead, pad=pad, cache_bytes=cache,
        )  # fmt: skip
        own = device.cupy.cuda.Stream(non_blocking=True)
        with stream.Pipeline(config) as pipeline:
            pipeline.push(samples_of(arrays, 11, 4 if pad else 0))
            for batch in pipeline.batches():
                with own, batch as tensor:
                    array = tensor.array
                    copy = device.empty(array.shape, array.dtype)
                    copy[...] = array
                    found.append((copy, batch.samples))
                held.append(array)  # storage of the last ones is in use still
                del held[: max(0, len(held) - kept)], array
            held.clear()
            gc.collect()
        for copy, samples in found:
            with own:
                values = copy.get()
            if dtype == "bf16":
                values = values.view(ml_dtypes.bfloat16)
            target = {"f32": "f4", "f16": "f2", "bf16": ml_dtypes.bfloat16}[dtype]
            wanted = np.stack([expected(arrays, one, pad) for one in samples]).astype(target)
            assert np.array_equal(values, wanted)
    assert sum(len(samples) for _, samples in found) == 11


@settings(max_examples=examples(9))
@given(st.integers(0, 2**32 - 1))
def test_augmented_batches_are_those_of_the_cpu(arrays, seed):
    augment = stream.Augment(rotation=30, flip="zyx", elastic=(6.0, 1.0), noise=50.0, blur=1.0)
    options = {"batch_size": 2, "host_buffer_bytes": 1 << 20, "device_buffer_bytes": 1 << 16, "augment": augment}
    options |= {"pad": "edge", "spacing": (2.0, 1.0, 1.0), "on_error": "skip"}
    crops = [*samples_of(arrays, 4, 2), stream.Sample("missing", ((0, 5), (0, 6), (0, 7))), *samples_of(arrays, 3, 0)]
    on_cpu, on_device = [], []
    with stream.Pipeline(stream.Config(device="cpu", **options)) as pipeline:
        pipeline.push(crops)
        for batch in pipeline.batches():
            with batch as tensor:
                on_cpu.append(tensor.numpy())
    with fake_device(seed), stream.Pipeline(stream.Config(**options)) as pipeline:
        pipeline.push(crops)
        for batch in pipeline.batches():
            with batch as tensor:
                on_device.append(tensor.numpy())
    assert [len(one) for one in on_device] == [2, 2, 1, 2]
    assert np.allclose(np.concatenate(on_device), np.concatenate(on_cpu), rtol=1e-5, atol=0.05)
