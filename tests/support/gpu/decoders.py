"""The decoders of the device on the CPU: their own launches and CUDA source, in the emulator with all its checks."""

import dataclasses
import functools

import numpy as np

from linumpy.gpu import kernels as gpu_kernels
from linumpy.gpu.codecs import decode
from linumpy.gpu.kernels import prepare, source_text
from linumpy.plan.codecs import CHECKSUM_NBYTES, DecodeChain
from linumpy.plan.decode import launches, workspace
from tests.support.gpu.emulator import Kernel, library

#: A device of few processors and much shared memory.
BIG = launches.DeviceLimits(processors=4, shared_nbytes=227 * 1024)
_BLOCKS = 3  # odd: warps take the tasks of zstd_entropy in turn

#: Source, name and team of every kernel that decodes.
KERNELS = (
    ("blosc", "blosc_frames", 0),
    ("blosc", "stored", 0),
    ("blosc", "unshuffle", 0),
    ("checksum", "check_crc32c", 0),
    ("checksum", "check_streams", 0),
    ("inflate", "inflate", launches._SERIAL_TEAM),
    ("lz4", "lz4", launches._SERIAL_TEAM),
    ("lz4", "lz4_heads", 0),
    ("zstd", "zstd_entropy", 0),
    ("zstd_execute", "zstd_execute", launches._ZSTD_TEAM),
    ("zstd", "zstd_frames", 0),
    ("zstd_cells", "zstd_offsets", launches._ZSTD_TEAM),
    ("zstd_cells", "zstd_cells", launches._ZSTD_TEAM),
    ("zstd_cells", "zstd_values", launches._ZSTD_TEAM),
)


def kernel_specs(chain):
    """Name the kernels that decode a chain."""
    sizes = {"stored_nbytes": 1, "decoded_nbytes": 1, "words_nbytes": 0, "pool_nbytes": 0}
    space = workspace.plan_workspace(chain, chunks=1, **sizes)
    planned = launches.plan_launches(chain, space, 0, 0, 1, 1, launches.DeviceLimits(1, 2**16))
    return [decode.kernel_spec(launch) for launch in planned]


@functools.cache
def kernel(spec, architecture=900, text=None):
    """Compile a decoder for the CPU, together with the others of its source; or of another text in its place."""
    names, teams = zip(*(rest for source, *rest in KERNELS if source == spec.source), strict=True)
    defines = (("TEAM_WARPS", str(max(*teams, 1))), ("__CUDA_ARCH__", str(architecture)))
    assert not spec.defines or spec.defines == defines[:1]
    compiled = library(text or source_text(spec.source, spec.package), defines, names, checked=True)
    return Kernel(getattr(compiled, f"emulate_{spec.name}"))


def start(planned, load=kernel):
    """Run launches by so few blocks that each has many streams."""
    run(
        [dataclasses.replace(launch, grid=(min(launch.grid[0], _BLOCKS), *launch.grid[1:])) for launch in planned], load
    )


def run(planned, load):
    """Run launches in their order."""
    for launch in planned:
        function = load(decode.kernel_spec(launch))
        decode.allow(function, launch.shared)
        arguments = tuple(np.uint64(value) for value in launch.args)
        function(launch.grid, (launch.block,), arguments, shared_mem=launch.shared)


def decode_words(chain, source, nbytes, offset, chunk_nbytes):
    """Write the counters and records of chunks, as the core does.

    `source` and `nbytes` say where the stored bytes of each chunk are, `offset` where its decoded bytes go.
    """
    n = len(source)
    counters = np.zeros(workspace.COUNTERS, np.int64)
    counters[0] = 0 if chain.compressor == "blosc" else n  # Blosc's streams are counted on the device
    records = np.zeros(n, workspace.STREAM)
    records["source"], records["target"] = source, offset
    records["source_nbytes"] = nbytes - (CHECKSUM_NBYTES if chain.stored_checksum else 0)
    records["target_nbytes"] = chunk_nbytes + chain.tail_nbytes
    records["chunk"], records["codec"] = np.arange(n), workspace.CODES[chain.compressor]
    orders = np.zeros(n, workspace.ORDER)
    if chain.shuffle:
        orders["source"] = orders["target"] = offset
        orders["nbytes"] = orders["block_nbytes"] = chunk_nbytes
        orders["typesize"], orders["mode"], orders["chunk"] = chain.shuffle, 1, np.arange(n)
    parts = [counters, records, np.asarray(offset, np.int64), orders]
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in parts])


class Decoder:
    """Decodes chunks as a slot does. Memory is poisoned, and what lies around each chunk must stay as it was."""

    pool = 3  # bytes of literals and sequences, a decoded byte: more than any frame needs

    def __init__(self, chain: DecodeChain, chunk_nbytes: int, *, limits=BIG, load=kernel, group_nbytes=0):
        self.chain, self.chunk_nbytes, self.limits, self._load = chain, chunk_nbytes, limits, load
        self.group_nbytes = group_nbytes  # as of a slot

    def run(self, memory, plan):
        """Run the launches that `plan` lists for an address on `memory`, aligned to 256 bytes; returns the memory."""
        aligned = np.empty(len(memory) + 256, np.uint8)
        aligned = aligned[-aligned.ctypes.data % 256 :][: len(memory)]
        aligned[:] = memory
        start(plan(aligned.ctypes.data), self._load)
        return aligned

    def decode(self, stored: list[bytes], *, skew: int = 0):
        """Decode chunks; returns the bytes of each and its status."""
        n, room = len(stored), workspace.padded_nbytes(self.chain, self.chunk_nbytes) + 256
        nbytes = np.array([len(one) for one in stored], np.int64)
        source = np.concatenate([[0], np.cumsum(nbytes + skew)[:-1]]).astype(np.int64) + skew
        total = int(source[-1] + nbytes[-1])
        space = workspace.plan_workspace(
            self.chain,
            chunks=n,
            stored_nbytes=total,
            decoded_nbytes=n * room,
            words_nbytes=0,
            pool_nbytes=self.pool * n * room + 2**16,
            group_nbytes=self.group_nbytes,
        )
        behind = -(-space.nbytes // 256) * 256
        memory = np.full(behind + 4 * n + 256, 0xA5, np.uint8)
        for at, one in zip(source.tolist(), stored, strict=True):
            memory[space.stored + at : space.stored + at + len(one)] = np.frombuffer(one, np.uint8)
        offset = np.arange(n, dtype=np.int64) * room
        words = decode_words(self.chain, source, nbytes, offset, self.chunk_nbytes)
        memory[space.words : space.words + len(words)] = words
        memory[behind : behind + 4 * n] = 0
        plan = functools.partial(launches.plan_launches, self.chain, space)
        memory = self.run(memory, lambda base: plan(base, base + behind, n, self.chunk_nbytes, self.limits))
        assert (memory[behind + 4 * n :] == 0xA5).all(), "a kernel wrote behind its slot"
        decoded = memory[space.decoded : space.decoded + n * room].reshape(n, room)
        if not self.chain.is_reordered:
            assert (decoded[:, self.chunk_nbytes + self.chain.tail_nbytes :] == 0xA5).all(), (
                "a kernel wrote beside its chunk"
            )
        status = memory[behind : behind + 4 * n].view(np.int32).copy()
        return [row[: self.chunk_nbytes].tobytes() for row in decoded], status


class DeviceDecoder(Decoder):
    """The same on the current CUDA device."""

    def __init__(self, chain: DecodeChain, chunk_nbytes: int, limits=None, group_nbytes=0):
        import cupy

        limits = limits or decode.limits_of(cupy.cuda.Device())
        super().__init__(chain, chunk_nbytes, limits=limits, group_nbytes=group_nbytes)

    def run(self, memory, plan):
        import cupy

        device = cupy.asarray(memory)
        planned = plan(device.data.ptr)
        prepare([decode.kernel_spec(launch) for launch in planned])
        run(planned, gpu_kernels.load)
        return device.get()
