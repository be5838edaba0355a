"""Check arguments; view the caller's memory as NumPy or CuPy arrays, without a copy.

In: a pointer, or a NumPy, CuPy, torch or DLPack array. Out: a NumPy or CuPy array that shares the caller's memory.
Errors: ``TypeError`` and ``ValueError`` that name the argument, its value, and the values that are allowed.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from linumpy.arrays import Array
from linumpy.checks import integer, is_integer
from linumpy.device import require_cuda

#: Memory that a caller passes: a pointer, or a NumPy, CuPy, torch or DLPack array.
Buffer: TypeAlias = Any

#: Largest number of samples of a call, and of a window: 32 bits number the pairs of samples of a window.
MAX_SAMPLES = 2**33
#: DLPack's device types whose memory NumPy reads: kDLCPU and kDLCUDAHost.
_HOST_MEMORY = (1, 3)


def as_count(count: object) -> int:
    """Check the number of samples of a call."""
    return integer("count", count, 0, MAX_SAMPLES, meaning="the number of samples")


def is_torch(array: object) -> bool:
    """Return whether an array is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def from_dlpack(array: Buffer) -> Array:
    """Return an array that has DLPack's interface as a NumPy or CuPy array, without a copy."""
    if array.__dlpack_device__()[0] in _HOST_MEMORY:
        return np.from_dlpack(array)
    return require_cuda().from_dlpack(array)


def view_of(
    buffer: Buffer, name: str, shape: tuple[int, ...], dtype: DTypeLike, device: int | None, *, writes: bool = True
) -> Array:
    """Return an argument as an array.

    An array may lack the first axis of `shape` if its length is 1. How many bytes a pointer refers to is not checked:
    `shape` and `dtype` decide. With `writes`, a read-only array is refused. The result is C-contiguous; NumPy in host
    memory, where `device` is None, else CuPy.
    """
    dtype = np.dtype(dtype)
    if is_integer(buffer):
        return _from_pointer(int(buffer), name, shape, dtype, device)
    array = _as_array(buffer, name, device)
    kind = "NumPy" if device is None else f"device {device}'s"
    if (device is None) != isinstance(array, np.ndarray):
        memory = "host memory" if isinstance(array, np.ndarray) else "the memory of a device"
        needed = "host memory" if device is None else f"device {device}"
        raise ValueError(f"{name} lies in {memory}; this sampler works in {needed}: give a {kind} array")
    if device is not None and array.device.id != device:
        raise ValueError(f"{name} lies on device {array.device.id}; this sampler works on device {device}")
    if array.dtype != dtype:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be {dtype}")
    if array.shape != shape and (1, *array.shape) != shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be {shape}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not C-contiguous; give a contiguous array of shape {shape}")
    if writes and isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f"{name} is read-only; give an array that can be written to")
    return array.reshape(shape)


def dtype_name(buffer: Buffer, default: str) -> str:
    """Return the name of an array's dtype, such as ``"bfloat16"``; `default` for a pointer."""
    if isinstance(buffer, (int, np.integer)) or not hasattr(buffer, "dtype"):
        return default
    return str(buffer.dtype).removeprefix("torch.")


def _as_array(buffer: Buffer, name: str, device: int | None) -> Any:
    if isinstance(buffer, np.ndarray):
        return buffer.view(np.ndarray)  # subclasses such as numpy.matrix behave differently when they are indexed
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(buffer, cupy.ndarray):
        return buffer
    if is_torch(buffer):
        return _from_torch(buffer, name)
    if not hasattr(buffer, "__dlpack__"):
        raise TypeError(f"{name} is a {type(buffer).__name__}; give a pointer, or a NumPy, CuPy, torch or DLPack array")
    if device is None and buffer.__dlpack_device__()[0] not in _HOST_MEMORY:
        raise ValueError(f"{name} lies in the memory of a device; this sampler works in host memory")
    return from_dlpack(buffer)


def _from_torch(tensor: Buffer, name: str) -> Array:
    """Return a tensor as an array, without a copy; the caller works on torch's stream by :func:`stream_of`."""
    dtype = np.dtype(dtype_name(tensor, "float32"))
    if tensor.numel() and not tensor.is_contiguous():
        raise ValueError(f"{name} is not C-contiguous; give a contiguous tensor")
    shape = tuple(int(n) for n in tensor.shape)
    if tensor.device.type == "cpu":
        return tensor.detach().numpy()
    if tensor.device.type != "cuda":
        raise ValueError(f"{name} lies on {tensor.device}; give a tensor of host memory or of a CUDA device")
    return _on_device(int(tensor.data_ptr()), shape, dtype, int(tensor.device.index or 0), tensor)


def _from_pointer(pointer: int, name: str, shape: tuple[int, ...], dtype: np.dtype, device: int | None) -> Array:
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype) if device is None else require_cuda().empty(shape, dtype)
    if pointer <= 0 or pointer % dtype.itemsize or pointer + nbytes > 2**64:
        raise ValueError(
            f"{name} is the pointer {pointer:#x}; it must be the address of {nbytes} bytes of {dtype} elements"
        )
    if device is None:
        memory: Any = (ctypes.c_byte * nbytes).from_address(pointer)
        return np.frombuffer(memory, dtype).reshape(shape)
    from cupy.cuda import runtime

    try:
        attributes = runtime.pointerGetAttributes(pointer)
    except runtime.CUDARuntimeError:
        attributes = None
    if attributes is None or int(attributes.type) not in (2, 3):  # cudaMemoryTypeDevice, cudaMemoryTypeManaged
        raise ValueError(
            f"{name} is the pointer {pointer:#x}, which is not in device memory; give a pointer into device {device}"
        )
    if attributes.device != device:
        raise ValueError(f"{name} is a pointer into device {attributes.device}; this sampler works on device {device}")
    return _on_device(pointer, shape, dtype, device, None)


def _on_device(pointer: int, shape: tuple[int, ...], dtype: np.dtype, device: int, owner: object) -> Array:
    import cupy

    memory = cupy.cuda.UnownedMemory(pointer, math.prod(shape) * dtype.itemsize, owner, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


@contextlib.contextmanager
def stream_of(device: int | None, *buffers: Buffer) -> Iterator[None]:
    """Make a device current, and torch's current stream if a buffer is a tensor on a device; nothing for None."""
    if device is None:
        yield
        return
    import cupy

    with cupy.cuda.Device(device):
        tensors = [buffer for buffer in buffers if is_torch(buffer) and buffer.device.type == "cuda"]
        if not tensors:
            yield
            return
        stream = sys.modules["torch"].cuda.current_stream(device).cuda_stream
        if stream == cupy.cuda.get_current_stream().ptr:
            yield
            return
        with cupy.cuda.ExternalStream(stream, device):
            yield
