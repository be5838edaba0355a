"""Time regions and crops of open arrays, by one Reader.

Arrays of 512×1024×1024 uint16 are made below --folder: raw and zstd, 64³ chunks in shards of 256×512×512 and in files.
"one" reads regions one after another: its times are of a region. "crops" requests batches of random crops, four batches
ahead; "kept" does the same when all chunks are kept in device memory; in "threads" each of eight threads reads one crop
after another. Up to 16 regions are compared with the array in memory first.

For example:
  linum-benchmark regions --folder /dev/shm --json regions.json
  linum-benchmark regions --folder /dev/shm --device cpu
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linumpy.benchmark.timing import GIB, Bench, Suite
from linumpy.device import require_cuda, to_host
from linumpy.gpu import Reader
from linumpy.io.open import open_source
from linumpy.io.zarr_mode import read_on_host
from linumpy.plan.layout import ArrayLayout
from linumpy.testing.stores import StoreSpec

#: The array of this suite and of `remote`, in shards, as files, raw and encoded.
SHARD = (256, 512, 512)
ARRAYS = {
    "raw shards": StoreSpec(name="raw shards", chunks=(64, 64, 64), shards=SHARD),
    "zstd shards": StoreSpec(name="zstd shards", chunks=(64, 64, 64), shards=SHARD, codec="zstd"),
    "raw files": StoreSpec(name="raw files", chunks=(64, 64, 64)),
    "zstd files": StoreSpec(name="zstd files", chunks=(64, 64, 64), codec="zstd"),
}
_AHEAD = 4

Box = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class Reads:
    """Regions of a shape that a run reads: `count` of them, `batch` requested together, `ahead` batches early."""

    name: str
    shape: tuple[int, int, int]
    count: int
    batch: int = 1
    aligned: bool = False
    ahead: int = 0
    threads: int = 1
    kept: bool = False


_CROP = (64, 256, 256)
READS = (
    Reads(name="one 64³, aligned", shape=(64, 64, 64), count=200, aligned=True),
    Reads(name="one 64³ at random", shape=(64, 64, 64), count=200),
    Reads(name="one 128³, aligned", shape=(128, 128, 128), count=100, aligned=True),
    Reads(name="crops of 64×256×256", shape=_CROP, count=480, batch=8, ahead=_AHEAD),
    Reads(name="crops of 32³", shape=(32, 32, 32), count=3840, batch=64, ahead=_AHEAD),
    Reads(name="threads, crops of 64×256×256", shape=_CROP, count=800, threads=8),
    Reads(name="kept, crops of 64×256×256", shape=_CROP, count=480, batch=8, ahead=_AHEAD, kept=True),
    Reads(name="kept, crops of 32³", shape=(32, 32, 32), count=3840, batch=64, ahead=_AHEAD, kept=True),
)


def _run(bench: Bench, args: argparse.Namespace) -> None:
    with bench.work_folder() as folder:
        for name in bench.only or ("raw shards", "zstd shards", "raw files"):
            path = ARRAYS[name].scaled(bench.scale).make(folder)
            voxels = read_on_host(open_source(path))
            for reads in READS:
                _time(bench, f"{name}: {reads.name}", path, voxels, reads)
            shutil.rmtree(path)


def _time(bench: Bench, name: str, path: Path, voxels: np.ndarray, reads: Reads) -> None:
    shape = [max(1, round(n * bench.scale)) for n in reads.shape]
    boxes = _boxes(voxels.shape, shape, reads, max(1, round(64 * bench.scale)))
    cache: dict[str, Any] = {"cache_bytes": 2 * voxels.nbytes} if reads.kept else {}
    with Reader(device=None if bench.on_gpu else "cpu", **cache) as reader:
        layout = reader.layout_of(path)
        if reads.kept:
            reader.submit(layout, (slice(None),) * voxels.ndim).result()

        def check(_: object) -> str:
            for box in boxes[:16]:
                if not np.array_equal(to_host(reader.submit(layout, box).result()), voxels[box]):
                    return f"the region {box} is wrong"
            return ""

        # Times of single regions are of one region, those of crops of the whole run.
        count = len(boxes) if reads.batch == reads.threads == 1 else 1
        nbytes = math.prod(shape) * voxels.itemsize * len(boxes) / count
        text = f"{len(boxes)} regions of {shape}, {reads.batch} at a time, {reads.threads} thread(s)"
        with bench.case(name, nbytes / GIB, description=text) as case:
            case.time("linumpy", lambda: _read(reader, layout, boxes, reads), check, share=count)


def _boxes(extent: Sequence[int], shape: Sequence[int], reads: Reads, chunk: int) -> list[Box]:
    """Draw the regions of a run; they are the same in each run."""
    rng, boxes = np.random.default_rng(3), []
    for _ in range(reads.count):
        first = [int(rng.integers(0, max(1, n - size + 1))) for n, size in zip(extent, shape, strict=True)]
        first = [begin // chunk * chunk for begin in first] if reads.aligned else first
        boxes.append(tuple(slice(begin, begin + size) for begin, size in zip(first, shape, strict=True)))
    return boxes


def _read(reader: Reader, layout: ArrayLayout, boxes: list[Box], reads: Reads) -> None:
    """Read all regions; each thread waits for its own regions."""
    if reads.threads == 1:
        _read_some(reader, layout, boxes, reads)
        return
    parts = [boxes[n :: reads.threads] for n in range(reads.threads)]
    with ThreadPoolExecutor(reads.threads) as pool:
        list(pool.map(lambda part: _read_some(reader, layout, part, reads), parts))


def _read_some(reader: Reader, layout: ArrayLayout, boxes: list[Box], reads: Reads) -> None:
    pending: deque[Sequence[Any]] = deque()

    def wait(max_pending: int) -> None:
        while len(pending) > max_pending:
            for ticket in pending.popleft():
                ticket.result()

    with require_cuda().cuda.Stream(non_blocking=True) if reader.on_device else nullcontext():
        for first in range(0, len(boxes), reads.batch):
            batch = boxes[first : first + reads.batch]
            single = len(batch) == 1
            pending.append([reader.submit(layout, batch[0])] if single else reader.submit_many(layout, batch))
            wait(reads.ahead)
        wait(0)


SUITE = Suite(run=_run, help=__doc__, cases=tuple(ARRAYS))
