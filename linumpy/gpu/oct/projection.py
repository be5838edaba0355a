"""Project a volume along an axis: CuPy in, CuPy out; NumPy in, NumPy out.

In: an array, an axis and the wanted statistics: mean, standard deviation, minimum, maximum. Out: a projection for each
statistic. On the device the array is read once for all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array, array_module, is_device_array
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, address_of, int64, load, memory_order, uint32

#: The statistics, with their bits of WANT in projection.cu.
STATISTICS = {"mean": 1, "std": 2, "min": 4, "max": 8}
_ACCUMULATORS = {"float32": "float", "float64": "double"}
_THREADS = 256
#: Minimum vectors of outputs of a block, if there are as many: neighbouring vectors are read together.
_LANES = 32
_UNROLL = 8  # as in projection.cu
_STATE_BYTES = 48
#: Shared memory of a thread for states that are merged between two barriers, as in projection.cu.
_SHARED_BYTES = 64
#: Blocks that keep a large device busy.
_BLOCKS = 1024


def project(vol: Array, axis: int = 0, statistics: str | Sequence[str] = "mean", *, accumulate: str = "float32") -> Any:
    """Project an array along an axis.

    `vol`: of booleans, integers or floats, of rank 1 or more, in any memory order: only a view with gaps is copied
    first. `axis`: the axis to project along; results do not have this axis. `statistics`: of ``"mean"``, ``"std"``,
    ``"min"`` and ``"max"``. The standard deviation is that of the population (divided by n, as in NumPy). `accumulate`
    ("float32", "float64"): dtype of mean and standard deviation, and on a device of their sums. Except for its own
    rounding, the mean of integers of up to 32 bits is exact there; a standard deviation is accurate with any offset
    (Welford's update). On the host sums are in float64.

    Returns: One for each of `statistics`; a string gives one array. Minimum and maximum have the dtype of `vol`. A NaN
    along the axis makes all statistics NaN.

    `ValueError`: An unknown statistic or accumulator; an axis that the array does not have, or one without elements.
    `TypeError`: Elements other than booleans, integers and floats of up to 64 bits.
    """
    wanted = (statistics,) if isinstance(statistics, str) else tuple(statistics)
    _check(vol.shape, vol.dtype, axis, wanted, accumulate)
    compute = _by_kernels if is_device_array(vol) else _by_numpy
    results = compute(vol, axis % vol.ndim, wanted, accumulate)
    return results[0] if isinstance(statistics, str) else results


@functools.lru_cache(maxsize=256)
def _check(shape: tuple[int, ...], dtype: np.dtype, axis: int, wanted: tuple[str, ...], accumulate: str) -> None:
    unknown = [name for name in wanted if name not in STATISTICS]
    if unknown or not wanted:
        raise ValueError(f"statistics={unknown or wanted}: choose from {', '.join(STATISTICS)}")
    if accumulate not in _ACCUMULATORS:
        raise ValueError(f"accumulate={accumulate!r}: choose one of {', '.join(_ACCUMULATORS)}")
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis={axis}: an array of {len(shape)} axes has none of that number")
    if shape[axis] == 0:
        raise ValueError(f"axis {axis} of an array of shape {shape} has no elements to project")
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise TypeError(f"an array of {dtype} cannot be projected: booleans, integers and floats can")


def _by_numpy(vol: Array, axis: int, wanted: tuple[str, ...], accumulate: str) -> tuple[np.ndarray, ...]:
    results = []
    for name in wanted:
        if name in ("min", "max"):
            result = getattr(vol, name)(axis=axis).astype(vol.dtype.newbyteorder("="), copy=False)
        else:
            # Always in float64: along an outer axis NumPy's sums are not pairwise.
            with np.errstate(over="ignore", invalid="ignore"):  # beyond 3.4e38 float32 is infinite
                result = getattr(vol, name)(axis=axis, dtype=np.float64).astype(accumulate)
        results.append(np.asarray(result))
    return tuple(results)


@dataclass(frozen=True)
class ProjectionConfig:
    """Launch configuration of a projection.

    `rows`: whether the projected axis is contiguous. `vectors`: number of vectors of outputs: of `vec` neighbouring
    outputs each, or with `rows` of one output. `lanes`, `segments`: vectors of a block, and threads that share the axis
    of each vector. `blocks`: blocks that cover all vectors. `parts`, `chunk`: number of parts of the axis, each with
    its blocks, and accesses of a part along the axis.
    """

    rows: bool
    vec: int
    vectors: int
    lanes: int
    segments: int
    blocks: int
    parts: int
    chunk: int


def launch_config(outer: int, n: int, inner: int, itemsize: int, alignment: int = 16) -> ProjectionConfig:
    """Plan the launch configuration for an array of shape (outer, n, inner); pure.

    `outer`, `n`, `inner`: elements before, along and after the axis. `alignment`: the address of the first element is a
    multiple of this, in bytes.
    """
    rows = inner == 1
    pitch = (n if rows else inner) * itemsize
    vec = math.gcd(16, pitch, alignment) // itemsize
    vectors, accesses = (outer, n // vec) if rows else (outer * inner // vec, n)
    enough = _power_of_two(-(-accesses // _UNROLL))
    if rows:
        segments = min(_THREADS, max(enough, min(8, _power_of_two(accesses))))
        lanes = min(_THREADS // segments, _power_of_two(vectors))
    else:
        segments = min(_THREADS // min(_LANES, _power_of_two(vectors)), enough)
        lanes = min(_THREADS // segments, _power_of_two(vectors))
    blocks = -(-vectors // lanes)
    parts = max(1, min(_BLOCKS // blocks, accesses // (segments * _UNROLL)))
    chunk = -(-accesses // parts)
    return ProjectionConfig(rows, vec, vectors, lanes, segments, blocks, -(-accesses // chunk), chunk)


def _power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _by_kernels(vol: Array, axis: int, wanted: tuple[str, ...], accumulate: str) -> tuple[Array, ...]:
    xp = array_module(vol)
    if not _gapless_order(vol.shape, vol.strides, vol.itemsize):
        vol = xp.ascontiguousarray(vol)
    plan = _plan_projection(vol.shape, vol.strides, vol.dtype, math.gcd(16, address_of(vol)), axis, wanted, accumulate)
    results = {name: xp.empty(plan.shape, dtype) for name, dtype in plan.dtypes}
    if plan.spec is not None:
        _launch(xp, vol, results, plan)
    if plan.to_caller_order is None:
        return tuple([results[name] for name in wanted])
    return tuple([results[name].transpose(plan.to_caller_order) for name in wanted])


@functools.lru_cache(maxsize=256)
def _gapless_order(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the axes in memory order; an empty tuple if memory has gaps."""
    order = memory_order(shape, strides)
    pitch = itemsize
    for axis in reversed(order):
        if 0 not in shape and shape[axis] > 1 and strides[axis] != pitch:
            return ()
        pitch *= shape[axis]
    return order


@dataclass(frozen=True)
class _ProjectionPlan:
    """Everything that a projection needs except addresses.

    `shape`: shape of a result, in memory order. `to_caller_order`: transposition of a result to the caller's order of
    axes; None if the order is the same. `dtypes` (str, numpy.dtype): each wanted statistic, and its data type. `spec`:
    the kernel; None if there is nothing to compute. `grid`, `threads`, `shared`: blocks, threads of a block, and shared
    memory of a block in bytes. `sizes`: last arguments of the kernel. `merge`: the kernel that merges the parts of an
    axis, if there are several. `outputs`, `parts`: elements of a result, and number of parts.
    """

    shape: tuple[int, ...]
    to_caller_order: tuple[int, ...] | None
    dtypes: tuple[tuple[str, np.dtype], ...]
    spec: KernelSpec | None = None
    grid: int = 0
    threads: int = 0
    shared: int = 0
    sizes: tuple[np.generic, ...] = ()
    merge: KernelSpec | None = None
    outputs: int = 0
    parts: int = 0


@functools.lru_cache(maxsize=256)  # cached: planning takes longer than the kernel
def _plan_projection(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype,
    alignment: int,
    axis: int,
    wanted: tuple[str, ...],
    accumulate: str,
) -> _ProjectionPlan:
    """Plan the projection of an array without gaps; pure."""
    order = _gapless_order(shape, strides, dtype.itemsize)
    others = [other for other in order if other != axis]
    out_shape = tuple(shape[other] for other in others)
    to_caller_order = tuple(sorted(range(len(others)), key=others.__getitem__))
    dtypes = tuple((name, dtype if name in ("min", "max") else np.dtype(accumulate)) for name in dict.fromkeys(wanted))
    plan = _ProjectionPlan(
        out_shape, None if list(to_caller_order) == sorted(to_caller_order) else to_caller_order, dtypes
    )
    if not math.prod(out_shape):
        return plan
    index = order.index(axis)
    outer, n, inner = math.prod(out_shape[:index]), shape[axis], math.prod(out_shape[index:])
    config = launch_config(outer, n, inner, dtype.itemsize, alignment)
    want = sum(STATISTICS[name] for name, _ in dtypes)
    threads = config.lanes * config.segments
    merge = kernel_spec("merge_partials", dtype, accumulate, want, config.vec, config.rows)
    return replace(
        plan,
        spec=kernel_spec("project", dtype, accumulate, want, config.vec, config.rows),
        grid=config.blocks * config.parts,
        threads=threads,
        shared=threads * _SHARED_BYTES,
        sizes=(*int64(n, inner, config.vectors, config.chunk), *uint32(config.lanes, config.blocks, config.parts)),
        merge=merge if config.parts > 1 else None,
        outputs=outer * inner,
        parts=config.parts,
    )


def _launch(xp: ModuleType, vol: Array, results: dict[str, Array], plan: _ProjectionPlan) -> None:
    assert plan.spec is not None
    # Unwanted statistics are not written, so any address is valid.
    outputs = [results.get(name, vol) for name in STATISTICS]
    partials = vol if plan.merge is None else xp.empty(plan.parts * plan.outputs * _STATE_BYTES, np.uint8)
    load(plan.spec)((plan.grid,), (plan.threads,), (vol, *outputs, partials, *plan.sizes), shared_mem=plan.shared)
    if plan.merge is not None:
        load(plan.merge)(
            (-(-plan.outputs * 32 // _THREADS),),
            (_THREADS,),
            (partials, *outputs, *int64(plan.outputs), *uint32(plan.parts)),
            shared_mem=_THREADS * _STATE_BYTES,
        )


def kernel_spec(name: str, source: np.dtype, accumulate: str, want: int, vec: int, rows: bool) -> KernelSpec:
    """Choose a kernel of projection.cu."""
    defines = {
        "SOURCE": CUDA_TYPES[source.str[1:]],
        "ACC": _ACCUMULATORS[accumulate],
        "WANT": str(want),
        "VEC": str(vec),
        "ROWS": str(int(rows)),
    }
    return KernelSpec("projection", name, tuple(defines.items()), "linumpy.gpu.oct.cuda")
