"""Tests of the loop itself: what they read into host memory passes through it, not through the native core."""

import pytest

from linumpy.core import native


@pytest.fixture(autouse=True)
def without_core(monkeypatch):
    monkeypatch.setenv(native.CORE_VARIABLE, "0")
