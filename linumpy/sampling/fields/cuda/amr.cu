// Sample bricks of cells of several levels: the sum of w * value divided by the sum of w, over the hat functions w of
// all cells. The hat function of a cell is 1 at the centre, falls linearly, and is two cells wide along each axis.
#include "number.cuh"
#include "box_lists.cuh"

struct alignas(16) Brick {
    float lower[3];  // from the corner of the domain
    float cells;  // per unit of length
    int64 offset;  // of its values
    unsigned short size[3], unused;
};

struct Frame {
    float extent[3];  // of the domain
    float background;
    Lists lists;
};

struct Sum { float values, weights; };

__device__ void add_brick(const Brick &brick, const float *__restrict__ values, const float (&point)[3], Sum &sum) {
    int low[3];
    float weight[3];
    bool outside = false;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
        const float at = (point[axis] - brick.lower[axis]) * brick.cells - 0.5f;
        outside |= !(at > -1.0f && at < brick.size[axis]);
        const float floor = floorf(at);
        low[axis] = static_cast<int>(floor);
        weight[axis] = at - floor;
    }
    if (outside) return;
    float share[8], value[8];
#pragma unroll
    for (int corner = 0; corner < 8; ++corner) {  // all eight loads are issued before the first is waited for
        const int x = low[0] + (corner & 1), y = low[1] + (corner >> 1 & 1), z = low[2] + (corner >> 2);
        const bool valid = x >= 0 && y >= 0 && z >= 0 && x < brick.size[0] && y < brick.size[1] && z < brick.size[2];
        const float full = (corner & 1 ? weight[0] : 1 - weight[0]) * (corner & 2 ? weight[1] : 1 - weight[1]) *
                           (corner & 4 ? weight[2] : 1 - weight[2]);
        share[corner] = valid ? full : 0.0f;
        const int64 row = static_cast<int64>(z) * brick.size[1] + y;
        value[corner] = share[corner] != 0 ? values[brick.offset + row * brick.size[0] + x] : 0.0f;
    }
#pragma unroll
    for (int corner = 0; corner < 8; ++corner) {
        sum.values += share[corner] * value[corner];
        sum.weights += share[corner];
    }
}

extern "C" __global__ void __launch_bounds__(256)
    amr(const float *__restrict__ coords, float *__restrict__ out, int64 count, const Frame *__restrict__ frame,
        const List *__restrict__ table, const int *__restrict__ items, const Brick *__restrict__ bricks,
        const float *__restrict__ values) {
    const int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float point[3];
    const float nan_or_zero = point_at(coords, i, frame->extent, point);
    const List list = list_at(frame->lists, table, point);
    Sum sum{0, 0};
    for (int k = 0; k < list.count; ++k) add_brick(bricks[items[list.start + k]], values, point, sum);
    const float value = sum.weights > 0 ? sum.values / sum.weights : frame->background;
    out[i] = value + nan_or_zero;
}
