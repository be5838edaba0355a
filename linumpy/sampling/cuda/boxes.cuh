// Boxes of the unit cube, halved axis by axis, and the samples in each box, as in linumpy.sampling.coordinates.boxes.
// Include after philox.cuh.
typedef long long int64;

struct Boxes {
    uint64 window;   // number of the window's first sample: part of every counter
    int64 total;     // number of samples of the window
    uint64 axes;     // two bits for each halving, the first halving lowest: 0 is z, 1 is y, 2 is x
    Key key;
    int levels;      // halvings of the cube
    int top;         // number of first halvings, at which several blocks split each node
};
static_assert(sizeof(Boxes) == 40, "linumpy.sampling.coordinates.boxes writes 40 bytes");

constexpr int FIELD_BITS = 21;  // random bits of a coordinate (a field): three take two words of the generator

// Indices of a box along each axis, and the number of halvings of each axis.
__device__ __forceinline__ void indices_of(const Boxes &boxes, int box, unsigned *at, int *halved) {
    at[0] = at[1] = at[2] = 0;
    halved[0] = halved[1] = halved[2] = 0;
    for (int level = 0; level < boxes.levels; ++level) {
        const int axis = static_cast<int>(boxes.axes >> 2 * level & 3);
        const unsigned bit = box >> (boxes.levels - 1 - level) & 1;
#pragma unroll
        for (int a = 0; a < 3; ++a)
            if (axis == a) {
                at[a] = at[a] << 1 | bit;
                ++halved[a];
            }
    }
}

// The last box that begins at or before a position.
__device__ __forceinline__ int64 box_of(int64 position, const int64 *__restrict__ starts, int levels) {
    int64 low = 0, high = 1ll << levels;
    while (high - low > 1) {
        const int64 middle = (low + high) / 2;
        if (starts[middle] <= position) low = middle;
        else high = middle;
    }
    return low;
}

// The call of the generator for a position in the window, which makes two neighbouring samples, and the field of a
// coordinate of the first or the second of these samples.
__device__ __forceinline__ unsigned call_of(uint64 position) { return static_cast<unsigned>(position >> 1); }
__device__ __forceinline__ unsigned field_of(const uint4 &words, bool second, int axis) {
    const unsigned high = second ? words.z : words.x, low = second ? words.w : words.y;
    return axis == 2 ? low : axis == 1 ? __funnelshift_r(low, high, FIELD_BITS) : high >> (2 * FIELD_BITS - 32);
}

// The index of the box gives the highest of a coordinate's 24 bits, and the field under this mask the other bits. Each
// axis is halved at least 24 - FIELD_BITS times.
__device__ __forceinline__ unsigned mask_of(int halved) { return (1u << (24 - halved)) - 1; }
__device__ __forceinline__ unsigned bits_in_box(unsigned field, unsigned at, int halved) {
    return at << (24 - halved) | field & mask_of(halved);
}
