"""Time reading arrays from an HTTP server on this machine's loopback, to its GPU and into host memory.

Arrays of 512×1024×1024 uint16 are made below --folder, which should be in memory (/dev/shm): raw and zstd, chunks of
64³ in shards of 256×512×512 and as objects of their own. The server has a process for every two cores; --latency adds
milliseconds to each response. "obstore" only moves the stored bytes (its rate counts the decoded bytes, too). Results
are compared with the array on disk. The notes have the processor time of the reading process for a decoded GiB.

For example:
  linum-benchmark remote --folder /dev/shm --json remote.json
  linum-benchmark remote --only "raw files" --scale 0.25 --latency 10
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import zarr

from benchmarks.loopback import serve
from benchmarks.regions import ARRAYS
from linumpy import cli
from linumpy.arrays import Array
from linumpy.benchmark.read import OWN_PIPELINE, difference
from linumpy.benchmark.timing import GIB, Bench, Suite, peer_module
from linumpy.device import synchronize
from linumpy.gpu.zarr_io import read_zarr, read_zarr_to_gpu
from linumpy.io.zarr_mode import host_zarr_context

#: Bytes of a request of obstore alone, and the number of its concurrent requests.
_REQUEST_NBYTES, _REQUESTS = 4 * 2**20, 32


def _run(bench: Bench, args: argparse.Namespace) -> None:
    with bench.work_folder() as folder, serve(folder, args.latency) as url:
        for name, spec in ARRAYS.items():
            if bench.wants(name):
                path = spec.scaled(bench.scale).make(folder)
                _time(bench, name, path, url)
                shutil.rmtree(path)


def _time(bench: Bench, name: str, path: Path, url: str) -> None:
    nbytes = zarr.open_array(path, mode="r").nbytes
    files = [file for file in path.rglob("*") if file.is_file() and file.name != "zarr.json"]
    stored = sum(file.stat().st_size for file in files)

    def note(call: Callable[[], object]) -> str:
        before = process_time()
        call()
        synchronize()
        return f"{(process_time() - before) / nbytes * GIB:.2f} CPU s/GiB"

    def moved(result: int) -> str:
        return "" if result == stored else f"{result:,} bytes were read, not {stored:,}"

    calls: dict[str, Callable[[], Any]] = {"linumpy to the host": lambda: read_zarr(f"{url}/{path.name}", device="cpu")}
    if bench.on_gpu:
        calls = {"linumpy to the device": lambda: read_zarr_to_gpu(f"{url}/{path.name}", strict=True), **calls}
    calls["zarr + obstore"] = partial(_zarr, url, path.name, {})
    calls["zarr + obstore, 64 at a time"] = partial(_zarr, url, path.name, {"async.concurrency": 64})
    with bench.case(name, nbytes / GIB, description=f"{stored:,} bytes in {len(files):,} objects") as case:
        alone = partial(_obstore, url, path.parent, files)
        case.time("obstore", alone, moved, note=lambda: note(alone))
        for title, call in calls.items():
            case.time(title, call, lambda result: difference(path, result), note=partial(note, call))


def _store(url: str) -> Any:
    return peer_module("obstore.store").HTTPStore.from_url(url, client_options={"allow_http": True})


def _zarr(url: str, name: str, settings: dict[str, Any]) -> Array:
    from zarr.storage import ObjectStore

    with host_zarr_context(), zarr.config.set(OWN_PIPELINE | settings):
        return np.asarray(zarr.open_array(ObjectStore(_store(url), read_only=True), path=name, mode="r")[...])


def _obstore(url: str, folder: Path, files: list[Path]) -> int:
    """Read all stored bytes, in ranges, and discard them; return their number."""
    obstore, store = peer_module("obstore"), _store(url)

    def read(part: tuple[str, int, int]) -> int:
        return len(obstore.get_range(store, part[0], start=part[1], end=min(part[2], part[1] + _REQUEST_NBYTES)))

    sizes = [(str(file.relative_to(folder)), file.stat().st_size) for file in files]
    parts = [(name, start, size) for name, size in sizes for start in range(0, size, _REQUEST_NBYTES)]
    with ThreadPoolExecutor(_REQUESTS) as threads:
        return sum(threads.map(read, parts))


SUITE = Suite(
    run=_run,
    help=__doc__,
    cases=tuple(ARRAYS),
    options=[cli.Option("--latency", type=float, default=0.0, metavar="MS", help="Before a response. [%(default)s]")],
)
