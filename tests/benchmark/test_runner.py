"""Check first, time then: nothing wrong is timed, nothing that fails stops the rest."""

import contextlib
import time
import weakref
from pathlib import Path

import pytest
import zarr

from linumpy.benchmark import runner
from linumpy.benchmark.cases import CaseSpec, generate
from linumpy.benchmark.paths import CannotRunError, Prepared, TimedPath, standard_paths
from linumpy.benchmark.runner import CaseResult, PathResult, Settings, measure, run_case
from linumpy.errors import UnsupportedLayoutError


@pytest.fixture
def case(tmp_path):
    return generate(CaseSpec("a", (12, 10, 8), (4, 4, 4), "uint16"), tmp_path)


def path(read, name="mine", files=(), note=lambda: ""):
    @contextlib.contextmanager
    def prepare(case):
        yield Prepared(lambda: read(case), files, note)

    return TimedPath(name, name.title(), prepare)


def right(case):
    return zarr.open_array(case.path, mode="r")[...]


@pytest.mark.parametrize("cold", [False, True])
def test_a_right_path_is_timed_as_often_as_asked(case, cold):
    calls = []

    def read(case):
        calls.append(1)
        return right(case)

    result = measure(case, path(read, note=lambda: "by hand"), Settings(runs=4, cold=cold))
    assert result.verdict == "ok"
    assert len(result.seconds) == 4
    assert len(calls) == 4 + 1 + (not cold)  # the check, and a warm-up
    assert "by hand" in result.note
    assert result.nbytes == 12 * 10 * 8 * 2


def test_a_wrong_path_is_called_so_and_never_timed(case):
    calls = []

    def read(case):
        calls.append(1)
        data = right(case)
        data[5, 6, 7] ^= 1
        return data

    result = measure(case, path(read), Settings(runs=3))
    assert result.verdict == "WRONG"
    assert result.note.startswith("voxel (5, 6, 7) is")
    assert (result.seconds, result.median, result.rate) == ((), None, None)
    assert calls == [1]


@pytest.mark.parametrize("change", [lambda a: a[:-1], lambda a: a.astype("i4"), lambda a: a.T])
def test_another_shape_or_type_is_wrong_too(case, change):
    assert measure(case, path(lambda case: change(right(case))), Settings(runs=1)).verdict == "WRONG"


def test_a_result_that_stayed_on_the_host_is_wrong_on_a_gpu(case):
    result = measure(case, path(right), Settings(runs=1, gpu=True))
    assert result.verdict == "WRONG"
    assert "numpy.ndarray" in result.note


@pytest.mark.parametrize("error", [CannotRunError("no wool\nhere"), UnsupportedLayoutError("no wool here")])
def test_a_path_that_cannot_run_says_why_in_one_line(case, error):
    def read(case):
        raise error

    result = measure(case, path(read), Settings(runs=1))
    assert (result.verdict, result.note) == ("cannot run", "no wool here")


@pytest.mark.parametrize("error", [OSError("chunk 3\n is short"), MemoryError("chunk 3 is short"), KeyError()])
def test_a_path_that_raises_fails_alone(case, error):
    def read(case):
        raise error

    first, second = run_case(case, [path(read, "bad"), path(right, "good")], Settings(runs=1)).paths
    assert first.verdict == "failed"
    assert "\n" not in first.note
    assert first.note.startswith(type(error).__name__)
    assert second.verdict == "ok"


def test_a_person_can_stop_it(case):
    def read(case):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(case, path(read), Settings(runs=1))


@pytest.mark.parametrize("cold", [False, True])
def test_a_result_is_freed_before_the_next_run(case, cold):
    alive = []

    def read(case):
        assert all(one() is None for one in alive)
        data = right(case)
        alive.append(weakref.ref(data))
        return data

    assert measure(case, path(read), Settings(runs=3, cold=cold)).verdict == "ok"
    assert len(alive) > 3


def test_the_time_is_that_of_the_reading(case):
    def slow(case):
        time.sleep(0.05)
        return right(case)

    result = measure(case, path(slow), Settings(runs=3))
    assert min(result.seconds) >= 0.05
    assert result.median < 0.5
    assert result.rate == pytest.approx(case.nbytes / result.median / 2**30)


def test_cold_drops_the_cases_files_and_the_paths_own_before_every_run(case, tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.write_bytes(b"x" * 9000)
    events = []
    monkeypatch.setattr(runner.cache, "drop", lambda files: events.append(set(files)))
    monkeypatch.setattr(runner.cache, "cached_part", lambda files: 0.0)

    def read(case):
        events.append("read")
        return right(case)

    result = measure(case, path(read, files=(mine,)), Settings(runs=2, cold=True))
    everything = {mine, *(file for file in case.path.rglob("*") if file.is_file())}
    assert events == ["read", everything, "read", everything, "read"]
    assert result.note == ""


def test_warm_drops_nothing(case, monkeypatch):
    monkeypatch.setattr(runner.cache, "drop", lambda files: pytest.fail("dropped"))
    assert measure(case, path(right), Settings(runs=1)).verdict == "ok"


@pytest.mark.parametrize(("part", "words"), [(0.4, "NOT COLD: 40%"), (None, "not known to be cold"), (0.001, "")])
def test_files_that_stay_in_the_cache_are_told(case, monkeypatch, part, words):
    monkeypatch.setattr(runner.cache, "cached_part", lambda files: part)
    result = measure(case, path(right), Settings(runs=1, cold=True))
    assert result.verdict == "ok"
    assert result.note.startswith(words)
    assert bool(result.note) == bool(words)


def test_the_standard_paths_run_on_this_machine_without_a_gpu(case):
    result = run_case(case, standard_paths(gpu=False), Settings(runs=1))
    verdicts = {one.name: one.verdict for one in result.paths}
    assert verdicts["flat"] == verdicts["zarr-numpy"] == "ok"
    assert set(verdicts.values()) <= {"ok", "cannot run"}
    assert sorted(file.name for file in Path(case.path).parent.iterdir()) == [case.path.name]


def results(case, reach=None, cold=False, gpu=True, **medians):
    import dataclasses

    case = dataclasses.replace(case, reach=reach)
    made = tuple(
        PathResult(name.replace("_", "-"), name, name == "flat", "ok", "", (one, one * 2, one / 2), case.nbytes)
        for name, one in medians.items()
    )
    return CaseResult(case, Settings(3, cold, gpu), made)


def test_ratios_are_of_rates_at_the_medians(case):
    result = results(case, flat=0.1, zarr_gpu=0.8, linumpy_auto=0.2)
    mine = result.path("linumpy-auto")
    assert mine.median == 0.2
    assert result.ratio(mine, "flat") == pytest.approx(0.5)
    assert result.ratio(mine, "zarr-gpu") == pytest.approx(4)
    assert result.ratio(mine, "h2d") is None


@pytest.mark.parametrize(("reach", "met"), [(0.5, True), (0.51, False), (None, None)])
def test_the_reach_is_met_or_missed(case, reach, met):
    assert results(case, reach=reach, flat=0.1, linumpy_auto=0.2).reached is met


def test_the_reach_is_judged_only_warm_on_a_gpu_with_both_times(case):
    assert results(case, reach=0.1, cold=True, flat=0.1, linumpy_auto=0.2).reached is None
    assert results(case, reach=0.1, gpu=False, flat=0.1, linumpy_auto=0.2).reached is None
    assert results(case, reach=0.1, linumpy_auto=0.2).reached is None
    assert results(case, reach=0.1, flat=0.2).reached is None


def test_a_median_is_not_moved_by_one_slow_run():
    assert PathResult("a", "A", False, "ok", "", (9.0, 1.0, 1.1), 2**30).rate == pytest.approx(1 / 1.1)
