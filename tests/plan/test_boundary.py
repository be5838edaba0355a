"""If this fails, voxels outside of an image are others than SciPy's."""

import numpy as np
import pytest
from scipy import ndimage

from linumpy.plan.boundary import MODES, fold, period


@pytest.mark.parametrize(
    ("mode", "size"), [(mode, size) for mode in MODES for size in (1, 2, 3, 7) if (mode, size) != ("wrap", 1)]
)
def test_voxels_are_those_that_scipy_takes(mode, size):
    index = np.arange(-3 * size - 2, 4 * size + 2)
    voxels = ndimage.map_coordinates(np.arange(float(size)), [index], order=0, mode=mode, cval=-1)
    if mode == "wrap":  # first and last voxel coincide, and rounding decides which of them SciPy takes
        voxels[voxels == size - 1] = 0
        inside = (index >= 0) & (index < size - 1)
        assert np.array_equal(fold(index, size, mode)[inside], index[inside])
    assert np.array_equal(fold(index, size, mode), voxels)


def test_sizes_of_many_rows_at_once():
    sizes, index = np.array([1, 2, 5]), np.tile(np.arange(-9, 12), (3, 1))
    for mode in MODES:
        rows = [fold(row, size, mode) for row, size in zip(index, sizes, strict=True)]
        assert np.array_equal(fold(index, sizes[:, None], mode), rows)


@pytest.mark.parametrize(("mode", "expected"), [("reflect", 10), ("mirror", 8), ("wrap", 4), ("grid-wrap", 5)])
def test_periods(mode, expected):
    assert period(5, mode) == expected
    assert period(1, mode) >= 1
