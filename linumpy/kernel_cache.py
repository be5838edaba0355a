"""Compiled kernels: the folder that keeps them for later processes, and how many this process compiled.

In: environment variables, before and after CuPy is imported (:mod:`linumpy.device`). Out: :func:`compiled`. Kernels are
linumpy's and CuPy's own. A folder that cannot be written, or a full disk, costs the time to compile again.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)

#: Environment variable: the folder that keeps the kernels of CuPy and Warp.
CACHE_VARIABLE = "LINUMPY_KERNEL_CACHE"

_lock = threading.Lock()
_missed = threading.local()
_count, _seconds = 0, 0.0
#: Whether this process is a command, in which CuPy's reductions need not be the fastest.
_is_command = False


@dataclass(frozen=True)
class Compiled:
    """Kernels that were compiled.

    Attributes
    ----------
    kernels : int
        Number of modules, each of one kernel or a few.
    seconds : float
        Time in the compiler, summed over threads.
    """

    kernels: int = 0
    seconds: float = 0.0

    def __sub__(self, before: Compiled) -> Compiled:
        return Compiled(self.kernels - before.kernels, self.seconds - before.seconds)

    def __str__(self) -> str:
        return f"{self.kernels} compiled in {self.seconds:.1f} s of all threads" if self.kernels else "none compiled"


def compiled() -> Compiled:
    """Return what this process has compiled so far; nothing before CuPy is imported."""
    with _lock:
        return Compiled(_count, _seconds)


def for_command() -> None:
    """Prefer kernels that are quickly compiled, since a command waits for them: call before CuPy is imported.

    CuPy's reductions by CUB run in less time than its plain ones, but each takes up to 4 s to compile.
    """
    global _is_command
    _is_command = True


def choose_folder() -> None:
    """Choose the folder and the options of the compiler: CuPy reads them from the environment when it is imported."""
    if "cupy" in sys.modules:
        return
    wanted = os.environ.get(CACHE_VARIABLE)
    if wanted:
        os.environ["CUPY_CACHE_DIR"] = str(Path(wanted) / "cupy")
        os.environ.setdefault("WARP_CACHE_PATH", str(Path(wanted) / "warp"))
    # Reading CuPy's own headers takes two thirds of the time of a small kernel.
    os.environ.setdefault("CUPY_NVRTC_USE_PCH", "1")
    try:
        os.makedirs(folder(), exist_ok=True)
    except OSError as error:
        other = tempfile.mkdtemp(prefix="linumpy-kernels-")
        log.warning("compiled kernels are kept in %s until it is deleted, since %s (%s)", other, error, CACHE_VARIABLE)
        os.environ["CUPY_CACHE_DIR"] = other


def folder() -> Path:
    """Return the folder of CuPy's compiled kernels."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache"))


def count() -> int:
    """Return the number of kernels in the folder."""
    return sum(path.suffix == ".cubin" for path in folder().iterdir())


def watch(cupy: ModuleType) -> None:
    """Count what CuPy compiles, and let it compile where the folder cannot be written. Once for each process."""
    try:
        compiler: Any = cupy.cuda.compiler
        if type(compiler._kernel_cache_backend) is compiler._DiskKernelCacheBackend:
            compiler._set_kernel_cache_backend(_folder_class(compiler._DiskKernelCacheBackend)())
        if _is_command:
            cupy._core.set_reduction_accelerators([])
    except AttributeError as error:  # another version of CuPy
        log.debug("compiled kernels are not counted: %s", error)


def _folder_class(base: Any) -> Any:
    """Make the class of CuPy's folder of kernels that is used in place of CuPy's own."""

    class Folder(base):  # type: ignore[misc]
        def load(self, name: str) -> bytes | None:
            try:
                found: bytes | None = super().load(name)
            except OSError:
                found = None
            _missed.since = time.perf_counter()
            return found

        def save(self, name: str, cubin: bytes, source: str) -> None:
            _add(time.perf_counter() - _missed.since)
            try:
                self._write_whole(os.path.join(self._cache_dir, name), self._encode_cubin(cubin))
            except OSError as error:
                _warn_once(f"compiled kernels are not kept: {error} ({CACHE_VARIABLE} names another folder)")

        def _write_whole(self, path: str, data: bytes) -> None:
            part = f"{path}.{os.getpid()}-{threading.get_ident()}"
            try:
                with open(part, "wb") as file:
                    file.write(data)
                os.replace(part, path)
            except OSError:
                if os.path.exists(part):
                    os.unlink(part)
                raise

    return Folder


def _add(seconds: float) -> None:
    global _count, _seconds
    with _lock:
        _count, _seconds = _count + 1, _seconds + seconds


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        log.warning(message)
