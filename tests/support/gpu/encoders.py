"""The encoders of the device on the CPU: their own plan and CUDA source, in the emulator with all its checks."""

import ctypes
import functools
import itertools
import mmap
import re
import sys
import types
from unittest import mock

import numpy as np

from linumpy.gpu.codecs import encode
from linumpy.gpu.kernels import source_text
from linumpy.plan.encode.chunks import plan_encoding
from tests.support.gpu.emulator import Kernel, library

_LIBC, _PROT_NONE = ctypes.CDLL(None), 0
_KERNEL = re.compile(r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")
#: Sources whose kernels loop over their tasks.
_LOOPING = ("lz4_encode", "blosc_encode", "encoded")


class _Looping(Kernel):
    """Runs in so few blocks that each has many tasks."""

    def __call__(self, grid, block, args, shared_mem=0):
        super().__call__((min(grid[0], 3),), block, args, shared_mem)


def kernels_of(source):
    """Name all kernels of a source."""
    return tuple(_KERNEL.findall(source_text(source, "linumpy.gpu.codecs.cuda")))


@functools.cache
def load(spec, seed=1):
    """Compile an encoder for the CPU, together with the others of its source."""
    defines = (*spec.defines, ("__CUDA_ARCH__", "900"))
    # Those of LZ4 and Blosc take longer to optimise than to run.
    optimise = "-O0" if spec.source in _LOOPING else "-O2"
    compiled = library(source_text(spec.source, spec.package), defines, kernels_of(spec.source), True, optimise)
    made = _Looping if spec.source in _LOOPING else Kernel
    kernel = made(getattr(compiled, f"emulate_{spec.name}"))
    kernel.seed = seed
    return kernel


def between_closed_pages(nbytes, skew, at_end):
    """Return bytes, `skew` bytes away from a word, beside pages whose access ends the process.

    They lie at the begin or the end of what is open: a word may be read whole that has one byte of them.
    """
    page = mmap.PAGESIZE
    whole = -(-(nbytes + skew) // 4) * 4
    inside = max(1, -(-whole // page)) * page
    pages = np.frombuffer(mmap.mmap(-1, inside + 2 * page), np.uint8)
    for closed in (0, page + inside):
        assert _LIBC.mprotect(ctypes.c_void_p(pages.ctypes.data + closed), page, _PROT_NONE) == 0
    begin = page + skew + (inside - whole if at_end else 0)
    pages[page : page + inside] = 0xA5
    return pages[begin : begin + nbytes]


def encoded(chunks, encoding, *, seed=1, skew=0):
    """Encode rows of bytes in poisoned memory, `skew` bytes away from a word; returns the stored bytes of each."""
    rows = between_closed_pages(chunks.size, skew, at_end=bool(seed % 2)).reshape(chunks.shape)
    rows[...] = chunks
    guarded = []

    def empty(count, dtype):
        guard = 256
        whole = np.full(count * np.dtype(dtype).itemsize + 2 * guard, 0xA5, np.uint8)
        at = -whole.ctypes.data % guard  # memory of a device is aligned
        part = whole[at : at + count * np.dtype(dtype).itemsize]
        guarded.append((whole, at, at + part.size))
        return part.view(dtype)

    cupy = types.SimpleNamespace(empty=empty)
    with (
        mock.patch.dict(sys.modules, {"cupy": cupy}),
        mock.patch.object(encode, "load", functools.partial(load, seed=seed)),
        mock.patch.object(encode, "prepare", return_value=None),
    ):
        made = encode.encode_chunks(rows, encoding)
    for whole, begin, end in guarded:
        assert (whole[:begin] == 0xA5).all(), "a kernel wrote before an array"
        assert (whole[end:] == 0xA5).all(), "a kernel wrote behind an array"
    plan = plan_encoding(*chunks.shape, encoding)
    planned = plan.arena_nbytes + plan.scratch_nbytes + made.offsets.nbytes
    assert (
        sum(end - begin for _, begin, end in guarded) == planned == sum(encode.encoding_nbytes(*chunks.shape, encoding))
    )
    assert np.array_equal(rows, chunks), "a kernel wrote into the chunks"
    return [made.arena[a:b].tobytes() for a, b in itertools.pairwise(made.offsets)]
