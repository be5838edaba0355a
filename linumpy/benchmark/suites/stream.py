"""Batches of random crops: :class:`~linumpy.stream.Pipeline` and its peers on the same crops.

In: the name of a workload, where its arrays go, how much smaller it is to be. Out: a case whose entries read the same
list of crops, batch after batch; its bytes are those of the crops in the stored dtype. The first batch of each is
compared with zarr-python's before anything is timed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from linumpy.benchmark.data import change_for_ratio, generator, oct_voxels
from linumpy.benchmark.runner import CannotRunError, Case, Entry, Mark, Prepared
from linumpy.benchmark.suites.callers import CALLERS, IDLE, Caller
from linumpy.benchmark.volumes import check_size
from linumpy.device import require_cuda
from linumpy.io.zarr_mode import in_mode_of_caller, write_from_host
from linumpy.stream import Augment, Config, CropSampler, Pipeline, Sample, Volume

_PEER_THREADS = 16


@dataclass(frozen=True)
class Workload:
    """Crops of arrays.

    Attributes
    ----------
    title : str
        For people.
    shape, chunk, shard, crop : tuple of int
        Of an array, its inner chunks, its shards, and a crop.
    arrays, batch, batches : int
        How many arrays; crops in a batch; batches.
    ratio : float
        Decoded bytes over stored ones; 1 for raw chunks.
    reach : float or None
        GB/s of crops with the chunk cache off.
    """

    title: str
    shape: tuple[int, int, int]
    chunk: tuple[int, int, int]
    shard: tuple[int, int, int]
    crop: tuple[int, int, int]
    arrays: int
    batch: int
    batches: int
    ratio: float
    reach: float | None


_LARGE = ((512, 1024, 1024), (64, 64, 64), (256, 512, 512), (64, 256, 256))
_MANY = ((512, 512, 512), (32, 64, 64), (256, 256, 512), (128, 128, 128))
WORKLOADS = {
    "W1a": Workload("64×256×256 crops of one zstd array", *_LARGE, 1, 8, 200, 3.0, 6.5),
    "W1b": Workload("64×256×256 crops of one raw array", *_LARGE, 1, 8, 200, 1.0, 14.0),
    "W2": Workload("128³ crops of 16 zstd arrays", *_MANY, 16, 32, 200, 3.0, 15.0),
    "T": Workload("128³ crops of 16 zstd arrays that compress little", *_MANY, 16, 128, 100, 1.48, 7.0),
    "F": Workload("32³ crops of one zstd array", *_LARGE[:3], (32, 32, 32), 1, 64, 200, 3.0, None),
}


@dataclass(frozen=True)
class StreamRequest:
    """What is to be timed.

    Attributes
    ----------
    only : tuple of str
        Workloads; empty for W1a, W1b, W2.
    folder : Path or None
        Where arrays are made, in a folder that is removed at the end.
    scale : float
        Sides of arrays and numbers of arrays are this part of the workload's; crops and chunks stay.
    batches : int or None
        Batches of a run.
    dtype : str
        Of the batches of linumpy.
    buffers : float
        GiB of host and of device memory of the pipeline, each.
    lookahead : int
        Batches that linumpy reads ahead.
    use_gpu : bool
        Whether batches go to the device.
    busy : bool
        Whether the caller's own Python is busy meanwhile, in each of the ways of :data:`CALLERS`.
    """

    only: tuple[str, ...] = ()
    folder: Path | None = None
    scale: float = 1.0
    batches: int | None = None
    dtype: str = "bf16"
    buffers: float = 4.0
    lookahead: int = 4
    use_gpu: bool = True
    busy: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise ValueError(f"scale={self.scale}: a part from 0 to 1 of the sizes")
        if self.batches is not None and self.batches < 2:
            raise ValueError(f"batches={self.batches}: 2 at least")
        if self.lookahead < 1:
            raise ValueError(f"lookahead={self.lookahead}: 1 at least")
        check_size("buffers", self.buffers, self.folder)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of `buffers`."""
        return int(self.buffers * 2**30)


@dataclass(frozen=True)
class Work:
    """A workload with its arrays and crops."""

    load: Workload
    request: StreamRequest
    paths: tuple[str, ...]
    crops: tuple[Sample, ...]

    @property
    def batches(self) -> int:
        """Batches of a run."""
        return len(self.crops) // self.load.batch

    @property
    def nbytes(self) -> int:
        """Bytes of all crops in the stored dtype, uint16."""
        return 2 * int(np.prod(self.load.crop)) * len(self.crops)


@contextlib.contextmanager
def stream_cases(request: StreamRequest) -> Iterator[tuple[Path, Iterator[Case]]]:
    """Give a folder of arrays, and cases that make them when it is their turn; all is removed at the end."""
    with tempfile.TemporaryDirectory(dir=request.folder, prefix="linumpy-stream-") as made:
        yield Path(made), _cases(request, Path(made))


def _cases(request: StreamRequest, folder: Path) -> Iterator[Case]:
    for name in request.only or (("W1a",) if request.busy else ("W1a", "W1b", "W2")):
        work = make_work(name, request, folder)
        if request.busy:
            yield from (_busy_case(name, work, caller) for caller in CALLERS)
        else:
            yield _case(name, work)
        for path in work.paths:
            shutil.rmtree(path)


def make_work(name: str, request: StreamRequest, folder: Path) -> Work:
    """Write the arrays of a workload, and choose its crops."""
    load = WORKLOADS[name]
    shape = [max(c, int(n * request.scale) // s * s) for n, s, c in zip(load.shape, load.shard, load.crop, strict=True)]
    count = max(1, round(load.arrays * request.scale))
    base, shift = _voxels(load), load.shard[2] // 4 + 1
    paths = [folder / f"{name}-{number}.zarr" for number in range(count)]

    def write(number: int) -> None:
        array = _create(load, paths[number], shape)
        for k, at in enumerate(np.ndindex(*(-(-n // s) for n, s in zip(shape, load.shard, strict=True)))):
            box = tuple(slice(i * s, min((i + 1) * s, n)) for i, s, n in zip(at, load.shard, shape, strict=True))
            voxels = np.roll(base, shift * (k + 13 * number), axis=2)
            write_from_host(array, box, voxels[tuple(slice(0, b.stop - b.start) for b in box)])

    with ThreadPoolExecutor(min(count, os.cpu_count() or 1), initializer=in_mode_of_caller()) as pool:
        list(pool.map(write, range(count)))
    volumes = [Volume(str(path), tuple(shape)) for path in paths]
    sampler = CropSampler(volumes, load.crop, length=load.batch * (request.batches or load.batches))
    return Work(load, request, tuple(map(str, paths)), tuple(sampler))


def _voxels(load: Workload) -> np.ndarray:
    """Make the voxels of a shard; other shards have them shifted."""
    dtype = np.dtype("u2")
    change = 1.0
    if load.ratio > 1:
        change = change_for_ratio(_encoded_bytes, load.shard, load.chunk, dtype, target=load.ratio)
    whole = tuple(slice(0, n) for n in load.shard)
    return oct_voxels(generator(0, whole), load.shard, whole, dtype, change)


def _encoded_bytes(sample: np.ndarray) -> int:
    from numcodecs import Zstd

    return len(Zstd(level=3).encode(np.ascontiguousarray(sample)))


def _create(load: Workload, path: Path, shape: Sequence[int]) -> zarr.Array:
    codec = None if load.ratio == 1 else zarr.codecs.ZstdCodec(level=3)
    shards = tuple(min(s, -(-n // c) * c) for s, n, c in zip(load.shard, shape, load.chunk, strict=True))
    return zarr.create_array(
        str(path), shape=tuple(shape), dtype="u2", chunks=load.chunk, shards=shards, compressors=codec
    )


def _case(name: str, work: Work) -> Case:
    load = work.load
    judged = work.request.use_gpu and work.request.scale == 1
    marks = () if load.reach is None else (Mark(round(load.reach * 1e9 / 2**30, 2)),)
    cache = 2 * int(np.prod(load.shape)) * len(work.paths) * 5 // 4
    augment = Augment(rotation=20, scale=(0.8, 1.25), flip="zyx", elastic=(32.0, 3.0))
    entries = [
        Entry("stream", "linumpy.stream", lambda: _ours(work), "ours"),
        Entry("cached", "linumpy.stream, chunks cached", lambda: _ours(work, cache_bytes=cache), "ours"),
        Entry("tensorstore", "tensorstore", lambda: _tensorstore(work), share=_share(work), max_seconds=10),
        Entry("zarr", f"zarr, {_PEER_THREADS} threads", lambda: _zarr(work), share=_share(work), max_seconds=10),
    ]
    if name == "W2":
        options: dict[str, Any] = {"augment": augment, "pad": "reflect", "spacing": (1.0, 1.0, 1.0)}
        entries.insert(2, Entry("augmented", "linumpy.stream, augmented", lambda: _ours(work, **options), "ours"))
    return Case(
        f"{name}: {load.title}",
        work.nbytes,
        tuple(entries),
        description=(
            f"{work.batches} batches of {load.batch} crops, {len(work.paths)} array(s), chunks {load.chunk} in shards "
            f"{load.shard}, to {work.request.dtype}; peers read a part of them, in the stored dtype",
        ),
        marks=marks,
        not_judged="" if judged else "smaller than the workload, or without a GPU",
        files=tuple(file for path in work.paths for file in Path(path).rglob("*") if file.is_file()),
    )


def _busy_case(name: str, work: Work, caller: Caller) -> Case:
    """Make the case of a caller whose Python is busy; it counts one batch, so that times are those of a batch."""
    share = max(2.0, round(work.batches * _share(work)))
    nbytes = work.nbytes // work.batches
    marks: tuple[Mark, ...] = ()
    if name == "W1a":
        marks = (Mark(round(caller.least or nbytes / 2**30 / caller.batch_seconds, 2), label=caller.label),)
    judged = work.request.use_gpu and work.request.scale == 1
    return Case(
        f"{name}, {caller.title}",
        nbytes,
        (
            Entry("stream", "linumpy.stream", lambda: _ours(work, caller), "ours", share=work.batches),
            Entry("tensorstore", "tensorstore", lambda: _tensorstore(work, caller), share=share, max_seconds=10),
            Entry(
                "zarr",
                f"zarr, {_PEER_THREADS} threads",
                lambda: _zarr(work, caller),
                share=share,
                warm_ups=0,
                max_seconds=10,
            ),
        ),
        description=(
            f"{work.batches} batches of {work.load.batch} crops, to {work.request.dtype}; peers read {share:g} of "
            "them, in the stored dtype. Times are those of a batch",
        ),
        facts={"step_seconds": caller.step_seconds, "busy_threads": caller.threads},
        marks=marks,
        not_judged="" if judged else "smaller than the workload, or without a GPU",
        files=tuple(file for path in work.paths for file in Path(path).rglob("*") if file.is_file()),
    )


def _share(work: Work) -> float:
    """The part of the batches that peers read: two at least."""
    return max(2, work.batches // 10) / work.batches


# ---- the ways to read; each call reads all batches and returns the first one


@contextlib.contextmanager
def _ours(work: Work, caller: Caller = IDLE, **options: Any) -> Iterator[Prepared]:
    request = work.request
    config = Config(
        batch_size=work.load.batch, host_buffer_bytes=request.buffer_bytes, device_buffer_bytes=request.buffer_bytes,
        dtype=request.dtype, lookahead_batches=request.lookahead, device=None if request.use_gpu else "cpu", **options,
    )  # fmt: skip
    check = _finite if config.augment is not None else _checked(work)
    with Pipeline(config) as pipeline:

        def call() -> Any:
            with caller.busy():
                pipeline.push(work.crops)
                batches = pipeline.batches(work.batches)
                first = next(batches)
                caller.step()
                for batch in batches:
                    batch.release()
                    caller.step()
            return first

        yield Prepared(call, lambda batch: check(batch.numpy()), note=lambda: f"bound by {pipeline.stats.bound}")


def _read_batches(
    work: Work, begin: Callable[[Sample], Any], finish: Callable[[Any], np.ndarray], caller: Caller = IDLE
) -> np.ndarray:
    """Read a part of the batches, two ahead, and bring each to the device."""
    with caller.busy():
        return _read_all(work, begin, finish, caller)


def _read_all(
    work: Work, begin: Callable[[Sample], Any], finish: Callable[[Any], np.ndarray], caller: Caller
) -> np.ndarray:
    size, first = work.load.batch, None
    chosen = work.crops[: round(work.batches * _share(work)) * size]
    waiting: deque[Any] = deque()
    for end in range(size, len(chosen) + 3 * size, size):
        waiting.append([begin(crop) for crop in chosen[end - size : end]])
        if len(waiting) < 3:
            continue
        crops = waiting.popleft()
        if not crops:
            break
        batch = np.stack([finish(one) for one in crops])
        if work.request.use_gpu:
            require_cuda().asarray(batch)
        first = batch if first is None else first
        caller.step()
    assert first is not None
    return first


@contextlib.contextmanager
def _tensorstore(work: Work, caller: Caller = IDLE) -> Iterator[Prepared]:
    try:
        tensorstore = importlib.import_module("tensorstore")
    except ImportError as error:
        raise CannotRunError(f"tensorstore is not installed ({error})") from error
    opened = {
        path: tensorstore.open(
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}, read=True, open=True
        ).result()
        for path in work.paths
    }

    def begin(crop: Sample) -> Any:
        return opened[crop.uri][tuple(slice(a, b) for a, b in crop.aabb)].read()

    yield Prepared(lambda: _read_batches(work, begin, lambda one: one.result(), caller), _checked(work))


@contextlib.contextmanager
def _zarr(work: Work, caller: Caller = IDLE) -> Iterator[Prepared]:
    opened = {path: zarr.open_array(path, mode="r") for path in work.paths}
    with ThreadPoolExecutor(_PEER_THREADS) as pool:

        def begin(crop: Sample) -> Any:
            return pool.submit(opened[crop.uri].__getitem__, tuple(slice(a, b) for a, b in crop.aabb))

        yield Prepared(lambda: _read_batches(work, begin, lambda one: np.asarray(one.result()), caller), _checked(work))


# ---- the checks


def _checked(work: Work) -> Callable[[Any], str]:
    def check(first: np.ndarray) -> str:
        for row, crop in enumerate(work.crops[: work.load.batch]):
            wanted = zarr.open_array(crop.uri, mode="r")[tuple(slice(a, b) for a, b in crop.aabb)]
            values = np.asarray(wanted).astype(np.float32)
            # bfloat16 keeps 8 bits, float16 11; all others hold the values exactly.
            near = {"bf16": 2.0**-8, "f16": 2.0**-11}.get(work.request.dtype, 0.0)
            if not np.allclose(first[row].astype(np.float32), values, rtol=near, atol=0):
                return f"crop {crop} differs from zarr-python's"
        return ""

    return check


def _finite(first: np.ndarray) -> str:
    """Augmented crops are compared with SciPy's in the tests; here they must be numbers that differ."""
    values = first.astype(np.float32)
    return "" if np.isfinite(values).all() and values.std() > 0 else "an augmented batch holds no picture"
