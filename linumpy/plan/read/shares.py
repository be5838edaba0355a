"""Divide a region among several devices. Pure."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from linumpy.errors import RegionError
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.region import Region


def cut_for_devices(layout: ArrayLayout, region: Region, count: int) -> list[Region]:
    """Cut a region along the first axis of the result, between stored objects: no two devices read one chunk or shard.

    Returns one for each device, in order. Sizes are as equal as the chunks (or shards) allow; some regions are empty if
    there are fewer chunks than devices.

    Raises `RegionError`: the region is a single element.
    """
    if not any(region.kept):
        raise RegionError(f"region {region} is one element: it cannot be cut for {count} devices")
    axis = region.kept.index(True)
    start, stop = region.start[axis], region.stop[axis]
    if layout.lengths is not None:
        borders = np.cumsum(layout.lengths[axis])
    else:
        size = layout.object_shape[axis]
        borders = np.arange(start // size + 1, -(-stop // size), dtype=np.int64) * size
    borders = np.array([start, *borders[(start < borders) & (borders < stop)].tolist(), stop])
    equal_cuts = [start + (stop - start) * number / count for number in range(1, count)]
    cuts = [start, *(int(borders[np.abs(borders - cut).argmin()]) for cut in equal_cuts), stop]

    def with_bounds(first: int, last: int) -> Region:
        def changed(bounds: tuple[int, ...], bound: int) -> tuple[int, ...]:
            return (*bounds[:axis], bound, *bounds[axis + 1 :])

        return replace(region, start=changed(region.start, first), stop=changed(region.stop, last))

    return [with_bounds(first, last) for first, last in itertools.pairwise(cuts)]
