"""Regions of one array and their outputs, the rows of an array, as callers of ``Reader.submit_regions`` give them."""

import numpy as np

from linumpy.gpu.kernels import address_of
from linumpy.gpu.read.outputs import Regions


def into_rows(regions, out, rows, kept):
    """Give each region, (n, rank, 2), a row of `out`, which has the axes of the array that are `kept`."""
    regions = np.asarray(regions, np.int64)
    strides = np.zeros(regions.shape[:2], np.int64)
    strides[:, kept] = out.strides[1:]
    addresses = address_of(out) + np.asarray(rows, np.int64) * out.strides[0]
    return Regions(
        array=np.zeros(len(regions), np.int64), start=regions[..., 0], stop=regions[..., 1],
        strides=strides, addresses=addresses,
    )  # fmt: skip
