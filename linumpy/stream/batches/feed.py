"""Samples in the order in which they were pushed: iterables → numbered samples, pulled lazily."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from linumpy.stream.config import Config, Sample
from linumpy.stream.errors import ArgumentTypeError
from linumpy.stream.reading.arrays import ArrayRequest


@runtime_checkable
class Indexed(Protocol):
    """A sequence of samples, finite or not, with random access."""

    @property
    def count(self) -> int | None:
        """Number of samples; None for an infinite sequence."""

    def sample_at(self, index: int) -> Sample:
        """Return a sample."""


@runtime_checkable
class Epochs(Protocol):
    """An iterable whose samples differ in each iteration, such as a sampler of random crops."""

    epoch: int

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch with which the next iteration begins."""

    def next_iteration(self) -> Indexed:
        """Return the samples of the next iteration."""


@dataclass(frozen=True)
class Checked:
    """A sample that was checked when it was pushed, and the requested arrays of its parts."""

    sample: Sample
    requests: list[ArrayRequest]


@dataclass(frozen=True)
class Pulled:
    """A sample that is to be read."""

    sample: Sample
    requests: list[ArrayRequest]  # the array of each part
    position: int  # number of the sample among all that were pushed, in all ranks
    #: Index and epoch of the sample, or their defaults; with the seed, they determine the augmentation.
    index: int
    epoch: int


Pushed = Iterable[Sample | Checked] | Indexed


class Flush:
    """Marks, among the pushed samples, where a batch ends that may not be full."""


class Feed:
    """The samples of this rank, pulled from one pushed iterable after another.

    One thread calls :meth:`next`. Other threads push and flush, while they hold a common lock. `request` takes a
    sample, and the folder from which relative paths start: the working folder at the time of the push.
    """

    def __init__(self, config: Config, request: Callable[[Sample, str], list[ArrayRequest]]) -> None:
        self._config, self._request = config, request
        self._waiting: deque[tuple[Pushed, str] | Flush] = deque()
        self._current: Iterator[tuple[int, Sample | Checked | Exception]] | None = None
        self._position = self._resume = 0
        self._folder = ""  # of the current iterable
        self.is_sequence = False  # whether a list, a tuple or a sampler is pulled now; it may be pulled further ahead
        self._resumed_epochs: deque[int] = deque()
        self.was_pushed = self.is_in_iterable = False  # `is_in_iterable`: whether :meth:`next` runs code of the user
        self.epochs: list[int] = []  # first epoch of each :class:`Epochs` that was pushed

    def push(self, samples: Iterable[Sample | Checked]) -> None:
        """Append samples; an :class:`Epochs` iterable advances by one iteration."""
        if not isinstance(samples, (Iterable, Indexed)) or isinstance(samples, (str, bytes)):
            raise ArgumentTypeError(f"push takes a Sample or an iterable of them (got {type(samples).__name__})")
        pushed: Pushed = samples
        if isinstance(samples, Epochs):
            if self._resumed_epochs:
                samples.set_epoch(self._resumed_epochs.popleft())
            self.epochs.append(samples.epoch)
            pushed = samples.next_iteration()
        self._waiting.append((pushed, working_folder()))
        self.was_pushed = True

    def flush(self) -> None:
        """End a batch after the samples that were pushed so far."""
        self._waiting.append(Flush())

    @property
    def has_more(self) -> bool:
        """Whether an iterable may have another sample, or a flush is pending."""
        return self._current is not None or bool(self._waiting)

    def start_at(self, position: int, epochs: Iterable[int] = ()) -> None:
        """Skip the samples before a position, without drawing samples of an :class:`Indexed` sequence.

        `epochs`, a saved value of :attr:`epochs`, are the first epochs of the next samplers that are pushed.
        """
        if self.was_pushed:
            raise RuntimeError("a state must be loaded before samples are pushed: make a new pipeline")
        self._resume = position
        self._resumed_epochs = deque(epochs)

    def next(self) -> Pulled | Flush | None:
        """Return the next sample of this rank, or a flush; None if all iterables are exhausted."""
        while self._current is not None or self._waiting:
            if self._current is None:
                waiting = self._waiting.popleft()
                if isinstance(waiting, Flush):
                    return waiting
                samples, self._folder = waiting
                self.is_sequence = isinstance(samples, (Indexed, list, tuple))
                self._current = self._numbered(samples)
            self.is_in_iterable = True
            try:
                numbered = next(self._current, None)
            except BaseException:
                self._current = None
                raise
            finally:
                self.is_in_iterable = False
            if numbered is not None:
                return self._pulled(*numbered)
            self._current = None
        return None

    def _pulled(self, position: int, item: Sample | Checked | Exception) -> Pulled:
        if isinstance(item, Exception):
            raise item
        sample = item.sample if isinstance(item, Checked) else item
        if not isinstance(sample, Sample):
            raise TypeError(f"pushed iterables hold Samples (got {type(sample).__name__})")
        requests = item.requests if isinstance(item, Checked) else self._request(sample, self._folder)
        index = position if sample.index is None else sample.index
        epoch = self._config.epoch if sample.epoch is None else sample.epoch
        return Pulled(sample, requests, position, index, epoch)

    def _numbered(self, samples: Pushed) -> Iterator[tuple[int, Sample | Checked | Exception]]:
        """Yield position and sample, or the error of a sample, for the samples of this rank that are not skipped."""
        rank, world_size = self._config.rank, self._config.world_size
        begin = self._position
        if isinstance(samples, Indexed):
            first = max(begin, self._resume)
            first += (rank - first) % world_size
            end = None if samples.count is None else begin + samples.count
            numbers = itertools.count(first, world_size) if end is None else range(first, end, world_size)
            for position in numbers:
                self._position = position + 1
                sample: Sample | Exception
                try:
                    sample = samples.sample_at(position - begin)
                except Exception as error:
                    sample = error
                yield position, sample
            if end is not None:
                self._position = end
            return
        for item in samples:
            position = self._position
            self._position += 1
            if position >= self._resume and position % world_size == rank:
                yield position, item


def working_folder() -> str:
    """Return the folder from which relative paths start."""
    try:
        return os.getcwd()
    except OSError:  # the folder was removed; absolute paths do not need it
        return ""
