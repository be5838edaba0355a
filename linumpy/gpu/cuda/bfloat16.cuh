// Numbers of bfloat16, by their bits.
struct bfloat16_bits { unsigned short bits; };

__device__ __forceinline__ float as_float(bfloat16_bits b) { return __int_as_float(b.bits << 16); }

// Halves go to even, and NaN stays NaN.
__device__ __forceinline__ bfloat16_bits as_bfloat16(float f) {
    const unsigned bits = static_cast<unsigned>(__float_as_int(f));
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const unsigned rounded = is_nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return bfloat16_bits{static_cast<unsigned short>(rounded)};
}
