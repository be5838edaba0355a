"""Regions of open arrays by one Reader: the time of a region, crops with and without kept chunks, many threads.

Before a case is timed, up to 16 of its regions are read and compared with the array in memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from linumpy.benchmark.cases import Case, Entry, Mark, Prepared, Suite, check_scale
from linumpy.benchmark.data import work_folder
from linumpy.benchmark.runner import CaseResult
from linumpy.benchmark.shared.stores import StoredArray
from linumpy.benchmark.shared.volumes import make_volumes
from linumpy.device import require_cuda, resolve, to_host, usable_cores
from linumpy.gpu import Reader
from linumpy.plan.layout import ArrayLayout

_DESCRIPTION = """Time regions of open arrays, by one Reader, on this machine's GPU or into host memory.

Arrays of 512×1024×1024 uint16 are made below --folder: raw and zstd, 64³ chunks in shards of 256×512×512 and in files.
"one" reads regions one after another; "crops" requests batches of random crops, four batches ahead; "kept" does the
same when all chunks are kept in device memory; in "threads" each of eight threads reads one crop after another. The
last table has milliseconds a region.

For example:
  linum-benchmark regions --folder /dev/shm --json regions.json
"""

#: Arrays by name: codec, and whether there are shards.
_ARRAYS = {"raw shards": ("none", True), "zstd shards": ("zstd", True), "raw files": ("none", False)}
_AHEAD, _THREADS, _SEED = 4, 8, 3

Box = tuple[slice, ...]


@dataclass(frozen=True)
class RegionWork:
    """Regions of one array: a run reads `count` regions of a `shape`, of which `batch` are submitted together.

    `ahead` further batches are submitted before the oldest is waited for; `threads` share the regions. Regions are
    `aligned` to chunks or not; `kept` says whether all chunks are in device memory before the runs. `reach` maps names
    of arrays to the rate to reach: milliseconds per region for one thread that reads single regions, else GiB/s.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    batch: int = 1
    aligned: bool = False
    ahead: int = 0
    threads: int = 1
    kept: bool = False
    reach: Mapping[str, float] = field(default_factory=dict)


_CROP = (64, 256, 256)
WORKS = (
    RegionWork("one 64³, aligned", (64, 64, 64), 200, aligned=True, reach={"raw shards": 0.15, "zstd shards": 0.6}),
    RegionWork("one 64³ at random", (64, 64, 64), 200, reach={"raw shards": 0.4, "zstd shards": 1.2}),
    RegionWork("one 128³, aligned", (128, 128, 128), 100, aligned=True, reach={"zstd shards": 1.5}),
    RegionWork("crops of 64×256×256", _CROP, 480, batch=8, ahead=_AHEAD),
    RegionWork("crops of 32³", (32, 32, 32), 3840, batch=64, ahead=_AHEAD),
    RegionWork("threads", _CROP, 800, threads=_THREADS, reach={"zstd shards": 20, "raw shards": 20}),
    RegionWork("kept, crops of 64×256×256", _CROP, 480, batch=8, ahead=_AHEAD, kept=True, reach={"zstd shards": 150}),
    RegionWork("kept, crops of 32³", (32, 32, 32), 3840, batch=64, ahead=_AHEAD, kept=True),
)


@contextmanager
def region_cases(
    *, folder: Path | None, scale: float, only: Sequence[str] = (), use_gpu: bool | None = None
) -> Iterator[tuple[Path, Iterator[Case]]]:
    """Yield a new folder, and cases of arrays that are made there; the folder is removed at the end."""
    check_scale(scale)
    on_gpu = resolve().is_cuda if use_gpu is None else use_gpu
    with work_folder(folder) as path:
        volumes = make_volumes(_ARRAYS, only, path, scale)
        works = [work for work in WORKS if on_gpu or not work.kept]
        yield path, (_case(stored, work, scale, on_gpu) for stored in volumes for work in works)


def _case(stored: StoredArray, work: RegionWork, scale: float, on_gpu: bool) -> Case:
    shape = tuple(max(1, round(size * scale)) for size in work.shape)
    count = max(work.batch, round(work.count * min(1.0, 8 * scale)))
    nbytes = count * math.prod(shape) * stored.dtype.itemsize
    rate = work.reach.get(stored.name)
    if rate is not None and work.batch == 1 and work.threads == 1:  # milliseconds per region
        rate = nbytes / count / 2**30 / (rate / 1000)
    entry = Entry("linumpy", "Reader", lambda: _prepared(stored, work, shape, count, on_gpu), "ours")
    return Case(
        f"{stored.name}: {work.name}",
        nbytes,
        (entry,),
        (f"{count} regions of {'×'.join(map(str, shape))}, {work.batch} at a time, {work.threads} thread(s)",),
        {"regions": count, "threads": work.threads},
        () if rate is None else (Mark(rate),),
        "" if scale == 1 and on_gpu else "marks are for a GPU and a scale of 1",
    )


def boxes_of(stored: StoredArray, work: RegionWork, shape: tuple[int, ...], count: int) -> list[Box]:
    """Draw the regions of a run; they are the same in each run."""
    rng = np.random.default_rng(_SEED)
    boxes = []
    for _ in range(count):
        first = [int(rng.integers(0, extent - size + 1)) for extent, size in zip(stored.shape, shape, strict=True)]
        if work.aligned:
            first = [begin // chunk * chunk for begin, chunk in zip(first, stored.chunks, strict=True)]
        boxes.append(tuple(slice(begin, begin + size) for begin, size in zip(first, shape, strict=True)))
    return boxes


@contextmanager
def _prepared(
    stored: StoredArray, work: RegionWork, shape: tuple[int, ...], count: int, on_gpu: bool
) -> Iterator[Prepared]:
    voxels = np.asarray(zarr.open_array(stored.path, mode="r")[...])
    boxes = boxes_of(stored, work, shape, count)
    cache: dict[str, Any] = {"cache_bytes": 2 * stored.nbytes} if work.kept else {}
    with Reader(device=None if on_gpu else "cpu", **cache) as reader:
        layout = reader.layout_of(stored.path)
        if work.kept:
            reader.submit(layout, (slice(None),) * len(stored.shape)).result()

        def check(_: object) -> str:
            for box in boxes[:16]:
                if not np.array_equal(to_host(reader.submit(layout, box).result()), voxels[box]):
                    return f"the region {box} is wrong"
            return ""

        yield Prepared(lambda: _read(reader, layout, boxes, work), check)


def _read(reader: Reader, layout: ArrayLayout, boxes: list[Box], work: RegionWork) -> None:
    """Read all regions; each thread waits for its own regions."""
    if work.threads == 1:
        _read_some(reader, layout, boxes, work)
        return
    with ThreadPoolExecutor(work.threads) as pool:
        parts = [pool.submit(_read_some, reader, layout, boxes[n :: work.threads], work) for n in range(work.threads)]
        for part in parts:
            part.result()


def _read_some(reader: Reader, layout: ArrayLayout, boxes: list[Box], work: RegionWork) -> None:
    pending: deque[Sequence[Any]] = deque()

    def wait(max_pending: int) -> None:
        while len(pending) > max_pending:
            for ticket in pending.popleft():
                ticket.result()

    with require_cuda().cuda.Stream(non_blocking=True) if reader.on_device else nullcontext():
        for first in range(0, len(boxes), work.batch):
            batch = boxes[first : first + work.batch]
            single = len(batch) == 1
            pending.append([reader.submit(layout, batch[0])] if single else reader.submit_many(layout, batch))
            wait(work.ahead)
        wait(0)


def milliseconds(results: Sequence[CaseResult]) -> str:
    """Return a table of milliseconds a region."""
    rows = [f"{'ms a region':40}  Reader"]
    for result in results:
        ours = result.ours
        if ours is not None and ours.median is not None:
            rows.append(f"{result.case.name:40}  {1000 * ours.median / result.case.facts['regions']:.3f}")
    rows.append(f"on {usable_cores()} cores")
    return "\n".join(rows)


SUITE = Suite(
    "regions", _DESCRIPTION, 5, region_cases, tuple(_ARRAYS), "Part of all sizes.", "Where the arrays are made",
    closing=milliseconds,
)  # fmt: skip
