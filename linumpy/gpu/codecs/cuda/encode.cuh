// Shared by the encoders: copies between addresses of any alignment.
//
// An encoder first writes encoded parts of chunks to slots, each with the capacity for the longest possible part, and
// stores the sizes of the encoded chunks. `encoded_offsets` sums the sizes; then the parts are copied to the packed
// streams. The output depends only on the input, not on the order in which blocks of threads run.

#include "decode.cuh"

__device__ inline u64 address_of(const void *p) { return reinterpret_cast<u64>(p); }

// Number of zeros below the lowest set bit.
__device__ inline u32 zeros_below(u32 v) { return static_cast<u32>(bits_set((v & (0u - v)) - 1)); }

// Four bytes at any address. Reads only words that contain at least one of the four bytes.
__device__ inline u32 bytes_at(const u8 *p) {
    const u32 *word = reinterpret_cast<const u32 *>(address_of(p) & ~3ull);
    const u32 shift = 8 * static_cast<u32>(address_of(p) & 3);
    return funnel(load_once(word), shift ? load_once(word + 1) : 0, shift);
}

// Copy `n` bytes. By `threads` threads, whose ranks begin with 0. Writes no other bytes. May read bytes before the
// source, in its first word, but none after the source.
__device__ inline void copy_bytes(u8 *to, const u8 *from, u64 n, u32 rank, u32 threads) {
    const u64 to_word = (16 - (address_of(to) & 15)) & 15, head = to_word < n ? to_word : n;
    const u32 skew = static_cast<u32>(address_of(from + head) & 3), shift = 8 * skew;
    const u64 read_beyond = skew ? 4 - skew : 0;
    const u64 words = n - head > read_beyond ? (n - head - read_beyond) / 16 : 0;
    for (u64 i = rank; i < head; i += threads) to[i] = from[i];
    const u32 *source = reinterpret_cast<const u32 *>(from + head - skew);
    uint4 *target = reinterpret_cast<uint4 *>(to + head);
    if ((address_of(from + head) & 15) == 0) {
        for (u64 i = rank; i < words; i += threads) target[i] = reinterpret_cast<const uint4 *>(source)[i];
    } else {
        for (u64 i = rank; i < words; i += threads) {
            u32 w[5];
#pragma unroll
            for (int k = 0; k < 5; ++k) w[k] = k < 4 || skew ? source[4 * i + k] : 0;
            target[i] = uint4{funnel(w[0], w[1], shift), funnel(w[1], w[2], shift), funnel(w[2], w[3], shift),
                              funnel(w[3], w[4], shift)};
        }
    }
    for (u64 i = head + 16 * words + rank; i < n; i += threads) to[i] = from[i];
}

__device__ inline void store32(u8 *to, u32 v) {
    for (int k = 0; k < 4; ++k) to[k] = static_cast<u8>(v >> (8 * k));
}
