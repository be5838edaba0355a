"""Code that ``resample_zarr`` and ``convert_zarr`` share: checks, records of blocks, coarser levels."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from linumpy.arrays import DeviceName
from linumpy.io.output.checks import check_free_space, check_parent, checked_version, target_of
from linumpy.io.output.folders import unfinished_beside
from linumpy.io.output.objects import ObjectFolder, Target
from linumpy.io.source import Source, describe_source
from linumpy.io.stores.remote import is_remote
from linumpy.io.zarr_mode import read_on_host
from linumpy.plan.pyramid import Box, Pyramid, shape_of, split
from linumpy.resample.blocks.pipeline import level_chunks
from linumpy.resample.blocks.plans import scratch_within
from linumpy.resample.resumable import Resumable
from linumpy.write.new_image import NewImage
from linumpy.write.pyramid import halve, halve_by_threads
from linumpy.write.tasks import Finish, done, writing_threads
from linumpy.write.writer import STEP_BYTES, Progress

log = logging.getLogger(__name__)

#: A chunk of so many voxels with at most so many different values is probably one of labels.
_MIN_VOXELS, _FEW_VALUES = 512, 32
#: Larger chunks are not decoded only to count their values.
_MAX_CHUNK_NBYTES = 64 * 2**20


def checked_output(
    output: str | Path, ngff_version: str | None, storage_options: Mapping[str, Any] | None = None
) -> tuple[Target, str | None]:
    """Check the place of a target; return it, and the version of NGFF, which ``.ozx`` files restrict."""
    target = target_of(output, storage_options)
    check_parent(target)
    return target, checked_version(target, ngff_version)


def options_of_source(source: Source, target: Target, options: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return `storage_options` for the source: None if they are for the target alone."""
    for_target_alone = isinstance(target, ObjectFolder) and not (isinstance(source, str) and is_remote(source))
    return None if for_target_alone else options


def check_space(target: Target, nbytes: int, *, encoded: bool) -> None:
    """Raise an error if the disk lacks the space for a target, unless a stopped run has begun to fill the target."""
    if isinstance(target, Path) and not unfinished_beside(target).exists():
        check_free_space(target, nbytes, encoded=encoded)


def warn_of_labels(array: zarr.Array, advice: str) -> None:
    """Log a warning if the chunk in the middle of an array of integers holds few values: means of labels are no labels.

    `advice` says what to do. Chunks of more than 64 MiB are not read.
    """
    middle = tuple(slice(n // 2 // c * c, n // 2 // c * c + c) for n, c in zip(array.shape, array.chunks, strict=True))
    if array.dtype.kind not in "iu" or math.prod(array.chunks) * array.dtype.itemsize > _MAX_CHUNK_NBYTES:
        return
    try:
        voxels = read_on_host(array, middle)
    except Exception:  # the run reads this chunk again, and its error names the chunk
        return
    if voxels.size >= _MIN_VOXELS and 1 < len(np.unique(voxels)) <= _FEW_VALUES:
        log.warning("%s holds few values, of which means are computed: %s", describe_source(array), advice)


@dataclass(frozen=True)
class BlockRecord:
    """Records the complete blocks of one array in a resumable folder, and reports the bytes of blocks as progress.

    - `number`: index of the array among the grids of the request.
    - `stored`: shape of a shard, or else of a chunk, along the axes of a block.
    - `entries`: index along each axis of time and channel of the array; blocks do not have these axes.
    """

    state: Resumable
    number: int
    stored: Sequence[int]
    itemsize: int
    report: Progress
    entries: tuple[int, ...] = ()

    def is_complete(self, box: Box) -> bool:
        """Return whether an earlier run completed a block, and report it as progress if so."""
        complete = self.state.holds(*self._corners(box), self.number)
        if complete:
            self._report(box)
        return complete

    def add(self, box: Box) -> None:
        """Record and report a block whose bytes have been written."""
        self.state.add(*self._corners(box), self.number)
        self._report(box)

    def _corners(self, box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the first index and the end of the stored objects of a block, along each axis of the array."""
        start = tuple(b.start // s for b, s in zip(box, self.stored, strict=True))
        stop = tuple(-(-b.stop // s) for b, s in zip(box, self.stored, strict=True))
        return self.entries + start, (*(entry + 1 for entry in self.entries), *stop)

    def _report(self, box: Box) -> None:
        self.report(math.prod(shape_of(box)) * self.itemsize)


def make_coarser_levels(folder: Target, image: NewImage, device: DeviceName, memory_bytes: int | None = None) -> None:
    """Make the coarser resolutions of an image, on a `device`, ``"cuda"`` or ``"cpu"``."""
    pyramid = Pyramid(image.shapes, image.stored, image.dtype.itemsize)
    # A finer box takes at most an eighth of the limit: the sums of voxels and the scratch of the read take memory, too.
    nbytes = STEP_BYTES if memory_bytes is None else min(STEP_BYTES, memory_bytes // 8)
    threads = writing_threads(folder)
    with ExitStack() as scope:
        pool = scope.enter_context(ThreadPoolExecutor(threads, "linumpy-chunks"))
        chunks = [level_chunks(folder / str(level), pool, threads) for level in range(len(image.shapes))]
        if device == "cuda":
            from linumpy.gpu.kvikio_zarr import OwnReader
            from linumpy.resample.blocks.on_device import read_to_device

            scratch = None if memory_bytes is None else scratch_within(memory_bytes)
            reader = scope.enter_context(closing(OwnReader(scratch)))
        for level, (finer, coarser) in enumerate(itertools.pairwise(chunks), 1):
            whole = tuple(slice(0, n) for n in image.shapes[level])
            finish: Finish = done
            for box in split(whole, pyramid.step(level, nbytes >> len(whole))):
                source, factors = pyramid.finer(level, box), pyramid.factors(level)
                if device == "cuda":
                    block = halve(read_to_device(finer.array, source, reader), image.downsampling, factors)
                else:
                    on_host = read_on_host(finer.array, source)
                    block = halve_by_threads(on_host, image.downsampling, pool, threads, factors)
                finish_next = coarser.start(box, block)
                finish()  # wait for the last box while the device works on this box
                finish = finish_next
            finish()
