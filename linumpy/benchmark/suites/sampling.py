"""Samples of volumes in device memory: how many a second, beside a sampler of texture units.

In: an array module, a scale. Out: cases (:data:`MAKERS`), and a table of samples a second. Results are checked at some
thousand samples, in double precision, to 1e-6 of the range of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.benchmark.runner import Case, CaseResult, Entry, Mark, Prepared
from linumpy.device import array_module
from linumpy.sampling import create_sampler
from linumpy.sampling.sampler import Sampler
from linumpy.sampling.volume import DeviceVolume, Shape

_SIDE, _SAMPLES = 512, 2**26
#: Bytes of a sample: its coordinates and its value.
SAMPLE_NBYTES = 16
CHECKED = 4096
PRECISION = 1e-6
GIB = 2**30

#: Copies and shapes of kernels that are compared, after the one that is taken by default.
_LAYOUTS: dict[str, dict[str, Any]] = {
    "cells, 2 at a time": {"layout": "cells", "shape": Shape(groups=2, blocks=4)},
    "cells, 8 at a time": {"layout": "cells", "shape": Shape(groups=8, blocks=2)},
    "quads": {"layout": "quads"},
    "bricks": {"layout": "bricks"},
    "rows": {"layout": "rows"},
}
_RASTER: dict[str, dict[str, Any]] = {
    "not ahead": {"shape": Shape(ahead=0)},
    "ahead in registers": {"shape": Shape(ahead=1)},
    "2 at a time": {"shape": Shape(groups=2, blocks=5)},
    "2 at a time, ahead in registers": {"shape": Shape(groups=2, blocks=4, ahead=1)},
    "rows": {"layout": "rows"},
}
_BOXES: dict[str, dict[str, Any]] = {
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


def _volume(xp: Any, scale: float, dtype: str) -> Any:
    side = max(8, round(_SIDE * scale))
    made = xp.random.RandomState(1).random_sample(side**3).astype(np.float32).reshape(1, side, side, side)
    return made if dtype == "float32" else (made * 60000).astype(dtype)


def _points(xp: Any, scale: float, raster: bool) -> Any:
    count = max(2**12, round(_SAMPLES * scale**3))
    if not raster:
        return xp.random.RandomState(2).random_sample(3 * count).astype(np.float32).reshape(-1, 3)
    x = max(8, round(_SIDE * scale))
    index = xp.arange(count)
    line = index // x
    columns = [index % x, line % x, line // x % x]
    return xp.stack([((column + 0.3) / x).astype(np.float32) for column in columns], axis=1)


def wrong(voxels: Any, result: tuple[Any, Any]) -> str:
    """Say why (coords, values) are not samples of voxels (C, Z, Y, X); empty where they are."""
    xp: Any = array_module(voxels)
    coords, values = result
    chosen = xp.asarray(np.linspace(0, len(coords) - 1, CHECKED).astype(np.int64))
    points, got = coords[chosen], values[:, chosen]
    expected = truth_at(xp, voxels, points)
    span = float(voxels.max()) - float(voxels.min())
    error = float(xp.abs(got - expected).max()) / span
    return "" if error <= PRECISION else f"off by {error:.1e} of the range"


def truth_at(xp: Any, voxels: Any, points: Any) -> Any:
    """Interpolate voxels (C, Z, Y, X) linearly at points (n, 3), in double precision."""
    made: Any = 0
    places = []
    for axis in range(3):
        size = voxels.shape[1 + axis]
        place = xp.clip(points[:, 2 - axis].astype(np.float64) * size - 0.5, 0, size - 1)
        cell = xp.floor(place).astype(np.int64)
        places.append((cell, xp.minimum(cell + 1, size - 1), place - cell))
    for corner in range(8):
        at, weight = [], 1.0
        for axis, (cell, following, part) in enumerate(places):
            far = corner >> axis & 1
            at.append(following if far else cell)
            weight = weight * (part if far else 1 - part)
        made = made + weight * voxels[:, at[0], at[1], at[2]].astype(np.float64)
    return made


def _not_uniform(coords: Any) -> str:
    spread = 6 / math.sqrt(12 * len(coords))
    means = [float(coords[:, axis].mean(dtype=np.float64)) for axis in range(3)]
    return "" if all(abs(mean - 0.5) < spread for mean in means) else f"means of coordinates are {means}"


def _sampler(voxels: Any, order: str = "iid", **options: Any) -> Sampler:
    if isinstance(voxels, np.ndarray):
        return create_sampler("structuredRegular", "cpu", array=voxels, seed=1, order=order)
    return Sampler(DeviceVolume(voxels, **options), device=voxels.device.id, seed=1, order=order)


def _drawing(voxels: Any, count: int, order: str, **options: Any) -> Callable[[], AbstractContextManager[Prepared]]:
    @contextmanager
    def prepare() -> Iterator[Prepared]:
        sampler = _sampler(voxels, order, **options)
        coords, values = sampler.sample(count)

        def call() -> tuple[Any, Any]:
            sampler.sample_into(coords, values, count)
            return coords, values

        def check(result: tuple[Any, Any]) -> str:
            return wrong(voxels, result) or _not_uniform(result[0])

        yield Prepared(call, check, note=lambda: _note(sampler))

    return prepare


def _decoding(voxels: Any, coords: Any, **options: Any) -> Callable[[], AbstractContextManager[Prepared]]:
    @contextmanager
    def prepare() -> Iterator[Prepared]:
        sampler = _sampler(voxels, **options)
        values = sampler.decode(coords)

        def call() -> tuple[Any, Any]:
            sampler.decode_into(coords, values, len(coords))
            return coords, values

        yield Prepared(call, lambda result: wrong(voxels, result), note=lambda: _note(sampler))

    return prepare


def _short_fetches(prepare: Callable[[], AbstractContextManager[Prepared]]) -> Callable[[], Any]:
    """Ask the second cache to read 32 bytes at a time, which is a setting of the process; it is put back."""

    @contextmanager
    def changed() -> Iterator[Prepared]:
        from cupy.cuda import runtime

        limit = 5  # cudaLimitMaxL2FetchGranularity
        before = runtime.deviceGetLimit(limit)
        runtime.deviceSetLimit(limit, 32)
        try:
            with prepare() as made:
                yield made
        finally:
            runtime.deviceSetLimit(limit, before)

    return changed


def _note(sampler: Sampler) -> str:
    return f"layout {sampler.field.layout}" if isinstance(sampler.field, DeviceVolume) else "NumPy"


def _texture(voxels: Any, coords: Any, count: int) -> Callable[[], AbstractContextManager[Prepared]]:
    """Sample by texture units, whose weights have 8 bits; draw where there are no coordinates."""

    @contextmanager
    def prepare() -> Iterator[Prepared]:
        import cupy
        from cupy.cuda import runtime, texture

        _, z, y, x = voxels.shape
        kind = texture.ChannelFormatDescriptor(32, 0, 0, 0, runtime.cudaChannelFormatKindFloat)
        held = texture.CUDAarray(kind, x, y, z)
        held.copy_from(voxels[0])
        clamp = runtime.cudaAddressModeClamp
        unit = texture.TextureObject(
            texture.ResourceDescriptor(runtime.cudaResourceTypeArray, cuArr=held),
            texture.TextureDescriptor(
                (clamp,) * 3, runtime.cudaFilterModeLinear, runtime.cudaReadModeElementType, normalizedCoords=1
            ),
        )
        kernel = cupy.RawKernel(_TEXTURE, "texture_sample")
        points = cupy.empty((count, 3), np.float32) if coords is None else coords
        values, seed = cupy.empty((1, count), np.float32), np.uint64(0 if coords is not None else 7)

        def call() -> tuple[Any, Any]:
            kernel((-(-count // 256),), (256,), (unit, points, values, np.int64(count), seed))
            return points, values

        yield Prepared(call)

    return prepare


def _case(xp: Any, name: str, voxels: Any, count: int, reach: float, entries: list[Entry]) -> Case:
    if xp is np:
        entries = [one for one in entries if one.name == "linumpy"]
    shape = "×".join(map(str, voxels.shape[1:]))
    return Case(
        name,
        count * SAMPLE_NBYTES,
        tuple(entries),
        (f"{count} samples of {shape} {voxels.dtype}; GiB/s of coordinates and values, {SAMPLE_NBYTES} B each",),
        {"samples": count, "shape": list(voxels.shape), "dtype": str(voxels.dtype)},
        (Mark(reach * 1e9 * SAMPLE_NBYTES / GIB),),
        clock="device",
    )


def _entries(make: Callable[..., Any], variants: dict[str, dict[str, Any]], texture: Any) -> list[Entry]:
    made = [Entry("linumpy", "linumpy", make(), "ours", 3)]
    made += [
        Entry(f"linumpy {name}", f"linumpy {name}", make(**options), "ours", 3) for name, options in variants.items()
    ]
    return made if texture is None else [*made, Entry("texture", "texture units", texture)]


def _iid(xp: Any, scale: float, dtype: str = "float32", reach: float = 16) -> Case:
    voxels, count = _volume(xp, scale, dtype), max(2**12, round(_SAMPLES * scale**3))
    texture = _texture(voxels, None, count) if dtype == "float32" else None
    name = "sample-iid" if dtype == "float32" else f"sample-iid-{dtype}"
    entries = _entries(lambda **options: _drawing(voxels, count, "iid", **options), _LAYOUTS, texture)
    short = _short_fetches(_drawing(voxels, count, "iid"))
    entries.append(Entry("linumpy 32 B", "linumpy, 32 B fetches", short, "ours", 3))
    return _case(xp, name, voxels, count, reach, entries)


def _binned(xp: Any, scale: float) -> Case:
    voxels, count = _volume(xp, scale, "float32"), max(2**12, round(_SAMPLES * scale**3))
    entries = _entries(lambda **options: _drawing(voxels, count, "binned", **options), _BOXES, None)
    return _case(xp, "sample-binned", voxels, count, 100, entries)


def _decode(xp: Any, scale: float, raster: bool) -> Case:
    voxels, coords = _volume(xp, scale, "float32"), _points(xp, scale, raster)
    variants = _RASTER if raster else {name: _LAYOUTS[name] for name in ("quads", "bricks", "rows")}
    texture = _texture(voxels, coords, len(coords))
    entries = _entries(lambda **options: _decoding(voxels, coords, **options), variants, texture)
    return _case(
        xp, "decode-raster" if raster else "decode-random", voxels, len(coords), 110 if raster else 18, entries
    )


#: Cases of volumes in device memory.
MAKERS: dict[str, Callable[[ModuleType, float], Case]] = {
    "sample-iid": _iid,
    "sample-binned": _binned,
    "decode-random": lambda xp, scale: _decode(xp, scale, raster=False),
    "decode-raster": lambda xp, scale: _decode(xp, scale, raster=True),
    "sample-iid-uint16": lambda xp, scale: _iid(xp, scale, "uint16", 24),
}


def table(results: tuple[CaseResult, ...]) -> str:
    """Return samples a second of all cases and entries, in billions."""
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
    return "\n".join(lines)
