"""Turn an image on the device into the coefficients of its B-spline, of order 2 to 5.

In: an image of any rank. Out: coefficients, float32 or float64, as SciPy's ``spline_filter`` makes them, by kernels of
``spline.cu``, one axis after another, and of orders 4 and 5 one pole after another. No kernel is compiled for a shape.
Temporary memory: none beyond the result, but for long and few lines about a fiftieth of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.gpu.kernels import CUDA_TYPES, IN_FLOAT32, KernelSpec, index_type, int32, int64, load

#: How an axis goes on, by the number that the kernels give it. SciPy filters for the other modes as for one of these.
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
#: MEMORY of spline.cu: voxels after which a recursion has forgotten how it began, for poles up to a size; of float32 to
#: 1e-7 at least, of float64 to 1e-17.
_MEMORY = ((0.05, 16, 16), (0.2, 16, 24), (0.3, 16, 32), (0.4, 16, 40), (0.5, 32, 48))
#: SHORT of spline.cu, by order: axes of up to so many voxels are filtered by a matrix. In mode reflect SciPy begins
#: short axes with a term too many (order 3: up to 6e-4 of the range at 2 voxels, below 1e-9 from 8 on; order 5: up to
#: 1e-2, and below 1e-11 from 16 on), and its matrix has that too.
_SHORT = {2: 8, 3: 8, 4: 16, 5: 16}
#: A last axis of so many voxels is filtered by warps that read along it.
_ROW = 32
#: Lines of which there are fewer are cut, for so many threads, into segments of this length or more.
_ENOUGH_LINES, _SEGMENT = 2**16, 128
#: Kernels number the voxels of an axis, and of some behind its end, by 32 bits.
_LONGEST_AXIS = 2**29
#: Voxels that an image can be continued by: fewer than the kernels read ahead.
_LARGEST_PAD = 15


@dataclass(frozen=True)
class SplineTuning:
    """How a kernel is compiled.

    Attributes
    ----------
    block : int
        Voxels of a step: 8, 16 or 32.
    threads : int
        Of a block.
    resident : int
        Blocks that a multiprocessor must have registers for.
    """

    block: int
    threads: int
    resident: int

    @property
    def defines(self) -> dict[str, str]:
        """As the kernels name them."""
        return {"BLOCK": str(self.block), "THREADS": str(self.threads), "RESIDENT": str(self.resident)}


#: By the kernel, and whether it computes in double precision.
TUNING = {
    ("spline_columns", False): SplineTuning(8, 128, 8),
    ("spline_columns", True): SplineTuning(16, 128, 4),
    ("spline_rows", False): SplineTuning(32, 128, 4),
    ("spline_rows", True): SplineTuning(16, 128, 3),
}


@dataclass(frozen=True)
class Ends:
    """What lies beyond an image.

    Attributes
    ----------
    mode : str
        As SciPy's ``spline_filter`` takes it.
    pad : int
        Voxels by which the image is continued at either end of each axis before `mode` applies, 0 to 15.
    cval : float or None
        What it is continued by; None for its outermost voxels.
    order : int
        Of the spline, 2 to 5.
    """

    mode: str
    pad: int = 0
    cval: float | None = None
    order: int = 3


def filtered(
    image: Array, ends: Ends, dtype: Any, out: Array | None = None, axes: Sequence[int] | None = None
) -> Array:
    """Return the coefficients of an image of any layout, in `out` where it is given: see :func:`filter_axes`."""
    if out is None:
        out = array_module(image).empty([n + 2 * ends.pad for n in image.shape], dtype)
    if not image.flags.c_contiguous and not ends.pad:  # no copy beside the result
        out[...] = image
        image = out
    filter_axes(array_module(image).ascontiguousarray(image), ends, out, axes)
    return out


def coefficient_dtype(*dtypes: np.dtype) -> np.dtype:
    """Say in which dtype coefficients are kept, so that samples are within 1e-5 of the range.

    That is float32 where it holds the numbers of the image and of the result, and else float64: who asks for a result
    of float64, or of long integers, gets its digits. The worst image is a checkerboard: at order 5 its coefficients are
    420 times as large, and samples off by 6e-6.
    """
    return np.dtype(np.float32 if all(one.str[1:] in IN_FLOAT32 for one in dtypes) else np.float64)


def filter_axes(image: Array, ends: Ends, out: Array, axes: Sequence[int] | None = None) -> None:
    """Find the coefficients of a spline.

    Parameters
    ----------
    image : cupy.ndarray
        C-contiguous, not empty. With a pad, of one to three axes.
    ends : Ends
        What lies beyond it, and the order.
    out : cupy.ndarray of float32 or float64
        Of the image's shape and twice the pad more along each axis; C-contiguous. It may be the image itself, and must
        not share memory with it otherwise.
    axes : sequence of int, optional
        To filter along; all by default. With a pad, all.

    Raises
    ------
    ValueError
        A pad, or an axis, that is longer than the kernels number.
    """
    if max(image.shape, default=0) >= _LONGEST_AXIS:
        raise ValueError(f"an image of shape {image.shape}: splines are filtered along axes of less than 2^29 voxels")
    if not 0 <= ends.pad <= _LARGEST_PAD:
        raise ValueError(f"an image can be continued by 0 to {_LARGEST_PAD} voxels, not {ends.pad}")
    chosen = range(out.ndim) if axes is None else axes
    some = [axis for axis in chosen if out.shape[axis] > 1]
    if not some:
        if image is not out:
            out[...] = image
        return
    wide = coefficient_dtype(image.dtype, out.dtype) == np.float64
    source = image
    for axis in some:
        one = _pass(image.shape, axis, ends.pad, source is out)
        if one.size + 2 * ends.pad <= _SHORT[ends.order] and not ends.pad:
            _filter_short(source, out, one, ends, wide)
        else:
            first, *others = POLES[ends.order]
            _filter_axis(source, out, one, ends, first, wide)
            for pole in others:  # what was added is there by now
                again = _Pass(one.size + 2 * ends.pad, one.counts, one.written, one.written)
                _filter_axis(out, out, again, Ends(ends.mode, order=ends.order), pole, wide)
        source = out


@dataclass(frozen=True)
class _Pass:
    """One axis, and the lines along it; numbers of elements.

    Attributes
    ----------
    size : int
        Voxels of a line.
    counts : (int, int)
        Lines along the other axes.
    read, written : (int, int, int, int)
        Of the array that is read, and of the one that is written: where the first line begins, steps between lines, and
        between the voxels of a line.
    """

    size: int
    counts: tuple[int, int]
    read: tuple[int, int, int, int]
    written: tuple[int, int, int, int]

    @property
    def lines(self) -> int:
        return self.counts[0] * self.counts[1]


def _pass(shape: Sequence[int], axis: int, pad: int, in_place: bool) -> _Pass:
    """Lay out the pass along `axis` of an image whose axes before it have been filtered.

    Those are as long as they get; those behind it lie in the middle of what they will be.
    """
    if not pad:
        outer, size, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
        layout = (0, size * inner, 1, inner)
        return _Pass(size, (outer, inner), layout, layout)
    grown = [n + 2 * pad for n in shape]
    steps = _steps(grown)
    others = [a for a in range(len(shape)) if a != axis]
    if len(others) > 2:
        raise ValueError(f"an image of {len(shape)} axes cannot be continued: up to three can")
    count = [grown[a] if a < axis else shape[a] for a in others]
    missing = 2 - len(others)
    to = sum(pad * steps[a] for a in others if a > axis)
    written = (to, *[0] * missing, *(steps[a] for a in others), steps[axis])
    read = (to + pad * steps[axis], *written[1:])
    if not in_place:
        plain = _steps(shape)
        read = (0, *[0] * missing, *(plain[a] for a in others), plain[axis])
    one, two = [1] * missing + count
    return _Pass(shape[axis], (one, two), _four(read), _four(written))


def _steps(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _four(numbers: Sequence[int]) -> tuple[int, int, int, int]:
    a, b, c, d = numbers
    return a, b, c, d


def _filter_short(source: Array, out: Array, one: _Pass, ends: Ends, wide: bool) -> None:
    """Filter an axis by a matrix, all poles at once."""
    matrix = array_module(out).asarray(_matrix(one.size, ends.mode, ends.order))
    threads = TUNING["spline_columns", wide].threads
    lines = int64(one.lines, one.counts[1], *one.read[1:], *one.written[1:])
    args = (source.reshape(-1)[one.read[0] :], out.reshape(-1)[one.written[0] :], matrix, *int32(one.size), *lines)
    kernel = load(_spec("spline_short", source, out, ends.order, POLES[ends.order][0], wide))
    kernel((-(-one.lines // threads),), (threads,), args)


def _filter_axis(source: Array, out: Array, one: _Pass, ends: Ends, pole: float, wide: bool) -> None:
    """Apply one pole along an axis."""
    read, written = source.reshape(-1)[one.read[0] :], out.reshape(-1)[one.written[0] :]
    lines = int64(one.lines, one.counts[1], *one.read[1:])
    whole = one.size + 2 * ends.pad
    by_rows = one.read[3] == 1 and one.written[3] == 1 and one.size >= _ROW
    name = "spline_rows" if by_rows else "spline_columns"
    threads = TUNING[name, wide].threads
    blocks = -(-one.lines // threads)
    in_place = source is out
    segment, segments = _segments(whole, one.lines, TUNING[name, wide].block)
    if in_place and ends.pad:  # voxels at the image's ends are read for the pads when others may have written there
        segment, segments = whole, 1
    constant = ends.cval is not None
    axis = (*int32(one.size, ends.pad, _FOLDS[ends.mode], constant), np.float64(ends.cval if constant else 0))
    states: Any = np.int64(0)  # a null pointer
    if in_place and segments > 1:
        states = array_module(out).empty((2, segments + 1, one.lines), np.float64 if wide else np.float32)
        width = TUNING["spline_columns", wide].threads
        across = -(-one.lines // width)
        args = (read, states, *axis, *int32(segment, segments), np.uint32(across), *lines)
        kernel = load(_spec("spline_boundaries", source, out, ends.order, pole, wide))
        kernel((across * (segments + 1),), (width,), args)
    if by_rows:
        step = 2 if one.counts[1] > 1 else 1
        where = int64(one.lines, one.read[step], one.written[step])
    else:
        where = (*lines, *int64(*one.written[1:]))
    args = (read, written, states, *axis, *int32(segment, segments), np.uint32(blocks), *where)
    load(_spec(name, source, out, ends.order, pole, wide))((blocks * segments,), (threads,), args)


def _segments(whole: int, lines: int, block: int) -> tuple[int, int]:
    """Cut lines into segments, so that there are enough threads: their length and number."""
    wanted = min(whole // _SEGMENT, -(-_ENOUGH_LINES // lines) if lines < _ENOUGH_LINES else 1)
    if wanted < 2:
        return whole, 1
    segment = -(-whole // wanted)
    segment = -(-segment // block) * block
    return segment, -(-whole // segment)


@functools.lru_cache(maxsize=128)
def _matrix(size: int, mode: str, order: int) -> np.ndarray:
    """SciPy's filter of a short axis, as a matrix."""
    from scipy.ndimage import spline_filter1d

    return np.ascontiguousarray(spline_filter1d(np.eye(size), order, axis=0, output=np.float64, mode=mode))


def _spec(name: str, source: Array, out: Array, order: int, pole: float, wide: bool) -> KernelSpec:
    tuning = TUNING["spline_rows" if name == "spline_rows" else "spline_columns", wide]
    defines = {
        "SOURCE": CUDA_TYPES[source.dtype.str[1:]],
        "TARGET": CUDA_TYPES[out.dtype.str[1:]],
        "COMPUTE": "double" if wide else "float",
        "INDEX": index_type(max(source.size, out.size)),
        "POLE_VALUE": repr(pole),
        "MEMORY": str(next(memory[wide] for largest, *memory in _MEMORY if -pole < largest)),
        "SHORT": str(_SHORT[order]),
        **tuning.defines,
    }
    return KernelSpec("spline", name, tuple(defines.items()), "linumpy.gpu.ndimage.cuda")
