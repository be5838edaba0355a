"""The record of a batch from the first pulled sample until the batch is popped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from linumpy.arrays import Array
from linumpy.stream.batches.feed import Pulled
from linumpy.stream.batches.memory import Lease
from linumpy.stream.config import Sample
from linumpy.stream.errors import StreamError
from linumpy.stream.planning.records import CropRead, PartShape
from linumpy.stream.resampling.on_host import Staged

if TYPE_CHECKING:
    from linumpy.gpu.read.ticket import Together


@dataclass
class InFlight:
    """A batch that was pulled, whose arrays are being opened, or whose reads were submitted."""

    batch_id: int
    pulled: list[Pulled]
    #: The exception of the iterable, in place of samples; other than by an ``Exception``, such as an interrupt, it is
    #: raised by ``pop`` as it is.
    raised: BaseException | None = None
    samples: list[Sample] = field(default_factory=list)  # the sample of each row
    faulty: list[StreamError] = field(default_factory=list)  # errors of samples that have no row
    parts: tuple[PartShape, ...] = ()
    lease: Lease | None = None  # slot of memory of the batch; None for a batch without rows
    #: The batch of each part. The arrays do not hold the lease, since tickets hold views of them and may outlive the
    #: batch.
    arrays: list[Array] = field(default_factory=list)
    #: Reads that share a ticket, and the row of each read.
    tickets: list[tuple[list[int], Together]] = field(default_factory=list)
    #: For each part: direct crops that reach out of their array, whose borders must be filled; staged crops.
    direct: list[list[CropRead]] = field(default_factory=list)
    staged: list[list[Staged]] = field(default_factory=list)
    stage: tuple[int, int] = (0, 0)  # offset in the memory and size of the staged crops of the batch
    #: Whether borders are filled and staged crops resampled. An interrupted ``pop``, called again, does not repeat it.
    is_filled: bool = False
    #: Number of copies of rows, over all parts, by which ``pop`` has closed up the rows of faulty samples.
    moved: int = 0
    read_errors: dict[int, StreamError] | None = None  # by row; None before the reads are over
    raised_errors: int = 0  # number of errors of samples that ``pop`` has raised

    @property
    def end(self) -> int:
        """Position after the last sample of the batch; 0 for a batch without samples."""
        return self.pulled[-1].position + 1 if self.pulled else 0

    def all_errors(self, errors: Mapping[int, StreamError]) -> tuple[StreamError, ...]:
        """Return the errors of samples without a row, then `errors`, those of rows that cannot be read."""
        return (*self.faulty, *(errors[row] for row in sorted(errors)))

    def abandon(self) -> None:
        """Cancel the reads, and wait until they no longer write to the batch's memory."""
        for _, ticket in self.tickets:
            ticket.cancel()
        for _, ticket in self.tickets:
            ticket.wait()
