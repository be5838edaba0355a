"""Samples per second of volumes in device memory, beside a sampler by texture units.

Some thousand samples of each result are checked in double precision, to 1e-6 of the range of values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.benchmark.cases import Case, Entry, Makers, Mark, Prepare, Prepared, kernel_suite, scaled
from linumpy.benchmark.runner import CaseResult
from linumpy.device import array_module
from linumpy.sampling import create_sampler
from linumpy.sampling.sampler import Sampler
from linumpy.sampling.volume import DeviceVolume, Shape

_DESCRIPTION = """Time samples of volumes on this machine's GPU, beside a sampler by texture units.

Timed are 2^26 samples of 512³ voxels: independent samples, samples in the order of boxes, and values at given points,
random and along rows. Each result is checked first, in double precision to 1e-6 of the range; the sampler by texture
units is not checked, since its weights have 8 bits. Rates are of coordinates and values, 16 bytes a sample; the last
table has samples a second.

For example:
  linum-benchmark sampling --json sampling.json
"""

_SIDE, _SAMPLES = 512, 2**26
#: Bytes of a sample: its coordinates and its value.
SAMPLE_NBYTES = 16
#: Coordinates (n, 3), x first, from 0 to 1; values (channels, n).
Samples = tuple[Array, Array]
#: Number of samples to check, and the error that is allowed, relative to the range of values.
CHECKED = 4096
PRECISION = 1e-6
GIB = 2**30

#: Options of a volume: the layout of its voxels and the shape of its kernels.
Options = dict[str, Any]
#: Options to compare with the default, by the title of their entry.
_LAYOUTS: dict[str, Options] = {
    "cells, 2 at a time": {"layout": "cells", "shape": Shape(groups=2, blocks=4)},
    "cells, 8 at a time": {"layout": "cells", "shape": Shape(groups=8, blocks=2)},
    "quads": {"layout": "quads"},
    "bricks": {"layout": "bricks"},
    "rows": {"layout": "rows"},
}
_RASTER: dict[str, Options] = {
    "not ahead": {"shape": Shape(ahead=0)},
    "ahead in registers": {"shape": Shape(ahead=1)},
    "2 at a time": {"shape": Shape(groups=2, blocks=5)},
    "2 at a time, ahead in registers": {"shape": Shape(groups=2, blocks=4, ahead=1)},
    "rows": {"layout": "rows"},
}
_BOXES: dict[str, Options] = {
    "through registers": {"layout": "rows", "shape": Shape(box_copies=False)},
    "256 threads": {"layout": "rows", "shape": Shape(box_threads=256)},
    "boxes of 8000": {"layout": "rows", "shape": Shape(box_voxels=8000, box_threads=256, box_blocks=4)},
    "boxes of 25000": {"layout": "rows", "shape": Shape(box_voxels=25_000, box_threads=256, box_blocks=2)},
}

_TEXTURE = r"""
extern "C" __global__ void texture_sample(cudaTextureObject_t volume, float *coords, float *values, long long count,
                                          unsigned long long seed) {
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i >= count) return;
    float u[3];
    for (int a = 0; a < 3; ++a) {
        if (seed) {
            unsigned long long s = (seed + 3 * i + a) * 0x9E3779B97F4A7C15ull;
            s = (s ^ s >> 30) * 0xBF58476D1CE4E5B9ull;
            s = (s ^ s >> 27) * 0x94D049BB133111EBull;
            u[a] = (s >> 40) * 5.9604644775390625e-8f;
            coords[3 * i + a] = u[a];
        } else {
            u[a] = coords[3 * i + a];
        }
    }
    values[i] = tex3D<float>(volume, u[0], u[1], u[2]);
}
"""


def _volume(xp: ModuleType, scale: float, dtype: str) -> Array:
    side = scaled(_SIDE, scale, 8)
    voxels = xp.random.RandomState(1).random_sample(side**3).astype(np.float32).reshape(1, side, side, side)
    return voxels if dtype == "float32" else (voxels * 60000).astype(dtype)


def _points(xp: ModuleType, scale: float, raster: bool) -> Array:
    """Return points along the rows of the volume (`raster`), or random points."""
    count = max(2**12, round(_SAMPLES * scale**3))
    if not raster:
        return xp.random.RandomState(2).random_sample(3 * count).astype(np.float32).reshape(-1, 3)
    x = scaled(_SIDE, scale, 8)
    index = xp.arange(count)
    line = index // x
    columns = [index % x, line % x, line // x % x]
    return xp.stack([((column + 0.3) / x).astype(np.float32) for column in columns], axis=1)


def wrong(voxels: Array, result: Samples) -> str:
    """Return why coordinates and values (`result`) are not samples of voxels (C, Z, Y, X); empty if they are."""
    xp = array_module(voxels)
    coords, values = result
    chosen = xp.asarray(np.linspace(0, len(coords) - 1, CHECKED).astype(np.int64))
    expected = truth_at(xp, voxels, coords[chosen])
    span = float(voxels.max()) - float(voxels.min())
    error = float(xp.abs(values[:, chosen] - expected).max()) / span
    return "" if error <= PRECISION else f"off by {error:.1e} of the range"


def truth_at(xp: ModuleType, voxels: Any, points: Array) -> Any:
    """Interpolate voxels (C, Z, Y, X) linearly at points (n, 3), in double precision."""
    values: Any = 0
    neighbours = []
    for axis in range(3):
        size = voxels.shape[1 + axis]
        coord = xp.clip(points[:, 2 - axis].astype(np.float64) * size - 0.5, 0, size - 1)
        cell = xp.floor(coord).astype(np.int64)
        neighbours.append((cell, xp.minimum(cell + 1, size - 1), coord - cell))
    for corner in range(8):
        index, weight = [], 1.0
        for axis, (cell, next_cell, fraction) in enumerate(neighbours):
            is_next = corner >> axis & 1
            index.append(next_cell if is_next else cell)
            weight = weight * (fraction if is_next else 1 - fraction)
        values = values + weight * voxels[:, index[0], index[1], index[2]].astype(np.float64)
    return values


def _why_not_uniform(coords: Array) -> str:
    """Return a message if a mean of coordinates differs from 0.5 by six standard errors; else an empty str."""
    tolerance = 6 / math.sqrt(12 * len(coords))
    means = [float(coords[:, axis].mean(dtype=np.float64)) for axis in range(3)]
    return "" if all(abs(mean - 0.5) < tolerance for mean in means) else f"means of coordinates are {means}"


def _sampler(voxels: Any, order: str = "iid", **options: Any) -> Sampler:
    if isinstance(voxels, np.ndarray):
        return create_sampler("structuredRegular", "cpu", array=voxels, seed=1, order=order)
    return Sampler(DeviceVolume(voxels, **options), device=voxels.device.id, seed=1, order=order)


@contextmanager
def _drawing(voxels: Array, count: int, order: str, **options: Any) -> Iterator[Prepared]:
    """Prepare a sampler that draws points and samples there."""
    sampler = _sampler(voxels, order, **options)
    samples = sampler.sample(count)

    def call() -> Samples:
        sampler.sample_into(*samples, count)
        return samples

    def check(result: Samples) -> str:
        return wrong(voxels, result) or _why_not_uniform(result[0])

    yield Prepared(call, check, note=lambda: _note(sampler))


@contextmanager
def _decoding(voxels: Array, coords: Array, **options: Any) -> Iterator[Prepared]:
    """Prepare a sampler that samples at given points."""
    sampler = _sampler(voxels, **options)
    values = sampler.decode(coords)

    def call() -> Samples:
        sampler.decode_into(coords, values, len(coords))
        return coords, values

    yield Prepared(call, lambda result: wrong(voxels, result), note=lambda: _note(sampler))


@contextmanager
def _short_fetches(prepare: Prepare) -> Iterator[Prepared]:
    """Prepare an entry while the L2 cache reads 32 bytes at a time, a setting of the process that is restored."""
    from cupy.cuda import runtime

    limit = 5  # cudaLimitMaxL2FetchGranularity
    before = runtime.deviceGetLimit(limit)
    runtime.deviceSetLimit(limit, 32)
    try:
        with prepare() as prepared:
            yield prepared
    finally:
        runtime.deviceSetLimit(limit, before)


def _note(sampler: Sampler) -> str:
    return f"layout {sampler.field.layout}" if isinstance(sampler.field, DeviceVolume) else "NumPy"


@contextmanager
def _texture(voxels: Array, coords: Array | None, count: int) -> Iterator[Prepared]:
    """Prepare sampling by texture units, whose weights have 8 bits; the kernel draws points if `coords` is None."""
    import cupy
    from cupy.cuda import runtime, texture

    _, z, y, x = voxels.shape
    kind = texture.ChannelFormatDescriptor(32, 0, 0, 0, runtime.cudaChannelFormatKindFloat)
    array = texture.CUDAarray(kind, x, y, z)
    array.copy_from(voxels[0])
    clamp = (runtime.cudaAddressModeClamp,) * 3
    unit = texture.TextureObject(
        texture.ResourceDescriptor(runtime.cudaResourceTypeArray, cuArr=array),
        texture.TextureDescriptor(
            clamp, runtime.cudaFilterModeLinear, runtime.cudaReadModeElementType, normalizedCoords=1
        ),
    )
    kernel = cupy.RawKernel(_TEXTURE, "texture_sample")
    points = cupy.empty((count, 3), np.float32) if coords is None else coords
    values, seed = cupy.empty((1, count), np.float32), np.uint64(0 if coords is not None else 7)

    def call() -> Samples:
        kernel((-(-count // 256),), (256,), (unit, points, values, np.int64(count), seed))
        return points, values

    yield Prepared(call)


def _case(
    name: str, xp: ModuleType, scale: float, *, order: str = "", raster: bool = False, dtype: str = "float32",
    reach: float, variants: dict[str, Options], texture: bool = True,
) -> Case:  # fmt: skip
    """Make a case that draws points in an `order`, or samples at given points, along rows (`raster`) or random.

    `reach` is in 10^9 samples per second; `variants` are options of further entries of linumpy, on a GPU.
    """
    voxels, count = _volume(xp, scale, dtype), max(2**12, round(_SAMPLES * scale**3))
    coords = None if order else _points(xp, scale, raster)
    prepare = partial(_decoding, voxels, coords) if coords is not None else partial(_drawing, voxels, count, order)
    entries = [Entry("linumpy", "linumpy", prepare, "ours", 3)]
    if xp is not np:
        for title, options in variants.items():
            entries.append(Entry(f"linumpy {title}", f"linumpy {title}", partial(prepare, **options), "ours", 3))
        if texture:
            entries.append(Entry("texture", "texture units", partial(_texture, voxels, coords, count)))
        if order == "iid":
            short = partial(_short_fetches, prepare)
            entries.append(Entry("linumpy 32 B", "linumpy, 32 B fetches", short, "ours", 3))
    shape = "×".join(map(str, voxels.shape[1:]))
    return Case(
        name, count * SAMPLE_NBYTES, tuple(entries),
        (f"{count} samples of {shape} {voxels.dtype}; GiB/s of coordinates and values, {SAMPLE_NBYTES} B each",),
        {"samples": count, "shape": list(voxels.shape), "dtype": str(voxels.dtype)},
        (Mark(reach * 1e9 * SAMPLE_NBYTES / GIB),), clock="device",
    )  # fmt: skip


_SOME_LAYOUTS = {name: _LAYOUTS[name] for name in ("quads", "bricks", "rows")}
#: Cases of volumes in device memory.
_CASES: dict[str, Options] = {
    "sample-iid": {"order": "iid", "reach": 16, "variants": _LAYOUTS},
    "sample-binned": {"order": "binned", "reach": 100, "variants": _BOXES, "texture": False},
    "decode-random": {"reach": 18, "variants": _SOME_LAYOUTS},
    "decode-raster": {"raster": True, "reach": 110, "variants": _RASTER},
    "sample-iid-uint16": {
        "order": "iid", "dtype": "uint16", "reach": 24, "variants": _LAYOUTS, "texture": False,
    },
}  # fmt: skip
MAKERS: Makers = {name: partial(_case, name, **options) for name, options in _CASES.items()}


def table(results: tuple[CaseResult, ...]) -> str:
    """Return a table of samples per second, in billions, of all entries of all cases."""
    lines = [f"{'10^9 samples a second':34}{'':32}{'to reach':>10}"]
    for result in results:
        samples = result.case.facts.get("samples")
        if samples is None:
            continue
        for entry in result.entries:
            rate = "-" if entry.median is None else f"{samples / entry.median / 1e9:.3g}"
            to_reach = ""
            if entry.name == "linumpy" and result.case.marks:
                to_reach = f"{result.case.marks[0].least * GIB / SAMPLE_NBYTES / 1e9:.3g}"
            lines.append(f"{result.case.name:34}{entry.title:24}{rate:>8}{to_reach:>10}  {entry.note}")
    return "\n".join(lines) + "\n"


SUITE = replace(
    kernel_suite("sampling", _DESCRIPTION, MAKERS, 20, "Shrink every axis."),
    closing=table,
)
