"""Batches of random crops: :class:`~linumpy.stream.Pipeline` and its peers on the same crops.

In: names of workloads, a folder for the arrays, a scale. Out: cases whose entries read the same list of crops, batch
after batch; rates count the bytes of the crops in the stored dtype. The first batch of each entry is compared with
zarr-python's before the entry is timed; of augmented crops, only that they are finite and not constant is checked.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import zarr

from linumpy.benchmark.cases import Case, Check, Entry, Prepared, Suite, peer_module
from linumpy.benchmark.data import check_size, work_folder
from linumpy.benchmark.shared.callers import CALLERS, IDLE, Caller
from linumpy.benchmark.shared.workloads import WORKLOADS, Workload, make_arrays
from linumpy.device import require_cuda, resolve
from linumpy.stream import Augment, Config, Pipeline, Sample

_DESCRIPTION = """Time batches of random crops, beside tensorstore and zarr-python in threads, on this machine.

W1a and W1b are 64×256×256 crops in batches of 8 from one 512×1024×1024 uint16 array, zstd and raw, 64³ chunks in
256×512×512 shards; W2 are 128³ crops in batches of 32 from 16 arrays of 512³ that zstd compresses 3 times, with and
without augmentation; M are such crops from 1000 arrays of 256×256×512, copies of 16 arrays (21 GiB in --folder); the
pipeline keeps 64 of the 1000 open; T is W2 with a ratio of 1.48 and batches of 128; F are 32³ crops in batches of 64.

The first batch of each entry is compared with zarr-python's; a wrong result is reported as WRONG and has no time. Rates
count the bytes of crops in the stored dtype. The peers read a tenth of the batches, and their times are scaled to all.
With --busy the caller's Python is busy at the same time, as in a training loop: 5 or 10 ms of plain Python between two
batches, or one or two other threads that never sleep. Times are then of a batch.
--scale makes arrays smaller and fewer, --batches makes runs shorter; with --scale the marks are not judged.

For example:
  linum-benchmark stream --folder /dev/shm
  linum-benchmark stream --busy --folder /dev/shm
  linum-benchmark stream --only W2 M --folder /dev/shm
  linum-benchmark stream --only W2 --scale 0.5 --batches 50 --runs 3 --json stream.json
"""

#: A read of a crop that a peer has begun.
Pending = TypeVar("Pending")

_PEER_THREADS = 16
#: The default workloads, and the default workloads with a busy caller.
_DEFAULT, _DEFAULT_BUSY = ("W1a", "W1b", "W2"), ("W1a",)

_AUGMENT = Augment(rotation=20, scale=(0.8, 1.25), flip="zyx", elastic=(32.0, 3.0))
#: Title and options of the pipeline for the further entries of linumpy.
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cached": ("chunks cached", {}),  # _case adds a cache that holds all arrays
    "augmented": ("augmented", {"augment": _AUGMENT, "pad": "reflect", "spacing": (1.0, 1.0, 1.0)}),
}


@dataclass(frozen=True)
class CropWork:
    """A workload with arrays, crops and the options of reading; see :func:`stream_cases`."""

    workload: Workload
    paths: tuple[str, ...]
    crops: tuple[Sample, ...]
    dtype: str
    buffer_nbytes: int
    lookahead: int
    use_gpu: bool
    not_judged: str

    @property
    def batches(self) -> int:
        """Batches of a run."""
        return len(self.crops) // self.workload.batch

    @property
    def nbytes(self) -> int:
        """Bytes of all crops in the stored dtype, uint16."""
        return 2 * math.prod(self.workload.crop) * len(self.crops)

    @property
    def peer_batches(self) -> int:
        """Batches that peers read, at least two."""
        return max(2, self.batches // 10)

    @property
    def files(self) -> tuple[Path, ...]:
        """All files of the arrays."""
        return tuple(file for path in self.paths for file in Path(path).rglob("*") if file.is_file())


@contextlib.contextmanager
def stream_cases(
    *,
    only: Sequence[str] = (),
    folder: Path | None = None,
    scale: float = 1.0,
    batches: int | None = None,
    dtype: str = "bf16",
    buffers: float = 4.0,
    lookahead: int = 4,
    busy: bool = False,
    use_gpu: bool | None = None,
) -> Iterator[tuple[Path, Iterator[Case]]]:
    """Yield a folder, and cases that write arrays into the folder; the folder is removed at the end.

    Parameters are the command's options; `buffers` is in GiB, for host and device memory each; `scale` changes the
    number and the sides of arrays, not crops and chunks; `busy` times each of :data:`CALLERS`; batches go to the device
    if there is one, unless `use_gpu` is given. Errors: ``ValueError``, ``FileNotFoundError`` for invalid options.
    """
    if not 0 < scale <= 1:
        raise ValueError(f"scale={scale}: a part from 0 to 1 of the sizes")
    if batches is not None and batches < 2:
        raise ValueError(f"batches={batches}: 2 at least")
    if lookahead < 1:
        raise ValueError(f"lookahead={lookahead}: 1 at least")
    check_size("buffers", buffers, folder)
    use_gpu = resolve().is_cuda if use_gpu is None else use_gpu
    not_judged = "" if use_gpu and scale == 1 else "smaller than the workload, or without a GPU"
    with work_folder(folder) as path:

        def cases() -> Iterator[Case]:
            for name in only or (_DEFAULT_BUSY if busy else _DEFAULT):
                workload = WORKLOADS[name]
                paths, crops = make_arrays(workload, path / name, scale, batches)
                work = CropWork(workload, paths, crops, dtype, int(buffers * 2**30), lookahead, use_gpu, not_judged)
                yield from (_busy_case(name, work, caller) for caller in CALLERS) if busy else [_case(name, work)]
                shutil.rmtree(path / name)

        yield path, cases()


def _case(name: str, work: CropWork) -> Case:
    workload = work.workload
    entries = [Entry("stream", "linumpy.stream", lambda: _ours(work), "ours")]
    for variant in workload.variants:
        title, options = _VARIANTS[variant]
        if variant == "cached":
            options = {"cache_bytes": 2 * math.prod(workload.shape) * len(work.paths) * 5 // 4}
        prepare = partial(_ours, work, **options)
        entries.append(Entry(variant, f"linumpy.stream, {title}", prepare, "ours"))
    return Case(
        f"{name}: {workload.title}",
        work.nbytes,
        (*entries, *_peers(work, IDLE, work.peer_batches / work.batches)),
        description=(
            f"{work.batches} batches of {workload.batch} crops, {len(work.paths)} array(s), chunks {workload.chunk} in "
            f"shards {workload.shard}, to {work.dtype}; peers read a part of them, in the stored dtype",
        ),
        marks=() if workload.mark is None else (workload.mark,),
        not_judged=work.not_judged,
        files=work.files,
    )


def _busy_case(name: str, work: CropWork, caller: Caller) -> Case:
    """Make the case of a caller whose Python is busy; the case counts one batch, so that times are of a batch."""
    nbytes = work.nbytes // work.batches
    return Case(
        f"{name}, {caller.title}",
        nbytes,
        (
            Entry("stream", "linumpy.stream", lambda: _ours(work, caller), "ours", share=work.batches),
            *_peers(work, caller, work.peer_batches),
        ),
        description=(
            f"{work.batches} batches of {work.workload.batch} crops, to {work.dtype}; peers read {work.peer_batches} "
            "of them, in the stored dtype. Times are of a batch",
        ),
        facts={"step_seconds": caller.step_seconds, "busy_threads": caller.threads},
        marks=(caller.mark(nbytes),) if name == "W1a" else (),
        not_judged=work.not_judged,
        files=work.files,
    )


def _peers(work: CropWork, caller: Caller, share: float) -> tuple[Entry, Entry]:
    tensorstore = Entry("tensorstore", "tensorstore", lambda: _tensorstore(work, caller), share=share, max_seconds=10)
    title, warm_ups = f"zarr, {_PEER_THREADS} threads", 1 if caller is IDLE else 0
    return tensorstore, replace(
        tensorstore, name="zarr", title=title, prepare=lambda: _zarr(work, caller), warm_ups=warm_ups
    )


# ---- the entries; each call reads all batches and returns the first


@contextlib.contextmanager
def _ours(work: CropWork, caller: Caller = IDLE, **options: Any) -> Iterator[Prepared]:
    config = Config(
        batch_size=work.workload.batch, host_buffer_bytes=work.buffer_nbytes, device_buffer_bytes=work.buffer_nbytes,
        dtype=work.dtype, lookahead_batches=work.lookahead, device=None if work.use_gpu else "cpu",
        n_zarrs_meta_cache=work.workload.open_arrays, **options,
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
    work: CropWork, begin: Callable[[Sample], Pending], finish: Callable[[Pending], np.ndarray], caller: Caller
) -> np.ndarray:
    """Read the batches of a peer, two ahead, and copy each to the device; return the first batch."""
    size, first = work.workload.batch, None
    starts = range(0, work.peer_batches * size, size)
    waiting: deque[list[Pending]] = deque()
    with caller.busy():
        for batch in [*(work.crops[start : start + size] for start in starts), (), ()]:
            waiting.append([begin(crop) for crop in batch])
            if len(waiting) < 3:
                continue
            voxels = np.stack([finish(crop) for crop in waiting.popleft()])
            if work.use_gpu:
                require_cuda().asarray(voxels)
            first = voxels if first is None else first
            caller.step()
    assert first is not None
    return first


@contextlib.contextmanager
def _tensorstore(work: CropWork, caller: Caller) -> Iterator[Prepared]:
    tensorstore = peer_module("tensorstore")

    def opened(path: str) -> Any:
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
        return tensorstore.open(spec, read=True, open=True).result()

    arrays = {path: opened(path) for path in work.paths}

    def begin(crop: Sample) -> Any:
        return arrays[crop.uri][_box(crop)].read()

    yield Prepared(lambda: _read_batches(work, begin, lambda future: future.result(), caller), _checked(work))


@contextlib.contextmanager
def _zarr(work: CropWork, caller: Caller) -> Iterator[Prepared]:
    arrays = {path: zarr.open_array(path, mode="r") for path in work.paths}
    with ThreadPoolExecutor(_PEER_THREADS) as pool:
        finish = lambda future: np.asarray(future.result())  # noqa: E731

        def begin(crop: Sample) -> Future[Any]:
            return pool.submit(arrays[crop.uri].__getitem__, _box(crop))

        yield Prepared(lambda: _read_batches(work, begin, finish, caller), _checked(work))


def _box(crop: Sample) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in crop.aabb)


# ---- the checks


def _checked(work: CropWork) -> Check:
    def check(first: np.ndarray) -> str:
        for row, crop in enumerate(work.crops[: work.workload.batch]):
            values = np.asarray(zarr.open_array(crop.uri, mode="r")[_box(crop)]).astype(np.float32)
            # bfloat16 keeps 8 bits, float16 11; other types hold the values exactly.
            tolerance = {"bf16": 2.0**-8, "f16": 2.0**-11}.get(work.dtype, 0.0)
            if not np.allclose(first[row].astype(np.float32), values, rtol=tolerance, atol=0):
                return f"crop {crop} differs from zarr-python's"
        return ""

    return check


def _finite(first: np.ndarray) -> str:
    """Check that augmented crops are finite and not constant; only the tests compare them with SciPy's."""
    values = first.astype(np.float32)
    return "" if np.isfinite(values).all() and values.std() > 0 else "an augmented batch is constant or not finite"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, metavar="N", help="Batches of a run. [200; of T 100]")
    parser.add_argument("--dtype", default="bf16", choices=("f32", "f16", "bf16", "stored"), help="[%(default)s]")
    parser.add_argument("--buffers", type=float, default=4.0, metavar="GIB", help="Each of two buffers. [%(default)s]")
    parser.add_argument("--lookahead", type=int, default=4, metavar="N", help="Batches read ahead. [%(default)s]")
    parser.add_argument("--busy", action="store_true", help="Time callers whose Python is busy. [W1a]")


SUITE = Suite(
    "stream", _DESCRIPTION, 3, stream_cases, tuple(WORKLOADS),
    "Part of all sizes.", "Where arrays are written", _add_options,
)  # fmt: skip
