"""Others that resample, their images, and the truth: CuPy's and SciPy's ``ndimage``, PyTorch's ``grid_sample``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.benchmark.cases import CannotRunError, Check, Prepared
from linumpy.device import array_module, is_device_array, to_host

#: A turn about all axes, with a little scale.
# So many digits that no coordinate lies halfway between two voxels, where rounding alone would choose a label.
TURN = np.array(
    [
        [0.98031742, 0.11873921, -0.05171937],
        [-0.11057831, 0.97113743, 0.09041617],
        [0.06098351, -0.08071459, 0.99017273],
    ]
)


def speckled(xp: ModuleType, side: int, dtype: str) -> Any:
    """Smooth waves with speckle, 0 to 4000."""
    line = xp.sin(xp.linspace(0, 20, side, dtype=xp.float32))
    image = line[:, None, None] * line[None, :, None] * line[None, None, ::-1]
    noise = xp.random.RandomState(0).uniform(0, 1, (side, side)).astype(xp.float32)
    return ((image + 1) * 1500 + noise * 1000).astype(dtype)


def wrong_voxels(
    got: Any,
    some: np.ndarray,
    source: np.ndarray,
    truth: Callable[[np.ndarray], np.ndarray],
    relative: float = 1e-5,
) -> str:
    """Compare some voxels with SciPy in float64, relative to the range, and within 1 for integers that are rounded."""
    found = to_host(got.reshape(-1)[_index(got, some)]).astype(np.float64)
    expected = truth(source.astype(np.float64))
    tolerance = relative * float(source.max()) + (0.5 if got.dtype.kind in "iu" else 0)
    worst = float(np.abs(found - expected).max(initial=0))
    return "" if worst <= tolerance else f"off by {worst:.3g} where {tolerance:.2g} is allowed"


def _index(array: Any, some: np.ndarray) -> Any:
    if not is_device_array(array):
        return some
    import cupy

    return cupy.asarray(some)


def peer_module(array: Any) -> ModuleType:
    """Return CuPy's ``ndimage`` for its arrays, else SciPy's."""
    if not is_device_array(array):
        return scipy_module()
    import cupyx.scipy.ndimage as ndimage

    return ndimage


def scipy_module() -> ModuleType:
    """Return SciPy's ``ndimage``, the truth."""
    import scipy.ndimage as ndimage

    return ndimage


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
