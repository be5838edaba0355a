"""Time samples of volumes on the GPU, beside a sampler by texture units.

Timed are 2²⁶ samples of 512³ voxels: independent samples, samples in the order of boxes, and values at given points,
random and along rows. 4096 of them are checked in double precision to 1e-6 of the range; the sampler by texture units
is not checked, since its weights have 8 bits.

For example:
  linum-benchmark sampling --json sampling.json
"""

from __future__ import annotations

import math
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.arrays import Call, scaled, suite_of_arrays
from linumpy.arrays import Array
from linumpy.benchmark.timing import Bench
from linumpy.device import array_module
from linumpy.sampling import create_sampler
from linumpy.sampling.sampler import Sampler
from linumpy.sampling.volume import DeviceVolume

_SIDE, _SAMPLES = 512, 2**26
#: Coordinates (n, 3), x first, from 0 to 1; values (channels, n).
Samples = tuple[Array, Array]
#: Number of samples to check, and the error that is allowed, relative to the range of values.
CHECKED = 4096
PRECISION = 1e-6

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


def _volume(bench: Bench, dtype: str) -> Array:
    side = scaled(_SIDE, bench, 8)
    voxels = bench.xp.random.RandomState(1).random_sample(side**3).astype(np.float32).reshape(1, side, side, side)
    return voxels if dtype == "float32" else (voxels * 60000).astype(dtype)


def _points(bench: Bench, count: int, *, raster: bool) -> Array:
    """Return points along the rows of the volume (`raster`), or random points."""
    xp = bench.xp
    if not raster:
        return xp.random.RandomState(2).random_sample(3 * count).astype(np.float32).reshape(-1, 3)
    x = scaled(_SIDE, bench, 8)
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


def _sampler(voxels: Any, order: str = "iid") -> Sampler:
    if isinstance(voxels, np.ndarray):
        return create_sampler("structuredRegular", "cpu", array=voxels, seed=1, order=order)
    return Sampler(DeviceVolume(voxels), device=voxels.device.id, seed=1, order=order)


def _texture(voxels: Array, coords: Array | None, count: int) -> Call:
    """Return a call that samples by texture units; the kernel draws points if `coords` is None."""
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

    return call


def _case(bench: Bench, name: str, *, order: str = "", raster: bool = False, dtype: str = "float32") -> None:
    """Draw points in an `order`, or sample at given points, along rows (`raster`) or random."""
    voxels, count = _volume(bench, dtype), max(2**12, round(_SAMPLES * bench.scale**3))
    coords = None if order else _points(bench, count, raster=raster)
    sampler = _sampler(voxels, order or "iid")
    drawn = sampler.sample(count) if coords is None else (coords, sampler.decode(coords))

    def call() -> Samples:
        if coords is None:
            sampler.sample_into(drawn[0], drawn[1], count)
        else:
            sampler.decode_into(coords, drawn[1], count)
        return drawn

    def check(result: Samples) -> str:
        return wrong(voxels, result) or (_why_not_uniform(result[0]) if coords is None else "")

    text = f"{count} samples of {voxels.shape[1:]} {voxels.dtype}"
    with bench.case(name, count / 1e9, unit="10⁹ samples", description=text, by_events=True) as case:
        case.time("linumpy", call, check, warm_ups=3)
        if bench.on_gpu and dtype == "float32" and order != "binned":
            with case.attempt("texture units"):
                case.time("texture units", _texture(voxels, coords, count))


_CASES: dict[str, dict[str, Any]] = {
    "sample-iid": {"order": "iid"},
    "sample-binned": {"order": "binned"},
    "decode-random": {},
    "decode-raster": {"raster": True},
    "sample-iid-uint16": {"order": "iid", "dtype": "uint16"},
}
SUITE = suite_of_arrays(__doc__, {name: partial(_case, name=name, **options) for name, options in _CASES.items()})
