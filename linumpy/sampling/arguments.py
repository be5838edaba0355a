"""Arrays that callers hand over to be filled or read: checked, and seen as NumPy or CuPy arrays without a copy.

In: a raw pointer, or a NumPy, CuPy, torch or DLPack array. Out: an array of the sampler's memory that shares its bytes.
Errors: ``TypeError`` and ``ValueError`` that name the argument, what it is, and what it must be.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from linumpy.arrays import Array
from linumpy.device import require_cuda

#: Largest number of samples of a call.
MOST_SAMPLES = 2**33
#: Devices of DLPack whose memory NumPy reads: kDLCPU and kDLCUDAHost.
_HOST_MEMORY = (1, 3)


def checked_count(count: Any) -> int:
    """Take a number of samples."""
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)):
        raise TypeError(f"count is {count!r}; it must be an integer")
    if not 0 <= int(count) <= MOST_SAMPLES:
        raise ValueError(f"count is {count}; it must lie in 0 to {MOST_SAMPLES}")
    return int(count)


def whole(name: str, given: Any, low: int, high: int, what: str) -> int:
    """Take an integer argument.

    Parameters
    ----------
    name, what : str
        What the argument is called and what it counts, for errors.
    given : int
        Its value; a float or a string is refused, and not rounded.
    low, high : int
        The smallest and the largest value.
    """
    if isinstance(given, (bool, np.bool_)) or not isinstance(given, (int, np.integer)):
        raise TypeError(f"{name}={given!r}: give an integer, the {what}")
    if not low <= int(given) <= high:
        raise ValueError(f"{name}={given}: give the {what}, from {low} to {high}")
    return int(given)


def is_torch(given: Any) -> bool:
    """Say whether something is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.Tensor)


def view_of(
    given: Any, name: str, shape: tuple[int, ...], dtype: DTypeLike, device: int | None, *, writes: bool = True
) -> Array:
    """See an argument as an array.

    Parameters
    ----------
    given : int or array
        A pointer, or an array. A pointer is trusted to have as many bytes as `shape` and `dtype` say.
    name : str
        Name of the argument, for errors.
    shape : tuple of int
        Required shape; an array may lack an axis of length 1 at the front.
    dtype : dtype
        Required dtype.
    device : int or None
        Number of the device on which the array must lie; None: host memory.
    writes : bool
        The array is written to.

    Returns
    -------
    ndarray
        C-contiguous; NumPy for host memory, else CuPy.
    """
    dtype = np.dtype(dtype)
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
        return _at(int(given), name, shape, dtype, device)
    array = _imported(given, name, device)
    kind = "NumPy" if device is None else f"device {device}'s"
    if (device is None) != isinstance(array, np.ndarray):
        where = "host memory" if isinstance(array, np.ndarray) else "the memory of a device"
        wanted = "host memory" if device is None else f"device {device}"
        raise ValueError(f"{name} lies in {where}; this sampler works in {wanted}: give a {kind} array")
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


def dtype_name(given: Any, default: str) -> str:
    """Name the dtype of an argument, such as ``"bfloat16"``; `default` for a pointer."""
    if isinstance(given, (int, np.integer)) or not hasattr(given, "dtype"):
        return default
    return str(given.dtype).removeprefix("torch.")


def _imported(given: Any, name: str, device: int | None) -> Any:
    if isinstance(given, np.ndarray):
        return given.view(np.ndarray)  # numpy.matrix and others behave differently when they are indexed
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(given, cupy.ndarray):
        return given
    if is_torch(given):
        return _of_torch(given, name)
    if not hasattr(given, "__dlpack__"):
        raise TypeError(f"{name} is a {type(given).__name__}; give a pointer, or a NumPy, CuPy, torch or DLPack array")
    if given.__dlpack_device__()[0] in _HOST_MEMORY:
        return np.from_dlpack(given)
    if device is None:
        raise ValueError(f"{name} lies in the memory of a device; this sampler works in host memory")
    return require_cuda().from_dlpack(given)


def _of_torch(tensor: Any, name: str) -> Any:
    """See a tensor as an array without a copy; :func:`stream_of` orders the streams."""
    dtype = np.dtype(dtype_name(tensor, "float32"))
    if tensor.numel() and not tensor.is_contiguous():
        raise ValueError(f"{name} is not C-contiguous; give a contiguous tensor")
    shape = tuple(int(n) for n in tensor.shape)
    if tensor.device.type == "cpu":
        return tensor.detach().numpy()
    if tensor.device.type != "cuda":
        raise ValueError(f"{name} lies on {tensor.device}; give a tensor of host memory or of a CUDA device")
    return _on_device(int(tensor.data_ptr()), shape, dtype, int(tensor.device.index or 0), tensor)


def _at(pointer: int, name: str, shape: tuple[int, ...], dtype: np.dtype, device: int | None) -> Any:
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return _empty(shape, dtype, device)
    if pointer <= 0 or pointer % dtype.itemsize or pointer + nbytes > 2**64:
        raise ValueError(
            f"{name} is the pointer {pointer:#x}; it must be the address of {nbytes} bytes of {dtype} elements"
        )
    if device is None:
        memory: Any = (ctypes.c_byte * nbytes).from_address(pointer)
        return np.frombuffer(memory, dtype).reshape(shape)
    owner = _device_of_pointer(pointer)
    if owner is None:
        raise ValueError(
            f"{name} is the pointer {pointer:#x}, which is not in device memory; give a pointer into device {device}"
        )
    if owner != device:
        raise ValueError(f"{name} is a pointer into device {owner}; this sampler works on device {device}")
    return _on_device(pointer, shape, dtype, device, None)


def _empty(shape: tuple[int, ...], dtype: np.dtype, device: int | None) -> Any:
    if device is None:
        return np.empty(shape, dtype)
    import cupy

    return cupy.empty(shape, dtype)


def _device_of_pointer(pointer: int) -> int | None:
    """Return the number of the device whose memory a pointer is to; None for host memory."""
    from cupy.cuda import runtime

    try:
        attributes = runtime.pointerGetAttributes(pointer)
    except runtime.CUDARuntimeError:
        return None
    in_device_memory = (2, 3)  # cudaMemoryTypeDevice, cudaMemoryTypeManaged
    return int(attributes.device) if int(attributes.type) in in_device_memory else None


def _on_device(pointer: int, shape: tuple[int, ...], dtype: np.dtype, device: int, owner: Any) -> Any:
    import cupy

    memory = cupy.cuda.UnownedMemory(pointer, math.prod(shape) * dtype.itemsize, owner, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


@contextlib.contextmanager
def stream_of(device: int | None, *arrays: Any) -> Iterator[None]:
    """Work on a device, on the current stream: torch's where a tensor of a device was given, else CuPy's."""
    if device is None:
        yield
        return
    import cupy

    with cupy.cuda.Device(device):
        tensors = [array for array in arrays if is_torch(array) and array.device.type == "cuda"]
        if not tensors:
            yield
            return
        stream = sys.modules["torch"].cuda.current_stream(device).cuda_stream
        if stream == cupy.cuda.get_current_stream().ptr:
            yield
            return
        with cupy.cuda.ExternalStream(stream, device):
            yield
