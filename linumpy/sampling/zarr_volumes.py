"""Open Zarr arrays and OME-Zarr images for sampling: in device memory, in host memory, or in pages.

In: a :class:`~linumpy.sampling.create.ZarrSource`. Out: channels, their voxels, or a field in pages. Errors:
``ValueError`` for axes, dtypes and ranges that are not sampled, and the errors of opening and reading.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import zarr

from linumpy.arrays import Array
from linumpy.checks import integer, is_integer
from linumpy.device import free_memory, require_cuda
from linumpy.gpu.kernels import CUDA_TYPES
from linumpy.io.ome import open_image
from linumpy.io.source import open_node, with_options
from linumpy.io.volume import Volume, select_volumes
from linumpy.sampling.arguments import MAX_SAMPLES
from linumpy.sampling.paging.page_cache import PageCache
from linumpy.sampling.paging.pages import PagedVolume
from linumpy.sampling.paging.plan import page_shape, plan_paging
from linumpy.sampling.raw_voxels import check_range, is_kept
from linumpy.sampling.volume import KEPT

if TYPE_CHECKING:
    from linumpy.sampling.create import PagedSource, ZarrSource

#: Largest error of values that samplers promise, as a fraction of the range.
_PRECISION = 1e-6


def open_channels(source: ZarrSource) -> list[Volume]:
    """Open the channels of an image or an array, without reading voxels.

    `source`: an array (Z, Y, X) or (Y, X); an array of four axes with `channel_axis`; or an OME-Zarr image, whose
    metadata names its axes. Returns a volume for each channel; all have the same shape and dtype.
    """
    level, channel_axis, channel, time = source.level, source.channel_axis, source.channel, source.time
    node = open_node(with_options(source.source, source.storage_options))
    if isinstance(node, zarr.Array):
        name, shape = "the array", node.shape
        if level or channel is not None or time is not None:
            raise ValueError("level, channel and time choose from an OME-Zarr image; this is a single array")
        channels = _of_array(node, channel_axis)
    elif channel_axis is not None:
        raise ValueError(f"channel_axis={channel_axis}: the metadata of an OME-Zarr image names its axes; leave it out")
    else:
        volumes = select_volumes(open_image(node), level, channel=channel, time=time)
        channels, name, shape = list(volumes.volumes.values()), volumes.name, volumes.first.shape
        if "t" in volumes.leading:
            raise ValueError(f"{name} has several times: choose one by time=")
        if len(shape) not in (2, 3):
            raise ValueError(f"{name} has {len(shape)} axes of space; two or three are sampled")
    if 0 in shape:
        raise ValueError(f"{name} has shape {shape}: an axis is empty, so there is nothing to sample")
    dtype = channels[0].dtype
    if dtype.kind not in "uif" or dtype.str[1:] not in CUDA_TYPES:
        raise ValueError(f"{name} has dtype {dtype}; voxels are integers or floats of 16 to 64 bits")
    return channels


def _of_array(array: zarr.Array, channel_axis: int | None) -> list[Volume]:
    if array.ndim in (2, 3) and channel_axis is None:
        return [Volume(array, (None,) * array.ndim)]
    if channel_axis is not None and not is_integer(channel_axis):
        raise ValueError(f"channel_axis={channel_axis!r}: give the number of an axis, 0 to 3")
    if array.ndim != 4 or channel_axis is None or not -4 <= channel_axis < 4:
        raise ValueError(
            f"the array has shape {array.shape}: give one of axes (Z, Y, X) or (Y, X), or of four with "
            "channel_axis= (0 to 3)"
        )
    axis = channel_axis % 4
    return [Volume(array, tuple(c if a == axis else None for a in range(4))) for c in range(array.shape[axis])]


def _with_three_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape (Z, Y, X); an image of two axes is a single plane."""
    return (1,) * (3 - len(shape)) + shape


def read_channels(volumes: list[Volume]) -> np.ndarray:
    """Read all channels into host memory: (C, Z, Y, X)."""
    first = volumes[0]
    voxels = np.empty((len(volumes), *_with_three_axes(first.shape)), first.dtype.newbyteorder("="))
    for volume, out in zip(volumes, voxels, strict=True):
        out[...] = volume.read()
    return voxels


def read_channels_to_gpu(volumes: list[Volume], low_high: tuple[float, float] | None, labels: bool) -> Array:
    """Read all channels into device memory: (C, Z, Y, X).

    Voxels keep their dtype if kernels sample it, and with `labels` or `low_high`, where the caller converts them; else
    they become float32.
    """
    from linumpy.gpu.zarr_io import read_zarr_to_gpu

    first = volumes[0]
    # Labels are checked, and voxels normalised, in their own dtype.
    keeps_dtype = labels or low_high is not None or is_kept(first.dtype, None)
    dtype = first.dtype.newbyteorder("=") if keeps_dtype else np.dtype(np.float32)
    voxels = require_cuda().empty((len(volumes), *_with_three_axes(first.shape)), dtype)
    box = tuple(slice(0, n) for n in first.shape)
    for volume, out in zip(volumes, voxels, strict=True):
        read_zarr_to_gpu(volume.array, region=volume.region(box), dtype=dtype, out=out.reshape(first.shape))
    return voxels


def open_pages(source: PagedSource, *, window: int | None = None, xp: ModuleType | None = None) -> PagedVolume:
    """Open a volume whose pages are read when they are needed.

    By default `cache_bytes` is a quarter of the free device memory, `ahead` samples take half of it (4 bytes per sample
    and channel) but are at least 2^16, and `reader` is a new one. `window` as for
    :class:`~linumpy.sampling.paging.pages.PagedVolume`. `xp` is CuPy by default, or NumPy in tests.
    """
    volumes, low_high = open_channels(source), check_range(source.range)
    cache_bytes, ahead, reader = source.cache_bytes, source.ahead, source.reader
    first = volumes[0]
    if first.ndim != 3:
        raise ValueError(f"an image of {first.ndim} axes is not read in pages: choose device 'cuda' or 'cpu'")
    kept = first.dtype.str[1:] in KEPT
    _check_precision(low_high, kept)
    if cache_bytes is not None:
        cache_bytes = integer("cache_bytes", cache_bytes, 1, 2**62, meaning="the bytes of device memory for pages")
    if ahead is not None:
        ahead = integer("ahead", ahead, 1, MAX_SAMPLES, meaning="the samples that are made in one pass over the volume")
    if xp is None:
        xp = require_cuda()
    if reader is None:
        from linumpy.gpu import Reader

        reader = Reader()
    if cache_bytes is None:
        cache_bytes = free_memory() // 4
    dtype = first.dtype.newbyteorder("=") if kept else np.dtype(np.float32)
    voxel = len(volumes) * dtype.itemsize
    page = page_shape(first.shape, first.chunks)
    pages = math.prod(-(-n // p) for n, p in zip(first.shape, page, strict=True))
    slots = min(cache_bytes // (math.prod(page) * voxel), 2 * pages + 16)
    if low_high:
        value_range = 0.0, 1.0
    elif first.dtype.kind == "f":  # the range of the voxels is unknown until the whole volume is read
        value_range = -math.inf, math.inf
    else:
        value_range = float(np.iinfo(first.dtype).min), float(np.iinfo(first.dtype).max)
    dims = (first.shape[0], first.shape[1], first.shape[2])
    cache = PageCache(volumes, plan_paging(dims, first.chunks, slots), slots, dtype, reader, xp)
    return PagedVolume(
        cache,
        xp,
        low_high=low_high,
        value_range=value_range,
        ahead=ahead or max(2**16, cache_bytes // (8 * len(volumes))),
        window=window,
    )


def _check_precision(low_high: tuple[float, float] | None, kept: bool) -> None:
    """Refuse a range for which kernels, which compute in float32, are less precise than samplers promise."""
    if low_high is None or low_high[0] == low_high[1]:
        return
    low, high = low_high
    rounding = abs(low - float(np.float32(low)))
    if not kept:  # voxels become float32 before the range is applied
        rounding += 2.0**-24 * max(abs(low), abs(high))
    if rounding > _PRECISION * (high - low):
        raise ValueError(
            f"range=({low}, {high}): float32 rounds such voxels by {rounding / (high - low):.1g} of the range; use "
            "device 'cuda' or 'cpu', which apply the range in float64"
        )
