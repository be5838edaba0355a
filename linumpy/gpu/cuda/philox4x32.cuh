// The counter-based generator Philox4x32-10 (Salmon et al. 2011): four random words of a counter and a key.
typedef unsigned long long uint64;

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
