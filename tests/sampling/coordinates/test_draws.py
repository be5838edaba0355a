"""If this fails, a seed gives other samples than published numbers, SciPy and NumPy say."""

import itertools

import numpy as np
import pytest
from scipy import stats

from linumpy.gpu.philox import philox
from linumpy.sampling import threads
from linumpy.sampling.coordinates import draws, generator
from linumpy.sampling.coordinates.generator import Use
from tests.support.gpu.emulator import emulated

pytestmark = pytest.mark.needs_core

KEY = generator.key_of(2**40 + 17)

#: Random123, tests/kat_vectors, philox4x32 of 10 rounds.
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def density(shape=(3, 5, 4)):
    values = np.random.default_rng(0).random(shape)
    values[0, 0] = 0
    values[-1, -1, -1] = 0
    return values


DRAWS = {
    "iid": draws.Draw(),
    "stratified": draws.stratified(4),
    "sobol": draws.Draw(Use.SOBOL),
    "density": draws.weighted(density()),
    "mask": draws.weighted(density() > 0.5),
}


def drawn(how, first, count, key=KEY):
    coords = np.full((count, 3), np.nan, np.float32)
    draws.draw(how, key, first, coords)
    return coords


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_published_numbers(counter, key, words):
    assert tuple(int(word) for word in philox(counter, key)) == words


def test_sobol_is_scipys():
    expected = (stats.qmc.Sobol(3, scramble=False, bits=32).random(2**12) * 2**24).astype(int)
    bits = (drawn(DRAWS["sobol"], 0, 2**12) * 2**24).astype(int)
    assert np.array_equal(bits ^ bits[0], expected)  # the first point is the random shift alone


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("first", [0, 2**32 - 5, 2**40 + 3])
def test_the_kernel_is_the_host_bit_for_bit(name, first, monkeypatch):
    monkeypatch.setattr(draws, "load", emulated)
    coords = np.full((700, 3), np.nan, np.float32)
    draws.launch(DRAWS[name], KEY, first, coords)
    assert np.array_equal(coords, drawn(DRAWS[name], first, 700))


@pytest.mark.parametrize("name", DRAWS)
def test_streams_do_not_depend_on_batches(name):
    whole = drawn(DRAWS[name], 5, threads.BATCH + 100)
    parts = [drawn(DRAWS[name], 5 + begin, 100) for begin in range(0, threads.BATCH + 100, 100)]
    assert np.array_equal(whole, np.concatenate(parts)[: len(whole)])
    assert not np.array_equal(whole, drawn(DRAWS[name], 5, len(whole), generator.key_of(18)))
    assert whole.min() >= 0
    assert whole.max() <= 1
    assert len(np.unique(whole, axis=0)) == len(whole)


@pytest.mark.parametrize("as_mask", [True, False])
def test_weighted_points_stay_in_their_cells(as_mask, monkeypatch):
    # float32 rounds a coordinate just below the border of a cell up to the border, which belongs to the next cell.
    chosen = np.zeros((1, 1, 2**20), bool)
    chosen[0, 0, [2**19 - 1, 2**19 + 7, -1]] = True
    how = draws.weighted(chosen if as_mask else chosen.astype(float))
    coords = drawn(how, 0, 2000)
    at = np.floor(coords[:, ::-1].astype(np.float64) * chosen.shape).astype(int)
    assert (coords < 1).all()
    assert chosen[*at.T].all()
    monkeypatch.setattr(draws, "load", emulated)
    by_kernel = np.full_like(coords, np.nan)
    draws.launch(how, KEY, 0, by_kernel)
    assert np.array_equal(by_kernel, coords)


def chi_square(coords, cells, expected=None):
    """Probability of counts at least so uneven."""
    at = np.minimum((coords * np.array(cells[::-1], np.float32)).astype(int), np.array(cells[::-1]) - 1)
    counts = np.bincount(np.ravel_multi_index(at.T[::-1], cells), minlength=np.prod(cells))
    expected = np.full(counts.size, 1 / counts.size) if expected is None else expected.reshape(-1) / expected.sum()
    assert not counts[expected == 0].any()
    return stats.chisquare(counts[expected > 0], expected[expected > 0] * len(coords)).pvalue


@pytest.mark.parametrize("count", [10**6, pytest.param(10**8, marks=pytest.mark.slow)])
def test_iid_is_uniform_and_calls_are_independent(count):
    p_values, cells, step = [], (16, 16, 16), min(count, 10**7)
    totals = np.zeros(4096)
    previous = None
    for first in range(0, count, step):
        coords = drawn(draws.Draw(), first, step)
        totals += np.histogramdd(coords, bins=16, range=[(0, 1)] * 3)[0].reshape(-1)
        if previous is not None:
            p_values += [stats.pearsonr(previous[:, a], coords[:, b]).pvalue for a in range(3) for b in range(3)]
        p_values += [stats.pearsonr(coords[:-1, a], coords[1:, b]).pvalue for a in range(3) for b in range(3)]
        previous = coords
    p_values.append(stats.chisquare(totals).pvalue)
    # Pairs (x, y) of one sample and x of the next.
    p_values.append(chi_square(np.column_stack([coords[:-1, :2], coords[1:, :1]]), cells))
    assert min(p_values) > 1e-4 / len(p_values)
    assert max(p_values) < 1


@pytest.mark.parametrize("name", ["density", "mask"])
def test_weights_are_those_of_the_grid(name):
    given = density() if name == "density" else (density() > 0.5).astype(float)
    coords = drawn(DRAWS[name], 0, 200_000)
    # Coordinates are rounded to float32: no sample lies so close to the edge of a cell with these seeds.
    assert chi_square(coords, given.shape, given) > 1e-4
    inside = coords * np.array(given.shape[::-1]) % 1
    assert stats.kstest(inside.reshape(-1), "uniform").pvalue > 1e-4


def test_strata_are_hit_once_each_turn():
    coords = drawn(draws.stratified(8), 512 * 3, 512 * 4).reshape(4, 512, 3)
    orders = [np.ravel_multi_index((turn * 8).astype(int).T, (8, 8, 8)) for turn in coords]
    for one in orders:
        assert np.array_equal(np.sort(one), np.arange(512))
    assert all((a != b).mean() > 0.9 for a, b in itertools.pairwise(orders))
    assert stats.kstest((coords * 8 % 1).reshape(-1), "uniform").pvalue > 1e-4


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: draws.stratified(6), "power of two"),
        (lambda: draws.weighted(np.ones((2, 2))), "three axes"),
        (lambda: draws.weighted(np.zeros((2, 2, 2))), "somewhere above 0"),
        (lambda: draws.weighted(np.full((2, 2, 2), np.nan)), "finite"),
        (lambda: draws.weighted(np.array([[[1.0, -1.0]]])), "negative"),
        (lambda: draws.weighted(np.zeros((2, 2, 2), bool)), "0 voxels"),
        (lambda: generator.key_of(-1), "seed=-1"),
        (lambda: generator.key_of(2**64), "to 18446744073709551615"),
    ],
)
def test_bad_input(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_a_seed_is_an_integer():
    with pytest.raises(TypeError, match=r"seed=1\.5"):
        generator.key_of(1.5)
    assert generator.key_of(None) != generator.key_of(None)
