"""The way that bytes from a folder take to a GPU, and why it is no better one.

The logic lives in ``gds_doctor.sh``, so that an admin without Python and a reader in
Python get the same answer. This module finds that script, runs it, and keeps its answer.

In: a path. Out: a frozen :class:`GdsVerdict`. It never raises for what the machine lacks
(no bash, no script, no Linux, a script that takes too long): the verdict is then
``"unknown"``, with the reason. It imports no GPU package and changes nothing.

Only :attr:`GdsVerdict.is_native` allows a read to be called GPUDirect Storage. kvikio's
and cuFile's compat modes copy through host memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["PATHS", "GdsVerdict", "clear_cache", "find_doctor", "gds_verdict"]

#: Every answer there is, the native ones first.
PATHS = ("nvidia-fs", "p2pdma", "cufile-compat", "kvikio-posix", "unknown")
_NATIVE = ("nvidia-fs", "p2pdma")

#: Seconds that the script may take. It needs well under one, and kvikio's import a few.
DEFAULT_TIMEOUT = 30.0

# What the doctor reads from the environment: another value may be another answer.
_ENVIRONMENT = (
    "CUFILE_ALLOW_COMPAT_MODE",
    "CUFILE_ENV_PATH_JSON",
    "CUFILE_FORCE_COMPAT_MODE",
    "CUFILE_USE_PCIP2PDMA",
    "GDS_SYSROOT",
    "KVIKIO_COMPAT_MODE",
    "LD_LIBRARY_PATH",
)


@dataclass(frozen=True, slots=True)
class GdsVerdict:
    """The way that bytes from one folder take to the GPU.

    Attributes
    ----------
    path : str
        One of :data:`PATHS`.
    reasons : tuple of str
        Why it is this way; for ways that are not native, what stands against them.
    both_native : bool
        Both native ways are open.
    native : tuple of str
        The native ways that bytes can take now, of ``"nvidia-fs"`` and ``"p2pdma"``.
    folder : str
        The folder that was judged: the nearest one that exists.
    source : str
        The script that said so, or ``"none"`` when none could be run.
    """

    path: str
    reasons: tuple[str, ...]
    both_native: bool = False
    native: tuple[str, ...] = ()
    folder: str = ""
    source: str = "none"

    @property
    def is_native(self) -> bool:
        """Whether the bytes go from the disk to the GPU without a stop in host memory."""
        return self.path in _NATIVE

    def __str__(self) -> str:
        """One line, for a log or a report."""
        return f"path={self.path}" + (f" ({'; '.join(self.reasons)})" if self.reasons else "")


_CACHE: dict[tuple[object, ...], GdsVerdict] = {}


def clear_cache() -> None:
    """Forget all verdicts, for instance after the machine was changed."""
    _CACHE.clear()


def find_doctor() -> Path | None:
    """Return the path of ``gds_doctor.sh``, or None.

    It is in ``linumpy/_server_setup``, which in a source checkout is a link to ``shell_scripts/server_setup``.
    """
    folder = Path(__file__).resolve().parent / "_server_setup"
    script = folder / "gds_doctor.sh"
    # Without its library the script cannot run.
    return script if script.is_file() and (folder / "lib.sh").is_file() else None


def gds_verdict(
    path: str | os.PathLike[str],
    *,
    gpu: int | str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> GdsVerdict:
    """Say which way bytes from ``path`` take to the GPU.

    Parameters
    ----------
    path : str or os.PathLike
        A file or a folder. Where it does not exist yet, the nearest folder above it that
        does is judged, because that is the file system it will be on.
    gpu : int or str, optional
        One GPU: its index in PCI order, or its PCI address such as ``"0000:65:00.0"``
        (CuPy's ``Device.pci_bus_id``). By default every NVIDIA GPU must qualify.
    timeout : float
        Seconds after which the answer is ``"unknown"``.

    Returns
    -------
    GdsVerdict
        Kept for each device, folder, GPU and environment: asking again costs nothing.
    """
    text = os.fsdecode(path)
    if "://" in text:
        scheme, plain = text.split("://", 1)
        if scheme != "file":
            return GdsVerdict("unknown", (f"{scheme}:// is no local folder",), folder=text)
        # As linumpy and zarr spell local folders, and else as a URL.
        text = plain if os.path.exists(plain) else unquote(urlsplit(text).path)
    try:
        folder = _nearest_folder(text)
        device = os.stat(folder).st_dev
    except (OSError, ValueError) as error:
        return GdsVerdict("unknown", (f"{text!r} cannot be reached: {error}",), folder=text)
    environment = _environment()
    key = (device, folder, gpu, *(environment.get(name) for name in _ENVIRONMENT))
    known = _CACHE.get(key)
    if known is None:
        try:
            known = _CACHE[key] = _ask(folder, gpu, timeout, environment)
        except subprocess.TimeoutExpired:
            # A busy machine, not an answer: the next one who asks may get one.
            reason = f"gds_doctor.sh did not answer within {timeout:g} s"
            return GdsVerdict("unknown", (reason,), folder=folder, source=str(find_doctor()))
    return known


def _nearest_folder(text: str) -> str:
    folder = os.path.realpath(text)
    while not os.path.isdir(folder):
        parent = os.path.dirname(folder)
        if parent == folder:
            raise FileNotFoundError(text)
        folder = parent
    return folder


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # kvikio takes its mode from the environment once, and a program may change it later.
    defaults = sys.modules.get("kvikio.defaults")
    if defaults is not None:
        # In a different kvikio that fails: the environment then stays the best answer.
        with contextlib.suppress(Exception):
            environment["KVIKIO_COMPAT_MODE"] = str(defaults.get("compat_mode").name)
    return environment


def _ask(folder: str, gpu: int | str | None, timeout: float, environment: dict[str, str]) -> GdsVerdict:
    """Ask the script; raises subprocess.TimeoutExpired where it does not answer in time."""

    def unknown(reason: str, source: str = "none") -> GdsVerdict:
        return GdsVerdict("unknown", (reason,), folder=folder, source=source)

    if not sys.platform.startswith("linux"):
        return unknown("GPUDirect Storage exists on Linux only")
    script = find_doctor()
    if script is None:
        return unknown("gds_doctor.sh is not in the package")
    bash = shutil.which("bash")
    if bash is None:
        return unknown("there is no bash to run gds_doctor.sh with")
    command = [bash, str(script), "--json"]
    # The Python that will do the reading is the one whose kvikio counts.
    command += ["--python", sys.executable] if sys.executable else ["--no-python"]
    if gpu is not None:
        command += ["--gpu", str(gpu)]
    source = str(script)
    try:
        code, out, err = _run([*command, "--", folder], timeout, environment)
    except (OSError, ValueError) as error:
        return unknown(f"gds_doctor.sh cannot be run: {error}", source)
    try:
        return _from_report(json.loads(out), folder, source)
    except (ValueError, KeyError, TypeError, AttributeError):
        said = err.decode("utf-8", "replace").strip().splitlines()
        return unknown(f"gds_doctor.sh gave no answer (exit {code}): {said[-1] if said else 'no message'}", source)


def _run(command: list[str], timeout: float, environment: dict[str, str]) -> tuple[int, bytes, bytes]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        # The whole group: a child that lives on would keep the pipes open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, out, err


def _from_report(report: dict[str, Any], folder: str, source: str) -> GdsVerdict:
    path = report["path"]
    if path not in PATHS:
        raise ValueError(path)
    return GdsVerdict(
        path=path,
        reasons=tuple(str(reason) for reason in report["reasons"]),
        both_native=bool(report["both_native"]),
        native=tuple(str(way) for way in report["native"]),
        folder=folder,
        source=source,
    )
