"""If this fails, times of functions in memory are judged by the wrong marks."""

import numpy as np
import pytest

from linumpy.benchmark.cases import COPY, CannotRunError, kernel_case, kernel_cases
from linumpy.benchmark.command import run
from linumpy.benchmark.runner import Settings, run_cases
from linumpy.errors import GpuUnavailableError


def maker(name, **options):
    def make(xp, scale):
        data = xp.ones(round(1000 * scale))
        return kernel_case(
            name, data, lambda: data + 1, lambda: data + 1, lambda got: "" if got[0] == 2 else "no", 2 * data.nbytes,
            **options,
        )  # fmt: skip

    return make


MAKERS = {"one": maker("one", reach=1e-9, copy_reach=1e-9), "two": maker("two", peer_share=0.5)}


def test_the_copy_comes_first_and_marks_refer_to_it(monkeypatch):
    monkeypatch.setattr("linumpy.benchmark.cases._COPY_SIZE", 2**21)
    copy, one, two = run_cases(kernel_cases(MAKERS, xp=np), Settings(3))
    assert copy.case.name == COPY
    assert [entry.role for entry in copy.entries] == ["limit"]
    assert copy.case.nbytes == 2 * 2**21 * 4
    assert [mark.mark.of for mark in one.marks] == [("cupy",), (f"{COPY}/copy",)]
    assert [mark.met for mark in one.marks] == [True, True]
    assert (two.marks, two.verdict) == ((), "")


def test_marks_are_judged_at_full_scale_only():
    _, one = run_cases(kernel_cases(MAKERS, 0.1, ("one",), np), Settings(1))
    assert [mark.met for mark in one.marks] == [None, None]
    assert [mark.got is None for mark in one.marks] == [False, False]
    assert one.case.facts == {"shape": [100], "dtype": "float64"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "scale=0"), ((2.0,), "scale=2.0"), ((1, ("nothing",)), "'nothing' is unknown: choose from one, two")],
)
def test_cases_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        kernel_cases(MAKERS, *arguments)


def test_a_third_package_that_is_not_there_ends_nothing(capsys):
    def absent():
        raise CannotRunError("other is not installed")

    _, one = run(kernel_cases({"x": maker("x", third=("other", absent))}, 0.1, xp=np), Settings(1))
    assert [entry.verdict for entry in one.entries] == ["ok", "ok", "cannot run"]
    assert "other is not installed" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr("linumpy.device.why_no_cuda", lambda *_: "there is none")
    with pytest.raises(GpuUnavailableError, match="there is none"):
        kernel_cases(MAKERS)
