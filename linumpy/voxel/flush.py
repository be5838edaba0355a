"""Records of a flush: the slabs that a session has computed and written so far.

In: slabs that a :class:`~linumpy.voxel.session.VoxelSession` computes. Out: the progress of the flush, and the text of
its error.
"""

from __future__ import annotations

from dataclasses import dataclass

from linumpy.arrays import Array


@dataclass(frozen=True, slots=True)
class Flushed:
    """The changes of a flush.

    Attributes
    ----------
    added, removed : int
        Number of voxels that became true, and that became false.
    slabs : int
        Number of slabs that were written; 0 if nothing was queued and nothing had to be copied to `out`.
    """

    added: int = 0
    removed: int = 0
    slabs: int = 0


@dataclass(frozen=True)
class ComputedSlab:
    """A slab that is computed, but not yet written.

    - `planes`: planes to write, in the dtype of the target.
    - `added`, `removed`: number of voxels that become true, and that become false.
    - `above`: the original mask of the slab's last planes, which the operations on the next slab need.
    """

    planes: Array
    added: int
    removed: int
    above: Array


@dataclass(frozen=True)
class FlushProgress:
    """Progress of a flush; the session replaces the record as a whole, so it is consistent after an interrupt.

    - `start`: the first plane that is not written.
    - `above`: the original mask of the planes above `start` that the operations need; None before the first slab is
      written.
    - `pending`: the slab that begins at `start`.
    """

    start: int = 0
    above: Array | None = None
    pending: ComputedSlab | None = None
    done: Flushed = Flushed()

    def after(self, slab: ComputedSlab) -> FlushProgress:
        """Return the progress after a slab is written."""
        done = self.done
        counts = Flushed(done.added + slab.added, done.removed + slab.removed, done.slabs + 1)
        return FlushProgress(self.start + slab.planes.shape[0], slab.above, None, counts)

    def message(self, depth: int, error: Exception, *, partly: bool) -> str:
        """Return the text of the error that stopped a flush of `depth` planes.

        `partly`: the pending slab may be written in part.
        """
        stop = self.start + (self.pending.planes.shape[0] if partly and self.pending is not None else 0)
        in_part = f"planes {self.start}:{stop} may be written in part, " if partly else ""
        return (
            f"planes 0:{self.start} of {depth} are done, {in_part}planes {stop}:{depth} are unchanged; "
            f"call flush() again to continue from plane {self.start}. The cause: {error}"
        )
