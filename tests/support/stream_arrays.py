"""Arrays, and their records of planning, for the tests of batches."""

import numpy as np

from linumpy import stream
from linumpy.stream.planning.alignment import Grid
from linumpy.stream.planning.records import ArrayInfo
from linumpy.stream.resampling.on_host import Staged
from tests.support.stores import stored


def make_array(path, values, chunks=None, **options):
    """Write an array, and return its path."""
    stored(path, values, chunks, **options)
    return str(path)


def small_config(**options):
    """A configuration on the CPU, of little memory."""
    options = {"batch_size": 1, "host_buffer_bytes": 1 << 20, "device_buffer_bytes": 1 << 22, **options}
    return stream.Config(device="cpu", **options)


def array_info(values, chunk=None, spacing=None):
    """Describe values as an array without names of axes."""
    shape, rank = values.shape, values.ndim
    grid = Grid("a", None, min(rank, 3), shape, (1.0,) * rank, (0.0,) * rank, spacing)
    return ArrayInfo(
        source=values, name="a", shape=shape, chunk_shape=chunk or shape, dtype=values.dtype, grid=grid
    )  # fmt: skip


def staged(read, unread=None):
    """Stage what a read says; `unread` makes the voxels that are not read, from a shape and a dtype."""
    if read.region is None:
        return Staged(read, None)
    values = read.info.source[tuple(slice(*one) for one in read.region)]
    if read.needed is None:
        return Staged(read, np.ascontiguousarray(values))
    box = unread(values.shape, values.dtype)
    lead = values.ndim - read.needed.shape[1]
    first = [start for start, _ in read.region[lead:]]
    for one in read.needed:
        at = (..., *(slice(a - start, b - start) for (a, b), start in zip(one, first, strict=True)))
        box[at] = values[at]
    return Staged(read, box)
