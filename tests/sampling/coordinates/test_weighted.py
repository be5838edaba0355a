"""If this fails, samples by weights are distributed otherwise than their weights."""

import numpy as np
import pytest
from scipy import stats

from linumpy.sampling import create_sampler
from linumpy.sampling.coordinates import boxes as boxes_module
from linumpy.sampling.coordinates import draws
from linumpy.sampling.coordinates.boxes import make_window, plan_boxes
from linumpy.sampling.coordinates.generator import key_of
from linumpy.sampling.sampler import Sampler
from linumpy.sampling.volume import DeviceVolume
from tests.support.gpu.emulator import emulated
from tests.support.oracles.sampling_reference import raw_file, truth, voxels_of

pytestmark = pytest.mark.needs_core

KEY = key_of(77)
BOXES = plan_boxes((40, 33, 70), 1000)
GRID = (7, 12, 9)


def density():
    values = np.random.default_rng(0).exponential(size=GRID) ** 3
    values[:, 3:5] = 0
    values[-1, -1, -1] = 0
    return values


WEIGHTS = {"density": density(), "mask": density() > 1, "one cell": np.arange(np.prod(GRID)).reshape(GRID) == 400}


def points(name, total, first=0, begin=0, count=None):
    cells = draws.in_order(draws.weighted(WEIGHTS[name]), BOXES)
    coords = np.full((total if count is None else count, 3), np.nan, np.float32)
    draws.draw_in_order(make_window(BOXES, KEY, first, total), cells, begin, coords)
    return coords


def cells_of(coords):
    at = np.floor(coords[:, ::-1].astype(np.float64) * GRID).astype(int)
    return np.ravel_multi_index(tuple(at.T), GRID)


@pytest.mark.parametrize("name", WEIGHTS)
def test_order_is_a_permutation_by_boxes(name):
    made = draws.weighted(WEIGHTS[name])
    cells = draws.in_order(made, BOXES)
    assert sorted(cells.ids.tolist()) == np.flatnonzero(WEIGHTS[name]).tolist()
    centres = (np.stack(np.unravel_index(cells.ids, GRID), 1) + 0.5) / GRID
    at = np.floor(centres * 2.0 ** np.array(BOXES.halved)).astype(int)
    known = {place: number for number, place in enumerate(zip(*BOXES.indices(np.arange(BOXES.count)), strict=True))}
    numbers = [known[tuple(one)] for one in at.tolist()]
    assert numbers == sorted(numbers)
    if cells.cumulative is not None:
        sizes = np.diff(cells.cumulative.astype(object), prepend=0)
        expected = WEIGHTS[name].reshape(-1)[cells.ids]
        assert cells.cumulative[-1] == 2**63
        assert np.allclose(sizes.astype(float) / 2**63, expected / expected.sum(), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(("first", "begin"), [(0, 0), (2**33 + 5, 333)])
def test_the_kernel_is_the_host_bit_for_bit(name, first, begin, monkeypatch):
    monkeypatch.setattr(draws, "load", emulated)
    cells = draws.in_order(draws.weighted(WEIGHTS[name]), BOXES)
    coords = np.full((600, 3), np.nan, np.float32)
    draws.launch_in_order(make_window(BOXES, KEY, first, 5000), cells, begin, coords)
    assert np.array_equal(coords, points(name, 5000, first, begin, 600))


def test_positions_beyond_32_bits(monkeypatch):
    # A window of 2^33 samples of which all but a few lie in the first part, so that no table of that size is counted.
    monkeypatch.setattr(draws, "load", emulated)
    total = 2**33
    starts = np.full(BOXES.count + 1, total - 50, np.int64)
    starts[0], starts[-1] = 0, total
    made = boxes_module.Window(BOXES, KEY, 0, total, starts)
    cells = draws.in_order(draws.weighted(WEIGHTS["density"]), BOXES)
    one, other = (np.full((100, 3), np.nan, np.float32) for _ in range(2))
    draws.draw_in_order(made, cells, total - 100, one)
    draws.launch_in_order(made, cells, total - 100, other)
    assert np.array_equal(one, other)
    low = np.full((100, 3), np.nan, np.float32)
    draws.draw_in_order(made, cells, 2**32 - 100, low)
    assert len(np.unique(np.concatenate([one, low]), axis=0)) == 200


@pytest.mark.parametrize("name", ["density", "mask"])
def test_as_a_set_they_are_those_drawn_one_by_one(name):
    total = 200_000
    coords = points(name, total)
    weights = WEIGHTS[name].reshape(-1).astype(float)
    counts = np.bincount(cells_of(coords), minlength=weights.size)
    some = weights > 0
    assert not counts[~some].any()
    assert stats.chisquare(counts[some], total * weights[some] / weights[some].sum()).pvalue > 1e-4
    # Within cells they are uniform, across the edges of boxes too.
    inside = (coords[:, ::-1].astype(np.float64) * GRID) % 1
    assert all(stats.kstest(inside[:, axis], "uniform").pvalue > 1e-4 for axis in range(3))
    other = np.empty((total, 3), np.float32)
    draws.draw(draws.weighted(WEIGHTS[name]), KEY, 0, other)
    assert all(stats.ks_2samp(coords[:, axis], other[:, axis]).pvalue > 1e-4 for axis in range(3))
    assert len(np.unique(coords, axis=0)) > total - 50


def test_counts_of_cells_are_multinomial():
    # Were each part given the mean number of samples, or counted twice, the counts would vary less, or more.
    n, windows = 500, 300
    weights = WEIGHTS["density"].reshape(-1)
    groups = np.searchsorted(np.cumsum(weights) / weights.sum(), np.arange(1, 8) / 8)
    share = np.add.reduceat(weights, np.concatenate([[0], groups])) / weights.sum()
    squares = []
    for first in range(0, windows * n, n):
        counts = np.bincount(np.searchsorted(groups, cells_of(points("density", n, first)), side="right"), minlength=8)
        squares.append(((counts - n * share) ** 2 / (n * share)).sum())
    assert stats.kstest(squares, stats.chi2(7).cdf).pvalue > 1e-3


@pytest.mark.parametrize("device", ["cpu", "virtual_memory", "out_of_core"])
@pytest.mark.parametrize("options", [{"mask": WEIGHTS["mask"]}, {"importance": WEIGHTS["density"]}])
def test_samplers(device, options, tmp_path):
    voxels, kwargs = raw_file(tmp_path, dims=(70, 33, 40))

    def made(**more):
        return create_sampler(
            "structuredRegular", device, order="binned", seed=5, range=(0, 99), **kwargs, **options, **more
        )

    coords, values = made().sample(5000)
    assert np.abs(values - truth(voxels, coords, 1, (0, 99))).max() < 1e-6
    assert next(iter(options.values())).reshape(-1)[cells_of(coords)].all()
    parts = made(window=5000)
    for begin, end in ((0, 1), (1, 3000), (3000, 5000)):
        assert np.array_equal(parts.sample(end - begin)[0], coords[begin:end])
    again = parts.sample(5000)[0]
    assert len(np.unique(np.concatenate([coords, again]), axis=0)) == 10_000
    steps = [np.abs(np.diff(one, axis=0)).max(1) for one in (coords, made().sample(5000, "iid")[0])]
    assert np.median(steps[0]) < 0.5 * np.median(steps[1])


def test_a_field_on_a_device_takes_the_same_coordinates(monkeypatch):
    from linumpy.sampling import volume

    for module in (volume, draws, boxes_module):
        monkeypatch.setattr(module, "load", emulated)
    voxels = voxels_of("float", dims=(70, 33, 40))
    field = DeviceVolume(voxels, layout="cells")
    coords, values = Sampler(field, seed=5, order="binned", weights=draws.weighted(WEIGHTS["mask"])).sample(3000)
    host = create_sampler("structuredRegular", "cpu", array=voxels, seed=5, order="binned", mask=WEIGHTS["mask"])
    assert np.array_equal(coords, host.sample(3000)[0])
    assert np.abs(values - truth(voxels, coords, 1)).max() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("name", WEIGHTS)
def test_on_gpu(name):
    import cupy

    voxels = voxels_of("float", dims=(70, 33, 40))
    options = {"array": voxels, "seed": 5, "order": "binned"}
    options["importance" if name == "density" else "mask"] = WEIGHTS[name]
    there, here = (create_sampler("structuredRegular", device, **options) for device in ("cuda", "cpu"))
    for count in (1, 30_000):
        coords, values = there.sample(count)
        assert isinstance(coords, cupy.ndarray)
        expected, _ = here.sample(count)
        assert np.array_equal(coords.get(), expected)
        assert np.abs(values.get() - truth(voxels, expected, 1)).max() < 1e-4
