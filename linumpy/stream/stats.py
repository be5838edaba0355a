"""Counters of a pipeline, and a table that names its bottleneck."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class Metric:
    """Time of one stage.

    Attributes
    ----------
    count : int
        How often it was measured.
    seconds : float
        In all. Stages run side by side, so that their sum may exceed the time on the clock.
    nbytes : int
        Bytes that passed; 0 where that is not counted.
    """

    count: int = 0
    seconds: float = 0.0
    nbytes: int = 0

    def plus(self, seconds: float, nbytes: int = 0, count: int = 1) -> Metric:
        """Return the metric with another measurement."""
        return Metric(self.count + count, self.seconds + seconds, self.nbytes + nbytes)

    def __sub__(self, other: Metric) -> Metric:
        return Metric(self.count - other.count, self.seconds - other.seconds, self.nbytes - other.nbytes)

    @property
    def mean_ms(self) -> float:
        """Mean time in ms; 0 without a measurement."""
        return 1e3 * self.seconds / self.count if self.count else 0.0

    @property
    def gb_per_s(self) -> float:
        """Rate in GB/s; 0 where it is not known."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True)
class Stats:
    """Counters of a pipeline since its construction or the last ``stats_reset``.

    Attributes
    ----------
    plan, io, assemble : Metric
        Planning of batches; the reader's waiting for reads; its queueing of copies, decoding and scattering.
    h2d, decompress : Metric
        On the device, by its own clock: copies to it, and decoding, bytes are those decoded to. Slabs that are decoded
        at the same time count each by itself. Empty without a GPU, and `decompress` for chunks that the host decodes.
    pop_wait_io, pop_wait_compute, flush_wait : Metric
        Time in which the consumer waited: for the reader, for resampling to be queued (on the CPU: done), in ``flush``.
    zarr_meta_hits, zarr_meta_misses, shard_idx_hits, shard_idx_misses : int
        Of the caches of open arrays and of shard indexes.
    batches_emitted, batches_truncated, waves_emitted : int
        Batches that were popped; those with fewer samples than ``batch_size``; groups of reads that were submitted.
    gpu_bytes_committed : int
        Device memory of the pipeline and its reader.
    samples_skipped : int
        Faulty samples that ``on_error="skip"`` left out.
    seconds : float
        Time on the clock.
    """

    plan: Metric = field(default_factory=Metric)
    io: Metric = field(default_factory=Metric)
    h2d: Metric = field(default_factory=Metric)
    decompress: Metric = field(default_factory=Metric)
    assemble: Metric = field(default_factory=Metric)
    pop_wait_io: Metric = field(default_factory=Metric)
    pop_wait_compute: Metric = field(default_factory=Metric)
    flush_wait: Metric = field(default_factory=Metric)
    zarr_meta_hits: int = 0
    zarr_meta_misses: int = 0
    shard_idx_hits: int = 0
    shard_idx_misses: int = 0
    batches_emitted: int = 0
    batches_truncated: int = 0
    waves_emitted: int = 0
    gpu_bytes_committed: int = 0
    samples_skipped: int = 0
    seconds: float = 0.0

    def since(self, earlier: Stats) -> Stats:
        """Return what was counted since then; `gpu_bytes_committed` is no count and stays."""
        values = {one.name: getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)}
        return Stats(**{**values, "gpu_bytes_committed": self.gpu_bytes_committed})

    @property
    def bound(self) -> str:
        """What bounds the pipeline: ``"consumer"``, or the stage of the reader that takes longest."""
        waited = self.pop_wait_io.seconds + self.pop_wait_compute.seconds
        if self.batches_emitted == 0 or waited < 0.1 * self.seconds:
            return "consumer"
        if self.pop_wait_compute.seconds > self.pop_wait_io.seconds:
            return "resampling"
        # By the clock of the host alone: what the device does overlaps, and its sums may be longer than the time that
        # it takes.
        stages = {"I/O": self.io, "decode and scatter": self.assemble, "planning": self.plan}
        longest = max(stages, key=lambda name: stages[name].seconds)
        return longest if stages[longest].seconds > 0 else "I/O"

    def __str__(self) -> str:
        rows = [f"{'stage':<18}{'count':>9}{'seconds':>10}{'mean ms':>10}{'GB/s':>8}"]
        for one in fields(self):
            metric = getattr(self, one.name)
            if isinstance(metric, Metric):
                rate = f"{metric.gb_per_s:.2f}" if metric.nbytes else "-"
                rows.append(f"{one.name:<18}{metric.count:>9}{metric.seconds:>10.3f}{metric.mean_ms:>10.3f}{rate:>8}")
        rows += [
            f"batches {self.batches_emitted} ({self.batches_truncated} truncated), submissions {self.waves_emitted}, "
            f"samples skipped {self.samples_skipped}",
            f"metadata {self.zarr_meta_hits} hits, {self.zarr_meta_misses} misses; "
            f"shard indexes {self.shard_idx_hits} hits, {self.shard_idx_misses} misses",
            f"device memory {self.gpu_bytes_committed / 2**20:.0f} MiB",
            f"bound by: {self.bound}",
        ]
        return "\n".join(rows)
