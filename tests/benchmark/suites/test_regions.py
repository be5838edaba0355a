"""If this fails, regions are timed that are wrong, or others than the benchmark says."""

import numpy as np
import pytest

from linumpy.benchmark.command import run
from linumpy.benchmark.runner import Settings
from linumpy.benchmark.shared.stores import StoreSpec, generate
from linumpy.benchmark.suites import regions
from linumpy.benchmark.suites.regions import SUITE, WORKS, boxes_of, region_cases
from linumpy.gpu import Reader


def measure(folder, **options):
    with region_cases(folder=folder, scale=1 / 32, use_gpu=False, **options) as (where, cases):
        return run(cases, Settings(1), None, where)


def test_a_small_run(tmp_path, capsys):
    results = measure(tmp_path, only=("zstd shards",))
    assert [result.case.name for result in results] == [
        f"zstd shards: {work.name}"
        for work in WORKS
        if not work.kept  # no chunks are kept without a GPU
    ]
    assert all(result.ours.verdict == "ok" and result.ours.seconds for result in results)
    assert list(tmp_path.iterdir()) == []
    table = SUITE.closing(results)
    for result in results:
        assert f"{1000 * result.ours.median / result.case.facts['regions']:.3f}" in table


def test_a_wrong_region_is_noticed(tmp_path, monkeypatch):
    class Wrong(Reader):
        def submit(self, *args, **options):
            ticket = super().submit(*args, **options)
            ticket.result()[...] += 1
            return ticket

    monkeypatch.setattr(regions, "Reader", Wrong)
    monkeypatch.setattr(regions, "WORKS", WORKS[:1])
    (result,) = measure(tmp_path, only=("raw files",))
    assert result.ours.verdict == "WRONG"
    assert not result.ours.seconds


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_regions_lie_in_the_array(tmp_path, work):
    stored = generate(StoreSpec("a", (64, 65, 66), (8, 8, 8), "uint16"), tmp_path)
    boxes = boxes_of(stored, work, (9, 10, 11), 50)
    assert boxes == boxes_of(stored, work, (9, 10, 11), 50)
    starts = np.array([[part.start for part in box] for box in boxes])
    stops = np.array([[part.stop for part in box] for box in boxes])
    assert (starts >= 0).all()
    assert (stops - starts == (9, 10, 11)).all()
    assert (stops <= stored.shape).all()
    assert not work.aligned or (starts % 8 == 0).all()
