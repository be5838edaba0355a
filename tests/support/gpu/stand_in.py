"""The CUDA driver of the native core in host memory: ``tests/core/fake_cuda.cpp``, and kernels in place of a GPU's.

Decoders are the shipped ones, under the emulator; the scatter kernel, whose source has instructions of a GPU, is its
twin in NumPy.
"""

import contextlib
import ctypes
import functools
import re
import subprocess
import types
from pathlib import Path

import numpy as np
import pytest

from linumpy.gpu.kernels import source_text
from tests.support.gpu import decoders, emulator
from tests.support.gpu.compiled import already_compiled, kept

_SOURCE = Path(__file__).parents[2] / "core" / "fake_cuda.cpp"
#: Blocks that run a decoder: few, so that each has many streams; odd, since warps take the tasks of zstd in turn.
_BLOCKS = 3

needs_stand_in = [emulator.needs_compiler, pytest.mark.needs_core]

_WAITS = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_long)
_KERNEL = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint), *[ctypes.c_uint] * 3, ctypes.POINTER(ctypes.c_void_p)
)


class Driver:
    """The loaded stand-in; one a process."""

    def __init__(self, path):
        self.path = path
        self.library = library = ctypes.CDLL(path)
        library.fake_register.argtypes = [ctypes.c_void_p, ctypes.c_int]
        library.fake_few_blocks.argtypes = [ctypes.c_void_p, ctypes.c_uint]
        library.fake_check_memory(1)
        library.fake_failure.restype = ctypes.c_char_p
        library.fake_calls.restype = library.fake_alive.restype = ctypes.c_long
        library.fake_fail.argtypes = [ctypes.c_long]
        library.fake_memory.argtypes = [ctypes.c_ulonglong, ctypes.c_size_t]
        library.fake_room.argtypes, library.fake_room.restype = [ctypes.c_ulonglong], ctypes.c_size_t
        library.fake_on_wait.argtypes = [_WAITS]
        library.fake_event.restype = ctypes.c_void_p
        library.fake_event_recorded.argtypes, library.fake_event_recorded.restype = [ctypes.c_void_p], ctypes.c_long
        library.fake_event_reached.argtypes = [ctypes.c_void_p, ctypes.c_long]
        library.fake_event_free.argtypes = [ctypes.c_void_p]
        self.device = None  # whose streams are waited for
        self._waits = _WAITS(self._waited)
        library.fake_on_wait(self._waits)

    def _waited(self, event, number):
        self.device.complete_record(event, number)

    @property
    def failure(self):
        """What was done wrong, or nothing."""
        return self.library.fake_failure().decode()

    def calls(self):
        """Calls since the last :meth:`fail`."""
        return self.library.fake_calls()

    def fail(self, number):
        """Let a call fail, by its number from now on; 0 for none; where negative, those behind it, too."""
        self.library.fake_fail(number)

    def alive(self):
        """Streams, events and pinned memory of the core."""
        return self.library.fake_alive()

    def at(self, address):
        """Look at device memory from an address on."""
        room = self.library.fake_room(address)
        assert room, f"nothing was allocated at {address}"
        return np.ctypeslib.as_array((ctypes.c_ubyte * room).from_address(address))


def library():
    """Compile the stand-in once for all processes; returns its path."""

    def make(path):
        subprocess.run(["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", _SOURCE, "-o", path], check=True)

    return kept(["driver", _SOURCE.read_text()], ".so", make)


@functools.cache
def driver():
    """Load the stand-in."""
    return Driver(str(library()))


class _Loaded:
    """A kernel as ``cupy.RawKernel`` gives its handle."""

    max_dynamic_shared_size_bytes = 2**20
    preferred_shared_memory_carveout = 0

    def __init__(self, function, arguments, most_blocks=0):
        address = ctypes.cast(function, ctypes.c_void_p).value
        driver().library.fake_register(address, arguments)
        driver().library.fake_few_blocks(address, most_blocks)
        self.kernel, self._held = types.SimpleNamespace(ptr=address), function


@functools.cache
def load(spec):
    """In place of :func:`linumpy.gpu.kernels.load`: a kernel that the stand-in launches."""
    if spec.name == "scatter":
        return _Loaded(_scatter(spec), -4)
    text = source_text(spec.source, spec.package)
    arguments = re.search(emulator._SIGNATURE.format(name=spec.name), text)[1].count(",") + 1
    return _Loaded(decoders.kernel(spec)._function, arguments, _BLOCKS)


def _scatter(spec):
    from tests.support.gpu import fake_cupy

    rank, conversion, unit = fake_cupy.conversion_of(spec)
    failures = []

    @_KERNEL
    def run(blocks, threads, shared, seed, values):
        try:
            at = driver().at
            source, headers, rows = (ctypes.c_uint64.from_address(values[n]).value for n in range(3))
            count, words = blocks[0] // ctypes.c_uint32.from_address(values[3]).value, 2 * rank + 2
            table = at(rows)[: 8 * count * (3 + rank)].view(np.int64).reshape(count, 3 + rank)
            heads = at(headers)[: 8 * words * (int(table[:, 2].max()) + 1)].view(np.int64).reshape(-1, words)
            fake_cupy.copy_boxes(at, source, heads, table, rank, conversion, unit)
        except Exception as error:  # ctypes would only print it
            failures.append(ctypes.create_string_buffer(f"the scatter kernel: {error!r}".encode()))
            return ctypes.addressof(failures[-1])
        return None

    return run


@contextlib.contextmanager
def installed(device):
    """Let readers on the stand-in for CuPy's `device` run on the stand-in driver; nothing may be left over."""
    from linumpy.gpu.read.engines import core_device

    fake = driver()
    fake.device = device
    fake.library.fake_seed(device.random.randrange(1, 2**31 - 1))
    fake.fail(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINUMPY_CUDA_DRIVER", fake.path)
        patch.setattr(core_device, "load", load)
        patch.setattr(core_device, "prepare", lambda specs: None)
        patch.setattr(core_device, "prepare_beside", already_compiled)
        try:
            yield fake
        except BaseException as error:
            if fake.failure:  # which comes first: what follows may be for want of what it did not do
                raise AssertionError(fake.failure) from error
            raise
        else:
            assert not fake.failure, fake.failure
        finally:
            fake.library.fake_forget_failure()
            fake.fail(0)
