// The list of the boxes that may contain a point, as in linumpy.sampling.fields.box_lists.
struct Lists {
    float scale[3];  // cells per unit of length
    int cells[3];
};
struct alignas(8) List { int start, count; };

// Scale a point of the unit cube; points outside are moved to its border. Returns 0, or NaN for a point
// that is not finite.
__device__ inline float point_at(const float *__restrict__ coords, int64 i, const float (&extent)[3],
                                 float (&point)[3]) {
    float nan_or_zero = 0;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
        const float coord = coords[3 * i + axis];
        nan_or_zero += coord - coord;
        point[axis] = fminf(fmaxf(coord, 0.0f), 1.0f) * extent[axis];
    }
    return nan_or_zero;
}

__device__ inline List list_at(const Lists &lists, const List *__restrict__ table, const float (&point)[3]) {
    float position[3];
    int cell[3];
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
        position[axis] = point[axis] * lists.scale[axis];
        cell[axis] = max(0, min(static_cast<int>(position[axis]), lists.cells[axis] - 1));
    }
    const List list = table[(static_cast<int64>(cell[0]) * lists.cells[1] + cell[1]) * lists.cells[2] + cell[2]];
    if (list.count >= 0) return list;
    const int along = -list.count;
    int row = 0;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
        const int inner = static_cast<int>((position[axis] - cell[axis]) * along);
        row = row * along + max(0, min(inner, along - 1));
    }
    return table[static_cast<int64>(list.start) + row];
}
