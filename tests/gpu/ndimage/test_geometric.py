"""If this fails, shift, zoom, rotate or deform move an image elsewhere than SciPy does (see test_random_calls.py)."""

import numpy as np
import pytest
from scipy import ndimage

from linumpy.gpu.ndimage.geometric import apply_displacement_field, compose_affine, shift


def image_of(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def test_a_field_of_zeros_changes_nothing_and_one_of_a_shift_moves():
    image = image_of((7, 8, 9))
    assert np.allclose(apply_displacement_field(image, np.zeros((3, 7, 8, 9))), image)
    field = np.empty((3, 7, 8, 9))
    field[:] = np.array([20.0, -10.0, 5.0]).reshape(3, 1, 1, 1)
    got = apply_displacement_field(image, field, spacing=(10, 10, 5), mode="nearest")
    assert np.allclose(got, ndimage.shift(image, (-2, 1, -1), order=1, mode="nearest"))


def test_ngff_transforms_are_composed_in_their_order():
    scale, move = {"type": "scale", "scale": [2, 3]}, {"type": "translation", "translation": [10, 20]}
    assert (compose_affine([scale, move], 2) @ [1, 1, 1]).tolist() == [12, 23, 1]
    assert (compose_affine([move, scale], 2) @ [1, 1, 1]).tolist() == [22, 63, 1]
    turn = {"type": "rotation", "rotation": [[0, -1], [1, 0]]}
    affine = {"type": "affine", "affine": [[1, 0, 5], [0, 1, 6]]}
    nested = {"type": "sequence", "transformations": [turn, affine]}
    assert (compose_affine([nested, {"type": "identity"}], 2) @ [1, 2, 1]).tolist() == [3, 7, 1]


@pytest.mark.parametrize("order", [0, 1, 3])
def test_an_output_may_share_memory_with_the_image(order):
    image, by = image_of((9, 10, 11)), (1.0, 2.0, -1.0)
    expected = shift(image, by, order=order)
    larger = np.concatenate([image, image[:1]])
    assert np.array_equal(shift(larger[:9], by, order=order, output=larger[1:]), expected)
    assert shift(image, by, order=order, output=image) is image
    assert np.array_equal(image, expected)
