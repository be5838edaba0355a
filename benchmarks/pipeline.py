"""Time the pipeline on a synthetic brain and the first read of a process, with nothing compiled and again.

Each run is a process of its own. "cold" runs have an empty folder of compiled kernels (LINUMPY_KERNEL_CACHE), "warm"
ones that of the runs before; without a GPU there is nothing to compile. The stack must correlate with the truth by 0.8,
and a read is compared with zarr-python's. What the processes print is printed, too: the stages, or the seconds of the
read without imports.

For example:
  linum-benchmark pipeline --size medium --folder /dev/shm
  linum-benchmark pipeline --only read
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from linumpy import cli
from linumpy.benchmark.timing import GIB, Bench, Suite
from linumpy.demo_brain import BRAINS, drawn_brain
from linumpy.testing.brain_errors import errors_of
from linumpy.testing.stores import StoreSpec

_READ = """
import sys, time, zarr, numpy as np
import linumpy.gpu.zarr_io as io, linumpy.device as device
from linumpy import kernel_cache
kernel_cache.for_command()
where = device.resolve(sys.argv[2])
start = time.perf_counter()
voxels = io.read_zarr(sys.argv[1], device=where.kind)
device.synchronize()
print(time.perf_counter() - start)
assert np.array_equal(device.to_host(voxels), zarr.open_array(sys.argv[1], mode="r")[...])
"""


_DEMO = """
import sys
from linumpy import kernel_cache
from linumpy.demo_brain import run_brain_demo
kernel_cache.for_command()
print(run_brain_demo(sys.argv[1], sys.argv[2], sys.argv[3], overwrite=True))
"""


def _run(bench: Bench, args: argparse.Namespace) -> None:
    with bench.work_folder() as folder:
        kernels = folder / "kernels"
        if bench.wants("pipeline"):
            spec = drawn_brain(args.size)

            def differs(_: object) -> str:
                (stack,) = errors_of(spec, folder / "demo/results", ("stack",))
                return "" if stack.value > 0.8 else f"the stack correlates with the truth by {stack.value:.2f}"

            command = [_DEMO, str(folder / "demo"), args.size, bench.device]
            _time(bench, f"pipeline, {args.size}", spec.nbytes, command, kernels, differs)
        if bench.wants("read"):
            path = StoreSpec(name="", shape=(128, 256, 256), chunks=(64, 64, 64), codec="zstd").make(folder)
            # The process itself compares its result.
            _time(bench, "first read, 16 MiB of zstd", 2**24, [_READ, str(path), bench.device], kernels, lambda _: "")


def _time(
    bench: Bench, name: str, nbytes: float, words: list[str], kernels: Path, differs: Callable[[object], str]
) -> None:
    """Time a program whose kernels are kept in a folder."""
    told = [""]

    def call() -> None:
        environment = os.environ | {"LINUMPY_KERNEL_CACHE": str(kernels)}
        command = [sys.executable, "-c", *words]
        told[0] = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout

    empty = partial(shutil.rmtree, kernels, ignore_errors=True)
    with bench.case(name, nbytes / GIB) as case:
        for title, before in (("linumpy, cold", empty), ("linumpy, warm", lambda: None)):
            case.time(title, call, differs, before=before, warm_ups=0)
            print(told[0])


SUITE = Suite(
    run=_run,
    help=__doc__,
    cases=("pipeline", "read"),
    runs=3,
    options=[cli.Option("--size", choices=tuple(BRAINS), default="small", help="Size of the brain. [%(default)s]")],
)
