"""Compute the coefficients of B-splines of order 2 to 5 of an image on the device.

In: an image of any rank. Out: the coefficients of SciPy's ``spline_filter``, float32 or float64. The kernels of
``spline.cu`` filter one axis after another; for orders 4 and 5, whose filters have two poles, one pole after another.
Kernels do not depend on shapes. A line is the voxels along the filtered axis. Temporary memory beside the result: about
a fiftieth of it for few, long lines, and a copy of an image that is to be padded and is not contiguous.

In float32 the error of samples is at most 1e-5 of the range if float32 holds the dtypes of image and result exactly.
The worst case is a checkerboard, whose coefficients of order 5 are 420 times as large as its voxels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from linumpy.arrays import Array, array_module
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, index_type, int32, int64, load, needs_float64

#: `fold` of spline.cu, by mode. SciPy has three filters, which serve all modes.
_FOLDS = {"mirror": 0, "constant": 0, "grid-constant": 0, "wrap": 0, "reflect": 1, "nearest": 1, "grid-wrap": 2}
#: The poles of the filter, by order (M. Unser, IEEE Signal Processing Magazine 16(6), 1999).
POLES = {
    2: (math.sqrt(8) - 3,),
    3: (math.sqrt(3) - 2,),
    4: (
        math.sqrt(664 - math.sqrt(438976)) + math.sqrt(304) - 19,
        math.sqrt(664 + math.sqrt(438976)) - math.sqrt(304) - 19,
    ),
    5: (
        math.sqrt(67.5 - math.sqrt(4436.25)) + math.sqrt(26.25) - 6.5,
        math.sqrt(67.5 + math.sqrt(4436.25)) - math.sqrt(26.25) - 6.5,
    ),
}
#: MEMORY of spline.cu, by the absolute value of the pole: (upper bound, voxels for float32, for float64). After so many
#: voxels the initial value of a recursion has decayed to 1e-7 (float32) or 1e-17 (float64).
_MEMORY = ((0.05, 16, 16), (0.2, 16, 24), (0.3, 16, 32), (0.4, 16, 40), (0.5, 32, 48))
#: SHORT of spline.cu, by order: maximum length of axes that are filtered by a matrix, made by SciPy. In mode reflect
#: SciPy's initial values of short axes have an extra term (order 3: up to 6e-4 of the range at 2 voxels, below 1e-9
#: from 8 on; order 5: up to 1e-2, below 1e-11 from 16 on), which the matrix reproduces.
_SHORT = {2: 8, 3: 8, 4: 16, 5: 16}
#: Minimum length of a last axis that warps filter by reading along it.
_ROW = 32
#: With fewer lines than this, lines are cut into segments of at least this length, to occupy as many threads.
_ENOUGH_LINES, _SEGMENT = 2**16, 128
#: Kernels index the voxels of an axis, and some beyond its end, by 32 bits.
_LONGEST_AXIS = 2**29
#: Maximum padding: less than the kernels read ahead.
_LARGEST_PAD = 15


#: BLOCK, THREADS and RESIDENT of spline.cu, by kernel and whether it computes in double precision; they affect speed
#: only. A thread filters 8, 16 or 32 voxels of a line in one step; the minimum number of resident blocks per
#: multiprocessor limits its registers.
TUNING = {
    ("spline_columns", False): (8, 128, 8),
    ("spline_columns", True): (16, 128, 4),
    ("spline_rows", False): (32, 128, 4),
    ("spline_rows", True): (16, 128, 3),
}


@dataclass(frozen=True)
class Ends:
    """How an image is continued beyond its ends, and the order of its spline.

    `mode`: mode of SciPy's ``spline_filter``. `pad`: voxels by which the image is continued at either end of each axis
    before `mode` applies, 0 to 15. `cval`: value of the padding; None repeats the outermost voxels. `order`: spline
    order, 2 to 5.
    """

    mode: str
    pad: int = 0
    cval: float | None = None
    order: int = 3


def filtered(
    image: Array, ends: Ends, dtype: DTypeLike, out: Array | None = None, axes: Sequence[int] | None = None
) -> Array:
    """Compute the coefficients of an image in any memory order, in `out` or a new array; see :func:`filter_axes`."""
    if out is None:
        out = array_module(image).empty([n + 2 * ends.pad for n in image.shape], dtype)
    if not image.flags.c_contiguous and not ends.pad:  # filter the result in place: no second copy
        out[...] = image
        image = out
    filter_axes(array_module(image).ascontiguousarray(image), ends, out, axes)
    return out


def filter_axes(image: Array, ends: Ends, out: Array, axes: Sequence[int] | None = None) -> None:
    """Compute the coefficients of a spline.

    `image`: C-contiguous, not empty. With a pad, of one to three axes. `out` (float32 or float64): of the image's shape
    and twice the pad more along each axis; C-contiguous. It may be the image itself, and must not share memory with it
    otherwise. `axes`: axes to filter along; all by default, and always with a pad.

    `ValueError`: A pad or an axis that is too long for the kernels; a pad with more than three axes.
    """
    if max(image.shape, default=0) >= _LONGEST_AXIS:
        raise ValueError(f"an image of shape {image.shape}: splines are filtered along axes of less than 2^29 voxels")
    if not 0 <= ends.pad <= _LARGEST_PAD:
        raise ValueError(f"an image can be continued by 0 to {_LARGEST_PAD} voxels, not {ends.pad}")
    chosen = range(out.ndim) if axes is None else axes
    long_axes = [axis for axis in chosen if out.shape[axis] > 1]
    if not long_axes:
        if image is not out:
            out[...] = image
        return
    is_double = needs_float64(image.dtype, out.dtype)
    source = image
    for axis in long_axes:
        layout = _plan_pass(image.shape, axis, ends.pad, source is out)
        if layout.size + 2 * ends.pad <= _SHORT[ends.order] and not ends.pad:
            _filter_short(source, out, layout, ends, is_double)
        else:
            first, *others = POLES[ends.order]
            _filter_axis(source, out, layout, ends, first, is_double)
            for pole in others:  # the first pass has written the padding
                padded = _Pass(layout.size + 2 * ends.pad, layout.counts, layout.written, layout.written)
                _filter_axis(out, out, padded, Ends(ends.mode, order=ends.order), pole, is_double)
        source = out


@dataclass(frozen=True)
class _Pass:
    """One axis, and the lines along it; numbers of elements.

    `counts` (int, int): lines along the other axes, joined to two. `read`, `written` (int, int, int, int): for input
    and output: offset of the first line, strides between lines along the two other axes, stride between the voxels of a
    line.
    """

    size: int
    counts: tuple[int, int]
    read: tuple[int, ...]
    written: tuple[int, ...]

    @property
    def lines(self) -> int:
        return self.counts[0] * self.counts[1]


def _plan_pass(shape: Sequence[int], axis: int, pad: int, in_place: bool) -> _Pass:
    """Plan the pass along `axis` of an image whose earlier axes have been filtered.

    With a pad, the earlier axes have their padded size already; along later axes the image begins `pad` voxels into the
    output.
    """
    if not pad:
        outer, size, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
        layout = (0, size * inner, 1, inner)
        return _Pass(size, (outer, inner), layout, layout)
    grown = [n + 2 * pad for n in shape]
    steps = _element_strides(grown)
    others = [a for a in range(len(shape)) if a != axis]
    if len(others) > 2:
        raise ValueError(f"an image of {len(shape)} axes cannot be continued: up to three can")
    counts = [grown[a] if a < axis else shape[a] for a in others]
    missing = 2 - len(others)
    out_offset = sum(pad * steps[a] for a in others if a > axis)
    written = (out_offset, *[0] * missing, *(steps[a] for a in others), steps[axis])
    read = (out_offset + pad * steps[axis], *written[1:])
    if not in_place:
        plain = _element_strides(shape)
        read = (0, *[0] * missing, *(plain[a] for a in others), plain[axis])
    outer_count, inner_count = [1] * missing + counts
    return _Pass(shape[axis], (outer_count, inner_count), read, written)


def _element_strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _filter_short(source: Array, out: Array, layout: _Pass, ends: Ends, is_double: bool) -> None:
    """Filter an axis by a matrix, all poles at once."""
    matrix = array_module(out).asarray(_matrix(layout.size, ends.mode, ends.order))
    _, threads, _ = TUNING["spline_columns", is_double]
    lines = int64(layout.lines, layout.counts[1], *layout.read[1:], *layout.written[1:])
    args = (
        source.reshape(-1)[layout.read[0] :],
        out.reshape(-1)[layout.written[0] :],
        matrix,
        *int32(layout.size),
        *lines,
    )
    kernel = load(_spec("spline_short", source, out, ends.order, POLES[ends.order][0], is_double))
    kernel((-(-layout.lines // threads),), (threads,), args)


def _filter_axis(source: Array, out: Array, layout: _Pass, ends: Ends, pole: float, is_double: bool) -> None:
    """Apply one pole along an axis."""
    read, written = source.reshape(-1)[layout.read[0] :], out.reshape(-1)[layout.written[0] :]
    lines = int64(layout.lines, layout.counts[1], *layout.read[1:])
    padded_size = layout.size + 2 * ends.pad
    by_rows = layout.read[3] == 1 and layout.written[3] == 1 and layout.size >= _ROW
    name = "spline_rows" if by_rows else "spline_columns"
    block, threads, _ = TUNING[name, is_double]
    blocks = -(-layout.lines // threads)
    in_place = source is out
    segment, segments = _segments(padded_size, layout.lines, block)
    if in_place and ends.pad:  # the padding is computed from voxels that other segments may have overwritten
        segment, segments = padded_size, 1
    constant = ends.cval is not None
    axis = (*int32(layout.size, ends.pad, _FOLDS[ends.mode], constant), np.float64(ends.cval if constant else 0))
    states: Any = np.int64(0)  # a null pointer
    if in_place and segments > 1:
        states = array_module(out).empty((2, segments + 1, layout.lines), np.float64 if is_double else np.float32)
        _, width, _ = TUNING["spline_columns", is_double]
        across = -(-layout.lines // width)
        args = (read, states, *axis, *int32(segment, segments), np.uint32(across), *lines)
        kernel = load(_spec("spline_boundaries", source, out, ends.order, pole, is_double))
        kernel((across * (segments + 1),), (width,), args)
    if by_rows:
        step = 2 if layout.counts[1] > 1 else 1
        strides = int64(layout.lines, layout.read[step], layout.written[step])
    else:
        strides = (*lines, *int64(*layout.written[1:]))
    args = (read, written, states, *axis, *int32(segment, segments), np.uint32(blocks), *strides)
    load(_spec(name, source, out, ends.order, pole, is_double))((blocks * segments,), (threads,), args)


def _segments(padded_size: int, lines: int, block: int) -> tuple[int, int]:
    """Plan the segments of a line, their length and number: few lines are cut, to occupy enough threads."""
    count = min(padded_size // _SEGMENT, -(-_ENOUGH_LINES // lines) if lines < _ENOUGH_LINES else 1)
    if count < 2:
        return padded_size, 1
    segment = -(-padded_size // count)
    segment = -(-segment // block) * block
    return segment, -(-padded_size // segment)


@functools.lru_cache(maxsize=128)
def _matrix(size: int, mode: str, order: int) -> np.ndarray:
    """Return SciPy's filter of a short axis as a matrix."""
    from scipy.ndimage import spline_filter1d

    return np.ascontiguousarray(spline_filter1d(np.eye(size), order, axis=0, output=np.float64, mode=mode))


def _spec(name: str, source: Array, out: Array, order: int, pole: float, is_double: bool) -> KernelSpec:
    block, threads, resident = TUNING["spline_rows" if name == "spline_rows" else "spline_columns", is_double]
    defines = {
        "SOURCE": CUDA_TYPES[source.dtype.str[1:]],
        "TARGET": CUDA_TYPES[out.dtype.str[1:]],
        "COMPUTE": "double" if is_double else "float",
        "INDEX": index_type(max(source.size, out.size)),
        "POLE_VALUE": repr(pole),
        "MEMORY": str(next(memory[is_double] for largest, *memory in _MEMORY if -pole < largest)),
        "SHORT": str(_SHORT[order]),
        "BLOCK": str(block),
        "THREADS": str(threads),
        "RESIDENT": str(resident),
    }
    return KernelSpec("spline", name, tuple(defines.items()), "linumpy.gpu.ndimage.cuda")
