"""Compile the kernels of the pipeline in other processes, while the pipeline begins.

In: a run, and the dtype of its mosaics. Out: compiled kernels in the folder of :mod:`linumpy.kernel_cache`. Each
process runs some stages on a tiny synthetic brain (a rehearsal), with the options of the run: kernels depend on dtypes
and options, but hardly on sizes. Threads would wait for each other in the compiler. A failed rehearsal is only logged:
the pipeline compiles the kernels that are missing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from linumpy import device, kernel_cache, progress
from linumpy.pipeline.runner import run_pipeline
from linumpy.pipeline.settings import OPTIONS, Run
from linumpy.testing.brain import USUAL_FAULTS, BrainSpec
from linumpy.testing.brain_files import write_brain
from linumpy.version import __version__

log = logging.getLogger(__name__)

#: Stages that are rehearsed together: a stage is in one group with the stages whose results it needs.
_GROUPS = (
    ("focal", "surface"),
    ("positions", "stitch", "beam", "attenuation"),
    ("galvo", "resample", "survey", "shading", "illumination", "aip"),
    ("register", "stack", "report"),
)
#: Dtypes of mosaics that are rehearsed, because synthetic brains can have them.
DTYPES = ("uint16", "float32")
#: Cores, and bytes of device memory, that a process needs.
_CORES, _DEVICE_NBYTES = 2, 3 * 2**30


@dataclass(frozen=True)
class _Rehearsal:
    """What a process does: the run, whose paths do not matter, the dtype of the mosaics, and groups of stages.

    `as_command` is as in the process that starts it: kernels of commands differ (:func:`kernel_cache.for_command`).
    """

    run: Run
    dtype: str
    groups: tuple[tuple[str, ...], ...]
    as_command: bool


@contextmanager
def warming_up(run: Run, dtype: DTypeLike | None = None) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Compile the kernels of a run during a ``with`` block, unless a mark in the kernel folder says that this was done.

    Processes that still compile at the end of the block are ended, and leave no mark.

    Parameters
    ----------
    run : Run
        The run.
    dtype : dtype, optional
        Dtype of its mosaics; by default that of the first one.

    Yields
    ------
    list of subprocess.Popen
        The processes, to wait for; empty if the mark exists, the dtype is not in :data:`DTYPES`, the machine has too
        few cores or too little device memory, or the kernel folder cannot be written.
    """
    name = np.dtype(_first_dtype(run) if dtype is None else dtype).name
    mark = _mark(run, name)
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="linumpy-warm-up-", ignore_cleanup_errors=True) as folder:
        try:
            if name in DTYPES and os.access(mark.parent, os.W_OK) and not mark.exists():
                _start_all(run, name, Path(folder), processes)
            yield processes
        finally:
            unfinished = [process for process in processes if process.poll() != 0]  # still running, or failed
            for process in unfinished:
                process.kill()
                process.wait()
            for process in processes:
                assert process.stdin is not None
                process.stdin.close()
            if processes and not unfinished:
                with suppress(OSError):  # a full disk
                    mark.touch()


def _start_all(run: Run, dtype: str, folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    """Start as many processes as the cores and half of the free device memory allow; append each to `processes`."""
    free = device.require_cuda().cuda.runtime.memGetInfo()[0]
    count = int(min(len(_GROUPS), device.usable_cores() // _CORES, free // 2 // _DEVICE_NBYTES))
    try:
        for number in range(count):
            rehearsal = _Rehearsal(
                run=run, dtype=dtype, groups=_GROUPS[number::count], as_command=kernel_cache.is_command()
            )
            processes.append(_start(rehearsal, folder / str(number)))
    except OSError as error:  # no memory for a further process
        log.debug("fewer processes compile: %s", error)


def _first_dtype(run: Run) -> np.dtype:
    from linumpy.mosaic.io.image import open_mosaic
    from linumpy.mosaic.io.slice_table import find_slices

    return np.dtype(open_mosaic(next(iter(find_slices(run.mosaics).values()))).array.dtype)


def _mark(run: Run, dtype: str) -> Path:
    """Return the file whose existence says that kernels are compiled for this GPU, these versions, codec and dtype.

    Other options of the run are not compared: the pipeline compiles kernels that differ by them.
    """
    cupy = device.require_cuda()
    capability = cupy.cuda.Device().compute_capability
    parts = (__version__, cupy.__version__, capability, dtype, run.codec, kernel_cache.is_command())
    return kernel_cache.folder() / f"linumpy-pipeline-{hashlib.sha1(repr(parts).encode()).hexdigest()}"


def _start(rehearsal: _Rehearsal, folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir()
    # -P: do not import modules from the current folder.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=None if log.isEnabledFor(logging.INFO) else subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(rehearsal))
    process.stdin.flush()  # stays open: end of file tells the process that its parent has ended
    return process


def _rehearse(rehearsal: _Rehearsal, folder: Path) -> bool:
    """Take a tiny brain through groups of stages; return whether all were carried out."""
    spacing = rehearsal.run.options_of("resample").new_spacing
    half = tuple(np.broadcast_to(spacing, 3) / 2)  # so that stage resample has work to do
    faults = replace(USUAL_FAULTS, galvo=5)
    brain = BrainSpec(
        slices=2, tiles=(2, 2), tile_shape=(48, 96, 96), spacing_um=half, interval_um=10 * half[0],
        dtype=rehearsal.dtype, faults=faults,  # type: ignore[arg-type]
    )  # fmt: skip
    write_brain(brain, folder / "brain")
    # Too few tiles to estimate the illumination well: force its use, so that the kernels of the correction compile.
    options = {**rehearsal.run.options, "shading": replace(rehearsal.run.options_of("shading"), force=True)}
    succeeded = True
    for number, stages in enumerate(rehearsal.groups):
        run = replace(
            rehearsal.run, mosaics=folder / "brain" / "mosaics", output=folder / str(number), shifts=None,
            slice_config=None, tile_shape=None, options=options,
            slicing_interval_mm=brain.interval_um / 1e3, skip=tuple(stage for stage in OPTIONS if stage not in stages),
        )  # fmt: skip
        try:
            run_pipeline(run, device="cuda")
        except Exception as error:
            log.warning("rehearsal of %s: %s", ", ".join(stages), error)
            succeeded = False
    return succeeded


def _end_with_parent(folder: Path) -> None:
    while os.read(0, 1):
        pass
    shutil.rmtree(folder.parent, ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Carry out the pickled :class:`_Rehearsal` that the parent process writes to standard input."""
    folder, rehearsal = Path(sys.argv[1]), pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    progress.is_quiet = True
    if rehearsal.as_command:
        kernel_cache.for_command()
    sys.exit(not _rehearse(rehearsal, folder))


if __name__ == "__main__":
    main()
