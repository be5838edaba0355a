"""Project a volume along an axis, where the volume is: CuPy in, CuPy out; NumPy in, NumPy out.

In: an array and an axis. Out: mean, standard deviation, minimum and maximum along it, those that are wanted. On the
device the array is read once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.device import array_module, is_device_array
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, int64, load, uint32

#: What can be asked for, with its bit of WANT in projection.cu.
STATISTICS = {"mean": 1, "std": 2, "min": 4, "max": 8}
_ACCUMULATORS = {"float32": "float", "float64": "double"}
_THREADS = 256
#: Vectors of outputs of a block, at least where there are as many: those that are read together.
_LANES = 32
_UNROLL = 8  # as in projection.cu
_STATE_BYTES = 48
#: Shared memory of a thread for the states that it hands over at once.
_SHARED_BYTES = 64
#: Blocks that keep a large device busy.
_BLOCKS = 1024


def project(
    vol: Any, axis: int = 0, statistics: str | Sequence[str] = "mean", *, accumulate: str = "float32"
) -> Any | tuple[Any, ...]:
    """Project an array along an axis.

    Parameters
    ----------
    vol : numpy.ndarray or cupy.ndarray
        Of booleans, integers or floats, any rank from 1 on. It is read where it lies, in any order of axes; only a view
        with gaps is copied first.
    axis : int
        The axis that goes away.
    statistics : str or sequence of str
        Of ``"mean"``, ``"std"``, ``"min"`` and ``"max"``. The standard deviation is that of the population (divided by
        n, as NumPy's).
    accumulate : {"float32", "float64"}
        What sums are taken in, and the dtype of mean and standard deviation. The mean of integers of up to 32 bits is
        exact but for its own rounding; a standard deviation is safe with any offset (Welford's update).

    Returns
    -------
    numpy.ndarray or cupy.ndarray, or a tuple of these
        One for each of `statistics`, alone where that is a string. Minimum and maximum have the dtype of `vol`. NaN
        comes out where there is one.

    Raises
    ------
    ValueError
        Another statistic or accumulator; no axis to project along, or one without elements.
    TypeError
        Complex or other elements.
    """
    wanted = (statistics,) if isinstance(statistics, str) else tuple(statistics)
    _check(vol, axis, wanted, accumulate)
    compute = _by_kernels if is_device_array(vol) else _by_numpy
    results = compute(vol, axis % vol.ndim, wanted, accumulate)
    return results[0] if isinstance(statistics, str) else results


def _check(vol: Any, axis: int, wanted: tuple[str, ...], accumulate: str) -> None:
    unknown = [one for one in wanted if one not in STATISTICS]
    if unknown or not wanted:
        raise ValueError(f"statistics={unknown or wanted}: choose from {', '.join(STATISTICS)}")
    if accumulate not in _ACCUMULATORS:
        raise ValueError(f"accumulate={accumulate!r}: choose one of {', '.join(_ACCUMULATORS)}")
    if not -vol.ndim <= axis < vol.ndim:
        raise ValueError(f"axis={axis}: an array of {vol.ndim} axes has none of that number")
    if vol.shape[axis] == 0:
        raise ValueError(f"axis {axis} of an array of shape {vol.shape} has no elements to project")
    if vol.dtype.kind not in "biuf" or vol.dtype.itemsize > 8:
        raise TypeError(f"an array of {vol.dtype} cannot be projected: booleans, integers and floats can")


def _by_numpy(vol: np.ndarray, axis: int, wanted: tuple[str, ...], accumulate: str) -> tuple[np.ndarray, ...]:
    results = []
    for one in wanted:
        if one in ("min", "max"):
            result = getattr(vol, one)(axis=axis).astype(vol.dtype.newbyteorder("="), copy=False)
        else:
            # In float64 whatever is wanted: NumPy's sums along an outer axis are plain ones.
            result = getattr(vol, one)(axis=axis, dtype=np.float64).astype(accumulate)
        results.append(np.asarray(result))
    return tuple(results)


@dataclass(frozen=True)
class Launch:
    """How a projection is spread over the device.

    Attributes
    ----------
    rows : bool
        Whether the axis is the one along which memory runs.
    vec : int
        Elements of one access.
    vectors : int
        Vectors of outputs; outputs where `rows`.
    lanes, segments : int
        Vectors of a block, and threads that share the axis of each.
    blocks : int
        Blocks that all vectors take.
    parts, chunk : int
        Blocks that share an axis, and the accesses that each of them makes along it.
    """

    rows: bool
    vec: int
    vectors: int
    lanes: int
    segments: int
    blocks: int
    parts: int
    chunk: int


def plan_launch(outer: int, n: int, inner: int, itemsize: int, alignment: int = 16) -> Launch:
    """Spread an array of shape (outer, n, inner) over the device; pure.

    Parameters
    ----------
    outer, n, inner : int
        Elements before, along and after the axis.
    itemsize : int
        Bytes of an element.
    alignment : int
        Bytes that the address of the first one is a multiple of.
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
    return Launch(rows, vec, vectors, lanes, segments, blocks, -(-accesses // chunk), chunk)


def _power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _by_kernels(vol: Any, axis: int, wanted: tuple[str, ...], accumulate: str) -> tuple[Any, ...]:
    xp = array_module(vol)
    vol, order = _dense(xp, vol)
    place = order.index(axis)
    kept = [n for k, n in enumerate(vol.shape) if k != place]
    dtypes = {one: vol.dtype if one in ("min", "max") else np.dtype(accumulate) for one in wanted}
    results = {one: xp.empty(kept, dtype) for one, dtype in dtypes.items()}
    if math.prod(kept):
        _launch(xp, vol, place, results, accumulate)
    # Back to the order of axes that the caller knows.
    names = [axis_name for axis_name in order if axis_name != axis]
    back = sorted(range(len(names)), key=names.__getitem__)
    return tuple(results[one].transpose(back) for one in wanted)


def _dense(xp: Any, vol: Any) -> tuple[Any, list[int]]:
    """Order the axes as memory has them; copy where it has gaps."""
    order = sorted(range(vol.ndim), key=lambda axis: -abs(vol.strides[axis]) if vol.shape[axis] > 1 else -math.inf)
    turned = vol.transpose(order)
    if not turned.flags.c_contiguous:
        return xp.ascontiguousarray(vol), list(range(vol.ndim))
    return turned, order


def _launch(xp: Any, vol: Any, axis: int, results: dict[str, Any], accumulate: str) -> None:
    outer, n, inner = math.prod(vol.shape[:axis]), vol.shape[axis], math.prod(vol.shape[axis + 1 :])
    address = vol.data.ptr if is_device_array(vol) else vol.ctypes.data
    plan = plan_launch(outer, n, inner, vol.itemsize, math.gcd(16, address))
    want = sum(STATISTICS[one] for one in results)
    # A statistic that is not wanted is not written: any address does.
    outputs = [results.get(one, vol) for one in STATISTICS]
    count = outer * inner
    partials = xp.empty(plan.parts * count * _STATE_BYTES, np.uint8) if plan.parts > 1 else vol
    sizes = n, inner, plan.vectors, plan.chunk
    load(kernel_spec("project", vol.dtype, accumulate, want, plan.vec, plan.rows))(
        (plan.blocks * plan.parts,),
        (plan.lanes * plan.segments,),
        (vol, *outputs, partials, *int64(*sizes), *uint32(plan.lanes, plan.blocks, plan.parts)),
        shared_mem=plan.lanes * plan.segments * _SHARED_BYTES,
    )
    if plan.parts > 1:
        load(kernel_spec("merge_partials", vol.dtype, accumulate, want, plan.vec, plan.rows))(
            (-(-count * 32 // _THREADS),),
            (_THREADS,),
            (partials, *outputs, *int64(count), *uint32(plan.parts)),
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
    return KernelSpec("projection", name, tuple(defines.items()))
