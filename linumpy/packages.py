"""Installed distributions, and the commands that install missing ones.

In: names of packages, and of extras of this distribution. Out: versions, requirements, command lines. No package is
imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import re
from collections.abc import Iterator, Mapping

#: The name of this package for pip; ``linumpy`` on the package index is another one.
DISTRIBUTION = "linumpy-gpu"


@contextlib.contextmanager
def needs(package: str, extra: str) -> Iterator[None]:
    """Add to an ``ImportError`` raised inside the command that installs an extra, which brings the package.

    ``with needs("tifffile", "export"): import tifffile``
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{package} is not installed ({error}): {install_line(extra)}") from error


def install_line(extra: str | None = None) -> str:
    """Return the command that installs an extra; by default the GPU packages for the driver of this machine."""
    if extra is None:
        extra = "cuda12" if (driver_cuda_version() or (13, 0))[0] == 12 else "cuda13"
    return "pip install " + " ".join(f'"{need}"' for need in extra_requirements(extra))


def extra_requirements(extra: str) -> list[str]:
    """Return the requirements of an extra of this distribution, from its metadata.

    A command with these names works from a checkout and from a wheel; the name of the distribution would have to be in
    the user's package index, where ``linumpy`` is another package.
    """
    marker = re.compile(r"""\s*;\s*extra\s*==\s*['"]""" + extra + r"""['"]\s*$""")
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []  # imported from a source tree that is not installed
    return [marker.sub("", need) for need in requirements if marker.search(need)] or [f".[{extra}]"]


@functools.cache
def _providers() -> Mapping[str, list[str]]:
    """Map packages to the distributions that provide them; takes 0.3 s, since it reads all installed distributions."""
    return importlib.metadata.packages_distributions()


def other_distributions() -> list[str]:
    """Name the installed distributions other than this one that provide the package ``linumpy``."""
    distributions = set(_providers().get("linumpy", ()))
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        distributions.add(importlib.metadata.metadata("linumpy")["Name"])
    return sorted(name for name in distributions if re.sub(r"[-_.]+", "-", name).lower() != DISTRIBUTION)


def driver_cuda_version() -> tuple[int, int] | None:
    """Ask the NVIDIA driver for the newest CUDA version that it can run; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value == 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def version_of(*names: str) -> str:
    """Return the version of the first of these distributions that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"
