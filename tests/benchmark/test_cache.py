"""If this fails, "cold" times are taken with files still in the page cache."""

import os

import pytest

from linumpy.benchmark import machine as cache
from linumpy.benchmark.machine import file_system


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(os.urandom(3 * 2**20 + 5))
    path.read_bytes()
    return path


def test_a_file_just_read_is_in_the_cache(file):
    assert cache.cached_fraction([file]) == 1.0


def test_a_dropped_file_leaves_the_cache_and_keeps_its_bytes(file):
    if file_system(file) in ("tmpfs", "ramfs", "overlay", "unknown"):
        pytest.skip(f"files on {file_system(file)} cannot be dropped from memory")
    before = file.read_bytes()
    other = file.with_name("other")
    other.write_bytes(os.urandom(2**20))
    cache.drop_from_page_cache([file])
    assert cache.cached_fraction([file]) < 0.01
    assert cache.cached_fraction([other]) == 1.0  # only these files
    assert file.read_bytes() == before
    assert cache.cached_fraction([file]) == 1.0


def test_the_part_counts_pages_of_all_files(file):
    if file_system(file) in ("tmpfs", "ramfs", "overlay", "unknown"):
        pytest.skip(f"files on {file_system(file)} cannot be dropped from memory")
    other = file.with_name("other")
    other.write_bytes(bytes(file.stat().st_size))
    cache.drop_from_page_cache([other])
    assert cache.cached_fraction([file, other]) == pytest.approx(0.5, abs=0.01)


def test_empty_files_and_no_files_are_cold(tmp_path):
    (tmp_path / "empty").touch()
    cache.drop_from_page_cache([tmp_path / "empty"])
    assert cache.cached_fraction([tmp_path / "empty"]) == 0.0
    assert cache.cached_fraction([]) == 0.0


def test_of_files_of_others_the_kernel_tells_nothing(file, monkeypatch):
    monkeypatch.setattr(cache.os, "access", lambda path, mode: False)
    assert cache.cached_fraction([file]) is None


def test_no_handle_or_map_is_left(file):
    def held():
        return sum(str(file) in line for line in open("/proc/self/maps")) + len(os.listdir("/proc/self/fd"))

    before = held()
    for _ in range(5):
        cache.drop_from_page_cache([file])
        cache.cached_fraction([file])
    assert held() <= before  # the garbage of other tests may close theirs meanwhile
