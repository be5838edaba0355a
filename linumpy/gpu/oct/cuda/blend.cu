// Blend overlapping tiles into a box of a stitched volume: each voxel is computed once, from all tiles that cover it.
//
// Compiled for SOURCE (type of a voxel) and ACC (float, double: type of computation), never for a shape. A thread
// computes MARCH planes at one lateral position: they share the tiles that cover this position, and the weights. A tile
// may be offset by a fraction of a voxel, the same for all its voxels, and is interpolated linearly. Samples that are
// not finite have no weight; a voxel without any finite sample becomes 0. Strides are in elements.

#include "number.cuh"
#include "stored.cuh"

constexpr int MARCH = 8;  // planes of a thread

struct Tile {  // RECORD in blend.py
    const SOURCE *voxels;  // of a box of the tile
    const float *weights;  // of the whole tile, (height, width)
    int64 stride[3];  // along depth and both lateral axes
    int corner[2];  // lateral position of the result's first voxel in the tile, whole voxels
    int begin[2];  // lateral offset of the box in the tile
    float fraction[2];  // fraction of a voxel, from 0 to below 1, to add to `corner`
};
static_assert(sizeof(Tile) == 64, "as in blend.py");

// Interpolate between four neighbours. A step of 0 leads to the same voxel, which is not read again.
template <class T> __device__ inline ACC between(const T *at, int64 down, int64 right, ACC fy, ACC fx) {
    ACC upper = number(at[0]);
    if (right) upper += fx * (number(at[right]) - upper);
    if (!down) return upper;
    ACC lower = number(at[down]);
    if (right) lower += fx * (number(at[down + right]) - lower);
    return upper + fy * (lower - upper);
}

extern "C" __global__ void __launch_bounds__(128)
    blend_tiles(const Tile *tiles, SOURCE *out, int count, int depth, int rows, int columns, int height, int width,
                int64 out_z, int64 out_y, int64 out_x) {
    const int64 position = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int row = static_cast<int>(position / columns), column = static_cast<int>(position % columns);
    if (row >= rows) return;
    const int z = blockIdx.y * MARCH, planes = depth - z < MARCH ? depth - z : MARCH;
    ACC mean[MARCH], total[MARCH];
#pragma unroll
    for (int k = 0; k < MARCH; ++k) mean[k] = total[k] = 0;
    for (int t = 0; t < count; ++t) {
        const Tile tile = tiles[t];
        const int y = row + tile.corner[0], x = column + tile.corner[1];
        const int below = tile.fraction[0] > 0, beside = tile.fraction[1] > 0;
        if (y < 0 || x < 0 || y + below >= height || x + beside >= width) continue;
        const ACC fy = tile.fraction[0], fx = tile.fraction[1];
        const int64 down = below * tile.stride[1], right = beside * tile.stride[2];
        const ACC weight = between(tile.weights + static_cast<int64>(y) * width + x, static_cast<int64>(below) * width,
                                   static_cast<int64>(beside), fy, fx);
        const SOURCE *at = tile.voxels + z * tile.stride[0] + (y - tile.begin[0]) * tile.stride[1] +
                           (x - tile.begin[1]) * tile.stride[2];
#pragma unroll
        for (int k = 0; k < MARCH; ++k) {
            if (k >= planes) break;
            const ACC sample = between(at + k * tile.stride[0], down, right, fy, fx);
            if (!(sample - sample == 0)) continue;  // NaN or infinite
            total[k] += weight;
            mean[k] += weight / total[k] * (sample - mean[k]);  // equal samples are their own mean
        }
    }
    SOURCE *to = out + z * out_z + row * out_y + column * out_x;
#pragma unroll
    for (int k = 0; k < MARCH; ++k)
        if (k < planes) to[k * out_z] = Stored<SOURCE>::of(mean[k]);
}
