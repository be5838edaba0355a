"""What a writer has written, counted for the user."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class WriteReport:
    """What a writer has written.

    Attributes
    ----------
    decoded_nbytes : int
        Bytes of the voxels of all resolutions.
    stored_nbytes : int
        Bytes of the files of their chunks and shards.
    seconds : float
        From the beginning of the ``with`` block.
    why_host : str
        Why the host encoded what came from a device; empty if it did not.
    """

    decoded_nbytes: int
    stored_nbytes: int
    seconds: float
    why_host: str

    @property
    def ratio(self) -> float:
        """Decoded bytes for each stored one; infinite where all voxels are the fill value."""
        return self.decoded_nbytes / self.stored_nbytes if self.stored_nbytes else math.inf

    @property
    def rate(self) -> float:
        """Decoded bytes a second."""
        return self.decoded_nbytes / max(self.seconds, 1e-9)
