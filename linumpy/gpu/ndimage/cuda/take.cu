// Copy the nearest voxels by a table of offsets for each axis: out[i, j, k] = in[planes[i] + rows[j] + columns[k]], or
// `outside` if one of the three is negative. SciPy computes the tables, so that it also decides ties. Every voxel, of
// any dtype, is read and written once.
//
// Definitions: UNIT (an integer as wide as a voxel), PACK (neighbouring columns of a thread, written by one store if
// rows are aligned), MARCH (rows of a thread). Never a shape.
#include "number.cuh"

constexpr int LANES = 32, WARPS = 8;
struct alignas(sizeof(UNIT) * PACK) Packed { UNIT voxel[PACK]; };

extern "C" __global__ void __launch_bounds__(LANES *WARPS)
    take(const UNIT *__restrict__ in, UNIT *__restrict__ out, const int64 *__restrict__ planes,
         const int64 *__restrict__ rows, const int *__restrict__ columns, const UNIT *__restrict__ outside, int height,
         int width, int across, int down, int packed) {
    const unsigned row_of_tiles = blockIdx.x / static_cast<unsigned>(across),
                   plane = row_of_tiles / static_cast<unsigned>(down);
    const int x = static_cast<int>((blockIdx.x % across) * LANES + threadIdx.x % LANES) * PACK;
    const int y = static_cast<int>(row_of_tiles % down) * (WARPS * MARCH) + static_cast<int>(threadIdx.x / LANES);
    if (x >= width) return;
    const int64 front = planes[plane];
    int from[PACK];
    int64 row[MARCH];
#pragma unroll
    for (int i = 0; i < PACK; ++i) from[i] = columns[min(x + i, width - 1)];
#pragma unroll
    for (int k = 0; k < MARCH; ++k) row[k] = rows[min(y + k * WARPS, height - 1)];
    const UNIT outside_value = *outside;
    UNIT *const to = out + static_cast<int64>(plane) * height * width + x;
    // For voxels outside any voxel of the image is loaded, and replaced below: without branches all loads are in flight
    // at once.
    Packed values[MARCH];
#pragma unroll
    for (int k = 0; k < MARCH; ++k) {
        const UNIT *const line = in + ((front | row[k]) >= 0 ? front + row[k] : 0);
#pragma unroll
        for (int i = 0; i < PACK; ++i) values[k].voxel[i] = line[max(from[i], 0)];
    }
#pragma unroll
    for (int k = 0; k < MARCH; ++k)
#pragma unroll
        for (int i = 0; i < PACK; ++i)
            if ((front | row[k]) < 0 || from[i] < 0) values[k].voxel[i] = outside_value;
#pragma unroll
    for (int k = 0; k < MARCH; ++k) {
        if (y + k * WARPS >= height) return;
        UNIT *const line = to + static_cast<int64>(y + k * WARPS) * width;
        if (packed) {
            *reinterpret_cast<Packed *>(line) = values[k];
        } else {
#pragma unroll
            for (int i = 0; i < PACK; ++i)
                if (x + i < width) line[i] = values[k].voxel[i];
        }
    }
}
