"""Whether a reading is right: what zarr-python reads on the host is the truth.

In: a case and the array that some path made of it, on the host or on the device. Out: nothing where they agree, else
one line on the first voxel that differs. One piece of the truth at a time is held, and compared where the array is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import zarr

from linumpy.benchmark.blocks import Block, blocks
from linumpy.benchmark.cases import Case
from linumpy.device import array_module, to_host
from linumpy.io.zarr_mode import host_zarr_context

#: zarr-python's own way to decode chunks.
OWN_PIPELINE = {"codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline"}


@contextmanager
def host_zarr() -> Iterator[None]:
    """Have zarr-python read with its own pipeline into host memory, whatever the caller has set."""
    with host_zarr_context(), zarr.config.set(OWN_PIPELINE):
        yield


def truth(case: Case) -> Iterator[tuple[Block, np.ndarray]]:
    """Yield what is read piece by piece, as zarr-python reads it."""
    first = [part.start for part in case.selection]
    for block in blocks(case.result_shape, case.shards or case.chunks, case.dtype.itemsize):
        there = tuple(slice(a + part.start, a + part.stop) for a, part in zip(first, block, strict=True))
        with host_zarr():
            piece = np.asarray(zarr.open_array(case.path, mode="r")[there])
        yield block, piece.astype(case.dtype, copy=False)


def difference(case: Case, got: Any) -> str | None:
    """Say where an array differs from the truth; None where it does not.

    NaN equals NaN. The comparison of NumPy arrays runs on the host, of CuPy arrays on their device.
    """
    if tuple(got.shape) != case.result_shape:
        return f"shape {tuple(got.shape)}, not {case.result_shape}"
    if np.dtype(got.dtype).newbyteorder("=") != case.dtype:
        return f"dtype {got.dtype}, not {case.dtype}"
    xp = array_module(got)
    for block, piece in truth(case):
        here, true = got[block], xp.asarray(piece)
        wrong = here != true
        if case.dtype.kind in "fc":
            wrong &= ~(xp.isnan(here) & xp.isnan(true))
        if bool(wrong.any()):
            return _first(block, here, true, wrong)
    return None


def _first(block: Block, here: Any, true: Any, wrong: Any) -> str:
    at = np.unravel_index(int(wrong.argmax()), wrong.shape)
    where = tuple(int(part.start + one) for part, one in zip(block, at, strict=True))
    return f"voxel {where} is {to_host(here[at])}, not {to_host(true[at])}; {int(wrong.sum()):,} differ in its block"
