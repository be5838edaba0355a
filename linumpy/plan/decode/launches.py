"""Plan the kernels that decode a slab on the device. Pure: the core gets the list of :class:`DecodeLaunch`."""

from __future__ import annotations

from dataclasses import dataclass

from linumpy.plan.codecs import DecodeChain
from linumpy.plan.decode.workspace import CODES, COUNTERS, MAX_ZSTD_BLOCK, STREAM, Workspace

#: A ring holds the latest decoded bytes of a stream in shared memory. Minimum length, and maximum length for LZ4 in
#: Blosc, whose streams are many and short: decoding more of them at a time is faster than a longer ring.
_MIN_RING_NBYTES, _MAX_BLOSC_LZ4_RING_NBYTES = 2**13, 2**14
#: Upper bound of the shared memory of a block besides the ring: static, and reserved by the device.
_STATIC_NBYTES = 18 * 2**10
#: Warps of a block that copy decoded bytes: for zstd, and for LZ4 and inflate, whose speed is limited by one more warp,
#: which reads the sequences.
_ZSTD_TEAM, _SERIAL_TEAM = 16, 2
#: Bytes that a block of zstd_values processes at a time, as in zstd_cells.cu.
_VALUES_NBYTES = 2**13


@dataclass(frozen=True)
class DeviceLimits:
    """Properties of a device that launches depend on.

    - `shared_nbytes`: shared memory that a block may request: 64 KiB on Turing, 227 KiB on Hopper.
    """

    processors: int
    shared_nbytes: int


@dataclass(frozen=True)
class DecodeLaunch:
    """One launch of a decoding kernel, whose arguments are addresses and counts of 64 bits.

    - `shared`: dynamic shared memory in bytes.
    - `team`: number of copying warps that the kernel is compiled for; 0 for kernels without a team.
    """

    source: str
    kernel: str
    grid: tuple[int, ...]
    block: int
    args: tuple[int, ...]
    shared: int = 0
    team: int = 0


@dataclass(frozen=True)
class _Slab:
    """The arguments of :func:`plan_launches`."""

    chain: DecodeChain
    space: Workspace
    base: int
    status: int
    chunks: int
    chunk_nbytes: int
    device: DeviceLimits

    @property
    def stream_capacity(self) -> int:
        """Maximum number of streams. Only the headers of Blosc frames tell their number, so the device counts these."""
        return self.space.stream_capacity if self.chain.compressor == "blosc" else self.chunks

    @property
    def stream_blocks(self) -> int:
        """Grid size of kernels whose blocks loop over streams."""
        return min(self.stream_capacity, 64 * self.device.processors)

    def address(self, offset: int) -> int:
        """Return the address of an offset in the slot."""
        return self.base + offset


def plan_launches(
    chain: DecodeChain,
    space: Workspace,
    base: int,
    status: int,
    chunks: int,
    chunk_nbytes: int,
    device: DeviceLimits,
) -> list[DecodeLaunch]:
    """Plan the launches that decode a slab, in the order in which they run.

    - `status`: address of the int32 status of each chunk of this slab, which kernels write only for chunks that fail.
    """
    slab = _Slab(chain, space, base, status, chunks, chunk_nbytes, device)
    blosc = chain.compressor == "blosc"
    stored, streams, unordered = map(slab.address, (space.stored, space.streams, space.unordered))
    decoded, counters, orders = map(slab.address, (space.decoded, space.words, space.shuffle_orders))
    records = counters + 8 * COUNTERS
    offsets = records + STREAM.itemsize * chunks
    order_records = offsets + 8 * chunks
    launches: list[DecodeLaunch] = []
    args: tuple[int, ...]
    if chain.stored_checksum:
        launches.append(DecodeLaunch("checksum", "check_crc32c", (chunks,), 128, (stored, records, chunks, 1, status)))
    if blosc:
        codec, capacity = CODES[chain.inner], slab.stream_capacity
        args = (stored, records, chunks, offsets, codec, streams, capacity, counters, orders, status)
        launches.append(DecodeLaunch("blosc", "blosc_frames", (chunks,), 32, args))
    if chain.compressor in ("", "blosc"):
        args = (stored, unordered, streams, counters, slab.stream_capacity, status)
        launches.append(DecodeLaunch("blosc", "stored", (slab.stream_blocks,), 256, args))
    launches += _stream_launches(slab)
    # The checksum covers a chunk with Blosc's own shuffle undone, but with a filter's shuffle still applied.
    args = (decoded if blosc else unordered, records, chunks, 0, status)
    check = [DecodeLaunch("checksum", "check_crc32c", (chunks,), 128, args)] if chain.decoded_checksum else []
    tiles = max(1, min(256, chunk_nbytes // 4096))
    args = (unordered, decoded, orders if blosc else order_records, status)
    unshuffle = [DecodeLaunch("blosc", "unshuffle", (tiles, chunks), 256, args)] if chain.is_reordered else []
    return launches + (unshuffle + check if blosc else check + unshuffle)


def ring_nbytes(chain: DecodeChain, chunks: int, chunk_nbytes: int, device: DeviceLimits) -> int:
    """Choose the length of a ring, in bytes, so that the streams of three slabs are decoded at the same time.

    128 KiB for at most one stream per multiprocessor, 64 KiB for up to three, else 32 KiB, for multiprocessors with
    about 224 KiB of shared memory. The length is halved, down to 8 KiB, until the ring fits a block of the device and
    is shorter than two chunks: a longer ring gains nothing.
    """
    streams = 3 * chunks * (max(1, chunk_nbytes // 2**17) if chain.compressor == "blosc" else 1)
    streams_each = -(-streams // device.processors)
    ring = 2**17 if streams_each <= 1 else 2**16 if streams_each <= 3 else 2**15
    if chain.streams_by == "lz4" and chain.compressor == "blosc":
        ring = min(ring, _MAX_BLOSC_LZ4_RING_NBYTES)
    while ring > _MIN_RING_NBYTES and (ring >= 2 * chunk_nbytes or ring > device.shared_nbytes - _STATIC_NBYTES):
        ring //= 2
    return ring


def _stream_launches(slab: _Slab) -> list[DecodeLaunch]:
    """Plan the launches that decode streams."""
    chain, space, status, capacity = slab.chain, slab.space, slab.status, slab.stream_capacity
    stored, counters, streams = map(slab.address, (space.stored, space.words, space.streams))
    unordered, checks = map(slab.address, (space.unordered, space.checks))
    common = (stored, unordered, streams, counters, capacity)
    ring = ring_nbytes(chain, slab.chunks, slab.chunk_nbytes, slab.device)
    grid, read_block = (slab.stream_blocks,), 32 * (1 + _SERIAL_TEAM)
    args: tuple[int, ...] = (unordered, streams, counters, capacity, checks, status)
    verify = DecodeLaunch("checksum", "check_streams", grid, 128, args)
    if chain.streams_by == "lz4":
        args = (stored, streams, slab.chunks, status)
        headers = DecodeLaunch("lz4", "lz4_heads", (-(-slab.chunks // 128),), 128, args)
        lz4 = DecodeLaunch("lz4", "lz4", grid, read_block, (*common, ring, status), ring, _SERIAL_TEAM)
        return [lz4] if chain.compressor == "blosc" else [headers, lz4]
    if chain.streams_by == "inflate":
        args = (*common, ring, checks, status)
        return [DecodeLaunch("inflate", "inflate", grid, read_block, args, ring, _SERIAL_TEAM), verify]
    if chain.streams_by == "zstd":
        frames, blocks, groups = map(slab.address, (space.frames, space.blocks, space.groups))
        pool = (slab.address(space.pool), space.pool_nbytes)
        descriptions = (stored, streams, capacity, frames, blocks, space.block_capacity)
        split = (*descriptions, counters, space.pool_nbytes, checks, groups, space.group_count, status)
        entropy = (stored, blocks, space.block_capacity, counters, *pool, status)
        execute = (stored, unordered, streams, capacity, frames, blocks, counters, *pool, ring, status)
        frame_by_frame = [
            DecodeLaunch("zstd_execute", "zstd_execute", grid, 32 * _ZSTD_TEAM, execute, ring, _ZSTD_TEAM)
        ]
        return [
            DecodeLaunch("zstd", "zstd_frames", grid, 32, split),
            DecodeLaunch("zstd", "zstd_entropy", (min(space.block_capacity, 2 * grid[0] + 4096),), 96, entropy),
            *(_group_launches(slab) if space.group_nbytes else frame_by_frame),
            verify,
        ]
    return []


def _group_launches(slab: _Slab) -> list[DecodeLaunch]:
    """Plan the launches that execute the blocks of zstd frames in parallel, one group of blocks after another."""
    space, status, processors = slab.space, slab.status, slab.device.processors
    stored, target, streams, frames = map(slab.address, (space.stored, space.unordered, space.streams, space.frames))
    blocks, counters, cells = map(slab.address, (space.blocks, space.words, space.cells))
    lists = (slab.address(space.block_list), slab.address(space.groups))
    pool = (slab.address(space.pool), space.pool_nbytes)
    sort = (streams, slab.chunks, frames, blocks, counters, *lists, space.group_nbytes, status)
    launches = [DecodeLaunch("zstd_cells", "zstd_offsets", (slab.chunks,), 32, sort, team=_ZSTD_TEAM)]
    execute_grid = (min(2 * processors, 2 * -(-space.group_nbytes // MAX_ZSTD_BLOCK)),)
    values_grid = (min(8 * processors, 2 * -(-space.group_nbytes // _VALUES_NBYTES)),)
    for number in range(space.group_count):
        group = (*lists, number, space.group_nbytes, cells, status)
        write = (stored, target, streams, blocks, *pool, *group)
        launches.append(DecodeLaunch("zstd_cells", "zstd_cells", execute_grid, 32 * _ZSTD_TEAM, write, team=_ZSTD_TEAM))
        values = (target, streams, blocks, *group)
        launches.append(DecodeLaunch("zstd_cells", "zstd_values", values_grid, 256, values, team=_ZSTD_TEAM))
    return launches
