"""Sample many images of one shape, each through its own affine map, in one call.

In: images (N, ...) of two or three axes of space, and maps from voxels to coordinates. Out: samples, in the memory
(host or device) of the images. The images are joined along their first axis of space, with mirrored margins between
them: each coordinate in an image has a coordinate in the joined image, so that one launch samples all images.
"""

from __future__ import annotations

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.gpu.ndimage.transform import map_coordinates, spline_filter1d

#: Voxels of the margin of an image: a cubic spline at a coordinate up to one voxel outside needs three.
_MARGIN = 3


class StackedImages:
    """Images that are sampled together.

    - `images` (N, [Z,] Y, X): floating-point numbers, all finite.
    - `order` (1, 3): order of the spline.
    - `outside` ("mirror", "zero"): voxels outside of images. ``"mirror"`` holds for up to a voxel; further outside
      samples have no meaning. ``"zero"`` needs order 1.
    """

    def __init__(self, images: Array, order: int, outside: str = "mirror") -> None:
        xp = array_module(images)
        self.shape, self.order = images.shape[1:], order
        coefficients = images
        if order > 1:
            for axis in range(1, images.ndim):
                coefficients = spline_filter1d(coefficients, order, axis, coefficients.dtype, "mirror")
        widths = [(0, 0), (_MARGIN, _MARGIN), *[(0, 0)] * (images.ndim - 2)]
        self._mode = "mirror" if outside == "mirror" else "constant"
        padded = xp.pad(coefficients, widths, mode="reflect" if outside == "mirror" else "constant")
        self._pitch = self.shape[0] + 2 * _MARGIN
        self._joined = padded.reshape((-1, *self.shape[1:]))

    def sample(self, maps: np.ndarray, images: np.ndarray, rows: slice) -> Array:
        """Sample images on rows of a grid: (M, rows, [Y,] X), in the dtype of the images.

        - `maps` (M, rank, rank + 1): coordinates in an image are ``map @ (voxel, 1)``.
        - `images` (M,): the image that each map samples.
        - `rows`: along the first axis of space; along the other axes the grid has the size of the images.
        """
        return map_coordinates(
            self._joined, self._coordinates(maps, images, rows),
            order=self.order, mode=self._mode, prefilter=False,
        )  # fmt: skip

    def _coordinates(self, maps: np.ndarray, images: np.ndarray, rows: slice) -> Array:
        """Compute coordinates in the joined image, in float64: float32 is too coarse for large coordinates."""
        xp, rank = array_module(self._joined), len(self.shape)
        grid = (rows.stop - rows.start, *self.shape[1:])
        lines = [xp.arange(n, dtype=np.float64) for n in grid]
        lines[0] += rows.start
        out = xp.empty((rank, len(maps), *grid), np.float64)
        weights = xp.asarray(np.ascontiguousarray(maps.transpose(1, 2, 0), np.float64))
        column = (-1, *[1] * rank)
        for axis in range(rank):
            total = weights[axis, rank].reshape(column)
            for k, line in enumerate(lines):
                along = [1] * (rank + 1)
                along[k + 1] = -1
                total = total + weights[axis, k].reshape(column) * line.reshape(along)
            out[axis] = total
        xp.clip(out[0], -1, self.shape[0], out=out[0])
        out[0] += xp.asarray(images * self._pitch + _MARGIN, np.float64).reshape(column)
        return out
