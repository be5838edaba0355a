"""Plans the samples of a batch: samples and their opened arrays → reads, and errors of samples that cannot be read."""

from __future__ import annotations

import threading
import time

from linumpy.stream.batches.feed import Pulled
from linumpy.stream.batches.in_flight import InFlight, Requested
from linumpy.stream.batches.memory import Memory, stage_estimate
from linumpy.stream.config import Config
from linumpy.stream.errors import as_stream_error
from linumpy.stream.planning.needed import with_needed
from linumpy.stream.planning.reach import with_regions
from linumpy.stream.planning.records import ArrayInfo, CropRead, PartShape, WarpedCrop
from linumpy.stream.planning.samples import check_alike, plan_sample, plan_whole
from linumpy.stream.reading.arrays import Key
from linumpy.stream.reading.sources import IsCheckedLater, Sources
from linumpy.stream.stats import Metric


def never_checked_later(info: ArrayInfo) -> bool:
    """Return False: planning checks the metadata files of the array, since its read does not."""
    return False


class Planner:
    """Plans batches, one after another; all samples must have the shapes of the first one.

    Parameters
    ----------
    config : Config
        The configuration.
    sources : Sources
        Opens the arrays.
    memory : Memory
        Memory of the batches, which is divided when the first sample is planned.
    changed : threading.Condition
        Its lock guards :attr:`metric`.

    Attributes
    ----------
    parts : tuple of PartShape or None
        Shape and dtype of each part of all batches; None before the first sample.
    metric : Metric
        Time that planning takes.
    """

    def __init__(self, config: Config, sources: Sources, memory: Memory, changed: threading.Condition) -> None:
        self._config, self._sources, self._memory, self._changed = config, sources, memory, changed
        self.parts: tuple[PartShape, ...] | None = None
        self.metric = Metric("plan")

    def plan(self, item: InFlight, is_checked_later: IsCheckedLater) -> list[CropRead]:
        """Plan the samples of a batch; an exception becomes the error of the sample that raised it.

        Parameters
        ----------
        item : InFlight
            The batch, whose `samples` and `faulty` are filled.
        is_checked_later : callable
            Whether the core checks the metadata files of an array when it reads the array; others are checked here.
        """
        crops: list[CropRead | WarpedCrop] = []
        checked: dict[Key, ArrayInfo] = {}
        opened = [self._opened(requested, item, checked, is_checked_later) for requested in item.requested]
        begin = time.perf_counter()
        for (pulled, requests), infos in zip(item.requested, opened, strict=True):
            if infos is None:
                continue
            row = len(item.samples)
            try:
                try:
                    shapes, planned = self._plan_sample(pulled, infos, row)
                except Exception:
                    if all(info.holds for info in infos):
                        raise
                    infos = self._sources.settled(requests, {}, never_checked_later)
                    shapes, planned = self._plan_sample(pulled, infos, row)
            except Exception as error:
                item.faulty.append(as_stream_error(error, pulled.sample, "plan"))
                continue
            if self.parts is None:
                self.parts = shapes
            crops += planned
            item.samples.append(pulled.sample)
        pad = self._config.pad or "edge"
        reads = with_regions(crops, pad)
        self._divide(reads)
        if self.parts is not None and self._config.augment is not None:
            reads = with_needed(reads, self.parts, pad)
        nbytes = sum(read.read_nbytes for read in reads)
        with self._changed:
            self.metric = self.metric.plus(time.perf_counter() - begin, nbytes)
        return reads

    def _opened(
        self, requested: Requested, item: InFlight, checked: dict[Key, ArrayInfo], is_checked_later: IsCheckedLater
    ) -> list[ArrayInfo] | None:
        pulled, requests = requested
        try:
            return self._sources.settled(requests, checked, is_checked_later)
        except Exception as error:
            item.faulty.append(as_stream_error(error, pulled.sample, "open"))
            return None

    def _plan_sample(
        self, pulled: Pulled, infos: list[ArrayInfo], row: int
    ) -> tuple[tuple[PartShape, ...], tuple[CropRead | WarpedCrop, ...]]:
        if self.parts is not None and (read := plan_whole(pulled.sample, infos, self._config, self.parts, row)):
            return self.parts, (read,)
        shapes, planned = plan_sample(pulled.sample, infos, self._config, row, pulled.index, pulled.epoch)
        if self.parts is not None and shapes != self.parts:
            check_alike(self.parts, shapes)
        return shapes, planned

    def _divide(self, reads: list[CropRead]) -> None:
        """Divide the memory when the first sample is planned."""
        if self.parts is None or self._memory.slots:
            return
        batch = sum(part.nbytes(self._config.batch_size) for part in self.parts)
        staged = stage_estimate(self.parts, reads, self._config)
        try:
            self._memory.divide(batch, staged, self._config.lookahead_batches)
        except Exception:
            self.parts = None
            raise
