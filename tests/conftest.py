"""Fixtures for every room, and the rule for tests that need a GPU."""

import os

import hypothesis
import pytest

from linumpy.device import why_no_cuda

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=60, print_blob=True)
hypothesis.settings.register_profile("dev", deadline=None, max_examples=60)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=600)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def pytest_addoption(parser):
    parser.addoption("--require-gpu", action="store_true", help="fail where a GPU test would be skipped")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is None:
        return
    missing = why_no_cuda()
    if missing is None:
        return
    if item.config.getoption("--require-gpu"):
        pytest.fail(f"needs a GPU: {missing}", pytrace=False)
    pytest.skip(f"needs a GPU: {missing}")


@pytest.fixture
def cupy():
    """CuPy, in tests marked ``gpu``."""
    import cupy

    return cupy
