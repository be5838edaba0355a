// Records, errors and warp primitives that all decoders share.
//
// A stream is a run of stored bytes that is decoded independently. Stored bytes are never trusted: every read is
// checked against the end of the stream and every write against the end of the output. Broken bytes thus give a status
// and never a memory fault, after which the process could not use the GPU any more. The decoders are as strict as the
// reference decoders.
//
// Terms: the arena holds the stored bytes of a slab. A team is the warps of a block that copy decoded bytes; where a
// "reader" is mentioned, one more warp, the first of the block, reads the sequences of a stream for the team.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int LANES = 32;  // of a warp
constexpr unsigned FULL = 0xffffffffu;
__device__ inline int lane_id() { return threadIdx.x & (LANES - 1); }
__device__ inline int warp_id() { return threadIdx.x / LANES; }
__device__ inline u32 vote(bool p) { return __ballot_sync(FULL, p); }
// The lanes that hold the same value.
__device__ inline u32 matching(u32 v) { return __match_any_sync(FULL, v); }
template <class T> __device__ inline T from_lane(T v, int lane) { return __shfl_sync(FULL, v, lane); }
template <class T> __device__ inline T from_below(T v, int by) { return __shfl_up_sync(FULL, v, by); }
__device__ inline void sync_warp() { __syncwarp(); }
__device__ inline void sync_block() { __syncthreads(); }
__device__ inline bool block_any(bool p) { return __syncthreads_or(p); }
// Load memory that no thread writes during the launch.
template <class T> __device__ inline T load_once(const T *p) { return __ldg(p); }
// The lower half of eight bytes shifted to the right by `shift` modulo 32.
__device__ inline u32 funnel(u32 low, u32 high, u32 shift) { return __funnelshift_r(low, high, shift); }
// Load memory that the block itself has written. Compilers might otherwise use a load for read-only memory.
template <class T> __device__ inline T load_written(const T *p) { return __ldca(p); }
// The upper half of eight bytes shifted to the left by `shift` modulo 32.
__device__ inline u32 funnel_left(u32 low, u32 high, u32 shift) { return __funnelshift_l(low, high, shift); }
// Shifts by 0 to 32; a shift by 32 gives 0.
__device__ inline u32 shifted_right(u32 v, u32 by) { return __funnelshift_rc(v, 0, by); }
__device__ inline u32 shifted_left(u32 v, u32 by) { return __funnelshift_lc(0, v, by); }
// The team has its own barrier, since another warp of the block may be doing other work.
#ifndef TEAM_WARPS
#define TEAM_WARPS 4
#endif
constexpr unsigned TEAM = TEAM_WARPS * LANES;
// a modulo b, for numbers below 2^12, for which float arithmetic is exact enough.
__device__ inline u32 remainder_of(u32 a, u32 b) { return a - __float2uint_rz(__fdividef(a + 0.5f, b)) * b; }
__device__ inline void sync_team() { asm volatile("barrier.cta.sync 1, %0;" ::"n"(TEAM_WARPS * LANES) : "memory"); }
__device__ inline bool any_in_team(bool p) {
    u32 any;
    asm volatile(
        "{ .reg .pred mine, all; setp.ne.u32 mine, %1, 0; barrier.cta.red.or.pred all, 1, %2, mine;"
        " selp.u32 %0, 1, 0, all; }"
        : "=r"(any)
        : "r"(static_cast<u32>(p)), "n"(TEAM_WARPS * LANES)
        : "memory");
    return any;
}
#define READER_WARP (warp_id() == 0)
#define IN_TEAM (warp_id() >= 1)
#define TEAM_RANK (threadIdx.x - LANES)
#define BEHIND_READER (LANES * (1 + TEAM_WARPS))
// The first two warps of a block.
__device__ inline void sync_pair() { asm volatile("barrier.cta.sync 2, %0;" ::"n"(2 * LANES) : "memory"); }
// The OR of the values of all lanes.
__device__ inline u32 any_of(u32 bits) {
#if __CUDA_ARCH__ >= 800
    return __reduce_or_sync(FULL, bits);
#else
    for (int by = 1; by < LANES; by *= 2) bits |= __shfl_xor_sync(FULL, bits, by);
    return bits;
#endif
}
__device__ inline int bits_set(u32 v) { return __popc(v); }
__device__ inline int leading_zeros(u32 v) { return __clz(v); }

// Encoding of a stream; the same numbers as CODES in linumpy/plan/decode/workspace.py. NOTHING: not decoded.
enum Codec { NOTHING = 0, STORED = 1, LZ4 = 2, ZSTD = 3, ZLIB = 4, GZIP = 5 };

// Why a chunk was not decoded. The host decodes such chunks again, and raises the error if they are broken.
enum Status {
    FINE = 0,
    TRUNCATED = 1,
    BAD_HEADER = 2,
    WRONG_SIZE = 3,
    BAD_DATA = 4,
    BAD_CHECKSUM = 5,
    UNSUPPORTED = 6,
    NO_SPACE = 7
};

struct Stream {
    i64 source;  // first byte in the arena of stored bytes
    i64 source_nbytes;
    i64 target;  // first byte in the buffer of decoded bytes
    i64 target_nbytes;  // decoded size
    int chunk;  // index of the chunk, and of its status
    int codec;
};

// The checksum of a decoded stream that the stream states.
enum CheckKind { NO_CHECK = 0, XXH64 = 1, ADLER32 = 2, CRC32 = 3, CRC32C = 4 };
struct Check {
    int kind;
    u32 expected;
};

// Set the status of a chunk; the first error stays.
__device__ inline void fail(int *status, int chunk, int error) { atomicCAS(status + chunk, FINE, error); }

__device__ inline u32 load16(const u8 *p) { return p[0] | static_cast<u32>(p[1]) << 8; }
__device__ inline u32 load32(const u8 *p) { return load16(p) | load16(p + 2) << 16; }
__device__ inline u64 load64(const u8 *p) { return load32(p) | static_cast<u64>(load32(p + 4)) << 32; }

// Sum of the values of this lane and all lanes below.
__device__ inline u32 running_sum(u32 v) {
#pragma unroll
    for (int by = 1; by < LANES; by *= 2) {
        const u32 other = from_below(v, by);
        if (lane_id() >= by) v += other;
    }
    return v;
}
