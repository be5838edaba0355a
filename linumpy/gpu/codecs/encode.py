"""Encode chunks in device memory, by kernels of this package.

In: chunks of one size, side by side on the device. Out: :class:`Encoded`, the stored bytes of each, packed. Nothing waits
for the device: sizes stay there, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from linumpy.gpu.kernels import KernelSpec, address_of, load
from linumpy.plan.encode.launches import Address, EncodeLaunch, EncodePlan
from linumpy.plan.encode.zstd import plan_zstd
from linumpy.plan.encoding import Encoding

if TYPE_CHECKING:
    import cupy

#: Memory is allocated in multiples of it.
_ALLOCATION = 512


@dataclass(frozen=True)
class Encoded:
    """Streams packed one behind another: chunk k is ``arena[offsets[k]:offsets[k + 1]]``.

    Attributes
    ----------
    arena : cupy.ndarray
        uint8. As long as the streams can get, whatever is in the chunks.
    offsets : cupy.ndarray
        int64, one more than chunks.
    """

    arena: cupy.ndarray
    offsets: cupy.ndarray


def plan_of(count: int, nbytes: int, encoding: Encoding) -> EncodePlan:
    """Return the launches that encode `count` chunks of `nbytes` bytes each."""
    if encoding.compressor == "zstd" and not encoding.checksum:
        return plan_zstd(count, nbytes, encoding.preset)
    raise NotImplementedError(encoding.compressor)


def encode_chunks(chunks: cupy.ndarray, encoding: Encoding) -> Encoded:
    """Encode each chunk as a stream of its own.

    Parameters
    ----------
    chunks : cupy.ndarray
        (count, nbytes) uint8, contiguous, on CuPy's current device.
    encoding : Encoding
        Codecs and settings.

    Returns
    -------
    Encoded
        Complete once CuPy's current stream has got there; this function does not wait for it.
    """
    count, nbytes = chunks.shape
    return encode_by(plan_of(count, nbytes, encoding), chunks)


def encode_by(plan: EncodePlan, chunks: cupy.ndarray) -> Encoded:
    """Carry a plan out."""
    import cupy

    arrays = {
        "chunks": chunks,
        "arena": cupy.empty(plan.arena_nbytes, np.uint8),
        "offsets": cupy.empty(len(chunks) + 1, np.int64),
        "scratch": cupy.empty(plan.scratch_nbytes, np.uint8),
    }
    if not plan.launches:
        arrays["offsets"][...] = 0
    for launch in plan.launches:
        load(kernel_spec(launch))((launch.grid,), (launch.block,), _arguments(launch, arrays), shared_mem=launch.shared)
    return Encoded(arrays["arena"], arrays["offsets"])


def encoding_nbytes(count: int, nbytes: int, encoding: Encoding) -> int:
    """Return how many bytes of device memory :func:`encode_chunks` takes for `count` chunks, scratch and result."""
    plan = plan_of(count, nbytes, encoding)
    return sum(-(-part // _ALLOCATION) * _ALLOCATION for part in (plan.arena_nbytes, plan.scratch_nbytes, 8 * count + 8))


def kernel_spec(launch: EncodeLaunch) -> KernelSpec:
    """Return the kernel of a launch."""
    return KernelSpec(launch.source, launch.kernel, launch.defines, "linumpy.gpu.codecs.cuda")


def _arguments(launch: EncodeLaunch, arrays: dict[str, cupy.ndarray]) -> tuple[np.generic, ...]:
    return tuple(
        np.uint64(address_of(arrays[one.array]) + one.offset) if isinstance(one, Address) else np.int64(one)
        for one in launch.args
    )
