"""Fixtures of the tests of reads."""

import pytest
from file_batches import KINDS
from linumpy.io.reads import posix_aio


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    if request.param == "threads that pread":
        monkeypatch.setattr(posix_aio, "why_unavailable", lambda: "there is none")
    return request.param
