"""Run a kernel of this package on the CPU: compiled by the host's C++ compiler, one thread after another.

It shows that a kernel computes the right thing, not that it is fast, nor that it is free of races.
"""

import ctypes
import functools
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
from compiled import shared_library

from linumpy.gpu.kernels import source_text


def _find_compiler():
    """Find a compiler that knows half precision; None where there is none."""
    found = shutil.which("g++")
    if found is None:
        return None
    command = [found, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    knows = subprocess.run(command, input="_Float16 half;", capture_output=True, text=True)
    return found if knows.returncode == 0 else None


COMPILER = _find_compiler()
_HERE = Path(__file__).parent
_OPTIONS = ("-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing")
_SIGNATURE = r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?{name}\s*\(([^)]*)\)'


def _without_static_shared(text):
    """Make arrays in shared memory static ones: the threads of a block run one after another in one program."""
    text = re.sub(
        r"extern __shared__ (\w+) (\w+)\[\];", r"\1 *\2 = reinterpret_cast<\1 *>(shared_memory.data());", text
    )
    return re.sub(r"(?m)^(\s+)__shared__ ", r"\1static ", text)


def _wrapper(text, name):
    """Write the function that unpacks the arguments and runs all blocks."""
    found = re.search(_SIGNATURE.format(name=name), text)
    assert found, f"no kernel {name}"
    types = [re.sub(r"\w+$", "", one.strip()).replace("__restrict__", "") for one in found[1].split(",")]
    arguments = ", ".join(f"*reinterpret_cast<std::decay_t<{t}> *>(arguments[{i}])" for i, t in enumerate(types))
    call = f"{name}({arguments});"
    if re.search(r"__sync|__shfl", text[found.end() :].partition('extern "C"')[0]):
        block = f"emulated::body = [&] {{ {call} }}; if (!emulated::run_block(threads)) return 1;"
    else:
        block = f"for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {{ {call} }}"
    return f"""
extern "C" int emulate(const unsigned *blocks, unsigned threads, unsigned shared, void **arguments) {{
    shared_memory.assign(shared + 16, char(0xA5));
    gridDim.x = blocks[0]; gridDim.y = blocks[1]; gridDim.z = blocks[2]; blockDim.x = threads;
    for (blockIdx.z = 0; blockIdx.z < blocks[2]; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < blocks[1]; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < blocks[0]; ++blockIdx.x) {{ {block} }}
    return 0;
}}
"""


class Kernel:
    """Takes what a ``cupy.RawKernel`` takes, with NumPy arrays in place of CuPy's."""

    max_dynamic_shared_size_bytes = 48 * 1024

    def __init__(self, function):
        self._function = function

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
        failed = self._function((ctypes.c_uint * 3)(*map(int, grid)), int(block[0]), int(shared_mem), pointers)
        assert not failed, "threads wait for others that are gone"


@functools.cache
def emulated(spec):
    """Compile a kernel for the CPU; in place of :func:`linumpy.gpu.kernels.load`."""
    text = source_text(spec.source)
    program = _without_static_shared(text) + _wrapper(text, spec.name)
    defines = [f"-D{key}={value}" for key, value in spec.defines]
    library = shared_library(program, _HERE / "emulator.h", (COMPILER, *_OPTIONS), defines)
    return Kernel(ctypes.CDLL(library).emulate)
