"""If this fails, a part of the native core is wrong by itself, or a sanitizer finds a bad access or a race in it.

Or the core needs more than a C++20 compiler and libc. Compiling takes most of the time: the short run has
AddressSanitizer alone, the slow one ThreadSanitizer, too.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from linumpy.core import native
from tests.support.gpu.compiled import kept

ROOT = Path(__file__).parents[2]
TARGET = "linumpy_core_tests"
#: Out of memory is an error here, and the allocator's limit is part of the test; a fork must not end the run.
ENVIRONMENT = {"ASAN_OPTIONS": "allocator_may_return_null=1", "TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0"}


def sources():
    """Return the texts of all that the program is made of."""
    files = [ROOT / "CMakeLists.txt", *(ROOT / "linumpy/core/src").iterdir()]
    files += [path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".hpp")]
    return [path.name + path.read_text() for path in sorted(files)]


def compiler():
    """Return what the compiler says of itself, or skip where there is none for C++20."""
    command = os.environ.get("CXX", "c++")
    for tool in (command, "cmake"):
        if shutil.which(tool) is None:
            pytest.skip(f"the core's tests are compiled, and {tool} is not installed")
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    taken = subprocess.run([command, "-std=c++20", "-fsyntax-only", "-xc++", "/dev/null"], capture_output=True)
    if taken.returncode:
        pytest.skip(f"{command} knows no C++20")
    return version


def program(sanitizers):
    """Build the tests; those of the same sources are built once."""

    def make(path):
        with tempfile.TemporaryDirectory() as folder:
            generator = ["-G", "Ninja"] if shutil.which("ninja") else []
            options = ["-DLINUMPY_CORE_TESTS=ON", f"-DLINUMPY_CORE_SANITIZE={sanitizers}"]
            for command in (
                ["cmake", "-S", str(ROOT), "-B", folder, *generator, *options],
                ["cmake", "--build", folder, "--target", TARGET, "--parallel", "2"],
            ):
                done = subprocess.run(command, capture_output=True, text=True)
                assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
            shutil.copy(Path(folder) / TARGET, path)

    return kept([compiler(), sanitizers, *sources()], ".core-tests", make)


#: Undefined behaviour that AddressSanitizer does not see; checks of each pointer take a third of the compiler's time.
BEHAVIOUR = "shift;integer-divide-by-zero;signed-integer-overflow;bounds;bool;enum;return;unreachable"


@pytest.mark.parametrize(
    "sanitizers",
    [
        pytest.param("", marks=pytest.mark.slow),
        f"address;{BEHAVIOUR}",
        pytest.param("address;undefined", marks=pytest.mark.slow),
        pytest.param("thread", marks=pytest.mark.slow),
    ],
    ids=["plain", "address", "undefined", "thread"],
)
def test_core(sanitizers):
    done = subprocess.run(
        [program(sanitizers)], capture_output=True, text=True, timeout=300, env={**os.environ, **ENVIRONMENT}
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


#: Headers of libc, and one of the compiler; those of the C++ library have no suffix.
HEADERS = {
    "dirent.h", "dlfcn.h", "fcntl.h", "link.h", "nmmintrin.h", "pthread.h", "sched.h", "signal.h", "stdint.h",
    "sys/resource.h", "sys/stat.h", "sys/uio.h", "unistd.h",
}  # fmt: skip


def test_headers():
    files = (ROOT / "linumpy/core/src").iterdir()
    found = {name for file in files for name in re.findall(r"#\s*include\s*<(.+?)>", file.read_text())}
    assert {name for name in found if not re.fullmatch("[a-z_]+", name)} <= HEADERS


def of_binary(*command):
    """Return what a tool of the compiler says of the installed core."""
    if native.why_no_core() is not None or shutil.which(command[0]) is None:
        pytest.skip(native.why_no_core() or f"{command[0]} is not installed")
    path = importlib.util.find_spec("linumpy.core.liblinumpy_core").origin
    return subprocess.run([*command, path], capture_output=True, text=True, check=True, env={"LC_ALL": "C"}).stdout


def test_needs_libc_alone():
    needed = re.findall(r"NEEDED.*\[(.+)\]", of_binary("readelf", "-d"))
    assert "libc.so.6" in needed
    assert all(re.fullmatch(r"(libc|libm|libpthread|libdl|ld-linux[-a-z0-9_]*)\.so\.\d", name) for name in needed)


def test_exports_its_interface_alone():
    exported = {line.split()[-1] for line in of_binary("nm", "-D", "--defined-only").splitlines()}
    declared = re.findall(r"LC_API [^;(]*?(lc_\w+)\(", (ROOT / "linumpy/core/src/core.h").read_text())
    assert exported == set(declared)
