"""Run a kernel of this package on the CPU: compiled by the host's C++ compiler, a fiber a thread, 32 lanes a warp.

It shows that a kernel computes the right thing, whichever thread runs first, and that no barrier is missing or waits
for threads that never come; with ``checked``, that shared memory is free of races. It does not show that it is fast.
"""

import ctypes
import functools
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from linumpy.gpu.kernels import source_text
from tests.support.gpu.compiled import linked_object, shared_library


def _find_compiler():
    """Find a C++ compiler with half precision; None where there is none."""
    found = shutil.which("g++")
    if found is None:
        return None
    command = [found, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    knows = subprocess.run(command, input="_Float16 half;", capture_output=True, text=True)
    return found if knows.returncode == 0 else None


COMPILER = _find_compiler()
#: For tests that compile kernels for the CPU.
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler with half precision")
_HERE = Path(__file__).parent
_SIGNATURE = r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?{name}\s*\(([^)]*)\)'


#: Barriers of some warps of a block, for which CUDA has no function: PTX, and the emulator's call for it.
_ASM = (
    (r'"barrier\.cta\.sync (\d+), %0;"\s*::"n"\(([^"]*)\)', r"emulated::wait(\1, \2, false);"),
    (
        r'"[^:]*barrier\.cta\.red\.or\.pred all, (\d+), %2[^:]*"\s*: "=r"\((\w+)\)\s*: "r"\((.*)\), "n"\(([^"]*)\)',
        r"\2 = emulated::wait(\1, \4, \3);",
    ),
)


def _translated(text):
    """Replace what a C++ compiler does not read by functions of the emulator."""
    shared = r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];"
    text = re.sub(shared, r"\1 *\2 = reinterpret_cast<\1 *>(dynamic_shared);", text)
    for ptx, function in _ASM:
        text = re.sub(rf'asm volatile\(\s*{ptx}\s*: "memory"\);', function, text)
    return text


def _wrapper(text, name):
    """Write the function that unpacks the arguments and runs all blocks."""
    found = re.search(_SIGNATURE.format(name=name), text)
    assert found, f"no kernel {name}"
    types = [re.sub(r"\w+$", "", one.strip()).replace("__restrict__", "") for one in found[1].split(",")]
    values = (f"*reinterpret_cast<std::decay_t<{t}> *>(emulated::arguments[{i}])" for i, t in enumerate(types))
    return f"""
static void run_{name}() {{ {name}({", ".join(values)}); }}
extern "C" __attribute__((visibility("default"))) const char *
emulate_{name}(const unsigned *blocks, unsigned threads, unsigned shared, unsigned seed, void **values) {{
    return emulated::run_grid(run_{name}, blocks, threads, shared, seed, values);
}}
"""


class Kernel:
    """Takes what a ``cupy.RawKernel`` takes, with NumPy arrays in place of CuPy's."""

    max_dynamic_shared_size_bytes = 48 * 1024
    seed = 1  # of the order in which threads run

    def __init__(self, function):
        self._function = function
        function.restype = ctypes.c_char_p

    def __call__(self, grid, block, args, shared_mem=0):
        assert len(block) == 1
        grid = (*grid, 1, 1)[:3]
        assert 0 < grid[0] < 2**31
        assert 0 < grid[1] < 2**16
        assert 0 < grid[2] < 2**16
        assert 0 < block[0] <= 1024
        assert shared_mem <= self.max_dynamic_shared_size_bytes
        cells = []
        for arg in args:
            assert isinstance(arg, (np.ndarray, np.generic)), f"{arg!r} has no fixed type"
            by_value = arg.dtype.names is not None  # a structure
            pointer = isinstance(arg, np.ndarray) and not by_value
            cells.append(np.array([arg.ctypes.data], np.uint64) if pointer else np.array([arg]))
        pointers = (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells))
        blocks = (ctypes.c_uint * 3)(*map(int, grid))
        failed = self._function(blocks, int(block[0]), int(shared_mem), self.seed, pointers)
        assert not failed, f"{failed.decode()}, seed {self.seed}"


#: The compiler checks for undefined behaviour; each access of shared memory is checked by emulator.cpp.
_CHECKED = (
    *("-fsanitize=undefined", "-fno-sanitize-recover", "-DCHECK_SHARED"),
    *("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"),
)


@functools.cache
def emulated(spec):
    """Compile a kernel for the CPU; in place of :func:`linumpy.gpu.kernels.load`."""
    return Kernel(
        getattr(library(source_text(spec.source, spec.package), spec.defines, (spec.name,)), f"emulate_{spec.name}")
    )


@functools.cache
def library(text, defines, names, checked=False, optimise="-O2"):
    """Compile kernels of a source into a library, which stays in a folder for the next process.

    Those that are not checked are not optimised: most take longer to compile than to run.
    """
    program = _translated(text) + "".join(_wrapper(text, name) for name in names)
    options = (COMPILER, "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-strict-aliasing")
    options += ("-U_FORTIFY_SOURCE", "-w")
    runtime = linked_object(_HERE / "emulator.cpp", (*options, "-O2", *(["-DCHECK_SHARED"] if checked else [])))
    # -fsanitize=thread only where it is compiled: its own library must not be linked.
    link = [runtime, *(["-fsanitize=undefined", "-static-libubsan"] if checked else [])]
    defined = [f"-D{key}={value}" for key, value in defines]
    made = shared_library(
        program, _HERE / "emulator.h", (*options, *((optimise, *_CHECKED) if checked else ())), defined, link
    )
    return ctypes.CDLL(made)
