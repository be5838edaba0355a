// Execute LZ77 sequences, BATCH at a time, by a team of warps: copy literals and bytes that are already decoded.
//
// The latest decoded bytes are in a ring in shared memory, where a byte can be read as soon as it is written; older
// bytes are read from the output. A sequence is `literals` bytes from a source, then `match` bytes that are copied from
// `offset` bytes before; a match may overlap itself. Every warp of the team holds the same sequences, two in each lane.
//
// A thread computes a byte, whichever sequence the byte belongs to, so that long and short sequences cost the same.
// Bytes are processed in groups, one byte for each thread of the team. `execute` loads the bytes of a group from global
// memory before it finishes the previous group, which is called pending, so that memory accesses overlap work.

constexpr u32 MAX_BATCH_NBYTES = 4096;  // sequences of larger batches are executed one by one
constexpr int BATCH = 2 * LANES;
constexpr int VALUE = -1;  // in place of a link: the value of the byte is known

typedef short Links[TEAM];

struct Sequence {
    u32 literals, match, offset;
    u32 at;  // index of the first literal in the source
};

// The byte of a thread in the pending group.
struct Pending {
    int group;  // bytes of the group; 0: none is pending
    u32 offset_in_ring;  // of the group in the ring
    u8 value;
    bool mine;  // whether the thread has a byte in the group
    int link;  // index in the group of the byte that is copied, or VALUE
    int source;  // index in the ring of the byte that is copied; -1: use `value`, or follow the link
};

// The output of a stream. All threads of the team hold the same values, except `rank`.
struct Sink {
    u8 *ring, *out;
    u64 pos, flushed, size;  // bytes that are decoded, bytes that are written to the output, and all bytes
    u32 phase;  // offset of `out` in a 16-byte word, so that words of the ring are words of the output
    u32 ring_size;  // a power of two
    short *links;  // in shared memory: for each byte of a group, the index of the byte that it is a copy of
    u32 rank;  // of the thread in the team
    Pending pending;
};

__device__ inline Sink open_sink(u8 *ring, i64 ring_size, short *links, u32 rank, u8 *out, u64 size) {
    const u32 phase = static_cast<u32>(reinterpret_cast<u64>(out) & 15);
    return Sink{ring, out, 0, 0, size, phase, static_cast<u32>(ring_size), links, rank, {}};
}

__device__ inline u32 ring_offset(const Sink &s, u64 pos) {
    return (static_cast<u32>(pos) + s.phase) & (s.ring_size - 1);
}
__device__ inline u8 *in_ring(const Sink &s, u64 pos) { return s.ring + ring_offset(s, pos); }

// The decoded byte at a position: from the ring if the position is `low` or higher, else from the output.
__device__ inline u8 decoded(const Sink &s, u64 pos, u64 low) { return pos >= low ? *in_ring(s, pos) : s.out[pos]; }

// The lowest position that the ring still holds when bytes up to `end` are written.
__device__ inline u64 ring_low(const Sink &s, u64 end) { return end > s.ring_size ? end - s.ring_size : 0; }

// Write bytes of the ring to the output: all bytes, or only whole words of 16 bytes.
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

// Copy values along the links between bytes of a group, by pointer doubling.
__device__ inline void follow_links(const Sink &s, u32 group_offset, int link) {
    const u32 mask = s.ring_size - 1;
    while (any_in_team(link != VALUE)) {
        const int linked = link == VALUE ? 0 : link;
        const int next = s.links[linked];
        const u8 value = s.ring[(group_offset + linked) & mask];
        sync_team();
        if (link == VALUE) continue;
        if (next == VALUE) s.ring[(group_offset + s.rank) & mask] = value;
        s.links[s.rank] = static_cast<short>(next);
        link = next;
    }
}

// Write the pending group into the ring, which already holds all groups before it.
__device__ inline void finish(Sink &s) {
    const Pending &p = s.pending;
    if (p.group == 0) return;
    const u32 mask = s.ring_size - 1;
    const u8 value = p.source >= 0 ? s.ring[p.source] : p.value;
    if (p.mine) s.ring[(p.offset_in_ring + s.rank) & mask] = value;
    s.links[s.rank] = static_cast<short>(p.link);
    follow_links(s, p.offset_in_ring, p.link);
    s.pending.group = 0;
}

// Copy `n` literals, in steps that fit the ring. Returns false if they exceed the output.
template <class Source> __device__ bool put_literals(Sink &s, const Source &source, u64 at, u64 n) {
    if (n > s.size - s.pos) return false;
    finish(s);
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

// Copy a match, in steps that fit the ring. No group may be pending. Returns false if the match is out of bounds.
__device__ inline bool put_match(Sink &s, u32 offset, u64 n) {
    if (n > s.size - s.pos || (n && (offset == 0 || offset > s.pos))) return false;
    while (n) {
        const u32 step = n < s.ring_size / 4 ? static_cast<u32>(n) : s.ring_size / 4;
        const u64 low = ring_low(s, s.pos + step);
        for (u32 k = s.rank; k < step; k += TEAM) {
            const u32 back = offset >= step ? k : k % offset;  // a match that overlaps itself repeats its first bytes
            *in_ring(s, s.pos + k) = decoded(s, s.pos - offset + back, low);
        }
        sync_team();
        s.pos += step;
        n -= step;
        flush_some(s);
    }
    return true;
}

// Execute sequences one by one: for batches that are longer than a fourth of the ring or than MAX_BATCH_NBYTES, or in
// which an empty sequence precedes others.
template <class Source> __device__ bool execute_singly(Sink &s, const Source &source, const Sequence *mine) {
    finish(s);
    for (int i = 0; i < BATCH; ++i) {
        const Sequence &sequence = mine[i & 1];
        if (!put_literals(s, source, from_lane(sequence.at, i / 2), from_lane(sequence.literals, i / 2))) return false;
        if (!put_match(s, from_lane(sequence.offset, i / 2), from_lane(sequence.match, i / 2))) return false;
    }
    return true;
}

// The value of sequence `owner`: lane owner / 2 holds it in `even` or `odd`.
__device__ inline u32 from_owner(u32 even, u32 odd, int owner) {
    const u32 a = from_lane(even, owner >> 1), b = from_lane(odd, owner >> 1);
    return owner & 1 ? b : a;
}

// Whether an empty sequence precedes a sequence with bytes. `execute` finds the sequence of a byte by counting
// sequences, and does not allow that.
__device__ inline bool has_gaps(u32 even, u32 odd) {
    const u32 a = vote(even > 0), b = vote(odd > 0);
    return (a & (a + 1)) || (b & (b + 1)) || (b & ~a) || ((a >> 1) & ~b);
}

// Execute the sequences of all lanes in order, `mine[0]` before `mine[1]`; the last group stays pending. Returns false
// if a sequence is out of bounds.
template <class Source> __device__ bool execute(Sink &s, const Source &source, const Sequence *mine) {
    const u32 first = mine[0].literals + mine[0].match, second = mine[1].literals + mine[1].match;
    const u32 longest = mine[0].literals | mine[0].match | mine[1].literals | mine[1].match;
    if (vote(longest >= MAX_BATCH_NBYTES) || has_gaps(first, second)) return execute_singly(s, source, mine);
    const u32 sum = running_sum(first + second), batch = from_lane(sum, LANES - 1);
    if (batch > MAX_BATCH_NBYTES || batch > s.ring_size / 4) return execute_singly(s, source, mine);
    const u32 begin[2] = {first ? sum - second - first : ~0u, second ? sum - second : ~0u};
    bool wrong = false;
    u32 packed[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        wrong |= mine[k].match && (mine[k].offset == 0 || mine[k].offset > s.pos + begin[k] + mine[k].literals);
        packed[k] = (begin[k] & 0xffff) | mine[k].literals << 16;
    }
    if (vote(wrong) || batch > s.size - s.pos) return false;
    const u32 mask = s.ring_size - 1, offset_in_ring = ring_offset(s, s.pos);
    const u64 low = ring_low(s, s.pos + batch);
    for (u32 group = 0; group < batch; group += TEAM) {
        const u32 row = group + s.rank / LANES * LANES, byte = group + s.rank;
        const u32 heads = any_of((begin[0] - row < LANES ? 1u << (begin[0] - row) : 0) |
                                 (begin[1] - row < LANES ? 1u << (begin[1] - row) : 0));
        const u32 before = bits_set(vote(begin[0] < row)) + bits_set(vote(begin[1] < row));
        const int owner = static_cast<int>(before + bits_set(heads & ((2u << lane_id()) - 1))) - 1;
        const u32 span = from_owner(packed[0], packed[1], owner), at = from_owner(mine[0].at, mine[1].at, owner);
        const u32 offset = from_owner(mine[0].offset, mine[1].offset, owner);
        const u32 within = byte - (span & 0xffff), literals = span >> 16;
        Pending next{static_cast<int>(TEAM), (offset_in_ring + group) & mask, 0, byte < batch, VALUE, -1};
        if (next.mine && within < literals) {
            next.value = source[at + within];
        } else if (next.mine) {
            // A match that overlaps itself repeats its first `offset` bytes, from which chains of links are shorter.
            const u32 k = within - literals, back = k < offset ? offset : k - remainder_of(k, offset) + offset;
            const u64 from = s.pos + byte - back;
            if (back <= byte - group) next.link = static_cast<int>(byte - back - group);
            else if (from >= low) next.source = static_cast<int>((offset_in_ring + byte - back) & mask);
            else next.value = s.out[from];
        }
        finish(s);
        s.pending = next;
    }
    s.pos += batch;
    if (s.pos - s.flushed >= s.ring_size / 4) {
        finish(s);
        flush(s, false);
    }
    return true;
}

// Write the remaining bytes; returns whether the stream has the required length.
__device__ inline bool close_sink(Sink &s) {
    finish(s);
    flush(s, true);
    return s.pos == s.size;
}

// Literals in global memory.
struct Bytes {
    const u8 *from;
    __device__ u8 operator[](u64 i) const { return load_once(from + i); }
};
