"""If this fails, the benchmark's help and modules need a GPU package or a peer that is not installed."""

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import linumpy.benchmark

FOLDER = Path(linumpy.benchmark.__file__).parent
SCRIPT = FOLDER.parents[1] / "scripts/linum_benchmark_kvikio_zarr.py"
BLOCKED = ("cupy", "cupyx", "kvikio", "nvidia", "warp", "tensorstore", "zarrs")
MODULES = [f"linumpy.benchmark.{found.name}" for found in pkgutil.iter_modules([str(FOLDER)])]
MODULES += [f"linumpy.benchmark.suites.{found.name}" for found in pkgutil.iter_modules([str(FOLDER / "suites")])]
KERNELS = FOLDER / "suites/kernels"
MODULES += [f"linumpy.benchmark.suites.kernels.{found.name}" for found in pkgutil.iter_modules([str(KERNELS)])]


@pytest.mark.parametrize("file", [*FOLDER.rglob("*.py"), SCRIPT], ids=lambda file: file.stem)
def test_no_top_level_import_of_a_gpu_package_or_a_peer(file):
    for node in ast.parse(file.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in names if name.partition(".")[0] in BLOCKED]


def test_all_modules_and_the_help_work_without_them():
    code = (
        "import sys, importlib, runpy\n"
        f"sys.modules.update(dict.fromkeys({BLOCKED!r}))\n"
        f"[importlib.import_module(name) for name in {MODULES!r}]\n"
        "sys.argv = ['benchmark', '--help']\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "--suite" in done.stdout
