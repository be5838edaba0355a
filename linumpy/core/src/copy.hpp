// Copies boxes of decoded chunks to outputs: crop, axis order, byte order and cast in one pass, as the scatter kernel.
#pragma once

#include "common.hpp"

namespace lc {

i64 dtype_nbytes(i64 dtype);

// How an element is converted from storage to output.
struct Conversion {
    i64 source = LC_U8, target = LC_U8;  // lc_dtype
    bool swapped = false;  // whether the stored byte order differs from this machine's
    bool is_copy() const { return source == target && !swapped; }
};

// A box of elements: extents, and strides in bytes in both memories.
struct Box {
    i64 rank = 0;
    i64 extent[LC_MAX_RANK] = {}, source_strides[LC_MAX_RANK] = {}, target_strides[LC_MAX_RANK] = {};
};

// Copy a box, and cast as NumPy's astype does. A float out of the range of an integer type, for which NumPy's result is
// undefined, is clamped, and NaN becomes 0.
void copy_box(const Conversion &conversion, const Box &box, const u8 *source, u8 *target);
// Fill a box with one value: an element of the output, of `itemsize` bytes.
void fill_box(i64 itemsize, const u8 *value, const Box &box, u8 *target);

// Convert float16 bit by bit: every compiler gives the same result, and NaN payloads are kept.
float float_of_half(uint16_t half);

}  // namespace lc
