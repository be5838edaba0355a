"""If this fails, a tile of the output gets too small a part of the image in shared memory, or a wrong inverse map."""

import itertools
import math

import numpy as np
import pytest

from linumpy.plan.grid.affine import plan_brick

TILE = (4, 8, 16)
IDENTITY = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
LIMIT = 2**17


def matrices(count):
    rng = np.random.default_rng(0)
    found = [np.eye(3) + rng.uniform(-0.4, 0.4, (3, 3)) for _ in range(count)]
    return [tuple(map(tuple, matrix.tolist())) for matrix in found if abs(np.linalg.det(matrix)) > 0.2]


def voxels_needed(matrix, order, offset):
    """Voxels along each axis between the first and the last neighbour of the coordinates of a tile."""
    corners = np.array(list(itertools.product(*((0, n - 1) for n in TILE))))
    coordinates = corners @ np.array(matrix).T + offset
    first = np.floor(coordinates.min(axis=0)).astype(int) - order // 2
    last = np.floor(coordinates.max(axis=0)).astype(int) + order // 2 + 1
    return last - first + 1


@pytest.mark.parametrize("order", [1, 3])
def test_a_brick_holds_all_neighbours_and_no_more(order):
    """Along X also those down to a multiple of four."""
    rng = np.random.default_rng(1)
    for matrix in [IDENTITY, *matrices(20)]:
        brick = plan_brick(matrix, order, TILE, 4, LIMIT)
        for offset in rng.uniform(0, 1, (200, 3)):
            assert (voxels_needed(matrix, order, offset) <= brick.shape - np.array((0, 0, 3))).all()
        z, y, x = (math.floor(n + 1e-5) + 2 + order for n in np.abs(matrix) @ (np.array(TILE) - 1))
        assert brick.shape == (z, y, x + 3)
        assert brick.shape[2] <= brick.pitch in (24, 40, 72)
        assert brick.nbytes == brick.shape[0] * brick.shape[1] * brick.pitch * 4


@pytest.mark.parametrize("order", [1, 3])
def test_the_kernel_gets_the_inverse_map(order):
    for matrix in matrices(20):
        numbers = np.array(plan_brick(matrix, order, TILE, 4, LIMIT).numbers)
        inverse = np.linalg.inv(matrix)
        np.testing.assert_allclose(numbers[:9].reshape(3, 3), inverse, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(numbers[9:12], 1 / inverse[:, 0], rtol=1e-9)
        # A point is at most so far from one of eight columns of a row that needs it.
        near = (order + 1) / 2
        np.testing.assert_allclose(numbers[12:], np.abs(inverse) @ (near, near, near + 3.5) + 0.01, rtol=1e-9)
    assert plan_brick(IDENTITY, order, TILE, 4, LIMIT).numbers[9:12] == (1 / IDENTITY[0][0], 0.0, 0.0)


def test_what_has_no_brick():
    shape = plan_brick(IDENTITY, 1, TILE, 4, LIMIT).shape
    nbytes = shape[0] * shape[1] * 24 * 4
    assert plan_brick(IDENTITY, 1, TILE, 4, nbytes).nbytes == nbytes
    assert plan_brick(IDENTITY, 1, TILE, 4, nbytes - 1) is None
    wide = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 5.0))
    assert plan_brick(wide, 1, TILE, 4, 2**30) is None  # a row is longer than any pitch
    flat = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 1.0, 0.009))
    assert plan_brick(flat, 1, TILE, 4, LIMIT) is None  # single precision is not sufficient for the inverse
    assert plan_brick(((np.inf, 0.0, 0.0), *IDENTITY[1:]), 1, TILE, 4, LIMIT) is None
