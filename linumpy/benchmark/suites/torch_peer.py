"""``torch.nn.functional.grid_sample`` beside our sampling, where PyTorch is installed.

In: an image, coordinates in voxels. Out: a call that samples the image there, in the same memory (DLPack).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from linumpy.benchmark.runner import CannotRunError, Check, Prepared
from linumpy.device import array_module, is_device_array


@contextmanager
def grid_sample(image: Any, coordinates: Any, check: Check) -> Iterator[Prepared]:
    """Prepare linear sampling by PyTorch.

    Parameters
    ----------
    image : cupy.ndarray or numpy.ndarray of float32, (Z, Y, X)
        No axis of one voxel.
    coordinates : cupy.ndarray or numpy.ndarray of float32, (3, ...)
        (z, y, x), in voxels.
    check : callable
        Of the result, in the shape of the coordinates.

    Raises
    ------
    CannotRunError
        Without PyTorch, or where it does not see the GPU.

    Notes
    -----
    PyTorch takes coordinates from -1 to 1, x first, in another layout: they are brought into it here, not in the call.
    """
    try:
        import torch
    except ImportError as error:
        raise CannotRunError("torch is not installed: pip install torch") from error
    if is_device_array(image) and not torch.cuda.is_available():
        raise CannotRunError("torch does not see the GPU")
    xp = array_module(image)
    steps = zip((2, 1, 0), reversed(image.shape), strict=True)
    grid = xp.stack([coordinates[axis] * xp.float32(2 / (n - 1)) - xp.float32(1) for axis, n in steps], axis=-1)
    # PyTorch wants a batch, and three axes of coordinates.
    grid = torch.from_dlpack(grid.reshape((1,) * (4 - (coordinates.ndim - 1)) + grid.shape))
    volume = torch.from_dlpack(image[None, None])
    options = {"mode": "bilinear", "padding_mode": "zeros", "align_corners": True}

    def check_array(result: Any) -> str:
        return check(xp.from_dlpack(result).reshape(coordinates.shape[1:]))

    yield Prepared(lambda: torch.nn.functional.grid_sample(volume, grid, **options), check_array)
