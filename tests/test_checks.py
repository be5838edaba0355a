"""If this fails, invalid arguments pass, or errors do not name the argument, its value and what is allowed."""

import numpy as np
import pytest

from linumpy import checks


@pytest.mark.parametrize("value", [0, 5, np.uint8(5), np.int64(3)])
def test_integers_become_pythons_own(value):
    number = checks.integer("n", value, 0, 5)
    assert number == value
    assert type(number) is int
    assert checks.is_integer(value)
    assert checks.is_number(value)


@pytest.mark.parametrize("value", [True, np.True_, 1.0, np.float32(1), "1", None])
def test_what_is_no_integer(value):
    assert not checks.is_integer(value)
    with pytest.raises(TypeError, match=r"^levels=.*: an integer from 1 on is needed$"):
        checks.integer("levels", value, 1)


@pytest.mark.parametrize(("value", "limits", "text"), [
    (-1, (0,), "size=-1: an integer from 0 on is needed"),
    (6, (0, 5), "size=6: an integer from 0 up to 5 is needed"),
    (6, (None, 5), "size=6: an integer up to 5 is needed"),
    (np.int8(-1), (0, 5), "size=-1: an integer from 0 up to 5 is needed"),
])  # fmt: skip
def test_integers_out_of_range(value, limits, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        checks.integer("size", value, *limits)


def test_the_meaning_is_named():
    with pytest.raises(ValueError, match=r"^bytes=0: a number of bytes from 1 on is needed"):
        checks.integer("bytes", 0, 1, meaning="a number of bytes")


@pytest.mark.parametrize(("value", "is_number"), [
    (1.5, True), (np.float32(1), True), (np.int8(1), True), (True, False), (np.True_, False), ("1", False), (1j, False),
])  # fmt: skip
def test_numbers(value, is_number):
    assert checks.is_number(value) is is_number
