"""The density of samples: uniform in a mask, as given, or the gradient magnitude of the volume.

In: ``mask`` and ``importance`` of :func:`linumpy.sampling.create_sampler`, and a field. Out: a
:class:`~linumpy.sampling.coordinates.draws.Draw` with weights. Errors: ``ValueError`` that names the argument.
"""

from __future__ import annotations

import numpy as np

from linumpy.arrays import Array
from linumpy.device import require_cuda, to_host
from linumpy.sampling.coordinates.draws import Draw, weighted
from linumpy.sampling.field import Field

#: Points along each axis at which ``importance="gradient"`` evaluates the field.
_GRADIENT_POINTS = 96


def weights_of(field: Field, mask: Array | None, importance: Array | str | None, device: int | None) -> Draw | None:
    """Return how points are drawn by `mask` or `importance`; None if both are None: points are uniform."""
    if mask is not None and importance is not None:
        raise ValueError("mask and importance: give one of them, such as importance=density * mask")
    if mask is not None:
        voxels = to_host(mask)
        if voxels.dtype.kind == "f" and np.isnan(voxels).any():
            raise ValueError("mask holds NaN, which is neither inside nor outside: give 0 or another number")
        return weighted(voxels != 0)
    if importance is None:
        return None
    if isinstance(importance, str):
        if importance != "gradient":
            raise ValueError(f"importance={importance!r}: give 'gradient' or a density (Z, Y, X)")
        return weighted(gradient_density(field, device))
    return weighted(to_host(importance).astype(np.float64))


def gradient_density(field: Field, device: int | None, points: int = _GRADIENT_POINTS) -> np.ndarray:
    """Compute the mean gradient magnitude of a field in each cell of a grid: (points / 4,) * 3, (Z, Y, X).

    The field is evaluated at `points` points along each axis, a multiple of 4. A tenth of the mean of all cells (1 for
    a constant field) is added, so that every cell is sampled.
    """
    axis = (np.arange(points, dtype=np.float32) + np.float32(0.5)) / np.float32(points)
    z, y, x = np.meshgrid(axis, axis, axis, indexing="ij")
    coords = np.stack([x, y, z], -1).reshape(-1, 3)
    values = np.empty((field.n_channels, len(coords)), field.values_dtype)
    if device is None:
        field.decode(coords, values)
    else:
        cupy = require_cuda()
        values_on_device = cupy.empty(values.shape, values.dtype)
        field.decode(cupy.asarray(coords), values_on_device)
        values = values_on_device.get()
    grids = np.nan_to_num(values.astype(np.float64)).reshape(-1, points, points, points)
    slopes = np.sqrt(sum(np.square(slope) for grid in grids for slope in np.gradient(grid)))
    coarse = slopes.reshape(points // 4, 4, points // 4, 4, points // 4, 4).mean((1, 3, 5))
    return coarse + (coarse.mean() * 0.1 or 1.0)
