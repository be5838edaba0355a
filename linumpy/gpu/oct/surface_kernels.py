"""Find the tissue surface in a volume on the device, by kernels of surface.cu and surface_march.cu.

In: a checked volume without a mask, and :class:`~linumpy.gpu.oct.surface_filters.SurfaceOptions`. Out: the same as
:func:`~linumpy.gpu.oct.surface_filters.interface_by_filters`. In the code a and b are the lateral axes, the outer and
the inner one in memory, and z is depth. The kernels of a pass compute the logarithm and the lateral mean, then the
derivative along depth and its maximum; float32 means lie between them, in at most :data:`SCRATCH_BYTES`. Therefore the
volume is processed in blocks of rows along a.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array, array_module
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
from linumpy.gpu.oct.surface_filters import SurfaceOptions

#: Maximum bytes of the means between the kernels.
SCRATCH_BYTES = 512 * 2**20
#: Shared memory that a block has on every device.
_SHARED_BYTES = 48 * 1024
_THREADS, _LINE_THREADS = 256, 128
#: Parameters of the surface: ``Rule`` of surface.cuh.
RULE = np.dtype([("half_s_z", "f8"), ("width", "f4"), ("min_contrast", "f4")], align=True)
#: Whether the kernels of surface_march.cu are used where they fit: a thread marches along an axis, with a window of
#: voxels in registers.
MARCH = True
_GROUP, _STEP, _TILE_A, _TILE_B = 8, 8, 32, 64  # as in surface.cu
_FLOAT = np.dtype(np.float32)
#: Maximum width of a mean and radius of a derivative that fit into the registers of the marching kernels.
_MAX_MEAN, _MAX_RADIUS = 32, 16
#: Block sizes of march_lines, and its maximum number of lines in shared memory at a time.
_MARCH_THREADS, _LINES = (256, 512), 32
#: Minimum number of rows (or lines) that a march produces; it reads s - 1 more ahead of them.
_MIN_ROWS = 128


@functools.lru_cache(maxsize=64)
def gaussian_weights(s_z: float, order: int) -> np.ndarray:
    """Return one half of the weights of a derivative of a Gaussian, which is even or odd.

    Returns: Weights of the voxels at offsets 0, 1, ..., radius: those of SciPy's ``gaussian_filter1d``, cut off at 4
    standard deviations. Offset -k has the same weight, with the opposite sign for an odd order. Read-only, since it is
    cached.
    """
    radius = int(4.0 * s_z + 0.5)
    x = np.arange(-radius, radius + 1)
    gaussian = np.exp(-0.5 / s_z**2 * x**2)
    gaussian /= gaussian.sum()
    # (q g)' = (q' - q x / s²) g
    factor, slope = np.polynomial.Polynomial([1.0]), np.polynomial.Polynomial([0.0, -1.0 / s_z**2])
    for _ in range(order):
        factor = factor.deriv() + factor * slope
    # Convolution flips the kernel.
    weights: np.ndarray = (factor(-x) * gaussian)[radius:].astype(np.float32)
    weights.setflags(write=False)
    return weights


@dataclass(frozen=True)
class InterfaceLayout:
    """The memory order of a volume, and the kernels for it.

    `a`, `b`, `z`: axes: outer and inner lateral axis, depth. `depth_inner`: whether depth is the innermost axis in
    memory. `kind`: the kernels: ``"tiles"`` (b innermost) or ``"lines"`` (depth innermost), of two launches; ``"any"``,
    of three launches, if these would need more shared memory than a block has.
    """

    a: int
    b: int
    z: int
    depth_inner: bool
    kind: str


def choose_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], depth_axis: int, s_xy: int, radius: int
) -> InterfaceLayout:
    """Choose the kernels for a volume by its strides; pure."""
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


def interface_by_kernels(vol: Array, options: SurfaceOptions) -> tuple[Array, Array | None]:
    """Find the surface of a checked volume; see :func:`~linumpy.gpu.oct.surface_filters.interface_by_filters`."""
    xp = array_module(vol)
    if any(stride % vol.itemsize for stride in vol.strides):
        vol = xp.ascontiguousarray(vol)
    weights = _weights_on_device(xp, float(options.s_z), options.order)
    smoothing = _weights_on_device(xp, float(options.s_z), 0) if options.cutting_errors else weights
    layout = choose_layout(vol.shape, vol.strides, options.depth_axis, int(options.s_xy), len(weights) - 1)
    return _SurfaceRun(xp, vol, layout, options, (weights, smoothing)).surface()


def _weights_on_device(xp: ModuleType, s_z: float, order: int) -> Array:
    if xp is np:
        return gaussian_weights(s_z, order)
    return _uploaded_weights(s_z, order, current_queue()).get()


@functools.lru_cache(maxsize=64)
def _uploaded_weights(s_z: float, order: int, queue: tuple[int, int, int]) -> Uploaded:
    """Upload weights, once for each stream."""
    import cupy

    return uploaded(cupy.asarray(gaussian_weights(s_z, order)))


class _SurfaceRun:
    """The launches for one volume.

    `s` is the width of the lateral mean in voxels. `log` is the definition LOG of the kernels, `kind` their definitions
    CUTTING and EDGE. `shape` and `stride` (in elements) are along (a, b, z), `out_stride` along (a, b). `weights` are
    those of the derivative and of the Gaussian; the latter are used only for cutting errors.
    """

    def __init__(
        self,
        xp: ModuleType,
        vol: Array,
        layout: InterfaceLayout,
        options: SurfaceOptions,
        weights: tuple[Array, Array],
    ) -> None:
        self.xp, self.vol, self.layout, self.s = xp, vol, layout, int(options.s_xy)
        self.options = options
        self.log = "0" if not options.use_log else "2" if options.edge or options.zero_log is not None else "1"
        self.kind = str(int(bool(options.cutting_errors))), str(int(options.edge))
        self.shape = vol.shape[layout.a], vol.shape[layout.b], vol.shape[layout.z]
        self.stride = tuple(vol.strides[axis] // vol.itemsize for axis in (layout.a, layout.b, layout.z))
        lateral = [n for axis, n in enumerate(vol.shape) if axis != layout.z]
        self.out: Array = xp.empty(lateral, np.float32 if options.edge else np.int32)
        self.contrast: Array | None = xp.empty(lateral, np.float32) if options.edge else None
        self.out_stride = tuple(stride // 4 for stride in self.out.strides)
        if layout.a > layout.b:
            self.out_stride = self.out_stride[::-1]
        self.radius = len(weights[0]) - 1
        self.weights = weights
        rule = np.array((options.s_z / 2, options.step_width, options.min_contrast), RULE)[()]
        self.rule = np.int32(options.order % 2), rule
        # Kernels read `zero` only if LOG is 2: otherwise any array will do.
        self.zero = self._log_of_zero() if self.log == "2" else self.weights[0]

    def _log_of_zero(self) -> Array:
        """Return the value for voxels without a logarithm, as a float32 on the device."""
        zero: Array
        if self.options.zero_log is not None:
            zero = self.xp.full(1, self.options.zero_log, np.float32)
            return zero
        zero = self.xp.empty(1, np.float32)
        args = (self.vol, zero, *int64(*self.stride), *int32(*self.shape))
        self._launch(kernel_spec("log_of_zero", self.vol.dtype, "0"), 1, 1024, args)
        return zero

    def surface(self) -> tuple[Array, Array | None]:
        """Start all launches; return the surface, and the contrast of edges or None. Does not wait for the device."""
        size_a, size_b, depth = self.shape
        volumes = 2 if self.layout.kind == "any" else 1
        rows = max(1, SCRATCH_BYTES // (4 * volumes * size_b * depth))
        if self.layout.kind == "tiles" and rows > _TILE_A:
            rows -= rows % _TILE_A
        scratch = [self.xp.empty(min(rows, size_a) * size_b * depth, np.float32) for _ in range(volumes)]
        launches: dict[str, Callable[..., None]] = {"tiles": self._tiles, "lines": self._lines, "any": self._any}
        for first in range(0, size_a, rows):
            launches[self.layout.kind](first, min(rows, size_a - first), *scratch)
            self._second_pass(first, min(rows, size_a - first), scratch[0])
        return self.out, self.contrast

    def _second_pass(self, first: int, count: int, mean: Array) -> None:
        """Process A-lines without a clear edge again; threads of the other A-lines return at once."""
        second = self.options.second_pass
        if second is None:
            return
        _, size_b, depth = self.shape
        weights, smoothing = (_weights_on_device(self.xp, second.s_z, order) for order in (1, 0))
        rule = np.array((0, second.step_width, second.min_contrast), RULE)[()]
        line = (size_b * depth, depth, 1) if self.layout.depth_inner else (size_b, 1, count * size_b)
        args = (
            *(self.vol, mean, *self._from_row(first), weights, smoothing, np.int32(len(weights) - 1), rule),
            *(np.float32(second.s_z), self.zero, *int64(*self.stride, *line)),
            *(*int32(self.shape[0], first, count, size_b, depth), *int64(*self.out_stride), *int32(second.s_xy)),
        )
        spec = kernel_spec("look_again", self.vol.dtype, self.log, self.kind)
        self._launch(spec, -(-count * size_b // _THREADS), _THREADS, args)

    def _launch(self, spec: KernelSpec, blocks: int, threads: int, args: tuple[Any, ...], shared: int = 0) -> None:
        load(spec)((blocks,), (threads,), args, shared_mem=shared)

    def _steepest(self, name: str, first: int, mean: Array, blocks: int, sizes: tuple[Any, ...], words: int) -> None:
        """Find the maximum of each profile; `words`: shared memory in words of 4 bytes."""
        args = (mean, *self._from_row(first), *self.weights, np.int32(self.radius), *self.rule, *sizes)
        threads = _LINE_THREADS if name == "steepest_lines" else _THREADS
        self._launch(kernel_spec(name, _FLOAT, "0", self.kind), blocks, threads, args, 4 * words)

    def _marches(self) -> bool:
        """Return whether the registers of the marching kernels hold the window."""
        return MARCH and self.s <= _MAX_MEAN and 1 <= self.radius <= _MAX_RADIUS

    def _march_mean(self, name: str, first: int, count: int, mean: Array) -> None:
        """Start march_strip, the mean over s x s voxels if b is contiguous, or march_rows, along a if depth is."""
        size_a, size_b, depth = self.shape
        # A march produces a segment of rows, so that these and the s - 1 rows ahead of them are whole groups.
        segment = -(-(_MIN_ROWS + self.s - 1) // _GROUP) * _GROUP - (self.s - 1)
        segments = -(-count // segment)
        if name == "march_strip":
            across, planes = -(-size_b // _THREADS), depth
            sizes: tuple[Any, ...] = (*int32(size_a, size_b, first, count), *uint32(across, segments))
        else:
            across, planes = -(-size_b * depth // _THREADS), 1
            sizes = (*int32(size_a, first, count, depth), *int64(size_b * depth), *uint32(across))
        args = (self.vol, mean, *int64(*self.stride), *sizes, *int32(segment), self.zero)
        spec = march_spec(name, self.vol.dtype, log=self.log, s=self.s)
        self._launch(spec, across * segments * planes, _THREADS, args)

    def _march_search(self, first: int, mean: Array, spec: KernelSpec, blocks: int, threads: int, *sizes: Any) -> None:
        """Find the maximum of each profile in the output of :meth:`_march_mean`."""
        args = (mean, *self._from_row(first), *self.weights, *self.rule, *sizes, *int64(*self.out_stride))
        self._launch(spec, blocks, threads, args)

    def _tiles(self, first: int, count: int, mean: Array) -> None:
        size_a, size_b, depth = self.shape
        if self._marches():
            self._march_mean("march_strip", first, count, mean)
            spec = march_spec("march_columns", _FLOAT, kind=self.kind, radius=self.radius)
            sizes: tuple[Any, ...] = (*int64(count * size_b), *int32(count, size_b, depth))
            self._march_search(first, mean, spec, -(-count * size_b // _LINE_THREADS), _LINE_THREADS, *sizes)
            return
        tiles_a, tiles_b = -(-count // _TILE_A), -(-size_b // _TILE_B)
        sizes = (*int64(*self.stride), *int32(size_a, size_b, first, count), *uint32(tiles_a, tiles_b))
        args = (self.vol, mean, *sizes, *int32(self.s), self.zero)
        spec = kernel_spec("mean_tile", self.vol.dtype, self.log)
        self._launch(spec, tiles_a * tiles_b * depth, _THREADS, args, 4 * _tile_words(self.s))
        self._columns(first, count, mean, (size_b, 1, count * size_b))

    def _lines(self, first: int, count: int, mean: Array) -> None:
        _, size_b, depth = self.shape
        # march_lines has a thread for each voxel of depth, of which there must be enough for a group.
        if self._marches() and self.radius + _GROUP <= depth <= _MARCH_THREADS[-1]:
            self._march_mean("march_rows", first, count, mean)
            segment = -(-_MIN_ROWS // _LINES) * _LINES
            segments = -(-size_b // segment)
            threads = next(n for n in _MARCH_THREADS if depth <= n)
            spec = march_spec("march_lines", _FLOAT, kind=self.kind, s=self.s, radius=self.radius, threads=threads)
            sizes: tuple[Any, ...] = (*int32(size_b, depth), *uint32(segments), *int32(segment))
            self._march_search(first, mean, spec, count * segments, threads, *sizes)
            return
        self._along_a(first, count, mean, lanes_axis=2, to=(size_b * depth, 1, depth))
        groups = -(-size_b // _GROUP)
        counts = (*int32(size_b, depth), *uint32(groups), *int64(*self.out_stride), *int32(self.s))
        self._steepest("steepest_lines", first, mean, count * groups, counts, _lines_words(depth, self.radius))

    def _any(self, first: int, count: int, mean_a: Array, mean: Array) -> None:
        """Start three kernels: mean along a, mean along b, profile. The means keep the memory order of the volume."""
        size_b, depth = self.shape[1:]
        spec, sizes = kernel_spec("mean_along", _FLOAT, "0"), (size_b, 0, size_b)
        if self.layout.depth_inner:
            a, b, z = size_b * depth, depth, 1
            self._along_a(first, count, mean_a, 2, (a, z, b))
            self._along(spec, mean_a, mean, (b, z, a, b, z, a), sizes, depth, count)
        else:
            a, b, z = size_b, 1, count * size_b
            self._along_a(first, count, mean_a, 1, (a, b, z))
            self._along(spec, mean_a, mean, (b, a, z, b, a, z), sizes, count, depth)
        self._columns(first, count, mean, (a, b, z))

    def _along_a(self, first: int, count: int, mean: Array, lanes_axis: int, to: tuple[int, int, int]) -> None:
        """Compute logarithm and mean along a; `to`: output strides along a, the axis of lanes and the third axis."""
        outer_axis = 3 - lanes_axis
        strides = self.stride[0], self.stride[lanes_axis], self.stride[outer_axis], *to
        spec, sizes = kernel_spec("mean_along", self.vol.dtype, self.log), (self.shape[0], first, count)
        self._along(spec, self.vol, mean, strides, sizes, self.shape[lanes_axis], self.shape[outer_axis])

    def _along(
        self,
        spec: KernelSpec,
        source: Array,
        target: Array,
        strides: tuple[int, ...],
        sizes: tuple[int, int, int],
        lane_size: int,
        outer_size: int,
    ) -> None:
        lanes = min(64, 1 << (lane_size - 1).bit_length())
        groups = -(-sizes[2] // _GROUP)
        blocks_m, blocks_i = -(-groups // (_THREADS // lanes)), -(-lane_size // lanes)
        numbers = (*int64(*strides), *int32(*sizes, lane_size), *uint32(lanes, blocks_i, blocks_m))
        args = (source, target, *numbers, *int32(self.s), self.zero)
        self._launch(spec, blocks_m * blocks_i * outer_size, _THREADS, args)

    def _columns(self, first: int, count: int, mean: Array, strides: tuple[int, int, int]) -> None:
        _, size_b, depth = self.shape
        sizes = (*int64(*strides), *int32(count, size_b, depth), *int64(*self.out_stride))
        words = (self.radius + 1) * (1 + int(self.kind[0]))
        self._steepest("steepest_columns", first, mean, -(-count * size_b // _THREADS), sizes, words)

    def _from_row(self, first: int) -> tuple[Array, Array]:
        """Return views of surface and contrast from row `first` along a on; in place of no contrast, any array."""
        part = slice(first, None) if self.layout.a < self.layout.b else (slice(None), slice(first, None))
        return self.out[part], self.weights[0] if self.contrast is None else self.contrast[part]


def kernel_spec(name: str, source: np.dtype, log: str, kind: tuple[str, str] = ("0", "0")) -> KernelSpec:
    """Choose a kernel of surface.cu; `kind` holds its definitions CUTTING and EDGE."""
    defines = (("SOURCE", CUDA_TYPES[source.str[1:]]), ("LOG", log), ("CUTTING", kind[0]), ("EDGE", kind[1]))
    return KernelSpec("surface", name, defines, "linumpy.gpu.oct.cuda")


def march_spec(
    name: str,
    source: np.dtype,
    *,
    log: str = "0",
    kind: tuple[str, str] = ("0", "0"),
    s: int = 1,
    radius: int = 1,
    threads: int = _MARCH_THREADS[0],
) -> KernelSpec:
    """Choose a kernel of surface_march.cu; definitions that the kernel ignores keep their defaults."""
    values = (CUDA_TYPES[source.str[1:]], log, *kind, str(s), str(radius), str(threads))
    names = ("SOURCE", "LOG", "CUTTING", "EDGE", "S", "RADIUS", "THREADS")
    return KernelSpec("surface_march", name, tuple(zip(names, values, strict=True)), "linumpy.gpu.oct.cuda")
