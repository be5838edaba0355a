"""If this fails, a chunk has its name before it is complete."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zarr

from linumpy.write import chunk_file
from linumpy.write.chunks import OwnChunks, chunks_of


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def array_of(folder, **options):
    return zarr.create_array(folder, shape=(20, 30), chunks=(8, 16), dtype="u2", compressors=None, **options)


@pytest.mark.parametrize("box", [(slice(0, 8), slice(16, 30)), (slice(0, 20), slice(0, 30))])
def test_another_process_sees_whole_chunks_only(tmp_path, pool, monkeypatch, box):
    array, seen = array_of(tmp_path), []
    array[...] = old = np.arange(600, dtype="u2").reshape(20, 30)
    new = old + 1000
    real = chunk_file.write_file

    def write(path, parts):
        nbytes, there = real(path, parts), zarr.open_array(tmp_path)[...]
        parts_there = [there[y : y + 8, x : x + 16] for y in range(0, 20, 8) for x in (0, 16)]
        whole = [part - part[0, 0] for part in parts_there]  # a chunk of both would have a jump of 1000
        seen.append((path, all((part < 8 * 30).all() for part in whole)))
        return nbytes

    monkeypatch.setattr(chunk_file, "write_file", write)
    chunks = chunks_of(array, pool, 4, renamed=True)
    assert isinstance(chunks, OwnChunks)
    chunks.start(box, new[box])()
    assert all(path.endswith(".partial") and intact for path, intact in seen)
    assert len(seen) == (1 if box[0].stop == 8 else 6)
    assert np.array_equal(array[box], new[box])
    assert not list(tmp_path.rglob("*.partial"))


def test_a_write_that_fails_leaves_what_was_there(tmp_path, pool, monkeypatch):
    array = array_of(tmp_path)
    array[...] = 7

    def write(path, parts):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(chunk_file, "write_file", write)
    with pytest.raises(OSError, match="No space left"):
        chunks_of(array, pool, 4, renamed=True).start((slice(0, 20), slice(0, 30)), np.zeros((20, 30), "u2"))()
    assert (array[...] == 7).all()


@pytest.mark.skipif(not hasattr(os, "writev"), reason="Windows has no writev")
def test_a_short_write_is_continued(tmp_path, monkeypatch):
    real, groups = os.writev, [[b"abcdefgh", np.arange(5, dtype="u2"), b"", b"xyz"], [], [b"end"]]
    left = iter(range(20))  # calls; without an end the test would have none

    def write_three(file, buffers):
        next(left)
        return real(file, [buffers[0][:3]])

    monkeypatch.setattr(os, "writev", write_three)
    assert chunk_file.write_file(str(tmp_path / "f"), groups) == 24
    assert (tmp_path / "f").read_bytes() == b"abcdefgh" + np.arange(5, dtype="u2").tobytes() + b"xyzend"
