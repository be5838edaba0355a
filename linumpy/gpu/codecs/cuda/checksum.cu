// Checksums of decoded streams, and of stored or decoded chunks that end in a CRC-32C.
//
// CRC-32: IEEE 802.3; CRC-32C: RFC 3720; Adler-32: RFC 1950; XXH64: the specification of the xxHash project.

#include "decode.cuh"

constexpr int THREADS = 128;
constexpr u32 CRC32_POLYNOMIAL = 0xedb88320u, CRC32C_POLYNOMIAL = 0x82f63b78u;

struct Scratch {
    u32 table[4][256];
    u64 sum[2];
    u32 crc;
};

// Product of two polynomials modulo a third. The lowest bit of each is the coefficient of the highest power.
__device__ inline u32 times(u32 a, u32 b, u32 polynomial) {
    u32 product = 0;
    for (int k = 0; k < 32; ++k) {
        if (a & 0x80000000u) product ^= b;
        a <<= 1;
        b = b >> 1 ^ (b & 1 ? polynomial : 0);
    }
    return product;
}

// The CRC after `n` further zero bytes: the product with x to the power of 8 n.
__device__ inline u32 advanced(u32 crc, u64 n, u32 polynomial) {
    u32 power = 0x80000000u >> 8;
    for (; n; n >>= 1) {
        if (n & 1) crc = times(crc, power, polynomial);
        power = times(power, power, polynomial);
    }
    return crc;
}

// CRC of contiguous bytes. By a block of threads; each thread takes one part.
__device__ inline u32 crc_of(Scratch &s, const u8 *p, u64 n, u32 polynomial) {
    for (u32 k = threadIdx.x; k < 256; k += blockDim.x) {
        u32 v = k;
        for (int bit = 0; bit < 8; ++bit) v = v >> 1 ^ (v & 1 ? polynomial : 0);
        s.table[0][k] = v;
    }
    if (threadIdx.x == 0) s.crc = 0;
    sync_block();
    for (int row = 1; row < 4; ++row) {
        for (u32 k = threadIdx.x; k < 256; k += blockDim.x)
            s.table[row][k] = s.table[row - 1][k] >> 8 ^ s.table[0][s.table[row - 1][k] & 255];
        sync_block();
    }
    const u64 part = (n + blockDim.x - 1) / blockDim.x;
    const u64 begin = part * threadIdx.x < n ? part * threadIdx.x : n, end = begin + part < n ? begin + part : n;
    u32 crc = begin == 0 ? 0xffffffffu : 0;
    u64 i = begin;
    for (; i + 4 <= end; i += 4) {
        crc ^= load32(p + i);
        crc = s.table[3][crc & 255] ^ s.table[2][crc >> 8 & 255] ^ s.table[1][crc >> 16 & 255] ^ s.table[0][crc >> 24];
    }
    for (; i < end; ++i) crc = crc >> 8 ^ s.table[0][(crc ^ p[i]) & 255];
    // Empty parts contribute nothing, except the first part, which holds the initial value.
    if (begin < end || threadIdx.x == 0) atomicXor(&s.crc, advanced(crc, n - end, polynomial));
    sync_block();
    return ~s.crc;
}

// Adler-32 of contiguous bytes. By a block of threads.
__device__ inline u32 adler_of(Scratch &s, const u8 *p, u64 n) {
    constexpr u32 MODULUS = 65521;
    if (threadIdx.x < 2) s.sum[threadIdx.x] = 0;
    sync_block();
    u64 bytes = 0, weighted = 0;
    for (u64 i = threadIdx.x; i < n; i += blockDim.x) {
        bytes += p[i];
        weighted += (n - i) % MODULUS * p[i];
    }
    atomicAdd(&s.sum[0], bytes % MODULUS);
    atomicAdd(&s.sum[1], weighted % MODULUS);
    sync_block();
    const u32 a = static_cast<u32>((1 + s.sum[0]) % MODULUS), b = static_cast<u32>((n % MODULUS + s.sum[1]) % MODULUS);
    sync_block();
    return b << 16 | a;
}

constexpr u64 PRIME_1 = 0x9e3779b185ebca87ull, PRIME_2 = 0xc2b2ae3d27d4eb4full, PRIME_3 = 0x165667b19e3779f9ull,
              PRIME_4 = 0x85ebca77c2b2ae63ull, PRIME_5 = 0x27d4eb2f165667c5ull;

__device__ inline u64 rotated(u64 v, int by) { return v << by | v >> (64 - by); }
__device__ inline u64 mixed(u64 sum, u64 word) { return rotated(sum + word * PRIME_2, 31) * PRIME_1; }

// The low half of XXH64 of contiguous bytes. Four threads follow one sum each, then every thread combines the sums:
// each step depends on the previous step.
__device__ inline u32 xxh_of(u64 *sums, const u8 *p, u64 n) {
    const u64 stripes = n / 32;
    const bool aligned = (reinterpret_cast<u64>(p) & 7) == 0;
    const u64 start[4] = {PRIME_1 + PRIME_2, PRIME_2, 0, 0 - PRIME_1};
    for (u32 k = threadIdx.x; k < 4; k += blockDim.x) {
        u64 sum = start[k];
        const u8 *q = p + 8 * k;
        u64 i = 0;
        constexpr int AHEAD = 16;  // words in flight: a load takes longer than a step
        u64 next[AHEAD] = {};
        const auto fetch = [&](u64 from) {
#pragma unroll
            for (int j = 0; j < AHEAD; ++j) next[j] = load_once(reinterpret_cast<const u64 *>(q + 32 * (from + j)));
        };
        if (aligned && AHEAD <= stripes) fetch(0);
        for (; aligned && i + AHEAD <= stripes; i += AHEAD) {
            u64 word[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; ++j) word[j] = next[j];
            if (i + 2 * AHEAD <= stripes) fetch(i + AHEAD);
#pragma unroll
            for (int j = 0; j < AHEAD; ++j) sum = mixed(sum, word[j]);
        }
        for (; i < stripes; ++i) sum = mixed(sum, load64(q + 32 * i));
        sums[k] = sum;
    }
    sync_block();
    u64 hash = PRIME_5;
    if (stripes) {
        hash = rotated(sums[0], 1) + rotated(sums[1], 7) + rotated(sums[2], 12) + rotated(sums[3], 18);
        for (int k = 0; k < 4; ++k) hash = (hash ^ mixed(0, sums[k])) * PRIME_1 + PRIME_4;
    }
    hash += n;
    u64 i = 32 * stripes;
    for (; i + 8 <= n; i += 8) hash = rotated(hash ^ mixed(0, load64(p + i)), 27) * PRIME_1 + PRIME_4;
    if (i + 4 <= n) {
        hash = rotated(hash ^ load32(p + i) * PRIME_1, 23) * PRIME_2 + PRIME_3;
        i += 4;
    }
    for (; i < n; ++i) hash = rotated(hash ^ p[i] * PRIME_5, 11) * PRIME_1;
    hash = (hash ^ hash >> 33) * PRIME_2;
    hash = (hash ^ hash >> 29) * PRIME_3;
    sync_block();
    return static_cast<u32>(hash ^ hash >> 32);
}

// Compare the checksums that streams state with those of the decoded bytes.
extern "C" __global__ void __launch_bounds__(THREADS)
    check_streams(const u8 *__restrict__ target, const Stream *__restrict__ streams, const i64 *__restrict__ count,
                  i64 capacity, const Check *__restrict__ checks, int *status) {
    __shared__ Scratch scratch;
    __shared__ u64 sums[4];
    const i64 n = *count < capacity ? *count : capacity;
    for (i64 number = blockIdx.x; number < n; number += gridDim.x) {
        const Stream stream = streams[number];
        if (stream.codec != ZSTD && stream.codec != ZLIB && stream.codec != GZIP) continue;
        const Check check = checks[number];
        // Another block may set the status of the chunk meanwhile, but all threads must take the same branch.
        if (check.kind == NO_CHECK || block_any(status[stream.chunk] != FINE)) continue;
        const u8 *p = target + stream.target;
        const u64 size = static_cast<u64>(stream.target_nbytes);
        const u32 computed = check.kind == XXH64     ? xxh_of(sums, p, size)
                             : check.kind == ADLER32 ? adler_of(scratch, p, size)
                                                     : crc_of(scratch, p, size, CRC32_POLYNOMIAL);
        sync_block();
        if (threadIdx.x == 0 && computed != check.expected) fail(status, stream.chunk, BAD_CHECKSUM);
    }
}

// Check chunks that end in the CRC-32C of the preceding bytes: the stored chunk if `at_source`, else the decoded chunk.
extern "C" __global__ void __launch_bounds__(THREADS)
    check_crc32c(const u8 *__restrict__ bytes, const Stream *__restrict__ chunks, i64 count, i64 at_source,
                 int *status) {
    __shared__ Scratch scratch;
    for (i64 number = blockIdx.x; number < count; number += gridDim.x) {
        const Stream chunk = chunks[number];
        const u8 *p = bytes + (at_source ? chunk.source : chunk.target);
        // `source_nbytes` of a record excludes the checksum, `target_nbytes` includes it.
        const i64 size = at_source ? chunk.source_nbytes : chunk.target_nbytes - 4;
        if (size < 0) {
            if (threadIdx.x == 0) fail(status, chunk.chunk, TRUNCATED);
            continue;
        }
        if (!at_source && status[chunk.chunk] != FINE) continue;
        const u32 computed = crc_of(scratch, p, static_cast<u64>(size), CRC32C_POLYNOMIAL);
        sync_block();
        if (threadIdx.x == 0 && computed != load32(p + size)) fail(status, chunk.chunk, BAD_CHECKSUM);
    }
}
