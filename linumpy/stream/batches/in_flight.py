"""Records of batches that are not popped yet: pulled, then submitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from linumpy.arrays import Array
from linumpy.stream.batches.feed import Pulled
from linumpy.stream.batches.memory import Lease
from linumpy.stream.config import Sample
from linumpy.stream.errors import StreamError
from linumpy.stream.planning.records import CropRead, PartShape
from linumpy.stream.reading.reads import ReadTicket
from linumpy.stream.reading.sources import ArrayRequest
from linumpy.stream.resampling.on_host import Staged

#: A pulled sample, and the requested array of each part.
Requested = tuple[Pulled, list[ArrayRequest]]


@dataclass(frozen=True)
class PulledBatch:
    """Samples of a batch whose arrays are being opened, or no samples and an error that the iterable raised."""

    samples: list[Requested]
    error: BaseException | None = None


@dataclass
class InFlight:
    """A batch that is being submitted, or whose reads were submitted."""

    batch_id: int  # number of the batch
    end: int  # position after the last sample of the batch; 0 for a batch without samples
    requested: list[Requested]  # the samples as they were pulled, each with the requested arrays of its parts
    #: An exception of the iterable that is no ``Exception``, such as an interrupt; ``pop`` raises it.
    raised: BaseException | None = None
    samples: list[Sample] = field(default_factory=list)  # the sample of each row
    faulty: list[StreamError] = field(default_factory=list)  # errors of samples that have no row
    parts: tuple[PartShape, ...] = ()  # shape and dtype of each part
    lease: Lease | None = None  # slot of memory of the batch; None for a batch without rows
    #: The batch of each part. The arrays do not hold the lease, since tickets hold views of them and may outlive the
    #: batch.
    arrays: list[Array] = field(default_factory=list)
    #: Reads that share a ticket, and the row of each read.
    tickets: list[tuple[list[int], ReadTicket]] = field(default_factory=list)
    #: For each part: direct crops that reach out of their array, whose borders must be filled; staged crops.
    direct: list[list[CropRead]] = field(default_factory=list)
    staged: list[list[Staged]] = field(default_factory=list)
    stage: tuple[int, int] = (0, 0)  # offset in the memory and size of the staged crops of the batch
    #: Whether borders are filled and staged crops resampled. An interrupted ``pop``, called again, does not repeat it.
    is_filled: bool = False
    #: Number of copies of rows, over all parts, by which ``pop`` has closed up the rows of faulty samples.
    moved: int = 0
    #: The error of each row that cannot be read; None before the reads are over.
    read_errors: dict[int, StreamError] | None = None
    raised_errors: int = 0  # number of errors of samples that ``pop`` has raised

    def all_errors(self, errors: Mapping[int, StreamError]) -> tuple[StreamError, ...]:
        """Return the errors of samples without a row, then `errors`, those of rows that cannot be read."""
        return (*self.faulty, *(errors[row] for row in sorted(errors)))

    def abandon(self) -> None:
        """Cancel the reads, and wait until they no longer write to the batch's memory."""
        for _, ticket in self.tickets:
            ticket.cancel()
        for _, ticket in self.tickets:
            ticket.wait()
