"""Sample an image of any number of axes on the device, in double precision: what the faster kernels do not take.

In: an image, or the box of one that is needed, and coordinates or an affine map, which need not be square. Out:
samples, by the kernel of ``general.cu``, of all orders (above 1 of spline coefficients) and modes of SciPy. It is
compiled for a rank and never for a shape. Temporary memory: none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, index_type, load
from linumpy.gpu.ndimage.sampling import Sampler
from linumpy.plan.boundary import MODES

#: Axes of an image, and of a grid: what a launch may be told at once is limited.
MOST_AXES = 16
_THREADS = 128


def sample_points(image: Any, coordinates: Any, how: Sampler, out: Any) -> None:
    """Sample at given coordinates.

    Parameters
    ----------
    image : cupy.ndarray
        C-contiguous, not empty.
    coordinates : cupy.ndarray of float32 or float64, (rank, ...)
        Coordinates in voxels, C-contiguous. Where one is NaN or infinite the result is the constant value, or NaN in
        other modes.
    how : Sampler
        Order, mode, constant value.
    out : cupy.ndarray
        C-contiguous, of the shape of a row of `coordinates`.
    """
    _launch(image, coordinates, how, out, ("whole", image.shape), ("start", (0,) * image.ndim))


def sample_affine(
    box: Any,
    matrix: np.ndarray,
    offset: np.ndarray,
    how: Sampler,
    out: Any,
    *,
    whole: Sequence[int] | None = None,
    box_start: Sequence[int] | None = None,
    out_start: Sequence[int] | None = None,
) -> None:
    """Sample on the grid of an affine map, all of it or a block: as :func:`linumpy.gpu.ndimage.sampling.sample_affine`.

    Parameters
    ----------
    matrix : numpy.ndarray, (rank, axes of the output)
        Coordinates are ``matrix @ voxel + offset``, summed in SciPy's order.
    offset : numpy.ndarray, (rank,)
        In voxels of the image.
    box, how, out, whole, box_start, out_start
        As there.
    """
    _launch(
        box,
        None,
        how,
        out,
        ("matrix", matrix),
        ("shift", offset),
        ("whole", whole or box.shape),
        ("start", box_start or (0,) * box.ndim),
        ("begin", out_start or (0,) * out.ndim),
        ("shape", out.shape),
    )


def _launch(image: Any, coordinates: Any, how: Sampler, out: Any, *fields: tuple[str, Any]) -> None:
    if not out.size:
        return
    rank, columns = image.ndim, 0 if coordinates is not None else out.ndim
    if max(rank, columns) > MOST_AXES:
        raise ValueError(f"an image of {rank} axes and a result of {out.ndim}: a GPU samples up to {MOST_AXES} of each")
    args = np.zeros(1, _request_dtype(rank, columns))
    args["count"], args["outside"], args["box"] = out.size, how.cval, image.shape
    for name, value in fields:
        args[name] = value
    spec = kernel_spec(image, coordinates, how, out, columns)
    blocks = -(-out.size // _THREADS)
    given = image if coordinates is None else coordinates
    load(spec)((blocks,), (_THREADS,), (image, given, out, args))


def _request_dtype(rank: int, columns: int) -> np.dtype:
    """Lay out the structure of general.cu; 0 columns for no map."""
    affine: list[Any] = [("matrix", "f8", (rank, columns)), ("shift", "f8", (rank,))] if columns else []
    block: list[Any] = [("begin", "i4", (columns,)), ("shape", "i4", (columns,))] if columns else []
    image: list[Any] = [(name, "i4", (rank,)) for name in ("whole", "start", "box")]
    return np.dtype([("count", "i8"), ("outside", "f8"), *affine, *image, *block], align=True)


def kernel_spec(image: Any, coordinates: Any, how: Sampler, out: Any, columns: int) -> KernelSpec:
    """Describe the kernel; `columns` are the axes of an affine map's grid, 0 for a list of coordinates."""
    defines = {
        "SOURCE": CUDA_TYPES[image.dtype.str[1:]],
        "TARGET": CUDA_TYPES[out.dtype.str[1:]],
        "COORDINATE": "double" if coordinates is None else CUDA_TYPES[coordinates.dtype.str[1:]],
        "RANK": str(image.ndim),
        "AFFINE": str(int(columns > 0)),
        "OUT_RANK": str(columns),
        "ORDER": str(how.order),
        "MODE": str(MODES.index(how.mode)),
        "PAD": str(how.pad),
        "INDEX": index_type(math.prod(image.shape)),
        "THREADS": str(_THREADS),
    }
    return KernelSpec("general", "sample_general", tuple(defines.items()), "linumpy.gpu.ndimage.cuda")
