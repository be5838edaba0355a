"""CuPy in host memory, whose streams run late, early, and in any order that their events allow.

The parts of CuPy that the reader uses. What is queued on a stream is carried out some time later: each stream has a
pace of its own, drawn from a seed, between "at once" and "not before somebody waits for it". Code that relies on an
order that no event and no wait gives it is wrong with some seeds, as it is on a GPU that other processes keep busy.
Memory that is given back is overwritten: pinned memory at once, device memory in the order of the stream it was
allocated on, which is when CuPy's pool would give it to somebody else.
"""

import contextlib
import ctypes
import importlib.machinery
import math
import random
import threading
import types
import weakref
from collections import deque

import numpy as np
from numpy.lib.stride_tricks import as_strided

from linumpy.gpu.read.scatter import _CUDA_TYPES, Conversion
from tests.support.gpu.stand_in import driver

_FRESH, _FREED, _ALIGNED = 0xA5, 0xEE, 512
_SPOILT = 2**22  # bytes that are overwritten: of slabs, which are larger, the first
_DTYPES = {name: np.dtype(key) for key, name in _CUDA_TYPES.items()}


class Stream:
    """A queue of work. Its operations are functions, marks to set, and marks to wait for."""

    def __init__(self, device, ptr):
        self.queue, self.ptr, self._device = deque(), ptr, device
        self.pace = device.random.choice([0, 0, 0.5, 0.9, 1])

    def record(self, event=None):
        event = Event() if event is None else event
        event.mark = Mark(self)
        event.tell_driver()
        self.add(event.mark)
        return event

    def wait_event(self, event):
        if event.mark is not None:
            self.add(("wait", event.mark))

    def synchronize(self):
        self.record().synchronize()

    def add(self, operation):
        self._device.add(self, operation)

    def __enter__(self):
        self._device.current_streams.append(self)
        return self

    def __exit__(self, *error):
        self._device.current_streams.pop()


class Mark:
    """A place in a queue."""

    def __init__(self, stream):
        self.stream, self.done = stream, False
        self.record = None  # how the stand-in driver knows it


class Event:
    """The mark that was recorded last."""

    def __init__(self, **options):
        self.mark = None
        self._handle = None

    @property
    def ptr(self):
        """The handle by which the stand-in driver knows the event."""
        if self._handle is None:
            self._handle = driver().library.fake_event()
            weakref.finalize(self, driver().library.fake_event_free, self._handle)
            self.tell_driver()
        return self._handle

    def tell_driver(self):
        """Let the driver know what was recorded."""
        if self._handle is not None and self.mark is not None:
            self.mark.stream._device.share(self.mark, self._handle)

    def record(self, stream=None):
        (stream or driver().device.stream).record(self)

    def synchronize(self):
        if self.mark is not None:
            self.mark.stream._device.complete(self.mark)

    @property
    def done(self):
        """Whether what it was recorded behind has happened; nothing is carried out for the question."""
        return self.mark is None or self.mark.done


class Block:
    """Device memory that goes back to its stream's pool when nothing in Python refers to it any more."""

    def __init__(self, device, stream, nbytes):
        self._device, self._stream = device, stream
        self.memory = device.take(stream, nbytes)

    def __del__(self):
        self._device.give_back(self._stream, self.memory)


class Array:
    """What the package uses of ``cupy.ndarray``."""

    def __init__(self, device, host, block, strides=None):
        if strides is not None:  # CuPy's own: shape, dtype, pointer, strides
            memory = block.device.at(block.address)
            host, device = as_strided(memory[: host.itemsize].view(host), device, strides), block.device
        self._device, self.host, self._block = device, host, block

    shape = property(lambda self: self.host.shape)
    dtype = property(lambda self: self.host.dtype)
    size = property(lambda self: self.host.size)
    nbytes = property(lambda self: self.host.nbytes)
    ndim = property(lambda self: self.host.ndim)
    itemsize = property(lambda self: self.host.itemsize)
    strides = property(lambda self: self.host.strides)
    flags = property(lambda self: self.host.flags)
    device = property(lambda self: self._device.cupy.cuda.Device())
    data = property(lambda self: types.SimpleNamespace(ptr=self.host.ctypes.data))

    def __len__(self):
        return len(self.host)

    def _like(self, host):
        assert host.base is not None, "a copy is no view"
        return Array(self._device, host, self._block)

    def __getitem__(self, key):
        return self._like(self.host[key])

    def reshape(self, *shape):
        host = self.host.reshape(*shape)
        if np.shares_memory(host, self.host):
            return self._like(host)
        copy = self._device.empty(host.shape, host.dtype)
        self._device.stream.add(lambda host=self.host: np.copyto(copy.host, host.reshape(copy.shape)))
        return copy

    def view(self, dtype):
        return self._like(self.host.view(dtype))

    def transpose(self, *axes):
        return self._like(self.host.transpose(*axes))

    def __setitem__(self, key, value):
        source = value.host if isinstance(value, Array) else np.array(value)

        def assign(host=self.host):
            host[key] = source  # as it is then, on a device

        self._device.stream.add(assign)

    def fill(self, value):
        self[...] = value

    def set(self, array, stream=None):
        if array.shape != self.shape:  # as CuPy
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {array.shape}")
        with stream or contextlib.nullcontext():
            self[...] = np.array(array)

    def get(self, stream=None, out=None, blocking=True):
        stream = self._device.stream if stream is None else stream
        out = np.empty(self.shape, self.dtype) if out is None else out
        stream.add(lambda host=self.host: np.copyto(out, host))
        if blocking:
            stream.synchronize()
        return out


def copy_boxes(at, source, headers, rows, rank, conversion, unit):
    """The scatter kernel's twin: NumPy's own strided views, one box after another; `at` looks at an address."""
    stored, into = (np.dtype((np.void, unit)),) * 2
    if not conversion.is_copy:
        stored = conversion.source.newbyteorder() if conversion.swapped else conversion.source
        into = conversion.target
    for first, target, header, *extent in rows.tolist():
        strides, fill = headers[header], headers[header, 2 * rank :]
        reach = sum((n - 1) * step for n, step in zip(extent, strides[rank : 2 * rank].tolist(), strict=True)) + 1
        memory = at(target)[: reach * into.itemsize]
        assert memory.size == reach * into.itemsize, "a box leaves its output"
        box = as_strided(memory.view(into), extent, tuple(strides[rank : 2 * rank] * into.itemsize))
        if first < 0:
            box[...] = np.resize(np.frombuffer(fill.tobytes(), np.uint8), into.itemsize).view(into)[0]
            continue
        reach = sum((n - 1) * step for n, step in zip(extent, strides[:rank].tolist(), strict=True)) + 1
        values = at(source + first * stored.itemsize)[: reach * stored.itemsize].view(stored)
        values = as_strided(values, extent, tuple(strides[:rank] * stored.itemsize))
        with np.errstate(all="ignore"):
            box[...] = values if conversion.is_copy else conversion.cast(values)


def conversion_of(spec):
    """Read the rank of a scatter kernel, its conversion, and the unit that it copies, from its defines."""
    defines = dict(spec.defines)
    rank, unit = int(defines["RANK"]), int(defines.get("COPY_UNIT", 0))
    if unit:
        return rank, Conversion(np.dtype("u1"), np.dtype("u1"), False), unit
    bfloat16 = defines["TARGET"] == "bfloat16_bits"
    into = np.dtype("u2") if bfloat16 else _DTYPES[defines["TARGET"]]
    return rank, Conversion(_DTYPES[defines["SOURCE"]], into, defines["SWAP"] == "true", bfloat16), 0


class _Here(types.SimpleNamespace):
    """The only device: to be current is all it does."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class Device:
    """A GPU with its streams, memory and pools.

    Parameters
    ----------
    seed : int
        Of the paces of streams and of all that is left to chance.
    """

    FREE_NBYTES = 0  # that the driver tells of; what is allocated is not counted

    def __init__(self, seed):
        self.random = random.Random(seed)
        self._lock = threading.RLock()
        self._local = threading.local()
        self._streams = [Stream(self, 0)]
        self._memory, self._pool, self._pinned, self._pinned_pool = [], {}, [], {}
        self._shared = {}
        self.cupy, self.cupyx = self._modules()

    @property
    def current_streams(self):
        """The stack of streams of this thread."""
        if not hasattr(self._local, "streams"):
            self._local.streams = [self._streams[0]]
        return self._local.streams

    @property
    def default_stream(self):
        """The stream that is current in a new thread."""
        return self._streams[0]

    @property
    def stream(self):
        """CuPy's current stream."""
        return self.current_streams[-1]

    def add(self, stream, operation):
        """Queue an operation; then streams go on as far as their pace takes them."""
        with self._lock:
            stream.queue.append(operation)
            for one in self.random.sample(self._streams, len(self._streams)):
                while one.queue and self.random.random() < one.pace and self._may_go_on(one):
                    self._step(one)

    def complete(self, mark):
        """Carry out what a mark needs, and nothing else."""
        with self._lock:
            while not mark.done:
                stream = mark.stream
                while not self._may_go_on(stream):
                    stream = stream.queue[0][1].stream
                self._step(stream)

    def share(self, mark, handle):
        """Let work of the stand-in driver wait for a mark."""
        with self._lock:
            number = driver().library.fake_event_recorded(handle)
            mark.record = handle, number
            if mark.done:
                driver().library.fake_event_reached(handle, number)
            else:
                self._shared[mark.record] = mark

    def complete_record(self, handle, number):
        """Carry out what work of the stand-in driver waits for."""
        with self._lock:
            mark = self._shared.get((handle, number))
            if mark is not None:
                self.complete(mark)

    @staticmethod
    def _may_go_on(stream):
        head = stream.queue[0]
        return not (isinstance(head, tuple) and not head[1].done)

    def _step(self, stream):
        operation = stream.queue.popleft()
        if isinstance(operation, Mark):
            operation.done = True
            if self._shared.pop(operation.record, None) is not None:
                driver().library.fake_event_reached(*operation.record)
        elif not isinstance(operation, tuple):
            operation()

    def take(self, stream, nbytes):
        """Give out memory, that which was given back last where it fits."""
        with self._lock:
            size = max(1, -(-nbytes // _ALIGNED)) * _ALIGNED
            for freed in reversed(self._pool.get(stream, [])):
                if freed.size >= size:
                    self._pool[stream] = [one for one in self._pool[stream] if one is not freed]
                    return freed
            room = np.zeros(size + _ALIGNED, np.uint8)
            room[:_SPOILT] = _FRESH
            memory = room[-room.ctypes.data % _ALIGNED :][:size]
            self._memory.append(memory)
            driver().library.fake_memory(memory.ctypes.data, memory.size)
            return memory

    def given_out(self):
        """Bytes of device memory that somebody holds."""
        with self._lock:
            free = sum(one.size for some in self._pool.values() for one in some)
            return sum(one.size for one in self._memory) - free

    def end(self):
        """Come to rest; the driver forgets this memory."""
        self.rest()
        for memory in self._memory:
            driver().library.fake_memory(memory.ctypes.data, 0)

    def give_back(self, stream, memory):
        """Take memory back, and let somebody else write to it, in the order of the stream."""
        with self._lock:
            stream.queue.append(lambda: memory[:_SPOILT].fill(_FREED))
            self._pool.setdefault(stream, []).append(memory)

    def at(self, address):
        """Look at memory from an address on, to the end of what was allocated together."""
        for memory in self._memory:
            begin = memory.ctypes.data
            if begin <= address < begin + memory.size:
                return memory[address - begin :]
        raise AssertionError(f"nothing was allocated at {address}")

    def empty(self, shape, dtype=np.float64):
        """Make an array of bytes that were something else."""
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        dtype = np.dtype(dtype)
        block = Block(self, self.stream, math.prod(shape) * dtype.itemsize)
        host = block.memory[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        return Array(self, host, block)

    def alloc(self, nbytes):
        """Give memory out as ``cupy.cuda.alloc`` does."""
        block = Block(self, self.stream, nbytes)
        return types.SimpleNamespace(ptr=block.memory.ctypes.data, mem=block)

    def full(self, shape, value, dtype):
        """Make an array of one value."""
        array = self.empty(shape, dtype)
        array.fill(value)
        return array

    def asarray(self, values):
        """Copy an array up."""
        if isinstance(values, Array):
            return values
        array = self.empty(values.shape, values.dtype)
        array.set(values)
        return array

    def empty_pinned(self, shape, dtype=np.uint8):
        """Make an array in pinned memory."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        freed = self._pinned_pool.get(nbytes)
        memory = freed.pop() if freed else np.full(max(1, nbytes), _FRESH, np.uint8)
        held = (ctypes.c_ubyte * max(1, nbytes)).from_buffer(memory)
        self._pinned.append(memory)
        weakref.finalize(held, self._give_back_pinned, memory, nbytes)
        return np.frombuffer(held, np.uint8)[:nbytes].view(dtype).reshape(shape)

    def _give_back_pinned(self, memory, nbytes):
        self._pinned = [one for one in self._pinned if one is not memory]
        memory.fill(_FREED)
        self._pinned_pool.setdefault(nbytes, []).append(memory)

    def rest(self):
        """Carry out all that is queued."""
        for stream in self._streams:
            stream.synchronize()

    def _new_stream(self, **options):
        with self._lock:
            self._streams.append(Stream(self, 16 * len(self._streams)))
            return self._streams[-1]

    def _modules(self):
        cupy, cupyx = types.ModuleType("cupy"), types.ModuleType("cupyx")
        for module in (cupy, cupyx):
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        here = _Here(
            id=0,
            use=lambda: None,
            synchronize=self.rest,
            attributes={"MultiProcessorCount": 4, "MaxSharedMemoryPerBlockOptin": 227 * 1024},
        )
        cupy.ndarray, cupy.empty, cupy.full, cupy.asarray = Array, self.empty, self.full, self.asarray
        cupy.zeros = lambda shape, dtype: self.full(shape, 0, dtype)
        cupy.asnumpy = lambda array: array.get()
        cupyx.empty_pinned = self.empty_pinned
        pool = types.SimpleNamespace(free_bytes=lambda: 0, used_bytes=lambda: 0, get_limit=lambda: 0)
        cupy.get_default_memory_pool = lambda: pool
        cupy.cuda = types.SimpleNamespace(
            UnownedMemory=lambda address, nbytes, owner, number: (address, owner),
            MemoryPointer=lambda memory, offset: types.SimpleNamespace(
                device=self, address=memory[0] + offset, owner=memory[1]
            ),
            Stream=self._new_stream,
            Event=Event,
            Device=lambda *_: here,
            get_current_stream=lambda: self.stream,
            get_elapsed_time=lambda first, last: 1.0,
            alloc_pinned_memory=lambda nbytes: self.empty_pinned((nbytes,)),
            alloc=self.alloc,
            driver=types.SimpleNamespace(ctxGetCurrent=lambda: 1),
            runtime=types.SimpleNamespace(
                getDevice=lambda: 0,
                free=lambda address: None,
                memGetInfo=lambda: (self.FREE_NBYTES, 2 * self.FREE_NBYTES),
                getDeviceCount=lambda: 1,
            ),
        )
        return cupy, cupyx
