// Philox4x32-10: the same numbers as linumpy.sampling.coordinates.generator gives on the host.
#include "philox4x32.cuh"

// Purpose of random numbers, in the third word of the counter, so that no two uses share numbers.
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
constexpr int USE_SHIFT = 28;  // the bits below are 0, a node of a tree of counts, or the highest bits of a position

__device__ __forceinline__ uint4 numbers(uint64 index, unsigned use, unsigned last, Key key) {
    return philox(static_cast<unsigned>(index), static_cast<unsigned>(index >> 32), use << USE_SHIFT, last, key);
}

// Coordinates are multiples of 2^-24, which float32 represents exactly.
__device__ __forceinline__ float coordinate(unsigned bits24) {
    return static_cast<float>(bits24) * 5.9604644775390625e-8f;
}
