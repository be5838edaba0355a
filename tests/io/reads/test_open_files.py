"""Files that stay open between batches, against ``os.pread`` by path; and that no descriptor is left."""

import contextlib
import dataclasses
import errno
import gc
import os
import sys

import numpy as np
import pytest
from file_batches import Interrupt, batch, check, fail, interrupt_at, nothing_at_once, open_files, version, write
from linumpy.io.reads.file_reads import ReadEngine
from linumpy.io.reads.open_files import FilesOnce, KeptFiles, OpenFiles

from linumpy.gpu import release


@pytest.fixture(autouse=True, scope="module")
def nothing_else_closes_files():
    """Neither readers of earlier tests that come to rest, nor the collection of garbage."""
    release()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def versions_of(paths):
    return np.array([version(path)[:3] for path in paths], np.int64)


def expecting(paths, rows, versions=None):
    reads, begins = batch(paths, rows)
    return dataclasses.replace(reads, versions=versions_of(paths) if versions is None else versions), begins


@pytest.fixture(params=[0, 32], ids=["threads", "caller"])
def engine(request, kind, monkeypatch):
    if not request.param:
        nothing_at_once(monkeypatch)
    with contextlib.closing(ReadEngine(3, descriptors=20, kept_descriptors=8)) as engine:
        yield engine


def test_random_batches_of_files_that_change(engine, tmp_path):
    """Files are rewritten, replaced, and removed between batches; each batch expects what it has seen."""
    rng = np.random.default_rng(0)
    paths, opened = write(tmp_path, [3000] * 6), len(open_files())
    for number in range(60):
        some = [paths[n] for n in sorted(rng.choice(6, rng.integers(1, 5), replace=False))]
        rows = [(n, int(rng.integers(0, 2900)), 100) for n in range(len(some)) for _ in range(2)]
        reads, begins = expecting(some, rows)
        if number % 3 == 1:
            reads.versions[0] = -1  # nothing is expected of this one
        check(reads, begins, engine.start(reads).wait())
        assert len(open_files()) - opened <= 8
        changed = paths[rng.integers(6)]
        if number % 2:
            os.truncate(changed, 0)
            with open(changed, "r+b") as file:
                file.write(rng.bytes(3000))
            os.utime(changed, ns=(0, 10**18 + number))  # the clock of a file system may tick only every 10 ms
        else:
            (tmp_path / "new").write_bytes(rng.bytes(3000))
            os.rename(tmp_path / "new", changed)
    hits, misses = engine.open_file_counts
    assert hits > 20
    assert misses > 20
    engine.rest()
    assert len(open_files()) == opened
    assert not engine.open_files


def test_a_file_is_opened_once(engine, tmp_path, monkeypatch):
    paths = write(tmp_path, [3000] * 2)
    reads, begins = expecting(paths, [(0, 0, 1000), (1, 5, 10)])
    check(reads, begins, engine.start(reads).wait())
    fail(monkeypatch, "open", errno.EACCES, 0)
    reads.memory[:] = 0xA5
    results = engine.start(reads).wait()
    monkeypatch.undo()
    check(reads, begins, results)
    assert engine.open_file_counts == (2, 2)


def test_a_file_that_is_not_the_expected_one_is_told_and_not_kept(engine, tmp_path):
    (path,) = write(tmp_path, [3000])
    old = versions_of([path])
    (tmp_path / "new").write_bytes(bytes(2000))
    os.rename(tmp_path / "new", path)
    reads, _ = expecting([path], [(0, 0, 3000)], old)
    results = engine.start(reads).wait()
    assert results.nbytes.tolist() == [2000]
    assert results.before.tolist() == results.after.tolist() == [version(path)]
    assert not engine.open_files


def test_what_is_written_behind_the_opening_is_told(engine, tmp_path):
    """A file that is kept has changed before its next batch, which expects what it was."""
    (path,) = write(tmp_path, [3000])
    reads, _ = expecting([path], [(0, 0, 3000)])
    engine.start(reads).wait()
    os.truncate(path, 100)
    results = engine.start(reads).wait()
    assert results.before.tolist() != results.after.tolist()
    assert not engine.open_files


def test_kept_files_give_way_to_others(engine, tmp_path, monkeypatch):
    """Where no file can be opened for want of descriptors, those that are kept are closed first."""
    paths = write(tmp_path, [3000] * 3)
    reads, begins = expecting(paths[:2], [(0, 0, 100), (1, 0, 100)])
    check(reads, begins, engine.start(reads).wait())
    assert engine.open_files == 2
    others, begins = expecting(paths[2:], [(0, 0, 100)])
    with monkeypatch.context() as patch:
        fail(patch, "open", errno.EMFILE, 0, 1)
        results = engine.start(others).wait()
    check(others, begins, results)
    assert not engine.open_files


def test_files_stay_open_where_others_are_missing(engine, tmp_path):
    paths = write(tmp_path, [3000])
    reads, begins = expecting(paths, [(0, 0, 100)])
    check(reads, begins, engine.start(reads).wait())
    absent, _ = batch([str(tmp_path / "absent")], [(0, 0, 100)])
    assert engine.start(absent).wait().opened.tolist() == [-errno.ENOENT]
    check(reads, begins, engine.start(reads).wait())
    assert engine.open_file_counts == (1, 1)


def test_the_files_that_were_not_used_for_longest_are_closed(tmp_path):
    paths, opened = write(tmp_path, [10] * 4), len(open_files())
    kept, known = KeptFiles(3), [tuple(version(path)[:3]) for path in write(tmp_path, [10] * 4)]

    def use(*numbers):
        files = OpenFiles()
        for number in numbers:
            kept.open_into(files, paths[number], known[number])
            files[-1].look_again()
        kept.keep_from(files, [paths[number] for number in numbers], [known[number] for number in numbers])
        assert not files

    use(0, 1, 2)
    use(0)
    use(3)  # in place of 2 or 1, which were used together
    use(0, 3)
    assert (kept.hits, len(kept), len(open_files()) - opened) == (3, 3, 3)
    kept.close()
    assert len(open_files()) == opened


def test_a_file_that_two_batches_want_is_opened_twice(engine, tmp_path):
    paths, opened = write(tmp_path, [3000]), len(open_files())
    both = [expecting(paths, [(0, 0, 1000)]) for _ in range(2)]
    pending = [engine.start(reads) for reads, _ in both]
    for (reads, begins), one in zip(both, pending, strict=True):
        check(reads, begins, one.wait())
    assert engine.open_files == 1
    assert len(open_files()) - opened == 1


def test_an_interrupt_at_any_step_leaves_nothing_open(tmp_path):
    paths, opened, traced = write(tmp_path, [300] * 3), len(open_files()), sys.gettrace()
    known = [tuple(version(path)[:3]) for path in paths]
    for step in range(5000):
        kept = KeptFiles(2)
        kept._lock = contextlib.nullcontext()  # no signal handler runs between the end of a with block and its release
        files, complete = OpenFiles(), False
        sys.settrace(interrupt_at(step, {"open", "open_into", "keep_from", "_drop_above"}))
        try:
            for _ in range(2):
                for path, expected in zip(paths, known, strict=True):
                    kept.open_into(files, path, expected)
                    files[-1].look_again()
                kept.keep_from(files, paths, known)
                files.clear()
            complete = True
        except Interrupt:
            pass
        finally:
            sys.settrace(traced)
        files.close()
        kept.close()
        del kept, files
        assert len(open_files()) == opened, step
        if complete:
            break
    assert complete
    assert step > 100


def test_files_of_a_batch_are_opened_together(tmp_path, monkeypatch):
    """Whatever becomes of some of them, the others are open, and all are closed."""
    paths = [tmp_path / name for name in ("a", "gone", "b", "folder", "c", "lost")]
    for n, path in enumerate(paths):
        if path.name == "folder":
            path.mkdir()
        elif path.name != "gone":
            path.write_bytes(bytes(n))
    real, lost = os.fstat, os.stat(paths[5]).st_ino

    def fstat(number):
        if (found := real(number)).st_ino == lost:
            raise OSError(errno.ESTALE, "stale")
        return found

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "fstat", fstat)
    files = FilesOnce()
    files.open([str(path) for path in paths])
    assert len(files) == 6
    assert files.refusals.tolist() == [0, -errno.ENOENT, 0, -errno.EISDIR, 0, -errno.ESTALE]
    assert (files.descriptors < 0).tolist() == [False, True, False, False, False, False]
    more = files.duplicates(2, 3)
    assert len(set(more)) == 3
    assert all(os.path.samestat(real(number), os.stat(paths[2])) for number in more)
    paths[4].write_bytes(bytes(40))
    files.look_again()
    opened, first, last = files.versions()
    assert opened.tolist() == [0, -errno.ENOENT, 0, 0, 0, -errno.ESTALE]
    assert first[:, 1].tolist()[::2] == [0, 2, 4]
    assert last[:, 1].tolist()[::2] == [0, 2, 40]
    assert (first[[1, 5]] == 0).all()
    files.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)
