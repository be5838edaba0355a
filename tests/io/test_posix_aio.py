"""Batches of reads against plain ``os.pread``."""

import errno
import os

import numpy as np
import pytest

from linumpy.io import posix_aio


def test_it_works_here():
    assert posix_aio.why_unavailable() == ""


@pytest.fixture
def file(tmp_path):
    content = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    (tmp_path / "f").write_bytes(content.tobytes())
    descriptor = os.open(tmp_path / "f", os.O_RDONLY)
    yield descriptor, content
    os.close(descriptor)


@pytest.mark.parametrize("seed", range(20))
def test_random_pieces(file, seed):
    descriptor, _ = file
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 300))
    nbytes = rng.integers(1, 900, n)
    offsets = rng.integers(0, 99_000, n)
    places = np.cumsum(nbytes) - nbytes
    got = np.full(nbytes.sum(), 0xA5, np.uint8)
    more = [os.dup(descriptor) for _ in range(4)]
    counts = posix_aio.read_batch(np.resize([descriptor, *more], n), got.ctypes.data + places, nbytes, offsets)
    [os.close(one) for one in more]
    assert (counts == nbytes).all()
    expected = b"".join(os.pread(descriptor, int(k), int(o)) for k, o in zip(nbytes, offsets, strict=True))
    assert got.tobytes() == expected


def test_the_end_of_the_file_and_bad_descriptors_are_told(file):
    descriptor, content = file
    got = np.zeros(300, np.uint8)
    counts = posix_aio.read_batch(
        np.array([descriptor, 10**6, descriptor, descriptor]),
        got.ctypes.data + np.array([0, 100, 200, 200]),
        np.array([100, 100, 100, 100]),
        np.array([99_950, 0, 200_000, 5]),
    )
    assert counts.tolist() == [50, -errno.EBADF, 0, 100]
    assert (got[:50] == content[-50:]).all()


def test_a_short_read_is_tried_again(file, monkeypatch):
    """The C library may lack resources for a moment (EAGAIN) and queue nothing."""
    descriptor, content = file

    class Library:
        @staticmethod
        def lio_listio(*arguments):
            return -1

    monkeypatch.setattr(posix_aio, "_library", Library)
    got = np.zeros(100, np.uint8)
    counts = posix_aio.read_batch(np.array([descriptor]), np.array([got.ctypes.data]), np.array([100]), np.array([7]))
    assert counts.tolist() == [100]
    assert (got == content[7:107]).all()


def test_a_call_that_gives_other_bytes_is_not_used(monkeypatch):
    def wrong(descriptors, addresses, nbytes, offsets, *, retry):
        return nbytes  # as if all had been read

    monkeypatch.setattr(posix_aio, "read_batch", wrong)
    posix_aio.why_unavailable.cache_clear()
    try:
        assert "other bytes" in posix_aio.why_unavailable()
    finally:
        posix_aio.why_unavailable.cache_clear()


def test_another_c_library_is_not_tried(monkeypatch):
    monkeypatch.setattr(posix_aio.platform, "libc_ver", lambda: ("", ""))
    posix_aio.why_unavailable.cache_clear()
    try:
        assert "glibc" in posix_aio.why_unavailable()
    finally:
        posix_aio.why_unavailable.cache_clear()
