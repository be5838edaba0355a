// Copy a volume into a layout of volume.cuh, a thread for each voxel. Definitions: those of volume.cuh, with LAYOUT 1
// to 3.
#include "number.cuh"
#include "elements.cuh"
#include "philox.cuh"
#include "volume.cuh"

constexpr int THREADS = 256;

// blockIdx.y: the channel.
extern "C" __global__ void __launch_bounds__(THREADS)
    pack(const SOURCE *__restrict__ linear, SOURCE *__restrict__ packed, const Volume volume) {
    const int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= volume.voxels) return;
    linear += blockIdx.y * volume.voxels;
    packed += blockIdx.y * volume.packed;
    const int x = static_cast<int>(i % volume.dims[2]);
    const int64 line = i / volume.dims[2];
    const int y = static_cast<int>(line % volume.dims[1]), z = static_cast<int>(line / volume.dims[1]);
#if LAYOUT == 1
    packed[in_brick_z(z, brick_plane(volume)) + in_brick_y(y, brick_row(volume)) + in_brick_x(x)] = linear[i];
#else
    const Axis at[3] = {{z, 0, true}, {y, 0, true}, {x, 0, true}};
    const Corners all = in_rows(linear, at, volume);
    constexpr int N = LAYOUT == 2 ? 4 : 8;
#if LAYOUT == 2
    SOURCE *const target = packed + N * static_cast<int64>(quad_of(z, y, x, volume));
#else
    SOURCE *const target = packed + N * i;
#endif
#pragma unroll
    for (int k = 0; k < N; ++k) target[k] = all.v[k];
#endif
}
