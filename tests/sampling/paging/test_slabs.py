"""If this fails, files larger than memory are sampled wrong, or their errors are lost."""

import contextlib

import numpy as np
import pytest
from scipy import stats

from linumpy.sampling import create_sampler
from linumpy.sampling.coordinates.generator import key_of
from linumpy.sampling.paging.slabs import SlabVolume, plan_slabs
from linumpy.sampling.raw_voxels import FileSource
from tests.support.oracles.sampling_reference import raw_file, truth

DIMS = (31, 40, 50)
KEY = key_of(8)


def volume(folder, held=6, replaced=2, nbytes=16 * 1024, **kwargs):
    voxels, given = raw_file(folder, dims=DIMS, **kwargs)
    file = FileSource(**given).file()
    return voxels, SlabVolume(file, (0, 120), slabs=held, replaced=replaced, key=KEY, slab_nbytes=nbytes)


def batch(field, count=4000, first=0, in_order=False):
    coords, values = np.full((count, 3), np.nan, np.float32), np.full((field.n_channels, count), np.nan, np.float32)
    (field.sample_in_order if in_order else field.sample)(KEY, first, coords, values)
    return coords, values


@pytest.mark.parametrize(
    "shape", [(1, 50, 40, 31), (2, 50, 400, 310), (1, 1, 5, 5), (1, 2000, 3, 3), (1, 4, 4000, 4000)]
)
def test_slabs_cover_the_volume(shape):
    plan = plan_slabs(shape, 2, 2**17)
    seen = np.zeros(shape[1:3], bool)
    for number in range(plan.count):
        seen[plan.box(number)] = True
    assert seen.all()
    coords = np.random.default_rng(0).random((5000, 3), np.float32)
    coords[:8] = 1
    which = plan.of(coords)
    for axis in (0, 1):
        at = coords[:, 2 - axis].astype(np.float64) * shape[1 + axis] - 0.5
        low = np.clip(np.floor(at), 0, shape[1 + axis] - 1)
        high = np.clip(np.floor(at) + 1, 0, shape[1 + axis] - 1)
        boxes = [plan.box(number)[axis] for number in range(plan.count)]
        assert all(boxes[k].start <= a and b < boxes[k].stop for k, a, b in zip(which, low, high, strict=True))


@pytest.mark.parametrize("nbytes", [16 * 1024, 2048])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("kwargs", [{}, {"dtype": "float", "channels": 2, "offset": 5, "big": True}])
def test_values_are_those_of_the_file(nbytes, in_order, kwargs, tmp_path):
    voxels, field = volume(tmp_path, nbytes=nbytes, **kwargs)
    for first in (0, 4000):
        coords, values = batch(field, first=first, in_order=in_order)
        assert np.abs(values - truth(voxels, coords, 1, (0, 120))).max() < 1e-6
    anywhere = np.random.default_rng(0).uniform(-0.1, 1.1, (3000, 3)).astype(np.float32)
    values = np.empty((field.n_channels, 3000), np.float32)
    field.decode(anywhere, values)
    assert np.abs(values - truth(voxels, anywhere, 1, (0, 120))).max() < 1e-6


def test_each_batch_comes_from_the_slabs_in_memory(tmp_path):
    _, field = volume(tmp_path, nbytes=4096)
    before = None
    for number in range(6):
        coords, _ = batch(field, first=4000 * number)
        used = set(field.plan.of(coords).tolist())
        assert len(used) == field.held == 6
        if before is not None:
            assert len(used & before) == 4
        before = used


def test_each_slab_comes_once_before_any_comes_again(tmp_path):
    _, field = volume(tmp_path)
    count = field.plan.count
    order = [field._number(k) for k in range(3 * count)]
    turns = [order[k * count : (k + 1) * count] for k in range(3)]
    assert all(sorted(turn) == list(range(count)) for turn in turns)
    assert turns[0] != turns[1] != turns[2]


@pytest.mark.parametrize("in_order", [False, True])
def test_all_slabs_in_memory_is_uniform(in_order, tmp_path):
    _, field = volume(tmp_path, held=100)
    coords, _ = batch(field, 100_000, in_order=in_order)
    counts = np.histogramdd(coords, bins=8, range=[(0, 1)] * 3)[0].reshape(-1)
    assert stats.chisquare(counts).pvalue > 1e-4
    slab = field.plan.of(coords)
    assert len(field._slabs) == field.plan.count
    assert not field._coming
    where = [s.number for s in field._slabs]
    rank = np.array([where.index(s) for s in slab])
    assert (np.diff(rank) >= 0).all() == in_order
    assert len(np.unique(coords, axis=0)) == len(coords)


def test_over_many_batches_it_is_uniform(tmp_path):
    _, field = volume(tmp_path, held=4, replaced=4)
    turns = 10
    calls = turns * field.plan.count // 4
    counts = np.zeros(field.plan.count)
    for number in range(calls):
        coords, _ = batch(field, 400, first=400 * number)
        counts += np.bincount(field.plan.of(coords), minlength=field.plan.count)
    # Each slab came as often; what is left is the multinomial within batches.
    assert abs(counts - counts.mean()).max() < 6 * np.sqrt(counts.mean())


@pytest.mark.parametrize("in_order", [False, True])
def test_a_file_that_is_shortened_is_an_error(in_order, tmp_path):
    _, field = volume(tmp_path)
    batch(field, in_order=in_order)
    with open(tmp_path / "volume.raw", "r+b") as file:
        file.truncate(1000)

    def go_on():
        for first in range(1, 20):
            batch(field, first=4000 * first, in_order=in_order)

    with pytest.raises(OSError, match=r"ends at byte \d+.*volume\.raw"):
        go_on()


def test_slabs_that_could_not_be_read_once_are_not_left_out(tmp_path, monkeypatch):
    _, field = volume(tmp_path, held=3, replaced=1)
    count, read, failed, seen = field.plan.count, SlabVolume._read, set(), set()

    def fails_once(self, number):
        if number not in failed:
            failed.add(number)
            raise OSError("the file system is away")
        return read(self, number)

    monkeypatch.setattr(SlabVolume, "_read", fails_once)
    for number in range(20 * count):
        with contextlib.suppress(OSError):
            seen.update(field.plan.of(batch(field, 50, first=50 * number)[0]).tolist())
        if field._taken >= count + 1:
            break
    assert seen == set(range(count)) == failed


def test_settings_of_the_environment(tmp_path, monkeypatch, capsys):
    _, kwargs = raw_file(tmp_path, dims=DIMS)
    monkeypatch.setattr(
        SlabVolume.__init__, "__kwdefaults__", SlabVolume.__init__.__kwdefaults__ | {"slab_nbytes": 8192}
    )
    monkeypatch.setenv("VNR_NUM_BLOCKS", "5")
    monkeypatch.setenv("VNR_NUM_CONCURRENT_BLOCKS", "3")
    field = create_sampler("structuredRegular", "out_of_core", range=(0, 1), **kwargs).field
    assert (field.held, field.replaced) == (5, 3)
    assert "5 of 16 slabs (16 along z, 1 along y) in memory, 3 replaced" in capsys.readouterr().out
    assert create_sampler("structuredRegular", "out_of_core", range=(0, 1), num_blocks=7, **kwargs).field.held == 7
    with pytest.raises(ValueError, match="3 of 2 slabs"):
        create_sampler("structuredRegular", "out_of_core", range=(0, 1), num_blocks=2, **kwargs)
    monkeypatch.setenv("VNR_NUM_BLOCKS", "many")
    with pytest.raises(ValueError, match="VNR_NUM_BLOCKS='many'"):
        create_sampler("structuredRegular", "out_of_core", range=(0, 1), **kwargs)
    monkeypatch.setenv("VNR_NUM_BLOCKS", "0")
    with pytest.raises(ValueError, match="in the environment VNR_NUM_BLOCKS=0: the number of slabs from 1 up to"):
        create_sampler("structuredRegular", "out_of_core", range=(0, 1), **kwargs)
    monkeypatch.delenv("VNR_NUM_BLOCKS")
    for options in ({"num_blocks": 2.5}, {"num_concurrent_blocks": True}):
        with pytest.raises(TypeError, match=f"{next(iter(options))}="):
            create_sampler("structuredRegular", "out_of_core", range=(0, 1), **kwargs, **options)
    for options in ({"order": "sobol"}, {"spline_order": 3}, {"labels": True}):
        with pytest.raises(ValueError, match=r"order|labels"):
            create_sampler("structuredRegular", "out_of_core", range=(0, 1), **kwargs, **options)
