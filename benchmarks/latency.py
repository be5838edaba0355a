"""Time reading arrays of files whose reads take milliseconds, as on NFS or Lustre, to the GPU and into host memory.

Arrays of 512×1024×1024 uint16 are made below --folder, which should be in memory (/dev/shm): raw and zstd, chunks of
64³ in shards of 256×512×512 and as files of their own. A library that is preloaded, built by cc, has each read of a
chunk or shard take --latency milliseconds more. "of the limit" compares a rate with what 256 reads in flight allow,
if each reads one chunk, or with the rate without latency, whichever is lower.

For example:
  linum-benchmark latency --folder /dev/shm --latency 1 5 20
  linum-benchmark latency --only "raw files" --scale 0.25 --device cpu
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from benchmarks.regions import ARRAYS
from linumpy import cli
from linumpy.arrays import Array
from linumpy.benchmark.read import difference
from linumpy.benchmark.timing import GIB, Bench, CannotRunError, Suite, peer_module
from linumpy.core.reader import max_reads
from linumpy.gpu.zarr_io import read_zarr, read_zarr_to_gpu

#: Reads in flight of tensorstore.
_PEER_READS = 64
_SOURCE = Path(__file__).with_name("slow_reads.c")


def _run(bench: Bench, args: argparse.Namespace) -> None:
    with bench.work_folder() as folder:
        os.environ["SLOW_FOLDER"] = str(folder.resolve())
        for name, spec in ARRAYS.items():
            if bench.wants(name):
                path = spec.scaled(bench.scale).make(folder)
                without: dict[str, float] = {}
                for latency in dict.fromkeys((0.0, *args.latency)):
                    os.environ["SLOW_MS"] = str(latency)
                    _time(bench, name, path, latency, without)
                os.environ["SLOW_MS"] = "0"
                shutil.rmtree(path)


def _preload(args: argparse.Namespace) -> None:
    """Run this command in another process, with the library that delays reads, and end this one."""
    if not any(args.latency) or "slow_reads" in os.environ.get("LD_PRELOAD", ""):
        return
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "slow_reads.so"
        compiled = subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, _SOURCE, "-ldl"], check=False)
        if compiled.returncode:
            raise CannotRunError("cc did not build slow_reads.c: install a C compiler")
        command = [sys.executable, *sys.orig_argv[1:]]
        sys.exit(subprocess.run(command, env={**os.environ, "LD_PRELOAD": str(library)}, check=False).returncode)


def _time(bench: Bench, name: str, path: Path, latency: float, without: dict[str, float]) -> None:
    """Time all readers at one latency; `without` has their seconds without latency, which the first call sets."""
    array = zarr.open_array(path, mode="r")
    reads = math.prod(math.ceil(n / c) for n, c in zip(array.shape, array.chunks, strict=True))
    limit = reads * latency / 1e3 / max_reads()
    calls: dict[str, Callable[[], Any]] = {"linumpy to the host": partial(read_zarr, path, device="cpu")}
    if bench.on_gpu:
        calls = {"linumpy to the device": partial(read_zarr_to_gpu, path, strict=True), **calls}
    calls[f"tensorstore, {_PEER_READS} at a time"] = partial(_tensorstore, path)
    with bench.case(f"{name}, {latency:g} ms", array.nbytes / GIB) as case:
        for title, call in calls.items():
            case.time(title, call, lambda result: difference(path, result))
            row = case.rows[-1]
            if row.median is None:
                continue
            if not latency:
                without[title] = row.median
            elif title in without:
                share = max(limit, without[title]) / row.median
                case.rows[-1] = replace(row, note=f"{share:.2f} of the limit")


def _tensorstore(path: Path) -> Array:
    tensorstore = peer_module("tensorstore")
    context = {"file_io_concurrency": {"limit": _PEER_READS}}
    spec = {"driver": "zarr3", "kvstore": f"file://{path.resolve()}/", "context": context}
    return np.asarray(tensorstore.open(spec, open=True, read=True).result().read().result())


_TEXT = "Milliseconds that a read takes more. [1 5 20]"
SUITE = Suite(
    run=_run,
    help=__doc__,
    cases=tuple(ARRAYS),
    options=[cli.Option("--latency", type=float, nargs="+", default=[1.0, 5.0, 20.0], metavar="MS", help=_TEXT)],
    prepare=_preload,
)
