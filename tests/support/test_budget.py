"""If this fails, the short run leaves out a value of an argument."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.budget import matrix, shown, some


def short(cases):
    return [case.values for case in cases if not case.marks]


@pytest.mark.parametrize("sizes", [(1,), (3, 2), (2, 5, 3), (4, 4), (6, 1, 2)])
def test_a_matrix_is_whole_and_its_short_part_holds_every_value(sizes):
    axes = [range(size) for size in sizes]
    cases = matrix(*axes)
    assert len({case.values for case in cases}) == len(cases)
    assert all({case.values[i] for case in cases} == set(axis) for i, axis in enumerate(axes))
    assert all({values[i] for values in short(cases)} == set(axis) for i, axis in enumerate(axes))
    assert len(short(cases)) == max(sizes)
    assert all(mark.name == "slow" for case in cases for mark in case.marks)


def test_some_cases():
    assert short(some(range(5), lambda n: n % 2)) == [(1,), (3,)]
    assert short(some([(1, "a"), (2, "b")], lambda n, name: name == "b")) == [(2, "b")]


def test_what_is_shown_is_tried():
    tried = []

    @given(n=st.just(-1), name=st.just("drawn"))
    @shown(n=[1, 2, 3], name="ab")
    def test(n, name):
        tried.append((n, name))

    test()
    assert {(1, "a"), (2, "b"), (3, "a"), (-1, "drawn")} == set(tried)
