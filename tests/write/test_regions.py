"""If this fails, voxels are written to another region than they were given for, or wrong ones are taken."""

import numpy as np
import pytest

from linumpy.write.regions import checked_block, region_text

SHAPE, DTYPE = (4, 5, 6), np.dtype("i8")


def test_a_block_lies_in_its_box():
    values = np.arange(60).reshape(2, 5, 6)
    box, block = checked_block(np.s_[1:3], values, SHAPE, DTYPE)
    assert box == (slice(1, 3), slice(0, 5), slice(0, 6))
    assert block is values
    assert region_text(box) == "[1:3, 0:5, 0:6]"


def test_an_index_takes_its_axis_out_of_the_block():
    box, block = checked_block((-1, np.s_[2:4], 0), np.array([7, 8]), SHAPE, DTYPE)
    assert box == (slice(3, 4), slice(2, 4), slice(0, 1))
    assert block.shape == (1, 2, 1)
    assert block.ravel().tolist() == [7, 8]


def test_lists_are_arrays_and_the_byte_order_is_free():
    _, block = checked_block((0, 0, np.s_[:3]), [1, 2, 3], SHAPE, DTYPE)
    assert block.tolist() == [[[1, 2, 3]]]
    _, block = checked_block((0, 0, np.s_[:2]), np.array([1, 2], ">i8"), SHAPE, DTYPE)
    assert block.tolist() == [[[1, 2]]]


@pytest.mark.parametrize(
    ("region", "block", "error", "message"),
    [
        (np.s_[2:2], np.zeros((0, 5, 6), "i8"), ValueError, "no voxels to write"),
        (np.s_[:2], np.zeros((2, 5, 5), "i8"), ValueError, r"has shape \(2, 5, 6\), but the block has \(2, 5, 5\)"),
        (np.s_[:1], np.zeros((1, 5, 6), "i4"), TypeError, "the block is of int32, the image of int64"),
        ((0, 0), np.ma.masked_equal(np.arange(6), 3), TypeError, "masked voxels"),
    ],
)
def test_what_is_refused(region, block, error, message):
    with pytest.raises(error, match=message):
        checked_block(region, block, SHAPE, DTYPE)
