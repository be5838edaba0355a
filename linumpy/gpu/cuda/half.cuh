// Numbers of half precision, by their bits. CuPy has the compiler flush numbers below 2^-126 to zero in arithmetic on
// floats and in conversions, but not in these functions. A double becomes half precision in one step, so that it is
// rounded once.
struct half_bits { unsigned short bits; };

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float as_float(half_bits h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h.bits));
    return f;
}
__device__ __forceinline__ half_bits as_half(float f) {
    half_bits h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(f));
    return h;
}
__device__ __forceinline__ half_bits as_half(double d) {
    half_bits h;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(h.bits) : "d"(d));
    return h;
}
#elif defined(ONE_LANE)  // the host build in the core
inline float as_float(half_bits h) { return lc::float_of_half(h.bits); }
#else  // a host compiler, in tests
inline float as_float(half_bits h) { return reinterpret_cast<const _Float16 &>(h); }
template <class F> inline half_bits as_half(F f) {
    const _Float16 h = static_cast<_Float16>(f);
    return reinterpret_cast<const half_bits &>(h);
}
#endif
