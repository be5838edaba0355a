"""The script that a test file is named after."""

import pytest

from tests.support.script_runs import load


@pytest.fixture
def main(request):
    """Its ``main``."""
    return load(request.path.stem.removeprefix("test_")).main
