"""If this fails, files are written with other bytes, or a change of a source's files goes unnoticed."""

import errno
import os
import resource
import subprocess
import sys

import google_crc32c
import numpy as np
import pytest

from linumpy.core.files import list_files, write_files

pytestmark = pytest.mark.needs_core
rng = np.random.default_rng(3)


@pytest.mark.parametrize("suffix", ["", ".partial"])
@pytest.mark.parametrize("with_checksum", [False, True])
def test_files_hold_their_bytes(tmp_path, suffix, with_checksum):
    """Of any length, none of them too, with gaps between them; longer files that are there are cut off."""
    sizes = [0, 1, 5000, 3, 0, 2**20 + 7]
    data = rng.integers(0, 256, sum(sizes) + 10 * len(sizes), np.uint8)
    begins = np.cumsum([0, *sizes[:-1]]) + 10 * np.arange(len(sizes))
    bounds = np.stack([begins, begins + sizes], axis=1)
    paths = [str(tmp_path / f"ü {number}") for number in range(len(sizes))]
    (tmp_path / "ü 1").write_bytes(b"x" * 100)
    write_files(paths, data, bounds, with_checksum=with_checksum, suffix=suffix)
    for path, (begin, end) in zip(paths, bounds, strict=True):
        body = data[begin:end].tobytes()
        crc = google_crc32c.value(body).to_bytes(4, "little") if with_checksum else b""
        with open(path, "rb") as file:
            assert file.read() == body + crc
    assert len(os.listdir(tmp_path)) == len(sizes)


def test_an_error_names_the_file(tmp_path):
    (tmp_path / "c1").mkdir()
    paths = [str(tmp_path / f"c{number}") for number in range(3)]
    with pytest.raises(IsADirectoryError) as error:
        write_files(paths, np.ones(6, np.uint8), np.array([[0, 2], [2, 4], [4, 6]]))
    assert error.value.filename == paths[1]
    assert (tmp_path / "c0").read_bytes() == b"\1\1"
    assert not (tmp_path / "c2").exists()
    with pytest.raises(FileNotFoundError, match=r"gone/c0"):
        write_files([str(tmp_path / "gone" / "c0")], np.ones(6, np.uint8), np.array([[0, 2]]))


def test_a_full_disk_is_an_error(tmp_path):
    """A process that may not write files of more than 64 KiB: the second write of a file fails."""
    code = (
        "import signal, sys, numpy as np; from linumpy.core.files import write_files\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try: write_files([sys.argv[1]], np.ones(2**17, np.uint8), np.array([[0, 2**17]]))\n"
        "except OSError as error: print(error.errno, error.filename)"
    )

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))

    path = str(tmp_path / "c")
    done = subprocess.run(
        [sys.executable, "-c", code, path], preexec_fn=limit, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(errno.EFBIG), path]


def test_files_are_listed_by_name(tmp_path):
    """As ``os.walk`` finds them, through links too, with what changes when they are written."""
    for name in ("b/10", "b/9", "a", "b.x", "é", "c/d/e"):
        (tmp_path / "z" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "z" / name).write_bytes(name.encode())
    (tmp_path / "z" / ".nfs1").touch()
    (tmp_path / "z" / "l").symlink_to(tmp_path / "z" / "c")
    (tmp_path / "z" / "dangling").symlink_to(tmp_path / "nothing")
    expected = []
    for folder, _, names in os.walk(tmp_path / "z", followlinks=True):
        for name in names:
            path = os.path.join(folder, name)
            if name != ".nfs1" and os.path.exists(path):
                about = os.stat(path)
                line = f"{os.path.relpath(path, tmp_path / 'z')}\0{about.st_size} {about.st_mtime_ns} {about.st_ino}"
                expected.append(line)
    found = list_files(str(tmp_path / "z")).decode().splitlines()
    assert sorted(found) == sorted(expected)
    names = [line.split("\0")[0].split("/") for line in found]
    assert names == sorted(names)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list_files(str(tmp_path / "nowhere"))
