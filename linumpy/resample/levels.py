"""Make the coarser resolution levels in a work folder.

In: the work folder of an image whose finest level is complete. Out: the coarser levels. Errors: those of reading and
writing.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from linumpy.gpu.kvikio_zarr import OwnReader
from linumpy.io.zarr_mode import read_on_host
from linumpy.plan.pyramid import Pyramid, split
from linumpy.resample.blocks.pipeline import level_chunks, read_to_device
from linumpy.resample.blocks.plans import scratch_within
from linumpy.write.new_image import NewImage
from linumpy.write.pyramid import halve, halve_by_threads
from linumpy.write.raw_chunks import writing_threads
from linumpy.write.tasks import Finish, done
from linumpy.write.writer import STEP_BYTES


def make_coarser_levels(folder: Path, image: NewImage, kind: str, limit: int | None = None) -> None:
    """Make the coarser resolutions of an image, on the device or the host (`kind`), within `limit` bytes."""
    pyramid = Pyramid(image.shapes, image.stored, image.dtype.itemsize)
    # A finer box takes at most an eighth of the limit: the sums of voxels and the scratch of the read take memory, too.
    nbytes = STEP_BYTES if limit is None else min(STEP_BYTES, limit // 8)
    scratch = None if limit is None else scratch_within(limit)
    threads = writing_threads()
    with ThreadPoolExecutor(threads, "linumpy-chunks") as pool, closing(OwnReader(scratch)) as reader:
        levels = [level_chunks(folder / str(level), pool, threads) for level in range(len(image.shapes))]
        for level, (finer, coarser) in enumerate(itertools.pairwise(levels), 1):
            whole = tuple(slice(0, n) for n in image.shapes[level])
            finish: Finish = done
            for box in split(whole, pyramid.step(level, nbytes >> len(whole))):
                source = pyramid.finer(level, box)
                factors = pyramid.factors(level)
                if kind == "cuda":
                    block = halve(read_to_device(finer.array, source, reader), image.downsampling, factors)
                else:
                    on_host = read_on_host(finer.array, source)
                    block = halve_by_threads(on_host, image.downsampling, pool, threads, factors)
                finish_next = coarser.start(box, block)
                finish()  # wait for the last box while the device works on this box
                finish = finish_next
            finish()
