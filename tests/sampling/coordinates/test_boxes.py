"""If this fails, samples in the order of boxes are not distributed as independent ones."""

import numpy as np
import pytest
from scipy import stats

from linumpy.sampling.coordinates import boxes as module
from linumpy.sampling.coordinates import draws
from linumpy.sampling.coordinates.boxes import Boxes, Window, make_window, plan_boxes
from linumpy.sampling.coordinates.generator import key_of
from tests.support.budget import first
from tests.support.gpu.emulator import emulated
from tests.support.oracles.sampling_reference import independent

pytestmark = pytest.mark.needs_core

KEY = key_of(2024)
SMALL = plan_boxes((40, 33, 70), 1000)


@pytest.mark.parametrize("shape", [(512, 512, 512), (40, 33, 70), (1, 1, 1), (5, 1000, 3), (2, 2, 40000)])
def test_boxes_need_few_voxels(shape):
    boxes = plan_boxes(shape, 6000)
    assert np.prod(boxes.voxels(shape)) <= 6000
    assert min(boxes.halved) >= 3
    # What a box needs at most is what interpolation needs: voxel centres at (i + 1/2) / N.
    for axis, halved in enumerate(boxes.halved):
        edges = np.arange(2**halved + 1) / 2**halved * shape[axis] - 0.5
        first = np.clip(np.floor(edges[:-1]), 0, shape[axis] - 1)
        last = np.clip(np.floor(edges[1:] - 1e-9) + 1, 0, shape[axis] - 1)
        assert (last - first + 1).max() <= boxes.voxels(shape)[axis]


def test_neighbours_follow_each_other():
    boxes = plan_boxes((512, 512, 512), 6000)
    assert boxes.axes[:6] == (0, 1, 2, 0, 1, 2)
    at = np.stack(boxes.indices(np.arange(boxes.count)))
    assert np.unique(at, axis=1).shape[1] == boxes.count
    assert at.max(1).tolist() == [2**k - 1 for k in boxes.halved]


@pytest.mark.parametrize("total", first([127, 20_000, 0, 1], 2))
def test_counts_of_the_kernel_are_numpys(total, monkeypatch):
    monkeypatch.setattr(module, "load", emulated)
    for boxes in (SMALL, Boxes((0, 1, 2) * 3), Boxes((2, 1, 0) * 3 + (2, 2))):
        starts = module.count_on_device(boxes, KEY, 77, total, np)
        assert np.array_equal(starts, make_window(boxes, KEY, 77, total).starts)
        assert starts[-1] == total


def test_a_launch_of_many_blocks(monkeypatch):
    monkeypatch.setattr(module, "load", emulated)
    monkeypatch.setattr(module, "_CALLS_OF_A_THREAD", 1)
    monkeypatch.setattr(module, "_BATCH", 1000)
    boxes, total = Boxes((0, 1, 2) * 3), 300_000
    assert np.array_equal(
        module.count_on_device(boxes, KEY, 2**40, total, np), make_window(boxes, KEY, 2**40, total).starts
    )


@pytest.mark.parametrize("begin", [0, 333])
def test_coordinates_of_the_kernel_are_those_of_the_host(begin, monkeypatch):
    monkeypatch.setattr(draws, "load", emulated)
    made = make_window(SMALL, KEY, 2**33, 5000)
    coords, expected = (np.full((1500, 3), np.nan, np.float32) for _ in range(2))
    draws.launch_window(made, begin, coords)
    draws.draw_window(made, begin, expected)
    assert np.array_equal(coords, expected)


def all_of(made: Window):
    coords = np.full((made.total, 3), np.nan, np.float32)
    draws.draw_window(made, 0, coords)
    return coords


def test_samples_lie_in_their_boxes():
    made = make_window(SMALL, KEY, 5, 30_000)
    box = np.repeat(np.arange(SMALL.count), np.diff(made.starts))
    at = np.stack(SMALL.indices(box), 1)[:, ::-1]
    assert np.array_equal(np.floor(all_of(made) * 2.0 ** np.array(SMALL.halved[::-1])), at)


def test_counts_are_multinomial():
    # Sums of squares of counts over many windows: its mean and variance are those of a multinomial distribution.
    boxes = Boxes((0, 1, 2) * 3)
    n, p = 4000, 1 / boxes.count
    counts = np.array([np.diff(make_window(boxes, KEY, first, n).starts) for first in range(0, 400 * n, n)])
    squares = ((counts - n * p) ** 2 / (n * p)).sum(1)
    assert stats.kstest(squares, stats.chi2(boxes.count - 1).cdf).pvalue > 1e-3
    assert stats.chisquare(counts.sum(0)).pvalue > 1e-3
    correlation = np.corrcoef(counts[:-1].ravel(), counts[1:].ravel())[0, 1]
    assert abs(correlation) < 5 / np.sqrt(counts.size)


@pytest.mark.parametrize("total", [10**6, pytest.param(10**8, marks=pytest.mark.slow)])
def test_binned_samples_are_uniform(total):
    boxes, totals = plan_boxes((64, 64, 64), 1000), np.zeros(20**3)
    part = min(total, 10**6)
    for begin in range(0, total, part):
        coords = all_of(make_window(boxes, KEY, begin, part))
        totals += np.histogramdd(coords, bins=20, range=[(0, 1)] * 3)[0].reshape(-1)
    # Finer than a box, and across its edges.
    fine = np.bincount(np.floor(coords[:, 0] * 4096).astype(int), minlength=4096)
    assert stats.chisquare(totals).pvalue > 1e-4
    assert stats.chisquare(fine).pvalue > 1e-4
    # As a set they are distributed as those drawn one by one.
    other = independent(KEY, np.arange(part))
    for axis in range(3):
        assert stats.ks_2samp(coords[:, axis], other[:, axis]).pvalue > 1e-4
    assert len(np.unique(coords, axis=0)) > part - 5
