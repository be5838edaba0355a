"""Plan the decoding of a slab on the device: which kernels run, on what.

In: a :class:`~linumpy.plan.codecs.DecodeChain` and the :class:`~linumpy.plan.decode.workspace.Workspace` of a slot.
Out: the list of :class:`Launch`. Pure: addresses are numbers, no kernel runs here.
"""

from __future__ import annotations

from dataclasses import dataclass

from linumpy.plan.codecs import DecodeChain
from linumpy.plan.decode.workspace import CODES, COUNTERS, MAX_ZSTD_BLOCK, STREAM, Workspace

_SMALLEST_RING = 2**13
#: Of Blosc's lz4, whose blocks are many and short: more of them at a time gain more than a longer ring.
_LZ4_RING = 2**14
#: Shared memory that a kernel with a ring declares besides: at most this much, with what a device keeps for itself.
_DECLARED = 18 * 2**10
#: Warps that copy bytes: of zstd, and where another warp reads sequences at the same time and sets the pace.
_TEAM, _READ_TEAM = 16, 2
#: Bytes that a block of zstd_values takes at a time, as in zstd_cells.cu.
_PART = 2**13


@dataclass(frozen=True)
class DeviceLimits:
    """What a device has.

    Attributes
    ----------
    processors : int
        Multiprocessors.
    shared_nbytes : int
        Shared memory that a block may ask for: 64 KiB on Turing, 99 KiB on consumer cards, 227 KiB on Hopper.
    """

    processors: int
    shared_nbytes: int


@dataclass(frozen=True)
class Launch:
    """One kernel to run.

    Attributes
    ----------
    source, kernel : str
        File and name.
    grid : tuple of int
        Blocks.
    block : int
        Threads.
    shared : int
        Bytes of shared memory beyond what the kernel declares.
    team : int
        Warps that copy, which the kernel is compiled for; 0 where none do.
    args : tuple of int
        Addresses and counts, 64 bits each.
    """

    source: str
    kernel: str
    grid: tuple[int, ...]
    block: int
    args: tuple[int, ...]
    shared: int = 0
    team: int = 0


#: Every kernel that decodes, with its team, for tests that compile them all.
KERNELS = (
    ("blosc", "blosc_frames", 0),
    ("blosc", "stored", 0),
    ("blosc", "unshuffle", 0),
    ("checksum", "check_crc32c", 0),
    ("checksum", "check_streams", 0),
    ("inflate", "inflate", _READ_TEAM),
    ("lz4", "lz4", _READ_TEAM),
    ("lz4", "lz4_heads", 0),
    ("zstd", "zstd_entropy", 0),
    ("zstd_execute", "zstd_execute", _TEAM),
    ("zstd", "zstd_frames", 0),
    ("zstd_cells", "zstd_places", _TEAM),
    ("zstd_cells", "zstd_cells", _TEAM),
    ("zstd_cells", "zstd_values", _TEAM),
)


def plan_launches(
    chain: DecodeChain,
    space: Workspace,
    base: int,
    status: int,
    chunks: int,
    chunk_nbytes: int,
    device: DeviceLimits,
) -> list[Launch]:
    """List the kernels that decode a slab, in their order.

    Parameters
    ----------
    chain : DecodeChain
        What is decoded.
    space : Workspace
        Memory of the slot.
    base : int
        Its address.
    status : int
        Address of the int32 status of each chunk of this slab, which the kernels leave alone where all is well.
    chunks : int
        Chunks of this slab.
    chunk_nbytes : int
        Decoded bytes of a chunk.
    device : DeviceLimits
        The device that they run on.
    """
    stored = base + space.stored
    counters = base + space.words
    records = counters + 8 * COUNTERS
    offsets = records + STREAM.itemsize * chunks
    host_orders = offsets + 8 * chunks
    streams, unordered = base + space.streams, base + space.unordered
    capacity = space.stream_capacity if chain.compressor == "blosc" else chunks
    most = min(capacity, 64 * device.processors)
    launches: list[Launch] = []
    args: tuple[int, ...]
    if chain.stored_checksum:
        launches.append(Launch("checksum", "check_crc32c", (chunks,), 128, (stored, records, chunks, 1, status)))
    orders = base + space.orders
    if chain.compressor == "blosc":
        args = (stored, records, chunks, offsets, CODES[chain.inner], streams, capacity, counters, orders, status)
        launches.append(Launch("blosc", "blosc_frames", (chunks,), 32, args))
    if chain.compressor in ("", "blosc"):
        args = (stored, unordered, streams, counters, capacity, status)
        launches.append(Launch("blosc", "stored", (most,), 256, args))
    launches += _stream_launches(chain, space, base, status, chunks, chunk_nbytes, device)
    blosc = chain.compressor == "blosc"
    checked = base + space.decoded if blosc else unordered  # Blosc's own order is undone first, a filter's last
    check = [Launch("checksum", "check_crc32c", (chunks,), 128, (checked, records, chunks, 0, status))]
    tiles = max(1, min(256, chunk_nbytes // 4096))
    args = (unordered, base + space.decoded, orders if blosc else host_orders, status)
    order = [Launch("blosc", "unshuffle", (tiles, chunks), 256, args)] if chain.is_reordered else []
    check = check if chain.decoded_checksum else []
    return launches + (order + check if blosc else check + order)


def ring_nbytes(chain: DecodeChain, chunks: int, chunk_nbytes: int, device: DeviceLimits) -> int:
    """Choose how many decoded bytes a stream keeps in shared memory: the most that fits for all streams at a time.

    Chosen for multiprocessors of about 224 KiB, and halved until a block of the device can have it; three slabs are
    decoded at the same time. A ring longer than a chunk is of no use.
    """
    streams = 3 * chunks * (max(1, chunk_nbytes // 2**17) if chain.compressor == "blosc" else 1)
    each = -(-streams // device.processors)
    ring = 2**17 if each <= 1 else 2**16 if each <= 3 else 2**15
    if chain.streams_by == "lz4" and chain.compressor == "blosc":
        ring = min(ring, _LZ4_RING)
    while ring > _SMALLEST_RING and (ring >= 2 * chunk_nbytes or ring > device.shared_nbytes - _DECLARED):
        ring //= 2
    return ring


def _stream_launches(
    chain: DecodeChain,
    space: Workspace,
    base: int,
    status: int,
    chunks: int,
    chunk_nbytes: int,
    device: DeviceLimits,
) -> list[Launch]:
    """List the kernels that decode streams."""
    capacity = space.stream_capacity if chain.compressor == "blosc" else chunks
    most = min(capacity, 64 * device.processors)
    stored, counters = base + space.stored, base + space.words
    streams, unordered, checks = base + space.streams, base + space.unordered, base + space.checks
    common = (stored, unordered, streams, counters, capacity)
    ring = ring_nbytes(chain, chunks, chunk_nbytes, device)
    verify = Launch("checksum", "check_streams", (most,), 128, (unordered, streams, counters, capacity, checks, status))
    if chain.streams_by == "lz4":
        heads = Launch("lz4", "lz4_heads", (-(-chunks // 128),), 128, (stored, streams, chunks, status))
        lz4 = Launch("lz4", "lz4", (most,), 32 * (1 + _READ_TEAM), (*common, ring, status), ring, _READ_TEAM)
        return [lz4] if chain.compressor == "blosc" else [heads, lz4]
    if chain.streams_by == "inflate":
        args = (*common, ring, checks, status)
        return [Launch("inflate", "inflate", (most,), 32 * (1 + _READ_TEAM), args, ring, _READ_TEAM), verify]
    if chain.streams_by == "zstd":
        frames, blocks, groups = base + space.frames, base + space.blocks, base + space.groups
        pool = (base + space.pool, space.pool_nbytes)
        descriptions = (stored, streams, capacity, frames, blocks, space.block_capacity)
        split = (*descriptions, counters, space.pool_nbytes, checks, groups, space.group_count, status)
        entropy = (stored, blocks, space.block_capacity, counters, *pool, status)
        execute = (stored, unordered, streams, capacity, frames, blocks, counters, *pool, ring, status)
        frame_by_frame = [Launch("zstd_execute", "zstd_execute", (most,), 32 * _TEAM, execute, ring, _TEAM)]
        return [
            Launch("zstd", "zstd_frames", (most,), 32, split),
            Launch("zstd", "zstd_entropy", (min(space.block_capacity, 2 * most + 4096),), 96, entropy),
            *(_group_launches(space, base, status, chunks, device) if space.group_nbytes else frame_by_frame),
            verify,
        ]
    return []


def _group_launches(space: Workspace, base: int, status: int, chunks: int, device: DeviceLimits) -> list[Launch]:
    """List the kernels that carry out the blocks of zstd, group after group."""
    counters, streams, blocks = base + space.words, base + space.streams, base + space.blocks
    listed = (base + space.order, base + space.groups)
    target, cells, pool = base + space.unordered, base + space.cells, (base + space.pool, space.pool_nbytes)
    places = (streams, chunks, base + space.frames, blocks, counters, *listed, space.group_nbytes, status)
    launches = [Launch("zstd_cells", "zstd_places", (chunks,), 32, places, team=_TEAM)]
    blocks_at_once = min(2 * device.processors, 2 * -(-space.group_nbytes // MAX_ZSTD_BLOCK))
    parts_at_once = min(8 * device.processors, 2 * -(-space.group_nbytes // _PART))
    for number in range(space.group_count):
        group = (*listed, number, space.group_nbytes, cells, status)
        write = (base + space.stored, target, streams, blocks, *pool, *group)
        launches.append(Launch("zstd_cells", "zstd_cells", (blocks_at_once,), 32 * _TEAM, write, team=_TEAM))
        values = (target, streams, blocks, *group)
        launches.append(Launch("zstd_cells", "zstd_values", (parts_at_once,), 256, values, team=_TEAM))
    return launches
