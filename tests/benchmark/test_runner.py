"""If this fails, wrong results are timed, or one case that fails ends the whole benchmark."""

import contextlib
import dataclasses
import types
import weakref

import numpy as np
import pytest

from linumpy.benchmark import runner
from linumpy.benchmark.cases import CannotRunError, Case, Entry, Mark, Prepared, ready
from linumpy.benchmark.runner import Settings, failures, run_case, run_cases
from linumpy.errors import UnsupportedLayoutError
from tests.benchmark.made_up import result_of

RIGHT = np.arange(960, dtype="u2")


def check(array):
    return "" if np.array_equal(array, RIGHT) else "it differs"


def right():
    return RIGHT.copy()


def case_of(*calls, **options):
    entries = tuple(
        Entry(f"e{n}", f"E{n}", ready(call, check), "ours" if n == 0 else "peer") for n, call in enumerate(calls)
    )
    return Case("a", RIGHT.nbytes, entries, **options)


def measure(call, settings, **options):
    (entry,) = run_case(case_of(call, **options), settings).entries
    return entry


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("in_turns", [False, True])
def test_a_right_entry_is_timed_as_often_as_asked(cold, in_turns):
    calls = []

    def call():
        calls.append(1)
        return right()

    entry = Entry("a", "A", ready(call, check, note=lambda: "by hand"), warm_ups=2)
    (result,) = run_case(Case("x", RIGHT.nbytes, (entry,), in_turns=in_turns), Settings(4, cold)).entries
    assert result.verdict == "ok"
    assert len(result.seconds) == 4
    assert len(calls) == 4 + 1 + (0 if cold else 2)  # the check, and warm-ups
    assert result.note.endswith("by hand")
    assert result.nbytes == 960 * 2


@pytest.mark.parametrize("in_turns", [False, True])
def test_a_wrong_entry_is_called_so_and_never_timed(in_turns):
    calls = []

    def call():
        calls.append(1)
        return right() ^ 1

    result = measure(call, Settings(3), in_turns=in_turns)
    assert (result.verdict, result.note) == ("WRONG", "it differs")
    assert (result.seconds, result.median, result.rate) == ((), None, None)
    assert calls == [1]


@pytest.mark.parametrize("error", [CannotRunError("no wool\nhere"), UnsupportedLayoutError("no wool here")])
@pytest.mark.parametrize("where", ["prepare", "call"])
def test_an_entry_that_cannot_run_says_why_in_one_line(error, where):
    def call():
        raise error

    prepare = call if where == "prepare" else ready(call)
    (result,) = run_case(Case("x", 1, (Entry("a", "A", prepare),)), Settings(1)).entries
    assert (result.verdict, result.note) == ("cannot run", "no wool here")


@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("error", [OSError("chunk 3\n is short"), MemoryError("chunk 3 is short"), KeyError()])
@pytest.mark.parametrize("healthy", [0, 3])
def test_an_entry_that_raises_fails_alone(error, in_turns, healthy):
    calls = []

    def call():
        calls.append(1)
        if len(calls) > healthy:
            raise error
        return right()

    first, second = run_case(case_of(call, right, in_turns=in_turns), Settings(4)).entries
    assert first.verdict == "failed"
    assert "\n" not in first.note
    assert first.note.startswith(type(error).__name__)
    assert first.seconds == ()
    assert second.verdict == "ok"
    assert len(second.seconds) == 4


def test_a_person_can_stop_it():
    def call():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(call, Settings(1))


@pytest.mark.parametrize("cold", [False, True])
def test_a_result_is_freed_before_the_next_run(cold):
    alive = []

    def call():
        assert all(one() is None for one in alive)
        data = right()
        alive.append(weakref.ref(data))
        return data

    assert measure(call, Settings(3, cold)).verdict == "ok"
    assert len(alive) > 3


def test_entries_are_prepared_one_after_another_or_all_at_once():
    events = []

    def entry(name):
        @contextlib.contextmanager
        def prepare():
            events.append(f"+{name}")
            yield Prepared(lambda: events.append(name), before=lambda: events.append("before"))
            events.append(f"-{name}")

        return Entry(name, name, prepare, warm_ups=0)

    case = Case("x", 1, (entry("a"), entry("b")))
    run_case(case, Settings(2))
    one = ["before", "a"] * 3
    assert events == ["+a", *one, "-a", "+b", *["before", "b"] * 3, "-b"]
    events.clear()
    run_case(dataclasses.replace(case, in_turns=True), Settings(2))
    turn = ["before", "a", "before", "b"]
    assert events == ["+a", "before", "a", "+b", "before", "b", *turn, *turn, "-b", "-a"]


@pytest.fixture
def take(monkeypatch):
    """A function that lets seconds pass on the runner's clock, which stands still otherwise."""
    now = [0.0]

    def take(seconds):
        now[0] += seconds

    monkeypatch.setattr(runner, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    return take


def test_the_time_is_that_of_the_call(take):
    def slow():
        take(0.05)
        return right()

    result = measure(slow, Settings(3))
    assert result.seconds == pytest.approx([0.05] * 3)
    assert result.rate == pytest.approx(RIGHT.nbytes / 0.05 / 2**30)


def test_what_is_done_before_a_run_is_not_timed(take):
    def call():
        take(0.01)
        return right()

    entry = Entry("a", "A", ready(call, check, before=lambda: take(0.05)))
    (result,) = run_case(Case("x", 1, (entry,)), Settings(3)).entries
    assert result.seconds == pytest.approx([0.01] * 3)


def test_slow_entries_are_run_less_often_and_parts_count_as_all(take):
    calls = []

    def slow():
        calls.append(1)
        take(0.02)

    entry = Entry("a", "A", ready(slow), max_seconds=0.05, share=0.5)
    (result,) = run_case(Case("x", 1, (entry,)), Settings(50)).entries
    assert result.seconds == pytest.approx([0.04] * 3)
    assert len(calls) == 5


def test_cold_drops_the_cases_files_and_the_entrys_own_before_every_run(tmp_path, monkeypatch):
    files = tmp_path / "case", tmp_path / "mine"
    events = []
    monkeypatch.setattr(runner.machine, "drop_from_page_cache", lambda files: events.append(set(files)))
    monkeypatch.setattr(runner.machine, "cached_fraction", lambda files: 0.0)
    entry = Entry("a", "A", ready(lambda: events.append("read"), files=files[1:]))
    (result,) = run_case(Case("x", 1, (entry,), files=files[:1]), Settings(2, cold=True)).entries
    assert events == ["read", set(files), "read", set(files), "read"]
    assert result.note == ""


def test_warm_drops_nothing(monkeypatch):
    monkeypatch.setattr(runner.machine, "drop_from_page_cache", lambda files: pytest.fail("dropped"))
    assert measure(right, Settings(1)).verdict == "ok"


@pytest.mark.parametrize(("part", "words"), [(0.4, "NOT COLD: 40%"), (None, "not known to be cold"), (0.001, "")])
def test_files_that_stay_in_the_cache_are_told(monkeypatch, part, words):
    monkeypatch.setattr(runner.machine, "cached_fraction", lambda files: part)
    result = measure(right, Settings(1, cold=True))
    assert result.verdict == "ok"
    assert result.note.startswith(words)
    assert bool(result.note) == bool(words)


def test_a_median_needs_a_run():
    with pytest.raises(ValueError, match="runs=0"):
        Settings(0)


def test_cases_are_made_one_after_another_and_hold_no_memory_once_they_are_done():
    alive = []

    def cases():
        for number in range(3):
            assert all(one() is None for one in alive)
            data = right()
            alive.append(weakref.ref(data))
            yield Case(str(number), 1, (Entry("a", "A", ready(lambda data=data: None)),))
            del data

    results = run_cases(cases(), Settings(1))
    assert [one.case.name for one in results] == ["0", "1", "2"]
    assert [one.entries[0].verdict for one in results] == ["ok"] * 3


def judged(mark, seconds, earlier=(), **options):
    entries = tuple(
        Entry(name, name, ready(right), "ours" if name == "mine" else "peer") for name in ("mine", "a", "b")
    )
    return result_of(Case("x", 2**30, entries, marks=(mark,), **options), seconds, Settings(3), earlier)


def test_ratios_are_of_rates_at_the_medians():
    result = judged(Mark(1), {"mine": 0.2, "a": 0.1})
    assert result.ours.median == pytest.approx(0.2)
    assert result.ours.rate == pytest.approx(5)
    assert result.times_faster(result.entry("a")) == pytest.approx(0.5)
    assert result.times_faster(result.entry("b")) is None
    assert result.entry("c") is None


@pytest.mark.parametrize(
    ("mark", "got"),
    [
        (Mark(4), 5),
        (Mark(4, ("a",)), 0.5),
        (Mark(4, ("a", "b")), 0.5),
        (Mark(4, ("a", "b"), slowest=True), 2),
        (Mark(4, ("nobody",)), None),
        (Mark(4, ("a", "nobody")), 0.5),
        (Mark(4, ("a", "nobody"), slowest=True), None),
        (Mark(4, ("before/mine",)), 0.25),
        (Mark(4, ("never/mine",)), None),
    ],
)
def test_what_a_mark_is_judged_by(mark, got):
    before = result_of(Case("before", 2**30, (Entry("mine", "m", ready(right), "ours"),)), {"mine": 0.05}, Settings(3))
    (found,) = judged(mark, {"mine": 0.2, "a": 0.1, "b": 0.4}, [before]).marks
    assert found.got == (None if got is None else pytest.approx(got))
    assert found.met == (None if got is None else got >= 4)


def test_marks_that_do_not_count_here():
    result = judged(Mark(0.1), {"mine": 0.2}, not_judged="no GPU")
    assert result.marks[0].got == pytest.approx(5)
    assert result.marks[0].met is None
    assert result.verdict == ""
    assert judged(Mark(0.1), {"a": 0.2}).marks[0].met is None


def test_verdicts_and_failures():
    assert judged(Mark(0.1), {"mine": 0.2}).verdict == "met"
    assert judged(Mark(50), {"mine": 0.2}).verdict == "MISSED"

    def bad():
        raise OSError("gone")

    wrong = run_case(case_of(lambda: 1, right, bad), Settings(1))
    assert wrong.verdict == "WRONG"
    assert failures([wrong]) == 1  # a peer that fails is none of linumpy's
    failed = run_case(case_of(bad, lambda: 1), Settings(1))
    assert failed.verdict == "failed"
    assert failures([failed, wrong]) == 3
    assert failures([run_case(case_of(right), Settings(1))]) == 0


def test_a_median_is_not_moved_by_one_slow_run():
    assert runner.EntryResult("a", "A", "peer", "ok", "", (9.0, 1.0, 1.1), 2**30).rate == pytest.approx(1 / 1.1)
