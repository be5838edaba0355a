// LZ4 blocks → bytes. Format: lz4_Block_format.md of the LZ4 project.
//
// One block of threads decodes a stream: a team of warps copies the bytes of a batch of sequences while the first warp
// reads the next batch. One lane of that warp goes from token to token and decodes the sequences.

#include "decode.cuh"
#include "execute.cuh"

constexpr u32 TILE = 4096;  // stored bytes of the stream in shared memory
constexpr u32 MAX_RUN = 1u << 30;  // longer runs exceed any chunk; sums stay below 2^32

struct Batch {
    Sequence sequence[BATCH];
    int state;  // 0: more follow; 1: the last batch; -1: broken
};

struct Reader {
    const u8 *from;
    u32 end, pos;  // size of the stream, and position of the next sequence
    u8 *tile;
    u32 tile_begin, last_match;  // position of the first byte in `tile`, and length of the last match
    __device__ u32 byte(u32 p) const { return p - tile_begin < TILE ? tile[p - tile_begin] : from[p]; }
};

__device__ inline void load_tile(Reader &in) {
    in.tile_begin = in.pos;
    const u32 n = in.end - in.pos < TILE ? in.end - in.pos : TILE;
    sync_warp();
#pragma unroll 8
    for (u32 k = lane_id(); k < n; k += LANES) in.tile[k] = in.from[in.pos + k];
    sync_warp();
}

// Add the further bytes of a length of 15 or more. Returns false if the stream ends within them, or the length is too
// long.
__device__ inline bool extend_length(const Reader &in, u32 &p, u32 &length) {
    for (u32 b = 255; b == 255;) {
        if (p >= in.end || length > MAX_RUN) return false;
        length += b = in.byte(p++);
    }
    return true;
}

// Read the sequence at `p`, and advance `p` to the next sequence; false if the sequence is invalid.
__device__ inline bool read_sequence(Reader &in, u32 &p, Sequence &sequence) {
    const bool first = p == 0;
    const u32 token = in.byte(p++);
    sequence.literals = token >> 4;
    if (sequence.literals == 15 && !extend_length(in, p, sequence.literals)) return false;
    sequence.at = p;
    if (sequence.literals > in.end - p) return false;
    p += sequence.literals;
    sequence.match = sequence.offset = 0;
    // The last sequence has no match. The reference decoder requires at least 5 literals in it, and the last match to
    // begin at least 12 bytes before the end.
    if (p == in.end) return first || (sequence.literals >= 5 && sequence.literals + in.last_match >= 12);
    if (in.end - p < 8) return false;
    sequence.offset = in.byte(p) | in.byte(p + 1) << 8;
    p += 2;
    sequence.match = token & 15;
    if (sequence.match == 15 && !extend_length(in, p, sequence.match)) return false;
    sequence.match += 4;
    in.last_match = sequence.match;
    return p < in.end;
}

// Fill a batch with sequences. By the first warp.
__device__ inline void read_batch(Reader &in, Batch &batch) {
    if (in.pos + TILE / 2 > in.tile_begin + TILE || in.pos < in.tile_begin) load_tile(in);
    for (int i = lane_id(); i < BATCH; i += LANES) batch.sequence[i] = Sequence{0, 0, 0, 0};
    sync_warp();
    u32 pos = in.pos;
    if (lane_id() == 0) {
        int state = 0;
        for (int i = 0; i < BATCH && state == 0; ++i) {
            if (pos >= in.end) state = 1;
            else if (!read_sequence(in, pos, batch.sequence[i])) state = -1;
        }
        batch.state = state ? state : pos >= in.end;
    }
    in.pos = from_lane(pos, 0);
    sync_warp();
}

// Check and skip the 4 bytes with the decoded size that numcodecs writes before a block.
extern "C" __global__ void lz4_heads(const u8 *__restrict__ arena, Stream *streams, i64 count, int *status) {
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 number = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; number < count; number += step) {
        Stream &stream = streams[number];
        if (stream.source_nbytes < 4) {
            stream.codec = NOTHING;
            fail(status, stream.chunk, TRUNCATED);
        } else if (load32(arena + stream.source) != stream.target_nbytes) {
            stream.codec = NOTHING;
            fail(status, stream.chunk, WRONG_SIZE);
        } else {
            stream.source += 4;
            stream.source_nbytes -= 4;
        }
    }
}

extern "C" __global__ void __launch_bounds__(BEHIND_READER, 4)
    lz4(const u8 *__restrict__ arena, u8 *target, const Stream *__restrict__ streams, const i64 *__restrict__ count,
        i64 capacity, i64 ring_size, int *status) {
    extern __shared__ __align__(16) u8 ring[];
    __shared__ Links links;
    __shared__ __align__(16) u8 tile[TILE];
    __shared__ Batch batches[2];
    const bool reads = READER_WARP, copies = IN_TEAM;
    const i64 n = *count < capacity ? *count : capacity;
    for (i64 number = blockIdx.x; number < n; number += gridDim.x) {
        const Stream stream = streams[number];
        if (stream.codec != LZ4) continue;
        if (stream.source_nbytes > MAX_RUN || stream.target_nbytes > MAX_RUN) {
            if (threadIdx.x == 0) fail(status, stream.chunk, UNSUPPORTED);
            continue;
        }
        Reader in{arena + stream.source, static_cast<u32>(stream.source_nbytes), 0, tile, 0, 0};
        Sink out = open_sink(ring, ring_size, links, TEAM_RANK, target + stream.target, stream.target_nbytes);
        const Bytes literals{in.from};
        bool good = true;
        if (reads) load_tile(in);
        for (int round = 0, last = -1;; ++round) {
            if (copies && round > 0) {
                const Batch &batch = batches[(round - 1) & 1];
                good = batch.state >= 0 && execute(out, literals, batch.sequence + 2 * lane_id());
            }
            if (last >= 0 && round > last) break;
            if (reads) read_batch(in, batches[round & 1]);
            if (block_any(!good)) break;
            if (last < 0 && batches[round & 1].state != 0) last = round;
        }
        if (copies) {
            const bool whole = good && close_sink(out);
            if (!whole && out.rank == 0) fail(status, stream.chunk, good ? WRONG_SIZE : BAD_DATA);
        }
        sync_block();
    }
}
