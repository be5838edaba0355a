"""The backends that every test of an operation runs on."""

import pytest

from tests.support.oracles.voxel_backends import Tried, needs_warp


@pytest.fixture(
    params=[
        "scipy",
        pytest.param("warp-cpu", marks=needs_warp),
        pytest.param("warp-cuda", marks=[pytest.mark.gpu, needs_warp]),
    ]
)
def backend(request, monkeypatch):
    return Tried(request.param, monkeypatch)
