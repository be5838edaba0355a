// Boxes of the unit cube, halved axis by axis, and the samples in each: as linumpy.sampling.boxes. Behind philox.cuh.
typedef long long int64;

struct Boxes {
    uint64 window;   // number of the first sample of the window: part of every counter
    int64 total;     // samples of the window
    uint64 axes;     // two bits for each halving, the first one lowest: 0 is z, 1 is y, 2 is x
    Key key;
    int levels;      // halvings of the cube
    int top;         // of these, those that `split` makes
};
static_assert(sizeof(Boxes) == 40, "linumpy.sampling.boxes writes 40 bytes");

constexpr int FIELD_BITS = 21;  // of a coordinate: three of them are two words of the generator

// Which box along each axis, and how often each axis is halved.
__device__ __forceinline__ void place_of(const Boxes &how, int box, unsigned *at, int *halved) {
    at[0] = at[1] = at[2] = 0;
    halved[0] = halved[1] = halved[2] = 0;
    for (int level = 0; level < how.levels; ++level) {
        const int axis = static_cast<int>(how.axes >> 2 * level & 3);
        const unsigned bit = box >> (how.levels - 1 - level) & 1;
#pragma unroll
        for (int a = 0; a < 3; ++a)
            if (axis == a) {
                at[a] = at[a] << 1 | bit;
                ++halved[a];
            }
    }
}

// The two words of a sample, by its position in the window. Samples 32 apart share a call of the generator.
__device__ __forceinline__ uint64 fields_of(const uint4 &words, bool second) {
    return static_cast<uint64>(second ? words.z : words.x) << 32 | (second ? words.w : words.y);
}
__device__ __forceinline__ unsigned pair_of(uint64 position) {
    return static_cast<unsigned>(position >> 6 << 5 | (position & 31));
}

// `axis` 0 is z. Twenty-four bits in all: those of the box, then as many of the generator's.
__device__ __forceinline__ unsigned bits_in_box(uint64 fields, unsigned at, int halved, int axis) {
    const unsigned field = static_cast<unsigned>(fields >> (2 - axis) * FIELD_BITS) & ((1u << FIELD_BITS) - 1);
    return at << (24 - halved) | field >> (halved - (24 - FIELD_BITS));
}
