"""How bytes get from a folder into GPU memory, by GPUDirect Storage (GDS) or through host memory, and why.

In: a file or folder. Out: a :class:`GdsVerdict`. Errors: none; the verdict is ``"unknown"``, with
the reason, if the path is a URL or cannot be reached, if bash, the script or Linux is missing, or if the script times
out.

The script ``gds_doctor.sh`` finds out the path of the bytes, so that an admin without Python gets the same answer. This
module runs the script and caches its answer. It imports no GPU package and changes nothing.

A read is GPUDirect Storage only if :attr:`GdsVerdict.is_native`: the compat modes of kvikio and cuFile copy through
host memory.
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
from urllib.parse import unquote, urlsplit

__all__ = ["PATHS", "GdsVerdict", "gds_verdict"]

#: All values of :attr:`GdsVerdict.path`, the native ones first.
PATHS = ("nvidia-fs", "p2pdma", "cufile-compat", "kvikio-posix", "unknown")
_NATIVE = ("nvidia-fs", "p2pdma")

#: Timeout of the script in seconds. The script needs less than a second, and kvikio's import a few seconds.
_TIMEOUT = 30.0

# Environment variables that the script reads; their values are part of the cache's key.
_VARIABLES = (
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
    """The path of bytes from one folder to the GPU.

    `path`: one of :data:`PATHS`. `reasons`: the reasons for this path; if it is not native, the obstacles to a native
    path. `folder`: the folder that the verdict is about: the path itself, or the nearest existing folder above it; for
    a URL, or a path that cannot be reached, the path as it was passed.
    """

    path: str
    reasons: tuple[str, ...]
    folder: str = ""

    @property
    def is_native(self) -> bool:
        """Whether bytes go from the disk to the GPU without a copy in host memory."""
        return self.path in _NATIVE


_CACHE: dict[tuple[object, ...], GdsVerdict] = {}


def gds_verdict(path: str | os.PathLike[str]) -> GdsVerdict:
    """Find out how bytes get from a file or folder into GPU memory; every NVIDIA GPU must qualify for a native path.

    `path`: a file or a folder, also as a ``file://`` URL. If it does not exist, the nearest existing folder above it is
    used, which is on the same file system.

    Returns: Cached for each file system, folder and environment, except after a timeout.
    """
    text = os.fsdecode(path)
    if "://" in text:
        scheme, plain = text.split("://", 1)
        if scheme != "file":
            return GdsVerdict("unknown", (f"{scheme}:// is no local folder",), folder=text)
        # A URL quotes special characters, but linumpy and zarr print local folders after file:// without quoting.
        text = plain if os.path.exists(plain) else unquote(urlsplit(text).path)
    try:
        folder = _nearest_folder(text)
        file_system = os.stat(folder).st_dev
    except (OSError, ValueError) as error:
        return GdsVerdict("unknown", (f"{text!r} cannot be reached: {error}",), folder=text)
    environment = _environment()
    key = (file_system, folder, *(environment.get(name) for name in _VARIABLES))
    cached = _CACHE.get(key)
    if cached is None:
        try:
            cached = _CACHE[key] = _ask(folder, environment)
        except subprocess.TimeoutExpired:
            # Not cached: the machine is busy, and a later call may get an answer.
            return GdsVerdict("unknown", (f"gds_doctor.sh did not answer within {_TIMEOUT:g} s",), folder=folder)
    return cached


def _nearest_folder(text: str) -> str:
    folder = os.path.realpath(text)
    while not os.path.isdir(folder):
        parent = os.path.dirname(folder)
        if parent == folder:
            raise FileNotFoundError(text)
        folder = parent
    return folder


def _environment() -> dict[str, str]:
    """Return the environment for the script, with the mode that kvikio has now if it was imported."""
    environment = dict(os.environ)
    # kvikio reads its mode from the environment at import, and a program may change the mode later.
    defaults = sys.modules.get("kvikio.defaults")
    if defaults is not None:
        # In versions of kvikio where this fails, the variable keeps its value.
        with contextlib.suppress(Exception):
            environment["KVIKIO_COMPAT_MODE"] = str(defaults.get("compat_mode").name)
    return environment


def _ask(folder: str, environment: dict[str, str]) -> GdsVerdict:
    """Run the script and return its verdict; raise subprocess.TimeoutExpired if the script does not end in time."""

    def unknown(reason: str) -> GdsVerdict:
        return GdsVerdict("unknown", (reason,), folder=folder)

    if not sys.platform.startswith("linux"):
        return unknown("GPUDirect Storage exists on Linux only")
    # In a source checkout this folder is a link to ``shell_scripts/server_setup``.
    script = Path(__file__).resolve().parent / "_server_setup" / "gds_doctor.sh"
    if not script.is_file() or not script.with_name("lib.sh").is_file():
        return unknown("gds_doctor.sh is not in the package")
    bash = shutil.which("bash")
    if bash is None:
        return unknown("there is no bash to run gds_doctor.sh with")
    # The script asks the kvikio of this Python, since reads use it.
    python = ["--python", sys.executable] if sys.executable else ["--no-python"]
    try:
        code, out, err = _run([bash, str(script), "--json", *python, "--", folder], environment)
    except (OSError, ValueError) as error:
        return unknown(f"gds_doctor.sh cannot be run: {error}")
    try:
        report = json.loads(out)
        path, reasons = report["path"], tuple(map(str, report["reasons"]))
        if path not in PATHS:
            raise ValueError(path)
    except (ValueError, KeyError, TypeError):
        messages = err.decode("utf-8", "replace").strip().splitlines()
        return unknown(f"gds_doctor.sh gave no answer (exit {code}): {messages[-1] if messages else 'no message'}")
    return GdsVerdict(path, reasons, folder)


def _run(command: list[str], environment: dict[str, str]) -> tuple[int, bytes, bytes]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=_TIMEOUT)
    except BaseException:
        # Kill the whole process group: a surviving child would keep the pipes open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, out, err
