"""Batches as users see them: tensors for DLPack, which hold the slot of memory of their batch."""

from __future__ import annotations

import ctypes
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from linumpy.arrays import Array
from linumpy.errors import not_pickled
from linumpy.stream.batches.memory import Event, Lease
from linumpy.stream.config import Dtype, Sample
from linumpy.stream.errors import ArgumentTypeError, ShutdownError, StreamError
from linumpy.stream.resampling.on_host import bfloat16_as_float32

# Offset of the type code in a DLManagedTensor, and in a DLManagedTensorVersioned, on 64-bit machines.
_CODE_OFFSET = {b"dltensor": 20, b"dltensor_versioned": 52}
_UNSIGNED, _BFLOAT = 1, 4


@dataclass(frozen=True)
class BatchInfo:
    """Address, shape and dtype of the first part of a batch.

    Attributes
    ----------
    device_ptr : int
        Address of the first element; in host memory without a GPU.
    shape : tuple of int
        Shape, samples first.
    dtype : Dtype
        Element type; STORED has the dtype of the array, which ``batch.tensors[0].dtype`` names.
    ready_stream : int
        The ``cudaStream_t`` of the pipeline: after the work that is queued there, the batch is ready. 0 without a GPU.
    batch_id : int
        Number of the batch.
    """

    device_ptr: int
    shape: tuple[int, ...]
    dtype: Dtype
    ready_stream: int
    batch_id: int


class _Released:
    """Replaces the array of a tensor whose batch was released; every use raises."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ShutdownError("the batch of this tensor was released")


class Tensor:
    """One part of a batch, which PyTorch, JAX, CuPy and NumPy import by ``from_dlpack``.

    A tensor is pickled with a copy of its elements, and unpickled into host memory.

    Parameters
    ----------
    array : cupy.ndarray or numpy.ndarray
        The elements; for bf16 their bits as uint16. The array holds the slot of the batch.
    dtype : Dtype
        Type of the elements.
    ready : cupy.cuda.Event or None
        Event after the last work on the elements; None in host memory.
    lease : Lease or None
        Records the streams that read the elements; None for a tensor that was loaded by pickle.
    """

    def __init__(self, array: Array, dtype: Dtype, ready: Event | None, lease: Lease | None) -> None:
        self._array: Any = array  # _Released after a release
        self._lease: Any = lease
        self._ready = ready
        self._dtype = dtype

    @property
    def _is_bf16(self) -> bool:
        return self._dtype is Dtype.BF16

    def _release(self) -> None:
        self._array = self._lease = _Released()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, samples first."""
        return tuple(self._array.shape)

    @property
    def dtype(self) -> str:
        """Name of the element type."""
        return "bfloat16" if self._is_bf16 else str(self._array.dtype)

    @property
    def array(self) -> Array:
        """The elements as a CuPy or NumPy array, ready on CuPy's current stream; bfloat16 as its bits in uint16.

        After the batch is released, only work on that stream may still use the array.
        """
        if self._ready is not None:
            import cupy

            stream = cupy.cuda.get_current_stream()
            if not self._ready.done:  # wait_event would release the interpreter's lock
                stream.wait_event(self._ready)
            self._lease.streams.add(int(stream.ptr))
        return self._array

    def numpy(self) -> np.ndarray:
        """Return a copy of the elements in host memory; bfloat16 as float32, which represents each value exactly."""
        host = self._on_host()
        return bfloat16_as_float32(host) if self._is_bf16 else host

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self._ready is not None:
            raise TypeError("this tensor is in device memory: numpy() copies it to the host")
        return np.asarray(self.numpy(), dtype)

    def _on_host(self) -> np.ndarray:
        if self._ready is None:
            return np.array(self._array)
        array: Any = self.array
        host: np.ndarray = array.get()
        return host

    @property
    def device_ptr(self) -> int:
        """Address of the first element."""
        return int(self._array.ctypes.data if self._ready is None else self._array.data.ptr)

    def __reduce__(self) -> tuple[object, ...]:
        # Only the elements are copied; the event and the lease stay in this process.
        return Tensor, (self._on_host(), self._dtype, None, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self._array.__dlpack_device__()
        return int(kind), int(number)

    def __dlpack__(self, *, stream: int | None = None, **options: object) -> object:
        if self._ready is None:
            return _as_bf16(self._array.__dlpack__(**options)) if self._is_bf16 else self._array.__dlpack__(**options)
        import cupy

        with self._array.device:
            if stream != -1:
                # In DLPack None means the legacy default stream, which CUDA calls 0 or 1.
                pointer = 1 if stream is None else int(stream)
                if not self._ready.done:
                    cupy.cuda.ExternalStream(pointer).wait_event(self._ready)
                self._lease.streams.add(pointer)
            capsule = self._array.__dlpack__(stream=-1, **options)
        return _as_bf16(capsule) if self._is_bf16 else capsule


def _as_bf16(capsule: object) -> object:
    """Set the element type of a DLPack capsule of uint16 to bfloat16, a type that neither NumPy nor CuPy has."""
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    name = api.PyCapsule_GetName(capsule)
    code = ctypes.c_uint8.from_address(api.PyCapsule_GetPointer(capsule, name) + _CODE_OFFSET[name])
    if code.value != _UNSIGNED:
        raise RuntimeError(f"DLPack capsule {name!r} is not laid out as expected (type code {code.value})")
    code.value = _BFLOAT
    return capsule


@lru_cache(maxsize=64)
def _record_of(names: tuple[str, ...]) -> Any:
    def reduce(parts: tuple[Tensor, ...]) -> tuple[object, ...]:
        return _make_record, (names, tuple(parts))  # pickle cannot find this class by name

    return type("Parts", (namedtuple("Parts", names),), {"__slots__": (), "__reduce__": reduce})


def _make_record(names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    record: tuple[Tensor, ...] = _record_of(names)(*tensors)
    return record


class Batch:
    """A batch. Its ``with`` block gives a DLPack tensor, or a named tuple of tensors where samples have parts.

    At the end of the block the batch releases its memory, which arrays that were imported by DLPack keep alive.

    Attributes
    ----------
    samples : tuple of Sample
        The samples, in the order of the first axis.
    batch_id : int
        Number of the batch.
    errors : tuple of StreamError
        The error of each faulty sample of this batch, which has no row: see ``error.sample``.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        samples: tuple[Sample, ...],
        batch_id: int,
        ready_stream: int,
        errors: tuple[StreamError, ...],
    ) -> None:
        self.samples, self.batch_id, self.errors = samples, batch_id, errors
        self._names, self._ready_stream = tuple(tensors), ready_stream
        self._tensors: Any = _record_of(self._names)(*tensors.values())

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send its tensors (batch.tensors), each of which takes its own elements along")

    @property
    def tensors(self) -> Any:
        """Named tuple of the tensors of all parts."""
        if self._tensors is None:
            raise ShutdownError(f"batch {self.batch_id} was released")
        return self._tensors

    @property
    def info(self) -> BatchInfo:
        """Address, shape and dtype of the first part."""
        first = self.tensors[0]
        return BatchInfo(first.device_ptr, first.shape, first._dtype, self._ready_stream, self.batch_id)

    @property
    def array(self) -> Array:
        """The first part; see :attr:`Tensor.array`."""
        return self.tensors[0].array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first part."""
        return self.tensors[0].shape

    def numpy(self) -> np.ndarray:
        """Return the first part in host memory; see :meth:`Tensor.numpy`."""
        return self.tensors[0].numpy()

    def release(self, event: Event | int | None = None) -> None:
        """Release the memory; allowed any number of times.

        Parameters
        ----------
        event : cupy.cuda.Event, torch.cuda.Event or int, optional
            An event after the last use of the batch, on any stream, or the ``cudaEvent_t`` of such an event. The memory
            is reused only after the event. Streams that imported a tensor by DLPack or :attr:`array` need no event.

        Raises
        ------
        ArgumentTypeError
            `event` is neither an event nor an int.
        """
        if event is not None:
            is_address = isinstance(event, int) and not isinstance(event, bool)
            if not is_address and not callable(getattr(event, "synchronize", None)):
                raise ArgumentTypeError(
                    f"event must be an event of CUDA, or its address as an int (got {type(event).__name__})"
                )
            if self._tensors is not None:
                self._tensors[0]._lease.events.append(event)  # all parts share the lease
        for tensor in self._tensors or ():
            tensor._release()
        self._tensors = None

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        if self._tensors is None:
            return f"<Batch {self.batch_id}, released>"
        parts = zip(self._names, self._tensors, strict=True)
        return (
            f"<Batch {self.batch_id}: {', '.join(f'{name} {tensor.shape} {tensor.dtype}' for name, tensor in parts)}>"
        )

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __enter__(self) -> Any:
        return self if len(self._names) == 1 else self.tensors

    def __exit__(self, *error: object) -> None:
        self.release()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._only_tensor().__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **options: object) -> object:
        return self._only_tensor().__dlpack__(stream=stream, **options)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._only_tensor().__array__(dtype, copy)

    def _only_tensor(self) -> Tensor:
        if len(self._names) > 1:
            raise TypeError(f"the batch has {len(self._names)} parts ({', '.join(self._names)}): pass one tensor")
        return self.tensors[0]
