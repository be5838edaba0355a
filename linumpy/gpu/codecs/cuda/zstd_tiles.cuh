// Cuts the sequences of a Zstandard block into tiles of up to 4096 bytes, by a team of warps. Each thread takes one
// sequence, and a scan over the team gives its offset in the tile. A sequence that ends after the tile is continued in
// the next tile. A thread then finds the sequence of any byte of the tile by the bits in `heads`.

constexpr u32 TILE = 4096;
constexpr u32 ROWS = TILE / TEAM;  // bytes of a tile that one thread computes
constexpr u32 AT_ONCE = ROWS < 8 ? ROWS : 8;  // overlapping loads of a thread
constexpr u32 CHASED = ROWS < 4 ? ROWS : 4;  // chains of copies that a thread follows at the same time
static_assert(ROWS < 32, "one bit each");  // of the words that list copies

// One sequence of a tile, or the remaining part of it.
struct __align__(16) Run {
    u32 span;  // lower half: offset in the tile; upper half: number of literals, at most 65535
    u32 at;  // index of the first literal
    u32 offset;
    float inverse;  // 1 / offset
};

struct Tile {
    Run runs[TEAM];
    u32 heads[TILE / LANES];  // a bit for each byte at which a sequence begins
    u16 before[TILE / LANES];  // number of sequences that begin before each row of 32 bytes
    u64 sums[TEAM_WARPS];  // of the sequences of each warp: bytes in the lower half, literals in the upper half
    u32 next, literals, match;  // where the next tile begins: a sequence, and how much of the sequence is completed
    u32 taken;  // completed literals of the block
};

// Literals in memory, or one repeated literal (mask 0).
struct Literals {
    const u8 *from;
    u64 mask;
    __device__ u8 operator[](u64 i) const { return load_once(from + (i & mask)); }
};

// The position in the sequences of a block. All threads hold the same values.
struct Cursor {
    const u64 *sequences;
    u32 count, next;  // number of sequences, and index of the first one of the next tile
    u32 literals, match;  // completed part of that sequence
    u32 taken;  // completed literals of the block
};

// Load a thread's sequence of the next tile; 0 if there is none.
__device__ inline u64 fetched(const Cursor &c) {
    const u64 at = static_cast<u64>(c.next) + threadIdx.x;
    return at < c.count ? c.sequences[at] : 0;
}

// Sum over this thread and all threads below it in the team; `all`: over the team.
__device__ inline u64 team_sum(Tile &t, u64 mine, u64 &all) {
    u64 sum = mine;
#pragma unroll
    for (int by = 1; by < LANES; by *= 2) {
        const u64 other = from_below(sum, by);
        if (lane_id() >= by) sum += other;
    }
    if (lane_id() == LANES - 1) t.sums[warp_id()] = sum;
    sync_team();
    u64 before = 0;
    all = 0;
#pragma unroll
    for (int warp = 0; warp < TEAM_WARPS; ++warp) {
        const u64 of_warp = t.sums[warp];
        if (warp < warp_id()) before += of_warp;
        all += of_warp;
    }
    return sum + before;
}

// Cut the next tile, which begins at byte `pos` of the frame and has at most `capacity` bytes: store its sequences, and
// advance the cursor to the next tile. Returns the size of the tile, or 0 if a sequence is out of bounds.
__device__ inline u32 cut_tile(Tile &t, u64 pos, u64 capacity, Cursor &c, u64 word, const u32 *last,
                               u32 block_literals) {
    const u32 rank = threadIdx.x;
    u32 literals = word & 0x3ffff, match = word >> 18 & 0x3ffff;
    const u32 offset = resolved(static_cast<u32>(word >> 36), last);
    const u32 literals_done = rank == 0 ? c.literals : 0, match_done = rank == 0 ? c.match : 0;
    literals -= literals_done;
    match -= match_done;
    const u32 nbytes = literals + match;
    u64 all;
    const u64 sum = team_sum(t, nbytes | static_cast<u64>(literals) << 32, all);
    const u32 whole = static_cast<u32>(all), end = static_cast<u32>(sum), begin = end - nbytes;
    const u32 taken = c.taken + static_cast<u32>(sum >> 32) - literals, size = whole < TILE ? whole : TILE;
    const bool used = nbytes && begin < size;
    bool wrong = used && taken + literals > block_literals;
    wrong |= used && match && (offset == 0 || offset > pos + begin + literals);
    if (used) {
        const u32 capped = literals < 0xffff ? literals : 0xffff;  // any number beyond a tile has the same effect
        t.runs[rank] = Run{begin | capped << 16, taken, offset, __fdividef(1.0f, static_cast<float>(offset))};
        atomicAdd(t.heads + begin / LANES, 1u << begin % LANES);
        const u32 rows = (end < size ? end : size - 1) / LANES;
        for (u32 row = begin / LANES + 1; row <= rows; ++row) t.before[row] = static_cast<u16>(rank + 1);
        if (rank == 0) t.before[0] = 0;
        if (end >= size) {  // the last sequence of the tile
            const u32 left = end - size, of_match = left < match ? left : match, done = literals - (left - of_match);
            t.next = c.next + rank + (left == 0);
            t.literals = left ? literals_done + done : 0;
            t.match = left ? match_done + match - of_match : 0;
            t.taken = taken + done;
        }
    }
    if (any_in_team(wrong || size > capacity)) return 0;
    c = Cursor{c.sequences, c.count, t.next, t.literals, t.match, t.taken};
    return size;
}

// The origin of a byte of the tile: the literal with index `at`, or a copy of the byte that is `back` bytes before.
struct Origin {
    bool literal;
    u32 at, back;
};
// `row`: the byte's row, at most the last one of the tile; `up_to_mine`: a bit for each lane up to this one.
__device__ inline Origin origin_of(const Tile &t, u32 byte, u32 row, u32 up_to_mine) {
    const Run run = t.runs[t.before[row] + bits_set(t.heads[row] & up_to_mine) - 1];
    const u32 within = byte - (run.span & 0xffff), run_literals = run.span >> 16;
    const bool literal = within < run_literals;
    // A match that overlaps itself repeats its first `offset` bytes, from which chains of copies are shorter. The
    // product is exact enough, since a tile has 2^12 bytes.
    const u32 in_match = literal ? 0 : within - run_literals;
    const u32 repeats = __float2uint_rz((static_cast<float>(in_match) + 0.5f) * run.inverse);
    return {literal, run.at + within, repeats * run.offset + run.offset};
}

// The byte of this thread in the tile's `row`-th row of TEAM bytes.
__device__ inline u32 tile_byte(u32 row) { return (row * TEAM_WARPS + warp_id()) * LANES + lane_id(); }

// Follow the copies within a tile, one for each bit of `copies`, to cells that are no copies, and call `store(byte,
// cell)` with each byte and the cell that was found. `t.cells` is only read.
template <class CopyTile, class Store>
__device__ inline void follow_copies(const CopyTile &t, u32 copies, const Store &store) {
#pragma unroll 1
    for (u32 first = 0; copies >> first; first += CHASED) {
        u32 cell[CHASED];
#pragma unroll
        for (u32 k = 0; k < CHASED; ++k)
            cell[k] = copies >> (first + k) & 1 ? t.cells[tile_byte(first + k)] : CopyTile::NO_COPY;
        for (bool more = true; more;) {
            more = false;
#pragma unroll
            for (u32 k = 0; k < CHASED; ++k) {
                if (CopyTile::is_copy(cell[k])) cell[k] = t.cells[CopyTile::copied_byte(cell[k])];
                more |= CopyTile::is_copy(cell[k]);
            }
        }
#pragma unroll
        for (u32 k = 0; k < CHASED; ++k)
            if (copies >> (first + k) & 1) store(tile_byte(first + k), cell[k]);
    }
}

__device__ inline void clear_heads(Tile &t) {
    for (u32 row = threadIdx.x; row < TILE / LANES; row += TEAM) t.heads[row] = 0;
}
