// Shared by the decoder and the encoder of Blosc frames: flags of the header, and the transposition of bits.

#include "decode.cuh"

constexpr u32 BLOSC_HEAD = 16;
enum BloscFlag { BYTE_SHUFFLE = 1, MEMCPYED = 2, BIT_SHUFFLE = 4, RESERVED = 8, NOT_SPLIT = 16 };

// Eight bytes as rows of an 8 × 8 matrix of bits, transposed: bit k of byte j becomes bit j of byte k.
__device__ inline u64 transposed(u64 x) {
    u64 t = (x ^ (x >> 7)) & 0x00aa00aa00aa00aaull;
    x ^= t ^ (t << 7);
    t = (x ^ (x >> 14)) & 0x0000cccc0000ccccull;
    x ^= t ^ (t << 14);
    t = (x ^ (x >> 28)) & 0x00000000f0f0f0f0ull;
    return x ^ t ^ (t << 28);
}
