"""Where the server scripts are, and the tools that their tests need."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SETUP_DIR = HERE.parents[1] / "shell_scripts" / "server_setup"
PACKAGES = {
    "bats": "bats",
    "as": "binutils",
    "ld": "binutils",
    "nm": "binutils",
    "readelf": "binutils",
    "gcc": "gcc",
    "gzip": "gzip",
    "xz": "xz-utils",
    "zstd": "zstd",
    "lz4": "lz4",
    "bzip2": "bzip2",
}


def quiet(*command, timeout=300):
    try:
        return subprocess.run(command, capture_output=True, timeout=timeout, stdin=subprocess.DEVNULL).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def install(packages):
    """Asks the package manager, as root or, in CI, through a sudo that asks nothing."""
    if not shutil.which("apt-get"):
        return
    prefix = []
    if os.geteuid() != 0:
        if not in_ci():
            return
        prefix = ["sudo", "-n"]
    quiet(*prefix, "apt-get", "update")
    quiet(
        *prefix,
        "env",
        "DEBIAN_FRONTEND=noninteractive",
        "apt-get",
        "install",
        "-y",
        "--no-install-recommends",
        *packages,
    )


def missing():
    return [tool for tool in PACKAGES if not shutil.which(tool)]


def in_ci():
    return os.environ.get("CI", "").lower() in ("1", "true")


def ensure_tools(npm_folder):
    """Installs what is missing; fails in CI, and skips elsewhere, where that cannot be done."""
    if missing():
        install(sorted({PACKAGES[tool] for tool in missing()}))
    if not shutil.which("bats") and shutil.which("npm"):
        quiet("npm", "install", "--no-audit", "--no-fund", "--prefix", str(npm_folder), "bats")
        os.environ["PATH"] = f"{npm_folder}/node_modules/.bin:{os.environ['PATH']}"
    if missing():
        reason = f"these tools are missing and cannot be installed here: {', '.join(missing())}"
        if in_ci():
            pytest.fail(reason)
        pytest.skip(reason)
