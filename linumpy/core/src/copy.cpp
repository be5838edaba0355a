#include "copy.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <type_traits>
#include <utility>

namespace lc {

float float_of_half(uint16_t half) {
    const u32 sign = static_cast<u32>(half & 0x8000u) << 16, exponent = (half >> 10) & 31, mantissa = half & 1023u;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
    if (exponent) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
    const float small = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<u32>(small));
}

namespace {

struct Bool { u8 bits; };
struct Half { uint16_t bits; };
struct BFloat16 { uint16_t bits; };
template <class R> struct Complex { R re, im; };

// The C++ type of each code of lc_dtype.
template <i64 CODE> struct TypeOf;
template <> struct TypeOf<LC_BOOL> { using type = Bool; };
template <> struct TypeOf<LC_U8> { using type = u8; };
template <> struct TypeOf<LC_U16> { using type = uint16_t; };
template <> struct TypeOf<LC_U32> { using type = u32; };
template <> struct TypeOf<LC_U64> { using type = u64; };
template <> struct TypeOf<LC_I8> { using type = int8_t; };
template <> struct TypeOf<LC_I16> { using type = int16_t; };
template <> struct TypeOf<LC_I32> { using type = int32_t; };
template <> struct TypeOf<LC_I64> { using type = i64; };
template <> struct TypeOf<LC_F16> { using type = Half; };
template <> struct TypeOf<LC_F32> { using type = float; };
template <> struct TypeOf<LC_F64> { using type = double; };
template <> struct TypeOf<LC_C64> { using type = Complex<float>; };
template <> struct TypeOf<LC_C128> { using type = Complex<double>; };
template <> struct TypeOf<LC_BFLOAT16> { using type = BFloat16; };

constexpr i64 SOURCES = LC_BFLOAT16, TARGETS = LC_BFLOAT16 + 1;
constexpr std::array<i64, TARGETS> NBYTES = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 8, 16, 2};

// Convert to float16 with a single rounding: to nearest, ties to even.
Half to_half(double d) {
    const u64 bits = std::bit_cast<u64>(d);
    const uint16_t sign = static_cast<uint16_t>(bits >> 48 & 0x8000u);
    const u64 magnitude = bits & ~(u64(1) << 63);
    if (magnitude > 0x7ff0000000000000ull) {
        const uint16_t payload = static_cast<uint16_t>(magnitude >> 42 & 0x3ffu);
        return {static_cast<uint16_t>(sign | 0x7c00u | (payload ? payload : 1))};
    }
    const i64 exponent = static_cast<i64>(magnitude >> 52) - 1023;
    if (exponent > 15) return {static_cast<uint16_t>(sign | 0x7c00u)};
    if (exponent < -25) return {sign};
    const u64 mantissa = (magnitude & 0xfffffffffffffull) | u64(1) << 52;
    const int shift = exponent >= -14 ? 42 : static_cast<int>(42 + (-14 - exponent));
    const u64 kept = mantissa >> shift, rest = mantissa & ((u64(1) << shift) - 1), tie = u64(1) << (shift - 1);
    u64 value = kept + (rest > tie || (rest == tie && (kept & 1)));
    if (exponent >= -14) value += static_cast<u64>(exponent + 14) << 10;  // the hidden bit adds one to the exponent
    return {static_cast<uint16_t>(sign | value)};
}

BFloat16 to_bfloat16(float f) {
    const u32 bits = std::bit_cast<u32>(f);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const u32 rounded = is_nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return {static_cast<uint16_t>(rounded)};
}

template <class S> constexpr bool is_complex = false;
template <class R> constexpr bool is_complex<Complex<R>> = true;

// A stored number as an arithmetic type of C++: float16 as float, a bool as 0 or 1.
template <class S> auto arithmetic(S v) {
    if constexpr (std::is_same_v<S, Half>) return float_of_half(v.bits);
    else if constexpr (std::is_same_v<S, Bool>) return static_cast<u8>(v.bits != 0);
    else return v;
}

// Convert a float to an integer as the scatter kernel does: values out of range are clamped, and NaN becomes 0.
template <class T, class F> T to_integer(F v) {
    // The first number beyond the range is a power of two, which every float type represents.
    constexpr F END = static_cast<F>(std::numeric_limits<T>::max() / 2 + 1) * 2;
    constexpr F BEGIN = static_cast<F>(std::numeric_limits<T>::min());
    if (!(v > BEGIN)) return v <= BEGIN ? std::numeric_limits<T>::min() : T(0);
    return v >= END ? std::numeric_limits<T>::max() : static_cast<T>(v);
}

template <class T, class S> T cast(S value) {
    if constexpr (std::is_same_v<T, S>) {
        return value;
    } else if constexpr (is_complex<S>) {
        if constexpr (is_complex<T>)
            return {static_cast<decltype(T::re)>(value.re), static_cast<decltype(T::re)>(value.im)};
        else if constexpr (std::is_same_v<T, Bool>) return {static_cast<u8>(value.re != 0 || value.im != 0)};
        else return cast<T>(value.re);
    } else {
        const auto v = arithmetic(value);
        if constexpr (is_complex<T>) return {static_cast<decltype(T::re)>(v), 0};
        else if constexpr (std::is_same_v<T, Bool>) return {static_cast<u8>(v != 0)};
        else if constexpr (std::is_same_v<T, BFloat16>) return to_bfloat16(static_cast<float>(v));
        else if constexpr (std::is_same_v<T, Half>) {
            // As in the scatter kernel, all types but double are first converted to float.
            if constexpr (std::is_same_v<decltype(v), const double>) return to_half(v);
            else return to_half(static_cast<double>(static_cast<float>(v)));
        } else if constexpr (std::is_floating_point_v<decltype(+v)> && std::is_integral_v<T>) return to_integer<T>(v);
        else return static_cast<T>(v);
    }
}

template <class S> S load(const u8 *p) {
    S value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

template <class S> S reversed(S value) {
    if constexpr (is_complex<S>) {
        return {reversed(value.re), reversed(value.im)};
    } else {
        auto bytes = std::bit_cast<std::array<u8, sizeof(S)>>(value);
        std::reverse(bytes.begin(), bytes.end());
        return std::bit_cast<S>(bytes);
    }
}

using Row = void (*)(const u8 *from, i64 from_step, u8 *to, i64 to_step, i64 count);

template <class S, class T, bool SWAPPED>
inline void convert(const u8 *from, i64 from_step, u8 *to, i64 to_step, i64 count) {
    for (i64 n = 0; n < count; ++n) {
        S value = load<S>(from + n * from_step);
        if constexpr (SWAPPED) value = reversed(value);
        const T result = cast<T>(value);
        std::memcpy(to + n * to_step, &result, sizeof result);
    }
}

template <class S, class T, bool SWAPPED>
void row(const u8 *from, i64 from_step, u8 *to, i64 to_step, i64 count) {
    if (from_step == sizeof(S) && to_step == sizeof(T)) convert<S, T, SWAPPED>(from, sizeof(S), to, sizeof(T), count);
    else convert<S, T, SWAPPED>(from, from_step, to, to_step, count);
}

template <bool SWAPPED, size_t... N> constexpr std::array<Row, sizeof...(N)> table(std::index_sequence<N...>) {
    return {&row<typename TypeOf<N / TARGETS>::type, typename TypeOf<N % TARGETS>::type, SWAPPED>...};
}
constexpr auto ROWS = table<false>(std::make_index_sequence<SOURCES * TARGETS>());
constexpr auto SWAPPED_ROWS = table<true>(std::make_index_sequence<SOURCES * TARGETS>());

template <i64 SIZE> void copy_row(const u8 *from, i64 from_step, u8 *to, i64 to_step, i64 count) {
    if (from_step == SIZE && to_step == SIZE) {
        std::memcpy(to, from, static_cast<size_t>(count * SIZE));
        return;
    }
    for (i64 n = 0; n < count; ++n) std::memcpy(to + n * to_step, from + n * from_step, SIZE);
}

Row copy_row_of(i64 itemsize) {
    switch (itemsize) {
        case 1:
            return copy_row<1>;
        case 2:
            return copy_row<2>;
        case 4:
            return copy_row<4>;
        case 8:
            return copy_row<8>;
        default:
            return copy_row<16>;
    }
}

// The same box with fewer axes: axes of one element are left out, axes are sorted by descending stride of the output,
// and neighbouring axes that are contiguous in both memories are merged.
Box simplified(const Box &box) {
    int order[LC_MAX_RANK], axes = 0;
    for (int a = 0; a < box.rank; ++a)
        if (box.extent[a] != 1) order[axes++] = a;
    std::stable_sort(order, order + axes, [&](int a, int b) { return box.target_strides[a] > box.target_strides[b]; });
    Box result;
    for (int n = 0; n < axes; ++n) {
        const int a = order[n];
        const i64 last = result.rank - 1;
        if (last >= 0 && result.source_strides[last] == box.source_strides[a] * box.extent[a] &&
            result.target_strides[last] == box.target_strides[a] * box.extent[a]) {
            result.extent[last] *= box.extent[a];
            result.source_strides[last] = box.source_strides[a];
            result.target_strides[last] = box.target_strides[a];
            continue;
        }
        result.extent[result.rank] = box.extent[a];
        result.source_strides[result.rank] = box.source_strides[a];
        result.target_strides[result.rank++] = box.target_strides[a];
    }
    return result;
}

// Call `each(source_offset, target_offset)` for every row along the last axis.
template <class Each> void for_rows(const Box &box, Each each) {
    i64 index[LC_MAX_RANK] = {};
    i64 from = 0, to = 0;
    for (;;) {
        each(from, to);
        i64 axis = box.rank - 2;
        for (; axis >= 0; --axis) {
            from += box.source_strides[axis];
            to += box.target_strides[axis];
            if (++index[axis] < box.extent[axis]) break;
            from -= box.source_strides[axis] * box.extent[axis];
            to -= box.target_strides[axis] * box.extent[axis];
            index[axis] = 0;
        }
        if (axis < 0) return;
    }
}

bool is_empty(const Box &box) {
    return std::any_of(box.extent, box.extent + box.rank, [](i64 n) { return n < 1; });
}

}  // namespace

i64 dtype_nbytes(i64 dtype) { return NBYTES[static_cast<size_t>(dtype)]; }

void copy_box(const Conversion &conversion, const Box &box, const u8 *source, u8 *target) {
    if (is_empty(box)) return;
    const i64 pair = conversion.source * TARGETS + conversion.target;
    const Row row = conversion.is_copy() ? copy_row_of(dtype_nbytes(conversion.source))
                    : conversion.swapped ? SWAPPED_ROWS[static_cast<size_t>(pair)]
                                         : ROWS[static_cast<size_t>(pair)];
    const Box simple = simplified(box);
    if (!simple.rank) return row(source, 0, target, 0, 1);
    const i64 last = simple.rank - 1, step = simple.source_strides[last], to_step = simple.target_strides[last];
    for_rows(simple, [&](i64 from, i64 to) { row(source + from, step, target + to, to_step, simple.extent[last]); });
}

void fill_box(i64 itemsize, const u8 *value, const Box &box, u8 *target) {
    if (is_empty(box)) return;
    Box same_strides = box;
    std::copy(box.target_strides, box.target_strides + LC_MAX_RANK, same_strides.source_strides);
    const Box simple = simplified(same_strides);
    if (!simple.rank) {
        std::memcpy(target, value, static_cast<size_t>(itemsize));
        return;
    }
    const Row row = copy_row_of(itemsize);
    const i64 last = simple.rank - 1, to_step = simple.target_strides[last];
    for_rows(simple, [&](i64, i64 to) { row(value, 0, target + to, to_step, simple.extent[last]); });
}

}  // namespace lc
