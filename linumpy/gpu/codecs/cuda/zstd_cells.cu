// Literals and sequences of zstd.cu → bytes, for few long Zstandard frames: the blocks of a frame are executed in
// parallel. zstd_execute.cu, which executes a frame by one team of warps (about 900 MiB/s), is for many short frames.
// linumpy/plan/decode/placement.py estimates the speed of both and chooses the faster one.
//
// A block copies bytes of earlier blocks, which may not be decoded yet when the block is executed. Therefore each byte
// first gets a cell of 32 bits: the value of the byte or, if the byte is copied from another block, the index of the
// cell of the copied byte. Three kernels:
//
//   zstd_offsets a warp per frame: prefix sums over blocks of decoded sizes and of repeated offsets
//   zstd_cells   a team of warps per block: writes the cells of the block
//   zstd_values  a thread per four bytes: follows each cell to a cell that holds a value, and writes the bytes
//
// The last two kernels run once per group, which bounds the memory for cells: a group is the blocks that begin in the
// same `group_nbytes` of the decoded bytes. Bytes that are copied from an earlier group are already decoded.
//
// No deadlock is possible, since no thread waits for another block of its grid: a kernel reads only cells and bytes
// that an earlier kernel on the same CUDA stream has written or, in zstd_cells, the same team before a barrier. Chains
// of copies end, because a copy always refers to a cell of a lower index, which is checked.

#include "decode.cuh"
#include "zstd_format.cuh"
#include "zstd_records.cuh"
#include "zstd_sequences.cuh"
#include "zstd_tiles.cuh"

// A cell is KNOWN | value of the byte; or IN_TILE | index in the tile of the copied byte; or the index of the copied
// byte's cell.
constexpr u32 KNOWN = 1u << 31;
constexpr u32 IN_TILE = 1u << 30;

// The bytes and cells of a block. Offsets are from the first byte of its frame.
struct BlockSpan {
    const u8 *out;
    u32 *cells;
    i64 first_cell;  // index that the cell of the frame's first byte has or, if below 0, would have in this group
    // Begin and end of the block; kept: the first byte of the frame that has a cell in this group.
    u32 begin, kept, end;
};

__device__ inline u32 *cell_at(const BlockSpan &span, u32 byte) { return span.cells + (span.first_cell + byte); }

// Find the last offsets before the block of each lane. `last`: the last offsets before the first lane's block, advanced
// to those after the last lane's; `mine`: the last offsets after this lane's block, as a function of those before it.
__device__ inline LastOffsets before_block(LastOffsets &last, const LastOffsets &mine) {
    LastOffsets before = last;
    for (int lane = 0; lane < LANES; ++lane) {
        if (lane_id() == lane) before = last;
        LastOffsets of_block;
#pragma unroll
        for (int k = 0; k < 3; ++k) of_block.of[k] = from_lane(mine.of[k], lane);
        last = composed(last, of_block);
    }
    return before;
}

// Compute the offsets of the blocks of a frame, and list the blocks from `order[listed]` on. By a whole warp. Returns a
// status.
__device__ inline int locate_blocks(const Stream &stream, const Frame &frame, Block *blocks, u32 listed, u32 *order,
                                    Group *groups, i64 group_nbytes) {
    u64 end = 0;
    LastOffsets last{{1, 4, 8}};
    i64 group_before = -1;
    u32 kept_before = 0;
    bool long_block = false, beyond = false;
    for (int first = 0; first < frame.blocks; first += LANES) {
        const int k = first + lane_id();
        const bool used = k < frame.blocks;
        Block *block = blocks + frame.first_block + k;
        const u32 claimed = used ? block->decoded : 0, decoded = claimed <= MAX_BLOCK ? claimed : 0;
        const u32 sum = running_sum(decoded);
        const u64 begin = end + sum - decoded;
        LastOffsets mine = unchanged();
        if (used && block->type == COMPRESSED && block->sequences)
            for (int j = 0; j < 3; ++j) mine.of[j] = block->last_offsets[j];
        const LastOffsets before = before_block(last, mine);
        long_block |= claimed > MAX_BLOCK;
        const bool fits = begin + decoded <= static_cast<u64>(stream.target_nbytes), is_listed = fits && decoded;
        beyond |= !fits;
        // A block that is not listed (an empty one, or a lane without a block) belongs to the group of the byte at which
        // the next block would begin.
        const i64 group = static_cast<i64>(stream.target + begin) / group_nbytes;
        i64 below = from_below(group, 1);
        if (lane_id() == 0) below = group_before;
        const u32 heads = vote(group != below), up_to_mine = heads & ((2u << lane_id()) - 1);
        const u32 head = from_lane(static_cast<u32>(begin), up_to_mine ? highest_bit(up_to_mine) : 0);
        const u32 kept = up_to_mine ? head : kept_before;
        if (used) order[listed + k] = is_listed ? static_cast<u32>(frame.first_block + k) : NO_BLOCK;
        if (used && is_listed) {
            block->begin = static_cast<u32>(begin);
            block->kept = kept;
            for (int j = 0; j < 3; ++j) block->last_offsets[j] = before.of[j];
            atomicMin(&groups[group].first, listed + k);
            atomicMax(&groups[group].end, listed + k + 1);
        }
        end += from_lane(sum, LANES - 1);
        group_before = from_lane(group, LANES - 1);
        kept_before = from_lane(kept, LANES - 1);
    }
    if (vote(long_block)) return UNSUPPORTED;
    return vote(beyond) || end != static_cast<u64>(stream.target_nbytes) ? WRONG_SIZE : FINE;
}

extern "C" __global__ void zstd_offsets(const Stream *__restrict__ streams, i64 stream_capacity,
                                        const Frame *__restrict__ frames, Block *blocks,
                                        const u64 *__restrict__ counters, u32 *order, Group *groups, i64 group_nbytes,
                                        int *status) {
    const i64 known = static_cast<i64>(counters[STREAMS]);
    const i64 n = known < stream_capacity ? known : stream_capacity;
    for (i64 number = blockIdx.x; number < n; number += gridDim.x) {
        u32 before = 0;  // number of blocks of all previous frames, which come first in the list
        for (i64 k = lane_id(); k < number; k += LANES) before += frames[k].blocks;
        before = from_lane(running_sum(before), LANES - 1);
        const Stream stream = streams[number];
        const Frame frame = frames[number];
        if (vote(status[stream.chunk] != FINE)) {
            for (int k = lane_id(); k < frame.blocks; k += LANES) order[before + k] = NO_BLOCK;
            continue;
        }
        const int state = locate_blocks(stream, frame, blocks, before, order, groups, group_nbytes);
        if (lane_id() == 0 && state != FINE) fail(status, stream.chunk, state);
    }
}

struct CellTile : Tile {
    u32 cells[TILE];
    static constexpr u32 NO_COPY = KNOWN;
    __device__ static bool is_copy(u32 cell) { return cell & IN_TILE; }
    __device__ static u32 copied_byte(u32 cell) { return cell & (TILE - 1); }
};

// Compute the cell of each byte of the tile that begins at `pos`. Cells of copies of other bytes of the tile are stored
// only in the tile; `follow_cells` completes them. Returns a bit for each row in which the thread's byte is such a
// copy. The address of each byte is computed without branches, so that the loads of a thread's bytes overlap.
__device__ inline u32 compute_cells(CellTile &t, const BlockSpan &span, const Literals &literals, u32 pos, u32 size) {
    const u32 last_row = (size - 1) / LANES, up_to_mine = (2u << lane_id()) - 1;
    u32 copies = 0;
#pragma unroll 1
    for (u32 first = 0; first < ROWS && (first * TEAM_WARPS + warp_id()) * LANES < size; first += AT_ONCE) {
        u32 cell[AT_ONCE], value[AT_ONCE], copied[AT_ONCE];
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; ++k) {
            const u32 row = (first + k) * TEAM_WARPS + warp_id(), byte = row * LANES + lane_id();
            const Origin origin = origin_of(t, byte, row < last_row ? row : last_row, up_to_mine);
            const bool literal = origin.literal, mine = byte < size;
            const u32 back = origin.back, from = pos + byte - back;
            const bool in_tile = !literal && back <= byte, far = !literal && !in_tile;
            const bool is_decoded = far && from < span.kept, own = far && from >= span.begin;
            const u8 *memory = literal ? literals.from + (origin.at & literals.mask) : span.out + from;
            value[k] = copied[k] = 0;
            if (mine && (literal || is_decoded)) value[k] = load_written(memory);
            if (mine && own) copied[k] = load_written(cell_at(span, from));
            cell[k] = literal || is_decoded ? KNOWN
                      : in_tile             ? IN_TILE | (byte - back)
                      : own                 ? 0
                                            : static_cast<u32>(span.first_cell + from);
        }
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; ++k) {
            const u32 byte = ((first + k) * TEAM_WARPS + warp_id()) * LANES + lane_id();
            if (byte >= size) continue;
            cell[k] |= value[k] | copied[k];
            t.cells[byte] = cell[k];
            if (cell[k] & IN_TILE) copies |= 1u << (first + k);
            else *cell_at(span, pos + byte) = cell[k];
        }
    }
    return copies;
}

// Replace the cells of copies within the tile by the cells that the copies lead to: values, or copies from outside the
// tile.
__device__ inline void follow_cells(const CellTile &t, const BlockSpan &span, u32 pos, u32 copies) {
    follow_copies(t, copies, [&](u32 byte, u32 cell) { *cell_at(span, pos + byte) = cell; });
}

// Write the cells of the last `n` literals of a block, from byte `pos` of the frame on. Returns false if they do not
// end at the end of the block.
__device__ inline bool put_cells(const BlockSpan &span, const Literals &literals, u32 from, u32 pos, u32 n) {
    if (n != span.end - pos) return false;
    for (u32 k = threadIdx.x; k < n; k += TEAM) *cell_at(span, pos + k) = KNOWN | literals[from + k];
    return true;
}

// Write the cells of a block. Returns false if the block is broken. By the team.
__device__ inline bool write_cells(CellTile &t, const BlockSpan &span, const Block &block, const u8 *arena,
                                   const u8 *pool, i64 pool_nbytes) {
    const u8 *content = arena + block.source;
    if (block.type != COMPRESSED)
        return put_cells(span, Literals{content, block.type == RAW ? ~0ull : 0}, 0, span.begin, block.nbytes);
    const Literals literals{block.literals_type >= NEW_TREE ? pool + block.literals_at : content + block.literals_head,
                            block.literals_type == ONE_LITERAL ? 0 : ~0ull};
    Cursor cursor{block_sequences(block, pool, pool_nbytes), block.sequences, 0, 0, 0, 0};
    const u32 last[3] = {block.last_offsets[0], block.last_offsets[1], block.last_offsets[2]};
    u32 pos = span.begin;
    u64 word = fetched(cursor);
    while (cursor.next < cursor.count) {
        const u32 size = cut_tile(t, pos, span.end - pos, cursor, word, last, block.literals);
        if (size == 0) return false;
        word = fetched(cursor);  // loaded while this tile is computed
        const u32 copies = compute_cells(t, span, literals, pos, size);
        sync_team();
        clear_heads(t);  // the next tile writes heads only after two more barriers
        follow_cells(t, span, pos, copies);
        pos += size;
    }
    return put_cells(span, literals, cursor.taken, pos, block.literals - cursor.taken);
}

extern "C" __global__ void __launch_bounds__(TEAM, TEAM_WARPS > 8 ? 2 : 3)
    zstd_cells(const u8 *__restrict__ arena, const u8 *target, const Stream *__restrict__ streams,
               const Block *__restrict__ blocks, const u8 *pool, i64 pool_nbytes, const u32 *__restrict__ order,
               const Group *__restrict__ groups, i64 number, i64 group_nbytes, u32 *cells, int *status) {
    __shared__ CellTile tile;
    const Group group = groups[number];
    for (u32 at = group.first + blockIdx.x; at < group.end; at += gridDim.x) {
        const u32 listed = order[at];
        clear_heads(tile);
        if (listed == NO_BLOCK) continue;
        const Block &block = blocks[listed];
        // Another team may set the status of the chunk meanwhile, but all threads must take the same branch.
        if (any_in_team(status[block.chunk] != FINE)) continue;
        const i64 frame = streams[block.chunk].target;
        const BlockSpan span{target + frame, cells,      frame - number * group_nbytes,
                             block.begin,    block.kept, block.begin + block.decoded};
        const bool good = write_cells(tile, span, block, arena, pool, pool_nbytes);
        if (!good && threadIdx.x == 0) fail(status, block.chunk, BAD_DATA);
    }
}

constexpr u32 PART = 8192, PARTS = MAX_BLOCK / PART;  // bytes of a block that `zstd_values` processes at a time

extern "C" __global__ void __launch_bounds__(256)
    zstd_values(u8 *target, const Stream *__restrict__ streams, const Block *__restrict__ blocks,
                const u32 *__restrict__ order, const Group *__restrict__ groups, i64 number, i64 group_nbytes,
                const u32 *__restrict__ cells, const int *__restrict__ status) {
    const Group group = groups[number];
    if (group.first >= group.end) return;
    const u64 parts = static_cast<u64>(group.end - group.first) * PARTS;
    for (u64 part = blockIdx.x; part < parts; part += gridDim.x) {
        const u32 listed = order[group.first + part / PARTS], offset = part % PARTS * PART;
        if (listed == NO_BLOCK) continue;
        const Block &block = blocks[listed];
        if (offset >= block.decoded || status[block.chunk] != FINE) continue;
        const u32 remaining = block.decoded - offset;
        const u64 begin = streams[block.chunk].target + block.begin + offset,
                  end = begin + (remaining < PART ? remaining : PART);
        const u64 first_cell = number * group_nbytes;  // a multiple of 16, as the address of `cells`
        for (u64 four = (begin & ~3ull) + 4 * threadIdx.x; four < end; four += 4 * blockDim.x) {
            const bool whole = four >= begin && four + 4 <= end;
            u32 cell[4];
            if (whole) {
                const uint4 all = *reinterpret_cast<const uint4 *>(cells + (four - first_cell));
                cell[0] = all.x, cell[1] = all.y, cell[2] = all.z, cell[3] = all.w;
            } else {
                for (u32 k = 0; k < 4; ++k)
                    cell[k] = four + k >= begin && four + k < end ? cells[four + k - first_cell] : KNOWN;
            }
            for (bool more = true; more;) {
                more = false;
#pragma unroll
                for (u32 k = 0; k < 4; ++k) {
                    if (cell[k] & KNOWN) continue;
                    const u32 next = cells[cell[k]];
                    cell[k] = next & KNOWN || next < cell[k]
                                  ? next
                                  : KNOWN;  // indices decrease, so that broken chains end, too
                    more |= !(cell[k] & KNOWN);
                }
            }
            if (whole) {
                *reinterpret_cast<u32 *>(target + four) =
                    (cell[0] & 255) | (cell[1] & 255) << 8 | (cell[2] & 255) << 16 | cell[3] << 24;
            } else {
                for (u32 k = 0; k < 4; ++k)
                    if (four + k >= begin && four + k < end) target[four + k] = static_cast<u8>(cell[k]);
            }
        }
    }
}
