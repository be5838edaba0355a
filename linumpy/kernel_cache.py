"""Compiled kernels: the folder that keeps them for later processes, and how many this process compiled.

In: environment variables, before and after CuPy is imported (:mod:`linumpy.device`). Out: :func:`compiled`. Kernels are
linumpy's and CuPy's own. A folder that cannot be written, or a full disk, costs the time to compile again. Counts and
this need CuPy 14.2; with an older one its own folder of kernels is used as it is.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from contextlib import suppress
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
    """Number of modules that were compiled, each of one kernel or a few, and seconds in the compiler of all threads."""

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


def is_command() -> bool:
    """Return whether :func:`for_command` was called."""
    return _is_command


def choose_folder() -> None:
    """Choose the folder before CuPy is imported, which reads it from the environment."""
    wanted = os.environ.get(CACHE_VARIABLE)
    if wanted:
        root = Path(wanted).expanduser().absolute()
        os.environ["CUPY_CACHE_DIR"] = str(root / "cupy")
        os.environ.setdefault("WARP_CACHE_PATH", str(root / "warp"))
    if "cupy" in sys.modules:
        return
    chosen = folder()
    try:
        if not chosen.is_absolute():
            raise FileNotFoundError(f"{chosen} is not an absolute path")
        chosen.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        chosen = Path(tempfile.mkdtemp(prefix="linumpy-kernels-"))
        atexit.register(_remove, chosen, os.getpid())
        os.environ.pop(CACHE_VARIABLE, None)  # processes that this one starts use the same folder
        log.warning("compiled kernels are kept until this process ends: %s (%s)", error, CACHE_VARIABLE)
    os.environ["CUPY_CACHE_DIR"] = str(chosen)


def _remove(chosen: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        shutil.rmtree(chosen, ignore_errors=True)


def folder() -> Path:
    """Return the folder of CuPy's compiled kernels."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache"))


def count() -> int:
    """Return the number of kernels in the folder."""
    return sum(path.suffix == ".cubin" for path in folder().iterdir())


def watch(cupy: ModuleType) -> None:
    """Count what CuPy compiles, and let it compile where the folder cannot be written.

    CuPy may have been imported before linumpy, by zarr for example, so its settings are changed in place. Settings of
    the user are left alone.
    """
    if _is_command and "CUPY_ACCELERATORS" not in os.environ:
        with suppress(AttributeError):
            cupy._core.set_reduction_accelerators([])
    try:
        compiler: Any = cupy.cuda.compiler
        backend = compiler._kernel_cache_backend
        if type(backend) is not compiler._DiskKernelCacheBackend:
            return
        # Reading CuPy's own headers takes two thirds of the time of a small kernel.
        compiler._use_pch = os.environ.get("CUPY_NVRTC_USE_PCH", "1") != "0"
        watched = _folder_class(type(backend))
        try:
            made = watched(str(folder()) if os.environ.get(CACHE_VARIABLE) else backend._cache_dir)
        except OSError as error:
            _warn_once(f"compiled kernels are kept in {backend._cache_dir}: {error} ({CACHE_VARIABLE})")
            made = watched(backend._cache_dir)
        compiler._set_kernel_cache_backend(made)
    except AttributeError as error:
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
            now = time.perf_counter()
            _add(now - getattr(_missed, "since", now))  # another backend may have been asked for the kernel
            path = os.path.join(self._cache_dir, name)
            try:
                _write_whole(path, self._encode_cubin(cubin))
                if self._save_cuda_source:
                    _write_whole(f"{path}.cu", source.encode())
            except OSError as error:
                _warn_once(f"compiled kernels are not kept: {error} ({CACHE_VARIABLE} names another folder)")

    return Folder


def _write_whole(path: str, data: bytes) -> None:
    part = f"{path}.{os.getpid()}-{threading.get_ident()}"
    try:
        with open(part, "wb") as file:
            file.write(data)
        os.replace(part, path)
    except OSError:
        if os.path.exists(part):
            os.unlink(part)
        raise


def _add(seconds: float) -> None:
    global _count, _seconds
    with _lock:
        _count, _seconds = _count + 1, _seconds + seconds


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)
