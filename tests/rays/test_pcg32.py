"""If this fails, a seed gives other random numbers than the reference implementation."""

import numpy as np
import pytest

from linumpy.rays import PCG32
from tests.support.oracles.slow_rays import SlowPcg32

#: First numbers that O'Neill's pcg32-demo prints for seed 42, stream 54.
DEMO = [0xA15C02B7, 0x7B47F409, 0xBA1D3330, 0x83D2F293, 0xBFA4784B, 0xCBED606E]


def following(rng):
    number = int(rng.numbers(np.arange(1), 1, 1)[0, 0])
    rng.advance(1)
    return number


def test_the_numbers_of_the_reference_implementation():
    rng = PCG32.seeded(42, 54)
    assert [following(rng) for _ in range(6)] == DEMO
    slow = SlowPcg32(42, 54)
    assert [slow.next() for _ in range(6)] == DEMO


@pytest.mark.parametrize(("seed", "stream"), [(0, 0), (2**64 - 1, 2**63 - 1), (12345678901234567, 1)])
def test_other_seeds_and_streams(seed, stream):
    rng, slow = PCG32.seeded(seed, stream), SlowPcg32(seed, stream)
    assert [following(rng) for _ in range(50)] == [slow.next() for _ in range(50)]


@pytest.mark.parametrize("delta", [0, 1, 2, 7, 8, 1000, 4097])
def test_a_jump_is_that_many_steps(delta):
    stepped, jumped = PCG32.seeded(5, 9), PCG32.seeded(5, 9)
    for _ in range(delta):
        following(stepped)
    jumped.advance(delta)
    assert jumped == stepped
    jumped.advance(-delta)
    assert jumped == PCG32.seeded(5, 9)


def test_huge_jumps_add_up():
    one, other = PCG32.seeded(1), PCG32.seeded(1)
    one.advance(2**63 + 12345)
    other.advance(2**63)
    other.advance(12345)
    assert one == other
    other.advance(-(2**63) - 12345)
    assert other == PCG32.seeded(1)


def test_parts_of_the_sequence():
    rng, slow = PCG32.seeded(3, 4), SlowPcg32(3, 4)
    expected = np.array([slow.next() for _ in range(8 * 100)]).reshape(100, 8)
    indices = np.array([99, 0, 7, 50])
    before = PCG32(rng.state, rng.inc)
    assert np.array_equal(rng.numbers(indices, 8, 5), expected[indices, :5].T)
    assert rng == before
