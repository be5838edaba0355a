"""The part of a long matrix that the short run takes: every value of every axis once. The others are marked slow."""

import itertools

import pytest
from hypothesis import example

SLOW = False  # set by conftest before the tests are imported


def examples(count, short=0):
    """Number of examples for hypothesis: `count` in a slow run, an eighth of it, or `short`, in the short one."""
    return count if SLOW else short or max(1, count // 8)


def shown(**axes):
    """Make hypothesis try every value of every argument once, besides what it draws: few draws miss some values."""

    def decorate(test):
        for k in range(max(map(len, axes.values()))):
            test = example(**{name: values[k % len(values)] for name, values in axes.items()})(test)
        return test

    return decorate


def some(cases, kept):
    """All cases, for ``parametrize``; the short run takes those for which `kept` holds."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[] if kept(*case) else pytest.mark.slow) for case in cases]


def first(cases, count=1):
    """All cases, for ``parametrize``; the short run takes the first `count`."""
    return [*some(cases[:count], lambda *_: True), *some(cases[count:], lambda *_: False)]


def matrix(*axes):
    """All combinations, for ``parametrize``; the short run takes those along the diagonal, which holds every value."""
    axes = [list(axis) for axis in axes]
    diagonal = {tuple(k % len(axis) for axis in axes) for k in range(max(map(len, axes)))}
    marks = {at: [] if at in diagonal else pytest.mark.slow for at in itertools.product(*map(range, map(len, axes)))}
    return [pytest.param(*(axis[i] for axis, i in zip(axes, at, strict=True)), marks=marks[at]) for at in marks]
