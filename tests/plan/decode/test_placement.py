"""If this fails, chunks are decoded where memory does not suffice, or on the host without need."""

import numpy as np
import pytest

from linumpy.plan.codecs import DecodeChain
from linumpy.plan.decode.placement import GROUP_NBYTES, choose_placement
from linumpy.plan.decode.workspace import MAX_ZSTD_BLOCK

MIB = 2**20


def way(chain, chunk, chunks, *, capacity=500, cores=16, decode_on=None):
    memory = {"capacity": capacity * MIB, "table_nbytes": 8, "margin": 256}
    return choose_placement(chain, chunk, chunks=chunks, cores=cores, decode_on=decode_on, **memory)


@pytest.mark.parametrize("chunk", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("cores", [2, 16, 64])
def test_long_zstd_chunks_are_decoded_on_the_device_block_by_block(chunk, cores):
    """A core decodes 500 MiB/s, and 16 threads no more than 6000: one such chunk on the device is faster."""
    for chunks in (1, 2, 1024 // chunk):
        got = way(DecodeChain("zstd"), chunk * MIB, chunks, cores=cores)
        assert got.slot is not None, got
        assert got.slot.group_nbytes == min(GROUP_NBYTES, chunks * chunk * MIB)


@pytest.mark.parametrize(("chunk", "on_device"), [(2**30 - 1, True), (2**30, False)])
def test_frames_of_a_gibibyte_are_not_decoded_whole_on_the_device(chunk, on_device):
    """The kernels count in 32 bits."""
    got = way(DecodeChain("lz4"), chunk, 1, capacity=2**16, decode_on="device")
    assert (got.slot is not None) == on_device, got


def test_many_short_frames_are_decoded_one_team_each():
    for chunk, chunks in ((2**15, 4096), (2**18, 4096), (2**20, 1024), (2**21, 512)):
        got = way(DecodeChain("zstd"), chunk, chunks)
        assert got.slot is not None
        assert got.slot.group_nbytes == 0


@pytest.mark.parametrize("name", ["lz4", "gzip", "blosc"])
def test_only_zstd_has_blocks(name):
    got = way(DecodeChain(name, "zstd" if name == "blosc" else ""), 32 * MIB, 8, decode_on="device")
    assert got.slot is not None
    assert got.slot.group_nbytes == 0


def test_a_chunk_beyond_the_memory_is_decoded_by_the_host():
    assert way(DecodeChain("zstd"), 256 * MIB, 4).slot is None
    assert way(DecodeChain("zstd"), 256 * MIB, 4, capacity=2000).slot is not None
    assert way(DecodeChain("zstd"), 1024 * MIB, 1, capacity=5000).slot is not None
    assert way(DecodeChain("zstd"), 2048 * MIB, 1, capacity=20000).slot is None


@pytest.mark.parametrize("chunk", [2, 5, 8, 32, 100])
def test_what_a_slot_holds_fits_its_memory(chunk):
    """Cells of a block that begins at a group's end, the list of blocks, and all groups."""
    slot = way(DecodeChain("zstd"), chunk * MIB - 6, 12, decode_on="device").slot
    for stored in np.linspace(100, chunk * MIB, 5).astype(int).tolist():
        count = int(min(slot.chunks, slot.capacity // (stored + 512 + slot.weights(np.array([stored]))[0])))
        if count == 0 or count * stored > slot.stored_nbytes:
            continue
        space = slot.lay_out(count, count * stored)
        assert space.nbytes <= slot.nbytes
        if slot.group_nbytes:
            assert space.block_list - space.cells >= 4 * (slot.group_nbytes + MAX_ZSTD_BLOCK)
            assert space.groups - space.block_list >= 4 * space.block_capacity
            assert space.unordered - space.groups >= 8 * space.group_count
            assert space.group_count * slot.group_nbytes >= space.decoded_nbytes
