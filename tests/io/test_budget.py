"""If this fails, reads and writes take more than their share of files, memory or threads, or wait for themselves."""

import os
import threading
import time

import pytest

from linumpy.io.budget import PROCESS, Budget, Share


def budget(files=100, memory=1000, threads=8, opened=lambda: 0):
    return Budget(lambda: Share(files, memory, threads), opened)


def test_half_of_what_is_left_within_the_bounds():
    mine = budget()
    with mine.take(Share(4, 300, 1), Share(90, 300, 3)) as first:
        assert first == Share(50, 300, 3)
        with InThread(mine, Share(4), Share(90, 900, 9)) as second:
            assert second == Share(25, 350, 2)
            with InThread(mine, Share(20), Share(90)) as third:
                assert third == Share(20, 0, 0)
    with mine.take(Share(), Share(90)) as all_free:
        assert all_free == Share(50)


class InThread:
    """Hold a share in another thread for the time of a block."""

    def __init__(self, owner, least, most):
        self._owner, self._bounds = owner, (least, most)
        self._have, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, daemon=True)

    def _hold(self):
        with self._owner.take(*self._bounds) as self.share:
            self._have.set()
            self._leave.wait(10)

    def __enter__(self):
        self._thread.start()
        assert self._have.wait(10), "it should not have to wait"
        return self.share

    def start(self):
        """Ask, and say whether it has to wait: then it stands in the queue while nobody holds the lock."""
        changed, queued = self._owner._changed, len(self._owner._queue)
        self._thread.start()
        while not self._have.is_set():
            with changed:
                if len(self._owner._queue) > queued:
                    return True
            time.sleep(1e-3)
        return False

    def wait(self):
        assert self._have.wait(10)

    def __exit__(self, *error):
        self._leave.set()
        self._thread.join(10)


def test_more_than_there_is_for_one_who_is_alone():
    with budget(files=3, memory=10, threads=0).take(Share(4, 50, 1), Share(90, 50, 3)) as share:
        assert share == Share(4, 50, 1)


def test_files_that_others_have_open_are_not_given_away():
    mine = budget(files=100, opened=lambda: 60)
    with mine.take(Share(1), Share(90)) as share:
        assert share == Share(20)
        # Of 60 open files 20 may be the first one's: that they are others' was known before.
        with InThread(mine, Share(1), Share(90)) as second:
            assert second == Share(10)


def test_files_that_others_open_while_somebody_reads_are_noticed():
    opened = [10]
    mine = budget(files=100, opened=lambda: opened[0])
    with mine.take(Share(1), Share(20)):
        opened[0] = 90  # 70 of them cannot be the 20 that are held
        with InThread(mine, Share(1), Share(90)) as second:
            assert second == Share(5)


def test_one_waits_for_its_least_and_the_next_behind_it():
    """The small one could go at once, but then the large one might never."""
    mine = budget()
    large, small = InThread(mine, Share(90), Share(90)), InThread(mine, Share(1), Share(1))
    with mine.take(Share(50), Share(50)):
        assert large.start()
        assert small.start()
    large.wait()
    small.wait()
    large.__exit__()
    small.__exit__()


def test_one_inside_another_gets_its_least_and_does_not_wait():
    mine = budget(files=10)
    with mine.take(Share(10), Share(10)), mine.take(Share(7), Share(90)) as inner:
        assert inner == Share(7)
        # Not even behind one that waits.
        waiting = InThread(mine, Share(10), Share(10))
        assert waiting.start()
        with mine.take(Share(2), Share(90)) as innermost:
            assert innermost == Share(2)
    waiting.wait()
    waiting.__exit__()


def test_an_error_gives_the_share_back():
    mine = budget(files=10)
    with pytest.raises(KeyboardInterrupt), mine.take(Share(10), Share(10)):
        raise KeyboardInterrupt
    with InThread(mine, Share(10), Share(10)):
        pass


def test_one_that_is_interrupted_while_it_waits_leaves_the_queue(monkeypatch):
    mine = budget(files=10)
    real = mine._changed.wait

    def interrupted(timeout=None):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return real(timeout)

    with InThread(mine, Share(10), Share(10)):
        monkeypatch.setattr(mine._changed, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt), mine.take(Share(10), Share(10)):
            pass
        monkeypatch.undo()
    with InThread(mine, Share(10), Share(10)):
        pass


def test_many_threads_never_hold_more_than_there_is():
    mine, held, most, lock = budget(files=20, memory=50, threads=4), [], [0, 0, 0], threading.Lock()

    begin = threading.Barrier(8)

    def work(seed):
        least = Share(1 + seed % 5, seed % 3 * 10, 1)
        begin.wait(20)
        for _ in range(40):
            with mine.take(least, Share(9, least.host_nbytes, 3)) as share:
                with lock:
                    held.append(share)
                    together = [sum(column) for column in zip(*(one._values() for one in held), strict=True)]
                    most[:] = map(max, most, together)
                time.sleep(1e-4)
                with lock:
                    held.remove(share)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    [thread.start() for thread in threads]
    [thread.join(20) for thread in threads]
    assert not any(thread.is_alive() for thread in threads)
    assert most[0] <= 20
    assert most[1] <= 50
    assert most[2] <= 4
    assert most[0] > 9, "they ran one after another"


def test_the_process_has_a_budget_within_its_limits():
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] % 2**63
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with PROCESS.take(Share(1), Share(2**62, 2**62, 2**62)) as share:
        assert 1 <= share.descriptors <= soft // 2 + 1
        assert 1 <= share.host_nbytes <= memory // 8
        assert share.threads == len(os.sched_getaffinity(0))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_process_has_shares_of_its_own():
    with PROCESS.take(Share(1, 2**62), Share(1, 2**62)):
        child = os.fork()
        if child == 0:  # pragma: no cover
            other = InThread(PROCESS, Share(1, 2**61), Share(1, 2**61))
            os._exit(1 if other.start() else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
