"""Find the tissue surface in an OCT volume: CuPy in, CuPy out; NumPy in, NumPy out.

In: a volume and its depth axis. Out: the depth at which tissue begins, for each A-line. On a device one kernel takes
logarithm and lateral mean, another one the derivative along depth and its maximum, with a float32 volume between them
that is cut into slabs of at most :data:`SCRATCH_BYTES`. On the CPU, SciPy's filters (``surface_filters.py``).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, is_device_array
from linumpy.gpu.kernels import (
    CUDA_TYPES,
    KernelSpec,
    Uploaded,
    current_queue,
    int32,
    int64,
    load,
    memory_order,
    uint32,
    uploaded,
)
from linumpy.gpu.oct import surface_march
from linumpy.gpu.oct.surface_filters import SurfaceOptions, interface_by_filters

log = logging.getLogger(__name__)

#: Smoothed voxels that lie between the kernels, at most.
SCRATCH_BYTES = 512 * 2**20
#: Shared memory that a block has on every device.
_SHARED_BYTES = 48 * 1024
_THREADS, _LINE_THREADS = 256, 128
#: Derivatives of a Gaussian this wide are taken of volumes of any depth.
_WIDEST_S_Z = 16
#: Nor are wider means, or higher derivatives, looked for: their tables would take the memory of a volume.
_WIDEST_S_XY, _HIGHEST_ORDER = 4096, 32
#: Wider ones do not fit shared memory, and are left to a chain of filters.
_WIDEST_ON_DEVICE = 1024
#: Parameters of the surface: ``Rule`` of interface.cuh.
RULE = np.dtype([("half_s_z", "f8"), ("width", "f4"), ("min_contrast", "f4")], align=True)
#: Whether the kernels that march are taken where they fit.
MARCH = True
_GROUP, _STEP, _TILE_A, _TILE_B = 8, 8, 32, 64  # as in interface.cu


def find_tissue_interface(
    vol: Array,
    s_xy: int = 15,
    s_z: float = 2,
    use_log: bool = True,
    mask: Array | None = None,
    order: int = 1,
    detect_cutting_errors: bool = False,
    *,
    depth_axis: int | None = None,
    definition: str = "linumpy",
    min_contrast: float = 5.0,
    return_confidence: bool = False,
    zero_log: float | None = None,
) -> Any:
    """Find for each A-line where tissue begins.

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
        Standard deviation of the Gaussian along depth, in voxels, at most the voxels along depth. It is cut off at 4
        standard deviations.
    use_log : bool
        Whether to take the natural logarithm of positive voxels; `zero_log` says what becomes of the others. In
        float32 for every dtype.
    mask : numpy.ndarray or cupy.ndarray of bool, optional
        Of the volume's shape, or of the shape of its lateral axes. Voxels outside take no part: means are taken over
        voxels inside; along an A-line, voxels outside repeat the last one inside above them (those above the first,
        the first), so that the edge of the mask is no edge of intensity; and the surface is looked for inside. This
        goes by a chain of filters, on the GPU too.
    order : int
        Of the derivative along depth.
    detect_cutting_errors : bool
        Whether the voxel at which the smoothed A-line (by the lateral mean and the Gaussian itself) is largest in size
        takes the place of a surface below it.
    depth_axis : int, optional
        Axis of depth; by default the last one, with a log line (warning) that says so.
    definition : {"linumpy", "edge"}
        ``"linumpy"``: the voxel ``ceil(argmax + s_z / 2)``, at most the last one, which lies about ``s_z / 2 + 1``
        voxels below the edge and exists for every A-line. ``"edge"``: where the edge itself is, without bias and to
        fractions of a voxel (a parabola through the largest derivative and its neighbours), counted in voxels from
        the centre of the first one; a step between voxels 49 and 50 lies at 49.5. It is the same whatever unit
        intensity is in. See Notes for A-lines without such an edge.
    min_contrast : float
        Of an edge: its derivative over the root mean square of the derivative along the rest of the A-line. Of 200
        voxels of noise one A-line in a thousand reaches 5.
    return_confidence : bool
        Whether to return the contrast of each edge too; only for ``definition="edge"``.
    zero_log : float, optional
        What stands for the logarithm of voxels that are not positive. By default 0 for ``"linumpy"``, that of 1, so
        that of tissue below 1 they are the brightest. For ``"edge"`` two standard deviations and 1 below the mean
        logarithm of the positive voxels, of a sample on a regular grid.

    Returns
    -------
    numpy.ndarray or cupy.ndarray, rank 2
        The lateral axes in their order. ``"linumpy"``: int32 voxels along depth, -1 for an A-line without any voxel
        inside the mask. ``"edge"``: float32; 0 where tissue begins at or before the first voxel, NaN where there is no
        tissue, infinity where there may be some but its surface is not found.
    numpy.ndarray or cupy.ndarray of float32, rank 2
        Only with `return_confidence`: the contrast, at least `min_contrast` where the surface is finite; 0 where
        intensity never rises.

    Raises
    ------
    ValueError
        A volume that is not of rank 3 or is empty; an `s_xy`, `s_z`, `order`, `definition`, `min_contrast` or
        `depth_axis` that cannot be; a mask of another shape.
    TypeError
        Complex voxels.

    Notes
    -----
    The mean over `s_xy` voxels spreads a surface of slope m over m `s_xy` voxels of depth. A-lines in which no edge
    stands out are therefore looked at once more (``definition="edge"``, `order` 1), by a mean over at most 3 × 3 of
    them and a Gaussian twice as wide along depth: surfaces up to a slope of 3 voxels a voxel stand out so. Where none
    does:

    - 0: smoothed intensity at the first voxel is above the mean of its A-line by `min_contrast` standard deviations of
      noise. Tissue that begins above the volume shows so, by its attenuation.
    - infinity: the A-line is not noise, since its smoothed intensity has four times the variance that noise would
      have, but no surface is found in it.
    - NaN: the A-line is noise around one level. That is what water looks like; tissue would too, if it reached from
      the first voxel to the last without attenuation.

    Comparisons as ``z >= surface`` are false for infinity and NaN.
    """
    if definition not in ("linumpy", "edge"):
        raise ValueError(f"definition={definition!r}: choose 'linumpy' or 'edge'")
    edge = definition == "edge"
    if zero_log is not None and not -1e30 < zero_log < 1e30:
        raise ValueError(f"zero_log={zero_log}: a number is needed")
    if return_confidence and not edge:
        raise ValueError("return_confidence=True: only an edge has a contrast, pass definition='edge'")
    if not isinstance(vol, np.ndarray) and not is_device_array(vol):
        raise TypeError(f"the volume is a {type(vol).__name__}: pass a NumPy or CuPy array")
    options = SurfaceOptions(
        s_xy, s_z, use_log, order, detect_cutting_errors, _depth_axis(vol, depth_axis), edge, min_contrast,
        zero_log,
    )  # fmt: skip
    check_arguments(vol, options)
    options = replace(options, s_xy=int(s_xy), order=int(order))  # SciPy takes no 9.0 for 9
    if mask is None and is_device_array(vol) and s_z <= _WIDEST_ON_DEVICE:
        surface, contrast = interface_by_kernels(vol, options)
    else:
        surface, contrast = interface_by_filters(vol, options, mask)
    return (surface, contrast) if return_confidence else surface


def _depth_axis(vol: Any, depth_axis: int | None) -> int:
    """Take the axis of depth, or the last one, and say so: of a volume (Z, Y, X) that map is wrong but plausible."""
    if depth_axis is not None:
        return depth_axis
    log.warning("depth_axis is not given: the last axis of %s is taken for depth", tuple(vol.shape))
    return -1


def check_arguments(vol: Any, options: SurfaceOptions) -> None:
    """Check the arguments of :func:`find_tissue_interface`."""
    s_xy, s_z, order, depth_axis = options.s_xy, options.s_z, options.order, options.depth_axis
    if vol.ndim != 3 or not all(vol.shape):
        raise ValueError(f"a volume of shape {vol.shape} has no surface: three axes with voxels are needed")
    if not isinstance(depth_axis, (int, np.integer)) or not -3 <= depth_axis < 3:
        raise ValueError(f"depth_axis={depth_axis!r}: a volume has axes 0, 1 and 2")
    for name, value in {"s_xy": s_xy, "s_z": s_z, "order": order, "min_contrast": options.min_contrast}.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise ValueError(f"{name}={value!r}: a number is needed")
    if not math.isfinite(s_xy) or int(s_xy) != s_xy or s_xy < 1 or not 0 < s_z < math.inf:
        raise ValueError(f"s_xy={s_xy}, s_z={s_z}: at least 1 voxel, a whole number, and more than 0 are needed")
    if s_xy > max(_WIDEST_S_XY, *vol.shape):
        raise ValueError(f"s_xy={s_xy}: the mean is wider than the volume of shape {vol.shape}")
    if s_z > max(_WIDEST_S_Z, vol.shape[depth_axis]):
        raise ValueError(f"s_z={s_z:g}: the Gaussian is wider than the {vol.shape[depth_axis]} voxels along depth")
    if not 0 <= order <= _HIGHEST_ORDER or int(order) != order:
        raise ValueError(f"order={order}: a derivative has a whole order from 0 to {_HIGHEST_ORDER}")
    if not 0 <= options.min_contrast < math.inf:
        raise ValueError(f"min_contrast={options.min_contrast}: 0 or more is needed, 0 to take every rise for an edge")
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
    order = memory_order(shape, strides)
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
    return 2 * (radius + 1) + _GROUP * (padded + padded // 8 + 1)


def interface_by_kernels(vol: Any, options: SurfaceOptions) -> tuple[Any, Any]:
    """Find the surface of a checked volume on the device; see :func:`interface_by_filters` for what it returns."""
    xp = array_module(vol)
    if any(stride % vol.itemsize for stride in vol.strides):
        vol = xp.ascontiguousarray(vol)
    weights = _weights_on_device(xp, float(options.s_z), options.order)
    smoothing = _weights_on_device(xp, float(options.s_z), 0) if options.cutting_errors else weights
    layout = choose_layout(vol.shape, vol.strides, options.depth_axis, int(options.s_xy), len(weights) - 1)
    return _SurfaceRun(xp, vol, layout, options, weights, smoothing).surface()


def _weights_on_device(xp: Any, s_z: float, order: int) -> Any:
    if xp is np:
        return gaussian_weights(s_z, order)
    return _uploaded_weights(s_z, order, current_queue()).get()


@functools.lru_cache(maxsize=64)
def _uploaded_weights(s_z: float, order: int, queue: tuple[int, int, int]) -> Uploaded:
    """Upload weights once for each queue of work."""
    import cupy

    return uploaded(cupy.asarray(gaussian_weights(s_z, order)))


class _SurfaceRun:
    """The launches for one volume."""

    def __init__(
        self, xp: Any, vol: Any, layout: InterfaceLayout, options: SurfaceOptions, weights: Any, smoothing: Any
    ) -> None:
        self.xp, self.vol, self.layout, self.s = xp, vol, layout, int(options.s_xy)
        self.options = options
        self.log = "0" if not options.use_log else "2" if options.edge or options.zero_log is not None else "1"
        self.kind = str(int(bool(options.cutting_errors))), str(int(options.edge))
        self.shape = tuple(vol.shape[axis] for axis in (layout.a, layout.b, layout.z))
        self.stride = tuple(vol.strides[axis] // vol.itemsize for axis in (layout.a, layout.b, layout.z))
        lateral = [n for axis, n in enumerate(vol.shape) if axis != layout.z]
        self.out = xp.empty(lateral, np.float32 if options.edge else np.int32)
        self.contrast = xp.empty(lateral, np.float32) if options.edge else None
        self.out_stride = tuple(stride // 4 for stride in self.out.strides)
        if layout.a > layout.b:
            self.out_stride = self.out_stride[::-1]
        self.radius = len(weights) - 1
        self.weights = weights, smoothing
        rule = np.array((options.s_z / 2, options.step_width, options.min_contrast), RULE)[()]
        self.how = np.int32(options.order % 2), rule
        self.zero = self._log_of_zero() if self.log == "2" else self.weights[0]  # unused

    def _log_of_zero(self) -> Any:
        """Return the value for voxels without a logarithm, as a float32 on the device."""
        if self.options.zero_log is not None:
            return self.xp.full(1, self.options.zero_log, np.float32)
        written = self.xp.empty(1, np.float32)
        sizes = *int64(*self.stride), *int32(*self.shape)
        self._mean_kernel("log_of_zero", self.vol.dtype, "0")((1,), (1024,), (self.vol, written, *sizes))
        return written

    def surface(self) -> tuple[Any, Any]:
        size_a, size_b, depth = self.shape
        volumes = 2 if self.layout.kind == "any" else 1
        rows = max(1, SCRATCH_BYTES // (4 * volumes * size_b * depth))
        if self.layout.kind == "tiles" and rows > _TILE_A:
            rows -= rows % _TILE_A
        scratch = [self.xp.empty(min(rows, size_a) * size_b * depth, np.float32) for _ in range(volumes)]
        steps: dict[str, Callable[..., None]] = {"tiles": self._tiles, "lines": self._lines, "any": self._any}
        for first in range(0, size_a, rows):
            steps[self.layout.kind](first, min(rows, size_a - first), *scratch)
            self._look_again(first, min(rows, size_a - first), scratch[0])
        return self.out, self.contrast

    def _look_again(self, first: int, count: int, mean: Any) -> None:
        """Process A-lines without a clear edge again; the kernel returns at once for the others."""
        second = self.options.second_look
        if second is None:
            return
        _, size_b, depth = self.shape
        weights, smoothing = (_weights_on_device(self.xp, second.s_z, order) for order in (1, 0))
        rule = np.array((0, second.step_width, second.min_contrast), RULE)[()]
        line = (size_b * depth, depth, 1) if self.layout.depth_inner else (size_b, 1, count * size_b)
        load(kernel_spec("look_again", self.vol.dtype, self.log, self.kind))(
            (-(-count * size_b // _THREADS),),
            (_THREADS,),
            (
                *(self.vol, mean, *self._from_row(first), weights, smoothing, np.int32(len(weights) - 1), rule),
                *(np.float32(second.s_z), self.zero, *int64(*self.stride, *line)),
                *(*int32(self.shape[0], first, count, size_b, depth), *int64(*self.out_stride), *int32(second.s_xy)),
            ),
        )

    def _mean_kernel(self, name: str, source: np.dtype, log: str) -> Any:
        return load(kernel_spec(name, source, log))

    def _steepest_kernel(self, name: str) -> Any:
        return load(kernel_spec(name, np.dtype(np.float32), "0", self.kind))

    def _start(self, launch: surface_march.MarchLaunch) -> None:
        load(launch.spec)((launch.blocks,), (launch.threads,), launch.args)

    def _mean_pass(self, first: int, count: int, mean: Any) -> surface_march.MeanPass:
        rows = first, count
        return surface_march.MeanPass(self.vol, mean, self.shape, self.stride, rows, self.s, self.log, self.zero)

    def _profile_pass(self, first: int, count: int, mean: Any) -> surface_march.ProfilePass:
        sizes, profile = (count, *self.shape[1:]), (*self.weights, *self.how)
        maps = self._from_row(first)
        return surface_march.ProfilePass(mean, maps, profile, sizes, self.out_stride, self.radius, self.kind)

    def _tiles(self, first: int, count: int, mean: Any) -> None:
        size_a, size_b, depth = self.shape
        if MARCH and surface_march.fits(self.s, self.radius):
            self._start(surface_march.strips(self._mean_pass(first, count, mean)))
            self._start(surface_march.columns(self._profile_pass(first, count, mean)))
            return
        tiles_a, tiles_b = -(-count // _TILE_A), -(-size_b // _TILE_B)
        self._mean_kernel("mean_tile", self.vol.dtype, self.log)(
            (tiles_a * tiles_b * depth,),
            (_THREADS,),
            (
                *(self.vol, mean, *int64(*self.stride), *int32(size_a, size_b, first, count)),
                *(*uint32(tiles_a, tiles_b), *int32(self.s), self.zero),
            ),
            shared_mem=4 * _tile_words(self.s),
        )
        self._columns(first, count, mean, (size_b, 1, count * size_b))

    def _lines(self, first: int, count: int, mean: Any) -> None:
        _, size_b, depth = self.shape
        if MARCH and surface_march.fits(self.s, self.radius) and surface_march.line_fits(depth, self.radius):
            self._start(surface_march.rows_of_lines(self._mean_pass(first, count, mean)))
            self._start(surface_march.lines(self._profile_pass(first, count, mean), self.s))
            return
        self._along_a(first, count, mean, lanes_axis=2, to=(size_b * depth, 1, depth))
        groups = -(-size_b // _GROUP)
        self._steepest_kernel("steepest_lines")(
            (count * groups,),
            (_LINE_THREADS,),
            (
                *(mean, *self._from_row(first), *self.weights, np.int32(self.radius), *self.how),
                *(*int32(size_b, depth), *uint32(groups), *int64(*self.out_stride), *int32(self.s)),
            ),
            shared_mem=4 * _lines_words(depth, self.radius),
        )

    def _any(self, first: int, count: int, half: Any, mean: Any) -> None:
        """Run three passes: a mean along a, a mean along b, the profile; in the memory order of the volume."""
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
                *(*uint32(lanes, blocks_i, blocks_m), *int32(self.s), self.zero),
            ),
        )

    def _columns(self, first: int, count: int, mean: Any, strides: tuple[int, int, int]) -> None:
        _, size_b, depth = self.shape
        self._steepest_kernel("steepest_columns")(
            (-(-count * size_b // _THREADS),),
            (_THREADS,),
            (
                *(mean, *self._from_row(first), *self.weights, np.int32(self.radius), *self.how),
                *(*int64(*strides), *int32(count, size_b, depth), *int64(*self.out_stride)),
            ),
            shared_mem=4 * (self.radius + 1) * (1 + int(self.kind[0])),
        )

    def _from_row(self, first: int) -> tuple[Any, Any]:
        """Return the maps from row `first` of a on; without contrast, an array that kernels do not use."""
        part = slice(first, None) if self.layout.a < self.layout.b else (slice(None), slice(first, None))
        return self.out[part], self.weights[0] if self.contrast is None else self.contrast[part]


def kernel_spec(name: str, source: np.dtype, log: str, kind: tuple[str, str] = ("0", "0")) -> KernelSpec:
    """Choose a kernel of interface.cu; `kind` is for the rule for cutting errors, and for the depth of the edge."""
    defines = (("SOURCE", CUDA_TYPES[source.str[1:]]), ("LOG", log), ("CUTTING", kind[0]), ("EDGE", kind[1]))
    return KernelSpec("interface", name, defines, "linumpy.gpu.oct.cuda")
