"""Find the surface of the tissue in an OCT volume, where the volume is: CuPy in, CuPy out; NumPy in, NumPy out.

In: a volume and its depth axis. Out: for each A-line the voxel at which tissue begins. On the device two kernels do it:
one takes logarithm and lateral mean, one the derivative along depth and its maximum; between them lies one float32
volume, cut into slabs of at most :data:`SCRATCH_BYTES`. SciPy's filters do it on the CPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.device import array_module, is_device_array
from linumpy.gpu import interface_march as march
from linumpy.gpu.interface_filters import interface_by_filters
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, int32, int64, load, uint32

#: Smoothed voxels that lie between the kernels, at most.
SCRATCH_BYTES = 512 * 2**20
#: Shared memory that a block has on every device.
_SHARED_BYTES = 48 * 1024
_WIDEST_RADIUS = _SHARED_BYTES // 4 - 1  # whose weights lie there
_THREADS, _LINE_THREADS = 256, 128
#: Whether the kernels that march are taken where they fit.
MARCH = True
_GROUP, _STEP, _TILE_A, _TILE_B = 8, 8, 32, 64  # as in interface.cu


def find_tissue_interface(
    vol: Any,
    s_xy: int = 15,
    s_z: float = 2,
    use_log: bool = True,
    order: int = 1,
    detect_cutting_errors: bool = False,
    depth_axis: int = -1,
) -> Any:
    """Find for each A-line the voxel at which tissue begins.

    The volume is smoothed laterally and the derivative of a Gaussian is taken along depth; the surface is where
    intensity rises most. At its ends the volume is mirrored (SciPy's mode ``"reflect"``).

    Parameters
    ----------
    vol : numpy.ndarray or cupy.ndarray, rank 3
        OCT intensity, of booleans, integers or floats, and in any memory order: it is read where it lies. Without
        `use_log` all voxels must be finite.
    s_xy : int
        Voxels along each lateral axis over which the mean is taken.
    s_z : float
        Standard deviation of the Gaussian along depth, in voxels; at most 3071 on a GPU. It is cut off at 4 standard
        deviations.
    use_log : bool
        Whether to take the natural logarithm of positive voxels; the others become 0. In float32 for every dtype.
    order : int
        Of the derivative along depth.
    detect_cutting_errors : bool
        Whether an A-line whose strongest change, up or down, lies above the surface takes that instead.
    depth_axis : int
        Axis of depth.

    Returns
    -------
    numpy.ndarray or cupy.ndarray of int32, rank 2
        The lateral axes in their order; voxels along depth, ``ceil(argmax + s_z / 2)`` and at most the last one.

    Raises
    ------
    ValueError
        A volume that is not of rank 3 or is empty; an `s_xy`, `s_z` or `order` that cannot be; a `depth_axis` out of
        bounds.
    TypeError
        Complex voxels.
    """
    check_arguments(vol, s_xy, s_z, order, depth_axis)
    if is_device_array(vol):
        return interface_by_kernels(vol, s_xy, s_z, use_log, order, detect_cutting_errors, depth_axis)
    return interface_by_filters(vol, s_xy, s_z, use_log, order, detect_cutting_errors, depth_axis)


def check_arguments(vol: Any, s_xy: int, s_z: float, order: int, depth_axis: int) -> None:
    """Raise for what :func:`find_tissue_interface` cannot take."""
    if vol.ndim != 3 or not all(vol.shape):
        raise ValueError(f"a volume of shape {vol.shape} has no surface: three axes with voxels are needed")
    if not -3 <= depth_axis < 3:
        raise ValueError(f"depth_axis={depth_axis}: a volume has axes 0, 1 and 2")
    if int(s_xy) != s_xy or s_xy < 1 or not 0 < s_z < math.inf:
        raise ValueError(f"s_xy={s_xy}, s_z={s_z}: at least 1 voxel, a whole number, and more than 0 are needed")
    if int(order) != order or order < 0:
        raise ValueError(f"order={order}: a derivative has a whole order from 0 on")
    if vol.dtype.kind not in "biuf":
        raise TypeError(f"a volume of {vol.dtype} has no intensity: booleans, integers and floats have")


@functools.lru_cache(maxsize=64)
def gaussian_weights(s_z: float, order: int) -> np.ndarray:
    """Weights of a derivative of a Gaussian, to be added to (or, of odd order, subtracted from) each other in pairs.

    Parameters
    ----------
    s_z : float
        Standard deviation in voxels.
    order : int
        Of the derivative.

    Returns
    -------
    numpy.ndarray of float32, (radius + 1,)
        The weight of the voxel k further on; of the voxel k before it is the same, negative for an odd order. Those
        that SciPy's ``gaussian_filter1d`` uses, cut off at 4 standard deviations. Kept for the next call: read-only.
    """
    radius = int(4.0 * s_z + 0.5)
    x = np.arange(-radius, radius + 1)
    gaussian = np.exp(-0.5 / s_z**2 * x**2)
    gaussian /= gaussian.sum()
    # (q g)' = (q' - q x / s²) g
    factor, slope = np.polynomial.Polynomial([1.0]), np.polynomial.Polynomial([0.0, -1.0 / s_z**2])
    for _ in range(order):
        factor = factor.deriv() + factor * slope
    # The derivative of a convolution: the kernel is turned round.
    weights: np.ndarray = (factor(-x) * gaussian)[radius:].astype(np.float32)
    weights.setflags(write=False)
    return weights


@dataclass(frozen=True)
class InterfaceLayout:
    """How a volume lies in memory, and which kernels fit.

    Attributes
    ----------
    a, b, z : int
        Axes: outer and inner lateral axis, depth.
    depth_inner : bool
        Whether depth is the axis along which memory runs.
    kind : str
        ``"tiles"``, ``"lines"`` or ``"any"``, the last for smoothing or depth beyond what shared memory holds.
    """

    a: int
    b: int
    z: int
    depth_inner: bool
    kind: str


def choose_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], depth_axis: int, s_xy: int, radius: int
) -> InterfaceLayout:
    """Choose the way through a volume by its strides; pure."""
    z = depth_axis % 3
    # An axis of one voxel may have any stride.
    order = sorted(range(3), key=lambda axis: (shape[axis] > 1, -abs(strides[axis]) * (shape[axis] > 1)))
    inner = order[-1]
    a, b = (axis for axis in order if axis != z)
    if inner == z:
        kind = "lines" if _lines_words(shape[z], radius) * 4 <= _SHARED_BYTES else "any"
    else:
        kind = "tiles" if _tile_words(s_xy) * 4 <= _SHARED_BYTES and _TILE_B + s_xy - 1 <= 128 else "any"
    return InterfaceLayout(a, b, z, inner == z, kind)


def _tile_words(s: int) -> int:
    return (_TILE_A + s - 1) * ((_TILE_B + s - 1 | 1) + _TILE_B + 1)


def _lines_words(depth: int, radius: int) -> int:
    padded = -(-depth // _STEP) * _STEP + 2 * radius
    return radius + 1 + _GROUP * (padded + padded // 8 + 1)


def interface_by_kernels(
    vol: Any, s_xy: int, s_z: float, use_log: bool, order: int, cutting_errors: bool, depth_axis: int
) -> Any:
    """Find the surface of a checked volume on the device; see :func:`find_tissue_interface`."""
    if int(4.0 * s_z + 0.5) > _WIDEST_RADIUS:
        raise ValueError(f"s_z={s_z}: on a GPU at most {_WIDEST_RADIUS // 4} voxels, for more pass a NumPy array")
    xp = array_module(vol)
    if any(stride % vol.itemsize for stride in vol.strides):
        vol = xp.ascontiguousarray(vol)
    weights = _weights_on_device(xp, float(s_z), order)
    layout = choose_layout(vol.shape, vol.strides, depth_axis, int(s_xy), len(weights) - 1)
    run = _Run(xp, vol, layout, int(s_xy), float(s_z), bool(use_log), order % 2, bool(cutting_errors), weights)
    return run.surface()


def _weights_on_device(xp: Any, s_z: float, order: int) -> Any:
    if xp is np:
        return gaussian_weights(s_z, order)
    return _uploaded_weights(s_z, order, xp.cuda.runtime.getDevice(), xp.cuda.get_current_stream().ptr)


@functools.lru_cache(maxsize=64)
def _uploaded_weights(s_z: float, order: int, device_id: int, stream: int) -> Any:
    """Upload weights once a stream: what is uploaded on one is not yet there for another."""
    import cupy

    return cupy.asarray(gaussian_weights(s_z, order))


class _Run:
    """One volume on its way through the kernels."""

    def __init__(
        self,
        xp: Any,
        vol: Any,
        layout: InterfaceLayout,
        s: int,
        s_z: float,
        use_log: bool,
        odd: int,
        cutting: bool,
        weights: Any,
    ) -> None:
        self.xp, self.vol, self.layout, self.s = xp, vol, layout, s
        self.log, self.cutting = str(int(use_log)), str(int(cutting))
        self.shape = tuple(vol.shape[axis] for axis in (layout.a, layout.b, layout.z))
        self.stride = tuple(vol.strides[axis] // vol.itemsize for axis in (layout.a, layout.b, layout.z))
        self.out = xp.empty([n for axis, n in enumerate(vol.shape) if axis != layout.z], np.int32)
        self.out_stride = tuple(stride // 4 for stride in self.out.strides)
        if layout.a > layout.b:
            self.out_stride = self.out_stride[::-1]
        self.radius = len(weights) - 1
        self.profile_arguments = (weights, np.int32(self.radius), np.int32(odd), np.float64(s_z / 2))

    def surface(self) -> Any:
        size_a, size_b, depth = self.shape
        volumes = 2 if self.layout.kind == "any" else 1
        rows = max(1, SCRATCH_BYTES // (4 * volumes * size_b * depth))
        if self.layout.kind == "tiles" and rows > _TILE_A:
            rows -= rows % _TILE_A
        scratch = [self.xp.empty(min(rows, size_a) * size_b * depth, np.float32) for _ in range(volumes)]
        steps: dict[str, Callable[..., None]] = {"tiles": self._tiles, "lines": self._lines, "any": self._any}
        for first in range(0, size_a, rows):
            steps[self.layout.kind](first, min(rows, size_a - first), *scratch)
        return self.out

    def _mean_kernel(self, name: str, source: np.dtype, log: str) -> Any:
        return load(kernel_spec(name, source, log, "0"))

    def _steepest_kernel(self, name: str) -> Any:
        return load(kernel_spec(name, np.dtype(np.float32), "0", self.cutting))

    def _start(self, launch: march.Launch) -> None:
        load(launch.spec)((launch.blocks,), (launch.threads,), launch.args)

    def _tiles(self, first: int, count: int, mean: Any) -> None:
        size_a, size_b, depth = self.shape
        if MARCH and march.fits(self.s, self.radius):
            weights, _, *profile = self.profile_arguments
            here = (count, size_b, depth), self.out_stride, self.radius, self.cutting
            self._start(march.strips(self.vol, mean, self.shape, self.stride, (first, count), self.s, self.log))
            self._start(march.columns(mean, self._from_row(first), (weights, *profile), *here))
            return
        tiles_a, tiles_b = -(-count // _TILE_A), -(-size_b // _TILE_B)
        self._mean_kernel("mean_tile", self.vol.dtype, self.log)(
            (tiles_a * tiles_b * depth,),
            (_THREADS,),
            (
                *(self.vol, mean, *int64(*self.stride), *int32(size_a, size_b, first, count)),
                *(*uint32(tiles_a, tiles_b), *int32(self.s)),
            ),
            shared_mem=4 * _tile_words(self.s),
        )
        self._columns(first, count, mean, (size_b, 1, count * size_b))

    def _lines(self, first: int, count: int, mean: Any) -> None:
        _, size_b, depth = self.shape
        if MARCH and march.fits(self.s, self.radius) and march.line_fits(depth, self.radius):
            weights, _, *profile = self.profile_arguments
            here = (count, size_b, depth), self.out_stride, self.s, self.radius, self.cutting
            self._start(march.rows_of_lines(self.vol, mean, self.shape, self.stride, (first, count), self.s, self.log))
            self._start(march.lines(mean, self._from_row(first), (weights, *profile), *here))
            return
        self._along_a(first, count, mean, lanes_axis=2, to=(size_b * depth, 1, depth))
        groups = -(-size_b // _GROUP)
        weights, *profile = self.profile_arguments
        self._steepest_kernel("steepest_lines")(
            (count * groups,),
            (_LINE_THREADS,),
            (
                *(mean, self._from_row(first), weights, *profile, *int32(size_b, depth), *uint32(groups)),
                *(*int64(*self.out_stride), *int32(self.s)),
            ),
            shared_mem=4 * _lines_words(depth, self.radius),
        )

    def _any(self, first: int, count: int, half: Any, mean: Any) -> None:
        """Take three passes: a mean along a, one along b, the profile. The same memory order as the volume's."""
        size_b, depth = self.shape[1:]
        kernel = self._mean_kernel("mean_along", np.dtype(np.float32), "0")
        if self.layout.depth_inner:
            a, b, z = size_b * depth, depth, 1
            self._along_a(first, count, half, 2, (a, z, b))
            self._along(kernel, half, mean, (b, z, a), (b, z, a), (size_b, 0, size_b), depth, count)
        else:
            a, b, z = size_b, 1, count * size_b
            self._along_a(first, count, half, 1, (a, b, z))
            self._along(kernel, half, mean, (b, a, z), (b, a, z), (size_b, 0, size_b), count, depth)
        self._columns(first, count, mean, (a, b, z))

    def _along_a(self, first: int, count: int, mean: Any, lanes_axis: int, to: tuple[int, int, int]) -> None:
        """Take logarithm and mean along a; `to` are strides along a, the axis of the lanes and the third one."""
        outer_axis = 3 - lanes_axis
        strides = self.stride[0], self.stride[lanes_axis], self.stride[outer_axis]
        kernel = self._mean_kernel("mean_along", self.vol.dtype, self.log)
        sizes = self.shape[0], first, count
        self._along(kernel, self.vol, mean, strides, to, sizes, self.shape[lanes_axis], self.shape[outer_axis])

    def _along(
        self,
        kernel: Any,
        source: Any,
        target: Any,
        strides: tuple[int, ...],
        to: tuple[int, ...],
        sizes: tuple[int, int, int],
        lane_size: int,
        outer_size: int,
    ) -> None:
        lanes = min(64, 1 << (lane_size - 1).bit_length())
        groups = -(-sizes[2] // _GROUP)
        blocks_m, blocks_i = -(-groups // (_THREADS // lanes)), -(-lane_size // lanes)
        kernel(
            (blocks_m * blocks_i * outer_size,),
            (_THREADS,),
            (
                *(source, target, *int64(*strides, *to), *int32(*sizes, lane_size)),
                *(*uint32(lanes, blocks_i, blocks_m), *int32(self.s)),
            ),
        )

    def _columns(self, first: int, count: int, mean: Any, strides: tuple[int, int, int]) -> None:
        _, size_b, depth = self.shape
        weights, *profile = self.profile_arguments
        self._steepest_kernel("steepest_columns")(
            (-(-count * size_b // _THREADS),),
            (_THREADS,),
            (
                *(mean, self._from_row(first), weights, *profile, *int64(*strides)),
                *(*int32(count, size_b, depth), *int64(*self.out_stride)),
            ),
            shared_mem=4 * (self.radius + 1),
        )

    def _from_row(self, first: int) -> Any:
        """The map from row `first` of a on."""
        return self.out[first:] if self.layout.a < self.layout.b else self.out[:, first:]


def kernel_spec(name: str, source: np.dtype, log: str, cutting: str) -> KernelSpec:
    """Choose a kernel of interface.cu."""
    return KernelSpec("interface", name, (("SOURCE", CUDA_TYPES[source.str[1:]]), ("LOG", log), ("CUTTING", cutting)))
