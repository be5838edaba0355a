"""Ranges of a ring: no two that are in use share a byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from linumpy.plan.read.ring import ALIGN, Ring, ring_nbytes


@given(st.integers(0, 20), st.lists(st.tuples(st.integers(0, 8 * ALIGN), st.integers(0, 3)), max_size=80))
def test_ranges_in_use_never_overlap(blocks, steps):
    ring, live = Ring(blocks * ALIGN), []
    for nbytes, freed in steps:
        taken = ring.take(nbytes)
        if taken is not None:
            assert taken.offset % ALIGN == 0
            assert nbytes <= taken.nbytes < nbytes + ALIGN
            assert 0 <= taken.offset <= taken.offset + taken.nbytes <= ring.nbytes
            for other in live:
                assert taken.offset + taken.nbytes <= other.offset or other.offset + other.nbytes <= taken.offset
            live.append(taken)
        else:
            assert live or nbytes > ring.nbytes, "an empty ring refuses what it can hold"
        # Ranges become free in any order, and are reused in the order in which they were taken.
        for _ in range(min(freed, len(live))):
            one = live.pop(nbytes % len(live))
            one.free = True
        oldest = ring.oldest()
        assert oldest is None or not oldest.free
        assert (oldest is None) == (not live)
        assert oldest is None or oldest is live[0]


def test_what_is_freed_is_given_out_again():
    ring = Ring(4 * ALIGN)
    first, second = ring.take(2 * ALIGN), ring.take(2 * ALIGN)
    assert ring.take(1) is None
    second.free = True
    assert ring.take(1) is None, "the oldest is still in use"
    first.free = True
    assert ring.take(4 * ALIGN).offset == 0


@pytest.mark.parametrize(
    ("wanted", "limit", "size"), [(0, 2**30, 2**22), (2**22 + 1, 2**30, 2**23), (2**30, 5000, 5000)]
)
def test_size_of_a_ring(wanted, limit, size):
    assert ring_nbytes(wanted, limit) == size
