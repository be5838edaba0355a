"""Which way chunks are decoded: on the device, in batches, or on the host, by threads.

A GPU decodes many streams at a time, each of them slowly; a processor core decodes one, several times as fast. So the
number of streams decides. Not both at once: threads that decode hold Python's lock so often that the reader's thread,
which feeds the device, takes twice its time. In: codec chain, sizes, memory. Out: :class:`DecodeWay`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from linumpy.plan.codecs import DecodeChain
from linumpy.plan.decode.staging import Slot, fit_slot
from linumpy.plan.decode.workspace import MOST_NBYTES
from linumpy.plan.read.slabs import MAX_PIECES

#: Slots whose slabs are decoded at the same time.
_DEPTH = 3
#: Chunks that are one slab, where they fit: to part them gains less than the launches of three slabs take.
_ONE_SLAB = 128
#: MiB a second of decoded bytes, of one stream on the device once it is under way, and of one core; seconds until a
#: stream is under way. docs/performance.md tells how measured.
_DEVICE_STREAM = {"zstd": 900, "lz4": 48, "inflate": 14, "stored": 4000}
_DEVICE_START = {"zstd": 1.1e-3, "lz4": 0.0, "inflate": 0.0, "stored": 0.0}
_HOST_CORE = {"zstd": 500, "lz4": 1000, "inflate": 220, "stored": 4000}
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
    if chunk_nbytes >= MOST_NBYTES:
        return _by_host(host, f"a chunk of {chunk_nbytes} bytes is too large for the device's decoders")
    wanted = max(1, min(chunks, MAX_PIECES))
    few = wanted <= _ONE_SLAB and wanted * _most_nbytes(chunk_nbytes) <= room // _DEPTH
    for depth in range(1 if few else min(_DEPTH, wanted), 0, -1):
        slot = fit_slot(
            chain,
            chunk_nbytes,
            chunks=-(-wanted // depth),
            most_nbytes=room // (_DEPTH if few else depth),
            table_nbytes=table_nbytes,
            margin=margin,
        )
        if slot is not None:
            break
    else:
        return _by_host(host, f"chunks of {chunk_nbytes} bytes do not fit into {room} bytes of scratch")
    device = DecodeWay(chain, slot, depth, threads, "")
    if decode_on == "device":
        return device
    if decode_on == "host":
        return _by_host(host, "as asked for")
    streams = min(chunks, depth * _typical(slot)) * _streams(chain, chunk_nbytes)
    on_device = min(streams * _stream_rate(chain, chunk_nbytes), _DEVICE_MOST[chain.streams_by])
    on_host = min(threads * _HOST_CORE[chain.streams_by], _HOST_MOST)
    if on_device >= on_host:
        return device
    return _by_host(host, f"{streams} streams at a time are too few for the device")


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
