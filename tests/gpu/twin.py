"""The decoders of the device on the CPU: their own CUDA source, compiled by a C++ compiler for a GPU of one lane."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from linumpy.gpu.kernels import source_text
from linumpy.plan import decode
from linumpy.plan.codecs import DecodeChain

COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: the decoders run on a GPU only")


@functools.cache
def library(source):
    """Compile one CUDA source; with bounds and undefined behaviour checked by the compiler's own means."""
    folder = Path(tempfile.mkdtemp(prefix="linumpy-twin-"))
    (folder / f"{source}.cpp").write_text(f'#include "{Path(__file__).with_name("twin.h")}"\n{source_text(source)}')
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-fsanitize=undefined", "-fno-sanitize-recover"]
    command += ["-fno-sanitize=alignment", "-static-libubsan"] if "g++" in COMPILER else []
    subprocess.run([*command, f"{source}.cpp", "-o", f"{source}.so"], cwd=folder, check=True, capture_output=True)
    loaded = ctypes.CDLL(str(folder / f"{source}.so"))
    shutil.rmtree(folder)
    return loaded


def launch(one):
    """Run a kernel as one block of one thread, once for each place in the grid's second axis."""
    loaded = library(one.source)
    function = getattr(loaded, one.kernel)
    arguments = [ctypes.c_longlong(value) for value in one.args]
    for y in range(one.grid[1] if len(one.grid) > 1 else 1):
        ctypes.c_uint.in_dll(loaded, "block_y").value = y
        function(*arguments)


class Decoder:
    """Decodes chunks as a slot does. Memory is poisoned, and what lies around each chunk must stay as it was."""

    def __init__(self, chain: DecodeChain, chunk_nbytes: int):
        self.chain, self.chunk_nbytes = chain, chunk_nbytes

    def run(self, memory, plan):
        """Run the launches that `plan` lists for an address on `memory`, aligned to 256 bytes; returns the memory."""
        aligned = np.empty(len(memory) + 256, np.uint8)
        aligned = aligned[-aligned.ctypes.data % 256 :][: len(memory)]
        aligned[:] = memory
        for one in plan(aligned.ctypes.data):
            launch(one)
        return aligned

    def decode(self, stored: list[bytes], *, skew: int = 0):
        """Decode chunks; returns the bytes of each and its status."""
        n, room = len(stored), decode.decoded_room(self.chain, self.chunk_nbytes) + 256
        nbytes = np.array([len(one) for one in stored], np.int64)
        source = np.concatenate([[0], np.cumsum(nbytes + skew)[:-1]]).astype(np.int64) + skew
        total = int(source[-1] + nbytes[-1])
        space = decode.plan_workspace(
            self.chain, chunks=n, stored_nbytes=total, decoded_nbytes=n * room, words_nbytes=0
        )
        memory = np.full(space.nbytes + 256, 0xA5, np.uint8)
        for at, one in zip(source.tolist(), stored, strict=True):
            memory[space.stored + at : space.stored + at + len(one)] = np.frombuffer(one, np.uint8)
        place = np.arange(n, dtype=np.int64) * room
        words = decode.decode_words(self.chain, source, nbytes, place, self.chunk_nbytes)
        memory[space.words : space.words + len(words)] = words
        memory[space.status : space.status + 4 * n] = 0
        memory = self.run(
            memory, lambda base: decode.plan_launches(self.chain, space, base, n, self.chunk_nbytes, self.processors)
        )
        assert (memory[space.nbytes :] == 0xA5).all(), "a kernel wrote behind its slot"
        decoded = memory[space.decoded : space.decoded + n * room].reshape(n, room)
        if not self.chain.is_reordered:
            assert (decoded[:, self.chunk_nbytes + self.chain.tail :] == 0xA5).all(), "a kernel wrote beside its chunk"
        status = memory[space.status : space.status + 4 * n].view(np.int32).copy()
        return [row[: self.chunk_nbytes].tobytes() for row in decoded], status

    processors = 4


class DeviceDecoder(Decoder):
    """The same on the current CUDA device."""

    processors = 132

    def run(self, memory, plan):
        import cupy

        from linumpy.gpu.decode import start

        device = cupy.asarray(memory)
        start(plan(device.data.ptr))
        return device.get()
