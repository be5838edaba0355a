// Carry out LZ77 sequences, LANES at a time, by one warp: copy literals, then matches from what is already there.
//
// The last RING decoded bytes are in shared memory, where a byte that was just written is read again at once; what
// lies further back is read from the result. A sequence is `literals` bytes from a source and then `match` bytes that
// stand `offset` bytes further back, which may overlap themselves.

constexpr u32 RING = 32768;
constexpr u32 SHORT_RUN = 48;  // bytes that a lane copies alone; more are copied by the whole warp

struct Sequence {
    u32 literals, match, offset;
    u32 at;  // of the first literal in the source
};

// Where a stream's bytes go. All lanes hold the same values.
struct Sink {
    u8 *ring, *out;
    u64 pos, flushed, size;
    u32 phase;  // of `out` in a 16-byte word, so that words of the ring are words of the result
};

__device__ inline Sink open_sink(u8 *ring, u8 *out, u64 size) {
    return Sink{ring, out, 0, 0, size, static_cast<u32>(reinterpret_cast<u64>(out) & 15)};
}

__device__ inline u8 *in_ring(const Sink &s, u64 pos) { return s.ring + ((pos + s.phase) & (RING - 1)); }

// A byte that is decoded already; from `low` on the ring has it.
__device__ inline u8 decoded(const Sink &s, u64 pos, u64 low) { return pos >= low ? *in_ring(s, pos) : s.out[pos]; }

__device__ inline u64 ring_low(u64 end) { return end > RING ? end - RING : 0; }

// Write to the result what the ring has; all of it, or whole words only.
__device__ inline void flush(Sink &s, bool all) {
    sync_warp();
    u8 *base = s.out - s.phase;
    const u64 begin = s.flushed + s.phase;
    const u64 end = all ? s.pos + s.phase : (s.pos + s.phase) & ~15ull;
    if (end <= begin) return;
    u64 word = (begin + 15) & ~15ull, last = end & ~15ull;
    if (word > end) word = end;
    if (last < word) last = word;
    for (u64 i = begin + lane_id(); i < word; i += LANES) base[i] = s.ring[i & (RING - 1)];
    for (u64 i = word + 16 * lane_id(); i < last; i += 16 * LANES)
        *reinterpret_cast<uint4 *>(base + i) = *reinterpret_cast<const uint4 *>(s.ring + (i & (RING - 1)));
    for (u64 i = last + lane_id(); i < end; i += LANES) base[i] = s.ring[i & (RING - 1)];
    s.flushed = end - s.phase;
    sync_warp();
}

__device__ inline void flush_some(Sink &s) {
    if (s.pos - s.flushed >= RING / 4) flush(s, false);
}

// Copy `n` literals by the whole warp, in steps that the ring can hold. False if they do not fit.
template <class Source> __device__ bool put_literals(Sink &s, const Source &source, u64 at, u64 n) {
    if (n > s.size - s.pos) return false;
    while (n) {
        const u32 step = n < RING / 4 ? static_cast<u32>(n) : RING / 4;
#pragma unroll 4
        for (u32 k = lane_id(); k < step; k += LANES) *in_ring(s, s.pos + k) = source[at + k];
        s.pos += step;
        at += step;
        n -= step;
        flush_some(s);
    }
    sync_warp();
    return true;
}

// Copy a match that begins at `start` by the whole warp; every byte before `start` is there.
__device__ inline void copy_match(const Sink &s, u64 start, u32 offset, u32 n, u64 low) {
    for (u32 k = lane_id(); k < n; k += LANES) {
        const u32 back = offset >= n ? k : k % offset;
        *in_ring(s, start + k) = decoded(s, start - offset + back, low);
    }
    sync_warp();
}

// The same in steps, for matches of any length.
__device__ inline bool put_match(Sink &s, u32 offset, u64 n) {
    if (n > s.size - s.pos || (n && (offset == 0 || offset > s.pos))) return false;
    while (n) {
        const u32 step = n < RING / 4 ? static_cast<u32>(n) : RING / 4;
        copy_match(s, s.pos, offset, step, ring_low(s.pos + step));
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

// Copy the matches of a batch. One whose bytes another pending one has yet to write waits for the next round.
__device__ inline void execute_matches(const Sink &s, u64 start, const Sequence &mine, u64 low) {
    const u64 from = start - mine.offset;
    const u64 until = mine.match < mine.offset ? from + mine.match : start;
    bool pending = mine.match > 0;
    for (u32 waiting = vote(pending); waiting; waiting = vote(pending)) {
        const u64 frontier = from_lane(start, lowest(waiting));  // every byte before it is there
        // Within its own literals, or before all that is pending.
        const bool ready = pending && (mine.offset <= mine.literals || until <= frontier || start == frontier);
        if (ready && mine.match <= SHORT_RUN) {
            u64 p = from;
            for (u32 k = 0; k < mine.match; ++k) {
                *in_ring(s, start + k) = decoded(s, p, low);
                if (++p == start) p = from;  // an overlapping match repeats its first `offset` bytes
            }
        }
        for (u32 longer = vote(ready && mine.match > SHORT_RUN); longer; longer &= longer - 1) {
            const int i = lowest(longer);
            copy_match(s, from_lane(start, i), from_lane(mine.offset, i), from_lane(mine.match, i), low);
        }
        pending &= !ready;
        sync_warp();
    }
}

// Carry out the sequences of all lanes in their order. False where one leaves its bounds.
template <class Source> __device__ bool execute(Sink &s, const Source &source, const Sequence &mine) {
    if (vote(mine.literals >= RING / 4 || mine.match >= RING / 4)) return execute_singly(s, source, mine);
    const u32 length = mine.literals + mine.match;
    const u32 sum = running_sum(length), batch = from_lane(sum, LANES - 1);
    if (batch >= RING / 2) return execute_singly(s, source, mine);
    const u64 literal = s.pos + sum - length, start = literal + mine.literals;
    const bool wrong = mine.match && (mine.offset == 0 || mine.offset > start);
    if (vote(wrong) || batch > s.size - s.pos) return false;
    if (mine.literals <= SHORT_RUN)
        for (u32 k = 0; k < mine.literals; ++k) *in_ring(s, literal + k) = source[mine.at + k];
    for (u32 longer = vote(mine.literals > SHORT_RUN); longer; longer &= longer - 1) {
        const int i = lowest(longer);
        const u64 to = from_lane(literal, i), at = from_lane(mine.at, i);
        const u32 n = from_lane(mine.literals, i);
        for (u32 k = lane_id(); k < n; k += LANES) *in_ring(s, to + k) = source[at + k];
    }
    sync_warp();
    execute_matches(s, start, mine, ring_low(s.pos + batch));
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
