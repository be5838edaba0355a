"""Write whole chunks of a resolution, and the coarser chunks that are made from them.

In: boxes of whole chunks or shards, on host or device. Out: files of all resolutions. ``raw_chunks`` writes the chunks
of one array, ``pyramid`` halves voxels, and ``state`` records which chunks are stored. Errors: those of writing and of
reading written chunks back.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from linumpy.arrays import Array
from linumpy.device import is_device_array, to_host
from linumpy.plan.pyramid import Box, Pyramid, within
from linumpy.write.pyramid import halve, halve_by_threads
from linumpy.write.raw_chunks import Chunks, read_back
from linumpy.write.state import WriteState
from linumpy.write.tasks import Finish, finish_all


class Levels:
    """The arrays of an image, finest first, while they are written.

    - `chunks`: writer of each resolution's chunks.
    - `pyramid`: plan of the resolutions: the finer voxels that each chunk is made from.
    - `downsampling`: as for :class:`linumpy.write.writer.OmeZarrWriter`.
    - `pool`: threads that halve voxels on the host.
    - `threads`: number of threads in the pool.
    """

    def __init__(
        self,
        chunks: list[Chunks],
        pyramid: Pyramid,
        downsampling: str,
        state: WriteState,
        pool: ThreadPoolExecutor,
        threads: int,
    ) -> None:
        self._chunks = chunks
        self._pyramid, self._downsampling, self._state = pyramid, downsampling, state
        self._pool, self._threads = pool, threads

    def store(self, level: int, box: Box, block: Array) -> list[Finish]:
        """Start to write whole chunks, and all coarser chunks that are made from these chunks alone.

        Returns a function for each resolution, which waits until the chunks of the resolution are stored.
        """
        finish = self._chunks[level].start(box, block)

        def wait_until_stored() -> None:
            finish()
            self._state.mark_stored(level, box)

        if level + 1 == len(self._chunks) or (coarser := self._pyramid.coarser(level, box)) is None:
            return [wait_until_stored]
        finer = within(self._pyramid.finer(level + 1, coarser), box)
        return [wait_until_stored, *self.store(level + 1, coarser, self._halved(level + 1, block[finer]))]

    def _halved(self, level: int, block: Array) -> Array:
        """Make the voxels of `level` from a block of the next finer resolution, on the host or device of the block."""
        factors = self._pyramid.factors(level)
        if is_device_array(block):
            return halve(block, self._downsampling, factors)
        return halve_by_threads(to_host(block), self._downsampling, self._pool, self._threads, factors)

    def make_shared(self, nbytes: int, *, on_device: bool) -> None:
        """Make the coarser chunks that several regions share, from stored finer chunks, at most `nbytes` at a time."""
        for level in range(1, len(self._chunks)):
            for box in self._state.to_make(level, nbytes):
                array = self._chunks[level - 1].array
                finer = read_back(array, self._pyramid.finer(level, box), on_device=on_device)
                finish_all(self.store(level, box, self._halved(level, finer)))
