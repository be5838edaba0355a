"""If this fails, macOS or Windows, which lack calls of Linux, cannot import linumpy, or read and write with it."""

import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import zarr

from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.writer import write_omezarr
from tests.support.budget import first

#: Run after other packages were imported, which know these systems, and before linumpy is imported.
_WITHOUT_CALLS = """
import asyncio, ctypes, importlib, multiprocessing, os, pkgutil, shutil, subprocess, sys, tempfile, zipfile
import numpy, scipy.ndimage, zarr, zarr.storage, PIL.Image, matplotlib, tqdm
for name in ("dask.array", "distributed", "fsspec", "obstore", "xarray", "tifffile", "nibabel", "skimage", "trimesh"):
    try: importlib.import_module(name)
    except ImportError: pass

MISSING = {
    "macOS": "sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate fdatasync O_DIRECT",
    "Windows": "sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate fdatasync O_DIRECT register_at_fork"
    " fork pread preadv pwrite pwritev readv writev sysconf sync getuid geteuid getgid killpg fchmod chown"
    " O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK",
}
system = sys.argv[1]
for name in MISSING[system].split():
    if hasattr(os, name): delattr(os, name)
sysconf, open_file = getattr(os, "sysconf", None), os.open
def open_no_folder(path, *args, **options):
    if os.path.isdir(path): raise PermissionError(13, "Permission denied", path)
    return open_file(path, *args, **options)
def sysconf_of_macos(name):
    if name == "SC_AVPHYS_PAGES": raise ValueError("unrecognized configuration name")
    return sysconf(name)
class Library(ctypes.CDLL):
    def __init__(self, name, *args, **options):
        if name is None and system == "Windows": raise TypeError("expected str")
        super().__init__(name, *args, **options)
    def __getattr__(self, name):
        if name in ("renameat2", "syncfs"): raise AttributeError(name)
        return super().__getattr__(name)
ctypes.CDLL = Library
if system == "Windows":
    sys.modules["fcntl"] = sys.modules["resource"] = None
    os.open, shutil._use_fd_functions = open_no_folder, False
else:
    os.sysconf = sysconf_of_macos
"""
_IMPORT_ALL = """
import linumpy
failed = {}
def note(name): failed[name] = repr(sys.exc_info()[1])
for module in pkgutil.walk_packages(linumpy.__path__, "linumpy.", onerror=note):
    if module.name.endswith(("__main__", "liblinumpy_core")): continue
    try: importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("linumpy") or error.name in ("fcntl", "resource"):
            note(module.name)
    except BaseException: note(module.name)
assert not failed, failed
"""
_USE = """
from pathlib import Path
from linumpy import open_image, read_zarr, resample_zarr
from linumpy.device import usable_cores
from linumpy.io.budget import PROCESS
from linumpy.resample.convert_zarr import convert_zarr
from linumpy.write.writer import write_omezarr
folder = Path(sys.argv[2])
voxels = numpy.load(folder / "voxels.npy")
assert usable_cores() == os.cpu_count()
assert PROCESS.total().threads >= 2
assert open_image(folder / "a.ome.zarr").spacing[0] == (2.0, 1.0, 1.0)
for name in ("a.ome.zarr", "a.ome.zip"):
    numpy.testing.assert_array_equal(read_zarr(open_image(folder / name).levels[0], device="cpu"), voxels)
for durable in (True, False):  # the second replaces the first
    write_omezarr(folder / "w.ome.zarr", voxels * 2, (2, 1, 1), levels=2, overwrite=not durable, durable=durable)
resample_zarr(folder / "a.ome.zarr", folder / "r.ome.zarr", 1.5, order=1, device="cpu")
resample_zarr(folder / "a.ome.zarr", folder / "s.ome.zarr", 1.5, order=3, device="cpu")
convert_zarr(folder / "a.ome.zarr", folder / "c.ome.zarr", codec="gzip", chunks=(5, 6, 7), device="cpu")
left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
assert not left, left
"""


@pytest.mark.parametrize("system", first(["Windows", "macOS"]))
def test_reads_and_writes_without_the_calls_of_linux(tmp_path, system):
    rng = np.random.default_rng(0)
    voxels = rng.integers(0, 2**15, (14, 22, 18)).astype(np.uint16)
    np.save(tmp_path / "voxels.npy", voxels)
    source = write_omezarr(tmp_path / "a.ome.zarr", voxels, (2, 1, 1), chunks=(8, 8, 8))
    with zipfile.ZipFile(tmp_path / "a.ome.zip", "w") as archive:
        for path in sorted(source.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(source))
    code = _WITHOUT_CALLS + _IMPORT_ALL + _USE
    result = subprocess.run(
        [sys.executable, "-c", code, system, str(tmp_path)], capture_output=True, text=True,
        env={**os.environ, "LINUMPY_CORE": "0"}, cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr

    def stored(name):
        return zarr.open_group(tmp_path / name, mode="r")["0"][:]

    np.testing.assert_array_equal(stored("w.ome.zarr"), voxels * 2)
    np.testing.assert_array_equal(stored("c.ome.zarr"), voxels)
    for name, order in (("r.ome.zarr", 1), ("s.ome.zarr", 3)):
        resample_zarr(source, tmp_path / f"expected-{name}", 1.5, order=order, device="cpu")
        np.testing.assert_array_equal(stored(name), stored(f"expected-{name}"))
