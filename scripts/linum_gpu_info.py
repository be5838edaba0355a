"""Print the GPU, its memory and driver, the GPU packages, and the path of files to the GPU.

For example:
  linum-gpu-info
  linum-gpu-info --path /data/mosaics
"""

import os
import tempfile
import time
from pathlib import Path

from linumpy import cli, device, kernel_cache
from linumpy.core import native
from linumpy.core.reader import READS_VARIABLE, max_reads
from linumpy.errors import LinumpyError


def _print(arguments: cli.Namespace) -> None:
    if arguments.path is not None and not os.path.exists(arguments.path):
        raise FileNotFoundError(f"--path {arguments.path}: there is no such folder")
    print(device.describe())
    if device.DEVICE_VARIABLE in os.environ:
        print(f"{'by default':<12}{device.requested_kind(None)} ({device.DEVICE_VARIABLE})")
    why = native.why_no_core()
    print(f"{'core':<12}{'native: reads run outside Python' if why is None else f'none: {why}; zarr-python reads'}")
    if why is None:
        library = native.library()
        for name, decoder in native.DECODERS.items():
            print(f"{decoder.codecs:<12}{library.opened.get(name) or library.missing[name]}")
        print(f"{'reads':<12}up to {max_reads()} of slow storage in flight ({READS_VARIABLE})")
    if arguments.warm_up:
        _warm_up()
    if arguments.path is None:
        return
    from linumpy.gds import gds_verdict

    verdict = gds_verdict(arguments.path)
    kind = "native GPUDirect Storage" if verdict.is_native else "not GPUDirect Storage"
    print(f"\n{'folder':<12}{arguments.path}\n{'path':<12}{verdict.path}: {kind}")
    for number, reason in enumerate(verdict.reasons):
        print(f"{'' if number else 'why':<12}{reason}")


def _warm_up() -> None:
    from linumpy.demo import run_demo
    from linumpy.pipeline.settings import Run
    from linumpy.progress import progress_bar
    from linumpy.warm_up import DTYPES, warming_up

    device.require_cuda()
    begin, before = time.perf_counter(), kernel_cache.count()
    with tempfile.TemporaryDirectory(prefix="linumpy-warm-up-") as folder:
        run_demo(Path(folder) / "demo", "small", "cuda")
        run = Run(mosaics=Path(folder), output=Path(folder), slicing_interval_mm=0.2)
        with progress_bar("compiling", len(DTYPES), "dtype") as advance:
            for dtype in DTYPES:
                with warming_up(run, dtype) as processes:
                    if any(process.wait() for process in processes):
                        raise LinumpyError(f"--warm-up: not all kernels of {dtype} were compiled; -v says why")
                advance(1)
    new, seconds = kernel_cache.count() - before, time.perf_counter() - begin
    print(f"{'kernels':<12}{new} compiled in {seconds:.0f} s, {before + new} in {kernel_cache.folder()}")


main = cli.Command(
    "linum-gpu-info", __doc__, _print,
    cli.Option(
        "--path", metavar="DIR", help="Print the path of bytes from this folder to the GPU, and the reasons."
    ),
    cli.Option(
        "--warm-up", action="store_true",
        help="Compile the kernels that linum-pipeline and linum-demo use, and keep them for later processes "
        "(LINUMPY_KERNEL_CACHE names the folder).",
    ),
)  # fmt: skip
