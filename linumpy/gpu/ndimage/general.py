"""Sample an image of any number of axes on the device, in double precision, where the faster kernels do not apply.

In: an image, or a box of an image, and coordinates or an affine map, whose matrix need not be square. Above order 1 the
image holds spline coefficients. Out: samples, by the kernel of ``general.cu``, for all orders and modes of SciPy. The
kernel is compiled for a rank, never for a shape. Temporary memory: none. Errors: ``ValueError`` for more than 16 axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from linumpy.arrays import Array
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, index_type, load
from linumpy.gpu.ndimage.sampling import AffineMap, SplineSampling
from linumpy.plan.boundary import MODES

#: Maximum number of axes of an image, and of a grid: the size of kernel parameters is limited.
MAX_AXES = 16
_THREADS = 128


def sample_points(image: Array, coordinates: Array, how: SplineSampling, out: Array) -> None:
    """Sample at given coordinates.

    `coordinates` (float32 or float64, (rank, ...)): coordinates in voxels, C-contiguous. Where one is NaN or infinite,
    the result is the constant value in the constant modes, and NaN in the others. `out`: C-contiguous, of the shape of
    a row of `coordinates`.
    """
    _launch(image, coordinates, how, out, ("whole", image.shape), ("start", (0,) * image.ndim))


def sample_affine(
    box: Array,
    affine: AffineMap,
    how: SplineSampling,
    out: Array,
    *,
    whole: Sequence[int] | None = None,
    box_start: Sequence[int] | None = None,
    out_start: Sequence[int] | None = None,
) -> None:
    """Sample on the grid of an affine map, all of it or a block.

    `affine`: coordinates are summed in SciPy's order. `box`, `how`, `out`, `whole`, `box_start`, `out_start`: as for
    :func:`linumpy.gpu.ndimage.sampling.sample_affine`, but not for a stack.
    """
    _launch(
        box,
        None,
        how,
        out,
        ("matrix", affine.matrix),
        ("shift", affine.offset),
        ("whole", whole or box.shape),
        ("start", box_start or (0,) * box.ndim),
        ("begin", out_start or (0,) * out.ndim),
        ("shape", out.shape),
    )


def _launch(
    image: Array, coordinates: Array | None, how: SplineSampling, out: Array, *fields: tuple[str, ArrayLike]
) -> None:
    if not out.size:
        return
    rank, columns = image.ndim, 0 if coordinates is not None else out.ndim
    if max(rank, columns) > MAX_AXES:
        raise ValueError(
            f"an image of {rank} axes and a result of {out.ndim}: up to {MAX_AXES} of each are supported on a GPU"
        )
    args = np.zeros(1, _request_dtype(rank, columns))
    args["count"], args["outside"], args["box"] = out.size, how.cval, image.shape
    for name, value in fields:
        args[name] = value
    spec = kernel_spec(image, coordinates, how, out, columns)
    blocks = -(-out.size // _THREADS)
    # Without coordinates the kernel does not read them: any array will do.
    load(spec)((blocks,), (_THREADS,), (image, image if coordinates is None else coordinates, out, args))


def _request_dtype(rank: int, columns: int) -> np.dtype:
    """Return the dtype of the structure Request of general.cu; for coordinates, without a map, `columns` is 0."""
    affine = [("matrix", "f8", (rank, columns)), ("shift", "f8", (rank,))] if columns else []
    block = [("begin", "i4", (columns,)), ("shape", "i4", (columns,))] if columns else []
    image = [(name, "i4", (rank,)) for name in ("whole", "start", "box")]
    return np.dtype([("count", "i8"), ("outside", "f8"), *affine, *image, *block], align=True)


def kernel_spec(image: Array, coordinates: Array | None, how: SplineSampling, out: Array, columns: int) -> KernelSpec:
    """Return the kernel; `columns` is the number of axes of an affine map's grid, 0 for coordinates."""
    defines = {
        "SOURCE": CUDA_TYPES[image.dtype.str[1:]],
        "TARGET": CUDA_TYPES[out.dtype.str[1:]],
        "COORDINATE": "double" if coordinates is None else CUDA_TYPES[coordinates.dtype.str[1:]],
        "RANK": str(image.ndim),
        "AFFINE": str(int(columns > 0)),
        "OUT_RANK": str(columns),
        "ORDER": str(how.order),
        "MODE": str(MODES.index(how.mode)),
        **how.defines,
        "INDEX": index_type(math.prod(image.shape)),
        "THREADS": str(_THREADS),
    }
    return KernelSpec("general", "sample_general", tuple(defines.items()), "linumpy.gpu.ndimage.cuda")
