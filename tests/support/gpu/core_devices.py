"""A device for the native core whose memory is the host's: the stand-in driver, and kernels of the emulator."""

import contextlib
import ctypes
import functools
import shutil
import types

import numpy as np
import pytest
import zarr

from linumpy.gpu.codecs import decode
from linumpy.gpu.read.engines import core_device
from linumpy.gpu.read.engines.by_core import CoreEngine
from linumpy.gpu.read.limits import Limits
from linumpy.gpu.read.outputs import Regions
from linumpy.gpu.read.scatter import Conversion
from linumpy.gpu.read.ticket import Ticket
from linumpy.io.layout import read_layout
from linumpy.io.open import open_source
from linumpy.plan.region import normalize_region
from tests.support.gpu import decoders, fake_cupy
from tests.support.gpu.compiled import already_compiled, kept
from tests.support.gpu.stand_in import library


@functools.cache
def fake_driver():
    """Load the stand-in driver, as a copy of its own: the core loads a driver of each path for good."""
    copy = kept(["copy", library().name], ".so", lambda path: shutil.copy(library(), path))
    loaded = ctypes.CDLL(str(copy))
    loaded.fake_register.argtypes = [ctypes.c_void_p, ctypes.c_int]
    loaded.fake_failure.restype = ctypes.c_char_p
    loaded.fake_calls.restype = ctypes.c_long
    loaded.fake_fail.argtypes = [ctypes.c_long]
    return loaded, str(copy)


@pytest.fixture(scope="module")
def driver():
    loaded, path = fake_driver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINUMPY_CUDA_DRIVER", path)
        yield loaded
        assert not loaded.fake_failure()


class Emulated:
    """A kernel of the emulator, as ``cupy.RawKernel`` gives its handle."""

    max_dynamic_shared_size_bytes = 2**20
    preferred_shared_memory_carveout = 0

    def __init__(self, driver, function, arguments):
        address = ctypes.cast(function, ctypes.c_void_p).value
        driver.fake_register(address, arguments)
        self.kernel, self._held = types.SimpleNamespace(ptr=address), function


def scatter_by_numpy(spec):
    """The scatter kernel in NumPy, as the stand-in for CuPy has it: its source has instructions of a GPU."""
    defines = dict(spec.defines)
    rank, unit = int(defines["RANK"]), int(defines.get("COPY_UNIT", 0))
    conversion = Conversion(np.dtype("u1"), np.dtype("u1"), False)
    if not unit:
        into = fake_cupy._DTYPES[defines["TARGET"]]
        conversion = Conversion(fake_cupy._DTYPES[defines["SOURCE"]], into, defines["SWAP"] == "true")

    def at(address):
        return np.ctypeslib.as_array((ctypes.c_ubyte * 2**30).from_address(int(address)))

    @ctypes.CFUNCTYPE(
        ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), *[ctypes.c_uint] * 3, ctypes.POINTER(ctypes.c_void_p)
    )
    def run(blocks, threads, shared, seed, values):
        source, headers, rows = (ctypes.c_uint64.from_address(values[n]).value for n in range(3))
        count = blocks[0] // ctypes.c_uint32.from_address(values[3]).value
        table = at(rows)[: 8 * count * (3 + rank)].view(np.int64).reshape(count, 3 + rank)
        words = 2 * rank + 2
        heads = at(headers)[: 8 * words * (int(table[:, 2].max()) + 1)].view(np.int64).reshape(-1, words)
        fake_cupy.copy_boxes(at, source, heads, table, rank, conversion, unit)
        return

    return run


@pytest.fixture
def device(driver, monkeypatch):
    """Gives a core device whose memory is the host's."""
    counts = {}

    def load(spec):
        if spec.name == "scatter":
            return Emulated(driver, scatter_by_numpy(spec), -4)
        return Emulated(driver, decoders.kernel(spec)._function, counts[spec.name])

    real = core_device.plan_launches

    def planned(*arguments):
        found = real(*arguments)
        counts.update({one.kernel: len(one.args) for one in found})
        return found

    monkeypatch.setattr(core_device, "plan_launches", planned)
    monkeypatch.setattr(core_device, "load", load)
    monkeypatch.setattr(core_device, "prepare", lambda specs: None)
    monkeypatch.setattr(core_device, "prepare_beside", already_compiled)
    monkeypatch.setattr(decode, "limits_of", lambda _: decoders.BIG)
    cupy = types.SimpleNamespace(
        cuda=types.SimpleNamespace(
            Device=lambda number: None,
            driver=types.SimpleNamespace(ctxGetCurrent=lambda: 1),
            runtime=types.SimpleNamespace(free=lambda _: None, memGetInfo=lambda: (2**28, 2**28)),
            alloc=Memory,
            get_current_stream=lambda: types.SimpleNamespace(synchronize=lambda: None),
        )
    )

    def make(decode_on=None, scratch=2**26, may_exceed=False, **options):
        limits = Limits(scratch, decode_on=decode_on, may_exceed=may_exceed)
        return core_device.CoreDevice(cupy, 0, limits, **options)

    return make


class Memory:
    """Device memory, as ``cupy.cuda.alloc`` gives it."""

    given_back = 0

    def __init__(self, nbytes):
        self._memory = np.empty(nbytes + 256, np.uint8)
        self.ptr = self._memory.ctypes.data + -self._memory.ctypes.data % 256

    def __del__(self):
        Memory.given_back += 1


@contextlib.contextmanager
def core_reader(made):
    engine = CoreEngine(4, made)
    yield engine
    engine.close()


def submit(made, reader, array, regions, dtype=None, timed=False):
    layout = read_layout(open_source(array))
    boxes = [normalize_region(one, layout.shape) for one in regions]
    target = np.dtype(dtype or layout.dtype)
    outs = [np.full([b - a for a, b in zip(box.start, box.stop, strict=True)], 77, target) for box in boxes]
    columns = Regions(
        np.zeros(len(boxes), np.int64),
        np.array([box.start for box in boxes], np.int64),
        np.array([box.stop for box in boxes], np.int64),
        np.array([out.strides for out in outs], np.int64),
        np.array([out.ctypes.data for out in outs], np.int64),
    )
    conversion = Conversion(layout.dtype, target, layout.swapped)
    event = types.SimpleNamespace(ptr=0)
    jobs = reader.submit([layout], conversion, columns, outs, event, timed=timed)
    tickets = [Ticket(jobs.job(n, out), layout, conversion, reader, None) for n, out in enumerate(outs)]
    return tickets, boxes


KINDS = {
    "raw": {"compressors": None},
    "raw shards": {"compressors": None, "shards": (16, 24, 24)},
    "zstd": {"compressors": zarr.codecs.ZstdCodec(checksum=True)},
    "zstd shards": {"shards": (16, 24, 24), "compressors": zarr.codecs.ZstdCodec()},
    "blosc": {"compressors": zarr.codecs.BloscCodec(cname="lz4", shuffle="bitshuffle")},
    "gzip": {"compressors": zarr.codecs.GzipCodec()},
}
