// Resample a volume along one of its axes: each voxel of the result is a weighted sum of a few voxels in line.
//
// Compiled for SOURCE and TARGET (types of a voxel) and COMPUTE (float or double), never for a shape. Seen from the axis
// a C-contiguous volume is (outer, n, inner), and the result (outer, m, inner).

#include "number.cuh"
#include "elements.cuh"

// Threads are voxels of the result in the order of memory: neighbours read neighbours where the axis is not the last
// one, and windows that overlap where it is.
extern "C" __global__ void resample_axis(
    const SOURCE *__restrict__ source, TARGET *__restrict__ result, const int *__restrict__ first,
    const int *__restrict__ count, const COMPUTE *__restrict__ weights, int width, int n, int m, int64 inner,
    int64 total
) {
    const int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= total) return;
    const int64 row = i / inner, line = row / m;
    const int o = static_cast<int>(row - line * m);
    const SOURCE *voxel = source + (line * n + first[o]) * inner + (i - row * inner);
    const COMPUTE *weight = weights + static_cast<int64>(o) * width;
    COMPUTE sum = 0;
    for (int k = 0; k < count[o]; ++k) sum += weight[k] * Widen<COMPUTE, SOURCE>::of(voxel[k * inner]);
    store(result + i, Narrow<TARGET, COMPUTE>::of(sum));
}
