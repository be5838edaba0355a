"""Which way chunks are decoded: on the device, in batches, or on the host, by threads.

A GPU decodes many streams at a time, each of them slowly; a processor core decodes one, several times as fast. So the
number of streams decides. The blocks of long zstd frames are streams of their own, for some memory more (`group_nbytes`
of a slot). In: codec chain, sizes, memory. Out: :class:`DecodeWay`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from linumpy.plan.codecs import DecodeChain
from linumpy.plan.decode.staging import Slot, fit_slot
from linumpy.plan.decode.workspace import MOST_NBYTES, decoded_room

#: Chunks of a slab at most.
_MOST_CHUNKS = 4096
#: Slots whose slabs are decoded at the same time.
_DEPTH = 3
#: Chunks that are one slab, where they fit: to part them gains less than the launches of three slabs take.
_ONE_SLAB = 128
#: MiB a second of decoded bytes, of one stream on the device once it is under way, and of one core; seconds until a
#: stream is under way. docs/performance.md tells how measured.
_DEVICE_STREAM = {"zstd": 900, "lz4": 48, "inflate": 14, "stored": 4000}
_DEVICE_START = {"zstd": 1.1e-3, "lz4": 0.0, "inflate": 0.0, "stored": 0.0}
_HOST_CORE = {"zstd": 500, "lz4": 1000, "inflate": 220, "stored": 4000}
#: Decoded bytes of zstd whose blocks are carried out at the same time: 64 of them, three slabs of which keep a device
#: busy. Frames of fewer blocks than a sixth are carried out one by one by any number of streams.
GROUP_NBYTES, _SHORTEST_GROUPED = 2**23, 2**21
#: MiB a second of all frames together where their blocks are carried out side by side, once they are under way; seconds
#: until then, which are those of a block's entropy.
_GROUPS_RATE, _GROUPS_START = 30_000, 1.3e-3
#: Longest chunk where blocks are: offsets within a frame have 32 bits.
_MOST_GROUPED = 2**31
#: No more, whatever the number of streams.
_DEVICE_MOST = {"zstd": 40_000, "lz4": 25_000, "inflate": 8_000, "stored": 40_000}
_HOST_MOST = 6_000
#: Blosc cuts a chunk into blocks of about this size, each with one stream or more.
_BLOSC_BLOCK = 128 * 1024
#: More decoding threads gain nothing beside those that read.
_MOST_THREADS = 16


@dataclass(frozen=True)
class DecodeWay:
    """How the chunks of a read are decoded.

    Attributes
    ----------
    chain : DecodeChain
        What is decoded.
    slot : Slot or None
        Memory of a slot on the device; None where the host decodes.
    depth : int
        Slots.
    threads : int
        Of the host, where it decodes.
    why : str
        Why the host decodes; empty where it does not.
    """

    chain: DecodeChain
    slot: Slot | None
    depth: int
    threads: int
    why: str

    def __str__(self) -> str:
        if self.slot is None:
            return f"{self.chain}, on the host, by {_count(self.threads, 'thread')}: {self.why}"
        slabs = f"{_count(self.depth, 'slab')} of about {_count(_typical(self.slot), 'chunk')} at a time"
        if self.slot.group_nbytes:
            slabs += ", all blocks side by side"
        return f"{self.chain}, on the device, {slabs}"


@lru_cache(256)
def choose_way(
    chain: DecodeChain,
    chunk_nbytes: int,
    *,
    chunks: int,
    room: int,
    cores: int,
    table_nbytes: int,
    margin: int,
    decode_on: str | None = None,
) -> DecodeWay:
    """Choose the way that takes less time.

    Parameters
    ----------
    chain : DecodeChain
        What is decoded.
    chunk_nbytes : int
        Decoded bytes of a chunk.
    chunks : int
        Chunks to decode.
    room : int
        Device memory for all slots.
    cores : int
        Of the host, that this process may use.
    table_nbytes, margin : int
        As for :func:`~linumpy.plan.decode.staging.fit_slot`.
    decode_on : {"device", "host"}, optional
        Take this way, if the chunks fit there.
    """
    threads = max(1, min(_MOST_THREADS, cores, chunks))
    host = DecodeWay(chain, None, _DEPTH, threads, "")
    if chain.host_filter:
        return _by_host(host, "which undoes its filter")
    groups = _groups(chain, chunk_nbytes, chunks)
    ways = [
        way
        for group_nbytes in groups
        if (way := _on_device(host, chunk_nbytes, chunks, room, table_nbytes, margin, group_nbytes)) is not None
    ]
    if not ways:
        if not groups:
            return _by_host(host, f"a chunk of {chunk_nbytes} bytes is too large for the device's decoders")
        return _by_host(host, f"chunks of {chunk_nbytes} bytes do not fit into {room} bytes of scratch")
    device = max(ways, key=lambda way: _device_rate(way, chunks))
    if decode_on == "device":
        return device
    if decode_on == "host":
        return _by_host(host, "as asked for")
    if _device_rate(device, chunks) >= min(threads * _HOST_CORE[chain.streams_by], _HOST_MOST):
        return device
    return _by_host(host, f"{_streams_at_once(device, chunks)} streams at a time are too few for the device")


def may_be_grouped(chain: DecodeChain, chunk_nbytes: int) -> bool:
    """Say whether the blocks of a chunk can be carried out side by side: it is one zstd frame, and long."""
    return chain.compressor == "zstd" and not chain.host_filter and _SHORTEST_GROUPED <= chunk_nbytes < _MOST_GROUPED


def _groups(chain: DecodeChain, chunk_nbytes: int, chunks: int) -> list[int]:
    """List how blocks of zstd may be carried out: 0 for frame by frame, else in groups of so many decoded bytes."""
    groups = [0] if chunk_nbytes < MOST_NBYTES else []
    if may_be_grouped(chain, chunk_nbytes):
        groups.append(min(GROUP_NBYTES, chunks * decoded_room(chain, chunk_nbytes)))
    return groups


def _on_device(
    host: DecodeWay, chunk_nbytes: int, chunks: int, room: int, table_nbytes: int, margin: int, group_nbytes: int
) -> DecodeWay | None:
    """Fit slots into the memory, three where that leaves each a chunk; None where not even one chunk fits."""
    wanted = max(1, min(chunks, _MOST_CHUNKS))
    few = wanted <= _ONE_SLAB and wanted * _most_nbytes(chunk_nbytes) <= room // _DEPTH
    for depth in range(1 if few else min(_DEPTH, wanted), 0, -1):
        slot = fit_slot(
            host.chain,
            chunk_nbytes,
            chunks=-(-wanted // depth),
            most_nbytes=room // (_DEPTH if few else depth),
            table_nbytes=table_nbytes,
            margin=margin,
            group_nbytes=group_nbytes,
        )
        if slot is not None:
            return replace(host, slot=slot, depth=depth)
    return None


def _streams_at_once(way: DecodeWay, chunks: int) -> int:
    assert way.slot is not None
    return min(chunks, way.depth * _typical(way.slot)) * _streams(way.chain, way.slot.chunk_nbytes)


def _device_rate(way: DecodeWay, chunks: int) -> float:
    """MiB a second of all streams that are under way together."""
    assert way.slot is not None
    streams = _streams_at_once(way, chunks)
    if way.slot.group_nbytes:
        mebibytes = streams * way.slot.chunk_nbytes / 2**20
        return mebibytes / (_GROUPS_START + mebibytes / _GROUPS_RATE)
    return min(streams * _stream_rate(way.chain, way.slot.chunk_nbytes), _DEVICE_MOST[way.chain.streams_by])


def _most_nbytes(chunk_nbytes: int) -> int:
    """Device memory that a chunk takes at most: stored, decoded and in between."""
    return 4 * chunk_nbytes + 2**14


def _stream_rate(chain: DecodeChain, chunk_nbytes: int) -> float:
    """MiB a second that one stream is decoded at on the device, from its start to its end."""
    mebibytes = chunk_nbytes / _streams(chain, chunk_nbytes) / 2**20
    kind = chain.streams_by
    return mebibytes / (_DEVICE_START[kind] + mebibytes / _DEVICE_STREAM[kind])


def _by_host(host: DecodeWay, why: str) -> DecodeWay:
    return DecodeWay(host.chain, None, host.depth, host.threads, why)


def _count(number: int, of: str) -> str:
    return f"{number:,} {of}{'s' * (number != 1)}"


def _typical(slot: Slot) -> int:
    """Chunks of a slab where they are a third of their size."""
    stored = slot.chunk_nbytes // 3
    return max(1, min(slot.chunks, slot.capacity // (stored + int(slot.weights(np.array([stored]))[0]))))


def _streams(chain: DecodeChain, chunk_nbytes: int) -> int:
    return max(1, chunk_nbytes // _BLOSC_BLOCK) if chain.compressor == "blosc" else 1
