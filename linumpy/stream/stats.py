"""Counters of a pipeline, and a table that names its bottleneck."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Metric:
    """Time and bytes of one stage.

    Attributes
    ----------
    name : str
        Name of the stage.
    ms : float
        Total milliseconds. Stages run concurrently, so the sum over stages may exceed the elapsed time.
    best_ms : float
        Shortest measurement in milliseconds; infinity without one, and for several of which only the sum is known.
    input_bytes, output_bytes : int
        Bytes of input and output; 0 where they are not counted.
    count : int
        Number of measurements.
    """

    name: str = ""
    ms: float = 0.0
    best_ms: float = math.inf
    input_bytes: int = 0
    output_bytes: int = 0
    count: int = 0

    @classmethod
    def summed(cls, name: str, count: int, seconds: float, input_bytes: int = 0, output_bytes: int = 0) -> Metric:
        """Make a metric from sums over `count` measurements, of which the shortest is known only if there is one."""
        ms = 1e3 * seconds
        return cls(name, ms, ms if count == 1 else math.inf, input_bytes, output_bytes, count)

    def plus(self, seconds: float, nbytes: int = 0) -> Metric:
        """Return the metric with one more measurement, which took `seconds` for `nbytes` of output."""
        ms = 1e3 * seconds
        best = min(self.best_ms, ms)
        return Metric(self.name, self.ms + ms, best, self.input_bytes, self.output_bytes + nbytes, self.count + 1)

    def __sub__(self, other: Metric) -> Metric:
        """Return the difference from an earlier metric; `best_ms`, which is no sum, is kept."""
        return Metric(
            self.name, self.ms - other.ms, self.best_ms, self.input_bytes - other.input_bytes,
            self.output_bytes - other.output_bytes, self.count - other.count,
        )  # fmt: skip

    @property
    def mean_ms(self) -> float:
        """Mean time in milliseconds; 0 without a measurement."""
        return self.ms / self.count if self.count else 0.0

    @property
    def gb_per_s(self) -> float:
        """Rate in GB/s of the output bytes, or of the input bytes where output is not counted."""
        return (self.output_bytes or self.input_bytes) / self.ms / 1e6 if self.ms else 0.0


@dataclass(frozen=True)
class Stats:
    """Counters of a pipeline since its construction or the last ``stats_reset``.

    Attributes
    ----------
    plan : Metric
        Time to plan batches, on the host. Output bytes are the bytes of the planned regions, in the stored dtype.
    io, assemble : Metric
        Times of the reader's threads, summed over threads: reading stored bytes, and copying decoded chunks to batches
        in host memory. On a device kernels do this copy, and `assemble` has no time.
    h2d, decompress : Metric
        Times by the clock of the device: copies from the host, and decoding, which counts decoded bytes. Slabs that are
        decoded concurrently count separately. Both are empty without a GPU; `decompress` leaves out chunks that the
        host decodes.
    pop_wait_io, pop_wait_compute, flush_wait : Metric
        Time that the user waited: in ``pop`` for reads; in ``pop`` until resampling was queued, or without a GPU done;
        in ``flush``.
    zarr_meta_hits, zarr_meta_misses, shard_idx_hits, shard_idx_misses : int
        Hits and misses of the caches of open arrays and of shard indexes.
    chunks_fetched, chunks_cached : int
        Chunks that were read from the storage, and those that the cache had; missing chunks, and arrays that
        zarr-python reads, are not counted. Batches that are read together need a chunk once.
    batches_emitted, batches_truncated, waves_emitted : int
        Batches that were popped; batches among them with fewer samples than ``batch_size``; batches whose reads were
        submitted, counted again where an array was rewritten before it was read.
    gpu_bytes_committed : int
        Limit of the device memory of the pipeline and its reader, from the configuration.
    samples_skipped : int
        Faulty samples, which their batches left out.
    seconds : float
        Elapsed time.
    """

    plan: Metric = Metric("plan")
    io: Metric = Metric("io")
    h2d: Metric = Metric("h2d")
    decompress: Metric = Metric("decompress")
    assemble: Metric = Metric("assemble")
    pop_wait_io: Metric = Metric("pop_wait_io")
    pop_wait_compute: Metric = Metric("pop_wait_compute")
    flush_wait: Metric = Metric("flush_wait")
    zarr_meta_hits: int = 0
    zarr_meta_misses: int = 0
    shard_idx_hits: int = 0
    shard_idx_misses: int = 0
    chunks_fetched: int = 0
    chunks_cached: int = 0
    batches_emitted: int = 0
    batches_truncated: int = 0
    waves_emitted: int = 0
    gpu_bytes_committed: int = 0
    samples_skipped: int = 0
    seconds: float = 0.0

    def since(self, earlier: Stats) -> Stats:
        """Return the difference from earlier counters; `gpu_bytes_committed`, which is no count, is kept."""
        values = {field.name: getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)}
        return Stats(**{**values, "gpu_bytes_committed": self.gpu_bytes_committed})

    @property
    def bound(self) -> str:
        """The bottleneck: ``"consumer"``, ``"resampling"``, ``"I/O"``, ``"decode and scatter"`` or ``"planning"``.

        It is ``"consumer"`` where the user waited less than a tenth of the time, or no batch was popped.
        """
        waited = self.pop_wait_io.ms + self.pop_wait_compute.ms
        if self.batches_emitted == 0 or waited < 100 * self.seconds:  # ms and s
            return "consumer"
        if self.pop_wait_compute.ms > self.pop_wait_io.ms:
            return "resampling"
        # Host times only: stages on the device overlap, and their sum may exceed the elapsed time.
        stages = {"I/O": self.io, "decode and scatter": self.assemble, "planning": self.plan}
        longest = max(stages, key=lambda name: stages[name].ms)
        return longest if stages[longest].ms > 0 else "I/O"

    def __str__(self) -> str:
        rows = [f"{'stage':<18}{'count':>9}{'seconds':>10}{'mean ms':>10}{'best ms':>10}{'GB/s':>8}"]
        for field in fields(self):
            name, metric = field.name, getattr(self, field.name)
            if isinstance(metric, Metric):
                rate = f"{metric.gb_per_s:.2f}" if metric.output_bytes or metric.input_bytes else "-"
                best = f"{metric.best_ms:.3f}" if math.isfinite(metric.best_ms) else "-"
                rows.append(
                    f"{name:<18}{metric.count:>9}{metric.ms / 1e3:>10.3f}{metric.mean_ms:>10.3f}{best:>10}{rate:>8}"
                )
        rows += [
            f"batches {self.batches_emitted} ({self.batches_truncated} truncated), submissions {self.waves_emitted}, "
            f"samples skipped {self.samples_skipped}",
            f"metadata {self.zarr_meta_hits} hits, {self.zarr_meta_misses} misses; "
            f"shard indexes {self.shard_idx_hits} hits, {self.shard_idx_misses} misses",
            f"chunks {self.chunks_fetched} fetched, {self.chunks_cached} from the cache",
            f"device memory {self.gpu_bytes_committed / 2**20:.0f} MiB",
            f"bound by: {self.bound}",
        ]
        return "\n".join(rows)
