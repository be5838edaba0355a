"""Choose where chunks are decoded: on the device in batches, or on the host by threads. Pure.

A GPU decodes many streams at a time, each slowly; a processor core decodes one stream several times as fast. The number
of streams therefore decides. With extra memory (`group_nbytes` of a slot) the blocks of long zstd frames are decoded in
parallel.

A slot is device memory in which slabs, batches of chunks, are decoded. "Depth" is the number of slots. To execute a
zstd block is to turn its literals and sequences into bytes; a group is the blocks that are executed at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from linumpy.plan.codecs import DecodeChain
from linumpy.plan.decode.workspace import MAX_CHUNK_NBYTES, Slot, fit_slot, padded_nbytes

#: Maximum number of chunks in a slab.
_MAX_CHUNKS = 4096
#: Slots whose slabs are decoded at the same time.
_DEPTH = 3
#: Up to this many chunks form one slab if they fit a slot: three slabs at a time gain less than their launches cost.
_MAX_SINGLE_SLAB_CHUNKS = 128
#: By decoder: decoded MiB/s of one stream on the device, seconds before the first byte, and decoded MiB/s of one core
#: of the host. docs/performance.md describes the measurement.
_DEVICE_STREAM_RATE = {"zstd": 900, "lz4": 48, "inflate": 14, "stored": 4000}
_DEVICE_START = {"zstd": 1.1e-3, "lz4": 0.0, "inflate": 0.0, "stored": 0.0}
_HOST_CORE_RATE = {"zstd": 500, "lz4": 1000, "inflate": 220, "stored": 4000}
#: Decoded bytes of a group: 64 zstd blocks; three slabs with such a group each keep a device busy. Chunks shorter than
#: _MIN_GROUPED_NBYTES are executed frame by frame, whatever their number.
GROUP_NBYTES, _MIN_GROUPED_NBYTES = 2**23, 2**21
#: Decoded MiB/s of all frames together whose blocks are executed in parallel; and seconds before the first block is
#: executed, for the entropy decoding of one block.
_GROUPS_RATE, _GROUPS_START = 30_000, 1.3e-3
#: Only chunks shorter than this are executed by groups: offsets within a frame are stored in 32 bits.
_GROUPED_END_NBYTES = 2**31
#: Upper bounds of the rates, in MiB/s, for any number of streams.
_MAX_DEVICE_RATE = {"zstd": 40_000, "lz4": 25_000, "inflate": 8_000, "stored": 40_000}
_MAX_HOST_RATE = 6_000
#: Approximate size of the blocks that Blosc cuts a chunk into; each has one stream or more.
_BLOSC_BLOCK_NBYTES = 128 * 1024
#: Maximum number of decoding threads; since other threads read, more gain nothing.
_MAX_THREADS = 16


@dataclass(frozen=True)
class DecodePlacement:
    """Where and how the chunks of a read are decoded.

    - `slot`, `depth`: memory of a slot on the device, None if the host decodes; and the number of slots.
    - `why`: why the host decodes; empty if the device does.
    """

    chain: DecodeChain
    slot: Slot | None
    depth: int
    threads: int
    why: str

    def __str__(self) -> str:
        if self.slot is None:
            return f"{self.chain}, on the host, by {_counted(self.threads, 'thread')}: {self.why}"
        slabs = f"{_counted(self.depth, 'slab')} of about {_counted(_typical_chunks(self.slot), 'chunk')} at a time"
        if self.slot.group_nbytes:
            slabs += ", all blocks in parallel"
        return f"{self.chain}, on the device, {slabs}"


@lru_cache(256)
def choose_placement(
    chain: DecodeChain,
    chunk_nbytes: int,
    *,
    chunks: int,
    capacity: int,
    cores: int,
    table_nbytes: int,
    margin: int,
    decode_on: str | None = None,
) -> DecodePlacement:
    """Choose where chunks are decoded: by the device or the host, whichever is estimated to be faster.

    - `capacity`: device memory for all slots, in bytes.
    - `table_nbytes`, `margin`: as for :func:`~linumpy.plan.decode.workspace.fit_slot`.
    - `decode_on` (``"device"`` or ``"host"``): decode there, without an estimate. The host decodes nevertheless if the
      chunks do not fit into the device memory or only the host decodes their filter.
    """
    threads = max(1, min(_MAX_THREADS, cores, chunks))
    host = DecodePlacement(chain, None, _DEPTH, threads, "")
    if chain.host_filter:
        return replace(host, why="only the host decodes its filter")
    # For frame by frame 0, else the bytes of a group.
    possible_group_nbytes = [0] if chunk_nbytes < MAX_CHUNK_NBYTES else []
    if may_be_grouped(chain, chunk_nbytes):
        possible_group_nbytes.append(min(GROUP_NBYTES, chunks * padded_nbytes(chain, chunk_nbytes)))
    candidates = [
        placement
        for group_nbytes in possible_group_nbytes
        if (placement := _fit_on_device(host, chunk_nbytes, chunks, capacity, table_nbytes, margin, group_nbytes))
    ]
    if not candidates:
        if not possible_group_nbytes:
            return replace(host, why=f"a chunk of {chunk_nbytes} bytes is too large for the device's decoders")
        return replace(host, why=f"chunks of {chunk_nbytes} bytes do not fit into {capacity} bytes of scratch")
    device = max(candidates, key=lambda placement: _device_rate(placement, chunks))
    if decode_on == "device":
        return device
    if decode_on == "host":
        return replace(host, why="as requested")
    if _device_rate(device, chunks) >= min(threads * _HOST_CORE_RATE[chain.streams_by], _MAX_HOST_RATE):
        return device
    return replace(host, why=f"{_streams_at_once(device, chunks)} streams at a time are too few for the device")


def may_be_grouped(chain: DecodeChain, chunk_nbytes: int) -> bool:
    """Return whether the blocks of a chunk can be executed in parallel: it is one long zstd frame."""
    is_long = _MIN_GROUPED_NBYTES <= chunk_nbytes < _GROUPED_END_NBYTES
    return chain.compressor == "zstd" and not chain.host_filter and is_long


def _fit_on_device(
    host: DecodePlacement,
    chunk_nbytes: int,
    chunks: int,
    capacity: int,
    table_nbytes: int,
    margin: int,
    group_nbytes: int,
) -> DecodePlacement | None:
    """Fit slots into the memory; None if not even one chunk fits.

    One slot for few chunks that fit into a third of the memory, else three slots, or fewer if a chunk would not fit.
    """
    count = max(1, min(chunks, _MAX_CHUNKS))
    # A chunk takes at most 4 times its bytes: stored, decoded and intermediate ones.
    is_one_slab = count <= _MAX_SINGLE_SLAB_CHUNKS and count * (4 * chunk_nbytes + 2**14) <= capacity // _DEPTH
    for depth in range(1 if is_one_slab else min(_DEPTH, count), 0, -1):
        slot = fit_slot(
            host.chain,
            chunk_nbytes,
            chunks=-(-count // depth),
            max_nbytes=capacity // (_DEPTH if is_one_slab else depth),
            table_nbytes=table_nbytes,
            margin=margin,
            group_nbytes=group_nbytes,
        )
        if slot is not None:
            return replace(host, slot=slot, depth=depth)
    return None


def _streams_at_once(placement: DecodePlacement, chunks: int) -> int:
    """Estimate the number of streams that the device decodes at the same time."""
    assert placement.slot is not None
    chunks_at_once = min(chunks, placement.depth * _typical_chunks(placement.slot))
    return chunks_at_once * _stream_count(placement.chain, placement.slot.chunk_nbytes)


def _device_rate(placement: DecodePlacement, chunks: int) -> float:
    """Estimate the decoded MiB/s of all streams that the device decodes together."""
    slot = placement.slot
    assert slot is not None
    streams = _streams_at_once(placement, chunks)
    if slot.group_nbytes:
        mebibytes = streams * slot.chunk_nbytes / 2**20
        return mebibytes / (_GROUPS_START + mebibytes / _GROUPS_RATE)
    chain, decoder = placement.chain, placement.chain.streams_by
    mebibytes = slot.chunk_nbytes / _stream_count(chain, slot.chunk_nbytes) / 2**20
    rate = mebibytes / (_DEVICE_START[decoder] + mebibytes / _DEVICE_STREAM_RATE[decoder])  # of one stream
    return min(streams * rate, _MAX_DEVICE_RATE[decoder])


def _counted(number: int, noun: str) -> str:
    """Return a number and a noun in singular or plural."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _typical_chunks(slot: Slot) -> int:
    """Estimate the number of chunks in a slab at a compression ratio of 3."""
    stored_nbytes = slot.chunk_nbytes // 3
    chunk_capacity = slot.capacity // (stored_nbytes + int(slot.weights(np.array([stored_nbytes]))[0]))
    return max(1, min(slot.chunks, chunk_capacity))


def _stream_count(chain: DecodeChain, chunk_nbytes: int) -> int:
    """Estimate the number of streams of a chunk."""
    return max(1, chunk_nbytes // _BLOSC_BLOCK_NBYTES) if chain.compressor == "blosc" else 1
