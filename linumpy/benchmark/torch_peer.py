"""``torch.nn.functional.grid_sample`` beside our sampling, where PyTorch is installed.

In: an image, places in voxels. Out: a call that samples the image there, in the same memory (DLPack).
"""

from __future__ import annotations

from typing import Any

from linumpy.benchmark.kernel_case import Check, Other
from linumpy.device import array_module, is_device_array


def grid_sample(image: Any, places: Any, check: Check) -> Other | None:
    """Prepare linear sampling by PyTorch.

    Parameters
    ----------
    image : cupy.ndarray or numpy.ndarray of float32, (Z, Y, X)
        No axis of one voxel.
    places : cupy.ndarray or numpy.ndarray of float32, (3, ...)
        (z, y, x), in voxels.
    check : callable
        Of the result, in the shape of the places.

    Returns
    -------
    Other or None
        None without PyTorch, or where it does not see the GPU. PyTorch takes places from -1 to 1, x first, in another
        layout: they are brought into it here, not in the call.
    """
    try:
        import torch
    except ImportError:
        return None
    if is_device_array(image) and not torch.cuda.is_available():
        return None
    xp = array_module(image)
    steps = zip((2, 1, 0), reversed(image.shape), strict=True)
    grid = xp.stack([places[axis] * xp.float32(2 / (n - 1)) - xp.float32(1) for axis, n in steps], axis=-1)
    # PyTorch wants a batch, and three axes of places.
    grid = torch.from_dlpack(grid.reshape((1,) * (4 - (places.ndim - 1)) + grid.shape))
    volume = torch.from_dlpack(image[None, None])
    options = {"mode": "bilinear", "padding_mode": "zeros", "align_corners": True}

    def judge(result: Any) -> str:
        return check(xp.from_dlpack(result).reshape(places.shape[1:]))

    return Other("torch", lambda: torch.nn.functional.grid_sample(volume, grid, **options), judge)
