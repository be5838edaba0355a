"""Files of other programs that the tests of sampling read."""

import zipfile
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def extracted(tmp_path_factory):
    """Extract ZIP files of tests/data into a new folder."""

    def extract(*names):
        folder = tmp_path_factory.mktemp("data")
        for name in names:
            with zipfile.ZipFile(DATA / name) as archive:
                archive.extractall(folder)
        return folder

    return extract
