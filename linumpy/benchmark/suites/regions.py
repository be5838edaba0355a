"""Regions of open arrays by one Reader: the time of one region, crops with and without kept chunks, many threads.

Every result is compared with the array in memory before it is timed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linumpy.benchmark.cases import Case, Entry, Mark, Prepared, Suite, check_scale
from linumpy.benchmark.data import check_free, work_folder
from linumpy.benchmark.runner import CaseResult
from linumpy.benchmark.shared.stores import StoredArray, StoreSpec, generate
from linumpy.device import require_cuda, resolve, to_host
from linumpy.gpu import Reader

_DESCRIPTION = """Time regions of open arrays, by one Reader, on this machine's GPU or into host memory.

Arrays of 512×1024×1024 uint16 are made below --folder: raw and zstd, 64³ chunks in shards of 256×512×512 and in files.
"one" reads regions one after another, the next when the last is there; "crops" asks for batches of random crops, four
ahead; "kept" does so when all chunks are kept in device memory; "threads" is eight threads, each one crop after the
other. The last table has milliseconds a region.

For example:
  linum-benchmark regions --folder /dev/shm --json regions.json
"""

_SHAPE, _CHUNK, _SHARD = (512, 1024, 1024), (64, 64, 64), (256, 512, 512)
#: Arrays by name: codec, and whether there are shards.
_ARRAYS = {"raw shards": ("none", True), "zstd shards": ("zstd", True), "raw files": ("none", False)}
_AHEAD, _THREADS, _SEED = 4, 8, 3

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Work:
    """Regions of one array.

    Attributes
    ----------
    name : str
        Of the case, behind that of the array.
    shape : tuple of int
        Voxels of a region.
    count : int
        Regions of a run.
    batch : int
        Regions that are submitted together.
    aligned : bool
        Whether regions begin where chunks do.
    ahead : int
        Batches under way when the oldest is waited for.
    threads : int
        Threads that share the regions.
    kept : bool
        Whether all chunks are kept in device memory before.
    reach : mapping
        Milliseconds a region that are to be reached, by array; GiB/s where the work is kept or threaded.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    batch: int = 1
    aligned: bool = False
    ahead: int = 0
    threads: int = 1
    kept: bool = False
    reach: tuple[tuple[str, float], ...] = ()


_CROP = (64, 256, 256)
WORKS = (
    Work("one 64³, aligned", (64, 64, 64), 200, aligned=True, reach=(("raw shards", 0.15), ("zstd shards", 0.6))),
    Work("one 64³ at random", (64, 64, 64), 200, reach=(("raw shards", 0.4), ("zstd shards", 1.2))),
    Work("one 128³, aligned", (128, 128, 128), 100, aligned=True, reach=(("zstd shards", 1.5),)),
    Work("crops of 64×256×256", _CROP, 480, batch=8, ahead=_AHEAD),
    Work("crops of 32³", (32, 32, 32), 3840, batch=64, ahead=_AHEAD),
    Work("threads", _CROP, 800, threads=_THREADS, reach=(("zstd shards", 20), ("raw shards", 20))),
    Work("kept, crops of 64×256×256", _CROP, 480, batch=8, ahead=_AHEAD, kept=True, reach=(("zstd shards", 150),)),
    Work("kept, crops of 32³", (32, 32, 32), 3840, batch=64, ahead=_AHEAD, kept=True),
)


@contextmanager
def region_cases(
    *, folder: Path | None, scale: float, only: Sequence[str] = (), use_gpu: bool | None = None
) -> Iterator[tuple[Path, Iterator[Case]]]:
    """Make the arrays in a new folder, and the cases."""
    check_scale(scale)
    on_gpu = resolve().is_cuda if use_gpu is None else use_gpu
    with work_folder(folder) as where:
        yield where, _cases(where, scale, tuple(only) or tuple(_ARRAYS), on_gpu)


def _cases(where: Path, scale: float, names: tuple[str, ...], on_gpu: bool) -> Iterator[Case]:
    for name in names:
        codec, sharded = _ARRAYS[name]
        spec = StoreSpec(name, _SHAPE, _CHUNK, "uint16", codec, shards=_SHARD if sharded else None).scaled(scale)
        check_free(where, spec.nbytes)
        stored = generate(spec, where)
        for work in WORKS:
            if on_gpu or not work.kept:
                yield _case(stored, work, scale, on_gpu)


def _case(stored: StoredArray, work: Work, scale: float, on_gpu: bool) -> Case:
    shape = tuple(max(1, round(size * scale)) for size in work.shape)
    count = max(work.batch, round(work.count * min(1.0, 8 * scale)))
    nbytes = count * int(np.prod(shape)) * stored.dtype.itemsize
    least = dict(work.reach).get(stored.name)
    one_by_one = least is not None and work.batch == 1 and work.threads == 1
    rate = None if least is None else nbytes / count / 2**30 / (least / 1000) if one_by_one else least
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


def boxes_of(stored: StoredArray, work: Work, shape: tuple[int, ...], count: int) -> list[Box]:
    """Draw the regions of a run, the same in each run."""
    rng = np.random.default_rng(_SEED)
    boxes = []
    for _ in range(count):
        first = [int(rng.integers(0, extent - size + 1)) for extent, size in zip(stored.shape, shape, strict=True)]
        if work.aligned:
            first = [at // chunk * chunk for at, chunk in zip(first, stored.chunks, strict=True)]
        boxes.append(tuple(slice(at, at + size) for at, size in zip(first, shape, strict=True)))
    return boxes


@contextmanager
def _prepared(stored: StoredArray, work: Work, shape: tuple[int, ...], count: int, on_gpu: bool) -> Iterator[Prepared]:
    import zarr

    voxels = np.asarray(zarr.open_array(stored.path, mode="r")[...])
    boxes = boxes_of(stored, work, shape, count)
    cache: dict[str, Any] = {"cache_bytes": 2 * stored.nbytes} if work.kept else {}
    with Reader(device=None if on_gpu else "cpu", **cache) as reader:
        layout = reader.layout_of(stored.path)
        if work.kept:
            reader.submit_layout(layout, (slice(None),) * len(stored.shape)).result()

        def check(_: object) -> str:
            for box in boxes[:16]:
                if not np.array_equal(to_host(reader.submit_layout(layout, box).result()), voxels[box]):
                    return f"the region {box} is wrong"
            return ""

        yield Prepared(lambda: _read(reader, layout, boxes, work), check)


def _read(reader: Reader, layout: Any, boxes: list[Box], work: Work) -> None:
    """Read all regions; a thread waits for its own."""
    if work.threads == 1:
        _read_some(reader, layout, boxes, work)
        return
    with ThreadPoolExecutor(work.threads) as pool:
        parts = [pool.submit(_read_some, reader, layout, boxes[n :: work.threads], work) for n in range(work.threads)]
        for part in parts:
            part.result()


def _read_some(reader: Reader, layout: Any, boxes: list[Box], work: Work) -> None:
    cupy = require_cuda() if reader.on_device else None
    under_way: deque[Sequence[Any]] = deque()
    with nullcontext() if cupy is None else cupy.cuda.Stream(non_blocking=True):
        for first in range(0, len(boxes), work.batch):
            batch = boxes[first : first + work.batch]
            one = len(batch) == 1
            under_way.append([reader.submit_layout(layout, batch[0])] if one else reader.submit_many(layout, batch))
            if len(under_way) > work.ahead:
                _wait(under_way.popleft())
        while under_way:
            _wait(under_way.popleft())


def _wait(tickets: Sequence[Any]) -> None:
    for ticket in tickets:
        ticket.result()


def milliseconds(results: Sequence[CaseResult]) -> str:
    """Write a table of milliseconds a region."""
    rows = [f"{'ms a region':40}  Reader"]
    for result in results:
        ours = result.ours
        if ours is not None and ours.median is not None:
            rows.append(f"{result.case.name:40}  {1000 * ours.median / result.case.facts['regions']:.3f}")
    rows.append(f"on {len(os.sched_getaffinity(0))} cores")
    return "\n".join(rows)


SUITE = Suite(
    "regions",
    _DESCRIPTION,
    5,
    region_cases,
    tuple(_ARRAYS),
    "Part of all sizes.",
    "Where the arrays are made",
    closing=milliseconds,
)
