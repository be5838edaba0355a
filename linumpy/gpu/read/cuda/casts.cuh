// Casts between types of elements, as NumPy's astype. linumpy.gpu.kernels inserts headers by name.
#include "half.cuh"
#include "bfloat16.cuh"

struct bool_bits { unsigned char bits; };
template <class R> struct alignas(2 * sizeof(R)) complex_of { R re, im; };

// Between floats and doubles, without flushing numbers below 2^-126: see half.cuh.
#ifdef __CUDA_ARCH__
__device__ inline float as_single(double d) {
    float f;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(f) : "d"(d));
    return f;
}
__device__ inline double as_double(float f) {
    double d;
    asm("cvt.f64.f32 %0, %1;" : "=d"(d) : "f"(f));
    return d;
}
#else  // a host compiler, in tests
inline float as_single(double d) { return static_cast<float>(d); }
inline double as_double(float f) { return f; }
#endif

template <class T> struct Limits {
    static constexpr bool is_signed = T(-1) < T(0);
    static constexpr T high = is_signed ? T((1ull << (8 * sizeof(T) - 1)) - 1) : T(~0ull);
    static constexpr T low = is_signed ? T(-high - 1) : T(0);
};
// Between integers, and from integers to floats.
template <class T, class S> struct Plain {
    static __device__ T of(S v) { return static_cast<T>(v); }
};
// From floats to integers, towards zero. Casts that C++ leaves undefined are the same on every device and on the host.
template <class T, class F> struct Truncated {
    static __device__ T of(F v) {
        if (v != v) return T(0);
        if (v <= static_cast<F>(Limits<T>::low)) return Limits<T>::low;
        if (v >= static_cast<F>(Limits<T>::high)) return Limits<T>::high;
        return static_cast<T>(v);
    }
};
template <class T> struct Plain<T, float> : Truncated<T, float> {};
template <class T> struct Plain<T, double> : Truncated<T, double> {};
template <> struct Plain<float, float> {
    static __device__ float of(float v) { return v; }
};
template <> struct Plain<double, double> {
    static __device__ double of(double v) { return v; }
};

// As NumPy's astype: integers keep their low bits, floats are truncated, anything but zero (NaN too) is true, a real
// number becomes complex with imaginary part 0. Casts that astype leaves undefined: floats beyond the range of an
// integer type become its nearest limit, and NaN becomes 0.
template <class T, class S> struct Cast {
    static __device__ T of(S v) { return Plain<T, S>::of(v); }
};
template <> struct Cast<float, double> {
    static __device__ float of(double v) { return as_single(v); }
};
template <> struct Cast<double, float> {
    static __device__ double of(float v) { return as_double(v); }
};
template <class T> struct Cast<T, half_bits> {
    static __device__ T of(half_bits v) { return Cast<T, float>::of(as_float(v)); }
};
template <class T> struct Cast<T, bool_bits> {
    static __device__ T of(bool_bits v) { return Cast<T, unsigned char>::of(v.bits != 0); }
};
template <class S> struct Cast<half_bits, S> {
    static __device__ half_bits of(S v) { return as_half(static_cast<float>(v)); }
};
template <> struct Cast<half_bits, double> {
    static __device__ half_bits of(double v) { return as_half(v); }
};
template <> struct Cast<half_bits, half_bits> {
    static __device__ half_bits of(half_bits v) { return v; }
};
template <> struct Cast<half_bits, bool_bits> {
    static __device__ half_bits of(bool_bits v) { return as_half(v.bits != 0 ? 1.0f : 0.0f); }
};
template <class S> struct Cast<bool_bits, S> {
    static __device__ bool_bits of(S v) { return bool_bits{static_cast<unsigned char>(v != S(0))}; }
};
template <> struct Cast<bool_bits, float> {
    static __device__ bool_bits of(float v) {
        return bool_bits{static_cast<unsigned char>((__float_as_int(v) << 1) != 0)};
    }
};
template <> struct Cast<bool_bits, half_bits> {
    static __device__ bool_bits of(half_bits v) { return Cast<bool_bits, float>::of(as_float(v)); }
};
template <> struct Cast<bool_bits, bool_bits> {
    static __device__ bool_bits of(bool_bits v) { return v; }
};
template <class R> struct Cast<bool_bits, complex_of<R>> {
    static __device__ bool_bits of(complex_of<R> v) {
        return bool_bits{
            static_cast<unsigned char>(Cast<bool_bits, R>::of(v.re).bits | Cast<bool_bits, R>::of(v.im).bits)};
    }
};
template <class R, class S> struct Cast<complex_of<R>, S> {
    static __device__ complex_of<R> of(S v) { return complex_of<R>{Cast<R, S>::of(v), R(0)}; }
};
template <class R> struct Cast<complex_of<R>, half_bits> {
    static __device__ complex_of<R> of(half_bits v) { return complex_of<R>{Cast<R, float>::of(as_float(v)), R(0)}; }
};
template <class R> struct Cast<complex_of<R>, bool_bits> {
    static __device__ complex_of<R> of(bool_bits v) { return complex_of<R>{R(v.bits != 0), R(0)}; }
};
template <class R, class Q> struct Cast<complex_of<R>, complex_of<Q>> {
    static __device__ complex_of<R> of(complex_of<Q> v) {
        return complex_of<R>{Cast<R, Q>::of(v.re), Cast<R, Q>::of(v.im)};
    }
};
template <class S> struct Cast<bfloat16_bits, S> {
    static __device__ bfloat16_bits of(S v) { return as_bfloat16(Cast<float, S>::of(v)); }
};
template <> struct Cast<bfloat16_bits, half_bits> {
    static __device__ bfloat16_bits of(half_bits v) { return as_bfloat16(as_float(v)); }
};
template <> struct Cast<bfloat16_bits, bool_bits> {
    static __device__ bfloat16_bits of(bool_bits v) { return as_bfloat16(v.bits != 0 ? 1.0f : 0.0f); }
};
