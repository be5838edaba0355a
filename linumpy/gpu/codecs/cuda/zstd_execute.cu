// Sequences and literals of zstd.cu → bytes. One team of warps decodes a frame from its first byte to its last.
//
// The bytes of a frame are written in tiles of up to 4096 bytes (zstd_tiles.cuh). Each thread computes bytes, whichever
// sequence they belong to. A byte is known (a literal, or a copy of a byte before the tile), or it is a copy of another
// byte of the tile. A thread follows such copies to a known byte in shared memory, without a barrier.

#include "decode.cuh"
#include "execute.cuh"
#include "zstd_records.cuh"
#include "zstd_tiles.cuh"

constexpr u16 KNOWN = 0x8000;  // a cell: KNOWN | value of the byte; or the index in the tile of the copied byte

struct ByteTile : Tile {
    u16 cells[TILE];
    static constexpr u16 NO_COPY = KNOWN;
    __device__ static bool is_copy(u32 cell) { return !(cell & KNOWN); }
    __device__ static u32 copied_byte(u32 cell) { return cell; }
};

// Compute the cell of each byte of the tile. Returns a bit for each row in which the thread's byte is a copy of another
// byte of the tile. The address of each byte is computed without branches, so that the loads of a thread's bytes
// overlap.
__device__ inline u32 compute_cells(ByteTile &t, const Sink &out, const Literals &literals, u32 size) {
    const u32 pos = static_cast<u32>(out.pos), low = static_cast<u32>(ring_low(out, out.pos + size));
    const u32 last_row = (size - 1) / LANES, up_to_mine = (2u << lane_id()) - 1, in_ring_at = ring_offset(out, out.pos);
    const u32 mask = out.ring_size - 1;
    u32 copies = 0;
#pragma unroll 1
    for (u32 first = 0; first < ROWS && (first * TEAM_WARPS + warp_id()) * LANES < size; first += AT_ONCE) {
        u32 cell[AT_ONCE], in_memory[AT_ONCE], in_ring[AT_ONCE];
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; ++k) {
            const u32 row = (first + k) * TEAM_WARPS + warp_id(), byte = row * LANES + lane_id();
            const Origin origin = origin_of(t, byte, row < last_row ? row : last_row, up_to_mine);
            const bool literal = origin.literal;
            const u32 back = origin.back, from = pos + byte - back;
            const bool before = !literal && back > byte, near = from >= low, mine = byte < size;
            const u8 *memory = literal ? literals.from + (origin.at & literals.mask) : out.out + from;
            in_memory[k] = in_ring[k] = 0;
            if (mine && (literal || (before && !near))) in_memory[k] = load_written(memory);
            if (mine && before && near) in_ring[k] = out.ring[(in_ring_at + byte - back) & mask];
            cell[k] = literal || before ? KNOWN : byte - back;
        }
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; ++k) {
            const u32 byte = ((first + k) * TEAM_WARPS + warp_id()) * LANES + lane_id();
            if (byte >= size) continue;
            const u32 value = in_memory[k] | in_ring[k];  // at most one of them is set
            t.cells[byte] = static_cast<u16>(cell[k] | value);
            if (cell[k] & KNOWN) out.ring[(in_ring_at + byte) & mask] = static_cast<u8>(value);
            else copies |= 1u << (first + k);
        }
    }
    return copies;
}

// Execute the sequences of a block; false if one is out of bounds.
__device__ inline bool execute_sequences(ByteTile &t, Sink &out, Cursor &c, const Literals &literals, const u32 *last,
                                         u32 block_literals) {
    u64 word = fetched(c);
    while (c.next < c.count) {
        const u32 size = cut_tile(t, out.pos, out.size - out.pos, c, word, last, block_literals);
        if (size == 0) return false;
        word = fetched(c);  // loaded while this tile is computed
        const u32 copies = compute_cells(t, out, literals, size);
        sync_team();
        clear_heads(t);  // the next tile writes heads only after two more barriers
        // Values are written to the ring, which no thread reads meanwhile.
        follow_copies(t, copies, [&](u32 byte, u32 cell) { *in_ring(out, out.pos + byte) = static_cast<u8>(cell); });
        out.pos += size;
        flush_some(out);
    }
    return true;
}

// Execute a block, and advance the three last offsets; false if the block is broken.
__device__ inline bool execute_block(ByteTile &t, Sink &out, const Block &block, const u8 *arena, const u8 *pool,
                                     i64 pool_nbytes, u32 *last) {
    const u8 *content = arena + block.source;
    if (block.type != COMPRESSED)
        return put_literals(out, Literals{content, block.type == RAW ? ~0ull : 0}, 0, block.nbytes);
    const Literals literals{block.literals_type >= NEW_TREE ? pool + block.literals_at : content + block.literals_head,
                            block.literals_type == ONE_LITERAL ? 0 : ~0ull};
    Cursor cursor{block_sequences(block, pool, pool_nbytes), block.sequences, 0, 0, 0, 0};
    if (!execute_sequences(t, out, cursor, literals, last, block.literals)) return false;
    if (block.sequences) {
        const u32 a = resolved(block.last_offsets[0], last), b = resolved(block.last_offsets[1], last),
                  c = resolved(block.last_offsets[2], last);
        last[0] = a;
        last[1] = b;
        last[2] = c;
    }
    return put_literals(out, literals, cursor.taken, block.literals - cursor.taken);
}

extern "C" __global__ void __launch_bounds__(TEAM, TEAM_WARPS > 8 ? 2 : 3)
    zstd_execute(const u8 *__restrict__ arena, u8 *target, const Stream *__restrict__ streams, i64 stream_capacity,
                 const Frame *__restrict__ frames, const Block *__restrict__ blocks, const u64 *__restrict__ counters,
                 const u8 *pool, i64 pool_nbytes, i64 ring_size, int *status) {
    extern __shared__ __align__(16) u8 ring[];
    __shared__ ByteTile tile;
    const i64 known = static_cast<i64>(counters[STREAMS]);
    const i64 n = known < stream_capacity ? known : stream_capacity;
    for (i64 number = blockIdx.x; number < n; number += gridDim.x) {
        const Stream stream = streams[number];
        clear_heads(tile);
        // Another block may set the status of the chunk meanwhile, but all threads must take the same branch.
        if (stream.codec != ZSTD || any_in_team(status[stream.chunk] != FINE)) continue;
        const Frame frame = frames[number];
        Sink out = open_sink(ring, ring_size, nullptr, threadIdx.x, target + stream.target, stream.target_nbytes);
        u32 last[3] = {1, 4, 8};
        bool good = true;
        for (int k = 0; k < frame.blocks && good; ++k)
            good = execute_block(tile, out, blocks[frame.first_block + k], arena, pool, pool_nbytes, last);
        const bool whole = good && close_sink(out);
        if (!whole && out.rank == 0) fail(status, stream.chunk, good ? WRONG_SIZE : BAD_DATA);
    }
}
