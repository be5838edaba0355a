// Conversions from types of array elements to the type of computation C, float or double (Widen), and back (Narrow).
//
// Narrow rounds to integers, halves away from zero, and saturates; NaN becomes 0. Include after number.cuh, which
// converts half precision.

typedef unsigned long long uint64;

template <class C, class S> struct Widen {
    static __device__ __forceinline__ C of(S v) { return static_cast<C>(v); }
};
template <class C> struct Widen<C, half_bits> {
    static __device__ __forceinline__ C of(half_bits v) { return as_float(v); }
};
// Small integers become floats by placing them in the mantissa of 2^23 (`raised`) and subtracting 2^23 (`of`): additions
// run at twice the rate of conversions, and a linear sample of three axes needs eight of them.
template <class S> struct WidenSmall {
    static __device__ __forceinline__ float raised(S v) { return __int_as_float(0x4B000000 | v); }
    static __device__ __forceinline__ float of(S v) { return raised(v) - 8388608.0f; }
};
template <> struct Widen<float, unsigned char> : WidenSmall<unsigned char> {};
template <> struct Widen<float, unsigned short> : WidenSmall<unsigned short> {};
template <> struct Widen<float, short> {
    static __device__ __forceinline__ float raised(short v) {
        return __int_as_float(0x4B000000 | ((v ^ 0x8000) & 0xffff));
    }
    static __device__ __forceinline__ float of(short v) { return raised(v) - 8421376.0f; }
};

__device__ __forceinline__ float away_from_zero(float v) { return roundf(v); }
__device__ __forceinline__ double away_from_zero(double v) { return round(v); }

template <class T> struct Range;
template <> struct Range<signed char> { static constexpr signed char low = -128, high = 127; };
template <> struct Range<unsigned char> { static constexpr unsigned char low = 0, high = 255; };
template <> struct Range<short> { static constexpr short low = -32768, high = 32767; };
template <> struct Range<unsigned short> { static constexpr unsigned short low = 0, high = 65535; };
template <> struct Range<int> { static constexpr int low = -2147483647 - 1, high = 2147483647; };
template <> struct Range<unsigned> { static constexpr unsigned low = 0, high = 4294967295u; };
template <> struct Range<int64> {
    static constexpr int64 low = -9223372036854775807ll - 1, high = 9223372036854775807ll;
};
template <> struct Range<uint64> { static constexpr uint64 low = 0, high = 18446744073709551615ull; };

template <class T, class C> struct Narrow {
    static __device__ __forceinline__ T of(C v) {
        const C whole = away_from_zero(v);
        if (whole != whole) return 0;
        if (whole <= static_cast<C>(Range<T>::low)) return Range<T>::low;
        if (whole >= static_cast<C>(Range<T>::high)) return Range<T>::high;
        return static_cast<T>(whole);
    }
};
// Adding a half rounds to float: a value next to a tie may be treated as the tie.
template <class T> struct NarrowSmall {
    static __device__ __forceinline__ T of(float v) {
        if (Range<T>::low < 0 && v != v) return 0;
        const float inside = fminf(fmaxf(v, Range<T>::low), Range<T>::high);
        return static_cast<T>(static_cast<int>(inside + (Range<T>::low < 0 ? copysignf(0.5f, inside) : 0.5f)));
    }
};
template <> struct Narrow<unsigned char, float> : NarrowSmall<unsigned char> {};
template <> struct Narrow<unsigned short, float> : NarrowSmall<unsigned short> {};
template <> struct Narrow<signed char, float> : NarrowSmall<signed char> {};
template <> struct Narrow<short, float> : NarrowSmall<short> {};
template <class C> struct Narrow<float, C> {
    static __device__ __forceinline__ float of(C v) { return static_cast<float>(v); }
};
template <class C> struct Narrow<double, C> {
    static __device__ __forceinline__ double of(C v) { return v; }
};
template <> struct Narrow<half_bits, float> {
    static __device__ __forceinline__ half_bits of(float v) { return as_half(v); }
};
template <> struct Narrow<half_bits, double> {
    static __device__ __forceinline__ half_bits of(double v) { return as_half(v); }
};

// Streaming store: the output must not evict cached input.
template <class T> __device__ __forceinline__ void store(T *p, T v) { __stcs(p, v); }
__device__ __forceinline__ void store(half_bits *p, half_bits v) { __stcs(&p->bits, v.bits); }
