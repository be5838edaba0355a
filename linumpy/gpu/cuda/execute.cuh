// Carry out LZ77 sequences, LANES at a time, by a team of warps: copy literals, and bytes that are there already.
//
// The last bytes that were decoded are in shared memory, in a ring, where a byte that was just written is read again at
// once; what lies further back is read from the result. A sequence is `literals` bytes from a source and then `match`
// bytes that stand `offset` bytes further back, which may overlap themselves. Every warp of the team holds the same
// sequences, one a lane.

constexpr u32 MOST_BYTES = 4096;  // of a batch; runs that are longer are copied one after another
constexpr u32 TEAM = TEAM_WARPS * LANES;
constexpr int VALUE = -1;         // in place of a link: the byte is there

typedef short Links[TEAM];

struct Sequence {
    u32 literals, match, offset;
    u32 at;  // of the first literal in the source
};

// Where a stream's bytes go. All threads of the team hold the same values, but for `rank`.
struct Sink {
    u8 *ring, *out;
    u64 pos, flushed, size;
    u32 phase;      // of `out` in a 16-byte word, so that words of the ring are words of the result
    u32 ring_size;  // a power of two
    short *links;   // in shared memory: for each byte of a group, the one it is a copy of
    u32 rank;       // of the thread in the team
};

__device__ inline Sink open_sink(u8 *ring, i64 ring_size, Links &links, u32 rank, u8 *out, u64 size) {
    const u32 phase = static_cast<u32>(reinterpret_cast<u64>(out) & 15);
    return Sink{ring, out, 0, 0, size, phase, static_cast<u32>(ring_size), links, rank};
}

__device__ inline u32 ring_place(const Sink &s, u64 pos) {
    return (static_cast<u32>(pos) + s.phase) & (s.ring_size - 1);
}
__device__ inline u8 *in_ring(const Sink &s, u64 pos) { return s.ring + ring_place(s, pos); }

// A byte that is decoded already; from `low` on the ring has it.
__device__ inline u8 decoded(const Sink &s, u64 pos, u64 low) { return pos >= low ? *in_ring(s, pos) : s.out[pos]; }

__device__ inline u64 ring_low(const Sink &s, u64 end) { return end > s.ring_size ? end - s.ring_size : 0; }

// Write to the result what the ring has; all of it, or whole words only.
__device__ inline void flush(Sink &s, bool all) {
    sync_team();
    u8 *base = s.out - s.phase;
    const u32 mask = s.ring_size - 1;
    const u64 begin = s.flushed + s.phase;
    const u64 end = all ? s.pos + s.phase : (s.pos + s.phase) & ~15ull;
    if (end <= begin) return;
    u64 word = (begin + 15) & ~15ull, last = end & ~15ull;
    if (word > end) word = end;
    if (last < word) last = word;
    for (u64 i = begin + s.rank; i < word; i += TEAM) base[i] = s.ring[i & mask];
    for (u64 i = word + 16 * s.rank; i < last; i += 16 * TEAM)
        *reinterpret_cast<uint4 *>(base + i) = *reinterpret_cast<const uint4 *>(s.ring + (i & mask));
    for (u64 i = last + s.rank; i < end; i += TEAM) base[i] = s.ring[i & mask];
    s.flushed = end - s.phase;
    sync_team();
}

__device__ inline void flush_some(Sink &s) {
    if (s.pos - s.flushed >= s.ring_size / 4) flush(s, false);
}

// Copy `n` literals in steps that the ring can hold. False if they do not fit.
template <class Source> __device__ bool put_literals(Sink &s, const Source &source, u64 at, u64 n) {
    if (n > s.size - s.pos) return false;
    while (n) {
        const u32 step = n < s.ring_size / 4 ? static_cast<u32>(n) : s.ring_size / 4;
#pragma unroll 4
        for (u32 k = s.rank; k < step; k += TEAM) *in_ring(s, s.pos + k) = source[at + k];
        s.pos += step;
        at += step;
        n -= step;
        flush_some(s);
    }
    sync_team();
    return true;
}

// Copy a match in such steps; every byte before it is there.
__device__ inline bool put_match(Sink &s, u32 offset, u64 n) {
    if (n > s.size - s.pos || (n && (offset == 0 || offset > s.pos))) return false;
    while (n) {
        const u32 step = n < s.ring_size / 4 ? static_cast<u32>(n) : s.ring_size / 4;
        const u64 low = ring_low(s, s.pos + step);
        for (u32 k = s.rank; k < step; k += TEAM) {
            const u32 back = offset >= step ? k : k % offset;  // one that overlaps itself repeats its first bytes
            *in_ring(s, s.pos + k) = decoded(s, s.pos - offset + back, low);
        }
        sync_team();
        s.pos += step;
        n -= step;
        flush_some(s);
    }
    return true;
}

// One after another: for batches that hold a very long run.
template <class Source> __device__ bool execute_singly(Sink &s, const Source &source, const Sequence &mine) {
    for (int i = 0; i < LANES; ++i) {
        if (!put_literals(s, source, from_lane(mine.at, i), from_lane(mine.literals, i))) return false;
        if (!put_match(s, from_lane(mine.offset, i), from_lane(mine.match, i))) return false;
    }
    return true;
}

// Give every byte of a group that is a copy of another one in it that one's value: links are followed by doubling.
__device__ inline void follow_links(const Sink &s, u32 group_place, int link) {
    const u32 mask = s.ring_size - 1;
    while (any_in_team(link != VALUE)) {
        const int to = link == VALUE ? 0 : link;
        const int next = s.links[to];
        const u8 value = s.ring[(group_place + to) & mask];
        sync_team();
        if (link == VALUE) continue;
        if (next == VALUE) s.ring[(group_place + s.rank) & mask] = value;
        s.links[s.rank] = static_cast<short>(next);
        link = next;
    }
}

// Carry out the sequences of all lanes in their order. False where one leaves its bounds.
//
// A thread takes a byte, whatever sequence it is from, so that long and short sequences cost the same: it finds out
// whose the byte is and where it comes from. The next group of bytes is begun when all of this one are there.
template <class Source> __device__ bool execute(Sink &s, const Source &source, const Sequence &mine) {
    const u32 length = mine.literals + mine.match;
    const u32 filled = vote(length > 0);
    // Empty sequences may only be the last ones: bytes are counted over the others.
    if (vote(mine.literals > MOST_BYTES || mine.match > MOST_BYTES) || (filled & (filled + 1)))
        return execute_singly(s, source, mine);
    const u32 sum = running_sum(length), batch = from_lane(sum, LANES - 1);
    if (batch > MOST_BYTES || batch > s.ring_size / 2) return execute_singly(s, source, mine);
    const u32 begin = length ? sum - length : ~0u;
    const bool wrong = mine.match && (mine.offset == 0 || mine.offset > s.pos + begin + mine.literals);
    if (vote(wrong) || batch > s.size - s.pos) return false;
    const u32 packed = (begin & 0xffff) | mine.literals << 16, mask = s.ring_size - 1, place = ring_place(s, s.pos);
    const u64 low = ring_low(s, s.pos + batch);
    for (u32 group = 0; group < batch; group += TEAM) {
        const u32 row = group + s.rank / LANES * LANES, byte = group + s.rank;
        const u32 heads = any_of(begin - row < LANES ? 1u << (begin - row) : 0);
        const u32 before = bits_set(vote(begin < row));
        const int owner = static_cast<int>(before + bits_set(heads & ((2u << lane_id()) - 1))) - 1;
        const u32 whose = from_lane(packed, owner), offset = from_lane(mine.offset, owner);
        const u32 at = from_lane(mine.at, owner), within = byte - (whose & 0xffff);
        u8 value = 0;
        int link = VALUE;
        if (byte >= batch) {
        } else if (within < whose >> 16) {
            value = source[at + within];
        } else if (offset <= byte - group) {
            link = static_cast<int>(byte - offset - group);
        } else {
            const u64 from = s.pos + byte - offset;
            value = from >= low ? s.ring[(place + byte - offset) & mask] : s.out[from];
        }
        if (byte < batch) s.ring[(place + byte) & mask] = value;
        s.links[s.rank] = static_cast<short>(link);
        follow_links(s, place + group, link);
    }
    s.pos += batch;
    flush_some(s);
    return true;
}

// Write the rest; whether the stream has become as long as it must be.
__device__ inline bool close_sink(Sink &s) {
    flush(s, true);
    return s.pos == s.size;
}

// Literals that lie in global memory.
struct Bytes {
    const u8 *from;
    __device__ u8 operator[](u64 i) const { return load_once(from + i); }
};
