"""If this fails, errors of pairs add up along a stack, or one wrong pair bends it."""

from dataclasses import replace

import numpy as np
import pytest

from linumpy.registration.chain import PairLink, _nearest_rotation, agreement, solve_chain

EXTENT = (800.0, 1000.0)


def rigid(angle, shift):
    c, s = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    matrix = np.eye(3)
    matrix[:2, :2] = [[c, -s], [s, c]]
    centre = np.array(EXTENT) / 2
    matrix[:2, 2] = centre - matrix[:2, :2] @ centre + shift
    return matrix


def test_the_nearest_rotation_is_no_mirror():
    for rank in (2, 3):
        found = _nearest_rotation(np.diag([1.0] * (rank - 1) + [-0.1]))
        np.testing.assert_allclose(found, np.eye(rank), atol=1e-12)


def brain(count=12, seed=0):
    rng = np.random.default_rng(seed)
    absolute = [rigid(rng.normal(0, 3), rng.normal(0, 40, 2)) for _ in range(count)]
    first = absolute[(count - 1) // 2]
    return np.array([np.linalg.inv(first) @ matrix for matrix in absolute]), rng


def links_of(truth, rng, noise, reach=(1, 2), missing=()):
    out = []
    for step in reach:
        for fixed in range(len(truth) - step):
            if missing and {fixed, fixed + step} & set(missing):
                continue
            matrix = np.linalg.inv(truth[fixed + step]) @ truth[fixed]
            error = rigid(rng.normal(0, noise / 10), rng.normal(0, noise, 2))
            out.append(PairLink(fixed, fixed + step, error @ matrix))
    return out


def distances(found, truth):
    points = np.array([[0, 0, 1], [EXTENT[0], 0, 1], [0, EXTENT[1], 1], [*EXTENT, 1]]).T
    return np.sqrt((((found - truth) @ points)[:, :2] ** 2).sum(axis=1)).max(axis=1)


def test_exact_pairs_give_exact_positions():
    truth, rng = brain()
    solution = solve_chain(len(truth), links_of(truth, rng, 0.0), EXTENT)
    assert distances(solution.matrices, truth).max() < 1e-3
    assert not solution.rejected.any()
    assert set(solution.placed_by) == {"pairs"}


def test_wrong_pairs_are_rejected_and_next_neighbours_take_over():
    truth, rng = brain()
    links = links_of(truth, rng, 0.2)
    wrong = [2, 15]
    for n in wrong:
        links[n] = PairLink(links[n].fixed, links[n].moving, rigid(7, (90, -50)) @ links[n].matrix)
    solution = solve_chain(len(truth), links, EXTENT)
    assert np.flatnonzero(solution.rejected).tolist() == wrong
    assert distances(solution.matrices, truth).max() < 2.0


def test_errors_add_up_less_than_one_after_another():
    """The error of the last slice, relative to the first, over many brains."""
    chained, solved = [], []
    for seed in range(40):
        truth, rng = brain(15, seed)
        links = links_of(truth, rng, 1.0)
        solution = solve_chain(len(truth), links, EXTENT, reference=0).matrices
        matrix = np.eye(3)
        for link in links[: len(truth) - 1]:
            matrix = matrix @ np.linalg.inv(link.matrix)
        last = np.linalg.inv(truth[0]) @ truth[-1]
        chained.append(distances(matrix[None], last[None])[0])
        solved.append(distances(solution[-1:], last[None])[0])
    assert np.mean(solved) < 0.75 * np.mean(chained)


@pytest.mark.parametrize("missing", [(4,), (6, 7), (0,), (11,)])
def test_a_missing_slice_lies_between_its_neighbours(missing):
    truth, rng = brain()
    solution = solve_chain(len(truth), links_of(truth, rng, 0.0, missing=missing, reach=(1, 2, 3)), EXTENT)
    assert [n for n, by in enumerate(solution.placed_by) if by != "pairs"] == list(missing)
    rest = [n for n in range(len(truth)) if n not in missing]
    assert distances(solution.matrices[rest], truth[rest]).max() < 1e-2
    for k, n in enumerate(missing):
        ends = [m for m in (missing[0] - 1, missing[-1] + 1) if 0 <= m < len(truth)]
        share = (k + 1) / (len(missing) + 1)
        expected = truth[ends[0]] if len(ends) == 1 else (1 - share) * truth[ends[0]] + share * truth[ends[1]]
        assert distances(solution.matrices[n : n + 1], expected[None])[0] < 1.0  # the mean of rotations, and a rotation


def test_a_slice_alone_is_not_moved():
    alone = solve_chain(1, [], EXTENT)
    np.testing.assert_array_equal(alone.matrices, np.eye(3)[None])


def evidences(links, prior, assumed_error=50.0):
    return agreement(links, prior, EXTENT, range_um=320.0, assumed_error_um=assumed_error, tolerance_um=10.0)


def weak(link, evidence, **changes):
    return replace(link, evidence=evidence, **changes)


def test_links_that_agree_become_probable_and_one_that_does_not_loses():
    """No link is certain by itself, over many brains; the motor is of little use."""
    kept, dropped = [], []
    for seed in range(20):
        truth, rng = brain(6, seed)
        links = [weak(link, 0.7) for link in links_of(truth, rng, 1.0)]
        wrong = int(rng.integers(len(links)))
        turned = rigid(rng.uniform(-8, 8), rng.uniform(100, 200, 2)) @ links[wrong].matrix
        links[wrong] = weak(links[wrong], 0.9, matrix=turned)
        found, _ = evidences(links, np.tile(np.eye(3), (5, 1, 1)))
        kept += [e for n, e in enumerate(found) if n != wrong]
        dropped.append(found[wrong])
    # Not all: a link at an end of the stack is in one triangle, which may be that of the wrong link.
    assert np.mean(np.array(kept) > 0.95) > 0.8
    assert np.max(dropped) < 0.95
    assert np.mean(dropped) < 0.3


def test_the_motor_decides_where_pairs_are_ambiguous():
    truth, rng = brain(4)
    good = links_of(truth, rng, 1.0, reach=(1,))
    prior = np.array([rigid(0.2, (8, -5)) @ link.matrix for link in good])
    near = [weak(link, 0.8) for link in good]
    far = [weak(link, 0.8, matrix=rigid(5, (150, 90)) @ link.matrix) for link in good]
    found = np.array([evidences(links, prior)[0] for links in (near, far)])
    assert found[0].min() > 0.95
    assert found[1].max() < 0.6
    # What cannot be compared has no probability, and does not disturb the others.
    lost = [weak(good[0], 0.99, error_um=np.inf), *good[1:]]
    found, error = evidences(lost, prior)
    assert found[0] == 0
    assert found[1:].min() > 0.95
    assert 3 < error < 20  # at least the tolerance; the motor's true error is about 9 µm


def test_what_the_motor_says_is_worth_less_across_a_gap():
    """The same distance from it makes a link of neighbours less probable than one across three missing slices."""
    far = rigid(0, (0, 140))
    near, across = (PairLink(0, n, far, error_um=5.0, evidence=0.6) for n in (1, 4))
    found = [evidences([link], np.tile(np.eye(3), (4, 1, 1)), 30.0)[0][0] for link in (near, across)]
    assert found[0] < 0.3 < 0.6 < found[1]


def test_links_of_planes_far_apart_do_not_outweigh_a_good_motor():
    truth, rng = brain(3)
    exact = links_of(truth, rng, 0.0, reach=(1,))
    off = [replace(link, matrix=rigid(0, (60, 0)) @ link.matrix, error_um=80.0) for link in exact]
    prior = np.array([link.matrix for link in exact])
    by_both = solve_chain(3, off, EXTENT, prior=prior, prior_error_um=10.0).matrices
    by_links = solve_chain(3, off, EXTENT, prior=prior).matrices
    assert distances(by_both, truth).max() < 5
    assert distances(by_links, truth).max() > 50


def test_a_pair_across_a_missing_slice_is_not_rejected_because_of_the_motor():
    """Nothing but the motor, which knows no rotation, speaks against the pair, and it has less weight."""
    truth, rng = brain(5)
    links = links_of(truth, rng, 0.2, missing=(3,))
    (lone,) = [n for n, link in enumerate(links) if (link.fixed, link.moving) == (2, 4)]
    turned = truth[4] @ rigid(6, (30, -20))
    links[lone] = PairLink(2, 4, np.linalg.inv(turned) @ truth[2], error_um=15.0)
    truth[4] = turned
    solution = solve_chain(5, links, EXTENT, prior=np.tile(np.eye(3), (4, 1, 1)), prior_error_um=40.0, tolerance_um=20)
    assert not solution.rejected[lone]
    moved = np.linalg.inv(truth[2]) @ truth[4]
    by_motor = distances(np.eye(3)[None], moved[None])[0]
    assert distances((np.linalg.inv(solution.matrices[2]) @ solution.matrices[4])[None], moved[None])[0] < by_motor / 4
