"""Encode chunks in device memory, by the kernels of this package.

In: contiguous chunks of one size on the device. Out: :class:`Encoded`, the encoded chunks without gaps. No function
waits for the device: the sizes of the encoded chunks also stay in device memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from linumpy.gpu.codecs.decode import allow
from linumpy.gpu.kernels import KernelSpec, address_of, load, prepare
from linumpy.plan.codecs import Encoding
from linumpy.plan.encode.chunks import plan_encoding
from linumpy.plan.encode.launches import EncodeLaunch

if TYPE_CHECKING:
    import cupy


def kernel_spec(launch: EncodeLaunch) -> KernelSpec:
    """Return the specification of the kernel of a launch, which :mod:`linumpy.gpu.kernels` compiles."""
    return KernelSpec(launch.source, launch.kernel, launch.defines, "linumpy.gpu.codecs.cuda")


@dataclass(frozen=True)
class Encoded:
    """Encoded chunks without gaps: chunk k is ``arena[offsets[k]:offsets[k + 1]]``.

    `arena`: uint8, of the maximum size that the encoded chunks can have; bytes from ``offsets[-1]`` on are undefined.
    `offsets`: int64, (count + 1,).
    """

    arena: cupy.ndarray
    offsets: cupy.ndarray


def encode_chunks(chunks: cupy.ndarray, encoding: Encoding) -> Encoded:
    """Encode chunks, each into one stream.

    `chunks`: (count, nbytes) uint8, contiguous, on CuPy's current device.

    Returns: Valid after the launches, which this function queues on CuPy's current stream and does not wait for.

    `NotImplementedError`, `ValueError`: See :func:`~linumpy.plan.encode.chunks.plan_encoding`.
    """
    import cupy

    count, nbytes = chunks.shape
    plan = plan_encoding(count, nbytes, encoding)
    prepare(kernel_spec(launch) for launch in plan.launches)
    arrays = {
        "chunks": chunks,
        "arena": cupy.empty(plan.arena_nbytes, np.uint8),
        "offsets": cupy.empty(count + 1, np.int64),
        "scratch": cupy.empty(plan.scratch_nbytes, np.uint8),
    }
    addresses = {name: address_of(array) for name, array in arrays.items()}
    for launch in plan.launches:
        kernel = load(kernel_spec(launch))
        if launch.shared:
            allow(kernel, launch.shared)
        args = (arg if isinstance(arg, int) else addresses[arg.array] + arg.offset for arg in launch.args)
        kernel((launch.grid,), (launch.block,), tuple(map(np.uint64, args)), shared_mem=launch.shared)
    return Encoded(arrays["arena"], arrays["offsets"])


def encoding_nbytes(count: int, nbytes: int, encoding: Encoding) -> tuple[int, int]:
    """Return the bytes of device memory that :func:`encode_chunks` allocates: for the result, and for scratch."""
    plan = plan_encoding(count, nbytes, encoding)
    return plan.arena_nbytes + 8 * (count + 1), plan.scratch_nbytes
