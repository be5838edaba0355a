"""Time batches of random crops by linumpy.stream, beside tensorstore and zarr-python in threads.

W1a and W1b are 64×256×256 crops in batches of 8 from one 512×1024×1024 uint16 array, zstd and raw, 64³ chunks in
256×512×512 shards; W2 are 128³ crops in batches of 32 from 16 arrays of 512³ that zstd compresses 3 times, with and
without augmentation; M are such crops from 1000 arrays of 256×256×512, copies of 16 arrays (21 GiB in --folder), of
which the pipeline keeps 64 open; T is W2 with a ratio of 1.48 and batches of 128; F are 32³ crops in batches of 64.

The first batch of each row is compared with zarr-python's; of augmented crops only that they are finite and not
constant. Rates count the bytes of crops in the stored dtype; linumpy converts them to bfloat16. The peers read a tenth
of the batches, and their times are scaled to all. With --busy the caller's Python is busy at the same time, as in a
training loop: 5 or 10 ms of plain Python between two batches, or one or two other threads that never sleep. Times are
then of a batch.

For example:
  linum-benchmark stream --folder /dev/shm
  linum-benchmark stream --busy --folder /dev/shm
  linum-benchmark stream --only W2 --scale 0.5 --batches 50 --runs 3 --json stream.json
"""

from __future__ import annotations

import argparse
import math
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from linumpy import cli
from linumpy.arrays import DeviceName
from linumpy.benchmark.timing import GIB, Bench, Case, Suite, peer_module
from linumpy.device import require_cuda
from linumpy.io.zarr_mode import in_mode_of_caller, read_on_host
from linumpy.stream import Augment, Config, CropSampler, Pipeline, Sample, Volume
from linumpy.testing.stores import StoreSpec

_PEER_THREADS = 16
_AUGMENT = Augment(rotation=20, scale=(0.8, 1.25), flip="zyx", elastic=(32.0, 3.0))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Crops of `arrays` like `spec`, in `batches` of `batch`; at most 16 arrays are encoded, others are copies."""

    title: str
    spec: StoreSpec
    crop: tuple[int, int, int] = (128, 128, 128)
    arrays: int = 16
    batch: int = 32
    batches: int = 200
    augmented: bool = False


_LARGE = StoreSpec(name="", chunks=(64, 64, 64), shards=(256, 512, 512), codec="zstd")
_MANY = StoreSpec(name="", shape=(512, 512, 512), chunks=(32, 64, 64), shards=(256, 256, 512), codec="zstd")
_LITTLE = replace(_MANY, ratio=1.48)
_CROP = (64, 256, 256)
WORKLOADS = {
    "W1a": Workload(title="64×256×256 crops of one zstd array", spec=_LARGE, crop=_CROP, arrays=1, batch=8),
    "W1b": Workload(
        title="64×256×256 crops of one raw array", spec=replace(_LARGE, codec="none"), crop=_CROP, arrays=1, batch=8
    ),
    "W2": Workload(title="128³ crops of 16 zstd arrays", spec=_MANY, augmented=True),
    "M": Workload(
        title="128³ crops of 1000 zstd arrays, 64 of them open", spec=replace(_MANY, shape=(256, 256, 512)), arrays=1000
    ),
    "T": Workload(title="128³ crops of 16 arrays that compress little", spec=_LITTLE, batch=128, batches=100),
    "F": Workload(title="32³ crops of one zstd array", spec=_LARGE, crop=(32, 32, 32), arrays=1, batch=64),
}


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The work of a caller besides taking batches, in plain Python, which holds the interpreter's lock."""

    title: str
    step_seconds: float = 0.0
    threads: int = 0

    def step(self) -> None:
        """Compute for `step_seconds`, as a training step does."""
        end = time.perf_counter() + self.step_seconds
        while time.perf_counter() < end:
            pass

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Run `threads` that never sleep during the ``with`` block."""
        stopped = False

        def spin() -> None:
            while not stopped:
                pass

        threads = [threading.Thread(target=spin, daemon=True) for _ in range(self.threads)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stopped = True
            for thread in threads:
                thread.join()


IDLE = Caller(title="an idle caller")
CALLERS = (
    IDLE,
    Caller(title="5 ms of Python a batch", step_seconds=0.005),
    Caller(title="10 ms of Python a batch", step_seconds=0.010),
    Caller(title="beside a busy thread of Python", threads=1),
    Caller(title="beside two such threads", threads=2),
)


@dataclass(frozen=True, kw_only=True)
class Crops:
    """The crops of a workload, the paths of its arrays, and how they are read."""

    workload: Workload
    paths: tuple[str, ...]
    crops: tuple[Sample, ...]
    caller: Caller
    device: DeviceName

    @property
    def batches(self) -> int:
        """Batches of a run; peers read a tenth of them, at least two."""
        return len(self.crops) // self.workload.batch

    @property
    def peer_batches(self) -> int:
        """Batches that peers read, at least two."""
        return max(2, self.batches // 10)


def _run(bench: Bench, args: argparse.Namespace) -> None:
    if args.batches is not None and args.batches < 2:
        raise ValueError(f"batches={args.batches}: 2 at least")
    with bench.work_folder() as folder:
        for name in bench.only or (("W1a",) if args.busy else ("W1a", "W1b", "W2")):
            workload = WORKLOADS[name]
            crops = _make(workload, folder / name, bench, args.batches)
            for caller in CALLERS if args.busy else [IDLE]:
                _time(bench, name, replace(crops, caller=caller), args.busy)
            shutil.rmtree(folder / name)


def _make(workload: Workload, folder: Path, bench: Bench, batches: int | None) -> Crops:
    """Write the arrays, and draw the crops; the scale changes numbers and sides of arrays and crops, not of chunks."""
    z, y, x = (max(16, round(n * bench.scale)) for n in workload.crop)
    workload = replace(workload, crop=(z, y, x), batch=max(2, round(workload.batch * bench.scale)))
    spec, count = workload.spec, max(1, round(workload.arrays * bench.scale))
    assert spec.shards is not None
    sides = zip(spec.shape, spec.shards, workload.crop, strict=True)
    shape = tuple(max(crop, int(n * bench.scale) // shard * shard) for n, shard, crop in sides)
    # A shard of small arrays has a few chunks.
    shards = tuple(min(s, -(-n // c) * c) for s, n, c in zip(spec.shards, shape, spec.chunks, strict=True))
    spec = replace(spec, shape=shape, shards=shards)
    first = spec.make(folder / "0")
    voxels = read_on_host(zarr.open_array(first, mode="r"))
    paths = [first]
    # The others are shifted copies: making their voxels would take longer than all reads.
    with ThreadPoolExecutor(initializer=in_mode_of_caller()) as pool:
        numbers = range(1, min(count, 16))
        paths += pool.map(
            lambda number: spec.make(folder / str(number), np.roll(voxels, 129 * number, axis=2)), numbers
        )
        copies = [(paths[number % 16], folder / str(number) / first.name) for number in range(16, count)]
        paths += pool.map(lambda copy: Path(shutil.copytree(*copy)), copies)
    length = workload.batch * (batches or workload.batches)
    crops = tuple(CropSampler([Volume(str(path), shape) for path in paths], workload.crop, length=length))
    names = tuple(map(str, paths))
    return Crops(workload=workload, paths=names, crops=crops, caller=IDLE, device=bench.device)


def _time(bench: Bench, name: str, crops: Crops, busy: bool) -> None:
    workload, count = crops.workload, crops.batches if busy else 1
    nbytes = 2 * math.prod(workload.crop) * len(crops.crops) / count
    title = f"{name}, {crops.caller.title}" if busy else f"{name}: {workload.title}"
    text = f"{crops.batches} batches of {workload.batch} crops, {len(crops.paths)} array(s)"
    files = [file for path in crops.paths for file in Path(path).rglob("*") if file.is_file()]
    share = crops.peer_batches if busy else crops.peer_batches / crops.batches
    with bench.case(title, nbytes / GIB, description=text, files=files) as case:
        _ours(case, "linumpy.stream", crops, count)
        if not busy:
            kept = 2 * math.prod(workload.spec.shape) * len(crops.paths) * 5 // 4
            if len(crops.paths) <= 16:
                _ours(case, "linumpy.stream, chunks kept", crops, count, cache_bytes=kept)
            if workload.augmented:
                options = {"augment": _AUGMENT, "pad": "reflect", "spacing": (1.0, 1.0, 1.0)}
                _ours(case, "linumpy.stream, augmented", crops, count, **options)
        with case.attempt("tensorstore"):
            read = _tensorstore(crops)
            case.time("tensorstore", lambda: _read_batches(crops, *read), _check(crops), share=share)
        with ThreadPoolExecutor(_PEER_THREADS) as pool:
            opened = {path: zarr.open_array(path, mode="r") for path in crops.paths}

            def begin(crop: Sample) -> Any:
                return pool.submit(opened[crop.uri].__getitem__, _box(crop))

            call = lambda: _read_batches(crops, begin, lambda future: np.asarray(future.result()))  # noqa: E731
            case.time(f"zarr, {_PEER_THREADS} threads", call, _check(crops), share=share)


def _ours(case: Case, name: str, crops: Crops, count: int, **options: Any) -> None:
    config = Config(
        batch_size=crops.workload.batch, host_buffer_bytes=4 * GIB, device_buffer_bytes=4 * GIB, dtype="bf16",
        lookahead_batches=4, device=None if crops.device == "cuda" else "cpu", n_zarrs_meta_cache=64, **options,
    )  # fmt: skip
    check = _finite if config.augment is not None else _check(crops)
    with case.attempt(name), Pipeline(config) as pipeline:

        def call() -> Any:
            with crops.caller.busy():
                pipeline.push(crops.crops)
                batches = pipeline.batches(crops.batches)
                first = next(batches)
                crops.caller.step()
                for batch in batches:
                    batch.release()
                    crops.caller.step()
            return first

        note = lambda: f"bound by {pipeline.stats.bound}"  # noqa: E731
        case.time(name, call, lambda batch: check(batch.numpy()), share=count, note=note)


def _read_batches(crops: Crops, begin: Callable[[Sample], Any], finish: Callable[[Any], np.ndarray]) -> np.ndarray:
    """Read the batches of a peer, two ahead, and copy each to the device; return the first batch."""
    size, first = crops.workload.batch, None
    starts = range(0, crops.peer_batches * size, size)
    waiting: deque[list[Any]] = deque()
    with crops.caller.busy():
        for batch in [*(crops.crops[start : start + size] for start in starts), (), ()]:
            waiting.append([begin(crop) for crop in batch])
            if len(waiting) < 3:
                continue
            voxels = np.stack([finish(crop) for crop in waiting.popleft()])
            if crops.device == "cuda":
                require_cuda().asarray(voxels)
            first = voxels if first is None else first
            crops.caller.step()
    assert first is not None
    return first


def _tensorstore(crops: Crops) -> tuple[Callable[[Sample], Any], Callable[[Any], np.ndarray]]:
    tensorstore = peer_module("tensorstore")
    arrays = {}
    for path in crops.paths:
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
        arrays[path] = tensorstore.open(spec, read=True, open=True).result()
    return lambda crop: arrays[crop.uri][_box(crop)].read(), lambda future: future.result()


def _box(crop: Sample) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in crop.aabb)


def _check(crops: Crops) -> Callable[[np.ndarray], str]:
    def check(first: np.ndarray) -> str:
        for row, crop in enumerate(crops.crops[: crops.workload.batch]):
            values = np.asarray(zarr.open_array(crop.uri, mode="r")[_box(crop)]).astype(np.float32)
            # bfloat16 keeps 8 bits.
            if not np.allclose(first[row].astype(np.float32), values, rtol=2.0**-8, atol=0):
                return f"crop {crop} differs from zarr-python's"
        return ""

    return check


def _finite(first: np.ndarray) -> str:
    """Check that augmented crops are finite and not constant; only the tests compare them with SciPy's."""
    values = first.astype(np.float32)
    return "" if np.isfinite(values).all() and values.std() > 0 else "an augmented batch is constant or not finite"


SUITE = Suite(
    run=_run,
    help=__doc__,
    cases=tuple(WORKLOADS),
    runs=3,
    options=[
        cli.Option("--batches", type=int, metavar="N", help="Batches of a run. [200; of T 100]"),
        cli.Option("--busy", action="store_true", help="Time callers whose Python is busy. [W1a]"),
    ],
)
