"""Resample the tiles of a volume, each by itself: CuPy in, CuPy out; NumPy in, NumPy out.

In: a volume of many tiles, and a :class:`~linumpy.plan.tile_axis.TileAxis` for each axis. Out: the volume of the new
tiles, in its dtype or another one. What is smoothed and interpolated is what
:func:`linumpy.gpu.interpolation.resample_volume` does to each tile, order 1, but for rounding; integers are rounded,
halves away from zero. Smoothing and interpolation are both sums along one axis, so on the device one kernel an axis
does both, for all tiles at once; NumPy arrays are answered by SciPy, tile after tile.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from linumpy.device import array_module, is_device_array
from linumpy.gpu.interpolation import affine_transform
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, int32, int64, load
from linumpy.gpu.rounding import saturated
from linumpy.plan.tile_axis import TileAxis

_THREADS = 256
#: Integers of 32 bits and more do not fit into a float.
_IN_FLOAT = ("u1", "i1", "u2", "i2", "f2", "f4")


def resample_tiles(volume: Any, axes: Sequence[TileAxis], dtype: Any = None) -> Any:
    """Resample each tile of a volume by itself.

    Parameters
    ----------
    volume : numpy.ndarray or cupy.ndarray
        Of any rank; integers and floats.
    axes : sequence of TileAxis
        One for each axis; their sizes are the shape of the volume.
    dtype : dtype, optional
        Of the result; by default that of the volume, in this machine's byte order.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Where the volume is, C-contiguous.

    Raises
    ------
    ValueError
        Axes that are not those of the volume.
    TypeError
        Voxels that are not integers or floats.
    """
    axes = tuple(axes)
    if tuple(axis.size for axis in axes) != tuple(volume.shape):
        raise ValueError(f"axes of {tuple(axis.size for axis in axes)} voxels: the volume has {tuple(volume.shape)}")
    wanted = np.dtype(volume.dtype if dtype is None else dtype).newbyteorder("=")
    for one in (volume.dtype, wanted):
        if one.str[1:] not in CUDA_TYPES or one.kind not in "iuf":
            raise TypeError(f"tiles of {one} cannot be resampled: integers and floats can")
    if all(axis.tile == axis.new_tile for axis in axes) or not volume.size:
        xp = array_module(volume)
        return xp.ascontiguousarray(volume.astype(wanted, copy=False))
    return _by_kernel(volume, axes, wanted) if is_device_array(volume) else _by_scipy(volume, axes, wanted)


def _computed_in(*dtypes: np.dtype) -> np.dtype:
    return np.dtype(np.float32 if all(one.str[1:] in _IN_FLOAT for one in dtypes) else np.float64)


def _by_scipy(volume: np.ndarray, axes: tuple[TileAxis, ...], dtype: np.dtype) -> np.ndarray:
    from scipy.ndimage import gaussian_filter

    out = np.empty([axis.new_size for axis in axes], dtype)
    kind = _computed_in(volume.dtype, dtype)
    sigmas, factors = [axis.sigma for axis in axes], [axis.factor for axis in axes]
    for pieces in itertools.product(*(axis.tiles() for axis in axes)):
        before, after = (tuple(piece[k] for piece in pieces) for k in (0, 1))
        tile = volume[before].astype(kind)
        if any(sigmas):
            tile = gaussian_filter(tile, sigmas, mode="nearest")
        made = affine_transform(
            tile, factors, [axis.offset for axis in axes], output_shape=out[after].shape, mode="nearest",
            # SciPy rounds integers; it knows no float16, and lets the last integers of 64 bits overflow.
            output=(kind if dtype.kind == "f" or dtype.itemsize == 8 else dtype).str,
        )  # fmt: skip
        out[after] = made if dtype.kind == "f" or dtype.itemsize < 8 else _rounded(made, dtype)
    return out


def _rounded(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Round float64 to integers of 64 bits, halves away from zero."""
    ties = np.abs(values) < 2**52  # from there on all are whole
    return saturated(np.where(ties, np.trunc(values + np.copysign(0.5, values)), values), dtype)  # type: ignore[no-any-return]


def _by_kernel(volume: Any, axes: tuple[TileAxis, ...], dtype: np.dtype) -> Any:
    xp = array_module(volume)
    kind, result = _computed_in(volume.dtype, dtype), xp.ascontiguousarray(volume)
    changed = [k for k, axis in enumerate(axes) if axis.tile != axis.new_tile]
    changed.sort(key=lambda k: -axes[k].factor)  # where most voxels go, first
    for k in changed:
        shape = (*result.shape[:k], axes[k].new_size, *result.shape[k + 1 :])
        target = xp.empty(shape, dtype if k == changed[-1] else kind)
        first, count, weights = _tables(axes[k], kind.str[1:], _place(xp))
        inner = math.prod(shape[k + 1 :])
        load(kernel_spec(result.dtype, target.dtype, kind))(
            (-(-target.size // _THREADS),),
            (_THREADS,),
            (
                *(result, target, first, count, weights),
                *(*int32(weights.shape[1], axes[k].size, shape[k]), *int64(inner, target.size)),
            ),
        )
        result = target
    return result


def kernel_spec(source: np.dtype, target: np.dtype, kind: np.dtype) -> KernelSpec:
    """Choose a kernel of separable.cu."""
    types = (("SOURCE", source), ("TARGET", target), ("COMPUTE", kind))
    return KernelSpec("separable", "resample_axis", tuple((name, CUDA_TYPES[one.str[1:]]) for name, one in types))


def _place(xp: Any) -> tuple[int, int]:
    """Name where tables lie and by which stream's order: the current device and stream, or the host."""
    return (-1, 0) if xp is np else (int(xp.cuda.Device().id), int(xp.cuda.get_current_stream().ptr))


@functools.lru_cache(maxsize=64)
def _tables(axis: TileAxis, kind: str, place: tuple[int, int]) -> tuple[Any, Any, Any]:
    """Bring an axis's taps to a device, once: the boxes of a mosaic have the same ones."""
    taps = axis.taps()
    tables = taps.first.astype(np.int32), taps.count.astype(np.int32), taps.weights.astype(kind)
    if place[0] < 0:
        return tables
    import cupy

    first, count, weights = (cupy.asarray(one) for one in tables)
    return first, count, weights
