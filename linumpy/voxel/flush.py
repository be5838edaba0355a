"""Records of a flush: what a session has computed and written so far.

In: slabs that a :class:`~linumpy.voxel.session.VoxelSession` computes. Out: its progress, and the text of an error.
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
        Voxels that became true, or false.
    slabs : int
        Slabs that were written; 0 if nothing was queued.
    """

    added: int = 0
    removed: int = 0
    slabs: int = 0


@dataclass(frozen=True)
class ComputedSlab:
    """A slab that is computed, but not yet written.

    Attributes
    ----------
    planes : array
        Planes to write.
    added, removed : int
        Voxels that become true, or false.
    above : array of bool
        The original values of its last planes, which the next slab needs.
    """

    planes: Array
    added: int
    removed: int
    above: Array


@dataclass(frozen=True)
class FlushProgress:
    """Progress of a flush; replaced as a whole, so that it is consistent after an interrupt.

    Attributes
    ----------
    start : int
        The first plane that is not written.
    above : array of bool or None
        The original values of the planes before it that the operations need.
    pending : ComputedSlab or None
        The slab that begins at `start`.
    done : Flushed
        Changes so far.
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
        """Describe where a flush of `depth` planes stopped; `partly`: the pending slab may be written in part."""
        stop = self.start + (self.pending.planes.shape[0] if partly and self.pending is not None else 0)
        half = f"planes {self.start}:{stop} may be written in part, " if partly else ""
        return (
            f"planes 0:{self.start} of {depth} are done, {half}planes {stop}:{depth} are unchanged; "
            f"call flush() again to continue from plane {self.start}. The cause: {error}"
        )
