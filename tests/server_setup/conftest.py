"""Tools that the tests of the server scripts need."""

import os

import pytest

from tests.server_setup.server_tools import ensure_tools


@pytest.fixture(scope="session")
def tools(tmp_path_factory):
    """Every tool is here; where one cannot be had, CI fails, and a laptop skips."""
    ensure_tools(tmp_path_factory.mktemp("npm"))


@pytest.fixture
def clean_environment(monkeypatch):
    """No setting of the person who runs the tests reaches the scripts."""
    for name in list(os.environ):
        if name.startswith(("CUFILE_", "KVIKIO_", "GDS_")) or name == "LD_LIBRARY_PATH":
            monkeypatch.delenv(name)
