"""Plans the samples of a batch: samples and their arrays → reads, and errors of samples that cannot be planned."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from linumpy.stream.batches.feed import Checked, Pulled
from linumpy.stream.batches.in_flight import InFlight, Requested
from linumpy.stream.batches.memory import Memory, stage_estimate
from linumpy.stream.config import Config
from linumpy.stream.errors import as_stream_error
from linumpy.stream.planning.needed import with_needed
from linumpy.stream.planning.reach import with_regions
from linumpy.stream.planning.records import ArrayInfo, CropRead, PartShape, WarpedCrop
from linumpy.stream.planning.samples import check_alike, check_sample, plan_sample, plan_whole
from linumpy.stream.reading.arrays import Key
from linumpy.stream.reading.sources import IsCheckedLater, Sources
from linumpy.stream.stats import Metric


def never_checked_later(info: ArrayInfo) -> bool:
    """Return False, so that planning checks the metadata files of every array."""
    return False


class Planner:
    """Plans batches, one after another; all samples must have the shapes of the first sample.

    `sources`: waits for the arrays, and opens them again where they were rewritten. `memory`: memory of the batches,
    which is divided when the first batch is planned. `changed`: its lock guards :attr:`metric`. `parts`: shape and
    dtype of each part of all batches; None before the first sample. `metric`: time that planning takes, without the
    wait for arrays; its output bytes are the bytes to read.
    """

    def __init__(self, config: Config, sources: Sources, memory: Memory, changed: threading.Condition) -> None:
        self._config, self._sources, self._memory, self._changed = config, sources, memory, changed
        self.parts: tuple[PartShape, ...] | None = None
        self._first_parts: tuple[PartShape, ...] | None = None  # of the first sample, if it was checked before
        self.metric = Metric("plan")

    def check(self, samples: Sequence[Checked], *, is_first: bool) -> None:
        """Raise the error of the first sample that cannot be planned; any thread may call this.

        `samples`: samples that are pushed together. `is_first`: whether nothing was pushed before, so that the first of
        them determines the shapes of all batches.
        """
        known: dict[Key, ArrayInfo] = {}
        parts = self.parts or self._first_parts
        for entry in samples:
            sample, stage = entry.sample, "open"
            try:
                infos = self._sources.wait_for(entry.requests, known, never_checked_later)
                stage = "plan"
                if parts is not None and plan_whole(sample, infos, self._config, parts, 0) is not None:
                    continue
                shapes = check_sample(sample, infos, self._config)
                if parts is not None and shapes != parts:
                    check_alike(parts, shapes)
            except Exception as error:
                raise as_stream_error(error, sample, stage) from error
            parts = parts or shapes
        if is_first:
            self._first_parts = parts

    def plan(self, item: InFlight, is_checked_later: IsCheckedLater) -> list[CropRead]:
        """Plan the samples of a batch; an exception becomes the error of the sample that raised it.

        `item`: the batch. Planned samples are appended to `samples`, errors to `faulty`. `is_checked_later`: returns
        True for an array whose metadata files the core checks when it reads the array. Metadata files of other arrays
        are checked here. Returns list of CropRead: Sample after sample, a read for each part.
        """
        crops: list[CropRead | WarpedCrop] = []
        checked: dict[Key, ArrayInfo] = {}
        opened = [self._open_infos(requested, item, checked, is_checked_later) for requested in item.requested]
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
                    infos = self._sources.wait_for(requests, {}, never_checked_later)
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

    def _open_infos(
        self, requested: Requested, item: InFlight, checked: dict[Key, ArrayInfo], is_checked_later: IsCheckedLater
    ) -> list[ArrayInfo] | None:
        """Wait for the arrays of a sample; None, with the error in `faulty`, where one cannot be opened."""
        pulled, requests = requested
        try:
            return self._sources.wait_for(requests, checked, is_checked_later)
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
        """Divide the memory when the first batch with a valid sample is planned."""
        if self.parts is None or self._memory.slots:
            return
        slot_nbytes = sum(part.nbytes(self._config.batch_size) for part in self.parts)
        stage_nbytes = stage_estimate(self.parts, reads, self._config)
        try:
            self._memory.divide(slot_nbytes, stage_nbytes, self._config.lookahead_batches)
        except Exception:
            self.parts = None
            raise
