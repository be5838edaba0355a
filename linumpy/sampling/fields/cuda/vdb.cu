// Sample a sparse tree of voxels: a table of nodes of 128^3 voxels that cover the box; each node has 16^3 leaves of 8^3
// voxels. A negative entry is a tile: all its voxels have the value with index -1 - entry.
#include "number.cuh"

constexpr int LEAF_BITS = 3, NODE_BITS = 7, LEAF_VOXELS = 512, NODE_LEAVES = 4096;

struct Frame {
    int size[3];  // voxels of the box
    int shift[3];  // from the first voxel of the first node to the first voxel of the box
    int nodes[3];
    int channels;
    int64 stride;  // number of values of a channel in `leaves`
};

struct Tree {
    const Frame &frame;
    const int *nodes, *children;
    const float *leaves, *tiles;

    __device__ int find(int x, int y, int z) const {
        const int64 row = static_cast<int64>(x >> NODE_BITS) * frame.nodes[1] + (y >> NODE_BITS);
        const int node = nodes[row * frame.nodes[2] + (z >> NODE_BITS)];
        if (node < 0) return node;
        const int child = (x >> LEAF_BITS & 15) << 8 | (y >> LEAF_BITS & 15) << 4 | (z >> LEAF_BITS & 15);
        return children[static_cast<int64>(node) * NODE_LEAVES + child];
    }

    __device__ float value(int leaf, int x, int y, int z, int channel) const {
        if (leaf < 0) return tiles[static_cast<int64>(-1 - leaf) * frame.channels + channel];
        const int voxel = (x & 7) << 6 | (y & 7) << 3 | (z & 7);
        return leaves[channel * frame.stride + static_cast<int64>(leaf) * LEAF_VOXELS + voxel];
    }
};

__device__ float between(float a, float b, float weight) { return weight == 0 ? a : a + weight * (b - a); }

extern "C" __global__ void __launch_bounds__(256)
    vdb(const float *__restrict__ coords, float *__restrict__ out, int64 count, const Frame *__restrict__ frame,
        const int *__restrict__ nodes, const int *__restrict__ children, const float *__restrict__ leaves,
        const float *__restrict__ tiles) {
    const int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const Tree tree{*frame, nodes, children, leaves, tiles};
    int end[2][3];
    float weight[3];
    int split = 0;  // axes along which the two voxels lie in different leaves, as bits of a corner's number
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
        const int last = frame->size[axis] - 1;
        const float coord = coords[3 * i + axis];
        const float position = fminf(fmaxf(coord * frame->size[axis] - 0.5f, 0.0f), static_cast<float>(last));
        const int low = min(static_cast<int>(position), last);
        weight[axis] = position - low + (coord - coord);  // NaN where it is not finite
        end[0][axis] = low + frame->shift[axis];
        end[1][axis] = min(low + 1, last) + frame->shift[axis];
        if ((end[0][axis] ^ end[1][axis]) >> LEAF_BITS) split |= 4 >> axis;
    }
    int leaf[8];
#pragma unroll
    for (int corner = 0; corner < 8; ++corner) {
        const int same = corner & split;
        leaf[corner] = 0;
        if (same == corner) leaf[corner] = tree.find(end[corner >> 2][0], end[corner >> 1 & 1][1], end[corner & 1][2]);
    }
#pragma unroll
    for (int bit = 1; bit < 8; bit *= 2) {  // axis by axis, so that the array stays in registers
#pragma unroll
        for (int corner = 1; corner < 8; ++corner)
            if ((corner & bit) && !(split & bit)) leaf[corner] = leaf[corner ^ bit];
    }
    for (int channel = 0; channel < frame->channels; ++channel) {
        float value[8];
#pragma unroll
        for (int corner = 0; corner < 8; ++corner)
            value[corner] =
                tree.value(leaf[corner], end[corner >> 2][0], end[corner >> 1 & 1][1], end[corner & 1][2], channel);
#pragma unroll
        for (int corner = 0; corner < 8; corner += 2)
            value[corner] = between(value[corner], value[corner + 1], weight[2]);
#pragma unroll
        for (int corner = 0; corner < 8; corner += 4)
            value[corner] = between(value[corner], value[corner + 2], weight[1]);
        out[channel * count + i] = between(value[0], value[4], weight[0]);
    }
}
