// Philox4x32-10, as linumpy.sampling.generator computes it: the same numbers on the host and on a device.
typedef unsigned long long uint64;

// What a counter is for, in its third word, so that no two uses share numbers.
enum Use {
    USE_IID,
    USE_STRATIFIED,
    USE_STRATA,
    USE_SOBOL,
    USE_WEIGHTED,
    USE_CELL,
    USE_SPLIT,
    USE_BINNED,
    USE_BINNED_CELL,
    USE_BINNED_POINT
};
constexpr int USE_SHIFT = 28;  // the bits below number nodes of a tree of counts

struct Key { unsigned low, high; };

__device__ __forceinline__ uint4 philox(unsigned c0, unsigned c1, unsigned c2, unsigned c3, Key key) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64 a = static_cast<uint64>(0xD2511F53u) * c0, b = static_cast<uint64>(0xCD9E8D57u) * c2;
        c0 = static_cast<unsigned>(b >> 32) ^ c1 ^ key.low;
        c2 = static_cast<unsigned>(a >> 32) ^ c3 ^ key.high;
        c1 = static_cast<unsigned>(b);
        c3 = static_cast<unsigned>(a);
        key.low += 0x9E3779B9u;
        key.high += 0xBB67AE85u;
    }
    return uint4{c0, c1, c2, c3};
}

__device__ __forceinline__ uint4 numbers(uint64 index, unsigned use, unsigned last, Key key) {
    return philox(static_cast<unsigned>(index), static_cast<unsigned>(index >> 32), use << USE_SHIFT, last, key);
}

// Coordinates are multiples of 2^-24, which float32 holds.
__device__ __forceinline__ float coordinate(unsigned bits24) {
    return static_cast<float>(bits24) * 5.9604644775390625e-8f;
}
