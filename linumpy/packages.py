"""Installed distributions, and the commands that install missing ones.

In: names of distributions, and of extras of this distribution. Out: versions, requirements, command lines. Errors:
:func:`needs` raises ``ImportError``. No package is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import re
from collections.abc import Iterator, Mapping

#: The name of this distribution; ``linumpy`` on the package index is another distribution.
DISTRIBUTION = "linumpy-gpu"


@contextlib.contextmanager
def needs(package: str, extra: str) -> Iterator[None]:
    """Add to an ``ImportError`` of the block the command that installs `package`, by an extra of this distribution.

    For example ``with needs("tifffile", "export"): import tifffile``.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{package} is not installed ({error}): {install_line(extra)}") from error


def install_line(extra: str | None = None) -> str:
    """Return the command that installs an extra; by default the GPU packages for this machine's driver.

    Without a driver the command installs the packages for CUDA 13. It names the requirements of the extra from the
    metadata of this distribution, and works whether linumpy was installed from a checkout or a wheel; with the name of
    the distribution it would work only if the user's package index has that. If the metadata lack the extra, the only
    requirement is ``.[extra]``, which pip understands in a checkout.
    """
    if extra is None:
        extra = "cuda12" if (driver_cuda_version() or (13, 0))[0] == 12 else "cuda13"
    marker = re.compile(r"""\s*;\s*extra\s*==\s*['"]""" + extra + r"""['"]\s*$""")
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []  # imported from a source tree that is not installed
    needed = [marker.sub("", need) for need in requirements if marker.search(need)] or [f".[{extra}]"]
    return "pip install " + " ".join(f'"{need}"' for need in needed)


@functools.cache
def _providers() -> Mapping[str, list[str]]:
    """Map packages to the distributions that provide them; this reads all installed distributions and takes 0.3 s."""
    return importlib.metadata.packages_distributions()


def other_distributions() -> list[str]:
    """Return the names of the other installed distributions that provide the package ``linumpy``."""
    distributions = set(_providers().get("linumpy", ()))
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        distributions.add(importlib.metadata.metadata("linumpy")["Name"])
    return sorted(name for name in distributions if re.sub(r"[-_.]+", "-", name).lower() != DISTRIBUTION)


def driver_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version, (major, minor), that the NVIDIA driver can run; None without a working driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value == 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def version_of(*names: str) -> str:
    """Return the version of the first of these distributions that is installed, or ``"not installed"``."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"
