// Boxes of decoded chunks → outputs: crop, axis order, byte order and cast in one pass, as the scatter kernel does it.
#pragma once

#include "common.hpp"

namespace lc {

i64 dtype_nbytes(i64 dtype);

// What happens to an element between storage and output.
struct Conversion {
    i64 source = LC_U8, target = LC_U8;
    bool swapped = false;
    bool is_copy() const { return source == target && !swapped; }
};

// A box of elements: extents, and bytes between neighbours in both memories.
struct Box {
    i64 rank = 0;
    i64 extent[LC_MAX_RANK] = {}, source_strides[LC_MAX_RANK] = {}, target_strides[LC_MAX_RANK] = {};
};

// Cast as NumPy's astype, numbers that the new dtype cannot hold included where NumPy defines the result.
void copy_box(const Conversion &conversion, const Box &box, const u8 *source, u8 *target);
// Put one value, an element of the outputs, everywhere.
void fill_box(i64 itemsize, const u8 *value, const Box &box, u8 *target);

}  // namespace lc
