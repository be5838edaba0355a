"""Tables of a slab as they are carried out, and a slab whose copies and kernels have been queued."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from linumpy.gpu.staging.scatter import Conversion, ScatterLaunch
from linumpy.plan.read.scatter import ScatterTable

Tables = list[tuple[Conversion, ScatterTable]]


@dataclass(eq=False)
class Placed:
    """A slab whose copies and kernels have been queued.

    Attributes
    ----------
    stream : int
        Number of the stream that its last kernel runs on.
    event : object
        Recorded behind that kernel; None in host memory.
    status : numpy.ndarray of int32 or None
        Of each chunk that the device decodes, once `event` is complete: 0 where all is well. None for raw slabs.
    timing : tuple of events or None
        Before decoding, before and behind the scatter.
    copied : (event, event, int) or None
        Around the copy to the device, and its bytes; where `timing` is wanted and there was a copy.
    """

    stream: int
    event: Any
    status: np.ndarray | None = None
    timing: tuple[Any, Any, Any] | None = None
    copied: tuple[Any, Any, int] | None = None


@dataclass(frozen=True, eq=False)
class TablePlan:
    """Tables of one slab.

    Attributes
    ----------
    tables : list of (Conversion, ScatterTable)
        As they are, for host memory; none on a device.
    launches : list of ScatterLaunch
        As the device carries them out; none in host memory.
    writes_cache : bool
        Whether chunks are copied into the cache too.
    """

    tables: Tables
    launches: list[ScatterLaunch]
    writes_cache: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all words."""
        return sum(launch.nbytes for launch in self.launches)

    def moved(self, nbytes: int) -> TablePlan:
        """Shift all outputs by so many bytes, a multiple of the widest unit."""
        tables = [(conversion, replace(table, target=table.target + nbytes)) for conversion, table in self.tables]
        return TablePlan(tables, [launch.moved(nbytes) for launch in self.launches], self.writes_cache)

    def write(self, view: np.ndarray) -> None:
        """Lay out the words of all tables one behind the other."""
        begin = 0
        for launch in self.launches:
            view[begin : begin + launch.words.nbytes] = launch.words.view(np.uint8)
            begin += launch.nbytes
